"""Tiny checkpoints as AWQ and GPTQ write them, with codes, zeros and scales by chance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from safetensors.torch import load_file, save_file

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
V2, EIGHT, SYMMETRIC = GPTQ | {"checkpoint_format": "gptq_v2"}, GPTQ | {"bits": 8, "sym": True}, GPTQ | {"sym": True}


def in_int32(codes: np.ndarray, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """[n, m] → [n, m / shared] int32: the i-th `bits` bits hold the code at order[i]."""
    shared = 32 // bits
    packed = np.zeros((len(codes), codes.shape[1] // shared), np.uint64)
    for i in range(shared):
        packed |= codes[:, order[i] :: shared].astype(np.uint64) << np.uint64(bits * i)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def quantised(how: dict[str, Any], n: int, k: int, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """The tensors of a matrix [n, k] and the weight that they stand for."""
    bits, groups = how["bits"], k // how["group_size"]
    top = 1 << bits
    codes = rng.integers(0, top, (k, n))
    zeros = np.full((groups, n), top // 2) if how.get("sym") else rng.integers(0, top, (groups, n))
    scales = (rng.random((groups, n)) * 6 / top / np.sqrt(k)).astype(np.float16)
    weight = (codes - np.repeat(zeros, how["group_size"], 0)) * np.repeat(scales, how["group_size"], 0).astype(np.float32)
    if how["quant_method"] == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": in_int32(codes, 4, order), "qzeros": in_int32(zeros, 4, order)}
    else:
        order = tuple(range(32 // bits))
        stored = zeros if how.get("checkpoint_format") == "gptq_v2" else (zeros - 1) % top
        along_inputs = np.ascontiguousarray(in_int32(np.ascontiguousarray(codes.T), bits, order).numpy().T)
        tensors = {
            "qweight": torch.from_numpy(along_inputs),
            "qzeros": in_int32(stored, bits, order),
            "g_idx": torch.arange(k, dtype=torch.int32) // how["group_size"],
        }
    return tensors | {"scales": torch.from_numpy(scales)}, weight.T.astype(np.float32)


def write(folder: Path, how: dict[str, Any], **config: Any) -> dict[str, np.ndarray]:
    """A tiny Llama quantised like this, and beside it, in folder-dense, the same numbers as they are. Returns the quantised weights."""
    rng = np.random.default_rng(0)
    model = tiny.tiny_model("llama", **config)
    dense = folder.with_name(f"{folder.name}-dense")
    for place in (folder, dense):
        model.save_pretrained(place)
        tiny.byte_tokenizer().save_pretrained(place)
    tensors = load_file(folder / "model.safetensors")
    known, weights = dict(tensors), {}
    for name, old in known.items():
        if name.endswith("_proj.weight"):
            parts, weight = quantised(how, *old.shape, rng)
            tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
            del tensors[name]
            weights[name], known[name] = weight, torch.from_numpy(weight.copy())
    save_file(tensors, folder / "model.safetensors")
    save_file(known, dense / "model.safetensors")
    edit(folder, lambda config: config.update(quantization_config=how))
    return weights


def edit(folder: Path, change: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))

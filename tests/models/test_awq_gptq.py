"""Checkpoints of AWQ and GPTQ: their weights are (code - zero) · scale exactly, and a model of them writes what the same numbers would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_grouped import AWQ, EIGHT, GPTQ, SYMMETRIC, V2, edit, write

from ngramspec import Engine, SamplingParams
from ngramspec.errors import ModelNotFoundError, UnsupportedModelError
from ngramspec.models.loader import open_model

LAYOUTS = {"awq": AWQ, "gptq": GPTQ, "gptq_v2": V2, "gptq-8": EIGHT, "gptq-sym": SYMMETRIC, "gptq-8-zeros": EIGHT | {"sym": False}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_what_the_layout_says(tmp_path: Path, layout: str) -> None:
    weights = write(tmp_path / "model", LAYOUTS[layout])
    source = open_model(str(tmp_path / "model")).source
    kinds = {"gptq-8": "Q8_0", "gptq-sym": "Q4_0", "gptq-8-zeros": "F32"}
    for name, weight in weights.items():
        stored = source[name]
        assert (stored.kind, stored.shape) == (kinds.get(layout, "Q5_0"), weight.shape)
        assert np.array_equal(stored.float32(), weight), name
        for first, end in ((0, 1), (3, 11), (len(weight) - 5, len(weight))):
            assert np.array_equal(stored.read_values(first, end), weight[first:end])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_are_no_float16_make_numbers(tmp_path: Path, dtype: torch.dtype) -> None:
    """bfloat16 is read, too, and stays in blocks where it fits into float16."""
    weights, name = write(tmp_path / "model", SYMMETRIC), "model.layers.0.self_attn.q_proj"
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    scales = (tensors[f"{name}.scales"].float() * 2.001).to(dtype)
    codes = weights[f"{name}.weight"] / np.repeat(tensors[f"{name}.scales"].float().numpy().T, 32, 1)
    tensors[f"{name}.scales"] = scales
    save_file(tensors, path)
    stored = open_model(str(tmp_path / "model")).source[f"{name}.weight"]
    assert stored.kind == ("F32" if dtype == torch.float32 else "Q4_0")
    assert np.array_equal(stored.float32(), np.round(codes) * np.repeat(scales.float().numpy().T, 32, 1))


@pytest.mark.parametrize("layout", ["awq", "gptq-sym"])
def test_a_model_writes_what_the_same_numbers_would(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "model", LAYOUTS[layout])
    params, texts = SamplingParams(max_tokens=24, temperature=0.8, seed=1, ignore_eos=True), []
    for folder in ("model", "model-dense"):
        with Engine(str(tmp_path / folder), precision="float32", max_model_len=128, kv_memory=1 << 24) as engine:
            texts.append([engine.complete(prompt, params).token_ids for prompt in ("the tree", "a house of a house")])
    assert texts[0] == texts[1]
    with Engine(str(tmp_path / "model"), max_model_len=128, kv_memory=1 << 24) as engine:
        assert engine.precision == "int8"
        assert engine.complete("the tree", params).exactness == "bitwise"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (AWQ | {"bits": 3}, "awq with bits 3 is not read; accepted: 4"),
        (AWQ | {"version": "gemv"}, "version 'gemv'.*'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (GPTQ | {"bits": 3}, "gptq with bits 3.*4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'gptq', 'gptq_v2'"),
        (GPTQ | {"dynamic": {"lm_head": {"bits": 8}}}, "dynamic"),
    ],
)
def test_other_layouts_are_refused_by_field_and_value(tmp_path: Path, how: dict[str, Any], said: str) -> None:
    write(tmp_path / "model", GPTQ)
    edit(tmp_path / "model", lambda config: config.update(quantization_config=how))
    with pytest.raises(UnsupportedModelError, match=said):
        open_model(str(tmp_path / "model"))


def reordered(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()


def without_zeros(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.self_attn.q_proj.qzeros"]


def odd_groups(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("qzeros", "scales"):
        name = f"model.layers.0.self_attn.q_proj.{part}"
        tensors[name] = tensors[name].repeat(2, 1)


def no_groups(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("qzeros", "scales"):
        name = f"model.layers.0.self_attn.q_proj.{part}"
        tensors[name] = tensors[name][:0].contiguous()


def order_in_bytes(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].to(torch.uint8)


def of_another_model(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("qweight", "qzeros", "scales"):
        name = f"model.layers.0.self_attn.q_proj.{part}"
        tensors[name] = tensors[name][:, : tensors[name].shape[1] // 2].contiguous()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (reordered, "layers.1.mlp.up_proj has its inputs in another order"),
        (without_zeros, "q_proj has no qzeros"),
        (odd_groups, "q_proj has 4 groups in 64 inputs"),
        (no_groups, "q_proj has 0 groups in 64 inputs"),
        (order_in_bytes, "layers.1.mlp.up_proj has its inputs in another order.*in int32"),
        (of_another_model, "tensors are not those of LlamaForCausalLM"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: Any, said: str) -> None:
    write(tmp_path / "model", GPTQ)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(UnsupportedModelError, match=said):
        open_model(str(tmp_path / "model"))


def test_a_file_that_shrinks_is_a_typed_error(tmp_path: Path) -> None:
    write(tmp_path / "model", GPTQ)
    source = open_model(str(tmp_path / "model")).source
    path = tmp_path / "model" / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ModelNotFoundError, match="ends at byte"):
        source["model.layers.1.mlp.up_proj.weight"].float32()

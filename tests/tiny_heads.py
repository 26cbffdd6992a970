"""Small Medusa heads, EAGLE and blockwise layers, in the formats in which they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import VOCAB

HIDDEN, INNER, N_HEADS, KV_HEADS = 64, 96, 4, 2


def medusa_tensors(n_heads: int = 3, n_blocks: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for i in range(n_heads):
        for block in range(n_blocks):
            tensors[f"{i}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=draw) * 0.2
            tensors[f"{i}.{block}.linear.bias"] = torch.randn(HIDDEN, generator=draw) * 0.2
        tensors[f"{i}.{n_blocks}.weight"] = torch.randn(VOCAB, HIDDEN, generator=draw)
    return tensors


def write_medusa(folder: Path, tensors: dict[str, torch.Tensor], n_heads: int = 3, n_blocks: int = 1, *, pickled: bool = False) -> Path:
    config = {"medusa_num_heads": n_heads, "medusa_num_layers": n_blocks, "base_model_name_or_path": "tiny"}
    return _write(folder, config, tensors, "medusa_lm_head.pt" if pickled else "medusa_lm_head.safetensors")


def blockwise_tensors(block: int = 4, units: int = 24, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "hidden.weight": (block * units, HIDDEN),
        "hidden.bias": (block * units,),
        "output.weight": (block * HIDDEN, block * units),
        "output.bias": (block * HIDDEN,),
    }
    return {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in shapes.items()}


def write_blockwise(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    return _write(folder, {"block_size": 4, "hidden_size": 24} | config, tensors, "blockwise.safetensors")


def eagle_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Small enough that three levels do not make a thousand times as much of a rounding."""
    draw = torch.Generator().manual_seed(seed)
    kv = HIDDEN // N_HEADS * KV_HEADS
    shapes = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "fc.bias": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "layers.0.self_attn.k_proj.weight": (kv, HIDDEN),
        "layers.0.self_attn.v_proj.weight": (kv, HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, INNER),
    }
    tensors = {name: torch.randn(shape, generator=draw) * 0.1 for name, shape in shapes.items()}
    tensors["layers.0.post_attention_layernorm.weight"] = torch.rand(HIDDEN, generator=draw) + 0.5
    return tensors


EAGLE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 256,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 500.0,
    "vocab_size": VOCAB,
}


def write_eagle(folder: Path, tensors: dict[str, torch.Tensor], *, pickled: bool = False, **config: Any) -> Path:
    return _write(folder, EAGLE_CONFIG | config, tensors, "pytorch_model.bin" if pickled else "model.safetensors")


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder

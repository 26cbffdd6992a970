"""Provide published shapes of models for random weights: a name, or the path of a config.json, becomes a config."""

from __future__ import annotations

from typing import Any

from ngramspec.datastore.cache_dir import expand_home
from ngramspec.errors import ModelNotFoundError
from ngramspec.models.header_limits import read_object

PREFIX = "random:"
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}


def _llama_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "bos_token_id": 248044,
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
    "vocab_size": 248320,
}

_LFM2: dict[str, Any] = {
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "max_position_embeddings": 128000,
    "norm_eps": 1e-05,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "vocab_size": 65536,
}

# Published config.json of each model, reduced to what determines the computation.
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rope_scaling": _llama_rope(8.0),
        "tie_word_embeddings": False,
    },
    "Llama-3.1-70B": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "rope_scaling": _llama_rope(8.0),
        "tie_word_embeddings": False,
    },
    "Llama-3.2-1B": _LLAMA
    | {
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "rope_scaling": _llama_rope(32.0),
        "tie_word_embeddings": True,
    },
    "Llama-3.2-3B": _LLAMA
    | {
        "head_dim": 128,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "rope_scaling": _llama_rope(32.0),
        "tie_word_embeddings": True,
    },
    "LFM2-350M": _LFM2 | {"block_ff_dim": 6656, "hidden_size": 1024, "num_attention_heads": 16},
    "LFM2-1.2B": _LFM2 | {"block_ff_dim": 12288, "hidden_size": 2048, "num_attention_heads": 32},
    "Qwen2.5-Coder-0.5B": {
        "model_type": "qwen2",
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen2.5-Coder-7B": {
        "model_type": "qwen2",
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "initializer_range": 0.02,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3.5-0.8B": _QWEN35
    | {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2}
    | {"linear_num_value_heads": 16, "tie_word_embeddings": True},
    "Qwen3.5-9B": _QWEN35
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_hidden_layers": 32, "num_key_value_heads": 4}
    | {"linear_num_value_heads": 32, "tie_word_embeddings": False},
    "SmolLM2-135M": {
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
}


def read_shape(spec: str) -> dict[str, Any]:
    """Return the config that "random:NAME" names: one of SHAPES, a config.json, or a folder that has one. Raises ModelNotFoundError."""
    name = spec.removeprefix(PREFIX)
    if name in SHAPES:
        return dict(SHAPES[name])
    path = expand_home(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelNotFoundError(f"there is no shape {name!r}; accepted: {', '.join(SHAPES)}, or the path of a config.json")
    return read_object(path, spec)

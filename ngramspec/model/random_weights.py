"""Models of a known shape with random weights, for measuring what a pass costs where the real weights are not at hand.

A shape's name, or a config.json, enters; a transformers model leaves, made where it will run: no copy of it ever lies on the host. What it
writes means nothing, but it is not noise either: activations keep their size through the layers, attention picks a few keys out of
many, and logits are as peaked as a trained model's, so that tokens vary with the text and greedy text repeats now and then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, initialization
from transformers.pytorch_utils import Conv1D

from ngramspec.batch.errors import ModelNotFoundError, UnsupportedModelError
from ngramspec.model.limits import read_object

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
"""The published config.json of each, as far as it says what is computed."""

LOGIT_STD = 4.0
"""Standard deviation of the logits."""
QUERY_STD = 3.0
"""That of attention scores: with 1, hundreds of keys would be averaged away, and the text before would hardly count."""
_BIAS_STD = 0.1


def read_shape(spec: str) -> dict[str, Any]:
    """The config that "random:NAME" names: one of SHAPES, a config.json, or a folder that has one. Raises ModelNotFoundError."""
    name = spec.removeprefix(PREFIX)
    if name in SHAPES:
        return dict(SHAPES[name])
    path = Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ModelNotFoundError(f"there is no shape {name!r}; accepted: {', '.join(SHAPES)}, or the path of a config.json")
    return read_object(path, spec)


def empty_model(config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The model of a config with parameters on the "meta" device, which take no memory. Raises UnsupportedModelError."""
    rest = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "dtype", "torch_dtype")}
    try:
        # Buffers are small, and hold the angles of rotary embeddings. Parameters that take no memory need no values.
        with init_empty_weights(include_buffers=False), initialization.no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(str(config.get("model_type")), **rest), dtype=dtype
            )
        model.tie_weights()  # each parameter was replaced as it was registered
        return model
    except (
        StrictDataclassError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        RuntimeError,
    ) as error:
        raise UnsupportedModelError(f"transformers makes no decoder of this config: {error}") from error


def parameter_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's parameters, tied ones counted once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@torch.no_grad()
def fill(model: PreTrainedModel, device: str, seed: int = 0) -> PreTrainedModel:
    """Give an `empty_model` random parameters on the device, in evaluation mode: the same for the same seed and kind of device.

    Raises torch.OutOfMemoryError.
    """
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is filled once and stays tied
    norms = [m for m in model.base_model.modules() if getattr(m._parameters.get("weight"), "ndim", 0) == 1]
    for path, module in model.named_modules():
        for name, empty in list(module._parameters.items()):
            if empty is None:
                continue
            if empty not in made:
                values = torch.empty(empty.shape, dtype=empty.dtype, device=device)
                if values.dim() > 1:
                    gain = QUERY_STD if path.endswith("q_proj") else 1.0
                    n_in = values.shape[0] if isinstance(module, Conv1D) else values.shape[-1]
                    values.normal_(0.0, gain * n_in**-0.5, generator=generator)
                elif name == "bias":
                    values.normal_(0.0, _BIAS_STD, generator=generator)
                else:
                    values.fill_(LOGIT_STD if module is norms[-1] else 1.0)
                made[empty] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, made[empty])
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)

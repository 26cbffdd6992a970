"""Make models of a known shape with random weights, for measuring what a pass costs if the real weights are not at hand.

A config becomes a transformers model, made on its device: no copy of it ever lies on the host. Its output means nothing, but it is not
noise either: activations keep their size through the layers, attention picks a few keys out of many, and logits are as peaked as a trained
model's, so that tokens vary with the text and greedy text repeats now and then.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from ngramspec.errors import UnsupportedModelError

LOGIT_STD = 4.0  # Standard deviation of the logits.
# Standard deviation of attention scores: with 1, hundreds of keys would be averaged and the context would hardly matter.
QUERY_STD = 3.0
_BIAS_STD = 0.1
_UNLISTED = {
    "mistral4": "Mistral4"
}  # decoders that transformers lists as parts of other models alone, by type, and what classes begin with


def is_decoder(model_type: object) -> bool:
    """Return whether transformers has a text decoder of this type."""
    return isinstance(model_type, str) and (model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type in _UNLISTED)


def register_decoder(model_type: str) -> None:
    """Have AutoModelForCausalLM make decoders of this type, even if transformers does not list them."""
    if (name := _UNLISTED.get(model_type)) is not None:
        package = importlib.import_module(f"transformers.models.{model_type}")
        AutoModelForCausalLM.register(getattr(package, f"{name}Config"), getattr(package, f"{name}ForCausalLM"), exist_ok=True)


def make_config(config: dict[str, Any]) -> PreTrainedConfig:
    """Make transformers' object of a config. Raises what transformers raises."""
    rest = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "dtype", "torch_dtype")}
    return AutoConfig.for_model(str(config.get("model_type")), **rest)


def empty_model(config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """Make the model of a config with parameters on the "meta" device, which take no memory. Raises UnsupportedModelError."""
    try:
        register_decoder(str(config.get("model_type")))
        # Buffers are small, and hold the angles of rotary embeddings. Parameters that take no memory need no values.
        with init_empty_weights(include_buffers=False), initialization.no_init_weights():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(make_config(config), dtype=dtype)
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
    """Return the bytes of a model's parameters, tied ones counted once."""
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
                    gain = QUERY_STD if path.endswith(("q_proj", "q_b_proj")) else 1.0
                    n_in = values.shape[0] if isinstance(module, Conv1D) else values.shape[-1]
                    values.normal_(0.0, gain * n_in**-0.5, generator=generator)
                elif name == "A_log":  # of Gated DeltaNet, as its authors begin: -exp(A_log) · softplus(…) is the logarithm of the decay
                    values.uniform_(0.01, 16, generator=generator).log_()
                elif name == "dt_bias":
                    values.normal_(-4.0, 2.0, generator=generator)  # some heads forget at once, others after hundreds of tokens
                elif name == "bias":
                    values.normal_(0.0, _BIAS_STD, generator=generator)
                else:
                    values.fill_(LOGIT_STD if module is norms[-1] else 1.0)
                made[empty] = nn.Parameter(values, requires_grad=False)
            setattr(module, name, made[empty])
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)

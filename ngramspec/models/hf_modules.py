"""Read weights, biases and norms' constants from the modules of transformers' models, for the runners that replace these modules."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

ONE_PLUS = "LayerNorm1P"  # end of the name of a class whose weights are offsets from 1


def get_weight(module: nn.Module) -> torch.Tensor | None:
    """Return the weight [N, K] of a linear layer, whichever way round the module keeps it; None for another kind of module."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module) is Conv1D:
        return module.weight.detach().T.contiguous()
    return None


def get_bias(linear: nn.Module) -> torch.Tensor | None:
    """Return the bias [N] of such a layer, or of a router; None if it has none."""
    bias = getattr(linear, "bias", None)
    return bias.detach() if isinstance(bias, torch.Tensor) else None


def get_layer_norm(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None, float] | None:
    """Return (weight [N], bias [N] or None, eps) of a module whose class is named a LayerNorm, else None; the rest as `get_rms_norm`."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith(("LayerNorm", ONE_PLUS))
    if not named or not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    return weight.detach(), bias.detach() if isinstance(bias, torch.Tensor) else None, eps


def get_rms_norm(module: nn.Module) -> tuple[torch.Tensor, float] | None:
    """Return (weight [N], eps) of a module whose class is named an RMS norm, else None. How the module uses them is not checked here."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith("RMSNorm")
    if not named or not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    return weight.detach(), eps

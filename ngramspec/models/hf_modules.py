"""Reading weights, biases and norms' constants from the modules of transformers' models, for the runners that replace these modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """[N, K] of a linear layer, whichever way round the module keeps it; None for another kind of module."""
    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module) is Conv1D:
        return module.weight.detach().T.contiguous()
    return None


def bias_of(linear: nn.Module) -> torch.Tensor | None:
    """[N] of such a layer; None where it has none."""
    bias = linear.bias
    return bias.detach() if isinstance(bias, torch.Tensor) else None


def joined(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight [sum of N, K] above the other, and the biases [sum of N] likewise: zeros for a layer without, None where all are."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    return weight, torch.cat([weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach() for linear in linears])


def rms_norm(module: nn.Module) -> tuple[torch.Tensor, float] | None:
    """(weight [N], eps) of a module whose class is named an RMS norm; None for another kind. How it uses them is not checked here."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    named = type(module).__name__.endswith("RMSNorm")
    if not named or not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    return weight.detach(), eps

"""Compute small operations of a layer on the CPU in one call each instead of many: norm, activation of an MLP.

The module knows the parts of decoder layers, nothing of requests. A fused norm or MLP replaces modules of a class only after it has given
the same result on random input as the first of them (`replace_small_operations`), and whole layers are checked again by the runner. A
variant that computes something else keeps its own code. Every row is computed alone, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numba import get_num_threads
from torch import nn
from transformers.activations import GELUTanh

from ngramspec.backends.cpu.linear import CpuPackedLinear, SharedLinear
from ngramspec.backends.cpu.llama_layers import GELU, PLAIN_GELU, SILU, SQUARED_RELU
from ngramspec.backends.cpu.matmul import CpuProduct
from ngramspec.backends.cpu.row_loops import activate_rows, apply_gelu, norm_rows
from ngramspec.models.hf_modules import get_rms_norm


class RMSNorm(nn.Module):
    """A norm that computes x / sqrt(mean(x²) + eps) · (weight + offset) over the last axis [N]; float32."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = (weight + offset if offset else weight).detach().contiguous()
        self.eps, self.offset = np.float32(eps), offset

    def compute_rows(self, x: np.ndarray) -> np.ndarray:
        """Compute the norm of rows [T, N]."""
        out = np.empty_like(x)
        norm_rows(x, self.weight.numpy(), self.eps, out)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.compute_rows(x.reshape(-1, x.shape[-1]).contiguous().numpy())).view(x.shape)


class GatedMLP(nn.Module):
    """An MLP that computes down(b · activation(a · gate(x)) · up(x)) with gate and up as one matrix product.

    `activation` is SILU or GELU; `factors` are a and b.
    """

    def __init__(
        self, product: CpuProduct, down: CpuPackedLinear, activation: str, names: tuple[str, ...], factors: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        """`product`: of gate and up, or of one matrix with gate's rows before up's; `names`: of these and down in the module that this one
        replaces.
        """
        super().__init__()
        self.factors = factors
        self.product, self.down, self.activation, self.names = product, down, activation, names

    def compute_rows(self, x: np.ndarray, threads: int) -> np.ndarray:
        """Compute the MLP of rows [T, N]."""
        both, n = self.product.multiply(x, threads), self.down.in_features
        at = int(self.product.columns[1]) if len(self.product.sizes) > 1 else n
        mid = np.empty((len(both), n), np.float32)
        if self.factors != (1, 1):
            both[:, :n] *= np.float32(self.factors[0])
        activate_rows(both, at, self.activation == GELU, mid)
        if self.factors != (1, 1):
            mid *= np.float32(self.factors[1])
        return self.down.product.multiply(mid, threads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.compute_rows(x.reshape(-1, x.shape[-1]).contiguous().numpy(), get_num_threads())
        return torch.from_numpy(y)[:, : self.down.out_features].reshape(x.shape)


class PlainMLP(nn.Module):
    """An MLP that computes down(activation(up(x))); `activation` is PLAIN_GELU or SQUARED_RELU."""

    def __init__(self, up: CpuPackedLinear, down: CpuPackedLinear, activation: str, names: tuple[str, ...]) -> None:
        """`names`: of up and down in the module that this one replaces."""
        super().__init__()
        self.up, self.down, self.activation, self.names, self.factors = up, down, activation, names, (1.0, 1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if self.activation == PLAIN_GELU:
            return self.down(nn.functional.gelu(y, approximate="tanh"))
        return self.down(nn.functional.relu(y).square())


class Gelu(nn.Module):
    """GELU by its approximation with tanh. torch's own has other last bits for what is left over after the last whole vector."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=torch.float32)
        apply_gelu(x.reshape(-1).contiguous().numpy(), out.view(-1).numpy())
        return out


# Largest difference from transformers' part, relative to its output, that counts as rounding; _CODED: with 8-bit activations, whose codes
# can differ by one if the last bit of an input does.
_ROUNDING, _CODED = 1e-5, 3e-2
_ANY = 50  # Width of rows on which an activation is tried.
# Names of an MLP's matrices: gate, up and down, gate and up as one, or up and down.
_JOINED = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))
_MLPS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), *_JOINED, ("up_proj", "down_proj"), ("c_fc", "c_proj"), ("fc1", "fc2"))


def _measure_error(old: nn.Module, new: nn.Module, width: int) -> float:
    """Return the largest difference of two modules' outputs, relative to the first one's largest; infinity if they cannot be compared."""
    x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0))
    try:
        expected = old(x)
        return float((new(x) - expected).abs().max() / expected.abs().max())
    except (RuntimeError, TypeError, ValueError):
        return math.inf


def _fused_norm(module: nn.Module, offsets: dict[tuple[type, int, float], float | None]) -> nn.Module | None:
    """Return a fused norm for this module; None if it computes something else.

    `offsets` caches, by class and size, what is added to the weights; None: another computation.
    """
    found = get_rms_norm(module)
    if found is None:
        return None
    weight, eps = found
    kind = (type(module), len(weight), eps)
    if kind not in offsets:  # Gemma's weights are offsets from one
        errors = {offset: _measure_error(module, RMSNorm(weight, eps, offset), len(weight)) for offset in (0.0, 1.0)}
        offsets[kind] = next((offset for offset, error in errors.items() if error <= _ROUNDING), None)
    offset = offsets[kind]
    return None if offset is None else RMSNorm(weight, eps, offset)


def _fused_mlp(module: nn.Module, known: dict[type, str | None]) -> nn.Module | None:
    """Return a fused MLP for this module; None if it computes something else.

    `known` caches the activation by class; None: another one.
    """
    names = next((names for names in _MLPS if all(hasattr(module, name) for name in names)), None)
    if names is None:
        return None
    *inputs, down = (getattr(module, name) for name in names)
    product, up = _find_gate_and_up(inputs, names), inputs[-1]
    if not isinstance(down, CpuPackedLinear):
        return None
    if product is not None:
        factors = float(getattr(module, "gate_multiplier", 1.0)), float(getattr(module, "down_multiplier", 1.0))  # Falcon-H1's
        return _choose_activation(module, product.n_in, lambda name: GatedMLP(product, down, name, names, factors), (SILU, GELU), known)
    if isinstance(up, CpuPackedLinear):
        return _choose_activation(module, up.in_features, lambda name: PlainMLP(up, down, name, names), (PLAIN_GELU, SQUARED_RELU), known)
    return None


def _choose_activation(
    module: nn.Module, width: int, make: Callable[[str], GatedMLP | PlainMLP], names: Sequence[str], known: dict[type, str | None]
) -> nn.Module | None:
    """Return the MLP with the activation that computes what the module does, if any does."""
    if type(module) not in known:
        errors = {name: _measure_error(module, make(name), width) for name in names}
        nearest = min(errors, key=errors.__getitem__)
        known[type(module)] = nearest if errors[nearest] <= (_CODED if make(nearest).down.product.context.int8 else _ROUNDING) else None
    activation = known[type(module)]
    return None if activation is None else make(activation)


def _find_gate_and_up(inputs: Sequence[nn.Module], names: Sequence[str]) -> CpuProduct | None:
    """Return the product of an MLP's gate and up, which may be one linear layer."""
    if names in _JOINED and isinstance(both := inputs[0], CpuPackedLinear):
        return both.product
    shared = [each.shared for each in inputs if isinstance(each, SharedLinear)]
    return shared[0].product if len(shared) == 2 and shared[0] is shared[1] else None


def replace_small_operations(model: nn.Module) -> int:
    """Replace norms and MLPs by fused ones if they compute the same; return how many were replaced."""
    swapped = 0
    offsets: dict[tuple[type, int, float], float | None] = {}
    activations: dict[type, str | None] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ModuleList):
                continue
            gelu = type(child) is GELUTanh and _measure_error(child, Gelu(), _ANY) <= _ROUNDING
            fused = Gelu() if gelu else _fused_norm(child, offsets) or _fused_mlp(child, activations)
            if fused is not None:
                setattr(parent, name, fused)
                swapped += 1
    return swapped

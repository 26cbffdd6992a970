"""Small operations of a layer on the CPU, each in one call instead of many: norm with residual, rotary embedding, gated activation.

Knows the parts of decoder layers, nothing of requests. A fused norm or MLP replaces a module only after it has
given the same result on random input (`replace_small_operations`); layers made of such parts alone become one `Stack`,
which the runner keeps only while the model's logits stay the same. A variant that computes something else keeps
its own code. Every row is computed alone, in a fixed order.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, njit, prange
from torch import nn

from ngramspec.batch.numeric import exp
from ngramspec.cpu.attention import PARALLEL, Pass, attend_packed
from ngramspec.cpu.linear import PackedLinear, Shared, SharedPart
from ngramspec.model.hf_modules import rms_norm

_F = np.float32
_ONE, _ZERO = _F(1.0), _F(0.0)


@njit(cache=True, nogil=True, error_model="numpy")
def _rms_row(x, weight, eps, out):
    n = x.shape[0]
    lanes = np.zeros(16, np.float32)
    whole = n & ~15
    for j in range(0, whole, 16):
        for i in range(16):
            lanes[i] += x[j + i] * x[j + i]
    total = _ZERO
    for i in range(16):
        total += lanes[i]
    for j in range(whole, n):
        total += x[j] * x[j]
    scale = _ONE / np.sqrt(total / _F(n) + eps)
    for j in range(n):
        out[j] = weight[j] * (x[j] * scale)


@njit(cache=True, nogil=True)
def _rms_few(x, weight, eps, out):
    for r in range(x.shape[0]):
        _rms_row(x[r], weight, eps, out[r])


@njit(cache=True, nogil=True, parallel=True)
def _rms_many(x, weight, eps, out):
    for r in prange(x.shape[0]):
        _rms_row(x[r], weight, eps, out[r])


@njit(cache=True, nogil=True)
def _add_rms_few(x, delta, weight, eps, out):
    for r in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[r, j] += delta[r, j]
        _rms_row(x[r], weight, eps, out[r])


@njit(cache=True, nogil=True, parallel=True)
def _add_rms_many(x, delta, weight, eps, out):
    for r in prange(x.shape[0]):
        for j in range(x.shape[1]):
            x[r, j] += delta[r, j]
        _rms_row(x[r], weight, eps, out[r])


# With Python's own rules of division, each quotient is tested for a zero divisor, and nothing is vectorised.
@njit(cache=True, nogil=True, error_model="numpy")
def _silu_row(x, out):
    n = out.shape[0]
    gate, up = x[:n], x[n:]
    for j in range(n):
        out[j] = gate[j] / (_ONE + exp(-gate[j])) * up[j]


@njit(cache=True, nogil=True)
def _silu_few(x, out):
    for r in range(x.shape[0]):
        _silu_row(x[r], out[r])


@njit(cache=True, nogil=True, parallel=True)
def _silu_many(x, out):
    for r in prange(x.shape[0]):
        _silu_row(x[r], out[r])


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis [N]; float32."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight.detach().contiguous().numpy(), np.float32(eps)

    def rows(self, x: np.ndarray) -> np.ndarray:
        """[T, N] → [T, N]"""
        out = np.empty_like(x)
        run = _rms_many if x.size >= PARALLEL else _rms_few
        run(x, self.weight, self.eps, out)
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.rows(x.reshape(-1, x.shape[-1]).contiguous().numpy())).view(x.shape)

    def add(self, x: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """x [T, N] += delta, in place; the norm of the sum."""
        out = np.empty_like(x)
        run = _add_rms_many if x.size >= PARALLEL else _add_rms_few
        run(x, delta, self.weight, self.eps, out)
        return out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)) with gate and up as one matrix product."""

    def __init__(self, shared: Shared, down: PackedLinear) -> None:
        super().__init__()
        self.shared, self.down = shared, down

    def rows(self, x: np.ndarray, threads: int) -> np.ndarray:
        """[T, N] → [T, N]"""
        both = self.shared.product.rows(x, threads)
        mid = np.empty((len(both), both.shape[1] // 2), np.float32)
        run = _silu_many if mid.size >= PARALLEL else _silu_few
        run(both, mid)
        return self.down.product.rows(mid, threads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(self.rows(x.reshape(-1, x.shape[-1]).contiguous().numpy(), get_num_threads())).view(x.shape)


class Stack(nn.Module):
    """All decoder layers of the Llama kind in one loop: norm, attention with halves-paired rotary embedding, norm, gated MLP.

    Stands as the only layer of the model. The runner keeps it only where the model's logits stay those of transformers.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.parts: list[tuple[Any, ...]] = []
        for index, layer in enumerate(layers):
            attn: Any = layer.self_attn
            first, second, mlp = layer.input_layernorm, layer.post_attention_layernorm, layer.mlp
            qkv = attn.q_proj.shared.product
            self.parts.append(
                (index, first, qkv, attn.o_proj.product, second, mlp, float(attn.scaling), attn.q_proj.out_features // attn.head_dim)
            )

    def first(self, n: int) -> Stack:
        """The first n layers."""
        other = copy.copy(self)
        other.parts = self.parts[:n]
        return other

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], ngramspec: Pass, **_: object
    ) -> torch.Tensor:
        pool, batch = ngramspec.pool, ngramspec.batch
        cos, sin = (x[0].contiguous().numpy() for x in position_embeddings)
        x, delta, threads = hidden_states[0].clone().numpy(), None, get_num_threads()
        for index, first, qkv, out, second, mlp, scale, n_heads in self.parts:
            normed = first.rows(x) if delta is None else first.add(x, delta)
            mixed = attend_packed(qkv.rows(normed, threads), cos, sin, n_heads, pool, index, batch, scale, threads)
            delta = mlp.rows(second.add(x, out.rows(mixed, threads)), threads)
        return torch.from_numpy(x + delta)[None]

    @staticmethod
    def fits(layers: nn.ModuleList) -> bool:
        """Whether every layer consists of the parts of the Llama kind and nothing else."""
        for layer in layers:
            if set(dict(layer.named_children())) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"} or any(
                True for _ in layer.parameters()
            ):
                return False
            attn: Any = layer.self_attn
            if set(dict(attn.named_children())) != {"q_proj", "k_proj", "v_proj", "o_proj"} or not isinstance(layer.mlp, GatedMLP):
                return False
            if not all(isinstance(norm, RMSNorm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)):
                return False
            if not isinstance(attn.q_proj, SharedPart) or not isinstance(attn.o_proj, PackedLinear):
                return False
            if (
                not isinstance(getattr(attn, "scaling", None), float)
                or getattr(attn.config, "sliding_window", None)
                or not hasattr(attn, "head_dim")
            ):
                return False
        return True


_ROUNDING = 1e-5
"""Largest difference from what a part computed, over its size, that counts as rounding."""


def _same(old: nn.Module, new: nn.Module, width: int) -> bool:
    x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0))
    try:
        expected = old(x)
        return bool((new(x) - expected).abs().max() <= _ROUNDING * expected.abs().max())
    except (RuntimeError, TypeError, ValueError):
        return False


def _fused_norm(module: nn.Module) -> nn.Module | None:
    found = rms_norm(module)
    if found is None:
        return None
    weight, eps = found
    for candidate in (RMSNorm(weight, eps), RMSNorm(weight + 1, eps)):  # Gemma's weights are offsets from one
        if _same(module, candidate, len(weight)):
            return candidate
    return None


def _fused_mlp(module: nn.Module) -> nn.Module | None:
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if (
        not isinstance(gate, SharedPart)
        or not isinstance(up, SharedPart)
        or gate.shared is not up.shared
        or not isinstance(down, PackedLinear)
    ):
        return None
    candidate = GatedMLP(gate.shared, down)
    return candidate if _same(module, candidate, gate.in_features) else None


def replace_small_operations(model: nn.Module) -> int:
    """Swap norms and gated MLPs for fused ones where they compute the same; returns how many were swapped."""
    swapped = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ModuleList):
                continue
            fused = _fused_norm(child) or _fused_mlp(child)
            if fused is not None:
                setattr(parent, name, fused)
                swapped += 1
    return swapped

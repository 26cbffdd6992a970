"""Provide routers and experts over packed weights that replace transformers' modules on the CPU.

transformers gives every family a router, which chooses experts for rows [T, H], and experts, which take rows, choice and weights. What a
router computes is found by trying: ours must give the same as the module does with random weights. The same holds for the experts'
activation. Modules that compute something else are left alone. Nothing here knows which layers a model has.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import get_num_threads, prange
from torch import nn

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.experts import Experts
from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.llama_layers import GELU, SILU, SQUARED_RELU
from ngramspec.backends.cpu.matmul import CpuProduct, MatmulContext, Matrix, locate_rows, quantise_row
from ngramspec.backends.cpu.threads import finish_piece, make_counters, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.models.expert_weights import ExpertWeights

_SAME = 1e-5  # Largest difference of weights and activations that counts as rounding.
_NO_CORRECTION = np.zeros(0, np.float32)
CORRECTION = "e_score_correction_bias"  # Name of a router's own buffer [E], which is added to scores for the choice alone.


@njit(cache=True, nogil=True)
def _choose_all(logits, correction, options, scale, ids, weights):
    for r in range(logits.shape[0]):
        moe.choose_experts(logits[r], correction, options, scale, ids[r], weights[r])


@njit(cache=True, nogil=True)
def _run_share(state, m, options, tables, functions, rows, pairs, out, n_threads):
    """Run one thread's share of the experts of all rows."""
    x, codes, act_scales = rows
    n_rows = x.shape[0]
    while True:
        r = take_piece(state, 0, n_rows)
        if r >= n_rows:
            break
        quantise_row(functions[0], x[r], codes[r], act_scales[r])
        finish_piece(state, 0)
    wait_for_pieces(state, 0, n_rows)
    choice = moe.allocate_choice(n_rows, pairs, options[0])
    where = n_rows, locate_rows(x, codes, act_scales), rows
    moe.run_chosen(state, 1, n_threads, (m, options[0], pairs.ids[0]), (tables, functions), where, choice, pairs, out)


@njit(cache=True, nogil=True, parallel=True)
def _run_all(state, m, options, tables, functions, rows, pairs, out, n_threads):
    for _ in prange(n_threads):
        _run_share(state, m, options, tables, functions, rows, pairs, out, n_threads)


class PackedRouter(nn.Module):
    """A router: rows [T, H] and what is added to scores for the choice alone [E] (None: nothing) to logits [T, E], weights [T, top_k] and
    experts [T, top_k], best first.
    """

    def __init__(self, product: CpuProduct, options: np.ndarray, scale: float, correction: np.ndarray | None = None) -> None:
        """`options`, `scale`: see `Experts`; `correction`: the router's own."""
        super().__init__()
        self.product, self.options, self.scale = product, options, scale
        self.has_correction = correction is not None
        if correction is not None:
            self.register_buffer(CORRECTION, torch.from_numpy(correction))

    def forward(self, x: torch.Tensor, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.product.multiply(x.reshape(-1, x.shape[-1]).contiguous().numpy(), get_num_threads())
        k = int(self.options[moe.TOP_K])
        ids, weights = np.zeros((len(logits), k), np.int32), np.zeros((len(logits), k), np.float32)
        if self.has_correction:
            correction = self.get_buffer(CORRECTION)
        added = _NO_CORRECTION if correction is None else correction.numpy()
        _choose_all(logits, added, self.options, np.float32(self.scale), ids, weights)
        n_experts = int(self.options[moe.N_EXPERTS])
        return torch.from_numpy(logits[:, :n_experts]), torch.from_numpy(weights), torch.from_numpy(ids.astype(np.int64))


class PackedExperts(nn.Module):
    """Experts that replace a module of transformers: rows [T, H], choice and weights [T, top_k] to [T, H]."""

    def __init__(
        self,
        context: MatmulContext,
        matrices: Sequence[Matrix],
        weights: ExpertWeights,
        n_experts: int,
        activation: str | tuple[float, float],
    ) -> None:
        """`matrices`: gate, up and down of all experts, or up and down, which come from `weights`; `activation`: see
        `Kernels.get_gated_activation`.
        """
        super().__init__()
        self.context, self.weights = context, weights
        gate, up, down = matrices if weights.gated else (matrices[0], *matrices)
        self.experts = Experts((gate, up, down, down), n_experts, 1, moe.SOFTMAX, True, activation=activation)  # its router is not used
        self.n_in = gate.weight.n_in

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous().numpy()
        n, n_in = len(rows), -(-self.n_in // DEPTH) * DEPTH
        out = np.empty((n, -(-self.n_in // WIDTH) * WIDTH), np.float32)
        if n:
            rows = np.pad(rows, ((0, 0), (0, n_in - self.n_in)))
            experts = self.experts._replace(top_k=ids.shape[-1])
            pairs = moe.make_pair_buffers([experts], n, n_in, 1)
            pairs.ids[0], pairs.weights[:, :-1] = ids.reshape(n, -1).numpy(), weights.reshape(n, -1).numpy()
            codes, act_scales = np.empty((n, 2, n_in), np.int8), np.empty((n, 2, n_in // DEPTH, 4), np.float32)
            formats = [m.weight.format for m in experts.matrices]
            quantise = self.context.kernels.get_quantise(formats) if self.context.int8 else 0
            functions = quantise, self.context.kernels.get_gated_activation(experts.activation)
            state = make_counters(1 + moe.CHOSEN_PARTS)
            _run_all(
                state, experts.fields, experts.options[None], self.context.tables, functions, (rows, codes, act_scales), pairs, out,
                get_num_threads(),
            )  # fmt: skip
        return torch.from_numpy(out[:, : self.n_in]).reshape(x.shape)


def find_router_options(router: nn.Module) -> tuple[np.ndarray, float] | None:
    """Return the options and the scale (see `Experts`) with which ours chooses as this module does; None if it computes something else.

    The module's parameters may be on the "meta" device.
    """
    weight = router._parameters.get("weight")
    top_k = getattr(router, "top_k", None)
    if weight is None or weight.dim() != 2 or not isinstance(top_k, int) or not 0 < top_k <= weight.shape[0]:
        return None
    x, correction, expected = _try_router(router)
    if expected is None:
        return None
    logits, weights, ids = expected
    for scoring in (moe.SOFTMAX, moe.SIGMOID):
        for normalise in (1, 0):
            options = np.array([weight.shape[0], top_k, scoring, normalise, moe.NO_SHARED], np.int64)
            ours, chosen = np.zeros((len(x), top_k), np.float32), np.zeros((len(x), top_k), np.int32)
            _choose_all(logits.numpy(), correction, options, np.float32(1), chosen, ours)
            scale = float(weights.sum() / ours.sum())
            # some routers' choice is in no order
            (chosen, ours), (their_choice, theirs) = _sort_choice(chosen, ours), _sort_choice(ids.numpy(), weights.numpy())
            if np.array_equal(chosen, their_choice) and np.abs(ours * scale - theirs).max() < _SAME:
                return options, 1.0 if abs(scale - 1) < _SAME else scale
    return None


def _sort_choice(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return chosen experts and their weights, both [T, top_k], by the number of the expert."""
    order = np.argsort(ids, axis=-1)
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


@torch.no_grad()
def _try_router(router: nn.Module) -> tuple[torch.Tensor, np.ndarray, Sequence[torch.Tensor] | None]:
    """Return random rows, what is added to scores for the choice ([0] for a module that does not take it), and what the module computes
    with random weights: logits, weights, choice; None if it returns others.
    """
    generator = torch.Generator().manual_seed(0)
    stand_in = copy.copy(router)
    stand_in._parameters = {
        name: nn.Parameter(torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5, requires_grad=False)
        for name, p in router._parameters.items()
        if p is not None
    }
    x = torch.randn(7, router._parameters["weight"].shape[1], generator=generator)  # type: ignore[union-attr]
    correction = 0.3 * torch.randn(len(stand_in._parameters["weight"]), generator=generator)  # type: ignore[arg-type]
    found: Any = None
    if has_own := CORRECTION in router._buffers:
        stand_in._buffers = {CORRECTION: correction}
    for added in (correction,) if has_own else (torch.empty(0), correction):
        with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError):
            found = stand_in(x) if has_own or not len(added) else stand_in(x, added)
            break
    if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(each, torch.Tensor) for each in found):
        return x, _NO_CORRECTION, None
    logits, weights, ids = found
    k = router.top_k
    if logits.shape != (7, len(stand_in._parameters["weight"])) or weights.shape != (7, k) or ids.shape != (7, k):  # type: ignore[arg-type]
        return x, _NO_CORRECTION, None
    return x, added.numpy(), (logits.contiguous(), weights, ids)


@torch.no_grad()
def find_activation(experts: nn.Module) -> str | tuple[float, float]:
    """Return what `Kernels.get_gated_activation` takes for the activation of these experts. Raises LookupError if it is another one."""
    n: Any = 16
    if "up_proj" in experts._parameters:
        x = torch.randn(5, n, generator=torch.Generator().manual_seed(0))
        if torch.equal(experts.act_fn(x), torch.relu(x).square()):  # type: ignore[operator]
            return SQUARED_RELU
        raise LookupError("another activation without a gate")
    both = torch.randn(5, 2 * n, generator=torch.Generator().manual_seed(0)) * 6
    apply: Any = getattr(experts, "_apply_gate", None)
    if apply is None:
        raise LookupError("experts without a gate")
    found = apply(both)
    gate, up = both.chunk(2, dim=-1) if getattr(experts, "is_concatenated", True) else (both[:, ::2], both[:, 1::2])
    for name, activate in ((SILU, nn.functional.silu), (GELU, partial(nn.functional.gelu, approximate="tanh"))):
        if found.shape == (5, n) and float((found - activate(gate) * up).abs().max()) < _SAME * 100:
            return name
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if float((found - gate * torch.sigmoid(alpha * gate) * (up + 1)).abs().max()) < _SAME * 100:
            return alpha, limit
    raise LookupError("another activation")

"""Provide routers and experts over packed weights that replace transformers' modules on the CPU.

transformers gives every family a router, which chooses experts for rows [T, H], and experts, which take rows, choice and weights. What they
compute is found by trying (`models.expert_routing`). Nothing here knows which layers a model has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import get_num_threads, prange
from torch import nn

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.experts import Experts
from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.matmul import CpuProduct, MatmulContext, Matrix, locate_rows, make_code_buffers, quantise_row
from ngramspec.backends.cpu.threads import make_counters, take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.models import expert_routing
from ngramspec.models.expert_routing import CORRECTION, RouterOptions, RouterParts
from ngramspec.models.expert_weights import ExpertWeights

_NO_CORRECTION = np.zeros(0, np.float32)


@njit(cache=True, nogil=True)
def _choose_all(logits, correction, options, scale, ids, weights):
    for r in range(logits.shape[0]):
        moe.choose_experts(logits[r], correction, options, scale, ids[r], weights[r])


@njit(cache=True, nogil=True)
def _run_share(state, m, options, tables, functions, rows, pairs, out, n_threads):
    """Run one thread's share of the experts of all rows."""
    x, codes, act_scales = rows
    n_rows = x.shape[0]
    r = take_piece(state, 0)
    while r < n_rows:
        quantise_row(functions[0], x[r], codes[r], act_scales[r])
        r = take_next_piece(state, 0)
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

    def __init__(
        self, product: CpuProduct, options: np.ndarray, scale: float, parts: RouterParts, correction: np.ndarray | None = None
    ) -> None:
        """`options`, `scale`: see `Experts`; `parts`: names within the router that it replaces; `correction` [E]: the router's own."""
        super().__init__()
        self.product, self.options, self.scale, self.parts = product, options, scale, parts
        if correction is not None:
            self.register_buffer(CORRECTION, torch.from_numpy(correction))

    def forward(self, x: torch.Tensor, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.product.multiply(x.reshape(-1, x.shape[-1]).contiguous().numpy(), get_num_threads())
        k = int(self.options[moe.TOP_K])
        ids, weights = np.zeros((len(logits), k), np.int32), np.zeros((len(logits), k), np.float32)
        if self.parts.correction:
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
            codes, act_scales = make_code_buffers(n, n_in)
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
    found = expert_routing.find_router_options(router, _choose_as, grouped=True)
    return found and (_list_options(found), found.scale)


def _list_options(options: RouterOptions) -> np.ndarray:
    scoring = moe.SIGMOID if options.sigmoid else moe.SOFTMAX
    return np.array([options.n_experts, options.top_k, scoring, options.normalise, moe.NO_SHARED, *options.groups], np.int64)


def _choose_as(logits: torch.Tensor, correction: torch.Tensor | None, options: RouterOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for rows of logits [T, E], as `expert_routing.choose_experts` does."""
    ids, weights = np.zeros((len(logits), options.top_k), np.int32), np.zeros((len(logits), options.top_k), np.float32)
    added = _NO_CORRECTION if correction is None else correction.numpy()
    _choose_all(logits.numpy(), added, _list_options(options), np.float32(options.scale), ids, weights)
    return torch.from_numpy(ids), torch.from_numpy(weights)

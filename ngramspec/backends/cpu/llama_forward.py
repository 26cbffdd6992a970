"""Run a whole forward pass of a Llama-style decoder, from embedding to logits, in one compiled call whose threads stay awake (`threads`).

A Llama-style layer is: norm, attention with rotary embedding in rotated halves (in some layers or all), optionally a norm of every head's
queries and keys, optionally queries scaled by their position, norm, gated MLP or a mixture of such (`experts`). After the last layer come a
norm and the head. Whoever builds a `LlamaDecoder` has checked that the model is of this kind. Every row is computed alone and in a fixed
order; which thread computes what changes no result. The module knows batches and KV pools, nothing of modules or requests.

numba's cache of a compiled pass contains the functions that it calls, attention's among them, and is not renewed when they change: see
"numba's traps" in `codegen/README.md`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numba import types
from numba.experimental import structref

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.attention import attend_piece, n_splits, rope_kv_row
from ngramspec.backends.cpu.codegen.intrinsics import call_kernel
from ngramspec.backends.cpu.formats import DEPTH, SUPER, WIDTH
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.backends.cpu.matmul import (
    BLOCKS,
    CODES_AT,
    MATRIX,
    PANEL_BYTES,
    PANELS,
    SUPER_AT,
    MatmulContext,
    Matrix,
    count_panels_per_piece,
    locate_rows,
    multiply,
    quantise_row,
)
from ngramspec.backends.cpu.thread_team import ThreadTeam, close_pass, leave_pass, open_pass, take_seat, wait_for_pass
from ngramspec.backends.cpu.threads import finish_piece, make_counters, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.sampling.batch import Batch
from ngramspec.sampling.topk import EMPTY, finish_row, insert, scan_logits

_F = np.float32
Q, K, V, OUT, GATE, UP, DOWN = range(7)  # indices of a layer's matrices
PARTS = 15  # Most parts of one layer's pass.
PIECES = 64  # Most pieces that row-wise work is divided into.
# Positions whose angles are computed at a time: always the same groups, so that a position's angles always have the same bits.
ANGLES = 1024


class LayerWeights(NamedTuple):
    matrices: tuple[Matrix, ...]
    """Q to DOWN; those from GATE on are the MLP's, or the shared expert's, or missing if there is none."""
    norms: tuple[np.ndarray, np.ndarray]
    """[H] each, before attention and before the MLP."""
    head_norms: tuple[np.ndarray, np.ndarray] | None
    """[D] each, of queries and of keys."""
    window: int = 0
    """Keys that a query sees, its own among them; 0: all."""
    rotary: bool = True
    """Whether queries and keys are rotated by their position."""
    experts: moe.Experts | None = None
    sinks: np.ndarray | None = None
    """[H] of attention: logits of what goes to no key."""


class ForwardOutput(NamedTuple):
    """Results of a pass for the N rows whose logits were wanted."""

    logits: np.ndarray  # [N, V] float32
    states: np.ndarray | None
    """[T, H] float32: the last hidden states of all rows, if they were asked for."""
    greedy: np.ndarray  # [N] int32: the likeliest token; -1 where the greatest logit is infinite, or one is not a number
    tokens: np.ndarray  # [N, n_best] int32: the likeliest ones, as `sampling.topk` has it
    values: np.ndarray  # [N, n_best] float32: their logits


@structref.register
class CompiledModelType(types.StructRef):
    pass


class CompiledModel(structref.StructRefProxy):
    """A decoder as compiled code sees it, with its KV pool and buffers, in one argument.

    Passing the dozens of arrays one by one would unpack each of them at every call.
    """


structref.define_proxy(CompiledModel, CompiledModelType, ["weights", "pool", "work"])


@structref.register
class CompiledPassType(types.StructRef):
    pass


class CompiledPass(structref.StructRefProxy):
    """A pass as compiled code sees it.

    It has layers `first` to `last` and whether the embedding comes first, the rows (fields of `Batch`), counters for its parts, and its
    results as in `ForwardOutput`: `tokens` and `values` per thread, and whether the logits are finite.
    """


@structref.register
class SharedPassType(types.StructRef):
    pass


class SharedPass(structref.StructRefProxy):
    """What the threads of a team share: the compiled model and the current pass."""


structref.define_proxy(SharedPass, SharedPassType, ["model", "current"])

_ROWS = ("input_ids", "wanted", "items", "tables", "positions", "bases", "paths", "blocks", "offsets")
_LEFT = ("logits", "states", "tokens", "values", "fine", "greedy")
structref.define_proxy(CompiledPass, CompiledPassType, ["first", "last", "embed", "vocab_size", "state", *_ROWS, *_LEFT])


@njit(cache=True, nogil=True)
def _new_model(*members):
    """Make the struct in compiled code: see "numba's traps" in `codegen/README.md`."""
    return CompiledModel(*members)


@njit(cache=True, nogil=True)
def _new_pass(*members):
    return CompiledPass(*members)


@njit(cache=True, nogil=True)
def _new_shared(*members):
    return SharedPass(*members)


class _Buffers(NamedTuple):
    """Buffers that passes of up to `n_rows` rows reuse."""

    n_rows: int
    arrays: tuple[np.ndarray, ...]
    """They stand in the order in which `_run_thread` unpacks them."""
    pairs: moe.PairBuffers


class LlamaDecoder:
    """The layers, norms, head and embedding of a Llama-style decoder; see the module."""

    def __init__(
        self,
        context: MatmulContext,
        layers: Sequence[LayerWeights],
        *,
        embedding: Matrix,
        head: Matrix,
        norm: np.ndarray,
        eps: float,
        scale: float,
        n_heads: int,
        head_dim: int,
        angles: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
        query_scales: Callable[[int, int], np.ndarray],
    ) -> None:
        """Prepare packed weights for compiled passes.

        `angles(first, n)` returns cos and sin [n, D] of n positions from `first` on; `query_scales(first, n)` the factors [n] of their
        queries, or [0] for none. `norm` [H] comes before the head.
        """
        self.context, self.layers, self.n_heads, self.head_dim = context, tuple(layers), n_heads, head_dim
        self.hidden, self._angles, self._query_scales = len(norm), angles, query_scales
        self.vocab_size = head.weight.n_out
        mixed = [layer.experts for layer in layers if layer.experts]
        self.matrices = [*(m for layer in layers for m in layer.matrices), *(m for each in mixed for m in each.matrices), embedding, head]
        none = np.zeros(MATRIX, np.int64)
        of_layers = [[*(m.fields for m in layer.matrices), *[none] * (DOWN + 1 - len(layer.matrices))] for layer in layers]
        self._matrices = np.stack([m for fields in of_layers for m in fields] + [embedding.fields, head.fields])
        self._experts = _describe_experts(layers)
        sinks = [layer.sinks for layer in layers if layer.sinks is not None]
        assert len(sinks) in (0, len(layers)), "sinks in some layers only"
        self._sinks = np.stack(sinks).astype(np.float32) if sinks else np.zeros((0, n_heads), np.float32)
        self._norms = np.stack([n for layer in layers for n in layer.norms] + [norm]).astype(np.float32)
        head_norms = [n for layer in layers if layer.head_norms for n in layer.head_norms]
        self._head_norms = np.stack(head_norms).astype(np.float32) if head_norms else np.zeros((0, head_dim), np.float32)
        self._numbers = np.array([eps, scale], np.float32)
        self._windows = np.array([layer.window for layer in layers], np.int64)
        self._rotary = np.array([layer.rotary for layer in layers], np.bool_)
        kernels = context.kernels
        unpack = kernels.get_unpack(embedding.weight.format)
        self._functions = np.array(
            [
                kernels.get_quantise(m.weight.format for m in self.matrices) if context.int8 else 0, kernels.get_silu(), unpack,
                kernels.get_gated_activation(mixed[0].clamped) if mixed else 0,
            ],
            np.int64,
        )  # fmt: skip
        self.begin_at(0)
        self._buffers: _Buffers | None = None
        self._model: CompiledModel | None = None
        self._model_of: tuple[object, ...] = ()
        """The pool and the arrays that it is made of."""
        self._pass: CompiledPass | None = None
        self._shared: SharedPass | None = None
        self._team = ThreadTeam()
        self._logits = np.zeros((0, 0), np.float32)

    def begin_at(self, position: int) -> None:
        """Treat a batch's position 0 as `position`, so that checks can look far out without computing the text before."""
        self._begin = position
        self._cos, self._sin = (np.zeros((0, self.head_dim), np.float32) for _ in range(2))
        self._scales = np.zeros(0, np.float32)

    def run_layer(self, layer: int, batch: Batch, pool: KVPool, threads: int, x: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Run one layer alone on hidden states x [T, H], or on the embedding: return its output [T, H] and the logits made of that."""
        computed = self.run(batch, pool, threads, first=layer, n_layers=1, x=x)
        assert self._buffers is not None
        n, (before, added) = len(batch.input_ids), self._buffers.arrays[:2]
        return before[:n] + added[:n, : self.hidden], computed.logits

    def run(
        self, batch: Batch, pool: KVPool, threads: int, *, n_layers: int | None = None, first: int = 0, x: np.ndarray | None = None,
        states: bool = False, n_best: int = 1,
    ) -> ForwardOutput:  # fmt: skip
        """Run `n_layers` layers (None: all) from `first` on, then norm and head.

        `x` [T, H]: hidden states to begin with, instead of the embedding. `states`: also return the last hidden states. `n_best`: number of
        top-k tokens to return per row.
        """
        n_rows, wanted = len(batch.input_ids), batch.logits_rows
        last = len(self.layers) if n_layers is None else first + n_layers
        model = self.get_compiled_model(pool, n_rows, int(batch.positions.max()) + 1)
        assert self._buffers is not None
        if x is not None:
            self._buffers.arrays[0][:n_rows] = x
        logits = self._get_logits_buffer(len(wanted))
        kept = np.empty((n_rows if states else 0, self.hidden), np.float32)
        tokens, values = np.empty((threads, len(wanted), n_best), np.int32), np.empty((threads, len(wanted), n_best), np.float32)
        fine, greedy = np.empty((threads, len(wanted)), np.bool_), np.empty(len(wanted), np.int32)
        rows = (
            batch.input_ids, wanted, batch.items, batch.tables, batch.positions, batch.bases, batch.paths, batch.blocks, batch.offsets,
        )  # fmt: skip
        left = logits, kept, tokens, values, fine, greedy
        if self._pass is None:
            self._pass = self.make_empty_pass()
        _fill_pass(self._pass, first, last, x is None, make_counters(count_parts(last - first)), rows, left)
        self.run_pass(threads, model, self._pass)
        _release_logits(self._pass, _NO_LOGITS)
        return ForwardOutput(logits[:, : self.vocab_size], kept if states else None, greedy, tokens[0], values[0])

    def run_pass(self, threads: int, model: CompiledModel, current: CompiledPass) -> None:
        """Run a pass whose `tokens`, `values` and `fine` have room for this number of threads, with as many of them."""
        if self._shared is None:
            self._shared = _new_shared(model, current)
            weakref.finalize(self, self._team.stop)
        _set_pass(self._shared, model, current)
        self._team.grow(threads - 1, compute, False, self._shared, self._team.state)
        compute(True, self._shared, self._team.state)

    def make_empty_pass(self) -> CompiledPass:
        """Make a pass through all layers whose arrays are filled in later."""
        n_layers, none = len(self.layers), np.empty((0, 0), np.int32)
        ids, line, logits, cube = np.empty(0, np.int64), np.empty(0, np.int32), np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.int32)
        rows = ids, ids, none, none, line, line, none, line, line
        left = logits, np.empty((0, self.hidden), np.float32), cube, cube.astype(np.float32), none.astype(np.bool_), line
        new: CompiledPass = _new_pass(0, n_layers, True, self.vocab_size, make_counters(count_parts(n_layers)), *rows, *left)
        return new

    def get_compiled_model(self, pool: KVPool, n_rows: int, n_positions: int) -> CompiledModel:
        """Return the struct for passes of up to `n_rows` rows over positions below `n_positions`."""
        assert pool.all_keys is not None
        assert pool.all_values is not None
        self._ensure_buffers(n_rows)
        self._ensure_angles(n_positions)
        of = pool, self._buffers, self._cos
        if self._model is None or any(a is not b for a, b in zip(self._model_of, of, strict=True)):
            assert self._buffers is not None
            weights = (
                self._matrices, self.context.tables, self._norms, self._head_norms, self._windows, self._rotary, self._numbers,
                self._functions, self._cos, self._sin, self._scales, self._experts, self._sinks,
            )  # fmt: skip
            self._model, self._model_of = (
                _new_model(weights, (pool.all_keys, pool.all_values), (*self._buffers.arrays, self._buffers.pairs)),
                of,
            )
        return self._model

    def _ensure_buffers(self, n_rows: int) -> None:
        if self._buffers is None or self._buffers.n_rows < n_rows:
            n = max(16, 1 << (n_rows - 1).bit_length())
            layer = self.layers[0].matrices
            dense = [each.matrices[GATE].weight.n_panels for each in self.layers if len(each.matrices) > GATE]

            def zeros(*shape: int, dtype: type[np.generic] = np.float32) -> np.ndarray:
                return np.zeros((n, *shape), dtype)

            wide, mixed = _round_up(self.hidden), _round_up(self.n_heads * self.head_dim)
            inner = max(dense, default=0) * WIDTH
            codes = max(wide, mixed)
            out = zeros(mixed)
            heads = np.lib.stride_tricks.as_strided(out, (n, self.n_heads, self.head_dim), (out.strides[0], 4 * self.head_dim, 4))
            arrays = (
                zeros(self.hidden), zeros(layer[OUT].weight.n_panels * WIDTH), zeros(wide), zeros(2, codes, dtype=np.int8),
                zeros(2, codes // DEPTH, 4), zeros(sum(layer[i].weight.n_panels for i in (Q, K, V)) * WIDTH),
                zeros(self.n_heads, self.head_dim), out, heads, zeros(2, _round_up(inner)), zeros(_round_up(inner)),
                zeros(2, _round_up(inner), dtype=np.int8), zeros(2, _round_up(inner) // DEPTH, 4),
            )  # fmt: skip
            layers_of_experts = [each.experts for each in self.layers if each.experts]
            self._buffers = _Buffers(n, arrays, moe.make_pair_buffers(layers_of_experts, n, wide, len(self.layers)))

    def _ensure_angles(self, n_positions: int) -> None:
        while len(self._cos) < n_positions:
            first = self._begin + len(self._cos)
            cos, sin = self._angles(first, ANGLES)
            self._scales = np.concatenate([self._scales, self._query_scales(first, ANGLES)])
            self._cos, self._sin = np.concatenate([self._cos, cos]), np.concatenate([self._sin, sin])

    def _get_logits_buffer(self, n: int) -> np.ndarray:
        """Return logits [n, 16 · panels], reusing the last pass's memory if nobody holds it: fresh pages cost a good part of a pass."""
        if len(self._logits) < n or sys.getrefcount(self._logits) > 2:
            self._logits = self.allocate_logits(max(n, 8))
        return self._logits[:n]

    def allocate_logits(self, n: int) -> np.ndarray:
        """Allocate logits of n rows, [n, 16 · panels] float32."""
        return np.empty((n, -(-self.vocab_size // WIDTH) * WIDTH), np.float32)


def count_parts(n_layers: int) -> int:
    """Return the number of parts of a pass through `n_layers` layers."""
    return PARTS * n_layers + 4


def _describe_experts(layers: Sequence[LayerWeights]) -> tuple[np.ndarray, ...]:
    """Return fields [L, 4, MATRIX] and options [L, OPTIONS] of all layers' experts, their weights' scale [L] and corrections [L, E].

    Options of a layer without experts are 0; a model without any has L = 0.
    """
    n = len(layers) if any(layer.experts for layer in layers) else 0
    fields, options, scales = np.zeros((n, 4, MATRIX), np.int64), np.zeros((n, moe.OPTIONS), np.int64), np.zeros(n, np.float32)
    corrected = [each.experts for each in layers if each.experts and each.experts.correction is not None]
    corrections = np.zeros((n, max((each.n_experts for each in corrected), default=0)), np.float32)
    for i, layer in enumerate(layers[:n]):
        if layer.experts:
            fields[i], options[i], scales[i] = layer.experts.fields, layer.experts.options, layer.experts.scale
            if layer.experts.correction is not None:
                corrections[i, : layer.experts.n_experts] = layer.experts.correction
    return fields, options, scales, corrections


def _round_up(n: int) -> int:
    return -(-n // DEPTH) * DEPTH


@njit(cache=True, nogil=True, error_model="numpy")
def norm_row(x, weight, eps, out):
    """Compute out = x / sqrt(mean(x²) + eps) · weight; the sum has 16 lanes."""
    n = x.shape[0]
    lanes = np.zeros(16, np.float32)
    whole = n & ~15
    for j in range(0, whole, 16):
        for i in range(16):
            lanes[i] += x[j + i] * x[j + i]
    total = _F(0)
    for i in range(16):
        total += lanes[i]
    for j in range(whole, n):
        total += x[j] * x[j]
    scale = _F(1) / np.sqrt(total / _F(n) + eps)
    for j in range(n):
        out[j] = weight[j] * (x[j] * scale)


@njit(cache=True, nogil=True)
def _norm_and_quantise_row(x, delta, add, weight, eps, normed, function, codes, act_scales):
    """Add delta to x [H] if `add` is set; write x's norm to `normed` and, quantised, to `codes` and `act_scales`."""
    if add:
        for j in range(x.shape[0]):
            x[j] += delta[j]
    norm_row(x, weight, eps, normed[: x.shape[0]])
    quantise_row(function, normed, codes, act_scales)


@njit(cache=True, nogil=True)
def _run_product_part(state, part, n_threads, matrices, columns, tables, n_rows, inputs, y):
    """Run one part of a pass: y [T, ..] = x times some matrices, the i-th one's outputs from columns[i] on.

    `inputs`: x as `matmul.locate_rows` returns it.
    """
    total = 0
    for i in range(matrices.shape[0]):
        step = count_panels_per_piece(matrices[i, PANELS], matrices[i, PANEL_BYTES], n_threads)
        total += (matrices[i, PANELS] + step - 1) // step
    while True:
        piece = take_piece(state, part, total)
        if piece >= total:
            break
        j = piece
        for i in range(matrices.shape[0]):
            m = matrices[i]
            step = count_panels_per_piece(m[PANELS], m[PANEL_BYTES], n_threads)
            n_pieces = (m[PANELS] + step - 1) // step
            if j < n_pieces:
                multiply(m, tables, j * step, min(m[PANELS], (j + 1) * step), n_rows, inputs, y.ctypes.data + 4 * columns[i], y.strides[0])
                break
            j -= n_pieces
        finish_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True)
def _run_mlp_part(state, part, n_threads, matrices, tables, functions, n_rows, inputs, buffers):
    """Compute silu(gate) · up of all rows, and its codes. A piece is some super-blocks of 256 of the products' outputs.

    `matrices`: gate and up; `functions`: addresses of quantise and silu; `buffers`: gate and up's outputs, the result, its codes and their
    activation scales.
    """
    gate, (quantise, silu), (both, middle, out_codes, out_act_scales) = matrices[0], functions, buffers
    n_blocks = middle.shape[1] // DEPTH
    step = max(1, count_panels_per_piece(gate[PANELS], gate[PANEL_BYTES], n_threads) // (2 * SUPER)) * SUPER
    total = (n_blocks + step - 1) // step
    while True:
        piece = take_piece(state, part, total)
        if piece >= total:
            break
        first, end = piece * step, min(n_blocks, (piece + 1) * step)
        for i in range(2):
            m, y = matrices[i], both.ctypes.data + i * both.strides[1]
            multiply(m, tables, 2 * first, min(m[PANELS], 2 * end), n_rows, inputs, y, both.strides[0])
        a, b = first * DEPTH, end * DEPTH
        for r in range(n_rows):
            row = middle[r, a:b]
            call_kernel(
                silu, (both[r, 0, a:b].ctypes.data, both[r, 1, a:b].ctypes.data, end - first, row.ctypes.data, 0, 0, 0, 0, 0, 0, 0, 0, 0)
            )
            quantise_row(quantise, row, out_codes[r, :, a:b], out_act_scales[r, :, first:end])
        finish_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True)
def _run_experts(state, part, n_threads, mixture, code, rows, choice, pairs, out):
    """Run the parts of a layer's mixture of experts: out [T, H], which holds the shared expert's output before, if there is one.

    `mixture`: matrices and options of the layer's `Experts`, its chosen experts [T, top_k], scale and correction; the others: see
    `experts.run_chosen`.
    """
    (m, options, ids, scale, correction), (n_rows, inputs, _) = mixture, rows
    _run_product_part(state, part, n_threads, m[moe.ROUTER :], np.zeros(1, np.int64), code[0], n_rows, inputs, pairs.logits)
    pieces = min(n_rows, PIECES)
    while True:
        i = take_piece(state, part + 1, pieces)
        if i >= pieces:
            break
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            moe.choose_experts(pairs.logits[r], correction, options, scale, ids[r], pairs.weights[r])
        finish_piece(state, part + 1)
    wait_for_pieces(state, part + 1, pieces)
    moe.run_chosen(state, part + 2, n_threads, (m, options, ids), code, rows, choice, pairs, out)


@njit(cache=True, nogil=True)
def _embed(function, m, token, panel, x):
    p, lane = token // WIDTH, token % WIDTH
    at = m[0] + p * m[PANEL_BYTES]
    call_kernel(function, (at, m[BLOCKS], m[SUPER_AT], m[CODES_AT], panel.ctypes.data, 0, 0, 0, 0, 0, 0, 0, 0))
    for k in range(x.shape[0]):
        x[k] = panel[k, lane]


@njit(cache=True, nogil=True)
def _run_head_part(state, part, thread, n_threads, m, tables, n_rows, inputs, results):
    """Compute the logits of all rows and the top-k tokens of the pieces that this thread took, while they are in its cache."""
    logits, _, vocab_size, tokens, values, fine, _ = results
    step = count_panels_per_piece(m[PANELS], m[PANEL_BYTES], n_threads)
    total = (m[PANELS] + step - 1) // step
    while True:
        piece = take_piece(state, part, total)
        if piece >= total:
            break
        first, end = piece * step, min(m[PANELS], (piece + 1) * step)
        multiply(m, tables, first, end, n_rows, inputs, logits.ctypes.data, logits.strides[0])
        a, b = first * WIDTH, min(end * WIDTH, vocab_size)
        for r in range(n_rows):
            fine[thread, r] &= scan_logits(logits[r, a:b], a, tokens[thread, r], values[thread, r])
        finish_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True)
def _merge_top_k(tokens, values, fine, greedy):
    """Merge all threads' top-k tokens into the first one's arrays."""
    for r in range(greedy.shape[0]):
        for t in range(1, tokens.shape[0]):
            fine[0, r] &= fine[t, r]
            for j in range(tokens.shape[2]):
                insert(tokens[t, r, j], values[t, r, j], tokens[0, r], values[0, r])
        greedy[r] = finish_row(fine[0, r], tokens[0, r], values[0, r])


@njit(cache=True, nogil=True)
def _fill_pass(p, first, last, embed, state, rows, left):
    p.first, p.last, p.embed, p.state = first, last, embed, state
    p.input_ids, p.wanted, p.items, p.tables, p.positions, p.bases, p.paths, p.blocks, p.offsets = rows
    p.logits, p.states, p.tokens, p.values, p.fine, p.greedy = left


@njit(cache=True, nogil=True)
def _release_logits(p, nothing):
    """Drop the reference to the logits, so that their buffer can be reused."""
    p.logits = nothing


_NO_LOGITS = np.empty((0, 0), np.float32)


@njit(cache=True, nogil=True)
def _unpack_pass(model, p):
    """Unpack the two structs into what every thread needs."""
    batch = p.input_ids, p.wanted, p.items, p.tables, p.positions, p.bases, p.paths, p.blocks, p.offsets
    results = p.logits, p.states, p.vocab_size, p.tokens, p.values, p.fine, p.greedy
    return p.state, (p.first, p.last, p.embed), model.weights, model.pool, batch, model.work, results


@njit(cache=True, nogil=True)
def _set_pass(shared, model, p):
    shared.model, shared.current = model, p


@njit(cache=True, nogil=True)
def _run_published(shared, thread):
    """Run one thread's share of the pass that is open; no reference to its arrays is left afterwards."""
    state, layers, weights, pool, batch, work, results = _unpack_pass(shared.model, shared.current)
    _run_thread(thread, results[3].shape[0], state, layers, weights, pool, batch, work, results)


@njit(cache=True, nogil=True)
def compute(leads, shared, team):
    """Run the pass in `shared` if the thread leads; else take part in passes until the team is stopped."""
    number = np.int64(0)
    if leads:
        p = shared.current
        p.tokens[:], p.values[:], p.fine[:] = EMPTY, -np.inf, True
        n_seats = p.tokens.shape[0] - 1
        open_pass(team, n_seats)
    while True:
        seat = np.int64(0)
        if not leads:
            number = wait_for_pass(team, number)
            if number < 0:
                break
            seat = take_seat(team)
        if leads or seat:  # one call of what is compiled for long
            _run_published(shared, seat)
        if leads:
            close_pass(team, n_seats)
            _merge_top_k(p.tokens, p.values, p.fine, p.greedy)
            break
        if seat:
            leave_pass(team)


@njit(cache=True, nogil=True)
def _run_thread(thread, threads, state, layers, weights, pool, batch, work, results):
    """Run one thread's share of a pass."""
    first, last, embed = layers
    states = results[1]
    matrices, tables, norms, head_norms, windows, rotary, numbers, functions, cos, sin, scales, experts, sinks = weights
    all_keys, all_values = pool
    input_ids, wanted, items, block_tables, positions, bases, paths, blocks, offsets = batch
    x, delta, normed, codes, act_scales, qkv, q, mixed, heads, both, middle, middle_codes, middle_act_scales, pairs = work
    n_rows, n_kv, n_heads, head_dim = input_ids.shape[0], all_keys.shape[2], q.shape[1], q.shape[2]
    hidden, eps, scale = x.shape[1], numbers[0], numbers[1]
    quantise, silu, unpack, activate = functions[0], functions[1], functions[2], functions[3]
    pieces = min(n_rows, PIECES)
    codes_wide, codes_mixed = codes[:, :, : normed.shape[1]], codes[:, :, : mixed.shape[1]]
    act_scales_wide, act_scales_mixed = act_scales[:, :, : normed.shape[1] // DEPTH], act_scales[:, :, : mixed.shape[1] // DEPTH]
    wide_rows = locate_rows(normed, codes_wide, act_scales_wide)
    mixed_rows = locate_rows(mixed, codes_mixed, act_scales_mixed)
    middle_rows = locate_rows(middle, middle_codes, middle_act_scales)
    mlp_buffers = both, middle, middle_codes, middle_act_scales
    choice = moe.allocate_choice(n_rows, pairs, experts[1])
    part = 0
    if embed:
        table = matrices[matrices.shape[0] - 2]
        while True:
            i = take_piece(state, part, pieces)
            if i >= pieces:
                break
            panel = np.empty((table[BLOCKS] * DEPTH, WIDTH), np.float32)
            for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                _embed(unpack, table, input_ids[r], panel, x[r])
            finish_piece(state, part)
        wait_for_pieces(state, part, pieces)
        part += 1
    one, three = np.zeros(1, np.int64), np.zeros(3, np.int64)
    no_sinks = np.empty(0, np.float32)
    not_turned, no_sin = np.ones(head_dim, np.float32), np.zeros(head_dim, np.float32)
    for layer in range(first, last):
        m = matrices[7 * layer : 7 * layer + 7]
        keys, values = all_keys[layer], all_values[layer]
        three[1] = m[Q, PANELS] * WIDTH
        three[2] = three[1] + m[K, PANELS] * WIDTH
        while True:
            i = take_piece(state, part, pieces)
            if i >= pieces:
                break
            for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                _norm_and_quantise_row(
                    x[r], delta[r], layer > first, norms[2 * layer], eps, normed[r], quantise, codes_wide[r], act_scales_wide[r]
                )
            finish_piece(state, part)
        wait_for_pieces(state, part, pieces)
        _run_product_part(state, part + 1, threads, m[:3], three, tables, n_rows, wide_rows, qkv)
        while True:
            i = take_piece(state, part + 2, pieces)
            if i >= pieces:
                break
            for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                if head_norms.shape[0]:
                    for h in range(n_heads):
                        head = qkv[r, h * head_dim : (h + 1) * head_dim]
                        norm_row(head, head_norms[2 * layer], eps, head)
                    for h in range(n_kv):
                        head = qkv[r, three[1] + h * head_dim : three[1] + (h + 1) * head_dim]
                        norm_row(head, head_norms[2 * layer + 1], eps, head)
                at = positions[r]
                row_cos, row_sin = (cos[at], sin[at]) if rotary[layer] else (not_turned, no_sin)
                rope_kv_row(qkv[r], row_cos, row_sin, q[r], keys[blocks[r]], values[blocks[r]], offsets[r], three[1], three[2])
                if scales.shape[0]:
                    for h in range(n_heads):
                        for d in range(head_dim):
                            q[r, h, d] *= scales[at]
            finish_piece(state, part + 2)
        wait_for_pieces(state, part + 2, pieces)
        by_rows, by_heads = n_splits(items.shape[0], n_rows, n_kv, n_heads // n_kv, threads)
        n_pieces = items.shape[0] * n_kv * by_rows * by_heads
        while True:
            i = take_piece(state, part + 3, n_pieces)
            if i >= n_pieces:
                break
            attend_piece(
                i, by_rows, by_heads, q, keys, values, heads, items, block_tables, positions, bases, paths, scale, windows[layer], _F(0),
                sinks[layer] if sinks.shape[0] else no_sinks,
            )  # fmt: skip
            finish_piece(state, part + 3)
        wait_for_pieces(state, part + 3, n_pieces)
        if quantise:
            while True:
                i = take_piece(state, part + 4, pieces)
                if i >= pieces:
                    break
                for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                    quantise_row(quantise, mixed[r], codes_mixed[r], act_scales_mixed[r])
                finish_piece(state, part + 4)
            wait_for_pieces(state, part + 4, pieces)
        _run_product_part(state, part + 5, threads, m[OUT : OUT + 1], one, tables, n_rows, mixed_rows, delta)
        while True:
            i = take_piece(state, part + 6, pieces)
            if i >= pieces:
                break
            for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
                _norm_and_quantise_row(
                    x[r], delta[r], True, norms[2 * layer + 1], eps, normed[r], quantise, codes_wide[r], act_scales_wide[r]
                )
            finish_piece(state, part + 6)
        wait_for_pieces(state, part + 6, pieces)
        has_experts = experts[1].shape[0] > 0 and experts[1][layer, moe.N_EXPERTS] > 0
        if not has_experts or experts[1][layer, moe.SHARED] != moe.NO_SHARED:
            _run_mlp_part(state, part + 7, threads, m[GATE : UP + 1], tables, (quantise, silu), n_rows, wide_rows, mlp_buffers)
            _run_product_part(state, part + 8, threads, m[DOWN : DOWN + 1], one, tables, n_rows, middle_rows, delta)
        if has_experts:
            mixture = experts[0][layer], experts[1][layer], pairs.ids[layer], experts[2][layer], experts[3][layer]
            rows = n_rows, wide_rows, (normed, codes_wide, act_scales_wide)
            _run_experts(state, part + 9, threads, mixture, (tables, (quantise, activate)), rows, choice, pairs, delta)
        part += PARTS
    n_wanted, n_kept = wanted.shape[0], states.shape[0]
    weight = norms[norms.shape[0] - 1]
    while True:
        i = take_piece(state, part, n_wanted + n_kept)
        if i >= n_wanted + n_kept:
            break
        row = np.empty(hidden, np.float32)
        r = wanted[i] if i < n_wanted else i - n_wanted
        for j in range(hidden):
            row[j] = x[r, j] + delta[r, j]
        if i < n_wanted:
            norm_row(row, weight, eps, normed[i, :hidden])
            quantise_row(quantise, normed[i], codes_wide[i], act_scales_wide[i])
        else:
            norm_row(row, weight, eps, states[r])
        finish_piece(state, part)
    wait_for_pieces(state, part, n_wanted + n_kept)
    if n_wanted:
        head = matrices[matrices.shape[0] - 1]
        _run_head_part(state, part + 1, thread, threads, head, tables, n_wanted, wide_rows, results)

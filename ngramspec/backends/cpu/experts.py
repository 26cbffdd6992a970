"""Compute mixtures of experts in compiled code: choose experts per row, multiply the rows of one expert together, sum per row.

Each row's experts are chosen by the router's float32 logits, equal ones by lowest id, and summed in the order of that choice, so that no
bit depends on which other rows are computed. A row with one of its experts is a pair; pairs are sorted by expert, which only decides
what is multiplied together. Functions that take `state` and `part` run one part of a pass (`threads`). The module knows rows and weights,
nothing of layers, attention or batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ngramspec.backends.cpu.codegen.intrinsics import call_kernel
from ngramspec.backends.cpu.formats import DEPTH, SUPER, WIDTH
from ngramspec.backends.cpu.matmul import (
    BY_BLOCK,
    CACHED,
    INT8,
    PANEL_BYTES,
    PANELS,
    Matrix,
    locate_rows,
    make_code_buffers,
    multiply,
    quantise_row,
)
from ngramspec.backends.cpu.threads import take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.models.expert_weights import ONE_GROUP, ExpertGroups
from ngramspec.sampling.numeric import compute_sigmoid, exp

_F = np.float32
GATE, UP, DOWN, ROUTER = range(
    4
)  # indices of a layer's matrices of experts; those of all experts lie one after the other in the first three
# Fields of a layer's options; PAIRS: whether the score of a group of experts is the sum of its two best, instead of its best.
N_EXPERTS, TOP_K, SCORING, NORMALISE, SHARED, N_GROUPS, TOP_GROUPS, PAIRS = range(8)
OPTIONS = 8
SOFTMAX, SIGMOID = range(2)  # values of SCORING: how logits become weights
NO_SHARED, SHARED_FULLY, SHARED_BY_GATE = range(3)  # values of SHARED: the router's last output is the shared expert's gate, if it has one
SHARES = 8  # Pieces of the experts' last product per thread.
PIECES = 64  # Most pieces that row-wise work is divided into.
CHOSEN_PARTS = 4


class Experts(NamedTuple):
    """The experts of one layer."""

    matrices: tuple[Matrix, Matrix, Matrix, Matrix]
    """GATE to ROUTER. The first three have E times the panels of one expert. If experts are not gated, GATE and UP are the same."""
    n_experts: int
    top_k: int
    scoring: int
    normalise: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of all weights."""
    correction: np.ndarray | None = None
    """[E] float32: added to scores for the choice alone."""
    shared: int = NO_SHARED
    activation: str | tuple[float, float] = "silu"
    """See `Kernels.get_gated_activation`."""
    groups: ExpertGroups = ONE_GROUP

    @property
    def fields(self) -> np.ndarray:
        """[4, MATRIX] int64: fields of the matrices, those of experts with PANELS of one expert, UP with 0 if they are not gated."""
        fields = np.stack([m.fields for m in self.matrices])
        fields[:ROUTER, PANELS] //= self.n_experts
        fields[UP, PANELS] *= self.matrices[UP] is not self.matrices[GATE]
        return fields

    @property
    def options(self) -> np.ndarray:
        """[OPTIONS] int64"""
        return np.array([self.n_experts, self.top_k, self.scoring, self.normalise, self.shared, *self.groups], np.int64)

    @property
    def inner(self) -> int:
        """Outputs of one expert's gate, in whole panels."""
        return self.matrices[GATE].weight.n_panels // self.n_experts * WIDTH


class PairBuffers(NamedTuple):
    """Buffers for the P pairs of a pass and the T rows that they belong to."""

    logits: np.ndarray  # [T, outputs of the router in whole panels]
    ids: np.ndarray  # [L, T, top_k] int32: chosen experts of each layer, best first
    weights: np.ndarray  # [T, top_k + 1]: theirs, and that of the shared expert
    x: np.ndarray  # [P, H] rows of pairs; [0, H] if they are multiplied as codes
    codes: np.ndarray  # of x, see `matmul.make_code_buffers`
    act_scales: np.ndarray
    both: np.ndarray  # [P, 2, inner]: outputs of gate and up
    middle: np.ndarray  # [P, inner]
    middle_codes: np.ndarray
    middle_act_scales: np.ndarray
    added: np.ndarray  # [P, H in whole panels]: outputs of the experts


def make_pair_buffers(layers: list[Experts], n_rows: int, width: int, n_layers: int) -> PairBuffers:
    """Make buffers for passes of up to `n_rows` rows through `n_layers` layers, of which `layers` have experts (none: empty buffers).

    `width`: H in whole quant blocks. Each layer's choice has a place of its own: a thread that is late reads it, to know how many pieces
    the parts had, while others choose experts for later layers.
    """
    most_k = max((each.top_k for each in layers), default=0)
    outputs = max((each.matrices[ROUTER].weight.n_panels for each in layers), default=0) * WIDTH
    inner = -(-max((each.inner for each in layers), default=0) // DEPTH) * DEPTH
    n = n_rows if layers else 0
    pairs = n * most_k
    plain = any(m.fields[INT8] == 0 for each in layers for m in each.matrices[:DOWN])

    def allocate(*shape: int, dtype: type[np.generic] = np.float32) -> np.ndarray:
        return np.zeros(shape, dtype)

    return PairBuffers(
        allocate(n, outputs), allocate(n_layers, n, most_k, dtype=np.int32), allocate(n, most_k + 1),
        allocate(pairs if plain else 0, width), *make_code_buffers(pairs, width), allocate(pairs, 2, inner), allocate(pairs, inner),
        *make_code_buffers(pairs, inner), allocate(pairs, -(-width // WIDTH) * WIDTH),
    )  # fmt: skip


@njit(cache=True, nogil=True, error_model="numpy")
def _measure_softmax(logits, n):
    """Return the greatest of the first `n` logits, and the sum of their exponentials relative to that of the greatest."""
    most, total = logits[0], _F(0)
    for e in range(1, n):
        most = max(most, logits[e])
    for e in range(n):
        total += exp(logits[e] - most)
    return most, total


@njit(cache=True, nogil=True, error_model="numpy")
def _choose_groups(logits, correction, options, chosen):
    """Set the flags [groups] of a row's best groups of experts; of equal ones those with the lowest numbers are chosen."""
    n_groups, size, sigmoid = chosen.shape[0], options[N_EXPERTS] // chosen.shape[0], options[SCORING] == SIGMOID
    most, total = (_F(0), _F(1)) if sigmoid else _measure_softmax(logits, options[N_EXPERTS])
    if not correction.shape[0]:
        total = _F(1)
    scores = np.empty(n_groups, np.float32)
    for g in range(n_groups):
        best = second = _F(-np.inf)
        for e in range(g * size, (g + 1) * size):
            score = compute_sigmoid(logits[e]) if sigmoid else exp(logits[e] - most) / total
            if correction.shape[0]:
                score += correction[e]
            best, second = max(best, score), max(second, min(best, score))
        scores[g] = best + second if options[PAIRS] else best
    for _ in range(options[TOP_GROUPS]):
        at = np.int64(-1)
        for g in range(n_groups):
            if not chosen[g] and (at < 0 or scores[g] > scores[at]):
                at = g
        chosen[at] = True


@njit(cache=True, nogil=True, error_model="numpy")
def choose_experts(logits, correction, options, scale, ids, weights):
    """Choose a row's experts by its logits [E]: ids [top_k] int32, best first and equal ones by lowest id, and weights [top_k] float32.

    `correction` [E], or [0] for none, is added to the scores for the choice alone. The groups that are chosen have at least top_k experts.
    """
    n, k = options[N_EXPERTS], options[TOP_K]
    sigmoid, corrected = options[SCORING] == SIGMOID, correction.shape[0] > 0
    most, total = _measure_softmax(logits, n) if corrected and not sigmoid else (_F(0), _F(1))
    best = np.empty(k, np.float32)
    n_found, groups = 0, np.zeros(max(np.int64(1), options[N_GROUPS]), np.bool_)
    size = n // groups.shape[0]
    if groups.shape[0] > 1:
        _choose_groups(logits, correction, options, groups)
    for e in range(n):
        if groups.shape[0] > 1 and not groups[e // size]:
            continue
        score = compute_sigmoid(logits[e]) if sigmoid else logits[e]
        if corrected:
            score = correction[e] + (score if sigmoid else exp(score - most) / total)
        if n_found == k and not score > best[k - 1]:
            continue
        at = min(n_found, k - 1)
        while at > 0 and score > best[at - 1]:
            best[at], ids[at] = best[at - 1], ids[at - 1]
            at -= 1
        best[at], ids[at] = score, e
        n_found = min(n_found + 1, k)
    total = _F(0)
    if sigmoid:
        for i in range(k):
            weights[i] = compute_sigmoid(logits[ids[i]])
            total += weights[i]
    else:
        if not corrected:
            most = logits[ids[0]]
        for i in range(k):
            weights[i] = exp(logits[ids[i]] - most)
            total += weights[i]
        if not options[NORMALISE]:
            total = _F(0)
            for e in range(n):
                total += exp(logits[e] - most)
    if options[NORMALISE] or not sigmoid:
        for i in range(k):
            weights[i] /= total
    for i in range(k):
        weights[i] *= scale
    if options[SHARED]:
        weights[k] = compute_sigmoid(logits[n]) if options[SHARED] == SHARED_BY_GATE else _F(1)


@njit(cache=True, nogil=True)
def allocate_choice(n_rows, pairs, options):
    """Allocate what `_sort_pairs` fills in for `n_rows` rows in a layer; options [OPTIONS]."""
    n, most = n_rows * pairs.ids.shape[2], options[N_EXPERTS]
    return np.empty(n, np.int64), np.empty(n, np.int64), np.empty(most + 1, np.int64), np.empty(most, np.int64)


@njit(cache=True, nogil=True)
def _sort_pairs(ids, n_rows, k, n_experts, order, place, starts, active):
    """Sort the pairs of rows and experts ids [T, top_k] by expert, then by row; return how many experts have any.

    order [P]: the rows of the sorted pairs; place [P]: where the i-th of a row's pairs, number row · k + i, went; active: experts with
    pairs; starts: where those of the i-th active one begin.
    """
    counts = np.zeros(n_experts + 1, np.int64)
    for r in range(n_rows):
        for i in range(k):
            counts[np.int64(ids[r, i]) + 1] += 1
    n_active = 0
    for e in range(n_experts):
        if counts[e + 1]:
            active[n_active], starts[n_active] = e, counts[e]
            n_active += 1
        counts[e + 1] += counts[e]
    starts[n_active] = n_rows * k
    for r in range(n_rows):
        for i in range(k):
            at = counts[np.int64(ids[r, i])]
            counts[np.int64(ids[r, i])] = at + 1
            order[at], place[r * k + i] = r, at
    return n_active


@njit(cache=True, nogil=True)
def _find_step(order, first, end):
    """Return the distance between the rows of pairs first to end if it is always the same, else -1."""
    step = order[first + 1] - order[first] if end - first > 1 else np.int64(0)
    for i in range(first + 2, end):
        if order[i] - order[i - 1] != step:
            return np.int64(-1)
    return step


@njit(cache=True, nogil=True)
def _gather_rows(state, part, m, order, starts, n_active, rows, pairs):
    """Copy the rows of experts whose rows are not equally far apart to where their pairs lie; `rows`: x, codes, activation scales."""
    x, codes, act_scales = rows
    needed = False
    for i in range(n_active):
        needed |= _find_step(order, starts[i], starts[i + 1]) < 0
    if not needed:
        return
    i = take_piece(state, part)
    while i < n_active:
        if _find_step(order, starts[i], starts[i + 1]) < 0:
            for p in range(starts[i], starts[i + 1]):
                r = order[p]
                for kind in range(2):
                    if m[GATE, INT8] == kind + BY_BLOCK or m[UP, INT8] == kind + BY_BLOCK:
                        for j in range(codes.shape[2]):
                            pairs.codes[p, kind, j] = codes[r, kind, j]
                        for j in range(act_scales.shape[2]):
                            for f in range(4):
                                pairs.act_scales[p, kind, j, f] = act_scales[r, kind, j, f]
                if m[GATE, INT8] == 0 or m[UP, INT8] == 0:
                    for j in range(x.shape[1]):
                        pairs.x[p, j] = x[r, j]
        i = take_next_piece(state, part)
    wait_for_pieces(state, part, n_active)


@njit(cache=True, nogil=True)
def _shift_rows(inputs, row, step):
    """Return where every `step`-th row from `row` on lies, if `inputs` says where all rows lie (`matmul.locate_rows`)."""
    x, x_step, codes, codes_step, codes_shift, act_scales, act_scales_step, act_scales_shift = inputs
    return (
        np.int64(x) + row * x_step, step * x_step, np.int64(codes) + row * codes_step, step * codes_step, codes_shift,
        np.int64(act_scales) + row * act_scales_step, step * act_scales_step, act_scales_shift,
    )  # fmt: skip


@njit(cache=True, nogil=True)
def _run_inner_part(state, part, m, code, choice, n_active, row_inputs, pair_inputs, pairs):
    """Compute gate · up of all pairs, or what experts without a gate make of up, and its codes.

    A piece is one expert's rows and 256 of the products' outputs.

    `code`, `choice`: see `run_chosen`; `row_inputs`, `pair_inputs`: where rows and gathered rows lie.
    """
    (tables, functions), (order, _, starts, active) = code, choice
    quantise, activate = functions
    both, middle, codes, act_scales = pairs.both, pairs.middle, pairs.middle_codes, pairs.middle_act_scales
    n_panels = m[GATE, PANELS]
    n_blocks = (n_panels * WIDTH + DEPTH - 1) // DEPTH
    per_expert = (n_blocks + SUPER - 1) // SUPER
    total = n_active * per_expert
    piece = take_piece(state, part)
    while piece < total:
        i, first = piece // per_expert, piece % per_expert * SUPER
        end = min(n_blocks, first + SUPER)
        start, n_rows = starts[i], starts[i + 1] - starts[i]
        step = _find_step(order, start, starts[i + 1])
        inputs = _shift_rows(pair_inputs, start, np.int64(1)) if step < 0 else _shift_rows(row_inputs, order[start], step)
        panel = active[i] * n_panels
        for j in range(2 if m[UP, PANELS] else 1):
            y = both.ctypes.data + start * both.strides[0] + j * both.strides[1] - panel * 4 * WIDTH
            multiply(m[j], tables, panel + 2 * first, panel + min(n_panels, 2 * end), n_rows, inputs, y, both.strides[0])
        a, b = first * DEPTH, end * DEPTH
        for p in range(start, starts[i + 1]):
            row = middle[p, a:b]
            call_kernel(
                activate,
                (both[p, 0, a:b].ctypes.data, both[p, 1, a:b].ctypes.data, end - first, row.ctypes.data, 0, 0, 0, 0, 0, 0, 0, 0, 0),
            )
            quantise_row(quantise, row, codes[p, :, a:b], act_scales[p, :, first:end])
        piece = take_next_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True)
def _run_outer_part(state, part, n_threads, m, tables, choice, n_active, middle_inputs, pairs):
    """Multiply what `_run_inner_part` left by each pair's last matrix."""
    _, _, starts, active = choice
    added = pairs.added
    n_panels = m[DOWN, PANELS]
    step = max(1, min(n_active * n_panels // (SHARES * n_threads), CACHED // m[DOWN, PANEL_BYTES], n_panels))
    per_expert = (n_panels + step - 1) // step
    total = n_active * per_expert
    piece = take_piece(state, part)
    while piece < total:
        i, first = piece // per_expert, piece % per_expert * step
        start, panel = starts[i], active[i] * n_panels
        y = added.ctypes.data + start * added.strides[0] - panel * 4 * WIDTH
        multiply(
            m[DOWN], tables, panel + first, panel + min(n_panels, first + step), starts[i + 1] - start,
            _shift_rows(middle_inputs, start, np.int64(1)), y, added.strides[0],
        )  # fmt: skip
        piece = take_next_piece(state, part)
    wait_for_pieces(state, part, total)


@njit(cache=True, nogil=True, error_model="numpy")
def _sum_experts(row, options, weights, place, added, out):
    """Sum one row's experts in the order of its choice, then the shared one, which `out` [H] holds before: out [H].

    weights [top_k + 1]; place, added: as in `_sort_pairs` and `PairBuffers`; the row's part of `added` is overwritten.
    """
    k, n = options[TOP_K], out.shape[0]
    total, weight = added[place[row * k]], weights[0]
    for j in range(n):
        total[j] *= weight
    for i in range(1, k):
        other, weight = added[place[row * k + i]], weights[i]
        for j in range(n):
            total[j] += weight * other[j]
    if options[SHARED] != NO_SHARED:
        weight = weights[k]
        for j in range(n):
            out[j] = total[j] + weight * out[j]
    else:
        for j in range(n):
            out[j] = total[j]


@njit(cache=True, nogil=True)
def run_chosen(state, part, n_threads, layer, code, rows, choice, pairs, out):
    """Run the CHOSEN_PARTS parts that compute a layer's chosen experts: out [T, H], which holds the shared expert's output before.

    `layer`: matrices [4, MATRIX], options [OPTIONS], chosen experts [T, top_k]; `code`: tables of kernels and addresses of quantise and of
    the activation; `rows`: their number, where they lie (`matmul.locate_rows`), and x, codes, activation scales; `choice`: see
    `allocate_choice`.
    """
    (m, options, ids), (n_rows, inputs, arrays), (order, place, starts, active) = layer, rows, choice
    n_active = _sort_pairs(ids, n_rows, options[TOP_K], options[N_EXPERTS], order, place, starts, active)
    _gather_rows(state, part, m, order, starts, n_active, arrays, pairs)
    gathered = locate_rows(pairs.x, pairs.codes, pairs.act_scales)
    _run_inner_part(state, part + 1, m, code, choice, n_active, inputs, gathered, pairs)
    middle = locate_rows(pairs.middle, pairs.middle_codes, pairs.middle_act_scales)
    _run_outer_part(state, part + 2, n_threads, m, code[0], choice, n_active, middle, pairs)
    pieces = min(n_rows, PIECES)
    i = take_piece(state, part + 3)
    while i < pieces:
        for r in range(n_rows * i // pieces, n_rows * (i + 1) // pieces):
            _sum_experts(r, options, pairs.weights[r], place, pairs.added, out[r])
        i = take_next_piece(state, part + 3)
    wait_for_pieces(state, part + 3, pieces)

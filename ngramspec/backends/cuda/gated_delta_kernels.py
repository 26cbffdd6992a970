"""Compute the recurrence of layers with Gated DeltaNet over trees of rows on a CUDA device, four launches a layer.

A head's state S [K, V] after a token is decay · S + k ⊗ beta · (v - decay · kᵀS), where q, k and v come from a convolution over the token
and the three before it. A pass begins with the state after the last known row of the pass before: it replays the draft rows that were
accepted, from their logged inputs, computes the known rows, stores the state, and walks the draft tree on copies, which are never stored.
`_convolve_rows` prepares every row, replayed ones included; `_advance_states` takes the states through them; `_gate_heads` norms and gates
what was read; `_keep_inputs` leaves the next pass the inputs of draft rows and those that its convolutions see.

Every row is one step of the same compiled code, whatever else is in the pass: a prompt in chunks, a chain, a tree and plain decoding have
the same bits. Columns of a state do not depend on each other. The module knows rows and states, nothing of requests;
`gpu_recurrent_pool` has the states and plans the walk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.attention_metadata import RecurrentRows
from ngramspec.backends.cuda.overlap import await_previous, overlap_options

TAPS = 4  # Tokens that a convolution sees, its own among them.
MOST_NODES = 64  # Most nodes of a sequence's draft tree.

# Words of a sequence in `RecurrentRows.spans`. BOUNDARY: row after which the state is also written to the snapshot SNAPSHOT. From PATH on:
# the nodes of the last pass's tree that are replayed.
SLOT, FIRST, ROOT, END, N_REPLAYED, IS_FRESH, BOUNDARY, SNAPSHOT, PATH = range(9)
SPAN_WORDS = PATH + MOST_NODES

# Words of a row in `RecurrentRows.table`: its sequence in the pass (-1: none), its parent's row (-1: the row before it), and a step of the
# walk that has nothing else to do with this row: the row that is computed; the state to begin with (-1: the one at hand, 0: that of the
# last known row, n: copy n - 1); the copy to save the new state in (-1: none); whether the new state is then the one at hand.
OWNER, PARENT, STEP, BEGIN_WITH, SAVE_IN, ADVANCES = range(6)
ROW_WORDS = 6

COLUMNS = 8  # Columns of a state that one program takes through all rows.
CHANNELS = 256  # Channels whose inputs one program keeps.

_TAPS, _MOST_NODES = tl.constexpr(TAPS), tl.constexpr(MOST_NODES)
_SLOT, _FIRST, _ROOT, _END, _N_REPLAYED = (tl.constexpr(i) for i in (SLOT, FIRST, ROOT, END, N_REPLAYED))
_IS_FRESH, _BOUNDARY, _SNAPSHOT, _PATH, _SPAN_WORDS = (tl.constexpr(i) for i in (IS_FRESH, BOUNDARY, SNAPSHOT, PATH, SPAN_WORDS))
_OWNER, _PARENT, _STEP, _BEGIN_WITH, _SAVE_IN, _ADVANCES = (tl.constexpr(i) for i in range(6))
_ROW_WORDS, _HEAD_EPS = tl.constexpr(ROW_WORDS), tl.constexpr(1e-6)


class DeltaShape(NamedTuple):
    """The sizes of a model's layers with Gated DeltaNet, constants of the compiled kernels."""

    n_layers: int
    n_key_heads: int
    n_heads: int
    """Heads of values."""
    key_dim: int
    value_dim: int
    n_channels: int
    """Inputs of the convolution: queries and keys of all heads of keys, then values of all heads."""
    row_width: int
    """Columns of the product that has them, followed by the gates z."""
    gates_width: int
    """Columns of the product that has the gates b and a, side by side; the same if one product has all."""


class DeltaInputs(NamedTuple):
    """What a layer's products computed of a pass's R rows, in the model's dtype."""

    rows: torch.Tensor  # [R, row_width]: inputs of the convolution, gates z
    gates: torch.Tensor  # from a row's gates b on, gates_width apart


class DeltaWeights(NamedTuple):
    """A layer's weights beside its products."""

    conv: torch.Tensor  # [n_channels, TAPS]
    rates: torch.Tensor  # [2, n_heads] float32: -exp(A_log), and what is added to a
    norm: torch.Tensor  # [value_dim]


class DeltaStates(NamedTuple):
    """One layer's part of the arrays of all sequences; `slots` and `snapshots` stand for how many there are."""

    state: torch.Tensor  # [slots, n_heads, K, V] float32: after the last known row of the sequence's last pass
    tails: torch.Tensor  # [slots, TAPS - 1, n_channels]: inputs of that row and those before it, oldest first
    log: torch.Tensor  # [slots, MOST_NODES, n_channels + 2 · n_heads]: inputs and gates b and a of that pass's draft rows
    kept_state: torch.Tensor  # [snapshots, n_heads, K, V] float32
    kept_tails: torch.Tensor  # [snapshots, TAPS - 1, n_channels]


class _RowArrays(NamedTuple):
    spans: torch.Tensor
    table: torch.Tensor


@triton.jit
def _step_back(at, first, table):
    """Return where the input before that at `at` is: a row from `first` on, or -1, -2, … for the ones before the pass."""
    parent = tl.load(table + at * _ROW_WORDS + _PARENT, mask=at > first, other=-1)
    return tl.where((at > first) & (parent >= 0), parent, tl.where(at == first, -1, at - 1))


@triton.jit
def _load_inputs(of_rows, of_log, of_tail, path_end, at, n_replayed, is_fresh, inside, SHAPE: tl.constexpr):
    """Load inputs of the convolution as the row at `at` (see `_step_back`) has them; zeros before the text begins.

    The pointers are those of the channels in the pass's first row, in the sequence's log and in its tail; `path_end` + at is the node of an
    input before the pass.
    """
    is_row, is_logged = at >= 0, (at < 0) & (at >= -n_replayed)
    is_tail = (at < -n_replayed) & (is_fresh == 0)
    width: tl.constexpr = SHAPE.n_channels + 2 * SHAPE.n_heads
    node = tl.load(path_end + at, mask=is_logged, other=0)
    i_tail = tl.where(is_tail, _TAPS - 1 + at + n_replayed, 0)
    of_row = tl.load(of_rows + tl.maximum(at, 0).to(tl.int64) * SHAPE.row_width, mask=inside & is_row, other=0.0)
    logged = tl.load(of_log + node * width, mask=inside & is_logged, other=0.0)
    of_tail = tl.load(of_tail + i_tail * SHAPE.n_channels, mask=inside & is_tail, other=0.0)
    return tl.where(is_row, of_row, tl.where(is_logged, logged, of_tail))


@triton.jit
def _load_gate(of_rows, of_log, path_end, at, SHAPE: tl.constexpr):
    """Load a gate of a row, or of one that is replayed, as float32."""
    width: tl.constexpr = SHAPE.n_channels + 2 * SHAPE.n_heads
    of_row = tl.load(of_rows + tl.maximum(at, 0).to(tl.int64) * SHAPE.gates_width, mask=at >= 0, other=0.0)
    logged = tl.load(of_log + tl.load(path_end + at, mask=at < 0, other=0) * width, mask=at < 0, other=0.0)
    return tl.where(at >= 0, of_row, logged).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def _convolve_rows(x, rows, states, weights, prepared, n_rows, SHAPE: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr):
    """Prepare one head's part of a row, and of the replayed rows that fall to it: a sequence's rows share them."""
    await_previous(OVERLAP)
    row, head = tl.program_id(0), tl.program_id(1)
    owner = tl.load(rows.table + row * _ROW_WORDS + _OWNER)
    if owner >= 0:
        span = rows.spans + owner * _SPAN_WORDS
        first, n_replayed, is_fresh = tl.load(span + _FIRST), tl.load(span + _N_REPLAYED), tl.load(span + _IS_FRESH)
        slot, path_end = tl.load(span + _SLOT).to(tl.int64), span + _PATH + n_replayed
        n_sharing, mine = tl.load(span + _END) - first, row - first
        dtype: tl.constexpr = x.rows.dtype.element_ty
        keys: tl.constexpr = 2 * SHAPE.n_key_heads
        width: tl.constexpr = SHAPE.n_channels + 2 * SHAPE.n_heads
        is_value = head >= keys
        d = tl.arange(0, WIDE)
        inside = d < tl.where(is_value, SHAPE.value_dim, SHAPE.key_dim)
        channels = tl.where(is_value, keys * SHAPE.key_dim + (head - keys) * SHAPE.value_dim, head * SHAPE.key_dim) + d
        log, of_rows = states.log + slot * SHAPE.n_layers * _MOST_NODES * width, x.rows + channels
        of_tail = states.tails + slot * SHAPE.n_layers * (_TAPS - 1) * SHAPE.n_channels + channels
        for i in range(1 + (n_replayed - mine + n_sharing - 1) // n_sharing):
            j = mine + (i - 1) * n_sharing
            here, entry = row, row
            if i > 0:
                here, entry = j - n_replayed, n_rows + owner * _MOST_NODES + j
            at = here
            total = tl.zeros([WIDE], tl.float32)
            for t in tl.static_range(_TAPS):
                tap = tl.load(weights.conv + channels * _TAPS + (_TAPS - 1 - t), mask=inside, other=0.0).to(tl.float32)
                inputs = _load_inputs(of_rows, log + channels, of_tail, path_end, at, n_replayed, is_fresh, inside, SHAPE)
                total += tap * inputs.to(tl.float32)
                at = _step_back(at, first, rows.table)
            total = total.to(dtype).to(tl.float32)
            total = (total / (1.0 + tl.exp(-total))).to(dtype).to(tl.float32)
            to = prepared + entry.to(tl.int64) * width
            scale = tl.rsqrt(tl.sum(total * total, axis=0) + _HEAD_EPS)
            if head < SHAPE.n_key_heads:
                scale *= SHAPE.key_dim**-0.5
            tl.store(to + channels, tl.where(is_value, total, total * scale), mask=inside)
            if is_value:
                column = head - keys
                of_log, of_rates = log + SHAPE.n_channels + column, weights.rates + column
                b = _load_gate(x.gates + column, of_log, path_end, here, SHAPE)
                a = _load_gate(x.gates + SHAPE.n_heads + column, of_log + SHAPE.n_heads, path_end, here, SHAPE)
                a += tl.load(of_rates + SHAPE.n_heads)
                softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
                gates = to + SHAPE.n_channels + 2 * column
                tl.store(gates, tl.exp(tl.load(of_rates) * softplus))
                tl.store(gates + 1, (1.0 / (1.0 + tl.exp(-b))).to(dtype).to(tl.float32))


@triton.jit
def _find_step(table, s, n_replayed, first, n_rows, replayed, n):
    """Return the words of the walk's s-th step in the table, and its entry among the prepared ones; past the end, the last one's."""
    s = tl.minimum(s, n - 1)
    words = table + tl.maximum(first + s - n_replayed, 0) * _ROW_WORDS
    return words, tl.where(s < n_replayed, n_rows + replayed + s, tl.load(words + _STEP)).to(tl.int64)


@triton.jit
def _load_entry(of_entry, i_query, i_key, i_column, i_rate, inside):
    """Load query, key, values, decay and beta of a prepared row."""
    v = tl.load(of_entry + i_column, mask=inside, other=0.0)
    return tl.load(of_entry + i_query), tl.load(of_entry + i_key), v, tl.load(of_entry + i_rate), tl.load(of_entry + i_rate + 1)


@triton.jit(do_not_specialize=["n_rows"])
def _advance_states(rows, states, prepared, copies, out, n_rows, SHAPE: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """Take some columns of one head's state of one sequence through replayed, known and draft rows."""
    await_previous(OVERLAP)
    head, span = tl.program_id(1), rows.spans + tl.program_id(2) * _SPAN_WORDS
    slot = tl.load(span + _SLOT).to(tl.int64)
    if slot >= 0:
        first, root, n_replayed = tl.load(span + _FIRST), tl.load(span + _ROOT), tl.load(span + _N_REPLAYED)
        boundary, snapshot = tl.load(span + _BOUNDARY), tl.load(span + _SNAPSHOT).to(tl.int64)
        K: tl.constexpr = SHAPE.key_dim
        V: tl.constexpr = SHAPE.value_dim
        width: tl.constexpr = SHAPE.n_channels + 2 * SHAPE.n_heads
        i_key, i_value = tl.arange(0, K), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        inside = (i_value < V)[None, :] & (i_key >= 0)[:, None]
        at = i_key[:, None] * V + i_value[None, :]
        known = states.state + (slot * SHAPE.n_layers * SHAPE.n_heads + head) * (K * V) + at
        kept = states.kept_state + (snapshot * SHAPE.n_layers * SHAPE.n_heads + head) * (K * V) + at
        copy = copies + head * (K * V) + at
        i_query = head // (SHAPE.n_heads // SHAPE.n_key_heads) * K + i_key
        i_key = SHAPE.n_key_heads * K + i_query
        i_column = 2 * SHAPE.n_key_heads * K + head * V + i_value
        state = tl.load(known, mask=inside & (tl.load(span + _IS_FRESH) == 0), other=0.0)
        last_known = state
        n, replayed = n_replayed + tl.load(span + _END) - first, tl.program_id(2) * _MOST_NODES
        i_rate, column_inside = SHAPE.n_channels + 2 * head, i_value < V
        words, entry = _find_step(rows.table, 0, n_replayed, first, n_rows, replayed, n)
        q, k, v, decay, beta = _load_entry(prepared + entry * width, i_query, i_key, i_column, i_rate, column_inside)
        next_words, entry = _find_step(rows.table, 1, n_replayed, first, n_rows, replayed, n)
        for s in range(n):  # what the next step reads is asked for before this one computes
            is_row = s >= n_replayed
            row = tl.load(words + _STEP, mask=is_row, other=-1)
            begin_with, save_in = tl.load(words + _BEGIN_WITH, mask=is_row, other=-1), tl.load(words + _SAVE_IN, mask=is_row, other=-1)
            advances = tl.load(words + _ADVANCES, mask=is_row, other=1)
            of_entry, words = prepared + entry * width, next_words
            next_q, next_k, next_v, next_decay, next_beta = _load_entry(of_entry, i_query, i_key, i_column, i_rate, column_inside)
            next_words, entry = _find_step(rows.table, s + 2, n_replayed, first, n_rows, replayed, n)
            state = tl.where(begin_with == 0, last_known, state)
            if begin_with > 0:
                tl.debug_barrier()
                state = tl.load(copy + (begin_with - 1).to(tl.int64) * (SHAPE.n_heads * K * V), mask=inside, other=0.0)
            new = state * decay
            change = (v - tl.sum(new * k[:, None], axis=0)) * beta
            new += k[:, None] * change[None, :]
            attended = tl.sum(new * q[:, None], axis=0)
            to = out + tl.maximum(row, 0).to(tl.int64) * (SHAPE.n_heads * V) + head * V + i_value
            tl.store(to, attended.to(out.dtype.element_ty), mask=is_row & column_inside)
            state = tl.where(advances != 0, new, state)
            last_known = tl.where(row == root, state, last_known)
            if is_row & (row == boundary):
                tl.store(kept, state, mask=inside)
            if save_in >= 0:
                tl.store(copy + save_in.to(tl.int64) * (SHAPE.n_heads * K * V), state, mask=inside)
            q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta
        tl.store(known, last_known, mask=inside)


@triton.jit
def _gate_heads(attended, x, norm, rows, out, eps, SHAPE: tl.constexpr, WIDE: tl.constexpr, OVERLAP: tl.constexpr):
    await_previous(OVERLAP)
    row, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDE)
    V: tl.constexpr = SHAPE.value_dim
    dtype: tl.constexpr = out.dtype.element_ty
    inside = d < V
    is_used = tl.load(rows.table + row * _ROW_WORDS + _OWNER) >= 0  # rows that only fill up a bucket were not written
    at = (row.to(tl.int64) * SHAPE.n_heads + head) * V + d
    value = tl.load(attended + at, mask=inside & is_used, other=0.0).to(tl.float32)
    gate = tl.load(x.rows + row.to(tl.int64) * SHAPE.row_width + SHAPE.n_channels + head * V + d, mask=inside, other=0.0).to(tl.float32)
    value = (value * tl.rsqrt(tl.sum(value * value, axis=0) / V + eps)).to(dtype).to(tl.float32)
    value = (tl.load(norm + d, mask=inside, other=0.0).to(tl.float32) * value).to(dtype).to(tl.float32)
    tl.store(out + at, (value * (gate / (1.0 + tl.exp(-gate)))).to(dtype), mask=inside)


@triton.jit
def _keep_inputs(x, rows, states, SHAPE: tl.constexpr, CHANNELS: tl.constexpr, OVERLAP: tl.constexpr):
    """Keep some channels' inputs of one sequence: the last known ones, those at a boundary, and the draft rows'."""
    await_previous(OVERLAP)
    channels, span = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), rows.spans + tl.program_id(1) * _SPAN_WORDS
    slot = tl.load(span + _SLOT).to(tl.int64)
    if slot >= 0:
        first, root, boundary = tl.load(span + _FIRST), tl.load(span + _ROOT), tl.load(span + _BOUNDARY)
        n_replayed, is_fresh = tl.load(span + _N_REPLAYED), tl.load(span + _IS_FRESH)
        C: tl.constexpr = SHAPE.n_channels
        width: tl.constexpr = C + 2 * SHAPE.n_heads
        inside, path_end, of_rows = channels < C, span + _PATH + n_replayed, x.rows + channels
        log = states.log + slot * SHAPE.n_layers * _MOST_NODES * width + channels
        tail = states.tails + slot * SHAPE.n_layers * (_TAPS - 1) * C + channels
        if boundary >= 0:
            at = boundary
            kept = states.kept_tails + tl.load(span + _SNAPSHOT).to(tl.int64) * SHAPE.n_layers * (_TAPS - 1) * C + channels
            for t in tl.static_range(_TAPS - 1):
                inputs = _load_inputs(of_rows, log, tail, path_end, at, n_replayed, is_fresh, inside, SHAPE)
                tl.store(kept + (_TAPS - 2 - t) * C, inputs, mask=inside)
                at = _step_back(at, first, rows.table)
        before = _step_back(root, first, rows.table)
        last = _load_inputs(of_rows, log, tail, path_end, root, n_replayed, is_fresh, inside, SHAPE)
        middle = _load_inputs(of_rows, log, tail, path_end, before, n_replayed, is_fresh, inside, SHAPE)
        before = _step_back(before, first, rows.table)
        oldest = _load_inputs(of_rows, log, tail, path_end, before, n_replayed, is_fresh, inside, SHAPE)
        tl.debug_barrier()  # what is overwritten from here on has been read
        tl.store(tail, oldest, mask=inside)
        tl.store(tail + C, middle, mask=inside)
        tl.store(tail + 2 * C, last, mask=inside)
        is_gate, node = (channels >= C) & (channels < width), (root + 1).to(tl.int64)
        of_rows, of_gates = of_rows + node * SHAPE.row_width, x.gates + node * SHAPE.gates_width + channels - C
        for i in range(tl.load(span + _END) - root - 1):
            of_row = tl.load(of_rows + i * SHAPE.row_width, mask=inside, other=0.0)
            gate = tl.load(of_gates + i * SHAPE.gates_width, mask=is_gate, other=0.0)
            tl.store(log + i * width, tl.where(inside, of_row, gate), mask=inside | is_gate)


class DeltaWorkspace:
    """What the layers of a pass use one after the other, for R rows."""

    def __init__(self, shape: DeltaShape, rows: RecurrentRows, dtype: torch.dtype, device: torch.device) -> None:
        n_rows, n_entries = len(rows.table), len(rows.table) + MOST_NODES * len(rows.spans)
        self.prepared = torch.empty(n_entries, shape.n_channels + 2 * shape.n_heads, dtype=torch.float32, device=device)
        state = shape.n_heads, shape.key_dim, shape.value_dim
        self.copies = torch.empty(max(rows.n_copies, 1), *state, dtype=torch.float32, device=device)
        self.attended = torch.empty(n_rows, shape.n_heads * shape.value_dim, dtype=dtype, device=device)


def run_recurrence(
    x: DeltaInputs, weights: DeltaWeights, eps: float, states: DeltaStates, rows: RecurrentRows, shape: DeltaShape, work: DeltaWorkspace
) -> torch.Tensor:
    """Compute a layer's heads for R rows, [R, n_heads · V] in the model's dtype, and bring the states up to date."""
    n_rows, n_heads, n_seqs = len(rows.table), shape.n_heads, len(rows.spans)
    out = torch.empty_like(work.attended)
    if not n_rows:
        return out
    arrays = _RowArrays(rows.spans, rows.table)
    options = {"enable_fp_fusion": False, **overlap_options(x.rows.device)}
    wide = triton.next_power_of_2(max(shape.key_dim, shape.value_dim))
    _convolve_rows[(n_rows, 2 * shape.n_key_heads + n_heads)](
        x, arrays, states, weights, work.prepared, n_rows, SHAPE=shape, WIDE=wide, num_warps=1, **options
    )
    _advance_states[(triton.cdiv(shape.value_dim, COLUMNS), n_heads, n_seqs)](
        arrays, states, work.prepared, work.copies, work.attended, n_rows, SHAPE=shape, COLUMNS=COLUMNS, num_warps=1, **options
    )
    _gate_heads[(n_rows, n_heads)](
        work.attended, x, weights.norm, arrays, out, eps, SHAPE=shape, WIDE=triton.next_power_of_2(shape.value_dim), num_warps=1, **options
    )
    _keep_inputs[(triton.cdiv(shape.n_channels + 2 * n_heads, CHANNELS), n_seqs)](
        x, arrays, states, SHAPE=shape, CHANNELS=CHANNELS, num_warps=2, **options
    )
    return out

"""Compute attention over the paged pool on the device: each row's softmax over its keys, in the order of their positions in the text.

`q [R, H, D]` goes in, `out [R, H, D]` comes out; `AttentionMetadata` says what each row may see. Nothing here knows models or requests.
Keys and values are `[n_blocks + 1, Hk, BLOCK, D]`, those of the pass's own rows already in place.

A text's keys are cut into splits, these into tiles, both at absolute positions. Within a split a running softmax takes tile after tile;
neighbouring splits are merged first to last in groups, then the groups. The attention schedule (`AttentionMetadata.shares`) assigns the
work: a program takes a share, that is some splits of an item (rows of one sequence that share what is loaded) for one key head. If an item
has several shares, the last program to finish with a group's splits merges them, with all groups in parallel, and the last of those merges
the groups: the same sums as if one program takes all, whatever else is in the batch. Keys are the M side of the matrix instructions and
rows times query heads the N side, so that an element of a product is made by the same instructions whatever the number of rows.

Up to the smallest position at which a row of the item sees other KV positions than its neighbours (a tree's branches), all rows share a
tile. From there on each row in turn gathers its own keys in logical order, and results are kept for its columns only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.attention_metadata import AttentionMetadata
from ngramspec.backends.cuda.attention_schedule import MERGED, WORDS
from ngramspec.backends.cuda.device import get_limits
from ngramspec.backends.cuda.overlap import await_previous, overlap_options
from ngramspec.outputs import BLOCK

TILE = 64  # Keys of a tile; also the M side of Hopper's matrix instruction.

_LN2 = 0.6931471805599453

# Kernels may read globals only as constants of the language.
_TILE, _BLOCK, _MERGED, _WORDS = tl.constexpr(TILE), tl.constexpr(BLOCK), tl.constexpr(MERGED), tl.constexpr(WORDS)
_LOG_OF_2 = tl.constexpr(_LN2)
_LOWEST = tl.constexpr(-1.0e30)  # below every score, and its difference from any score is finite
_BLOCKS = tl.constexpr(32)  # in the longest split
_FAR = tl.constexpr(2**31 - 1)


@triton.jit
def _split_first(s):
    """Return the first position of a split, as `attention_schedule.split_first` does."""
    return 128 * tl.minimum(s, 8) + 256 * tl.minimum(tl.maximum(s - 8, 0), 12) + 1024 * tl.maximum(s - 20, 0)


@triton.jit
def _split_of(position):
    """Return the split of a position."""
    return tl.minimum(position // 128, 8) + tl.minimum(tl.maximum(position - 1024, 0) // 256, 12) + tl.maximum(position - 4096, 0) // 1024


@triton.jit
def _merge(m, z, acc, m_next, z_next, acc_next):
    """Merge the softmax states of neighbouring stretches of keys: highest score m [N], sum of weights z [N], weighted values acc [D, N]."""
    top = tl.maximum(m, m_next)
    x, y = tl.exp2(m - top), tl.exp2(m_next - top)
    return top, z * x + z_next * y, acc * x[None, :] + acc_next * y[None, :]


@triton.jit
def _take_in(q, k, v, visible, state, scale, softcap, SOFTCAP: tl.constexpr):
    """Take one tile into the state (m, z, acc): q [D, N], k and v [TILE, D], visible [TILE, N]. Scores are in units of log 2."""
    m, z, acc = state
    s = tl.dot(k, q, input_precision="ieee") * scale
    if SOFTCAP:  # scale holds 2 / (softcap ln 2): softcap is tanh(x) = 1 - 2 / (exp(2 x) + 1) from here on
        s = softcap - (2.0 * softcap) / (tl.exp2(s) + 1.0)
    s = tl.where(visible, s, _LOWEST)
    top = tl.maximum(m, tl.max(s, 0))
    p = tl.where(visible, tl.exp2(s - top[None, :]), 0.0)
    shrink = tl.exp2(m - top)
    z = z * shrink + tl.sum(p, 0)
    acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
    return top, z, acc


@triton.jit
def _blocks_of(table, split, table_width):
    """Load all blocks of a split [_BLOCKS] ahead: the latency of a load whose address is loaded in the same loop is hidden badly."""
    at = _split_first(split) // _BLOCK + tl.arange(0, _BLOCKS)
    return tl.load(table + at, mask=at < table_width, other=0)


@triton.jit
def _gather(memory, slots, inside, h, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load key or value rows [TILE, DP] of head h at these memory positions [TILE] (block * BLOCK + offset), zeros if not `inside`."""
    d = tl.arange(0, DP)
    at = (slots // _BLOCK).to(tl.int64) * (HK * _BLOCK * D) + (h * _BLOCK + slots % _BLOCK) * D
    mask = inside[:, None] if D == DP else inside[:, None] & (d < D)[None, :]
    return tl.load(memory + at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _write(out, total, z, row, head, valid, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    mixed = total * (1.0 / tl.where(z > 0, z, 1.0))[None, :]
    at = (row.to(tl.int64) * H + head) * D
    tl.store(out + at[None, :] + d[:, None], mixed.to(out.dtype.element_ty), mask=valid[None, :] & (d < D)[:, None])


@triton.jit
def _kept_at(place, which, h, column, HK: tl.constexpr, N: tl.constexpr):
    """Return where states [N] lie among the kept ones."""
    return ((place + which).to(tl.int64) * HK + h) * N + column


class KeptStates(NamedTuple):
    """Pointers to the states that programs keep for the one that merges them: arguments of `_attend`."""

    acc: Any
    ml: Any


class KeptShape(NamedTuple):
    """What `_attend` is compiled for: key heads, size of a head, that rounded up to a power of two, columns."""

    n_key_heads: Any
    head_dim: Any
    padded_dim: Any
    n_columns: Any


@triton.jit
def _store_states(kept, at, m, z, acc, valid, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    tl.store(kept.acc + at[None, :] * D + d[:, None], acc, mask=valid[None, :] & (d < D)[:, None])
    tl.store(kept.ml + at * 2, m, mask=valid)
    tl.store(kept.ml + at * 2 + 1, z, mask=valid)


@triton.jit
def _load_states(kept, at, there, D: tl.constexpr, DP: tl.constexpr):
    """Load the states kept at [N], empty ones if not `there`.

    Other programs may have stored them, so the loads bypass the first-level cache.
    """
    d = tl.arange(0, DP)
    m = tl.load(kept.ml + at * 2, mask=there, other=_LOWEST, cache_modifier=".cg")
    z = tl.load(kept.ml + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
    acc = tl.load(kept.acc + at[None, :] * D + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0, cache_modifier=".cg")
    return m, z, acc


@triton.jit
def _fold(kept, place, first, end, step, h, valid, SHAPE: tl.constexpr, IN_FLIGHT: tl.constexpr):
    """Merge the states kept for splits first, first + step, … below `end`."""
    D: tl.constexpr = SHAPE.head_dim
    DP: tl.constexpr = SHAPE.padded_dim
    N: tl.constexpr = SHAPE.n_columns
    column = tl.arange(0, N)
    total_m, total_z, total = tl.full([N], _LOWEST, tl.float32), tl.zeros([N], tl.float32), tl.zeros([DP, N], tl.float32)
    for i in range(first, end, step * IN_FLIGHT):
        for j in tl.static_range(IN_FLIGHT):
            which = tl.zeros_like(column) + (i + j * step)
            m, z, acc = _load_states(kept, _kept_at(place, which, h, column, SHAPE.n_key_heads, N), valid & (which < end), D, DP)
            total_m, total_z, total = _merge(total_m, total_z, total, m, z, acc)
    return total_m, total_z, total


@triton.jit(do_not_specialize=["depth", "table_width"])
def _attend(
    q,  # [R, H, D]
    keys,  # [n_blocks + 1, HK, BLOCK, D]
    values,  # the same
    out,  # [R, H, D]
    positions,  # [R]
    bases,  # [R]
    paths,  # [R, depth]
    shares,  # [P, WORDS]
    tables,  # [B, table_width]
    depth,
    table_width,
    kept,  # [places, HK, N, D] float32: acc of every split, then of every group of splits, where programs share an item
    kept_ml,  # [places, HK, N, 2] float32: its m and z
    counters,  # [places, HK, 2]: at its first place, splits of a group that are kept, and groups of an item; zero before and after
    scale,
    softcap,
    sinks,  # [H] or None: logits of attention that goes to no key
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # D rounded up to a power of two
    N: tl.constexpr,  # columns: rows of an item times query heads of a key head, rounded up
    ROWS: tl.constexpr,  # rows of an item, rounded up to a power of two
    WINDOW: tl.constexpr,  # keys that a row sees up to its own; 0: all
    SOFTCAP: tl.constexpr,
    IN_FLIGHT: tl.constexpr,  # states that are loaded at a time when merging
    OVERLAP: tl.constexpr,
):
    await_previous(OVERLAP)
    GROUP: tl.constexpr = H // HK
    SHAPE: tl.constexpr = KeptShape(HK, D, DP, N)
    states = KeptStates(kept, kept_ml)
    share, h = shares + tl.program_id(0) * _WORDS, tl.program_id(1)
    first_row, end_row, owner = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    begin, end, place, alone = tl.load(share + 3), tl.load(share + 4), tl.load(share + 5), tl.load(share + 6)
    if first_row >= end_row:
        return
    table = tables + owner.to(tl.int64) * table_width
    column, d = tl.arange(0, N), tl.arange(0, DP)
    row, head = first_row + column // GROUP, h * GROUP + column % GROUP
    valid = row < end_row
    # Loads that wait for nothing but each other's company stand together: a short text is all latency.
    position = tl.load(positions + row, mask=valid, other=-1)
    base = tl.load(bases + row, mask=valid, other=0)
    q_at = (row.to(tl.int64) * H + head) * D
    rows_of_q = tl.load(q + q_at[:, None] + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(tl.min(tl.where(valid, position, _FAR), 0) - WINDOW + 1, 0)
    first_split = _split_of(first_key)
    begin = tl.maximum(begin, first_split)
    blocks = _blocks_of(table, begin, table_width)
    n_keys = tl.max(position, 0) + 1
    n_shared = tl.min(tl.where(base <= position, base, _FAR), 0)  # keys below have the same slot for all rows
    if begin >= end:
        return

    query = tl.trans(rows_of_q)
    nothing_m, nothing_z, nothing = tl.full([N], _LOWEST, tl.float32), tl.zeros([N], tl.float32), tl.zeros([DP, N], tl.float32)
    group_m, group_z, group = nothing_m, nothing_z, nothing
    for split in range(begin, end):
        first = _split_first(split)
        last = tl.minimum(_split_first(split + 1), n_keys)
        tile0, tiles = tl.maximum(first, first_key) // _TILE, (last + _TILE - 1) // _TILE
        alike = tl.minimum(tl.maximum(n_shared // _TILE, tile0), tiles)
        at = tl.arange(0, _BLOCKS) + first // _BLOCK
        m, z, acc = nothing_m, nothing_z, nothing
        for tile in range(tile0, alike):
            key = tile * _TILE + tl.arange(0, _TILE)
            even = tl.sum(tl.where(at == tile * 2, blocks, 0), 0)
            odd = tl.sum(tl.where(at == tile * 2 + 1, blocks, 0), 0)
            memory_slot = tl.where(key % _TILE < _BLOCK, even, odd) * _BLOCK + key % _BLOCK
            k = _gather(keys, memory_slot, key < n_keys, h, HK, D, DP)
            v = _gather(values, memory_slot, key < n_keys, h, HK, D, DP)
            visible = key[:, None] <= position[None, :]
            if WINDOW > 0:
                visible &= key[:, None] > position[None, :] - WINDOW
            m, z, acc = _take_in(query, k, v, visible, (m, z, acc), scale, softcap, SOFTCAP)
        for tile in range(alike, tiles):
            key = tile * _TILE + tl.arange(0, _TILE)
            r = tl.arange(0, ROWS)
            row_position = tl.load(positions + first_row + r, mask=first_row + r < end_row, other=-1)
            row_base = tl.load(bases + first_row + r, mask=first_row + r < end_row, other=0)
            seen = key[None, :] <= row_position[:, None]
            drafted = seen & (key[None, :] >= row_base[:, None])
            path_at = (first_row + r)[:, None] * depth + (key[None, :] - row_base[:, None])
            slot = tl.where(drafted, tl.load(paths + path_at, mask=drafted, other=0), key[None, :])
            memory_slots = tl.load(table + slot // _BLOCK, mask=seen, other=0) * _BLOCK + slot % _BLOCK  # [ROWS, TILE]
            for i in range(end_row - first_row):
                mine = r == i
                own = tl.sum(tl.where(mine, row_position, 0), 0)
                memory_slot = tl.sum(tl.where(mine[:, None], memory_slots, 0), 0)
                k = _gather(keys, memory_slot, key <= own, h, HK, D, DP)
                v = _gather(values, memory_slot, key <= own, h, HK, D, DP)
                # The other columns see nothing: their state is multiplied by one and zeros are added, which leaves it as it is.
                visible = (row == first_row + i)[None, :] & (key <= own)[:, None]
                if WINDOW > 0:
                    visible &= (key > own - WINDOW)[:, None]
                m, z, acc = _take_in(query, k, v, visible, (m, z, acc), scale, softcap, SOFTCAP)
        blocks = _blocks_of(table, split + 1, table_width)
        group_m, group_z, group = _merge(group_m, group_z, group, m, z, acc)
        after = split + 1
        if (alone == 0) | ((after == after // _MERGED * _MERGED) & (after < end)):
            # Each split's state is for whoever merges. Where that is this program, what comes of its groups waits there: registers have
            # no room for a third state, nor for what can be loaded again (the last word is zero).
            place = tl.load(share + 5, volatile=True)
            again = tl.arange(0, N) + tl.load(share + 7, volatile=True)
            there = tl.load(share, volatile=True) + again // GROUP < tl.load(share + 1, volatile=True)
            to = _kept_at(place, tl.where(alone > 0, 0, split), h, again, HK, N)
            tl.debug_barrier()
            m, z, acc = _load_states(states, to, there & (again * 0 + alone * (split // _MERGED) > begin // _MERGED), D, DP)
            m, z, acc = _merge(m, z, acc, group_m, group_z, group)
            tl.debug_barrier()
            _store_states(states, to, m, z, acc, there, D, DP)
            group_m, group_z, group = nothing_m, nothing_z, nothing
    first_row, end_row = tl.load(share, volatile=True), tl.load(share + 1, volatile=True)
    place, alone = tl.load(share + 5, volatile=True), tl.load(share + 6, volatile=True)
    column = tl.arange(0, N) + tl.load(share + 7, volatile=True)
    row, head = first_row + column // GROUP, h * GROUP + column % GROUP
    valid = row < end_row
    if alone:
        if (end - 1) // _MERGED > begin // _MERGED:
            tl.debug_barrier()
            m, z, acc = _load_states(states, _kept_at(place, 0, h, column, HK, N), valid, D, DP)
            group_m, group_z, group = _merge(m, z, acc, group_m, group_z, group)
    else:
        end_split = _split_of(n_keys - 1) + 1
        first_group, last_group, end_mine = first_split // _MERGED, (end_split - 1) // _MERGED, (end - 1) // _MERGED + 1
        merged, ready = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        for g in range(begin // _MERGED, end_mine + 1):  # its groups, then the item
            of_item = g == end_mine
            first = tl.where(of_item, first_group * _MERGED, tl.maximum(g * _MERGED, first_split))
            last = tl.where(of_item, end_split, tl.minimum((g + 1) * _MERGED, end_split))
            mine = tl.where(of_item, merged, tl.minimum(last, end) - tl.maximum(first, begin))
            every = tl.where(of_item, last_group - first_group + 1, last - first)
            if mine > 0:
                to = tl.where(of_item, 0, g * _MERGED)
                counter = counters + ((place + to) * HK + h) * 2 + tl.where(of_item, 1, 0)
                tl.debug_barrier()  # every thread's stores come before the count, the count before the last program's loads
                if tl.atomic_add(counter, mine, sem="acq_rel", scope="gpu") + mine == every:
                    tl.store(counter, 0)
                    step = tl.where(of_item, _MERGED, 1)
                    group_m, group_z, group = _fold(states, place, first, last, step, h, valid, SHAPE, IN_FLIGHT)
                    if of_item | (first_group == last_group):
                        ready += 1
                    else:
                        merged += 1
                        tl.debug_barrier()  # its first split's state has been read by all threads
                        _store_states(states, _kept_at(place, to, h, column, HK, N), group_m, group_z, group, valid, D, DP)
        valid &= column * 0 + ready > 0
    if sinks is not None:  # as if there were one more key, without a value, after all others
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) / _LOG_OF_2
        nothing = tl.zeros([DP, N], tl.float32)
        group_m, group_z, group = _merge(group_m, group_z, group, sink, tl.full([N], 1.0, tl.float32), nothing)
    _write(out, group, group_z, row, head, valid, H, D, DP)


@dataclass(slots=True)
class AttentionWorkspace:
    """Memory in which programs leave their states for the one that merges. Serves one launch after the other, not two at a time."""

    kept: torch.Tensor  # float32, places Hk N D numbers or more, with N of `count_columns`
    kept_ml: torch.Tensor  # float32, places Hk N 2 numbers or more
    counters: torch.Tensor  # int32, places Hk 2 or more; zero between launches

    @classmethod
    def allocate(
        cls, n_places: int, rows_per_item: int, n_heads: int, n_kv_heads: int, head_dim: int, device: torch.device
    ) -> AttentionWorkspace:
        """Allocate memory for schedules of up to `n_places` places; a model's layers can share it."""
        n = n_places * n_kv_heads * count_columns(rows_per_item, n_heads, n_kv_heads)
        return cls(
            torch.empty(n * head_dim, dtype=torch.float32, device=device),
            torch.empty(n * 2, dtype=torch.float32, device=device),
            torch.zeros(n_places * n_kv_heads * 2, dtype=torch.int32, device=device),
        )


def count_columns(rows_per_item: int, n_heads: int, n_kv_heads: int) -> int:
    """Return the columns of a program: rows of an item times query heads of a key head, at least what a matrix instruction takes."""
    return max(16, triton.next_power_of_2(rows_per_item * (n_heads // n_kv_heads)))


def rows_per_item(n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """Return how many rows of one sequence can share loads of keys before a program runs out of registers.

    It is a power of two, since their memory positions take registers too.
    """
    return 1 << max(((32 if head_dim * itemsize <= 256 else 16) // (n_heads // n_kv_heads)).bit_length() - 1, 0)


@dataclass(slots=True)
class AttentionLaunch:
    """How attention is launched in one kind of pass; changes no bit."""

    rows_per_item: int
    """No item of the pass has more rows. For float32 it must stay the same: without matrix instructions, the shape of a product decides
    the order of its additions."""
    workspace: AttentionWorkspace
    """Has all places of the schedule."""


def attend(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    rows: AttentionMetadata,
    out: torch.Tensor,
    launch: AttentionLaunch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute attention of rows q [R, H, D] over one layer's keys and values [n_blocks + 1, Hk, BLOCK, D], into out [R, H, D]; one launch.

    `window` and `softcap` of 0 mean none; `sinks` [H]: logits of attention that goes to no key. No bit depends on the schedule.
    """
    (keys, values), workspace = kv, launch.workspace
    _, n_heads, head_dim = q.shape
    n_kv_heads, n_shares = keys.shape[1], len(rows.shares)
    assert keys.shape == values.shape == (len(keys), n_kv_heads, BLOCK, head_dim), (q.shape, keys.shape, values.shape)
    assert out.shape == q.shape, (q.shape, out.shape)
    assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
    assert all(x.is_contiguous() for x in (q, out, keys, values, rows.positions, rows.bases, rows.shares))
    assert rows.paths.stride(1) == rows.tables.stride(1) == 1
    if n_shares == 0:
        return
    width, n_columns = max(16, triton.next_power_of_2(head_dim)), count_columns(launch.rows_per_item, n_heads, n_kv_heads)
    _attend[(n_shares, n_kv_heads)](
        q,
        keys,
        values,
        out,
        rows.positions,
        rows.bases,
        rows.paths,
        rows.shares,
        rows.tables,
        rows.paths.stride(0),
        rows.tables.stride(0),
        workspace.kept,
        workspace.kept_ml,
        workspace.counters,
        2 * scale / (softcap * _LN2) if softcap else scale / _LN2,
        softcap / _LN2,
        sinks,
        H=n_heads,
        HK=n_kv_heads,
        D=head_dim,
        DP=width,
        N=n_columns,
        ROWS=triton.next_power_of_2(launch.rows_per_item),
        WINDOW=window,
        SOFTCAP=softcap > 0,
        IN_FLIGHT=max(1, min(4, 8192 // (width * n_columns))),
        num_warps=_choose_warps(width * n_columns, q.element_size(), q.device),
        num_stages=_choose_stages(width, n_columns, q.element_size(), q.device),
        enable_fp_fusion=False,
        **overlap_options(q.device),
    )


def _choose_warps(n_sums: int, itemsize: int, device: torch.device) -> int:
    """Return enough warps that a program's sums stay in registers.

    A Hopper's matrix instructions read one operand from shared memory, so four warps hold what takes eight elsewhere
    (`tools.compile_kernels` counts the spills).
    """
    roomy = get_limits(device).generation == 9 and itemsize < 4
    return 4 if n_sums < (8192 if roomy else 2048) else 8


def _choose_stages(width: int, n_columns: int, itemsize: int, device: torch.device) -> int:
    """Return the tiles in flight: no more than help, and as many as fit in shared memory with queries, weights and sums in transit."""
    rest = max(24 << 10, 5 * width * n_columns)
    return max(1, min(3, (get_limits(device).shared_bytes - rest) // (2 * TILE * width * itemsize)))

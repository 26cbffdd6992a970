"""Attention over the paged pool on the device: each row's softmax over its keys, in the order of their position in the text.

`q [R, H, D]` goes in, `out [R, H, D]` comes out; `Rows` says what each row may see. Nothing here knows models or requests. Keys and values
are `[n_blocks + 1, Hk, BLOCK, D]`, those of the pass's own rows already in their slots.

A text's keys are cut into splits, these into tiles, both at absolute positions. Within a split a running softmax takes tile after
tile; the splits are merged first to last. One program goes through all splits of an item (rows of one sequence that share what is
loaded) and one key head, or several programs take turns and the last to finish merges: the same sums either way. Keys are the M side
of the matrix instructions and rows times query heads the N side, so that an element of a product has the same instructions behind it
whatever the number of rows.

Up to the smallest position at which a row of the item sees other slots than its neighbours (a tree's branches), all rows share a tile.
From there on each row in turn gathers its own keys in logical order, and what is computed is kept for its columns only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ngramspec.batch.types import BLOCK
from ngramspec.cuda.device import limits
from ngramspec.cuda.rows import Rows

TILE = 64
"""Keys of a tile; also the M side of Hopper's matrix instruction."""

_LN2 = 0.6931471805599453

# Kernels may read globals only as constants of the language.
_TILE, _BLOCK = tl.constexpr(TILE), tl.constexpr(BLOCK)
_LOWEST = tl.constexpr(-1.0e30)  # below every score, and its difference from any score is finite
_BLOCKS = tl.constexpr(32)  # in the longest split
_FAR = tl.constexpr(2**31 - 1)

# Splits of 128 keys up to position 1,024, of 256 up to 4,096, then of 1,024: a short text occupies the device, a long one is not all
# merging. Changes bits.


@triton.jit
def _split_first(s):
    """First position of split s."""
    return 128 * tl.minimum(s, 8) + 256 * tl.minimum(tl.maximum(s - 8, 0), 12) + 1024 * tl.maximum(s - 20, 0)


@triton.jit
def _split_of(position):
    """The split of a position."""
    return tl.minimum(position // 128, 8) + tl.minimum(tl.maximum(position - 1024, 0) // 256, 12) + tl.maximum(position - 4096, 0) // 1024


def n_splits(n_keys: int) -> int:
    """Splits of a text of so many keys."""
    last = n_keys - 1
    return 1 + min(last // 128, 8) + min(max(last - 1024, 0) // 256, 12) + max(last - 4096, 0) // 1024


@triton.jit
def _merge(m, z, acc, m_next, z_next, acc_next):
    """Softmax state of neighbouring stretches of keys: highest score m [N], sum of weights z [N], weighted values acc [D, N]."""
    top = tl.maximum(m, m_next)
    x, y = tl.exp2(m - top), tl.exp2(m_next - top)
    return top, z * x + z_next * y, acc * x[None, :] + acc_next * y[None, :]


@triton.jit
def _take_in(q, k, v, visible, m, z, acc, scale, softcap, SOFTCAP: tl.constexpr):
    """One tile: q [D, N], k and v [TILE, D], visible [TILE, N]. Scores are in units of log 2."""
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
    """All blocks of a split [_BLOCKS]. Read ahead, since a load whose address is loaded in the same loop is hidden badly."""
    at = _split_first(split) // _BLOCK + tl.arange(0, _BLOCKS)
    return tl.load(table + at, mask=at < table_width, other=0)


@triton.jit
def _gather(memory, slots, inside, h, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Key or value rows [TILE, DP] of head h at `slots` of the memory [TILE] (block * BLOCK + offset), zeros where not `inside`."""
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


@triton.jit(do_not_specialize=["depth", "table_width", "max_splits"])
def _attend(
    q,  # [R, H, D]
    keys,  # [n_blocks + 1, HK, BLOCK, D]
    values,  # the same
    out,  # [R, H, D]
    positions,  # [R]
    bases,  # [R]
    paths,  # [R, depth]
    items,  # [I, 2]
    owners,  # [I]
    tables,  # [B, table_width]
    depth,
    table_width,
    partial,  # [R, H, max_splits, D] float32: acc of every split, where several programs share an item
    partial_ml,  # [R, H, max_splits, 2] float32: its m and z
    counters,  # [I, HK]: programs that have finished; zero before and after
    max_splits,
    scale,
    softcap,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,  # D rounded up to a power of two
    N: tl.constexpr,  # columns: rows of an item times query heads of a key head, rounded up
    ROWS: tl.constexpr,  # rows of an item, rounded up to a power of two
    WINDOW: tl.constexpr,  # keys that a row sees up to its own; 0: all
    SOFTCAP: tl.constexpr,
    ALONE: tl.constexpr,  # one program goes through all splits
    IN_FLIGHT: tl.constexpr,  # splits that are loaded at a time when merging
):
    GROUP: tl.constexpr = H // HK
    item, h, turn = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, end_row = tl.load(items + 2 * item), tl.load(items + 2 * item + 1)
    if first_row >= end_row:
        return
    table = tables + tl.load(owners + item).to(tl.int64) * table_width
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
    blocks = _blocks_of(table, first_split + turn, table_width)
    n_keys = tl.max(position, 0) + 1
    n_shared = tl.min(tl.where(base <= position, base, _FAR), 0)  # keys below have the same slot for all rows
    end_split = _split_of(n_keys - 1) + 1
    turns = tl.num_programs(2)
    if turn >= end_split - first_split:
        return

    query = tl.trans(rows_of_q)
    total_m, total_z = tl.full([N], _LOWEST, tl.float32), tl.zeros([N], tl.float32)
    total = tl.zeros([DP, N], tl.float32)
    for split in range(first_split + turn, end_split, turns):
        first = _split_first(split)
        last = tl.minimum(_split_first(split + 1), n_keys)
        tile0, tiles = tl.maximum(first, first_key) // _TILE, (last + _TILE - 1) // _TILE
        alike = tl.minimum(tl.maximum(n_shared // _TILE, tile0), tiles)
        at = tl.arange(0, _BLOCKS) + first // _BLOCK
        m, z = tl.full([N], _LOWEST, tl.float32), tl.zeros([N], tl.float32)
        acc = tl.zeros([DP, N], tl.float32)
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
            m, z, acc = _take_in(query, k, v, visible, m, z, acc, scale, softcap, SOFTCAP)
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
                m, z, acc = _take_in(query, k, v, visible, m, z, acc, scale, softcap, SOFTCAP)
        blocks = _blocks_of(table, split + turns, table_width)
        if ALONE:
            total_m, total_z, total = _merge(total_m, total_z, total, m, z, acc)
        else:
            slot_at = (row.to(tl.int64) * H + head) * max_splits + split
            tl.store(partial + slot_at[None, :] * D + d[:, None], acc, mask=valid[None, :] & (d < D)[:, None])
            tl.store(partial_ml + slot_at * 2, m, mask=valid)
            tl.store(partial_ml + slot_at * 2 + 1, z, mask=valid)
    if ALONE:
        _write(out, total, total_z, row, head, valid, H, D, DP)
    else:
        # Every thread's stores come before the count, the count before the last program's loads, which pass by the first-level cache.
        tl.debug_barrier()
        finished = tl.atomic_add(counters + item * HK + h, 1, sem="acq_rel", scope="gpu")
        if finished == tl.minimum(turns, end_split - first_split) - 1:
            tl.store(counters + item * HK + h, 0)
            for split in range(first_split, end_split, IN_FLIGHT):
                for i in tl.static_range(IN_FLIGHT):
                    which = tl.zeros_like(column) + (split + i)
                    there = valid & (which < end_split)
                    slot_at = (row.to(tl.int64) * H + head) * max_splits + which
                    m = tl.load(partial_ml + slot_at * 2, mask=there, other=_LOWEST, cache_modifier=".cg")
                    z = tl.load(partial_ml + slot_at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
                    inside = there[None, :] & (d < D)[:, None]
                    acc = tl.load(partial + slot_at[None, :] * D + d[:, None], mask=inside, other=0.0, cache_modifier=".cg")
                    total_m, total_z, total = _merge(total_m, total_z, total, m, z, acc)
            _write(out, total, total_z, row, head, valid, H, D, DP)


@dataclass(slots=True)
class Workspace:
    """What programs leave for the one that merges. Serves one launch after the other, not two at a time."""

    partial: torch.Tensor  # float32, R H max_splits D numbers or more
    partial_ml: torch.Tensor  # float32, R H max_splits 2 numbers or more
    counters: torch.Tensor  # int32, I Hk or more; zero between launches

    @classmethod
    def make(
        cls, n_rows: int, n_items: int, n_heads: int, n_kv_heads: int, head_dim: int, max_keys: int, device: torch.device
    ) -> Workspace:
        """For launches of at most so many rows, items and keys; a model's layers can share it."""
        n = n_rows * n_heads * n_splits(max_keys)
        return cls(
            torch.empty(n * head_dim, dtype=torch.float32, device=device),
            torch.empty(n * 2, dtype=torch.float32, device=device),
            torch.zeros(n_items * n_kv_heads, dtype=torch.int32, device=device),
        )


def rows_per_item(n_heads: int, n_kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """Rows of one sequence that can share loads of keys before a program runs out of registers."""
    return max(1, (32 if head_dim * itemsize <= 256 else 16) // (n_heads // n_kv_heads))


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    *,
    scale: float,
    rows_per_item: int,
    window: int = 0,
    softcap: float = 0.0,
    n_parallel: int = 1,
    workspace: Workspace | None = None,
) -> None:
    """Attention of rows q [R, H, D] over one layer's keys and values [n_blocks + 1, Hk, BLOCK, D], into out [R, H, D]; one launch.

    No item has more rows than `rows_per_item`. `n_parallel` programs share the splits of an item and key head; more than one need a
    workspace, which is allocated where none is given. No bit depends on these three. `window` and `softcap` of 0 mean none.
    float32 must keep to one `rows_per_item`: without matrix instructions, the shape of a product decides who adds what.
    """
    n_rows, n_heads, head_dim = q.shape
    n_kv_heads, n_items = keys.shape[1], len(rows.items)
    assert keys.shape == values.shape == (len(keys), n_kv_heads, BLOCK, head_dim), (q.shape, keys.shape, values.shape)
    assert out.shape == q.shape, (q.shape, out.shape)
    assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
    assert all(x.is_contiguous() for x in (q, out, keys, values, rows.positions, rows.bases, rows.items, rows.owners))
    assert rows.paths.stride(1) == rows.tables.stride(1) == 1
    if n_items == 0:
        return
    max_splits = n_splits(rows.max_keys)
    n_parallel = min(n_parallel, max_splits)
    partial = partial_ml = counters = None
    if n_parallel > 1:
        ws = workspace or Workspace.make(n_rows, n_items, n_heads, n_kv_heads, head_dim, rows.max_keys, q.device)
        partial, partial_ml, counters = ws.partial, ws.partial_ml, ws.counters
        assert partial.numel() >= n_rows * n_heads * max_splits * head_dim, "workspace too small"
        assert counters.numel() >= n_items * n_kv_heads, "workspace too small"
    width = triton.next_power_of_2(head_dim)
    columns = max(16, triton.next_power_of_2(rows_per_item * (n_heads // n_kv_heads)))
    _attend[(n_items, n_kv_heads, n_parallel)](
        q,
        keys,
        values,
        out,
        rows.positions,
        rows.bases,
        rows.paths,
        rows.items,
        rows.owners,
        rows.tables,
        rows.paths.stride(0),
        rows.tables.stride(0),
        partial,
        partial_ml,
        counters,
        max_splits,
        2 * scale / (softcap * _LN2) if softcap else scale / _LN2,
        softcap / _LN2,
        H=n_heads,
        HK=n_kv_heads,
        D=head_dim,
        DP=width,
        N=columns,
        ROWS=triton.next_power_of_2(rows_per_item),
        WINDOW=window,
        SOFTCAP=softcap > 0,
        ALONE=n_parallel == 1,
        IN_FLIGHT=max(1, min(4, 8192 // (width * columns))),
        num_warps=_warps(width * columns, q.element_size(), q.device),
        num_stages=_stages(width * q.element_size(), q.device),
        enable_fp_fusion=False,
    )


def _warps(n_sums: int, itemsize: int, device: torch.device) -> int:
    """Threads enough that the sums of a program stay in registers. A Hopper's matrix instructions read one operand from shared memory, so
    that four warps hold what takes eight elsewhere (`tools.compile_kernels` counts the spills)."""
    roomy = limits(device).generation == 9 and itemsize < 4
    return 4 if n_sums < (8192 if roomy else 2048) else 8


def _stages(row_bytes: int, device: torch.device) -> int:
    """Tiles in flight: no more than help, and as many as fit in shared memory beside queries and weights."""
    return max(1, min(3, (limits(device).shared_bytes - (24 << 10)) // (2 * TILE * row_bytes)))

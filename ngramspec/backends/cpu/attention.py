"""Compute attention over the paged pool on the CPU.

The module knows the layout of one layer's pool and what each row may see; it knows nothing of sequences, models or drafts. `attend` takes
the layer's query, key and value rows, writes keys and values to their KV positions and returns the mixed values. Every score is one chain
of fused multiply-adds over the elements of a key, every mixed value one over the keys in the order of their positions in the text; the sum
of a softmax has sixteen lanes tied to absolute positions. So the bits of a (row, head) cannot depend on other rows, on where a key lies in
memory, or on how a text was cut into passes.

Layout of a layer, chosen so that tiles (`codegen.simd`) read consecutive floats: keys `[n_blocks, n_kv_heads, head_dim, BLOCK]`, values
`[n_blocks, n_kv_heads, BLOCK, head_dim]`. Values may have fewer numbers than keys (`latent_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numba import get_num_threads, prange

from ngramspec.backends.cpu.codegen.simd import (
    LOWEST,
    TILE_BLOCKS,
    TILE_PANELS,
    TILE_ROWS,
    load_as_float32,
    mix_blocks,
    multiply_add,
    replace_by_exponentials,
    score_blocks,
    to_kv_dtype,
)
from ngramspec.backends.cpu.formats import WIDTH
from ngramspec.backends.cpu.threads import take_next_piece, take_piece, wait_for_pieces
from ngramspec.datastore.code_cache import njit
from ngramspec.datastore.compiled_calls import call_compiled, find_address
from ngramspec.errors import UnsupportedModelError
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Batch
from ngramspec.sampling.numeric import fma, soft_cap

if TYPE_CHECKING:
    import torch

    from ngramspec.backends.cpu.kv_pool import KVPool

_F = np.float32
_ONE, _LOWEST = _F(1.0), _F(LOWEST)


@njit(cache=True, nogil=True)
def _softmax(s, start, end):
    """Replace s[start:end] by exp(s - max) in place and return the sum, in sixteen lanes tied to absolute positions."""
    first, last = start & ~15, (end + 15) & ~15
    for j in range(first, start):
        s[j] = _LOWEST
    for j in range(end, last):
        s[j] = _LOWEST
    return replace_by_exponentials(s[first:last], last - first)


@cache
def _make_multiply_add(panels):
    """Compile `multiply_add` for up to TILE_ROWS rows, under a name of its own: see "numba's traps" in `codegen/README.md`."""

    def run(x, w, y, shape):
        multiply_add(panels, TILE_ROWS, x, w, y, shape)

    run.__name__ = run.__qualname__ = f"_multiply_add_{panels}"
    return njit(cache=True, nogil=True)(run)


_add_wide, _add_narrow = _make_multiply_add(TILE_PANELS), _make_multiply_add(1)


@njit(cache=True, nogil=True)
def _score(q, sizes, head, first, end, s, width):
    """Compute s[m, BLOCK · t : +BLOCK] = q[m] · keys of block table[t] for t from first to end, for queries q [n, D]; s [n, width].

    `sizes`: n, D. `head`: keys, where those of the head begin in a block, the size of a block, table. Arrays are flat. What lies in s up to
    TILE_BLOCKS - 1 blocks behind the last is overwritten.
    """
    (n, n_dim), (keys, head_at, block_step, table) = sizes, head
    parts = (n + TILE_ROWS - 1) // TILE_ROWS
    for t in range(first, end, TILE_BLOCKS):
        for i in range(parts):
            a, b = n * i // parts, n * (i + 1) // parts
            blocks = head_at, block_step, table.ctypes.data, t, min(t + TILE_BLOCKS, end - 1) if i == 0 else t, end - 1
            queries = q.ctypes.data + 4 * a * n_dim, 4 * n_dim, b - a, n_dim
            score_blocks(queries, keys, blocks, (s.ctypes.data + 4 * (a * width + t * BLOCK), 4 * width))


@njit(cache=True, nogil=True)
def _mix_keys(acc, acc_at, sizes, s, s_at, width, values, at, n_keys):
    """Add s[m, s_at : +n_keys] · values [n_keys, D] at `at` to acc[m], for n rows of acc [n, D] from acc_at on and s [n, width]; all flat.

    `sizes`: n, D, first element of the values that is not left out.
    """
    n, n_dim, first_dim = sizes
    for m in range(0, n, TILE_ROWS):
        count, d = min(TILE_ROWS, n - m), first_dim
        x, y = s_at + m * width, acc_at + m * n_dim
        while d + TILE_PANELS * WIDTH <= n_dim:
            _add_wide((s, x, width), (values, at + d, n_dim), (acc, y + d, n_dim), (count, n_keys))
            d += TILE_PANELS * WIDTH
        while d + WIDTH <= n_dim:
            _add_narrow((s, x, width), (values, at + d, n_dim), (acc, y + d, n_dim), (count, n_keys))
            d += WIDTH
        for r in range(count if d < n_dim else 0):
            for j in range(n_keys):
                for e in range(d, n_dim):
                    acc[y + r * n_dim + e] = fma(s[x + r * width + j], load_as_float32(values, at + j * n_dim + e), acc[y + r * n_dim + e])


@njit(cache=True, nogil=True)
def _mix_blocks(acc, sizes, s, width, head, first, end):
    """Add s[m, BLOCK · t : +BLOCK] · values of block table[t] to acc[m] for t from first to end, for n rows of acc [n, D], s [n, width].

    `sizes` and `head` are those of `_score`, of values.
    """
    (n, n_dim), (values, head_at, block_step, table) = sizes, head
    parts, whole = (n + TILE_ROWS - 1) // TILE_ROWS, n_dim // (TILE_PANELS * WIDTH) * TILE_PANELS * WIDTH
    for t in range(first, end, TILE_BLOCKS):
        n_blocks = min(TILE_BLOCKS, end - t)
        for d in range(0, whole, TILE_PANELS * WIDTH):
            for i in range(parts):
                a, b = n * i // parts, n * (i + 1) // parts
                ahead = min(t + TILE_BLOCKS, end - n_blocks) if i == 0 else t
                shares = s.ctypes.data + 4 * (a * width + t * BLOCK), 4 * width, b - a
                blocks = head_at + d, n_dim, block_step, table.ctypes.data, t, ahead, n_blocks
                mix_blocks(shares, values, blocks, (acc.ctypes.data + 4 * (a * n_dim + d), 4 * n_dim))
        for i in range(t, t + n_blocks if whole < n_dim else t):
            _mix_keys(acc, np.int64(0), (n, n_dim, whole), s, i * BLOCK, width, values, np.int64(table[i]) * block_step + head_at, BLOCK)


@njit(cache=True, nogil=True, parallel=True)
def _write_kv(k, v, keys, values, blocks, offsets):
    """Write key and value rows k, v [T, Hk, D] to their blocks and offsets."""
    for i in prange(k.shape[0]):
        r = np.int64(i)  # prange counts in uint64, which turns to float64 beside int64
        block, offset = blocks[r], offsets[r]
        for h in range(k.shape[1]):
            for d in range(k.shape[2]):
                keys[block, h, d, offset] = to_kv_dtype(keys, k[r, h, d])
                values[block, h, offset, d] = to_kv_dtype(values, v[r, h, d])


@njit(cache=True, nogil=True)
def rope_kv_row(x, cos, sin, q, keys, values, offset, k_at, v_at):
    """Rotate one row of queries, keys and values (from 0, k_at and v_at on) by cos, sin [D] and write it.

    Queries go to q [H, D], keys and values to `offset` in their block's keys and values.
    """
    n_q, n_dim, n_kv = q.shape[0], q.shape[1], keys.shape[0]
    half = n_dim // 2
    for h in range(n_q):
        y = x[h * n_dim : (h + 1) * n_dim]
        for d in range(half):
            q[h, d] = fma(y[d], cos[d], -y[d + half] * sin[d])
            q[h, d + half] = fma(y[d + half], cos[d + half], y[d] * sin[d + half])
    for h in range(n_kv):
        y = x[k_at + h * n_dim : k_at + (h + 1) * n_dim]
        for d in range(half):
            keys[h, d, offset] = to_kv_dtype(keys, fma(y[d], cos[d], -y[d + half] * sin[d]))
            keys[h, d + half, offset] = to_kv_dtype(keys, fma(y[d + half], cos[d + half], y[d] * sin[d + half]))
        y = x[v_at + h * n_dim : v_at + (h + 1) * n_dim]
        for d in range(n_dim):
            values[h, offset, d] = to_kv_dtype(values, y[d])


_LOADING = 2  # Cost of reading a key and its value, in queries that are multiplied by it (measured: 1 to 3).


@njit(cache=True, nogil=True)
def n_splits(n_items, n_rows, n_kv, group, n_threads):
    """Return (rows, heads): into how many parts an item's rows and a group of query heads are divided, so that threads end soonest."""
    per_item = (n_rows + n_items - 1) // max(1, n_items)
    rows, heads, least = 1, 1, np.int64(1 << 62)
    for by_rows in range(1, per_item + 1):
        for by_heads in range(1, group + 1):
            if group % by_heads == 0:
                turns = (n_items * n_kv * by_rows * by_heads + n_threads - 1) // n_threads
                cost = turns * ((per_item + by_rows - 1) // by_rows * (group // by_heads) + _LOADING)
                if cost < least:
                    rows, heads, least = by_rows, by_heads, cost
    return rows, heads


@njit(cache=True, nogil=True, error_model="numpy")
def attend_piece(piece, splits, q, kv, out, rows, of_layer):
    """Compute one of the items · n_kv · rows · heads pieces of a layer's attention: some rows of an item by some heads of a group.

    `splits`: see `n_splits`. `kv`: keys and values of the layer's pool. `rows`: items, tables, positions, bases and paths of a `Batch`.
    `of_layer`: scale, window, softcap, and logits [H] of attention that goes to no key, or [0] for none.
    """
    (by_rows, by_heads), (keys, values), (scale, window, softcap, sinks) = splits, kv, of_layer
    items, tables, positions, bases, paths = rows
    n_dim, n_kv, n_value = q.shape[2], keys.shape[1], values.shape[3]
    group = q.shape[1] // n_kv
    part, per_item = group // by_heads, n_kv * by_rows * by_heads
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    item = piece // per_item
    h = (piece % per_item) // (by_rows * by_heads)
    head0 = h * group + (piece % by_heads) * part
    some = piece // by_heads % by_rows
    first, n_rows = np.int64(items[item, 0]), np.int64(items[item, 1]) - np.int64(items[item, 0])
    row0, row1 = first + n_rows * some // by_rows, first + n_rows * (some + 1) // by_rows
    if row0 == row1:
        return
    table = tables[item]
    top_slot, earliest, latest, shared = np.int64(0), np.int64(positions[row0]), np.int64(0), np.int64(positions[row0]) + 1
    for r in range(row0, row1):
        start = max(np.int64(0), np.int64(positions[r]) + 1 - window) if window > 0 else np.int64(0)
        earliest, latest = min(earliest, start), max(latest, start)
        shared = min(shared, np.int64(bases[r]), np.int64(positions[r]) + 1)
        top_slot = max(top_slot, np.int64(positions[r]))
        for p in range(bases[r], positions[r] + 1):
            top_slot = max(top_slot, np.int64(paths[r, p - bases[r]]))
    tile0, n_tiles = earliest // BLOCK, top_slot // BLOCK + 1
    width = (n_tiles + TILE_BLOCKS) * BLOCK
    n_heads = (row1 - row0) * part
    queries = np.empty(n_heads * n_dim, np.float32)
    for m in range(n_heads):
        for d in range(n_dim):
            queries[m * n_dim + d] = q[row0 + m // part, head0 + m % part, d] * scale
    s = np.empty(n_heads * width, np.float32)
    _score(queries, (n_heads, n_dim), (flat_keys, h * BLOCK * n_dim, n_kv * BLOCK * n_dim, table), tile0, n_tiles, s, width)
    block_step, head_at = n_kv * BLOCK * n_value, h * BLOCK * n_value
    logical = np.empty(paths.shape[1], np.float32)
    totals = np.empty(n_heads, np.float32)
    acc = np.zeros(n_heads * n_value, np.float32)
    for m in range(n_heads):
        r = row0 + m // part
        scores, base, end = s[m * width : (m + 1) * width], np.int64(bases[r]), np.int64(positions[r]) + 1
        start = max(np.int64(0), end - window) if window > 0 else np.int64(0)
        for p in range(base, end):
            logical[p - base] = scores[paths[r, p - base]]
        for p in range(base, end):
            scores[p] = logical[p - base]
        if softcap > 0:
            for p in range(start, end):
                scores[p] = soft_cap(scores[p], softcap)
        if sinks.shape[0]:  # a key without a value behind the others: where it lies depends on the row's position alone
            scores[end] = sinks[head0 + m % part]
            end += 1
        totals[m] = _softmax(scores, start, end)
    none = np.int64(0)  # a literal in a tuple would be a type of its own
    all_from, all_to = (latest + BLOCK - 1) // BLOCK, shared // BLOCK  # blocks that all rows see whole, in the slots of their positions
    for t in range(tile0, n_tiles):
        first = t * BLOCK
        if all_from <= t < all_to:
            if t == all_from:
                _mix_blocks(acc, (n_heads, n_value), s, width, (flat_values, head_at, block_step, table), t, all_to)
            continue
        tile = np.int64(table[t]) * block_step + head_at
        common = min(shared - first, BLOCK) if latest <= first else none  # keys that all rows see, in the slots of their positions
        if common > 0:
            _mix_keys(acc, none, (n_heads, n_value, none), s, first, width, flat_values, tile, common)
        for r in range(row0, row1):
            base, end = np.int64(bases[r]), np.int64(positions[r]) + 1
            p = max(first + max(common, none), end - window if window > 0 else np.int64(0))
            end = min(end, first + BLOCK)
            while p < end:
                n_keys, at = min(base, end) - p, tile + (p - first) * n_value
                if p >= base:
                    slot, n_keys = np.int64(paths[r, p - base]), np.int64(1)
                    at = np.int64(table[slot // BLOCK]) * block_step + head_at + slot % BLOCK * n_value
                    while p + n_keys < end and (slot + n_keys) % BLOCK and paths[r, p + n_keys - base] == slot + n_keys:
                        n_keys += 1
                m = (r - row0) * part
                _mix_keys(acc, m * n_value, (part, n_value, none), s, m * width + p, width, flat_values, at, n_keys)
                p += n_keys
    for m in range(n_heads):
        inverse = _ONE / totals[m]
        for d in range(n_value):
            out[row0 + m // part, head0 + m % part, d] = acc[m * n_value + d] * inverse


def find_attention(kv_dtype: str | np.dtype) -> int:
    """Return the address of `attend_piece` for keys and values of a dtype; compile it, or load it from disk."""
    heads, line, table = np.empty((0, 0, 0), np.float32), np.empty(0, np.int32), np.empty((0, 0), np.int32)
    keys, zero = np.empty((0, 0, 0, 0), kv_dtype), np.float32(0)
    rows, of_layer = (table, table, line, line, table), (zero, 0, zero, np.empty(0, np.float32))
    return find_address(attend_piece, 0, (0, 0), heads, (keys, keys), heads, rows, of_layer)


@njit(cache=True, nogil=True, forceinline=True)
def run_attention_part(state, part, n_threads, attend_address, q, kv, out, rows, of_layer):
    """Run the part of a pass that computes a layer's attention, by the address of `attend_piece`, whose arguments the others are."""
    items, n_kv = rows[0].shape[0], kv[0].shape[1]
    splits = n_splits(items, rows[2].shape[0], n_kv, q.shape[1] // n_kv, n_threads)
    n_pieces = items * n_kv * splits[0] * splits[1]
    piece = take_piece(state, part)
    while piece < n_pieces:
        call_compiled(attend_address, (piece, splits, q, kv, out, rows, of_layer))
        piece = take_next_piece(state, part)
    wait_for_pieces(state, part, n_pieces)


@njit(cache=True, nogil=True, parallel=True)
def _attend(q, kv, out, rows, of_layer, n_threads):
    """Compute attention of q [T, H, D] over one layer's pool into out [T, H, D]. The rows' own keys and values must have been written."""
    n_items, n_kv = rows[0].shape[0], kv[0].shape[1]
    splits = n_splits(n_items, q.shape[0], n_kv, q.shape[1] // n_kv, n_threads)
    for i in prange(n_items * n_kv * splits[0] * splits[1]):
        attend_piece(np.int64(i), splits, q, kv, out, rows, of_layer)


@dataclass(slots=True)
class CpuAttentionPass:
    """Attention of one pass, given to the model's layers as the keyword argument `ngramspec` (`models.masks.AttentionPass`).

    Raises UnsupportedModelError for a layer that computes in another dtype than float32.
    """

    pool: KVPool
    batch: Batch
    kv_layers: Sequence[int]
    """Which layer of the pool has the keys and values of each layer."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write the rows' keys and values to the pool and return the attention output [T, H, D].

        q [T, H, D], k and v [T, Hk, D], float32. `window` and `softcap` of 0 mean none; sinks [H]: see `attend_piece`.
        """
        if found := {str(x.dtype) for x in (q, k, v)} - {"torch.float32"}:
            raise UnsupportedModelError(f"layer {layer}: attention over {', '.join(found)}; on the CPU it is computed in torch.float32")
        kv = keys, values = self.pool.keys[self.kv_layers[layer]], self.pool.values[self.kv_layers[layer]]
        assert k.shape[1:] == (keys.shape[1], keys.shape[2]), (k.shape, keys.shape)
        batch, out = self.batch, q.new_empty(q.shape)
        _write_kv(k.contiguous().numpy(), v.contiguous().numpy(), keys, values, batch.blocks, batch.offsets)
        rows = batch.items, batch.tables, batch.positions, batch.bases, batch.paths
        logits = np.zeros(0, np.float32) if sinks is None else sinks.float().contiguous().numpy()
        _attend(q.contiguous().numpy(), kv, out.numpy(), rows, (_F(scale), int(window), _F(softcap), logits), get_num_threads())
        return out

"""Compute attention over the paged pool on the CPU.

The module knows the layout of one layer's pool and what each row may see; it knows nothing of sequences, models or drafts. `attend` takes
the layer's query, key and value rows, writes keys and values to their KV positions and returns the mixed values. Every score is one chain
of fused multiply-adds over the elements of a key, every mixed value one over the keys in the order of their positions in the text; the sum
of a softmax has sixteen lanes tied to absolute positions. So the bits of a (row, head) cannot depend on other rows, on where a key lies in
memory, or on how a text was cut into passes.

Layout of a layer, chosen so that tiles (`codegen.simd`) read consecutive floats: keys `[n_blocks, n_kv_heads, head_dim, BLOCK]`, values
`[n_blocks, n_kv_heads, BLOCK, head_dim]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numba import get_num_threads, prange

from ngramspec.backends.cpu.codegen.simd import CHAINS, LOWEST, STEP, load_as_float32, multiply_add, replace_by_exponentials, to_kv_dtype
from ngramspec.backends.cpu.formats import WIDTH
from ngramspec.datastore.code_cache import njit
from ngramspec.errors import UnsupportedModelError
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Batch
from ngramspec.sampling.numeric import fma

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
def _make_multiply_add(panels, rows, step, onto):
    """Compile `multiply_add` for up to `rows` rows, under a name of its own: see "numba's traps" in `codegen/README.md`."""

    def run(x, x_at, x_step, n_rows, w, w_at, w_step, n_inputs, y, y_at, y_step):
        multiply_add(panels, rows, step, onto, x, x_at, x_step, n_rows, w, w_at, w_step, n_inputs, y, y_at, y_step)

    run.__name__ = run.__qualname__ = f"_multiply_add_{panels}_{rows}_{step}_{onto}"
    return njit(cache=True, nogil=True)(run)


_KEYS, _WIDE = BLOCK // WIDTH, 4  # Panels in a tile of keys; panels of values that are mixed at a time.
_MOST_SCORED, _MOST_MIXED = CHAINS // _KEYS, max(1, CHAINS // _WIDE)
_score_1, _score_some, _score_most = (_make_multiply_add(_KEYS, rows, STEP, 0) for rows in (1, max(1, _MOST_SCORED // 2), _MOST_SCORED))
_mix_1, _mix_most = _make_multiply_add(_WIDE, 1, STEP, 1), _make_multiply_add(_WIDE, _MOST_MIXED, STEP, 1)
_mix_part, _mix_narrow = _make_multiply_add(_WIDE, _MOST_MIXED, 1, 1), _make_multiply_add(1, _MOST_MIXED, 1, 1)


@njit(cache=True, nogil=True)
def _score_tile(q, n, n_dim, keys, at, s, s_at, width):
    """Compute s[m, s_at : +BLOCK] = q[m] · keys of the tile [D, BLOCK] at `at`, for n queries q [n, D], s [n, width]; all flat."""
    for m in range(0, n, _MOST_SCORED):
        count = min(_MOST_SCORED, n - m)
        if count == 1:
            _score_1(q, m * n_dim, n_dim, count, keys, at, BLOCK, n_dim, s, m * width + s_at, width)
        elif count <= _MOST_SCORED // 2:
            _score_some(q, m * n_dim, n_dim, count, keys, at, BLOCK, n_dim, s, m * width + s_at, width)
        else:
            _score_most(q, m * n_dim, n_dim, count, keys, at, BLOCK, n_dim, s, m * width + s_at, width)


@njit(cache=True, nogil=True)
def _mix(acc, acc_at, n, n_dim, s, s_at, width, values, at, n_keys):
    """Add s[m, s_at : +n_keys] · values [n_keys, D] at `at` to acc[m], for n rows of acc [n, D] from acc_at on, s [n, width]; all flat."""
    for m in range(0, n, _MOST_MIXED):
        count, d = min(_MOST_MIXED, n - m), 0
        x, y = s_at + m * width, acc_at + m * n_dim
        while d + _WIDE * WIDTH <= n_dim:
            if n_keys % STEP != 0:
                _mix_part(s, x, width, count, values, at + d, n_dim, n_keys, acc, y + d, n_dim)
            elif count == 1:
                _mix_1(s, x, width, count, values, at + d, n_dim, n_keys, acc, y + d, n_dim)
            else:
                _mix_most(s, x, width, count, values, at + d, n_dim, n_keys, acc, y + d, n_dim)
            d += _WIDE * WIDTH
        while d + WIDTH <= n_dim:
            _mix_narrow(s, x, width, count, values, at + d, n_dim, n_keys, acc, y + d, n_dim)
            d += WIDTH
        for r in range(count if d < n_dim else 0):
            for j in range(n_keys):
                for e in range(d, n_dim):
                    acc[y + r * n_dim + e] = fma(s[x + r * width + j], load_as_float32(values, at + j * n_dim + e), acc[y + r * n_dim + e])


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


PARALLEL = 1 << 14  # Numbers in a small operation from which on starting a second thread pays (measured).


@njit(cache=True, nogil=True)
def n_splits(n_items, n_rows, n_kv, group, n_threads):
    """Return (rows, heads): into how many parts an item's rows and a group of query heads are divided, so that every thread has work."""
    wanted = (2 * n_threads + n_items * n_kv - 1) // max(1, n_items * n_kv)
    by_rows = min(wanted, (n_rows + n_items - 1) // max(1, n_items))
    return by_rows, group if by_rows < wanted else 1


@njit(cache=True, nogil=True, error_model="numpy")
def attend_piece(work, by_rows, by_heads, q, keys, values, out, items, tables, positions, bases, paths, scale, window, softcap):
    """Compute piece `work` of the items · n_kv · rows · heads pieces of a layer's attention: some rows of an item by some heads of a group.

    The other arguments are those of `_attend`.
    """
    n_dim, n_kv = q.shape[2], keys.shape[1]
    group = q.shape[1] // n_kv
    part, per_item = group // by_heads, n_kv * by_rows * by_heads
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    item = work // per_item
    h = (work % per_item) // (by_rows * by_heads)
    head0 = h * group + (work % by_heads) * part
    some = work // by_heads % by_rows
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
    width = n_tiles * BLOCK
    n_heads = (row1 - row0) * part
    queries = np.empty(n_heads * n_dim, np.float32)
    for m in range(n_heads):
        for d in range(n_dim):
            queries[m * n_dim + d] = q[row0 + m // part, head0 + m % part, d] * scale
    s = np.empty(n_heads * width, np.float32)
    for t in range(tile0, n_tiles):
        _score_tile(queries, n_heads, n_dim, flat_keys, (np.int64(table[t]) * n_kv + h) * BLOCK * n_dim, s, t * BLOCK, width)
    logical = np.empty(paths.shape[1], np.float32)
    totals = np.empty(n_heads, np.float32)
    acc = np.zeros(n_heads * n_dim, np.float32)
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
                scores[p] = softcap * np.float32(np.tanh(scores[p] / softcap))
        totals[m] = _softmax(scores, start, end)
    for t in range(tile0, n_tiles):
        tile, first = (np.int64(table[t]) * n_kv + h) * BLOCK * n_dim, t * BLOCK
        common = min(shared - first, BLOCK) if latest <= first else np.int64(0)  # keys that all rows see, in the slots of their positions
        if common > 0:
            _mix(acc, 0, n_heads, n_dim, s, first, width, flat_values, tile, common)
        for r in range(row0, row1):
            base, end = np.int64(bases[r]), np.int64(positions[r]) + 1
            p = max(first + max(common, np.int64(0)), end - window if window > 0 else np.int64(0))
            m = (r - row0) * part
            while p < min(end, first + BLOCK):
                n_keys = min(base, first + BLOCK) - p
                at = tile + (p - first) * n_dim
                if p >= base:
                    slot = np.int64(paths[r, p - base])
                    at, n_keys = ((np.int64(table[slot // BLOCK]) * n_kv + h) * BLOCK + slot % BLOCK) * n_dim, np.int64(1)
                _mix(acc, m * n_dim, part, n_dim, s, m * width + p, width, flat_values, at, n_keys)
                p += n_keys
    for m in range(n_heads):
        inverse = _ONE / totals[m]
        for d in range(n_dim):
            out[row0 + m // part, head0 + m % part, d] = acc[m * n_dim + d] * inverse


@njit(cache=True, nogil=True, parallel=True)
def _attend(q, keys, values, out, items, tables, positions, bases, paths, scale, window, softcap, n_threads):
    """Compute attention of q [T, H, D] over one layer's pool into out [T, H, D]. The rows' own keys and values must have been written."""
    n_kv = keys.shape[1]
    by_rows, by_heads = n_splits(items.shape[0], q.shape[0], n_kv, q.shape[1] // n_kv, n_threads)
    for i in prange(items.shape[0] * n_kv * by_rows * by_heads):
        attend_piece(np.int64(i), by_rows, by_heads, q, keys, values, out, items, tables, positions, bases, paths, scale, window, softcap)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: KVPool,
    layer: int,
    batch: Batch,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Write the rows' keys and values to `pool` and return the attention output.

    q [T, H, D], k and v [T, Hk, D], float32 on the CPU; returns [T, H, D]. `window` and `softcap` of 0 mean none.
    """
    import torch

    keys, values = pool.keys[layer], pool.values[layer]
    assert k.shape[1:] == (keys.shape[1], keys.shape[2]), (k.shape, keys.shape)
    _write_kv(k.contiguous().numpy(), v.contiguous().numpy(), keys, values, batch.blocks, batch.offsets)
    out = torch.empty(q.shape, dtype=torch.float32)
    _attend(
        q.contiguous().numpy(), keys, values, out.numpy(), batch.items, batch.tables, batch.positions, batch.bases, batch.paths,
        _F(scale), int(window), _F(softcap), get_num_threads(),
    )  # fmt: skip
    return out


@dataclass(slots=True)
class CpuAttentionPass:
    """Attention of one pass, given to the model's layers as the keyword argument `ngramspec` (`models.masks.AttentionPass`).

    Raises UnsupportedModelError for a layer that computes in another dtype than float32.
    """

    pool: KVPool
    batch: Batch

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
    ) -> torch.Tensor:
        if found := {str(x.dtype) for x in (q, k, v)} - {"torch.float32"}:
            raise UnsupportedModelError(f"layer {layer}: attention over {', '.join(found)}; on the CPU it is computed in torch.float32")
        return attend(q, k, v, self.pool, layer, self.batch, scale=scale, window=window, softcap=softcap)

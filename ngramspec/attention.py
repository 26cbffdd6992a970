"""Attention over the paged pool: the entry that transformers calls, and its CPU implementation.

Knows the layout of one layer's pool and what each row may see; knows nothing of sequences, models or
drafts. `attend` takes the layer's query, key and value rows, writes keys and values to their slots and
returns the mixed values. Every sum runs over the keys in the order of their position in the text, in
groups aligned to absolute positions, and every (row, head) is computed by the same scalar recipe: its bits
cannot depend on other rows, on where a key lies in memory, or on how a text was cut into passes.

Layout of a layer, chosen so that every inner loop runs over consecutive floats and no sum is vectorised:
keys `[n_blocks, n_kv_heads, head_dim, BLOCK]`, values `[n_blocks, n_kv_heads, BLOCK, head_dim]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import get_num_threads, njit, prange

from ngramspec.errors import UnsupportedModelError
from ngramspec.numeric import exp, fma
from ngramspec.types import BLOCK, Batch

if TYPE_CHECKING:
    from ngramspec.kv import KVPool

_F = np.float32
_ONE, _ZERO, _LOWEST = _F(1.0), _F(0.0), _F(-3.0e38)


@njit(cache=True, nogil=True)
def _softmax(s, start, end, lanes):
    """s[start:end] to exp(s - max), in place; returns their sum. Sixteen lanes, tied to absolute positions."""
    first = start & ~15
    s = s[first : (end + 15) & ~15]
    start, end, n_keys = start - first, end - first, s.shape[0]
    for j in range(start):
        s[j] = _LOWEST
    for j in range(end, n_keys):
        s[j] = _LOWEST
    for i in range(16):
        lanes[i] = _LOWEST
    for j in range(0, n_keys, 16):
        for i in range(16):
            lanes[i] = max(lanes[i], s[j + i])
    top = lanes[0]
    for i in range(1, 16):
        top = max(top, lanes[i])
    for j in range(n_keys):
        s[j] = exp(s[j] - top)
    for j in range(start):
        s[j] = _ZERO
    for j in range(end, n_keys):
        s[j] = _ZERO
    for i in range(16):
        lanes[i] = _ZERO
    for j in range(0, n_keys, 16):
        for i in range(16):
            lanes[i] += s[j + i]
    total = _ZERO
    for i in range(16):
        total += lanes[i]
    return total


# Unsigned indices into flat arrays: signed ones make numba test for negative values in the innermost loops.
_U = np.uint64
_U1, _U2, _U3, _U4, _U5, _U6, _U7, _U8 = _U(1), _U(2), _U(3), _U(4), _U(5), _U(6), _U(7), _U(8)
_TILE, _SHIFT = _U(BLOCK), _U(8)
assert BLOCK == 32, "the offsets in _scores are written out for tiles of 32 keys"


@njit(cache=True, nogil=True)
def _scores(q, q_at, k, k_at, s, s_at, n_dim):
    """s[s_at : +BLOCK] = q[q_at : +n_dim] against the tile of keys k[k_at : +n_dim * BLOCK]."""
    for j in range(_TILE):
        s[s_at + j] = _ZERO
    for g in range(n_dim >> _U3):
        a = q_at + (g << _U3)
        q0, q1, q2, q3 = q[a], q[a + _U1], q[a + _U2], q[a + _U3]
        q4, q5, q6, q7 = q[a + _U4], q[a + _U5], q[a + _U6], q[a + _U7]
        at = k_at + (g << _SHIFT)
        for j in range(_TILE):
            i = at + j
            x = fma(q3, k[i + _U(96)], fma(q2, k[i + _U(64)], fma(q1, k[i + _U(32)], q0 * k[i])))
            y = fma(q7, k[i + _U(224)], fma(q6, k[i + _U(192)], fma(q5, k[i + _U(160)], q4 * k[i + _U(128)])))
            s[s_at + j] += x + y


@njit(cache=True, nogil=True)
def _mix(acc, acc_at, p, p_at, v, at, start, end, n_dim):
    """acc[acc_at : +n_dim] += p[p_at + j] * v[at[j] : +n_dim] for start <= j < end, in groups of eight aligned positions."""
    j = start
    while j < end:
        if (j & _U7) == 0 and j + _U8 <= end:
            i = p_at + j
            p0, p1, p2, p3 = p[i], p[i + _U1], p[i + _U2], p[i + _U3]
            p4, p5, p6, p7 = p[i + _U4], p[i + _U5], p[i + _U6], p[i + _U7]
            v0, v1, v2, v3 = at[j], at[j + _U1], at[j + _U2], at[j + _U3]
            v4, v5, v6, v7 = at[j + _U4], at[j + _U5], at[j + _U6], at[j + _U7]
            for d in range(n_dim):
                x = fma(p3, v[v3 + d], fma(p2, v[v2 + d], fma(p1, v[v1 + d], p0 * v[v0 + d])))
                y = fma(p7, v[v7 + d], fma(p6, v[v6 + d], fma(p5, v[v5 + d], p4 * v[v4 + d])))
                acc[acc_at + d] += x + y
            j += _U8
        else:
            pj, vj = p[p_at + j], at[j]
            for d in range(n_dim):
                acc[acc_at + d] = fma(pj, v[vj + d], acc[acc_at + d])
            j += _U1


def _whole_tile(head_dim):
    """`_mix` over a tile of keys that lie side by side, for one head size: with its strides known, a compiler needs half the time."""
    dim = _U(head_dim)

    @njit(cache=True, nogil=True)
    def mix_tile(acc, acc_at, p, p_at, v, v_at):
        for half in range(_U(2)):
            i = p_at + half * _U(16)
            a = v_at + half * _U(16) * dim
            b = a + _U8 * dim
            p0, p1, p2, p3, p4, p5, p6, p7 = p[i], p[i + _U1], p[i + _U2], p[i + _U3], p[i + _U4], p[i + _U5], p[i + _U6], p[i + _U7]
            i += _U8
            r0, r1, r2, r3, r4, r5, r6, r7 = p[i], p[i + _U1], p[i + _U2], p[i + _U3], p[i + _U4], p[i + _U5], p[i + _U6], p[i + _U7]
            for d in range(dim):
                j = a + d
                x = fma(p3, v[j + _U3 * dim], fma(p2, v[j + _U2 * dim], fma(p1, v[j + dim], p0 * v[j])))
                y = fma(p7, v[j + _U7 * dim], fma(p6, v[j + _U6 * dim], fma(p5, v[j + _U5 * dim], p4 * v[j + _U4 * dim])))
                total = acc[acc_at + d] + (x + y)
                j = b + d
                x = fma(r3, v[j + _U3 * dim], fma(r2, v[j + _U2 * dim], fma(r1, v[j + dim], r0 * v[j])))
                y = fma(r7, v[j + _U7 * dim], fma(r6, v[j + _U6 * dim], fma(r5, v[j + _U5 * dim], r4 * v[j + _U4 * dim])))
                acc[acc_at + d] = total + (x + y)

    return mix_tile


_mix_tile_64, _mix_tile_128 = _whole_tile(64), _whole_tile(128)


@njit(cache=True, nogil=True, parallel=True)
def _place(k, v, keys, values, blocks, offsets):
    """Write key and value rows k, v [T, Hk, D] to their slots."""
    for i in prange(k.shape[0]):
        r = np.int64(i)  # prange counts in uint64, which turns to float64 beside int64
        block, offset = blocks[r], offsets[r]
        for h in range(k.shape[1]):
            for d in range(k.shape[2]):
                keys[block, h, d, offset] = k[r, h, d]
                values[block, h, offset, d] = v[r, h, d]


@njit(cache=True, nogil=True, parallel=True)
def _turn_and_place(qkv, cos, sin, q, keys, values, blocks, offsets):
    """Rotate queries and keys of qkv [T, (H + 2 Hk) D] by cos, sin [T, D], halves paired: queries to q [T, H, D], the rest to the pool."""
    n_q, n_dim = q.shape[1], q.shape[2]
    n_kv = keys.shape[1]
    half = n_dim // 2
    for i in prange(qkv.shape[0]):
        r = np.int64(i)
        block, offset = blocks[r], offsets[r]
        for h in range(n_q):
            x = qkv[r, h * n_dim : (h + 1) * n_dim]
            for d in range(half):
                q[r, h, d] = fma(x[d], cos[r, d], -x[d + half] * sin[r, d])
                q[r, h, d + half] = fma(x[d + half], cos[r, d + half], x[d] * sin[r, d + half])
        for h in range(n_kv):
            x = qkv[r, (n_q + h) * n_dim : (n_q + h + 1) * n_dim]
            for d in range(half):
                keys[block, h, d, offset] = fma(x[d], cos[r, d], -x[d + half] * sin[r, d])
                keys[block, h, d + half, offset] = fma(x[d + half], cos[r, d + half], x[d] * sin[r, d + half])
            x = qkv[r, (n_q + n_kv + h) * n_dim : (n_q + n_kv + h + 1) * n_dim]
            for d in range(n_dim):
                values[block, h, offset, d] = x[d]


@njit(cache=True, nogil=True, parallel=True, error_model="numpy")
def _look(q, keys, values, out, items, tables, positions, bases, paths, scale, window, softcap, n_threads):
    """q [T, H, D] against the pool of one layer, into out [T, H, D]. Keys and values of the rows must be in their slots."""
    n_q, n_dim, n_kv = q.shape[1], q.shape[2], keys.shape[1]
    group = n_q // n_kv
    # With few items, a group of query heads is taken apart, so that every thread has work.
    split = group if items.shape[0] * n_kv < 2 * n_threads else 1
    part = group // split
    flat_keys, flat_values, flat_out = keys.reshape(-1), values.reshape(-1), out.reshape(-1)
    per_item = n_kv * split
    dim = _U(n_dim)
    for i in prange(items.shape[0] * per_item):
        work = np.int64(i)
        item = work // per_item
        h = (work % per_item) // split
        head0 = h * group + (work % split) * part
        row0, row1 = items[item, 0], items[item, 1]
        table = tables[item]
        first, top_slot = positions[row0], positions[row0]
        for r in range(row0, row1):
            first, top_slot = min(first, positions[r]), max(top_slot, positions[r])
            for p in range(bases[r], positions[r] + 1):
                top_slot = max(top_slot, paths[r, p - bases[r]])
        tile0 = max(np.int64(0), np.int64(first) - window + 1) // BLOCK if window > 0 else np.int64(0)
        n_tiles = np.int64(top_slot) // BLOCK + 1
        width = n_tiles * BLOCK
        n_heads = (row1 - row0) * part
        queries = np.empty(n_heads * n_dim, np.float32)
        for m in range(n_heads):
            for d in range(n_dim):
                queries[m * n_dim + d] = q[row0 + m // part, head0 + m % part, d] * scale
        s = np.empty(n_heads * width, np.float32)
        slot_at = np.empty(width, np.uint64)
        for t in range(tile0, n_tiles):
            tile = _U((np.int64(table[t]) * n_kv + h) * BLOCK) * dim
            for m in range(n_heads):
                _scores(queries, _U(m) * dim, flat_keys, tile, s, _U(m * width + t * BLOCK), dim)
            for j in range(BLOCK):
                slot_at[t * BLOCK + j] = tile + _U(j) * dim
        logical = np.empty(paths.shape[1], np.float32)
        lanes = np.empty(16, np.float32)
        totals = np.empty(n_heads, np.float32)
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
            totals[m] = _softmax(scores, start, end, lanes)
            for d in range(n_dim):
                out[r, head0 + m % part, d] = _ZERO
        at = slot_at.copy()
        for t in range(tile0, n_tiles):
            for r in range(row0, row1):
                base, end = np.int64(bases[r]), np.int64(positions[r]) + 1
                start = max(np.int64(0), end - window) if window > 0 else np.int64(0)
                a, b = max(start, t * BLOCK), min(end, (t + 1) * BLOCK)
                if a >= b:
                    continue
                for p in range(max(a, base), b):
                    at[p] = slot_at[paths[r, p - base]]
                whole = b - a == BLOCK and b <= base
                for g in range(part):
                    row, acc_at = _U(((r - row0) * part + g) * width), _U((r * n_q + head0 + g) * n_dim)
                    if whole and n_dim == 64:
                        _mix_tile_64(flat_out, acc_at, s, row + _U(a), flat_values, at[a])
                    elif whole and n_dim == 128:
                        _mix_tile_128(flat_out, acc_at, s, row + _U(a), flat_values, at[a])
                    else:
                        _mix(flat_out, acc_at, s, row, flat_values, at, _U(a), _U(b), dim)
                for p in range(max(a, base), b):
                    at[p] = slot_at[p]
        for m in range(n_heads):
            inverse = _ONE / totals[m]
            acc_at = _U(((row0 + m // part) * n_q + head0 + m % part) * n_dim)
            for d in range(dim):
                flat_out[acc_at + d] *= inverse


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
    keys, values = pool.keys[layer], pool.values[layer]
    assert k.shape[1:] == (keys.shape[1], keys.shape[2]), (k.shape, keys.shape)
    _place(k.contiguous().numpy(), v.contiguous().numpy(), keys, values, batch.blocks, batch.offsets)
    out = torch.empty(q.shape, dtype=torch.float32)
    _look(
        q.contiguous().numpy(), keys, values, out.numpy(), batch.items, batch.tables, batch.positions, batch.bases, batch.paths,
        _F(scale), int(window), _F(softcap), get_num_threads(),
    )  # fmt: skip
    return out


def attend_packed(
    qkv: torch.Tensor, cos: np.ndarray, sin: np.ndarray, n_heads: int, pool: KVPool, layer: int, batch: Batch, scale: float
) -> torch.Tensor:
    """`attend` for queries, keys and values side by side, qkv [T, (H + 2 Hk) D], yet to be turned by cos, sin [T, D]; returns [T, H D]."""
    keys, values = pool.keys[layer], pool.values[layer]
    q = np.empty((len(qkv), n_heads, keys.shape[2]), np.float32)
    _turn_and_place(qkv.numpy(), cos, sin, q, keys, values, batch.blocks, batch.offsets)
    out = torch.empty(len(qkv), n_heads * keys.shape[2])
    _look(
        q, keys, values, out.numpy().reshape(q.shape), batch.items, batch.tables, batch.positions, batch.bases, batch.paths,
        _F(scale), 0, _ZERO, get_num_threads(),
    )  # fmt: skip
    return out


@dataclass(slots=True)
class Pass:
    """What a model's attention layers are handed in a pass, as the keyword argument `ngramspec`."""

    pool: KVPool
    batch: Batch

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
    ) -> torch.Tensor:
        return attend(q, k, v, self.pool, layer, self.batch, scale=scale, window=window, softcap=softcap)


class Shapes:
    """Handed instead of a `Pass`, finds out the shape of every layer's keys: configurations are not to be relied on."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
    ) -> torch.Tensor:
        self.seen[layer] = (k.shape[1], k.shape[2])
        return torch.zeros_like(q)


HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "cache_position", "is_causal", "layer_idx"}
)
"""Arguments that models hand to every attention function and that change nothing here."""


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    ngramspec: Pass | Shapes | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: query [1, H, T, D], key and value [1, Hk, T, D]; returns [1, T, H, D].

    Raises UnsupportedModelError for an argument that would change the mathematics.
    """
    if ngramspec is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not hand keyword arguments on to its attention function")
    unknown = sorted(name for name, value_ in others.items() if value_ is not None and name not in HARMLESS)
    if unknown or attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown) or 'a mask'}, which is not implemented"
        )
    if query.dtype != torch.float32 or value.shape != key.shape:
        raise UnsupportedModelError(
            f"{type(module).__name__}: attention over {query.dtype}, keys {tuple(key.shape)}, values {tuple(value.shape)}"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return ngramspec.attend(module.layer_idx, q, k, v, scale, sliding_window or 0, softcap or 0.0)[None], None  # type: ignore[arg-type]

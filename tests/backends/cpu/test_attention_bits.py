"""Attention over the pool has the bits of one chain of products per score and value, however rows are grouped and work is divided."""

from __future__ import annotations

import numpy as np
import pytest

from ngramspec.backends.cpu import attention
from ngramspec.backends.cpu.codegen.simd import load_as_float32
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import BLOCK, DraftTree
from ngramspec.sampling.batch import Batch, Span, pack
from ngramspec.sampling.numeric import exp, fma


@njit(cache=True)
def attend_slowly(q, keys, values, out, owners, rows, scale, window):
    """Compute attention row by row, head by head, key by key. `rows`: tables, positions, bases and paths of the batch."""
    tables, positions, bases, paths = rows
    group = q.shape[1] // keys.shape[1]
    flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
    n_kv, n_dim = keys.shape[1], q.shape[2]
    for r in range(q.shape[0]):
        end = positions[r] + 1
        start = max(0, end - window) if window else 0
        for h in range(q.shape[1]):
            scores, places = np.zeros(end, np.float32), np.zeros(end, np.int64)
            for p in range(start, end):
                slot = paths[r, p - bases[r]] if p >= bases[r] else p
                places[p] = (np.int64(tables[owners[r], slot // BLOCK]) * n_kv + h // group) * n_dim * BLOCK
                for d in range(n_dim):
                    key = load_as_float32(flat_keys, places[p] + d * BLOCK + slot % BLOCK)
                    scores[p] = fma(q[r, h, d] * scale, key, scores[p])
                places[p] += slot % BLOCK * n_dim
            most, lanes, total = scores[start:].max(), np.zeros(16, np.float32), np.float32(0)
            for p in range(start, end):
                scores[p] = exp(scores[p] - most)
                lanes[p % 16] += scores[p]
            for lane in lanes:
                total += lane
            inverse = np.float32(1) / total
            for d in range(n_dim):
                mixed = np.float32(0)
                for p in range(start, end):
                    mixed = fma(scores[p], load_as_float32(flat_values, places[p] + d), mixed)
                out[r, h, d] = mixed * inverse


def make_pool(rng: np.random.Generator, n_kv: int, n_dim: int, dtype: type[np.generic]) -> KVPool:
    pool = KVPool([(n_kv, n_dim)], 100, 3, 640, dtype)
    assert pool.all_keys is not None
    assert pool.all_values is not None
    for array in (pool.all_keys, pool.all_values):
        x = rng.normal(0, 2, array.shape).astype(np.float32)
        array[:] = x if dtype == np.float32 else x.astype(np.float16).view(np.uint16)
    return pool


def make_batch(rng: np.random.Generator, pool: KVPool) -> Batch:
    """Pack a chunk of a prompt, a draft tree and a single row behind random numbers of tokens."""
    m = int(rng.integers(1, 20))
    parents = np.array([rng.integers(max(-1, i - 3), i) for i in range(m)], np.int32)
    tree = DraftTree(np.zeros(m, np.int32), parents, np.ones(m, np.float32), np.zeros(m, np.uint8))
    spans = []
    for slot, (n, drafted) in enumerate([(int(rng.integers(1, 50)), None), (1, tree), (1, None)]):
        start = int(rng.choice([0, 1, 31, 32, 33, 128, rng.integers(0, 500)]))
        pool.release(slot)
        assert pool.reserve(slot, start + n + m)
        spans.append(Span(slot, np.zeros(n, np.int32), start, drafted))
    return pack(spans, pool, int(rng.choice([1, 4, 8])))


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize(("n_kv", "group", "n_dim"), [(1, 1, 64), (2, 6, 128), (1, 7, 80), (3, 3, 96), (1, 4, 256), (2, 2, 40)])
def test_bits_are_those_of_one_chain(n_kv: int, group: int, n_dim: int, dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(n_dim + group)
    pool = make_pool(rng, n_kv, n_dim, dtype)
    for window in (0, 1, 33, 200):
        batch = make_batch(rng, pool)
        q = rng.normal(0, 1, (len(batch.input_ids), n_kv * group, n_dim)).astype(np.float32)
        expected, got, scale = np.zeros_like(q), np.zeros_like(q), np.float32(n_dim**-0.5)
        owners = np.concatenate([np.full(b - a, i) for i, (a, b) in enumerate(batch.items)])
        rows = batch.tables, batch.positions, batch.bases, batch.paths
        attend_slowly(q, pool.keys[0], pool.values[0], expected, owners, rows, scale, window)
        for n_threads in (1, 2, 5):
            kv, of_layer = (pool.keys[0], pool.values[0]), (scale, window, np.float32(0), np.empty(0, np.float32))
            attention._attend(q, kv, got, (batch.items, *rows), of_layer, n_threads)
            np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))

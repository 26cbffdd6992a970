"""Recycled candidates: the target's top-k after a token, and after two, from the last time that it was computed.

Tokens and logits of verified rows enter; `features` looks the candidates up. Knows no sequence and no probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import KEPT

# Nats: bounds of the levels of a recycled candidate's distance to the most likely one. What is further off is not kept.
GAPS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
_GAPS = np.array(GAPS, np.float32)


class Recycled(NamedTuple):
    """The target's top-k after a token (and after two), from the last time that it was computed. Empty arrays: not kept."""

    tokens: np.ndarray  # [V, KEPT] int32, by the latest token; -1: none
    gaps: np.ndarray  # [V, KEPT] uint8, level of the distance to the most likely one (of the first: to the second)
    keys: np.ndarray  # [H] int64, H a power of two: the pair of tokens that holds the row; -1: none
    pair_tokens: np.ndarray  # [H, KEPT] int32
    pair_gaps: np.ndarray  # [H, KEPT] uint8


def new_recycled(vocab_size: int, pairs: int) -> Recycled:
    """Return room for every token and for `pairs` (a power of two) pairs of tokens; 0 and 0 keep nothing."""
    return Recycled(
        np.full((vocab_size, KEPT), -1, np.int32),
        np.zeros((vocab_size, KEPT), np.uint8),
        np.full(pairs, -1, np.int64),
        np.full((pairs, KEPT), -1, np.int32),
        np.zeros((pairs, KEPT), np.uint8),
    )


@njit(cache=True, nogil=True, forceinline=True)
def pair_key(a, b):
    """Return the key of two neighbouring tokens, the later one last."""
    return (np.int64(a) << 32) | np.int64(b)


@njit(cache=True, nogil=True, forceinline=True)
def pair_row(key, n):
    """Return the row of a pair in a table of n (a power of two) rows."""
    return np.int64((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) & (n - 1)


@njit(cache=True, nogil=True)
def record_topk(recycled, before, last, tokens, values):
    """Keep the target's top tokens [KEPT] after `last` (and after `before`, `last`), with their logits, most likely first."""
    key = pair_key(before, last)
    s = pair_row(key, len(recycled.keys)) if before >= 0 and len(recycled.keys) else np.int64(-1)
    if s >= 0:
        recycled.keys[s] = key
    for rank in range(KEPT):
        far = values[0] - values[max(rank, 1)]
        level = 0
        while level < len(_GAPS) and far >= _GAPS[level]:
            level += 1
        token = tokens[rank] if rank == 0 or level < len(_GAPS) else np.int64(-1)
        recycled.tokens[last, rank], recycled.gaps[last, rank] = token, level
        if s >= 0:
            recycled.pair_tokens[s, rank], recycled.pair_gaps[s, rank] = token, level
        if token < 0:
            break


@njit(cache=True, nogil=True)
def record_topk_rows(recycled, before, last, tokens, logits):
    """Call `record_topk` for each of n rows: before, last [n], tokens, logits [n, KEPT]. Rows with too few finite logits are skipped."""
    for i in range(last.shape[0]):
        if logits[i, KEPT - 1] > -np.inf:
            record_topk(recycled, np.int64(before[i]), np.int64(last[i]), tokens[i], logits[i])


@njit(cache=True, nogil=True)
def record_batch_topk(recycled, sequences, input_ids, parents, roots, ends, root_logits, tokens, logits):
    """Call `record_topk` for the last tokens and all nodes of `sequences` [B, 3], as in `drafter.PassTopK`, of a batch with these arrays.

    Rows with fewer than KEPT finite logits are skipped.
    """
    for i in range(sequences.shape[0]):
        b = sequences[i, 2]
        for j in range(ends[b] - roots[b]):
            at, row = roots[b] + j, root_logits[b] + j
            if logits[row, KEPT - 1] > -np.inf:
                before = np.int64(input_ids[parents[at]]) if j else sequences[i, 1]
                record_topk(recycled, before, np.int64(input_ids[at]), tokens[row], logits[row])

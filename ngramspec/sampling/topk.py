"""Find the k largest logits of rows, largest first; equal ones in the order of their token ids. NaN is never among them.

`scan_logits` and `finish_row` take a row in parts, as a kernel computes them; `rank_rows` takes whole rows. Knows no backend.
"""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import KEPT

# The token id of a place that is not filled yet; larger than any token's.
EMPTY = np.int32(2**31 - 1)
# Logits compared at once: most chunks hold none of the largest, which vector instructions find out.
_CHUNK = 128


@njit(cache=True, nogil=True, forceinline=True)
def _ranks_before(token, x, other, y):
    """Return whether a token with logit x ranks before another with logit y."""
    return x > y or (x == y and token < other)


@njit(cache=True, nogil=True)
def insert(token, x, best, values):
    """Insert a token with logit x into the best tokens [K] int32 and their logits `values` [K] float32, if it is among them."""
    j = best.shape[0] - 1
    if not _ranks_before(token, x, best[j], values[j]):
        return
    while j and _ranks_before(token, x, best[j - 1], values[j - 1]):
        values[j], best[j] = values[j - 1], best[j - 1]
        j -= 1
    values[j], best[j] = x, token


@njit(cache=True, nogil=True)
def scan_logits(logits, first, best, values):
    """Insert each of logits [n], of tokens first, first + 1, …, into `best` and `values`; return whether none is NaN."""
    last, fine = best.shape[0] - 1, True
    for i in range(0, logits.shape[0], _CHUNK):
        part, least, n_here = logits[i : i + _CHUNK], values[last], np.int32(0)
        for j in range(part.shape[0]):
            n_here += np.int32(not (part[j] < least))
        for j in range(part.shape[0] if n_here else 0):
            fine &= part[j] == part[j]
            if not (part[j] < values[last]):
                insert(np.int32(first + i + j), part[j], best, values)
    return fine


@njit(cache=True, nogil=True)
def finish_row(fine, best, values):
    """Finish one row: fill unused places with -1; return the argmax, or -1 if the maximum is infinite or a logit is NaN (not `fine`)."""
    for j in range(best.shape[0]):
        if best[j] == EMPTY:
            best[j] = -1
    return best[0] if fine and np.isfinite(values[0]) else np.int32(-1)


@njit(cache=True, nogil=True)
def _rank_rows(rows, greedy, best, values):
    for i in range(rows.shape[0]):
        best[i], values[i] = EMPTY, -np.inf
        greedy[i] = finish_row(scan_logits(np.ascontiguousarray(rows[i]), 0, best[i], values[i]), best[i], values[i])


def rank_rows(rows: np.ndarray, n_best: int = KEPT) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the argmax of rows [n, V] float32, or -1 (see `finish_row`), [n] int32; and their top tokens [n, n_best] int32 with logits.

    If a row has fewer tokens, -1 and -inf fill the rest.
    """
    greedy, best = np.empty(len(rows), np.int32), np.empty((len(rows), n_best), np.int32)
    values = np.empty((len(rows), n_best), np.float32)
    _rank_rows(rows, greedy, best, values)
    return greedy, best, values


def find_topk(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the top tokens [n, KEPT] int32 of rows [n, V], and their logits."""
    return rank_rows(rows)[1:]

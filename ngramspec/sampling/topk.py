"""The likeliest tokens of rows of logits: greatest first, of equal ones the lower id. Logits that are not numbers are none of them.

Rows, or parts of them as they are computed, go in; tokens with their logits come out. Knows neither what computes nor who wants to know.
"""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import KEPT

NOBODY = np.int32(2**31 - 1)
"""A place that no token has yet."""
_AT_ONCE = 128


@njit(cache=True, nogil=True, inline="always")
def _ahead(token, x, other, y):
    return x > y or (x == y and token < other)


@njit(cache=True, nogil=True)
def insert(token, x, best, values):
    """Put a token where it belongs among the best tokens [K] int32, if it does, with its logit into values [K] float32."""
    j = best.shape[0] - 1
    if not _ahead(token, x, best[j], values[j]):
        return
    while j and _ahead(token, x, best[j - 1], values[j - 1]):
        values[j], best[j] = values[j - 1], best[j - 1]
        j -= 1
    values[j], best[j] = x, token


@njit(cache=True, nogil=True)
def look(logits, first, best, values):
    """`insert` each of logits [n], which are those of tokens first, first + 1, … → whether all are numbers.

    Most cannot be among the best, which is seen of several at once, with vector instructions.
    """
    last, fine = best.shape[0] - 1, True
    for i in range(0, logits.shape[0], _AT_ONCE):
        part, least, n_here = logits[i : i + _AT_ONCE], values[last], np.int32(0)
        for j in range(part.shape[0]):
            n_here += np.int32(not (part[j] < least))
        for j in range(part.shape[0] if n_here else 0):
            fine &= part[j] == part[j]
            if not (part[j] < values[last]):
                insert(np.int32(first + i + j), part[j], best, values)
    return fine


@njit(cache=True, nogil=True)
def settle(fine, best, values):
    """Of one row that was looked at: -1 into the places that nobody has -> its likeliest token, -1 where no greedy choice can be made,
    since the greatest logit is infinite or one is not a number (not `fine`)."""
    for j in range(best.shape[0]):
        if best[j] == NOBODY:
            best[j] = -1
    return best[0] if fine and np.isfinite(values[0]) else np.int32(-1)


@njit(cache=True, nogil=True)
def _ranked(rows, greedy, best, values):
    for i in range(rows.shape[0]):
        best[i], values[i] = NOBODY, -np.inf
        greedy[i] = settle(look(np.ascontiguousarray(rows[i]), 0, best[i], values[i]), best[i], values[i])


def ranked(rows: np.ndarray, n_best: int = KEPT) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each of rows [n, V] float32: the greedy choice, -1 for none (see `settle`), [n] int32; the likeliest tokens [n, n_best] int32 and
    their logits, -1 and -inf where there are no more."""
    greedy, best = np.empty(len(rows), np.int32), np.empty((len(rows), n_best), np.int32)
    values = np.empty((len(rows), n_best), np.float32)
    _ranked(rows, greedy, best, values)
    return greedy, best, values


def likeliest(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`ranked` tokens and logits alone."""
    return ranked(rows)[1:]

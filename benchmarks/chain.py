"""The plain prediction of the n-gram tables: the longest known context's most frequent continuation, again and again. No probabilities.

What lookup-based drafters make, for comparison. Reads the tables of a `Proposer`, and changes nothing.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ngramspec.drafting import Proposer, ngram


def chain(proposer: Proposer, slot: int, length: int) -> np.ndarray:
    """[n] int32, n <= length: shorter where no context is known any more."""
    tokens: np.ndarray = _chain(proposer._states[slot], proposer._contexts, length)
    return tokens


@njit(cache=True, nogil=True)
def _chain(state, contexts, length):
    seq, K, longest = ngram.arrays(state, contexts), len(contexts), ngram.LADDER[-1]
    mask = len(seq.tokens) - 1
    have = min(longest, state[ngram.LENGTH])
    recent = np.empty(have + length, np.int32)  # newest first, the text from `length` on
    for i in range(have):
        recent[length + i] = seq.tokens[(state[ngram.LENGTH] - 1 - i) & mask]
    heads, totals, runs = np.zeros(2 * K + 2, np.int64), np.zeros(2 * K + 2, np.int64), np.zeros(2 * K + 2, np.int64)
    seen, counts = np.empty(ngram.REACH, np.int32), np.empty(ngram.REACH, np.int64)
    for n in range(length):
        first = length - n
        known, _ = ngram.look_up(state, seq, state, seq, recent[first:], min(have + n, longest), heads, totals, runs)
        if known == 0:
            return recent[first:length][::-1].copy()
        p, m, best = heads[known - 1], 0, 0
        for _ in range(min(totals[known - 1], ngram.REACH)):  # the latest events first
            j = 0
            while j < m and seen[j] != seq.tokens[p & mask]:
                j += 1
            if j == m:
                seen[m], counts[m] = seq.tokens[p & mask], 0
                m += 1
            counts[j] += 1
            p = np.int64(seq.links[(p & mask) * (K + 1) + known - 1])
        for j in range(m):
            if counts[j] > counts[best]:
                best = j
        recent[first - 1] = seen[best]
    return recent[:length][::-1].copy()

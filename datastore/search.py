"""Search in the sorted suffixes of one segment: where a context belongs, and what stands around it. Compiled, no Python objects.

A segment is a row of addresses and sizes (`ROW` columns), a context an address of int32 token ids, newest first. Whatever the files
hold, no read leaves them: an index is bounded by the row's counts, a position read from `suffixes` is checked before it is used, and every
loop shrinks a range of indices. Unsorted or invalid positions give poor matches, nothing else.
The last two functions are for people's look-ups.
"""

from __future__ import annotations

import numpy as np

from .code_cache import njit
from .format import PLACE_BITS
from .numba_intrinsics import load_i32, load_i64, load_u8, load_u16, load_u32, prefetch

(TOKENS, N_TOKENS, WIDE, SUFFIXES, N_SUFFIXES, WIDTH, DEAD, N_DEAD, VOCAB, ROW) = range(10)
"""Columns of a segment's row, int64. DEAD: address of int64 [N_DEAD, 2], first token and end of dead documents, rising."""

_INLINE = {"cache": True, "nogil": True, "inline": "always", "error_model": "numpy"}


@njit(**_INLINE)
def token_at(tokens, wide, i):
    return load_u32(tokens + 4 * i) if wide else load_u16(tokens + 2 * i)


@njit(**_INLINE)
def position_at(suffixes, width, i):
    """The i-th position, unchecked."""
    address = suffixes + width * i
    if width == 4:
        return load_u32(address)
    if width == 3:
        return load_u16(address) | load_u8(address + 2) << 16
    if width == 2:
        return load_u16(address)
    return load_u32(address) | load_u8(address + 4) << 32


@njit(**_INLINE)
def is_dead(row, p):
    """Whether position p lies in a dead document."""
    dead, lo, hi = row[DEAD], 0, row[N_DEAD]
    while lo < hi:
        mid = (lo + hi) >> 1
        if load_i64(dead + 16 * mid) <= p:
            lo = mid + 1
        else:
            hi = mid
    return lo > 0 and p < load_i64(dead + 16 * (lo - 1) + 8)


@njit(**_INLINE)
def agreement(tokens, wide, p, query, k, length):
    """How many tokens before p are those of the query, at most `length`; the first k are known to be."""
    end = min(length, p)
    while k < end and token_at(tokens, wide, p - 1 - k) == load_i32(query + 4 * k):
        k += 1
    return k


@njit(cache=True, nogil=True, error_model="numpy")
def entry_agreement(row, i, query, length):
    """Tokens that the i-th entry shares with the query, at most `length`; 0 where there is no such entry or its position is invalid."""
    if i < 0 or i >= row[N_SUFFIXES]:
        return 0
    p = position_at(row[SUFFIXES], row[WIDTH], i)
    if p < 1 or p >= row[N_TOKENS]:
        return 0
    return agreement(row[TOKENS], row[WIDE], p, query, 0, length)


@njit(cache=True, nogil=True, error_model="numpy")
def insertion(row, query, length):
    """First entry not before the query -> (index, tokens shared with the entry before it, with itself).

    Binary search that compares from what both ends already share (Manber & Myers 1993, section 2, without their LCP table).
    """
    tokens, wide, suffixes, width, n_tokens = row[TOKENS], row[WIDE] != 0, row[SUFFIXES], row[WIDTH], row[N_TOKENS]
    lo, hi = -1, row[N_SUFFIXES]
    shared_lo, shared_hi = 0, 0
    while hi - lo > 1:
        mid = (lo + hi) >> 1
        if hi - lo > 64:
            prefetch(suffixes + width * ((lo + mid) >> 1))
            prefetch(suffixes + width * ((mid + hi) >> 1))
        p = position_at(suffixes, width, mid)
        k = 0
        before = False
        if p >= 1 and p < n_tokens:
            k = agreement(tokens, wide, p, query, min(shared_lo, shared_hi), length)
            before = k < length and k < p and token_at(tokens, wide, p - 1 - k) < load_i32(query + 4 * k)
        if before:
            lo, shared_lo = mid, k
        else:
            hi, shared_hi = mid, k
    return hi, shared_lo, shared_hi


@njit(cache=True, nogil=True, error_model="numpy")
def reach(row, start, step, query, length, exact):
    """How many entries from `start` on, in direction `step` (1 or -1), share `length` tokens with the query.

    Gallops, so that the work is logarithmic. With exact=False the answer may be up to a quarter too small.
    """
    if entry_agreement(row, start, query, length) < length:
        return 0
    inside, outside, stride = 0, 1, 8
    while entry_agreement(row, start + step * outside, query, length) >= length:
        inside = outside
        outside += stride
        stride *= 8
    while outside - inside > (1 if exact else max(1, inside >> 2)):
        mid = (inside + outside) >> 1
        if entry_agreement(row, start + step * mid, query, length) >= length:
            inside = mid
        else:
            outside = mid
    return inside + 1


(QUERY, LENGTH, LO, HI, SHARED_LO, SHARED_HI, POSITION, MAY, LANE) = range(9)
"""Columns of a lane of `insertions`."""


@njit(cache=True, nogil=True, error_model="numpy")
def insertions(row, lanes, n, store):
    """`insertion` of n contexts at once, to LO + 1, SHARED_LO and SHARED_HI of lanes [n, LANE], which hold QUERY and LENGTH; those whose
    MAY lacks the bit `store` are passed over, as if they shared nothing.

    One step of all, then the next: each waits for memory while the others go on. Far quicker than one after the other.
    """
    tokens, wide, suffixes, width, n_tokens = row[TOKENS], row[WIDE] != 0, row[SUFFIXES], row[WIDTH], row[N_TOKENS]
    shift = 2 if wide else 1
    for i in range(n):
        lanes[i, LO], lanes[i, HI], lanes[i, SHARED_LO], lanes[i, SHARED_HI] = -1, row[N_SUFFIXES] if lanes[i, MAY] & store else 0, 0, 0
    # all ranges begin alike, and halve alike but for one entry
    left = row[N_SUFFIXES] + 1
    while left > 1:
        for i in range(n):
            if lanes[i, HI] - lanes[i, LO] > 1:
                p = position_at(suffixes, width, (lanes[i, LO] + lanes[i, HI]) >> 1)
                prefetch(tokens + ((p - 1) << shift))
                lanes[i, POSITION] = p
        for i in range(n):
            lo, hi = lanes[i, LO], lanes[i, HI]
            if hi - lo <= 1:
                continue
            p, query, length = lanes[i, POSITION], lanes[i, QUERY], lanes[i, LENGTH]
            k = 0
            before = False
            if p >= 1 and p < n_tokens:
                k = agreement(tokens, wide, p, query, min(lanes[i, SHARED_LO], lanes[i, SHARED_HI]), length)
                before = k < length and k < p and token_at(tokens, wide, p - 1 - k) < load_i32(query + 4 * k)
            if before:
                lo = (lo + hi) >> 1
                lanes[i, LO], lanes[i, SHARED_LO] = lo, k
            else:
                hi = (lo + hi) >> 1
                lanes[i, HI], lanes[i, SHARED_HI] = hi, k
            if hi - lo > 1:
                prefetch(suffixes + width * ((lo + hi) >> 1))
        left = (left + 1) >> 1


@njit(cache=True, nogil=True)
def occurrences(rows, query, length, places):
    """Live positions after the first `length` tokens of the query, as many as fit -> (how many, the longest that occurs at all)."""
    n, longest = 0, 0
    for s in range(len(rows)):
        row = rows[s]
        at, left, right = insertion(row, query.ctypes.data, length)
        longest = max(longest, left, right)
        if right < length:
            continue
        for i in range(at, at + reach(row, at, 1, query.ctypes.data, length, True)):
            p = position_at(row[SUFFIXES], row[WIDTH], i)
            if p < 1 or p >= row[N_TOKENS] or is_dead(row, p):
                continue
            if n == len(places):
                return n, longest
            places[n] = np.int64(s) << PLACE_BITS | p
            n += 1
    return n, longest


@njit(cache=True, nogil=True)
def line_ends_of(tokens, line_ends):
    """Line ends in a text: u16|u32 [n], u8 [vocab_size] -> their sum. Ids beyond the vocabulary have none."""
    n = 0
    for token in tokens:
        if token < len(line_ends):
            n += line_ends[token]
    return n

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

# columns of a segment's row, int64. DELETED: address of int64 [N_DELETED, 2], first token and end of documents with a tombstone, rising
(TOKENS, N_TOKENS, WIDE, SUFFIXES, N_SUFFIXES, WIDTH, DELETED, N_DELETED, VOCAB, ROW) = range(10)

_INLINE = {"cache": True, "nogil": True, "inline": "always", "error_model": "numpy"}


@njit(**_INLINE)
def read_token(tokens, wide, i):
    return load_u32(tokens + 4 * i) if wide else load_u16(tokens + 2 * i)


@njit(**_INLINE)
def read_position(suffixes, width, i):
    """Return the i-th position, unchecked."""
    address = suffixes + width * i
    if width == 4:
        return load_u32(address)
    if width == 3:
        return load_u16(address) | load_u8(address + 2) << 16
    if width == 2:
        return load_u16(address)
    return load_u32(address) | load_u8(address + 4) << 32


@njit(**_INLINE)
def is_deleted(row, p):
    """Return whether position p lies in a document with a tombstone."""
    deleted, lo, hi = row[DELETED], 0, row[N_DELETED]
    while lo < hi:
        mid = (lo + hi) >> 1
        if load_i64(deleted + 16 * mid) <= p:
            lo = mid + 1
        else:
            hi = mid
    return lo > 0 and p < load_i64(deleted + 16 * (lo - 1) + 8)


@njit(**_INLINE)
def count_agreement(tokens, wide, p, query, k, length):
    """Count the tokens before p that are those of the query, at most `length`; the first k are known to be."""
    end = min(length, p)
    while k < end and read_token(tokens, wide, p - 1 - k) == load_i32(query + 4 * k):
        k += 1
    return k


@njit(cache=True, nogil=True, error_model="numpy")
def count_entry_agreement(row, i, query, length):
    """Count the tokens that the i-th entry shares with the query, at most `length`; 0 for no such entry or an invalid position."""
    if i < 0 or i >= row[N_SUFFIXES]:
        return 0
    p = read_position(row[SUFFIXES], row[WIDTH], i)
    if p < 1 or p >= row[N_TOKENS]:
        return 0
    return count_agreement(row[TOKENS], row[WIDE], p, query, 0, length)


@njit(cache=True, nogil=True, error_model="numpy")
def find_insertion(row, query, length):
    """Find the first entry not before the query -> (index, tokens shared with the entry before it, with itself).

    This is a binary search that compares from what both ends already share (Manber & Myers 1993, section 2, without their LCP table).
    """
    tokens, wide, suffixes, width, n_tokens = row[TOKENS], row[WIDE] != 0, row[SUFFIXES], row[WIDTH], row[N_TOKENS]
    lo, hi = -1, row[N_SUFFIXES]
    shared_lo, shared_hi = 0, 0
    while hi - lo > 1:
        mid = (lo + hi) >> 1
        if hi - lo > 64:
            prefetch(suffixes + width * ((lo + mid) >> 1))
            prefetch(suffixes + width * ((mid + hi) >> 1))
        p = read_position(suffixes, width, mid)
        k = 0
        before = False
        if p >= 1 and p < n_tokens:
            k = count_agreement(tokens, wide, p, query, min(shared_lo, shared_hi), length)
            before = k < length and k < p and read_token(tokens, wide, p - 1 - k) < load_i32(query + 4 * k)
        if before:
            lo, shared_lo = mid, k
        else:
            hi, shared_hi = mid, k
    return hi, shared_lo, shared_hi


@njit(cache=True, nogil=True, error_model="numpy")
def count_run(row, start, step, query, length, exact):
    """Count the entries from `start` on, in direction `step` (1 or -1), that share `length` tokens with the query.

    It gallops, so that the work is logarithmic. With exact=False the answer may be up to a quarter too small.
    """
    if count_entry_agreement(row, start, query, length) < length:
        return 0
    inside, outside, stride = 0, 1, 8
    while count_entry_agreement(row, start + step * outside, query, length) >= length:
        inside = outside
        outside += stride
        stride *= 8
    while outside - inside > (1 if exact else max(1, inside >> 2)):
        mid = (inside + outside) >> 1
        if count_entry_agreement(row, start + step * mid, query, length) >= length:
            inside = mid
        else:
            outside = mid
    return inside + 1


# columns of a lane of `find_insertions`
(SEGMENT, SEQUENCE, QUERY, LENGTH, LO, HI, SHARED_LO, SHARED_HI, POSITION, LANE) = range(10)
_FEW = 8  # lanes, at most, of which both entries that may come next are asked for while the text of this one is


@njit(cache=True, nogil=True, error_model="numpy")
def find_insertions(rows, lanes, n):
    """Do `find_insertion` for n contexts, each in a segment, at once: lanes [n, LANE] hold SEGMENT (of `rows`), QUERY and LENGTH, and get
    LO + 1, SHARED_LO and SHARED_HI.

    All lanes take one step, then the next: each waits for memory while the others go on, which is far quicker than one after the other.
    """
    left = np.int64(0)
    for i in range(n):
        s = lanes[i, SEGMENT]
        lanes[i, LO], lanes[i, HI], lanes[i, SHARED_LO], lanes[i, SHARED_HI] = -1, rows[s, N_SUFFIXES], 0, 0
        left = max(left, rows[s, N_SUFFIXES] + 1)
    while left > 1:
        for i in range(n):
            if lanes[i, HI] - lanes[i, LO] > 1:
                s = lanes[i, SEGMENT]
                mid = (lanes[i, LO] + lanes[i, HI]) >> 1
                p = read_position(rows[s, SUFFIXES], rows[s, WIDTH], mid)
                prefetch(rows[s, TOKENS] + (p - 1) * (4 if rows[s, WIDE] else 2))
                if n <= _FEW:
                    prefetch(rows[s, SUFFIXES] + rows[s, WIDTH] * ((lanes[i, LO] + mid) >> 1))
                    prefetch(rows[s, SUFFIXES] + rows[s, WIDTH] * ((mid + lanes[i, HI]) >> 1))
                lanes[i, POSITION] = p
        for i in range(n):
            lo, hi = lanes[i, LO], lanes[i, HI]
            if hi - lo <= 1:
                continue
            s = lanes[i, SEGMENT]
            tokens, wide = rows[s, TOKENS], rows[s, WIDE] != 0
            p, query, length = lanes[i, POSITION], lanes[i, QUERY], lanes[i, LENGTH]
            k = 0
            before = False
            if p >= 1 and p < rows[s, N_TOKENS]:
                k = count_agreement(tokens, wide, p, query, min(lanes[i, SHARED_LO], lanes[i, SHARED_HI]), length)
                before = k < length and k < p and read_token(tokens, wide, p - 1 - k) < load_i32(query + 4 * k)
            if before:
                lo = (lo + hi) >> 1
                lanes[i, LO], lanes[i, SHARED_LO] = lo, k
            else:
                hi = (lo + hi) >> 1
                lanes[i, HI], lanes[i, SHARED_HI] = hi, k
            if hi - lo > 1 and n > _FEW:
                prefetch(rows[s, SUFFIXES] + rows[s, WIDTH] * ((lo + hi) >> 1))
        left = (left + 1) >> 1


@njit(cache=True, nogil=True)
def find_occurrences(rows, query, length, places):
    """Find live positions after the first `length` tokens of the query, as many as fit -> (how many, the longest that occurs at all)."""
    n, longest = 0, 0
    for s in range(len(rows)):
        row = rows[s]
        at, left, right = find_insertion(row, query.ctypes.data, length)
        longest = max(longest, left, right)
        if right < length:
            continue
        for i in range(at, at + count_run(row, at, 1, query.ctypes.data, length, True)):
            p = read_position(row[SUFFIXES], row[WIDTH], i)
            if p < 1 or p >= row[N_TOKENS] or is_deleted(row, p):
                continue
            if n == len(places):
                return n, longest
            places[n] = np.int64(s) << PLACE_BITS | p
            n += 1
    return n, longest


@njit(cache=True, nogil=True)
def count_line_ends(tokens, line_ends):
    """Count the line ends in a text: u16|u32 [n], u8 [vocab_size] -> their sum. Ids beyond the vocabulary have none."""
    n = 0
    for token in tokens:
        if token < len(line_ends):
            n += line_ends[token]
    return n

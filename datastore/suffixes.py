"""The order of a segment's suffixes: made by pydivsufsort, checked in linear time. Knows arrays, no files.

Tokens with separators enter, positions leave: every p whose token and whose predecessor are no separators, sorted by the text
before p read backwards (tokens[p-1], tokens[p-2], ... as unsigned numbers; the separator is the largest). So "what came after
this context" is one binary search over the reversed context. The order goes on past a separator, into the document before, where
two texts agree up to it; look-ups never compare that far.
"""

from __future__ import annotations

import numpy as np
from numba import njit


def sort_suffixes(tokens: np.ndarray, width: int) -> np.ndarray:
    """Positions in order, little-endian -> u8 [n_suffixes, width].

    tokens u16|u32 [n], the first one a separator. libdivsufsort sorts bytes, so that a token counts as 2, 3 or 4 of them, big-endian:
    peak memory beyond `tokens` is 5 bytes per byte sorted and `width` per token. 2**31 bytes and more need 9 per byte.
    """
    from pydivsufsort import divsufsort

    order = divsufsort(_reversed_bytes(tokens))
    return pack_order(order, tokens, _sorted_bytes(tokens), width)


def sort_memory(n_tokens: int, token_width: int) -> int:
    """Upper bound, in bytes, of what `sort_suffixes` takes beyond the tokens."""
    n_bytes = n_tokens * token_width
    return n_bytes * (5 if n_bytes < 1 << 31 else 9) + 5 * n_tokens


def read_positions(suffixes: np.ndarray, start: int = 0, end: int | None = None) -> np.ndarray:
    """Positions [end - start] int64 of packed ones, u8 [n, width]."""
    return unpack(suffixes[start : len(suffixes) if end is None else end])


def pack_positions(positions: np.ndarray, width: int) -> np.ndarray:
    """int64 [n] -> u8 [n, width], little-endian."""
    return np.ascontiguousarray(np.ascontiguousarray(positions, "<i8").view(np.uint8).reshape(-1, 8)[:, :width])


def _sorted_bytes(tokens: np.ndarray) -> int:
    """Bytes of a token that take part in the sort: ids of more than 2 bytes mostly have 3."""
    if tokens.dtype.itemsize == 2:
        return 2
    return 3 if int(np.max(tokens, where=tokens != 0xFFFFFFFF, initial=0)) < 0xFFFFFF else 4


def _reversed_bytes(tokens: np.ndarray) -> np.ndarray:
    n_bytes = _sorted_bytes(tokens)
    backwards = tokens[::-1].astype(f">u{tokens.dtype.itemsize}")
    raw = backwards.view(np.uint8).reshape(-1, tokens.dtype.itemsize)
    return np.ascontiguousarray(raw[:, tokens.dtype.itemsize - n_bytes :]).reshape(-1)


def pack_order(order: np.ndarray, tokens: np.ndarray, n_bytes: int, width: int) -> np.ndarray:
    """Suffix array of the reversed bytes [n * n_bytes] -> positions u8 [m, width]: only those between two tokens of one document."""
    mark = int(np.iinfo(tokens.dtype).max)
    out = np.empty((_count_entries(tokens, mark), width), np.uint8)
    _pack_order(order, tokens, mark, n_bytes, out)
    return out


@njit(cache=True, nogil=True)
def _count_entries(tokens, mark):
    count = 0
    for p in range(1, len(tokens)):
        count += tokens[p] != mark and tokens[p - 1] != mark
    return count


@njit(cache=True, nogil=True)
def _pack_order(order, tokens, mark, n_bytes, out):
    n = len(tokens)
    k = 0
    for r in order:
        if r % n_bytes:
            continue
        p = n - r // n_bytes
        if p < n and p > 0 and tokens[p] != mark and tokens[p - 1] != mark:
            x = np.int64(p)
            for b in range(out.shape[1]):
                out[k, b] = x & 0xFF
                x >>= 8
            k += 1


@njit(cache=True, nogil=True)
def unpack(suffixes):
    """u8 [n, width] -> int64 [n]."""
    out = np.empty(len(suffixes), np.int64)
    for i in range(len(suffixes)):
        out[i] = _position(suffixes, i)
    return out


def first_disorder(tokens: np.ndarray, suffixes: np.ndarray) -> int:
    """Index of the first entry that is no position, is there twice or is out of order; n_suffixes where only some are missing; else -1.

    Two neighbours are in order if their last tokens are, or if these agree and the texts before them are, which their own ranks
    tell (Burkhardt & Kärkkäinen, Fast lightweight suffix array construction and checking, 2003, section 6). Texts that agree up to a
    separator may stand in any order. Takes 4 or 8 bytes a token.
    """
    rank = np.full(len(tokens), -1, np.int32 if len(tokens) <= 0x7FFFFFFF else np.int64)
    return int(_first_disorder(tokens, int(np.iinfo(tokens.dtype).max), suffixes, rank))


@njit(cache=True, nogil=True)
def _position(suffixes, i):
    x = np.int64(0)
    for b in range(suffixes.shape[1]):
        x |= np.int64(suffixes[i, b]) << (8 * b)
    return x


@njit(cache=True, nogil=True)
def _first_disorder(tokens, mark, suffixes, rank):
    n, m = len(tokens), len(suffixes)
    for i in range(m):
        p = _position(suffixes, i)
        if p < 1 or p >= n or tokens[p] == mark or tokens[p - 1] == mark or rank[p] >= 0:
            return i
        rank[p] = i
    if m != _count_entries(tokens, mark):
        return m
    for i in range(1, m):
        p, q = _position(suffixes, i - 1), _position(suffixes, i)
        if tokens[p - 1] > tokens[q - 1]:
            return i
        if tokens[p - 1] == tokens[q - 1]:
            # rank is -1 right after a separator, which is larger than every token
            before, after = rank[p - 1], rank[q - 1]
            if after >= 0 and (before < 0 or before > after):
                return i
    return -1

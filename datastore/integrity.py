"""Every byte of a segment and what its sections say of each other. For `verify="full"`; opening does none of this.

A mapped segment enters, nothing leaves but DatastoreCorruptError, which names the file, the section and the first thing that is wrong.
"""

from __future__ import annotations

import numpy as np

from .code_cache import njit
from .errors import DatastoreCorruptError
from .format import Segment, check_bodies, get_separator


def verify_segment(segment: Segment) -> None:
    """Raises DatastoreCorruptError. Reads the whole file, takes 4 bytes a token (8 from 2**31 tokens on)."""

    def check(holds: bool, section: str, what: str) -> None:
        if not holds:
            raise DatastoreCorruptError(f"{segment.path}: {section}: {what}")

    header, tokens, docs = segment.header, segment.tokens, segment.docs
    check_bodies(segment, header.sections)
    mark = get_separator(header.token_width)
    wrong = int(_first_wrong_token(tokens, mark, header.vocab_size))
    check(wrong < 0, "tokens", f"token {tokens[wrong]} at {wrong}, the vocabulary has {header.vocab_size}")
    check(int(tokens[0]) == mark and int(tokens[-1]) == mark, "tokens", "they must begin and end with a separator")
    wrong = int(_first_wrong_document(tokens, mark, docs["start"], docs["length"]))
    check(wrong < 0, "docs", f"document {wrong} is not what stands between two separators")
    check(int(docs["length"].sum(dtype=np.uint64)) + len(docs) + 1 == len(tokens), "docs", "they do not cover all tokens")
    offsets, sizes = docs["path_offset"], docs["path_bytes"]
    limit = np.uint64(header.path_bytes)
    inside = (offsets <= limit) & (sizes <= limit - np.minimum(offsets, limit))
    check(bool(inside.all()), "docs", "a path lies outside the section of paths")
    try:
        bytes(segment.paths).decode()
    except UnicodeDecodeError as error:
        raise DatastoreCorruptError(f"{segment.path}: paths: {error}") from error
    wrong = find_first_disorder(tokens, segment.suffixes)
    check(wrong < 0, "suffixes", f"entry {wrong} is out of order or no position")


@njit(cache=True, nogil=True)
def _first_wrong_token(tokens, mark, vocab_size):
    for i in range(len(tokens)):
        if tokens[i] >= vocab_size and tokens[i] != mark:
            return i
    return -1


@njit(cache=True, nogil=True)
def _first_wrong_document(tokens, mark, starts, lengths):
    """Document d begins one after the separator that ends d - 1, and has no separator inside."""
    at = np.uint64(1)
    for d in range(len(starts)):
        n = np.uint64(lengths[d])
        if starts[d] != at or n >= np.uint64(len(tokens)) - at:
            return d
        for i in range(at, at + n):
            if tokens[i] == mark:
                return d
        if tokens[at + n] != mark:
            return d
        at += n + np.uint64(1)
    return -1


def find_first_disorder(tokens: np.ndarray, suffixes: np.ndarray) -> int:
    """Index of the first entry that is no position, is there twice or is out of order; n_suffixes where only some are missing; else -1.

    Two neighbours are in order if their last tokens are, or if these agree and the texts before them are, which their own ranks
    tell (Burkhardt & Kärkkäinen, Fast lightweight suffix array construction and checking, 2003, section 6). Texts that agree up to a
    separator may stand in any order. Takes 4 or 8 bytes a token.
    """
    rank = np.full(len(tokens), -1, np.int32 if len(tokens) <= 0x7FFFFFFF else np.int64)
    return int(_first_disorder(tokens, int(np.iinfo(tokens.dtype).max), suffixes, rank))


@njit(cache=True, nogil=True)
def _read_position(suffixes, i):
    x = np.int64(0)
    for b in range(suffixes.shape[1]):
        x |= np.int64(suffixes[i, b]) << (8 * b)
    return x


@njit(cache=True, nogil=True)
def _first_disorder(tokens, mark, suffixes, rank):
    n, m = len(tokens), len(suffixes)
    for i in range(m):
        p = _read_position(suffixes, i)
        if p < 1 or p >= n or tokens[p] == mark or tokens[p - 1] == mark or rank[p] >= 0:
            return i
        rank[p] = i
    n_entries = 0
    for p in range(1, n):
        n_entries += tokens[p] != mark and tokens[p - 1] != mark
    if m != n_entries:
        return m
    for i in range(1, m):
        p, q = _read_position(suffixes, i - 1), _read_position(suffixes, i)
        if tokens[p - 1] > tokens[q - 1]:
            return i
        if tokens[p - 1] == tokens[q - 1]:
            # rank is -1 right after a separator, which is larger than every token
            before, after = rank[p - 1], rank[q - 1]
            if after >= 0 and (before < 0 or before > after):
                return i
    return -1

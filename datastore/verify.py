"""Every byte of a segment and what its sections say of each other. For `verify="full"`; opening does none of this.

A mapped segment enters, nothing leaves but DatastoreCorruptError, which names the file, the section and the first thing that is wrong.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from .errors import DatastoreCorruptError
from .format import ALIGNMENT, Segment, digest, separator
from .suffixes import first_disorder


def verify_segment(segment: Segment) -> None:
    """Raises DatastoreCorruptError. Reads the whole file, takes 4 bytes a token (8 from 2**31 tokens on)."""

    def check(holds: bool, section: str, what: str) -> None:
        if not holds:
            raise DatastoreCorruptError(f"{segment.path}: {section}: {what}")

    header, tokens, docs = segment.header, segment.tokens, segment.docs
    for name, section in header.sections.items():
        covered = segment.data[section.offset : section.offset + section.n_bytes + -section.n_bytes % ALIGNMENT]
        check(digest(covered) == section.checksum, name, "its checksum is wrong")
    mark = separator(header.token_width)
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
    wrong = first_disorder(tokens, segment.suffixes)
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

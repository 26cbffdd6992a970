"""The order of a segment's suffixes, made by pydivsufsort. Knows arrays, no files.

Tokens with separators enter, positions leave: every p whose token and whose predecessor are no separators, sorted by the text
before p read backwards (tokens[p-1], tokens[p-2], ... as unsigned numbers; the separator is the largest). So "what came after
this context" is one binary search over the reversed context. The order goes on past a separator, into the document before, where
two texts agree up to it; look-ups never compare that far.
"""

from __future__ import annotations

import numpy as np

_CHUNK = 1 << 18  # of what was sorted: stays in the cache while it is packed


def sort_suffixes(tokens: np.ndarray, width: int) -> np.ndarray:
    """Return positions in order, little-endian -> u8 [n_suffixes, width].

    tokens u16|u32 [n], the first one a separator. libdivsufsort sorts bytes, so that a token counts as 2, 3 or 4 of them, big-endian:
    peak memory beyond `tokens` is 5 bytes per byte sorted and `width` per token. 2**31 bytes and more need 9 per byte.
    """
    from pydivsufsort import divsufsort

    order = divsufsort(_reversed_bytes(tokens))
    return pack_order(order, tokens, _sorted_bytes(tokens), width)


def estimate_sort_memory(n_tokens: int, token_width: int) -> int:
    """Return upper bound, in bytes, of what `sort_suffixes` takes beyond the tokens."""
    n_bytes = n_tokens * token_width
    return n_bytes * (5 if n_bytes < 1 << 31 else 9) + 5 * n_tokens


def pack_positions(positions: np.ndarray, width: int) -> np.ndarray:
    """Return int64 [n] -> u8 [n, width], little-endian."""
    return np.ascontiguousarray(np.ascontiguousarray(positions, "<i8").view(np.uint8).reshape(-1, 8)[:, :width])


def _sorted_bytes(tokens: np.ndarray) -> int:
    """Return bytes of a token that take part in the sort: ids of more than 2 bytes mostly have 3."""
    if tokens.dtype.itemsize == 2:
        return 2
    return 3 if int(np.max(tokens, where=tokens != 0xFFFFFFFF, initial=0)) < 0xFFFFFF else 4


def _reversed_bytes(tokens: np.ndarray) -> np.ndarray:
    n_bytes = _sorted_bytes(tokens)
    backwards = tokens[::-1].astype(f">u{tokens.dtype.itemsize}")
    raw = backwards.view(np.uint8).reshape(-1, tokens.dtype.itemsize)
    return np.ascontiguousarray(raw[:, tokens.dtype.itemsize - n_bytes :]).reshape(-1)


def pack_order(order: np.ndarray, tokens: np.ndarray, n_bytes: int, width: int) -> np.ndarray:
    """Return suffix array of the reversed bytes [n * n_bytes] -> positions u8 [m, width]: only those between two tokens of one document."""
    real = tokens != np.iinfo(tokens.dtype).max
    wanted = np.zeros(len(tokens) + 1, bool)  # position n, after the last token, is one of the sorted, and none of these
    wanted[1:-1] = real[1:] & real[:-1]
    out = np.empty((np.count_nonzero(wanted), width), np.uint8)
    done = 0
    for at in range(0, len(order), _CHUNK):
        starts = order[at : at + _CHUNK]
        starts = starts[starts % n_bytes == 0]
        positions = len(tokens) - starts // n_bytes
        positions = positions[wanted[positions]]
        out[done : done + len(positions)] = pack_positions(positions, width)
        done += len(positions)
    return out


def unpack(suffixes: np.ndarray) -> np.ndarray:
    """Return u8 [n, width] -> int64 [n]."""
    wide = np.zeros((len(suffixes), 8), np.uint8)
    wide[:, : suffixes.shape[1]] = suffixes
    return wide.view("<i8").reshape(-1)

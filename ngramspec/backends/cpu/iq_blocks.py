"""Take apart the blocks of GGML's types IQ1, IQ2 and IQ3, whose weights are indices into tables: out come blocks of 4-bit codes.

A weight of these types is float16 · integer scale · value · power of two, with 6 or 16 values: `formats` has these and the power. Nothing
is rounded. A block that comes out has `BLOCK_BYTES` bytes: a float16, 16 integer scales of 16 weights each, and for every 32 weights 16
bytes whose low halves are the codes of the first 16. Knows bytes of blocks, no tensors. A type is a list of the places of its fields; what
reads them is compiled for all types once, by the first file that has one.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ngramspec.backends.cpu.codegen.intrinsics import load_word, store_word
from ngramspec.datastore.code_cache import njit
from ngramspec.models.tensor_source import KINDS

BLOCK_BYTES = 2 + 16 + 128
_EIGHT, _SEVEN, _ONE = 0, 256, 256 + 128  # where signs of eight bits, of seven or of one begin in `_list_signs`
_Places = tuple[np.ndarray, int]  # of n fields of a block: at which bits they begin, [n] int64, and how many bits each has


def _place(width: int, byte: int, bit: int, n: int, step: int, n_each: int = 1, step_within: int = 0) -> _Places:
    """Return the places of n fields that are `step` bits apart, or `n_each` of them, which are `step_within` apart."""
    i = np.arange(n)
    return 8 * byte + bit + step * (i // n_each) + step_within * (i % n_each), width


class _Layout(NamedTuple):
    """The places of the fields of a block of 256 weights."""

    scales: _Places  # of 16 weights each: an integer scale is twice the field plus one
    signs: _Places  # of 8 weights each
    first_sign: int
    low: _Places  # low bits of indices into the table, of 8 or 4 weights each
    high: _Places = (np.zeros(1, np.int64), 0)  # the bits above them; by default there are none
    half: _Places = _place(4, 0, 0, 4, 4)  # the four parts of the float16


_P = _place
_LAYOUTS = {
    "IQ1_S": _Layout(_P(3, 34, 12, 16, 16, 2), _P(1, 34, 15, 32, 16, 4), _ONE, _P(8, 2, 0, 32, 8), _P(3, 34, 0, 32, 16, 4, 3)),
    "IQ1_M": _Layout(
        _P(3, 48, 0, 16, 16, 4, 3), _P(1, 32, 3, 32, 4), _ONE, _P(8, 0, 0, 32, 8), _P(3, 32, 0, 32, 4), half=_P(4, 48, 12, 4, 16)
    ),
    "IQ2_XXS": _Layout(_P(4, 6, 28, 16, 64, 2), _P(7, 6, 0, 32, 64, 4, 7), _SEVEN, _P(8, 2, 0, 32, 64, 4, 8)),
    "IQ2_XS": _Layout(_P(4, 66, 0, 16, 4), _P(7, 2, 9, 32, 16), _SEVEN, _P(9, 2, 0, 32, 16)),
    "IQ2_S": _Layout(_P(4, 74, 0, 16, 4), _P(8, 34, 0, 32, 8), _EIGHT, _P(8, 2, 0, 32, 8), _P(2, 66, 0, 32, 2)),
    "IQ3_XXS": _Layout(_P(4, 66, 28, 16, 32, 2), _P(7, 66, 0, 32, 32, 4, 7), _SEVEN, _P(8, 2, 0, 64, 8)),
    "IQ3_S": _Layout(_P(4, 106, 0, 16, 4, 2), _P(8, 74, 0, 32, 8), _EIGHT, _P(8, 2, 0, 64, 8), _P(1, 66, 0, 64, 1)),
}
KINDS_OF_TABLES = tuple(_LAYOUTS)
_SCALES, _SIGNS, _INDICES = 4, 4 + 16, 4 + 16 + 32  # where they begin among the fields; the parts of the float16 are before them


def unpack_blocks(kind: str, rows: np.ndarray) -> np.ndarray:
    """Convert rows [n, bytes of a row] of blocks of a type to rows of the blocks above, uint8 both."""
    size = KINDS[kind][1]
    out = np.empty((rows.size // size, BLOCK_BYTES), np.uint8)
    padded = np.append(rows, np.zeros(3, np.uint8))  # 4 bytes are read where a field begins, even at the last one
    _unpack_blocks(padded, size, _list_fields(kind), _read_table(kind), _list_signs()[_LAYOUTS[kind].first_sign :], out)
    return out.reshape(len(rows), -1)


@functools.cache
def _list_fields(kind: str) -> np.ndarray:
    """Return each field's byte in a block, the bit there, a mask of its bits, and how far they are shifted afterwards, [n, 4] uint64."""
    layout, fields = _LAYOUTS[kind], []
    for (places, width), shift in ((layout.half, 0), (layout.scales, 0), (layout.signs, 0), (layout.low, 0), (layout.high, layout.low[1])):
        places = np.resize(places, len(layout.low[0])) if places is layout.high[0] else places
        fields.append(np.stack([places // 8, places % 8, np.full_like(places, 2**width - 1), np.full_like(places, shift)], axis=1))
    return np.concatenate(fields).astype(np.uint64)


@functools.cache
def _list_signs() -> np.ndarray:
    """Return what a field of signs adds to the codes of eight weights, a byte each, [256 + 128 + 2] uint64.

    A bit negates a value of IQ2 and IQ3, the eighth of seven bits being what makes their number even. IQ1 has one bit for all, which takes
    an eighth off the values instead of adding it.
    """
    eight = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    seven = np.concatenate([eight[:128, :7], eight[:128].sum(axis=1, dtype=np.uint8, keepdims=True) % 2], axis=1)
    one = np.array([[0] * 8, [1] * 8], np.uint8)
    return np.concatenate([8 * eight, 8 * seven, 4 * one]).view("<i8")[:, 0].astype(np.uint64)


@functools.cache
def _read_table(kind: str) -> np.ndarray:
    """Return the codes of the eight or four magnitudes of every index, from the lowest value on, a byte each, [indices] uint64."""
    from gguf import quants  # not needed to start

    of_kind = getattr(quants, "IQ1_S" if kind == "IQ1_M" else kind)
    of_kind.init_grid()
    codes = np.searchsorted(np.array(of_kind.grid_map), of_kind.grid.reshape(of_kind.grid_shape)).astype(np.uint8)
    return codes.view(f"<u{codes.shape[1]}")[:, 0].astype(np.uint64)


@njit(cache=True, nogil=True)
def _read_field(address, fields, i):
    """Return field i of the block at an address."""
    return (load_word(address + np.int64(fields[i, 0])) >> fields[i, 1] & fields[i, 2]) << fields[i, 3]


@njit(cache=True, nogil=True)
def _unpack_blocks(blocks, size, fields, table, signs, out):
    n = (fields.shape[0] - _INDICES) // 2
    each = n // 32
    for b in range(out.shape[0]):
        at, to = blocks.ctypes.data + b * size, out[b].ctypes.data
        for i in range(2):
            out[b, i] = _read_field(at, fields, 2 * i) | _read_field(at, fields, 2 * i + 1) << np.uint64(4)
        for i in range(16):
            out[b, 2 + i] = np.uint64(1) + np.uint64(2) * _read_field(at, fields, _SCALES + i)
        for i in range(16):
            j = i // 2 * 4 + i % 2
            both = np.uint64(0)
            for half in range(2):
                f = _INDICES + (j + 2 * half) * each
                word = table[_read_field(at, fields, f) | _read_field(at, fields, f + n)]
                if each == 2:
                    word |= table[_read_field(at, fields, f + 1) | _read_field(at, fields, f + 1 + n)] << np.uint64(32)
                word |= signs[_read_field(at, fields, _SIGNS + j + 2 * half)]
                both |= word << np.uint64(4 * half)
            store_word(to + 18 + 8 * i, both)
            store_word(to + 22 + 8 * i, both >> np.uint64(32))

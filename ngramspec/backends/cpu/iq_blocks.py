"""Take apart the blocks of GGML's types IQ1, IQ2 and IQ3, whose weights are indices into tables: out come blocks of 4-bit codes.

A weight of these types is float16 · integer scale · value · power of two, with 6 or 16 values: `formats` has these and the power. Nothing
is rounded. A block that comes out has `BLOCK_BYTES` bytes: a float16, 16 integer scales of 16 weights each, and for every 32 weights 16
bytes whose low halves are the codes of the first 16. Knows bytes of blocks, no tensors.
"""

from __future__ import annotations

import functools

import numpy as np

from ngramspec.models.tensor_source import KINDS

BLOCK_BYTES = 2 + 16 + 128
_FLIPPED = 8  # what the code of a negated value of IQ2 and IQ3 has besides
_SHIFTED = 4  # what the code of IQ1 has besides where an eighth is taken off its value, instead of added


def unpack_blocks(kind: str, rows: np.ndarray) -> np.ndarray:
    """Convert rows [n, bytes of a row] of blocks of a type to rows of the blocks above, uint8 both."""
    blocks = rows.reshape(-1, KINDS[kind][1])
    half, scales, codes = _UNPACK[kind](blocks)
    by_16 = scales.repeat(16 // scales.shape[1], axis=1)
    pairs = codes.reshape(-1, 8, 2, 16)
    out = np.concatenate([half, by_16.astype(np.uint8), (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], axis=1)
    return out.reshape(len(rows), -1)


_Parts = tuple[np.ndarray, np.ndarray, np.ndarray]  # of n blocks: float16 [n, 2] uint8, integer scales [n, 8 or 16], codes [n, 256] uint8


def _unpack_iq3_s(blocks: np.ndarray) -> _Parts:
    half, low, high, signs, scales = _split(blocks, 64, 8, 32, 4)
    indices = low | np.uint16(256) * _list_bits(high)
    return half, 1 + 2 * _list_nibbles(scales), _look_up("IQ3_S", indices) | _FLIPPED * _list_bits(signs)


def _unpack_iq3_xxs(blocks: np.ndarray) -> _Parts:
    half, indices, rest = _split(blocks, 64, 32)
    scales, signs = _split_signs(np.ascontiguousarray(rest).view(np.uint32))
    return half, scales, _look_up("IQ3_XXS", indices) | _FLIPPED * signs


def _unpack_iq2_xxs(blocks: np.ndarray) -> _Parts:
    half, rest = _split(blocks, 64)
    words = np.ascontiguousarray(rest).view(np.uint32).reshape(-1, 8, 2)
    scales, signs = _split_signs(words[..., 1])
    indices = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    return half, scales, _look_up("IQ2_XXS", indices) | _FLIPPED * signs


def _unpack_iq2_xs(blocks: np.ndarray) -> _Parts:
    half, rest, scales = _split(blocks, 64, 8)
    words = np.ascontiguousarray(rest).view(np.uint16)
    return half, 1 + 2 * _list_nibbles(scales), _look_up("IQ2_XS", words & 511) | _FLIPPED * _list_bits(_read_signs()[words >> 9])


def _unpack_iq2_s(blocks: np.ndarray) -> _Parts:
    half, low, signs, high, scales = _split(blocks, 32, 32, 8, 8)
    two = (high[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(blocks), -1)
    return half, 1 + 2 * _list_nibbles(scales), _look_up("IQ2_S", low | np.uint16(256) * two) | _FLIPPED * _list_bits(signs)


def _unpack_iq1_s(blocks: np.ndarray) -> _Parts:
    half, low, rest = _split(blocks, 32, 16)
    words = np.ascontiguousarray(rest).view(np.uint16)
    three = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    below = (words >> 15).astype(np.uint8).repeat(32, axis=1)
    return half, 1 + 2 * (words >> 12 & 7), _look_up("IQ1_S", low | three << 8) | _SHIFTED * below


def _unpack_iq1_m(blocks: np.ndarray) -> _Parts:
    low, high, rest = blocks[:, :32], blocks[:, 32:48], np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
    half = np.bitwise_or.reduce((rest & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), axis=1).astype(np.uint16)
    scales = (rest[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    four = (high[:, :, None] >> np.array([0, 4], np.uint8) & 15).reshape(len(blocks), -1)
    codes = _look_up("IQ1_S", low | np.uint16(256) * (four & 7)) | _SHIFTED * (four >> 3).repeat(8, axis=1)
    return half[:, None].view(np.uint8), 1 + 2 * scales, codes


_UNPACK = {
    "IQ1_S": _unpack_iq1_s, "IQ1_M": _unpack_iq1_m, "IQ2_XXS": _unpack_iq2_xxs, "IQ2_XS": _unpack_iq2_xs, "IQ2_S": _unpack_iq2_s,
    "IQ3_XXS": _unpack_iq3_xxs, "IQ3_S": _unpack_iq3_s,
}  # fmt: skip
KINDS_OF_TABLES = tuple(_UNPACK)


def _split(blocks: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """Split blocks into a float16 and parts of these numbers of bytes."""
    return np.split(blocks, np.cumsum([2, *sizes[:-1]]).tolist(), axis=1)


def _list_bits(some: np.ndarray) -> np.ndarray:
    """Return the bits of bytes [n, m], lowest first, [n, 8 m] uint8."""
    return np.unpackbits(some, axis=1, bitorder="little")


def _list_nibbles(some: np.ndarray) -> np.ndarray:
    return np.stack([some & 15, some >> 4], axis=-1).reshape(len(some), -1)


def _split_signs(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales [n, 8] of words [n, 8] and the signs [n, 256] of the four times eight weights of each."""
    sevens = (words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32) & 127).reshape(len(words), -1)
    return 1 + 2 * (words >> 28), _list_bits(_read_signs()[sevens])


def _look_up(kind: str, indices: np.ndarray) -> np.ndarray:
    """Return the codes of magnitudes that lie at indices [n, m] of a table, [n, 256] uint8."""
    return _read_table(kind)[indices].reshape(len(indices), 256)


@functools.cache
def _read_signs() -> np.ndarray:
    """Return the eight signs, one a bit, that seven bits stand for: the eighth makes their number even; [128] uint8."""
    sevens = np.arange(128, dtype=np.uint8)
    return sevens | np.unpackbits(sevens[:, None], axis=1).sum(axis=1, dtype=np.uint8) % 2 << 7


@functools.cache
def _read_table(kind: str) -> np.ndarray:
    """Return the codes of the four or eight magnitudes of every index, from the lowest value on, [indices, 4 or 8] uint8."""
    from gguf import quants  # not needed to start

    of_kind = getattr(quants, kind)
    of_kind.init_grid()
    return np.searchsorted(np.array(of_kind.grid_map), of_kind.grid.reshape(of_kind.grid_shape)).astype(np.uint8)

"""Read IQ3_S blocks of a file as Q6_K blocks, which hold exactly the same values: in both a weight is scale · integer · float16.

The integers of IQ3_S are odd and up to 15, its scales odd and up to 31; those of Q6_K are from -32 to 31 and from -128 to 127. Knows
bytes of blocks, no tensors.
"""

from __future__ import annotations

import functools

import numpy as np

from ngramspec.models.tensor_source import KINDS, WeightFile

BLOCK_BYTES = 110
# Where the parts of a block begin after its float16: low bytes of indices, their high bits, signs, scales.
_LOW, _HIGH, _SIGNS, _SCALES = 2, 66, 74, 106


def convert_blocks(blocks: np.ndarray) -> np.ndarray:
    """Convert IQ3_S blocks [n, 110] to Q6_K blocks [n, 210], uint8 both."""
    n, high_bits = len(blocks), np.unpackbits(blocks[:, _HIGH:_SIGNS], axis=1, bitorder="little")
    fours = _read_grid()[blocks[:, _LOW:_HIGH] + np.uint16(256) * high_bits].reshape(n, 256)
    codes = np.where(np.unpackbits(blocks[:, _SIGNS:_SCALES], axis=1, bitorder="little"), 32 - fours, 32 + fours)
    a, b, c, d = np.moveaxis(codes.reshape(n, 2, 4, 32), 2, 0)
    low = np.concatenate([a & 15 | c << 4, b & 15 | d << 4], axis=-1)
    high = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | d >> 4 << 6
    scales = 1 + 2 * np.stack([blocks[:, _SCALES:] & 15, blocks[:, _SCALES:] >> 4], axis=-1).reshape(n, 8)
    return np.concatenate([low.reshape(n, 128), high.reshape(n, 64), scales.repeat(2, axis=1), blocks[:, :_LOW]], axis=1)


@functools.cache
def _read_grid() -> np.ndarray:
    """Return the four integers without signs of every index, [512, 4] uint8."""
    from gguf.quants import IQ3_S  # not needed to start

    IQ3_S.init_grid()
    return np.asarray(IQ3_S.grid).reshape(512, 4).astype(np.uint8)


class Iq3File:
    """The tensor of IQ3_S blocks at a place of a file, as if its blocks there were of Q6_K."""

    def __init__(self, file: WeightFile, offset: int) -> None:
        self.path, self._file, self._offset = file.path, file, offset

    def read_into(self, rows: np.ndarray, offset: int) -> None:
        """Fill an array with whole Q6_K blocks. Raises as `WeightFile.read_into` does."""
        n_bytes = KINDS["Q6_K"][1]
        blocks = np.empty((rows.size // n_bytes, BLOCK_BYTES), np.uint8)
        self._file.read_into(blocks, self._offset + (offset - self._offset) // n_bytes * BLOCK_BYTES)
        rows.reshape(-1)[:] = convert_blocks(blocks).reshape(-1)

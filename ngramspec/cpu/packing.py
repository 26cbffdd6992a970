"""Weights as the matrix product reads them: in panels of 16 outputs, in the smallest format that gives back every weight bit for bit.

`pack` turns a matrix [N, K] float32 into an array [panels, blocks, L] and its `WeightFormat`, which it finds from the weights themselves,
wherever they come from. A block is 16 outputs by 32 inputs, the 16 weights of an input side by side, zeros where the matrix ends. It does
not know who multiplies with them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit, prange

from ngramspec.batch.numeric import bits_of_float, float_of_bits, fma
from ngramspec.cpu.simd import HALVES, WIDTH

DEPTH = 32
"""Inputs of a block."""
SCALES = 2 * 4 * WIDTH
"""Bytes in front of a block's codes."""


class WeightFormat(Enum):
    """How the weights of a matrix are kept, by the name that users read."""

    CODES = "8-bit codes"
    """Weights that were quantised in blocks of 32 (GGUF's Q4_0 to Q5_1, Q8_0, Q4_K, Q5_K): a block is float32 scale [16], float32 offset
    [16], int8 code [32, 16]; a weight is fma(scale, code, offset). 1.25 bytes a weight."""
    CODES_BY_16 = "8-bit codes by 16"
    """The same of weights that were quantised in blocks of 16 (GGUF's Q6_K, Q3_K): float32 scale [2, 16] of the first and the last 16
    inputs, int8 code [32, 16]; a weight is scale · code."""
    BFLOAT16 = "bfloat16"
    """The upper halves of weights that were bfloat16."""
    FLOAT16 = "float16"
    """The bits of weights that were float16, where the processor converts such."""
    FLOAT32 = "float32"
    """Any others."""


STORAGE: dict[WeightFormat, np.dtype[Any]] = {
    WeightFormat.CODES: np.dtype(np.int8),
    WeightFormat.CODES_BY_16: np.dtype(np.uint8),
    WeightFormat.BFLOAT16: np.dtype(np.uint16),
    WeightFormat.FLOAT16: np.dtype(np.int16),
    WeightFormat.FLOAT32: np.dtype(np.float32),
}
"""The element type of each format's array: another for each, so that numba compiles a kernel for each. It says no more than that."""


class PackedWeight(NamedTuple):
    format: WeightFormat
    data: np.ndarray
    """[panels, blocks, L] of the format's storage, at an address that is a multiple of 64."""


_F = np.float32
_SHORT_SUM, _SHORT_PRODUCT = np.int32(7), np.int32(5)
_NEAR, _MOST = _F(0.02), _F(127)
_FROM_ZERO = (_F(127), _F(-8), _F(-16))
_STEPS = (15, 31, *range(1, 15), *range(16, 31), *range(32, 64))


def pack(weight: torch.Tensor) -> PackedWeight:
    """A weight [N, K] float32 in the smallest format that keeps every bit of it."""
    rows = _rows(weight)
    n, k = rows.shape
    if rows.size and not (rows.view(np.uint32) & 0xFFFF).any():
        return _packed(WeightFormat.BFLOAT16, (rows.view(np.uint32) >> 16).astype(np.uint16))
    if k % DEPTH == 0 and rows.size:
        codes = _aligned(n, k, SCALES + DEPTH * WIDTH, np.int8)
        for kind in (WeightFormat.CODES, WeightFormat.CODES_BY_16):
            if _pack_codes(rows, codes, codes.view(np.float32), kind is WeightFormat.CODES_BY_16):
                return PackedWeight(kind, codes.view(STORAGE[kind]))
    if HALVES and rows.size and (halves := _as_halves(rows)) is not None:
        return _packed(WeightFormat.FLOAT16, halves)
    return _packed(WeightFormat.FLOAT32, rows)


def pack_float32(weight: torch.Tensor) -> PackedWeight:
    """A weight [N, K] float32 as it is."""
    return _packed(WeightFormat.FLOAT32, _rows(weight))


def _rows(weight: torch.Tensor) -> np.ndarray:
    assert weight.ndim == 2, weight.shape
    assert weight.dtype == torch.float32, weight.dtype
    return weight.detach().contiguous().numpy()


def _as_halves(rows: np.ndarray) -> np.ndarray | None:
    """The bits of rows as float16, where that loses nothing; else None."""
    with np.errstate(over="ignore"):
        for some in (rows[:1], rows):  # most others are found out by their first row
            halves = some.astype(np.float16)
            if not np.array_equal(halves, some):
                return None
    return halves.view(np.int16)


def _packed(kind: WeightFormat, rows: np.ndarray) -> PackedWeight:
    """Rows [N, K] of weights that are in the format already."""
    assert rows.dtype == STORAGE[kind], (kind, rows.dtype)
    n, k = rows.shape
    data = _aligned(n, k, DEPTH * WIDTH, rows.dtype)
    _pack_rows(rows, data)
    return PackedWeight(kind, data)


def _aligned(n: int, k: int, length: int, dtype: Any) -> np.ndarray:
    """Zeros for a weight [N, K], `length` numbers a block."""
    shape = (-(-n // WIDTH), -(-k // DEPTH), length)
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(n_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


@njit(cache=True, nogil=True, parallel=True)
def _pack_rows(rows, data):
    n, k = rows.shape
    for p in prange(data.shape[0]):
        for i in range(p * WIDTH, min(n, (p + 1) * WIDTH)):
            for j in range(k):
                data[p, j // DEPTH, j % DEPTH * WIDTH + i % WIDTH] = rows[i, j]


@njit(cache=True, nogil=True, parallel=True)
def _pack_codes(rows, data, scales, by_16):
    """Whether every block has codes. `scales`: data seen as float32."""
    n = rows.shape[0]
    failed = np.zeros(data.shape[0], np.bool_)
    for p in prange(data.shape[0]):
        codes = np.empty(DEPTH, np.int8)
        for b in range(data.shape[1]):
            if failed[p]:
                break
            for i in range(p * WIDTH, min(n, (p + 1) * WIDTH)):
                w = rows[i, b * DEPTH : (b + 1) * DEPTH]
                if by_16:
                    first, second = _codes_from_zero(w[:16], codes[:16]), _codes_from_zero(w[16:], codes[16:])
                else:
                    first, second = _codes_of(w, codes)
                if np.isnan(first) or np.isnan(second):
                    failed[p] = True
                    break
                lane = i % WIDTH
                scales[p, b, lane], scales[p, b, WIDTH + lane] = first, second
                for j in range(DEPTH):
                    data[p, b, SCALES + j * WIDTH + lane] = codes[j]
    return not failed.any()


@njit(cache=True, nogil=True, error_model="numpy")
def _codes_from_zero(w, codes):
    """The scale with which scale * codes[j] is w[j] for every j, or NaN."""
    least = _F(0)
    for x in w:
        if x != 0 and (least == 0 or abs(x) < least):
            least = abs(x)
    if least == 0:
        codes[:] = 0
        return least
    for code in range(1, 33):  # of the smallest weight
        scale = _short(least / _F(code), _SHORT_PRODUCT)
        if _agree(w, scale, _F(0), codes):
            return scale
    return _F(np.nan)


@njit(cache=True, nogil=True, error_model="numpy")
def _codes_of(w, codes):
    """(scale, offset) with which fma(scale, codes[j], offset) is w[j] for every j, or NaN."""
    low, high = w.min(), w.max()
    if low == high:
        codes[:] = 0
        return _F(0), low
    largest = low if -low > high else high
    for steps in _FROM_ZERO:  # as many steps of the scale make the largest weight
        scale = largest / steps
        if _agree(w, scale, _F(0), codes):
            return scale, _F(0)
    for steps in _STEPS:  # or lie between the lowest and the highest
        scale = _short((high - low) / _F(steps), _SHORT_SUM)
        if _even(w, scale, low):
            for first in range(_STEPS[-1]):  # the lowest weight's own code
                offset = _short(fma(-scale, _F(first), low), _SHORT_SUM)
                if _agree(w, scale, offset, codes):
                    return scale, offset
    return _F(np.nan), _F(np.nan)


@njit(cache=True, nogil=True)
def _short(x, bits):
    """x without its last bits: scales and offsets were made of a half-precision number (11 bits) and 6 more, or 8."""
    return float_of_bits((bits_of_float(x) + (np.int32(1) << (bits - np.int32(1)))) & (np.int32(-1) << bits))


@njit(cache=True, nogil=True, error_model="numpy")
def _even(w, scale, low):
    """Whether all are whole steps from the lowest, but for rounding."""
    for x in w:
        steps = (x - low) / scale
        if not abs(steps - np.rint(steps)) < _NEAR:
            return False
    return True


@njit(cache=True, nogil=True, error_model="numpy")
def _agree(w, scale, offset, codes):
    for j in range(w.shape[0]):
        code = np.rint((w[j] - offset) / scale)
        if not abs(code) <= _MOST or fma(scale, code, offset) != w[j]:
            return False
        codes[j] = np.int8(code)
    return True

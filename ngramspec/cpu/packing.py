"""Weights as a product reads them: in panels of 16 outputs, in the smallest form that gives back every weight bit for bit.

A matrix [N, K] float32 enters, an array [panels, blocks, L] leaves, whose dtype tells its form. A block is 16 outputs by 32 inputs, the
16 weights of an input side by side, zeros where the matrix ends:

- int8: codes of weights that were quantised in blocks of 32 (GGUF's Q4_0 to Q5_1, Q8_0, Q4_K, Q5_K): float32 scale [16], float32 offset
  [16], int8 code [32, 16]; a weight is fma(scale, code, offset). 1.25 bytes a weight;
- uint8: the same of weights that were quantised in blocks of 16 (GGUF's Q6_K, Q3_K): float32 scale [2, 16] of the first and the last 16
  inputs, int8 code [32, 16]; a weight is scale · code;
- uint16: the upper halves of weights that were bfloat16;
- int16: the bits of weights that were float16, where the processor reads such;
- float32: any others.

Which one it is shows in the weights themselves, wherever they come from. Knows nothing of products.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit, prange

from ngramspec.batch.numeric import bits_of_float, float_of_bits, fma
from ngramspec.cpu.simd import HALVES, WIDTH

DEPTH = 32
"""Inputs of a block."""
SCALES = 2 * 4 * WIDTH
"""Bytes in front of a block's codes."""
FORMS = {
    np.dtype(d): name
    for d, name in (
        (np.int8, "8-bit codes"),
        (np.uint8, "8-bit codes by 16"),
        (np.uint16, "bfloat16"),
        (np.int16, "float16"),
        (np.float32, "float32"),
    )
}

_F = np.float32
_SHORT_SUM, _SHORT_PRODUCT = np.int32(7), np.int32(5)
_NEAR, _MOST = _F(0.02), _F(127)
_FROM_ZERO = (_F(127), _F(-8), _F(-16))
_STEPS = (15, 31, *range(1, 15), *range(16, 31), *range(32, 64))


def pack(weight: torch.Tensor) -> np.ndarray:
    """The panels of a weight [N, K] float32, at an address that is a multiple of 64."""
    rows = _rows(weight)
    n, k = rows.shape
    if rows.size and not (rows.view(np.uint32) & 0xFFFF).any():
        return _placed((rows.view(np.uint32) >> 16).astype(np.uint16))
    if k % DEPTH == 0 and rows.size:
        codes = _aligned(n, k, SCALES + DEPTH * WIDTH, np.int8)
        for by_16 in (False, True):
            if _place_codes(rows, codes, codes.view(np.float32), by_16):
                return codes.view(np.uint8) if by_16 else codes
    if HALVES and rows.size and (halves := _as_halves(rows)) is not None:
        return _placed(halves)
    return _placed(rows)


def whole(weight: torch.Tensor) -> np.ndarray:
    """The panels of a weight [N, K] float32 as they are."""
    return _placed(_rows(weight))


def _rows(weight: torch.Tensor) -> np.ndarray:
    assert weight.ndim == 2, weight.shape
    assert weight.dtype == torch.float32, weight.dtype
    return weight.detach().contiguous().numpy()


def _as_halves(rows: np.ndarray) -> np.ndarray | None:
    """The bits of rows as float16, where that is all there is to them."""
    with np.errstate(over="ignore"):
        for some in (rows[:1], rows):  # most others are found out by their first row
            halves = some.astype(np.float16)
            if not np.array_equal(halves, some):
                return None
    return halves.view(np.int16)


def _placed(rows: np.ndarray) -> np.ndarray:
    n, k = rows.shape
    data = _aligned(n, k, DEPTH * WIDTH, rows.dtype)
    _place(rows, data)
    return data


def _aligned(n: int, k: int, length: int, dtype: Any) -> np.ndarray:
    """Zeros for a weight [N, K], `length` numbers a block."""
    shape = (-(-n // WIDTH), -(-k // DEPTH), length)
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(n_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n_bytes].view(dtype).reshape(shape)


@njit(cache=True, nogil=True, parallel=True)
def _place(rows, data):
    n, k = rows.shape
    for p in prange(data.shape[0]):
        for i in range(p * WIDTH, min(n, (p + 1) * WIDTH)):
            for j in range(k):
                data[p, j // DEPTH, j % DEPTH * WIDTH + i % WIDTH] = rows[i, j]


@njit(cache=True, nogil=True, parallel=True)
def _place_codes(rows, data, scales, by_16):
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

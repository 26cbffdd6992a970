"""Quantise rows to GGML's Q8_0, bit for bit as ggml-quants.c and `gguf.quants` do, in one pass over them."""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit

BLOCK, BLOCK_BYTES = 32, 34  # weights of a block, and bytes: a scale in float16, then the codes
_NO_SIGN = np.uint32(0x7FFFFFFF)
_HALF_BITS = np.uint32(16)  # by which bfloat16 is shorter than float32


def quantise_rows(kind: str, rows: np.ndarray) -> np.ndarray:
    """Quantise rows of kind "F32" or "BF16", [n, row_bytes] uint8 as they lie in a file, to [n, K / 32 · 34] uint8."""
    bits = rows.view(np.uint16 if kind == "BF16" else np.uint32)
    n, n_blocks = len(bits), bits.shape[1] // BLOCK
    blocks, scales = np.empty((n * n_blocks, BLOCK_BYTES), np.uint8), np.empty((n * n_blocks, 1), np.float32)
    _quantise(bits.reshape(-1, BLOCK), _HALF_BITS if kind == "BF16" else np.uint32(0), blocks, scales[:, 0])
    with np.errstate(over="ignore"):
        blocks[:, :2] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(n, n_blocks * BLOCK_BYTES)


@njit(cache=True, nogil=True)
def _quantise(bits: np.ndarray, shift: np.uint32, blocks: np.ndarray, scales: np.ndarray) -> None:
    """Write the codes of blocks [n, 32], the upper bits of float32 numbers, and their scales [n]. Halves are rounded away from zero."""
    words, most = np.empty(BLOCK, np.uint32), np.empty(1, np.uint32)
    values, largest = words.view(np.float32), most.view(np.float32)
    one, two = np.float32(1), np.float32(2)
    for i in range(len(scales)):
        high = np.uint32(0)
        for j in range(BLOCK):
            words[j] = np.uint32(np.uint32(bits[i, j]) << shift)
            high = max(high, np.uint32(words[j] & _NO_SIGN))  # numbers without their sign are in the order of their bits
        most[0] = high
        scale = largest[0] / np.float32(127)
        scales[i], factor = scale, one / scale if scale != 0 else np.float32(0)
        for j in range(BLOCK):
            value = values[j] * factor
            size = abs(value)
            whole = np.floor(size)
            whole += np.floor(two * (size - whole))
            blocks[i, 2 + j] = np.uint8(np.int8(whole if value >= 0 else -whole))

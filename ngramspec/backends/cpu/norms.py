"""Compute RMS norms of rows and of heads, in compiled code. Every row is computed alone and in a fixed order."""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit

_F = np.float32


@njit(cache=True, nogil=True, error_model="numpy")
def compute_norm_scale(x, eps):
    """Return 1 / sqrt(mean(x²) + eps); the sum has 16 lanes."""
    n = x.shape[0]
    lanes = np.zeros(16, np.float32)
    whole = n & ~15
    for j in range(0, whole, 16):
        for i in range(16):
            lanes[i] += x[j + i] * x[j + i]
    total = _F(0)
    for i in range(16):
        total += lanes[i]
    for j in range(whole, n):
        total += x[j] * x[j]
    return _F(1) / np.sqrt(total / _F(n) + eps)


@njit(cache=True, nogil=True)
def norm_row(x, weight, eps, out):
    """Compute out = x / sqrt(mean(x²) + eps) · weight."""
    scale = compute_norm_scale(x, eps)
    for j in range(x.shape[0]):
        out[j] = weight[j] * (x[j] * scale)


@njit(cache=True, nogil=True)
def norm_heads(x, weight, eps):
    """Norm heads x [n · D] in place, each by weight [D], or all together by the first n · D of a longer weight."""
    n = min(x.shape[0], weight.shape[0])
    for at in range(0, x.shape[0], n):
        head = x[at : at + n]
        norm_row(head, weight[:n], eps, head)

"""Compute norms and activations of some rows in one compiled call, for modules (`fused_ops`).

Knows arrays alone, so that it can be compiled by a process that has not loaded torch. Every row is computed alone, in a fixed order.
"""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.norms import norm_row
from ngramspec.datastore.code_cache import njit
from ngramspec.sampling.numeric import compute_gelu, exp

_ONE = np.float32(1.0)


@njit(cache=True, nogil=True)
def norm_rows(x, weight, eps, out):
    for r in range(x.shape[0]):
        norm_row(x[r], weight, eps, out[r])


# error_model="numpy": with Python's rules of division, each divisor is tested for zero and the loop is not vectorised.
@njit(cache=True, nogil=True, error_model="numpy")
def _activate_row(x, at, with_gelu, out):
    n = out.shape[0]
    gate, up = x[:n], x[at : at + n]
    if with_gelu:
        for j in range(n):
            out[j] = compute_gelu(gate[j]) * up[j]
    else:
        for j in range(n):
            out[j] = gate[j] / (_ONE + exp(-gate[j])) * up[j]


@njit(cache=True, nogil=True)
def activate_rows(x, at, with_gelu, out):
    for r in range(x.shape[0]):
        _activate_row(x[r], at, with_gelu, out[r])


@njit(cache=True, nogil=True)
def apply_gelu(x, out):
    for j in range(x.shape[0]):
        out[j] = compute_gelu(x[j])

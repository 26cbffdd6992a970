"""Provide scalar building blocks of the numba kernels, with their rounding stated.

`fma` rounds once wherever it stands and `exp` is a fixed polynomial: vectorised or not, inlined or not, the bits are the same, which
neither an optimiser that may contract nor a vendor's libm guarantees.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numba.extending import intrinsic

from ngramspec.datastore.code_cache import njit

_F = np.float32
LOG2E, LN2_HI, LN2_LO = _F(1.4426950408889634), _F(0.693359375), _F(-2.12194440e-4)
_HALF, _ONE, _TWO = _F(0.5), _F(1.0), _F(2.0)
# Minimax polynomial of exp on [-ln2/2, ln2/2], as in Cephes' expf: relative error below 2 ulp.
C2, C3, C4, C5, C6, C7 = (
    _F(5.0000001201e-1),
    _F(1.6666665459e-1),
    _F(4.1665795894e-2),
    _F(8.3334519073e-3),
    _F(1.3981999507e-3),
    _F(1.9875691500e-4),
)
# Factors of x and x³ in the argument of `compute_gelu`'s sigmoid.
GELU_SLOPE, GELU_CUBE = _F(2 * math.sqrt(2 / math.pi)), _F(2 * math.sqrt(2 / math.pi) * 0.044715)
# The range that `exp` clamps its argument to.
LOW, HIGH = _F(-87.0), _F(88.0)


@intrinsic
def fma(typing_context, a, b, c):
    """Return a * b + c, rounded once."""
    return a(a, b, c), lambda context, builder, signature, args: builder.fma(*args)


@intrinsic
def float_of_bits(typing_context, bits):
    """Return the float32 with these bits, an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), codegen


@intrinsic
def bits_of_float(typing_context, x):
    """Return the bits of a float32 as an int32."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), codegen


@njit(cache=True, nogil=True)
def exp(x):
    """Return e to the x, float32; x is clamped to [-87, 88], so that the result is normal and finite."""
    x = min(max(x, LOW), HIGH)
    n = np.floor(fma(x, LOG2E, _HALF))
    r = fma(-n, LN2_LO, fma(-n, LN2_HI, x))
    y = fma(C7, r, C6)
    y = fma(y, r, C5)
    y = fma(y, r, C4)
    y = fma(y, r, C3)
    y = fma(y, r, C2)
    y = fma(y, r * r, r + _ONE)
    return y * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(cache=True, nogil=True, error_model="numpy")
def soft_cap(x, cap):
    """Return cap · tanh(x / cap), float32, within 1e-7 · cap; what is not a number stays so."""
    capped = cap * (_ONE - _TWO / (exp(_TWO * (x / cap)) + _ONE))
    return capped if x == x else x


@njit(cache=True, nogil=True, error_model="numpy")
def compute_sigmoid(x):
    """Return 1 / (1 + e to the -x), float32."""
    return _ONE / (_ONE + exp(-x))


@njit(cache=True, nogil=True, error_model="numpy")
def compute_gelu(x):
    """Return GELU by its approximation with tanh, float32: x · sigmoid(2 · √(2/π) · (x + 0.044715 · x³))."""
    return x / (_ONE + exp(-(x * fma(GELU_CUBE, x * x, GELU_SLOPE))))


@njit(cache=True, nogil=True, error_model="numpy")
def compute_silu(x):
    """Return x · sigmoid(x), float32."""
    return x / (_ONE + exp(-x))


@njit(cache=True, nogil=True, error_model="numpy")
def _compute_log1p(t):
    """Return log(1 + t), float32, for t from 0 to 1, by the series of 2 · atanh(t / (2 + t))."""
    s = t / (_TWO + t)
    z = s * s
    y = _F(1 / 17)
    for denominator in (15, 13, 11, 9, 7, 5, 3):
        y = fma(y, z, _ONE / _F(denominator))
    return _TWO * fma(s * z, y, s)


@njit(cache=True, nogil=True, error_model="numpy")
def compute_softplus(x):
    """Return log(1 + e to the x), float32."""
    return max(x, _F(0)) + _compute_log1p(exp(-abs(x)))

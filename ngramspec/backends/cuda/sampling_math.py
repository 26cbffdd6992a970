"""Compute on a CUDA device the order of logits, their integer weights and the random numbers, with the bits of the CPU.

The module knows numbers alone. The bits are those of `ngramspec.sampling.sampler`: float32 enters only element by element, through
operations that IEEE 754 defines (subtraction, division, product, fma; kernels switch off every other fusion), and the rest is integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ngramspec.sampling import numeric
from ngramspec.sampling.sampler import FRACTION_BITS, WEIGHT_BITS

PIVOTS = tl.constexpr(16)
WHOLE = tl.constexpr(1 << FRACTION_BITS)
INFINITE = tl.constexpr(0x7F800000)  # Key of an infinite logit; the keys of NaN are above it.
LOWEST = tl.constexpr(-(1 << 63))  # Smaller than all packed logits.
LAST_ID = tl.constexpr(0x7FFFFFFF)
_WEIGHT = tl.constexpr(2.0**WEIGHT_BITS)
_WHOLE = tl.constexpr(2.0**FRACTION_BITS)

_LOG2E, _LN2_HI, _LN2_LO = (tl.constexpr(float(c)) for c in (numeric.LOG2E, numeric.LN2_HI, numeric.LN2_LO))
_C2, _C3, _C4, _C5, _C6, _C7 = (tl.constexpr(float(c)) for c in (numeric.C2, numeric.C3, numeric.C4, numeric.C5, numeric.C6, numeric.C7))
_LOW = tl.constexpr(float(numeric.LOW))


@triton.jit
def key_of(x):
    """Return an int32 that orders as the float32 does: both zeros are equal, and NaN is above all."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x == 0.0, 0, key)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def logit_of(key):
    """Return the float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, top, temperature):
    """Return int64 floor(exp((x - top) / temperature) * 2**40), with the bits of `ngramspec.sampling.sampler`'s weights."""
    y = tl.maximum(tl.div_rn(x - top, temperature), _LOW)
    n = tl.floor(tl.fma(y, _LOG2E, 0.5))
    r = tl.fma(-n, _LN2_LO, tl.fma(-n, _LN2_HI, y))
    p = tl.fma(tl.fma(tl.fma(tl.fma(tl.fma(r, _C7, _C6), r, _C5), r, _C4), r, _C3), r, _C2)
    p = tl.fma(p, r * r, r + 1.0)
    p = p * ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return (p * _WEIGHT).to(tl.int64)


@triton.jit
def part_of(total, fraction):
    """Return floor(total * fraction / 2**53) of int64 scalars, total < 2**62, fraction <= 2**53, computed in halves of 32 bits."""
    a, b = total.to(tl.uint64), fraction.to(tl.uint64)
    a1, a0, b1, b0 = a >> 32, a & 0xFFFFFFFF, b >> 32, b & 0xFFFFFFFF
    middle = a1 * b0 + a0 * b1 + ((a0 * b0) >> 32)
    return ((a1 * b1 << 11) + (middle >> 21)).to(tl.int64)


@triton.jit
def uniform_bits(seed, sample, position, row):
    """Return u * 2**53 as int64, as `ngramspec.sampling.sampler.uniform_bits` does: Philox4x32-10."""
    k0 = tl.load(seed + 2 * row).to(tl.uint32, bitcast=True).to(tl.uint64)
    k1 = tl.load(seed + 2 * row + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    c0 = tl.load(position + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    c2 = tl.load(sample + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    c1, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        a = c0 * 0xD2511F53
        b = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (((c0 >> 5) << 26) | (c1 >> 6)).to(tl.int64)


@triton.jit
def load(logits, ids, inside):
    return tl.load(logits + ids, mask=inside, other=float("-inf"))


@triton.jit
def find_middle(lo, hi):
    """Return (lo + hi) // 2 without a sum that could overflow."""
    return (lo & hi) + ((lo ^ hi) >> 1)


@triton.jit
def encode_min_p(min_p):
    """Return the smallest weight that `min_p` keeps."""
    return tl.ceil(min_p * _WEIGHT).to(tl.int64)


@triton.jit
def share_of(top_p):
    """Return `ngramspec.sampling.sampler.encode_top_p` of top_p."""
    return tl.maximum((top_p * _WHOLE).to(tl.int64), 1)


@triton.jit
def compute_pivot(top, temperature, j):
    """Return the key of the j-th of 16 logits below the top, in rising distance; logits below the last weigh nothing."""
    return key_of(top - temperature * (((j + 1) * (j + 1)).to(tl.float32) * 0.125))


@triton.jit
def peak_of(best, row, n_chunks, CHUNKS: tl.constexpr, K: tl.constexpr):
    """Return the row's greatest (key, id), packed as `_find_best` packs them."""
    c = tl.arange(0, CHUNKS)
    return tl.max(tl.load(best + (row * n_chunks + c) * K, mask=c < n_chunks, other=LOWEST), axis=0)

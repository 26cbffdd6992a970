"""Random weights as files hold them, what a panel's bytes stand for by its format's description, and the products' arithmetic in numpy.

None of it knows the compiled code that it is compared with.
"""

from __future__ import annotations

from typing import NamedTuple

import gguf
import numpy as np
from block_factors import write_factors
from numba import njit

from ngramspec.backends.cpu.arena import Arena
from ngramspec.backends.cpu.codegen.activations import LEAST
from ngramspec.backends.cpu.codegen.intrinsics import call_kernel
from ngramspec.backends.cpu.codegen.kernels import N_ARGUMENTS, Kernels
from ngramspec.backends.cpu.formats import DEPTH, LINE, QUANTISED, SUPER, WIDTH, PlainFormat, QuantFormat
from ngramspec.backends.cpu.matmul import quantise_row
from ngramspec.backends.cpu.packing import PackedWeight, pack
from ngramspec.models.tensor_source import KINDS, dequantise

FACTORS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_S": (0,), "IQ1_M": (0,), "IQ2_XXS": (0,),
    "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
}  # fmt: skip
"""Where a block's float16 factors lie (ggml-common.h)."""
SPECIAL = (0.0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504.0, -65504.0)
"""float16 factors that a file may hold, though no converter writes them."""


def rows_of_kind(kind: str, n: int, k: int, seed: int = 0, special: bool = False) -> np.ndarray:
    """Any bytes for codes and small scales, float16 factors of about 1e-2 of both signs, [n, bytes of a row] uint8."""
    rng = np.random.default_rng(seed)
    if kind in PlainFormat.__members__:
        values = rng.normal(0, 0.3, (n, k)).astype(np.float32)
        if kind == "BF16":
            return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        return values.astype(np.float32 if kind == "F32" else np.float16).view(np.uint8)
    per_block, n_bytes = KINDS[kind]
    blocks = rng.integers(0, 256, (n, k // per_block, n_bytes), np.uint8)
    if kind == "MXFP4":  # a block's power of two, as the exponent that it has as float32
        blocks[:, :, 0] = rng.integers(112, 122, blocks.shape[:2])
        if special:
            blocks[:, :, 0] = np.where(
                rng.random(blocks.shape[:2]) < 0.4, rng.choice([0, 1, 2, 90, 160, 240], blocks.shape[:2]), blocks[:, :, 0]
            )
    for at in FACTORS.get(kind, ()):
        factors = (rng.uniform(1e-3, 1e-2, blocks.shape[:2]) * rng.choice([-1, 1], blocks.shape[:2])).astype(np.float16)
        if special:
            factors = np.where(rng.random(factors.shape) < 0.4, rng.choice(np.array(SPECIAL, np.float16), factors.shape), factors)
        write_factors(kind, blocks, at, factors)
    return blocks.reshape(n, -1)


def reference_values(kind: str, rows: np.ndarray) -> np.ndarray:
    """[n, K] float32 of gguf's own dequantisation."""
    return dequantise(kind, rows) if kind in PlainFormat.__members__ else gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])


def packed(kind: str, rows: np.ndarray) -> PackedWeight:
    per_block, n_bytes = KINDS[kind]
    return pack(kind, (len(rows), rows.shape[1] // n_bytes * per_block), lambda a, b: rows[a:b], Arena())


def random_weight(kind: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    return packed(kind, rows_of_kind(kind, n, k, seed))


class Read(NamedTuple):
    """A quantised weight taken apart: output n, block of 32 inputs b, part p (16 or 32 inputs)."""

    numbers: np.ndarray
    """[N, B, 32] int64: codes less their zero."""
    scale: np.ndarray
    """[N, B] float32: of the block, or of its super-block."""
    integers: np.ndarray | None
    """[N, B, P] int64"""
    offset: np.ndarray | None
    """[N, B] float32: what is added, times the integer if there is one."""
    offset_integers: np.ndarray | None


def read_panels(weight: PackedWeight) -> Read:
    """From the bytes of panels, by the words of `formats` alone."""
    fmt, n_blocks = weight.format, weight.n_blocks
    assert isinstance(fmt, QuantFormat)
    n_panels, parts = weight.n_panels, 2 if fmt.by_16 else 1
    codes = np.zeros((n_panels, n_blocks, DEPTH, WIDTH), np.int64)
    raw = weight.data[:, weight.codes_at :].reshape(n_panels, n_blocks, fmt.code_bytes // LINE, WIDTH, 4).astype(np.int64)
    low = first = 0
    for bits in fmt.planes:
        for g in range(8):
            vector, shift = {4: (g % 4, g // 4 * 4), 2: (g // 4, g % 4 * 2), 1: (0, g), 8: (g, 0)}[bits]
            number = raw[:, :, first + vector] >> shift & ((1 << bits) - 1)  # [panels, blocks, output, j]
            codes[:, :, 4 * g : 4 * g + 4] |= number.transpose(0, 1, 3, 2) << low
        low, first = low + bits, first + bits
    numbers = codes - fmt.zero if fmt.values is None else np.array(fmt.values)[codes]

    def outputs(x: np.ndarray) -> np.ndarray:
        """[panels, B, …, 16] → [N, B, …]"""
        return np.moveaxis(x, -1, 1).reshape(n_panels * WIDTH, *x.shape[1:-1])[: weight.n_out]

    of_blocks = weight.data[:, : n_blocks * fmt.scale_bytes].reshape(n_panels, n_blocks, fmt.scale_bytes)
    if fmt.half_scales:
        bits = np.ascontiguousarray(of_blocks).view(np.uint16).reshape(n_panels, n_blocks, -1, WIDTH)
        halves = (bits.astype(np.uint32) << 16).view(np.float32) if fmt.powers else bits.view(np.float16).astype(np.float32)
        return Read(outputs(numbers), outputs(halves[:, :, 0]), None, outputs(halves[:, :, 1]) if fmt.offsets else None, None)
    n_supers = -(-n_blocks // SUPER)
    heads = np.ascontiguousarray(weight.data[:, weight.super_at :][:, : n_supers * fmt.super_bytes]).view(np.float16)
    supers = np.repeat(heads.reshape(n_panels, n_supers, -1, WIDTH), SUPER, axis=1)[:, :n_blocks].astype(np.float32)
    supers *= np.float32(2.0**fmt.exponent)
    integers = of_blocks.reshape(n_panels, n_blocks, -1, WIDTH).astype(np.int64)
    return Read(
        outputs(numbers), outputs(supers[:, :, 0]), outputs(integers[:, :, :parts] - fmt.scale_zero),
        -outputs(supers[:, :, 1]) if fmt.offsets else None, outputs(integers[:, :, parts:]) if fmt.offsets else None,
    )  # fmt: skip


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c of float32, rounded once. The sum is rounded to odd in float64, after which rounding to float32 is the only one."""
    product, c = a.astype(np.float64) * b.astype(np.float64), np.asarray(c, np.float64)  # exact: 48 bits
    total = product + c
    away = total - product
    error = (product - (total - away)) + (c - away)  # Knuth's two-sum
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    return np.where(even & (error != 0), np.nextafter(total, towards), total).astype(np.float32)


def quantised(x: np.ndarray, size: int = DEPTH) -> tuple[np.ndarray, np.ndarray]:
    """Codes [T, B, size] int64 and scales [T, B] float32 of rows x [T, K]."""
    blocks = x.reshape(len(x), -1, size)
    top = np.abs(blocks).max(-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > np.float32(LEAST))
    return np.rint(blocks * inverse[:, :, None]).astype(np.int64), top / np.float32(127)


def int8_product(weight: PackedWeight, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """[T, N] float32 of x [T, K]: integer sums of what has one scale, then a chain of float32 over them."""
    fmt = weight.format
    assert isinstance(fmt, QuantFormat)
    multiply_all = _super_block_product if fmt.by_super else _block_product
    return multiply_all(fmt, read_panels(weight), x, np.tile(bias.astype(np.float32), (len(x), 1)))


def _block_product(fmt: QuantFormat, read: Read, x: np.ndarray, total: np.ndarray) -> np.ndarray:
    codes, x_scale = quantised(x)
    for b in range(codes.shape[1]):
        scale = x_scale[:, b, None]
        products = np.einsum("tj,nj->tn", codes[:, b], read.numbers[:, b]).astype(np.float32)
        total = fma(products, read.scale[:, b] * scale, total)
        if read.offset is not None:
            total = fma(np.broadcast_to(read.offset[:, b], total.shape), scale * codes[:, b].sum(-1).astype(np.float32)[:, None], total)
    return total


def _super_block_product(fmt: QuantFormat, read: Read, x: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Codes have their zero in them, which is subtracted once per super-block; where sums are integers, from each code."""
    assert read.integers is not None
    codes, x_scale = quantised(x, SUPER * DEPTH)
    n_parts, added = read.integers.shape[2], 0 if fmt.integers else fmt.zero
    for s in range(codes.shape[1]):
        scale, of_sums = x_scale[:, s, None], np.zeros(total.shape, np.int64)
        parts = codes[:, s].reshape(len(x), SUPER, n_parts, -1)
        integers = read.integers if read.offset_integers is None else read.offset_integers
        whole, exact = np.zeros(total.shape, np.float32), np.zeros(total.shape, np.int64)
        for k in range(SUPER):
            numbers = (read.numbers[:, s * SUPER + k] + added).reshape(len(read.numbers), n_parts, -1)
            for p in range(n_parts):
                products, by = np.einsum("tj,nj->tn", parts[:, k, p], numbers[:, p]), read.integers[:, s * SUPER + k, p]
                whole = fma(products.astype(np.float32), by.astype(np.float32), whole)
                exact += products * by
                of_sums += parts[:, k, p].sum(-1)[:, None] * integers[:, s * SUPER + k, p]
        if fmt.exact:
            assert np.abs(exact).max() < (2**31 if fmt.integers else 2**24)
            whole = exact.astype(np.float32)
        if fmt.zero and not fmt.integers:
            whole = fma(of_sums.astype(np.float32), np.float32(-fmt.zero), whole)
        total = fma(whole, read.scale[:, s * SUPER] * scale, total)
        if read.offset is not None:
            total = fma(of_sums.astype(np.float32), read.offset[:, s * SUPER] * scale, total)
    return total


def float32_product(values: np.ndarray, x: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """[T, N] float32 of x [T, K] and weights [N, K]: one chain of fused multiply-adds an output."""
    total = np.tile(bias.astype(np.float32), (len(x), 1))
    for k in range(x.shape[1]):
        total = fma(x[:, k, None], values[:, k], total)
    return total


@njit(cache=True)
def _call(address, arguments):
    call_kernel(address, arguments)


def run(address: int, *arguments: int) -> None:
    """Call compiled code."""
    _call(address, (*arguments, *[0] * (N_ARGUMENTS - len(arguments))))


def multiply(function: int, weight: PackedWeight, x: np.ndarray, act_scales: np.ndarray | None, bias: np.ndarray) -> np.ndarray:
    """What a kernel for len(x) rows makes of x [T, K], codes or float32: [T, 16 · panels]."""
    y = np.full((len(x), weight.n_panels * WIDTH), np.nan, np.float32)
    act_scales = np.zeros((len(x), 0), np.float32) if act_scales is None else act_scales
    run(
        function, weight.data.ctypes.data, weight.n_panels, weight.data.shape[1], weight.n_blocks, weight.super_at, weight.codes_at,
        x.ctypes.data, x.strides[0], act_scales.ctypes.data, act_scales.strides[0], bias.ctypes.data, y.ctypes.data, y.strides[0],
    )  # fmt: skip
    return y


def codes_and_act_scales(made: Kernels, x: np.ndarray, fmt: QuantFormat) -> tuple[np.ndarray, np.ndarray]:
    """What the quantising kernel makes of rows x [T, K] for weights of a format: [T, K] int8, [T, K / 32, 4] as float32."""
    codes, act_scales = np.zeros((len(x), 2, x.shape[1]), np.int8), np.zeros((len(x), 2, x.shape[1] // DEPTH, 4), np.float32)
    for i in range(len(x)):
        quantise_row(made.get_quantise([fmt]), x[i], codes[i], act_scales[i])
    assert not codes[:, int(not fmt.by_super)].any()  # not needed
    return codes[:, int(fmt.by_super)], act_scales[:, int(fmt.by_super)]


EVERY = (*QUANTISED, *PlainFormat.__members__)

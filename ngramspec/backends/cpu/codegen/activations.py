"""Emit what is computed of activations between products: their codes of 8 bits, and the activation functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from ngramspec.backends.cpu.codegen.emitter import BYTE, FLOAT, FLOATS, HALF, LONG, SUPER_SHIFT, WORD, WORDS, Emitter
from ngramspec.backends.cpu.formats import DEPTH, SUPER, WIDTH
from ngramspec.sampling import numeric

# Bytes of the activation scales of a block of 32 activations: float32 scale, int32 sum of the codes, int32 sum of the first 16 codes,
# float32 scale · sum.
ACT_SCALE_BYTES = 16
# Those of a super-block of 256 take the room of its blocks: a float32 scale, the int16 sums of the codes of its 8 blocks, of its 16 halves,
# and what the products of each half begin with where sums are integers, so that codes have no zero: int32, -INTEGER_ZERO · sum.
BLOCK_SUMS_AT, HALF_SUMS_AT, HALF_STARTS_AT = 16, 32, 64
INTEGER_ZERO = 32
LEAST = 1e-30  # A block whose activations are all smaller than this is quantised to zeros.
# 1.5 · 2^23: adding it to a number of at most 22 bits rounds that to the nearest integer, ties to even.
_ROUND = 12582912.0


def emit_quantise(e: Emitter, _fmt: None, _rows: int, args: Sequence[Any], *, blocks: bool, supers: bool) -> None:
    """Emit `Kernels.get_quantise`."""
    x0, n_blocks, codes0, act_scales0, super_codes0, super_scales0 = args[:6]
    b = e.b
    if blocks:
        with e.loop(n_blocks, []) as (i, _, _):
            record = b.add(act_scales0, b.mul(i, LONG(ACT_SCALE_BYTES)))
            scale, (first, second) = _emit_quantise_vectors(e, x0, codes0, b.mul(i, LONG(DEPTH)), DEPTH // WIDTH)
            whole = b.add(first, second)
            for k, value in enumerate((scale, whole, first, b.fmul(scale, b.sitofp(whole, FLOAT)))):
                e.store(value, e.add_offset(record, 4 * k))
    if supers:
        n_supers = b.lshr(n_blocks, LONG(SUPER_SHIFT))  # none in a row of other weights
        with b.if_then(b.icmp_signed(">", n_supers, LONG(0))), e.loop(n_supers, []) as (s, _, _):
            record = b.add(super_scales0, b.mul(s, LONG(SUPER * ACT_SCALE_BYTES)))
            scale, sums = _emit_quantise_vectors(e, x0, super_codes0, b.mul(s, LONG(SUPER * DEPTH)), SUPER * DEPTH // WIDTH)
            e.store(scale, record)
            for k, value in enumerate(sums):
                e.store(b.trunc(value, HALF), e.add_offset(record, HALF_SUMS_AT + 2 * k), 2)
                e.store(b.mul(value, WORD(-INTEGER_ZERO)), e.add_offset(record, HALF_STARTS_AT + 4 * k))
                if k % 2:
                    e.store(b.trunc(b.add(sums[k - 1], value), HALF), e.add_offset(record, BLOCK_SUMS_AT + k - 1), 2)


def _emit_quantise_vectors(e: Emitter, x0: Any, codes0: Any, first: Any, n: int) -> tuple[Any, list[Any]]:
    """Quantise n vectors of 16 activations, from activation `first` on, by one scale; return that and each vector's sum of codes."""
    b = e.b
    at = b.add(x0, b.mul(first, LONG(4)))
    xs = [e.load(e.add_offset(at, 4 * WIDTH * k), FLOATS, 4) for k in range(n)]
    most = e.call("llvm.fabs.v16f32", FLOATS, xs[0])
    for x in xs[1:]:
        size = e.call("llvm.fabs.v16f32", FLOATS, x)
        most = b.select(b.fcmp_ordered(">", most, size), most, size)
    for width in (8, 4, 2, 1):
        undefined = ir.Constant(most.type, ir.Undefined)
        halves = [b.shuffle_vector(most, undefined, ir.Constant(ir.VectorType(WORD, width), list(range(k, k + width)))) for k in (0, width)]
        most = b.select(b.fcmp_ordered(">", *halves), *halves)
    top = b.extract_element(most, WORD(0))
    some = b.fcmp_ordered(">", top, FLOAT(LEAST))
    inverse = e.spread(b.select(some, b.fdiv(FLOAT(127.0), top), FLOAT(0.0)))
    sums = []
    for k, x in enumerate(xs):
        moved = b.fadd(b.fmul(x, inverse), ir.Constant(FLOATS, [_ROUND] * WIDTH))
        codes = b.sub(b.bitcast(moved, WORDS), e.splat_words(0x4B400000))
        e.store(b.trunc(codes, ir.VectorType(BYTE, WIDTH)), e.add_offset(b.add(codes0, first), WIDTH * k), 1)
        sums.append(e.call("llvm.vector.reduce.add.v16i32", WORD, codes))
    return b.fdiv(top, FLOAT(127.0)), sums


def emit_exp(e: Emitter, x: Any) -> Any:
    """Emit `sampling.numeric.exp` for 16 numbers at a time, with the same bits."""
    b = e.b

    def splat_float(value: Any) -> Any:
        return ir.Constant(FLOATS, [float(value)] * WIDTH)

    x = b.select(b.fcmp_ordered("<", x, splat_float(numeric.LOW)), splat_float(numeric.LOW), x)
    x = b.select(b.fcmp_ordered(">", x, splat_float(numeric.HIGH)), splat_float(numeric.HIGH), x)
    n = e.call("llvm.floor.v16f32", FLOATS, e.fma(x, splat_float(numeric.LOG2E), splat_float(0.5)))
    minus = b.fneg(n)
    r = e.fma(minus, splat_float(numeric.LN2_LO), e.fma(minus, splat_float(numeric.LN2_HI), x))
    y = splat_float(numeric.C7)
    for c in (numeric.C6, numeric.C5, numeric.C4, numeric.C3, numeric.C2):
        y = e.fma(y, r, splat_float(c))
    y = e.fma(y, b.fmul(r, r), b.fadd(r, splat_float(1.0)))
    power = b.shl(b.add(b.fptosi(n, WORDS), e.splat_words(127)), e.splat_words(23))
    return b.fmul(y, b.bitcast(power, FLOATS))


def emit_activation(e: Emitter, _fmt: None, _rows: int, args: Sequence[Any], *, name: str, factors: tuple[float, float] | None) -> None:
    gate0, up0, n_blocks, y0 = args[:4]
    b = e.b
    zero, one, slope, cube = (ir.Constant(FLOATS, [float(x)] * WIDTH) for x in (0.0, 1.0, numeric.GELU_SLOPE, numeric.GELU_CUBE))
    with e.loop(b.mul(n_blocks, LONG(2)), []) as (i, _, _):
        shift = b.mul(i, LONG(4 * WIDTH))
        gate = e.load(b.add(gate0, shift), FLOATS, 4)
        if factors:
            gate = b.fmul(gate, ir.Constant(FLOATS, [float(np.float32(factors[0]))] * WIDTH))
        if name == "squared relu":  # the product keeps what is not a number
            y = b.fmul(b.select(b.fcmp_ordered(">", gate, zero), gate, zero), gate)
        else:
            argument = gate if name == "silu" else b.fmul(gate, e.fma(cube, b.fmul(gate, gate), slope))
            y = b.fdiv(gate, b.fadd(one, emit_exp(e, b.fneg(argument))))
        if name in ("silu", "gelu"):  # the others are not gated
            y = b.fmul(y, e.load(b.add(up0, shift), FLOATS, 4))
        if factors:
            y = b.fmul(y, ir.Constant(FLOATS, [float(np.float32(factors[1]))] * WIDTH))
        e.store(y, b.add(y0, shift))


def emit_clamped_swiglu(e: Emitter, _fmt: None, _rows: int, args: Sequence[Any], *, alpha: float, limit: float) -> None:
    gate0, up0, n_blocks, y0 = args[:4]
    b = e.b
    one, high, low, slope = (ir.Constant(FLOATS, [float(np.float32(x))] * WIDTH) for x in (1.0, limit, -limit, alpha))

    def clamp_value(x: Any, by: Any, order: str) -> Any:
        return b.select(b.fcmp_ordered(order, x, by), by, x)  # keeps what is not a number

    with e.loop(b.mul(n_blocks, LONG(2)), []) as (i, _, _):
        shift = b.mul(i, LONG(4 * WIDTH))
        gate, up = (e.load(b.add(start, shift), FLOATS, 4) for start in (gate0, up0))
        gate, up = clamp_value(gate, high, ">"), clamp_value(clamp_value(up, high, ">"), low, "<")
        share = b.fdiv(gate, b.fadd(one, emit_exp(e, b.fneg(b.fmul(gate, slope)))))
        e.store(b.fmul(share, b.fadd(up, one)), b.add(y0, shift))

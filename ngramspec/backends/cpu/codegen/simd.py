"""Provide the inner loop of attention as numba intrinsics: sums of products that stay in vector registers.

A tile is some rows by some panels of 16 outputs (see `README.md`). Every output is one chain of fused multiply-adds over the inputs in
their order, so its bits depend neither on the other rows and panels of the tile nor on the width of the processor's vectors. Keys and
values are stored as float32, or as float16 whose bits an array of uint16 holds. Knows arrays alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ngramspec.backends.cpu.codegen.kernels import FLOAT, FLOATS, HALF, LONG, WORD, ZEROS, Emitter, emit_exp, get_host_target, widen_halves
from ngramspec.backends.cpu.formats import WIDTH

STEP = 8  # Inputs per turn of the loop.
HOST = get_host_target()
CHAINS = HOST.chains  # Register tile: panels × rows whose sums fit into vector registers besides the weights.
LOWEST = -3.0e38  # A score whose weight in the softmax is zero.
_MOST = 65504.0  # The largest float16.


@intrinsic
def to_kv_dtype(typing_context, array, x):
    """Convert x, float32, to the type of an array of keys or values: itself, or the bits of the nearest finite float16."""

    def codegen(context, builder, signature, args):
        if signature.return_type == types.float32:
            return args[1]
        for bound, sign in ((_MOST, ">"), (-_MOST, "<")):
            beyond = builder.fcmp_ordered(sign, args[1], FLOAT(bound))
            args = (args[0], builder.select(beyond, FLOAT(bound), args[1]))
        if HOST.halves:
            return builder.bitcast(builder.fptrunc(args[1], ir.HalfType()), HALF)
        return _narrow_to_half(builder, args[1])

    return (types.float32 if array.dtype == types.float32 else types.uint16)(array, types.float32), codegen


def _narrow_to_half(b: Any, x: Any) -> Any:
    """Convert a finite x to the bits of the nearest float16 by integer arithmetic."""
    bits = b.bitcast(x, WORD)
    sign = b.and_(b.lshr(bits, WORD(16)), WORD(0x8000))
    size = b.and_(bits, WORD(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, WORD(13)), WORD(1))
    normal = b.lshr(b.add(b.sub(size, WORD(0x38000000)), b.add(odd, WORD(0xFFF))), WORD(13))
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, FLOAT), FLOAT(0.5)), WORD), WORD(0x3F000000))
    chosen = b.select(b.icmp_unsigned("<", size, WORD(0x38800000)), small, normal)
    return b.trunc(b.or_(sign, chosen), HALF)


@intrinsic
def load_as_float32(typing_context, array, i):
    """Return element i of a flat array of keys or values as float32."""

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        value = builder.load(builder.gep(data, [args[1]]))
        if array.dtype == types.float32:
            return value
        return builder.fpext(builder.bitcast(value, ir.HalfType()), FLOAT) if HOST.halves else widen_halves(builder, value)

    return types.float32(array, types.int64), codegen


@intrinsic
def replace_by_exponentials(typing_context, s, n):
    """Replace s[:n] by exp(s - max) in place, LOWEST by 0; return the sum, in 16 lanes. n is a positive multiple of 16."""

    def codegen(context, builder, signature, args):
        e = Emitter(builder, HOST)
        start = builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, LONG)
        turns = builder.sdiv(args[1], LONG(WIDTH))
        lowest = ir.Constant(FLOATS, [LOWEST] * WIDTH)
        with e.loop(turns, [lowest]) as (i, (most,), ends):
            x = e.load(builder.add(start, builder.mul(i, LONG(4 * WIDTH))), FLOATS, 4)
            ends.append(builder.select(builder.fcmp_ordered(">", x, most), x, most))
        top = FLOAT(LOWEST)
        for lane in range(WIDTH):
            x = builder.extract_element(ends[0], WORD(lane))
            top = builder.select(builder.fcmp_ordered(">", x, top), x, top)
        top = e.spread(top)
        with e.loop(turns, [ZEROS]) as (i, (total,), ends):
            at = builder.add(start, builder.mul(i, LONG(4 * WIDTH)))
            x = e.load(at, FLOATS, 4)
            y = builder.select(builder.fcmp_ordered("==", x, lowest), ZEROS, emit_exp(e, builder.fsub(x, top)))
            e.store(y, at)
            ends.append(builder.fadd(total, y))
        total = FLOAT(0.0)
        for lane in range(WIDTH):
            total = builder.fadd(total, builder.extract_element(ends[0], WORD(lane)))
        return total

    return types.float32(s, types.int64), codegen


@intrinsic(prefer_literal=True)
def multiply_add(typing_context, panels, rows, step, onto, x, x_at, x_step, n_rows, w, w_at, w_step, n_inputs, y, y_at, y_step):
    """Compute y [rows, 16 panels] (plus itself if `onto` is 1) of x [rows, n_inputs] and w [n_inputs, 16 panels].

    All arrays are flat, of float32, or for w of float16 as uint16. `_at` and `_step` count elements; n_inputs is a positive multiple of
    `step`. Rows from n_rows on repeat the last one.
    """
    n_panels, n_tile_rows, n_step = panels.literal_value, rows.literal_value, step.literal_value
    size = w.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        e = Emitter(builder, HOST)

        def address(i, item):
            array = context.make_array(signature.args[i])(context, builder, args[i])
            return builder.add(builder.ptrtoint(array.data, LONG), builder.mul(args[i + 1], LONG(item)))

        def bytes_of(i, item=4):
            return builder.mul(args[i], LONG(item))

        x, w, y = address(4, 4), address(8, size), address(12, 4)
        last = builder.sub(args[7], LONG(1))
        lines = [builder.select(builder.icmp_signed("<", LONG(r), last), LONG(r), last) for r in range(n_tile_rows)]
        xs = [builder.add(x, builder.mul(line, bytes_of(6))) for line in lines]
        ys = [
            [builder.add(builder.add(y, builder.mul(line, bytes_of(14))), LONG(4 * WIDTH * p)) for p in range(n_panels)] for line in lines
        ]
        starts = [e.load(at, FLOATS, 4) if onto.literal_value else ZEROS for row in ys for at in row]
        w_step = bytes_of(10, size)
        with e.loop(builder.sdiv(args[11], LONG(n_step)), starts) as (i, carried, ends):
            totals = [carried[r * n_panels : (r + 1) * n_panels] for r in range(n_tile_rows)]
            first = builder.add(w, builder.mul(builder.mul(i, LONG(n_step)), w_step))
            inputs = [builder.add(at, builder.mul(i, LONG(4 * n_step))) for at in xs]
            for j in range(n_step):
                here = builder.add(first, builder.mul(LONG(j), w_step))
                read = e.load_halves if size == 2 else lambda at: e.load(at, FLOATS, 4)
                weights = [read(e.offset(here, size * WIDTH * p)) for p in range(n_panels)]
                for r, at in enumerate(inputs):
                    one = e.spread(e.load(e.offset(at, 4 * j), FLOAT, 4))
                    totals[r] = [e.fma(one, weight, total) for weight, total in zip(weights, totals[r], strict=True)]
            ends += [total for row in totals for total in row]
        for at, total in zip([at for row in ys for at in row], ends, strict=True):
            e.store(total, at)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(panels, rows, step, onto, x, whole, whole, whole, w, whole, whole, whole, y, whole, whole), codegen

"""The inner loop of matrix products and of attention on the CPU: sums of products that stay in vector registers.

A tile is some rows by some panels of 16 outputs. Every output is one chain of fused multiply-adds over the inputs in their order, so that
its bits depend neither on the other rows and panels of the tile nor on the width of the processor's vectors. Written as the compiler's
own vectors, since numba would keep the sums of a plain loop in memory. Knows addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16
"""Outputs of a panel."""
STEP = 8
"""Inputs in one turn of the loop."""


def _features() -> dict[str, bool]:
    try:
        return dict(binding.get_host_cpu_features())
    except RuntimeError:  # a processor that does not tell
        return {}


CHAINS = 24 if _features().get("avx512f") else 6
"""Panels times rows whose sums, with the weights, fit into registers."""
HALVES = _features().get("f16c", False)
"""Whether the processor turns float16 into float32."""

BYTE, INT, LONG, FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = ir.VectorType(FLOAT, WIDTH), ir.VectorType(INT, WIDTH)
ZEROS = ir.Constant(FLOATS, [0.0] * WIDTH)


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, FLOATS.as_pointer())).align = 4


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, each of 16 in one rounding."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(FLOATS, [FLOATS] * 3), f"llvm.fma.v{WIDTH}f32")
    return builder.call(function, [a, b, c])


def prefetch(builder: Any, address: Any) -> None:
    """Fetch a line into the second cache."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT, INT, INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, BYTE.as_pointer()), INT(0), INT(2), INT(1)])


def start_of(context: Any, builder: Any, kind: Any, value: Any) -> tuple[Any, Any]:
    """Where an array's data begins, and the array."""
    array = context.make_array(kind)(context, builder, value)
    return builder.ptrtoint(array.data, LONG), array


def up_to(builder: Any, i: int, count: Any) -> Any:
    """i, or the last of the `count` where there are no more."""
    last = builder.sub(count, LONG(1))
    return builder.select(builder.icmp_signed("<", LONG(i), last), LONG(i), last)


def sums(
    builder: Any, starts: list[list[Any]], xs: list[Any], step: int, n_turns: Any, turn: Callable[[Any], Callable[[int], list[Any]]]
) -> list[list[Any]]:
    """Emit the loop: `starts` [rows][panels] plus the products of step * `n_turns` inputs, of which row r reads its float32s at xs[r].

    `turn` is handed the number of a turn and returns what gives the weights [panels] of its j-th input.
    """
    before, loop, after = builder.block, builder.append_basic_block("turn"), builder.append_basic_block("end")
    builder.branch(loop)
    builder.position_at_end(loop)
    i = builder.phi(LONG)
    phis = [[builder.phi(FLOATS) for _ in row] for row in starts]
    weights_of = turn(i)
    inputs = [builder.add(x, builder.mul(i, LONG(4 * step))) for x in xs]
    totals = [list(row) for row in phis]
    for j in range(step):
        weights = weights_of(j)
        for r, at in enumerate(inputs):
            one = builder.insert_element(ir.Constant(FLOATS, ir.Undefined), load(builder, builder.add(at, LONG(4 * j)), FLOAT, 4), INT(0))
            x = builder.shuffle_vector(one, ir.Constant(FLOATS, ir.Undefined), ir.Constant(INTS, [0] * WIDTH))
            totals[r] = [fused(builder, x, weight, total) for weight, total in zip(weights, totals[r], strict=True)]
    following = builder.add(i, LONG(1))
    i.add_incoming(LONG(0), before)
    i.add_incoming(following, loop)
    for row, first, total in zip(phis, starts, totals, strict=True):
        for phi, a, b in zip(row, first, total, strict=True):
            phi.add_incoming(a, before)
            phi.add_incoming(b, loop)
    builder.cbranch(builder.icmp_signed("<", following, n_turns), loop, after)
    builder.position_at_end(after)
    return totals


@intrinsic(prefer_literal=True)
def multiply_add(typing_context, panels, rows, step, onto, x, x_at, x_step, n_rows, w, w_at, w_step, n_inputs, y, y_at, y_step):
    """y [rows, 16 panels] (plus itself where `onto` is 1) of x [rows, n_inputs] and w [n_inputs, 16 panels]; flat float32 arrays.

    `_at` and `_step` in elements, n_inputs a multiple of `step` and not 0. Rows from n_rows on are the last one again.
    """
    n_panels, n_tile_rows, n_step = panels.literal_value, rows.literal_value, step.literal_value

    def codegen(context, builder, signature, args):
        def address(i):
            return builder.add(start_of(context, builder, signature.args[i], args[i])[0], builder.mul(args[i + 1], LONG(4)))

        def bytes_of(i):
            return builder.mul(args[i], LONG(4))

        x, w, y = address(4), address(8), address(12)
        lines = [up_to(builder, r, args[7]) for r in range(n_tile_rows)]
        xs = [builder.add(x, builder.mul(line, bytes_of(6))) for line in lines]
        rows = [builder.add(y, builder.mul(line, bytes_of(14))) for line in lines]
        ys = [[builder.add(row, LONG(4 * WIDTH * p)) for p in range(n_panels)] for row in rows]
        starts = [[load(builder, at, FLOATS, 4) if onto.literal_value else ZEROS for at in row] for row in ys]
        w_step = bytes_of(10)

        def turn(i):
            first = builder.add(w, builder.mul(builder.mul(i, LONG(n_step)), w_step))

            def weights(j):
                at = builder.add(first, builder.mul(LONG(j), w_step))
                return [load(builder, builder.add(at, LONG(4 * WIDTH * p)), FLOATS, 4) for p in range(n_panels)]

            return weights

        totals = sums(builder, starts, xs, n_step, builder.sdiv(args[11], LONG(n_step)), turn)
        for row, total in zip(ys, totals, strict=True):
            for at, value in zip(row, total, strict=True):
                store(builder, value, at)
        return context.get_dummy_value()

    whole = types.int64
    return types.void(panels, rows, step, onto, x, whole, whole, whole, w, whole, whole, whole, y, whole, whole), codegen

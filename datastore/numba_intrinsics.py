"""Reading memory by address from compiled code. Knows no format: who calls has checked the bounds.

An address and an offset enter, a number leaves. Arrays as arguments of compiled functions cost reference counts and microseconds of
unpacking at every call; a table of addresses costs one argument, and stays valid while its owner holds the arrays.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _make_loader(bits, signed):
    @intrinsic
    def load(typingctx, address):
        def codegen(context, builder, signature, args):
            raw = builder.load(builder.inttoptr(args[0], ir.IntType(bits).as_pointer()), align=1)
            return (builder.sext if signed else builder.zext)(raw, ir.IntType(64)) if bits < 64 else raw

        return types.int64(types.int64), codegen

    return load


load_u8 = _make_loader(8, False)
load_u16 = _make_loader(16, False)
load_u32 = _make_loader(32, False)
load_i32 = _make_loader(32, True)
load_i64 = _make_loader(64, True)


@intrinsic
def cast_to_pointer(typingctx, address):
    """Return an int64 as what `numba.carray` takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic
def unowned_views(typingctx, arrays):
    """Return a tuple's arrays, and what else is in it, as a tuple of the same type without reference counts.

    Their atomic updates at every call cost more than short functions themselves. Valid while somebody holds the originals.
    """

    def codegen(context, builder, signature, args):
        members = []
        for value, kind in zip(cgutils.unpack_tuple(builder, args[0]), arrays, strict=True):
            if isinstance(kind, types.Array):
                for field in (0, 1):  # `meminfo` and `parent` of numba's arrays
                    value = builder.insert_value(value, cgutils.get_null_value(value.type.elements[field]), field)
            members.append(value)
        return context.make_tuple(builder, arrays, members)

    return arrays(arrays), codegen


@intrinsic
def prefetch(typingctx, address):
    """Ask for a cache line that is read soon. Harmless for any address."""

    def codegen(context, builder, signature, args):
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), i32, i32, i32])
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.inttoptr(args[0], ir.IntType(8).as_pointer()), i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen

"""Provide numba intrinsics for calls of generated code, words at addresses, atomic counters and waiting loops.

Knows nothing of what they are used for.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ngramspec.backends.cpu.codegen.kernels import N_ARGUMENTS

# Instruction that tells a processor that a loop waits, and its operands, by `platform.machine()`.
_PAUSES: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "amd64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
    "arm64": ("llvm.aarch64.hint", (1,)),
}


def _get_element_pointer(context: Any, builder: Any, kind: Any, array: Any, part: Any, number: Any) -> Any:
    view = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, view, [part, number])


@intrinsic
def atomic_add(typing_context, array, part, number):
    """Increment array[part, number] atomically and return its former value."""

    def codegen(context, builder, signature, args):
        at = _get_element_pointer(context, builder, signature.args[0], *args)
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def atomic_exchange(typing_context, array, part, number, value):
    """Set array[part, number] atomically and return its former value."""

    def codegen(context, builder, signature, args):
        at = _get_element_pointer(context, builder, signature.args[0], *args[:3])
        return builder.atomic_rmw("xchg", at, args[3], "seq_cst")

    return types.int64(array, types.int64, types.int64, types.int64), codegen


@intrinsic
def atomic_compare_exchange(typing_context, array, part, number, expected, value):
    """Set array[part, number] atomically if it is `expected`; return its former value."""

    def codegen(context, builder, signature, args):
        at = _get_element_pointer(context, builder, signature.args[0], *args[:3])
        return builder.extract_value(builder.cmpxchg(at, args[3], args[4], "seq_cst", "seq_cst"), 0)

    return types.int64(array, types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def atomic_load(typing_context, array, part, number):
    """Load array[part, number] atomically; what other threads wrote before it is visible afterwards."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_get_element_pointer(context, builder, signature.args[0], *args), "seq_cst", 8)

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def or_byte(typing_context, address, bits):
    """Set these bits of the byte at an address atomically. With none the byte stays as it is, and yet its page has been written to."""

    def codegen(context, builder, signature, args):
        byte = ir.IntType(8)
        builder.atomic_rmw("or", builder.inttoptr(args[0], byte.as_pointer()), builder.trunc(args[1], byte), "monotonic")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def pause(typing_context):
    """Tell the processor that this is a waiting loop."""

    def codegen(context, builder, signature, args):
        if instruction := _PAUSES.get(platform.machine().lower()):
            name, operands = instruction
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(operands))
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [ir.IntType(32)(o) for o in operands])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def load_word(typing_context, address):
    """Load the 4 bytes at an address, aligned or not, as uint64."""

    def codegen(context, builder, signature, args):
        word = builder.load(builder.inttoptr(args[0], ir.IntType(32).as_pointer()), align=1)
        return builder.zext(word, ir.IntType(64))

    return types.uint64(types.int64), codegen


@intrinsic
def store_word(typing_context, address, word):
    """Store the low 4 bytes of a word at an address, aligned or not."""

    def codegen(context, builder, signature, args):
        low = builder.trunc(args[1], ir.IntType(32))
        builder.store(low, builder.inttoptr(args[0], ir.IntType(32).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), codegen


@intrinsic
def call_kernel(typing_context, address, arguments):
    """Call machine code at an address with a tuple of N_ARGUMENTS int64; it returns nothing."""
    assert len(arguments) == N_ARGUMENTS, arguments

    def codegen(context, builder, signature, args):
        whole = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [whole] * N_ARGUMENTS)
        values = [builder.sext(v, whole) if v.type.width < 64 else v for v in cgutils.unpack_tuple(builder, args[1])]
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen

"""How the threads of one pass share its work, for code that numba compiles: they stay awake from the first part to the last.

A pass is a row of parts, and a part some pieces of work. Every thread goes through all parts: it takes pieces of a part until there are
none, then waits until those of the others are done. So a thread that the machine holds back delays no more than the piece that it has in
hand, and one that never comes is not waited for. Waiting spins for some microseconds, then yields. Also calls of machine code by its
address. Knows nothing of what the work is.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ngramspec.backends.cpu.codegen.kernels import N_ARGUMENTS
from ngramspec.datastore.code_cache import njit

SPINS = 4000
"""Looks at a counter before the thread lets others run."""
COUNTERS = 16
"""Numbers of a part: pieces taken, and, in another line of the cache, pieces done."""
_DONE = 8


def counters(n_parts: int) -> np.ndarray:
    """[n_parts, COUNTERS] for a pass; zeros."""
    return np.zeros((n_parts, COUNTERS), np.int64)


_WAITING: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": ("llvm.x86.sse2.pause", ()),
    "amd64": ("llvm.x86.sse2.pause", ()),
    "aarch64": ("llvm.aarch64.hint", (1,)),
    "arm64": ("llvm.aarch64.hint", (1,)),
}


def _element(context: Any, builder: Any, kind: Any, array: Any, part: Any, number: Any) -> Any:
    view = context.make_array(kind)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, kind, view, [part, number])


@intrinsic
def _add(typing_context, array, part, number):
    """array[part, number] += 1 as one step; returns what it was."""

    def codegen(context, builder, signature, args):
        at = _element(context, builder, signature.args[0], *args)
        return builder.atomic_rmw("add", at, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def _see(typing_context, array, part, number):
    """array[part, number] as it is now; what others wrote before it is seen from here on."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_element(context, builder, signature.args[0], *args), "acquire", 8)

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def _pause(typing_context):
    """Tell the processor that this is a loop that waits."""

    def codegen(context, builder, signature, args):
        if instruction := _WAITING.get(platform.machine().lower()):
            name, operands = instruction
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(operands))
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [ir.IntType(32)(o) for o in operands])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def call(typing_context, address, arguments):
    """Call machine code at an address with N_ARGUMENTS int64s, a tuple; it returns nothing."""
    assert len(arguments) == N_ARGUMENTS, arguments

    def codegen(context, builder, signature, args):
        whole = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [whole] * N_ARGUMENTS)
        values = [builder.sext(v, whole) if v.type.width < 64 else v for v in cgutils.unpack_tuple(builder, args[1])]
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen


if sys.platform == "win32":

    @njit(cache=True, nogil=True)
    def _let_others(times):
        _pause()

else:
    _usleep = types.ExternalFunction("usleep", types.int32(types.uint32))

    @njit(cache=True, nogil=True)
    def _let_others(times):
        _usleep(np.uint32(1))


@njit(cache=True, nogil=True)
def take(state, part, n_pieces):
    """The number of a piece of this part that nobody has; n_pieces or more: there is none."""
    return _add(state, part, 0)


@njit(cache=True, nogil=True)
def done(state, part):
    """One piece that was taken is done."""
    _add(state, part, _DONE)


@njit(cache=True, nogil=True)
def wait(state, part, n_pieces):
    """Until all pieces of a part are done."""
    spins = 0
    while _see(state, part, _DONE) < n_pieces:
        spins += 1
        if spins < SPINS:
            _pause()
        else:
            _let_others(spins)

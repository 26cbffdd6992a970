"""Call compiled functions by address from compiled code.

numba makes a directly called function a part of its caller, where it is optimised once more: a chain of three calls compiles the innermost
function three times. Knows nothing of what is called.
"""

from __future__ import annotations

from typing import Any

from numba import typeof, types
from numba.core import cgutils
from numba.core.imputils import impl_ret_new_ref
from numba.extending import intrinsic


@intrinsic
def call_compiled(typing_context, address, arguments):
    """Call a function that numba has compiled for these types of arguments, a tuple, at its address; it returns nothing."""

    def codegen(context, builder, signature, args):
        kinds = tuple(signature.args[1])
        function = builder.inttoptr(args[0], context.call_conv.get_function_type(types.none, kinds).as_pointer())
        values = cgutils.unpack_tuple(builder, args[1])
        status, _ = context.call_conv.call_function(builder, function, types.none, kinds, values)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), codegen


@intrinsic
def call_at(typing_context, function, address, arguments):
    """Call `function`, which numba has compiled for these types of arguments, a tuple, at its address; return its result."""
    callee = typing_context.resolve_function_type(function, tuple(arguments), {})

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[1], context.call_conv.get_function_type(callee.return_type, callee.args).as_pointer())
        given = zip(cgutils.unpack_tuple(builder, args[2]), arguments, callee.args, strict=True)
        values = [context.cast(builder, value, kind, wanted) for value, kind, wanted in given]
        status, result = context.call_conv.call_function(builder, pointer, callee.return_type, callee.args, values)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return impl_ret_new_ref(context, builder, callee.return_type, result)

    return callee.return_type(function, types.int64, arguments), codegen


def find_address(dispatcher: Any, *examples: Any) -> int:
    """Return the address of a compiled function for arguments like these, for `call_compiled`. Compiles it, or loads it from disk.

    What is called directly becomes a part of its caller, which takes as long to optimise as it took itself.
    """
    kinds = tuple(map(typeof, examples))
    dispatcher.compile(kinds)
    result = dispatcher.overloads[kinds]
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))

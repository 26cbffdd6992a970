"""Triton's interpreter made to compute as the device does, where it does not by itself.

`correct()` before any kernel runs. Products of matrices add column after column, so that an element depends on nothing but its row
and its column (the interpreter leaves the order to BLAS, which chooses by shape, and takes bfloat16 for integers); float32
becomes bfloat16 by rounding to nearest even instead of cutting; a scalar condition spreads over a block as a condition.

Nearly half of its time goes into replacing the language's functions at every call of every kernel: here they are replaced once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from triton import language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ngramspec.backends.cuda import quantised


def correct() -> None:
    cast, splat = InterpreterBuilder.cast_impl, InterpreterBuilder.create_splat

    def dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = (_widened(x.data) if x.dtype.scalar == tl.bfloat16 else x.data.astype(np.float32) for x in (a, b))
        total = np.array(d.data, np.float32, order="C")
        _add_products(*(np.ascontiguousarray(x).reshape(-1, *x.shape[-2:]) for x in (left, right)), total.reshape(-1, *total.shape[-2:]))
        return TensorHandle(total, d.dtype.scalar)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(_narrowed(src.data), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle(_widened(src.data), tl.float32)
        return cast(self, src, dst_type)

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.dtype.scalar == tl.int1 or arg.data.dtype == np.bool_:  # a comparison has the dtype of what it compares
            return TensorHandle(np.full(ret_ty.shape, arg.data, dtype=np.bool_), tl.int1)
        return splat(self, ret_ty, arg)

    InterpreterBuilder.create_dot = dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_splat = create_splat
    _replace_once()
    quantised.ROWS_PER_PROGRAM = 512


@numba.njit
def _add_products(left: np.ndarray, right: np.ndarray, total: np.ndarray) -> None:
    """Add left [B, M, K] @ right [B, K, N] to total [B, M, N], column after column."""
    for b in range(total.shape[0]):
        for k in range(left.shape[2]):
            for i in range(total.shape[1]):
                for j in range(total.shape[2]):
                    total[b, i, j] += left[b, i, k] * right[b, k, j]


def _replace_once() -> None:
    """The language's functions, and the table of numpy's types that is otherwise built at every look-up."""
    triton_interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    triton_interpreter._patch_lang = lambda fn: triton_interpreter._LangPatchScope()
    of_block, known = triton_interpreter._get_np_dtype, dict[str, np.dtype]()

    def np_dtype(tt_dtype: Any) -> np.dtype:
        scalar = tt_dtype.scalar
        if isinstance(scalar, tl.pointer_type):
            return np.dtype(np.uint64)
        if scalar.name not in known:
            known[scalar.name] = of_block(scalar)
        return known[scalar.name]

    triton_interpreter._get_np_dtype = np_dtype


def _widened(bfloat16: np.ndarray) -> np.ndarray:
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def _narrowed(float32: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(float32), 0x7FFF, rounded).astype(np.uint16)

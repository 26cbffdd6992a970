"""Triton's interpreter made to compute as the device does, where it does not by itself.

`correct()` before any kernel runs. Products of matrices add column after column, so that an element depends on nothing but its row
and its column (the interpreter leaves the order to BLAS, which chooses by shape, and takes bfloat16 for integers); float32
becomes bfloat16 by rounding to nearest even instead of cutting; a scalar condition spreads over a block as a condition.

Most of its time goes into bookkeeping, of which it does less here: the language's functions are replaced once instead of at every call of
every kernel; types of blocks, and shapes of tensors, are made once; operands of one type are not converted; integers that overflow wrap, as
they do on the device, and are not looked for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from triton import language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from ngramspec.backends.cuda import gpu_sampler, quantised


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
    _keep_types()
    quantised.ROWS_PER_PROGRAM = 512
    gpu_sampler.SamplerWorkspace.__init__.__kwdefaults__.update(chunk=64, tile=256, listed=64)  # its models have that many tokens


@numba.njit
def _add_products(left: np.ndarray, right: np.ndarray, total: np.ndarray) -> None:
    """Add left [B, M, K] @ right [B, K, N] to total [B, M, N], column after column."""
    for b in range(total.shape[0]):
        for k in range(left.shape[2]):
            for i in range(total.shape[1]):
                for j in range(total.shape[2]):
                    total[b, i, j] += left[b, i, k] * right[b, k, j]


def _replace_once() -> None:
    """Replace the language's functions, and the table of numpy's types that is otherwise built at every look-up."""
    semantic, of_decorator = triton_interpreter.interpreter_semantic, tl.core.builtin(lambda: None).__code__

    def patch_attr(obj: object, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = (
            member.__wrapped__ if getattr(member, "__code__", None) is of_decorator else member
        )  # the decorator checks that `_semantic` is given

        def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
            return inner(*args, **kwargs, _semantic=semantic)

        scope.set_attr(obj, name, call)

    triton_interpreter._patch_attr = patch_attr
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


def _keep_types() -> None:
    """Make every type of a block once, so that tensors of one type are known by it, and convert no operands that need none."""
    semantic, tensor, core = triton_interpreter.interpreter_semantic, tl.tensor, tl.core
    blocks, shapes = dict[tuple[Any, ...], tl.block_type](), dict[int, tuple[Any, ...]]()
    init_block, equals, unwrap = tl.block_type.__init__, tl.dtype.__eq__, core._unwrap_if_constexpr
    plain = {tensor, int, float, bool, str, type(None)}
    check_operands, broadcast, cast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value, semantic.cast
    numbers = {"int32": (int, np.int32), "int64": (int, np.int64), "fp32": (float, np.float32)}  # Python's that a tensor takes as they are

    def new_block(cls: type, element_ty: Any, shape: Any) -> tl.block_type:
        key = element_ty.name, *map(unwrap, shape)
        if key not in blocks:
            blocks[key] = object.__new__(cls)
        return blocks[key]

    def init_block_once(self: tl.block_type, element_ty: Any, shape: Any) -> None:
        if "numel" not in vars(self):
            init_block(self, element_ty, shape)

    def init_tensor(self: tl.tensor, handle: TensorHandle, kind: Any) -> None:
        if id(kind) not in shapes:
            sizes = [*kind.shape] if kind.is_block() else []
            shapes[id(kind)] = tl.constexpr(math.prod(sizes)), core.tuple([tl.constexpr(size) for size in sizes]), kind
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.numel, self.shape, _ = shapes[id(kind)]

    def make_constant(like: tl.tensor, number: Any) -> tl.tensor | None:
        """A number beside a tensor: numpy spreads it."""
        kind, dtype = numbers.get(like.dtype.name, (None, None))
        if type(number) is not kind or (kind is int and not -(2**31) <= number < 2**31):
            return None
        return tensor(TensorHandle(np.array([number], dtype), like.dtype), like.type)

    def broadcast_once(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Broadcast, but leave it to numpy to spread a scalar over a block."""
        of_left, of_right = lhs.type, rhs.type
        if of_left is of_right:
            return lhs, rhs
        if of_left.is_block() != of_right.is_block():
            if of_left.is_block():
                return lhs, spread(rhs, of_left)
            return spread(lhs, of_right), rhs
        return broadcast(lhs, rhs)

    def spread(scalar: Any, block: Any) -> Any:
        data = scalar.handle.data
        kind = tl.int1 if data.dtype == np.bool_ else scalar.dtype  # a comparison has the dtype of what it compares
        data = data.astype(triton_interpreter._get_np_dtype(kind), copy=False)
        return tensor(TensorHandle(data, kind), block.with_element_ty(kind))

    def unwrap_once(o: Any) -> Any:
        kind = type(o)
        return o if kind in plain else o.value if kind is core.constexpr else unwrap(o)

    def cast_once(value: Any, kind: Any, *more: Any) -> Any:
        return value if value.dtype is kind.scalar else cast(value, kind, *more)

    def check_two_operands(lhs: Any, rhs: Any, *rules: Any, **more: Any) -> tuple[Any, Any]:
        if not isinstance(lhs, tensor):
            constant = make_constant(rhs, lhs) if isinstance(rhs, tensor) else None
            return (constant, rhs) if constant is not None else check_operands(lhs, rhs, *rules, **more)
        if not isinstance(rhs, tensor):
            if rules[:2] == (True, True) and lhs.dtype.is_ptr():
                return broadcast_once(lhs, semantic.to_tensor(rhs))
            constant = make_constant(lhs, rhs)
            return (lhs, constant) if constant is not None else check_operands(lhs, rhs, *rules, **more)
        if lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in numbers:
            return broadcast_once(lhs, rhs)
        if rules[:2] == (True, True) and lhs.dtype.is_ptr() and rhs.dtype.is_int():
            return broadcast_once(lhs, rhs)
        return check_operands(lhs, rhs, *rules, **more)

    tl.block_type.__new__, tl.block_type.__init__ = new_block, init_block_once
    tensor.__init__, TensorHandle.__post_init__ = init_tensor, lambda self: None
    tl.dtype.__eq__ = lambda self, other: self is other or equals(self, other)
    core._unwrap_if_constexpr = unwrap_once
    semantic.binary_op_type_checking_impl = check_two_operands
    semantic.broadcast_impl_value, semantic.cast = broadcast_once, cast_once
    semantic.builder.options = replace(semantic.builder.options, sanitize_overflow=False)


def _widened(bfloat16: np.ndarray) -> np.ndarray:
    return (bfloat16.astype(np.uint32) << 16).view(np.float32)


def _narrowed(float32: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(float32), 0x7FFF, rounded).astype(np.uint16)

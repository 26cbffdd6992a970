"""Matrix products on the CPU, x [T, K] with packed weights (`packing`): a row has the same bits whatever the number of rows.

Every output is one chain of fused multiply-adds over the inputs in their order, begun with the bias: neither the other rows, nor the
number of threads, nor the width of the processor's vectors, nor the format in which a weight is kept comes into it. So nothing has to be
proved on the machine. What varies is how many chains are computed at once, so that a weight that was read serves many rows.

A plain pass waits for memory: its cost is what it reads, which is why the format matters. Nothing here knows models or layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import from_dtype, get_num_threads, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from ngramspec.cpu import simd
from ngramspec.cpu.packing import DEPTH, SCALES, STORAGE, WeightFormat, pack, pack_float32
from ngramspec.cpu.simd import BYTE, CHAINS, FLOATS, INTS, LONG, STEP, WIDTH

MOST_ROWS = min(16, CHAINS)
"""Of one tile: outputs that are summed up in registers together."""
BREADTH, GROUP = 3, CHAINS // 3
"""Panels and rows of a tile where there are many rows: the panels are unpacked once for all of them."""
SOME = 4
"""Panels that a second half of the rows finds in the cache."""
CHUNK = 128
"""Rows that go through all panels before the next ones: they stay in the second cache."""
ALONE = 1 << 15
"""Multiplications up to which a second thread is not worth its start."""


@dataclass(slots=True)
class PackedPolicy:
    """In which formats the weights of one shape are kept."""

    formats: set[WeightFormat] = field(default_factory=set)
    bitwise = True

    def __str__(self) -> str:
        return " or ".join(sorted(kind.value for kind in self.formats))


class Product:
    """x @ W.T + b for W [N, K] float32, b [N] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, packed: bool = True) -> None:
        """Not `packed`: the weights as float32."""
        self.n_out, self.n_in = weight.shape
        self.format, self.weight = pack(weight) if packed else pack_float32(weight)
        self.bias = np.zeros(len(self.weight) * WIDTH, np.float32)
        if bias is not None:
            self.bias[: self.n_out] = bias.detach().numpy()

    def rows(self, x: np.ndarray, threads: int) -> np.ndarray:
        """[T, K] → [T, N], float32 in C order."""
        assert x.shape[1] == self.n_in, (x.shape, self.n_in)  # what follows reads addresses
        assert x.dtype == np.float32, x.dtype
        assert x.flags.c_contiguous, x.strides
        n_rows, n_in = len(x), self.weight.shape[1] * DEPTH
        if n_in != self.n_in:
            x = np.pad(x, ((0, 0), (0, n_in - self.n_in)))
        y = np.empty((n_rows, len(self.bias)), np.float32)
        run = _multiply_alone if n_rows * self.weight.size <= ALONE else _multiply
        run(x, self.weight, self.bias, y, threads)
        return y if len(self.bias) == self.n_out else np.ascontiguousarray(y[:, : self.n_out])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[.., K] → [.., N]"""
        return torch.from_numpy(self.rows(x.reshape(-1, x.shape[-1]).contiguous().numpy(), get_num_threads())).view(
            *x.shape[:-1], self.n_out
        )


_FORMATS = {from_dtype(storage): kind for kind, storage in STORAGE.items()}
"""By the element type that a compiled kernel sees."""


def _weights(builder: Any, kind: WeightFormat, at: Any, scale: Any, offset: Any) -> Any:
    """16 weights at this address, float32."""
    if kind in (WeightFormat.CODES, WeightFormat.CODES_BY_16):
        codes = simd.load(builder, at, ir.VectorType(BYTE, WIDTH), WIDTH)
        return simd.fused(builder, scale, builder.sitofp(builder.sext(codes, INTS), FLOATS), offset)
    if kind is WeightFormat.BFLOAT16:
        halves = simd.load(builder, at, ir.VectorType(ir.IntType(16), WIDTH), 2 * WIDTH)
        return builder.bitcast(builder.shl(builder.zext(halves, INTS), ir.Constant(INTS, [16] * WIDTH)), FLOATS)
    if kind is WeightFormat.FLOAT16:
        return builder.fpext(simd.load(builder, at, ir.VectorType(ir.HalfType(), WIDTH), 2 * WIDTH), FLOATS)
    return simd.load(builder, at, FLOATS, 4)


TURNS = DEPTH // STEP
"""Turns of the loop in a block."""


def _inputs(builder: Any, kind: WeightFormat, ws: list[Any], i: Any, distance: Any = None) -> Callable[[int], list[Any]]:
    """A function from j to the weights of the j-th input in the i-th turn through panels at `ws`. Prefetches what lies so far ahead."""
    front = SCALES if kind in (WeightFormat.CODES, WeightFormat.CODES_BY_16) else 0
    size = STORAGE[kind].itemsize
    block_bytes = front + size * DEPTH * WIDTH
    part, block = builder.urem(i, LONG(TURNS)), builder.udiv(i, LONG(TURNS))
    blocks = [builder.add(w, builder.mul(block, LONG(block_bytes))) for w in ws]
    scales = offsets = [None] * len(ws)
    if kind is WeightFormat.CODES:
        scales = [simd.load(builder, at, FLOATS, 64) for at in blocks]
        offsets = [simd.load(builder, builder.add(at, LONG(4 * WIDTH)), FLOATS, 64) for at in blocks]
    elif kind is WeightFormat.CODES_BY_16:
        half = builder.mul(builder.udiv(part, LONG(TURNS // 2)), LONG(4 * WIDTH))
        scales, offsets = [simd.load(builder, builder.add(at, half), FLOATS, 64) for at in blocks], [simd.ZEROS] * len(ws)
    for at in blocks if distance is not None else []:
        there = builder.add(builder.add(at, distance), builder.mul(part, LONG(block_bytes // TURNS)))
        for line in range(0, block_bytes // TURNS, 64):
            simd.prefetch(builder, builder.add(there, LONG(line)))
    here = [builder.add(at, builder.add(LONG(front), builder.mul(part, LONG(size * STEP * WIDTH)))) for at in blocks]

    def weights(j: int) -> list[Any]:
        at = [builder.add(start, LONG(size * WIDTH * j)) for start in here]
        return [_weights(builder, kind, *one) for one in zip(at, scales, offsets, strict=True)]

    return weights


@intrinsic(prefer_literal=True)
def _tile(typing_context, panels, rows, x, first_row, n_rows, w, first_panel, bias, y, ahead):
    """Panels × rows of y: x [T, K], w [panels, blocks, L], bias [N], y [T, N]; numbers of a row side by side.

    Rows from n_rows on are the last one again. What lies `ahead` panels further is fetched meanwhile.
    """
    n_panels, n_tile_rows, kind = panels.literal_value, rows.literal_value, _FORMATS[w.dtype]

    def codegen(context, builder, signature, args):
        def address(i):
            start, array = simd.start_of(context, builder, signature.args[i], args[i])
            return start, cgutils.unpack_tuple(builder, array.strides)[0], cgutils.unpack_tuple(builder, array.shape)

        (x, x_step, _), (w, w_step, shape), (bias, _, _), (y, y_step, _) = (address(i) for i in (2, 5, 7, 8))
        lines = [builder.add(args[3], simd.up_to(builder, r, args[4])) for r in range(n_tile_rows)]
        columns = [builder.add(args[6], LONG(p)) for p in range(n_panels)]
        outs = [builder.mul(column, LONG(4 * WIDTH)) for column in columns]
        ws = [builder.add(w, builder.mul(column, w_step)) for column in columns]
        distance = builder.mul(args[9], w_step)
        starts = [simd.load(builder, builder.add(bias, out), FLOATS, 4) for out in outs]
        xs = [builder.add(x, builder.mul(line, x_step)) for line in lines]
        n_turns = builder.mul(shape[1], LONG(TURNS))
        totals = simd.sums(builder, [starts] * n_tile_rows, xs, STEP, n_turns, lambda i: _inputs(builder, kind, ws, i, distance))
        for line, total in zip(lines, totals, strict=True):
            row = builder.add(y, builder.mul(line, y_step))
            for out, value in zip(outs, total, strict=True):
                simd.store(builder, value, builder.add(row, out))
        return context.get_dummy_value()

    whole = types.int64
    return types.void(panels, rows, x, whole, whole, w, whole, bias, y, whole), codegen


@intrinsic
def _unpack(typing_context, w, panel, out, at):
    """out[at] = the weights of a panel, float32 [panels, blocks, DEPTH * WIDTH]."""

    def codegen(context, builder, signature, args):
        start, array = simd.start_of(context, builder, w, args[0])
        to, whole = simd.start_of(context, builder, out, args[2])
        source = builder.add(start, builder.mul(args[1], cgutils.unpack_tuple(builder, array.strides)[0]))
        target = builder.add(to, builder.mul(args[3], cgutils.unpack_tuple(builder, whole.strides)[0]))
        n_turns = builder.mul(cgutils.unpack_tuple(builder, array.shape)[1], LONG(TURNS))
        with cgutils.for_range(builder, n_turns) as loop:
            weights = _inputs(builder, _FORMATS[w.dtype], [source], loop.index)
            for j in range(STEP):
                line = builder.add(builder.mul(loop.index, LONG(STEP)), LONG(j))
                simd.store(builder, weights(j)[0], builder.add(target, builder.mul(line, LONG(4 * WIDTH))))
        return context.get_dummy_value()

    return types.void(w, types.int64, out, types.int64), codegen


def _up_to(rows: int) -> Callable[..., None]:
    """Up to so many rows through panels first to end, as many at a time as registers allow."""
    panels = min(4, CHAINS // rows)

    @njit(cache=True, nogil=True)
    def run(x, first_row, n_rows, w, first, end, bias, y, fetch):
        p = first
        while p + panels <= end:
            _tile(panels, rows, x, first_row, n_rows, w, p, bias, y, fetch * panels)
            p += panels
        while p < end:
            _tile(1, rows, x, first_row, n_rows, w, p, bias, y, fetch)
            p += 1

    return run


_1, _2, _3, _4, _6 = (_up_to(rows) for rows in (1, 2, 3, 4, 6))
_8, _12, _16 = (_up_to(min(rows, MOST_ROWS)) for rows in (8, 12, 16))
_group = _up_to(GROUP)


@njit(cache=True, nogil=True)
def _some(x, first_row, n_rows, w, first, end, bias, y, fetch):
    if n_rows == 1:
        _1(x, first_row, n_rows, w, first, end, bias, y, fetch)
    elif n_rows == 2:
        _2(x, first_row, n_rows, w, first, end, bias, y, fetch)
    elif n_rows == 3:
        _3(x, first_row, n_rows, w, first, end, bias, y, fetch)
    elif n_rows == 4:
        _4(x, first_row, n_rows, w, first, end, bias, y, fetch)
    elif n_rows <= 6:
        _6(x, first_row, n_rows, w, first, end, bias, y, fetch)
    elif n_rows <= 8:
        _8(x, first_row, n_rows, w, first, end, bias, y, fetch)
    elif n_rows <= 12:
        _12(x, first_row, n_rows, w, first, end, bias, y, fetch)
    else:
        _16(x, first_row, n_rows, w, first, end, bias, y, fetch)


@njit(cache=True, nogil=True)
def _span(x, w, bias, y, first, end):
    """Panels first to end of every row."""
    n_rows = x.shape[0]
    if n_rows <= MOST_ROWS:
        _some(x, 0, n_rows, w, first, end, bias, y, 1)
        return
    if n_rows <= 2 * MOST_ROWS:  # the second half finds the panels in the cache
        half = (n_rows + 1) // 2
        for p in range(first, end, SOME):
            _some(x, 0, half, w, p, min(p + SOME, end), bias, y, 1)
            _some(x, half, n_rows - half, w, p, min(p + SOME, end), bias, y, 0)
        return
    unpacked = np.empty((BREADTH, w.shape[1], DEPTH * WIDTH), np.float32)
    for chunk in range(0, n_rows, CHUNK):
        stop = min(n_rows, chunk + CHUNK)
        for p in range(first, end, BREADTH):
            n_panels = min(BREADTH, end - p)
            for i in range(n_panels):
                _unpack(w, p + i, unpacked, i)
            for row in range(chunk, stop, GROUP):
                _group(x, row, min(GROUP, stop - row), unpacked, 0, n_panels, bias[p * WIDTH :], y[:, p * WIDTH :], 0)


@njit(cache=True, nogil=True)
def _multiply_alone(x, w, bias, y, threads):
    if x.shape[0]:
        _span(x, w, bias, y, 0, w.shape[0])


@njit(cache=True, nogil=True, parallel=True)
def _multiply(x, w, bias, y, threads):
    for t in prange(threads):
        if x.shape[0]:
            _span(x, w, bias, y, w.shape[0] * t // threads, w.shape[0] * (t + 1) // threads)

"""Multiply rows x [T, K] by packed weights (`packing`) on the CPU: a row has the same bits whatever the number of rows.

Weights in quant blocks are multiplied with 8-bit activations ("int8") or as the float32 numbers that they stand for ("float32"); all other
weights always as float32. The kernels (`codegen.kernels`) exist for a few row counts; `MatmulContext` measures them on this machine and
chooses which of them make up a given number of rows. No bit depends on that choice. Nothing here knows models or layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import get_num_threads, prange

from ngramspec.backends.cpu.arena import Arena
from ngramspec.backends.cpu.codegen.intrinsics import call_kernel
from ngramspec.backends.cpu.codegen.kernels import Kernels
from ngramspec.backends.cpu.formats import DEPTH, LINE, WIDTH, QuantFormat, WeightFormat
from ngramspec.backends.cpu.packing import PackedWeight
from ngramspec.datastore.code_cache import njit

if TYPE_CHECKING:
    import torch

MOST_ROWS = 64  # Largest number of rows that `plan_rows` plans; of more rows, the kernel with the least time per row goes first.
# A line of `MatmulContext.tables`: from STEPS on, how many rows to take next, by the number of rows that are left; from FUNCTIONS on, the
# addresses of the kernels, by their number of rows.
STEPS, FUNCTIONS = 0, MOST_ROWS + 1
TABLE = FUNCTIONS + MOST_ROWS + 1
# Fields of a matrix as compiled code sees it. LINE_OF: its line of `MatmulContext.tables`; INT8: which codes of the activations it is
# multiplied with, if any.
ADDRESS, PANELS, PANEL_BYTES, BLOCKS, SUPER_AT, CODES_AT, BIAS, LINE_OF, INT8 = range(9)
MATRIX = 9
BY_BLOCK, BY_SUPER = 1, 2  # Codes: one scale per 32 activations, or per 256.
CACHED = 1 << 18  # Bytes of panels that stay in the second-level cache while rows are multiplied.
PREFETCHED = 8  # Panels of a piece for few rows, at least: a piece's first panel is the one that has not been prefetched.
EACH = 0.25  # Extra cost of each further kernel call for a number of rows, in measured times of one row.
SHARES = 4  # Pieces of a product per thread, so that a thread that is held back leaves work to the others.


class Matrix(NamedTuple):
    """A packed weight with its bias, ready to be multiplied."""

    weight: PackedWeight
    bias: np.ndarray
    """[16 · panels] float32"""
    fields: np.ndarray
    """[MATRIX] int64"""


class MatmulContext:
    """What all products of a model share: kernels, the choice among them by number of rows, memory for weights."""

    def __init__(
        self, int8: bool, kernels: Kernels | None = None, folder: Path | None = None, *, soon_over: bool = False, arena: Arena | None = None
    ) -> None:
        """Cache kernels in `folder`. `soon_over`: for a few passes only, as in `switch`."""
        self.int8, self.kernels, self.arena = int8, kernels or Kernels(folder=folder), arena or Arena()
        self._soon_over = soon_over
        self.tables = np.zeros((0, TABLE), np.int64)
        self._made: list[Matrix] = []
        self._lines: dict[tuple[WeightFormat, bool, bool], int] = {}

    def register_matrix(self, weight: PackedWeight, bias: np.ndarray | None = None) -> Matrix:
        """Register a weight for multiplication; `bias` [N] float32, or [E, N] of one that was packed from [E, N, K]."""
        whole = np.zeros(weight.n_panels * WIDTH, np.float32)
        if bias is not None:
            bias = np.atleast_2d(bias)
            whole.reshape(len(bias), -1)[:, : bias.shape[1]] = bias
        int8 = choose_codes(weight.format, self.int8)
        fields = (
            weight.data.ctypes.data, weight.n_panels, weight.data.shape[1], weight.n_blocks, weight.super_at, weight.codes_at,
            whole.ctypes.data, self._get_line(weight.format, int8 > 0, self._soon_over), int8,
        )  # fmt: skip
        self._made.append(Matrix(weight, whole, np.array(fields, np.int64)))
        return self._made[-1]

    def select_rows(self, matrix: Matrix, first: int, end: int) -> Matrix:
        """Register rows `first` to `end` of a matrix, whose panels they share: multiples of WIDTH, or the end is the last row's."""
        weight = matrix.weight
        panels = weight.data[first // WIDTH : -(-end // WIDTH)]
        return self.register_matrix(PackedWeight(weight.format, end - first, weight.n_in, panels), matrix.bias[first:end])

    def switch(self, int8: bool, *, soon_over: bool = False) -> None:
        """Compute with 8-bit activations from now on, or without them. Copies of matrices' fields must be made again.

        `soon_over`: for a few passes only, which may be slower, so that less is compiled.
        """
        self.int8 = int8
        for m in self._made:
            one = choose_codes(m.weight.format, int8)
            m.fields[LINE_OF], m.fields[INT8] = self._get_line(m.weight.format, one > 0, soon_over), one

    def _get_line(self, fmt: WeightFormat, int8: bool, soon_over: bool) -> int:
        if (fmt, int8, soon_over) not in self._lines:
            functions = self.kernels.get_row_functions(fmt, int8, few=soon_over)
            line = np.zeros((1, TABLE), np.int64)
            for rows, address in functions.items():
                line[0, FUNCTIONS + rows] = address
            line[0, : MOST_ROWS + 1] = plan_rows(measure_kernels(functions, fmt, int8))
            self.tables = np.concatenate([self.tables, line])
            self._lines[fmt, int8, soon_over] = len(self.tables) - 1
        return self._lines[fmt, int8, soon_over]


def choose_codes(fmt: WeightFormat, int8: bool) -> int:
    """Return which codes of the activations weights of a format are multiplied with; 0: float32."""
    if not int8 or not isinstance(fmt, QuantFormat):
        return 0
    return BY_SUPER if fmt.by_super else BY_BLOCK


def measure_kernels(functions: dict[int, int], fmt: WeightFormat, int8: bool, repeat: int = 7) -> dict[int, float]:
    """Measure the seconds that each kernel takes, by its number of rows, with weights in the cache."""
    n_blocks, n_panels = 24, 8
    size = QuantFormat.count_panel_bytes(fmt, n_blocks) if isinstance(fmt, QuantFormat) else n_blocks * DEPTH * WIDTH * fmt.itemsize
    weights = Arena().take(size * n_panels)
    weight = PackedWeight(fmt, n_panels * WIDTH, n_blocks * DEPTH, weights.reshape(n_panels, size))
    most = max(functions)
    x, y = np.zeros((most, n_blocks * DEPTH), np.float32), np.zeros((most, n_panels * WIDTH), np.float32)
    (codes, act_scales), bias = make_code_buffers(*x.shape), np.zeros(n_panels * WIDTH, np.float32)
    inputs = codes if int8 else x
    arguments = (
        weights.ctypes.data, n_panels, size, n_blocks, weight.super_at, weight.codes_at, inputs.ctypes.data, inputs.strides[0],
        act_scales.ctypes.data, act_scales.strides[0], bias.ctypes.data, y.ctypes.data, y.strides[0],
    )  # fmt: skip
    best = dict.fromkeys(functions, np.inf)
    for _ in range(repeat):
        for rows, address in functions.items():
            start = time.perf_counter()
            _call_often(address, 8, arguments)
            best[rows] = min(best[rows], time.perf_counter() - start)
    return best


def plan_rows(seconds: dict[int, float]) -> np.ndarray:
    """Plan which kernels make up n rows: [MOST_ROWS + 1], how many rows to take next if n are left, so that the total time is least.

    The part with the most rows comes first: while it is multiplied, the weights come from memory. Each further part costs more than what
    was measured with weights in the cache, by EACH times the time of one row.
    """
    least, first = np.zeros(MOST_ROWS + 1), np.zeros(MOST_ROWS + 1, np.int64)
    again = EACH * seconds[1]
    for n in range(1, MOST_ROWS + 1):
        ways = [(round((least[n - rows] + each + again) * 1e12), -rows) for rows, each in seconds.items() if rows <= n]
        cost, rows = min(ways)
        least[n], first[n] = cost * 1e-12, -rows
    first[MOST_ROWS] = min(seconds, key=lambda rows: seconds[rows] / rows)  # here and beyond: what takes least a row
    return first


@njit(cache=True, nogil=True)
def _call_often(address, times, arguments):
    for _ in range(times):
        call_kernel(address, arguments)


def make_code_buffers(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Make buffers for the codes [.., 2, K'] int8 and activation scales [.., 2, K' / 32, 4] float32 of rows with this shape, [.., K].

    K' is K rounded up to an odd number of lines of the cache. A kernel reads the same inputs of up to 16 rows, which would share a set of
    the first-level cache if they were multiples of 4,096 bytes apart, as with K = 2,048 or 4,096; a set has room for 8 of them. Rows begin
    at a line, since AMX takes 1.3 times as long for rows that cross one.
    """
    *rows, n_inputs = shape
    n_lines = -(-n_inputs // LINE) | 1
    codes = np.zeros(math.prod(rows) * 2 * n_lines * LINE + LINE, np.int8)
    codes = codes[-codes.ctypes.data % LINE :][: len(codes) - LINE]
    return codes.reshape(*rows, 2, n_lines * LINE), np.zeros((*rows, 2, n_lines * LINE // DEPTH, 4), np.float32)


@njit(cache=True, nogil=True)
def locate_rows(x, codes, act_scales):
    """Return where x [T, K], its codes [T, 2, K] and activation scales [T, 2, K / 32, 4] lie, as `multiply` takes it.

    Of each the address and the bytes between rows, of the latter two also those between the codes by block and by super-block.
    """
    return (
        x.ctypes.data, x.strides[0], codes.ctypes.data, codes.strides[0], codes.strides[1], act_scales.ctypes.data, act_scales.strides[0],
        act_scales.strides[1],
    )  # fmt: skip


@njit(cache=True, nogil=True)
def multiply(m, tables, first, end, n_rows, inputs, y, y_step):
    """Multiply all rows by panels first to end of a matrix m [MATRIX]; `inputs`: see `locate_rows`; y is an address.

    `y_step`: bytes between two rows of y.
    """
    x_at, x_step, codes, codes_step, codes_shift, act_scales_at, act_scales_step, act_scales_shift = inputs
    x, act_scales = np.int64(x_at), np.int64(act_scales_at)
    line, weights = m[LINE_OF], m[ADDRESS] + first * m[PANEL_BYTES]
    bias, to = m[BIAS] + first * 4 * WIDTH, y + first * 4 * WIDTH
    if m[INT8]:
        kind = m[INT8] - BY_BLOCK
        x, x_step = np.int64(codes) + kind * codes_shift, codes_step
        act_scales += kind * act_scales_shift
    row = 0
    while row < n_rows:
        rows = tables[line, STEPS + min(n_rows - row, MOST_ROWS)]
        call_kernel(
            tables[line, FUNCTIONS + rows],
            (
                weights, end - first, m[PANEL_BYTES], m[BLOCKS], m[SUPER_AT], m[CODES_AT], x + row * x_step, x_step,
                act_scales + row * act_scales_step, act_scales_step, bias, to + row * y_step, y_step,
            ),
        )  # fmt: skip
        row += rows


@njit(cache=True, nogil=True)
def count_panels_per_piece(n_panels, bytes_of_one, n_threads, n_rows):
    """Return how many panels make up one piece of work."""
    most = CACHED // bytes_of_one
    if n_rows <= MOST_ROWS:  # which are multiplied at once, or nearly so
        most = max(most, PREFETCHED)
    return max(1, min(n_panels // (SHARES * n_threads), most))


@njit(cache=True, nogil=True)
def quantise_row(function, x, codes, act_scales):
    """Quantise a row x [K] to codes [2, K] and activation scales [2, K / 32, 4], by blocks and by super-blocks, as far as needed.

    `function`: see `Kernels.get_quantise`; K is a multiple of 32.
    """
    if function:
        call_kernel(
            function,
            (
                x.ctypes.data, x.shape[0] // DEPTH, codes[0].ctypes.data, act_scales[0].ctypes.data, codes[1].ctypes.data,
                act_scales[1].ctypes.data, 0, 0, 0, 0, 0, 0, 0,
            ),
        )  # fmt: skip


@njit(cache=True, nogil=True, parallel=True)
def _multiply_all(matrices, columns, tables, quantise, x, codes, act_scales, y, threads):
    """Compute y [T, sum of columns] of all matrices [M, MATRIX], the i-th one's outputs from columns[i] on."""
    n_rows = x.shape[0]
    if codes.shape[0]:
        for t in prange(threads):
            for r in range(n_rows * t // threads, n_rows * (t + 1) // threads):
                quantise_row(quantise, x[r], codes[r], act_scales[r])
    inputs = locate_rows(x, codes, act_scales)
    for i in range(matrices.shape[0]):
        m = matrices[i]
        step = count_panels_per_piece(m[PANELS], m[PANEL_BYTES], threads, n_rows)
        to = y.ctypes.data + 4 * columns[i]
        for j in prange((m[PANELS] + step - 1) // step):
            first = np.int64(j) * step
            multiply(m, tables, first, min(m[PANELS], first + step), n_rows, inputs, to, y.strides[0])


class CpuProduct:
    """A product x @ W.T + b for one weight, or for several that see the same x."""

    def __init__(self, context: MatmulContext, matrices: Sequence[Matrix]) -> None:
        self.context, self.matrices = context, tuple(matrices)
        self.n_in, self.sizes = matrices[0].weight.n_in, [m.weight.n_out for m in matrices]
        self.columns = np.concatenate([[0], np.cumsum([m.weight.n_panels * WIDTH for m in matrices])]).astype(np.int64)

    def multiply(self, x: np.ndarray, threads: int) -> np.ndarray:
        """Multiply rows [T, K] to [T, C], float32 in C order; the i-th weight's outputs begin at columns[i]."""
        assert x.shape[1] == self.n_in, (x.shape, self.n_in)  # what follows reads addresses
        assert x.dtype == np.float32, x.dtype
        assert x.flags.c_contiguous, x.strides
        n_rows, n_in = len(x), self.matrices[0].weight.n_blocks * DEPTH
        if n_in != self.n_in:
            x = np.pad(x, ((0, 0), (0, n_in - self.n_in)))
        y = np.empty((n_rows, int(self.columns[-1])), np.float32)
        if n_rows:
            fields = np.stack([m.fields for m in self.matrices])
            n_codes = n_rows if fields[:, INT8].any() else 0
            codes, act_scales = make_code_buffers(n_codes, n_in)
            function = self.context.kernels.get_quantise(m.weight.format for m in self.matrices) if n_codes else 0
            _multiply_all(fields, self.columns, self.context.tables, function, x, codes, act_scales, y, threads)
        return y

    def multiply_split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Multiply [.., K] to each weight's [.., N]."""
        import torch

        y = torch.from_numpy(self.multiply(x.reshape(-1, x.shape[-1]).contiguous().numpy(), get_num_threads()))
        return [y[:, at : at + n].reshape(*x.shape[:-1], n) for at, n in zip(self.columns.tolist(), self.sizes, strict=False)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [.., K] to [.., N] for a single weight."""
        return self.multiply_split(x)[0]


@njit(cache=True, nogil=True)
def _unpack_rows(function, data, n_blocks, super_at, codes_at, rows, result):
    panel, last = np.empty((n_blocks * DEPTH, WIDTH), np.float32), -1
    for i in range(rows.shape[0]):
        p, lane = rows[i] // WIDTH, rows[i] % WIDTH
        if p != last:
            call_kernel(function, (data[p].ctypes.data, n_blocks, super_at, codes_at, panel.ctypes.data, 0, 0, 0, 0, 0, 0, 0, 0))
            last = p
        for k in range(result.shape[1]):
            result[i, k] = panel[k, lane]


def unpack_rows(kernels: Kernels, weight: PackedWeight, ids: np.ndarray) -> np.ndarray:
    """Return rows ids [n] of a weight, dequantised to float32 [n, K]."""
    result = np.empty((len(ids), weight.n_in), np.float32)
    _unpack_rows(
        kernels.get_unpack(weight.format), weight.data, weight.n_blocks, weight.super_at, weight.codes_at, ids.astype(np.int64), result
    )
    return result

"""Pack weights for the matrix product: rows of a file's quant blocks go in, panels of 16 outputs of the same size come out (`formats`).

Blocks are taken apart bit by bit as GGML lays them out (ggml-common.h); nothing is computed with them. Large matrices are read piece by
piece. The module does not know who multiplies with them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import prange

from ngramspec.backends.cpu.formats import DEPTH, LINE, SUPER, WIDTH, PlainFormat, QuantFormat, WeightFormat, count_panel_bytes, get_format
from ngramspec.datastore.code_cache import njit

PIECE = 16 << 20  # Bytes of a matrix that are read at a time.
_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _IQ4_NL, _Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, _IQ4_XS = range(12)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] in packed panels."""

    format: WeightFormat
    n_out: int
    n_in: int
    data: np.ndarray
    """[panels, bytes of a panel] uint8, at an address that is a multiple of 64."""

    @property
    def n_panels(self) -> int:
        return len(self.data)

    @property
    def n_blocks(self) -> int:
        return -(-self.n_in // DEPTH)

    @property
    def super_at(self) -> int:
        return self.format.super_at(self.n_blocks) if isinstance(self.format, QuantFormat) else 0

    @property
    def codes_at(self) -> int:
        return self.format.codes_at(self.n_blocks) if isinstance(self.format, QuantFormat) else 0


class Arena:
    """Allocates memory for weights in large pages, if the system has them."""

    PIECE = 256 << 20

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)
        self.n_bytes = 0

    def take(self, n_bytes: int) -> np.ndarray:
        """Take [n_bytes] uint8, zeros, at an address that is a multiple of 64. Raises MemoryError."""
        n_bytes = -(-n_bytes // LINE) * LINE
        if n_bytes > len(self._free):
            try:
                pages = mmap.mmap(-1, max(self.PIECE, n_bytes))
            except OSError as e:
                raise MemoryError(f"{n_bytes} bytes for weights: {e}") from e
            if hasattr(mmap, "MADV_HUGEPAGE"):
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._free = np.frombuffer(pages, np.uint8)
        taken, self._free = self._free[:n_bytes], self._free[n_bytes:]
        self.n_bytes += n_bytes
        return taken


def packed_bytes(kind: str, n_out: int, n_in: int) -> int:
    """Return the bytes of a weight [N, K] of GGML's type `kind` once packed."""
    return -(-n_out // WIDTH) * count_panel_bytes(get_format(kind), -(-n_in // DEPTH))


def pack(kind: str, shape: Sequence[int], rows: Callable[[int, int], np.ndarray], arena: Arena) -> PackedWeight:
    """Pack a weight of shape [N, K] and GGML's type `kind`; `rows(first, end)` returns its rows, uint8 [end - first, bytes of a row].

    Raises MemoryError, and what `rows` raises.
    """
    fmt, (n_out, n_in) = get_format(kind), shape
    n_panels, n_blocks = -(-n_out // WIDTH), -(-n_in // DEPTH)
    data = arena.take(packed_bytes(kind, n_out, n_in)).reshape(n_panels, -1)
    weight = PackedWeight(fmt, n_out, n_in, data)
    row_bytes = max(1, len(rows(0, 1)[0]))
    step = max(1, PIECE // row_bytes // WIDTH) * WIDTH
    for first in range(0, n_out, step):
        some = np.ascontiguousarray(rows(first, min(n_out, first + step)))
        panels = data[first // WIDTH : -(-min(n_out, first + step) // WIDTH)]
        if isinstance(fmt, PlainFormat):
            numbers = np.dtype(np.uint32 if fmt is PlainFormat.F32 else np.uint16)
            _pack_numbers(some.view(numbers), panels.view(numbers).reshape(len(panels), n_blocks * DEPTH, WIDTH))
        else:
            assert n_in % DEPTH == 0, (kind, n_in)
            _pack_blocks(_KINDS.index(kind), some, panels, n_blocks, weight.super_at, weight.codes_at)
    return weight


@njit(cache=True, nogil=True, parallel=True)
def _pack_numbers(rows, panels):
    n, k = rows.shape
    for panel in prange(panels.shape[0]):
        p = np.int64(panel)
        for lane in range(min(WIDTH, n - p * WIDTH)):
            for j in range(k):
                panels[p, j, lane] = rows[p * WIDTH + lane, j]


@njit(cache=True, nogil=True)
def _read_byte(row, i):
    """Return a byte as int64: numba would turn uint8 beside int64 into float64."""
    return np.int64(row[i])


@njit(cache=True, nogil=True)
def _copy_half(to, at, lane, source, s):
    """Copy a float16 of output `lane` to its place among those of 16 outputs."""
    to[at + 2 * lane], to[at + 2 * lane + 1] = source[s], source[s + 1]


@njit(cache=True, nogil=True)
def _copy_nibbles(to, at, lane, source, s):
    """Copy 16 bytes whose low halves are the first 16 inputs, as they are."""
    for v in range(4):
        for j in range(4):
            to[at + LINE * v + 4 * lane + j] = source[s + 4 * v + j]


@njit(cache=True, nogil=True)
def _pack_plane_4(to, at, lane, codes):
    for v in range(4):
        for j in range(4):
            to[at + LINE * v + 4 * lane + j] = (codes[4 * v + j] & 15) | (codes[16 + 4 * v + j] & 15) << 4


@njit(cache=True, nogil=True)
def _pack_plane_2(to, at, lane, codes, low):
    for v in range(2):
        for j in range(4):
            value = 0
            for g in range(4):
                value |= (_read_byte(codes, 16 * v + 4 * g + j) >> low & 3) << 2 * g
            to[at + LINE * v + 4 * lane + j] = value


@njit(cache=True, nogil=True)
def _pack_plane_1(to, at, lane, codes, low):
    for j in range(4):
        value = 0
        for g in range(8):
            value |= (_read_byte(codes, 4 * g + j) >> low & 1) << g
        to[at + 4 * lane + j] = value


@njit(cache=True, nogil=True, parallel=True)
def _pack_blocks(kind, rows, panels, n_blocks, super_at, codes_at):
    n = rows.shape[0]
    for panel in prange(panels.shape[0]):
        p = np.int64(panel)
        codes = np.empty(DEPTH, np.uint8)
        for lane in range(min(WIDTH, n - p * WIDTH)):
            if kind >= _Q2_K:
                _pack_super_row(kind, rows[p * WIDTH + lane], panels[p], lane, n_blocks, super_at, codes_at, codes)
            else:
                _pack_row(kind, rows[p * WIDTH + lane], panels[p], lane, n_blocks, codes_at, codes)


@njit(cache=True, nogil=True)
def _pack_row(kind, row, to, lane, n_blocks, codes_at, codes):
    offsets = kind in (_Q4_1, _Q5_1)
    size = row.shape[0] // n_blocks
    scale_bytes = 4 * WIDTH if offsets else 2 * WIDTH
    for b in range(n_blocks):
        s = b * size
        _copy_half(to, b * scale_bytes, lane, row, s)
        if offsets:
            _copy_half(to, b * scale_bytes + 2 * WIDTH, lane, row, s + 2)
        q = s + (4 if offsets else 2)
        if kind == _Q8_0:
            at = codes_at + b * DEPTH * WIDTH
            for g in range(8):
                for j in range(4):
                    to[at + LINE * g + 4 * lane + j] = _read_byte(row, q + 4 * g + j) ^ 128
        elif kind in (_Q5_0, _Q5_1):
            at = codes_at + b * 5 * LINE
            _copy_nibbles(to, at, lane, row, q + 4)
            for i in range(DEPTH):
                codes[i] = _read_byte(row, q + (i >> 3)) >> (i & 7) & 1
            _pack_plane_1(to, at + 4 * LINE, lane, codes, 0)
        else:
            _copy_nibbles(to, codes_at + b * 4 * LINE, lane, row, q)


@njit(cache=True, nogil=True)
def _pack_super_row(kind, row, to, lane, n_blocks, super_at, codes_at, codes):
    n_supers = n_blocks // SUPER
    size = row.shape[0] // n_supers
    for u in range(n_supers):
        s = u * size
        if kind in (_Q4_K, _Q5_K):
            _copy_half(to, super_at + u * 4 * WIDTH, lane, row, s)
            _copy_half(to, super_at + u * 4 * WIDTH + 2 * WIDTH, lane, row, s + 2)
        elif kind == _Q2_K:
            _copy_half(to, super_at + u * 4 * WIDTH, lane, row, s + 80)
            _copy_half(to, super_at + u * 4 * WIDTH + 2 * WIDTH, lane, row, s + 82)
        else:
            d = 108 if kind == _Q3_K else (208 if kind == _Q6_K else 0)
            _copy_half(to, super_at + u * 2 * WIDTH, lane, row, s + d)
        for k in range(SUPER):
            b = u * SUPER + k
            if kind in (_Q4_K, _Q5_K):
                t = s + 4
                if k < 4:
                    scale, least = _read_byte(row, t + k) & 63, _read_byte(row, t + k + 4) & 63
                else:
                    scale = (_read_byte(row, t + k + 4) & 15) | _read_byte(row, t + k - 4) >> 6 << 4
                    least = _read_byte(row, t + k + 4) >> 4 | _read_byte(row, t + k) >> 6 << 4
                to[b * 2 * WIDTH + lane], to[b * 2 * WIDTH + WIDTH + lane] = scale, least
                q = s + (16 if kind == _Q4_K else 48) + 32 * (k // 2)
                shift = 4 * (k % 2)
                for i in range(DEPTH):
                    codes[i] = _read_byte(row, q + i) >> shift & 15
                at = codes_at + b * (4 if kind == _Q4_K else 5) * LINE
                _pack_plane_4(to, at, lane, codes)
                if kind == _Q5_K:
                    for i in range(DEPTH):
                        codes[i] = _read_byte(row, s + 16 + i) >> k & 1
                    _pack_plane_1(to, at + 4 * LINE, lane, codes, 0)
            elif kind == _Q6_K:
                for half in range(2):
                    to[b * 2 * WIDTH + half * WIDTH + lane] = _read_byte(row, s + 192 + 2 * k + half) ^ 128
                h, turn = k // 4, k % 4
                low, high = s + 64 * h + 32 * (turn % 2), s + 128 + 32 * h
                for i in range(DEPTH):
                    codes[i] = (_read_byte(row, low + i) >> 4 * (turn // 2) & 15) | (_read_byte(row, high + i) >> 2 * turn & 3) << 4
                at = codes_at + b * 6 * LINE
                _pack_plane_4(to, at, lane, codes)
                _pack_plane_2(to, at + 4 * LINE, lane, codes, 4)
            elif kind == _Q2_K:
                for half in range(2):
                    both = _read_byte(row, s + 2 * k + half)
                    to[b * 4 * WIDTH + half * WIDTH + lane] = both & 15
                    to[b * 4 * WIDTH + (2 + half) * WIDTH + lane] = both >> 4
                for i in range(DEPTH):
                    codes[i] = _read_byte(row, s + 16 + 32 * (k // 4) + i) >> 2 * (k % 4) & 3
                _pack_plane_2(to, codes_at + b * 2 * LINE, lane, codes, 0)
            elif kind == _Q3_K:
                for half in range(2):
                    i = 2 * k + half
                    low = _read_byte(row, s + 96 + i) & 15 if i < 8 else _read_byte(row, s + 96 + i - 8) >> 4
                    to[b * 2 * WIDTH + half * WIDTH + lane] = low | (_read_byte(row, s + 104 + i % 4) >> 2 * (i // 4) & 3) << 4
                for i in range(DEPTH):
                    codes[i] = (_read_byte(row, s + 32 + 32 * (k // 4) + i) >> 2 * (k % 4) & 3) | (_read_byte(row, s + i) >> k & 1) << 2
                at = codes_at + b * 3 * LINE
                _pack_plane_2(to, at, lane, codes, 0)
                _pack_plane_1(to, at + 2 * LINE, lane, codes, 2)
            else:
                high = _read_byte(row, s + 2 + k // 4) >> 2 * (k % 4) & 3
                to[b * WIDTH + lane] = (_read_byte(row, s + 4 + k // 2) >> 4 * (k % 2) & 15) | high << 4
                _copy_nibbles(to, codes_at + b * 4 * LINE, lane, row, s + 8 + 16 * k)

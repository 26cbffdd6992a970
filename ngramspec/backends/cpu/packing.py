"""Pack weights for the matrix product: rows of a file's quant blocks go in, panels of 16 outputs of the same size come out (`formats`).

Blocks are taken apart as GGML lays them out (ggml-common.h), four codes at a time: a word of 4 bytes goes in, a word of a panel's vector
comes out. Nothing is computed with them. Several threads read and pack a piece of a matrix each, small enough to stay in their caches. The
module does not know who multiplies with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
from numba import get_num_threads

from ngramspec.backends.cpu.arena import Arena
from ngramspec.backends.cpu.codegen.intrinsics import load_word, store_word
from ngramspec.backends.cpu.formats import DEPTH, LINE, SUPER, WIDTH, PlainFormat, QuantFormat, WeightFormat, count_panel_bytes, get_format
from ngramspec.backends.cpu.iq_blocks import KINDS_OF_TABLES, unpack_blocks
from ngramspec.datastore.code_cache import njit

PIECE = 1 << 20  # Bytes of a matrix that a thread reads at a time.
_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
_Q4_0, _Q4_1, _Q5_0, _Q5_1, _Q8_0, _IQ4_NL, _MXFP4, _Q2_K, _Q3_K, _Q4_K, _Q5_K, _Q6_K, _IQ4_XS = range(13)
_TABLE_32, _TABLE_16 = 13, 14  # of IQ1, IQ2 and IQ3, with a scale for 32 or 16 inputs
# The low bit, 2 bits and 4 bits of each byte of a word.
_1, _2, _4 = np.uint64(0x01010101), np.uint64(0x03030303), np.uint64(0x0F0F0F0F)


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


def packed_bytes(kind: str, n_out: int, n_in: int) -> int:
    """Return the bytes of a weight [N, K] of GGML's type `kind` once packed."""
    return -(-n_out // WIDTH) * count_panel_bytes(get_format(kind), -(-n_in // DEPTH))


class PackingThreads:
    """Threads that pack one matrix after the other. When the context ends, all are packed; then it raises what a thread raised."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(get_num_threads())
        self._pending: list[Future[None]] = []

    def start(self, pack_piece: Callable[[tuple[int, int]], None], pieces: Sequence[tuple[int, int]]) -> None:
        self._pending += [self._pool.submit(pack_piece, piece) for piece in pieces]

    def __enter__(self) -> PackingThreads:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            for piece in self._pending if kind is None else ():
                piece.result()
        finally:
            self._pool.shutdown(cancel_futures=True)


def pack(
    kind: str, shape: Sequence[int], rows: Callable[[int, int], np.ndarray], arena: Arena, threads: PackingThreads | None = None
) -> PackedWeight:
    """Pack a weight of shape [N, K] and GGML's type `kind`; `rows(first, end)` returns its rows, uint8 [end - first, bytes of a row].

    Of a shape [E, N, K] every [N, K] is packed into panels of its own. `rows` is called by several threads at once. With `threads` they
    pack after this has returned. Raises MemoryError, and what `rows` raises.
    """
    *lead, n_out, n_in = shape
    fmt, n_each = get_format(kind), lead[0] if lead else 1
    n_panels, n_blocks = -(-n_out // WIDTH), -(-n_in // DEPTH)
    data = arena.take(n_each * packed_bytes(kind, n_out, n_in)).reshape(n_each * n_panels, -1)
    weight = PackedWeight(fmt, n_each * n_out, n_in, data)
    row_bytes = max(1, len(rows(0, 1)[0]))
    step = max(1, PIECE // row_bytes // WIDTH) * WIDTH
    assert isinstance(fmt, PlainFormat) or n_in % DEPTH == 0, (kind, n_in)

    def pack_piece(piece: tuple[int, int]) -> None:
        each, first = piece
        end = min(n_out, first + step)
        some = np.ascontiguousarray(rows(each * n_out + first, each * n_out + end))
        panels = data[each * n_panels + first // WIDTH : each * n_panels + -(-end // WIDTH)]
        if isinstance(fmt, PlainFormat):
            numbers = np.dtype(np.uint32 if fmt is PlainFormat.F32 else np.uint16)
            _pack_numbers(some.view(numbers), panels.view(numbers).reshape(len(panels), n_blocks * DEPTH, WIDTH))
        else:
            if kind in KINDS_OF_TABLES:
                some, number = unpack_blocks(kind, some), _TABLE_16 if fmt.by_16 else _TABLE_32
            else:
                number = _KINDS.index(kind)
            _pack_blocks(number, some, panels, n_blocks, weight.super_at, weight.codes_at)

    pieces = [(each, first) for each in range(n_each) for first in range(0, n_out, step)]
    with nullcontext(threads) if threads else PackingThreads() as started:
        started.start(pack_piece, pieces)
    return weight


@njit(cache=True, nogil=True)
def _pack_numbers(rows, panels):
    n, k = rows.shape
    for p in range(panels.shape[0]):
        for j in range(k):
            for lane in range(min(WIDTH, n - p * WIDTH)):
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
def _write_power(to, at, lane, exponent):
    """Write 2 ** (exponent - 128) as bfloat16, to the place of output `lane` among those of 16 outputs."""
    bits = (exponent - 1) << 7 if exponent >= 2 else 32 << exponent
    to[at + 2 * lane], to[at + 2 * lane + 1] = bits & 255, bits >> 8


@njit(cache=True, nogil=True)
def _load(address, word, shift, mask):
    """Return a word's bits from `shift` on that are in `mask`."""
    return (load_word(address + 4 * word) >> np.uint64(shift)) & mask


@njit(cache=True, nogil=True)
def _copy_nibbles(to, source):
    """Copy 16 bytes whose low halves are the first 16 inputs, as they are."""
    for v in range(4):
        store_word(to + LINE * v, load_word(source + 4 * v))


@njit(cache=True, nogil=True)
def _pack_plane_4(to, source, shift):
    """Pack the 4 bits from `shift` on of 32 bytes."""
    for v in range(4):
        store_word(to + LINE * v, _load(source, v, shift, _4) | _load(source, v + 4, shift, _4) << np.uint64(4))


@njit(cache=True, nogil=True)
def _pack_plane_2(to, source, shift):
    """Pack the 2 bits from `shift` on of 32 bytes."""
    for v in range(2):
        word = np.uint64(0)
        for g in range(4):
            word |= _load(source, 4 * v + g, shift, _2) << np.uint64(2 * g)
        store_word(to + LINE * v, word)


@njit(cache=True, nogil=True)
def _pack_plane_1(to, source, shift):
    """Pack bit `shift` of 32 bytes."""
    word = np.uint64(0)
    for g in range(8):
        word |= _load(source, g, shift, _1) << np.uint64(g)
    store_word(to, word)


@njit(cache=True, nogil=True)
def _pack_bits(to, source):
    """Pack 32 bits that are side by side: bit 4 g + j becomes bit g of byte j."""
    bits, word = load_word(source), np.uint64(0)
    for j in range(4):
        for g in range(8):
            word |= (bits >> np.uint64(4 * g + j) & np.uint64(1)) << np.uint64(8 * j + g)
    store_word(to, word)


@njit(cache=True, nogil=True)
def _pack_blocks(kind, rows, panels, n_blocks, super_at, codes_at):
    n = rows.shape[0]
    for p in range(panels.shape[0]):
        for lane in range(min(WIDTH, n - p * WIDTH)):
            row, to = rows[p * WIDTH + lane], panels[p]
            if kind >= _Q2_K:
                _pack_super_row(kind, row, to, lane, n_blocks, super_at, to.ctypes.data + codes_at + 4 * lane)
            else:
                _pack_row(kind, row, to, lane, n_blocks, to.ctypes.data + codes_at + 4 * lane)


@njit(cache=True, nogil=True)
def _pack_row(kind, row, to, lane, n_blocks, codes_to):
    """Pack a row [bytes] of blocks with scales of their own; `codes_to`: address of the lane's first word of codes."""
    offsets = kind in (_Q4_1, _Q5_1)
    size = row.shape[0] // n_blocks
    scale_bytes = 4 * WIDTH if offsets else 2 * WIDTH
    for b in range(n_blocks):
        s = b * size
        if kind == _MXFP4:
            _write_power(to, b * scale_bytes, lane, _read_byte(row, s))
        else:
            _copy_half(to, b * scale_bytes, lane, row, s)
        if offsets:
            _copy_half(to, b * scale_bytes + 2 * WIDTH, lane, row, s + 2)
        q = row.ctypes.data + s + (1 if kind == _MXFP4 else (4 if offsets else 2))
        if kind == _Q8_0:
            for g in range(8):
                store_word(codes_to + (8 * b + g) * LINE, load_word(q + 4 * g) ^ np.uint64(0x80808080))
        elif kind in (_Q5_0, _Q5_1):
            _copy_nibbles(codes_to + 5 * b * LINE, q + 4)
            _pack_bits(codes_to + (5 * b + 4) * LINE, q)
        else:
            _copy_nibbles(codes_to + 4 * b * LINE, q)


@njit(cache=True, nogil=True)
def _pack_super_row(kind, row, to, lane, n_blocks, super_at, codes_to):
    """Pack a row [bytes] of super-blocks; `codes_to`: address of the lane's first word of codes."""
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
        source = row.ctypes.data + s
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
                at = codes_to + b * (4 if kind == _Q4_K else 5) * LINE
                _pack_plane_4(at, source + (16 if kind == _Q4_K else 48) + 32 * (k // 2), 4 * (k % 2))
                if kind == _Q5_K:
                    _pack_plane_1(at + 4 * LINE, source + 16, k)
            elif kind == _Q6_K:
                for half in range(2):
                    to[b * 2 * WIDTH + half * WIDTH + lane] = _read_byte(row, s + 192 + 2 * k + half) ^ 128
                h, turn, at = k // 4, k % 4, codes_to + 6 * b * LINE
                _pack_plane_4(at, source + 64 * h + 32 * (turn % 2), 4 * (turn // 2))
                _pack_plane_2(at + 4 * LINE, source + 128 + 32 * h, 2 * turn)
            elif kind == _Q2_K:
                for half in range(2):
                    both = _read_byte(row, s + 2 * k + half)
                    to[b * 4 * WIDTH + half * WIDTH + lane] = both & 15
                    to[b * 4 * WIDTH + (2 + half) * WIDTH + lane] = both >> 4
                _pack_plane_2(codes_to + 2 * b * LINE, source + 16 + 32 * (k // 4), 2 * (k % 4))
            elif kind == _Q3_K:
                for half in range(2):
                    i = 2 * k + half
                    low = _read_byte(row, s + 96 + i) & 15 if i < 8 else _read_byte(row, s + 96 + i - 8) >> 4
                    to[b * 2 * WIDTH + half * WIDTH + lane] = low | (_read_byte(row, s + 104 + i % 4) >> 2 * (i // 4) & 3) << 4
                at = codes_to + 3 * b * LINE
                _pack_plane_2(at, source + 32 + 32 * (k // 4), 2 * (k % 4))
                _pack_plane_1(at + 2 * LINE, source, k)
            elif kind in (_TABLE_32, _TABLE_16):
                n_parts = kind - _TABLE_32 + 1
                for part in range(n_parts):
                    to[(b * n_parts + part) * WIDTH + lane] = _read_byte(row, s + 2 + 2 * k + part)
                _copy_nibbles(codes_to + 4 * b * LINE, source + 18 + 16 * k)
            else:
                high = _read_byte(row, s + 2 + k // 4) >> 2 * (k % 4) & 3
                to[b * WIDTH + lane] = (_read_byte(row, s + 4 + k // 2) >> 4 * (k % 2) & 15) | high << 4
                _copy_nibbles(codes_to + 4 * b * LINE, source + 8 + 16 * k)

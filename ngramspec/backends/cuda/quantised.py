"""Multiply rows on a CUDA device by weights that stay in quant blocks of 4 to 8 bits, with the bits of `CudaProduct` and dequantised
weights.

The module knows quant blocks, codes and rows, nothing of models or files. `pack` takes rows of GGML's blocks; a `CudaPackedWeight` keeps
them on a device, as large as they were, and `CudaQuantisedProduct` multiplies with it as `CudaProduct` does: K in the same pieces and
order, each weight in float32 as `gguf.quants.dequantize` computes it, rounded to the dtype of x.

A unit is 64 columns of a weight. Its codes of all outputs lie side by side, so that a tile reads a contiguous run of memory. Everything
else of a unit is in 32-bit words, one output's beside the next one's, so that a thread copies at least 4 bytes to shared memory at a time:

- codes [units, N, bytes]: 8-bit codes take a byte per column. Of smaller codes, the low four bits of a chunk of columns and of the next
  chunk share bytes, so that no two columns change places on the way to the matrix instruction. A chunk is 32 columns (Q6_K: 16);
- words [units, W, N] int32: scales, minima, then the upper bits of the codes, one word per chunk;
- supers [K / 256, N] int32: two float16, the factors of the scales and of the minima of 256 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.overlap import await_previous
from ngramspec.backends.cuda.row_invariant_linear import CudaProduct, Tile, find_bounds, store
from ngramspec.models.tensor_source import KINDS

UNIT = 64
ROWS_PER_PROGRAM = 16  # rows that a program dequantises

_HALVES, _MINIMA, _BYTES, _BYTE_MINIMA = range(4)


@dataclass(frozen=True, slots=True)
class CudaQuantFormat:
    """Layout of a kind of quant blocks. A weight is scale · (code - zero), or scale · code - minimum."""

    bits: int
    """Bits of a code; codes of 8 bits are signed."""
    scales: int
    """Kind of scales. `_HALVES`, `_MINIMA`: float16 per 32 columns, alone or with minima. `_BYTES`, `_BYTE_MINIMA`: integers per 16
    columns, or per 32 with minima, times the float16 of 256 columns."""
    zero: int = 0
    columns: int = 0
    """Columns that share a word of `supers`; 0: there are none."""

    @property
    def chunk(self) -> int:
        """Columns that enter a matrix product together; one word has their upper bits."""
        return 16 if self.bits == 6 else 32

    @property
    def n_words(self) -> int:
        scales = {_HALVES: 1, _MINIMA: 2, _BYTES: 1, _BYTE_MINIMA: 1}[self.scales]
        return scales + (UNIT // self.chunk if self.bits in (5, 6) else 0)

    @property
    def constants(self) -> dict[str, int]:
        """The kernels' compile-time arguments."""
        return {"BITS": self.bits, "SCALES": self.scales, "ZERO": self.zero, "SUPER": self.columns, "WORDS": self.n_words}


# Formats by GGML's name. Weights of other kinds are not kept in blocks on a CUDA device.
FORMATS = {
    "Q4_0": CudaQuantFormat(4, _HALVES, zero=8),
    "Q4_1": CudaQuantFormat(4, _MINIMA),
    "Q5_0": CudaQuantFormat(5, _HALVES, zero=16),
    "Q5_1": CudaQuantFormat(5, _MINIMA),
    "Q8_0": CudaQuantFormat(8, _HALVES),
    "Q4_K": CudaQuantFormat(4, _BYTE_MINIMA, columns=256),
    "Q5_K": CudaQuantFormat(5, _BYTE_MINIMA, columns=256),
    "Q6_K": CudaQuantFormat(6, _BYTES, zero=32, columns=256),
}


@dataclass(frozen=True, slots=True)
class CudaPackedWeight:
    """A weight [N, K] in quant blocks on a device."""

    format: CudaQuantFormat
    n_out: int
    n_in: int
    n_stride: int
    """Outputs that lie side by side in memory: N, or more if this is a part of another weight."""
    codes: torch.Tensor
    words: torch.Tensor
    supers: torch.Tensor | None

    @property
    def n_bytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.words, self.supers) if part is not None)

    def select_rows(self, first: int, end: int) -> CudaPackedWeight:
        """Return outputs `first` to `end` as a view of the same memory."""
        return replace(
            self,
            n_out=end - first,
            codes=self.codes[:, first:end],
            words=self.words[:, :, first:end],
            supers=None if self.supers is None else self.supers[:, first:end],
        )

    def dequantise_rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows `ids` [R] (integers) of the weight, [R, K] in a dtype, rounded once."""
        out = torch.empty(len(ids), self.n_in, dtype=dtype, device=self.codes.device)
        if len(ids):
            grid = (triton.cdiv(len(ids), ROWS_PER_PROGRAM), len(self.codes))
            _dequantise[grid](
                ids,
                self.codes,
                self.words,
                self.supers,
                out,
                self.n_stride,
                self.n_in,
                len(ids),
                **self.format.constants,
                BLOCK=ROWS_PER_PROGRAM,
                num_warps=4,
                enable_fp_fusion=False,
            )
        return out

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [N, K] in a dtype, rounded once."""
        return self.dequantise_rows(torch.arange(self.n_out, dtype=torch.int32, device=self.codes.device), dtype)


def concatenate_packed(weights: Sequence[CudaPackedWeight]) -> CudaPackedWeight:
    """Concatenate weights of one format and one K; a single one is returned as it is."""
    first = weights[0]
    if len(weights) == 1:
        return first
    assert all((w.format, w.n_in) == (first.format, first.n_in) for w in weights)
    supers = [w.supers for w in weights if w.supers is not None]
    return replace(
        first,
        n_out=(n_out := sum(w.n_out for w in weights)),
        n_stride=n_out,
        codes=torch.cat([w.codes for w in weights], 1),
        words=torch.cat([w.words for w in weights], 2),
        supers=torch.cat(supers, 1) if supers else None,
    )


def pack(kind: str, rows: torch.Tensor) -> CudaPackedWeight:
    """Pack rows [N, bytes of a row] uint8 of blocks of GGML's type `kind`, one of FORMATS, bit by bit as ggml-common.h lays them out."""
    fmt, n = FORMATS[kind], len(rows)
    blocks = rows.reshape(n, -1, KINDS[kind][1])

    def read_halves(at: int, negative: bool = False) -> torch.Tensor:
        """Return the float16 at a byte of every block, as an integer."""
        found = blocks[:, :, at].int() | blocks[:, :, at + 1].int() << 8
        return found ^ 0x8000 if negative else found

    def split_nibbles(raw: torch.Tensor, width: int) -> torch.Tensor:
        """Return the low halves of `width` bytes, then their high halves, and so on: [N, blocks, codes]."""
        raw = raw.reshape(n, blocks.shape[1], -1, 1, width)
        return torch.cat([raw & 15, raw >> 4], 3).reshape(n, blocks.shape[1], -1)

    def split_bits(raw: torch.Tensor, width: int) -> torch.Tensor:
        """Split bytes into groups of bits, lowest first: [N, blocks, bytes] → [N, blocks, bytes, 8 / width]."""
        return raw[..., None] >> torch.arange(0, 8, width, dtype=torch.uint8, device=raw.device) & (1 << width) - 1

    supers, minima = None, None
    if kind == "Q8_0":
        codes, scales = blocks[:, :, 2:], read_halves(0)
    elif not fmt.columns:
        minima = read_halves(2, negative=True) if fmt.scales == _MINIMA else None
        scales, at = read_halves(0), 2 if minima is None else 4
        codes = split_nibbles(blocks[:, :, -16:], 16)
        if fmt.bits == 5:
            codes = codes | split_bits(blocks[:, :, at : at + 4], 1).reshape(n, -1, 32) << 4
    elif kind == "Q6_K":
        supers, scales = read_halves(208), blocks[:, :, 192:208].reshape(n, -1)
        high = split_bits(blocks[:, :, 128:192].reshape(n, -1, 2, 32), 2).transpose(3, 4).reshape(n, -1, 256)
        codes = split_nibbles(blocks[:, :, :128], 64) | high << 4
    else:
        supers = read_halves(0) | read_halves(2) << 16
        low, mid, high = blocks[:, :, 4:16].reshape(n, -1, 3, 4).unbind(2)
        scales = torch.cat([low & 63, high & 15 | low >> 2 & 48], 2).reshape(n, -1)
        minima = torch.cat([mid & 63, high >> 4 | mid >> 2 & 48], 2).reshape(n, -1)
        codes = split_nibbles(blocks[:, :, -128:], 32)
        if kind == "Q5_K":
            codes = codes | split_bits(blocks[:, :, 16:48], 1).transpose(2, 3).reshape(n, -1, 256) << 4
    return _pack(fmt, codes.reshape(n, -1), scales, minima, supers)


def _pack(
    fmt: CudaQuantFormat, codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, supers: torch.Tensor | None
) -> CudaPackedWeight:
    """Pack codes [N, K] uint8, scales and minima [N, blocks] as integers (halves: their bits), supers [N, K / 256] int32."""
    n, k = codes.shape
    units, chunk = -(-k // UNIT), fmt.chunk
    codes = torch.nn.functional.pad(codes, (0, units * UNIT - k)).reshape(n, units, UNIT)
    words = []
    for part in (scales, minima):
        if part is not None:
            per_unit = 4 if fmt.scales == _BYTES else 2
            part = torch.nn.functional.pad(part.int(), (0, units * per_unit - part.shape[1])).reshape(n, units, per_unit)
            words.append(_pack_words(part, 8 if fmt.scales in (_BYTES, _BYTE_MINIMA) else 16))
    if fmt.scales == _BYTE_MINIMA:
        words = [words[0] | words[1] << 16]
    if fmt.bits in (5, 6):
        high = (codes >> 4).int().reshape(n, units, -1, chunk)
        words += _pack_words(high, 32 // chunk).unbind(2)
    if fmt.bits < 8:
        low, high = (codes & 15).reshape(n, units, -1, 2, chunk).unbind(3)
        codes = (low | high << 4).reshape(n, units, 32)
    return CudaPackedWeight(
        fmt,
        n,
        k,
        n,
        codes.transpose(0, 1).contiguous(),
        torch.stack(words).permute(2, 0, 1).contiguous(),
        None if supers is None else supers.T.contiguous(),
    )


def _pack_words(parts: torch.Tensor, width: int) -> torch.Tensor:
    """Combine [..., P] integers of `width` bits each into [...] int32, the first lowest."""
    shifts = torch.arange(parts.shape[-1], device=parts.device, dtype=torch.int32) * width
    return (parts << shifts).sum(-1).int()  # int64 sums; what is above 32 bits is none


_M: tl.constexpr = tl.constexpr(_MINIMA)
_B: tl.constexpr = tl.constexpr(_BYTES)
_BM: tl.constexpr = tl.constexpr(_BYTE_MINIMA)
_UNIT: tl.constexpr = tl.constexpr(UNIT)


@triton.jit
def _unpack_half(word, WHICH: tl.constexpr):
    """Return the lower (0) or upper (1) float16 of a word, as float32."""
    return (word >> 16 * WHICH & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dequantise_chunk(q, above, first, second, supers, CHUNK: tl.constexpr, BITS: tl.constexpr, SCALES: tl.constexpr, ZERO: tl.constexpr):
    """Compute weights [n, columns] float32 of chunk number CHUNK of a unit from the lower bits of their codes.

    The other arguments are words [n]: the codes' upper bits, the unit's first and second word, and the super-block's word.
    """
    if BITS == 8:
        q = q.to(tl.int8, bitcast=True).to(tl.int32)
    else:
        q = q.to(tl.int32)
        if BITS > 4:
            WIDTH: tl.constexpr = BITS - 4
            q |= (above[:, None] >> (tl.arange(0, 32 // WIDTH) * WIDTH)[None, :] & (1 << WIDTH) - 1) << 4
    q = (q - ZERO).to(tl.float32)
    if SCALES == _B:
        values = (_unpack_half(supers, 0) * (first << 24 - 8 * CHUNK >> 24).to(tl.float32))[:, None] * q
    elif SCALES == _BM:
        scale = _unpack_half(supers, 0) * (first >> 8 * CHUNK & 255).to(tl.float32)
        minimum = _unpack_half(supers, 1) * (first >> 16 + 8 * CHUNK & 255).to(tl.float32)
        values = scale[:, None] * q - minimum[:, None]
    elif SCALES == _M:
        values = _unpack_half(first, CHUNK)[:, None] * q - _unpack_half(second, CHUNK)[:, None]
    else:
        values = _unpack_half(first, CHUNK)[:, None] * q
    return values


@triton.jit
def _load(at, there, policy: tl.constexpr, EVEN: tl.constexpr):
    """Load what lies `at`; where columns may end within a tile, zeros instead of what is not `there`."""
    if EVEN:
        found = tl.load(at, eviction_policy=policy)
    else:
        found = tl.load(at, mask=there, other=0, eviction_policy=policy)
    return found


class PackedBlocks(NamedTuple):
    """A packed weight, as kernels hold it: values of their own arguments."""

    codes: Any
    words: Any
    supers: Any
    n_stride: Any


class BlockForm(NamedTuple):
    """What kernels are compiled for: see `CudaQuantFormat.constants`."""

    bits: Any
    scales: Any
    zero: Any
    super: Any
    words: Any


class RowTile(NamedTuple):
    """Rows of x that a program multiplies."""

    at: Any
    """[rows, chunk]: where their first columns lie."""
    mask: Any  # [rows, 1]: which of them there are
    n_columns: Any


@triton.jit
def _load_weights(blocks, n, at, there, CHUNK: tl.constexpr, FORM: tl.constexpr, ONCE: tl.constexpr, EVEN: tl.constexpr):
    """Compute weights [n, columns] float32 of chunk number CHUNK of the unit of columns `at`. Data that two chunks need is read once."""
    bits: tl.constexpr = FORM.bits
    C: tl.constexpr = 16 if bits == 6 else 32
    policy: tl.constexpr = "evict_first" if ONCE else ""
    unit = (at // _UNIT).to(tl.int64)
    word = blocks.words + unit * FORM.words * blocks.n_stride + n
    first = _load(word, there, policy, EVEN)
    above, second, factor = 0, 0, 0
    if FORM.scales == _M:
        second = _load(word + blocks.n_stride, there, policy, EVEN)
    if bits == 5 or bits == 6:
        above = _load(word + (FORM.words - _UNIT // C + CHUNK) * blocks.n_stride, there, policy, EVEN)
    if FORM.super > 0:
        factor = _load(blocks.supers + (at // FORM.super).to(tl.int64) * blocks.n_stride + n, there, "", EVEN)
    code = blocks.codes + (unit * blocks.n_stride + n)[:, None] * (64 if bits == 8 else 32) + tl.arange(0, C)[None, :]
    if bits == 8:
        q = _load(code + CHUNK * C, there[:, None], policy, EVEN)
    else:
        q = _load(code + CHUNK // 2 * C, there[:, None], policy, EVEN) >> CHUNK % 2 * 4 & 15
    return _dequantise_chunk(q, above, first, second, factor, CHUNK, bits, FORM.scales, FORM.zero)


@triton.jit
def sum_packed_piece(
    blocks, n, x, begin, end, FORM: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr
):  # fmt: skip
    """Sum over columns begin..end of a tile: [n, rows] float32, as in `row_invariant_linear`. `x`: a RowTile."""
    bits: tl.constexpr = FORM.bits
    C: tl.constexpr = 16 if bits == 6 else 32
    k = tl.arange(0, C)
    total = tl.zeros([n.shape[0], x.at.shape[0]], tl.float32)
    for start in range(begin, end, BLOCK_K):
        for i in tl.static_range(BLOCK_K // _UNIT):
            at = start + i * _UNIT
            there = n < tl.where(at < end, blocks.n_stride, 0)
            for chunk in tl.static_range(_UNIT // C):
                w = _load_weights(blocks, n, at, there, chunk, FORM, ONCE, EVEN)
                if EVEN:
                    b = tl.load(x.at + at + chunk * C, mask=x.mask, other=0.0)
                else:
                    b = tl.load(x.at + at + chunk * C, mask=x.mask & (at + chunk * C + k < x.n_columns)[None, :], other=0.0)
                total = tl.dot(w.to(x.at.dtype.element_ty), tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def _dequantise(
    ids,  # [n_rows]
    codes,
    words,
    supers,
    out,  # [n_rows, n_in]
    n_stride,
    n_in,
    n_rows,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPER: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    C: tl.constexpr = 16 if BITS == 6 else 32
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1) * _UNIT
    there = rows < n_rows
    n = tl.load(ids + rows, mask=there, other=0)
    blocks = PackedBlocks(codes, words, supers, n_stride)
    FORM: tl.constexpr = BlockForm(BITS, SCALES, ZERO, SUPER, WORDS)
    for chunk in tl.static_range(_UNIT // C):
        w = _load_weights(blocks, n, at, there, chunk, FORM, False, False)
        k = at + chunk * C + tl.arange(0, C)
        to = out + rows.to(tl.int64)[:, None] * n_in + k[None, :]
        tl.store(to, w.to(out.dtype.element_ty), mask=there[:, None] & (k < n_in)[None, :])


@triton.jit
def _multiply_quantised(
    codes,  # [units, n_stride, bytes]
    words,  # [units, WORDS, n_stride]
    supers,  # [n_in / 256, n_stride] or None
    x,  # [n_rows, n_in], rows x_stride apart
    bias,  # [n_out] or None
    out,  # [pieces of the grid, n_rows, n_out], rows out_stride apart
    n_out,  # outputs of this launch
    n_stride,
    n_in,
    n_rows,
    x_stride,
    out_stride,
    n_splits,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SUPER: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    SUMMED: tl.constexpr,
    ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_previous(OVERLAP)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    piece = tl.program_id(2)
    k = tl.arange(0, 16 if BITS == 6 else 32)
    blocks = PackedBlocks(codes, words, supers, n_stride)
    FORM: tl.constexpr = BlockForm(BITS, SCALES, ZERO, SUPER, WORDS)
    x_tile = RowTile(x + rows.to(tl.int64)[:, None] * x_stride + k[None, :], (rows < n_rows)[:, None], n_in)
    n_at = tl.minimum(n, n_out - 1)
    begin, end = find_bounds(piece, n_in, n_splits, STEP)
    total = sum_packed_piece(blocks, n_at, x_tile, begin, end, FORM, BLOCK_K, EVEN, ONCE)
    if SUMMED:
        for s in range(1, n_splits):
            begin, end = find_bounds(s, n_in, n_splits, STEP)
            total += sum_packed_piece(blocks, n_at, x_tile, begin, end, FORM, BLOCK_K, EVEN, ONCE)
    store(total, bias, out, n, rows, piece, n_out, n_rows, out_stride)


def fit_tile(tile: Tile, fmt: CudaQuantFormat, itemsize: int) -> Tile:
    """Return the tile with whole units, and stages by the memory that codes take. `itemsize`: bytes of a number of x."""
    if itemsize == 4:
        tile = replace(tile, n=64, rows=16, warps=8)  # wider ones spill
    k = 2 * UNIT if tile.rows <= 32 and itemsize == 2 else UNIT
    room = tile.stages * tile.stage_bytes(itemsize)
    stage = k * (tile.n * (fmt.bits + 2) // 8 + tile.rows * itemsize)
    return replace(tile, k=k, stages=max(2, min(6, room // stage)))


class CudaQuantisedProduct(CudaProduct):
    """Compute x @ W.T + b; W is the concatenation of weights of one K, of one format or several, and b is [N] or None.

    The pieces of K are those of the whole W, so the bits are those of the whole W too.
    """

    def __init__(self, parts: Sequence[CudaPackedWeight], bias: torch.Tensor | None, dtype: torch.dtype, n_sms: int) -> None:
        assert len({part.n_in for part in parts}) == 1
        self.parts = tuple(parts)
        first = parts[0]
        self._set_shape(sum(part.n_out for part in parts), first.n_in, bias, n_sms, first.codes.device, dtype)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile) -> None:
        first = 0
        for part in self.parts:
            here = slice(first, first + part.n_out)
            self._multiply_part(
                part, x, None if bias is None else bias[here], out[:, :, here], fit_tile(tile, part.format, self.dtype.itemsize)
            )
            first += part.n_out

    def _multiply_part(self, part: CudaPackedWeight, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile) -> None:
        grid, options = self._make_grid(len(x), part.n_out, len(out), tile)
        _multiply_quantised[grid](
            part.codes,
            part.words,
            part.supers,
            x,
            bias,
            out,
            part.n_out,
            part.n_stride,
            self.n_in,
            len(x),
            x.stride(0),
            out.stride(1),
            self.splits,
            **part.format.constants,
            **options,
        )

"""Multiply rows by weights on a CUDA device: a row's result has the same bits whatever the number of rows.

The module knows weights and rows, nothing of models. `x [R, K]` goes in, sums `[P, R, N]` in float32 or finished rows `[R, N]` come out.

K is cut into `splits` pieces, a function of the weight's shape. Few rows are bound by reading weights: each piece of each tile is its own
block of the grid, so that the whole device reads, and the consumer of the P = splits partial sums adds them in order. Many rows are bound
by arithmetic: one block goes through the pieces and adds their sums in the same order, P = 1. Both forms give the same bits. Within a piece
the tensor cores accumulate along K, 16 at a time (fp32: 1), which no tile changes.

Bits depend on `MIN_PIECE`, `GRANULE` and `choose_splits`. They do not depend on `Tile` and `choose_tile`, which are free to be tuned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.device import get_limits
from ngramspec.backends.cuda.overlap import await_previous, overlap_options, prefetch_rows

GRANULE = 128  # Columns: pieces of K begin at multiples of this, and every BLOCK_K divides it.

MIN_PIECE = 512  # Columns: no piece of K is shorter, since each costs a float32 per result, written and read.

BLOCKS_PER_SM = 1.8  # Tiles of 64 outputs per multiprocessor from which on K is not cut further.

PREFETCHED = 8  # Cache lines of each weight row of a block that are asked for before the kernel that computes x has ended.


def choose_splits(n_out: int, n_in: int, n_sms: int) -> int:
    """Return into how many pieces K is cut: the fewest that give the whole device work. Changes bits, so it must not depend on rows."""
    tiles = -(-n_out // 64)
    wanted = -(-int(BLOCKS_PER_SM * n_sms) // tiles)
    return max(1, min(wanted, n_in // MIN_PIECE))


@dataclass(frozen=True, slots=True)
class Tile:
    """What one block computes at a time, and how. No bit depends on it."""

    n: int
    """Outputs: rows of the weight, the M side of the matrix instruction (Hopper's has 64)."""
    rows: int
    """Rows of x, the N side."""
    k: int
    """Columns of both that one stage of the pipeline holds."""
    warps: int
    stages: int
    """Stages in shared memory; all but one or two are being loaded while one is used."""

    def stage_bytes(self, item: int) -> int:
        return (self.n + self.rows) * self.k * item


# The wider the rows, the more outputs a tile takes: a tile reads `rows` of x for `n` rows of the weight, out of L2, whose
# bandwidth is hardly more than that of the memory behind it.
_HALF = (
    Tile(64, 16, 64, warps=4, stages=8),
    Tile(128, 32, 64, warps=4, stages=8),
    Tile(128, 64, 64, warps=4, stages=6),
    Tile(128, 128, 64, warps=8, stages=4),
)
# Twice the rows for the same weights; too wide if the sums of a piece and of the pieces before it are both held.
_HALF_MANY = Tile(128, 256, 64, warps=8, stages=4)
_FULL = (Tile(64, 16, 32, warps=4, stages=6), Tile(64, 32, 32, warps=4, stages=4), Tile(64, 64, 32, warps=8, stages=4))


def list_tiles(item: int, shared: int) -> tuple[Tile, ...]:
    """Return every tile of weights whose numbers take `item` bytes that `choose_tile` may return, with two stages."""
    tiles = _FULL if item == 4 else (*_HALF, _HALF_MANY) if shared >= 4 * _HALF_MANY.stage_bytes(2) else _HALF
    return tuple(replace(tile, stages=2) for tile in tiles)


def choose_tile(rows: int, n_out: int, item: int, n_pieces: int, summed: int, n_sms: int, shared: int) -> Tile:
    """Return the tile for `rows` rows: a grid of `n_pieces` pieces, each block summing `summed` of them; `shared` bytes per multiprocessor.

    The memory answers after about a microsecond, in which H200's bandwidth carries 36 kB per multiprocessor. So a block has as many stages
    as fit when all blocks of the grid, or four, share a multiprocessor.
    """
    tiles = _HALF if item == 2 else _FULL
    tile = next((t for t in tiles if rows <= t.rows), tiles[-1])
    if (
        item == 2
        and rows > 128
        and summed == 1
        and shared >= 4 * _HALF_MANY.stage_bytes(2)
        and -(-n_out // 128) * -(-rows // 256) * n_pieces >= n_sms
    ):
        tile = _HALF_MANY
    blocks = -(-n_out // tile.n) * -(-rows // tile.rows) * n_pieces
    most = 4 if tile.rows < 128 else 2 if tile.rows == 128 and summed == 1 else 1  # by registers
    resident = max(1, min(most, -(-blocks // n_sms)))
    stages = (shared // resident - 1024) // tile.stage_bytes(item)
    return replace(tile, stages=max(2, min(tile.stages, stages)))


@triton.jit
def sum_piece(w, x, row_mask, columns, begin, end, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr):
    """Sum over columns begin..end of a tile: [n, rows] float32. `w` [n, BLOCK_K] and `x` [rows, BLOCK_K] point at the first columns."""
    k = tl.arange(0, BLOCK_K)
    policy: tl.constexpr = "evict_first" if ONCE else ""
    total = tl.zeros([w.shape[0], x.shape[0]], tl.float32)
    w += begin
    x += begin
    for first in range(begin, end, BLOCK_K):
        if EVEN:
            a = tl.load(w, eviction_policy=policy)
            b = tl.load(x, mask=row_mask, other=0.0)
        else:
            inside = (first + k < columns)[None, :]
            a = tl.load(w, mask=inside, other=0.0, eviction_policy=policy)
            b = tl.load(x, mask=row_mask & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        w += BLOCK_K
        x += BLOCK_K
    return total


@triton.jit
def find_bounds(piece, n_in, n_splits, STEP: tl.constexpr):
    """Return the columns of one of the pieces of K."""
    granules = tl.cdiv(n_in, STEP)
    return piece * granules // n_splits * STEP, tl.minimum((piece + 1) * granules // n_splits * STEP, n_in)


@triton.jit
def store(total, bias, out, n, rows, piece, n_out, n_rows, out_stride):
    """Store a tile's sums [n, rows], with the bias, to out [P, n_rows, n_out], whose rows lie `out_stride` apart."""
    if bias is not None:
        total += tl.load(bias + n, mask=n < n_out, other=0.0).to(tl.float32)[:, None]
    at = (piece * n_rows + rows).to(tl.int64)[None, :] * out_stride + n[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(n < n_out)[:, None] & (rows < n_rows)[None, :])


@triton.jit
def _multiply(
    weight,  # [n_out, n_in]
    x,  # [n_rows, n_in], rows x_stride apart
    bias,  # [n_out] or None
    out,  # [pieces of the grid, n_rows, n_out]
    n_out,
    n_in,
    n_rows,
    x_stride,
    n_splits,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEP: tl.constexpr,  # GRANULE
    EVEN: tl.constexpr,  # BLOCK_K divides n_in
    SUMMED: tl.constexpr,  # the block goes through all pieces, instead of one
    ONCE: tl.constexpr,  # no other block reads these weights
    OVERLAP: tl.constexpr,
    LINES: tl.constexpr,  # PREFETCHED
):
    # Blocks that read the same weights follow each other.
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    piece = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    # Outputs past the end repeat the last one and are not stored; rows past the end are zeros and cost no reading.
    w_at = weight + tl.minimum(n, n_out - 1).to(tl.int64)[:, None] * n_in + k[None, :]
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    row_mask = (rows < n_rows)[:, None]
    begin, end = find_bounds(piece, n_in, n_splits, STEP)
    if OVERLAP and ONCE:
        item: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(weight + tl.minimum(n, n_out - 1).to(tl.int64) * n_in + begin, (end - begin) * item, LINES)
    await_previous(OVERLAP)
    total = sum_piece(w_at, x_at, row_mask, n_in, begin, end, BLOCK_K, EVEN, ONCE)
    if SUMMED:
        for s in range(1, n_splits):
            begin, end = find_bounds(s, n_in, n_splits, STEP)
            total += sum_piece(w_at, x_at, row_mask, n_in, begin, end, BLOCK_K, EVEN, ONCE)
    store(total, bias, out, n, rows, piece, n_out, n_rows, n_out)


@triton.jit
def _add_up(partials, bias, out, n_out, n_rows, N_PARTIALS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Compute out [R, N] = partials [P, R, N] summed in order, + bias, rounded."""
    await_previous(OVERLAP)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = n < n_out
    total = tl.load(partials + row * n_out + n, mask=inside, other=0.0)
    for p in tl.static_range(1, N_PARTIALS):
        total += tl.load(partials + (p * n_rows + row) * n_out + n, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n_out + n, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class KernelPolicy:
    """How products with one shape of weight are computed, and whether their rows were proved independent of each other."""

    name: str
    bitwise: bool

    def __str__(self) -> str:
        return self.name if self.bitwise else f"{self.name}, numerical"


class LinearProduct(Protocol):
    """A linear layer: our `CudaProduct`, or the vendor's."""

    bias: torch.Tensor | None

    def compute_partials(self, x: torch.Tensor) -> torch.Tensor: ...

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


class CudaProduct:
    """Compute x @ W.T + b. W [N, K] and b [N] or None are kept as they are, on their device; bfloat16, float16 or float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, n_sms: int) -> None:
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"weights are bfloat16, float16 or float32, not {weight.dtype}")
        self.weight = weight.contiguous()
        self._set_shape(weight.shape[0], weight.shape[1], bias, n_sms, weight.device, weight.dtype)

    def _set_shape(self, n_out: int, n_in: int, bias: torch.Tensor | None, n_sms: int, device: torch.device, dtype: torch.dtype) -> None:
        self.n_out, self.n_in, self.bias, self.n_sms, self.device, self.dtype = n_out, n_in, bias, n_sms, device, dtype
        self.splits = choose_splits(n_out, n_in, n_sms)
        self._shared = get_limits(device).shared_bytes

    def n_partials(self, rows: int) -> int:
        """Return P of `compute_partials`: `splits` for few rows, 1 if tiles of whole sums occupy the device."""
        busy = -(-self.n_out // 128) * -(-rows // 128) >= self.n_sms
        return 1 if busy else self.splits

    def workspace_shape(self, rows: int) -> tuple[int, int, int]:
        """Return the shape [P, R, N] of `compute_partials`."""
        return self.n_partials(rows), rows, self.n_out

    def compute_partials(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply x [R, K] to [P, R, N] float32, whose sum over P in order is x @ W.T without the bias. `out` has `workspace_shape(R)`."""
        shape = self.workspace_shape(len(x))
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
        assert out.shape == shape, f"out is {tuple(out.shape)}, not {shape}"
        self._launch(x, None, out)
        return out

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor | None = None, dtype: torch.dtype | None = None, workspace: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply x [R, K] to [R, N] with the bias, rounded once to `dtype` (default: that of `out`, else of x).

        `workspace` of `workspace_shape(R)` float32 is needed only if P > 1.
        """
        if out is None:
            out = torch.empty(len(x), self.n_out, dtype=dtype or x.dtype, device=x.device)
        assert out.shape == (len(x), self.n_out), f"out is {tuple(out.shape)}, not {(len(x), self.n_out)}"
        if self.n_partials(len(x)) == 1:
            self._launch(x, self.bias, out[None])
        else:
            add_up(self.compute_partials(x, workspace), self.bias, out)
        return out

    def _launch(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile | None = None) -> None:
        """Write sums to out [P, R, N], P = 1 or `splits`; contiguous."""
        assert x.shape[1] == self.n_in, f"x has {x.shape[1]} columns, the weight {self.n_in}"
        assert x.dtype == self.dtype, f"x is {x.dtype}, the weight {self.dtype}"
        assert x.stride(1) == 1
        assert out.is_contiguous()
        if len(x):
            pieces = len(out)
            chosen = choose_tile(len(x), self.n_out, self.dtype.itemsize, pieces, self.splits // pieces, self.n_sms, self._shared)
            self._multiply(x, bias, out, tile or chosen)

    def _make_grid(self, rows: int, n_out: int, pieces: int, tile: Tile) -> tuple[tuple[int, int, int], dict[str, int]]:
        """Return the grid of a launch, and its compile-time options."""
        grid = (triton.cdiv(rows, tile.rows), triton.cdiv(n_out, tile.n), pieces)
        return grid, {
            "BLOCK_N": tile.n,
            "BLOCK_R": tile.rows,
            "BLOCK_K": tile.k,
            "STEP": GRANULE,
            "EVEN": self.n_in % tile.k == 0,
            "SUMMED": pieces < self.splits,
            "ONCE": grid[0] == 1,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "enable_fp_fusion": False,
            **overlap_options(self.device),
        }

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile) -> None:
        grid, options = self._make_grid(len(x), self.n_out, len(out), tile)
        _multiply[grid](
            self.weight,
            x,
            bias,
            out,
            self.n_out,
            self.n_in,
            len(x),
            x.stride(0),
            self.splits,
            LINES=PREFETCHED,
            **options,
        )


def add_up(partials: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Compute out [R, N] = the sum of partials [P, R, N] float32 in order, + bias [N], rounded to out's dtype."""
    n_partials, rows, n_out = partials.shape
    assert partials.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == (rows, n_out)
    if rows:
        grid = (triton.cdiv(n_out, 512), rows)
        _add_up[grid](
            partials,
            bias,
            out,
            n_out,
            rows,
            N_PARTIALS=n_partials,
            BLOCK=512,
            num_warps=4,
            enable_fp_fusion=False,
            **overlap_options(out.device),
        )


def find_violation(product: CudaProduct, counts: Iterable[int]) -> str | None:
    """Describe where rows of this product depend on their number; None: nowhere. Compared bitwise, on random rows, on the device.

    Tested are every count in `counts` and those at which tiles change, at both ends of the input; each as `splits` sums added up and as
    whole sums, against the same rows computed alone.
    """
    wanted = set(counts)
    most = max(wanted)
    edges = {e for tile in (*_HALF, _HALF_MANY) for e in (tile.rows - 1, tile.rows, tile.rows + 1)}
    generator = torch.Generator().manual_seed(product.n_out)
    x = torch.randn(most, product.n_in, generator=generator).to(product.device, product.dtype)
    probe = sorted({0, most // 3, most // 2, most - 1, *range(0, most, -(-most // 8))})
    alone = torch.cat([_multiply_in_pieces(product, x[i : i + 1], product.splits) for i in probe])
    for count in sorted(c for c in wanted | edges if 1 <= c <= most):
        for start in {0, most - count}:
            inside = [(j, i - start) for j, i in enumerate(probe) if start <= i < start + count]
            for pieces in {1, product.splits}:
                y = _multiply_in_pieces(product, x[start : start + count], pieces)
                if not torch.equal(y[[i for _, i in inside]], alone[[j for j, _ in inside]]):
                    return f"product with a weight of {(product.n_out, product.n_in)} at {count} rows in {pieces} pieces"
    return None


def _multiply_in_pieces(product: CudaProduct, x: torch.Tensor, pieces: int) -> torch.Tensor:
    """Compute x @ W.T + b in float32 through `pieces` partial sums."""
    sums = torch.empty(pieces, len(x), product.n_out, dtype=torch.float32, device=x.device)
    product._launch(x, None, sums)
    out = torch.empty(sums.shape[1:], dtype=torch.float32, device=x.device)
    add_up(sums, product.bias, out)
    return out

"""Multiply pairs of rows and experts on a CUDA device by experts' weights that stay in quant blocks.

The experts [E, N, K] of a layer are packed as one weight of E · N outputs (`quantised`), of which a tile takes some of one expert. The bits
are those of `PairProduct` with the dequantised weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn

from ngramspec.backends.cuda.device import get_limits
from ngramspec.backends.cuda.expert_kernels import PairArrays, PairProduct, PairShape, PairTile, SortedPairs, find_tile, store_pairs
from ngramspec.backends.cuda.overlap import await_previous
from ngramspec.backends.cuda.quantised import CudaPackedWeight, PackedBlocks, RowTile, fit_tile, sum_packed_piece
from ngramspec.backends.cuda.row_invariant_linear import Tile


class _BlockShape(NamedTuple):
    """What `_multiply_packed_pairs` is compiled for besides shape and tile: see `CudaQuantFormat.constants`."""

    bits: int
    scales: int
    zero: int
    super: int
    words: int
    n_stride: int


@triton.jit
def _multiply_packed_pairs(codes, words, supers, x, pairs, out, SHAPE: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr):
    """Compute a tile of out [P, n_out]; x [rows, n_in] is contiguous."""
    await_previous(SHAPE.overlaps)
    found = find_tile(pairs, tl.program_id(0), SHAPE, TILE.rows)
    expert, places, there, numbers = found
    if expert >= SHAPE.n_experts:
        return
    bits: tl.constexpr = BLOCKS.bits
    n, k = tl.program_id(1) * TILE.n + tl.arange(0, TILE.n), tl.arange(0, 16 if bits == 6 else 32)
    rows = places
    if SHAPE.per_row > 0:
        rows = numbers // SHAPE.per_row
    n_at = expert * SHAPE.n_out + tl.minimum(n, SHAPE.n_out - 1)
    x_at = x + rows.to(tl.int64)[:, None] * SHAPE.n_in + k[None, :]
    is_even: tl.constexpr = SHAPE.n_in % TILE.k == 0
    blocks = PackedBlocks(codes, words, supers, BLOCKS.n_stride)
    x_tile = RowTile(x_at, there[:, None], SHAPE.n_in)
    total = sum_packed_piece(blocks, n_at, x_tile, 0, SHAPE.n_in, BLOCKS, TILE.k, is_even, TILE.is_read_once)
    store_pairs(total, None, out, n, found, SHAPE)


class PackedExpertWeight(nn.Module):
    """Weights [E, N, K] of experts in quant blocks, in place of a parameter of transformers' module, which takes one expert at a time."""

    def __init__(self, packed: CudaPackedWeight, n_experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self.n_experts, self.dtype = packed, n_experts, dtype

    def __getitem__(self, expert: torch.Tensor) -> torch.Tensor:
        """Return the weight [N, K] of one expert, dequantised."""
        n = self.packed.n_out // self.n_experts
        ids = torch.arange(n, dtype=torch.int32, device=self.packed.codes.device) + int(expert) * n
        return self.packed.dequantise_rows(ids, self.dtype)


class PackedPairProduct(PairProduct):
    """Multiply each pair by the weight of its expert, which stays in blocks."""

    def __init__(self, weight: PackedExpertWeight, dtype: torch.dtype, n_sms: int) -> None:
        self.packed, self.format = weight.packed, weight.packed.format
        shape = weight.n_experts, self.packed.n_out // weight.n_experts, self.packed.n_in
        self._set_shape(shape, dtype, self.packed.codes.device, n_sms)

    def _multiply(self, x: torch.Tensor, pairs: SortedPairs, per_row: int, out: torch.Tensor, tile: Tile) -> None:
        overlaps, packed, n_active = get_limits(x.device).overlaps, self.packed, min(len(out), self.n_experts)
        tile = fit_tile(tile, packed.format, self.dtype.itemsize)
        n_tiles = self.count_tiles(len(out), tile)
        of = packed.format.constants
        blocks = _BlockShape(of["BITS"], of["SCALES"], of["ZERO"], of["SUPER"], of["WORDS"], packed.n_stride)
        assert x.is_contiguous()
        _multiply_packed_pairs[(n_tiles, triton.cdiv(self.n_out, tile.n))](
            packed.codes, packed.words, packed.supers, x, PairArrays(pairs.order, pairs.counts), out,
            SHAPE=PairShape(self.n_experts, triton.next_power_of_2(self.n_experts), self.n_out, self.n_in, per_row, overlaps),
            TILE=PairTile(tile.n, tile.rows, tile.k, n_tiles <= n_active), BLOCKS=blocks,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=overlaps,
        )  # fmt: skip

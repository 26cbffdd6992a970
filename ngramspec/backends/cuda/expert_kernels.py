"""Compute mixtures of experts on a CUDA device: choose experts per row, multiply the rows of one expert together, sum per row.

A row with one of its experts is a pair, numbered row · top_k + place in the row's choice. Pairs are sorted by expert on the device: the
host never knows how many an expert has. So grids have as many tiles as there can be, and a program without a tile ends at once.

No bit of a row depends on other rows. Its experts are chosen by its float32 logits, equal ones by lowest id. A product's sum goes through
all columns in order, by the same instructions in every tile (`row_invariant_linear`); which pairs share a tile decides nothing. The row's
experts are summed in float32 in the order of its choice. The module knows rows and weights, nothing of layers, models or sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.device import get_limits
from ngramspec.backends.cuda.layers import sum_up
from ngramspec.backends.cuda.overlap import await_previous, overlap_options
from ngramspec.backends.cuda.row_invariant_linear import Tile, choose_tile, list_tiles, sum_piece
from ngramspec.models.expert_routing import RouterOptions

SPREAD = 1.5  # Times the mean number of an expert's pairs for which a tile has room: experts have more pairs than the mean or fewer.

# Numbers of pairs at which products with the first experts of each shape are compared, bitwise; further ones of a shape use FEW_PAIRS.
CHECKED_PAIRS = (1, 2, 15, 17, 33, 130, 513)
FEW_PAIRS = (1, 17)

_LOWEST = tl.constexpr(-3.0e38)  # Score of an expert whose score is no number: below every other, and above those chosen already.

_jit: Any = triton.jit(do_not_specialize=["n_partials", "n_rows"])


class _Choice(NamedTuple):
    """Arrays of a pass's R rows."""

    ids: torch.Tensor  # [R, top_k] int32
    weights: torch.Tensor  # [R, top_k] float32, or [R, top_k + 1] with that of the shared expert


class PairArrays(NamedTuple):
    """The P pairs of a pass, sorted by expert."""

    order: torch.Tensor  # [P] int32: their numbers
    counts: torch.Tensor  # [E] int32: pairs of each expert


class _RouterShape(NamedTuple):
    """What `_choose` is compiled for."""

    n_experts: int
    n_padded: int
    """The router's outputs, rounded up to a power of two."""
    top_k: int
    k_padded: int
    sigmoid: bool
    normalise: bool
    scale: float
    is_gated: int
    """1 if the last output is the gate of a shared expert, whose sigmoid is the last weight."""
    overlaps: bool


class PairShape(NamedTuple):
    """What `_multiply_pairs` is compiled for besides its tile."""

    n_experts: int
    n_padded: int
    """Experts, rounded up to a power of two."""
    n_out: int
    n_in: int
    per_row: int
    """Pairs of a row of x; 0: x has a row for every place of the sorted order."""
    overlaps: bool


class PairTile(NamedTuple):
    """How `_multiply_pairs` goes through pairs and weights. No bit depends on it."""

    n: int
    rows: int
    k: int
    is_read_once: bool
    """Whether hardly a weight is read by two programs."""


class _SumShape(NamedTuple):
    """What `_sum_experts` is compiled for."""

    n_experts: int
    top_k: int
    n_weights: int
    """Weights of a row: top_k, or one more for the shared expert."""
    width: int
    block: int
    overlaps: bool


@_jit
def _choose(
    partials,  # [P, R, E + is_gated] float32: the router's product
    bias,  # [E] or None
    correction,  # [E] float32 or None: added to scores for the choice alone
    slots,  # [R] or None: rows from slot `unused` on only fill up a bucket, and choose no expert, which is number E
    choice,
    n_partials,
    n_rows,
    unused,
    SHAPE: tl.constexpr,
):
    await_previous(SHAPE.overlaps)
    row = tl.program_id(0).to(tl.int64)
    k_padded: tl.constexpr = SHAPE.k_padded
    e, k = tl.arange(0, SHAPE.n_padded), tl.arange(0, k_padded)
    top_k: tl.constexpr = SHAPE.top_k
    width: tl.constexpr = SHAPE.n_experts + SHAPE.is_gated
    logits = sum_up(partials, bias, row * width, n_rows.to(tl.int64) * width, n_partials, e, width, tl.float32)
    score = logits
    if SHAPE.sigmoid:
        score = 1.0 / (1.0 + tl.exp(-logits))
    if correction is not None:
        if not SHAPE.sigmoid:  # shares, to which the correction is added
            powers = tl.exp(logits - tl.max(tl.where(e < SHAPE.n_experts, logits, -float("inf")), 0))
            score = powers / tl.sum(tl.where(e < SHAPE.n_experts, powers, 0.0), 0)
        score += tl.load(correction + e, mask=e < SHAPE.n_experts, other=0.0)
    score = tl.where(score > _LOWEST, score, _LOWEST)
    score = tl.where(e < SHAPE.n_experts, score, -float("inf"))
    chosen, found = tl.zeros([k_padded], tl.int32), tl.zeros([k_padded], tl.float32)
    for i in tl.static_range(top_k):
        at = tl.min(tl.where(score == tl.max(score, 0), e, SHAPE.n_padded), 0)
        chosen = tl.where(k == i, at, chosen)
        found = tl.where(k == i, tl.sum(tl.where(e == at, logits, 0.0), 0), found)
        score = tl.where(e == at, -float("inf"), score)
    if SHAPE.sigmoid:
        weight = 1.0 / (1.0 + tl.exp(-found))
    else:
        most = tl.max(tl.where(e < SHAPE.n_experts, logits, -float("inf")), 0)
        weight = tl.exp(found - most)
    if SHAPE.normalise:
        weight /= tl.sum(tl.where(k < top_k, weight, 0.0), 0)
    elif not SHAPE.sigmoid:
        weight /= tl.sum(tl.where(e < SHAPE.n_experts, tl.exp(logits - most), 0.0), 0)
    weight *= SHAPE.scale
    if slots is not None:
        is_used = tl.load(slots + row) < unused
        chosen = tl.where((k >= 0) & is_used, chosen, SHAPE.n_experts)
    tl.store(choice.ids + row * top_k + k, chosen, mask=k < top_k)
    to = choice.weights + row * (top_k + SHAPE.is_gated)
    tl.store(to + k, weight, mask=k < top_k)
    if SHAPE.is_gated:
        gate = tl.sum(tl.where(e == SHAPE.n_experts, logits, 0.0), 0)
        tl.store(to + top_k, 1.0 / (1.0 + tl.exp(-gate)))


@triton.jit(do_not_specialize=["n_pairs"])
def _sort_pairs(ids, order, counts, n_pairs, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    """Count the pairs of one expert, and list them after those of the experts before it."""
    await_previous(OVERLAP)
    expert = tl.program_id(0)
    below, mine = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for first in range(0, n_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        found = tl.load(ids + pair, mask=pair < n_pairs, other=2147483647)
        below += (found < expert).to(tl.int32)
        mine += (found == expert).to(tl.int32)
    place = tl.sum(below, 0)
    tl.store(counts + expert, tl.sum(mine, 0))
    for first in range(0, n_pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        found = tl.load(ids + pair, mask=pair < n_pairs, other=2147483647)
        here = (found == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(here, 0) - 1, pair, mask=here > 0)
        place += tl.sum(here, 0)


@triton.jit
def find_tile(pairs, tile, SHAPE: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert (E: there is no such tile), its places in the sorted order, which of them it has, and the pairs there."""
    e = tl.arange(0, SHAPE.n_padded)
    n_pairs = tl.load(pairs.counts + e, mask=e < SHAPE.n_experts, other=0)
    n_tiles = (n_pairs + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(n_tiles, 0) <= tile).to(tl.int32), 0)
    first = (tile - tl.sum(tl.where(e < expert, n_tiles, 0), 0)) * ROWS + tl.arange(0, ROWS)
    there = first < tl.sum(tl.where(e == expert, n_pairs, 0), 0)
    places = tl.sum(tl.where(e < expert, n_pairs, 0), 0) + first
    return tl.minimum(expert, SHAPE.n_experts), places, there, tl.load(pairs.order + places, mask=there, other=0)


@triton.jit
def store_pairs(total, bias, out, n, found, SHAPE: tl.constexpr):
    """Store a tile's sums [n, places] with the expert's bias, `found` by `find_tile`: at their pairs if x was in the sorted order, else in
    that order.
    """
    expert, places, there, pairs = found
    if bias is not None:
        total += tl.load(bias + expert.to(tl.int64) * SHAPE.n_out + n, mask=n < SHAPE.n_out, other=0.0).to(tl.float32)[:, None]
    if SHAPE.per_row == 0:
        places = pairs
    at = out + places.to(tl.int64)[None, :] * SHAPE.n_out + n[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=(n < SHAPE.n_out)[:, None] & there[None, :])


@triton.jit
def _multiply_pairs(
    weight,  # [E, n_out, n_in]
    bias,  # [E, n_out] or None
    x,  # [rows, n_in], rows x_stride apart
    pairs,
    out,  # [P, n_out]
    x_stride,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
):
    await_previous(SHAPE.overlaps)
    found = find_tile(pairs, tl.program_id(0), SHAPE, TILE.rows)
    expert, places, there, numbers = found
    if expert >= SHAPE.n_experts:
        return
    n, k = tl.program_id(1) * TILE.n + tl.arange(0, TILE.n), tl.arange(0, TILE.k)
    rows = places
    if SHAPE.per_row > 0:
        rows = numbers // SHAPE.per_row
    first = weight + expert.to(tl.int64) * SHAPE.n_out * SHAPE.n_in
    w_at = first + tl.minimum(n, SHAPE.n_out - 1).to(tl.int64)[:, None] * SHAPE.n_in + k[None, :]
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + k[None, :]
    is_even: tl.constexpr = SHAPE.n_in % TILE.k == 0
    total = sum_piece(w_at, x_at, there[:, None], SHAPE.n_in, 0, SHAPE.n_in, TILE.k, is_even, TILE.is_read_once)
    store_pairs(total, bias, out, n, found, SHAPE)


@triton.jit
def _activate_clamped(both, out, width, alpha, limit, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Compute out [P, F] = (up + 1) · gate · sigmoid(alpha · gate) of both [P, 2F], in which gates and ups take turns, each clamped."""
    await_previous(OVERLAP)
    pair, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = both + pair * 2 * width + 2 * n
    gate = tl.minimum(tl.load(at, mask=n < width, other=0.0).to(tl.float32), limit)
    up = tl.minimum(tl.maximum(tl.load(at + 1, mask=n < width, other=0.0).to(tl.float32), -limit), limit)
    y = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    tl.store(out + pair * width + n, y.to(out.dtype.element_ty), mask=n < width)


@_jit
def _sum_experts(
    added,  # [R, K, width] float32: outputs of each row's experts
    choice,
    shared,  # [P, R, width] float32 or None: sums of the shared expert's last product
    out,  # [R, width]
    n_partials,
    n_rows,
    SHAPE: tl.constexpr,
):
    await_previous(SHAPE.overlaps)
    block: tl.constexpr = SHAPE.block
    row, n = tl.program_id(1).to(tl.int64), tl.program_id(0) * block + tl.arange(0, block)
    top_k: tl.constexpr = SHAPE.top_k
    width: tl.constexpr = SHAPE.width
    weights = choice.weights + row * SHAPE.n_weights
    total = tl.zeros([block], tl.float32)
    for i in tl.static_range(top_k):
        is_one = tl.load(choice.ids + row * top_k + i) < SHAPE.n_experts
        weight = tl.where(is_one, tl.load(weights + i), 0.0)
        total += weight * tl.load(added + (row * top_k + i) * width + n, mask=(n < width) & is_one, other=0.0)
    if shared is not None:
        other = sum_up(shared, None, row * width, n_rows.to(tl.int64) * width, n_partials, n, width, tl.float32)
        if SHAPE.n_weights > top_k:
            other *= tl.load(weights + top_k)
        total += other
    tl.store(out + row * width + n, total.to(out.dtype.element_ty), mask=n < width)


def choose(
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    options: RouterOptions,
    slots: torch.Tensor | None = None,
    unused: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by a router's product, partials [P, R, N] float32, and bias [N]: ids [R, top_k] int32, and weights [R, top_k].

    N = E, or E + 1 if the last output is the gate of a shared expert, whose weight is then the last. `correction` [E] float32 is added to
    scores for the choice alone. Rows whose `slots` [R] are `unused` or more get E for an id.
    """
    _, n_rows, n_outputs = partials.shape
    n_experts, k, is_gated = options.n_experts, options.top_k, n_outputs - options.n_experts
    assert is_gated in (0, 1), f"{n_outputs} outputs for {n_experts} experts"
    assert partials.is_contiguous()
    assert partials.dtype == torch.float32
    ids = torch.empty(n_rows, k, dtype=torch.int32, device=partials.device)
    weights = torch.empty(n_rows, k + is_gated, dtype=torch.float32, device=partials.device)
    if n_rows:
        padded, overlaps = triton.next_power_of_2(n_outputs), get_limits(ids.device).overlaps
        k_padded = triton.next_power_of_2(k)
        shape = _RouterShape(n_experts, padded, k, k_padded, options.sigmoid, options.normalise, options.scale, is_gated, overlaps)
        _choose[(n_rows,)](
            partials, bias, correction, slots, _Choice(ids, weights), len(partials), n_rows, unused, SHAPE=shape,
            num_warps=min(4, max(1, padded // 64)), enable_fp_fusion=False, launch_pdl=overlaps,
        )  # fmt: skip
    return ids, weights


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """The pairs of some rows, sorted by expert and within an expert by number. Pairs without an expert are left out."""

    ids: torch.Tensor  # [R, top_k] int32
    order: torch.Tensor  # [P] int32: numbers of pairs
    counts: torch.Tensor  # [E] int32: pairs of each expert

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


def sort_pairs(ids: torch.Tensor, n_experts: int) -> SortedPairs:
    """Sort the pairs of rows with their experts ids [R, top_k] int32, below `n_experts` or equal to it for none."""
    n_pairs = ids.numel()
    assert ids.is_contiguous()
    order = torch.empty(n_pairs, dtype=torch.int32, device=ids.device)
    counts = (torch.empty if n_pairs else torch.zeros)(n_experts, dtype=torch.int32, device=ids.device)
    if n_pairs:
        chunk = min(1024, max(32, triton.next_power_of_2(n_pairs)))
        _sort_pairs[(n_experts,)](ids, order, counts, n_pairs, CHUNK=chunk, num_warps=min(4, chunk // 32), **overlap_options(ids.device))
    return SortedPairs(ids, order, counts)


class PairProduct:
    """Multiply each pair by the weight of its expert. Weights [E, N, K] and biases [E, N] or None are kept as they are."""

    format: object = None
    """Format of quant blocks, if the weights are in blocks."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, n_sms: int) -> None:
        if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"weights are bfloat16, float16 or float32, not {weight.dtype}")
        assert weight.is_contiguous()
        self.weight, self.bias = weight, bias
        self._set_shape(tuple(weight.shape), weight.dtype, weight.device, n_sms)

    def _set_shape(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, n_sms: int) -> None:
        self.n_experts, self.n_out, self.n_in = self.shape = shape
        self.dtype, self.device, self.n_sms, self._shared = dtype, device, n_sms, get_limits(device).shared_bytes

    def __call__(self, x: torch.Tensor, pairs: SortedPairs, *, of_rows: bool, dtype: torch.dtype, tile: Tile | None = None) -> torch.Tensor:
        """Multiply to [P, N] in `dtype`.

        `of_rows`: x [R, K] has the rows, and the result is in the sorted order. Otherwise x [P, K] is in the sorted order, and the result
        in that of the pairs' numbers; places of pairs without an expert are not written.
        """
        n_pairs = len(pairs.order)
        assert x.shape == (len(pairs.ids) if of_rows else n_pairs, self.n_in), (x.shape, pairs.ids.shape)
        assert x.dtype == self.dtype
        assert x.stride(1) == 1
        out = torch.empty(n_pairs, self.n_out, dtype=dtype, device=x.device)
        if n_pairs:
            self._multiply(x, pairs, pairs.top_k if of_rows else 0, out, tile or self.choose_tile(n_pairs))
        return out

    def _multiply(self, x: torch.Tensor, pairs: SortedPairs, per_row: int, out: torch.Tensor, tile: Tile) -> None:
        overlaps, n_tiles, n_active = get_limits(x.device).overlaps, self.count_tiles(len(out), tile), min(len(out), self.n_experts)
        _multiply_pairs[(n_tiles, triton.cdiv(self.n_out, tile.n))](
            self.weight, self.bias, x, PairArrays(pairs.order, pairs.counts), out, x.stride(0),
            SHAPE=PairShape(self.n_experts, triton.next_power_of_2(self.n_experts), self.n_out, self.n_in, per_row, overlaps),
            TILE=PairTile(tile.n, tile.rows, tile.k, n_tiles <= n_active),
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False, launch_pdl=overlaps,
        )  # fmt: skip

    def count_tiles(self, n_pairs: int, tile: Tile) -> int:
        """Return how many tiles pairs can need at most, however they are spread over experts."""
        return min(n_pairs, (n_pairs + min(n_pairs, self.n_experts) * (tile.rows - 1)) // tile.rows)

    def choose_tile(self, n_pairs: int) -> Tile:
        """Return the tile for a number of pairs, as if all experts had about the same number. No bit depends on it."""
        n_active = min(n_pairs, self.n_experts)
        rows = max(1, int(SPREAD * n_pairs / self.n_experts))
        return choose_tile(rows, self.n_out, self.dtype.itemsize, n_active, 1, self.n_sms, self._shared)


def activate_clamped(both: torch.Tensor, out: torch.Tensor, alpha: float, limit: float) -> None:
    """Compute out [P, F] of both [P, 2F], in which gates and ups take turns: (up + 1) · gate · sigmoid(alpha · gate), rounded once.

    Gates are clamped to `limit` from above, ups from both sides.
    """
    n_pairs, width = both.shape[0], both.shape[1] // 2
    assert both.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == (n_pairs, width)
    if n_pairs:
        _activate_clamped[(triton.cdiv(width, 512), n_pairs)](
            both, out, width, alpha, limit, BLOCK=512, num_warps=4, enable_fp_fusion=False, **overlap_options(both.device)
        )


def sum_experts(
    added: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, n_experts: int, shared: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Sum each row's experts, added [R · top_k, N] float32, weighted, in the order of its choice: [R, N] in `dtype`, rounded once.

    `shared` [P, R, N] float32: sums of the shared expert's product, which is added last, times the last of `weights` [R, top_k + 1] if that
    many are given.
    """
    (n_rows, k), width = ids.shape, added.shape[1]
    assert added.is_contiguous()
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert weights.shape[1] in (k, k + 1)
    assert added.dtype == weights.dtype == torch.float32
    assert shared is None or (shared.is_contiguous() and shared.shape[1:] == (n_rows, width) and shared.dtype == torch.float32)
    out = torch.empty(n_rows, width, dtype=dtype, device=added.device)
    if n_rows:
        overlaps = get_limits(added.device).overlaps
        _sum_experts[(triton.cdiv(width, 512), n_rows)](
            added, _Choice(ids, weights), shared, out, 0 if shared is None else len(shared), n_rows,
            SHAPE=_SumShape(n_experts, k, weights.shape[1], width, 512, overlaps),
            num_warps=4, enable_fp_fusion=False, launch_pdl=overlaps,
        )  # fmt: skip
    return out


def find_dependence(product: PairProduct, thoroughly: bool) -> str | None:
    """Describe where a pair's product depends on other pairs; None: nowhere. Compared bitwise, on random pairs, on the device.

    Tested are every tile that there is and the one that is chosen, at each of CHECKED_PAIRS or FEW_PAIRS, of which half have one expert and
    the others any; each in both orders, against the same pairs computed alone.
    """
    counts = CHECKED_PAIRS if thoroughly else FEW_PAIRS
    generator, most = torch.Generator().manual_seed(product.n_out), max(counts)
    device, dtype = product.device, product.dtype
    x = torch.randn(most, product.n_in, generator=generator).to(device, dtype)
    ids = torch.randint(product.n_experts, (most, 1), generator=generator).int()
    ids[::2] = product.n_experts - 1
    ids = ids.to(device)
    probe = sorted({0, most // 3, most // 2, most - 1, *range(0, most, -(-most // 8))})
    alone = torch.cat([_multiply_in_order(product, x[i : i + 1], ids[i : i + 1], None)[0] for i in probe])
    for count in counts:
        for tile in (None, *list_tiles(dtype.itemsize, get_limits(device).shared_bytes)):
            inside = [j for j, i in enumerate(probe) if i < count]
            for y in _multiply_in_order(product, x[:count], ids[:count], tile):
                if not torch.equal(y[[probe[j] for j in inside]], alone[inside]):
                    return f"product with experts of {(product.n_out, product.n_in)} at {count} pairs in tiles of {tile}"
    return None


def _multiply_in_order(product: PairProduct, x: torch.Tensor, ids: torch.Tensor, tile: Tile | None) -> list[torch.Tensor]:
    """Multiply rows, each with one expert, to [R, N] float32 in their order, with rows in that order and in the sorted one."""
    pairs = sort_pairs(ids, product.n_experts)
    order = pairs.order.long()
    by_expert = product(x, pairs, of_rows=True, dtype=torch.float32, tile=tile)
    y = torch.empty_like(by_expert).index_copy_(0, order, by_expert)
    return [y, product(x[order], pairs, of_rows=False, dtype=torch.float32, tile=tile)]

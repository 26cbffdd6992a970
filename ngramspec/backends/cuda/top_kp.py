"""Apply top-k and top-p on a CUDA device: one block finds where a row is cut off and draws from what is left.

The module knows one row of logits, its weights, and the sums by chunk made before. The cut is a position in the order (logit falling, id
rising): all tokens with greater logits, and the first few of those with this one. It is searched for by halving: sums by chunk bracket it
between two of 16 logits, passes over the row narrow that until few enough tokens are inside, and these are gathered for the rest. The token
is drawn from a list if a list holds all that the cut leaves, else by passes over the row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ngramspec.backends.cuda.sampling_math import (
    LOWEST,
    PIVOTS,
    WHOLE,
    compute_pivot,
    find_middle,
    key_of,
    load,
    logit_of,
    part_of,
    weight_of,
)

# Added to the weight of each token of a chunk: the upper bits of the sum are the number of tokens, at most 2048.
COUNTED = tl.constexpr(1 << 52)
_COUNT_SHIFT = tl.constexpr(52)
_WEIGHT_MASK = tl.constexpr((1 << 52) - 1)


class RowLogits(NamedTuple):
    """The logits of one row, and what was found of its chunks before. Members are a kernel's own values."""

    at: Any
    """Pointer to the first logit."""
    n_vocab: Any
    n_chunks: Any
    number: Any
    """Number of the row in `best` and `sums`."""
    best: Any  # [rows, chunks, K]: the first K tokens of each chunk, packed
    sums: Any  # [rows, chunks, PIVOTS]: number and weight of its tokens from each pivot up


class Draw(NamedTuple):
    """How the token of a row is drawn."""

    top: Any
    """The greatest logit."""
    temperature: Any
    least: Any
    """The smallest weight that min-p keeps."""
    u: Any
    """The random number, of 2**53."""


class Sizes(NamedTuple):
    """What a kernel is compiled for."""

    chunk: Any
    chunks: Any
    """Chunks of a row, rounded up to a power of two."""
    tile: Any
    listed: Any
    k: Any


@triton.jit
def _skip(row, first, lo, SIZES: tl.constexpr):
    """Return whether no logit of a tile has a key from `lo` up."""
    c = first // SIZES.chunk + tl.arange(0, SIZES.tile // SIZES.chunk)
    peaks = tl.load(row.best + (row.number * row.n_chunks + c) * SIZES.k, mask=c < row.n_chunks, other=LOWEST)
    return (tl.max(peaks, axis=0) >> 32).to(tl.int32) < lo


@triton.jit
def _apply_cut(x, cut, room, seen, draw):
    """Return the weights of the tokens that the cut leaves (0 for others), and which are at the cut; `seen` of its `room` are taken."""
    key = key_of(x)
    tied = (key == cut).to(tl.int32)
    weight = weight_of(x, draw.top, draw.temperature)
    keep = (key > cut) | ((tied > 0) & (seen + tl.cumsum(tied, axis=0) <= room))
    return tl.where(keep & (weight >= draw.least), weight, 0), tl.sum(tied, axis=0)


@triton.jit
def _find_index(weight, goal):
    """Return the index at which the running sum passes the goal."""
    return tl.sum((tl.cumsum(weight, axis=0) <= goal).to(tl.int32), axis=0)


@triton.jit
def draw_of_all(row, draw, SIZES: tl.constexpr):
    """Draw the token of a row with neither top-k nor top-p: first the chunk by the chunks' sums, then the token within it."""
    c = tl.arange(0, SIZES.chunks)
    of_chunks = tl.load(row.sums + (row.number * row.n_chunks + c) * PIVOTS, mask=c < row.n_chunks, other=0)
    goal = part_of(tl.sum(of_chunks, axis=0), draw.u)
    upto = tl.cumsum(of_chunks, axis=0)
    chunk = tl.sum((upto <= goal).to(tl.int32), axis=0)
    goal -= tl.max(tl.where(upto <= goal, upto, 0), axis=0)
    ids = chunk * SIZES.chunk + tl.arange(0, SIZES.chunk)
    weight = weight_of(load(row.at, ids, ids < row.n_vocab), draw.top, draw.temperature)
    return chunk * SIZES.chunk + _find_index(tl.where(weight >= draw.least, weight, 0), goal)


@triton.jit
def _draw_of_list(row, listed, n_listed, cut, room, draw, SIZES: tl.constexpr):
    """Draw the token if all that the cut leaves are in the list."""
    i = tl.arange(0, SIZES.listed)
    ids = tl.load(listed + i, mask=i < n_listed, other=0)
    weight, _ = _apply_cut(load(row.at, ids, i < n_listed), cut, room, 0, draw)
    return tl.sum(tl.where(i == _find_index(weight, part_of(tl.sum(weight, axis=0), draw.u)), ids, 0), axis=0)


@triton.jit
def _draw_of_row(row, cut, room, draw, SIZES: tl.constexpr):
    """Draw the token if more are left than a list holds: one pass over the row for the total, one up to the token."""
    total, seen = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    for first in range(0, row.n_vocab, SIZES.tile):
        if not _skip(row, first, cut, SIZES):
            ids = first + tl.arange(0, SIZES.tile)
            weight, tied = _apply_cut(load(row.at, ids, ids < row.n_vocab), cut, room, seen, draw)
            total += tl.sum(weight, axis=0)
            seen += tied
    goal = part_of(total, draw.u)
    token = tl.full((), -1, tl.int32)
    first, seen = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (token < 0) & (first < row.n_vocab):
        if not _skip(row, first, cut, SIZES):
            ids = first + tl.arange(0, SIZES.tile)
            weight, tied = _apply_cut(load(row.at, ids, ids < row.n_vocab), cut, room, seen, draw)
            here = tl.sum(weight, axis=0)
            if here > goal:
                token = first + _find_index(weight, goal)
            goal -= here
            seen += tied
        first += SIZES.tile
    return token


@triton.jit
def _sum_between(row, lo, hi, draw, SIZES: tl.constexpr):
    """Return number and weight of the row's tokens with keys from `lo` to below `hi`."""
    number, weight = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for first in range(0, row.n_vocab, SIZES.tile):
        if not _skip(row, first, lo, SIZES):
            ids = first + tl.arange(0, SIZES.tile)
            x = load(row.at, ids, ids < row.n_vocab)
            key = key_of(x)
            inside = (key >= lo) & (key < hi)
            number += tl.sum(inside.to(tl.int32), axis=0)
            weight += tl.sum(tl.where(inside, weight_of(x, draw.top, draw.temperature), 0), axis=0)
    return number, weight


@triton.jit
def _gather(row, lo, hi, listed, SIZES: tl.constexpr):
    """Write the ids of the row's tokens with keys from `lo` to below `hi`, rising, to the list; return their number, at most its size."""
    tl.debug_barrier()  # the list before has been read
    n = tl.full((), 0, tl.int32)
    for first in range(0, row.n_vocab, SIZES.tile):
        if not _skip(row, first, lo, SIZES):
            ids = first + tl.arange(0, SIZES.tile)
            key = key_of(load(row.at, ids, ids < row.n_vocab))
            inside = ((key >= lo) & (key < hi) & (ids < row.n_vocab)).to(tl.int32)
            at = n + tl.cumsum(inside, axis=0) - 1
            tl.store(listed + at, ids, mask=(inside > 0) & (at < SIZES.listed))
            n += tl.sum(inside, axis=0)
    tl.debug_barrier()  # what one thread wrote another reads
    return tl.minimum(n, SIZES.listed)


@triton.jit
def cut_and_draw(row, listed, peak, draw, top_k, share, SIZES: tl.constexpr):
    """Draw the token of a row with top-k, top-p (`share` of 2**53) or both."""
    j = tl.arange(0, PIVOTS)
    c = tl.arange(0, SIZES.chunks)[:, None]
    cells = tl.load(row.sums + (row.number * row.n_chunks + c) * PIVOTS + j[None, :], mask=c < row.n_chunks, other=0)
    numbers = tl.sum((cells >> _COUNT_SHIFT) & 0xFFF, axis=0)
    weights = tl.sum(cells & _WEIGHT_MASK, axis=0)
    keys = compute_pivot(draw.top, draw.temperature, j)
    above = peak + 1
    by_number = (top_k > 0) & (top_k < tl.max(numbers, axis=0))
    total = tl.max(weights, axis=0)
    # The cut: all tokens with greater keys, and the first `room` of those with this one.
    cut, room = tl.min(keys, axis=0), tl.full((), 0x7FFFFFFF, tl.int64)
    n_listed, complete = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for phase in range(2):  # top-k, then top-p of what it left
        if ((phase == 0) & by_number) | ((phase == 1) & ((share < WHOLE) | (complete == 0))):
            goal = tl.where(phase == 0, top_k, tl.maximum(part_of(total, share), 1))
            # Tokens from key `lo` up reach the goal, those from `hi` up do not.
            lo, hi = cut, above
            number_above, weight_above = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
            if complete == 0:
                at = tl.sum((tl.where(phase == 0, numbers, weights) < goal).to(tl.int32), axis=0)
                lo = tl.sum(tl.where(j == at, keys, 0), axis=0)
                number = tl.sum(tl.where(j == at, numbers, 0), axis=0)
                if (number > SIZES.listed) & (at > 0):
                    hi = tl.sum(tl.where(j == at - 1, keys, 0), axis=0)
                    number_above = tl.sum(tl.where(j == at - 1, numbers, 0), axis=0)
                    weight_above = tl.sum(tl.where(j == at - 1, weights, 0), axis=0)
                while (number - number_above > SIZES.listed) & (lo + 1 < hi):
                    middle = find_middle(lo, hi)
                    n, w = _sum_between(row, middle, hi, draw, SIZES)
                    if tl.where(phase == 0, number_above + n, weight_above + w) >= goal:
                        lo, number = middle, number_above + n
                    else:
                        hi, number_above, weight_above = middle, number_above + n, weight_above + w
                if number <= SIZES.listed:
                    complete = tl.full((), 1, tl.int32)
                    hi, number_above, weight_above = above, tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
                n_listed = tl.full((), 0, tl.int32)
                if number - number_above <= SIZES.listed:
                    n_listed = _gather(row, lo, hi, listed, SIZES)
            i = tl.arange(0, SIZES.listed)
            ids = tl.load(listed + i, mask=i < n_listed, other=0)
            x = load(row.at, ids, i < n_listed)
            key, weight = key_of(x), weight_of(x, draw.top, draw.temperature)
            worth = tl.where(phase == 0, 1, weight)
            base = tl.where(phase == 0, number_above, weight_above)
            while lo + 1 < hi:
                middle = find_middle(lo, hi)
                if base + tl.sum(tl.where(key >= middle, worth, 0), axis=0) >= goal:
                    lo = middle
                else:
                    hi = middle
            cut = lo
            number_above += tl.sum((key > cut).to(tl.int32), axis=0)
            weight_above += tl.sum(tl.where(key > cut, weight, 0), axis=0)
            unit = weight_of(logit_of(cut), draw.top, draw.temperature)
            if phase == 0:
                room = goal - number_above
                total = weight_above + room * unit
            else:
                room = (goal - weight_above + unit - 1) // unit
    if complete == 1:
        token = _draw_of_list(row, listed, n_listed, cut, room, draw, SIZES)
    else:
        token = _draw_of_row(row, cut, room, draw, SIZES)
    return token

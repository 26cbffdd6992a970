"""Sample on a CUDA device the token that `ngramspec.sampling.sampler.Sampler` samples from the same logits, for every row of a pass.

The module knows rows of logits, sampling parameters as device arrays, and draft trees as parent rows; no sequences, no text. `sample` takes
three launches whatever the rows ask for, so that it can be captured: the best tokens of each chunk of a row; weights by chunk; then one
block per row that adds up and draws. Rows that need less return early.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.sampling_math import (
    INFINITE,
    LAST_ID,
    LOWEST,
    PIVOTS,
    compute_pivot,
    encode_min_p,
    key_of,
    load,
    logit_of,
    peak_of,
    share_of,
    uniform_bits,
    weight_of,
)
from ngramspec.backends.cuda.top_kp import COUNTED, Draw, RowLogits, Sizes, cut_and_draw, draw_of_all

CHUNK = 2048  # Logits that one block sums up: the sum of that many weights and their count fit into 64 bits.
LISTED = 2048  # Tokens around a cut that are gathered into one list.
TILE = 4096  # Logits that a row's single block loads at a time.

_ROWWISE = [
    "temperature", "top_k", "top_p", "min_p", "seed", "sample", "position", "scored", "out", "chosen", "norms", "ids", "values",
]  # fmt: skip
# Rows' arrays may begin anywhere in a larger one, and these kernels are slow to compile: once for all.
_jit: Any = triton.jit(do_not_specialize_on_alignment=_ROWWISE)


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """Device arrays that say how each of R rows is sampled, with the meaning of `SamplingParams`; values are those of valid parameters."""

    temperature: torch.Tensor  # [R] float32; 0: the most likely token
    top_k: torch.Tensor  # [R] int32; 0: all
    top_p: torch.Tensor  # [R] float64
    min_p: torch.Tensor  # [R] float32
    seed: torch.Tensor  # [R, 2] int32: the low half's bits, the high half's
    sample: torch.Tensor  # [R] int32: which of the request's n
    position: torch.Tensor  # [R] int32: of the output token, 0 for the first
    scored: torch.Tensor  # [R] int32: whether its log-probability is wanted

    def select_rows(self, rows: torch.Tensor) -> SamplingArrays:
        """Select these rows [N] int64."""
        return SamplingArrays(*(getattr(self, field.name).index_select(0, rows) for field in fields(self)))


class SamplerWorkspace:
    """Memory that `sample` uses between its launches, for up to `n_rows` rows at a time."""

    def __init__(
        self,
        n_rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        k: int = 1,
        chunk: int = CHUNK,
        tile: int = TILE,
        listed: int = LISTED,
    ) -> None:
        """Allocate the memory.

        `k`: candidates per row, 1 if none are wanted. The sizes are powers of two, `tile` >= `chunk`, and change no token.
        """
        self.n_rows, self.vocab_size, self.k = n_rows, vocab_size, k
        self.chunk, self.tile, self.listed_size = chunk, tile, listed
        self.n_chunks = -(-vocab_size // chunk)
        self.best = torch.empty(n_rows, self.n_chunks, k, dtype=torch.int64, device=device)
        self.sums = torch.empty(n_rows, self.n_chunks, PIVOTS.value, dtype=torch.int64, device=device)
        self.listed = torch.empty(n_rows, listed, dtype=torch.int32, device=device)
        self.parts = torch.empty(n_rows, self.n_chunks, dtype=torch.float64, device=device)


@triton.jit
def _find_best(logits, stride, n_vocab, n_chunks, best, CHUNK: tl.constexpr, K: tl.constexpr):
    """Find the first K tokens of a chunk in the order (logit falling, id rising), packed into numbers of which the greater comes first."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load(logits + row.to(tl.int64) * stride, ids, ids < n_vocab)
    packed = (key_of(x).to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)
    packed = tl.where(ids < n_vocab, packed, LOWEST)
    for k in tl.static_range(K):
        first = tl.max(packed, axis=0)
        tl.store(best + (row * n_chunks + chunk) * K + k, first)
        packed = tl.where(packed == first, LOWEST, packed)


@_jit
def _sum_chunk(
    logits, stride, n_vocab, n_chunks, temperature, top_k, top_p, min_p, scored, best, sums, parts,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    """Sum up a chunk: its weight; for rows with top-k or top-p the number of tokens and their weight from each pivot up; for scored rows
    the sum of exp(logit - greatest) in float64.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    if SCORES:  # noqa: SIM102  # both would be evaluated
        if tl.load(scored + row) > 0:
            greatest = logit_of((peak_of(best, row, n_chunks, CHUNKS, K) >> 32).to(tl.int32)).to(tl.float64)
            i = chunk * CHUNK + tl.arange(0, CHUNK)
            wide = tl.load(logits + row.to(tl.int64) * stride + i, mask=i < n_vocab, other=float("-inf")).to(tl.float64)
            tl.store(parts + row * n_chunks + chunk, tl.sum(tl.exp(wide - greatest), axis=0))
    t = tl.load(temperature + row)
    if t > 0:
        peak = (peak_of(best, row, n_chunks, CHUNKS, K) >> 32).to(tl.int32)
        if peak < INFINITE:
            top = logit_of(peak)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            x = load(logits + row.to(tl.int64) * stride, ids, ids < n_vocab)
            weight = weight_of(x, top, t)
            at = sums + (row * n_chunks + chunk) * PIVOTS
            if (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0):
                key = key_of(x)
                counted = weight + COUNTED
                for j in tl.static_range(PIVOTS):
                    tl.store(at + j, tl.sum(tl.where(key >= compute_pivot(top, t, tl.full((), j, tl.int32)), counted, 0), axis=0))
            else:
                tl.store(at, tl.sum(tl.where(weight >= encode_min_p(tl.load(min_p + row)), weight, 0), axis=0))


@triton.jit
def _first_of(best, row, n_chunks, ids, values, WIDE: tl.constexpr, K: tl.constexpr):
    """Merge the chunks' best into the first K of a row; -1 and -inf fill up missing ones."""
    i = tl.arange(0, WIDE)
    packed = tl.load(best + row * n_chunks * K + i, mask=i < n_chunks * K, other=LOWEST)
    for k in tl.static_range(K):
        first = tl.max(packed, axis=0)
        tl.store(ids + row * K + k, tl.where(first == LOWEST, -1, (first & LAST_ID).to(tl.int32) ^ LAST_ID))
        tl.store(values + row * K + k, tl.where(first == LOWEST, float("-inf"), logit_of((first >> 32).to(tl.int32))))
        packed = tl.where(packed == first, LOWEST, packed)


@_jit
def _finish(
    logits, stride, n_vocab, n_chunks, temperature, top_k, top_p, min_p, seed, sample, position, scored, best, sums, parts, listed,
    out, ids, values, chosen, norms,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr,
    CANDIDATES: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if CANDIDATES:
        _first_of(best, row, n_chunks, ids, values, WIDE, K)
    packed = peak_of(best, row, n_chunks, CHUNKS, K)
    peak = (packed >> 32).to(tl.int32)
    top = logit_of(peak)
    token = (packed & LAST_ID).to(tl.int32) ^ LAST_ID
    t = tl.load(temperature + row)
    if (peak >= INFINITE) | (top == float("-inf")):
        token = tl.full((), -1, tl.int32)
    elif t > 0:
        SIZES: tl.constexpr = Sizes(CHUNK, CHUNKS, TILE, LISTED, K)
        of_row = RowLogits(logits + row.to(tl.int64) * stride, n_vocab, n_chunks, row, best, sums)
        draw = Draw(top, t, encode_min_p(tl.load(min_p + row)), uniform_bits(seed, sample, position, row))
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        if (k > 0) | (p < 1.0):
            share = share_of(p)
            token = cut_and_draw(of_row, listed + row.to(tl.int64) * LISTED, peak, draw, k.to(tl.int64), share, SIZES)
        else:
            token = draw_of_all(of_row, draw, SIZES)
    tl.store(out + row, token)
    if SCORES:  # noqa: SIM102  # both would be evaluated
        if tl.load(scored + row) > 0:
            i = tl.arange(0, CHUNKS)
            total = tl.sum(tl.load(parts + row * n_chunks + i, mask=i < n_chunks, other=0.0), axis=0)
            tl.store(norms + row, top.to(tl.float64) + tl.log(total))
            tl.store(chosen + row, tl.load(logits + row.to(tl.int64) * stride + tl.maximum(token, 0)))


@triton.jit
def _walk(sampled, ids, parents, roots, ends, counts, paths, depth, stride, BLOCK: tl.constexpr):
    b = tl.program_id(0)
    node, end = tl.load(roots + b), tl.load(ends + b)
    count, found = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    found = tl.where(node < 0, end, node)
    while (found < end) & (count < depth):
        token = tl.load(sampled + node)
        first, found = node + 1, end
        while (first < end) & (found == end):
            i = first + tl.arange(0, BLOCK)
            child = (tl.load(parents + i, mask=i < end, other=-1) == node) & (tl.load(ids + i, mask=i < end, other=-1) == token)
            found = tl.min(tl.where(child & (i < end), i, end), axis=0)
            first += BLOCK
        if found < end:
            tl.store(paths + b * stride + count, found)
            node = found
            count += 1
    tl.store(counts + b, count)
    for first in range(0, depth, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(paths + b * stride + i, tl.full((BLOCK,), -1, tl.int32), mask=(i >= count) & (i < depth))


# ---------------------------------------------------------------------- launches


def sample(
    logits: torch.Tensor,
    sampling: SamplingArrays,
    out: torch.Tensor,
    workspace: SamplerWorkspace | None = None,
    likeliest: tuple[torch.Tensor, torch.Tensor] | None = None,
    scores: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Write the token after each row of logits [R, V] float32 to out [R] int32; -1 if the greatest logit is infinite or a logit is NaN.

    `likeliest` (ids [R, k] int32, values [R, k] float32): also write the k most likely tokens and their logits, in the order of
    `sampling.topk`: the lower id first if logits are equal; -1 and -inf if V < k. The workspace's k is then theirs. `scores` (chosen,
    norms): for rows that are `scored`, also write the token's logit [R] float32 and the logarithm of the sum of all logits' exponentials
    [R] float64, whose difference is its log-probability. Without a workspace one is allocated.
    """
    R, V = logits.shape
    k = 1 if likeliest is None else likeliest[0].shape[1]
    w = _check_workspace(logits, workspace, k)
    ids, values = likeliest if likeliest is not None else (out, out)
    chosen, norms = scores if scores is not None else (out, out)
    if R == 0:
        return out
    chunks = triton.next_power_of_2(w.n_chunks)
    stride = logits.stride(0)
    off = {"enable_fp_fusion": False}
    _find_best[w.n_chunks, R](logits, stride, V, w.n_chunks, w.best, CHUNK=w.chunk, K=w.k, num_warps=4, **off)
    how = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    _sum_chunk[w.n_chunks, R](
        logits, stride, V, w.n_chunks, *how, sampling.scored, w.best, w.sums, w.parts,
        CHUNK=w.chunk, CHUNKS=chunks, K=w.k, SCORES=scores is not None, num_warps=4, **off,
    )  # fmt: skip
    _finish[R,](
        logits, stride, V, w.n_chunks, *how, sampling.seed, sampling.sample, sampling.position, sampling.scored,
        w.best, w.sums, w.parts, w.listed, out, ids, values, chosen, norms,
        CHUNK=w.chunk, CHUNKS=chunks, TILE=w.tile, LISTED=w.listed_size, K=w.k, WIDE=triton.next_power_of_2(w.n_chunks * w.k),
        CANDIDATES=likeliest is not None, SCORES=scores is not None, num_warps=16, **off,
    )  # fmt: skip
    return out


def walk(
    sampled: torch.Tensor,
    ids: torch.Tensor,
    parents: torch.Tensor,
    roots: torch.Tensor,
    ends: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Follow B drafts as `verify.match_draft` does: from the root row to the child row whose id was sampled at the row before,
    and so on.

    sampled, ids, parents [R] int32: the token sampled at a row, the row's own token, the row of its parent in the draft (-1: none). A
    sequence's rows are roots[b] to ends[b] - 1, parents first; a root of -1 means no sequence. Returns counts [B] int32, the number of
    accepted draft rows, and paths [B, depth] int32, these rows in order, filled up with -1. The last new token is the one sampled at the
    last of them (or at the root).
    """
    B = len(roots)
    counts = torch.empty(B, dtype=torch.int32, device=sampled.device)
    paths = torch.empty(B, depth, dtype=torch.int32, device=sampled.device)
    if B:
        _walk[B,](sampled, ids, parents, roots, ends, counts, paths, depth, paths.stride(0), BLOCK=128, num_warps=1)
    return counts, paths


def _check_workspace(logits: torch.Tensor, workspace: SamplerWorkspace | None, k: int) -> SamplerWorkspace:
    """Return the workspace, or a new one. Raises ValueError if it does not fit."""
    R, V = logits.shape
    w = workspace if workspace is not None else SamplerWorkspace(R, V, logits.device, k=k)
    if (V, k) != (w.vocab_size, w.k) or w.n_rows < R:
        raise ValueError(f"a workspace for {w.n_rows} rows of {w.vocab_size} logits and k = {w.k}, got {R} rows of {V} and k = {k}")
    return w

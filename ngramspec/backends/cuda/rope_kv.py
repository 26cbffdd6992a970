"""Run the step between the projection of a layer's queries, keys and values and its attention: bias, norm, rotary embedding, KV write.

The projection's partial sums go in; rotated queries come out, keys and values land in the pool. Every step is rounded as transformers'
modules round it. Each row and head is computed by itself; nothing here knows sequences.

Values are written as the nearest finite number, NaN as 0: attention multiplies values that a row does not see by zero, and a draft whose
values overflow would otherwise reach the rows before it. (A key enters only its own score, which is masked.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.attention_metadata import AttentionMetadata
from ngramspec.backends.cuda.overlap import await_previous, overlap_options
from ngramspec.outputs import BLOCK

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _make_finite(x, DTYPE: tl.constexpr):
    """Return the nearest finite number of DTYPE; 0 for NaN."""
    largest: tl.constexpr = 65504.0 if tl.float16 == DTYPE else 3.3895313892515355e38
    x = tl.where(x != x, 0.0, x.to(tl.float32))
    return tl.minimum(tl.maximum(x, -largest), largest).to(DTYPE)


@triton.jit
def _sum_partials(partials, bias, at, offset, inside, size, N_PARTIALS: tl.constexpr, DTYPE: tl.constexpr):
    """Return a linear layer's output: partials [P, size] at `at`, summed in order, with bias at `offset`, rounded, as float32."""
    total = tl.load(partials + at, mask=inside, other=0.0)
    for p in tl.static_range(1, N_PARTIALS):
        total += tl.load(partials + at + p * size, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + offset, mask=inside, other=0.0).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


@triton.jit
def _scale_by_weight(x, rms, weight, at, inside, DTYPE: tl.constexpr):
    """Return x / rms, rounded if the weight has the same dtype, times the norm's weight, rounded (see `layers.compute_norm`)."""
    x *= rms
    if weight.dtype.element_ty == DTYPE:
        x = x.to(DTYPE).to(tl.float32)
    return (x * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)).to(DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def _rope_kv(
    partials,  # [P, R, (H + 2 HK) D] float32, or, if GATED, [P, R, (2 H + 2 HK) D]: every query is followed by its gate
    bias,  # as wide, or None
    cos,  # [L, ROTATED]
    sin,  # [L, ROTATED]
    positions,  # [R]
    slots,  # [R]
    keys,  # [n_blocks + 1, HK, BLOCK, D]
    values,  # the same
    q,  # [R, H, D]
    q_norm,  # [D] or None
    k_norm,  # [D] or None
    eps,
    n_rows,
    N_PARTIALS: tl.constexpr,
    H: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,  # dimensions that are rotated: the first ones
    HALF: tl.constexpr,  # ROTATED / 2 rounded up to a power of two
    REST: tl.constexpr,  # D - ROTATED rounded up to a power of two; 0 where all are rotated
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_previous(OVERLAP)
    dtype: tl.constexpr = q.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    width: tl.constexpr = (H + 2 * HK + H * GATED) * D
    size = n_rows.to(tl.int64) * width
    half: tl.constexpr = ROTATED // 2
    first = tl.arange(0, HALF)
    inside = first < half
    begin = (head + tl.minimum(head, H) * GATED) * D
    at = row * width + begin
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int64)
    a = _sum_partials(partials, bias, at + first, begin + first, inside, size, N_PARTIALS, dtype)
    b = _sum_partials(partials, bias, at + half + first, begin + half + first, inside, size, N_PARTIALS, dtype)
    if REST > 0:
        rest = ROTATED + tl.arange(0, REST)
        c = _sum_partials(partials, bias, at + rest, begin + rest, rest < D, size, N_PARTIALS, dtype)
    if head < H + HK:
        if q_norm is not None:
            squares = tl.sum(a * a, 0) + tl.sum(b * b, 0)
            if REST > 0:
                squares += tl.sum(c * c, 0)
            rms = tl.rsqrt(squares / D + eps)
            weight = q_norm
            if head >= H:
                weight = k_norm
            a = _scale_by_weight(a, rms, weight, first, inside, dtype)
            b = _scale_by_weight(b, rms, weight, half + first, inside, dtype)
            if REST > 0:
                c = _scale_by_weight(c, rms, weight, rest, rest < D, dtype)
        angle = position * ROTATED + first
        cos_a, cos_b = tl.load(cos + angle, mask=inside, other=0.0), tl.load(cos + angle + half, mask=inside, other=0.0)
        sin_a, sin_b = tl.load(sin + angle, mask=inside, other=0.0), tl.load(sin + angle + half, mask=inside, other=0.0)
        rotated_a = (a * cos_a.to(tl.float32)).to(dtype).to(tl.float32) - (b * sin_a.to(tl.float32)).to(dtype).to(tl.float32)
        rotated_b = (b * cos_b.to(tl.float32)).to(dtype).to(tl.float32) + (a * sin_b.to(tl.float32)).to(dtype).to(tl.float32)
        a, b = rotated_a, rotated_b
    if head < H:
        target = q + (row * H + head) * D
    else:
        memory = keys
        if head >= H + HK:
            memory = values
            a, b = _make_finite(a, dtype).to(tl.float32), _make_finite(b, dtype).to(tl.float32)
            if REST > 0:
                c = _make_finite(c, dtype).to(tl.float32)
        target = memory + (((slot // _BLOCK).to(tl.int64) * HK + (head - H) % HK) * _BLOCK + slot % _BLOCK) * D
    tl.store(target + first, a.to(dtype), mask=inside)
    tl.store(target + half + first, b.to(dtype), mask=inside)
    if REST > 0:
        tl.store(target + rest, c.to(dtype), mask=rest < D)


def rope_kv(
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    turns: tuple[torch.Tensor, torch.Tensor],
    rows: AttentionMetadata,
    kv: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    *,
    gated: bool = False,
) -> None:
    """Process the projection's partials [P, R, (H + 2 Hk) D] float32, queries, keys and values side by side, in one launch.

    `gated`: every head's query is followed by its gate, which is skipped: [P, R, (2 H + 2 Hk) D].

    Queries go to q [R, H, D], keys and values to their KV positions in `kv`, both [n_blocks + 1, Hk, BLOCK, D]. If `norms` are given, those
    of queries and of keys [D], these get an RMS norm over each head. Their first dimensions are rotated, halves paired, by `turns`, cos and
    sin [L, rotated] of the row's position. Every step is rounded to q's dtype, as transformers rounds it.
    """
    (cos, sin), (keys, values), (q_norm, k_norm) = turns, kv, norms or (None, None)
    n_partials, n_rows, size = partials.shape
    n_heads, head_dim = q.shape[1:]
    n_kv_heads, rotated = keys.shape[1], cos.shape[1]
    assert size == (n_heads + 2 * n_kv_heads + n_heads * gated) * head_dim, (partials.shape, q.shape, keys.shape)
    assert cos.shape == sin.shape, (cos.shape, sin.shape)
    assert rotated in range(2, head_dim + 1, 2), (rotated, head_dim)
    assert keys.shape == values.shape, (keys.shape, values.shape)
    assert q.dtype == keys.dtype == values.dtype, (q.dtype, keys.dtype, values.dtype)
    assert all(x.is_contiguous() for x in (partials, cos, sin, keys, values, q, rows.positions, rows.slots))
    if n_rows == 0:
        return
    _rope_kv[(n_rows, n_heads + 2 * n_kv_heads)](
        partials,
        bias,
        cos,
        sin,
        rows.positions,
        rows.slots,
        keys,
        values,
        q,
        q_norm,
        k_norm,
        eps,
        n_rows,
        N_PARTIALS=n_partials,
        H=n_heads,
        HK=n_kv_heads,
        D=head_dim,
        ROTATED=rotated,
        HALF=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(head_dim - rotated) if rotated < head_dim else 0,
        GATED=gated,
        num_warps=1,
        enable_fp_fusion=False,
        **overlap_options(q.device),
    )


@triton.jit
def _write_kv(k, v, slots, keys, values, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    row, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, DP)
    slot = tl.load(slots + row)
    source = (row * HK + head) * D + d
    target = (((slot // _BLOCK).to(tl.int64) * HK + head) * _BLOCK + slot % _BLOCK) * D + d
    tl.store(keys + target, tl.load(k + source, mask=d < D, other=0.0), mask=d < D)
    tl.store(values + target, _make_finite(tl.load(v + source, mask=d < D, other=0.0), values.dtype.element_ty), mask=d < D)


def write_kv(k: torch.Tensor, v: torch.Tensor, rows: AttentionMetadata, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write key and value rows k, v [R, Hk, D] to their KV positions in keys and values [n_blocks + 1, Hk, BLOCK, D]; one launch."""
    n_rows, n_kv_heads, head_dim = k.shape
    assert v.shape == k.shape, (k.shape, v.shape)
    assert keys.shape == values.shape == (len(keys), n_kv_heads, BLOCK, head_dim), (k.shape, keys.shape, values.shape)
    assert all(x.is_contiguous() for x in (k, v, keys, values, rows.slots))
    if n_rows:
        _write_kv[(n_rows, n_kv_heads)](
            k, v, rows.slots, keys, values, HK=n_kv_heads, D=head_dim, DP=triton.next_power_of_2(head_dim), num_warps=1
        )

"""Run a layer's row-wise operations on a CUDA device, one launch each: embedding, norm with residual, gates.

The module knows rows and the parts of decoder layers, nothing of sequences. Partial sums `[P, R, N]` of a product go in, rows in the
model's dtype come out. Inside, everything is float32, rounded to the model's dtype where transformers' modules round: the product with its
bias, the residual's sum, the normed value, the activation, every product of two rounded values.

A row is computed by blocks of its own, so no other row enters it. The number of partial sums is an argument, not a constant of the compiled
kernel: the same code, and so the same tree of additions in the norm, runs for any number of rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ngramspec.backends.cuda.overlap import await_previous, overlap_options

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")

_AHEAD = tl.constexpr(4)  # Partial sums that are loaded before the first is added; further ones are loaded in the next round.

# Specialised, 1 would become a constant, and the kernel for many rows another than that for few.
_jit: Any = triton.jit(do_not_specialize=["n_partials", "n_rows"])


@triton.jit
def sum_up(partials, bias, offset, step, n_partials, n, width, dtype: tl.constexpr):
    """Sum up elements `n` (below `width`) of a row's product: its partial sums in order, + bias, rounded to `dtype`, as float32.

    `offset` is the row's first element in the first partial sum, `step` the distance to the next partial sum.
    """
    at = partials + offset + n
    if bias is not None:  # before the sums wait for theirs
        shift = tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)
    total = tl.load(at, mask=n < width, other=0.0).to(tl.float32)
    for first in range(1, n_partials, _AHEAD):
        at += step
        left = n_partials - first
        a = tl.load(at, mask=n < width, other=0.0)
        b = tl.load(at + step, mask=n < tl.where(left > 1, width, 0), other=0.0)
        c = tl.load(at + 2 * step, mask=n < tl.where(left > 2, width, 0), other=0.0)
        d = tl.load(at + 3 * step, mask=n < tl.where(left > 3, width, 0), other=0.0)
        total += a
        total = tl.where(left > 1, total + b, total)
        total = tl.where(left > 2, total + c, total)
        total = tl.where(left > 3, total + d, total)
        at += 3 * step
    if bias is not None:
        total += shift
    return total.to(dtype).to(tl.float32)


@triton.jit
def _norm_values(x, weight, width, eps, dtype: tl.constexpr):
    """Compute x / sqrt(mean(x²) + eps) · weight of a row of float32 with zeros past its end, in `dtype`."""
    mean = tl.sum(x * x, axis=0) / width
    x *= tl.rsqrt(mean + eps)
    if weight.dtype == dtype:
        x = x.to(dtype).to(tl.float32)
    return (weight.to(tl.float32) * x).to(dtype)


@triton.jit
def _embed(ids, table, out, width, out_stride, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(ids + row).to(tl.int64)
    value = tl.load(table + source * width + n, mask=n < width, other=0.0)
    tl.store(out + row.to(tl.int64) * out_stride + n, value, mask=n < width)


@triton.jit
def _compute_norm(x, weight, out, width, x_stride, out_stride, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < width
    w = tl.load(weight + n, mask=inside, other=0.0)
    value = tl.load(x + row * x_stride + n, mask=inside, other=0.0)
    y = _norm_values(value.to(tl.float32), w, width, eps, value.dtype)
    tl.store(out + row * out_stride + n, y, mask=inside)


@_jit
def _add_norm(
    x, partials, bias, weight, out, n_partials, n_rows, width, x_stride, out_stride, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    await_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < width
    step = n_rows.to(tl.int64) * width
    at = x + row * x_stride + n
    w = tl.load(weight + n, mask=inside, other=0.0)
    old = tl.load(at, mask=inside, other=0.0)
    delta = sum_up(partials, bias, row * width, step, n_partials, n, width, old.dtype)
    new = (old.to(tl.float32) + delta).to(old.dtype)
    tl.store(at, new, mask=inside)
    y = _norm_values(new.to(tl.float32), w, width, eps, old.dtype)
    tl.store(out + row * out_stride + n, y, mask=inside)


@_jit
def _gated_activation(
    partials, bias, out, n_partials, n_rows, width, out_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    await_previous(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < width
    dtype: tl.constexpr = out.dtype.element_ty
    step = n_rows.to(tl.int64) * width * 2
    first = row * width * 2
    gate = sum_up(partials, bias, first, step, n_partials, n, width, dtype)
    up_bias = None
    if bias is not None:
        up_bias = bias + width
    up = sum_up(partials, up_bias, first + width, step, n_partials, n, width, dtype)
    if ACTIVATION == "silu":
        gate = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = 0.5 * gate * (2.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0))  # 1 + tanh(inner), which no inner overflows
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(out + row * out_stride + n, (gate.to(dtype).to(tl.float32) * up).to(dtype), mask=inside)


@_jit
def _gate_attention(mixed, partials, bias, n_partials, n_rows, width, D: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    await_previous(OVERLAP)
    row, head, d = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, BLOCK)
    dtype: tl.constexpr = mixed.dtype.element_ty
    inside = d < D
    gate = sum_up(partials, bias, row * width, n_rows.to(tl.int64) * width, n_partials, (2 * head + 1) * D + d, (2 * head + 2) * D, dtype)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    at = mixed + (row * tl.num_programs(0) + head) * D + d
    tl.store(at, (tl.load(at, mask=inside, other=0.0).to(tl.float32) * gate).to(dtype), mask=inside)


def embed(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return rows ids [R] int32 of table [V, N] as [R, N]; all ids must be within the table."""
    width = table.shape[1]
    out = torch.empty(len(ids), width, dtype=table.dtype, device=table.device)
    assert table.is_contiguous()
    assert ids.is_contiguous()
    if len(ids):
        grid = (triton.cdiv(width, 1024), len(ids))
        _embed[grid](ids, table, out, width, out.stride(0), BLOCK=1024, num_warps=4)
    return out


def compute_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute [R, N] = x / sqrt(mean(x²) + eps), rounded, · weight [N].

    A float32 weight with 16-bit rows is multiplied in float32 before the only rounding, as Gemma does (its weight: 1 + w).
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = _check_rows(x, out)
    if rows:
        _compute_norm[(rows,)](x, weight, out, width, x.stride(0), out.stride(0), eps, **_whole_row(width, out.device))
    return out


def add_norm(x: torch.Tensor, partials: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add the product of partials [P, R, N] and bias [N] to x [R, N] in place; return the `compute_norm` of the sum [R, N]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, width = _check_rows(x, out)
    n_partials = _check_partials(partials, bias, rows, width)
    assert partials.dtype == torch.float32, "other sums would be added by other code than those of few rows"
    if rows:
        _add_norm[(rows,)](
            x, partials, bias, weight, out, n_partials, rows, width, x.stride(0), out.stride(0), eps, **_whole_row(width, out.device)
        )
    return out


def compute_gated_activation(
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
    activation: str = "silu",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute out [R, F] = activation(gate) · up of the product of partials [P, R, 2F] (gate first, then up) and bias [2F].

    `dtype`: the dtype of `out` if none is given. `partials` may also be the finished product [1, R, 2F] in the model's dtype (bias: None),
    which halves what passes with many rows write.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    if out is None:
        out = torch.empty(partials.shape[1], partials.shape[2] // 2, dtype=dtype or partials.dtype, device=partials.device)
    rows, width = _check_rows(out, out)
    n_partials = _check_partials(partials, bias, rows, 2 * width)
    if rows:
        grid = (triton.cdiv(width, 512), rows)
        _gated_activation[grid](
            partials,
            bias,
            out,
            n_partials,
            rows,
            width,
            out.stride(0),
            ACTIVATION=activation,
            BLOCK=512,
            num_warps=4,
            enable_fp_fusion=False,
            **overlap_options(out.device),
        )
    return out


def gate_attention(mixed: torch.Tensor, partials: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Multiply mixed [R, H, D] in place by the sigmoid of the gates, each of which follows its head's query in partials [P, R, N ≥ 2 H D].

    `bias` [N] or None.
    """
    n_rows, n_heads, head_dim = mixed.shape
    n_partials = _check_partials(partials, bias, n_rows, partials.shape[2])
    assert mixed.is_contiguous()
    if n_rows:
        _gate_attention[(n_heads, n_rows)](
            mixed,
            partials,
            bias,
            n_partials,
            n_rows,
            partials.shape[2],
            D=head_dim,
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=1,
            enable_fp_fusion=False,
            **overlap_options(mixed.device),
        )


def _whole_row(width: int, device: torch.device) -> dict[str, Any]:
    """Return the launch options for a whole row in one block. Its warps shape the tree of additions, so they depend on the width alone."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 256)), "enable_fp_fusion": False, **overlap_options(device)}


def _check_rows(x: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
    assert x.shape == out.shape
    assert x.dtype == out.dtype
    assert x.stride(1) == out.stride(1) == 1
    # Rows that begin elsewhere would be computed by other code, in which the additions may lie otherwise.
    assert x.data_ptr() % 16 == out.data_ptr() % 16 == 0, "rows begin at multiples of 16 bytes"
    return x.shape[0], x.shape[1]


def _check_partials(partials: torch.Tensor, bias: torch.Tensor | None, rows: int, width: int) -> int:
    assert partials.is_contiguous()
    assert partials.shape[1:] == (rows, width), f"{tuple(partials.shape)} are not sums of [{rows}, {width}]"
    assert partials.dtype == torch.float32 or (len(partials) == 1 and bias is None), "a product that was rounded is one sum with its bias"
    return partials.shape[0]

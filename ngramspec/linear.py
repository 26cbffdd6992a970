"""Linear layers on the CPU: a row's result has the same bits whatever the number of rows.

Knows weights and bits, nothing of models. Weights are packed once for oneDNN; for every shape of weight the
self-test finds a policy under which rows do not depend on their number, measured on the weight itself. `x [T, K]` or
`[1, T, K]` goes in, `[.., N]` comes out, float32.

oneDNN picks its blocking from the shape. What was seen to differ is a single row (another kernel once K exceeds
1024), hence the policies, cheapest first: rows as they are; at least two rows; K in fixed pieces that are
added in order; a fixed number of rows. Where none holds (or there is no oneDNN) the layer says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

CHUNK = 256
"""Most rows of one product; more rows go in several. The self-test covers every count up to this by samples."""

EXACT, STEP = 16, 8
"""More than 16 rows are computed as a multiple of 8: oneDNN compiles code for every row count of every shape that it meets and keeps
it, 0.6 MiB for each."""

_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 16, 17, 21, 24, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 127, 128, 200, 255, 256)
_WIDE = 1 << 24
"""Weights with more elements than this are tested with fewer and smaller counts, so that loading stays short."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How products of one shape of weight are computed."""

    packed: bool
    min_rows: int = 1
    split: int = 0
    """Columns of K per piece; 0: whole."""
    bucket: int = 0
    """Fixed number of rows of every product; 0: none."""
    bitwise: bool = True

    def __str__(self) -> str:
        parts = ["packed" if self.packed else "stock"]
        parts += [f"min_rows={self.min_rows}"] if self.min_rows > 1 else []
        parts += [f"k_pieces={self.split}"] if self.split else []
        parts += [f"bucket={self.bucket}"] if self.bucket else []
        return " ".join(parts + ([] if self.bitwise else ["numerical"]))


def _has_packing() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Product:
    """x @ W.T + b under a policy. W [N, K] float32, b [N] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, policy: Policy) -> None:
        self.n_out, self.n_in = weight.shape
        self.bias, self.policy = bias, policy
        step = policy.split or self.n_in
        pieces = [w.contiguous() for w in weight.split(step, dim=1)]
        self.pieces = [torch.ops.mkldnn._reorder_linear_weight(w, 8) for w in pieces] if policy.packed else pieces

    def _once(self, x: torch.Tensor) -> torch.Tensor:
        policy, rows = self.policy, x.shape[0]
        wanted = policy.bucket or max(policy.min_rows, rows if rows <= EXACT else -(-rows // STEP) * STEP)
        if rows < wanted:
            x = F.pad(x, (0, 0, 0, wanted - rows))
        if not policy.packed:
            y = F.linear(x, self.pieces[0], self.bias)
        else:
            step = policy.split or self.n_in
            y = torch.ops.mkldnn._linear_pointwise(x[:, :step] if policy.split else x, self.pieces[0], self.bias, "none", [], "")
            for i, piece in enumerate(self.pieces[1:], 1):
                y = torch.ops.mkldnn._linear_pointwise.binary(x[:, i * step : (i + 1) * step], y, piece, None, "add")
        return y[:rows] if rows < wanted else y

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        limit = self.policy.bucket or CHUNK
        if x.shape[0] <= limit:
            return self._once(x)
        return torch.cat([self._once(part) for part in x.split(limit)])


def _invariant(product: Product, weight: torch.Tensor, seed: int) -> bool:
    """Rows of products over many row counts, at both ends of the input, against the same rows alone: bitwise."""
    wide = weight.numel() > _WIDE
    counts = [c for c in _COUNTS if c <= (64 if wide else CHUNK)]
    x = torch.randn(counts[-1], product.n_in, generator=torch.Generator().manual_seed(seed))
    probe = range(0, len(x), 16 if wide else 8)
    alone = {i: product(x[i : i + 1]) for i in {*probe, len(x) - 1}}
    for count in counts[1::3] if wide else counts[1:]:
        for start in {0, len(x) - count}:
            y = product(x[start : start + count])
            if any(not torch.equal(row[0], y[i - start]) for i, row in alone.items() if start <= i < start + count):
                return False
    return True


def choose_policy(weight: torch.Tensor, bias: torch.Tensor | None) -> Policy:
    """The cheapest policy that passes the self-test on this weight [N, K]; the last resort is marked not bitwise."""
    candidates = []
    if _has_packing():
        candidates += [Policy(True), Policy(True, min_rows=2)]
        candidates += [Policy(True, split=s) for s in (1024, 512) if weight.shape[1] > s]
        candidates += [Policy(True, bucket=b) for b in (8, 16)]
    candidates += [Policy(False, bucket=16)]
    for policy in candidates:
        if _invariant(Product(weight, bias, policy), weight, seed=weight.shape[0]):
            return policy
    return Policy(_has_packing(), bitwise=False)


class PackedLinear(nn.Module):
    """Stands in for `nn.Linear`; `product` may hold several layers' weights one above the other (see `Shared`)."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.in_features, self.out_features = product.n_in, product.n_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class Shared:
    """One product for several layers that are called on the same input (q, k, v; gate, up)."""

    def __init__(self, product: Product, sizes: list[int]) -> None:
        self.product, self.sizes = product, sizes
        self.x: torch.Tensor | None = None
        self.parts: tuple[torch.Tensor, ...] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self.x:
            y = self.product(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self.x, self.parts = x, y.split(self.sizes, dim=-1)
        result = self.parts[index]
        if index == len(self.sizes) - 1:
            self.x, self.parts = None, ()
        return result


class SharedPart(nn.Module):
    """One of the layers of a `Shared`: the first one called computes all, the last one called drops them."""

    def __init__(self, shared: Shared, index: int, in_features: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index
        self.in_features, self.out_features = in_features, shared.sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared.part(self.index, x)

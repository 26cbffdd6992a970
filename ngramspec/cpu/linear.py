"""Linear layers on the CPU: modules that stand in for `nn.Linear` and multiply with packed weights (`matmul`).

Layers that see the same input share one product. `x [1, T, K]` goes in, `[1, T, N]` comes out, float32. Nothing here knows which layers a
model has.
"""

from __future__ import annotations

import torch
from torch import nn

from ngramspec.cpu.matmul import Product


class PackedLinear(nn.Module):
    """Stands in for `nn.Linear`; `product` may hold several layers' weights one above the other (see `Shared`)."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self.product = product
        self.in_features, self.out_features = product.n_in, product.n_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class Shared:
    """One product for several layers that are called on the same input (q, k, v; gate, up)."""

    def __init__(self, product: Product, sizes: list[int]) -> None:
        self.product, self.sizes = product, sizes
        self.x: torch.Tensor | None = None
        self.parts: tuple[torch.Tensor, ...] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self.x:
            self.x, self.parts = x, self.product(x).split(self.sizes, dim=-1)
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

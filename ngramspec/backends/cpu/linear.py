"""Provide linear layers and an embedding over packed weights (`matmul`, `packing`) that replace transformers' modules on the CPU.

Layers that see the same input share one product. `x [1, T, K]` goes in, `[1, T, N]` comes out, float32. Nothing here knows which layers a
model has, nor where weights come from.
"""

from __future__ import annotations

import torch
from torch import nn

from ngramspec.backends.cpu.codegen.kernels import Kernels
from ngramspec.backends.cpu.matmul import CpuProduct, Matrix, unpack_rows


class CpuPackedLinear(nn.Module):
    """A linear layer that replaces `nn.Linear`."""

    def __init__(self, product: CpuProduct) -> None:
        super().__init__()
        self.product = product
        self.in_features, self.out_features = product.n_in, product.sizes[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class SharedProduct:
    """One product for several layers that are called on the same input (q, k, v; gate, up)."""

    def __init__(self, product: CpuProduct) -> None:
        self.product = product
        self.x: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []

    def get_part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if x is not self.x:
            self.x, self.parts = x, self.product.multiply_split(x)
        result = self.parts[index]
        if index == len(self.product.sizes) - 1:
            self.x, self.parts = None, []
        return result


class SharedLinear(nn.Module):
    """One of the layers of a `SharedProduct`: the first one called computes all, the last one called drops the results."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self.shared, self.index = shared, index
        self.in_features, self.out_features = shared.product.n_in, shared.product.sizes[index]

    @property
    def matrix(self) -> Matrix:
        return self.shared.product.matrices[self.index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared.get_part(self.index, x)


class HeadQueries(SharedLinear):
    """The layer of queries where the product has a gate [D] after every head's query [D]; `HeadGates` returns those of the same call."""

    def __init__(self, shared: SharedProduct, index: int, head_dim: int) -> None:
        super().__init__(shared, index)
        self.head_dim, self.gates = head_dim, torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = super().forward(x).unflatten(-1, (-1, 2, self.head_dim))
        self.gates = heads[..., 1, :].flatten(-2)
        return heads[..., 0, :].flatten(-2)


class HeadGates(nn.Module):
    """The layer of gates beside `HeadQueries`, which is called before."""

    def __init__(self, queries: HeadQueries) -> None:
        super().__init__()
        self._queries = [queries]  # no module of its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._queries[0].gates


class CpuPackedEmbedding(nn.Module):
    """An embedding that replaces `nn.Embedding`; `scale` multiplies the rows, as in models that scale their embedding."""

    def __init__(self, kernels: Kernels, matrix: Matrix, scale: torch.Tensor | float | None) -> None:
        super().__init__()
        self.matrix, self._kernels, self.scale = matrix, kernels, scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = torch.from_numpy(unpack_rows(self._kernels, self.matrix.weight, ids.reshape(-1).numpy())).view(*ids.shape, -1)
        return found if self.scale is None else found * self.scale

"""Modules whose weights stay in blocks on a device, in place of `nn.Linear` and `nn.Embedding` of a model without weights.

A model on the "meta" device and the source of its weights enter (`keep_packed`); matrices whose kind `quantised` multiplies with leave in
blocks, and the rest is `models.parameters.fill`'s. The modules compute what the dequantised ones would, so that transformers' own pass can
be compared with ours; how rows are multiplied is the runner's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ngramspec.backends.cuda.quantised import FORMATS, Packed, joined, pack
from ngramspec.models.loader import PackedForm
from ngramspec.models.tensor_source import StoredTensor, TensorSource

CHUNK = 1 << 24
"""Weights that are taken apart at one time."""


class _InBlocks(nn.Module):
    packed: Packed

    def __init__(self, packed: Packed, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self.dtype = packed, dtype

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype of the weight, without its values."""
        return torch.empty(self.packed.n_out, self.packed.n_in, dtype=self.dtype, device="meta")


class PackedLinear(_InBlocks):
    """Stands in for `nn.Linear`; its weight is dequantised for every pass."""

    def __init__(self, packed: Packed, old: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(packed, dtype)
        self.bias = old.bias
        self.in_features, self.out_features = old.in_features, old.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.packed.dense(x.dtype), self.bias)


class PackedEmbedding(_InBlocks):
    """Stands in for `nn.Embedding`."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.packed.rows(ids.reshape(-1), self.dtype).view(*ids.shape, -1)


def keep_packed(model: PreTrainedModel, source: TensorSource, dtype: torch.dtype, device: str) -> None:
    """Replace the linear layers and embeddings of a model on the "meta" device whose weights the source has in blocks of FORMATS.

    Weights that other modules share stay as they are, but for those of an embedding and a head. Raises what the source's rows raise, and
    torch.OutOfMemoryError.
    """
    for stored, places in _in_blocks(model, source):
        packed = read_packed(stored, device)
        for parent, name, module in places:
            packs = PackedLinear(packed, module, dtype) if isinstance(module, nn.Linear) else PackedEmbedding(packed, dtype)
            setattr(parent, name, packs)


def saved_bytes(model: PreTrainedModel, source: TensorSource, dtype: torch.dtype) -> int:
    """By how much less the weights of a model on the "meta" device take as blocks, as large as the file has them, than in a dtype."""
    return sum(math.prod(stored.shape) * dtype.itemsize - stored.n_rows * stored.row_bytes for stored, _ in _in_blocks(model, source))


IN_BLOCKS = PackedForm(saved_bytes, keep_packed)


def _in_blocks(model: PreTrainedModel, source: TensorSource) -> Iterator[tuple[StoredTensor, list[tuple[nn.Module, str, nn.Module]]]]:
    """The weights that can stay in blocks, each with the modules that it belongs to: (parent, name, module)."""
    users: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            for parameter_name, parameter in child.named_parameters(recurse=False):
                known_as = ".".join(filter(None, (path, name, parameter_name)))
                users.setdefault(parameter, []).append((parent, name, known_as))
    for places in users.values():
        stored = source[places[0][2]]
        modules = [(parent, name, getattr(parent, name)) for parent, name, _ in places]
        if stored.kind in FORMATS and all(type(module) in (nn.Linear, nn.Embedding) for _, _, module in modules):
            yield stored, modules


def read_packed(stored: StoredTensor, device: str) -> Packed:
    """A weight [N, K] in blocks, on a device."""
    n, k = stored.shape
    step = max(1, CHUNK // k)
    return joined([pack(stored.kind, torch.from_numpy(stored.rows(i, min(i + step, n))).to(device)) for i in range(0, n, step)])


def packed_parts(linears: Sequence[nn.Module]) -> list[Packed] | None:
    """The weights of linear layers above each other, those of one format that follow each other joined; None: not all are in blocks.

    The modules get what is theirs of the joined ones, so that nothing is kept twice.
    """
    if not all(isinstance(linear, PackedLinear) for linear in linears):
        return None
    groups: list[list[PackedLinear]] = []
    for linear in linears:
        assert isinstance(linear, PackedLinear)
        if groups and groups[-1][0].packed.format == linear.packed.format:
            groups[-1].append(linear)
        else:
            groups.append([linear])
    parts = []
    for group in groups:
        whole = joined([linear.packed for linear in group])
        first = 0
        for linear in group:
            end = first + linear.packed.n_out
            linear.packed = whole.part(first, end)
            first = end
        parts.append(whole)
    return parts


def joined_weights(linears: Sequence[Any]) -> torch.Tensor:
    """The weights of linear layers above each other, [sum of N, K]; those in blocks dequantised to the dtype of the others."""
    dtype = linears[0].weight.dtype
    return torch.cat([linear.packed.dense(dtype) if isinstance(linear, PackedLinear) else linear.weight.detach() for linear in linears])

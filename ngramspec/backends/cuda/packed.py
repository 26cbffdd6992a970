"""Replace `nn.Linear` and `nn.Embedding` of a model without weights by modules whose weights stay in quant blocks on a device.

`keep_packed` takes a model on the "meta" device and the source of its weights. Matrices of a kind that `quantised` can multiply with stay
in blocks; the rest is left to `models.parameters.fill`. The modules compute what the dequantised ones would, so that transformers' own pass
can be compared with ours; how rows are multiplied is decided by the runner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ngramspec.backends.cuda.packed_experts import PackedExpertWeight
from ngramspec.backends.cuda.quantised import FORMATS, CudaPackedWeight, concatenate_packed, pack
from ngramspec.models.loader import PackedForm
from ngramspec.models.tensor_source import StoredTensor, TensorSource

CHUNK = 1 << 24  # Weights that are repacked at a time.
# Share of the usable memory that weights may take outside of their blocks: keys and values, and what passes take, share the rest.
MOST_DENSE = 0.5


class _InBlocks(nn.Module):
    packed: CudaPackedWeight

    def __init__(self, packed: CudaPackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.packed, self.dtype = packed, dtype

    @property
    def weight(self) -> torch.Tensor:
        """Shape and dtype of the weight, without its values."""
        return torch.empty(self.packed.n_out, self.packed.n_in, dtype=self.dtype, device="meta")


class CudaPackedLinear(_InBlocks):
    """A linear layer that replaces `nn.Linear`; its weight is dequantised for every pass."""

    def __init__(self, packed: CudaPackedWeight, old: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(packed, dtype)
        self.bias = old.bias
        self.in_features, self.out_features = old.in_features, old.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.packed.dequantise(x.dtype), self.bias)


class CudaPackedEmbedding(_InBlocks):
    """An embedding that replaces `nn.Embedding`."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.packed.dequantise_rows(ids.reshape(-1), self.dtype).view(*ids.shape, -1)


def keep_packed(model: PreTrainedModel, source: TensorSource, dtype: torch.dtype, device: str) -> None:
    """Replace the linear layers, embeddings and experts of a model on the "meta" device whose weights the source has in blocks of FORMATS.

    Weights shared by several modules stay as they are, except those of an embedding and a head. Raises what the source's rows raise, and
    torch.OutOfMemoryError.
    """
    for stored, places in _in_blocks(model, source):
        packed = read_packed(stored, device)
        for parent, name, module in places:
            if len(stored.shape) == 3:
                delattr(parent, name)
                setattr(parent, name, PackedExpertWeight(packed, stored.shape[0], dtype))
                model.config.get_text_config()._experts_implementation = "eager"  # which takes one expert after the other
                continue
            packs = CudaPackedLinear(packed, module, dtype) if isinstance(module, nn.Linear) else CudaPackedEmbedding(packed, dtype)
            setattr(parent, name, packs)


def _count_saved_bytes(model: PreTrainedModel, source: TensorSource, dtype: torch.dtype) -> int:
    """Return how many bytes fewer the weights of a model on the "meta" device take in the file's blocks than in a dtype."""
    return sum(math.prod(stored.shape) * dtype.itemsize - stored.n_rows * stored.row_bytes for stored, _ in _in_blocks(model, source))


def make_packed_form(keep_blocks: str, usable_bytes: int) -> PackedForm:
    """Return how weights in blocks are kept: "always" in them, "never", or, by "auto", where the memory that may be used is short.

    Passes are sooner without blocks, and no bit of them is another.
    """

    def must_unpack(model: PreTrainedModel, dtype: torch.dtype) -> bool:
        n_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
        return keep_blocks == "never" or (keep_blocks == "auto" and n_bytes <= MOST_DENSE * usable_bytes)

    def count_saved(model: PreTrainedModel, source: TensorSource, dtype: torch.dtype) -> int:
        return 0 if must_unpack(model, dtype) else _count_saved_bytes(model, source, dtype)

    def replace_modules(model: PreTrainedModel, source: TensorSource, dtype: torch.dtype, device: str) -> None:
        (unpack_weights if must_unpack(model, dtype) else keep_packed)(model, source, dtype, device)

    return PackedForm(count_saved, replace_modules)


def unpack_weights(model: PreTrainedModel, source: TensorSource, dtype: torch.dtype, device: str) -> None:
    """Dequantise on the device what `keep_packed` would keep in blocks. Raises as that does."""
    for stored, places in _in_blocks(model, source):
        weight = nn.Parameter(read_packed(stored, device).dequantise(dtype).view(stored.shape), requires_grad=False)
        for parent, name, module in places:
            setattr(parent if len(stored.shape) == 3 else module, name if len(stored.shape) == 3 else "weight", weight)


def _in_blocks(model: PreTrainedModel, source: TensorSource) -> Iterator[tuple[StoredTensor, list[tuple[nn.Module, str, nn.Module]]]]:
    """Yield the weights that can stay in blocks, each with the modules that it belongs to: (parent, name, module).

    Weights [E, N, K] of experts, which are no module, belong to the module that holds them: (module, name of the parameter, module).
    """
    users: dict[nn.Parameter, list[tuple[nn.Module, str, str]]] = {}
    for path, parent in model.named_modules():
        for name, child in parent.named_children():
            for parameter_name, parameter in child.named_parameters(recurse=False):
                known_as = ".".join(filter(None, (path, name, parameter_name)))
                users.setdefault(parameter, []).append((parent, name, known_as))
    for path, parent, name in [(path, parent, name) for path, parent in model.named_modules() for name in ("gate_up_proj", "down_proj")]:
        held = getattr(parent, name, None)
        if isinstance(held, nn.Parameter) and held.dim() == 3 and not getattr(parent, "is_transposed", False):
            stored = source[f"{path}.{name}"]
            if stored.kind in FORMATS and stored.shape == held.shape:
                yield stored, [(parent, name, parent)]
    for places in users.values():
        stored = source[places[0][2]]
        modules = [(parent, name, getattr(parent, name)) for parent, name, _ in places]
        if stored.kind in FORMATS and all(type(module) in (nn.Linear, nn.Embedding) for _, _, module in modules):
            yield stored, modules


def read_packed(stored: StoredTensor, device: str) -> CudaPackedWeight:
    """Read a weight [N, K] in blocks onto a device."""
    n, k = stored.n_rows, stored.shape[-1]
    step = max(1, CHUNK // k)
    return concatenate_packed(
        [pack(stored.kind, torch.from_numpy(stored.read_rows(i, min(i + step, n))).to(device)) for i in range(0, n, step)]
    )


def packed_parts(linears: Sequence[nn.Module]) -> list[CudaPackedWeight] | None:
    """Concatenate the weights of linear layers, merging neighbours of one format; None if not all are in blocks.

    The modules get their parts of the merged weights, so that nothing is kept twice.
    """
    if not all(isinstance(linear, CudaPackedLinear) for linear in linears):
        return None
    groups: list[list[CudaPackedLinear]] = []
    for linear in linears:
        assert isinstance(linear, CudaPackedLinear)
        if groups and groups[-1][0].packed.format == linear.packed.format:
            groups[-1].append(linear)
        else:
            groups.append([linear])
    parts = []
    for group in groups:
        whole = concatenate_packed([linear.packed for linear in group])
        first = 0
        for linear in group:
            end = first + linear.packed.n_out
            linear.packed = whole.select_rows(first, end)
            first = end
        parts.append(whole)
    return parts


def joined_weights(linears: Sequence[Any]) -> torch.Tensor:
    """Concatenate the weights of linear layers to [sum of N, K]; those in blocks are dequantised to the dtype of the others."""
    dtype = linears[0].weight.dtype
    return torch.cat(
        [linear.packed.dequantise(dtype) if isinstance(linear, CudaPackedLinear) else linear.weight.detach() for linear in linears]
    )

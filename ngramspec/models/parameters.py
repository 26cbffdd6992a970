"""Treat a model's parameters in memory as a source of weights (`tensor_source`), and fill an empty model from one.

Knows transformers' models, not where weights lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.tensor_source import StoredTensor, TensorSource, iterate_row_ranges

DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class MemoryTensor(StoredTensor):
    """A parameter that a model has in memory."""

    tensor: torch.Tensor

    def read_rows(self, first: int, end: int) -> np.ndarray:
        rows = self.tensor.detach().reshape(self.n_rows, self.shape[-1])[first:end].contiguous()
        return rows.cpu().view(torch.uint8).numpy().reshape(end - first, self.row_bytes)


class ParamsSource(TensorSource):
    """Source of the parameters, and of the vectors saved with them, that a model has in memory, as they are when they are read.

    Reading one that is not float32, float16 or bfloat16 raises UnsupportedModelError.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
        saved = model.state_dict().keys()
        parameters |= {name: b for name, b in model.named_buffers() if name in saved and b.dtype in DTYPES and b.dim()}
        super().__init__({}, sum(p.numel() * p.element_size() for p in model.parameters()))
        self._parameters = parameters

    def __getitem__(self, name: str) -> StoredTensor:
        parameter = self._parameters[name]
        if parameter.dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise UnsupportedModelError(f"{name} is {str(parameter.dtype).removeprefix('torch.')}; accepted: {known}")
        return MemoryTensor(kind=DTYPES[parameter.dtype], shape=tuple(parameter.shape), tensor=parameter)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


@torch.no_grad()
def fill(model: PreTrainedModel, source: TensorSource, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """Give a model the parameters that are on the "meta" device, in a dtype on a device, and evaluation mode; tied ones stay tied.

    Besides the finished ones, at most one tensor in `dtype` and a few million weights in float32 lie in memory. Raises ModelNotFoundError
    if a file ends too soon, torch.OutOfMemoryError.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, empty in list(module._parameters.items()):
            if empty is None or not empty.is_meta:
                continue
            if empty not in made:
                stored = source[f"{path}.{name}" if path else name]
                values = torch.empty((stored.n_rows, stored.shape[-1]), dtype=dtype, device=device)
                for first, end in iterate_row_ranges(stored):
                    values[first:end] = torch.from_numpy(stored.read_values(first, end)).to(dtype)
                made[empty] = nn.Parameter(values.reshape(empty.shape), requires_grad=False)
            setattr(module, name, made[empty])
    model.config.dtype = dtype
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)

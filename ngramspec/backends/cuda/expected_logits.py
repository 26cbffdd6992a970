"""Transformers' own logits of a model, which the runner's are compared with at load, and how far rounding takes them from the truth.

The truth is the same pass in float32: each layer's weights are converted before its forward pass and put back after it, so that one layer
is held twice. In bfloat16 every layer adds to the error, and two implementations of a deep model differ by about as much as each of them
differs from float32. So that difference, not a constant, tells what counts as rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ngramspec.backends.base import is_out_of_memory
from ngramspec.backends.cuda.packed import CudaPackedEmbedding
from ngramspec.backends.cuda.packed_experts import PackedExpertWeight

log = logging.getLogger(__name__)

N_TOKENS = 24

# Largest difference of logits, relative to their size, that counts as rounding however little transformers' own pass is rounded.
LEAST_TOLERANCE = {torch.float32: 2e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}
SLACK = 2.5  # Times transformers' own rounding error that ours may be.
MOST_TOLERANCE = 0.5  # Logits this far from float32 have nothing in common with it.


@dataclass(frozen=True, slots=True)
class ExpectedLogits:
    """Logits to compare with, after the last of some tokens."""

    tokens: np.ndarray
    """[n] int32."""
    logits: torch.Tensor
    """[V] float32 on the host, computed in float32 where that was possible."""
    tolerance: float
    """Largest difference from `logits`, relative to their size, that counts as rounding."""


def compute_expected_logits(model: PreTrainedModel) -> ExpectedLogits:
    """Compute a model's logits with its own modules, before any of them is replaced. Experts are run one after the other: that runs in
    every dtype on every device, with any number of rows.
    """
    config = model.config.get_text_config()
    chosen, config._experts_implementation = config._experts_implementation, "eager"
    try:
        return _compute_expected(model)
    finally:
        config._experts_implementation = chosen


def _compute_expected(model: PreTrainedModel) -> ExpectedLogits:
    n = min(len(model.get_output_embeddings().weight), model.config.get_text_config().vocab_size)
    tokens = torch.arange(N_TOKENS) * 7919 % n
    own = _compute_logits(model, tokens)
    least = LEAST_TOLERANCE[model.dtype]
    if model.dtype == torch.float32:
        return ExpectedLogits(tokens.numpy().astype(np.int32), own, least)
    try:
        with _in_float32(model):
            exact = _compute_logits(model, tokens)
    except Exception as e:
        log.debug("%s does not run in float32: %s: %s", type(model).__name__, type(e).__name__, e)
        if is_out_of_memory(e):
            torch.cuda.empty_cache()
        return ExpectedLogits(tokens.numpy().astype(np.int32), own, 2 * least)
    tolerance = min(max(least, SLACK * measure_difference(own, exact)), MOST_TOLERANCE)
    return ExpectedLogits(tokens.numpy().astype(np.int32), exact, tolerance)


def measure_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference of logits [V], over the size of those that were expected."""
    return float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


@torch.inference_mode()
def _compute_logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0, -1].float().cpu()


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Have a model's layers, its embedding, last norm and head convert their weights to float32 while they compute."""
    with ExitStack() as stack:
        for unit in _list_units(model):
            kept: list[tuple[Any, str, Any]] = []
            stack.callback(unit.register_forward_pre_hook(lambda module, _, kept=kept: _convert(module, kept)).remove)
            stack.callback(unit.register_forward_hook(lambda *_, kept=kept: _put_back(kept), always_call=True).remove)
        yield


def _list_units(module: nn.Module) -> Iterator[nn.Module]:
    """Yield what is converted at a time: the elements of a module's lists of layers, and the modules beside these lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        elif any(isinstance(part, nn.ModuleList) for part in child.modules()):
            yield from _list_units(child)
        else:
            yield child


def _convert(unit: nn.Module, kept: list[tuple[Any, str, Any]]) -> None:
    for module in unit.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point() and tensor.dtype != torch.float32:
                kept.append((tensor, "data", tensor.data))
                tensor.data = tensor.data.float()
        if isinstance(module, CudaPackedEmbedding | PackedExpertWeight):  # it unpacks to a dtype of its own
            kept.append((module, "dtype", module.dtype))
            module.dtype = torch.float32


def _put_back(kept: list[tuple[Any, str, Any]]) -> None:
    while kept:
        owner, name, value = kept.pop()
        setattr(owner, name, value)

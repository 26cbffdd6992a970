"""Describe the layers of a Llama-style decoder by their packed weights and options.

A Llama-style layer is: norm, attention with rotary embedding in rotated halves (in some layers or all), optionally a norm of every head's
queries and keys, optionally queries scaled by their position, norm, gated MLP or a mixture of such (`experts`). After the last layer come a
norm and the head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.matmul import MATRIX, Matrix

Q, K, V, OUT, GATE, UP, DOWN = range(7)  # indices of a layer's matrices


class LayerWeights(NamedTuple):
    matrices: tuple[Matrix, ...]
    """Q to DOWN; those from GATE on are the MLP's, or the shared expert's, or missing if there is none."""
    norms: tuple[np.ndarray, np.ndarray]
    """[H] each, before attention and before the MLP."""
    head_norms: tuple[np.ndarray, np.ndarray] | None
    """[D] each, of queries and of keys."""
    window: int = 0
    """Keys that a query sees, its own among them; 0: all."""
    rotary: bool = True
    """Whether queries and keys are rotated by their position."""
    experts: moe.Experts | None = None
    sinks: np.ndarray | None = None
    """[H] of attention: logits of what goes to no key."""


def describe_experts(layers: Sequence[LayerWeights]) -> tuple[np.ndarray, ...]:
    """Return fields [L, 4, MATRIX] and options [L, OPTIONS] of all layers' experts, their weights' scale [L] and corrections [L, E].

    Options of a layer without experts are 0; a model without any has L = 0.
    """
    n = len(layers) if any(layer.experts for layer in layers) else 0
    fields, options, scales = np.zeros((n, 4, MATRIX), np.int64), np.zeros((n, moe.OPTIONS), np.int64), np.zeros(n, np.float32)
    corrected = [each.experts for each in layers if each.experts and each.experts.correction is not None]
    corrections = np.zeros((n, max((each.n_experts for each in corrected), default=0)), np.float32)
    for i, layer in enumerate(layers[:n]):
        if layer.experts:
            fields[i], options[i], scales[i] = layer.experts.fields, layer.experts.options, layer.experts.scale
            if layer.experts.correction is not None:
                corrections[i, : layer.experts.n_experts] = layer.experts.correction
    return fields, options, scales, corrections

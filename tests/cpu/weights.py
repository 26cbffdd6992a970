"""Weights of every kind that models come with: random, rounded to 16 bits, dequantised."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from ngramspec.cpu.packing import WeightFormat
from ngramspec.cpu.simd import HALVES


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16().float(),
    "float16": lambda weight: (weight * 1e-4).half().float(),  # with subnormal ones
}


KEPT_AS = {
    "codes": WeightFormat.CODES,
    "bfloat16": WeightFormat.BFLOAT16,
    "float16": WeightFormat.FLOAT16 if HALVES else WeightFormat.FLOAT32,
    "float32": WeightFormat.FLOAT32,
}
"""The format of weights that come from `OF`, or from `quantised` ("codes")."""


def quantised(kind: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    which = GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(normal(n, k, seed=seed).numpy() * 0.05, which), which).astype(np.float32))


def k_quantised(kind: str, n: int, k: int, seed: int = 0) -> torch.Tensor:
    """Random blocks of a format that the package only reads: half-precision scales, then bytes."""
    which, (size, place) = (
        GGMLQuantizationType[kind],
        {"Q3_K": (110, slice(108, 110)), "Q4_K": (144, slice(4)), "Q5_K": (176, slice(4)), "Q6_K": (210, slice(208, 210))}[kind],
    )
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n, k // 256, size), dtype=np.uint8)
    scales = rng.uniform(1e-4, 1e-2, (n, k // 256, raw[0, 0, place].size // 2))
    raw[:, :, place] = scales.astype(np.float16).view(np.uint8)
    return torch.from_numpy(dequantize(raw.reshape(n, -1), which).astype(np.float32))

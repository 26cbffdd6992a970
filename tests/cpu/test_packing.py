"""Packed weights: every format gives back every weight, and the weights themselves decide which format they get."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights import KEPT_AS, OF, k_quantised, normal, quantised

from ngramspec.cpu.matmul import Product
from ngramspec.cpu.packing import DEPTH, SCALES, PackedWeight, WeightFormat, pack
from ngramspec.cpu.simd import WIDTH

QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def unpacked(packed: PackedWeight, n: int, k: int) -> np.ndarray:
    """[N, K] from panels, by the description of their format alone."""
    kind, data = packed
    if kind in (WeightFormat.CODES, WeightFormat.CODES_BY_16):
        front = data[:, :, :SCALES].copy().view(np.float32)
        scale, offset = front[:, :, None, :WIDTH], front[:, :, None, WIDTH:]
        if kind is WeightFormat.CODES_BY_16:
            scale, offset = np.repeat(np.concatenate([scale, offset], axis=2), DEPTH // 2, axis=2), np.float32(0)
        codes = data[:, :, SCALES:].view(np.int8).reshape(*data.shape[:2], DEPTH, WIDTH)
        blocks = (scale.astype(np.float64) * codes + offset).astype(np.float32)  # exact in float64, then one rounding, as fma does
    else:
        if kind is WeightFormat.BFLOAT16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        blocks = (data.view(np.float16) if kind is WeightFormat.FLOAT16 else data).astype(np.float32).reshape(*data.shape[:2], DEPTH, WIDTH)
    return blocks.transpose(0, 3, 1, 2).reshape(data.shape[0] * WIDTH, -1)[:n, :k]


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_kept_as_codes(kind: str) -> None:
    weight = quantised(kind, 48, 96)
    packed = pack(weight)
    assert packed.format is WeightFormat.CODES
    np.testing.assert_array_equal(unpacked(packed, 48, 96), weight.numpy())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Q3_K", WeightFormat.CODES_BY_16),
        ("Q4_K", WeightFormat.CODES),
        ("Q5_K", WeightFormat.CODES),
        ("Q6_K", WeightFormat.CODES_BY_16),
    ],
)
def test_codes_with_scales_of_their_own(kind: str, expected: WeightFormat) -> None:
    weight = k_quantised(kind, 64, 1024)
    packed = pack(weight)
    assert packed.format is expected
    np.testing.assert_array_equal(unpacked(packed, 64, 1024), weight.numpy())
    x = normal(19, 1024, seed=1)
    assert torch.equal(Product(weight, None)(x), Product(weight, None, packed=False)(x))


@given(
    st.integers(1, 40), st.integers(1, 70), st.sampled_from(["float32", "bfloat16", "float16", "codes", "one other"]), st.integers(0, 99)
)
@settings(max_examples=60, deadline=None)
def test_every_weight_comes_back(n: int, k: int, kind: str, seed: int) -> None:
    k = -(-k // DEPTH) * DEPTH if kind in ("codes", "one other") else k
    weight = quantised("Q4_1", n, k, seed) if kind in ("codes", "one other") else OF[kind](normal(n, k, seed=seed))
    if kind == "one other":
        weight[n - 1, k - 1] *= 1.0000001
    packed = pack(weight)
    assert packed.data.ctypes.data % 64 == 0
    np.testing.assert_array_equal(unpacked(packed, n, k), weight.numpy())
    assert packed.format in {"codes": {WeightFormat.CODES}, "one other": {WeightFormat.CODES, WeightFormat.FLOAT32}}.get(
        kind, {KEPT_AS.get(kind), WeightFormat.BFLOAT16}
    )


@pytest.mark.parametrize("special", [0.0, -0.0, float("inf"), float("nan"), 1e-40, 3e38])
def test_special_weights(special: float) -> None:
    weight = quantised("Q8_0", 16, 64)
    weight[3, 7] = special
    got = unpacked(pack(weight), 16, 64)
    np.testing.assert_array_equal(got, weight.numpy())

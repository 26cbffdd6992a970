"""Products on the CPU: rows keep their bits in any company, in any form, and the forms give back every weight."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.cpu.matmul import CHUNK, Product
from ngramspec.cpu.packing import DEPTH, FORMS, SCALES, pack
from ngramspec.cpu.simd import HALVES, WIDTH

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 33, CHUNK, CHUNK + 1, 2 * CHUNK + 5)
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OF: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float32": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16().float(),
    "float16": lambda weight: (weight * 1e-4).half().float(),  # with subnormal ones
}


KEPT_AS = {"codes": "8-bit codes", "float16": "float16" if HALVES else "float32"}


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


def unpacked(data: np.ndarray, n: int, k: int) -> np.ndarray:
    """[N, K] from panels, by the description in their module alone."""
    if data.dtype.itemsize == 1:
        front = data[:, :, :SCALES].copy().view(np.float32)
        scale, offset = front[:, :, None, :WIDTH], front[:, :, None, WIDTH:]
        if data.dtype == np.uint8:
            scale, offset = np.repeat(np.concatenate([scale, offset], axis=2), DEPTH // 2, axis=2), np.float32(0)
        codes = data[:, :, SCALES:].view(np.int8).reshape(*data.shape[:2], DEPTH, WIDTH)
        blocks = (scale.astype(np.float64) * codes + offset).astype(np.float32)  # exact in float64, then one rounding, as fma does
    else:
        if data.dtype == np.uint16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        blocks = (data.view(np.float16) if data.dtype == np.int16 else data).astype(np.float32).reshape(*data.shape[:2], DEPTH, WIDTH)
    return blocks.transpose(0, 3, 1, 2).reshape(data.shape[0] * WIDTH, -1)[:n, :k]


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_are_kept_as_codes(kind: str) -> None:
    weight = quantised(kind, 48, 96)
    data = pack(weight)
    assert FORMS[data.dtype] == "8-bit codes"
    np.testing.assert_array_equal(unpacked(data, 48, 96), weight.numpy())


@pytest.mark.parametrize(
    ("kind", "form"), [("Q3_K", "8-bit codes by 16"), ("Q4_K", "8-bit codes"), ("Q5_K", "8-bit codes"), ("Q6_K", "8-bit codes by 16")]
)
def test_codes_with_scales_of_their_own(kind: str, form: str) -> None:
    weight = k_quantised(kind, 64, 1024)
    data = pack(weight)
    assert FORMS[data.dtype] == form
    np.testing.assert_array_equal(unpacked(data, 64, 1024), weight.numpy())
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
    data = pack(weight)
    assert data.ctypes.data % 64 == 0
    np.testing.assert_array_equal(unpacked(data, n, k), weight.numpy())
    assert FORMS[data.dtype] in {"codes": {"8-bit codes"}, "one other": {"8-bit codes", "float32"}}.get(
        kind, {KEPT_AS.get(kind, kind), "bfloat16"}
    )


@pytest.mark.parametrize("special", [0.0, -0.0, float("inf"), float("nan"), 1e-40, 3e38])
def test_special_weights(special: float) -> None:
    weight = quantised("Q8_0", 16, 64)
    weight[3, 7] = special
    got = unpacked(pack(weight), 16, 64)
    np.testing.assert_array_equal(got, weight.numpy())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(16, 32), (24, 40), (65, 64), (960, 576), (576, 1536), (33, 2080)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "codes"])
def test_rows_keep_their_bits(n: int, k: int, kind: str, bias: bool) -> None:
    if kind == "codes" and k % DEPTH:
        pytest.skip("codes come in blocks of 32")
    weight = quantised("Q4_1", n, k) if kind == "codes" else OF[kind](normal(n, k))
    product = Product(weight, normal(n, seed=2) if bias else None)
    x = normal(COUNTS[-1], k, seed=1)
    alone = torch.cat([product(x[i : i + 1]) for i in range(len(x))])
    for count in COUNTS:
        assert torch.equal(product(x[:count]), alone[:count])
        assert torch.equal(product(x[-count:]), alone[-count:])
    expected = torch.nn.functional.linear(x.double(), weight.double(), normal(n, seed=2).double() if bias else None)
    assert (alone - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "codes"])
def test_the_form_changes_no_bit(kind: str) -> None:
    weight = quantised("Q8_0", 80, 128) if kind == "codes" else OF[kind](normal(80, 128))
    small, large = Product(weight, None), Product(weight, None, packed=False)
    assert (small.form, large.form) == (KEPT_AS.get(kind, kind), "float32")
    x = normal(37, 128, seed=1)
    assert torch.equal(small(x), large(x))


def test_no_rows() -> None:
    assert Product(normal(24, 32), None)(normal(0, 32)).shape == (0, 24)


def test_any_shape_of_input() -> None:
    product = Product(normal(24, 32), None)
    x = normal(2, 3, 32)
    assert torch.equal(product(x)[1, 2], product(x[1, 2:])[0])
    wide = normal(4, 64)
    assert torch.equal(product(wide[:, ::2]), product(wide[:, ::2].contiguous()))


DIGEST = """
import hashlib, numba, numpy as np, torch
from ngramspec.cpu import simd
simd.CHAINS = {chains} or simd.CHAINS
from ngramspec.cpu.matmul import Product
numba.set_num_threads({threads})
rng = np.random.default_rng(0)
weight = torch.from_numpy(rng.integers(-128, 128, (80, 192)).astype(np.float32)) / 70
x = torch.from_numpy(rng.standard_normal((21, 192)).astype(np.float32))
product = Product(weight, None)
print(product.form, hashlib.sha256(product(x).numpy().tobytes()).hexdigest())
"""


def test_bits_are_those_of_another_processor_and_of_one_thread(tmp_path: Path) -> None:
    """A processor without AVX-512 has smaller tiles and other instructions."""

    def digest(threads: int, chains: int = 0, **environment: str) -> str:
        script = DIGEST.format(threads=threads, chains=chains)
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ | environment
        ).stdout

    here = digest(2)
    assert digest(1) == here
    assert digest(2, 6, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+fma,+avx", NUMBA_CACHE_DIR=str(tmp_path)) == here

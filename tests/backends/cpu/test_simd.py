"""How keys and values are kept: float16 as numpy rounds it, whatever the processor, and no infinity."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from numba import njit

from ngramspec.backends.cpu.codegen import simd


class Halves(NamedTuple):
    to_kv_dtype: Callable[[np.ndarray], np.ndarray]
    """[n] float32 → uint16"""
    numbers: Callable[[np.ndarray], np.ndarray]
    """[n] uint16 → float32"""


@pytest.fixture(params=[True, False], ids=["instructions", "arithmetic"])
def halves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Halves:
    """As compiled for a processor that converts by itself, and for another."""
    if request.param and not simd.HOST.halves:
        pytest.skip("this processor has no such instructions")
    monkeypatch.setattr(simd, "HOST", simd.HOST._replace(halves=request.param))
    to_kv_dtype, load_as_float32 = simd.to_kv_dtype, simd.load_as_float32

    @njit
    def keep(x, to):
        for i in range(x.shape[0]):
            to[i] = to_kv_dtype(to, x[i])

    @njit
    def read(x, to):
        for i in range(x.shape[0]):
            to[i] = load_as_float32(x, i)

    def run(function: Callable[..., None], dtype: type[np.generic]) -> Callable[[np.ndarray], np.ndarray]:
        def whole(x: np.ndarray) -> np.ndarray:
            to = np.zeros(len(x), dtype)
            function(x, to)
            return to

        return whole

    return Halves(run(keep, np.uint16), run(read, np.float32))


FINITE = np.array([bits for bits in range(1 << 16) if bits & 0x7C00 != 0x7C00], np.uint16)


def test_every_number_comes_back(halves: Halves) -> None:
    numbers = halves.numbers(FINITE)
    np.testing.assert_array_equal(numbers.view(np.uint32), FINITE.view(np.float16).astype(np.float32).view(np.uint32))
    np.testing.assert_array_equal(halves.to_kv_dtype(numbers), FINITE)


def test_rounding_is_numpys(halves: Halves) -> None:
    rng = np.random.default_rng(0)
    values = np.sort(FINITE[FINITE < 0x8000].view(np.float16).astype(np.float32))
    ties = (values[1:] + values[:-1]) / 2  # exact
    some = np.concatenate([
        ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(0)), rng.normal(0, 1, 100_000),
        rng.normal(0, 1, 100_000) * 10.0 ** rng.uniform(-12, 4, 100_000), [0.0, 1e-45, 1e-38, 2**-25, 2**-24],
    ]).astype(np.float32)  # fmt: skip
    for x in (some, -some):
        x = x[np.abs(x) <= 65504]
        np.testing.assert_array_equal(halves.to_kv_dtype(x), x.astype(np.float16).view(np.uint16))


def test_what_is_beyond_the_largest_is_the_largest(halves: Halves) -> None:
    x = np.array([65504, 65505, 65519.9, 65520, 1e6, 3e38, np.inf], np.float32)
    np.testing.assert_array_equal(halves.to_kv_dtype(x).view(np.float16), np.full(7, 65504, np.float16))
    np.testing.assert_array_equal(halves.to_kv_dtype(-x).view(np.float16), np.full(7, -65504, np.float16))


def test_float32_is_kept_as_it_is() -> None:
    to_kv_dtype, load_as_float32 = simd.to_kv_dtype, simd.load_as_float32

    @njit
    def through(x, to, back):
        for i in range(x.shape[0]):
            to[i] = to_kv_dtype(to, x[i])
            back[i] = load_as_float32(to, i)

    x = np.array([1.1, -1e38, 1e-45, np.inf, -0.0, 70000.0], np.float32)
    to, back = np.zeros_like(x), np.zeros_like(x)
    through(x, to, back)
    np.testing.assert_array_equal(to.view(np.uint32), x.view(np.uint32))
    np.testing.assert_array_equal(back.view(np.uint32), x.view(np.uint32))

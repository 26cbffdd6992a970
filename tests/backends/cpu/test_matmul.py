"""Products of packed weights: a row has the same bits whatever the number of rows, of threads, and the functions it is put together of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from weights import float32_product, int8_product, packed, random_weight, reference_values, rows_of_kind

from ngramspec.backends.cpu import matmul
from ngramspec.backends.cpu.codegen.kernels import FLOAT_ROWS, INT8_ROWS, Kernels
from ngramspec.backends.cpu.codegen.targets import Target, get_host_target
from ngramspec.backends.cpu.formats import DEPTH, QUANTISED, WIDTH, PlainFormat
from ngramspec.backends.cpu.linear import CpuPackedEmbedding, CpuPackedLinear, SharedLinear, SharedProduct
from ngramspec.backends.cpu.matmul import (
    EACH,
    FUNCTIONS,
    MOST_ROWS,
    STEPS,
    CpuProduct,
    MatmulContext,
    make_code_buffers,
    measure_kernels,
    plan_rows,
    unpack_rows,
)

MIXED = (("Q4_K", 80), ("Q6_K", 37), ("F16", 16), ("Q8_0", 5), ("F32", 33), ("BF16", 48), ("IQ4_XS", 112))


@pytest.fixture(scope="module")
def kernels(kernels_of: Callable[[Target], Kernels]) -> Kernels:
    return kernels_of(get_host_target())


@pytest.fixture(scope="module", params=[True, False], ids=["int8", "float32"])
def products(request: pytest.FixtureRequest, kernels: Kernels) -> MatmulContext:
    return MatmulContext(request.param, kernels)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.shape == b.shape
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def product_of(products: MatmulContext, kinds: tuple[tuple[str, int], ...], k: int, biased: bool = True) -> CpuProduct:
    return CpuProduct(
        products, [products.register_matrix(random_weight(kind, n, k), normal(n, seed=n) if biased and i % 2 == 0 else None)
                   for i, (kind, n) in enumerate(kinds)],
    )  # fmt: skip


def test_rows_keep_their_bits_in_any_company(products: MatmulContext) -> None:
    product = product_of(products, MIXED, 512)
    x = normal(200, 512, seed=1)
    alone = np.concatenate([product.multiply(x[i : i + 1], 1) for i in range(len(x))])
    for count in [*range(1, 71), 200]:
        for threads in (1, 2):
            same_bits(product.multiply(x[:count], threads), alone[:count])
    for count in (5, 64, 65):
        same_bits(product.multiply(x[-count:], 2), alone[-count:])


def test_each_weight_is_multiplied_as_its_format_wants(products: MatmulContext) -> None:
    product, x = product_of(products, MIXED, 512), normal(7, 512, seed=1)
    y = product.multiply(x, 2)
    for i, (kind, n) in enumerate(MIXED):
        bias = normal(n, seed=n) if i % 2 == 0 else np.zeros(n, np.float32)
        got, rows = y[:, product.columns[i] :][:, :n], rows_of_kind(kind, n, 512)
        if products.int8 and kind in QUANTISED:
            same_bits(got, int8_product(packed(kind, rows), x, bias))
        else:
            same_bits(got, float32_product(reference_values(kind, rows), x, bias))


@pytest.mark.parametrize("k", [1, 40, 95])
def test_inputs_that_are_no_whole_blocks(k: int, kernels: Kernels) -> None:
    for int8 in (True, False):
        kinds = tuple((kind, 40) for kind in PlainFormat.__members__)
        product, x = product_of(MatmulContext(int8, kernels), kinds, k), normal(9, k, seed=1)
        y = product.multiply(x, 2)
        for i, (kind, n) in enumerate(kinds):
            bias = normal(n, seed=n) if i % 2 == 0 else np.zeros(n, np.float32)
            same_bits(y[:, product.columns[i] :][:, :n], float32_product(reference_values(kind, rows_of_kind(kind, n, k)), x, bias))


def test_what_does_not_fit_is_not_read(products: MatmulContext) -> None:
    product = product_of(products, (("F32", 16),), 64)
    for x in (normal(2, 63), normal(2, 64).astype(np.float64), normal(64, 2).T):
        with pytest.raises(AssertionError):
            product.multiply(x, 1)
    assert product.multiply(normal(0, 64), 2).shape == (0, 16)


seconds = st.fixed_dictionaries({rows: st.floats(1e-6, 1e-3) for rows in INT8_ROWS}) | st.fixed_dictionaries(
    {rows: st.floats(1e-6, 1e-3) for rows in FLOAT_ROWS}
)


@given(seconds)
def test_rows_are_put_together_to_take_least(seconds: dict[int, float]) -> None:
    first = plan_rows(seconds)
    assert set(first[1:]) <= set(seconds)

    each = {rows: taken + EACH * seconds[1] for rows, taken in seconds.items()}

    def cost(n: int) -> float:
        total = 0.0
        while n:
            rows = int(first[min(n, MOST_ROWS)])
            assert 0 < rows <= n
            total, n = total + each[rows], n - rows
        return total

    least = [0.0]
    for n in range(1, MOST_ROWS):
        least.append(min(least[n - rows] + taken for rows, taken in each.items() if rows <= n))
        assert cost(n) == pytest.approx(least[n], abs=1e-10)
    for n in range(1, 3 * MOST_ROWS):
        assert cost(n) <= n * each[1] + 1e-10


@pytest.mark.parametrize("seed", range(4))
def test_what_was_measured_changes_no_bit(seed: int, products: MatmulContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def any_times(functions: dict[int, int], *_: object) -> dict[int, float]:
        rng = np.random.default_rng(seed)
        return {rows: float(rng.uniform(0.5, 2)) * rows ** rng.uniform(0.3, 1) for rows in functions}

    usual, x = product_of(products, MIXED[:3], 256), normal(70, 256, seed=1)
    monkeypatch.setattr(matmul, "measure_kernels", any_times)
    other = product_of(MatmulContext(products.int8, products.kernels), MIXED[:3], 256)
    for count in (1, 7, 16, 33, 70):
        same_bits(other.multiply(x[:count], 2), usual.multiply(x[:count], 2))


def test_every_function_is_measured(products: MatmulContext) -> None:
    products.register_matrix(random_weight("Q5_K", 16, 256))
    fmt = QUANTISED["Q5_K"]
    functions = products.kernels.get_row_functions(fmt, products.int8)
    times = measure_kernels(functions, fmt, products.int8, repeat=1)
    assert times.keys() == functions.keys()
    assert all(0 < seconds < 1 for seconds in times.values())
    line = products.tables[products._lines[fmt, products.int8, False]]
    assert [line[FUNCTIONS + rows] for rows in functions] == list(functions.values())
    assert line[STEPS + 1] == 1


def test_modules_over_one_product(products: MatmulContext) -> None:
    product = product_of(products, (("Q8_0", 80), ("Q4_0", 24), ("F32", 33)), 64)
    shared = SharedProduct(product)
    parts, x = [SharedLinear(shared, i) for i in range(3)], torch.from_numpy(normal(2, 5, 64, seed=1))
    expected = product.multiply(x.reshape(10, 64).numpy(), 1)
    for _ in range(2):
        for i, part in enumerate(parts):
            y = part(x)
            assert y.shape == (2, 5, part.out_features)
            same_bits(y.reshape(10, -1).numpy(), expected[:, product.columns[i] :][:, : part.out_features])
    assert shared.x is None, "inputs are let go of"
    assert [part.matrix for part in parts] == list(product.matrices)
    wide = torch.from_numpy(normal(5, 128, seed=2))
    linear = CpuPackedLinear(product_of(products, (("Q8_0", 80),), 64))
    assert torch.equal(linear(wide[:, ::2]), linear(wide[:, ::2].contiguous()))


def test_an_embedding_gives_rows(products: MatmulContext) -> None:
    matrix = products.register_matrix(random_weight("Q4_K", 50, 256))
    ids = torch.tensor([[0, 49, 17], [17, 16, 15]])
    values = torch.from_numpy(reference_values("Q4_K", rows_of_kind("Q4_K", 50, 256)))
    assert torch.equal(CpuPackedEmbedding(products.kernels, matrix, None)(ids), values[ids])
    assert torch.equal(CpuPackedEmbedding(products.kernels, matrix, 16.0)(ids), values[ids] * 16)
    np.testing.assert_array_equal(unpack_rows(products.kernels, matrix.weight, ids[0].numpy()), values[ids[0]].numpy())
    assert matrix.weight.n_blocks == 256 // DEPTH
    assert matrix.bias.shape == (4 * WIDTH,)


@pytest.mark.parametrize("n_inputs", [576, 1536, 2048, 4096, 14336])
def test_rows_of_codes_lie_in_different_sets_of_the_cache(n_inputs: int) -> None:
    codes, act_scales = make_code_buffers(max(INT8_ROWS), n_inputs)
    assert codes.shape[-1] >= n_inputs
    assert codes.shape[-1] == DEPTH * act_scales.shape[-2]
    sets = {r * codes.strides[0] % 4096 // 64 for r in range(len(codes))}
    assert len(sets) == len(codes)

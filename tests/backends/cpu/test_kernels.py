"""Generated machine code: every target gives the bits of plain arithmetic, and plain arithmetic those that numpy finds step by step."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from llvmlite import binding
from weights import (
    codes_and_act_scales,
    float32_product,
    int8_product,
    multiply,
    quantised,
    random_weight,
    reference_values,
    rows_of_kind,
    run,
)

from ngramspec.backends.cpu.codegen import targets
from ngramspec.backends.cpu.codegen.activations import INTEGER_ZERO, emit_quantise
from ngramspec.backends.cpu.codegen.kernels import FEW_ROWS, FLOAT_ROWS, CompiledModules, Kernels, build_module
from ngramspec.backends.cpu.codegen.products import EXACT_BLOCKS, emit_float32, emit_int8
from ngramspec.backends.cpu.codegen.targets import Target, get_host_target, list_targets
from ngramspec.backends.cpu.codegen.tiles import emit_int8_tiles, list_tile_rows
from ngramspec.backends.cpu.formats import DEPTH, QUANTISED, SUPER, WIDTH, PlainFormat, QuantFormat, WeightFormat
from ngramspec.backends.cpu.matmul import CpuProduct, MatmulContext, quantise_row
from ngramspec.backends.cpu.packing import PackedWeight
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.sampling.numeric import compute_gelu, exp

N, K = 37, 768
MOST = 64  # as many as a kernel takes
# Formats whose kernels are compiled for every number of rows for every target, which takes seconds for each; others' are for the best one.
ALL_ROWS = ("Q4_0", "Q4_K", "Q6_K", "F16")
# Formats that are compiled here: others of IQ1, IQ2 and IQ3 differ in values alone, or have the same (`test_packing` tries all).
COMPILED = tuple(kind for kind in QUANTISED if kind not in ("IQ1_S", "IQ2_XXS", "IQ2_S", "IQ3_S"))


def activations(n: int, k: int, seed: int = 1) -> np.ndarray:
    """[n, K] float32, some of them outliers, with a block of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (n, k)).astype(np.float32)
    x *= np.where(rng.random(x.shape) < 0.01, np.float32(40), np.float32(1))
    x[0, :DEPTH] = 0
    return x


def bias_of(n_panels: int) -> np.ndarray:
    return np.random.default_rng(2).normal(0, 0.3, n_panels * WIDTH).astype(np.float32)


def get_functions(kernels: Kernels, kind: str, fmt: WeightFormat, int8: bool) -> dict[int, int]:
    functions = kernels.get_row_functions(fmt, int8, few=kind not in ALL_ROWS and kernels.target != get_host_target())
    assert tuple(functions) in (FEW_ROWS, kernels.list_row_counts(fmt, int8))
    return functions


def multiply_few(kernels: Kernels, weight: PackedWeight, x: np.ndarray, act_scales: np.ndarray | None, bias: np.ndarray) -> np.ndarray:
    """Multiply x [n, K], four rows or one at a time, with the kernels that compile soonest."""
    functions, n = kernels.get_row_functions(weight.format, act_scales is not None, few=True), len(x)
    pieces = [slice(i, i + 4) for i in range(0, n - 3, 4)] + [slice(i, i + 1) for i in range(n - n % 4, n)]
    return np.concatenate(
        [multiply(functions[len(x[piece])], weight, x[piece], None if act_scales is None else act_scales[piece], bias) for piece in pieces]
    )


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("kind", COMPILED)
def test_int8_products_are_those_of_numpy(kind: str, generic: Kernels) -> None:
    weight, x = random_weight(kind, N, K), activations(5, K)
    bias = bias_of(weight.n_panels)
    codes, act_scales = codes_and_act_scales(generic, x, weight.format)
    got = multiply_few(generic, weight, codes, act_scales, bias)
    same_bits(got[:, :N], int8_product(weight, x, bias[:N]))
    assert (got[:, N:] == bias[N:]).all()  # outputs that no row of the file has


@pytest.mark.parametrize("kind", [*COMPILED, *PlainFormat.__members__])
def test_float32_products_are_those_of_numpy(kind: str, generic: Kernels) -> None:
    rows, x = rows_of_kind(kind, N, K), activations(5, K)
    weight = random_weight(kind, N, K)
    bias = bias_of(weight.n_panels)
    got = multiply_few(generic, weight, x, None, bias)
    same_bits(got[:, :N], float32_product(reference_values(kind, rows), x, bias[:N]))


@pytest.mark.parametrize("kind", COMPILED)
def test_int8_products_are_near_the_exact_ones(kind: str, generic: Kernels) -> None:
    weight, x = random_weight(kind, N, K), np.random.default_rng(5).normal(0, 1, (12, K)).astype(np.float32)
    codes, act_scales = codes_and_act_scales(generic, x, weight.format)
    got = multiply_few(generic, weight, codes, act_scales, np.zeros(weight.n_panels * WIDTH, np.float32))[:, :N]
    values = reference_values(kind, rows_of_kind(kind, N, K)).astype(np.float64)
    # a code is off by 1/2 of 127ths of its block's largest number at the most, evenly spread
    size = SUPER * DEPTH if weight.format.by_super else DEPTH
    off = np.abs(x).reshape(12, -1, size).max(-1).repeat(size, 1) / 127 / np.sqrt(12)
    expected_error = np.sqrt(off**2 @ (values**2).T)
    z = (got - x.astype(np.float64) @ values.T) / expected_error
    assert np.abs(z).max() < 5, "standard deviations; 444 outputs"
    assert 0.7 < z.std() < 1.3, "outputs of one row are not independent"


@pytest.mark.parametrize("kind", COMPILED)
def test_int8_bits_do_not_depend_on_the_target_or_the_number_of_rows(kind: str, generic: Kernels, other: Kernels) -> None:
    weight, x = random_weight(kind, N, K), activations(MOST, K)
    bias = bias_of(weight.n_panels)
    codes, act_scales = codes_and_act_scales(generic, x, weight.format)
    expected = multiply_few(generic, weight, codes, act_scales, bias)
    for made in (generic, other):
        for rows, function in get_functions(made, kind, weight.format, True).items():
            for first in (0, MOST - rows):
                some = slice(first, first + rows)
                same_bits(multiply(function, weight, codes[some], act_scales[some], bias), expected[some])


@pytest.mark.skipif(not get_host_target().tiles, reason="this processor has no AMX, or the system keeps it back")
@pytest.mark.parametrize("kind", [kind for kind in COMPILED if list_tile_rows(QUANTISED[kind])])
@pytest.mark.parametrize("n_inputs", [32, 64, 96, 128, 160, 416, 256, 512, 1024])
def test_tiles_multiply_any_number_of_blocks(kind: str, n_inputs: int, generic: Kernels, kernels_of: Callable[[Target], Kernels]) -> None:
    if QUANTISED[kind].by_super and n_inputs % 256:
        pytest.skip("whole super-blocks only")
    weight, x = random_weight(kind, N, n_inputs), activations(MOST, n_inputs)
    bias = bias_of(weight.n_panels)
    codes, act_scales = codes_and_act_scales(generic, x, weight.format)
    expected = multiply_few(generic, weight, codes, act_scales, bias)
    tiles = kernels_of(get_host_target())
    assert {8, 12, 16, 32} <= set(tiles.list_row_counts(weight.format, True))
    for rows, function in tiles.get_row_functions(weight.format, True).items():
        same_bits(multiply(function, weight, codes[:rows], act_scales[:rows], bias), expected[:rows])


@pytest.mark.parametrize("kind", COMPILED)
def test_the_largest_codes(kind: str, generic: Kernels, other: Kernels) -> None:
    """Where sums are begun in 16 bits, or added up in float32 as integers, they fit."""
    weight = random_weight(kind, N, K)
    weight.data[:, weight.codes_at :] = 255
    if kind == "Q4_K":
        weight.data[:, : weight.super_at] = 63  # the largest scales and offsets
    x = np.array([3.0, -3.0, 2.9, -2.9, 3.0, -3.0])[:, None] * np.ones(K, np.float32)
    x[2, ::2] = x[3, 1::2] = 0
    x = np.resize(x, (MOST, K))
    codes, act_scales = codes_and_act_scales(generic, x.astype(np.float32), weight.format)
    assert {codes.min(), codes.max()} == {-127, 127}
    bias = bias_of(weight.n_panels)
    expected = multiply_few(generic, weight, codes, act_scales, bias)
    for rows, function in get_functions(other, kind, weight.format, True).items():
        same_bits(multiply(function, weight, codes[:rows], act_scales[:rows], bias), expected[:rows])


@pytest.mark.parametrize("kind", [*COMPILED, *PlainFormat.__members__])
def test_float32_bits_do_not_depend_on_the_target_or_the_number_of_rows(kind: str, generic: Kernels, other: Kernels) -> None:
    if other.target.name in ("AVX-512", "AVX-VNNI"):
        pytest.skip("its code differs in products of integers alone")
    most = max(FLOAT_ROWS)
    for n in (N, 16, 7 * WIDTH):  # panels that are taken four at a time, and those that are left
        weight, x = random_weight(kind, n, 512), activations(most, 512)
        bias = bias_of(weight.n_panels)
        expected = multiply_few(generic, weight, x, None, bias)
        for made in (generic, other):
            for rows, function in get_functions(made, kind, weight.format, False).items():
                for first in (0, most - rows):
                    some = slice(first, first + rows)
                    same_bits(multiply(function, weight, x[some], None, bias), expected[some])


def extremes() -> np.ndarray:
    """[T, 64]: rows that are not like activations."""
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 1, (4, 64)).astype(np.float32)
    halves = np.concatenate([[127], np.arange(63) - 31.5]).astype(np.float32)  # codes that are exactly between two
    rows = [
        np.zeros(64), -np.zeros(64), normal[0] * 1e30, normal[1] * -1e-30, normal[2] * 1e37, halves, -halves, halves * 2.0**-90,
        np.full(64, -3.0), np.where(np.arange(64) == 40, -127.0, 0), np.full(64, 3.4e38), normal[3] * 1e-35,
    ]  # fmt: skip
    return np.stack(rows).astype(np.float32)


def test_codes_of_activations(generic: Kernels, other: Kernels) -> None:
    x = np.concatenate([activations(5, 64), extremes()])
    codes, act_scales = codes_and_act_scales(generic, x, QUANTISED["Q4_0"])
    wanted, scales = quantised(x)
    np.testing.assert_array_equal(codes.reshape(wanted.shape), wanted)
    assert np.abs(wanted).max() == 127
    integers = act_scales.view(np.int32)
    same_bits(act_scales[:, :, 0], scales)
    np.testing.assert_array_equal(integers[:, :, 1], wanted.sum(-1))
    np.testing.assert_array_equal(integers[:, :, 2], wanted[:, :, :16].sum(-1))
    with np.errstate(over="ignore"):
        same_bits(act_scales[:, :, 3], scales * wanted.sum(-1).astype(np.float32))
    same = codes_and_act_scales(other, x, QUANTISED["Q4_0"])
    np.testing.assert_array_equal(same[0], codes)
    same_bits(same[1], act_scales)


def test_codes_of_activations_by_super_blocks(generic: Kernels, other: Kernels) -> None:
    size = SUPER * DEPTH
    x = np.concatenate([activations(5, 2 * size), np.tile(extremes(), (1, 2 * size // 64))])
    codes, act_scales = codes_and_act_scales(generic, x, QUANTISED["Q4_K"])
    wanted, scales = quantised(x, size)
    np.testing.assert_array_equal(codes.reshape(wanted.shape), wanted)
    records = act_scales.reshape(len(x), 2, -1)
    same_bits(records[:, :, 0], scales)
    sums = records.view(np.int16)
    np.testing.assert_array_equal(sums[:, :, 8:16], wanted.reshape(len(x), 2, 8, 32).sum(-1))
    of_halves = wanted.reshape(len(x), 2, 16, 16).sum(-1)
    np.testing.assert_array_equal(sums[:, :, 16:32], of_halves)
    np.testing.assert_array_equal(records.view(np.int32)[:, :, 16:32], -INTEGER_ZERO * of_halves)
    same = codes_and_act_scales(other, x, QUANTISED["Q4_K"])
    np.testing.assert_array_equal(same[0], codes)
    same_bits(same[1], act_scales)


def test_codes_are_the_same_whatever_else_is_quantised(generic: Kernels) -> None:
    """Both kinds of codes, and rows that have no whole super-block."""
    both = generic.get_quantise(QUANTISED.values())
    assert len({both, *(generic.get_quantise([QUANTISED[kind]]) for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K"))}) == 3
    assert generic.get_quantise([PlainFormat.F16]) == 0
    for k, n_supers in ((512, 2), (224, 0)):
        x = activations(1, k)[0]
        codes, act_scales = np.zeros((2, k), np.int8), np.zeros((2, k // DEPTH, 4), np.float32)
        quantise_row(both, x, codes, act_scales)
        for plane, kind in ((0, "Q4_0"), (1, "Q4_K")) if n_supers else ((0, "Q4_0"),):
            wanted = codes_and_act_scales(generic, x[None], QUANTISED[kind])
            np.testing.assert_array_equal(codes[plane], wanted[0][0])
            same_bits(act_scales[plane], wanted[1][0])
        assert n_supers or not codes[1].any()


@pytest.mark.parametrize("size", [1e-37, 1e-38, 1e-40, 1e-45])
def test_numbers_too_small_for_a_scale(size: float, generic: Kernels, other: Kernels) -> None:
    """127 over the largest is no float32 here. What comes of it is next to nothing."""
    x = (np.random.default_rng(0).uniform(-1, 1, (1, 64)) * size).astype(np.float32)
    weight = random_weight("Q4_K", WIDTH, 256)
    x = np.tile(x, (1, 4))
    for made in (generic, other):
        codes, act_scales = codes_and_act_scales(made, x, weight.format)
        y = multiply(made.get_row_functions(weight.format, True, few=True)[1], weight, codes, act_scales, np.zeros(WIDTH, np.float32))
        assert np.abs(y).max() < 1e-30


def activate(function: int, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    y = np.full_like(gate, np.nan)
    run(function, gate.ctypes.data, up.ctypes.data, len(gate) // DEPTH, y.ctypes.data)
    return y


def test_silu(generic: Kernels, other: Kernels) -> None:
    rng = np.random.default_rng(0)
    edges = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 88.0, -88.0, 88.8, -88.8, 104.0, -104.0, 1e4, -1e4, 1e30, -1e30, 0.5]
    gate = np.concatenate([np.array(edges * 2), rng.normal(0, 4, 8000), np.linspace(-110, 110, 4192)]).astype(np.float32)
    up = rng.normal(0, 2, len(gate)).astype(np.float32)
    got = activate(generic.get_activation("silu"), gate, up)
    one = np.float32(1)
    same_bits(got, np.array([g / (one + exp(-g)) * u for g, u in zip(gate, up, strict=True)], np.float32))
    same_bits(activate(other.get_activation("silu"), gate, up), got)
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = wide / (1 + np.exp(-wide)) * up
    rest = 1e-38 * np.abs(wide * up)  # the exponential ends before it is no float32 any more
    assert (np.abs(got - expected) <= 3e-7 * np.abs(expected) + rest + 1e-44).all()


def test_gelu(generic: Kernels, other: Kernels) -> None:
    rng = np.random.default_rng(0)
    edges = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 5.0, -5.0, 10.0, -10.0, 1e4, -1e4, 1e20, -1e20, 1e30, -1e30, 0.5]
    gate = np.concatenate([np.array(edges * 2), rng.normal(0, 2, 4000), np.linspace(-12, 12, 4192)]).astype(np.float32)
    up = rng.normal(0, 2, len(gate)).astype(np.float32)
    got = activate(generic.get_activation("gelu"), gate, up)
    same_bits(got, np.array([compute_gelu(g) * u for g, u in zip(gate, up, strict=True)], np.float32))
    same_bits(activate(other.get_activation("gelu"), gate, up), got)
    near = np.abs(gate) < 1e5
    expected = torch.nn.functional.gelu(torch.from_numpy(gate[near]).double(), approximate="tanh").numpy() * up[near]
    np.testing.assert_allclose(got[near], expected, rtol=1e-5, atol=1e-6)
    assert np.isfinite(got).all()
    for kernels in (generic, other):
        same_bits(
            activate(kernels.get_activation("plain gelu"), gate, up), activate(generic.get_activation("gelu"), gate, np.ones_like(up))
        )


def test_squared_relu(generic: Kernels, other: Kernels) -> None:
    x = np.array([0.0, -0.0, 1e-30, -1e-30, 3.0, -3.0, 1e20, np.nan, *np.linspace(-4, 4, 56)], np.float32)
    with np.errstate(over="ignore"):
        expected = np.maximum(x, 0) * x
    for kernels in (generic, other):
        same_bits(activate(kernels.get_activation("squared relu"), x, np.full_like(x, np.nan)), expected)


def test_targets_are_listed_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(features: str) -> list[str]:
        monkeypatch.setattr(targets.numba_config, "CPU_FEATURES", features)
        return [target.dot for target in list_targets()]

    assert list_targets()[0] == get_host_target()
    assert names("-avx2") == ["plain"]
    assert names("+avx2,+fma,+f16c") == ["maddubs", "plain"]
    assert names("+avx2,+fma") == ["plain"]
    assert names("+avx2,+fma,+f16c,+avxvnni") == ["vnni256", "maddubs", "plain"]
    assert names("+avx2,+fma,+f16c,+avx512bw") == ["maddubs", "maddubs", "plain"]
    assert names("+avx2,+fma,+f16c,+avx512bw,+avx512vnni") == ["vnni512", "maddubs", "plain"]
    assert names("+neon,+dotprod") == ["neon", "plain"]
    assert names("+neon,+dotprod,+i8mm") == ["usdot", "neon", "plain"]
    assert names("+neon,+i8mm") == ["plain"]
    assert names("+neon") == ["plain"]
    amx = "+avx2,+fma,+f16c,+avx512bw,+avx512vnni,+amx-int8,+amx-tile"
    for allowed in (True, False):  # by the system
        monkeypatch.setattr(targets, "request_tiles", lambda allowed=allowed: allowed)
        assert names(amx) == ["vnni512"] * (1 + allowed) + ["maddubs", "plain"]
        assert list_targets()[0].tiles == allowed
    assert not any(target.tiles for target in list_targets()[1:])


def assemble(triple: str, target: Target, fmt: QuantFormat | PlainFormat, counts: tuple[int, ...], write: Callable[..., None]) -> str:
    """Write the kernels in assembly."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        machine = binding.Target.from_triple(triple).create_target_machine(cpu=target.cpu, features=target.features, opt=3)
    except RuntimeError:
        pytest.skip(f"this llvmlite does not write code for {triple}")
    source = build_module(target, fmt, counts, write)
    parsed = binding.parse_assembly(re.sub('target triple = ".*"', f'target triple = "{triple}"', source))
    parsed.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)


def aarch64(fmt: QuantFormat | PlainFormat, counts: tuple[int, ...], int8: bool, dot: str = "neon") -> str:
    """Assembly of the kernels that a processor of that kind with dot products gets."""
    features = "+dotprod,+i8mm" if dot == "usdot" else "+dotprod"
    return assemble(
        "aarch64-unknown-linux-gnu", Target("NEON", dot, "generic", features, True, 6), fmt, counts, emit_int8 if int8 else emit_float32
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K", "Q3_K", "IQ4_XS"])
@pytest.mark.parametrize(("dot", "instruction"), [("neon", "sdot"), ("usdot", "usdot")])
def test_code_for_arm(kind: str, dot: str, instruction: str) -> None:
    """A block of 32 inputs by 16 outputs takes 32 instructions for each row; `usdot` flips no sign bits before."""
    code = aarch64(QUANTISED[kind], (1, 4), True, dot)
    one, four = re.split(r"^rows_4:", code, flags=re.MULTILINE)
    assert len(re.findall(rf"\b{instruction}\t", one)) == 32
    assert len(re.findall(rf"\b{instruction}\t", four)) == 4 * 32
    if kind == "Q8_0":
        assert len(re.findall(r"\beor\t", one)) == (32 if dot == "neon" else 0)


def test_float32_code_for_arm() -> None:
    code = aarch64(PlainFormat.F16, (2,), False)
    assert len(re.findall(r"\bfmla\t", code)) >= 2 * 4 * DEPTH
    assert "fcvtl" in code


@pytest.mark.parametrize(
    ("kind", "rows", "n_products", "n_stores"),
    [
        ("Q5_0", 16, {"tdpbssd": 4}, 4),
        ("Q5_0", 32, {"tdpbssd": 4}, 4),
        ("Q5_K", 16, {"tdpbsud": 8}, 8),
        ("Q5_K", 32, {"tdpbsud": 16}, 16),
        ("Q2_K", 16, {"tdpbsud": 4}, 1),  # one byte for a product of code and scale, a sum for the whole super-block
        ("Q4_K", 16, {"tdpbsud": 4, "tdpbssd": 4}, 2),
        ("Q6_K", 16, {"tdpbsud": 4, "tdpbssd": 4}, 2),
        ("Q6_K", 64, {"tdpbsud": 16, "tdpbssd": 16}, 8),
        ("IQ2_XS", 16, {}, 0),  # scales of 16 inputs whose sums are rounded
        ("Q4_K", 6, {}, 0),
    ],
)
def test_code_for_tiles(kind: str, rows: int, n_products: dict[str, int], n_stores: int) -> None:
    """Instructions of the loop's body: for each row tile one for each block, or one for each byte and two blocks."""
    target = Target("AMX", "vnni512", "sapphirerapids", "", True, 24, tiles=True)
    code = assemble("x86_64-unknown-linux-gnu", target, QUANTISED[kind], (rows,), emit_int8_tiles)
    for dot in ("tdpbssd", "tdpbsud"):
        assert len(re.findall(rf"\b{dot}\t", code)) == n_products.get(dot, 0)
    assert len(re.findall(r"\btilestored\t", code)) == n_stores
    assert ("vpdpbusd" in code) == (not n_products)
    assert len(re.findall(r"\btilerelease\b", code)) == len(re.findall(r"\bldtilecfg\b", code)) == bool(n_products)


@pytest.mark.parametrize("kind", [kind for kind, fmt in QUANTISED.items() if fmt.exact])
def test_exact_sums_of_super_blocks_fit(kind: str) -> None:
    """In float32 without rounding, or into 32 bits; what is multiplied with the codes fits as well."""
    fmt = QUANTISED[kind]
    most_scale = {"Q2_K": 15, "Q3_K": 32, "Q4_K": 63, "Q6_K": 128}[kind]
    most_code = fmt.zero if fmt.integers and fmt.zero else 2**fmt.bits - 1
    assert 127 * DEPTH * SUPER * most_code * most_scale < (2**31 if fmt.integers else 2**24)
    assert most_scale * most_code < 2**15
    assert fmt.zero in (0, INTEGER_ZERO) or not fmt.integers
    assert fmt.zero or 127 * DEPTH // 2 * most_code < 2**15, "sums of 16 codes"
    assert fmt.zero or 127 * DEPTH * EXACT_BLOCKS * most_code * most_scale < 2**24, "sums of some blocks"


def test_vectors_that_do_not_fit_into_registers_cross_no_line_of_the_cache() -> None:
    target = Target("AVX2", "maddubs", "x86-64-v3", "", True, 6)
    code = assemble("x86_64-unknown-linux-gnu", target, QUANTISED["Q6_K"], (8,), emit_int8)
    on_stack = re.findall(r"\b(vmov\w+)\t%ymm\d+, -?\d*\(%rsp\)", code)
    assert len(on_stack) > 20, "eight rows leave no register free"
    assert set(on_stack) <= {"vmovaps", "vmovdqa"}, "these demand an address that is a multiple of 32"


def test_kept_code_is_used_again_if_it_is_whole(tmp_path: Path) -> None:
    written = []

    def source() -> str:
        written.append(1)
        return build_module(list_targets()[-1], None, (1,), partial(emit_quantise, blocks=True, supers=False))

    def compiled() -> np.ndarray:
        code = CompiledModules(list_targets()[-1], tmp_path)  # its functions live as long as it does
        x, codes, act_scales = activations(1, 64)[0], np.zeros((2, 64), np.int8), np.zeros((2, 2, 4), np.float32)
        quantise_row(code.compile("quantise", source)("rows_1"), x, codes, act_scales)
        return codes

    first = compiled()
    np.testing.assert_array_equal(compiled(), first)
    assert len(written) == 1
    (kept,) = tmp_path.iterdir()
    for damaged in (b"", kept.read_bytes()[:-1], bytes(100), b"\x00" + kept.read_bytes()[1:]):
        kept.write_bytes(damaged)
        np.testing.assert_array_equal(compiled(), first)
    assert len(written) == 5
    kept.unlink()
    kept.mkdir()  # a folder that cannot be written, in effect
    np.testing.assert_array_equal(compiled(), first)


def digest() -> str:
    """Of products of both precisions, and how this process computed them."""
    x = np.random.default_rng(0).standard_normal((21, 512)).astype(np.float32)
    digest = hashlib.sha256()
    for int8 in (True, False):
        products = MatmulContext(int8, folder=cache_dir() / "code")
        product = CpuProduct(products, [products.register_matrix(random_weight(kind, 80, 512)) for kind in ("Q4_K", "F16")])
        digest.update(product.multiply(x, 2).tobytes())
    return f"{get_host_target().dot} {get_host_target().halves} {digest.hexdigest()}"


# Another processor of this kind: its name, its features, and what its target is. All processors of the kind can run its code.
OTHERS = {
    "x86_64": ("haswell", "+avx2,+fma,+avx,+f16c", ["maddubs", "True"]),
    "aarch64": ("generic", "+neon", ["plain", "False"]),
}
KIND = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


@pytest.mark.skipif(KIND not in OTHERS, reason=f"no other processor of the kind {KIND} is known here")
def test_bits_are_those_of_another_processor() -> None:
    """A processor without this one's best instructions has other ones, other tiles and other sums of rows."""
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here.parents[2], here.parents[1], here)))
    name, features, target = OTHERS[KIND]
    variables = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "PYTHONPATH": path}
    command = [sys.executable, "-c", "import test_kernels; print(test_kernels.digest())"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | variables)
    assert done.stdout.split() == [*target, digest().split()[2]]

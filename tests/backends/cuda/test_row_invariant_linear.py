"""Products against float64, and bitwise against themselves over row counts, tiles and forms; what ptxas makes of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from aot import SHARED_LIMIT, check_limits, compile_kernel

from ngramspec.backends.cuda import row_invariant_linear
from ngramspec.backends.cuda.row_invariant_linear import CudaProduct, Tile, add_up, choose_splits, choose_tile, find_violation

H200 = 132
SHAPES = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (3584, 18944), (3072, 2048), (576, 576), (576, 1536)]


def make(n_out: int, n_in: int, dtype: torch.dtype, device: str, n_sms: int = 4, bias: bool = False) -> CudaProduct:
    generator = torch.Generator().manual_seed(n_out + n_in)
    weight = torch.randn(n_out, n_in, generator=generator).to(device, dtype)
    return CudaProduct(weight, torch.randn(n_out, generator=generator).to(device, dtype) if bias else None, n_sms)


def rows_of(product: CudaProduct, rows: int) -> torch.Tensor:
    return torch.randn(rows, product.n_in, generator=torch.Generator().manual_seed(rows)).to(product.weight)


@pytest.mark.parametrize(("n_out", "n_in", "rows"), [(64, 1024, 1), (70, 1027, 3), (130, 1100, 17), (40, 100, 70)])
def test_product_against_float64(n_out: int, n_in: int, rows: int, dtype: torch.dtype, device: str) -> None:
    product = make(n_out, n_in, dtype, device, bias=True)
    assert product.splits == max(1, n_in // 512)
    x = rows_of(product, rows)
    expected = x.double() @ product.weight.double().T + product.bias.double()
    torch.testing.assert_close(product(x, dtype=torch.float32).double(), expected, rtol=1e-4, atol=2e-4)
    assert torch.equal(product(x), product(x, dtype=torch.float32).to(dtype))
    sums = product.compute_partials(x)
    assert sums.shape == product.workspace_shape(rows)
    out = torch.empty(rows, n_out, dtype=dtype, device=device)
    add_up(sums, product.bias, out)
    assert torch.equal(out, product(x, torch.empty_like(out), workspace=torch.empty_like(sums)))


def test_rows_do_not_depend_on_their_number(dtype: torch.dtype, device: str) -> None:
    assert find_violation(make(40, 1030, dtype, device, bias=True), [17]) is None
    assert find_violation(make(20, 40, dtype, device), [33]) is None


def test_whole_sums_have_the_bits_of_partial_sums(dtype: torch.dtype, device: str) -> None:
    product = make(66, 2600, dtype, device)
    assert product.splits == 4
    x = rows_of(product, 5)
    sums, whole = product.compute_partials(x), torch.empty(1, 5, 66, device=device)
    product._launch(x, None, whole)
    assert torch.equal(((sums[0] + sums[1]) + sums[2]) + sums[3], whole[0])
    assert not torch.equal(sums[0] + ((sums[1] + sums[2]) + sums[3]), whole[0])  # so the order is one that can be told


def test_tiles_change_no_bits(dtype: torch.dtype, device: str) -> None:
    product = make(80, 1100, dtype, device)
    x, out = rows_of(product, 20), torch.empty(2, 20, 80, device=device)
    k, warps = (32, 4) if dtype == torch.float32 else (64, 4)
    product._launch(x, None, out, Tile(64, 16, k, warps, 3))
    for tile in (Tile(64, 64, k, warps, 3), Tile(64, 32, 2 * k, warps, 2), Tile(128, 32, k, warps, 2)):
        other = torch.empty_like(out)
        product._launch(x, None, other, tile)
        assert torch.equal(out, other), tile


def test_check_finds_rows_that_depend_on_their_number(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product = make(40, 70, torch.float32, device)
    launch = CudaProduct._launch

    def other(self: CudaProduct, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile | None = None) -> None:
        launch(self, x, bias, out, tile)
        out *= 1 + 2**-23 * (len(x) == 17)

    monkeypatch.setattr(CudaProduct, "_launch", other)
    assert find_violation(product, [1, 2, 16]) is None
    assert find_violation(product, [1, 2, 20]) == "product with a weight of (40, 70) at 17 rows in 1 pieces"


def test_refuses_what_it_cannot_multiply(device: str) -> None:
    with pytest.raises(TypeError, match="float64"):
        CudaProduct(torch.zeros(4, 4, dtype=torch.float64), None, 4)
    product = make(40, 70, torch.float32, device)
    with pytest.raises(AssertionError, match="columns"):
        product(torch.zeros(1, 69, device=device))
    with pytest.raises(AssertionError, match="out is"):
        product.compute_partials(torch.zeros(1, 70, device=device), torch.zeros(2, 1, 40, device=device))
    assert product(torch.zeros(0, 70, device=device)).shape == (0, 40)


@pytest.mark.parametrize("shape", SHAPES)
def test_few_rows_occupy_the_device(shape: tuple[int, int]) -> None:
    n_out, n_in = shape
    splits = choose_splits(n_out, n_in, H200)
    assert 1 <= splits <= 8
    assert -(-n_out // 64) * splits >= H200 or n_in // splits < 2 * row_invariant_linear.MIN_PIECE
    for rows in (1, 16, 17, 64, 128, 500, 4096):
        for shared in SHARED_LIMIT.values():
            for pieces in {1, splits}:
                for item in (2, 4):
                    tile = choose_tile(rows, n_out, item, pieces, splits // pieces, H200, shared)
                    assert tile.stages * tile.stage_bytes(item) < shared
                    assert tile.stages >= 2
                    assert row_invariant_linear.GRANULE % tile.k == 0


def compiled() -> None:
    """Every tile: nothing spilled, shared memory within limits, matrix instructions of one kind for all rows."""
    types = {"n_out": "i32:16", "n_in": "i32:16", "n_rows": "i32", "x_stride": "i32:16", "n_splits": "i32"}
    for capability in (90, 80):
        tiles = [(row_invariant_linear._HALF[-1], True), (row_invariant_linear._FULL[-1], True)]
        if capability == 90:
            tiles += [(tile, False) for tile in (*row_invariant_linear._HALF, row_invariant_linear._HALF_MANY)]
        for tile, summed in tiles:
            item, name = (4, "fp32") if tile in row_invariant_linear._FULL else (2, "bf16")
            stages = min(tile.stages, (SHARED_LIMIT[capability] - 1024) // tile.stage_bytes(item))
            tile = replace(tile, stages=stages)
            constants = {"BLOCK_N": tile.n, "BLOCK_R": tile.rows, "BLOCK_K": tile.k, "STEP": row_invariant_linear.GRANULE}
            kernel = compile_kernel(
                row_invariant_linear._multiply,
                {"weight": f"*{name}", "x": f"*{name}", "out": "*fp32"} | types,
                constants | {"bias": None, "EVEN": True, "SUMMED": summed, "ONCE": True, "OVERLAP": capability >= 90, "LINES": 8},
                capability=capability,
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
            print(capability, tile, kernel.summarize(), flush=True)
            check_limits(kernel, capability)
            before, waited, _ = kernel.ptx.partition("griddepcontrol.wait")
            assert bool(waited) == ("prefetch.global.L2" in before) == (capability >= 90), kernel.summarize()
            assert not waited or not re.search(r"ld\.global|cp\.async", before), "it reads what an earlier kernel may not have written"
            if item == 4:
                assert not kernel.mma
                assert kernel.count(r"fma\.rn") > 100
                assert not kernel.count(r"\bmul\.(rn\.)?f32")
            elif capability == 90:
                assert [*kernel.mma] == [f"wgmma.mma_async.sync.aligned.m64n{tile.rows}k16.f32.bf16.bf16"]
                assert kernel.count(r"wgmma\.wait_group\S* 1;")
            else:
                assert [*kernel.mma] == ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]
            assert kernel.count(r"cp\.async\.c[ag]\S* ")

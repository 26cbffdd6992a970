"""Routers and experts on the device against transformers' modules, and bitwise over numbers of rows, tiles and mates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch

from ngramspec.backends.cuda import expert_kernels
from ngramspec.backends.cuda.expert_kernels import PairProduct, choose, find_dependence, sort_pairs, sum_experts
from ngramspec.backends.cuda.expert_layer import read_correction
from ngramspec.backends.cuda.row_invariant_linear import list_tiles
from ngramspec.models.expert_routing import RouterOptions, find_router_options, locate_router_parts

ROUTERS = {
    "qwen3_moe": "mlp.gate", "mixtral": "mlp.gate", "glm4_moe": "mlp.gate", "gpt_oss": "mlp.router",
    "granitemoe": "block_sparse_moe.router", "ernie4_5_moe": "mlp.gate", "hunyuan_v1_moe": "mlp.gate",
}  # fmt: skip
SIZES = {
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3, "head_dim": 16},
    "glm4_moe": {"moe_intermediate_size": 8},
    "ernie4_5_moe": {"moe_intermediate_size": 8},
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("family", ROUTERS)
@pytest.mark.parametrize("normalise", [True, False])
def test_routers_choose_as_transformers_modules(family: str, normalise: bool, device: str) -> None:
    sizes = SIZES.get(family, {})
    layer: Any = tiny.tiny_model(family, norm_topk_prob=normalise, **sizes).base_model.layers[-1]
    router = layer.get_submodule(ROUTERS[family])
    options = find_router_options(router)
    assert options is not None
    assert options.normalise == (normalise or family not in ("qwen3_moe", "glm4_moe"))
    for parameter in router.parameters():
        parameter.data = random(*parameter.shape, seed=3)
    if "e_score_correction_bias" in router._buffers:
        router.e_score_correction_bias = 0.3 * random(options.n_experts)
    correction, parts = read_correction(router), locate_router_parts(router)
    assert parts is not None
    logits, expected, chosen = router(random(9, router.get_parameter(parts.weight).shape[1]))
    on_device = None if correction is None else correction.to(device)
    ids, weights = choose(logits.float()[None].contiguous().to(device), None, on_device, options)
    order = slice(None) if correction is None else ids.long().cpu().argsort(1)
    if correction is not None:  # transformers' choice is in no order there
        ids, weights, (chosen, by) = ids.cpu().gather(1, order), weights.cpu().gather(1, order), chosen.sort(1)
        expected = expected.gather(1, by)
    assert torch.equal(ids.cpu().long(), chosen)
    torch.testing.assert_close(weights.cpu(), expected, rtol=2e-6, atol=1e-7)


def test_equal_logits_choose_the_lowest_numbers_and_no_number_comes_last(device: str) -> None:
    logits = torch.tensor([[0, 1, 0, 1, 1, 0.0], [3, float("nan"), 4, 4, float("-inf"), 5], [float("nan")] * 6], device=device)
    ids, weights = choose(logits[None], None, None, RouterOptions(6, 5, sigmoid=False, normalise=True))
    assert ids.tolist() == [[1, 3, 4, 0, 2], [5, 2, 3, 0, 1], [0, 1, 2, 3, 4]]
    assert weights[0, 0] == weights[0, 2] > weights[0, 3]


def test_rows_that_fill_up_a_bucket_choose_nothing(device: str) -> None:
    options, slots = (
        RouterOptions(4, 2, sigmoid=True, normalise=True, scale=2.5),
        torch.tensor([3, 99, 5], dtype=torch.int32, device=device),
    )
    logits = random(2, 3, 5).to(device)  # sums of two pieces; the last output is a gate
    ids, weights = choose(logits, None, None, options, slots, unused=96)
    same, alone = choose(logits[:, 2:].contiguous(), None, None, options)
    assert ids[1].tolist() == [4, 4]
    assert torch.equal(ids[2], same[0])
    assert torch.equal(weights[2], alone[0])
    torch.testing.assert_close(weights[:, 2], logits.sum(0)[:, 4].sigmoid())
    torch.testing.assert_close(weights[:, :2].sum(1), torch.full((3,), 2.5, device=device))
    pairs = sort_pairs(ids, 4)
    assert int(pairs.counts.sum()) == 4
    out = sum_experts(random(6, 10).to(device), ids, weights[:, :2].contiguous(), 4, None, torch.float32)
    assert not out[1].any()


@pytest.mark.parametrize(("n_rows", "k", "n_experts"), [(1, 3, 5), (70, 2, 3), (400, 4, 16)])
def test_pairs_are_sorted_by_expert_then_by_row(n_rows: int, k: int, n_experts: int, device: str) -> None:
    ids = torch.randint(n_experts + 1, (n_rows, k), generator=torch.Generator().manual_seed(1), dtype=torch.int32).to(device)
    pairs = sort_pairs(ids, n_experts)
    flat = ids.flatten().cpu()
    expected = flat.sort(stable=True).indices[: int((flat < n_experts).sum())]
    assert pairs.order[: len(expected)].tolist() == expected.tolist()
    assert pairs.counts.tolist() == [int((flat == e).sum()) for e in range(n_experts)]


def make(n_experts: int, n_out: int, n_in: int, dtype: torch.dtype, device: str) -> PairProduct:
    return PairProduct(random(n_experts, n_out, n_in).to(device, dtype), random(n_experts, n_out, seed=1).to(device, dtype), 4)


@pytest.mark.parametrize(("n_rows", "k"), [(1, 2), (20, 3)])
def test_products_against_float64(n_rows: int, k: int, dtype: torch.dtype, device: str) -> None:
    first, last = make(5, 70, 100, dtype, device), make(5, 100, 70, dtype, device)
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:k] for i in range(n_rows)]).int().to(device)
    x, pairs = random(n_rows, 100).to(device, dtype), sort_pairs(ids, 5)
    both = first(x, pairs, of_rows=True, dtype=dtype)
    order = pairs.order.long()
    experts, rows = ids.flatten().long()[order], x[order // k].double()
    expected = torch.einsum("pk,pnk->pn", rows, first.weight[experts].double()) + first.bias[experts]
    torch.testing.assert_close(both.double(), expected, rtol=2**-7, atol=1e-4)
    added = last(both, pairs, of_rows=False, dtype=torch.float32)
    expected = torch.einsum("pk,pnk->pn", both.double(), last.weight[experts].double()) + last.bias[experts]
    torch.testing.assert_close(added[order].double(), expected, rtol=1e-4, atol=1e-3)
    weights, shared = random(n_rows, k + 1).to(device), random(2, n_rows, 100).to(device)
    total = (added.view(n_rows, k, 100) * weights[:, :k, None]).sum(1)
    torch.testing.assert_close(sum_experts(added, ids, weights[:, :k].contiguous(), 5, shared, torch.float32), total + shared.sum(0))
    gated = sum_experts(added, ids, weights, 5, shared, torch.float32)
    torch.testing.assert_close(gated, total + shared.sum(0) * weights[:, k:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n_rows", [3, pytest.param(64, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_alone_and_among_others(n_rows: int, dtype: torch.dtype, device: str) -> None:
    """Also if all rows go to the same experts, and whatever the tile."""
    options, gate_up, down = (
        RouterOptions(6, 2, sigmoid=False, normalise=True),
        make(6, 40, 70, dtype, device),
        make(6, 70, 40, dtype, device),
    )
    x, logits = random(n_rows, 70).to(device, dtype), random(1, n_rows, 6).to(device)
    if n_rows == 64 and dtype == torch.float16 and device == "cpu":
        pytest.skip("the interpreter takes seconds, and bfloat16 has the same tiles")

    def compute(rows: slice, alike: bool, tile: Any = None) -> torch.Tensor:
        ids, weights = choose((logits[:, :1].expand_as(logits) if alike else logits)[:, rows].contiguous(), None, None, options)
        pairs = sort_pairs(ids, 6)
        both = gate_up(x[rows].contiguous(), pairs, of_rows=True, dtype=dtype, tile=tile)
        return sum_experts(down(both, pairs, of_rows=False, dtype=torch.float32, tile=tile), ids, weights, 6, None, torch.float32)

    for alike in (False, True) if n_rows == 64 else (False,):
        whole = compute(slice(None), alike)
        for i in {0, n_rows // 2, n_rows - 1}:
            assert torch.equal(compute(slice(i, i + 1), alike)[0], whole[i])
        for tile in list_tiles(dtype.itemsize, 227 << 10) if n_rows == 64 and not alike else ():
            assert torch.equal(compute(slice(None), alike, tile), whole)


def test_the_check_finds_pairs_that_depend_on_others(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product = make(3, 20, 40, torch.float32, device)
    monkeypatch.setattr(expert_kernels, "CHECKED_PAIRS", (1, 17))
    assert find_dependence(product, thoroughly=True) is None
    multiply: Callable[..., torch.Tensor] = PairProduct.__call__

    def other(self: PairProduct, x: torch.Tensor, pairs: Any, **how: Any) -> torch.Tensor:
        return multiply(self, x, pairs, **how) * (1 + 2**-23 * (len(x) == 17))

    monkeypatch.setattr(PairProduct, "__call__", other)
    monkeypatch.setattr(expert_kernels, "FEW_PAIRS", (1, 16))
    assert find_dependence(product, thoroughly=False) is None
    assert str(find_dependence(product, thoroughly=True)).startswith("product with experts of (20, 40) at 17 pairs in tiles of None")


def test_gates_and_ups_that_take_turns_are_clamped(dtype: torch.dtype, device: str) -> None:
    both = 9 * random(3, 2 * 530).to(device, dtype)
    gate, up = both.float()[:, ::2].clamp(max=7), both.float()[:, 1::2].clamp(-7, 7)
    expected = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).to(dtype)
    out = torch.empty_like(expected)
    expert_kernels.activate_clamped(both, out, 1.702, 7.0)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)

"""Row-wise operations against PyTorch's, and bitwise over numbers of rows and of partial sums; what ptxas makes of them."""

from __future__ import annotations

import pytest
import torch
from aot import check_limits, compile_kernel
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ngramspec.backends.cuda import layers

EPS = 1e-5
STEP = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
"""Half a unit in the last place, or for float32 a few of them."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def product(partials: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    return (total if bias is None else total + bias.float()).to(dtype)


@pytest.mark.parametrize(("width", "n_partials", "biased"), [(100, 1, True), (576, 3, False), (1030, 6, True), (64, 13, False)])
def test_add_norm(width: int, n_partials: int, biased: bool, dtype: torch.dtype, device: str) -> None:
    x, weight = random(3, width).to(device, dtype), random(width, seed=1).to(device, dtype)
    bias = random(width, seed=2).to(device, dtype) if biased else None
    partials = random(n_partials, 3, width).to(device)
    new = x + product(partials, bias, dtype)
    reference = LlamaRMSNorm(width, EPS)
    reference.weight = torch.nn.Parameter(weight)
    summed = x.clone()
    out = layers.add_norm(summed, partials, bias, weight, EPS)
    assert torch.equal(summed, new)
    torch.testing.assert_close(out, reference(new), rtol=4 * STEP[dtype], atol=1e-6)
    torch.testing.assert_close(layers.compute_norm(new, weight, EPS), out, rtol=4 * STEP[dtype], atol=1e-6)


def test_weights_in_float32_are_multiplied_before_rounding(device: str) -> None:
    x, weight = random(4, 200).to(device, torch.bfloat16), 0.1 * random(200, seed=1).to(device, torch.bfloat16)
    reference = GemmaRMSNorm(200, EPS)
    reference.weight = torch.nn.Parameter(weight)
    torch.testing.assert_close(layers.compute_norm(x, 1 + weight.float(), EPS), reference(x), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
@pytest.mark.parametrize(("width", "n_partials"), [(90, 1), (530, 2)])
def test_gated(activation: str, width: int, n_partials: int, dtype: torch.dtype, device: str) -> None:
    partials, bias = 3 * random(n_partials, 2, 2 * width).to(device), random(2 * width, seed=1).to(device, dtype)
    partials[..., :4] = torch.tensor([60.0, -60.0, 1e4, -1e4])  # what exp overflows on
    gate, up = product(partials, bias, dtype).split(width, dim=1)
    expected = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[activation](gate) * up
    out = layers.compute_gated_activation(partials, bias, activation=activation, dtype=dtype)
    torch.testing.assert_close(out, expected, rtol=4 * STEP[dtype], atol=4e-6)
    assert torch.equal(out, layers.compute_gated_activation(product(partials, bias, dtype)[None], None, torch.empty_like(out), activation))


def test_embed(dtype: torch.dtype, device: str) -> None:
    table = random(11, 1100).to(device, dtype)
    ids = torch.tensor([3, 0, 10, 3], dtype=torch.int32, device=device)
    assert torch.equal(layers.embed(ids, table), table[ids.long()])


def test_rows_do_not_depend_on_their_number_nor_on_that_of_partial_sums(dtype: torch.dtype, device: str) -> None:
    """A row among nine as three sums, against the row alone as their total: what few and many rows get from a product."""
    x, weight, partials = random(9, 300).to(device, dtype), random(300).to(device, dtype), random(3, 9, 300, seed=1).to(device)
    total = ((partials[0] + partials[1]) + partials[2])[None]
    among = x.clone()
    normed = layers.add_norm(among, partials, None, weight, EPS)
    both = layers.compute_gated_activation(partials, None, dtype=dtype)
    for i in (0, 4, 8):
        row, sums = x[i : i + 1].clone(), total[:, i : i + 1].contiguous()
        assert torch.equal(layers.add_norm(row, sums, None, weight, EPS)[0], normed[i])
        assert torch.equal(row[0], among[i])
        assert torch.equal(layers.compute_gated_activation(sums, None, dtype=dtype)[0], both[i])


def test_refuses_what_would_be_computed_otherwise(device: str) -> None:
    x, partials = torch.zeros(2, 8, device=device), torch.zeros(1, 2, 8, device=device)
    with pytest.raises(ValueError, match="relu"):
        layers.compute_gated_activation(partials, None, activation="relu")
    with pytest.raises(AssertionError, match="rounded"):
        layers.compute_gated_activation(partials.half(), x[0])
    with pytest.raises(AssertionError, match="multiples of 16"):
        layers.compute_norm(torch.zeros(17, device=device)[1:].view(2, 8), x[0], EPS)
    for empty in (layers.add_norm(x[:0], partials[:, :0], None, x[0], EPS), layers.compute_norm(x[:0], x[0], EPS)):
        assert empty.shape == (0, 8)


def compiled() -> None:
    """Rows of real models: nothing spilled, wide loads, and no multiplication contracted with an addition."""
    sizes = {"n_partials": "i32", "n_rows": "i32", "width": "i32:16", "x_stride": "i32:16", "out_stride": "i32:16"}
    for capability, name, width in ((90, "bf16", 4096), (90, "bf16", 8192), (90, "fp32", 2048), (80, "bf16", 8192)):
        types = dict.fromkeys(("x", "bias", "weight", "out"), f"*{name}") | {"partials": "*fp32", "eps": "fp32"} | sizes
        row = layers._whole_row(width, torch.device("cpu"))
        launches = [(layers._add_norm, {"BLOCK": row["BLOCK"]}, row["num_warps"])]
        if width == 4096:
            launches += [(layers._compute_norm, {"BLOCK": width}, row["num_warps"])]
            launches += [(layers._gated_activation, {"ACTIVATION": "silu", "BLOCK": 512}, 4)]
        for fn, constants, warps in launches:
            constants["OVERLAP"] = capability >= 90
            kernel = compile_kernel(fn, types, constants, capability=capability, num_warps=warps)
            print(capability, name, width, kernel.summarize(), flush=True)
            check_limits(kernel, capability)
            assert kernel.count(r"fma\.rn\.f32") == 0, kernel.summarize()
            assert kernel.count(r"ld\.global\.v4"), kernel.summarize()
            _, waited, rest = kernel.ptx.rpartition("griddepcontrol.wait")
            assert bool(waited) == (capability >= 90)
            assert kernel.count("ld.global") == rest.count("ld.global"), "it reads what an earlier kernel may not have written"

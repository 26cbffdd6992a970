"""Products with weights in blocks: the bits of products with the same weights dequantised, whatever the number of rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import tiny_gguf
import torch

from ngramspec.backends.cuda.expert_kernels import PairProduct, sort_pairs
from ngramspec.backends.cuda.packed_experts import PackedExpertWeight, PackedPairProduct
from ngramspec.backends.cuda.quantised import FORMATS, CudaQuantisedProduct, concatenate_packed, pack
from ngramspec.backends.cuda.row_invariant_linear import CudaProduct, find_violation
from ngramspec.models.tensor_source import dequantise

ROWS = (1, 2, 5, 16, 17, 32) if torch.cuda.is_available() else (2, 17)  # under the interpreter a tile of either width
PRECISE = [torch.float32, torch.float16]
# On a device every format in every dtype; under the interpreter every one with bfloat16, and one of each kind of scales in all.
CASES = [
    (kind, dtype)
    for kind in FORMATS
    for dtype in (torch.bfloat16, *(PRECISE if torch.cuda.is_available() or kind in ("Q5_1", "Q6_K") else []))
]


def blocks(kind: str, n_out: int, n_in: int, name: str = "") -> np.ndarray:
    return tiny_gguf.matrix(f"{kind}{name}", (n_out, n_in), kind).view(np.uint8)


def columns(kind: str, n_in: int) -> int:
    return n_in if gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 32 else -(-n_in // 256) * 256


def same(product: CudaQuantisedProduct, dense: torch.Tensor, rows: tuple[int, ...] = ROWS) -> None:
    """Partial sums and finished rows, bitwise."""
    plain = CudaProduct(dense.to(product.dtype), product.bias, product.n_sms)
    assert plain.splits == product.splits
    for n in rows:
        x = torch.randn(n, product.n_in, generator=torch.Generator().manual_seed(n)).to(product.device, product.dtype)
        assert torch.equal(product.compute_partials(x), plain.compute_partials(x)), n
        assert torch.equal(product(x), plain(x)), n


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_hold_the_weights_that_gguf_makes_of_them(kind: str, device: str) -> None:
    raw = blocks(kind, 9, columns(kind, 352))
    packed = pack(kind, torch.from_numpy(raw).to(device))
    assert torch.equal(packed.dequantise(torch.float32).cpu(), torch.from_numpy(dequantise(kind, raw)))
    some = torch.tensor([7, 0, 7], device=device)
    assert torch.equal(packed.dequantise_rows(some, torch.float32).cpu(), torch.from_numpy(dequantise(kind, raw[some.cpu()])))
    assert pack(kind, torch.from_numpy(blocks(kind, 64, 1024))).n_bytes <= 1.07 * blocks(kind, 64, 1024).nbytes


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_products_have_the_bits_of_dequantised_weights(kind: str, dtype: torch.dtype, device: str) -> None:
    raw = blocks(kind, 70, columns(kind, 1120))
    bias = torch.randn(70, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    product = CudaQuantisedProduct([pack(kind, torch.from_numpy(raw).to(device))], bias, dtype, n_sms=4)
    assert product.splits == 2
    same(product, torch.from_numpy(dequantise(kind, raw)).to(device))


@pytest.mark.parametrize("n_in", [32, 96, 160, 1184])
def test_columns_that_fill_no_tile(n_in: int, dtype: torch.dtype, device: str) -> None:
    """Where a tile ends depends on columns and dtype; formats take turns."""
    kind = ("Q4_0", "Q5_1", "Q8_0")[(n_in // 32 + dtype.itemsize) % 3]
    raw = blocks(kind, 67, n_in)
    product = CudaQuantisedProduct([pack(kind, torch.from_numpy(raw).to(device))], None, dtype, n_sms=4)
    same(product, torch.from_numpy(dequantise(kind, raw)).to(device), (3, 17))


def test_weights_of_several_formats_are_one_product(device: str) -> None:
    kinds = [("Q4_K", 64), ("Q4_K", 40), ("Q6_K", 24)]
    raws = [blocks(kind, n, 1024, str(n)) for kind, n in kinds]
    packed = [pack(kind, torch.from_numpy(raw).to(device)) for (kind, _), raw in zip(kinds, raws, strict=True)]
    product = CudaQuantisedProduct([concatenate_packed(packed[:2]), packed[2]], None, torch.bfloat16, n_sms=4)
    dense = torch.cat([torch.from_numpy(dequantise(kind, raw)) for (kind, _), raw in zip(kinds, raws, strict=True)]).to(device)
    assert torch.equal(torch.cat([part.dequantise(torch.bfloat16) for part in product.parts]), dense.to(torch.bfloat16))
    second = product.parts[0].select_rows(64, 104)
    assert torch.equal(second.dequantise(torch.float32), dense[64:104])
    same(CudaQuantisedProduct([second], None, torch.bfloat16, n_sms=4), dense[64:104], (3,))
    same(product, dense, (1, 17, 70))


def test_rows_do_not_depend_on_their_number(device: str) -> None:
    packed = pack("Q4_1", torch.from_numpy(blocks("Q4_1", 40, 1056)).to(device))
    assert find_violation(CudaQuantisedProduct([packed], None, torch.float16, n_sms=4), [33]) is None


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_K", torch.bfloat16), ("Q6_K", torch.float16), ("Q8_0", torch.float32)], ids=str)
def test_products_with_experts_have_the_bits_of_dequantised_weights(kind: str, dtype: torch.dtype, device: str) -> None:
    raw = blocks(kind, 3 * 40, columns(kind, 96))
    dense = torch.from_numpy(dequantise(kind, raw)).to(device, dtype).view(3, 40, -1)
    weight = PackedExpertWeight(pack(kind, torch.from_numpy(raw).to(device)), 3, dtype)
    assert torch.equal(weight[torch.tensor(2)], dense[2])
    packed, plain = PackedPairProduct(weight, dtype, n_sms=4), PairProduct(dense, None, n_sms=4)
    assert packed.shape == plain.shape
    ids = torch.tensor([[2, 0], [0, 1], [2, 1], *[[1, 2]] * 17], dtype=torch.int32, device=device)
    for n in (1, 20):
        pairs = sort_pairs(ids[:n].contiguous(), 3)
        for of_rows in (True, False):
            n_x = n if of_rows else 2 * n
            x = torch.randn(n_x, packed.n_in, generator=torch.Generator().manual_seed(n)).to(device, dtype)
            found = [each(x, pairs, of_rows=of_rows, dtype=torch.float32) for each in (packed, plain)]
            assert torch.equal(*found), (n, of_rows)

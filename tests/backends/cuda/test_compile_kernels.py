"""What the files of this folder say of their compiled kernels, and the variants that a model's passes ask for.

The variants are noted as they would be launched, and one of them is compiled for every generation.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from aot import find_failures

FILES = [
    path for path in sorted(Path(__file__).parent.glob("test_*.py")) if "\ndef compiled() -> None:" in path.read_text(encoding="utf-8")
]


def compiled() -> None:
    import torch

    from ngramspec.models.shapes import read_shape
    from tools import compile_kernels

    for dtype, shape in ((torch.bfloat16, "Qwen2.5-Coder-7B"), (torch.float32, "SmolLM2-135M")):
        found = compile_kernels.list_variants(read_shape(shape), dtype, 80, rows=(1, 300))
        names = {variant.fn.__name__ for variant in found}
        every = {name for names in compile_kernels.LAUNCHED.values() for name in names}
        assert names <= every
        experts = {"_choose", "_sort_pairs", "_multiply_pairs", "_multiply_packed_pairs", "_activate_clamped", "_sum_experts"}
        recurrent = {"_convolve_rows", "_advance_states", "_gate_heads", "_keep_inputs", "_gate_attention"}
        assert every - names <= recurrent | experts | {"_write_kv", "_add_up", "_multiply_quantised", "_dequantise"}  # of other models
        assert len(found) == len(set(found))
    found = compile_kernels.list_variants(read_shape("SmolLM2-135M"), torch.bfloat16, 80, rows=(1, 300), blocks="Q4_K")
    quantised = [variant for variant in found if variant.fn.__name__ in ("_multiply_quantised", "_dequantise")]
    assert {dict(variant.constants)["BITS"] for variant in quantised} == {4, 5}
    assert "_multiply" not in {variant.fn.__name__ for variant in found}
    (gated,) = (variant for variant in found if variant.fn.__name__ == "_gated_activation")
    for capability in compile_kernels.PROCESSORS:
        assert compile_kernels.compile_variant(gated, capability) == ""
        assert compile_kernels.compile_variant(quantised[0], capability) == ""
    hybrid = compile_kernels.list_variants(read_shape("Qwen3.5-9B"), torch.bfloat16, 90, rows=(1, 300))
    new = [variant for variant in hybrid if variant.fn.__name__ in recurrent]
    assert sorted(variant.fn.__name__ for variant in new) == sorted(recurrent), "one variant each, whatever the number of rows"
    for blocks, names in (("none", experts), ("Q4_K", {"_multiply_packed_pairs"})):
        mixed = compile_kernels.list_variants(read_shape("Qwen3-30B-A3B"), torch.bfloat16, 90, rows=(1,), blocks=blocks)
        new += [variant for variant in mixed if variant.fn.__name__ in names]
    assert sorted({variant.fn.__name__ for variant in new} - recurrent) == sorted(experts - {"_activate_clamped"})
    for variant in new:
        assert compile_kernels.compile_variant(variant, 90) == ""


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return find_failures(FILES)


@pytest.mark.parametrize("file", [path.stem for path in FILES])
def test_kernels_compile(file: str, failures: dict[str, str]) -> None:
    assert not failures[file], failures[file]

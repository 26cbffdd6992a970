"""Matrix products on the CPU: rows keep their bits in any company and whatever the format of the weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from weights import KEPT_AS, OF, normal, quantised

from ngramspec.cpu.matmul import CHUNK, Product
from ngramspec.cpu.packing import DEPTH, WeightFormat

COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 33, CHUNK, CHUNK + 1, 2 * CHUNK + 5)


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
def test_the_format_changes_no_bit(kind: str) -> None:
    weight = quantised("Q8_0", 80, 128) if kind == "codes" else OF[kind](normal(80, 128))
    small, large = Product(weight, None), Product(weight, None, packed=False)
    assert (small.format, large.format) == (KEPT_AS[kind], WeightFormat.FLOAT32)
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
print(product.format, hashlib.sha256(product(x).numpy().tobytes()).hexdigest())
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

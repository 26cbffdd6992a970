"""Kernels without a device: they run under Triton's interpreter, on tensors of the CPU (see tests/library_settings.py).

Where there is a CUDA device the kernels are compiled and the same tests run on it.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON and not torch.cuda.is_available():
    import interpreter

    interpreter.correct()

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tensors of a kernel lie: "cuda", or "cpu" under the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param

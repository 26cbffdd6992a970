"""Imported before transformers, which imports Triton: without a CUDA device, kernels run under Triton's interpreter.

Triton reads the variable when a kernel is defined, its own library's kernels among them.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

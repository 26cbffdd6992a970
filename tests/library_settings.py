"""Settings that libraries read from the environment when they are imported: this module comes before all of them.

OpenMP's threads wait for their next piece in a loop. Where tests run in as many processes as there are cores, each of torch's and numba's
small operations then waits until the scheduler brings the other threads back: tiny models took twenty times as much processor time. So they
sleep while they wait, and torch computes with one thread until an engine asks for more.

Without a CUDA device, kernels run under Triton's interpreter. Triton, which transformers imports, reads this when a kernel is defined, its
own library's kernels among them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

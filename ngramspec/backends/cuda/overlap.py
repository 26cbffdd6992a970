"""Let a kernel begin while the one before it in the stream ends: programmatic dependent launch, on Hopper and later.

Every kernel that is launched with `overlap_options` begins with `await_previous`: before it, a kernel may only touch what no kernel writes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ngramspec.backends.cuda.device import get_limits

_LINE = tl.constexpr(128)  # bytes of a cache line


def overlap_options(device: torch.device) -> dict[str, Any]:
    """Return a launch's options: `OVERLAP` for the kernel and, for Triton, whether the launch need not wait for the kernel before it."""
    overlaps = get_limits(device).overlaps
    return {"OVERLAP": overlaps, "launch_pdl": overlaps}


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Let the next kernel begin, and wait until all that the previous ones wrote can be read."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch_rows(rows, n_bytes, LINES: tl.constexpr):
    """Have the first `LINES` cache lines of each row, as far as its `n_bytes` go, read into the second-level cache.

    `rows` [N] points at the rows' first elements.
    """
    at = tl.minimum(tl.arange(0, LINES) * _LINE, n_bytes - 1)
    lines = rows.to(tl.uint64, bitcast=True)[:, None] + at.to(tl.uint64)[None, :]
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1)

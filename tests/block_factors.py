"""Write the float16 factors of quant blocks. Needs numpy alone, as what is compared on other processors does."""

from __future__ import annotations

import numpy as np


def write_factors(kind: str, blocks: np.ndarray, at: int, factors: np.ndarray) -> None:
    """Write a float16 [N, B] into every block [N, B, bytes]; IQ1_M has its four parts in the highest bits of its last words."""
    if kind == "IQ1_M":
        for i in range(4):
            blocks[:, :, 49 + 2 * i] = blocks[:, :, 49 + 2 * i] & 15 | (factors.view(np.uint16) >> 4 * i & 15) << 4
    else:
        blocks[:, :, at : at + 2] = factors[:, :, None].view(np.uint8)

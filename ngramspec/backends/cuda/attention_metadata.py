"""Which slot each row of a pass writes and which keys it sees: `types.Batch` as device arrays, shared by the kernels of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """Device arrays, int32, of R rows in items (groups of neighbouring rows of one sequence). The meaning is that of `types.Batch`.

    Rows that only fill up a bucket have a write slot in the pool's last block and belong to no item; what attention gives for them is
    left as it was.
    """

    positions: torch.Tensor  # [R]: position in the text; the row sees positions 0..its own
    slots: torch.Tensor  # [R]: where the row writes: block * BLOCK + offset
    bases: torch.Tensor  # [R]: from this position on, a key's slot in the sequence is found through `paths`; before, slot = position
    paths: torch.Tensor  # [R, depth]: slots in the sequence of positions base, base + 1, …, the row's own
    shares: torch.Tensor  # [P, `shares.WORDS`]: who takes which keys of which items in attention; no row: nobody
    tables: torch.Tensor  # [B, max_blocks]: blocks of each sequence, in order

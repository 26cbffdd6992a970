"""Hold on the device which KV position each row of a pass writes, which keys it sees and which states it continues, as device arrays."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class RecurrentRows:
    """Device arrays, int32, of a pass's sequences and R rows, for recurrent layers. `gated_delta_kernels` names their words."""

    spans: torch.Tensor  # [I, SPAN_WORDS]
    table: torch.Tensor  # [R, ROW_WORDS]
    n_copies: int
    """Most copies of states that the walks through the trees need."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Device arrays, int32, of R rows in items (groups of neighbouring rows of one sequence). They mean what `sampling.batch.Batch` says.

    Rows that only fill up a bucket write to the pool's last block and belong to no item; attention leaves their output as it was.
    """

    positions: torch.Tensor  # [R]: position in the text; the row sees positions 0..its own
    slots: torch.Tensor  # [R]: where the row writes: block * BLOCK + offset
    bases: torch.Tensor  # [R]: from this position on, a key's slot in the sequence is found through `paths`; before, slot = position
    paths: torch.Tensor  # [R, depth]: slots in the sequence of positions base, base + 1, …, the row's own
    shares: torch.Tensor  # [P, `attention_schedule.WORDS`]: the attention schedule; an empty item: no share
    tables: torch.Tensor  # [B, max_blocks]: blocks of each sequence, in order
    recurrent: RecurrentRows | None = None
    """None if no layer is recurrent."""

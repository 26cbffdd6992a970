"""The contract of a source of drafts beside the n-gram tables. Knows no model; a bad drafter costs time, never a token.

Token ids come in as int32 arrays, candidate trees go out as flat arrays in the shape of `types.DraftTree`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(slots=True)
class Candidates:
    """What one drafter proposes for one sequence: a tree in which a parent precedes its children."""

    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, index of the parent node; -1: directly after the last known token
    probs: np.ndarray  # [N] float32, the drafter's own estimate that the model takes the whole path to the node

    def __len__(self) -> int:
        return len(self.tokens)


@runtime_checkable
class Drafter(Protocol):
    """One more source. Its trees are evidence: the mix decides how far its probabilities are believed.

    `seq` is the slot that the engine gave the sequence; calls for one sequence are ordered begin, (propose, observe)*, end.
    An exception from any of these switches the drafter off for good (logged once) and fails no request.
    """

    name: str

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        """A sequence starts with these committed tokens [n] int32."""

    def propose(self, seqs: Sequence[int], budget: int) -> Sequence[Candidates]:
        """One candidate tree per sequence, each of at most `budget` nodes; empty where it knows nothing."""
        ...

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        """`accepted` [k] int32 was appended to the sequence; `rejected` [j] int32 are this drafter's tokens that the model did not take."""

    def end(self, seq: int) -> None:
        """The sequence is gone; free what belongs to it."""

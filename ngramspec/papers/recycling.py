"""Token recycling: what the model held likely behind a token when it last met it, as a static tree behind the text's last token.

After Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (2024). A matrix
[V, k] has the k most likely tokens behind every token. Each pass writes the rows of its last known token and of all its nodes, accepted
or not; a draft reads it breadth first. All sequences share it, and it outlives them. Knows a model by its vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ngramspec.outputs import KEPT, DraftTree
from ngramspec.papers.shape import best_first
from ngramspec.speculative.drafter import Candidates

# Probability that the model accepts the candidate of each rank, counted over 2,000 tokens of SmolLM2-135M on Spec-Bench and HumanEval.
RANKS = (0.38, 0.065, 0.05, 0.03, 0.025, 0.02, 0.02, 0.015)


class TokenRecycling:
    """A tree of `nodes` nodes, at most `depth` deep: 80 and 6 in the paper. Of these the engine's `spec_rows` best are verified."""

    name = "recycling"

    def __init__(self, nodes: int = 80, depth: int = 6) -> None:
        """The tree's shape is the best for `RANKS`. Raises ValueError."""
        if nodes < 1 or depth < 1:
            raise ValueError(f"token recycling takes nodes and depth from 1, got {nodes}, {depth}")
        self.shape = best_first([RANKS] * depth, nodes)
        self.matrix = np.empty((0, KEPT), np.int32)
        """[V, KEPT], most likely first; -1: none."""
        self._last: dict[int, int] = {}

    def bind(self, runner: Any) -> None:
        self.matrix = np.full((runner.vocab_size, KEPT), -1, np.int32)

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self._last[seq] = int(tokens[-1])

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        roots = np.array([self._last[seq] for seq in seqs], np.int32)
        n = min(len(self.shape.parents), budget)
        parents, depths, ranks, probs = (column[:n] for column in self.shape)
        tokens = np.full((len(seqs), n + 1), -1, np.int32)  # the last column is the root, which parents call -1
        tokens[:, -1] = roots
        for depth in range(depths.max(initial=-1) + 1):
            (level,) = np.nonzero(depths == depth)
            above = tokens[:, parents[level]]
            tokens[:, level] = np.where(above >= 0, self.matrix[above, ranks[level]], -1)
        trees = []
        for row in tokens[:, :-1]:
            kept = row >= 0
            moved = np.append(np.cumsum(kept) - 1, -1).astype(np.int32)
            trees.append(Candidates(row[kept], moved[parents[kept]], probs[kept]))
        return trees

    def on_topk(self, seq: int, tree: DraftTree, tokens: np.ndarray) -> None:
        """Store the top-k after each token; if a token occurs several times in the tree, its last occurrence counts."""
        self.matrix[np.append(np.int32(self._last[seq]), tree.tokens)] = tokens

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        self._last[seq] = int(accepted[-1])

    def end(self, seq: int) -> None:
        self._last.pop(seq, None)

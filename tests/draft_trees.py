"""Drafts as tests read them: proposed trees as the engine keeps them, and paths in them."""

from __future__ import annotations

import numpy as np

from ngramspec.outputs import DraftTree
from ngramspec.papers.lookahead import Lookahead
from ngramspec.papers.pass_tokens import ParallelTokens


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def tree_of(drafter: Lookahead | ParallelTokens, budget: int = 64) -> DraftTree:
    (found,) = drafter.propose([0], budget)
    return DraftTree(found.tokens, found.parents, found.probs, np.zeros(len(found), np.uint8))


def path(tree: DraftTree, node: int) -> list[int]:
    """The tokens that a node sees, itself the last."""
    seen: list[int] = []
    while node >= 0:
        seen.insert(0, int(tree.tokens[node]))
        node = int(tree.parents[node])
    return seen

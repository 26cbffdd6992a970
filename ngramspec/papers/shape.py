"""Choose the shape of a static draft tree: which ranks of which levels get a node, from assumed probabilities. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """A tree whose nodes stand in falling order of `probs`, so that its first n are the best tree of n nodes."""

    parents: np.ndarray  # [N] int32; -1: the root
    depths: np.ndarray  # [N] int32, from 0
    ranks: np.ndarray  # [N] int32, 0: the top token
    probs: np.ndarray  # [N] float32, chance that the model takes the whole path to the node


def best_first(chances: Sequence[Sequence[float]], nodes: int) -> Shape:
    """Return the most likely tree of `nodes` nodes, 1 or more, or of all there are.

    chances[d][r]: the probability that the model accepts the candidate of rank r at depth d given its parent, independent of the path;
    it falls with the rank. (So Cai et al., "Medusa", 2024, section 2.3.3, choose theirs.)
    """
    found: list[tuple[int, int, int, float]] = []
    waiting = [(-chances[0][0], -1, 0, 0, 1.0)]  # (-prob, parent, depth, rank, the parent's prob)
    while waiting and len(found) < nodes:
        prob, parent, depth, rank, above = heappop(waiting)
        if rank + 1 < len(chances[depth]):
            heappush(waiting, (-above * chances[depth][rank + 1], parent, depth, rank + 1, above))
        if depth + 1 < len(chances):
            heappush(waiting, (prob * chances[depth + 1][0], len(found), depth + 1, 0, -prob))
        found.append((parent, depth, rank, -prob))
    parents, depths, ranks, probs = zip(*found, strict=True)
    return Shape(np.array(parents, np.int32), np.array(depths, np.int32), np.array(ranks, np.int32), np.array(probs, np.float32))

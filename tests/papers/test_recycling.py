"""Token recycling: what was seen is proposed, best first."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ngramspec.outputs import KEPT, DraftTree
from ngramspec.papers.recycling import RANKS, TokenRecycling
from ngramspec.papers.shape import best_first

NO_NODES = DraftTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.uint8))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def row(*tokens: int) -> np.ndarray:
    return np.array([*tokens, *[-1] * (KEPT - len(tokens))], np.int32)


def paths(tokens: np.ndarray, parents: np.ndarray) -> list[list[int]]:
    out: list[list[int]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        out.append([*(out[parent] if parent >= 0 else []), token])
    return out


@pytest.mark.parametrize("nodes", [1, 7, 40, 1000])
def test_the_tree_is_the_likeliest_of_its_size(nodes: int) -> None:
    chances = [[0.6, 0.2, 0.1], [0.5, 0.3], [0.4, 0.39, 0.01]]
    shape = best_first(chances, nodes)
    every = [a * p for a in chances[0] for p in [1.0] + [b * q for b in chances[1] for q in [1.0, *chances[2]]]]
    assert shape.probs == pytest.approx(sorted(every, reverse=True)[:nodes])
    assert (shape.parents < np.arange(len(shape.parents))).all()
    assert len(set(zip(shape.parents.tolist(), shape.ranks.tolist(), strict=True))) == len(shape.parents), "siblings differ in rank"


def test_what_was_seen_is_proposed() -> None:
    """From one sequence to the next, the last that was seen, and nothing behind unseen tokens."""
    drafter = TokenRecycling(nodes=80, depth=3)
    drafter.bind(SimpleNamespace(vocab_size=20))
    drafter.begin(0, ints(3, 1))
    assert len(drafter.propose([0], 64)[0]) == 0
    nodes = DraftTree(ints(2, 5, 2), ints(-1, 0, 1), np.ones(3, np.float32), np.zeros(3, np.uint8))
    drafter.on_topk(0, nodes, np.stack([row(2, 4), row(9), row(1, 6), row(7, 8)]))
    drafter.observe(0, ints(2), ints(5, 2))
    drafter.end(0)
    drafter.begin(1, ints(5))
    drafter.begin(2, ints(11))
    known, unknown = drafter.propose([1, 2], 64)
    assert sorted(paths(known.tokens, known.parents)) == [[1], [1, 2], [1, 2, 7], [1, 2, 8], [1, 4], [6]]
    assert known.probs[0] == pytest.approx(RANKS[0])
    assert (np.diff(known.probs) <= 0).all()
    assert len(unknown) == 0
    assert len(drafter.propose([1], 2)[0]) == 2
    drafter.on_topk(1, NO_NODES, row(3)[None])
    assert drafter.propose([1], 64)[0].tokens.tolist() == [3]

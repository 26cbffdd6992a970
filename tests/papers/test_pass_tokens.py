"""Look-ahead tokens: where they hang in the tree, and whose picks are the next draft."""

from __future__ import annotations

import numpy as np
from draft_trees import ints, path, tree_of

from ngramspec.outputs import KEPT, DraftTree
from ngramspec.papers.pass_tokens import ParallelTokens

LOOK = [90, 91, 92]


def picks(tree: DraftTree, first: int) -> np.ndarray:
    """[1 + N, KEPT]: a token of its own behind the root and behind every node."""
    tokens = np.full((1 + len(tree), KEPT), -1, np.int32)
    tokens[:, 0] = first + np.arange(1 + len(tree))
    return tokens


def test_what_is_picked_behind_them_is_the_next_draft_wherever_the_walk_ends() -> None:
    drafter = ParallelTokens(LOOK)
    drafter.begin(0, ints(1, 2, 3))
    tree = tree_of(drafter)
    assert [path(tree, node) for node in range(len(tree))] == [LOOK[:1], LOOK[:2], LOOK]
    drafter.on_topk(0, tree, picks(tree, 10))  # 10 behind the root, 11 to 13 behind the look-ahead tokens
    drafter.observe(0, ints(10), ints())
    tree = tree_of(drafter)
    draft = [11, 12, 13]
    ends = [draft[:n] + LOOK[:k] for n in range(4) for k in range(1, 4)]
    assert sorted(path(tree, node) for node in range(len(tree))) == sorted([draft[:1], draft[:2], draft, *ends])
    for taken in range(4):  # of the draft; then the model's own
        again = ParallelTokens(LOOK)
        again.begin(0, ints(1, 2, 3))
        seen = picks(tree, 100)
        again.on_topk(0, tree, seen)
        again.observe(0, ints(*draft[:taken], 7), ints())
        behind = [node for k in range(1, 4) for node in range(len(tree)) if path(tree, node) == draft[:taken] + LOOK[:k]]
        assert [path(tree_of(again), node)[-1] for node in range(3)] == [int(seen[1 + node, 0]) for node in behind]


def test_less_room_is_for_the_nearest() -> None:
    drafter = ParallelTokens(LOOK)
    drafter.begin(0, ints(1))
    tree = tree_of(drafter)
    drafter.on_topk(0, tree, picks(tree, 10))
    drafter.observe(0, ints(10), ints())
    for budget in range(16):
        tree = tree_of(drafter, budget)
        assert len(tree) == min(budget, 15)
        assert all(parent < node for node, parent in enumerate(tree.parents))
    assert [path(tree_of(drafter, 4), node) for node in range(4)] == [[11], [11, 12], LOOK[:1], LOOK[:2]]


def test_a_text_that_says_a_look_ahead_token_itself() -> None:
    """The draft is the look-ahead token: there is one node for both."""
    drafter = ParallelTokens(LOOK)
    drafter.begin(0, ints(1))
    tree = tree_of(drafter)
    tokens = picks(tree, 89)  # 90 behind the first one
    drafter.on_topk(0, tree, tokens)
    drafter.observe(0, ints(89), ints())
    tree = tree_of(drafter)
    edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(edges)) == len(edges)
    assert (-1, 90) in edges

"""Lookahead: the window as a tree, its way through passes, the pool."""

from __future__ import annotations

import numpy as np
import pytest
from draft_trees import ints, path, tree_of

from ngramspec.outputs import KEPT, DraftTree
from ngramspec.papers import lookahead
from ngramspec.papers.lookahead import Lookahead

W, N, G = 4, 4, 3


class Model:
    """Picks a fresh token behind every node, so that tokens tell where they come from; takes nothing of the draft."""

    def __init__(self, drafter: Lookahead, first: int = 100) -> None:
        self.drafter, self.next = drafter, first

    def step(self, budget: int = 64) -> tuple[DraftTree, np.ndarray]:
        tree = tree_of(self.drafter, budget)
        sampled = np.full((len(tree) + 1, KEPT), -1, np.int32)
        sampled[:, 0] = np.arange(self.next, self.next + len(sampled))
        self.next += len(sampled)
        self.drafter.on_topk(0, tree, sampled)
        self.drafter.observe(0, sampled[0, :1], tree.tokens)
        return tree, sampled[:, 0]


def started(prompt: list[int], **options: bool) -> Lookahead:
    drafter = Lookahead(W, N, G, **options)
    drafter.begin(0, ints(*prompt))
    return drafter


def test_a_window_node_sees_its_column_and_level_zero_up_to_it() -> None:
    """(l, j) sees (0, 0) … (0, j), (1, j) … (l - 1, j), as the paper's mask has it."""
    drafter = started(list(range(10)))
    model = Model(drafter)
    for _ in range(N):
        model.step()
    columns = [list(column) for column in drafter._texts[0].columns]
    assert [len(column) for column in columns] == [N - 2] + [N - 1] * (W - 1)
    tree = tree_of(drafter)
    seen = sorted(path(tree, node) for node in range(len(tree)))
    level_0 = [column[0] for column in columns[1:]]
    expected = [columns[0][: i + 1] for i in range(N - 2)]
    for j in range(1, W):
        expected += [level_0[:j] + columns[j][1 : i + 1] for i in range(N - 1)]
    expected += [list(guess[: i + 1]) for guess in drafter._texts[0].pool.get(model.next - len(tree), []) for i in range(N - 1)]
    assert seen == sorted(expected)
    assert len(tree) == (W - 1) + W * (N - 2)


def test_columns_move_by_a_level_and_leave_ngrams_to_the_pool() -> None:
    drafter = started(list(range(10)))
    model = Model(drafter)
    for _ in range(N - 2):
        model.step()
    assert not drafter._texts[0].pool, "no column has N tokens yet"
    before, last = [list(column) for column in drafter._texts[0].columns], drafter._texts[0].tail[-1]
    tree, sampled = model.step()
    text = drafter._texts[0]
    node_of = {tuple(path(tree, node)): node for node in range(len(tree))}
    for j, (old, new) in enumerate(zip(before, text.columns, strict=True)):
        seen = [column[0] for column in before[1:j]] + old if j else old
        sample = sampled[1 + node_of[tuple(seen)]]
        assert new == [*old[1:], sample]
        whole = old if j else [last, *old]
        assert (*whole[1:], sample) in text.pool[whole[0]]


def test_guesses_begin_with_the_last_token_the_latest_first() -> None:
    drafter = started([1, 2, 3, 4, 1, 2, 3, 5, 9, 1, 7, 7, 7, 1], from_text=True)
    tree = tree_of(drafter)
    branches = [path(tree, node) for node in range(len(tree))]
    assert branches[: N - 1] == [[7], [7, 7], [7, 7, 7]], "the latest guess"
    for guess in ([2, 3, 5], [2, 3, 4]):
        assert guess in branches
    edges = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(edges)) == len(edges), "siblings differ"


def test_little_room_is_shared_and_the_rest_of_the_window_stands_still() -> None:
    drafter = started([1, 2, 3, 1, 2, 4, 1, 2, 5, 1], from_text=True)
    model = Model(drafter)
    for _ in range(N):
        model.step()
    before = [list(column) for column in drafter._texts[0].columns]
    tree, _ = model.step(budget=2 * (N - 1))
    assert len(tree) <= 2 * (N - 1)
    after = drafter._texts[0].columns
    assert after[0] != before[0]
    assert after[2:] == before[2:]
    assert len(tree_of(drafter, budget=0)) == 0


def test_the_pool_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookahead, "POOL", 10)
    drafter = started([1, 2, 3], from_text=True)
    rng = np.random.default_rng(0)
    for _ in range(100):
        drafter.observe(0, rng.integers(0, 30, 5).astype(np.int32), ints())
    pool = drafter._texts[0].pool
    assert len(pool) == 10
    assert max(len(guesses) for guesses in pool.values()) <= G
    drafter.end(0)
    drafter.end(0)
    assert not drafter._texts

"""Drafters alone and beside others: whatever one answers ends no request, and it learns of the trees that passes really had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import DraftTree
from ngramspec.sampling.batch import Span, pack
from ngramspec.speculative.drafter import Candidates, DraftOptions, Speculator, make_pass_topk
from ngramspec.speculative.proposer import TreeProposer
from ngramspec.speculative.single import SingleDrafter

VOCAB = 16


class Answering:
    """Proposes what it is told to, and keeps what it hears of the model's top-k."""

    name = "answering"

    def __init__(self, answer: Any) -> None:
        self.answer, self.heard = answer, list[tuple[DraftTree, np.ndarray]]()

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        pass

    def propose(self, seqs: Sequence[int], budget: int) -> Any:
        return self.answer

    def on_topk(self, seq: int, tree: DraftTree, tokens: np.ndarray) -> None:
        self.heard.append((tree, tokens))

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        pass

    def end(self, seq: int) -> None:
        pass


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def draft(drafts: Speculator) -> DraftTree:
    drafts.begin(0, ints(1, 2))
    return drafts.propose(ints(0), ints(4), np.linspace(1.0, 1.01, 20), 1, 8)[0]


CHAIN: dict[str, Any] = {"tokens": [5, 6], "parents": [-1, 0], "probs": [1, 1]}


@pytest.mark.parametrize("number", [int, float])
def test_lists_are_as_good_as_arrays(number: type) -> None:
    candidates = SimpleNamespace(**{name: list(map(number, column)) for name, column in CHAIN.items()})
    drafts = SingleDrafter(Answering([candidates]), vocab_size=VOCAB, spec_length=4, spec_rows=8)
    tree = draft(drafts)
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([5, 6], [-1, 0])
    assert drafts.drafter is not None


@pytest.mark.parametrize(
    "answer",
    [3, np.zeros(1), "text", iter([Candidates(**CHAIN)]), [Candidates(**CHAIN)] * 2, [None]],
    ids=["number", "array", "text", "iterator", "one too many", "none"],
)
def test_an_answer_that_is_no_list_of_trees_switches_the_drafter_off(answer: Any) -> None:
    drafts = SingleDrafter(Answering(answer), vocab_size=VOCAB, spec_length=4, spec_rows=8)
    assert len(draft(drafts)) == 0
    assert drafts.drafter is None


@pytest.mark.parametrize(
    "make",
    [
        lambda drafter: SingleDrafter(drafter, vocab_size=VOCAB, spec_length=4, spec_rows=8),
        lambda drafter: TreeProposer(DraftOptions(vocab_size=VOCAB, max_seqs=1, recycle=False), drafters=[drafter]),
    ],
    ids=["alone", "beside others"],
)
def test_the_top_tokens_heard_are_those_of_the_pass(make: Callable[[Answering], Speculator]) -> None:
    """A grammar takes nodes out of a tree and adds others."""
    drafter = Answering([Candidates(ints(5, 6), ints(-1, 0), np.array([0.9, 0.8], np.float32))])
    drafts = make(drafter)
    draft(drafts)
    tree = DraftTree(ints(7, 8, 9), ints(-1, 0, 1), np.ones(3, np.float32), np.zeros(3, np.uint8), origins=ints(-1, -1, -1))
    tables = BlockTables(1, 1, 16)
    assert tables.reserve(0, 5)
    batch = pack([Span(0, ints(2), 1, tree)], tables)
    rows = np.eye(4, VOCAB, dtype=np.float32)
    output = SimpleNamespace(get_topk=lambda first, end: None, get_logits=lambda first, end: rows[first:end])
    drafts.observe(ints(0), [ints(7, 8, 1)], [ints(-1, -1)], make_pass_topk([(0, 1, 0)], batch, output))
    ((heard, tokens),) = drafter.heard
    assert heard.tokens.tolist() == [7, 8, 9]
    assert tokens[:, 0].tolist() == [0, 1, 2, 3]

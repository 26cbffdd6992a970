"""Drafts of the model's own head: alone and in one tree with n-grams they change no token, and a head that can be right pays.

The model's next token depends mostly on its last one, and its head knows how (`tiny_mtp.make_foreseeable`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_mtp
from test_exact import tight_pool

from ngramspec.backends.base import HeadRows, Predicted
from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import Stats
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative.drafter import DraftOptions
from ngramspec.speculative.proposer import TreeProposer
from ngramspec.speculative.trained.head_drafter import HeadDrafter

GREEDY = SamplingParams(max_tokens=50, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=50, temperature=0.8, seed=3, ignore_eos=True)
SPARING = 1e6  # milliseconds of a pass, beside which the head's time is nothing


class LongPasses(tiny.FreeRows):
    """Every row is free, and passes take so long that a drafter pays if it is ever right."""

    @property
    def table(self) -> np.ndarray:
        return np.full(self.max_rows + 1, SPARING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mtp.save(tmp_path_factory.mktemp("mtp") / "model", *tiny_mtp.make_foreseeable(0.005))


def build(folder: Path, *, ngrams: bool, **options: Any) -> Engine:
    engine = Engine(str(folder), **{"max_seqs": 8, "max_model_len": 150} | options)
    assert engine.runner.head is not None
    drafter = HeadDrafter(engine.runner.head, SPARING)
    proposer = TreeProposer(
        DraftOptions(vocab_size=engine.vocab_size, max_seqs=8, use_ngram=ngrams, recycle=ngrams, answers=0), drafters=[drafter]
    )
    engine.finish_compiling(lambda _: None)
    engine.use(speculator=proposer, cost=LongPasses())
    return engine


def make_prompts(n: int, length: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 250, int(rng.integers(3, length))).tolist() for _ in range(n)]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_no_token_changes_and_a_right_head_pays(folder: Path, params: SamplingParams) -> None:
    asked = make_prompts(6)
    asked += [asked[0] + asked[1] + [7], asked[0] + asked[1] + [9]]  # their common part comes from the prefix cache
    with Engine(str(folder), speculation=False, max_seqs=8, max_model_len=150) as plain:
        assert plain.runner.head is None
        expected = [each.token_ids for each in plain.complete(asked, params)]
    for ngrams in (False, True):
        with build(folder, ngrams=ngrams) as engine:
            together = engine.complete(asked, params)
            assert [each.token_ids for each in together] == expected
            assert [engine.complete(each, params).token_ids for each in asked] == expected
            stats = Stats.sum(each.stats for each in together)
            drafted, made = stats.expected_by_source["mtp"], stats.accepted_by_source["mtp"]
            if not ngrams:
                assert stats.tokens_per_pass > 2
                assert 0.8 < drafted / made < 1.25
        with build(folder, ngrams=ngrams, max_rows=23, kv_memory=tight_pool(tiny_mtp.HYBRID)) as tight:  # chunks, preemption
            assert [each.token_ids for each in tight.complete(asked, params)] == expected


class FakeHead:
    """Always predicts the token 1, which is always wrong."""

    most_rows, step_ms = 16, 0.01

    def __init__(self) -> None:
        self.read: list[tuple[int, int, list[int], list[float]]] = []

    def predict(self, rows: Sequence[HeadRows]) -> Predicted:
        self.read += [(each.slot, each.first, each.tokens.tolist(), each.states[:, 0].tolist()) for each in rows]
        n = len(rows)
        return Predicted(np.ones((n, 1), np.int32), np.full((n, 1), 0.9, np.float32), np.zeros((n, 4), np.float32))


def make_states(first: int, end: int) -> np.ndarray:
    """Return states that say their positions."""
    return np.repeat(np.arange(first, end, dtype=np.float32)[:, None], 4, axis=1)


def test_rows_are_read_with_the_token_that_follows() -> None:
    head = FakeHead()
    drafter = HeadDrafter(head, SPARING, length=2)
    drafter.begin(3, np.arange(100, 130, dtype=np.int32))
    drafter.on_hidden_states(3, 0, make_states(0, 20))  # of which 14 are kept
    assert len(drafter.propose([3], 8)[0]) == 0, "the last rows are not computed"
    drafter.on_hidden_states(3, 20, make_states(20, 29))
    assert drafter.propose([3], 8)[0].tokens.tolist() == [1, 1]
    assert head.read == [(3, 0, list(range(116, 130)), list(range(15, 29))), (3, 14, [1], [0.0])]
    head.read.clear()
    drafter.on_hidden_states(3, 29, make_states(29, 31))
    drafter.observe(3, np.array([5, 6], np.int32), np.empty(0, np.int32))
    assert len(drafter.propose([3], 1)[0]) == 1
    assert head.read[0] == (3, 14, [5, 6], [29.0, 30.0]), "drafts are read over"
    head.read.clear()
    drafter.observe(3, np.array([7, 8, 9], np.int32), np.empty(0, np.int32))  # by native steps, without hidden states
    assert len(drafter.propose([3], 8)[0]) == 0
    drafter.on_hidden_states(3, 34, make_states(34, 35))
    drafter.observe(3, np.array([10], np.int32), np.empty(0, np.int32))
    drafter.propose([3], 8)
    assert head.read[0] == (3, 16, [10], [34.0]), "the gap is no part of its context"


def test_a_head_that_is_always_wrong_is_seldom_asked() -> None:
    head = FakeHead()
    proposer = TreeProposer(DraftOptions(vocab_size=300, max_seqs=1), drafters=[HeadDrafter(head, 10.0)])
    proposer.begin(0, np.arange(20, dtype=np.int32))
    slots, tokens, cost = np.zeros(1, np.int32), np.array([2], np.int32), np.full(64, 0.02)
    n, native, position = 0, 0, 19
    while n < 2000:
        given = proposer.prepare_native(slots, 1)
        if given is not None:
            assert not proposer.needs_hidden_states
            k = min(given.n_steps, 16)
            proposer.observe_native_steps(k, slots, [np.full(k, 2, np.int32)])
            n, native, position = n + k, native + k, position + k
            continue
        proposer.propose(slots, np.full(1, 4, np.int32), cost, 1, 8)
        if proposer.needs_hidden_states:
            proposer.on_hidden_states(0, position, make_states(position, position + 1))
        proposer.observe(slots, [tokens], [np.empty(0, np.int32)])
        n, position = n + 1, position + 1
    assert native > 1000, "the pauses have no native steps"
    assert 8 <= len(head.read) < 800

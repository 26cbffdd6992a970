"""Drafters that do not pay for their time rest; those that do are asked in every step."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_store

from ngramspec.datastore.reader import Datastore
from ngramspec.speculative import Candidates, TreeProposer
from ngramspec.speculative import proposer as proposer_module
from ngramspec.speculative.budget.backoff import MAX_TIME_SHARE, WINDOW, DrafterBackoff
from ngramspec.speculative.drafter import DraftOptions
from ngramspec.speculative.feature_weights import make_cold_weights


def asks(backoff: DrafterBackoff, steps: int, gained: int, ms: float, tokens: int = 1, pass_ms: float = 10.0) -> int:
    """How often it is asked."""
    n = 0
    for _ in range(steps):
        if backoff.should_ask():
            n += 1
            backoff.ms += ms
            backoff.record_step(gained, tokens + gained, pass_ms)
    return n


def test_what_pays_is_always_asked() -> None:
    assert asks(DrafterBackoff(), 1000, gained=2, ms=19.0) == 1000  # two tokens more for less than two passes
    assert asks(DrafterBackoff(), 1000, gained=1, ms=30.0, tokens=3) < 500  # three tokens a pass: one more is worth a third of it


@pytest.mark.parametrize("ms", [1.0, 10.0, 100.0])
def test_what_never_pays_takes_a_small_share_of_the_time(ms: float) -> None:
    backoff, steps = DrafterBackoff(), 100_000
    asks(backoff, 10_000, gained=0, ms=ms)  # at first it rests for less
    n = asks(backoff, steps, gained=0, ms=ms)
    assert n >= 2 * WINDOW  # it is tried again
    assert n * ms < 1.1 * MAX_TIME_SHARE * steps * 10.0


def test_what_costs_nothing_need_not_rest() -> None:
    assert asks(DrafterBackoff(), 1000, gained=0, ms=0.01) > 900


def test_what_begins_to_pay_is_found_out() -> None:
    backoff = DrafterBackoff()
    asks(backoff, 10_000, gained=0, ms=10.0)
    asks(backoff, int(4 * WINDOW / MAX_TIME_SHARE), gained=4, ms=10.0)
    assert asks(backoff, 100, gained=4, ms=10.0) == 100


class Slow:
    """Takes a while, and is right or not."""

    name = "slow"

    def __init__(self, token: int) -> None:
        self.token, self.n, self.clock_s = token, 0, 0.0

    def begin(self, seq: int, tokens: np.ndarray) -> None: ...

    def propose(self, seqs: list[int], budget: int) -> list[Candidates]:
        self.n += 1
        self.clock_s += 0.002
        return [Candidates(np.array([self.token], np.int32), np.array([-1], np.int32), np.array([0.9], np.float32)) for _ in seqs]

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None: ...

    def end(self, seq: int) -> None: ...


@pytest.mark.parametrize(("token", "pass_ms", "always"), [(1, 100.0, True), (2, 1.0, False), (1, 0.1, False)])
def test_a_drafter_is_asked_while_it_pays(token: int, pass_ms: float, always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is of tokens that the tables cannot foresee, each second one is 1."""
    drafter = Slow(token)
    monkeypatch.setattr(proposer_module, "time", SimpleNamespace(perf_counter=lambda: drafter.clock_s))
    proposer = TreeProposer(
        DraftOptions(vocab_size=1000, max_seqs=1, recycle=False, answers=0), drafters=[drafter], weights=make_cold_weights()
    )
    proposer.begin(0, np.array([0], np.int32))
    slots, depth, cost = np.zeros(1, np.int32), np.full(1, 8, np.int32), pass_ms * (1 + 0.001 * np.arange(100.0))
    for step in range(300):
        tree = proposer.propose(slots, depth, cost, 1, 8)[0]
        path = np.flatnonzero((tree.tokens == 1) & (tree.parents == -1)).astype(np.int32)
        proposer.observe(slots, [np.array([1, 10 + step], np.int32)], [path])
    assert (drafter.n == 300) == always
    assert always or drafter.n < 100


def test_what_another_drafter_brings_does_not_keep_a_datastore_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_store.write_store(tmp_path, [[[900, 901, 902]]], 1000)
    drafter, n_accepted, searches = Slow(0), 0, list[int]()
    monkeypatch.setattr(proposer_module, "time", SimpleNamespace(perf_counter=lambda: drafter.clock_s))
    proposer = TreeProposer(DraftOptions(vocab_size=1000, max_seqs=1), drafters=[drafter], weights=make_cold_weights())
    proposer.use_datastores({"store": Datastore.open(tmp_path)}, ())
    assert proposer.datastore is not None
    proposer.datastore.wait_until_loaded()
    search, slots = proposer.datastore.propose, np.zeros(1, np.int32)
    monkeypatch.setattr(proposer.datastore, "propose", lambda slots: searches.append(1) or search(slots))
    text = np.random.default_rng(0).permutation(800).astype(np.int32)
    proposer.begin(0, text[:8])
    for i in range(8, 408):
        drafter.token = int(text[i])
        (tree,) = proposer.propose(slots, np.ones(1, np.int32), np.full(64, 100.0), 1, 8)
        path = np.flatnonzero(tree.tokens == text[i]).astype(np.int32)
        n_accepted += len(path)
        proposer.observe(slots, [text[i : i + 1]], [path])
    assert n_accepted > 380
    assert len(searches) < 100

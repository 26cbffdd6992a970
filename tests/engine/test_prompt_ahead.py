"""Prompts that are computed before anybody asks for them: later requests find them in the prefix cache and write the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tiny

from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import InvalidInputError
from ngramspec.outputs import BLOCK
from ngramspec.speculative.budget.cost_model import CostModel

rng = np.random.default_rng(11)


def make_text(n: int) -> list[int]:
    return rng.integers(0, 250, n).tolist()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_seqs=8, max_rows=64) as engine:
        yield engine
        engine.runner.pool.check_integrity()
        assert engine.runner.pool.n_available == engine.runner.pool.n_blocks


def wait_until(holds: Callable[[], bool]) -> bool:
    """Return whether it holds within 20 s."""
    until = time.monotonic() + 20
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    return holds()


def wait_for_tokens(engine: Engine, before: int, n: int) -> bool:
    """Return whether `n` tokens were computed ahead, and no more."""
    return wait_until(lambda: not engine.core.ahead.has_work) and engine.status().tokens_ahead == before + n


def test_later_prompts_find_what_was_computed(engine: Engine) -> None:
    first, second, before = make_text(240), make_text(150), engine.status().tokens_ahead
    alone = engine.complete(first, max_tokens=8, prefix_cache=False)
    told: list[str] = []

    def list_prompts(written: str) -> list[list[int]]:
        told.append(written)
        assert engine.core.ahead.has_work, "whoever waits for the end of it waits on"
        return [first, second]

    done = engine.complete(make_text(20), max_tokens=4, next_prompts=list_prompts)
    assert wait_for_tokens(engine, before, 239 + 149)
    assert told == [done.text]
    after = engine.complete(first, max_tokens=8)
    assert (after.cached_tokens, after.token_ids) == (239, alone.token_ids)
    assert engine.complete(second, max_tokens=1).cached_tokens == 149
    assert engine.complete(make_text(20), max_tokens=1, next_prompts=lambda _: [first]).text
    assert wait_until(lambda: not engine.core.ahead.has_work)
    assert wait_for_tokens(engine, before, 239 + 149), "nothing twice"


def test_one_prompt_is_listed_when_the_one_before_is_computed(engine: Engine) -> None:
    """To encode all of them takes time, in which a request would wait."""
    prompts, before = [make_text(240), make_text(150)], engine.status().tokens_ahead
    listed: list[int] = []

    def list_prompts(written: str) -> Iterator[list[int]]:
        for prompt in prompts:
            listed.append(engine.status().tokens_ahead - before)
            yield prompt

    engine.complete(make_text(20), max_tokens=1, next_prompts=list_prompts)
    assert wait_for_tokens(engine, before, 239 + 149)
    assert listed == [0, 239]


def test_whose_prompts_they_are(engine: Engine) -> None:
    expected, before = make_text(100), engine.status().tokens_ahead
    engine.complete(make_text(20), max_tokens=1, tenant="a", next_prompts=lambda _: [expected])
    assert wait_for_tokens(engine, before, 99)
    assert engine.complete(expected, max_tokens=1, tenant="b").cached_tokens == 0
    assert engine.complete(expected, max_tokens=1, tenant="a").cached_tokens == 99
    for hints in ({"tenant": None}, {"prefix_cache": False}):
        engine.complete(make_text(20), max_tokens=1, next_prompts=lambda _: [make_text(100)], **hints)
        assert not engine.core.ahead.has_work


def test_a_request_takes_the_place_of_what_is_computed_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compute, found = engine.core.ahead.compute_some, list[bool]()
    begun = threading.Event()

    def compute_and_tell(slot: int, cost: CostModel) -> None:
        found.append(engine.core.scheduler.has_work)
        compute(slot, cost)
        if len(found) == 2:
            begun.set()

    monkeypatch.setattr(engine.core.ahead, "compute_some", compute_and_tell)
    expected, before = make_text(240), engine.status().tokens_ahead
    alone = engine.complete(expected, max_tokens=8, prefix_cache=False)
    engine.complete(make_text(20), max_tokens=1, next_prompts=lambda _: [expected])
    assert begun.wait(20)
    assert engine.complete(expected, max_tokens=8, next_prompts=lambda _: []).token_ids == alone.token_ids
    assert wait_until(lambda: not engine.core.ahead.has_work)
    assert not any(found), "never while there is a request"
    assert engine.status().tokens_ahead - before < 239


def test_a_beam_search_may_hold_all_slots(engine: Engine) -> None:
    engine.complete(make_text(20), max_tokens=1, next_prompts=lambda _: [make_text(240) for _ in range(20)])
    assert len(engine.beam_search(make_text(20), width=8, max_tokens=12, ignore_eos=True)) == 8
    assert wait_until(lambda: not engine.core.ahead.has_work)


def test_a_prompt_that_is_too_long_is_not_computed_ahead(engine: Engine) -> None:
    given, before = make_text(200), engine.status().tokens_ahead
    longer = given + make_text(BLOCK * engine.runner.pool.max_blocks)  # text is spelled in more tokens than the model wrote it in
    engine.complete(given, max_tokens=1, next_prompts=lambda _: [longer, make_text(40)])
    assert wait_for_tokens(engine, before, 39), "the other one is"
    engine.runner.pool.check_integrity()
    engine.complete([make_text(20) for _ in range(8)], max_tokens=1)


def test_what_goes_wrong_ahead_ends_nothing(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def fail(written: str) -> list[list[int]]:
        raise ValueError("no prompt")

    engine.complete(make_text(20), max_tokens=1, next_prompts=fail)
    assert wait_until(lambda: "no prompt" in caplog.text)
    with pytest.raises(InvalidInputError, match="next_prompts must be a function"):
        engine.complete(make_text(20), max_tokens=1, next_prompts=[[1]])  # type: ignore[arg-type]
    assert engine.complete(make_text(20), max_tokens=3).token_ids


def test_nobody_has_seen_what_a_cancelled_request_wrote(engine: Engine) -> None:
    told: list[str] = []
    request = engine.submit(make_text(20), max_tokens=200, ignore_eos=True, next_prompts=lambda written: told.append(written) or [])
    assert wait_until(lambda: len(request.completion.choices[0].token_ids) > 0)
    request.cancel()
    assert request.result().choices[0].text
    assert wait_until(lambda: bool(told))
    assert told == [""]


def test_a_prompt_that_would_take_the_place_of_others_is_left_out() -> None:
    tight = Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_seqs=1, kv_memory=1 << 18)
    with tight as engine:
        long = make_text(engine.runner.pool.n_positions // 3 + BLOCK)[:255]
        assert 3 * len(long) > engine.runner.pool.n_positions
        engine.complete(make_text(20), max_tokens=1, next_prompts=lambda _: [long])
        assert wait_until(lambda: not engine.core.ahead.has_work)
        assert engine.status().tokens_ahead == 0

"""Passes that do not fit into memory become smaller before anybody's request ends, and prompts keep few logits at a time.

Weights are moved into large pages beside requests, but for little of their time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import tiny
import torch

from ngramspec import Engine, SamplingParams
from ngramspec.backends.base import Output
from ngramspec.engine import scheduler
from ngramspec.errors import OutOfMemoryError
from ngramspec.sampling.batch import Batch

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[*range(3, 40)], [*range(50, 70), *range(50, 60)], [9, 8, 7]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(tiny.tiny_model("llama"), threads=1, max_seqs=4, max_model_len=128, kv_memory=8 << 20) as made:
        made.core.cost = tiny.FreeRows()
        yield made
        made.runner.pool.check_integrity()
        assert made.runner.pool.n_available == made.runner.pool.n_blocks


def texts(engine: Engine, **options: object) -> list[list[int]]:
    done = engine.complete(PROMPTS, PARAMS, prefix_cache=False, **options)  # type: ignore[arg-type]
    return [each.token_ids for each in done]


def limited(engine: Engine, most: int, patch: pytest.MonkeyPatch) -> list[int]:
    """Passes of more rows find no memory. The rows of all passes, as they come."""
    tried, forward = list[int](), engine.runner.forward

    def fails(batch: Batch) -> Output:
        tried.append(len(batch.input_ids))
        if tried[-1] > most:
            raise torch.OutOfMemoryError(f"no memory for {tried[-1]} rows")
        return forward(batch)

    patch.setattr(engine.runner, "forward", fails)
    patch.setattr(engine.runner, "native_forward", lambda: None)
    core = engine.core
    patch.setattr(core.scheduler, "max_rows", core.scheduler.max_rows)
    patch.setattr(core, "_max_rows", core._max_rows)
    return tried


@pytest.mark.parametrize("most", [36, 20, 7])  # the first prompt alone has more: it may be on its way before the others come
def test_a_pass_that_does_not_fit_is_tried_with_half_its_rows(engine: Engine, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = texts(engine, speculation=False)
    tried = limited(engine, most, monkeypatch)
    assert texts(engine, speculation=False) == plain
    assert max(tried) > most
    fitting = [n for n in tried if n <= most]
    assert len(tried) - len(fitting) <= 5
    assert texts(engine, prediction=plain[0]) == plain  # with drafts
    assert max(tried[-3:]) <= most


def test_drafts_are_given_up_before_requests(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = engine.complete(PROMPTS[0], PARAMS, speculation=False, prefix_cache=False)
    engine.complete(PROMPTS[0][:-1], SamplingParams(max_tokens=1))  # the prompt fits from here on: its prefix is known
    tried = limited(engine, 6, monkeypatch)
    again = engine.complete(PROMPTS[0], PARAMS, prediction=alone.token_ids)
    assert again.token_ids == alone.token_ids
    assert any(n > 6 for n in tried)


def test_a_row_for_every_sequence_that_does_not_fit_ends_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    limited(engine, 0, monkeypatch)
    with pytest.raises(OutOfMemoryError, match="out of memory in a pass: no memory for 1 rows"):
        engine.complete([5], PARAMS)


def test_a_text_that_has_ended_is_delivered_though_the_next_pass_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device, what a pass has brought is delivered while the next one is under way."""
    n_seqs, forward = list[int](), engine.runner.forward

    def fail_once_one_is_left(batch: Batch) -> Output:
        n_seqs.append(len(batch.spans))
        if n_seqs[-1] < max(n_seqs):
            raise ValueError("a kernel failed")
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", fail_once_one_is_left)
    monkeypatch.setattr(engine.runner, "native_forward", lambda: None)
    monkeypatch.setattr(engine.runner, "asynchronous", True, raising=False)
    long = engine.submit(PROMPTS[0], SamplingParams(max_tokens=60, ignore_eos=True), speculation=False)
    short = engine.submit(PROMPTS[1], SamplingParams(max_tokens=4, ignore_eos=True), speculation=False)
    with pytest.raises(ValueError, match="a kernel failed"):
        long.result(60)
    assert len(short.result(60).token_ids) == 4


def test_prompts_with_log_probabilities_keep_few_logits_at_a_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=1)
    whole = engine.complete(PROMPTS, params, speculation=False)
    monkeypatch.setattr(scheduler, "SCORED_ROWS", 16)
    wanted, forward = list[int](), engine.runner.forward

    def counts(batch: Batch) -> Output:
        wanted.append(len(batch.logits_rows))
        return forward(batch)

    monkeypatch.setattr(engine.runner, "forward", counts)
    monkeypatch.setattr(engine.runner, "native_forward", lambda: None)
    pieces = engine.complete(PROMPTS, params, speculation=False)
    assert [each.prompt_logprobs for each in pieces] == [each.prompt_logprobs for each in whole]
    assert max(wanted) <= 16 + len(PROMPTS)
    assert sum(wanted) >= sum(map(len, PROMPTS))


def test_after_every_pass_that_fits_others_may_join(engine: Engine) -> None:
    """Native steps among them."""
    joining, seen = engine.core.scheduler, list[bool]()

    def deliver(_: object) -> None:
        seen.append(joining.admits)
        joining.admits = False

    engine.submit(PROMPTS[0], PARAMS, deliver=deliver, speculation=False).result(60)
    joining.admits = True
    assert len(seen) > 1
    assert all(seen)


def test_moving_weights_takes_a_tenth_of_the_time_of_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, busy = list[float](), list[float]()

    def move() -> bool:
        started = time.perf_counter()
        time.sleep(0.004)
        (busy if engine.core.scheduler.has_work else idle).append(time.perf_counter() - started)
        return True

    monkeypatch.setattr(engine.runner, "enlarge_page", move)
    monkeypatch.setattr(engine.core, "has_small_pages", True)
    engine.complete([3, 4, 5], PARAMS)
    deadline = time.monotonic() + 60
    while len(idle) <= 3 and time.monotonic() < deadline:  # nothing else is to do then
        time.sleep(0.01)
    busy.clear()
    before, taken = time.perf_counter(), 0.0
    while taken < 0.5:  # some moves
        engine.complete([3, 4, 5], SamplingParams(max_tokens=100, ignore_eos=True), prefix_cache=False)
        taken = time.perf_counter() - before
    assert len(idle) > 3
    assert busy, "a busy engine moves some, too"
    assert sum(busy) < 0.2 * taken

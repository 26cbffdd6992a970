"""Several steps in one call: texts, statistics and what was learned are those of single steps, and whoever calls is not kept waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from fair_time import wait_until

from ngramspec import Engine, SamplingParams
from ngramspec.engine.native_steps import NativeResult
from ngramspec.errors import InvalidInputError, NgramspecError
from ngramspec.sequence_table import STEP_RECORD
from ngramspec.speculative.budget.cost_model import Load
from ngramspec.speculative.budget.step_timer import StepTimer
from ngramspec.speculative.proposer import TreeProposer
from tests import tiny

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8] * 3
GREEDY, DRAWN = SamplingParams(max_tokens=90, ignore_eos=True), SamplingParams(max_tokens=90, temperature=0.7, seed=5, ignore_eos=True)
Record = list[NativeResult]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Engine, Record]]]:
    """Engines on one tiny model, and what calls of several steps gave them; `several`: they are made."""
    engines = []

    def made(*, several: bool = True, **options: Any) -> tuple[Engine, Record]:
        engine = Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_model_len=200, **options)
        engines.append(engine)
        engine.finish_compiling(lambda _: None)  # until then nothing is drafted
        engine.use(cost=tiny.FreeRows())
        record, run = Record(), engine.core.native_steps.run

        def recorded(*args: Any) -> NativeResult | None:
            result = run(*args) if several else None
            if result is not None:
                record.append(result)
            return result

        monkeypatch.setattr(engine.core.native_steps, "run", recorded)
        return engine, record

    yield made
    for engine in engines:
        engine.runner.pool.check_integrity()
        assert engine.runner.pool.n_available == engine.runner.pool.n_blocks
        engine.close()


def learned(engine: Engine) -> list[np.ndarray]:
    proposer = engine.speculator
    assert isinstance(proposer, TreeProposer)
    calibration, recycled, weights = proposer._calibration, proposer._recycled, proposer.weights
    return [weights.states, weights.mix, calibration.by_source, calibration.by_level, calibration.verified, recycled.tokens, recycled.keys]


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_all_is_as_in_single_steps(build: Callable[..., tuple[Engine, Record]], params: SamplingParams, kv_dtype: str) -> None:
    several, record = build(kv_dtype=kv_dtype)
    single, none = build(several=False, kv_dtype=kv_dtype)
    more = SamplingParams(**{**vars_of(params), "n": 4, "max_tokens": 50})
    for prompt, how in ((PROMPT, params), (PROMPT[:9], params), (PROMPT, more), ([7, 7, 7], more), ([9], params)):
        for speculation in (True, False):
            got, wanted = (engine.complete(prompt, how, speculation=speculation, tenant="x") for engine in (several, single))
            for a, b in zip(got.choices, wanted.choices, strict=True):
                assert (a.token_ids, a.finish_reason, a.draft_sources) == (b.token_ids, b.finish_reason, b.draft_sources)
                assert a.stats == b.stats
    assert not none
    assert any(len(gained.records) > 1 for gained in record)
    assert any(gained.records["n_nodes"].any() for gained in record)
    for a, b in zip(learned(several), learned(single), strict=True):
        assert np.array_equal(a, b)


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "seed", "ignore_eos")}


def test_stops_and_lengths_end_texts_where_single_steps_do(build: Callable[..., tuple[Engine, Record]]) -> None:
    several, record = build()
    single, _ = build(several=False)
    text = single.complete(PROMPT, GREEDY).token_ids
    for stop in sorted(set(text))[:12]:
        params = SamplingParams(max_tokens=60, stop_token_ids=[stop])
        a, b = (engine.complete(PROMPT, params).choices[0] for engine in (several, single))
        assert (a.token_ids, a.finish_reason, a.stats.tokens) == (b.token_ids, b.finish_reason, b.stats.tokens)
        assert len(a.draft_sources) == len(a.token_ids)
    for n in range(1, 40):
        assert several.complete(PROMPT, SamplingParams(max_tokens=n, ignore_eos=True)).token_ids == text[:n]
    assert record


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_native_steps_after_a_word_that_is_spelled(build: Callable[..., tuple[Engine, Record]], params: SamplingParams) -> None:
    native, record = build()
    single, _ = build(several=False)
    for n in (1, 2, 60):
        healed = replace(params, max_tokens=n, healed="word")  # a token spells a byte
        a, b, c = (
            engine.complete(PROMPT, healed, **hints) for engine, hints in ((native, {}), (single, {}), (single, {"speculation": False}))
        )
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) == (c.token_ids, "length")
        assert len(a.token_ids) == 4 + n
    assert any(len(gained.records) > 1 for gained in record)


def test_texts_beside_others_and_in_a_pool_that_is_too_small(build: Callable[..., tuple[Engine, Record]]) -> None:
    alone, _ = build(several=False, speculation=False)
    rng = np.random.default_rng(3)
    prompts = [[*PROMPT, *rng.integers(0, 250, 5).tolist()] for _ in range(10)]
    kinds = [GREEDY, DRAWN, SamplingParams(max_tokens=70, ignore_eos=True, stop=["never there"]), SamplingParams(max_tokens=30, logprobs=2)]
    wanted = [alone.complete(prompt, kinds[i % 4]).token_ids for i, prompt in enumerate(prompts)]
    for options in ({}, {"kv_memory": 20 * 32 * 2 * 2 * 2 * 16 * 4}):  # 20 blocks
        engine, record = build(max_seqs=6, **options)
        for _ in range(2):
            requests = [engine.submit(prompt, kinds[i % 4]) for i, prompt in enumerate(prompts)]
            assert [request.result(60).token_ids for request in requests] == wanted
        assert record
        if options:
            assert engine.status().preemptions


def test_pieces_come_pass_by_pass(build: Callable[..., tuple[Engine, Record]]) -> None:
    engine, record = build()
    list(engine.stream(PROMPT, GREEDY))
    assert record
    assert all(len(gained.records) == 1 for gained in record)


def test_the_last_piece_alone_where_nobody_waits_for_others(build: Callable[..., tuple[Engine, Record]]) -> None:
    engine, record = build()
    pieces: list[Any] = []
    request = engine.submit(PROMPT, GREEDY, deliver=pieces.append, final_only=True)
    assert request.result(30).token_ids == engine.complete(PROMPT, GREEDY).token_ids
    assert [piece.completion for piece in pieces] == [request.completion]
    with pytest.raises(InvalidInputError, match="final_only must be True or False, got 'yes'"):
        engine.submit(PROMPT, GREEDY, deliver=pieces.append, final_only="yes")  # type: ignore[arg-type]
    assert any(len(gained.records) > 1 for gained in record)


def test_whoever_calls_is_heard_before_the_next_pass(build: Callable[..., tuple[Engine, Record]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, record = build(speculation=False)
    step, begun = engine.core.step, threading.Event()

    def told(meanwhile: Callable[[], None], interrupt: np.ndarray | None = None) -> Any:
        begun.set()
        if interrupt is not None and not engine._thread._inbox:
            threading.Timer(0.0, lambda: interrupt.fill(1)).start()  # as a call would
            while not interrupt[0]:
                time.sleep(0.001)
        return step(meanwhile, interrupt)

    monkeypatch.setattr(engine.core, "step", told)
    request = engine.submit(PROMPT, GREEDY)
    wait_until(begun.is_set, 10)
    request.cancel()
    wait_until(lambda: request.done, 10)
    assert request.result().finish_reason == "cancelled"
    assert all(len(gained.records) == 1 for gained in record)


def test_logits_that_are_not_numbers_end_their_text_alone(build: Callable[..., tuple[Engine, Record]]) -> None:
    engine, record = build()
    wanted = engine.complete(PROMPT, GREEDY).token_ids
    native, poisoned, calls = engine.runner.native_forward(), list[int](), engine.core.native_steps.run
    assert native is not None
    run, together = native.run, list[bool]()

    @numba.njit
    def spoil(inputs: Any) -> None:
        inputs.greedy[0] = -1  # as for logits that are not numbers

    def poison() -> None:
        run()
        if together[-1] and not poisoned:
            poisoned.append(1)
            spoil(native.inputs)

    def watch(seqs: list[Any], *rest_of: Any) -> NativeResult | None:
        together.append(len(seqs) == 2)
        return calls(seqs, *rest_of)

    engine.core.native_steps.run = watch  # type: ignore[method-assign]
    native.run = poison  # type: ignore[method-assign]
    bad, good = engine.submit(PROMPT[1:], GREEDY), engine.submit(PROMPT, GREEDY)
    with pytest.raises(NgramspecError, match="no finite maximum"):
        bad.result(30)
    assert good.result(30).token_ids == wanted
    assert poisoned
    assert engine.complete(PROMPT, GREEDY).token_ids == wanted
    assert record


def test_steps_are_told_one_by_one() -> None:
    now = [0.0]
    cost = tiny.FreeRows()
    timing, seen = StepTimer(cost, clock=lambda: now[0]), list[tuple[Load, float]]()
    cost.observe = lambda load, ms: seen.append((load, ms))  # type: ignore[method-assign]
    timing.start_step()
    now[0] += 0.0001
    records = np.zeros(3, STEP_RECORD)
    records["step_ms"], records["n_rows"], records["n_nodes"], records["n_new"] = (0.4, 0.5, 0.6), (4, 2, 2), (2, 0, 0), (3, 2, 2)
    now[0] += 0.0015
    timing.record_steps(records, 2, 2, speculates=True)
    now[0] += 0.0002
    timing.finish_step()
    timing.flush()
    assert [load.rows for load, _ in seen] == [4, 2, 2]
    assert [ms for _, ms in seen] == pytest.approx([0.5, 0.5, 0.8]), "what lies before the first is its, what follows the last one is its"

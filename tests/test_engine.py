"""The engine's faces and the ends of a text: limits, stops, cancellation, errors, threads. A tiny random model writes; an oracle drafts."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_gguf
import torch
from scipy.stats import chisquare
from test_exact import Oracle, prompts

from ngramspec.engine import sequence
from ngramspec.engine.generation import Stream
from ngramspec.engine.llm_engine import Engine
from ngramspec.engine.observers import Accepted, Observers
from ngramspec.errors import CallbackError, EngineClosedError, InvalidInputError, ModelNotFoundError, PromptTooLongError, TokenizerError
from ngramspec.outputs import Delta
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative.budget.cost_model import Load
from ngramspec.speculative.drafter import Candidates

LONG = SamplingParams(max_tokens=60, ignore_eos=True)


class Perfect(Oracle):
    """Drafts nothing but the truth, eight tokens deep."""

    def _tree(self, seq):  # type: ignore[no-untyped-def]
        text = self.text[seq]
        rest = next((t[len(text) :] for t in self.truth if t[: len(text)] == text), [])[:8]
        n = len(rest)
        return Candidates(np.array(rest, np.int32), np.arange(-1, n - 1, dtype=np.int32), np.full(n, 0.99, np.float32))


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Engine, Perfect]]:
    oracle = Perfect()
    with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_seqs=4, max_model_len=120, drafters=[oracle]) as engine:
        engine.core.cost = tiny.FreeRows()
        yield engine, oracle
        assert engine.runner.pool.n_available == engine.runner.pool.n_blocks


PROMPT = prompts(1)[0]


@pytest.fixture(scope="module")
def truth(rig: tuple[Engine, Perfect]) -> list[int]:
    engine, oracle = rig
    tokens = engine.complete(PROMPT, LONG, speculation=False).token_ids
    oracle.truth = [PROMPT + tokens]
    return tokens


def test_acceptance_of_a_perfect_drafter(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    got = rig[0].complete(PROMPT, LONG)
    assert got.token_ids == truth
    assert got.stats.tokens == 60
    assert got.stats.accepted_by_source["oracle"] > 30
    assert got.stats.passes < 20
    assert sum(s is not None for s in got.draft_sources) == got.stats.accepted
    assert sum(got.stats.accepted_by_depth) == got.stats.accepted
    assert sum(got.stats.drafted_by_depth) == got.stats.drafted == sum(got.stats.drafted_by_source.values())
    assert got.stats.expected_by_source.keys() == got.stats.drafted_by_source.keys()
    assert all(0 < n <= got.stats.drafted_by_source[source] for source, n in got.stats.expected_by_source.items())


@pytest.mark.parametrize("n", [1, 2, 5, 9, 10, 33])
def test_max_tokens_inside_a_draft(rig: tuple[Engine, Perfect], truth: list[int], n: int) -> None:
    got = rig[0].complete(PROMPT, SamplingParams(max_tokens=n, ignore_eos=True))
    assert got.token_ids == truth[:n]
    assert got.finish_reason == "length"


def test_max_model_len_inside_a_draft(rig: tuple[Engine, Perfect]) -> None:
    engine, oracle = rig
    long = SamplingParams(max_tokens=500, ignore_eos=True)
    off = engine.complete(PROMPT, long, speculation=False)
    oracle.truth = [PROMPT + off.token_ids]
    on = engine.complete(PROMPT, long)
    assert on.token_ids == off.token_ids
    assert len(PROMPT) + len(on.token_ids) == 120
    assert on.finish_reason == "length"


@pytest.mark.parametrize("at", [0, 1, 3, 7, 8, 20])
def test_stop_token_inside_a_draft(rig: tuple[Engine, Perfect], truth: list[int], at: int) -> None:
    first = truth.index(truth[at])
    got = rig[0].complete(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=(truth[at],)))
    assert got.token_ids == truth[: first + 1]
    assert got.finish_reason == "stop"
    later = rig[0].complete(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, stop_token_ids=(truth[at],), min_tokens=first + 1))
    assert later.token_ids[:first] == truth[:first]
    assert later.token_ids[first] != truth[at] or first == 0


def test_stop_string_inside_a_draft(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    engine, _ = rig
    whole = engine.complete(PROMPT, LONG).text
    for a, b in ((3, 5), (10, 14), (20, 21)):
        stop = whole[a:b]
        off = engine.complete(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, stop=stop), speculation=False)
        on = engine.complete(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, stop=stop))
        assert on.text == off.text == whole[: whole.index(stop)]
        assert on.token_ids == off.token_ids
        assert on.finish_reason == "stop"


def test_stream_adds_up(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    pieces = list(rig[0].stream(PROMPT, LONG))
    last = pieces[-1].completion
    assert last is not None
    assert [t for p in pieces for t in p.token_ids] == truth == last.token_ids
    assert "".join(p.text for p in pieces) == last.text
    assert max(len(p.token_ids) for p in pieces) > 4
    assert all(p.completion is None for p in pieces[:-1])


def test_every_token_has_its_text_and_log_probability(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    engine, _ = rig
    whole = engine.complete(PROMPT, LONG).text
    for params in (
        SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0, stop=(whole[20:22], "nothing of it")),
        SamplingParams(max_tokens=60, stop_token_ids=(truth[30],), logprobs=1),
    ):
        pieces = list(engine.stream(PROMPT, params))
        done = pieces[-1].completion
        assert done is not None
        for piece in pieces:
            assert len(piece.texts) == len(piece.token_ids) == len(piece.draft_sources)
            assert "".join(piece.texts) == piece.text
            assert piece.logprobs is not None
            assert [p.token_id for p in piece.logprobs] == piece.token_ids
        assert [t for piece in pieces for t in piece.texts] == done.choices[0].texts
        assert "".join(done.choices[0].texts) == done.text
        assert len(done.choices[0].texts) == len(done.token_ids)
        assert [p for piece in pieces for p in piece.logprobs or ()] == done.choices[0].logprobs
    assert all(piece.logprobs is None for piece in engine.stream(PROMPT, LONG))


def test_the_text_of_a_cancelled_choice_adds_up(rig: tuple[Engine, Perfect]) -> None:
    engine, _ = rig
    whole = engine.complete(PROMPT, LONG).text
    held_back = whole[:40] + "\0"  # may be the beginning of a stop string, for long
    done = threading.Event()
    pieces: list[Delta | Exception] = []

    def deliver(piece: Delta | Exception) -> None:
        pieces.append(piece)
        if len(pieces) == 2:
            request.cancel()
        if isinstance(piece, Exception) or piece.completion is not None:
            done.set()

    request = engine.submit(PROMPT, SamplingParams(max_tokens=80, ignore_eos=True, stop=held_back), deliver=deliver, speculation=False)
    assert done.wait(60)
    got = request.result(60)
    assert got.finish_reason == "cancelled"
    assert got.text == "".join(got.choices[0].texts) == "".join(p.text for p in pieces if isinstance(p, Delta))


def test_statistics_of_drafts(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    stats = rig[0].complete(PROMPT, LONG).stats
    assert 0 < stats.drafts <= stats.passes
    assert sum(stats.accepted_lengths) == stats.drafts
    assert sum(k * n for k, n in enumerate(stats.accepted_lengths)) == stats.accepted
    assert len(stats.accepted_lengths) - 1 == len(stats.accepted_by_depth)
    twice = rig[0].complete(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True, n=2)).stats
    assert twice.drafts == sum(twice.accepted_lengths)
    assert rig[0].complete(PROMPT, LONG, speculation=False).stats.drafts == 0


def test_times_of_a_request(rig: tuple[Engine, Perfect]) -> None:
    submitted = threading.Event()
    first = rig[0].submit(PROMPT, LONG, speculation=False, deliver=lambda _: submitted.wait(60))  # holds the engine until all are there
    requests = [first, *(rig[0].submit(PROMPT, LONG, speculation=False) for _ in range(5))]  # there are four places
    submitted.set()
    done = [request.result(60) for request in requests]
    assert all(0 < c.queued_s < c.ttft_s < c.duration_s for c in done)
    assert done[5].queued_s > done[0].ttft_s


def test_n_choices_and_their_stream(rig: tuple[Engine, Perfect]) -> None:
    params = SamplingParams(max_tokens=12, n=6, temperature=1.0, seed=3, ignore_eos=True)
    whole = rig[0].complete(PROMPT, params)
    texts: dict[int, list[int]] = {i: [] for i in range(6)}
    for piece in rig[0].stream(PROMPT, params):
        texts[piece.index] += piece.token_ids
    assert [c.token_ids for c in whole.choices] == [texts[i] for i in range(6)]
    assert whole.stats.tokens == 72


def test_cancel_frees_blocks_at_once(rig: tuple[Engine, Perfect]) -> None:
    engine, _ = rig
    pool = engine.runner.pool
    stream = engine.stream(PROMPT, SamplingParams(max_tokens=80, ignore_eos=True, n=3, temperature=1.0))
    next(stream)
    stream.close()
    engine.complete(PROMPT, SamplingParams(max_tokens=1))  # a later message: the cancellation has been handled
    assert pool.n_available == pool.n_blocks
    request = engine.submit(PROMPT, SamplingParams(max_tokens=80, ignore_eos=True))
    request.cancel()
    request.cancel()
    got = request.result(timeout=30)
    assert got.finish_reason == "cancelled"
    request.cancel()


def test_more_requests_than_slots(rig: tuple[Engine, Perfect]) -> None:
    asked = prompts(11, seed=9)
    params = SamplingParams(max_tokens=15, ignore_eos=True)
    together = rig[0].complete(asked, params)
    assert [c.token_ids for c in together] == [rig[0].complete(p, params).token_ids for p in asked]


def test_from_many_threads(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(rig[0].complete(PROMPT, LONG).token_ids)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [truth] * 6


def test_async_faces(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    engine, _ = rig

    async def main() -> None:
        one, many = await asyncio.gather(engine.acomplete(PROMPT, LONG), engine.acomplete([PROMPT, PROMPT], LONG))
        assert one.token_ids == truth  # type: ignore[union-attr]
        assert [c.token_ids for c in many] == [truth, truth]  # type: ignore[union-attr]
        async for piece in engine.astream(PROMPT, LONG):
            assert piece.token_ids == truth[: len(piece.token_ids)]
            break
        task = asyncio.create_task(engine.acomplete(PROMPT, SamplingParams(max_tokens=90, ignore_eos=True, n=4, temperature=1.0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    engine.complete(PROMPT, SamplingParams(max_tokens=1))
    assert engine.runner.pool.n_available == engine.runner.pool.n_blocks


def test_text_prompts_and_bad_ones(rig: tuple[Engine, Perfect]) -> None:
    engine, _ = rig
    assert engine.complete("hello", SamplingParams(max_tokens=3)).prompt_token_ids == list(engine.tokenizer("hello")["input_ids"])
    with pytest.raises(ValueError, match="empty"):
        engine.complete([])
    with pytest.raises(ValueError, match="0 to 255, got 256"):
        engine.complete([1, 256])
    with pytest.raises(ValueError, match="flat list"):
        engine.complete([[1.5, 2.0]])
    with pytest.raises(PromptTooLongError, match="120 tokens"):
        engine.complete([1] * 120)


def test_text_that_looks_like_control_tokens(rig: tuple[Engine, Perfect]) -> None:
    engine, _ = rig
    assert engine.encode_text("a<eos>") == list(b"a<eos>")
    assert engine.encode("a<eos>").tolist() == [97, tiny.EOS]
    assert engine.encode_text("") == []
    assert engine.encode_text("é\n") == list("é\n".encode())
    assert engine.tokenizer("a<eos>")["input_ids"] == [97, tiny.EOS], "the model's own is as it was"


@pytest.mark.parametrize(
    "settings",
    [
        {"device": "tpu"},
        {"dtype": "int3"},
        {"threads": 0},
        {"threads": 10**6},
        {"linears": "vendor"},
        {"spec_rows": 0},
        {"max_seqs": 0},
        {"max_model_len": 1},
        {"max_model_len": 10**9},
    ],
)
def test_settings_out_of_range(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        Engine(tiny.tiny_model("llama"), **settings)  # type: ignore[arg-type]


def test_a_request_that_fails_ends_alone(rig: tuple[Engine, Perfect], truth: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = rig
    extend = sequence.Sequence.extend

    def poisoned(self: sequence.Sequence, run: np.ndarray, *scores: Any) -> int:
        if self.n_prompt == 3:
            raise RuntimeError("poisoned")
        return extend(self, run, *scores)

    monkeypatch.setattr(sequence.Sequence, "extend", poisoned)
    good, bad = engine.submit(PROMPT, LONG), engine.submit([1, 2, 3], LONG)
    with pytest.raises(RuntimeError, match="poisoned"):
        bad.result(timeout=60)
    assert good.result(timeout=60).token_ids == truth


def test_a_receiver_that_fails_hurts_its_own_request_only(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    engine, _ = rig
    pieces: list[object] = []

    def deliver(piece: object) -> None:
        pieces.append(piece)
        raise RuntimeError("the receiver is gone")

    bad = engine.submit(PROMPT, LONG, deliver=deliver, speculation=False)
    good = engine.submit(PROMPT, LONG)
    assert bad.result(timeout=60).finish_reason == "cancelled"
    assert len(pieces) == 1
    assert good.result(timeout=60).token_ids == truth


def test_closing() -> None:
    engine = Engine(tiny.tiny_model("llama"), max_seqs=2)
    running, *_ = [engine.submit([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True)) for _ in range(4)]
    engine.close()
    engine.close()
    status = engine.status()
    assert (status.running, status.waiting, status.kv_used) == (0, 0, 0)
    with pytest.raises(EngineClosedError):
        running.result(timeout=30)
    with pytest.raises(EngineClosedError):
        engine.complete([1, 2, 3])
    assert engine.status().waiting == 0


def test_a_closed_engine_leaves_no_memory() -> None:
    gc.collect()
    gc.disable()  # which would look for objects that refer to each other
    try:
        with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_model_len=120) as engine:
            assert engine.complete(PROMPT, LONG).token_ids
        runner = weakref.ref(engine.runner)
        assert engine.status().passes
        del engine
        assert runner() is None
    finally:
        gc.enable()


def test_an_engine_that_nobody_refers_to_ends_when_its_requests_have() -> None:
    def find_threads() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name in ("ngramspec-engine", "ngramspec-pass")}

    before = find_threads()
    engine = Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_model_len=120)
    expected = engine.complete(PROMPT, LONG).token_ids
    assert engine.tokenize("a", parse_special=False)
    assert engine.beam_search(PROMPT, 2, max_tokens=2)
    gc.disable()  # which would find objects that refer to each other
    seen, runner = weakref.ref(engine), weakref.ref(engine.runner)
    future, stream = engine.submit(PROMPT, LONG), engine.stream(PROMPT, LONG)
    del engine
    gone = seen() is None
    gc.enable()
    assert gone
    assert [token for delta in stream for token in delta.token_ids] == future.result().token_ids == expected
    del stream, future
    until = time.monotonic() + 20
    while (runner() is not None or find_threads() - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not find_threads() - before
    assert runner() is None, "the model's memory is kept"


def test_no_tokenizer() -> None:
    with Engine(tiny.tiny_model("llama"), max_seqs=2) as engine:
        got = engine.complete([1, 2, 3], SamplingParams(max_tokens=4, logprobs=2))
        assert got.text == ""
        assert got.choices[0].logprobs is not None
        assert [p.token_id for p in got.choices[0].logprobs] == got.token_ids
        with pytest.raises(TokenizerError):
            engine.complete("text")
        with pytest.raises(TokenizerError):
            engine.encode_text("text")
        with pytest.raises(TokenizerError):
            engine.add_datastore("name", "store")


def test_a_drafter_that_raises_hurts_nobody() -> None:
    class Broken(Oracle):
        def propose(self, seqs, budget):  # type: ignore[no-untyped-def]
            raise RuntimeError("broken drafter")

    with Engine(tiny.tiny_model("llama"), max_seqs=2, drafters=[Broken()]) as engine:
        on = engine.complete(PROMPT, LONG)
        assert on.token_ids == engine.complete(PROMPT, LONG, speculation=False).token_ids


def test_sampled_output_is_distributed_as_the_models_own() -> None:
    """2,000 samples of two tokens with speculation, against the exact distribution: chi-square at the 0.1 % level."""
    model = tiny.tiny_model("llama", std=0.2)
    prompt = [3, 1, 4, 1, 5]
    with torch.inference_mode():
        first = torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1].double() / 0.5, -1)
        seconds = torch.softmax(model(input_ids=torch.tensor([[*prompt, t] for t in range(256)])).logits[:, -1].double() / 0.5, -1)
    joint = (first[:, None] * seconds).flatten().numpy()
    oracle = Perfect()
    top = int(first.argmax())
    oracle.truth = [[*prompt, top, int(seconds[top].argmax()), 0, 0]]
    with Engine(model, max_seqs=64, drafters=[oracle]) as engine:
        engine.core.cost = tiny.FreeRows()
        done = [engine.complete(prompt, SamplingParams(max_tokens=3, n=125, seed=s, temperature=0.5, ignore_eos=True)) for s in range(16)]
    got = [choice.token_ids[:2] for completion in done for choice in completion.choices]
    assert sum(completion.stats.accepted for completion in done) > 100
    counts = np.bincount([a * 256 + b for a, b in got], minlength=65536)
    likely = np.flatnonzero(joint * len(got) >= 8)
    observed = np.append(counts[likely], len(got) - counts[likely].sum())
    expected = np.append(joint[likely], 1 - joint[likely].sum()) * len(got)
    assert len(likely) >= 8
    assert chisquare(observed, expected).pvalue > 0.001


# ------------------------------------------------------------------ what is no prompt, no hint, or no place to call from


@pytest.mark.parametrize("prompt", [None, {}, {"a": 1}, 5, 1.5, b"bytes", {1, 2}, [None], [1.5], [[[1]]], "\ud800", "a\udcff"])
def test_what_is_no_prompt_is_a_typed_error(rig: tuple[Engine, Perfect], prompt: Any) -> None:
    with pytest.raises(InvalidInputError, match="prompt"):
        rig[0].complete(prompt)


@pytest.mark.parametrize("hints", [{"tenant": 5}, {"datastores": "all"}, {"datastores": 5}, {"speculation": None}, {"prefix_cache": 1}])
def test_what_is_no_hint_is_a_typed_error(rig: tuple[Engine, Perfect], hints: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(hints))):
        rig[0].complete(PROMPT, **hints)


def test_params_of_another_kind_are_a_typed_error(rig: tuple[Engine, Perfect]) -> None:
    with pytest.raises(InvalidInputError, match="SamplingParams"):
        rig[0].complete(PROMPT, {"max_tokens": 5})  # type: ignore[call-overload]


@pytest.mark.parametrize("model", [None, 5, b"m.gguf", ["m.gguf"]])
def test_what_is_no_model_is_a_typed_error(model: Any) -> None:
    with pytest.raises(InvalidInputError, match="model must be"):
        Engine(model)


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_no_model(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # pathlib takes an empty path for the working folder, here one with a model
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="must not be empty"):
        Engine(name)


@pytest.mark.parametrize(
    "given",
    [
        {"datastore": 5},
        {"datastore": [5]},
        {"drafters": ["lookahead"]},
        {"alone": "lookahead"},
        {"tokenizer": 5},
        {"tokenizer": "lookahead"},
    ],
)
def test_what_is_no_part_of_an_engine_is_a_typed_error(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"must be .*, got (5|'lookahead')"):
        Engine("no-model", **given)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_neither_copied_nor_pickled(rig: tuple[Engine, Perfect], duplicate: Callable[[Engine], object]) -> None:
    with pytest.raises(TypeError, match="make one in each process"):
        duplicate(rig[0])


def test_a_text_is_no_list_of_token_ids(rig: tuple[Engine, Perfect]) -> None:
    with pytest.raises(InvalidInputError, match="token ids, got 'text'"):
        rig[0].detokenize("text")  # type: ignore[arg-type]


def test_threads_that_share_a_stream_all_end(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    stream = rig[0].stream(PROMPT, LONG, speculation=False)
    got: list[Delta] = []
    threads = [threading.Thread(target=lambda: got.extend(stream), daemon=True) for _ in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert not any(each.is_alive() for each in threads)
    assert sorted(token for delta in got for token in delta.token_ids) == sorted(truth)


def _idle(engine: Engine) -> bool:
    deadline = time.monotonic() + 30
    while engine.status().running or engine.status().waiting:
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.005)
    return engine.runner.pool.n_available == engine.runner.pool.n_blocks


@pytest.mark.parametrize("end", [lambda stream: stream.close(), lambda stream: None], ids=["closed", "dropped"])
def test_a_stream_that_ends_before_its_first_piece_cancels(end: Callable[[Stream], None]) -> None:
    with Engine(tiny.tiny_model("llama"), max_seqs=2, max_model_len=120) as engine:
        engine.core.cost = SlowRows()
        stream = engine.stream(PROMPT, LONG)
        request = stream._request
        end(stream)
        del stream
        assert request.result(timeout=30).finish_reason == "cancelled"
        assert _idle(engine)


@pytest.mark.parametrize("close", [True, False])
def test_an_asynchronous_stream_that_ends_before_its_first_piece_cancels(close: bool) -> None:
    with Engine(tiny.tiny_model("llama"), max_seqs=2, max_model_len=120) as engine:
        engine.core.cost = SlowRows()

        async def leave() -> None:
            stream = engine.astream(PROMPT, LONG)
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            if close:
                await stream.aclose()  # type: ignore[attr-defined]
            del stream
            await asyncio.sleep(0)

        asyncio.run(leave())
        assert _idle(engine)


class SlowRows(tiny.FreeRows):
    """Makes a pass take its time: what is dropped at once has not been written by then."""

    def observe(self, rows: int, ms: float) -> None:
        time.sleep(0.02)


def test_a_callback_that_calls_the_engine_is_refused(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    engine, _ = rig
    caught: list[Exception] = []

    def deliver(piece: object) -> None:
        if caught:
            return
        for call in (
            lambda: engine.complete(PROMPT),
            lambda: engine.submit(PROMPT),
            lambda: engine.stream(PROMPT),
            lambda: engine.beam_search(PROMPT, 2),
            lambda: engine.remove_datastore("none"),
            lambda: request.result(),
        ):
            try:
                call()
            except Exception as error:
                caught.append(error)
        engine.status(), engine.props()

    gate = threading.Event()
    request = engine.submit(PROMPT, LONG, deliver=lambda piece: (gate.wait(30), deliver(piece)))
    gate.set()
    assert request.result(timeout=60).token_ids == truth
    assert [type(error) for error in caught] == [CallbackError] * 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_an_engine_used_after_a_fork_says_so() -> None:
    with Engine(tiny.tiny_model("llama"), max_seqs=2, max_model_len=120) as engine:
        running, stream = engine.submit(PROMPT, LONG), engine.stream(PROMPT, LONG)
        read, write = os.pipe()
        child = os.fork()
        if not child:  # whatever happens here, nothing but this is left of it
            told = []
            calls = (
                lambda: engine.complete(PROMPT),
                lambda: engine.beam_search(PROMPT, 2),
                lambda: running.result(),
                lambda: next(stream),
                lambda: engine.finish_compiling(print),
                engine.close,
            )
            for call in calls:
                try:
                    call()
                    told.append("nothing")
                except Exception as error:
                    told.append(f"{type(error).__name__} {'fork' in str(error)}")
            os.write(write, "\n".join([*told, str(engine.closed)]).encode())
            os._exit(0)
        os.close(write)
        ready, _, _ = select.select([read], [], [], 60)
        told = os.read(read, 4096).decode().splitlines() if ready else ["it hangs"]
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        assert told == ["EngineClosedError True"] * 5 + ["nothing", "True"]
        assert len(running.result(timeout=60).token_ids) == 60


def test_an_engine_used_while_python_ends_says_so(tmp_path: Path) -> None:
    code = """
import queue, sys
from ngramspec import Engine

class Host:
    def __init__(self):
        self.engine = Engine(sys.argv[1], max_seqs=2, max_model_len=120)
        self.request = self.engine.submit([1, 2, 3], max_tokens=100, ignore_eos=True, deliver=queue.Queue(1).put)  # blocks

    def __del__(self, print=print):
        for call in (lambda: self.engine.complete([1, 2]), self.request.result, self.engine.close):
            try:
                call()
                print("nothing", flush=True)
            except Exception as error:
                print(type(error).__name__, flush=True)

host = Host()
"""
    path = tiny_gguf.write_started(tmp_path / "m.gguf")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["EngineClosedError", "EngineClosedError", "nothing"], done.stderr


def test_an_error_of_one_prompt_ends_those_beside_it_for_asyncio(rig: tuple[Engine, Perfect]) -> None:
    engine, _ = rig

    async def ask() -> None:
        with pytest.raises(InvalidInputError):
            await engine.acomplete([PROMPT, []], LONG)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert all(task.cancelling() for task in others)

    asyncio.run(ask())


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this system sends no signals to threads")
def test_an_engine_whose_making_is_interrupted_frees_its_model() -> None:
    caught = threading.Event()
    threads: list[threading.Thread] = []

    def interrupt(stage: str) -> None:
        threads.append(threading.current_thread())
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert caught.wait(30)

    with pytest.raises(KeyboardInterrupt):
        Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_model_len=120, progress=interrupt)
    caught.set()
    threads[0].join(30)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("in_commit", [False, True])
def test_a_failure_ends_the_samples_beside_it_and_no_other_request(
    truth: list[int], monkeypatch: pytest.MonkeyPatch, in_commit: bool
) -> None:
    """The samples of a request fail together, in the middle of the step that carries them all and others."""

    def check(seq: sequence.Sequence) -> None:
        if seq.n_prompt == 3 and seq.choice.index == 1 and seq.n_output >= 4:
            raise RuntimeError("poisoned")

    def poison(take: Callable[..., Any]) -> Callable[..., Any]:
        def poisoned(self: sequence.Sequence, *given: Any) -> Any:
            check(self)
            return take(self, *given)

        return poisoned

    def record_poisoned(self: Observers, accepted: Accepted, *given: Any, **states: bool) -> None:
        check(accepted.seq)

    with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), max_seqs=5, max_model_len=120) as engine:
        if in_commit:  # after tokens were appended to all
            monkeypatch.setattr(Observers, "record_sequence", record_poisoned)
            monkeypatch.setattr(engine.core.native_steps, "run", lambda *_: None)
        else:
            for name in ("extend", "append_native"):  # of single steps, and of native ones
                monkeypatch.setattr(sequence.Sequence, name, poison(getattr(sequence.Sequence, name)))
        for _ in range(3):
            bad = engine.submit([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True, n=4, temperature=1.0, seed=1))
            good = engine.submit(PROMPT, LONG)
            with pytest.raises(RuntimeError, match="poisoned"):
                bad.result(timeout=60)
            assert good.result(timeout=60).token_ids == truth
        assert _idle(engine)
        engine.runner.pool.check_integrity()


def test_the_cost_of_a_step_is_all_of_its_time_and_none_of_the_idleness_behind_it(rig: tuple[Engine, Perfect], truth: list[int]) -> None:
    engine, _ = rig
    seen, five = list[float](), SamplingParams(max_tokens=5, ignore_eos=True)

    class Watched(tiny.FreeRows):
        def observe(self, load: Load, ms: float) -> None:
            seen.append(ms)

    core, step = engine.core, engine.core.step
    engine.use(cost=Watched())
    try:
        for _ in range(
            5
        ):  # again only if the machine was busy, when stalls are left out: idleness is in the times of each round, or of none
            seen.clear()
            for _ in range(2):
                assert engine.complete(PROMPT, five, speculation=False, prefix_cache=False).token_ids == truth[:5]
                time.sleep(0.3)
            if len(seen) == 8 and max(seen) < 200:
                break
        assert len(seen) == 8
        assert max(seen) < 200
        core.step = lambda meanwhile, _: step(lambda: (time.sleep(0.2), meanwhile()))  # type: ignore[method-assign, assignment, misc, return-value]
        engine.complete(PROMPT, five, speculation=False, prefix_cache=False)
        assert min(seen[8:]) >= 200
    finally:
        vars(core).pop("step", None)
        engine.use(cost=tiny.FreeRows())

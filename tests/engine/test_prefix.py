"""The prefix cache through the engine: what earlier requests computed spares later ones, and changes no token. Logits of a prompt's own
rows, whatever was cut or cached. Tiny random models, of which one attends to a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny
from test_exact import GREEDY, PENALISED, SAMPLED, Oracle, tight_pool

from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import BLOCK, Completion
from ngramspec.sampling_params import SamplingParams

WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}
# How tokens are picked and how a family keeps its states do not interact: Llama in every way, the others in turns.
CASES = [pytest.param("llama", WAYS[way], id=f"llama-{way}") for way in WAYS] + [
    pytest.param(arch, WAYS[way], id=f"{arch}-{way}")
    for arch, way in zip(["mistral", "qwen3_5_text", "lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1"], [*WAYS] * 2, strict=False)
]
rng = np.random.default_rng(7)


def text(n: int) -> list[int]:
    return rng.integers(0, 250, n).tolist()


def build(arch: str = "llama", **options: Any) -> Engine:
    engine = Engine(tiny.tiny_model(arch), tokenizer=tiny.byte_tokenizer(), **({"max_seqs": 8, "max_model_len": 200} | options))
    engine.core.cost = tiny.FreeRows()
    return engine


def full(n_tokens: int) -> int:
    """Tokens that the cache can spare of a text that it has as a whole where layers keep a state: whole blocks before the last token."""
    return (n_tokens - 1) // BLOCK * BLOCK


def all_free(engine: Engine) -> None:
    engine.runner.pool.check_integrity()
    assert engine.runner.pool.n_available == engine.runner.pool.n_blocks


@pytest.fixture(scope="module")
def trio(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine, Engine, Oracle]]:
    """Without cache and speculation; with both; with both and a pool in which two sequences have room. Drafts are right and wrong."""
    oracle = Oracle()
    plain = build(request.param, speculation=False, prefix_cache=False)
    roomy = build(request.param, drafters=[oracle], max_rows=40)
    tight = build(request.param, drafters=[oracle], max_rows=23, kv_memory=tight_pool(request.param))
    yield plain, roomy, tight, oracle
    for engine in (plain, roomy, tight):
        all_free(engine)
        engine.close()


@pytest.mark.parametrize(("trio", "params"), CASES, indirect=["trio"])
def test_same_tokens_with_and_without(trio: tuple[Engine, Engine, Engine, Oracle], params: SamplingParams) -> None:
    plain, roomy, tight, oracle = trio
    system, other = text(75), text(40)
    asked = [system + text(5), system + text(30), system[:64], other, other + text(33), system + text(5)]
    expected = [plain.complete(p, params).token_ids for p in asked]
    oracle.truth = [p + t for p, t in zip(asked, expected, strict=True)]
    turns = [p + t + text(9) for p, t in zip(asked, expected, strict=True)]  # what was written is the next prompt's beginning
    answers = [plain.complete(p, params).token_ids for p in turns]
    oracle.truth += [p + t for p, t in zip(turns, answers, strict=True)]
    assert roomy.exactness == "bitwise"
    for engine in (roomy, tight):
        sought = engine.status()
        alone = [engine.complete(p, params) for p in asked]
        later = [engine.complete(p, params) for p in turns]
        together = engine.complete(asked + turns, params)
        slowly = engine.complete(asked + turns, params, speculation=False)
        assert [c.token_ids for c in alone] == expected
        assert [c.token_ids for c in later] == answers
        assert [c.token_ids for c in together] == [c.token_ids for c in slowly] == expected + answers
        status = engine.status()
        assert 0 < status.prefix_hits - sought.prefix_hits < status.prefix_queries - sought.prefix_queries
        assert sum(c.stats.accepted for c in alone + together) > 0
        all_free(engine)
        if engine is roomy:
            if engine.runner.is_recurrent:  # of what was written, no states are kept
                assert [c.cached_tokens for c in alone] == [0, 64, 32, 0, 32, 64]
                assert all(c.cached_tokens >= full(len(p)) for c, p in zip(later, asked, strict=True))
                continue
            assert [c.cached_tokens for c in alone] == [0, 75, 63, 0, 40, 75]
            assert [c.cached_tokens for c in later] == [len(p) + len(t) - 1 for p, t in zip(asked, expected, strict=True)]
            assert [c.cached_tokens for c in together] == [len(p) - 1 for p in asked + turns], "the last token is computed"
        else:
            assert status.preemptions > sought.preemptions
            assert status.prefix_hits - status.cached_tokens > sought.prefix_hits - sought.cached_tokens, "those that come back profit"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with build() as engine:
        yield engine
        all_free(engine)


SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def cached(engine: Engine, prompt: list[int], **hints: Any) -> int:
    return engine.complete(prompt, SHORT, **hints).cached_tokens


def test_tenants_do_not_share_and_none_keeps_to_itself(engine: Engine) -> None:
    prompt = text(100)
    assert cached(engine, prompt, tenant="a") == 0
    assert cached(engine, prompt, tenant="b") == 0
    before = engine.status()
    assert cached(engine, prompt, tenant=None) == 0
    assert cached(engine, prompt, tenant="a", prefix_cache=False) == 0
    assert engine.status().prefix_queries == before.prefix_queries
    assert engine.status().kv_cached == before.kv_cached, "nor is anything of theirs kept"
    assert cached(engine, prompt, tenant="a") == cached(engine, prompt, tenant="b") == 99
    with build(prefix_cache=False) as without:
        assert cached(without, prompt) == cached(without, prompt) == 0
        assert without.status().kv_cached == 0
        assert without.props()["prefix_cache"] is False


def test_a_keystroke_later(engine: Engine) -> None:
    line = text(80)
    for n in range(60, 80):
        assert cached(engine, line[:n]) == (0 if n == 60 else n - 1)
    for changed in (31, 32, 33, 70):
        edited = [*line[:changed], 255, *line[changed + 1 :]]
        alone = engine.complete(edited, SHORT, prefix_cache=False)
        after = engine.complete(edited, SHORT)
        assert (after.cached_tokens, after.token_ids) == (changed, alone.token_ids)


@pytest.mark.parametrize("stop", [["never"], []], ids=["python", "native"])
def test_the_pass_that_ends_a_known_prompt_is_a_prompts(engine: Engine, monkeypatch: pytest.MonkeyPatch, stop: list[str]) -> None:
    """It has one row, as a pass that decodes, and its step contains the beginning of drafting."""
    prompt, timing, loads = text(50), engine.core.timing, list[tuple[bool, int]]()
    params = SamplingParams(max_tokens=3, ignore_eos=True, stop=stop)  # with a stop string each step is made in Python
    engine.complete(prompt, params)
    set_load = timing.set_load

    def watch_load(rows: int, **load: Any) -> None:
        loads.append((load["has_prompt"], load.get("n_beside", 0)))
        set_load(rows, **load)

    monkeypatch.setattr(timing, "set_load", watch_load)
    assert engine.complete(prompt, params).cached_tokens == 49
    assert loads == [(True, 0)] + [(False, 0)] * (len(loads) - 1)


def test_a_prefix_is_shared_while_it_is_in_use(engine: Engine) -> None:
    prompt, tables = text(130), list[np.ndarray]()
    long = SamplingParams(max_tokens=60, ignore_eos=True, n=3, temperature=1.0, seed=1)

    def look(_: Any) -> None:
        if len(running := engine.core.scheduler.running) == 4:
            tables.append(engine.runner.pool.tables[[seq.slot for seq in running], : 128 // BLOCK])

    several, other = engine.submit(prompt, long, deliver=look), engine.submit(prompt, SHORT)  # at once: it waits for what they compute
    assert other.result(30).cached_tokens == full(131) == 128
    done = several.result(30)
    assert tables, "four sequences run together"
    assert all((table == table[0]).all() for table in tables), "they hold the prompt's blocks together"
    again = engine.complete(prompt, long, prefix_cache=False)
    assert [c.token_ids for c in done.choices] == [c.token_ids for c in again.choices]


def test_what_a_cancelled_request_computed_is_kept(engine: Engine) -> None:
    prompt = text(120)
    stream = engine.stream(prompt, SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert cached(engine, prompt) == 119
    waiting = engine.submit(prompt, SHORT)
    waiting.cancel()
    assert waiting.result(30).queued_s > 0


def test_status_adds_up() -> None:
    with build(kv_memory=16 * 32 * 1024) as engine:
        start = engine.status()
        assert start.kv_tokens == engine.runner.pool.n_positions
        assert (start.waiting, start.running, start.kv_used, start.kv_cached, start.prefix_queries, start.passes) == (0,) * 6
        prompt = text(70)
        engine.complete(prompt, SHORT)
        engine.complete(prompt, SHORT)
        end = engine.status()
        assert (end.waiting, end.running, end.kv_used, end.kv_cached) == (0, 0, 0, 96)
        assert (end.prefix_queries, end.prefix_hits, end.cached_tokens, end.preemptions) == (140, 69, 69, 0)
        assert end.passes >= 4
        seen = [engine.status() for _ in engine.stream(prompt, SamplingParams(max_tokens=30, n=4, temperature=1.0, ignore_eos=True))]
        assert max(s.running for s in seen) == 4
        assert max(s.kv_used for s in seen) > 64
        assert all(s.kv_used + s.kv_cached <= s.kv_tokens for s in seen)


# ---- the prompt's own log-probabilities


def whole(done: Completion) -> list[Any]:
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    return list(logprobs)


def test_prompt_logprobs_are_those_of_decoding(engine: Engine) -> None:
    prompt = text(40)
    written = engine.complete(prompt, SamplingParams(max_tokens=50, logprobs=3, ignore_eos=True))
    scored = SamplingParams(max_tokens=40, prompt_logprobs=3, logprobs=3, ignore_eos=True)
    both = prompt + written.token_ids
    done = engine.complete(both, scored)
    assert done.prompt_logprobs is not None
    assert done.prompt_logprobs[0] is None
    assert [p.token_id for p in done.prompt_logprobs[1:] if p is not None] == both[1:]
    assert done.prompt_logprobs[len(prompt) :] == whole(written)
    assert done.cached_tokens == 0
    assert cached(engine, both) == 89, "what it computed is kept"
    for options in ({"max_rows": 7}, {"max_rows": 23, "max_seqs": 4, "kv_memory": tight_pool("llama")}, {"speculation": False}):
        with build(**options) as other:
            crowd = other.complete([both, both[:50], both, both[:-3]], scored, tenant=None)  # each in its own blocks
            assert all(c.prompt_logprobs == done.prompt_logprobs[: len(c.prompt_token_ids)] for c in crowd)
            assert whole(crowd[0]) == whole(done)
            assert "kv_memory" not in options or other.status().preemptions > 0
            all_free(other)


def test_prompt_logprobs_of_one_token_and_of_several_choices(engine: Engine) -> None:
    assert engine.complete([5], SamplingParams(max_tokens=2, prompt_logprobs=0)).prompt_logprobs == [None]
    prompt = text(40)
    done = engine.complete(prompt, SamplingParams(max_tokens=2, prompt_logprobs=0, n=3, temperature=1.0))
    assert done.prompt_logprobs is not None
    assert len(done.prompt_logprobs) == 40
    assert [p.top for p in done.prompt_logprobs if p is not None] == [[]] * 39
    assert engine.complete(prompt, SHORT).prompt_logprobs is None
    with pytest.raises(ValueError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=101)

"""Draft models and drafts from the first layers: never a token changes, a drafter that knows the truth is always right, pools stay whole.

The target is a tiny random model; its drafter has the same weights, or nearly the same, so that drafts are right for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from scipy.stats import chi2_contingency
from test_exact import GREEDY, PENALISED, SAMPLED, prompts, tight_pool
from transformers import PreTrainedModel

from ngramspec.backends.base import Output
from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import InvalidInputError, UnsupportedModelError
from ngramspec.grammar.constraint import Grammar
from ngramspec.outputs import Stats
from ngramspec.papers.registry import make_drafter
from ngramspec.sampling.batch import Batch
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative.budget.backoff import DrafterBackoff
from ngramspec.speculative.budget.step_timer import StepTimer
from ngramspec.speculative.single import SingleDrafter
from ngramspec.speculative.trained.draft_layers import DraftLayers
from ngramspec.speculative.trained.draft_model import DraftModel, check_alike
from ngramspec.speculative.trained.stepwise import StepwiseDrafter

PARAMS = (GREEDY, SAMPLED, PENALISED)
PROMPTS = prompts(5)


def near(spoil: float = 0.04, **options: Any) -> PreTrainedModel:
    """The target with noise on its weights."""
    model, noise = tiny.tiny_model("llama", **options), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += spoil * parameter.std() * torch.randn(parameter.shape, generator=noise)
    return model


def build(**options: Any) -> Engine:
    engine = Engine(tiny.tiny_model("llama"), **{"max_seqs": 8, "max_model_len": 150, "prefix_cache": False, "threads": 1} | options)
    engine.core.cost = tiny.FreeRows()
    return engine


def check_empty(engine: Engine, *drafters: StepwiseDrafter) -> None:
    """All is given back, and no drafter was switched off."""
    for pool in [engine.runner.pool, *(d.runner.pool for d in drafters if isinstance(d, DraftModel) and d.runner)]:
        pool.check_integrity()
        assert pool.n_available == pool.n_blocks
    proposer = engine.speculator
    assert list(drafters) == ([proposer.drafter] if isinstance(proposer, SingleDrafter) else proposer.drafters)
    assert not any(drafter._state_of for drafter in drafters)


@pytest.fixture(scope="module")
def truth() -> dict[int, list[list[int]]]:
    with build(speculation=False) as plain:
        return {id(params): [done.token_ids for done in plain.complete(PROMPTS, params)] for params in PARAMS}


@pytest.mark.parametrize("acceptance", ["walk", "rejection"])
@pytest.mark.parametrize("kind", ["model", "layers"])
def test_what_knows_the_truth_is_always_right(
    monkeypatch: pytest.MonkeyPatch, kind: str, acceptance: str, truth: dict[int, list[list[int]]]
) -> None:
    monkeypatch.setattr(StepTimer, "should_probe", lambda _: False)
    drafter = DraftModel(tiny.tiny_model("llama")) if kind == "model" else DraftLayers(2)
    with build(alone=drafter, acceptance=acceptance) as engine:
        for params in PARAMS:
            done = engine.complete(PROMPTS, params)
            stats = Stats.sum(each.stats for each in done)
            assert stats.accepted == stats.drafted == stats.accepted_by_source[kind] > 100
            assert stats.passes == len(PROMPTS) * 8, "one token, six times six, and the rest"
            by_chance = acceptance == "rejection" and params.temperature > 0
            assert {d.exactness for d in done} == {"distribution" if by_chance else engine.exactness}
            assert by_chance or [d.token_ids for d in done] == truth[id(params)]
        check_empty(engine, drafter)


@pytest.mark.parametrize("make", [lambda: DraftModel(near(), branches=2), lambda: DraftLayers(1)], ids=["model", "layers"])
def test_a_pass_that_does_not_fit_into_memory_switches_no_drafter_off(make: Callable[[], StepwiseDrafter]) -> None:
    drafter = make()
    with build(alone=drafter) as engine:
        plain = engine.complete(PROMPTS[0], GREEDY, speculation=False).token_ids
        forward, n_nodes = engine.runner.forward, list[int]()

        def fail_once(batch: Batch) -> Output:
            n_nodes.extend(len(span.tree) for span in batch.spans if span.tree)
            if len(n_nodes) == 2:
                raise torch.OutOfMemoryError("no memory")
            return forward(batch)

        engine.runner.forward = fail_once  # type: ignore[method-assign]
        assert engine.complete(PROMPTS[0], GREEDY).token_ids == plain
        assert len(n_nodes) > 3, "there were drafts after it"
        check_empty(engine, drafter)


@pytest.mark.parametrize(
    ("drafters", "alone"),
    [
        (lambda: [DraftModel(near())], True),
        (lambda: [DraftModel(near(), length=3, branches=3)], True),
        (lambda: [DraftLayers(1, branches=2)], True),
        (lambda: [DraftModel(near(), branches=2), DraftLayers(1)], False),
    ],
    ids=["model", "tree", "layers", "merged"],
)
def test_no_token_changes(monkeypatch: pytest.MonkeyPatch, drafters: Any, alone: bool, truth: dict[int, list[list[int]]]) -> None:
    """In a pool so tight that sequences are preempted, with prompts in odd pieces."""
    monkeypatch.setattr(DrafterBackoff, "should_ask", lambda _: True)  # it drafts in every step, whatever its time
    made = drafters()
    sources: dict[str, Any] = {"alone": made[0]} if alone else {"drafters": made, "recycle": False}
    with build(max_rows=23, kv_memory=tight_pool("llama"), **sources) as engine:
        for params in PARAMS:
            done = engine.complete(PROMPTS, params)
            assert [d.token_ids for d in done] == truth[id(params)]
            stats = Stats.sum(each.stats for each in done)
            assert 0 < stats.accepted < stats.drafted
            assert {drafter.name for drafter in made} <= stats.accepted_by_source.keys()
        assert engine.status().preemptions > 0
        check_empty(engine, *made)


@pytest.mark.parametrize("branches", [1, 3])
def test_drafts_by_rejection_end_and_are_taken(branches: int) -> None:
    drafter = DraftModel(near(), branches=branches)
    with build(alone=drafter, acceptance="rejection") as engine:
        for params in (SAMPLED, PENALISED):
            done = engine.complete(PROMPTS, params)
            assert [len(d.token_ids) for d in done] == [40] * len(PROMPTS)
            assert {d.exactness for d in done} == {"distribution"}
            stats = Stats.sum(each.stats for each in done)
            assert 0.3 * branches < stats.accepted / stats.drafts
            assert all(banned not in d.token_ids for d in done for banned in (9,) if params is PENALISED)
        check_empty(engine, drafter)


def test_sampled_text_by_rejection_is_distributed_as_without_drafts() -> None:
    """Chi-square over the two first drafted tokens of 1,024 samples each way, with penalties, at the 1 % level."""
    ids = {"vocab_size": 12, "bos_token_id": None, "eos_token_id": 5, "pad_token_id": None}
    odd = dict.fromkeys(range(6, 12), -100.0)
    tables = []
    for drafter in (None, DraftModel(near(0.5, std=0.1, **ids), length=3, branches=2)):
        target = tiny.tiny_model("llama", std=0.1, **ids)
        with Engine(target, alone=drafter, acceptance="rejection", speculation=drafter is not None, max_model_len=64, threads=1) as engine:
            table = np.zeros(36)
            for seed in range(8):
                params = SamplingParams(4, temperature=1.0, n=128, seed=seed, repetition_penalty=1.3, logit_bias=odd, ignore_eos=True)
                done = engine.complete([1, 2, 3, 4, 1], params)
                for choice in done.choices:
                    table[6 * choice.token_ids[1] + choice.token_ids[2]] += 1
            tables.append(table)
    assert done.stats.accepted > 50
    common = tables[0] + tables[1] >= 10
    assert common.sum() > 20
    assert chi2_contingency(np.array(tables)[:, common]).pvalue > 0.01


@pytest.fixture(scope="module")
def rig() -> Iterator[tuple[Engine, DraftModel]]:
    drafter = DraftModel(tiny.tiny_model("llama"))
    with build(alone=drafter) as engine:
        yield engine, drafter
        check_empty(engine, drafter)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 500])
def test_a_text_ends_inside_a_draft(rig: tuple[Engine, DraftModel], n: int) -> None:
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    off = rig[0].complete(PROMPTS[0], params, speculation=False)
    on = rig[0].complete(PROMPTS[0], params)
    assert on.token_ids == off.token_ids
    assert len(on.token_ids) == min(n, 150 - len(PROMPTS[0]))
    assert on.stats.accepted == on.stats.drafted


@pytest.mark.parametrize("acceptance", ["walk", "rejection"])
@pytest.mark.parametrize("name", ["model", "layers:2", "counts"])
def test_a_text_without_a_next_token_ends_the_draft_alone(name: str, acceptance: str) -> None:
    """A grammar's text is whole, or every token is banned, inside a draft: later requests are drafted for as before."""
    drafter = DraftModel(near(), branches=2) if name == "model" else make_drafter(name)
    with build(tokenizer=tiny.byte_tokenizer(), alone=drafter, acceptance=acceptance) as engine:
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_tokens=20, temperature=temperature, seed=1, ignore_eos=True)
            for grammar in (Grammar.regex("[a-c]{3,9}"), Grammar.choice(["yes", "no"])):
                on, off = (engine.complete(PROMPTS[1], params, grammar=grammar, speculation=each) for each in (True, False))
                assert acceptance == "rejection" or on.token_ids == off.token_ids
            with pytest.raises(InvalidInputError, match="at output position 2 every token is banned"):
                engine.complete(PROMPTS[1], params, allowed_token_ids=[ord("A")], bad_words=["AAA"])
            assert engine.complete(PROMPTS[1], params).stats.drafted > 0
        assert engine.runner.pool.n_available == engine.runner.pool.n_blocks


def test_cancelling_frees_both_pools(rig: tuple[Engine, DraftModel], truth: dict[int, list[list[int]]]) -> None:
    engine, drafter = rig
    stays = engine.submit(PROMPTS[1], GREEDY)
    for piece in engine.stream(PROMPTS[0], SamplingParams(max_tokens=120, ignore_eos=True)):
        if len(piece.token_ids) > 1:  # a draft was accepted
            break
    assert stays.result(60).token_ids == truth[id(GREEDY)][1]
    assert engine.complete(PROMPTS[2], GREEDY).token_ids == truth[id(GREEDY)][2]
    check_empty(engine, drafter)


def test_a_sequence_waits_for_room_in_the_draft_models_pool(truth: dict[int, list[list[int]]]) -> None:
    drafter, seen = DraftModel(tiny.tiny_model("llama")), []
    with build(alone=drafter) as engine:
        assert drafter.runner is not None
        pool, watch = drafter.runner.pool, lambda _: seen.append(engine.status().running)
        pool.n_blocks = 3
        del pool.free[3:]
        fits = [each for each in range(len(PROMPTS)) if 32 < len(PROMPTS[each]) <= 64]
        requests = [engine.submit(PROMPTS[i], GREEDY, deliver=watch) for i in fits[:2]]
        done = [request.result(60) for request in requests]
        assert [d.token_ids for d in done] == [truth[id(GREEDY)][i] for i in fits[:2]]
        assert max(seen) == 1, "two blocks each, and there are three"
        assert Stats.sum(each.stats for each in done).accepted > 0
        never = engine.complete(list(range(100)), GREEDY)
        assert len(never.token_ids) == 40
        assert never.stats.drafted == 0, "what no pool of that size holds is not drafted, and does not wait"
        plain = [engine.submit(PROMPTS[i], GREEDY, speculation=False) for i in fits[:2]]
        assert [request.result(60).token_ids for request in plain] == [truth[id(GREEDY)][i] for i in fits[:2]]
        assert pool.n_available == 3


def other_tokenizer() -> Any:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


@pytest.mark.parametrize(
    ("model", "tokenizer", "told"),
    [
        ({"vocab_size": 300}, None, "sizes differ, 300 against 256"),
        ({}, other_tokenizer, "'<tool>' differ, 256 against None"),
        ({"eos_token_id": 7}, None, r"end a text differ, \(7, 255\) against \(255,\)"),
        ({"max_position_embeddings": 100}, None, "max_model_len up to 100"),
    ],
)
def test_a_model_that_differs_is_refused(model: dict[str, Any], tokenizer: Any, told: str) -> None:
    target = SimpleNamespace(model=tiny.tiny_model("llama"), vocab_size=256, max_model_len=150, tokenizer=tiny.byte_tokenizer())
    small = tiny.tiny_model("llama", **model)
    with pytest.raises(UnsupportedModelError, match=told):
        check_alike(target, small, tokenizer() if tokenizer else None, "small")


def test_the_engine_refuses_it_too() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot draft for LlamaForCausalLM"):
        build(alone=DraftModel(tiny.tiny_model("llama", vocab_size=300)))
    with pytest.raises(ValueError, match="must be 1 to 2, the model's own, got 3"):
        build(alone=DraftLayers(3))


@pytest.mark.parametrize("make", [lambda: DraftLayers(0), lambda: DraftModel("m", length=0), lambda: DraftModel("m", branches=0)])
def test_settings_out_of_range(make: Any) -> None:
    with pytest.raises(ValueError, match="must be 1 or more, got 0"):
        make()


def test_drafters_by_name() -> None:
    assert make_drafter("layers:8").n_layers == 8  # type: ignore[attr-defined]
    assert make_drafter("model:a/b:c").model == "a/b:c"  # type: ignore[attr-defined]
    for wrong in ("model", "layers:x", "nothing:1"):
        with pytest.raises(ValueError, match="drafter"):
            make_drafter(wrong)

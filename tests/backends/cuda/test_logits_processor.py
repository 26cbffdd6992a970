"""Logit bias, held-back stops and penalties on the device: bit for bit what the host's sampler makes of the same row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from aot import check_limits, compile_kernel
from small import NARROW, VOCAB, make_engine, make_model, take_on_trust

from ngramspec import Engine, SamplingParams
from ngramspec.backends.cuda import logits_processor
from ngramspec.backends.cuda.attention_schedule import AttentionSchedule
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.backends.cuda.graph_inputs import Bucket, GraphInputs
from ngramspec.backends.cuda.logits_processor import PenaltyEntries, adjust_logits
from ngramspec.engine.sequence import Sequence, SequenceOptions
from ngramspec.errors import InvalidInputError
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK, DraftTree
from ngramspec.sampling.batch import Span, pack
from ngramspec.sampling.sampler import NotFiniteError, Sampler

KINDS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {3: 2.5, 7: -100, 9: -1.25, 63: 100}},
    "stops held back": {"min_tokens": 5},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "rewards": {"repetition_penalty": 0.7, "presence_penalty": -0.5, "frequency_penalty": -1.5},
    "presence alone": {"presence_penalty": 1.1},
    "all": {"logit_bias": {3: 2.5, 7: -100}, "min_tokens": 4, "repetition_penalty": 1.7, "frequency_penalty": 0.1},
    "none": {},
}
STOPS = frozenset({2, 5})


def make_sampler(rng: np.random.Generator, how: dict[str, Any]) -> tuple[Sampler, np.ndarray]:
    """One that has accepted some tokens, and its text."""
    prompt = rng.integers(0, VOCAB, 6).astype(np.int32)
    sampler = Sampler(SamplingParams(**how), index=0, seed=0, prompt=prompt, vocab_size=VOCAB, stop_ids=STOPS)
    if rng.random() < 0.5:
        sampler.list_entries()  # before the tokens come, or after
    output = rng.integers(0, VOCAB, rng.integers(1, 6)).astype(np.int32)
    for token in output.tolist():
        sampler.accept(token)
    return sampler, np.concatenate([prompt, output])


def make_tree(rng: np.random.Generator, text: np.ndarray) -> DraftTree:
    """Of tokens that the text has, and others; some twice on a path."""
    n = 6
    tokens = np.where(rng.random(n) < 0.5, rng.choice(text, n), rng.integers(0, VOCAB, n)).astype(np.int32)
    tokens[3] = tokens[1]
    parents = np.array([-1, 0, -1, 1, 3, 2], np.int32)
    return DraftTree(tokens, parents, np.ones(n, np.float32), np.zeros(n, np.uint8))


def make_rows(rng: np.random.Generator, n: int) -> np.ndarray:
    rows = (rng.standard_normal((n, VOCAB)) * rng.choice([0.1, 3.0, 1e30], (n, 1))).astype(np.float32)
    rows[rng.random(rows.shape) < 0.1] = 0.0
    rows[rng.random(rows.shape) < 0.1] *= np.float32(-0.0)
    rows[rng.random(rows.shape) < 0.05] = -np.inf
    rows[rng.random(rows.shape) < 0.01] = np.nan
    return rows


def have_same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """A device's arithmetic makes one NaN of all."""
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and np.where(nan, 0, a).tobytes() == np.where(nan, 0, b).tobytes()


@pytest.mark.parametrize("some", [False, True], ids=["all rows", "wanted rows"])
@pytest.mark.parametrize("block", [16, logits_processor.BLOCK])
def test_rows_are_the_hosts(block: int, some: bool, device: str) -> None:
    rng = np.random.default_rng(block + some)
    where = torch.device(device)
    for _ in range(30 if device == "cuda" else 3):
        samplers = [make_sampler(rng, how) for how in KINDS.values()]
        pool = CudaPool([(1, 8)], 4 * len(samplers), len(samplers), 2 * BLOCK, dtype=torch.float32, device=where)
        spans = []
        for slot, (sampler, text) in enumerate(samplers):
            tree = make_tree(rng, text)
            assert pool.reserve(slot, len(text) + len(tree))
            first = len(text) - (3 if slot == 1 else 1)  # one brings a part of its prompt along
            spans.append(Span(slot, text[first:], first, tree, sampler=sampler, n_prompt=6))
        batch = pack(spans, pool)
        n = len(batch.input_ids)
        inputs = GraphInputs(Bucket(n + 3, len(batch.items)), 8, pool, AttentionSchedule(1, 64), PenaltyEntries(where))
        inputs.fill(batch)
        inputs.send()
        assert all(inputs.picked)
        rows = make_rows(rng, n)
        wanted = batch.logits_rows if some else np.arange(n)
        logits = torch.from_numpy(rows[wanted]).to(where)
        with np.errstate(all="ignore"):  # the interpreter computes with numpy
            index = torch.from_numpy(batch.logits_rows).to(where) if some else None
            adjust_logits(logits, index, inputs._adjusting.entries, inputs.device, block)
        found = dict(zip(wanted.tolist(), logits.cpu().numpy(), strict=True))
        for s, span in enumerate(spans):
            root = int(batch.roots[s])
            for row in range(root, int(batch.ends[s])):
                ahead = samplers[s][0].fork()
                path, node = [], row
                while batch.parents[node] >= 0:
                    path.insert(0, int(batch.input_ids[node]))
                    node = int(batch.parents[node])
                for token in path:
                    ahead.accept(token)
                position = int(batch.positions[row]) + 1 - span.n_prompt
                expected = ahead.adjust_logits(rows[row].copy(), position)
                assert have_same_bits(found[row], expected), (list(KINDS)[s], row - root)
        for row in set(found) - {r for s in range(len(spans)) for r in range(int(batch.roots[s]), int(batch.ends[s]))}:
            assert found[row].tobytes() == rows[row].tobytes(), "a row of a prompt"


def test_more_entries_than_there_is_room_for_are_the_hosts_business() -> None:
    rng = np.random.default_rng(0)
    pool = BlockTables(4, 3, 2 * BLOCK)
    spans = []
    for slot, how in enumerate(("penalties", "all", "none")):
        sampler, text = make_sampler(rng, KINDS[how])
        assert pool.reserve(slot, len(text))
        spans.append(Span(slot, text[-1:], len(text) - 1, sampler=sampler, n_prompt=6))
    held = [len(span.sampler.list_entries()) for span in spans if span.sampler is not None]
    small = PenaltyEntries(torch.device("cpu"), room=held[0] + held[1] - 1)
    names = ("entries", "n_entries", "held", "repetition", "presence", "frequency")
    rows = {name: np.full(3, 9, np.float32 if name in names[3:] else np.int32) for name in names}
    assert small.stage_entries(pack(spans, pool), rows) == [True, False, True]
    assert rows["n_entries"].tolist() == [held[0], 0, 0]


@pytest.fixture(scope="module")
def engine(device: str) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        take_on_trust(patch)
        with make_engine(make_model("llama", **NARROW), device, patch) as made_engine:
            made_engine.core.cost = tiny.FreeRows()
            yield made_engine


@pytest.mark.parametrize(("how", "temperature"), [("bias", 0.0), ("penalties", 0.9), ("all", 0.9)])
def test_texts_are_those_that_the_host_picks(how: str, temperature: float, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds and temperatures in turns: logits are adjusted before anything is drawn from them."""
    rng = np.random.default_rng(5)
    prompt = np.tile(rng.integers(3, VOCAB, 4), 2).tolist()
    given = KINDS[how] | {"max_tokens": 6, "temperature": temperature, "seed": 4}
    host = engine.complete(prompt, SamplingParams(**given, logprobs=0), speculation=False)
    asked = list[Any]()
    accept = type(engine.core.acceptance).accept
    monkeypatch.setattr(type(engine.core.acceptance), "accept", lambda *args: asked.append(args) or accept(*args))
    plain = engine.complete(prompt, SamplingParams(**given), speculation=False)
    drafted = engine.complete(prompt, SamplingParams(**given), prediction=host.token_ids)
    other = SamplingParams(max_tokens=6, temperature=temperature, seed=4)
    without = engine.complete(prompt, other)
    assert host.token_ids == plain.token_ids == drafted.token_ids != without.token_ids
    assert drafted.stats.accepted > 0
    assert not asked, "all was picked within the passes"
    monkeypatch.setattr(engine.runner._adjusting, "_host", engine.runner._adjusting._host[:2])  # type: ignore[attr-defined]
    beyond = engine.complete(prompt, SamplingParams(**given), prediction=host.token_ids)
    assert beyond.token_ids == host.token_ids
    assert asked


def test_where_nothing_is_left_to_pick_the_reason_is_told(engine: Engine) -> None:
    banned = SamplingParams(max_tokens=3, logit_bias=dict.fromkeys(range(VOCAB), -100))
    with pytest.raises(InvalidInputError, match="at output position 0 every token is banned"):
        engine.complete([3, 4], banned)
    sampler = Sampler(SamplingParams(logit_bias={3: -100}), index=0, seed=0, prompt=np.zeros(1, np.int64), vocab_size=9, stop_ids=STOPS)
    text: Any = None
    seq = Sequence(np.zeros(2, np.int32), sampler.params, sampler, text, SequenceOptions(stop_ids=STOPS, max_len=9), index=0)
    with pytest.raises(NotFiniteError, match="output position 0"):
        seq.extend(np.array([-1], np.int32))


def compiled() -> None:
    kinds = dict.fromkeys(("entries", "starts", "counts", "held", "ids", "parents"), "*i32")
    kinds |= dict.fromkeys(("logits", "repetition", "presence", "frequency"), "*fp32") | {"wanted": "*i64", "stride": "i32:16"}
    for capability in (80, 90):
        for wanted in (False, True):
            constants = {"WANTED": wanted, "BLOCK": logits_processor.BLOCK, "WORDS": logits_processor.WORDS}
            types = {name: kinds[name] for name in logits_processor._adjust_logits.arg_names if name not in constants}
            made = compile_kernel(
                logits_processor._adjust_logits, types, constants, capability=capability, num_warps=4, enable_fp_fusion=False
            )
            check_limits(made, capability)
            assert made.count(r"div\.(full|approx)|(div|mul|add|sub|fma)\.rn\.ftz|\bfma\.rn") == 0

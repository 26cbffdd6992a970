"""The promise: a request's tokens depend on its prompt, parameters and seed, and on nothing else. Bitwise, on every family.

Speculation cannot be tested by what a random model happens to write alone: these tests draft with an oracle that knows the
true continuation and spoils it at random places, so that every acceptance length, tree shape and rollback occurs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from ngramspec.backends.base import has_recurrent_layers, kv_shapes
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.backends.cpu.llama_runner import CpuOptions
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.engine.llm_engine import Engine
from ngramspec.models.latent_weights import list_latent_attention
from ngramspec.models.reference import find_needed_layers
from ngramspec.outputs import DraftTree
from ngramspec.sampling.batch import Span
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative.drafter import Candidates

pytestmark = pytest.mark.slow
THREADS = min(2, os.cpu_count() or 1)
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, top_k=40, top_p=0.95, seed=11, ignore_eos=True)
PENALISED = SamplingParams(
    max_tokens=40,
    temperature=0.8,
    seed=5,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    min_p=0.02,
    logit_bias={7: 2.0, 9: -100.0},
    ignore_eos=True,
)


class Oracle:
    """Drafts the true continuation, right or wrong at random: bushy trees with spoiled, missing and extra nodes."""

    name = "oracle"

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.truth: list[list[int]] = []
        self.text: dict[int, list[int]] = {}

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self.text[seq] = tokens.tolist()

    def propose(self, seqs: list[int], budget: int) -> list[Candidates]:
        return [self._tree(seq) for seq in seqs]

    def _tree(self, seq: int) -> Candidates:
        text = self.text[seq]
        rest = next((t[len(text) :] for t in self.truth if t[: len(text)] == text), [])
        tokens: list[int] = []
        parents: list[int] = []
        node = -1
        for token in rest[: int(self.rng.integers(0, 7))]:
            for _ in range(int(self.rng.integers(0, 3))):  # siblings that are wrong, and nodes behind them
                tokens.append(int((token + self.rng.integers(1, 200)) % tiny.VOCAB))
                parents.append(node)
                if self.rng.random() < 0.5:
                    tokens.append(int(self.rng.integers(0, tiny.VOCAB)))
                    parents.append(len(tokens) - 2)
            if self.rng.random() < 0.2:
                break
            tokens.append(token)
            parents.append(node)
            node = len(tokens) - 1
        keep: dict[tuple[int, int], int] = {}
        for i, pair in enumerate(zip(parents, tokens, strict=True)):
            keep.setdefault(pair, i)
        unique = [
            i
            for i, pair in enumerate(zip(parents, tokens, strict=True))
            if keep[pair] == i and (parents[i] < 0 or keep.get((parents[parents[i]], tokens[parents[i]])) == parents[i])
        ]
        new = {old: i for i, old in enumerate(unique)}
        new[-1] = -1
        return Candidates(
            np.array([tokens[i] for i in unique], np.int32),
            np.array([new[parents[i]] for i in unique], np.int32),
            np.full(len(unique), 0.9, np.float32),
        )

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        self.text[seq] += accepted.tolist()

    def end(self, seq: int) -> None:
        self.text.pop(seq, None)


def prompts(n: int, seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 250, int(rng.integers(3, 70))).tolist() for _ in range(n)]


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine, Oracle]]:
    """An engine with one thread, a roomy pool and no speculation; one with two, the oracle, odd chunks, a pool that it preempts in."""
    oracle = Oracle()
    plain = Engine(tiny.tiny_model(request.param), threads=1, max_seqs=8, speculation=False, max_model_len=150, prefix_cache=False)
    tight = Engine(
        tiny.tiny_model(request.param),
        threads=THREADS,
        max_seqs=8,
        max_rows=23,
        drafters=[oracle],
        max_model_len=150,
        kv_memory=tight_pool(request.param),
        prefix_cache=False,  # every pass is computed; test_prefix.py has it on
    )
    tight.core.cost = tiny.FreeRows()
    yield plain, tight, oracle
    plain.close()
    tight.close()


def tight_pool(arch: str) -> int:
    """Bytes of a pool that two of the sequences fill."""
    model = tiny.tiny_model(arch)
    if any(list_latent_attention(model)):
        return 9 * len(bind(arch).pool.read_block(0))
    model.config._attn_implementation = "ngramspec"
    shapes = [shape for i, shape in enumerate(kv_shapes(model, torch.device("cpu"))) if find_needed_layers(model, i) == [i]]
    n_bytes = blocks = 9 * KVPool.block_bytes(shapes)
    runner = bind(arch) if has_recurrent_layers(model) else None
    if runner is not None and runner.weight_map is not None and runner.weight_map.state_shape is not None:
        size = runner.weight_map.state_shape.state_bytes
        for _ in range(9):  # snapshots take an eighth of the whole
            n_bytes = blocks + size * (2 * 8 + n_bytes // (8 * size))
    return n_bytes


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_same_tokens_whatever_happens(pair: tuple[Engine, Engine, Oracle], params: SamplingParams) -> None:
    plain, tight, oracle = pair
    assert plain.exactness == tight.exactness == "bitwise"
    assert isinstance(plain.runner, CpuRunner)
    if plain.runner.decoder is None:  # a pass of modules takes twenty times as long and more
        params = replace(params, max_tokens=24)
    asked = prompts(6)
    expected = [plain.complete(p, params).token_ids for p in asked]
    oracle.truth = [p + t for p, t in zip(asked, expected, strict=True)]
    together = plain.complete(asked, params)
    assert [c.token_ids for c in together] == expected
    alone = [tight.complete(p, params) for p in asked]
    assert [c.token_ids for c in alone] == expected
    crowd = tight.complete(asked, params)
    assert [c.token_ids for c in crowd] == expected
    assert [c.token_ids for c in tight.complete(asked, params, speculation=False)] == expected
    accepted = sum(c.stats.accepted for c in alone + crowd)
    drafted = sum(c.stats.drafted for c in alone + crowd)
    assert 0 < accepted < drafted
    assert tight.core.scheduler.n_preempted > 0
    tight.runner.pool.check_integrity()
    assert tight.runner.pool.n_available == tight.runner.pool.n_blocks


def bind(arch: str) -> CpuRunner:
    return CpuRunner(tiny.tiny_model(arch), CpuOptions(max_len=200, max_seqs=3, max_rows=64, kv_bytes=1 << 22, code=cache_dir() / "code"))


@pytest.fixture(scope="module", params=tiny.ARCHITECTURES)
def runner(request: pytest.FixtureRequest) -> CpuRunner:
    return bind(request.param)


@pytest.mark.usefixtures("two_threads")
def test_logits_bitwise_tree_chain_chunks(runner: CpuRunner) -> None:
    """A tree's logits, a prompt in ragged chunks, and batch mates, against one token at a time: every bit."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 250, 90).astype(np.int32)
    n = 61
    for slot in range(3):
        assert runner.pool.reserve(slot, 130)
    steps = [runner.run([Span(0, tokens[i : i + 1], i)])[0] for i in range(n)]
    cuts = [0, 1, 3, 20, 33, 60, n]
    for a, b in itertools.pairwise(cuts):
        mate = Span(2, tokens[a:b] + 1, a)
        got = runner.run([mate, Span(1, tokens[a:b], a)] if a % 2 else [Span(1, tokens[a:b], a), mate])
        assert torch.equal(got[1 if a % 2 else 0], steps[b - 1])
    parents = np.array([-1, 0, -1, 1, 2, 2, 3, 5, 6, 8, 9, 10], np.int32)
    tree = DraftTree(rng.integers(0, 250, 12).astype(np.int32), parents, np.ones(12, np.float32), np.zeros(12, np.uint8))
    whole = runner.run([Span(1, tokens[n : n + 1], n, tree)])
    root = runner.run([Span(0, tokens[n : n + 1], n)])
    assert torch.equal(whole[0], root[0])

    def begin_path() -> None:
        if runner.is_recurrent:  # a state that has advanced does not go back
            runner.run([Span(0, tokens[: n + 1], 0)])

    for leaf in range(12):
        begin_path()
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        for depth, node in enumerate(path):
            last = runner.run([Span(0, tree.tokens[node : node + 1], n + 1 + depth)])
        assert torch.equal(last[0], whole[1 + leaf])
    # Keep a path that jumps over siblings, and go on behind it.
    path = np.array([2, 5, 7], np.int32)
    runner.pool.commit(1, n + 1, n + 1 + path)
    begin_path()
    for depth, node in enumerate(path):
        runner.run([Span(0, tree.tokens[node : node + 1], n + 1 + depth)])
    a, b = (runner.run([Span(slot, tokens[80:90], n + 4)]) for slot in (0, 1))
    assert torch.equal(a, b)
    for slot in range(3):
        runner.pool.release(slot)


def test_logits_are_those_of_transformers(request: pytest.FixtureRequest, runner: CpuRunner) -> None:
    model = tiny.tiny_model(request.node.callspec.params["runner"])
    tokens = torch.arange(60) * 37 % 250
    with torch.inference_mode():
        expected = model(input_ids=tokens[None], use_cache=False).logits[0]
    runner.pool.reserve(0, 60)
    got = [runner.run([Span(0, tokens[a:b].numpy().astype(np.int32), a)])[0] for a, b in ((0, 25), (25, 59), (59, 60))]
    for logits, position in zip(got, (24, 58, 59), strict=True):
        torch.testing.assert_close(logits, expected[position], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_smollm2_real_prompts(smollm2_engine: Engine, temperature: float) -> None:
    texts = [
        "def fibonacci(n):\n    ",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n\n"
        "    def pop(self):\n",
        "Q: What is 2 + 2?\nA: 4\nQ: What is 3 + 3?\nA: 6\nQ: What is 4 + 4?\nA:",
        "import os\nimport sys\n\ndef main():\n    for name in os.listdir('.'):\n        print(name)\n\n",
    ]
    params = SamplingParams(max_tokens=48, temperature=temperature, seed=0 if temperature else None)
    off = [smollm2_engine.complete(t, params, speculation=False) for t in texts]
    alone = [smollm2_engine.complete(t, params) for t in texts]
    together = smollm2_engine.complete(texts * 2, params)
    assert smollm2_engine.exactness == "bitwise"
    assert [c.token_ids for c in alone] == [c.token_ids for c in off]
    assert [c.token_ids for c in together] == [c.token_ids for c in off] * 2
    assert sum(c.stats.accepted for c in alone) > 0


def test_seed_decides(smollm2_engine: Engine) -> None:
    def write(seed: int, n: int = 1) -> list[list[int]]:
        completion: Any = smollm2_engine.complete("Once upon a time", SamplingParams(max_tokens=12, temperature=1.0, seed=seed, n=n))
        return [choice.token_ids for choice in completion.choices]

    assert write(1) == write(1)
    assert write(1) != write(2)
    three = write(1, n=3)
    assert three[0] == write(1)[0]
    assert len({tuple(t) for t in three}) == 3


def test_packed_weights_change_no_bit(smollm2_gguf: Path) -> None:
    """The real model's weights are kept in the blocks that they came in; as float32 they make the same numbers."""
    params = SamplingParams(max_tokens=32, temperature=0.8, seed=3, logprobs=5)
    prompt = "def quicksort(items):\n    "
    made = []
    for linears, kept in (("exact", {"blocks of 4 bits", "blocks of 8 bits"}), ("unpacked", {"F32"})):
        with Engine(str(smollm2_gguf), precision="float32", linears=linears, max_model_len=256) as engine:
            assert set(engine.props()["linear_policies"].values()) == kept
            assert engine.precision == "float32"
            made.append(engine.complete(prompt, params))
    assert made[0].token_ids == made[1].token_ids
    assert made[0].choices[0].logprobs == made[1].choices[0].logprobs

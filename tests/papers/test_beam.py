"""Beam search: transformers' beams without drafts, and with drafts the same ones bit for bit, in fewer passes, beside other requests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import ngramspec.engine.beam_turns
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import EngineClosedError, OutOfMemoryError
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.outputs import BLOCK, Beam, DraftTree
from ngramspec.papers.beam import BeamSearch, find_continuations
from ngramspec.sampling_params import SamplingParams

ENDS = [*range(0, 240, 16), tiny.EOS]
"""Enough of them that a random model's texts end."""


def repetitive(n: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 20 to 80 tokens in which a phrase comes again."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, 250, int(rng.integers(3, 9))).tolist() for _ in range(n)]
    return [(phrase * 30)[: int(rng.integers(20, 80))] for phrase in phrases]


def model(arch: str = "llama") -> Any:
    """A random model that looks at its last token more than at all others, so that what it writes comes again and can be foreseen."""
    made = tiny.tiny_model(arch)
    for layer in made.model.layers:
        layer.self_attn.o_proj.weight.mul_(0.1)
    made.generation_config.eos_token_id = ENDS
    return made


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model(), tokenizer=tiny.byte_tokenizer(), max_seqs=8, max_rows=32, threads=1) as engine:
        engine.core.cost = tiny.FreeRows()
        yield engine
        engine.runner.pool.check_integrity()
        assert engine.runner.pool.n_available == engine.runner.pool.n_blocks
        assert sorted(engine.core.scheduler.free_slots) == list(range(8))


def same_as_transformers(engine: Engine, theirs: Any, prompt: list[int], width: int, **options: Any) -> None:
    expected = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    got = engine.beam_search(prompt, width, 24, speculation=False, **options)
    for beam, tokens in zip(got, expected.sequences[:, len(prompt) :].tolist(), strict=True):
        assert beam.token_ids == tokens[: len(beam.token_ids)]
        assert set(tokens[len(beam.token_ids) :]) <= {tiny.EOS}  # padding
        assert beam.token_ids[-1] in ENDS or len(beam.token_ids) == 24
    assert [beam.score for beam in got] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"early_stopping": True}, {"length_penalty": 0.0}, {"length_penalty": 2.5}])
def test_plain_search_finds_the_beams_of_transformers(engine: Engine, options: dict[str, Any]) -> None:
    theirs = model()
    for width, prompt in zip((3, 6), repetitive(2, seed=len(options)), strict=True):
        same_as_transformers(engine, theirs, prompt, width, **options)


def test_so_it_does_with_a_sliding_window() -> None:
    with Engine(model("mistral"), speculation=False, max_seqs=4, max_model_len=128, threads=1) as engine:
        for prompt in repetitive(2):
            same_as_transformers(engine, model("mistral"), prompt, 4)


def test_drafts_change_no_bit_and_save_passes(engine: Engine) -> None:
    n_passes = {True: 0, False: 0}

    def search(prompt: list[int], width: int, speculation: bool) -> list[Beam]:
        before = engine.status().passes
        beams = engine.beam_search(prompt, width, 32, speculation=speculation)
        n_passes[speculation] += engine.status().passes - before
        return beams

    for i, prompt in enumerate(repetitive(50)):
        width = 1 + i % 6
        assert search(prompt, width, True) == search(prompt, width, False)
    assert n_passes[True] < 0.95 * n_passes[False]


class Oracle:
    """In the place of a proposer: knows every beam that a search went through, and forgets or invents at random."""

    needs_topk = True

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.beams: set[tuple[int, ...]] = set()
        self.text: dict[int, tuple[int, ...]] = {}

    def begin(self, place: int, tokens: np.ndarray, params: Any) -> None:
        self.text[place] = tuple(tokens.tolist())

    def observe(self, places: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray], seen: Any) -> None:
        for place, new, path in zip(places.tolist(), accepted, paths, strict=True):
            assert len(path) in (len(new) - 1, len(new))
            self.text[place] += tuple(new.tolist())

    def propose(self, places: np.ndarray, max_depth: np.ndarray, *_: Any) -> list[DraftTree]:
        return [self._tree(self.text[place], int(depth)) for place, depth in zip(places.tolist(), max_depth, strict=True)]

    def _tree(self, text: tuple[int, ...], max_depth: int) -> DraftTree:
        nodes: list[tuple[int, int]] = []
        level = [(-1, text)]
        for _ in range(min(max_depth, 5)):
            below = []
            for parent, tokens in level:
                known = [beam[-1] for beam in self.beams if len(beam) == len(tokens) + 1 and beam[:-1] == tokens]
                for token in {*known, int(self.rng.integers(tiny.VOCAB))}:
                    if self.rng.random() < 0.98 and len(nodes) < 32:
                        nodes.append((token, parent))
                        below.append((len(nodes) - 1, (*tokens, token)))
            level = below
        tokens, parents = np.array(nodes, np.int32).reshape(-1, 2).T
        return DraftTree(tokens, parents, np.full(len(nodes), 0.9, np.float32), np.zeros(len(nodes), np.uint8))


def test_deep_drafts_of_every_shape_change_no_bit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = Oracle()
    commit = BeamSearch._commit

    def record(search: BeamSearch, *args: Any) -> None:
        commit(search, *args)
        oracle.beams.update(tuple(beam.tokens.tolist()) for beam in search.beams)

    monkeypatch.setattr(ngramspec.engine.beam_turns, "TreeProposer", lambda *_, **__: oracle)
    n_passes = [0, 0]
    for width, prompt in zip((2, 3, 4, 5, 6), repetitive(5, seed=2), strict=True):
        found = []
        for speculation in (False, True):
            with monkeypatch.context() as patch:
                if not speculation:
                    patch.setattr(BeamSearch, "_commit", record)
                before = engine.status().passes
                found.append(engine.beam_search(prompt, width, 60, speculation=speculation, ignore_eos=True))
                n_passes[speculation] += engine.status().passes - before
        assert found[0] == found[1]
    assert n_passes[True] < 0.5 * n_passes[False]


def test_width_1_is_greedy(engine: Engine) -> None:
    for prompt in repetitive(4):
        (beam,) = engine.beam_search(prompt, 1, 30, ignore_eos=True)
        greedy = engine.complete(prompt, SamplingParams(max_tokens=30, ignore_eos=True, logprobs=0))
        assert beam.token_ids == greedy.token_ids
        assert beam.text == greedy.text
        assert greedy.choices[0].logprobs is not None
        assert beam.score == pytest.approx(np.mean([entry.logprob for entry in greedy.choices[0].logprobs]))


def test_requests_beside_it_take_turns_and_nobody_notices(engine: Engine) -> None:
    prompts = repetitive(6, seed=1)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    alone = [engine.complete(prompt, long).token_ids for prompt in prompts]
    beams = engine.beam_search(prompts[0], 4, 40)
    requests = [engine.submit(prompt, long) for prompt in prompts]  # leave fewer than four places
    assert engine.beam_search(prompts[0], 4, 40) == beams
    assert [request.result().token_ids for request in requests] == alone
    engine.runner.pool.check_integrity()


def test_a_full_pool_is_said_and_everything_given_back() -> None:
    prompt = repetitive(1)[0]
    block_bytes = KVPool.block_bytes([(2, 16)] * 2)
    with Engine(model(), max_seqs=8, max_model_len=128, kv_memory=9 * block_bytes, threads=1) as engine:
        with pytest.raises(OutOfMemoryError, match="does not fit in the KV pool"):
            engine.beam_search(prompt, 8, 80, ignore_eos=True)
        assert engine.runner.pool.n_available == engine.runner.pool.n_blocks
        assert len(engine.beam_search(prompt, 2, 20)) == 2


def test_an_interrupt_ends_it_and_everything_is_given_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before, step, late = engine.status().passes, BeamSearch.step, 0

    def interrupted(search: BeamSearch) -> int:
        nonlocal late
        if engine.core.n_passes >= before + 3:
            if late % 50 == 0 and not search.stopped:  # again after a second: one that comes just before a lock is waited for is not heard
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            late += 1
            threading.Event().wait(0.02)  # a model that is slow enough to hear of it
        return step(search)

    monkeypatch.setattr(BeamSearch, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.beam_search([1, 2, 3], 4, 250, ignore_eos=True, speculation=False)
    monkeypatch.undo()
    assert len(engine.beam_search([1, 2, 3], 8, 2)) == 8  # all places are free again
    assert engine.status().passes - before < 240  # of 250 and more


def test_closing_the_engine_ends_it() -> None:
    errors: list[Exception] = []
    engine = Engine(model(), max_seqs=4, threads=1)

    def search() -> None:
        try:
            engine.beam_search([1, 2, 3], 4, 250, ignore_eos=True)
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=search)
    thread.start()
    while engine.status().passes == 0:
        pass
    engine.close()
    thread.join()
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"width": 0}, "width must be 1"), ({"width": 9}, "width must be 1 to 8, what"), ({"max_tokens": 0}, "max_tokens must be 1"),
     ({"length_penalty": float("nan")}, "length_penalty must be")],
)  # fmt: skip
def test_settings_out_of_range_are_refused(engine: Engine, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.beam_search(**{"prompt": [1, 2, 3], "width": 2} | settings)  # type: ignore[arg-type]


def test_equal_continuations_go_by_token_id() -> None:
    found = find_continuations(np.array([1, 3, 0, 3, 2, 3], np.float32), 4)
    assert [token for token, _ in found] == [1, 3, 5, 4]
    assert sum(np.exp(logprob) for _, logprob in find_continuations(np.arange(5, dtype=np.float32), 9)) == pytest.approx(1)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_fork_shares_what_is_registered_and_copies_the_rest(kind: str) -> None:
    shapes = [(2, 8), (1, 16)]
    if kind == "host":
        pool: Any = KVPool(shapes, 8, 3, 4 * BLOCK)
    else:
        pytest.importorskip("triton")
        from ngramspec.backends.cuda.gpu_kv_pool import CudaPool

        pool = CudaPool(shapes, 8, 3, 4 * BLOCK, dtype=torch.float32, device=torch.device("cpu"))
    rng = np.random.default_rng(0)
    for each in (*pool.keys, *pool.values):
        np.asarray(each)[:] = rng.random(each.shape)
    tokens = np.arange(BLOCK + 5, dtype=np.int32)
    names = BlockHashes("", tokens).hashes
    assert pool.reserve(0, BLOCK + 12)
    pool.register(0, names)
    slots = np.array([*range(BLOCK, BLOCK + 5), BLOCK + 7, BLOCK + 11])
    assert pool.fork(0, slots, 2, names)
    pool.check_integrity()
    assert pool.tables[2, 0] == pool.tables[0, 0]
    assert pool.n_blocks_of[2] == 2

    def read(slot: int, at: np.ndarray) -> list[np.ndarray]:
        blocks, offsets = pool.locate(slot, at)
        keys = [np.asarray(k)[blocks, :, :, offsets] if kind == "host" else np.asarray(k)[blocks, :, offsets] for k in pool.keys]
        return [*keys, *(np.asarray(v)[blocks, :, offsets] for v in pool.values)]

    for old, new in zip(read(0, slots), read(2, BLOCK + np.arange(7)), strict=True):
        assert np.array_equal(old, new)
    assert not pool.fork(0, np.arange(BLOCK, 9 * BLOCK), 1, [])
    pool.check_integrity()

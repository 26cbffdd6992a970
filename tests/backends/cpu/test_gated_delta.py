"""Recurrent layers: the walk over a tree, the state's bookkeeping, what is refused, and texts with drafts of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tiny
from recurrent_texts import check_own_text_is_kept
from test_exact import bind

from ngramspec.backends.cpu.recurrent_pool import RecurrentPool, StateShape
from ngramspec.backends.cpu.recurrent_rows import MOST_NODES, order_depth_first
from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Span
from ngramspec.sampling_params import SamplingParams

ARCH = "qwen3_5_text"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(tiny.tiny_model(ARCH), max_model_len=250, max_seqs=16)
    engine.core.cost = tiny.FreeRows()
    with engine:
        yield engine


@pytest.mark.parametrize("seed", range(5))
def test_a_tree_is_walked_depth_first(seed: int) -> None:
    rng, n, root = np.random.default_rng(seed), 30, 4
    parents = np.array([-1] * (root + 1) + [root + int(rng.integers(0, i + 1)) for i in range(n)], np.int32)
    order, depths = np.empty(n, np.int64), np.empty(n, np.int64)
    deepest = order_depth_first(parents, root, root + 1 + n, order, depths)
    assert sorted(order.tolist()) == list(range(root + 1, root + 1 + n))
    assert deepest == depths.max()
    path = [root]
    for row, depth in zip(order.tolist(), depths.tolist(), strict=True):
        path[depth:] = [row]
        assert parents[row] == path[depth - 1], "a node's parent is the last one that was one level above it"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_ngrams_change_no_token(engine: Engine, temperature: float) -> None:
    rng = np.random.default_rng(1)
    prompts = [np.resize(rng.integers(0, 250, int(rng.integers(3, 20))), int(rng.integers(30, 140))).tolist() for _ in range(12)]
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    expected = [engine.complete(prompt, params, speculation=False).token_ids for prompt in prompts]
    got = engine.complete(prompts, params)
    assert [each.token_ids for each in got] == expected
    assert sum(each.stats.accepted for each in got) > 10


@pytest.mark.parametrize("prediction", [False, True])
def test_the_state_after_written_text_is_kept(prediction: bool) -> None:
    check_own_text_is_kept(tiny.tiny_model(ARCH), prediction)


def test_what_would_divide_or_skip_states_is_refused(engine: Engine) -> None:
    with pytest.raises(UnsupportedModelError, match="beam search"):
        engine.beam_search([1, 2, 3], width=2, max_tokens=2)
    with pytest.raises(UnsupportedModelError, match="first layers"):
        engine.runner.early_exit(1)


def test_trees_have_no_more_nodes_than_the_log_has_rows() -> None:
    with Engine(tiny.tiny_model(ARCH), max_model_len=250, spec_rows=4 * MOST_NODES) as engine:
        assert engine.speculator.spec_rows == MOST_NODES


def test_a_state_is_continued_only_where_it_is() -> None:
    runner, tokens = bind(ARCH), np.arange(40, dtype=np.int32)
    runner.pool.reserve(0, 60)
    runner.run([Span(0, tokens[:10], 0)])
    with pytest.raises(AssertionError, match="continued at 9"):
        runner.run([Span(0, tokens[9:12], 9)])
    runner.run([Span(0, tokens[10:12], 10)])
    runner.run([Span(0, tokens[:10], 0)])  # from the start again


def make_pool(n_snapshots: int) -> RecurrentPool:
    shape = StateShape(n_layers=2, n_groups=1, n_inputs=24, n_taps=4, n_heads=2, key_dim=4, value_dim=8)
    return RecurrentPool([(1, 8)], 32, 4, 8 * BLOCK, np.float32, shape, n_snapshots)


def test_a_prefix_is_taken_over_up_to_a_snapshot() -> None:
    pool = make_pool(2)
    hashes = BlockHashes("", np.arange(4 * BLOCK, dtype=np.int32)).hashes
    assert pool.admit(0, [], 4 * BLOCK) == 0
    pool.kept_at[0], pool.kept_state[0] = 2 * BLOCK, 7.0
    pool.register(0, hashes)
    assert pool.admit(1, hashes, 5 * BLOCK) == 2, "there are four blocks, and a state behind the second"
    assert (pool.at[1] == 2 * BLOCK).all()
    assert (pool.state[1] == 7.0).all()
    pool.release(1)
    pool.release(0)
    assert pool.admit(2, hashes[:1], 5 * BLOCK) == 0
    pool.release(2)
    for text in range(2):  # the oldest of three snapshots goes
        others = BlockHashes(str(text), np.arange(BLOCK, dtype=np.int32)).hashes
        assert pool.admit(3, [], BLOCK) == 0
        pool.kept_at[3] = BLOCK
        pool.register(3, others)
        pool.release(3)
    assert pool.admit(1, hashes, 5 * BLOCK) == 0
    pool.check_integrity()


def test_fewer_sequences_run_where_states_do_not_fit() -> None:
    with Engine(tiny.tiny_model(ARCH), max_model_len=64, max_seqs=64, kv_memory=2 << 20) as engine:
        assert 1 <= engine.runner.pool.tables.shape[0] < 64
        prompts = [[i, i + 1, i + 2] for i in range(80)]
        assert len(engine.complete(prompts, SamplingParams(max_tokens=2, ignore_eos=True))) == 80
    with pytest.raises(OutOfMemoryError, match="states"):
        Engine(tiny.tiny_model(ARCH), max_model_len=64, kv_memory=1 << 16)

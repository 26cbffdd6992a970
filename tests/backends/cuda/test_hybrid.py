"""Models with recurrent layers on the device: the walk over trees, states and snapshots, and the same texts whatever else is in a pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import small
import tiny
import tiny_architectures
import torch
from test_packed import load

from ngramspec import Completion, Engine, SamplingParams
from ngramspec.backends.base import Runner
from ngramspec.backends.cuda import cuda_runner as runner_module
from ngramspec.backends.cuda.cuda_runner import CudaOptions, CudaOutput, CudaRunner
from ngramspec.backends.cuda.expert_layer import ExpertLayer
from ngramspec.backends.cuda.gated_delta_kernels import ROW_WORDS, DeltaShape
from ngramspec.backends.cuda.gpu_recurrent_pool import CudaRecurrentPool, count_copies, plan_walk
from ngramspec.backends.cuda.model import CudaDecoder
from ngramspec.errors import OutOfMemoryError, UnsupportedModelError
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.outputs import BLOCK, DraftTree
from ngramspec.sampling.batch import Batch, Span, pack

HYBRID: dict[str, Any] = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 12,
}  # fmt: skip


N_NODES = 6


def bind(device: str, dtype: torch.dtype = torch.float32, **options: Any) -> CudaRunner:
    model = small.make_model("qwen3_5_text", **HYBRID | small.NARROW).to(device, dtype)
    return CudaRunner(model, CudaOptions(**{"max_len": 64, "max_seqs": 4, "max_rows": 24, "kv_bytes": 1 << 22, "max_depth": 9} | options))


def make_tree(rng: np.random.Generator, n: int) -> DraftTree:
    reach = int(rng.integers(1, n + 1))  # near a chain, or bushy
    parents = np.array([int(rng.integers(max(-1, i - reach), i)) for i in range(n)], np.int32)
    return DraftTree(rng.integers(0, small.VOCAB, n).astype(np.int32), parents, np.ones(n, np.float32), np.zeros(n, np.uint8))


def test_a_walk_begins_every_step_with_the_state_of_the_rows_parent() -> None:
    most = 0
    for seed in range(300):
        rng, firsts, roots, ends, parents = np.random.default_rng(seed), list[int](), list[int](), list[int](), list[int]()
        for _ in range(rng.integers(1, 4)):
            firsts.append(len(parents))
            roots.append(len(parents) + int(rng.integers(0, 3)))
            tree = make_tree(rng, int(rng.integers(1, 30))).parents
            parents += [-1] * (roots[-1] + 1 - firsts[-1]) + [roots[-1] + 1 + int(parent) for parent in tree]
            ends.append(len(parents))
        table = np.zeros((len(parents), ROW_WORDS), np.int32)
        n_copies = plan_walk(np.array(parents, np.int32), *(np.array(each, np.int32) for each in (firsts, roots, ends)), table)
        assert n_copies <= count_copies(len(parents))
        most = max(most, n_copies)
        for b, (first, root, end) in enumerate(zip(firsts, roots, ends, strict=True)):
            copies, here, last_known = dict[int, int](), -1, -1  # the state after which row
            assert sorted(table[first:end, 2].tolist()) == list(range(first, end))
            for owner, _, row, begin_with, save_in, advances in table[first:end].tolist():
                assert owner == b
                here = last_known if begin_with == 0 else copies[begin_with - 1] if begin_with > 0 else here
                assert here == (parents[row] if row > root else row - 1 if row > first else -1)
                here = row if advances else here
                if row == root:
                    last_known = row
                if save_in >= 0:
                    copies[save_in] = here
    assert most > 3


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.soak)])
def test_our_own_kernels_throughout(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding compares the logits with transformers' own, and chunks, a chain, trees and accepted paths with token by token."""
    monkeypatch.setattr(runner_module, "find_violation", lambda product, counts: None)
    monkeypatch.setattr(runner_module, "LONG_TEXT", 18)
    monkeypatch.setattr(Runner, "self_test", lambda self: self.rows_are_independent(self._logits_of, 6))
    runner = bind(device, dtype, max_len=32)
    assert isinstance(runner._decoder, CudaDecoder)
    assert (runner.exactness, runner.violations) == ("bitwise", [])
    assert runner.is_recurrent
    assert runner.shapes == [(1, 16)]
    runner.pool.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_hybrids_with_experts(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's choice of experts, and the shared expert's gate, are its own: paths of a tree against the same tokens as a prompt."""
    small.take_on_trust(monkeypatch)
    monkeypatch.setattr(runner_module, "find_dependence", lambda product, thoroughly: None)
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20}
    model = small.make_model("qwen3_5_moe_text", **HYBRID | small.NARROW | experts).to(device, dtype)
    runner = CudaRunner(model, CudaOptions(max_len=32, max_seqs=2, max_rows=16, kv_bytes=1 << 22, max_depth=9))
    assert isinstance(runner._decoder, CudaDecoder)
    assert all(isinstance(layer.mlp, ExpertLayer) for layer in runner._decoder.layers)
    assert (runner.is_recurrent, runner.has_experts) == (True, True)
    slots, prompt = [runner.reserve_free_slot(16) for _ in range(2)], np.array([5, 9, 5], np.int32)
    runner.run([Span(slots[0], prompt[:-1], 0, logits=0)])
    logits = runner.run([Span(slots[0], prompt[-1:], 2, small.branching([7, 8]))])
    for row, path in ((2, [7, 9]), (3, [7, 8])):
        (alone,) = runner.run([Span(slots[1], np.array([5, 9, 5, *path], np.int32), 0)])
        assert torch.equal(alone, logits[row])


def test_a_path_that_is_not_replayed_is_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "find_violation", lambda product, counts: None)
    monkeypatch.setattr(Runner, "self_test", lambda self: True)
    monkeypatch.setattr(CudaRunner, "_test_pieces", lambda self, n: True)
    monkeypatch.setattr(CudaRecurrentPool, "note_path", lambda *_: None)
    runner = bind(device)
    assert runner.exactness == "numerical"
    assert runner.violations == ["the walk, the move of keys and values, or the replay of an accepted tree"]


def test_random_trees_have_the_logits_of_their_paths(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trees in a pass beside a prompt, after a pass of which a part was accepted, against each path as a prompt."""
    small.take_on_trust(monkeypatch)
    runner, rng = bind(device, max_len=96, max_rows=32), np.random.default_rng(2)
    texts = [rng.integers(0, small.VOCAB, n).astype(np.int32) for n in (2, 5)]
    first, second = ([make_tree(rng, N_NODES) for _ in texts] for _ in range(2))
    slots = [runner.reserve_free_slot(60) for _ in range(3)]
    for slot, text in zip(slots, texts, strict=False):
        runner.run([Span(slot, text[:-1], 0, logits=0)])
    batch = pack([Span(slot, text[-1:], len(text) - 1, tree) for slot, text, tree in zip(slots, texts, first, strict=False)], runner.pool)
    output = runner.forward(batch)
    for b, tree in enumerate(first):
        path = [N_NODES - 1]  # it is as if the last node were accepted
        while tree.parents[path[0]] >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        output.commit([(b, len(texts[b]), len(texts[b]) + np.array(path))])
        texts[b] = np.concatenate([texts[b], tree.tokens[path], [b + 3]]).astype(np.int32)
    spans = [Span(slots[b], texts[b][-1:], len(texts[b]) - 1, second[b]) for b in range(2)]
    logits = runner.run([Span(slots[2], texts[1], 0), *spans])[1:]
    for b, tree in enumerate(second):
        for node in sorted(set(range(N_NODES)) - set(tree.parents.tolist())):
            path, at = [], node
            while at >= 0:
                path.insert(0, int(tree.tokens[at]))
                at = int(tree.parents[at])
            (alone,) = runner.run([Span(slots[2], np.concatenate([texts[b], np.array(path, np.int32)]), 0)])
            assert torch.equal(alone, logits[(1 + N_NODES) * b + 1 + node]), (b, node)


def make_pool(n_snapshots: int) -> CudaRecurrentPool:
    shape = DeltaShape(2, 1, 2, 4, 8, 24, 44, 44)
    return CudaRecurrentPool(
        [(1, 8)], 32, 4, 8 * BLOCK, dtype=torch.float32, device=torch.device("cpu"), shape=shape, n_snapshots=n_snapshots
    )


def stage(pool: CudaRecurrentPool, slot: int, n: int, start: int = 0) -> np.ndarray:
    """Note a pass over n tokens of a sequence; its words in `RecurrentRows.spans`."""
    batch = pack([Span(slot, np.zeros(n, np.int32), start)], pool)
    spans, table = np.zeros((1, 72), np.int32), np.zeros((n, ROW_WORDS), np.int32)
    pool.stage_batch(batch, spans, table)
    pool.note_pass(batch)
    return spans[0]


def test_a_prefix_is_taken_over_up_to_a_snapshot() -> None:
    pool = make_pool(2)
    hashes = BlockHashes("", np.arange(4 * BLOCK, dtype=np.int32)).hashes
    assert pool.admit(0, [], 4 * BLOCK) == 0
    boundary, snapshot = stage(pool, 0, 2 * BLOCK + 3)[6:8]
    assert boundary == 2 * BLOCK - 1
    for states in pool.states:
        states.kept_state[snapshot], states.kept_tails[snapshot] = 7.0, 5.0
    pool.register(0, hashes)
    assert pool.admit(1, hashes, 5 * BLOCK) == 2, "there are four blocks, and a state behind the second"
    assert pool.at[1] == 2 * BLOCK
    assert all((states.state[1] == 7.0).all() and (states.tails[1] == 5.0).all() for states in pool.states)
    assert stage(pool, 1, 1, 2 * BLOCK)[4:8].tolist() == [0, 0, -1, -1]
    with pytest.raises(AssertionError, match=f"a state at {2 * BLOCK + 1} is continued at {2 * BLOCK}"):
        stage(pool, 1, 1, 2 * BLOCK)
    for slot in (0, 1):
        pool.release(slot)
    assert pool.admit(2, hashes[:1], 5 * BLOCK) == 0
    pool.release(2)
    for text in range(2):  # the oldest of three snapshots goes
        others = BlockHashes(str(text), np.arange(BLOCK, dtype=np.int32)).hashes
        assert pool.admit(3, [], BLOCK) == 0
        stage(pool, 3, BLOCK)
        pool.register(3, others)
        pool.release(3)
    assert pool.admit(1, hashes, 5 * BLOCK) == 0
    pool.check_integrity()


def test_a_snapshot_goes_from_one_pool_to_another() -> None:
    one, other = make_pool(2), make_pool(2)
    hashes = BlockHashes("", np.arange(2 * BLOCK, dtype=np.int32)).hashes
    one.admit(0, [], 2 * BLOCK)
    snapshot = stage(one, 0, 2 * BLOCK)[7]
    for layer, states in enumerate(one.states):
        states.kept_state[snapshot], states.kept_tails[snapshot] = 7.0 + layer, 5.0 - layer
    one.register(0, hashes)
    body = one.read_state(hashes[1])
    assert body is not None
    assert one.read_state(hashes[0]) is None
    for digest in hashes:
        other.adopt(digest)
    other.write_state(hashes[1], body)
    assert (other.has_state(hashes[0]), other.has_state(hashes[1])) == (False, True)
    assert other.admit(3, hashes, 3 * BLOCK) == 2
    for layer, states in enumerate(other.states):
        assert (states.state[3] == 7.0 + layer).all()
        assert (states.tails[3] == 5.0 - layer).all()


@pytest.fixture(scope="module")
def on_device(device: str) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as made:
        small.take_on_trust(made)
        with small.make_engine(small.make_model("qwen3_5_text", **HYBRID | small.NARROW), device, made) as made_engine:
            made_engine.core.cost = tiny.FreeRows()
            yield made_engine
            made_engine.runner.pool.check_integrity()
            assert made_engine.runner.pool.n_available == made_engine.runner.pool.n_blocks


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [np.tile(rng.integers(3, small.VOCAB, 5), 8)[:n].tolist() for n in (5, 9, BLOCK + 1)]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    "params",
    [{"temperature": 0}, pytest.param({"temperature": 0.7, "top_k": 20, "seed": 3}, marks=pytest.mark.soak)],
    ids=["greedy", "sampled"],
)
def test_neither_drafts_nor_mates_nor_prefixes_change_a_token(on_device: Engine, params: dict[str, Any]) -> None:
    how = SamplingParams(max_tokens=4, ignore_eos=True, **params)
    plain = [on_device.complete(prompt, how, speculation=False, prefix_cache=False) for prompt in prompts()]
    together = on_device.complete(prompts(), how, prediction=plain[2].token_ids)
    again = on_device.complete(prompts()[2], how, prediction=plain[2].token_ids)
    assert tokens(together) == tokens(plain)
    assert again.token_ids == plain[2].token_ids
    assert again.cached_tokens == BLOCK
    assert again.stats.accepted > 0


def test_what_a_failed_pass_left_is_computed_again(on_device: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    how = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    plain = [on_device.complete(prompt, how, speculation=False, prefix_cache=False) for prompt in prompts()[:2]]
    core, launch, n_passes = on_device.core, CudaRunner._launch, 0

    def fails_once(self: CudaRunner, batch: Batch) -> CudaOutput:
        nonlocal n_passes
        n_passes += 1
        output = launch(self, batch)
        if n_passes == 2:  # all layers' states have advanced
            raise torch.OutOfMemoryError("no memory")
        return output

    monkeypatch.setattr(CudaRunner, "_launch", fails_once)
    monkeypatch.setattr(core.scheduler, "max_rows", core.scheduler.max_rows)
    monkeypatch.setattr(core, "_max_rows", core._max_rows)
    preempted = on_device.status().preemptions
    assert tokens(on_device.complete(prompts()[:2], how, prediction=plain[1].token_ids, prefix_cache=False)) == tokens(plain)
    assert on_device.status().preemptions > preempted


def test_what_cannot_be_computed_is_refused(on_device: Engine, device: str) -> None:
    with pytest.raises(UnsupportedModelError, match="beam search"):
        on_device.beam_search([1, 2, 3], width=2, max_tokens=2)
    with pytest.raises(OutOfMemoryError, match="states"):
        bind(device, kv_bytes=1 << 12)
    with pytest.raises(UnsupportedModelError, match="size 24; on CUDA"):
        CudaRunner(
            small.make_model("qwen3_5_text", **HYBRID | {"linear_key_head_dim": 24}).to(device),
            CudaOptions(max_len=32, max_seqs=2, max_rows=8, kv_bytes=1 << 21, max_depth=9),
        )
    for family, reason in (
        ("lfm2", "layers 0, 1, 3, 4 are of type 'conv'"),
        ("granitemoehybrid", "layers 0, 3 are of type 'linear_attention'"),
        ("falcon_h1", "layers 0, 1 are of type 'hybrid'"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{reason}.*the CPU computes them"):
            CudaRunner(tiny.tiny_model(family).to(device), CudaOptions(max_len=32, max_seqs=2, max_rows=8, kv_bytes=1 << 21, max_depth=9))


@pytest.mark.soak
def test_gguf_files_keep_their_blocks(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of keys are repeated, and the gates are float32 beside matrices in blocks."""
    small.take_on_trust(monkeypatch)
    add = gguf.GGUFWriter.add_tensor

    def quantise(writer: gguf.GGUFWriter, name: str, weights: np.ndarray) -> None:
        if weights.ndim < 2 or any(kind in name for kind in ("alpha", "beta", "conv1d")):
            return add(writer, name, weights)
        kind = gguf.GGMLQuantizationType.Q8_0
        return add(writer, name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", quantise)
    monkeypatch.setattr(tiny_architectures, "LAYERS", 4)
    path = tiny_architectures.write(tmp_path / "m.gguf", "qwen35")
    logits = []
    for packed in (True, False):
        runner = CudaRunner(
            load(path, torch.float32, device, packed), CudaOptions(max_len=32, max_seqs=2, max_rows=8, kv_bytes=1 << 22, max_depth=9)
        )
        shape = runner._delta_shape
        assert shape is not None
        assert (shape.row_width == shape.gates_width) == (not packed)
        slot = runner.reserve_free_slot(6)
        logits.append(runner.run([Span(slot, np.arange(6, dtype=np.int32), 0, logits=6)]))
    assert torch.equal(*logits)

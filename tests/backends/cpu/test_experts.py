"""Mixtures of experts: which are chosen, whatever the logits; the same bits for any rows, threads and precision; transformers' own text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.experts_modules import find_router_options
from ngramspec.backends.cpu.llama_runner import CpuOptions
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.engine.llm_engine import Engine
from ngramspec.models.expert_weights import join_experts, split_experts, stack_experts, transpose_experts
from ngramspec.models.loader import open_model
from ngramspec.models.parameters import MemoryTensor
from ngramspec.models.reference import find_sure_rows
from ngramspec.models.tensor_source import to_q8_source
from ngramspec.sampling.batch import Span
from ngramspec.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {"max_len": 200, "max_seqs": 3, "max_rows": 64, "kv_bytes": 1 << 23, "code": cache_dir() / "code"}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen2_moe": {},
    "gpt_oss": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "deepseek_v2": {
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 48,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3, "residual_multiplier": 0.5},
}


def model_of(family: str) -> Any:
    return tiny.tiny_model(family, std=0.15, **{"num_hidden_layers": 8, **FAMILIES[family]} | {"num_hidden_layers": 8})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    where = tmp_path_factory.mktemp("folders")
    return lambda family: tiny.save_model(where, family, lambda: model_of(family))


@settings(max_examples=200, deadline=None)
@given(
    logits=arrays.arrays(np.float32, st.integers(1, 40), elements=st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0, 2.5, float("nan"), 80.0])),
    share=st.floats(0, 1), normalise=st.booleans(), sigmoid=st.booleans(),
)  # fmt: skip
def test_the_greatest_logits_win_and_equal_ones_by_lowest_id(logits: np.ndarray, share: float, normalise: bool, sigmoid: bool) -> None:
    n = len(logits)
    k = max(1, int(n * share))
    options = np.array([n, k, moe.SIGMOID if sigmoid else moe.SOFTMAX, normalise, moe.NO_SHARED, *moe.ONE_GROUP], np.int64)
    ids, weights = np.full(k, -1, np.int32), np.zeros(k + 1, np.float32)
    moe.choose_experts(logits, np.zeros(0, np.float32), options, np.float32(1), ids, weights)
    assert len(set(ids.tolist())) == k
    assert ids.min() >= 0
    assert ids.max() < n
    if np.isnan(logits).any():  # any choice, but one that reads no other memory
        return
    expected = np.argsort(-logits, kind="stable")[:k]
    assert ids.tolist() == expected.tolist()
    wide = logits.astype(np.float64)
    shares = 1 / (1 + np.exp(-wide)) if sigmoid else np.exp(wide - wide.max())
    total = shares[expected].sum() if normalise else (1.0 if sigmoid else shares.sum())
    np.testing.assert_allclose(weights[:k], shares[expected] / total, rtol=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    logits=arrays.arrays(np.float32, 12, elements=st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0, 2.5])),
    n_groups=st.sampled_from([2, 3, 4, 6]), top_groups=st.integers(1, 3), pairs=st.booleans(), corrected=st.booleans(),
)  # fmt: skip
def test_experts_are_chosen_in_the_best_groups(logits: np.ndarray, n_groups: int, top_groups: int, pairs: bool, corrected: bool) -> None:
    size, top_groups = 12 // n_groups, min(top_groups, n_groups)
    k = min(3, top_groups * size)
    correction = np.float32(0.125) * (np.arange(12, dtype=np.float32) % 5) if corrected else np.zeros(0, np.float32)
    groups = moe.ExpertGroups(n_groups, top_groups, pairs)
    options = np.array([12, k, moe.SIGMOID if corrected else moe.SOFTMAX, True, moe.NO_SHARED, *groups], np.int64)
    ids, weights = np.full(k, -1, np.int32), np.zeros(k + 1, np.float32)
    moe.choose_experts(logits, correction, options, np.float32(1), ids, weights)
    wide = logits.astype(np.float64)
    scores = 1 / (1 + np.exp(-wide)) + correction if corrected else np.exp(wide - wide.max())
    best = np.sort(scores.reshape(n_groups, size), axis=1)[:, -1 - pairs :].sum(axis=1)
    chosen = np.argsort(-best.round(6), kind="stable")[:top_groups]
    allowed = np.repeat(np.isin(np.arange(n_groups), chosen), size)
    assert ids.tolist() == np.argsort(np.where(allowed, -scores.round(6), np.inf), kind="stable")[:k].tolist()


def tensor(values: np.ndarray) -> MemoryTensor:
    return MemoryTensor(kind="F32", shape=values.shape, tensor=torch.from_numpy(values))


def test_views_of_experts_are_the_same_numbers() -> None:
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 3, 5, 7)).astype(np.float32)
    joined, turns = np.concatenate([gate, up], axis=1), np.stack([gate, up], axis=2).reshape(3, 10, 7)
    views = [
        (stack_experts([tensor(each) for each in gate]), gate),
        (join_experts(tensor(gate), tensor(up)), joined),
        (split_experts(tensor(joined), interleaved=False)[1], up),
        (split_experts(tensor(turns), interleaved=True)[1], up),
        (split_experts(join_experts(tensor(gate), tensor(up)), interleaved=False)[0], gate),
        (join_experts(tensor(gate), tensor(up), in_turns=True), turns),
        (transpose_experts(tensor(np.ascontiguousarray(gate.transpose(0, 2, 1)))), gate),
    ]
    for view, values in views:
        assert np.array_equal(view.float32(), values)
        flat = values.reshape(-1, 7)
        for first, end in ((0, 1), (3, 8), (4, 15), (14, 15)):
            if end <= len(flat):
                assert np.array_equal(view.read_rows(first, end).view(np.float32), flat[first:end])


def test_rows_whose_choice_rounding_changes_are_left_out() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 1.0, 1.001, 0.0], [0.0, 2.0, 3.0, -5.0], [1.0, 1.0, 1.0, 1.0]])
    assert find_sure_rows(logits, 2).tolist() == [True, False, True, False]
    assert find_sure_rows(logits, 4).all()
    assert find_sure_rows(torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.999, 0.0]]), 1).tolist() == [False, True], "a quarter at least"


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_that_of_transformers(family: str, folder: Callable[[str], Path]) -> None:
    """Greedy, with drafts and without, one family far into a text; other sequences and a cached prefix change no token."""
    prompt, n = [5, 17, 88, 3, 42, 5, 17, 88], 200 if family == "qwen3_moe" else 60
    with torch.inference_mode():
        made = (
            model_of(family)
            .generate(
                torch.tensor([prompt]), max_new_tokens=n, min_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=tiny.EOS
            )[0, len(prompt) :]
            .tolist()
        )
    with Engine(str(folder(family)), max_model_len=256, max_seqs=4) as engine:
        assert engine.exactness == "bitwise"
        params = SamplingParams(max_tokens=n, ignore_eos=True)
        plain = engine.complete(prompt, params, speculation=False).token_ids
        assert plain == made
        assert engine.complete(prompt, params).token_ids == made
        sampled = SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True)
        asked = [prompt, [*prompt, 9, 8], prompt[:3]]
        alone = [engine.complete(p, sampled, speculation=False).token_ids for p in asked]
        assert [c.token_ids for c in engine.complete(asked, sampled)] == alone


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_experts_in_8_bit_blocks_have_the_same_bits_for_any_rows_and_threads(family: str, folder: Callable[[str], Path]) -> None:
    opened = open_model(str(folder(family)))
    source = to_q8_source(opened.source)
    runner = CpuRunner(opened.model, CpuOptions(**OPTIONS), source)
    assert (runner.precision, runner.exactness) == ("int8", "bitwise")
    assert runner.decoder is not None
    router = runner.weight_map.layers[-1].experts.router[0]  # type: ignore[union-attr]
    assert source[router].kind == "F32"
    tokens = (np.arange(70) * 37 % 250).astype(np.int32)
    assert runner.pool.reserve(0, 70)
    steps = np.stack([runner.run([Span(0, tokens[i : i + 1], i)])[0].numpy() for i in range(70)])
    before = numba.get_num_threads()
    try:
        for threads in (1, 2):
            numba.set_num_threads(threads)
            for size in (2, 3, 7, 33):
                for a in range(0, 70, size):
                    b = min(70, a + size)
                    assert np.array_equal(runner.run([Span(0, tokens[a:b], a, logits=b - a)]).numpy(), steps[a:b])
    finally:
        numba.set_num_threads(before)


def test_experts_are_read_from_single_tensors_a_few_rows_at_a_time(folder: Callable[[str], Path]) -> None:
    opened = open_model(str(folder("qwen3_moe")))
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    expected = dict(model_of("qwen3_moe").named_parameters())
    assert opened.source.keys() == expected.keys()
    for name, parameter in expected.items():
        assert np.array_equal(opened.source[name].float32(), parameter.numpy()), name


@pytest.mark.parametrize("hidden", [64, 320])
def test_how_groups_are_scored_is_found_out(hidden: int) -> None:
    """With few rows, the best expert of a group and the sum of its two best choose the same experts."""
    model = tiny.tiny_model("deepseek_v3", hidden_size=hidden, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2)
    found = find_router_options(model.base_model.layers[-1].mlp.gate)
    assert found is not None
    assert found[0][moe.N_GROUPS :].tolist() == [4, 2, True]


def test_a_correction_is_added_to_shares() -> None:
    logits, correction = np.array([3.0, 2.0, 1.0, 0.0], np.float32), np.array([0, 0, 0, 0.6], np.float32)
    options = np.array([4, 2, moe.SOFTMAX, False, moe.NO_SHARED, *moe.ONE_GROUP], np.int64)
    ids, weights = np.zeros(2, np.int32), np.zeros(3, np.float32)
    moe.choose_experts(logits, correction, options, np.float32(1), ids, weights)
    shares = np.exp(logits) / np.exp(logits).sum()
    assert ids.tolist() == [0, 3], "by logits, the last expert would be the third choice"
    np.testing.assert_allclose(weights[:2], shares[[0, 3]], rtol=1e-6)

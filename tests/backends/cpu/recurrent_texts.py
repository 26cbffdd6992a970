"""What every model with recurrent layers, or with layers that differ, must keep: transformers' texts, the same with drafts and in batches,
its states, and its weight map."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_architectures
import torch
from transformers import PreTrainedModel

from ngramspec import Engine, SamplingParams
from ngramspec.backends.cpu.llama_runner import CpuOptions
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.backends.cpu.weight_map import WeightMap
from ngramspec.backends.cpu.weight_map_check import check_weight_map
from ngramspec.models.loader import load_model
from ngramspec.models.parameters import ParamsSource
from ngramspec.models.tensor_source import TensorSource

PROMPT = [7, 8, 9, 10] * 5


def check_greedy_text(path: str, model: PreTrainedModel, n: int, *, fewest: int = 11) -> None:
    """Complete `PROMPT` greedily, without drafts and with transformers' text as a draft: both times that must come, n tokens, `fewest` of
    them different."""
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=n, do_sample=False)[0, len(PROMPT) :].tolist()
    assert len(expected) == n
    assert len(set(expected)) >= fewest, "no text that says anything"
    params = SamplingParams(max_tokens=n, ignore_eos=True)
    with Engine(path, max_model_len=250) as engine:
        engine.finish_compiling(lambda _: None)  # until then nothing is drafted
        engine.core.cost = tiny.FreeRows()
        assert engine.complete(PROMPT, params, speculation=False).token_ids == expected
        drafted = engine.complete(PROMPT, params, prediction=expected)
        assert drafted.token_ids == expected
        assert drafted.stats.accepted > n // 2


def write_untied(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, PreTrainedModel]:
    """Write a GGUF file whose head is a matrix of its own, since else a token repeats itself; return its path and transformers' model."""
    monkeypatch.setitem(tiny_architectures.CASES, "untied", (*tiny_architectures.CASES[case][:3], True))
    path = str(tiny_architectures.write(folder / "model.gguf", "untied"))
    return path, load_model(path, cache_dir=folder / "cache").model


def check_drafts_and_batches(path: str, temperature: float, accepted: int) -> None:
    """Complete eight prompts at a time with n-grams: the texts must be those of each alone, with more than `accepted` draft tokens."""
    rng = np.random.default_rng(1)
    prompts = [np.resize(rng.integers(0, 250, int(rng.integers(3, 20))), int(rng.integers(30, 140))).tolist() for _ in range(8)]
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    with Engine(path, max_model_len=250, max_seqs=8, max_rows=40, syntax=False) as engine:
        expected = [engine.complete(prompt, params, speculation=False).token_ids for prompt in prompts]
        assert engine.exactness == "bitwise"
        assert engine.runner.is_recurrent
        engine.core.cost = tiny.FreeRows()
        got = engine.complete(prompts, params)
        assert [each.token_ids for each in got] == expected
        assert sum(each.stats.accepted for each in got) > accepted


def check_states_are_kept(model: Any) -> None:
    """Complete 70 prompts twice: the second time each must begin at the state that the prefix cache has."""
    prompts, params = [[i, *range(50, 90)] for i in range(70)], SamplingParams(max_tokens=1, ignore_eos=True)
    with Engine(model, max_model_len=64, max_seqs=64, kv_memory=64 << 20) as engine:
        assert sum(each.cached_tokens for each in engine.complete(prompts, params)) == 0
        assert [each.cached_tokens for each in engine.complete(prompts, params)] == [32] * 70


def check_own_text_is_kept(model: Any, prediction: bool) -> None:
    """Go on after a text that the model wrote, with few drafts or many: the state near its end must be there, and be the right one."""
    prompt, params, short = (
        [7, *range(50, 90)],
        SamplingParams(max_tokens=120, ignore_eos=True),
        SamplingParams(max_tokens=40, ignore_eos=True),
    )
    with Engine(model, max_model_len=250, kv_memory=64 << 20) as engine:
        engine.core.cost = tiny.FreeRows()
        text = engine.complete(prompt, params, speculation=False, prefix_cache=False).token_ids
        first = engine.complete(prompt, params, prediction=text if prediction else None)
        assert first.token_ids == text
        for n in (120, 80):  # of the second one, the state after the prompt is all that is there
            turn = [*prompt, *text[:n], 3, 1]
            again, alone = engine.complete(turn, short), engine.complete(turn, short, prefix_cache=False)
            assert again.token_ids == alone.token_ids
            assert again.cached_tokens == 32 if n == 80 else again.cached_tokens > len(prompt) + n - 96


def read_checked_map(model: PreTrainedModel) -> tuple[WeightMap, TensorSource]:
    """Return the weight map of a model and its weights: the map must be the same after a cache, and fit the weights."""
    source = ParamsSource(copy.deepcopy(model))  # a runner takes its weights
    found = CpuRunner(model, CpuOptions(max_len=64, max_seqs=2, max_rows=16, kv_bytes=1 << 22)).weight_map
    assert found is not None
    again = WeightMap.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    check_weight_map(again, source)
    return found, source

"""Layers whose heads differ by layer, with shared keys, inputs per layer and experts beside MLPs, against transformers' own long texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from recurrent_texts import PROMPT, check_greedy_text, read_checked_map, write_untied
from transformers import PreTrainedModel

from ngramspec import Engine, SamplingParams
from ngramspec.backends.cpu.weight_map_check import check_weight_map

LAYERS = {"num_hidden_layers": 8, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "num_kv_shared_layers": 0}
PLAIN = LAYERS | {"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40}
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": PLAIN, "inputs and shared keys": LAYERS | {"num_kv_shared_layers": 4, "attention_k_eq_v": False}, "experts": PLAIN | EXPERTS,
}  # fmt: skip


def make_model(name: str) -> PreTrainedModel:
    return tiny.tiny_model("gemma4_text", std=0.15, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_greedy_text_is_transformers(name: str, tmp_path: Path) -> None:
    path = tiny.save_model(tmp_path, name, lambda: make_model(name))
    check_greedy_text(str(path), make_model(name), 80)


@pytest.mark.parametrize("case", ["gemma4, shared", "gemma4, experts"])
def test_a_greedy_text_of_a_gguf_file_is_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_greedy_text(*write_untied(case, tmp_path, monkeypatch), 80)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_eight_bit_products_and_later_starts_change_no_token(temperature: float, tmp_path: Path) -> None:
    """Products of 8 bits, whose scales would show a number that another row or layer has left in a buffer."""
    path = str(tiny.save_model(tmp_path, "model", lambda: make_model("inputs and shared keys")))
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, seed=2)
    prompts, options = [PROMPT, [9, 8], [7, 3, 5] * 30], {"quantize": "q8_0", "max_model_len": 200, "max_seqs": 4, "max_rows": 20}
    with Engine(path, **options) as engine:  # type: ignore[arg-type]
        assert (engine.runner.precision, engine.exactness) == ("int8", "bitwise")
        alone = [engine.complete(prompt, params, speculation=False).token_ids for prompt in prompts]
    with Engine(path, **options) as engine:  # type: ignore[arg-type]
        engine.core.cost = tiny.FreeRows()
        got = engine.complete(prompts, params)
        assert [each.token_ids for each in got] == alone
        again = engine.complete(prompts[2], params)
        assert again.token_ids == alone[2]
        assert again.cached_tokens >= 64


def test_a_map_that_does_not_fit_the_weights_is_refused() -> None:
    """It is read from a cache, and a pass reads addresses unchecked."""
    found, source = read_checked_map(make_model("inputs and shared keys"))
    layers = found.layers
    own, shared = layers[0].heads, layers[6].heads
    assert own is not None
    assert shared is not None
    assert shared.owner == 2
    end = layers[0].end
    assert end is not None
    for i, changes in (
        (0, {"heads": None}), (0, {"heads": own._replace(owner=3)}), (0, {"heads": own._replace(n_kv=3)}),
        (0, {"heads": own._replace(n_pairs=17)}), (0, {"heads": own._replace(head_dim=64)}), (6, {"heads": shared._replace(owner=7)}),
        (6, {"heads": shared._replace(owner=3)}), (0, {"heads": own._replace(has_values=False)}), (0, {"end": end._replace(gate=None)}),
        (0, {"end": None}), (0, {"post_norms": None}), (0, {"end": end._replace(experts=("a",) * 5)}),
        (0, {"end": end._replace(norm=layers[3].head_norms and layers[3].head_norms[0])}),
    ):  # fmt: skip
        wrong = [replace(layer, **changes) if j == i else layer for j, layer in enumerate(layers)]  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"heads|is wanted|has an end|some layers only|do not fit|an MLP of"):
            check_weight_map(replace(found, layers=wrong), source)
    assert found.inputs is not None
    with pytest.raises(ValueError, match="is wanted"):
        check_weight_map(replace(found, inputs=found.inputs._replace(table=found.embedding)), source)

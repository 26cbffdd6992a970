"""Layers with Mamba-2: long texts of folders with drafts, in the compiled pass, against transformers' own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from recurrent_texts import (
    check_drafts_and_batches,
    check_greedy_text,
    check_own_text_is_kept,
    check_states_are_kept,
    read_checked_map,
    write_untied,
)
from transformers import PreTrainedModel

from ngramspec.backends.cpu.llama_layers import ShortConvOptions
from ngramspec.backends.cpu.llama_runner import CpuOptions
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.backends.cpu.weight_map_check import check_weight_map
from ngramspec.errors import UnsupportedModelError

LAYERS = {"num_hidden_layers": 8, "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 2}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.2, "attention_multiplier": 0.2}
SIZES = {"mamba_n_heads": 16, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "position_embedding_type": "rope"}
BLOCKS = ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp", "linear_attention", "linear_attention", "mlp"]
# transformers bounds dt from below in prompts, not while it decodes.
NEMOTRON = {"mamba_num_heads": 16, "mamba_head_dim": 8, "ssm_state_size": 16, "time_step_min": 1e-9}
NEMOTRON_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "routed_scaling_factor": 2.5}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("granitemoehybrid", LAYERS | SIZES | GRANITE),
    "experts": ("granitemoehybrid", LAYERS | GRANITE | EXPERTS),
    "beside attention": ("falcon_h1", {"num_hidden_layers": 8}),
    "bamba": ("bamba", {"num_hidden_layers": 8, "attn_layer_indices": [2, 5]} | SIZES),
    "nemotron": ("nemotron_h", NEMOTRON | {"layers_block_type": BLOCKS}),
    "nemotron experts": (
        "nemotron_h",
        NEMOTRON
        | NEMOTRON_EXPERTS
        | {"layers_block_type": [kind.replace("mlp", "moe") for kind in BLOCKS], "moe_shared_expert_intermediate_size": 48},
    ),
}


def make_model(name: str) -> PreTrainedModel:
    family, options = OPTIONS[name]
    return tiny.tiny_model(family, std=0.15, **options)


@pytest.fixture(scope="module", params=OPTIONS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("models"), name, lambda: make_model(name))


def test_a_greedy_text_is_transformers(name: str, folder: Path) -> None:
    check_greedy_text(str(folder), make_model(name), 200 if name in ("dense", "beside attention") else 60)


@pytest.mark.parametrize(
    "case",
    ["granitehybrid", "granitehybrid, rope", "granitehybrid, experts", "falcon-h1", "falcon-h1, norm", "nemotron_h", "nemotron_h_moe"],
)
def test_a_greedy_text_of_a_gguf_file_is_transformers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_greedy_text(*write_untied(case, tmp_path, monkeypatch), 60, fewest=6)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_ngrams_and_batches_change_no_token(folder: Path, temperature: float) -> None:
    check_drafts_and_batches(str(folder), temperature, accepted=0)


def test_a_map_that_does_not_fit_the_weights_is_refused() -> None:
    """It is read from a cache, and a pass reads addresses unchecked."""
    found, source = read_checked_map(tiny.tiny_model("granitemoehybrid"))
    options, mamba = found.options, found.options.mamba
    assert mamba is not None
    for wrong in (
        options._replace(mamba=None), options._replace(n_heads=2), options._replace(mamba=mamba._replace(n_taps=3)),
        options._replace(mamba=mamba._replace(state_size=18)), options._replace(mamba=mamba._replace(n_heads=9)),
        options._replace(mamba=mamba._replace(head_dim=24)), options._replace(mamba=mamba._replace(n_groups=0)),
        options._replace(short_conv=ShortConvOptions(64, 3)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"Mamba-2|is wanted|are wanted|several kinds"):
            check_weight_map(replace(found, options=wrong), source)


def test_a_map_with_mamba_beside_attention_that_does_not_fit_is_refused() -> None:
    found, source = read_checked_map(tiny.tiny_model("falcon_h1"))
    first, *others = found.layers
    assert first.beside is not None
    layers = (
        replace(first, beside=None),
        replace(first, beside=first.beside[:3]),
        replace(first, beside=first.beside[::-1]),
        replace(first, mamba=None),
    )
    wrongs = [replace(found, layers=[layer, *others]) for layer in layers]
    for wrong in (replace(found, options=found.options._replace(beside=False)), *wrongs):
        with pytest.raises(ValueError, match=r"beside attention|is wanted|are wanted|zip\(\)"):
            check_weight_map(wrong, source)


def test_a_config_without_bounds_of_dt_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="time_step_limit is null"):
        CpuRunner(
            tiny.tiny_model("granitemoehybrid", time_step_limit=None), CpuOptions(max_len=64, max_seqs=2, max_rows=16, kv_bytes=1 << 22)
        )


def test_states_of_many_prompts_are_kept() -> None:
    check_states_are_kept(tiny.tiny_model("granitemoehybrid"))


def test_the_state_after_drafted_text_is_kept() -> None:
    check_own_text_is_kept(tiny.tiny_model("granitemoehybrid"), prediction=True)

"""Layers with a short convolution: a long text from a folder and with drafts, in the compiled pass, against transformers' own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from recurrent_texts import check_drafts_and_batches, check_greedy_text, check_own_text_is_kept, check_states_are_kept, read_checked_map

from ngramspec.backends.cpu.weight_map_check import check_weight_map

LAYERS = {"num_hidden_layers": 8, "layer_types": ["conv", "conv", "full_attention", "conv"] * 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("models"), "lfm2", lambda: tiny.tiny_model("lfm2", std=0.15, **LAYERS))


def test_a_greedy_text_is_transformers(folder: Path) -> None:
    check_greedy_text(str(folder), tiny.tiny_model("lfm2", std=0.15, **LAYERS), 200)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_ngrams_and_batches_change_no_token(folder: Path, temperature: float) -> None:
    check_drafts_and_batches(str(folder), temperature, accepted=10)


def test_a_map_that_does_not_fit_the_weights_is_refused() -> None:
    """It is read from a cache, and a pass reads addresses unchecked."""
    found, source = read_checked_map(tiny.tiny_model("lfm2"))
    options, conv = found.options, found.options.short_conv
    assert conv is not None
    for wrong in (
        options._replace(short_conv=None), options._replace(short_conv=conv._replace(n_taps=4)),
        options._replace(short_conv=conv._replace(n_channels=32)), options._replace(n_heads=2),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"short convolutions|is wanted"):
            check_weight_map(replace(found, options=wrong), source)


def test_small_states_of_many_prompts_are_kept() -> None:
    check_states_are_kept(tiny.tiny_model("lfm2"))


def test_the_small_state_after_written_text_is_kept() -> None:
    check_own_text_is_kept(tiny.tiny_model("lfm2"), prediction=False)

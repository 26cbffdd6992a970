"""Random weights in known shapes: the published sizes, weights that behave, errors that name what is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from ngramspec import Engine, SamplingParams
from ngramspec.errors import ModelNotFoundError, OutOfMemoryError, RemoteCodeError, TokenizerError, UnsupportedModelError
from ngramspec.models import loader, memory, random_weights, shapes
from ngramspec.models.loader import load_model, load_tokenizer

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 255,
}

PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Qwen2.5-Coder-0.5B": 494_032_768,
    "Qwen2.5-Coder-7B": 7_615_616_512,
    "LFM2-350M": 354_483_968,
    "LFM2-1.2B": 1_170_340_608,
    "SmolLM2-135M": 134_515_008,
}
"""As their safetensors have them."""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_named_shape_has_the_published_number_of_parameters(name: str) -> None:
    model = random_weights.empty_model(shapes.read_shape(f"random:{name}"), torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    assert random_weights.parameter_bytes(model) == 2 * PARAMETERS[name]
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_angles_are_those_of_the_published_scaling() -> None:
    model = random_weights.empty_model(shapes.read_shape("random:Llama-3.1-8B"), torch.bfloat16)
    angles = model.base_model.rotary_emb.inv_freq
    plain = 500000.0 ** -(torch.arange(0, 128, 2) / 128)
    assert angles.dtype == torch.float32
    torch.testing.assert_close(angles[0], plain[0])
    torch.testing.assert_close(angles[-1], plain[-1] / 8)


def test_the_model_is_reproducible_tied_and_quiet(config_file: Path) -> None:
    loaded, again = load_model(f"random:{config_file}"), load_model(f"random:{config_file.parent}")
    assert loaded.tokenizer is None
    assert loaded.name == f"random:{config_file}"
    assert loaded.eos_token_ids == (255,)
    model = loaded.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.model.parameters(), strict=True))
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert load_model(f"random:{config_file}", dtype=torch.bfloat16).model.dtype == torch.bfloat16


@torch.inference_mode()
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gpt2"])
def test_activations_stay_in_size_and_tokens_vary(arch: str) -> None:
    config = tiny.tiny_model(arch).config.to_dict()
    model = random_weights.fill(random_weights.empty_model(config, torch.float32), "cpu")
    ids = torch.randint(0, 256, (1, 128), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=ids).logits[0]
    assert torch.isfinite(logits).all()
    assert 1 < float(logits.std()) < 30
    assert len(set(logits.argmax(-1).tolist())) > 20
    changed = ids.clone()
    changed[0, :64] = ids[0, :64].flip(0)
    assert not torch.equal(model(input_ids=changed).logits[0, -1], logits[-1])


def test_an_engine_takes_it_with_and_without_a_tokenizer(config_file: Path) -> None:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with Engine(f"random:{config_file}", threads=1, kv_memory=4 << 20) as engine:
        silent = engine.complete([1, 2, 3, 4], params)
        assert engine.props()["model"] == f"random:{config_file}"
        with pytest.raises(TokenizerError, match="token ids"):
            engine.complete("text", params)
    assert silent.text == ""
    assert len(set(silent.token_ids)) > 4
    with Engine(f"random:{config_file}", tokenizer=tiny.byte_tokenizer(), threads=1, kv_memory=4 << 20) as engine:
        assert engine.complete([1, 2, 3, 4], params).token_ids == silent.token_ids
        assert engine.complete("text", params).text


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (None, ModelNotFoundError, r"accepted: Llama-3\.1-8B"),
        ([], ModelNotFoundError, "not an object"),
        ({"model_type": "t5"}, UnsupportedModelError, "t5"),
        ({"model_type": "new", "auto_map": {"AutoModelForCausalLM": "m.M"}}, RemoteCodeError, "new"),
        (CONFIG | {"num_attention_heads": 0}, UnsupportedModelError, "config"),
        (CONFIG | {"hidden_size": "wide"}, UnsupportedModelError, "config"),
    ],
)
def test_a_shape_that_cannot_be_made(tmp_path: Path, config: Any, error: type[Exception], message: str) -> None:
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(json.dumps(config))
    with pytest.raises(error, match=message):
        load_model(f"random:{path}")


def test_a_model_that_does_not_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda device: 10**9)
    monkeypatch.setattr(loader, "fill", lambda *_: pytest.fail("it was made"))
    with pytest.raises(OutOfMemoryError, match=r"random:Llama-3\.1-8B needs 15\.0 GiB"):
        load_model("random:Llama-3.1-8B", dtype=torch.bfloat16)


def test_random_weights_have_no_tokenizer() -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        load_tokenizer("random:Llama-3.1-8B")

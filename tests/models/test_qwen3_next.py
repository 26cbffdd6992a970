"""Qwen3-Next's folders: read as a Qwen3.5 mixture, with the logits of transformers' own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ngramspec import Engine, SamplingParams
from ngramspec.errors import UnsupportedModelError
from ngramspec.models.loader import load_model

TEXT = [i * 31 % 250 for i in range(40)]
CONFIG: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8, "num_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "max_position_embeddings": 256,
}  # fmt: skip


def write(folder: Path, **changed: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **CONFIG | changed)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv" not in name:
                parameter.mul_(75 * parameter.shape[-1] ** -0.5)  # from a standard deviation of 0.02
    model.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return model


def test_logits_and_texts_are_transformers(tmp_path: Path) -> None:
    model, text = write(tmp_path), list(TEXT)
    with torch.inference_mode():
        assert torch.equal(load_model(str(tmp_path)).model(torch.tensor([TEXT])).logits, model(torch.tensor([TEXT])).logits)
        for _ in range(12):
            text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    with Engine(str(tmp_path), max_model_len=128, max_seqs=2) as engine:
        assert engine.exactness == "bitwise"
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)
        assert engine.complete(TEXT, params, speculation=False).token_ids == text[len(TEXT) :]
        assert engine.complete(TEXT, params, prediction=text[len(TEXT) :]).token_ids == text[len(TEXT) :]


@pytest.mark.parametrize(("name", "value"), [("norm_topk_prob", False), ("mlp_only_layers", [1]), ("decoder_sparse_step", 2)])
def test_layers_that_qwen3_5_does_not_have_are_refused(tmp_path: Path, name: str, value: object) -> None:
    write(tmp_path, num_hidden_layers=4, **{name: value})
    with pytest.raises(UnsupportedModelError, match=f"{name} is"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("n_keys", [0, 3])
def test_heads_that_do_not_fit_each_other_are_refused(tmp_path: Path, n_keys: int) -> None:
    write(tmp_path, num_hidden_layers=4)
    config = json.loads((tmp_path / "config.json").read_text()) | {"linear_num_key_heads": n_keys}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="linear_num_"):
        load_model(str(tmp_path))


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    write(tmp_path, num_hidden_layers=4)
    path, joined = tmp_path / "model.safetensors", "model.layers.1.linear_attn.in_proj_ba.weight"
    tensors = load_file(path)
    save_file(tensors | {joined: tensors[joined][:-2].clone()}, path, {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"in_proj_ba is \[6, 64\].*8 rows"):
        load_model(str(tmp_path))

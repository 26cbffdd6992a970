"""A model's own head for further tokens: what it predicts is what the published formula says, of folders and of GGUF files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import tiny_architectures
import tiny_mtp
import torch
from transformers import PreTrainedModel

from ngramspec.backends.base import HeadRows
from ngramspec.backends.cpu.llama_runner import CpuOptions, LlamaRunner
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.engine.llm_engine import Engine
from ngramspec.models.loader import load_model, open_model

SIZES = {"max_len": 256, "max_seqs": 3, "max_rows": 64, "kv_bytes": 8 << 20}
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 48}
LAYERS = {
    "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
KINDS = {"dense": (tiny_mtp.HYBRID, {}), "experts": ("qwen3_5_moe_text", LAYERS | MOE)}


def open_runner(path: Path) -> LlamaRunner:
    opened = open_model(str(path), cache_dir=path.parent / "cache")
    return CpuRunner(opened.model, CpuOptions(with_head=True, **SIZES), opened.source)


@pytest.mark.parametrize("kind", KINDS)
def test_head_computes_the_published_formula(tmp_path: Path, kind: str) -> None:
    arch, overrides = KINDS[kind]
    model, head = tiny.tiny_model(arch, **overrides), tiny_mtp.make_head(arch, **overrides)
    runner = open_runner(tiny_mtp.save(tmp_path / "model", model, head))
    check_head(runner, model, head)


@pytest.mark.parametrize("case", ["qwen35", "qwen35moe", "qwen3next"])
def test_head_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    architecture, layer, keys, has_head = tiny_architectures.CASES[case]
    longer = {"block_count": tiny_architectures.LAYERS + 1, "nextn_predict_layers": 1}
    monkeypatch.setitem(tiny_architectures.CASES, "with a head", (architecture, layer, keys | longer, has_head))
    path = tiny_architectures.write(tmp_path / "model.gguf", "with a head")
    source = open_model(str(path), cache_dir=tmp_path / "cache").source
    head = {name: torch.from_numpy(stored.float32()) for name, stored in source.items() if name.startswith("mtp.")}
    check_head(open_runner(path), load_model(str(path), cache_dir=tmp_path / "cache").model, head)


def test_a_later_start_has_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, layer, keys, has_head = tiny_architectures.CASES["qwen35, as many heads"]
    longer = {"block_count": tiny_architectures.LAYERS + 1, "nextn_predict_layers": 1}
    monkeypatch.setitem(tiny_architectures.CASES, "with a head", (architecture, layer, keys | longer, has_head))
    path = tiny_architectures.write(tmp_path / "model.gguf", "with a head")
    for kind in (CpuRunner, LlamaRunner):  # the second start reads the record of the first
        with Engine(path, max_model_len=64, max_seqs=2) as engine:
            assert type(engine.runner) is kind
            assert engine.runner.head is not None
            assert "mtp" in engine.source_names


@pytest.mark.parametrize("spoil", ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "shape", "layers", "embedding"])
def test_a_head_that_does_not_fit_is_left_out(tmp_path: Path, spoil: str) -> None:
    model, head = tiny.tiny_model(tiny_mtp.HYBRID), tiny_mtp.make_head()
    head.pop(spoil, None)
    if spoil == "shape":
        head["mtp.fc.weight"] = head["mtp.fc.weight"][:, 1:]
    elif spoil == "layers":
        head["mtp.layers.1.input_layernorm.weight"] = torch.ones(64)
    elif spoil == "embedding":
        head["mtp.embed_tokens.weight"] = torch.ones(tiny.VOCAB, 64)
    assert open_runner(tiny_mtp.save(tmp_path / "model", model, head)).head is None


def check_head(runner: LlamaRunner, model: PreTrainedModel, head: dict[str, torch.Tensor]) -> None:
    """Compare what the runner's head predicts with the formula; it reads rows by and by, beside those of another sequence."""
    assert runner.head is not None
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, 30).astype(np.int32)
    with torch.no_grad():
        states = model.base_model(torch.from_numpy(tokens)[None].long()).last_hidden_state[0]
    logits, left = tiny_mtp.compute(model, head, torch.from_numpy(tokens[1:]).long(), states[:-1])
    wanted = logits.softmax(-1).numpy()

    def read(slot: int, first: int, end: int) -> HeadRows:
        return HeadRows(slot, first, tokens[first + 1 : end + 1], states[first:end].numpy())

    runner.head.predict([read(0, 0, 9)])
    for first, end in ((9, 12), (12, 20), (20, 29)):
        found = runner.head.predict([read(1, 0, 5), read(0, first, end)])
        n = found.tokens.shape[1]
        np.testing.assert_array_equal(found.tokens[1], np.argsort(-wanted[end - 1], kind="stable")[:n])
        np.testing.assert_allclose(found.probs[1], np.sort(wanted[end - 1])[::-1][:n], rtol=2e-3)
        np.testing.assert_allclose(found.states[1], left[end - 1].numpy(), rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(found.states[0], left[4].numpy(), rtol=2e-3, atol=2e-3)

"""Folders with safetensors: later starts need neither torch nor transformers, write the same text, and notice every change of a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import tiny
from transformers import PreTrainedTokenizerFast

from ngramspec import Engine, SamplingParams
from ngramspec.models import hub, names
from ngramspec.models.folder_cache import ModelFolder, NotCachedError, encode_source, write_folder
from ngramspec.models.loader import open_model
from ngramspec.models.start_cache import reopen_model
from ngramspec.models.tensor_source import ComputedTensor, TensorSource

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [5, 17, 88, 3, 42, 5, 17, 88]
# Parameters of one tensor, of experts stacked and joined, of heads split from one matrix, with states, with keys of other layers.
FAMILIES = ("llama", "phi3", "qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_text", "gemma4_text")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NGRAMSPEC_CACHE", str(folder))
        yield folder


def save(folder: Path, family: str = "llama", tokenizer: PreTrainedTokenizerFast | None = None, **config: Any) -> Path:
    tiny.tiny_model(family, **config).save_pretrained(folder)
    (tokenizer or tiny.byte_tokenizer()).save_pretrained(folder)
    return folder


def start(folder: Path | str, **options: Any) -> tuple[list[int], bool]:
    """Start an engine; return what it writes, and whether it was opened from what an earlier start had kept."""
    with Engine(str(folder), max_seqs=2, kv_memory=1 << 22, threads=1, max_model_len=128, **options) as engine:
        assert engine.exactness == "bitwise"
        return engine.complete(PROMPT, GREEDY).token_ids, type(engine.runner).__name__ == "LlamaRunner"


@pytest.mark.parametrize(("family", "quantize"), [*((family, "none") for family in FAMILIES), ("llama", "q8_0"), ("deepseek_v3", "q8_0")])
def test_a_later_start_writes_the_same_text(family: str, quantize: str, tmp_path: Path) -> None:
    model = save(tmp_path / "model", family)
    text, kept = start(model, quantize=quantize)
    assert not kept
    assert start(model, quantize=quantize) == (text, True)


def test_a_later_start_reads_the_same_parameters(tmp_path: Path, cache: Path) -> None:
    for family in FAMILIES:
        model = save(tmp_path / family, family)
        opened = open_model(str(model))
        again = reopen_model(ModelFolder(model), None, cache)
        assert again is not None
        assert (again.eos_token_ids, again.config["model_type"]) == (opened.eos_token_ids, opened.model.config.model_type)
        assert opened.source.keys() <= again.source.keys()
        for name, stored in opened.source.items():
            assert np.array_equal(again.source[name].float32(), stored.float32()), name
        tied = [name for name in opened.source if opened.source[name] is opened.source["model.embed_tokens.weight"]]
        assert len({id(again.source[name]) for name in tied}) == 1


def change_weights(folder: Path) -> None:
    tiny.tiny_model("llama", seed=1).save_pretrained(folder)


def change_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))


def change_ends(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))


def add_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize("change", [change_weights, change_config, change_ends, add_template])
def test_a_change_is_noticed(change: Callable[[Path], None], tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    start(model)
    assert start(model)[1]
    change(model)
    text, kept = start(model)
    assert not kept
    assert start(model) == (text, True)
    other = save(tmp_path / "other")
    change(other)
    assert start(other) == (text, False), "what a folder that was never opened writes"


def test_another_tokenizer_is_not_answered_from_the_cache(tmp_path: Path) -> None:
    model = save(tmp_path / "model")
    text, _ = start(model)
    assert start(model, tokenizer=tiny.byte_tokenizer()) == (text, False)
    assert start(model) == (text, True)


def test_a_name_on_the_hub_is_kept_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(tmp_path / "models--org--model" / "snapshots" / "0123abc")
    assert ModelFolder(model).name == "org--model"
    asked = list[str]()
    monkeypatch.setattr(hub, "download_folder", lambda name, *_: (asked.append(name), model)[1])
    assert names.locate_folder("org/model") == str(model)
    for kept in (False, True):
        asked.clear()
        with Engine("org/model", max_seqs=2, kv_memory=1 << 22, threads=1, max_model_len=128) as engine:
            assert (engine.name, type(engine.runner).__name__ == "LlamaRunner") == ("org/model", kept)
            assert asked == ["org/model"], "the hub, which may be slow, is asked once"


def test_several_chat_templates_are_kept(tmp_path: Path) -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages[0]['content'] }}", "tool_use": "tools: {{ messages[0]['content'] }}"}  # type: ignore[assignment]
    model = save(tmp_path / "model", tokenizer=tokenizer)
    for kept in (False, True):
        with Engine(str(model), max_seqs=2, kv_memory=1 << 22, threads=1, max_model_len=128) as engine:
            assert (type(engine.runner).__name__ == "LlamaRunner") is kept
            for name, tools in (("default", None), ("tool_use", [{}])):
                assert engine.tokenizer.get_chat_template(tools=tools) == tokenizer.chat_template[name]
                assert engine.tokenizer.get_chat_template("tool_use") == tokenizer.chat_template["tool_use"]


def make_truncating_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    return tokenizer


def test_a_tokenizer_that_would_cut_texts_off_does_not(tmp_path: Path) -> None:
    model = save(tmp_path / "model", tokenizer=make_truncating_tokenizer())
    text = "def add(a, b):\n    return a + b"
    assert '"truncation": null' not in (model / "tokenizer.json").read_text()
    for kept in (False, True):
        with Engine(str(model), max_seqs=2, kv_memory=1 << 22, threads=1, max_model_len=128) as engine:
            assert (type(engine.runner).__name__ == "LlamaRunner") is kept
            assert engine.tokenizer.decode(engine.encode(text)) == text


def test_a_tokenizer_that_transformers_changes_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does more than its file says, as older classes of transformers do."""
    model = save(tmp_path / "model")
    opened, plain = open_model(str(model)), cast("Callable[..., str]", PreTrainedTokenizerFast.decode)
    folder = tmp_path / "derived"
    folder.mkdir()
    write_folder(folder, {}, opened.source, opened.tokenizer, ())
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda self, ids, **options: plain(self, ids, **options).strip())
    with pytest.raises(NotCachedError, match="other texts"):
        write_folder(folder, {}, opened.source, opened.tokenizer, ())
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda self, ids: None)  # one that takes other arguments
    with pytest.raises(NotCachedError, match="read back"):
        write_folder(folder, {}, opened.source, opened.tokenizer, ())


def test_what_lies_in_no_file_is_not_kept(tmp_path: Path) -> None:
    opened = open_model(str(save(tmp_path / "model")))
    name = "model.norm.weight"
    computed = ComputedTensor(kind="F32", shape=opened.source[name].shape, stored=opened.source[name], compute=lambda x: x + 1)
    with pytest.raises(NotCachedError, match="ComputedTensor"):
        encode_source(TensorSource({**opened.source, name: computed}, 0))

"""Vocabularies of GGUF files against llama.cpp: which tokens end a text, how text is split, what is a control token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import pytest
import tiny
import tiny_gguf

from ngramspec.datastore.tokens import to_canonical_json
from ngramspec.errors import TokenizerError, UnsupportedModelError
from ngramspec.models import gguf
from ngramspec.models.loader import eos_token_ids, load_tokenizer, open_model
from ngramspec.models.splits import NAMES, split_of
from ngramspec.models.start_cache import reopen_model
from ngramspec.models.vocabulary import end_token_ids, end_token_ids_of, read_backend, read_tokenizer

RECORD = json.loads((Path(__file__).parent / "splits.json").read_text())
"""What `tools.record_splits` has asked llama.cpp."""
KINDS = reference.TokenType
FIRST = 256
"""The id of the first token that `tiny_gguf.write` is given."""


def by_llama_cpp(name: str) -> list[list[int]]:
    found = dict(enumerate(RECORD["gpt-2"]))
    for group in RECORD["others"]:
        if name in group["names"]:
            found |= {int(i): ids for i, ids in group["ids"].items()}
    return list(found.values())


@pytest.fixture(scope="module")
def smollm2_backend(smollm2_gguf: Path) -> Any:
    return read_backend(gguf.read(smollm2_gguf))


@pytest.mark.parametrize("name", NAMES)
def test_every_pre_splits_as_llama_cpp(smollm2_backend: Any, name: str) -> None:
    split = split_of(name)
    smollm2_backend.pre_tokenizer = split.pre_tokenizer({token for token in smollm2_backend.get_vocab() if len(token) == 1})
    smollm2_backend.normalizer = split.normalizer
    smollm2_backend.model.ignore_merges = split.ignore_merges
    smollm2_backend.encode_special_tokens = True
    wanted = by_llama_cpp(name)
    for text, ids in zip(RECORD["texts"], wanted, strict=True):
        assert smollm2_backend.encode(text, add_special_tokens=False).ids == ids, repr(text)


def test_llama_cpp_was_asked_about_every_name() -> None:
    assert {"gpt-2", *(name for group in RECORD["others"] for name in group["names"])} == set(NAMES)


def test_a_file_is_split_by_its_own_name(smollm2_gguf: Path, tmp_path: Path) -> None:
    key = b"tokenizer.ggml.pre" + (8).to_bytes(4, "little") + (6).to_bytes(8, "little")
    path = tmp_path / "model.gguf"
    path.write_bytes(smollm2_gguf.read_bytes().replace(key + b"smollm", key + b"refact", 1))
    tokenizer = load_tokenizer(str(path), cache_dir=tmp_path / "cache")
    assert [tokenizer(text)["input_ids"] for text in RECORD["texts"]] == by_llama_cpp("refact")


@pytest.mark.parametrize("name", ["zzzzzz", "whitespace", "GPT-2", "qwen2 "])
def test_an_unknown_pre_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", metadata={"tokenizer.ggml.pre": name})
    with pytest.raises(TokenizerError, match=f"{name!r}; accepted: .*deepseek-coder"):
        open_model(str(path), cache_dir=tmp_path / "cache")


def test_pre_of_sentencepiece_means_nothing(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", "gemma3", metadata={"tokenizer.ggml.pre": "zzzzzz"})
    assert open_model(str(path), cache_dir=tmp_path / "cache").tokenizer.encode("a the", add_special_tokens=False)


@pytest.mark.parametrize(
    ("metadata", "begins"),
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "tekken"}, True),
        ({"tokenizer.ggml.pre": "qwen2"}, False),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_what_texts_begin_with(tmp_path: Path, metadata: dict[str, Any], begins: bool) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", metadata=metadata)
    ids = load_tokenizer(str(path), cache_dir=tmp_path / "cache")("ab")["input_ids"]
    assert ids == [tiny_gguf.BOS] * begins + [ord("a"), ord("b")]


@pytest.mark.parametrize(
    ("family", "metadata"),
    [
        ("llama", {"tokenizer.ggml.pre": "llama-bpe"}),
        ("llama", {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_eos_token": True}),
        ("llama", {"tokenizer.ggml.pre": "tekken", "tokenizer.ggml.add_eos_token": True}),
        ("llama", {"tokenizer.ggml.bos_token_id": ord("a"), "tokenizer.ggml.unknown_token_id": ord("b")}),
        ("gemma3", {}),
        ("gemma3", {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.padding_token_id": 3}),
    ],
)
def test_the_backend_is_what_transformers_makes_of_it(tmp_path: Path, family: str, metadata: dict[str, Any]) -> None:
    file = gguf.read(tiny_gguf.write(tmp_path / "model.gguf", family, metadata=metadata))
    assert to_canonical_json(read_backend(file)) == to_canonical_json(read_tokenizer(file).backend_tokenizer)


@pytest.mark.parametrize("prefix", [None, True, False])
def test_first_blank_of_sentencepiece(tmp_path: Path, prefix: bool | None) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", "gemma3", metadata={"tokenizer.ggml.add_space_prefix": prefix})
    tokenizer = load_tokenizer(str(path), cache_dir=tmp_path / "cache")
    blank = ["▁"] if prefix is not False else []
    assert tokenizer.tokenize("th<bos>b b") == [*blank, "th", "<bos>", *blank, "b", "▁", "b"]
    assert tokenizer.tokenize(" th") == [*blank, "▁", "th"]
    assert tokenizer.decode(tokenizer.encode(" th b", add_special_tokens=False)) == " th b"


CONTROL, NORMAL, USER = KINDS.CONTROL, KINDS.NORMAL, KINDS.USER_DEFINED
ENDS: list[tuple[str, dict[str, KINDS], dict[str, Any], set[int]]] = [
    ("names of any kind", {"<|im_end|>": CONTROL, "</s>": NORMAL, "<|eom_id|>": USER, "<|end_of_text|>": CONTROL}, {}, {0, 1, 2, 3}),
    ("others end nothing", {"<|im_start|>": CONTROL, "<|fim_prefix|>": CONTROL, "<end>": CONTROL, "<EOS>": CONTROL}, {}, set()),
    ("of filling in", {"<|fim_pad|>": CONTROL, "<|repo_name|>": CONTROL, "<|file_sep|>": CONTROL, "<file_sep>": CONTROL}, {}, {0, 1, 2}),
    ("metadata", {"a1": CONTROL, "a2": NORMAL}, {"eot_token_id": FIRST, "eom_token_id": FIRST + 1}, {0, 1}),
    ("metadata of filling in", {"<|fim_pad|>": CONTROL, "a1": CONTROL}, {"fim_pad_token_id": FIRST + 1}, {1}),
    ("ids out of range", {"<EOT>": CONTROL}, {"eot_token_id": 300, "eom_token_id": 2**32 - 1}, {0}),
    ("Harmony", {"<|return|>": CONTROL, "<|call|>": CONTROL, "<|end|>": CONTROL}, {"eot_token_id": FIRST + 2}, {0, 1}),
    ("half of Harmony", {"<|return|>": CONTROL, "<|end|>": CONTROL}, {}, {0, 1}),
    ("Solar Open", {"<|flush|>": CONTROL, "<|calls|>": CONTROL, "<|end|>": CONTROL}, {}, {0, 1}),
    ("Phi-3", {"<|end|>": CONTROL, "<|endoftext|>": CONTROL}, {}, {0, 1}),
    ("Gemma", {"<end_of_turn>": CONTROL, "<start_of_turn>": CONTROL}, {}, {0}),
    ("Gemma 4", {"<turn|>": CONTROL, "<|tool_response>": CONTROL, "</s>": NORMAL}, {}, {0, 1}),
    ("DeepSeek", {"<｜end▁of▁sentence｜>": CONTROL, "<｜fim▁begin｜>": CONTROL}, {}, {0}),
    ("Kimi", {"[EOT]": CONTROL, "[EOS]": CONTROL, "[PAD]": CONTROL}, {}, {0, 1, 2}),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "metadata", "ends"), [case[1:] for case in ENDS], ids=[case[0] for case in ENDS])
def test_tokens_that_end_a_text(tmp_path: Path, tokens: dict[str, KINDS], metadata: dict[str, Any], ends: set[int]) -> None:
    stated = {f"tokenizer.ggml.{name}": number for name, number in metadata.items()}
    path = tiny_gguf.write(tmp_path / "model.gguf", tokens=tokens, metadata=stated)
    wanted = tuple(sorted({FIRST + number for number in ends} | {tiny_gguf.EOS}))
    assert open_model(str(path), cache_dir=tmp_path / "cache").eos_token_ids == wanted
    again = reopen_model(gguf.read(path), None, tmp_path / "cache")
    assert again is not None
    assert again.eos_token_ids == wanted


def test_control_tokens_of_any_spelling_and_kind_are_matched(tmp_path: Path) -> None:
    tokens = {"<｜fim▁begin｜>": CONTROL, "</s>": NORMAL, "<think>": USER, "<|unk|>": KINDS.UNKNOWN, "<word>": NORMAL}
    tokenizer = load_tokenizer(str(tiny_gguf.write(tmp_path / "model.gguf", tokens=tokens)), cache_dir=tmp_path / "cache")
    ids = tokenizer("a<｜fim▁begin｜></s><think><|unk|>b<word>")["input_ids"]
    assert ids == [97, FIRST, FIRST + 1, FIRST + 2, FIRST + 3, 98, *b"<word>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b<word>"
    assert tokenizer.decode(ids) == "a<｜fim▁begin｜></s><think><|unk|>b<word>"
    assert len(tokenizer) == tiny_gguf.VOCAB


@pytest.mark.parametrize("default", ["{{ 'plain' }}", None])
def test_a_template_for_tools_is_read_beside_the_default_one(tmp_path: Path, default: str | None) -> None:
    key = "tokenizer.chat_template"
    path = tiny_gguf.write(tmp_path / "model.gguf", metadata={key: default, f"{key}.tool_use": "{{ 'tools' }}"})
    first = open_model(str(path), cache_dir=tmp_path / "cache").tokenizer
    later = reopen_model(gguf.read(path), None, tmp_path / "cache")
    assert later is not None
    for tokenizer in (first, later.tokenizer, load_tokenizer(str(path), cache_dir=tmp_path / "cache")):
        if default is None:
            assert not tokenizer.chat_template, "which llama.cpp would not use without tools"
        else:
            assert (tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[{}])) == ("{{ 'plain' }}", "{{ 'tools' }}")


@pytest.mark.parametrize("template", [5, True, 1.5])
def test_a_template_that_is_no_text_is_none(tmp_path: Path, template: object) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", metadata={"tokenizer.chat_template": template})  # type: ignore[dict-item]
    assert load_tokenizer(str(path), cache_dir=tmp_path / "cache").chat_template is None


def test_what_an_earlier_version_kept_is_made_anew(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", tokens={"<|im_end|>": CONTROL})
    wanted = open_model(str(path), cache_dir=tmp_path / "cache").eos_token_ids
    (manifest,) = (tmp_path / "cache").rglob("derived.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    (manifest.parent / "generation_config.json").write_text(json.dumps({"eos_token_id": [tiny_gguf.EOS]}))
    assert reopen_model(gguf.read(path), None, tmp_path / "cache") is None
    assert open_model(str(path), cache_dir=tmp_path / "cache").eos_token_ids == wanted == (FIRST, tiny_gguf.EOS)


def test_control_tokens_of_a_folder_end_texts_by_their_names() -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>", "<|file_sep|>"]})
    ids = tokenizer.get_vocab()
    wanted = {tiny.EOS, ids["<|im_end|>"], ids["<|file_sep|>"]}
    assert set(eos_token_ids(tiny.tiny_model("llama"), tokenizer)) == wanted


def test_words_of_a_folder_end_no_text() -> None:
    assert end_token_ids({}, [7]) == {7}
    assert eos_token_ids(tiny.tiny_model("llama"), None) == (tiny.EOS,)


@pytest.mark.parametrize("stated", [-1, tiny.VOCAB, [tiny.EOS, -1], 10**30])
def test_ids_that_a_folder_states_and_no_token_has_end_no_text(stated: Any) -> None:
    model = tiny.tiny_model("llama")
    model.generation_config.eos_token_id = stated  # type: ignore[union-attr]
    assert eos_token_ids(model, None) == (tiny.EOS,)


@pytest.mark.parametrize("stated", [[1, "x"], [None, 1], 1.5, "2", True, [[1]]])
def test_what_is_no_id_is_refused(stated: Any) -> None:
    model = tiny.tiny_model("llama")
    model.generation_config.eos_token_id = stated  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModelError, match=r"eos_token_id is .* by its GenerationConfig; accepted: a token id, a list"):
        eos_token_ids(model, None)


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("qwen2.5-coder-1.5b", {128247, 151643, 151645, 151662, 151663, 151664}),
        ("qwen2.5-coder-0.5b", {128247, 151643, 151645, 151662, 151663, 151664}),
        ("gemma-3-270m", {1, 106, 212}),
    ],
)
def test_real_files_end_where_llama_cpp_ends(real_model: Callable[[str], Path], name: str, ends: set[int]) -> None:
    assert end_token_ids_of(gguf.read(real_model(name))) == ends


def test_smollm2_ends_where_llama_cpp_ends(smollm2_gguf: Path) -> None:
    assert end_token_ids_of(gguf.read(smollm2_gguf)) == {0, 2, 4}

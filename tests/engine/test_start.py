"""What a start of the engine on the CPU imports and reads: a later start needs neither torch, transformers nor scipy, nor a compiler."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import tiny_store

from ngramspec.backends.cpu.llama_runner import count_packed_bytes
from ngramspec.datastore import TokenizerMismatchError
from ngramspec.datastore.partial_files import STALE_S
from ngramspec.engine import assembly
from ngramspec.engine.llm_engine import Engine
from ngramspec.models.loader import open_model
from ngramspec.tokenizer.deferred import DeferredTokenizer

_COMPLETE = """
import sys
from ngramspec.cli.main import app
app(["complete", "def f(", "--model", sys.argv[1], "--max-tokens", "4", "--seed", "1", "--quiet"], standalone_mode=False)
compiling = {"numba.np.polynomial", "pydantic", "regex", "yaml", "asyncio"} & sys.modules.keys() if sys.argv[2:] else set()
papers = {name for name in sys.modules if name.startswith("ngramspec.papers.")} - {"ngramspec.papers.registry"}  # names of options
print("\\n", sorted(({"torch", "transformers", "scipy.linalg"} & sys.modules.keys()) | papers | compiling), sep="")
"""
_SERVE = """
import asyncio, os, signal, sys, threading, time, urllib.error, urllib.request
from ngramspec.cli.main import app

def stop():
    while True:
        try:
            urllib.request.urlopen("http://127.0.0.1:%s/health" % sys.argv[2])
            break
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.1)
    print(sorted({"torch", "transformers", "scipy.linalg"} & sys.modules.keys()), flush=True)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=stop, daemon=True).start()
app(["serve", "--model", sys.argv[1], "--port", sys.argv[2]], standalone_mode=False)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("start") / "tiny.gguf", "qwen2", "Q4_K", std=0.1)


def find_free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def run(program: str, *arguments: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "model"
    tiny.tiny_model("llama").save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model", ["path", "folder"])
def test_a_later_start_imports_neither_torch_transformers_nor_scipy(model: str, request: pytest.FixtureRequest) -> None:
    name = str(request.getfixturevalue(model))
    first, second = run(_COMPLETE, name), run(_COMPLETE, name, "later")
    assert first[-1] == "['scipy.linalg', 'torch', 'transformers']"
    assert second == [*first[:-1], "[]"]
    assert run(_SERVE, name, str(find_free_port()))[-1] == "[]"


def test_a_deferred_tokenizer_is_that_of_transformers(path: Path) -> None:
    from ngramspec.datastore.cache_dir import cache_dir
    from ngramspec.models import gguf
    from ngramspec.models.loader import load_tokenizer
    from ngramspec.models.start_cache import get_folder_path

    whole = load_tokenizer(str(path))
    deferred = DeferredTokenizer(get_folder_path(gguf.read(path), cache_dir()))
    assert deferred.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
    for name in (
        "special_tokens_map",
        "eos_token_id",
        "bos_token_id",
        "mask_token_id",
        "chat_template",
        "added_tokens_decoder",
        "eos_token",
    ):
        assert getattr(deferred, name) == getattr(whole, name), name
    for text in ("", "def f(x):\n    return 1", "<|endoftext|>ä"):
        for special in (True, False):
            ids = deferred(text, add_special_tokens=special)["input_ids"]
            assert ids == whole(text, add_special_tokens=special)["input_ids"]
            assert deferred.convert_ids_to_tokens(ids) == whole.convert_ids_to_tokens(ids)
            assert [deferred.convert_ids_to_tokens(token) for token in ids] == deferred.convert_ids_to_tokens(ids)
        for options in ({}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": False}):
            assert deferred.decode(ids, **options) == whole.decode(ids, **options)
    assert len(deferred) == len(whole)
    with pytest.raises(AttributeError):
        _ = deferred.no_such_thing


def test_a_store_of_another_tokenizer_is_refused_before_weights_are_packed(path: Path, tmp_path: Path) -> None:
    tiny_store.write_store(tmp_path / "store", [[[1, 2, 3, 4]]], 64)
    with Engine(str(path)):
        pass  # from now on what was kept of this start is enough
    for options in ({}, {"quantize": "q8_0"}):
        stages: list[str] = []
        with pytest.raises(TokenizerMismatchError):
            Engine(str(path), datastore=tmp_path / "store", progress=stages.append, **options)
        assert not [stage for stage in stages if stage.startswith("packing")]


def test_weights_that_are_not_in_memory_yet_take_no_part_of_the_kv_caches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a model that just fits is killed once its KV cache is full."""
    weights = count_packed_bytes(open_model(str(path)).source, plain=False)
    with Engine(str(path), kv_memory=1 << 20) as engine:
        n_tokens = engine.props()["kv_tokens"]
    monkeypatch.setattr(assembly, "available_memory", lambda: weights + (4 << 20))
    for _ in range(2):  # the second start reads what the first has kept
        with Engine(str(path)) as engine:
            assert engine.props()["kv_tokens"] == n_tokens


def test_a_start_removes_what_killed_and_old_ones_have_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NGRAMSPEC_CACHE", str(tmp_path))
    left = [tmp_path / folder / name for folder in ("code", "starts") for name in (".old.part", ".young.part")]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
    for path in left[::2]:
        os.utime(path, (0, time.time() - STALE_S))
    for name, days in (("other.json", 89), ("version.syntax", 90)):
        left.append(tmp_path / "starts" / name)
        left[-1].write_bytes(b"learned")
        os.utime(left[-1], (0, time.time() - days * 86400))
    with Engine(tiny.tiny_model("llama"), speculation=False):
        pass
    assert [path.exists() for path in left] == [False, True, False, True, True, False]

"""Compiling beside the first start: nothing twice, the same texts before and after, and a start that goes on without it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_gguf
import tiny_store
from fair_time import wait_until

from ngramspec import SamplingParams
from ngramspec.backends.cpu import tiny_pass
from ngramspec.cli import main as cli
from ngramspec.datastore import bundled_code, code_cache, lookup
from ngramspec.engine import background_compiler, portable_code, step_functions
from ngramspec.engine.background_compiler import CompiledFor
from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import EngineClosedError
from ngramspec.outputs import Delta

pytestmark = pytest.mark.slow
_COMPLETE = """
import json, sys
from numba.core import event
from ngramspec.cli.main import app

class Compilations(event.Listener):
    names = []
    def on_start(self, event):
        self.names.append(str(event.data["dispatcher"].py_func.__qualname__))
    def on_end(self, event):
        pass

with event.install_listener("numba:compile", Compilations()):
    app(["complete", "def f(x):", "--model", sys.argv[1], "--max-tokens", "40", "--seed", "1", "--quiet", "--temperature", "0.7"],
        standalone_mode=False)
print("\\n" + json.dumps(Compilations.names))
"""


_LIST_CODE = """
import gc, sys
from numba.core.dispatcher import Dispatcher
if sys.argv[1:]:
    from ngramspec.cli.main import app
    app(["complete", "def f(x):", "--model", sys.argv[1], "--max-tokens", "40", "--seed", "1", "--quiet", "--temperature", "0.7"],
        standalone_mode=False)
else:
    from ngramspec.engine import background_compiler
    background_compiler.warm_up("float16")
made = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
print("\\n" + "; ".join(f"{each.py_func.__module__}.{each.py_func.__qualname__}{types}" for each in made for types in each.signatures))
"""

_LOOK_UP = """
import gc, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from ngramspec.datastore import Datastore
from ngramspec.engine import background_compiler
from ngramspec.speculative.datastore_drafter import DatastoreDrafter

def count_variants():
    return sum(len(each.signatures) for each in gc.get_objects() if isinstance(each, Dispatcher))

background_compiler.warm_up("float16")
before = count_variants()
drafter, slots = DatastoreDrafter({"store": Datastore.open(sys.argv[1])}, 1), np.zeros(1, np.int32)
drafter.wait_until_loaded()
drafter.begin(0, np.array([7, 1, 2], np.int32))
drafter.observe(slots, np.array([0, 2]), np.array([3, 4], np.int32))
assert drafter.propose(slots).tokens.tolist() == [5, 6]
assert count_variants() == before
"""


_INTERRUPTED = """
import os, signal, subprocess, sys, threading, time
from ngramspec import Engine

class Child(subprocess.Popen):
    made = []
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.made.append(self)

def interrupt():
    while len(Child.made) < 2:
        time.sleep(0.05)
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGINT)

subprocess.Popen = Child
threading.Thread(target=interrupt, daemon=True).start()
try:
    Engine(sys.argv[1])
except KeyboardInterrupt:
    n_looks = 0
    while any(each.poll() is None for each in Child.made):
        time.sleep(0.05)
        n_looks += 1
    print("\\n", 0.05 * n_looks, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("model") / "tiny.gguf", "qwen2", "Q4_K", std=0.1)


def complete(path: Path, cache: Path) -> tuple[list[str], list[str]]:
    """Complete in a new process -> its text, and the functions that it compiled itself."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache / "numba"), "NGRAMSPEC_CACHE": str(cache / "ngramspec")}
    run = subprocess.run([sys.executable, "-c", _COMPLETE, str(path)], capture_output=True, check=True, env=environment)
    *text, names = run.stdout.decode(errors="replace").splitlines()
    return text, json.loads(names)


@pytest.mark.skipif(sys.platform == "win32", reason="there, no signal is an interrupt")
def test_an_interrupt_ends_the_compilers_at_once(path: Path, tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "NGRAMSPEC_CACHE": str(tmp_path / "ngramspec")}
    run = subprocess.run([sys.executable, "-c", _INTERRUPTED, str(path)], capture_output=True, check=True, env=environment)
    assert float(run.stdout.split()[-1]) < 2


def test_a_start_calls_nothing_but_what_is_compiled_ahead(path: Path) -> None:
    """Functions with the types that they are compiled for, in one process each, whatever is kept already."""

    def list_code(*arguments: str) -> set[str]:
        done = subprocess.run([sys.executable, "-c", _LIST_CODE, *arguments], capture_output=True, check=True)
        return set(done.stdout.decode(errors="replace").splitlines()[-1].split("; "))

    called, ahead = list_code(str(path)), list_code()
    own = {name.partition("(")[0].rpartition(".")[2] for name in called - ahead}
    assert own <= {"_multiply_all", "_unpack_rows"}, "of the models' own modules, which are compiled in a moment"
    assert any("step_functions.accept_and_prepare" in name for name in called)
    assert any("step_functions.get_moves" in code for code in ahead), "called for an accepted path beside a rejected one, which is rare"
    for name in ("tree_builder.build_trees(", "tree_builder.update("):
        assert sum(f"speculative.{name}" in code for code in ahead) == 1, "compiled for other types than it is called with"
    assert sum("cpu.attention.attend_piece(" in code and "uint16" in code for code in ahead) == 1


@pytest.mark.soak
def test_a_first_start_leaves_nothing_to_compile(path: Path, tmp_path: Path) -> None:
    text, first = complete(path, tmp_path)
    again, second = complete(path, tmp_path)
    assert again == text
    assert not {"compute", "build_trees", "update", "fill_batch", "advance", "_pack_blocks"} & {*first}, "left to the children"
    assert second == []


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_the_same_when_speculation_joins(path: Path, temperature: float) -> None:
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, ignore_eos=True)
    prompt = [1, 2, 3, 4] * 10
    with Engine(str(path), speculation=False) as plain:
        expected = plain.complete(prompt, params)
    for join_at in (0, 1, 20):
        with Engine(str(path)) as engine:
            engine.core.is_compiling_drafts = True
            tokens = list[int]()

            def deliver(delta: Delta | Exception, engine: Engine = engine, tokens: list[int] = tokens, join_at: int = join_at) -> None:
                assert isinstance(delta, Delta)
                tokens += delta.token_ids
                assert not engine.core.is_compiling_drafts or engine.core.cost.n_seen == 0, "learnt from passes beside a compiler"
                if engine.core.is_compiling_drafts and len(tokens) >= join_at:  # this runs in the engine's thread
                    engine.core.begin_speculation()

            done = engine.submit(prompt, params, deliver=deliver).result()
            assert done.token_ids == tokens == expected.token_ids
            assert done.stats.drafted > 0


@pytest.mark.parametrize(
    ("options", "waits"),
    [({}, False), ({"stop": ["x"]}, False), ({"temperature": 0.8}, True), ({"repetition_penalty": 1.2}, True)],
)
def test_a_request_that_changes_or_draws_waits_for_sampling(path: Path, options: dict[str, Any], waits: bool) -> None:
    with Engine(str(path)) as engine:
        engine.core.is_compiling_drafts = engine.core.is_compiling_sampling = True
        request = engine.submit([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, **options))
        assert len(engine.complete([1, 2, 3], SamplingParams(max_tokens=4)).token_ids) == 4, "others go on"
        assert request.done is not waits
        assert engine.status().waiting == waits
        engine.core.begin_sampling()
        engine.complete([1], SamplingParams(max_tokens=1))
        assert len(request.result().token_ids) == 4
        assert engine.status().waiting == 0


def test_what_waits_for_sampling_can_be_cancelled(path: Path) -> None:
    with Engine(str(path)) as engine:
        engine.core.is_compiling_drafts = engine.core.is_compiling_sampling = True
        requests = [engine.submit([1, 2, 3], SamplingParams(max_tokens=4, temperature=1.0, n=2)) for _ in range(50)]
        assert engine.status().waiting == 100
        for request in requests[1:]:
            request.cancel()
            wait_until(lambda each=request: each.done, 10)
            assert [choice.finish_reason for choice in request.result().choices] == ["cancelled"] * 2
        assert engine.status().waiting == 2
    with pytest.raises(EngineClosedError):
        requests[0].result()


def test_stages_of_the_children_are_all_stages() -> None:
    named = [name for names in background_compiler.CHILDREN for name in names]
    assert sorted(named) == sorted(background_compiler.STAGES)
    assert set(background_compiler.PLAIN + background_compiler.SAMPLING) < set(named)


def test_formats_that_are_not_multiplied_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {kind: SimpleNamespace(kind=kind, shape=(4, 4)) for kind in ("I32", "F32", "F64")}
    monkeypatch.setattr(tiny_pass, "read", lambda _: SimpleNamespace(tensors=tensors))
    tiny_pass.compile_kernels("model.gguf", True, tmp_path)
    assert not list(tmp_path.iterdir())
    tensors["F16"] = SimpleNamespace(kind="F16", shape=(4, 4))
    tiny_pass.compile_kernels("model.gguf", True, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # for all row counts, and for few


def test_looking_up_a_datastore_compiles_nothing(tmp_path: Path) -> None:
    tiny_store.write_store(tmp_path / "store", [[[1, 2, 3, 4, 5, 6]]], 256)
    subprocess.run([sys.executable, "-c", _LOOK_UP, str(tmp_path / "store")], check=True)


def test_where_nothing_can_be_kept_nothing_is_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(code_cache.CodeCache, "cache_path", property(lambda _: str(tmp_path / "file" / "numba")))
    monkeypatch.setattr(code_cache.CodeCache, "has_files", lambda *_: False)
    assert background_compiler.start_compiling(CompiledFor("float16"), lambda _: None) is None
    with pytest.raises(OSError, match="cannot be kept"):
        background_compiler.compile_all(lambda _: None)


def test_what_an_earlier_start_did_not_get_to_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first command may end before its children do: what they compile last would be compiled within the second one's start."""
    monkeypatch.setattr(code_cache, "is_kept", lambda function, *_: function is not lookup.propose_batch)
    assert not background_compiler.is_compiled()
    monkeypatch.setattr(code_cache, "is_kept", lambda function, *_: function is not step_functions.draft_trees)
    assert not background_compiler.is_compiled()


def test_passes_of_another_type_of_keys_and_values_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a start with int8, the first one with float32 compiled for half a minute in one process, and did not say so."""
    background_compiler.warm_up("float32")
    assert background_compiler.is_compiled("float32"), "as numba writes the type"
    started = list[CompiledFor]()
    monkeypatch.setattr(code_cache, "is_kept", lambda function, types="": "float32" not in types)
    monkeypatch.setattr(background_compiler, "BackgroundCompiler", lambda code, progress: started.append(code))
    stages = list[str]()
    for kv_dtype in ("float16", "float32"):
        background_compiler.start_compiling(CompiledFor(kv_dtype), stages.append)
    assert ([code.kv_dtype for code in started], stages) == (["float32"], ["compiling, once per installation"])


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that a test starts. (Linux may leave one out of /proc/self/task/*/children while another one ends.)"""
    started = list[subprocess.Popen[bytes]]()

    class NotedProcess(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", NotedProcess)
    return started


def test_a_command_ends_once_everything_is_compiled(
    path: Path, children: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left out would make every later command begin with two children that compile it, and end before they have."""
    waited, wait = set[str](), background_compiler.BackgroundCompiler.wait

    def note(self: background_compiler.BackgroundCompiler, *names: str) -> None:
        if threading.current_thread() is threading.main_thread():
            waited.update(names)
        wait(self, *names)

    monkeypatch.setattr(background_compiler, "is_compiled", lambda _: False)
    with Engine(str(path)) as engine:
        monkeypatch.setattr(background_compiler.BackgroundCompiler, "wait", note)
        engine.finish_compiling(lambda _: None)
    assert waited == {*background_compiler.STAGES}
    assert len(children) >= 2
    wait_until(lambda: all(child.poll() is not None for child in children), 10)


def test_children_that_are_killed_are_done_without(children: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture) -> None:
    told = list[str]()
    compiler = background_compiler.BackgroundCompiler(CompiledFor("float16"), told.append)
    try:
        assert len(children) == 2
        with caplog.at_level(logging.WARNING):
            for child in children:
                child.kill()
            compiler.wait(*background_compiler.STAGES)
    finally:
        compiler.close()
    assert sum("is compiled in this process" in record.message for record in caplog.records) == 1


def test_a_closed_compiler_leaves_no_process_and_says_nothing(
    children: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    compiler = background_compiler.BackgroundCompiler(CompiledFor("float16"), lambda _: None)
    compiler.close()
    compiler.wait(*background_compiler.STAGES)
    assert len(children) == 2
    assert all(child.returncode is not None for child in children)
    assert not caplog.records


def test_a_process_that_cannot_compile_for_others_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(portable_code, "list_targets", lambda: [None])  # kernels of none but the last
    monkeypatch.setattr(bundled_code, "list_levels", lambda: [bundled_code.LEVELS[-1]])
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(OSError, match="ended with exit code 1"):
        portable_code.compile_portable(tmp_path / "code", lambda _: None)
    assert not (tmp_path / "code").exists()


def test_the_command(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ngramspec", "warm-up", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, *capsys.readouterr()

    code, out, _ = run("--help")
    assert code == 0
    assert "--model" in out
    assert "once per installation" in " ".join(out.split())
    code, _, err = run("--model", "/no/such/model.gguf")
    assert code == 2
    assert "/no/such/model.gguf" in err
    code, out, err = run("--model", str(path))
    assert code == 0
    assert out.startswith("ready after ")
    assert "once per installation" in err
    assert run("--quiet")[2] == ""

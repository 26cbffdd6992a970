"""Machine code on disk is run only if it is what was written; where it cannot be kept, functions run all the same."""

from __future__ import annotations

import errno
import importlib.util
import os
import pkgutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest
from filelock import FileLock
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

import ngramspec
from ngramspec.datastore import code_cache
from ngramspec.datastore.partial_files import STALE_S

SOURCE = """
from ngramspec.datastore.code_cache import njit

@njit(cache=True)
def add(a, b):
    return a + b
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """`load()`: a module with a compiled function, as a new process would import it."""
    path = tmp_path / "compiled" / "summing.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions may have one size and time stamp

    def load() -> ModuleType:
        spec = importlib.util.spec_from_file_location("summing", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def compiled(load: Callable[[], ModuleType]) -> list[Path]:
    module = load()
    assert module.add(1, 2) == 3
    assert module.add(1.5, 2) == 3.5
    return sorted(Path(str(module.__file__)).parent.rglob("*.nb?"))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    for report in (code_cache.report_unusable, code_cache.report_damaged):
        report.cache_clear()
    yield caplog
    for report in (code_cache.report_unusable, code_cache.report_damaged):
        report.cache_clear()


def _hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def test_code_is_loaded_again(load: Callable[[], ModuleType], compiled: list[Path]) -> None:
    module = load()
    assert (module.add(3, 4), module.add(1.5, 2)) == (7, 3.5)
    assert _hits(module.add) == len(compiled) == 2


def test_code_that_checks_bounds_is_kept_apart(
    load: Callable[[], ModuleType], compiled: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    assert not code_cache.is_kept(load().add)
    module = load()
    assert (module.add(3, 4), _hits(module.add)) == (7, 0)
    module = load()
    assert (module.add(3, 4), _hits(module.add)) == (7, 1)
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", None)
    for path in compiled:
        path.unlink()
    assert not code_cache.is_kept(load().add)
    module = load()
    assert (module.add(3, 4), _hits(module.add)) == (7, 0)


def test_a_process_waits_for_another_that_compiles_the_same(load: Callable[[], ModuleType], compiled: list[Path]) -> None:
    module, aside = load(), [path.rename(path.with_suffix(".aside")) for path in compiled]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor())
        with ExitStack() as other_process:
            for path in compiled:
                other_process.enter_context(FileLock(path.with_suffix(".lock")))
            waiting = pool.submit(module.add, 1, 2)
            with pytest.raises(TimeoutError):
                waiting.result(2)  # ten times as long as it takes to compile
            for path in aside:
                path.rename(path.with_suffix(code_cache.SUFFIX))
        assert waiting.result() == 3
    assert _hits(module.add) == 1
    assert len([*compiled[0].parent.glob("*.lock")]) == len(compiled) - 1  # the other variant's, made here


def test_code_of_another_source_is_not_loaded(load: Callable[[], ModuleType], compiled: list[Path]) -> None:
    path = Path(str(load().__file__))
    path.write_text(SOURCE.replace("a + b", "a - b"))
    module = load()
    assert (module.add(3, 4), _hits(module.add)) == (-1, 0)


def test_code_for_a_type_that_has_moved_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.syspath_prepend(str(folder))
    (folder / "adding_up.py").write_text(SOURCE.replace("a, b", "pair").replace("a + b", "pair[0] + pair[1]"))
    for home in ("home_of_pairs", "other_home_of_pairs"):
        (folder / "home_of_pairs.py").unlink(missing_ok=True)
        (folder / f"{home}.py").write_text("from typing import NamedTuple\n\nclass Pair(NamedTuple):\n    a: int\n    b: int\n")
        code = f"import adding_up, {home}; print(adding_up.add({home}.Pair(1, 2)), sum(adding_up.add.stats.cache_hits.values()))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
        assert done.stdout == "3 0\n", done.stderr


CALLEE = """
from ngramspec.datastore.code_cache import njit

FACTOR = 2

@njit(cache=True)
def scale(a):
    return FACTOR * a
"""
CALLER = """
import scaling
from ngramspec.datastore.code_cache import njit

@njit(cache=True)
def add(a, b):
    return scaling.scale(a) + b
"""


@pytest.mark.parametrize(
    "change", [("FACTOR = 2", "FACTOR = 3"), ("FACTOR * a", "a * FACTOR + a"), (")\ndef", ", error_model='numpy')\ndef")]
)
def test_code_of_a_callee_that_changed_is_not_loaded(
    load: Callable[[], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: tuple[str, str],
    said: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "compiled" / "summing.py").write_text(CALLER)
    path = tmp_path / "scaling.py"
    monkeypatch.syspath_prepend(tmp_path)
    path.write_text(CALLEE)
    for _ in range(2):
        monkeypatch.delitem(sys.modules, "scaling", raising=False)
        module = load()
        assert module.add(1, 5) == 7
    assert _hits(module.add) == 1
    path.write_text(CALLEE.replace(*change))
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "scaling")
    module = load()
    assert not code_cache.is_kept(module.add)
    assert (module.add(1, 5), _hits(module.add)) == (7 if "error" in change[1] else 8, 0)
    assert not said.records, "another version is no damage"


def _count_files(load: Callable[[], ModuleType], sources: list[str], change: Callable[[str], str]) -> int:
    """Compile each of `sources` in turn, in one file, and return how many files of machine code are left."""
    path = Path(str(load().__file__))
    for source in sources:
        path.write_text(change(source))
        assert load().add(1, 2) > 0
    files = list(path.parent.rglob("*.nbc"))
    for file in path.parent.rglob("*.nb?"):
        file.unlink()
    return len(files)


CLOSURE = """
from ngramspec.datastore.code_cache import njit

def make(offset):
    @njit(cache=True)
    def add(a, b):
        return a + b + offset
    return add

add = make(OFFSET)
"""


@pytest.mark.parametrize(
    "sources",
    [
        [SOURCE, SOURCE.replace("a + b", "b + a + 0"), SOURCE.replace("a + b", "b + 0 + a + 0")],
        [CLOSURE.replace("OFFSET", text) for text in ("1", "10", "100")],
    ],
    ids=["edited", "closed over"],
)
def test_versions_of_a_function_leave_no_more_files_than_numba_leaves(load: Callable[[], ModuleType], sources: list[str]) -> None:
    ours = _count_files(load, sources, lambda source: source)
    numbas = _count_files(load, sources, lambda source: source.replace("ngramspec.datastore.code_cache", "numba"))
    assert ours == numbas == 1


def test_a_function_that_moves_leaves_no_files_behind(load: Callable[[], ModuleType]) -> None:
    assert _count_files(load, [SOURCE, "\n" + SOURCE, "\n\n" + SOURCE], lambda source: source) == 1


HOST = """
import sys
import numba, numba.core.caching as caching

def state():
    owners = [numba.config, caching, *(each for each in vars(caching).values() if isinstance(each, type))]
    return [dict(vars(owner)) for owner in owners], numba.njit, numba.jit

before = state()
import pkgutil, importlib, ngramspec.datastore
for info in pkgutil.walk_packages(ngramspec.datastore.__path__, "ngramspec.datastore."):
    if not info.name.endswith(".ray"):
        importlib.import_module(info.name)
assert state() == before
"""


def test_a_host_process_keeps_its_numba() -> None:
    subprocess.run([sys.executable, "-c", HOST], check=True, timeout=120)


@pytest.mark.parametrize("part", range(8))
def test_altered_code_is_never_run(load: Callable[[], ModuleType], compiled: list[Path], part: int, said: pytest.LogCaptureFixture) -> None:
    """24 bytes anywhere in a file, among them those of its digest, or the file cut off there."""
    for path in compiled:
        whole = path.read_bytes()
        at = min(len(whole) * part // 8, len(whole) - 24)
        path.write_bytes(whole[:at] if part % 2 else whole[:at] + bytes(b ^ 0x5A for b in whole[at : at + 24]) + whole[at + 24 :])
    module = load()
    assert (module.add(3, 4), module.add(1.5, 2), _hits(module.add)) == (7, 3.5, 0)
    assert [record.getMessage() for record in said.records] == [
        "compiled code on disk is damaged, so it is compiled again, which may take minutes"
    ]
    again = load()
    assert (again.add(3, 4), _hits(again.add)) == (7, 1), "it was compiled and kept again"


def test_damage_is_found_before_code_is_called(load: Callable[[], ModuleType], compiled: list[Path]) -> None:
    """One of two variants is damaged: a start is told once that not all is there."""
    assert code_cache.is_kept(load().add)
    assert [code_cache.is_kept(load().add, types) for types in ("int64", "float64", "float32")] == [True, True, False]
    compiled[0].write_bytes(compiled[0].read_bytes()[:-1] + b"?")
    assert not code_cache.is_kept(load().add)
    assert code_cache.is_kept(load().add)
    assert [path.exists() for path in compiled] == [False, True]


def test_code_of_another_function_in_ones_place(load: Callable[[], ModuleType], compiled: list[Path]) -> None:
    """A whole file under another variant's name, as after a collision of names."""
    first, second = compiled
    first.write_bytes(second.read_bytes())
    module = load()
    assert (module.add(3, 4), module.add(1.5, 2)) == (7, 3.5)


def test_cleared_code_is_compiled_again(load: Callable[[], ModuleType], compiled: list[Path]) -> None:
    code_cache.clear_folder(compiled[0].parent)
    assert not any(path.exists() for path in compiled)
    module = load()
    assert (module.add(3, 4), _hits(module.add)) == (7, 0)


def test_what_killed_processes_have_left_is_removed(load: Callable[[], ModuleType], compiled: list[Path]) -> None:
    path, folder = compiled[0], compiled[0].parent
    own, old, young, lock = (folder / name for name in (f".{path.name}.01.part", ".other.nbc.02.part", ".other.nbc.03.part", "other.lock"))
    for each in (own, old, young, lock):
        each.write_bytes(b"half")
    for each in (old, lock):
        os.utime(each, (0, time.time() - STALE_S))
    for there in (True, False):
        if not there:
            path.unlink()
        again = load()
        again.add(1, 2)
        again.add(1.5, 2)
        assert own.exists() == there, "it goes when its file is compiled again"
    assert path.exists()
    assert [each.exists() for each in (own, old, young, lock)] == [False, False, True, False]


def test_without_a_folder_that_can_be_written(
    load: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    def refuse(_folder: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(code_cache, "check_writable", refuse)
    for _ in range(2):
        module = load()
        assert module.add(1, 2) == 3
    assert not list(Path(str(module.__file__)).parent.rglob("*.nb?"))
    assert len(said.records) == 1
    assert "cannot be kept" in said.records[0].getMessage()


def test_on_a_full_disk(load: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    def fill(path: Path, data: bytes) -> int:
        path.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill)
    module = load()
    assert (module.add(1, 2), module.add(1.5, 2)) == (3, 3.5)
    assert not [path for path in Path(str(module.__file__)).parent.rglob("summing.add*") if path.is_file()]
    assert len(said.records) == 1


def test_the_users_folder_if_the_packages_is_read_only(
    load: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        return None

    monkeypatch.setattr("numba.core.caching.InTreeCacheLocator.from_function", refuse)
    monkeypatch.setenv("NGRAMSPEC_CACHE", str(tmp_path / "cache"))
    assert load().add(1, 2) == 3
    module = load()
    assert (module.add(3, 4), _hits(module.add)) == (7, 1)
    assert len(list((tmp_path / "cache").rglob("*.nbc"))) == 1
    assert not said.records


def test_compiled_functions_have_checked_code_and_names_of_their_own() -> None:
    """numba tells two functions of one name apart by how many its process had compiled before each: code that processes compiled at
    different times can have one symbol, and whoever calls both gets one of them twice."""
    named: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    unchecked = []
    for info in pkgutil.walk_packages(ngramspec.__path__, "ngramspec."):
        if info.name.endswith("__main__"):
            continue
        module: Any = importlib.import_module(info.name)
        for name, found in vars(module).items():
            if isinstance(found, Dispatcher):
                named[found.py_func.__module__, found.py_func.__qualname__].add(id(found))
                if isinstance(vars(found)["_cache"], FunctionCache):
                    unchecked.append(f"{info.name}.{name}")
    assert len(named) > 50
    assert [name for name, functions in named.items() if len(functions) > 1] == []
    assert unchecked == []

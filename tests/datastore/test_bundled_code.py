"""Machine code that came with the package is loaded where the user has none, by the processors and versions that it was compiled for."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import pytest

from ngramspec.backends.cpu.codegen.kernels import Kernels
from ngramspec.backends.cpu.codegen.targets import get_host_target
from ngramspec.backends.cpu.formats import QUANTISED
from ngramspec.datastore import bundled_code, code_cache

SOURCE = """
from ngramspec.datastore.code_cache import njit

@njit(cache=True)
def subtract(a, b):
    return a - b
"""
LEVEL = next(iter(bundled_code.list_levels()), None)
pytestmark = pytest.mark.skipif(LEVEL is None, reason="this processor has no level")


def _compile_for_level(source: Path, folder: Path) -> None:
    """Compile in a process that is told to compile for the level, as `engine.portable_code` does, and gather the files in `folder`."""
    assert LEVEL
    variables = {"NUMBA_CPU_NAME": LEVEL.name, "NUMBA_CPU_FEATURES": LEVEL.features, "NUMBA_CACHE_DIR": str(source.parent / "numba")}
    code = f"import {source.stem}; assert {source.stem}.subtract(5, 3) == 2"
    subprocess.run([sys.executable, "-c", code], cwd=source.parent, env={**os.environ, **variables}, check=True)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (source.parent / "numba").rglob(f"*{code_cache.SUFFIX}"):
        shutil.copy(path, folder)


@pytest.fixture(scope="module")
def built_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of code that was compiled elsewhere."""
    builder = tmp_path_factory.mktemp("builder")
    (builder / "subtracting.py").write_text(SOURCE)
    _compile_for_level(builder / "subtracting.py", builder / "built")
    return builder / "built"


@pytest.fixture
def bundle_folder(built_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of bundled code for this processor's level, with a function's."""
    assert LEVEL
    monkeypatch.setattr(bundled_code, "FOLDER", tmp_path / "machine_code")
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv(bundled_code.SWITCH, "")
    caches = (bundled_code.find_level, code_cache.report_damaged, code_cache.report_unusable)
    for function in caches:
        function.cache_clear()
    yield shutil.copytree(built_folder, tmp_path / "machine_code" / LEVEL.name)
    for function in caches:
        function.cache_clear()


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """`load()`: the module, as a new process of a user would import it, from a folder that the builder did not have."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "subtracting.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "user")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions may have one size and time stamp

    def load() -> ModuleType:
        monkeypatch.delitem(sys.modules, "subtracting", raising=False)
        return importlib.import_module("subtracting")

    return load


def _hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def _list_own_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "user").rglob(f"*{code_cache.SUFFIX}"))


@pytest.mark.usefixtures("bundle_folder")
def test_bundled_code_is_loaded_and_nothing_is_written(load: Callable[[], ModuleType], tmp_path: Path) -> None:
    module = load()
    assert code_cache.is_kept(module.subtract)
    assert (module.subtract(5, 3), _hits(module.subtract)) == (2, 1)
    assert not _list_own_files(tmp_path)
    assert (module.subtract(5.5, 3), _hits(module.subtract)) == (2.5, 1), "these types were not bundled"
    assert len(_list_own_files(tmp_path)) == 1


def test_code_of_the_users_own_comes_first(bundle_folder: Path, load: Callable[[], ModuleType], tmp_path: Path) -> None:
    bundle_folder.rename(bundle_folder.with_name("away"))
    bundled_code.find_level.cache_clear()
    assert load().subtract(5, 3) == 2
    (own,) = _list_own_files(tmp_path)
    bundle_folder.with_name("away").rename(bundle_folder)
    bundled_code.find_level.cache_clear()
    for path in bundle_folder.iterdir():
        path.write_bytes(b"not read")
    module = load()
    assert (module.subtract(5, 3), _hits(module.subtract)) == (2, 1)
    assert own.exists()


def test_bundled_code_of_another_version_is_compiled_anew(bundle_folder: Path, load: Callable[[], ModuleType], tmp_path: Path) -> None:
    assert list(bundle_folder.iterdir())
    (tmp_path / "user" / "subtracting.py").write_text(SOURCE.replace("a - b", "b - a"))
    module = load()
    assert not code_cache.is_kept(module.subtract)
    assert (module.subtract(5, 3), _hits(module.subtract)) == (-2, 0)


def test_damaged_bundled_code_is_not_run(bundle_folder: Path, load: Callable[[], ModuleType], caplog: pytest.LogCaptureFixture) -> None:
    for path in bundle_folder.iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for _ in range(2):
        module = load()
        assert module.subtract(5, 3) == 2
    assert _hits(module.subtract) == 1, "it was compiled, and kept for the user"
    assert [record.getMessage() for record in caplog.records] == [
        "compiled code on disk is damaged, so it is compiled again, which may take minutes"
    ]


@pytest.mark.usefixtures("bundle_folder")
def test_switched_off_bundled_code_is_not_run(load: Callable[[], ModuleType]) -> None:
    """As after a crash: children that compile must not load it either."""
    bundled_code.switch_off()
    module = load()
    assert not code_cache.is_kept(module.subtract)
    assert (module.subtract(5, 3), _hits(module.subtract)) == (2, 0)
    code = "from ngramspec.datastore import bundled_code; print(bundled_code.find_bundle())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "None\n"


@pytest.mark.usefixtures("bundle_folder")
def test_bundled_code_is_loaded_where_nothing_can_be_written(
    load: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_folder: str) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(code_cache, "check_writable", refuse)
    module = load()
    assert (module.subtract(5, 3), _hits(module.subtract)) == (2, 1)
    assert not caplog.records, "nothing had to be kept"


def test_code_for_a_lower_level_is_left_alone(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LEVEL
    assert bundled_code.find_bundle() == (bundle_folder, LEVEL)
    better = bundled_code.Level("x86-64-v9", LEVEL.features)
    monkeypatch.setattr(bundled_code, "list_levels", lambda: [better, LEVEL])
    bundled_code.find_level.cache_clear()
    assert bundled_code.find_bundle() is None


def test_a_process_told_of_another_processor_loads_nothing(bundle_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bundled_code.find_bundle() == (bundle_folder, LEVEL)
    monkeypatch.setattr(numba.config, "CPU_NAME", "x86-64")
    bundled_code.find_level.cache_clear()
    assert bundled_code.find_bundle() is None


def test_code_of_another_processor_in_the_users_folder_is_not_taken_for_ones_own(
    load: Callable[[], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines share a home: the second one's start has to say that it compiles."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert load().subtract(5, 3) == 2
    (own,) = _list_own_files(tmp_path)
    folder = own.parent
    own.unlink()
    _compile_for_level(tmp_path / "user" / "subtracting.py", folder)
    assert len(_list_own_files(tmp_path)) > 0
    assert not code_cache.is_kept(load().subtract)


def test_bundled_kernels_are_loaded(bundle_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LEVEL
    fmt, own = QUANTISED["Q8_0"], tmp_path / "code"
    Kernels(get_host_target().cover_level(LEVEL), bundle_folder).get_row_functions(fmt, int8=True, few=True)
    assert all(Kernels(folder=own).get_row_functions(fmt, int8=True, few=True).values())
    assert not own.exists()
    monkeypatch.setenv(bundled_code.SWITCH, "0")
    assert all(Kernels(folder=own).get_row_functions(fmt, int8=True, few=True).values())
    assert len(list(own.iterdir())) == 1


VERSIONS = """
import hashlib
from ngramspec.datastore import code_cache
from ngramspec.engine import background_compiler
for function, cache in code_cache._caches.items():
    print(function.__module__, function.__qualname__, hashlib.sha256(cache._version).hexdigest())
"""


def test_code_for_a_level_is_the_version_that_its_processors_look_for() -> None:
    """Were the digest of a function to depend on the processor, as by a constant that it reads, bundled code of it would never be found."""
    assert LEVEL
    here, level = (
        subprocess.run([sys.executable, "-c", VERSIONS], env={**os.environ, **to}, capture_output=True, text=True, check=True).stdout
        for to in ({}, {"NUMBA_CPU_NAME": LEVEL.name, "NUMBA_CPU_FEATURES": LEVEL.features})
    )
    assert len(here.splitlines()) > 200
    assert set(here.splitlines()) == set(level.splitlines())

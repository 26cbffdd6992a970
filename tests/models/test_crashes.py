"""A start that dies in native code has the next one compile anew, once; nothing else does."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf

from ngramspec.models.crashes import FORGOTTEN_S, watch_start


def die(folder: Path, code: str) -> tuple[int, bool]:
    """Run code within a start of another process. Returns its exit status, and whether it had cleared."""
    source = (
        "import ctypes, os, pathlib, signal, sys\nfrom ngramspec.models.crashes import watch_start\n"
        f"with watch_start(pathlib.Path(sys.argv[1]), lambda: print('cleared', flush=True)):\n    {code}"
    )
    done = subprocess.run([sys.executable, "-c", source, str(folder)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout == "cleared\n"


CRASH = "ctypes.string_at(0)"


@pytest.mark.parametrize("code", [CRASH, "os.abort()", "os.kill(os.getpid(), signal.SIGILL)"])
def test_the_start_after_a_crash_clears_once(tmp_path: Path, code: str) -> None:
    status, cleared = die(tmp_path / "new", code)
    assert status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGILL)
    assert not cleared
    assert die(tmp_path / "new", "pass") == (0, True)
    assert die(tmp_path / "new", "pass") == (0, False)
    assert not list((tmp_path / "new").iterdir())


def test_a_crash_that_clearing_does_not_cure(tmp_path: Path) -> None:
    assert [die(tmp_path, CRASH)[1] for _ in range(3)] == [False, True, False]


@pytest.mark.parametrize("code", ["pass", "raise ValueError", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(1)"])
def test_other_ends_clear_nothing(tmp_path: Path, code: str) -> None:
    die(tmp_path, code)
    assert die(tmp_path, "pass") == (0, False)


def test_what_a_killed_process_left_is_removed_later(tmp_path: Path) -> None:
    left = tmp_path / "1-1.start"
    left.touch()
    for age in (0, FORGOTTEN_S + 60):
        os.utime(left, (left.stat().st_atime, left.stat().st_mtime - age))
        with watch_start(tmp_path, pytest.fail):
            assert left.exists() == (age == 0)


def test_without_a_folder_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with watch_start(tmp_path / "file" / "crashes", pytest.fail):
        pass


def test_a_folder_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a cache in a container's image, which was filled where a start had crashed."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    (tmp_path / "1-1.start").write_text("Fatal Python error: Segmentation fault")
    cleared = []
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with watch_start(tmp_path, lambda: cleared.append(True)):
        assert cleared == [True]


def test_a_start_beside_one_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is gone when it has just been looked at."""
    for name in ("1-1.start", "2-2.start"):
        (tmp_path / name).touch()

    def stat_and_lose(path: Path, original: Any = Path.stat) -> os.stat_result:
        status: os.stat_result = original(path)
        if path.suffix == ".start":
            path.unlink()
        return status

    monkeypatch.setattr(Path, "stat", stat_and_lose)
    with watch_start(tmp_path, pytest.fail):
        pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NGRAMSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_engine_compiles_anew_after_a_crash(cache: Path, tmp_path: Path) -> None:
    """What numba compiled is beside the sources, and is not to be cleared by a test."""
    path = tiny_gguf.write(tmp_path / "tiny.gguf", "llama", "Q8_0")
    (cache / "crashes").mkdir(parents=True)
    (cache / "crashes" / "7-7.start").write_text("Fatal Python error: Segmentation fault")
    (cache / "code").mkdir()
    (cache / "code" / "wrong.o").write_bytes(b"\0")
    (cache / "starts").mkdir()
    source = f"""
from unittest import mock
from ngramspec.datastore import code_cache
with mock.patch.object(code_cache, "clear_all") as clear:
    from ngramspec import Engine
    for _ in range(2):
        with Engine({str(path)!r}, max_seqs=1, kv_memory=1 << 22, threads=1): pass
print(clear.call_count)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert "an earlier start crashed" in done.stderr
    assert not (cache / "code" / "wrong.o").exists()
    assert not list((cache / "crashes").iterdir())

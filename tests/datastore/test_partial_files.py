"""A file is there whole or not at all, and what a writer leaves that is killed goes when it is old."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ngramspec.datastore.partial_files import STALE_S, remove_stale, write_whole

_KILLED = """
import os, signal, sys
from pathlib import Path
from ngramspec.datastore.partial_files import write_whole
Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
write_whole(Path(sys.argv[1]), b"new")
"""


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "name"
    for content in (b"old", b"new"):
        write_whole(path, content, 0o600)
        assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == ["name"]
    if sys.platform != "win32":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    path = tmp_path / "name"
    path.write_bytes(b"old")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(error):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["name"]


def test_what_a_killed_writer_leaves_goes_when_it_is_old(tmp_path: Path) -> None:
    path = tmp_path / "name"
    path.write_bytes(b"old")
    assert subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=False).returncode
    assert path.read_bytes() == b"old"
    (partial,) = {*tmp_path.iterdir()} - {path}
    remove_stale(tmp_path)
    assert partial.exists(), "somebody may be writing it"
    os.utime(partial, (0, time.time() - STALE_S))
    remove_stale(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["name"]
    remove_stale(tmp_path / "nowhere")

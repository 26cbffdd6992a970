"""Child processes: isolated, limited in time, ended with their parent, replaced in a pool."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ngramspec.child_process import ChildEndedError, ChildProcess, ProcessPool

CHILD = """
import json, os, sys, time
from ngramspec.child_process import answer_messages, limit_memory

def serve():
    answer_messages(make_answer)

def make_answer(setup):
    print("a library prints what it likes")
    limit_memory(setup.get("memory", 1 << 40))
    def answer(message):
        match message.get("do"):
            case "sleep":
                time.sleep(600)
            case "pause":
                time.sleep(10)
            case "exit":
                os._exit(3)
            case "allocate":
                try:
                    bytearray(message["n_bytes"])
                except MemoryError:
                    return {"error": "memory"}
            case "facts":
                flags = {"isolated": sys.flags.isolated, "no_site": sys.flags.no_site}
                return {"path": sys.path, "folder": os.getcwd(), "group": os.getpgid(0), "pid": os.getpid(), **flags}
        return {"echo": message, "setup": setup}
    return answer
"""
PARENT = """
import sys
from ngramspec.child_process import ChildProcess
child = ChildProcess("talker", ("talker", "ngramspec"), {})
child.wait_until_ready()
print(child.ask({"do": "facts"}, 60)["group"], flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose process answers what it is sent."""
    (tmp_path / "talker").mkdir()
    (tmp_path / "talker" / "__init__.py").write_text(CHILD)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "current").mkdir()
    (tmp_path / "current" / "json.py").write_text("raise SystemExit('code of the current folder was run')")
    monkeypatch.chdir(tmp_path / "current")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "current"))


def start(**setup: int) -> ChildProcess:
    return ChildProcess("talker", ("talker", "ngramspec"), setup)


def test_messages_are_answered_in_order_whatever_they_hold() -> None:
    child = start(n=7)
    child.wait_until_ready()
    for text in ("a\nb", "\ud800", "é" * 100_000, ""):
        assert child.ask({"text": text}, 60) == {"echo": {"text": text}, "setup": {"n": 7}}
    child.close_input()
    assert child.wait() == 0
    child.close()


def test_a_child_is_isolated(tmp_path: Path) -> None:
    child = start()
    child.wait_until_ready()
    facts = child.ask({"do": "facts"}, 60)
    assert (facts["isolated"], facts["no_site"]) == (1, 1)
    assert facts["group"] != os.getpgid(0), "an interrupt from the keyboard does not reach it"
    assert str(tmp_path / "current") not in facts["path"]
    assert "" not in facts["path"]
    child.close()


def test_an_overdue_child_is_killed_and_one_that_ends_is_noticed() -> None:
    child = start()
    child.wait_until_ready()
    with pytest.raises(ChildEndedError, match=r"killed after 0\.2 s") as ended:
        child.ask({"do": "sleep"}, 0.2)
    assert ended.value.limit_s == 0.2
    assert not child.is_alive
    child.close()
    child = start()
    child.wait_until_ready()
    with pytest.raises(ChildEndedError, match="has ended"):
        child.ask({"do": "exit"}, 60)
    assert child.close() == 3


def test_a_child_that_is_killed_just_when_it_answers_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    child = start()
    child.wait_until_ready()
    kill = child.kill
    monkeypatch.setattr(child, "kill", lambda limit_s: (time.sleep(0.5), kill(limit_s)))
    with contextlib.suppress(ChildEndedError):
        child.ask({}, 0)
    assert not child.is_alive, "whoever asks it next would be told that this took too long"
    child.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not limit address space")
def test_memory_is_limited() -> None:
    child = start(memory=1 << 30)
    child.wait_until_ready()
    assert child.ask({"do": "allocate", "n_bytes": 2 << 30}, 60) == {"error": "memory"}
    assert "echo" in child.ask({}, 60)
    child.close()


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{PARENT}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, env=os.environ | {"PYTHONPATH": ""},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_pool_replaces_children_that_end_and_shares_its_places() -> None:
    pool = ProcessPool(start, 2, share_s=0.1)
    for limit_s in (0.3, 600.0):
        results: list[float | None] = []

        def sleep(limit_s: float = limit_s, results: list[float | None] = results) -> None:
            with pytest.raises(ChildEndedError) as ended:
                pool.ask({"do": "sleep"}, limit_s)
            results.append(ended.value.limit_s)

        threads = [threading.Thread(target=sleep) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            asking = [threading.Thread(target=pool.ask, args=({}, 60)) for _ in range(2)]
            for thread in asking:
                thread.start()
            for thread in asking:
                thread.join()
        assert len(results) == 2
        assert set(results) <= {0.1, 0.3}
    assert pool.ask({"n": 1}, 60)["echo"] == {"n": 1}
    pool.close()


def test_a_child_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "talker" / "__init__.py").write_text("raise ImportError('broken')")
    pool = ProcessPool(start, 1)
    with pytest.raises(OSError, match="it does not start"):
        pool.ask({}, 60)
    pool.close()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such timer")
def test_a_pool_never_answers_with_what_an_interrupted_caller_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pool = ProcessPool(start, 1)
    pool.ask({"text": "the child is ready"}, 60)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):  # from the first line on, however late the second one is
            signal.setitimer(signal.ITIMER_REAL, 0.2), pool.ask({"do": "pause"}, 60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert pool.ask({"text": "next"}, 60)["echo"] == {"text": "next"}
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_children_of_its_own() -> None:
    pool = ProcessPool(start, 2)
    of_parent = pool.ask({"do": "facts"}, 60)["pid"]
    pool.prepare()
    read, write = os.pipe()
    forked = os.fork()
    if not forked:  # whatever happens here, nothing but this is left of it
        with contextlib.suppress(Exception):
            of_child = pool.ask({"do": "facts"}, 60)["pid"]
            pool.close()
            os.write(write, str(of_child).encode())
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], 60)
    told = os.read(read, 100).decode() if ready else "it hangs"
    if not ready:
        os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)
    os.close(read)
    assert told.isdecimal(), told
    assert int(told) != of_parent
    assert pool.ask({"do": "facts"}, 60)["pid"] == of_parent
    pool.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a folder that a process works in")
def test_a_child_starts_although_the_current_folder_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    child = start()
    try:
        child.wait_until_ready()
        assert child.ask({"do": "facts"}, 60)["folder"] == os.sep
    finally:
        child.close()

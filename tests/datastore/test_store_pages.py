"""Stores whose pages are not in memory: look-ups find nothing and wait for nothing, and everything once the pages are there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_store

from ngramspec.datastore import lookup, page_cache
from ngramspec.datastore.lookup import Matcher
from ngramspec.datastore.reader import Datastore

DOCUMENT = [1, 2, 3, 4, 5, 6, 1, 2, 7]
FRESH = np.full(1, -1, np.int32)
SLOTS = np.zeros(1, np.int32)
KEPT = set[int]()  # addresses of files that are in memory from the beginning


def find(matcher: Matcher) -> list[int]:
    context = np.full((1, matcher.max_match), -1, np.int32)
    context[0, :2] = 3, 2
    return matcher.propose(SLOTS, context, FRESH).tokens.tolist()  # type: ignore[no-any-return]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A slow disk: pages are missing until this is set."""
    arrived = threading.Event()
    load = page_cache.load_in_thread

    def load_late(parts: Sequence[tuple[np.ndarray, int]]) -> threading.Thread:
        late = threading.Thread(target=lambda: (arrived.wait(), load(parts).join()), daemon=True)
        late.start()
        return late

    monkeypatch.setattr(page_cache, "is_in_memory", lambda data: arrived.is_set() or data.ctypes.data in KEPT)
    monkeypatch.setattr(page_cache, "load_in_thread", load_late)
    return arrived


@pytest.fixture
def matcher(disk: threading.Event, tmp_path: Path) -> Matcher:
    tiny_store.write_store(tmp_path / "store", [[DOCUMENT], [DOCUMENT[2:]]], 9)
    return Matcher([Datastore.open(tmp_path / "store").snapshot], 1)


def test_a_look_up_waits_for_no_page(matcher: Matcher, disk: threading.Event) -> None:
    assert matcher.loaded_stores == 0
    assert find(matcher) == []
    disk.set()
    matcher.wait_until_loaded()
    assert matcher.loaded_stores == 1
    assert find(matcher)[:3] == [4, 5, 6]


def test_one_store_is_searched_while_another_is_read(matcher: Matcher, disk: threading.Event, tmp_path: Path) -> None:
    tiny_store.write_store(tmp_path / "other", [[[2, 3, 8]]], 9)
    other = Datastore.open(tmp_path / "other").snapshot
    KEPT.add(other.segments[0].data.ctypes.data)
    both = Matcher([other, *matcher.snapshots], 1)
    assert both.loaded_stores == 0b01
    assert find(both) == [8]
    disk.set()
    both.wait_until_loaded()
    assert {4, 8} <= set(find(both))
    KEPT.clear()


def test_pages_that_have_left_memory_are_brought_back(matcher: Matcher, disk: threading.Event) -> None:
    disk.set()
    matcher.wait_until_loaded()
    disk.clear()
    matcher.load_pages()
    assert find(matcher) == []
    disk.set()
    matcher.wait_until_loaded()
    assert find(matcher)[:3] == [4, 5, 6]


@pytest.mark.parametrize("room", [0, 1000])
def test_what_memory_has_no_room_for_is_read_page_by_page(
    disk: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Nothing of it is read ahead, or its tokens alone."""
    tiny_store.write_store(tmp_path / "store", [[DOCUMENT * 50]], 9)
    snapshot = Datastore.open(tmp_path / "store").snapshot
    assert snapshot.segments[0].tokens.nbytes < 1000 < len(snapshot.segments[0].data)
    monkeypatch.setattr(lookup, "measure_free_memory", lambda: 2 * room)
    matcher = Matcher([snapshot], 1)
    assert (find(matcher) != []) == (room == 0)
    disk.set()
    matcher.wait_until_loaded()
    assert find(matcher)[:3] == [4, 5, 6]


def test_a_file_that_was_evicted(tmp_path: Path, make_evicted: Callable[[Path], None]) -> None:
    """With a real disk: what the system says is missing is there afterwards."""
    tiny_store.write_store(tmp_path / "store", [[np.random.default_rng(0).integers(0, 9, 2_000_000).tolist()]], 9)
    (file,) = (tmp_path / "store").glob("seg-*")
    assert page_cache.is_in_memory(Datastore.open(tmp_path / "store").snapshot.segments[0].data)
    make_evicted(file)
    snapshot = Datastore.open(tmp_path / "store").snapshot
    assert not page_cache.is_in_memory(snapshot.segments[0].data)
    assert snapshot.load_pages(1 << 30) == file.stat().st_size
    snapshot.wait_until_loaded()
    assert page_cache.is_in_memory(snapshot.segments[0].data)
    assert not snapshot.is_loading


@pytest.fixture
def make_evicted(tmp_path: Path) -> Callable[[Path], None]:
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("the page cache cannot be emptied")
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(1 << 20))

    def evict(path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    evict(probe)
    if page_cache.is_in_memory(np.memmap(probe, np.uint8, "r")):
        pytest.skip("this file system keeps everything in memory")
    return evict


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_files_that_a_control_group_has_read_are_free(tmp_path: Path) -> None:
    """Else each datastore that is brought into memory would leave less room for the next, and for itself when it is looked at again."""
    group = "sys/fs/cgroup/memory."
    files = {"proc/meminfo": "MemAvailable: 9000000 kB\n", "proc/self/cgroup": "0::/\n"}
    write_files(tmp_path, files | {f"{group}max": "5000", f"{group}current": "4000", f"{group}stat": "anon 7\ninactive_file 3000\n"})
    assert page_cache.find_free_memory(tmp_path) == 4000
    write_files(tmp_path, {f"{group}max": "max"})
    assert page_cache.find_free_memory(tmp_path) == 9_000_000 * 1024


def test_memory_that_the_platform_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert page_cache.find_free_memory(tmp_path) is None
    monkeypatch.setattr(page_cache, "find_free_memory", lambda: None)
    assert page_cache.measure_free_memory() == 2 << 30


MEMORY_LIMITS: list[tuple[str, dict[str, str], int | None]] = [
    ("none", {"proc/self/cgroup": "0::/user.slice", "sys/fs/cgroup/user.slice/memory.max": "max"}, None),
    (
        "a unit of systemd, in a slice with less left",
        {
            "proc/self/cgroup": "0::/system.slice/ngramspec.service\n",
            "sys/fs/cgroup/system.slice/ngramspec.service/memory.max": "9000",
            "sys/fs/cgroup/system.slice/ngramspec.service/memory.current": "1000",
            "sys/fs/cgroup/system.slice/memory.max": "20000",
            "sys/fs/cgroup/system.slice/memory.current": "14000",
        },
        6000,
    ),
    (
        "a limit from which on the unit is slowed down",
        {
            "proc/self/cgroup": "0::/a\n",
            "sys/fs/cgroup/a/memory.max": "9000",
            "sys/fs/cgroup/a/memory.high": "5000",
            "sys/fs/cgroup/a/memory.current": "1000",
        },
        4000,
    ),
    (
        "version 1",
        {
            "proc/self/cgroup": "12:cpuset:/\n5:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "5000",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "4000",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": "inactive_file 1\ntotal_inactive_file 3000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "8000",
        },
        4000,
    ),
    (
        "version 1 in a container, more used than there may be",
        {
            "proc/self/cgroup": "5:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5100",
        },
        0,
    ),
    ("damaged", {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "many", "sys/fs/cgroup/memory.current": "1"}, None),
]


@pytest.mark.parametrize(("files", "free"), [limit[1:] for limit in MEMORY_LIMITS], ids=[limit[0] for limit in MEMORY_LIMITS])
def test_limits_of_memory_of_control_groups(tmp_path: Path, files: dict[str, str], free: int | None) -> None:
    """Else the KV cache is sized by the machine's memory, and the system kills the server once it is full."""
    write_files(tmp_path, files)
    assert page_cache.find_free_memory(tmp_path) == free
    write_files(tmp_path, {"proc/meminfo": "MemAvailable: 9000000 kB\n"})
    assert page_cache.find_free_memory(tmp_path) == (9_000_000 * 1024 if free is None else free)


def test_free_memory_knows_the_limit_of_the_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    write_files(tmp_path, {"proc/meminfo": "MemAvailable: 9000000 kB\n", "proc/self/statm": "1000 500 100 1 0 300 0\n"})
    for limit, expected in ((4 << 30, (4 << 30) - 1000 * page_cache.PAGE), (4096, 0), (resource.RLIM_INFINITY, 9_000_000 * 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert page_cache.find_free_memory(tmp_path) == expected

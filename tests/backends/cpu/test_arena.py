"""Memory for packed weights, and the pages that it lies in."""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.backends.cpu.arena import LARGE_PAGE, Arena, can_move_pages, make_zeros
from ngramspec.backends.cpu.formats import LINE
from ngramspec.engine.llm_engine import Engine


@given(st.lists(st.integers(1, 3 << 20), min_size=1, max_size=30), st.integers(0, 9 << 20))
@settings(max_examples=20, deadline=None)
def test_memory_for_weights_is_given_once(sizes: list[int], reserved: int) -> None:
    arena = Arena()
    arena.PIECE = 4 << 20  # type: ignore[misc]
    if reserved:
        arena.reserve_pages(reserved)
    taken = [arena.take(size) for size in sizes]
    for i, memory in enumerate(taken):
        assert memory.ctypes.data % LINE == 0
        assert len(memory) >= sizes[i]
        assert not memory.any()
        memory[:] = 1 + i % 200
    assert all((memory == 1 + i % 200).all() for i, memory in enumerate(taken))
    assert arena.n_bytes == sum(map(len, taken))


def find_mapping(address: int) -> Iterator[str]:
    """The lines of the mapping that holds an address."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif here:
            yield line


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_memory_for_weights_comes_to_lie_in_large_pages() -> None:
    """Pages that are shared are not made large, whatever was asked for them."""
    arena = Arena()
    weights = arena.take(3 * LARGE_PAGE)
    numbers = np.random.default_rng(0).integers(0, 256, len(weights)).astype(np.uint8)
    weights[:] = numbers
    while arena.enlarge_page():
        pass
    assert np.array_equal(weights, numbers)
    lines = dict(re.split(r":\s+", line, maxsplit=1) for line in find_mapping(weights.ctypes.data))
    flags = lines["VmFlags"].split()
    assert "rd" in flags
    assert "hg" in flags
    assert "sh" not in flags
    assert not can_move_pages() or int(lines["AnonHugePages"].split()[0]) >= 2 * LARGE_PAGE >> 10


@pytest.mark.skipif(not can_move_pages(), reason="Linux has handed out pages ahead since 5.14, moved them since 6.1")
def test_pages_that_are_reserved_are_there_before_they_are_written() -> None:
    arena = Arena()
    arena.reserve_pages(4 * LARGE_PAGE)
    weights = arena.take(4 * LARGE_PAGE)
    while int(dict(re.split(r":\s+", line, maxsplit=1) for line in find_mapping(weights.ctypes.data))["Rss"].split()[0]) < 8 << 10:
        time.sleep(0.01)
    assert not weights.any()


def test_what_is_written_while_pages_are_reserved_stays() -> None:
    for _ in range(20):
        arena = Arena()
        arena.reserve_pages(4 * LARGE_PAGE)
        weights = arena.take(4 * LARGE_PAGE)
        weights[:: mmap.PAGESIZE] = 7
        del arena  # the thread that reserves them may still be at work
        time.sleep(0.002)
        assert (weights[:: mmap.PAGESIZE] == 7).all()
        assert weights.sum(dtype=np.int64) == 7 * -(-len(weights) // mmap.PAGESIZE)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux describes its mappings")
def test_memory_for_keys_is_taken_as_it_is_written() -> None:
    def read_pages() -> tuple[int, int]:  # in KiB, of a mapping that may hold others' memory, too
        lines = dict(re.split(r":\s+", line, maxsplit=1) for line in find_mapping(keys.ctypes.data))
        return int(lines["Private_Dirty"].split()[0]), int(lines.get("AnonHugePages", "0").split()[0])

    keys = make_zeros(16 * LARGE_PAGE, np.uint16)
    assert not keys[::1000].any()
    written, large = read_pages()
    keys[0] = keys[8 * LARGE_PAGE] = 1
    assert read_pages() == (written + (2 * mmap.PAGESIZE >> 10), large)


@pytest.mark.skipif(not can_move_pages(), reason="this system does not move pages")
def test_an_engine_moves_its_weights_while_it_waits() -> None:
    with Engine(tiny.tiny_model("llama"), tokenizer=tiny.byte_tokenizer(), threads=1, kv_memory=1 << 24) as engine:
        engine.complete("ab", max_tokens=2)
        arena, deadline_s = engine.runner.arena, time.monotonic() + 30  # type: ignore[attr-defined]
        weights = arena.take(2 * LARGE_PAGE)
        weights[:] = 1
        first = next(at for at in range(0, len(weights), 4096) if (weights.ctypes.data + at) % LARGE_PAGE == 0)
        while time.monotonic() < deadline_s:
            lines = dict(re.split(r":\s+", line, maxsplit=1) for line in find_mapping(weights.ctypes.data + first))
            if int(lines["AnonHugePages"].split()[0]) >= LARGE_PAGE >> 10:
                break
            time.sleep(0.01)
        assert time.monotonic() < deadline_s


def test_memory_that_there_is_not() -> None:
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes"):
        Arena().take(1 << 60)

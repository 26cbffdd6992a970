"""Whether mapped files are in memory, and bringing them there in a thread, so that no look-up waits for a disk.

Where a page is missing, Linux reads up to `read_ahead_kb` around it: 13 ms for 8 MB, and a look-up in 69 M tokens touches 190 pages.
Mapped bytes enter. It knows nothing of what they mean, and on a system that does not say what is in memory, everything is.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .control_groups import read_file, read_free_memory

PAGE = mmap.PAGESIZE
_SAMPLES, _RUN = 64, 64  # a file is looked at in so many places, so many pages each: all of 16 MB
_CHUNK = 1 << 23  # bytes that are asked for at once


def find_free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without pushing others out, or None if the platform does not tell.

    On Linux what the system has, and what the control groups and `ulimit -v` leave of their limits; `root` is where /proc and /sys lie.
    """
    free = [limit] if (limit := read_free_memory(root)) is not None else []
    if match := re.search(r"^MemAvailable:\s+(\d+) kB", read_file(root / "proc/meminfo"), re.MULTILINE):
        free.append(int(match[1]) * 1024)
    with contextlib.suppress(ImportError, OSError, ValueError, IndexError):  # Windows, not Linux
        import resource

        if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:  # `ulimit -v`
            free.append(max(limit - int(read_file(root / "proc/self/statm").split()[0]) * PAGE, 0))
    return min(free, default=None)


def measure_free_memory() -> int:
    """Return the bytes that can be allocated without pushing others out, at least 256 MB; 2 GB if the platform does not tell."""
    free = find_free_memory()
    return max(2 << 30 if free is None else free, 1 << 28)


@functools.cache
def _find_mincore() -> Callable[..., int] | None:
    try:
        return ctypes.CDLL(None).mincore
    except (AttributeError, OSError, TypeError):  # Windows
        return None


def is_in_memory(data: np.ndarray) -> bool:
    """Return whether the pages of mapped bytes u8 [n] are in memory, judged by samples if there are many of them."""
    mincore = _find_mincore()
    if mincore is None:
        return True
    first, end = data.ctypes.data // PAGE, -(-(data.ctypes.data + len(data)) // PAGE)
    at = range(first, end, max(_RUN, (end - first) // _SAMPLES))
    states = np.ones(_RUN, np.uint8)
    for page in at:
        n = min(_RUN, end - page)
        pages = ctypes.c_void_p(page * PAGE), ctypes.c_size_t(n * PAGE), ctypes.c_void_p(states.ctypes.data)
        if mincore(*pages) == 0 and not (states[:n] & 1).all():
            return False
    return True


def expect_random_reads(data: np.ndarray) -> None:
    """Have the system read single pages of a whole mapped file u8 [n], where what it reads around them would push out others."""
    if hasattr(mmap, "MADV_RANDOM"):
        _give_advice(data, mmap.MADV_RANDOM, 0, len(data))


def load_in_thread(parts: Sequence[tuple[np.ndarray, int]]) -> threading.Thread:
    """Return a thread that brings the first bytes of mapped files into memory and into the process's page table: (u8 [n], how many)."""
    thread = threading.Thread(target=_load, args=(parts,), name="datastore-pages", daemon=True)
    thread.start()
    return thread


def _load(parts: Sequence[tuple[np.ndarray, int]]) -> None:
    for data, n in parts:
        for start in range(0, n, _CHUNK):
            end = min(start + _CHUNK, n)
            if hasattr(mmap, "MADV_WILLNEED"):
                _give_advice(data, mmap.MADV_WILLNEED, start, end - start)
            data[start:end:PAGE].max()


def _give_advice(data: np.ndarray, advice: int, start: int, n: int) -> None:
    mapping: Any = data.base.obj if isinstance(data.base, memoryview) else None
    if isinstance(mapping, mmap.mmap) and n:
        with contextlib.suppress(OSError):
            mapping.madvise(advice, start, n)

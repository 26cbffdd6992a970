"""Memory for packed weights and for keys and values.

Weights lie in large pages if the system has them: with small ones a pass of 8 rows took 1.05 to 1.6 times as long. Keys and values do not:
attention over 8,000 tokens took as long, and of each layer 2 MiB of both would be taken by the first token (111 MB of Qwen2.5-Coder-1.5B).

Where a virtual machine's host hands memory out when it is first touched, a large page takes 4 to 9 ms instead of 0.3, and a model of 1 GB
took 1.0 to 1.5 s more to start (AMD EPYC, Zen 4, two cores). So once large pages are that slow, weights are written into small ones, and
these are moved while nothing else is to do, or in a tenth of the time of steps.
"""

from __future__ import annotations

import errno
import functools
import mmap
import sys
import threading
import time

import numpy as np
from numba import types

from ngramspec.backends.cpu.codegen.intrinsics import or_byte
from ngramspec.backends.cpu.formats import LINE
from ngramspec.datastore.code_cache import njit

LARGE_PAGE = 2 << 20  # bytes, on x86, and on Arm with small pages of 4 KiB
_MADV_COLLAPSE = 25  # of Linux since 6.1; Python has no name for it
# Processor time in nanoseconds that TIMED bytes of large pages take at most: 3 ms (Zen 3), 23 to 40 if a host has yet to hand them out. As
# small pages they take 10 ms and more.
TIMED, LARGE_NS = 16 << 20, 8_000_000
_THREAD_CLOCK = 3  # CLOCK_THREAD_CPUTIME_ID of Linux
# Shared pages, Python's default, belong to a file in memory, for which Linux makes no large ones unless it is told to (shmem_enabled).
_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Arena:
    """Allocates memory for weights."""

    PIECE = 256 << 20

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)
        self._small: list[tuple[mmap.mmap, int]] = []
        self.n_bytes = 0

    def take(self, n_bytes: int) -> np.ndarray:
        """Take [n_bytes] uint8, zeros, at an address that is a multiple of 64. Raises MemoryError."""
        n_bytes = -(-n_bytes // LINE) * LINE
        if n_bytes > len(self._free):
            self._map_piece(max(self.PIECE, n_bytes))
        taken, self._free = self._free[:n_bytes], self._free[n_bytes:]
        self.n_bytes += n_bytes
        return taken

    def reserve_pages(self, n_bytes: int) -> None:
        """Have the system hand out the pages of the next `n_bytes` beside what the caller does: one by one they take half of packing."""
        try:
            pages = self._map_piece(max(LINE, n_bytes))
        except MemoryError:  # so says `take`
            return
        if sys.platform == "linux":
            large, clock = can_move_pages(), np.zeros(2, np.int64)
            if large:
                pages.madvise(mmap.MADV_HUGEPAGE)
            rest = mmap.PAGESIZE, large, 0, clock
            touch_pages(self._free[:0], *rest)  # loads its machine code
            threading.Thread(target=touch_pages, args=(self._free, *rest), daemon=True).start()
            time.sleep(0.001)  # so that it begins before this thread goes on

    def _map_piece(self, n_bytes: int) -> mmap.mmap:
        pages = _map_pages(n_bytes)
        self._free = np.frombuffer(pages, np.uint8)
        if can_move_pages():
            pages.madvise(mmap.MADV_NOHUGEPAGE)
            first = -self._free.ctypes.data % LARGE_PAGE
            self._small += [(pages, at) for at in range(first, len(pages) - LARGE_PAGE + 1, LARGE_PAGE)]
        elif hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages

    def enlarge_page(self) -> bool:
        """Move what lies in some small pages into a large one, which takes 0.3 to 9 ms; return whether there are more."""
        while self._small:
            pages, at = self._small.pop()
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
                pages.madvise(_MADV_COLLAPSE, at, LARGE_PAGE)
            except OSError as e:
                if e.errno == errno.EINVAL:  # nothing has been written there
                    continue
            break  # also if no large page is to be had, which the system may have looked for
        return bool(self._small)


_madvise = types.ExternalFunction("madvise", types.intc(types.uintp, types.uintp, types.intc))
_clock_gettime = types.ExternalFunction("clock_gettime", types.intc(types.intc, types.uintp))


@njit(cache=True, nogil=True)
def _read_clock(clock):
    _clock_gettime(_THREAD_CLOCK, np.uint64(clock.ctypes.data))
    return clock[0] * 1_000_000_000 + clock[1]


@njit(cache=True, nogil=True)
def touch_pages(memory, page_bytes, large, no_bits, clock):
    """Write to all pages of memory on Linux, which leaves it as it is: if `large`, to large ones until they are slow, then to small ones.

    `no_bits` is 0; `clock`: two int64 to write to. A compiled loop, since other threads of Python may hold the interpreter for a second, as
    the one that reads a tokenizer. MADV_POPULATE_WRITE takes as long, and no thread can map memory meanwhile.
    """
    address, n_bytes = np.int64(memory.ctypes.data), len(memory)
    began, timed = _read_clock(clock), 0
    for at in range(0, n_bytes, page_bytes):
        if large and at - timed >= TIMED:
            now = _read_clock(clock)
            if now - began > LARGE_NS:
                large = False
                _madvise(np.uint64(address + at), np.uint64(n_bytes - at), np.int32(mmap.MADV_NOHUGEPAGE))
            began, timed = now, at
        or_byte(address + at, no_bits)


def make_zeros(n: int, dtype: type[np.generic]) -> np.ndarray:
    """Return [n] zeros in small pages, which the system gives as they are first written. Raises MemoryError."""
    pages = _map_pages(max(1, n * np.dtype(dtype).itemsize))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, dtype, n)


def _map_pages(n_bytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, n_bytes, **_PRIVATE)
    except (OSError, OverflowError) as e:
        raise MemoryError(f"{n_bytes} bytes: {e}") from e


@functools.cache
def can_move_pages() -> bool:
    """Return whether the system moves what lies in small pages into a large one when it is told to."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    with _map_pages(2 * LARGE_PAGE) as pages:
        pages[0] = pages[LARGE_PAGE] = pages[2 * LARGE_PAGE - 1] = 1  # a byte or more of every large page
        try:
            pages.madvise(_MADV_COLLAPSE)
        except OSError:
            return False
    return True

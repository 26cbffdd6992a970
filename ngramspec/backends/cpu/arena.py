"""Memory for packed weights and for keys and values.

Weights lie in large pages if the system has them: with small ones a pass of 8 rows took 1.05 to 1.6 times as long. Keys and values do not:
attention over 8,000 tokens took as long, and of each layer 2 MiB of both would be taken by the first token (111 MB of Qwen2.5-Coder-1.5B).

Weights are written into small pages first, and these are moved while nothing else is to do, or in a tenth of the time of steps. Where a
virtual machine's host hands memory out when it is first touched, a large page takes up to 9 ms, and a model of 1 GB took 1.0 to 1.5 s more
to start (AMD EPYC, Zen 4, two cores).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import sys
import threading

import numpy as np

from ngramspec.backends.cpu.formats import LINE

LARGE_PAGE = 2 << 20  # bytes, on x86, and on Arm with small pages of 4 KiB
_MADV_COLLAPSE, _MADV_POPULATE_WRITE = 25, 23  # of Linux since 6.1 and 5.14; Python has no names for them
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
            self._map_piece(max(LINE, n_bytes))
        except MemoryError:  # so says `take`
            return
        threading.Thread(target=self._touch_pages, daemon=True).start()

    def _touch_pages(self) -> None:
        if sys.platform == "linux":  # by ctypes, since other threads of Python stand still while `mmap.madvise` works
            free = self._free
            ctypes.CDLL(None).madvise(ctypes.c_void_p(free.ctypes.data), ctypes.c_size_t(len(free)), _MADV_POPULATE_WRITE)

    def _map_piece(self, n_bytes: int) -> None:
        pages = _map_pages(n_bytes)
        self._free = np.frombuffer(pages, np.uint8)
        if can_move_pages():
            pages.madvise(mmap.MADV_NOHUGEPAGE)
            first = -self._free.ctypes.data % LARGE_PAGE
            self._small += [(pages, at) for at in range(first, len(pages) - LARGE_PAGE + 1, LARGE_PAGE)]
        elif hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)

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

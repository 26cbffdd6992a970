"""Divide one pass among threads in code that numba compiles: they stay awake from the first part to the last.

A pass is a sequence of parts, and a part is some pieces of work. Every thread goes through all parts: it takes pieces of a part until there
are none, then waits until the other threads' pieces are done. So a thread that the machine holds back delays no more than the piece in its
hands, and one that never comes is not waited for. Waiting spins for some microseconds, then yields. The module knows nothing of what the
work is.
"""

from __future__ import annotations

import sys

import numpy as np
from numba import types

from ngramspec.backends.cpu.codegen.intrinsics import atomic_add, atomic_load, pause
from ngramspec.datastore.code_cache import njit

SPINS = 4000  # Polls of a counter before a waiting thread yields the processor.
COUNTERS = 16  # int64 per part: pieces taken at 0 and, in another cache line, pieces done at _DONE.
_DONE = 8


def make_counters(n_parts: int) -> np.ndarray:
    """Return counters [n_parts, COUNTERS] for a pass; zeros."""
    return np.zeros((n_parts, COUNTERS), np.int64)


if sys.platform == "win32":

    @njit(cache=True, nogil=True)
    def yield_processor():
        pause()

else:
    _usleep = types.ExternalFunction("usleep", types.int32(types.uint32))

    @njit(cache=True, nogil=True)
    def yield_processor():
        _usleep(np.uint32(1))


@njit(cache=True, nogil=True)
def take_piece(state, part):
    """Return the number of a piece of this part that nobody has taken; the number of its pieces or more if there is none."""
    return atomic_add(state, part, 0)


@njit(cache=True, nogil=True)
def take_next_piece(state, part):
    """Mark a taken piece as done, and take another one as `take_piece` does."""
    atomic_add(state, part, _DONE)
    return atomic_add(state, part, 0)


@njit(cache=True, nogil=True)
def wait_for_pieces(state, part, n_pieces):
    """Wait until all pieces of a part are done."""
    spins = 0
    while atomic_load(state, part, _DONE) < n_pieces:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            yield_processor()

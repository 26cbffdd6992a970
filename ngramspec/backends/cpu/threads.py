"""Divide passes among threads in code that numba compiles: they stay awake from the first part of a pass to the last.

A pass is a sequence of parts, and a part is some pieces of work. Every thread goes through all parts: it takes pieces of a part until there
are none, then waits until the other threads' pieces are done. So a thread that the machine holds back delays no more than the piece in its
hands, and one that never comes is not waited for. Waiting spins for some microseconds, then yields.

The threads are a `ThreadTeam`. One thread opens a pass, computes, and closes it. A team's other threads that come while it is open take a
seat and compute too; the pieces are taken by those that are there. They wait for the next pass in compiled code, without the interpreter's
lock, and wake in microseconds: waiting spins for about a millisecond, longer than what lies between two passes of a request, then sleeps.

numba's own parallel loops wait for every thread, take 100 µs to start a second one on macOS, and abort the process there if two threads
of the program use them at once. The module knows nothing of what the work is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from ngramspec.backends.cpu.codegen.intrinsics import atomic_add, atomic_compare_exchange, atomic_exchange, atomic_load, pause
from ngramspec.datastore.code_cache import njit

SPINS = 4000  # Polls of a counter before a waiting thread yields the processor.
COUNTERS = 16  # int64 per part: pieces taken at 0 and, in another cache line, pieces done at _DONE.
_DONE = 8
# Lines of a team's state: passes opened so far, free seats of the open pass, threads that have left it, threads asleep, whether to stop.
_OPENED, _SEATS, _LEFT, _ASLEEP, _STOPPED = range(5)
_MUTEX, _CONDITION = 5, 6  # lines that hold the system's own; the largest, macOS's pthread_mutex_t, takes 64 bytes of the 128
_LINES = 7
IDLE_SPINS = 40_000  # polls before a thread that waits for a pass sleeps: about 1 ms, as long as GNU OpenMP


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


# ------------------------------------------------------------------ the team

if sys.platform == "win32":
    _lock = types.ExternalFunction("AcquireSRWLockExclusive", types.void(types.intp))
    _unlock = types.ExternalFunction("ReleaseSRWLockExclusive", types.void(types.intp))
    _sleep = types.ExternalFunction("SleepConditionVariableSRW", types.int32(types.intp, types.intp, types.uint32, types.uint32))
    _wake = types.ExternalFunction("WakeAllConditionVariable", types.void(types.intp))

    @njit(cache=True, nogil=True)
    def _init(mutex, condition):
        pass  # zeros are right

    @njit(cache=True, nogil=True)
    def _wait(condition, mutex):
        _sleep(condition, mutex, np.uint32(0xFFFFFFFF), np.uint32(0))

else:
    _lock = types.ExternalFunction("pthread_mutex_lock", types.int32(types.intp))
    _unlock = types.ExternalFunction("pthread_mutex_unlock", types.int32(types.intp))
    _wait = types.ExternalFunction("pthread_cond_wait", types.int32(types.intp, types.intp))
    _wake = types.ExternalFunction("pthread_cond_broadcast", types.int32(types.intp))
    _init_mutex = types.ExternalFunction("pthread_mutex_init", types.int32(types.intp, types.intp))
    _init_condition = types.ExternalFunction("pthread_cond_init", types.int32(types.intp, types.intp))

    @njit(cache=True, nogil=True)
    def _init(mutex, condition):
        _init_mutex(mutex, 0)
        _init_condition(condition, 0)


class ThreadTeam:
    """The threads of one model, and what they share."""

    def __init__(self) -> None:
        self.state = np.zeros((_LINES, COUNTERS), np.int64)
        self.published: tuple[object, object] = None, None
        """The model and the pass that the threads share at present."""
        self._threads: list[threading.Thread] = []
        _init_team(self.state)

    def grow(self, n_threads: int, serve: Callable[..., None], *args: Any) -> None:
        """Start threads until there are `n_threads`; each calls serve(*args), which returns once `wait_for_pass` has returned -1."""
        while len(self._threads) < n_threads:
            self._threads.append(threading.Thread(target=serve, args=args, name="ngramspec-pass", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """End all threads, after the pass that they are in."""
        _stop_team(self.state)
        while self._threads:
            self._threads.pop().join()


@njit(cache=True, nogil=True)
def _get_address(state, line):
    return state.ctypes.data + line * state.strides[0]


@njit(cache=True, nogil=True)
def _init_team(state):
    _init(_get_address(state, _MUTEX), _get_address(state, _CONDITION))


@njit(cache=True, nogil=True)
def _wake_team(state):
    _lock(_get_address(state, _MUTEX))
    _wake(_get_address(state, _CONDITION))
    _unlock(_get_address(state, _MUTEX))


@njit(cache=True, nogil=True)
def _stop_team(state):
    atomic_add(state, _STOPPED, 0)
    _wake_team(state)


@njit(cache=True, nogil=True)
def open_pass(state, n_seats):
    """Let up to `n_seats` threads in. What was written before is visible to them."""
    atomic_exchange(state, _LEFT, 0, 0)
    atomic_exchange(state, _SEATS, 0, n_seats)
    atomic_add(state, _OPENED, 0)
    if atomic_load(state, _ASLEEP, 0):
        _wake_team(state)


@njit(cache=True, nogil=True)
def close_pass(state, n_seats):
    """Let no more threads in, and wait until those inside have left."""
    n_taken = n_seats - atomic_exchange(state, _SEATS, 0, 0)
    spins = 0
    while atomic_load(state, _LEFT, 0) < n_taken:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            yield_processor()


@njit(cache=True, nogil=True)
def wait_for_pass(state, last):
    """Wait until a pass after number `last` is opened and return its number; -1 if the team is stopped."""
    spins = 0
    while True:
        opened = atomic_load(state, _OPENED, 0)
        if atomic_load(state, _STOPPED, 0):
            return -1
        if opened != last:
            return opened
        spins += 1
        if spins < IDLE_SPINS:
            pause()
            continue
        mutex, condition = _get_address(state, _MUTEX), _get_address(state, _CONDITION)
        _lock(mutex)
        atomic_add(state, _ASLEEP, 0)  # before looking again: whoever opens a pass looks here afterwards
        while atomic_load(state, _OPENED, 0) == last and not atomic_load(state, _STOPPED, 0):
            _wait(condition, mutex)
        atomic_exchange(state, _ASLEEP, 0, atomic_load(state, _ASLEEP, 0) - 1)  # all changes are made under the mutex
        _unlock(mutex)
        spins = 0


@njit(cache=True, nogil=True)
def take_seat(state):
    """Enter the pass: return the seat, from 1 on; 0 if it is closed or full."""
    free = atomic_load(state, _SEATS, 0)
    while free > 0:
        found = atomic_compare_exchange(state, _SEATS, 0, free, free - 1)
        if found == free:
            return free
        free = found
    return 0


@njit(cache=True, nogil=True)
def leave_pass(state):
    """Leave the pass; nothing of it may be touched afterwards."""
    atomic_add(state, _LEFT, 0)

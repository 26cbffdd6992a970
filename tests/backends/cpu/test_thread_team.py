"""A team's threads: each pass is computed whole, by whoever comes, and nothing of it is touched once it is closed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from numba import njit

from ngramspec.backends.cpu.threads import (
    ThreadTeam,
    close_pass,
    leave_pass,
    make_counters,
    open_pass,
    take_next_piece,
    take_piece,
    take_seat,
    wait_for_pass,
    wait_for_pieces,
)

N_PIECES = 50


@njit(nogil=True)
def compute_share(counters, work, seat):
    """Add one to each piece of two parts; note in work[2] who was there, and in work[3] that somebody still is."""
    work[3, seat] += 1
    work[2, seat] += 1
    for part in range(2):
        piece = take_piece(counters, part)
        while piece < N_PIECES:
            work[part, piece] += 1
            piece = take_next_piece(counters, part)
        wait_for_pieces(counters, part, N_PIECES)
    work[3, seat] -= 1


@njit(nogil=True)
def serve(state, counters, work):
    number = 0
    while True:
        number = wait_for_pass(state, number)
        if number < 0:
            break
        seat = take_seat(state)
        if seat:
            compute_share(counters, work, seat)
            leave_pass(state)


@njit(nogil=True)
def lead(state, counters, work, n_seats):
    """Run a pass; return how many others are in it when it is closed."""
    open_pass(state, n_seats)
    compute_share(counters, work, 0)
    close_pass(state, n_seats)
    return work[3].sum()


def run_passes(team: ThreadTeam, n_threads: int, n_seats: int, n_passes: int) -> np.ndarray:
    """Return how often each seat was taken."""
    counters, work = make_counters(2), np.zeros((4, N_PIECES), np.int64)
    team.grow(n_threads, serve, team.state, counters, work)
    for i in range(n_passes):
        counters[:] = 0
        assert lead(team.state, counters, work, n_seats) == 0
        assert (work[:2] == i + 1).all()
    return work[2]


@pytest.mark.parametrize("n_threads", [0, 1, 3, 7])
def test_every_piece_of_every_pass_is_done_once(n_threads: int) -> None:
    team = ThreadTeam()
    taken = run_passes(team, n_threads, n_threads, 3000)
    team.stop()
    assert taken[0] == 3000, "the one who leads"
    assert (taken[1 : n_threads + 1] <= 3000).all()
    assert not taken[n_threads + 1 :].any()


def test_no_more_threads_come_than_there_are_seats() -> None:
    team = ThreadTeam()
    taken = run_passes(team, 4, 2, 2000)
    team.stop()
    assert not taken[3:].any()


def test_sleeping_threads_wake() -> None:
    team = ThreadTeam()
    run_passes(team, 1, 1, 1)
    while not team.state[3, 0]:  # asleep
        os.sched_yield() if hasattr(os, "sched_yield") else None
    counters, work = make_counters(2), np.zeros((4, N_PIECES), np.int64)
    n_passes = 0
    while not team.state[3, 0] or n_passes < 10:
        counters[:] = 0
        lead(team.state, counters, work, 1)
        n_passes += 1
    team.stop()


def test_a_stopped_team_has_no_threads() -> None:
    team = ThreadTeam()
    run_passes(team, 3, 3, 5)
    threads = list(team._threads)
    team.stop()
    assert not any(thread.is_alive() for thread in threads)
    assert run_passes(team, 0, 2, 3)[0] == 3, "passes go on without them"


TWO_ENGINES = """
import sys, threading
import numba
from ngramspec import Engine, SamplingParams

engines, texts = [Engine(sys.argv[1], threads=2) for _ in range(2)], {}

def run(i):
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    texts[i] = [engines[i].complete("def f(x):", params).token_ids for _ in range(5)]

threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert texts[0] == texts[1]
for engine in engines:
    engine.close()
print(numba.threading_layer())
"""


@pytest.mark.parametrize("options", ["int8", "modules"])
def test_two_engines_at_once_on_workqueue(tmp_path: Path, options: str) -> None:
    """numba's layer "workqueue", macOS's, ends a process whose threads use it at once."""
    path = tmp_path / "tiny.gguf"
    if options == "int8":
        tiny_gguf.write_started(path, "llama", "Q4_K", std=0.1, threads=2)
    else:
        tiny_gguf.write(path, "gemma2", "Q4_K", std=0.1)
    done = subprocess.run(
        [sys.executable, "-c", TWO_ENGINES, str(path)],
        env=os.environ | {"NUMBA_THREADING_LAYER": "workqueue", "NUMBA_NUM_THREADS": "2"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.stdout.split() == ["workqueue"], done.stderr[-2000:]

"""One pass, some threads: every piece of every part is done once, in the order of the parts, by whoever comes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import njit

from ngramspec.backends.cpu.threads import make_counters, take_next_piece, take_piece, wait_for_pieces


@njit(cache=True, nogil=True)
def worker(state, n_pieces, times, before, mine):
    """Every piece of a part adds one to `times`, and notes how much of the part before it was done."""
    for part in range(times.shape[0]):
        piece = take_piece(state, part)
        while piece < n_pieces[part]:
            times[part, piece] += 1
            before[part, piece] = times[part - 1].sum() if part else 0
            mine[0] += 1
            piece = take_next_piece(state, part)
        wait_for_pieces(state, part, n_pieces[part])


class Work:
    def __init__(self, n_pieces: list[int]) -> None:
        self.n_pieces, most = np.array(n_pieces, np.int64), max(n_pieces)
        self.state = make_counters(len(n_pieces))
        self.times, self.before = (np.zeros((len(n_pieces), most), np.int64) for _ in range(2))

    def one(self) -> int:
        """How many pieces a thread did."""
        mine = np.zeros(1, np.int64)
        worker(self.state, self.n_pieces, self.times, self.before, mine)
        return int(mine[0])

    def check(self) -> None:
        for part, n in enumerate(self.n_pieces):
            assert self.times[part, :n].tolist() == [1] * n
            assert not self.times[part, n:].any()
            assert self.before[part, :n].tolist() == [self.n_pieces[part - 1] if part else 0] * n


@pytest.mark.parametrize("n_threads", [1, 2, 3, 8])
def test_every_piece_is_done_once_and_in_order(n_threads: int) -> None:
    for seed in range(20):
        work = Work([*np.random.default_rng(seed).integers(0, 40, 60).tolist(), 1])
        with ThreadPoolExecutor(n_threads) as pool:
            did = [pool.submit(work.one) for _ in range(n_threads)]
        work.check()
        assert sum(each.result() for each in did) == work.n_pieces.sum()


def test_a_thread_that_comes_when_all_is_done_does_nothing() -> None:
    work = Work([5, 0, 7])
    assert work.one() == 12, "nobody else came, and nobody was waited for"
    assert work.one() == 0
    work.check()


def test_a_piece_in_hand_is_waited_for() -> None:
    work = Work([2, 1])
    assert take_piece(work.state, 0) == 0
    work.times[0, 0] += 1
    thread = threading.Thread(target=work.one)
    thread.start()
    deadline = time.monotonic() + 60
    while not work.times[0, 1] and time.monotonic() < deadline:
        time.sleep(0.001)
    thread.join(0.05)
    assert thread.is_alive()
    assert work.times.tolist() == [[1, 1], [0, 0]]
    assert take_next_piece(work.state, 0) >= 2
    thread.join(60)
    assert not thread.is_alive()
    work.check()

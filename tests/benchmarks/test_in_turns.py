"""Whose turn it is, and what each has had of the time."""

from __future__ import annotations

import threading
import time

import pytest

from benchmarks.in_turns import InTurns


def test_who_has_made_the_fewest_tokens_is_next_and_the_others_clocks_stand_still() -> None:
    turns, lock, order = InTurns(["slow", "fast"], turn_s=0.02), threading.Lock(), list[str]()
    ended: dict[str, float] = {}

    def run(name: str, step_s: float, n_tokens: int) -> None:
        for _ in range(0, 24, n_tokens):
            with turns.step(name):
                assert lock.acquire(blocking=False), "two at a time"
                time.sleep(step_s)
                turns.made(name, n_tokens)
                order.append(name)
                lock.release()
        turns.leave(name)
        ended[name] = turns.clock(name)

    threads = [threading.Thread(target=run, args=("slow", 0.01, 1)), threading.Thread(target=run, args=("fast", 0.01, 3))]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - start
    assert sum(ended.values()) == pytest.approx(wall, rel=0.1), "all of the time is somebody's"
    assert ended["slow"] > 2 * ended["fast"]
    made = {"slow": 0, "fast": 0}
    for name in order[:-4]:
        made[name] += 1 if name == "slow" else 3
        assert abs(made["slow"] - made["fast"]) <= 12, "neither is far ahead"
    assert turns.clock("slow") == ended["slow"]


def test_who_has_left_waits_for_nobody() -> None:
    turns = InTurns(["a", "b"])
    turns.leave("b")
    with turns.step("b"):
        pass
    turns.leave("a")
    with turns.step("a"):
        pass

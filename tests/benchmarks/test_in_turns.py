"""Whose turn it is, and what each has had of the time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from benchmarks import in_turns
from benchmarks.in_turns import InTurns


def test_who_has_made_the_fewest_tokens_is_next_and_the_others_clocks_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(in_turns, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    turns, lock, between, order = InTurns(["slow", "fast"], turn_s=0.02), threading.Lock(), threading.Lock(), list[str]()
    ended: dict[str, float] = {}

    def run(name: str, step_s: float, n_tokens: int) -> None:
        for _ in range(0, 24, n_tokens):
            with turns.step(name):
                assert lock.acquire(blocking=False), "two at a time"
                with between:
                    now[0] += step_s
                turns.count_tokens(name, n_tokens)
                order.append(name)
                lock.release()
            with between:  # two steps, which is somebody's time, too
                now[0] += 0.001
        turns.remove(name)
        ended[name] = turns.read_clock(name)

    threads = [threading.Thread(target=run, args=("slow", 0.01, 1)), threading.Thread(target=run, args=("fast", 0.01, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(ended.values()) == pytest.approx(now[0]), "all of the time is somebody's"
    assert ended["slow"] > 2 * ended["fast"]
    made = {"slow": 0, "fast": 0}
    for name in order[:-4]:
        made[name] += 1 if name == "slow" else 3
        assert abs(made["slow"] - made["fast"]) <= 12, "neither is far ahead"
    assert turns.read_clock("slow") == ended["slow"]


def test_who_has_left_waits_for_nobody() -> None:
    turns = InTurns(["a", "b"])
    turns.remove("b")
    with turns.step("b"):
        pass
    turns.remove("a")
    with turns.step("a"):
        pass


def test_who_leaves_interrupts_nobody() -> None:
    turns = InTurns(["a", "b", "c"], turn_s=0)
    with turns.step("a"):
        turns.count_tokens("a", 1)
    with turns.step("b"):
        turns.count_tokens("b", 1)
        turns.remove("a")
        later = threading.Thread(target=lambda: turns.step("c").__enter__())
        later.start()
        later.join(0.1)
        assert later.is_alive(), "two at a time"
    later.join(60)
    assert not later.is_alive()

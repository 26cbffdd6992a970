"""Time limits for tests on busy machines: time in which the test's processes had to wait for the machine is not counted.

Functions and limits in seconds enter; seconds leave. On an idle machine they are those of the wall clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOOK_S, LONGEST_S = 0.005, 0.05
"""Between two looks at the clock, and what is counted of the time between them: during more of it the process was stopped."""


def read_delays() -> dict[Path, float]:
    """Return the seconds that each thread of this process and its children has waited for a processor, if the system counts them."""
    tasks, delays = [*Path("/proc/self/task").glob("*")], dict[Path, float]()
    for task in list(tasks):
        with suppress(OSError):
            for pid in (task / "children").read_text().split():
                tasks += Path(f"/proc/{pid}/task").glob("*")
    for task in tasks:
        with suppress(OSError):  # it has ended meanwhile
            delays[task] = int((task / "schedstat").read_text().split()[1]) / 1e9
    return delays


class FairClock:
    """Counts time that passes, if it is looked at often."""

    def __init__(self) -> None:
        self._counted, self._last, self._delays = 0.0, time.monotonic(), read_delays()

    def look(self) -> None:
        now = time.monotonic()
        self._counted, self._last = self._counted + min(now - self._last, LONGEST_S), now

    def is_over(self, limit_s: float) -> bool:
        self.look()
        return self._counted >= limit_s and self.get_seconds() >= limit_s

    def get_seconds(self) -> float:
        waited = sum(seconds - self._delays.get(task, 0.0) for task, seconds in read_delays().items())
        return max(self._counted - waited, 0.0)


def wait_until(holds: Callable[[], object], limit_s: float, meanwhile: Callable[[], object] = lambda: None) -> float:
    """Wait until it holds, for `limit_s` at most, and return the seconds."""
    clock = FairClock()
    while not holds():
        assert not clock.is_over(limit_s), f"not within {limit_s} s"
        meanwhile()
        time.sleep(LOOK_S)
    clock.look()
    return clock.get_seconds()


@contextmanager
def count_seconds() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds so far: those of a thread's clock, or the processor's if they are more."""
    clock, ended, computed = FairClock(), threading.Event(), time.process_time()

    def run() -> None:
        while not ended.wait(LOOK_S):
            clock.look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: max(clock.get_seconds(), time.process_time() - computed)
    finally:
        ended.set()
        thread.join()


def assert_within(limit_s: float, do: Callable[[], object], first: Callable[[], object] = lambda: None, tries: int = 5) -> None:
    """Assert that `do`, called after `first`, takes less than `limit_s`; only if it took longer, both are called again."""
    taken = list[float]()
    while not taken or (taken[-1] >= limit_s and len(taken) < tries):
        first()
        with count_seconds() as seconds:
            do()
            taken.append(seconds())
    assert taken[-1] < limit_s, taken

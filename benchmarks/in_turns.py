"""Engines that take turns of half a second on one machine, so that what disturbs it disturbs all of them.

Each goes on only while it is its turn, which ends between two steps, and its clock stands still meanwhile. The next turn is that of the
engine that has made the fewest tokens: they come through the same texts side by side, and end together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

TURN_S = 0.5


class InTurns:
    """Turns of the engines with these names. Thread-safe."""

    def __init__(self, names: Iterable[str], turn_s: float = TURN_S) -> None:
        self._turn_s = turn_s
        self._made = dict.fromkeys(names, 0)
        self._seconds = dict.fromkeys(self._made, 0.0)
        self._changed = threading.Condition()
        self._whose: str | None = next(iter(self._made))
        self._since = time.perf_counter()

    def read_clock(self, name: str) -> float:
        """Return seconds that this engine has had."""
        with self._changed:
            return self._seconds[name] + (time.perf_counter() - self._since if self._whose == name else 0.0)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Make a step of this engine wait for its turn."""
        with self._changed:
            self._changed.wait_for(lambda: name not in self._made or self._whose == name)
        yield
        with self._changed:
            if self._whose == name and time.perf_counter() - self._since >= self._turn_s:
                self._pass_on()

    def count_tokens(self, name: str, n_tokens: int) -> None:
        """Add tokens that this engine made."""
        self._made[name] += n_tokens

    def remove(self, name: str) -> None:
        """Take out an engine that has finished; steps that it makes after this do not wait for a turn."""
        with self._changed:
            del self._made[name]
            if self._whose == name:  # else another one may be in the middle of a step
                self._pass_on()

    def _pass_on(self) -> None:
        now = time.perf_counter()
        if self._whose is not None:
            self._seconds[self._whose] += now - self._since
        self._whose, self._since = min(self._made, key=self._made.__getitem__, default=None), now
        self._changed.notify_all()

"""Encode texts into token ids in threads of their own, so that neither long texts nor other work hold up short ones.

Functions that encode enter, with their tenant and how much text they are about; their results leave. Short and long texts have a lane
each, of one thread. A lane takes tenants in turn, and of one tenant the shortest text first. Knows nothing of tokenizers.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ngramspec.errors import NgramspecError
from ngramspec.server.error_responses import ApiError, retry_after, translate_error
from ngramspec.server.metrics import Metrics

T = TypeVar("T")

# Characters of a request's texts that the lane of short ones takes; about 10 ms of a tokenizer's time.
SHORT = 32 << 10
# Requests that wait in a lane; the next one is refused. A request of the largest body keeps the long lane for about a second.
MAX_WAITING, MAX_WAITING_LONG = 512, 16
# Seconds that one encoding may take before /health reports a problem.
STUCK_S = 60


class Encoders:
    """The two lanes. Used from event loops; the functions run in the lanes' threads."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._short, self._long = _Lane("short", MAX_WAITING), _Lane("long", MAX_WAITING_LONG)

    async def run(self, tenant: str, size: int, encode: Callable[[], T]) -> T:
        """Run `encode`, which is about `size` characters, and return what it returns.

        Raises ApiError: 429 if too many wait, 400 for a ValueError of `encode` (text that cannot be encoded, values out of range).
        """
        lane = self._short if size <= SHORT else self._long
        future = lane.submit(tenant, size, encode)
        if future is None:
            self._metrics.count_refused("queue_full")
            raise ApiError(429, "too many texts wait for being encoded; try again later", code="queue_full", headers=retry_after(2))
        try:
            result: T = await asyncio.wrap_future(future)
        except (ValueError, NgramspecError) as error:
            raise translate_error(error, is_clients=True) from error
        return result

    @property
    def stuck(self) -> bool:
        """Whether an encoding has gone on for longer than any text takes."""
        return max(self._short.busy_s, self._long.busy_s) > STUCK_S


class _Lane:
    def __init__(self, name: str, max_waiting: int) -> None:
        self._name, self._max_waiting = name, max_waiting
        self._lock = threading.Lock()
        self._waiting: dict[str, list[tuple[int, int, Future[Any], Callable[[], Any]]]] = {}  # by tenant, whose turn it is first; heaps
        self._n_waiting, self._order = 0, itertools.count()
        self._running = False
        self._since: float | None = None

    @property
    def busy_s(self) -> float:
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, tenant: str, size: int, work: Callable[[], T]) -> Future[T] | None:
        """Queue the work; None if too many wait."""
        future: Future[T] = Future()
        with self._lock:
            if self._n_waiting >= self._max_waiting:
                return None
            heapq.heappush(self._waiting.setdefault(tenant, []), (size, next(self._order), future, work))
            self._n_waiting += 1
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._run, name=f"ngramspec-encode-{self._name}", daemon=True).start()
        return future

    def _run(self) -> None:
        """Work until nothing waits."""
        while (taken := self._take()) is not None:
            future, work = taken
            if not future.set_running_or_notify_cancel():
                continue
            result: Any = None
            error: BaseException | None = None
            self._since = time.monotonic()
            try:
                result = work()
            except BaseException as raised:
                error = raised
            self._since = None  # before the future ends, so that whoever waited for it sees a lane at rest
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _take(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._lock:
            tenant = next(iter(self._waiting), None)
            if tenant is None:
                self._running = False
                return None
            waiting = self._waiting.pop(tenant)
            _, _, future, work = heapq.heappop(waiting)
            self._n_waiting -= 1
            if waiting:
                self._waiting[tenant] = waiting  # behind the others
            return future, work

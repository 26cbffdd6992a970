"""How much each key may ask for at a time and in a minute.

A key enters with each request that generates; the request is admitted until it is left, or refused with 429. Knows nothing of requests.
Used from one event loop.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable

from ngramspec.server.error_responses import ApiError, retry_after
from ngramspec.server.settings import Key


class KeyLimits:
    """Counts the requests of every key that has a limit."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._running: defaultdict[str, int] = defaultdict(int)
        self._free_at: dict[str, float] = {}  # by name: when a whole minute's requests are to be had again

    def enter(self, key: Key) -> None:
        """Admit one more request, until `release`. Raises ApiError 429, with `Retry-After`."""
        if key.max_requests is not None and self._running[key.name] >= key.max_requests:
            why = f"this key may have {key.max_requests} requests at a time; wait for one of them"
            raise ApiError(429, why, code="too_many_requests", headers=retry_after(1))
        if key.requests_per_minute is not None:
            self._take(key.name, key.requests_per_minute)
        self._running[key.name] += 1

    def release(self, key: Key) -> None:
        """Return the room of one request."""
        self._running[key.name] -= 1

    def _take(self, name: str, per_minute: int) -> None:
        """Take a request from a bucket of a minute's, which fills at an even pace (generic cell rate algorithm). Raises ApiError 429."""
        now, pace = self._now(), 60 / per_minute
        free_at = max(self._free_at.get(name, 0.0), now) + pace
        if free_at - now > 60 + 1e-6:
            why = f"this key may send {per_minute} requests a minute"
            raise ApiError(429, why, code="rate_limit_exceeded", headers=retry_after(free_at - now - 60 + 0.5))
        self._free_at[name] = free_at

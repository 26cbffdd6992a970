"""From the engine's thread to the event loop: one wake-up for everything that a pass has to say to all clients.

What to call and with what enters from any thread, the calls leave in the loop's thread in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Mailbox:
    """Brings what the engine's thread says to the event loop: one wake-up for everything that a pass has to say."""

    def __init__(self) -> None:
        self._posts: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._awake = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self) -> None:
        """Deliver to the running loop from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._awake = loop, False

    def post(self, take: Callable[[Any], None], what: Any) -> None:
        """Have the loop call `take(what)`. From any thread."""
        self._posts.append((take, what))
        if not self._awake:
            self._awake = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
                assert self._loop is not None
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._awake = False  # first: what is posted from here on wakes the loop again
        while self._posts:
            take, what = self._posts.popleft()
            try:
                take(what)
            except Exception:
                log.exception("a result could not be delivered")

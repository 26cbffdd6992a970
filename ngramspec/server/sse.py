"""Streamed answers: server-sent events over a reservation.

Events of a route enter, `data:` lines leave; an error is the last of them, in the envelope of all errors. However the stream ends, its
reservation is closed. Knows neither dialects nor the engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi.routing import APIRoute
from sse_starlette import EventSourceResponse
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from ngramspec.server.error_responses import ApiError, make_internal_error
from ngramspec.server.queue import Reservation

log = logging.getLogger(__name__)

PING_S = 15
"""A comment on a silent stream this often, for proxies that close what is silent."""
_MAY_STREAM: dict[str, Any] = {"content": {"text/event-stream": {"schema": {"description": "Pieces of the answer, each as `data: {…}`."}}}}
GENERATES: dict[int | str, dict[str, Any]] = {200: _MAY_STREAM}
"""`responses=` of a route that makes the engine write: its answer may be a stream, and it is refused early while there is no room."""

Event = dict[str, Any] | str


def generates(route: BaseRoute) -> bool:
    """Whether a route was declared with `GENERATES`."""
    return isinstance(route, APIRoute) and route.responses.get(200) is _MAY_STREAM


class EventStream(EventSourceResponse):
    """A response that sends each event as a `data:` line, and `data: [DONE]` at the end if `done`. `named`: an `event:` line with its
    `type` goes before.

    An error in `events` leaves as one more event in the envelope, then the stream ends. Takes the reservation over from its `with` block,
    and closes it however the stream ends.
    """

    def __init__(self, reservation: Reservation, events: AsyncIterator[Event], *, done: bool = True, named: bool = False) -> None:
        super().__init__(_encoded(events, done, named), sep="\n", ping=PING_S)
        reservation.detach()
        self._reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["events"] = True
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._reservation.close():
                scope.get("state", {}).get("facts", {})["left"] = True  # the client left before the end


async def _encoded(events: AsyncIterator[Event], done: bool, named: bool) -> AsyncIterator[bytes]:
    """Events as bytes; an error as the last one."""
    try:
        async for event in events:
            name = f"event: {event['type']}\n".encode() if named and isinstance(event, dict) else b""
            yield name + _line(event)
        if done:
            yield _line("[DONE]")
    except ApiError as error:
        yield _line(error.body)
    except Exception:
        log.exception("a stream failed")
        yield _line(make_internal_error().body)


def _line(event: Event) -> bytes:
    text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()

"""Streamed answers: server-sent events, or lines of JSON, over a reservation.

Events of a route enter, `data:` lines leave; an error is the last of them, in the route's envelope. However the stream ends, its
reservation is closed. Knows neither dialects nor the engine.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from fastapi.routing import APIRoute
from sse_starlette import EventSourceResponse
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from ngramspec.server.error_responses import ApiError, ErrorFormat, format_ollama_error, format_openai_error, make_internal_error
from ngramspec.server.queue import Reservation

log = logging.getLogger(__name__)

# A comment on a silent stream this often, for proxies that close what is silent.
PING_S = 15
_MAY_STREAM: dict[str, Any] = {"content": {"text/event-stream": {"schema": {"description": "Pieces of the answer, each as `data: {…}`."}}}}
# `responses=` of a route that makes the engine write: its answer may be a stream, and it is refused early while there is no room.
GENERATES: dict[int | str, dict[str, Any]] = {200: _MAY_STREAM}
REPLAYS: dict[int | str, dict[str, Any]] = {200: {**_MAY_STREAM}}  # of one that gives a stored answer back, which may be a stream
_MAY_STREAM_LINES: dict[str, Any] = {"content": {"application/x-ndjson": {"schema": {"type": "string"}}}}
GENERATES_LINES: dict[int | str, dict[str, Any]] = {200: _MAY_STREAM_LINES}  # the same for streams of lines of JSON

# What Python's str.splitlines takes for line ends and JSON leaves as it is. Clients that read lines with httpx, such as Ollama's for
# Python, would see half a line of JSON.
_LINE_ENDS = {0x85: r"\u0085", 0x2028: r"\u2028", 0x2029: r"\u2029"}
Event = dict[str, Any] | str


def is_generating(route: BaseRoute) -> bool:
    """Return whether a route was declared with `GENERATES`."""
    return isinstance(route, APIRoute) and any(route.responses.get(200) is each for each in (_MAY_STREAM, _MAY_STREAM_LINES))


class _ReservedStream(EventSourceResponse):
    """Takes the reservation over from its `with` block, and closes it however the stream ends. An error is its last event."""

    def __init__(self, reservation: Reservation, content: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(content, sep="\n", **options)
        reservation.detach()
        self._reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["events"] = self.ping_interval > 0  # something may be sent between events
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._reservation.close():
                scope.get("state", {}).get("facts", {})["left"] = True  # the client left before the end


class EventStream(_ReservedStream):
    """A response that sends each event as a `data:` line, and `data: [DONE]` at the end if `done`. `named`: an `event:` line with its
    `type` goes before. `ping`: the event that is sent while there is nothing else; default: a comment."""

    def __init__(
        self,
        reservation: Reservation,
        events: AsyncIterator[Event],
        *,
        done: bool = True,
        named: bool = False,
        ping: dict[str, Any] | None = None,
        format_error: ErrorFormat = format_openai_error,
    ) -> None:
        def encode(event: Event) -> bytes:
            return _encode_event(event, named=named)

        content = _encode_all(events, encode, format_error, "[DONE]" if done else None)
        super().__init__(reservation, content, ping=PING_S, ping_message_factory=None if ping is None else lambda: encode(ping))


class JsonLines(_ReservedStream):
    """A response that sends each event as a line of JSON, as Ollama does. Nothing may stand between them."""

    def __init__(self, reservation: Reservation, events: AsyncIterator[Event]) -> None:
        content = _encode_all(events, lambda event: f"{_dump(event)}\n".encode(), format_ollama_error, None)
        super().__init__(reservation, content, ping=0, media_type="application/x-ndjson")


def format_events(events: Iterable[Event]) -> Response:
    """Return a response of named events that are all there already."""
    return Response(b"".join(_encode_event(event, named=True) for event in events), media_type="text/event-stream")


def _encode_event(event: Event, *, named: bool) -> bytes:
    name = f"event: {event['type']}\n" if named and isinstance(event, dict) and "type" in event else ""
    return f"{name}data: {_dump(event)}\n\n".encode()


async def _encode_all(
    events: AsyncIterator[Event], encode: Callable[[Event], bytes], format_error: ErrorFormat, last: Event | None
) -> AsyncIterator[bytes]:
    """Yield events as bytes, then `last`; an error is the last one."""
    try:
        async for event in events:
            yield encode(event)
        if last is not None:
            yield encode(last)
    except ApiError as error:
        yield encode(format_error(error))
    except Exception:
        log.exception("a stream failed")
        yield encode(format_error(make_internal_error()))


def _dump(event: Event) -> str:
    text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    return text if text.isascii() else text.translate(_LINE_ENDS)

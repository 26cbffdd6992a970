"""Check every HTTP request before the application sees it: host, headers, key, room, and a body that is parsed once.

Plain ASGI around the application, so that no route can forget it and streams pass through untouched. Requests go on to the application
or are refused; responses get a name, security headers and one line in the log. Knows no route but by its path.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngramspec.server import error_responses, field_support, logs
from ngramspec.server.auth import AllowedHosts, given_key
from ngramspec.server.encoding import SHORT
from ngramspec.server.error_responses import ApiError, ClientGone, retry_after
from ngramspec.server.image_data import drop_image_data
from ngramspec.server.key_limits import KeyLimits
from ngramspec.server.metrics import BODIES_FULL
from ngramspec.server.settings import Key, Limits
from ngramspec.server.state import ServerState
from ngramspec.tokenizer.encode import replace_lone_surrogates

log = logging.getLogger(__name__)

_UNREAD = 8  # times the limit: this much of a body that is too long is read and dropped, since most clients listen only after sending it
LINGER_S = 3  # seconds that a connection which will be closed stays open for a client that still sends
_CONTAINERS = 1 << 15  # lists and objects of a body: 65,000 messages are checked in a second, in which all other requests wait
_NAMED = 8  # fields that are unknown and that one header names
_LOGGED_PATH = 100  # characters of the path of no route that the log shows
_LOGGED = 1024  # unknown fields of a route that the log names, each once
_JSON = re.compile(rb"application/(?:[\w.-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
_REPOSITORY = re.compile(r"/repo/([^/]+)(/.*)?", re.DOTALL)
_HEADERS = {  # on every response that does not say otherwise
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class RequestMiddleware:
    """Wraps an application. `scope["state"]` tells it: `key` (the valid key or None), `json` (the parsed body), `repository`, `facts`."""

    def __init__(self, app: ASGIApp, state: ServerState, generating: Collection[str]) -> None:
        """Wrap an application. `generating`: paths of requests that reserve sequences."""
        self.app, self.limits, self.hosts = app, state.settings.limits, AllowedHosts(state.settings)
        self.bodies = IncomingBodies(self.limits)
        self.prefix, self.root = state.settings.api_prefix, state.settings.root_path
        self.key_limits = KeyLimits()
        self.metrics, self.admission, self.keyring, self.generating = state.metrics, state.admission, state.keyring, generating

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        facts: dict[str, Any] = {}
        scope.setdefault("state", {})["facts"] = facts
        scope = _split_repository(_without_prefix(_without_root(scope, self.root), self.prefix))
        status = 0
        is_head = scope["method"] == "HEAD"
        inner: Scope = {**scope, "method": "GET"} if is_head else scope  # a HEAD is a GET whose body is not sent

        async def answer(message: Message) -> None:
            nonlocal status
            if is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = name
                for header, value in _HEADERS.items():
                    headers.setdefault(header, value)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._release(scope)  # before the last byte: whoever has read it may ask again
            await send(message)

        try:
            try:
                body = await self._check(scope, receive)
            except ApiError as error:
                error_responses.note_refusal(scope, error)
                if error.code == BODIES_FULL:
                    self.metrics.count_refused(BODIES_FULL)
                elif error.status != 429:  # which the admission queue has counted
                    self.metrics.count_refused("too_large" if error.status in (413, 431) else "invalid")
                send_refusal = error.make_response(scope)
                await (_close_late(send_refusal) if "Connection" in error.headers else send_refusal)(scope, receive, answer)
            else:
                placeholder = b"null" if body else b""  # routes take the body as parsed; nobody holds its bytes
                await self.app(inner, _replay(placeholder, receive), answer)
        except ClientGone:
            status = error_responses.CLIENT_GONE
        except Exception:
            log.exception("request %s failed", name)
            if not status:
                await error_responses.make_internal_error().make_response(scope)(scope, receive, answer)
        finally:
            self._release(scope)
            route = getattr(inner.get("route"), "path", scope["path"] if scope["path"] in self.generating else "-")
            took = round((time.perf_counter() - started) * 1e3, 1)
            caller = "" if (key := inner["state"].get("key")) is None else key.name
            unknown = {"path": quote(scope["path"])[:_LOGGED_PATH]} if route == "-" else {}  # what a wrong base URL has asked for
            logs.log_request(
                {"event": "request", "id": name, "method": scope["method"], "route": route, "status": status}
                | unknown
                | {"duration_ms": took, "key": caller}
                | facts
            )

    async def _check(self, scope: Scope, receive: Receive) -> bytes:
        """Return the body that the application gets. Raises ApiError, ClientGone."""
        check_headers(scope["headers"], self.limits)
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or not self.hosts.is_allowed(hosts[0] if hosts else None):
            raise ApiError(403, "this server does not answer under this host name; --allowed-host NAME allows it")
        self.keyring.refresh()
        given = given_key(scope["headers"])
        key = None if given is None or not len(self.keyring) else self.keyring.find(given)
        is_known = key is not None or not len(self.keyring)
        scope["state"]["key"] = key  # also whose request is refused below, for the log
        body = await read_body(scope, receive, self.bodies, keep=is_known)  # else the request is refused, or its route takes no body
        if is_known:
            if scope["method"] == "POST" and scope["path"] in self.generating:
                self.admission.check_room(1)  # before the body is parsed, which would cost the requests that run
                if key is not None:
                    self._enter(scope, key)
            try:
                scope["state"]["json"] = parse_body(scope, body, self.limits)
            except ApiError:
                if _has_route(scope):
                    raise
                return b""  # the application says that nothing is there, which helps more than what is wrong with the body
        return body

    def _enter(self, scope: Scope, key: Key) -> None:
        """Count the request for its key, until it is answered. Raises ApiError 429."""
        try:
            self.key_limits.enter(key)
        except ApiError:
            self.metrics.count_refused("key_limit")
            raise
        scope["state"]["limited"] = key

    def _release(self, scope: Scope) -> None:
        """Return the room of a request that is answered. May be called again."""
        if (key := scope["state"].pop("limited", None)) is not None:
            self.key_limits.release(key)


def _has_route(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is not Match.NONE for route in scope["app"].routes)


class ParsedBodyRoute(APIRoute):
    """A route that takes the body as `RequestMiddleware` parsed it. Fields that it does not know are named in the header `Warning`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        route = getattr(None if self.body_field is None else self.body_field.field_info.annotation, "route", "")
        logged: set[str] = set()

        async def handle_parsed(request: Request) -> Response:
            others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
            scope = {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}  # which `parse_body` has decided
            response = await handle(_ParsedRequest(scope, request.receive))
            if route and (unknown := field_support.find_unknown(route, request.scope["state"]["json"])):
                named = [field_support.describe_unknown(route, name) for name in unknown[:_NAMED]]
                more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
                response.headers["Warning"] = f'299 ngramspec "ignored fields: {", ".join(named)}{more}"'
                for text in named:
                    if text not in logged and len(logged) < _LOGGED:
                        logged.add(text)
                        log.warning("%s has no such field, which is ignored: %s", route, text)
            return response

        return handle_parsed


class _ParsedRequest(Request):
    async def json(self) -> Any:
        return self.scope["state"]["json"]


def _without_root(scope: Scope, root: str) -> Scope:
    """Take the path at which a proxy shows the server off the front of the path, if it is there."""
    return _without_prefix(scope, root) if scope["path"] == root or scope["path"].startswith(f"{root}/") else scope


def _without_prefix(scope: Scope, prefix: str) -> Scope:
    """Take the prefix of all routes off the front of the path; what does not begin with it is the path of no route."""
    if not prefix:
        return scope
    path = scope["path"].removeprefix(prefix) if scope["path"].startswith(f"{prefix}/") else "/" if scope["path"] == prefix else "//"
    return {**scope, "path": path, "raw_path": path.encode()}


def _split_repository(scope: Scope) -> Scope:
    """Take `/repo/NAME` off the front of the path; `state["repository"]` says that it was there."""
    if (match := _REPOSITORY.fullmatch(scope["path"])) is None:
        return scope
    name, path = match.groups()
    scope["state"]["repository"] = name
    return {**scope, "path": path or "/", "raw_path": (path or "/").encode()}


def check_headers(headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> None:
    """Raises ApiError 400, 415, 431."""
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limits.header_bytes:
        raise ApiError(431, f"the headers take {size} bytes; at most {limits.header_bytes} are read", headers={"Connection": "close"})
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:  # one that a proxy may end elsewhere than we do
        why = "a body has a Content-Length or a Transfer-Encoding, not both"
        raise ApiError(400, why, headers={"Connection": "close"})
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            shown = value[:40].decode("latin-1")
            raise ApiError(415, f"bodies are read as they are, without Content-Encoding, got {shown!r}", headers={"Connection": "close"})


class IncomingBodies:
    """Bounds the bytes of all bodies that are still coming, of whatever connections. Used from one event loop.

    Bodies of up to `SHORT` bytes are not counted: whoever holds back long ones keeps nobody from sending a short one.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._held = 0

    @contextlib.contextmanager
    def count_body(self) -> Iterator[Callable[[int], bool]]:
        """Give a function that takes the bytes of one body so far, and returns false, and counts none of them, if there is no room."""
        counted = 0

        def count(size: int) -> bool:
            nonlocal counted
            wanted = size if size > SHORT else 0
            has_room = wanted <= counted or self._held + wanted - counted <= self.limits.most_incoming
            self._held += (wanted if has_room else 0) - counted
            counted = wanted if has_room else 0
            return has_room

        try:
            yield count
        finally:
            self._held -= counted


async def read_body(scope: Scope, receive: Receive, bodies: IncomingBodies, *, keep: bool = True) -> bytes:
    """Return the whole body, however it is sent; if `keep` is false, b"" once it has come. Raises ApiError 413, 503, ClientGone."""
    limits = bodies.limits
    headers = dict(scope["headers"])
    limit = limits.body_bytes + (limits.image_bytes if keep else 0)
    most = max(limit, _UNREAD * limits.body_bytes)
    length = headers.get(b"content-length", b"0")
    declared = int(length) if length.isdigit() and len(length) < 19 else most + 1
    if declared > limit and (b"expect" in headers or declared > most):
        raise _too_long(limits)
    read, size = bytearray(), 0
    refusal: ApiError | None = None  # raised when the rest has been read and dropped, since most clients listen only after sending it
    with bodies.count_body() as count:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > most:
                raise _too_long(limits)
            is_last = not message.get("more_body", False)
            if size > limit and refusal is None:
                refusal = _too_long(limits)
            if keep and refusal is None:
                read += chunk
                if len(read) > limits.body_bytes and (is_last or len(read) > 2 * limits.body_bytes):  # as rarely as takes linear time
                    read = drop_image_data(read)
                    refusal = _too_long(limits) if len(read) > limits.body_bytes else None
                if refusal is None and not count(len(read)):
                    refusal = _bodies_full()
            if refusal is not None:
                read = bytearray()
                count(0)
            if is_last:
                break
    if refusal is not None:
        raise refusal
    body = bytes(read)
    return replace_lone_surrogates(body) if b"\\ud" in body or b"\\uD" in body else body


def _bodies_full() -> ApiError:
    said = "the bodies of other requests, which are still coming, take all the memory that there is for them; try again later"
    return ApiError(503, said, code=BODIES_FULL, headers=retry_after(2))


def _too_long(limits: Limits) -> ApiError:
    said = f"the body is longer than {limits.body_bytes} bytes without its images, or these are longer than {limits.image_bytes}; "
    said += "NGRAMSPEC_LIMITS__BODY_BYTES and NGRAMSPEC_LIMITS__IMAGE_BYTES set what is read"
    return ApiError(413, said, headers={"Connection": "close"})


def parse_body(scope: Scope, body: bytes, limits: Limits) -> Any:
    """Parse JSON without NaN, infinities or deep nesting; an empty body is None. Raises ApiError 400, 415."""
    body = body.removeprefix(codecs.BOM_UTF8)  # which editors and shells of Windows write
    if not body:
        return None
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if not _JSON.match(content_type) and not (scope["path"].startswith("/api/") and _is_program(scope["headers"])):
        raise ApiError(415, "the body must be JSON, sent with `Content-Type: application/json`")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    level: list[Any] = [value] if isinstance(value, (dict, list)) else []
    n_containers = 0
    for _ in range(limits.depth):
        values = [each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer)]
        if math.inf in values or -math.inf in values:  # what is read of 1e400, and no answer or template could say
            raise ApiError(400, "the JSON has a number beyond 1.8e308", code="invalid_json")
        level = [each for each in values if type(each) is dict or type(each) is list]
        n_containers += len(level)
        if n_containers > _CONTAINERS:
            raise ApiError(400, f"the JSON has more than {_CONTAINERS} lists and objects", code="invalid_json")
        if not level:
            return value
    raise ApiError(400, f"the JSON is nested deeper than {limits.depth} levels", code="invalid_json")


def _close_late(response: ASGIApp) -> ASGIApp:
    """Return `response` with its end held back while the client still sends, for `LINGER_S` at most; what comes is dropped.

    Closing a connection with unread bytes resets it, and the client may lose the answer.
    """

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_end(message: Message) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await response(scope, receive, send_without_end)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b""})

    return respond


def _is_program(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether no browser sent this. Some of Ollama's clients do not say that a body is JSON; a page of another site could not."""
    return not any(name in (b"origin", b"sec-fetch-site") for name, _ in headers)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that hands the body out again, and then what else comes."""
    sent = False

    async def receive_replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_replayed

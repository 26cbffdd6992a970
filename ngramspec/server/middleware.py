"""What is done to every request: a name for it, checks of host, headers and body, security headers, one line in the log.

Requests enter, and go on to the application or are refused; responses leave with headers of ours. Plain ASGI around the application, so
that no route can forget it and streams pass through untouched. Knows no route but by its path.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Collection
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngramspec.server import body_limits, error_responses, logs
from ngramspec.server.auth import Hosts
from ngramspec.server.error_responses import ApiError, ClientGone
from ngramspec.server.state import State

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
"""On every response that does not say otherwise."""


class RequestMiddleware:
    """Around an application: gives each request a name, checks host, headers, body and room, adds headers, writes one line in the log."""

    def __init__(self, app: ASGIApp, state: State, generating: Collection[str]) -> None:
        """`generating`: paths of requests that reserve sequences."""
        self.app, self.limits, self.hosts = app, state.settings.limits, Hosts(state.settings)
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
            await send(message)

        try:
            try:
                self._check_head(scope)
                body = body_limits.replace_lone_surrogates(await body_limits.read_body(scope, receive, self.limits))
                if not len(self.keyring) or self.keyring.knows(scope["headers"]):
                    self._check_room(scope)
                    body_limits.check_body(scope, body, self.limits)
                else:
                    body = b""  # nobody looks at it: the application refuses the request, or the route takes no body
            except ApiError as error:
                if error.status != 429:  # which admission has counted
                    self.metrics.refused("too_large" if error.status in (413, 431) else "invalid")
                await error.response()(scope, receive, answer)
            else:
                await self.app(inner, body_limits.replayed(body, receive), answer)
        except ClientGone:
            status = error_responses.CLIENT_GONE
        except Exception:
            log.exception("request %s failed", name)
            if not status:
                await error_responses.unexpected().response()(scope, receive, answer)
        finally:
            route = getattr(inner.get("route"), "path", scope["path"] if scope["path"] in self.generating else "-")
            took = round((time.perf_counter() - started) * 1e3, 1)
            caller = inner["state"].get("caller", "")
            logs.log_request(
                {"event": "request", "id": name, "method": scope["method"], "route": route, "status": status}
                | {"duration_ms": took, "key": caller}
                | facts
            )

    def _check_room(self, scope: Scope) -> None:
        """Refuse work for which there is no room before its body is looked at, which would cost those that run."""
        if scope["method"] == "POST" and scope["path"] in self.generating:
            self.admission.check_room(1)

    def _check_head(self, scope: Scope) -> None:
        body_limits.check_headers(scope["headers"], self.limits)
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) > 1 or not self.hosts.allow(hosts[0] if hosts else None):
            raise ApiError(403, "this server does not answer under this host name; --allowed-host NAME allows it")

"""Running the application: a socket, uvicorn, the model loading behind it, and the signals that end it.

Settings and a function that makes the engine enter. The server answers 503 until the engine is there and after it was
told to stop. `Protocol` adds to uvicorn's HTTP what bounds rude clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

import h11
import uvicorn
from fastapi import FastAPI
from starlette.responses import HTMLResponse, JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ngramspec.engine.llm_engine import Engine
from ngramspec.prompts.template_process import get_template_processes
from ngramspec.server import logs
from ngramspec.server.app import create_app
from ngramspec.server.auth import is_loopback, is_unix_socket
from ngramspec.server.error_responses import ApiError, format_openai_error, retry_after
from ngramspec.server.middleware import LINGER_S
from ngramspec.server.repositories import Repositories
from ngramspec.server.settings import ServerSettings

log = logging.getLogger(__name__)

BACKLOG = 2048
# Connections that asyncio accepts in one turn of its loop. A few turns pass until a connection is counted or closed: with the backlog,
# asyncio's default, it would run out of descriptors before one of them is.
ACCEPTED_AT_ONCE = 1
# Seconds between two lines of the log that say that no connection can be accepted.
ACCEPT_LOG_S = 10
# Bytes that the kernel keeps for a client that does not read.
SEND_BUFFER = 64 << 10
# Bytes of a connection that are read in one turn of the loop. A body in chunks of one byte takes 2 µs for each byte that is sent, and
# asyncio would read 256 KB before others have their turn.
READ_AT_ONCE = 32 << 10
# Longer heads are cut off by the parser; those above `Limits.header_bytes` by us, with an answer in our envelope.
HEAD_BYTES = 256 << 10
# The page at / until the playground is there; it comes back by itself.
LOADING = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="2"><title>ngramspec</title><p role="status">The model is being loaded.</p></html>"""
# Seconds without an answer after which a client that has shut its side down is asked whether it is there; when that is looked at, and how
# often then.
HALF_CLOSED_S = (0.01, 0.01, 0.2)
# Seconds without a request after which a connection is closed: longer than proxies and clients keep theirs (nginx 60 s, httpx 5 s), who
# would otherwise send a request just as the server closes. `max_connections` bounds how many there are.
KEEP_ALIVE_S = 75
# Seconds that responses which are being written have when the server stops.
STOP_S = 3

_ABSOLUTE_TARGET = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE | re.DOTALL)  # its host and its path


ENOUGH_DESCRIPTORS = 1 << 16  # beyond this no more are asked for: containers set hard limits of 2**30
# Descriptors that connections leave to stores, logs and whatever else opens files: this number, or if there are few, this part of them.
KEPT_FREE, KEPT_SHARE = 256, 4


class Protocol(H11Protocol):
    """uvicorn's HTTP/1.1 with deadlines: for a client to send its request, and to read what it was sent.

    With no write buffer of ours, `pause_writing` means that the kernel takes no more: the client's buffer and the kernel's are full.
    """

    settings: ClassVar[ServerSettings]
    most_descriptors: ClassVar[int]
    idle: ClassVar[dict[Protocol, None]]
    """The server's connections without a whole request that is being answered, by how long they have been so."""

    @classmethod
    def make_subclass(cls, settings: ServerSettings) -> type[Protocol]:
        return type("Protocol", (cls,), {"settings": settings, "most_descriptors": find_first_forbidden_descriptor(), "idle": {}})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        transport.max_size = READ_AT_ONCE  # type: ignore[attr-defined]  # what transports of asyncio's loops over selectors read
        number = 0
        if (peer := transport.get_extra_info("socket")) is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            if peer.family in (socket.AF_INET, socket.AF_INET6):
                # asyncio does so only if the listening socket names TCP as its protocol, which `socket.create_server` leaves at 0. Else a
                # body waits for the acknowledgement of its head, and a token for that of the token before: 40 ms on Linux.
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = peer.fileno()
        self._refused = False
        self._unread: asyncio.TimerHandle | None = None
        self._listens: asyncio.TimerHandle | None = None
        self._unsent: asyncio.TimerHandle | None = self._abort_after(self.settings.receive_timeout)
        if len(self.connections) > self.settings.max_connections or number >= self.most_descriptors:
            self._make_room(max(len(self.connections) - self.settings.max_connections, number - self.most_descriptors + 1), number)
        if not self._refused:
            self.idle[self] = None

    def _make_room(self, excess: int, number: int) -> None:
        """Close the `excess` connections that have been idle for longest; if there is none, refuse this one, descriptor `number`."""
        oldest = list(itertools.islice(self.idle, excess))
        for each in oldest:
            del self.idle[each]
            each.transport.close()
        if oldest:
            return
        self._refuse(503, ApiError(503, "too many connections", headers=retry_after(5)))
        with contextlib.suppress(OSError):  # what is unread at the close would reset the connection before the client reads the answer
            os.read(number, HEAD_BYTES)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Take no other protocol, and log nothing about it: Java's clients ask for HTTP/2 with every first request."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.idle.pop(self, None)
        for timer in (self._unread, self._unsent, self._listens):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self.conn.their_state is h11.DONE:  # a request behind one that is not answered: h11 would stop reading, and a client that
            self._answer_and_close()  # goes away would not be noticed
            return
        super().data_received(data)
        state = self.conn.their_state
        if state is h11.DONE and self.conn.trailing_data[0]:
            self._answer_and_close()
        whole = state is not h11.SEND_BODY and not (state is h11.IDLE and self.conn.trailing_data[0])
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self.idle.pop(self, None)
        if whole and self._unsent is not None:
            self._unsent.cancel()
            self._unsent = None
        elif not whole and self._unsent is None:
            self._unsent = self._abort_after(self.settings.receive_timeout)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and self.cycle.response_complete:  # no other request has come behind this one
            self.idle[self] = None

    def _answer_and_close(self) -> None:
        self.cycle.keep_alive = False
        if not self.cycle.response_started:
            scope = self.cycle.scope
            scope["headers"] = [*scope["headers"], (b"connection", b"close")]  # as if the client had said so: the answer will
        self.flow.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection (true) if the client, which sends no more, has sent a whole request: it may still listen to the answer."""
        cycle = self.cycle
        if self._refused or cycle is None or cycle.response_complete or self.conn.their_state is not h11.DONE:
            return False
        self._answer_and_close()
        self._listens = self.loop.call_later(HALF_CLOSED_S[0], self._ask_whether_it_listens, True)
        return True

    def _ask_whether_it_listens(self, first: bool) -> None:
        """Drop the connection if the client is gone. Else send what only one that is gone refuses: an interim response, or a comment."""
        if self.transport.is_closing():
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if first and self.conn.our_state is h11.SEND_RESPONSE and self.conn.their_http_version == b"1.1":
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")) or b"")
        elif first and self.conn.our_state is h11.SEND_BODY and self.cycle.scope["state"].get("events"):
            self.transport.write(self.conn.send(h11.Data(data=b": \n\n")) or b"")
        self._listens = self.loop.call_later(HALF_CLOSED_S[1 if first else 2], self._ask_whether_it_listens, False)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._abort_after(self.settings.send_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _abort_after(self, seconds: float) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in our envelope."""
        error = sys.exception()
        if isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431:
            self._refuse(431, ApiError(431, "the headers are too long"))
        else:  # 501, too: a Transfer-Encoding that nobody knows is as much the client's mistake
            self._refuse(400, ApiError(400, "this is not an HTTP request that can be read: " + str(error)[:100]))

    def _refuse(self, status: int, error: ApiError) -> None:
        body = json.dumps(format_openai_error(error)).encode()
        names = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"} | error.headers
        head = h11.Response(status_code=status, headers=list(names.items()), reason=b"")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(b"".join(self.conn.send(event) or b"" for event in (head, h11.Data(data=body), h11.EndOfMessage())))
        # Closing with something unread resets the connection, and the client would not see the answer: read on for a moment.
        self._refused = True
        self.transport.write_eof()
        self._abort_after(LINGER_S)


class LoadingApp:
    """The ASGI application that uvicorn gets: the real one once there is an engine, 503 before."""

    def __init__(self) -> None:
        self.app: FastAPI | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["path"] == "/live":
            await JSONResponse({"status": "ok"})(scope, receive, send)
        else:
            error = ApiError(503, "the model is being loaded", code="loading", headers=retry_after(2))
            page = HTMLResponse(LOADING, 503, {**error.headers, "Cache-Control": "no-store"})
            await (page if scope["path"] == "/" else error.make_response(scope))(scope, receive, send)


def accept_absolute_targets(app: ASGIApp) -> ASGIApp:
    """Return an application that takes `GET http://host/path`, as clients of a proxy write it, for `GET /path` of that host (RFC 9112)."""

    async def accept(scope: Scope, receive: Receive, send: Send) -> None:
        if (match := _ABSOLUTE_TARGET.fullmatch(scope["raw_path"])) is not None:
            host, path = match[1], match[2] or b"/"
            headers = [(b"host", host), *(header for header in scope["headers"] if header[0] != b"host")]
            scope = {**scope, "path": unquote(path.decode("ascii")), "raw_path": path, "headers": headers}
        await app(scope, receive, send)

    return accept


class AcceptErrors:
    """asyncio's handler of exceptions, which logs the one that comes a thousand times a second with a count and now and then."""

    def __init__(self) -> None:
        self._unsaid, self._next = 0, 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        self._unsaid += 1
        if loop.time() >= self._next:
            log.warning("no connection can be accepted: %s (%d times since this was last said)", error.strerror, self._unsaid)
            self._unsaid, self._next = 0, loop.time() + ACCEPT_LOG_S


class Server(uvicorn.Server):
    """uvicorn that drains on the first signal and stops on the second."""

    def __init__(self, config: uvicorn.Config, front: LoadingApp, settings: ServerSettings) -> None:
        super().__init__(config)
        self.front, self.settings = front, settings
        self.signalled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(AcceptErrors())
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # uvicorn's backlog is also how many asyncio accepts at a time
        if self.signalled:
            self.should_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Stop on SIGTERM and SIGINT. The second one does not wait for a pass, a stream, or a datastore that is being written."""
        if self.signalled:
            os._exit(128 + sig)
        self.signalled = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drain, signal.Signals(sig).name)

    def _drain(self, why: str) -> None:
        async def drain() -> None:
            if self.front.app is not None:
                log.info("%s: no new work; running requests have %g s to end", why, self.settings.drain_timeout)
                await self.front.app.state.server.admission.drain(self.settings.drain_timeout)
            self.should_exit = True

        self._draining = asyncio.create_task(drain())


def run(
    make_engine: Callable[[], Engine],
    settings: ServerSettings,
    repositories: Repositories | None = None,
    ready: Callable[[str, Engine], None] = lambda url, engine: None,
) -> bool:
    """Serve until a signal ends it. `ready` is called with the server's address once it takes work.

    Returns whether a thread still loads the model: the interpreter should not be finalised under it.

    Raises OSError where the address cannot be had, and what `make_engine` raises.
    """
    repositories = repositories or Repositories()
    raise_descriptor_limit()
    listeners = listen_at_all(settings.hosts, settings.port)
    front = LoadingApp()
    server = Server(make_uvicorn_config(front, settings), front, settings)
    host = f"[{settings.hosts[0]}]" if ":" in settings.hosts[0] else settings.hosts[0]
    url = f"unix:{host}" if is_unix_socket(host) else f"http://{host}:{listeners[0].getsockname()[1]}{settings.api_prefix}"
    if not all(map(is_loopback, settings.hosts)) and not settings.api_keys:
        log.warning("%s is reachable from other machines, and there are no keys: whoever reaches it can use it; see --api-key", url)
    loaded: list[Engine | BaseException] = []

    def load() -> None:
        try:
            get_template_processes().prepare()  # it starts while the model is loaded
            engine = make_engine()
            loaded.append(engine)
            if settings.chat_template:
                engine.tokenizer.chat_template = settings.chat_template
            app = create_app(engine, settings, repositories)
            gc.collect()
            gc.freeze()  # half a million objects stay: everything waits while the collector looks at them again
            front.app = app
            logs.log_event("ready", f"{engine.name} is served at {url}", url=url, model=engine.name, exactness=engine.promise)
            repositories.start(engine)
            ready(url, engine)
        except BaseException as error:
            loaded.append(error)
            server.should_exit = True

    logs.log_event("loading", f"listening at {url} while the model is loaded", url=url)
    # A daemon: a signal while it loads does not wait for it.
    threading.Thread(target=load, name="ngramspec-load", daemon=True).start()
    server.run(sockets=listeners)
    gc.unfreeze()  # for Python's last collection: extension modules, such as Triton's, complain about what it leaves
    repositories.close()
    for each in loaded:
        if isinstance(each, Engine):
            each.close()
        else:
            raise each
    return not loaded


def make_uvicorn_config(app: ASGIApp, settings: ServerSettings) -> uvicorn.Config:
    """Return how uvicorn runs an application."""
    return uvicorn.Config(
        accept_absolute_targets(app),
        http=Protocol.make_subclass(settings),
        loop="asyncio",
        backlog=ACCEPTED_AT_ONCE,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=HEAD_BYTES,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )


def listen_at_all(hosts: list[str], port: int) -> list[socket.socket]:
    """Return a listening socket for each address, all of one port if they have one. Raises OSError that names the address."""
    listeners: list[socket.socket] = []
    try:
        for host in hosts:
            listeners.append(listen(host, port))
            port = port if is_unix_socket(host) else listeners[-1].getsockname()[1]
    except OSError:
        for each in listeners:
            each.close()
        raise
    return listeners


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises OSError that names the address."""
    if is_unix_socket(host):
        return listen_at_path(host)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        hint = "; another program listens there, perhaps an earlier server: stop it, or choose another --port"
        why = os.strerror(error.errno) + hint if error.errno == errno.EADDRINUSE else error.strerror or error
        raise OSError(f"cannot listen at {host} port {port}: {why}") from error


def listen_at_path(path: str) -> socket.socket:
    """Return a Unix socket for this user alone, in place of one that nobody listens at any more. Raises OSError that names the path."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except AttributeError:
        raise OSError(f"cannot listen at {path}: this system has no Unix sockets") from None
    try:
        with contextlib.suppress(FileNotFoundError):
            if Path(path).is_socket() and listener.connect_ex(path) == errno.ECONNREFUSED:
                Path(path).unlink()
        listener.close()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {path}: {error.strerror or error}") from error
    return listener


def raise_descriptor_limit() -> None:
    """Raise the soft limit to the hard one, or to what is enough. Leaves it as it is if the system refuses."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than its hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def find_first_forbidden_descriptor() -> int:
    """Return the first descriptor that a connection may not have. The system gives the lowest free one, so about as many are open then."""
    if resource is None:
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - min(KEPT_FREE, soft // KEPT_SHARE)

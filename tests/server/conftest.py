"""Fixtures of the server's tests: a tiny engine with a chat template, and real servers on loopback."""

from __future__ import annotations

import inspect
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
import uvicorn
from tiny_server import Server, fim_tokenizer, left_clean, tiny_engine

from ngramspec.engine.llm_engine import Engine
from ngramspec.server.app import create_app
from ngramspec.server.repositories import Repositories
from ngramspec.server.run import BACKLOG, make_uvicorn_config
from ngramspec.server.settings import ServerSettings


@pytest.fixture(scope="package", autouse=True)
def httpx_defaults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client of httpx reads all certificates of the machine, which takes 30 ms: here all addresses are on loopback, without TLS.

    After 5 s without a byte it gives up, which a busy machine may take.
    """
    timeout = inspect.signature(httpx.request).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(timeout, name, 60)
        patch.setenv("SSL_CERT_FILE", "")
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with left_clean(tiny_engine()) as engine:
        yield engine


@pytest.fixture(scope="module")
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server(engine, settings, repositories) -> Server`, a real uvicorn in a thread; all are stopped at the end.

    Left to wait, a hundred would make all later tests slower: fair_time looks at every thread, and each server wakes ten times a second.
    """
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(engine: Engine, settings: ServerSettings | None = None, repositories: Repositories | None = None) -> Server:
        settings = settings or ServerSettings(admin_on_loopback=True)
        app = create_app(engine, settings, repositories)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(make_uvicorn_config(app, settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            thread.join(0.01)
        assert server.started
        listener.listen(BACKLOG)  # as `run.Server` does
        started.append((server, thread))
        return Server(f"http://127.0.0.1:{listener.getsockname()[1]}", app, engine, server)

    yield start
    for server, _ in started:
        server.should_exit = True
    for _, thread in started:
        thread.join(10)
    assert not any(thread.is_alive() for _, thread in started), "a server goes on"


@pytest.fixture(scope="module")
def make_server(start_server: Callable[..., Server], engine: Engine) -> Callable[..., Server]:
    """`make_server(settings=None, engine=None) -> Server`; without an engine, the session's."""

    def make(settings: ServerSettings | None = None, engine: Engine | None = None, *, default: Engine = engine) -> Server:
        return start_server(engine or default, settings)

    return make


@pytest.fixture(scope="module")
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


@pytest.fixture(scope="module")
def fim_engine() -> Iterator[Engine]:
    """One that also fills in the middle, for short texts."""
    with left_clean(tiny_engine(tokenizer=fim_tokenizer(), max_model_len=64, kv_memory=16 << 20)) as engine:
        yield engine


@pytest.fixture(scope="module")
def own() -> Iterator[Engine]:
    """One of the module alone, which may change its datastores."""
    with tiny_engine() as engine:
        yield engine


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def calling(start_server: Callable[..., Server]) -> Iterator[httpx.Client]:
    """A client of a model that says something and calls two tools."""
    from test_tools import calling_engine  # which makes many templates

    text = 'Wait.\n<tool_call>{"name":"time", "arguments":{}}</tool_call><tool_call>{"name":"draw","arguments":{"a": "b"}}</tool_call>'
    with calling_engine(text) as engine, httpx.Client(base_url=start_server(engine).url, timeout=120) as client:
        yield client

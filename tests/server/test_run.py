"""`ngramspec serve` as a process: loading, signals, exit codes. And the deadlines of its protocol."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_gguf
from fair_time import count_seconds
from test_queue import Brake
from tiny_server import Server, tiny_engine

from ngramspec.datastore.build import build as build_store
from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import ModelNotFoundError
from ngramspec.models.loader import load_tokenizer
from ngramspec.server.run import AcceptErrors, LoadingApp, listen, listen_at_all, run
from ngramspec.server.settings import ServerSettings

START_S = 120
LONG = {"prompt": "ab", "max_tokens": 900, "ignore_eos": True, "stream": True}


def signalled(make_engine: Callable[[], Engine], client: Callable[[str], None], **settings: Any) -> bool:
    """Serve in this thread, as the command does, with a client of its URL in another; the client's errors are raised here.

    Returns what `run` does.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    failed: list[BaseException] = []

    def talk() -> None:
        try:
            client(f"http://127.0.0.1:{port}")
        except BaseException as error:
            failed.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=talk)
    thread.start()
    handler = signal.getsignal(signal.SIGTERM)
    is_loading = run(make_engine, ServerSettings(port=port, **settings))
    thread.join()
    assert gc.get_freeze_count() == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    if failed:
        raise failed[0]
    return is_loading


def until_health(url: str, status: int) -> None:
    deadline = time.monotonic() + START_S
    with httpx.Client(base_url=url) as client:
        while time.monotonic() < deadline:
            try:
                if client.get("/health").status_code == status:
                    return
            except httpx.ConnectError:
                pass
            time.sleep(0.05)
    raise AssertionError(f"/health never said {status}")


@contextlib.contextmanager
def held_stream(url: str, brake: Brake) -> Iterator[Iterator[str]]:
    """The events of a stream that stops behind its first one, until the brake is released."""
    until_health(url, 200)
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=START_S) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        next(lines)
        brake.hold()
        yield lines


def test_the_first_signal_drains() -> None:
    engine = tiny_engine()
    brake = Brake(engine)

    def client(url: str) -> None:
        with held_stream(url, brake) as lines:
            os.kill(os.getpid(), signal.SIGTERM)
            until_health(url, 503)
            refused = httpx.post(f"{url}/v1/completions", json=LONG)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            brake.release()
            *_, before, last = lines
        assert json.loads(before.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert last == "data: [DONE]"

    assert not signalled(lambda: engine, client)
    assert engine.closed


def test_what_outlives_the_drain_timeout_is_ended() -> None:
    engine = tiny_engine()
    brake = Brake(engine)

    def client(url: str) -> None:
        with held_stream(url, brake) as lines:
            os.kill(os.getpid(), signal.SIGINT)
            *_, last = lines
        brake.release()
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"

    signalled(lambda: engine, client, drain_timeout=0.2)


def test_a_signal_while_the_model_loads() -> None:
    told = threading.Event()

    def load() -> Engine:
        told.wait(START_S)
        raise AssertionError("nobody waits for it")

    def client(url: str) -> None:
        until_health(url, 503)
        os.kill(os.getpid(), signal.SIGTERM)

    assert signalled(load, client)
    told.set()


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelNotFoundError):
        run(lambda: Engine("/nowhere/model"), ServerSettings(port=0))


@pytest.mark.slow
def test_a_restart_after_a_kill_in_the_middle_of_requests(tmp_path: Path) -> None:
    """Nothing is left that the next process stumbles over: neither the port nor a store that was being read. Two signals stop that one."""
    source, store = tmp_path / "src", tmp_path / "store"
    model = tiny_gguf.write_started(tmp_path / "m.gguf", threads=1, metadata={"llama.context_length": 16384})
    source.mkdir()
    (source / "area.py").write_text("def area(w, h):\n    return w * h\n" * 20)
    build_store([source], store, load_tokenizer(str(model)).backend_tokenizer, "tiny")
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in store.iterdir()}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--model", str(model), "--datastore", f"code={store}", "--port", str(port), "--threads", "1", "--drain-timeout", "100"]
    url, texts, long = f"http://127.0.0.1:{port}", [], LONG | {"max_tokens": 16000, "speculation": False}
    for killed in (True, False):
        with subprocess.Popen([sys.executable, "-m", "ngramspec", "serve", *options], stderr=subprocess.DEVNULL) as process:
            until_health(url, 200)
            body = {"prompt": "def area(w, h):", "max_tokens": 40, "ignore_eos": True, "temperature": 0.8, "seed": 3}
            texts.append(httpx.post(f"{url}/v1/completions", json=body, timeout=START_S).raise_for_status().json()["choices"][0]["text"])
            with contextlib.ExitStack() as streams:
                for _ in range(4):
                    response = streams.enter_context(httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=START_S))
                    next(pieces := response.iter_raw())
                    streams.callback(pieces.close)
                if killed:
                    process.kill()
                else:
                    process.send_signal(signal.SIGINT)
                    until_health(url, 503)
                    process.send_signal(signal.SIGTERM)
                assert process.wait(60) == (-signal.SIGKILL if killed else 128 + signal.SIGTERM)
    assert texts[0] == texts[1]
    assert before == {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in store.iterdir()}, "serving writes no store"


def test_an_address_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def never() -> Engine:
            raise AssertionError("the model was loaded for nothing")

        with pytest.raises(OSError, match=f"127.0.0.1 port {port}"):
            run(never, ServerSettings(port=port))
    with pytest.raises(OSError, match=r"no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


def test_several_addresses_have_one_port() -> None:
    first, second = listen_at_all(["127.0.0.1", "127.0.0.2"], 0)
    with first, second:
        port = first.getsockname()[1]
        assert second.getsockname() == ("127.0.0.2", port)
        with pytest.raises(OSError, match=r"127\.0\.0\.2"):
            listen_at_all(["127.0.0.3", "127.0.0.2"], port)
        listen("127.0.0.3", port).close()  # what had been opened is closed


def test_before_there_is_an_engine_everything_is_503() -> None:
    async def ask(method: str, path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(LoadingApp()), base_url="http://localhost") as client:
            return await client.request(method, path)

    for path in ("/health", "/v1/completions", "/nothing"):
        answer = asyncio.run(ask("POST", path))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
        assert int(answer.headers["retry-after"]) >= 1
    page = asyncio.run(ask("GET", "/"))
    assert (page.status_code, page.headers["content-type"]) == (503, "text/html; charset=utf-8")
    assert "being loaded" in page.text


def test_requests_that_never_end_are_cut_off(make_server: Callable[..., Server], client: httpx.Client) -> None:
    server = make_server(ServerSettings(receive_timeout=0.3))
    host, port = server.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for parts in ([], [b"GET /health HT"], [head + b'{"prompt"'], [whole, b"GET /hea"]):
        for _ in range(5):
            answer = b""
            with (
                count_seconds() as seconds,
                socket.create_connection((host, int(port)), timeout=30) as connection,
                contextlib.suppress(ConnectionError),  # on a busy machine, a slow client is cut off before it has sent anything
            ):
                for part in parts:
                    connection.sendall(part)
                    while part == whole and not answer.endswith(b"}") and (piece := connection.recv(65536)):
                        answer += piece
                assert connection.recv(65536) == b""
            assert seconds() < 10
            if answer or whole not in parts:
                break
        assert answer.endswith(b"}") == (whole in parts)


def test_a_request_that_takes_longer_than_the_deadline_for_sending_it(make_server: Callable[..., Server]) -> None:
    """The deadline is for the client, not for the answer."""
    server = make_server(ServerSettings(receive_timeout=1, pad_stream=200))
    body = {"prompt": "ab", "max_tokens": 10, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200


def test_more_connections_than_allowed(start_server: Callable[..., Server]) -> None:
    """Idle ones make room, the oldest first; while all are busy, one more is refused at once."""
    engine = tiny_engine()
    brake = Brake(engine)
    with engine:
        server = start_server(engine, ServerSettings(max_connections=2))
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as idle, httpx.Client(base_url=server.url) as client:
            for _ in range(3):
                assert client.get("/health").status_code == 200
                assert httpx.get(f"{server.url}/health").status_code == 200
            assert idle.recv(1) == b""
        body = json.dumps({"prompt": "ab", "max_tokens": 1}).encode()
        post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        with held_stream(server.url, brake), socket.create_connection((host, int(port))) as waiting:
            waiting.sendall(post % (len(body), body))
            deadline = time.monotonic() + 30
            while server.app.state.server.admission.in_flight < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            refused = httpx.get(f"{server.url}/health")
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert "connections" in refused.json()["error"]["message"]
            brake.release()


FEW_DESCRIPTORS = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 64))
from ngramspec.server import logs
from ngramspec.server.run import run
from ngramspec.server.settings import ServerSettings
logs.configure("json")
run(lambda: threading.Event().wait(), ServerSettings(port=0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's limits")
def test_more_connections_than_descriptors(tmp_path: Path) -> None:
    """With as many idle connections as it has descriptors, and more, the server answers, and its log stays short."""
    import resource

    log = tmp_path / "log"
    with (
        log.open("wb") as out,
        subprocess.Popen([sys.executable, "-c", FEW_DESCRIPTORS], stderr=out) as process,
        contextlib.ExitStack() as all_,
    ):
        try:
            deadline = time.monotonic() + START_S
            while b'"url"' not in log.read_bytes() and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.05)
            url = json.loads(log.read_bytes().splitlines()[0])["url"]
            host, port = url.removeprefix("http://").split(":")
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (64, 64)
            for i in range(120):
                all_.enter_context(socket.create_connection((host, int(port)), timeout=60))
                if i % 20 == 19:
                    with count_seconds() as seconds:
                        answer = httpx.get(f"{url}/health", timeout=60)
                        assert seconds() < 10
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
            assert len(log.read_bytes()) < 10_000
        finally:
            process.kill()


def test_failing_accepts_are_said_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(AcceptErrors())
    for _ in range(1000):
        loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")})
    assert [record.getMessage() for record in caplog.records if "accept" in record.getMessage()] == [
        "no connection can be accepted: Too many open files (1 times since this was last said)"
    ]
    loop.call_exception_handler({"message": "something else", "exception": ValueError("seen")})
    assert "something else" in caplog.text
    loop.close()

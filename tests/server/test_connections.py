"""Who asks, from where, and how the connection is used: pages of other sites, HEAD, clients that send no more, requests in a row."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fair_time import count_seconds, wait_until
from scripted import Gate, reciting_engine, tokenizer_with
from tiny_server import Server

from ngramspec.server.run import READ_AT_ONCE, Protocol
from ngramspec.server.settings import ServerSettings

TEXT = "one two three four five six"
CHANGES = (("POST", "/admin/datastores/a/update", 404), ("PUT", "/admin/datastores/a", 400), ("DELETE", "/admin/datastores/a", 404))


# ------------------------------------------------------------------ pages


@pytest.mark.parametrize(("method", "path", "status"), CHANGES)
@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({}, True),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"origin": "https://editor.example", "sec-fetch-site": "cross-site"}, True),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://localhost:9999", "host": "localhost:8000"}, False),
        ({"origin": "http://localhost.evil.example", "host": "localhost"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "http://localhost", "host": "localhost"}, False),
    ],
    ids=repr,
)
def test_a_page_of_another_site_changes_nothing(
    make_server: Callable[..., Server], method: str, path: str, status: int, headers: dict[str, str], may: bool
) -> None:
    """With no body at all: such a request a browser sends without asking first."""
    server = make_server(ServerSettings(cors_origins=("https://editor.example",), admin_on_loopback=True))
    body: dict[str, Any] = {"json": {"path": "/nowhere"}} if method == "PUT" else {}
    answer = httpx.request(method, server.url + path, headers=headers, **body)
    assert answer.status_code == (status if may else 403), answer.text
    assert httpx.get(f"{server.url}/admin/datastores", headers={"sec-fetch-site": "none"}).status_code == 200


# ------------------------------------------------------------------ HEAD


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/", "/static/app.js", "/metrics", "/nothing", "/v1/completions"])
def test_head_is_get_without_a_body(client: httpx.Client, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    for name in ("content-type", "allow", "cache-control"):
        assert head.headers.get(name) == got.headers.get(name)
    if path != "/metrics":  # which counts
        assert head.headers["content-length"] == got.headers["content-length"]
    assert client.get("/health").json() == {"status": "ok"}


# ------------------------------------------------------------------ connections


class Connection:
    """Bytes, and all that comes back."""

    def __init__(self, server: Server) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def rest(self) -> bytes:
        answer = b""
        while piece := self.socket.recv(65536):
            answer += piece
        return answer


def post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (
        len(data),
        data,
    )


@pytest.fixture
def held(start_server: Callable[..., Server]) -> Any:
    """A server whose text comes when the gate is opened."""
    engine, gate = reciting_engine(TEXT, tokenizer_with("one", " two", " three", " four", " five", " six"))
    with engine:
        yield start_server(engine), gate
        gate.open()


ASK = {"prompt": "one", "max_tokens": 5, "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(held: tuple[Server, Gate], stream: bool, waits: bool) -> None:
    server, gate = held
    if waits:
        gate.shut(free=1)
    with Connection(server) as client:
        client.socket.sendall(post(ASK | {"stream": stream}))
        client.socket.shutdown(socket.SHUT_WR)
        if waits:
            assert gate.held.wait(30)
            time.sleep(0.7)  # in which it is asked whether it is there
            gate.open()
        answer = client.rest()
    expected = httpx.post(f"{server.url}/v1/completions", json=ASK, timeout=60).json()["choices"][0]["text"]
    assert b"HTTP/1.1 200 " in answer
    assert (b"[DONE]" in answer) if stream else (json.loads(answer.rpartition(b"\r\n\r\n")[2])["choices"][0]["text"] == expected)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_is_gone_is_noticed(held: tuple[Server, Gate], stream: bool) -> None:
    server, gate = held
    gate.shut(free=1)
    with Connection(server) as client:
        client.socket.sendall(post(ASK | {"stream": stream, "max_tokens": 5}))
        assert gate.held.wait(30)
    admission = server.app.state.server.admission
    wait_until(lambda: not admission._reservations, 5)
    gate.open()
    wait_until(lambda: server.engine.status().running == 0, 5)


@pytest.mark.parametrize(
    ("target", "status"), [("%s/health?a=b", 200), ("HTTP://localhost/health", 200), ("http://evil.example/health", 403)]
)
def test_an_absolute_target_is_its_path_at_its_host(server: Server, target: str, status: int) -> None:
    """As clients write it that take this server for their proxy. What the header says of the host does not count then."""
    with Connection(server) as client:
        target = target.replace("%s", server.url)
        client.socket.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert client.rest().startswith(b"HTTP/1.1 %d " % status)


def test_a_request_behind_one_under_way_is_told_that_the_connection_closes(held: tuple[Server, Gate]) -> None:
    server, gate = held
    gate.shut(free=1)
    with Connection(server) as client:
        client.socket.sendall(post(ASK))
        assert gate.held.wait(30)
        client.socket.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: any((b"connection", b"close") in c.scope["headers"] for c in server.uvicorn.server_state.connections), 5)
        gate.open()
        answer = client.rest()
    assert answer.count(b"HTTP/1.1 200 ") == 1
    assert b"connection: close" in answer.lower()


def test_requests_sent_at_once_are_answered_or_told_that_the_connection_closes(server: Server) -> None:
    with Connection(server) as client, count_seconds() as seconds:
        client.socket.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        answer = b""
        while answer.count(b"HTTP/1.1 200 ") < 3 and b"connection: close" not in answer.lower():
            answer += (piece := client.socket.recv(65536))
            assert piece, answer
        assert seconds() < 2


def test_what_is_written_is_sent_at_once(client: httpx.Client, server: Server) -> None:
    """Not when the client has acknowledged what was written before, which Linux puts off for 40 ms: a head and a body are two writes."""
    assert client.get("/health").status_code == 200
    sockets = [each.transport.get_extra_info("socket") for each in list(server.uvicorn.server_state.connections)]
    assert sockets
    assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)


def test_one_turn_of_the_loop_reads_little_of_a_body(server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at once is parsed at once, and of chunks of one byte that takes 2 µs for each byte that is sent."""
    sizes, receive = list[int](), Protocol.data_received

    def record(self: Protocol, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(Protocol, "data_received", record)
    body = b'{"content": "%b"}' % (b"a" * (1 << 20))
    client.post("/tokenize", content=body, headers={"content-type": "application/json"})
    assert sum(sizes) > 1 << 20
    assert max(sizes) <= READ_AT_ONCE


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_other_protocols_are_passed_over_in_silence(server: Server, protocol: str, caplog: pytest.LogCaptureFixture) -> None:
    """Java's clients ask for HTTP/2 with their first request: an operator need not hear of it, nor install what uvicorn would name."""
    headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"}
    assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_an_idle_connection_is_kept_for_longer_than_proxies_keep_theirs(client: httpx.Client, server: Server) -> None:
    """A proxy that sends a request just as the server closes the connection answers 502; nginx keeps connections for 60 s."""
    assert client.get("/health").status_code == 200
    idle = list[Any]()

    def find_idle() -> list[Any]:
        idle[:] = [each for each in list(server.uvicorn.server_state.connections) if each.timeout_keep_alive_task is not None]
        return idle

    wait_until(find_idle, 5)  # the answer has come before the server waits for the next request
    assert all(each.timeout_keep_alive_task.when() - each.loop.time() > 60 for each in idle)


def test_an_event_is_one_line_to_who_splits_at_any_line_end(client: httpx.Client) -> None:
    """As httpx does, with which Ollama's client for Python and others read streams: JSON may hold U+0085, U+2028 and U+2029 as they are."""
    odd = "a\u2028b\u2029c\u0085d\u00e9"
    body = {"prompt": odd, "max_tokens": 1, "echo": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text.startswith(odd)

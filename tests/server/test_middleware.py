"""What is refused before a route sees it: sizes, JSON that is none, host names; what every response carries; the log."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import re
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tiny_server import Server

from ngramspec.server.logs import JsonFormatter
from ngramspec.server.middleware import IncomingBodies, read_body
from ngramspec.server.settings import Limits, ServerSettings

GOOD = {"prompt": "ab", "max_tokens": 2}
MIB = 1 << 20


def post(client: httpx.Client, body: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    return client.post("/v1/completions", content=body, headers={"content-type": "application/json"} | headers)


def refused(response: httpx.Response, status: int) -> str:
    """Its message; in OpenAI's envelope."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    numbers = {"n_prompt_tokens", "n_ctx"} if error["code"] == "context_length_exceeded" else set()
    assert set(error) == {"message", "type", "param", "code"} | numbers
    return error["message"]


@pytest.fixture(autouse=True)
def healthy(client: httpx.Client) -> Iterator[None]:
    yield
    assert client.get("/health").json() == {"status": "ok"}


def test_bodies_up_to_the_limit(client: httpx.Client) -> None:
    frame = json.dumps(GOOD | {"user": "?"}).encode()
    whole = frame.replace(b"?", b"x" * (2 * MIB - len(frame) + 1))
    assert len(whole) == 2 * MIB
    assert post(client, whole).status_code == 200
    longer = whole.replace(b"xx", b"xxx", 1)
    assert "2097152" in refused(post(client, longer), 413)
    chunks = (longer[i : i + 65536] for i in range(0, len(longer), 65536))
    refused(post(client, chunks), 413)


def test_screenshots_do_not_count_as_text(client: httpx.Client) -> None:
    picture = base64.b64encode(bytes(3 * MIB)).decode()
    seen = {
        "/v1/chat/completions": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}],
        "/v1/messages": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": picture}}],
    }
    for path, block in seen.items():
        call = {"id": "c", "type": "function", "function": {"name": "see", "arguments": "{}"}}
        turns: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        turns += [{"role": "tool", "tool_call_id": "c", "content": block}]
        if path == "/v1/messages":
            turns[1:] = [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "see", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": block}]},
            ]
        answer = client.post(path, json={"model": "m", "messages": turns, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        turns[0]["content"] = picture
        assert "NGRAMSPEC_LIMITS__BODY_BYTES" in client.post(path, json={"model": "m", "messages": turns, "max_tokens": 1}).text
        turns[0]["content"] = "a"
        larger = json.dumps({"model": "m", "messages": turns, "max_tokens": 1}).replace(picture, picture * 9)
        assert client.post(path, content=larger, headers={"Content-Type": "application/json"}).status_code == 413


def test_several_screenshots_in_one_list_do_not_count_as_text(client: httpx.Client) -> None:
    pictures = [base64.b64encode(bytes(3 * MIB)).decode() for _ in range(4)]
    turns = [{"role": "user", "content": "a"}, {"role": "tool", "tool_name": "see", "content": "", "images": pictures}]
    body = json.dumps({"model": "m", "messages": turns, "stream": False, "options": {"num_predict": 1}}).encode()
    for content in (body, (body[at : at + 50_000] for at in range(0, len(body), 50_000))):
        answer = client.post("/api/chat", content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
    longer = body.replace(b'"content": "a"', b'"content": "%b"' % (b"a b" * MIB))
    assert client.post("/api/chat", content=longer).status_code == 413


@pytest.mark.parametrize(("keep", "most"), [(True, 4 * MIB), (False, 0)])
def test_memory_of_a_body_that_is_coming(keep: bool, most: int) -> None:
    """Whoever has no valid key can have the server hold no body, on however many connections."""
    chunks = [bytes(MIB // 2)] * 4
    held: list[int] = []

    async def receive() -> dict[str, Any]:
        held.append(tracemalloc.get_traced_memory()[0])
        return {"type": "http.request", "body": chunks.pop(), "more_body": bool(chunks)}

    tracemalloc.start()
    try:
        body = asyncio.run(read_body({"headers": []}, receive, IncomingBodies(Limits()), keep=keep))
    finally:
        tracemalloc.stop()
    assert len(body) == (2 * MIB if keep else 0)
    assert max(held) - held[0] <= most + MIB // 4
    assert max(held) - held[0] >= (MIB if keep else 0)


@pytest.mark.parametrize("field", ["user", "image_url"])
def test_memory_of_all_bodies_that_are_coming(make_server: Callable[..., Server], field: str) -> None:
    """60 that never end hold what the limit says. Beside them a short request is answered, and a long one when they are gone."""
    server = make_server(ServerSettings(limits=Limits(incoming_bytes=8 * MIB)))
    long = json.dumps(GOOD | {field: "x" * MIB}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (3 * MIB)
    host, port = server.url.removeprefix("http://").split(":")

    def count_refused(client: httpx.Client) -> int:
        found = re.search(r'request_refused_total\{reason="bodies_full"\} (\d+)', client.get("/metrics").text)
        return int(found[1]) if found else 0

    tracemalloc.start()
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            with contextlib.ExitStack() as unfinished:
                for _ in range(60):
                    connection = unfinished.enter_context(socket.create_connection((host, int(port)), timeout=20))
                    connection.sendall(head + long)
                answer = post(client, long)  # it comes after what was sent before
                assert tracemalloc.get_traced_memory()[1] < 24 * MIB
                assert "the bodies of other requests" in refused(answer, 503)
                assert answer.headers["retry-after"] == "2"
                assert post(client, json.dumps(GOOD | {field: "x" * (30 << 10)}).encode()).status_code == 200
                assert count_refused(client) == 1  # the others are told at their end
            deadline = time.monotonic() + 20
            while (status := post(client, long).status_code) != 200 and time.monotonic() < deadline:
                assert status == 503
            assert status == 200
    finally:
        tracemalloc.stop()


def test_bodies_that_are_far_too_long_are_not_read(server: Server) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999999\r\n"
    for more in ("", "Expect: 100-continue\r\n"):
        assert raw(server, (head + more + "\r\n").encode()).startswith(b"HTTP/1.1 413 ")


def test_who_sends_all_before_listening_is_answered(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for head in ("X-Long: " + "a" * (65 << 10), "Content-Encoding: gzip", "Expect: 100-continue", "X: y"):
        body = b"x" * (40 * MIB)
        lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", head, f"Content-Length: {len(body)}"]
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 415 ", b"HTTP/1.1 431 ")), head
        assert b'"error"' in answer


def test_headers(client: httpx.Client, server: Server) -> None:
    assert "65" in refused(client.get("/health", headers={"x-long": "a" * (64 << 10)}), 431)
    endless = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * (1 << 19))
    assert endless.startswith(b"HTTP/1.1 431 ")
    assert b'"error"' in endless


def test_what_is_not_http(server: Server) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\nHost: a\r\nHost", b"POST\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"):
        answer = raw(server, garbage + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 40"), garbage
        assert b'"error"' in answer


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"prompt":' * 100_000,
        b'{"prompt": "a", "logit_bias": {"1": NaN}}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "seed": ' + b"9" * 50 + b"}",
        b'{"prompt": "a", "max_tokens": 9223372036854775808}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a"} {}',
        b'{"prompt": "a",}',
        b"'prompt'",
        b"null",
        b"",
        b'{"user": ' + b"[" * 65 + b"]" * 65 + b"}",
    ],
)
def test_what_is_not_json_or_too_much_of_it(client: httpx.Client, body: bytes) -> None:
    refused(post(client, body), 400)


def test_a_mark_of_byte_order_is_no_part_of_the_json(client: httpx.Client) -> None:
    """Editors and shells of Windows write it; vLLM and llama.cpp read past it."""
    assert post(client, b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}').status_code == 200


def test_refusals_name_what_is_missing_or_of_another_kind(client: httpx.Client) -> None:
    assert refused(post(client, b""), 400) == "the body: is missing"
    assert refused(post(client, b"[1]"), 400) == "the body: must be an object"
    assert refused(post(client, b'{"prompt": "a", "stream_options": 5}'), 400) == "stream_options: must be an object"


def test_nul_is_text(client: httpx.Client) -> None:
    assert post(client, b'{"prompt": "a\\u0000b", "max_tokens": 1, "stop": ["\\u0000"], "user": "\\u0000"}').status_code == 200


def test_only_json_is_read(client: httpx.Client) -> None:
    """A page of another site may send text and forms without asking; JSON it may not."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx"):
        assert "application/json" in refused(post(client, json.dumps(GOOD).encode(), **{"content-type": kind}), 415)
    assert post(client, json.dumps(GOOD).encode(), **{"content-type": "application/json; charset=utf-8"}).status_code == 200


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    assert "/nothing" in refused(client.get("/nothing"), 404)
    form = {"files": {"file": b"RIFF"}, "data": {"model": "whisper-1"}}
    assert "/v1/audio/transcriptions" in refused(client.post("/v1/audio/transcriptions", **form), 404)
    assert "no embeddings" in refused(client.post("/v1/embeddings", content=b"text", headers={"content-type": "text/plain"}), 400)
    response = client.get("/v1/completions")
    assert "POST" in refused(response, 405)
    assert response.headers["allow"] == "POST"


def test_every_response_has_a_name_and_is_kept_to_itself(client: httpx.Client) -> None:
    given = client.get("/health", headers={"x-request-id": "editor-7"})
    assert given.headers["x-request-id"] == "editor-7"
    made = {client.get(path, headers={"x-request-id": "no\tname"}).headers["x-request-id"] for path in ("/health", "/nothing")}
    assert len(made) == 2
    assert all(len(name) == 32 for name in made)
    for response in (given, client.get("/nothing"), post(client, b"[")):
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "access-control-allow-origin" not in response.headers


def test_pages_of_listed_sites(make_server: Callable[..., Server]) -> None:
    server = make_server(ServerSettings(cors_origins=("https://editor.example",)))
    with httpx.Client(base_url=server.url) as client:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        allowed = client.options("/v1/completions", headers=ask | {"origin": "https://editor.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://editor.example"
        other = client.options("/v1/completions", headers=ask | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_the_log_tells_what_happened_and_not_what_was_said(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ngramspec.access"):
        post(client, json.dumps({"prompt": "secret words", "max_tokens": 3, "ignore_eos": True}).encode(), **{"x-request-id": "r1"})
        client.get("/v1/models/secret-path", headers={"authorization": "Bearer secret-key", "x-request-id": "r2"})
        client.get("/v2/mo%20dels%0A?key=secret", headers={"x-request-id": "r3"})
        client.get("/health")  # what is answered after the others is logged after them
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    first, second, third = (next(line for line in lines if line.get("id") == name) for name in ("r1", "r2", "r3"))
    assert {"method": "POST", "route": "/v1/completions", "status": 200, "completion_tokens": 3}.items() <= first.items()
    assert first["prompt_tokens"] == 12
    assert first["duration_ms"] >= first["ttft_ms"] >= 0
    assert second["status"] == 404
    assert (third["route"], third["path"]) == ("-", "/v2/mo%20dels%0A"), "what a wrong base URL asks for"
    assert "secret" not in json.dumps(lines)
    assert all("secret" not in record.getMessage() for record in caplog.records)


def test_a_defect_is_told_to_the_log_alone(make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    server = make_server()

    @server.app.get("/defect")
    async def defect() -> None:
        raise RuntimeError("private detail")

    with httpx.Client(base_url=server.url) as client, caplog.at_level(logging.ERROR):
        message = refused(client.get("/defect"), 500)
        assert client.get("/health").status_code == 200
    assert "private" not in message
    assert "private detail" in caplog.text


def test_limits_on_what_is_asked(make_server: Callable[..., Server]) -> None:
    limits = Limits(prompt_tokens=20, output_tokens=100, logprobs=3, stops=4, stop_chars=10, bias=2)
    server = make_server(ServerSettings(limits=limits))
    with httpx.Client(base_url=server.url) as client:

        def ask(**more: object) -> httpx.Response:
            return client.post("/v1/completions", json=GOOD | more)

        for param, at_most, beyond in (
            ("prompt", "a" * 20, "a" * 21),
            ("max_tokens", 100, 101),
            ("logprobs", 3, 4),
            ("stop", ["b" * 10] * 4, ["b"] * 5),
            ("stop", "b" * 10, "b" * 11),
            ("logit_bias", {"1": 0, "2": 0}, {"1": 0, "2": 0, "3": 0}),
        ):
            assert ask(**{param: at_most}).status_code == 200, param
            refused(ask(**{param: beyond}), 400)
        refused(ask(max_tokens=26, n=4), 400)
        assert ask(prompt="a" * 21).json()["error"]["code"] == "context_length_exceeded"


def test_the_document_names_our_errors(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) > 10
    for operation in operations:
        assert {"400", "401", "403", "413", "415", "429", "431", "500", "503"} <= set(operation["responses"])
        assert "422" not in operation["responses"]
    assert "HTTPValidationError" not in document["components"]["schemas"]


def raw(server: Server, data: bytes) -> bytes:
    """Everything that comes back for bytes on a connection of their own, until it is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(data)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer

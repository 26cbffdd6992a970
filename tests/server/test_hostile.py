"""Requests that mean harm, on every route that reads one: each gets an answer or a typed refusal, and the next one is served as before.

Which numbers and texts a request has is read from the shapes of the requests themselves, so that a new field is tried without a line here.
What a request's bytes must be, whatever its route, is in test_middleware.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fair_time import FairClock, assert_within, count_seconds
from pydantic import BaseModel
from tiny_server import Server, fim_tokenizer, routes_of, tiny_engine

from ngramspec.engine.llm_engine import Engine, Hints
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.admin import Folder
from ngramspec.server.anthropic.schemas import CountTokensRequest, MessagesRequest
from ngramspec.server.llamacpp.schemas import InfillBody, LlamaCompletionBody
from ngramspec.server.ollama.schemas import GenerateRequest, OllamaChatRequest, ShowRequest
from ngramspec.server.openai.responses_schemas import ResponsesRequest
from ngramspec.server.openai.schemas import ApplyTemplateRequest, ChatRequest, CompletionRequest
from ngramspec.server.settings import Limits, ServerSettings
from ngramspec.server.state import AHEAD_CHARS
from ngramspec.server.tokenization import DetokenizeBody, TokenizeBody

MAX_LEN = 64  # tokens of a text of `fim_engine`
GOOD = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "a"}]
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "ab", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": MESSAGES, "max_tokens": 2, "logprobs": True}),
    "/v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 2}),
    "/v1/responses/input_tokens": (ResponsesRequest, {"input": "a"}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": MESSAGES}),
    "/api/chat": (OllamaChatRequest, {"model": "a", "messages": MESSAGES, "options": {"num_predict": 2}}),
    "/api/generate": (GenerateRequest, {"model": "a", "prompt": "ab", "options": {"num_predict": 2}}),
    "/api/show": (ShowRequest, {"model": "a"}),
    "/apply-template": (ApplyTemplateRequest, {"messages": MESSAGES}),
    "/v1/chat/completions/input_tokens": (ApplyTemplateRequest, {"messages": MESSAGES}),
    "/completion": (LlamaCompletionBody, {"prompt": "ab", "n_predict": 2}),
    "/infill": (InfillBody, {"input_prefix": "a", "input_suffix": "b", "n_predict": 2}),
    "/tokenize": (TokenizeBody, {"content": "ab"}),
    "/detokenize": (DetokenizeBody, {"tokens": [97]}),
}
"""What each reads, and a good one."""
ADMIN = {"PUT /admin/datastores/x": Folder}

NOT_FINITE = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400")
NUMBERS = ("-1", "0", "-0.0", "0.5", "2147483648", "9223372036854775808", "18446744073709551616", "1" + "0" * 400, "1e308", "-1e308")
OTHERS = ("true", '"1"', "null", "[]", "{}")
NO_TEXT = ('"\\ud800"', '"\\udc00\\ud800"', '"a\\udfffb"')
"""Half characters, which are read as U+FFFD, as NOT_FINITE are refused, where JSON is read: places in requests take turns with them."""
TEXTS = ('""', '"\\u0000"', '"\\uffff"', f'"{"x" * 100_000}"', '"{{ 7 * 7 }}<|im_end|>"', '"../../etc/passwd"', '"\\u202e\\ud83d\\ude00"')

Leaf = tuple[str, dict[str, Any]]
"""A request's JSON with @ for a value, and what the value's schema says."""


def leaves(model: type[BaseModel], good: dict[str, Any], kinds: set[str]) -> list[Leaf]:
    """Every place of these types in a request, the rest of which is good."""
    schema = model.model_json_schema()

    def inside(part: dict[str, Any], seen: frozenset[str]) -> Iterator[tuple[Any, dict[str, Any]]]:
        if (name := part.get("$ref", "").rpartition("/")[2]) and name not in seen:
            yield from inside(schema["$defs"][name], seen | {name})
        for branch in part.get("anyOf", []):
            yield from inside(branch, seen)
        if part.get("type") in kinds:
            yield "@", part
        if "items" in part:
            yield from (([value], leaf) for value, leaf in inside(part["items"], seen))
        for i, item in enumerate(part.get("prefixItems", [])):
            for value, leaf in inside(item, seen):
                yield [value if j == i else 1 for j in range(len(part["prefixItems"]))], leaf
        if isinstance(others := part.get("additionalProperties"), dict):
            for value, leaf in inside(others, seen):
                yield {"97": value}, leaf
        for field, item in part.get("properties", {}).items():
            for value, leaf in inside(item, seen):
                rest = good if part is schema else {"role": "user", "content": "a", "type": "text"}
                yield {**{name: rest[name] for name in rest if name in part["properties"]}, field: value}, leaf

    return [(json.dumps(value), leaf) for value, leaf in inside(schema, frozenset())]


def leaves_of_routes(*kinds: str) -> list[tuple[str, Leaf]]:
    """Routes with their places of these types. A field that several inherit from one class is tried on the first; each has two at least."""
    found, seen = list[tuple[str, Leaf]](), set[tuple[type, str]]()
    for path, (model, good) in ROUTES.items():
        every = leaves(model, good, set(kinds))
        keys = [key(model, leaf) for leaf in every]
        new = [leaf for leaf, each in zip(every, keys, strict=True) if each not in seen]
        seen.update(keys)
        found += [(path, leaf) for leaf in (new + [leaf for leaf in every if leaf not in new])[: max(2, len(new))]]
    return found


def key(model: type[BaseModel], leaf: Leaf) -> tuple[type, str]:
    """Return the class that declares the leaf's field, and the leaf without the rest of the request."""

    def find(each: type) -> Any:
        return next((repr(info) for name, info in getattr(each, "model_fields", {}).items() if field in (name, info.alias)), None)

    field, value = next((field, value) for field, value in json.loads(leaf[0]).items() if '"@"' in json.dumps(value))
    return next(each for each in reversed(model.__mro__) if find(each) == find(model)), json.dumps([field, value, leaf[1]])


@pytest.fixture(scope="module")
def server(start_server: Callable[..., Server], fim_engine: Engine) -> Server:
    return start_server(fim_engine, ServerSettings(admin_on_loopback=True, receive_timeout=2, limits=Limits(output_tokens=256)))


@pytest.fixture(scope="module")
def expected(fim_engine: Engine) -> str:
    """What the good request is answered."""
    return fim_engine.complete(list(b"def add(a, b):"), SamplingParams(max_tokens=8, ignore_eos=True), speculation=False).text


@pytest.fixture(autouse=True)
def unharmed(client: httpx.Client, server: Server, expected: str) -> Iterator[None]:
    yield
    check(client, server, expected)


def check(client: httpx.Client, server: Server, expected: str) -> None:
    """The server is healthy, holds nothing of the requests before, and writes what it wrote before."""
    assert client.get("/health").json() == {"status": "ok"}
    assert client.post("/v1/completions", json=GOOD).json()["choices"][0]["text"] == expected
    assert server.app.state.server.admission.in_flight == 0


def send(client: httpx.Client, path: str, body: str | bytes, method: str = "POST") -> httpx.Response:
    """Answered at all, soon, and with nothing but 200 or an error in the envelope that is not the server's."""
    content = body.encode() if isinstance(body, str) else body
    with count_seconds() as seconds:
        response = client.request(method, path, content=content, headers={"content-type": "application/json"})
        assert seconds() < 20
    assert response.status_code == 200 or 400 <= response.status_code < 500, (response.text, content[:200])
    if response.status_code != 200:
        envelope(response)
    return response


def envelope(response: httpx.Response) -> dict[str, Any]:
    found = response.json()
    if response.request.url.path.startswith("/api/"):
        error = {"message": found.pop("error"), "type": "an_error", "param": None, "code": None}
        assert not found
    elif response.request.url.path.startswith("/v1/messages"):
        assert set(found) == {"type", "error"}
        assert found["type"] == "error"
        error = found["error"] | {"param": None, "code": None}
    else:
        (error,) = found.values()
    more = {"n_prompt_tokens", "n_ctx"} if error["type"] == "exceed_context_size_error" else set()
    assert set(error) == {"message", "type", "param", "code"} | more
    assert error["message"]
    assert len(error["message"]) < 2000
    assert error["type"].endswith("_error") or error["type"] == "request_too_large"
    return error


def named(found: list[tuple[str, Leaf]]) -> Any:
    return pytest.mark.parametrize(("path", "leaf"), found, ids=[f"{path} {leaf[0]}"[:100] for path, leaf in found])


# ---------------------------------------------------------------------------- values


@named(leaves_of_routes("integer", "number"))
def test_numbers(client: httpx.Client, path: str, leaf: Leaf) -> None:
    frame, schema = leaf
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if "logit_bias" in frame and low is None:
        low, high = -100, 100  # told in words
    assert low is not None, "a number without bounds"
    assert high is not None

    def status(value: str) -> int:
        return send(client, path, frame.replace('"@"', value)).status_code

    for value in (NOT_FINITE[len(frame) % len(NOT_FINITE)], str(high + 1), str(low - 1)):
        assert status(value) == 400, value
    for value in (*NUMBERS, *OTHERS):
        inside = value in NUMBERS and low <= float(value) <= high
        assert status(value) in ((200, 400) if inside or value in OTHERS else (400,)), value
    for value in (str(high), str(high - 1), str(low)):
        assert status(value) in (200, 400), value  # what a parameter may be can be too much of it, or beside the others


@named(leaves_of_routes("string"))
def test_texts(client: httpx.Client, path: str, leaf: Leaf) -> None:
    half = NO_TEXT[len(leaf[0]) % len(NO_TEXT)]
    given, replaced = (send(client, path, leaf[0].replace('"@"', each)) for each in (half, re.sub(r"\\ud...", r"\\ufffd", half)))
    assert given.status_code == replaced.status_code, half
    for value in (*TEXTS, "1", "[1]", "{}", "true"):
        send(client, path, leaf[0].replace('"@"', value))


def test_every_route_that_reads_json_is_here(server: Server) -> None:
    read = {path for path, operations in server.app.openapi()["paths"].items() if "requestBody" in operations.get("post", {})}
    assert read == {*ROUTES, "/completions", "/slots/{id_slot}"}, "one is another by another name; test_slots has the last"


@pytest.mark.parametrize("key", ["", "-1", "2147483648", "9" * 100, "9" * 10_000, "a" * 65])
def test_keys_of_logit_bias_that_are_neither_ids_nor_short_texts(client: httpx.Client, key: str) -> None:
    for path in ("/v1/completions", "/completion"):
        error = envelope(send(client, path, f'{{"prompt": "a", "logit_bias": {{"{key}": 1}}}}'))
        assert error["param"] == "logit_bias"


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/completions", {"stop": ["x" * (1 + i % 9) for i in range(10_000)]}, "stop"),
        ("/completion", {"stop": ["x"] * 10_000}, "stop"),
        ("/v1/completions", {"stop": "x" * 1001}, "stop"),
        ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
        ("/completion", {"logit_bias": [[i, 1] for i in range(1025)]}, "logit_bias"),
        ("/v1/completions", {"stop_token_ids": list(range(1025))}, "stop_token_ids"),
        ("/v1/completions", {"allowed_token_ids": [97] * 500_000}, "allowed_token_ids"),
        ("/v1/completions", {"logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": ["a"] * 10_000, "max_tokens": 1}, None),
        ("/v1/completions", {"prompt": ["a"] * 100, "max_tokens": 1}, None),
        ("/v1/completions", {"n": 9, "max_tokens": 60}, "max_tokens"),
        ("/v1/chat/completions", {"n": 9, "max_tokens": 60}, "max_tokens"),
        ("/completion", {"n_cmpl": 9, "n_predict": 60}, "max_tokens"),
        ("/v1/completions", {"prompt": "a" * MAX_LEN}, "context"),
        ("/v1/completions", {"prompt": [97] * MAX_LEN}, "context"),
        ("/v1/completions", {"prompt": "a" * (1 << 20)}, "context"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * MAX_LEN}]}, "context"),
        ("/v1/chat/completions", {"messages": MESSAGES * 10_000}, "context"),
        ("/completion", {"prompt": "a" * MAX_LEN}, "context"),
        ("/completion", {"prompt": ["a", 97] * 30_000}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_too_much_of_something(client: httpx.Client, path: str, extra: dict[str, Any], param: str | None) -> None:
    response = send(client, path, json.dumps(ROUTES[path][1] | extra))
    assert response.status_code == 400
    error = envelope(response)
    if param == "context":
        assert error["code"] == "context_length_exceeded"
    elif param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "head", "item", "tail"),
    [
        ("/v1/completions", '{"prompt": [', "1.5", "]}"),
        ("/v1/completions", '{"prompt": [', "[1.5]", "]}"),
        ("/v1/completions", '{"prompt": "a", "stop_token_ids": [', '""', "]}"),
        ("/v1/completions", '{"prompt": "a", "logit_bias": {', '"@": ""', "}}"),
        ("/v1/chat/completions", '{"messages": [', "1", "]}"),
        ("/v1/chat/completions", '{"messages": [', '{"role": "user", "content": ""}', "]}"),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [', "1", "]}]}"),
        ("/v1/messages", '{"max_tokens": 1, "messages": [', "1", "]}"),
        ("/v1/messages", '{"max_tokens": 1, "messages": [', '{"role": "user", "content": []}', "]}"),
        ("/v1/messages", '{"max_tokens": 1, "messages": [{"role": "user", "content": [', '{"type": "image"}', "]}]}"),
        (
            "/v1/messages",
            '{"max_tokens": 1, "tool_choice": {"type": "any"}, "messages": [{"role": "system", "content": [',
            '{"type": "tool_removal", "tool": {"name": "number @ of many tools"}}',
            "]}]}",
        ),
        (
            "/v1/messages",
            '{"max_tokens": 1, "messages": [{"role": "system", "content": [',
            '{"type": "tool_addition", "tool": {"definition": {"name": "tool@", "description": "one of many tools"}}}',
            "]}]}",
        ),
        ("/v1/responses", '{"input": [', '{"type":"function_call","call_id":"","name":"","arguments":""}', "]}"),
        ("/api/chat", '{"model": "a", "messages": [', "1", "]}"),
        ("/api/chat", '{"model": "a", "messages": [', '{"role": "user"}', "]}"),
        ("/api/generate", '{"model": "a", "prompt": "a", "context": [', "-1", "]}"),
        ("/completion", '{"prompt": "a", "logit_bias": [', "[]", "]}"),
        ("/completion", '{"prompt": "a", "logit_bias": [', "[1, 1]", "]}"),
        ("/infill", '{"input_prefix": "", "input_suffix": "", "input_extra": [', "1", "]}"),
        ("/tokenize", '{"content": [', "1.5", "]}"),
        ("/tokenize", '{"content": [', '"a"', "]}"),
        ("/detokenize", '{"tokens": [', "-1", "]}"),
    ],
)
def test_a_long_list_that_is_wrong_is_told_of_at_once(
    client: httpx.Client, server: Server, path: str, head: str, item: str, tail: str
) -> None:
    """Half a million errors would keep everybody waiting; a request beside it is answered meanwhile."""
    n = ((2 << 20) - 200) // (len(item) + 8)
    body = f"{head}{','.join(item.replace('@', str(i)) for i in range(n))}{tail}"
    with count_seconds() as seconds:
        assert send(client, path, body).status_code == 400
        assert seconds() < 10


def test_too_many_prompts_are_refused_before_the_suffix_is_put_behind_each() -> None:
    body = GOOD | {"prompt": ["a"] * 250_000, "suffix": "x" * 1000, "max_tokens": 1}
    with tiny_engine(tokenizer=fim_tokenizer()) as engine, routes_of(engine) as client, count_seconds() as seconds:
        response = client.post("/v1/completions", json=body)
        assert (response.status_code, envelope(response)["param"]) == (400, "n")
        assert seconds() < 5


def test_samples_of_a_request_share_what_was_prepared_once(server: Server) -> None:
    """128 copies of a list as long as the vocabulary would take a second of the loop that serves everybody."""
    request = server.engine.submit([97], SamplingParams(n=3, max_tokens=1, allowed_token_ids=[97], temperature=1.0))
    assert len({id(seq.sampler.allowed) for seq in request.seqs}) == 1
    assert [seq.sampler.index for seq in request.seqs] == [0, 1, 2]
    request.result(60)


def test_long_texts_are_not_encoded_in_the_engines_thread(server: Server) -> None:
    """For prompts that may be asked for next; a request that comes meanwhile would wait."""
    state, hints, long = server.app.state.server, Hints(), Hints()
    state.expect_prompts(hints, "a" * AHEAD_CHARS, "")
    assert "next_prompts" in hints
    for texts in (("a" * AHEAD_CHARS, "b"), ("a", "b" * AHEAD_CHARS), ("a", "b", [("c", "d" * AHEAD_CHARS)])):
        state.expect_prompts(long, *texts)
        assert "next_prompts" not in long


@pytest.mark.parametrize("place", ['"metadata": {"a": [@]}', '"tools": [{"type": "function", "name": "a", "parameters": {"maximum": @}}]'])
@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 310 + ".5"])
def test_a_number_that_no_answer_could_say_is_refused_wherever_it_is(client: httpx.Client, place: str, number: str) -> None:
    response = send(client, "/v1/responses", '{"input": "a", "stream": true, ' + place.replace("@", number) + "}")
    assert (response.status_code, envelope(response)["code"]) == (400, "invalid_json")


def test_a_long_text_is_encoded_beside_others(client: httpx.Client, server: Server) -> None:
    body, longest = json.dumps({"content": "a" * ((2 << 20) - 20)}), list[float]()
    with httpx.Client(base_url=server.url) as other, ThreadPoolExecutor(1) as pool:
        while not longest or (longest[-1] >= 0.5 and len(longest) < 5):  # again, if the machine was busy
            started = time.monotonic()
            long = pool.submit(send, client, "/tokenize", body)
            waits = []
            while not long.done():
                asked = time.monotonic()
                assert other.get("/health").status_code == 200
                waits.append(time.monotonic() - asked)
            assert long.result().status_code == 200
            longest.append(max(waits) / (time.monotonic() - started))
    assert longest[-1] < 0.5, "of the time that the long text took"


# ---------------------------------------------------------------------------- bodies, paths, headers


@pytest.mark.parametrize("path", [*ROUTES, *ADMIN])
def test_bodies_that_are_no_request(client: httpx.Client, path: str) -> None:
    method, _, target = path.rpartition(" ")
    good = json.dumps(ROUTES[path][1]) if path in ROUTES else '{"path": "/nowhere"}'
    for body in (
        *(
            b"",
            b" ",
            b"null",
            b"[]",
            b"1",
            b'"text"',
            b"{",
            good.encode()[:-1],
            good.encode() + b"x",
            b"\xef\xbb\xbf",
            b"\xff" + good.encode(),
        ),
        *(
            good.encode("utf-16"),
            good.encode("utf-16-le"),
            good.encode("utf-32"),
            b"\x00" + good.encode(),
            b'{"\xff": 1}',
            b'{"a": "\xc0\x80"}',
        ),
        *(b'{"a": "\xed\xa0\x80"}', b'{"\\ud800": 1}', b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000),
        *(b'{"a":' * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, good[:-1].encode() + b', "x": ' + b"[" * 64 + b"]" * 64 + b"}"),
        *(b'{"a": 01}', b'{"a": +1}', b'{"a": .5}', b"{'a': 1}", b'{"a": "\n"}', b"/**/" + good.encode()),
    ):
        assert send(client, target, body, method or "POST").status_code == 400, body[:40]
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "application/xml", "application/json-seq", "json"):
        sent = {"content-type": kind, "origin": "https://evil.example"} if target.startswith("/api/") else {"content-type": kind}
        response = client.request(method or "POST", target, content=good, headers=sent)
        assert response.status_code == 415
        envelope(response)


def test_of_a_key_that_is_there_twice_the_last_counts(client: httpx.Client) -> None:
    twice = send(client, "/v1/completions", '{"prompt": "\\u0061", "max_tokens": -5, "max_tokens": 3, "prompt": "b", "ignore_eos": true}')
    assert twice.json()["usage"]["prompt_tokens"] == 1
    assert twice.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models/%00", "/v1/models/%ff", "/v1/models/%ed%a0%80", "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/" + "a" * 10_000),
        *("/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static/%00", "/static/index.html%00", "//health", "/health/", "/%2e/health"),
        *("/admin/datastores/%00", "/admin/datastores/a%2fb", "/admin/datastores/" + "a" * 65, "/v1/completions%00", "/%", "/%zz", "/\\"),
        *("/v1//completions", "/V1/COMPLETIONS", "/v1/completions/", "/v1/completions/..", "/openapi.json/", "/docs", "/redoc"),
    ],
)
def test_odd_paths(client: httpx.Client, server: Server, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = raw(server, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer[9:12] in (b"400", b"404", b"405"), answer[:200]
        assert b'{"error"' in answer


def test_a_refused_method_is_told_which_there_are(client: httpx.Client) -> None:
    for path, methods in (("/admin/datastores/x", "PUT, DELETE"), ("/v1/completions", "POST"), ("/health", "GET, HEAD")):
        response = client.options(path)
        assert response.status_code == 405
        assert response.headers["allow"] == methods
        assert methods in envelope(response)["message"]


HOST = b"Host: localhost\r\n"
JSON = HOST + b"Content-Type: application/json\r\n"
CHUNKS = b'10\r\n{"content": "a"}\r\n0\r\n\r\n'


@pytest.mark.parametrize(
    ("request_bytes", "statuses"),
    [
        (b"GET /health HTTP/1.1\r\n" + HOST + b"X: " + b"a" * (64 << 10) + b"\r\n\r\n", {431}),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"".join(b"x-%d: 1\r\n" % i for i in range(5000)) + b"\r\n", {431}),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"".join(b"a:\r\n" for i in range(100_000)) + b"\r\n", {431}),
        (b"GET /" + b"a" * (512 << 10) + b" HTTP/1.1\r\n" + HOST + b"\r\n", {400, 431}),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\x00b\r\n\r\n", {400}),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"X : a\r\n\r\n", {400}),
        (b"GET /health HTTP/1.1\r\n" + HOST + b"A: b\r\n c\r\n\r\n", {200, 400}),
        (b"GET /health HTTP/1.1\r\n\r\n", {400}),
        (b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n", {400}),
        (b"GET /health HTTP/1.0\r\n\r\n", {403}),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}),
        (b"CONNECT localhost:22 HTTP/1.1\r\n" + HOST + b"\r\n", {400, 404, 405}),
        (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", {400, 404, 405}),
        (b"TRACE /health HTTP/1.1\r\n" + HOST + b"\r\n", {405}),
        (b"GARBAGE /health HTTP/1.1\r\n" + HOST + b"\r\n", {405}),
        (b"GET /nothing HTTP/1.1\r\n" + HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", {404}),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 403, 505}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Content-Length: -1\r\n\r\n{}", {400}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Content-Length: 2, 3\r\n\r\n{}", {400}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", {400}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}", {400, 413}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Content-Length: 18446744073709551616\r\n\r\n{}", {400, 413}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: gzip\r\n\r\n{}", {400}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked, gzip\r\n\r\n{}", {400}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", {415}),
        (b"GET /health HTTP/1.1\r\nHost: localhost:evil.example\r\n\r\n", {400, 403}),
        (b"GET /health HTTP/1.1\r\nHost: localhost:80:evil\r\n\r\n", {400, 403}),
        (b"GET /health HTTP/1.1\r\nHost: [127.0.0.1]evil\r\n\r\n", {400, 403}),
        (b"GET /health HTTP/1.1\r\nHost: [::1]evil\r\n\r\n", {400, 403}),
        (b"GET /health HTTP/1.1\r\nHost: localhost@evil\r\n\r\n", {400, 403}),
        (b"GET /health HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", {200}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n", {400}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\n{}", {400}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKS, {200}),
        (b"POST /tokenize HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\nContent-Length: 26\r\n\r\n" + CHUNKS, {400}),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_heads(server: Server, request_bytes: bytes, statuses: set[int]) -> None:
    answer = raw(server, request_bytes)
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    assert int(answer[9:12]) in statuses, answer[:300]
    assert int(answer[9:12]) == 200 or b'{"error"' in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_byte_too_many(client: httpx.Client, chunked: bool) -> None:
    frame = json.dumps(GOOD | {"user": ""})[:-2].encode()
    body = frame + b"x" * ((2 << 20) + 1 - len(frame) - 2) + b'"}'
    pieces = (body[i : i + 99_999] for i in range(0, len(body), 99_999))
    response = client.post("/v1/completions", content=pieces if chunked else body, headers={"content-type": "application/json"})
    assert response.status_code == 413
    envelope(response)


# ---------------------------------------------------------------------------- connections


def raw(server: Server, data: bytes) -> bytes:
    """The first response to these bytes, or what there is of it when the connection is closed."""
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection, contextlib.suppress(ConnectionError):
        with contextlib.suppress(ConnectionError):  # it may be refused before all of it is sent
            connection.sendall(data)
        while piece := connection.recv(65536):
            answer += piece
            head, end, body = answer.partition(b"\r\n\r\n")
            if end and len(body) >= int(head.lower().partition(b"content-length: ")[2].split()[0]):
                break
    return answer


def post_bytes(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\n%sContent-Length: %d\r\n\r\n%s" % (path.encode(), JSON, len(body), body)


@pytest.mark.parametrize("behind", [b"\x00\xff" * 1000, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n", b"\r\n\r\n", b"x" * (1 << 20)])
def test_what_stands_behind_a_request_does_not_change_its_answer(server: Server, expected: str, behind: bytes) -> None:
    answer = raw(server, post_bytes("/v1/completions", json.dumps(GOOD).encode()) + behind)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["choices"][0]["text"] == expected


ENDLESS_LINES = {
    "target": b"GET /",
    "header": b"GET /health HTTP/1.1\r\n" + HOST + b"X: ",
    "body": b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Content-Length: 1073741824\r\n\r\n",
    "chunk's size": b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n1;",
    "chunk": b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n40000000\r\n",
}


@pytest.mark.parametrize("line", ENDLESS_LINES)
def test_a_line_of_a_gigabyte_takes_no_memory(client: httpx.Client, server: Server, expected: str, line: str) -> None:
    """It is refused, and what comes behind the refusal is read past for a moment."""
    host, port = server.url.removeprefix("http://").split(":")
    piece, sent, answer = b"x" * (1 << 16), 0, b""
    tracemalloc.start()
    try:
        with socket.create_connection((host, int(port)), timeout=60) as connection, contextlib.suppress(ConnectionError):
            with contextlib.suppress(ConnectionError):
                connection.sendall(ENDLESS_LINES[line])
                while sent < 1 << 30:
                    sent += connection.send(piece)
            answer = connection.recv(65536)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert not answer or answer.split(b" ")[1] in (b"400", b"413", b"431")  # none where it is closed before this has read
    check(client, server, expected)


def test_requests_that_never_end_hold_nobody_up(client: httpx.Client, server: Server, expected: str) -> None:
    """Beside 200 of them others are answered; after `receive_timeout` they are gone, however they trickle."""
    host, port = server.url.removeprefix("http://").split(":")
    begun = [
        *(b"", b"P", b"POST /v1/completions HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\n" + JSON),
        *(post_bytes("/v1/completions", b"{" + b" " * 1000)[:-500], b"\r\n"),
        b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    ]
    slow = [socket.create_connection((host, int(port)), timeout=60) for _ in range(200)]
    try:
        for i, connection in enumerate(slow):
            connection.sendall(begun[i % len(begun)])
        for _ in range(5):
            assert_within(5, lambda: check(client, server, expected))
        clock = FairClock()
        trickling = slow[: len(begun)]
        for connection in trickling:
            connection.settimeout(0.02)
        while trickling and not clock.is_over(20):
            for connection in list(trickling):
                try:
                    if not connection.recv(65536):
                        trickling.remove(connection)
                        continue
                    connection.sendall(b" ")
                except TimeoutError:
                    connection.sendall(b" ")
                except ConnectionError:
                    trickling.remove(connection)
        assert not trickling
        for connection in slow[len(begun) :]:
            try:
                while connection.recv(65536):
                    pass
            except ConnectionError:
                pass
    finally:
        for connection in slow:
            connection.close()

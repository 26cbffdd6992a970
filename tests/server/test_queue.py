"""Admission, clients that leave, errors of the engine, the end: over real sockets, with an engine that is held where a test wants it."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fair_time import count_seconds, wait_until
from tiny_server import Server, left_clean, tiny_engine

from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import OutOfMemoryError
from ngramspec.server.settings import ServerSettings

SOON_S = 2.0
MAX_ROWS = 8
RUNNING = 2
LONG = {"prompt": "ab", "max_tokens": 900, "ignore_eos": True}


class Brake:
    """Stands between an engine and its model: passes go on only as they are let, and can be made to fail."""

    def __init__(self, engine: Engine) -> None:
        self._forward = engine.runner.forward
        self._changed = threading.Condition()
        self._passes: float = math.inf
        self.error: Exception | None = None
        engine.runner.forward = self.forward  # type: ignore[method-assign]
        engine.runner.native_forward = lambda: None  # type: ignore[method-assign]

    def hold(self) -> None:
        self._set(0)

    def release(self) -> None:
        self._set(math.inf)

    def let(self, passes: int = 1) -> None:
        self._set(passes)

    def _set(self, passes: float) -> None:
        with self._changed:
            self._passes = passes
            self._changed.notify()

    def forward(self, batch: Any) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: self._passes > 0, timeout=60)
            self._passes -= 1
        if (error := self.error) is not None:
            if not isinstance(error, OutOfMemoryError) or len(batch.input_ids) == 1:  # a larger pass is tried again, smaller
                self.error = None
            raise error
        return self._forward(batch)


class Rig:
    """A server that runs RUNNING sequences at a time, and as many wait as its fixture says."""

    def __init__(self, server: Server, brake: Brake) -> None:
        self.server, self.engine, self.brake = server, server.engine, brake
        self.admission = server.app.state.server.admission

    def until(self, true: Callable[[], bool], step: bool = False, within: float = 30) -> float:
        """Wait until it is true, and return the seconds; the engine makes passes meanwhile if `step`."""
        return wait_until(true, within, self.brake.let if step else lambda: None)

    def idle(self) -> bool:
        status = self.engine.status()
        return status.waiting == status.running == status.kv_used == self.admission.in_flight == 0

    def send(self, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
        host, port = self.server.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), timeout=30)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def post(self, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.server.url}/v1/completions", json=LONG | more, timeout=60)

    def later(self, **more: Any) -> Future[httpx.Response]:
        answer: Future[httpx.Response] = Future()
        threading.Thread(target=lambda: answer.set_result(self.post(**more)), daemon=True).start()
        return answer

    def metric(self, name: str, **labels: str) -> float:
        return self.server.app.state.server.metrics.registry.get_sample_value(f"ngramspec:{name}", labels) or 0.0

    def run(self, what: Any) -> Any:
        """Run a coroutine in the server's loop, not waiting for it."""
        return asyncio.run_coroutine_threadsafe(what, self.admission._mailbox._loop)


@pytest.fixture(scope="module")
def braked() -> Iterator[tuple[Engine, Brake]]:
    with left_clean(tiny_engine(max_seqs=RUNNING, max_rows=MAX_ROWS, prefix_cache=False, speculation=False)) as engine:
        yield engine, Brake(engine)


@pytest.fixture
def make_rig(braked: tuple[Engine, Brake], start_server: Callable[..., Server]) -> Iterator[Callable[[int], Rig]]:
    made: list[Rig] = []

    def make(max_queue: int) -> Rig:
        made.append(Rig(start_server(braked[0], ServerSettings(max_queue=max_queue)), braked[1]))
        return made[-1]

    yield make
    braked[1].release()
    for rig in made:
        rig.until(rig.idle)


@pytest.fixture
def rig(make_rig: Callable[[int], Rig]) -> Rig:
    return make_rig(0)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "first token", "middle"])
def test_a_client_that_leaves_frees_its_sequence(make_rig: Callable[[int], Rig], phase: str, stream: bool) -> None:
    rig = make_rig(1)
    status, brake = rig.engine.status, rig.brake
    cancelled = rig.metric("request_cancelled_total")
    brake.hold()
    others = [rig.send(LONG) for _ in range(RUNNING)] if phase == "queued" else []
    rig.until(lambda: rig.admission.in_flight == len(others))
    prompt = "a" * 100 if phase == "prefill" else "ab"
    connection = rig.send(LONG | {"prompt": prompt, "stream": stream})
    if phase == "queued":
        rig.until(lambda: rig.admission.in_flight == RUNNING + 1 and status().waiting == 1, step=True)
    else:
        rig.until(lambda: rig.admission.in_flight == 1 and status().running == 1)
    if phase == "prefill":
        passes = status().passes
        rig.until(lambda: status().passes >= passes + 3, step=True)
    elif phase == "middle":
        rig.until(lambda: bool(rig.admission.requests and len(rig.admission.requests[0].completion.token_ids) > 4), step=True)
    before = status().passes
    connection.close()
    left = len(others)
    took = rig.until(lambda: rig.admission.in_flight == left, within=SOON_S)
    rig.until(lambda: status().waiting + status().running == left, step=True, within=SOON_S - took)
    assert status().passes - before < 400, "it ended because it was done"
    for other in others:
        other.close()
    brake.release()
    rig.until(rig.idle)
    rig.until(lambda: rig.metric("request_cancelled_total") == cancelled + 1 + left)


def test_a_client_that_asked_twice_on_one_connection_is_still_seen_to_leave(rig: Rig) -> None:
    rig.brake.hold()
    connection = rig.send(LONG)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2)
    rig.until(lambda: rig.admission.in_flight == 1)
    connection.close()
    rig.until(lambda: rig.admission.in_flight == 0, within=SOON_S)


def test_a_stream_that_was_told_to_its_end_has_not_been_left(rig: Rig) -> None:
    """A request is done a moment after its last delta, which may be on its way to the client by then."""
    reservation = rig.admission.reserve(1)
    reservation.requests.append(SimpleNamespace(done=False, cancel=lambda: None))
    reservation.return_room()
    assert not reservation.close()


def test_beyond_the_queue_is_refused_at_once(rig: Rig) -> None:
    rig.brake.hold()
    answers = [rig.later(max_tokens=2), rig.later(max_tokens=2)]
    rig.until(lambda: rig.admission.in_flight == 2)
    for more in ({}, {"stream": True}, {"prompt": "a" * 10**6}):
        with count_seconds() as seconds:
            refused = rig.post(**more)
            assert seconds() < 1
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
    assert rig.metric("request_refused_total", reason="queue_full") == 3
    rig.brake.release()
    assert [answer.result(30).status_code for answer in answers] == [200, 200]
    assert rig.post(max_tokens=2).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/completion", "/completions", "/infill"])
def test_without_room_no_body_is_looked_at(rig: Rig, path: str) -> None:
    rig.brake.hold()
    answers = [rig.later(max_tokens=2), rig.later(max_tokens=2)]
    rig.until(lambda: rig.admission.in_flight == 2)
    no_json = {"content": b"{", "headers": {"content-type": "application/json"}}
    assert httpx.post(f"{rig.server.url}{path}", **no_json).status_code == 429
    assert httpx.post(f"{rig.server.url}/tokenize", **no_json).status_code == 400, "it writes nothing"
    rig.brake.release()
    assert [answer.result(30).status_code for answer in answers] == [200, 200]


def test_every_text_of_a_request_needs_room(rig: Rig) -> None:
    rig.brake.hold()
    running = rig.later(max_tokens=2)
    rig.until(lambda: rig.admission.in_flight == 1)
    assert rig.post(n=2).status_code == 429
    assert rig.post(prompt=["a", "b"]).status_code == 429
    impossible = rig.post(n=3)
    assert (impossible.status_code, impossible.json()["error"]["param"]) == (400, "n")
    rig.brake.release()
    assert running.result(30).status_code == 200
    assert len(rig.post(n=2, max_tokens=2).json()["choices"]) == 2
    assert rig.admission.in_flight == 0


@pytest.mark.parametrize(
    ("error", "status", "code"), [(RuntimeError("private"), 500, "internal_error"), (OutOfMemoryError("private"), 503, "out_of_memory")]
)
def test_an_engine_error_is_the_requests_own(rig: Rig, error: Exception, status: int, code: str) -> None:
    rig.brake.hold()
    waiting = rig.later(max_tokens=2)
    rig.until(lambda: rig.engine.status().running == 1)
    other = rig.later(max_tokens=3)
    rig.until(lambda: rig.admission.in_flight == 2)
    rig.brake.error = error
    rig.brake.release()
    failed = waiting.result(30)
    assert (failed.status_code, failed.json()["error"]["code"]) == (status, code)
    assert "private" not in failed.text
    assert other.result(30).status_code == 200


def test_an_error_in_the_middle_of_a_stream_ends_it_with_an_event(rig: Rig) -> None:
    body = LONG | {"stream": True, "logit_bias": {str(ord("a")): 100}}  # random bytes may be no text yet
    rig.brake.hold()
    with httpx.stream("POST", f"{rig.server.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        rig.brake.let(2)
        assert "choices" in json.loads(next(lines).removeprefix("data: "))
        rig.brake.error = RuntimeError("private")
        rig.brake.release()
        rest = [line.removeprefix("data: ") for line in lines]
    assert json.loads(rest[-1])["error"]["code"] == "internal_error"
    assert "private" not in "".join(rest)


def test_a_response_that_an_error_ends_has_failed(rig: Rig) -> None:
    """OpenAI's two events: its SDKs raise the first, and Codex reads the second alone."""
    rig.brake.hold()
    body = {"input": "ab", "max_output_tokens": 90, "stream": True}
    with httpx.stream("POST", f"{rig.server.url}/v1/responses", json=body, timeout=60) as response:
        assert response.status_code == 200
        rig.brake.error = RuntimeError("private")
        rig.brake.release()
        lines = list(response.iter_lines())
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "error", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1, 2, 3]
    assert events[2]["error"]["code"] == "internal_error"
    failed = events[3]["response"]
    assert (failed["status"], failed["error"]["code"], failed["usage"]) == ("failed", "server_error", None)
    assert "private" not in "".join(lines)


def test_what_the_engine_refuses_is_told_before_a_stream_begins(rig: Rig) -> None:
    for stream in (True, False):
        refused = rig.post(prompt="a" * 1024, stream=stream)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert rig.admission.in_flight == 0


def test_draining_lets_what_runs_finish_and_takes_no_more(rig: Rig) -> None:
    assert rig.post(max_tokens=1).status_code == 200
    rig.until(lambda: rig.admission.in_flight == 0)
    rig.brake.hold()
    running = rig.later(max_tokens=20)
    rig.until(lambda: rig.engine.status().running == 1)
    drained = rig.run(rig.admission.drain(60))
    rig.until(lambda: rig.admission.draining)
    health = httpx.get(f"{rig.server.url}/health")
    assert (health.status_code, health.json()["error"]["code"]) == (503, "unavailable")
    refused = rig.post()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
    assert int(refused.headers["retry-after"]) >= 1
    assert not drained.done()
    rig.brake.release()
    assert running.result(30).json()["usage"]["completion_tokens"] == 20
    drained.result(30)


def test_what_outlives_the_drain_timeout_is_told_so(rig: Rig) -> None:
    assert rig.post(max_tokens=1).status_code == 200
    rig.until(lambda: rig.admission.in_flight == 0)
    rig.brake.hold()
    with httpx.stream("POST", f"{rig.server.url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as streaming:
        assert streaming.status_code == 200
        waiting = rig.later()
        rig.until(lambda: rig.engine.status().running + rig.engine.status().waiting == 2)
        rig.run(rig.admission.drain(0)).result(30)
        assert rig.admission.in_flight == 0
        assert (waiting.result(30).status_code, waiting.result(0).json()["error"]["code"]) == (503, "shutting_down")
        *_, last = (line for line in streaming.iter_lines() if line.startswith("data: "))
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"


def test_draining_waits_for_answers_that_are_still_on_their_way(rig: Rig, start_server: Callable[..., Server]) -> None:
    """The engine is done at once; the even pace is not."""
    paced = Rig(start_server(rig.engine, ServerSettings(pad_stream=50)), rig.brake)
    answer = paced.later(max_tokens=10, stream=True)
    paced.until(lambda: paced.metric("generation_tokens_total") == 10)
    paced.until(lambda: paced.admission.in_flight == 0)
    paced.run(paced.admission.drain(30)).result(30)
    wait_until(answer.done, 5)
    assert answer.result().text.endswith("data: [DONE]\n\n")


def test_a_closed_engine(start_server: Callable[..., Server]) -> None:
    engine = tiny_engine()
    server = start_server(engine)
    running = httpx.post(f"{server.url}/v1/completions", json=LONG | {"max_tokens": 1})
    assert running.status_code == 200
    engine.close()
    assert httpx.get(f"{server.url}/health").status_code == 503
    refused = httpx.post(f"{server.url}/v1/completions", json=LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_stopped")


def test_even_pace(make_server: Callable[..., Server]) -> None:
    """One token an event, none sooner than the interval allows, the same text; a whole answer takes as long as a streamed one."""
    body = {"prompt": "abcabcabcabc" * 4, "max_tokens": 12, "ignore_eos": True, "seed": 1, "stream_options": {"include_usage": True}}
    plain, even = (httpx.Client(base_url=make_server(ServerSettings(pad_stream=pace)).url, timeout=60) for pace in (0, 20))
    whole = {name: value for name, value in body.items() if name != "stream_options"}
    expected = plain.post("/v1/completions", json=whole).json()
    took_s = list[float]()
    while not took_s or (took_s[-1] < 11 * 0.02 * 0.9 and len(took_s) < 5):  # again, if this process got the first events late
        text, arrived, sources = "", list[float](), list[int]()
        started = time.monotonic()
        with even.stream("POST", "/v1/completions", json=body | {"stream": True, "return_sources": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    for choice in event["choices"]:
                        text += choice["text"]
                        sources.append(len(choice["ngramspec"]["tokens"]))
                        arrived.append(time.monotonic())
        assert time.monotonic() - started >= 11 * 0.02
        assert text == expected["choices"][0]["text"]
        assert sources == [1] * 12
        took_s.append(arrived[-1] - arrived[0])
    assert took_s[-1] >= 11 * 0.02 * 0.9
    started = time.monotonic()
    assert even.post("/v1/completions", json=whole).json()["choices"] == expected["choices"]
    assert time.monotonic() - started >= 12 * 0.02
    plain.close()
    even.close()

"""What a key may ask for at a time and in a minute, keys exchanged while the server runs, and the log of what was refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tiny_server import Server

from ngramspec.engine.llm_engine import Engine
from ngramspec.server import auth
from ngramspec.server.error_responses import ApiError
from ngramspec.server.key_limits import KeyLimits
from ngramspec.server.logs import JsonFormatter
from ngramspec.server.run import LoadingApp
from ngramspec.server.settings import Key, ServerSettings

TEXT = {"prompt": "ab", "max_tokens": 1}


def make_key(**more: object) -> Key:
    return Key.model_validate({"key": "long-enough", "name": "a", **more})


def test_a_bucket_of_a_minute() -> None:
    now = 0.0
    limits, key = KeyLimits(lambda: now), make_key(requests_per_minute=3)
    for _ in range(3):
        limits.enter(key)
        limits.release(key)
    with pytest.raises(ApiError) as caught:
        limits.enter(key)
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    wait = int(caught.value.headers["Retry-After"])
    assert 20 <= wait <= 21
    now = float(wait)
    limits.enter(key)
    with pytest.raises(ApiError):
        limits.enter(key)
    limits.enter(make_key(name="b", requests_per_minute=3))
    now = 1000.0
    for _ in range(3):
        limits.enter(key)
    with pytest.raises(ApiError):
        limits.enter(key)


def test_requests_at_a_time() -> None:
    limits, key = KeyLimits(), make_key(max_requests=2)
    limits.enter(key)
    limits.enter(key)
    with pytest.raises(ApiError, match="2 requests at a time"):
        limits.enter(key)
    limits.release(key)
    limits.enter(key)


def authorize(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_server_holds_a_key_to_its_limits(make_server: Callable[..., Server]) -> None:
    keys = (make_key(key="limited-key", requests_per_minute=2, max_requests=1), make_key(key="other-long-key", name="b"))
    with httpx.Client(base_url=make_server(ServerSettings(api_keys=keys)).url, timeout=60) as client:
        for expected in (200, 200, 429):
            answer = client.post("/v1/completions", json=TEXT, headers=authorize("limited-key"))
            assert answer.status_code == expected, answer.text
        assert int(answer.headers["Retry-After"]) > 0
        assert client.post("/v1/completions", json=TEXT, headers=authorize("other-long-key")).status_code == 200
        assert client.get("/v1/models", headers=authorize("limited-key")).status_code == 200, "nothing is generated"


def test_a_stream_counts_until_it_ends(make_server: Callable[..., Server]) -> None:
    settings = ServerSettings(api_keys=(make_key(max_requests=1),))
    with httpx.Client(base_url=make_server(settings).url, timeout=60, headers=authorize("long-enough")) as client:
        body = {"prompt": "ab", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert client.post("/v1/completions", json=TEXT).status_code == 429
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert client.post("/v1/completions", json=TEXT).status_code == 200


def test_keys_are_exchanged_while_the_server_runs(
    make_server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "REFRESH_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("me:first-long-key\n")
    with httpx.Client(base_url=make_server(ServerSettings(api_key_file=file)).url, timeout=60) as client:

        def status(key: str) -> int:
            return client.get("/v1/models", headers=authorize(key)).status_code

        assert (status("first-long-key"), status("second-long-key")) == (200, 401)
        file.write_text("me:second-long-key\n# the key before is gone\n")
        assert (status("first-long-key"), status("second-long-key")) == (401, 200)
        for broken in ("", "short", "me:third-long-key\nme:fourth-long-key\n", '[{"key": 1}]'):
            file.write_text(broken)
            assert status("second-long-key") == 200, "what cannot be used changes nothing"
        file.unlink()
        assert status("second-long-key") == 200
        file.write_text(json.dumps([{"key": "fifth-long-key"}]))
        assert (status("second-long-key"), status("fifth-long-key")) == (401, 200)


def test_the_log_says_why_and_repeats_nothing(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ngramspec.access"), httpx.Client(base_url=server.url, timeout=60) as client:
        client.post("/v1/completions", json={"prompt": "private words", "max_tokens": -2})
        client.post("/v1/chat/completions", json={"messages": [{"role": "private words", "content": "private words"}]})
        client.post("/v1/completions", content=b"{private words", headers={"Content-Type": "application/json"})
        client.post("/v1/completions", json={"prompt": "private words" * 1000})
        client.get("/health")  # what is answered after the others is logged after them
    lines = [record.getMessage() for record in caplog.records if " 400 " in record.getMessage()]
    reasons = ["param=max_tokens", "param=messages[0].role", "error=invalid_json", "error=context_length_exceeded param=prompt"]
    assert len(lines) == len(reasons)
    for line, reason in zip(lines, reasons, strict=True):
        assert reason in line
        assert "private" not in line


def test_the_log_names_the_key_of_what_is_refused(make_server: Callable[..., Server], caplog: pytest.LogCaptureFixture) -> None:
    url = make_server(ServerSettings(api_keys=(make_key(requests_per_minute=1),))).url
    with (
        caplog.at_level(logging.INFO, "ngramspec.access"),
        httpx.Client(base_url=url, timeout=60, headers=authorize("long-enough")) as client,
    ):
        for body, expected in ((b"{", 400), (b'{"prompt": "ab"}', 429)):
            answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == expected, answer.text
        assert client.get("/v1/models", headers=authorize("another-key")).status_code == 401
        client.get("/health")  # what is answered after the others is logged after them
    keys = [line["key"] for line in (json.loads(JsonFormatter().format(each)) for each in caplog.records) if line["status"] >= 400]
    assert keys == ["a", "a", ""]


def test_it_lives_while_the_model_is_loaded(engine: Engine) -> None:
    async def ask() -> tuple[int, int]:
        transport = httpx.ASGITransport(app=LoadingApp())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/live")).status_code, (await client.get("/health")).status_code

    import asyncio

    assert asyncio.run(ask()) == (200, 503)

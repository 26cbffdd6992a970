"""Encoding: what is too long is refused before it is tokenized, and one's long texts do not hold up another's short ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tiny_server import Server, chat_tokenizer, fim_tokenizer, left_clean, tiny_engine

from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import UnsupportedModelError
from ngramspec.server import encoding
from ngramspec.server.app import create_app
from ngramspec.server.encoding import MAX_WAITING_LONG, SHORT, Encoders
from ngramspec.server.error_responses import ApiError
from ngramspec.server.metrics import Metrics
from ngramspec.server.settings import ServerSettings

LONG_TEXT = "word " * 20_000


@pytest.fixture(scope="module")
def filling(start_server: Callable[..., Server]) -> Iterator[Server]:
    """One that chats and fills in the middle."""
    with left_clean(tiny_engine(tokenizer=fim_tokenizer())) as engine:
        yield start_server(engine)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": LONG_TEXT}),
        ("/v1/completions", {"prompt": ["a", LONG_TEXT]}),
        ("/v1/completions", {"prompt": LONG_TEXT[: len(LONG_TEXT) // 2], "suffix": LONG_TEXT[len(LONG_TEXT) // 2 :]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a <|im_end|>"}] * 5000}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "tools": [{"type": "function", "function": {"name": "f", "description": LONG_TEXT}}],
            },
        ),
        ("/v1/responses", {"input": LONG_TEXT}),
        ("/v1/responses", {"input": "a", "instructions": LONG_TEXT}),
        ("/completion", {"prompt": LONG_TEXT}),
        ("/completion", {"prompt": [1, LONG_TEXT]}),
        ("/completions", {"prompt": ["a", LONG_TEXT]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_too_long_is_refused_before_it_is_tokenized(
    filling: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    sizes: list[int] = []

    def recording(real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(self: Any, text: Any, *args: Any, **options: Any) -> Any:
            sizes.append(len(text))
            return real(self, text, *args, **options)

        return recorded

    for owner, name in ((type(filling.engine), "encode_text"), (type(filling.engine.tokenizer), "__call__")):
        monkeypatch.setattr(owner, name, recording(getattr(owner, name)))
    refused = httpx.post(filling.url + path, json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded"), refused.text
    assert "at least" in refused.json()["error"]["message"] or "there are 5000" in refused.json()["error"]["message"]
    assert max(sizes, default=0) < 1000


@pytest.fixture
def encoders(engine: Engine) -> Encoders:
    return Encoders(Metrics(engine))


def test_long_texts_do_not_hold_up_short_ones_nor_one_tenant_another(encoders: Encoders) -> None:
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(60)

    async def main() -> None:
        held = asyncio.create_task(encoders.run("a", SHORT + 1, hold))
        await asyncio.to_thread(begun.wait, 60)
        works = {"a3": ("a", 3), "a2": ("a", 2), "a1": ("a", 1), "b9": ("b", 9)}
        rest = [
            asyncio.create_task(encoders.run(tenant, SHORT + size, lambda name=name: done.append(name)))
            for name, (tenant, size) in works.items()
        ]
        assert await encoders.run("a", SHORT, lambda: "short") == "short", "while a long one is held"
        assert done == []
        go_on.set()
        await asyncio.gather(held, *rest)

    asyncio.run(main())
    assert done == ["a1", "b9", "a2", "a3"], "tenants in turn, the shortest first"


def test_so_many_texts_wait_and_no_more(encoders: Encoders) -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def main() -> None:
        held = asyncio.create_task(encoders.run("a", SHORT + 1, lambda: begun.set() or go_on.wait(60)))
        await asyncio.to_thread(begun.wait, 60)
        waiting = [asyncio.create_task(encoders.run(f"{i % 3}", SHORT + 1, lambda: None)) for i in range(MAX_WAITING_LONG)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await encoders.run("b", SHORT + 1, lambda: None)
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        go_on.set()
        await asyncio.gather(held, *waiting)
        assert await encoders.run("b", SHORT + 1, lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await encoders.run("b", 1, lambda: 1 // 0)

    asyncio.run(main())


@pytest.mark.parametrize("work", [lambda: 1, lambda: 1 // 0])
def test_who_waits_for_an_encoding_finds_its_lane_at_rest(encoders: Encoders, work: Callable[[], int]) -> None:
    lane, busy_s, ended = encoders._short, [], threading.Event()
    begun = threading.Event()
    future = lane.submit("a", 1, lambda: begun.wait(60) and work())
    assert future is not None
    future.add_done_callback(lambda _: (busy_s.append(lane.busy_s), ended.set()))
    begun.set()
    assert ended.wait(60)
    assert busy_s == [0.0]


def test_health_tells_of_encoding_that_is_stuck(
    start_server: Callable[..., Server], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server(engine)
    begun, go_on = threading.Event(), threading.Event()
    encoders = server.app.state.server.encoders
    thread = threading.Thread(target=lambda: asyncio.run(encoders.run("a", 1, lambda: begun.set() or go_on.wait(60))))
    thread.start()
    assert begun.wait(60)
    assert httpx.get(f"{server.url}/health").status_code == 200
    monkeypatch.setattr(encoding, "STUCK_S", 0)
    stuck = httpx.get(f"{server.url}/health")
    assert stuck.status_code == 503
    assert "encoding" in stuck.json()["error"]["message"]
    go_on.set()
    thread.join()
    assert httpx.get(f"{server.url}/health").status_code == 200


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_a_hostile_template_is_refused_at_the_start() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = LOOP
    with tiny_engine(tokenizer=tokenizer) as engine, pytest.raises(UnsupportedModelError, match=r"chat template.* 1 s"):
        create_app(engine, ServerSettings())


def test_a_template_that_loops_for_some_messages(start_server: Callable[..., Server]) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + tokenizer.chat_template
    with left_clean(tiny_engine(tokenizer=tokenizer)) as engine:
        url = start_server(engine).url
        for content, status in (("loop", 400), ("hello", 200)):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=90)
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "template_limit"

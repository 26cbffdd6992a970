"""Fixtures of the server's tests: a tiny engine with a chat template, and real servers on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import tiny
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ngramspec.engine.llm_engine import Engine
from ngramspec.server.app import create_app
from ngramspec.server.repositories import Repositories
from ngramspec.server.run import BACKLOG, configuration
from ngramspec.server.settings import ServerSettings

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """The byte tokenizer with ChatML's control tokens, 256 and 257, and its template."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")]}
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def fim_tokenizer() -> PreTrainedTokenizerFast:
    """That of chats with Qwen's control tokens to fill in the middle."""
    tokenizer = chat_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]}, False)
    return tokenizer


def tiny_engine(**settings: Any) -> Engine:
    """A random Llama of 1,024 positions that completes bytes and knows ChatML."""
    tokenizer = settings.pop("tokenizer", None) or chat_tokenizer()
    model = tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=1024)
    return Engine(model, tokenizer=tokenizer, **({"max_seqs": 8, "kv_memory": 64 << 20, "threads": 1} | settings))


@contextlib.contextmanager
def left_clean(engine: Engine) -> Iterator[Engine]:
    """Closes an engine at the end, when nothing may be left of any request."""
    with engine:
        yield engine
        status = engine.status()
        assert status.waiting == status.running == 0
        engine.runner.pool.check_integrity()


@dataclass
class Server:
    url: str
    app: FastAPI
    engine: Engine
    uvicorn: uvicorn.Server


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with left_clean(tiny_engine()) as engine:
        yield engine


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., Server]]:
    """`start_server(engine, settings, repositories) -> Server`, a real uvicorn in a thread; all are stopped at the end."""
    started: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(engine: Engine, settings: ServerSettings | None = None, repositories: Repositories | None = None) -> Server:
        settings = settings or ServerSettings(admin_on_loopback=True)
        app = create_app(engine, settings, repositories)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(configuration(app, settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            thread.join(0.01)
        assert server.started
        listener.listen(BACKLOG)  # as `serve.Server` does
        started.append((server, thread))
        return Server(f"http://127.0.0.1:{listener.getsockname()[1]}", app, engine, server)

    yield start
    for server, _ in started:
        server.should_exit = True
    for _, thread in started:
        thread.join(10)


@pytest.fixture(scope="session")
def make_server(start_server: Callable[..., Server], engine: Engine) -> Callable[..., Server]:
    """`make_server(settings=None, engine=None) -> Server`; without an engine, the session's."""

    def make(settings: ServerSettings | None = None, engine: Engine | None = None, *, default: Engine = engine) -> Server:
        return start_server(engine or default, settings)

    return make


@pytest.fixture(scope="session")
def server(make_server: Callable[..., Server]) -> Server:
    return make_server()


@pytest.fixture(scope="module")
def fim_engine() -> Iterator[Engine]:
    """One that also fills in the middle, for short texts."""
    with left_clean(tiny_engine(tokenizer=fim_tokenizer(), max_model_len=64, kv_memory=16 << 20)) as engine:
        yield engine


def routes_of(engine: Engine) -> TestClient:
    """Its server without a socket."""
    return TestClient(create_app(engine, ServerSettings()), base_url="http://localhost")


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client

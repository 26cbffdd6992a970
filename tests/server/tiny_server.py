"""What the server's tests are made with: tiny engines that know chats and fill-in-the-middle, and their servers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tiny
import uvicorn
from fair_time import wait_until
from fastapi import FastAPI
from starlette.testclient import TestClient
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ngramspec.engine.llm_engine import Engine
from ngramspec.server.app import create_app
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
        wait_until(lambda: engine.status().waiting == engine.status().running == 0, 2)  # for the server to notice that a client has left
        engine.runner.pool.check_integrity()


@dataclass
class Server:
    url: str
    app: FastAPI
    engine: Engine
    uvicorn: uvicorn.Server


def routes_of(engine: Engine, **settings: Any) -> TestClient:
    """Its server with these settings, without a socket."""
    return TestClient(create_app(engine, ServerSettings(**settings)), base_url="http://localhost")

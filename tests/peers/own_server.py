"""Start our server in this process for a peer's test, and stop it again."""

from __future__ import annotations

import functools
import threading
from typing import Any

import uvicorn

from ngramspec.engine.llm_engine import Engine
from ngramspec.models.smollm2 import smollm2_gguf
from ngramspec.server.app import create_app
from ngramspec.server.run import BACKLOG, listen_at_all, make_uvicorn_config
from ngramspec.server.settings import ServerSettings

engines: list[Engine] = []


@functools.cache
def make_engine(**options: Any) -> Engine:
    """Return the engine with these options, which servers use one after another: its start takes longer than most tests."""
    engine = Engine(str(smollm2_gguf()), threads=1, **options)
    engines.append(engine)
    return engine


def pytest_unconfigure(config: Any) -> None:
    """Close the engines, when pytest ends."""
    for engine in engines:
        engine.close()


@functools.cache
def find_template(engine: Engine) -> str:
    """Return the model's own chat template."""
    return engine.tokenizer.chat_template


class OwnServer:
    """A server of SmolLM2 in a thread; `options` are the engine's."""

    def __init__(self, settings: ServerSettings, **options: Any) -> None:
        self.engine = make_engine(**options)
        own_template = find_template(self.engine)
        self.engine.tokenizer.chat_template = settings.chat_template or own_template
        listeners = listen_at_all(settings.hosts, settings.port)
        self.server = uvicorn.Server(make_uvicorn_config(create_app(self.engine, settings), settings))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": listeners}, daemon=True)
        self.thread.start()
        while not self.server.started:
            self.thread.join(0.01)
        for each in listeners:
            each.listen(BACKLOG)
        self.address = listeners[0].getsockname()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)

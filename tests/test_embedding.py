"""The programs of docs/embedding.md: each runs on a tiny model and passes `mypy --strict`; the completer does what the page says of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from tokenizers import AddedToken

import ngramspec
from ngramspec import Engine

PAGE = Path(__file__).resolve().parent.parent / "docs" / "embedding.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
(COMPLETER,) = (program for program in PROGRAMS if "class Completer" in program)
CONTROL = ("<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(text, special=True, normalized=False) for text in CONTROL]})
    tokenizer.chat_template = CHATML
    model = tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=2048)
    with Engine(model, tokenizer=tokenizer, max_seqs=8, kv_memory=64 << 20, threads=1) as engine:
        yield engine


class Kept:
    """Stands for `Engine` in a program, which opens and closes a model of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __call__(self, model: str) -> Kept:
        assert model.endswith(".gguf")
        return self

    def __enter__(self) -> Engine:
        return self.engine

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_every_program_runs(engine: Engine, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(ngramspec, "Engine", Kept(engine))
    exec(compile(PROGRAMS[number], f"program {number}", "exec"), {"__name__": "program"})
    assert engine.complete("a", max_tokens=1).token_ids  # behind whatever a program has cancelled


def test_there_are_ten_programs_and_a_short_completer() -> None:
    assert len(PROGRAMS) >= 11
    assert len([line for line in COMPLETER.splitlines() if line.strip()]) <= 40


@pytest.fixture
def completer(engine: Engine) -> Any:
    names: dict[str, Any] = {"__name__": "program"}
    exec(COMPLETER, names)
    return names["Completer"](engine, pause_s=0.02)


def test_only_the_last_keystroke_is_answered(engine: Engine, completer: Any) -> None:
    async def type_quickly() -> list[str | None]:
        tasks = []
        for n in range(1, 6):
            tasks.append(asyncio.create_task(completer.suggest("import"[:n], "\n")))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    before = engine.status().passes
    *earlier, last = asyncio.run(type_quickly())
    assert earlier == [None] * 4
    assert last == engine.infill("impor", "\n", max_tokens=64, stop=["\n\n"]).text
    assert len(completer.cache) == 1
    assert engine.status().passes > before


def test_typing_what_is_suggested_asks_nothing(engine: Engine, completer: Any) -> None:
    async def type_on() -> None:
        text = await completer.suggest("def f(", "\n")
        passes = engine.status().passes
        for n in range(len(text)):
            assert await completer.suggest("def f(" + text[:n], "\n") == text[n:]
        assert engine.status().passes == passes
        assert completer.recall("def f(", "other") is None
        assert completer.recall("def g(", "\n") is None

    asyncio.run(type_on())


def test_a_keystroke_stops_what_the_engine_writes(engine: Engine, completer: Any) -> None:
    async def type_while_it_writes() -> None:
        first = asyncio.create_task(completer.suggest("x" * 900, "\n"))
        while not engine.status().running and not first.done():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(completer.suggest("y", "\n"))
        assert await first is None or len(completer.cache) == 2
        assert await second is not None

    asyncio.run(type_while_it_writes())
    assert engine.complete("a", max_tokens=1).token_ids
    assert engine.status().running == 0


def test_the_cache_is_bounded(completer: Any) -> None:
    completer.most_cached = 2

    async def ask() -> None:
        for prefix in ("a", "b", "c"):
            await completer.ask(prefix, "")

    asyncio.run(ask())
    assert [prefix for prefix, _ in completer.cache] == ["b", "c"]

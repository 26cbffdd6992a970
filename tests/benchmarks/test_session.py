from __future__ import annotations

import argparse
import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import editor, session
from benchmarks.editor import Editor, Ring, TypedFigures, find_accepted
from benchmarks.http_client import ServerAddress
from benchmarks.session import find_edits, find_new_functions

OLD = "def keep(text):\n    return text.strip()\n"
NEW_BODY = """\
    'Say it.'
    words = [word for word in text.split() if word != text]
    joined = "-".join(words)
    print(joined, len(words), text)
    return joined
"""


def test_functions_that_the_old_release_does_not_have(tmp_path: Path) -> None:
    for name, text in (("old", OLD), ("new", OLD + "\n\ndef say(text):\n" + NEW_BODY)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(text)
    (found,) = find_new_functions(tmp_path / "old", tmp_path / "new", 5)
    assert found.name == "a.py:say"
    assert found.before + found.body + found.after == OLD + "\n\ndef say(text):\n" + NEW_BODY
    assert found.body == NEW_BODY.partition("\n")[2]


def test_what_a_writer_takes_from_a_suggestion() -> None:
    assert find_accepted("a = 1\nb = 2", "a = 1\nb = 2\nc = 3") == len("a = 1\nb = 2")
    assert find_accepted("a = 1\nb = 3", "a = 1\nb = 2\nc = 3") == len("a = 1")
    assert find_accepted("a = ", "a = 1\nb = 2") == len("a =")
    assert find_accepted("a = 2", "a = 1\nb = 2") == 0
    assert find_accepted("  \n", "a = 1\nb = 2") == 0


def test_edits_are_of_files_of_50_to_500_lines(tmp_path: Path) -> None:
    text = "def say(self, words, other):\n    return words\n\n\ndef tell(words):\n    return words\n"
    (tmp_path / "short.py").write_text(text)
    (tmp_path / "long.py").write_text(text + "# more\n" * 60)
    (tmp_path / "wrong.py").write_text("def (:\n" * 60)
    assert find_edits(tmp_path, 5) == [(text + "# more\n" * 60, "words")]


def test_a_ring_keeps_the_latest_chunks_and_none_like_the_lines_at_the_cursor() -> None:
    ring = Ring(4, seed=0)
    texts = [[f"{name} = {i}" for i in range(40)] for name in "abcdef"]
    for text in texts:
        ring.pick("a.py", text, replaces=True)
        ring.pick("a.py", text, replaces=True)
        assert ring.update()
        assert not ring.update()
    assert [chunk["text"] for chunk in ring.get_extra()] == ["\n".join(text) + "\n" for text in texts[-4:]]
    assert [chunk["text"][0] for chunk in ring.get_extra(texts[4])] == ["c", "d", "f"]


def type_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(editor, "KEY_MEAN_S", 1e-3)
    monkeypatch.setattr(editor, "KEY_DEVIATION_S", 1e-4)


BODY = "total = 0\nfor each in numbers:\n"


@pytest.mark.parametrize("cancels", [False, True])
def test_a_suggestion_that_comes_at_once_is_taken(monkeypatch: pytest.MonkeyPatch, *, cancels: bool) -> None:
    type_quickly(monkeypatch)
    asked: list[tuple[str, int]] = []

    async def ask(written: str, limit_ms: int) -> str:
        asked.append((written, limit_ms))
        await asyncio.sleep(0)
        return BODY[len(written) :] if BODY.startswith(written) and written else "total = 0\nwhile numbers"

    figures = TypedFigures()
    asyncio.run(editor.type_text(Editor(ask, cancels), BODY, 0.05, random.Random(0), figures))
    # of the first suggestion one line is right, and it is shown until "f" is typed; no suggestion brings the last line end
    assert figures.accepted_chars == len(BODY) - figures.typed_chars > len("total = 0") + 9
    assert 2 <= figures.shown <= figures.asked
    if cancels:
        assert asked[:2] == [("", 0), ("total = 0\nf", 0)]
    else:  # what follows is asked for when a suggestion is shown
        assert asked[:2] == [("", 250), ("total = 0\nwhile numbers", 1000)]


def test_what_was_asked_for_some_keys_ago_is_shown_if_it_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    type_quickly(monkeypatch)
    figures, n_running = TypedFigures(), list[int]()

    async def ask(written: str, limit_ms: int) -> str:
        n_running.append(1)
        try:
            while figures.typed_chars < len(written) + 3:
                await asyncio.sleep(1e-4)
        finally:
            n_running.pop()
        assert not n_running, "one request at a time"
        return BODY[len(written) :]

    asyncio.run(editor.type_text(Editor(ask), BODY, 0.0, random.Random(0), figures))
    assert 3 <= figures.typed_chars < 10
    assert figures.accepted_chars == len(BODY) - figures.typed_chars
    assert 3 <= figures.asked < figures.keys < len(BODY)
    figures = TypedFigures()
    asyncio.run(editor.type_text(Editor(ask, cancels=True), BODY, 0.0, random.Random(0), figures))
    assert (figures.shown, figures.asked, figures.typed_chars, n_running) == (0, len(BODY), len(BODY), [])


def test_what_is_typed_has_not_been_asked_for_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that keeps its outputs would have the suggestions for it."""
    new = "\n\n".join(f"def say_{i}(text):\n    first = text + '{i}'\n" + "    print(first, text, len(text))\n" * 4 for i in range(4))
    for name, text in (("old", ""), ("new", new)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(text)
    found = session.find_new_functions(tmp_path / "old", tmp_path / "new", 4)
    asked: dict[str, list[int]] = {}  # by the text before the cursor, how many tokens each request wanted

    async def answer(_address: object, *rest: Any) -> tuple[int, bytes] | str:
        body, times = (rest[1], []) if isinstance(rest[0], str) else rest[:2]
        asked.setdefault(body["input_prefix"] + body["prompt"], []).append(body["n_predict"])
        times.append(0.0)
        return (200, b"{}") if isinstance(rest[0], str) else ""

    for name in ("complete", "fetch"):
        monkeypatch.setattr(session, name, answer)
    type_quickly(monkeypatch)
    args = argparse.Namespace(ring=0, requests=3, max_tokens=8, pauses=False, think=0.0, typed=5, edits=0, seed=0, new=tmp_path / "new")
    args.typed_tokens, args.cancel = 9, False
    server = session.ReplayedServer(ServerAddress(0), os.getpid())
    asyncio.run(session.replay({"on": server}, found[::2], found[1::2], args))
    assert (len(server.figures.first_ms), server.figures.typed.typed_chars, server.figures.typed.asked) == (2 * 3, 2 * 5, 2 * 5)
    assert all(wanted in ([8], [9], [0, 9]) for wanted in asked.values()), "only the prompt was computed before it is typed"
    assert sum(wanted == [0, 9] for wanted in asked.values()) == 2


def test_figures_of_a_known_session() -> None:
    server = session.ReplayedServer(ServerAddress(0), os.getpid())
    f = server.figures
    f.cold_ms, f.first_ms, f.last_ms = [3000.0, 1000.0], [float(i) for i in range(40)], [2.0 * i for i in range(40)]
    f.cold_tokens, f.first_tokens = [1000, 2000], [10, 20]
    f.typed = TypedFigures(20, 8, 2, 50, 10, 5.0)
    found = session.summarise(server)
    assert (found["cold_s"], found["first_ms"], found["last_ms"], found["prompt_tokens"]) == (2.0, [20, 38], [40, 76], [1500, 15])
    assert (found["shown"], found["visible"], found["cpu_s_per_accepted_char"]) == (0.25, 0.7, 0.1)
    assert "edit_s" not in found

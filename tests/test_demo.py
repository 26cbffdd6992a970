"""The demonstration, with an engine that plays texts back."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from ngramspec.outputs import Choice, Completion, Delta, Stats


class Engine:
    """Completes every prompt with the next of `texts`, without and with drafts."""

    texts = ("cut in a line", "whole\n", "cut again")
    name, threads, exactness, precision = "playback", 1, "bitwise", "int8"

    def __init__(self, model: str, **_: Any) -> None:
        self.tokenizer = tiny.byte_tokenizer()
        self.tokenizer.chat_template = "{{ messages[0].content }}"
        self._left = list(self.texts)
        self.done = self._done([], "")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None: ...

    def finish_compiling(self, progress: Callable[[str], None]) -> None: ...

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), np.int32)

    def stream(self, ids: list[int], params: Any, prefix_cache: bool) -> Iterator[Delta]:
        self.done = self._done(ids, self._left.pop(0))
        (choice,) = self.done.choices
        yield Delta(0, choice.text, choice.token_ids, choice.draft_sources, completion=self.done)

    def complete(self, ids: list[int], params: Any, speculation: bool, prefix_cache: bool = True) -> Completion:
        return self._done(ids, self.done.choices[0].text)

    def _done(self, ids: list[int], text: str) -> Completion:
        tokens = list(text.encode())
        stats = Stats(len(tokens), len(tokens), 0, 0, {}, {})
        return Completion(ids, [Choice(0, text, tokens, "length", None, [None] * len(tokens), stats)], 7, "bitwise", 0.1, 2.0)


@pytest.mark.parametrize("terminal", [False, True])
def test_every_task_begins_on_a_line_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    monkeypatch.setitem(sys.modules, "ngramspec.engine.llm_engine", SimpleNamespace(Engine=Engine))
    monkeypatch.delitem(sys.modules, "tools.demo", raising=False)
    demo = importlib.import_module("tools.demo")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")
    with pytest.raises(SystemExit, match="0"):
        demo.main(["--help"])
    assert demo.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    rules = [line for line in lines if line.endswith("──")]
    assert len(rules) == 3
    assert not any("cut" in line for line in rules)
    assert {"cut in a line", "whole", "cut again"} <= set(lines)
    if not terminal:
        assert lines[lines.index("whole") + 1] in rules, "no line is added where one has ended"

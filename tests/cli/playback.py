"""An engine that plays back a fixed text, and the command run in this process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tiny

from ngramspec.cli import main as cli
from ngramspec.errors import UnsupportedModelError
from ngramspec.outputs import Choice, Completion, Delta, Stats
from ngramspec.sampling_params import SamplingParams

TEXT = "return 日本 x\n"


class PlaybackEngine:
    """Writes TEXT for every choice, two byte tokens per step, every other token drafted."""

    made: dict[str, Any]
    fail: Exception | None = None
    interrupt_after: int | None = None
    source: str = "ngram"
    loading: str = "loading"
    has_template: bool = False

    def __init__(self, model: str, **settings: Any) -> None:
        if self.fail is not None:
            raise self.fail
        settings.pop("progress")(self.loading)
        type(self).made = {"model": model, **settings}
        self.tokenizer = tiny.byte_tokenizer()

    def __enter__(self) -> PlaybackEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None: ...

    def finish_compiling(self, progress: Callable[[str], None]) -> None:
        pass

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), np.int32)

    def make_infill_prompt(self, prefix: str, suffix: str, params: SamplingParams) -> tuple[list[int], SamplingParams]:
        if "|" in suffix:
            raise UnsupportedModelError("this model has no fill-in-the-middle tokens")
        return self.encode(f"{prefix}<{suffix}>").tolist(), params

    def make_chat_prompt(self, messages: list[dict[str, str]], params: SamplingParams) -> tuple[list[int], SamplingParams]:
        if not self.has_template:
            raise UnsupportedModelError("this model has no chat template")
        ((role, text),) = [(message["role"], message["content"]) for message in messages]
        return self.encode(f"[{role}]{text}").tolist(), params

    def submit(self, prompt: list[int], params: SamplingParams, *, deliver: Callable[[Delta], None]) -> PlaybackRequest:
        type(self).made |= {"prompt": bytes(prompt).decode(), "params": params}
        request = PlaybackRequest(prompt, params, self.source)
        for i, delta in enumerate(request.deltas()):
            if i == self.interrupt_after:
                threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
                break
            deliver(delta)
        return request


class PlaybackRequest:
    seed: int = 7

    def __init__(self, prompt: list[int], params: SamplingParams, source: str) -> None:
        tokens = list(TEXT.encode())
        sources = [None if i % 2 else source for i in range(len(tokens))]
        stats = Stats(len(tokens) // 2, len(tokens), 20, len(tokens) // 2, {source: 20}, {source: len(tokens) // 2})
        choices = [Choice(i, TEXT, tokens, "stop", None, sources, stats) for i in range(params.n)]
        self.done = Completion(prompt, choices, self.seed, "bitwise", 0.1, 2.0)

    def deltas(self) -> Iterator[Delta]:
        for choice in self.done.choices:
            for i in range(0, len(choice.token_ids), 2):
                last = i + 2 >= len(choice.token_ids)
                ends = self.done if last and choice is self.done.choices[-1] else None
                yield Delta(
                    choice.index, TEXT if last else "", choice.token_ids[i : i + 2], choice.draft_sources[i : i + 2], completion=ends
                )

    def cancel(self) -> None:
        self.done.choices[0].finish_reason = "cancelled"

    def result(self, timeout: float | None = None) -> Completion:
        return self.done


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `ngramspec` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["ngramspec", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code

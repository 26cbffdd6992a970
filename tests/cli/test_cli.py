"""The command, with an engine that plays back a fixed text: what is printed where, and with which exit code."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny

from ngramspec import ModelNotFoundError, OutOfMemoryError, __version__
from ngramspec.batch.params import SamplingParams
from ngramspec.batch.types import Choice, Completion, Delta, Stats
from ngramspec.cli import main as cli

TEXT = "return 日本 x\n"


class PlaybackEngine:
    """Writes TEXT for every choice, two byte tokens per step, every other token drafted."""

    made: dict[str, Any]
    fail: Exception | None = None
    interrupt_after: int | None = None

    def __init__(self, model: str, **settings: Any) -> None:
        if self.fail is not None:
            raise self.fail
        settings.pop("progress")("loading")
        type(self).made = {"model": model, **settings}
        self.tokenizer = tiny.byte_tokenizer()

    def __enter__(self) -> PlaybackEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text), np.int32)

    def submit(self, prompt: list[int], params: SamplingParams, *, deliver: Callable[[Delta], None]) -> PlaybackRequest:
        type(self).made |= {"prompt": bytes(prompt).decode(), "params": params}
        request = PlaybackRequest(prompt, params)
        for i, delta in enumerate(request.deltas()):
            if i == self.interrupt_after:
                threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
                break
            deliver(delta)
        return request


class PlaybackRequest:
    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        tokens = list(TEXT.encode())
        sources = [None if i % 2 else "ngram" for i in range(len(tokens))]
        stats = Stats(len(tokens) // 2, len(tokens), 20, len(tokens) // 2, {"ngram": 20}, {"ngram": len(tokens) // 2})
        choices = [Choice(i, TEXT, tokens, "stop", None, sources, stats) for i in range(params.n)]
        self.done = Completion(prompt, choices, 7, "bitwise", 0.1, 2.0)

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


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PlaybackEngine]]:
    fresh = type("Fresh", (PlaybackEngine,), {"made": {}})
    monkeypatch.setitem(sys.modules, "ngramspec.engine", SimpleNamespace(Engine=fresh))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    return fresh


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ngramspec", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code


@pytest.mark.parametrize("drafts", [[], ["--show-drafts"]])
def test_standard_output_is_the_text(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drafts: list[str]
) -> None:
    assert run(monkeypatch, "complete", "def f():", *drafts) == 0
    printed = capsys.readouterr()
    assert printed.out == TEXT
    for figure in ("16 ", "8.0 tok/s", "2.00 tokens per pass", "8 accepted, 40%", "ngram", "bitwise", "7"):
        assert figure in printed.err
    assert engine.made["prompt"] == "def f():"
    assert engine.made["model"] == "smollm2"
    assert engine.made["speculation"] is True


def test_drafts_are_coloured_in_a_terminal(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert run(monkeypatch, "complete", "x", "--show-drafts") == 0
    out = capsys.readouterr().out
    assert "\x1b[32mr\x1b[0me\x1b[32mt\x1b[0mu" in out
    assert out.endswith("\x1b[32mx\x1b[0m\n\n")


def test_options_reach_the_engine_and_the_request(engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    options = "--model M --no-spec --max-tokens 9 --min-tokens 2 --temperature 0.5 --top-k 5 --top-p 0.9 --min-p 0.1 --seed 3 --n 2"
    options += " --stop a --stop b --repetition-penalty 1.1 --presence-penalty 0.2 --frequency-penalty 0.3 --ignore-eos --logprobs 2"
    options += " --spec-length 4 --spec-rows 8 --max-order 5 --history 99 --threads 1 --device cpu --dtype bfloat16 --max-model-len 77"
    assert run(monkeypatch, "complete", "x", *options.split()) == 0
    assert engine.made["params"] == SamplingParams(
        9, 2, 0.5, 5, 0.9, 0.1, 1.1, 0.2, 0.3, seed=3, n=2, stop=("a", "b"), ignore_eos=True, logprobs=2
    )
    wanted = {"model": "M", "speculation": False, "spec_length": 4, "spec_rows": 8, "max_order": 5, "history": 99, "threads": 1}
    wanted |= {"device": "cpu", "dtype": "bfloat16", "max_model_len": 77}
    assert wanted.items() <= engine.made.items()


def test_json_is_one_document_with_all_figures(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "complete", "x", "--json", "--n", "2") == 0
    document = json.loads(capsys.readouterr().out)
    assert [choice["text"] for choice in document["choices"]] == [TEXT, TEXT]
    assert document["stats"]["tokens"] == 32
    assert document["stats"]["acceptance_rate"] == 0.4
    assert document["choices"][0]["stats"]["tokens_per_pass"] == 2.0
    assert (document["seed"], document["exactness"], document["tok_s"]) == (7, "bitwise", 16.0)


def test_several_choices_follow_each_other(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "complete", "x", "--n", "2", "-q") == 0
    printed = capsys.readouterr()
    assert printed.out == f"── 1 of 2\n{TEXT}\n── 2 of 2\n{TEXT}\n"
    assert printed.err == ""


@pytest.mark.parametrize("drafts", [[], ["--show-drafts"]])
def test_an_interrupt_prints_what_there_is(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drafts: list[str]
) -> None:
    engine.interrupt_after = 3
    assert run(monkeypatch, "complete", "x", *drafts) == 130
    printed = capsys.readouterr()
    assert printed.out == TEXT
    assert "cancelled" in printed.err


@pytest.mark.parametrize(("source", "arguments"), [("pipe", []), ("pipe", ["-"]), ("file", [])])
def test_the_prompt_may_come_from_a_pipe_or_file(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, source: str, arguments: list[str]
) -> None:
    if source == "file":
        (tmp_path / "prompt").write_bytes("a\r\né".encode())
        arguments = ["--file", str(tmp_path / "prompt")]
    else:
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, buffer=io.BytesIO("a\r\né".encode())))
    assert run(monkeypatch, "complete", *arguments) == 0
    assert engine.made["prompt"] == "a\r\né"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["x", "--temperature", "-1"], "temperature must be 0, or a number in [1e-06, 100], got -1.0"),
        (["x", "--max-tokens", "0"], "max_tokens"),
        (["x", "--spec-length", "0"], "--spec-length"),
        (["x", "--file", "y"], "not both"),
        (["--file", "no/such/file"], "no/such/file"),
        ([], "there is no prompt"),
        ([""], "empty"),
        (["x", "--chat"], "no chat template"),
        (["x", "--unknown"], "--unknown"),
        (["x", "--seed", "one"], "--seed"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert run(monkeypatch, "complete", *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    message = [line for line in printed.err.splitlines() if line != "ngramspec: loading"]
    assert len(message) == 1
    assert told in message[0]


@pytest.mark.parametrize(
    ("error", "code"), [(ModelNotFoundError("no model"), 2), (ValueError("dtype must be"), 2), (OutOfMemoryError("9 GiB"), 1)]
)
def test_errors_of_the_engine(
    engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    engine.fail = error
    assert run(monkeypatch, "complete", "x", "-q") == code
    assert capsys.readouterr().err == f"ngramspec: {error}\n"


def test_a_defect_shows_its_traceback(engine: type[PlaybackEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine.fail = ZeroDivisionError()
    monkeypatch.setattr(sys, "argv", ["ngramspec", "complete", "x"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_version_and_help_are_quick() -> None:
    command = [sys.executable, "-m", "ngramspec"]
    assert subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout == f"ngramspec {__version__}\n"
    started = time.perf_counter()
    told = subprocess.run([*command, "complete", "--help"], capture_output=True, text=True, check=True).stdout
    assert time.perf_counter() - started < 5, "help must not import torch"
    assert "--show-drafts" in told


def test_importing_ngramspec_imports_nothing_heavy() -> None:
    code = "import sys, ngramspec, ngramspec.cli; print([m for m in ('torch', 'transformers', 'numba', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_beams(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tiny.tiny_model("llama").save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    search = ["beam", "abcabcab", "-m", str(tmp_path), "--width", "2", "--max-tokens", "5", "--threads", "1", "-q"]
    documents = []
    for more in ([], ["--no-spec"]):
        assert run(monkeypatch, *search, *more, "--json") == 0
        documents.append(json.loads(capsys.readouterr().out))
    with_drafts, without = documents
    assert with_drafts["beams"] == without["beams"]
    assert [beam["score"] for beam in without["beams"]] == sorted((beam["score"] for beam in without["beams"]), reverse=True)
    assert run(monkeypatch, *search) == 0
    assert capsys.readouterr().out.count("── ") == 2
    assert run(monkeypatch, *search, "--width", "0") == 2
    assert "width" in capsys.readouterr().err

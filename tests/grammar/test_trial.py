"""Grammars that compile for ever are refused in their time, and neither they nor what compiles them hinders others."""

from __future__ import annotations

import os
import signal
import string
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ngramspec.errors import GrammarError
from ngramspec.grammar import compiling, trial
from ngramspec.grammar.base import Grammar
from ngramspec.grammar.trial import Trials

GOOD = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
SPECIAL = {256: "<|call|>", 319: "<|end|>"}
NO_WAIT_S = 1.5
"""For a process to start and to compile something small, on a busy machine."""


def chained(letters: str) -> Grammar:
    """Each letter must be in the text."""
    definitions: dict[str, Any] = {
        c: {"$ref": f"#/$defs/{d}", "pattern": f".*{c}.*"} for c, d in zip(letters, letters[1:] + "_", strict=True)
    }
    return Grammar.json_schema({"$defs": definitions | {"_": {"type": "string"}}, "$ref": f"#/$defs/{letters[0]}"})


ENDLESS = [
    chained(string.ascii_lowercase[:25]),
    Grammar.json_schema({"type": "integer", "multipleOf": 65_537_000}),
    Grammar.json_schema({"anyOf": [{"type": "integer", "multipleOf": 65_537 + 2 * i} for i in range(100)]}),
    Grammar.json_schema({"patternProperties": {f"^x{i}y": {"type": "integer", "minimum": i} for i in range(300)}, "properties": {"q": {}}}),
]


def processes() -> dict[int, float]:
    """Of this one: seconds of computing of each process that it has started and that has not ended."""
    found = {}
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


@pytest.fixture
def others() -> set[int]:
    """Processes that other tests have left."""
    return set(processes())


@pytest.fixture
def trials(others: set[int]) -> Iterator[Trials]:
    trials = Trials(lambda: (320, SPECIAL, [319]))
    yield trials
    trials.close()
    assert set(processes()) <= others


def refusal(trials: Trials, grammar: Grammar) -> str:
    with pytest.raises(GrammarError) as caught:
        trials.sources(grammar)
    return str(caught.value)


def test_what_compiles_is_handed_back(trials: Trials, others: set[int]) -> None:
    assert trials.sources(GOOD) == compiling.sources(GOOD)
    for text in ("start: <|call|> /a+/", "start: <[300]> <[*]>", 'start: "é\\n"'):
        assert trials.sources(Grammar.lark(text)) == compiling.sources(Grammar.lark(text))
    for grammar, reason in [(Grammar.lark("start: <|no|>"), "unknown special token"), (Grammar.regex("(("), "invalid regex")]:
        assert reason in refusal(trials, grammar)
    assert len(processes().keys() - others) == 1


def test_the_endless_are_ended_and_others_compile_at_once(trials: Trials) -> None:
    trials.sources(GOOD)
    for grammar in ENDLESS:
        start = time.monotonic()
        assert "more than 2 s" in refusal(trials, grammar)
        assert time.monotonic() - start < trial.TIMEOUT_S + 1
        start = time.monotonic()
        trials.sources(GOOD)
        assert time.monotonic() - start < NO_WAIT_S
    before = processes()
    time.sleep(0.5)
    after = processes()
    assert after.keys() <= before.keys()
    assert all(after[pid] - before[pid] < 0.1 for pid in after)


def test_who_waits_gets_a_place_when_others_have_had_their_share(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TIMEOUT_S", 600.0)
    monkeypatch.setattr(trial, "SHARE_S", 0.2)
    told: list[str] = []
    threads = [threading.Thread(target=lambda g=grammar: told.append(refusal(trials, g))) for grammar in ENDLESS]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    start = time.monotonic()
    trials.sources(GOOD)
    assert time.monotonic() - start < len(threads) * NO_WAIT_S
    while any(thread.is_alive() for thread in threads):  # no one else waits for the last ones
        trials.sources(GOOD)
        threads = [thread for thread in threads if thread.is_alive()]
        others = [threading.Thread(target=trials.sources, args=[GOOD]) for _ in range(trial.AT_ONCE)]
        for thread in others:
            thread.start()
        for thread in others:
            thread.join()
    assert len(told) == len(ENDLESS)
    assert all("more than 0.2 s" in each for each in told)


def test_a_process_that_dies_is_replaced(trials: Trials, others: set[int]) -> None:
    trials.sources(GOOD)
    (pid,) = processes().keys() - others
    os.kill(pid, signal.SIGKILL)
    while pid in processes():
        time.sleep(0.01)
    trials.sources(GOOD)
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(refusal(trials, ENDLESS[0])))
    thread.start()
    (pid,) = processes().keys() - others
    while processes()[pid] < 0.3:  # it compiles
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert "ends the compiler" in told[0]
    trials.sources(GOOD)


def test_with_nobody_to_end_it_it_ends_by_itself() -> None:
    process = trial._Process({"size": 320, "special": [], "ends": [319], "seconds": 0.5})
    process.wait()
    with pytest.raises(GrammarError, match="ends the compiler"):
        process.ask({"kind": ENDLESS[0].kind, "text": ENDLESS[0].text})
    process.close()

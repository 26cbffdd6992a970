"""Grammars that compile for ever are refused after the time limit, and delay no other grammar for long."""

from __future__ import annotations

import contextlib
import os
import signal
import string
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fair_time import assert_within, count_seconds

from ngramspec.child_process import ChildEndedError, ChildProcess
from ngramspec.errors import GrammarError
from ngramspec.grammar import compiler_pool, compiling
from ngramspec.grammar.compiler_pool import GrammarCompilerPool
from ngramspec.grammar.constraint import Grammar

GOOD = Grammar.json_schema({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
SPECIAL = {256: "<|call|>", 319: "<|end|>"}
NO_WAIT_S = 1.5  # for a process to start and to compile something small


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
    found, started = dict[int, float](), list[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            started += map(int, path.read_text().split())
    for pid in started:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                found[pid] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


@pytest.fixture
def others() -> set[int]:
    """Processes that other tests have left."""
    return set(processes())


@pytest.fixture
def pool(others: set[int]) -> Iterator[GrammarCompilerPool]:
    pool = GrammarCompilerPool(lambda: (320, SPECIAL, [319]))
    yield pool
    pool.close()
    assert set(processes()) <= others


def refusal(pool: GrammarCompilerPool, grammar: Grammar) -> str:
    with pytest.raises(GrammarError) as caught:
        pool.translate(grammar)
    return str(caught.value)


def test_what_compiles_is_handed_back(pool: GrammarCompilerPool, others: set[int]) -> None:
    assert pool.translate(GOOD) == compiling.translate_grammar(GOOD)
    for text in ("start: <|call|> /a+/", "start: <[300]> <[*]>", 'start: "é\\n"'):
        assert pool.translate(Grammar.lark(text)) == compiling.translate_grammar(Grammar.lark(text))
    for grammar, reason in [(Grammar.lark("start: <|no|>"), "unknown special token"), (Grammar.regex("(("), "invalid regex")]:
        assert reason in refusal(pool, grammar)
    assert len(processes().keys() - others) == 1


def test_the_endless_are_ended_and_others_compile_at_once(pool: GrammarCompilerPool, others: set[int]) -> None:
    told: list[str] = []
    pool.translate(GOOD)
    for grammar in ENDLESS:
        before = processes().keys() - others
        refuse = partial(assert_within, compiler_pool.TIMEOUT_S + 1, lambda each=grammar: told.append(refusal(pool, each)))
        assert_within(NO_WAIT_S, lambda: pool.translate(GOOD), first=refuse)
        assert not before & processes().keys(), "the one that compiled it is gone"
    assert all("more than 2 s" in each for each in told)


def test_who_waits_gets_a_place_when_others_have_had_their_share(others: set[int]) -> None:
    pool = GrammarCompilerPool(lambda: (320, SPECIAL, [319]), timeout_s=600.0, share_s=0.2)
    told: list[str] = []
    threads = [threading.Thread(target=lambda g=grammar: told.append(refusal(pool, g))) for grammar in ENDLESS]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(processes().keys() - others) >= compiler_pool.N_PROCESSES)
    with count_seconds() as seconds:
        pool.translate(GOOD)
        assert seconds() < len(threads) * NO_WAIT_S
    while any(thread.is_alive() for thread in threads):  # no one else waits for the last ones
        pool.translate(GOOD)
        threads = [thread for thread in threads if thread.is_alive()]
        waiting = [threading.Thread(target=pool.translate, args=[GOOD]) for _ in range(compiler_pool.N_PROCESSES)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
    pool.close()
    assert len(told) == len(ENDLESS)
    assert all("more than 0.2 s" in each for each in told)


def test_a_process_that_dies_is_replaced(pool: GrammarCompilerPool, others: set[int]) -> None:
    pool.translate(GOOD)
    (pid,) = processes().keys() - others
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: pid not in processes())
    pool.translate(GOOD)
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(refusal(pool, ENDLESS[0])))
    thread.start()
    (pid,) = processes().keys() - others
    before = processes()[pid]
    wait_for(lambda: processes()[pid] > before + 0.1)  # it compiles
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert "ends the compiler" in told[0]
    pool.translate(GOOD)


def test_a_child_that_nobody_stops_ends_by_itself() -> None:
    setup = {"size": 320, "special": [], "ends": [319], "alarm_s": 0.5}
    child = ChildProcess("ngramspec.grammar.compiler_pool", ("ngramspec", "llguidance"), setup)
    child.wait_until_ready()
    with pytest.raises(ChildEndedError) as ended:
        child.ask({"kind": ENDLESS[0].kind, "text": ENDLESS[0].text}, 60)
    assert ended.value.limit_s is None
    assert child.close() == -signal.SIGALRM

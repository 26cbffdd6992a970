"""Grammars are tried in a process of their own: compiling that takes too long cannot be ended otherwise.

A `Grammar` enters, its form for llguidance leaves, of which is known that it compiles soon. Knows what tokens are called, no tokenizer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ngramspec.errors import GrammarError
from ngramspec.grammar.base import Grammar

TIMEOUT_S, SHARE_S, AT_ONCE = 2.0, 0.5, 2
"""How long a grammar may take, and how long while others wait; how many are tried at a time."""
_SERVE = "import sys; sys.path += sys.argv[1:]; from ngramspec.grammar.compiling import serve; serve()"


class Trials:
    """The processes: started when one is wanted, and kept. From any thread."""

    def __init__(self, vocabulary: Callable[[], tuple[int, dict[int, str], Sequence[int]]]) -> None:
        """`vocabulary`: how many ids there are, the control tokens' names, and those that end a text; asked for at the first grammar."""
        self._vocabulary, self._first = vocabulary, dict[str, Any]()
        self._idle: list[_Process] = []
        self._busy: dict[_Process, float] = {}
        """Since when each is at it; none that is still starting."""
        self._changed = threading.Condition()

    def warm(self) -> None:
        """Have a process that waits for work, or will soon. Raises GrammarError."""
        with self._changed:
            if not self._idle:
                self._idle.append(self._start())

    def sources(self, grammar: Grammar) -> tuple[str, str | None]:
        """What `compiling.sources` says, of a grammar that compiles in TIMEOUT_S. Raises GrammarError."""
        process = self._take()
        try:
            process.wait()
            with self._changed:
                self._busy[process] = time.monotonic()
                self._changed.notify_all()
            timer = threading.Timer(TIMEOUT_S, process.end, [TIMEOUT_S])
            timer.start()
            try:
                answer = process.ask(asdict(grammar))
            finally:
                timer.cancel()
        finally:
            self._give_back(process)
        if "error" in answer:
            raise GrammarError(answer["error"])
        source, plain = answer["sources"]
        return source, plain

    def _start(self) -> _Process:
        if not self._first:
            size, special, ends = self._vocabulary()
            self._first = {"size": size, "special": [*special.items()], "ends": [*ends] or [size - 1], "seconds": 2 * TIMEOUT_S}
        return _Process(self._first)

    def _take(self) -> _Process:
        """A process; who waits for one has that one ended which has had more than its share."""
        with self._changed:
            while len(self._busy) >= AT_ONCE:
                oldest, since = min(self._busy.items(), key=lambda each: each[1])
                left = since + SHARE_S - time.monotonic()
                if left <= 0:
                    oldest.end(SHARE_S)
                    del self._busy[oldest]
                else:
                    self._changed.wait(None if left == math.inf else left)
            self._idle = [each for each in self._idle if each.alive]
            process = self._idle.pop() if self._idle else self._start()
            self._busy[process] = math.inf
            return process

    def _give_back(self, process: _Process) -> None:
        with self._changed:
            self._busy.pop(process, None)
            if process.alive and len(self._idle) < AT_ONCE:
                self._idle.append(process)
            else:
                process.close()
                self.warm()  # the next one needs not wait until it has started
            self._changed.notify_all()

    def close(self) -> None:
        """End those that wait for work. Any number of times."""
        with self._changed:
            while self._idle:
                self._idle.pop().close()


class _Process:
    def __init__(self, first: dict[str, Any]) -> None:
        specs = [importlib.util.find_spec(name) for name in ("ngramspec", "llguidance")]
        folders = [str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin is not None]
        try:  # in isolation, as nothing of a user's is to be run, and an interrupt from the keyboard is not for it
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SERVE, *folders],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise GrammarError(f"grammar: no process for compiling it can be started: {error}") from None
        self._seconds, self._ready, self._over = math.inf, False, False
        self._send(first)

    def wait(self) -> None:
        """Until it is ready. Raises GrammarError."""
        if not self._ready:
            self._answer()
            self._ready = True

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Its answer. Raises GrammarError where it ends instead."""
        self._send(question)
        return self._answer()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, as the answer will tell
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        self._over = True
        if self._seconds < math.inf:
            raise GrammarError(f"grammar: compiling it takes more than {self._seconds:g} s; a smaller one may do")
        raise GrammarError("grammar: compiling it ends the compiler; a smaller one may do")

    @property
    def alive(self) -> bool:
        return not self._over and self._process.poll() is None

    def end(self, seconds: float) -> None:
        """It takes more than this."""
        self._seconds, self._over = seconds, True
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

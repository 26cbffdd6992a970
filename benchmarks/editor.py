"""What an editor with llama.vim does: the requests that it sends, the parts of files that it sends along, and when it shows what."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.http_client import Connection, ServerAddress

PREFIX_LINES, SUFFIX_LINES = 256, 64  # llama.vim's n_prefix and n_suffix
CHUNK_LINES = 64  # llama.vim's ring_chunk_size, of which half is taken
SAME, NEAR = 0.9, 0.5  # similarity from which on chunks count as one, and a chunk repeats what stands around the cursor
KEY_MEAN_S, KEY_DEVIATION_S = 0.239, 0.112  # of the times between keys, which are log-normal: Dhakal et al., CHI 2018
FIRST_MS, NEXT_MS = 250, 1000  # llama.vim's t_max_predict_ms of what is to be shown, and of what would follow if that is accepted
LOOK_BACK = 128  # characters that may have been typed of a suggestion that is still shown


@dataclass(frozen=True, slots=True)
class NewFunction:
    """A function that is to be written into its file."""

    name: str
    before: str
    body: str
    after: str

    @property
    def path(self) -> str:
        return self.name.partition(":")[0]

    def get_lines_around(self, n: int) -> list[str]:
        """Return the function's last lines and those after it, up to n of each."""
        return (self.before + self.body).split("\n")[-n:] + self.after.split("\n")[:n]


class Ring:
    """Parts of files that an editor has shown, the latest last, as llama.vim collects them."""

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._rng = size, random.Random(seed)
        self._chunks: list[tuple[str, list[str]]] = []
        self._queued: list[tuple[str, list[str]]] = []

    def _cut(self, lines: list[str]) -> list[str]:
        """Return a part of as many lines as a chunk has, at random."""
        first = self._rng.randint(0, max(0, len(lines) - CHUNK_LINES // 2))
        return lines[first : first + CHUNK_LINES // 2] if len(lines) + 1 >= CHUNK_LINES else lines

    def pick(self, path: str, lines: list[str], replaces: bool) -> None:
        """Queue a part of these lines, unless there is one like it; `replaces`: instead of those like it."""
        chunk = self._cut(lines)
        if self._size == 0 or len(lines) < 3:
            return
        for chunks in (self._queued, self._chunks):
            alike = [i for i, (_, other) in enumerate(chunks) if chunk == other or (i and measure_similarity(chunk, other) > SAME)]
            if alike and not (replaces and all(chunks[i][1] != chunk for i in alike)):
                return
            for i in reversed(alike):
                del chunks[i]
        self._queued = [*self._queued[-15:], (path, chunk)]

    def fill(self, functions: list[NewFunction]) -> None:
        """Take chunks from around functions that were visited before the session, until there are as many as it keeps."""
        for function in functions:
            self.pick_around(function)
            while len(self._chunks) < self._size and self.update():
                pass

    def pick_around(self, function: NewFunction) -> None:
        """Pick what stands around a function that has been written and saved."""
        for _ in range(2):
            self.pick(function.path, function.get_lines_around(CHUNK_LINES // 2), replaces=True)

    def update(self) -> bool:
        """Take one of the queued chunks; return whether there was one."""
        if self._queued:
            self._chunks = [*self._chunks[-self._size + 1 :], self._queued.pop(0)]
            return True
        return False

    def get_extra(self, around: list[str] | None = None) -> list[dict[str, str]]:
        """Return the chunks as a request has them, after those were removed that are like the lines around the cursor."""
        if around is not None:
            near = self._cut(around)
            self._chunks = [each for i, each in enumerate(self._chunks) if not i or measure_similarity(each[1], near) <= NEAR]
        return [{"text": "\n".join(lines) + "\n", "filename": path} for path, lines in self._chunks]


def measure_similarity(a: list[str], b: list[str]) -> float:
    """Return the share of lines that two chunks have in common."""
    return 2 * sum(line in b for line in a) / (len(a) + len(b))


def make_body(function: NewFunction, written: str, ring: Ring, max_tokens: int, limit_ms: int = 0, *, cuts: bool = False) -> dict[str, Any]:
    """Return llama.vim's request with the cursor after what is `written` of the function's body.

    `limit_ms`: milliseconds after which the text ends with its line; 0: none. `cuts`: a line with less indentation ends it.
    """
    lines = (function.before + written).split("\n")
    after = function.after.split("\n")
    return {
        "input_prefix": "".join(line + "\n" for line in lines[-PREFIX_LINES - 1 : -1]),
        "prompt": lines[-1],
        "input_suffix": "\n" + "".join(line + "\n" for line in after[:SUFFIX_LINES]),
        "input_extra": ring.get_extra(lines[-CHUNK_LINES // 2 :] + after[: CHUNK_LINES // 2]),
        "id_slot": 0,
        "n_predict": max_tokens,
        "n_indent": len(lines[-1]) - len(lines[-1].lstrip()) if cuts else 0,
        "t_max_predict_ms": limit_ms,
        "temperature": 0.0,
        "cache_prompt": True,
        "stream": True,
    }


async def complete(address: ServerAddress, body: dict[str, Any], times: list[float], computed: list[int] | None = None) -> str:
    """Return a suggestion; `times` gets the seconds at which each of its pieces came, `computed` the number of the prompt's tokens that
    were not taken from a cache. Raises OSError for a refusal.
    """
    sent, text = time.perf_counter(), ""
    async with contextlib.aclosing(await Connection.open(address)) as connection:
        connection.send("/infill", body)
        status, _ = await connection.read_head()
        if status != 200:
            raise OSError(f"/infill answered {status}")
        async for data in connection.read_events():
            event = json.loads(data)
            text += event.get("content", "")
            times.append(time.perf_counter() - sent)
            if event.get("stop"):
                if computed is not None:
                    computed.append(event["timings"]["prompt_n"])
                break
    return text


def find_accepted(suggestion: str, coming: str) -> int:
    """Return how many characters of `coming` a writer takes from a suggestion: all of it or its first line, if that is what comes."""
    whole = suggestion.rstrip()
    line = whole.split("\n")[0]
    for text in (whole, line):
        rest = coming[len(text) :]
        if text.strip() and coming.startswith(text) and (not rest or rest[0] == "\n" or text is whole):
            return len(text)
    return 0


@dataclass(slots=True)
class TypedFigures:
    """What a server did for somebody who types."""

    keys: int = 0
    """Keys that were pressed, those that accept a suggestion among them."""
    asked: int = 0
    """Keys after which no suggestion was to be seen at first."""
    shown: int = 0
    """How often one came before the next key."""
    accepted_chars: int = 0
    typed_chars: int = 0
    cpu_s: float = 0.0
    """Processor time of the server."""


@dataclass(slots=True)
class Editor:
    """An editor in which a function is being written. One request is under way at a time, as in llama.vim."""

    ask: Callable[[str, int], Awaitable[str]]
    """Returns the suggestion after a written part of the body, with a limit in milliseconds."""
    cancels: bool = False
    """A key ends the request under way, and requests have no limit."""
    known: dict[str, str] = field(default_factory=dict)
    """Suggestions by what was written before them."""
    _asked_for: str = ""
    _task: asyncio.Task[str] | None = None

    def find_shown(self, written: str) -> str:
        """Return the rest of a suggestion with which what was typed since agrees, the longest; nothing if there is none."""
        self._take_answer()
        rests = [""]
        for n in range(min(LOOK_BACK, len(written)) + 1):
            at = len(written) - n
            suggestion = self.known.get(written[:at], "")
            if suggestion.startswith(written[at:]):
                rests.append(suggestion[n:])
        return max(rests, key=len)

    async def show(self, written: str, until: float) -> str:
        """Return the suggestion that is to be seen first before `until`, a time of `time.perf_counter`; nothing if none is."""
        while not (shown := self.find_shown(written)) and await self._wait(written, FIRST_MS, until):
            pass
        return shown

    async def look_ahead(self, written: str, until: float) -> None:
        """Ask until then for what would follow if what is shown, with which `written` ends, were accepted."""
        if not self.cancels:
            await self._wait(written, NEXT_MS, until)

    async def _wait(self, written: str, limit_ms: int, until: float) -> bool:
        """Have an answer after `written` asked for once no other is waited for. Return whether one came, which may be the other."""
        if self._task is None:
            if written in self.known:
                return False
            self._asked_for = written
            self._task = asyncio.ensure_future(self.ask(written, 0 if self.cancels else limit_ms))
        await asyncio.wait([self._task], timeout=max(until - time.perf_counter(), 0))
        if self._take_answer():
            return True
        if self.cancels:
            await self.close()
        return False

    def _take_answer(self) -> bool:
        """Return whether an answer has come."""
        if self._task is None or not self._task.done():
            return False
        self.known[self._asked_for], self._task = self._task.result(), None
        return True

    async def close(self) -> None:
        """Cancel the request under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None


async def type_text(editor: Editor, body: str, think_s: float, rng: random.Random, figures: TypedFigures) -> None:
    """Write a body as a typist would who takes suggestions that are right. `think_s`: seconds before a line."""
    spread = math.sqrt(math.log(1 + (KEY_DEVIATION_S / KEY_MEAN_S) ** 2))
    at = 0
    while at < len(body):
        pause = rng.lognormvariate(math.log(KEY_MEAN_S) - spread**2 / 2, spread) + (think_s if body[at - 1 : at] in ("", "\n") else 0)
        until = time.perf_counter() + pause
        shown = editor.find_shown(body[:at])
        if not shown:
            figures.asked += 1
            if shown := await editor.show(body[:at], until):
                figures.shown += 1
                until = time.perf_counter() + pause / 2  # it is read
        if shown:
            await editor.look_ahead(body[:at] + shown, until)
        await asyncio.sleep(until - time.perf_counter())
        figures.keys += 1
        if n := min(find_accepted(shown, body[at:]), len(body) - at):
            figures.accepted_chars += n
            at += n
        else:
            figures.typed_chars += 1
            at += 1
    await editor.close()

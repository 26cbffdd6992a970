"""Calls of tools in a text as it grows: what is said and what is called.

Tokens' texts enter in pieces of any size, `Said`, `Called` and `Argued` leave. What looks like a call and is none is said: nothing of a
text is lost but the marks and blanks around calls. Knows a `CallFormat`, and neither models nor answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, TypeAlias

from ngramspec.text.tool_calls import CallFormat

MAX_HEAD = 1000
"""Characters before a call's arguments."""


class Said(NamedTuple):
    """Text that is part of no call."""

    text: str


class Called(NamedTuple):
    """A call begins."""

    name: str


class Argued(NamedTuple):
    """The last call's arguments go on: a piece of JSON, as it was written."""

    text: str


Event: TypeAlias = Said | Called | Argued


class CallReader:
    """Reads one text."""

    def __init__(self, form: CallFormat, names: Collection[str], *, held: bool) -> None:
        """`names` of what may be called. `held`: a grammar holds the text to the format, so that a call is told of while it is written;
        otherwise when it is whole, for only then one knows that it is one."""
        self._form, self._names, self._held = form, frozenset(names), held
        self._head, self._tail, self._end, self._listed = form.head, form.tail, form.end, form.listed
        self._trigger = "" if form.trigger in form.special else form.trigger
        self._unmarked = not form.trigger
        self._state: Callable[[], Iterator[Event | None]] = self._outside
        self._text = ""
        """Not dealt with yet."""
        self._raw = ""
        """Of a call under way, as far as it was dealt with."""
        self._name = self._arguments = ""
        self._depth, self._in_string, self._escaped = 0, False, False
        self._n_calls = 0
        self._plain = False
        """Something was said, behind which an unmarked call cannot come."""
        self._fresh = True
        """Nothing was said since the beginning or the last call."""
        self._ended = False

    @property
    def n_calls(self) -> int:
        return self._n_calls

    @property
    def is_whole(self) -> bool:
        """No call is under way."""
        return self._state != self._in_arguments

    def push(self, text: str) -> list[Event]:
        """The text goes on."""
        self._text += text
        return self._run()

    def mark(self, token: str) -> list[Event]:
        """A special token of the format comes, which no text shows."""
        if self._state != self._outside or (token != self._form.trigger and not self._unmarked):
            return []
        events = self._say(self._text, before_call=True)
        self._text, self._raw, self._state = "", "", self._inside
        return events

    def finish(self) -> list[Event]:
        """The text is over."""
        self._ended = True
        return self._run()

    def _run(self) -> list[Event]:
        events: list[Event] = []
        while True:
            state = self._state
            for event in state():
                if event is None:  # more is needed
                    return events
                events.append(event)
            if self._state == state and not self._text:
                return events

    # ------------------------------------------------------------------ states: each deals with what it can; None: wait for more

    def _outside(self) -> Iterator[Event | None]:
        text = self._text
        if self._unmarked and not self._plain:
            begins = text.lstrip(" \t\r\n;" if self._n_calls else None)
            if begins.startswith("{"):
                self._raw, self._text, self._state = text[: len(text) - len(begins)], begins, self._inside
                return
            if not begins and not self._ended:
                yield None
                return
        if self._trigger and (at := text.find(self._trigger)) >= 0:
            yield from self._say(text[:at], before_call=True)
            self._raw, self._text, self._state = self._trigger, text[at + len(self._trigger) :], self._inside
            return
        held = 0 if self._ended else self._n_held(text)
        self._text = text[len(text) - held :]
        yield from self._say(text[: len(text) - held], before_call=False)
        yield None

    def _inside(self) -> Iterator[Event | None]:
        if found := self._head.match(self._text):
            self._name, self._arguments = found["name"], ""
            self._raw, self._text = self._raw + found[0], self._text[found.end() :]
            self._depth, self._in_string, self._escaped = 0, False, False
            if self._name not in self._names:
                yield from self._fail()
                return
            self._state = self._in_arguments
            if self._held:
                yield from self._begin()
        elif self._ended or len(self._text) > MAX_HEAD or (self._end and self._end in self._text):
            yield from self._fail()
        else:
            yield None

    def _in_arguments(self) -> Iterator[Event | None]:
        if not self._text and not self._ended:
            yield None
            return
        n, whole = self._scan(self._text)
        piece, self._text = self._text[:n], self._text[n:]
        self._raw += piece
        self._arguments += piece
        if self._held and piece:
            yield Argued(piece)
        if whole:
            self._state = self._behind
            if not self._held and not _is_object(self._arguments):
                yield from self._fail()
        elif self._ended:
            if not self._held:
                yield from self._fail()
            yield None
        else:
            yield None

    def _behind(self) -> Iterator[Event | None]:
        if found := self._tail.match(self._text):
            self._text = self._text[found.end() :]
            if not self._held:
                yield from self._begin()
                yield Argued(self._arguments)
            self._state = self._in_list if self._listed else self._closing
        elif self._held and self._ended:
            self._text = ""
            yield None
        elif self._ended or len(self._text) > MAX_HEAD or self._text.lstrip()[:1] not in ("", ",") or "}" in self._text:
            yield from self._fail()
        else:
            yield None

    def _in_list(self) -> Iterator[Event | None]:
        rest = self._text.lstrip()
        if rest.startswith(","):
            self._raw, self._text, self._state = ",", rest[1:], self._inside
        elif rest.startswith("]"):
            self._text, self._state = rest[1:], self._closing
        elif rest or self._ended:
            self._state = self._outside
        if not rest and not self._ended:
            yield None

    def _closing(self) -> Iterator[Event | None]:
        rest = self._text.lstrip()
        if not self._ended and len(rest) < len(self._end) and self._end.startswith(rest):
            yield None
            return
        self._text = rest.removeprefix(self._end)
        self._raw, self._state = "", self._outside

    # ------------------------------------------------------------------ what they share

    def _begin(self) -> Iterator[Event]:
        self._n_calls += 1
        self._fresh = True
        yield Called(self._name)

    def _say(self, text: str, *, before_call: bool) -> list[Event]:
        """Blanks beside calls are nobody's."""
        if self._fresh and self._n_calls and (not self._plain or (self._ended and not text.strip())):
            text = text.lstrip()
        if before_call:
            text = text.rstrip()
        if not text:
            return []
        self._fresh = False
        self._plain = self._plain or bool(text.strip())
        return [Said(text)]

    def _fail(self) -> Iterator[Event]:
        """It is no call: it is said."""
        self._plain = True
        raw, self._raw, self._state = self._raw, "", self._outside
        yield from self._say(raw, before_call=False)

    def _n_held(self, text: str) -> int:
        """How many last characters may be blanks before a call, or its beginning."""
        start = next((n for n in range(min(len(self._trigger) - 1, len(text)), 0, -1) if text.endswith(self._trigger[:n])), 0)
        body = text[: len(text) - start]
        return len(text) - len(body.rstrip())

    def _scan(self, text: str) -> tuple[int, bool]:
        """How much of the text belongs to the arguments, and whether they end there."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped or char == "\\":
                    self._escaped = not self._escaped
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return i + 1, True
        return len(text), False


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

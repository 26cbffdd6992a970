"""What the parsers of tool calls read, a text as it grows, and what they yield: text, starts of calls and pieces of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import regex

MAX_HEAD = 1000  # characters before a call's arguments


class TextDelta(NamedTuple):
    """Text that is part of no call goes on."""

    text: str


class ThoughtDelta(NamedTuple):
    """The thoughts before the answer go on."""

    text: str


class ToolCallStart(NamedTuple):
    """A call begins."""

    name: str


class ToolCallArguments(NamedTuple):
    """The arguments of the last call go on by a piece of JSON."""

    text: str


StreamDelta: TypeAlias = TextDelta | ThoughtDelta | ToolCallStart | ToolCallArguments
Parse: TypeAlias = Generator[StreamDelta | None, None, bool]


def _fits_any(name: str, arguments: Any) -> bool:
    return True


@dataclass(frozen=True)
class KnownTools:
    """The tools that may be called."""

    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the parameters, by name."""
    strict: frozenset[str] = frozenset()
    """Names of the tools whose calls must fit their schemas in every form."""
    fits: Callable[[str, Any], bool] = _fits_any
    """Whether arguments fit the schema of the tool with this name."""


@dataclass
class Scanner:
    """The text that parsers read, as it grows."""

    tools: KnownTools
    text: str = ""
    at: int = 0
    """The position in `text` at which a parser reads on."""
    ended: bool = False
    """The text does not grow any more."""
    streams: bool = False
    """A grammar holds calls to the template's form, so they are passed on while they are written."""
    trusts_json: bool = False
    """JSON that names a tool is the template's own form here, and is a call whether it fits the schema or not."""
    sure: bool = False
    """Set by a parser of an unmarked form once only a call looks like that."""
    broken: bool = False
    """Set by a parser: the text ended within a call that was passed on."""

    def match(self, pattern: regex.Pattern[str]) -> Generator[None, None, regex.Match[str] | None]:
        """Move past the pattern and return the match; None if the text goes on otherwise. Waits while more text could decide it."""
        while True:
            found = pattern.match(self.text, self.at, partial=not self.ended)
            if found is None:
                return None
            if not found.partial and not self._may_grow(found):
                self.at = found.end()
                return found
            if len(self.text) - self.at > MAX_HEAD:
                return None
            yield None

    def _may_grow(self, found: regex.Match[str]) -> bool:
        """Return whether a match that ends where the text ends so far takes blanks that may follow."""
        if self.ended or found.end() < len(self.text):
            return False
        grown = found.re.match(self.text + " ", self.at)
        return grown is not None and grown.end() > found.end()

    def read_until(self, pattern: regex.Pattern[str], longest: int) -> Generator[None, None, tuple[str, str] | None]:
        """Move past the next match, of `longest` characters at most. Returns the text before it and its own; None if there is none."""
        start = looked = self.at
        while True:
            if found := pattern.search(self.text, looked):
                self.at = found.end()
                return self.text[start : found.start()], found[0]
            if self.ended:
                return None
            looked = max(start, len(self.text) - longest)
            yield None

    def read_json(self) -> Generator[str | None, None, bool]:
        """Yield the pieces of the object or list that begins here as they come, None while more is needed; return whether it ended."""
        depth, in_string = 0, False
        while True:
            start, i = self.at, self.at
            while found := (_IN_STRING if in_string else _OUTSIDE).search(self.text, i):
                i = found.end()
                if in_string:
                    in_string = found[0] != '"'
                elif found[0] == '"':
                    in_string = True
                else:
                    depth += 1 if found[0] in "{[" else -1
                    if not depth:
                        self.at = i
                        yield self.text[start:i]
                        return True
            end = len(self.text)
            if in_string and end > i and self.text.endswith("\\") and not self.ended:
                end -= 1  # the letter that it escapes is yet to come
            self.at = end
            if end > start:
                yield self.text[start:end]
            if self.ended:
                return False
            yield None

    def read_whole_json(self) -> Generator[None, None, str | None]:
        """Return the text of the object or list that begins here; None if it does not end."""
        start = self.at
        reading = self.read_json()
        while True:
            try:
                if next(reading) is None:
                    yield None
            except StopIteration as stop:
                return self.text[start : self.at] if stop.value else None


_OUTSIDE, _IN_STRING = regex.compile(r'["{}\[\]]'), regex.compile(r'\\.|"', regex.DOTALL)

"""What the parsers of tool calls read, a text as it grows, and what they yield: text, starts of calls and pieces of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import regex

MAX_HEAD = 1000  # characters of one match, such as what stands before a call's arguments
MAX_EXPRESSION = 100_000  # characters of calls in Python's syntax, or in Gemma's, which are parsed at once
MAX_NESTED = 100  # brackets within brackets there


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


def _match_any(name: str, arguments: Any) -> bool:
    return True


@dataclass(frozen=True)
class KnownTools:
    """The tools that may be called."""

    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the parameters, by name."""
    strict: frozenset[str] = frozenset()
    """Names of the tools whose calls must fit their schemas in every form."""
    match_schema: Callable[[str, Any], bool] = _match_any
    """Whether arguments fit the schema of the tool with this name."""


@dataclass
class Scanner:
    """The text that parsers read, as it grows."""

    tools: KnownTools
    text: str = ""
    at: int = 0
    """The position in `text` at which a parser reads on."""
    furthest: int = 0
    """The furthest position that the parser at work has read."""
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
        end = self.at + MAX_HEAD  # the match sees nothing beyond, so the same is found when the text comes in one piece
        while True:
            is_all = self.ended or len(self.text) >= end
            found = pattern.match(self.text, self.at, end, partial=not is_all)
            if found is None:
                return None
            if is_all or not (found.partial or self._may_grow(found)):
                self._move(found.end())
                return found
            yield None

    def _move(self, at: int) -> None:
        self.at, self.furthest = at, max(at, self.furthest)

    def _may_grow(self, found: regex.Match[str]) -> bool:
        """Return whether a match that ends where the text ends so far takes blanks that may follow."""
        if found.end() < len(self.text):
            return False
        grown = found.re.match(self.text + " ", self.at)
        return grown is not None and grown.end() > found.end()

    def read_until(self, pattern: regex.Pattern[str]) -> Generator[None, None, str | None]:
        """Move past the next match and return the text before it; None if there is none."""
        start = looked = self.at
        while True:
            found = pattern.search(self.text, looked, partial=not self.ended)
            if found is not None and not found.partial:
                self._move(found.end())
                return self.text[start : found.start()]
            if self.ended:
                self._move(len(self.text))
                return None
            looked = len(self.text) if found is None else found.start()
            yield None

    def read_brackets(self, tokens: regex.Pattern[str]) -> Generator[None, None, str | None]:
        """Move past the expression whose first brackets end, and return it; None if they do not, or are nested too deeply.

        tokens: matches brackets and strings. A string that does not end yet is matched by its beginning alone.
        """
        start, end = self.at, self.at + MAX_EXPRESSION
        while (length := _find_bracket_end(self.text[start:end], tokens)) is None:
            if self.ended or len(self.text) >= end:
                self._move(min(end, len(self.text)))
                return None
            yield None
        self._move(start + length)
        return self.text[start : self.at] or None

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
                        self._move(i)
                        yield self.text[start:i]
                        return True
            end = len(self.text)
            if in_string and end > i and self.text.endswith("\\") and not self.ended:
                end -= 1  # the letter that it escapes is yet to come
            self._move(end)
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


def _find_bracket_end(text: str, tokens: regex.Pattern[str]) -> int | None:
    """Return where the expression's first brackets end; 0 if they are nested too deeply, None if they do not end yet."""
    depth = 0
    for found in tokens.finditer(text):
        match found[0]:
            case "(" | "[" | "{":
                depth += 1
                if depth > MAX_NESTED:
                    return 0
            case ")" | "]" | "}":
                depth -= 1
                if not depth:
                    return int(found.end())
            case '"' | "'" | '"""' | "'''" | '<|"' | '<"' | "<escape>":  # a string that does not end yet
                return None
    return None

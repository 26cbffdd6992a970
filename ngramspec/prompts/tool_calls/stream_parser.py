"""The parser that turns the parts of a completion into text and tool calls.

A `StreamParser` takes a choice's parts; deltas of its text and calls leave. Knows neither requests nor templates.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ngramspec.outputs import Choice, Delta
from ngramspec.prompts.tool_calls.call_reader import CallReader
from ngramspec.prompts.tool_calls.call_scanner import StreamDelta, TextDelta, ToolCallArguments, ToolCallStart
from ngramspec.prompts.tool_calls.tool_prompt import Call


@dataclass(slots=True)
class Reply:
    """The text and the calls of one choice so far."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, delta: StreamDelta) -> StreamDelta:
        match delta:
            case TextDelta(text):
                self.content += text
            case ToolCallStart(name):
                self.calls.append(Call(make_call_id(), name, ""))
            case ToolCallArguments(text):
                self.calls[-1] = self.calls[-1]._replace(arguments=self.calls[-1].arguments + text)
        return delta


class StreamParser:
    """Turns one choice's text into message and tool-call deltas."""

    def __init__(self, reader: CallReader | None, marks: Mapping[int, str]) -> None:
        """Start a choice. `reader`: None if no tool may be called. `marks`: the text of special tokens, by id."""
        self._reader, self._marks = reader, marks
        self.reply = Reply()

    def parse(self, part: Choice | Delta) -> Iterator[StreamDelta]:
        """Yield what the part adds, after adding it to `reply`. A part with a `finish_reason` is the last."""
        return (self.reply.add(delta) for delta in _join_neighbours(self._parse(part)))

    def get_finish_reason(self, given: str | None) -> str | None:
        """Return "tool_calls" if the text ended after a call, else the engine's finish reason."""
        called = self.reply.calls and self._reader is not None and self._reader.is_whole
        return "tool_calls" if given == "stop" and called else given

    def _parse(self, part: Choice | Delta) -> Iterator[StreamDelta]:
        reader, waiting = self._reader, ""
        if reader is None:
            if part.text:
                yield TextDelta(part.text)
            return
        for token, text in zip(part.token_ids, part.texts, strict=True):
            if token not in self._marks:
                waiting += text
                continue
            yield from reader.push(waiting)
            yield from reader.push_special(self._marks[token])
            waiting = ""
        yield from reader.push(waiting + part.text[sum(map(len, part.texts)) :])
        if part.finish_reason is not None:
            yield from reader.finish(cut=part.finish_reason == "length")


def _join_neighbours(deltas: Iterator[StreamDelta]) -> Iterator[StreamDelta]:
    """Join neighbouring deltas of one kind."""
    last: StreamDelta | None = None
    for delta in deltas:
        if isinstance(last, TextDelta) and isinstance(delta, TextDelta):
            last = TextDelta(last.text + delta.text)
        elif isinstance(last, ToolCallArguments) and isinstance(delta, ToolCallArguments):
            last = ToolCallArguments(last.text + delta.text)
        else:
            if last is not None:
                yield last
            last = delta
    if last is not None:
        yield last


def make_call_id() -> str:
    """Return a new call's id: nine letters and digits, which every template takes."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

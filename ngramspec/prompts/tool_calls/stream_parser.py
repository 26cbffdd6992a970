"""The parser that turns the parts of a completion into thoughts, text and tool calls.

A `StreamParser` takes a choice's parts; deltas of its thoughts, text and calls leave. Knows neither requests nor templates.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ngramspec.outputs import Choice, Delta
from ngramspec.prompts.thoughts import Piece, ThoughtReader
from ngramspec.prompts.tool_calls.call_scanner import StreamDelta, TextDelta, ThoughtDelta, ToolCallArguments, ToolCallStart
from ngramspec.prompts.tool_calls.tool_prompt import Call

if TYPE_CHECKING:
    from ngramspec.prompts.tool_calls.call_reader import CallReader


@dataclass(slots=True)
class Reply:
    """The thoughts, the text and the calls of one choice so far."""

    thoughts: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, delta: StreamDelta) -> StreamDelta:
        match delta:
            case TextDelta(text):
                self.content += text
            case ThoughtDelta(text):
                self.thoughts += text
            case ToolCallStart(name):
                self.calls.append(Call(make_call_id(), name, ""))
            case ToolCallArguments(text):
                self.calls[-1] = self.calls[-1]._replace(arguments=self.calls[-1].arguments + text)
        return delta


class StreamParser:
    """Turns one choice's text into message and tool-call deltas."""

    def __init__(self, reader: CallReader | None, marks: Mapping[int, str], thoughts: ThoughtReader | None = None) -> None:
        """Start a choice.

        reader: None if no tool may be called. marks: the text of special tokens, by id. thoughts: None if they stay in the text.
        """
        self._reader, self._marks, self._thoughts = reader, marks, thoughts
        self.reply = Reply()

    @property
    def n_thought_tokens(self) -> int:
        return self._thoughts.n_tokens if self._thoughts is not None else 0

    def parse(self, part: Choice | Delta) -> Iterator[StreamDelta]:
        """Yield what the part adds, after adding it to `reply`. A part with a `finish_reason` is the last."""
        return (self.reply.add(delta) for delta in _join_neighbours(self._parse(part)))

    def get_finish_reason(self, given: str | None) -> str | None:
        """Return "tool_calls" if the text ended after a call, else the engine's finish reason."""
        called = self.reply.calls and self._reader is not None and self._reader.is_whole
        return "tool_calls" if given == "stop" and called else given

    def _parse(self, part: Choice | Delta) -> Iterator[StreamDelta]:
        if self._reader is None and self._thoughts is None:
            if part.text:
                yield TextDelta(part.text)
            return
        waiting = ""
        for piece in self._split(part):
            if not (piece.is_special or piece.is_thought):
                waiting += piece.text
                continue
            yield from self._push(waiting)
            waiting = ""
            if piece.is_special and not piece.is_thought and self._reader is not None:
                yield from self._reader.push_special(piece.text)
            elif piece.is_thought and not piece.is_special:
                yield ThoughtDelta(piece.text)
        yield from self._push(waiting)
        if part.finish_reason is not None and self._reader is not None:
            yield from self._reader.finish(cut=part.finish_reason == "length")

    def _push(self, text: str) -> Iterator[StreamDelta]:
        if self._reader is not None:
            yield from self._reader.push(text)
        elif text:
            yield TextDelta(text)

    def _split(self, part: Choice | Delta) -> Iterator[Piece]:
        """Yield the texts of a part's tokens, with those of special tokens, as far as is known what is thought."""
        rest = part.text[sum(map(len, part.texts)) :]
        pieces = [
            Piece(self._marks[token], is_special=True) if token in self._marks else Piece(text)
            for token, text in zip(part.token_ids, part.texts, strict=True)
        ]
        pieces += [Piece(rest)] if rest else []
        if self._thoughts is None:
            yield from pieces
            return
        for piece in pieces:
            yield from self._thoughts.push(piece.text, is_special=piece.is_special)
        if part.finish_reason is not None:
            yield from self._thoughts.finish()


def _join_neighbours(deltas: Iterator[StreamDelta]) -> Iterator[StreamDelta]:
    """Join neighbouring deltas of one kind."""
    last: StreamDelta | None = None
    for delta in deltas:
        if isinstance(last, TextDelta) and isinstance(delta, TextDelta):
            last = TextDelta(last.text + delta.text)
        elif isinstance(last, ThoughtDelta) and isinstance(delta, ThoughtDelta):
            last = ThoughtDelta(last.text + delta.text)
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

"""What a chat returns to a Python program: the assistant's text and tool calls, whole or as they are written.

A completion, or its deltas, enter with a `StreamParser`; a `ChatReply` or `ChatDelta`s leave. Knows neither prompts nor engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ngramspec.field_docs import document_fields
from ngramspec.outputs import Completion, Delta
from ngramspec.prompts.tool_calls.call_scanner import TextDelta, ThoughtDelta, ToolCallArguments, ToolCallStart
from ngramspec.prompts.tool_calls.stream_parser import StreamParser
from ngramspec.prompts.tool_calls.tool_prompt import ASSISTANT, Call


@dataclass(slots=True)
class ChatReply:
    """The assistant's answer in a chat."""

    content: str
    """Its text, without tool calls."""
    tool_calls: list[Call]
    """The calls that the model made, each with `id`, `name` and `arguments`, a text of JSON."""
    finish_reason: str | None
    """"stop", "tool_calls" if the text ended after a call, "length", or "cancelled"."""
    completion: Completion
    """The completion that it was read from: token ids, statistics, times."""
    thoughts: str = ""
    """What the model thought before, if its template knows marks of thoughts."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to the chat."""
        message: dict[str, Any] = {"role": ASSISTANT, "content": self.content}
        if self.thoughts:
            message["reasoning_content"] = self.thoughts
        if self.tool_calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in self.tool_calls]
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function} for call, function in zip(self.tool_calls, functions, strict=True)
            ]
        return message

    def __repr__(self) -> str:
        called = "".join(f", {call.name}(…)" for call in self.tool_calls)
        return f"<ChatReply {self.content!r:.60}{called}, {self.finish_reason}>"


@dataclass(slots=True)
class ToolCallDelta:
    """What one step added to a tool call."""

    index: int
    """The call's place among the calls of the reply."""
    id: str
    name: str
    arguments: str
    """JSON that goes on where the last delta of this call ended; empty in the first one, which says that a call begins."""


@dataclass(slots=True)
class ChatDelta:
    """What one step added to the assistant's answer."""

    text: str
    """Text of the answer that is part of no call."""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    reply: ChatReply | None = None
    """The whole answer; set on the last delta."""
    thoughts: str = ""
    """Thoughts, which are no part of the text."""

    def __repr__(self) -> str:
        thoughts = f", thoughts {self.thoughts!r:.60}" if self.thoughts else ""
        return f"<ChatDelta {self.text!r:.60}{thoughts}{', the last' if self.reply is not None else ''}>"


def make_reply(parser: StreamParser, completion: Completion) -> ChatReply:
    """Return the answer that `parser` has read to its end."""
    reply = parser.reply
    return ChatReply(reply.content, list(reply.calls), parser.get_finish_reason(completion.finish_reason), completion, reply.thoughts)


def read_reply(parser: StreamParser, completion: Completion) -> ChatReply:
    """Return the answer in a completion."""
    for _ in parser.parse(completion.choices[0]):
        pass
    return make_reply(parser, completion)


def read_delta(parser: StreamParser, delta: Delta) -> ChatDelta | None:
    """Return what a delta adds to the answer; None if it adds nothing yet."""
    made = ChatDelta("")
    for event in parser.parse(delta):
        calls = parser.reply.calls
        match event:
            case TextDelta(text):
                made.text += text
            case ThoughtDelta(text):
                made.thoughts += text
            case ToolCallStart(name):
                made.tool_calls.append(ToolCallDelta(len(calls) - 1, calls[-1].id, name, ""))
            case ToolCallArguments(text):
                made.tool_calls.append(ToolCallDelta(len(calls) - 1, calls[-1].id, calls[-1].name, text))
    if delta.completion is not None:
        made.reply = make_reply(parser, delta.completion)
    return made if made.text or made.thoughts or made.tool_calls or made.reply else None


document_fields(__name__)

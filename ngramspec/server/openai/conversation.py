"""What the routes of chats share: from turns and tools to a work, and from a completion back to what is said and called.

Turns, a `Toolbox` and checked fields enter, a `Work` leaves. Knows the model's template through `Prompts`, and no shape of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ngramspec.engine.llm_engine import Hints
from ngramspec.server import sampling_fields
from ngramspec.server.chat_template import ANSWER, Prompts, Style
from ngramspec.server.error_responses import ApiError, refusing
from ngramspec.server.openai.schemas import Part, Sampled
from ngramspec.server.queue import Work
from ngramspec.server.state import State
from ngramspec.server.tool_calls.call_reader import CallReader
from ngramspec.server.tool_calls.stream_parser import StreamParser, Toolbox
from ngramspec.server.tool_calls.tool_prompt import Turn


@dataclass(slots=True)
class Conversation:
    """One request of a chat."""

    state: State
    prompts: Prompts
    turns: Sequence[Turn]
    toolbox: Toolbox
    param: str
    """The field that the turns come from."""
    style: Style = ANSWER
    held: bool = False
    """A grammar holds the whole answer to calls, or to the form that was asked for. Known when there is a work."""

    def __post_init__(self) -> None:
        """Raises ApiError (400)."""
        if not self.prompts.has_chat_template:
            raise unsupported(self.param, "this model has no chat template; /v1/completions continues texts")
        most = self.state.engine.max_model_len
        if len(self.turns) > most:
            why = f"there are {len(self.turns)}; this server takes {most} tokens"
            raise ApiError(400, f"{self.param}: {why}", param=self.param, code="context_length_exceeded")

    @property
    def n_chars(self) -> int:
        """Characters of all that the template shows."""
        turns = sum(len(turn.content) + sum(len(call.name) + len(call.arguments) for call in turn.calls) for turn in self.turns)
        return turns + len(str(self.toolbox.prompt_tools)) + len(str(self.style.variables))

    def encode(self, body: Sampled, max_tokens: int | None) -> list[int]:
        """The prompt's ids. Raises ApiError. Renders and encodes; for `Encoders`."""
        bounds = self.state.bounds
        if self.toolbox.tools and sampling_fields.given(body).get("skip_special_tokens") is False:
            why = "not beside tools, whose calls are told apart from text by special tokens"
            raise unsupported("skip_special_tokens", why)
        check = bounds.check_text if body.truncate_prompt_tokens is None else None
        with refusing():
            ids = self.prompts.chat(self.turns, self.toolbox.prompt_tools, self.style, check and (lambda text: check(text, self.param)))
            ids = body.cut(ids, self.state.engine.max_model_len - (max_tokens or 1))
            bounds.check_prompt(len(ids), self.param)
            if not ids:
                raise ApiError(400, f"{self.param}: the model's chat template makes nothing of them", param=self.param)
        return ids

    def work(self, ids: list[int], body: Sampled, hints: Hints, *, max_tokens: int | None, n: int, logprobs: int | None) -> Work:
        """For a prompt of these ids. Raises ApiError. Compiles grammars; may take seconds."""
        state, box = self.state, self.toolbox
        left = max(min(state.engine.max_model_len - len(ids), state.settings.limits.output_tokens // n), 1)
        params = body.params(max_tokens=left if max_tokens is None else max_tokens, n=n, logprobs=logprobs)
        state.bounds.check(params)
        body.check_form(state.engine, hints["tenant"])
        if box.tools and (grammar := box.make_grammar(self.prompts.calls, self.prompts.added, params.grammar)) is not None:
            box.check_grammar(state.engine, grammar, hints["tenant"])
            self.held = box.required or params.grammar is not None
            params = replace(params, grammar=grammar)
        return Work(ids, params, hints)

    def make_stream_parser(self) -> StreamParser:
        """For one choice of the work's completion."""
        if not self.toolbox.tools:
            return StreamParser(None, {})
        box = self.toolbox
        reader = CallReader(self.prompts.calls, box.known, held=self.held, calls_only=box.required, several=box.several)
        return StreamParser(reader, self.prompts.marks)


def text_of(content: str | list[Part], where: str, types: Sequence[str] = ("text",)) -> str:
    """The text of a content and of its parts, end to end. Raises ApiError (400)."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in types:
            raise unsupported(f"{where}[{i}]", f"only parts of type {' or '.join(map(repr, types))}, got {part.type[:40]!r}")
        if part.text is None:
            raise ApiError(400, f"{where}[{i}].text: is missing", param=f"{where}[{i}].text")
    return "".join(part.text or "" for part in content)


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}", param=param, code="not_supported")

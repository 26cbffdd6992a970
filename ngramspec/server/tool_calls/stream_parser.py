"""Tools as OpenAI's routes declare them, and the parser that turns a completion's parts into text and tool calls.

Checked requests enter, a `Toolbox` leaves; a `StreamParser` takes a choice's parts, deltas of its text and calls leave. Knows neither
routes nor templates.
"""

from __future__ import annotations

import json
import re
import secrets
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import jsonschema_rs
from pydantic import Field

from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import GrammarError
from ngramspec.grammar.base import MAX_BYTES, Grammar
from ngramspec.outputs import Choice, Delta
from ngramspec.server.error_responses import ApiError
from ngramspec.server.request_fields import Items, StrictModel
from ngramspec.server.tool_calls.call_formats import CallFormat, Tool, make_call_grammar
from ngramspec.server.tool_calls.call_reader import CallReader
from ngramspec.server.tool_calls.call_scanner import KnownTools, StreamDelta, TextDelta, ToolCallArguments, ToolCallStart
from ngramspec.server.tool_calls.tool_prompt import Call

MAX_TOOLS = 128
SEEK_S = 1.0  # for finding the tool whose parameters are at fault
REGEX_BYTES = 1 << 20  # of a compiled pattern in a tool's schema
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class FunctionDeclared(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDeclared(StrictModel):
    type: str
    function: FunctionDeclared | None = None


class FunctionNamed(StrictModel):
    name: str


class ToolNamed(StrictModel):
    type: str
    function: FunctionNamed | None = None


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ToolNamed], Field(min_length=1, max_length=MAX_TOOLS)]


class ChosenTool(ToolNamed):
    """The tool that must be called, or the tools that are allowed."""

    allowed_tools: AllowedTools | None = None


ToolChoice = Literal["none", "auto", "required"] | ChosenTool


class FunctionCalled(StrictModel):
    name: str
    arguments: str


class ToolCalled(StrictModel):
    id: str
    type: str | None = None
    function: FunctionCalled | None = None


@dataclass(frozen=True)
class Toolbox:
    """The tools that a request lets the model call."""

    tools: tuple[Tool, ...] = ()
    """The tools that may be called."""
    prompt_tools: tuple[dict[str, Any], ...] = ()
    """The tools that the prompt describes, in the form of OpenAI's chats."""
    required: bool = False
    """The model must call a tool."""
    several: bool = True
    """The model may make more than one call."""

    @cached_property
    def known(self) -> KnownTools:
        """The tools as a `CallReader` knows them."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        return KnownTools(schemas, frozenset(tool.name for tool in self.tools if tool.strict), _ArgumentValidators(schemas).fits)

    def make_grammar(self, form: CallFormat, added: Mapping[str, int], otherwise: Grammar | None) -> Grammar | None:
        """Return the grammar of a text that may call tools; None if it needs none. Raises ApiError (400).

        `added`: ids of the vocabulary's added tokens. `otherwise`: the form of an answer that calls nothing.
        """
        if not self.tools:
            return otherwise
        if otherwise is not None and otherwise.kind not in ("json_schema", "json_object"):
            raise ApiError(400, "tools: beside them, the form of an answer must be JSON", param="tools")
        try:
            if self.required or otherwise is not None:
                other = None if self.required else otherwise
                return make_call_grammar(form, self.tools, added, several=self.several, otherwise=other)
            if any(tool.strict for tool in self.tools) or (not self.several and form.trigger):
                return make_call_grammar(form, self.tools, added, several=self.several, free=True)
        except GrammarError as error:
            raise ApiError(400, f"tools: {error}", param="tools") from None
        return None

    def check_grammar(self, engine: Engine, grammar: Grammar, tenant: str | None) -> None:
        """Compile the grammar, which takes up to seconds, once for each. Raises ApiError (400) that names the tool at fault."""
        try:
            engine.compile_grammar(grammar, tenant=tenant)
        except GrammarError as error:
            deadline = time.monotonic() + SEEK_S
            for i, tool in enumerate(self.tools):
                if time.monotonic() > deadline:
                    break
                try:
                    engine.compile_grammar(Grammar.json_schema({"type": "object"} | tool.parameters), tenant=tenant)
                except GrammarError as wrong:
                    known = next((k for k, shown in enumerate(self.prompt_tools) if shown["function"]["name"] == tool.name), i)
                    param = f"tools[{known}].function.parameters"
                    raise ApiError(400, f"{param}: {wrong}", param=param) from None
            raise ApiError(400, f"tools: {error}", param="tools") from None


class _ArgumentValidators:
    """Checks whether arguments fit the schemas of tools. A schema is compiled at its first use; nothing that it refers to is fetched."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._compiled: dict[str, Any] = {}

    def fits(self, name: str, arguments: Any) -> bool:
        try:
            if name not in self._compiled:
                schema = {"type": "object"} | dict(self._schemas[name])
                options = jsonschema_rs.RegexOptions(size_limit=REGEX_BYTES)  # matches in linear time, whatever the pattern
                self._compiled[name] = jsonschema_rs.validator_for(schema, retriever=_fetch_nothing, pattern_options=options)
            return bool(self._compiled[name].is_valid(arguments))
        except (ValueError, RecursionError):  # no schema that the validator knows, or values nested too deeply
            return False


def _fetch_nothing(uri: str) -> Any:
    raise ValueError(f"schemas refer to themselves alone, got {uri[:100]!r}")


def make_toolbox(
    declared: Sequence[ToolDeclared] | None, choice: ToolChoice | None, parallel: bool | None, *, others: bool = False
) -> Toolbox:
    """Return the tools that a request lets the model call. Raises ApiError (400).

    `others`: leave out tools that are no functions (a hosted search, a client's own shell, free-form tools). No model here has a form in
    which it could call them, and agents declare them beside functions whether they are needed or not.
    """
    tools: list[Tool] = []
    prompt_tools: list[dict[str, Any]] = []
    for i, each in enumerate(declared or ()):
        if others and each.type != "function":
            continue
        tool = _read_tool(each, f"tools[{i}]")
        if any(tool.name == other.name for other in tools):
            raise _make_error(f"tools[{i}].function.name", f"there are two tools {tool.name!r}")
        tools.append(tool)
        function = {"name": tool.name, "description": (each.function and each.function.description) or "", "parameters": tool.parameters}
        prompt_tools.append({"type": "function", "function": function})
    if choice not in (None, "none", "auto") and not tools:
        raise _make_error("tool_choice", "only with tools")
    if choice == "none" or not tools:
        return Toolbox()
    required, several = choice == "required", parallel is not False
    if isinstance(choice, ChosenTool):
        names, required = _read_choice(choice, [tool.name for tool in tools])
        tools = [tool for tool in tools if tool.name in names]
        several = several and choice.allowed_tools is not None
    if required and parallel is None:
        several = False  # a model that must call goes on with the same call until its tokens are used up
    return Toolbox(tuple(tools), tuple(prompt_tools), required, several)


def _read_tool(declared: ToolDeclared, where: str) -> Tool:
    if declared.type != "function":
        why = f"only tools of type 'function', got {declared.type[:40]!r}"
        raise ApiError(400, f"{where}.type: {why}", param=f"{where}.type", code="not_supported")
    if (function := declared.function) is None:
        raise _make_error(f"{where}.function", "is missing")
    if not _NAME.fullmatch(function.name):
        raise _make_error(f"{where}.function.name", "must be 1 to 128 letters, digits or any of _-.:/")
    parameters = function.parameters or _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise _make_error(f"{where}.function.parameters", "must be the JSON schema of an object")
    if len(json.dumps(parameters)) > MAX_BYTES:
        raise _make_error(f"{where}.function.parameters", f"at most {MAX_BYTES} bytes")
    return Tool(function.name, parameters, bool(function.strict))


def _read_choice(choice: ChosenTool, names: Sequence[str]) -> tuple[set[str], bool]:
    """Return the names of the tools that may be called, and whether one must be. Raises ApiError (400)."""
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        each, required = choice.allowed_tools.tools, choice.allowed_tools.mode == "required"
    elif choice.type == "function":
        each, required = [ToolNamed(type=choice.type, function=choice.function)], True
    else:
        raise _make_error("tool_choice", "must be 'none', 'auto', 'required', a function's name or allowed_tools")
    chosen = set()
    for tool in each:
        if tool.function is None:
            raise _make_error("tool_choice", "names no function")
        if tool.function.name not in names:
            raise _make_error("tool_choice", f"there is no tool {tool.function.name[:100]!r}; there are {', '.join(names)[:400]}")
        chosen.add(tool.function.name)
    return chosen, required


def read_calls(calls: Sequence[ToolCalled] | None, where: str) -> tuple[Call, ...]:
    """Return the calls of a message of the assistant. Raises ApiError (400)."""
    made = []
    for i, call in enumerate(calls or ()):
        if call.type not in (None, "function") or call.function is None:
            raise _make_error(f"{where}.tool_calls[{i}]", "must be of type 'function', with a function")
        made.append(Call(call.id, call.function.name, call.function.arguments))
    return tuple(made)


def _make_error(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}", param=param)


# ------------------------------------------------------------------ the stream


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

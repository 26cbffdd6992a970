"""The tools that a request lets the model call: what the prompt says of them, and what holds the text to them.

Checked declarations enter, a `Toolbox` leaves, which makes the grammar of the text and the reader of its calls. Knows neither requests nor
templates.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jsonschema_rs

from ngramspec.errors import GrammarError, InvalidInputError
from ngramspec.grammar.constraint import MAX_BYTES, Grammar
from ngramspec.prompts.tool_calls.call_formats import CallFormat, Tool
from ngramspec.prompts.tool_calls.call_grammar import make_call_grammar
from ngramspec.prompts.tool_calls.call_scanner import KnownTools

SEEK_S = 1.0  # for finding the tool whose parameters are at fault
REGEX_BYTES = 1 << 20  # of a compiled pattern in a tool's schema
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ANY_OBJECT = {"type": "object"}
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class DeclaredTool(NamedTuple):
    """A function that a request declares."""

    name: str
    description: str
    parameters: dict[str, Any] | None
    """JSON schema of an object; None: it takes nothing."""
    strict: bool
    where: str
    """The field that declares it, such as `tools[0]`, for errors."""


class NamedTools(NamedTuple):
    """A choice of some of the tools."""

    names: Sequence[str]
    required: bool = True
    """One of them must be called."""
    several: bool = False
    """More than one call may be made."""


ToolChoice = Literal["none", "auto", "required"] | NamedTools


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
        return KnownTools(schemas, frozenset(tool.name for tool in self.tools if tool.strict), _ArgumentValidators(schemas).match_schema)

    def make_grammar(self, form: CallFormat, added: Mapping[str, int], otherwise: Grammar | None) -> Grammar | None:
        """Return the grammar of a text that may call tools; None if it needs none. Raises InvalidInputError.

        `added`: ids of the vocabulary's added tokens. `otherwise`: the form of an answer that calls nothing.
        """
        if not self.tools:
            return otherwise
        if otherwise is not None and otherwise.kind not in ("json_schema", "json_object"):
            raise InvalidInputError("tools: beside them, the form of an answer must be JSON", param="tools")
        try:
            if self.required or otherwise is not None:
                other = None if self.required else otherwise
                return make_call_grammar(form, self.tools, added, several=self.several, otherwise=other)
            if any(tool.strict for tool in self.tools) or (not self.several and form.trigger):
                return make_call_grammar(form, self.tools, added, several=self.several, free=True)
        except GrammarError as error:
            raise InvalidInputError(f"tools: {error}", param="tools") from None
        return None

    def check_grammar(self, compile_grammar: Callable[[Grammar], object], grammar: Grammar) -> None:
        """Compile the grammar, which takes up to seconds. Raises InvalidInputError that names the tool at fault.

        `compile_grammar` raises GrammarError.
        """
        try:
            compile_grammar(grammar)
        except GrammarError as error:
            deadline = time.monotonic() + SEEK_S
            for i, tool in enumerate(self.tools):
                if time.monotonic() > deadline:
                    break
                try:
                    compile_grammar(Grammar.json_schema({"type": "object"} | tool.parameters))
                except GrammarError as wrong:
                    known = next((k for k, shown in enumerate(self.prompt_tools) if shown["function"]["name"] == tool.name), i)
                    param = f"tools[{known}].function.parameters"
                    raise InvalidInputError(f"{param}: {wrong}", param=param) from None
            raise InvalidInputError(f"tools: {error}", param="tools") from None


class _ArgumentValidators:
    """Checks whether arguments fit the schemas of tools. A schema is compiled at its first use; nothing that it refers to is fetched.

    One that the validator does not know, such as `"properties": []` of clients in PHP or Lua, asks for an object and nothing else.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._compiled: dict[str, Any] = {}

    def match_schema(self, name: str, arguments: Any) -> bool:
        if name not in self._compiled:
            self._compiled[name] = _compile_schema(_ANY_OBJECT | dict(self._schemas[name]))
        try:
            return bool(self._compiled[name].is_valid(arguments))
        except (ValueError, RecursionError):  # values nested too deeply
            return False


def _compile_schema(schema: dict[str, Any]) -> Any:
    options = jsonschema_rs.RegexOptions(size_limit=REGEX_BYTES)  # matches in linear time, whatever the pattern
    try:
        return jsonschema_rs.validator_for(schema, retriever=_fetch_nothing, pattern_options=options)
    except (ValueError, RecursionError):
        return jsonschema_rs.validator_for(_ANY_OBJECT)


def _fetch_nothing(uri: str) -> Any:
    raise ValueError(f"schemas refer to themselves alone, got {uri[:100]!r}")


def make_toolbox(declared: Sequence[DeclaredTool], choice: ToolChoice | None, parallel: bool | None) -> Toolbox:
    """Return the tools that a request lets the model call. Raises InvalidInputError.

    `choice`: None is "auto". `parallel`: whether there may be several calls; None: unless one must be made.
    """
    tools: list[Tool] = []
    known_names = set[str]()
    for each in declared:
        tool = _check_tool(each)
        if tool.name in known_names:
            raise _make_error(f"{each.where}.function.name", f"there are two tools {tool.name!r}")
        known_names.add(tool.name)
        tools.append(tool)
    if choice not in (None, "none", "auto") and not tools:
        raise _make_error("tool_choice", "only with tools")
    if choice == "none" or not tools:
        return Toolbox()
    prompt_tools = tuple(
        {"type": "function", "function": {"name": tool.name, "description": each.description, "parameters": tool.parameters}}
        for tool, each in zip(tools, declared, strict=True)
    )
    required, several = choice == "required", parallel is not False
    if isinstance(choice, NamedTools):
        for name in choice.names:
            if name not in known_names:
                known = ", ".join(tool.name for tool in tools)[:400]
                raise _make_error("tool_choice", f"there is no tool {name[:100]!r}; accepted: {known}")
        tools = [tool for tool in tools if tool.name in choice.names]
        required, several = choice.required, several and choice.several
    if required and parallel is None:
        several = False  # a model that must call goes on with the same call until its tokens are used up
    return Toolbox(tuple(tools), prompt_tools, required, several)


def _check_tool(declared: DeclaredTool) -> Tool:
    where = f"{declared.where}.function"
    if not _NAME.fullmatch(declared.name):
        raise _make_error(f"{where}.name", "must be 1 to 128 letters, digits or any of _-.:/")
    parameters = declared.parameters or _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise _make_error(f"{where}.parameters", "must be the JSON schema of an object")
    try:
        size = len(json.dumps(parameters))
    except (TypeError, ValueError, RecursionError) as error:
        raise _make_error(f"{where}.parameters", f"must be JSON: {error}") from None
    if size > MAX_BYTES:
        raise _make_error(f"{where}.parameters", f"at most {MAX_BYTES} bytes")
    return Tool(declared.name, parameters, declared.strict)


def _make_error(param: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{param}: {why}", param=param)

"""Tools and their calls as requests declare them on OpenAI's routes.

Checked fields enter, a `Toolbox` and the calls of earlier messages leave. Knows neither routes nor templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ngramspec.grammar.base import MAX_BYTES
from ngramspec.prompts.tool_calls.call_formats import Tool
from ngramspec.prompts.tool_calls.tool_prompt import Call
from ngramspec.prompts.tool_calls.toolbox import Toolbox
from ngramspec.server.error_responses import ApiError
from ngramspec.server.request_fields import Items, StrictModel

MAX_TOOLS = 128
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

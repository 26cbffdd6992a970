"""Tools and their calls as requests declare them on OpenAI's routes.

Checked fields enter, a `Toolbox` and the calls of earlier messages leave. Knows neither routes nor templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ngramspec.prompts.tool_calls.tool_prompt import Call
from ngramspec.prompts.tool_calls.toolbox import DeclaredTool, NamedTools, Toolbox, make_toolbox
from ngramspec.server.error_responses import make_field_error, require
from ngramspec.server.request_fields import Items, StrictModel

MAX_TOOLS = 1024  # OpenAI takes 128; agents that ask tool servers (MCP) declare more, most of them deferred


class FunctionDeclared(StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDeclared(StrictModel):
    type: str
    function: FunctionDeclared | None = None
    custom: Any = None


class FunctionNamed(StrictModel):
    name: str


class ToolNamed(StrictModel):
    type: str
    function: FunctionNamed | None = None
    custom: Any = None


class AllowedTools(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[ToolNamed], Field(min_length=1, max_length=MAX_TOOLS)]


class ChosenTool(ToolNamed):
    """The tool that must be called, or the tools that are allowed."""

    allowed_tools: AllowedTools | None = None


# `any`: what Mistral and Anthropic call `required`.
ToolChoice = Literal["none", "auto", "required", "any"] | ChosenTool


class FunctionCalled(StrictModel):
    name: str
    arguments: str | dict[str, Any] | None
    """JSON as text, or the object itself, as in llama.cpp; null: none."""

    @property
    def text(self) -> str:
        """The arguments as the model wrote them."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments or {}, ensure_ascii=False)


class CustomCalled(StrictModel):
    name: str
    input: str


class ToolCalled(StrictModel):
    id: str
    type: str | None = None
    function: FunctionCalled | None = None
    custom: CustomCalled | None = None


def read_toolbox(
    declared: Sequence[ToolDeclared] | None, choice: ToolChoice | None, parallel: bool | None, *, others: bool = False
) -> Toolbox:
    """Return the tools that a request lets the model call. Raises ApiError (400), InvalidInputError.

    `others`: leave out tools that are no functions (a hosted search, a client's own shell, free-form tools). No model here has a form in
    which it could call them, and agents declare them beside functions whether they are needed or not.
    """
    functions = [(i, each) for i, each in enumerate(declared or ()) if each.type == "function" or not others]
    tools = [_read_tool(each, f"tools[{i}]") for i, each in functions]
    return make_toolbox(tools, read_choice(choice), parallel)


def _read_tool(declared: ToolDeclared, where: str) -> DeclaredTool:
    if declared.type != "function":
        why = f"only tools of type 'function', got {declared.type[:40]!r}"
        if declared.type == "custom":  # no chat template has a form for calls whose input is free text
            why += "; declare a function with one parameter that is a string"
        raise make_field_error(f"{where}.type", why, "not_supported")
    return read_function(require(declared.function, f"{where}.function"), where)


def read_function(function: FunctionDeclared, where: str) -> DeclaredTool:
    """Return a function that a request declares at this place."""
    return DeclaredTool(function.name, function.description or "", function.parameters, bool(function.strict), where)


def read_choice(choice: ToolChoice | None) -> NamedTools | Literal["none", "auto", "required"] | None:
    """Return what `tool_choice` asks for, or the tools that it names. Raises ApiError (400)."""
    if not isinstance(choice, ChosenTool):
        return "required" if choice == "any" else choice
    if choice.type == "allowed_tools" and (allowed := choice.allowed_tools) is not None:
        return NamedTools([_read_name(tool) for tool in allowed.tools], required=allowed.mode == "required", several=True)
    if choice.type == "function":
        return NamedTools([_read_name(choice)])
    raise make_field_error("tool_choice", "must be 'none', 'auto', 'required' or 'any', a function's name or allowed_tools")


def _read_name(tool: ToolNamed) -> str:
    if tool.function is None:
        raise make_field_error("tool_choice", "names no function")
    return tool.function.name


def read_calls(calls: Sequence[ToolCalled] | None, where: str) -> tuple[Call, ...]:
    """Return the calls of a message of the assistant. Raises ApiError (400)."""
    made = []
    for i, call in enumerate(calls or ()):
        if call.type == "custom" and call.custom is not None:
            made.append(Call(call.id, call.custom.name, json.dumps({"input": call.custom.input})))
        elif call.type in (None, "function") and call.function is not None:
            made.append(Call(call.id, call.function.name, call.function.text))
        else:
            raise make_field_error(f"{where}.tool_calls[{i}]", "must be of type 'function', with a function, or of type 'custom'")
    return tuple(made)

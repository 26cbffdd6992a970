"""Chats as Python programs write them: messages, tools and choices in the form of OpenAI's API, as dicts.

Dicts enter, turns and a `Toolbox` leave; every error names the field at fault. Knows no template. The server has models of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeVar, cast

from ngramspec.errors import InvalidInputError
from ngramspec.prompts.tool_calls.tool_prompt import ASSISTANT, SYSTEM, TOOL, USER, Call, Turn
from ngramspec.prompts.tool_calls.toolbox import DeclaredTool, NamedTools, Toolbox, ToolChoice, make_toolbox
from ngramspec.tokenizer.encode import check_unicode

M = TypeVar("M")
PARTS = "\n"  # between the parts of a message, as in vLLM and llama.cpp
# Types of parts that no model reads here: of OpenAI's two routes, and of Anthropic's.
MEDIA = {"image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "input_file", "file", "document"}
ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}  # what templates call OpenAI's
_ROLE = re.compile("[A-Za-z][A-Za-z0-9_-]{0,63}")


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns of a chat. Raises InvalidInputError."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise _make_error("messages", 'must be a list such as [{"role": "user", "content": "…"}]', messages)
    if not messages:
        raise InvalidInputError("messages: at least one is needed", param="messages")
    return read_turns(messages, _read_message)


def read_turns(messages: Sequence[M], read: Callable[[M, str, dict[str, str]], Turn]) -> list[Turn]:
    """Return what `read` makes of each message, its place and the names of the calls before it by their ids. Raises what it raises."""
    turns: list[Turn] = []
    names: dict[str, str] = {}
    for i, message in enumerate(messages):
        turns.append(read(message, f"messages[{i}]", names))
        names |= {call.id: call.name for call in turns[-1].calls}
    return turns


def read_role(role: str, where: str) -> str:
    """Return what templates call a role. One that is none of OpenAI's is a word that the model's template may know.

    Raises InvalidInputError.
    """
    if not _ROLE.fullmatch(role):
        raise _make_error(where, f"must be one of {', '.join(ROLES)}, or a word that the model's template knows", role[:40])
    return ROLES.get(role, role)


def name_omitted(kind: str) -> str:
    """Return the text that stands for a part of a tool's result whose type is among MEDIA.

    In a user's message such a part is refused, and the user can leave it out. A result would be refused again with every message that
    follows, for the client sends it along each time. Agents write such texts themselves where they know that a model reads no images.
    """
    return f"[{kind.removeprefix('input_').removesuffix('_url')} omitted: this model reads text only]"


def _read_message(message: Any, where: str, names: Mapping[str, str]) -> Turn:
    if not isinstance(message, Mapping):
        raise _make_error(where, "must be a dict with role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _make_error(f"{where}.role", f"must be one of {', '.join(ROLES)}", role)
    given = message.get("tool_calls") or ()
    if not isinstance(given, (list, tuple)):
        raise _make_error(f"{where}.tool_calls", "must be a list", given)
    calls = tuple(_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(given))
    if calls and role != ASSISTANT:
        raise InvalidInputError(f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
    content = message.get("content")
    may_be_none = role in (ASSISTANT, TOOL) and "content" in message
    if content is None and not (calls or may_be_none):
        raise InvalidInputError(f"{where}.content: is missing", param=f"{where}.content")
    text = _join_parts(content, f"{where}.content", MEDIA if role == TOOL else ())
    if role != TOOL:
        thoughts = message.get("reasoning_content") if role == ASSISTANT else None
        return Turn(ROLES[role], text, calls, thoughts=_read_text(thoughts or "", f"{where}.reasoning_content"))
    number = _read_text(message.get("tool_call_id"), f"{where}.tool_call_id")
    name = message.get("name")
    return Turn(TOOL, text, call_id=number, name=names.get(number) if name is None else _read_text(name, f"{where}.name"))


def _read_call(call: Any, where: str) -> Call:
    if isinstance(call, Call):
        return call
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise _make_error(where, 'must be {"id": …, "type": "function", "function": {"name": …, "arguments": "…"}}', call)
    name, given = _read_text(function.get("name"), f"{where}.function.name"), function.get("arguments")
    arguments = json.dumps(given, ensure_ascii=False) if isinstance(given, Mapping) else given
    return Call(_read_text(call.get("id", ""), f"{where}.id"), name, _read_text(arguments, f"{where}.function.arguments"))


def _join_parts(content: Any, where: str, named: Container[object]) -> str:
    """Return the text of a content, in which parts of the types in `named` are named."""
    if content is None or isinstance(content, str):
        return _read_text(content or "", where)
    if not isinstance(content, (list, tuple)):
        raise _make_error(where, "must be text, or a list of parts of type text", content)
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(_read_text(part, f"{where}[{i}]"))
            continue
        if isinstance(part, Mapping) and part.get("type") in named:
            texts.append(name_omitted(part["type"]))
            continue
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise _make_error(f"{where}[{i}]", 'must be {"type": "text", "text": "…"}; models read text alone here', part)
        texts.append(_read_text(part.get("text"), f"{where}[{i}].text"))
    return PARTS.join(texts)


def read_tools(tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None = None, parallel: bool | None = None) -> Toolbox:
    """Return the tools that the model may call. `choice`: "auto", "none", "required", or a tool's name, bare or in OpenAI's form.

    Raises InvalidInputError.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise _make_error("tools", "must be a list of tools", tools)
    declared = [_read_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else None
        if choice is None:
            raise InvalidInputError("tool_choice: names no function", param="tool_choice")
    if not isinstance(choice, str | None):
        raise _make_error("tool_choice", "must be 'auto', 'none', 'required' or a tool's name", choice)
    if choice in (None, "auto", "none", "required"):
        return make_toolbox(declared, cast(ToolChoice | None, choice), parallel)
    return make_toolbox(declared, NamedTools([choice]), parallel)


def _read_tool(tool: Any, where: str) -> DeclaredTool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise _make_error(where, 'must be {"type": "function", "function": {"name": …, "parameters": {…}}}', tool)
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise _make_error(f"{where}.function.parameters", "must be a JSON schema", parameters)
    name = _read_text(function.get("name"), f"{where}.function.name")
    description = _read_text(function.get("description") or "", f"{where}.function.description")
    return DeclaredTool(name, description, None if parameters is None else dict(parameters), bool(function.get("strict")), where)


def _read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _make_error(where, "must be text", value)
    check_unicode(value, where)
    return value


def _make_error(where: str, why: str, got: object) -> InvalidInputError:
    return InvalidInputError(f"{where}: {why}, got {got!r:.80}", param=where)

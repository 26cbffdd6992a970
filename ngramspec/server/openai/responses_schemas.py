"""The shape of `/v1/responses`: what is accepted where, and what it says in the words of chats.

JSON that was parsed enters, turns, a `Toolbox` and the form of an answer leave. Knows nothing of routes or tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from ngramspec.options import MAX_INT
from ngramspec.prompts.chat_template import ANSWER, Style
from ngramspec.prompts.messages import PARTS, name_omitted
from ngramspec.prompts.tool_calls.tool_prompt import ASSISTANT, SYSTEM, TOOL, Call, Turn
from ngramspec.prompts.tool_calls.toolbox import Toolbox, make_toolbox
from ngramspec.server.error_responses import make_field_error, rename_params, require
from ngramspec.server.field_support import RESPONSES
from ngramspec.server.hosted_tools import describe_found
from ngramspec.server.openai.schemas import OpenAIRequest, Part
from ngramspec.server.request_fields import Items, ResponseFormat, Schema, StrictModel, Whole
from ngramspec.server.tool_fields import (
    MAX_TOOLS,
    AllowedTools,
    ChosenTool,
    FunctionDeclared,
    FunctionNamed,
    ToolChoice,
    ToolNamed,
    read_choice,
    read_function,
)

ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": "user", "assistant": ASSISTANT}
_TEXTS = ("input_text", "output_text", "text", "refusal")
LOGPROBS = "message.output_text.logprobs"  # what `include` calls them


# Items of calls whose fields are declared here. All others that end so are calls of tools that OpenAI hosts or defines.
_CALLS = ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
# Where such calls have what the tool found; where they have what it was asked are all fields but these and an item's own.
_FOUND = ("output", "outputs", "results", "result", "error")
_OWN = ("type", "id", "call_id", "status", "name", "server_label")


class InputItem(StrictModel):
    """A message, thoughts, a call that the assistant made, its result, or a reference to one of these by its `id`."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | Items[Part] | None = None
    summary: Items[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | Items[Part] | None = None
    hosted: SkipJsonSchema[dict[str, Any] | None] = None
    """The whole item, if it is a call of a tool that OpenAI hosts or defines, or the result of one."""

    @model_validator(mode="before")
    @classmethod
    def _keep_hosted(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind.endswith(("_call", "_call_output")) and kind not in _CALLS:
            return {"type": kind, "id": given.get("id"), "call_id": given.get("call_id"), "hosted": given}
        return given | {"hosted": None} if isinstance(given, dict) and "hosted" in given else given  # a client's field of that name is none

    def dump(self) -> dict[str, Any]:
        """Return the item as JSON has it."""
        return self.hosted or self.model_dump(exclude_none=True)


class InnerTool(FunctionDeclared):
    """A function, without the wrapping that chats have."""

    type: str
    name: str = ""


class FlatTool(InnerTool):
    """A function, or a namespace of functions, such as the tools of an MCP server in Codex."""

    tools: Annotated[Items[InnerTool], Field(max_length=MAX_TOOLS)] | None = None

    def list_functions(self, where: str) -> list[tuple[InnerTool, str]]:
        """Return the functions, as the model knows them, and their places in the request."""
        if self.type == "namespace":
            inner = [(tool, f"{where}.tools[{i}]") for i, tool in enumerate(self.tools or ()) if tool.type == "function"]
            return [(tool.model_copy(update={"name": join_name(self.name, tool.name)}), place) for tool, place in inner]
        return [(self, where)] if self.type == "function" else []


def join_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function of a namespace."""
    return f"{namespace}__{name}" if namespace else name


class FlatChoice(StrictModel):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[Items[FlatTool], Field(max_length=MAX_TOOLS)] | None = None


class TextFormat(StrictModel):
    type: str
    name: str | None = None
    description: str | None = None
    json_schema: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(StrictModel):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(StrictModel):
    effort: str | None = None


class ResponsesRequest(OpenAIRequest):
    route = RESPONSES

    input: str | Annotated[Items[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT), Whole] | None = None
    tools: Annotated[Items[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    metadata: Any = None
    """Given back."""
    include: Items[str] | None = None
    previous_response_id: str | None = None
    """The response that the input goes on from. Its instructions are not taken over."""
    store: bool | None = None
    """False: no later request goes on from this response."""
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), Whole] | None = None
    enable_response_messages: bool | None = None
    """The response shows prompt and output as the model has them, in vLLM's words."""

    @property
    def n_logprobs(self) -> int | None:
        """Tokens beside the one that was taken whose log-probabilities are told; None: not even its own is."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def check(self) -> None:
        """Raises ApiError (400) for what this server does not do. Takes the form of the answer from where this route has it."""
        for name, asked, why in (
            ("n", self.n not in (None, 1), "a response is one text"),
            ("response_format", self.response_format, "here it is text.format"),
        ):
            if asked:
                raise make_field_error(name, why, "not_supported")
        if self.text is not None and (wanted := self.text.format) is not None:
            named = {"json_schema": {"schema": wanted.json_schema}} if wanted.type == "json_schema" else {}
            self.response_format = ResponseFormat.model_validate({"type": wanted.type} | named)

    def fill_references(self, get_item: Callable[[str, str], dict[str, Any]]) -> None:
        """Put items of earlier responses in place of references. `get_item` takes an id and the field that has it. Raises ApiError."""
        if isinstance(self.input, str):
            return
        names = set[str]()
        for i, item in enumerate(self.input):
            if item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None):
                name = require(item.id, where := f"input[{i}].id")
                if name in names:
                    raise make_field_error(where, f"{name[:100]!r} is referred to twice", "duplicate_item")
                names.add(name)
                self.input[i] = InputItem.model_validate(get_item(name, where))

    def go_on(self, items: list[dict[str, Any]]) -> None:
        """Put the items of earlier responses before the input."""
        given = [InputItem(type="message", role="user", content=self.input)] if isinstance(self.input, str) else self.input
        self.input = [*(InputItem.model_validate(item) for item in items), *given]

    def dump_items(self) -> list[dict[str, Any]]:
        """Return the items of the input as JSON has them."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.dump() for item in self.input]

    def make_style(self) -> Style:
        """Return the style in which the template is rendered."""
        effort = self.reasoning and self.reasoning.effort
        return Style(variables={"reasoning_effort": effort}) if effort else ANSWER

    @property
    def box(self) -> Toolbox:
        """What may be called. Raises ApiError (400)."""
        functions = [each for i, tool in enumerate(self.tools or ()) for each in tool.list_functions(f"tools[{i}]")]
        if len(functions) > MAX_TOOLS:
            raise make_field_error("tools", f"at most {MAX_TOOLS} functions, got {len(functions)}")
        choice: ToolChoice | None
        if isinstance(given := self.tool_choice, FlatChoice):
            allowed = None
            if given.mode is not None and given.tools:
                each = [
                    ToolNamed(type=tool.type, function=FunctionNamed(name=tool.name)) for tool in given.tools if tool.type == "function"
                ]
                allowed = AllowedTools(mode=given.mode, tools=each)
            name = None if given.name is None else FunctionNamed(name=given.name)
            choice = ChosenTool(type=given.type, function=name, allowed_tools=allowed)
        else:
            choice = given
        tools = [read_function(tool, place) for tool, place in functions]
        return make_toolbox(tools, read_choice(choice), self.parallel_tool_calls)

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """The namespace and the name of each function that has one, by the name by which the model knows it."""
        spaces = [tool for tool in self.tools or () if tool.type == "namespace"]
        return {join_name(space.name, tool.name): (space.name, tool.name) for space in spaces for tool in space.tools or ()}

    @staticmethod
    def _list_thoughts(item: InputItem) -> list[Part]:
        """Return the parts of a chain of thought: its text, or else its summary."""
        return (item.content if isinstance(item.content, list) else None) or item.summary or []

    @property
    def turns(self) -> list[Turn]:
        """The messages of a chat. Raises ApiError (400)."""
        turns = [Turn(SYSTEM, self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*turns, Turn("user", self.input)]
        names: dict[str, str] = {}
        grown: dict[int, list[Call]] = {}  # calls of the turn with this number, to which later items add
        thoughts = ""  # before what the assistant says or calls next
        for i, item in enumerate(self.input):
            if item.type == "reasoning":
                thoughts = PARTS.join(part.text or "" for part in self._list_thoughts(item))
                continue
            if item.type == "mcp_list_tools":  # tools that are called at OpenAI only
                continue
            for turn in _read_hosted(item) if item.hosted is not None else [_read_turn(item, f"input[{i}]", names)]:
                if turn.role == ASSISTANT:
                    turn = turn._replace(thoughts=thoughts)
                thoughts = ""
                names |= {call.id: call.name for call in turn.calls}
                if turn.calls and turns and turns[-1].role == ASSISTANT:
                    last = turns[-1]
                    grown.setdefault(len(turns) - 1, list(last.calls)).extend(turn.calls)
                    turns[-1] = last._replace(thoughts=last.thoughts or turn.thoughts)
                elif turn.role == SYSTEM and len(turns) == 1 and turns[0].role == SYSTEM:
                    turns[0] = Turn(SYSTEM, f"{turns[0].content}\n\n{turn.content}")
                else:
                    turns.append(turn)
        for number, calls in grown.items():
            turns[number] = turns[number]._replace(calls=tuple(calls))
        if not turns:
            raise make_field_error("input", "has no message")
        return turns


def _read_turn(item: InputItem, where: str, names: dict[str, str]) -> Turn:
    """Return an item as a turn. `names`: of the calls so far, by their ids. Raises ApiError (400)."""
    match item.type or "message":
        case "message":
            if item.role not in ROLES:
                got = "nothing" if item.role is None else repr(item.role[:40])
                raise make_field_error(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {got}")
            return Turn(ROLES[item.role], _join_text(require(item.content, f"{where}.content"), f"{where}.content"))
        case "function_call":
            call = Call(
                require(item.call_id, f"{where}.call_id"),
                join_name(item.namespace, require(item.name, f"{where}.name")),
                require(item.arguments, f"{where}.arguments"),
            )
            return Turn(ASSISTANT, "", (call,))
        case "custom_tool_call":
            text = json.dumps({"input": require(item.input, f"{where}.input")})
            return Turn(ASSISTANT, "", (Call(require(item.call_id, f"{where}.call_id"), require(item.name, f"{where}.name"), text),))
        case "function_call_output" | "custom_tool_call_output":
            number = require(item.call_id, f"{where}.call_id")
            given = require(item.output, f"{where}.output")
            output = _join_text(given if isinstance(given, str) else [part.name_media() for part in given], f"{where}.output")
            return Turn(TOOL, output, call_id=number, name=names.get(number))
        case "compaction":
            why = "this summary of earlier items is encrypted, and only OpenAI can read it; send the items themselves"
            raise make_field_error(f"{where}.type", why, "not_supported")
        case other:
            kinds = "'message', 'reasoning', 'item_reference', or end in '_call' or '_call_output'"
            raise make_field_error(f"{where}.type", f"must be {kinds}, got {other[:40]!r}", "not_supported")


def _read_hosted(item: InputItem) -> list[Turn]:
    """Return a call of a tool that OpenAI hosts or defines, and what it found, as if it were a function's."""
    given, kind, number = item.hosted or {}, item.type or "", item.call_id or item.id or ""
    if kind.endswith("_output"):
        return [Turn(TOOL, describe_found(given.get("output")), call_id=number, name=kind.removesuffix("_call_output"))]
    name = given.get("name")
    asked = {name: value for name, value in given.items() if name not in (*_FOUND, *_OWN) and value is not None}
    arguments = given["arguments"] if isinstance(given.get("arguments"), str) else json.dumps(asked, ensure_ascii=False)
    call = Turn(ASSISTANT, "", (Call(number, name if isinstance(name, str) else kind.removesuffix("_call"), arguments),))
    if item.call_id is not None:  # the client runs it, and sends what it found as the next item
        return [call]
    found = [given[name] for name in _FOUND if given.get(name) is not None]
    is_image = kind == "image_generation_call"
    texts = [name_omitted("image")] if is_image else map(describe_found, found or ["[omitted: only OpenAI has what was found]"])
    return [call, Turn(TOOL, PARTS.join(texts), call_id=number, name=call.calls[0].name)]


def _join_text(content: str | list[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type not in _TEXTS:
            why = f"only parts of type 'input_text' and 'output_text', got {part.type[:40]!r}"
            raise make_field_error(f"{where}[{i}]", why, "not_supported")
    return PARTS.join((part.refusal if part.type == "refusal" else part.text) or "" for part in content)


def in_its_words() -> AbstractContextManager[None]:
    """Rename fields in ApiErrors raised inside it to what this route calls them, from what chats do."""
    return rename_params(("response_format.json_schema", "text.format"), ("response_format", "text.format"), (".function", ""))


# ------------------------------------------------------------------ answers


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress"]
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    metrics: dict[str, Any] | None = None
    timings: dict[str, float] | None = None
    input_messages: list[dict[str, Any]] | None = None
    output_messages: list[dict[str, Any]] | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: bool


class ResponseInputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int

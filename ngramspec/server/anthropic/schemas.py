"""Requests and answers of Anthropic's routes, as pydantic models, and what requests say in the words of chats.

JSON that was parsed enters, turns and a `Toolbox` leave. Knows nothing of routes, tokenizers or templates.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from ngramspec.options import MAX_INT
from ngramspec.prompts.chat_template import ANSWER, Style
from ngramspec.prompts.tool_calls.tool_prompt import ASSISTANT, SYSTEM, TOOL, USER, Call, Turn
from ngramspec.prompts.tool_calls.toolbox import Toolbox
from ngramspec.sampling_params import MAX_STOPS
from ngramspec.server.error_responses import make_field_error, require
from ngramspec.server.hosted_tools import describe_found, find_references
from ngramspec.server.openai.schemas import OpenAIRequest, Part, StopString
from ngramspec.server.request_fields import Items, ResponseFormat, Schema, StrictModel, Whole
from ngramspec.server.tool_fields import (
    MAX_TOOLS,
    ChosenTool,
    FunctionDeclared,
    FunctionNamed,
    ToolChoice,
    ToolDeclared,
    read_toolbox,
)

ROLES = (USER, ASSISTANT, SYSTEM)
# How a system block of Claude Code's begins that differs in every request: with it no prompt would begin as an earlier one did.
BILLING_HEADER = "x-anthropic-billing-header:"


# What stands above the descriptions of tools that a conversation loads.
TOOLS_LOADED = "These functions can be called from now on:"


class MessagesTool(StrictModel):
    name: str
    type: str | None = None
    """`custom`: a function. Tools of other types run at Anthropic, and are left out."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """The tool is offered once a block of the conversation refers to it, and described there."""

    @property
    def is_function(self) -> bool:
        return self.type in (None, "custom")

    def make_function(self) -> FunctionDeclared:
        return FunctionDeclared(name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict)

    def describe(self) -> str:
        """Return the tool as one line of JSON, in the form in which prompts describe tools."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.input_schema}
        return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


class DocumentSource(StrictModel):
    """The place of a document's text: `data` if `type` is text, `content` if it is content."""

    type: str
    data: str | None = None
    content: str | Items[Part] | None = None


class DocumentPart(Part):
    """A text, a document, or what a search has found."""

    source: str | DocumentSource | None = None
    title: str | None = None
    context: str | None = None

    def spell_document(self, content: str | Sequence[Part] | None) -> Self:
        """Return a document, or a search result of this content, as text in the form of Anthropic's guide to prompts, if it is text."""
        said = content if self.type == "search_result" else None
        if self.type == "document" and isinstance(self.source, DocumentSource):
            said = {"text": self.source.data, "content": self.source.content}.get(self.source.type)
        if said is not None and not isinstance(said, str):
            is_text = all(part.type == "text" and part.text is not None for part in said)
            said = "\n".join(part.text or "" for part in said) if is_text else None
        if said is None:
            return self
        heads = {"source": self.source if isinstance(self.source, str) else None, "title": self.title, "context": self.context}
        lines = [f"<{name}>{value}</{name}>" for name, value in heads.items() if value]
        text = "\n".join(("<document>", *lines, "<document_content>", said, "</document_content>", "</document>"))
        return self.model_copy(update={"type": "text", "text": text})


class ResultBlock(DocumentPart):
    """A text, a document, what a search has found, or the name of a tool that one has found."""

    tool_name: str | None = None
    content: str | Items[Part] | None = None


class ToolChanged(StrictModel):
    """The tool that a message adds or removes: its name, or the whole tool."""

    name: str | None = None
    definition: MessagesTool | None = None


class Block(DocumentPart):
    """A text, a document, a call that the assistant made, its result, a chain of thought, or a change of the tools."""

    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Items[ResultBlock] | None = None
    found: SkipJsonSchema[Any] = None
    """The content of a block whose type ends in `_tool_result`: what a tool found that ran at Anthropic."""
    thinking: str | None = None
    tool: ToolChanged | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_found(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(kind := given.get("type"), str) and kind.endswith("_tool_result"):
            return given | {"content": None, "found": given.get("content")}
        return given | {"found": None} if isinstance(given, dict) and "found" in given else given  # a client's field of that name is none

    def list_tools(self, deferred: Mapping[str, MessagesTool]) -> list[MessagesTool]:
        """Return the tools that this block describes to the model. `deferred`: the request's tools that their declaration does not."""
        if self.type == "tool_addition" and self.tool is not None:
            named = [self.tool.definition or deferred.get(self.tool.name or "")]
        elif self.type == "tool_result" and isinstance(self.content, list):
            named = [deferred.get(each.tool_name or "") for each in self.content if each.type == "tool_reference"]
        else:
            named = [deferred.get(name) for name in find_references(self.found)]
        return [tool for tool in named if tool is not None and tool.is_function]


class ChatMessage(StrictModel):
    role: str
    content: str | Items[Block]


class MessagesToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    type: str


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    json_schema: Schema = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(OpenAIRequest):
    """A conversation, and what the answer may call. Fields that no one here knows are ignored, such as those of Anthropic's betas."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    system: str | Items[Part] | None = None
    tools: Annotated[Items[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    """Told to templates that read `enable_thinking`."""
    output_config: OutputConfig | None = None

    @property
    def style(self) -> Style:
        """How the template is asked. A conversation that ends with the assistant's message is continued within it."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            variables["reasoning_effort"] = self.output_config.effort
        return ANSWER._replace(variables=variables)

    @property
    def toolbox(self) -> Toolbox:
        """What may be called, without the tools that the conversation has not loaded or has removed. Raises ApiError (400)."""
        deferred, late, removed = self._find_deferred(), dict[str, MessagesTool](), set[str]()
        for block in (block for message in self.messages if not isinstance(message.content, str) for block in message.content):
            loaded = {tool.name: tool for tool in block.list_tools(deferred)}
            late |= loaded
            if block.type in ("tool_addition", "tool_removal") and block.tool is not None:
                changed = {block.tool.name or "", *loaded}
                (removed.difference_update if block.type == "tool_addition" else removed.update)(changed)  # in place: there may be many
        tools = [tool for tool in self.tools or () if tool.name not in late or tool.name in deferred]
        declared = [
            ToolDeclared(type="function", function=tool.make_function())
            if tool.is_function and tool.name not in removed and (tool.name in late or not tool.defer_loading)
            else ToolDeclared(type="", function=None)
            for tool in [*tools, *(tool for name, tool in late.items() if name not in deferred)]
        ]
        given, choice = self.tool_choice, None
        choices: dict[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
        if given is not None:
            choice = choices.get(given.type) or ChosenTool(type="function", function=FunctionNamed(name=given.name or ""))
        parallel = False if given is not None and given.disable_parallel_tool_use else None
        box = read_toolbox(declared, choice, parallel, others=True)
        return dataclasses.replace(box, prompt_tools=tuple(tool for tool in box.prompt_tools if tool["function"]["name"] not in late))

    def _find_deferred(self) -> dict[str, MessagesTool]:
        return {tool.name: tool for tool in self.tools or () if tool.defer_loading}

    def make_turns(self) -> list[Turn]:
        """Return the messages of a chat; neighbours of one role are one. Raises ApiError (400)."""
        system = _join(self.system or "", "system")
        turns = [[Turn(SYSTEM, system)]] if system else []
        names: dict[str, str] = {}
        deferred = self._find_deferred()
        for i, message in enumerate(self.messages):
            where = f"messages[{i}]"
            if message.role not in ROLES:
                raise make_field_error(f"{where}.role", f"must be user or assistant, got {message.role[:40]!r}")
            for turn in _make_turns(message, where, names, deferred):
                if turns and turns[-1][0].role == turn.role != TOOL:
                    turns[-1].append(turn)
                else:
                    turns.append([turn])
        return [_join_turns(each) for each in turns]


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT), Whole]
    """More than the context holds is as much as it holds."""
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None

    @model_validator(mode="after")
    def _in_the_words_of_chats(self) -> Self:
        self.stop = self.stop_sequences or self.stop
        if self.output_config is not None and (wanted := self.output_config.format) is not None:
            self.response_format = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"schema": wanted.json_schema}})
        return self


def _join_turns(turns: Sequence[Turn]) -> Turn:
    """Return neighbours of one role as one turn."""
    if len(turns) == 1:
        return turns[0]
    content, thoughts = ("\n".join(filter(None, texts)) for texts in zip(*((turn.content, turn.thoughts) for turn in turns), strict=True))
    return turns[0]._replace(content=content, calls=tuple(call for turn in turns for call in turn.calls), thoughts=thoughts)


def _make_turns(message: ChatMessage, where: str, names: dict[str, str], deferred: Mapping[str, MessagesTool]) -> Iterator[Turn]:
    """Yield the turns of a message. `names`: of the tools called so far, by the calls' ids. Raises ApiError (400)."""
    if isinstance(message.content, str):
        yield Turn(message.role, message.content)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    is_told = False  # there is a turn already
    for i, given in enumerate(message.content):
        place = f"{where}.content[{i}]"
        block = given.spell_document(given.content) if message.role == USER else given
        match block.type:
            case "text":
                texts.append(require(block.text, f"{place}.text"))
            case "thinking":
                thoughts += [block.thinking] if block.thinking and message.role == ASSISTANT else []
            case "redacted_thinking":
                pass
            case "compaction" if message.role == ASSISTANT:  # a summary of what was said before, which stands here, too
                texts += [block.content] if isinstance(block.content, str) else []
            case kind if message.role == ASSISTANT and kind.endswith("tool_use"):
                arguments = json.dumps(require(block.input, f"{place}.input"), ensure_ascii=False)
                call = Call(require(block.id, f"{place}.id"), require(block.name, f"{place}.name"), arguments)
                calls.append(call)
                names[call.id] = call.name
            case kind if message.role == ASSISTANT and kind.endswith("_tool_result"):
                call_id = require(block.tool_use_id, f"{place}.tool_use_id")
                if texts or calls or thoughts:
                    yield Turn(ASSISTANT, "\n".join(texts), tuple(calls), thoughts="\n".join(thoughts))
                    texts, calls, thoughts = [], [], []
                is_told = True
                text = "\n".join(filter(None, (describe_found(block.found), _describe_tools(block.list_tools(deferred)))))
                yield Turn(TOOL, text, call_id=call_id, name=names.get(call_id))
            case "tool_result" if message.role == USER:
                if texts:
                    yield Turn(USER, "\n".join(texts))
                    texts = []
                call_id = require(block.tool_use_id, f"{place}.tool_use_id")
                content = block.content or ""
                if not isinstance(content, str):
                    parts = [part.spell_document(part.content).name_media() for part in content if part.type != "tool_reference"]
                    content = _join(parts, f"{place}.content")
                text = "\n".join(filter(None, (content, _describe_tools(block.list_tools(deferred)))))
                yield Turn(TOOL, text, call_id=call_id, name=names.get(call_id))
            case "tool_addition" | "tool_removal" if message.role == SYSTEM:
                texts += filter(None, [_describe_tools(block.list_tools(deferred))])
            case other:  # named as in Anthropic's errors: Claude Code finds an image by its place, leaves it out and tries again
                why = f"no blocks of this type in a message of the {message.role}; text and tools only"
                raise make_field_error(f"{place}.{other[:40]}", why, "not_supported")
    if texts or calls or thoughts or (message.role == ASSISTANT and not is_told):
        yield Turn(message.role, "\n".join(texts), tuple(calls), thoughts="\n".join(thoughts))


def _describe_tools(tools: Sequence[MessagesTool]) -> str:
    return "\n".join([TOOLS_LOADED, *(tool.describe() for tool in tools)]) if tools else ""


def _join(content: str | Sequence[Part], where: str) -> str:
    """Return the text of blocks. Raises ApiError (400)."""
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if block.type != "text":
            raise make_field_error(f"{where}[{i}]", f"only blocks of type 'text', got {block.type[:40]!r}", "not_supported")
    texts = [require(block.text, f"{where}[{i}].text") for i, block in enumerate(content)]
    return "\n".join(text for text in texts if not text.startswith(BILLING_HEADER))


# ------------------------------------------------------------------ answers


class MessagesUsage(BaseModel):
    input_tokens: int
    """Tokens of the prompt that were computed."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessagesResponse(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage
    metrics: dict[str, Any] | None = None
    timings: dict[str, float] | None = None


class CountTokensResponse(BaseModel):
    input_tokens: int

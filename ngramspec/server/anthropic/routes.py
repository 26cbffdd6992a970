"""`/v1/messages` as Anthropic has it, for text and tools: messages through the model's own template, content blocks whole or as events.

A checked request becomes one `EngineInput` as a chat's does; its completion or deltas become blocks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ngramspec.outputs import BLOCK, Choice, Completion, Delta
from ngramspec.prompts.chat_template import Prompts
from ngramspec.prompts.tool_calls.call_scanner import TextDelta, ThoughtDelta, ToolCallArguments, ToolCallStart
from ngramspec.prompts.tool_calls.tool_prompt import ASSISTANT
from ngramspec.server.anthropic.schemas import CountTokensRequest, CountTokensResponse, MessagesRequest, MessagesResponse
from ngramspec.server.auth import Identity, identify
from ngramspec.server.engine_input import EngineInput
from ngramspec.server.error_responses import format_anthropic_error, rename_params
from ngramspec.server.middleware import ParsedBodyRoute
from ngramspec.server.openai.handler import Conversation, InputHandler, read_arguments
from ngramspec.server.queue import Piece
from ngramspec.server.sse import GENERATES, EventStream
from ngramspec.server.state import ServerState

Event = dict[str, Any]


def make_router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["anthropic"], route_class=ParsedBodyRoute)
    prompts = state.prompts

    @routes.post("/v1/messages", response_model=MessagesResponse, response_model_exclude_unset=True, responses=GENERATES)
    async def create_message(body: MessagesRequest, http: Request, identity: Annotated[Identity, Depends(identify)]) -> Any:
        """Answer a conversation with text, or with calls of tools."""
        with _rename_params():
            handler = _MessageHandler(state, prompts, body, identity)
            with state.admission.reserve() as reservation:
                inputs = [await handler.prepare_input(state.encoders, identity.tenant)]
                if handler.streams:
                    events = handler.stream_events(state.admission.stream(reservation, http, inputs), len(inputs[0].prompt))
                    return EventStream(
                        reservation, events, done=False, named=True, ping={"type": "ping"}, format_error=format_anthropic_error
                    )
                (completion,) = await state.admission.complete(reservation, http, inputs)
                return handler.answer(completion)

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest, identity: Annotated[Identity, Depends(identify)]) -> CountTokensResponse:
        """Count the tokens of a prompt, also of one that is too long to be answered."""
        with _rename_params():
            conversation = _make_conversation(state, prompts, body)
            with state.admission.reserve():
                n = await state.encoders.run(identity.tenant, conversation.n_chars, conversation.count_tokens)
                return CountTokensResponse(input_tokens=n)

    return routes


def _make_conversation(state: ServerState, prompts: Prompts, body: CountTokensRequest) -> Conversation:
    """Return the conversation that a request asks to continue. Raises ApiError (400)."""
    turns = body.make_turns()
    style = body.style
    if turns and turns[-1].role == ASSISTANT and not turns[-1].calls:  # the answer goes on with it
        style = style._replace(answer_follows=False, goes_on=True)
    return Conversation(state, prompts, turns, body.toolbox, "messages", style)


class _MessageHandler(InputHandler):
    """One request of /v1/messages."""

    def __init__(self, state: ServerState, prompts: Prompts, body: MessagesRequest, identity: Identity) -> None:
        super().__init__(state, body, identity, "msg_")
        self._body, self._caches, self._limits = body, state.engine.config.prefix_cache, state.limits
        self._conversation = _make_conversation(state, prompts, body)
        self.n_chars = self._conversation.n_chars
        self._length_reason = "max_tokens"

    def make_input(self) -> EngineInput:
        """Return what the engine is asked; for `Encoders`. Raises ApiError, ValueError."""
        ids = self._conversation.encode(self._body, self._body.max_tokens)
        room = self._conversation.count_room(len(ids))
        max_tokens = min(self._body.max_tokens, room)
        if self._limits.count_room(len(ids)) == room < self._body.max_tokens:
            self._length_reason = "model_context_window_exceeded"
        return self._conversation.make_input(ids, self._body, self.hints, max_tokens=max_tokens, n=1, logprobs=None)

    def compile_grammar(self, asked: EngineInput) -> None:
        """Compile the request's grammar, which may take seconds. Raises ApiError (400)."""
        self._conversation.compile_grammar(asked)

    # ------------------------------------------------------------------ answers

    def answer(self, completion: Completion) -> dict[str, Any]:
        blocks = _Blocks(self._conversation, self._length_reason)
        for _ in blocks.take(completion.choices[0]):
            pass
        head = self._begin(blocks.content) | blocks.describe_stop()
        return head | {"usage": self._describe_usage(completion)} | self.describe_extras([completion])

    async def stream_events(self, pieces: AsyncIterator[Piece], n_prompt: int) -> AsyncIterator[Event]:
        """Yield what is added to which block, between the message's beginning and its end."""
        blocks = _Blocks(self._conversation, self._length_reason)
        usage = {"input_tokens": n_prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
        yield {"type": "message_start", "message": self._begin([]) | {"stop_reason": None, "stop_sequence": None, "usage": usage}}
        async for _, delta in pieces:
            for event in blocks.take(delta):
                yield event
            if delta.completion is not None:
                last = {"type": "message_delta", "delta": blocks.describe_stop(), "usage": self._describe_usage(delta.completion)}
                yield last | self.describe_extras([delta.completion])
                yield {"type": "message_stop"}

    def _begin(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content}

    def _describe_usage(self, completion: Completion) -> dict[str, int]:
        n_prompt, n_read = len(completion.prompt_token_ids), completion.cached_tokens
        n_made = max((n_prompt - 1) // BLOCK * BLOCK - n_read, 0) if self._caches else 0  # whole blocks, which another request may take
        return {
            "input_tokens": n_prompt - n_read - n_made,
            "cache_creation_input_tokens": n_made,
            "cache_read_input_tokens": n_read,
            "output_tokens": len(completion.token_ids),
        }


class _Blocks:
    """The content blocks of a message as they grow, and the events that tell of them."""

    def __init__(self, conversation: Conversation, length_reason: str) -> None:
        """Begin a message. `length_reason`: why one ends that has as many tokens as it may have."""
        self.content: list[dict[str, Any]] = []
        self._length_reason = length_reason
        self._parser = conversation.make_stream_parser()
        self._is_open = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def take(self, part: Choice | Delta) -> Iterator[Event]:
        """Yield what a part adds. One with a `finish_reason` is the last."""
        for event in self._parser.parse(part):
            match event:
                case TextDelta(text):
                    if not self._is_open or self.content[-1]["type"] != "text":
                        yield from self._end()
                        yield self._begin({"type": "text", "text": ""})
                    self.content[-1]["text"] += text
                    yield self._describe("content_block_delta", delta={"type": "text_delta", "text": text})
                case ThoughtDelta(text):
                    if not self._is_open or self.content[-1]["type"] != "thinking":
                        yield from self._end()
                        yield self._begin({"type": "thinking", "thinking": "", "signature": ""})
                    self.content[-1]["thinking"] += text
                    yield self._describe("content_block_delta", delta={"type": "thinking_delta", "thinking": text})
                case ToolCallStart(name):
                    yield from self._end()
                    yield self._begin({"type": "tool_use", "id": f"toolu_{self._parser.reply.calls[-1].id}", "name": name, "input": {}})
                case ToolCallArguments(text):
                    yield self._describe("content_block_delta", delta={"type": "input_json_delta", "partial_json": text})
        if part.finish_reason is not None:
            yield from self._end()
            self._finish_reason, self._stop_reason = self._parser.get_finish_reason(part.finish_reason), part.stop_reason

    def describe_stop(self) -> dict[str, str | None]:
        """Return why the message ended."""
        if self._finish_reason == "stop" and isinstance(self._stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop_reason}
        reasons = {"length": self._length_reason, "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(self._finish_reason or "", "end_turn"), "stop_sequence": None}

    def _begin(self, block: dict[str, Any]) -> Event:
        self.content.append(block)
        self._is_open = True
        return self._describe("content_block_start", content_block=dict(block))

    def _end(self) -> Iterator[Event]:
        """End the last block, if it has not ended."""
        if not self._is_open:
            return
        self._is_open = False
        if self.content[-1]["type"] == "tool_use":
            self.content[-1]["input"] = read_arguments(self._parser.reply.calls[len(self._calls) - 1].arguments)
        yield self._describe("content_block_stop")

    @property
    def _calls(self) -> list[dict[str, Any]]:
        return [block for block in self.content if block["type"] == "tool_use"]

    def _describe(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "index": len(self.content) - 1} | more


def _rename_params() -> AbstractContextManager[None]:
    """Rename fields in ApiErrors raised inside it to what Anthropic calls them, from what OpenAI does."""
    return rename_params(
        ("response_format.json_schema", "output_config.format"),
        ("response_format", "output_config.format"),
        (".function.parameters", ".input_schema"),
        (".function", ""),
    )

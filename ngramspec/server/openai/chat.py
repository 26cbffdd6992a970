"""`/v1/chat/completions` as OpenAI has it: messages through the model's own template, one answer or several.

A checked request becomes one work; its completion or deltas become an answer or a stream of pieces. Text only, and no tools.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ngramspec.batch.types import Choice, Completion, Delta, TokenLogprob
from ngramspec.server.admission import Work
from ngramspec.server.auth import Identity, identify
from ngramspec.server.errors import ApiError, refusing
from ngramspec.server.events import GENERATES, EventStream
from ngramspec.server.openai import logprobs
from ngramspec.server.openai.handler import CompletionHandler
from ngramspec.server.openai.schemas import ChatRequest, ChatResponse, Message, Part
from ngramspec.server.prompts import Prompts, Turn
from ngramspec.server.state import State
from ngramspec.server.token_texts import TokenTexts

KIND = "chat.completion"
CHUNK = "chat.completion.chunk"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""OpenAI's roles, and what templates call them."""


def router(state: State) -> APIRouter:
    routes = APIRouter(prefix="/v1", tags=["openai"])
    prompts, texts = Prompts(state.engine), TokenTexts(state.engine.tokenizer)

    @routes.post("/chat/completions", response_model=ChatResponse, response_model_exclude_unset=True, responses=GENERATES)
    async def chat(body: ChatRequest, http: Request, identity: Annotated[Identity, Depends(identify)]) -> Any:
        """Answer a conversation."""
        handler = _ChatHandler(state, prompts, texts, body, identity)
        with state.admission.reserve(handler.n) as reservation:
            works = [await asyncio.to_thread(handler.work)]
            if handler.streams:
                return EventStream(reservation, handler.events(state.admission.stream(reservation, http, works)))
            (completion,) = await state.admission.results(reservation, http, works)
            return handler.answer(completion)

    return routes


class _ChatHandler(CompletionHandler):
    """One request of /v1/chat/completions."""

    def __init__(self, state: State, prompts: Prompts, texts: TokenTexts, body: ChatRequest, identity: Identity) -> None:
        super().__init__(state, body, identity, "chatcmpl")
        self._engine, self._bounds, self._limits = state.engine, state.bounds, state.settings.limits
        self._prompts, self._texts, self._body = prompts, texts, body
        self.n = 1 if body.n is None else body.n
        for name in ("tools", "functions"):
            if getattr(body, name):
                raise _unsupported(name, "this server calls no tools")
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs", param="top_logprobs")
        if not prompts.has_chat_template:
            raise _unsupported("messages", "this model has no chat template; /v1/completions continues texts")
        if len(body.messages) > self._engine.max_model_len:
            why = f"there are {len(body.messages)}; this server takes {self._engine.max_model_len} tokens"
            raise ApiError(400, f"messages: {why}", param="messages", code="context_length_exceeded")
        self._turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(body.messages)]
        self._prediction = None if body.prediction is None else _text(body.prediction.content, "prediction.content")

    def work(self) -> Work:
        """Raises ApiError. Renders and encodes; may take a while."""
        body = self._body
        with refusing():
            ids = self._prompts.chat(self._turns)
            self._bounds.check_prompt(len(ids), "messages")
            if not ids:
                raise ApiError(400, "messages: the model's chat template makes nothing of them", param="messages")
            if self._prediction is not None:
                self.hints["prediction"] = self._engine.encode_text(self._prediction)
        asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        left = max(min(self._engine.max_model_len - len(ids), self._limits.output_tokens // self.n), 1)
        top = (body.top_logprobs or 0) if body.logprobs else None
        params = body.params(max_tokens=left if asked is None else asked, n=self.n, logprobs=top)
        self._bounds.check(params)
        body.check_form(self._engine)
        return Work(ids, params, self.hints)

    # ------------------------------------------------------------------ answers

    def answer(self, completion: Completion) -> dict[str, Any]:
        answer = self.head(KIND) | {"choices": [self._choice(choice) for choice in completion.choices]}
        return answer | {"usage": self.usage([completion])} | self.extras([completion])

    def _choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
        } | self.told_sources(choice)

    async def events(self, pieces: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[dict[str, Any]]:
        """The pieces of a stream: for each choice who speaks, what it says, and why it ends."""
        head = self.chunk(CHUNK)
        begun: set[int] = set()
        completions: list[Completion] = []
        async for _, delta in pieces:
            if delta.index not in begun:
                begun.add(delta.index)
                yield head | {"choices": [_piece(delta.index, {"role": "assistant", "content": "", "refusal": None})]}
            if delta.text or (delta.token_ids and (self._body.logprobs or self.sources)):
                said = _piece(delta.index, {"content": delta.text}) | {"logprobs": self._logprobs(delta.logprobs)}
                yield head | {"choices": [said | self.told_sources(delta)]}
            if delta.finish_reason is not None:
                yield head | {"choices": [_piece(delta.index, {}, delta.finish_reason)]}
            if delta.completion is not None:
                completions.append(delta.completion)
        for last in self.closing(CHUNK, completions):
            yield last

    def _logprobs(self, found: list[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if found is None else logprobs.chat(self._texts, found)


def _piece(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _turn(message: Message, where: str) -> Turn:
    """Raises ApiError."""
    if message.tool_calls or message.function_call or message.role in ("tool", "function"):
        raise _unsupported(where, "this server calls no tools")
    if message.role not in ROLES:
        raise ApiError(400, f"{where}.role: must be one of {', '.join(ROLES)}, got {message.role[:40]!r}", param=f"{where}.role")
    if message.content is None:
        raise ApiError(400, f"{where}.content: is missing", param=f"{where}.content")
    return Turn(ROLES[message.role], _text(message.content, f"{where}.content"))


def _text(content: str | list[Part], where: str) -> str:
    """The text of a content and of its parts, end to end. Raises ApiError."""
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text":
            raise _unsupported(f"{where}[{i}]", f"only parts of type 'text', got {part.type[:40]!r}")
        if part.text is None:
            raise ApiError(400, f"{where}[{i}].text: is missing", param=f"{where}[{i}].text")
    return "".join(part.text or "" for part in content)


def _unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}", param=param, code="not_supported")

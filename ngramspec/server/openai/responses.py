"""`/v1/responses` as OpenAI has it, for text and calls of functions: items enter, items leave, whole or event by event.

A checked request becomes one `EngineInput` as a chat's does; its completion or deltas become items. Unless `store` is false, what it says
and its answer are kept for requests that go on from it.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from ngramspec.engine.llm_engine import Request as EngineRequest
from ngramspec.outputs import Choice, Completion, Delta, TokenLogprob
from ngramspec.prompts.chat_template import Prompts
from ngramspec.prompts.tool_calls.call_scanner import TextDelta, ThoughtDelta, ToolCallArguments, ToolCallStart
from ngramspec.server.auth import Identity, identify
from ngramspec.server.engine_input import EngineInput
from ngramspec.server.error_responses import ApiError, format_openai_error, make_field_error
from ngramspec.server.middleware import ParsedBodyRoute
from ngramspec.server.openai.chat import describe_logprobs
from ngramspec.server.openai.handler import TEMPERATURE, Conversation, InputHandler
from ngramspec.server.openai.response_store import ResponseStore
from ngramspec.server.openai.responses_schemas import DeletedResponse, Response, ResponseInputTokens, ResponsesRequest, in_its_words
from ngramspec.server.openai.stored_items import begin_item, end_item, extend_item, list_input_items, replay_response
from ngramspec.server.prompt_progress import PromptProgress
from ngramspec.server.queue import Piece
from ngramspec.server.sse import GENERATES, REPLAYS, EventStream, format_events
from ngramspec.server.state import ServerState
from ngramspec.server.token_strings import TokenTexts

Event = dict[str, Any]


def make_router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["openai"], route_class=ParsedBodyRoute)
    prompts, store, texts = state.prompts, ResponseStore(), state.texts

    def prepare(body: ResponsesRequest, identity: Identity) -> None:
        """Check a request and fill in what it takes from earlier responses. Raises ApiError."""
        body.check()
        body.fill_references(functools.partial(store.get_item, identity.tenant))
        if body.previous_response_id is not None:
            body.go_on(store.get(identity.tenant, body.previous_response_id, "previous_response_id").items)

    @routes.post("/responses", include_in_schema=False, responses=GENERATES)
    @routes.post("/v1/responses", response_model=Response, response_model_exclude_unset=True, responses=GENERATES)
    async def respond(body: ResponsesRequest, http: Request, identity: Annotated[Identity, Depends(identify)]) -> Any:
        """Answer with text, or with calls of functions."""
        prepare(body, identity)
        with in_its_words():
            handler = _ResponseHandler(state, prompts, body, identity, store, texts)
            with state.admission.reserve() as reservation:
                inputs = [await handler.prepare_input(state.encoders, identity.tenant)]
                if handler.streams:
                    events = handler.stream_events(
                        handler.follow(reservation, state.admission.stream(reservation, http, inputs)), reservation.requests
                    )
                    return EventStream(reservation, events, done=False, named=True, format_error=_format_error)
                (completion,) = await state.admission.complete(reservation, http, inputs)
                return handler.answer(completion)

    @routes.get("/v1/responses/{response_id}", response_model=Response, response_model_exclude_unset=True, responses=REPLAYS)
    async def get_response(
        response_id: str, identity: Annotated[Identity, Depends(identify)], stream: bool = False, starting_after: int | None = None
    ) -> Any:
        """Give a stored response back, with `stream` as events."""
        response = store.get(identity.tenant, response_id).response
        if starting_after is not None:
            why = "the events of a stream are not kept as they were sent; leave it out to get the whole response"
            raise make_field_error("starting_after", why, "not_supported")
        return format_events(replay_response(response)) if stream else response

    @routes.get("/v1/responses/{response_id}/input_items")
    async def get_input_items(
        response_id: str,
        identity: Annotated[Identity, Depends(identify)],
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> dict[str, Any]:
        """List the items that led to a stored response."""
        return list_input_items(store.get(identity.tenant, response_id), after=after, limit=limit, order=order)

    @routes.post("/v1/responses/input_tokens")
    async def count_input_tokens(body: ResponsesRequest, identity: Annotated[Identity, Depends(identify)]) -> ResponseInputTokens:
        """Count the tokens of a prompt, also of one that is too long to be answered."""
        prepare(body, identity)
        with in_its_words(), state.admission.reserve():
            conversation = _make_conversation(state, prompts, body)
            n = await state.encoders.run(identity.tenant, conversation.n_chars, conversation.count_tokens)
            return ResponseInputTokens(object="response.input_tokens", input_tokens=n)

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel_response(response_id: str, identity: Annotated[Identity, Depends(identify)]) -> Any:
        """Refuse: no response is made in the background."""
        why = "only responses that are made in the background can be cancelled, and none is here; to end one, close its connection"
        raise ApiError(400, why, param="response_id", code="not_supported")

    @routes.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, identity: Annotated[Identity, Depends(identify)]) -> DeletedResponse:
        """Forget a stored response."""
        store.delete(identity.tenant, response_id)
        return DeletedResponse(id=response_id, object="response", deleted=True)

    return routes


def _make_conversation(state: ServerState, prompts: Prompts, body: ResponsesRequest) -> Conversation:
    """Return the conversation that a request asks to continue. Raises ApiError (400)."""
    return Conversation(state, prompts, body.turns, body.box, "input", body.make_style())


class _ResponseHandler(InputHandler):
    """One request of /v1/responses."""

    def __init__(
        self, state: ServerState, prompts: Prompts, body: ResponsesRequest, identity: Identity, store: ResponseStore, texts: TokenTexts
    ) -> None:
        super().__init__(state, body, identity, "resp_")
        self._body, self._store, self._texts = body, store, texts
        self._conversation = _make_conversation(state, prompts, body)
        self.n_chars = self._conversation.n_chars

    def make_input(self) -> EngineInput:
        """Return what the engine is asked; for `Encoders`. Raises ApiError, ValueError."""
        with in_its_words():
            body = self._body
            ids = self._conversation.encode(body, body.max_output_tokens)
            return self._conversation.make_input(ids, body, self.hints, max_tokens=body.max_output_tokens, n=1, logprobs=body.n_logprobs)

    def compile_grammar(self, asked: EngineInput) -> None:
        """Compile the request's grammar, which may take seconds. Raises ApiError (400)."""
        with in_its_words():
            self._conversation.compile_grammar(asked)

    # ------------------------------------------------------------------ answers

    def answer(self, completion: Completion) -> dict[str, Any]:
        output = _Output(self._conversation, self._texts, self._body.namespaces)
        for _ in output.take(completion.choices[0]):
            pass
        return self._end(output, completion)

    async def stream_events(self, pieces: AsyncIterator[PromptProgress | Piece], requests: Sequence[EngineRequest]) -> AsyncIterator[Event]:
        """Yield what is added to which item, between the response's beginning and its end."""
        output, number = _Output(self._conversation, self._texts, self._body.namespaces), 0

        def add_number(event: Event) -> Event:
            nonlocal number
            number += 1
            return event | {"sequence_number": number - 1}

        for name in ("created", "in_progress"):
            yield add_number({"type": f"response.{name}", "response": self._make_response(output, None)})
        try:
            async for piece in pieces:
                if isinstance(piece, PromptProgress):
                    response = self._make_response(output, None)
                    yield add_number({"type": "response.in_progress", "response": response, "prompt_progress": piece.describe()})
                    continue
                _, delta = piece
                for event in output.take(delta):
                    yield add_number(event | (self.describe_timings(requests) if event["type"].endswith(".delta") else {}))
                if delta.completion is not None:
                    response = self._end(output, delta.completion)
                    timings = {"timings": response["timings"]} if "timings" in response else {}
                    yield add_number({"type": f"response.{response['status']}", "response": response} | timings)
        except ApiError as error:  # OpenAI's SDKs raise the first of these events, Codex reads the second alone
            yield add_number(_format_error(error))
            told = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": error.message}
            failed = {"status": "failed", "error": told, "output": output.items}
            yield add_number({"type": "response.failed", "response": self._make_response(output, None) | failed})

    def _end(self, output: _Output, completion: Completion) -> dict[str, Any]:
        """Return the response at its end, and store it."""
        self.n_thought_tokens = output.n_thought_tokens
        response = self._make_response(output, completion)
        if self._body.store is not False:
            self._store.put(self.hints["tenant"] or "", response, self._body.dump_items() + output.items)
        return response

    def _make_response(self, output: _Output, completion: Completion | None) -> dict[str, Any]:
        """Return the response as it stands; with `completion`, at its end."""
        body = self._body
        given = body.model_dump(exclude_unset=True, by_alias=True, include={"text", "tool_choice", "tools", "metadata"})
        raw = {} if completion is None or not body.enable_response_messages else self._describe_messages(completion)
        usage = None if completion is None else self.describe_usage([completion])
        status = "in_progress" if completion is None else output.status
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "output": output.items if completion is not None else [],
            "usage": usage
            and {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self.n_thought_tokens},
                "total_tokens": usage["total_tokens"],
            },
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": given["metadata"] if isinstance(given.get("metadata"), dict) else {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.store is not False,
            "temperature": TEMPERATURE if body.temperature is None else body.temperature,  # type: ignore[attr-defined]
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": [tool for tool in given.get("tools") or [] if tool.get("type") in ("function", "namespace")],
            "top_p": 1.0 if body.top_p is None else body.top_p,  # type: ignore[attr-defined]
            "truncation": "disabled",
            "user": body.user,
        } | ({} if completion is None else raw | self.describe_extras([completion]))

    def _describe_messages(self, completion: Completion) -> dict[str, Any]:
        """Return vLLM's view of prompt and output: texts with control tokens, and ids."""

        def describe(ids: list[int]) -> list[dict[str, Any]]:
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
            return [{"type": "raw_message_tokens", "message": text, "tokens": ids}]

        return {"input_messages": describe(completion.prompt_token_ids), "output_messages": describe(completion.token_ids)}


class _Output:
    """The items of a response as they grow, and the events that tell of it."""

    def __init__(self, conversation: Conversation, texts: TokenTexts, namespaces: Mapping[str, tuple[str, str]]) -> None:
        self.items: list[dict[str, Any]] = []
        self.status = "completed"
        self._parser, self._texts, self._namespaces = conversation.make_stream_parser(), texts, namespaces
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is not told yet

    @property
    def n_thought_tokens(self) -> int:
        return self._parser.n_thought_tokens

    def take(self, part: Choice | Delta) -> Iterator[Event]:
        """Yield what a part adds, with log-probabilities token by token. One with a `finish_reason` is the last."""
        for each in _split_tokens(part) if part.logprobs else [part]:
            yield from self._take(each)

    def _take(self, part: Choice | Delta) -> Iterator[Event]:
        n_thought_tokens = self.n_thought_tokens
        self._logprobs += part.logprobs or ()
        for event in self._parser.parse(part):
            match event:
                case TextDelta(text):
                    if not self.items or self.items[-1]["type"] != "message":
                        yield from self._begin_message()
                    logprobs = describe_logprobs(self._texts, self._logprobs)["content"]
                    self._text["logprobs"] += logprobs
                    yield self._extend(self._text, "text", text, logprobs)
                case ThoughtDelta(text):
                    if not self.items or self.items[-1]["type"] != "reasoning":
                        yield from self._begin("rs", type="reasoning", summary=[], content=[{"type": "reasoning_text", "text": ""}])
                    yield self._extend(self._text, "text", text)
                case ToolCallStart(name):
                    call_id = self._parser.reply.calls[-1].id
                    space, name = self._namespaces.get(name, (None, name))
                    place = {} if space is None else {"namespace": space}
                    yield from self._begin("fc", type="function_call", call_id=call_id, name=name, arguments="", **place)
                case ToolCallArguments(text):
                    yield self._extend(self.items[-1], "arguments", text)
            if not isinstance(event, ThoughtDelta):
                self._logprobs = []
        if self.n_thought_tokens > n_thought_tokens:
            self._logprobs = []
        if part.finish_reason is not None:
            if not self.items:
                yield from self._begin_message()
            self.status = "incomplete" if part.finish_reason == "length" else "completed"
            yield from self._end(self.status)

    @property
    def _text(self) -> dict[str, Any]:
        content: dict[str, Any] = self.items[-1]["content"][0]
        return content

    def _begin_message(self) -> Iterator[Event]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._begin("msg", type="message", role="assistant", content=[part])

    def _begin(self, prefix: str, **item: Any) -> Iterator[Event]:
        yield from self._end()
        self.items.append({"id": f"{prefix}_{secrets.token_hex(16)}", "status": "in_progress"} | item)
        yield from begin_item(self.items[-1], len(self.items) - 1)

    def _extend(self, into: dict[str, Any], field: str, text: str, logprobs: list[dict[str, Any]] | None = None) -> Event:
        """Add text to the last item: to its part, or to the arguments of a call."""
        into[field] += text
        return extend_item(self.items[-1], len(self.items) - 1, text, logprobs)

    def _end(self, status: str = "completed") -> Iterator[Event]:
        """End the last item, if it has not ended."""
        if self.items and self.items[-1]["status"] == "in_progress":
            self.items[-1]["status"] = status
            yield from end_item(self.items[-1], len(self.items) - 1)


def _format_error(error: ApiError) -> Event:
    return {"type": "error"} | format_openai_error(error)


def _split_tokens(part: Choice | Delta) -> list[Delta]:
    """Return a part as one delta for each token, so that it is known which are told of with which text."""
    logprobs = part.logprobs or []
    deltas = [
        Delta(part.index, text, [token], [None], texts=[text], logprobs=[logprob])
        for text, token, logprob in zip(part.texts, part.token_ids, logprobs, strict=True)
    ]
    deltas[-1].text += part.text[sum(map(len, part.texts)) :]
    deltas[-1].finish_reason, deltas[-1].stop_reason = part.finish_reason, part.stop_reason
    return deltas

"""`/v1/chat/completions` as OpenAI has it: messages through the model's own template, one answer or several, with tool calls.

A checked request becomes one `EngineInput`; its completion or deltas become an answer or a stream of chunks. Text only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ngramspec.engine.llm_engine import Request as EngineRequest
from ngramspec.outputs import Choice, Completion, TokenLogprob
from ngramspec.prompts.chat_template import Prompts, Style
from ngramspec.prompts.messages import PARTS, read_role, read_turns
from ngramspec.prompts.tool_calls.call_scanner import StreamDelta, TextDelta, ThoughtDelta, ToolCallArguments, ToolCallStart
from ngramspec.prompts.tool_calls.stream_parser import StreamParser
from ngramspec.prompts.tool_calls.tool_prompt import ASSISTANT, TOOL, Call, Turn
from ngramspec.server.auth import Identity, identify
from ngramspec.server.engine_input import EngineInput, encode_prediction
from ngramspec.server.error_responses import make_field_error, require
from ngramspec.server.middleware import ParsedBodyRoute
from ngramspec.server.openai.handler import Conversation, InputHandler
from ngramspec.server.openai.schemas import (
    ApplyTemplateRequest,
    ApplyTemplateResponse,
    ChatPrompt,
    ChatRequest,
    ChatResponse,
    InputTokens,
    Message,
    Part,
)
from ngramspec.server.prompt_progress import PromptProgress
from ngramspec.server.queue import Piece
from ngramspec.server.sse import GENERATES, EventStream
from ngramspec.server.state import ServerState
from ngramspec.server.token_strings import TokenIdTexts, TokenTexts, clip_logprob, describe_prompt_logprobs, split_end_logprob
from ngramspec.server.tool_fields import read_calls, read_toolbox

KIND = "chat.completion"
CHUNK = "chat.completion.chunk"
THOUGHTS = ("reasoning_content", "reasoning")  # llama.cpp's name, and vLLM's


def make_router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["openai"], route_class=ParsedBodyRoute)
    prompts, texts = state.prompts, state.texts

    @routes.post("/chat/completions", include_in_schema=False, responses=GENERATES)
    @routes.post("/v1/chat/completions", response_model=ChatResponse, response_model_exclude_unset=True, responses=GENERATES)
    async def chat(body: ChatRequest, http: Request, identity: Annotated[Identity, Depends(identify)]) -> Any:
        """Answer a conversation."""
        handler = _ChatHandler(state, prompts, texts, body, identity)
        with state.admission.reserve(handler.n) as reservation:
            inputs = [await handler.prepare_input(state.encoders, identity.tenant)]
            if handler.streams:
                pieces = state.admission.stream(reservation, http, inputs)
                return EventStream(reservation, handler.stream_events(handler.follow(reservation, pieces), reservation.requests))
            (completion,) = await state.admission.complete(reservation, http, inputs)
            return await handler.respond(lambda: handler.answer(completion))

    @routes.post("/chat/completions/input_tokens", include_in_schema=False)
    @routes.post("/v1/chat/completions/input_tokens", tags=["llama.cpp"])
    async def count_tokens(body: ApplyTemplateRequest, identity: Annotated[Identity, Depends(identify)]) -> InputTokens:
        """Count the tokens of a conversation's prompt."""
        conversation = make_conversation(state, prompts, body)
        with state.admission.reserve():
            return InputTokens(input_tokens=await state.encoders.run(identity.tenant, conversation.n_chars, conversation.count_tokens))

    @routes.post("/apply-template", tags=["llama.cpp"])
    async def apply_template(body: ApplyTemplateRequest, identity: Annotated[Identity, Depends(identify)]) -> ApplyTemplateResponse:
        """Return the text that a conversation becomes before the model continues it."""
        conversation = make_conversation(state, prompts, body)
        with state.admission.reserve():

            def render() -> str:
                return prompts.render_text(conversation.turns, conversation.toolbox.prompt_tools, conversation.style)

            return ApplyTemplateResponse(prompt=await state.encoders.run(identity.tenant, conversation.n_chars, render))

    return routes


class _ChatHandler(InputHandler):
    """One request of /v1/chat/completions."""

    def __init__(self, state: ServerState, prompts: Prompts, texts: TokenTexts, body: ChatRequest, identity: Identity) -> None:
        super().__init__(state, body, identity, "chatcmpl-")
        self._engine, self._body = state.engine, body
        self._texts = TokenIdTexts(texts) if self.names_token_ids else texts
        self.n = next((n for n in (body.n, body.n_cmpl) if n is not None), 1)
        given = (body.max_completion_tokens, body.max_tokens, body.n_predict, state.settings.sampling.get("max_tokens"))
        asked = next((n for n in given if n is not None), -1)
        self._max_tokens = None if asked < 0 else max(asked, 1)  # None: as many as fit; an engine writes one at least
        self._silent = asked == 0  # nothing is to be written: the prompt is computed, so that a later request finds it
        if body.top_logprobs and not body.logprobs:  # 0 is vLLM's default, which its clients send along
            raise make_field_error("top_logprobs", "only with logprobs")
        if body.prompt_logprobs is not None and self.streams:
            raise make_field_error("prompt_logprobs", "not in a stream")
        self._logprobs_asked = bool(body.logprobs or body.n_probs)
        self._conversation = make_conversation(state, prompts, body)
        if body.reasoning_format is not None:
            self._conversation.separates_thoughts = body.reasoning_format != "none"
        self._tells_thoughts = body.include_reasoning is not False
        last = self._conversation.turns[-1]
        self._echoed = last.content if body.echo and last.role == ASSISTANT else ""
        self._prediction = None if body.prediction is None else join_text(body.prediction.content, "prediction.content")
        self.n_chars = self._conversation.n_chars + len(self._prediction or "")

    def make_input(self) -> EngineInput:
        """Return what the engine is asked; for `Encoders`. Raises ApiError, ValueError."""
        body = self._body
        ids = self._conversation.encode(body, self._max_tokens)
        encode_prediction(self.hints, self._prediction, self._engine)
        top = (body.top_logprobs or body.n_probs or 0) if self._logprobs_asked else None
        return self._conversation.make_input(
            ids, body, self.hints, max_tokens=self._max_tokens, n=self.n, logprobs=top, prompt_logprobs=body.prompt_logprobs
        )

    def compile_grammar(self, asked: EngineInput) -> None:
        """Compile the request's grammar, which may take seconds. Raises ApiError (400)."""
        self._conversation.compile_grammar(asked)

    # ------------------------------------------------------------------ answers

    def answer(self, completion: Completion) -> dict[str, Any]:
        choices = [self._make_choice(choice) for choice in completion.choices]
        answer = self.make_head(KIND) | {"choices": choices}
        answer |= dict.fromkeys(("prompt_logprobs", "prompt_token_ids"))  # null unless asked for, as in vLLM
        if self.token_ids:
            answer["prompt_token_ids"] = completion.prompt_token_ids
        if completion.prompt_logprobs is not None:
            answer["prompt_logprobs"] = describe_prompt_logprobs(self._texts, completion.prompt_logprobs)
        return answer | {"usage": self.describe_usage([completion], silent=self._silent)} | self.describe_extras([completion])

    def _make_choice(self, choice: Choice) -> dict[str, Any]:
        if self._silent:
            message: dict[str, Any] = {"role": "assistant", "content": self._echoed, "refusal": None}
            return {"index": choice.index, "message": message, "logprobs": None, "finish_reason": "length"}
        parser = self._conversation.make_stream_parser()
        for _ in parser.parse(choice):
            pass
        reply, finish_reason = parser.reply, parser.get_finish_reason(choice.finish_reason)
        content = self._echoed + reply.content
        self.n_thought_tokens += parser.n_thought_tokens
        message = {"role": "assistant", "content": content, "refusal": None}
        if self._conversation.separates_thoughts:
            message |= self._describe_thoughts(reply.thoughts)
        if reply.calls:
            message |= {"content": content or None, "tool_calls": [_describe_call(call) for call in reply.calls]}
        return (
            {
                "index": choice.index,
                "message": message,
                "logprobs": self._describe_logprobs(choice.logprobs),
                "finish_reason": finish_reason,
                "token_ids": None,
            }
            | self.describe_sources(choice)
            | self.describe_token_ids(choice)
            | self.describe_stop(choice)
        )

    async def stream_events(
        self, pieces: AsyncIterator[PromptProgress | Piece], requests: Sequence[EngineRequest]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the pieces of a stream: for each choice who speaks, what it says and calls, and why it ends."""
        parsers: dict[int, StreamParser] = {}
        completions: list[Completion] = []

        def begin(index: int) -> list[dict[str, Any]]:
            parsers[index] = self._conversation.make_stream_parser()
            first = self.make_chunk_head(CHUNK, requests) | {
                "choices": [_make_chunk(index, {"role": "assistant", "content": None, "refusal": None})]
            }
            first.pop("timings", None)  # it tells of no token; llama.cpp's first piece has none
            first |= {"prompt_token_ids": requests[0].completion.prompt_token_ids} if self.token_ids else {}
            echo = self.make_chunk_head(CHUNK, requests) | {"choices": [_make_chunk(index, {"content": self._echoed})]}
            return [first, echo] if self._echoed else [first]

        async for piece in pieces:
            if isinstance(piece, PromptProgress):
                if 0 not in parsers:
                    for first in begin(0):
                        yield first
                yield self.make_chunk_head(CHUNK, requests) | {"choices": [_make_chunk(0, {})], "prompt_progress": piece.describe()}
                continue
            delta = piece[1]
            if delta.index not in parsers:
                for first in begin(delta.index):
                    yield first
            self.count_delta(delta)
            head = self.make_chunk_head(CHUNK, requests)
            if self._silent:
                if delta.finish_reason is not None:
                    yield head | {"choices": [_make_chunk(delta.index, {}, "length")]}
                    completions += [] if delta.completion is None else [delta.completion]
                continue
            parser = parsers[delta.index]
            logprobs, of_end = delta.logprobs, list[TokenLogprob]()
            if len(logprobs or ()) > 1 and not self.continuous_usage:  # the token that ended the text is told behind it, as in vLLM
                logprobs, of_end = split_end_logprob(delta)
            of_tokens = self.describe_sources(delta) | self.describe_token_ids(delta)
            extras = {"logprobs": self._describe_logprobs(logprobs)} | of_tokens
            told = not (delta.token_ids and (self._logprobs_asked or self.sources or self.token_ids))
            chunks: list[dict[str, Any]] = []
            for event in parser.parse(delta):
                if isinstance(event, ThoughtDelta) and not self._tells_thoughts:
                    continue
                chunks.append(_make_chunk(delta.index, _describe_event(parser, event)) | ({} if told else extras))
                told = True
            if not told:
                chunks.append(_make_chunk(delta.index, {"content": ""}) | extras)
            if delta.finish_reason is not None:
                last = {"finish_reason": parser.get_finish_reason(delta.finish_reason)} | self.describe_stop(delta)
                if chunks and self.continuous_usage:  # where each piece is to tell of more tokens than the one before
                    chunks[-1] |= last
                else:
                    last |= {"logprobs": self._describe_logprobs(of_end)} if of_end else {}
                    chunks.append(_make_chunk(delta.index, {}) | last)
            for chunk in chunks:
                yield head | {"choices": [chunk]}
            if delta.finish_reason is not None:
                self.n_thought_tokens += parser.n_thought_tokens
            if delta.completion is not None:
                completions.append(delta.completion)
        for last in self.make_last_chunks(CHUNK, completions, silent=self._silent):
            yield last

    def _describe_thoughts(self, thoughts: str) -> dict[str, str | None]:
        """Return thoughts by llama.cpp's name and by vLLM's."""
        return dict.fromkeys(THOUGHTS, (thoughts or None) if self._tells_thoughts else None)

    def _describe_logprobs(self, found: list[TokenLogprob] | None) -> dict[str, Any] | None:
        chosen = bool(self._body.logprob_token_ids)  # type: ignore[attr-defined]
        return None if found is None else describe_logprobs(self._texts, found, with_taken=chosen)


def make_conversation(state: ServerState, prompts: Prompts, body: ChatPrompt) -> Conversation:
    """Return the conversation that a request asks to continue. Raises ApiError (400)."""
    turns = read_turns(body.messages, _read_turn)
    answer_follows, goes_on = body.add_generation_prompt is not False, bool(body.continue_final_message)
    if goes_on and answer_follows:
        why = "only with add_generation_prompt false: a message goes on, or another begins"
        raise make_field_error("continue_final_message", why)
    if state.settings.prefill_assistant and answer_follows and turns[-1].role == ASSISTANT and not turns[-1].calls:
        if len(turns) > 1 and turns[-2].role == ASSISTANT:
            raise make_field_error("messages", "the answer goes on with the assistant's message at the end; here are two")
        answer_follows, goes_on = False, True
        content = _read_content(body.messages[-1], f"messages[{len(turns) - 1}]", PARTS * 2)  # as in llama.cpp
        turns[-1] = turns[-1]._replace(content=content)
    variables = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatRequest) and body.reasoning_effort is not None:
        variables = {"reasoning_effort": body.reasoning_effort} | variables
    style = Style(answer_follows, goes_on, variables)
    box = read_toolbox(body.tools, body.tool_choice, body.parallel_tool_calls)
    return Conversation(state, prompts, turns, box, "messages", style)


def describe_logprobs(texts: TokenTexts, logprobs: Sequence[TokenLogprob], *, with_taken: bool = False) -> dict[str, Any]:
    """Return log-probabilities as /v1/chat/completions has them.

    with_taken: `top_logprobs` has the token that was taken, too, if it is none of the others: vLLM's answer to `logprob_token_ids`.
    """

    def describe_token(token: int, value: float) -> dict[str, Any]:
        return {"token": texts.get_text(token), "logprob": clip_logprob(value), "bytes": list(texts.get_bytes(token))}

    def describe(found: TokenLogprob) -> dict[str, Any]:
        taken = (found.token_id, found.logprob)
        top = [taken, *found.top] if with_taken and all(token != found.token_id for token, _ in found.top) else found.top
        return describe_token(*taken) | {"top_logprobs": [describe_token(token, value) for token, value in top]}

    return {"content": [describe(each) for each in logprobs], "refusal": None}


def _make_chunk(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _describe_event(parser: StreamParser, event: StreamDelta) -> dict[str, Any]:
    """Return a piece of a message."""
    calls = parser.reply.calls
    match event:
        case TextDelta(text):
            return {"content": text}
        case ThoughtDelta(text):
            return dict.fromkeys(THOUGHTS, text)
        case ToolCallStart():
            return {"tool_calls": [{"index": len(calls) - 1} | _describe_call(calls[-1])]}
        case ToolCallArguments(text):
            return {"tool_calls": [{"index": len(calls) - 1, "function": {"arguments": text}}]}


def _describe_call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def join_text(content: str | Sequence[Part], where: str, separator: str = "") -> str:
    """Return the text of a content, of its parts with the separator between them. Raises ApiError (400)."""
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type not in ("text", "refusal"):
            raise make_field_error(f"{where}[{i}]", f"only parts of type 'text', got {part.type[:40]!r}", "not_supported")
        texts.append(require(getattr(part, part.type), f"{where}[{i}].{part.type}"))
    return separator.join(texts)


def _read_content(message: Message, where: str, separator: str) -> str:
    """Return what a message says. A refusal is what the assistant said. Raises ApiError (400)."""
    given = message.content or ""
    if message.role == TOOL and not isinstance(given, str):
        given = [part.name_media() for part in given]
    said = [join_text(given, f"{where}.content", separator), message.refusal if message.role == ASSISTANT else None]
    return separator.join(filter(None, said))


def _read_turn(message: Message, where: str, names: dict[str, str]) -> Turn:
    """Return a message as a turn. `names`: of the calls so far, by their ids. Raises ApiError (400)."""
    if message.function_call or message.role == "function":
        raise make_field_error(where, "tools have taken the place of functions", "not_supported")
    role = read_role(message.role, f"{where}.role")
    calls = read_calls(message.tool_calls, where) if message.tool_calls else ()
    if calls and role != ASSISTANT:
        raise make_field_error(f"{where}.tool_calls", "only the assistant calls tools")
    content = _read_content(message, where, PARTS)
    may_be_null = role in (ASSISTANT, TOOL) and "content" in message.model_fields_set  # as in llama.cpp
    if message.content is None and not (calls or content or may_be_null):
        raise make_field_error(f"{where}.content", "is missing")
    if role != TOOL:
        return Turn(role, content, calls, thoughts=(message.reasoning_content or message.reasoning or "") if role == ASSISTANT else "")
    number = require(message.tool_call_id, f"{where}.tool_call_id")
    return Turn(role, content, call_id=number, name=message.name or names.get(number))

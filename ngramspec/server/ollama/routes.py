"""Ollama's routes: /api/chat and /api/generate, and what clients ask of models before they use them.

Requests in Ollama's words enter and become `EngineInput`s; answers leave as one object or as lines of JSON, whose last one has the
statistics. The fields of requests are in `schemas`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ngramspec.outputs import Choice, Completion, Delta
from ngramspec.prompts.chat_template import Prompts
from ngramspec.prompts.tool_calls.call_scanner import TextDelta, ThoughtDelta
from ngramspec.prompts.tool_calls.stream_parser import StreamParser
from ngramspec.prompts.tool_calls.tool_prompt import SYSTEM, USER, Call, Turn
from ngramspec.server import response_stats
from ngramspec.server.auth import Identity, identify
from ngramspec.server.engine_input import EngineInput
from ngramspec.server.error_responses import make_field_error, rename_params, require
from ngramspec.server.middleware import ParsedBodyRoute
from ngramspec.server.ollama.schemas import (
    GenerateRequest,
    GenerateResponse,
    OllamaChatRequest,
    OllamaChatResponse,
    OllamaRequest,
    RunningModels,
    ShowRequest,
    ShowResponse,
    TagsResponse,
    VersionResponse,
)
from ngramspec.server.openai.chat import describe_logprobs
from ngramspec.server.openai.handler import Conversation, InputHandler, make_params, read_arguments
from ngramspec.server.queue import Piece
from ngramspec.server.request_fields import FieldGrammar, check_grammar, read_grammar, read_unfinished
from ngramspec.server.sse import GENERATES_LINES, JsonLines
from ngramspec.server.state import ServerState, model_not_found
from ngramspec.server.token_strings import split_end_logprob
from ngramspec.server.tool_fields import read_toolbox

Who = Annotated[Identity, Depends(identify)]
# The version of Ollama whose API this is. Codex refuses those before 0.13.4, programs that start Claude Code those before 0.14.2: they lack
# /v1/responses, or /v1/messages.
VERSION = "0.14.2"
NEVER = "2318-01-01T00:00:00Z"  # Ollama's word for a model that stays loaded


def make_router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["ollama"], route_class=ParsedBodyRoute, prefix="/api")
    prompts = state.prompts
    models = _Models(state, prompts)

    @routes.post("/chat", response_model=OllamaChatResponse, response_model_exclude_unset=True, responses=GENERATES_LINES)
    async def chat(body: OllamaChatRequest, http: Request, identity: Who) -> Any:
        """Answer a conversation with text, or with calls of tools."""
        with _rename_params():
            return await _answer(state, _OllamaChatHandler(state, prompts, body, identity), http, identity)

    @routes.post("/generate", response_model=GenerateResponse, response_model_exclude_unset=True, responses=GENERATES_LINES)
    async def generate(body: GenerateRequest, http: Request, identity: Who) -> Any:
        """Answer a prompt, continue it (`raw`), or fill in what stands before `suffix`."""
        with _rename_params():
            body.check()
            return await _answer(state, _GenerateHandler(state, prompts, body, identity), http, identity)

    @routes.get("/tags")
    async def list_models(identity: Who) -> TagsResponse:
        """List the one model, under each of its names."""
        return TagsResponse.model_validate({"models": [models.describe(name) for name in state.names]})

    @routes.get("/ps")
    async def list_running(identity: Who) -> RunningModels:
        """List the same: the model is loaded."""
        more = {"expires_at": NEVER, "size_vram": 0, "context_length": state.engine.max_model_len}
        return RunningModels.model_validate({"models": [models.describe(name) | more for name in state.names]})

    @routes.get("/version")
    async def get_version(identity: Who) -> VersionResponse:
        return VersionResponse(version=VERSION)

    @routes.post("/show")
    async def show(body: ShowRequest, identity: Who) -> ShowResponse:
        """Describe the model."""
        asked = require(body.name if body.model is None else body.model, "model").removesuffix(":latest")
        if asked not in state.names and state.settings.strict_model:
            raise model_not_found(asked, state.names)
        return ShowResponse.model_validate(models.show())

    return routes


class _Models:
    """What is said of the model."""

    def __init__(self, state: ServerState, prompts: Prompts) -> None:
        self._engine, self._prompts, self._fim = state.engine, prompts, state.fim
        self._started = format_time()

    @functools.cached_property
    def _family(self) -> str:
        return str(self._engine.props()["architecture"])

    def describe(self, name: str) -> dict[str, Any]:
        digest = hashlib.sha256(self._engine.name.encode()).hexdigest()
        return {"name": name, "model": name, "modified_at": self._started, "size": 0, "digest": digest, "details": self._details}

    def show(self) -> dict[str, Any]:
        family = self._family
        has_template = self._prompts.has_chat_template
        capabilities = ["completion", *(["tools"] if has_template else []), *(["insert"] if self._fim else [])]
        capabilities += ["thinking"] if has_template and self._prompts.thought_marks is not None else []
        return {
            "modelfile": f"FROM {self._engine.name}",
            "parameters": "",
            # Ollama's are Go's; this model's own is applied here, and `raw` asks for none. Continue looks for `.Suffix`.
            "template": "{{ .Prompt }}{{ .Suffix }}" if self._fim else "{{ .Prompt }}",
            "details": self._details,
            "model_info": {
                "general.architecture": family,
                "general.basename": self._engine.name,  # under which Copilot lists it
                f"{family}.context_length": self._engine.max_model_len,
            },
            "capabilities": capabilities,
            "modified_at": self._started,
        }

    @property
    def _details(self) -> dict[str, Any]:
        family = self._family
        quantised = {"parameter_size": "", "quantization_level": self._engine.precision}
        return {"parent_model": "", "format": "gguf", "family": family, "families": [family]} | quantised


class _OllamaHandler(InputHandler):
    """One request of /api/chat or /api/generate."""

    is_chat = True

    def __init__(self, state: ServerState, prompts: Prompts, body: OllamaRequest, identity: Identity) -> None:
        self._sampling = body.to_openai()
        super().__init__(state, self._sampling, identity, "chatcmpl-")
        self._state, self._prompts, self._body = state, prompts, body
        self._hides_thoughts = body.think is False
        self._conversation: Conversation | None = None
        self.n_chars = 0
        self.is_empty = False
        """Nothing is asked for: clients load a model that way, or unload it."""

    def encode(self) -> list[int]:
        """Return the prompt's ids. Raises ApiError, ValueError."""
        assert self._conversation is not None
        return self._conversation.encode(self._sampling, self._body.max_tokens)

    def make_input(self) -> EngineInput:
        """Return what the engine is asked; for `Encoders`. Raises ApiError, ValueError."""
        assert self._conversation is not None
        ids = self.encode()
        max_tokens = self.count_tokens(ids)
        return self._conversation.make_input(ids, self._sampling, self.hints, max_tokens=max_tokens, n=1, logprobs=self._body.n_logprobs)

    def compile_grammar(self, asked: EngineInput) -> None:
        """Compile the request's grammar, which may take seconds. Raises ApiError (400)."""
        assert self._conversation is not None
        self._conversation.compile_grammar(asked)

    def count_tokens(self, ids: list[int]) -> int:
        """Return how many tokens to write: those that are asked for, as far as they fit."""
        limits = self._state.limits
        room = max(min(limits.count_room(len(ids)), limits.limits.output_tokens), 1)
        return room if self._body.max_tokens is None else min(self._body.max_tokens, room)

    # ------------------------------------------------------------------ answers

    def answer(self, completion: Completion) -> dict[str, Any]:
        parser = self._make_parser()
        for _ in parser.parse(completion.choices[0]):
            pass
        said = self._write(parser.reply.content, parser.reply.calls, parser.reply.thoughts)
        return self._make_head() | said | self._describe_logprobs(completion.choices[0]) | self._finish(completion)

    def answer_empty(self) -> dict[str, Any]:
        reason = "unload" if self._body.keep_alive in (0, "0") else "load"
        return self._make_head() | self._write("", []) | {"done": True, "done_reason": reason}

    async def stream_events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[dict[str, Any]]:
        """Yield what each delta adds; calls when they are whole."""
        parser, n_told = self._make_parser(), 0
        async for _, delta in pieces:
            logprobs = self._describe_logprobs(delta)
            for text, calls, thoughts in _split_parts(parser, delta, n_told):
                n_told += len(calls)
                if text or calls or not self._hides_thoughts:
                    yield self._make_head() | self._write(text, calls, thoughts) | logprobs | {"done": False}
                    logprobs = {}
            if logprobs:
                yield self._make_head() | self._write("", []) | logprobs | {"done": False}
            if delta.completion is not None:
                yield self._make_head() | self._write("", []) | self._finish(delta.completion)

    def _make_parser(self) -> StreamParser:
        return StreamParser(None, {}) if self._conversation is None else self._conversation.make_stream_parser()

    def _make_head(self) -> dict[str, Any]:
        return {"model": self._body.model, "created_at": format_time()}

    def _write(self, text: str, calls: list[Call], thoughts: str = "") -> dict[str, Any]:
        thinking = {"thinking": thoughts} if thoughts and not self._hides_thoughts else {}
        if not self.is_chat:
            return {"response": text} | thinking
        message: dict[str, Any] = {"role": "assistant", "content": text} | thinking
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{call.id}", "function": {"name": call.name, "arguments": read_arguments(call.arguments)}} for call in calls
            ]
        return {"message": message}

    def _describe_logprobs(self, part: Delta | Choice) -> dict[str, Any]:
        """Return the log-probabilities of a part's tokens, but for one that ends the text and says nothing."""
        found, _ = split_end_logprob(part)
        return {"logprobs": describe_logprobs(self._state.texts, found)["content"]} if found else {}

    def _finish(self, completion: Completion) -> dict[str, Any]:
        """Return the end of an answer with its statistics."""
        timings = response_stats.describe_timings(completion)
        reason = "length" if completion.finish_reason == "length" else "stop"
        # Clients divide by it. If one pass computed the prompt and wrote the whole text, it is that pass's time.
        eval_ms = timings["predicted_ms"] or timings["prompt_ms"]
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": round(completion.duration_s * 1e9),
            "load_duration": 0,
            "prompt_eval_count": len(completion.prompt_token_ids) + completion.choices[0].n_spelled,
            "prompt_eval_duration": round(timings["prompt_ms"] * 1e6),
            "eval_count": completion.choices[0].n_counted,
            "eval_duration": max(round(eval_ms * 1e6), 1),
        }


class _OllamaChatHandler(_OllamaHandler):
    """One request of /api/chat."""

    def __init__(self, state: ServerState, prompts: Prompts, body: OllamaChatRequest, identity: Identity) -> None:
        super().__init__(state, prompts, body, identity)
        turns = body.make_turns()
        self.is_empty = not turns
        if turns:
            self._conversation = Conversation(state, prompts, turns, read_toolbox(body.tools, None, None), "messages", body.style)
            self.n_chars = self._conversation.n_chars


class _GenerateHandler(_OllamaHandler):
    """One request of /api/generate. Without a chat template, or with `raw` or `suffix`, the prompt is no message."""

    is_chat = False

    def __init__(self, state: ServerState, prompts: Prompts, body: GenerateRequest, identity: Identity) -> None:
        super().__init__(state, prompts, body, identity)
        self._given = body
        self.is_empty = not (body.prompt or body.suffix)
        self._fim = state.fim if body.suffix else None
        self._form: FieldGrammar | None = None
        self._unfinished: str | None = None
        if body.suffix and self._fim is None:
            raise make_field_error("suffix", "this model has no fill-in-the-middle tokens", "not_supported")
        if prompts.has_chat_template and not (body.raw or body.suffix or self.is_empty):
            turns = [*([Turn(SYSTEM, body.system)] if body.system else []), Turn(USER, body.prompt)]
            self._conversation = Conversation(state, prompts, turns, read_toolbox(None, None, None), "prompt", body.style)
        self.n_chars = len(body.prompt) + len(body.suffix or "") + len(body.system or "")

    def encode(self) -> list[int]:
        """Return the prompt's ids. Raises ApiError, ValueError."""
        body, limits = self._given, self._state.limits
        context = body.context or []
        if context and max(context) >= limits.vocab_size:
            raise make_field_error("context", f"token ids must be 0 to {limits.vocab_size - 1}")
        if self._conversation is not None:
            ids = context + super().encode()
        else:
            limits.check_text(body.prompt + (body.suffix or ""))
            self._form = read_grammar(self._sampling)
            if self._fim is not None:
                self._unfinished = read_unfinished(self._fim, body.prompt, self._sampling, self._form, self._state.settings.sampling)
                ids = self._fim.make_prompt(body.prompt, body.suffix or "", is_healed=self._unfinished is not None)
            else:
                ids = self._prompts.to_continue(body.prompt, parse_special=self._state.settings.parse_special)
            ids = context + ids
        limits.check_prompt(len(ids))
        if not ids:
            raise make_field_error("prompt", "is empty")
        return ids

    def make_input(self) -> EngineInput:
        """Return what the engine is asked; for `Encoders`. Raises ApiError, ValueError."""
        if self._conversation is not None:
            return super().make_input()
        ids, form = self.encode(), self._form
        params = make_params(
            self._sampling, self._state, max_tokens=self.count_tokens(ids), n=1, logprobs=self._body.n_logprobs, grammar=form and form[1]
        )
        self._state.limits.check_params(params)
        if self._fim is not None:
            params = replace(params, stop_token_ids=self._fim.stop_ids, healed=self._unfinished or "")
            self.hints["cursor"] = cursor = (self._given.prompt, self._given.suffix or "")
            self._state.expect_prompts(self.hints, *cursor)
        return EngineInput(ids, params, self.hints)

    def compile_grammar(self, asked: EngineInput) -> None:
        """Compile the request's grammar, which may take seconds. Raises ApiError (400)."""
        if self._conversation is not None:
            super().compile_grammar(asked)
        else:
            check_grammar(self._form, self._state.engine, self.hints["tenant"])

    def _finish(self, completion: Completion) -> dict[str, Any]:
        context = {} if self._given.raw else {"context": completion.prompt_token_ids + completion.token_ids}
        return super()._finish(completion) | context


async def _answer(state: ServerState, handler: _OllamaHandler, http: Request, identity: Identity) -> Any:
    """Run a request; return its answer, or a stream of lines."""
    if handler.is_empty:
        return handler.answer_empty()
    with state.admission.reserve() as reservation:
        inputs = [await handler.prepare_input(state.encoders, identity.tenant)]
        if handler.streams:
            return JsonLines(reservation, handler.stream_events(state.admission.stream(reservation, http, inputs)))
        (completion,) = await state.admission.complete(reservation, http, inputs)
        return handler.answer(completion)


def _split_parts(parser: StreamParser, delta: Delta | Choice, n_told: int) -> Iterator[tuple[str, list[Call], str]]:
    """Yield the texts of a delta, the calls that are whole now, and thoughts, in order. `n_told`: calls that were told of before."""
    for event in parser.parse(delta):
        whole = len(parser.reply.calls) - (0 if isinstance(event, TextDelta | ThoughtDelta) else 1)  # the last one may still grow
        if whole > n_told:
            yield "", parser.reply.calls[n_told:whole], ""
            n_told = whole
        if isinstance(event, TextDelta):
            yield event.text, [], ""
        elif isinstance(event, ThoughtDelta):
            yield "", [], event.text
    if delta.finish_reason is not None and len(parser.reply.calls) > n_told:
        yield "", parser.reply.calls[n_told:], ""


def format_time() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _rename_params() -> AbstractContextManager[None]:
    """Rename fields in ApiErrors raised inside it to what Ollama calls them, from what OpenAI does."""
    return rename_params(
        ("response_format.json_schema.schema", "format"), ("response_format.json_schema", "format"), ("response_format", "format")
    )

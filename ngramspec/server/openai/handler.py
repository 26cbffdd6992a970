"""What OpenAI's routes share: the way of a request to an `EngineInput`, and what every answer says of itself.

Checked requests enter, engine inputs and the parts of an answer that are no text leave. Knows the model's chat template through
`Prompts`, and no shape of a choice.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastapi.responses import JSONResponse
from pydantic_core import from_json

from ngramspec.engine.llm_engine import Hints, Request
from ngramspec.grammar.constraint import Grammar
from ngramspec.outputs import Choice, Completion, Delta
from ngramspec.prompts.chat_template import ANSWER, Prompts, Style
from ngramspec.prompts.tool_calls.stream_parser import StreamParser
from ngramspec.prompts.tool_calls.tool_prompt import Turn
from ngramspec.prompts.tool_calls.toolbox import Toolbox
from ngramspec.sampling_params import SamplingParams
from ngramspec.server import response_stats
from ngramspec.server.auth import Identity
from ngramspec.server.encoding import Encoders
from ngramspec.server.engine_input import ALL, EngineInput, check_token_ids, cut_prompt, make_hints, read_bias
from ngramspec.server.error_responses import make_bad_request, make_context_error, make_field_error
from ngramspec.server.openai.schemas import OpenAIRequest, ServerFields
from ngramspec.server.prompt_progress import PromptProgress, report_progress
from ngramspec.server.queue import Piece, Reservation
from ngramspec.server.request_fields import OTHER_NAMES, FieldGrammar, check_grammar, read_grammar, read_sampling_fields
from ngramspec.server.state import ServerState, model_not_found
from ngramspec.tokenizer.encode import replace_lone_surrogates

TEMPERATURE = 1.0  # OpenAI's default


class CompletionHandler:
    """One request on its way to an answer. Raises ApiError if it asks for what it may not have."""

    def __init__(
        self, state: ServerState, request: OpenAIRequest, identity: Identity, kind: Literal["cmpl-", "chatcmpl-", "resp_", "msg_"]
    ) -> None:
        self.model = self._choose_model_name(state, request.model)
        self.level = request.speculative_metrics or "none"
        self.sources = bool(request.return_sources)
        self.streams = bool(request.stream)
        self.expects = getattr(request, "prediction", None) is not None
        if request.stream_options is not None and not self.streams:
            raise make_field_error("stream_options", "only with stream")
        options = request.stream_options
        forced = state.settings.force_include_usage
        self.include_usage = forced or bool(options and options.include_usage)
        self.continuous_usage = forced or (self.include_usage and bool(options and options.continuous_usage_stats))
        extra = request if isinstance(request, ServerFields) else ServerFields()
        self.token_ids, self.verbose = bool(extra.return_token_ids), bool(extra.verbose)
        asked = extra.return_tokens_as_token_ids
        self.names_token_ids = state.settings.return_tokens_as_token_ids if asked is None else asked
        names = ("logprobs", "top_logprobs", "prompt_logprobs")
        whole = next((name for name in names if getattr(request, name, None) == ALL), None)
        if whole and self.streams:
            raise make_field_error(whole, f"those of the whole vocabulary ({ALL}) are not told in a stream")
        self._tells_vocabulary = whole is not None
        self.progress, self.per_token_timings = bool(request.return_progress), bool(request.timings_per_token)
        self._started, self._n_told = time.perf_counter(), 0
        self.n_thought_tokens, self._tells_times = 0, state.settings.per_request_metrics
        self.hints = make_hints(request, identity, state.engine)
        self.id = kind + secrets.token_hex(16)
        self.created = int(time.time())
        self.fingerprint, self.tokenizer = state.fingerprint, state.engine.tokenizer

    @staticmethod
    def _choose_model_name(state: ServerState, asked: str | None) -> str:
        """Return the model's name in the answer to a request that asks for this one. Raises ApiError 404 if it is not served."""
        if asked in state.names:
            return str(asked)
        if asked and state.settings.strict_model:
            raise model_not_found(asked, state.names)
        return state.names[0]

    async def respond(self, make_answer: Callable[[], dict[str, Any]]) -> Any:
        """Return the answer. One that tells of the whole vocabulary takes seconds and megabytes, so a thread makes it, unchecked."""
        return await asyncio.to_thread(lambda: JSONResponse(make_answer())) if self._tells_vocabulary else make_answer()

    def make_head(self, kind: str) -> dict[str, Any]:
        """Return what an answer, and every piece of a streamed one, begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}

    def make_chunk_head(self, kind: str, requests: Sequence[Request]) -> dict[str, Any]:
        """Return what every piece of a stream but the last begins with. `requests`: what the engine runs for it."""
        head = self.make_head(kind)
        if self.include_usage:
            completions = [request.completion for request in requests]
            head["usage"] = self.describe_usage(completions, written=self._n_told) if self.continuous_usage else None
        return head | self.describe_timings(requests)

    def describe_timings(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return llama.cpp's `timings` so far, if they were asked for."""
        if not self.per_token_timings or len(requests) != 1:
            return {}
        return {"timings": response_stats.describe_timings(requests[0].completion, time.perf_counter() - self._started)}

    def follow(self, reservation: Reservation, pieces: AsyncIterator[Piece]) -> AsyncIterator[PromptProgress | Piece]:
        """Return a stream with reports on its prompt, where they were asked for."""
        return report_progress(pieces, reservation.requests) if self.progress else pieces

    def count_delta(self, delta: Delta) -> None:
        """Count the tokens of a delta that is about to be told: an engine is ahead of what its streams tell."""
        self._n_told += len(delta.token_ids)

    def describe_usage(self, completions: Sequence[Completion], *, silent: bool = False, written: int | None = None) -> dict[str, Any]:
        """Return OpenAI's `usage`. `silent`: the tokens written are no part of the answer. `written`: their number, if not all."""
        choices = [choice for completion in completions for choice in completion.choices]
        n_spelled = sum(choice.n_spelled for choice in choices)  # which are the prompt's
        prompt = sum(len(completion.prompt_token_ids) for completion in completions) + n_spelled
        if written is None:
            written = 0 if silent else sum(len(choice.token_ids) for choice in choices)
        written = max(written - n_spelled, 0)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in completions)},
        }
        details: dict[str, int] = {}
        if self.expects:
            accepted, rejected = response_stats.count_predicted(completions)
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        if self.n_thought_tokens:
            details["reasoning_tokens"] = self.n_thought_tokens
        return usage | ({"completion_tokens_details": details} if details else {})

    def describe_extras(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return `metrics`, and for one prompt `timings`, if they were asked for."""
        told: dict[str, Any] = {}
        if self.level != "none":
            told["metrics"] = {"speculative_decoding": response_stats.describe_speculation(completions, self.level)}
        if self._tells_times and len(completions) == 1 and len(completions[0].choices) == 1:
            told["metrics"] = told.get("metrics", {}) | response_stats.describe_request_times(completions[0])
        if (self.level != "none" or self.per_token_timings) and len(completions) == 1:
            told["timings"] = response_stats.describe_timings(completions[0])
        if self.verbose and self.tokenizer is not None:
            prompts = [self.tokenizer.decode(each.prompt_token_ids, skip_special_tokens=False) for each in completions]
            told["__verbose"] = {"prompt": prompts[0] if len(prompts) == 1 else prompts, "content": completions[0].text}
        return told

    def describe_sources(self, part: Choice | Delta) -> dict[str, Any]:
        """Return what a choice says of its tokens, where it was asked for."""
        return {"ngramspec": {"tokens": response_stats.list_token_sources(part.texts, part.draft_sources)}} if self.sources else {}

    def describe_token_ids(self, part: Choice | Delta) -> dict[str, Any]:
        """Return vLLM's `token_ids` of a choice, if they were asked for."""
        return {"token_ids": part.token_ids} if self.token_ids else {}

    def describe_stop(self, part: Choice | Delta) -> dict[str, Any]:
        """Return vLLM's `stop_reason`: the stop string, or the one of `stop_token_ids`, that ended a text."""
        return {} if part.stop_reason is None else {"stop_reason": part.stop_reason}

    def make_last_chunks(self, kind: str, completions: Sequence[Completion], *, silent: bool = False) -> list[dict[str, Any]]:
        """Return the last piece of a stream, where there is something to say."""
        extras = self.describe_extras(completions)
        if not self.include_usage:
            return [self.make_head(kind) | {"choices": []} | extras] if extras else []
        return [self.make_head(kind) | {"choices": [], "usage": self.describe_usage(completions, silent=silent)} | extras]


class InputHandler(CompletionHandler):
    """Makes one input of a request, and its answer."""

    n_chars: int
    """Characters of the prompt."""

    def make_input(self) -> EngineInput:
        """Return what the engine is asked; for `Encoders`. Raises ApiError, ValueError."""
        raise NotImplementedError

    def compile_grammar(self, asked: EngineInput) -> None:
        """Compile the request's grammar, which may take seconds. Raises ApiError (400)."""
        raise NotImplementedError

    async def prepare_input(self, encoders: Encoders, tenant: str) -> EngineInput:
        """Make the input in the encoders' threads, and compile its grammar, if it has one, in another. Raises ApiError."""
        asked = await encoders.run(tenant, self.n_chars, self.make_input)
        if asked.params.grammar is not None:
            await asyncio.to_thread(self.compile_grammar, asked)
        return asked


@dataclass(slots=True)
class Conversation:
    """The conversation of one request."""

    state: ServerState
    prompts: Prompts
    turns: Sequence[Turn]
    toolbox: Toolbox
    param: str
    """The field that the turns come from."""
    style: Style = ANSWER
    held: bool = False
    """A grammar holds the whole answer to calls, or to the form that was asked for. Known when there is an input."""
    separates_thoughts: bool = True
    """Thoughts are no part of the text, unless the server's settings say so."""
    _ids: Sequence[int] = ()
    _form: FieldGrammar | None = None
    _is_formed: bool = False

    def __post_init__(self) -> None:
        """Check that the model can answer it, and apply the server's settings. Raises ApiError (400)."""
        if not self.prompts.has_chat_template:
            why = "this model has no chat template; /v1/completions continues texts"
            raise make_field_error(self.param, why, "not_supported")
        self.style = self.style._replace(variables={**self.state.settings.chat_template_kwargs, **self.style.variables})
        self.separates_thoughts = self.state.settings.reasoning_format != "none"
        most = self.state.engine.max_model_len
        if len(self.turns) > most:
            raise make_context_error(len(self.turns), most, self.param, at_least=True)

    @property
    def n_chars(self) -> int:
        """Characters of all that the template shows."""
        turns = sum(
            len(turn.content) + len(turn.thoughts) + sum(len(call.name) + len(call.arguments) for call in turn.calls) for turn in self.turns
        )
        return turns + len(str(self.toolbox.prompt_tools)) + len(str(self.style.variables))

    def count_tokens(self) -> int:
        """Return the number of tokens of the prompt, however many; for `Encoders`. Raises ApiError, ValueError."""
        return len(self.prompts.chat(self.turns, self.toolbox.prompt_tools, self.style))

    def count_room(self, n_prompt: int, n: int = 1) -> int:
        """Return the most tokens that each of `n` answers to a prompt of `n_prompt` tokens may have."""
        return max(min(self.state.limits.count_room(n_prompt), self.state.settings.limits.output_tokens // n), 1)

    def encode(self, request: OpenAIRequest, max_tokens: int | None) -> list[int]:
        """Render and encode the prompt; for `Encoders`. Raises ApiError, ValueError."""
        limits = self.state.limits
        if self.toolbox.tools and request.skip_special_tokens is False:  # type: ignore[attr-defined]
            why = "not beside tools, whose calls are told apart from text by special tokens"
            raise make_field_error("skip_special_tokens", why, "not_supported")
        check = partial(limits.check_text, param=self.param) if request.truncate_prompt_tokens is None else None
        ids = self.prompts.chat(self.turns, self.toolbox.prompt_tools, self.style, check)
        room = self.state.engine.max_model_len - (max_tokens or 1)
        ids = cut_prompt(ids, request.truncate_prompt_tokens, room=room, side=request.truncation_side)
        limits.check_prompt(len(ids), self.param)
        if not ids:
            raise make_field_error(self.param, "the model's chat template makes nothing of them")
        return ids

    def make_input(
        self,
        ids: list[int],
        request: OpenAIRequest,
        hints: Hints,
        *,
        max_tokens: int | None,
        n: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> EngineInput:
        """Return what the engine is asked with these ids; `compile_grammar` checks its grammar. Raises ApiError."""
        state, box = self.state, self.toolbox
        form = self._form = read_grammar(request)
        grammar = form_grammar = form and form[1]
        if box.tools:
            grammar = box.make_grammar(self.prompts.calls, self.prompts.added, form_grammar)
            self.held = grammar is not None and (box.required or form is not None)
        self._ids, self._is_formed = ids, form is not None or (grammar is not None and box.required)
        self.separates_thoughts &= request.skip_special_tokens is not False  # type: ignore[attr-defined]
        if max_tokens is None:
            max_tokens = self.count_room(len(ids), n)
        params = make_params(
            request, state, max_tokens=max_tokens, n=n, logprobs=logprobs, grammar=grammar, prompt_logprobs=prompt_logprobs
        )
        state.limits.check_params(params)
        state.limits.check_vocabulary(params, len(ids))
        return EngineInput(ids, params, hints)

    def compile_grammar(self, asked: EngineInput) -> None:
        """Compile the grammar of `make_input`. May take seconds, once for each of a tenant. Raises ApiError (400)."""
        engine, tenant = self.state.engine, asked.hints["tenant"]
        check_grammar(self._form, engine, tenant)
        if self.toolbox.tools and asked.params.grammar is not None:
            self.toolbox.check_grammar(lambda each: engine.compile_grammar(each, tenant=tenant), asked.params.grammar)

    def make_stream_parser(self) -> StreamParser:
        """Return what follows one choice of the answer."""
        box, prompts = self.toolbox, self.prompts
        thoughts = None
        if self.separates_thoughts and not self._is_formed:  # a form leaves no room for thoughts
            thoughts = prompts.make_thought_reader(self.turns, self.style, self._ids)
        return prompts.make_stream_parser(box, thoughts, held=self.held)


def make_params(
    request: OpenAIRequest,
    state: ServerState,
    *,
    max_tokens: int,
    n: int,
    logprobs: int | None,
    grammar: Grammar | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request. Raises ApiError (400) that names the field."""
    given = {"temperature": TEMPERATURE, "seed": None} | state.settings.sampling | read_sampling_fields(request, OTHER_NAMES)
    check_token_ids(request.logit_bias or {})
    given |= {"max_tokens": max_tokens} | ({} if request.seed is None else {"seed": request.seed})
    try:
        return SamplingParams(
            n=n,
            stop=request.stop or (),
            logit_bias=read_bias((request.logit_bias or {}).items(), state.engine, state.settings.limits.bias),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            **given,
        )
    except ValueError as error:
        raise make_bad_request(error) from None


def read_arguments(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an answer can hold them; of a call that was cut or is nested too deeply, none.

    A number that JSON cannot say, such as NaN or 1e999, is null; half of a surrogate pair is U+FFFD.
    """
    text = replace_lone_surrogates((arguments or "{}").encode())
    try:
        found = json.loads(text, parse_float=_read_finite, parse_constant=lambda name: None)
        from_json(text)  # refuses what is nested deeper than answers are written
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_finite(number: str) -> float | None:
    return value if math.isfinite(value := float(number)) else None


async def hold_until_done(pieces: AsyncIterator[PromptProgress | Piece]) -> AsyncIterator[PromptProgress | Piece]:
    """Yield the deltas of each input only when it has ended, for what is not known before."""
    waiting: dict[int, list[Delta]] = {}
    async for piece in pieces:
        if isinstance(piece, PromptProgress):
            yield piece
            continue
        number, delta = piece
        waiting.setdefault(number, []).append(delta)
        if delta.completion is not None:
            waiting[number][0].completion = delta.completion
            for each in waiting.pop(number):
                yield number, each

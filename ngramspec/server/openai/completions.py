"""`/v1/completions` and `/v1/models` as OpenAI has them: texts to be continued, one or several, or filled in before a suffix.

A checked request becomes one `EngineInput` per prompt; completions or their deltas become an answer or a stream of chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ngramspec.engine.llm_engine import Hints
from ngramspec.engine.llm_engine import Request as EngineRequest
from ngramspec.outputs import Choice, Completion, Delta, TokenLogprob
from ngramspec.prompts.chat_template import Prompts
from ngramspec.server.auth import Identity, identify
from ngramspec.server.engine_input import EngineInput, cut_prompt, encode_prediction
from ngramspec.server.error_responses import make_field_error
from ngramspec.server.middleware import ParsedBodyRoute
from ngramspec.server.openai.beams import check_beam_params, search_beams
from ngramspec.server.openai.handler import CompletionHandler, hold_until_done, make_params
from ngramspec.server.openai.schemas import CompletionRequest, CompletionResponse, Model, ModelList
from ngramspec.server.prompt_progress import PromptProgress
from ngramspec.server.queue import Piece
from ngramspec.server.request_fields import OTHER_NAMES, check_grammar, read_grammar, read_sampling_fields, read_unfinished
from ngramspec.server.sse import GENERATES, EventStream
from ngramspec.server.state import ServerState, model_not_found
from ngramspec.server.token_strings import LEAST, TokenIdTexts, TokenTexts, clip_logprob, describe_prompt_logprobs
from ngramspec.tokenizer.detokenizer import SpecialTokens

KIND = "text_completion"
MAX_TOKENS = 16  # OpenAI's default
# A token's id, its log-probability, and what it added to the text.
_Token = tuple[int, TokenLogprob | None, str]


def make_router(state: ServerState) -> APIRouter:
    routes = APIRouter(tags=["openai"], route_class=ParsedBodyRoute)
    engine = state.engine
    prompts, texts = state.prompts, state.texts
    now = datetime.now(UTC).replace(microsecond=0)
    of_model = {
        "object": "model",
        "created": int(now.timestamp()),
        "owned_by": "ngramspec",
        "max_model_len": engine.max_model_len,
        "max_input_tokens": engine.max_model_len,
        "max_tokens": min(engine.max_model_len, state.settings.limits.output_tokens),
        "parent": None,
        "meta": {"n_ctx": engine.max_model_len, "n_vocab": engine.vocab_size},
    }
    of_model |= {"type": "model", "created_at": now.isoformat()}
    of_model |= {"aliases": list(state.names), "tags": list(state.settings.tags)}
    listed = {name: {"id": name, "root": name, "display_name": name} | of_model for name in state.names}

    def describe_models(names: Sequence[str]) -> dict[str, Any]:
        data = [listed[name] for name in names]
        return {"object": "list", "data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}

    @routes.get("/v1/models", response_model=ModelList)
    async def list_names(identity: Annotated[Identity, Depends(identify)]) -> dict[str, Any]:
        """List the model under each of its names, in the words of OpenAI and of Anthropic."""
        return describe_models(state.names)

    @routes.get("/models", response_model=ModelList, tags=["llama.cpp"])
    async def list_models(identity: Annotated[Identity, Depends(identify)]) -> dict[str, Any]:
        """List the model once, with all its names as `aliases`."""
        return describe_models(state.names[:1])

    @routes.get("/v1/models/{name:path}", response_model=Model)
    async def one_model(name: str, identity: Annotated[Identity, Depends(identify)]) -> dict[str, Any]:
        if name not in listed:
            raise model_not_found(name, state.names)
        return listed[name]

    @routes.post("/v1/completions", response_model=CompletionResponse, response_model_exclude_unset=True, responses=GENERATES)
    async def complete(body: CompletionRequest, http: Request, identity: Annotated[Identity, Depends(identify)]) -> Any:
        """Continue one or several texts."""
        handler = _TextHandler(state, prompts, texts, body, identity)
        with state.admission.reserve(len(handler.prompts) * handler.best_of) as reservation:
            await asyncio.to_thread(check_grammar, handler.form, engine, identity.tenant)
            inputs = await state.encoders.run(identity.tenant, handler.n_chars, handler.make_inputs)
            if handler.streams:
                pieces = state.admission.stream(reservation, http, inputs)
                return EventStream(reservation, handler.stream_events(handler.follow(reservation, pieces), reservation.requests))
            if handler.beams:
                completions = await search_beams(state.admission, reservation, http, inputs, handler.length_penalty)
            else:
                completions = await state.admission.complete(reservation, http, inputs)
            return await handler.respond(lambda: handler.answer(completions))

    return routes


class _TextHandler(CompletionHandler):
    """One request of /v1/completions."""

    def __init__(self, state: ServerState, prompts: Prompts, texts: TokenTexts, body: CompletionRequest, identity: Identity) -> None:
        super().__init__(state, body, identity, "cmpl-")
        self._state, self._engine, self._limits = state, state.engine, state.limits
        self._prompts, self._body = prompts, body
        self._texts = TokenIdTexts(texts) if self.names_token_ids else texts
        self._n_logprobs = body.n_probs or None if body.logprobs is None else body.logprobs
        self._parse_special = state.settings.parse_special if body.parse_special is None else body.parse_special
        self.prompts = _list_prompts(body.prompt)
        self.n = next((n for n in (body.n, body.n_cmpl) if n is not None), 1)
        self.best_of = self.n if body.best_of is None else body.best_of
        self.echo = bool(body.echo)
        asked = body.n_predict if body.max_tokens is None else body.max_tokens
        max_tokens = state.settings.sampling.get("max_tokens", MAX_TOKENS) if asked is None else asked
        self.beams, self.length_penalty = bool(body.use_beam_search), 1.0 if body.length_penalty is None else body.length_penalty
        for name, wrong in (("stream", self.streams), ("best_of", self.best_of > self.n), ("suffix", bool(body.suffix))):
            _refuse(self.beams and wrong, name, "not with use_beam_search")
        self.silent = max_tokens == 0  # nothing is to be written: one token is, since the engine must, and is dropped
        _refuse(not self.prompts, "prompt", "an empty list")
        _refuse(self.best_of < self.n, "best_of", f"must be n ({self.n}) or more, got {self.best_of}")
        _refuse(self.best_of > self.n and self.streams, "best_of", "more than n cannot be streamed")
        _refuse(self.echo and body.truncate_prompt_tokens is not None, "echo", "not with truncate_prompt_tokens")
        _refuse(body.prompt_logprobs is not None and self.streams, "prompt_logprobs", "not in a stream")
        scored = self._n_logprobs if self.echo else None
        _refuse(None not in (scored, body.prompt_logprobs) and scored != body.prompt_logprobs, "prompt_logprobs", "with echo, as logprobs")
        if body.suffix:
            _refuse(state.fim is None, "suffix", "this model has no fill-in-the-middle tokens", "not_supported")
            _refuse(self.echo, "echo", "not with suffix")
            _refuse(body.truncate_prompt_tokens is not None, "truncate_prompt_tokens", "not with suffix")
            _refuse(not all(isinstance(prompt, str) for prompt in self.prompts), "suffix", "only with prompts of text")
        self._fim = state.fim if body.suffix else None
        self.form = read_grammar(body)
        self._fills_context = max_tokens < 0  # as many tokens as fit, which is known when the prompts are encoded
        params = make_params(
            body,
            state,
            max_tokens=max(body.min_tokens or 1, 1) if self._fills_context else max(max_tokens, 1),  # type: ignore[attr-defined]
            n=self.best_of,
            logprobs=0 if self._n_logprobs is None and self.best_of > self.n else self._n_logprobs,  # they rank
            prompt_logprobs=body.prompt_logprobs if scored is None else scored,
            grammar=self.form and self.form[1],
        )
        self._limits.check_params(params, len(self.prompts))
        state.admission.check_sequences(len(self.prompts) * self.best_of)  # before anything is done for each of the prompts
        if self._fim is not None and not params.ignore_eos:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *self._fim.stop_ids))
        self._params = params
        self._unfinished: dict[str, str | None] = {}
        if self._fim is not None:
            self._unfinished = {
                prompt: read_unfinished(self._fim, prompt, body, self.form, state.settings.sampling) for prompt in map(str, self.prompts)
            }
        if self.beams:
            check_beam_params(params, state.settings.sampling.keys() - read_sampling_fields(body, OTHER_NAMES).keys())
        texts_given = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        self.n_chars = sum(map(len, [*texts_given, body.suffix or "", body.prediction or ""]))
        """Characters to be encoded."""
        if body.truncate_prompt_tokens is None:
            for prompt in texts_given:
                self._limits.check_text(prompt + (body.suffix or ""))
        self._special = SpecialTokens.from_params(body.skip_special_tokens is not False, body.spaces_between_special_tokens is not False)  # type: ignore[attr-defined]

    def make_inputs(self) -> list[EngineInput]:
        """Encode the prompts, which may take a while, and return what the engine is asked. Raises ApiError, ValueError."""
        prompts = [self._encode(prompt) for prompt in self.prompts]
        params = self._params
        if self._fills_context:
            params = replace(params, max_tokens=self._limits.count_room(max(map(len, prompts))))
            self._limits.check_params(params, len(prompts))
        self._limits.check_vocabulary(replace(params, n=params.n * len(prompts)), sum(map(len, prompts)))
        if self._fim is None:
            encode_prediction(self.hints, self._body.prediction, self._engine)
            return [EngineInput(ids, params, self.hints) for ids in prompts]
        inputs = []
        for ids, prompt in zip(prompts, self.prompts, strict=True):
            cursor = str(prompt), self._body.suffix or ""
            healed, hints = self._unfinished[cursor[0]] or "", Hints(**self.hints, cursor=cursor)
            encode_prediction(hints, self._body.prediction, self._engine, healed)
            self._state.expect_prompts(hints, *cursor)
            inputs.append(EngineInput(ids, replace(params, healed=healed), hints))
        return inputs

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            ids = prompt
            last = self._engine.vocab_size - 1
            _refuse(bool(ids) and max(ids) > last, "prompt", f"token ids must be 0 to {last}; one is out of vocabulary")
        elif self._fim is not None:
            ids = self._fim.make_prompt(prompt, self._body.suffix or "", is_healed=self._unfinished[prompt] is not None)
        else:
            ids = self._prompts.to_continue(prompt, parse_special=self._parse_special)
        room = self._engine.max_model_len - (1 if self._fills_context else self._params.max_tokens)
        ids = cut_prompt(ids, self._body.truncate_prompt_tokens, room=room, side=self._body.truncation_side)
        _refuse(not ids, "prompt", "is empty, and this model's tokenizer begins texts with nothing")
        self._limits.check_prompt(len(ids))
        return ids

    # ------------------------------------------------------------------ answers

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for number, completion in enumerate(completions):
            best = completion.choices
            if self.n < len(best):
                best = sorted(best, key=_mean_logprob, reverse=True)[: self.n]
            choices += [self._make_choice(number * self.n + i, number, completion, choice) for i, choice in enumerate(best)]
        answer = self.make_head(KIND) | {"choices": choices, "usage": self.describe_usage(completions, silent=self.silent)}
        return answer | self.describe_extras(completions)

    def _make_choice(self, index: int, number: int, completion: Completion, choice: Choice) -> dict[str, Any]:
        before = self._get_prompt_text(number) if self.echo else ""
        logprobs = None
        if self._n_logprobs is not None:
            logprobs = describe_logprobs(self._texts, self._get_prompt_tokens(number, completion) if self.echo else [], 0)
            if not self.silent:
                written = describe_logprobs(self._texts, _list_tokens(choice), len(before))
                logprobs = {name: values + written[name] for name, values in logprobs.items()}
        told: dict[str, Any] = {
            "index": index,
            "text": before if self.silent else before + choice.text,
            "logprobs": logprobs,
            "finish_reason": "length" if self.silent else choice.finish_reason,
        }
        told |= dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "token_ids"))  # null unless asked for, as in vLLM
        if self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = describe_prompt_logprobs(self._texts, completion.prompt_logprobs or [])
        if self.token_ids:
            told["prompt_token_ids"] = completion.prompt_token_ids
        return told | ({} if self.silent else self._describe_part(choice))

    def _describe_part(self, part: Choice | Delta) -> dict[str, Any]:
        return self.describe_sources(part) | self.describe_token_ids(part) | self.describe_stop(part)

    async def stream_events(
        self, pieces: AsyncIterator[PromptProgress | Piece], requests: Sequence[EngineRequest]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the pieces of a stream. With `echo` each text begins with its prompt, whose log-probabilities are known at the end only."""
        offsets: dict[int, int] = {}  # choice: length of its text so far
        completions: dict[int, Completion] = {}
        scored = self.echo and self._n_logprobs is not None
        async for piece in hold_until_done(pieces) if scored else pieces:
            if not isinstance(piece, PromptProgress):
                self.count_delta(piece[1])
            head = self.make_chunk_head(KIND, requests)
            if isinstance(piece, PromptProgress):
                silence = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
                yield head | {"choices": [silence], "prompt_progress": piece.describe()}
                continue
            number, delta = piece
            if delta.completion is not None:
                completions[number] = delta.completion
            index = number * self.n + delta.index
            prompt_ids = {}
            if index not in offsets:
                offsets[index] = 0
                prompt_ids = {"prompt_token_ids": requests[number].completion.prompt_token_ids} if self.token_ids else {}
                if self.echo:
                    text = self._get_prompt_text(number)
                    tokens = self._get_prompt_tokens(number, completions[number]) if scored else []
                    logprobs = describe_logprobs(self._texts, tokens, 0) if scored else None
                    yield head | {"choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}]}
                    offsets[index] = len(text)
            if (choice := self._make_chunk(index, delta, offsets[index])) or prompt_ids:
                yield head | {"choices": [(choice or {"index": index, "text": "", "logprobs": None, "finish_reason": None}) | prompt_ids]}
            offsets[index] += len(delta.text)
        for last in self.make_last_chunks(KIND, list(completions.values()), silent=self.silent):
            yield last

    def _make_chunk(self, index: int, delta: Delta, offset: int) -> dict[str, Any] | None:
        """Return a choice with what a delta adds; None where it has nothing to say."""
        if self.silent:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": "length"} if delta.finish_reason else None
        logprobs = None
        if self._n_logprobs is not None and delta.token_ids:
            logprobs = describe_logprobs(self._texts, _list_tokens(delta), offset)
        if not (delta.text or delta.finish_reason or logprobs or ((self.sources or self.token_ids) and delta.token_ids)):
            return None
        piece = {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return piece | self._describe_part(delta)

    def _get_prompt_text(self, number: int) -> str:
        prompt = self.prompts[number]
        return prompt if isinstance(prompt, str) else "".join(self._texts.decode_each(prompt, self._special))

    def _get_prompt_tokens(self, number: int, completion: Completion) -> list[_Token]:
        ids = completion.prompt_token_ids
        n_begin, special = 0, self._special
        if isinstance(self.prompts[number], str):  # which shows the control tokens in it, but not the one that the tokenizer puts before
            n_begin, special = len(self._prompts.to_continue("", parse_special=False)), SpecialTokens.SHOWN
        added = [""] * n_begin + self._texts.decode_each(ids[n_begin:], special)
        return list(zip(ids, completion.prompt_logprobs or [], added, strict=True))


def _list_tokens(part: Choice | Delta) -> list[_Token]:
    return list(zip(part.token_ids, part.logprobs or [], part.texts, strict=True))


def describe_logprobs(texts: TokenTexts, tokens: Sequence[_Token], offset: int) -> dict[str, Any]:
    """Return log-probabilities as /v1/completions has them.

    `offset`: length of the text before. A prompt's first token has no log-probability. `top_logprobs` has the one that was taken, which is
    first as in vLLM, and the most likely ones.
    """
    found: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token, logprob, added in tokens:
        found["text_offset"].append(offset)
        found["tokens"].append(texts.get_text(token))
        found["token_logprobs"].append(None if logprob is None else clip_logprob(logprob.logprob))
        found["top_logprobs"].append(None if logprob is None else _make_top(texts, logprob))
        offset += len(added)
    return found


def _make_top(texts: TokenTexts, logprob: TokenLogprob) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, value in ((logprob.token_id, logprob.logprob), *logprob.top):
        text = texts.get_text(token)
        top[text] = max(clip_logprob(value), top.get(text, LEAST))  # of two with one text, the likelier
    return top


def _list_prompts(prompt: Any) -> Sequence[str | list[int]]:
    """Return the prompts of a request; without one, an empty text."""
    if isinstance(prompt, list):
        return [prompt] if prompt and isinstance(prompt[0], int) else prompt
    return ["" if prompt is None else prompt]


def _refuse(wrong: bool, param: str, why: str, code: str | None = None) -> None:
    if wrong:
        raise make_field_error(param, why, code)


def _mean_logprob(choice: Choice) -> float:
    """Return the mean log-probability of a token."""
    logprobs = choice.logprobs or []
    return sum(each.logprob for each in logprobs) / max(len(logprobs), 1)

"""`/v1/completions` and `/v1/models` as OpenAI has them: texts to be continued, one or several, or filled in before a suffix.

A checked request becomes one work per prompt; completions or their deltas become an answer or a stream of pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from ngramspec.outputs import Choice, Completion, Delta, TokenLogprob
from ngramspec.server.auth import Identity, identify
from ngramspec.server.chat_template import Prompts
from ngramspec.server.error_responses import ApiError, refusing
from ngramspec.server.openai.handler import CompletionHandler, held
from ngramspec.server.openai.logprobs import legacy
from ngramspec.server.openai.schemas import CompletionRequest, CompletionResponse, Model, ModelList
from ngramspec.server.queue import Work
from ngramspec.server.sse import GENERATES, EventStream
from ngramspec.server.state import State, no_model
from ngramspec.server.token_strings import TokenTexts
from ngramspec.tokenizer.detokenizer import SpecialTokens

KIND = "text_completion"
MAX_TOKENS = 16
"""Where a request does not say, as OpenAI has it."""


def router(state: State) -> APIRouter:
    routes = APIRouter(tags=["openai"])
    engine = state.engine
    prompts, texts = Prompts(engine), TokenTexts(engine.tokenizer)
    of_model = {"object": "model", "created": int(time.time()), "owned_by": "ngramspec", "max_model_len": engine.max_model_len}
    listed = {name: {"id": name} | of_model for name in state.names}

    @routes.get("/models", include_in_schema=False)
    @routes.get("/v1/models", response_model=ModelList)
    async def models(identity: Annotated[Identity, Depends(identify)]) -> dict[str, Any]:
        return {"object": "list", "data": list(listed.values())}

    @routes.get("/v1/models/{name:path}", response_model=Model)
    async def one_model(name: str, identity: Annotated[Identity, Depends(identify)]) -> dict[str, Any]:
        if name not in listed:
            raise no_model(name, state.names)
        return listed[name]

    @routes.post("/v1/completions", response_model=CompletionResponse, response_model_exclude_unset=True, responses=GENERATES)
    async def complete(body: CompletionRequest, http: Request, identity: Annotated[Identity, Depends(identify)]) -> Any:
        """Continue one or several texts."""
        handler = _TextHandler(state, prompts, texts, body, identity)
        with state.admission.reserve(len(handler.prompts) * handler.params.n) as reservation:
            await asyncio.to_thread(body.check_form, engine, identity.tenant)
            works = await state.encoders.run(identity.tenant, handler.n_chars, handler.works)
            if handler.streams:
                return EventStream(reservation, handler.events(state.admission.stream(reservation, http, works)))
            return handler.answer(await state.admission.results(reservation, http, works))

    return routes


class _TextHandler(CompletionHandler):
    """One request of /v1/completions."""

    def __init__(self, state: State, prompts: Prompts, texts: TokenTexts, body: CompletionRequest, identity: Identity) -> None:
        super().__init__(state, body, identity, "cmpl")
        self._engine, self._bounds = state.engine, state.bounds
        self._prompts, self._texts, self._body = prompts, texts, body
        self._parse_special = state.settings.parse_special if body.parse_special is None else body.parse_special
        self.prompts = _several(body.prompt)
        self.n = 1 if body.n is None else body.n
        best_of = self.n if body.best_of is None else body.best_of
        self.echo = bool(body.echo)
        asked = body.n_predict if body.max_tokens is None else body.max_tokens
        self._fills_context = asked is not None and asked < 0
        max_tokens = MAX_TOKENS if asked is None else 1 if self._fills_context else asked
        self.silent = max_tokens == 0
        """Nothing is to be written: one token is, for the engine must, and is dropped."""
        _refuse(not self.prompts, "prompt", "an empty list")
        _refuse(best_of < self.n, "best_of", f"must be n ({self.n}) or more, got {best_of}")
        _refuse(best_of > self.n and self.streams, "best_of", "more than n cannot be streamed")
        _refuse(self.echo and body.truncate_prompt_tokens is not None, "echo", "not with truncate_prompt_tokens")
        if body.suffix:
            _refuse(state.fim is None, "suffix", "this model has no fill-in-the-middle tokens", "not_supported")
            _refuse(self.echo, "echo", "not with suffix")
            _refuse(body.truncate_prompt_tokens is not None, "truncate_prompt_tokens", "not with suffix")
            _refuse(not all(isinstance(prompt, str) for prompt in self.prompts), "suffix", "only with prompts of text")
        logprobs = 0 if body.logprobs is None and best_of > self.n else body.logprobs  # they rank
        prompt_logprobs = body.logprobs if self.echo else None
        self.params = body.params(max_tokens=max(max_tokens, 1), n=best_of, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        self._bounds.check(self.params, len(self.prompts))
        texts_given = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        self.n_chars = sum(map(len, [*texts_given, body.suffix or "", body.prediction or ""]))
        """Of the texts that are to be encoded."""
        if body.truncate_prompt_tokens is None:
            for prompt in texts_given:
                self._bounds.check_text(prompt + (body.suffix or ""))
        self._special = SpecialTokens.from_params(self.params.skip_special_tokens, self.params.spaces_between_special_tokens)
        self._fim = state.fim if body.suffix else None
        if self._fim is not None and not self.params.ignore_eos:
            self.params = replace(self.params, stop_token_ids=(*self.params.stop_token_ids, *self._fim.stop_ids))

    def works(self) -> list[Work]:
        """Raises ApiError. Encodes; may take a while."""
        with refusing():
            if self._body.prediction is not None:
                self.hints["prediction"] = self._engine.encode_text(self._body.prediction)
            given = [self._ids(prompt) for prompt in self.prompts]
            if self._fills_context:
                left = max(self._engine.max_model_len - max(map(len, given)), 1)
                self.params = replace(self.params, max_tokens=left)
                self._bounds.check(self.params, len(given))
            return [Work(ids, self.params, self.hints) for ids in given]

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = self._continued(prompt) if self._fim is None else self._fim.prompt(prompt, self._body.suffix or "")
        else:
            ids = prompt
            last = self._engine.vocab_size - 1
            _refuse(bool(ids) and max(ids) > last, "prompt", f"token ids must be 0 to {last}")
        ids = self._body.cut(ids, self._engine.max_model_len - self.params.max_tokens)
        _refuse(not ids, "prompt", "is empty, and this model's tokenizer begins texts with nothing")
        self._bounds.check_prompt(len(ids))
        return ids

    def _continued(self, prompt: str) -> list[int]:
        return self._prompts.to_continue(prompt, parse_special=self._parse_special)

    # ------------------------------------------------------------------ answers

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = []
        for number, completion in enumerate(completions):
            best = completion.choices
            if self.n < len(best):
                best = sorted(best, key=_likelihood, reverse=True)[: self.n]
            choices += [self._choice(number * self.n + i, number, completion, choice) for i, choice in enumerate(best)]
        answer = self.head(KIND) | {"choices": choices, "usage": self.usage(completions, silent=self.silent)}
        return answer | self.extras(completions)

    def _choice(self, index: int, number: int, completion: Completion, choice: Choice) -> dict[str, Any]:
        before = self._prompt_text(number) if self.echo else ""
        tokens: list[tuple[int, TokenLogprob | None, str]] = []
        if self._body.logprobs is not None:
            tokens = self._prompt_tokens(completion) if self.echo else []
            if not self.silent:
                tokens += zip(choice.token_ids, choice.logprobs or [], choice.texts, strict=True)
        return {
            "index": index,
            "text": before if self.silent else before + choice.text,
            "logprobs": None if self._body.logprobs is None else legacy(self._texts, tokens, 0),
            "finish_reason": "length" if self.silent else choice.finish_reason,
        } | ({} if self.silent else self.told_sources(choice) | self.told_stop(choice))

    async def events(self, pieces: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[dict[str, Any]]:
        """The pieces of a stream. With `echo` each text begins with its prompt, whose log-probabilities are known at the end only."""
        head = self.chunk(KIND)
        offsets: dict[int, int] = {}  # choice: length of its text so far
        completions: dict[int, Completion] = {}
        scored = self.echo and self._body.logprobs is not None
        async for number, delta in held(pieces) if scored else pieces:
            if delta.completion is not None:
                completions[number] = delta.completion
            index = number * self.n + delta.index
            if index not in offsets:
                offsets[index] = 0
                if self.echo:
                    text = self._prompt_text(number)
                    tokens = self._prompt_tokens(completions[number]) if scored else []
                    logprobs = legacy(self._texts, tokens, 0) if scored else None
                    yield head | {"choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}]}
                    offsets[index] = len(text)
            if choice := self._piece(index, delta, offsets[index]):
                yield head | {"choices": [choice]}
            offsets[index] += len(delta.text)
        for last in self.closing(KIND, list(completions.values()), silent=self.silent):
            yield last

    def _piece(self, index: int, delta: Delta, offset: int) -> dict[str, Any] | None:
        """A choice with what a delta adds; None where it has nothing to say."""
        if self.silent:
            return {"index": index, "text": "", "logprobs": None, "finish_reason": "length"} if delta.finish_reason else None
        logprobs = None
        if self._body.logprobs is not None and delta.token_ids:
            logprobs = legacy(self._texts, list(zip(delta.token_ids, delta.logprobs or [], delta.texts, strict=True)), offset)
        if not (delta.text or delta.finish_reason or logprobs or (self.sources and delta.token_ids)):
            return None
        piece = {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return piece | self.told_sources(delta) | self.told_stop(delta)

    def _prompt_text(self, number: int) -> str:
        prompt = self.prompts[number]
        return prompt if isinstance(prompt, str) else "".join(self._texts.running(prompt, self._special))

    def _prompt_tokens(self, completion: Completion) -> list[tuple[int, TokenLogprob | None, str]]:
        ids = completion.prompt_token_ids
        return list(zip(ids, completion.prompt_logprobs or [], self._texts.running(ids, self._special), strict=True))


def _several(prompt: Any) -> Sequence[str | list[int]]:
    """The prompts of a request; without one, an empty text."""
    if isinstance(prompt, list):
        return [prompt] if prompt and isinstance(prompt[0], int) else prompt
    return ["" if prompt is None else prompt]


def _refuse(wrong: bool, param: str, why: str, code: str | None = None) -> None:
    if wrong:
        raise ApiError(400, f"{param}: {why}", param=param, code=code)


def _likelihood(choice: Choice) -> float:
    """Mean log-probability of a token."""
    logprobs = choice.logprobs or []
    return sum(each.logprob for each in logprobs) / max(len(logprobs), 1)

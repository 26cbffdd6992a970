"""llama.cpp's own routes, for the editors that speak them: /infill, /completion, /tokenize, /detokenize, /props, /slots.

Requests in llama.cpp's words enter and become works for `admission`; answers leave in llama.cpp's words, errors in the envelope of all
other routes. The fields of requests are in `schemas`, those of answers in `answers`, prompts in `tokens` and `fim`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request

from ngramspec import __version__
from ngramspec.server.auth import Identity, identify, operator
from ngramspec.server.error_responses import ApiError, refusing
from ngramspec.server.fim import Fim
from ngramspec.server.llamacpp.answers import Answers
from ngramspec.server.llamacpp.schemas import (
    DetokenizeBody,
    DetokenizeResponse,
    Generation,
    InfillBody,
    LlamaCompletionBody,
    TokenizeBody,
    TokenizeResponse,
)
from ngramspec.server.llamacpp.stop_rules import Answer, finish, unless_gone
from ngramspec.server.llamacpp.tokenize import Tokens, text_of
from ngramspec.server.queue import Reservation, Work
from ngramspec.server.sse import GENERATES, EventStream
from ngramspec.server.state import State

T = TypeVar("T")
Who = Annotated[Identity, Depends(identify)]

RESERVE = 256
"""Tokens of the context that /infill keeps free for the middle where `n_predict` does not say how many."""


def router(state: State) -> APIRouter:
    routes = APIRouter(tags=["llama.cpp"])
    tokens = Tokens(state.engine)
    handler = _Handler(state, tokens)

    @routes.post("/infill", responses=GENERATES)
    async def infill(body: InfillBody, http: Request, identity: Who) -> Any:
        """The text between `input_prefix` + `prompt` and `input_suffix`, with `input_extra` (parts of other files, the best last) in view.

        Greedy unless a temperature is given. `n_predict` 0 computes the prompt into the prefix cache and writes nothing.
        """
        fim = state.fim
        if fim is None:
            message = f"{state.names[0]} has no tokens to fill in the middle with; use /completion, or a model that was trained for it"
            raise ApiError(400, message, type="not_supported_error", code="not_supported")
        with state.admission.reserve(body.n_cmpl) as reservation:
            size = len(body.input_prefix) + len(body.prompt) + len(body.input_suffix) + sum(len(chunk.text) for chunk in body.input_extra)
            ids = await handler.encode(identity, body, size, lambda: handler.between(fim, body))
            return await handler.answer(reservation, http, identity, body, [ids], stop_ids=fim.stop_ids)

    @routes.post("/completion", responses=GENERATES)
    @routes.post("/completions", responses=GENERATES)
    async def completion(body: LlamaCompletionBody, http: Request, identity: Who) -> Any:
        """Continue a prompt: text, token ids, or a list of both; a list of prompts is answered by a list.

        Control tokens are parsed in text unless `parse_special` is false, here or in the server's settings.
        """
        given = list(body.prompts())
        parse = state.settings.parse_special if body.parse_special is None else body.parse_special
        with state.admission.reserve(len(given) * body.n_cmpl) as reservation:
            for each in given:
                state.bounds.check_text(text_of(each))

            def encode() -> list[list[int]]:
                return [tokens.encode(each, bos=True, parse=parse) for each in given]

            ids = await handler.encode(identity, body, sum(len(text_of(each)) for each in given), encode)
            return await handler.answer(reservation, http, identity, body, ids, several=body.has_several)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody, identity: Who) -> TokenizeResponse:
        """The ids of a text."""
        with state.admission.reserve():
            return await state.encoders.run(identity.tenant, len(text_of(body.content)), lambda: tokens.tokenize(body))

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody, identity: Who) -> DetokenizeResponse:
        """The text of ids, control tokens included."""
        with state.admission.reserve():
            return DetokenizeResponse(
                content=await state.encoders.run(identity.tenant, len(body.tokens), lambda: tokens.decode(body.tokens))
            )

    @routes.get("/props")
    async def props(identity: Who) -> dict[str, Any]:
        """What this server is."""
        return handler.props()

    @routes.get("/slots")
    async def slots(identity: Annotated[Identity, Depends(operator)]) -> list[dict[str, Any]]:
        """How busy it is; where there are keys, for administrators.

        How far each request is can be seen from this machine and by an administrator: it tells what is drafted.
        """
        return handler.slots(detailed=identity.trusted)

    return routes


class _Handler:
    """What the routes have in common."""

    def __init__(self, state: State, tokens: Tokens) -> None:
        self.state, self.engine, self.admission = state, state.engine, state.admission
        self.answers = Answers(state.engine, tokens, state.names[0])
        self.n_slots = int(state.engine.props()["max_seqs"])

    def between(self, fim: Fim, body: InfillBody) -> list[int]:
        """The prompt of a request to fill in the middle, cut to what the context holds beside the middle."""
        bounds, length = self.state.bounds, self.engine.max_model_len
        reserve = min(body.n_predict, length // 2) if body.n_predict > 0 else min(RESERVE, length // 4)
        limit = min(length - reserve, bounds.limits.prompt_tokens or length)
        extra = [(chunk.filename, chunk.text) for chunk in body.input_extra]
        with refusing():
            return fim.prompt(body.input_prefix + body.prompt, body.input_suffix, extra, limit=limit)

    async def encode(self, identity: Identity, body: Generation, n_chars: int, prompts: Callable[[], T]) -> T:
        """The prompts' ids; the prediction's are kept for `answer`. Raises ApiError."""

        def run() -> T:
            found = prompts()
            if body.prediction is not None:
                with refusing():
                    body.predicted = self.engine.encode_text(body.prediction)
            return found

        return await self.state.encoders.run(identity.tenant, n_chars + len(body.prediction or ""), run)

    # ------------------------------------------------------------------ running

    async def answer(
        self,
        reservation: Reservation,
        http: Request,
        identity: Identity,
        body: Generation,
        prompts: list[list[int]],
        *,
        stop_ids: Sequence[int] = (),
        several: bool = False,
    ) -> Any:
        """Run `n_cmpl` works per prompt; one answer, a list of them, or a stream."""
        body.check_trust(identity)
        await asyncio.to_thread(body.check_form, self.engine, identity.tenant)
        works = list(self._works(identity, body, prompts, stop_ids))
        answers = [Answer(work, body) for work in works]
        pieces = self.admission.stream(reservation, http, works)
        if body.stream:
            return EventStream(reservation, self.answers.events(reservation, pieces, answers), done=False)
        await unless_gone(http, finish(reservation, pieces, answers))
        found = [self.answers.final(i, answer) for i, answer in enumerate(answers)]
        return found if several or len(found) > 1 else found[0]

    def _works(self, identity: Identity, body: Generation, prompts: list[list[int]], stop_ids: Sequence[int]) -> Iterator[Work]:
        hints = body.hints(identity, self.engine)
        hints["prefix_cache"] = body.cache_prompt
        with refusing():
            if body.predicted is not None:
                hints["prediction"] = body.predicted
            for ids in prompts:
                if not ids:
                    raise ApiError(400, "prompt: is empty, and this model's tokenizer begins texts with nothing", param="prompt")
                self.state.bounds.check_prompt(len(ids))
                room = max(self.engine.max_model_len - len(ids), 1)
                for i in range(body.n_cmpl):
                    params = body.params(i, room=room, stop_ids=stop_ids)
                    self.state.bounds.check(params, len(prompts) * body.n_cmpl)
                    yield Work(ids, params, hints)

    # ------------------------------------------------------------------ the server

    def props(self) -> dict[str, Any]:
        body = LlamaCompletionBody(prompt="")
        settings = self.answers.settings(body, body.params(0, room=self.engine.max_model_len)) | {"max_tokens": -1}
        engine = self.engine
        return {
            "default_generation_settings": {"id": 0, "n_ctx": engine.max_model_len, "params": settings},
            "total_slots": self.n_slots,
            "model_path": PurePath(engine.name).name,
            "model_alias": self.state.names[0],
            "chat_template": getattr(engine.tokenizer, "chat_template", None) or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"ngramspec-{__version__}",
            "exactness": engine.promise,
            "precision": engine.precision,
            "infill": self.state.fim is not None,
        }

    def slots(self, *, detailed: bool) -> list[dict[str, Any]]:
        """One per sequence that can run. No text of anybody's."""
        n_slots, status = self.n_slots, self.engine.status()
        slots: list[dict[str, Any]] = [
            {"id": i, "n_ctx": self.engine.max_model_len, "speculative": True, "is_processing": i < status.running} for i in range(n_slots)
        ]
        choices = (
            [(request, choice) for request in self.admission.requests for choice in list(request.completion.choices)] if detailed else []
        )
        running = [(request, choice) for request, choice in choices if choice.finish_reason is None]
        for slot, (request, choice) in zip(slots, running, strict=False):
            n_decoded = len(choice.token_ids)
            slot["n_prompt_tokens"] = len(request.completion.prompt_token_ids)
            slot["next_token"] = {"n_decoded": n_decoded, "n_remain": max(request.params.max_tokens - n_decoded, 0)}
        return slots

"""llama.cpp's own routes, for the editors that speak them: /infill, /completion, /tokenize, /detokenize, /props, /slots.

Requests in llama.cpp's words enter and become works for the desk; what the engine wrote leaves in llama.cpp's words, errors in the
envelope of all other routes. The fields of requests are in `llamacpp_schemas`, prompts in `fim` and `prompts`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, Request

from ngramspec import __version__
from ngramspec.batch.params import SamplingParams
from ngramspec.batch.types import Completion, Delta, TokenLogprob
from ngramspec.engine import Hints
from ngramspec.server import stats
from ngramspec.server.admission import Place, Work
from ngramspec.server.auth import Identity, identify
from ngramspec.server.errors import ApiError, refusing
from ngramspec.server.fim import Fim
from ngramspec.server.llamacpp.cutting import Answer, finish, shown, unless_gone
from ngramspec.server.llamacpp.schemas import (
    DetokenizeBody,
    DetokenizeResponse,
    Generation,
    InfillBody,
    LlamaCompletionBody,
    Piece,
    TextOrTokens,
    TokenizeBody,
    TokenizeResponse,
)
from ngramspec.server.logprobs import LEAST, TokenTexts
from ngramspec.server.openai.job import SSE, sourced
from ngramspec.server.prompts import Prompts

if TYPE_CHECKING:
    from ngramspec.server.app import State

Who = Annotated[Identity, Depends(identify)]

MAX_TEXTS = 1024
"""In a list of texts and ids: each takes some time of its own."""
MAX_PIECES = 1 << 16
"""That /tokenize tells one by one."""
RESERVE = 256
"""Tokens of the context that /infill keeps free for the middle where `n_predict` does not say how many."""


def router(state: State) -> APIRouter:
    routes = APIRouter(tags=["llama.cpp"])
    llama = _Llama(state)

    @routes.post("/infill", responses=SSE)
    async def infill(body: InfillBody, http: Request, identity: Who) -> Any:
        """The text between `input_prefix` + `prompt` and `input_suffix`, with `input_extra` (parts of other files, the best last) in view.

        Greedy unless a temperature is given. `n_predict` 0 computes the prompt into the prefix cache and writes nothing. `samplers` and
        `t_max_prompt_ms` are accepted and change nothing.
        """
        fim = state.fim
        if fim is None:
            message = f"{state.engine.name} has no tokens to fill in the middle with; use /completion, or a model that was trained for it"
            raise ApiError(400, message, type="not_supported_error", code="not_supported")
        with state.desk.place(body.n_cmpl) as place:
            ids = await asyncio.to_thread(llama.between, fim, body)
            return await llama.answer(place, http, identity, body, [ids], stop_ids=fim.stop_ids, default_temperature=0.0)

    @routes.post("/completion", responses=SSE)
    @routes.post("/completions", responses=SSE)
    async def completion(body: LlamaCompletionBody, http: Request, identity: Who) -> Any:
        """Continue a prompt: text, token ids, or a list of both; a list of prompts is answered by a list.

        Control tokens are parsed in text only with `parse_special`. `samplers` are accepted and change nothing.
        """
        given = list(body.prompts())
        with state.desk.place(len(given) * body.n_cmpl) as place:
            ids = await asyncio.to_thread(lambda: [llama.encode(each, bos=True, parse=body.parse_special) for each in given])
            return await llama.answer(place, http, identity, body, ids, several=body.has_several)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeBody, identity: Who) -> TokenizeResponse:
        """The ids of a text."""
        with state.desk.place():
            return await asyncio.to_thread(llama.tokenize, body)

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeBody, identity: Who) -> DetokenizeResponse:
        """The text of ids, control tokens included."""
        with state.desk.place():
            return DetokenizeResponse(content=await asyncio.to_thread(llama.decode, body.tokens))

    @routes.get("/props")
    async def props(identity: Who) -> dict[str, Any]:
        """What this server is."""
        return llama.props()

    @routes.get("/slots")
    async def slots(identity: Who) -> list[dict[str, Any]]:
        """How busy it is. How far each request is can be seen from this machine and by an administrator: it tells what is drafted."""
        return llama.slots(detailed=identity.trusted)

    return routes


class _Llama:
    """What the routes have in common."""

    def __init__(self, state: State) -> None:
        self.state, self.engine, self.desk = state, state.engine, state.desk
        self.prompts = Prompts(state.engine)
        self.texts = TokenTexts(state.engine.tokenizer)
        self.n_slots = int(state.engine.props()["max_seqs"])

    @property
    def tokenizer(self) -> Any:
        """Raises ApiError where there is none."""
        if self.engine.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: only token ids can be sent, and are answered", code="not_supported")
        return self.engine.tokenizer

    # ------------------------------------------------------------------ text and ids

    def encode(self, given: TextOrTokens, *, bos: bool, parse: bool) -> list[int]:
        """Ids of a text, of ids, or of a list of both; `bos`: what begins with text begins as the tokenizer begins texts."""
        parts = [given] if isinstance(given, str) else given
        if len(parts) > MAX_TEXTS and sum(isinstance(part, str) for part in parts) > MAX_TEXTS:
            raise ApiError(400, f"a list of texts and ids may have {MAX_TEXTS} texts")
        ids: list[int] = []
        with refusing():
            for at, part in enumerate(parts):
                if isinstance(part, int):
                    ids.append(part)
                elif parse:
                    ids += self.tokenizer(part, add_special_tokens=bos and at == 0)["input_ids"]
                else:
                    ids += self.prompts.plain(part) if bos and at == 0 else self.engine.encode_text(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        if ids and max(ids) >= self.engine.vocab_size:
            raise ApiError(400, f"tokens must be 0 to {self.engine.vocab_size - 1}, got {max(ids)}", param="tokens")
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def tokenize(self, body: TokenizeBody) -> TokenizeResponse:
        ids = self.encode(body.content, bos=body.add_special, parse=body.parse_special)
        if not body.with_pieces:
            return TokenizeResponse(tokens=ids)
        if len(ids) > MAX_PIECES:
            raise ApiError(400, f"with_pieces: for up to {MAX_PIECES} tokens, got {len(ids)}", param="with_pieces")
        return TokenizeResponse(tokens=[Piece(id=token, piece=_piece(self.texts.bytes(token))) for token in ids])

    def between(self, fim: Fim, body: InfillBody) -> list[int]:
        """The prompt of a request to fill in the middle, cut to what the context holds beside the middle."""
        bounds, length = self.state.bounds, self.engine.max_model_len
        reserve = min(body.n_predict, length // 2) if body.n_predict > 0 else min(RESERVE, length // 4)
        limit = min(length - reserve, bounds.limits.prompt_tokens or length)
        extra = [(chunk.filename, chunk.text) for chunk in body.input_extra]
        with refusing():
            return fim.prompt(body.input_prefix + body.prompt, body.input_suffix, extra, limit=limit)

    # ------------------------------------------------------------------ running

    async def answer(
        self,
        place: Place,
        http: Request,
        identity: Identity,
        body: Generation,
        prompts: list[list[int]],
        *,
        stop_ids: Sequence[int] = (),
        default_temperature: float = 0.8,
        several: bool = False,
    ) -> Any:
        """Run `n_cmpl` works per prompt; one answer, a list of them, or a stream."""
        for name, asked in (("return_sources", body.return_sources), ("speculative_metrics", body.speculative_metrics == "detailed")):
            if asked and not identity.trusted:
                raise ApiError(403, f"{name}: where drafts come from is told on this machine, or to an administrator", param=name)
        works = list(self._works(identity, body, prompts, stop_ids, default_temperature))
        answers = [Answer(work, body) for work in works]
        pieces = self.desk.stream(place, http, works)
        if body.stream:
            return self.desk.sse(place, http, self._events(place, pieces, answers), done=False)
        await unless_gone(http, finish(place, pieces, answers))
        found = [self._final(i, answer) for i, answer in enumerate(answers)]
        return found if several or len(found) > 1 else found[0]

    def _works(
        self, identity: Identity, body: Generation, prompts: list[list[int]], stop_ids: Sequence[int], default_temperature: float
    ) -> Iterator[Work]:
        hints: Hints = {"tenant": identity.tenant, "datastores": identity.datastores(body.datastore, self.engine.datastores)}
        hints["prefix_cache"] = body.cache_prompt
        if body.speculation is not None:
            hints["speculation"] = body.speculation
        with refusing():
            if body.prediction is not None:
                hints["prediction"] = self.engine.encode_text(body.prediction)
            for ids in prompts:
                if not ids:
                    raise ApiError(400, "prompt: is empty, and this model's tokenizer begins texts with nothing", param="prompt")
                self.state.bounds.check_prompt(len(ids))
                for i in range(body.n_cmpl):
                    params = self._params(body, len(ids), i, stop_ids, default_temperature)
                    self.state.bounds.check(params, len(prompts) * body.n_cmpl)
                    yield Work(ids, params, hints)

    def _params(self, body: Generation, n_prompt: int, i: int, stop_ids: Sequence[int], default_temperature: float) -> SamplingParams:
        room = max(self.engine.max_model_len - n_prompt, 1)
        return SamplingParams(
            max_tokens=max(body.n_predict, 1) if body.n_predict >= 0 else room,
            min_tokens=body.min_tokens or 0,
            temperature=default_temperature if body.temperature is None else body.temperature,
            top_k=40 if body.top_k is None else body.top_k,
            top_p=0.95 if body.top_p is None else body.top_p,
            min_p=0.05 if body.min_p is None else body.min_p,
            repetition_penalty=body.repetition_penalty or body.repeat_penalty or 1.0,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.bias(),
            seed=body.seed_of(i),
            stop=body.stops(),
            stop_token_ids=(*(() if body.ignore_eos else stop_ids), *(body.stop_token_ids or ())),
            ignore_eos=bool(body.ignore_eos),
            logprobs=body.n_probs or None,
        )

    # ------------------------------------------------------------------ answers

    async def _events(self, place: Place, pieces: AsyncIterator[tuple[int, Delta]], answers: list[Answer]) -> AsyncIterator[dict[str, Any]]:
        async for i, text, tokens, logprobs in shown(place, pieces, answers):
            answer = answers[i]
            if text or tokens:
                event: dict[str, Any] = {"index": i, "content": text, "tokens": tokens, "stop": False, "id_slot": i}
                event |= {"tokens_predicted": len(answer.tokens), "tokens_evaluated": len(answer.work.prompt)}
                if logprobs:
                    event["completion_probabilities"] = self._probabilities(logprobs)
                yield event
            if answer.completion is not None:
                yield self._final(i, answer)

    def _final(self, i: int, answer: Answer) -> dict[str, Any]:
        """The whole answer; of a stream, what is said at its end."""
        body, work, completion = answer.body, answer.work, answer.completion
        assert completion is not None
        fields = body.response_fields
        stop_type, stopping_word = self._end(answer, completion)
        found: dict[str, Any] = {
            "index": i,
            "content": "" if body.stream else answer.text,
            "tokens": answer.tokens if body.return_tokens and not body.stream else [],
            "id_slot": i,
            "stop": True,
            "model": self.engine.name,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": len(work.prompt),
            "generation_settings": self._settings(body, work.params),
            "prompt": self.decode(work.prompt) if self.engine.tokenizer is not None and (not fields or "prompt" in fields) else "",
            "has_new_line": "\n" in answer.text,
            "truncated": completion.finish_reason == "length" and len(work.prompt) + len(answer.tokens) >= self.engine.max_model_len,
            "stop_type": stop_type,
            "stopping_word": stopping_word,
            "tokens_cached": completion.cached_tokens,
            "timings": stats.timings(completion),
        }
        if completion.choices[0].logprobs and not body.stream:
            found["completion_probabilities"] = self._probabilities(completion.choices[0].logprobs[: len(answer.tokens)])
        if body.speculative_metrics in ("summary", "detailed"):
            found["metrics"] = {"speculative_decoding": stats.speculative(completion, body.speculative_metrics)}
        if body.return_sources:
            choice = completion.choices[0]
            n = len(answer.tokens)
            found["ngramspec"] = {"tokens": sourced(choice.texts[:n], choice.draft_sources[:n])}
        return _picked(found, fields) if fields else found

    def _end(self, answer: Answer, completion: Completion) -> tuple[str, str]:
        """(stop_type, stopping_word)"""
        params, choice = answer.work.params, completion.choices[0]
        if answer.is_cut or choice.finish_reason != "stop":
            return "limit", ""
        if choice.token_ids[-1] in {*params.stop_token_ids, *(() if params.ignore_eos else self.engine.eos_token_ids)}:
            return "eos", ""
        written = str(self.tokenizer.decode(choice.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        behind = written[max(len(answer.text) - 1, 0) :]  # - 1: alone, a text may lack its first blank
        words = [word for word in params.stop if word in behind]
        return "word", min(words, key=lambda word: (behind.find(word) + len(word), -len(word)), default="")

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = self.texts.bytes(token)
            return {"id": token, "token": raw.decode(errors="ignore"), "bytes": list(raw), "logprob": max(logprob, LEAST)}

        return [
            entry(each.token_id, each.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in each.top]}
            for each in logprobs
        ]

    def _settings(self, body: Generation, params: SamplingParams) -> dict[str, Any]:
        return {
            "n_ctx": self.engine.max_model_len,
            "n_predict": body.n_predict,
            "max_tokens": params.max_tokens,
            "seed": -1 if params.seed is None else params.seed,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "repeat_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "stop": list(params.stop),
            "ignore_eos": params.ignore_eos,
            "n_probs": body.n_probs,
            "n_indent": body.n_indent,
            "t_max_predict_ms": body.t_max_predict_ms,
            "stream": body.stream,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        }

    # ------------------------------------------------------------------ the server

    def props(self) -> dict[str, Any]:
        body = LlamaCompletionBody(prompt="")
        settings = self._settings(body, self._params(body, 0, 0, (), 0.8)) | {"max_tokens": -1}
        engine = self.engine
        return {
            "default_generation_settings": {"id": 0, "n_ctx": engine.max_model_len, "params": settings},
            "total_slots": self.n_slots,
            "model_path": PurePath(engine.name).name,
            "chat_template": getattr(engine.tokenizer, "chat_template", None) or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"ngramspec-{__version__}",
            "exactness": engine.promise,
            "infill": self.state.fim is not None,
        }

    def slots(self, *, detailed: bool) -> list[dict[str, Any]]:
        """One per sequence that can run. No text of anybody's."""
        n_slots, status = self.n_slots, self.engine.status()
        slots: list[dict[str, Any]] = [
            {"id": i, "n_ctx": self.engine.max_model_len, "speculative": True, "is_processing": i < status.running} for i in range(n_slots)
        ]
        choices = [(request, choice) for request in self.desk.requests for choice in list(request.completion.choices)] if detailed else []
        running = [(request, choice) for request, choice in choices if choice.finish_reason is None]
        for slot, (request, choice) in zip(slots, running, strict=False):
            n_decoded = len(choice.token_ids)
            slot["n_prompt_tokens"] = len(request.completion.prompt_token_ids)
            slot["next_token"] = {"n_decoded": n_decoded, "n_remain": max(request.params.max_tokens - n_decoded, 0)}
        return slots


def _picked(found: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """The fields that were asked for; "a/b" is field b of a, under that name. What is not there is left out."""
    picked: dict[str, Any] = {}
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            value = value[name] if isinstance(value, dict) and name in value else _MISSING
        if value is not _MISSING:
            picked[path] = value
    return picked


_MISSING = object()


def _piece(raw: bytes) -> str | list[int]:
    """A token's text; its bytes where they are not whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)

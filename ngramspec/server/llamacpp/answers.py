"""Answers in llama.cpp's words: the chunks of a stream, and the whole that is said at its end.

They may end before the model ends them: at a line that is less indented, or at the first line end after some time. Deltas of running
requests enter, dicts leave. Knows the admission queue, and no routes.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from fastapi import Request

from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import Completion, Delta, TokenLogprob
from ngramspec.sampling_params import SamplingParams
from ngramspec.server import response_stats
from ngramspec.server.engine_input import EngineInput
from ngramspec.server.error_responses import ClientGone
from ngramspec.server.llamacpp.schemas import LlamaRequest
from ngramspec.server.llamacpp.tokenize import LlamaTokenizer
from ngramspec.server.prompt_progress import PromptProgress, report_progress
from ngramspec.server.queue import Piece, Reservation, until_gone
from ngramspec.server.request_fields import OTHER_NAMES, SHARED
from ngramspec.server.token_strings import clip_logprob

_INDENTATION = re.compile(r"\n([ \t]*)(?=[^ \t])")  # a line's, once its first other character is known


class Written(NamedTuple):
    """What is new of a text."""

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]


class LlamaAnswer:
    """What has been written for one prompt, up to where the request wants it to end."""

    def __init__(self, given: EngineInput, body: LlamaRequest, note_end: Callable[[LlamaAnswer], None] = lambda answer: None) -> None:
        """Begin an answer. `note_end` is called once all of it is written."""
        self.given, self.body, self._note_end = given, body, note_end
        self.text = ""
        self.tokens: list[int] = []
        self.is_cut = body.n_predict == 0
        """The request's own end was reached, before the engine's."""
        self.completion: Completion | None = None
        self._started: float | None = None

    def take(self, delta: Delta) -> list[Written]:
        """Add a delta; return what is new of the text: in one piece, or with log-probabilities in one for each token."""
        written = self._take(delta)
        if delta.completion is not None:
            self._note_end(self)
        return written

    def _take(self, delta: Delta) -> list[Written]:
        if delta.completion is not None:
            self.completion = delta.completion
        if self._started is None and delta.token_ids:
            self._started = time.perf_counter()
        if self.is_cut:
            return []
        start, whole = len(self.text), self.text + delta.text
        end = self._find_end(whole, start)
        self.is_cut = end is not None
        self.text = whole[:end]
        starts = [0, *accumulate(map(len, delta.texts))][: len(delta.token_ids)]  # of the tokens' texts in the delta's
        n = len(starts) if end is None else sum(start + at < end for at in starts)
        tokens, logprobs = delta.token_ids[:n], (delta.logprobs or [])[:n]
        self.tokens += tokens
        text = self.text[start:]
        if not logprobs:
            return [Written(text, tokens, logprobs)] if text or tokens else []
        ends = [*starts[1:n], len(text)]
        return [Written(text[starts[i] : ends[i]], [tokens[i]], [logprobs[i]]) for i in range(n)]

    def _find_end(self, whole: str, start: int) -> int | None:
        """Return where to cut the text, the part from `start` on being new; None: nowhere.

        Both rules are llama.cpp's: after the indentation of a line that has less of it than `n_indent`; and once time is over, after the
        next line end.
        """
        ends: list[int] = []
        if self.body.n_indent > 0:
            lines = _INDENTATION.finditer(whole, max(whole.rfind("\n", 0, start), 0))
            ends += [line.end() for line in lines if len(line[1]) < self.body.n_indent][:1]
        limit_ms = self.body.t_max_predict_ms
        if limit_ms > 0 and self._started is not None and (time.perf_counter() - self._started) * 1e3 > limit_ms:
            line_end = whole.find("\n", start)
            ends += [line_end + 1] if line_end >= 0 else []
        return min(ends, default=None)


async def run_stop_rules(
    reservation: Reservation, pieces: AsyncIterator[PromptProgress | Piece], answers: list[LlamaAnswer]
) -> AsyncIterator[PromptProgress | tuple[int, list[Written]]]:
    """Yield (number of the input, what is new of its text) for every delta, and reports on the prompt before.

    An input whose answer was cut is cancelled; its last delta is waited for, since it brings the statistics.
    """
    async for piece in pieces:
        if isinstance(piece, PromptProgress):
            yield piece
            continue
        i, delta = piece
        was_cut = answers[i].is_cut
        written = answers[i].take(delta)
        if answers[i].is_cut and not was_cut:
            reservation.requests[i].cancel()
        yield i, written


async def run_to_end(reservation: Reservation, pieces: AsyncIterator[Piece], answers: list[LlamaAnswer]) -> None:
    async for _ in run_stop_rules(reservation, pieces, answers):
        pass


async def run_unless_gone(http: Request, work: Coroutine[Any, Any, None]) -> None:
    """Wait for the work. Raises ClientGone, and cancels it, if the client leaves before it is done."""
    doing, watch = asyncio.create_task(work), asyncio.create_task(until_gone(http.receive))
    try:
        await asyncio.wait({doing, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        doing.result()
    finally:
        watch.cancel()
        doing.cancel()


def count_tokens(answer: LlamaAnswer, n_told: int, completion: Completion) -> dict[str, int]:
    """Return the numbers of tokens; those that only spell the end of the prompt's text count for neither."""
    return {"tokens_predicted": max(n_told - completion.choices[0].n_spelled, 0), "tokens_evaluated": len(answer.given.prompt)}


class AnswerFormat:
    """Words what an engine wrote as llama.cpp does."""

    def __init__(self, engine: Engine, tokens: LlamaTokenizer, model: str) -> None:
        self.engine, self.tokens, self.model = engine, tokens, model

    async def stream_events(
        self, reservation: Reservation, pieces: AsyncIterator[Piece], answers: list[LlamaAnswer]
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of a stream: what is new of each text, and at its end the rest of what `describe` says."""
        started, body = time.perf_counter(), answers[0].body
        told = report_progress(pieces, reservation.requests) if body.return_progress else pieces
        async for piece in run_stop_rules(reservation, told, answers):
            if isinstance(piece, PromptProgress):
                event: dict[str, Any] = {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": 0}
                event |= {"tokens_predicted": 0, "tokens_evaluated": piece.total, "prompt_progress": piece.describe()}
                event["timings"] = response_stats.describe_prompt_timings(piece.cache, piece.processed, piece.time_ms / 1e3)
                yield event
                continue
            i, written = piece
            answer = answers[i]
            n_told = len(answer.tokens) - sum(len(tokens) for _, tokens, _ in written)
            for text, tokens, logprobs in written:
                n_told += len(tokens)
                event = {"index": i, "content": text, "tokens": tokens, "stop": False, "id_slot": i}
                event |= count_tokens(answer, n_told, reservation.requests[i].completion)
                if logprobs:
                    event["completion_probabilities"] = self._describe_probabilities(logprobs, answer.given.params)
                if body.timings_per_token:
                    event["timings"] = response_stats.describe_timings(reservation.requests[i].completion, time.perf_counter() - started)
                yield event
            if answer.completion is not None:
                yield self.describe(i, answer)

    def describe(self, i: int, answer: LlamaAnswer) -> dict[str, Any]:
        """Return the whole answer; of a stream, what is said at its end."""
        body, given, completion = answer.body, answer.given, answer.completion
        assert completion is not None
        fields = body.response_fields
        stop_type, stopping_word = self._describe_end(answer, completion)
        found: dict[str, Any] = {
            "index": i,
            "content": "" if body.stream else answer.text,
            "tokens": answer.tokens if body.return_tokens and not body.stream else [],
            "id_slot": i,
            "stop": True,
            "model": self.model,
            **count_tokens(answer, len(answer.tokens), completion),
            "generation_settings": self.describe_settings(body, given.params),
            "prompt": self.tokens.decode(given.prompt) if self.engine.tokenizer is not None and (not fields or "prompt" in fields) else "",
            "has_new_line": "\n" in answer.text,
            "truncated": completion.finish_reason == "length" and len(given.prompt) + len(answer.tokens) >= self.engine.max_model_len,
            "stop_type": stop_type,
            "stopping_word": stopping_word,
            "tokens_cached": completion.cached_tokens,
            "timings": response_stats.describe_timings(completion),
        }
        if completion.choices[0].logprobs and not body.stream:
            logprobs = completion.choices[0].logprobs[: len(answer.tokens)]
            found["completion_probabilities"] = self._describe_probabilities(logprobs, given.params)
        if body.speculative_metrics in ("summary", "detailed"):
            found["metrics"] = {"speculative_decoding": response_stats.describe_speculation([completion], body.speculative_metrics)}
        if body.return_sources:
            choice = completion.choices[0]
            n = len(answer.tokens)
            found["ngramspec"] = {"tokens": response_stats.list_token_sources(choice.texts[:n], choice.draft_sources[:n])}
        return _pick_fields(found, fields) if fields else found

    def describe_settings(self, body: LlamaRequest, params: SamplingParams) -> dict[str, Any]:
        """Return `generation_settings`."""
        bias: list[dict[str, Any]] = [{"token": token, "bias": value} for token, value in params.logit_bias.items()]
        if params.ignore_eos:
            bias += [{"token": token, "bias": None} for token in sorted(self.engine.eos_token_ids)]  # null: never
        return {"n_ctx": self.engine.max_model_len} | describe_settings(body, params) | {"logit_bias": bias}

    def _describe_end(self, answer: LlamaAnswer, completion: Completion) -> tuple[str, str]:
        """Return (stop_type, stopping_word)."""
        choice = completion.choices[0]
        if answer.is_cut or choice.finish_reason != "stop":
            return "limit", ""
        return ("word", choice.stop_reason) if isinstance(choice.stop_reason, str) else ("eos", "")

    def _describe_probabilities(self, logprobs: Sequence[TokenLogprob], params: SamplingParams) -> list[dict[str, Any]]:
        drawn = params.post_sampling_probs

        def describe_token(token: int, logprob: float) -> dict[str, Any]:
            raw = self.tokens.texts.get_bytes(token)
            value = {"prob": math.exp(logprob)} if drawn else {"logprob": clip_logprob(logprob)}
            return {"id": token, "token": raw.decode(errors="ignore"), "bytes": list(raw)} | value

        return [
            describe_token(each.token_id, each.logprob)
            | {"top_probs" if drawn else "top_logprobs": [describe_token(token, logprob) for token, logprob in each.top]}
            for each in logprobs
        ]


def _pick_fields(found: dict[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields that were asked for; "a/b" is field b of a, under that name. What is not there is left out."""
    picked: dict[str, Any] = {}
    for path in paths:
        value: Any = found
        for name in path.split("/"):
            value = value[name] if isinstance(value, dict) and name in value else _MISSING
        if value is not _MISSING:
            picked[path] = value
    return picked


_MISSING = object()


def describe_settings(body: LlamaRequest, params: SamplingParams) -> dict[str, Any]:
    """Return llama.cpp's `generation_settings`, without what the model says."""
    theirs = {name: other for other, name in OTHER_NAMES.items()}
    return {theirs.get(name, name): getattr(params, name) for name in SHARED} | {
        "n_predict": body.n_predict,
        "max_tokens": params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "stop": list(params.stop),
        "grammar": "" if params.grammar is None else params.grammar.text,
        "n_probs": body.n_probs,
        "n_indent": body.n_indent,
        "t_max_predict_ms": body.t_max_predict_ms,
        "stream": body.stream,
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
    }

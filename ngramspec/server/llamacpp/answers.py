"""Answers in llama.cpp's words: the pieces of a stream, and the whole that is said at its end.

What `cutting` shows of each work enters, dicts leave. Knows neither routes nor how works are run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import Completion, Delta, TokenLogprob
from ngramspec.sampling_params import SamplingParams
from ngramspec.server import response_stats
from ngramspec.server.llamacpp.schemas import Generation
from ngramspec.server.llamacpp.stop_rules import Answer, shown
from ngramspec.server.llamacpp.tokenize import Tokens
from ngramspec.server.queue import Reservation
from ngramspec.server.token_strings import finite


class Answers:
    """What llama.cpp's routes say of the texts that an engine wrote."""

    def __init__(self, engine: Engine, tokens: Tokens, model: str) -> None:
        self.engine, self.tokens, self.model = engine, tokens, model

    async def events(
        self, reservation: Reservation, pieces: AsyncIterator[tuple[int, Delta]], answers: list[Answer]
    ) -> AsyncIterator[dict[str, Any]]:
        """The pieces of a stream: what is new of each text, and at its end the rest of what `final` says."""
        async for i, text, tokens, logprobs in shown(reservation, pieces, answers):
            answer = answers[i]
            if text or tokens:
                event: dict[str, Any] = {"index": i, "content": text, "tokens": tokens, "stop": False, "id_slot": i}
                event |= {"tokens_predicted": len(answer.tokens), "tokens_evaluated": len(answer.work.prompt)}
                if logprobs:
                    event["completion_probabilities"] = self._probabilities(logprobs)
                yield event
            if answer.completion is not None:
                yield self.final(i, answer)

    def final(self, i: int, answer: Answer) -> dict[str, Any]:
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
            "model": self.model,
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": len(work.prompt),
            "generation_settings": self.settings(body, work.params),
            "prompt": self.tokens.decode(work.prompt) if self.engine.tokenizer is not None and (not fields or "prompt" in fields) else "",
            "has_new_line": "\n" in answer.text,
            "truncated": completion.finish_reason == "length" and len(work.prompt) + len(answer.tokens) >= self.engine.max_model_len,
            "stop_type": stop_type,
            "stopping_word": stopping_word,
            "tokens_cached": completion.cached_tokens,
            "timings": response_stats.timings(completion),
        }
        if completion.choices[0].logprobs and not body.stream:
            found["completion_probabilities"] = self._probabilities(completion.choices[0].logprobs[: len(answer.tokens)])
        if body.speculative_metrics in ("summary", "detailed"):
            found["metrics"] = {"speculative_decoding": response_stats.speculative(completion, body.speculative_metrics)}
        if body.return_sources:
            choice = completion.choices[0]
            n = len(answer.tokens)
            found["ngramspec"] = {"tokens": response_stats.sourced(choice.texts[:n], choice.draft_sources[:n])}
        return _picked(found, fields) if fields else found

    def settings(self, body: Generation, params: SamplingParams) -> dict[str, Any]:
        """`generation_settings`."""
        return {"n_ctx": self.engine.max_model_len} | body.settings(params)

    def _end(self, answer: Answer, completion: Completion) -> tuple[str, str]:
        """(stop_type, stopping_word)"""
        choice = completion.choices[0]
        if answer.is_cut or choice.finish_reason != "stop":
            return "limit", ""
        return ("word", choice.stop_reason) if isinstance(choice.stop_reason, str) else ("eos", "")

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = self.tokens.texts.bytes(token)
            return {"id": token, "token": raw.decode(errors="ignore"), "bytes": list(raw), "logprob": finite(logprob)}

        return [
            entry(each.token_id, each.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in each.top]}
            for each in logprobs
        ]


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

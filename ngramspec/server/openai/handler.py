"""What OpenAI's routes share: who may ask for what, and what every answer says of itself.

Checked requests enter; hints for the engine, and the parts of an answer that are no text, leave. Knows neither prompts nor choices.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import ngramspec
from ngramspec.outputs import Choice, Completion, Delta
from ngramspec.server import response_stats
from ngramspec.server.auth import Identity
from ngramspec.server.error_responses import ApiError
from ngramspec.server.openai.schemas import Sampled
from ngramspec.server.state import State


class CompletionHandler:
    """One request on its way to an answer. Raises ApiError if it asks for what it may not have."""

    def __init__(self, state: State, request: Sampled, identity: Identity, kind: Literal["cmpl", "chatcmpl", "resp"]) -> None:
        engine = state.engine
        self.model = state.name_for(request.model)
        self.level = request.speculative_metrics or "none"
        self.sources = bool(request.return_sources)
        request.check_trust(identity)
        self.streams = bool(request.stream)
        if request.stream_options is not None and not self.streams:
            raise ApiError(400, "stream_options: only with stream", param="stream_options")
        self.include_usage = bool(request.stream_options and request.stream_options.include_usage)
        self.hints = request.hints(identity, engine)
        self.hints["prefix_cache"] = request.cache_prompt is not False
        self.id = f"{kind}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.fingerprint = f"ngramspec-{ngramspec.__version__}-{engine.promise}-{engine.precision}"

    def head(self, kind: str) -> dict[str, Any]:
        """What an answer, and every piece of a streamed one, begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}

    def chunk(self, kind: str) -> dict[str, Any]:
        """What every piece of a stream but the last begins with."""
        return self.head(kind) | ({"usage": None} if self.include_usage else {})

    def usage(self, completions: Sequence[Completion], *, silent: bool = False) -> dict[str, Any]:
        """OpenAI's `usage`. `silent`: the tokens that were written are no part of the answer."""
        prompt = sum(len(completion.prompt_token_ids) for completion in completions)
        written = 0 if silent else sum(len(choice.token_ids) for completion in completions for choice in completion.choices)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": sum(completion.cached_tokens for completion in completions)},
        }
        if "prediction" in self.hints:
            accepted, rejected = response_stats.predicted(completions)
            usage["completion_tokens_details"] = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        return usage

    def extras(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """`metrics`, and for one prompt `timings`, where they were asked for."""
        if self.level == "none":
            return {}
        told: dict[str, Any] = {"metrics": {"speculative_decoding": response_stats.speculative(completions, self.level)}}
        return told | ({"timings": response_stats.timings(completions[0])} if len(completions) == 1 else {})

    def told_sources(self, part: Choice | Delta) -> dict[str, Any]:
        """What a choice says of its tokens, where it was asked for."""
        return {"ngramspec": {"tokens": response_stats.sourced(part.texts, part.draft_sources)}} if self.sources else {}

    def told_stop(self, part: Choice | Delta) -> dict[str, Any]:
        """vLLM's `stop_reason`: the stop string, or the one of `stop_token_ids`, that ended a text."""
        return {} if part.stop_reason is None else {"stop_reason": part.stop_reason}

    def closing(self, kind: str, completions: Sequence[Completion], *, silent: bool = False) -> list[dict[str, Any]]:
        """The last piece of a stream, where there is something to say."""
        extras = self.extras(completions)
        if not self.include_usage:
            return [self.head(kind) | {"choices": []} | extras] if extras else []
        return [self.head(kind) | {"choices": [], "usage": self.usage(completions, silent=silent)} | extras]


async def held(pieces: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[tuple[int, Delta]]:
    """Each work's deltas only when it has ended, for what is not known before."""
    waiting: dict[int, list[Delta]] = {}
    async for number, delta in pieces:
        waiting.setdefault(number, []).append(delta)
        if delta.completion is not None:
            waiting[number][0].completion = delta.completion
            for each in waiting.pop(number):
                yield number, each

"""How far the prompt of a request is while nothing of the answer is there: llama.cpp's `prompt_progress`.

A stream of deltas enters and leaves as it is; before its first delta leave reports, read from the request while the engine runs it. Knows
neither routes nor formats of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from ngramspec.engine.llm_engine import Request
from ngramspec.server.queue import Piece

INTERVAL_S = 0.1  # between two looks at how far a prompt is


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Tokens of a prompt: all, those that the prefix cache had, and those that are done, these included."""

    total: int
    cache: int
    processed: int
    time_ms: float
    """The time since the request was handed in."""

    def describe(self) -> dict[str, Any]:
        return {"total": self.total, "cache": self.cache, "processed": self.processed, "time_ms": round(self.time_ms, 3)}


async def report_progress(pieces: AsyncIterator[Piece], requests: Sequence[Request]) -> AsyncIterator[PromptProgress | Piece]:
    """Yield reports about the first request, the last of which says that the prompt is done, and then the deltas."""
    started = time.perf_counter()
    seq = requests[0].seqs[0]
    last: PromptProgress | None = None

    def report(processed: int) -> PromptProgress | None:
        if last is not None and processed <= last.processed:
            return None
        return PromptProgress(seq.n_prompt, seq.n_cached, processed, (time.perf_counter() - started) * 1e3)

    first = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            done, _ = await asyncio.wait({first}, timeout=INTERVAL_S)
            if last is None and (done or seq.admitted_s is not None) and (last := report(seq.n_cached)):
                yield last
            if now := report(seq.n_prompt if done else min(seq.n_computed, seq.n_prompt - 1)):
                last = now
                yield last
            if done:
                break
        if (piece := first.result()) is not None:
            yield piece
        async for piece in pieces:
            yield piece
    finally:
        first.cancel()

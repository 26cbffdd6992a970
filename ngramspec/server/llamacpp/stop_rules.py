"""Answers that may end before the model ends them: at a line that is less indented, or at the first line end after some time.

The deltas of works that run enter; the text that is to be shown leaves, with its tokens. Knows `admission`, not the form of answers.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fastapi import Request

from ngramspec.outputs import Completion, Delta, TokenLogprob
from ngramspec.server.error_responses import ClientGone
from ngramspec.server.llamacpp.schemas import Generation
from ngramspec.server.queue import Reservation, Work, until_gone


class Answer:
    """What has been written for one work, up to where the request wants it to end."""

    def __init__(self, work: Work, body: Generation) -> None:
        self.work, self.body = work, body
        self.text = ""
        self.tokens: list[int] = []
        self.is_cut = body.n_predict == 0
        """The request's own end was reached, before the engine's."""
        self.completion: Completion | None = None
        self._started: float | None = None

    def take(self, delta: Delta) -> tuple[str, list[int], list[TokenLogprob]]:
        """What is new of the text, with its tokens and their log-probabilities."""
        if delta.completion is not None:
            self.completion = delta.completion
        if self._started is None and delta.token_ids:
            self._started = time.perf_counter()
        if self.is_cut:
            return "", [], []
        start, whole = len(self.text), self.text + delta.text
        end = self._cut(whole, start)
        self.is_cut = end is not None
        self.text = whole[:end]
        n, at = 0, start
        for text in delta.texts:
            if end is not None and at >= end:
                break
            n, at = n + 1, at + len(text)
        self.tokens += delta.token_ids[:n]
        return self.text[start:], delta.token_ids[:n], (delta.logprobs or [])[:n]

    def _cut(self, whole: str, start: int) -> int | None:
        """Where to cut the text, the part from `start` on being new; None: nowhere.

        Both as llama.cpp has it: behind the indentation of a line that has less of it than `n_indent`; and once time is over, behind the
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


_INDENTATION = re.compile(r"\n([ \t]*)(?=[^ \t])")
"""A line's, once its first other character is known."""


async def shown(
    reservation: Reservation, pieces: AsyncIterator[tuple[int, Delta]], answers: list[Answer]
) -> AsyncIterator[tuple[int, str, list[int], list[TokenLogprob]]]:
    """(number of the work, new text, its tokens, their log-probabilities) for every delta.

    A work whose answer was cut is cancelled; its last delta is waited for, since it brings the statistics.
    """
    async for i, delta in pieces:
        was_cut = answers[i].is_cut
        text, tokens, logprobs = answers[i].take(delta)
        if answers[i].is_cut and not was_cut:
            reservation.requests[i].cancel()
        yield i, text, tokens, logprobs


async def finish(reservation: Reservation, pieces: AsyncIterator[tuple[int, Delta]], answers: list[Answer]) -> None:
    async for _ in shown(reservation, pieces, answers):
        pass


async def unless_gone(http: Request, work: Coroutine[Any, Any, None]) -> None:
    """Do the work. Raises ClientGone where the client leaves before it is done; the work is cancelled then."""
    doing, watch = asyncio.create_task(work), asyncio.create_task(until_gone(http.receive))
    try:
        await asyncio.wait({doing, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGone
        doing.result()
    finally:
        watch.cancel()
        doing.cancel()

"""Answers at an even pace: one token of every text per interval, however many came in one pass.

How many tokens a pass brought says which of them a datastore held, or somebody's earlier answer. Deltas enter as they come, deltas of one
token leave by the clock. The interval hides it if it is no shorter than a pass without drafts takes: a shorter one leaves gaps.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from ngramspec.outputs import Completion, Delta


class Pacer:
    """The deltas of `n_inputs` prompts on their way to one client. Used in the event loop's thread."""

    def __init__(self, n_inputs: int, interval_s: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.interval_s, self._sleep = interval_s, sleep
        self._unfinished = n_inputs
        self._texts: dict[tuple[int, int], deque[Delta]] = {}
        self._completions: dict[int, Completion] = {}
        self._error: Exception | None = None
        self._begun = asyncio.Event()

    def put(self, index: int, what: Delta | Exception) -> None:
        self._begun.set()
        if isinstance(what, Exception):
            self._error = what
            return
        if what.completion is not None:
            self._completions[index] = what.completion
            self._unfinished -= 1
        self._texts.setdefault((index, what.index), deque()).extend(single_tokens(what))

    async def read(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield (number of the input, delta of one token). The last of each input carries its completion. Raises the error that was put."""
        await self._begun.wait()
        while True:
            for (index, _), waiting in list(self._texts.items()):
                if not waiting:
                    continue
                delta = waiting.popleft()
                if index in self._completions and not any(rest for (other, _), rest in self._texts.items() if other == index):
                    delta.completion = self._completions.pop(index)
                yield index, delta
            if not any(self._texts.values()):
                if self._error is not None:
                    raise self._error
                if not self._unfinished:
                    return
            await self._sleep(self.interval_s)  # from now: what was late stays late, for catching up would be a burst


def single_tokens(delta: Delta) -> list[Delta]:
    """Return a delta as deltas of one token each, without its completion; their texts add up to its text."""
    n = len(delta.token_ids)
    rest = delta.text[sum(map(len, delta.texts)) :]  # what cancelling gives out belongs to no new token
    pieces = [
        Delta(
            delta.index,
            delta.texts[i],
            delta.token_ids[i : i + 1],
            delta.draft_sources[i : i + 1],
            texts=delta.texts[i : i + 1],
            logprobs=delta.logprobs[i : i + 1] if delta.logprobs is not None else None,
        )
        for i in range(n)
    ] or [Delta(delta.index, "", [], [], logprobs=delta.logprobs)]
    pieces[-1].text += rest
    pieces[-1].finish_reason, pieces[-1].stop_reason = delta.finish_reason, delta.stop_reason
    return pieces

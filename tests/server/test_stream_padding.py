"""Deltas of one token each, at an even pace, whatever passes brought."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from ngramspec.outputs import Choice, Completion, Delta, TokenLogprob
from ngramspec.server.stream_padding import Pacer, single_tokens

INTERVAL_S = 0.01


def delta(index: int, texts: list[str], finish: str | None = None, completion: Completion | None = None, rest: str = "") -> Delta:
    n = len(texts)
    logprobs = [TokenLogprob(i, -1.0, []) for i in range(n)]
    return Delta(index, "".join(texts) + rest, list(range(n)), [None] * n, finish, completion, texts, logprobs)


def completion(n: int = 1) -> Completion:
    return Completion([1], [Choice(i) for i in range(n)], 0, "bitwise")


class Clock:
    """Time that passes when somebody sleeps, and what is to happen at some times."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: dict[float, Callable[[], None]] = {}

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()
        await asyncio.sleep(0)


def paced(*pieces: tuple[int, Delta | Exception], n_works: int = 1) -> list[tuple[float, int, Delta]]:
    """What leaves, and when, if all of it comes at once."""

    async def read() -> list[tuple[float, int, Delta]]:
        clock = Clock()
        pacer = Pacer(n_works, INTERVAL_S, clock.sleep)
        for index, what in pieces:
            pacer.put(index, what)
        return [(clock.now, index, piece) async for index, piece in pacer.read()]

    return asyncio.run(read())


def test_a_burst_leaves_one_by_one() -> None:
    done = completion()
    came = paced((0, delta(0, ["a", "b", "", "c"])), (0, delta(0, ["d"] * 20, "length", done, rest="!")))
    texts = [piece.text for _, _, piece in came]
    assert texts == ["a", "b", "", "c", *["d"] * 19, "d!"]
    assert all(len(piece.token_ids) == len(piece.draft_sources) == len(piece.logprobs or []) == 1 for _, _, piece in came)
    assert [piece.completion for _, _, piece in came] == [None] * 23 + [done]
    assert [piece.finish_reason for _, _, piece in came] == [None] * 23 + ["length"]
    times = [when for when, _, _ in came]
    assert times == pytest.approx([i * INTERVAL_S for i in range(24)])


def test_texts_of_one_request_leave_side_by_side_and_the_last_of_them_completes_it() -> None:
    """The engine is done with the longer text first; its delta with the completion is the shorter one's."""
    done = completion(2)
    came = paced((0, delta(0, ["a"] * 9, "length")), (0, delta(1, ["b"] * 3, "stop", done)))
    assert [piece.index for _, _, piece in came] == [0, 1] * 3 + [0] * 6
    assert [piece.completion for _, _, piece in came] == [None] * 11 + [done]


def test_each_request_has_its_own_end() -> None:
    first, second = completion(), completion()
    came = paced((1, delta(0, ["x"], "stop", second)), (0, delta(0, ["y"] * 2, "stop", first)), n_works=2)
    assert [(index, piece.completion) for _, index, piece in came] == [(1, second), (0, None), (0, first)]


def test_an_error_comes_after_what_was_written() -> None:
    seen = []

    async def read() -> None:
        pacer = Pacer(1, INTERVAL_S, Clock().sleep)
        pacer.put(0, delta(0, ["a", "b"]))
        pacer.put(0, RuntimeError("end"))
        async for _, piece in pacer.read():
            seen.append(piece.text)

    with pytest.raises(RuntimeError, match="end"):
        asyncio.run(read())
    assert seen == ["a", "b"]


def test_a_late_token_is_not_made_up_for() -> None:
    async def read() -> list[float]:
        clock = Clock()
        pacer = Pacer(1, INTERVAL_S, clock.sleep)
        pacer.put(0, delta(0, ["a"]))
        clock.at[9.5 * INTERVAL_S] = lambda: pacer.put(0, delta(0, ["b"] * 5, "length", completion()))
        return [clock.now async for _ in pacer.read()]

    assert asyncio.run(read()) == pytest.approx([i * INTERVAL_S for i in (0, 10, 11, 12, 13, 14)])


def test_an_end_without_a_token() -> None:
    (only,) = single_tokens(delta(0, [], "stop", rest="held back"))
    assert (only.text, only.finish_reason, only.token_ids) == ("held back", "stop", [])

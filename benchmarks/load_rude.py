"""Clients that do not behave: streams that nobody reads, and requests whose client leaves.

A `Target` enters, figures leave: what they cost others, how soon what they held is free, and whether anything stays behind. Knows the
server by its answers and its `/metrics` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import defaultdict
from collections.abc import Awaitable
from typing import Any

from benchmarks import load_client as client
from benchmarks.common import say
from benchmarks.load_client import WAYS, Answer, Connection, Target, ask, completion, metrics, prompt, quantile, settled

MAX_SEQS = 4
MAX_QUEUE = 8
FREED_WITHIN_S = 2.0
LEAKED_AFTER_S = 10.0
PHASES = ("queued", "prefill", "before the first token", "mid-stream")
LONG_PROMPT = 1500
ENDLESS = 2000
"""Tokens of an answer that is still being written when its client leaves."""
OTHERS = 8


# ---------------------------------------------------------------------------- stalled


async def measure_stalled(target: Target, readers: int, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Gaps between tokens of OTHERS clients: alone, beside `readers` streams that are read, and beside as many that are not.

    The server computes the same for both kinds of streams, so what the unread ones cost beyond that is the difference between the two.
    """

    def body() -> dict[str, Any]:
        return completion(prompt(rng, 32), UNREAD_TOKENS, logprobs=LOGPROBS)

    alone = await _gaps(target, seconds, rng)
    async with contextlib.AsyncExitStack() as stack:
        tasks = [asyncio.create_task(ask(target, body())) for _ in range(readers)]
        stack.callback(lambda: [task.cancel() for task in tasks])
        read = await _gaps(target, seconds, rng)
        await asyncio.gather(*tasks)
    await settled(target, _idle)
    async with contextlib.AsyncExitStack() as stack:
        connections = [await Connection.open(target, receive_buffer=2048, limit=1024) for _ in range(readers)]
        for connection in connections:
            stack.push_async_callback(connection.aclose)
            connection.send("/v1/completions", body())
        unread = await _gaps(target, seconds, rng)
        freed = await settled(target, _idle, within_s=60)
        complete = sum(await asyncio.gather(*(_complete(connection) for connection in connections)))
    p99 = {name: quantile(gaps, 0.99) or 0.0 for name, gaps in (("alone", alone), ("read", read), ("unread", unread))}
    return {
        "readers": readers,
        **{f"others_p99_ms_{name}": round(value, 2) for name, value in p99.items()},
        **{f"others_p50_ms_{name}": round(quantile(gaps, 0.5) or 0.0, 2) for name, gaps in (("read", read), ("unread", unread))},
        "unread_against_read": round(p99["unread"] / p99["read"], 3),
        "unread_against_alone": round(p99["unread"] / p99["alone"], 3),
        "all_freed": freed,
        "dropped": readers - complete,
    }


UNREAD_TOKENS = 1200
LOGPROBS = 5
"""Make a stream of a megabyte, which no buffer between server and client holds."""


async def _complete(connection: Connection) -> bool:
    """Read what a stream still has: whether it comes to its proper end. One that the server has dropped ends where it was dropped."""
    end = b""
    with contextlib.suppress(OSError):
        while data := await connection.reader.read(1 << 16):
            end = (end + data)[-64:]
    return b"[DONE]" in end


async def _gaps(target: Target, seconds: float, rng: random.Random) -> list[float]:
    """Times between tokens of well-behaved clients, ms."""
    end = time.perf_counter() + seconds
    gaps: list[float] = []

    async def client() -> None:
        while time.perf_counter() < end:
            answer = await ask(target, completion(prompt(rng, 32), 64))
            gaps.extend(answer.gaps_ms)

    await asyncio.gather(*(client() for _ in range(OTHERS)))
    return gaps


def _idle(n_sequences: int) -> bool:
    return n_sequences == 0


# ---------------------------------------------------------------------------- disconnect


async def measure_disconnects(target: Target, count: int, rng: random.Random, long_prompt: int = LONG_PROMPT) -> dict[str, Any]:
    """Every way in every phase, streaming and not, `count` in all. Needs a server with MAX_SEQS and MAX_QUEUE."""
    cases = list(itertools.product(PHASES, WAYS, (True, False)))
    shares = {case: count // len(cases) + (n < count % len(cases)) for n, case in enumerate(cases)}
    freed: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    leaked = 0
    for phase in PHASES:
        n_holders = MAX_SEQS if phase == "queued" else 0
        async with client.busy(target, n_holders, lambda: completion(prompt(rng, 16), ENDLESS)):
            await settled(target, lambda n, held=n_holders: n >= held)  # type: ignore[misc]
            for case in (case for case in cases if case[0] == phase):
                for _ in range(shares[case]):
                    took = await _leave(target, case, n_holders, rng, long_prompt)
                    leaked += took is None
                    freed[case].append(LEAKED_AFTER_S * 1e3 if took is None else took)
        await settled(target, _idle, within_s=30)
        say(f"disconnect: {phase}: {sum(map(len, freed.values()))} of {count}")
    figures = await metrics(target)
    times = [value for values in freed.values() for value in values]
    return {
        "count": len(times),
        "freed_ms_p50": quantile(times, 0.5),
        "freed_ms_p99": quantile(times, 0.99),
        "freed_ms_max": max(times),
        "late": sum(value > FREED_WITHIN_S * 1e3 for value in times),
        "leaked": leaked,
        "sequences_left": int(figures["num_requests_running"] + figures["num_requests_waiting"]),
        "kv_in_use": figures["kv_cache_usage_perc"],
        "all_places_free": await _all_places_free(target, rng),
        "cases": {
            f"{phase}, {way}, {'streaming' if stream else 'whole'}": {
                "count": len(values),
                "freed_ms": {"p50": quantile(values, 0.5), "max": max(values, default=None)},
            }
            for (phase, way, stream), values in freed.items()
        },
    }


async def _leave(target: Target, case: tuple[str, str, bool], n_holders: int, rng: random.Random, long_prompt: int) -> float | None:
    """Ask, wait for the phase, leave -> ms until the server has no sequence more than before, None where it keeps it.

    A request in the first phases may have gone one phase on by the time its client is gone: what is measured stays the same.
    """
    phase, way, stream = case
    length = long_prompt if phase == "prefill" else 16
    async with contextlib.aclosing(await Connection.open(target)) as connection:
        connection.send("/v1/completions", completion(prompt(rng, length), ENDLESS, stream=stream))
        await connection.writer.drain()
        if phase == "before the first token":
            await asyncio.sleep(rng.random() * 0.02)
        elif phase == "mid-stream" and stream:
            await connection.head()
            seen = 0
            async for _ in connection.events():
                if (seen := seen + 1) == 4:
                    break
        else:
            await settled(target, lambda n: n > n_holders, within_s=2)
            if phase == "mid-stream":
                await asyncio.sleep(0.05)
        left = time.perf_counter()
        connection.leave(way)
        freed = await settled(target, lambda n: n <= n_holders, within_s=LEAKED_AFTER_S)
        return round((time.perf_counter() - left) * 1e3, 2) if freed else None


async def _all_places_free(target: Target, rng: random.Random) -> bool:
    """Whether as many requests as the server takes at once are all taken: a place that was not given back would be missed."""

    def one(_: int) -> Awaitable[Answer]:
        return ask(target, completion(prompt(rng, 16), 4))

    return all(answer.done for answer in await client.together(MAX_SEQS + MAX_QUEUE, one))

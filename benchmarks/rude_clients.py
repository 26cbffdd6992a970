"""Clients that do not behave: streams that nobody reads, requests whose client leaves, and both mixed with ordinary ones for a long time.

A server's address enters. Figures leave: what such clients cost others, how soon what they held is free, whether anything stays behind.
Knows the server by its answers and its `/metrics` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.common import print_progress
from benchmarks.http_client import (
    WAYS,
    Connection,
    ServerAddress,
    find_quantile,
    keep_busy,
    make_completion,
    make_prompt,
    read_metrics,
    send_request,
    send_together,
    wait_until_settled,
)
from benchmarks.server_process import Resources

# Settings that the server must have for `measure_disconnects`: sequences that run, and that wait.
MAX_SEQS = 4
MAX_QUEUE = 8

# ---------------------------------------------------------------------------- streams that nobody reads

UNREAD_TOKENS = 1200  # with LOGPROBS they make a stream of a megabyte, which no buffer between server and client holds
LOGPROBS = 5
N_OTHERS = 8  # clients that behave


async def measure_stalled(server: ServerAddress, readers: int, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Measure gaps between tokens of N_OTHERS clients: alone, beside `readers` streams that are read, and beside as many that are not.

    The server computes the same for both kinds of streams, so what the unread ones cost beyond that is the difference between the two.
    """

    def make_body() -> dict[str, Any]:
        return make_completion(make_prompt(rng, 32), UNREAD_TOKENS, logprobs=LOGPROBS)

    alone = await _measure_gaps(server, seconds, rng)
    async with contextlib.AsyncExitStack() as stack:
        tasks = [asyncio.create_task(send_request(server, make_body())) for _ in range(readers)]
        stack.callback(lambda: [task.cancel() for task in tasks])
        read = await _measure_gaps(server, seconds, rng)
        await asyncio.gather(*tasks)
    await wait_until_settled(server, lambda n: n == 0)
    async with contextlib.AsyncExitStack() as stack:
        connections = [await Connection.open(server, receive_buffer=2048, limit=1024) for _ in range(readers)]
        for connection in connections:
            stack.push_async_callback(connection.aclose)
            connection.send("/v1/completions", make_body())
        unread = await _measure_gaps(server, seconds, rng)
        freed = await wait_until_settled(server, lambda n: n == 0, within_s=60)
        complete = sum(await asyncio.gather(*(_reaches_its_end(connection) for connection in connections)))
    p99 = {name: find_quantile(gaps, 0.99) or 0.0 for name, gaps in (("alone", alone), ("read", read), ("unread", unread))}
    return {
        "readers": readers,
        **{f"others_p99_ms_{name}": round(value, 2) for name, value in p99.items()},
        **{f"others_p50_ms_{name}": round(find_quantile(gaps, 0.5) or 0.0, 2) for name, gaps in (("read", read), ("unread", unread))},
        "unread_against_read": round(p99["unread"] / p99["read"], 3),
        "unread_against_alone": round(p99["unread"] / p99["alone"], 3),
        "all_freed": freed,
        "dropped": readers - complete,
    }


async def _reaches_its_end(connection: Connection) -> bool:
    """Read what a stream still has. A stream that the server has dropped ends before its proper end."""
    end = b""
    with contextlib.suppress(OSError):
        while data := await connection.reader.read(1 << 16):
            end = (end + data)[-64:]
    return b"[DONE]" in end


async def _measure_gaps(server: ServerAddress, seconds: float, rng: random.Random) -> list[float]:
    """Return the milliseconds between tokens of clients that behave."""
    end = time.perf_counter() + seconds
    gaps: list[float] = []

    async def run_client() -> None:
        while time.perf_counter() < end:
            answer = await send_request(server, make_completion(make_prompt(rng, 32), 64))
            gaps.extend(answer.gaps_ms)

    await asyncio.gather(*(run_client() for _ in range(N_OTHERS)))
    return gaps


# ---------------------------------------------------------------------------- clients that leave

PHASES = ("queued", "prefill", "before the first token", "mid-stream")
FREED_WITHIN_S = 2.0  # what is freed later counts as late
LEAKED_AFTER_S = 10.0
LONG_PROMPT = 1500  # tokens of a prompt whose client leaves during prefill
ENDLESS = 2000  # tokens of an answer that is still being written when its client leaves


async def measure_disconnects(server: ServerAddress, count: int, rng: random.Random, long_prompt: int = LONG_PROMPT) -> dict[str, Any]:
    """Leave in every way in every phase, streaming and not, `count` times in all. The server must have MAX_SEQS and MAX_QUEUE."""
    cases = list(itertools.product(PHASES, WAYS, (True, False)))
    shares = {case: count // len(cases) + (n < count % len(cases)) for n, case in enumerate(cases)}
    freed: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    leaked = 0
    for phase in PHASES:
        n_holders = MAX_SEQS if phase == "queued" else 0
        async with keep_busy(server, n_holders, lambda: make_completion(make_prompt(rng, 16), ENDLESS)):
            await wait_until_settled(server, lambda n, held=n_holders: n >= held)  # type: ignore[misc]
            for case in (case for case in cases if case[0] == phase):
                for _ in range(shares[case]):
                    took = await _time_leaving(server, case, n_holders, rng, long_prompt)
                    leaked += took is None
                    freed[case].append(LEAKED_AFTER_S * 1e3 if took is None else took)
        await wait_until_settled(server, lambda n: n == 0, within_s=30)
        print_progress(f"disconnect: {phase}: {sum(map(len, freed.values()))} of {count}")
    metrics = await read_metrics(server)
    times = [value for values in freed.values() for value in values]
    # As many requests as the server takes at once: a place that was not given back would be missed.
    last = await send_together(MAX_SEQS + MAX_QUEUE, lambda _: send_request(server, make_completion(make_prompt(rng, 16), 4)))
    return {
        "count": len(times),
        "freed_ms_p50": find_quantile(times, 0.5),
        "freed_ms_p99": find_quantile(times, 0.99),
        "freed_ms_max": max(times),
        "late": sum(value > FREED_WITHIN_S * 1e3 for value in times),
        "leaked": leaked,
        "sequences_left": int(metrics["num_requests_running"] + metrics["num_requests_waiting"]),
        "kv_in_use": metrics["kv_cache_usage_perc"],
        "all_places_free": all(answer.done for answer in last),
        "cases": {
            f"{phase}, {way}, {'streaming' if stream else 'whole'}": {
                "count": len(values),
                "freed_ms": {"p50": find_quantile(values, 0.5), "max": max(values, default=None)},
            }
            for (phase, way, stream), values in freed.items()
        },
    }


async def _time_leaving(
    server: ServerAddress, case: tuple[str, str, bool], n_holders: int, rng: random.Random, long_prompt: int
) -> float | None:
    """Ask, wait for the phase and leave. Return the ms until the server has no sequence more than before, None if it keeps it.

    A request in the first phases may have gone one phase on by the time its client is gone: what is measured stays the same.
    """
    phase, way, stream = case
    length = long_prompt if phase == "prefill" else 16
    async with contextlib.aclosing(await Connection.open(server)) as connection:
        connection.send("/v1/completions", make_completion(make_prompt(rng, length), ENDLESS, stream=stream))
        await connection.writer.drain()
        if phase == "before the first token":
            await asyncio.sleep(rng.random() * 0.02)
        elif phase == "mid-stream" and stream:
            await connection.read_head()
            seen = 0
            async for _ in connection.read_events():
                if (seen := seen + 1) == 4:
                    break
        else:
            await wait_until_settled(server, lambda n: n > n_holders, within_s=2)
            if phase == "mid-stream":
                await asyncio.sleep(0.05)
        left = time.perf_counter()
        connection.drop(way)
        freed = await wait_until_settled(server, lambda n: n <= n_holders, within_s=LEAKED_AFTER_S)
        return round((time.perf_counter() - left) * 1e3, 2) if freed else None


# ---------------------------------------------------------------------------- a long time

SOAKING_CLIENTS = 12
ABANDONED_SHARE = 1 / 3
WARM_UP_SHARE = 1 / 3  # of the samples, the first ones, which do not count: caches fill, and memory that is kept for later is taken
N_SAMPLES = 120
ROWS_PER_PASS = 256  # of a prompt
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "returns", "its", "names", "def", "if")


async def measure_soak(
    server: ServerAddress, read_resources: Callable[[], Resources], seconds: float, rng: random.Random
) -> dict[str, Any]:
    """Send mixed requests, a third of them abandoned, and return how memory, open files and threads grow with the requests.

    A prompt of every length that fits in one pass comes first: what products compile for each number of rows is compiled then.
    """
    for length in range(1, ROWS_PER_PASS + 1):
        await send_request(server, make_completion(make_prompt(rng, length), 1))
    start = time.perf_counter()
    outcomes: Counter[str] = Counter()
    samples: list[tuple[int, Resources]] = []

    async def run_client() -> None:
        while time.perf_counter() < start + seconds:
            outcomes[await _send_any(server, rng)] += 1

    async def watch() -> None:
        while time.perf_counter() < start + seconds:
            await asyncio.sleep(seconds / N_SAMPLES)
            samples.append((sum(outcomes.values()), read_resources()))
            if len(samples) % 10 == 0:
                last = samples[-1][1]
                print_progress(f"soak: {samples[-1][0]} requests, {last.anonymous_mib:.1f} MiB, {last.files} files, {last.threads} threads")

    await asyncio.gather(watch(), *(run_client() for _ in range(SOAKING_CLIENTS)))
    warm = samples[int(len(samples) * WARM_UP_SHARE) :]
    requests, (memory, files, threads) = [n for n, _ in warm], zip(*((r.anonymous_mib, r.files, r.threads) for _, r in warm), strict=True)
    return {
        "requests": sum(outcomes.values()),
        "outcomes": dict(sorted(outcomes.items())),
        "minutes": round(seconds / 60, 2),
        "anonymous_mib_first": round(memory[0], 2),
        "anonymous_mib_last": round(memory[-1], 2),
        "slope_mib_per_1000_requests": round(find_slope(requests, memory) * 1000, 4),
        "files_min": min(files),
        "files_max": max(files),
        "files_slope_per_1000_requests": round(find_slope(requests, files) * 1000, 4),
        "threads_min": min(threads),
        "threads_max": max(threads),
    }


def find_slope(x: list[int], y: Any) -> float:
    """Return the median slope between points half the range apart (Theil and Sen's, thinned out): a single step does not tilt it."""
    half = len(x) // 2
    slopes = [(y[i + half] - y[i]) / (x[i + half] - x[i]) for i in range(len(x) - half) if x[i + half] > x[i]]
    return statistics.median(slopes) if slopes else 0.0


async def _send_any(server: ServerAddress, rng: random.Random) -> str:
    """Send any one request and return what became of it."""
    path, body = _draw_request(rng)
    if rng.random() < ABANDONED_SHARE:
        async with contextlib.aclosing(await Connection.open(server)) as connection:
            connection.send(path, body)
            await asyncio.sleep(rng.expovariate(1 / 0.1))
            connection.drop(rng.choice(WAYS))
        return "abandoned"
    answer = await send_request(server, body, path)
    return "done" if answer.done else f"status {answer.status}" if answer.status else "lost"


def _draw_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Draw completions and chats, short and long, streaming and not, greedy and sampled, and some that must be refused."""
    ids = make_prompt(rng, rng.choice((8, 64, 64, 500)))
    more: dict[str, Any] = {"stream": rng.random() < 0.6, "temperature": rng.choice((0, 0.8))}
    kind = rng.random()
    if kind < 0.05:
        return "/v1/completions", make_completion(ids, 8, top_p=2)
    if kind < 0.1:
        more |= {"n": 2, "logprobs": 3}
    if kind < 0.3:
        text = " ".join(rng.choices(WORDS, k=rng.randrange(5, 60)))
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 40, **more}
    if kind < 0.4:
        more |= {"prediction": " ".join(rng.choices(WORDS, k=30)), "stop": ["\n\n"], "ignore_eos": False}
    return "/v1/completions", make_completion(ids, rng.choice((1, 8, 40, 100)), **more)

"""Mixed requests for a long time, a third of them abandoned: does the server keep what it should let go?

A `Target` and a reader of the process's resources enter; the slope of its anonymous memory over requests, its open files and its threads
leave. A prompt of every length that fits in one pass comes first, and the first third only warms up: what products compile for each number
of rows is compiled, caches fill, and memory that is kept for later is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.common import say
from benchmarks.load_client import WAYS, Connection, Target, ask, completion, prompt
from benchmarks.load_server import Resources

CLIENTS = 12
ABANDONED = 1 / 3
WARM_UP = 1 / 3
SAMPLES = 120
PASS = 256
"""Rows of a prompt in one pass."""
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "returns", "its", "names", "def", "if")


async def measure_soak(target: Target, resources: Callable[[], Resources], seconds: float, rng: random.Random) -> dict[str, Any]:
    for length in range(1, PASS + 1):
        await ask(target, completion(prompt(rng, length), 1))
    start = time.perf_counter()
    outcomes: Counter[str] = Counter()
    samples: list[tuple[int, Resources]] = []

    async def client() -> None:
        while time.perf_counter() < start + seconds:
            outcomes[await _one(target, rng)] += 1

    async def watch() -> None:
        while time.perf_counter() < start + seconds:
            await asyncio.sleep(seconds / SAMPLES)
            samples.append((sum(outcomes.values()), resources()))
            if len(samples) % 10 == 0:
                last = samples[-1][1]
                say(f"soak: {samples[-1][0]} requests, {last.anonymous_mib:.1f} MiB, {last.files} files, {last.threads} threads")

    await asyncio.gather(watch(), *(client() for _ in range(CLIENTS)))
    warm = samples[int(len(samples) * WARM_UP) :]
    return {
        "requests": sum(outcomes.values()),
        "outcomes": dict(sorted(outcomes.items())),
        "minutes": round(seconds / 60, 2),
        "anonymous_mib_first": round(warm[0][1].anonymous_mib, 2),
        "anonymous_mib_last": round(warm[-1][1].anonymous_mib, 2),
        "slope_mib_per_1000_requests": round(slope([n for n, _ in warm], [r.anonymous_mib for _, r in warm]) * 1000, 4),
        "files_min": min(r.files for _, r in warm),
        "files_max": max(r.files for _, r in warm),
        "files_slope_per_1000_requests": round(slope([n for n, _ in warm], [float(r.files) for _, r in warm]) * 1000, 4),
        "threads_min": min(r.threads for _, r in warm),
        "threads_max": max(r.threads for _, r in warm),
    }


def slope(x: list[int], y: list[float]) -> float:
    """Median of the slopes between points half the range apart (Theil and Sen's, thinned out): a single step does not tilt it."""
    half = len(x) // 2
    slopes = [(y[i + half] - y[i]) / (x[i + half] - x[i]) for i in range(len(x) - half) if x[i + half] > x[i]]
    return statistics.median(slopes) if slopes else 0.0


async def _one(target: Target, rng: random.Random) -> str:
    """Any one request -> what became of it."""
    path, body = _request(rng)
    if rng.random() < ABANDONED:
        async with contextlib.aclosing(await Connection.open(target)) as connection:
            connection.send(path, body)
            await asyncio.sleep(rng.expovariate(1 / 0.1))
            connection.leave(rng.choice(WAYS))
        return "abandoned"
    answer = await ask(target, body, path)
    return "done" if answer.done else f"status {answer.status}" if answer.status else "lost"


def _request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Completions and chats, short and long, streaming and not, greedy and sampled, and some that must be refused."""
    ids = prompt(rng, rng.choice((8, 64, 64, 500)))
    more: dict[str, Any] = {"stream": rng.random() < 0.6, "temperature": rng.choice((0, 0.8))}
    kind = rng.random()
    if kind < 0.05:
        return "/v1/completions", completion(ids, 8, top_p=2)
    if kind < 0.1:
        more |= {"n": 2, "logprobs": 3}
    if kind < 0.3:
        text = " ".join(rng.choices(WORDS, k=rng.randrange(5, 60)))
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 40, **more}
    if kind < 0.4:
        more |= {"prediction": " ".join(rng.choices(WORDS, k=30)), "stop": ["\n\n"], "ignore_eos": False}
    return "/v1/completions", completion(ids, rng.choice((1, 8, 40, 100)), **more)

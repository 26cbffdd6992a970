"""A server under load: how much it carries, what it costs beside the engine, and whether rude clients harm it.

    python -m benchmarks.load capacity|overhead|prefix|stalled|disconnect|soak|all [--model M] [--seconds S] [--seed N] …

Each starts `ngramspec serve` in a process of its own and talks to it over sockets of this machine. Without --model the model is small and
random, so that the server is what is measured; figures of time per token want a real one (--model smollm2).

capacity    closed loop with as many clients as sequences run, then requests at random moments, 1, 2 and 10 times as many as that carried:
            tokens per second of those that came through, time to first token, time per token, how soon the others were refused
overhead    time per token through SSE against an engine of the same settings in this process, in turns, for 1 and 8 clients
prefix      time to first token of a prompt whose first 1,500 tokens a request before it had, against that request's
stalled     clients' time per token beside 50 streams that nobody reads, against 50 that are read, and alone
disconnect  clients that leave in 3 ways, in 4 phases, streaming and not: until their sequence is freed, and whether anything stays behind
soak        mixed requests, a third of which is abandoned, for --minutes: growth of anonymous memory, files and threads

Progress goes to standard error, a table and a last line of JSON to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common, load_rude, load_soak
from benchmarks.load_client import Answer, Target, ask, completion, metrics, prompt, quantile, together
from benchmarks.load_server import TINY, Process, make_tiny, serve
from ngramspec import Engine, SamplingParams

FACTORS = (1, 2, 10)
OVERHEAD_CLIENTS = (1, 8)
MAX_SEQS = 8
PROMPT_TOKENS = 48
SHARED_TOKENS = 1500
KV_BYTES = 256 << 20


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        model = args.model
        if model == TINY:
            args.threads = args.threads or 1  # more have nothing to share
            model = make_tiny(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-load-"))))
        for mode in MODES if args.mode == "all" else (args.mode,):
            common.say(f"{mode}: starting a server")
            settings = {"max_seqs": MAX_SEQS, "kv_memory": KV_BYTES} | ({"threads": args.threads} if args.threads else {})
            figures[mode] = MODES[mode](model, settings, args, random.Random(args.seed))
            show(mode, figures[mode])
    settings = {name: value for name, value in vars(args).items() if name not in ("mode", "model")}
    common.print_document({"model": args.model, **figures, "settings": settings, **common.environment("cpu", args.threads or 0)})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.new_parser("load", __doc__)
    parser.add_argument("mode", choices=[*MODES, "all"])
    parser.add_argument("--model", default=TINY, help="folder, hub name, GGUF file or smollm2; default: small and random, made here")
    parser.add_argument("--seconds", type=float, default=20, help="capacity, stalled: of each measurement")
    parser.add_argument("--max-tokens", type=common.positive, default=64, help="of a request in capacity and overhead")
    parser.add_argument("--rounds", type=common.positive, default=8, help="overhead, prefix: repetitions")
    parser.add_argument("--readers", type=common.positive, default=50, help="stalled: how many do not read")
    parser.add_argument("--count", type=common.positive, default=1000, help="disconnect: in all")
    parser.add_argument("--minutes", type=float, default=30, help="soak: how long")
    parser.add_argument("--threads", type=common.positive, help="of the engines; default all cores, for the small model one")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------- capacity


async def measure_capacity(target: Target, seconds: float, max_tokens: int, rng: random.Random) -> dict[str, Any]:
    """Goodput with all places taken, then with arrivals FACTORS times as frequent as requests were answered then."""

    def one() -> Awaitable[Answer]:
        return ask(target, completion(prompt(rng, PROMPT_TOKENS), max_tokens))

    await together(MAX_SEQS, lambda _: one())  # what is made at the first pass is made now
    levels = {"closed": await _closed(one, seconds)}
    while not (rate := levels["closed"]["requests_s"]):  # a machine that others keep busy
        if seconds > 60:
            raise RuntimeError(f"no request was answered within {seconds:g} s")
        seconds *= 2
        common.say(f"capacity: nothing came through; trying {seconds:g} s")
        levels["closed"] = await _closed(one, seconds)
    for factor in FACTORS:
        common.say(f"capacity: {factor} x {rate:.2f} requests a second")
        levels[f"{factor}x"] = await _arrivals(one, factor * rate, seconds, rng)
    best = max(level["goodput_tok_s"] for level in levels.values())
    return {
        "capacity_requests_s": rate,
        "levels": levels,
        "goodput_at_10x": round(levels[f"{FACTORS[-1]}x"]["goodput_tok_s"] / best, 3),
        "refusal_ms_max": max(level["refusal_ms"]["max"] or 0 for level in levels.values()),
    }


async def _closed(one: Callable[[], Awaitable[Answer]], seconds: float) -> dict[str, Any]:
    """As many clients as sequences run; each asks again when it has its answer."""
    start = time.perf_counter()
    answers: list[Answer] = []

    async def client() -> None:
        while time.perf_counter() < start + seconds:
            answers.append(await one())

    await asyncio.gather(*(client() for _ in range(MAX_SEQS)))
    return _level(answers, start, start + seconds)


async def _arrivals(one: Callable[[], Awaitable[Answer]], rate: float, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Requests that come at random moments, whether or not earlier ones are answered. The first fifth of the time does not count."""
    start = time.perf_counter()
    tasks: list[asyncio.Future[Answer]] = []
    at = start
    while (at := at + rng.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(at - time.perf_counter(), 0))
        tasks.append(asyncio.ensure_future(one()))
    answers = list(await asyncio.gather(*tasks))
    return _level(answers, start + seconds / 5, start + seconds)


def _level(answers: list[Answer], start: float, end: float) -> dict[str, Any]:
    """Figures of a window of time. A stream's tokens count when they came, those of requests that failed not at all."""
    good = [answer for answer in answers if answer.done]
    refused = [(answer.ended - answer.sent) * 1e3 for answer in answers if answer.status == 429]
    tokens = sum(a.tokens * sum(start <= t < end for t in a.times) / len(a.times) for a in good)
    finished = sum(start <= answer.ended < end for answer in good)
    inside = [answer for answer in good if answer.sent >= start]
    return {
        "sent": len(answers),
        "answered": len(good),
        "refused": len(refused),
        "failed": len(answers) - len(good) - len(refused),
        "requests_s": round(finished / (end - start), 3),
        "goodput_tok_s": round(tokens / (end - start), 2),
        "ttft_ms": spread([answer.ttft_ms for answer in inside]),
        "per_token_ms": spread([answer.per_token_ms for answer in inside]),
        "refusal_ms": spread(refused),
    }


# ---------------------------------------------------------------------------- overhead


def overhead(model: str, settings: dict[str, Any], args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """One token a pass and so one event a token, the most work that a server can have. The engine alone has nobody to tell.

    Beside the time per token, the processor time that each of the two takes for one: it bounds what the server adds where cores are free.
    """
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    with Engine(model, **settings) as engine, serve(model, **settings) as process:

        def prompts(clients: int) -> list[list[int]]:
            return [prompt(rng, PROMPT_TOKENS) for _ in range(clients)]

        def alone(clients: int) -> tuple[float, float]:
            """Milliseconds per token, and the processor's seconds."""
            start = time.process_time()
            done = engine.complete(prompts(clients), params, speculation=False)
            cpu_s = time.process_time() - start
            return statistics.fmean((each.duration_s - each.ttft_s) * 1e3 / (len(each.token_ids) - 1) for each in done), cpu_s

        def served(clients: int) -> tuple[float, float]:
            start = process.cpu_s()
            times = asyncio.run(_per_token(process.target, prompts(clients), args.max_tokens))
            return statistics.fmean(times), process.cpu_s() - start

        found: dict[str, Any] = {}
        for clients in OVERHEAD_CLIENTS:
            common.say(f"overhead: {clients} clients")
            measured = common.in_turns({"alone": partial(alone, clients), "served": partial(served, clients)}, args.rounds)
            ms = {name: [each for each, _ in rounds] for name, rounds in measured.items()}
            cpu_s = {name: sum(each for _, each in rounds) for name, rounds in measured.items()}
            found[str(clients)] = {
                **{f"{name}_ms": round(statistics.median(values), 3) for name, values in ms.items()},
                "ratio": round(statistics.median(ms["served"]) / statistics.median(ms["alone"]), 4),
                "ratio_median": round(statistics.median(b / a for a, b in zip(ms["alone"], ms["served"], strict=True)), 4),
                **{f"{name}_cpu_ms": round(s * 1e3 / (args.rounds * clients * args.max_tokens), 3) for name, s in cpu_s.items()},
                "cpu_ratio": round(cpu_s["served"] / cpu_s["alone"], 4),
            }
    return {"clients": found}


async def _per_token(target: Target, prompts: list[list[int]], max_tokens: int) -> list[float]:
    answers = await together(len(prompts), lambda n: ask(target, completion(prompts[n], max_tokens, speculation=False)))
    return [_good(answer).per_token_ms for answer in answers]


def _good(answer: Answer) -> Answer:
    if not answer.done:
        raise RuntimeError(f"a request failed: status {answer.status} {answer.error}")
    return answer


# ---------------------------------------------------------------------------- prefix


async def measure_prefix(target: Target, rounds: int, rng: random.Random, shared_tokens: int = SHARED_TOKENS) -> dict[str, Any]:
    """Two prompts that differ in their last 20 tokens, one after the other."""
    first, second = [], []
    for n in range(rounds + 1):
        shared = prompt(rng, shared_tokens)
        pair = [_good(await ask(target, completion(shared + prompt(rng, 20), 4))).ttft_ms for _ in range(2)]
        if n:
            first.append(pair[0])
            second.append(pair[1])
    figures = await metrics(target)
    return {
        "first_ms": round(statistics.median(first), 2),
        "second_ms": round(statistics.median(second), 2),
        "ratio": round(statistics.median(second) / statistics.median(first), 4),
        "hit_share": round(figures["prefix_cache_hits_total"] / figures["prefix_cache_queries_total"], 3),
    }


# ---------------------------------------------------------------------------- all of them


def served(measure: Callable[[Process, argparse.Namespace, random.Random], Any], **more: Any) -> Callable[..., dict[str, Any]]:
    """A mode that measures a server, which has these settings beside everybody's; one that is called is given the command line."""

    def run(model: str, settings: dict[str, Any], args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
        own = {name: value(args) if callable(value) else value for name, value in more.items()}
        with serve(model, **(settings | own)) as process:
            return asyncio.run(measure(process, args, rng))

    return run


MODES: dict[str, Callable[..., dict[str, Any]]] = {
    "capacity": served(lambda p, args, rng: measure_capacity(p.target, args.seconds, args.max_tokens, rng), max_queue=2 * MAX_SEQS),
    "overhead": overhead,
    "prefix": served(lambda p, args, rng: measure_prefix(p.target, args.rounds, rng)),
    "stalled": served(
        lambda p, args, rng: load_rude.measure_stalled(p.target, args.readers, args.seconds, rng),
        max_seqs=lambda args: args.readers + MAX_SEQS,
        send_timeout=2,
        kv_memory=1 << 30,
    ),
    "disconnect": served(
        lambda p, args, rng: load_rude.measure_disconnects(p.target, args.count, rng),
        max_seqs=load_rude.MAX_SEQS,
        max_queue=load_rude.MAX_QUEUE,
    ),
    # What a soaked server keeps for later, on purpose, is full before long: what grows after that should not.
    "soak": served(
        lambda p, args, rng: load_soak.measure_soak(p.target, p.resources, args.minutes * 60, rng),
        max_queue=2 * MAX_SEQS,
        kv_memory=32 << 20,
        answers=10_000,
    ),
}


def spread(values: list[float]) -> dict[str, float | None]:
    return {
        name: None if value is None else round(value, 2)
        for name, value in (("p50", quantile(values, 0.5)), ("p99", quantile(values, 0.99)), ("max", max(values, default=None)))
    }


def show(mode: str, found: dict[str, Any]) -> None:
    if mode == "capacity":
        header = ["load", "sent", "answered", "refused", "tok/s", "first p50", "p99 ms", "token p50", "p99 ms", "refusal p99", "max ms"]
        rows = [
            [
                *(name, level["sent"], level["answered"], level["refused"], level["goodput_tok_s"]),
                *(level[figure][q] for figure in ("ttft_ms", "per_token_ms") for q in ("p50", "p99")),
                *(level["refusal_ms"][q] for q in ("p99", "max")),
            ]
            for name, level in found["levels"].items()
        ]
        common.print_table(header, rows)
    elif mode == "overhead":
        rows = [
            [n, each["alone_ms"], each["served_ms"], each["ratio"], each["ratio_median"], each["served_cpu_ms"] - each["alone_cpu_ms"]]
            for n, each in found["clients"].items()
        ]
        common.print_table(["clients", "engine alone ms/token", "through SSE", "ratio", "median of rounds", "more CPU ms/token"], rows)
    elif mode == "disconnect":
        rows = [[name, each["count"], each["freed_ms"]["p50"], each["freed_ms"]["max"]] for name, each in found["cases"].items()]
        common.print_table(["left", "times", "freed p50", "max ms"], rows)
    rest = {name: value for name, value in found.items() if not isinstance(value, dict)}
    if rest:
        common.print_table([mode, ""], [[name.replace("_", " "), value] for name, value in rest.items()])
    print()


if __name__ == "__main__":
    main()

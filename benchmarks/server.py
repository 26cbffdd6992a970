"""What does a server carry, what does it cost beside the engine, and do rude clients harm it? Also agents' calls, and fresh checkouts.

    python -m benchmarks.server MODE [--model M] [--seconds S] [--seed N] …

Each mode starts `ngramspec serve` in a process of its own and talks to it over sockets of this machine.

capacity    closed loop with as many clients as sequences run, then requests at random moments, 1, 2 and 10 times as many as that carried:
            tokens per second of those that came through, time to first token, time per token, how soon the others were refused
overhead    time per token through SSE against an engine of the same settings in this process, in turns, for 1 and 8 clients
prefix      time to first token of a prompt whose first 1,500 tokens a request before it had, against that request's
stalled     clients' time per token beside 50 streams that nobody reads, against 50 that are read, and alone
disconnect  clients that leave in 3 ways, in 4 phases, streaming and not: until their sequence is freed, and whether anything stays behind
soak        mixed requests, a third of which is abandoned, for --minutes: growth of anonymous memory, files and threads
all         the six above
tools       an agent's calls of tools, turn after turn: see `benchmarks/agent.py`
repo        `serve --repo` on a fresh checkout: see `benchmarks/fresh_checkout.py`

Without --model the first six take a small random one, so that the server is what is measured; figures of time per token want a real one
(--model smollm2), which `repo` takes by itself. Progress goes to standard error, a table and a last line of JSON to standard output.
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

from benchmarks import agent, common, fresh_checkout, rude_clients
from benchmarks.http_client import (
    ServerAddress,
    TimedAnswer,
    find_quantile,
    make_completion,
    make_prompt,
    read_metrics,
    send_request,
    send_together,
)
from benchmarks.server_process import TINY, ServerProcess, make_tiny, serve
from ngramspec import Engine, SamplingParams
from ngramspec.backends.cpu.cores import count_cores

ARRIVAL_FACTORS = (1, 2, 10)
OVERHEAD_CLIENTS = (1, 8)
MAX_SEQS = 8
MAX_QUEUE = 16
PROMPT_TOKENS = 48
SHARED_TOKENS = 1500
KV_BYTES = 256 << 20
LONGEST_WINDOW_S = 60  # capacity gives up if nothing was answered within so long

Mode = Callable[[str, dict[str, Any], argparse.Namespace, random.Random], dict[str, Any]]


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.mode in PROGRAMS:
        common.print_document(PROGRAMS[args.mode](args))
        return
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        name = model = args.model or TINY
        if model == TINY:
            args.threads = args.threads or 1  # more have nothing to share
            model = make_tiny(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ngramspec-server-"))))
        for mode in MODES if args.mode == "all" else (args.mode,):
            common.print_progress(f"{mode}: starting a server")
            settings = {"max_seqs": MAX_SEQS, "kv_memory": KV_BYTES} | ({"threads": args.threads} if args.threads else {})
            found[mode] = MODES[mode](model, settings, args, random.Random(args.seed))
            print_figures(mode, found[mode])
    names = ("seconds", "max_tokens", "rounds", "readers", "count", "minutes", "threads", "seed")
    settings = {name: getattr(args, name) for name in names}
    common.print_document({"model": name, **found, "settings": settings, **common.describe_machine("cpu", args.threads or count_cores())})


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("server", __doc__)
    parser.add_argument("mode", choices=[*MODES, "all", *PROGRAMS])
    parser.add_argument("--model", help="folder, hub name, GGUF file or smollm2; default: small and random, made here; repo: smollm2")
    parser.add_argument("--seconds", type=common.parse_number, default=20, help="capacity, stalled: of each measurement")
    parser.add_argument("--max-tokens", type=common.parse_positive, default=64, help="of a request in capacity and overhead")
    parser.add_argument("--rounds", type=common.parse_positive, default=8, help="overhead, prefix: repetitions")
    parser.add_argument("--readers", type=common.parse_positive, default=50, help="stalled: how many do not read")
    parser.add_argument("--count", type=common.parse_positive, default=1000, help="disconnect: in all")
    parser.add_argument("--minutes", type=common.parse_number, default=30, help="soak: how long")
    parser.add_argument(
        "--threads", type=common.parse_positive, help="threads of each engine; default one per performance core, 1 for the small model"
    )
    parser.add_argument("--seed", type=int, default=0)
    agent.add_options(parser)
    fresh_checkout.add_options(parser)
    return parser.parse_args(argv)


# ---------------------------------------------------------------------------- capacity


async def measure_capacity(server: ServerAddress, seconds: float, max_tokens: int, rng: random.Random) -> dict[str, Any]:
    """Measure goodput with all places taken, then with arrivals ARRIVAL_FACTORS times as frequent as requests were answered then."""

    def send() -> Awaitable[TimedAnswer]:
        return send_request(server, make_completion(make_prompt(rng, PROMPT_TOKENS), max_tokens))

    await send_together(MAX_SEQS, lambda _: send())  # what is made at the first pass is made now
    levels = {"closed": await _measure_closed_loop(send, seconds)}
    while not (rate := levels["closed"]["requests_s"]):  # a machine that others keep busy
        if seconds > LONGEST_WINDOW_S:
            raise RuntimeError(f"no request was answered within {seconds:g} s")
        seconds *= 2
        common.print_progress(f"capacity: nothing came through; trying {seconds:g} s")
        levels["closed"] = await _measure_closed_loop(send, seconds)
    for factor in ARRIVAL_FACTORS:
        common.print_progress(f"capacity: {factor} x {rate:.2f} requests a second")
        levels[f"{factor}x"] = await _measure_arrivals(send, factor * rate, seconds, rng)
    best = max(level["goodput_tok_s"] for level in levels.values())
    return {
        "capacity_requests_s": rate,
        "levels": levels,
        "goodput_at_10x": round(levels[f"{ARRIVAL_FACTORS[-1]}x"]["goodput_tok_s"] / best, 3),
        "refusal_ms_max": max(level["refusal_ms"]["max"] or 0 for level in levels.values()),
    }


async def _measure_closed_loop(send: Callable[[], Awaitable[TimedAnswer]], seconds: float) -> dict[str, Any]:
    """Run as many clients as sequences run; each asks again when it has its answer."""
    start = time.perf_counter()
    answers: list[TimedAnswer] = []

    async def run_client() -> None:
        while time.perf_counter() < start + seconds:
            answers.append(await send())

    await asyncio.gather(*(run_client() for _ in range(MAX_SEQS)))
    return summarise_level(answers, start, start + seconds)


async def _measure_arrivals(send: Callable[[], Awaitable[TimedAnswer]], rate: float, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Send requests at random moments, whether or not earlier ones are answered. The first fifth of the time does not count."""
    at = start = time.perf_counter()
    tasks: list[asyncio.Future[TimedAnswer]] = []
    while (at := at + rng.expovariate(rate)) < start + seconds:
        await asyncio.sleep(max(at - time.perf_counter(), 0))
        tasks.append(asyncio.ensure_future(send()))
    answers = list(await asyncio.gather(*tasks))
    return summarise_level(answers, start + seconds / 5, start + seconds)


def summarise_level(answers: list[TimedAnswer], start: float, end: float) -> dict[str, Any]:
    """Return figures of a window of time. A stream's tokens count when they came, those of requests that failed not at all."""
    good = [answer for answer in answers if answer.done]
    refused = [(answer.ended - answer.sent) * 1e3 for answer in answers if answer.status == 429]
    tokens = sum(a.tokens * sum(start <= t < end for t in a.times) / len(a.times) for a in good)
    inside = [answer for answer in good if answer.sent >= start]
    return {
        "sent": len(answers),
        "answered": len(good),
        "refused": len(refused),
        "failed": len(answers) - len(good) - len(refused),
        "requests_s": round(sum(start <= answer.ended < end for answer in good) / (end - start), 3),
        "goodput_tok_s": round(tokens / (end - start), 2),
        "ttft_ms": summarise([answer.ttft_ms for answer in inside]),
        "per_token_ms": summarise([answer.per_token_ms for answer in inside]),
        "refusal_ms": summarise(refused),
    }


def summarise(values: list[float]) -> dict[str, float | None]:
    found = {"p50": find_quantile(values, 0.5), "p99": find_quantile(values, 0.99), "max": max(values, default=None)}
    return {name: None if value is None else round(value, 2) for name, value in found.items()}


# ---------------------------------------------------------------------------- overhead


def measure_overhead(model: str, settings: dict[str, Any], args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    """Compare times per token with one token a pass and so one event a token, the most work that a server can have.

    The engine alone delivers nothing. `cpu_ms` is the processor time that each of the two takes for a token: it bounds what the server adds
    if cores are free.
    """
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(model, **settings))
        common.finish_start(engine)
        process = stack.enter_context(serve(model, **settings))

        def make_prompts(clients: int) -> list[list[int]]:
            return [make_prompt(rng, PROMPT_TOKENS) for _ in range(clients)]

        def measure_alone(clients: int) -> tuple[float, float]:
            """Return milliseconds per token, and the processor's seconds."""
            start = time.process_time()
            done = engine.complete(make_prompts(clients), params, speculation=False)
            cpu_s = time.process_time() - start
            return statistics.fmean((each.duration_s - each.ttft_s) * 1e3 / (len(each.token_ids) - 1) for each in done), cpu_s

        def measure_served(clients: int) -> tuple[float, float]:
            start = process.read_cpu_s()
            bodies = [make_completion(ids, args.max_tokens, speculation=False) for ids in make_prompts(clients)]
            answers = asyncio.run(send_together(clients, lambda n: send_request(process.address, bodies[n])))
            return statistics.fmean(_require(answer).per_token_ms for answer in answers), process.read_cpu_s() - start

        found: dict[str, Any] = {}
        for clients in OVERHEAD_CLIENTS:
            common.print_progress(f"overhead: {clients} clients")
            contenders = {"alone": partial(measure_alone, clients), "served": partial(measure_served, clients)}
            measured = common.run_in_turns(contenders, args.rounds)
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


def _require(answer: TimedAnswer) -> TimedAnswer:
    if not answer.done:
        raise RuntimeError(f"a request failed: status {answer.status} {answer.error}")
    return answer


# ---------------------------------------------------------------------------- prefix


async def measure_prefix(server: ServerAddress, rounds: int, rng: random.Random, shared_tokens: int = SHARED_TOKENS) -> dict[str, Any]:
    """Send two prompts that differ in their last 20 tokens, one after the other. The first round does not count."""
    first, second = [], []
    for n in range(rounds + 1):
        shared = make_prompt(rng, shared_tokens)
        pair = [_require(await send_request(server, make_completion(shared + make_prompt(rng, 20), 4))).ttft_ms for _ in range(2)]
        if n:
            first.append(pair[0])
            second.append(pair[1])
    metrics = await read_metrics(server)
    return {
        "first_ms": round(statistics.median(first), 2),
        "second_ms": round(statistics.median(second), 2),
        "ratio": round(statistics.median(second) / statistics.median(first), 4),
        "hit_share": round(metrics["prefix_cache_hits_total"] / metrics["prefix_cache_queries_total"], 3),
    }


# ---------------------------------------------------------------------------- all of them


def make_mode(measure: Callable[[ServerProcess, argparse.Namespace, random.Random], Any], **more: Any) -> Mode:
    """Return a mode that measures a server with these settings beside those of all modes; a callable one gets the command line."""

    def run_mode(model: str, settings: dict[str, Any], args: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
        own = {name: value(args) if callable(value) else value for name, value in more.items()}
        with serve(model, **(settings | own)) as process:
            return asyncio.run(measure(process, args, rng))

    return run_mode


MODES: dict[str, Mode] = {
    "capacity": make_mode(lambda p, args, rng: measure_capacity(p.address, args.seconds, args.max_tokens, rng), max_queue=MAX_QUEUE),
    "overhead": measure_overhead,
    "prefix": make_mode(lambda p, args, rng: measure_prefix(p.address, args.rounds, rng)),
    "stalled": make_mode(
        lambda p, args, rng: rude_clients.measure_stalled(p.address, args.readers, args.seconds, rng),
        max_seqs=lambda args: args.readers + MAX_SEQS,
        send_timeout=2,
        kv_memory=1 << 30,
    ),
    "disconnect": make_mode(
        lambda p, args, rng: rude_clients.measure_disconnects(p.address, args.count, rng),
        max_seqs=rude_clients.MAX_SEQS,
        max_queue=rude_clients.MAX_QUEUE,
    ),
    # What a soaked server keeps for later, on purpose, is full before long: what grows after that should not.
    "soak": make_mode(
        lambda p, args, rng: rude_clients.measure_soak(p.address, p.read_resources, args.minutes * 60, rng),
        max_queue=MAX_QUEUE,
        kv_memory=32 << 20,
        answers=10_000,
    ),
}
PROGRAMS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"tools": agent.run_tools, "repo": fresh_checkout.run_repo}


def print_figures(mode: str, found: dict[str, Any]) -> None:
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

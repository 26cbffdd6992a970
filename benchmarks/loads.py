"""What is speculation worth at every load, and does it keep what it promises?

    python -m benchmarks.loads --model M --prompts F.jsonl [--prompts F.jsonl ...] [--random-prompts] [--limit N] [--max-tokens K]
        [--temperatures T,T] [--concurrency C,C] [--rounds R] [--datastore FOREIGN] [--unrelated F.jsonl] [--disturbed]
        [--log F.jsonl]

Every set of prompts is completed at every temperature with several requests under way, the next one coming as one ends, by an engine that
drafts and by one that does not, which take turns of half a second (`in_turns`), so that both see the same machine. With C requests under
way, a rate is measured from the moment when C texts have ended until the last request begins. In between a request begins whenever one
ends, so both engines compute as many prompts per text. Before, all requests begin together; afterwards fewer and fewer run
(`speedup_to_the_end` covers all of it; a set that is too small has only that rate). With several requests under way, texts are half to one
and a half times as long as `--max-tokens`: if all were equally long, those without drafts would begin and end together, with their prompts
in passes of their own, and seem up to 6 % faster than they are to users. `rounds` has the speedup of each round. Requests of a round draft
from each other's answers and from no earlier ones. `--datastore` adds a contender that also drafts from that datastore, `--unrelated` one
that also drafts from answers to those prompts. Neither has to do with the prompts measured: `against_on` shows what they cost.
`--disturbed` adds one that begins with costs of passes measured while every core computed something else, corrected by `SETTLED` passes.

Progress goes to standard error, a table and a last line of JSON to standard output. `host_ms`: the median of what steps took beyond their
passes. `passes`: by rows, how many of the latest steps, their predicted and their measured time. `by_source`: draft nodes, the sum of
their probabilities, and those that were accepted.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks import common, decode
from benchmarks.common import Prompt, print_progress
from benchmarks.in_turns import InTurns
from benchmarks.our_engine import describe_engine, make_fresh_drafts
from ngramspec import Engine, SamplingParams, Stats
from ngramspec.backends.base import Output
from ngramspec.engine.native_steps import NativeResult
from ngramspec.outputs import Completion
from ngramspec.sampling.batch import Batch
from ngramspec.speculative.budget.cost_model import CostModel
from ngramspec.speculative.budget.step_timer import StepTimer

# Fewest nodes of a source for its probabilities to be compared.
LEAST_NODES = 200
# Factor of prompts, and least factor of those under way, with several requests at a time, as far as a file has them.
WAVES = 3
# Multiples of the golden section, without their whole parts, are spread evenly, however many are taken.
GOLDEN = (5**0.5 - 1) / 2
# Passes in which a disturbed start is to be made up for.
SETTLED = 200


@dataclass(slots=True)
class Runs:
    """What one contender did of a cell."""

    seconds: list[float] = field(default_factory=list)
    full: list[tuple[int, float]] = field(default_factory=list)
    """Tokens, of each round, and the seconds while as many requests begin as end."""
    host_ms: list[float] = field(default_factory=list)
    """Time, of each step, that it took beyond its pass."""
    outputs: list[list[int]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


class LoadedEngine:
    """An engine with a way of drafting."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self._turns: InTurns | None = None

    def learn(self, cost: CostModel) -> None:
        """Go on from this cost of passes; what a pass takes is measured while it is its turn."""
        self.engine.core.timing = StepTimer(cost, self.read_clock)

    def read_clock(self) -> float:
        """Return the seconds that this engine has had, or the time if it takes no turns."""
        return time.perf_counter() if self._turns is None else self._turns.read_clock(self.name)

    def run(self, prompts: list[Prompt], params: list[SamplingParams], concurrency: int, turns: InTurns, runs: Runs) -> None:
        """Complete these prompts, some at a time, each with the parameters at its place."""
        self._turns = turns
        made, begun = list[tuple[float, int]](), list[float]()
        try:
            with self._watch_steps(turns, runs.host_ms, made):
                speculation = self.name != "off"
                done = complete_concurrently(
                    self.engine, prompts, params, concurrency, lambda: begun.append(self.read_clock()), speculation=speculation
                )
        finally:
            turns.remove(self.name)
            end, self._turns = self.read_clock(), None
        runs.seconds.append(end)
        first, last = find_steady_time(begun, concurrency, 0.0, end)
        runs.full.append((sum(n for at, n in made if first < at <= last), last - first))
        for completion in done:
            runs.outputs.append(completion.token_ids)
            runs.stats.add(completion.stats)

    @contextmanager
    def _watch_steps(self, turns: InTurns, host_ms: list[float], made: list[tuple[float, int]]) -> Iterator[None]:
        """Have steps wait for their turn. Adds what each takes beyond its pass (of several in one call, their mean), and when it was over
        with how many tokens. The engine is idle before and after."""
        core, runner, timing = self.engine.core, self.engine.runner, self.engine.core.timing
        step, forward, natively, count, passes_ms = core.step, runner.forward, core.native_steps.run, timing.add_tokens, list[float]()

        def add_tokens(n_tokens: int) -> None:
            made.append((self.read_clock(), n_tokens))
            turns.count_tokens(self.name, n_tokens)
            count(n_tokens)

        def timed_forward(batch: Batch) -> Output:
            started = time.perf_counter()
            output = forward(batch)
            output.wait()
            passes_ms.append((time.perf_counter() - started) * 1e3)
            return output

        def timed_natively(*args: Any) -> NativeResult | None:
            result = natively(*args)
            if result is not None:
                passes_ms.extend(result.records["forward_ms"].tolist())
            return result

        def timed_step(*args: Any) -> Any:
            with turns.step(self.name):
                passes_ms.clear()
                started = time.perf_counter()
                try:
                    return step(*args)
                finally:
                    if passes_ms:
                        of_each = ((time.perf_counter() - started) * 1e3 - sum(passes_ms)) / len(passes_ms)
                        host_ms.extend([of_each] * len(passes_ms))

        with (
            mock.patch.object(core, "step", timed_step),
            mock.patch.object(runner, "forward", timed_forward),
            mock.patch.object(core.native_steps, "run", timed_natively),
            mock.patch.object(timing, "add_tokens", add_tokens),
        ):
            yield


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    log = common.ResultLog(args.log)
    settings = {"limit": args.limit, "max_tokens": args.max_tokens, "datastore": args.datastore and Path(args.datastore).name}
    disturbed = disturbed_cost(args) if args.disturbed else None
    with ExitStack() as stack:
        contenders = [LoadedEngine(name, stack.enter_context(open_contender(name, args))) for name in list_contender_names(args)]
        off, on = contenders[:2]
        sets = {path.stem: common.read_prompts(path, off.engine.tokenizer) for path in args.prompts}
        if args.random_prompts:
            sets["random"] = common.make_random_prompts(off.engine.tokenizer, most_prompts(args, max(args.concurrency)))
        unrelated = common.pick_evenly(common.read_prompts(args.unrelated, off.engine.tokenizer), args.limit) if args.unrelated else []
        first = next(prompts[0] for prompts in sets.values() if prompts)
        for each in contenders:
            common.finish_start(each.engine)
            for speculation in (False, True):  # what is loaded at first is not in anybody's time
                each.engine.complete(first.ids[:64], SamplingParams(max_tokens=16, temperature=1.0), speculation=speculation)
            each.learn(disturbed if disturbed is not None and each.name == "disturbed" else copy.deepcopy(off.engine.core.cost))
            if each.name == "disturbed":
                learn_cost(each, [prompt for prompts in sets.values() for prompt in prompts])
        rows, code = [], common.digest_code(args.device)
        for name, prompts in sets.items():
            fitting = common.pick_fitting(prompts, 3 * args.max_tokens // 2, off.engine.max_model_len)
            for temperature in args.temperatures:
                for concurrency in args.concurrency:
                    key = {"set": name, "temperature": temperature, "concurrency": concurrency, "model": args.model, "limit": args.limit}
                    key |= {
                        "max_tokens": args.max_tokens,
                        "foreign": bool(args.datastore),
                        "unrelated": bool(unrelated),
                        "disturbed": args.disturbed,
                    }
                    some = mix_prompts(common.pick_evenly(fitting, most_prompts(args, concurrency)), concurrency)
                    key |= {"rounds": args.rounds, "datastore": settings["datastore"], "code": code, **common.get_engine_options(args)}
                    key |= {"asked": common.hash_outputs(prompt.ids for prompt in [*some, *unrelated])}
                    row = log.get(key)
                    if row is None:
                        row = {"key": key, **measure_cell(contenders, Cell(some, unrelated, concurrency), temperature, args)}
                        log.add(row)
                    rows.append(row)
                    print_progress(
                        f"{name} at {temperature}, {concurrency} at a time: {row['rounds']}, {row['identical']}/{row['prompts']} identical"
                    )
        document = {
            "model": args.model,
            **summarize_rows(rows),
            "passes": on.engine.core.cost.summarize_predictions(),
            **describe_engine(on.engine),
        }
        threads = on.engine.threads
    show(document)
    common.print_document(document | {"settings": settings} | common.describe_machine(args.device, threads))


def list_contender_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the contenders."""
    others = {"store": args.datastore, "unrelated": args.unrelated, "disturbed": args.disturbed}
    return ["off", "on", *(name for name, wanted in others.items() if wanted)]


def open_contender(name: str, args: argparse.Namespace) -> Engine:
    """Return a contender's engine."""
    stores = [args.datastore] if name == "store" else []
    return Engine(args.model, max_seqs=max_seqs(args), datastore=stores, progress=print_progress, **common.get_engine_options(args))


def max_seqs(args: argparse.Namespace) -> int:
    """Return the most sequences of every engine."""
    return max(64, *args.concurrency)


def most_prompts(args: argparse.Namespace, concurrency: int) -> int:
    """Return the most prompts of a set in a cell with this number of requests under way."""
    return args.limit if concurrency == 1 else WAVES * max(args.limit, concurrency)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.make_parser("loads", __doc__)
    common.add_model_options(parser)
    add = parser.add_argument
    add("--prompts", type=common.parse_file, action="append", default=[], metavar="F.jsonl", help="a set of prompts; may be repeated")
    add("--random-prompts", action="store_true", help="also a set of prompts of random words")
    add(
        "--limit",
        type=common.parse_positive,
        default=32,
        metavar="N",
        help=f"prompts of each set, evenly over its file, {WAVES} times as many with several at a time (32)",
    )
    add("--max-tokens", type=common.parse_positive, default=96, metavar="K", help="of a text, in the mean (96)")
    add("--temperatures", type=common.parse_floats, default=[0.0, 0.8], metavar="T,T,...", help="with a seed; default 0,0.8")
    add("--concurrency", type=common.parse_counts, default=[1, 8, 32], metavar="C,C,...", help="requests under way; default 1,8,32")
    add("--rounds", type=common.parse_positive, default=2, metavar="R", help="of every cell with several requests under way (2)")
    add("--datastore", type=decode.parse_datastore, metavar="D", help="of a text that has nothing to do with the prompts")
    add(
        "--unrelated",
        type=common.parse_file,
        metavar="F.jsonl",
        help="prompts that have nothing to do with these, and whose answers one contender also drafts from",
    )
    add("--disturbed", action="store_true", help="also with the cost of passes as a start believed it while other processes computed")
    add("--log", type=Path, metavar="F.jsonl", help="keep what is measured here, and go on from it, if code and settings are the same")
    args = parser.parse_args(argv)
    if not args.prompts and not args.random_prompts:
        parser.error("--prompts or --random-prompts is needed")
    args.dtype = common.settle_dtype(args.device, args.dtype)
    return args


def disturbed_cost(args: argparse.Namespace) -> CostModel:
    """Return what a first start believes that passes cost while every core computes something else."""
    with (
        tempfile.TemporaryDirectory() as cache,
        mock.patch.dict(os.environ, NGRAMSPEC_CACHE=cache),
        occupy_cores(),
        Engine(args.model, progress=print_progress, **common.get_engine_options(args)) as engine,
    ):
        cost = copy.deepcopy(engine.core.cost)
    print_progress("disturbed: " + ", ".join(f"{n:.0f} rows {ms:.1f} ms" for n, ms in zip(cost.counts, cost.times, strict=True)))
    return cost


@contextmanager
def occupy_cores() -> Iterator[None]:
    """Keep every core computing, in processes of their own."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def learn_cost(contender: LoadedEngine, prompts: list[Prompt]) -> None:
    """Let `SETTLED` passes with drafts teach it what they take."""
    engine = contender.engine
    engine.use(speculator=make_fresh_drafts(engine, 64))
    before = engine.core.n_passes
    for prompt in prompts:
        if engine.core.n_passes - before >= SETTLED:
            break
        engine.complete(prompt.ids, SamplingParams(max_tokens=96), prefix_cache=False)


@dataclass(frozen=True, slots=True)
class Cell:
    prompts: list[Prompt]
    unrelated: list[Prompt]
    concurrency: int


def measure_cell(contenders: list[LoadedEngine], what: Cell, temperature: float, args: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the JSON document."""
    lengths = [args.max_tokens] * len(what.prompts) if what.concurrency == 1 else vary_lengths(args.max_tokens, len(what.prompts))
    params = [SamplingParams(max_tokens=n, temperature=temperature, seed=1) for n in lengths]
    runs = {each.name: Runs() for each in contenders}
    rounds = 1 if what.concurrency == 1 else args.rounds
    for n in range(rounds):
        for each in contenders:
            engine = each.engine
            speculator = make_fresh_drafts(engine, max_seqs(args))
            if each.name == "store":
                speculator.use_datastores(engine.datastores, [])
            engine.use(speculator=speculator)
            if each.name == "unrelated":
                complete_concurrently(engine, what.unrelated, [params[0]] * len(what.unrelated), 16)
        begin = n * len(what.prompts) // rounds
        prompts, of_each = (one[begin:] + one[:begin] for one in (what.prompts, params))
        turns = InTurns(each.name for each in contenders[:: 1 if n % 2 == 0 else -1])
        with ThreadPoolExecutor(len(contenders)) as threads:
            for done in [threads.submit(each.run, prompts, of_each, what.concurrency, turns, runs[each.name]) for each in contenders]:
                done.result()
    on, tokens = runs["on"], sum(map(len, runs["off"].outputs))
    return {
        "prompts": len(what.prompts) * rounds,
        "tokens": tokens,
        "identical": sum(all(run.outputs[i] == text for run in runs.values()) for i, text in enumerate(runs["off"].outputs)),
        "tok_s_off": round(rate(runs["off"].full), 1),
        "tok_s_on": round(rate(on.full), 1),
        "speedup": round(rate(on.full) / rate(runs["off"].full), 3),
        "rounds": [round(rate([b]) / rate([a]), 3) for a, b in zip(runs["off"].full, on.full, strict=True)],
        "speedup_to_the_end": round(sum(runs["off"].seconds) / sum(on.seconds), 3),
        "against_on": {name: round(rate(run.full) / rate(on.full), 3) for name, run in runs.items() if name not in ("off", "on")},
        "tokens_per_pass": round(on.stats.tokens_per_pass, 3),
        "rows_per_pass": round(on.stats.rows_per_pass, 3),
        "host_ms": {name: round(statistics.median(run.host_ms), 3) for name, run in runs.items()},
        "by_source": {name: by_source(run.stats) for name, run in runs.items() if name != "off"},
    }


def vary_lengths(mean: int, n: int) -> list[int]:
    """Return n lengths from half to one and a half times the mean, spread evenly whatever part of the list is taken."""
    return [round(mean * (0.5 + i * GOLDEN % 1)) for i in range(n)]


def mix_prompts(prompts: list[Prompt], concurrency: int) -> list[Prompt]:
    """Return prompts in an order in which any that run at the same time are a fair sample of all.

    A file is sorted by what it asks for, and its parts take more or less time without drafts, too.
    """
    waves = max(len(prompts) // concurrency, 1) if concurrency > 1 else 1
    return [prompt for first in range(waves) for prompt in prompts[first::waves]]


def find_steady_time(begun: list[float], concurrency: int, start: float, end: float) -> tuple[float, float]:
    """Return the time from when as many texts have ended as run at a time until the last one begins, or all of the time if these are few.

    `begun`: when each began, which after the first ones is when another has ended.
    """
    first = 2 * concurrency - 1
    if concurrency == 1 or len(begun) < first + 1 + concurrency // 2:
        return start, end
    times = sorted(begun)
    return times[first], times[-1]


def rate(full: list[tuple[int, float]]) -> float:
    """Return tokens a second."""
    return sum(n for n, _ in full) / max(sum(seconds for _, seconds in full), 1e-9)


def complete_concurrently(
    engine: Engine,
    prompts: list[Prompt],
    params: list[SamplingParams],
    concurrency: int,
    begins: Callable[[], None] = lambda: None,
    **hints: Any,
) -> list[Completion]:
    """Return the completions of prompts, each with its parameters, some at a time. `begins` is called when one begins, in any thread."""

    def complete(prompt: Prompt, how: SamplingParams) -> Completion:
        begins()
        return engine.complete(prompt.ids, how, prefix_cache=False, **hints)

    with ThreadPoolExecutor(concurrency) as threads:
        return list(threads.map(complete, prompts, params))


def by_source(stats: Stats) -> dict[str, tuple[int, float, int]]:
    return {
        name: (n, round(stats.expected_by_source.get(name, 0.0), 1), stats.accepted_by_source.get(name, 0))
        for name, n in stats.drafted_by_source.items()
    }


def summarize_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    loads = sorted({row["key"]["concurrency"] for row in rows})
    promises = [
        (round(expected / max(made, 1), 3), f"{name} of {row['key']['set']} at {row['key']['temperature']}, {row['key']['concurrency']}")
        for row in rows
        for sources in row["by_source"].values()
        for name, (n, expected, made) in sources.items()
        if n >= LEAST_NODES
    ]
    return {
        "means": {n: round(statistics.mean(row["speedup"] for row in rows if row["key"]["concurrency"] == n), 3) for n in loads},
        "least": min(row["speedup"] for row in rows),
        "host_ms": {
            n: {
                name: round(statistics.median(row["host_ms"][name] for row in rows if row["key"]["concurrency"] == n), 3)
                for name in ("off", "on")
            }
            for n in loads
        },
        "identical": all(row["identical"] == row["prompts"] for row in rows),
        "expected_against_made": {"least": min(promises, default=None), "most": max(promises, default=None)},
        "cells": rows,
    }


def show(document: dict[str, Any]) -> None:
    others = sorted({name for row in document["cells"] for name in row["against_on"]})
    rows = [
        [
            f"{row['key']['set']} at {row['key']['temperature']}, {row['key']['concurrency']} at a time",
            row["tok_s_off"],
            row["speedup"],
            row["tokens_per_pass"],
            f"{row['identical']}/{row['prompts']}",
            *(row["against_on"].get(name) for name in others),
        ]
        for row in document["cells"]
    ]
    common.print_table(["", "tok/s off", "on", "tokens a pass", "same tokens", *(f"{name} against on" for name in others)], rows)
    print("means: " + ", ".join(f"{n} at a time {mean}" for n, mean in document["means"].items()) + f"; least {document['least']}")


if __name__ == "__main__":
    common.run_command(main)

"""Parts of the GPU benchmark that time passes: the memory's speed, rows, kernels, the host's share, the price of exactness."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.common import interleaved_medians
from benchmarks.gpu_plan import Figures, Plan, bandwidth, busy_us, kernel_table, open_engine, profiled, release, weight_bytes
from benchmarks.gpu_texts import Foretold, spoiled
from ngramspec import Engine, SamplingParams

PROFILED = 5
"""Passes in a profile."""


def floor(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """How fast the device reads its memory, over as many bytes as the models' weights."""
    for model in dict.fromkeys((plan.large, plan.small)):
        yield model, bandwidth(plan, weight_bytes(plan, model))


def passes(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """Milliseconds of a pass by rows, against the reading of the weights."""
    for model in dict.fromkeys((plan.large, plan.small)):
        n_bytes = weight_bytes(plan, model)
        read = bandwidth(plan, n_bytes)
        with open_engine(plan, model) as engine:
            times = _by_rows({"": engine}, plan)
            ms = {str(rows): round(times["", rows], 4) for rows in plan.rows}
            one = ms["1"]
            yield (
                model,
                {
                    "context": plan.context,
                    "weight_bytes": n_bytes,
                    "floor_ms": read["floor_ms"],
                    "gb_s": read["gb_s"],
                    "ms": ms,
                    "over_floor": {rows: round(t / read["floor_ms"], 3) for rows, t in ms.items()},
                    "over_one_row": {rows: round(t / one, 3) for rows, t in ms.items()},
                    "props": engine.props(),
                },
            )
        del engine
        release(plan)


def _by_rows(engines: dict[str, Engine], plan: Plan) -> dict[tuple[str, int], float]:
    """Median milliseconds of a pass of each engine with each number of rows, in turns."""
    measures = {
        f"{name}|{rows}": partial(engine.runner.time_pass, rows, plan.context) for name, engine in engines.items() for rows in plan.rows
    }
    medians = interleaved_medians(measures, plan.repeat)
    return {(key.split("|")[0], int(key.split("|")[1])): ms for key, ms in medians.items()}


def kernels(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """Which kernels a pass of the large model consists of."""
    with open_engine(plan, plan.large) as engine:
        for rows in (1, 8):
            run = partial(engine.runner.time_pass, rows, plan.context)
            for _ in range(3):
                run()
            found = profiled(plan, lambda run=run: [run() for _ in range(PROFILED)])
            yield f"{rows} rows", kernel_table(found, PROFILED, len(engine.runner.shapes))


def host(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """Time of a step in which the device waits for the host: wall time of undisturbed steps less the device's in profiled ones."""
    for model in dict.fromkeys((plan.large, plan.small)):
        with open_engine(plan, model) as engine:
            rng = np.random.default_rng(0)
            prompt = rng.integers(0, engine.vocab_size, 64).tolist()
            most = plan.max_tokens
            whole = engine.complete(prompt, _greedy(most), speculation=False).token_ids
            own = engine.core.proposer
            told = Foretold({tuple(prompt): spoiled(whole, engine.vocab_size)}, tree=True, vocab_size=engine.vocab_size)
            for name, speculation, proposer in (("off", False, own), ("looking", True, own), ("drafts", True, told)):
                engine.core.proposer = proposer
                yield f"{model}, {name}", _host_share(engine, plan, prompt, speculation)
            engine.core.proposer = own
        del engine
        release(plan)


def _host_share(engine: Engine, plan: Plan, prompt: list[int], speculation: bool) -> Figures:
    """By the difference of a long and a short run, so that the prompt's pass and the start do not count."""
    few, many = plan.max_tokens // 4, plan.max_tokens

    def run(n: int) -> tuple[float, int]:
        done = engine.complete(prompt, _greedy(n), speculation=speculation, prefix_cache=False)
        return done.duration_s * 1e3, done.stats.passes

    run(many)
    walls = []
    for _ in range(max(plan.repeat // 6, 1)):
        short, long = run(few), run(many)
        walls.append((long[0] - short[0]) / max(long[1] - short[1], 1))
    counts: dict[int, int] = {}

    def count(n: int) -> None:
        counts[n] = run(n)[1]

    busy = [busy_us(profiled(plan, partial(count, n))) / 1e3 for n in (few, many)]
    device_ms = (busy[1] - busy[0]) / max(counts[many] - counts[few], 1)
    wall_ms = statistics.median(walls)
    return {
        "wall_ms": round(wall_ms, 4),
        "device_ms": round(device_ms, 4),
        "host_ms": round(wall_ms - device_ms, 4),
        "host_share": round(max(wall_ms - device_ms, 0.0) / wall_ms, 4) if wall_ms > 0 else None,
        "passes": counts[many],
        "tokens": many,
    }


def exactness(plan: Plan) -> Iterator[tuple[str, Figures]]:
    """What row-invariant products cost against the vendor library's own choice."""
    with open_engine(plan, plan.large) as exact, open_engine(plan, plan.large, linears="vendor") as vendor:
        times = _by_rows({"exact": exact, "vendor": vendor}, plan)
        yield (
            plan.large,
            {
                "exact_ms": {str(n): round(times["exact", n], 4) for n in plan.rows},
                "vendor_ms": {str(n): round(times["vendor", n], 4) for n in plan.rows},
                "ratio": {str(n): round(times["exact", n] / times["vendor", n], 4) for n in plan.rows},
                "exact": exact.exactness,
                "vendor": vendor.exactness,
                "policies": exact.props()["linear_policies"],
            },
        )


def _greedy(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=n, ignore_eos=True)

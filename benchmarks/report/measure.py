"""The measuring of the report: every contender on the same prompts in turns, block by block, each kept as soon as it is done.

A block is one category at one temperature. Its contenders begin it knowing nothing, and take each prompt in turns, speculation off among
them; so a block is measured as a whole, and what stops in the middle of one begins it anew. A cell is what one contender did in a block;
cells enter and leave as JSON. Runs go through `decode`, drafts without a model through `replay`; reads no results.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ngramspec
from benchmarks import common, decode, replayed
from benchmarks.common import ResultLog, print_progress
from benchmarks.our_engine import CountedCost, FixedCost, FixedLength, OurEngine
from benchmarks.peers import NAMES, Contender, Peer, PeerAbsentError, TimedRun
from benchmarks.recordings import RecordedText
from benchmarks.replay import make_peers
from benchmarks.report.categories import Category
from ngramspec import Engine, SamplingParams, Stats
from ngramspec.defaults import SPEC_LENGTH, SPEC_ROWS
from ngramspec.engine.acceptance import make_acceptance
from ngramspec.outputs import KEPT
from ngramspec.papers.count_drafter import Counts
from ngramspec.papers.registry import make_drafter
from ngramspec.speculative.datastore_drafter import DatastoreDrafter
from ngramspec.speculative.drafter import CanDraw, Drafter, DraftOptions, Speculator
from ngramspec.speculative.proposer import TreeProposer
from ngramspec.speculative.single import SingleDrafter

Cell = dict[str, Any]
Make = Callable[[], Speculator]

OFF, MERGED, NO_STORE, PREDICTED = "off", "merged", "merged, no datastore", "merged, prediction"
TABLES, LOOKUP, STORE = "n-gram tables", "prompt lookup", "datastore"
REJECTION = ", rejection"
TEXTS = "texts"
# Costs of a row, as shares of a pass, that the merged drafts are told for the frontier.
SLOPES = (0.32, 0.08, 0.02, 0.005, 0.00125)
CURVES = {f"merged, a row costs {slope:g}": slope for slope in SLOPES}
LOOKED_UP = 10
MAX_SEQS = 12
CURVE_ROUNDS = 2
# The most prompts of a category, for what is slow.
ROUNDS = {"hf-assisted": 1, "layers": CURVE_ROUNDS}
# The drafters of `benchmarks.replay` that the report names.
REPLAYED = ("pld-hf", "ngram-vllm", "arctic", "arctic-tree-f4", "arctic-tree-f4+cache", "rest-16", "rest-32")
# The share of the time that is for measuring by the clock.
SHARE = 0.8


class Bench:
    """What the blocks of a report share: an engine, the settings that a cell depends on, the drafters' names and the peers."""

    def __init__(self, engine: Engine, settings: dict[str, Any], drafters: Sequence[str], peers: dict[str, Callable[[], Peer]]) -> None:
        """Make the drafters of these names (`ngramspec.papers.registry`); `absent` gets those that cannot be made or used, with why."""
        self.engine, self.settings, self.absent = engine, settings, dict[str, str]()
        self.default = engine.speculator
        self.prices = engine.cost.table / engine.cost.table[1]
        self.drafters: dict[str, Callable[[], Drafter]] = {}
        self._peers, self._running = peers, dict[str, Contender]()
        self.warm: set[str] = set()
        """Contenders that have run in this process."""
        for name in drafters:
            try:
                engine.use(speculator=self._make_single(make_drafter(name)))
                self.drafters[name] = partial(make_drafter, name)
            except (ValueError, OSError, ngramspec.NgramspecError) as error:
                self.absent[name] = str(error)

    def close(self) -> None:
        for peer in self._running.values():
            peer.close()

    def make_params(self, temperature: float, **more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=self.settings["max_tokens"], temperature=temperature, seed=self.settings["seed"], **more)

    def make_key(self, category: Category, temperature: float, contender: str) -> dict[str, Any]:
        """Return all that a cell depends on."""
        asked = common.hash_outputs(prompt.ids for prompt in category.prompts)
        return {**self.settings, "category": category.name, "asked": asked, "temperature": temperature, "contender": contender}

    def list_speculators(self, category: Category) -> dict[str, Make]:
        """Return all drafters together, with and without the category's datastore, and each alone."""
        store, V = category.store, self.engine.vocab_size

        def make_merged(*, stored: bool = True, use_syntax: bool = True, **options: Any) -> TreeProposer:
            similar = DatastoreDrafter({"store": store}, MAX_SEQS) if store is not None and stored else None
            if similar is not None:
                similar.wait_until_loaded()
            syntax = self.engine.syntax if use_syntax else None
            return TreeProposer(DraftOptions(vocab_size=V, max_seqs=MAX_SEQS, **options), datastore=similar, syntax=syntax)

        found: dict[str, Make] = {
            MERGED: make_merged,
            TABLES: partial(make_merged, stored=False, use_syntax=False, answers=0, recycle=False),
            LOOKUP: partial(FixedLength, LOOKED_UP, vocab_size=V, max_seqs=MAX_SEQS),
        }
        if store is not None:
            found[STORE] = partial(make_merged, use_ngram=False, use_syntax=False, answers=0, recycle=False)
            found[NO_STORE] = partial(make_merged, stored=False)
        return found | {name: lambda make=make: self._make_single(make()) for name, make in self.drafters.items()}  # type: ignore[misc]

    def list_contenders(self, category: Category, temperature: float) -> dict[str, Callable[[], Contender]]:
        """Return what makes each contender; speculation off is the first."""
        makes = self.list_speculators(category)

        def make_ours(make: Make, *, slope: float | None = None, rule: str = "walk", speculation: bool = True, **more: Any) -> Contender:
            cost = self.engine.cost if slope is None else FixedCost(slope, self.engine.cost.max_rows)
            parts = {"speculator": make(), "cost": CountedCost(cost, self.prices), "acceptance": make_acceptance(rule)}
            return OurEngine(self.engine, self.make_params(temperature), speculation, **parts, **more)

        found: dict[str, Callable[[], Contender]] = {OFF: partial(make_ours, lambda: self.default, speculation=False)}
        found |= {name: partial(make_ours, make) for name, make in makes.items()}
        if len(category.predictions) == len(category.prompts):
            found[PREDICTED] = partial(make_ours, makes[MERGED], predictions=category.predictions)
        for name, make in self.drafters.items() if temperature > 0 else ():
            if isinstance(make(), CanDraw):
                drawing = lambda make=make: self._make_single(make(), draws=True)  # noqa: E731
                found[name + REJECTION] = partial(make_ours, drawing, rule="rejection")
        if temperature == 0:
            found |= {name: partial(make_ours, makes[MERGED], slope=slope) for name, slope in CURVES.items()}
            found |= {name: partial(self._start_peer, name) for name in self._peers}
        return found

    def _make_single(self, drafter: Drafter, draws: bool = False) -> SingleDrafter:
        return SingleDrafter(drafter, vocab_size=self.engine.vocab_size, spec_length=SPEC_LENGTH, spec_rows=SPEC_ROWS, draws=draws)

    def _start_peer(self, name: str) -> Contender:
        """Return a peer's process, which is started when it is first wanted. Raises PeerAbsentError."""
        if name not in self._running:
            print_progress(f"starting {name}")
            self._running[name] = self._peers[name]()
        return self._running[name]

    def open(self, makes: dict[str, Callable[[], Contender]]) -> dict[str, Contender]:
        """Open the contenders that can be; keep why the others cannot."""
        found = {}
        for name, make in makes.items():
            try:
                found[name] = make()
            except PeerAbsentError as error:
                print_progress(f"{name} is absent: {error}")
                self.absent[name] = str(error)
        return found


def rounds_of(name: str) -> int:
    """Return prompts of a category that a contender takes part in."""
    return CURVE_ROUNDS if name in CURVES else ROUNDS.get(name.removesuffix(REJECTION).partition(":")[0], sys.maxsize)


def measure(bench: Bench, state: ResultLog, categories: Sequence[Category], temperatures: Sequence[float], started: float) -> list[Cell]:
    """Return every cell; measure those that are missing. `started`: when the time began, by `time.perf_counter`."""
    cells, blocks = list[Cell](), []
    for temperature, category in itertools.product(temperatures, categories):
        makes = bench.list_contenders(category, temperature)
        known = {name: cell for name in makes if (cell := state.get(bench.make_key(category, temperature, name))) is not None}
        cells += known.values()
        blocks.append((category, temperature, {name: make for name, make in makes.items() if name == OFF or name not in known}))
    bench.open({name: make for _, _, makes in blocks for name, make in makes.items() if name in NAMES})
    left = SHARE * 60 * bench.settings["minutes"] - sum(cell["wall_s"] for cell in cells)
    print_progress(f"{len(cells)} cells are known, the others are measured in {max(left, 0) / 60:.0f} minutes")
    for i, (category, temperature, makes) in enumerate(blocks):
        missing = {name: make for name, make in makes.items() if name not in bench.absent}
        if len(missing) < 2:
            continue
        now_left = left - (time.perf_counter() - started)
        print_progress(f"{i + 1}/{len(blocks)} {category.name} at {temperature:g}, about {max(now_left, 0) / 60:.0f} minutes left")
        share = len(missing) / sum(len(some) for _, _, some in blocks[i:] if len(some) > 1)
        for cell in measure_block(bench, category, temperature, missing, now_left * share):
            key = bench.make_key(category, temperature, cell["contender"])
            if state.get(key) is None:
                state.add(cell | {"key": key})
                cells.append(cell)
    return cells


def measure_block(
    bench: Bench, category: Category, temperature: float, makes: dict[str, Callable[[], Contender]], budget_s: float
) -> Iterator[Cell]:
    """Run prompts in turns until the time is over, at least one of them. A contender that fails leaves no cell."""
    cold = {name: make for name, make in makes.items() if name not in bench.warm and rounds_of(name) > CURVE_ROUNDS}
    decode.warm_up(bench.open(cold), bench.absent, [category.prompts[0].ids[:64]])
    bench.warm |= set(cold)
    contenders = bench.open({name: make for name, make in makes.items() if name not in bench.absent})
    rounds = {name: rounds_of(name) for name in contenders}
    runs = decode.compare(contenders, bench.absent, category.prompts, 1, rounds=rounds, budget_s=budget_s)
    for name, some in runs.items():
        cell = {"category": category.name, "temperature": temperature} | cell_of(name, some, runs[OFF])
        if name == MERGED and isinstance(ours := contenders[name], OurEngine):
            cell["reliability"] = [list(astuple(row)) for row in ours.parts["speculator"].list_reliability() if row.nodes]
        yield cell


def cell_of(name: str, runs: list[TimedRun], off: list[TimedRun]) -> Cell:
    """Return by prompt: tokens, seconds, passes and their cost, drafted nodes, and seconds and tokens of speculation off; by depth over
    all."""
    off, stats = off[: len(runs)], Stats.sum(run.stats for run in runs)
    return {
        "contender": name,
        "tokens": [run.n_tokens for run in runs],
        "seconds": [round(run.seconds, 5) for run in runs],
        "off_tokens": [run.n_tokens for run in off],
        "off_seconds": [round(run.seconds, 5) for run in off],
        "passes": [run.stats.passes for run in runs],
        "drafted": [run.stats.drafted for run in runs],
        "plain_passes": [round(run.plain_passes, 3) for run in runs],
        "drafted_by_depth": stats.drafted_by_depth,
        "accepted_by_depth": stats.accepted_by_depth,
        "same": None if name.endswith(REJECTION) else [a.outputs == b.outputs for a, b in zip(runs, off, strict=True)],
        "wall_s": round(sum(run.wall_s for run in runs), 3),
        **({"outputs": [run.outputs[0] for run in runs]} if name == OFF else {}),
    }


# ---- without the model: drafts followed along texts that it wrote


def follow_texts(bench: Bench, state: ResultLog, categories: Sequence[Category], temperatures: Sequence[float]) -> list[dict[str, Any]]:
    """Return the same comparison on more texts than the clock has time for: one row per category, temperature and drafter.

    The engine writes every prompt's text, many at once, and they are kept in the state. Then drafters alone and all together follow it as
    the walk would, and pay for each pass what the engine has measured. That counts passes and rows, not what drafting takes; and the
    model's own candidates are known after accepted tokens only, so all drafters together gain less by them than in the engine.
    """
    rows = []
    for temperature, category in itertools.product(temperatures, categories):
        traces = [_trace(text) for text in _write_texts(bench, state, category, temperature) if len(text["output"]) > 1]
        for name, make in bench.list_speculators(category).items() if traces else ():
            if name in (MERGED, TABLES, LOOKUP, STORE) or (name in bench.drafters and isinstance(bench.drafters[name](), Counts)):
                print_progress(f"following {len(traces)} texts: {category.name} at {temperature:g}, {name}")
                drafts = make()
                drafts.bind(bench.engine.runner)
                follower = replayed.ReplayedProposer(drafts, bench.prices, tuple(bench.engine.eos_token_ids), params=bench.make_params(0))
                found = replayed.replay(follower, traces)
                row = {"category": category.name, "temperature": temperature, "contender": name, "prompts": len(traces)}
                row |= {key: found[key] for key in ("tokens_per_pass", "rows_per_pass")}
                rows.append(row | {"speed": round(sum(len(trace.output) for trace in traces) / follower.paid, 4)})
    return rows


def _write_texts(bench: Bench, state: ResultLog, category: Category, temperature: float) -> list[dict[str, Any]]:
    """Return what the model writes for every prompt of a category that is followed, and its own candidates at each token."""
    key = bench.make_key(category, temperature, TEXTS) | {"followed": common.hash_outputs(prompt.ids for prompt in category.followed)}
    if state.get(key) is None:
        print_progress(f"writing {len(category.followed)} texts: {category.name} at {temperature:g}")
        bench.engine.use(speculator=bench.default, cost=bench.engine.cost, acceptance=make_acceptance())
        done = bench.engine.complete([prompt.ids for prompt in category.followed], bench.make_params(temperature, logprobs=KEPT))
        texts = [{"prompt": each.prompt_token_ids, "output": each.token_ids, **common.get_candidates(each)} for each in done]
        state.add({"key": key, "contender": TEXTS, "texts": texts})
    return state.get(key)["texts"]


def _trace(text: dict[str, Any]) -> RecordedText:
    """Return a trace in which the pass that ends the prompt gives the first token, without a draft."""
    top = np.array(text["top_ids"][1:], np.int64), np.array(text["top_logprobs"][1:], np.float32)
    return RecordedText([*text["prompt"], text["output"][0]], text["output"][1:], top=top)


def replay_peers(cells: Iterable[Cell], categories: Sequence[Category], folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return tokens per pass of drafters that have no engine here, on the texts that the model wrote at temperature 0; and who is
    absent."""
    rows, absent = list[dict[str, Any]](), dict[str, str]()
    kinds = {category.name: category for category in categories}
    for cell in (cell for cell in cells if cell["contender"] == OFF and cell["temperature"] == 0):
        category = kinds[cell["category"]]
        texts = zip(category.prompts, cell["outputs"], strict=False)
        traces = [RecordedText([*prompt.ids, output[0]], output[1:]) for prompt, output in texts if len(output) > 1]
        found, missing = make_peers([category.store] if category.store is not None else [], folder)
        absent |= {name: why for name, why in missing.items() if name in REPLAYED and traces}
        for name in (name for name in REPLAYED if name in found and traces):
            print_progress(f"replaying {category.name}: {name}")
            drafter = found[name]()
            result, n = replayed.replay(drafter, traces), sum(len(trace.output) for trace in traces)
            drafting = n / result["tokens_per_pass"]
            passes = drafting + len(traces)  # those that end the prompts among them
            row = {"category": category.name, "drafter": name, "datastore": isinstance(drafter, replayed.Rest), "prompts": len(traces)}
            row["tokens_per_pass"] = round((n + len(traces)) / passes, 3)
            rows.append(row | {"rows_per_pass": round(result["rows_per_pass"] * drafting / passes, 3)})
    return rows, absent

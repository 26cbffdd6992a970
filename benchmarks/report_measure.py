"""The measuring of `benchmarks.report`: every contender on the same prompts in turns, block by block, each kept as soon as it is done.

A block is one category at one temperature. Its contenders begin it knowing nothing, and take each prompt in turns, speculation off among
them; so a block is measured as a whole, and what stops in the middle of one begins it anew. A cell is what one contender did in a block;
cells enter and leave as JSON. Knows the engine's core, whose proposer, cost and acceptance it sets between runs; reads no results.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import ngramspec
from benchmarks import common
from benchmarks.ours import CountedCost, FixedCost, FixedLength, Ours
from benchmarks.peers import Contender, Peer, PeerAbsentError, Run
from benchmarks.replay import Rest, Trace, replay
from benchmarks.replay import peers as replayed_peers
from benchmarks.report_data import Category
from ngramspec import Engine, SamplingParams, Stats
from ngramspec.core.step import Acceptance
from ngramspec.drafters.names import make_drafter
from ngramspec.drafting.base import CanDraw, Drafter
from ngramspec.drafting.proposer import SPEC_LENGTH, SPEC_ROWS, Proposer
from ngramspec.drafting.single import SingleDrafter
from ngramspec.drafting.suffix import SuffixDrafter

Cell = dict[str, Any]

OFF, MERGED, NO_STORE, PREDICTED = "off", "merged", "merged, no datastore", "merged, prediction"
TABLES, LOOKUP, STORE = "n-gram tables", "prompt lookup", "datastore"
REJECTION = ", rejection"
SLOPES = (0.32, 0.08, 0.02, 0.005, 0.00125)
"""Costs of a row, as shares of a pass, that the merged drafts are told for the frontier."""
LOOKED_UP = 10
MAX_SEQS = 12
CURVE_ROUNDS = 2
ROUNDS = {"hf-assisted": 1, "layers": CURVE_ROUNDS}
"""At most so many prompts of a category, for what is slow."""
REPLAYED = ("pld-hf", "ngram-vllm", "arctic", "arctic-tree-f4", "arctic-tree-f4+cache", "rest-16", "rest-32")
"""Of `benchmarks.replay`'s drafters, those that the report names."""
SHARE = 0.8
"""Of the time that there is, what is for measuring by the clock."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a cell depends on, beside its contender, category and temperature."""

    model: str
    dtype: str
    device: str
    threads: int
    max_tokens: int
    max_prompt: int
    prompts: int
    minutes: float
    seed: int
    package: str
    code: str = field(default_factory=lambda: code_digest())


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender of a block."""

    name: str
    open: Callable[[], Contender]
    rounds: int = sys.maxsize
    """It takes part in so many prompts."""
    exact: bool = True
    """Its text is to be compared with that of speculation off."""


class Chosen(Ours):
    """The engine with a proposer, a cost and a way to accept of its own."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        proposer: Proposer | SingleDrafter,
        prices: np.ndarray,
        *,
        speculation: bool = True,
        slope: float | None = None,
        rejection: bool = False,
        predictions: dict[tuple[int, ...], list[int]] | None = None,
    ) -> None:
        """`prices`: of `CountedCost`. `slope`: what drafts are told a row costs; None: what was measured."""
        super().__init__(engine, params, speculation, proposer)
        self.cost = CountedCost(engine.cost if slope is None else FixedCost(slope, engine.cost.max_rows), prices)
        self.acceptance, self.predictions = Acceptance(rejection), predictions or {}

    def complete(self, prompts: list[list[int]], **hints: Any) -> Run:
        def choose() -> None:
            self.engine.core.cost, self.engine.core.acceptance = self.cost, self.acceptance

        self.engine._call(choose)
        prediction, before = self.predictions.get(tuple(prompts[0])), self.cost.paid
        run = super().complete(prompts, **hints, **({} if prediction is None else {"prediction": prediction}))
        run.plain_passes = 1 + self.cost.paid - before
        return run


class State:
    """The cells that are measured, in a file that each is appended to."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self.path, self.cells = path, dict[str, Cell]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
        for line in whole.splitlines():
            cell = json.loads(line)
            self.cells[_name(cell["key"])] = cell
        path.write_bytes(whole + b"\n" if whole else b"")  # a line that was not finished goes

    def get(self, key: dict[str, Any]) -> Cell | None:
        return self.cells.get(_name(key))

    def add(self, cells: Iterable[Cell]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for cell in cells:
                self.cells[_name(cell["key"])] = cell
                file.write(json.dumps(cell) + "\n")


def _name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def code_digest() -> str:
    """Names the code that is measured: the package's files, the datastore's among them, but for the CUDA path and the server."""
    digest = hashlib.sha256()
    for package in ("ngramspec", "ngramspec.datastore"):
        root = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted((*root.rglob("*.py"), *root.rglob("*.npz"))):
            if not {"cuda", "server"} & set(path.relative_to(root).parts):
                digest.update(path.read_bytes())
    return f"{ngramspec.__version__}-{digest.hexdigest()[:12]}"


class Bench:
    """What the blocks of a report share: an engine, the drafters' names and the peers."""

    def __init__(self, engine: Engine, plan: Plan, drafters: Sequence[str], peers: dict[str, Callable[[], Peer]]) -> None:
        """`drafters`: as `ngramspec.drafters` names them; one that cannot be made or used here goes to `absent` with the reason."""
        self.engine, self.plan, self.absent = engine, plan, dict[str, str]()
        self.default = engine.core.proposer
        self.prices = engine.cost.table / engine.cost.table[1]
        self.drafters: dict[str, Callable[[], Drafter]] = {}
        self._peers, self._running = peers, dict[str, Peer]()
        self.warm: set[str] = set()
        """Contenders that have run in this process."""
        for name in drafters:
            try:
                drafter = make_drafter(name)
                engine._call(lambda drafter=drafter: engine.core.use(self._alone(drafter)))
            except (ValueError, OSError, ngramspec.NgramspecError) as error:
                self.absent[name] = str(error)
            else:
                self.drafters[name] = lambda name=name: make_drafter(name)

    def close(self) -> None:
        for peer in self._running.values():
            peer.close()

    @property
    def versions(self) -> dict[str, str]:
        return {name: peer.version for name, peer in self._running.items()}

    def params(self, temperature: float, **more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=self.plan.max_tokens, temperature=temperature, seed=self.plan.seed, **more)

    def proposers(self, category: Category) -> dict[str, Callable[[], Proposer | SingleDrafter]]:
        """All drafters together, with and without the category's datastore, and each alone."""
        store, V = category.store, self.engine.vocab_size

        def merged(*, stored: bool = True, **options: Any) -> Proposer:
            similar = SuffixDrafter({"store": store}, MAX_SEQS) if store is not None and stored else None
            return Proposer(vocab_size=V, max_seqs=MAX_SEQS, datastore=similar, **options)

        found: dict[str, Callable[[], Proposer | SingleDrafter]] = {
            MERGED: merged,
            TABLES: lambda: merged(stored=False, answers=0, recycle=False),
            LOOKUP: lambda: FixedLength(LOOKED_UP, vocab_size=V, max_seqs=MAX_SEQS),
        }
        if store is not None:
            found[STORE] = lambda: merged(use_ngram=False, answers=0, recycle=False)
            found[NO_STORE] = lambda: merged(stored=False)
        return found | {name: lambda make=make: self._alone(make()) for name, make in self.drafters.items()}  # type: ignore[misc]

    def entries(self, category: Category, temperature: float) -> list[Entry]:
        """Speculation off is the first."""
        params, proposers = self.params(temperature), self.proposers(category)

        def ours(proposer: Callable[[], Proposer | SingleDrafter], **options: Any) -> Callable[[], Contender]:
            return lambda: Chosen(self.engine, params, proposer(), self.prices, **options)

        entries = [Entry(OFF, ours(lambda: self.default, speculation=False))]
        entries += [Entry(name, ours(make), rounds_of(name)) for name, make in proposers.items()]
        if len(category.predictions) == len(category.prompts):
            entries.append(Entry(PREDICTED, ours(proposers[MERGED], predictions=category.predictions)))
        for name, make in self.drafters.items() if temperature > 0 else ():
            if isinstance(make(), CanDraw):
                draw = ours(lambda make=make: self._alone(make(), draws=True), rejection=True)
                entries.append(Entry(name + REJECTION, draw, rounds_of(name), exact=False))
        if temperature == 0:
            entries += [Entry(curve_name(slope), ours(proposers[MERGED], slope=slope), CURVE_ROUNDS) for slope in SLOPES]
            entries += [Entry(name, lambda name=name: self._running[name], rounds_of(name)) for name in self._peers]
        return entries

    def _alone(self, drafter: Drafter, draws: bool = False) -> SingleDrafter:
        return SingleDrafter(drafter, vocab_size=self.engine.vocab_size, spec_length=SPEC_LENGTH, spec_rows=SPEC_ROWS, draws=draws)

    def start(self, names: set[str]) -> None:
        """Start the peers among these; the reason of one that cannot is kept."""
        for name in self._peers:
            if name in names:
                say(f"starting {name}")
                with _may_fail(self, name):
                    self._running[name] = self._peers[name]()


def rounds_of(name: str) -> int:
    return ROUNDS.get(name.partition(":")[0], sys.maxsize)


def curve_name(slope: float) -> str:
    return f"merged, a row costs {slope:g}"


def measure(bench: Bench, state: State, categories: Sequence[Category], temperatures: Sequence[float], started: float) -> list[Cell]:
    """Every cell, those that are missing measured now. `started`: when the time began, by `time.perf_counter`."""
    cells, gaps = list[Cell](), []
    for temperature in temperatures:
        for category in categories:
            entries = bench.entries(category, temperature)
            keys = {entry.name: key_of(bench.plan, category, temperature, entry.name) for entry in entries}
            cells += [cell for key in keys.values() if (cell := state.get(key)) is not None]
            missing = [entry for entry in entries[1:] if state.get(keys[entry.name]) is None]
            gaps.append((category, temperature, entries[0], missing, keys))
    bench.start({entry.name for _, _, _, missing, _ in gaps for entry in missing})
    blocks = []
    for category, temperature, off, missing, keys in gaps:
        if present := [entry for entry in missing if entry.name not in bench.absent]:
            blocks.append((category, temperature, [off, *present], keys))
    spent = sum(cell["wall_s"] for cell in cells)
    left = SHARE * 60 * bench.plan.minutes - spent
    say(f"{len(cells)} cells are known, {len(blocks)} blocks are to be measured in {max(left, 0) / 60:.0f} minutes")
    for i, (category, temperature, entries, keys) in enumerate(blocks):
        now_left = left - (time.perf_counter() - started)
        share = len(entries) / sum(len(some) for _, _, some, _ in blocks[i:])

        def tell(text: str, where: str = f"{i + 1}/{len(blocks)} {category.name} at {temperature:g}") -> None:
            say(f"{where}: {text}, about {max(left - (time.perf_counter() - started), 0) / 60:.0f} minutes left")

        new = [
            cell | {"key": keys[cell["contender"]]} for cell in measure_block(bench, category, temperature, entries, now_left * share, tell)
        ]
        new = [cell for cell in new if state.get(cell["key"]) is None]
        state.add(new)
        cells += new
    return cells


def key_of(plan: Plan, category: Category, temperature: float, contender: str) -> dict[str, Any]:
    asked = common.digest(prompt.ids for prompt in category.prompts)
    settings = {name: getattr(plan, name) for name in plan.__slots__}
    return {**settings, "category": category.name, "asked": asked, "temperature": temperature, "contender": contender}


def measure_block(
    bench: Bench, category: Category, temperature: float, entries: Sequence[Entry], budget_s: float, tell: Callable[[str], None]
) -> list[Cell]:
    """Prompts in turns until the time is over, at least one of them. A contender that fails leaves no cell."""
    contenders: dict[str, Contender] = {}
    for entry in entries:
        with _may_fail(bench, entry.name):
            if entry.rounds > CURVE_ROUNDS and entry.name not in bench.warm:  # what is made at the first call
                entry.open().complete([category.prompts[0].ids[:64][::-1]])
                bench.warm.add(entry.name)
            contenders[entry.name] = entry.open()
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    walls = dict.fromkeys(contenders, 0.0)
    start = time.perf_counter()
    for n, prompt in enumerate(category.prompts):
        round_start = time.perf_counter()
        taking = [entry.name for entry in entries if entry.name in contenders and n < entry.rounds]
        for name in taking[n % len(taking) :] + taking[: n % len(taking)]:
            before = time.perf_counter()
            with _may_fail(bench, name):
                runs[name].append(contenders[name].complete([prompt.ids]))
                _check(contenders[name])
            if name in bench.absent:
                del contenders[name], runs[name]
            walls[name] += time.perf_counter() - before
        tell(f"prompt {n + 1}")
        now = time.perf_counter()
        if now - start + (now - round_start) / 2 > budget_s:
            break
    exact = {entry.name: entry.exact for entry in entries}
    asked = {"category": category.name, "temperature": temperature}
    return [asked | cell_of(name, some, runs[OFF], exact[name]) | {"wall_s": round(walls[name], 3)} for name, some in runs.items()]


class _FailedError(Exception):
    """A drafter raised, and drafts no more."""


def _check(contender: Contender) -> None:
    if isinstance(contender, Chosen) and isinstance(contender.proposer, SingleDrafter) and contender.proposer.drafter is None:
        raise _FailedError("it failed, as the log says")


@contextlib.contextmanager
def _may_fail(bench: Bench, name: str) -> Iterator[None]:
    try:
        yield
    except (PeerAbsentError, _FailedError) as error:
        if name not in bench.absent:
            say(f"{name} is absent: {error}")
        bench.absent[name] = str(error)


def cell_of(name: str, runs: list[Run], off: list[Run], exact: bool) -> Cell:
    """Per prompt: tokens, seconds, passes and their cost, drafted nodes, and seconds and tokens of speculation off; by depth over all."""
    off = off[: len(runs)]
    total = Stats()
    for run in runs:
        total.add(run.stats)
    return {
        "contender": name,
        "tokens": [run.n_tokens for run in runs],
        "seconds": [round(run.seconds, 5) for run in runs],
        "off_tokens": [run.n_tokens for run in off],
        "off_seconds": [round(run.seconds, 5) for run in off],
        "passes": [run.stats.passes for run in runs],
        "drafted": [run.stats.drafted for run in runs],
        "plain_passes": [round(run.plain_passes, 3) for run in runs],
        "drafted_by_depth": total.drafted_by_depth,
        "accepted_by_depth": total.accepted_by_depth,
        "same": [a.outputs == b.outputs for a, b in zip(runs, off, strict=True)] if exact else None,
        **({"outputs": [run.outputs[0] for run in runs]} if name == OFF else {}),
    }


def replayed(cells: Sequence[Cell], categories: Sequence[Category], folder: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Tokens per pass of drafters that have no engine here, on the texts that the model wrote at temperature 0; and who is absent.

    As in the engine, the pass that ends the prompt gives the first token and has no draft.
    """
    rows, absent = list[dict[str, Any]](), dict[str, str]()
    for cell in cells:
        if cell["contender"] != OFF or cell["temperature"] > 0:
            continue
        category = next(c for c in categories if c.name == cell["category"])
        texts = list(zip(category.prompts, cell["outputs"], strict=False))
        traces = [Trace([*prompt.ids, output[0]], output[1:]) for prompt, output in texts if len(output) > 1]
        if not traces:
            continue
        stores = [category.store] if category.store is not None else []
        found, missing = replayed_peers(stores, folder)
        absent |= {name: why for name, why in missing.items() if name in REPLAYED}
        for name in (name for name in REPLAYED if name in found):
            say(f"replaying {category.name}: {name}")
            drafter = found[name]()
            result, n = replay(drafter, traces), sum(len(trace.output) for trace in traces)
            drafting = n / result["tokens_per_pass"]
            rows.append(
                {
                    "category": category.name,
                    "drafter": name,
                    "datastore": isinstance(drafter, Rest),
                    "prompts": len(traces),
                    "tokens_per_pass": round((n + len(traces)) / (drafting + len(traces)), 3),
                    "rows_per_pass": round(result["rows_per_pass"] * drafting / (drafting + len(traces)), 3),
                }
            )
    return rows, absent


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)

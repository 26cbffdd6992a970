"""The engine as a contender, with drafts, a cost and a way to accept of the benchmark's choice.

Token ids enter, a `TimedRun` or logits leave. Sets the engine's parts between runs, when none of its requests is under way. Knows the files
that its model comes from.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit

from benchmarks.peers import PeerAbsentError, TimedRun
from ngramspec import Engine, SamplingParams
from ngramspec.backends.base import Runner
from ngramspec.models.smollm2 import smollm2_gguf
from ngramspec.outputs import DraftTree
from ngramspec.sampling.batch import Span
from ngramspec.speculative.budget.cost_model import CostModel, Load
from ngramspec.speculative.drafter import DRAFT_DEFAULTS, DraftOptions, DraftParams, PassTopK
from ngramspec.speculative.ngram_table import LADDER, REACH
from ngramspec.speculative.proposer import TreeProposer
from ngramspec.speculative.single import SingleDrafter


class FixedCost(CostModel):
    """A cost model that is given, whatever a step takes."""

    def __init__(self, slope: float, max_rows: int) -> None:
        super().__init__([1, max_rows], [1.0, 1.0 + slope * (max_rows - 1)], max_rows)

    def observe(self, load: Load, ms: float) -> None:
        pass


class CountedCost(CostModel):
    """A cost model that also adds up what steps without a part of a prompt cost at set prices, the same whatever disturbs them."""

    def __init__(self, cost: CostModel, prices: np.ndarray) -> None:
        """Wrap a cost model. `prices` [R+1] float64: what a pass with T rows costs, at index T."""
        self.cost, self.prices, self.paid = cost, prices, 0.0
        self.counts, self.max_rows = cost.counts, cost.max_rows

    @property
    def table(self) -> np.ndarray:
        return self.cost.table

    def get_curve(self, load: Load) -> np.ndarray:
        return self.cost.get_curve(load)

    def predict(self, load: Load) -> float:
        return self.cost.predict(load)

    def observe(self, load: Load, ms: float) -> None:
        self.paid += float(self.prices[load.rows])
        self.cost.observe(load, ms)


class OurEngine:
    """The engine, with or without speculation; nothing that it computed for one run helps another."""

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams | Callable[[list[int]], SamplingParams],
        speculation: bool = True,
        *,
        predictions: Mapping[tuple[int, ...], list[int]] | None = None,
        **parts: Any,
    ) -> None:
        """Set how prompts are completed. `params`: of every prompt, or by prompt; `predictions`: expected outputs by prompt; `parts`: as
        `Engine.use` takes them, by default the drafts that the engine has now."""
        self.engine, self.speculation, self.predictions = engine, speculation, predictions or {}
        self.params = (lambda _: params) if isinstance(params, SamplingParams) else params
        self.parts = {"speculator": engine.speculator} | parts

    def complete(self, prompts: list[list[int]]) -> TimedRun:
        """Raises PeerAbsentError if a drafter that drafts alone has been switched off."""
        self.engine.use(**self.parts)
        cost = self.parts.get("cost")
        paid, start = cost.paid if isinstance(cost, CountedCost) else 0.0, time.perf_counter()
        requests = []
        for ids in prompts:
            hints = {"prediction": self.predictions[tuple(ids)]} if tuple(ids) in self.predictions else {}
            requests.append(self.engine.submit(ids, self.params(ids), speculation=self.speculation, prefix_cache=False, **hints))
        completions = [request.result() for request in requests]
        run = TimedRun([done.token_ids for done in completions], time.perf_counter() - start)
        run.prompt_s = max((done.ttft_s for done in completions), default=0.0)
        for done in completions:
            run.stats.add(done.stats)
        if isinstance(self.parts["speculator"], SingleDrafter) and self.parts["speculator"].drafter is None:
            raise PeerAbsentError("it failed, as the log says")
        run.plain_passes = 1 + cost.paid - paid if isinstance(cost, CountedCost) else 0.0
        return run

    def close(self) -> None:
        """Do nothing: the code that opened the engine closes it."""


@njit(cache=True, nogil=True)
def make_chain(text, length):
    """Continue a text [n] int32 as its longest earlier context was most often, then last, continued, token by token.

    Return [k] int32, k <= length. As the n-gram tables see the text: contexts of LADDER's lengths, of each its last REACH occurrences.
    """
    n = len(text)
    text = np.append(text, np.zeros(length, np.int32))
    tokens, counts = np.zeros(REACH, np.int32), np.zeros(REACH, np.int64)
    for end in range(n, n + length):
        best, seen, kinds = 0, 0, 0
        for at in range(n - 1, 0, -1):  # the token at `at` followed its context
            same = 0
            while same < min(at, LADDER[-1]) and text[at - 1 - same] == text[end - 1 - same]:
                same += 1
            level = 0
            while level < len(LADDER) and LADDER[level] <= same:
                level += 1
            if level > best:
                best, seen, kinds = level, 0, 0
            if level and level == best and seen < REACH:
                seen += 1
                k = 0
                while k < kinds and tokens[k] != text[at]:
                    k += 1
                if k == kinds:
                    tokens[k], counts[k], kinds = text[at], 0, kinds + 1
                counts[k] += 1
        if best == 0:
            return text[n:end]
        text[end] = tokens[np.argmax(counts[:kinds])]  # of several the first, which is the latest
    return text[n:]


def make_fresh_drafts(engine: Engine, max_seqs: int) -> TreeProposer:
    """Return drafts for an engine that have learned nothing from earlier requests."""
    return TreeProposer(DraftOptions(vocab_size=engine.vocab_size, max_seqs=max_seqs), syntax=engine.syntax)


class FixedLength(TreeProposer):
    """Drafts as the engine's peers make them: a chain of as many tokens as asked for, wherever the text itself knows how to go on."""

    def __init__(self, length: int, *, vocab_size: int, max_seqs: int) -> None:
        options = DraftOptions(vocab_size=vocab_size, max_seqs=max_seqs, spec_length=length, spec_rows=length, answers=0, recycle=False)
        super().__init__(options)
        self.length, self.texts = length, dict[int, np.ndarray]()

    def begin(self, slot: int, tokens: np.ndarray, params: DraftParams = DRAFT_DEFAULTS) -> None:
        super().begin(slot, tokens, params)
        self.texts[slot] = tokens.astype(np.int32)

    def propose(
        self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int, threshold: float = 0.0
    ) -> list[DraftTree]:
        trees = []
        for slot, depth in zip(slots.tolist(), max_depth.tolist(), strict=True):
            tokens = make_chain(self.texts[slot][-self.history :], max(min(self.length, depth, max_nodes), 0))
            n = len(tokens)
            max_nodes -= n
            trees.append(DraftTree(tokens, np.arange(-1, n - 1, dtype=np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8)))
        return trees

    def observe(self, slots: np.ndarray, accepted: list[np.ndarray], paths: list[np.ndarray], seen: PassTopK | None = None) -> None:
        super().observe(slots, accepted, paths, seen)
        for slot, tokens in zip(slots.tolist(), accepted, strict=True):
            self.texts[slot] = np.concatenate([self.texts[slot], tokens])


def run_text(runner: Runner, ids: list[int], first: int, piece: int | None = None) -> Iterator[torch.Tensor]:
    """Yield logits after each token of a text from index `first` on, [n, V] float32, as they come from passes over `piece` tokens.

    `piece`: by default the most that a pass takes. What was yielded is overwritten by the next. The runner must not be in use by an engine.
    """
    tokens, piece = np.array(ids, np.int32), piece or runner.max_rows
    slot = runner.reserve_free_slot(len(tokens))
    try:
        for start in range(0, len(tokens), piece):
            end = min(start + piece, len(tokens))
            wanted = max(0, end - max(start, first))
            logits = runner.run([Span(slot, tokens[start:end], start, logits=wanted)])
            if wanted:
                yield logits
    finally:
        runner.pool.release(slot)


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Return what the engine is, for the JSON document."""
    props = engine.props()
    return {name: props.get(name) for name in ("exactness", "dtype", "precision")}


def find_gguf_files(model: str) -> list[Path]:
    """Return the GGUF files that a model comes from, all parts of one that is split, in order; none if it comes from others."""
    path = smollm2_gguf() if model == "smollm2" else Path(model).expanduser()
    if path.suffix.lower() != ".gguf":
        return []
    if match := re.fullmatch(r"(.*)-\d{5}-of-(\d{5})", path.stem):
        return sorted(path.parent.glob(f"{match[1]}-?????-of-{match[2]}{path.suffix}"))
    return [path]

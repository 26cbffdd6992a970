"""The engine as a contender: what decode measures of ours, with the drafts of its choice.

Token ids enter, a `Run` leaves. Knows the engine's core, whose proposer and cost it sets between runs.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.chain import chain
from benchmarks.peers import Run
from ngramspec import Engine, SamplingParams, Stats
from ngramspec.batch.cost import CostModel
from ngramspec.batch.types import DraftTree
from ngramspec.drafting.proposer import Proposer
from ngramspec.drafting.single import SingleDrafter


class FixedCost(CostModel):
    """A cost that is given, whatever a pass takes."""

    def __init__(self, slope: float, max_rows: int) -> None:
        super().__init__([1, max_rows], [1.0, 1.0 + slope * (max_rows - 1)], max_rows)

    def observe(self, rows: int, ms: float) -> None:
        pass


class CountedCost(CostModel):
    """A cost that also adds up what passes without a part of a prompt take at set prices, the same whatever disturbs them."""

    def __init__(self, cost: CostModel, prices: np.ndarray) -> None:
        """`prices` [R+1] float64, of a pass with T rows at index T."""
        self.cost, self.prices, self.paid = cost, prices, 0.0
        self.table, self.max_rows = cost.table, cost.max_rows

    def observe(self, rows: int, ms: float) -> None:
        self.paid += float(self.prices[rows])
        self.cost.observe(rows, ms)
        self.table = self.cost.table


class Ours:
    """The engine, with or without speculation; nothing that it computed for one run helps another."""

    def __init__(self, engine: Engine, params: SamplingParams, speculation: bool, proposer: Proposer | SingleDrafter | None = None) -> None:
        """`proposer`: drafts by this one, None: by the engine's own."""
        self.engine, self.params, self.speculation = engine, params, speculation
        self.proposer = proposer or engine.core.proposer

    def complete(self, prompts: list[list[int]], **hints: Any) -> Run:
        """`hints`: as `Engine.complete` takes them."""
        self.engine._call(lambda: self.engine.core.use(self.proposer))  # the engine is idle: all of its requests are ours
        start = time.perf_counter()
        completions = self.engine.complete(prompts, self.params, speculation=self.speculation, prefix_cache=False, **hints)
        seconds = time.perf_counter() - start
        stats = Stats()
        for completion in completions:
            stats.add(completion.stats)
        return Run([completion.token_ids for completion in completions], seconds, stats)

    def close(self) -> None:
        """The engine is closed by whoever opened it."""


class FixedLength(Proposer):
    """Drafts as the engine's peers make them: a chain of as many tokens as asked for, wherever the text's own tables know how to go on."""

    def __init__(self, length: int, *, vocab_size: int, max_seqs: int) -> None:
        super().__init__(vocab_size=vocab_size, max_seqs=max_seqs, spec_length=length, spec_rows=length, answers=0, recycle=False)
        self.length = length

    def propose(self, slots: np.ndarray, max_depth: np.ndarray, cost_ms: np.ndarray, base_rows: int, max_nodes: int) -> list[DraftTree]:
        trees = []
        for slot, depth in zip(slots.tolist(), max_depth.tolist(), strict=True):
            tokens = chain(self, slot, max(min(self.length, depth, max_nodes), 0))
            n = len(tokens)
            max_nodes -= n
            trees.append(DraftTree(tokens, np.arange(-1, n - 1, dtype=np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8)))
        return trees

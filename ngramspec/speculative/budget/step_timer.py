"""What steps cost and bring: asks the cost model and the price before a pass, and tells both what came of it when the step is over.

A step ends where the next begins, so that all of the host's work is in its time; one that is followed by idleness ends by itself. Knows the
clock, and of a step what it carries; no tokens, no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ngramspec.speculative.budget.cost_model import CostModel, Load
from ngramspec.speculative.budget.threshold import PredictedMs, SpeculationThreshold

LOOK = 128
"""Where drafts have displaced plain passes for so many passes, one is plain to see what it takes: the price is made of that. And where none
had drafts, because their rows are believed to be dear, one buys them at half the price to see whether that is so. At first earlier."""

TOGETHER, TOGETHER_MS = 8, 40.0
"""The curve and the price hear of so many steps together, or of so many milliseconds: behind a pass, which has filled the caches with
weights, what is done once takes five times as long as what is done again."""

STALL, STALLS = 6.0, 3
"""A step that took more than so many times what was foretold says nothing of the next: something was compiled, or the machine slept. So
many in a row do."""


class Plan(NamedTuple):
    """What a pass may spend on drafts."""

    cost_ms: np.ndarray
    """[R + 1] float64: milliseconds of the step with T rows at index T."""
    threshold: float
    """Tokens per millisecond."""


class Timing:
    def __init__(self, cost: CostModel, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: seconds."""
        self.cost, self.threshold, self._clock = cost, SpeculationThreshold(), clock
        self._started: float | None = None
        self._load = self._base = Load(0)
        self._has_prompt = self._speculates = False
        self._made = self._nodes = 0
        self._over: list[_Step] = []
        self._unheard_ms = 0.0
        self._n_stalls = 0
        self._since_plain, self._patience = 0, 8
        self._since_drafts, self._boldness = 0, 8

    def start(self) -> None:
        """A step begins."""
        self.finish()
        self._started, self._load = self._clock(), Load(0)

    def plan(self, rows: int, n_seqs: int, keys: int, looked: int, *, drafts: bool = True) -> Plan:
        """A draft is to be looked for, for `looked` of `n_seqs` sequences with `keys` tokens, in a pass with so many rows as yet. Not
        `drafts`: none is."""
        load = Load(rows, n_seqs, keys, looked)
        threshold = self.threshold.get_threshold(n_seqs, self.cost.predict(Load(n_seqs, n_seqs, keys)))
        if drafts and self._since_drafts >= self._boldness:
            self._boldness = min(2 * self._boldness, LOOK)
            self._since_drafts, threshold = 0, threshold / 2
        return Plan(self.cost.get_curve(load), threshold)

    @property
    def n_alike(self) -> int:
        """How many steps from this one on can be made by one plan, before one is to look at something."""
        return max(min(self._patience - self._since_plain, self._boldness - self._since_drafts), 1)

    def wants_plain(self) -> bool:
        """Whether this pass had better have no drafts, to see what it takes."""
        if self._since_plain < self._patience:
            return False
        self._patience = min(2 * self._patience, LOOK)
        return True

    def carries(self, rows: int, *, nodes: int, n_seqs: int, keys: int, looked: int, has_prompt: bool, speculates: bool) -> None:
        """The step's pass, as it is computed: `nodes` of its rows are drafts, and `n_seqs` sequences get tokens. `speculates`: for any of
        them drafts may be made."""
        self._load, self._base = Load(rows, n_seqs, keys, looked), Load(rows - nodes, n_seqs, keys)
        self._nodes, self._has_prompt, self._speculates, self._made = nodes, has_prompt, speculates, 0
        self._since_plain = 0 if nodes == 0 and not has_prompt else self._since_plain + 1
        self._since_drafts = 0 if nodes else self._since_drafts + 1

    def made_several(self, records: np.ndarray, n_seqs: int, *, speculates: bool) -> None:
        """Record several steps of so many sequences; records [n] STEP_RECORD, the last of a step that goes on until it is over."""
        assert self._started is not None
        ms = (self._clock() - self._started) * 1e3
        before = max(ms - float(records["step_ms"].sum()), 0.0)  # until the first of them began
        for i, (_, step_ms, rows, nodes, looked, made, keys) in enumerate(records.tolist(), 1):
            self.carries(rows, nodes=nodes, n_seqs=n_seqs, keys=keys, looked=looked, has_prompt=False, speculates=speculates)
            self.made(made)
            if i < len(records):
                self._took(step_ms + before)
                ms, before = ms - step_ms - before, 0.0
        self._started = self._clock() - ms / 1e3

    def made(self, n_tokens: int) -> None:
        """The step has made so many tokens."""
        self._made += n_tokens

    def finish(self) -> None:
        """The step is over."""
        if self._started is None:
            return
        ms = (self._clock() - self._started) * 1e3
        self._started = None
        if self._load.rows and self._load.n_seqs:
            self._took(ms)
        if len(self._over) >= TOGETHER or self._unheard_ms >= TOGETHER_MS:
            self.tell()

    def _took(self, ms: float) -> None:
        self._over.append(_Step(ms, self._load, self._base, self._nodes, self._made, self._has_prompt, self._speculates))
        self._unheard_ms += ms

    def tell(self) -> None:
        """Have what was learned of steps so far in the curve and the price."""
        for step in self._over:
            load, foretold_ms = step.load, self.cost.predict(step.load)
            if not step.has_prompt:
                self._n_stalls = self._n_stalls + 1 if step.ms > STALL * foretold_ms else 0
                if 0 < self._n_stalls < STALLS:
                    continue
            if step.speculates:
                plain = self.cost.predict(Load(load.n_seqs, load.n_seqs, load.keys))
                foretold = PredictedMs(foretold_ms, self.cost.predict(step.base), plain, step.nodes)
                self.threshold.record_step(load.n_seqs, step.made, step.ms, foretold, has_prompt=step.has_prompt)
            if not step.has_prompt:
                self.cost.observe(load, step.ms)
        self._over.clear()
        self._unheard_ms = 0.0


class _Step(NamedTuple):
    """What a step was."""

    ms: float
    load: Load
    base: Load
    """Without drafts."""
    nodes: int
    made: int
    has_prompt: bool
    speculates: bool

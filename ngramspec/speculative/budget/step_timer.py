"""Times steps: asks the cost model and the threshold before a pass, and gives both the step's time and tokens when it is over.

A step ends where the next begins, so that all of the host's work is in its time; before idleness `finish_step` ends it. Knows the clock and
the load of a step; no tokens, no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ngramspec.speculative.budget.cost_model import CostModel, Load
from ngramspec.speculative.budget.threshold import PredictedPass, SpeculationThreshold

# Passes. After so many drafted ones, one is made without drafts to re-measure the baseline that the threshold is computed from. After so
# many without drafts, one drafts at half the threshold, in case rows are believed too expensive. Both intervals begin at FIRST_INTERVAL and
# double.
PROBE_INTERVAL, FIRST_INTERVAL = 128, 8
# Steps, or their milliseconds, after which the cost model and the threshold are updated: a pass fills the caches with weights, after which
# code that runs once takes five times as long as code that runs again.
FLUSH_STEPS, FLUSH_MS = 8, 40.0
# A step that took STALL_RATIO times its predicted time is left out, since something was compiled or the machine slept; MAX_STALLS in a row
# are not.
STALL_RATIO, MAX_STALLS = 6.0, 3


class StepPlan(NamedTuple):
    """Costs and threshold for the drafts of one pass."""

    cost_ms: np.ndarray
    """[R + 1] float64: milliseconds of the step with T rows at index T."""
    threshold: float
    """Tokens per millisecond."""


class StepTimer:
    def __init__(self, cost: CostModel, clock: Callable[[], float] = time.perf_counter) -> None:
        """Time steps by this clock, in seconds, and predict and correct their cost with this model."""
        self.cost, self.threshold, self._clock = cost, SpeculationThreshold(), clock
        self._started: float | None = None
        self._load = self._base = Load(0)
        self._has_prompt = self._speculates = False
        self._n_tokens = self._nodes = self._n_beside = 0
        self._finished: list[_Step] = []
        self._pending_ms = 0.0
        self._n_stalls = 0
        self._since_plain, self._probe_after = 0, FIRST_INTERVAL
        self._since_drafts, self._trial_after = 0, FIRST_INTERVAL

    def start_step(self) -> None:
        """Begin a step, which ends the one before."""
        self.finish_step()
        self._started, self._load = self._clock(), Load(0)

    def plan(self, rows: int, n_seqs: int, keys: int, n_drafting: int, *, drafts: bool = True) -> StepPlan:
        """Return the plan for a pass that carries `rows` rows without drafts, for `n_seqs` sequences with `keys` tokens in all.

        n_drafting: sequences that a draft is looked for; drafts: False if none may be made.
        """
        curve, plain_ms = self.cost.get_curve(Load(rows, n_seqs, keys, n_drafting)), self.cost.predict(Load(n_seqs, n_seqs, keys))
        threshold = self.threshold.get_threshold(n_seqs, plain_ms)
        if drafts and self._since_drafts >= self._trial_after:
            self._trial_after = min(2 * self._trial_after, PROBE_INTERVAL)
            self._since_drafts, threshold = 0, threshold / 2
        return StepPlan(curve, threshold)

    @property
    def n_alike_steps(self) -> int:
        """Return how many steps from this one on can be made by one plan, before a probe or a trial is due."""
        return max(min(self._probe_after - self._since_plain, self._trial_after - self._since_drafts), 1)

    def should_probe(self) -> bool:
        """Return whether this pass should have no drafts, to measure a plain one."""
        if self._since_plain < self._probe_after:
            return False
        self._probe_after = min(2 * self._probe_after, PROBE_INTERVAL)
        return True

    def set_load(
        self, rows: int, *, nodes: int, n_seqs: int, keys: int, n_drafting: int, has_prompt: bool, speculates: bool, n_beside: int = 0
    ) -> None:  # fmt: skip
        """Set what the step's pass carries: `nodes` of its rows are drafts, and `n_seqs` sequences get tokens.

        speculates: drafts may be made for any of them; n_beside: how many of them decode beside parts of prompts.
        """
        self._load, self._base = Load(rows, n_seqs, keys, n_drafting), Load(rows - nodes, n_seqs, keys)
        self._nodes, self._has_prompt, self._speculates, self._n_tokens = nodes, has_prompt, speculates, 0
        self._n_beside = n_beside
        self._since_plain = 0 if nodes == 0 and not has_prompt else self._since_plain + 1
        self._since_drafts = 0 if nodes else self._since_drafts + 1

    def record_steps(self, records: np.ndarray, n_seqs: int, n_decoding: int, *, speculates: bool) -> None:
        """Record several steps of `n_seqs` sequences; records [n] STEP_RECORD. The last of them goes on until `finish_step`.

        n_decoding: how many of the sequences decode in the first step; in it the others end a prompt, and drafting begins for them.
        """
        assert self._started is not None
        ms = (self._clock() - self._started) * 1e3
        before = max(ms - float(records["step_ms"].sum()), 0.0)  # until the first of them began
        for i, (_, step_ms, rows, nodes, n_drafting, made, keys) in enumerate(records.tolist(), 1):
            has_prompt = i == 1 and n_decoding < n_seqs
            self.set_load(
                rows, nodes=nodes, n_seqs=n_seqs, keys=keys, n_drafting=n_drafting, has_prompt=has_prompt, speculates=speculates,
                n_beside=n_decoding if has_prompt else 0,
            )  # fmt: skip
            self.add_tokens(made)
            if i < len(records):
                self._record_step(step_ms + before)
                ms, before = ms - step_ms - before, 0.0
        self._started = self._clock() - ms / 1e3

    def add_tokens(self, n_tokens: int) -> None:
        """Add tokens that the step has made."""
        self._n_tokens += n_tokens

    def finish_step(self, *, is_last: bool = False) -> None:
        """End the step, if one is under way. If it `is_last`, nothing runs any more, so the time until the next one belongs to none."""
        if self._started is not None:
            ms = (self._clock() - self._started) * 1e3
            self._started = None
            if self._load.rows and self._load.n_seqs:
                self._record_step(ms)
        if is_last or len(self._finished) >= FLUSH_STEPS or self._pending_ms >= FLUSH_MS:
            self.flush()

    def _record_step(self, ms: float) -> None:
        self._finished.append(
            _Step(ms, self._load, self._base, self._nodes, self._n_tokens, self._has_prompt, self._speculates, self._n_beside)
        )
        self._pending_ms += ms

    def flush(self) -> None:
        """Update the cost model and the threshold from all finished steps."""
        for step in self._finished:
            load, predicted_ms = step.load, self.cost.predict(step.load)
            if not step.has_prompt:
                self._n_stalls = self._n_stalls + 1 if step.ms > STALL_RATIO * predicted_ms else 0
                if 0 < self._n_stalls < MAX_STALLS:
                    continue
            if step.speculates:
                plain_ms = self.cost.predict(Load(load.n_seqs, load.n_seqs, load.keys))
                base_ms = self.cost.predict(step.base)
                beside_ms = base_ms - self.cost.predict(step.base.drop_sequences(step.n_beside)) if step.n_beside else 0.0
                predicted = PredictedPass(predicted_ms, base_ms, plain_ms, step.nodes, step.n_beside, beside_ms)
                self.threshold.record_step(load.n_seqs, step.n_tokens, step.ms, predicted, has_prompt=step.has_prompt)
            if not step.has_prompt:
                self.cost.observe(load, step.ms)
        self._finished.clear()
        self._pending_ms = 0.0


class _Step(NamedTuple):
    """A finished step."""

    ms: float
    load: Load
    base: Load
    """The load without drafts."""
    nodes: int
    n_tokens: int
    has_prompt: bool
    speculates: bool
    n_beside: int
    """Sequences that decode beside parts of prompts."""

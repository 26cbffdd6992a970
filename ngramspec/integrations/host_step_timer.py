"""The step timer of an integration: learns what a host engine's steps cost, and plans how much to draft.

A step's load and its time go in; a table of costs and the threshold come out. Nothing is measured at the start: until some steps have
passed, a row is assumed to take the share `slope` of a plain step. With `steady` times are ignored and that estimate is kept, so that all
tensor-parallel ranks draft the same. Knows no tokens and no clock.
"""

from __future__ import annotations

import numpy as np

from ngramspec.speculative.budget.cost_model import CostModel, Load
from ngramspec.speculative.budget.step_timer import StepTimer

FIRST_STEPS = 2  # plain steps, the fastest of which is the first measure: a host's first steps compile, allocate and fault pages in
_FIRST_PLAIN = 4  # most steps that are made plain for that


class HostStepTimer:
    """The step timer of one host engine."""

    def __init__(self, max_rows: int, slope: float, *, steady: bool) -> None:
        """`slope`: time that a row is assumed to add, as a share of a step with one row."""
        self.max_rows, self.steady = max_rows, steady
        self._counts = [1 << i for i in range(max_rows.bit_length())]
        if self._counts[-1] < max_rows:
            self._counts.append(max_rows)
        self._assumed_cost = 1.0 + slope * np.arange(-1.0, max_rows)  # by rows, in plain steps
        self._timing: StepTimer | None = None
        self._now_s = 0.0  # within a step: its clock is the host's
        self._first: list[float] = []  # milliseconds of a step with one row, from the first steps
        self._has_times = False  # steps have been recorded
        self._n_first_plain = 0

    @property
    def gain(self) -> float:
        """Return the recent speed relative to the same host without drafts, as estimated here; 1 if `steady`."""
        return 1.0 if self._timing is None else self._timing.threshold.gain

    def should_probe(self) -> bool:
        """Return whether this step should have no drafts, to measure a plain one for the threshold."""
        if self._timing is not None:
            return self._timing.should_probe()
        if wants := self._has_times and self._n_first_plain < _FIRST_PLAIN:
            self._n_first_plain += 1
        return wants

    def plan(self, load: Load) -> tuple[np.ndarray, float]:
        """Return the plan for a step that carries this without drafts: milliseconds by rows [max_rows + 1] float64, and the threshold.

        The threshold is in tokens per millisecond; 0 means what the step itself makes.
        """
        return (self._assumed_cost, 0.0) if self._timing is None else self._timing.plan(*load)

    def record_step(self, load: Load, nodes: int, made: int, ms: float, *, has_prompt: bool) -> None:
        """Record a step that carried this, `nodes` of its rows drafts, and made `made` tokens in `ms` milliseconds."""
        if self.steady or ms <= 0 or not 0 < load.rows <= self.max_rows or load.n_seqs == 0:
            return
        self._has_times = True
        if self._timing is None:
            if not has_prompt and (nodes == 0 or self._n_first_plain == _FIRST_PLAIN):
                self._first.append(ms / float(self._assumed_cost[load.rows]))
            if len(self._first) == FIRST_STEPS:
                times = min(self._first) * self._assumed_cost[self._counts]
                self._timing = StepTimer(CostModel(self._counts, times.tolist(), self.max_rows), clock=lambda: self._now_s)
            return
        self._now_s = 0.0
        self._timing.start_step()
        self._timing.set_load(**load._asdict(), nodes=nodes, has_prompt=has_prompt, speculates=True)
        self._timing.add_tokens(made)
        self._now_s = ms / 1e3
        self._timing.finish_step()

"""What a host's steps cost, learned as they pass, and what a draft may cost in them.

What a step carried and how long it took go in; a table of costs and the price of time come out. Nothing is measured at the start: until
some steps have passed, a row is believed to take a share of a plain step that the host's module names. A steady guest hears of no time and
goes on believing that, so that the ranks of a host draft the same. Knows no tokens and no clock.
"""

from __future__ import annotations

import numpy as np

from ngramspec.speculative.budget.cost_model import CostModel, Load
from ngramspec.speculative.budget.step_timer import Timing

FIRST_STEPS = 2
"""The least of so many steps without drafts is the first measure: a host's first steps compile, allocate and fault pages in."""
_FIRST_PLAIN = 4
"""So many steps are asked for without drafts at first, at the most."""


class Spending:
    """Of one host's steps."""

    def __init__(self, max_rows: int, slope: float, *, steady: bool) -> None:
        """`slope`: what a row is believed to take, as a share of a step with one."""
        self.max_rows, self.steady = max_rows, steady
        self._counts = [1 << i for i in range(max_rows.bit_length())]
        if self._counts[-1] < max_rows:
            self._counts.append(max_rows)
        self._believed = 1.0 + slope * np.arange(-1.0, max_rows)  # by rows
        self._timing: Timing | None = None
        self._now_s = 0.0  # within a step: its clock is the host's
        self._first: list[float] = []  # milliseconds of a step with one row, as the first steps make believe
        self._hears = False  # of time
        self._n_first_plain = 0

    @property
    def gain(self) -> float:
        """Speed over that of the same host without drafts, lately, by this account; 1 for a steady guest."""
        return 1.0 if self._timing is None else self._timing.threshold.gain

    def wants_plain(self) -> bool:
        """Whether this step had better have no drafts, to see what it takes: the price is made of that."""
        if self._timing is not None:
            return self._timing.wants_plain()
        if wants := self._hears and self._n_first_plain < _FIRST_PLAIN:
            self._n_first_plain += 1
        return wants

    def plan(self, load: Load) -> tuple[np.ndarray, float]:
        """For a step that carries this without drafts -> milliseconds by rows [max_rows + 1] float64, tokens that one is worth (0: as
        many as the step itself makes in it)."""
        return (self._believed, 0.0) if self._timing is None else self._timing.plan(*load)

    def took(self, load: Load, nodes: int, made: int, ms: float, *, has_prompt: bool) -> None:
        """A step that carried this, `nodes` of its rows drafts, made `made` tokens in `ms` milliseconds."""
        if self.steady or ms <= 0 or not 0 < load.rows <= self.max_rows or load.n_seqs == 0:
            return
        self._hears = True
        if self._timing is None:
            if not has_prompt and (nodes == 0 or self._n_first_plain == _FIRST_PLAIN):
                self._first.append(ms / float(self._believed[load.rows]))
            if len(self._first) == FIRST_STEPS:
                times = min(self._first) * self._believed[self._counts]
                self._timing = Timing(CostModel(self._counts, times.tolist(), self.max_rows), clock=lambda: self._now_s)
            return
        self._now_s = 0.0
        self._timing.start()
        self._timing.carries(**load._asdict(), nodes=nodes, has_prompt=has_prompt, speculates=True)
        self._timing.made(made)
        self._now_s = ms / 1e3
        self._timing.finish()

"""Predict the milliseconds of a step from its rows, sequences and keys. Measured at load, corrected by every step.

Knows nothing of what the rows are. The time of a step is a curve over its rows, plus a time for every sequence beyond the first, for every
sequence that a draft is searched for, and for every thousand keys that attention reads beyond those of the measurement. The curve's knots
and the three factors are the state of a Kalman filter (Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960): a step
corrects the knots near its row count, each as far as it was uncertain, so that expensive steps with many rows do not make those with few
look expensive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.speculative.budget.marginal_cost import compute_lower_hull

# Chosen on the simulated devices of tests/speculative/test_step_timer.py, which are wrong at first, drift and are disturbed; checked by
# tests/speculative/test_cost_model.py.

# Tokens of the sequence in the steps that are measured (`backends.base.Runner.measure`): what attention reads in them is in the curve.
KEYS = 256
# Share of a step's time: one standard deviation of single steps.
NOISE = 0.06
# Standard deviations of the measured curve, as shares of it: of all of it, and of each knot by itself; and the doublings of rows over which
# knots are correlated by 1/e.
_LEVEL, _LOCAL, _REACH = 0.3, 0.1, 1.5
# Standard deviations of the factors of sequences, of searched sequences and of thousands of keys, as shares of the time of one row.
_FACTORS = (0.006, 0.003, 0.005)
# Greatest factors, as shares of the time of one row; none is less than 0. Where all steps have as many sequences, a change of the machine
# fits the factors as well as the curve, which had shrunk to nothing after a few thousand steps.
_GREATEST = (0.05, 0.05, 0.1)
# Share of the initial uncertainty that every step adds back, since old steps count less; and the steps after which that is only the knots'
# own uncertainty: a change of the whole curve shows in every step.
_DRIFT, _YOUNG = 0.002, 64
# Standard deviations at which a step's surprise is clipped, if slow (it may have been disturbed) and if fast (it cannot have been); and the
# clipped steps of one sign after which the curve itself is in doubt.
_HIGH, _LOW, _STREAK = 1.5, 4.0, 3
# Standard deviation, as a share, of a knot from the curve's initial shape at today's level: row counts that do not occur are believed to be
# no more expensive than that. Otherwise disturbances of similar steps would add up there, and never be corrected, since what looks
# expensive is not tried; what looks too cheap is tried, and corrected.
_SHAPE = 0.5
# Standard deviation, as a share, that a step adds to each knot that it is not near, for at most so many steps, when knots contradict each
# other: if the machine was slow for a while in which few row counts occurred, the latest measurements hold.
_STALE, _STALE_STEPS = 0.1, 4
# Share of its time that a knot keeps at least in one step: a linear filter may take more than all of it away.
_LEAST_KEPT = 0.25
# Share of the time of one row that each further row adds at least.
_LEAST_SLOPE = 2e-4
# Steps between two fits of the convex curve, and sweeps of a fit.
_REFRESH, _SWEEPS = 8, 60
# Weight of earlier steps in `summarize_predictions`, per step with so many rows.
_FADE = 0.998


class Load(NamedTuple):
    """What a step carries."""

    rows: int
    n_seqs: int = 1
    keys: int = 0  # that attention reads: the sum of the sequences' lengths; 0: as in the measurement
    n_drafting: int = 0  # sequences that a draft was searched for

    def drop_sequences(self, n_seqs: int) -> Load:
        """Return the load without `n_seqs` sequences that have one row each. Their keys stay."""
        return self._replace(rows=self.rows - n_seqs, n_seqs=max(self.n_seqs - n_seqs, 1))


class CostModel:
    """A curve over a few row counts, interpolated between them and extended in a straight line, and three factors.

    It rises with every row. Unless the model has experts, it is convex: each row adds no less than the one before, since weights are read
    anyway, and arithmetic adds to that. If a measurement is a staircase, its steps are noise, or kernels that a wider one would have
    replaced. The rows of a mixture of experts share the more weights the more rows there are, so its curve bends the other way.
    """

    def __init__(
        self, counts: Sequence[int], times_ms: Sequence[float], max_rows: int, learned: Sequence[float] = (), convex: bool = True
    ) -> None:
        """Begin with `times_ms` of steps with `counts` rows of one sequence of KEYS tokens. Disturbed measurements took longer, so the
        curve begins as the greatest one below that rises, and if `convex` is convex. `learned`: what an earlier model had learned.
        """
        self.counts = np.array(counts, np.float64)
        self.max_rows, self.n_seen = max_rows, 0
        self._convex = convex
        rising = np.minimum.accumulate(np.array(times_ms, np.float64)[::-1])[::-1]
        self._shape = compute_lower_hull.py_func(self.counts, rising) if convex else rising
        n = len(self._shape)
        self._state = np.array(learned, np.float64) if len(learned) == n + 3 else np.append(self._shape, np.zeros(3))
        times = self._state[:n]
        apart = np.abs(np.log2(self.counts)[:, None] - np.log2(self.counts)[None, :])
        self._local, everywhere = np.diag(np.append(np.zeros(n), np.array(_FACTORS) ** 2)), np.zeros((n + 3, n + 3))
        self._local[:n, :n], everywhere[:n, :n] = _LOCAL**2 * np.exp(-apart / _REACH), _LEVEL**2
        self._first = everywhere + self._local
        size = np.append(times, np.full(3, times[0]))
        self._cov = self._first * size[:, None] * size[None, :]
        self._streak = np.zeros(1, np.int64)
        self._age = np.zeros(n)
        """[n]: steps since one was near the knot."""
        self._predictions = np.zeros((max_rows + 1, 3))
        """[rows, 3]: fading sums of steps, their predicted and their measured milliseconds."""
        self._force = np.zeros(max(n - 1, 0))
        self._table = self._tabulate(sweeps=2000)
        self._extra_factors: list[float] = self._state[-3:].tolist()

    @property
    def times(self) -> np.ndarray:
        """[n] float64: milliseconds at `counts`, as estimated now."""
        return self._state[: len(self.counts)].copy()

    @property
    def learned(self) -> list[float]:
        """Milliseconds at `counts`, and of the three factors: where a later model may begin."""
        return self._state.tolist()

    @property
    def table(self) -> np.ndarray:
        """[max_rows + 1] float64: milliseconds of a step with T rows of one sequence at index T."""
        return self._table

    def get_curve(self, load: Load) -> np.ndarray:
        """Return `table` for a step with this load beside its rows."""
        return self._table + self._get_extra_ms(load)

    def count_rows(self, ms: float, load: Load) -> int:
        """Return the most rows that a step with the sequences and keys of `load` can have in this time."""
        return max(int(np.searchsorted(np.maximum.accumulate(self.get_curve(load)), ms, side="right")) - 1, 0)

    def predict(self, load: Load) -> float:
        """Return the predicted milliseconds of a step."""
        return float(self._table[min(load.rows, self.max_rows)]) + self._get_extra_ms(load)

    def observe(self, load: Load, ms: float) -> None:
        """Learn that a step without a part of a prompt took `ms` milliseconds."""
        rows = load.rows
        if not 1 <= rows <= self.max_rows:
            return
        doubt = self._first if self.n_seen < _YOUNG else self._local
        self._predictions[rows] = _FADE * self._predictions[rows] + (1.0, self.predict(load), ms)
        filtered = self._state, self._cov, self._streak, self._age
        _update(self.counts, self._shape, filtered, doubt, self.n_seen % len(self.counts), float(rows), self._get_factors(load), ms)
        self._extra_factors = self._state[-3:].tolist()
        self.n_seen += 1
        if self.n_seen % _REFRESH == 0 or self.n_seen < _REFRESH:
            self._table = self._tabulate(sweeps=_SWEEPS)

    def summarize_predictions(self) -> dict[int, tuple[int, float, float]]:
        """Return by rows: the number of recent steps, their mean predicted and mean measured milliseconds."""
        return {
            int(rows): (round(float(n)), float(expected / n), float(took / n))
            for rows, (n, expected, took) in enumerate(self._predictions)
            if n >= 1
        }

    def _get_factors(self, load: Load) -> tuple[float, float, float]:
        return float(load.n_seqs - 1), float(load.n_drafting), (load.keys - KEYS) / 1000 if load.keys else 0.0

    def _get_extra_ms(self, load: Load) -> float:
        """Return the milliseconds beside the curve's."""
        others, n_drafting, thousands = self._get_factors(load)
        per_sequence, per_look, per_thousand = self._extra_factors
        return max(per_sequence * others + per_look * n_drafting + per_thousand * thousands, -float(self._table[1]) / 2)

    def _tabulate(self, sweeps: int) -> np.ndarray:
        n = len(self.counts)
        doubt = np.minimum(self._age, _STALE_STEPS) * (_STALE * self._state[:n]) ** 2
        variances = np.diagonal(self._cov)[:n] + doubt
        times = _fit_curve(self.counts, self._state[:n], variances, _LEAST_SLOPE * self._state[0], self._force, sweeps, self._convex)
        rows = np.arange(self.max_rows + 1, dtype=np.float64)
        table = np.interp(rows, self.counts, times)
        if len(times) > 1:
            slope = (times[-1] - times[-2]) / (self.counts[-1] - self.counts[-2])
            beyond = rows > self.counts[-1]
            table[beyond] = times[-1] + slope * (rows[beyond] - self.counts[-1])
        return table


@njit(cache=True, nogil=True)
def _fit_curve(x, y, variances, least, force, sweeps, convex):
    """Return the curve, rising by `least` per x or more and convex if asked for, nearest to y [n] at x in squares weighted by certainty.

    Hildreth, "A Quadratic Programming Procedure" (1957), sweeps over the constraints (the first slope and each corner, or
    all slopes). `force` [n - 1] holds their multipliers: zeros, or those of a similar curve.
    """
    n, out = len(x), y.copy()
    for sweep in range(sweeps + 1):
        for j in range(n - 1):
            i = max(j - 1, 0)
            a, b = 0.0, 1.0 / (x[j + 1] - x[j])
            if j and convex:
                a = 1.0 / (x[j] - x[i])
            more = force[j]  # the first sweep applies the given multipliers
            if sweep:
                lacks = (0.0 if j and convex else least) - b * (out[j + 1] - out[j]) + a * (out[j] - out[i])
                own = a * a * variances[i] + (a + b) * (a + b) * variances[j] + b * b * variances[j + 1]
                more = max(force[j] + lacks / own, 0.0) - force[j]
                force[j] += more
            out[i] += variances[i] * a * more
            out[j] -= variances[j] * (a + b) * more
            out[j + 1] += variances[j + 1] * b * more
    # A steep convex curve through uncertain knots may be less than 0 at the first x. The maximum of two convex curves is convex.
    lowest = y[0]
    for i in range(1, n):
        lowest = min(lowest, y[i])
    out[0] = max(out[0], lowest)
    for j in range(n - 1):  # what the sweeps have left over: no row is ever free
        out[j + 1] = max(out[j + 1], out[j] + least * (x[j + 1] - x[j]))
    return out


@njit(cache=True, nogil=True)
def _weigh_knots(counts, rows, x):
    """Write x [n + 3], so that the curve at `rows` is x times the state."""
    if len(counts) == 1:
        x[0] = 1.0
        return
    right = min(max(np.searchsorted(counts, rows), 1), len(counts) - 1)
    share = (rows - counts[right - 1]) / (counts[right] - counts[right - 1])
    x[right - 1], x[right] = 1.0 - share, share


@njit(cache=True, nogil=True)
def _dot_product(a, b):
    """Multiply vectors: numba needs scipy for `@`, which a base installation does not have."""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@njit(cache=True, nogil=True)
def _update(counts, shape, filtered, doubt, knot, rows, factors, ms):
    """Apply a measurement to the filter, then the constraint on `knot`, in place.

    `filtered`: what the filter keeps: state, covariance, `streak` [1] (clipped surprises of one sign) and `age` [n - 3] (steps since one
    was near each knot); `doubt` [n, n]: the uncertainty added back, as shares of times; `factors`: of sequences, of searched ones, of
    thousands of keys.
    """
    state, cov, streak, age = filtered
    n = len(state)
    x = np.zeros(n)
    _weigh_knots(counts, rows, x)
    for i in range(n - 3):
        age[i] = 0.0 if x[i] > 0.25 else age[i] + 1.0
    x[n - 3], x[n - 2], x[n - 1] = factors
    predicted_ms, more = _dot_product(x, state), _DRIFT
    if streak[0] >= _STREAK or streak[0] <= -_STREAK:
        streak[0] = 0
        more += min(max(4.0 * (ms / predicted_ms) ** 2, 1.0), 16.0)
    for i in range(n):
        for j in range(n):
            cov[i, j] += more * doubt[i, j] * state[i if i < n - 3 else 0] * state[j if j < n - 3 else 0]
    towards = np.empty(n)
    for i in range(n):
        towards[i] = _dot_product(cov[i], x)
    variance = _dot_product(x, towards) + (NOISE * predicted_ms) ** 2
    off = (ms - predicted_ms) / math.sqrt(variance)
    if off > _HIGH:
        off = _HIGH
        streak[0] = max(streak[0], 0) + 1
    elif off < -_LOW:
        off = -_LOW
        streak[0] = min(streak[0], 0) - 1
    else:
        streak[0] = 0
    least = _LEAST_KEPT * state
    state += towards * (off / math.sqrt(variance))
    _limit_state(state, least)
    for i in range(n):
        for j in range(n):
            cov[i, j] -= towards[i] * towards[j] / variance
    for i in range(n):  # lost by rounding
        cov[i, i] = max(cov[i, i], 1e-12)
    _cap_knot(shape, state, cov, knot)
    _limit_state(state, least)  # a knot that is capped moves the others


@njit(cache=True, nogil=True)
def _limit_state(state, least):
    """Keep the knots' times at `least` [n] and above 0, and the three factors between 0 and the greatest, in place."""
    n = len(state)
    for i in range(n - 3):  # copying a slice would compile an error message of other shapes, for 2 s
        state[i] = max(state[i], max(least[i], 1e-6))
    for i in range(3):
        state[n - 3 + i] = min(max(state[n - 3 + i], 0.0), _GREATEST[i] * state[0])


@njit(cache=True, nogil=True)
def _cap_knot(shape, state, cov, knot):
    """Apply the constraint that `knot` is no more expensive than its share of the initial shape [n], in place."""
    level, weights = 0.0, 0.0
    for i in range(len(shape)):
        weight = 1.0 / (cov[i, i] / (state[i] * state[i]) + _LOCAL * _LOCAL)
        level += weight * state[i] / shape[i]
        weights += weight
    most = level / weights * shape[knot]
    if state[knot] <= most:
        return
    variance = cov[knot, knot] + (_SHAPE * most) ** 2
    towards = cov[knot].copy()
    state += towards * ((most - state[knot]) / variance)
    for i in range(len(state)):
        for j in range(len(state)):
            cov[i, j] -= towards[i] * towards[j] / variance


def compile_curve() -> CostModel:
    """Compile what a cost model begins with, or load it from disk."""
    return CostModel((1, 2), (1.0, 1.1), 2)


def warmup() -> None:
    """Compile the module's functions, or load them from disk: the eighth step of the first request would wait for it."""
    compile_curve().observe(Load(1), 1.0)

"""What a step of the engine takes: measured at load, corrected by every step, and how well it was foretold.

Rows, sequences, keys and milliseconds go in, a table of milliseconds per row count comes out. Knows nothing of what the rows are.

The time of a step is a curve over its rows, plus so much for every sequence beyond the first, for every sequence that a draft is looked
for, and for every thousand keys that attention reads beyond those of the measurement. The curve's knots and the three factors are the
state of a Kalman filter (Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960): a step corrects what it speaks of
and what is like it, each as far as it was uncertain, so that dear steps with many rows do not make those with few look dear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.datastore.code_cache import njit

NOISE = 0.06
"""Of a step's time, one standard deviation: how far it is off what it takes on the average."""
_LEVEL, _LOCAL, _REACH = 0.3, 0.1, 1.5
"""Standard deviations of the curve as it was measured, as shares of it: of all of it, and of each knot by itself, where knots that are
`_REACH` doublings of rows apart go together by 1/e."""
_FACTORS = (0.006, 0.003, 0.005)
"""Standard deviations of the factors of sequences, of those looked at and of keys, as shares of the time of one row."""
_DRIFT, _YOUNG = 0.002, 64
"""Share of the first uncertainty that comes back with every step, since what was long ago counts less. After so many steps only that of the
knots by themselves: if everything takes longer, all steps say so."""
_HIGH, _LOW, _STREAK = 1.5, 4.0, 3
"""Standard deviations that a step's surprise counts for at the most: a slow one may have been disturbed, a fast one cannot. After so many
of them in a row, all of one sign, the curve itself is in doubt."""
_SHAPE = 0.5
"""Standard deviation, as a share, of a knot from what the curve's first shape says at the level of today: what no step speaks of is
believed to be no dearer than that. What disturbances did to its like for a while would else add up there, unseen for good since it looks
dear; what looks too cheap is tried, and seen."""
_STALE, _STALE_STEPS = 0.1, 4
"""Standard deviation, as a share, that a step adds to each knot that it does not speak of, for so many steps, where knots contradict each
other: if a machine was slow for a while in which few row counts were seen, what was seen last holds."""
_LEAST_SLOPE = 2e-4
"""Of the time of one row: what each row adds at the least."""
_REFRESH, _SWEEPS = 8, 60
_FADE = 0.998


class Load(NamedTuple):
    """What a step carries."""

    rows: int
    n_seqs: int = 1
    keys: int = 0
    """Read by attention: the sum of the lengths of its sequences' texts. 0: as when the curve was measured."""
    looked: int = 0
    """Sequences that a draft was looked for."""


class CostModel:
    """The curve over a few row counts, interpolated between them and continued in a straight line behind them. It rises with every row, and
    each row adds no less than the one before: what is read is read anyway, and arithmetic adds to it. Where a measurement is a staircase,
    the steps are noise, or kernels that a wider one would have replaced."""

    def __init__(
        self, counts: Sequence[int], times_ms: Sequence[float], max_rows: int, keys: int = 256, learned_ms: Sequence[float] = ()
    ) -> None:
        """`times_ms` of steps with `counts` rows of one sequence of `keys` tokens. What was disturbed while it was measured took longer:
        the curve begins as the greatest convex one below, and is put right by the steps; `learned_ms`: as earlier ones left it."""
        self.counts = np.array(counts, np.float64)
        self.max_rows, self.keys, self.n_seen = max_rows, keys, 0
        self._shape = _lower_hull(self.counts, np.minimum.accumulate(np.array(times_ms, np.float64)[::-1])[::-1])
        times = np.array(learned_ms, np.float64) if len(learned_ms) else self._shape.copy()
        n = len(times)
        self._state = np.append(times, np.zeros(3))
        apart = np.abs(np.log2(self.counts)[:, None] - np.log2(self.counts)[None, :])
        self._local, everywhere = np.diag(np.append(np.zeros(n), np.array(_FACTORS) ** 2)), np.zeros((n + 3, n + 3))
        self._local[:n, :n], everywhere[:n, :n] = _LOCAL**2 * np.exp(-apart / _REACH), _LEVEL**2
        self._first = everywhere + self._local
        size = np.append(times, np.full(3, times[0]))
        self._cov = self._first * size[:, None] * size[None, :]
        self._streak = np.zeros(1, np.int64)
        self._age = np.zeros(n)
        """Steps since one spoke of the knot."""
        self._predictions = np.zeros((max_rows + 1, 3))
        """By rows: steps, their milliseconds as foretold, as measured. Old ones fade."""
        self._force = np.zeros(max(n - 1, 0))
        self._table = self._tabulate(sweeps=2000)
        self._extra_factors: list[float] = self._state[-3:].tolist()

    @property
    def times(self) -> np.ndarray:
        """[n] float64: milliseconds at `counts`, as they are believed now."""
        return self._state[: len(self.counts)].copy()

    @property
    def table(self) -> np.ndarray:
        """[max_rows + 1] float64: milliseconds of a step with T rows of one sequence at index T."""
        return self._table

    def get_curve(self, load: Load) -> np.ndarray:
        """`table` for what a step carries beside its rows."""
        return self._table + self._get_extra_ms(load)

    def predict(self, load: Load) -> float:
        """Milliseconds of a step."""
        return float(self._table[min(load.rows, self.max_rows)]) + self._get_extra_ms(load)

    def observe(self, load: Load, ms: float) -> None:
        """A step without a part of a prompt took `ms` milliseconds."""
        rows = load.rows
        if not 1 <= rows <= self.max_rows:
            return
        doubt = self._first if self.n_seen < _YOUNG else self._local
        told, knot = self._predictions[rows], self.n_seen % len(self.counts)
        others, looked, thousands = self._get_factors(load)
        _correct(
            self.counts, self._shape, self._state, self._cov, doubt, self._streak, self._age, told, knot,
            rows, others, looked, thousands, self.predict(load), ms,
        )  # fmt: skip
        self._extra_factors = self._state[-3:].tolist()
        self.n_seen += 1
        if self.n_seen % _REFRESH == 0 or self.n_seen < _REFRESH:
            self._table = self._tabulate(sweeps=_SWEEPS)

    def summarize_predictions(self) -> dict[int, tuple[int, float, float]]:
        """By rows: how many steps lately, their mean milliseconds as foretold and as measured."""
        return {
            int(rows): (round(float(n)), float(expected / n), float(took / n))
            for rows, (n, expected, took) in enumerate(self._predictions)
            if n >= 1
        }

    def _get_factors(self, load: Load) -> tuple[float, float, float]:
        return float(load.n_seqs - 1), float(load.looked), (load.keys - self.keys) / 1000 if load.keys else 0.0

    def _get_extra_ms(self, load: Load) -> float:
        """Milliseconds beside the curve's."""
        others, looked, thousands = self._get_factors(load)
        per_sequence, per_look, per_thousand = self._extra_factors
        return max(per_sequence * others + per_look * looked + per_thousand * thousands, -float(self._table[1]) / 2)

    def _tabulate(self, sweeps: int) -> np.ndarray:
        n = len(self.counts)
        doubt = np.minimum(self._age, _STALE_STEPS) * (_STALE * self._state[:n]) ** 2
        variances = np.diagonal(self._cov)[:n] + doubt
        times = _fit_convex(self.counts, self._state[:n], variances, _LEAST_SLOPE * self._state[0], self._force, sweeps)
        rows = np.arange(self.max_rows + 1, dtype=np.float64)
        table = np.interp(rows, self.counts, times)
        if len(times) > 1:
            slope = (times[-1] - times[-2]) / (self.counts[-1] - self.counts[-2])
            beyond = rows > self.counts[-1]
            table[beyond] = times[-1] + slope * (rows[beyond] - self.counts[-1])
        return table


@njit(cache=True, nogil=True)
def _lower_hull(x, y):
    """Greatest convex function below the points, at the points -> [n] float64."""
    n = len(x)
    corners = np.empty(n, np.int64)
    k = 0
    for i in range(n):
        while k > 1 and (y[corners[k - 1]] - y[corners[k - 2]]) * (x[i] - x[corners[k - 2]]) >= (y[i] - y[corners[k - 2]]) * (
            x[corners[k - 1]] - x[corners[k - 2]]
        ):
            k -= 1
        corners[k] = i
        k += 1
    return np.interp(x, x[corners[:k]], y[corners[:k]])


@njit(cache=True, nogil=True)
def _fit_convex(x, y, variances, least, force, sweeps):
    """The convex curve, rising by `least` per x or more, that is nearest to y [n] at x in squares weighted by their certainty: Hildreth,
    "A Quadratic Programming Procedure" (1957), sweeps over the constraints (the first slope, then each corner). `force` [n - 1] is how much
    each pushes: zeros, or those of a like curve."""
    n, out = len(x), y.copy()
    for sweep in range(sweeps + 1):
        for j in range(n - 1):
            i = max(j - 1, 0)
            a, b = 0.0, 1.0 / (x[j + 1] - x[j])
            if j:
                a = 1.0 / (x[j] - x[i])
            more = force[j]  # at first, what it is known to push
            if sweep:
                lacks = (0.0 if j else least) - b * (out[j + 1] - out[j]) + a * (out[j] - out[i])
                own = a * a * variances[i] + (a + b) * (a + b) * variances[j] + b * b * variances[j + 1]
                more = max(force[j] + lacks / own, 0.0) - force[j]
                force[j] += more
            out[i] += variances[i] * a * more
            out[j] -= variances[j] * (a + b) * more
            out[j + 1] += variances[j + 1] * b * more
    for j in range(n - 1):  # what so many sweeps have left over: no row is ever free
        out[j + 1] = max(out[j + 1], out[j] + least * (x[j + 1] - x[j]))
    return out


@njit(cache=True, nogil=True)
def _weigh_knots(counts, rows, x):
    """The curve at `rows` is x [n + 3] times the state."""
    if len(counts) == 1:
        x[0] = 1.0
        return
    right = min(max(np.searchsorted(counts, rows), 1), len(counts) - 1)
    share = (rows - counts[right - 1]) / (counts[right] - counts[right - 1])
    x[right - 1], x[right] = 1.0 - share, share


@njit(cache=True, nogil=True)
def _dot_product(a, b):
    """numba would ask scipy for `@`, which a base installation does not have."""
    total = 0.0
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@njit(cache=True, nogil=True)
def _correct(counts, shape, state, cov, doubt, streak, age, told, knot, rows, others, looked, thousands, foretold_ms, ms):
    """Both steps of the filter, and `told` [3], in place."""
    for i, x in enumerate((1.0, foretold_ms, ms)):
        told[i] = _FADE * told[i] + x
    _update(counts, state, cov, doubt, streak, age, float(rows), others, looked, thousands, ms)
    _cap_knot(shape, state, cov, knot)


@njit(cache=True, nogil=True)
def _update(counts, state, cov, doubt, streak, age, rows, others, looked, thousands, ms):
    """One step of the filter, in place. `doubt` [n, n]: what comes back of uncertainty, as shares of times; `streak` [1]: surprises of one
    sign; `age` [n - 3]: steps since one spoke of each knot."""
    n = len(state)
    x = np.zeros(n)
    _weigh_knots(counts, rows, x)
    for i in range(n - 3):
        age[i] = 0.0 if x[i] > 0.25 else age[i] + 1.0
    x[n - 3], x[n - 2], x[n - 1] = others, looked, thousands
    told, more = _dot_product(x, state), _DRIFT
    if streak[0] >= _STREAK or streak[0] <= -_STREAK:
        streak[0] = 0
        more += min(max(4.0 * (ms / told) ** 2, 1.0), 16.0)
    for i in range(n):
        for j in range(n):
            cov[i, j] += more * doubt[i, j] * state[i if i < n - 3 else 0] * state[j if j < n - 3 else 0]
    towards = np.empty(n)
    for i in range(n):
        towards[i] = _dot_product(cov[i], x)
    variance = _dot_product(x, towards) + (NOISE * told) ** 2
    off = (ms - told) / math.sqrt(variance)
    if off > _HIGH:
        off = _HIGH
        streak[0] = max(streak[0], 0) + 1
    elif off < -_LOW:
        off = -_LOW
        streak[0] = min(streak[0], 0) - 1
    else:
        streak[0] = 0
    state += towards * (off / math.sqrt(variance))
    state[: n - 3] = np.maximum(state[: n - 3], 1e-6)
    for i in range(n):
        for j in range(n):
            cov[i, j] -= towards[i] * towards[j] / variance
    for i in range(n):  # what is lost by rounding
        cov[i, i] = max(cov[i, i], 1e-12)


@njit(cache=True, nogil=True)
def _cap_knot(shape, state, cov, knot):
    """One step of the filter, in place: `knot` is no dearer than its share of the first shape [n]."""
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


def warmup() -> None:
    """Compile, or load from disk, everything here: the first request's eighth step would wait for it."""
    CostModel((1, 2), (1.0, 1.1), 2).observe(Load(1), 1.0)

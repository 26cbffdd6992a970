"""What a pass with T rows costs: measured at load, kept up to date by the passes themselves.

Rows and milliseconds of passes go in, a table of milliseconds per row count comes out. Knows nothing of what the rows are.
"""

from __future__ import annotations

import numpy as np

_ALL, _NEAR = 0.02, 0.05
"""Share of a pass's surprise that moves the whole curve, and its neighbourhood besides."""
_SURPRISE = (0.25, 1.5)
"""A pass's time over what was expected counts no further than this: a slow pass may have been disturbed, a fast one cannot."""
_REFRESH = 32


class CostModel:
    """A curve over a few row counts, interpolated between them and continued in a straight line behind them."""

    def __init__(self, counts: list[int], times_ms: list[float], max_rows: int) -> None:
        self.counts = np.array(counts, np.float64)
        self.times = np.array(times_ms, np.float64)
        self.max_rows = max_rows
        self.n_seen = 0
        self.table = self._tabulate()  # [max_rows + 1] float64, milliseconds of a pass with T rows at index T

    def _tabulate(self) -> np.ndarray:
        rows = np.arange(self.max_rows + 1, dtype=np.float64)
        times = np.minimum.accumulate(self.times[::-1])[::-1]  # more rows cannot cost less: where they seem to, fewer were disturbed
        table = np.interp(rows, self.counts, times)
        if len(times) > 1:
            slope = (times[-1] - times[-2]) / (self.counts[-1] - self.counts[-2])
            beyond = rows > self.counts[-1]
            table[beyond] = times[-1] + slope * (rows[beyond] - self.counts[-1])
        return table

    def observe(self, rows: int, ms: float) -> None:
        """A pass with `rows` rows took `ms` milliseconds."""
        if rows > self.counts[-1] or rows < 1:
            return
        ratio = min(max(ms / self.table[rows], _SURPRISE[0]), _SURPRISE[1])
        self.times *= ratio**_ALL
        right = int(np.searchsorted(self.counts, rows))
        left = right if self.counts[right] == rows else right - 1
        share = 0.0 if left == right else (rows - self.counts[left]) / (self.counts[right] - self.counts[left])
        self.times[left] *= ratio ** (_NEAR * (1 - share))
        self.times[right] *= ratio ** (_NEAR * share)
        self.n_seen += 1
        if self.n_seen % _REFRESH == 0:
            self.table = self._tabulate()

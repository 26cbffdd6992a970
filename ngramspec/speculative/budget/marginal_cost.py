"""Choose how many draft nodes a pass carries: those that pay for their time. Knows probabilities, times and a threshold.

The batch makes `expected` tokens in `cost` milliseconds. Nodes come in order of falling probability p; each adds p tokens and a row. At a
threshold of tokens per millisecond, the best number of nodes is the prefix that maximises tokens - threshold * milliseconds. Without one
(0), the threshold is the best rate of the pass itself. While cost is convex that prefix ends where p falls below
threshold * (cost(T+1) - cost(T)). Measured costs have steps and plateaus, so the search continues as long as the lower convex hull of the
cost allows a longer prefix to be better, and the tree is cut back to the best prefix seen.
"""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit


@njit(cache=True, nogil=True)
def compute_pass_costs(cost_ms, base_rows, n):
    """Return the milliseconds of a pass with base_rows + m rows, m = 0..n: [n+1] float64. The mean slope extends the measured table."""
    last = len(cost_ms) - 1
    slope = max((cost_ms[last] - cost_ms[1]) / (last - 1), 0.0) if last > 1 else 0.0
    out = np.empty(n + 1)
    for m in range(n + 1):
        rows = max(base_rows + m, 1)
        out[m] = max(cost_ms[rows] if rows <= last else cost_ms[last] + slope * (rows - last), 1e-9)
    return out


@njit(cache=True, nogil=True)
def compute_lower_hull(x, y):
    """Return the greatest convex function below points y [n] at rising x [n], at these x: [n] float64. The first and last lie on it."""
    corners = np.empty(len(x), np.int64)
    k = 0
    for i in range(len(x)):
        while k > 1:
            a, b = corners[k - 2], corners[k - 1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            k -= 1
        corners[k] = i
        k += 1
    out = y.copy()
    for c in range(1, k):
        a, b = corners[c - 1], corners[c]
        for i in range(a + 1, b):
            out[i] = y[a] + (y[b] - y[a]) * (x[i] - x[a]) / (x[b] - x[a])
    return out


@njit(cache=True, nogil=True)
def can_pay(p, expected, taken, threshold, best, hull, reach):
    """Return whether a longer prefix, whose further nodes have at most probability p, could exceed `best`, and the new `reach`.

    `reach` is the number of nodes that gains most at p. Start it at len(hull) - 1 and pass it back in: it only falls, as p falls and the
    threshold rises.
    """
    if taken + 1 >= len(hull):
        return False, reach
    while reach > taken + 1 and threshold * (hull[reach] - hull[reach - 1]) >= p:
        reach -= 1
    reach = max(reach, taken + 1)
    return expected + (reach - taken) * p - threshold * hull[reach] > best + 1e-9 * expected, reach

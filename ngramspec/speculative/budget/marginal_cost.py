"""How many draft nodes a pass should carry: those that pay for their time. Knows probabilities, times and a price; no tokens, no trees.

The batch makes `expected` tokens in `cost` milliseconds. Nodes come in order of falling probability p, each adds p tokens and a row.
At a price of so many tokens per millisecond the best number of nodes is the prefix with the most tokens left after paying for its time;
without one, the price is what the pass itself makes at its best: the prefix with the most tokens per second. While cost is convex that is
where p falls to price * (cost(T+1) - cost(T)); real costs have steps and plateaus, so the search goes on as long as the lower convex
hull of the cost allows any later prefix to be better, and the tree is cut back to the best prefix seen.
"""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit


@njit(cache=True, nogil=True)
def pass_costs(cost_ms, base_rows, n):
    """Time of a pass with base_rows + m rows, m = 0..n -> [n+1] float64. Beyond the measured table its last mean slope goes on."""
    last = len(cost_ms) - 1
    slope = max((cost_ms[last] - cost_ms[1]) / (last - 1), 0.0) if last > 1 else 0.0
    out = np.empty(n + 1)
    for m in range(n + 1):
        rows = max(base_rows + m, 1)
        out[m] = max(cost_ms[rows] if rows <= last else cost_ms[last] + slope * (rows - last), 1e-9)
    return out


@njit(cache=True, nogil=True)
def lower_hull(costs):
    """Greatest convex function below costs [n+1] -> [n+1] float64; the first and last points lie on it."""
    n = len(costs)
    corners = np.empty(n, np.int64)
    k = 0
    for i in range(n):
        while k > 1 and (costs[corners[k - 1]] - costs[corners[k - 2]]) * (i - corners[k - 2]) >= (costs[i] - costs[corners[k - 2]]) * (
            corners[k - 1] - corners[k - 2]
        ):
            k -= 1
        corners[k] = i
        k += 1
    out = costs.copy()
    for c in range(1, k):
        a, b = corners[c - 1], corners[c]
        for i in range(a + 1, b):
            out[i] = costs[a] + (costs[b] - costs[a]) * (i - a) / (b - a)
    return out


@njit(cache=True, nogil=True)
def worth(p, expected, taken, price, best, hull, reach):
    """Could a longer prefix, whose nodes have at most probability p, leave more than `best` tokens after paying? -> (answer, reach).

    `reach` is the row count that gains most at p; start it at len(hull) - 1 and hand it back: it only falls as p falls and the price rises.
    """
    if taken + 1 >= len(hull):
        return False, reach
    while reach > taken + 1 and price * (hull[reach] - hull[reach - 1]) >= p:
        reach -= 1
    reach = max(reach, taken + 1)
    return expected + (reach - taken) * p - price * hull[reach] > best + 1e-9 * expected, reach

"""The budget rule against trying every prefix."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.drafting import budget

COSTS = st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12)


@settings(deadline=None)
@given(COSTS, st.integers(1, 4))
def test_hull_is_convex_below_and_touches_the_ends(steps, base):
    cost = np.cumsum(steps)
    costs = budget.pass_costs(cost, base, 7)
    hull = budget.lower_hull(costs)
    assert hull[0] == costs[0]
    assert hull[-1] == costs[-1]
    assert (hull <= costs + 1e-9).all()
    assert (np.diff(hull, 2) >= -1e-9).all()


def chosen(probs, cost_ms, base, n_seqs):
    """The rule as `merge.grow` applies it, node by node."""
    costs = budget.pass_costs(np.asarray(cost_ms, float), base, len(probs))
    hull = budget.lower_hull(costs)
    expected, rate, kept, reach = float(n_seqs), n_seqs / costs[0], 0, len(probs)
    for taken, p in enumerate(probs):
        ok, reach = budget.worth(p, expected, taken, rate, hull, reach)
        if not ok:
            break
        expected += p
        if expected > rate * costs[taken + 1]:
            rate, kept = expected / costs[taken + 1], taken + 1
    return kept


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0.001, 1.0), min_size=0, max_size=10), COSTS, st.integers(1, 3))
def test_rule_finds_the_best_prefix(probs, steps, n_seqs):
    """Whatever the cost table does (steps, plateaus), no other prefix makes more tokens per second."""
    probs = sorted(probs, reverse=True)
    cost = np.cumsum(steps)
    costs = budget.pass_costs(cost, n_seqs, len(probs))
    speeds = (n_seqs + np.concatenate(([0.0], np.cumsum(probs)))) / costs
    assert speeds[chosen(probs, cost, n_seqs, n_seqs)] >= speeds.max() * (1 - 1e-6)


def test_a_plateau_behind_a_step_is_filled():
    cost = np.array([0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert chosen([0.9] * 8, cost, 1, 1) == 8
    assert chosen([0.1] * 8, cost, 1, 1) == 0


def test_cost_goes_on_beyond_the_table():
    costs = budget.pass_costs(np.array([0.0, 10.0, 11.0, 12.0]), 2, 4)
    np.testing.assert_allclose(costs, [11.0, 12.0, 13.0, 14.0, 15.0])

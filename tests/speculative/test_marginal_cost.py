"""The budget rule against trying every prefix."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.speculative.budget import marginal_cost

COSTS = st.lists(st.floats(0.1, 10.0), min_size=12, max_size=12)


@settings(deadline=None)
@given(COSTS, st.integers(1, 4))
def test_hull_is_convex_below_and_touches_the_ends(steps, base):
    cost = np.cumsum(steps)
    costs = marginal_cost.compute_pass_costs(cost, base, 7)
    hull = marginal_cost.compute_lower_hull(np.arange(len(costs)), costs)
    assert hull[0] == costs[0]
    assert hull[-1] == costs[-1]
    assert (hull <= costs + 1e-9).all()
    assert (np.diff(hull, 2) >= -1e-9).all()


def chosen(probs, cost_ms, base, n_seqs, threshold=0.0):
    """The rule as `tree_builder.build_trees` applies it, node by node."""
    costs = marginal_cost.compute_pass_costs(np.asarray(cost_ms, float), base, len(probs))
    hull = marginal_cost.compute_lower_hull(np.arange(len(costs)), costs)
    expected, rate, kept, reach = float(n_seqs), threshold or n_seqs / costs[0], 0, len(probs)
    best = expected - rate * costs[0]
    for taken, p in enumerate(probs):
        ok, reach = marginal_cost.can_pay(p, expected, taken, rate, best, hull, reach)
        if not ok:
            break
        expected += p
        if expected - rate * costs[taken + 1] > best:
            kept = taken + 1
            if threshold:
                best = expected - rate * costs[kept]
            else:
                rate, best = expected / costs[kept], 0.0
    return kept


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0.001, 1.0), min_size=0, max_size=10), COSTS, st.integers(1, 3))
def test_rule_finds_the_best_prefix(probs, steps, n_seqs):
    """Whatever the cost table does (steps, plateaus), no other prefix makes more tokens per second."""
    probs = sorted(probs, reverse=True)
    cost = np.cumsum(steps)
    costs = marginal_cost.compute_pass_costs(cost, n_seqs, len(probs))
    speeds = (n_seqs + np.concatenate(([0.0], np.cumsum(probs)))) / costs
    assert speeds[chosen(probs, cost, n_seqs, n_seqs)] >= speeds.max() * (1 - 1e-6)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0.001, 1.0), min_size=0, max_size=10), COSTS, st.integers(1, 3), st.floats(0.01, 2.0))
def test_rule_finds_the_best_prefix_at_a_price(probs, steps, n_seqs, threshold):
    """No other prefix has more tokens left after paying for its time."""
    probs = sorted(probs, reverse=True)
    cost = np.cumsum(steps)
    costs = marginal_cost.compute_pass_costs(cost, n_seqs, len(probs))
    left = n_seqs + np.concatenate(([0.0], np.cumsum(probs))) - threshold * costs
    assert left[chosen(probs, cost, n_seqs, n_seqs, threshold)] >= left.max() - 1e-6 * n_seqs


def test_what_is_computed_anyway_makes_no_node_cheap():
    """A pass over 200 rows of a prompt takes its time whatever is drafted: a node is worth what its own row takes."""
    cost = np.concatenate(([0.0], 4.0 + 0.4 * np.arange(400)))
    assert chosen([0.3] * 6, cost, 208, 8, threshold=8 / 7.2) == 0
    assert chosen([0.3] * 6, cost, 208, 8) == 6
    assert chosen([0.6] * 6, cost, 208, 8, threshold=8 / 7.2) == 6


def test_a_plateau_behind_a_step_is_filled():
    cost = np.array([0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert chosen([0.9] * 8, cost, 1, 1) == 8
    assert chosen([0.1] * 8, cost, 1, 1) == 0


def test_cost_goes_on_beyond_the_table():
    costs = marginal_cost.compute_pass_costs(np.array([0.0, 10.0, 11.0, 12.0]), 2, 4)
    np.testing.assert_allclose(costs, [11.0, 12.0, 13.0, 14.0, 15.0])

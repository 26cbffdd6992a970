"""What drafts may spend, on simulated devices whose costs are known: as many tokens per second as the best policy that knows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from test_marginal_cost import chosen

from ngramspec.speculative.budget.cost_model import CostModel
from ngramspec.speculative.budget.step_timer import PROBE_INTERVAL, StepTimer
from ngramspec.speculative.budget.threshold import PredictedPass, SpeculationThreshold

COUNTS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
DEVICES = {
    "reads weights, then computes": lambda rows: 4.0 + 0.1 * rows + 0.35 * np.maximum(rows - 6, 0),
    "computes": lambda rows: 1.0 + 0.9 * rows,
    "rows are nearly free": lambda rows: 10.0 + 0.02 * rows,
}
WRONG = {
    "right": lambda ms: ms,
    "twice too high": lambda ms: 2 * ms,
    "too low": lambda ms: ms / 2,
    "a staircase": lambda ms: ms[np.array([0, 3, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13])],
}
REGIMES = np.array([0.02, 0.3, 0.6, 0.9, 0.98])
"""Chances of the next token, given those before it, in stretches of text that go more or less well."""
DEPTH = 12


class Simulation:
    """Sequences whose drafts are chains with known chances. Time is what the device says."""

    def __init__(self, device: Callable[[np.ndarray], np.ndarray], n_seqs: int, lies: float = 1.0) -> None:
        """`lies`: the chances are said to be so many times as high as they are, at most 1."""
        self.device, self.n_seqs, self.lies, self.now = device, n_seqs, lies, 0.0
        self.rng = np.random.default_rng(5)
        self.regime = self.rng.integers(0, len(REGIMES), n_seqs)

    def chances(self) -> np.ndarray:
        """[n_seqs, DEPTH]: of the path to each node, as they are said to be."""
        moves = self.rng.random(self.n_seqs) < 0.08
        self.regime = np.where(moves, self.rng.integers(0, len(REGIMES), self.n_seqs), self.regime)
        return np.minimum(REGIMES[self.regime][:, None] * self.lies, 1.0) ** np.arange(1, DEPTH + 1)

    def draw(self) -> tuple[float, np.ndarray]:
        """Return how many times as long the next pass takes as the device says, and how many nodes of each sequence are right [n_seqs]."""
        factor = 1 + 0.03 * self.rng.standard_normal()
        if self.rng.random() < 0.02:
            factor *= self.rng.uniform(1.5, 4)
        right = self.rng.random((self.n_seqs, DEPTH)) < REGIMES[self.regime][:, None]
        return factor, np.cumprod(right, axis=1).sum(1)

    def run(self, nodes: np.ndarray) -> int:
        """A pass with so many nodes per sequence [n_seqs] -> tokens that it makes."""
        factor, n_right = self.draw()
        self.now += float(self.device(np.array(float(self.n_seqs + nodes.sum())))) * factor / 1e3
        return self.n_seqs + int(np.minimum(n_right, nodes).sum())


def best_nodes(chances: np.ndarray, cost_ms: np.ndarray, threshold: float) -> np.ndarray:
    """Return what `tree_builder.build_trees` chooses -> nodes per sequence."""
    order = np.argsort(-chances, axis=None, kind="stable")
    kept = chosen(chances.ravel()[order], cost_ms, len(chances), len(chances), threshold)
    return np.bincount(order[:kept] // chances.shape[1], minlength=len(chances))


@cache
def draw_steps(n_seqs: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what no policy changes: chances [steps, n_seqs, DEPTH], nodes that are right [steps, n_seqs], factors of the time [steps]."""
    simulation = Simulation(DEVICES["computes"], n_seqs)
    chances, drawn = zip(*((simulation.chances(), simulation.draw()) for _ in range(steps)), strict=True)
    return np.array(chances), np.array([n_right for _, n_right in drawn]), np.array([factor for factor, _ in drawn])


def speed(device: Callable[[np.ndarray], np.ndarray], n_seqs: int, policy: Callable[[np.ndarray], np.ndarray], steps: int) -> float:
    """Tokens per millisecond, after the first 200 steps, of a policy that always takes the same of the same chances."""
    chances, n_right, factors = (each[200:] for each in draw_steps(n_seqs, 200 + steps))
    different, which = np.unique(chances.reshape(steps, -1), axis=0, return_inverse=True)
    nodes = np.array([policy(each.reshape(n_seqs, DEPTH)) for each in different])[which.ravel()]
    made = n_seqs * steps + np.minimum(n_right, nodes).sum()
    return float(made / (device(n_seqs + nodes.sum(1, dtype=float)) * factors).sum())


@cache
def best_speed(device: Callable[[np.ndarray], np.ndarray], n_seqs: int, steps: int) -> float:
    """Of all policies with one price that know the device."""
    cost_ms = device(np.arange(512.0))
    plain = n_seqs / cost_ms[n_seqs]
    return max(
        speed(device, n_seqs, lambda chances, threshold=threshold * plain: best_nodes(chances, cost_ms, threshold), steps)  # type: ignore[misc]
        for threshold in (0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 100.0)
    )


def ours(timing: StepTimer, simulation: Simulation, steps: int) -> tuple[float, int]:
    """Tokens per millisecond of the engine's policy, and its passes without drafts."""
    made, started, n_plain = 0, simulation.now, 0
    for _ in range(steps):
        timing.start_step()
        n, chances = simulation.n_seqs, simulation.chances()
        nodes = np.zeros(n, np.int64)
        if not timing.should_probe():
            plan = timing.plan(n, n, 0, n)
            nodes = best_nodes(chances, plan.cost_ms, plan.threshold)
        n_nodes = int(nodes.sum())
        n_plain += n_nodes == 0
        timing.set_load(n + n_nodes, nodes=n_nodes, n_seqs=n, keys=0, n_drafting=n, has_prompt=False, speculates=True)
        tokens = simulation.run(nodes)
        timing.add_tokens(tokens)
        made += tokens
    timing.finish_step()
    return made / (simulation.now - started) / 1e3, n_plain


@pytest.mark.parametrize("n_seqs", [1, 8, 32])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("start", WRONG)
def test_after_200_steps_no_fixed_policy_is_more_than_3_percent_better(start: str, device: str, n_seqs: int) -> None:
    true = DEVICES[device]
    simulation = Simulation(true, n_seqs)
    timing = StepTimer(CostModel(COUNTS, WRONG[start](true(np.array(COUNTS, float))).tolist(), 512), lambda: simulation.now)
    ours(timing, simulation, 200)
    steps = 4000 // n_seqs + 600
    found, _ = ours(timing, simulation, steps)
    assert found >= 0.97 * best_speed(true, n_seqs, steps)


@pytest.mark.parametrize("stalled", [0, 1])
def test_a_step_that_stalls_for_seconds_says_nothing_of_the_next(stalled: int) -> None:
    """One with drafts, or one without: a host compiles, a machine sleeps."""
    true = DEVICES["reads weights, then computes"]
    simulation = Simulation(true, 8)
    timing = StepTimer(CostModel(COUNTS, true(np.array(COUNTS, float)).tolist(), 512), lambda: simulation.now)
    ours(timing, simulation, 200)
    before, table = timing.threshold.get_threshold(8, 5.0), timing.cost.table.copy()
    for nodes in (8 * stalled, 8 * (1 - stalled)):
        timing.start_step()
        timing.set_load(8 + nodes, nodes=nodes, n_seqs=8, keys=0, n_drafting=8, has_prompt=False, speculates=True)
        timing.add_tokens(8)
        simulation.now += 3.0
    timing.start_step()
    timing.flush()
    assert timing.threshold.get_threshold(8, 5.0) == pytest.approx(before, rel=0.05)
    np.testing.assert_allclose(timing.cost.table, table, rtol=0.02)
    assert timing.threshold.governor < 1.2


def test_steps_that_go_on_taking_ten_times_as_long_are_believed() -> None:
    true = DEVICES["reads weights, then computes"]
    simulation = Simulation(true, 1)
    timing = StepTimer(CostModel(COUNTS, (true(np.array(COUNTS, float)) / 10).tolist(), 512), lambda: simulation.now)
    ours(timing, simulation, 200)
    assert timing.cost.table[1] == pytest.approx(float(true(np.array(1.0))), rel=0.1)


def test_passes_are_foretold() -> None:
    true = DEVICES["reads weights, then computes"]
    simulation = Simulation(true, 8)
    timing = StepTimer(CostModel(COUNTS, (2 * true(np.array(COUNTS, float))).tolist(), 512), lambda: simulation.now)
    ours(timing, simulation, 1500)
    told = {rows: expected for rows, (n, expected, _) in timing.cost.summarize_predictions().items() if n >= 50}
    assert len(told) > 5
    for rows, expected in told.items():
        assert expected == pytest.approx(float(true(np.array(float(rows)))), rel=0.06), rows


def test_plain_passes_are_taken_to_see_what_they_take_and_few_of_them() -> None:
    """Every draft is sure and rows are nearly free, so that no pass is plain by itself."""
    true = DEVICES["rows are nearly free"]
    simulation = Simulation(true, 1)
    simulation.chances = lambda: np.full((1, DEPTH), 1.0)  # type: ignore[method-assign]
    timing = StepTimer(CostModel(COUNTS, true(np.array(COUNTS, float)).tolist(), 512), lambda: simulation.now)
    _, n_plain = ours(timing, simulation, 20 * PROBE_INTERVAL)
    assert 10 <= n_plain <= 20 + 4


@pytest.mark.parametrize("n_seqs", [1, 8])
def test_the_governor_stops_what_makes_it_slower(n_seqs: int) -> None:
    """Every draft claims to be certain. Without a governor that makes half of plain decoding."""
    true = DEVICES["computes"]
    simulation = Simulation(true, n_seqs, lies=50.0)
    timing = StepTimer(CostModel(COUNTS, true(np.array(COUNTS, float)).tolist(), 512), lambda: simulation.now)
    ours(timing, simulation, 600)
    found, _ = ours(timing, simulation, 1000)
    assert found > 0.95 * speed(true, n_seqs, lambda chances: np.zeros(len(chances), np.int64), 1000)
    assert timing.threshold.governor > 1
    simulation.lies = 1.0  # and lets them come back
    ours(timing, simulation, 6000 // n_seqs)
    assert timing.threshold.governor < 3


def load_beside(timing: StepTimer, true: Callable[[np.ndarray], np.ndarray], now: list[float], *, prompt_rows: int, steps: int) -> None:
    """Passes of 8 sequences that make a token each, beside so many rows of prompts."""
    for _ in range(steps):
        timing.start_step()
        rows = 8 + prompt_rows
        n_beside = 8 if prompt_rows else 0
        timing.set_load(rows, nodes=0, n_seqs=8, keys=0, n_drafting=8, has_prompt=prompt_rows > 0, speculates=True, n_beside=n_beside)
        timing.add_tokens(8)
        now[0] += float(true(np.array(float(rows)))) / 1e3
    timing.finish_step()
    timing.flush()


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_beside_prompts_is_worth_its_row(device: str) -> None:
    """A node adds a row as the token does that it may save: as long as every pass has prompts, none pays that is not certain."""
    true, now = DEVICES[device], [0.0]
    timing = StepTimer(CostModel(COUNTS, true(np.array(COUNTS, float)).tolist(), 512), lambda: now[0])
    load_beside(timing, true, now, prompt_rows=24, steps=1000)
    timing.plan(32, 8, 0, 8)  # a trial at half the threshold
    plan = timing.plan(32, 8, 0, 8)
    assert plan.threshold * (plan.cost_ms[33] - plan.cost_ms[32]) == pytest.approx(1.0, rel=0.1)
    load_beside(timing, true, now, prompt_rows=0, steps=8000)
    timing.plan(8, 8, 0, 8)
    assert timing.plan(8, 8, 0, 8).threshold == pytest.approx(8 / float(true(np.array(8.0))), rel=0.05)


def test_a_token_beside_prompts_has_a_worth_whatever_is_predicted() -> None:
    """What a row adds to a pass with a part of a prompt is a difference of two predictions, which may be nothing or less."""
    for beside_ms in (0.0, -3.0):
        threshold = SpeculationThreshold()
        threshold.record_step(1, 1, 40.0, PredictedPass(40.0, 40.0, 10.0, 0, 1, beside_ms), has_prompt=True)
        assert 0.1 <= threshold.get_threshold(1, 10.0) < 100.0

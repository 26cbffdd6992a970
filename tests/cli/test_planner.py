"""The planner's formulas against what the paper prints, and its estimates against runs whose acceptance is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ngramspec.cli import main as cli
from ngramspec.cli.complete import add_rates
from ngramspec.outputs import Stats
from ngramspec.papers import planner

TABLE_1 = [
    # alpha, gamma, operations, speed
    (0.6, 2, "1.53X", "1.96X"),
    (0.7, 3, "1.58X", "2.53X"),
    (0.8, 2, "1.23X", "2.44X"),
    (0.8, 5, "1.63X", "3.69X"),
    (0.9, 2, "1.11X", "2.71X"),
    (0.9, 10, "1.60X", "6.86X"),
]
TABLE_4 = [
    # gamma, alpha, c, expected
    (7, 0.75, 0.02, 3.2),
    (7, 0.8, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
    (3, 0.56, 0.11, 1.6),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1_to_the_printed_digits(alpha: float, gamma: int, operations: str, speed: str) -> None:
    assert f"{planner.compute_operations_factor(alpha, gamma):.2f}X" == operations
    assert f"{planner.compute_walltime_factor(alpha, gamma):.2f}X" == speed


@pytest.mark.parametrize(("gamma", "alpha", "c", "expected"), TABLE_4)
def test_table_4_within_the_digits_of_its_alpha_and_c(gamma: int, alpha: float, c: float, expected: float) -> None:
    lowest, highest = (
        planner.compute_walltime_factor(alpha - 0.005, gamma, c + 0.005),
        planner.compute_walltime_factor(alpha + 0.005, gamma, c - 0.005),
    )
    assert lowest - 0.05 <= expected <= highest + 0.05


def test_expected_tokens_is_the_sum_of_powers() -> None:
    for alpha in (0.0, 1e-9, 0.3, 0.999999999, 1 - 1e-15, 1.0):
        for gamma in (0, 1, 7, 64):
            assert planner.compute_expected_tokens(alpha, gamma) == pytest.approx(sum(alpha**i for i in range(gamma + 1)), rel=1e-9)


def test_best_gamma() -> None:
    assert planner.find_best_gamma(0.3, 0.4) == 0  # corollary 3.9: nothing is gained where alpha <= c
    assert planner.find_best_gamma(0.5, 0.4) == 1
    assert planner.find_best_gamma(1, 0.5, most=9) == 9
    best = planner.find_best_gamma(0.8, 0.05)
    factor = planner.compute_walltime_factor(0.8, best, 0.05)
    assert factor > planner.compute_walltime_factor(0.8, best - 1, 0.05)
    assert factor >= planner.compute_walltime_factor(0.8, best + 1, 0.05)


def _simulated(alpha: float, lengths: np.ndarray) -> Stats:
    """What a run reports whose chains, of these lengths, are accepted token by token with probability alpha."""
    rng, stats = np.random.default_rng(1), Stats()
    for length in lengths.tolist():
        misses = np.flatnonzero(rng.random(length) >= alpha)
        k = int(misses[0]) if len(misses) else length
        drafted, accepted = [1] * length, [1] * k
        stats.add(Stats(1, k + 1, length, k, {}, {}, {}, drafted, accepted, int(length > 0)))
    return stats


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
def test_alpha_of_a_run_is_found_again(alpha: float) -> None:
    stats = _simulated(alpha, np.repeat([0, 6], [1000, 4000]))
    document = {"stats": add_rates(stats), "duration_s": 10.0}
    run = planner.estimate_run(document)
    assert run.alpha == pytest.approx(alpha, abs=0.02)
    assert run.gamma == pytest.approx(4.8)
    assert run.expect_tokens() == pytest.approx(stats.tokens_per_pass, rel=0.02)
    assert run.speedup is None


def test_alpha_and_cost_of_a_comparison() -> None:
    tokens_per_pass = planner.compute_expected_tokens(0.7, 5)
    speedup = planner.compute_walltime_factor(0.7, 5, 0.1)
    run = planner.estimate_run({"tokens": 100, "tokens_per_pass": tokens_per_pass, "rows_per_pass": 5, "speedup": speedup})
    assert run.alpha == pytest.approx(0.7)
    assert run.estimate_cost(speedup) == pytest.approx(0.1)
    assert run.predict_walltime_factor(0.1) == pytest.approx(speedup)


@pytest.mark.parametrize("document", [{}, {"stats": None}, {"stats": {"passes": 0}}, {"tokens": 1, "tokens_per_pass": "x"}])
def test_what_is_no_run_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no figures of a run"):
        planner.estimate_run(document)


@pytest.mark.parametrize(("name", "value"), [("alpha", -0.1), ("alpha", 1.1), ("alpha", float("nan")), ("gamma", -1), ("c", -0.1)])
def test_values_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        planner.compute_walltime_factor(**{"alpha": 0.5, "gamma": 1, "c": 0.0} | {name: value})


def _plan(*args: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["plan", *args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_command_plans() -> None:
    document = _plan("--alpha", "0.8", "--gamma", "5", "--c", "0.05")
    asked, best = document["planned"]
    assert asked["gamma"] == 5
    assert best["gamma"] == document["best_gamma"] == planner.find_best_gamma(0.8, 0.05)
    assert asked["walltime"] == planner.compute_walltime_factor(0.8, 5, 0.05) < best["walltime"]


def test_command_compares_a_run_with_its_baseline(tmp_path: Path) -> None:
    on, off = tmp_path / "on.json", tmp_path / "off.json"
    stats, plain = _simulated(0.6, np.full(500, 4)), _simulated(0, np.full(500, 0))
    on.write_text(json.dumps({"stats": add_rates(stats), "duration_s": stats.tokens * 1.0}))
    off.write_text(json.dumps({"stats": add_rates(plain), "duration_s": plain.tokens * 1.5}))
    document = _plan("--run", str(on), "--baseline", str(off))
    assert document["alpha"] == pytest.approx(0.6, abs=0.03)
    assert document["measured"] == {"tokens_per_pass": stats.tokens_per_pass, "walltime": pytest.approx(1.5)}
    assert stats.tokens_per_pass / (1 + 4 * document["effective_c"]) == pytest.approx(1.5)
    assert document["expected"]["walltime"] == document["expected"]["tokens_per_pass"] == pytest.approx(stats.tokens_per_pass, rel=0.05)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "3"])
def test_a_run_that_is_no_document_is_told_of(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    with pytest.raises(cli.BadInputError, match="is not a JSON document") as error:
        CliRunner().invoke(cli.app, ["plan", "--run", str(file)], catch_exceptions=False)
    assert cli.exit_code(error.value) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either --alpha"),
        (["--alpha", "2"], "alpha must be 0 to 1"),
        (["--alpha", "0.5", "--gamma", "-1"], "gamma must be 0 or more"),
        (["--alpha", "0.5", "--c", "-1"], "c must be 0 or more"),
        (["--run", "/nowhere.json"], "cannot be read"),
    ],
)
def test_bad_input_ends_with_code_2(args: list[str], message: str) -> None:
    with pytest.raises(cli.BadInputError, match=message) as error:
        CliRunner().invoke(cli.app, ["plan", *args], catch_exceptions=False)
    assert cli.exit_code(error.value) == 2

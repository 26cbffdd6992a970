"""The cost curve: interpolation, continuation, and its way to the truth from passes that are noisy or far off."""

import numpy as np
import pytest

from ngramspec.batch.cost import CostModel

COUNTS = [1, 2, 4, 8, 16]
TRUE = np.array([20.0, 20.5, 21.0, 24.0, 32.0])


def test_interpolates_and_goes_on_straight() -> None:
    table = CostModel(COUNTS, TRUE.tolist(), 40).table
    assert table[[1, 2, 4, 8, 16]].tolist() == TRUE.tolist()
    assert table[3] == pytest.approx(20.75)
    assert table[24] == pytest.approx(40.0)
    assert (np.diff(table[1:]) >= 0).all()


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 3.0, 10.0])
def test_finds_the_truth_from_a_wrong_start(factor: float) -> None:
    """Passes of the true cost, one in five disturbed: every knot ends within 15 %."""
    rng = np.random.default_rng(0)
    model = CostModel(COUNTS, (TRUE * factor * rng.uniform(0.7, 1.4, 5)).tolist(), 40)
    for _ in range(4000):
        rows = int(rng.integers(1, 17))
        ms = float(np.interp(rows, COUNTS, TRUE)) * (1 + 0.03 * rng.standard_normal())
        model.observe(rows, ms * (rng.uniform(2, 8) if rng.random() < 0.02 else 1))
    assert np.abs(model.table[COUNTS] / TRUE - 1).max() < 0.15


def test_rows_beyond_the_curve_teach_nothing() -> None:
    model = CostModel(COUNTS, TRUE.tolist(), 40)
    before = model.times.copy()
    model.observe(30, 1.0)
    assert (model.times == before).all()


def test_a_disturbed_measurement_of_few_rows_does_not_spread() -> None:
    table = CostModel(COUNTS, [90.0, *TRUE[1:]], 40).table
    assert table[1] == TRUE[1]
    assert table[4] == TRUE[2]

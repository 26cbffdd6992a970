"""The cost curve: its shape, what it keeps apart, and its way to the truth from steps that are noisy or far off."""

import numpy as np
import pytest

from ngramspec.speculative.budget.cost_model import CostModel, Load

COUNTS = [1, 2, 4, 8, 16]
TRUE = np.array([20.0, 20.4, 21.2, 24.0, 32.0])


def test_interpolates_and_goes_on_straight() -> None:
    table = CostModel(COUNTS, TRUE.tolist(), 40).table
    np.testing.assert_allclose(table[COUNTS], TRUE, rtol=1e-3)
    assert table[3] == pytest.approx(20.8, rel=1e-3)
    assert table[24] == pytest.approx(40.0, rel=1e-3)


@pytest.mark.parametrize("times", [[20, 20, 20, 20, 20.1], [20, 31, 31, 31, 40], [90, 20.4, 21.2, 24, 32], [20, 60, 21.2, 24, 32]])
def test_no_row_is_free_and_what_was_disturbed_does_not_spread(times: list[float]) -> None:
    table = CostModel(COUNTS, times, 40).table
    steps = np.diff(table[1:])
    assert (steps > 0).all()
    assert (np.diff(steps) > -1e-3).all(), "each row adds no less than the one before"
    assert (table[COUNTS] <= np.array(times) * 1.01).all()


EXPERTS = np.array([8.5, 12.3, 18.4, 31.6, 56.6])  # a random model's with llama.cpp


def test_a_curve_that_bends_the_other_way_is_kept_and_found() -> None:
    """Rows of a mixture of experts; a third of them measured wrong at first."""
    model = CostModel(COUNTS, EXPERTS.tolist(), 40, convex=False)
    np.testing.assert_allclose(model.table[COUNTS], EXPERTS, rtol=1e-3)
    assert CostModel(COUNTS, EXPERTS.tolist(), 40).table[2] < 0.96 * EXPERTS[1], "a convex curve would be too low"
    rng = np.random.default_rng(0)
    model = CostModel(COUNTS, [8.5, 40.0, 13.0, 31.6, 56.6], 40, convex=False)
    assert (np.diff(model.table[1:]) > 0).all()
    for _ in range(400):
        rows = int(rng.integers(1, 17))
        model.observe(Load(rows), float(np.interp(rows, COUNTS, EXPERTS)) * (1 + 0.03 * rng.standard_normal()))
    np.testing.assert_allclose(model.table[COUNTS], EXPERTS, rtol=0.05)
    assert (np.diff(model.table[1:]) > 0).all()


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0, 3.0, 10.0])
def test_finds_the_truth_from_a_wrong_start(factor: float) -> None:
    """Steps of the true cost, some of them disturbed."""
    rng = np.random.default_rng(0)
    model = CostModel(COUNTS, (TRUE * factor * rng.uniform(0.7, 1.4, 5)).tolist(), 40)
    for n in range(2000):
        rows = int(rng.integers(1, 17))
        ms = float(np.interp(rows, COUNTS, TRUE)) * (1 + 0.03 * rng.standard_normal())
        model.observe(Load(rows), ms * (rng.uniform(2, 8) if rng.random() < 0.02 else 1))
        if n >= 100:
            assert np.abs(model.table[COUNTS] / TRUE - 1).max() < 0.1


def test_dear_steps_with_many_rows_do_not_make_those_with_few_look_dear() -> None:
    """The curve is right for few rows, and far too low for 16; then nothing else is seen."""
    model = CostModel(COUNTS, [*TRUE[:4].tolist(), 24.5], 40)
    for _ in range(50):
        for rows in (1, 2, 4, 8):
            model.observe(Load(rows), float(np.interp(rows, COUNTS, TRUE)))
    for _ in range(100):
        model.observe(Load(16), 45.0)
    assert model.table[16] == pytest.approx(45, rel=0.03)
    assert model.table[1] == pytest.approx(20, rel=0.05)
    assert model.table[4] == pytest.approx(21.2, rel=0.15)


def test_what_was_seen_last_holds_where_it_contradicts() -> None:
    """A machine that is slow for a while, in which single rows alone are seen; then it is not, and sixteen are seen with eight."""
    rng = np.random.default_rng(3)
    model = CostModel(COUNTS, TRUE.tolist(), 40)

    def steps(n: int, counts: tuple[int, ...], slow: float) -> None:
        for i in range(n):
            rows = counts[i % len(counts)]
            model.observe(Load(rows), slow * float(np.interp(rows, COUNTS, TRUE)) * (1 + 0.05 * rng.standard_normal()))

    steps(200, (1, 2, 4, 8, 16), 1.0)
    steps(24, (1,), 2.0)
    steps(32, (8, 16), 1.0)
    assert model.predict(Load(8)) == pytest.approx(24.0, rel=0.12)
    assert model.predict(Load(16)) == pytest.approx(32.0, rel=0.12)


@pytest.mark.parametrize("seed", range(5))
def test_moments_in_which_all_is_slow_do_not_add_up_where_nobody_looks(seed: int) -> None:
    """Steps of few rows, and a machine that others use now and then: what many rows are believed to take stays what it was."""
    rng, counts = np.random.default_rng(seed), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    true = np.array([4.4, 4.5, 4.8, 5.0, 5.8, 6.5, 8.0, 9.5, 12.2, 16.2, 24.2, 33.0, 50.0, 67.0])
    model = CostModel(counts, true.tolist(), 256)
    slow, left = 1.0, 0
    for n in range(4000):
        if left == 0:
            slow, left = (rng.uniform(1.15, 1.8), int(rng.integers(3, 60))) if n < 3900 and rng.random() < 0.01 else (1.0, 1)
        left -= 1
        rows = 1 if rng.random() < 0.4 else min(int(rng.geometric(0.25)), 24)
        model.observe(Load(rows), float(np.interp(rows, counts, true)) * slow * rng.normal(1, 0.04))
    assert (model.table[counts[-5:]] / true[-5:]).max() < 1.15, "where the filter alone is off by 1.2 to 2.4"
    assert (model.table[counts[-5:]] / true[-5:]).min() > 0.9


def test_what_was_learned_is_where_it_begins() -> None:
    model = CostModel(COUNTS, (2 * TRUE).tolist(), 40, learned=[*TRUE.tolist(), 0.0, 0.0, 0.0])
    np.testing.assert_allclose(model.table[COUNTS], TRUE, rtol=1e-3)


def measure_together(rng: np.random.Generator, model: CostModel, n_seqs: int, n_steps: int) -> None:
    """Steps of so many sequences, on a machine whose speed changes every hundred steps or so."""
    slow = 1.0
    for _ in range(n_steps):
        slow = float(rng.choice([1.0, 1.25, 1.5])) if rng.random() < 0.01 else slow
        rows, keys = n_seqs + (int(rng.integers(0, 7)) if rng.random() < 0.1 else 0), n_seqs * int(rng.integers(300, 900))
        ms = np.interp(rows, COUNTS, TRUE) + 0.3 * (n_seqs - 1) + 0.5 * (keys - 256) / 1000
        model.observe(Load(rows, n_seqs, keys), float(ms) * slow * rng.normal(1, 0.06) * (3.0 if rng.random() < 0.02 else 1.0))


@pytest.mark.parametrize("n_seqs", [8, 16])
def test_steps_of_as_many_sequences_leave_the_curve_its_shape(n_seqs: int) -> None:
    """The time of each sequence fits such steps as well as that of each row."""
    model = CostModel(COUNTS, TRUE.tolist(), 40)
    measure_together(np.random.default_rng(1), model, n_seqs, 6000)
    assert (model.times / TRUE).min() > 0.7


def test_a_later_model_predicts_what_the_earlier_one_did() -> None:
    model = CostModel(COUNTS, TRUE.tolist(), 40)
    measure_together(np.random.default_rng(0), model, 8, 1000)
    later = CostModel(COUNTS, TRUE.tolist(), 40, learned=model.learned)
    for load in (Load(1), Load(8, 8, 5000), Load(12, 8, 5000, 8)):
        assert later.predict(load) == pytest.approx(model.predict(load), rel=0.03)


def test_sequences_looks_and_keys_are_told_from_rows() -> None:
    rng = np.random.default_rng(1)
    model = CostModel(COUNTS, TRUE.tolist(), 64)
    for _ in range(3000):
        load = Load(int(rng.integers(1, 17)), int(rng.integers(1, 9)), int(rng.integers(100, 5000)), int(rng.integers(0, 9)))
        true = np.interp(load.rows, COUNTS, TRUE) + 0.3 * (load.n_seqs - 1) + 0.1 * load.n_drafting + 0.5 * (load.keys - 256) / 1000
        model.observe(load, float(true) * (1 + 0.02 * rng.standard_normal()))
    for load, true in ((Load(4), 21.2), (Load(8, 8), 26.1), (Load(8, 8, 256, 8), 26.9), (Load(8, 8, 4256, 8), 28.9)):
        assert model.predict(load) == pytest.approx(true, rel=0.04)


def test_rows_beyond_the_curve_teach_its_slope() -> None:
    model = CostModel(COUNTS, TRUE.tolist(), 40)
    for _ in range(200):
        model.observe(Load(32), 70.0)
        model.observe(Load(8), 24.0)
        model.observe(Load(64), 1e9)  # more than the model is for
    assert model.table[32] == pytest.approx(70, rel=0.05)
    assert model.table[8] == pytest.approx(24, rel=0.05)


def test_says_how_well_it_foretold() -> None:
    model = CostModel(COUNTS, (TRUE * 2).tolist(), 40)
    for _ in range(300):
        model.observe(Load(8), 24.0)
        model.observe(Load(1), 20.0)
    told = model.summarize_predictions()
    assert set(told) == {1, 8}
    n, expected, took = told[8]
    assert n > 100
    assert took == pytest.approx(24)
    assert expected == pytest.approx(24, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_no_row_is_free_whatever_the_steps_say(seed: int) -> None:
    """Steps that contradict each other, and what was learned is not convex."""
    rng = np.random.default_rng(seed)
    model = CostModel(COUNTS, TRUE.tolist(), 40, learned=[*(TRUE * rng.uniform(0.5, 2, 5)).tolist(), 0.0, 0.0, 0.0])
    for _ in range(300):
        assert (np.diff(model.table[1:]) > 0).all()
        rows = int(rng.integers(1, 20))
        model.observe(Load(rows), float(np.interp(rows, COUNTS, TRUE)) * rng.uniform(0.5, 3))


@pytest.mark.parametrize("convex", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_no_step_is_predicted_to_take_no_time(seed: int, convex: bool) -> None:
    """Steps of a machine under load, a hundredth to five times as long: predictions had been as low as minus ten times the true one."""
    rng = np.random.default_rng(seed)
    model, shortest = CostModel(COUNTS, TRUE.tolist(), 40, convex=convex), TRUE[0]
    for _ in range(300):
        rows = int(rng.choice([*COUNTS, 3, 19]))
        ms = float(np.interp(rows, COUNTS, TRUE)) * rng.uniform(0.01, 5)
        model.observe(Load(rows, 1, int(rng.integers(1, 5000))), ms)
        shortest = min(shortest, ms)
        assert model.table.min() > shortest / 4
        assert model.predict(Load(1, 1, 1)) > 0
        assert (np.diff(model.table[1:]) > 0).all()


def test_how_many_rows_a_time_has_room_for() -> None:
    cost = CostModel([1, 4, 8], [10.0, 10.0, 20.0], max_rows=16)
    assert [cost.count_rows(cost.table[n], Load(1)) for n in range(1, 17)] == list(range(1, 17))
    assert (cost.count_rows(0.0, Load(1)), cost.count_rows(1e6, Load(1))) == (0, 16)

"""Which sequences a drafter is asked about: seldom where it brings nothing, always where it does."""

import numpy as np

from ngramspec.speculative.budget.backoff import (
    DEFAULT_MIN_GAIN,
    MAX_COOLDOWN,
    MAX_PERIOD,
    DatastoreSchedule,
    is_unpredictable,
    update_cooldown,
)

ALL = np.ones(4, np.bool_)
SLOTS = np.arange(4, dtype=np.int32)


def run(schedule: DatastoreSchedule, steps: int, gains: list[int]) -> np.ndarray:
    """Steps in which each slot's answers bring so many tokens -> how often each was asked."""
    asked = np.zeros(4, int)
    for _ in range(steps):
        turn = schedule.choose_slots(SLOTS, ALL)
        if turn is not None:
            asked += turn
            schedule.record_gains(SLOTS[turn], np.array(gains)[turn])
    return asked


def begun() -> DatastoreSchedule:
    """Turns of four sequences."""
    schedule = DatastoreSchedule(4)
    for slot in SLOTS.tolist():
        schedule.begin(slot)
    return schedule


def test_a_drafter_that_brings_something_is_asked_every_time() -> None:
    schedule = begun()
    assert run(schedule, 50, [1, 1, 1, 1]).tolist() == [50] * 4


def test_one_sequence_does_not_speak_for_another() -> None:
    schedule = begun()
    asked = run(schedule, 400, [2, 0, 0, 0])
    assert asked[0] == 400
    assert (asked[1:] < 250).all()


def test_a_drafter_that_brings_nothing_is_asked_seldom_also_by_those_that_come_later() -> None:
    schedule = begun()
    run(schedule, 2000, [0, 0, 0, 0])
    for slot in SLOTS.tolist():
        schedule.begin(slot)
    assert (run(schedule, 32, [0, 0, 0, 0]) <= 6).all()


def test_an_answer_that_was_right_brings_it_back() -> None:
    schedule = begun()
    run(schedule, 2000, [0, 0, 0, 0])
    assert (run(schedule, MAX_PERIOD + 1, [1, 1, 1, 1]) >= 1).all()
    assert run(schedule, 20, [1, 1, 1, 1]).tolist() == [20] * 4


def test_a_rare_gain_that_is_worth_the_question_keeps_it() -> None:
    schedule, rng = begun(), np.random.default_rng(0)
    asked = 0
    for _ in range(1000):
        turn = schedule.choose_slots(SLOTS, ALL)
        if turn is not None:
            asked += int(turn.sum())
            schedule.record_gains(SLOTS[turn], (rng.random(int(turn.sum())) < 3 * DEFAULT_MIN_GAIN).astype(int))
    assert asked > 3000


def test_an_answer_counts_once_though_passes_without_drafts_follow() -> None:
    schedule = begun()
    assert schedule.choose_slots(SLOTS, ALL) is not None
    schedule.record_gains(SLOTS, np.zeros(4, int))
    assert schedule.get_searched(SLOTS) is None


def test_what_is_not_wanted_is_not_asked() -> None:
    schedule = begun()
    assert schedule.choose_slots(SLOTS, ~ALL) is None
    assert schedule.choose_slots(SLOTS[:2], ALL[:2]).tolist() == [True] * 2
    assert schedule.choose_slots(SLOTS, ALL).tolist() == [True] * 4


def test_a_turn_that_came_while_nothing_was_wanted_is_taken_later() -> None:
    schedule = begun()
    run(schedule, 2000, [0, 0, 0, 0])
    asked = 0
    for step in range(8 * MAX_PERIOD):
        turn = schedule.choose_slots(SLOTS, ALL if step % 8 == 3 else ~ALL)
        if turn is not None:
            asked += int(turn.sum())
            schedule.record_gains(SLOTS[turn], np.zeros(int(turn.sum()), int))
    assert asked == 4 * 8


def test_sequences_are_asked_about_together_and_what_lies_between_is_quiet() -> None:
    schedule = begun()
    run(schedule, 5, [0, 0, 0, 0])
    schedule.end(3)
    schedule.begin(3)  # later than the others
    run(schedule, 2000, [0, 0, 0, 0])
    steps = [schedule.choose_slots(SLOTS, ALL) for _ in range(4 * MAX_PERIOD)]
    taken = [turn for turn in steps if turn is not None]
    assert len(taken) == 4
    assert all(turn.all() for turn in taken)


def test_a_sequence_that_is_over_wakes_nobody() -> None:
    schedule = begun()
    run(schedule, 2000, [0, 0, 0, 0])
    schedule.begin(0)
    schedule.end(0)
    rest = SLOTS[1:]
    schedule.choose_slots(rest, ALL[1:])
    assert sum(schedule.choose_slots(rest, ALL[1:]) is not None for _ in range(MAX_PERIOD)) <= 1


def test_sequences_get_something_beforehand_now_and_then_though_it_did_not_pay() -> None:
    schedule = DatastoreSchedule(4)
    assert schedule.begin(0)
    run(schedule, 2000, [0, 0, 0, 0])
    assert 5 <= sum(schedule.begin(0) for _ in range(80)) <= 20


def test_what_an_answer_must_bring_is_what_its_time_is_worth() -> None:
    def asked(threshold: float) -> int:
        schedule, rng, n = begun(), np.random.default_rng(0), 0
        for _ in range(1000):
            turn = schedule.choose_slots(SLOTS, ALL, threshold)
            if turn is not None:
                n += int(turn.sum())
                schedule.record_gains(SLOTS[turn], (rng.random(int(turn.sum())) < 0.05).astype(int))
        return n

    cheap, dear = asked(0.01), asked(2.0)
    assert cheap > 3800
    assert dear < cheap / 2


def test_turns_say_how_long_nobody_is_asked_about() -> None:
    schedule, slots, wanted = DatastoreSchedule(4), np.array([1, 2], np.int32), np.ones(2, np.bool_)
    schedule.begin(1), schedule.begin(2)
    other = DatastoreSchedule(4)
    other.begin(1), other.begin(2)
    asked = []
    for _ in range(40):
        turn = other.choose_slots(slots, wanted)
        asked.append(turn is not None)
        if turn is not None:
            other.record_gains(slots[turn], np.zeros(int(turn.sum())))
    got = []
    while len(got) < 40:
        if quiet := min(schedule.n_quiet_steps, 40 - len(got)):
            schedule.skip_steps(quiet)
            got += [False] * quiet
            continue
        turn = schedule.choose_slots(slots, wanted)
        got.append(turn is not None)
        if turn is not None:
            schedule.record_gains(slots[turn], np.zeros(int(turn.sum())))
    assert got == asked
    assert False in asked[-20:]


def test_what_is_not_foreseen_is_looked_at_less_and_less() -> None:
    left, last, seen = 0, 0, []
    for _ in range(40):
        left, last, rests = update_cooldown(left, last, True)
        seen.append(rests)
    assert seen[:4] == [True, True, True, True]
    assert update_cooldown(0, MAX_COOLDOWN, False) == (0, 0, False)
    assert update_cooldown(3, MAX_COOLDOWN, False) == (2, MAX_COOLDOWN, True)
    assert [is_unpredictable(1 << 32 | hits) for hits in (0, 1, 3)] == [True, True, False]
    assert not is_unpredictable(1 << 31)

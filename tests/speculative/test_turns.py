"""Which sequences a drafter is asked about: seldom where it brings nothing, always where it does."""

import numpy as np

from ngramspec.speculative.budget.backoff import LEAST, LONGEST, Turns

ALL = np.ones(4, np.bool_)
SLOTS = np.arange(4, dtype=np.int32)


def run(turns: Turns, steps: int, gains: list[int]) -> np.ndarray:
    """Steps in which each slot's answers bring so many tokens -> how often each was asked."""
    asked = np.zeros(4, int)
    for _ in range(steps):
        turn = turns.asks(SLOTS, ALL)
        if turn is not None:
            asked += turn
            turns.made(SLOTS[turn], np.array(gains)[turn])
    return asked


def begun() -> Turns:
    """Turns of four sequences."""
    turns = Turns(4)
    for slot in SLOTS.tolist():
        turns.begin(slot)
    return turns


def test_a_drafter_that_brings_something_is_asked_every_time() -> None:
    turns = begun()
    assert run(turns, 50, [1, 1, 1, 1]).tolist() == [50] * 4


def test_one_sequence_does_not_speak_for_another() -> None:
    turns = begun()
    asked = run(turns, 400, [2, 0, 0, 0])
    assert asked[0] == 400
    assert (asked[1:] < 250).all()


def test_a_drafter_that_brings_nothing_is_asked_seldom_also_by_those_that_come_later() -> None:
    turns = begun()
    run(turns, 2000, [0, 0, 0, 0])
    for slot in SLOTS.tolist():
        turns.begin(slot)
    assert (run(turns, 32, [0, 0, 0, 0]) <= 6).all()


def test_an_answer_that_was_right_brings_it_back() -> None:
    turns = begun()
    run(turns, 2000, [0, 0, 0, 0])
    assert (run(turns, LONGEST + 1, [1, 1, 1, 1]) >= 1).all()
    assert run(turns, 20, [1, 1, 1, 1]).tolist() == [20] * 4


def test_a_rare_gain_that_is_worth_the_question_keeps_it() -> None:
    turns, rng = begun(), np.random.default_rng(0)
    asked = 0
    for _ in range(1000):
        turn = turns.asks(SLOTS, ALL)
        if turn is not None:
            asked += int(turn.sum())
            turns.made(SLOTS[turn], (rng.random(int(turn.sum())) < 3 * LEAST).astype(int))
    assert asked > 3000


def test_what_is_not_wanted_is_not_asked() -> None:
    turns = begun()
    assert turns.asks(SLOTS, ~ALL) is None
    assert turns.asks(SLOTS[:2], ALL[:2]).tolist() == [True] * 2
    assert turns.asks(SLOTS, ALL).tolist() == [True] * 4


def test_a_turn_that_came_while_nothing_was_wanted_is_taken_later() -> None:
    turns = begun()
    run(turns, 2000, [0, 0, 0, 0])
    asked = 0
    for step in range(8 * LONGEST):
        turn = turns.asks(SLOTS, ALL if step % 8 == 3 else ~ALL)
        if turn is not None:
            asked += int(turn.sum())
            turns.made(SLOTS[turn], np.zeros(int(turn.sum()), int))
    assert asked == 4 * 8


def test_sequences_are_asked_about_together_and_what_lies_between_is_quiet() -> None:
    turns = begun()
    run(turns, 5, [0, 0, 0, 0])
    turns.end(3)
    turns.begin(3)  # later than the others
    run(turns, 2000, [0, 0, 0, 0])
    steps = [turns.asks(SLOTS, ALL) for _ in range(4 * LONGEST)]
    taken = [turn for turn in steps if turn is not None]
    assert len(taken) == 4
    assert all(turn.all() for turn in taken)


def test_a_sequence_that_is_over_wakes_nobody() -> None:
    turns = begun()
    run(turns, 2000, [0, 0, 0, 0])
    turns.begin(0)
    turns.end(0)
    rest = SLOTS[1:]
    turns.asks(rest, ALL[1:])
    assert sum(turns.asks(rest, ALL[1:]) is not None for _ in range(LONGEST)) <= 1


def test_sequences_get_something_beforehand_now_and_then_though_it_did_not_pay() -> None:
    turns = Turns(4)
    assert turns.begin(0)
    run(turns, 2000, [0, 0, 0, 0])
    assert 5 <= sum(turns.begin(0) for _ in range(80)) <= 20


def test_what_an_answer_must_bring_is_what_its_time_is_worth() -> None:
    def asked(price: float) -> int:
        turns, rng, n = begun(), np.random.default_rng(0), 0
        for _ in range(1000):
            turn = turns.asks(SLOTS, ALL, price)
            if turn is not None:
                n += int(turn.sum())
                turns.made(SLOTS[turn], (rng.random(int(turn.sum())) < 0.05).astype(int))
        return n

    cheap, dear = asked(0.01), asked(2.0)
    assert cheap > 3800
    assert dear < cheap / 2

"""Whether a drafter is worth its time: what it brought, against what the passes make in that time without it.

Counts and milliseconds go in; whether to ask the drafter comes out, for all sequences (`Pace`) or for each (`Turns`). Knows no tokens and
no clock.
"""

from __future__ import annotations

import numpy as np

WINDOW = 8
"""Steps between two verdicts."""
SHARE = 0.02
"""Of the time of all passes, what a drafter that does not pay may take: that bounds how long it rests before it is tried again."""
FADE = 0.5
"""What earlier steps count for at each verdict."""


class Pace:
    """Of one drafter. While it pays it is asked in every step; each time that it does not, it rests twice as long, within bounds."""

    def __init__(self) -> None:
        self.ms = 0.0
        """Its time. It grows as it is spent, also in steps that came to nothing."""
        self._gained = self._others = self._pass_ms = 0.0
        self._left = self._rest = WINDOW
        self._resting = 0

    def wakes(self) -> bool:
        """Whether to ask it in this step."""
        if self._resting:
            self._resting -= 1
            return False
        return True

    def made(self, gained: int, tokens: int, pass_ms: float) -> None:
        """A step in which it was asked made so many tokens, `gained` of them by its drafts, with a pass of `pass_ms` milliseconds.

        It pays while gained / ms >= others / pass_ms: then tokens per second with it are no fewer than without.
        """
        self._gained += gained
        self._others += tokens - gained
        self._pass_ms += pass_ms
        self._left -= 1
        if self._left:
            return
        if self._gained * self._pass_ms >= self._others * self.ms:
            self._rest = WINDOW
        else:
            bound = int(WINDOW * self.ms / (SHARE * self._pass_ms))
            self._resting = min(self._rest, bound)
            self._rest = max(2 * self._resting, WINDOW)
        self._left = WINDOW
        self.ms *= FADE
        self._gained *= FADE
        self._others *= FADE
        self._pass_ms *= FADE


LONGEST_REST = 7
"""Passes in a row for which no draft of a text is looked for."""


def is_unpredictable(hits: int) -> bool:
    """Whether next to nothing of a text's latest tokens was foreseen: of 32 or more, one at the most. `hits`: as in `evidence.Nodes`."""
    if hits < 1 << 32:
        return False
    n = 0
    while hits and n < 3:
        hits &= hits - 1
        n += 1
    return n <= 2


def rest(left: int, last: int, unpredictable: bool) -> tuple[int, int, bool]:
    """Whether no draft of a text is looked for in this pass: the longer the text has not been foreseen, the fewer passes are looked at.

    left: passes for which none will be looked for, last: for how many none was the last time -> (left, last, whether).
    """
    if left > 0:
        return left - 1, last, True
    if not unpredictable:
        return left, 0, False
    last = min(2 * last + 1, LONGEST_REST)
    return last, last, True


LOOK_MS, EACH_MS = 0.2, 0.04
"""What a look into a store of 80 M tokens takes, and what for every sequence in it, on a CPU whose caches a pass has filled with weights.
Constants, so that who drafts without a clock decides the same."""
LEAST, MOST = 0.03, 0.2
"""Tokens that an answer must bring on the average where nobody says what a millisecond is worth, and the most that are asked for."""
WORTH = 3.0
"""Tokens that a store vouched for most, for one that would not have come without it: most of them others vouch for, too. Of foreign code,
HumanEval took 19 for which it did, and 5 tokens more than without it."""
LONGEST = 32
"""Passes from one question about a sequence to the next at the most; a power of two, as all such periods are."""
_OWN, _FADE_ALL = 6.0, 0.995
"""How many of a sequence's own answers its predecessors' count for, and how fast theirs are forgotten."""


class Turns:
    """Of one drafter: the sequences that it is asked about in a step. Where it brings nothing the passes between two questions double;
    where an answer was right it is asked every time. What a sequence begins with is what came of those before it. Sequences that are asked
    about every so many passes are asked about in the same ones: one question about several costs little more, and what lies between costs
    nothing."""

    def __init__(self, n_slots: int) -> None:
        self._period = np.full(n_slots, LONGEST)
        self._due = np.zeros(n_slots, np.bool_)  # its turn came, and has not been taken
        self._gained, self._answers = np.zeros((2, n_slots))
        self._step, self._shortest = 0, LONGEST
        self._least = LEAST
        self._all_gained, self._all_answers, self._n_begun = 2.0 * MOST * _OWN, _OWN, 0
        self._asked: np.ndarray | None = None  # the slots of the last step about which it was asked

    def begin(self, slot: int) -> bool:
        """A new sequence uses this slot. Whether to spend anything on it beforehand."""
        pays = self._all_gained >= self._least * self._all_answers
        self._gained[slot] = self._answers[slot] = 0
        self._period[slot], self._due[slot] = (1, True) if pays else (2, False)
        self._shortest = min(self._shortest, int(self._period[slot]))
        self._n_begun += 1
        return pays or self._n_begun % WINDOW == 0

    def end(self, slot: int) -> None:
        """The sequence is over."""
        self._period[slot], self._due[slot] = LONGEST, False

    def asks(self, slots: np.ndarray, wanted: np.ndarray, price: float = 0.0) -> np.ndarray | None:
        """[B] bool: for which slots [B] it is asked in this step, of those where an answer is `wanted` [B] bool; None: for none. `price`:
        what a millisecond is worth in tokens, 0 where that is not known."""
        self._step += 1
        self._asked = None
        if self._step % self._shortest:
            return None
        due = self._due[slots] | (self._step % self._period[slots] == 0)
        asked = wanted & due
        self._due[slots] = due & ~asked
        self._shortest = self._next_period()
        if not asked.any():
            return None
        if price > 0:
            self._least = min(WORTH * price * (LOOK_MS / int(np.count_nonzero(asked)) + EACH_MS), MOST)
        self._asked = slots[asked]
        return asked

    @property
    def quiet(self) -> int:
        """How many steps follow in which it is asked for none."""
        return self._shortest - 1 - self._step % self._shortest

    def pass_by(self, n_steps: int) -> None:
        """So many steps were made without a question, no more than are `quiet`."""
        self._step += n_steps
        self._asked = None

    def _next_period(self) -> int:
        """In which steps a turn comes: in those that it divides."""
        return 1 if self._due.any() else int(self._period.min())

    def asked(self, slots: np.ndarray) -> np.ndarray | None:
        """[B] bool: for which of the slots [B] it was asked in the last step; None: for none."""
        return None if self._asked is None else np.isin(slots, self._asked)

    def made(self, slots: np.ndarray, gained: np.ndarray) -> None:
        """It was asked about these slots [B], and its answers brought so many tokens [B]."""
        self._gained[slots] += gained
        self._answers[slots] += 1
        self._all_gained = self._all_gained * _FADE_ALL ** len(slots) + float(gained.sum())
        self._all_answers = self._all_answers * _FADE_ALL ** len(slots) + len(slots)
        before = self._all_gained / self._all_answers
        pays = (self._gained[slots] + _OWN * before >= self._least * (self._answers[slots] + _OWN)) | (gained > 0)
        self._period[slots] = np.where(pays, 1, np.minimum(2 * self._period[slots], LONGEST))
        self._shortest = self._next_period()

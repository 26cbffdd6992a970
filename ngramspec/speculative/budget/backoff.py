"""Ask drafters less often while they do not pay. Counts and milliseconds go in; which drafters or sequences to ask comes out.

Three rules, because three costs differ: `DrafterBackoff` for a drafter that takes measurable time for all sequences at once,
`DatastoreSchedule` for a look-up per sequence that costs a known fraction of a millisecond, `update_cooldown` for drafting a sequence at
all. Each doubles its pauses up to a limit. Knows no tokens and no clock.
"""

from __future__ import annotations

import numpy as np

# Steps between two decisions.
WINDOW = 8
# Share of all passes' time that a drafter that does not pay may take; limits how long it pauses before it is tried again.
MAX_TIME_SHARE = 0.02
# The same for a drafter that is there without having been asked for, the model's own head.
OWN_TIME_SHARE = 0.01
# Weight of earlier steps at each decision.
DECAY = 0.5


class DrafterBackoff:
    """Decide in which steps one drafter is asked: in every step while it pays; otherwise after pauses that double, within bounds."""

    def __init__(self, max_time_share: float = MAX_TIME_SHARE) -> None:
        self._max_time_share = max_time_share
        self.ms = 0.0
        """Milliseconds that the drafter has taken. The caller adds to it, also in steps whose pass failed."""
        self._gained = self._other_tokens = self._pass_ms = 0.0
        self._steps_left = self._pause = WINDOW
        self.n_paused_steps = 0
        """How many of the following steps it is not asked in."""

    def should_ask(self) -> bool:
        """Return whether to ask the drafter in this step."""
        if self.n_paused_steps:
            self.n_paused_steps -= 1
            return False
        return True

    def skip_steps(self, n_steps: int) -> None:
        """Count steps that were made without a call of `should_ask`."""
        self.n_paused_steps = max(self.n_paused_steps - n_steps, 0)

    def record_step(self, gained: int, n_tokens: int, pass_ms: float) -> None:
        """Record a step in which it was asked: `n_tokens` tokens, `gained` of them drafted by it, in a pass of `pass_ms` milliseconds.

        It pays while gained / ms >= other tokens / pass_ms: then tokens per second are no fewer with it than without.
        """
        self._gained += gained
        self._other_tokens += n_tokens - gained
        self._pass_ms += pass_ms
        self._steps_left -= 1
        if self._steps_left:
            return
        if self._gained * self._pass_ms >= self._other_tokens * self.ms:
            self._pause = WINDOW
        else:
            bound = int(WINDOW * self.ms / (self._max_time_share * self._pass_ms))
            self.n_paused_steps = min(self._pause, bound)
            self._pause = max(2 * self.n_paused_steps, WINDOW)
        self._steps_left = WINDOW
        self.ms *= DECAY
        self._gained *= DECAY
        self._other_tokens *= DECAY
        self._pass_ms *= DECAY


# Most passes in a row in which an unpredictable sequence is not drafted for.
MAX_COOLDOWN = 7


def is_unpredictable(hit_history: int) -> bool:
    """Return whether at most one of a sequence's latest 32 or more tokens was predicted. `hit_history`: see `features.Nodes`."""
    if hit_history < 1 << 32:
        return False
    n = 0
    while hit_history and n < 3:
        hit_history &= hit_history - 1
        n += 1
    return n <= 2


def update_cooldown(left: int, last: int, unpredictable: bool) -> tuple[int, int, bool]:
    """Return (left, last, whether not to draft for the sequence in this pass). While it stays unpredictable, cooldowns double.

    left: passes of the present cooldown that remain; last: how many the last one had.
    """
    if left > 0:
        return left - 1, last, True
    if not unpredictable:
        return left, 0, False
    last = min(2 * last + 1, MAX_COOLDOWN)
    return last, last, True


# ms of a look-up in a datastore of 80 M tokens, and of each sequence in it, on a CPU whose caches a pass has filled with weights.
# Constants, so that tensor-parallel ranks, which use no clock, decide the same.
SEARCH_MS, SEQUENCE_MS = 0.2, 0.04
# Accepted tokens that a look-up must bring on average: while no threshold is known, and at most.
DEFAULT_MIN_GAIN, HIGHEST_MIN_GAIN = 0.03, 0.2
# Accepted tokens attributed to a datastore per token that no other drafter would have drafted. Measured with foreign code: of 19 tokens on
# HumanEval that were attributed to it, 14 came without it, too.
TOKENS_PER_EXTRA_TOKEN = 3.0
# Most passes between two look-ups for a sequence; a power of two, as all periods are.
MAX_PERIOD = 32
# Weight of earlier sequences' results, in look-ups of the present one; their decay per look-up.
_PRIOR_SEARCHES, _PRIOR_DECAY = 6.0, 0.995


class DatastoreSchedule:
    """Decide for which sequences the datastores are searched in a step.

    The period of a sequence doubles while look-ups bring nothing, and is 1 after one that was right. A new sequence starts with the results
    of earlier ones. Sequences with the same period are searched for in the same steps: one search for several costs little more, and the
    steps between cost nothing.
    """

    def __init__(self, n_slots: int) -> None:
        self._period = np.full(n_slots, MAX_PERIOD)
        self._due = np.zeros(n_slots, np.bool_)  # its step came, but no draft was wanted
        self._gained, self._n_searches = np.zeros((2, n_slots))
        self._step, self._shortest = 0, MAX_PERIOD
        self._min_gain = DEFAULT_MIN_GAIN
        self._all_gained, self._all_searches, self._n_begun = 2.0 * HIGHEST_MIN_GAIN * _PRIOR_SEARCHES, _PRIOR_SEARCHES, 0
        self._searched: np.ndarray | None = None  # the slots of the last step's search

    def begin(self, slot: int) -> bool:
        """Start a sequence in this slot; return whether to spend time on it beforehand (retrieving similar files)."""
        pays = self._all_gained >= self._min_gain * self._all_searches
        self._gained[slot] = self._n_searches[slot] = 0
        self._period[slot], self._due[slot] = (1, True) if pays else (2, False)
        self._shortest = min(self._shortest, int(self._period[slot]))
        self._n_begun += 1
        return pays or self._n_begun % WINDOW == 0

    def end(self, slot: int) -> None:
        """Free the slot."""
        self._period[slot], self._due[slot] = MAX_PERIOD, False

    def choose_slots(self, slots: np.ndarray, wanted: np.ndarray, threshold: float = 0.0) -> np.ndarray | None:
        """Return for which slots [B] to search in this step: [B] bool, or None for none of them.

        wanted [B] bool: whether a draft is wanted; threshold: the speculation threshold in tokens per millisecond, 0 if not known.
        """
        self._step += 1
        self._searched = None
        if self._step % self._shortest:
            return None
        due = self._due[slots] | (self._step % self._period[slots] == 0)
        searched = wanted & due
        self._due[slots] = due & ~searched
        self._shortest = self._find_shortest_period()
        if not searched.any():
            return None
        if threshold > 0:
            ms = SEARCH_MS / int(np.count_nonzero(searched)) + SEQUENCE_MS
            self._min_gain = min(TOKENS_PER_EXTRA_TOKEN * threshold * ms, HIGHEST_MIN_GAIN)
        self._searched = slots[searched]
        return searched

    @property
    def n_quiet_steps(self) -> int:
        """How many of the following steps need no search."""
        return self._shortest - 1 - self._step % self._shortest

    def skip_steps(self, n_steps: int) -> None:
        """Count steps that were made without a call of `choose_slots`, at most `n_quiet_steps`."""
        self._step += n_steps
        self._searched = None

    def _find_shortest_period(self) -> int:
        """Return the period of the steps in which there may be a search."""
        return 1 if self._due.any() else int(self._period.min())

    def get_searched(self, slots: np.ndarray) -> np.ndarray | None:
        """Return which of the slots [B] the last step searched for, if that is not recorded yet: [B] bool, or None for none of them."""
        return None if self._searched is None else np.isin(slots, self._searched)

    def record_gains(self, slots: np.ndarray, gained: np.ndarray) -> None:
        """Record how many accepted tokens [B] the last search, for these slots [B], brought."""
        self._searched = None
        self._gained[slots] += gained
        self._n_searches[slots] += 1
        self._all_gained = self._all_gained * _PRIOR_DECAY ** len(slots) + float(gained.sum())
        self._all_searches = self._all_searches * _PRIOR_DECAY ** len(slots) + len(slots)
        before = self._all_gained / self._all_searches
        pays = (self._gained[slots] + _PRIOR_SEARCHES * before >= self._min_gain * (self._n_searches[slots] + _PRIOR_SEARCHES)) | (
            gained > 0
        )
        self._period[slots] = np.where(pays, 1, np.minimum(2 * self._period[slots], MAX_PERIOD))
        self._shortest = self._find_shortest_period()

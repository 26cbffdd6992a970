"""Whether a drafter is worth its time: what it brought, against what the passes make in that time without it.

Counts and milliseconds go in; whether to ask the drafter comes out. Knows no tokens and no clock.
"""

from __future__ import annotations

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

"""What a millisecond is worth, in tokens, and whether drafts pay for themselves. Knows counts and times; no tokens, no trees, no clock.

A node is bought where the token that it may save is worth the time that its row adds. What a token is worth does not depend on the pass
that makes it: it is what the engine needs for one in the long run (the renewal-reward theorem: the policy that maximises tokens - price ·
milliseconds in every pass, at the price that it then earns, makes most tokens per second). So a pass that carries a prompt, and takes its
time anyway, makes no node cheap.

The governor compares the time that passes took with the time in which the engine would have made the same tokens without drafts. Where
that is less, the price rises until it is not, whatever the drafts' probabilities claim.
"""

from __future__ import annotations

from typing import NamedTuple

MEMORY_MS = 4000.0
"""What is that long ago counts 1/e."""
_PRIOR_MS = 100.0
"""Weight of the assumption that drafts bring nothing."""
_RISE, _FALL, _LEAK, _HIGHEST = 10.0, 12.0, 0.25, 5.0
"""How much faster than in `MEMORY_MS` the bar answers to a loss and to a profit, and forgets, since what it keeps out is not heard of
again; and how high it can rise."""


class Price:
    """Of one engine."""

    def __init__(self) -> None:
        self.bar = 1.0
        """By how much the governor raises the price."""
        self._all = _Account()
        self._decoding = _Account()  # passes without a part of a prompt
        self._disturbed = _Account()  # those without drafts: as they were foretold, and took

    @property
    def gain(self) -> float:
        """Speed over that of the same engine without drafts, lately."""
        return self._all.ratio

    def of(self, n_seqs: int, plain_ms: float) -> float:
        """Tokens per millisecond, where a pass without drafts makes `n_seqs` tokens in `plain_ms`."""
        return self.bar * max(self._decoding.ratio, 1.0) * n_seqs / plain_ms

    def took(self, n_seqs: int, made: int, ms: float, foretold_ms: Foretold, *, has_prompt: bool) -> None:
        """A pass made `made` tokens for `n_seqs` sequences in `ms`."""
        saved = (made - n_seqs) * foretold_ms.plain / max(n_seqs, 1)
        slower = 1.0 / self._disturbed.ratio  # than foretold, what happens on this machine besides
        if has_prompt:  # passes of that size are not foretold well; what rows add to them is
            worth = ms + (saved - (foretold_ms.drafted - foretold_ms.base)) * slower
        else:
            worth = (foretold_ms.base + saved) * slower
            if foretold_ms.nodes == 0:
                self._disturbed.add(foretold_ms.drafted, ms)
            self._decoding.add(worth, ms)
        self._all.add(worth, ms)
        lost = (ms - worth) / MEMORY_MS
        moved = self.bar * (1.0 + lost * (_RISE if lost > 0 else _FALL)) - (self.bar - 1.0) * _LEAK * ms / MEMORY_MS
        self.bar = min(max(moved, 1.0), _HIGHEST)


class Foretold(NamedTuple):
    """Of a pass: milliseconds, and its draft nodes."""

    drafted: float
    """Of the pass as it is."""
    base: float
    """Of the same without drafts, which nobody has looked for."""
    plain: float
    """Of one without drafts and without parts of prompts."""
    nodes: int


class _Account:
    """Two sums of milliseconds that fade as time goes by, and their ratio."""

    def __init__(self) -> None:
        self._a = self._b = _PRIOR_MS

    @property
    def ratio(self) -> float:
        return self._a / self._b

    def add(self, a: float, b: float) -> None:
        """The second is how long it took."""
        fade = max(1.0 - b / MEMORY_MS, 0.5)
        self._a = self._a * fade + a + _PRIOR_MS * (1.0 - fade)
        self._b = self._b * fade + b + _PRIOR_MS * (1.0 - fade)

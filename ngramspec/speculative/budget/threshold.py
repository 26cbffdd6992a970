"""Set the speculation threshold: the tokens per millisecond that a draft node must earn. Knows counts and times; no tokens, trees or clock.

A node is drafted if the token that it may save is worth the time that its row adds. The value of a token does not depend on the pass that
makes it: it is the time per token of the engine in the long run (the renewal-reward theorem: the policy that maximises
tokens - threshold * milliseconds in every pass, at the rate that it then achieves, makes the most tokens per second). So a pass that
carries a prompt, and takes long anyway, does not make nodes cheap. But neither is the prompts' time saved by a token: one that would else
have been made beside a part of a prompt saves the time of its row alone, and that is its value as far as tokens are made there.

The governor compares the time that passes took with the time in which the engine would have made the same tokens without drafts. While
speculation loses, it raises the threshold, whatever probabilities the drafts claim.
"""

from __future__ import annotations

from typing import NamedTuple

# Chosen on the simulated devices of tests/speculative/test_step_timer.py: within 3 % of the best policy that knows the device.

# ms: measurements fade by 1/e in this time.
MEMORY_MS = 4000.0
# ms: the same of where tokens are made, beside parts of prompts or not, which changes with every request.
_LOAD_MEMORY_MS = 16_000.0
# ms: weight of the prior that drafts change nothing.
_PRIOR_MS = 100.0
# The governor's gains for a loss and a profit of MEMORY_MS; how far it returns to 1 in MEMORY_MS, since drafts that it keeps out are not
# measured; and its upper limit.
_RISE, _FALL, _LEAK, _MAX_GOVERNOR = 10.0, 12.0, 0.25, 5.0
_LEAST_BESIDE = 0.01  # of a token's worth alone, that one has beside parts of prompts: their cost is predicted, at times as 0 or less


class SpeculationThreshold:
    """The threshold of one engine, updated after every step."""

    def __init__(self) -> None:
        self.governor = 1.0
        """Factor by which the governor raises the threshold, 1 to 5."""
        self._whole = _FadingRatio()
        self._decoding = _FadingRatio()  # passes without a part of a prompt
        self._undrafted = _FadingRatio()  # passes without drafts: predicted against measured time
        self._rows = self._rows_beside = self._ms_beside = 0.0  # of sequences that decode, fading; those beside parts of prompts

    @property
    def gain(self) -> float:
        """Recent speed, relative to the same engine without drafts."""
        return self._whole.ratio

    def get_threshold(self, n_seqs: int, plain_ms: float) -> float:
        """Return tokens per millisecond, if a pass without drafts makes `n_seqs` tokens in `plain_ms`."""
        return self.governor / self._get_token_ms(plain_ms / (max(self._decoding.ratio, 1.0) * n_seqs))

    def _get_token_ms(self, alone_ms: float) -> float:
        """Return what a token is worth, if it takes `alone_ms` in a pass without parts of prompts."""
        if self._rows_beside < 1.0:
            return alone_ms
        beside_ms = min(max(self._ms_beside / self._rows_beside, _LEAST_BESIDE * alone_ms), alone_ms)
        return alone_ms + (beside_ms - alone_ms) * self._rows_beside / self._rows

    def record_step(self, n_seqs: int, n_tokens: int, ms: float, predicted: PredictedPass, *, has_prompt: bool) -> None:
        """Update the threshold with a pass that made `n_tokens` tokens for `n_seqs` sequences in `ms`."""
        fade = max(1.0 - ms / _LOAD_MEMORY_MS, 0.5)
        self._rows = self._rows * fade + (predicted.n_beside if has_prompt else n_seqs)
        self._rows_beside = self._rows_beside * fade + predicted.n_beside
        self._ms_beside = self._ms_beside * fade + predicted.beside_ms
        plain_ms = predicted.plain_ms / max(n_seqs, 1)
        saved = (n_tokens - n_seqs) * self._get_token_ms(plain_ms)
        slower = 1.0 / self._undrafted.ratio  # than predicted, by what else runs on this machine
        if has_prompt:  # the time of large passes is not predicted well; what rows add to them is
            baseline_ms = ms + (saved - (predicted.drafted_ms - predicted.base_ms)) * slower
        else:
            baseline_ms = (predicted.base_ms + saved) * slower
            if predicted.n_nodes == 0:
                self._undrafted.add(predicted.drafted_ms, ms)
            self._decoding.add((predicted.base_ms + (n_tokens - n_seqs) * plain_ms) * slower, ms)
        self._whole.add(baseline_ms, ms)
        lost = (ms - baseline_ms) / MEMORY_MS
        moved = self.governor * (1.0 + lost * (_RISE if lost > 0 else _FALL)) - (self.governor - 1.0) * _LEAK * ms / MEMORY_MS
        self.governor = min(max(moved, 1.0), _MAX_GOVERNOR)


class PredictedPass(NamedTuple):
    """What the cost model predicted of one pass, and what the pass carries."""

    drafted_ms: float  # of the pass as it is
    base_ms: float  # of the same pass, had no draft been looked for
    plain_ms: float  # of a pass without drafts and without parts of prompts
    n_nodes: int  # draft nodes
    n_beside: int = 0  # sequences that decode beside parts of prompts
    beside_ms: float = 0.0  # what their rows add to the pass


class _FadingRatio:
    """The ratio of two sums of milliseconds that fade with time."""

    def __init__(self) -> None:
        self._a = self._b = _PRIOR_MS

    @property
    def ratio(self) -> float:
        return self._a / self._b

    def add(self, a: float, b: float) -> None:
        """Add `a` and `b` milliseconds; `b` is also the time that has passed."""
        fade = max(1.0 - b / MEMORY_MS, 0.5)
        self._a = self._a * fade + a + _PRIOR_MS * (1.0 - fade)
        self._b = self._b * fade + b + _PRIOR_MS * (1.0 - fade)

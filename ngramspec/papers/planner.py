"""What speculation is worth before it is tried, and what it was worth: the formulas of Leviathan et al. (arXiv 2211.17192).

Acceptance rates, draft lengths and costs enter as plain numbers, expected tokens and factors leave. `estimate_run` reads the figures of a
run from the JSON documents of `ngramspec complete --json` and `benchmarks.decode`. Knows no model and no engine.

Throughout, `alpha` is the chance that a draft token is accepted once those before it were, in [0, 1]; `gamma` the draft's length,
0 or more; `c` the time of drafting one token over that of a pass of the target, 0 or more; `c_hat` the same in operations.
All functions raise ValueError for values outside these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST = 64  # longest draft that `find_best_gamma` looks at: where drafting is free, longer is always better


def _check(alpha: float = 0.0, gamma: float = 0.0, c: float = 0.0, c_hat: float = 0.0) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be 0 to 1, got {alpha}")
    for name, value in (("gamma", gamma), ("c", c), ("c_hat", c_hat)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or more, got {value}")


def compute_expected_tokens(alpha: float, gamma: float) -> float:
    """Return tokens that a pass is expected to make: (1 - alpha^(gamma+1)) / (1 - alpha), gamma + 1 for alpha 1 (equation 1)."""
    _check(alpha, gamma)
    if alpha in (0, 1):
        return 1 + gamma * alpha
    return -math.expm1((gamma + 1) * math.log(alpha)) / (1 - alpha)


def compute_walltime_factor(alpha: float, gamma: float, c: float = 0.0) -> float:
    """Return how much sooner the text is there, if a pass over gamma + 1 rows takes as long as one over a single row (theorem 3.8)."""
    _check(c=c)
    return compute_expected_tokens(alpha, gamma) / (gamma * c + 1)


def compute_operations_factor(alpha: float, gamma: float, c_hat: float = 0.0) -> float:
    """Return how many times the arithmetic operations it takes (theorem 3.11)."""
    _check(c_hat=c_hat)
    return (gamma * c_hat + gamma + 1) / compute_expected_tokens(alpha, gamma)


def find_best_gamma(alpha: float, c: float, most: int = MOST) -> int:
    """Return the draft length, 0 to `most`, with the greatest walltime factor; of several the shortest (section 3.5)."""
    _check(gamma=most)
    return max(range(most + 1), key=lambda gamma: compute_walltime_factor(alpha, gamma, c))


def find_alpha(tokens_per_pass: float, gamma: float) -> float:
    """Return the alpha at which drafts of length gamma > 0 are expected to make this many tokens a pass; 0 or 1 if none does."""
    _check(gamma=gamma)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if compute_expected_tokens(middle, gamma) < tokens_per_pass else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run says of itself."""

    tokens_per_pass: float
    alpha: float
    reach: tuple[float, ...]
    """[d]: share of the passes whose draft was d + 1 deep or deeper. Empty: only the mean length is known."""
    gamma: float
    """Mean length of a draft, passes without one included."""
    seconds_per_token: float | None
    speedup: float | None
    """The factor over the same without speculation, if the document has one."""

    def expect_tokens(self) -> float:
        """Return equation 1 at the run's alpha, as a mean over the lengths that its drafts had."""
        if not self.reach:
            return compute_expected_tokens(self.alpha, self.gamma)
        return 1 + sum(share * self.alpha ** (d + 1) for d, share in enumerate(self.reach))

    def predict_walltime_factor(self, c: float) -> float:
        """Return theorem 3.8 for the run."""
        _check(c=c)
        return self.expect_tokens() / (self.gamma * c + 1)

    def estimate_cost(self, speedup: float) -> float:
        """Return the c at which theorem 3.8 gives this speedup for the tokens per pass that were measured.

        It is a draft token's share of the drafting and of the wider pass; 0 if it is free, or nothing was drafted.
        """
        return max(0.0, (self.tokens_per_pass / speedup - 1) / self.gamma) if self.gamma else 0.0


def estimate_run(document: Mapping[str, Any]) -> RunFigures:
    """Return a run's figures from the document of `ngramspec complete --json` or of `benchmarks.decode`.

    Where acceptance is told by depth, alpha is that of a node behind an accepted one: accepted nodes over places where one could have been.
    A draft that ended there although drafts of other passes went on counts as refused. A level of a tree is one place. Else alpha is what
    equation 1 needs for the tokens per pass that were measured. Raises ValueError where the document has neither.
    """
    stats = document.get("stats", document)
    try:
        if stats.get("drafted_by_depth") is not None and stats.get("passes"):
            tokens, passes = int(stats["tokens"]), int(stats["passes"])
            alpha, reach = _estimate_by_depth(stats["accepted_by_depth"], stats["drafted_by_depth"], int(stats["drafts"]), passes)
            tokens_per_pass, gamma = tokens / passes, sum(reach)
        else:
            tokens, reach = int(document["tokens"]), ()
            tokens_per_pass, gamma = float(document["tokens_per_pass"]), float(document["rows_per_pass"])
            alpha = find_alpha(tokens_per_pass, gamma) if gamma else 0.0
        seconds = float(document["duration_s"]) / tokens if document.get("duration_s") else None
        speedup = float(document["speedup"]) if document.get("speedup") else None
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            "no figures of a run: neither stats with tokens, passes, drafts, drafted_by_depth and accepted_by_depth, as of `ngramspec "
            "complete --json`, nor tokens, tokens_per_pass and rows_per_pass, as of benchmarks.decode "
            f"({type(error).__name__}: {error})"
        ) from error
    return RunFigures(tokens_per_pass, alpha, reach, gamma, seconds, speedup)


def _estimate_by_depth(accepted: Sequence[int], drafted: Sequence[int], drafts: int, passes: int) -> tuple[float, tuple[float, ...]]:
    """Return alpha and `RunFigures.reach` from nodes per depth."""
    reached = [min(n, drafts) for n in drafted]  # passes; exact for chains
    places = [min(n, before) for n, before in zip(reached, [drafts, *accepted], strict=False)]
    return sum(accepted) / sum(places) if sum(places) else 0.0, tuple(n / passes for n in reached)

"""What each source's evidence promised against what came of it, and the correction that follows from it. Knows no weights and no tokens.

Raw probabilities and the model's verdicts on them enter, as sources speak up (`judge`); corrected probabilities leave (`odds_against`).
Texts that are sampled and those that are not are counted apart: what the model holds likeliest is not always what it draws.
A source's odds are multiplied by (made + t) / (expected + t) and by the same of what was missed, over its latest `WINDOW` expected tokens,
where t is the trust in what it promises. The same is done once more per level of its probability, starting from what the source's own
correction gives, so that what is rarely seen borrows from its source. Trust falls where what was made contradicts what was expected by
more than chance explains: then the counts speak by themselves.

A source that turns is noticed by two cumulative sums, one for each direction (Page, "Continuous Inspection Schemes", 1954): when `SURPRISE`
more tokens were missed, or made, than chance explains, only what was seen since it turned goes on to count. The candidates of every
judged node are counted, not only those that were drafted: a source whose nodes are not worth a row any more goes on being judged, and can
come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import Reliability

LEVELS = (0.0025, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
"""Bounds of the levels of a probability."""
N_LEVELS = len(LEVELS) + 1
MAX_SOURCES = 16
KINDS = 2
"""Of texts: greedy, sampled."""
WINDOW = 200.0
"""Expected tokens that a correction remembers."""
SOURCE_TRUST, LEVEL_TRUST = 20.0, 10.0
"""Tokens' worth of trust in a source as it is, and in a level of it."""
LEAST_TRUST = 0.1
SURPRISE = 6.0
LEAST = 0.002
"""Raw probability below which a candidate is not counted: nothing is drafted there."""

_MADE, _EXPECTED, _MISSED, _EXPECTED_MISSED, _VARIANCE, _FACTOR = range(6)
_COUNTS = 5
_RUNS = (6, 12)
"""Each: the cumulative sum, then the first columns since it was 0."""
_COLUMNS = 18


class Calibration(NamedTuple):
    """Of one proposer: shared by all its sequences. No token is in it."""

    by_source: np.ndarray  # [KINDS, MAX_SOURCES, _COLUMNS] float64
    by_level: np.ndarray  # [KINDS, MAX_SOURCES, N_LEVELS, _COLUMNS] float64
    verified: np.ndarray  # [MAX_SOURCES, N_LEVELS, 3] float64: nodes, the sum of their path probabilities, nodes that were accepted


def new_calibration() -> Calibration:
    """That corrects nothing yet."""
    by_source, by_level = np.zeros((KINDS, MAX_SOURCES, _COLUMNS)), np.zeros((KINDS, MAX_SOURCES, N_LEVELS, _COLUMNS))
    by_source[..., _FACTOR] = by_level[..., _FACTOR] = 1.0
    return Calibration(by_source, by_level, np.zeros((MAX_SOURCES, N_LEVELS, 3)))


@njit(cache=True, nogil=True, inline="always")
def level_of(p):
    level = 0
    for bound in LEVELS:
        level += p >= bound
    return level


@njit(cache=True, nogil=True, inline="always")
def odds_against(calibration, kind, source, p):
    """The corrected odds that a candidate is wrong to which its evidence gave probability p, in a text of this kind."""
    return (1.0 - p) / p * calibration.by_source[kind, source, _FACTOR] * calibration.by_level[kind, source, level_of(p), _FACTOR]


@njit(cache=True, nogil=True, inline="always")
def _add(cell, at, p, made):
    cell[at + _MADE] += made
    cell[at + _EXPECTED] += p
    cell[at + _MISSED] += 1.0 - made
    cell[at + _EXPECTED_MISSED] += 1.0 - p
    cell[at + _VARIANCE] += p * (1.0 - p)


@njit(cache=True, nogil=True)
def _count(cell, p, believed, made, trust):
    """Count a candidate that came with p and was believed at `believed`, and correct the factor -> whether its source has turned."""
    fade = 1.0 - max(p, made) / WINDOW
    for i in range(_COUNTS):
        cell[i] *= fade
    _add(cell, 0, p, made)
    turned, excess = False, believed - made
    for run in _RUNS:
        cell[run] += excess - believed * (1.0 - believed)
        excess = -excess
        if cell[run] <= 0.0:
            cell[run : run + 1 + _COUNTS] = 0.0
            continue
        _add(cell, run + 1, p, made)
        if cell[run] > SURPRISE:
            cell[:_COUNTS] = cell[run + 1 : run + 1 + _COUNTS]
            cell[_RUNS[0] :] = 0.0
            turned = True
            break
    contradiction = (cell[_MADE] - cell[_EXPECTED]) ** 2 / (4.0 * (cell[_VARIANCE] + 1.0))  # 1 at two standard deviations
    t = LEAST_TRUST + (trust - LEAST_TRUST) / (1.0 + contradiction**3)
    cell[_FACTOR] = (cell[_EXPECTED] + t) / (cell[_MADE] + t) * (cell[_MISSED] + t) / (cell[_EXPECTED_MISSED] + t)
    return turned


@njit(cache=True, nogil=True)
def judge(calibration, kind, source, p, made):
    """The model has judged a candidate to which the evidence gave probability p; made: 1.0 or 0.0."""
    if p < LEAST:
        return
    whole, level = calibration.by_source[kind, source], calibration.by_level[kind, source, level_of(p)]
    against = (1.0 - p) / p * whole[_FACTOR]
    from_source = 1.0 / (1.0 + against)
    believed = 1.0 / (1.0 + against * level[_FACTOR])
    if _count(whole, p, from_source, made, SOURCE_TRUST):  # it starts over, and so do its levels
        calibration.by_level[kind, source] = 0.0
        calibration.by_level[kind, source, :, _FACTOR] = 1.0
    else:
        _count(level, from_source, believed, made, LEVEL_TRUST)


@njit(cache=True, nogil=True, inline="always")
def verify(calibration, source, p, accepted):
    """A drafted node of path probability p was in a pass (accepted 0.0), or on the accepted path of it (1.0, in another call)."""
    cell = calibration.verified[source, level_of(p)]
    if accepted:
        cell[2] += 1.0
    else:
        cell[0] += 1.0
        cell[1] += p


def reliability(calibration: Calibration, source_names: Sequence[str]) -> list[Reliability]:
    """A row per source and level."""
    bounds = (0.0, *LEVELS, 1.0)
    return [
        Reliability(name, bounds[level], bounds[level + 1], int(nodes), expected, int(made))
        for name, verified in zip(source_names, calibration.verified.tolist(), strict=False)
        for level, (nodes, expected, made) in enumerate(verified)
    ]

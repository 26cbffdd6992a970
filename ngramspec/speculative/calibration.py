"""Correct each source's predicted acceptance by its observed acceptance. Knows no weights and no tokens.

`record_candidate` takes a predicted probability and whether the model chose the token; `get_odds_against` returns corrected odds. Greedy
and sampled sequences are counted apart: the model's argmax is not always what it samples.

A source's odds are multiplied by (made + t) / (expected + t), and by the same ratio of misses, over its latest `WINDOW_TOKENS` expected
tokens; t is the prior weight of the prediction. The same is done per level of probability, starting from the source's correction, so that
rare levels borrow from their source. t falls when the counts contradict the prediction by more than chance explains.

Two cumulative sums, one for each direction (Page, "Continuous Inspection Schemes", 1954), detect that a source has changed: once
`CUSUM_LIMIT` more tokens were missed, or made, than chance explains, only the counts since the change are kept. All candidates of verified
nodes are counted, not only the drafted ones, so that a source whose nodes are no longer drafted can come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import Reliability

# The numbers were chosen by hand; tests/speculative/test_calibration.py checks the behaviour that they must give.

# Bounds between the levels of a probability.
LEVELS = (0.0025, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
N_LEVELS = len(LEVELS) + 1
MAX_SOURCES = 16
# Greedy sequences, sampled sequences.
SAMPLING_KINDS = 2
# Expected tokens over which counts fade by 1/e.
WINDOW_TOKENS = 200.0
# Prior weight, in tokens, of a source's prediction and of one level of it; the least that a contradiction leaves.
SOURCE_TRUST, LEVEL_TRUST, MIN_TRUST = 20.0, 10.0, 0.1
# Tokens beyond chance after which a source has changed.
CUSUM_LIMIT = 6.0
# Raw probability below which a candidate is not counted: nothing is drafted there.
MIN_PROB = 0.002

# Columns of a cell. Each of `_RUNS` begins a cumulative sum, followed by the first five columns counted since that sum was 0.
_MADE, _EXPECTED, _MISSED, _EXPECTED_MISSED, _VARIANCE, _FACTOR = range(6)
_COUNTS = 5
_RUNS = (6, 12)
_COLUMNS = 18


class Calibration(NamedTuple):
    """The counts of one proposer, shared by all its sequences. No token is in them."""

    by_source: np.ndarray  # [KINDS, MAX_SOURCES, _COLUMNS] float64
    by_level: np.ndarray  # [KINDS, MAX_SOURCES, N_LEVELS, _COLUMNS] float64
    verified: np.ndarray  # [MAX_SOURCES, N_LEVELS, 3] float64: nodes, the sum of their path probabilities, nodes that were accepted


def new_calibration() -> Calibration:
    """Return counts that correct nothing yet."""
    by_source, by_level = np.zeros((SAMPLING_KINDS, MAX_SOURCES, _COLUMNS)), np.zeros((SAMPLING_KINDS, MAX_SOURCES, N_LEVELS, _COLUMNS))
    by_source[..., _FACTOR] = by_level[..., _FACTOR] = 1.0
    return Calibration(by_source, by_level, np.zeros((MAX_SOURCES, N_LEVELS, 3)))


@njit(cache=True, nogil=True, forceinline=True)
def find_level(p):
    """Return the index of the level that probability p is in."""
    level = 0
    for bound in LEVELS:
        level += p >= bound
    return level


@njit(cache=True, nogil=True, forceinline=True)
def get_odds_against(calibration, kind, source, p):
    """Return the corrected odds that a candidate with raw probability p is wrong. kind: 0 greedy, 1 sampled."""
    return (1.0 - p) / p * calibration.by_source[kind, source, _FACTOR] * calibration.by_level[kind, source, find_level(p), _FACTOR]


@njit(cache=True, nogil=True, forceinline=True)
def _add_outcome(cell, at, p, made):
    cell[at + _MADE] += made
    cell[at + _EXPECTED] += p
    cell[at + _MISSED] += 1.0 - made
    cell[at + _EXPECTED_MISSED] += 1.0 - p
    cell[at + _VARIANCE] += p * (1.0 - p)


@njit(cache=True, nogil=True)
def _count_outcome(cell, p, believed, made, trust):
    """Count a candidate predicted at p and corrected to `believed`, and update the factor -> whether the source has changed."""
    fade = 1.0 - max(p, made) / WINDOW_TOKENS
    for i in range(_COUNTS):
        cell[i] *= fade
    _add_outcome(cell, 0, p, made)
    changed, excess = False, believed - made
    for run in _RUNS:
        cell[run] += excess - believed * (1.0 - believed)
        excess = -excess
        if cell[run] <= 0.0:
            cell[run : run + 1 + _COUNTS] = 0.0
            continue
        _add_outcome(cell, run + 1, p, made)
        if cell[run] > CUSUM_LIMIT:
            for i in range(_COUNTS):  # copying a slice would compile an error message of other shapes, for 2 s
                cell[i] = cell[run + 1 + i]
            cell[_RUNS[0] :] = 0.0
            changed = True
            break
    contradiction = (cell[_MADE] - cell[_EXPECTED]) ** 2 / (4.0 * (cell[_VARIANCE] + 1.0))  # 1 at two standard deviations
    t = MIN_TRUST + (trust - MIN_TRUST) / (1.0 + contradiction**3)
    cell[_FACTOR] = (cell[_EXPECTED] + t) / (cell[_MADE] + t) * (cell[_MISSED] + t) / (cell[_EXPECTED_MISSED] + t)
    return changed


@njit(cache=True, nogil=True)
def record_candidate(calibration, kind, source, p, made):
    """Count a candidate of a verified node: its raw probability p, and whether the model chose it (made: 1.0 or 0.0)."""
    if p < MIN_PROB:
        return
    whole, level = calibration.by_source[kind, source], calibration.by_level[kind, source, find_level(p)]
    against = (1.0 - p) / p * whole[_FACTOR]
    from_source = 1.0 / (1.0 + against)
    believed = 1.0 / (1.0 + against * level[_FACTOR])
    if _count_outcome(whole, p, from_source, made, SOURCE_TRUST):  # the source starts over, and so do its levels
        calibration.by_level[kind, source] = 0.0
        calibration.by_level[kind, source, :, _FACTOR] = 1.0
    else:
        _count_outcome(level, from_source, believed, made, LEVEL_TRUST)


@njit(cache=True, nogil=True, forceinline=True)
def count_node(calibration, source, p, accepted):
    """Count a drafted node of path probability p (accepted 0.0), or that such a node was accepted (1.0, in a second call)."""
    cell = calibration.verified[source, find_level(p)]
    if accepted:
        cell[2] += 1.0
    else:
        cell[0] += 1.0
        cell[1] += p


def list_reliability(calibration: Calibration, source_names: Sequence[str]) -> list[Reliability]:
    """Return a row per source and level: how many nodes were predicted, and how many were accepted."""
    bounds = (0.0, *LEVELS, 1.0)
    return [
        Reliability(name, bounds[level], bounds[level + 1], int(nodes), expected, int(made))
        for name, verified in zip(source_names, calibration.verified.tolist(), strict=False)
        for level, (nodes, expected, made) in enumerate(verified)
    ]

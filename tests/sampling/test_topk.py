"""The likeliest tokens of rows against sorting."""

from __future__ import annotations

import numpy as np
import pytest

from ngramspec.outputs import KEPT
from ngramspec.sampling.topk import find_topk, rank_rows


def expected(row: np.ndarray, n: int) -> tuple[list[int], list[float]]:
    known = [(-x, i) for i, x in enumerate(row.tolist()) if x == x]
    best = sorted(known)[:n]
    return [i for _, i in best] + [-1] * (n - len(best)), [-x for x, _ in best] + [-np.inf] * (n - len(best))


def rows(kind: str, vocab_size: int) -> np.ndarray:
    rng = np.random.default_rng(vocab_size)
    made = rng.standard_normal((9, vocab_size)).astype(np.float32)
    if kind == "ties":
        made = made.round()
    if kind == "rising":
        made.sort()
    if kind == "not numbers":
        made[rng.random(made.shape) < 0.1] = np.nan
        made[3] = np.nan
    if kind == "few":
        made[rng.random(made.shape) < 0.98] = -np.inf
        made[4] = -np.inf
    if kind == "infinite":
        made[rng.random(made.shape) < 0.02] = np.inf
    if kind == "zeros":
        made[:] = 0
        made[5, 0] = -0.0
    return made


KINDS = ("plain", "ties", "rising", "not numbers", "few", "infinite", "zeros")


@pytest.mark.parametrize("vocab_size", [1, 5, 8, 127, 128, 129, 300, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_the_first_of_the_sorted_row(kind: str, vocab_size: int) -> None:
    logits = rows(kind, vocab_size)
    tokens, values = find_topk(logits)
    for i, row in enumerate(logits):
        assert (tokens[i].tolist(), values[i].tolist()) == expected(row, KEPT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_greedy_choice_is_numpys_where_it_is_finite(kind: str) -> None:
    logits = rows(kind, 300)
    greedy, best, _ = rank_rows(logits, 1)
    for i, row in enumerate(logits):
        at = int(row.argmax())
        assert greedy[i] == (at if np.isfinite(row[at]) else -1)
        assert [best[i, 0]] == expected(row, 1)[0]

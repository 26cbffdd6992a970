"""Rejection sampling, p and q known: what comes out is distributed as p, and accepted as often as theory has it; lenience and its bound.

Chi-square tests are at the 1 % level over 100,000 drafts, each drawn anew, with fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
from scipy.stats import chi2

from ngramspec.outputs import DraftTree
from ngramspec.sampling.rejection import accept_leniently, reject
from ngramspec.sampling.sampler import Sampler, uniform_bits
from ngramspec.sampling_params import SamplingParams

N, V = 100_000, 8
ROOT = V
ALMOST_ONE = 1 - 2.0**-53


def shares(mass: np.ndarray) -> np.ndarray:
    return mass / mass.sum(-1, keepdims=True)


def distributions(seed: int) -> np.ndarray:
    """[V + 1, V] int64: one after each token and, last, one at the root. Random, each with a token that it never gives."""
    rng = np.random.default_rng(seed)
    weights = (rng.dirichlet(np.full(V, 0.8), V + 1) * 2**40).astype(np.int64)
    weights[np.arange(V + 1), rng.integers(V, size=V + 1)] = 0
    return weights


WEIGHTS = distributions(1)
P, Q, R = (shares(distributions(seed)) for seed in (1, 2, 3))


def sample(rng: np.random.Generator, q: np.ndarray) -> np.ndarray:
    """One token per row of q [n, V]."""
    return (rng.random((len(q), 1)) >= q.cumsum(1)[:, :-1]).sum(1)


def without(q: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """q [N, V] or [V], where each row's token has been left out."""
    rest = np.broadcast_to(q, (N, V)).copy()
    rest[np.arange(N), tokens] = 0
    return shares(rest)


class Drafts:
    """N trees of one shape. `draw` adds a node: its token is drawn from q [N, V] or [V]."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.parents: list[int] = []
        self.tokens: list[np.ndarray] = []
        self.drawn_from: list[np.ndarray] = []

    def draw(self, parent: int, q: np.ndarray) -> np.ndarray:
        q = np.broadcast_to(q, (N, V))
        self.parents.append(parent)
        self.tokens.append(sample(self.rng, q))
        self.drawn_from.append(q)
        return self.tokens[-1]

    def accept(self, lenience: float = 1.0) -> tuple[np.ndarray, float]:
        """The first two tokens of every text [N, 2], and how often the first one was drafted."""
        n = len(self.parents)
        parents, probs, sources = np.array(self.parents, np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8)
        certain = all((q == 1).any(1).all() for q in self.drawn_from)
        tokens, uniforms = np.stack(self.tokens, 1).astype(np.int32), self.rng.random((N, 3, 1 + n))

        def walk(i: int) -> list[tuple[int, int]]:
            drawn_from = None if certain else [q[i] for q in self.drawn_from]
            tree = DraftTree(tokens[i], parents, probs, sources, None, drawn_from)
            steps = reject(tree, lambda row: WEIGHTS[tree.tokens[row - 1] if row else ROOT], lambda d, k: uniforms[i, d, k], lenience)
            return list(islice(steps, 2))

        walks = [walk(i) for i in range(N)]
        first = np.array([steps[0][0] for steps in walks])
        second = np.array([steps[1][0] if len(steps) > 1 else -1 for steps in walks])  # -1: left to the next pass
        second = np.where(second < 0, sample(self.rng, P[first]), second)
        return np.stack([first, second], 1), float(np.mean([steps[0][1] >= 0 for steps in walks]))


def chain(drafts: Drafts) -> None:
    drafts.draw(0, Q[drafts.draw(-1, Q[ROOT])])


def siblings_with_replacement(drafts: Drafts) -> None:
    for _ in range(3):
        drafts.draw(-1, Q[ROOT])


def siblings_without_replacement(drafts: Drafts) -> None:
    rest = without(Q[ROOT], drafts.draw(-1, Q[ROOT]))
    drafts.draw(-1, without(rest, drafts.draw(-1, rest)))


def two_drafters(drafts: Drafts) -> None:
    drafts.draw(-1, Q[ROOT])
    drafts.draw(-1, R[ROOT])


def two_levels(drafts: Drafts) -> None:
    a, b = drafts.draw(-1, Q[ROOT]), drafts.draw(-1, Q[ROOT])
    drafts.draw(0, without(R[a], drafts.draw(0, R[a])))
    drafts.draw(1, Q[b])
    drafts.draw(1, R[b])


def certain(drafts: Drafts) -> None:
    """Two siblings that are always the same, and one after the first."""
    for parent, token in ((-1, 0), (-1, 3), (0, 2)):
        drafts.draw(parent, np.eye(V)[token])


def fits(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Pearson's chi-square at the 1 % level. Cells of fewer than 5 are taken together; what is never expected must not come."""
    if counts[expected == 0].any():
        return False
    few = expected < 5
    counts, expected = np.append(counts[~few], counts[few].sum()), np.append(expected[~few], expected[few].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return bool(((counts - expected) ** 2 / expected).sum() < chi2.ppf(0.99, len(expected) - 1))


def rate(p: np.ndarray, *qs: np.ndarray) -> float:
    """How often one of the siblings drawn from these is accepted: the i-th one with sum(min(p, q)), p the residual before it."""
    refused = 1.0
    for q in qs:
        refused *= 1 - np.minimum(p, q).sum()
        p = shares(np.maximum(p - q, 0))
    return 1 - refused


@pytest.mark.parametrize(
    ("draft", "qs"),
    [
        (chain, [Q[ROOT]]),
        (siblings_with_replacement, [Q[ROOT]] * 3),
        (siblings_without_replacement, None),
        (two_drafters, [Q[ROOT], R[ROOT]]),
        (two_levels, [Q[ROOT]] * 2),
        (certain, [np.eye(V)[0], np.eye(V)[3]]),
    ],
)
def test_tokens_are_distributed_as_the_models_own(draft: Callable[[Drafts], None], qs: list[np.ndarray] | None) -> None:
    drafts = Drafts()
    draft(drafts)
    texts, accepted = drafts.accept()
    assert fits(np.bincount(texts[:, 0], minlength=V), N * P[ROOT])
    assert fits(np.bincount(texts[:, 0] * V + texts[:, 1], minlength=V * V), N * (P[ROOT][:, None] * P[:V]).ravel())
    if qs is not None:
        assert accepted == pytest.approx(rate(P[ROOT], *qs), rel=0.01)


@pytest.mark.parametrize("n_siblings", [1, 2])
def test_lenience_accepts_more_and_keeps_its_bound(n_siblings: int) -> None:
    p, q, lenience = P[ROOT], Q[ROOT], 0.5
    drafts = Drafts()
    for _ in range(n_siblings):
        drafts.draw(-1, q)
    texts, accepted = drafts.accept(lenience)
    counts, most = np.bincount(texts[:, 0], minlength=V), N * p / lenience
    assert accepted > 1.02 * rate(p, *[q] * n_siblings)
    assert not fits(counts, N * p)
    assert (counts <= most + 4 * np.sqrt(most)).all()
    if n_siblings == 1:
        drafted = np.minimum(p / lenience, q)
        assert accepted == pytest.approx(drafted.sum(), rel=0.01)
        assert fits(counts, N * (drafted + (1 - drafted.sum()) * shares(np.maximum(p - lenience * q, 0))))


def tree(tokens: list[int], parents: list[int], drawn_from: list[np.ndarray] | None = None) -> DraftTree:
    n = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32), np.array(parents, np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8), None, drawn_from
    )


def test_a_draft_from_p_is_always_accepted() -> None:
    """Also where u is the largest there is, and q has been rounded."""
    for token in np.flatnonzero(WEIGHTS[ROOT]).tolist():
        drafted = tree([token], [-1], [P[ROOT] * (1 + 1e-15)])
        assert next(reject(drafted, lambda row: WEIGHTS[ROOT], lambda d, k: ALMOST_ONE)) == (token, 0)


def test_siblings_that_q_cannot_give_are_passed_over() -> None:
    """After both tokens of q a third one without replacement is no draw; the residual gives the token."""
    p, one, other, none = np.array([1, 1, 2, 4]), np.array([0.5, 0.5, 0, 0]), np.array([0, 1.0, 0, 0]), np.zeros(4)
    drafted = tree([0, 1, 2], [-1] * 3, [one, other, none])
    assert list(reject(drafted, lambda row: p, lambda d, k: 0.9)) == [(3, -1)]


def test_rows_of_the_path_alone_are_asked_for_and_only_as_far_as_the_text_goes() -> None:
    rows, us = [], []

    def target(row: int) -> np.ndarray:
        rows.append(row)
        return np.full(4, 5)

    def uniform(depth: int, k: int) -> float:
        us.append((depth, k))
        return ALMOST_ONE if k == 1 else 0.0

    q = np.eye(4)
    drafted = tree([0, 1, 2, 3, 3], [-1, -1, 0, 1, 1], [q[0], q[1], q[2], q[3], q[3]])
    steps = reject(drafted, target, uniform)
    assert next(steps) == (1, 1)
    assert (rows, us) == ([0], [(0, 1), (0, 2)])
    assert list(steps) == [(0, -1)]
    assert (rows, us[2:]) == ([0, 2], [(1, 1), (1, 2), (1, 0)])


def test_without_a_draft_the_token_is_the_requests_own_pick() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), index=1, seed=5, prompt=np.zeros(1, np.int64), vocab_size=V, stop_ids=frozenset())
    for position in range(200):
        u = uniform_bits(5, 1, position) / 2**53
        assert list(reject(None, lambda row: WEIGHTS[ROOT], lambda depth, k, u=u: u)) == [(sampler.draw(WEIGHTS[ROOT], position, 0), -1)]  # type: ignore[misc]


def test_greedy_lenience_takes_the_likeliest_child_that_is_near_enough() -> None:
    root, after = np.log(np.array([[0.4, 0.12, 0.24, 0.24], [0.1, 0.2, 0.3, 0.4]], np.float32))
    drafted = tree([1, 3, 2, 2, 0], [-1, -1, -1, 2, 2])
    rows: dict[int, np.ndarray] = {0: root, 3: after, 4: root}  # after node 2, and after its child
    assert list(accept_leniently(drafted, rows.__getitem__, 0.59)) == [(2, 2), (2, 3), (0, -1)]  # of 2 and 3 at the root, the lower id
    assert list(accept_leniently(drafted, rows.__getitem__, 0.61)) == [(0, -1)]
    assert list(accept_leniently(tree([1], [-1]), rows.__getitem__, 0.31)) == [(0, -1)]
    assert list(accept_leniently(tree([1, 1], [-1, -1]), {0: root, 1: after}.__getitem__, 0.29)) == [(1, 0), (3, -1)]
    assert list(accept_leniently(None, rows.__getitem__, 0.1)) == [(0, -1)]

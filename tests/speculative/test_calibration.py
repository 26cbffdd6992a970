"""Sources that promise more than they keep, and those that keep more: what stays in the tree, and what passes make of it."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from ngramspec.outputs import Reliability
from ngramspec.speculative import Candidates, TreeProposer
from ngramspec.speculative.calibration import (
    LEVELS,
    count_node,
    find_level,
    get_odds_against,
    list_reliability,
    new_calibration,
    record_candidate,
)
from ngramspec.speculative.drafter import DraftOptions, DraftParams

VOCAB = 1000
SLOT = np.zeros(1, np.int32)
COST_MS = 1e6 * (1 + 0.04 * np.arange(-1.0, 600))
"""A row costs 4 % of a pass. Passes are so long that no drafter's own time can put it to rest."""


def written(seed: int, n: int = 4000) -> np.ndarray:
    """Phrases that come again and noise between them [n] int32: the tables alone foresee two thirds of it."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, 400, rng.integers(3, 12)) for _ in range(60)]
    parts = [phrases[rng.integers(60)] if rng.random() < 0.7 else rng.integers(0, 400, 3) for _ in range(n)]
    return np.concatenate(parts)[:n].astype(np.int32)


class Promising:
    """Always as certain: drafts the text itself where `right` says so of the draft's number, else what is not in it."""

    name = "promising"

    def __init__(self, text: np.ndarray, right: Callable[[int], bool], p: float) -> None:
        self.text, self.right, self.p = text, right, p
        self.known = self.drafts = 0
        self.rng = np.random.default_rng(5)

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self.known = len(tokens)

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        tokens = self.text[self.known : self.known + 8]
        if not self.right(self.drafts):
            tokens = self.rng.integers(400, VOCAB, len(tokens)).astype(np.int32)
        self.drafts += 1
        depth = np.arange(len(tokens))
        return [Candidates(tokens, (depth - 1).astype(np.int32), self.p ** (depth + 1.0))]

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        self.known += len(accepted)

    def end(self, seq: int) -> None: ...


class Run:
    """A text, written pass by pass."""

    def __init__(self, text: np.ndarray, source: Promising | None = None, *, correct: bool = True, likely: bool = False) -> None:
        """`correct=False`: the calibration is forgotten before each pass. `likely`: the model's candidates are kept, and never right."""
        self.proposer = TreeProposer(DraftOptions(vocab_size=VOCAB, max_seqs=1, recycle=likely), drafters=[source] if source else [])
        self.proposer.begin(0, text[:300])
        rng, n = np.random.default_rng(7), 300
        ends, costs, theirs, self.trees, self.paths = [], [], [], [], []
        who = self.proposer.source_names.index("recycled" if likely else "promising") if likely or source else -1
        while n < len(text):
            if not correct:
                for kept, fresh in zip(self.proposer._calibration, new_calibration(), strict=True):
                    kept[:] = fresh
            tree = self.proposer.propose(SLOT, np.array([len(text) - n], np.int32), COST_MS, 1, 500)[0]
            child = {key: i for i, key in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
            path: list[int] = []
            while (node := child.get((path[-1] if path else -1, int(text[min(n + len(path), len(text) - 1)])))) is not None:
                path.append(node)
            path = path[: len(text) - n]
            new = text[n : n + len(path) + 1]
            if likely:
                tokens = rng.integers(400, VOCAB, (len(new), 8)).astype(np.int32)
                before = np.append(text[n - 2 : n], new)
                logits = np.tile(np.arange(0.0, -40.0, -5.0, np.float32), (len(new), 1))
                self.proposer.record_topk(before[: len(new)], before[1:][: len(new)], tokens, logits)
            self.proposer.observe(SLOT, [new], [np.array(path, np.int32)])
            n += len(new)
            ends.append(n)
            costs.append(COST_MS[1 + len(tree)])
            theirs.append(int((tree.sources == who).sum()))
            self.trees.append(tree)
            self.paths.append(path)
        self.ends, self.costs, self.theirs = np.array(ends), np.array(costs), np.array(theirs)

    def rate(self, start: int) -> float:
        """Tokens per cost from this token of the text on."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        return float(self.ends[-1] - self.ends[first]) / float(self.costs[first + 1 :].sum())


@pytest.fixture(scope="module", params=[0, 1])
def text(request: pytest.FixtureRequest) -> np.ndarray:
    return written(request.param)


@pytest.fixture(scope="module")
def without(text: np.ndarray) -> Run:
    return Run(text)


def share(run: Run, after: int) -> float:
    """The source's nodes per pass, from pass `after` on."""
    return float(run.theirs[after:].mean())


@pytest.mark.parametrize("p", [1.0, 0.9])
@pytest.mark.parametrize("until", [0, 200])
def test_a_source_that_is_wrong_is_gone_within_64_drafts(text: np.ndarray, without: Run, until: int, p: float) -> None:
    """Wrong from the start, or after 200 drafts that were right; certain all the time."""
    run = Run(text, Promising(text, lambda draft: draft < until, p))
    if until:
        assert share(run, 20) > 1
        assert run.theirs[100:200].mean() > 6
    after = until + 64
    assert share(run, after) <= 0.02
    assert run.rate(int(run.ends[after])) >= 0.98 * without.rate(int(run.ends[after]))
    uncorrected = Run(text, Promising(text, lambda draft: draft < until, p), correct=False)
    assert share(uncorrected, after) > 0.02


@pytest.mark.parametrize("p", [1.0, 0.9])
def test_a_source_that_becomes_right_comes_back(text: np.ndarray, without: Run, p: float) -> None:
    run = Run(text, Promising(text, lambda draft: draft >= 200, p))
    assert run.theirs[100:200].mean() < 0.1
    assert share(run, 264) > 6
    assert run.rate(int(run.ends[264])) > 2 * without.rate(int(run.ends[264]))


def test_candidates_of_the_model_that_never_come_true_are_left(text: np.ndarray, without: Run) -> None:
    run = Run(text, likely=True)
    assert share(run, 64) <= 0.02
    assert run.rate(int(run.ends[64])) >= 0.98 * without.rate(int(run.ends[64]))


def test_the_same_is_drafted_from_the_same(text: np.ndarray) -> None:
    one, other = (Run(text[:1000], Promising(text, lambda draft: draft % 50 < 25, 0.9)) for _ in range(2))
    assert [tree.tokens.tolist() for tree in one.trees] == [tree.tokens.tolist() for tree in other.trees]
    assert [tree.probs.tolist() for tree in one.trees] == [tree.probs.tolist() for tree in other.trees]


def test_reliability_counts_the_verified_nodes(text: np.ndarray, without: Run) -> None:
    found: dict[tuple[str, int], list[float]] = {}
    for tree, path in zip(without.trees[:-1], without.paths[:-1], strict=True):
        for i, (source, p) in enumerate(zip(tree.sources.tolist(), tree.probs.tolist(), strict=True)):
            row = found.setdefault((without.proposer.source_names[source], find_level(p)), [0, 0.0, 0])
            row[0] += 1
            row[1] += p
            row[2] += i in path
    last, taken = without.trees[-1], without.paths[-1]
    rows = without.proposer.list_reliability()
    assert sum(row.nodes for row in rows) == sum(row[0] for row in found.values()) + len(last)
    assert sum(row.made for row in rows) == sum(row[2] for row in found.values()) + len(taken)
    assert sum(row.expected for row in rows) == pytest.approx(sum(row[1] for row in found.values()) + last.probs.sum(), rel=1e-6)
    for row in rows:
        assert row.low * row.nodes <= row.expected <= row.high * row.nodes


def believed(calibration, source: int, p: float) -> float:
    return 1 / (1 + get_odds_against(calibration, 0, source, p))


@pytest.mark.parametrize("kept", [0.5, 0.8, 1.0, 1.25])
def test_corrected_probabilities_come_true(kept: float) -> None:
    """A source that keeps this share of what it promises, whatever that is."""
    rng, calibration = np.random.default_rng(3), new_calibration()
    promises = rng.choice([0.03, 0.1, 0.3, 0.7], 20_000)
    made = rng.random(len(promises)) < kept * promises
    expected = np.zeros(len(promises))
    for i, p in enumerate(promises.tolist()):
        expected[i] = believed(calibration, 1, p)
        record_candidate(calibration, 0, 1, p, float(made[i]))
    for p in np.unique(promises):
        late = np.flatnonzero(promises == p)[500:]
        assert abs(expected[late].sum() - made[late].sum()) < 3 * made[late].sum() ** 0.5, "three standard deviations"
    assert believed(calibration, 2, 0.3) == pytest.approx(0.3), "another source's promises are its own"


def test_an_honest_source_is_left_alone() -> None:
    """Chance alone moves a probability little, and never throws it over."""
    rng, calibration = np.random.default_rng(4), new_calibration()
    promises = rng.choice([0.01, 0.1, 0.5, 0.9, 0.98], 20_000)
    odds = np.zeros(len(promises))
    for i, p in enumerate(promises.tolist()):
        odds[i] = (1 / believed(calibration, 0, p) - 1) / ((1 - p) / p)
        record_candidate(calibration, 0, 0, p, float(rng.random() < p))
    assert np.quantile(np.abs(np.log(odds)), 0.95) < 0.5
    assert np.abs(np.log(odds)).max() < 1.5


def test_texts_that_are_sampled_are_counted_apart() -> None:
    """What a source misses where tokens are drawn says nothing of texts of the likeliest ones."""
    calibration = new_calibration()
    for _ in range(200):
        record_candidate(calibration, 1, 2, 0.9, 0.0)
    assert get_odds_against(calibration, 1, 2, 0.9) > 4 * get_odds_against(calibration, 0, 2, 0.9)
    assert believed(calibration, 2, 0.9) == pytest.approx(0.9)


def test_temperature_takes_from_confidence() -> None:
    """Of the same text what was foreseen with certainty is less likely where tokens are drawn, the more the hotter; doubts stay."""
    text = np.tile(np.arange(40, dtype=np.int32), 12)

    def probs(temperature: float) -> np.ndarray:
        proposer = TreeProposer(DraftOptions(vocab_size=VOCAB, max_seqs=1))
        proposer.begin(0, text, DraftParams(temperature=temperature))
        return proposer.propose(SLOT, np.array([8], np.int32), COST_MS, 1, 8)[0].probs

    greedy, warm, hot = probs(0.0), probs(0.3), probs(1.0)
    assert (greedy[:4] > 0.7).all()
    assert (hot[:4] < warm[:4]).all()
    assert (warm[:4] < greedy[:4]).all()


def test_reliability_names_sources_and_levels() -> None:
    calibration = new_calibration()
    count_node(calibration, 1, 0.3, 0.0)
    count_node(calibration, 1, 0.4, 0.0)
    count_node(calibration, 1, 0.4, 1.0)
    rows = list_reliability(calibration, ["a", "b"])
    assert [row for row in rows if row.nodes] == [Reliability("b", 0.2, 0.5, 2, pytest.approx(0.7), 1)]
    assert [(row.source, row.low) for row in rows] == [(name, low) for name in "ab" for low in (0.0, *LEVELS)]
    assert all(row.low == 0.0 or find_level(row.low) == find_level(np.nextafter(row.high, 0)) for row in rows)

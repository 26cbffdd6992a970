"""N-gram models as drafters: the distribution against counts by hand, and chains that are drawn from the q they claim."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import chi2

from ngramspec.papers.count_drafter import Counts, NgramModel
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative.drafter import CanDraw, Drafter, NeedsModel, NeedsSequenceInfo, SequenceInfo

V = 8
TEXT = np.array([0, 1, 2, 0, 1, 3, 0, 1, 2, 4], np.int32)


def model(order: int) -> NgramModel:
    made = NgramModel(order, V)
    made.extend(TEXT[:4])
    made.extend(TEXT[4:])
    return made


def drafter(order: int, params: SamplingParams, *, seed: int = 0, length: int = 4, draws: bool = True) -> Counts:
    """With the text in slot 3, of which 8 tokens are the prompt."""
    counts = Counts(order, length)
    counts.draws = draws
    counts.bind(SimpleNamespace(vocab_size=V))
    counts.begin(3, TEXT)
    counts.attach(3, SequenceInfo(Sampler(params, index=0, seed=seed, prompt=TEXT[:8], vocab_size=V, stop_ids=frozenset()), 8, 100))
    return counts


def test_unigram_and_bigram_by_hand() -> None:
    unigram = (np.array([3, 3, 2, 1, 1, 0, 0, 0]) + 5 / 8) / (10 + 5)
    assert model(1).get_distribution(TEXT) == pytest.approx(unigram)
    after_one = (np.array([0, 0, 2, 1, 0, 0, 0, 0]) + 2 * unigram) / (3 + 2)
    assert model(2).get_distribution(np.array([0, 1])) == pytest.approx(after_one)
    assert model(3).get_distribution(np.array([1])) == pytest.approx(after_one)  # the context is no longer
    assert model(3).get_distribution(np.array([0, 1])) == pytest.approx((np.array([0, 0, 2, 1, 0, 0, 0, 0]) + 2 * after_one) / 5)
    assert model(3).get_distribution(np.array([3, 1])) == pytest.approx(after_one)  # 3 1 has not occurred
    assert model(2).get_distribution(np.array([4])) == pytest.approx(unigram)  # nothing has come after 4 yet
    assert NgramModel(2, V).get_distribution(TEXT) == pytest.approx(np.full(V, 1 / V))


@pytest.mark.parametrize("order", [1, 2, 3, 6])
def test_every_token_is_possible_and_the_sum_is_one(order: int) -> None:
    text = np.random.default_rng(order).integers(0, 5, 300).astype(np.int32)
    made = NgramModel(order, V)
    for n in range(0, 300, 7):
        made.extend(text[n : n + 7])
        q = made.get_distribution(made.tokens)
        assert q.sum() == pytest.approx(1, abs=1e-12)
        assert q.min() > 0


def test_a_chain_is_drawn_from_the_distribution_it_claims() -> None:
    """The first two tokens over 8,000 seeds, by chi-square at the 1 % level; temperature 1 leaves the model's q as it is."""
    n, made = 8_000, model(2)
    seen = np.zeros((V, V))
    for seed in range(n):
        (chain,) = drafter(2, SamplingParams(temperature=1.0), seed=seed, length=2).propose([3], 9)
        seen[tuple(chain.tokens)] += 1
    assert chain.parents.tolist() == [-1, 0]
    assert chain.drawn_from is not None
    q = [made.get_distribution(TEXT), made.get_distribution(chain.tokens[:1])]
    assert chain.drawn_from[0] == pytest.approx(q[0], rel=1e-5)
    assert chain.drawn_from[1] == pytest.approx(q[1], rel=1e-5)
    assert chain.probs == pytest.approx(np.cumprod([q[0][chain.tokens[0]], q[1][chain.tokens[1]]]), rel=1e-5)
    expected = n * q[0][:, None] * np.array([made.get_distribution(np.array([x])) for x in range(V)])
    assert expected.min() > 5
    assert ((seen - expected) ** 2 / expected).sum() < chi2.ppf(0.99, V * V - 1)


def test_q_is_what_the_request_would_sample_from() -> None:
    """Top-k and temperature shape it; penalties grow along the draft and leave the request's own picker alone."""
    params = SamplingParams(temperature=0.5, top_k=3, presence_penalty=2.0)
    counts = drafter(1, params)
    (chain,) = counts.propose([3], 4)
    assert chain.drawn_from is not None
    sampler = Sampler(params, index=0, seed=0, prompt=TEXT[:8], vocab_size=V, stop_ids=frozenset())
    row = np.log(model(1).get_distribution(TEXT)).astype(np.float32)
    for position, (token, q) in enumerate(zip(chain.tokens.tolist(), chain.drawn_from, strict=True), 2):
        weights = sampler.compute_weights(row, position)
        assert (q == weights / weights.sum()).all()
        assert np.count_nonzero(q) == 3
        assert token == sampler.draw(weights, position, 1)
        sampler.accept(token)
    assert (counts.propose([3], 4)[0].tokens == chain.tokens).all()


@pytest.mark.parametrize(("temperature", "draws"), [(0.0, True), (1.0, False)])
def test_a_chain_that_is_not_drawn_is_the_likeliest(temperature: float, draws: bool) -> None:
    counts = drafter(3, SamplingParams(temperature=temperature), draws=draws)
    counts.observe(3, np.array([0, 1], np.int32), np.empty(0, np.int32))
    (chain,) = counts.propose([3], 3)
    assert chain.drawn_from is None
    assert chain.tokens.tolist() == [2, 0, 1]
    assert counts.propose([3], 1)[0].tokens.tolist() == [2]


def test_the_protocol_and_the_end() -> None:
    counts = drafter(2, SamplingParams())
    assert isinstance(counts, Drafter)
    assert isinstance(counts, NeedsModel)
    assert isinstance(counts, NeedsSequenceInfo)
    assert isinstance(counts, CanDraw)
    counts.end(3)
    assert not counts._models
    assert not counts._infos
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="1 or more"):
            Counts(*wrong)

"""Picking: the generator's published vectors, the distribution, every adjustment, and every parameter at and beyond its bounds."""

from typing import Any

import numpy as np
import pytest
from fair_time import assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from ngramspec.sampling.numeric import exp
from ngramspec.sampling.sampler import (
    NotFiniteError,
    Sampler,
    _compute_philox,
    _draw_index,
    _scale_by_fraction,
    encode_top_p,
    needs_only_logits,
    token_logprob,
    uniform_bits,
)
from ngramspec.sampling_params import SamplingParams

V = 50


def sampler(
    index: int = 0, seed: int = 0, prompt: tuple[int, ...] = (), stop_ids: frozenset[int] = frozenset(), vocab: int = V, **params: Any
) -> Sampler:
    return Sampler(SamplingParams(**params), index=index, seed=seed, prompt=np.array(prompt, np.int64), vocab_size=vocab, stop_ids=stop_ids)


def row(seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(V) * scale).astype(np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ],
)
def test_philox_published_vectors(counter: list[int], key: list[int], expected: list[int]) -> None:
    """Known answers of philox4x32-10 from Random123."""
    assert [int(word) for word in _compute_philox(*map(np.uint64, [*counter, *key]))] == expected


def test_uniform_is_uniform_and_keyed() -> None:
    draws = [uniform_bits(seed, sample, t) / 2**53 for seed in (0, 2**64 - 1) for sample in range(3) for t in range(1000)]
    assert len(set(draws)) == len(draws)
    assert min(draws) >= 0
    assert max(draws) < 1
    assert kstest(draws, "uniform").pvalue > 0.001


def test_exp_is_accurate() -> None:
    x = np.linspace(-86.9, 87.9, 4001).astype(np.float32)
    got = np.array([exp(v) for v in x], np.float64)
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1).max() < 3e-7


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = np.zeros(V, np.float32)
    logits[[9, 30]] = 1.0
    assert sampler().sample(logits, 0) == 9


@pytest.mark.parametrize("params", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.7, "min_p": 0.05}])
def test_sampled_distribution(params: dict[str, Any]) -> None:
    """Chi-square at the 0.1 % level of 20,000 draws against the distribution computed in float64 by sorting."""
    logits, temperature = row(3), 0.7
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    order = np.lexsort((np.arange(V), -p))
    keep = np.zeros(V, bool)
    keep[order[: params.get("top_k", V)]] = True
    q = np.where(keep, p, 0)
    if "top_p" in params:
        before = np.cumsum(q[order]) - q[order]
        keep[order[before >= params["top_p"] * q.sum()]] = False
    keep &= p >= params.get("min_p", 0)
    q = np.where(keep, p, 0)
    q /= q.sum()
    chooser = sampler(seed=4, temperature=temperature, **params)
    counts = np.bincount([chooser.sample(logits, t) for t in range(20000)], minlength=V)
    assert (counts[q == 0] == 0).all()
    if (q > 0).sum() > 1:
        assert chisquare(counts[q > 0], q[q > 0] * counts.sum()).pvalue > 0.001


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), k=st.integers(1, V + 5), scale=st.sampled_from([0.0, 0.01, 3.0, 200.0]))
def test_top_k_keeps_exactly_the_first_k(seed: int, k: int, scale: float) -> None:
    logits = np.round(row(seed, scale), 1)  # with ties
    kept = np.flatnonzero(sampler(temperature=5.0, top_k=k).compute_weights(logits, 0))
    x = (logits.astype(np.float64) - logits.max()) / 5
    expected = [i for i in np.lexsort((np.arange(V), -logits))[:k] if np.exp(x[i]) * 2**40 > 1]  # less likely ones weigh nothing
    assert sorted(expected) == kept.tolist()


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([1e-6, 0.1, 1.0, 100.0]),
    top_k=st.sampled_from([0, 1, 3, V]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1 - 2**-53, 1.0]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    flat=st.booleans(),
)
def test_weights_are_the_sorted_definition_in_integers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, flat: bool
) -> None:
    """Against Python's own integers, and the pick by a plain running sum: exactly, with ties and banned tokens."""
    logits = np.round(row(seed, 1.0 if flat else 4.0), 1)
    logits[seed % V] = -np.inf
    whole = sampler(temperature=temperature).compute_weights(logits, 0).tolist()
    exact = np.exp((logits.astype(np.float64) - logits.max()) / np.float64(np.float32(temperature))) * 2**40
    assert np.allclose(whole, exact, rtol=1e-5, atol=1)
    held, total = 0, sum(whole[i] for i in sorted(range(V), key=lambda i: (-logits[i], i))[: top_k or V])
    expected = [0] * V
    for i in sorted(range(V), key=lambda i: (-logits[i], i))[: top_k or V]:
        if held < max(1, total * encode_top_p(top_p) >> 53):
            held += whole[i]
            expected[i] = whole[i] if whole[i] >= min_p * 2**40 else 0
    chooser = sampler(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, index=1)
    assert chooser.compute_weights(logits, 0).tolist() == expected
    goal = sum(expected) * uniform_bits(seed, 1, 7) >> 53
    token = next(i for i in range(V) if sum(expected[: i + 1]) > goal)
    assert chooser.sample(logits, 7) == token


@given(st.integers(0, 2**62 - 1), st.integers(0, 2**53))
def test_part_is_exact(total: int, fraction: int) -> None:
    assert _scale_by_fraction(total, fraction) == total * fraction >> 53


@given(st.lists(st.sampled_from([0, 1, 5, 2**40]), min_size=1, max_size=3000).filter(any), st.integers(0, 2**53 - 1))
def test_draw_is_the_inverse_of_the_running_sum(weights: list[int], u: int) -> None:
    goal, running = sum(weights) * u >> 53, np.cumsum(weights)
    assert _draw_index(np.array(weights, np.int64), u) == np.flatnonzero(running > goal)[0]


def test_top_p_of_one_token() -> None:
    chooser = sampler(temperature=1.0, top_p=1e-9)
    assert {chooser.sample(row(), t) for t in range(50)} == {int(row().argmax())}


def test_penalties_count_the_output_and_repetition_the_prompt_too() -> None:
    chooser = sampler(prompt=(1, 2), repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    for token in (2, 3, 3):
        chooser.accept(token)
    logits = np.full(V, 4.0, np.float32)
    logits[1] = -4.0
    adjusted = chooser.adjust_logits(logits, 3)
    assert adjusted[:5].tolist() == [4.0, -8.0, 2.0 - 0.75, 2.0 - 1.0, 4.0]
    assert logits[2] == 4.0


def test_bias_and_ban() -> None:
    logits = row()
    best = int(logits.argmax())
    assert sampler(logit_bias={best: -100}).sample(logits, 0) != best
    assert sampler(logit_bias={11: 100}).sample(logits, 0) == 11
    assert sampler(logit_bias={V + 3: 100}).sample(logits, 0) == best


def test_min_tokens_bans_stops_until_then() -> None:
    logits = row()
    best = int(logits.argmax())
    chooser = sampler(min_tokens=2, stop_ids=frozenset({best}))
    assert [chooser.sample(logits, t) == best for t in range(4)] == [False, False, True, True]


def test_logprobs_are_the_models_own() -> None:
    logits = row(1)
    got = token_logprob(logits, 17, 3)
    reference = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert got.logprob == pytest.approx(reference[17])
    assert [i for i, _ in got.top] == np.argsort(-logits)[:3].tolist()
    assert token_logprob(logits, 17, -1).top == token_logprob(logits, 17, len(logits)).top


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_probabilities_after_sampling_are_those_that_are_drawn_from(temperature: float) -> None:
    logits = row(4)
    each = sampler(temperature=temperature, top_k=5, logit_bias={3: -100}, logprobs=9, post_sampling_probs=True)
    token = each.sample(logits, 0)
    got = each.score(logits, 0, token)
    assert got is not None
    shares = {token: 1.0}
    if temperature:
        weights = each.compute_weights(logits, 0)
        shares = {int(i): weights[i] / weights.sum() for i in np.flatnonzero(weights)}
    assert {i: np.exp(logprob) for i, logprob in got.top} == pytest.approx(shares)
    assert np.exp(got.logprob) == pytest.approx(shares[token])
    assert not each.scores_few
    assert not each.needs_only_logits


def test_log_probabilities_of_the_tokens_that_were_asked_for() -> None:
    logits = row(5)
    each = sampler(logprobs=1, logprob_token_ids=[7, 3])
    got, usual = each.score(logits, 0, 17), token_logprob(logits, 17, V)
    assert got is not None
    assert got.top == [(i, dict(usual.top)[i]) for i in (7, 3)]
    assert (got.logprob, usual.top[got.rank - 1][0]) == (usual.logprob, 17)
    assert not each.scores_few


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_a_number(temperature: float) -> None:
    one, infinite = row(), row()
    one[V - 1], infinite[3] = np.nan, np.inf
    for logits in (np.full(V, np.nan, np.float32), np.full(V, -np.inf, np.float32), one, infinite):
        with pytest.raises(NotFiniteError):
            sampler(temperature=temperature).sample(logits, 0)


def test_what_a_device_can_pick() -> None:
    assert needs_only_logits(SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, seed=3))
    for other in ({"logit_bias": {3: 1.0}}, {"min_tokens": 1}, {"logprobs": 0}, {"presence_penalty": 0.1}, {"repetition_penalty": 1.1}):
        assert not sampler(**other).needs_only_logits


BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31, 2**63, 1.5, True, None, "3"]),
    ("min_tokens", [0, 128], [-1, 129, 0.5]),
    ("temperature", [0, 0.0, 1e-300, 1e-6, 100], [-0.1, 100.1, float("nan"), float("inf"), "hot"]),
    ("top_k", [-(2**31) + 1, -1, 0, 1, 2**31 - 1], [-(2**31), 2**31, 1.5]),
    ("top_p", [0, 1e-9, 1.0, 1], [-0.1, 1.01, float("nan")]),
    ("min_p", [0, 1], [-0.1, 1.1, float("nan")]),
    ("repetition_penalty", [1e-3, 100], [5e-324, 1e-9, 0, -1, 100.1, float("inf")]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1, float("nan")]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1, float("nan")]),
    ("seed", [None, -(2**63), -1, 0, 2**64 - 1], [-(2**63) - 1, 2**64, 1.5]),
    ("n", [1, 128], [0, 129, -1]),
    ("logprobs", [None, -1, 0, 100], [-2, 101]),
    ("stop", ["x", ["a", "b"], ("a",) * 64, ()], ["", ["a", ""], ["a"] * 65, [1], 5]),
    ("stop_token_ids", [[0], (5, 2**31 - 1), [np.int32(5)]], [[-1], [2**31], [1.5], [True], ["1"], [3, None], 3]),
    ("logit_bias", [{}, {0: -100, 5: 100}], [{0: 100.1}, {-1: 0}, {0: float("nan")}, {"0": 1}, [1]]),
    ("ignore_eos", [True, False], [1, None]),
]


def test_a_million_token_ids_are_checked_at_once() -> None:
    """A server checks them in the loop that serves everybody."""
    ids = [7] * 1_000_000
    assert_within(0.5, lambda: SamplingParams(allowed_token_ids=ids))


@pytest.mark.parametrize(("name", "good", "bad"), BOUNDS, ids=[b[0] for b in BOUNDS])
def test_bounds(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        SamplingParams(**{name: value})
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            SamplingParams(**{name: value})

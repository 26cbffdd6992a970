"""Statistics of a request: vLLM's names, and figures that agree with each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.outputs import Choice, Completion, Stats
from ngramspec.server.response_stats import count_predicted, describe_speculation, describe_timings


def completion(*choices: Stats, sources: list[str | None] | None = None, **facts: Any) -> Completion:
    made = Completion([1] * 10, [Choice(i, stats=stats, draft_sources=sources or []) for i, stats in enumerate(choices)], 0, "bitwise")
    for name, value in facts.items():
        setattr(made, name, value)
    return made


@st.composite
def measured(draw: st.DrawFn) -> Stats:
    """What passes with drafts (a chain each) add up to."""
    stats = Stats()
    for drafted in draw(st.lists(st.integers(0, 5), max_size=8)):
        accepted = draw(st.integers(0, drafted))
        one = Stats(passes=1, tokens=accepted + 1)
        if drafted:
            one.drafts, one.drafted, one.accepted = 1, drafted, accepted
            one.accepted_lengths = [0] * accepted + [1]
            one.drafted_by_depth, one.accepted_by_depth = [1] * drafted, [1] * accepted
            one.drafted_by_source, one.accepted_by_source = {"ngram": drafted}, {"ngram": accepted} if accepted else {}
            one.expected_by_source = {"ngram": drafted / 4}
        stats.add(one)
    return stats


@given(each=st.lists(measured(), min_size=1, max_size=4))
def test_the_histogram_agrees_with_the_sums(each: list[Stats]) -> None:
    found = describe_speculation([completion(*each)], "detailed")
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"]
    assert sum(k * n for k, n in enumerate(histogram)) == found["num_accepted_draft_tokens"]
    assert len(histogram) == found["num_spec_tokens"] + 1
    steps, drafted = found["num_spec_steps"], found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == (1 + found["num_accepted_draft_tokens"] / steps if steps else 1)
    assert found["draft_acceptance_rate"] == (found["num_accepted_draft_tokens"] / drafted if drafted else 0)
    for counts in (list(found["by_source"].values()), found["by_position"]):
        assert sum(each["num_draft_tokens"] for each in counts) == drafted
        assert sum(each["num_accepted_draft_tokens"] for each in counts) == found["num_accepted_draft_tokens"]
    assert all(row["num_expected_draft_tokens"] == row["num_draft_tokens"] / 4 for row in found["by_source"].values())
    assert describe_speculation([completion(stats) for stats in each], "detailed") == found
    summary = describe_speculation([completion(*each)], "summary")
    assert summary == {name: value for name, value in found.items() if not name.startswith("by_")}


def test_adding_up_changes_nothing_of_what_is_added() -> None:
    one = Stats(drafts=1, accepted_lengths=[0, 1], accepted=1, drafted=2)
    both = Stats.sum([one, one])
    assert (both.drafts, both.accepted_lengths) == (2, [0, 2])
    assert (one.drafts, one.accepted_lengths) == (1, [0, 1])


def test_predicted_tokens() -> None:
    stats = Stats(drafted=9, accepted=4, drafted_by_source={"prediction": 7, "ngram": 2}, accepted_by_source={"prediction": 3, "ngram": 1})
    sources = ["prediction", None, "prediction", "ngram", "prediction", "datastore:a.py:3"]
    assert count_predicted([completion(stats, sources=sources)]) == (3, 4)
    assert count_predicted([completion(Stats())]) == (0, 0)


def test_timings() -> None:
    stats = Stats(tokens=21, drafts=3, drafted=12, accepted=6)
    found = describe_timings(completion(stats, queued_s=0.5, ttft_s=1.5, duration_s=3.5, cached_tokens=6))
    assert found == {
        "cache_n": 6,
        "prompt_n": 4,
        "prompt_ms": 1000,
        "prompt_per_token_ms": 250,
        "prompt_per_second": 4,
        "predicted_n": 21,
        "predicted_ms": 2000,
        "predicted_per_token_ms": 100,  # of the tokens after the first
        "predicted_per_second": 10,
        "draft_n": 12,
        "draft_n_accepted": 6,
    }


@pytest.mark.parametrize("facts", [{}, {"duration_s": 1.0, "queued_s": 1.0}, {"cached_tokens": 10, "ttft_s": 0.1, "duration_s": 0.1}])
def test_timings_of_next_to_nothing_are_finite(facts: dict[str, float]) -> None:
    found = describe_timings(completion(Stats(), **facts))
    assert all(value >= 0 for value in found.values())
    assert "draft_n" not in found

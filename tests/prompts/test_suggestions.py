"""What is left of a suggestion while somebody types along it."""

from __future__ import annotations

import pytest

from ngramspec.prompts.suggestions import MAX_TENANTS, PER_TENANT, TAIL_CHARS, Suggestions

BEFORE, AFTER, TEXT = "def area(w, h):\n    ret", "\n\nprint(area(2, 3))\n", "urn w * h\n"


@pytest.fixture
def suggestions() -> Suggestions:
    found = Suggestions()
    found.add("a", BEFORE, AFTER, TEXT)
    return found


@pytest.mark.parametrize("n", [0, 1, 5, len(TEXT) - 1])
def test_the_rest_is_found_while_the_suggestion_is_typed(suggestions: Suggestions, n: int) -> None:
    assert suggestions.find("a", BEFORE + TEXT[:n], AFTER) == TEXT[n:]


def test_nothing_is_found_elsewhere(suggestions: Suggestions) -> None:
    assert suggestions.find("a", BEFORE + TEXT, AFTER) is None, "it has been typed"
    assert suggestions.find("a", BEFORE + "urn h", AFTER) is None, "something else was typed"
    assert suggestions.find("a", BEFORE, AFTER + "x") is None, "the text after the cursor has changed"
    assert suggestions.find("a", BEFORE[:-1], AFTER) is None, "something was deleted"
    assert suggestions.find("b", BEFORE, AFTER) is None
    assert suggestions.find(None, BEFORE, AFTER) is None


def test_the_prompt_may_begin_later(suggestions: Suggestions) -> None:
    long = "x = 1\n" * TAIL_CHARS + BEFORE
    suggestions.add("a", long, AFTER, TEXT)
    assert suggestions.find("a", long[300:] + TEXT[:3], AFTER) == TEXT[3:]


def test_an_empty_file_is_a_place_too(suggestions: Suggestions) -> None:
    suggestions.add("a", "", "", TEXT)
    for n in range(len(TEXT)):
        assert suggestions.find("a", TEXT[:n], "") == TEXT[n:]
    assert suggestions.find("a", "def", "") is None


def test_the_latest_one_counts(suggestions: Suggestions) -> None:
    suggestions.add("a", BEFORE, AFTER, "urn 0\n")
    assert suggestions.find("a", BEFORE, AFTER) == "urn 0\n"
    assert suggestions.find("a", BEFORE + "urn w", AFTER) == " * h\n", "the one before fits what was typed"


def test_memory_is_bounded(suggestions: Suggestions) -> None:
    for n in range(PER_TENANT):
        suggestions.add("a", f"{BEFORE}{n}", AFTER, TEXT)
    assert suggestions.find("a", BEFORE, AFTER) is None
    for n in range(MAX_TENANTS):
        suggestions.add(str(n), BEFORE, AFTER, TEXT)
    assert suggestions.find("a", f"{BEFORE}0", AFTER) is None
    suggestions.add(None, BEFORE, AFTER, TEXT)
    suggestions.add("empty", BEFORE, AFTER, "")
    assert suggestions.find("empty", BEFORE, AFTER) is None

"""Module names of the last release work, and say what they are now."""

from __future__ import annotations

import importlib
import sys

import pytest

MOVED = {
    "ngramspec.guests.openai_prediction": "ngramspec.integrations.openai_prediction",
    "ngramspec.guests.guest": "ngramspec.integrations.draft_session",
    "ngramspec.guests.transformers": "ngramspec.integrations.transformers",
    "ngramspec.model.loading": "ngramspec.models.loader",
    "ngramspec.drafting.proposer": "ngramspec.speculative.proposer",
    "ngramspec.drafting.base": "ngramspec.speculative.drafter",
    "ngramspec.drafters.lookahead": "ngramspec.papers.lookahead",
    "ngramspec.drafters.counts": "ngramspec.papers.count_drafter",
}


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_new_module_with_a_warning(old: str, new: str) -> None:
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert importlib.import_module(old) is importlib.import_module(new)

"""What a client's grammar in Lark's notation may cost before it is compiled: the server reads it in its event loop."""

from __future__ import annotations

import pytest
from fair_time import count_seconds

from ngramspec.errors import GrammarError
from ngramspec.grammar.constraint import Grammar
from ngramspec.grammar.json_schema import prepare_lark


@pytest.mark.parametrize("text", ['"\\' * 20_000, "start: " + "/\\" * 20_000])
def test_what_has_no_end_is_refused_in_linear_time(text: str) -> None:
    with count_seconds() as seconds:
        with pytest.raises(GrammarError, match="has no end"):
            prepare_lark(text)
        assert seconds() < 1


@pytest.mark.parametrize("text", ["\n" * 60_000, "start" + " " * 60_000])
def test_blanks_take_linear_time(text: str) -> None:
    with count_seconds() as seconds:
        with pytest.raises(GrammarError):
            Grammar.from_text(text)
        assert seconds() < 1


def test_a_schema_nested_too_deeply_is_refused() -> None:
    with pytest.raises(GrammarError, match="nested too deeply"):
        prepare_lark("start: %json " + '{"items":' * 500 + "{}" + "}" * 500)


def test_what_has_an_end_stays() -> None:
    text = 'start: "a\\"%json" /b\\/"/ // "c\n# "d /\nx: "\\\\" /[^"]/i\n'
    assert prepare_lark(text) == text

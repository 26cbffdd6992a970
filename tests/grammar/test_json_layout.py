"""The layout of JSON: blanks between words go and come back, whatever the style, wherever the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.grammar.json_layout import JsonLayout, JsonStyle

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
STYLES: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"indent": 1}]


@given(VALUES, st.sampled_from(STYLES), st.data())
def test_what_is_left_out_is_put_back(value: Any, style: dict[str, Any], data: st.DataObject) -> None:
    text, plain = json.dumps(value, **style).encode(), json.dumps(value, separators=(",", ":")).encode()
    layout = JsonLayout(JsonStyle())
    example = json.dumps([{"a": 1, "b": [1, 2]}, 3], **style).encode()
    layout.remove_whitespace(example)
    layout = JsonLayout(layout.style)
    at = data.draw(st.integers(0, len(text)))
    gone = layout.remove_whitespace(text[:at])
    assert plain.startswith(gone)
    before = layout.style
    assert layout.add_whitespace(plain[len(gone) :], 1 << 30) == text[at:]
    assert layout.style == before
    assert gone + layout.remove_whitespace(text[at:]) == plain


@pytest.mark.parametrize(
    ("text", "plain", "laid_out"),
    [
        (b'{"a": 1,', b'"b":', b' "b": '),
        (b'{"a":1,', b'"b":', b'"b":'),
        (b'{\n  "a": 1,', b'"b":"', b'\n  "b": "'),
        (b'{\n  "a": 1,\n ', b'"b":"', b' "b": "'),
        (b'{\n  "a": [', b'"x","y"]', b'"x", "y"]'),
        (b'{\n  "a": "x\\"y', b'",', b'",\n  '),
        (b'{\n  "a": 1', b"}", b"\n}"),
    ],
)
def test_the_text_so_far_says_how(text: bytes, plain: bytes, laid_out: bytes) -> None:
    layout = JsonLayout(JsonStyle())
    layout.remove_whitespace(text)
    assert layout.add_whitespace(plain, 1 << 30) == laid_out


def test_brackets_without_end() -> None:
    layout = JsonLayout(JsonStyle())
    layout.remove_whitespace(b"[\n  [\n    [")
    laid_out = layout.add_whitespace(b"[" * 1_000_000, 1024)
    assert laid_out.startswith(b"\n" + b"  " * 3 + b"[\n" + b"  " * 4 + b"[")
    assert laid_out.rfind(b"\n") < 1024 <= len(laid_out)

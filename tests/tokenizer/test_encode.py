"""What an engine takes as a prompt, and what it says of everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny

from ngramspec.errors import InvalidInputError
from ngramspec.tokenizer.encode import Encoding

BYTES = Encoding(tiny.byte_tokenizer(), 300)


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint8), [np.int64(1), 2]])
def test_token_ids(ids: Any) -> None:
    found = BYTES.encode(ids, "prompt")
    assert found.dtype == np.int32
    assert found.tolist() == [1, 2]


def test_text() -> None:
    assert BYTES.encode("é\U0001f600", "prompt").tolist() == list("é\U0001f600".encode())
    assert BYTES.encode("", "prompt").tolist() == BYTES.encode([], "prompt").tolist() == []


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, {}, {1: 2}, {1, 2}, 5, b"ab", object()),
        *([[1]], [[1], [2, 3]], [1, [2]], [1.0], [1, None], ["a"], [True], [1, True], [np.True_, 1], [2**70]),
        *(np.array([True]), np.array([1.0]), np.zeros((2, 2), int)),
    ],
)
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^a prompt must be text or a flat list of token ids, got "):
        BYTES.encode(prompt, "prompt")


@pytest.mark.parametrize("ids", [[300], [-1], [2**63]])
def test_ids_that_the_model_does_not_have(ids: list[int]) -> None:
    with pytest.raises(InvalidInputError, match="token ids must be 0 to 299, got "):
        BYTES.encode(ids, "prompt")


@pytest.mark.parametrize("text", ["\ud800", "ab\udcff", "\ud83d\ude00"])
def test_lone_surrogates(text: str) -> None:
    at = len(text) - len(text.lstrip("ab"))
    for encode in (lambda: BYTES.encode(text, "prompt"), lambda: BYTES.encode_plain(text)):
        with pytest.raises(InvalidInputError, match=rf"must be valid Unicode text: character {at} is the lone surrogate '\\ud"):
            encode()


@pytest.mark.parametrize("text", [None, 5, ["a"], b"a"])
def test_plain_takes_text_only(text: Any) -> None:
    with pytest.raises(InvalidInputError, match="a tokenizer's input must be text, got"):
        BYTES.encode_plain(text)


@pytest.mark.parametrize("prompt", ["a\nb\n", "a\r\nb\r\n", "a\r\nb\r\nc\n"])
@pytest.mark.parametrize("expected", ["x\ny\n", "x\r\ny\r\n", "é\r\n\r\nz", "no line end"])
def test_an_expected_output_gets_the_prompts_line_ends(prompt: str, expected: str) -> None:
    """A client's file has CRLF and its editor's request LF, or the other way round."""
    ids = BYTES.encode(expected, "prediction", add_special_tokens=False)
    found = BYTES.match_line_ends(BYTES.encode(prompt, "prompt"), ids)
    lf = expected.replace("\r\n", "\n")
    assert bytes(found.tolist()).decode() == (lf.replace("\n", "\r\n") if "\r" in prompt else lf)
    assert BYTES.match_line_ends(BYTES.encode("one line", "prompt"), ids).tolist() == ids.tolist(), "nothing is known"

"""TextStream against the whole text decoded at once, for any tokens, prompts and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from ngramspec.tokenizer.detokenizer import REPLACEMENT, SpecialTokens, TextStream

BYTES = tiny.byte_tokenizer()
WORDS = tiny.word_tokenizer()
JUNK = st.lists(
    st.one_of(st.sampled_from([0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x98, 0x80, 0x61, 0x20, tiny.EOS]), st.integers(0, 255)), max_size=60
)
TEXT = st.text(st.one_of(st.sampled_from("ab \n日😀é\u200d"), st.characters(codec="utf-8")), max_size=40)
STOPS = st.lists(st.text(st.sampled_from("ab \n日😀"), min_size=1, max_size=4), max_size=4)


def added_text(tokenizer: Any, prompt: Sequence[int], output: Sequence[int]) -> str:
    """What the output adds to the text of the prompt; where it completes a character, from that character on."""
    before = tokenizer.decode([*prompt], skip_special_tokens=True)
    both = tokenizer.decode([*prompt, *output], skip_special_tokens=True)
    n_same = next((i for i, (a, b) in enumerate(zip(before, both, strict=False)) if a != b), min(len(before), len(both)))
    return both[n_same:]


def first_stop(text: str, stops: Sequence[str], start: int = 0) -> tuple[int, int] | None:
    """Begin and end of the stop string that is complete first, of those that end beyond `start`."""
    found = [(end, -len(stop)) for stop in stops for end in range(start + 1, len(text) + 1) if text[:end].endswith(stop)]
    if not found:
        return None
    end, minus_length = min(found)
    return end + minus_length, end


def run(stream: TextStream, output: Sequence[int]) -> list[str]:
    pieces = []
    for token in output:
        pieces.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    return [*pieces, stream.finish()]


def check(tokenizer: Any, prompt: Sequence[int], output: Sequence[int], stops: Sequence[str], min_tokens: int = 0) -> None:
    known = [added_text(tokenizer, prompt, output[:n]).rstrip(REPLACEMENT) for n in range(len(output) + 1)]
    whole = added_text(tokenizer, prompt, output)
    stop = first_stop(whole, stops, len(known[min(min_tokens, len(output))]))
    stream = TextStream(tokenizer, prompt, stops, min_tokens)
    pieces = run(stream, output)
    assert "".join(pieces) == (whole[: stop[0]] if stop else whole)
    assert stream.stopped_by == (whole[slice(*stop)] if stop else None)
    if stop:
        assert stream.n_tokens == next((n for n, text in enumerate(known) if len(text) >= stop[1]), len(output))
    shown = ""
    for piece, text in zip(pieces, known[1:], strict=False):
        shown += piece
        assert text.startswith(shown) or stream.stopped_by is not None
        held = len(text) - len(shown)
        assert stream.stopped_by is not None or held == max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)


@given(output=TEXT, prompt=TEXT, stops=STOPS, min_tokens=st.integers(0, 20))
@example(output="aaaa", prompt="", stops=["aa"], min_tokens=2)
@example(output="ab", prompt="", stops=["abab", "ba"], min_tokens=0)
@example(output="abab ba", prompt="", stops=["ab b", "b ba", "ba"], min_tokens=3)
def test_bytes_of_a_text(output: str, prompt: str, stops: list[str], min_tokens: int) -> None:
    check(BYTES, list(prompt.encode()), list(output.encode()), stops, min_tokens)


@given(tokens=JUNK, cut=st.integers(0, 20))
@example(tokens=[0xE6] * 3 + [0x97, 0xA5], cut=3)
@example(tokens=[0x61, 0xE6] + [tiny.EOS] * 80 + [0x97, 0xA5], cut=1)
@example(tokens=[*"é".encode()] + [0x80] * 60, cut=0)
@settings(max_examples=400)
def test_any_bytes_come_out_as_decoded_whole(tokens: list[int], cut: int) -> None:
    prompt, output = tokens[:cut], tokens[cut:]
    assert "".join(run(TextStream(BYTES, prompt), output)) == added_text(BYTES, prompt, output)


@given(output=TEXT, prompt=TEXT, stops=STOPS, min_tokens=st.integers(0, 6))
@example(output="é日本語👩‍👩‍👧", prompt="# ", stops=["語👩"], min_tokens=0)
@settings(deadline=None)
def test_smollm2_text(smollm2_tokenizer: Any, output: str, prompt: str, stops: list[str], min_tokens: int) -> None:
    encode = smollm2_tokenizer.encode
    check(smollm2_tokenizer, encode(prompt), encode(output), stops, min_tokens)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_smollm2_any_tokens(smollm2_tokenizer: Any, data: st.DataObject) -> None:
    token = st.one_of(st.integers(0, 300), st.integers(0, len(smollm2_tokenizer) - 1))
    prompt, output = data.draw(st.lists(token, max_size=12)), data.draw(st.lists(token, max_size=40))
    assert "".join(run(TextStream(smollm2_tokenizer, prompt), output)) == added_text(smollm2_tokenizer, prompt, output)


@given(
    words=st.lists(st.sampled_from(["▁", "▁a", "▁b", "a", "c", "▁the", ".", "日", "<eos>", "<0xE6>|<0x97>|<0xA5>", "<0x0A>"]), max_size=30)
)
def test_blanks_of_words_as_in_running_text(words: list[str]) -> None:
    ids = WORDS.convert_tokens_to_ids([part for word in words for part in word.split("|")])
    prompt = WORDS.convert_tokens_to_ids(["<bos>", "▁the"])
    assert "".join(run(TextStream(WORDS, prompt), ids)) == added_text(WORDS, prompt, ids)


def test_without_a_backend_the_tokenizers_own_decode_serves() -> None:
    class Slow:
        def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            assert skip_special_tokens
            assert not clean_up_tokenization_spaces
            return bytes(ids).decode(errors="replace")

    assert run(TextStream(Slow(), [], ["語"]), list("日本語".encode())) == ["", "", "日", "", "", "本", "", "", "", ""]


def test_a_character_is_shown_with_its_last_byte() -> None:
    stream = TextStream(BYTES, [0x61])
    assert [stream.push(t) for t in "😀b".encode()] == ["", "", "", "😀", "b"]


def test_an_incomplete_character_ends_as_a_replacement() -> None:
    stream = TextStream(BYTES)
    assert [stream.push(t) for t in b"a\xf0\x9f"] == ["a", "", ""]
    assert stream.finish() == REPLACEMENT


def test_the_output_may_complete_a_character_of_the_prompt() -> None:
    assert run(TextStream(BYTES, b"a\xe6\x97"), b"\xa5b") == ["日", "b", ""]
    assert run(TextStream(BYTES, b"a\xe6\x97"), b"b") == ["b", ""]


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["cd", "abcdef"], "abcdef", "ab"),  # complete first
        (["d", "bcd"], "abcde", "a"),  # complete together: the longest
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["aab"], "aaab", "a"),
    ],
)
def test_the_stop_string_that_is_complete_first_ends_the_text(stops: list[str], text: str, shown: str) -> None:
    assert "".join(run(TextStream(BYTES, [], stops), text.encode())) == shown


def test_the_work_per_token_does_not_grow_with_the_text() -> None:
    decoded = 0

    class Counting:
        def decode(self, ids: list[int], **_: Any) -> str:
            nonlocal decoded
            decoded += len(ids)
            return bytes(ids).decode(errors="replace")

    stops = ["a" * 5000]
    for text in (b"a" * 4000, b"\x80" * 4000, b"\xe6\x97\xa5" * 1300):
        decoded = 0
        run(TextStream(Counting(), [], stops), text)
        assert decoded < 60 * len(text)


@given(st.lists(st.sampled_from([*b"ab", 0xE6, 0x97, 0xA5, 256, 257]), max_size=20))
def test_special_tokens_are_part_of_the_text_where_they_are_asked_for(output: list[int]) -> None:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    shown = tokenizer.decode(output, skip_special_tokens=False)
    for special in (SpecialTokens.SHOWN, SpecialTokens.JOINED):  # a decoder of bytes puts nothing between
        assert "".join(run(TextStream(tokenizer, special=special), output)) == shown
    assert "".join(run(TextStream(tokenizer), output)) == tokenizer.decode(output, skip_special_tokens=True)


def test_special_tokens_side_by_side_have_no_blank_between_them_where_none_is_asked_for() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"the": 0, "cat": 1}, unk_token="the")))
    words.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    output = [0, 2, 3, 2, 1, 2, 0, 1]
    texts = {special: "".join(run(TextStream(words, special=special), output)) for special in SpecialTokens}
    assert texts[SpecialTokens.SHOWN] == words.decode(output) == "the <|a|> <|b|> <|a|> cat <|a|> the cat"
    assert texts[SpecialTokens.JOINED] == "the <|a|><|b|><|a|> cat <|a|> the cat"
    assert texts[SpecialTokens.SKIPPED] == "the cat the cat"

"""Thoughts before an answer: told apart from it wherever the text is cut into tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.prompts.thoughts import HARMONY, Piece, ThoughtMarks, ThoughtReader, detect_marks

THINK = ThoughtMarks("<think>", "</think>")
TEXTS = {  # text, whether it begins within thoughts -> thoughts, answer
    "both": ("<think>\nSo, 2.\n</think>\n\nIt is 2.", False, "So, 2.", "It is 2."),
    "blanks first": ("\n <think>a</think>b", False, "a", "b"),
    "open": ("\nSo.</think>b", True, "So.", "b"),
    "open and cut": (" So. ", True, "So.", ""),
    "cut": ("<think>So </thi", False, "So </thi", ""),
    "no thoughts": ("It is <think>2</think>.", False, "", "It is <think>2</think>."),
    "only blanks": ("  \n", False, "", "  \n"),
    "nearly": (" <thin", False, "", " <thin"),
    "empty": ("<think>\n\n</think>\n\nb", False, "", "b"),
    "twice": ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
    "an end alone": ("a</think>b", False, "", "a</think>b"),
    "nothing": ("", False, "", ""),
}


def read(pieces: list[Piece], marks: ThoughtMarks, *, is_open: bool = False) -> tuple[str, str]:
    reader = ThoughtReader(marks, is_open=is_open)
    found = [each for piece in pieces for each in reader.push(piece.text, is_special=piece.is_special)] + reader.finish()
    thoughts = "".join(piece.text for piece in found if piece.is_thought)
    return thoughts.rstrip() if is_open or thoughts else thoughts, "".join(piece.text for piece in found if not piece.is_thought)


@pytest.mark.parametrize("name", TEXTS)
def test_thoughts_at_every_cut(name: str) -> None:
    text, is_open, thoughts, answer = TEXTS[name]
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [Piece(text[:first]), Piece(text[first:second]), Piece(text[second:])]
            assert read(pieces, THINK, is_open=is_open) == (thoughts, answer), pieces
    assert read([Piece(letter) for letter in text], THINK, is_open=is_open) == (thoughts, answer)


def test_harmony_thinks_between_parts_of_the_answer() -> None:
    special = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|return|>"]
    words = [
        "<|channel|>",
        "analysis",
        "<|message|>",
        "One.",
        "<|end|>",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "analysis",
        "<|message|>",
    ]
    words += ["Two.", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "It is 2.", "<|return|>"]
    thoughts, rest = read([Piece(word, word in special) for word in words], HARMONY)
    assert thoughts == "One.Two."
    assert rest.endswith("<|channel|>final<|message|>It is 2.<|return|>")


@pytest.mark.parametrize(
    ("text", "is_open", "thoughts", "answer"),
    [
        ("So.\n<call>x</call>", True, "So.", "<call>x</call>"),
        ("<call>x", True, "", "<call>x"),
        ("<think>\n<call>x", False, "", "<call>x"),
        ("I use <call> now.</think><call>x", True, "I use <call> now.", "<call>x"),
        ("So.[CALL]x", True, "So.", "[CALL]x"),
        ("So\n<cal", True, "So\n<cal", ""),
        ("a</think>b\n<call>", True, "a", "b\n<call>"),
    ],
)
def test_a_call_ends_thoughts(text: str, is_open: bool, thoughts: str, answer: str) -> None:
    for size in (1, 2, 5, 100):
        reader = ThoughtReader(THINK, is_open=is_open)
        reader.end_before_calls(["<call>", "[CALL]"], ["[CALL]"])
        found = [each for at in range(0, len(text), size) for each in reader.push(text[at : at + size])] + reader.finish()
        assert "".join(piece.text for piece in found if piece.is_thought) == thoughts
        assert "".join(piece.text for piece in found if not piece.is_thought) == answer


ANSWERED = ThoughtMarks("<think>", "</think>", answer="answer")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\na\n</think>\n<answer>\nb <c>\n</answer>", "b <c>"),
        ("<think>a</think><answer>b", "b"),
        ("<think>a</think>b <answer>", "b <answer>"),
        ("<think>a</think>\n<ans", "<ans"),
    ],
)
def test_the_tag_of_an_answer_is_no_part_of_it(text: str, answer: str) -> None:
    for first in range(len(text) + 1):
        assert read([Piece(text[:first]), Piece(text[first:])], ANSWERED) == ("a", answer)
    assert read([Piece(letter) for letter in text], ANSWERED) == ("a", answer)


def test_apertus_thinks_between_parts_of_the_answer() -> None:
    marks = detect_marks("{{ '<|inner_prefix|>' }}{{ '<|inner_suffix|>' }}")
    assert marks is not None
    words = ["<|inner_prefix|>", "One.", "<|inner_suffix|>", "It is ", "<|inner_prefix|>", "Two.", "<|inner_suffix|>", "2."]
    assert read([Piece(word, word.startswith("<")) for word in words], marks) == ("One.Two.", "It is 2.")


@given(st.text(alphabet="<>/think \n", max_size=40), st.booleans(), st.integers(1, 7))
def test_an_answer_without_marks_is_unchanged(text: str, is_open: bool, size: int) -> None:
    pieces = [Piece(text[at : at + size]) for at in range(0, len(text), size)]
    thoughts, answer = read(pieces, THINK, is_open=is_open)
    if not is_open and not text.lstrip().startswith("<think>"):
        assert (thoughts, answer) == ("", text)
    assert len(thoughts) + len(answer) <= len(text)
    assert (thoughts, answer) == read([Piece(text)], THINK, is_open=is_open)


def test_a_template_tells_its_marks() -> None:
    assert detect_marks("{{ content.split('</think>')[-1] }}<think>\n") == THINK
    assert detect_marks("<|channel|>analysis<|message|>") is HARMONY
    assert detect_marks("<|im_start|>") is None
    assert detect_marks("<|channel>thought\n<channel|>") == ThoughtMarks("<|channel>thought", "<channel|>")
    assert detect_marks("'</seed:think>'") == ThoughtMarks("<seed:think>", "</seed:think>")
    assert detect_marks("'<think:fast>' ~ x ~ '</think:fast>'") == ThoughtMarks("<think:fast>", "</think:fast>")
    assert detect_marks("think in <think></think>, answer in <response></response>") == THINK._replace(answer="response")
    assert detect_marks("<think></think>{% if x %}<response>{% endif %}") == THINK, "of a tool"

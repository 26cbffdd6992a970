"""Tell the thoughts that a model writes before its answer from the answer, as the text grows.

Pieces of a text enter, token by token; the same text leaves, marked as thought or not, without the marks around thoughts. Knows neither
templates nor requests.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple


class ThoughtMarks(NamedTuple):
    """What stands around thoughts."""

    begin: str
    end: str
    recurs: bool = False
    """Thoughts may stand between parts of the answer, too."""
    answer: str = ""
    """The name of the tag in which the answer stands after thoughts, if there is one."""


HARMONY = ThoughtMarks("<|channel|>analysis<|message|>", "<|end|>", recurs=True)  # gpt-oss
_MARKS = (
    ThoughtMarks("<think>", "</think>"),  # DeepSeek R1, Qwen 3, QwQ, GLM 4.5 and most others
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    ThoughtMarks("[THINK]", "[/THINK]"),  # Magistral
    ThoughtMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ThoughtMarks("<|inner_prefix|>", "<|inner_suffix|>", recurs=True),  # Apertus
    ThoughtMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ThoughtMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
    ThoughtMarks("Here is my thought process:", "Here is my response:"),  # Granite 3.2
)
_TAG = re.compile(r"</((?:\w+:)?think(?::\w+)?)>")  # <think> of a name space, as in Seed-OSS and Hunyuan
_ANSWER = re.compile(r"</think>[^{}%]{0,80}<(response|answer)>")  # Granite 3.3, Ernie 4.5, Hunyuan A13B


def detect_marks(template: str) -> ThoughtMarks | None:
    """Return the marks that a chat template knows; None if it knows none."""
    if "<|channel|>" in template and "analysis" in template:
        return HARMONY
    if found := next((marks for marks in _MARKS if marks.end in template), None):
        return found._replace(answer=answer[1]) if (answer := _ANSWER.search(template)) else found
    return ThoughtMarks(f"<{tag[1]}>", f"</{tag[1]}>") if (tag := _TAG.search(template)) else None


class Piece(NamedTuple):
    """A token's text."""

    text: str
    is_special: bool = False
    """No text shows this token."""
    is_thought: bool = False


class ThoughtReader:
    """Reads one text. Blanks around thoughts belong to neither them nor the answer."""

    def __init__(self, marks: ThoughtMarks, *, is_open: bool = False) -> None:
        """Start a text. `is_open`: it begins within thoughts, since the prompt ended with their mark."""
        self._marks, self._waiting = marks, list[Piece]()
        self._state = self._read_blanks if is_open else self._read_answer if marks.recurs else self._read_beginning
        self._is_thought, self._thinks = is_open, False  # `_thinks`: some thoughts were passed on
        self._calls: list[tuple[str, bool]] = []
        """What calls begin with, and whether at the beginning of a line alone."""
        self.n_tokens = 0
        """Tokens of thoughts so far, with their marks."""

    def end_before_calls(self, begins: Iterable[str], special: Collection[str]) -> None:
        """Let thoughts end where a call begins, too: models forget their end.

        begins: what calls begin with; `special`: those that are tokens no text shows. Others count at the beginning of a line alone.
        """
        if not self._marks.recurs:
            self._calls = [(begin, begin not in special) for begin in begins]

    def push(self, text: str, *, is_special: bool = False) -> list[Piece]:
        """Take the next token; return what is known now."""
        self._waiting.append(Piece(text, is_special))
        self.n_tokens += self._is_thought
        found: list[Piece] = []
        state = None
        while state != self._state:
            state = self._state
            found += state("".join(piece.text for piece in self._waiting))
        return found

    def finish(self) -> list[Piece]:
        """End the text; return what was held back."""
        return [piece._replace(is_thought=self._is_thought) for piece in self._take(None)]

    # ------------------------------------------------------------------ the states: each returns what is known of the waiting text

    def _read_beginning(self, text: str) -> list[Piece]:
        """Decide whether the text begins with thoughts."""
        begin, said = self._marks.begin, text.lstrip()
        if said.startswith(begin):
            self._begin_thought(len(text) - len(said))
        elif not begin.startswith(said):
            self._state = self._read_answer
        return []

    def _read_blanks(self, text: str) -> list[Piece]:
        """Drop the blanks before thoughts, or before the answer after them."""
        said = text.lstrip()
        self._take(len(text) - len(said))
        tag = "" if self._is_thought or not self._marks.answer else f"<{self._marks.answer}>"
        if tag and tag.startswith(said[: len(tag)]):
            if said.startswith(tag):
                self._take(len(tag))
                self._state = self._read_tag
        elif said:
            self._state = self._read_thought if self._is_thought else self._read_answer
        return []

    def _read_tag(self, text: str) -> list[Piece]:
        """Drop the blanks after the tag in which the answer stands."""
        said = text.lstrip()
        self._take(len(text) - len(said))
        self._state = self._read_tagged if said else self._state
        return []

    def _read_tagged(self, text: str) -> list[Piece]:
        """Read an answer up to the end of its tag and drop that, with the blanks before it."""
        end = f"</{self._marks.answer}>"
        at = text.find(end)
        if at < 0:
            return self._take(len(text[: len(text) - _find_overlap(text, end)].rstrip()))
        found = self._take(len(text[:at].rstrip()))
        self._take(at + len(end) - len(text[:at].rstrip()))
        self._state = self._read_answer
        return found

    def _read_thought(self, text: str) -> list[Piece]:
        ends = [(text.find(self._marks.end), len(self._marks.end)), *((self._find_call(text, *each), 0) for each in self._calls)]
        at, length = min((each for each in ends if each[0] >= 0), default=(-1, 0))
        kept = max(_find_overlap(text, mark) for mark in (self._marks.end, *(begin for begin, _ in self._calls)))
        shown = len((text[:at] if at >= 0 else text[: len(text) - kept]).rstrip())
        found = [piece._replace(is_thought=True) for piece in self._take(shown)]
        self._thinks = self._thinks or bool(found)
        if at >= 0:
            self._take(at + length - shown)
            self._state, self._is_thought = self._read_blanks, False
        return found

    def _find_call(self, text: str, begin: str, at_line: bool) -> int:
        """Return where a call begins in thoughts; -1 if there is none. The blanks before it are in the text: those at its end wait."""
        at = text.find(begin)
        while at_line and at >= 0:
            before = text[:at].rstrip(" \t")
            if before.endswith("\n") or not (before or self._thinks):
                break
            at = text.find(begin, at + 1)
        return at

    def _read_answer(self, text: str) -> list[Piece]:
        if not self._marks.recurs:
            return self._take(None)
        at = text.find(self._marks.begin)
        if at < 0:
            return self._take(len(text) - _find_overlap(text, self._marks.begin))
        found = self._take(at)
        self._begin_thought(0)
        return found

    def _begin_thought(self, n_blanks: int) -> None:
        self.n_tokens += len(self._take(n_blanks + len(self._marks.begin)))
        self._state, self._is_thought = self._read_blanks, True

    def _take(self, n: int | None) -> list[Piece]:
        """Return the first `n` characters that wait, and take them away; None: all."""
        taken: list[Piece] = []
        while self._waiting and (n is None or n > 0):
            piece = self._waiting.pop(0)
            if n is not None and len(piece.text) > n:
                self._waiting.insert(0, piece._replace(text=piece.text[n:]))
                piece = piece._replace(text=piece.text[:n])
            n = None if n is None else n - len(piece.text)
            taken.append(piece)
        return taken


def _find_overlap(text: str, mark: str) -> int:
    """Return how many characters at the text's end may begin the mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)

"""Detokenizes one choice as it is generated: tokens enter one by one, pieces of text that may be shown leave.

`TextStream` knows a tokenizer and the stop strings of a request, and nothing of models or requests. Its text does not depend on how tokens
are grouped into steps, so it may be fed the accepted run of a draft token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_PROMPT_TOKENS = 8  # prompt tokens decoded with the output, so that the blank of a first word appears or not as in running text
_MAX_WINDOW = 32  # tokens decoded at once; reached only by tokens that never end on a whole character
_MAX_HELD_CHARS = 3  # most replacement characters that a UTF-8 character without its last byte decodes to


class SpecialTokens(Enum):
    """How special tokens appear in a text."""

    SKIPPED = "skipped"
    SHOWN = "shown"
    """The tokenizer's decoder writes them."""
    JOINED = "joined"
    """The same, with nothing between one added token and the next: vLLM's `spaces_between_special_tokens=False`."""

    @classmethod
    def from_params(cls, skip_special_tokens: bool, spaces_between: bool) -> SpecialTokens:
        return cls.SKIPPED if skip_special_tokens else cls.SHOWN if spaces_between else cls.JOINED


class TextStream:
    """The text of one choice as it grows.

    The pieces that `push` and `finish` return add up to the decoded output, by default without special tokens, cut before the
    stop string that is complete first (of those complete at the same character, the longest). A character whose
    bytes are not all there and text that may be the beginning of a stop string are held back until `finish`. Stop
    strings complete within the first `min_tokens` tokens are plain text.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        with_stop: bool = False,
        special: SpecialTokens = SpecialTokens.SKIPPED,
        n_hidden: int = 0,
    ) -> None:
        """Start the text after a prompt. `with_stop`: the stop string that ends the text is part of it. `n_hidden`: characters at the
        beginning that are no part of the text."""
        self._pieces = _Detokenizer(_make_decoder(tokenizer, special), prompt_ids, _get_known_words(tokenizer, special))
        self._stops = [_StopMatcher(s) for s in stop]
        self._min_tokens, self._with_stop = min_tokens, with_stop
        self._held, self._n_hidden = "", n_hidden
        self.n_tokens = 0
        """Tokens of the text, without those of which all is hidden."""
        self.stopped_by: str | None = None
        """The complete stop string, after which the text has ended."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that may be shown now, often empty."""
        assert self.stopped_by is None, "push after a stop string"
        piece = self._pieces.push(token_id)
        self.n_tokens += not self._n_hidden or len(piece) > self._n_hidden
        return self._until_stop(piece)

    def finish(self) -> str:
        """End the text; return what was held back, which is nothing after a stop string."""
        if self.stopped_by is not None:
            return ""
        rest = self._until_stop(self._pieces.finish())
        rest, self._held = rest + self._held, ""
        return rest

    def _until_stop(self, piece: str) -> str:
        if self._n_hidden:
            piece, self._n_hidden = piece[self._n_hidden :], max(self._n_hidden - len(piece), 0)
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        counts = self.n_tokens > self._min_tokens
        for end, char in enumerate(piece, len(self._held) + 1):
            complete = [matcher.stop for matcher in self._stops if matcher.push(char)]
            if complete and counts:
                self.stopped_by = max(complete, key=len)
                self._held = ""
                return text[: end if self._with_stop else end - len(self.stopped_by)]
        shown = len(text) - max(matcher.matched for matcher in self._stops)
        self._held = text[shown:]
        return text[:shown]


class NoText:
    """Replaces a `TextStream` if there is no tokenizer: its text is empty."""

    stopped_by: str | None = None

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class _StopMatcher:
    """Searches for one stop string a character at a time (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        """Length of the longest proper prefix of the stop string with which the text ends."""
        self._borders = [0] * (len(stop) + 1)
        length = 0
        for end in range(2, len(stop) + 1):
            length = self._extend(length, stop[end - 1])
            self._borders[end] = length

    def push(self, char: str) -> bool:
        """Take the next character; return whether the text now ends with the stop string."""
        self.matched = self._extend(self.matched, char)
        if self.matched < len(self.stop):
            return False
        self.matched = self._borders[self.matched]
        return True

    def _extend(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._borders[length]
        return length + (self.stop[length] == char)


class _Detokenizer:
    """Decodes a short window of tokens at each step, and returns by how much its text grew.

    The window begins with tokens whose text is out, since what a token decodes to depends on its left neighbours
    (blanks before words), and is cut whenever all of its text is out. U+FFFD at its end may be a character whose
    bytes are not all there, so it waits. If the tokenizer joins bytes, a token of whole characters after whole
    characters is its own text, which is decoded once and kept.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: Sequence[int], words: dict[int, str] | None = None) -> None:
        """Start after a prompt. `words`: known texts of tokens, for a tokenizer that joins its tokens' bytes; it is filled here."""
        self._decode, self._words = decode, words
        self._window = [int(t) for t in prompt_ids[-_PROMPT_TOKENS:]]
        self._n_old = len(self._window)  # tokens of the window from before its last cut
        self._text = decode(self._window) if self._window else ""  # of the window
        self._out = self._text.rstrip(REPLACEMENT)  # the part of it that has been given out
        self._echo = self._text[len(self._out) :]  # the prompt's own end, if the output does not complete it

    def push(self, token_id: int) -> str:
        if self._words is not None and self._out == self._text and not self._text.endswith(REPLACEMENT):
            word = self._words.get(token_id)
            if word is None:
                word = self._words[token_id] = self._decode([token_id])
            if word and REPLACEMENT not in word:
                self._window, self._n_old, self._text, self._out, self._echo = [token_id], 1, word, word, ""
                return word
        self._window.append(int(token_id))
        text = self._decode(self._window)
        if text and text == self._text and not self._decode(self._window[-1:]):
            self._window.pop()  # a special token
            return ""
        self._text = text
        n_whole = len(text.rstrip(REPLACEMENT))
        if overlong := len(self._window) > _MAX_WINDOW:
            n_whole = max(n_whole, len(text) - _MAX_HELD_CHARS)
        piece = self._take_text(n_whole)
        if n_whole == len(text) and (recent := self._decode(self._window[self._n_old :])):
            self._window = self._window[self._n_old :]
            self._n_old, self._text, self._out = len(self._window), recent, recent
        elif overlong:
            self._window = self._window[-_MAX_WINDOW // 2 :]
            self._n_old, self._text = len(self._window), self._decode(self._window)
            self._out = self._text[: max(len(self._text) - (len(text) - n_whole), 0)]
        return piece

    def finish(self) -> str:
        return self._take_text(len(self._text))

    def _take_text(self, n_whole: int) -> str:
        """Return the window's text up to `n_whole` that is not out yet."""
        n_out = _count_common(self._out, self._text)
        if n_whole <= n_out:
            return ""
        piece, echo = self._text[n_out:n_whole], self._echo
        self._out, self._echo = self._text[:n_whole], ""
        return piece[_count_common(echo, piece) :]


def _count_common(a: str, b: str) -> int:
    """Return the length of the longest common prefix."""
    if b.startswith(a):
        return len(a)
    return next(i for i, char in enumerate(a) if b[i : i + 1] != char)


_WORDS: WeakKeyDictionary[Any, dict[SpecialTokens, dict[int, str]]] = WeakKeyDictionary()


def _get_known_words(tokenizer: Any, special: SpecialTokens) -> dict[int, str] | None:
    """Return the known texts of the tokens of a byte-level tokenizer, whose tokens do not depend on their neighbours; None for another."""
    if type(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)).__name__ != "ByteLevel":
        return None
    return _WORDS.setdefault(tokenizer, {}).setdefault(special, {})


def _make_decoder(tokenizer: Any, special: SpecialTokens) -> Callable[[list[int]], str]:
    backend, skip = getattr(tokenizer, "backend_tokenizer", None), special is SpecialTokens.SKIPPED

    def decode(ids: list[int]) -> str:
        if backend is not None:
            return str(backend.decode(ids, skip_special_tokens=skip))
        return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    if special is not SpecialTokens.JOINED:
        return decode
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}

    def decode_joined(ids: list[int]) -> str:
        """Decode the ids, but write added tokens right after another one without the decoder."""
        text, apart, n_apart = "", [], 0
        for is_behind, group in groupby(range(len(ids)), lambda i: i > 0 and ids[i] in added and ids[i - 1] in added):
            if is_behind:
                text += "".join(added[ids[i]] for i in group)
            else:
                apart += [ids[i] for i in group]
                whole = decode(apart)
                text, n_apart = text + whole[n_apart:], len(whole)
        return text

    return decode_joined

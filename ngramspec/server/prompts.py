"""From what a request says to the token ids of its prompt; a user's text never becomes a control token.

Texts and messages enter, lists of ids leave. Control tokens are all that the tokenizer's vocabulary was extended with, special or not;
they come from the chat template and the beginning of a text alone. Knows the engine's tokenizer; nothing of HTTP or of sampling.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer

from ngramspec.datastore.tokens import plain
from ngramspec.engine import Engine
from ngramspec.server.errors import ApiError

ASSISTANT = "assistant"


class Turn(NamedTuple):
    """One message of a chat: its role as templates know it, and its text."""

    role: str
    content: str


class Prompts:
    """The prompts of one engine. Threads may share it; encoding a long text takes a while."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._tokenizer = engine, engine.tokenizer
        self._bos: list[int] = [] if self._tokenizer is None else before_text(self._tokenizer)
        controls = {} if self._tokenizer is None else _control_tokens(self._tokenizer.backend_tokenizer)
        self._control_ids = frozenset(controls)
        self._control = _any_of([token.content for token in controls.values()])
        self._special = _any_of([token.content for token in controls.values() if token.special])
        texts = [token.content for token in controls.values()]
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._endings = {text[n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=0)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def plain(self, text: str) -> list[int]:
        """A text to be continued: its ids, behind the token that the tokenizer begins texts with, if any. Raises TokenizerError."""
        return self._bos + self._engine.encode_text(text)

    def chat(self, turns: Sequence[Turn]) -> list[int]:
        """The model's own template over the messages, up to where its answer begins. Raises ApiError (400) where it refuses them.

        Control tokens in a message are text: each is hidden from the template and the tokenizer behind a random mark, and encoded apart.
        So is what the template could join with its own or another message's text to a control token, if it does. What the assistant is
        said to have written keeps the tokens that are not special (such as those around a chain of thought): they are in the text that
        the server gave out, and templates look for them there.
        """
        rendered = self._render(turns)
        marks = _Marks()
        hidden = [Turn(turn.role, self._hide(turn, marks)) for turn in turns]
        pieces = marks.split(self._render(hidden)) if marks.texts else [(rendered, False)]
        allowed = [token for text, is_user in pieces if not is_user for token in self._control.findall(text)]
        foreign = any(self._forbidden(turn.role).search(turn.content) for turn in turns)
        if not foreign and self._control.findall(rendered) == allowed:
            ids = self._encode(rendered)  # nothing was hidden, or ends of messages to which nothing was joined
        else:
            ids = self._join(pieces)
        if sum(token in self._control_ids for token in ids) > len(allowed):  # the tokenizer's normalizer makes one of other text
            marks = _Marks()
            ids = self._join(marks.split(self._render([Turn(turn.role, marks.put(turn.content)) for turn in turns])))
        return ids

    def _hide(self, turn: Turn, marks: _Marks) -> str:
        """The message with marks in the place of what is, or could become, a control token."""
        body = turn.content.strip()  # templates strip too
        start = len(turn.content) - len(turn.content.lstrip())
        before, after = turn.content[:start], turn.content[start + len(body) :]
        reach = range(min(self._longest, len(body)), 0, -1)
        end = next((n for n in reach if body[-n:] in self._beginnings), 0)
        body, tail = body[: len(body) - end], body[len(body) - end :]
        start = next((n for n in reach if body[:n] in self._endings), 0)
        head, body = body[:start], body[start:]
        middle = self._forbidden(turn.role).sub(lambda found: marks.put(found[0]), body)
        return before + marks.put(head) + middle + marks.put(tail) + after

    def _forbidden(self, role: str) -> re.Pattern[str]:
        return self._special if role == ASSISTANT else self._control

    def _render(self, turns: Sequence[Turn]) -> str:
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, TypeError, ValueError) as e:
            raise ApiError(400, f"the model's chat template refuses these messages: {str(e)[:200]}", param="messages") from None

    def _encode(self, text: str) -> list[int]:
        """Control tokens are what they are."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _join(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        spelled = cache(self._engine.encode_text)  # the same few texts, maybe very often
        return [token for text, is_user in pieces for token in (spelled(text) if is_user else self._encode(text))]


class _Marks:
    """Stand-ins for texts while a template is rendered. Private-use characters that nobody can guess: no case, no blanks, no escapes."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._nonce = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(16))

    def put(self, text: str) -> str:
        """A stand-in for the text; nothing for nothing."""
        if not text:
            return ""
        self.texts.append(text)
        return f"{self._nonce}{len(self.texts) - 1};"

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """(text, whether it stood behind a mark), in order."""
        cut = re.split(f"{self._nonce}([0-9]+);", rendered)
        pieces = [(self.texts[int(piece)], True) if i % 2 else (piece, False) for i, piece in enumerate(cut)]
        return [(text, is_user) for text, is_user in pieces if text]


def _control_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    _, control = plain(tokenizer, max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1)
    return {number: token for number, token in tokenizer.get_added_tokens_decoder().items() if control[number]}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds the texts, the longest where several begin at a place, as tokenizers do; none: never.

    The pattern is their tree of letters, so that a search does not slow down with their number.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        further = [re.escape(letter) + pattern(node[letter]) for letter in sorted(node) if letter]
        if "" not in node and len(further) == 1:
            return further[0]
        return f"(?:{'|'.join(further)}){'?' if '' in node else ''}" if further else ""

    return re.compile(pattern(tree) or r"(?!)")


def before_text(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts before a text."""
    with_special, without = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    for at in range(len(with_special) - len(without) + 1):
        if with_special[at : at + len(without)] == without:
            return with_special[:at]
    return []

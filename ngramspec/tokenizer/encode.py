"""Encodes and checks prompts: texts and lists of ids enter as users give them, checked ids leave.

`encode` reads control tokens in a text, `encode_plain` reads none. Knows no model beyond its vocabulary's size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from tokenizers import AddedToken, Tokenizer

from ngramspec.datastore import tokens
from ngramspec.errors import InvalidInputError, TokenizerError

Prompt: TypeAlias = str | Sequence[int]
LOOK_BACK = 1024  # tokens at a prompt's end from which its line ends are read


class Encoding:
    """The part of a tokenizer that an engine needs. For any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Take a tokenizer of transformers, or None. Ids are from 0 to `vocab_size` - 1."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def encode(self, text: Prompt, what: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Return the ids [n] int32 of a text, or check given ids. `what`: its name in errors. Raises InvalidInputError, TokenizerError."""
        if isinstance(text, str):
            check_unicode(text, what)
            if self.tokenizer is None:
                raise TokenizerError(f"this model has no tokenizer: give the {what} as token ids, or in Python `tokenizer=`")
            return self.check_ids(np.asarray(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], np.int64))
        return self.check_ids(text, f"a {what} must be text or")

    def check_ids(self, given: Sequence[int] | np.ndarray, needed: str = "ids must be") -> np.ndarray:
        """Return ids [n] int32 that are in bounds. `needed`: how an error begins for what is no list of ids. Raises InvalidInputError."""
        ids = None if isinstance(given, str) else _to_integers(given)
        if ids is None:
            raise InvalidInputError(f"{needed} a flat list of token ids, got {given!r:.80}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise InvalidInputError(f"token ids must be 0 to {self.vocab_size - 1}, got {int(ids.min() if ids.min() < 0 else ids.max())}")
        return ids.astype(np.int32)

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which nothing is a control token, with nothing added before or after it.

        Raises InvalidInputError, TokenizerError.
        """
        check_unicode(text, "tokenizer's input")
        tokenizer, control = self._plain
        # Not `encode`: it keeps Python's lock, and with it every other thread, for the seconds that a long text takes.
        ids = np.asarray(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int64)
        return ids[~control[ids]].tolist()

    def encode_text(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Return the ids of a text with nothing added before or after it. Control tokens in it are spelled out, or read if `parse_special`.

        Raises InvalidInputError, TokenizerError.
        """
        if not parse_special:
            return self.encode_plain(text)
        check_unicode(text, "tokenizer's input")
        return self.encode(text, "text", add_special_tokens=False).tolist()

    def match_line_ends(self, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return a predicted output [n] int32 with the line ends (LF or CRLF) of most lines at the prompt's end, which a model keeps to."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or not len(tokens):
            return tokens
        text, before = (backend.decode(ids.tolist(), skip_special_tokens=False) for ids in (tokens, prompt[-LOOK_BACK:]))
        wanted = find_line_end(before)
        if wanted is None or find_line_end(text) in (None, wanted):
            return tokens
        return np.asarray(self.encode_plain(text.replace("\r\n", "\n").replace("\n", wanted)), np.int32)

    @cached_property
    def _plain(self) -> tuple[Tokenizer, np.ndarray]:
        """The tokenizer without control tokens, and which ids are control tokens: a word can have the text of one."""
        backend = self.get_backend("text without control tokens")
        return tokens.make_plain_tokenizer(backend, max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids of the control tokens that are no part of a decoded text, by their own text."""
        added = get_added_tokens(self.tokenizer).items()
        return {str(token): number for number, token in added if token.special and number < self.vocab_size}

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer that a datastore must have been built with. Raises TokenizerError."""
        return tokens.compute_fingerprint(self.get_backend("a datastore"))

    def get_backend(self, what: str) -> Tokenizer:
        """Return the tokenizer of the `tokenizers` library. `what`: what needs it, for the error. Raises TokenizerError."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(f"{what} needs the model's tokenizer, one of the `tokenizers` library")
        return backend


def get_added_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    """Return a transformers tokenizer's added tokens by id; none for None, or for a tokenizer that does not list them (Mistral's own)."""
    try:
        return dict(getattr(tokenizer, "added_tokens_decoder", {}))
    except NotImplementedError:
        return {}


def find_line_end(text: str) -> str | None:
    """Return the end of most of a text's lines, "\\n" or "\\r\\n"; None if it has no line end."""
    n_lf, n_crlf = text.count("\n"), text.count("\r\n")
    return None if not n_lf else "\r\n" if 2 * n_crlf > n_lf else "\n"


def check_unicode(text: object, what: str) -> None:
    """Raise InvalidInputError for anything that is no text, or has lone surrogates, which tokenizers do not accept."""
    if not isinstance(text, str):
        raise InvalidInputError(f"a {what} must be text, got {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = ascii(text[error.start])
        raise InvalidInputError(f"a {what} must be valid Unicode text: character {error.start} is the lone surrogate {wrong}") from None


_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)  # an escape of a JSON string; every one is matched, since a backslash can be escaped itself


def replace_lone_surrogates(raw: bytes) -> bytes:
    """Replace halves of surrogate pairs in JSON, which are no characters, by U+FFFD: what is left of an emoji that a client cut in two."""
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found["lone"] else found[0], raw)


def _to_integers(given: Any) -> np.ndarray | None:
    """Return a flat list of integers as [n]; None for anything else."""
    try:
        ids = np.asarray(given)
    except (ValueError, TypeError, OverflowError):  # lists of several lengths
        return None
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        return None
    # Among integers, True would count as 1.
    mixed = isinstance(given, (list, tuple)) and not {bool, np.bool_}.isdisjoint(map(type, given))
    return None if mixed else ids

"""From text to token ids, and the identity of a tokenizer: the engine's side of what comes in. Knows no model beyond its vocabulary's size.

Texts and lists of ids enter as users give them, checked ids leave. `ids` reads control tokens where they stand in a text, `plain` knows
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from tokenizers import AddedToken, Tokenizer

from ngramspec.datastore import tokens
from ngramspec.errors import InvalidInputError, TokenizerError

Prompt: TypeAlias = str | Sequence[int]
LOOK_BACK = 1024
"""Tokens at a prompt's end that tell its line ends."""


class Encoding:
    """What an engine needs of a tokenizer. From any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`tokenizer` of transformers or None; ids are from 0 to `vocab_size` - 1."""
        self.tokenizer, self.vocab_size = tokenizer, vocab_size

    def ids(self, text: Prompt, what: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """[n] int32 of a text, or of ids that are checked. `what` it is called in errors. Raises InvalidInputError, TokenizerError."""
        if isinstance(text, str):
            check_unicode(text, what)
            if self.tokenizer is None:
                raise TokenizerError(f"a text {what} needs a tokenizer: pass `tokenizer=` to the engine, or token ids")
            ids = np.asarray(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"], np.int64)
        else:
            given = _integers(text)
            if given is None:
                raise InvalidInputError(f"a {what} must be text or a flat list of token ids, got {text!r:.80}")
            ids = given
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise InvalidInputError(f"token ids must be 0 to {self.vocab_size - 1}, got {int(ids.min() if ids.min() < 0 else ids.max())}")
        return ids.astype(np.int32)

    def plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token, with nothing put before or behind it.

        Raises InvalidInputError, TokenizerError.
        """
        check_unicode(text, "text")
        tokenizer, control = self._plain
        # Not `encode`: it keeps Python's lock, and with it every other thread, for the seconds that a long text takes.
        ids = np.asarray(tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int64)
        return ids[~control[ids]].tolist()

    def with_line_ends_of(self, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """An expected output [n] int32 with the line ends (LF, CRLF) that most of the prompt's end has: a model goes on as a text began."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or not len(tokens):
            return tokens
        text, before = (backend.decode(ids.tolist(), skip_special_tokens=False) for ids in (tokens, prompt[-LOOK_BACK:]))
        wanted = line_end_of(before)
        if wanted is None or line_end_of(text) in (None, wanted):
            return tokens
        return np.asarray(self.plain(text.replace("\r\n", "\n").replace("\n", wanted)), np.int32)

    @cached_property
    def _plain(self) -> tuple[Tokenizer, np.ndarray]:
        """The tokenizer without its control tokens, and which ids those are: a word of the vocabulary can have a control token's text."""
        backend = self.backend("text without control tokens")
        return tokens.plain(backend, max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1)

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The control tokens that are no part of a decoded text: each one's id by its own text."""
        added = added_tokens(self.tokenizer).items()
        return {str(token): number for number, token in added if token.special and number < self.vocab_size}

    @cached_property
    def fingerprint(self) -> str:
        """What a datastore must have been made with. Raises TokenizerError."""
        return tokens.fingerprint(self.backend("a datastore"))

    def backend(self, what: str) -> Tokenizer:
        """The tokenizer of the `tokenizers` library that `what` needs. Raises TokenizerError."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(f"{what} needs the model's tokenizer, one of the `tokenizers` library")
        return backend


def added_tokens(tokenizer: Any) -> dict[int, AddedToken]:
    """What a tokenizer of transformers has beside its words, by id; nothing for None, or one that does not tell (Mistral's own)."""
    try:
        return dict(getattr(tokenizer, "added_tokens_decoder", {}))
    except NotImplementedError:
        return {}


def line_end_of(text: str) -> str | None:
    """What most lines of a text end with: "\\n", "\\r\\n", or None where it has no line end."""
    n_lf, n_crlf = text.count("\n"), text.count("\r\n")
    return None if not n_lf else "\r\n" if 2 * n_crlf > n_lf else "\n"


def check_unicode(text: object, what: str) -> None:
    """Raises InvalidInputError for what is no text, or has lone surrogates, which tokenizers do not take."""
    if not isinstance(text, str):
        raise InvalidInputError(f"a {what} must be text, got {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = ascii(text[error.start])
        raise InvalidInputError(f"a {what} must be valid Unicode text: character {error.start} is the lone surrogate {wrong}") from None


def _integers(given: Any) -> np.ndarray | None:
    """[n] of a flat list of integers; None of anything else."""
    try:
        ids = np.asarray(given)
    except (ValueError, TypeError, OverflowError):  # lists of several lengths
        return None
    if ids.ndim != 1 or (len(ids) and not np.issubdtype(ids.dtype, np.integer)):
        return None
    # Among integers, True would be counted as 1.
    mixed = isinstance(given, (list, tuple)) and not {bool, np.bool_}.isdisjoint(map(type, given))
    return None if mixed else ids

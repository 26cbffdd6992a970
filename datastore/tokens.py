"""User text as token ids: no text can inject a control token, whatever it contains.

Texts enter, ids leave, [n] u16 or u32, as `format` stores them. Works on a copy of the model's tokenizer that knows no control
tokens; the fingerprint is that of the original. Knows `tokenizers`, nothing of files.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .format import separator, token_dtype

_STATE = ("truncation", "padding")  # set by whoever used the tokenizer last; they are no part of what it means


def fingerprint(tokenizer: Tokenizer) -> str:
    """sha256, hex, of the tokenizer's JSON with sorted keys, without truncation and padding."""
    return _fingerprint(json.loads(tokenizer.to_str()))


def _fingerprint(parts: dict[str, Any]) -> str:
    lasting = {name: value for name, value in parts.items() if name not in _STATE}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Encoder:
    """A tokenizer for text of the corpus. Threads may share it; `tokenizers` spreads a batch over the cores."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """`tokenizer` is copied through its JSON and not changed; `name` is what users call it."""
        self.name = name
        self._json = tokenizer.to_str()
        parts = json.loads(self._json)
        self.fingerprint = _fingerprint(parts)
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self.dtype = token_dtype(self.vocab_size)
        self._plain, self._control = plain(parts, set(tokenizer.get_vocab(with_added_tokens=False)), self.vocab_size)
        self._full = tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Texts, end to end, each followed by a separator -> tokens [n] u16|u32, lengths [texts] int64 without the separators."""
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        tokens = np.full(int(lengths.sum()) + len(encodings), separator(self.dtype.itemsize), self.dtype)
        at = 0
        for encoding, length in zip(encodings, lengths.tolist(), strict=True):
            tokens[at : at + length] = encoding.ids
            at += length + 1
        return self._without_control(tokens, lengths)

    def _without_control(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A control token's text can also be a word of the vocabulary (Unigram, WordLevel): such ids are dropped."""
        ends = tokens == separator(self.dtype.itemsize)
        bad = self._control[np.where(ends, 0, tokens)] & ~ends
        if not bad.any():
            return tokens, lengths
        owner = np.cumsum(ends) - ends
        return tokens[~bad], lengths - np.bincount(owner[bad], minlength=len(lengths))

    def line_ends(self) -> np.ndarray:
        """How many line ends each token's text has, u8 [vocab_size]; more than 255 count as 255."""
        texts = self._full.decode_batch([[token] for token in range(self.vocab_size)], skip_special_tokens=False)
        return np.fromiter((min(text.count("\n"), 255) for text in texts), np.uint8, self.vocab_size)

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return _from_json, (self._json, self.name)


def _from_json(text: str, name: str) -> Encoder:
    return Encoder(Tokenizer.from_str(text), name)


def plain(parts: dict[str, Any], words: Container[str], vocab_size: int) -> tuple[Tokenizer, np.ndarray]:
    """A copy that knows no control tokens, and which ids are control tokens: bool [vocab_size].

    `parts`: the tokenizer's JSON; `words`: its model's vocabulary, without what was added.

    Every added token is one, flagged special or not, but for those that consist of blanks and line ends: GPT-NeoX, Phi and Gemma
    write indentation with them, and text without them would match nothing that the model reads. No post-processor, truncation or padding.
    """
    added = parts["added_tokens"]
    blank = [token["id"] for token in added if not token["special"] and token["content"].strip(" \t\r\n▁") == ""]
    control = np.zeros(vocab_size, bool)
    control[[token["id"] for token in added]] = True
    control[blank] = False
    kept = []
    for token in added if blank else []:
        if token["id"] in blank:
            kept.append(token)
        elif token["content"] not in words:  # ids are given in turn: something that no text has must take this one
            kept.append(token | {"content": f"\U0010fffe{secrets.token_hex(16)}", "special": False, "normalized": False})
    parts = parts | {"added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
    copy = Tokenizer.from_str(json.dumps(parts))
    if any(copy.token_to_id(token["content"]) != token["id"] for token in kept):
        copy = Tokenizer.from_str(json.dumps(parts | {"added_tokens": []}))
    return copy, control

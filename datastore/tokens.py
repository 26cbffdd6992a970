"""User text as token ids: no text can inject a control token, whatever it contains.

Texts enter, ids leave, [n] u16 or u32, as `format` stores them. Works on a copy of the model's tokenizer that knows no control
tokens; the fingerprint is that of the original, whose JSON a store carries, so that nobody needs the model to update it. Knows
`tokenizers`, nothing of models or of a corpus.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

from .errors import DatastoreCorruptError
from .format import choose_token_dtype, get_separator
from .manifest import Manifest, read_tokenizer

# Characters of a long text that are encoded by themselves, and how many such pieces at once: `tokenizers` takes some 100 bytes a token.
PIECE_CHARS = 1 << 18
PIECES = min(os.cpu_count() or 1, 8)
_STATE = ("truncation", "padding")  # set by whoever used the tokenizer last; they are no part of what it means


def to_canonical_json(tokenizer: Tokenizer) -> bytes:
    """Return the tokenizer's JSON with sorted keys, without truncation and padding: what the fingerprint is of, and what a store keeps."""
    lasting = {name: value for name, value in json.loads(tokenizer.to_str()).items() if name not in _STATE}
    return json.dumps(lasting, sort_keys=True, separators=(",", ":")).encode()


def compute_fingerprint(tokenizer: Tokenizer) -> str:
    """Return sha256, hex, of the canonical JSON."""
    return hash_tokenizer_json(to_canonical_json(tokenizer))


def hash_tokenizer_json(text: bytes) -> str:
    """Return the fingerprint of a tokenizer by its canonical JSON."""
    return hashlib.sha256(text).hexdigest()


def load_encoder(folder: Path, manifest: Manifest) -> Encoder:
    """Return the encoder of a store, by the tokenizer that it carries. Raises DatastoreCorruptError."""
    text = read_tokenizer(folder, manifest)
    try:
        encoder = Encoder(text, manifest.tokenizer_name)
    except Exception as error:  # the library raises nothing more particular
        raise DatastoreCorruptError(f"{folder / manifest.tokenizer.name} is no tokenizer: {error}") from error
    if encoder.vocab_size != manifest.vocab_size:
        raise DatastoreCorruptError(
            f"{folder / manifest.tokenizer.name} has {encoder.vocab_size} tokens, the store was made with {manifest.vocab_size}"
        )
    return encoder


class Encoder:
    """A tokenizer for text of the corpus. Threads may share it; `tokenizers` spreads a batch over the cores."""

    def __init__(self, tokenizer: Tokenizer | bytes, name: str) -> None:
        """`tokenizer`, or its canonical JSON, is copied and not changed; `name` is what users call it."""
        self.name = name
        self.json = to_canonical_json(tokenizer) if isinstance(tokenizer, Tokenizer) else tokenizer
        self.fingerprint = hash_tokenizer_json(self.json)
        self._full = Tokenizer.from_str(self.json.decode())
        self.vocab_size = max(self._full.get_vocab(with_added_tokens=True).values(), default=0) + 1
        self.dtype = choose_token_dtype(self.vocab_size)
        self._plain, self._control = make_plain_tokenizer(self._full, self.vocab_size)

    def encode(self, texts: Sequence[str], on_encoded: Callable[[int], None] = lambda n_chars: None) -> tuple[np.ndarray, np.ndarray]:
        """Encode texts, end to end, each followed by a separator -> tokens [n] u16|u32, lengths [texts] int64 without the separators.

        on_encoded: is told how many more characters are done.
        """
        if all(len(text) <= PIECE_CHARS for text in texts):
            encoded = self._encode_batch(texts)
            on_encoded(sum(map(len, texts)))
            return encoded
        found = [self._encode_long(text, on_encoded) for text in texts]
        return np.concatenate(found), np.array([len(tokens) - 1 for tokens in found], np.int64)

    def _encode_long(self, text: str, on_encoded: Callable[[int], None]) -> np.ndarray:
        """Encode a text in pieces -> tokens [n] with a separator."""
        pieces, separator = split_text(text, PIECE_CHARS), get_separator(self.dtype.itemsize)
        batches = []
        for at in range(0, len(pieces), PIECES):
            batches.append(self._encode_batch(pieces[at : at + PIECES])[0])
            on_encoded(sum(map(len, pieces[at : at + PIECES])))
        return np.concatenate([*(tokens[tokens != separator] for tokens in batches), np.array([separator], self.dtype)])

    def _encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        tokens = np.full(int(lengths.sum()) + len(encodings), get_separator(self.dtype.itemsize), self.dtype)
        at = 0
        for encoding, length in zip(encodings, lengths.tolist(), strict=True):
            tokens[at : at + length] = encoding.ids
            at += length + 1
        return self._drop_control(tokens, lengths)

    def _drop_control(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drop ids of control tokens: their text can also be a word of the vocabulary (Unigram, WordLevel)."""
        ends = tokens == get_separator(self.dtype.itemsize)
        bad = self._control[np.where(ends, 0, tokens)] & ~ends
        if not bad.any():
            return tokens, lengths
        owner = np.cumsum(ends) - ends
        return tokens[~bad], lengths - np.bincount(owner[bad], minlength=len(lengths))

    def decode_each_token(self) -> list[str]:
        """Return the text of each token by itself."""
        found: list[str] = self._full.decode_batch([[token] for token in range(self.vocab_size)], skip_special_tokens=False)
        return found

    def count_line_ends(self) -> np.ndarray:
        """Return how many line ends each token's text has, u8 [vocab_size]; more than 255 count as 255."""
        return np.fromiter((min(text.count("\n"), 255) for text in self.decode_each_token()), np.uint8, self.vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, control tokens included."""
        text: str = self._full.decode(list(ids), skip_special_tokens=False)
        return text

    def __reduce__(self) -> tuple[object, tuple[bytes, str]]:
        return Encoder, (self.json, self.name)


def split_text(text: str, most: int) -> list[str]:
    """Return pieces of a text, each of at most `most` characters, that end with a line if a line ends there."""
    pieces, start = [], 0
    while start < len(text):
        end = start + most
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        pieces.append(text[start:end])
        start = end
    return pieces


def find_control_tokens(tokenizer: Tokenizer) -> dict[int, AddedToken]:
    """Return the control tokens by id: every added token, flagged special or not, but for those that consist of blanks and line ends.

    GPT-NeoX, Phi and Gemma write indentation with these, and text without them would match nothing that the model reads.
    """
    added = tokenizer.get_added_tokens_decoder()
    return {number: token for number, token in added.items() if token.special or token.content.strip(" \t\r\n▁")}


def make_plain_tokenizer(tokenizer: Tokenizer, vocab_size: int) -> tuple[Tokenizer, np.ndarray]:
    """Make a tokenizer without control tokens that shares the model of `tokenizer`, and which ids are control tokens: bool [vocab_size].

    It has no post-processor, truncation or padding.
    """
    added, of_control = sorted(tokenizer.get_added_tokens_decoder().items()), find_control_tokens(tokenizer)
    control = np.zeros(vocab_size, bool)
    control[list(of_control)] = True
    kept: list[tuple[int, AddedToken]] = []
    has_blank = len(of_control) < len(added)
    words = tokenizer.get_vocab(with_added_tokens=False) if has_blank else {}
    for number, token in added if has_blank else []:
        if number not in of_control:
            kept.append((number, token))
        elif token.content not in words:  # ids are given in turn: something that no text has must take this one
            kept.append((number, AddedToken(f"\U0010fffe{secrets.token_hex(16)}", normalized=False, special=False)))
    copy = _without_added(tokenizer)
    copy.add_tokens([token for _, token in kept])
    if any(copy.token_to_id(token.content) != number for number, token in kept):
        copy = _without_added(tokenizer)
    return copy, control


def _without_added(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        copy.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        copy.pre_tokenizer = tokenizer.pre_tokenizer
    return copy

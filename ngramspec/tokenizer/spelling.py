"""The tokens of a vocabulary by what they spell: those that begin with a text, and those that a text begins with.

Texts enter, token ids leave. Knows tokenizers of the `tokenizers` library; control tokens spell nothing.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from functools import cached_property

import numpy as np
from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_MARKUP = re.compile("<.+>")
_LAST = "\U0010ffff"  # no name of a token has this character


class Spelling:
    """How a tokenizer's tokens spell texts. Threads may share it."""

    def __init__(self, backend: Tokenizer, vocab_size: int) -> None:
        """Look at the decoder alone; the vocabulary is sorted when the first text is spelled. `vocab_size`: V, of the model."""
        self._backend, self._vocab_size = backend, vocab_size
        kinds = _list_decoders(backend)
        self._is_byte_level = "ByteLevel" in kinds
        self._has_blanks = bool({"Metaspace", "Replace"} & kinds)

    def to_letters(self, text: str) -> str | None:
        """Return the letters that stand for a text in the names of tokens; None if tokens may not be able to spell it."""
        if self._is_byte_level:
            letters = "".join(map(_LETTERS.__getitem__, text.encode()))
        elif self._has_blanks:
            letters = text.replace(" ", "▁")
        else:
            return None
        return letters if all(self._backend.token_to_id(letter) is not None for letter in letters) else None

    def find_mask(self, letters: str) -> np.ndarray:
        """Return the tokens that begin with these letters or are a beginning of them.

        [V // 32 + 1] uint32: token t is bit t % 32 of word t // 32.
        """
        names, ids = self._sorted
        first, end = bisect_left(names, letters), bisect_left(names, letters + _LAST)
        allowed = np.zeros((self._vocab_size // 32 + 1) * 32, np.bool_)
        allowed[ids[first:end]] = True
        beginnings = [self._backend.token_to_id(letters[:n]) for n in range(1, len(letters))]
        allowed[[token for token in beginnings if token is not None and token not in self._control and token < self._vocab_size]] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def cut(self, letters: str, token: int) -> str:
        """Return what is left of these letters behind a token of their mask."""
        name = self._backend.id_to_token(token) or ""
        return letters[len(name) :] if letters.startswith(name) else ""

    def is_beginning(self, letters: str, token: int) -> bool:
        """Return whether a token of these letters' mask spells nothing beyond them."""
        return letters.startswith(self._backend.id_to_token(token) or letters)

    def can_begin(self, letters: str, token: int) -> bool:
        """Return whether a token is in the mask of these letters."""
        name = self._get_name(token)
        return name is not None and (letters.startswith(name) or name.startswith(letters))

    def _get_name(self, token: int) -> str | None:
        """Return the letters of a token; None for what is no token or a control token."""
        return None if token in self._control else self._backend.id_to_token(token)

    @cached_property
    def _control(self) -> frozenset[int]:
        return frozenset(self._backend.get_added_tokens_decoder())

    @cached_property
    def _sorted(self) -> tuple[list[str], np.ndarray]:
        """The letters of all tokens in order, and their ids. Takes half a second for 150,000 tokens."""
        vocab = self._backend.get_vocab(with_added_tokens=False)
        names = sorted(name for name, number in vocab.items() if number < self._vocab_size and number not in self._control)
        return names, np.fromiter(map(vocab.__getitem__, names), np.int64, len(names))


def _list_decoders(backend: Tokenizer) -> set[str]:
    """Return the kinds of a decoder's steps; a Replace counts if it writes blanks for `▁`."""
    if backend.decoder is None:
        return set()
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder.get("decoders", [decoder])
    return {step["type"] for step in steps if step["type"] != "Replace" or (step["pattern"], step["content"]) == ({"String": "▁"}, " ")}


def _map_letters() -> dict[str, int]:
    """Return GPT-2's printable stand-ins for bytes: one that is no visible Latin-1 character has the next free one from 256."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return {chr(byte if byte in visible else next(spare)): byte for byte in range(256)}


BYTE_OF_LETTER = _map_letters()  # by the letter that stands for it in byte-level vocabularies
_LETTERS = list(BYTE_OF_LETTER)


def spell_names(names: list[str], *, is_byte_level: bool) -> list[bytes]:
    """Return the bytes of tokens by their names; of a name that is not made of letters for bytes those of its own text."""
    known = BYTE_OF_LETTER.keys()
    if is_byte_level and known >= {*"".join(names)}:  # all at once: there may be 250,000
        texts = "\uffff".join(names).translate({ord(letter): byte for letter, byte in BYTE_OF_LETTER.items()})
        return [text.encode("latin-1") for text in texts.split("\uffff")]
    return [
        bytes(map(BYTE_OF_LETTER.__getitem__, name)) if is_byte_level and known >= {*name} else name.encode("utf-8", "surrogatepass")
        for name in names
    ]


def list_token_bytes(backend: Tokenizer) -> dict[bytes, int]:
    """Return the ids of a vocabulary's tokens by the bytes that they spell, control tokens left out; {} if they may not spell any."""
    kinds = _list_decoders(backend)
    vocab = backend.get_vocab(with_added_tokens=False)
    for token, added in backend.get_added_tokens_decoder().items():  # Gemma's has brackets and digits among them
        if vocab.get(added.content) == token and (added.special or _MARKUP.fullmatch(added.content)):
            del vocab[added.content]
    if "ByteLevel" in kinds:
        return dict(zip(spell_names(list(vocab), is_byte_level=True), vocab.values(), strict=True))
    if {"Metaspace", "Replace"} & kinds:
        bytes_of = {name: _BYTE_TOKEN.fullmatch(name) for name in vocab}
        found = {bytes([int(byte[1], 16)]): vocab[name] for name, byte in bytes_of.items() if byte}
        names = [name for name, byte in bytes_of.items() if not byte]
        texts = spell_names([name.replace("▁", " ") for name in names], is_byte_level=False)
        words = dict(zip(texts, map(vocab.__getitem__, names), strict=True))
        return found | words  # of a character that is spelled both ways, the token that texts are made of
    return {}

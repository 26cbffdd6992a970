"""Computes how few tokens a text can have without tokenizing it, so that too long a text is refused in milliseconds instead of seconds.

A tokenizer of the `tokenizers` library enters, a function from texts to lower bounds leaves. If no token of the vocabulary has more than m
bytes (or ASCII letters, or digits), a text with n * m of them has at least n tokens. If a tokenizer may drop text, the bound is 0.
"""

from __future__ import annotations

import json
import string
from typing import Any

from tokenizers import Tokenizer

from ngramspec.tokenizer.spelling import BYTE_OF_LETTER, spell_names

_LETTERS, _DIGITS = string.ascii_letters.encode(), string.digits.encode()
_ASCII, _BYTES = bytes(range(128)), bytes(range(256))
_IN_UTF8 = (*range(0xC0), *range(0xC2, 0xF5))
_NFC_SHRINKS = 3  # times, at most: U+212A (3 bytes) becomes K; three jamo of 3 bytes each become one syllable of 3


class FewestTokens:
    """Computes lower bounds for one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._classes: list[tuple[bytes, int]] = []  # (bytes that are not counted, the most of the others in a token)
        self._composes = False
        if tokenizer is None:
            return
        parts = json.loads(tokenizer.to_str())
        steps = [*_flatten_steps(parts["normalizer"], "normalizers"), *_flatten_steps(parts["pre_tokenizer"], "pretokenizers")]
        added = parts["added_tokens"]
        strips = any(token["lstrip"] or token["rstrip"] for token in added)
        if strips or parts["truncation"] is not None or not all(map(_keeps_text, steps)):
            return
        is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        dropped = _find_dropped_bytes(parts["model"], is_byte_level)
        if dropped is None:
            return
        self._composes = any(step["type"] == "NFC" for step in steps)
        names = [token["content"].encode() for token in added]
        names += spell_names(_list_pieces(parts["model"]), is_byte_level=is_byte_level)
        names.sort(key=len, reverse=True)
        for counted in (_BYTES, _LETTERS, _DIGITS):
            ignored = bytes({*_BYTES} - {*counted} | dropped)
            self._classes.append((ignored, _count_most(names, ignored)))

    def __call__(self, text: str) -> int:
        """Return a number of tokens that the text has at least, with or without control tokens in it."""
        data = text.encode("utf-8", "surrogatepass")
        marks = len(data.translate(None, _ASCII)) if self._composes else 0  # each may take the letter before it with it
        bounds = [0]
        for i, (ignored, most) in enumerate(self._classes):
            n = len(data.translate(None, ignored))
            if marks:
                n = n // _NFC_SHRINKS if i == 0 else max(n - marks, 0)
            bounds.append(-(-n // most))
        return max(bounds)


def _flatten_steps(part: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [step for each in part[several] for step in _flatten_steps(each, several)] if part["type"] == "Sequence" else [part]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return whether a step of a tokenizer outputs as many bytes as it gets, except for what NFC composes."""
    match step["type"]:
        case "ByteLevel" | "NFC" | "Prepend" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return step.get("behavior") != "Removed"
        case "Replace":
            pattern = step["pattern"].get("String")
            return pattern is not None and pattern.isascii() and len(step["content"].encode()) >= len(pattern)
    return False


def _find_dropped_bytes(model: dict[str, Any], is_byte_level: bool) -> set[int] | None:
    """Return the bytes that a tokenizer's model may drop or join to one unknown token; None if it may be any."""
    if model.get("type") not in ("BPE", "Unigram") or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    vocab = {*_list_pieces(model)}
    if is_byte_level and model["type"] == "BPE":
        return {byte for letter, byte in BYTE_OF_LETTER.items() if letter not in vocab}
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in _IN_UTF8):
        return set()
    return None


def _list_pieces(model: dict[str, Any]) -> list[str]:
    """Return the texts of a vocabulary as the tokenizer's model has them."""
    pieces = model["vocab"]
    return list(pieces) if isinstance(pieces, dict) else [piece for piece, _ in pieces]


def _count_most(names: list[bytes], ignored: bytes) -> int:
    """Return the most bytes that are not `ignored` in a name, at least 1. `names`: the longest first."""
    most = 1
    for name in names:
        if len(name) <= most:
            break
        most = max(most, len(name.translate(None, ignored)))
    return most

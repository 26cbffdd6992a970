"""The syntax table: which tokens usually follow a few classes of tokens in source code, whatever the request has written so far.

It is a class-based n-gram model (Brown et al., "Class-Based n-gram Models of Natural Language", 1992). A frequent token is a class of its
own; other words, numbers and rare punctuation share one each. The shipped file holds the texts of tokens, so that it serves any tokenizer;
`open_syntax` translates it to ids. Contexts are hashes of the latest 1 to `ORDERS` classes, and the longest one in the table counts.
Indentation is relative: the table says by how many columns a line's differs from that of the line before.

A tokenizer enters, arrays for compiled code leave. Knows no sequence. Written by tools/learn_syntax.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from ngramspec.datastore.code_cache import njit
from ngramspec.datastore.partial_files import write_whole
from ngramspec.tokenizer.spelling import list_token_bytes

SYNTAX = Path(__file__).with_name("syntax.npz")
# Tokens of the longest context.
ORDERS = 6
# Tokens that a context lists, the most likely ones.
FOLLOWERS = 4
# Bounds between the levels of a token's probability in a context; less than the lowest is not listed.
LEVELS = (0.04, 0.06, 0.09, 0.13, 0.18, 0.24, 0.31, 0.38, 0.46, 0.54, 0.62, 0.7, 0.78, 0.85, 0.91, 0.96)
# Version of the classes, and of what is cached of them.
FORMAT = 1
# Class of control tokens, and of what is no token.
CONTROL = b"\0"
# In `followers` of the file: no token.
NONE = 0xFFFF
# Columns of indentation that are known, and the bound of its change from line to line.
COLUMNS, CHANGE = 64, 32
# Line ends that a token with indentation may begin with.
LINE_ENDS = 3
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of Fibonacci hashing
_STEP = np.uint64(0x01000193)
_INDENT = re.compile(rb"(\n*)( *)\Z")
_WORD = re.compile(rb"( ?)([A-Za-z0-9_\x80-\xff]+)\Z")
_LED_WORD = re.compile(rb"( ?[^A-Za-z0-9_\x80-\xff\s])[A-Za-z0-9_\x80-\xff]+\Z")


class SyntaxTable(NamedTuple):
    """The table in a tokenizer's ids. H is a power of two; 1: nothing is known."""

    classes: np.ndarray  # [V] uint32, of each token
    keys: np.ndarray  # [H] uint32, open addressing; 0: free
    tokens: np.ndarray  # [H, FOLLOWERS] int32, the most likely first; -1: none; less: a change of indentation, see `encode_change`
    levels: np.ndarray  # [H, FOLLOWERS] uint8, of their probabilities
    blanks: np.ndarray  # [V] int8, columns of indentation behind a token of blanks and line ends; -1: other tokens
    breaks: np.ndarray  # [V] int8, columns of indentation behind the line end in a token; -1: it has none
    indents: np.ndarray  # [LINE_ENDS, COLUMNS] int32, the token of so many line ends and columns; -1: none


def make_empty_syntax() -> SyntaxTable:
    """Return a table that knows nothing."""
    none, one = np.full((1, FOLLOWERS), -1, np.int32), np.zeros(1, np.uint32)
    blanks, indents = np.full(1, -1, np.int8), np.full((LINE_ENDS, COLUMNS), -1, np.int32)
    return SyntaxTable(one, one, none, none.astype(np.uint8), blanks, blanks, indents)


def classify_token(text: bytes, frequent: Container[bytes]) -> bytes:
    """Return the class of a token's text. `frequent`: texts that are classes of their own."""
    if text in frequent:
        return text
    if word := _WORD.match(text):
        blank, letters = word.groups()
        return blank + (b"0" if letters.isdigit() else b"A" if letters[:1].isupper() else b"a")
    if led := _LED_WORD.match(text):
        return led[1] + b"a"
    if indent := _INDENT.match(text):
        return (indent[1][:2] + b" ") if indent[2] else text[:2]
    if not text.strip():
        return b"\t"
    return text if len(text) <= 4 else text[:2] + (b"\0\n" if text.endswith(b"\n") else b"\0")


def find_columns(text: bytes, joined: int) -> tuple[int, int]:
    """Return a token's `blanks` and `breaks`. joined: the blanks before a line's first word that are in the word's token."""
    line_end = text.rfind(b"\n")
    trailing = len(text) - 1 - max(line_end, len(text.rstrip(b" ")) - 1)
    columns = min(trailing + joined, COLUMNS - 1) if trailing else 0
    return columns if _INDENT.match(text) else -1, columns if line_end >= 0 and line_end + 1 + trailing == len(text) else -1


def count_joined_blanks(backend: Tokenizer, texts: Mapping[int, bytes]) -> int:
    """Return how many blanks of a line's indentation are in the token of its first word: 1 or 0. `texts`: of the tokens."""
    pieces = [texts.get(token, b"") for token in backend.encode("a\n        b", add_special_tokens=False).ids]
    return int(any(piece.strip(b"\n") == b" " * 7 for piece in pieces))


def encode_change(line_ends: int, columns: int) -> int:
    """Return the code in `tokens` for a token of line ends and an indentation that differs by these columns."""
    return -2 - (line_ends * 2 * CHANGE + columns + CHANGE)


def hash_class(name: bytes) -> int:
    """Return the number of a class, of 32 bits."""
    return zlib.crc32(name)


@njit(cache=True, nogil=True, forceinline=True)
def extend_hash(h, class_number):
    """Return the hash (uint64) of a context with one more class before it. The empty context's is 0."""
    h = (h ^ np.uint64(class_number)) * _MULTIPLIER
    return h ^ (h >> np.uint64(29))


@njit(cache=True, nogil=True, forceinline=True)
def make_key(h, length):
    """Return the key (uint32) of a context of `length` classes."""
    return np.uint32(max(((h >> np.uint64(32)) ^ (np.uint64(length) * _STEP)) & np.uint64(0xFFFFFFFF), np.uint64(1)))


@njit(cache=True, nogil=True, forceinline=True)
def find_context(table, recent, n):
    """Return the row of the longest context in the table; -1: none. recent [n] int32, the latest token first."""
    h, found, mask = np.uint64(0), np.int64(-1), np.int64(len(table.keys) - 1)
    if mask == 0:
        return found
    for k in range(min(n, ORDERS)):
        token = recent[k]
        if not 0 <= token < len(table.classes):
            break
        h = extend_hash(h, table.classes[token])
        key = make_key(h, k + 1)
        row = np.int64(key) & mask
        while table.keys[row] != 0 and table.keys[row] != key:
            row = (row + 1) & mask
        if table.keys[row] == key:
            found = row
    return found


@njit(cache=True, nogil=True, forceinline=True)
def find_margin(table, recent, n):
    """Return the columns of indentation of the latest line that is not empty; -1: it begins before recent [n] int32."""
    margin, has_text = 0, False
    for k in range(n):
        token = recent[k]
        if not 0 <= token < len(table.blanks):
            break
        blanks, after_break = np.int64(table.blanks[token]), np.int64(table.breaks[token])
        if after_break >= 0:
            if has_text:
                return max(margin, after_break)
            margin, has_text = 0, blanks < 0
        elif blanks >= 0:
            margin = blanks
        else:
            margin, has_text = 0, True
    return np.int64(-1)


@njit(cache=True, nogil=True, forceinline=True)
def get_follower(table, row, rank, margin):
    """Return the token at a rank of a context; -1: none. margin: of `find_margin`."""
    token = np.int64(table.tokens[row, rank])
    if token >= -1:
        return token
    code = -2 - token
    columns = margin + code % (2 * CHANGE) - CHANGE
    return np.int64(table.indents[code // (2 * CHANGE), columns]) if margin >= 0 and 0 <= columns < COLUMNS else np.int64(-1)


def open_syntax(backend: Tokenizer | None, vocab_size: int, cache: Path | None = None) -> SyntaxTable:
    """Return the shipped table in a tokenizer's ids, below `vocab_size`. Classifying 150,000 tokens takes 0.3 s, kept in the file `cache`.

    The table knows nothing if the tokenizer's tokens have no texts.
    """
    shipped = SYNTAX.read_bytes()
    with np.load(SYNTAX, allow_pickle=False) as file:
        names, keys, followers, levels = (file[name] for name in ("names", "keys", "followers", "levels"))
    digest = np.frombuffer(hashlib.sha256(shipped + f"{FORMAT} {vocab_size}".encode()).digest()[:8], np.int32)
    numbers = _read_numbers(cache, digest) if cache is not None else None
    if numbers is None:
        texts = list_token_bytes(backend) if backend is not None else {}
        if backend is None or not texts:
            return make_empty_syntax()
        numbers = _classify_all(names.tobytes().split(b"\xff"), backend, texts, vocab_size)
        if cache is not None:
            _write_numbers(cache, np.concatenate([digest, numbers]))
    classes, blanks, breaks, indents, token_of = np.split(numbers, np.cumsum([vocab_size] * 3 + [LINE_ENDS * COLUMNS]))
    tokens = np.where(followers == NONE, np.int32(-1), token_of[np.minimum(followers, len(token_of) - 1)])
    return SyntaxTable(
        classes.view(np.uint32), keys, tokens, levels, blanks.astype(np.int8), breaks.astype(np.int8), indents.reshape(LINE_ENDS, COLUMNS)
    )


def _classify_all(names: list[bytes], backend: Tokenizer, texts: dict[bytes, int], vocab_size: int) -> np.ndarray:
    """Return the table's numbers for a tokenizer, [..] int32: classes, `blanks`, `breaks`, `indents`, and the token of each name.

    The names: frequent ones, an empty one, others; a change of indentation is b"\xfe" and its code.
    """
    end = names.index(b"")
    frequent, followers = frozenset(names[:end]), names[:end] + names[end + 1 :]
    texts = {text: token for text, token in texts.items() if token < vocab_size}
    joined = count_joined_blanks(backend, {token: text for text, token in texts.items()})
    classes = np.full(vocab_size, hash_class(CONTROL), np.uint32)
    columns = np.full((2, vocab_size), -1, np.int32)
    for text, token in texts.items():
        classes[token] = hash_class(classify_token(text, frequent))
        if text[-1:] in b" \n":
            columns[:, token] = find_columns(text, joined)
    indents = np.full((LINE_ENDS, COLUMNS), -1, np.int32)
    for line_ends in range(LINE_ENDS):
        for column in range(COLUMNS):
            blanks = max(column - joined, 0)
            indents[line_ends, column] = texts.get(b"\n" * line_ends + b" " * blanks, -1) if line_ends or blanks else -1
    token_of = [int(name[1:]) if name.startswith(b"\xfe") else texts.get(name, -1) for name in followers]
    return np.concatenate([classes.view(np.int32), columns.ravel(), indents.ravel(), np.array(token_of, np.int32)])


def _read_numbers(cache: Path, digest: np.ndarray) -> np.ndarray | None:
    """Return what `_write_numbers` wrote; None if it is not there, not whole, or of another table."""
    with contextlib.suppress(OSError, ValueError):
        raw = cache.read_bytes()
        numbers = np.frombuffer(raw[:-4], np.int32)
        if zlib.crc32(raw[:-4]) == int.from_bytes(raw[-4:], "little") and (numbers[:2] == digest).all():
            return numbers[2:].copy()
    return None


def _write_numbers(cache: Path, numbers: np.ndarray) -> None:
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        raw = numbers.tobytes()
        write_whole(cache, raw + zlib.crc32(raw).to_bytes(4, "little"))

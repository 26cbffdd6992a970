"""From documents to one segment file: the step that building, updating, merging and the distributed build have in common.

A `Piece` is the content of a segment before it is sorted. Documents are encoded into one, or the live documents of a segment on
disk are copied into one; pieces are joined; a piece is sorted and written. Knows nothing of manifests or of which documents are meant.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .corpus import Document
from .errors import DatastoreCorruptError
from .format import (
    DOC_DTYPE,
    Segment,
    SegmentEntry,
    check_bodies,
    separator,
    suffix_width,
    token_dtype,
    write_segment,
)
from .suffix_array import sort_memory, sort_suffixes
from .tokens import Encoder

Vectors = Callable[[np.ndarray, np.ndarray], np.ndarray | None]
"""tokens [n] with separators, doc starts [n_docs] int64 -> the router's records (a `vector_dtype` array), or None."""

_SHORT_INDEX = (1 << 31) - 1  # bytes that divsufsort sorts with 4-byte indices


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Documents of a segment to be. Offsets count from the piece's own beginning, where no separator stands yet."""

    tokens: np.ndarray
    """u16 or u32 [n]: every document followed by a separator."""
    docs: np.ndarray
    """DOC_DTYPE, `start` and `path_offset` within this piece."""
    paths: bytes


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a segment carries of its store."""

    vocab_size: int
    fingerprint: str
    vectors: Vectors | None = None


def encode(documents: Sequence[Document], encoder: Encoder) -> Piece:
    """Tokenize documents."""
    tokens, lengths = encoder.encode([document.text for document in documents])
    names = [document.path.encode() for document in documents]
    docs = np.zeros(len(documents), DOC_DTYPE)
    docs["length"] = lengths
    docs["start"] = np.cumsum(lengths + 1) - lengths - 1
    docs["path_bytes"] = [len(name) for name in names]
    docs["path_offset"] = np.cumsum(docs["path_bytes"], dtype=np.uint64) - docs["path_bytes"]
    docs["size"] = [document.size for document in documents]
    docs["mtime_ns"] = [document.mtime_ns for document in documents]
    docs["hash"] = np.frombuffer(b"".join(document.hash for document in documents), "V16")
    return Piece(tokens, docs, b"".join(names))


def live(segment: Segment, dead: Collection[int]) -> Piece:
    """The documents of a segment but for the dead ones. Raises DatastoreCorruptError: damage must not get a new checksum."""
    check_bodies(segment, ("tokens", "docs", "paths"))
    docs, tokens = segment.docs, segment.tokens
    keep = np.ones(len(docs), bool)
    keep[list(dead)] = False
    starts, lengths = docs["start"].astype(np.int64), docs["length"].astype(np.int64)
    offsets, sizes = docs["path_offset"].astype(np.int64), docs["path_bytes"].astype(np.int64)
    whole = (
        np.array_equal(starts, 1 + np.cumsum(lengths + 1) - lengths - 1)
        and int(lengths.sum()) + len(docs) + 1 == len(tokens)
        and np.array_equal(offsets, np.cumsum(sizes) - sizes)
        and int(sizes.sum()) == len(segment.paths)
        and np.count_nonzero(tokens == separator(tokens.dtype.itemsize)) == len(docs) + 1
    )
    if not whole:
        raise DatastoreCorruptError(f"{segment.path}: docs: the documents do not lie one after the other")
    chosen = docs[keep].copy()
    chosen["start"] = np.cumsum(lengths[keep] + 1) - lengths[keep] - 1
    chosen["path_offset"] = np.cumsum(sizes[keep]) - sizes[keep]
    return Piece(tokens[1:][np.repeat(keep, lengths + 1)], chosen, segment.paths[np.repeat(keep, sizes)].tobytes())


def join(pieces: Sequence[Piece]) -> Piece:
    """One piece of several, in their order."""
    if len(pieces) == 1:
        return pieces[0]
    docs = np.concatenate([piece.docs for piece in pieces])
    counts = [len(piece.docs) for piece in pieces]
    for name, sizes in (("start", [len(p.tokens) for p in pieces]), ("path_offset", [len(p.paths) for p in pieces])):
        docs[name] += np.repeat((np.cumsum(sizes) - sizes).astype(np.uint64), counts)
    return Piece(np.concatenate([piece.tokens for piece in pieces]), docs, b"".join(piece.paths for piece in pieces))


class Gate:
    """Closed when a build ends early, so that a thread that still sorts then writes nothing: `close` waits for a write under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise InterruptedError("the build was ended")

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True


def write(folder: Path, piece: Piece, recipe: Recipe, seconds: dict[str, float] | None = None, gate: Gate | None = None) -> SegmentEntry:
    """Sort a piece and write its segment, fsynced. `seconds`: what sorting, vectors and writing took is added here.

    Raises DatastoreFullError, leaving no file; InterruptedError where the gate was closed.
    """
    clock = _Clock(seconds)
    dtype = token_dtype(recipe.vocab_size)
    tokens = np.empty(len(piece.tokens) + 1, dtype)
    tokens[0] = separator(dtype.itemsize)
    tokens[1:] = piece.tokens
    docs = piece.docs.copy()
    docs["start"] += 1
    suffixes = sort_suffixes(tokens, suffix_width(len(tokens)))
    clock.lap("sorting")
    records = recipe.vectors(tokens, docs["start"].astype(np.int64)) if recipe.vectors is not None else None
    clock.lap("vectors")
    with gate or Gate():
        entry = write_segment(
            folder,
            tokens=tokens,
            suffixes=suffixes,
            docs=docs,
            paths=piece.paths,
            vectors=records,
            vocab_size=recipe.vocab_size,
            fingerprint=recipe.fingerprint,
        )
    clock.lap("writing")
    return entry


def build_segment(folder: Path, documents: Iterable[Document], encoder: Encoder, vectors: Vectors | None = None) -> SegmentEntry | None:
    """Documents enter, the entry of their segment leaves; None where there are none. All of it in memory, in this thread."""
    pieces = [encode(batch, encoder) for batch in batches(documents, 1 << 20)]
    if not pieces:
        return None
    return write(folder, join(pieces), Recipe(encoder.vocab_size, encoder.fingerprint, vectors))


def batches(documents: Iterable[Document], n_chars: int) -> Iterable[list[Document]]:
    """Consecutive documents of `n_chars` characters or a little more together."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= n_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def most_tokens(max_memory: int, token_width: int) -> int:
    """Tokens of a segment that can be gathered, sorted and written in `max_memory` bytes while the next one is gathered."""
    per_token = 4 * token_width + -(-sort_memory(1 << 20, token_width) >> 20)
    return max(1 << 16, min(max_memory // per_token, _SHORT_INDEX // token_width))


class _Clock:
    def __init__(self, seconds: dict[str, float] | None) -> None:
        self.seconds = seconds if seconds is not None else {}
        self.last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self.last
        self.last = now

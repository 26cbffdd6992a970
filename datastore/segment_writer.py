"""Writing documents as one segment file: the step that building, updating, merging and the distributed build have in common.

`SegmentContents` are documents before they are sorted. Texts are encoded into them, or the live documents of a segment on disk are copied
into them; several are joined, sorted and written. The module knows nothing of manifests or of which documents are meant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .corpus import Document
from .errors import DatastoreCorruptError
from .format import (
    DOC_DTYPE,
    MAX_TOKENS,
    Segment,
    SegmentEntry,
    check_bodies,
    choose_token_dtype,
    compute_suffix_width,
    get_separator,
    write_segment,
)
from .recorder import Recorder
from .suffix_array import estimate_sort_memory, sort_suffixes
from .tokens import Encoder

# tokens [n] with separators, doc starts [n_docs] int64 -> records for similar files (a `make_vector_dtype` array), or None
VectorFunction = Callable[[np.ndarray, np.ndarray], np.ndarray | None]
_SHORT_INDEX = (1 << 31) - 1  # bytes that divsufsort sorts with 4-byte indices


@dataclass(frozen=True, eq=False, slots=True)
class SegmentContents:
    """The documents of a segment before it is sorted. Offsets count from the beginning, where no separator stands yet."""

    tokens: np.ndarray
    """u16 or u32 [n]: every document followed by a separator."""
    docs: np.ndarray
    """DOC_DTYPE, `start` and `path_offset` within these contents."""
    paths: bytes


@dataclass(frozen=True, slots=True)
class SegmentSettings:
    """What the segments of a store have in common."""

    vocab_size: int
    fingerprint: str
    vectors: VectorFunction | None = None
    max_tokens: int = MAX_TOKENS
    """Tokens from which on a segment is closed."""


def encode_documents(
    documents: Sequence[Document], encoder: Encoder, on_encoded: Callable[[int], None] = lambda n_chars: None
) -> SegmentContents:
    """Tokenize documents. `on_encoded` is told how many more characters are done."""
    tokens, lengths = encoder.encode([document.text for document in documents], on_encoded)
    names = [document.path.encode() for document in documents]
    docs = np.zeros(len(documents), DOC_DTYPE)
    docs["length"] = lengths
    docs["start"] = np.cumsum(lengths + 1) - lengths - 1
    docs["path_bytes"] = [len(name) for name in names]
    docs["path_offset"] = np.cumsum(docs["path_bytes"], dtype=np.uint64) - docs["path_bytes"]
    docs["size"] = [document.size for document in documents]
    docs["mtime_ns"] = [document.mtime_ns for document in documents]
    docs["hash"] = np.frombuffer(b"".join(document.hash for document in documents), "V16")
    return SegmentContents(tokens, docs, b"".join(names))


def copy_live(segment: Segment, tombstones: Collection[int]) -> SegmentContents:
    """Copy the documents of a segment without tombstones. Raises DatastoreCorruptError: damage must not get a new checksum."""
    check_bodies(segment, ("tokens", "docs", "paths"))
    docs, tokens = segment.docs, segment.tokens
    keep = np.ones(len(docs), bool)
    keep[list(tombstones)] = False
    starts, lengths = docs["start"].astype(np.int64), docs["length"].astype(np.int64)
    offsets, sizes = docs["path_offset"].astype(np.int64), docs["path_bytes"].astype(np.int64)
    whole = (
        np.array_equal(starts, 1 + np.cumsum(lengths + 1) - lengths - 1)
        and int(lengths.sum()) + len(docs) + 1 == len(tokens)
        and np.array_equal(offsets, np.cumsum(sizes) - sizes)
        and int(sizes.sum()) == len(segment.paths)
        and np.count_nonzero(tokens == get_separator(tokens.dtype.itemsize)) == len(docs) + 1
    )
    if not whole:
        raise DatastoreCorruptError(f"{segment.path}: docs: the documents do not lie one after the other")
    chosen = docs[keep].copy()
    chosen["start"] = np.cumsum(lengths[keep] + 1) - lengths[keep] - 1
    chosen["path_offset"] = np.cumsum(sizes[keep]) - sizes[keep]
    return SegmentContents(tokens[1:][np.repeat(keep, lengths + 1)], chosen, segment.paths[np.repeat(keep, sizes)].tobytes())


def join_contents(parts: Sequence[SegmentContents]) -> SegmentContents:
    """Join several contents in their order."""
    if len(parts) == 1:
        return parts[0]
    docs = np.concatenate([part.docs for part in parts])
    counts = [len(part.docs) for part in parts]
    for name, sizes in (("start", [len(part.tokens) for part in parts]), ("path_offset", [len(part.paths) for part in parts])):
        docs[name] += np.repeat((np.cumsum(sizes) - sizes).astype(np.uint64), counts)
    return SegmentContents(np.concatenate([part.tokens for part in parts]), docs, b"".join(part.paths for part in parts))


class WriteGate:
    """Keeps a thread that still sorts when a build ends early from writing: `close` waits for a write under way."""

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


def sort_and_write(
    folder: Path, contents: SegmentContents, settings: SegmentSettings, recorder: Recorder | None = None, gate: WriteGate | None = None
) -> SegmentEntry:
    """Sort contents and write their segment, fsynced. `recorder` gets what sorting, vectors and writing took.

    Raises DatastoreFullError, leaving no file; InterruptedError if the gate was closed.
    """
    recorder = recorder or Recorder()
    dtype = choose_token_dtype(settings.vocab_size)
    with recorder.measure("sorting"):
        tokens = np.empty(len(contents.tokens) + 1, dtype)
        tokens[0] = get_separator(dtype.itemsize)
        tokens[1:] = contents.tokens
        docs = contents.docs.copy()
        docs["start"] += 1
        suffixes = sort_suffixes(tokens, compute_suffix_width(len(tokens)))
    with recorder.measure("vectors"):
        records = settings.vectors(tokens, docs["start"].astype(np.int64)) if settings.vectors is not None else None
    with recorder.measure("writing"), gate or WriteGate():
        return write_segment(
            folder,
            tokens=tokens,
            suffixes=suffixes,
            docs=docs,
            paths=contents.paths,
            vectors=records,
            vocab_size=settings.vocab_size,
            fingerprint=settings.fingerprint,
        )


def build_segment(folder: Path, documents: Iterable[Document], encoder: Encoder, settings: SegmentSettings) -> SegmentEntry | None:
    """Write the segment of all documents -> its entry, None if there are none. All of it is in memory, in this thread."""
    parts = [encode_documents(batch, encoder) for batch in batch_documents(documents, 1 << 20)]
    return sort_and_write(folder, join_contents(parts), settings) if parts else None


def batch_documents(documents: Iterable[Document], n_chars: int) -> Iterable[list[Document]]:
    """Yield consecutive documents in batches of `n_chars` characters or a little more."""
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


def compute_max_tokens(max_memory: int, token_width: int) -> int:
    """Return how many tokens of a segment can be gathered, sorted and written in `max_memory` bytes while the next one is gathered."""
    per_token = 4 * token_width + -(-estimate_sort_memory(1 << 20, token_width) >> 20)
    return max(1 << 16, min(max_memory // per_token, _SHORT_INDEX // token_width))

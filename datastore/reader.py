"""An open datastore: one generation of its segments, what stands where, and the switch to the next generation.

A folder enters, arrays and addresses for look-ups leave, and documents, paths and lines for people. It reads files through format.py
alone and never writes. What was checked at open are manifest, headers, sizes and vocabulary; values in the bodies are checked here
when they are used, so that the worst that a damaged body does is a typed error or a poor draft.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from . import page_cache
from .errors import DatastoreCorruptError, DatastoreError, TokenizerMismatchError
from .format import HEADER_BYTES, MANIFEST, PLACE_BITS, Segment, SegmentEntry, map_segment
from .manifest import Manifest, describe_missing, read_left_out, read_manifest, read_tokenizer, read_vocabulary

_TALLY = 1 << 16  # occurrences that one look-up for people reads at most


@dataclass(frozen=True, slots=True)
class Location:
    """The place of a token in a file."""

    path: str
    line: int
    """The line's number, from 1."""
    offset: int
    """How many tokens of the document stand before it."""


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A live document of a snapshot."""

    segment: int
    number: int
    path: str
    hash: bytes
    size: int
    mtime_ns: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """What a look-up for people found."""

    length: int
    """Tokens of the context that agree, 0 if none do."""
    count: int
    """Live occurrences of them."""
    continuations: list[tuple[int, int]]
    """(token, how often it follows), by falling count."""
    locations: list[Location]
    complete: bool
    """False if there are more occurrences than were counted."""


class Snapshot:
    """The immutable arrays of one generation. Its rows of addresses stay valid as long as somebody holds it."""

    def __init__(self, manifest: Manifest, segments: Sequence[Segment], line_ends: np.ndarray):
        """Raises DatastoreCorruptError if a document that has a tombstone does not exist."""
        self.manifest = manifest
        self.generation = manifest.generation
        self.segments = tuple(segments)
        self.line_ends = line_ends  # u8 [vocab_size]
        self.n_tokens = sum(s.header.n_tokens for s in segments)
        self._loading: threading.Thread | None = None
        self._deleted = [_find_deleted_ranges(segment, entry) for segment, entry in zip(segments, manifest.segments, strict=True)]

    def load_pages(self, room: int) -> int:
        """Bring what look-ups read into memory, in a thread, unless it is there -> the bytes that it takes, at most `room`.

        That is everything if there is room for it, else the tokens, which a look-up reads four times as many pages of as of the suffixes,
        else nothing. What does not fit is read page by page from then on.
        """
        whole, tokens = sum(len(s.data) for s in self.segments), sum(s.tokens.nbytes for s in self.segments)
        if whole <= room:
            taken, parts = whole, [(s.data, len(s.data)) for s in self.segments]
        else:
            for segment in self.segments:
                page_cache.expect_random_reads(segment.data)
            taken, parts = (tokens, [(s.data, HEADER_BYTES + s.tokens.nbytes) for s in self.segments]) if tokens <= room else (0, [])
        if not self.is_loading and not all(page_cache.is_in_memory(data[:n]) for data, n in parts):
            self._loading = page_cache.load_in_thread(parts)
        return taken

    @property
    def is_loading(self) -> bool:
        """Whether a thread is bringing pages into memory, so that a look-up would wait for the disk."""
        return self._loading is not None and self._loading.is_alive()

    def wait_until_loaded(self) -> None:
        """Return once no page is being brought into memory any more."""
        if self._loading is not None:
            self._loading.join()

    @cached_property
    def rows(self) -> np.ndarray:
        """What `search` reads of each segment, int64 [segments, ROW]."""
        from . import search  # here: only look-ups wait for the compiler's import

        rows = np.zeros((len(self.segments), search.ROW), np.int64)
        for row, segment, deleted in zip(rows, self.segments, self._deleted, strict=True):
            header = segment.header
            row[search.TOKENS], row[search.N_TOKENS] = segment.tokens.ctypes.data, header.n_tokens
            row[search.WIDE], row[search.VOCAB] = header.token_width == 4, header.vocab_size
            row[search.SUFFIXES], row[search.N_SUFFIXES] = segment.suffixes.ctypes.data, header.n_suffixes
            row[search.WIDTH] = header.suffix_width
            row[search.DELETED], row[search.N_DELETED] = deleted.ctypes.data, len(deleted)
        return rows

    def locate(self, place: int) -> Location:
        """Return file, line and offset of a place (segment << 40 | position). Raises DatastoreCorruptError if no document has it."""
        from .search import count_line_ends

        number, position = place >> PLACE_BITS, place & (1 << PLACE_BITS) - 1
        if not (0 <= number < len(self.segments) and position < self.segments[number].header.n_tokens):
            raise ValueError(f"place {place}: segment {number}, position {position} is outside this snapshot")
        segment = self.segments[number]
        lo, hi = 0, len(segment.docs)
        while lo < hi:
            mid = (lo + hi) >> 1
            if int(segment.docs["start"][mid]) <= position:
                lo = mid + 1
            else:
                hi = mid
        start, end = _find_extent(segment, lo - 1) if lo else (0, 0)
        if not start <= position < end:
            raise DatastoreCorruptError(f"{segment.path}: docs: no document has position {position}")
        line = 1 + int(count_line_ends(segment.tokens[start:position], self.line_ends))
        return Location(_read_path(segment, lo - 1), line, position - start)

    def text_tokens(self, segment: int, doc: int) -> np.ndarray:
        """Return the token ids of a document, u16|u32 [n]: a view. Raises DatastoreCorruptError."""
        start, end = _find_extent(self.segments[segment], doc)
        return self.segments[segment].tokens[start:end]

    def iterate_documents(self) -> Iterator[DocumentInfo]:
        """Yield all live documents, by segment and number. Raises DatastoreCorruptError at the first whose record is wrong."""
        for number, (segment, entry) in enumerate(zip(self.segments, self.manifest.segments, strict=True)):
            tombstones = set(entry.tombstones)
            for doc in range(segment.header.n_docs):
                if doc not in tombstones:
                    start, end = _find_extent(segment, doc)
                    record = segment.docs[doc]
                    yield DocumentInfo(
                        number,
                        doc,
                        _read_path(segment, doc),
                        record["hash"].tobytes(),
                        int(record["size"]),
                        int(record["mtime_ns"]),
                        end - start,
                    )


class Datastore:
    """An open store. `snapshot` is the generation in use; `refresh` switches it, and whoever holds the old one may go on using it."""

    def __init__(self, path: Path, snapshot: Snapshot, stamp: tuple[int, ...], verify: str, copy: bool):
        self.path = path
        self._snapshot: Snapshot | None = snapshot  # None: let go of until it is needed
        self._stamp, self._verify, self._copy = stamp, verify, copy
        self._tokenizer = snapshot.manifest.tokenizer_name, snapshot.manifest.tokenizer_fingerprint

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        verify: Literal["header", "full"] = "header",
        copy: bool = False,
        tokenizer_fingerprint: str | None = None,
        tokenizer_name: str | None = None,
    ) -> Datastore:
        """Open the current generation. verify="full" reads every byte; copy=True reads the segments into memory instead of mapping them.

        Raises DatastoreNotFoundError, DatastoreFormatError, DatastoreCorruptError, and TokenizerMismatchError if a fingerprint (sha256,
        hex) is given that is not the store's.
        """
        if verify not in ("header", "full"):
            raise ValueError(f"verify must be 'header' or 'full', got {verify!r}")
        folder = Path(path)
        snapshot, stamp = _load_generation(folder, verify, copy, None)
        store = cls(folder, snapshot, stamp, verify, copy)
        if tokenizer_fingerprint is not None:
            store.check_tokenizer(tokenizer_fingerprint, tokenizer_name)
        return store

    def check_tokenizer(self, fingerprint: str, name: str | None = None) -> None:
        """Raise TokenizerMismatchError if the store was made with another tokenizer than that of this fingerprint (sha256, hex)."""
        own_name, own = self._tokenizer
        if fingerprint != own:
            raise TokenizerMismatchError(
                f"{self.path} was made with the tokenizer of {own_name!r} ({own[:12]}…), the "
                f"model's is that of {name or 'another model'!r} ({fingerprint[:12]}…): build a datastore with --tokenizer and that model"
            )

    @property
    def snapshot(self) -> Snapshot:
        """The generation in use. After `release` it is the current one, opened anew, which raises as `open` does."""
        snapshot = self._snapshot
        if snapshot is None:
            snapshot, self._stamp = self._load(None)
            self._snapshot = snapshot
        return snapshot

    def release(self) -> None:
        """Let go of the files until `snapshot` is asked for again."""
        self._snapshot = None

    @property
    def generation(self) -> int:
        return self.snapshot.generation

    @property
    def n_tokens(self) -> int:
        """The tokens of all segments, separators and deleted documents included."""
        return self.snapshot.n_tokens

    def refresh(self) -> bool:
        """Pick up a newer generation if there is one; else it costs one `stat`. Segments that both name stay mapped.

        Raises as `open` does; then the generation in use stays in use, and the next call tries again.
        """
        if _read_stamp(self.path) == self._stamp:
            return False
        old = self.snapshot
        snapshot, self._stamp = self._load(old)
        if snapshot.manifest == old.manifest:
            return False
        self._snapshot = snapshot
        return True

    def _load(self, old: Snapshot | None) -> tuple[Snapshot, tuple[int, ...]]:
        snapshot, stamp = _load_generation(self.path, self._verify, self._copy, old)
        (name, fingerprint), manifest = self._tokenizer, snapshot.manifest
        if manifest.tokenizer_fingerprint != fingerprint:
            raise TokenizerMismatchError(
                f"{self.path} was made anew with the tokenizer of {manifest.tokenizer_name!r}, the open generation with that of "
                f"{name!r}: open it again"
            )
        return snapshot, stamp

    def close(self) -> None:
        """Let go of the files, if `release` has not; they are unmapped once no snapshot is held elsewhere."""
        if (snapshot := self._snapshot) is not None:
            self._snapshot = Snapshot(replace(snapshot.manifest, segments=()), (), snapshot.line_ends)

    def __enter__(self) -> Datastore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def info(self) -> dict[str, Any]:
        """Return what `ngramspec datastore info` prints, as JSON values."""
        snapshot, stamp = (self._snapshot, self._stamp) if self._snapshot is not None else self._load(None)
        manifest = snapshot.manifest
        bodies = [s.header for s in snapshot.segments]
        n_bytes = manifest.n_bytes + stamp[2]
        return {
            "path": str(self.path),
            "generation": manifest.generation,
            "writer": manifest.writer,
            "tokenizer": {"name": manifest.tokenizer_name, "fingerprint": manifest.tokenizer_fingerprint},
            "vocab_size": manifest.vocab_size,
            "segments": len(bodies),
            "documents": sum(h.n_docs for h in bodies) - sum(len(s.tombstones) for s in manifest.segments),
            "dead_documents": sum(len(s.tombstones) for s in manifest.segments),
            "tokens": snapshot.n_tokens,
            "vectors": sum(h.n_vectors for h in bodies),
            "bytes": n_bytes,
            "bytes_per_token": n_bytes / max(snapshot.n_tokens, 1),
            "sources": manifest.sources,
            "options": manifest.options,
        }

    def lookup(self, tokens: Sequence[int], max_match: int = 64, min_match: int = 1, limit: int = 10) -> Match:
        """Find the longest end of `tokens` (at most max_match) that occurs in a live document, what follows it, and where: `limit` of each.

        At most 65,536 occurrences are counted.
        """
        from .search import find_occurrences

        snapshot = self.snapshot
        query = np.array(list(tokens)[: -max_match - 1 : -1], np.int32)
        if len(query) and not 0 <= int(query.min()) <= int(query.max()) < snapshot.manifest.vocab_size:
            raise ValueError(
                f"token ids must be from 0 to {snapshot.manifest.vocab_size - 1}, got {int(query.min())} to {int(query.max())}"
            )
        places = np.empty(_TALLY + 1, np.int64)
        length = len(query)
        while length >= max(min_match, 1):
            n, longest = find_occurrences(snapshot.rows, query, length, places)
            if n:
                break
            length = min(longest, length - 1)
        else:
            return Match(0, 0, [], [], True)
        counts: Counter[int] = Counter()
        found = places[: min(n, _TALLY)].tolist()
        for place in found:
            counts[int(snapshot.segments[place >> PLACE_BITS].tokens[place & (1 << PLACE_BITS) - 1])] += 1
        continuations = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:limit]
        return Match(length, len(found), continuations, [snapshot.locate(place) for place in found[:limit]], n <= _TALLY)


# ---- loading


def _load_generation(folder: Path, verify: str, copy: bool, old: Snapshot | None) -> tuple[Snapshot, tuple[int, ...]]:
    """Read the current generation and MANIFEST's stamp. A writer may replace it, and delete what it named, while it is being read."""
    while True:
        stamp = _read_stamp(folder)
        try:
            return _read_generation(folder, verify, copy, old), stamp
        except DatastoreCorruptError:
            if _read_stamp(folder) == stamp:
                raise


def _read_generation(folder: Path, verify: str, copy: bool, old: Snapshot | None) -> Snapshot:
    manifest = read_manifest(folder)
    mapped: dict[tuple[str, str], Segment] = {}
    if old is not None:
        mapped = {(e.name, e.checksum): s for e, s in zip(old.manifest.segments, old.segments, strict=True)}
    segments = []
    for entry in manifest.segments:
        segment = mapped.get((entry.name, entry.checksum))
        if segment is None:
            segment = map_segment(folder, entry, copy)
            if (segment.header.fingerprint.hex(), segment.header.vocab_size) != (manifest.tokenizer_fingerprint, manifest.vocab_size):
                raise DatastoreCorruptError(f"{segment.path}: header: it was made with another tokenizer than {MANIFEST} names")
            if verify == "full":
                from .integrity import verify_segment

                verify_segment(segment)
        segments.append(segment)
    if verify == "full":
        read_tokenizer(folder, manifest)
        read_left_out(folder, manifest)
    return Snapshot(manifest, segments, read_vocabulary(folder, manifest.vocabulary))


def _read_stamp(folder: Path) -> tuple[int, ...]:
    """Return what changes when MANIFEST is replaced."""
    try:
        status = (folder / MANIFEST).stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise describe_missing(folder) from error
    except OSError as error:
        raise DatastoreError(f"{folder / MANIFEST} cannot be read: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size


# ---- documents


def _find_extent(segment: Segment, doc: int) -> tuple[int, int]:
    """Return the first token of a document and its end, within the tokens."""
    if not 0 <= doc < len(segment.docs):
        raise DatastoreCorruptError(f"{segment.path}: docs: there is no document {doc}, there are {len(segment.docs)}")
    start, length = int(segment.docs["start"][doc]), int(segment.docs["length"][doc])
    if not 0 < start <= start + length < segment.header.n_tokens:
        raise DatastoreCorruptError(f"{segment.path}: docs: document {doc} from {start} to {start + length} is outside the tokens")
    return start, start + length


def _read_path(segment: Segment, doc: int) -> str:
    offset, n = int(segment.docs["path_offset"][doc]), int(segment.docs["path_bytes"][doc])
    if offset + n > segment.header.path_bytes:
        raise DatastoreCorruptError(f"{segment.path}: docs: the path of document {doc} at {offset} is outside the section of paths")
    return bytes(segment.paths[offset : offset + n]).decode(errors="replace")


def _find_deleted_ranges(segment: Segment, entry: SegmentEntry) -> np.ndarray:
    """Return int64 [n, 2], first token and end of the documents with a tombstone, rising."""
    ranges = np.array([_find_extent(segment, doc) for doc in entry.tombstones], np.int64).reshape(-1, 2)
    return np.ascontiguousarray(ranges[np.argsort(ranges[:, 0], kind="stable")])

"""What a call that writes to a store records while it runs: where it stands, what was left out, and the seconds of each stage.

Counts enter from the writing code; a `Progress` goes to the caller's callback as it changes, a `Summary` leaves at the end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import corpus
from .archives import get_container_path
from .format import SegmentEntry, map_segment
from .listing import Skipped
from .manifest import Manifest
from .progress import Progress, ProgressCallback, Summary, ignore_progress


class Recorder:
    """The record of one call. `seconds` may be added to from several threads, each for stages of its own."""

    def __init__(self, on_progress: ProgressCallback = ignore_progress) -> None:
        self.progress = Progress()
        self.skipped = Skipped()
        self.left_out: dict[str, str] = {}
        """Files that need not be read again, as `left-out-*` has them (see `format`)."""
        self.seconds: dict[str, float] = {}
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._started_s = time.perf_counter()

    def report(self, stage: str | None = None) -> None:
        """Hand the progress to the callback, in another stage if one is given."""
        self.progress.stage = stage or self.progress.stage
        self.progress.count_done()
        self._on_progress(self.progress)

    def start_reading(self, n_files: int, n_bytes: int) -> None:
        self.progress.start_reading(n_files, n_bytes)
        self.report()

    def count_texts(self, documents: Iterable[corpus.Document]) -> Iterator[corpus.Document]:
        """Yield documents that are to be tokenized, and count their text before their file counts as read."""
        for document in documents:
            self.progress.n_chars += len(document.text)
            yield document

    def count_encoded(self, n_chars: int) -> None:
        """Count text that has been tokenized, in a thread that does it."""
        with self._lock:
            self.progress.n_encoded += n_chars

    def count_read(self, n_files: int, n_bytes: int, n_tokens: int = 0) -> None:
        self.progress.count_read(n_files, n_bytes)
        self.progress.tokens += n_tokens
        self.report()

    def add_duplicate(self, document: corpus.Document) -> None:
        """Record a document whose text another has; what it was is kept, so that its file need not be read again while the other stays."""
        self.skipped.add(corpus.file_filters.DUPLICATE)
        if document.mtime_ns >= 0 and get_container_path(document.path) == document.path:
            key = corpus.make_left_out_key(document.path, document.size, document.mtime_ns)
            self.left_out[f"{corpus.TWIN}{key}"] = document.hash.hex()

    @contextlib.contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Add the seconds that the `with` block takes to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def summarize(self, folder: Path, manifest: Manifest, **changes: Any) -> Summary:
        """Return what stands after the call, with `changes`, the fields of a Summary that say what the call did."""
        found = summarize_manifest(folder, manifest, self.skipped)
        self.seconds["total"] = time.perf_counter() - self._started_s
        return replace(found, seconds=self.seconds, mb=self.progress.bytes_read / 1e6, **changes)


def summarize_manifest(folder: Path, manifest: Manifest, skipped: Skipped | None = None) -> Summary:
    """Return what a generation holds, and what was left out of it. Raises DatastoreCorruptError, DatastoreFormatError."""
    skipped = skipped or Skipped()
    return Summary(
        generation=manifest.generation,
        committed=True,
        files=sum(entry.docs - len(entry.tombstones) for entry in manifest.segments),
        tokens=sum(_count_live_tokens(folder, entry) for entry in manifest.segments),
        segments=len(manifest.segments),
        bytes=manifest.n_bytes,
        skipped=skipped.counts,
        secrets=skipped.secrets,
        named=skipped.named,
    )


def _count_live_tokens(folder: Path, entry: SegmentEntry) -> int:
    """Return the tokens of a segment's live documents, without separators."""
    n_dead = int(map_segment(folder, entry).docs["length"][list(entry.tombstones)].sum()) if entry.tombstones else 0
    return entry.tokens - entry.docs - 1 - n_dead

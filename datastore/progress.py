"""What a build reports while it runs and when it is done: plain counts, no drawing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

# Seconds of reading, and the share of all bytes, after which the time that is left can be told: by the first file's rate, 20 s of work
# looked like hours
ESTIMATE_S, ESTIMATE_SHARE = 3.0, 0.05


@dataclass(slots=True)
class Progress:
    """The state of a build: one object, changed in place; the callback looks at it when it is called."""

    stage: str = "looking"
    """looking, reading (with tokenizing), sorting, writing, done."""
    files: int = 0
    n_files: int = 0
    bytes: int = 0
    """Bytes of the files that are done: read, and their text tokenized."""
    n_bytes: int = 0
    tokens: int = 0
    bytes_read: int = 0
    n_chars: int = 0
    """Characters of text in the files read, and how many of them have been tokenized."""
    n_encoded: int = 0
    reading_since: float = 0.0
    """`time.monotonic` when reading began; 0 before."""
    first: tuple[float, int] | None = None
    """When the first file was read, and its bytes: what it waited for says nothing about the others."""

    def start_reading(self, n_files: int, n_bytes: int) -> None:
        """Begin the stage `reading`, with this many more files."""
        self.stage = "reading"
        self.n_files += n_files
        self.n_bytes += n_bytes
        self.reading_since = time.monotonic()

    def count_read(self, n_files: int, n_bytes: int) -> None:
        """Count files that have been read."""
        self.files += n_files
        self.bytes_read += n_bytes
        self.count_done()
        if self.first is None:
            self.first = time.monotonic(), self.bytes

    def count_done(self) -> None:
        """Work out what is done of what has been read: as large a share as of its text. It never falls."""
        done = self.bytes_read * self.n_encoded // self.n_chars if self.n_chars else self.bytes_read
        self.bytes = max(self.bytes, done)

    @property
    def mb_s(self) -> float:
        elapsed = time.monotonic() - self.reading_since if self.reading_since else 0.0
        return self.bytes / 1e6 / elapsed if elapsed > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """What reading and tokenizing will still take at the mean rate since the first file; None before there is one to go by."""
        if self.stage != "reading" or self.first is None:
            return None
        elapsed, n_bytes = time.monotonic() - self.first[0], self.bytes - self.first[1]
        if elapsed < ESTIMATE_S or n_bytes < ESTIMATE_SHARE * self.n_bytes:
            return None
        return max(self.n_bytes - self.bytes, 0) * elapsed / n_bytes


ProgressCallback = Callable[[Progress], None]  # called from the thread that builds, often; it must be quick


def ignore_progress(progress: Progress) -> None:
    pass


@dataclass(slots=True)
class Summary:
    """What a writer did."""

    generation: int
    """The generation that stands now."""
    committed: bool
    """False if nothing had changed."""
    files: int = 0
    """Documents that live in the store."""
    tokens: int = 0
    """Their tokens, without separators."""
    segments: int = 0
    bytes: int = 0
    """Size of the store on disk."""
    added: int = 0
    """Documents written by this call, changed ones among them."""
    removed: int = 0
    """Documents that got a tombstone by this call, or were left out when it merged."""
    unchanged: int = 0
    mb: float = 0.0
    """Text tokenized by this call, in 10^6 bytes of the files it lies in."""
    merged: int = 0
    """Segments that were merged into fewer."""
    skipped: Counter[str] = field(default_factory=Counter)
    secrets: Counter[str] = field(default_factory=Counter)
    """How many texts were left out for a secret in them, by the rule that found one."""
    named: list[tuple[str, str]] = field(default_factory=list)
    """(path, why) of what could not be read."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by stage, `total` among them. Stages overlap: tokenizing runs while files are read, sorting while the next are tokenized."""

    def as_json(self) -> dict[str, Any]:
        document = asdict(self)
        document["skipped"] = dict(self.skipped.most_common())
        document["secrets"] = dict(self.secrets.most_common())
        document["named"] = [list(item) for item in self.named]
        document["seconds"] = {stage: round(value, 4) for stage, value in self.seconds.items()}
        return document

"""Building a store: a corpus enters, a committed generation leaves, and until then the old one stands.

Files are read in the calling thread, tokenized in others, and gathered into pieces as large as memory allows; a full piece is sorted
and written by one more thread while the next is tokenized. Everything before the commit can be interrupted at any moment. What is in a
corpus is `corpus`' business, how a piece becomes a segment `pieces`', who may write and how a generation appears `commit`'s.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from tokenizers import Tokenizer

from . import corpus, segment_writer
from .commit import Writer, writing
from .corpus import Contents, CorpusOptions, Document, Found, Skipped, Source
from .errors import ContentsChangedError, EmptyCorpusError
from .format import Manifest, SegmentEntry, token_dtype, write_tokenizer, write_vocabulary
from .progress import Progress, Summary, Tell, silent
from .segment_writer import Gate, Piece, Recipe, Vectors
from .tokens import Encoder

T = TypeVar("T")

IN_FLIGHT = 2
"""Batches tokenized at a time: while one is turned into arrays, the other has the cores. `tokenizers` spreads each over all of them."""
BATCH_CHARS = 1 << 19
"""Per core. A token takes more than a hundred bytes until its batch is an array."""


def build(
    paths: Sequence[str | os.PathLike[str]],
    store: str | os.PathLike[str],
    tokenizer: Tokenizer,
    name: str,
    *,
    options: CorpusOptions | None = None,
    router: bool = False,
    vectors: Vectors | None = None,
    jobs: int | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
    tell: Tell = silent,
    contents: str = "",
) -> Summary:
    """Make a store of a corpus, or the next generation of one that is there, whatever it held.

    `name` is what users call the tokenizer. `router`: with records for the router, made by `vectors`, by default `router.embed`; kept in
    the manifest for updates and merges. `jobs`: batches tokenized at a time. `max_memory`: bytes for gathering and sorting, by default
    half of what is free; larger corpora become several segments. `contents`: the digest that what is read must have (see
    `corpus.Contents`).
    Raises ContentsChangedError where it has not, CorpusError, EmptyCorpusError, DatastoreLockedError, DatastoreFullError, and
    DatastoreError for a folder that is no store.
    """
    clock = time.perf_counter()
    options = options or CorpusOptions()
    sources = corpus.sources_of(paths)
    skipped = Skipped()
    progress = Progress()
    seconds: dict[str, float] = {}
    folder = Path(store)
    with writing(folder, create=True) as writer_:
        tell(progress)
        found = corpus.find(sources, options, skipped, omit=os.path.realpath(folder))
        seconds["looking"] = time.perf_counter() - clock
        encoder = Encoder(tokenizer, name)
        read = Contents()
        documents = unique(read_all(found, options, skipped, progress, tell, read), skipped, set())
        recipe = Recipe(encoder.vocab_size, encoder.fingerprint, vectors or vectors_for(router))
        limit = segment_limit(encoder.vocab_size, max_memory)
        entries = write_segments(documents, encoder, folder, recipe, limit, jobs, progress, tell, seconds)
        if contents and read.digest() != contents:
            raise ContentsChangedError(f"{', '.join(source.path for source in sources)}: files were changed while they were read")
        manifest = commit_anew(writer_, encoder, entries, sources, options, router, writer, skipped, seconds)
    return done(manifest, skipped, progress, tell, clock, seconds)


def commit_anew(
    writer_: Writer,
    encoder: Encoder,
    entries: Sequence[SegmentEntry],
    sources: Sequence[Source],
    options: CorpusOptions,
    router: bool,
    writer: str,
    skipped: Skipped,
    seconds: dict[str, float],
) -> Manifest:
    """Make segments built anew the store, with vocabulary and tokenizer. Raises EmptyCorpusError where no text is in them."""
    if not any(entry.tokens > entry.docs + 1 for entry in entries):
        raise EmptyCorpusError(nothing_found(sources, skipped))
    manifest = Manifest(
        generation=writer_.next_generation,
        tokenizer_name=encoder.name,
        tokenizer_fingerprint=encoder.fingerprint,
        vocab_size=encoder.vocab_size,
        vocabulary=write_vocabulary(writer_.folder, encoder.line_ends()),
        tokenizer=write_tokenizer(writer_.folder, encoder.json),
        segments=tuple(entries),
        sources=[asdict(source) for source in sources],
        options=options_as_json(options) | {"router": router},
        writer=writer,
    )
    commit(writer_, manifest, seconds)
    return manifest


def done(manifest: Manifest, skipped: Skipped, progress: Progress, tell: Tell, clock: float, seconds: dict[str, float]) -> Summary:
    """What a build anew, begun at `clock`, did."""
    progress.stage = "done"
    tell(progress)
    seconds["total"] = time.perf_counter() - clock
    summary = summarize(manifest, skipped, seconds)
    return replace(summary, added=summary.files, mb=progress.bytes / 1e6)


def vectors_for(router: bool) -> Vectors | None:
    """What makes the records of a store with a router, or None."""
    if not router:
        return None
    from .similar_files import embed  # here: a build without a router need not wait for the compiler's import

    return embed


def segment_limit(vocab_size: int, max_memory: int | None) -> int:
    """Tokens of a segment. `max_memory`: bytes, None for half of what is free."""
    return segment_writer.most_tokens(max_memory or free_memory() // 2, token_dtype(vocab_size).itemsize)


def read_all(
    found: Sequence[Found], options: CorpusOptions, skipped: Skipped, progress: Progress, tell: Tell, contents: Contents | None = None
) -> Iterator[Document]:
    """The documents of files, with progress."""
    progress.start_reading(len(found), sum(file.size for file in found))
    tell(progress)
    for file in found:
        yield from corpus.read(file, options, skipped, contents)
        progress.count_read(1, file.size)
        tell(progress)


def unique(documents: Iterable[Document], skipped: Skipped, seen: set[bytes]) -> Iterator[Document]:
    """Documents whose content is not in `seen`, which grows."""
    for document in documents:
        if document.hash in seen:
            skipped.add(corpus.file_filters.DUPLICATE)
        else:
            seen.add(document.hash)
            yield document


def write_segments(
    documents: Iterable[Document],
    encoder: Encoder,
    folder: Path,
    recipe: Recipe,
    limit: int,
    jobs: int | None,
    progress: Progress,
    tell: Tell,
    seconds: dict[str, float],
) -> list[SegmentEntry]:
    """Segments of all documents, each of `limit` tokens or a little more; [] for none.

    `documents` is consumed in this thread. An error or interrupt ends it at once: no segment file appears after that.
    """
    n_batches = jobs or IN_FLIGHT
    started = time.perf_counter()
    gathered: list[Piece] = []
    waiting: deque[Future[Piece]] = deque()
    sorting: deque[Future[SegmentEntry]] = deque()
    entries: list[SegmentEntry] = []
    gate = Gate()
    with _Threads(n_batches) as encoders, _Threads(1, gate.close) as sorters:

        def seal() -> None:
            if sorting:  # one piece is sorted while one is gathered: that is what `most_tokens` counts with
                entries.append(_result(sorting.popleft()))
            piece = segment_writer.join(gathered)
            gathered.clear()
            sorting.append(sorters.submit(partial(segment_writer.write, folder, piece, recipe, seconds, gate)))

        def take() -> None:
            piece = _result(waiting.popleft())
            gathered.append(piece)
            progress.tokens += len(piece.tokens) - len(piece.docs)
            if sum(len(piece.tokens) for piece in gathered) >= limit:
                seal()

        for batch in segment_writer.batches(documents, BATCH_CHARS * (os.cpu_count() or 1)):
            waiting.append(encoders.submit(partial(segment_writer.encode, batch, encoder)))
            if len(waiting) > n_batches:
                take()
        while waiting:
            take()
        seconds["reading and tokenizing"] = time.perf_counter() - started
        progress.stage = "sorting"
        tell(progress)
        if gathered:
            seal()
        while sorting:
            entries.append(_result(sorting.popleft()))
    return entries


def commit(writer: Writer, manifest: Manifest, seconds: dict[str, float]) -> None:
    started = time.perf_counter()
    writer.commit(manifest)
    seconds["committing"] = seconds.get("committing", 0.0) + time.perf_counter() - started


def summarize(manifest: Manifest, skipped: Skipped, seconds: dict[str, float]) -> Summary:
    """What stands after a commit."""
    return Summary(
        generation=manifest.generation,
        committed=True,
        files=sum(entry.docs - len(entry.dead) for entry in manifest.segments),
        tokens=sum(entry.tokens - entry.docs - 1 for entry in manifest.segments),
        segments=len(manifest.segments),
        bytes=sum(entry.bytes for entry in manifest.segments) + manifest.vocabulary.bytes + manifest.tokenizer.bytes,
        skipped=skipped.counts,
        secrets=skipped.secrets,
        named=skipped.named,
        seconds=seconds,
    )


def options_as_json(options: CorpusOptions) -> dict[str, Any]:
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}
    return given | {"rules": corpus.RULES}


def nothing_found(sources: Sequence[Source], skipped: Skipped) -> str:
    where = ", ".join(source.label for source in sources)
    reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.counts.most_common())
    return f"there is no text in {where}" + (f"; left out: {reasons}" if reasons else "; it holds no files")


def free_memory() -> int:
    """Bytes that can be allocated without pushing others out, as far as the platform tells."""
    free = []
    try:
        if match := re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            free.append(int(match[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # not Linux, or no limit
        pass
    return max(min(free, default=2 << 30), 1 << 28)


def _result(future: Future[T]) -> T:
    """What a thread made. Waits in turns: a signal that comes right before a wait without end would not be noticed until its end."""
    while not wait([future], timeout=0.25).done:
        pass
    return future.result()


class _Threads:
    """A few threads that do not keep the process: after an interrupt nobody waits for a long sort."""

    def __init__(self, count: int, on_error: Callable[[], None] = lambda: None) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._on_error = on_error
        self._ended = False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((future, call))
        return future

    def __enter__(self) -> _Threads:
        return self

    def __exit__(self, kind: type[BaseException] | None, *more: object) -> None:
        self._ended = True
        if kind is not None:
            self._on_error()
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            del item
            if self._ended:
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call

"""Building a store: a corpus enters, a committed generation leaves, and until then the old one stands.

Files are read in the calling thread, tokenized in others, and gathered into segments as large as memory allows; a full one is sorted and
written by one more thread while the next is tokenized. Everything before the commit can be interrupted at any moment. `corpus` says what is
in a corpus, `segment_writer` makes segments of documents, `commit` says who may write and how a generation appears.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer

from . import corpus, segment_writer
from .commit import StoreWriter, lock_for_writing
from .corpus import ContentHashes, CorpusOptions, CorpusSource, Document, FoundFile, Skipped
from .errors import ContentsChangedError, EmptyCorpusError
from .file_filters import TOO_LARGE
from .format import SegmentEntry, choose_token_dtype
from .manifest import Manifest, write_left_out, write_tokenizer, write_vocabulary
from .page_cache import measure_free_memory
from .progress import ProgressCallback, Summary, ignore_progress
from .recorder import Recorder
from .segment_writer import SegmentContents, SegmentSettings, VectorFunction, WriteGate
from .tokens import Encoder

T = TypeVar("T")

# batches tokenized at a time: while one is turned into arrays, the other has the cores. `tokenizers` spreads each over all of them
IN_FLIGHT = 2
# characters of a batch for each core. A token takes more than a hundred bytes until its batch is an array
BATCH_CHARS = 1 << 19


def build(
    paths: Sequence[str | os.PathLike[str]],
    store: str | os.PathLike[str],
    tokenizer: Tokenizer,
    name: str,
    *,
    options: CorpusOptions | None = None,
    router: bool = False,
    vectors: VectorFunction | None = None,
    jobs: int | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
    on_progress: ProgressCallback = ignore_progress,
    contents: str = "",
) -> Summary:
    """Make a store of a corpus, or the next generation of one that is there, whatever it held.

    `name` is what users call the tokenizer. `router`: with records that find similar files, made by `vectors`, by default
    `similar_files.embed_segment`; kept in the manifest for updates and merges. `jobs`: batches tokenized at a time. `max_memory`: bytes for
    gathering and sorting, by default half of what is free; larger corpora become several segments. `contents`: the digest that what is read
    must have (see `corpus.ContentHashes`).
    Raises ContentsChangedError if it has another, CorpusError, EmptyCorpusError, DatastoreLockedError, DatastoreFullError, and
    DatastoreError for a folder that is no store.
    """
    recorder = Recorder(on_progress)
    with begin_store(paths, Path(store), recorder, options) as new:
        encoder = Encoder(tokenizer, name)
        settings = make_settings(encoder.vocab_size, encoder.fingerprint, router, vectors, max_memory)
        hashes = ContentHashes()
        documents = read_corpus(new.found, new.options, recorder, hashes)
        entries = write_segments(documents, encoder, new.lock.folder, settings, jobs, recorder)
        if contents and hashes.compute_digest() != contents:
            raise ContentsChangedError(f"{', '.join(source.path for source in new.sources)}: files were changed while they were read")
        return new.finish(entries, encoder, router, writer)


@dataclass(frozen=True, slots=True)
class NewStore:
    """A store that is being built anew: what a build has in common with one on Ray."""

    lock: StoreWriter
    recorder: Recorder
    sources: list[CorpusSource]
    options: CorpusOptions
    found: list[FoundFile]

    def finish(self, entries: Sequence[SegmentEntry], encoder: Encoder, router: bool, writer: str) -> Summary:
        """Make segments the store, with vocabulary and tokenizer. Raises EmptyCorpusError if no text is in them."""
        if not any(entry.tokens > entry.docs + 1 for entry in entries):
            raise EmptyCorpusError(describe_empty_corpus(self.sources, self.recorder.skipped, self.options))
        manifest = Manifest(
            generation=self.lock.next_generation,
            tokenizer_name=encoder.name,
            tokenizer_fingerprint=encoder.fingerprint,
            vocab_size=encoder.vocab_size,
            vocabulary=write_vocabulary(self.lock.folder, encoder.count_line_ends()),
            tokenizer=write_tokenizer(self.lock.folder, encoder.json),
            segments=tuple(entries),
            sources=[asdict(source) for source in self.sources],
            options=options_to_json(self.options) | {"router": router},
            writer=writer,
            left_out=write_left_out(self.lock.folder, self.recorder.left_out),
        )
        with self.recorder.measure("committing"):
            self.lock.commit(manifest)
        self.recorder.report("done")
        summary = self.recorder.summarize(self.lock.folder, manifest)
        summary.added = summary.files
        return summary


@contextlib.contextmanager
def begin_store(
    paths: Sequence[str | os.PathLike[str]], folder: Path, recorder: Recorder, options: CorpusOptions | None
) -> Iterator[NewStore]:
    """Hold the lock of a store that is to be built, and find the corpus's files."""
    sources, options = corpus.resolve_sources(paths), options or CorpusOptions()
    with lock_for_writing(folder, create=True) as lock:
        recorder.report()
        with recorder.measure("looking"):
            found = corpus.find_files(sources, options, recorder.skipped, omit=os.path.realpath(folder))
        yield NewStore(lock, recorder, sources, options, found)


def make_settings(
    vocab_size: int, fingerprint: str, router: bool, vectors: VectorFunction | None, max_memory: int | None
) -> SegmentSettings:
    """Return the settings of a store's segments. `max_memory`: bytes, None for half of what is free."""
    if router and vectors is None:
        vectors = _embed_segment
    width = choose_token_dtype(vocab_size).itemsize
    max_tokens = segment_writer.compute_max_tokens(max_memory or measure_free_memory() // 2, width)
    return SegmentSettings(vocab_size, fingerprint, vectors, max_tokens)


def _embed_segment(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    from .similar_files import embed_segment  # here: what writes no segment need not wait for the compiler's import

    return embed_segment(tokens, starts)


def read_corpus(
    found: Sequence[FoundFile], options: CorpusOptions, recorder: Recorder, hashes: ContentHashes | None = None
) -> Iterator[Document]:
    """Yield the documents of a corpus's files, each text once."""
    return drop_duplicates(read_files(found, options, recorder, hashes), recorder)


def read_files(
    found: Sequence[FoundFile], options: CorpusOptions, recorder: Recorder, hashes: ContentHashes | None = None
) -> Iterator[Document]:
    """Yield the documents of files, with progress, and record which plain ones are left out by what is in them."""
    recorder.start_reading(len(found), sum(file.size for file in found))
    for file in found:
        skipped, is_settled = Skipped(), time.time_ns() - file.mtime_ns > corpus.RACY_NS
        yield from corpus.read_documents(file, options, skipped, hashes)
        if skipped.counts:
            recorder.skipped.add_all(skipped)
            if is_settled and file.kind is None and (reason := corpus.find_left_out_reason(skipped)) is not None:
                recorder.left_out[corpus.make_left_out_key(file.name, file.size, file.mtime_ns)] = reason
        recorder.count_read(1, file.size)


def drop_duplicates(documents: Iterable[Document], recorder: Recorder) -> Iterator[Document]:
    """Yield documents whose text none before them has, and record the others."""
    seen: set[bytes] = set()
    for document in documents:
        if document.hash in seen:
            recorder.add_duplicate(document)
        else:
            seen.add(document.hash)
            yield document


def write_segments(
    documents: Iterable[Document], encoder: Encoder, folder: Path, settings: SegmentSettings, jobs: int | None, recorder: Recorder
) -> list[SegmentEntry]:
    """Write segments of all documents, each of `settings.max_tokens` or a little more; [] for none.

    `documents` is consumed in this thread. An error or interrupt ends it at once: no segment file appears after that.
    """
    n_batches = jobs or IN_FLIGHT
    gathered: list[SegmentContents] = []
    waiting: deque[Future[SegmentContents]] = deque()
    sorting: deque[Future[SegmentEntry]] = deque()
    entries: list[SegmentEntry] = []
    gate = WriteGate()
    with _DaemonThreads(n_batches) as encoders, _DaemonThreads(1, gate.close) as sorters:

        def seal_segment() -> None:
            if sorting:  # one segment is sorted while one is gathered: `compute_max_tokens` counts with that
                entries.append(_wait_for(sorting.popleft()))
            joined = segment_writer.join_contents(gathered)
            gathered.clear()
            sorting.append(sorters.submit(partial(segment_writer.sort_and_write, folder, joined, settings, recorder, gate)))

        def take_batch() -> None:
            batch = _wait_for(waiting.popleft(), recorder.report)
            gathered.append(batch)
            recorder.progress.tokens += len(batch.tokens) - len(batch.docs)
            if sum(len(each.tokens) for each in gathered) >= settings.max_tokens:
                seal_segment()

        with recorder.measure("reading and tokenizing"):
            for batch in segment_writer.batch_documents(recorder.count_texts(documents), BATCH_CHARS * (os.cpu_count() or 1)):
                waiting.append(encoders.submit(partial(segment_writer.encode_documents, batch, encoder, recorder.count_encoded)))
                if len(waiting) > n_batches:
                    take_batch()
            while waiting:
                take_batch()
        recorder.report("sorting")
        if gathered:
            seal_segment()
        while sorting:
            entries.append(_wait_for(sorting.popleft()))
    return entries


def options_to_json(options: CorpusOptions) -> dict[str, Any]:
    """Return options as a manifest has them, with the version of the rules."""
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}
    return given | {"rules": corpus.RULES}


def describe_empty_corpus(sources: Sequence[CorpusSource], skipped: Skipped, options: CorpusOptions) -> str:
    """Say that there is no text in a corpus, and why."""
    where = ", ".join(source.label for source in sources)
    limits = {TOO_LARGE: f" (max_file_size is {options.max_file_size:,} bytes)"}
    reasons = ", ".join(f"{count} {reason}{limits.get(reason, '')}" for reason, count in skipped.counts.most_common())
    return f"there is no text in {where}" + (f"; left out: {reasons}" if reasons else "; it holds no files")


def _wait_for(future: Future[T], meanwhile: Callable[[], None] = lambda: None) -> T:
    """Return what a thread made. Waits in turns: a signal right before a wait without end would not be noticed until its end."""
    while not wait([future], timeout=0.25).done:
        meanwhile()
    return future.result()


class _DaemonThreads:
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

    def __enter__(self) -> _DaemonThreads:
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

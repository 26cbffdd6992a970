"""Changing a store that is there: update, merge, prune. Each ends in one commit, or leaves the store as it was.

A store enters, its next generation leaves. Segments are never changed: new documents go into a new one, old ones get tombstones, and
merging copies the live documents of several segments into one. What has not changed on disk by size and time is not read, and what was
read and has the same content is kept. Files that were left out by what is in them are not read again either.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pathspec import GitIgnoreSpec
from tokenizers import Tokenizer

from . import corpus, segment_writer
from .archives import get_container_path
from .build import describe_empty_corpus, make_settings, options_to_json, read_files, write_segments
from .commit import StoreWriter, lock_for_writing
from .corpus import CorpusError, CorpusOptions, CorpusSource, Document, FoundFile
from .errors import DatastoreCorruptError, EmptyCorpusError, TokenizerMismatchError
from .format import SegmentEntry, check_bodies, map_segment
from .garbage import pause_collector
from .manifest import Manifest, read_left_out, write_left_out
from .progress import ProgressCallback, Summary, ignore_progress
from .recorder import Recorder
from .segment_writer import SegmentContents, SegmentSettings, VectorFunction
from .tokens import Encoder, load_encoder

Key = tuple[int, int]  # number of a segment in the manifest, number of a document in it

MAX_TOMBSTONES = 0.25  # share of a segment's documents: more, and it is rewritten
TIER_FIRST = 1 << 16  # tokens of a segment in the smallest tier, at most
TIER_FACTOR = 8  # how much larger the segments of the next tier may be
TIER_MOST = 8  # segments of one tier before they are merged: their number grows with the logarithm of the tokens


class StoredDocument(NamedTuple):
    """A live document of the store."""

    key: Key
    path: str
    size: int
    mtime_ns: int
    hash: bytes


# A file that must be read, with the documents that the store has of it
ChangedFile = tuple[FoundFile, list[StoredDocument]]


@dataclass(slots=True)
class _Changes:
    """What an update finds out while documents pass through it."""

    tombstones: set[Key] = field(default_factory=set)
    live: set[bytes] = field(default_factory=set)
    """Content hashes of the live documents."""
    unchanged: int = 0
    added: int = 0


def update(
    store: str | os.PathLike[str],
    tokenizer: Tokenizer | Encoder | None = None,
    name: str | None = None,
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    options: CorpusOptions | None = None,
    vectors: VectorFunction | None = None,
    jobs: int | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
    on_progress: ProgressCallback = ignore_progress,
) -> Summary:
    """Bring a store up to date with its corpus.

    `tokenizer` is not needed, the store has its own: one that is given must be the same, `name` is what users call it, and an Encoder
    saves the reading. `paths` are added to what the store was built from, `options` replace those it was built with.
    Small segments are merged afterwards, in a commit of their own, when they have become many or have many tombstones. Raises as `build`
    does, and DatastoreNotFoundError, TokenizerMismatchError; EmptyCorpusError if no document would be left.
    """
    recorder, changes = Recorder(on_progress), _Changes()
    added = corpus.resolve_sources(paths)
    folder = Path(store)
    with lock_for_writing(folder) as lock:
        old = lock.standing
        encoder = get_encoder(folder, old, tokenizer, name)
        recorder.report()
        with recorder.measure("looking"), pause_collector():  # tuples of every file are made, all in use
            sources = _combine_sources(old, added)
            before = parse_options(old)
            walked = options or before
            found = corpus.find_files(sources, walked, recorder.skipped, omit=os.path.realpath(folder))
            anew = old.options.get("rules") != corpus.RULES
            left_out = {} if anew else read_left_out(folder, old)
            to_read = _select_changed(found, read_stored_documents(folder, old), changes, members=walked != before, anew=anew)
            to_read = _drop_left_out(to_read, left_out, changes, recorder)
        documents = _read_new_documents(to_read, walked, changes, recorder)
        settings = _get_settings(old, vectors, max_memory)
        entries = write_segments(documents, encoder, folder, settings, jobs, recorder)
        new = replace(
            old,
            segments=(*_add_tombstones(old.segments, changes.tombstones), *entries),
            sources=[asdict(source) for source in sources],
            options=old.options | options_to_json(walked),
        )
        if not new.segments:
            raise EmptyCorpusError(describe_empty_corpus(sources, recorder.skipped, walked) + "; the store stays as it was")
        changed = new != old
        if changed:
            if recorder.left_out != left_out:
                new = replace(new, left_out=write_left_out(folder, recorder.left_out))
            _commit(lock, new, writer, recorder)
        recorder.report("done")
        due = find_due_segments(lock.standing)
        n_merged = _merge_segments(lock, due, settings, writer, recorder)
        return recorder.summarize(
            folder,
            lock.standing,
            committed=changed or n_merged > 0,
            added=changes.added,
            removed=len(changes.tombstones),
            unchanged=changes.unchanged,
            merged=n_merged,
        )


def merge(
    store: str | os.PathLike[str],
    how: str = "all",
    *,
    vectors: VectorFunction | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
) -> Summary:
    """Write fewer segments, without tombstones. `how`: "all" into as few as memory allows, or "tiered": only those that are due."""
    if how not in ("all", "tiered"):
        raise CorpusError(f"merging is done 'all' or 'tiered', got {how!r}")
    recorder = Recorder()
    with lock_for_writing(Path(store)) as lock:
        old = lock.standing
        chosen = list(range(len(old.segments))) if how == "all" else find_due_segments(old)
        if len(chosen) == 1 and not old.segments[chosen[0]].tombstones:
            chosen = []
        n_merged = _merge_segments(lock, chosen, _get_settings(old, vectors, max_memory), writer, recorder)
        removed = sum(len(old.segments[number].tombstones) for number in chosen)
        return recorder.summarize(lock.folder, lock.standing, committed=n_merged > 0, merged=n_merged, removed=removed)


def prune(
    store: str | os.PathLike[str],
    patterns: Sequence[str] = (),
    *,
    vectors: VectorFunction | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
) -> Summary:
    """Drop documents for good: those whose path matches a pattern as in .gitignore, and all that have a tombstone.

    Patterns become part of the store's `exclude` option, so that an update does not bring the documents back.
    """
    recorder, folder = Recorder(), Path(store)
    try:
        spec = GitIgnoreSpec.from_lines(patterns)
    except ValueError as error:
        raise CorpusError(str(error)) from error
    with lock_for_writing(folder) as lock:
        old = lock.standing
        sources = parse_sources(old)
        matched = {d.key for d in read_stored_documents(folder, old) if _is_excluded(spec, d.path, sources)}
        excluded = [*old.options.get("exclude", []), *(p for p in patterns if p not in old.options.get("exclude", []))]
        marked = _add_tombstones(old.segments, matched)
        if not marked:
            raise EmptyCorpusError(f"no document of {folder} would be left; delete the folder instead")
        settings = _get_settings(old, vectors, max_memory)
        segments: list[SegmentEntry] = []
        for entry in marked:
            segments += _rewrite_live(folder, [entry], settings, recorder) if entry.tombstones else [entry]
        new = replace(old, segments=tuple(segments), options=old.options | {"exclude": excluded})
        changed = new != old
        removed = len(matched)
        if changed:
            removed += sum(len(entry.tombstones) for entry in old.segments)
            _commit(lock, new, writer, recorder)
        return recorder.summarize(folder, lock.standing, committed=changed, removed=removed)


def _commit(lock: StoreWriter, manifest: Manifest, writer: str, recorder: Recorder) -> None:
    """Make `manifest` the next generation, written by `writer`."""
    with recorder.measure("committing"):
        lock.commit(replace(manifest, generation=lock.next_generation, writer=writer))


def read_stored_documents(folder: Path, manifest: Manifest) -> Iterator[StoredDocument]:
    """Yield the live documents of a generation. Raises DatastoreCorruptError: what is read here decides what is kept."""
    for number, entry in enumerate(manifest.segments):
        segment = map_segment(folder, entry)
        check_bodies(segment, ("docs", "paths"))
        paths = segment.paths.tobytes()
        tombstones = set(entry.tombstones)
        records = segment.docs
        fields = (records[name].tolist() for name in ("path_offset", "path_bytes", "size", "mtime_ns"))
        hashes = records["hash"].tobytes()
        for doc, (offset, length, size, mtime_ns) in enumerate(zip(*fields, strict=True)):
            if doc in tombstones:
                continue
            try:
                path = paths[offset : offset + length].decode()
            except UnicodeDecodeError as error:
                raise DatastoreCorruptError(f"{segment.path}: paths: document {doc} has a path that is not UTF-8") from error
            yield StoredDocument((number, doc), path, size, mtime_ns, hashes[16 * doc : 16 * doc + 16])


def get_encoder(folder: Path, manifest: Manifest, tokenizer: Tokenizer | Encoder | None = None, name: str | None = None) -> Encoder:
    """Return a store's encoder, of its own tokenizer, or of one that is the same. Raises TokenizerMismatchError, DatastoreCorruptError."""
    if tokenizer is None:
        return load_encoder(folder, manifest)
    encoder = tokenizer if isinstance(tokenizer, Encoder) else Encoder(tokenizer, name or "another model")
    if encoder.fingerprint != manifest.tokenizer_fingerprint:
        raise TokenizerMismatchError(
            f"{folder} was made with the tokenizer of {manifest.tokenizer_name!r}, not that of {name or encoder.name!r}: leave the "
            "tokenizer out, for the store has its own, or build it anew"
        )
    return encoder


def parse_options(manifest: Manifest) -> CorpusOptions:
    """Return the options by which a store's corpus was walked. Raises DatastoreCorruptError for options that no build writes."""
    known: dict[str, Any] = {}
    for name in CorpusOptions.__slots__:
        if name in manifest.options:
            value = manifest.options[name]
            known[name] = tuple(value) if isinstance(value, list) else value
    try:
        return CorpusOptions(**known)
    except (TypeError, ValueError) as error:
        raise DatastoreCorruptError(f"the manifest's options are not a build's: {error}") from error


def parse_sources(manifest: Manifest) -> list[CorpusSource]:
    """Return the sources that a store was built from. Raises DatastoreCorruptError for sources that no build writes."""
    try:
        return [CorpusSource(**source) for source in manifest.sources]
    except TypeError as error:
        raise DatastoreCorruptError(f"the manifest's sources are not a build's: {error}") from error


def _get_settings(manifest: Manifest, vectors: VectorFunction | None, max_memory: int | None) -> SegmentSettings:
    """Return the settings of a store's segments; with records for similar files if it was built with them, or `vectors` are given."""
    router = bool(manifest.options.get("router"))
    return make_settings(manifest.vocab_size, manifest.tokenizer_fingerprint, router, vectors, max_memory)


def find_due_segments(manifest: Manifest) -> list[int]:
    """Return the numbers of the segments that an update merges: of the smallest tier with too many, and those with many tombstones.

    As in log-structured stores (O'Neil et al., The log-structured merge-tree, 1996; size-tiered compaction).
    """
    tiers: dict[int, list[int]] = {}
    for number, entry in enumerate(manifest.segments):
        tiers.setdefault(max(0, math.ceil(math.log(max(entry.tokens, 1) / TIER_FIRST, TIER_FACTOR))), []).append(number)
    due = {number for number, entry in enumerate(manifest.segments) if len(entry.tombstones) > MAX_TOMBSTONES * entry.docs}
    for tier in sorted(tiers):
        if len(tiers[tier]) > TIER_MOST:
            due.update(tiers[tier])
            break
    return sorted(due)


def _combine_sources(manifest: Manifest, added: Iterable[CorpusSource]) -> list[CorpusSource]:
    sources = parse_sources(manifest)
    for source in sources:
        if not Path(source.path).parent.exists() or (source.folder and not Path(source.path).exists()):
            raise CorpusError(
                f"the corpus {source.label!r} is gone, {source.path} does not exist: its documents stay; build anew without it"
            )
    present = {source.path for source in sources}
    return sources + [source for source in added if source.path not in present]


def _select_changed(
    found: Iterable[FoundFile], known: Iterable[StoredDocument], changes: _Changes, *, members: bool, anew: bool
) -> list[ChangedFile]:
    """Return the files that must be read, each with the documents that the store has of it. Those of files that are gone get tombstones.

    `members`: files that hold many documents are read again, for other members may be wanted now. `anew`: all files are.
    """
    by_file: dict[str, list[StoredDocument]] = {}
    for document in known:
        by_file.setdefault(get_container_path(document.path), []).append(document)
    to_read = []
    for file in found:
        documents = by_file.pop(file.name, [])
        is_changed = not documents or anew or (members and file.kind is not None)
        if is_changed or any([d.mtime_ns != file.mtime_ns or d.size != file.size for d in documents]):  # noqa: C419 - half the time
            to_read.append((file, documents))
        else:
            changes.unchanged += len(documents)
            for document in documents:
                changes.live.add(document.hash)
    changes.tombstones.update(document.key for documents in by_file.values() for document in documents)
    return to_read


def _drop_left_out(to_read: Sequence[ChangedFile], left_out: dict[str, str], changes: _Changes, recorder: Recorder) -> list[ChangedFile]:
    """Return the files that were not left out as they are now, and record that the others are again. The document whose text a duplicate
    has must be live and its file unchanged."""
    kept = []
    for file, documents in to_read:
        key = corpus.make_left_out_key(file.name, file.size, file.mtime_ns)
        twin = f"{corpus.TWIN}{key}"
        if file.kind is None and key in left_out:
            recorder.left_out[key] = left_out[key]
            corpus.add_left_out(recorder.skipped, left_out[key])
        elif file.kind is None and _is_live(left_out.get(twin, ""), changes):
            recorder.left_out[twin] = left_out[twin]
            recorder.skipped.add(corpus.file_filters.DUPLICATE)
        else:
            kept.append((file, documents))
            continue
        changes.tombstones.update(document.key for document in documents)
    return kept


def _is_live(content: str, changes: _Changes) -> bool:
    try:
        return bytes.fromhex(content) in changes.live
    except ValueError:
        return False


def _read_new_documents(
    to_read: Sequence[ChangedFile], options: CorpusOptions, changes: _Changes, recorder: Recorder
) -> Iterator[Document]:
    """Yield the documents of files that the store does not have as they are."""
    of_file = {file.name: {(d.path, d.hash): d for d in documents} for file, documents in to_read}
    for document in read_files([file for file, _ in to_read], options, recorder):
        same = of_file.get(get_container_path(document.path), {}).pop((document.path, document.hash), None)
        if same is not None:
            changes.unchanged += 1
        elif document.hash in changes.live:
            recorder.add_duplicate(document)
            continue
        else:
            changes.added += 1
            yield document
        changes.live.add(document.hash)
    changes.tombstones.update(d.key for documents in of_file.values() for d in documents.values())


def _add_tombstones(segments: Sequence[SegmentEntry], added: Iterable[Key]) -> tuple[SegmentEntry, ...]:
    """Return entries with more tombstones; those of which no document is live are left out."""
    by_segment: dict[int, set[int]] = {}
    for number, doc in added:
        by_segment.setdefault(number, set()).add(doc)
    marked = [replace(e, tombstones=tuple(sorted({*e.tombstones, *by_segment.get(number, ())}))) for number, e in enumerate(segments)]
    return tuple(entry for entry in marked if len(entry.tombstones) < entry.docs)


def _merge_segments(lock: StoreWriter, chosen: Sequence[int], settings: SegmentSettings, writer: str, recorder: Recorder) -> int:
    """Commit a generation in which the chosen segments are few -> how many were chosen. Segments keep their order, oldest first."""
    if not chosen:
        return 0
    old = lock.standing
    new = _rewrite_live(lock.folder, [old.segments[number] for number in chosen], settings, recorder)
    segments = [entry for number, entry in enumerate(old.segments) if number not in set(chosen)]
    before = sum(number not in set(chosen) for number in range(chosen[-1]))
    segments[before:before] = new
    _commit(lock, replace(old, segments=tuple(segments)), writer, recorder)
    return len(chosen)


def _rewrite_live(folder: Path, entries: Sequence[SegmentEntry], settings: SegmentSettings, recorder: Recorder) -> list[SegmentEntry]:
    """Write the live documents of some segments anew, as segments of at most `settings.max_tokens`, or one if there is but one."""
    written: list[SegmentEntry] = []
    gathered: list[SegmentContents] = []

    def seal_segment() -> None:
        written.append(segment_writer.sort_and_write(folder, segment_writer.join_contents(gathered), settings, recorder))
        gathered.clear()

    for entry in entries:
        live = segment_writer.copy_live(map_segment(folder, entry), entry.tombstones)
        if gathered and sum(len(each.tokens) for each in gathered) + len(live.tokens) > settings.max_tokens:
            seal_segment()
        gathered.append(live)
    seal_segment()
    return written


def _is_excluded(spec: GitIgnoreSpec, path: str, sources: Iterable[CorpusSource]) -> bool:
    """Return whether a build with these patterns leaves a document out, by its file's path in the source or, as a member, its own path."""
    file = get_container_path(path)
    inner = file
    for source in sources:
        if file == source.label:
            inner = file.rpartition("/")[2]
        elif file.startswith(prefix := f"{source.label.rstrip('/')}/"):
            inner = file[len(prefix) :]
        else:
            continue
        break
    member = path[len(file) :].removeprefix("!/").strip("/")
    return spec.match_file(inner) or (path[len(file) :].startswith("!/") and spec.match_file(member))

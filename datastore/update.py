"""Changing a store that is there: update, merge, prune. Each ends in one commit, or leaves the store as it was.

A store enters, its next generation leaves. Segments are never changed: new documents go into a new one, old ones are marked dead, and
merging copies what lives of several segments into one. What has not changed on disk by size and time is not read, and what was read
and has the same content is kept.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pathspec import GitIgnoreSpec
from tokenizers import Tokenizer

from . import corpus, segment_writer
from .archives import container_of
from .build import commit, nothing_found, options_as_json, read_all, segment_limit, summarize, vectors_for, write_segments
from .commit import Writer, writing
from .corpus import CorpusError, CorpusOptions, Document, Found, Skipped, Source
from .errors import DatastoreCorruptError, EmptyCorpusError, TokenizerMismatchError
from .format import Manifest, SegmentEntry, check_bodies, map_segment
from .progress import Progress, Summary, Tell, silent
from .segment_writer import Recipe, Vectors
from .tokens import Encoder, stored_encoder

Key = tuple[int, int]
"""Number of a segment in the manifest, number of a document in it."""

DEAD_SHARE = 0.25  # of the documents of a segment: more, and it is rewritten
TIER_FIRST = 1 << 16  # tokens
TIER_FACTOR = 8
TIER_MOST = 8
"""Segments of the same order of magnitude (in powers of TIER_FACTOR) before they are merged: their number grows with the logarithm."""


@dataclass(frozen=True, slots=True)
class Known:
    """A live document of the store."""

    key: Key
    path: str
    size: int
    mtime_ns: int
    hash: bytes


@dataclass(slots=True)
class _Changes:
    """What an update finds out while documents pass through it."""

    dead: set[Key] = field(default_factory=set)
    kept: set[bytes] = field(default_factory=set)
    """Content hashes of what lives."""
    unchanged: int = 0
    added: int = 0


def update(
    store: str | os.PathLike[str],
    tokenizer: Tokenizer | Encoder | None = None,
    name: str | None = None,
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    options: CorpusOptions | None = None,
    vectors: Vectors | None = None,
    jobs: int | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
    tell: Tell = silent,
) -> Summary:
    """Bring a store up to date with its corpus.

    `tokenizer` is not needed, the store has its own: one that is given must be the same, `name` is what users call it, and an Encoder
    saves the reading. `paths` are added to what the store was built from, `options` replace those it was built with.
    Small segments are merged afterwards, in a commit of their own, when they have become many or mostly dead. Raises as `build`
    does, and DatastoreNotFoundError, TokenizerMismatchError; EmptyCorpusError where no document would be left.
    """
    clock = time.perf_counter()
    added = corpus.sources_of(paths)
    skipped, progress, changes = Skipped(), Progress(), _Changes()
    seconds: dict[str, float] = {}
    folder = Path(store)
    with writing(folder) as writer_:
        old = writer_.manifest
        assert old is not None
        encoder = encoder_of(folder, old, tokenizer, name)
        tell(progress)
        sources = _with_sources(old, added)
        before = options_of(old)
        walked = options or before
        found = corpus.find(sources, walked, skipped, omit=os.path.realpath(folder))
        anew = old.options.get("rules") != corpus.RULES
        to_read = _changed(found, known_documents(folder, old), changes, members=walked != before, anew=anew)
        seconds["looking"] = time.perf_counter() - clock
        documents = _new_documents(to_read, walked, skipped, changes, progress, tell)
        recipe, limit = _recipe(old, vectors), segment_limit(old.vocab_size, max_memory)
        entries = write_segments(documents, encoder, folder, recipe, limit, jobs, progress, tell, seconds)
        new = replace(
            old,
            generation=writer_.next_generation,
            segments=(*_with_dead(old.segments, changes.dead), *entries),
            sources=[asdict(source) for source in sources],
            options=old.options | options_as_json(walked),
            writer=writer,
        )
        if not new.segments:
            raise EmptyCorpusError(nothing_found(sources, skipped) + "; the store stays as it was")
        # nothing changed but, perhaps, what wrote it
        changed = replace(new, generation=old.generation, writer=old.writer) != old
        if changed:
            commit(writer_, new, seconds)
        progress.stage = "done"
        tell(progress)
        due = due_for_merge(writer_.manifest or new)
        n_merged = _merge(writer_, due, recipe, limit, writer, seconds) if due else 0
        assert writer_.manifest is not None
        seconds["total"] = time.perf_counter() - clock
        return replace(
            summarize(writer_.manifest, skipped, seconds),
            committed=changed or n_merged > 0,
            added=changes.added,
            removed=len(changes.dead),
            unchanged=changes.unchanged,
            mb=progress.bytes / 1e6,
            merged=n_merged,
        )


def merge(
    store: str | os.PathLike[str],
    how: str = "all",
    *,
    vectors: Vectors | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
) -> Summary:
    """Fewer segments, without dead documents. `how`: all of them into as few as memory allows, or "tiered": only those that are due."""
    if how not in ("all", "tiered"):
        raise CorpusError(f"merging is done 'all' or 'tiered', got {how!r}")
    clock = time.perf_counter()
    seconds: dict[str, float] = {}
    with writing(Path(store)) as writer_:
        manifest = writer_.manifest
        assert manifest is not None
        recipe, limit = _recipe(manifest, vectors), segment_limit(manifest.vocab_size, max_memory)
        chosen = list(range(len(manifest.segments))) if how == "all" else due_for_merge(manifest)
        if len(chosen) == 1 and not manifest.segments[chosen[0]].dead:
            chosen = []
        removed = sum(len(manifest.segments[number].dead) for number in chosen)
        n_merged = _merge(writer_, chosen, recipe, limit, writer, seconds) if chosen else 0
        assert writer_.manifest is not None
        seconds["total"] = time.perf_counter() - clock
        return replace(summarize(writer_.manifest, Skipped(), seconds), committed=n_merged > 0, merged=n_merged, removed=removed)


def prune(
    store: str | os.PathLike[str],
    patterns: Sequence[str] = (),
    *,
    vectors: Vectors | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
) -> Summary:
    """Drop documents for good: those whose path matches a pattern as in .gitignore, and all that are dead.

    Patterns become part of the store's `exclude` option, so that an update does not bring the documents back.
    """
    clock = time.perf_counter()
    seconds: dict[str, float] = {}
    folder = Path(store)
    try:
        spec = GitIgnoreSpec.from_lines(patterns)
    except ValueError as error:
        raise CorpusError(str(error)) from error
    with writing(folder) as writer_:
        old = writer_.manifest
        assert old is not None
        sources = sources_in(old)
        matched = {d.key for d in known_documents(folder, old) if _matches(spec, d.path, sources)}
        before = sum(len(entry.dead) for entry in old.segments)
        excluded = [*old.options.get("exclude", []), *(p for p in patterns if p not in old.options.get("exclude", []))]
        marked = _with_dead(old.segments, matched)
        if not marked:
            raise EmptyCorpusError(f"no document of {folder} would be left; delete the folder instead")
        recipe, limit = _recipe(old, vectors), segment_limit(old.vocab_size, max_memory)
        segments: list[SegmentEntry] = []
        for entry in marked:
            segments += _rewrite(folder, [entry], recipe, limit, seconds) if entry.dead else [entry]
        new = replace(
            old, generation=writer_.next_generation, segments=tuple(segments), options=old.options | {"exclude": excluded}, writer=writer
        )
        changed = new.segments != old.segments or new.options != old.options
        if changed:
            commit(writer_, new, seconds)
        seconds["total"] = time.perf_counter() - clock
        return replace(
            summarize(new if changed else old, Skipped(), seconds), committed=changed, removed=len(matched) + (before if changed else 0)
        )


def known_documents(folder: Path, manifest: Manifest) -> Iterator[Known]:
    """The live documents of a generation. Raises DatastoreCorruptError: what is read here decides what is kept."""
    for number, entry in enumerate(manifest.segments):
        segment = map_segment(folder, entry)
        check_bodies(segment, ("docs", "paths"))
        paths = segment.paths.tobytes()
        dead = set(entry.dead)
        records = segment.docs
        fields = (records[name].tolist() for name in ("path_offset", "path_bytes", "size", "mtime_ns"))
        hashes = records["hash"].tobytes()
        for doc, (offset, length, size, mtime_ns) in enumerate(zip(*fields, strict=True)):
            if doc in dead:
                continue
            try:
                path = paths[offset : offset + length].decode()
            except UnicodeDecodeError as error:
                raise DatastoreCorruptError(f"{segment.path}: paths: document {doc} has a path that is not UTF-8") from error
            yield Known((number, doc), path, size, mtime_ns, hashes[16 * doc : 16 * doc + 16])


def encoder_of(folder: Path, manifest: Manifest, tokenizer: Tokenizer | Encoder | None = None, name: str | None = None) -> Encoder:
    """The encoder for a store: by its own tokenizer, or by one that is the same. Raises TokenizerMismatchError, DatastoreCorruptError."""
    if tokenizer is None:
        return stored_encoder(folder, manifest)
    encoder = tokenizer if isinstance(tokenizer, Encoder) else Encoder(tokenizer, name or "another model")
    if encoder.fingerprint != manifest.tokenizer_fingerprint:
        raise TokenizerMismatchError(
            f"{folder} was made with the tokenizer of {manifest.tokenizer_name!r}, not that of {name or encoder.name!r}: leave the "
            "tokenizer out, for the store has its own, or build it anew"
        )
    return encoder


def options_of(manifest: Manifest) -> CorpusOptions:
    """How a store's corpus was walked. Raises DatastoreCorruptError for options that no build writes."""
    known: dict[str, Any] = {}
    for name in CorpusOptions.__slots__:
        if name in manifest.options:
            value = manifest.options[name]
            known[name] = tuple(value) if isinstance(value, list) else value
    try:
        return CorpusOptions(**known)
    except (TypeError, ValueError) as error:
        raise DatastoreCorruptError(f"the manifest's options are not a build's: {error}") from error


def sources_in(manifest: Manifest) -> list[Source]:
    """What a store was built from. Raises DatastoreCorruptError for sources that no build writes."""
    try:
        return [Source(**source) for source in manifest.sources]
    except TypeError as error:
        raise DatastoreCorruptError(f"the manifest's sources are not a build's: {error}") from error


def _recipe(manifest: Manifest, vectors: Vectors | None) -> Recipe:
    """What a store's segments carry; with records for the router, made by `vectors` or by default, where it was built with them."""
    router = bool(manifest.options.get("router"))
    return Recipe(manifest.vocab_size, manifest.tokenizer_fingerprint, vectors or vectors_for(router))


def due_for_merge(manifest: Manifest) -> list[int]:
    """Numbers of the segments that an update merges: of the smallest tier with too many, and those with many dead documents.

    As in log-structured stores (O'Neil et al., The log-structured merge-tree, 1996; size-tiered compaction).
    """
    tiers: dict[int, list[int]] = {}
    for number, entry in enumerate(manifest.segments):
        tiers.setdefault(max(0, math.ceil(math.log(max(entry.tokens, 1) / TIER_FIRST, TIER_FACTOR))), []).append(number)
    due = {number for number, entry in enumerate(manifest.segments) if len(entry.dead) > DEAD_SHARE * entry.docs}
    for tier in sorted(tiers):
        if len(tiers[tier]) > TIER_MOST:
            due.update(tiers[tier])
            break
    return sorted(due)


def _with_sources(manifest: Manifest, added: Iterable[Source]) -> list[Source]:
    sources = sources_in(manifest)
    for source in sources:
        if not Path(source.path).parent.exists() or (source.folder and not Path(source.path).exists()):
            raise CorpusError(
                f"the corpus {source.label!r} is gone, {source.path} does not exist: its documents stay; build anew without it"
            )
    present = {source.path for source in sources}
    return sources + [source for source in added if source.path not in present]


def _changed(
    found: Iterable[Found], known: Iterable[Known], changes: _Changes, *, members: bool, anew: bool
) -> list[tuple[Found, list[Known]]]:
    """Files that must be read, each with the documents that the store has of it. Documents of files that are gone are marked dead.

    `members`: files that hold many documents are read again, for other members may be wanted now. `anew`: all files are.
    """
    by_file: dict[str, list[Known]] = {}
    for document in known:
        by_file.setdefault(container_of(document.path), []).append(document)
    to_read = []
    for file in found:
        documents = by_file.pop(file.name, [])
        as_before = bool(documents) and all((d.size, d.mtime_ns) == (file.size, file.mtime_ns) for d in documents)
        if as_before and not anew and not (members and file.kind is not None):
            changes.unchanged += len(documents)
            changes.kept.update(d.hash for d in documents)
        else:
            to_read.append((file, documents))
    changes.dead.update(document.key for documents in by_file.values() for document in documents)
    return to_read


def _new_documents(
    to_read: Sequence[tuple[Found, list[Known]]],
    options: CorpusOptions,
    skipped: Skipped,
    changes: _Changes,
    progress: Progress,
    tell: Tell,
) -> Iterator[Document]:
    """The documents of files that the store has not, as they are."""
    of_file = {file.name: {(d.path, d.hash): d for d in documents} for file, documents in to_read}
    for document in read_all([file for file, _ in to_read], options, skipped, progress, tell):
        same = of_file.get(container_of(document.path), {}).pop((document.path, document.hash), None)
        if same is not None:
            changes.unchanged += 1
        elif document.hash in changes.kept:
            skipped.add(corpus.file_filters.DUPLICATE)
            continue
        else:
            changes.added += 1
            yield document
        changes.kept.add(document.hash)
    changes.dead.update(d.key for documents in of_file.values() for d in documents.values())


def _with_dead(segments: Sequence[SegmentEntry], dead: Iterable[Key]) -> tuple[SegmentEntry, ...]:
    """Entries with more dead documents; those of which none lives are left out."""
    by_segment: dict[int, set[int]] = {}
    for number, doc in dead:
        by_segment.setdefault(number, set()).add(doc)
    marked = [replace(e, dead=tuple(sorted({*e.dead, *by_segment.get(number, ())}))) for number, e in enumerate(segments)]
    return tuple(entry for entry in marked if len(entry.dead) < entry.docs)


def _merge(writer_: Writer, chosen: Sequence[int], recipe: Recipe, limit: int, writer: str, seconds: dict[str, float]) -> int:
    """Commit a generation in which the chosen segments are few. They keep their place, which tells newer from older."""
    manifest = writer_.manifest
    assert manifest is not None
    old = [manifest.segments[number] for number in chosen]
    new = _rewrite(writer_.folder, old, recipe, limit, seconds)
    segments = [entry for number, entry in enumerate(manifest.segments) if number not in set(chosen)]
    before = sum(number not in set(chosen) for number in range(chosen[-1]))
    segments[before:before] = new
    commit(writer_, replace(manifest, generation=writer_.next_generation, segments=tuple(segments), writer=writer), seconds)
    return len(old)


def _rewrite(folder: Path, entries: Sequence[SegmentEntry], recipe: Recipe, limit: int, seconds: dict[str, float]) -> list[SegmentEntry]:
    """What lives in some segments, written anew as segments of at most `limit` tokens, or one where there is but one."""
    written: list[SegmentEntry] = []
    gathered: list[segment_writer.Piece] = []
    for entry in entries:
        piece = segment_writer.live(map_segment(folder, entry), entry.dead)
        if gathered and sum(len(p.tokens) for p in gathered) + len(piece.tokens) > limit:
            written.append(segment_writer.write(folder, segment_writer.join(gathered), recipe, seconds))
            gathered = []
        gathered.append(piece)
    written.append(segment_writer.write(folder, segment_writer.join(gathered), recipe, seconds))
    return written


def _matches(spec: GitIgnoreSpec, path: str, sources: Iterable[Source]) -> bool:
    """Whether a build that excludes these patterns leaves a document out, by its file's path within the source or, as a member, its own."""
    file = container_of(path)
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

"""Walking a corpus: folders, files, archives and .jsonl enter, texts leave, and what was left out is counted by its reason.

There are two steps, so that an update need not read what has not changed: `find_files` lists files by name, size and time (`listing` says
which there are), `read_documents` opens one of them and yields its documents. Files are opened beneath their source (`beneath`), nothing is
executed or extracted. The module knows nothing of tokens or stores.
"""

from __future__ import annotations

import errno
import hashlib
import json
import operator
import os
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from . import archives, file_filters, secret_scan
from .beneath import ConfinedFolder, open_beneath
from .cache_dir import expand_home
from .errors import CorpusError
from .listing import Listing, Skipped, to_encodable

# version of what belongs into a corpus and how its text is read. A store that was built by other rules is read anew by its next update
RULES = 3
MAX_FILE_SIZE = 1 << 20  # bytes, unless the user says otherwise
TEXT_FIELDS = ("text", "content", "code")  # of .jsonl rows, the first there is
# A file changed within this time before it was read may change again and keep its time: it is not taken for unchanged later
RACY_NS = 100_000_000
TWIN = "="  # before the key of a file that was left out because another has its text


@dataclass(frozen=True, slots=True)
class CorpusSource:
    """A folder or file of the corpus."""

    path: str
    """Absolute, links resolved: what is walked, from whatever folder an update runs in."""
    label: str
    """What the user wrote: documents are called by it."""
    folder: bool = True

    @property
    def root(self) -> str:
        """The folder that it is read beneath: itself, or the one that holds it."""
        return self.path if self.folder else str(Path(self.path).parent)


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """What is taken. Kept in the store's manifest, so that an update walks by the same rules."""

    include: tuple[str, ...] = ()
    """Patterns as in .gitignore, relative to the source. Given any, files that match none are left out; a file that matches is taken
    whatever its type."""
    exclude: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()
    """Names or extensions; none means every type that is known to be text."""
    max_file_size: int = MAX_FILE_SIZE
    text_fields: tuple[str, ...] = TEXT_FIELDS
    untracked: bool = False
    """Take also the files of a git repository that git neither tracks nor ignores."""

    def __post_init__(self) -> None:
        if self.max_file_size < 1:
            raise CorpusError(f"the largest file must have at least 1 byte, got {self.max_file_size}")
        try:
            file_filters.resolve_languages(list(self.languages))
            GitIgnoreSpec.from_lines([*self.include, *self.exclude])
        except ValueError as error:
            raise CorpusError(str(error)) from error


class FoundFile(NamedTuple):
    """A file that may hold documents."""

    root: str
    """The folder that it is read beneath: its source's."""
    beneath: str
    """Its path relative to `root`."""
    name: str
    """The path its documents are called by, always encodable."""
    relative: str
    """Its path within its source: what patterns match."""
    size: int
    mtime_ns: int
    kind: str | None
    """jsonl, zip, tar, or None: one plain text."""

    @property
    def path(self) -> str:
        """Its path on disk."""
        return f"{self.root.rstrip('/')}/{self.beneath}"


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `size` and `mtime_ns` are those of the file on disk that it lies in."""

    path: str
    text: str
    size: int
    mtime_ns: int
    """-1 if the file was so new that its time says nothing (RACY_NS)."""
    hash: bytes
    """blake2b of its text in UTF-8, 16 bytes."""


class ContentHashes:
    """What the files of a corpus hold: their names within their sources, and a hash of the bytes that were read."""

    def __init__(self) -> None:
        self._files: list[tuple[str, str]] = []

    def add_file(self, file: FoundFile, data: bytes) -> None:
        self._files.append((file.relative, hashlib.blake2b(data, digest_size=32).hexdigest()))

    @property
    def n_files(self) -> int:
        return len(self._files)

    def compute_digest(self) -> str:
        """Return one digest of all, whatever order they were read in."""
        return hashlib.sha256(json.dumps(sorted(self._files)).encode()).hexdigest()


def resolve_sources(paths: Iterable[str | os.PathLike[str]]) -> list[CorpusSource]:
    """Return sources by the paths that a user gave, each once. Raises CorpusError for one that does not exist."""
    found: dict[str, CorpusSource] = {}
    for given in paths:
        path = expand_home(given)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise CorpusError(f"the corpus {str(given)!r} cannot be read: {error.strerror or error}") from error
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise CorpusError(f"the corpus {str(given)!r} is neither a folder nor a regular file")
        real = os.path.realpath(path)
        found.setdefault(real, CorpusSource(real, to_encodable(os.path.normpath(given)), stat.S_ISDIR(mode)))
    return list(found.values())


def find_files(sources: Iterable[CorpusSource], options: CorpusOptions, skipped: Skipped, omit: str | None = None) -> list[FoundFile]:
    """Return the files of all sources, sorted by path within each, none twice. `omit`: a folder that is not entered (the store itself)."""
    rules = _NameRules(options)
    found: list[list[FoundFile]] = []
    for source in sources:
        if os.path.realpath(source.path) != source.path:
            raise CorpusError(f"the corpus {source.label!r} is gone: a link is where {source.path} was; build anew from where it leads")
        with _open_source(source) as tree:
            if source.folder:
                folders = Listing(source.path, tree, skipped, untracked=options.untracked, omit=omit).list_files()
            else:
                folders = iter([("", [Path(source.path).name], False)])
            of_source = [file for each in folders for file in _check_files(source, tree, *each, rules, skipped)]
        of_source.sort(key=operator.attrgetter("beneath"))
        found.append(of_source)
    is_one = len(found) == 1 and len({file.name for file in found[0]}) == len(found[0])
    return found[0] if is_one else _join_sources(found)


def _join_sources(found: Iterable[Iterable[FoundFile]]) -> list[FoundFile]:
    """Return the files of sources, each once. Of those that are called the same, all but the first are named by their whole paths."""
    by_path: dict[str, FoundFile] = {}
    for of_source in found:
        for file in of_source:
            by_path.setdefault(file.path, file)
    files: dict[str, FoundFile] = {}
    for file in by_path.values():
        if file.name in files:
            file = file._replace(name=to_encodable(file.path))
        files[file.name] = file
    return list(files.values())


def list_names(root: str, options: CorpusOptions) -> Iterator[str]:
    """Yield the files of a folder that belong into a corpus by their names, relative to it. They are looked for as they are asked for."""
    rules = _NameRules(options)
    with ConfinedFolder(root) as tree:
        for folder, names, _ in Listing(root, tree, Skipped(), untracked=options.untracked).list_files():
            for relative in (f"{folder}/{name}" if folder else name for name in names):
                if rules.find_reason(to_encodable(relative)) is None:
                    yield relative


def hash_files(files: Iterable[FoundFile], options: CorpusOptions, skipped: Skipped) -> ContentHashes:
    """Read plain files, none of them a container, for what they hold."""
    hashes = ContentHashes()
    for file in files:
        try:
            with open_beneath(file.root, file.beneath) as stream:
                data = stream.read(options.max_file_size + 1)
        except OSError as error:
            skipped.add(file_filters.UNREADABLE, file.name, error.strerror or str(error))
            continue
        if len(data) <= options.max_file_size:
            hashes.add_file(file, data)
    return hashes


def read_documents(file: FoundFile, options: CorpusOptions, skipped: Skipped, hashes: ContentHashes | None = None) -> Iterator[Document]:
    """Yield the documents of a file. A failure is counted and named, what was read before stands. `hashes` gets what plain files hold."""
    try:
        with open_beneath(file.root, file.beneath) as stream:
            status = os.fstat(stream.fileno())
            if file.kind is None:
                data = stream.read(options.max_file_size + 1)
                if len(data) > options.max_file_size:
                    skipped.add(file_filters.TOO_LARGE)
                    return
                if hashes is not None:
                    hashes.add_file(file, data)
                if (document := _make_document(file.name, data, status, skipped)) is not None:
                    yield document
                return
            rules = _NameRules(options)
            members = archives.read_members(
                stream, file.kind, status.st_size, options.max_file_size, options.text_fields, rules.find_member_reason
            )
            for name, member, reason in members:
                path = to_encodable(archives.make_member_path(file.name, name, file.kind))
                if member is None:
                    skipped.add(reason, path, reason if reason in (file_filters.UNREADABLE, file_filters.BAD_ROW) else "")
                elif (document := _make_document(path, member, status, skipped, code=file.kind != "jsonl")) is not None:
                    yield document
    except archives.DamagedError as error:
        skipped.add(file_filters.DAMAGED, file.name, str(error))
    except archives.OverLimitError as error:
        skipped.add(file_filters.BOMB, file.name, str(error))
    except FileNotFoundError:
        pass  # gone since it was listed
    except OSError as error:
        skipped.add(file_filters.UNREADABLE, file.name, error.strerror or str(error))


def make_left_out_key(name: str, size: int, mtime_ns: int) -> str:
    """Return what stands for a plain file as it was found, without telling its name."""
    return hashlib.blake2b(f"{name}\0{size}\0{mtime_ns}".encode(), digest_size=12).hexdigest()


def find_left_out_reason(skipped: Skipped) -> str | None:
    """Return why one plain file was left out, if nothing but its name and what is in it decides that: not for one that is a duplicate."""
    if skipped.secrets:
        return f"{file_filters.SECRET}: {next(iter(skipped.secrets))}"
    return next((reason for reason in skipped.counts if reason in file_filters.CONTENT_REASONS), None)


def add_left_out(skipped: Skipped, reason: str) -> None:
    """Count a file that is left out for the reason that was found before."""
    kind, _, rule = reason.partition(": ")
    if kind == file_filters.SECRET:
        skipped.add_secret(rule)
    else:
        skipped.add(reason)


class _NameRules:
    """The options' rules about names, compiled once."""

    def __init__(self, options: CorpusOptions) -> None:
        self.include = GitIgnoreSpec.from_lines(options.include) if options.include else None
        self.exclude = GitIgnoreSpec.from_lines(options.exclude) if options.exclude else None
        self.languages = file_filters.resolve_languages(list(options.languages))
        self.max_file_size = options.max_file_size

    def is_excluded(self, relative: str) -> bool:
        return self.exclude is not None and self.exclude.match_file(relative)

    def find_reason(self, relative: str, chosen: bool = False) -> str | None:
        """Return why a file is left out by its path within its source. `chosen`: the user named it, so that its type is not asked."""
        if self.is_excluded(relative):
            return file_filters.EXCLUDED
        if self.include is not None:
            if not self.include.match_file(relative):
                return file_filters.EXCLUDED
            chosen = True
        return file_filters.find_name_reason(relative.rpartition("/")[2], self.languages, chosen)

    def find_member_reason(self, name: str) -> str | None:
        if file_filters.SKIPPED_FOLDERS.intersection(name.split("/")[:-1]):
            return file_filters.IGNORED
        return self.find_reason(name.strip("/") or "?")


def _open_source(source: CorpusSource) -> ConfinedFolder:
    try:
        return ConfinedFolder(source.root)
    except OSError as error:
        raise CorpusError(f"the corpus {source.label!r} cannot be read: {error.strerror or error}") from error


def _check_files(
    source: CorpusSource, tree: ConfinedFolder, folder: str, names: Sequence[str], in_git: bool, rules: _NameRules, skipped: Skipped
) -> Iterator[FoundFile]:
    """Yield those files of one folder of a source that are taken by their names and status, and count why others are not."""
    above = f"{folder}/" if folder else ""
    within = "" if source.label == "." or not source.folder else f"{source.label.rstrip('/')}/"
    taken: list[tuple[str, str, str | None]] = []
    for name in names:
        shown = to_encodable(above + name)
        kind = archives.get_container_kind(name)
        if kind is not None and in_git and not (rules.include is not None and rules.include.match_file(shown)):
            kind = None  # data of a repository's tests, more often than text; its type is not known to be text either
        if kind is not None:  # other patterns and languages are about its members
            reason = file_filters.EXCLUDED if rules.is_excluded(shown) else None
        else:
            reason = rules.find_reason(shown, chosen=not source.folder)
        if reason is None:
            taken.append((name, shown, kind))
        else:
            skipped.add(reason)
    for (name, shown, kind), status in zip(taken, tree.lstat_files(folder, [each[0] for each in taken]), strict=True):
        called = within + shown if source.folder else source.label
        if isinstance(status, OSError):
            if isinstance(status, (FileNotFoundError, NotADirectoryError)):
                continue  # tracked by git and removed, or gone since it was listed
            if status.errno == errno.ELOOP:  # a folder of what git tracks
                skipped.add(file_filters.LINK)
            else:
                skipped.add(file_filters.UNREADABLE, called, status.strerror or str(status))
        elif stat.S_ISDIR(status.st_mode):
            continue  # a submodule that is not checked out
        elif not stat.S_ISREG(status.st_mode):
            skipped.add(file_filters.LINK if stat.S_ISLNK(status.st_mode) else file_filters.SPECIAL)
        elif kind is None and status.st_size > rules.max_file_size:
            skipped.add(file_filters.TOO_LARGE)
        else:
            yield FoundFile(source.root, above + name, called, shown, status.st_size, status.st_mtime_ns, kind)


def _make_document(path: str, data: bytes, status: os.stat_result, skipped: Skipped, *, code: bool = True) -> Document | None:
    text = file_filters.decode_text(data)
    if text is None:
        skipped.add(file_filters.BINARY if b"\0" in data else file_filters.NOT_UTF8)
        return None
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, in a row of a .jsonl or in UTF-16
        skipped.add(file_filters.NOT_UTF8)
        return None
    if (reason := file_filters.find_content_reason(data, code=code)) is not None:
        skipped.add(reason)
        return None
    if (rule := secret_scan.find_secret(data, path)) is not None:
        skipped.add_secret(rule)
        return None
    mtime_ns = status.st_mtime_ns if time.time_ns() - status.st_mtime_ns > RACY_NS else -1
    return Document(path, text, status.st_size, mtime_ns, hashlib.blake2b(data, digest_size=16).digest())

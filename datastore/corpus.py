"""Walking a corpus: folders, files, archives and .jsonl enter, texts leave, and what was left out is counted by its reason.

In a git repository the files that git tracks, elsewhere all files that no .gitignore excludes. Two steps, so that an update need not read
what has not changed: `find` lists files by name, size and time, `read` opens one of them and yields its documents. Only regular files are
ever opened, links are not followed, nothing is executed or extracted. Knows nothing of tokens or stores.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import stat
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from pathspec import GitIgnoreSpec, Pattern

from . import containers, filters, secret_scan
from .errors import DatastoreError

RULES = 2
"""Of what belongs into a corpus and how its text is read. A store that was built by other rules is read anew by its next update."""
MAX_FILE_SIZE = 1 << 20
TEXT_FIELDS = ("text", "content", "code")
MAX_PATTERN = 4096
"""Letters of a line of .gitignore: no path has more, and pathspec takes seconds for a million."""
MAX_NAMED = 1000
RACY_NS = 100_000_000
"""A file changed within this time before it was read may change again and keep its time: it is not taken for unchanged later."""
_ALL_BELOW = re.compile(r"/\*\*(/?)\s*$")
"""A pattern `a/**` is about what lies in `a`, not about `a` itself; for pathspec it would match "a/" too, for which `a/**/*` does not."""
_NO_CODE_OF_THEIRS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.untrackedCache=false")


class CorpusError(DatastoreError, ValueError):
    """A source or an option that cannot be worked with."""


@dataclass(frozen=True, slots=True)
class Source:
    """A folder or file of the corpus."""

    path: str
    """Absolute, links resolved: what is walked, from whatever folder an update runs in."""
    label: str
    """As the user wrote it: documents are called by it."""
    folder: bool = True


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
    """In a git repository, also the files that git neither tracks nor ignores."""

    def __post_init__(self) -> None:
        if self.max_file_size < 1:
            raise CorpusError(f"the largest file must have at least 1 byte, got {self.max_file_size}")
        try:
            filters.language_names(list(self.languages))
            GitIgnoreSpec.from_lines([*self.include, *self.exclude])
        except ValueError as error:
            raise CorpusError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Found:
    """A file that may hold documents."""

    path: str
    """On disk."""
    name: str
    """The path its documents are called by, always encodable."""
    relative: str
    """Within its source: what patterns are about."""
    size: int
    mtime_ns: int
    kind: str | None
    """jsonl, zip, tar, or None: one plain text."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text. `size` and `mtime_ns` are those of the file on disk that it lies in."""

    path: str
    text: str
    size: int
    mtime_ns: int
    """-1 where the file was so new that its time says nothing (RACY_NS)."""
    hash: bytes
    """blake2b of its text in UTF-8, 16 bytes."""


@dataclass(slots=True)
class Skipped:
    """What was left out."""

    counts: Counter[str] = field(default_factory=Counter)
    named: list[tuple[str, str]] = field(default_factory=list)
    """(path, why) of what should have been readable and was not; at most MAX_NAMED."""
    secrets: Counter[str] = field(default_factory=Counter)
    """By the rule that found one: the texts that `counts` has as secrets because of what is in them."""

    def add(self, reason: str, path: str = "", why: str = "") -> None:
        self.counts[reason] += 1
        if why and len(self.named) < MAX_NAMED:
            self.named.append((path, why))

    def add_secret(self, rule: str) -> None:
        self.add(filters.SECRET)
        self.secrets[rule] += 1


class Contents:
    """What the files of a corpus hold: their names within their sources, and a hash of the bytes that were read."""

    def __init__(self) -> None:
        self._files: list[tuple[str, str]] = []

    def add(self, file: Found, data: bytes) -> None:
        self._files.append((file.relative, hashlib.blake2b(data, digest_size=32).hexdigest()))

    @property
    def n_files(self) -> int:
        return len(self._files)

    def digest(self) -> str:
        """One digest of all, whatever order they were read in."""
        return hashlib.sha256(json.dumps(sorted(self._files)).encode()).hexdigest()


def sources_of(paths: Iterable[str | os.PathLike[str]]) -> list[Source]:
    """Sources by the paths that a user gave, each once. Raises CorpusError for one that does not exist."""
    found: dict[str, Source] = {}
    for given in paths:
        path = Path(given).expanduser()
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise CorpusError(f"the corpus {str(given)!r} cannot be read: {error.strerror or error}") from error
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise CorpusError(f"the corpus {str(given)!r} is neither a folder nor a regular file")
        real = os.path.realpath(path)
        found.setdefault(real, Source(real, _encodable(os.path.normpath(given)), stat.S_ISDIR(mode)))
    return list(found.values())


def walk(sources: Iterable[Source], options: CorpusOptions, skipped: Skipped) -> Iterator[Document]:
    """Every document of a corpus once, in the order of the paths."""
    seen: set[bytes] = set()
    for file in find(sources, options, skipped):
        for document in read(file, options, skipped):
            if document.hash in seen:
                skipped.add(filters.DUPLICATE)
            else:
                seen.add(document.hash)
                yield document


def find(sources: Iterable[Source], options: CorpusOptions, skipped: Skipped, omit: str | None = None) -> list[Found]:
    """The files of all sources, sorted by path within each, none twice. `omit`: a folder that is not entered (the store itself)."""
    rules = _Rules(options)
    out: dict[str, Found] = {}
    for source in sources:
        if source.folder:
            for relative, in_git in _paths(source.path, options, skipped, omit):
                _consider(source, relative, in_git, rules, skipped, out)
        else:
            _consider(source, "", False, rules, skipped, out)
    files: dict[str, Found] = {}
    for file in out.values():  # sources named in different folders may be called the same
        if file.name in files:
            file = replace(file, name=_encodable(file.path))
        files[file.name] = file
    return list(files.values())


def listed(root: str, options: CorpusOptions) -> Iterator[str]:
    """The files of a folder that belong into a corpus by their names, relative to it. They are looked for as they are asked for."""
    rules = _Rules(options)
    for relative, _ in _paths(root, options, Skipped(), None):
        if rules.reason(_encodable(relative)) is None:
            yield relative


def hash_contents(files: Iterable[Found], options: CorpusOptions, skipped: Skipped) -> Contents:
    """Read plain files, none of them a container, for what they hold."""
    contents = Contents()
    for file in files:
        try:
            with open_regular(file.path) as stream:
                data = stream.read(options.max_file_size + 1)
        except OSError as error:
            skipped.add(filters.UNREADABLE, file.name, error.strerror or str(error))
            continue
        if len(data) <= options.max_file_size:
            contents.add(file, data)
    return contents


def read(file: Found, options: CorpusOptions, skipped: Skipped, contents: Contents | None = None) -> Iterator[Document]:
    """The documents of a file. A failure is counted and named, what was read before it stands. `contents`: gets what plain files hold."""
    try:
        with open_regular(file.path) as stream:
            status = os.fstat(stream.fileno())
            if file.kind is None:
                data = stream.read(options.max_file_size + 1)
                if len(data) > options.max_file_size:
                    skipped.add(filters.TOO_LARGE)
                    return
                if contents is not None:
                    contents.add(file, data)
                if (document := _document(file.name, data, status, skipped)) is not None:
                    yield document
                return
            rules = _Rules(options)
            members = containers.read_members(
                stream, file.kind, status.st_size, options.max_file_size, options.text_fields, rules.member_reason
            )
            for name, member, reason in members:
                path = _encodable(containers.member_path(file.name, name, file.kind))
                if member is None:
                    skipped.add(reason, path, reason if reason in (filters.UNREADABLE, filters.BAD_ROW) else "")
                elif (document := _document(path, member, status, skipped, code=file.kind != "jsonl")) is not None:
                    yield document
    except containers.DamagedError as error:
        skipped.add(filters.DAMAGED, file.name, str(error))
    except containers.OverLimitError as error:
        skipped.add(filters.BOMB, file.name, str(error))
    except FileNotFoundError:
        pass  # gone since it was listed
    except OSError as error:
        skipped.add(filters.UNREADABLE, file.name, error.strerror or str(error))


class _Rules:
    """The options' rules about names, compiled once."""

    def __init__(self, options: CorpusOptions) -> None:
        self.include = GitIgnoreSpec.from_lines(options.include) if options.include else None
        self.exclude = GitIgnoreSpec.from_lines(options.exclude) if options.exclude else None
        self.languages = filters.language_names(list(options.languages))
        self.max_file_size = options.max_file_size

    def excluded(self, relative: str) -> bool:
        return self.exclude is not None and self.exclude.match_file(relative)

    def reason(self, relative: str, chosen: bool = False) -> str | None:
        """Why a file is left out by its path within its source. `chosen`: the user named it, so that its type is not asked."""
        if self.excluded(relative):
            return filters.EXCLUDED
        if self.include is not None:
            if not self.include.match_file(relative):
                return filters.EXCLUDED
            chosen = True
        return filters.name_reason(relative.rpartition("/")[2], self.languages, chosen)

    def member_reason(self, name: str) -> str | None:
        if filters.SKIPPED_FOLDERS.intersection(name.split("/")[:-1]):
            return filters.IGNORED
        return self.reason(name.strip("/") or "?")


def _consider(source: Source, relative: str, in_git: bool, rules: _Rules, skipped: Skipped, out: dict[str, Found]) -> None:
    """Take one file of a source by its name and status, or count why not."""
    path = f"{source.path}/{relative}" if relative else source.path
    shown = _encodable(relative or path.rpartition("/")[2])
    kind = containers.kind_of(path)
    if kind is not None and in_git and not (rules.include is not None and rules.include.match_file(shown)):
        kind = None  # data of a repository's tests, more often than text; its type is not known to be text either
    if kind is not None:  # other patterns and languages are about its members
        reason = filters.EXCLUDED if rules.excluded(shown) else None
    else:
        reason = rules.reason(shown, chosen=not relative)
    if reason is not None:
        skipped.add(reason)
        return
    name = source.label if not relative else shown if source.label == "." else f"{source.label.rstrip('/')}/{shown}"
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return  # tracked by git and removed, or gone since it was listed
    except OSError as error:
        skipped.add(filters.UNREADABLE, name, error.strerror or str(error))
        return
    if stat.S_ISDIR(status.st_mode):
        return  # a submodule that is not checked out
    if not stat.S_ISREG(status.st_mode):
        skipped.add(filters.LINK if stat.S_ISLNK(status.st_mode) else filters.SPECIAL)
    elif kind is None and status.st_size > rules.max_file_size:
        skipped.add(filters.TOO_LARGE)
    else:
        out.setdefault(path, Found(path, name, shown, status.st_size, status.st_mtime_ns, kind))


def _paths(root: str, options: CorpusOptions, skipped: Skipped, omit: str | None) -> Iterator[tuple[str, bool]]:
    """(path of a file relative to root, whether git listed it), sorted."""
    tracked = _git_files(root, options.untracked)
    if tracked is not None:
        yield from ((path, True) for path in tracked)
        return
    yield from _walk_folder(root, "", [], options, skipped, omit)


def _walk_folder(
    root: str, folder: str, ignores: list[tuple[str, GitIgnoreSpec]], options: CorpusOptions, skipped: Skipped, omit: str | None
) -> Iterator[tuple[str, bool]]:
    """Files below a folder that no .gitignore on the way excludes. `ignores`: (folder it lies in, rules), outermost first."""
    here = f"{root}/{folder}" if folder else root
    try:
        with os.scandir(here) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in entries)
    except OSError as error:
        skipped.add(filters.UNREADABLE, _encodable(folder or root), error.strerror or str(error))
        return
    if any(name == ".gitignore" for name, _, _ in found):
        ignores = [*ignores, (folder, _read_ignores(f"{here}/.gitignore"))]
    for name, is_folder, is_link in found:
        path = f"{folder}/{name}" if folder else name
        if is_folder and name in filters.SKIPPED_FOLDERS:
            continue
        if _ignored(path, is_folder, ignores):
            skipped.add(filters.IGNORED)
        elif not is_folder:
            if is_link:
                skipped.add(filters.LINK)
            else:
                yield path, False
        elif (below := f"{here}/{name}") != omit:
            tracked = _git_files(below, options.untracked) if os.path.lexists(f"{below}/.git") else None
            if tracked is not None:
                yield from ((f"{path}/{file}", True) for file in tracked)
            else:
                yield from _walk_folder(root, path, ignores, options, skipped, omit)


def _ignored(path: str, is_folder: bool, ignores: list[tuple[str, GitIgnoreSpec]]) -> bool:
    """git's rule: the innermost .gitignore that says anything about a path decides, and within it the last pattern."""
    for folder, spec in reversed(ignores):
        inner = (path[len(folder) + 1 :] if folder else path) + "/" * is_folder
        for pattern in reversed(spec.patterns):
            if pattern.include is not None and _is_about(pattern, inner):
                return bool(pattern.include)
    return False


def _is_about(pattern: Pattern, path: str) -> bool:
    """Whether a pattern matches the path itself. pathspec's own verdict goes for all that lies in a folder, too: a later, inner file's
    `!b/` would bring back what an outer `*.py` excludes, which git does not do.
    """
    found = pattern.match_file(path)
    if found is None:
        return False
    mark = found.match.groupdict().get("ps_d")  # pathspec's name for the slash behind a folder that the pattern names
    return mark is None or found.match.end("ps_d") == len(path)


def _read_ignores(path: str) -> GitIgnoreSpec:
    try:
        with open_regular(path) as file:
            lines = file.read(MAX_FILE_SIZE).decode("utf-8", "surrogateescape").splitlines()
        return GitIgnoreSpec.from_lines(_ALL_BELOW.sub(r"/**/*\1", line) for line in lines if len(line) <= MAX_PATTERN)
    except (OSError, ValueError):  # git passes over what it cannot read, too
        return GitIgnoreSpec.from_lines([])


def _git_files(root: str, untracked: bool) -> list[str] | None:
    """Paths that git tracks below a folder and in the repositories within it, None where there is no git, no repository, or nothing
    tracked (as in an ignored folder)."""
    command = ["git", *_NO_CODE_OF_THEIRS, "-C", root, "ls-files", "-z", "--cached"]
    command += ["--others", "--exclude-standard"] if untracked else ["--recurse-submodules"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            env=environment | {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=300,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0 or not done.stdout:
        return None
    paths = {os.fsdecode(path) for path in done.stdout.split(b"\0") if path}
    if untracked:  # git lists a submodule, or another repository, as one path
        for path in [path for path in paths if os.path.lexists(f"{root}/{path}/.git")]:
            inner = path.rstrip("/")
            if not Path(root, inner).is_symlink():
                paths.remove(path)
                paths.update(f"{inner}/{file}" for file in _git_files(f"{root}/{inner}", untracked) or ())
    return sorted(paths)


def _document(path: str, data: bytes, status: os.stat_result, skipped: Skipped, *, code: bool = True) -> Document | None:
    text = filters.decode_text(data)
    if text is None:
        skipped.add(filters.BINARY if b"\0" in data else filters.NOT_UTF8)
        return None
    try:
        data = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, in a row of a .jsonl or in UTF-16
        skipped.add(filters.NOT_UTF8)
        return None
    if (reason := filters.content_reason(data, code=code)) is not None:
        skipped.add(reason)
        return None
    if (rule := secret_scan.find_secret(data, path)) is not None:
        skipped.add_secret(rule)
        return None
    mtime_ns = status.st_mtime_ns if time.time_ns() - status.st_mtime_ns > RACY_NS else -1
    return Document(path, text, status.st_size, mtime_ns, hashlib.blake2b(data, digest_size=16).digest())


@contextlib.contextmanager
def open_regular(path: str) -> Iterator[BinaryIO]:
    """A regular file for reading. Raises OSError for a link, FIFO or device in its place, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as raw:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, filters.SPECIAL)
        yield io.BufferedReader(raw)


def _encodable(path: str | os.PathLike[str]) -> str:
    """A path as text that UTF-8 can hold: bytes of a name that are not UTF-8 appear as \\xNN."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

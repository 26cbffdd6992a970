"""Which files a folder has: in a git repository those that git lists, elsewhere all that no .gitignore excludes.

A folder enters, paths relative to it leave, one at a time; what is left out is counted. Folders are entered without following links, and
git is not run: its index and its ignore rules are read. A repository that cannot be read is named and walked as a plain folder.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from . import file_filters, git_folder
from .beneath import ConfinedFolder, is_git_name
from .errors import CorpusError
from .git_folder import MAX_TEXT, GitRepository, RepositoryError
from .gitignore import IgnoreRules, TimeLimit, TooSlowError

RULES_S = 60.0  # for reading the indexes and matching the ignore rules of one source. A million files with a hundred patterns take less
MAX_NAMED = 1000
IGNORE_FILE = ".gitignore"
# A file of ignore rules, and how many bytes of a path within the repository (or plain source) its folder takes
Scope = tuple[IgnoreRules, int]
# A folder relative to the root, names of files and links in it (one at least), and whether git lists them
FolderFiles = tuple[str, list[str], bool]


@dataclass(slots=True)
class Skipped:
    """What was left out."""

    counts: Counter[str] = field(default_factory=Counter)
    named: list[tuple[str, str]] = field(default_factory=list)
    """(path, why) of what should have been readable and was not; at most MAX_NAMED."""
    secrets: Counter[str] = field(default_factory=Counter)
    """How many texts `counts` has as secrets because of what is in them, by the rule that found one."""

    def add(self, reason: str, path: str = "", why: str = "") -> None:
        self.counts[reason] += 1
        if why and len(self.named) < MAX_NAMED:
            self.named.append((path, why))

    def add_all(self, other: Skipped) -> None:
        self.counts.update(other.counts)
        self.secrets.update(other.secrets)
        self.named += other.named[: MAX_NAMED - len(self.named)]

    def add_secret(self, rule: str) -> None:
        self.add(file_filters.SECRET)
        self.secrets[rule] += 1


@dataclass(frozen=True, slots=True)
class _Walk:
    """How folders are walked: plainly, or for what a repository does not track."""

    folder: str = ""
    """The path at which the repository begins in the source."""
    within: bytes = b""
    """The path at which the source begins in the repository."""
    tracked: Mapping[str, Set[str]] = field(default_factory=dict)
    """Names of files and submodules by their folder, which are listed already."""
    parents: frozenset[str] = frozenset()
    """Folders with tracked files: to git, none of them is another repository."""
    ignore_case: bool = False
    is_plain: bool = True

    def to_repository_path(self, path: str) -> bytes:
        """Return a path of the source as the repository calls it."""
        return self.within + os.fsencode(path[len(self.folder) + 1 :] if self.folder else path)


class Listing:
    """The files of one source."""

    def __init__(self, root: str, tree: ConfinedFolder, skipped: Skipped, *, untracked: bool, omit: str | None = None) -> None:
        """`root`: absolute, links resolved; `tree`: the same, open. `untracked`: in a repository, also what git neither tracks nor ignores.
        `omit`: a folder that is not entered."""
        self._root, self._tree, self._skipped, self._untracked, self._omit = root, tree, skipped, untracked, omit
        self._limit = TimeLimit(RULES_S)
        self._users_excludes = git_folder.read_user_excludes()

    def list_files(self) -> Iterator[FolderFiles]:
        """Yield every file and link once, by folders, in no order. Raises CorpusError where indexes and ignore rules take longer than
        RULES_S."""
        try:
            yield from self._list_folder("", git_folder.find_repository(self._root), [])
        except TooSlowError:
            raise CorpusError(
                f"{self._root}: reading its git indexes and matching its ignore rules takes more than {RULES_S:g} s"
            ) from None

    def _list_folder(self, folder: str, repository: GitRepository | None, scopes: list[Scope]) -> Iterator[FolderFiles]:
        """Yield a folder's files: a repository's, or where that lists nothing (as in a folder that it ignores) those of a plain one."""
        is_listed = False
        if repository is not None:
            for found in self._list_repository(folder, repository):
                is_listed = True
                yield found
        if not is_listed:
            yield from self._walk_folder(folder, scopes, _Walk())

    def _list_repository(self, folder: str, repository: GitRepository) -> Iterator[FolderFiles]:
        """Yield what git lists below a folder: the top of a repository, or, as the source itself, any folder of it."""
        inner = "." if folder else os.path.relpath(self._root, repository.top).replace(os.sep, "/")
        within = "" if inner == "." else f"{inner}/"
        try:
            with self._limit:
                entries = repository.read_index()
                self._limit.check()
        except RepositoryError as error:
            why = f"{error}; the folder is read as if it were no repository, with files that git does not track"
            self._skipped.add(file_filters.UNREADABLE, to_encodable(f"{repository.top}/.git"), why)
            yield from self._walk_folder(folder, [], _Walk())
            return
        tracked: defaultdict[str, set[str]] = defaultdict(set)
        submodules: set[str] = set()
        for entry in entries:
            path = os.fsdecode(entry.path)
            if path.startswith(within):
                path = f"{folder}/{path[len(within) :]}" if folder else path[len(within) :]
                if entry.is_repository:
                    submodules.add(path)
                else:
                    above, _, name = path.rpartition("/")
                    tracked[above].add(name)
        yield from ((above, sorted(names), True) for above, names in tracked.items())
        for path in submodules:
            yield from self._list_submodule(path)
        if not self._untracked:
            return
        for path in submodules:
            above, _, name = path.rpartition("/")
            tracked[above].add(name)
        walk = _Walk(folder, os.fsencode(within), tracked, frozenset(_find_parents(tracked)), repository.ignores_case(), is_plain=False)
        scopes = self._scopes_above(repository, within, walk)
        if scopes is not None:
            yield from self._walk_folder(folder, scopes, walk)

    def _list_submodule(self, path: str) -> Iterator[FolderFiles]:
        """Yield what git lists in a submodule, where it is checked out."""
        try:
            is_folder = stat.S_ISDIR(self._tree.lstat(path).st_mode)
        except OSError:  # not there, or behind a link
            return
        if is_folder and (repository := git_folder.open_repository(f"{self._root}/{path}")) is not None:
            yield from self._list_repository(path, repository)

    def _scopes_above(self, repository: GitRepository, within: str, walk: _Walk) -> list[Scope] | None:
        """Return the rules about a repository's folder that do not lie in it, the user's first. None if they ignore the folder itself."""
        scopes = [
            (self._parse_rules(self._users_excludes, walk), 0),
            (self._parse_rules(repository.read_excludes(), walk), 0),
        ]
        names = within.split("/")[:-1]
        with ConfinedFolder(repository.top) as top:
            for depth in range(len(names)):
                above = "/".join(names[:depth])
                scopes.append((self._parse_rules(_read_ignores(top, above), walk), len(os.fsencode(above)) + bool(above)))
                with self._limit:
                    if _is_ignored(scopes, os.fsencode("/".join(names[: depth + 1])), True):
                        return None
        return scopes

    def _walk_folder(self, folder: str, scopes: list[Scope], walk: _Walk) -> Iterator[FolderFiles]:
        """Yield files below a folder of the source, not those that rules exclude. `scopes`: the rules of what is above, outermost first."""
        pending = [(folder, scopes)]
        while pending:
            here, scopes = pending.pop()
            try:
                found = self._tree.list_folder(here)
            except OSError as error:
                self._skipped.add(file_filters.UNREADABLE, to_encodable(here or self._root), error.strerror or str(error))
                continue
            if (IGNORE_FILE, stat.S_IFREG) in found:
                place = walk.to_repository_path(here) if here else walk.within.rstrip(b"/")
                scopes = [*scopes, (self._parse_rules(_read_ignores(self._tree, here), walk), len(place) + bool(place))]
            names: list[str] = []
            folders: list[tuple[str, list[Scope]]] = []
            for name, kind in self._not_ignored(here, found, scopes, walk):
                if kind != stat.S_IFDIR:
                    names.append(name)
                    continue
                path = f"{here}/{name}" if here else name
                if (absolute := f"{self._root}/{path}") != self._omit:
                    repository = None if path in walk.parents else git_folder.open_repository(absolute)
                    if repository is None:
                        folders.append((path, scopes))
                    elif walk.is_plain:
                        yield from self._list_folder(path, repository, scopes)
                    else:
                        yield from self._list_repository(path, repository)
            if names:
                yield here, names, not walk.is_plain
            pending += reversed(folders)

    def _not_ignored(self, here: str, found: Sequence[tuple[str, int]], scopes: list[Scope], walk: _Walk) -> list[tuple[str, int]]:
        """Return name and type of a folder's entries that belong to the walk."""
        kept = []
        scopes = [scope for scope in scopes if scope[0]]
        tracked = walk.tracked.get(here, frozenset())
        with self._limit:
            for name, kind in found:
                is_folder = kind == stat.S_IFDIR
                if is_git_name(name) or name in tracked or (walk.is_plain and is_folder and name in file_filters.SKIPPED_FOLDERS):
                    continue
                if scopes:
                    self._limit.check()
                    if _is_ignored(scopes, walk.to_repository_path(f"{here}/{name}" if here else name), is_folder):
                        self._skipped.add(file_filters.IGNORED)
                        continue
                if kind == stat.S_IFLNK and walk.is_plain:
                    self._skipped.add(file_filters.LINK)
                else:
                    kept.append((name, kind))
        return kept

    def _parse_rules(self, data: bytes, walk: _Walk) -> IgnoreRules:
        return IgnoreRules(data, self._limit, ignore_case=walk.ignore_case)


def _is_ignored(scopes: Sequence[Scope], path: bytes, is_folder: bool) -> bool:
    """Return git's rule: the innermost file that says anything about a path decides."""
    for rules, skip in reversed(scopes):
        verdict = rules.match_path(path[skip:], is_folder)
        if verdict is not None:
            return verdict
    return False


def _read_ignores(tree: ConfinedFolder, folder: str) -> bytes:
    try:
        with tree.open(f"{folder}/{IGNORE_FILE}" if folder else IGNORE_FILE) as file:
            return file.read(MAX_TEXT)
    except OSError:  # git passes over what it cannot read, too
        return b""


def _find_parents(folders: Iterable[str]) -> set[str]:
    """Return folders and those that they lie in, without the root."""
    found: set[str] = set()
    for path in folders:
        while path and path not in found:
            found.add(path)
            path = path.rpartition("/")[0]
    return found


def to_encodable(path: str | os.PathLike[str]) -> str:
    """Return a path as text that UTF-8 can hold: bytes of a name that are not UTF-8 appear as \\xNN."""
    text = os.fspath(path)
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")

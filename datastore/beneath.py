"""Reading files of a tree that is not trusted: every component of a path is opened without following links.

A folder and a path relative to it enter; an open regular file, its bytes, its status or a folder's entries leave, or an OSError that says
what is in the way. Nothing outside the folder is ever opened, also while somebody exchanges components for links: each is opened relative
to the descriptor of the one before (`openat` with O_NOFOLLOW). Windows has no such call; there each component is checked before it is
passed. The module knows nothing of git or of what is read.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

MAX_PATH = 4096  # bytes of a relative path; Linux's PATH_MAX
MAX_DEPTH = 128  # components of a relative path. One descriptor is kept open for each, and macOS allows a process 256 by default
OUTSIDE_NAMES = "a component of its path is empty, '.', '..', '.git', or not a name on this system"
THROUGH_LINK = "its path leads through a link"
NOT_REGULAR = "not a regular file"
# A name that has no place in a tree, or may have none, among names between line feeds
_MAYBE_OUTSIDE = re.compile(r"\n\n|\0|[/\\:*?\"<>|]|\n\.\.?\n|\n(?:\.git|git~1)[ .]*\n", re.IGNORECASE)
_BY_DESCRIPTOR = os.open in os.supports_dir_fd and hasattr(os, "O_NOFOLLOW") and hasattr(os, "O_DIRECTORY")
_FILE = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))
# O_PATH passes a folder that may be entered but not listed, as any program can
_FOLDER = sum(getattr(os, name, 0) for name in ("O_PATH", "O_CLOEXEC", "O_NOFOLLOW", "O_DIRECTORY"))


@contextlib.contextmanager
def open_beneath(root: str | os.PathLike[str], relative: str, *, in_git: bool = False) -> Iterator[BinaryIO]:
    """Open one regular file for reading. See `ConfinedFolder`."""
    with ConfinedFolder(root, in_git=in_git) as tree, tree.open(relative) as file:
        yield file


def read_beneath(root: str | os.PathLike[str], relative: str, max_size: int, *, in_git: bool = False) -> bytes:
    """Return the bytes of one regular file. Raises OSError (EFBIG) for one of more than `max_size` bytes. See `ConfinedFolder`."""
    with open_beneath(root, relative, in_git=in_git) as file:
        data = file.read(max_size + 1)
    if len(data) > max_size:
        raise OSError(errno.EFBIG, f"larger than {max_size:,} bytes", relative)
    return data


class ConfinedFolder:
    """A folder whose files are read without leaving it.

    Paths are relative to it and separated by `/`. Folders on the way stay open for the next path: neighbours are cheap. Every method raises
    OSError: EINVAL for a path that has no place in a tree (absolute, longer than MAX_PATH, deeper than MAX_DEPTH, with an empty, `.`, `..`
    or, unless `in_git`, `.git` component) and for what is not a regular file, ELOOP where a link is in the way. For one thread.
    """

    def __init__(self, root: str | os.PathLike[str], *, in_git: bool = False) -> None:
        """Open the folder. Links on the way to it are followed, the folder itself must not be one."""
        path = os.fspath(root)
        path = path.rstrip("/") or "/"  # with a slash at its end a link would be followed
        self._in_git = in_git
        self._names: list[str] = []
        self._entered: str | None = None  # the folder of the path before, while its descriptor is open
        self._folders: list[int | str] = [path if not _BY_DESCRIPTOR else _open_folder(path, None)]
        if not _BY_DESCRIPTOR:
            _check_component(path, folder=True)

    def __enter__(self) -> ConfinedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folders; it may be called again."""
        self._entered = None
        self._leave_folders(0)
        for folder in self._folders:
            _close_folder(folder)
        self._folders.clear()

    @contextlib.contextmanager
    def open(self, relative: str) -> Iterator[BinaryIO]:
        """Open a regular file for reading, without waiting for a FIFO or device in its place."""
        parent, name = self._enter_parent(relative)
        if isinstance(parent, str):
            _check_component(path := f"{parent}/{name}", folder=False)
            descriptor = os.open(path, _FILE)
        else:
            try:
                descriptor = os.open(name, _FILE, dir_fd=parent)
            except OSError as error:
                raise _explain_error(error, name, parent) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, NOT_REGULAR, relative)
        with os.fdopen(descriptor, "rb", buffering=0) as raw:
            yield io.BufferedReader(raw)

    def lstat(self, relative: str) -> os.stat_result:
        """Return the status of a file, folder or link. `""` stands for the folder itself."""
        if not relative:
            folder = self._enter_folders([])
            return os.lstat(folder) if isinstance(folder, str) else os.fstat(folder)
        parent, name = self._enter_parent(relative)
        return _lstat_in(parent, name)

    def lstat_files(self, folder: str, names: Sequence[str]) -> list[os.stat_result | OSError]:
        """Return what `lstat` returns or raises for each of some names in one folder, which is entered once."""
        try:
            parent = self._enter_folders(split_path(folder, in_git=self._in_git) if folder else [])
        except OSError as error:
            return [error] * len(names)
        found: list[os.stat_result | OSError] = []
        is_long = len(self._names) >= MAX_DEPTH or 4 * (len(folder) + 1 + max(map(len, names), default=0)) > MAX_PATH
        is_doubtful = is_long or _MAYBE_OUTSIDE.search("\n".join(("", *names, ""))) is not None
        for name in names:
            try:
                if is_doubtful:
                    split_path(f"{folder}/{name}" if folder else name, in_git=self._in_git)  # says what is wrong with it
                found.append(_lstat_in(parent, name))
            except OSError as error:
                found.append(error)
        return found

    def list_folder(self, relative: str = "") -> list[tuple[str, int]]:
        """Return name and type (S_IFREG, S_IFDIR, S_IFLNK, or 0) of a folder's entries, by name. `""` stands for the folder itself."""
        folder = self._enter_folders(split_path(relative, in_git=self._in_git) if relative else [])
        if isinstance(folder, str):
            with os.scandir(folder) as entries:
                return sorted((entry.name, _type_of(entry)) for entry in entries)
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            with os.scandir(readable) as entries:
                return sorted((entry.name, _type_of(entry)) for entry in entries)
        finally:
            os.close(readable)

    def _enter_parent(self, relative: str) -> tuple[int | str, str]:
        """Return the open folder that a path's last component lies in, and that component. A million neighbours are checked one by one, but
        not the folders that they have in common."""
        above, slash, name = relative.rpartition("/")
        if above == self._entered and bool(above) == bool(slash) and 4 * len(relative) <= MAX_PATH and _has_place(name, self._in_git):
            return self._folders[-1], name
        *folders, name = split_path(relative, in_git=self._in_git)
        parent = self._enter_folders(folders)
        self._entered = above
        return parent, name

    def _enter_folders(self, names: list[str]) -> int | str:
        """Return the open folder at a path. Those of the path before that are on the way are used again."""
        self._entered = None
        if not self._folders:
            raise ValueError("the tree is closed")
        common = 0
        for mine, wanted in zip(self._names, names, strict=False):
            if mine != wanted:
                break
            common += 1
        self._leave_folders(common)
        for name in names[common:]:
            parent = self._folders[-1]
            if isinstance(parent, str):
                _check_component(path := f"{parent}/{name}", folder=True)
                self._folders.append(path)
            else:
                self._folders.append(_open_folder(name, parent))
            self._names.append(name)
        return self._folders[-1]

    def _leave_folders(self, keep: int) -> None:
        while len(self._names) > keep:
            self._names.pop()
            _close_folder(self._folders.pop())


def split_path(relative: str, *, in_git: bool = False) -> list[str]:
    """Return the components of a relative path. Raises OSError (EINVAL) for one that has no place in a tree."""
    names = relative.split("/")
    if len(names) > MAX_DEPTH or len(os.fsencode(relative)) > MAX_PATH:
        raise OSError(errno.EINVAL, f"its path has more than {MAX_PATH} bytes or {MAX_DEPTH} components", relative[:MAX_PATH])
    if not all(_has_place(name, in_git) for name in names):
        raise OSError(errno.EINVAL, OUTSIDE_NAMES, relative)
    return names


def _has_place(name: str, in_git: bool) -> bool:
    """Return whether a component may lie in a tree."""
    return not (
        name in ("", ".", "..")
        or "\0" in name
        or (not in_git and is_git_name(name))
        or (sys.platform == "win32" and set(name) & set('\\:*?"<>|'))
    )


def is_git_name(name: str) -> bool:
    """Return whether a component is `.git`, as file systems that ignore case or shorten names (`GIT~1`) read it."""
    return name[:1] in ".gG" and name.lower().rstrip(" .") in (".git", "git~1")


def _open_folder(name: str, parent: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        raise _explain_error(error, name, parent) from None


def _explain_error(error: OSError, name: str, parent: int | None) -> OSError:
    """Return the error of opening a component without following links: systems disagree on a link there (ELOOP, ENOTDIR, EMLINK)."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EMLINK):
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                return OSError(errno.ELOOP, THROUGH_LINK, name)
    elif error.errno == errno.ENXIO:  # a socket
        return OSError(errno.EINVAL, NOT_REGULAR, name)
    return error


def _check_component(path: str, *, folder: bool) -> None:
    """Check a component before it is passed, on a system that cannot open components relative to each other."""
    status = os.lstat(path)
    reparse = getattr(status, "st_file_attributes", 0) & getattr(stat, "FILE_ATTRIBUTE_REPARSE_POINT", 0)
    if stat.S_ISLNK(status.st_mode) or reparse:
        raise OSError(errno.ELOOP, THROUGH_LINK, path)
    if folder and not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)


def _lstat_in(folder: int | str, name: str) -> os.stat_result:
    return os.lstat(f"{folder}/{name}") if isinstance(folder, str) else os.stat(name, dir_fd=folder, follow_symlinks=False)


def _type_of(entry: os.DirEntry[str]) -> int:
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFLNK if entry.is_symlink() else 0


def _close_folder(folder: int | str) -> None:
    if not isinstance(folder, str):
        os.close(folder)

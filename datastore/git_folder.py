"""Repositories as git finds them, read without git: no command that they name can be run, and no lock is taken.

A folder enters; the repository that it belongs to, the paths that it tracks and its ignore rules other than `.gitignore` leave. Of a
repository's configuration only four settings have an effect (`core.worktree`, `core.bare`, `core.ignoreCase`, `extensions.objectFormat`),
and no file that it names is opened. Raises RepositoryError for a repository that cannot be read.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from .beneath import read_beneath
from .git_index import MAX_INDEX, SIZES, IndexEntry, IndexFormatError, read_entries

MAX_TEXT = 1 << 20  # bytes of a configuration, of a file of patterns, or of a `.git` file, as in git
_BLANKS = " \t\r"  # of a configuration: others, such as a no-break space, belong to a value
_ID = re.compile(rb"[0-9a-f]{40}([0-9a-f]{24})?\s*")


class RepositoryError(Exception):
    """A repository that cannot be read, with the reason."""


@dataclass(frozen=True, slots=True)
class GitRepository:
    """A repository with a working tree."""

    top: str
    """The top of its working tree."""
    folder: str
    """Its own: `.git`, or what a `.git` file names, as for submodules and linked working trees. Links resolved."""
    common: str
    """The one that it shares with its linked working trees."""

    def read_index(self) -> list[IndexEntry]:
        """Return what it tracks; nothing before the first `git add`. Raises RepositoryError."""
        settings = self._read_settings()
        algorithm = settings.get("extensions.objectformat", "sha1").lower()
        if algorithm not in SIZES:
            raise RepositoryError(f"its object format {algorithm!r} is not known")
        if self.folder == self.common:  # both are about the main working tree, not about linked ones
            if _is_true(settings.get("core.bare", "")):
                raise RepositoryError("its configuration says that it has no working tree (core.bare)")
            named = settings.get("core.worktree", self.top)
            if "\0" in named or os.path.realpath(Path(self.folder, named)) != self.top:
                raise RepositoryError(f"its configuration says that its working tree is elsewhere (core.worktree = {named!r})")
        try:
            data = read_beneath(self.folder, "index", MAX_INDEX)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RepositoryError(f"its index cannot be read: {error.strerror or error}") from error
        try:
            return read_entries(data, algorithm, lambda shared: read_beneath(self.folder, f"sharedindex.{shared}", MAX_INDEX))
        except IndexFormatError as error:
            raise RepositoryError(f"its index is damaged: {error}") from error
        except OSError as error:
            raise RepositoryError(f"its shared index cannot be read: {error.strerror or error}") from error

    def ignores_case(self) -> bool:
        """Return whether its patterns match letters of either case, as where the file system does."""
        return _is_true(self._read_settings().get("core.ignorecase", ""))

    def read_excludes(self) -> bytes:
        """Return its own ignore rules, which are not part of the tree."""
        return _read_or_empty(self.common, "info/exclude")

    def _read_settings(self) -> dict[str, str]:
        settings = parse_settings(_read_or_empty(self.common, "config"))
        if _is_true(settings.get("extensions.worktreeconfig", "")):
            settings |= parse_settings(_read_or_empty(self.folder, "config.worktree"))
        return settings


def find_repository(folder: str) -> GitRepository | None:
    """Return the repository whose working tree a folder (absolute, links resolved) belongs to: its own, or that of a folder above it."""
    for top in (folder, *map(str, Path(folder).parents)):
        if (found := open_repository(top)) is not None:
            return found
    return None


def open_repository(top: str) -> GitRepository | None:
    """Return the repository whose working tree begins at a folder, or None: it has a `.git` that git would take for one."""
    try:
        mode = os.stat(f"{top}/.git").st_mode  # noqa: PTH116 - asked of every folder, and few have one: a Path takes longer than the call
        if stat.S_ISREG(mode):
            text = read_beneath(top, ".git", MAX_TEXT, in_git=True)
            if not text.startswith(b"gitdir: "):
                return None
            place = Path(top, os.fsdecode(text[8:].rstrip(b"\r\n")))
        elif stat.S_ISDIR(mode):
            place = Path(top, ".git")
        else:
            return None
        folder = os.path.realpath(place)
        if not Path(folder, "HEAD").is_symlink() and not _is_head(read_beneath(folder, "HEAD", MAX_TEXT)):
            return None
        common = _read_or_empty(folder, "commondir").rstrip(b"\r\n")
        shared = os.path.realpath(Path(folder, os.fsdecode(common)))
    except (OSError, ValueError):  # ValueError: a zero byte in a path
        return None
    return GitRepository(top, folder, shared) if all(Path(shared, name).is_dir() for name in ("objects", "refs")) else None


def read_user_excludes() -> bytes:
    """Return the ignore rules that the user has for all repositories: what the user's own configuration names, by default git/ignore in
    $XDG_CONFIG_HOME."""
    try:
        home = Path.home()
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "git"
        named = str(folder / "ignore")
        for path in (Path("/etc/gitconfig"), folder / "config", home / ".gitconfig"):
            named = parse_settings(_read_users(path)).get("core.excludesfile", named)
        return _read_users(home / Path(named).expanduser())
    except (RuntimeError, ValueError):  # nobody's home, or a zero byte
        return b""


def parse_settings(data: bytes) -> dict[str, str]:
    """Parse a configuration of git's -> values by `section.name`, both in small letters, the last of several.

    Sections with a second name and includes are left out. A name without a value is "true".
    """
    settings: dict[str, str] = {}
    section: str | None = None
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape").replace("\r\n", "\n")
    for line in re.sub(r"(\\.)|\\\n", r"\1", text).split("\n"):
        line = line.strip(_BLANKS)
        if match := re.match(r"\[([\w.-]+)\s*(\".*?\")?\s*\]\s*", line, re.ASCII):
            section = None if match[2] else match[1].lower()
            line = line[match.end() :]
        if section is not None and (match := re.match(r"([A-Za-z][\w-]*)\s*(?:=[ \t\r]*(.*)|[#;].*)?$", line, re.ASCII)):
            settings[f"{section}.{match[1].lower()}"] = "true" if match[2] is None else _parse_value(match[2])
    return settings


def _parse_value(text: str) -> str:
    """Return a value without its quotes, escapes and comment, and without the blanks at its end that are neither quoted nor escaped."""
    value, quoted, length = "", False, 0
    for match in re.finditer(r"\\(.)|(.)", text):
        escaped, plain = match.groups()
        if escaped is not None:
            value += {"n": "\n", "t": "\t", "b": "\b"}.get(escaped, escaped)
        elif plain == '"':
            quoted = not quoted
        elif plain in "#;" and not quoted:
            break
        else:
            value += plain
        if quoted or escaped is not None or plain not in _BLANKS:
            length = len(value)
    return value[:length]


def _is_true(value: str) -> bool:
    return value.lower() in ("true", "yes", "on") or bool(re.fullmatch(r"[+-]?0*[1-9]\d*[kmg]?", value.lower()))


def _is_head(data: bytes) -> bool:
    return data.startswith(b"ref:") or _ID.fullmatch(data) is not None


def _read_or_empty(folder: str, name: str) -> bytes:
    try:
        return read_beneath(folder, name, MAX_TEXT)
    except OSError:  # git passes over what it cannot read, too
        return b""


def _read_users(path: Path) -> bytes:
    """Return a file of the user's, wherever a link of theirs leads."""
    real = path.resolve()
    return _read_or_empty(str(real.parent), real.name)

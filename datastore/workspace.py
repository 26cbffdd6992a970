"""What a working tree's store is: where it lies, which files belong into it, the packages that the tree's own environment holds, and
which stores are nobody's any more.

Paths enter; folders of a cache, options of a corpus and counts leave. Nothing is built here, nothing of a tree is run, and nothing that
lies outside it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from . import corpus
from .beneath import Beneath
from .commit import writing
from .corpus import CorpusError, CorpusOptions
from .errors import DatastoreError
from .format import FORMAT, read_manifest
from .update import sources_in

MAX_FILES = 100_000
"""Of a tree, unless its user says otherwise: a home directory that was given by mistake has more."""
COUNT_S = 5.0
"""For counting on beyond the limit, so that the message says how far it is off."""
GONE_DAYS = 30
"""A store is kept for so long after its tree was found to be gone (it may be on a disk that is not there today), or its packages used."""
MAX_INSTALLED = 300_000
"""Files of text in an environment. One with the largest packages there are has 40,000."""
PACKAGES = CorpusOptions(languages=("python",), exclude=("*.zip", "*.whl", "*.tar.gz", "*.tgz", "*.jsonl", "*.jsonl.gz"))
"""What is taken of packages: files, and nothing out of archives."""
_DEPENDENCIES = (".venv/", "node_modules/", "__pycache__/")


@dataclass(frozen=True, slots=True)
class Kept:
    """A store that is to be there and to be kept up to date."""

    paths: tuple[str, ...]
    """Folders, absolute."""
    store: str
    """Its folder."""
    options: CorpusOptions
    follow: bool = True
    """Its files change, and it follows them. False: it is complete once it is there."""
    contents: str = ""
    """The digest that the contents of its files have (see `corpus.Contents`), for a store that several trees share; "": any."""
    max_files: int | None = None
    """Files of text that a folder may have."""


def tree(path: str, cache: Path, fingerprint: str, max_files: int = MAX_FILES) -> Kept:
    """The store of a working tree for a tokenizer: one per tree, tokenizer and version of the format. `path`: absolute, links resolved.

    Files that git does not track yet are taken too, unless it ignores them: what is being written is what a completion repeats.
    """
    folder = f"{Path(path).name or 'root'}-{_digest(path, fingerprint)[:16]}"
    return Kept((path,), str(cache / "trees" / folder), options_of(path), max_files=max_files)


def options_of(path: str) -> CorpusOptions:
    """What is taken of a working tree: without dependencies, whatever its .gitignore forgot."""
    found = sorted(each.parent.name for each in Path(path).glob("*/pyvenv.cfg") if re.fullmatch(r"[\w.-]+", each.parent.name))
    return CorpusOptions(untracked=True, exclude=(*_DEPENDENCIES, *(f"/{name}/" for name in found)))


def count_files(path: str, most: int) -> tuple[int, bool]:
    """Files of a working tree that belong into its store by their names, and whether that is all: beyond `most` it counts for COUNT_S."""
    n_files, deadline = 0, time.monotonic() + COUNT_S
    for n_files, _ in enumerate(corpus.listed(path, options_of(path)), 1):
        if n_files > most and time.monotonic() > deadline:
            return n_files, False
    return n_files, True


def check_size(path: str, most: int) -> int:
    """The number of a tree's files. Raises CorpusError where there are more than `most`."""
    n_files, is_all = count_files(path, most)
    if n_files > most:
        raise CorpusError(
            f"{path} holds {'' if is_all else 'more than '}{n_files:,} files of text, a tree may have {most:,}; "
            "name a folder within it, or allow more with --max-repo-files"
        )
    return n_files


# ------------------------------------------------------------------ stores that nobody uses


def clear(cache: Path) -> list[str]:
    """Delete the stores of trees that are gone, and were GONE_DAYS ago, and of packages that no tree had since: a file beside a store tells
    since when. Returns what was done, in words. What another process writes, or is no store, stays."""
    said = []
    for store in _folders(cache / "trees"):
        mark = store.with_name(f"{store.name}.gone")
        try:
            paths = [source.path for source in sources_in(read_manifest(store))]
            if not paths or not all(map(_is_gone, paths)):
                mark.unlink(missing_ok=True)
            elif not mark.exists():
                mark.touch()
                said.append(f"{paths[0]} is gone; its datastore {store} is deleted if it is not back in {GONE_DAYS} days")
            elif _is_old(mark):
                _delete(store, mark)
                said.append(f"{paths[0]} has been gone for {GONE_DAYS} days; its datastore {store} is deleted")
        except (DatastoreError, OSError):
            continue
    for store in _folders(cache / "packages"):
        mark = _mark_of_use(store)
        with contextlib.suppress(DatastoreError, OSError):
            read_manifest(store)
            if not mark.exists():
                mark.touch()
            elif _is_old(mark):
                _delete(store, mark)
                said.append(f"the packages' datastore {store} was not used for {GONE_DAYS} days and is deleted")
    return said


def mark_used(kept: Kept) -> None:
    """Have `clear` leave a store of packages alone for GONE_DAYS from now."""
    mark = _mark_of_use(Path(kept.store))
    with contextlib.suppress(OSError):
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch()


def _mark_of_use(store: Path) -> Path:
    return store.with_name(f"{store.name}.used")


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if path.is_dir() and not path.is_symlink())


def _is_old(mark: Path) -> bool:
    return time.time() - mark.stat().st_mtime > GONE_DAYS * 86_400


def _delete(store: Path, mark: Path) -> None:
    with writing(store):
        shutil.rmtree(store)
    mark.unlink()


def _is_gone(path: str) -> bool:
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it cannot be told
        pass
    return False


# ------------------------------------------------------------------ packages


def installed(path: str, cache: Path, fingerprint: str) -> Kept | None:
    """The store of the packages in a tree's own environment: one for all trees whose packages' files are alike, name by name and byte by
    byte. What metadata say of them (RECORD, versions) is not asked, for a tree may say anything.

    Reads all files of the packages. None where there is no environment beneath the tree, or no text in it. Raises CorpusError for more
    than MAX_INSTALLED files.
    """
    folders = [] if (environment := environment_of(Path(path))) is None else site_packages(Path(path), environment)
    skipped = corpus.Skipped()
    files = corpus.find(corpus.sources_of(folders), PACKAGES, skipped)
    if len(files) > MAX_INSTALLED:
        raise CorpusError(f"{environment} holds {len(files):,} files of text; at most {MAX_INSTALLED:,} are read")
    contents = corpus.hash_contents(files, PACKAGES, skipped)
    if not contents.n_files:
        return None
    folder = f"packages-{_digest(contents.digest(), str(corpus.RULES), repr(PACKAGES), fingerprint)[:32]}"
    return Kept(tuple(map(str, folders)), str(cache / "packages" / folder), PACKAGES, follow=False, contents=contents.digest())


def environment_of(path: Path) -> Path | None:
    """The virtual environment of a tree: .venv, venv, or the one that its pyproject.toml names to type checkers. It lies beneath the tree,
    and no link leads to it: a tree may link to, or name, what is not its own.
    """
    try:
        with Beneath(path) as tree:
            for folder in (".venv", "venv", *_named_in(tree)):
                if _type_in(tree, f"{folder}/pyvenv.cfg") == stat.S_IFREG or _type_in(tree, f"{folder}/conda-meta") == stat.S_IFDIR:
                    return path / folder
    except OSError:
        pass
    return None


def _named_in(tree: Beneath) -> list[str]:
    """`venvPath` and `venv` of Pyright's settings, relative to the tree."""
    try:
        with tree.open("pyproject.toml") as file:
            text = file.read(corpus.MAX_FILE_SIZE + 1)
        if len(text) > corpus.MAX_FILE_SIZE:
            return []
        tools = tomllib.loads(text.decode()).get("tool", {})
        settings = [tools[name] for name in ("pyright", "basedpyright") if name in tools]
        return [os.path.normpath(f"{each.get('venvPath', '.')}/{each['venv']}") for each in settings if "venv" in each]
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # not there, or not what it should be
        return []


def _type_in(tree: Beneath, relative: str) -> int:
    """What stands at a path of the tree, as `stat.S_IFMT` has it; 0 where it cannot be told without following a link."""
    try:
        return stat.S_IFMT(tree.lstat(relative).st_mode)
    except OSError:
        return 0


def site_packages(path: Path, environment: Path) -> list[Path]:
    """Where an environment of a tree has its packages, no links followed."""
    found = []
    try:
        with Beneath(path) as tree:
            inner = environment.relative_to(path).as_posix()
            for lib in _folders_in(tree, inner, r"lib\w*|Lib"):
                for place in (lib, *_folders_in(tree, lib, r"(?:python|pypy)3[\w.]*")):
                    found += _folders_in(tree, place, "site-packages")
    except OSError:
        pass
    return [path / each for each in sorted(found)]


def _folders_in(tree: Beneath, folder: str, names: str) -> list[str]:
    try:
        entries = tree.list_folder(folder)
    except OSError:
        return []
    return [f"{folder}/{name}" for name, kind in entries if kind == stat.S_IFDIR and re.fullmatch(names, name)]


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()

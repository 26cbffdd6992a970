"""Stores of workspaces: where they lie, which files and packages belong into them, and which stores nobody uses any more.

Paths enter; folders of a cache, options of a corpus and counts leave. Nothing is built here, nothing of a workspace is run, and nothing
that lies outside it is read.
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
from .beneath import ConfinedFolder
from .commit import lock_for_writing
from .corpus import CorpusError, CorpusOptions
from .errors import DatastoreError
from .format import FORMAT
from .manifest import read_manifest
from .update import parse_sources

MAX_FILES = 100_000  # of a tree, unless its user says otherwise: a home directory that was given by mistake has more
COUNT_S = 5.0  # for counting on beyond the limit, so that the message says how far it is off
# A store is kept for so long after its tree was found to be gone (it may be on a disk that is not there today), or its packages used
GONE_DAYS = 30
MAX_INSTALLED = 300_000  # files of text in an environment. One with the largest packages there are has 40,000
# What is taken of packages: files, and nothing out of archives
PACKAGES = CorpusOptions(languages=("python",), exclude=("*.zip", "*.whl", "*.tar.gz", "*.tgz", "*.jsonl", "*.jsonl.gz"))
_DEPENDENCIES = (".venv/", "node_modules/", "__pycache__/")


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store that is to be there and to be kept up to date."""

    paths: tuple[str, ...]
    """Folders, absolute."""
    folder: str
    """The store's folder."""
    options: CorpusOptions
    follow: bool = True
    """Its files change, and it follows them. False: it is complete once it is there."""
    contents: str = ""
    """The digest that the contents of its files have (see `corpus.ContentHashes`), for a store that several trees share; "": any."""
    max_files: int | None = None
    """Files of text that a folder may have."""


def describe_workspace(path: str, cache: Path, fingerprint: str, max_files: int = MAX_FILES) -> StoreSpec:
    """Return the store of a workspace: one per working tree, tokenizer and version of the format. `path`: absolute, links resolved.

    Files that git does not track yet are taken too, unless it ignores them: what is being written is what a completion repeats.
    """
    folder = f"{Path(path).name or 'root'}-{_hash_parts(path, fingerprint)[:16]}"
    return StoreSpec((path,), str(cache / "trees" / folder), get_workspace_options(path), max_files=max_files)


def get_workspace_options(path: str) -> CorpusOptions:
    """Return what is taken of a working tree: without dependencies, whatever its .gitignore forgot."""
    found = sorted(each.parent.name for each in Path(path).glob("*/pyvenv.cfg") if re.fullmatch(r"[\w.-]+", each.parent.name))
    return CorpusOptions(untracked=True, exclude=(*_DEPENDENCIES, *(f"/{name}/" for name in found)))


def count_files(path: str, most: int) -> tuple[int, bool]:
    """Count the files that belong into a workspace's store by their names -> (count, is it all): beyond `most` it goes on for COUNT_S."""
    n_files, deadline = 0, time.monotonic() + COUNT_S
    for n_files, _ in enumerate(corpus.list_names(path, get_workspace_options(path)), 1):
        if n_files > most and time.monotonic() > deadline:
            return n_files, False
    return n_files, True


def check_size(path: str, most: int) -> int:
    """Return the number of a workspace's files. Raises CorpusError for more than `most`."""
    n_files, is_all = count_files(path, most)
    if n_files > most:
        raise CorpusError(
            f"{path} holds {'' if is_all else 'more than '}{n_files:,} files of text, a tree may have {most:,}; "
            "name a folder within it, or allow more with --max-repo-files"
        )
    return n_files


# ------------------------------------------------------------------ stores that nobody uses


def delete_unused_stores(cache: Path) -> list[str]:
    """Delete the stores of workspaces that have been gone for GONE_DAYS, and of packages that were not used for as long.

    The time stamp of a file beside a store says since when. Returns what was done, in words. What another process writes, or is no store,
    stays.
    """
    said = []
    for store in _list_folders(cache / "trees"):
        mark = store.with_name(f"{store.name}.gone")
        try:
            paths = [source.path for source in parse_sources(read_manifest(store))]
            if not paths or not all(map(_is_gone, paths)):
                mark.unlink(missing_ok=True)
            elif not mark.exists():
                mark.touch()
                said.append(f"{paths[0]} is gone; its datastore {store} is deleted if it is not back in {GONE_DAYS} days")
            elif _is_old(mark):
                _delete_store(store, mark)
                said.append(f"{paths[0]} has been gone for {GONE_DAYS} days; its datastore {store} is deleted")
        except (DatastoreError, OSError):
            continue
    for store in _list_folders(cache / "packages"):
        mark = _get_used_mark(store)
        with contextlib.suppress(DatastoreError, OSError):
            read_manifest(store)
            if not mark.exists():
                mark.touch()
            elif _is_old(mark):
                _delete_store(store, mark)
                said.append(f"the packages' datastore {store} was not used for {GONE_DAYS} days and is deleted")
    return said


def mark_used(spec: StoreSpec) -> None:
    """Have `delete_unused_stores` leave a store of packages alone for GONE_DAYS from now."""
    mark = _get_used_mark(Path(spec.folder))
    with contextlib.suppress(OSError):
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch()


def _get_used_mark(store: Path) -> Path:
    return store.with_name(f"{store.name}.used")


def _list_folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if path.is_dir() and not path.is_symlink())


def _is_old(mark: Path) -> bool:
    return time.time() - mark.stat().st_mtime > GONE_DAYS * 86_400


def _delete_store(store: Path, mark: Path) -> None:
    with lock_for_writing(store):
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


def describe_packages(path: str, cache: Path, fingerprint: str) -> StoreSpec | None:
    """Return the store of the packages in a workspace's own environment, one for all whose packages' files are alike, byte by byte.

    What metadata say of them (RECORD, versions) is not asked, for a tree may say anything.
    Reads all files of the packages. None if there is no environment beneath the tree, or no text in it. Raises CorpusError for more
    than MAX_INSTALLED files.
    """
    folders = [] if (environment := find_environment(Path(path))) is None else find_site_packages(Path(path), environment)
    skipped = corpus.Skipped()
    files = corpus.find_files(corpus.resolve_sources(folders), PACKAGES, skipped)
    if len(files) > MAX_INSTALLED:
        raise CorpusError(f"{environment} holds {len(files):,} files of text; at most {MAX_INSTALLED:,} are read")
    hashes = corpus.hash_files(files, PACKAGES, skipped)
    if not hashes.n_files:
        return None
    folder = f"packages-{_hash_parts(hashes.compute_digest(), str(corpus.RULES), repr(PACKAGES), fingerprint)[:32]}"
    return StoreSpec(tuple(map(str, folders)), str(cache / "packages" / folder), PACKAGES, follow=False, contents=hashes.compute_digest())


def find_environment(path: Path) -> Path | None:
    """Return the virtual environment of a workspace: .venv, venv, or the one that its pyproject.toml names to type checkers.

    It lies beneath the tree, and no link leads to it: a tree may link to, or name, what is not its own.
    """
    try:
        with ConfinedFolder(path) as tree:
            for folder in (".venv", "venv", *_read_named_environments(tree)):
                if _get_type(tree, f"{folder}/pyvenv.cfg") == stat.S_IFREG or _get_type(tree, f"{folder}/conda-meta") == stat.S_IFDIR:
                    return path / folder
    except OSError:
        pass
    return None


def _read_named_environments(tree: ConfinedFolder) -> list[str]:
    """Return `venvPath` and `venv` of Pyright's settings, relative to the tree."""
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


def _get_type(tree: ConfinedFolder, relative: str) -> int:
    """Return what stands at a path of the tree, as `stat.S_IFMT` has it; 0 where it cannot be told without following a link."""
    try:
        return stat.S_IFMT(tree.lstat(relative).st_mode)
    except OSError:
        return 0


def find_site_packages(path: Path, environment: Path) -> list[Path]:
    """Return where an environment of a tree has its packages, no links followed."""
    found = []
    try:
        with ConfinedFolder(path) as tree:
            inner = environment.relative_to(path).as_posix()
            for lib in _match_folders(tree, inner, r"lib\w*|Lib"):
                for place in (lib, *_match_folders(tree, lib, r"(?:python|pypy)3[\w.]*")):
                    found += _match_folders(tree, place, "site-packages")
    except OSError:
        pass
    return [path / each for each in sorted(found)]


def _match_folders(tree: ConfinedFolder, folder: str, names: str) -> list[str]:
    try:
        entries = tree.list_folder(folder)
    except OSError:
        return []
    return [f"{folder}/{name}" for name, kind in entries if kind == stat.S_IFDIR and re.fullmatch(names, name)]


def _hash_parts(*parts: str) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()

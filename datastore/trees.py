"""What a working tree's store is: where it lies, which files belong into it, the packages that the tree's own environment holds, and
which stores are nobody's any more.

Paths enter; folders of a cache, options of a corpus and counts leave. Nothing is built here, and nothing of a tree is run.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

from . import corpus
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
"""A store is kept for so long after its tree was found to be gone: it may be on a disk that is not there today."""
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


def tree(path: str, cache: Path, fingerprint: str) -> Kept:
    """The store of a working tree for a tokenizer: one per tree, tokenizer and version of the format. `path`: absolute, links resolved.

    Files that git does not track yet are taken too, unless it ignores them: what is being written is what a completion repeats.
    """
    folder = f"{Path(path).name or 'root'}-{_digest(path, fingerprint)}"
    return Kept((path,), str(cache / "trees" / folder), options_of(path))


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
        raise CorpusError(f"{path} holds {'' if is_all else 'more than '}{n_files:,} files of text, a tree may have {most:,}")
    return n_files


# ------------------------------------------------------------------ trees that are gone


def clear(cache: Path) -> list[str]:
    """Delete the stores of trees that are gone, and were GONE_DAYS ago: a file beside a store tells since when. Returns what was done, in
    words. What another process writes, or is no store, stays."""
    said = []
    for store in sorted(path for path in (cache / "trees").glob("*") if path.is_dir() and not path.is_symlink()):
        mark = store.with_name(f"{store.name}.gone")
        try:
            paths = [source.path for source in sources_in(read_manifest(store))]
            if not paths or not all(map(_is_gone, paths)):
                mark.unlink(missing_ok=True)
            elif not mark.exists():
                mark.touch()
                said.append(f"{paths[0]} is gone; its datastore {store} is deleted if it is not back in {GONE_DAYS} days")
            elif time.time() - mark.stat().st_mtime > GONE_DAYS * 86_400:
                with writing(store):
                    shutil.rmtree(store)
                mark.unlink()
                said.append(f"{paths[0]} has been gone for {GONE_DAYS} days; its datastore {store} is deleted")
        except (DatastoreError, OSError):
            continue
    return said


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
    """The store of the packages in a tree's own environment: one per set of names and versions, whatever tree they are installed for.

    None where there is no environment, or nothing in it.
    """
    environment = environment_of(Path(path))
    folders = [] if environment is None else site_packages(environment)
    versions = sorted({version for folder in folders for version in versions_in(folder)})
    if not versions:
        return None
    folder = f"packages-{_digest(*versions, fingerprint)}"
    return Kept(tuple(map(str, folders)), str(cache / "packages" / folder), CorpusOptions(languages=("python",)), follow=False)


def environment_of(path: Path) -> Path | None:
    """The virtual environment of a tree: .venv, venv, or the one that its pyproject.toml names to type checkers."""
    for folder in (path / ".venv", path / "venv", *_named_in(path / "pyproject.toml")):
        if (folder / "pyvenv.cfg").is_file():
            return folder.resolve()
    return None


def _named_in(pyproject: Path) -> list[Path]:
    """`venvPath` and `venv` of Pyright's settings."""
    try:
        tools = tomllib.loads(pyproject.read_text("utf-8")).get("tool", {})
        settings = [tools[name] for name in ("pyright", "basedpyright") if name in tools]
        return [pyproject.parent / Path(each.get("venvPath", ".")).expanduser() / each["venv"] for each in settings if "venv" in each]
    except (OSError, ValueError, TypeError, AttributeError):  # not there, or not what it should be
        return []


def site_packages(environment: Path) -> list[Path]:
    """Where an environment has its packages, links resolved."""
    found = [*environment.glob("lib*/python3*/site-packages"), *environment.glob("Lib/site-packages")]
    return sorted({folder.resolve() for folder in found if folder.is_dir()})


def versions_in(folder: Path) -> list[str]:
    """`name-version` of each package that is installed in a folder, as its metadata is called."""
    return sorted(each.name.removesuffix(".dist-info").lower().replace("_", "-") for each in folder.glob("*.dist-info"))


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:16]

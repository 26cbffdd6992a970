"""Following a corpus: a saved file is in the store a moment later.

Changes of files enter, by watchfiles; each time the store is brought up to date by `update`, and what that did, or why it failed, is handed
to the caller. A failure is tried again and never ends the watching. The lock is held only while something is written.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import watchfiles
from tokenizers import Tokenizer

from . import file_filters, git_folder
from .beneath import ConfinedFolder
from .corpus import CorpusSource
from .errors import DatastoreError
from .git_folder import GitRepository
from .manifest import read_manifest
from .progress import Summary
from .segment_writer import VectorFunction
from .update import get_encoder, parse_sources, update

DEBOUNCE_MS = 250  # an editor's several writes of one save; a checkout of many files takes as long as it takes
POLL_MS = 1000
# pause after an update that found nothing new, in times what it took: a build or a log in an ignored folder may change without end
VAIN_FACTOR = 4
# Whether a recursive watch stays in its folder. On Linux it follows links, which may lead to `/`: there each folder gets a watch.
WATCHES_STAY_INSIDE = sys.platform in ("darwin", "win32")
Outcome = Summary | DatastoreError | OSError


def watch(
    store: str | os.PathLike[str],
    tokenizer: Tokenizer | None = None,
    name: str | None = None,
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    vectors: VectorFunction | None = None,
    max_memory: int | None = None,
    writer: str = "ngramspec",
    stop: threading.Event | None = None,
    on_ready: Callable[[Sequence[CorpusSource]], None] = lambda sources: None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """Keep a store up to date until `stop` is set or KeyboardInterrupt comes, which is raised. `paths` are added to its corpus.

    `tokenizer` and `name` are as for `update`. `on_ready` is called when changes are being watched for, with what is watched;
    `on_outcome` with the Summary of each update that changed something and with each new error. Raises what `update` raises only if the
    very first one fails.
    """
    folder = Path(store)
    encoder = get_encoder(folder, read_manifest(folder), tokenizer, name)
    stop = stop or threading.Event()

    def bring_up_to_date(paths: Sequence[str | os.PathLike[str]] = ()) -> Summary:
        return update(folder, encoder, name, paths, vectors=vectors, max_memory=max_memory, writer=writer)

    first = bring_up_to_date(paths)
    if first.committed:
        on_outcome(first)
    sources = parse_sources(read_manifest(folder))
    single = [source.path for source in sources if not source.folder]
    before = _read_stamps(single)
    pending, reported, started = True, "", False  # something may have changed between the first update and the watching
    for changed in _wait_for_changes(folder, sources, stop):
        began_s, pause_s = time.monotonic(), 0.0
        now = _read_stamps(single)  # editors replace a file by another, so that a watch on the file itself would end
        if changed or now != before or pending:
            try:
                outcome = bring_up_to_date()
                pending, reported = False, ""
                before = now
                if outcome.committed:
                    on_outcome(outcome)
                else:
                    pause_s = VAIN_FACTOR * (time.monotonic() - began_s)
            except (DatastoreError, OSError) as error:
                pending = True
                if str(error) != reported:
                    on_outcome(error)
                    reported = str(error)
        if not started:
            started = True
            on_ready(sources)
        stop.wait(pause_s)


def _wait_for_changes(store: Path, sources: Sequence[CorpusSource], stop: threading.Event) -> Iterator[bool]:
    """Yield whether something may have changed, each time that something did, and every POLL_MS."""
    roots = [source.path for source in sources if source.folder]
    if not roots:
        while not stop.wait(POLL_MS / 1000):
            yield False
    while not stop.is_set():
        folders = [folder for root in roots for folder in _list_folders(root)]
        found = (_find_repository(folder, is_source=folder in roots) for folder in folders)
        git_folders = {repository.folder for repository in found if repository is not None}
        changes = watchfiles.watch(
            *{*(roots if WATCHES_STAY_INSIDE else folders), *git_folders},
            watch_filter=_ChangeFilter(store, sources, git_folders),
            debounce=DEBOUNCE_MS,
            step=50,
            rust_timeout=POLL_MS,
            yield_on_timeout=True,
            stop_event=stop,
            ignore_permission_denied=True,
            recursive=WATCHES_STAY_INSIDE,
        )
        is_first = True  # folders may have come since the last ones were watched
        try:
            with contextlib.closing(changes):
                for changed in changes:
                    yield bool(changed) or is_first
                    is_first = False
                    if not WATCHES_STAY_INSIDE and any(
                        change != watchfiles.Change.deleted and _is_folder(path) for change, path in changed
                    ):
                        break  # it is to be watched, too
        except FileNotFoundError:  # a folder went away before it was watched
            if not all(map(_is_folder, roots)):
                raise


def _list_folders(root: str) -> Iterator[str]:
    """Yield the folders to watch: those of a source that may hold text, and those of git's in them. Links are not followed."""
    with contextlib.suppress(OSError), ConfinedFolder(root, in_git=True) as tree:
        pending = [""]
        while pending:
            here = pending.pop()
            yield f"{root}/{here}" if here else root
            with contextlib.suppress(OSError):
                folders = [f"{here}/{name}" if here else name for name, kind in tree.list_folder(here) if kind == stat.S_IFDIR]
                pending += [path for path in folders if path.rpartition("/")[2] not in file_filters.SKIPPED_FOLDERS]
                yield from (f"{root}/{path}" for path in folders if path.rpartition("/")[2] == ".git")


def _find_repository(folder: str, *, is_source: bool) -> GitRepository | None:
    """Return the repository that begins at a folder, or, for a source, that it lies in. The index of a submodule or a linked working tree
    lies elsewhere, and so does that of a source that is a folder of a repository."""
    return git_folder.find_repository(folder) if is_source else git_folder.open_repository(folder)


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


class _ChangeFilter:
    """Which changes matter: not the store's own files nor those of tools, but git's index, for a file may be tracked from now on."""

    def __init__(self, store: Path, sources: Sequence[CorpusSource], git_folders: Iterable[str]) -> None:
        self.indexes = {f"{folder}/index" for folder in git_folders}
        self.store = os.path.realpath(store) + "/"
        self.roots = sorted((source.path for source in sources if source.folder), key=len, reverse=True)

    def __call__(self, change: watchfiles.Change, path: str) -> bool:
        if path.startswith(self.store):
            return False
        if path in self.indexes:
            return True
        root = next((root for root in self.roots if path.startswith(root + "/")), "")
        inner = path[len(root) + 1 :]
        return inner.endswith((".git/index", ".git")) or not file_filters.SKIPPED_FOLDERS.intersection(inner.split("/"))


def _read_stamps(paths: Sequence[str]) -> list[tuple[int, int, int] | None]:
    stamps: list[tuple[int, int, int] | None] = []
    for path in paths:
        try:
            status = os.lstat(path)
            stamps.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            stamps.append(None)
    return stamps

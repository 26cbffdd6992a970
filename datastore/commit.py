"""Who may write to a store, and how it goes from one generation to the next.

A folder enters, a `StoreWriter` that holds its lock leaves; what a writer commits becomes the store by one rename. Whatever else it wrote
is deleted, whether it ends well, by an error or by an interrupt. What a killed writer left is deleted by the next one. The module knows
files and manifests, nothing of what is in the segments.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import (
    DatastoreCorruptError,
    DatastoreError,
    DatastoreFormatError,
    DatastoreFullError,
    DatastoreLockedError,
    DatastoreNotFoundError,
)
from .file_io import FULL, combine_flags
from .format import MANIFEST
from .manifest import Manifest, find_orphans, read_manifest, write_manifest

try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # Windows
    fcntl = None
    msvcrt: Any = importlib.import_module("msvcrt")


def lock_file(descriptor: int) -> None:
    """Lock a file that is open for writing. Raises BlockingIOError if another process, or another descriptor, has locked it."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # a byte that need not be there
    except PermissionError as error:
        raise BlockingIOError(error.errno, "another process has locked it") from None


LOCK = "LOCK"  # the name of the file that a writer locks
LOCK_FLAGS = combine_flags("O_CLOEXEC", "O_NOFOLLOW")


class StoreWriter:
    """The right to write to one store, until the end of `lock_for_writing`."""

    def __init__(self, folder: Path, manifest: Manifest | None, generation: int) -> None:
        self.folder = folder
        self.manifest = manifest
        """The generation that stands, None before the first."""
        self.next_generation = generation
        """The number that the next commit must carry."""

    @property
    def standing(self) -> Manifest:
        """The generation that stands, of a store that has one."""
        assert self.manifest is not None
        return self.manifest

    def commit(self, manifest: Manifest) -> None:
        """Make `manifest` the store, durably, and delete the files of the generation before. Its segments must have been written."""
        assert manifest.generation == self.next_generation
        write_manifest(self.folder, manifest)
        self.manifest = manifest
        self.next_generation += 1
        _delete_orphans(self.folder, manifest)


@contextlib.contextmanager
def lock_for_writing(store: Path, *, create: bool = False) -> Iterator[StoreWriter]:
    """Hold a store's lock. With `create` a store that is not there, damaged or of another format is begun anew, in a new or empty folder.

    Raises DatastoreLockedError, DatastoreNotFoundError, DatastoreFullError for a full disk, DatastoreError for a folder that is no
    store, and without `create` what is wrong with the store.
    """
    if not create:
        read_manifest(store)  # before a lock file appears in a folder that is no store
    made = create and _make_folder(store)
    try:
        with _hold_lock(store):
            manifest, generation = _find_current(store, create)
            before = {path.name for path in find_orphans(store, None)}
            try:
                yield StoreWriter(store, manifest, generation)
            except BaseException:
                _clean_up(store, before)
                raise
    except OSError as error:
        if error.errno in FULL:
            raise DatastoreFullError(f"{store} cannot be written: {error.strerror}") from error
        raise
    finally:
        if create and not (store / MANIFEST).exists():
            _unmake_folder(store, made)


def _find_current(store: Path, create: bool) -> tuple[Manifest | None, int]:
    """Return the generation that stands and the number of the next; delete what belongs to none."""
    manifest = None
    try:
        manifest = read_manifest(store)
        generation = manifest.generation + 1
    except DatastoreNotFoundError:
        generation = 1
    except (DatastoreCorruptError, DatastoreFormatError):
        if not create:
            raise
        return None, int(time.time())  # beyond any number that readers of the unreadable one may have seen; its files stay until commit
    _delete_orphans(store, manifest)
    return manifest, generation


def _make_folder(store: Path) -> bool:
    """Make a folder to build in -> whether it is new. Raises DatastoreError for one that holds anything but a store."""
    try:
        store.mkdir(parents=True)
        return True
    except FileExistsError:
        pass
    except OSError as error:
        raise DatastoreError(f"{store} cannot be made: {error.strerror or error}") from error
    if not store.is_dir():
        raise DatastoreError(f"{store} is not a folder; a store is one, give the name of a new or empty folder")
    ours = {path.name for path in find_orphans(store, None)} | {LOCK}
    foreign = sorted(path.name for path in store.iterdir() if path.name not in ours)
    if foreign == [MANIFEST] and ours - {LOCK}:
        foreign = []  # a store, whole or damaged
    if foreign:
        try:
            read_manifest(store)
        except DatastoreFormatError:
            pass
        except DatastoreError as error:
            raise DatastoreError(
                f"{store} is no datastore and holds other files, such as {foreign[0]!r}: give the name of a new or empty folder"
            ) from error
    return False


def _unmake_folder(store: Path, made: bool) -> None:
    """Remove what a first build that failed has left. A folder that others use by now stays."""
    with contextlib.suppress(OSError, DatastoreLockedError):
        with _hold_lock(store):
            if (store / MANIFEST).exists():
                return
            (store / LOCK).unlink()
        if made:
            store.rmdir()


@contextlib.contextmanager
def _hold_lock(store: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises DatastoreLockedError if another process writes."""
    path = store / LOCK
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | LOCK_FLAGS, 0o666)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise DatastoreError(f"{path} cannot be opened for writing: {error.strerror}") from error
        try:
            lock_file(file)
            # the holder before may have deleted it: then this is the lock of nothing
            if _same_file(file, path):
                yield
                return
        except BlockingIOError as error:
            raise DatastoreLockedError(store) from error
        finally:
            os.close(file)


def _same_file(file: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def _clean_up(store: Path, before: set[str]) -> None:
    """Delete what came since `before` and was not committed. The folder is looked at, since the rename may just have happened."""
    with contextlib.suppress(OSError):
        manifest = None
        with contextlib.suppress(DatastoreError):
            manifest = read_manifest(store)
        for path in find_orphans(store, manifest):
            if manifest is not None or path.name not in before:
                path.unlink(missing_ok=True)


def _delete_orphans(store: Path, manifest: Manifest | None) -> None:
    for path in find_orphans(store, manifest):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows keeps what a reader has mapped; the next writer tries again
            path.unlink()

"""Open, read and write a store's files, with errors of a datastore. Knows nothing of what is in them.

Paths enter, bytes, descriptors and errors leave. Links are followed, FIFOs and devices refused; what is written is fsynced.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DatastoreCorruptError, DatastoreError, DatastoreFullError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what a system says of a disk, a quota or a file that has no room left
_CHUNK = 1 << 22  # bytes of one read


def combine_flags(*names: str) -> int:
    """Return those of these flags of `os.open` that this system has, together."""
    return sum(getattr(os, name, 0) for name in names)


_READ = os.O_RDONLY | combine_flags("O_CLOEXEC", "O_NONBLOCK", "O_BINARY")  # without O_NONBLOCK a FIFO would wait for a writer


def open_file(path: Path, missing: DatastoreError | None = None) -> int:
    """Return a descriptor of a regular file.

    Raises `missing`, by default DatastoreCorruptError, for a file that is not there, DatastoreCorruptError for what is not a regular file,
    and DatastoreError.
    """
    try:
        file = os.open(path, _READ)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise missing or DatastoreCorruptError(f"{path} is missing, MANIFEST names it") from error
    except OSError as error:
        raise DatastoreError(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise DatastoreCorruptError(f"{path} is not a regular file")
    return file


def read_file(path: Path, limit: int, missing: DatastoreError | None = None) -> bytes:
    """Return all bytes of a file. Raises as `open_file`, and DatastoreCorruptError for more than `limit` bytes."""
    file = open_file(path, missing)
    try:
        size = os.fstat(file).st_size
        if size > limit:
            raise DatastoreCorruptError(f"{path} has {size} bytes, at most {limit} are read")
        return read_start(path, file, size)
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(file)


def read_start(path: Path, file: int, size: int) -> bytes:
    """Return the first `size` bytes of an open file. Raises DatastoreCorruptError if it ends before."""
    os.lseek(file, 0, os.SEEK_SET)
    raw = os.read(file, size)
    if len(raw) != size:
        raise DatastoreCorruptError(f"{path} was truncated while it was read: {len(raw)} of {size} bytes")
    return raw


def read_into_memory(path: Path, file: int, size: int) -> mmap.mmap:
    """Read `size` bytes of an open file into memory of its own, in huge pages if the system has them. Raises DatastoreCorruptError."""
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    os.lseek(file, 0, os.SEEK_SET)
    with memoryview(memory) as view, os.fdopen(file, "rb", buffering=0, closefd=False) as raw:
        done = 0
        while done < size:
            with view[done : done + _CHUNK] as part:
                n = raw.readinto(part)
            if not n:
                raise DatastoreCorruptError(f"{path} was truncated while it was read: {done} of {size} bytes")
            done += n
    return memory


@contextlib.contextmanager
def create_file(path: Path) -> Iterator[WholeWriter]:
    """Create a file to be written; it is fsynced at the end, and none is left if that fails. Raises DatastoreFullError, DatastoreError."""
    try:
        with path.open("xb", buffering=0) as raw:
            yield WholeWriter(raw)
            os.fsync(raw.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise make_write_error(path, error) from error
        raise


class WholeWriter:
    """Writes all bytes of each call: a raw file may take fewer, and a buffered one copies."""

    def __init__(self, file: Any):
        self.file = file

    def write(self, data: bytes | memoryview) -> None:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                with view[done : done + (1 << 30)] as part:
                    done += self.file.write(part)


def make_write_error(path: Path, error: OSError) -> DatastoreError:
    """Return what to raise for a file that cannot be written: DatastoreFullError if the disk has no room."""
    kind = DatastoreFullError if error.errno in FULL else DatastoreError
    return kind(f"{path} cannot be written: {error.strerror}")


def sync_folder(folder: Path) -> None:
    """Make renames and new names in the folder durable, where a folder can be opened for that: not on Windows."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Files that hold many texts: .jsonl, .zip and .whl, .tar.gz and .tgz, read in memory and never extracted.

An open file enters, (name, bytes) of its members leave, one at a time; a member that is left out leaves as its reason. A member is
read to at most `max_size` bytes, and a whole container to at most RATIO times its own size, so that a bomb costs a bounded time
and no memory. Which names are wanted is asked of the caller before anything is unpacked.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from . import file_filters

RATIO = 200  # text compresses 3 to 10 times, never 200
FLOOR = 64 << 20  # a container may always hold this many bytes
MAX_MEMBERS = 1 << 20

_KINDS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".zip": "zip", ".whl": "zip", ".tar.gz": "tar", ".tgz": "tar"}
_ENDINGS = tuple(_KINDS)
_MEMBER = re.compile(r"(.*?\.(?:zip|whl|tar\.gz|tgz))!/|(.*\.jsonl(?:\.gz)?)#\d+$", re.IGNORECASE | re.DOTALL)
_DAMAGE = (
    *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, ValueError, IndexError, KeyError, NotImplementedError, RuntimeError, OverflowError, RecursionError),
)

Member = tuple[str, bytes | None, str]  # name, bytes, and, where the bytes are None, the reason
Wanted = Callable[[str], str | None]  # member name -> the reason to leave it out, or None


class DamagedError(Exception):
    """The container cannot be read to its end."""


class OverLimitError(Exception):
    """The container unpacks to more than it may."""


def get_container_kind(name: str) -> str | None:
    """Return jsonl, zip or tar by a file's name, None for a plain file."""
    lower = name.lower()
    if not lower.endswith(_ENDINGS):
        return None
    return next((kind for ending, kind in _KINDS.items() if lower.endswith(ending) and lower != ending), None)


def make_member_path(container: str, member: str, kind: str) -> str:
    """Return the path of a text within a container; `get_container_path` undoes it."""
    return f"{container}#{member}" if kind == "jsonl" else f"{container}!/{member}"


def get_container_path(path: str) -> str:
    """Return the file on disk that a document's path lies in: itself, unless it is a member."""
    found = _MEMBER.match(path) if "!/" in path or "#" in path else None  # few are, and an update asks for each document
    return (found[1] or found[2]) if found else path


def read_members(file: BinaryIO, kind: str, size: int, max_size: int, fields: tuple[str, ...], wanted: Wanted) -> Iterator[Member]:
    """Yield the members of an open container of `size` bytes. Raises DamagedError, OverLimitError, OSError; what came before stands."""
    limit = max(FLOOR, RATIO * size)
    try:
        if kind == "jsonl":
            yield from _read_rows(_open_gzip(file, limit), max_size, fields)
        elif kind == "zip":
            yield from _zip_members(file, limit, max_size, wanted)
        else:
            yield from _tar_members(file, limit, max_size, wanted)
    except _DAMAGE as error:
        raise DamagedError(str(error) or type(error).__name__) from error


def _open_gzip(file: BinaryIO, limit: int) -> io.BufferedReader:
    magic = file.read(2)
    file.seek(0)
    return io.BufferedReader(_LimitedStream(gzip.GzipFile(fileobj=file) if magic == b"\x1f\x8b" else file, limit), 1 << 18)


class _LimitedStream(io.RawIOBase):
    """A stream that raises OverLimitError when more than `limit` bytes are read from it."""

    def __init__(self, stream: BinaryIO | gzip.GzipFile, limit: int) -> None:
        self._stream = stream
        self._left = limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise OverLimitError("it unpacks to far more bytes than it has")
        buffer[: len(data)] = data
        return len(data)


def _read_rows(file: io.BufferedReader, max_size: int, fields: tuple[str, ...]) -> Iterator[Member]:
    longest = 8 * max_size + (1 << 16)  # JSON may escape a byte as \u00XX
    number = 0
    while line := file.readline(longest):
        number += 1
        if len(line) == longest and not line.endswith(b"\n"):
            while (rest := file.readline(longest)) and not rest.endswith(b"\n"):
                pass
            yield str(number), None, file_filters.TOO_LARGE
            continue
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = next((row[field] for field in fields if isinstance(row.get(field), str)), None) if isinstance(row, dict) else None
            data = None if text is None else text.encode()
        except (ValueError, RecursionError):  # no JSON, not UTF-8, or a lone surrogate
            data = None
        if data is None:
            yield str(number), None, file_filters.BAD_ROW
        elif len(data) > max_size:
            yield str(number), None, file_filters.TOO_LARGE
        else:
            yield str(number), data, ""


def _zip_members(file: BinaryIO, limit: int, max_size: int, wanted: Wanted) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        if len(archive.filelist) > MAX_MEMBERS:
            raise OverLimitError(f"it has {len(archive.filelist)} members; at most {MAX_MEMBERS} are read")
        for info in archive.filelist:
            if info.is_dir():
                continue
            mode = info.external_attr >> 16
            reason = wanted(info.filename)
            if reason is None and mode and mode & 0o170000 not in (0, 0o100000):
                reason = file_filters.LINK
            if reason is None and (info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)):
                reason = file_filters.UNREADABLE  # encrypted, or a method that cannot be read in bounded memory
            if reason is None and info.file_size > max_size:
                reason = file_filters.TOO_LARGE
            if reason is not None:
                yield info.filename, None, reason
                continue
            with archive.open(info) as member:
                data = member.read(max_size + 1)
            limit -= len(data)
            if limit < 0:
                raise OverLimitError("it unpacks to far more bytes than it has")
            yield (info.filename, data, "") if len(data) <= max_size else (info.filename, None, file_filters.TOO_LARGE)


def _tar_members(file: BinaryIO, limit: int, max_size: int, wanted: Wanted) -> Iterator[Member]:
    n_members = 0
    with tarfile.open(fileobj=_open_gzip(file, limit), mode="r|") as archive:
        for info in archive:
            archive.members = []  # type: ignore[attr-defined]  # it would remember every header
            n_members += 1
            if n_members > MAX_MEMBERS:
                raise OverLimitError(f"it has more than {MAX_MEMBERS} members")
            if info.isdir():
                continue
            reason = wanted(info.name)
            if reason is None and not info.isreg():
                reason = file_filters.LINK if info.issym() or info.islnk() else file_filters.SPECIAL
            if reason is None and (info.size > max_size or info.issparse()):
                reason = file_filters.TOO_LARGE
            stream = archive.extractfile(info) if reason is None else None
            if stream is None:
                yield info.name, None, reason or file_filters.SPECIAL
            else:
                yield info.name, stream.read(), ""

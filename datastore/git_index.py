"""The names that a git index holds, read from its bytes as git's `gitformat-index` documents them, without git.

The bytes of an index enter, entries leave; what is damaged or unknown is an IndexFormatError. Versions 2, 3 and 4, SHA-1 and SHA-256, split
and sparse indexes. An entry for a whole folder of a sparse index is left out: none of its files is in the working tree. Opens nothing.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .beneath import MAX_PATH

MAX_INDEX = 128 << 20  # bytes of an index that is read: a million files and more
MAX_NAMES = 512 << 20  # bytes of all names: version 4 writes down only how a name differs from the one before
SIZES = {"sha1": 20, "sha256": 32}
_EXTENDED = 0x4000
_LENGTH = 0x0FFF


class IndexFormatError(ValueError):
    """The index is damaged, or of a kind that is not known."""


class IndexEntry(NamedTuple):
    """A path that git tracks."""

    path: bytes
    """Relative to the top of the working tree; empty in a split index where it stands for an entry of the shared one."""
    mode: int

    @property
    def is_repository(self) -> bool:
        """A submodule."""
        return stat.S_IFMT(self.mode) == 0o160000

    @property
    def is_folder(self) -> bool:
        """A folder that a sparse index does not spell out."""
        return stat.S_IFMT(self.mode) == stat.S_IFDIR


@dataclass(frozen=True, slots=True)
class SplitIndex:
    """What a split index says of the shared one."""

    shared: str
    """Its hash, by which its file is called."""
    deleted: bytes
    replaced: bytes


def read_entries(data: bytes, algorithm: str, load_shared: Callable[[str], bytes]) -> list[IndexEntry]:
    """Return the files and submodules of an index. `algorithm`: sha1 or sha256, the repository's.

    `load_shared`: returns the bytes of a shared index by its hash. Raises IndexFormatError, and what `load_shared` raises.
    """
    entries, split = _parse_index(data, algorithm)
    if split is not None:
        shared, nested = _parse_index(load_shared(split.shared), algorithm)
        if nested is not None:
            raise IndexFormatError("its shared index is split itself")
        entries = _join_shared(shared, entries, split)
    if any(not entry.path for entry in entries):
        raise IndexFormatError("an entry has no path")
    return [entry for entry in entries if not entry.is_folder]


def _parse_index(data: bytes, algorithm: str) -> tuple[list[IndexEntry], SplitIndex | None]:
    size = SIZES[algorithm]
    if len(data) < 12 + size or data[:4] != b"DIRC":
        raise IndexFormatError("it does not begin as an index")
    version, count = struct.unpack_from(">II", data, 4)
    if version not in (2, 3, 4):
        raise IndexFormatError(f"its version is {version}, known are 2, 3 and 4")
    end = len(data) - size
    checksum = data[end:]
    if any(checksum) and hashlib.new(algorithm, memoryview(data)[:end], usedforsecurity=False).digest() != checksum:
        raise IndexFormatError("its checksum is wrong")  # zeros: git wrote it with index.skipHash
    entries, at = _parse_entries(data, 12, end, version, count, size)
    split = None
    while at < end:
        if at + 8 > end:
            raise IndexFormatError("it ends within an extension")
        name = data[at : at + 4]
        (length,) = struct.unpack_from(">I", data, at + 4)
        at += 8
        if at + length > end:
            raise IndexFormatError("it ends within an extension")
        if name == b"link":
            split = _parse_link(data[at : at + length], size)
        elif not name[:1].isupper() and name != b"sdir":  # others are hints that may be passed over
            raise IndexFormatError(f"its extension {name.decode('ascii', 'backslashreplace')!r} is not known")
        at += length
    return entries, split


def _parse_entries(data: bytes, at: int, end: int, version: int, count: int, size: int) -> tuple[list[IndexEntry], int]:
    # times, device, inode, MODE, owner, size, object id, FLAGS
    mode_and_flags = struct.Struct(f">24xI12x{size}xH")
    fixed = mode_and_flags.size
    if count * (fixed + 1) > end - at:
        raise IndexFormatError(f"it has no room for its {count:,} entries")
    entries = []
    name = b""
    total = 0
    for _ in range(count):
        start = at
        if start + fixed > end:
            raise IndexFormatError("it ends within an entry")
        mode, flags = mode_and_flags.unpack_from(data, start)
        at = start + fixed
        if flags & _EXTENDED:
            if version == 2:
                raise IndexFormatError("an entry of version 2 has flags of version 3")
            at += 2
        kept = b""
        if version == 4:
            strip, at = _parse_varint(data, at, end)
            if strip > len(name):
                raise IndexFormatError("a path shares more with the one before than that has")
            kept = name[: len(name) - strip]
        stop = data.find(b"\0", at, end)
        if stop < 0:
            raise IndexFormatError("it ends within a path")
        name = kept + data[at:stop]
        length = len(name)
        total += length
        if length > MAX_PATH or total > MAX_NAMES:
            raise IndexFormatError(f"a path has more than {MAX_PATH} bytes, or all have more than {MAX_NAMES >> 20} MiB")
        if flags & _LENGTH != (length if length < _LENGTH else _LENGTH):
            raise IndexFormatError("the length of a path is not what its entry says")
        at = stop + 1 if version == 4 else start + (stop - start + 8) // 8 * 8
        if at > end:
            raise IndexFormatError("it ends within an entry")
        entries.append(IndexEntry(name, mode))
    return entries, at


def _parse_varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return a number as git's packs write offsets: (it, where it ends)."""
    value = -1
    while at < end and value < MAX_PATH:
        byte = data[at]
        at += 1
        value = (value + 1) << 7 | byte & 127
        if not byte & 128:
            return value, at
    raise IndexFormatError("a path shares more with the one before than paths have")


def _parse_link(data: bytes, size: int) -> SplitIndex | None:
    if len(data) < size:
        raise IndexFormatError("its link to a shared index is damaged")
    shared, rest = data[:size], data[size:]
    if not any(shared):
        return None
    if not rest:
        return SplitIndex(shared.hex(), b"", b"")
    deleted, after = _take_bitmap(rest)
    replaced, after = _take_bitmap(after)
    if after:
        raise IndexFormatError("its link to a shared index is damaged")
    return SplitIndex(shared.hex(), deleted, replaced)


def _take_bitmap(data: bytes) -> tuple[bytes, bytes]:
    """Return (the first bitmap of some bytes, what follows it)."""
    if len(data) < 12:
        raise IndexFormatError("a bitmap of its shared index is damaged")
    length = 8 + 8 * int.from_bytes(data[4:8], "big") + 4
    if len(data) < length:
        raise IndexFormatError("a bitmap of its shared index is damaged")
    return data[:length], data[length:]


def _decode_bitmap(bitmap: bytes, count: int) -> Iterator[int]:
    """Yield the set bits of an EWAH bitmap of 64-bit words, which must all be below `count`.

    Lemire, Kaser and Aouiche, Sorting improves word-aligned bitmap indexes, 2010.
    """
    if not bitmap:
        return
    words = struct.unpack(f">{(len(bitmap) - 12) // 8}Q", bitmap[8:-4])
    at = place = 0
    while place < len(words):
        marker = words[place]
        run, literals = marker >> 1 & 0xFFFFFFFF, marker >> 33
        place += 1
        if literals > len(words) - place or (run and (at + run - 1) * 64 >= count + 64):
            raise IndexFormatError("a bitmap of its shared index is damaged")
        if marker & 1:
            yield from _check_below(range(64 * at, 64 * (at + run)), count)
        at += run
        for word in words[place : place + literals]:
            yield from _check_below((64 * at + bit for bit in range(64) if word >> bit & 1), count)
            at += 1
        place += literals


def _check_below(positions: Iterator[int] | range, count: int) -> Iterator[int]:
    for position in positions:
        if position >= count:
            raise IndexFormatError("a bitmap of its shared index names an entry that is not there")
        yield position


def _join_shared(shared: list[IndexEntry], own: list[IndexEntry], split: SplitIndex) -> list[IndexEntry]:
    """Return a shared index's entries, some replaced (by own ones without a path, which come first) or deleted, then the other own."""
    joined: list[IndexEntry | None] = list(shared)
    n_replaced = 0
    for position in _decode_bitmap(split.replaced, len(shared)):
        if n_replaced == len(own) or own[n_replaced].path:
            raise IndexFormatError("it replaces entries of its shared index by none")
        joined[position] = IndexEntry(shared[position].path, own[n_replaced].mode)
        n_replaced += 1
    for position in _decode_bitmap(split.deleted, len(shared)):
        joined[position] = None
    return [entry for entry in joined if entry is not None] + own[n_replaced:]

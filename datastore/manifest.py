"""The manifest of a datastore, and the two whole files that it names beside the segments: tokenizer and vocabulary.

A `Manifest` enters and becomes the store's generation by one rename, or is read and checked. `format` describes the files. Knows nothing
of what is in the segments.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import secrets
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DatastoreCorruptError, DatastoreError, DatastoreNotFoundError
from .file_io import create_file, make_write_error, read_file, sync_folder
from .format import FORMAT, HEADER_BYTES, MANIFEST, MAX_TOKENS, SegmentEntry, check_version, compute_digest

MANIFEST_MAGIC = "ngramspec datastore"
# bytes; JSON takes some twenty times its size in memory. Half a million tombstones fit, and a writer merges long before
MAX_MANIFEST_BYTES = 4 << 20
MAX_TOKENIZER_BYTES = 64 << 20  # of its JSON; the largest that are published have half of it
MAX_LEFT_OUT_BYTES = 256 << 20  # of its JSON: ten million files

_SEGMENT_NAME = re.compile(r"seg-[0-9a-f]{16}\.ngs\Z")
_VOCABULARY_NAME = re.compile(r"vocab-[0-9a-f]{16}\Z")
_TOKENIZER_NAME = re.compile(r"tokenizer-[0-9a-f]{16}\Z")
_LEFT_OUT_NAME = re.compile(r"left-out-[0-9a-f]{16}\Z")
_ORPHAN_NAME = re.compile(r"(seg-[0-9a-f]{16}\.ngs|(vocab|tokenizer|left-out)-[0-9a-f]{16}|MANIFEST\.tmp-\d+)\Z")
_HEX32, _HEX64, _ANY = re.compile(r"[0-9a-f]{32}\Z"), re.compile(r"[0-9a-f]{64}\Z"), re.compile(r"(?s).*\Z")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Any other file as MANIFEST names it."""

    name: str
    bytes: int
    checksum: str
    """The checksum of all its bytes, hex."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation of a store."""

    generation: int
    tokenizer_name: str
    tokenizer_fingerprint: str
    """The sha256 of its canonical JSON, hex."""
    vocab_size: int
    vocabulary: FileEntry
    tokenizer: FileEntry
    segments: tuple[SegmentEntry, ...]
    sources: list[Any] = field(default_factory=list)
    """What a build walked and how, as JSON values; `sources` and `options` belong to the writer."""
    options: dict[str, Any] = field(default_factory=dict)
    writer: str = "ngramspec"
    left_out: FileEntry | None = None
    """What the last read that changed anything left out by what is in it or as a duplicate: see `write_left_out`."""

    @property
    def files(self) -> tuple[FileEntry | SegmentEntry, ...]:
        """All files that the manifest names."""
        return self.vocabulary, self.tokenizer, *self.segments, *([self.left_out] if self.left_out else [])

    @property
    def n_bytes(self) -> int:
        """Bytes of all files that the manifest names."""
        return sum(entry.bytes for entry in self.files)


# ---- the tokenizer, the line ends of its vocabulary, and what was left out


def write_vocabulary(folder: Path, line_ends: np.ndarray) -> FileEntry:
    """Write line_ends u8 [vocab_size], how many line ends the text of each token has. Raises DatastoreFullError."""
    return _write_whole(folder, "vocab", np.ascontiguousarray(line_ends, np.uint8).tobytes())


def read_vocabulary(folder: Path, entry: FileEntry) -> np.ndarray:
    """Return the line ends of each token, u8 [vocab_size], checked whole. Raises DatastoreCorruptError."""
    return np.frombuffer(_read_whole(folder, entry), np.uint8)


def write_tokenizer(folder: Path, text: bytes) -> FileEntry:
    """Write `text`, the JSON of which the manifest has the fingerprint. Raises DatastoreFullError; DatastoreError if it is too large."""
    if len(text) > MAX_TOKENIZER_BYTES:
        raise DatastoreError(f"a tokenizer of {len(text)} bytes of JSON; at most {MAX_TOKENIZER_BYTES} are read")
    return _write_whole(folder, "tokenizer", zlib.compress(text))


def read_tokenizer(folder: Path, manifest: Manifest) -> bytes:
    """Return the tokenizer's JSON, checked whole and against the fingerprint. Raises DatastoreCorruptError."""
    text = _read_packed(folder, manifest.tokenizer, MAX_TOKENIZER_BYTES)
    if hashlib.sha256(text).hexdigest() != manifest.tokenizer_fingerprint:
        raise DatastoreCorruptError(f"{folder / manifest.tokenizer.name}: it is not the tokenizer of which {MANIFEST} has the fingerprint")
    return text


def write_left_out(folder: Path, left_out: dict[str, str]) -> FileEntry | None:
    """Write which files need not be read again, by keys for name, size and time (`format`). None for none. Raises DatastoreFullError."""
    return _write_whole(folder, "left-out", zlib.compress(_to_canonical_json(left_out))) if left_out else None


def read_left_out(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Return why files were left out, checked whole. Raises DatastoreCorruptError."""
    if manifest.left_out is None:
        return {}
    try:
        found = json.loads(_read_packed(folder, manifest.left_out, MAX_LEFT_OUT_BYTES))
    except (ValueError, RecursionError) as error:
        raise DatastoreCorruptError(f"{folder / manifest.left_out.name} is not JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(reason, str) for reason in found.values()):
        raise DatastoreCorruptError(f"{folder / manifest.left_out.name} does not hold reasons")
    return found


def _read_packed(folder: Path, entry: FileEntry, limit: int) -> bytes:
    """Return what a file of zlib's unpacks to. Raises DatastoreCorruptError, also for more than `limit` bytes."""
    path, raw = folder / entry.name, _read_whole(folder, entry)
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(raw, limit + 1)
    except zlib.error as error:
        raise DatastoreCorruptError(f"{path}: {error}") from error
    if not unpacking.eof or unpacking.unused_data or len(text) > limit:
        raise DatastoreCorruptError(f"{path}: it does not unpack to at most {limit} bytes")
    return text


def _write_whole(folder: Path, kind: str, raw: bytes) -> FileEntry:
    name = f"{kind}-{secrets.token_hex(8)}"
    with create_file(folder / name) as file:
        file.write(raw)
    return FileEntry(name, len(raw), compute_digest(raw).hex())


def _read_whole(folder: Path, entry: FileEntry) -> bytes:
    path = folder / entry.name
    raw = read_file(path, entry.bytes)
    if len(raw) != entry.bytes or compute_digest(raw).hex() != entry.checksum:
        raise DatastoreCorruptError(f"{path}: {len(raw)} bytes that are not the {entry.bytes} of which {MANIFEST} has the checksum")
    return raw


# ---- the manifest


def describe_missing(folder: Path) -> DatastoreNotFoundError:
    """Return the error of a folder without a manifest."""
    why = f"it has no file {MANIFEST}" if os.access(folder, os.F_OK) else "there is no such folder"
    return DatastoreNotFoundError(f"{folder} is not a datastore: {why}")


def read_manifest(folder: Path) -> Manifest:
    """Read a store's manifest. Raises DatastoreNotFoundError, DatastoreFormatError, DatastoreCorruptError."""
    path = folder / MANIFEST
    raw = read_file(path, MAX_MANIFEST_BYTES, describe_missing(folder))
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DatastoreCorruptError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("magic") != MANIFEST_MAGIC:
        raise DatastoreCorruptError(f"{path} is not the manifest of a datastore")
    check_version(path, document.get("format"))
    checksum = document.pop("checksum", None)
    body = _to_canonical_json(document)
    # the bytes themselves are compared, for JSON has several spellings of one value
    if raw != _with_checksum(body) or compute_digest(body).hex() != checksum:
        raise DatastoreCorruptError(f"{path}: its checksum is wrong")
    try:
        return _parse_manifest(document)
    except (KeyError, TypeError, ValueError) as error:
        raise DatastoreCorruptError(f"{path}: {type(error).__name__}: {error}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make `manifest` the store's generation: it is written beside the old one, fsynced and renamed.

    Raises DatastoreFullError, DatastoreError for one that is too large; the old one stays then.
    """
    document = {
        "magic": MANIFEST_MAGIC,
        "format": FORMAT,
        "writer": manifest.writer,
        "generation": manifest.generation,
        "tokenizer": {
            "name": manifest.tokenizer_name,
            "fingerprint": manifest.tokenizer_fingerprint,
            "file": asdict(manifest.tokenizer),
        },
        "vocab_size": manifest.vocab_size,
        "vocabulary": asdict(manifest.vocabulary),
        "segments": [
            {"name": s.name, "bytes": s.bytes, "checksum": s.checksum, "tokens": s.tokens, "docs": s.docs, "dead": s.tombstones}
            for s in manifest.segments
        ],
        "sources": manifest.sources,
        "options": manifest.options,
        **({"left_out": asdict(manifest.left_out)} if manifest.left_out else {}),
    }
    body = _to_canonical_json(document)
    raw = _with_checksum(body)
    _parse_manifest(json.loads(body))  # what cannot be read is not written
    if len(raw) > MAX_MANIFEST_BYTES:
        raise DatastoreError(f"a manifest of {len(raw)} bytes; {MAX_MANIFEST_BYTES} are read: merge segments, or name fewer sources")
    partial = folder / f"{MANIFEST}.tmp-{os.getpid()}"
    partial.unlink(missing_ok=True)
    with create_file(partial) as file:
        file.write(raw)
    try:
        partial.replace(folder / MANIFEST)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise make_write_error(folder / MANIFEST, error) from error
    sync_folder(folder)


def find_orphans(folder: Path, manifest: Manifest | None) -> list[Path]:
    """List files that look like a store's and belong to no generation. Only the holder of the lock may delete them."""
    named = {entry.name for entry in manifest.files} if manifest else set()
    return sorted(path for path in folder.iterdir() if _ORPHAN_NAME.match(path.name) and path.name not in named)


def _parse_manifest(document: dict[str, Any]) -> Manifest:
    vocab_size = _check_integer(document["vocab_size"], 1, 1 << 32)
    vocabulary = _parse_file(document["vocabulary"], _VOCABULARY_NAME, vocab_size, vocab_size + 1)
    tokenizer = _parse_file(document["tokenizer"]["file"], _TOKENIZER_NAME, 1, MAX_TOKENIZER_BYTES)
    segments = []
    for item in document["segments"]:
        docs = _check_integer(item["docs"], 0, 1 << 40)
        tombstones = tuple(_check_integer(number, 0, docs) for number in item["dead"])
        if any(a >= b for a, b in itertools.pairwise(tombstones)):
            raise ValueError(f"dead documents of {item['name']!r} are not rising")
        segments.append(
            SegmentEntry(
                _check_text(item["name"], _SEGMENT_NAME),
                _check_integer(item["bytes"], HEADER_BYTES, 1 << 62),
                _check_text(item["checksum"], _HEX32),
                _check_integer(item["tokens"], 1, MAX_TOKENS),
                docs,
                tombstones,
            )
        )
    if len({s.name for s in segments}) != len(segments):
        raise ValueError("a segment is named twice")
    if not isinstance(document["sources"], list) or not isinstance(document["options"], dict):
        raise ValueError("`sources` must be a list and `options` an object")
    return Manifest(
        generation=_check_integer(document["generation"], 0, 1 << 62),
        tokenizer_name=_check_text(document["tokenizer"]["name"], _ANY),
        tokenizer_fingerprint=_check_text(document["tokenizer"]["fingerprint"], _HEX64),
        vocab_size=vocab_size,
        vocabulary=vocabulary,
        tokenizer=tokenizer,
        segments=tuple(segments),
        sources=document["sources"],
        options=document["options"],
        writer=_check_text(document["writer"], _ANY),
        left_out=_parse_file(document["left_out"], _LEFT_OUT_NAME, 1, MAX_LEFT_OUT_BYTES) if "left_out" in document else None,
    )


def _parse_file(item: dict[str, Any], names: re.Pattern[str], least: int, end: int) -> FileEntry:
    return FileEntry(_check_text(item["name"], names), _check_integer(item["bytes"], least, end), _check_text(item["checksum"], _HEX32))


def _check_integer(value: Any, low: int, end: int) -> int:
    if type(value) is not int or not low <= value < end:
        raise ValueError(f"{value!r} where an integer from {low} to {end - 1} is wanted")
    return value


def _check_text(value: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.match(value):
        raise ValueError(f"{value!r} where text like {pattern.pattern} is wanted")
    return value


def _to_canonical_json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _with_checksum(body: bytes) -> bytes:
    return b'{"checksum":"%s",%s\n' % (compute_digest(body).hex().encode(), body[1:])

"""The bytes of a datastore on disk: this specification, and segments. No look-up, no walking of files, no tokenizer.

Arrays and plain records enter, files leave, and the other way round; `manifest` reads and writes the other files. A store is a folder of

    MANIFEST         canonical JSON of `Manifest` and its checksum; the only file that is ever replaced
    seg-<16 hex>.ngs immutable segments
    vocab-<16 hex>   u8 per token id: how many line ends its text has
    tokenizer-<16 hex>
                     zlib: the tokenizer as JSON of the `tokenizers` library, canonical (sorted keys, no blanks, ASCII), without
                     truncation and padding; sha256 of the JSON is the fingerprint. Read by who turns text into tokens, not at open
    left-out-<16 hex>
                     zlib: JSON, what updates need not read again, by `corpus.make_left_out_key`: why a file was left out by what is in
                     it, or, with a `=` before the key, the hash (hex) of its text, which another file has. Only if there are any

and whatever else begins with `seg-`, `vocab-`, `tokenizer-`, `left-out-` or `MANIFEST.tmp-` is what an interrupted writer left. MANIFEST
names each file with its size and checksum. A segment, little-endian:

    header    [320] bytes, see `_HEADER`: sizes, widths, the table of sections, a checksum of all that
    tokens    u16 or u32 [n_tokens]: a separator, then every document followed by one; the separator is all ones
    suffixes  u8 [n_suffixes, width]: little-endian positions p in the order of the text before p read backwards (suffix_array.py)
    docs      DOC_DTYPE [n_docs]
    paths     utf-8, one after the other
    vectors   vector_dtype(dim) [n_vectors], for similar files; may be empty

Sections lie in this order, each at the first multiple of 64 after the one before, the gap filled with zeros, so that the sizes
fix every offset and a table that says otherwise is refused. A section's checksum covers the zeros after it too: no byte of a
file is unprotected. Opening compares sizes before anything is mapped or allocated, and never reads a body.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DatastoreCorruptError, DatastoreError, DatastoreFormatError
from .file_io import create_file, open_file, read_into_memory, read_start

FORMAT = 1  # version of the bytes; a store of another version is refused
MANIFEST = "MANIFEST"
MAGIC = b"NGSTORE\0"
SECTIONS = ("tokens", "suffixes", "docs", "paths", "vectors")
HEADER_BYTES = 320
ALIGNMENT = 64  # bytes; sections begin at multiples of it
PLACE_BITS = 40  # a place is segment << PLACE_BITS | position
MAX_TOKENS = 1 << PLACE_BITS  # of one segment; five bytes hold a position
CHECKSUM_BYTES = 16

# magic, format, header bytes, flags, token width, suffix width, (2 reserved), vocab_size, vector dim,
# n_tokens, n_suffixes, n_docs, path bytes, n_vectors, fingerprint; then each section's offset, bytes, checksum; then that of all before
_HEADER = struct.Struct("<8sIIIBBHIIQQQQQ32s")
_SECTION = struct.Struct(f"<QQ{CHECKSUM_BYTES}s")

DOC_DTYPE = np.dtype(
    [
        ("start", "<u8"),  # index of the first token
        ("path_offset", "<u8"),
        ("size", "<u8"),  # of the file, in bytes
        ("mtime_ns", "<i8"),
        ("hash", "V16"),  # blake2b-128 of the file's bytes
        ("length", "<u4"),  # in tokens, without the separator
        ("path_bytes", "<u4"),
    ]
)


def make_vector_dtype(dim: int) -> np.dtype:
    """Return the type of a record for similar files: the vector, the document's number, the chunk's first token within the document."""
    return np.dtype([("vector", "<f2", (dim,)), ("doc", "<u4"), ("start", "<u4")])


def get_separator(token_width: int) -> int:
    """Return the token that ends every document: all ones."""
    return (1 << 8 * token_width) - 1


def choose_token_dtype(vocab_size: int) -> np.dtype:
    """Return u16 if all ids and the separator fit, else u32."""
    return np.dtype("<u2") if vocab_size <= 0xFFFF else np.dtype("<u4")


def compute_suffix_width(n_tokens: int) -> int:
    """Return the bytes of a position: the smallest of 2, 3, 4, 5 that holds n_tokens."""
    return max(2, (n_tokens.bit_length() + 7) // 8)


def compute_digest(data: Any) -> bytes:
    """Return the blake2b-128 of bytes or of a contiguous array."""
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment as MANIFEST names it."""

    name: str
    bytes: int
    checksum: str
    """The checksum of the header, hex: a file that was exchanged for another whole one is noticed."""
    tokens: int
    docs: int
    tombstones: tuple[int, ...] = ()
    """Documents that were deleted or replaced by a newer segment, rising; `dead` in MANIFEST."""


@dataclass(frozen=True, slots=True)
class SectionEntry:
    """A row of a segment's table of sections."""

    offset: int
    n_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """A segment's checked header."""

    token_width: int
    suffix_width: int
    vocab_size: int
    vector_dim: int
    n_tokens: int
    n_suffixes: int
    n_docs: int
    path_bytes: int
    n_vectors: int
    fingerprint: bytes
    sections: dict[str, SectionEntry]


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Views of one segment's bytes; they keep the mapping alive. Nothing in them has been checked but their sizes."""

    path: Path
    header: SegmentHeader
    tokens: np.ndarray  # u16 or u32 [n_tokens]
    suffixes: np.ndarray  # u8 [n_suffixes, width]
    docs: np.ndarray  # DOC_DTYPE [n_docs]
    paths: np.ndarray  # u8 [path_bytes]
    vectors: np.ndarray  # vector_dtype(dim) [n_vectors]
    data: np.ndarray  # u8, the whole file


def write_segment(
    folder: Path,
    *,
    tokens: np.ndarray,
    suffixes: np.ndarray,
    docs: np.ndarray,
    paths: bytes,
    vectors: np.ndarray | None = None,
    vocab_size: int,
    fingerprint: str,
) -> SegmentEntry:
    """Write a new segment and fsync it; it is part of no store until a manifest names it.

    tokens u16|u32 [n] with separators, suffixes u8 [m, width] as `sort_suffixes` makes them, docs DOC_DTYPE, vectors a
    `make_vector_dtype` array, fingerprint sha256 hex.
    Raises DatastoreFullError, leaving no file; ValueError for arrays that are no segment.
    """
    if vectors is None:
        vectors = np.empty(0, make_vector_dtype(0))
    width = compute_suffix_width(len(tokens))
    if (
        tokens.dtype != choose_token_dtype(vocab_size)
        or not 0 < len(tokens) < MAX_TOKENS
        or tokens[0] != get_separator(tokens.dtype.itemsize)
    ):
        raise ValueError(f"tokens must be {choose_token_dtype(vocab_size)} and begin with a separator, got {len(tokens)} of {tokens.dtype}")
    if suffixes.dtype != np.uint8 or suffixes.ndim != 2 or suffixes.shape[1] != width or docs.dtype != DOC_DTYPE:
        raise ValueError(f"suffixes must be u8 [n, {width}] and docs DOC_DTYPE, got {suffixes.dtype} {suffixes.shape} and {docs.dtype}")
    dim = vectors.dtype["vector"].shape[0]
    arrays = [
        a.reshape(-1).view(np.uint8) for a in (np.ascontiguousarray(tokens), np.ascontiguousarray(suffixes), np.ascontiguousarray(docs))
    ]
    arrays += [np.frombuffer(paths, np.uint8), np.ascontiguousarray(vectors).view(np.uint8) if len(vectors) else np.empty(0, np.uint8)]
    bodies = [array.data for array in arrays]
    table, offset = b"", HEADER_BYTES
    for body in bodies:
        check = hashlib.blake2b(body, digest_size=CHECKSUM_BYTES)
        check.update(bytes(-len(body) % ALIGNMENT))
        table += _SECTION.pack(offset, len(body), check.digest())
        offset += len(body) + -len(body) % ALIGNMENT
    sizes = (len(tokens), len(suffixes), len(docs), len(paths), len(vectors))
    header = _HEADER.pack(
        MAGIC, FORMAT, HEADER_BYTES, 0, tokens.dtype.itemsize, width, 0, vocab_size, dim, *sizes, bytes.fromhex(fingerprint)
    )
    header = (header + table).ljust(HEADER_BYTES - CHECKSUM_BYTES, b"\0")
    header += compute_digest(header)
    name = f"seg-{secrets.token_hex(8)}.ngs"
    with create_file(folder / name) as file:
        file.write(header)
        for body in bodies:
            file.write(body)
            file.write(bytes(-len(body) % ALIGNMENT))
    return SegmentEntry(name, offset, compute_digest(header).hex(), len(tokens), len(docs))


def map_segment(folder: Path, entry: SegmentEntry, copy: bool = False) -> Segment:
    """Map a segment read-only, or read it into memory of its own (huge pages where the system has them).

    Raises DatastoreCorruptError, DatastoreFormatError. A file that another program truncates while it is mapped ends the process
    at the next read beyond its end (SIGBUS), which no check can prevent: if writers are not trusted, use copy=True.
    """
    path = folder / entry.name
    file = open_file(path)
    try:
        size = os.fstat(file).st_size
        if size != entry.bytes:
            raise DatastoreCorruptError(f"{path} has {size} bytes, {MANIFEST} says {entry.bytes}")
        raw = read_start(path, file, min(size, HEADER_BYTES))
        header = read_header(path, raw, size)
        if compute_digest(raw).hex() != entry.checksum:
            raise DatastoreCorruptError(f"{path}: header: it is whole, but not the one that {MANIFEST} names")
        if (header.n_tokens, header.n_docs) != (entry.tokens, entry.docs):
            raise DatastoreCorruptError(
                f"{path}: header: {header.n_tokens} tokens in {header.n_docs} documents, {MANIFEST} says {entry.tokens} in {entry.docs}"
            )
        data = np.frombuffer(read_into_memory(path, file, size) if copy else mmap.mmap(file, size, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(file)
    bodies = {name: data[s.offset : s.offset + s.n_bytes] for name, s in header.sections.items()}
    return Segment(
        path=path,
        header=header,
        tokens=bodies["tokens"].view(f"<u{header.token_width}"),
        suffixes=bodies["suffixes"].reshape(header.n_suffixes, header.suffix_width),
        docs=bodies["docs"].view(DOC_DTYPE),
        paths=bodies["paths"],
        vectors=bodies["vectors"].view(make_vector_dtype(header.vector_dim)) if header.n_vectors else np.empty(0, make_vector_dtype(0)),
        data=data,
    )


def check_bodies(segment: Segment, sections: Iterable[str]) -> None:
    """Compare sections with their checksums. Raises DatastoreCorruptError."""
    for name in sections:
        section = segment.header.sections[name]
        end = section.offset + section.n_bytes
        if compute_digest(segment.data[section.offset : end + -end % ALIGNMENT]) != section.checksum:
            raise DatastoreCorruptError(f"{segment.path}: {name}: its checksum is wrong")


def read_header(path: Path, raw: bytes, size: int) -> SegmentHeader:
    """Check a segment's first bytes against each other and against the file's size. Raises DatastoreCorruptError, DatastoreFormatError."""
    if len(raw) < HEADER_BYTES:
        raise DatastoreCorruptError(f"{path}: header: the file ends after {len(raw)} bytes")
    magic, version, header_bytes, flags, token_width, width, reserved, vocab_size, dim, *sizes, fingerprint = _HEADER.unpack_from(raw)
    n_tokens, n_suffixes, n_docs, path_bytes, n_vectors = sizes
    if magic != MAGIC:
        raise DatastoreCorruptError(f"{path}: header: it begins with {magic!r}, a segment begins with {MAGIC!r}")
    check_version(path, version)
    if compute_digest(raw[:-CHECKSUM_BYTES]) != raw[-CHECKSUM_BYTES:]:
        raise DatastoreCorruptError(f"{path}: header: its checksum is wrong")

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise DatastoreCorruptError(f"{path}: header: {what}")

    check(header_bytes == HEADER_BYTES and flags == 0 and reserved == 0, f"{header_bytes} bytes with flags {flags}, {reserved}")
    check(0 < vocab_size < 1 << 32, f"a vocabulary of {vocab_size}")
    check(token_width == choose_token_dtype(vocab_size).itemsize, f"tokens of {token_width} bytes for a vocabulary of {vocab_size}")
    check(0 < n_tokens < MAX_TOKENS, f"{n_tokens} tokens")
    check(width == compute_suffix_width(n_tokens), f"suffixes of {width} bytes for {n_tokens} tokens")
    check(n_suffixes < n_tokens and n_docs < n_tokens, f"{n_suffixes} suffixes and {n_docs} documents in {n_tokens} tokens")
    check(dim <= 4096 and (dim > 0 or n_vectors == 0), f"{n_vectors} vectors of {dim} numbers")
    wanted = (
        n_tokens * token_width,
        n_suffixes * width,
        n_docs * DOC_DTYPE.itemsize,
        path_bytes,
        n_vectors * make_vector_dtype(dim).itemsize,
    )
    sections, offset = {}, HEADER_BYTES
    for i, (name, n_bytes) in enumerate(zip(SECTIONS, wanted, strict=True)):
        section = SectionEntry(*_SECTION.unpack_from(raw, _HEADER.size + i * _SECTION.size))
        check(section.n_bytes == n_bytes, f"section {name} has {section.n_bytes} bytes, its counts need {n_bytes}")
        check(section.offset == offset, f"section {name} begins at {section.offset}, those before it end at {offset}")
        sections[name] = section
        offset += n_bytes + -n_bytes % ALIGNMENT
    check(offset == size, f"its sections need {offset} bytes, the file has {size}")
    check(not any(raw[_HEADER.size + len(SECTIONS) * _SECTION.size : -CHECKSUM_BYTES]), "unknown fields are set")
    return SegmentHeader(token_width, width, vocab_size, dim, n_tokens, n_suffixes, n_docs, path_bytes, n_vectors, fingerprint, sections)


def check_version(path: Path, version: Any) -> None:
    """Raise DatastoreFormatError for another version of the format than this one, DatastoreCorruptError for what is no version."""
    if type(version) is not int:
        raise DatastoreCorruptError(f"{path}: format version {version!r} is no integer")
    if version != FORMAT:
        age = "a later" if version > FORMAT else "an earlier"
        raise DatastoreFormatError(
            f"{path} has format version {version}: it is read by {age} ngramspec, this one reads version {FORMAT}; "
            "use that one, or build the store anew"
        )

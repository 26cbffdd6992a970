"""The bytes of a datastore on disk: the one place that knows them. No look-up, no walking of files, no tokenizer.

Arrays and plain records enter, files leave, and the other way round. A store is a folder of

    MANIFEST         canonical JSON of `Manifest` and its checksum; the only file that is ever replaced
    seg-<16 hex>.ngs immutable segments
    vocab-<16 hex>   u8 per token id: how many line ends its text has
    tokenizer-<16 hex>
                     zlib: the tokenizer as JSON of the `tokenizers` library, canonical (sorted keys, no blanks, ASCII), without
                     truncation and padding; sha256 of the JSON is the fingerprint. Read by who turns text into tokens, not at open

and whatever else begins with `seg-`, `vocab-`, `tokenizer-` or `MANIFEST.tmp-` is rubbish of an interrupted writer. MANIFEST names each
file with its size and checksum. A segment, little-endian:

    header    [320] bytes, see `_HEADER`: sizes, widths, the table of sections, a checksum of all that
    tokens    u16 or u32 [n_tokens]: a separator, then every document followed by one; the separator is all ones
    suffixes  u8 [n_suffixes, width]: little-endian positions p in the order of the text before p read backwards (suffixes.py)
    docs      DOC_DTYPE [n_docs]
    paths     utf-8, one after the other
    vectors   vector_dtype(dim) [n_vectors], the router's; may be empty

Sections lie in this order, each at the first multiple of 64 after the one before, the gap filled with zeros, so that the sizes
fix every offset and a table that says otherwise is refused. A section's checksum covers the zeros after it too: no byte of a
file is unprotected. Opening compares sizes before anything is mapped or allocated, and never reads a body.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import mmap
import os
import re
import secrets
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DatastoreCorruptError, DatastoreError, DatastoreFormatError, DatastoreFullError, DatastoreNotFoundError

FORMAT = 1
MANIFEST = "MANIFEST"
MAGIC = b"NGSTORE\0"
MANIFEST_MAGIC = "ngramspec datastore"
SECTIONS = ("tokens", "suffixes", "docs", "paths", "vectors")
HEADER_BYTES = 320
ALIGNMENT = 64
PLACE_BITS = 40
"""A place is segment << PLACE_BITS | position."""
MAX_TOKENS = 1 << PLACE_BITS
"""Of one segment; five bytes hold a position."""
MAX_MANIFEST_BYTES = 4 << 20
"""JSON takes some twenty times its size in memory. Half a million dead documents fit, and a writer merges long before."""
MAX_TOKENIZER_BYTES = 64 << 20
"""Of its JSON; the largest that are published have half of it."""
CHECKSUM_BYTES = 16

# magic, format, header bytes, flags, token width, suffix width, (2 reserved), vocab_size, vector dim,
# n_tokens, n_suffixes, n_docs, path bytes, n_vectors, fingerprint; then each section's offset, bytes, checksum; then that of all before
_HEADER = struct.Struct("<8sIIIBBHIIQQQQQ32s")
_SECTION = struct.Struct(f"<QQ{CHECKSUM_BYTES}s")
_SEGMENT_NAME = re.compile(r"seg-[0-9a-f]{16}\.ngs\Z")
_VOCABULARY_NAME = re.compile(r"vocab-[0-9a-f]{16}\Z")
_TOKENIZER_NAME = re.compile(r"tokenizer-[0-9a-f]{16}\Z")
_RUBBISH_NAME = re.compile(r"(seg-[0-9a-f]{16}\.ngs|(vocab|tokenizer)-[0-9a-f]{16}|MANIFEST\.tmp-\d+)\Z")
_CHUNK = 1 << 22

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


def vector_dtype(dim: int) -> np.dtype:
    """A router's record: the vector, the document's number, the chunk's first token within the document."""
    return np.dtype([("vector", "<f2", (dim,)), ("doc", "<u4"), ("start", "<u4")])


def separator(token_width: int) -> int:
    """The token that ends every document: all ones."""
    return (1 << 8 * token_width) - 1


def token_dtype(vocab_size: int) -> np.dtype:
    """u16 where all ids and the separator fit, else u32."""
    return np.dtype("<u2") if vocab_size <= 0xFFFF else np.dtype("<u4")


def suffix_width(n_tokens: int) -> int:
    """Bytes of a position: the smallest of 2, 3, 4, 5 that holds n_tokens."""
    return max(2, (n_tokens.bit_length() + 7) // 8)


def digest(data: Any) -> bytes:
    """blake2b-128 of bytes or of a contiguous array."""
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """A segment as MANIFEST names it."""

    name: str
    bytes: int
    checksum: str
    """Of the header, hex: a file that was exchanged for another whole one is noticed."""
    tokens: int
    docs: int
    dead: tuple[int, ...] = ()
    """Documents that were deleted or replaced by a newer segment, rising."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Any other file as MANIFEST names it."""

    name: str
    bytes: int
    checksum: str
    """Of all of it, hex."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One generation of a store."""

    generation: int
    tokenizer_name: str
    tokenizer_fingerprint: str
    """sha256, hex."""
    vocab_size: int
    vocabulary: FileEntry
    tokenizer: FileEntry
    segments: tuple[SegmentEntry, ...]
    sources: list[Any] = field(default_factory=list)
    """What a build walked and how, JSON values; `sources` and `options` belong to the writer."""
    options: dict[str, Any] = field(default_factory=dict)
    writer: str = "ngramspec"


@dataclass(frozen=True, slots=True)
class Section:
    offset: int
    n_bytes: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class Header:
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
    sections: dict[str, Section]


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Views of one segment's bytes; they keep the mapping alive. Nothing in them has been checked but their sizes."""

    path: Path
    header: Header
    tokens: np.ndarray  # u16 or u32 [n_tokens]
    suffixes: np.ndarray  # u8 [n_suffixes, width]
    docs: np.ndarray  # DOC_DTYPE [n_docs]
    paths: np.ndarray  # u8 [path_bytes]
    vectors: np.ndarray  # vector_dtype(dim) [n_vectors]
    data: np.ndarray  # u8, the whole file


# ---- segments


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
    `vector_dtype` array, fingerprint sha256 hex. Raises DatastoreFullError, leaving no file; ValueError for arrays that are no segment.
    """
    if vectors is None:
        vectors = np.empty(0, vector_dtype(0))
    width = suffix_width(len(tokens))
    if tokens.dtype != token_dtype(vocab_size) or not 0 < len(tokens) < MAX_TOKENS or tokens[0] != separator(tokens.dtype.itemsize):
        raise ValueError(f"tokens must be {token_dtype(vocab_size)} and begin with a separator, got {len(tokens)} of {tokens.dtype}")
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
    header += digest(header)
    name = f"seg-{secrets.token_hex(8)}.ngs"
    with _new_file(folder / name) as file:
        file.write(header)
        for body in bodies:
            file.write(body)
            file.write(bytes(-len(body) % ALIGNMENT))
    return SegmentEntry(name, offset, digest(header).hex(), len(tokens), len(docs))


def map_segment(folder: Path, entry: SegmentEntry, copy: bool = False) -> Segment:
    """Map a segment read-only, or read it into memory of its own (huge pages where the system has them).

    Raises DatastoreCorruptError, DatastoreFormatError. A file that another program truncates while it is mapped ends the process
    at the next read beyond its end (SIGBUS), which no check can prevent: where writers are not trusted, use copy=True.
    """
    path = folder / entry.name
    file = _open(path)
    try:
        size = os.fstat(file).st_size
        if size != entry.bytes:
            raise DatastoreCorruptError(f"{path} has {size} bytes, {MANIFEST} says {entry.bytes}")
        raw = _read_exactly(path, file, min(size, HEADER_BYTES))
        header = read_header(path, raw, size)
        if digest(raw).hex() != entry.checksum:
            raise DatastoreCorruptError(f"{path}: header: it is whole, but not the one that {MANIFEST} names")
        if (header.n_tokens, header.n_docs) != (entry.tokens, entry.docs):
            raise DatastoreCorruptError(
                f"{path}: header: {header.n_tokens} tokens in {header.n_docs} documents, {MANIFEST} says {entry.tokens} in {entry.docs}"
            )
        data = np.frombuffer(_read_all(path, file, size) if copy else mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8)
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
        vectors=bodies["vectors"].view(vector_dtype(header.vector_dim)) if header.n_vectors else np.empty(0, vector_dtype(0)),
        data=data,
    )


def check_bodies(segment: Segment, sections: Iterable[str]) -> None:
    """Compare sections with their checksums. Raises DatastoreCorruptError."""
    for name in sections:
        section = segment.header.sections[name]
        end = section.offset + section.n_bytes
        if digest(segment.data[section.offset : end + -end % ALIGNMENT]) != section.checksum:
            raise DatastoreCorruptError(f"{segment.path}: {name}: its checksum is wrong")


def read_header(path: Path, raw: bytes, size: int) -> Header:
    """Check a segment's first bytes against each other and against the file's size. Raises DatastoreCorruptError, DatastoreFormatError."""
    if len(raw) < HEADER_BYTES:
        raise DatastoreCorruptError(f"{path}: header: the file ends after {len(raw)} bytes")
    magic, version, header_bytes, flags, token_width, width, reserved, vocab_size, dim, *sizes, fingerprint = _HEADER.unpack_from(raw)
    n_tokens, n_suffixes, n_docs, path_bytes, n_vectors = sizes
    if magic != MAGIC:
        raise DatastoreCorruptError(f"{path}: header: it begins with {magic!r}, a segment begins with {MAGIC!r}")
    _check_version(path, version)
    if digest(raw[:-CHECKSUM_BYTES]) != raw[-CHECKSUM_BYTES:]:
        raise DatastoreCorruptError(f"{path}: header: its checksum is wrong")

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise DatastoreCorruptError(f"{path}: header: {what}")

    check(header_bytes == HEADER_BYTES and flags == 0 and reserved == 0, f"{header_bytes} bytes with flags {flags}, {reserved}")
    check(0 < vocab_size < 1 << 32, f"a vocabulary of {vocab_size}")
    check(token_width == token_dtype(vocab_size).itemsize, f"tokens of {token_width} bytes for a vocabulary of {vocab_size}")
    check(0 < n_tokens < MAX_TOKENS, f"{n_tokens} tokens")
    check(width == suffix_width(n_tokens), f"suffixes of {width} bytes for {n_tokens} tokens")
    check(n_suffixes < n_tokens and n_docs < n_tokens, f"{n_suffixes} suffixes and {n_docs} documents in {n_tokens} tokens")
    check(dim <= 4096 and (dim > 0 or n_vectors == 0), f"{n_vectors} vectors of {dim} numbers")
    wanted = (
        n_tokens * token_width,
        n_suffixes * width,
        n_docs * DOC_DTYPE.itemsize,
        path_bytes,
        n_vectors * vector_dtype(dim).itemsize,
    )
    sections, offset = {}, HEADER_BYTES
    for i, (name, n_bytes) in enumerate(zip(SECTIONS, wanted, strict=True)):
        section = Section(*_SECTION.unpack_from(raw, _HEADER.size + i * _SECTION.size))
        check(section.n_bytes == n_bytes, f"section {name} has {section.n_bytes} bytes, its counts need {n_bytes}")
        check(section.offset == offset, f"section {name} begins at {section.offset}, those before it end at {offset}")
        sections[name] = section
        offset += n_bytes + -n_bytes % ALIGNMENT
    check(offset == size, f"its sections need {offset} bytes, the file has {size}")
    check(not any(raw[_HEADER.size + len(SECTIONS) * _SECTION.size : -CHECKSUM_BYTES]), "unknown fields are set")
    return Header(token_width, width, vocab_size, dim, n_tokens, n_suffixes, n_docs, path_bytes, n_vectors, fingerprint, sections)


# ---- the tokenizer, and the line ends of its vocabulary


def write_vocabulary(folder: Path, line_ends: np.ndarray) -> FileEntry:
    """line_ends u8 [vocab_size]: how many line ends the text of each token has. Raises DatastoreFullError."""
    return _write_whole(folder, "vocab", np.ascontiguousarray(line_ends, np.uint8).tobytes())


def read_vocabulary(folder: Path, entry: FileEntry) -> np.ndarray:
    """u8 [vocab_size], checked whole. Raises DatastoreCorruptError."""
    return np.frombuffer(_read_whole(folder, entry), np.uint8)


def write_tokenizer(folder: Path, text: bytes) -> FileEntry:
    """`text`: the JSON of which the manifest has the fingerprint. Raises DatastoreFullError, DatastoreError for one that is too large."""
    if len(text) > MAX_TOKENIZER_BYTES:
        raise DatastoreError(f"a tokenizer of {len(text)} bytes of JSON; at most {MAX_TOKENIZER_BYTES} are read")
    return _write_whole(folder, "tokenizer", zlib.compress(text))


def read_tokenizer(folder: Path, manifest: Manifest) -> bytes:
    """The tokenizer's JSON, checked whole and against the fingerprint. Raises DatastoreCorruptError."""
    path = folder / manifest.tokenizer.name
    raw = _read_whole(folder, manifest.tokenizer)
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(raw, MAX_TOKENIZER_BYTES + 1)
    except zlib.error as error:
        raise DatastoreCorruptError(f"{path}: {error}") from error
    if not unpacking.eof or unpacking.unused_data or hashlib.sha256(text).hexdigest() != manifest.tokenizer_fingerprint:
        raise DatastoreCorruptError(f"{path}: it is not the tokenizer of which {MANIFEST} has the fingerprint")
    return text


def _write_whole(folder: Path, kind: str, raw: bytes) -> FileEntry:
    name = f"{kind}-{secrets.token_hex(8)}"
    with _new_file(folder / name) as file:
        file.write(raw)
    return FileEntry(name, len(raw), digest(raw).hex())


def _read_whole(folder: Path, entry: FileEntry) -> bytes:
    path = folder / entry.name
    raw = _read_file(path, entry.bytes)
    if len(raw) != entry.bytes or digest(raw).hex() != entry.checksum:
        raise DatastoreCorruptError(f"{path}: {len(raw)} bytes that are not the {entry.bytes} of which {MANIFEST} has the checksum")
    return raw


# ---- the manifest


def read_manifest(folder: Path) -> Manifest:
    """Raises DatastoreNotFoundError, DatastoreFormatError, DatastoreCorruptError."""
    path = folder / MANIFEST
    raw = _read_file(path, MAX_MANIFEST_BYTES)
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise DatastoreCorruptError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict) or document.get("magic") != MANIFEST_MAGIC:
        raise DatastoreCorruptError(f"{path} is not the manifest of a datastore")
    _check_version(path, document.get("format"))
    checksum = document.pop("checksum", None)
    body = _canonical(document)
    # the bytes themselves are compared, for JSON has several spellings of one value
    if raw != _with_checksum(body) or digest(body).hex() != checksum:
        raise DatastoreCorruptError(f"{path}: its checksum is wrong")
    try:
        return _parse_manifest(document)
    except (KeyError, TypeError, ValueError) as error:
        raise DatastoreCorruptError(f"{path}: {type(error).__name__}: {error}") from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make `manifest` the store's generation: written beside, fsynced, renamed. Raises DatastoreFullError, the old one stays then."""
    document = {
        "magic": MANIFEST_MAGIC,
        "format": FORMAT,
        "writer": manifest.writer,
        "generation": manifest.generation,
        "tokenizer": {
            "name": manifest.tokenizer_name,
            "fingerprint": manifest.tokenizer_fingerprint,
            "file": {name: getattr(manifest.tokenizer, name) for name in FileEntry.__slots__},
        },
        "vocab_size": manifest.vocab_size,
        "vocabulary": {name: getattr(manifest.vocabulary, name) for name in FileEntry.__slots__},
        "segments": [{name: getattr(s, name) for name in SegmentEntry.__slots__} for s in manifest.segments],
        "sources": manifest.sources,
        "options": manifest.options,
    }
    body = _canonical(document)
    raw = _with_checksum(body)
    _parse_manifest(json.loads(body))  # what cannot be read is not written
    if len(raw) > MAX_MANIFEST_BYTES:
        raise DatastoreError(f"a manifest of {len(raw)} bytes; {MAX_MANIFEST_BYTES} are read: merge segments, or name fewer sources")
    partial = folder / f"{MANIFEST}.tmp-{os.getpid()}"
    partial.unlink(missing_ok=True)
    with _new_file(partial) as file:
        file.write(raw)
    try:
        partial.replace(folder / MANIFEST)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _write_error(folder / MANIFEST, error) from error
    sync_folder(folder)


def rubbish(folder: Path, manifest: Manifest | None) -> list[Path]:
    """Files that look like a store's and belong to no generation. To be deleted by the holder of the lock alone."""
    named = {manifest.vocabulary.name, manifest.tokenizer.name, *(s.name for s in manifest.segments)} if manifest else set()
    return sorted(path for path in folder.iterdir() if _RUBBISH_NAME.match(path.name) and path.name not in named)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse_manifest(document: dict[str, Any]) -> Manifest:
    vocab_size = _integer(document["vocab_size"], 1, 1 << 32)
    vocabulary = _parse_file(document["vocabulary"], _VOCABULARY_NAME, vocab_size, vocab_size + 1)
    tokenizer = _parse_file(document["tokenizer"]["file"], _TOKENIZER_NAME, 1, MAX_TOKENIZER_BYTES)
    segments = []
    for item in document["segments"]:
        docs = _integer(item["docs"], 0, 1 << 40)
        dead = tuple(_integer(number, 0, docs) for number in item["dead"])
        if any(a >= b for a, b in itertools.pairwise(dead)):
            raise ValueError(f"dead documents of {item['name']!r} are not rising")
        segments.append(
            SegmentEntry(
                _matching(item["name"], _SEGMENT_NAME),
                _integer(item["bytes"], HEADER_BYTES, 1 << 62),
                _matching(item["checksum"], _HEX32),
                _integer(item["tokens"], 1, MAX_TOKENS),
                docs,
                dead,
            )
        )
    if len({s.name for s in segments}) != len(segments):
        raise ValueError("a segment is named twice")
    if not isinstance(document["sources"], list) or not isinstance(document["options"], dict):
        raise ValueError("`sources` must be a list and `options` an object")
    return Manifest(
        generation=_integer(document["generation"], 0, 1 << 62),
        tokenizer_name=_matching(document["tokenizer"]["name"], _ANY),
        tokenizer_fingerprint=_matching(document["tokenizer"]["fingerprint"], _HEX64),
        vocab_size=vocab_size,
        vocabulary=vocabulary,
        tokenizer=tokenizer,
        segments=tuple(segments),
        sources=document["sources"],
        options=document["options"],
        writer=_matching(document["writer"], _ANY),
    )


def _parse_file(item: dict[str, Any], names: re.Pattern[str], least: int, end: int) -> FileEntry:
    return FileEntry(_matching(item["name"], names), _integer(item["bytes"], least, end), _matching(item["checksum"], _HEX32))


_HEX32, _HEX64, _ANY = re.compile(r"[0-9a-f]{32}\Z"), re.compile(r"[0-9a-f]{64}\Z"), re.compile(r"(?s).*\Z")


def _integer(value: Any, low: int, end: int) -> int:
    if type(value) is not int or not low <= value < end:
        raise ValueError(f"{value!r} where an integer from {low} to {end - 1} is wanted")
    return value


def _matching(value: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.match(value):
        raise ValueError(f"{value!r} where text like {pattern.pattern} is wanted")
    return value


def _canonical(document: dict[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _with_checksum(body: bytes) -> bytes:
    return b'{"checksum":"%s",%s\n' % (digest(body).hex().encode(), body[1:])


def _check_version(path: Path, version: Any) -> None:
    if type(version) is not int:
        raise DatastoreCorruptError(f"{path}: format version {version!r} is no integer")
    if version != FORMAT:
        age = "a later" if version > FORMAT else "an earlier"
        raise DatastoreFormatError(
            f"{path} has format version {version}: it is read by {age} ngramspec, this one reads version {FORMAT}; "
            "use that one, or build the store anew"
        )


# ---- files


def _open(path: Path) -> int:
    """A descriptor of a regular file. Raises DatastoreNotFoundError (MANIFEST), DatastoreCorruptError (any other), DatastoreError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for a writer
    except (FileNotFoundError, NotADirectoryError) as error:
        if path.name == MANIFEST:
            raise DatastoreNotFoundError(f"{path.parent} is not a datastore: it has no file {MANIFEST}") from error
        raise DatastoreCorruptError(f"{path} is missing, {MANIFEST} names it") from error
    except OSError as error:
        raise DatastoreError(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise DatastoreCorruptError(f"{path} is not a regular file")
    return file


def _read_file(path: Path, limit: int) -> bytes:
    file = _open(path)
    try:
        size = os.fstat(file).st_size
        if size > limit:
            raise DatastoreCorruptError(f"{path} has {size} bytes, at most {limit} are read")
        return _read_exactly(path, file, size)
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(file)


def _read_exactly(path: Path, file: int, size: int) -> bytes:
    raw = os.pread(file, size, 0)
    if len(raw) != size:
        raise DatastoreCorruptError(f"{path} was truncated while it was read: {len(raw)} of {size} bytes")
    return raw


def _read_all(path: Path, file: int, size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    with memoryview(memory) as view:
        done = 0
        while done < size:
            with view[done : done + _CHUNK] as piece:
                n = os.preadv(file, [piece], done)
            if n == 0:
                raise DatastoreCorruptError(f"{path} was truncated while it was read: {done} of {size} bytes")
            done += n
    return memory


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Any]:
    """A file to be written, fsynced at the end; none is left where that fails."""
    try:
        with path.open("xb", buffering=0) as raw:
            yield WholeWriter(raw)
            os.fsync(raw.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _write_error(path, error) from error
        raise


class WholeWriter:
    """write() that writes all of it: a raw file may take less, and a buffered one copies."""

    def __init__(self, file: Any):
        self.file = file

    def write(self, data: bytes | memoryview) -> None:
        with memoryview(data) as view:
            done = 0
            while done < len(view):
                with view[done : done + (1 << 30)] as piece:
                    done += self.file.write(piece)


def _write_error(path: Path, error: OSError) -> DatastoreError:
    kind = DatastoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else DatastoreError
    return kind(f"{path} cannot be written: {error.strerror}")

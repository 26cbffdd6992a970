"""Damaged, truncated and forged datastores: a typed error, or drafts that are merely poor. No crash, no hang, no memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import mmap
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_store

from ngramspec.datastore import format as layout
from ngramspec.datastore import manifest as manifests
from ngramspec.datastore.errors import DatastoreCorruptError, DatastoreError
from ngramspec.datastore.lookup import Matcher
from ngramspec.datastore.lookup_arrays import ROWS
from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.search import N_SUFFIXES, N_TOKENS, SUFFIXES, TOKENS, WIDTH, find_occurrences
from ngramspec.datastore.suffix_array import pack_positions

VOCAB = 500
ROOM = 128 << 20
SECTION_TABLE = layout._HEADER.size


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with repeating text, a dead document and vectors; what is compiled is compiled here."""
    folder = tmp_path_factory.mktemp("store")
    rng = np.random.default_rng(0)
    phrases = [rng.integers(0, VOCAB, 20).tolist() for _ in range(6)]
    documents = [[token for i in rng.integers(0, 6, 8) for token in phrases[i]] for _ in range(9)]
    manifest = tiny_store.write_store(folder, [documents], VOCAB, dead=[[4]])
    segment = layout.map_segment(folder, manifest.segments[0])
    vectors = np.ones(5, layout.make_vector_dtype(3))
    parts = {name: getattr(segment, name) for name in ("tokens", "suffixes", "docs")}
    entry = layout.write_segment(
        folder, **parts, paths=bytes(segment.paths), vectors=vectors, vocab_size=VOCAB, fingerprint=tiny_store.FINGERPRINT
    )
    (folder / manifest.segments[0].name).unlink()
    manifests.write_manifest(folder, dataclasses.replace(manifest, segments=(dataclasses.replace(entry, tombstones=(4,)),)))
    for copy in (False, True):
        use(Datastore.open(folder, verify="full", copy=copy), limit_s=240)  # compiles
    return folder


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.fixture(autouse=True)
def little_memory(whole: Path) -> Iterator[None]:
    """Nothing may take more than 128 MB beyond what the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def segment_file(folder: Path) -> Path:
    (path,) = folder.glob("seg-*.ngs")
    return path


def use(datastore: Datastore, everything: bool = True, limit_s: float = 5) -> None:
    """Everything that reads a body. Drafts must be well-formed whatever the body holds."""
    snapshot = datastore.snapshot
    matcher = Matcher([snapshot], 4, occurrences=16)
    text = snapshot.segments[0].tokens
    contexts = np.full((4, 64), -1, np.int32)
    for b, at in enumerate((25, 70, 200, len(text) // 2)):
        newest = text[max(at - 64, 0) : at][::-1].astype(np.int64)
        contexts[b, : len(newest)] = np.minimum(newest, VOCAB - 1)
    slots = np.arange(4, dtype=np.int32)
    started = time.process_time()
    for fresh in (-1, 0, 1):
        trees = matcher.propose(slots, contexts, np.full(4, fresh, np.int32))
        parents = trees.parents - np.concatenate([np.arange(n) for n in np.diff(trees.start)])
        assert trees.start[-1] == len(trees.tokens)
        assert (np.diff(trees.start) >= 0).all()
        assert ((trees.tokens >= 0) & (trees.tokens < VOCAB)).all()
        assert ((trees.parents >= -1) & (parents < 0)).all()
        assert ((trees.counts >= 1) & (trees.counts <= 16)).all()
        assert ((trees.place >> 40 == 0) & (trees.place < len(text))).all()
    assert time.process_time() - started < limit_s
    if everything:
        with contextlib.suppress(DatastoreError):
            for place in trees.place[:5].tolist():
                assert isinstance(matcher.locate(place).path, str)
        with contextlib.suppress(DatastoreError):
            assert datastore.lookup([int(x) for x in contexts[0, :20][::-1]]).count >= 0
        with contextlib.suppress(DatastoreError):
            for document in snapshot.iterate_documents():
                assert len(snapshot.text_tokens(document.segment, document.number)) == document.n_tokens


def refused(folder: Path) -> None:
    """Opening is a typed error, mapped and copied."""
    for copy in (False, True):
        with pytest.raises(DatastoreError):
            Datastore.open(folder, copy=copy)


def refused_or_harmless(folder: Path) -> None:
    for copy in (False, True):
        with contextlib.suppress(DatastoreError):
            use(Datastore.open(folder, copy=copy))
        with contextlib.suppress(DatastoreError):
            use(Datastore.open(folder, copy=copy, verify="full"))


def test_every_bit_of_the_header(store: Path) -> None:
    path = segment_file(store)
    raw = bytearray(path.read_bytes())
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * layout.HEADER_BYTES):
            file.seek(bit // 8)
            file.write(bytes([raw[bit // 8] ^ 1 << bit % 8]))
            refused(store)
            file.seek(bit // 8)
            file.write(raw[bit // 8 : bit // 8 + 1])
    use(Datastore.open(store, verify="full"))


def test_every_bit_of_the_manifest(store: Path) -> None:
    path = store / layout.MANIFEST
    raw = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(raw)):
            file.seek(bit // 8)
            file.write(bytes([raw[bit // 8] ^ 1 << bit % 8]))
            with pytest.raises(DatastoreError):
                Datastore.open(store)
            file.seek(bit // 8)
            file.write(raw[bit // 8 : bit // 8 + 1])
        Datastore.open(store)
        for length in reversed(range(len(raw))):
            file.truncate(length)
            with pytest.raises(DatastoreError):
                Datastore.open(store)


def test_every_byte_of_the_vocabulary(store: Path) -> None:
    (path,) = store.glob("vocab-*")
    raw = path.read_bytes()
    for i in range(len(raw)):
        path.write_bytes(raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :])
        with pytest.raises(DatastoreCorruptError):
            Datastore.open(store)
    for damaged in (raw[:-1], raw + b"\0", b""):
        path.write_bytes(damaged)
        with pytest.raises(DatastoreCorruptError):
            Datastore.open(store)


@pytest.mark.parametrize("copy", [False, True])
def test_eight_thousand_bits_of_the_body(store: Path, copy: bool) -> None:
    """Opening does not read bodies: drafts are harmless. A full check notices every one of them, padding included."""
    path = segment_file(store)
    raw = path.read_bytes()
    bits = np.random.default_rng(1 + copy).integers(8 * layout.HEADER_BYTES, 8 * len(raw), 4_000)
    with path.open("r+b", buffering=0) as file:
        for n, bit in enumerate(bits.tolist()):
            file.seek(bit // 8)
            file.write(bytes([raw[bit // 8] ^ 1 << bit % 8]))
            with contextlib.suppress(DatastoreCorruptError):  # the record of the dead document is read at once
                use(Datastore.open(store, copy=copy), everything=n % 10 == 0)
            with pytest.raises(DatastoreCorruptError, match=r"checksum|docs"):
                Datastore.open(store, verify="full", copy=copy)
            file.seek(bit // 8)
            file.write(raw[bit // 8 : bit // 8 + 1])
    use(Datastore.open(store, verify="full", copy=copy))


def test_truncation(store: Path) -> None:
    """At every section's boundary, one byte before and after it, and at 1,000 lengths; also where the manifest says so."""
    path = segment_file(store)
    raw = path.read_bytes()
    sections = layout.read_header(path, raw[: layout.HEADER_BYTES], len(raw)).sections.values()
    edges = {s.offset for s in sections} | {s.offset + s.n_bytes for s in sections} | {0, len(raw)}
    lengths = {edge + d for edge in edges for d in (-1, 0, 1)} | set(np.random.default_rng(2).integers(0, len(raw), 1000).tolist())
    with path.open("r+b", buffering=0) as file:
        for length in sorted(lengths - {-1, len(raw)}, reverse=True):
            file.truncate(length)
            refused(store)
            rewrite_manifest(store, at("segments", 0, "bytes", value=max(length, layout.HEADER_BYTES)))
            refused(store)
            rewrite_manifest(store, at("segments", 0, "bytes", value=len(raw)))


def test_a_copy_outlives_the_truncation_of_its_file(store: Path) -> None:
    """A mapped file does not: the process ends. That is what copy=True is for."""
    datastore = Datastore.open(store, copy=True)
    segment_file(store).write_bytes(b"")
    use(datastore)


# ---- forgeries: every checksum is right


def forge(folder: Path, change: Callable[[bytearray], None]) -> None:
    """Change a segment, then make all checksums true again: sections', header's and manifest's."""
    path = segment_file(folder)
    raw = bytearray(path.read_bytes())
    change(raw)
    for i in range(len(layout.SECTIONS)):
        offset, n_bytes, _ = layout._SECTION.unpack_from(raw, SECTION_TABLE + i * layout._SECTION.size)
        covered = raw[offset : offset + n_bytes + -n_bytes % layout.ALIGNMENT] if offset + n_bytes < 1 << 40 else b""
        layout._SECTION.pack_into(raw, SECTION_TABLE + i * layout._SECTION.size, offset, n_bytes, layout.compute_digest(bytes(covered)))
    end = layout.HEADER_BYTES - layout.CHECKSUM_BYTES
    raw[end : layout.HEADER_BYTES] = layout.compute_digest(bytes(raw[:end]))
    path.write_bytes(raw)
    n_tokens, _, n_docs = struct.unpack_from("<QQQ", raw, 32)
    told = {
        "bytes": len(raw),
        "checksum": layout.compute_digest(bytes(raw[: layout.HEADER_BYTES])).hex(),
        "tokens": n_tokens,
        "docs": n_docs,
    }
    rewrite_manifest(folder, lambda document: document["segments"][0].update(told))


def test_a_forgery_that_changes_nothing_is_whole(store: Path) -> None:
    forge(store, lambda raw: None)
    use(Datastore.open(store, verify="full"))


FIELDS = {
    "format": ("<I", 8),
    "header_bytes": ("<I", 12),
    "flags": ("<I", 16),
    "token_width": ("<B", 20),
    "suffix_width": ("<B", 21),
    "reserved": ("<H", 22),
    "vocab_size": ("<I", 24),
    "vector_dim": ("<I", 28),
    "n_tokens": ("<Q", 32),
    "n_suffixes": ("<Q", 40),
    "n_docs": ("<Q", 48),
    "path_bytes": ("<Q", 56),
    "n_vectors": ("<Q", 64),
}
FIELDS |= {f"{name}.offset": ("<Q", SECTION_TABLE + 32 * i) for i, name in enumerate(layout.SECTIONS)}
FIELDS |= {f"{name}.bytes": ("<Q", SECTION_TABLE + 32 * i + 8) for i, name in enumerate(layout.SECTIONS)}


@pytest.mark.parametrize("field", FIELDS)
def test_a_forged_field_of_the_header(store: Path, field: str) -> None:
    """Any size that the file does not have is refused, before memory is taken for it."""
    kind, at = FIELDS[field]
    (true,) = struct.unpack_from(kind, segment_file(store).read_bytes(), at)
    most = (1 << 8 * struct.calcsize(kind)) - 1
    for value in {0, 1, true - 1, true + 1, 2 * true, true + 64, most // 2, most - 63, most} - {true}:
        if 0 <= value <= most:
            forge(store, lambda raw, value=value: struct.pack_into(kind, raw, at, value))  # type: ignore[misc]
            if field == "vocab_size":
                refused_or_harmless(store)
            else:
                refused(store)
    forge(store, lambda raw: struct.pack_into(kind, raw, at, true))
    use(Datastore.open(store, verify="full"))


def fill(
    section: str, array: Callable[[np.ndarray, np.random.Generator], None], dtype: str | np.dtype = "u1"
) -> Callable[[bytearray], None]:
    """A change that has the section as an array."""

    def change(raw: bytearray) -> None:
        offset, n_bytes, _ = layout._SECTION.unpack_from(raw, SECTION_TABLE + layout.SECTIONS.index(section) * layout._SECTION.size)
        array(np.frombuffer(raw, np.uint8)[offset : offset + n_bytes].view(dtype), np.random.default_rng(3))

    return change


def put(field: str, values: list[int]) -> Callable[[np.ndarray, np.random.Generator], None]:
    def assign(docs: np.ndarray, rng: np.random.Generator) -> None:
        docs[field] = rng.choice(np.array(values, docs[field].dtype), len(docs))

    return assign


BODIES = {
    "suffixes all ones": fill("suffixes", lambda a, rng: a.fill(0xFF)),
    "suffixes all zero": fill("suffixes", lambda a, rng: a.fill(0)),
    "suffixes at random": fill("suffixes", lambda a, rng: a.__setitem__(slice(None), rng.integers(0, 256, len(a)))),
    "suffixes backwards": fill("suffixes", lambda a, rng: a.__setitem__(slice(None), a[::-1].copy()), "<u2"),
    "suffixes all one place": fill("suffixes", lambda a, rng: a.fill(30), "<u2"),
    "suffixes at the end": fill("suffixes", lambda a, rng: a.fill(1440), "<u2"),
    "tokens at random": fill("tokens", lambda a, rng: a.__setitem__(slice(None), rng.integers(0, 1 << 16, len(a))), "<u2"),
    "tokens without separators": fill("tokens", lambda a, rng: a.__setitem__(a == 0xFFFF, 7), "<u2"),
    "tokens all alike": fill("tokens", lambda a, rng: a.fill(7), "<u2"),
    "tokens all separators": fill("tokens", lambda a, rng: a.fill(0xFFFF), "<u2"),
    "starts out of range": fill("docs", put("start", [0, 1 << 40, (1 << 64) - 1, 1 << 63]), layout.DOC_DTYPE),
    "starts all alike": fill("docs", put("start", [1]), layout.DOC_DTYPE),
    "lengths out of range": fill("docs", put("length", [(1 << 32) - 1, 1 << 20]), layout.DOC_DTYPE),
    "path offsets out of range": fill("docs", put("path_offset", [(1 << 64) - 1, 1 << 32]), layout.DOC_DTYPE),
    "path sizes out of range": fill("docs", put("path_bytes", [(1 << 32) - 1, 1 << 31]), layout.DOC_DTYPE),
    "docs at random": fill("docs", lambda a, rng: a.__setitem__(slice(None), rng.integers(0, 256, len(a)))),
    "paths no text": fill("paths", lambda a, rng: a.fill(0xFF)),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("dead", [(), (0, 8)])
def test_a_forged_body(store: Path, body: str, dead: tuple[int, ...]) -> None:
    """Whatever stands there, no read leaves the file, and a full check says what is wrong."""
    forge(store, BODIES[body])
    rewrite_manifest(store, at("segments", 0, "dead", value=list(dead)))
    refused_or_harmless(store)
    for copy in (False, True):
        with pytest.raises(DatastoreCorruptError, match=r"suffixes|tokens|docs|paths"):
            Datastore.open(store, verify="full", copy=copy)


class Guarded:
    """Bytes that fill whole pages between two that nobody may touch: a read outside them ends the process."""

    def __init__(self, data: bytes):
        page = mmap.PAGESIZE
        assert len(data) % page == 0
        self.memory = mmap.mmap(-1, len(data) + 2 * page)
        self.memory[page : page + len(data)] = data
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.address = start + page
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for guard in (start, start + page + len(data)):
            assert protect(guard, page, 0) == 0


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("kind", ["anything", "ends", "sorted"])
@pytest.mark.parametrize("vocab_size", [VOCAB, 70_000])
def test_no_read_leaves_the_arrays(tmp_path: Path, vocab_size: int, kind: str, width: int) -> None:
    """Tokens without a separator anywhere, positions of every width that point outside, at both ends, or everywhere in order."""
    tiny_store.write_store(tmp_path, [[[1, 2, 3]]], vocab_size)
    snapshot = Datastore.open(tmp_path).snapshot
    rng = np.random.default_rng(width)
    dtype = layout.choose_token_dtype(vocab_size)
    n = mmap.PAGESIZE // dtype.itemsize
    positions = {
        "anything": rng.integers(0, 1 << 8 * width, mmap.PAGESIZE),
        "ends": rng.choice([0, 1, 2, n - 3, n - 2, n - 1, n, n + 1], mmap.PAGESIZE),
        "sorted": np.sort(rng.integers(1, n, mmap.PAGESIZE)),
    }[kind]
    tokens, suffixes = Guarded(np.full(n, 7, dtype).tobytes()), Guarded(pack_positions(positions, width).tobytes())
    matcher = Matcher([snapshot], 2)
    row = matcher._buffers[ROWS][0]
    row[TOKENS], row[N_TOKENS], row[SUFFIXES], row[N_SUFFIXES], row[WIDTH] = tokens.address, n, suffixes.address, len(positions), width
    slots, longest = np.arange(2, dtype=np.int32), np.full(64, 7, np.int32)
    for newest in (7, 6, 8):
        contexts = np.full((2, 64), 7, np.int32)
        contexts[1, 3], contexts[1, 5:] = newest, -1
        for fresh in (-1, 1, 20, 60, 0):
            trees = matcher.propose(slots, contexts, np.full(2, fresh, np.int32))
            assert (trees.tokens == 7).all()
            assert ((trees.place >= 1) & (trees.place < n)).all()
        assert find_occurrences(row[None], contexts[1], 5, np.empty(100, np.int64))[0] <= 100
        assert find_occurrences(row[None], longest, 64, np.empty(100, np.int64))[0] <= 100


def rewrite_manifest(folder: Path, change: Callable[[dict], None]) -> None:
    """Change the manifest's values and make its checksum true again."""
    document = json.loads((folder / layout.MANIFEST).read_bytes())
    document.pop("checksum")
    change(document)
    body = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    (folder / layout.MANIFEST).write_bytes(b'{"checksum":"%s",%s\n' % (digest.encode(), body[1:]))


def at(*keys: str | int, value: object) -> Callable[[dict], None]:
    def change(document: dict) -> None:
        for key in keys[:-1]:
            document = document[key]  # type: ignore[index]
        document[keys[-1]] = value  # type: ignore[index]

    return change


FORGED_MANIFESTS = {
    "a path as a name": at("segments", 0, "name", value="../../etc/passwd"),
    "a name of two lines": at("segments", 0, "name", value="seg-0123456789abcdef.ngs\n"),
    "huge": at("segments", 0, "bytes", value=1 << 61),
    "negative": at("segments", 0, "tokens", value=-1),
    "true for one": at("segments", 0, "docs", value=True),
    "a number like a word": at("generation", value="1"),
    "infinite": at("generation", value=float("inf")),
    "more dead than there are": at("segments", 0, "dead", value=[9]),
    "dead and falling": at("segments", 0, "dead", value=[3, 2]),
    "other documents": at("segments", 0, "docs", value=8),
    "other tokens": at("segments", 0, "tokens", value=5),
    "no segments": at("segments", value=None),
    "a segment that is a list": at("segments", value=[[]]),
    "another vocabulary": at("vocab_size", value=VOCAB + 1),
    "a huge vocabulary": at("vocab_size", value=1 << 31),
    "another tokenizer": at("tokenizer", "fingerprint", value="0" * 64),
    "no tokenizer": at("tokenizer", value=[]),
    "another magic": at("magic", value="sqlite"),
    "a format of words": at("format", value="1"),
    "another file as the vocabulary": at("vocabulary", "name", value="MANIFEST"),
}


@pytest.mark.parametrize("change", FORGED_MANIFESTS)
def test_a_forged_manifest(store: Path, change: str) -> None:
    rewrite_manifest(store, lambda document: None)
    use(Datastore.open(store))
    rewrite_manifest(store, FORGED_MANIFESTS[change])
    refused(store)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"{}", b"null", b"", b"\xff\xfe", b"9" * 100_000, b'{"magic":"ngramspec datastore"}'])
def test_a_manifest_that_is_something_else(store: Path, raw: bytes) -> None:
    (store / layout.MANIFEST).write_bytes(raw)
    refused(store)


def test_a_huge_manifest_is_not_read(store: Path) -> None:
    with (store / layout.MANIFEST).open("r+b") as file:
        file.truncate(1 << 33)
    with pytest.raises(DatastoreCorruptError, match="at most"):
        Datastore.open(store)
    lists = b"[" + b"[]," * ((manifests.MAX_MANIFEST_BYTES - 4) // 3) + b"0]"
    (store / layout.MANIFEST).write_bytes(lists)
    refused(store)

"""The bytes of a datastore: what is written is read, whatever its widths; what goes wrong is a typed error and leaves the old store."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import tiny_store
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.datastore import format as layout
from ngramspec.datastore import manifest as manifests
from ngramspec.datastore.errors import (
    DatastoreCorruptError,
    DatastoreError,
    DatastoreFormatError,
    DatastoreFullError,
    DatastoreNotFoundError,
    TokenizerMismatchError,
)
from ngramspec.datastore.integrity import find_first_disorder
from ngramspec.datastore.reader import Datastore
from ngramspec.datastore.suffix_array import pack_positions, sort_suffixes, unpack

VOCABULARIES = [3, 300, 65535, 65536, 1 << 25]


def documents(vocab_size: int, max_docs: int = 6) -> st.SearchStrategy[list[list[int]]]:
    """Few different ids, so that texts repeat, and the largest one."""
    ids = st.sampled_from(sorted({0, 1, min(255, vocab_size - 1), min(256, vocab_size - 1), vocab_size - 1}))
    return st.lists(st.lists(ids, max_size=12), max_size=max_docs)


@given(data=st.data(), vocab_size=st.sampled_from(VOCABULARIES))
@settings(max_examples=60, deadline=None)
def test_suffixes_are_sorted_by_the_text_before_read_backwards(data: st.DataObject, vocab_size: int) -> None:
    tokens, _, _ = tiny_store.segment_arrays(data.draw(documents(vocab_size)), vocab_size)
    mark = layout.get_separator(tokens.dtype.itemsize)
    wanted = [p for p in range(1, len(tokens)) if tokens[p] != mark and tokens[p - 1] != mark]
    wanted.sort(key=lambda p: tokens[:p][::-1].tolist())
    suffixes = sort_suffixes(tokens, 3)
    assert unpack(suffixes).tolist() == wanted
    assert find_first_disorder(tokens, suffixes) == -1


@given(docs=documents(3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_check_of_the_order_finds_what_is_out_of_order(docs: list[list[int]], data: st.DataObject) -> None:
    tokens, _, _ = tiny_store.segment_arrays(docs, 3)
    good = unpack(sort_suffixes(tokens, 2))
    if len(good) < 2:
        return
    i, j = sorted(data.draw(st.lists(st.integers(0, len(good) - 1), min_size=2, max_size=2, unique=True)))

    def before(p: int) -> list[int]:
        """The text that look-ups compare: up to the separator."""
        backwards = tokens[:p][::-1].tolist()
        return backwards[: backwards.index(0xFFFF)]

    swapped = good.copy()
    swapped[[i, j]] = swapped[[j, i]]
    texts = [[*before(p), 0xFFFF] for p in swapped]
    assert (find_first_disorder(tokens, pack_positions(swapped, 2)) == -1) <= (texts == sorted(texts))
    assert find_first_disorder(tokens, pack_positions(np.delete(good, i), 2)) >= 0
    twice = good.copy()
    twice[i] = good[j]
    assert find_first_disorder(tokens, pack_positions(twice, 2)) >= 0
    twice[i] = 0xFFF0
    assert find_first_disorder(tokens, pack_positions(twice, 2)) == i


@pytest.mark.parametrize(("n_tokens", "width"), [(0, 2), (65535, 2), (65536, 3), (2**24 - 1, 3), (2**24, 4), (2**32 - 1, 4), (2**32, 5)])
def test_positions_take_the_fewest_bytes_that_hold_them(n_tokens: int, width: int) -> None:
    assert layout.compute_suffix_width(n_tokens) == width
    positions = np.array([0, 1, n_tokens // 3, n_tokens], np.int64)
    assert unpack(pack_positions(positions, width)).tolist() == positions.tolist()


@given(data=st.data(), vocab_size=st.sampled_from([3, 300, 65535, 65536]), copy=st.booleans(), n_vectors=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_segment_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, vocab_size: int, copy: bool, n_vectors: int
) -> None:
    folder = tmp_path_factory.mktemp("store")
    tokens, docs, paths = tiny_store.segment_arrays(data.draw(documents(vocab_size)), vocab_size)
    suffixes = sort_suffixes(tokens, layout.compute_suffix_width(len(tokens)))
    vectors = np.zeros(n_vectors, layout.make_vector_dtype(5))
    vectors["vector"] = np.arange(5 * n_vectors).reshape(-1, 5)
    vectors["doc"] = 7
    parts = {"tokens": tokens, "suffixes": suffixes, "docs": docs, "paths": paths, "vectors": vectors}
    entry = layout.write_segment(folder, **parts, vocab_size=vocab_size, fingerprint=tiny_store.FINGERPRINT)
    segment = layout.map_segment(folder, entry, copy=copy)
    for name, array in parts.items():
        read = getattr(segment, name)
        assert read.tobytes() == (array if isinstance(array, bytes) else array.tobytes())
        assert (read.ctypes.data - segment.data.ctypes.data) % layout.ALIGNMENT == 0 or not len(read)
    assert (folder / entry.name).stat().st_size == entry.bytes


def test_a_store_of_three_byte_positions_and_wide_tokens_passes_a_full_check(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tiny_store.write_store(tmp_path, [[rng.integers(0, 9, 70_000).tolist(), []]], 70_000)
    with Datastore.open(tmp_path, verify="full") as store:
        header = store.snapshot.segments[0].header
        assert (header.token_width, header.suffix_width) == (4, 3)
        assert store.info()["documents"] == 2


def test_the_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = tiny_store.write_store(tmp_path, [[[1, 2], [3]], [[4]]], 9, dead=[[1], []])
    assert manifests.read_manifest(tmp_path) == manifest
    assert manifests.find_orphans(tmp_path, manifest) == []
    left = tmp_path / "seg-0123456789abcdef.ngs"
    left.touch()
    (tmp_path / "tokenizer-0123456789abcdef").touch()
    (tmp_path / "MANIFEST.tmp-12").touch()
    (tmp_path / "notes.txt").touch()
    assert manifests.find_orphans(tmp_path, manifest) == [tmp_path / "MANIFEST.tmp-12", left, tmp_path / "tokenizer-0123456789abcdef"]
    assert manifests.read_tokenizer(tmp_path, manifest) == tiny_store.TOKENIZER


@pytest.mark.parametrize(
    "change",
    [
        {"generation": -1},
        {"vocab_size": 0},
        {"tokenizer_fingerprint": "abc"},
        {"tokenizer": manifests.FileEntry("../tokenizer-0123456789abcdef", 10, "0" * 32)},
        {"tokenizer": manifests.FileEntry("tokenizer-0123456789abcdef", 0, "0" * 32)},
        {"tokenizer": manifests.FileEntry("tokenizer-0123456789abcdef", 1 << 40, "0" * 32)},
        {"segments": (layout.SegmentEntry("../etc/passwd", 400, "0" * 32, 3, 1),)},
        {"segments": (layout.SegmentEntry("seg-0123456789abcdef.ngs", 400, "0" * 32, 3, 1, (1,)),)},
        {"segments": (layout.SegmentEntry("seg-0123456789abcdef.ngs", 400, "0" * 32, 3, 3, (1, 1)),)},
        {"segments": 2 * (layout.SegmentEntry("seg-0123456789abcdef.ngs", 400, "0" * 32, 3, 1),)},
    ],
)
def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path: Path, change: dict[str, object]) -> None:
    manifest = tiny_store.write_store(tmp_path, [[[1, 2]]], 9)
    with pytest.raises((ValueError, TypeError)):
        manifests.write_manifest(tmp_path, dataclasses.replace(manifest, **change))  # type: ignore[arg-type]
    assert manifests.read_manifest(tmp_path) == manifest


def test_another_format_version_says_who_reads_it(tmp_path: Path) -> None:
    manifest = tiny_store.write_store(tmp_path, [[[1, 2]]], 9)
    original = (tmp_path / layout.MANIFEST).read_bytes()
    for version, reader in ((2, "a later ngramspec"), (0, "an earlier ngramspec")):
        (tmp_path / layout.MANIFEST).write_bytes(original.replace(b'"format":1', b'"format":%d' % version))
        with pytest.raises(DatastoreFormatError, match=f"version {version}: it is read by {reader}, this one reads version 1"):
            Datastore.open(tmp_path)
    (tmp_path / layout.MANIFEST).write_bytes(original)
    raw = bytearray((tmp_path / manifest.segments[0].name).read_bytes())
    raw[8] = 2
    (tmp_path / manifest.segments[0].name).write_bytes(raw)
    with pytest.raises(DatastoreFormatError, match="version 2: it is read by a later ngramspec"):
        Datastore.open(tmp_path)


def test_a_store_made_with_another_tokenizer_is_refused_with_both_names(tmp_path: Path) -> None:
    tiny_store.write_store(tmp_path, [[[1, 2]]], 9)
    assert Datastore.open(tmp_path, tokenizer_fingerprint=tiny_store.FINGERPRINT, tokenizer_name="tiny").n_tokens == 4
    with pytest.raises(TokenizerMismatchError, match=r"(?s)'tiny'.*'large'"):
        Datastore.open(tmp_path, tokenizer_fingerprint="0" * 64, tokenizer_name="large")


def test_what_is_no_store_is_said_to_be_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, why in (
        (tmp_path, "it has no file MANIFEST"),
        (tmp_path / "nothing", "there is no such folder"),
        (file, "it has no file MANIFEST"),
    ):
        with pytest.raises(DatastoreNotFoundError, match=why):
            Datastore.open(path)
    (tmp_path / layout.MANIFEST).mkdir()
    with pytest.raises(DatastoreError, match="not a regular file"):
        Datastore.open(tmp_path)


def test_a_pipe_instead_of_a_file_does_not_wait(tmp_path: Path) -> None:
    manifest = tiny_store.write_store(tmp_path, [[[1, 2]]], 9)
    for name in (manifest.segments[0].name, manifest.vocabulary.name, layout.MANIFEST):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(DatastoreCorruptError, match="not a regular file"):
            Datastore.open(tmp_path)


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    manifest = tiny_store.write_store(tmp_path, [[[1, 2]]], 9)
    (tmp_path / manifest.segments[0].name).unlink()
    with pytest.raises(DatastoreCorruptError, match=f"{manifest.segments[0].name} is missing"):
        Datastore.open(tmp_path)


def test_a_full_disk_leaves_the_old_generation_and_no_rubbish(tmp_path: Path) -> None:
    manifest = tiny_store.write_store(tmp_path, [[[1, 2]]], 9)
    before = sorted(tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, hard))
        with pytest.raises(DatastoreFullError, match="cannot be written"):
            tiny_store.add_segment(tmp_path, [[1, 2, 3] * 100], 9)
        with pytest.raises(DatastoreFullError, match="cannot be written"):
            manifests.write_manifest(tmp_path, dataclasses.replace(manifest, generation=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
    assert manifests.read_manifest(tmp_path) == manifest


def test_a_reader_picks_up_the_next_generation_and_keeps_what_both_name(tmp_path: Path) -> None:
    manifest = tiny_store.write_store(tmp_path, [[[1, 2, 3]]], 9)
    store = Datastore.open(tmp_path)
    assert not store.refresh()
    held = store.snapshot
    added = tiny_store.add_segment(tmp_path, [[4, 5, 6, 7]], 9)
    old = dataclasses.replace(manifest.segments[0], tombstones=(0,))
    manifests.write_manifest(tmp_path, dataclasses.replace(manifest, generation=2, segments=(old, added)))
    assert store.refresh()
    assert not store.refresh()
    assert (store.generation, store.n_tokens, held.generation, held.n_tokens) == (2, 11, 1, 5)
    assert store.snapshot.segments[0] is held.segments[0]
    assert [(d.segment, d.path) for d in store.snapshot.iterate_documents()] == [(1, "0/é.py")]
    assert held.text_tokens(0, 0).tolist() == [1, 2, 3]


def test_a_damaged_new_generation_is_an_error_and_the_old_one_stays(tmp_path: Path) -> None:
    manifest = tiny_store.write_store(tmp_path, [[[1, 2, 3]]], 9)
    store = Datastore.open(tmp_path)
    gone = layout.SegmentEntry("seg-0123456789abcdef.ngs", 400, "0" * 32, 3, 1)
    manifests.write_manifest(tmp_path, dataclasses.replace(manifest, generation=2, segments=(gone,)))
    for _ in range(2):
        with pytest.raises(DatastoreCorruptError, match="is missing"):
            store.refresh()
    assert store.generation == 1
    assert store.lookup([1, 2]).continuations == [(3, 1)]
    (tmp_path / layout.MANIFEST).unlink()
    with pytest.raises(DatastoreNotFoundError):
        store.refresh()
    manifests.write_manifest(tmp_path, dataclasses.replace(manifest, generation=3))
    assert store.refresh()
    assert store.generation == 3


def test_documents_are_listed_as_they_were_written(tmp_path: Path) -> None:
    segments = [[[1, 2, 3], [], [4]], [[5, 6]]]
    tiny_store.write_store(tmp_path, segments, 9, dead=[[1], []])
    store = Datastore.open(tmp_path)
    listed = list(store.snapshot.iterate_documents())
    assert [(d.segment, d.number, d.path, d.size, d.mtime_ns, d.n_tokens) for d in listed] == [
        (0, 0, "0/é.py", 9, 1000, 3),
        (0, 2, "2/é.py", 3, 1002, 1),
        (1, 0, "0/é.py", 6, 1000, 2),
    ]
    _, docs, _ = tiny_store.segment_arrays(segments[0], 9)
    assert [d.hash for d in listed[:2]] == [docs["hash"][0].tobytes(), docs["hash"][2].tobytes()]
    assert [store.snapshot.text_tokens(d.segment, d.number).tolist() for d in listed] == [[1, 2, 3], [4], [5, 6]]
    assert json.loads(json.dumps(store.info()))["dead_documents"] == 1


@given(docs=documents(9).filter(any), copy=st.booleans())
@settings(max_examples=20, deadline=None)
def test_every_place_has_its_file_line_and_offset(tmp_path_factory: pytest.TempPathFactory, docs: list[list[int]], copy: bool) -> None:
    folder = tmp_path_factory.mktemp("store")
    tiny_store.write_store(folder, [[[1]], docs], 9)
    snapshot = Datastore.open(folder, copy=copy).snapshot
    position = 1
    for number, document in enumerate(docs):
        for offset in range(len(document)):
            found = snapshot.locate(1 << 40 | position)
            lines = sum(token % 3 == 0 for token in document[:offset])
            assert found == type(found)(f"{number}/é.py", 1 + lines, offset)
            position += 1
        with pytest.raises(DatastoreCorruptError, match="no document has position"):
            snapshot.locate(1 << 40 | position)
        position += 1
    for place in (1 << 40 | position, 2 << 40, -1):
        with pytest.raises(ValueError, match="outside this snapshot"):
            snapshot.locate(place)

"""The router: records when a store is built, similar text for a request, and whatever a damaged section may hold."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from fair_time import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_store import FINGERPRINT, TOKENIZER, segment_arrays, write_store

from ngramspec.cli import main as cli
from ngramspec.datastore import Datastore, DatastoreCorruptError
from ngramspec.datastore import format as stored
from ngramspec.datastore import manifest as manifests
from ngramspec.datastore import similar_files as routing
from ngramspec.datastore.build import build
from ngramspec.datastore.similar_files import CHUNK, DIM, STRIDE, SimilarFiles, cut_around, embed_prompt, embed_segment
from ngramspec.datastore.suffix_array import sort_suffixes
from ngramspec.datastore.update import merge, prune, update
from ngramspec.speculative.datastore_drafter import DatastoreDrafter
from ngramspec.speculative.drafter import DraftOptions
from ngramspec.speculative.feature_weights import make_cold_weights
from ngramspec.speculative.proposer import TreeProposer

VOCAB = 5000
pytest.importorskip("faiss")


def text(seed: int, n: int, vocab_size: int = VOCAB) -> list[int]:
    """Tokens of a made-up file: its own names, often repeated."""
    rng = np.random.default_rng(seed)
    names = rng.integers(0, vocab_size, 60)
    return names[np.minimum(rng.geometric(0.08, n), 60) - 1].tolist()


def routed_store(
    folder: Path,
    segments: Sequence[Sequence[Sequence[int]]],
    dead: Sequence[Sequence[int]] | None = None,
    generation: int = 1,
    old: Sequence[stored.SegmentEntry] = (),
    forge: object = None,
    vocab_size: int = VOCAB,
) -> list[stored.SegmentEntry]:
    """A store of these segments after those of `old`, with the records of `embed_segment`, or what `forge(records)` makes of them."""
    folder.mkdir(exist_ok=True)
    entries = list(old)
    for documents in segments:
        tokens, docs, paths = segment_arrays(documents, vocab_size)
        records = embed_segment(tokens, docs["start"].astype(np.int64))
        if callable(forge):
            records = forge(records)
        suffixes = sort_suffixes(tokens, stored.compute_suffix_width(len(tokens)))
        entries.append(
            stored.write_segment(
                folder,
                tokens=tokens,
                suffixes=suffixes,
                docs=docs,
                paths=paths,
                vectors=records,
                vocab_size=vocab_size,
                fingerprint=FINGERPRINT,
            )
        )
    marks = dead or [()] * len(entries)
    entries = [dataclasses.replace(entry, tombstones=tuple(d)) for entry, d in zip(entries, marks, strict=True)]
    vocabulary = manifests.write_vocabulary(folder, np.zeros(vocab_size, np.uint8))
    tokenizer = manifests.write_tokenizer(folder, TOKENIZER)
    manifests.write_manifest(folder, manifests.Manifest(generation, "tiny", FINGERPRINT, vocab_size, vocabulary, tokenizer, tuple(entries)))
    return entries


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3 * CHUNK), min_size=1, max_size=6), st.sampled_from([100, 70_000]))
def test_chunks_cover_every_document_and_no_other_text(lengths: list[int], vocab_size: int) -> None:
    documents = [text(i, n, vocab_size) for i, n in enumerate(lengths)]
    tokens, docs, _ = segment_arrays(documents, vocab_size)
    records = embed_segment(tokens, docs["start"].astype(np.int64))
    for i, document in enumerate(documents):
        starts = records["start"][records["doc"] == i]
        covered = np.zeros(len(document), int)
        for start in starts:
            covered[start : start + CHUNK] += 1
        assert (covered >= 1).all()
        assert starts.tolist() == list(range(0, STRIDE * len(starts), STRIDE))
        assert len(starts) <= 1 or starts[-2] + CHUNK < len(document), "the last chunk says nothing new"
        for record in records[records["doc"] == i]:
            piece = np.array(document[record["start"] : record["start"] + CHUNK])
            assert np.allclose(record["vector"], embed_prompt(piece), atol=2e-3)
    assert np.allclose(np.linalg.norm(records["vector"].astype(np.float32), axis=1), 1, atol=5e-3)


def test_the_hash_is_what_stores_on_disk_were_made_with() -> None:
    vector = embed_prompt(np.array([7, 8, 7], np.int32))
    assert [(i, round(float(vector[i]), 3)) for i in np.flatnonzero(vector).tolist()] == [
        (6, 0.382),
        (31, 0.382),
        (37, -0.646),
        (53, -0.382),
        (127, -0.382),
    ]


def test_the_nearest_file_is_last_and_whole(tmp_path: Path) -> None:
    files = [text(i, 700) for i in range(30)]
    routed_store(tmp_path / "s", [files[:20], files[20:]])
    router = SimilarFiles([Datastore.open(tmp_path / "s").snapshot])
    request = np.array(text(999, 300) + files[23][100:500], np.int32)
    best = router.find_nearest(request)[0]
    assert (best.segment, best.doc, best.start) == (1, 3, 0)
    similar = router.find_similar(request)
    assert similar[-701:].tolist() == [*files[23], -1]
    assert similar.dtype == np.int32
    assert len(router.find_similar(request, 300)) == 300
    for least in (0.0, 1.1):
        pieces = router.find_similar(request, 4096, least).tolist()
        assert len(pieces) == (4096 if least == 0 else 0)
        assert pieces.count(-1) == (6 if least == 0 else 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 400), st.integers(0, 3), st.data())
def test_similar_is_within_its_budget_and_made_of_live_text(budget: int, seed: int, data: st.DataObject) -> None:
    router, files, dead = _ROUTERS(seed)
    live = [tuple(f) for i, f in enumerate(files) if i not in dead]
    request = np.array(data.draw(st.sampled_from(files))[: data.draw(st.integers(0, 200))], np.int32)
    similar = router.find_similar(request, budget, -1.0).tolist()
    assert len(similar) <= budget
    pieces = [tuple(p) for p in _split(similar)]
    for piece in pieces:
        assert any(piece == f[a : a + len(piece)] for f in live for a in range(len(f) - len(piece) + 1))
    assert len(pieces) == 0 or len(request) > 0


def _split(tokens: list[int]) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for token in tokens:
        if token == -1:
            pieces.append([])
        else:
            pieces[-1].append(token)
    assert pieces[-1] == [], "each ends with -1"
    return pieces[:-1]


class _Routers:
    """Stores that all examples of a property share."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[SimilarFiles, list[list[int]], set[int]]] = {}

    def __call__(self, seed: int) -> tuple[SimilarFiles, list[list[int]], set[int]]:
        if seed not in self.made:
            files = [text(100 * seed + i, 120) for i in range(6)]
            dead = set(range(seed))
            with tempfile.TemporaryDirectory() as folder:
                routed_store(Path(folder) / "s", [files], [sorted(dead)])
                snapshot = Datastore.open(Path(folder) / "s", copy=True).snapshot
            self.made[seed] = SimilarFiles([snapshot]), files, dead
        return self.made[seed]


_ROUTERS = _Routers()


def test_a_refresh_indexes_only_what_is_new_and_forgets_what_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [text(i, 500) for i in range(4)]
    entries = routed_store(tmp_path / "s", [files[:3]])
    store = Datastore.open(tmp_path / "s")
    router = SimilarFiles([store.snapshot])
    assert router.load() == 3
    request = np.array(files[1][:400], np.int32)
    assert router.find_nearest(request)[0].doc == 1
    made: list[str] = []
    real = routing.VectorIndex
    monkeypatch.setattr(routing, "VectorIndex", lambda segment: made.append(segment.path.name) or real(segment))
    new = routed_store(tmp_path / "s", [[files[1][:450]]], [[1], []], generation=2, old=entries)
    assert store.refresh()
    router.reset([store.snapshot])
    hits = router.find_nearest(request)
    assert {(h.segment, h.doc) for h in hits} == {(0, 0), (0, 2), (1, 0)}
    assert (hits[0].segment, hits[0].doc) == (1, 0)
    assert made == [new[1].name]


def test_several_stores_compete(tmp_path: Path) -> None:
    files = [text(i, 300) for i in range(6)]
    routed_store(tmp_path / "a", [files[:3]])
    routed_store(tmp_path / "b", [files[3:]])
    write_store(tmp_path / "without", [[files[5]]], VOCAB)
    snapshots = [Datastore.open(tmp_path / name).snapshot for name in ("a", "without", "b")]
    hit = SimilarFiles(snapshots).find_nearest(np.array(files[4], np.int32))[0]
    assert (hit.snapshot, hit.doc) == (2, 1)
    assert hit.score > 0.99
    assert len(SimilarFiles(snapshots[1:2]).find_similar(np.array(files[5], np.int32))) == 0
    assert len(SimilarFiles([]).find_similar(np.array(files[5], np.int32))) == 0


def test_stores_that_a_request_may_not_use_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [text(i, 300) for i in range(6)]
    routed_store(tmp_path / "a", [files[:3]])
    routed_store(tmp_path / "b", [files[3:]])
    snapshots = [Datastore.open(tmp_path / name).snapshot for name in ("a", "b")]
    request, made = np.array(files[4], np.int32), list[str]()
    real = routing.VectorIndex
    monkeypatch.setattr(routing, "VectorIndex", lambda segment: made.append(str(segment.path)) or real(segment))
    router = SimilarFiles(snapshots)
    assert {hit.snapshot for hit in router.find_nearest(request, stores=0b01)} == {0}
    assert [path.split("/")[-2] for path in made] == ["a"], "not even indexed for it"
    assert router.find_nearest(request, stores=0) == []
    assert len(router.find_similar(request, stores=0b01)) == 0
    assert {hit.snapshot for hit in router.find_nearest(request, stores=0b10)} == {1}
    assert router.find_similar(request, stores=0b10)[-301:-1].tolist() == files[4]
    made.clear()
    ready = routing.build_indices(snapshots)
    assert len(made) == 2
    assert SimilarFiles(snapshots, ready).find_nearest(request) == router.find_nearest(request)
    assert len(made) == 2, "what is ready is not made again"


def test_no_request_waits_for_the_index_of_a_large_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread makes it, once; requests go without until it is there."""
    files = [text(i, 300) for i in range(6)]
    routed_store(tmp_path / "s", [files])
    snapshot, request = Datastore.open(tmp_path / "s").snapshot, np.array(files[4], np.int32)
    wanted = SimilarFiles([snapshot]).find_nearest(request)
    monkeypatch.setattr(routing, "INDEXED_AT_ONCE", len(files) - 1)
    real, may_end, made = routing.VectorIndex, threading.Event(), list[str]()
    monkeypatch.setattr(routing, "VectorIndex", lambda segment: (made.append(segment.path), may_end.wait(), real(segment))[-1])
    router = SimilarFiles([snapshot])
    assert [router.find_nearest(request) for _ in range(3)] == [[]] * 3
    may_end.set()
    deadline = time.monotonic() + 30
    while not (found := router.find_nearest(request)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found == wanted
    assert len(made) == 1
    router.reset([snapshot])
    assert router.find_nearest(request) == wanted


def test_an_index_that_could_not_be_made_is_named_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = [text(i, 300) for i in range(6)]
    routed_store(tmp_path / "s", [files])
    snapshot, request = Datastore.open(tmp_path / "s").snapshot, np.array(files[4], np.int32)
    monkeypatch.setattr(routing, "INDEXED_AT_ONCE", len(files) - 1)
    monkeypatch.setattr(routing, "RETRY_S", 0.0)
    real, left, calls = routing.VectorIndex, [MemoryError("no room"), RuntimeError("FAISS")], list[Any]()

    def fail_twice(segment: Any) -> Any:
        calls.append(segment)
        if left:
            raise left.pop()
        return real(segment)

    monkeypatch.setattr(routing, "VectorIndex", fail_twice)
    router = SimilarFiles([snapshot])
    wait_until(lambda: router.find_nearest(request), 30)
    assert len(calls) == 3
    for why in ("RuntimeError: FAISS", "MemoryError: no room"):
        assert caplog.text.count(why) == 1
    assert str(snapshot.segments[0].path) in caplog.text
    monkeypatch.setattr(routing, "RETRY_S", 60.0)
    left.append(MemoryError("no room"))
    router = SimilarFiles([snapshot])
    assert router.find_nearest(request) == []
    wait_until(lambda: caplog.text.count("no room") == 2, 30)
    assert router.find_nearest(request) == []
    for thread in threading.enumerate():
        if thread.name == "datastore-index":
            thread.join()
    assert len(calls) == 4, "not tried again before its time"


def test_inverted_lists_find_what_a_flat_index_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [text(i, 60) for i in range(900)]
    routed_store(tmp_path / "s", [files], [[5, 17]])
    snapshot = Datastore.open(tmp_path / "s").snapshot
    flat = SimilarFiles([snapshot])
    monkeypatch.setattr(routing, "IVF_FROM", 500)
    lists, again = SimilarFiles([snapshot]), SimilarFiles([snapshot])
    for i in range(0, 900, 30):
        request = np.array(files[i], np.int32)
        best = lists.find_nearest(request)
        assert best[0].doc == i == flat.find_nearest(request)[0].doc
        assert best == again.find_nearest(request), "training is deterministic"
    assert all(hit.doc not in (5, 17) for hit in lists.find_nearest(np.array(files[5], np.int32)))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_forged_records_are_a_typed_error_or_unhelpful(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    files = [text(i, 300, 500) for i in range(4)]

    def forge(records: np.ndarray) -> np.ndarray:
        raw = bytearray(records.tobytes())
        for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=40)):
            raw[at] = data.draw(st.integers(0, 255))
        forged = np.frombuffer(bytes(raw), records.dtype).copy()
        forged["vector"][0] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 65504, 0]))
        forged["doc"][1] = data.draw(st.sampled_from([1, 4, 2**32 - 1]))
        forged["start"][2] = data.draw(st.sampled_from([0, 299, 300, 2**32 - 1]))
        return forged

    folder = tmp_path_factory.mktemp("forged")
    routed_store(folder, [files], forge=forge, vocab_size=500)
    router = SimilarFiles([Datastore.open(folder).snapshot])
    for hit in router.find_nearest(np.array(files[3], np.int32)):
        assert np.isfinite(hit.score)
        assert hit.score <= 1.01
        assert hit.doc < 4
        assert hit.start < 300
    for file in files:
        for piece in _split(router.find_similar(np.array(file, np.int32), 4096, -1.0).tolist()):
            assert piece in files


def test_damaged_documents_and_tokens(tmp_path: Path) -> None:
    files = [text(i, 300, 500) for i in range(3)]
    (entry,) = routed_store(tmp_path, [files], vocab_size=500)
    path = tmp_path / entry.name
    segment = stored.map_segment(tmp_path, entry)
    offsets = {name: section.offset for name, section in segment.header.sections.items()}
    whole = path.read_bytes()

    def router_of(raw: bytes) -> SimilarFiles:
        path.write_bytes(raw)
        return SimilarFiles([Datastore.open(tmp_path, copy=True).snapshot])

    request = np.array(files[0], np.int32)
    tokens = bytearray(whole)
    tokens[offsets["tokens"] + 2 : offsets["tokens"] + 202] = b"\xfe" * 200
    similar = router_of(bytes(tokens)).find_similar(request, 4096, -1.0)
    assert similar.max() < 500
    docs = bytearray(whole)
    docs[offsets["docs"] : offsets["docs"] + 8] = b"\xff" * 8
    with pytest.raises(DatastoreCorruptError, match="document 0"):
        router_of(bytes(docs)).find_similar(request)


def test_vectors_of_another_size_are_another_versions(tmp_path: Path) -> None:
    def other(records: np.ndarray) -> np.ndarray:
        return np.zeros(len(records), stored.make_vector_dtype(DIM // 2))

    routed_store(tmp_path, [[text(0, 300)]], forge=other)
    assert SimilarFiles([Datastore.open(tmp_path).snapshot]).find_nearest(np.array(text(0, 300), np.int32)) == []


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 3000))
def test_around_holds_the_chunk_where_there_is_room(n: int, start: int, length: int) -> None:
    document = np.arange(n)
    piece = cut_around(document, start, length)
    assert len(piece) == min(n, length)
    assert (np.diff(piece) == 1).all()
    if start < n and length >= CHUNK:
        assert set(range(start, min(start + CHUNK, n))) <= set(piece.tolist())


def test_threads_are_put_back() -> None:
    import faiss

    before = faiss.omp_get_max_threads()
    with routing.use_one_thread() as library:
        assert library.omp_get_max_threads() == 1
    assert faiss.omp_get_max_threads() == before


def test_nothing_is_read_or_imported_before_the_first_request(tmp_path: Path) -> None:
    routed_store(tmp_path / "s", [[text(0, 300)]])
    code = (
        "import sys; from ngramspec.datastore import Datastore; store = Datastore.open(sys.argv[1])\n"
        "assert 'ngramspec.datastore.similar_files' not in sys.modules\n"
        "from ngramspec.datastore.similar_files import SimilarFiles\n"
        "router = SimilarFiles([store.snapshot]); assert 'faiss' not in sys.modules and not router._indices\n"
        "assert router.load() == 1 and 'faiss' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")], check=True)


def test_what_is_built_with_a_router_keeps_it(tmp_path: Path) -> None:
    backend = tiny.byte_tokenizer().backend_tokenizer
    (tmp_path / "src").mkdir()
    for name in "abc":
        (tmp_path / "src" / f"{name}.py").write_text("\n".join(f"{name}_{i} = {name * (i % 7)!r}" for i in range(60)))
    store = tmp_path / "s"
    build([tmp_path / "src"], store, backend, "bytes", router=True)
    (tmp_path / "src" / "d.py").write_text("\n".join(f"d[{i}] = {i * 7}" for i in range(60)))
    (tmp_path / "src" / "a.py").unlink()
    update(store, backend, "bytes")
    wanted = np.array(backend.encode((tmp_path / "src" / "d.py").read_text(), add_special_tokens=False).ids, np.int32)
    for tidy in (lambda: None, lambda: merge(store), lambda: prune(store, ["b.py"])):
        tidy()
        snapshot = Datastore.open(store, verify="full").snapshot
        router = SimilarFiles([snapshot])
        assert np.array_equal(router.find_similar(wanted[-300:], len(wanted) + 1), np.append(wanted, -1))
        live = {(d.segment, d.number) for d in snapshot.iterate_documents()}
        assert {(h.segment, h.doc) for h in router.find_nearest(wanted, 1000)} == live
    build([tmp_path / "src"], store, backend, "bytes")
    assert Datastore.open(store).info()["vectors"] == 0


def test_the_proposer_drafts_from_similar_text_but_never_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = DatastoreDrafter({}, 1)
    proposer = TreeProposer(DraftOptions(vocab_size=100, max_seqs=1, recycle=False), weights=make_cold_weights(), datastore=drafter)
    slots, depth, cost = np.zeros(1, np.int32), np.full(1, 8, np.int32), 1 + 0.001 * np.arange(64.0)
    similar = np.array([*range(20, 40), -1, *range(50, 60), -1], np.int32)
    monkeypatch.setattr(drafter, "find_similar", lambda prompt, may: similar)
    drafted = {}
    for last in (28, 37, 57):
        proposer.begin(0, np.array([1, 2, last - 2, last - 1, last], np.int32))
        tree = proposer.propose(slots, depth, cost, 1, 32)[0]
        drafted[last] = tree.tokens.tolist()
        assert proposer.source_names[tree.sources[0]] == "similar"
        assert min(drafted[last]) >= 0
        proposer.end(0)
    assert drafted[28][:3] == [29, 30, 31]
    assert drafted[37][:2] == [38, 39]
    assert 50 not in drafted[37]


def test_the_command_builds_a_router_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("def f(x):\n    return x\n")
    (tmp_path / "model").mkdir()
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    common = ("-o", str(tmp_path / "s"), "-q")
    anew = (str(tmp_path / "src"), "-t", str(tmp_path / "model"))
    for arguments, code, n_vectors in (
        (anew, 0, 1),
        (("--update",), 0, 1),
        (("--update", "--no-router"), 2, 1),
        ((*anew, "--no-router"), 0, 0),
        (("--update",), 0, 0),
    ):
        monkeypatch.setattr(sys, "argv", ["ngramspec", "build-datastore", *arguments, *common])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code
        assert Datastore.open(tmp_path / "s").info()["vectors"] == n_vectors

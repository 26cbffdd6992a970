"""What a writer leaves behind: after any sequence of changes a store holds exactly the corpus, and an error leaves it as it was."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import tiny
import tiny_store
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tokenizers import Tokenizer

from ngramspec.datastore import (
    CorpusOptions,
    Datastore,
    DatastoreCorruptError,
    DatastoreError,
    DatastoreFullError,
    DatastoreLockedError,
    DatastoreNotFoundError,
    EmptyCorpusError,
    TokenizerMismatchError,
    file_filters,
    file_io,
    segment_writer,
)
from ngramspec.datastore import build as building
from ngramspec.datastore import format as stored
from ngramspec.datastore import manifest as manifests
from ngramspec.datastore import tokens as token_files
from ngramspec.datastore import update as updating
from ngramspec.datastore import watch as watching
from ngramspec.datastore.build import build
from ngramspec.datastore.commit import lock_for_writing
from ngramspec.datastore.corpus import CorpusError
from ngramspec.datastore.progress import Progress
from ngramspec.datastore.tokens import Encoder, load_encoder
from ngramspec.datastore.update import find_due_segments, merge, prune, update
from ngramspec.datastore.watch import watch


@pytest.fixture(scope="session")
def backend() -> Tokenizer:
    return tiny.byte_tokenizer().backend_tokenizer


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    fill(folder, {f"{n}.py": f"def f{n}():\n    return {n}\n" for n in range(10)})
    return folder


def fill(folder: Path, files: dict[str, str]) -> None:
    """Write files with a time in the past that no file had before, so that what changed can be told by it."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        fill.clock += 1_000_000_000  # type: ignore[attr-defined]
        os.utime(path, ns=(fill.clock, fill.clock))  # type: ignore[attr-defined]


fill.clock = 10**18  # type: ignore[attr-defined]


def texts(store: Path) -> dict[str, str]:
    """What a store holds, checked byte by byte: the live documents by their path, the token being the byte."""
    with Datastore.open(store, verify="full") as opened:
        documents = list(opened.snapshot.iterate_documents())
        found = {d.path: bytes(opened.snapshot.text_tokens(d.segment, d.number).astype(np.uint8)).decode() for d in documents}
    assert len(found) == len(documents)
    return found


def files_of(store: Path) -> set[str]:
    return {path.name for path in store.iterdir()}


def is_tidy(store: Path) -> bool:
    manifest = manifests.read_manifest(store)
    named = {file.name for file in manifest.files}
    return files_of(store) == {"MANIFEST", "LOCK", *named}


def contents(folder: Path) -> dict[str, str]:
    return {str(path): path.read_text() for path in sorted(folder.rglob("*.py"))}


def test_progress_is_what_is_tokenized(tmp_path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file counts piece by piece, when it is encoded and not when it has been read."""
    monkeypatch.setattr(token_files, "PIECE_CHARS", 1000)
    monkeypatch.setattr(token_files, "PIECES", 1)
    encode_batch = Encoder._encode_batch
    seen, reported = list[int](), threading.Semaphore(0)

    def report(progress: Progress) -> None:
        if progress.stage == "reading":
            seen.append(progress.bytes)
            reported.release()

    def wait_and_encode(self: Encoder, texts: Sequence[str]) -> Any:
        while reported.acquire(blocking=False):
            pass
        assert reported.acquire(timeout=60), "nothing is told while a text is encoded"
        return encode_batch(self, texts)

    monkeypatch.setattr(Encoder, "_encode_batch", wait_and_encode)
    (tmp_path / "big.txt").write_text("".join(f"line {i:6d}\n" for i in range(400)))
    summary = build([tmp_path / "big.txt"], tmp_path / "store", backend, "bytes", on_progress=report)
    assert seen == sorted(seen)
    assert {0, 996, 1992, 2988, 3984} <= set(seen), (sorted(set(seen)), "lines of 12 bytes, in pieces of at most 1,000")
    assert seen[-1] < 4800 == round(summary.mb * 1e6)


def test_a_store_holds_the_corpus(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    stages: list[str] = []
    summary = build([corpus], tmp_path / "store", backend, "bytes", on_progress=lambda p: stages.append(p.stage), writer="test 1")
    assert texts(tmp_path / "store") == contents(corpus)
    assert is_tidy(tmp_path / "store")
    assert (summary.files, summary.segments, summary.generation, summary.committed) == (10, 1, 1, True)
    assert summary.tokens == sum(map(len, contents(corpus).values()))
    assert summary.bytes == sum(path.stat().st_size for path in (tmp_path / "store").iterdir() if path.name != "MANIFEST")
    assert list(dict.fromkeys(stages)) == ["looking", "reading", "sorting", "done"]
    assert {"looking", "reading and tokenizing", "sorting", "writing", "committing", "total"} <= summary.seconds.keys()
    assert json.loads(json.dumps(summary.as_json()))["files"] == 10
    assert Datastore.open(tmp_path / "store").info()["writer"] == "test 1"


def test_building_again_replaces_a_store(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    reader = Datastore.open(store)
    (corpus / "0.py").unlink()
    assert build([corpus], store, backend, "bytes").generation == 2
    assert texts(store) == contents(corpus)
    assert is_tidy(store)
    assert len(list(reader.snapshot.iterate_documents())) == 10, "an open reader keeps its generation"
    assert reader.refresh()
    assert len(list(reader.snapshot.iterate_documents())) == 9


def test_memory_bounds_the_segments(corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "compute_max_tokens", lambda max_memory, width: max_memory)
    monkeypatch.setattr(building, "BATCH_CHARS", 1)
    summary = build([corpus], tmp_path / "store", backend, "bytes", max_memory=60)
    assert summary.segments == 4
    assert texts(tmp_path / "store") == contents(corpus)
    assert merge(tmp_path / "store", max_memory=150).segments == 2
    assert texts(tmp_path / "store") == contents(corpus)
    assert merge(tmp_path / "store", max_memory=10**6).segments == 1
    assert texts(tmp_path / "store") == contents(corpus)


def test_segments_stay_within_memory() -> None:
    for width in (2, 4):
        n = segment_writer.compute_max_tokens(1 << 30, width)
        assert (1 << 30) * 0.9 < 4 * width * n + segment_writer.estimate_sort_memory(n, width) <= 1 << 30
        assert segment_writer.compute_max_tokens(1 << 40, width) * width < 1 << 31
    assert segment_writer.compute_max_tokens(1, 2) == 1 << 16


def test_documents_become_the_same_segment_everywhere(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    """The one step of the local and the distributed build; the encoder travels to other processes."""
    encoder = pickle.loads(pickle.dumps(Encoder(backend, "bytes")))
    settings = segment_writer.SegmentSettings(encoder.vocab_size, encoder.fingerprint)
    documents, _ = tiny_store.read_documents(corpus)
    entry = segment_writer.build_segment(tmp_path, documents, encoder, settings)
    assert entry is not None
    build([corpus], tmp_path / "store", backend, "bytes")
    (built,) = manifests.read_manifest(tmp_path / "store").segments
    assert (tmp_path / entry.name).read_bytes() == (tmp_path / "store" / built.name).read_bytes()
    assert segment_writer.build_segment(tmp_path, [], encoder, settings) is None


def test_vectors_are_passed_through(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    def vectors(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
        assert (tokens[starts - 1] == 0xFFFF).all()
        records = np.zeros(len(starts), stored.make_vector_dtype(4))
        records["doc"] = np.arange(len(starts))
        records["vector"] = tokens[starts, None]
        return records

    build([corpus], tmp_path / "store", backend, "bytes", router=True, vectors=vectors)
    manifest = manifests.read_manifest(tmp_path / "store")
    assert manifest.options["router"] is True
    records = stored.map_segment(tmp_path / "store", manifest.segments[0]).vectors
    assert records["doc"].tolist() == list(range(10))
    assert (records["vector"] == ord("d")).all()
    fill(corpus, {"new.py": "n = 1\n"})
    update(tmp_path / "store", backend, "bytes", vectors=vectors)
    assert Datastore.open(tmp_path / "store").info()["vectors"] == 11
    assert manifests.read_manifest(tmp_path / "store").options["router"] is True


# ---- update


class Store(RuleBasedStateMachine):
    """Any sequence of edits, updates, merges and prunes: the store holds what the corpus held at the last update, and no file more."""

    names = st.sampled_from([f"{folder}{letter}.py" for folder in ("", "sub/") for letter in "abcd"])
    words = st.text("xyz\n", min_size=1, max_size=30).filter(str.strip)

    @initialize()
    def start(self) -> None:
        self.root = Path(os.path.realpath(Store.make_folder()))
        self.folder, self.store = self.root / "corpus", self.root / "store"
        fill(self.folder, {"a.py": "start\n"})
        build([self.folder], self.store, Store.backend, "bytes")
        self.expected = contents(self.folder)
        self.pruned: set[str] = set()

    @rule(name=names, text=words)
    def write(self, name: str, text: str) -> None:
        fill(self.folder, {name: text})

    @rule(name=names)
    def touch(self, name: str) -> None:
        if (self.folder / name).exists():
            fill(self.folder, {name: (self.folder / name).read_text()})

    @rule(name=names)
    def remove(self, name: str) -> None:
        if name != "a.py":
            (self.folder / name).unlink(missing_ok=True)

    @rule()
    def update(self) -> None:
        now = {path: text for path, text in contents(self.folder).items() if path not in self.pruned}
        if not now:
            return
        summary = update(self.store, Store.backend, "bytes")
        held = texts(self.store)
        # of equal texts one is kept, whichever came first
        assert set(held.values()) == set(now.values())
        assert len(held) == len(set(held.values())) or set(held) <= set(self.expected) | set(now)
        assert all(now[path] == text for path, text in held.items())
        assert summary.files == len(held)
        again = update(self.store, Store.backend, "bytes")
        assert (again.committed, again.added, again.removed) == (False, 0, 0)
        self.expected = held

    @rule(how=st.sampled_from(["all", "tiered"]))
    def merge(self, how: str) -> None:
        summary = merge(self.store, how)
        assert how == "tiered" or summary.segments == 1

    @rule(name=names)
    def prune(self, name: str) -> None:
        path = f"{self.folder}/{name}"
        if set(self.expected) - {path} and name != "a.py":
            prune(self.store, [f"/{name}"])
            self.pruned.add(path)
            self.expected.pop(path, None)

    @invariant()
    def the_store_is_whole(self) -> None:
        assert texts(self.store) == self.expected
        assert is_tidy(self.store)

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    backend: Tokenizer
    make_folder: Callable[[], Path]


@pytest.mark.usefixtures("backend")
def test_any_sequence_of_changes(backend: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> None:
    Store.backend = backend
    Store.make_folder = staticmethod(lambda: tmp_path_factory.mktemp("machine"))
    machine: Any = Store.TestCase
    machine.settings = settings(
        max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
    )
    machine("runTest").runTest()


def test_an_update_reads_only_what_changed(corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    fill(corpus, {"1.py": "changed = 1\n", "2.py": (corpus / "2.py").read_text(), "new/deep.py": "n = 1\n"})
    (corpus / "3.py").unlink()
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **named: (opened.append(str(path)), real(path, *more, **named))[1])
    summary = update(store, backend, "bytes")
    monkeypatch.undo()
    assert {path for path in opened if path.endswith(".py")} == {"1.py", "2.py", "deep.py"}
    assert (summary.added, summary.removed, summary.unchanged, summary.segments) == (2, 2, 8, 2)
    assert summary.tokens == sum(map(len, contents(corpus).values())), "without those of documents that were replaced"
    assert texts(store) == contents(corpus)
    assert is_tidy(store)
    assert manifests.read_manifest(store).segments[0].tombstones == (1, 3)


def test_what_was_left_out_is_not_read_again(corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    key = "-" * 5 + "BEGIN RSA PRIVATE KEY" + "-" * 5 + "\n"
    fill(corpus, {"key.py": key, "made.py": "# @generated\n", "empty.py": "", "twin.py": (corpus / "2.py").read_text()})
    (corpus / "new.py").write_text("# @generated: just now\n")
    now = time.time_ns() + 10**12
    os.utime(corpus / "new.py", ns=(now, now))  # too new to tell
    built = build([corpus], store, backend, "bytes")
    twin = hashlib.blake2b((corpus / "2.py").read_bytes(), digest_size=16).hexdigest()
    stored = manifests.read_left_out(store, manifests.read_manifest(store))
    assert sorted(stored.values()) == sorted(["empty", "generated", "secret: private-key", twin])
    assert [key[0] for key, reason in stored.items() if reason == twin] == ["="]
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *more, **named: (opened.append(str(path)), real(path, *more, **named))[1])

    def read_now() -> set[str]:
        opened.clear()
        update(store, backend, "bytes")
        return {path for path in opened if path.endswith(".py")}

    fill(corpus, {"1.py": "changed = 1\n"})
    again = update(store, backend, "bytes")
    assert {path for path in opened if path.endswith(".py")} == {"1.py", "new.py"}
    assert (again.skipped, again.secrets) == (built.skipped, built.secrets)
    assert is_tidy(store)
    fill(corpus, {"made.py": "made = 1\n", "3.py": "# @generated\n", "new.py": "# @generated: a while ago\n"})
    assert read_now() == {"3.py", "made.py", "new.py"}
    assert {Path(path).name for path in texts(store)} == {*(f"{n}.py" for n in range(10) if n != 3), "made.py"}
    (corpus / "2.py").unlink()
    assert read_now() == {"twin.py"}
    assert f"{corpus}/twin.py" in texts(store)
    (corpus / "twin.py").unlink()
    assert read_now() == set()
    path = next(store.glob("left-out-*"))
    path.write_bytes(zlib.compress(b"[]"))
    for call in (lambda: update(store, backend, "bytes"), lambda: Datastore.open(store, verify="full")):
        with pytest.raises(DatastoreCorruptError, match="left-out"):
            call()


def test_a_store_of_older_rules_is_read_anew(corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules about secrets and line ends change: what older ones let in must not stay because its file is as it was."""
    fill(corpus, {"key.py": "-" * 5 + "BEGIN RSA PRIVATE KEY" + "-" * 5 + "\n", "crlf.py": "x = 1\r\n"})
    with monkeypatch.context() as older:
        older.setattr("ngramspec.datastore.corpus.RULES", 1)
        older.setattr("ngramspec.datastore.secret_scan.find_secret", lambda *_: None)
        older.setattr("ngramspec.datastore.file_filters.decode_text", bytes.decode)
        build([corpus], tmp_path / "store", backend, "bytes")
    assert texts(tmp_path / "store")[f"{corpus}/crlf.py"] == "x = 1\r\n"
    done = update(tmp_path / "store")
    assert (done.added, done.removed, done.unchanged, done.skipped[file_filters.SECRET]) == (1, 2, 10, 1)
    assert texts(tmp_path / "store")[f"{corpus}/crlf.py"] == "x = 1\n"
    assert not update(tmp_path / "store").committed


def test_a_file_too_new_to_tell_is_read_again(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    """Two edits of the same size within one tick of the file system's clock."""
    path = corpus / "0.py"
    path.write_text("version = 1\n")
    now = path.stat().st_mtime_ns
    build([corpus], tmp_path / "store", backend, "bytes")
    path.write_text("version = 2\n")
    os.utime(path, ns=(now, now))
    update(tmp_path / "store", backend, "bytes")
    assert texts(tmp_path / "store") == contents(corpus)


def test_members_of_containers_are_updated_one_by_one(tmp_path: Path, backend: Tokenizer) -> None:
    rows = tmp_path / "rows.jsonl"
    store = tmp_path / "store"
    rows.write_text('{"text": "one"}\n{"text": "two"}\n')
    os.utime(rows, ns=(10**18, 10**18))
    build([rows], store, backend, "bytes")
    rows.write_text('{"text": "one"}\n{"text": "three"}\n{"text": "four"}\n')
    os.utime(rows, ns=(2 * 10**18, 2 * 10**18))
    summary = update(store, backend, "bytes")
    assert (summary.added, summary.removed, summary.unchanged) == (2, 1, 1)
    assert texts(store) == {f"{rows}#1": "one", f"{rows}#2": "three", f"{rows}#3": "four"}


def test_sources_and_options_are_remembered(corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "more", {"x.py": "x\n", "x.rs": "rust\n"})
    monkeypatch.chdir(tmp_path)
    build(["corpus"], "store", backend, "bytes", options=CorpusOptions(languages=("python",), exclude=("[5-9].py",)))
    monkeypatch.chdir("/")
    summary = update(tmp_path / "store", backend, "bytes", [tmp_path / "more"])
    assert (summary.added, summary.removed) == (1, 0)
    assert set(texts(tmp_path / "store")) == {f"corpus/{n}.py" for n in range(5)} | {f"{tmp_path}/more/x.py"}
    summary = update(tmp_path / "store", backend, "bytes", options=CorpusOptions(exclude=("corpus/", "?.py")))
    assert set(texts(tmp_path / "store")) == {f"{tmp_path}/more/x.rs"}
    shutil.move(corpus, tmp_path / "moved")
    with pytest.raises(CorpusError, match="'corpus' is gone"):
        update(tmp_path / "store", backend, "bytes")
    assert set(texts(tmp_path / "store")) == {f"{tmp_path}/more/x.rs"}


def test_many_small_segments_are_merged(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    most = 0
    for n in range(12):
        fill(corpus, {f"later{n}.py": f"n = {n}\n"})
        summary = update(store, backend, "bytes")
        assert texts(store) == contents(corpus)
        assert is_tidy(store)
        most = max(most, summary.segments)
    assert most == updating.TIER_MOST
    assert summary.segments < updating.TIER_MOST


def test_mostly_dead_segments_are_rewritten(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    fill(corpus, {"0.py": "a\n", "1.py": "b\n"})
    summary = update(store, backend, "bytes")
    assert (summary.merged, [len(s.tombstones) for s in manifests.read_manifest(store).segments]) == (0, [2, 0])
    fill(corpus, {"2.py": "c\n"})
    summary = update(store, backend, "bytes")
    assert summary.merged == 1
    assert not any(s.tombstones for s in manifests.read_manifest(store).segments)
    assert texts(store) == contents(corpus)


def test_which_segments_are_due() -> None:
    def manifest(*segments: tuple[int, int, int]) -> Any:
        return type("M", (), {"segments": [stored.SegmentEntry("", 0, "", n, docs, tuple(range(dead))) for n, docs, dead in segments]})

    small, large = (1000, 10, 0), (50_000_000, 1000, 0)
    assert find_due_segments(manifest(large, *[small] * 8)) == []
    assert find_due_segments(manifest(large, *[small] * 9)) == list(range(1, 10))
    assert find_due_segments(manifest(large, small, (50_000_000, 1000, 251))) == [2]
    assert find_due_segments(manifest(*[(100_000, 1, 0)] * 9, *[small] * 2)) == list(range(9))


def test_pruned_documents_stay_away(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    fill(corpus, {"tests/t.py": "t\n"})
    build([corpus], store, backend, "bytes")
    assert prune(store, ["tests/", "/0.py"]).removed == 2
    expected = {path: text for path, text in contents(corpus).items() if not path.endswith(("t.py", "/0.py"))}
    assert texts(store) == expected
    assert not prune(store, ["tests/"]).committed
    assert not update(store, backend, "bytes").committed
    with pytest.raises(EmptyCorpusError, match="no document"):
        prune(store, ["*"])
    fill(corpus, {"1.py": "one\n"})
    update(store, backend, "bytes")
    assert prune(store).removed == 1
    assert not any(s.tombstones for s in manifests.read_manifest(store).segments)


def test_patterns_prune_what_they_exclude(tmp_path: Path, backend: Tokenizer) -> None:
    """A pattern means the same to `prune` and to the next build, in folders, single files, archives and rows."""
    home = tmp_path / "home"
    fill(home, {"a/x.py": "1", "b/x.py": "2", "single.py": "3", "rows.jsonl": '{"text": "4"}\n{"text": "5"}\n'})
    with zipfile.ZipFile(home / "z.zip", "w") as archive:
        archive.writestr("a/m.py", "6")
        archive.writestr("n.py", "7")
    os.utime(home / "z.zip", ns=(10**18, 10**18))
    sources = [home / name for name in ("a", "b", "single.py", "rows.jsonl", "z.zip")]
    for number, pattern in enumerate(["x.py", "/x.py", "/single.py", "a/", "*.jsonl", "z.zip", "/n.py", "nothing", "b/*"]):
        build(sources, tmp_path / f"pruned{number}", backend, "bytes")
        prune(tmp_path / f"pruned{number}", [pattern])
        build(sources, tmp_path / f"excluded{number}", backend, "bytes", options=CorpusOptions(exclude=(pattern,)))
        assert texts(tmp_path / f"pruned{number}") == texts(tmp_path / f"excluded{number}"), pattern
        assert not update(tmp_path / f"pruned{number}", backend, "bytes").committed


def test_sources_that_are_called_the_same(tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {"one/src/x.py": "1", "two/src/x.py": "2"})
    monkeypatch.chdir(tmp_path / "one")
    build(["src"], tmp_path / "store", backend, "bytes")
    monkeypatch.chdir(tmp_path / "two")
    update(tmp_path / "store", backend, "bytes", ["src"])
    assert texts(tmp_path / "store") == {"src/x.py": "1", f"{tmp_path}/two/src/x.py": "2"}
    fill(tmp_path, {"two/src/x.py": "3"})
    update(tmp_path / "store", backend, "bytes")
    assert texts(tmp_path / "store") == {"src/x.py": "1", f"{tmp_path}/two/src/x.py": "3"}


# ---- what goes wrong


def test_an_empty_corpus_is_an_error(tmp_path: Path, backend: Tokenizer) -> None:
    fill(tmp_path / "corpus", {"a.bin": "x", "empty.py": "\n"})
    with pytest.raises(EmptyCorpusError, match=r"left out: 1 unknown type, 1 empty|left out: 1 empty, 1 unknown type"):
        build([tmp_path / "corpus"], tmp_path / "deep/store", backend, "bytes")
    assert not (tmp_path / "deep/store").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(EmptyCorpusError):
        build([tmp_path / "corpus"], tmp_path / "there", backend, "bytes")
    assert files_of(tmp_path / "there") == set()


def test_an_update_that_would_leave_nothing(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    build([corpus], tmp_path / "store", backend, "bytes")
    before = texts(tmp_path / "store")
    for path in corpus.iterdir():
        path.unlink()
    with pytest.raises(EmptyCorpusError, match="stays as it was"):
        update(tmp_path / "store", backend, "bytes")
    assert texts(tmp_path / "store") == before


@pytest.mark.parametrize("content", [{"notes.txt": "mine\n"}, {"MANIFEST": "include README\n"}, {"MANIFEST": "{}", "a": "b"}])
def test_a_folder_that_is_no_store_is_refused(corpus: Path, tmp_path: Path, backend: Tokenizer, content: dict[str, str]) -> None:
    fill(tmp_path / "mine", content)
    with pytest.raises(DatastoreError, match="holds other files"):
        build([corpus], tmp_path / "mine", backend, "bytes")
    assert files_of(tmp_path / "mine") == set(content)
    with pytest.raises(DatastoreError):
        update(tmp_path / "mine", backend, "bytes")
    assert files_of(tmp_path / "mine") == set(content), "not even a lock file"
    with pytest.raises(DatastoreError, match="not a folder"):
        build([corpus], corpus / "0.py", backend, "bytes")


def test_a_store_that_is_not_there(tmp_path: Path, backend: Tokenizer) -> None:
    for call in (lambda: update(tmp_path / "no", backend, "bytes"), lambda: merge(tmp_path / "no"), lambda: prune(tmp_path / "no")):
        with pytest.raises(DatastoreNotFoundError, match="not a datastore"):
            call()
    assert not (tmp_path / "no").exists()


def test_a_damaged_store_can_be_built_anew(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    (store / "MANIFEST").write_bytes((store / "MANIFEST").read_bytes()[:-5])
    before = files_of(store)
    with pytest.raises(DatastoreCorruptError):
        update(store, backend, "bytes")
    (corpus / "none").mkdir()
    with pytest.raises(EmptyCorpusError):
        build([corpus / "none"], store, backend, "bytes")
    assert files_of(store) == before, "the damaged one is still there to be looked at"
    build([corpus], store, backend, "bytes")
    assert texts(store) == contents(corpus)
    assert is_tidy(store)


def test_damage_gets_no_new_checksum(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    fill(corpus, {"new.py": "n\n"})
    update(store, backend, "bytes")
    (segment, _) = manifests.read_manifest(store).segments
    raw = bytearray((store / segment.name).read_bytes())
    for offset in (raw.index(b"d\0e\0f\0"), raw.index(b"/9.py")):
        damaged = bytearray(raw)
        damaged[offset] ^= 1
        (store / segment.name).write_bytes(damaged)
        with pytest.raises(DatastoreCorruptError, match="checksum"):
            merge(store)
        assert len(manifests.read_manifest(store).segments) == 2


def test_another_tokenizer_is_refused(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    build([corpus], tmp_path / "store", backend, "first")
    with pytest.raises(TokenizerMismatchError, match=r"'first', not that of 'second'"):
        update(tmp_path / "store", tiny.word_tokenizer().backend_tokenizer, "second")


@pytest.mark.parametrize("make", [tiny.byte_tokenizer, tiny.word_tokenizer])
def test_a_store_carries_its_tokenizer(corpus: Path, tmp_path: Path, make: Callable[[], Any]) -> None:
    store = tmp_path / "store"
    given = make().backend_tokenizer
    given.enable_truncation(3)
    build([corpus], store, given, "model")
    kept = manifests.read_manifest(store).tokenizer
    ours, theirs = load_encoder(store, manifests.read_manifest(store)), Encoder(given, "model")
    assert (ours.fingerprint, ours.vocab_size, ours.name) == (theirs.fingerprint, theirs.vocab_size, "model")
    lines = ["a b <bos> the .\n\t c", "日本", ""]
    for mine, other in zip(ours.encode(lines), theirs.encode(lines), strict=True):
        assert mine.tolist() == other.tolist()
    assert ours.count_line_ends().tolist() == theirs.count_line_ends().tolist()
    assert "<eos>" in ours.decode([tiny.EOS])
    fill(corpus, {"new.py": "def new():\n    return 'new'\n"})
    assert update(store).added == 1
    (corpus / "0.py").unlink()
    assert update(store, theirs).removed == 1
    assert merge(store).committed
    assert prune(store, ["1.py"]).committed
    assert manifests.read_manifest(store).tokenizer == kept
    assert is_tidy(store)
    build([corpus], tmp_path / "whole", given, "model", options=CorpusOptions(exclude=("1.py",)))
    assert tokens_of(store) == tokens_of(tmp_path / "whole")


def tokens_of(store: Path) -> dict[str, list[int]]:
    with Datastore.open(store, verify="full") as opened:
        return {d.path: opened.snapshot.text_tokens(d.segment, d.number).tolist() for d in opened.snapshot.iterate_documents()}


def test_a_damaged_tokenizer_is_named_by_those_who_read_it(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    path = store / manifests.read_manifest(store).tokenizer.name
    raw = path.read_bytes()
    fill(corpus, {"0.py": "changed\n"})
    before = manifests.read_manifest(store)
    flipped = bytearray(raw)
    flipped[len(raw) // 2] ^= 1
    for damaged in (bytes(flipped), raw[:-1], raw + b"x", b"", None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        for call in (lambda: update(store), lambda: watch(store), lambda: Datastore.open(store, verify="full")):
            with pytest.raises(DatastoreCorruptError, match=path.name):
                call()
        assert Datastore.open(store).lookup(list(b"def f")).count == 10, "a look-up needs no tokenizer"
        assert manifests.read_manifest(store) == before
        path.touch()
    path.write_bytes(raw)
    assert update(store).added == 1


def test_a_forged_tokenizer_is_refused(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    manifest = manifests.read_manifest(store)
    other = tiny.word_tokenizer().backend_tokenizer
    other.add_tokens(["one more"])
    texts_ = [Encoder(other, "other").json, b"{}", b"[" * 100_000, b'{"version":"1.0"}', b"\xff"]
    bomb = zlib.compress(bytes(manifests.MAX_TOKENIZER_BYTES + 1))
    for forged in (*map(zlib.compress, texts_), b"no zlib", zlib.compress(Encoder(backend, "bytes").json) + b"x", bomb):
        entry = manifests._write_whole(store, "tokenizer", forged)
        manifests.write_manifest(store, replace(manifest, tokenizer=entry))
        with pytest.raises(DatastoreCorruptError, match=entry.name):
            update(store)
    for text in texts_:  # even the fingerprint agrees
        entry = manifests.write_tokenizer(store, text)
        print_ = hashlib.sha256(text).hexdigest()
        manifests.write_manifest(store, replace(manifest, tokenizer=entry, tokenizer_fingerprint=print_))
        with pytest.raises(DatastoreCorruptError, match=entry.name):
            update(store)
    with pytest.raises(DatastoreError, match="at most"):
        manifests.write_tokenizer(store, bytes(manifests.MAX_TOKENIZER_BYTES + 1))


def test_two_writers_are_kept_apart(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    build([corpus], store, backend, "bytes")
    calls = [
        lambda: build([corpus], store, backend, "bytes"),
        lambda: update(store, backend, "bytes"),
        lambda: merge(store),
        lambda: prune(store),
    ]
    with lock_for_writing(store):
        for call in calls:
            with pytest.raises(DatastoreLockedError, match="another process writes"):
                call()
    for call in calls:
        call()


def test_rubbish_of_a_killed_writer_is_removed(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    store = tmp_path / "store"
    rubbish = {f"{kind}-0123456789abcdef{end}": "x" for kind, end in (("seg", ".ngs"), ("vocab", ""), ("tokenizer", ""))}
    rubbish["MANIFEST.tmp-123"] = "x"
    fill(store, rubbish)
    with pytest.raises(DatastoreNotFoundError):
        Datastore.open(store)
    build([corpus], store, backend, "bytes")
    assert is_tidy(store)
    fill(store, rubbish | {"notes.txt": "kept"})
    update(store, backend, "bytes")
    assert files_of(store) & {*rubbish, "notes.txt"} == {"notes.txt"}


class FullDisk:
    """os.open hands out files that take `room` bytes altogether."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, real: Callable[[Any, Any], int], file: Any, data: Any) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        with memoryview(data) as view:
            n = min(len(view), self.room)
            self.room -= n
            return real(file, view[:n])


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    real = file_io.WholeWriter.write

    def limit(room: int) -> None:
        disk = FullDisk(room)

        def write(self: Any, data: Any) -> None:
            done = 0
            while done < len(data):
                done += disk.write(lambda file, part: file.write(part), self.file, memoryview(data)[done:])

        monkeypatch.setattr(file_io.WholeWriter, "write", write)

    yield limit
    monkeypatch.setattr(file_io.WholeWriter, "write", real)


def test_a_full_disk_leaves_the_old_generation(corpus: Path, tmp_path: Path, backend: Tokenizer, full_disk: Callable[[int], None]) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    build([corpus], store, backend, "bytes")
    fill(corpus, {"1.py": "changed\n"})
    before, files = texts(store), files_of(store)
    failures: dict[Path, list[str]] = {store: [], other: []}
    for room in range(0, 12_000, 400):
        for folder, call in ((store, lambda: update(store, backend, "bytes")), (other, lambda: build([corpus], other, backend, "bytes"))):
            full_disk(room)
            try:
                call()
            except DatastoreFullError as error:
                failures[folder].append(str(error))
                assert not other.exists()
                assert (texts(store), files_of(store)) == (before, files) or folder is other
    assert min(map(len, failures.values())) >= 3
    assert all("No space left" in message for messages in failures.values() for message in messages)
    assert texts(store) == texts(other) == contents(corpus)


LIMITED = """
import resource, sys
from tokenizers import Tokenizer
from ngramspec.datastore import DatastoreFullError
from ngramspec.datastore.build import build
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
try:
    build([sys.argv[2]], sys.argv[3], Tokenizer.from_file(sys.argv[4]), "bytes")
except DatastoreFullError as error:
    print(error)
"""


def test_a_file_size_limit_is_a_full_disk(corpus: Path, tmp_path: Path, backend: Tokenizer) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    command = [sys.executable, "-c", LIMITED, "1000", str(corpus), str(tmp_path / "store"), str(tmp_path / "tokenizer.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot be written: File too large" in done.stdout
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("stage", ["reading", "tokenizing", "sorting", "writing", "committing", "committed"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError, MemoryError])
def test_an_interrupt_leaves_no_rubbish(
    corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch, stage: str, kind: type[BaseException]
) -> None:
    store, other = tmp_path / "store", tmp_path / "other"
    build([corpus], store, backend, "bytes")
    fill(corpus, {"1.py": "changed\n"})
    before, files, after = texts(store), files_of(store), contents(corpus)

    def fail(*_: Any, **__: Any) -> Any:
        raise kind("stopped")

    def fail_after(real: Any) -> Any:
        return lambda *a, **k: (real(*a, **k), fail())

    where: dict[str, tuple[Any, str, Any]] = {
        "reading": (building.corpus, "read_documents", fail),
        "tokenizing": (segment_writer, "encode_documents", fail),
        "sorting": (segment_writer, "sort_suffixes", fail),
        "writing": (segment_writer, "write_segment", fail_after(segment_writer.write_segment)),
        "committing": (manifests, "sync_folder", fail_after(manifests.sync_folder)),
        "committed": (building.StoreWriter, "commit", fail_after(building.StoreWriter.commit)),
    }
    monkeypatch.setattr(*where[stage])
    for call in (lambda: build([corpus], other, backend, "bytes"), lambda: update(store, backend, "bytes")):
        with pytest.raises(kind, match="stopped"):
            call()
    monkeypatch.undo()
    if stage in ("committing", "committed"):  # the rename had happened
        assert texts(store) == texts(other) == after
        assert is_tidy(other)
    else:
        assert (texts(store), files_of(store)) == (before, files)
        assert not other.exists()


def test_a_sort_that_outlives_its_build_writes_nothing(
    corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt nobody waits for the sorting thread; when it is done, the store is no longer its own."""
    monkeypatch.setattr(segment_writer, "compute_max_tokens", lambda max_memory, width: 1)
    monkeypatch.setattr(building, "BATCH_CHARS", 1)
    began, proceed = threading.Event(), threading.Event()
    real = segment_writer.sort_suffixes

    def slow(*arguments: Any) -> Any:
        began.set()
        assert proceed.wait(60)
        return real(*arguments)

    threads: list[threading.Thread] = []

    def interrupted(progress: Any) -> None:
        if progress.files == 3:
            assert began.wait(60)
            threads.extend(thread for thread in threading.enumerate() if "_run" in thread.name)
            raise KeyboardInterrupt

    monkeypatch.setattr(segment_writer, "sort_suffixes", slow)
    with pytest.raises(KeyboardInterrupt):
        build([corpus], tmp_path / "store", backend, "bytes", on_progress=interrupted)
    assert not (tmp_path / "store").exists()
    (tmp_path / "store").mkdir()
    proceed.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert threads
    assert files_of(tmp_path / "store") == set()


# ---- watch


def test_a_saved_file_is_soon_in_the_store(corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = corpus / "store"  # within what is watched: its own writing must not wake it
    single = tmp_path / "single.py"
    fill(tmp_path, {"single.py": "s = 1\n"})
    build([corpus, single], store, backend, "bytes")
    stop, ready = threading.Event(), threading.Event()
    outcomes: list[Any] = []
    said = threading.Condition()

    def say(outcome: Any) -> None:
        with said:
            outcomes.append(outcome)
            said.notify()

    def wait_for(n: int) -> Any:
        with said:
            assert said.wait_for(lambda: len(outcomes) >= n, 30), outcomes
            return outcomes[n - 1]

    arguments = {"stop": stop, "on_ready": lambda sources: ready.set(), "on_outcome": say}
    thread = threading.Thread(target=watch, args=(store, backend, "bytes"), kwargs=arguments)
    thread.start()
    try:
        assert ready.wait(30)
        (corpus / "0.py").write_text("saved = 1\n")
        assert wait_for(1).added == 1
        temporary = tmp_path / "single.tmp"
        temporary.write_text("s = 22\n")
        temporary.replace(single)
        assert wait_for(2).added == 1
        with lock_for_writing(store):
            (corpus / "1.py").unlink()
            assert isinstance(wait_for(3), DatastoreLockedError)
        assert wait_for(4).removed == 1, "what failed is tried again"
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert texts(store) == contents(corpus) | {str(single): "s = 22\n"}
    assert len(outcomes) == 4
    assert is_tidy(store)


@contextlib.contextmanager
def watch_in_thread(store: Path) -> Iterator[SimpleQueue[Any]]:
    """Watch a store's sources in a thread and yield what its updates bring, once the watching has begun."""
    stop, ready, outcomes = threading.Event(), threading.Event(), SimpleQueue[Any]()
    arguments = {"stop": stop, "on_ready": lambda _: ready.set(), "on_outcome": outcomes.put}
    thread = threading.Thread(target=watch, args=(store,), kwargs=arguments)
    thread.start()
    try:
        assert ready.wait(60)
        yield outcomes
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("source", ["main", "main/src", "linked", "above"])
def test_a_file_is_in_the_store_soon_after_git_tracks_it(tmp_path: Path, backend: Tokenizer, source: str) -> None:
    """The index lies in the source, in a folder above it, and elsewhere: of a linked working tree and of a submodule."""

    def git(folder: str, *arguments: str) -> None:
        settings = ("protocol.file.allow=always", "user.name=n", "user.email=e@x")
        options = [part for setting in settings for part in ("-c", setting)]
        subprocess.run(["git", *options, "-C", str(tmp_path / folder), *arguments], check=True, capture_output=True)

    for name in ("main", "above"):
        fill(tmp_path, {f"{name}/src/a.py": f"{name} = 1\n"})
        git(name, "init", "-q")
        git(name, "add", ".")
        git(name, "commit", "-qm", "1")
    git("main", "worktree", "add", "-q", str(tmp_path / "linked"))
    git("above", "submodule", "add", "-q", str(tmp_path / "main"), "module")
    inner = {"main/src": "main", "above": "above/module"}.get(source, source)
    fill(tmp_path, {f"{inner}/src/new.py": "tracked = 1\n"})
    build([tmp_path / source], tmp_path / "store", backend, "bytes")
    with watch_in_thread(tmp_path / "store") as outcomes:
        git(inner, "add", "src/new.py")
        assert outcomes.get(timeout=60).added == 1


def test_changes_that_matter_to_nothing_leave_most_of_the_time_to_others(
    corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(corpus, {".gitignore": "logs/\n", "logs/a.txt": ""})
    build([corpus], tmp_path / "store", backend, "bytes")
    busy_s: list[float] = []

    def measured(*arguments: Any, **more: Any) -> Any:
        began_s = time.monotonic()
        time.sleep(0.3)  # a large tree
        try:
            return update(*arguments, **more)
        finally:
            busy_s.append(time.monotonic() - began_s)

    monkeypatch.setattr(watching, "update", measured)
    with watch_in_thread(tmp_path / "store") as outcomes:
        busy_s.clear()
        began_s = time.monotonic()
        while len(busy_s) < 5:
            (corpus / "logs" / "a.txt").write_text(f"{time.monotonic()}\n")
            time.sleep(0.02)
        assert sum(busy_s[:4]) < 0.3 * (time.monotonic() - began_s)
        (corpus / "new.py").write_text("saved = 1\n")
        assert outcomes.get(timeout=60).added == 1


def test_watching_needs_a_store(tmp_path: Path, backend: Tokenizer) -> None:
    with pytest.raises(DatastoreNotFoundError):
        watch(tmp_path / "no", backend, "bytes")


def test_options_survive_the_manifest() -> None:
    options = CorpusOptions(include=("a",), exclude=("b", "c"), languages=("rust",), max_file_size=5, text_fields=("t",), untracked=True)
    manifest = type("M", (), {"options": json.loads(json.dumps(building.options_to_json(options)))})
    assert updating.parse_options(manifest) == options  # type: ignore[arg-type]
    manifest.options["max_file_size"] = "many"  # type: ignore[attr-defined]
    with pytest.raises(DatastoreCorruptError):
        updating.parse_options(manifest)  # type: ignore[arg-type]


# ---- distributed


def test_blocks_have_about_the_same_size() -> None:
    from ngramspec.datastore.ray import split_files

    files = [building.FoundFile("/", str(n), str(n), str(n), size, 0, None) for n, size in enumerate([5, 100, 1, 1, 1, 90, 7, 200, 0])]
    for count in (1, 2, 3, 20):
        blocks = split_files(files, count)
        assert [file for block in blocks for file in block] == files
        assert 1 <= len(blocks) <= count
        assert max(sum(file.size for file in block) for block in blocks) <= 405 / count + 201
    assert split_files([], 3) == []


def test_a_distributed_build_needs_ray(corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    from ngramspec.datastore import ray as distributed

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(CorpusError, match=r"pip install 'ngramspec\[ray\]'"):
        distributed.build([corpus], tmp_path / "store", backend, "bytes")
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_a_distributed_build_holds_the_same(corpus: Path, tmp_path: Path, backend: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray keeps a token of its own there
    from ngramspec.datastore import ray as distributed

    fill(corpus, {"copy.py": (corpus / "0.py").read_text(), "z.bin": "x", "empty.py": "\n"})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        summary = distributed.build([corpus], tmp_path / "store", backend, "bytes", blocks=3)
        assert (summary.segments, summary.files, summary.skipped) == (
            3,
            10,
            {file_filters.DUPLICATE: 1, file_filters.EMPTY: 1, file_filters.UNKNOWN_TYPE: 1},
        )
        assert set(texts(tmp_path / "store").values()) == set(contents(corpus).values()) - {"\n"}
        assert is_tidy(tmp_path / "store")
        assert not update(tmp_path / "store", backend, "bytes").added
        with pytest.raises(EmptyCorpusError):
            distributed.build([corpus / "empty.py"], tmp_path / "none", backend, "bytes")
        assert not (tmp_path / "none").exists()
    finally:
        ray.shutdown()

"""Blocks of the prefix cache on disk: what one engine computed spares another one work, changes no token; damage does no harm."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from fair_time import wait_until

from ngramspec.datastore.partial_files import STALE_S
from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import InvalidInputError
from ngramspec.kv_cache import prefix_folder
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.kv_cache.prefix_folder import KEPT_TOKENS, STATE_SUFFIX, PrefixFolder, PrefixStore, name_block
from ngramspec.outputs import BLOCK, Completion
from ngramspec.sampling_params import SamplingParams

rng = np.random.default_rng(11)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = rng.integers(0, 250, KEPT_TOKENS + 40).tolist()
SHORT = rng.integers(0, 250, 100).tolist()


def build(path: Path | None, arch: str = "llama", window: int | None = None, **options: Any) -> Engine:
    place = None if path is None else str(path)
    model = tiny.tiny_model(arch, max_position_embeddings=KEPT_TOKENS + 200, **({} if window is None else {"sliding_window": window}))
    return Engine(model, max_seqs=4, prefix_cache_path=place, **options)


def complete(path: Path | None, prompt: list[int], arch: str = "llama", tenant: str = "", **options: Any) -> Completion:
    with build(path, arch, **options) as engine:
        done = engine.complete(prompt, PARAMS, tenant=tenant)
        engine.runner.pool.check_integrity()
        return done


def full(prompt: list[int]) -> int:
    return (len(prompt) - 1) // BLOCK * BLOCK


def list_files(path: Path, suffix: str = ".kv") -> list[Path]:
    return sorted(path.rglob(f"*{suffix}"))


def test_a_restart_computes_nothing_again_and_writes_the_same(tmp_path: Path) -> None:
    first = complete(tmp_path, LONG)
    again = complete(tmp_path, LONG)
    later = complete(tmp_path, LONG + first.token_ids + [7])
    assert (first.cached_tokens, again.cached_tokens, later.cached_tokens) == (0, full(LONG), full(LONG + first.token_ids))
    assert again.token_ids == first.token_ids == complete(None, LONG).token_ids
    assert later.token_ids == complete(None, LONG + first.token_ids + [7]).token_ids


@pytest.mark.parametrize("arch", ["qwen3_5_text", "lfm2"])
def test_states_are_kept_with_the_blocks(tmp_path: Path, arch: str) -> None:
    """A prompt is continued where a state is; of a long one not every part's state is worth a file."""
    first = complete(tmp_path, LONG, arch)
    again = complete(tmp_path, LONG, arch)
    assert (first.cached_tokens, again.cached_tokens) == (0, full(LONG))
    assert again.token_ids == first.token_ids == complete(None, LONG, arch).token_ids
    assert 2 <= len(list_files(tmp_path, ".state")) <= 4
    assert len(list_files(tmp_path)) == full(LONG) // BLOCK
    other = [*LONG[:-30], *SHORT[:30]]
    changed = complete(tmp_path, other, arch)
    assert full(LONG) // 2 < changed.cached_tokens < full(LONG)
    assert changed.token_ids == complete(None, other, arch).token_ids
    for path in list_files(tmp_path, ".state"):
        path.write_bytes(path.read_bytes()[:-1])
    damaged = complete(tmp_path, LONG, arch)
    assert (damaged.cached_tokens, damaged.token_ids) == (0, first.token_ids)


def test_a_prompt_that_has_to_wait_does_not_read_its_state_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(tmp_path, LONG, "qwen3_5_text")
    hashes, read = BlockHashes("", np.array(LONG, np.int32)).hashes, list[str]()
    with build(tmp_path, "qwen3_5_text") as engine:
        pool, prefixes = engine.runner.pool, engine.core.prefixes
        assert prefixes is not None
        folder = prefixes.folder
        monkeypatch.setattr(folder, "read", lambda name, original=folder.read: read.append(Path(name).suffix) or original(name))
        with monkeypatch.context() as full_pool:
            full_pool.setattr(type(pool), "n_available", 0)
            prefixes.restore(hashes)
        assert STATE_SUFFIX not in read
        prefixes.restore(hashes)
        prefixes.restore(hashes)
        assert read.count(STATE_SUFFIX) == 1
        assert pool.has_state(hashes[full(LONG) // BLOCK - 1])


def test_other_tenants_and_other_models_find_nothing(tmp_path: Path) -> None:
    complete(tmp_path, LONG, tenant="a")
    assert complete(tmp_path, LONG, tenant="b").cached_tokens == 0
    assert complete(tmp_path, LONG, arch="qwen2", tenant="a").cached_tokens == 0
    assert complete(tmp_path, LONG, tenant="a", kv_dtype="float16").cached_tokens == 0
    assert complete(tmp_path, LONG, tenant="a").cached_tokens == full(LONG)


@pytest.mark.parametrize("linears", ["exact", "unpacked"])
def test_a_model_with_another_window_finds_nothing(tmp_path: Path, linears: str) -> None:
    """Windows that end after the first block: its keys and values are the same."""
    options = {"arch": "mistral", "linears": linears}
    complete(tmp_path, LONG, window=2 * BLOCK, **options)
    wider, alone = (complete(path, LONG, window=8 * BLOCK, **options) for path in (tmp_path, None))
    assert (wider.cached_tokens, wider.token_ids) == (0, alone.token_ids)
    assert complete(tmp_path, LONG, window=2 * BLOCK, **options).cached_tokens == full(LONG)


def test_a_short_prompt_is_kept_once_it_was_asked_for_twice(tmp_path: Path) -> None:
    complete(tmp_path, SHORT)
    assert not list_files(tmp_path)
    with build(tmp_path) as engine:
        engine.complete(SHORT, PARAMS)
        engine.complete(SHORT, PARAMS)
    assert len(list_files(tmp_path)) == full(SHORT) // BLOCK
    assert complete(tmp_path, SHORT).cached_tokens == full(SHORT)


def test_files_are_written_while_the_engine_is_idle(tmp_path: Path) -> None:
    with build(tmp_path) as engine:
        engine.complete(LONG, PARAMS)
        wait_until(lambda: len(list_files(tmp_path)) >= (len(LONG) + 11) // BLOCK, 30)
        assert len(list_files(tmp_path)) == (len(LONG) + 11) // BLOCK
        assert all(path.stat().st_mode & 0o077 == 0 for path in list_files(tmp_path))


@pytest.mark.parametrize("damage", [lambda raw: raw[:100], lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), lambda raw: b""])
def test_damaged_files_are_removed_and_computed_again(tmp_path: Path, damage: Any) -> None:
    first = complete(tmp_path, LONG)
    path = list_files(tmp_path)[0]
    path.write_bytes(damage(path.read_bytes()))
    again = complete(tmp_path, LONG)
    assert again.token_ids == first.token_ids
    assert again.cached_tokens < full(LONG)
    assert path.exists(), "it is written again"
    assert complete(tmp_path, LONG).cached_tokens == full(LONG)


def test_files_that_were_cut_are_all_written_again(tmp_path: Path) -> None:
    first = complete(tmp_path, LONG)
    files = list_files(tmp_path)
    for path in files[::3]:
        path.write_bytes(path.read_bytes()[:-1])
    assert complete(tmp_path, LONG).token_ids == first.token_ids
    assert len({path.stat().st_size for path in list_files(tmp_path)}) == 1
    assert complete(tmp_path, LONG).cached_tokens == full(LONG)


def test_a_file_under_another_hash_is_not_believed(tmp_path: Path) -> None:
    first = complete(tmp_path, LONG)
    paths = list_files(tmp_path)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)
    again = complete(tmp_path, LONG)
    assert (again.cached_tokens, again.token_ids) == (0, first.token_ids)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    complete(tmp_path, SHORT)
    (model,) = tmp_path.iterdir()
    (model / "notes.kv").write_text("mine")
    complete(tmp_path, LONG, prefix_cache_size=1)
    assert [path.name for path in list_files(tmp_path)] == ["notes.kv"]


def test_the_folder_stays_within_its_bound(tmp_path: Path) -> None:
    complete(tmp_path, LONG)
    size = list_files(tmp_path)[0].stat().st_size
    other = rng.integers(0, 250, len(LONG)).tolist()
    complete(tmp_path, other, prefix_cache_size=70 * size)
    assert 50 < len(list_files(tmp_path)) <= 70


def test_two_engines_that_run_share_a_folder(tmp_path: Path) -> None:
    """What either computes the other has from the folder, whoever was started first."""
    other = rng.integers(0, 250, len(LONG)).tolist()
    with build(tmp_path) as early:
        done = complete(tmp_path, LONG)
        assert early.complete(LONG, PARAMS).cached_tokens == full(LONG)
        assert early.complete(LONG, PARAMS).token_ids == done.token_ids
        early.complete(other, PARAMS)
    assert complete(tmp_path, other).cached_tokens == full(other)


def test_two_engines_together_stay_within_the_bound(tmp_path: Path) -> None:
    complete(tmp_path, LONG)
    size = list_files(tmp_path)[0].stat().st_size
    for path in list_files(tmp_path):
        path.unlink()
    with build(tmp_path, prefix_cache_size=100 * size) as first, build(tmp_path, prefix_cache_size=100 * size) as second:
        for engine in (first, second):
            engine.complete(rng.integers(0, 250, len(LONG)).tolist(), PARAMS)
    assert 50 < len(list_files(tmp_path)) <= 110


def test_what_a_killed_process_had_begun_is_removed(tmp_path: Path) -> None:
    complete(tmp_path, SHORT)
    (model,) = tmp_path.iterdir()
    old, young = (model / f"{name * 16}.0123456789abcdef.part" for name in ("ab", "cd"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - STALE_S - 1))
    complete(tmp_path, SHORT)
    assert not old.exists()
    assert young.exists(), "somebody may be writing it"


def test_a_small_pool_takes_what_it_has_room_for(tmp_path: Path) -> None:
    first = complete(tmp_path, LONG)
    with build(tmp_path) as roomy:
        block_bytes = len(roomy.runner.pool.read_block(0))
    blocks = (len(LONG) + PARAMS.max_tokens) // BLOCK + 12
    with build(tmp_path, kv_memory=blocks * block_bytes) as tight:
        done = tight.complete([LONG, SHORT, LONG], PARAMS)
        tight.runner.pool.check_integrity()
    assert [each.token_ids for each in done] == [first.token_ids, complete(None, SHORT).token_ids, first.token_ids]


def test_a_folder_that_can_no_longer_be_written_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = complete(tmp_path, SHORT)
    (folder,) = tmp_path.iterdir()
    with build(tmp_path) as engine:
        shutil.rmtree(folder)
        folder.write_bytes(b"")
        assert engine.complete(SHORT, PARAMS).token_ids == first.token_ids
        engine.complete(LONG, PARAMS)
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [str(folder) in warning for warning in warnings] == [True]


class FullPool:
    """A pool that has every block, and counts how many were read."""

    def __init__(self, body: bytes, digests: list[bytes]) -> None:
        self.body, self.block_of, self.n_read = body, dict.fromkeys(digests, 0), 0

    def read_block(self, block: int) -> bytes:
        self.n_read += 1
        return self.body


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk on which nothing can be made until the event is set."""
    answers = threading.Event()
    monkeypatch.setattr(Path, "touch", lambda *args, original=Path.touch, **options: answers.wait() and original(*args, **options))
    yield answers
    answers.set()


def make_hanging_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[PrefixStore, Any, list[bytes]]:
    """A store of which a hundred blocks are to be written; ten of them may wait."""
    body, digests = bytes(1000), [bytes([n] * 16) for n in range(100)]
    monkeypatch.setattr(prefix_folder, "WAITING_BYTES", 10 * len(body))
    pool: Any = FullPool(body, digests)
    store = PrefixStore(PrefixFolder(tmp_path, "model", len(body), 0, 1 << 20), pool)
    store.note_request(digests, 0)
    for _ in digests:
        store.save_some()
    return store, pool, digests


def test_a_disk_that_hangs_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: threading.Event) -> None:
    store, pool, digests = make_hanging_store(tmp_path, monkeypatch)
    assert pool.n_read == 10
    assert store.idle_after_s, "the engine does not turn round and round until there is room"
    hangs.set()
    store.close()
    assert len(list_files(tmp_path)) == len(digests), "nothing is lost if it goes on"


def test_the_end_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefix_folder, "STALLED_S", 0.05)
    store, _, _ = make_hanging_store(tmp_path, monkeypatch)
    assert not hangs.is_set()
    store.close()
    assert ["does not answer" in record.getMessage() for record in caplog.records] == [True]


def test_files_that_cannot_be_removed_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name_block(bytes([n] * 16)) for n in range(8)]
    theirs = tmp_path / "theirs" / names[0]
    theirs.mkdir(parents=True)  # `unlink` removes no folder
    size = 2 * theirs.stat().st_size
    folder = PrefixFolder(tmp_path, "ours", size, 0, 5 * size)
    for name in names:
        folder.write(name, bytes(size))
    folder.close()
    assert folder.has_file(names[-1]), "the writer has gone on"
    assert len(list((tmp_path / "ours").iterdir())) <= 5
    damaged = tmp_path / "ours" / names[-1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert folder.read(names[-1]) is None


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInputError, match=r"prefix_cache_path .* cannot be used: it is no folder"):
        Engine("/no/model.gguf", prefix_cache_path=str(tmp_path / "file"))  # before the model is looked for, which may take minutes
    complete(tmp_path / "open", SHORT)
    (model,) = (tmp_path / "open").iterdir()
    model.chmod(0o777)
    with pytest.raises(InvalidInputError, match="others may write"):
        build(tmp_path / "open")

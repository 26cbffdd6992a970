"""More stores than are open at a time: each is there for the request that names it, and descriptors stay few."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_store

from ngramspec.datastore.reader import Datastore
from ngramspec.speculative.datastore_drafter import MAX_OPEN, MAX_STORES, DatastoreDrafter
from ngramspec.speculative.drafter import DraftOptions
from ngramspec.speculative.proposer import TreeProposer

N_STORES = 300
PROMPT = np.array([1, 2, 3], np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores 0 to 299: 1 2 3 goes on with the store's number plus 4, and twice that number plus 304 with 0."""
    folder = tmp_path_factory.mktemp("stores")
    for i in range(N_STORES):
        tiny_store.write_store(folder / str(i), [[[1, 2, 3, 4 + i], [304 + i, 304 + i, 0]]], 304 + N_STORES)
    return folder


@pytest.fixture
def drafter(folder: Path) -> DatastoreDrafter:
    stores = {}
    for i in range(N_STORES):
        stores[str(i)] = Datastore.open(folder / str(i))
        stores[str(i)].release()
    return DatastoreDrafter(stores, MAX_OPEN + 8, similar=False)


def begin(drafter: DatastoreDrafter, slot: int, *names: str) -> None:
    drafter.begin(slot, PROMPT, frozenset(names))


def find(drafter: DatastoreDrafter, slot: int) -> set[str]:
    """The stores that a sequence drafts from."""
    drafter.wait_until_loaded()
    return {str(token - 4) for token in drafter.propose(np.array([slot], np.int32)).tokens.tolist()}


def count_descriptors() -> int:
    if not Path("/proc/self/fd").exists():
        pytest.skip("the system does not list descriptors")
    return len(list(Path("/proc/self/fd").iterdir()))


def test_every_store_is_there_for_who_names_it(drafter: DatastoreDrafter) -> None:
    before = count_descriptors()
    for i in range(N_STORES):
        begin(drafter, 0, str(i))
        assert find(drafter, 0) == {str(i)}
        drafter.end(0)
    assert count_descriptors() <= before + 2


def test_running_sequences_keep_their_stores(drafter: DatastoreDrafter) -> None:
    begin(drafter, 0, "7", "299")
    for i in range(100, 100 + 2 * MAX_STORES):
        begin(drafter, 1, str(i))
        drafter.end(1)
    assert find(drafter, 0) == {"7", "299"}


def test_who_may_use_all_of_many_gets_the_first(drafter: DatastoreDrafter) -> None:
    def has(i: int, *names: str) -> bool:
        drafter.begin(0, np.full(2, 304 + i, np.int32), frozenset(names) if names else None)
        return bool(find(drafter, 0))

    assert has(0)
    assert has(MAX_STORES - 1)
    assert not has(MAX_STORES)
    many = [str(i) for i in range(100, N_STORES)]
    assert has(100, *many)
    assert has(99 + MAX_STORES, *many)
    assert not has(100 + MAX_STORES, *many)


def test_open_stores_are_bounded_while_all_are_used_at_a_time(drafter: DatastoreDrafter) -> None:
    before = count_descriptors()
    for slot in range(MAX_OPEN + 8):
        begin(drafter, slot, str(slot))
    assert count_descriptors() <= before + MAX_OPEN
    assert all(find(drafter, slot) == {str(slot)} for slot in range(MAX_OPEN))
    assert all(find(drafter, slot) == set() for slot in range(MAX_OPEN, MAX_OPEN + 8)), "no draft, and no error"


def test_a_store_that_was_deleted_while_it_was_closed(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(folder / "5", tmp_path / "gone")
    gone = Datastore.open(tmp_path / "gone")
    gone.release()
    names = {str(i): Datastore.open(folder / str(i)) for i in range(MAX_STORES)}
    drafter = DatastoreDrafter({**names, "gone": gone}, 2, similar=False)
    shutil.rmtree(tmp_path / "gone")
    for _ in range(2):
        begin(drafter, 0, "gone", "3")
        assert find(drafter, 0) == {"3"}
    assert len([record for record in caplog.records if "gone" in record.getMessage()]) == 1
    gone.close()  # opens nothing


def test_an_open_store_that_is_replaced(drafter: DatastoreDrafter, folder: Path) -> None:
    begin(drafter, 0, "1")
    drafter.use(drafter.stores | {"1": Datastore.open(folder / "2")})
    assert find(drafter, 0) == {"2"}
    drafter.use({"1": Datastore.open(folder / "1")})
    assert find(drafter, 0) == {"1"}


def test_token_ids_that_the_model_does_not_have_are_never_drafted(tmp_path: Path) -> None:
    """Whoever forges a store may claim any vocabulary: the model would read beyond its embedding."""
    tiny_store.write_store(tmp_path, [[[1, 2, 3, 900, 5], [1, 2, 3, 40, 900], [1, 2, 3, 40, 41]]], 1000)
    proposer = TreeProposer(DraftOptions(vocab_size=50, max_seqs=1))
    proposer.use_datastores({"store": Datastore.open(tmp_path)}, ())
    assert proposer.datastore is not None
    proposer.datastore.wait_until_loaded()
    proposer.begin(0, PROMPT)
    tree = proposer.propose(np.zeros(1, np.int32), np.full(1, 4, np.int32), np.full(64, 1.0), 1, 32)[0]
    assert 40 in tree.tokens
    assert tree.tokens.max() < 50

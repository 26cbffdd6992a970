"""Block tables keep their invariants after every operation; the pool's rollback keeps the right bytes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ngramspec.kv import BlockTables, KVPool
from ngramspec.types import BLOCK

SEQS, BLOCKS = 4, 10


class Tables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(BLOCKS, SEQS, 6 * BLOCK)
        self.lengths = [0] * SEQS

    @rule(slot=st.integers(0, SEQS - 1), n=st.integers(0, 6 * BLOCK))
    def reserve(self, slot: int, n: int) -> None:
        missing = -(-n // BLOCK) - int(self.tables.held[slot])
        fits = missing <= len(self.tables.free)
        before = self.tables.tables[slot, : self.tables.held[slot]].copy()
        assert self.tables.reserve(slot, n) == fits
        assert (self.tables.tables[slot, : len(before)] == before).all()
        if fits:
            self.lengths[slot] = max(self.lengths[slot], n)

    @rule(slot=st.integers(0, SEQS - 1), share=st.floats(0, 1))
    def truncate(self, slot: int, share: float) -> None:
        length = int(self.lengths[slot] * share)
        kept = self.tables.tables[slot, : -(-length // BLOCK)].copy()
        self.tables.truncate_to(slot, length)
        self.lengths[slot] = length
        assert self.tables.held[slot] == len(kept)
        assert (self.tables.tables[slot, : len(kept)] == kept).all()

    @rule(slot=st.integers(0, SEQS - 1))
    def release(self, slot: int) -> None:
        self.tables.release(slot)
        self.lengths[slot] = 0

    @invariant()
    def sound(self) -> None:
        self.tables.check_integrity()
        for slot in range(SEQS):
            assert self.tables.held[slot] * BLOCK >= self.lengths[slot]


TestTables = Tables.TestCase


@settings(max_examples=50, deadline=None)
@given(start=st.integers(0, 70), steps=st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_commit_puts_the_path_in_logical_order(start: int, steps: list[int]) -> None:
    pool = KVPool([(2, 8), (1, 16)], 8, 2, 8 * BLOCK)
    path = start + np.cumsum(steps) - 1
    n = int(path[-1]) + 1
    assert pool.reserve(1, 5)  # so that blocks are not those of an empty pool
    assert pool.reserve(0, n)
    for slot in range(n):
        block, offset = (int(x[0]) for x in pool.locate(0, np.array([slot])))
        for layer in range(2):
            pool.keys[layer][block, :, :, offset] = slot + layer / 2
            pool.values[layer][block, :, offset] = -slot - layer / 2
    pool.commit(0, start, path)
    for position, slot in [(p, p) for p in range(start)] + [(start + i, int(s)) for i, s in enumerate(path)]:
        block, offset = (int(x[0]) for x in pool.locate(0, np.array([position])))
        for layer in range(2):
            assert (pool.keys[layer][block, :, :, offset] == slot + layer / 2).all()
            assert (pool.values[layer][block, :, offset] == -slot - layer / 2).all()


def test_released_blocks_serve_others() -> None:
    tables = BlockTables(3, 2, 3 * BLOCK)
    assert tables.reserve(0, 3 * BLOCK)
    assert not tables.reserve(1, 1)
    tables.truncate_to(0, 2 * BLOCK - 1)
    assert tables.held[0] == 2
    assert tables.reserve(1, 1)

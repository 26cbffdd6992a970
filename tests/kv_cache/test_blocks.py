"""Block tables keep their invariants after every operation; whatever is shared, every sequence finds its own text's KV; rollback keeps
the right bytes.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.kv_cache.blocks import MOST_CONTINUATIONS, BlockHashes, BlockTables
from ngramspec.outputs import BLOCK

SEQS, BLOCKS = 4, 10


class Tables(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(BLOCKS, SEQS, 6 * BLOCK)
        self.lengths = [0] * SEQS

    @rule(slot=st.integers(0, SEQS - 1), n=st.integers(0, 6 * BLOCK))
    def reserve(self, slot: int, n: int) -> None:
        missing = -(-n // BLOCK) - int(self.tables.n_blocks_of[slot])
        fits = missing <= self.tables.n_available
        before = self.tables.tables[slot, : self.tables.n_blocks_of[slot]].copy()
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
        assert self.tables.n_blocks_of[slot] == len(kept)
        assert (self.tables.tables[slot, : len(kept)] == kept).all()

    @rule(slot=st.integers(0, SEQS - 1))
    def release(self, slot: int) -> None:
        self.tables.release(slot)
        self.lengths[slot] = 0

    @invariant()
    def sound(self) -> None:
        self.tables.check_integrity()
        for slot in range(SEQS):
            assert self.tables.n_blocks_of[slot] * BLOCK >= self.lengths[slot]


TestTables = Tables.TestCase


class Text:
    """A sequence as the step has it: its tokens, of which `computed` have their KV in its blocks."""

    def __init__(self, salt: str, letters: list[int], n: int) -> None:
        """Half a block is all of one letter, so that texts often begin alike and part in the middle of a block."""
        self.salt, self.tokens = salt, np.repeat(np.array(letters, np.int32), BLOCK // 2)[:n]
        self.block_hashes = BlockHashes(salt, self.tokens)
        self.computed = 0

    def truth(self, position: int) -> object:
        """What the KV of a position depends on."""
        return self.salt, self.tokens[: position + 1].tobytes()


class Prefixes(RuleBasedStateMachine):
    """Sequences of two tenants come, compute, draft, roll back and go, in a pool that is too small for what there is to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(BLOCKS, SEQS, 6 * BLOCK)
        self.tables.copy_block = self.copy_block  # type: ignore[method-assign]
        self.texts: dict[int, Text] = {}
        self.written = np.full((BLOCKS, BLOCK), None, object)
        self.before: dict[bytes, bytes | None] = {}

    def write(self, slot: int, first: int, values: list[object]) -> None:
        for position, value in enumerate(values, first):
            block, offset = (int(x[0]) for x in self.tables.locate(slot, np.array([position])))
            assert block not in self.tables.block_of.values(), "a registered block is written"
            self.written[block, offset] = value

    def copy_block(self, source: int, target: int) -> None:
        assert target not in self.tables.block_of.values(), "a registered block is written"
        self.written[target] = self.written[source]

    @precondition(lambda self: len(self.texts) < SEQS)
    @rule(salt=st.sampled_from(["a", "b"]), letters=st.lists(st.integers(0, 1), min_size=12, max_size=12), n=st.integers(1, 6 * BLOCK - 8))
    def come(self, salt: str, letters: list[int], n: int) -> None:
        slot = next(s for s in range(SEQS) if s not in self.texts)
        text = Text(salt, letters, n)
        self.before |= dict(zip(text.block_hashes.hashes, [None, *text.block_hashes.hashes], strict=False))
        hashes = text.block_hashes.hashes[: (n - 1) // BLOCK]
        known = next((i for i, name in enumerate(hashes) if name not in self.tables.block_of), len(hashes))
        idle = sum(self.tables.block_of[name] in self.tables.cached for name in hashes[:known])
        fits = -(-n // BLOCK) - known <= self.tables.n_available - idle
        taken = self.tables.admit(slot, hashes, n)
        assert taken == (known if fits else -1)
        if fits:
            n = self.tables.copy_part(slot, text.block_hashes, text.tokens[:-1])
            text.computed = taken * BLOCK + n
            assert text.computed < len(text.tokens)
            self.texts[slot] = text

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), n=st.integers(1, 2 * BLOCK))
    def compute(self, data: st.DataObject, n: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[slot]
        end = min(text.computed + n, len(text.tokens))
        self.write(slot, text.computed, [text.truth(p) for p in range(text.computed, end)])
        text.computed = end
        self.tables.register(slot, text.block_hashes.hashes[: end // BLOCK])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), n=st.integers(1, 8))
    def draft_and_roll_back(self, data: st.DataObject, n: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.texts)))
        text = self.texts[slot]
        if text.computed == len(text.tokens) and self.tables.reserve(slot, text.computed + n):
            self.write(slot, text.computed, ["draft"] * n)
            self.tables.truncate_to(slot, text.computed)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), keeps=st.booleans())
    def go(self, data: st.DataObject, *, keeps: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.texts)))
        text, n_full = self.texts.pop(slot), self.tables.registered[slot]
        if keeps:
            self.tables.keep_computed(slot, text.block_hashes, text.tokens[: text.computed])
            for name in (self.tables.hash_of[block] for block in held(self.tables, slot)[n_full : self.tables.registered[slot]]):
                assert name is not None
                self.before[name] = text.block_hashes.hashes[n_full - 1] if n_full else None
            self.tables.check_integrity()
        self.tables.release(slot)

    @invariant()
    def sound(self) -> None:
        self.tables.check_integrity()
        for slot, text in self.texts.items():
            blocks, offsets = self.tables.locate(slot, np.arange(text.computed))
            assert self.written[blocks, offsets].tolist() == [text.truth(p) for p in range(text.computed)]

    @invariant()
    def what_continues_a_block_goes_first(self) -> None:
        known = self.tables.block_of
        assert all(self.before[name] is None or self.before[name] in known for name in known)


TestPrefixes = Prefixes.TestCase
TestPrefixes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def held(tables: BlockTables, slot: int) -> list[int]:
    return tables.tables[slot, : tables.n_blocks_of[slot]].tolist()


def test_the_least_recently_used_prefix_goes_first() -> None:
    tables = BlockTables(5, 2, 5 * BLOCK)
    a, b = (BlockHashes("", np.repeat(np.array(letters, np.int32), BLOCK)).hashes for letters in ([1, 2], [3, 4, 5]))
    for hashes in (a, b, a):
        assert tables.admit(0, hashes, len(hashes) * BLOCK) == (len(hashes) if hashes[0] in tables.block_of else 0)
        tables.register(0, hashes)
        tables.release(0)
    assert len(tables.free) == 0
    assert tables.reserve(0, 3 * BLOCK)  # all of b, though a was there first
    assert set(tables.block_of) == set(a)
    assert tables.reserve(1, BLOCK)  # the end of a
    assert set(tables.block_of) == {a[0]}
    tables.check_integrity()


def test_what_is_remembered_after_one_block_is_bounded() -> None:
    """Requests of one tenant may begin with as many different texts as they like; each new one is compared with what is remembered."""
    tables = BlockTables(60, 1, 2 * BLOCK)
    copied = list[int]()
    tables.copy_block = lambda source, target: copied.append(source)  # type: ignore[method-assign]
    texts = [np.array([0, i] * 8, np.int32) for i in range(40)] + [np.array([i] * BLOCK, np.int32) for i in range(1, 40)]
    for text in texts:
        hashes = BlockHashes("", text)
        assert tables.admit(0, [], len(text)) == 0
        tables.register(0, hashes.hashes)
        tables.keep_computed(0, hashes, text)
        tables.release(0)
        tables.check_integrity()
    assert len(tables.cached) == 39, "a full block can be taken over though its tokens are forgotten, a part of one cannot"
    for text, n in ((texts[-1], BLOCK), (texts[-MOST_CONTINUATIONS], BLOCK), (texts[-MOST_CONTINUATIONS - 1], 0), (texts[39], 0)):
        assert tables.admit(0, [], BLOCK) == 0
        assert tables.copy_part(0, BlockHashes("", text[:0]), text) == n
        tables.release(0)
    assert len(copied) == 2


def test_a_part_is_kept_once() -> None:
    """What a sequence computed further takes the place of what it began with, and what is known already is not kept again."""
    tables = BlockTables(6, 1, 2 * BLOCK)
    for n, kept in ((5, 1), (9, 1), (7, 1), (BLOCK, 1), (BLOCK + 3, 2), (BLOCK + 1, 2)):
        tokens = np.arange(n, dtype=np.int32)
        hashes = BlockHashes("", tokens)
        taken = tables.admit(0, hashes.hashes, n)
        known = BLOCK * taken + tables.copy_part(0, hashes, tokens)
        assert known == {5: 0, 9: 5, 7: 7, BLOCK: 9, BLOCK + 3: BLOCK, BLOCK + 1: BLOCK + 1}[n]
        tables.register(0, hashes.hashes)
        tables.keep_computed(0, hashes, tokens)
        tables.release(0)
        tables.check_integrity()
        assert len(tables.cached) == kept


def test_texts_that_were_computed_at_the_same_time_share_their_blocks() -> None:
    tables = BlockTables(6, 2, 3 * BLOCK)
    hashes = BlockHashes("", np.zeros(2 * BLOCK, np.int32)).hashes
    assert [tables.admit(slot, hashes, 3 * BLOCK) for slot in (0, 1)] == [0, 0]
    tables.register(0, hashes)
    tables.register(1, hashes)
    assert held(tables, 0)[:2] == held(tables, 1)[:2]
    assert tables.n_available == 2
    tables.check_integrity()
    tables.release(0)
    assert len(tables.cached) == 0
    tables.release(1)
    assert len(tables.cached) == 2
    tables.check_integrity()


def test_names_stand_for_all_tokens_before_and_for_the_salt() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1 << 30, 4 * BLOCK + 5).astype(np.int32)
    hashes = BlockHashes("a", tokens).hashes
    assert len(hashes) == 4
    assert all(len(name) == 16 for name in hashes)
    grown = BlockHashes("a", tokens[:7])
    for end in range(7, len(tokens) + 1, 9):
        grown.extend(tokens[:end])
    grown.extend(tokens)
    assert grown.hashes == hashes
    other = tokens.copy()
    other[BLOCK] += 1
    assert BlockHashes("a", other).hashes[0] == hashes[0]
    assert not set(BlockHashes("a", other).hashes[1:]) & set(hashes)
    assert not set(BlockHashes("b", tokens).hashes) & set(hashes)
    copy = BlockHashes("a", tokens[: 2 * BLOCK]).copy()
    copy.extend(tokens)
    assert copy.hashes == hashes


def test_registered_blocks_are_neither_written_nor_rolled_back() -> None:
    pool = KVPool([(1, 8)], 4, 1, 4 * BLOCK)
    assert pool.admit(0, (), 3 * BLOCK) == 0
    pool.register(0, BlockHashes("", np.zeros(2 * BLOCK, np.int32)).hashes)
    pool.commit(0, 2 * BLOCK, np.array([2 * BLOCK + 3]))
    with pytest.raises(AssertionError, match="not written"):
        pool.commit(0, 2 * BLOCK - 1, np.array([2 * BLOCK + 3]))
    with pytest.raises(AssertionError, match="not rolled back"):
        pool.truncate_to(0, BLOCK)


@settings(max_examples=50, deadline=None)
@given(
    other=st.sampled_from([(2, 8), (1, 16)]),
    kept=st.lists(st.tuples(st.integers(0, 70), st.lists(st.integers(1, 9), min_size=1, max_size=8)), min_size=1, max_size=3),
)
def test_commit_puts_the_paths_in_logical_order(other: tuple[int, int], kept: list[tuple[int, list[int]]]) -> None:
    """Of one sequence or several, in layers of one shape and of two."""
    pool = KVPool([(2, 8), other], 24, 4, 8 * BLOCK)
    assert pool.reserve(3, 5)  # so that blocks are not those of an empty pool
    paths = [(slot, start, start + np.cumsum(steps) - 1) for slot, (start, steps) in enumerate(kept)]
    for each, _, path in paths:
        assert pool.reserve(each, int(path[-1]) + 1)
        for slot in range(int(path[-1]) + 1):
            block, offset = (int(x[0]) for x in pool.locate(each, np.array([slot])))
            for layer in range(2):
                pool.keys[layer][block, :, :, offset] = 1000 * each + slot + layer / 2
                pool.values[layer][block, :, offset] = -1000 * each - slot - layer / 2
    if len(paths) == 1:
        pool.commit(*paths[0])
    else:
        pool.commit_all(paths)
    for each, start, path in paths:
        for position, slot in [(p, p) for p in range(start)] + [(start + i, int(s)) for i, s in enumerate(path)]:
            block, offset = (int(x[0]) for x in pool.locate(each, np.array([position])))
            for layer in range(2):
                assert (pool.keys[layer][block, :, :, offset] == 1000 * each + slot + layer / 2).all()
                assert (pool.values[layer][block, :, offset] == -1000 * each - slot - layer / 2).all()


def test_released_blocks_serve_others() -> None:
    tables = BlockTables(3, 2, 3 * BLOCK)
    assert tables.reserve(0, 3 * BLOCK)
    assert not tables.reserve(1, 1)
    tables.truncate_to(0, 2 * BLOCK - 1)
    assert tables.n_blocks_of[0] == 2
    assert tables.reserve(1, 1)

"""Account for the KV cache: a pool of blocks, the block table of each sequence, rollback, and the prefix cache.

Knows nothing of models, drafts or scheduling, and touches no key or value. A slot is a running sequence's row; positions are integers.
`reserve` makes positions writable. After a step the backend's pool moves the accepted path's keys and values to the positions of their
tokens, and `truncate_to` gives back whole blocks beyond a length.

A block full of committed tokens can be registered under a hash that stands for these tokens and all before them (`BlockHashes`). A sequence
with the same hashes takes such blocks over (`admit`), even while others hold them: nobody writes to a registered block. A block that no
sequence holds any more keeps its contents until it is needed (least recently used first).

When a sequence ends, the tokens of its blocks are remembered (`keep_computed`), those of the last one too, which is not full. Another whose
tokens part from these in the middle of a block copies that block and goes on there (`copy_part`): an editor's next request differs from the
one before in its last tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ngramspec.outputs import BLOCK

MOST_CONTINUATIONS = 16  # blocks whose tokens are remembered after one block, the latest: a new sequence's are compared with each


class BlockHashes:
    """The hashes of a sequence's full blocks. Each covers the block's tokens and the hash before; the first one, a salt."""

    def __init__(self, salt: str, tokens: np.ndarray) -> None:
        """Hash the full blocks of tokens [n] int32. Sequences with different salts have no hash in common."""
        self._root = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest()
        self.hashes: list[bytes] = []
        self.extend(tokens)

    def extend(self, tokens: np.ndarray) -> None:
        """Hash the blocks that have become full. tokens [n] int32 are all of the sequence's, from the first on."""
        for first in range(BLOCK * len(self.hashes), len(tokens) - BLOCK + 1, BLOCK):
            self.hashes.append(_hash_tokens(self.get_hash_before(len(self.hashes)), tokens[first : first + BLOCK]))

    def get_hash_before(self, block: int) -> bytes:
        """Return the hash that stands for the salt and all tokens before the sequence's block of this index."""
        return self.hashes[block - 1] if block else self._root

    def copy(self) -> BlockHashes:
        other = BlockHashes.__new__(BlockHashes)
        other._root, other.hashes = self._root, self.hashes.copy()
        return other


class BlockTables:
    """The blocks that each sequence holds, in order, and those that are kept for their contents.

    Position p of the sequence in `slot` lies in block `tables[slot, p // BLOCK]` at offset `p % BLOCK`.
    """

    shares_parts = True
    """Whether a sequence can go on in the middle of a block that another has computed."""

    def __init__(self, n_blocks: int, max_seqs: int, max_len: int) -> None:
        self.n_blocks = n_blocks
        self.max_blocks = -(-max_len // BLOCK)
        self.tables = np.zeros((max_seqs, self.max_blocks), np.int32)
        self.n_blocks_of = np.zeros(max_seqs, np.int32)  # blocks held per sequence
        self.registered = [0] * max_seqs  # how many of these, from the first on, have hashes
        self.free = list(range(n_blocks - 1, -1, -1))  # held by nobody, contents unknown
        self.cached: dict[int, None] = {}  # held by nobody, contents known, in the order of eviction
        self.ref_counts = [0] * n_blocks  # sequences that hold the block
        self.hash_of: list[bytes | None] = [None] * n_blocks
        """Hash of each block; None if it is not registered."""
        self.block_of: dict[bytes, int] = {}  # registered blocks by their hash
        self._continuations: dict[bytes, dict[int, np.ndarray]] = {}
        """Blocks whose tokens [n] int32 are remembered, the latest last, by the hash of all tokens before them."""
        self._hash_before: dict[int, bytes] = {}  # of each of these blocks

    @property
    def n_positions(self) -> int:
        """KV positions of all blocks: how many tokens have room."""
        return self.n_blocks * BLOCK

    @property
    def n_available(self) -> int:
        """How many blocks no sequence holds."""
        return len(self.free) + len(self.cached)

    def count_blocks(self, n_positions: int) -> int:
        """Return how many blocks hold `n_positions` positions."""
        return -(-n_positions // BLOCK)

    def read_block(self, block: int) -> bytes:
        """Return a block's keys and values, layer by layer."""
        raise NotImplementedError

    def write_block(self, block: int, body: bytes) -> None:
        """Set a block's keys and values to what `read_block` has returned, of this pool or one like it."""
        raise NotImplementedError

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values to another block."""

    def has_state(self, digest: bytes) -> bool:
        """Return whether there is a snapshot of the recurrent layers' state after the block with this hash."""
        return False

    def read_state(self, digest: bytes) -> bytes | None:
        """Return the snapshot of the recurrent layers' state after the block with this hash; None if there is none."""
        return None

    def write_state(self, digest: bytes, body: bytes) -> None:
        """Keep as such a snapshot what `read_state` has returned, of this pool or one like it, if there is room for any."""
        raise NotImplementedError

    def admit(self, slot: int, hashes: Sequence[bytes], n_positions: int) -> int:
        """Let a sequence that holds nothing take over the longest registered prefix of `hashes`, and reserve positions 0..n_positions-1.

        Return the number of blocks taken over, which are full and must not be written; -1, with nothing changed, if the pool has too few
        blocks left.
        """
        assert self.n_blocks_of[slot] == 0
        taken = []
        for digest in hashes[: self.count_blocks(n_positions)]:
            if (block := self.block_of.get(digest)) is None:
                break
            taken.append(block)
        n_idle = sum(block in self.cached for block in taken)
        if self.count_blocks(n_positions) - len(taken) > self.n_available - n_idle:
            return -1
        assert self.count_blocks(n_positions) <= self.max_blocks, (n_positions, self.max_blocks)
        for i, block in enumerate(taken):
            self.cached.pop(block, None)
            self.ref_counts[block] += 1
            self.tables[slot, i] = block
        self.n_blocks_of[slot] = self.registered[slot] = len(taken)
        reserved = self.reserve(slot, n_positions)
        assert reserved
        return len(taken)

    def fork(self, source: int, positions: np.ndarray, target: int, hashes: Sequence[bytes]) -> bool:
        """Let slot `target`, which holds nothing, share the registered blocks of `source`, which have these `hashes`, and reserve room for
        its `positions` [n] after them. Return False, with nothing changed, if the pool has too few blocks left."""
        return self.admit(target, hashes, BLOCK * len(hashes) + len(positions)) >= 0

    def skip_to(self, slot: int, position: int) -> None:
        """Let a slot's next row be at this position, whatever is before it: for measurements."""

    def reserve(self, slot: int, n_positions: int) -> bool:
        """Make positions 0..n_positions-1 writable; return False, with nothing changed, if the pool has too few blocks left."""
        if n_positions <= BLOCK * self.n_blocks_of[slot]:
            return True
        wanted = self.count_blocks(n_positions)
        assert wanted <= self.max_blocks, (n_positions, self.max_blocks)
        held = int(self.n_blocks_of[slot])
        if wanted - held > self.n_available:
            return False
        for i in range(held, wanted):
            block = self.free.pop() if self.free else self.evict()
            self.ref_counts[block] = 1
            self.tables[slot, i] = block
        self.n_blocks_of[slot] = wanted
        return True

    def reserve_after(self, slot: int, length: int, n: int) -> int:
        """Make n positions after the first `length` writable, or n halved as often as needed; return how many."""
        while n > 0 and not self.reserve(slot, length + n):
            n //= 2
        return max(n, 0)

    def evict(self) -> int:
        """Forget the contents of the least recently used block that nobody holds, and return it."""
        block = next(iter(self.cached))
        self._forget_contents(block)
        return block

    def _forget_contents(self, block: int) -> None:
        del self.cached[block]
        digest = self.hash_of[block]
        assert digest is not None
        del self.block_of[digest]
        self.hash_of[block] = None
        self._forget_tokens(block)

    def _forget_tokens(self, block: int) -> None:
        if (before := self._hash_before.pop(block, None)) is not None:
            del self._continuations[before][block]
            if not self._continuations[before]:
                del self._continuations[before]

    def adopt(self, digest: bytes) -> int:
        """Register a block that nobody holds under a hash that no block has, and return it: the caller writes its contents."""
        block = self.free.pop() if self.free else self.evict()
        self.hash_of[block] = digest
        self.block_of[digest] = block
        self.cached[block] = None
        return block

    def touch(self, digest: bytes) -> None:
        """Let a registered block be evicted last of those that nobody holds."""
        self._touch(self.block_of[digest])

    def _touch(self, block: int) -> None:
        if block in self.cached:
            del self.cached[block]
            self.cached[block] = None

    def register(self, slot: int, hashes: Sequence[bytes]) -> None:
        """Register the sequence's first len(hashes) blocks, which are full of committed tokens, under these hashes.

        If another block has the hash already, with the same contents, the sequence continues with that one and gives its own back.
        """
        for i in range(self.registered[slot], len(hashes)):
            mine = int(self.tables[slot, i])
            block = self.block_of.setdefault(hashes[i], mine)
            if block == mine:
                self.hash_of[mine] = hashes[i]
            else:
                self.cached.pop(block, None)
                self.ref_counts[block] += 1
                self.tables[slot, i] = block
                self._release_block(mine)
            self.registered[slot] = i + 1

    def keep_computed(self, slot: int, hashes: BlockHashes, tokens: np.ndarray) -> None:
        """Remember a sequence's blocks by their tokens, before they are released. tokens [n] int32: those that are computed and committed.

        The last block, which is not full, is registered under a hash of its own if no block begins with its tokens.
        """
        if not self.shares_parts:
            return
        n_full = self.registered[slot]
        for i in range(n_full):
            self._remember_tokens(int(self.tables[slot, i]), hashes.get_hash_before(i), tokens[BLOCK * i : BLOCK * (i + 1)])
        rest, before = tokens[BLOCK * n_full :], hashes.get_hash_before(n_full)
        if not 0 < len(rest) < BLOCK:
            return
        known, n_known = self._find_part(before, rest)
        if n_known == len(rest):
            self._touch(known)
            return
        block, digest = int(self.tables[slot, n_full]), _hash_tokens(before, rest)
        self.hash_of[block], self.block_of[digest] = digest, block
        self.registered[slot] += 1
        self._remember_tokens(block, before, rest)

    def copy_part(self, slot: int, hashes: BlockHashes, tokens: np.ndarray) -> int:
        """Copy what is known of a sequence's first block that it could not take over, once it is admitted; return how many of the block's
        positions are there now. tokens [n] int32: the sequence's, as far as they may be known."""
        if not self.shares_parts:
            return 0
        taken = self.registered[slot]
        before = hashes.get_hash_before(taken)
        block, n = self._find_part(before, tokens[BLOCK * taken : BLOCK * (taken + 1)])
        if n:
            self.copy_block(block, int(self.tables[slot, taken]))
            self._touch(block)
            after = self._continuations[before]
            after[block] = after.pop(block)
        return n

    def _find_part(self, before: bytes, tokens: np.ndarray) -> tuple[int, int]:
        """Return the block after `before` that has most tokens in common with the beginning of tokens [n] int32, and how many."""
        best = -1, 0
        for block, known in self._continuations.get(before, {}).items():
            n = min(len(known), len(tokens))
            differ = np.flatnonzero(known[:n] != tokens[:n])
            n = int(differ[0]) if len(differ) else n
            if n > best[1]:
                best = block, n
        return best

    def _remember_tokens(self, block: int, before: bytes, tokens: np.ndarray) -> None:
        if block in self._hash_before:
            return
        known, n = self._find_part(before, tokens)
        if n and n == len(self._continuations[before][known]):  # all of it is in the new block
            self._discard_part(known)
        after = self._continuations.setdefault(before, {})
        if len(after) == MOST_CONTINUATIONS:
            oldest = next(iter(after))
            if len(after[oldest]) < BLOCK:
                self._discard_part(oldest)
            else:
                self._forget_tokens(oldest)
        after[block] = tokens.copy()
        self._hash_before[block] = before

    def _discard_part(self, block: int) -> None:
        """Free a block that is not full, which nobody else can hold."""
        self._forget_contents(block)
        self.free.append(block)

    def truncate_to(self, slot: int, length: int) -> None:
        """Release the whole blocks beyond `length` positions; a partly used block stays."""
        keep = self.count_blocks(length)
        assert keep >= self.registered[slot], "a registered block is not rolled back"
        if keep < self.n_blocks_of[slot]:
            self._shrink_to(slot, keep)

    def release(self, slot: int) -> None:
        """Release all blocks. Those with hashes stay in the prefix cache; the last of them are evicted first."""
        self.registered[slot] = 0
        self._shrink_to(slot, 0)

    def _shrink_to(self, slot: int, n: int) -> None:
        for i in range(int(self.n_blocks_of[slot]) - 1, n - 1, -1):  # a block is evicted before the ones that it continues
            self._release_block(int(self.tables[slot, i]))
        self.n_blocks_of[slot] = n

    def _release_block(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if self.hash_of[block] is None:
                self.free.append(block)
            else:
                self.cached[block] = None

    def locate(self, slot: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks and the offsets in them [N] of a sequence's positions [N]."""
        return self.tables[slot, positions // BLOCK], positions % BLOCK

    def check_integrity(self) -> None:
        """Assert that every block is free, cached, or held as often as it is counted, and that only registered blocks are shared."""
        holders = [0] * self.n_blocks
        for slot in range(len(self.n_blocks_of)):
            blocks = self.tables[slot, : self.n_blocks_of[slot]].tolist()
            assert 0 <= self.registered[slot] <= len(blocks) == len(set(blocks)), "more is registered than held, or a block is held twice"
            for i, block in enumerate(blocks):
                holders[block] += 1
                assert (self.hash_of[block] is not None) == (i < self.registered[slot]), "registered blocks are a sequence's first ones"
        assert holders == self.ref_counts, "a block is not held as often as it is counted"
        idle = [block for block, n in enumerate(holders) if n == 0]
        assert sorted([*self.free, *self.cached]) == idle, "a block is lost, or free and held"
        assert all(n == 1 or digest is not None for n, digest in zip(holders, self.hash_of, strict=True) if n), (
            "an unregistered block is shared"
        )
        assert all(self.hash_of[block] is None for block in self.free), "a free block has a hash"
        assert {digest: block for block, digest in enumerate(self.hash_of) if digest is not None} == self.block_of, (
            "hashes and blocks differ"
        )
        assert all(self.hash_of[block] is not None for block in self.cached), "a block without a hash is kept"
        remembered = {block: before for before, after in self._continuations.items() for block in after}
        assert remembered == self._hash_before, "tokens are remembered of other blocks than those listed"
        assert all(self.hash_of[block] is not None for block in remembered), "tokens of a block without a hash are remembered"


def _hash_tokens(before: bytes, tokens: np.ndarray) -> bytes:
    """Return a hash that stands for tokens [n] int32 and all before, for which `before` stands."""
    return hashlib.blake2b(before + np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16).digest()

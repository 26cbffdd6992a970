"""Account for the KV cache: a pool of blocks, the block table of each sequence, rollback, and the prefix cache.

Knows nothing of models, drafts or scheduling, and touches no key or value. A slot is a running sequence's row; positions are integers.
`reserve` makes positions writable. After a step the backend's pool moves the accepted path's keys and values to the positions of their
tokens, and `truncate_to` gives back whole blocks beyond a length.

A block full of committed tokens can be registered under a hash that stands for these tokens and all before them (`BlockHashes`). A sequence
with the same hashes takes such blocks over (`admit`), even while others hold them: nobody writes to a registered block. A block that no
sequence holds any more keeps its contents until it is needed (least recently used first).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ngramspec.outputs import BLOCK


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
            block = np.ascontiguousarray(tokens[first : first + BLOCK], np.int32)
            self.hashes.append(hashlib.blake2b((self.hashes[-1] if self.hashes else self._root) + block.tobytes(), digest_size=16).digest())

    def copy(self) -> BlockHashes:
        other = BlockHashes.__new__(BlockHashes)
        other._root, other.hashes = self._root, self.hashes.copy()
        return other


class BlockTables:
    """The blocks that each sequence holds, in order, and those that are kept for their contents.

    Position p of the sequence in `slot` lies in block `tables[slot, p // BLOCK]` at offset `p % BLOCK`.
    """

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
        del self.cached[block]
        digest = self.hash_of[block]
        assert digest is not None
        del self.block_of[digest]
        self.hash_of[block] = None
        return block

    def adopt(self, digest: bytes) -> int:
        """Register a block that nobody holds under a hash that no block has, and return it: the caller writes its contents."""
        block = self.free.pop() if self.free else self.evict()
        self.hash_of[block] = digest
        self.block_of[digest] = block
        self.cached[block] = None
        return block

    def touch(self, digest: bytes) -> None:
        """Let a registered block be evicted last of those that nobody holds."""
        block = self.block_of[digest]
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

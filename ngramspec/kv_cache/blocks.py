"""Bookkeeping of the KV cache: a pool of blocks, the block tables of the sequences in it, rollback, and prefixes kept for later.

Knows nothing of models, drafts or scheduling, and touches no memory: sequences are slot numbers, positions are integers. Rows
ask for write slots and get them (`reserve`); after a step the pools of the devices move the accepted path's keys and values to
the positions of their tokens, and whole blocks beyond a length are given back (`truncate_to`).

A block that is full of committed tokens can be registered under a hash, which stands for these tokens and all before
them (`BlockHashes`). Whoever comes with the same hashes takes such blocks over (`admit`), also while others hold them: nobody
writes to a registered block again. One that no sequence holds any more keeps its contents until its room is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ngramspec.outputs import BLOCK


class BlockHashes:
    """Hashes of a text's full blocks: each of the block's tokens and of the hash before, the first of a salt."""

    def __init__(self, salt: str, tokens: np.ndarray) -> None:
        """tokens [n] int32. Texts of different salts have no hash in common."""
        self._root = hashlib.blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest()
        self.hashes: list[bytes] = []
        self.extend(tokens)

    def extend(self, tokens: np.ndarray) -> None:
        """Hash the blocks that are full now; tokens [n] int32, all from the first on."""
        for first in range(BLOCK * len(self.hashes), len(tokens) - BLOCK + 1, BLOCK):
            block = np.ascontiguousarray(tokens[first : first + BLOCK], np.int32)
            self.hashes.append(hashlib.blake2b((self.hashes[-1] if self.hashes else self._root) + block.tobytes(), digest_size=16).digest())

    def copy(self) -> BlockHashes:
        other = BlockHashes.__new__(BlockHashes)
        other._root, other.hashes = self._root, self.hashes.copy()
        return other


class BlockTables:
    """Which blocks each sequence holds, in order, and which are kept for their contents.

    A sequence's slot s lies in block `tables[slot, s // BLOCK]` at offset `s % BLOCK`.
    """

    def __init__(self, n_blocks: int, max_seqs: int, max_len: int) -> None:
        self.n_blocks = n_blocks
        self.max_blocks = -(-max_len // BLOCK)
        self.tables = np.zeros((max_seqs, self.max_blocks), np.int32)
        self.n_blocks_of = np.zeros(max_seqs, np.int32)  # blocks held per sequence
        self.registered = [0] * max_seqs  # of these, blocks at the beginning that have hashes
        self.free = list(range(n_blocks - 1, -1, -1))  # held by nobody, contents unknown
        self.cached: dict[int, None] = {}  # held by nobody, contents known, in the order in which they are given up
        self.ref_counts = [0] * n_blocks  # sequences that hold the block
        self._hashes: list[bytes | None] = [None] * n_blocks
        self._known: dict[bytes, int] = {}

    @property
    def n_tokens(self) -> int:
        """Token slots in all."""
        return self.n_blocks * BLOCK

    @property
    def n_available(self) -> int:
        """Blocks that no sequence holds."""
        return len(self.free) + len(self.cached)

    def blocks_for(self, n_slots: int) -> int:
        return -(-n_slots // BLOCK)

    def admit(self, slot: int, hashes: Sequence[bytes], n_slots: int) -> int:
        """Let a sequence that holds nothing take over the longest beginning of `hashes` that is known, and make slots 0..n_slots-1 its own.

        Returns the number of blocks taken over, which are full and not to be written; -1, with nothing changed, where the pool has
        too few blocks left.
        """
        assert self.n_blocks_of[slot] == 0
        taken = []
        for digest in hashes[: self.blocks_for(n_slots)]:
            if (block := self._known.get(digest)) is None:
                break
            taken.append(block)
        n_idle = sum(block in self.cached for block in taken)
        if self.blocks_for(n_slots) - len(taken) > self.n_available - n_idle:
            return -1
        for i, block in enumerate(taken):
            self.cached.pop(block, None)
            self.ref_counts[block] += 1
            self.tables[slot, i] = block
        self.n_blocks_of[slot] = self.registered[slot] = len(taken)
        reserved = self.reserve(slot, n_slots)
        assert reserved
        return len(taken)

    def fork(self, source: int, slots: np.ndarray, target: int, hashes: Sequence[bytes]) -> bool:
        """Let sequence `target`, which holds nothing, begin as another: with its registered blocks, which have these `hashes`, and with
        the contents of its slots `slots` [n] behind them. False, with nothing changed, where the pool has too few blocks left."""
        return self.admit(target, hashes, BLOCK * len(hashes) + len(slots)) >= 0

    def reserve(self, slot: int, n_slots: int) -> bool:
        """Make slots 0..n_slots-1 writable; False, with nothing changed, where the pool has too few blocks left."""
        if n_slots <= BLOCK * self.n_blocks_of[slot]:
            return True
        wanted = self.blocks_for(n_slots)
        assert wanted <= self.max_blocks, (n_slots, self.max_blocks)
        held = int(self.n_blocks_of[slot])
        if wanted - held > self.n_available:
            return False
        for i in range(held, wanted):
            block = self.free.pop() if self.free else self.evict()
            self.ref_counts[block] = 1
            self.tables[slot, i] = block
        self.n_blocks_of[slot] = wanted
        return True

    def reserve_behind(self, slot: int, length: int, n: int) -> int:
        """Make up to n slots behind the first `length`, which are there, writable -> how many: n, or as often half of it as it takes."""
        while n > 0 and not self.reserve(slot, length + n):
            n //= 2
        return max(n, 0)

    def evict(self) -> int:
        """Forget the contents of the block that was last used longest ago."""
        block = next(iter(self.cached))
        del self.cached[block]
        digest = self._hashes[block]
        assert digest is not None
        del self._known[digest]
        self._hashes[block] = None
        return block

    def register(self, slot: int, hashes: Sequence[bytes]) -> None:
        """The sequence's first len(hashes) blocks are full of committed tokens and have these hashes: others may take them over.

        Where another block has the hash already, with the same contents, the sequence goes on with that one and gives its own back.
        """
        for i in range(self.registered[slot], len(hashes)):
            mine = int(self.tables[slot, i])
            block = self._known.setdefault(hashes[i], mine)
            if block == mine:
                self._hashes[mine] = hashes[i]
            else:
                self.cached.pop(block, None)
                self.ref_counts[block] += 1
                self.tables[slot, i] = block
                self._drop(mine)
            self.registered[slot] = i + 1

    def truncate_to(self, slot: int, length: int) -> None:
        """Let go of the whole blocks beyond `length` slots; a partly used block stays."""
        keep = self.blocks_for(length)
        assert keep >= self.registered[slot], "a registered block is not rolled back"
        if keep < self.n_blocks_of[slot]:
            self._keep(slot, keep)

    def release(self, slot: int) -> None:
        """Let go of all blocks; those with hashes are kept for later, the last of them the shortest time."""
        self.registered[slot] = 0
        self._keep(slot, 0)

    def _keep(self, slot: int, n: int) -> None:
        for i in range(int(self.n_blocks_of[slot]) - 1, n - 1, -1):  # a block is given up before the ones that it continues
            self._drop(int(self.tables[slot, i]))
        self.n_blocks_of[slot] = n

    def _drop(self, block: int) -> None:
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if self._hashes[block] is None:
                self.free.append(block)
            else:
                self.cached[block] = None

    def locate(self, slot: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and offsets of a sequence's slots, both like `slots` [N]."""
        return self.tables[slot, slots // BLOCK], slots % BLOCK

    def check_integrity(self) -> None:
        """Every block is free, cached, or held as often as it is counted; only registered blocks, which nobody writes, are shared."""
        holders = [0] * self.n_blocks
        for slot in range(len(self.n_blocks_of)):
            blocks = self.tables[slot, : self.n_blocks_of[slot]].tolist()
            assert 0 <= self.registered[slot] <= len(blocks) == len(set(blocks)), "more is registered than held, or a block is held twice"
            for i, block in enumerate(blocks):
                holders[block] += 1
                assert (self._hashes[block] is not None) == (i < self.registered[slot]), "registered blocks are a sequence's first ones"
        assert holders == self.ref_counts, "a block is not held as often as it is counted"
        idle = [block for block, n in enumerate(holders) if n == 0]
        assert sorted([*self.free, *self.cached]) == idle, "a block is lost, or free and held"
        assert all(n == 1 or digest is not None for n, digest in zip(holders, self._hashes, strict=True) if n), (
            "an unregistered block is shared"
        )
        assert all(self._hashes[block] is None for block in self.free), "a free block has a hash"
        assert {digest: block for block, digest in enumerate(self._hashes) if digest is not None} == self._known, "hashes and blocks differ"
        assert all(self._hashes[block] is not None for block in self.cached), "a block without a hash is kept"

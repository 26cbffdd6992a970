"""The KV cache: a pool of blocks, the block tables of the sequences in it, and rollback.

Knows nothing of models, drafts or scheduling: sequences are slot numbers, positions are integers. Rows
ask for write slots and get them (`reserve`); after a step the accepted path's keys and values are moved to
the positions of their tokens (`commit`) and whole blocks beyond a length are given back (`truncate_to`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from ngramspec.errors import OutOfMemoryError
from ngramspec.types import BLOCK


class BlockTables:
    """Which blocks each sequence holds, in order. Pure bookkeeping: no tensor is touched.

    A sequence's slot s lies in block `tables[slot, s // BLOCK]` at offset `s % BLOCK`.
    """

    def __init__(self, n_blocks: int, max_seqs: int, max_len: int) -> None:
        self.n_blocks = n_blocks
        self.max_blocks = -(-max_len // BLOCK)
        self.tables = np.zeros((max_seqs, self.max_blocks), np.int32)
        self.held = np.zeros(max_seqs, np.int32)  # blocks held per sequence
        self.free = list(range(n_blocks - 1, -1, -1))

    @property
    def n_tokens(self) -> int:
        """Token slots in all."""
        return self.n_blocks * BLOCK

    def blocks_for(self, n_slots: int) -> int:
        return -(-n_slots // BLOCK)

    def reserve(self, slot: int, n_slots: int) -> bool:
        """Make slots 0..n_slots-1 writable; False, with nothing changed, where the pool has too few free blocks."""
        wanted = self.blocks_for(n_slots)
        assert wanted <= self.max_blocks, (n_slots, self.max_blocks)
        missing = wanted - int(self.held[slot])
        if missing > len(self.free):
            return False
        for _ in range(missing):
            self.tables[slot, self.held[slot]] = self.free.pop()
            self.held[slot] += 1
        return True

    def truncate_to(self, slot: int, length: int) -> None:
        """Free the whole blocks beyond `length` slots; a partly used block stays."""
        keep = self.blocks_for(length)
        while self.held[slot] > keep:
            self.held[slot] -= 1
            self.free.append(int(self.tables[slot, self.held[slot]]))

    def release(self, slot: int) -> None:
        self.truncate_to(slot, 0)

    def locate(self, slot: int, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and offsets of a sequence's slots, both like `slots` [N]."""
        return self.tables[slot, slots // BLOCK], slots % BLOCK

    def check_integrity(self) -> None:
        """Every block is free or held by exactly one sequence."""
        used = [int(b) for s in range(len(self.held)) for b in self.tables[s, : self.held[s]]]
        assert sorted(used + self.free) == list(range(self.n_blocks)), "a block is lost or held twice"


@njit(cache=True, nogil=True)
def _move(keys, values, table, source, target):
    """Slots source[i] → target[i] of one sequence in one layer, in order; target[i] <= source[i], both rising."""
    for i in range(source.shape[0]):
        sb, so = table[source[i] // BLOCK], source[i] % BLOCK
        tb, to = table[target[i] // BLOCK], target[i] % BLOCK
        for h in range(keys.shape[1]):
            for d in range(keys.shape[2]):
                keys[tb, h, d, to] = keys[sb, h, d, so]
                values[tb, h, to, d] = values[sb, h, so, d]


class KVPool(BlockTables):
    """Block tables with the memory behind them: per layer one array of keys and one of values (see `attention`).

    Raises OutOfMemoryError where the arrays cannot be allocated.
    """

    def __init__(self, shapes: list[tuple[int, int]], n_blocks: int, max_seqs: int, max_len: int) -> None:
        """`shapes`: per layer (n_kv_heads, head_dim)."""
        super().__init__(n_blocks, max_seqs, max_len)
        try:
            # zeros: pages are taken from the system as they are first written
            self.keys = [np.zeros((n_blocks, h, d, BLOCK), np.float32) for h, d in shapes]
            self.values = [np.zeros((n_blocks, h, BLOCK, d), np.float32) for h, d in shapes]
        except MemoryError as e:
            raise OutOfMemoryError(
                f"a KV pool of {n_blocks} blocks ({n_blocks * self.block_bytes(shapes) >> 20} MiB) does not fit in memory"
            ) from e

    @staticmethod
    def block_bytes(shapes: list[tuple[int, int]]) -> int:
        return sum(2 * h * d * BLOCK * 4 for h, d in shapes)

    def commit(self, slot: int, start: int, path: np.ndarray) -> None:
        """Keep a path: the KV in slots path [n] becomes that of positions start, start + 1, …; `path` rises, path[i] >= start + i."""
        target = np.arange(start, start + len(path), dtype=np.int64)
        moved = np.flatnonzero(path != target)
        if len(moved):
            source = path[moved].astype(np.int64)
            for keys, values in zip(self.keys, self.values, strict=True):
                _move(keys, values, self.tables[slot], source, target[moved])

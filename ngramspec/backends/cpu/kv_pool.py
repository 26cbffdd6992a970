"""Keep the KV pool in the host's memory: the blocks of `kv_cache.blocks` with their keys and values, float32 or float16.

The pool allocates the arrays that attention reads and writes, and moves an accepted path's keys and values to the positions of their tokens
(`commit`). It knows nothing of models, drafts or scheduling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ngramspec.backends.cpu.arena import make_zeros
from ngramspec.datastore.code_cache import njit
from ngramspec.errors import OutOfMemoryError
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Span


@njit(cache=True, nogil=True)
def _move(keys, values, tables, slots, starts, ends, paths):
    """Move, in one layer, KV positions paths[..] to starts[i], starts[i] + 1, … of sequence slots[i], whose part of `paths` ends at
    ends[i].

    Moves go in order, with target <= source, both rising: a position is overwritten only after it was read, or if it is not kept.
    """
    first = 0
    for i in range(slots.shape[0]):
        table = tables[slots[i]]
        for at in range(first, ends[i]):
            source, target = paths[at], starts[i] + at - first
            if source != target:
                sb, so, tb, to = table[source // BLOCK], source % BLOCK, table[target // BLOCK], target % BLOCK
                for h in range(keys.shape[1]):
                    for d in range(keys.shape[2]):
                        keys[tb, h, d, to] = keys[sb, h, d, so]
                    for d in range(values.shape[3]):
                        values[tb, h, to, d] = values[sb, h, so, d]
        first = ends[i]


@njit(cache=True, nogil=True)
def move_all(keys, values, tables, slots, starts, ends, paths):
    """Move in all layers. The work is not divided among threads: if the other cores are busy, waiting for them takes longer."""
    for layer in range(keys.shape[0]):
        _move(keys[layer], values[layer], tables, slots, starts, ends, paths)


NO_STATES = tuple(
    np.zeros((0,) * n, np.int64 if n == 2 else np.float32) for n in (2, 6, 5, 5, 5, 2, 6, 5)
)  # what a pool without recurrent layers has in place of `recurrent_pool.RecurrentPool.states`


class KVPool(BlockTables):
    """Block tables with their memory: per layer one array of keys and one of values (see `attention`).

    Raises OutOfMemoryError if the arrays cannot be allocated.
    """

    def __init__(
        self, shapes: list[tuple[int, int]], n_blocks: int, max_seqs: int, max_len: int, dtype: type[np.generic] = np.float32,
        value_dim: int = 0,
    ) -> None:  # fmt: skip
        """Allocate the pool. `shapes`: per layer (n_kv_heads, head_dim). `dtype`: float32, or uint16 for the bits of float16. `value_dim`:
        numbers of a value in every layer; 0: as many as a key has.
        """
        super().__init__(n_blocks, max_seqs, max_len)
        sizes, value_sizes = ([n_blocks * h * (n or d) * BLOCK for h, d in shapes] for n in (0, value_dim))
        try:
            keys, values = make_zeros(sum(sizes), dtype), make_zeros(sum(value_sizes), dtype)
        except MemoryError as e:
            size = n_blocks * self.block_bytes(shapes, dtype, value_dim) >> 20
            raise OutOfMemoryError(
                f"a KV pool of {n_blocks} blocks ({size} MiB) does not fit in memory; kv_memory (--kv-memory) makes it smaller"
            ) from e
        parts = [list(zip(shapes, np.split(each, np.cumsum(n)[:-1]), strict=True)) for each, n in ((keys, sizes), (values, value_sizes))]
        self.keys = [part.reshape(n_blocks, h, d, BLOCK) for (h, d), part in parts[0]]
        self.values = [part.reshape(n_blocks, h, BLOCK, value_dim or d) for (h, d), part in parts[1]]
        self.is_uniform = len(set(shapes)) == 1
        """Whether all layers have one shape."""
        whole = (len(shapes), *self.keys[0].shape), (len(shapes), *self.values[0].shape)
        self.all_keys, self.all_values = (
            each.reshape(shape if self.is_uniform else (1, 1, 1, 1, -1)) for each, shape in zip((keys, values), whole, strict=True)
        )
        """[layers, blocks, ...], or [1, 1, 1, 1, numbers] of all layers one after the other if their shapes differ."""

    @property
    def states(self) -> tuple[np.ndarray, ...]:
        """The states of recurrent layers."""
        return NO_STATES

    @staticmethod
    def block_bytes(shapes: list[tuple[int, int]], dtype: type[np.generic] = np.float32, value_dim: int = 0) -> int:
        return sum(h * (d + (value_dim or d)) * BLOCK * np.dtype(dtype).itemsize for h, d in shapes)

    def read_block(self, block: int) -> bytes:
        return b"".join(part[block].tobytes() for both in zip(self.keys, self.values, strict=True) for part in both)

    def write_block(self, block: int, body: bytes) -> None:
        at = 0
        for both in zip(self.keys, self.values, strict=True):
            for part in both:
                n = part[block].size
                part[block] = np.frombuffer(body, part.dtype, n, at).reshape(part[block].shape)
                at += n * part.itemsize

    def copy_block(self, source: int, target: int) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target] = keys[source]
            values[target] = values[source]

    def fork(self, source: int, slots: np.ndarray, target: int, hashes: Sequence[bytes]) -> bool:
        if not super().fork(source, slots, target, hashes):
            return False
        a, i = self.locate(source, slots)
        b, j = self.locate(target, BLOCK * len(hashes) + np.arange(len(slots)))
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[b, :, :, j] = keys[a, :, :, i]
            values[b, :, j] = values[a, :, i]
        return True

    def check_positions(self, spans: Sequence[Span]) -> None:
        """Check that sequences can be continued where their rows begin, which matters where layers keep a state."""

    def forget_copies(self) -> None:
        """Forget what a pass has copied of states, after one that failed."""

    def commit(self, slot: int, start: int, path: np.ndarray) -> None:
        """Keep a path: the KV at positions path [n] moves to start, start + 1, …; `path` rises, path[i] >= start + i."""
        self.commit_all([(slot, start, path)])

    def commit_all(self, kept: Sequence[tuple[int, int, np.ndarray]]) -> None:
        """Keep the paths of several sequences: (slot, start, path) each."""
        assert all(start >= self.registered[slot] * BLOCK for slot, start, _ in kept), "a registered block is not written"
        slots, starts, paths = zip(*kept, strict=True)
        ends = np.cumsum([len(path) for path in paths])
        self.move(np.array(slots, np.int64), np.array(starts, np.int64), ends, np.concatenate(paths, dtype=np.int64))

    def move(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, positions: np.ndarray) -> None:
        """Move keys and values as `backends.base.NativeForward.keep_paths` says."""
        which = self.tables, slots, starts, ends, positions
        if self.is_uniform:
            move_all(self.all_keys, self.all_values, *which)
        else:
            for keys, values in zip(self.keys, self.values, strict=True):
                _move(keys, values, *which)

"""Keep the states of recurrent layers beside the KV pool: one state per sequence, a log of draft rows, snapshots for the prefix cache.

A sequence's state is the one after the last known row of its last pass, and the log has the inputs of that pass's draft rows, which the
next pass replays as far as they were accepted (`recurrent_rows`). `commit` moves log rows as it moves keys and values. A block of the
prefix cache can be continued from if there is a snapshot of the state at its end. A pass copies the state of a sequence at the end of the
last block that it completes: while a prompt is computed, every copy becomes a snapshot, of the tokens after it the last one does, when the
sequence gives its slot back. The module knows positions and bytes, nothing of what a state means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.backends.cpu.codegen.simd import COLUMNS
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.backends.cpu.recurrent_rows import MOST_NODES
from ngramspec.datastore.code_cache import njit
from ngramspec.errors import OutOfMemoryError
from ngramspec.kv_cache.snapshots import SnapshotTable
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Span


class StateShape(NamedTuple):
    n_layers: int
    n_groups: int
    """Groups of a convolution's channels."""
    n_inputs: int
    """Channels of a group."""
    n_taps: int
    """Tokens that a convolution sees, its own among them."""
    n_heads: int = 0
    """Heads of values, each with a state; 0 if convolutions are all that keeps one."""
    key_dim: int = 0
    value_dim: int = 0

    @property
    def state(self) -> tuple[int, ...]:
        """Shape of one state: a head's columns lie in blocks of COLUMNS, the last one filled up."""
        return self.n_layers, self.n_heads, -(-self.value_dim // COLUMNS), self.key_dim, COLUMNS

    @property
    def tails(self) -> tuple[int, ...]:
        """Shape of what the convolutions have to remember."""
        return self.n_layers, self.n_groups, self.n_taps - 1, self.n_inputs

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of all layers, with what its convolutions have to remember."""
        return 4 * (math.prod(self.state) + math.prod(self.tails))


@njit(cache=True, nogil=True)
def move_log(log, log_rates, slots, starts, ends, paths):
    """Move the log's rows as `kv_pool.move_all` moves keys and values; position starts[i] is the log's first row."""
    first = 0
    for i in range(slots.shape[0]):
        for at in range(first, ends[i]):
            source, target = paths[at] - starts[i], at - first
            if source != target:
                log[slots[i], :, target] = log[slots[i], :, source]
                log_rates[slots[i], :, target] = log_rates[slots[i], :, source]
        first = ends[i]


class RecurrentPool(KVPool):
    """A KV pool of the layers with attention, and the states of the others. Raises OutOfMemoryError."""

    shares_parts = False  # a state is known at the ends of blocks

    def __init__(
        self, shapes: list[tuple[int, int]], n_blocks: int, max_seqs: int, max_len: int, dtype: type[np.generic], shape: StateShape,
        n_snapshots: int,
    ) -> None:  # fmt: skip
        super().__init__(shapes, n_blocks, max_seqs, max_len, dtype)
        try:
            # pages are taken from the system as they are first written
            self.at = np.zeros((max_seqs, shape.n_layers), np.int64)
            """Position after the last row of the state in a slot, by layer."""
            self.kept_at = np.zeros((max_seqs, shape.n_layers), np.int64)
            """Position after the last row of the copy of a slot's state, by layer; 0 if there is none."""
            self.state, self.tails = np.zeros((max_seqs, *shape.state), np.float32), np.zeros((max_seqs, *shape.tails), np.float32)
            self.kept_state, self.kept_tails = np.zeros_like(self.state), np.zeros_like(self.tails)
            self.log = np.zeros((max_seqs, shape.n_layers, MOST_NODES, shape.n_groups, shape.n_inputs), np.float32)
            self.log_rates = np.zeros((max_seqs, shape.n_layers, MOST_NODES, shape.n_heads, 2), np.float32)
            self._snapshots = np.zeros((n_snapshots, *shape.state), np.float32), np.zeros((n_snapshots, *shape.tails), np.float32)
        except MemoryError as e:
            raise OutOfMemoryError(f"states of {max_seqs} sequences ({max_seqs * shape.state_bytes >> 20} MiB) do not fit in memory") from e
        self._table = SnapshotTable(n_snapshots)
        self._n_known = np.zeros(max_seqs, np.int64)  # tokens of a slot's sequence when it was admitted

    @property
    def states(self) -> tuple[np.ndarray, ...]:
        """The arrays that passes read and write, in the order in which `recurrent_rows` unpacks them."""
        return self.at, self.state, self.tails, self.log, self.log_rates, self.kept_at, self.kept_state, self.kept_tails

    def skip_to(self, slot: int, position: int) -> None:
        self.at[slot] = position

    def check_positions(self, spans: Sequence[Span]) -> None:
        """Check that these sequences' states can be continued where their rows begin: another one would give wrong text."""
        for span in spans:
            at = int(self.at[span.slot].max())
            assert span.start == 0 or 0 <= span.start - at <= MOST_NODES, f"a state at {at} is continued at {span.start}"
            assert span.tree is None or len(span.tree) <= MOST_NODES, f"a tree of {len(span.tree)} nodes"

    def admit(self, slot: int, hashes: Sequence[bytes], n_positions: int) -> int:
        """Admit a sequence as block tables do, with a prefix that ends where a snapshot of the state is."""
        n = self._table.count_blocks(hashes[: self.count_blocks(n_positions)], self.block_of)
        taken = super().admit(slot, hashes[:n], n_positions)
        self._n_known[slot] = n_positions
        if taken > 0:
            i = self._table.use(hashes[taken - 1])
            self.state[slot], self.tails[slot] = self._snapshots[0][i], self._snapshots[1][i]
            self.at[slot] = BLOCK * taken
        return taken

    def register(self, slot: int, hashes: Sequence[bytes]) -> None:
        super().register(slot, hashes)
        if self.kept_at[slot, 0] <= self._n_known[slot]:
            self._keep_snapshot(slot)

    def _keep_snapshot(self, slot: int) -> None:
        """Let the copy of a slot's state be a snapshot, if the block that it follows is registered and has none."""
        n = int(self.kept_at[slot, 0]) // BLOCK
        if not 0 < n <= self.registered[slot]:
            return
        digest = self.hash_of[self.tables[slot, n - 1]]
        assert digest is not None
        if digest not in self._table and (i := self._table.take_number()) >= 0:
            self._table.add(digest, i)
            self._snapshots[0][i], self._snapshots[1][i] = self.kept_state[slot], self.kept_tails[slot]
        self.kept_at[slot] = 0

    def forget_copies(self) -> None:
        """Forget the copies of states after a pass that failed, which may have written parts of them."""
        self.kept_at[:] = 0

    def has_state(self, digest: bytes) -> bool:
        return digest in self._table

    def read_state(self, digest: bytes) -> bytes | None:
        i = self._table.find(digest)
        return None if i is None else b"".join(part[i].tobytes() for part in self._snapshots)

    def write_state(self, digest: bytes, body: bytes) -> None:
        if digest in self._table or (i := self._table.take_number()) < 0:
            return
        state, tails = (part[i] for part in self._snapshots)
        state[:] = np.frombuffer(body, np.float32, state.size).reshape(state.shape)
        tails[:] = np.frombuffer(body, np.float32, tails.size, state.nbytes).reshape(tails.shape)
        self._table.add(digest, i)

    def release(self, slot: int) -> None:
        self._keep_snapshot(slot)
        super().release(slot)
        self.at[slot] = self.kept_at[slot] = 0

    def move(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, positions: np.ndarray) -> None:
        super().move(slots, starts, ends, positions)
        move_log(self.log, self.log_rates, slots, starts, ends, positions)

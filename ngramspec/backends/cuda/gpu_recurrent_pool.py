"""Keep the states of recurrent layers beside the KV pool in the device's memory, and plan how a pass takes them through its rows.

A sequence has one state, the one after the last known row of its last pass, and a log of the inputs of that pass's draft rows. The next
pass replays the accepted ones: the host tells it which, so that nothing is moved. A block of the prefix cache can be continued from if
there is a snapshot of the state at its end: the pass that computes the last row of a prompt's last full block writes it. The module knows
positions and bytes, nothing of what a state means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ngramspec.backends.cuda.gated_delta_kernels import MOST_NODES, PATH, TAPS, DeltaShape, DeltaStates
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.datastore.code_cache import njit
from ngramspec.errors import OutOfMemoryError
from ngramspec.kv_cache.snapshots import SnapshotTable
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Batch

SNAPSHOTS = 64  # Most snapshots of states that the prefix cache keeps.

_LOST = 1 << 60  # Position of a state that a failed pass has left somewhere.


@njit(cache=True, nogil=True)
def plan_walk(parents, firsts, roots, ends, table):
    """Write a pass's rows to `table` [T, ROW_WORDS] int32; return how many copies of states its walks through the trees need.

    A node's children without children come first: they leave its state at hand. It is copied only if two or more others follow.
    """
    n_copies = 0
    n_rows = parents.shape[0]
    n_inner, is_inner = np.zeros(n_rows, np.int32), np.zeros(n_rows, np.bool_)
    first, following, stack = np.full(n_rows, -1, np.int32), np.full(n_rows, -1, np.int32), np.empty(n_rows, np.int32)
    for b in range(roots.shape[0]):
        root = roots[b]
        for row in range(firsts[b], ends[b]):
            table[row, 0], table[row, 1] = b, parents[row]
            table[row, 2], table[row, 3], table[row, 4], table[row, 5] = row, -1, -1, 1
        for row in range(ends[b] - 1, root, -1):  # a node follows its parent
            parent = parents[row]
            following[row] = first[parent]
            first[parent] = row
            if is_inner[row]:
                n_inner[parent] += 1
            is_inner[parent] = True
        at, height, node, copy = root + 1, 0, root, 0
        begin_with = np.empty(ends[b] - root, np.int32)
        while True:
            if node != root:
                table[at, 2], table[at, 3] = node, begin_with[node - root]
                if n_inner[node] > 1:
                    table[at, 4] = n_copies
                    n_copies += 1
                    copy = n_copies
                at += 1
            child, n_below = first[node], height
            while child >= 0:
                if is_inner[child]:
                    begin_with[child - root] = copy if node != root else 0
                    stack[height] = child
                    height += 1
                else:
                    table[at, 2], table[at, 5] = child, 0
                    at += 1
                child = following[child]
            if height > n_below:  # the one on top begins with the state at hand
                begin_with[stack[height - 1] - root] = -1
            if height == 0:
                break
            height -= 1
            node = stack[height]
    return n_copies


def count_copies(n_rows: int) -> int:
    """Return the most copies that walks through `n_rows` rows need: a node that is copied has two children with children."""
    return n_rows // 3


class CudaRecurrentPool(CudaPool):
    """A KV pool of the layers with attention, and the states of the others. Raises OutOfMemoryError."""

    shares_parts = False  # a state is known at the ends of blocks

    def __init__(
        self, shapes: list[tuple[int, int]], n_blocks: int, max_seqs: int, max_len: int, *, dtype: torch.dtype, device: torch.device,
        shape: DeltaShape, n_snapshots: int,
    ) -> None:  # fmt: skip
        super().__init__(shapes, n_blocks, max_seqs, max_len, dtype=dtype, device=device)
        state, tails, log = _array_shapes(shape)
        try:
            self._state = torch.zeros(max_seqs, *state, dtype=torch.float32, device=device)
            self._tails = torch.zeros(max_seqs, *tails, dtype=dtype, device=device)
            self._log = torch.zeros(max_seqs, *log, dtype=dtype, device=device)
            self._kept_state = torch.zeros(n_snapshots, *state, dtype=torch.float32, device=device)
            self._kept_tails = torch.zeros(n_snapshots, *tails, dtype=dtype, device=device)
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as e:
            wanted = (max_seqs * sequence_bytes(shape, dtype) + n_snapshots * snapshot_bytes(shape, dtype)) >> 20
            raise OutOfMemoryError(f"states of {max_seqs} sequences ({wanted} MiB) do not fit in the memory of {device}") from e
        arrays = self._state, self._tails, self._log, self._kept_state, self._kept_tails
        self.states = [DeltaStates(*(array[:, layer] for array in arrays)) for layer in range(shape.n_layers)]
        self.at = np.zeros(max_seqs, np.int64)
        """Position after the last row of the state in a slot."""
        self._paths = np.tile(np.arange(MOST_NODES, dtype=np.int32), (max_seqs, 1))  # nodes of the last pass, as far as accepted
        self._table = SnapshotTable(n_snapshots)
        self._pending: dict[int, tuple[int, int]] = {}  # by slot: a snapshot that a pass has written, and its position

    def skip_to(self, slot: int, position: int) -> None:
        self.at[slot] = position

    def stage_batch(self, batch: Batch, spans: np.ndarray, table: np.ndarray) -> int:
        """Fill `RecurrentRows.spans` [I, SPAN_WORDS] and `table` [R, ROW_WORDS], on the host; return how many copies of states are needed.

        Asserts that states can be continued where the rows begin: another one would give wrong text.
        """
        spans[len(batch.spans) :, 0], table[len(batch.parents) :, 0] = -1, -1
        firsts = np.array([span.first_row for span in batch.spans], np.int32)
        for b, span in enumerate(batch.spans):
            start, end, slot = span.start, span.start + len(span.tokens), span.slot
            n_replayed = start - int(self.at[slot]) if start > 0 else 0
            assert 0 <= n_replayed <= MOST_NODES, f"a state at {self.at[slot]} is continued at {start}"
            assert span.tree is None or len(span.tree) <= MOST_NODES, f"a tree of {len(span.tree)} nodes"
            boundary, snapshot = -1, -1
            if end - start > 1 and end // BLOCK * BLOCK > start:
                snapshot = self._pending.pop(slot, (-1, 0))[0]
                snapshot = snapshot if snapshot >= 0 else self._table.take_number()
                if snapshot >= 0:
                    self._pending[slot] = snapshot, end // BLOCK * BLOCK
                    boundary = span.first_row + end // BLOCK * BLOCK - 1 - start
            spans[b, :PATH] = slot, span.first_row, batch.roots[b], batch.ends[b], n_replayed, start == 0, boundary, snapshot
            spans[b, PATH:] = self._paths[slot]
        return int(plan_walk(batch.parents, firsts, batch.roots, batch.ends, table)) if len(firsts) else 0

    def note_pass(self, batch: Batch, failed: bool = False) -> None:
        """Note how far a pass took the states of its sequences; one that failed has taken them somewhere."""
        for span in batch.spans:
            self.at[span.slot] = _LOST if failed else span.start + len(span.tokens)
            self._paths[span.slot] = np.arange(MOST_NODES)

    def note_path(self, slot: int, start: int, path: np.ndarray) -> None:
        self._paths[slot, : len(path)] = path - start

    @torch.inference_mode()
    def admit(self, slot: int, hashes: Sequence[bytes], n_positions: int) -> int:
        """Admit a sequence as block tables do, with a prefix that ends where a snapshot of the state is."""
        n = self._table.count_blocks(hashes[: self.count_blocks(n_positions)], self.block_of)
        taken = super().admit(slot, hashes[:n], n_positions)
        if taken > 0:
            i = self._table.use(hashes[taken - 1])
            self._state[slot], self._tails[slot] = self._kept_state[i], self._kept_tails[i]
            self.at[slot] = BLOCK * taken
        return taken

    def register(self, slot: int, hashes: Sequence[bytes]) -> None:
        super().register(slot, hashes)
        snapshot, position = self._pending.get(slot, (-1, 0))
        if 0 < position <= BLOCK * len(hashes):
            del self._pending[slot]
            if (digest := hashes[position // BLOCK - 1]) in self._table:
                self._table.give_back(snapshot)
            else:
                self._table.add(digest, snapshot)

    def has_state(self, digest: bytes) -> bool:
        return digest in self._table

    def read_state(self, digest: bytes) -> bytes | None:
        if (i := self._table.find(digest)) is None:
            return None
        return b"".join(kept[i].view(torch.uint8).cpu().numpy().tobytes() for kept in (self._kept_state, self._kept_tails))

    @torch.inference_mode()
    def write_state(self, digest: bytes, body: bytes) -> None:
        if digest in self._table or (i := self._table.take_number()) < 0:
            return
        data, at = torch.frombuffer(bytearray(body), dtype=torch.uint8), 0
        for kept in (self._kept_state, self._kept_tails):
            n = kept[i].nbytes
            kept[i] = data[at : at + n].view(kept.dtype).view(kept[i].shape).to(kept.device)
            at += n
        self._table.add(digest, i)

    def release(self, slot: int) -> None:
        super().release(slot)
        self.at[slot] = 0
        if slot in self._pending:
            self._table.give_back(self._pending.pop(slot)[0])


def _array_shapes(shape: DeltaShape) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of a sequence's state, its convolutions' tails and its log, of all layers."""
    layers = shape.n_layers
    return (
        (layers, shape.n_heads, shape.key_dim, shape.value_dim),
        (layers, TAPS - 1, shape.n_channels),
        (layers, MOST_NODES, shape.n_channels + 2 * shape.n_heads),
    )


def snapshot_bytes(shape: DeltaShape, dtype: torch.dtype) -> int:
    """Return the bytes of one snapshot: a state and the tails."""
    state, tails, _ = _array_shapes(shape)
    return 4 * math.prod(state) + dtype.itemsize * math.prod(tails)


def sequence_bytes(shape: DeltaShape, dtype: torch.dtype) -> int:
    """Return the bytes that a sequence takes besides keys and values."""
    return snapshot_bytes(shape, dtype) + dtype.itemsize * math.prod(_array_shapes(shape)[2])


def count_sequences(shape: DeltaShape, dtype: torch.dtype, n_bytes: int, max_seqs: int) -> tuple[int, int]:
    """Return how many sequences run at a time and how many snapshots are kept, in up to half of `n_bytes`. Raises OutOfMemoryError."""
    snapshot, sequence = snapshot_bytes(shape, dtype), sequence_bytes(shape, dtype)
    n_snapshots = max(1, min(SNAPSHOTS, n_bytes // (8 * snapshot)))
    most = (n_bytes // 2 - n_snapshots * snapshot) // sequence
    if most < 1:
        raise OutOfMemoryError(f"{max(n_bytes, 0) >> 20} MiB are too few for states of {sequence >> 20} MiB per sequence")
    return min(most, max_seqs), n_snapshots


def pass_bytes(shape: DeltaShape, n_rows: int, n_seqs: int) -> int:
    """Return the bytes of a pass's `DeltaWorkspace` in float32."""
    state = shape.n_heads * shape.key_dim * shape.value_dim
    return 4 * ((n_rows + MOST_NODES * n_seqs) * (shape.n_channels + 2 * shape.n_heads) + count_copies(n_rows) * state)

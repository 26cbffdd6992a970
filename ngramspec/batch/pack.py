"""Packing: all rows of all sequences of a step into the flat arrays of one `Batch`.

Knows block tables and draft trees, not models. Each sequence comes as a `Span`: a chunk of its prompt, or its
last token (the root) with a draft tree behind it. Root row first, then nodes in tree order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from ngramspec.batch.block_tables import BlockTables
from ngramspec.batch.sampling import Sampler
from ngramspec.batch.types import BLOCK, DraftTree

ROWS_PER_ITEM = 4
"""Rows of one sequence that share loads of keys in attention; scheduling only, no bit depends on it."""

_NO_NODES = np.empty(0, np.int32)


@dataclass(slots=True)
class Span:
    """Rows of one sequence in a pass: `tokens` from position `start` on, then the nodes of `tree` behind the last of them."""

    slot: int
    tokens: np.ndarray  # [n] int32
    start: int
    tree: DraftTree | None = None
    logits: int = 1
    """Logits are wanted for so many of the last tokens and for every node; 0 for a chunk that does not end its prompt."""
    sampler: Sampler | None = None
    """Picks the sequence's next tokens; a runner that can do so on its device does. None: only logits are wanted."""
    n_prompt: int = 0
    """Of the sequence: the row at position p is asked for output p + 1 - n_prompt."""
    samples: bool = True
    """The rows end the sequence's known tokens, so that its next ones are sampled from them."""
    first_row: int = -1
    """Row of the pass where the span's begin; set by `pack`."""
    first_logits: int = -1
    """Row of the pass's logits where the span's begin; set by `pack`."""

    @property
    def root_logits(self) -> int:
        """Row of the logits after the last of `tokens`, which those after the nodes follow."""
        return self.first_logits + self.logits - 1

    @property
    def end_logits(self) -> int:
        """Row of the logits behind the span's last."""
        return self.first_logits + self.n_logits

    @property
    def n_rows(self) -> int:
        return len(self.tokens) + (len(self.tree) if self.tree else 0)

    @property
    def n_logits(self) -> int:
        return self.logits + self.n_rows - len(self.tokens) if self.logits else 0


@dataclass(slots=True)
class Batch:
    """The rows of one pass, T in all, for I groups of neighbouring rows of one sequence. Made by `pack`, read by the runner."""

    input_ids: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int32: position in the text; the row sees positions 0..its own
    logits_rows: np.ndarray  # [N] int64: rows whose logits are wanted, rising
    items: np.ndarray  # [I, 2] int32: first and last + 1 row of the group
    owners: np.ndarray  # [I] int32: slot of the group's sequence
    tables: np.ndarray  # [I, max_blocks] int32: the block table of the group's sequence
    bases: np.ndarray  # [T] int32: from this position on, a key's slot is found through `paths`; before, slot = position
    paths: np.ndarray  # [T, depth] int32: slots of positions base, base + 1, …, the row's own (draft ancestors, then itself)
    blocks: np.ndarray  # [T] int32: block of the row's write slot
    offsets: np.ndarray  # [T] int32: its offset in that block
    parents: np.ndarray  # [T] int32: the row of a draft node's parent; -1 for all other rows
    roots: np.ndarray  # [B] int32: row of each sequence's last known token
    ends: np.ndarray  # [B] int32: its last row + 1
    spans: list[Span]  # [B]


def depths(parents: np.ndarray) -> np.ndarray:
    """[N] int32: 1 for a child of the root, its parent's depth + 1 for any other node."""
    depth = np.zeros(len(parents), np.int32)
    _depths(parents, depth)
    return depth


@njit(cache=True, nogil=True)
def _depths(parents, depth):
    deepest = np.int32(0)
    for i in range(parents.shape[0]):
        depth[i] = np.int32(1) if parents[i] < 0 else depth[parents[i]] + np.int32(1)
        deepest = max(deepest, depth[i])
    return deepest


@njit(cache=True, nogil=True)
def _deepest(nodes, parents):
    """The greatest depth in any of the trees, whose parents [sum(nodes)] stand one after the other; at least 1."""
    deepest, at = np.int32(1), 0
    depth = np.empty(parents.shape[0], np.int32)
    for b in range(nodes.shape[0]):
        deepest = max(deepest, _depths(parents[at : at + nodes[b]], depth[at : at + nodes[b]]))
        at += nodes[b]
    return deepest


@njit(cache=True, nogil=True)
def _fill(spans, parents, tables, rows_per_item, positions, bases, paths, blocks, offsets, row_parents, logits_rows, items, owners):
    """The arrays of a `Batch` from spans [B, 5] (slot, start, tokens, nodes, logits rows among the tokens); returns the number of items."""
    row, node, n_logits, n_items = 0, 0, 0, 0
    for b in range(spans.shape[0]):
        slot, start, n, m, wanted = spans[b, 0], spans[b, 1], spans[b, 2], spans[b, 3], spans[b, 4]
        for i in range(n + m):
            s = start + i
            blocks[row + i], offsets[row + i] = tables[slot, s // BLOCK], s % BLOCK
        for i in range(n):
            positions[row + i], bases[row + i], row_parents[row + i] = start + i, start + i + 1, -1
        first, root = start + n, row + n - 1
        for i in range(m):
            at, parent = root + 1 + i, root + 1 + parents[node + i]
            depth = positions[parent] + 1 - first
            positions[at], row_parents[at] = first + depth, parent
            for j in range(depth):
                paths[at, j] = paths[parent, j]
            paths[at, depth] = first + i
            straight = i == depth and (parent == root or bases[parent] != first)  # every ancestor lies at its own position
            bases[at] = first + depth + 1 if straight else first
        if wanted:
            for i in range(n - wanted, n + m):
                logits_rows[n_logits] = row + i
                n_logits += 1
        for i in range(0, n + m, rows_per_item):
            items[n_items, 0], items[n_items, 1], owners[n_items] = row + i, row + min(i + rows_per_item, n + m), slot
            n_items += 1
        row += n + m
        node += m
    return n_items


def pack(spans: list[Span], tables: BlockTables, rows_per_item: int = ROWS_PER_ITEM) -> Batch:
    """The batch of these spans, in their order; every span's slots must have been reserved."""
    pieces: list[np.ndarray] = []
    trees: list[np.ndarray] = []
    table = np.empty((len(spans), 5), np.int64)
    n_rows, n_logits = 0, 0
    for b, span in enumerate(spans):
        span.first_row, span.first_logits = n_rows, n_logits
        pieces.append(span.tokens)
        n_nodes = 0
        if span.tree is not None:
            n_nodes = len(span.tree)
            pieces.append(span.tree.tokens)
            trees.append(span.tree.parents)
        table[b] = span.slot, span.start, len(span.tokens), n_nodes, span.logits
        n_rows += len(span.tokens) + n_nodes
        n_logits += span.logits + n_nodes if span.logits else 0
    input_ids = np.concatenate(pieces, dtype=np.int64)
    parents = np.concatenate(trees) if trees else _NO_NODES
    depth = _deepest(table[:, 3], parents)
    counts = table[:, 2] + table[:, 3]
    max_items = int((-(-counts // rows_per_item)).sum())
    positions, bases, blocks, offsets, row_parents = np.empty((5, n_rows), np.int32)
    paths = np.zeros((n_rows, depth), np.int32)
    logits_rows, items, owners = np.empty(n_logits, np.int64), np.empty((max_items, 2), np.int32), np.empty(max_items, np.int32)
    _fill(table, parents, tables.tables, rows_per_item, positions, bases, paths, blocks, offsets, row_parents, logits_rows, items, owners)
    used = tables.blocks_for(int((table[:, 1] + counts).max()))
    ends = np.cumsum(counts, dtype=np.int32)
    roots = (ends - 1 - table[:, 3]).astype(np.int32)
    return Batch(
        input_ids, positions, logits_rows, items, owners, np.ascontiguousarray(tables.tables[owners, :used]), bases, paths, blocks, offsets,
        row_parents, roots, ends, spans,
    )  # fmt: skip

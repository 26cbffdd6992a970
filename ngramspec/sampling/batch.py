"""Packing: put all rows of all sequences of a step into the flat arrays of one `Batch`.

Knows block tables and draft trees, not models. Each sequence comes as a `Span`: a chunk of its prompt, or its
last token (the root) with a draft tree after it. Root row first, then nodes in tree order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK, DraftTree
from ngramspec.sampling.sampler import Sampler

ROWS_PER_ITEM = 4  # rows of one sequence that share loads of keys in attention; scheduling only, no bit depends on it
# Most rows of prompts whose logits are wanted in one pass, for log-probabilities of prompts: a logits row is as wide as the vocabulary.
SCORED_ROWS = 256


@dataclass(slots=True)
class Span:
    """Rows of one sequence in a pass: `tokens` from position `start` on, then the nodes of `tree` after the last of them."""

    slot: int
    tokens: np.ndarray  # [n] int32
    start: int
    tree: DraftTree | None = None
    logits: int = 1
    """Number of the last tokens whose logits are wanted, beside those of all nodes; 0 for a chunk that does not end its prompt."""
    sampler: Sampler | None = None
    """The sampler that picks the sequence's next tokens, on the device if the runner can. None: only logits are wanted."""
    n_prompt: int = 0
    """Length of the sequence's prompt: the row at position p is sampled for output p + 1 - n_prompt."""
    samples: bool = True
    """The rows end the sequence's known tokens, so that its next ones are sampled from them."""
    first_row: int = -1
    """Row of the pass where the span's begin; set by `pack`."""
    first_logits: int = -1
    """Row of the pass's logits where the span's begin; set by `pack`."""

    @property
    def root_logits(self) -> int:
        """Return the logits row after the last of `tokens`; those after the nodes follow it."""
        return self.first_logits + self.logits - 1

    @property
    def end_logits(self) -> int:
        """Return the logits row after the span's last one."""
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
    bases: np.ndarray  # [T] int32: from this position of the text on, KV positions are in `paths`; before, they equal those of the text
    paths: np.ndarray  # [T, depth] int32: KV positions from the row's base on: of its draft ancestors, then its own
    blocks: np.ndarray  # [T] int32: block that the row's keys and values are written to
    offsets: np.ndarray  # [T] int32: its offset in that block
    parents: np.ndarray  # [T] int32: the row of a draft node's parent; -1 for all other rows
    roots: np.ndarray  # [B] int32: row of each sequence's last known token
    ends: np.ndarray  # [B] int32: its last row + 1
    root_logits: np.ndarray  # [B] int32: row of the logits of its last known token, where these are wanted
    spans: list[Span]  # [B]


def compute_depths(parents: np.ndarray) -> np.ndarray:
    """Return the depth of each node [N] int32: 1 for a child of the root, its parent's depth + 1 for any other node."""
    depth = np.zeros(len(parents), np.int32)
    _compute_depths(parents, depth)
    return depth


@njit(cache=True, nogil=True)
def _compute_depths(parents, depth):
    deepest = np.int32(0)
    for i in range(parents.shape[0]):
        depth[i] = np.int32(1) if parents[i] < 0 else depth[parents[i]] + np.int32(1)
        deepest = max(deepest, depth[i])
    return deepest


def concatenate(arrays: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """Return the arrays, all of this dtype, as one; a single one is not copied."""
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def concatenate_ragged(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return where each array begins in the whole, and where the last ends [n + 1] int64, and the whole [m] int32."""
    start = np.array([0, *itertools.accumulate(map(len, arrays))], np.int64)
    return start, concatenate([np.ascontiguousarray(a, np.int32) for a in arrays], np.int32)


@njit(cache=True, nogil=True)
def fill_batch(spans, tokens, node_parents, tables, rows_per_item):
    """Return the arrays of a `Batch` in their order.

    spans [B, 5]: slot, start, number of tokens, of nodes, of logits rows among the tokens. `tokens` has each span's tokens, then its nodes;
    `node_parents` the nodes' parents.
    """
    B, n_rows, n_logits, n_items, n_nodes, length = spans.shape[0], 0, 0, 0, 0, 0
    roots, ends, root_logits = np.empty(B, np.int32), np.empty(B, np.int32), np.empty(B, np.int32)
    deepest, depth = np.int32(1), np.empty(node_parents.shape[0], np.int32)
    for b in range(B):
        start, n, m, wanted = spans[b, 1], spans[b, 2], spans[b, 3], spans[b, 4]
        roots[b], root_logits[b] = n_rows + n - 1, n_logits + wanted - 1
        n_rows += n + m
        ends[b] = n_rows
        n_logits += wanted + m if wanted else 0
        n_items += (n + m + rows_per_item - 1) // rows_per_item
        deepest = max(deepest, _compute_depths(node_parents[n_nodes : n_nodes + m], depth[n_nodes : n_nodes + m]))
        n_nodes += m
        length = max(length, start + n + m)
    input_ids, paths = np.empty(n_rows, np.int64), np.zeros((n_rows, deepest), np.int32)
    positions, bases, blocks, offsets, parents = (
        np.empty(n_rows, np.int32), np.empty(n_rows, np.int32), np.empty(n_rows, np.int32), np.empty(n_rows, np.int32),
        np.empty(n_rows, np.int32),
    )  # fmt: skip
    n_blocks = (length + BLOCK - 1) // BLOCK
    logits_rows, items, owners = np.empty(n_logits, np.int64), np.empty((n_items, 2), np.int32), np.empty(n_items, np.int32)
    item_tables = np.empty((n_items, n_blocks), np.int32)
    row, node, n_logits, n_items = 0, 0, 0, 0
    for b in range(B):
        slot, start, n, m, wanted = spans[b, 0], spans[b, 1], spans[b, 2], spans[b, 3], spans[b, 4]
        for i in range(n + m):
            s = start + i
            input_ids[row + i], blocks[row + i], offsets[row + i] = tokens[row + i], tables[slot, s // BLOCK], s % BLOCK
        for i in range(n):
            positions[row + i], bases[row + i], parents[row + i] = start + i, start + i + 1, -1
        first, root = start + n, row + n - 1
        for i in range(m):
            at, parent = root + 1 + i, root + 1 + node_parents[node + i]
            above = positions[parent] + 1 - first
            positions[at], parents[at] = first + above, parent
            for j in range(above):
                paths[at, j] = paths[parent, j]
            paths[at, above] = first + i
            straight = i == above and (parent == root or bases[parent] != first)  # every ancestor lies at its own position
            bases[at] = first + above + 1 if straight else first
        if wanted:
            for i in range(n - wanted, n + m):
                logits_rows[n_logits] = row + i
                n_logits += 1
        for i in range(0, n + m, rows_per_item):
            items[n_items, 0], items[n_items, 1], owners[n_items] = row + i, row + min(i + rows_per_item, n + m), slot
            for j in range(n_blocks):  # copying a slice would compile an error message of other shapes, for 2 s
                item_tables[n_items, j] = tables[slot, j]
            n_items += 1
        row += n + m
        node += m
    return input_ids, positions, logits_rows, items, owners, item_tables, bases, paths, blocks, offsets, parents, roots, ends, root_logits


def pack(spans: list[Span], tables: BlockTables, rows_per_item: int = ROWS_PER_ITEM) -> Batch:
    """Return the batch of these spans, in their order; every span's KV positions must have been reserved."""
    tokens: list[np.ndarray] = []
    parents: list[np.ndarray] = []
    table: list[tuple[int, int, int, int, int]] = []
    row, logits_row = 0, 0
    for span in spans:
        span.first_row, span.first_logits = row, logits_row
        n, m, tree = len(span.tokens), 0, span.tree
        tokens.append(span.tokens)
        if tree is not None:
            m = len(tree.tokens)
            tokens.append(tree.tokens)
            parents.append(tree.parents)
        table.append((span.slot, span.start, n, m, span.logits))
        row += n + m
        logits_row += span.logits + m if span.logits else 0
    lines = np.array(table, np.int64)
    return Batch(*fill_batch(lines, concatenate(tokens, np.int32), concatenate(parents, np.int32), tables.tables, rows_per_item), spans)  # type: ignore[call-arg]  # mypy knows no compiled function

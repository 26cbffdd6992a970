"""Packing: all rows of all sequences of a step into the flat arrays of one `Batch`.

Knows block tables and draft trees, not models. Each sequence comes as a `Span`: a chunk of its prompt, or its
last token (the root) with a draft tree behind it. Root row first, then nodes in tree order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ngramspec.kv import BlockTables
from ngramspec.types import Batch, DraftTree

ROWS_PER_ITEM = 4
"""Rows of one sequence that share loads of keys in attention; scheduling only, no bit depends on it."""


@dataclass(slots=True)
class Span:
    """Rows of one sequence in a pass: `tokens` from position `start` on, then the nodes of `tree` behind the last of them."""

    slot: int
    tokens: np.ndarray  # [n] int32
    start: int
    tree: DraftTree | None = None
    logits: int = 1
    """Logits are wanted for so many of the last tokens and for every node; 0 for a chunk that does not end its prompt."""

    @property
    def n_rows(self) -> int:
        return len(self.tokens) + (len(self.tree) if self.tree else 0)

    @property
    def n_logits(self) -> int:
        return self.logits + self.n_rows - len(self.tokens) if self.logits else 0

    @property
    def end(self) -> int:
        """Slots that must be writable."""
        return self.start + self.n_rows


def depths(parents: np.ndarray) -> np.ndarray:
    """[N] int32: 1 for a child of the root, its parent's depth + 1 for any other node."""
    depth = np.zeros(len(parents), np.int32)
    for i, parent in enumerate(parents.tolist()):
        depth[i] = 1 if parent < 0 else depth[parent] + 1
    return depth


def pack(spans: list[Span], tables: BlockTables) -> Batch:
    """The batch of these spans, in their order; every span's slots must have been reserved."""
    n_rows = sum(span.n_rows for span in spans)
    depth_max = max((int(depths(s.tree.parents).max()) for s in spans if s.tree and len(s.tree)), default=1)
    input_ids, positions = np.empty(n_rows, np.int64), np.empty(n_rows, np.int32)
    bases, paths = np.empty(n_rows, np.int32), np.zeros((n_rows, depth_max), np.int32)
    blocks, offsets = np.empty(n_rows, np.int32), np.empty(n_rows, np.int32)
    logits_rows: list[int] = []
    items: list[tuple[int, int]] = []
    owners: list[int] = []
    row = 0
    for span in spans:
        n, m = len(span.tokens), span.n_rows
        rows = slice(row, row + m)
        slots = np.arange(span.start, span.start + m, dtype=np.int32)
        input_ids[row : row + n] = span.tokens
        positions[rows] = slots
        if span.tree and len(span.tree):
            parents = span.tree.parents
            first = span.start + n
            input_ids[row + n : row + m] = span.tree.tokens
            positions[row + n : row + m] = first - 1 + depths(parents)
            bases[rows] = positions[rows] + 1
            for i, parent in enumerate(parents.tolist()):
                at, depth = row + n + i, int(positions[row + n + i]) - first
                if parent >= 0:
                    paths[at, :depth] = paths[row + n + parent, :depth]
                paths[at, depth] = first + i
                if paths[at, depth] != first + depth or (parent >= 0 and bases[row + n + parent] == first):
                    bases[at] = first
        else:
            bases[rows] = positions[rows] + 1
        blocks[rows], offsets[rows] = tables.locate(span.slot, slots)
        if span.logits:
            logits_rows.extend(range(row + n - span.logits, row + m))
        for a in range(row, row + m, ROWS_PER_ITEM):
            items.append((a, min(a + ROWS_PER_ITEM, row + m)))
            owners.append(span.slot)
        row += m
    used = tables.blocks_for(max(span.end for span in spans))
    return Batch(
        input_ids, positions, np.asarray(logits_rows, np.int64), np.asarray(items, np.int32),
        np.ascontiguousarray(tables.tables[owners, :used]), bases, paths, blocks, offsets,
    )  # fmt: skip

"""Packing against its definition, row by row."""

from __future__ import annotations

import numpy as np
import pytest

from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK, DraftTree
from ngramspec.sampling.batch import Span, compute_depths, pack


def random_tree(rng: np.random.Generator, n: int) -> DraftTree:
    parents = np.array([rng.integers(-1, i) if rng.random() < 0.5 else i - 1 for i in range(n)], np.int32)
    return DraftTree(rng.integers(0, 99, n).astype(np.int32), parents, np.ones(n, np.float32), np.zeros(n, np.uint8))


def ancestors(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root's child down to the node itself."""
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, int(tree.parents[path[0]]))
    return path


@pytest.mark.parametrize("seed", range(20))
def test_every_row_sees_its_prefix_and_its_own_ancestors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = BlockTables(200, 8, 20 * BLOCK)
    spans: list[Span] = []
    for slot in rng.permutation(8)[: rng.integers(1, 8)].tolist():
        n, m = int(rng.integers(1, 70)), int(rng.integers(0, 30))
        start = int(rng.integers(0, 300))
        tree = random_tree(rng, m) if m else None
        spans.append(Span(slot, rng.integers(0, 99, n).astype(np.int32), start, tree, int(rng.integers(0, n + 1))))
        assert tables.reserve(slot, start + n + m)
    per_item = int(rng.integers(1, 9))
    batch = pack(spans, tables, per_item)

    row, wanted = 0, []
    for span, root, end in zip(spans, batch.roots, batch.ends, strict=True):
        n, first = len(span.tokens), span.start + len(span.tokens)
        assert (root, end) == (row + n - 1, row + span.n_rows)
        for i in range(span.n_rows):
            at = row + i
            block, offset = tables.locate(span.slot, np.array([span.start + i]))
            assert (batch.blocks[at], batch.offsets[at]) == (block[0], offset[0])
            nodes = ancestors(span.tree, i - n) if span.tree and i >= n else []
            position = span.start + i if i < n else first - 1 + len(nodes)
            token = span.tokens[i] if i < n else span.tree.tokens[i - n]  # type: ignore[union-attr]
            assert (batch.input_ids[at], batch.positions[at]) == (token, position)
            slots = list(range(position + 1 - len(nodes))) + [first + node for node in nodes]
            base = int(batch.bases[at])
            seen = list(range(base)) + batch.paths[at, : position + 1 - base].tolist()
            assert seen == slots
            parent = (row + n + nodes[-2] if len(nodes) > 1 else root) if nodes else -1
            assert batch.parents[at] == parent
            if span.logits and i >= n - span.logits:
                wanted.append(at)
        row += span.n_rows
    assert batch.logits_rows.tolist() == wanted
    assert [a for first, last in batch.items for a in range(first, last)] == list(range(row))
    assert all(0 < last - first <= per_item for first, last in batch.items)
    owner_of = {a: span.slot for span, end in zip(spans, batch.ends, strict=True) for a in range(end - span.n_rows, end)}
    assert [owner_of[first] for first, _ in batch.items] == batch.owners.tolist()
    assert np.array_equal(batch.tables, tables.tables[batch.owners, : batch.tables.shape[1]])


def test_a_chain_lies_where_its_tokens_will_be() -> None:
    tables = BlockTables(4, 1, 4 * BLOCK)
    assert tables.reserve(0, 40)
    chain = DraftTree(np.arange(5, dtype=np.int32), np.arange(-1, 4, dtype=np.int32), np.ones(5, np.float32), np.zeros(5, np.uint8))
    batch = pack([Span(0, np.array([7], np.int32), 30, chain)], tables)
    assert batch.bases.tolist() == (batch.positions + 1).tolist(), "nothing is looked up"


def test_depths() -> None:
    assert compute_depths(np.array([-1, -1, 0, 2, 1], np.int32)).tolist() == [1, 1, 2, 3, 2]
    assert compute_depths(np.empty(0, np.int32)).tolist() == []

"""What speculation did for each sequence, counted pass by pass in a table. Knows rows and nodes, no sequences."""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit

FIELDS = ("passes", "tokens", "drafted", "accepted", "drafts")
"""The table's first columns, as `types.Stats` has them. Then nodes and accepted ones by source, the same by depth, passes by length."""


def columns(n_sources: int, spec_length: int) -> np.ndarray:
    """[7] int64: where the table's parts begin, and its width."""
    return np.cumsum([0, len(FIELDS), n_sources, n_sources, spec_length, spec_length, spec_length + 1])


@njit(cache=True, nogil=True)
def count(table, expected, columns, lines, sources, probs, paths, positions, roots, ends):
    """Add a pass to the tables. lines [B, 4] are the sequence's row in it (-1: it is not counted), its index in the batch, its tokens, the
    length of its path; sources and probs of all their nodes, one after the other, and their paths."""
    drafted, accepted, drafted_depth, accepted_depth, lengths = columns[1:6]
    node = at = 0
    for i in range(lines.shape[0]):
        row, b, n_path = lines[i, 0], lines[i, 1], lines[i, 3]
        root = roots[b]
        n_nodes = ends[b] - root - 1
        if row >= 0:
            line = table[row]
            line[0] += 1
            line[1] += lines[i, 2]
            if n_nodes:
                line[2] += n_nodes
                line[3] += n_path
                line[4] += 1
                line[lengths + n_path] += 1
            for j in range(n_nodes):
                line[drafted + sources[node + j]] += 1
                expected[row, sources[node + j]] += probs[node + j]
                line[drafted_depth + min(positions[root + 1 + j] - positions[root], accepted_depth - drafted_depth) - 1] += 1
            for j in range(n_path):
                line[accepted + sources[node + paths[at + j]]] += 1
                line[accepted_depth + j] += 1
        node += n_nodes
        at += n_path


def warmup() -> None:
    """Compile, or load from disk, everything here."""
    none, table, expected = np.empty(0, np.int32), np.zeros((1, 8), np.int64), np.zeros((1, 1))
    sources, probs = np.empty(0, np.uint8), np.empty(0, np.float32)
    count(table, expected, np.arange(7), np.zeros((0, 4), np.int64), sources, probs, none, none, none, none)

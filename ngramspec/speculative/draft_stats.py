"""Statistics of drafts: what speculation did for each sequence, counted for all of them at once. Used by steps and by integrations.

Passes go in with their trees and accepted paths, `Stats` come out when a sequence ends. Knows sequences by keys only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import DraftTree, Stats
from ngramspec.sampling.batch import compute_depths, concatenate

# First columns of the table, named as in `outputs.Stats`. Nodes and accepted nodes by source, by depth, and passes by length follow.
FIELDS = ("passes", "tokens", "drafted", "accepted", "drafts")
# Passes that are counted in one go: a forward pass fills the caches with weights, so that code which runs once after it is slow.
BATCHED_PASSES = 8


class StatsTable(NamedTuple):
    """Counters of passes, a row for each sequence."""

    counts: np.ndarray  # [n, columns[-1]] int64
    expected: np.ndarray  # [n, sources] float64: sums of the nodes' probabilities
    columns: np.ndarray  # [7] int64: where the parts of `counts` begin, and its width


class CountedPass(NamedTuple):
    """What one pass was for one sequence."""

    key: Hashable
    batch_index: int
    """Index in `roots` and `ends` of the pass."""
    n_tokens: int
    path: np.ndarray  # [j] int32: accepted nodes in depth order
    tree: DraftTree | None


class DraftStats:
    """The statistics of all running sequences, by key. Rows of the table are given out as sequences come."""

    def __init__(self, source_names: Sequence[str], spec_length: int) -> None:
        self._names, n = list(source_names), len(source_names)
        self._columns = np.cumsum([0, len(FIELDS), n, n, spec_length, spec_length, spec_length + 1])
        self._counts, self._expected = np.zeros((1, self._columns[-1]), np.int64), np.zeros((1, n))
        self._free = [0]
        self._row_of: dict[Hashable, int] = {}
        self._passes: list[tuple[list[CountedPass], np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, counted: list[CountedPass], positions: np.ndarray, roots: np.ndarray, ends: np.ndarray) -> None:
        """Count a pass. `positions` [T] of its rows; sequence i's tree is in the rows from roots[i] + 1 to ends[i]."""
        if counted:
            self._passes.append((counted, positions, roots, ends))
            if len(self._passes) >= BATCHED_PASSES:
                self._flush()

    def add_trees(self, counted: list[CountedPass]) -> None:
        """Count a pass of which only the trees are known; each `batch_index` is an index into this list."""
        levels = [
            np.zeros(1, np.int32) if each.tree is None else np.append(np.int32(0), compute_depths(each.tree.parents)) for each in counted
        ]
        ends = np.cumsum([len(each) for each in levels], dtype=np.int32)
        roots = np.append(np.int32(0), ends[:-1])
        self.add(counted, concatenate(levels, np.int32), roots, ends)

    def get_table(self, keys: Iterable[Hashable]) -> tuple[StatsTable, list[int]]:
        """Return the table for compiled code that counts by itself, and the rows of these sequences in it."""
        rows = [self._reserve_row(key) for key in keys]
        return StatsTable(self._counts, self._expected, self._columns), rows

    def read(self, key: Hashable) -> Stats:
        """Return what was counted for a sequence; nothing if it is unknown."""
        self._flush()
        row = self._row_of.get(key)
        if row is None:
            return Stats()
        ones, *parts = (part.tolist() for part in np.split(self._counts[row], self._columns[1:-1]))
        drafted, accepted, drafted_by_depth, accepted_by_depth, lengths = parts
        return Stats(
            **dict(zip(FIELDS, ones, strict=True)),
            drafted_by_source={name: n for name, n in zip(self._names, drafted, strict=True) if n},
            accepted_by_source={name: n for name, n in zip(self._names, accepted, strict=True) if n},
            expected_by_source={name: p for name, p in zip(self._names, self._expected[row].tolist(), strict=True) if p},
            drafted_by_depth=_trim(drafted_by_depth),
            accepted_by_depth=_trim(accepted_by_depth),
            accepted_lengths=_trim(lengths),
        )

    def pop(self, key: Hashable) -> Stats:
        """Return what was counted for a sequence, and forget it."""
        stats = self.read(key)
        row = self._row_of.pop(key, None)
        if row is not None:
            self._counts[row] = self._expected[row] = 0
            self._free.append(row)
        return stats

    def _flush(self) -> None:
        for counted, positions, roots, ends in self._passes:
            rows = np.array([(self._reserve_row(each.key), each.batch_index, each.n_tokens, len(each.path)) for each in counted], np.int64)
            trees = [each.tree for each in counted if each.tree is not None]
            sources, probs, paths = [tree.sources for tree in trees], [tree.probs for tree in trees], [each.path for each in counted]
            nodes = concatenate(sources, np.uint8), concatenate(probs, np.float32), concatenate(paths, np.int32)
            count_pass((self._counts, self._expected, self._columns), rows, *nodes, positions, roots, ends)
        self._passes.clear()

    def _reserve_row(self, key: Hashable) -> int:
        row = self._row_of.get(key)
        if row is None:
            if not self._free:
                n = len(self._counts)
                self._counts, self._expected = (np.concatenate([a, np.zeros_like(a)]) for a in (self._counts, self._expected))
                self._free = list(range(n, 2 * n))
            row = self._row_of[key] = self._free.pop()
        return row


def _trim(counts: list[int]) -> list[int]:
    """Return the counts without the zeros at their end."""
    n = len(counts)
    while n and counts[n - 1] == 0:
        n -= 1
    return counts[:n]


@njit(cache=True, nogil=True)
def count_pass(table, rows, sources, probs, paths, positions, roots, ends):
    """Add a pass to a table, the members of a StatsTable.

    rows [B, 4]: each sequence's row in it (-1: it is not counted), its index in the pass, its tokens, the length of its path. `sources` and
    `probs` of all nodes and `paths` follow each other in the same order.
    """
    counts, expected, columns = table
    drafted, accepted, drafted_depth, accepted_depth, lengths = columns[1:6]
    node = at = 0
    for i in range(rows.shape[0]):
        row, b, n_path = rows[i, 0], rows[i, 1], rows[i, 3]
        root = roots[b]
        n_nodes = ends[b] - root - 1
        if row >= 0:
            row_counts = counts[row]
            row_counts[0] += 1
            row_counts[1] += rows[i, 2]
            if n_nodes:
                row_counts[2] += n_nodes
                row_counts[3] += n_path
                row_counts[4] += 1
                row_counts[lengths + n_path] += 1
            for j in range(n_nodes):
                row_counts[drafted + sources[node + j]] += 1
                expected[row, sources[node + j]] += probs[node + j]
                row_counts[drafted_depth + min(positions[root + 1 + j] - positions[root], accepted_depth - drafted_depth) - 1] += 1
            for j in range(n_path):
                row_counts[accepted + sources[node + paths[at + j]]] += 1
                row_counts[accepted_depth + j] += 1
        node += n_nodes
        at += n_path


def warmup() -> None:
    """Compile, or load from disk, everything here."""
    none, table = np.empty(0, np.int32), (np.zeros((1, 8), np.int64), np.zeros((1, 1)), np.arange(7))
    sources, probs = np.empty(0, np.uint8), np.empty(0, np.float32)
    count_pass(table, np.zeros((0, 4), np.int64), sources, probs, none, none, none, none)

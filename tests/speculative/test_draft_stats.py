"""Statistics are counted for all sequences at once: against counting one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import DraftTree, Stats
from ngramspec.sampling.batch import Span, compute_depths, pack
from ngramspec.speculative.draft_stats import CountedPass, DraftStats

NAMES = ["a", "b", "c"]
DEPTH = 6


def random_tree(rng: np.random.Generator) -> DraftTree:
    parents: list[int] = []
    for i in range(int(rng.integers(1, 9))):
        parent = int(rng.integers(-1, i))
        parents.append(parent if parent < 0 or compute_depths(np.array(parents, np.int32))[parent] < DEPTH else -1)
    n = len(parents)
    sources = rng.integers(0, len(NAMES), n).astype(np.uint8)
    return DraftTree(np.arange(n, dtype=np.int32), np.array(parents, np.int32), rng.integers(1, 9, n).astype(np.float32) / 8, sources)


def one_more(counts: dict[str, Any], name: str, weight: float = 1) -> None:
    counts[name] = counts.get(name, 0) + weight


def at(counts: list[int], i: int) -> None:
    counts.extend([0] * (i + 1 - len(counts)))
    counts[i] += 1


def add(stats: Stats, tree: DraftTree | None, path: list[int], n_tokens: int) -> None:
    stats.passes += 1
    stats.tokens += n_tokens
    if tree is None:
        return
    stats.drafts += 1
    stats.drafted += len(tree)
    stats.accepted += len(path)
    depth = compute_depths(tree.parents).tolist()
    for node, source in enumerate(tree.sources.tolist()):
        one_more(stats.drafted_by_source, NAMES[source])
        one_more(stats.expected_by_source, NAMES[source], float(tree.probs[node]))
        at(stats.drafted_by_depth, depth[node] - 1)
        if node in path:
            one_more(stats.accepted_by_source, NAMES[source])
            at(stats.accepted_by_depth, depth[node] - 1)
    at(stats.accepted_lengths, len(path))


def random_path(rng: np.random.Generator, tree: DraftTree | None) -> list[int]:
    path: list[int] = []
    while tree is not None and rng.random() < 0.7:
        below = np.flatnonzero(tree.parents == (path[-1] if path else -1)).tolist()
        if not below:
            break
        path.append(int(rng.choice(below)))
    return path


@pytest.mark.parametrize("from_batch", [True, False])
def test_counting_all_at_once_is_counting_each(from_batch: bool) -> None:
    """Sequences come and go, some passes give one nothing, and what is counted can be read at any time."""
    rng = np.random.default_rng(0)
    counted, tables = DraftStats(NAMES, DEPTH), BlockTables(20, 20, 64)
    assert all(tables.reserve(slot, 20) for slot in range(20))
    running: dict[int, Stats] = {}
    n_begun = n_ended = 0
    for _ in range(200):
        while len(running) < 7 and rng.random() < 0.4:
            running[n_begun] = Stats()
            n_begun += 1
        spans, passes = [], list[CountedPass]()
        for slot, (key, stats) in enumerate(running.items()):
            gets = rng.random() < 0.9
            tree = random_tree(rng) if gets and rng.random() < 0.7 else None
            spans.append(Span(slot, np.zeros(1, np.int32), 0, tree))
            path = random_path(rng, tree)
            if gets:
                n = len(path) + int(rng.random() < 0.9 or not path)
                add(stats, tree, path, n)
                passes.append(CountedPass(key, slot if from_batch else len(passes), n, np.array(path, np.int32), tree))
        if from_batch and spans:
            batch = pack(spans, tables)
            counted.add(passes, batch.positions, batch.roots, batch.ends)
        elif not from_batch:
            counted.add_trees(passes)
        for key in [key for key in running if rng.random() < 0.1]:
            assert counted.read(key) == counted.pop(key) == running.pop(key)
            assert counted.pop(key) == Stats()
            n_ended += 1
    assert n_ended > 50

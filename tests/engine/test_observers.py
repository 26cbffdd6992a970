"""Statistics are counted for all sequences at once: against counting one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ngramspec.engine.observers import Accepted, Counts
from ngramspec.engine.sequence import Sequence
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import DraftTree, Stats
from ngramspec.sampling.batch import Span, depths, pack
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling_params import SamplingParams
from ngramspec.tokenizer.detokenizer import NoText

NAMES = ["a", "b", "c"]
DEPTH = 6


def sequence() -> Sequence:
    prompt, params = np.zeros(1, np.int32), SamplingParams()
    sampler = Sampler(params, index=0, seed=0, prompt=prompt, vocab_size=9, stop_ids=frozenset())
    return Sequence(prompt, params, sampler, NoText(), index=0, stop_ids=frozenset(), max_len=99, speculation=True)


def random_tree(rng: np.random.Generator) -> DraftTree:
    parents: list[int] = []
    for i in range(int(rng.integers(1, 9))):
        parent = int(rng.integers(-1, i))
        parents.append(parent if parent < 0 or depths(np.array(parents, np.int32))[parent] < DEPTH else -1)
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
    depth = depths(tree.parents).tolist()
    for node, source in enumerate(tree.sources.tolist()):
        one_more(stats.drafted_by_source, NAMES[source])
        one_more(stats.expected_by_source, NAMES[source], float(tree.probs[node]))
        at(stats.drafted_by_depth, depth[node] - 1)
        if node in path:
            one_more(stats.accepted_by_source, NAMES[source])
            at(stats.accepted_by_depth, depth[node] - 1)
    at(stats.accepted_lengths, len(path))


def test_counting_all_at_once_is_counting_each() -> None:
    """Sequences come and go, some passes give one nothing, and what is counted is seen when a sequence ends."""
    rng = np.random.default_rng(0)
    counts, tables = Counts(NAMES, DEPTH), BlockTables(20, 20, 64)
    assert all(tables.reserve(slot, 20) for slot in range(20))
    running: list[tuple[Sequence, Stats]] = []
    n_ended = 0
    for _ in range(200):
        while len(running) < 7 and rng.random() < 0.4:
            running.append((sequence(), Stats()))
        spans, accepted = [], []
        for slot, (seq, stats) in enumerate(running):
            tree = random_tree(rng) if rng.random() < 0.7 else None
            gets = rng.random() < 0.9
            spans.append(Span(slot, np.zeros(1, np.int32), 0, tree if gets else None))
            path: list[int] = []
            while gets and tree is not None and rng.random() < 0.7:
                below = np.flatnonzero(tree.parents == (path[-1] if path else -1)).tolist()
                if not below:
                    break
                path.append(int(rng.choice(below)))
            n = len(path) + int(rng.random() < 0.9 or not path) if gets else 0
            if gets:
                add(stats, tree, path, n)
            accepted.append(Accepted(seq, spans[-1], slot, np.zeros(n, np.int32), np.array(path, np.int32)))
        if spans:
            batch = pack(spans, tables)
            counts.add(accepted, batch)
        for seq, stats in [each for each in running if rng.random() < 0.1]:
            counts.settle(seq)
            counts.settle(seq)
            assert seq.choice.stats == stats
            running = [each for each in running if each[0] is not seq]
            n_ended += 1
    assert n_ended > 50

"""What one pass did for one text, added to its `Stats`. A tree with its accepted path goes in; nothing comes out."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.outputs import DraftTree, Stats


def count_pass(stats: Stats, n_tokens: int, tree: DraftTree | None, path: Sequence[int], source_names: Sequence[str]) -> None:
    """A pass appended `n_tokens` tokens; `path`: the nodes of its tree that were accepted, in depth order. None: it had no tree."""
    stats.passes += 1
    stats.tokens += n_tokens
    if tree is None:
        return
    depths: list[int] = []
    for parent in tree.parents.tolist():
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    names = [source_names[source] for source in tree.sources.tolist()]
    _count(stats.drafted_by_source, stats.drafted_by_depth, names, depths)
    _count(stats.accepted_by_source, stats.accepted_by_depth, [names[i] for i in path], [depths[i] for i in path])
    stats.drafted += len(names)
    stats.accepted += len(path)
    stats.drafts += 1
    _add(stats.accepted_lengths, len(path))


def _count(by_source: dict[str, int], by_depth: list[int], names: list[str], depths: list[int]) -> None:
    for name in names:
        by_source[name] = by_source.get(name, 0) + 1
    for depth in depths:
        _add(by_depth, depth)


def _add(counts: list[int], i: int) -> None:
    if i >= len(counts):
        counts.extend([0] * (i + 1 - len(counts)))
    counts[i] += 1

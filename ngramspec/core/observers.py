"""What else happens to a step: each observer looks at what a pass gave a sequence, and none is part of the loop.

`before` observers see a sequence's rows while its draft stands and nothing is accepted; `after` observers see what was accepted, with the
sequence's keys and values in place. They tell the speculator, the pool, the sequence's statistics; they change no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ngramspec.batch.block_tables import BlockTables
from ngramspec.batch.pack import Span, depths
from ngramspec.batch.types import BLOCK, DraftTree
from ngramspec.core.sequence import Sequence
from ngramspec.drafting.base import Speculator
from ngramspec.drafting.evidence import likeliest
from ngramspec.model.runner import Output

NO_TOKEN = np.array([-1], np.int32)


@dataclass(slots=True)
class Accepted:
    """What a pass was for one sequence."""

    seq: Sequence
    span: Span
    index: int
    """Of the span in its batch."""
    tokens: np.ndarray  # [k] int32, appended; empty where the pass only computed a part of the prompt
    path: np.ndarray  # [j] int32, the nodes of the sequence's tree that were accepted, in depth order


Before = Callable[[Sequence, Span, Output], None]
After = Callable[[Accepted, Output], None]


def observers(speculator: Speculator, pool: BlockTables) -> tuple[list[Before], list[After]]:
    """Those that have something to do."""
    before: list[Before] = [score_prompt]
    after: list[After] = [Statistics(speculator), Prefixes(pool)]
    if speculator.needs_topk:
        before.append(TopK(speculator))
    if speculator.needs_hidden_states:
        after.insert(0, HiddenStates(speculator))
    return before, after


def score_prompt(seq: Sequence, span: Span, output: Output) -> None:
    """Log-probabilities of the prompt's tokens."""
    if seq.lacks_prompt_logprobs:
        seq.score_prompt(span.start, output.logits(span.first_logits, span.first_logits + len(span.tokens)))


class TopK:
    """The model's own candidates behind the last token and every draft token."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    def __call__(self, seq: Sequence, span: Span, output: Output) -> None:
        if span.samples and seq.speculation and not seq.drafting_paused:
            record_topk(self._speculator, seq.slot, seq.tokens, seq.tree, span, output)


def record_topk(speculator: Speculator, slot: int, tokens: np.ndarray, tree: DraftTree | None, span: Span, output: Output) -> None:
    """Let the speculator have the model's candidates behind the last of `tokens` [n] int32 and behind every node of the tree."""
    last, before = tokens[-1:], tokens[-2:-1] if len(tokens) > 1 else NO_TOKEN
    if tree is not None:
        last = np.concatenate([last, tree.tokens])
        before = np.concatenate([before, last[1 + tree.parents]])
    rows = span.root_logits, span.end_logits
    speculator.record_topk(slot, before, last, *(output.candidates(*rows) or likeliest(output.logits(*rows))))


class HiddenStates:
    """The model's last hidden states of the committed tokens."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    def __call__(self, accepted: Accepted, output: Output) -> None:
        seq, span = accepted.seq, accepted.span
        if seq.speculation:
            known = np.arange(span.first_row, span.first_row + len(span.tokens))
            rows = np.concatenate([known, span.first_row + len(span.tokens) + accepted.path])
            self._speculator.on_hidden_states(seq.slot, span.start, output.states(rows))


class Statistics:
    """What speculation did for a choice, and where each of its tokens came from."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    def __call__(self, accepted: Accepted, output: Output) -> None:
        if not len(accepted.tokens):
            return
        seq, path, names = accepted.seq, accepted.path, self._speculator.source_names
        tree, stats, sources = seq.tree, seq.choice.stats, seq.choice.draft_sources
        stats.passes += 1
        stats.tokens += len(accepted.tokens)
        if tree is not None:
            depth = depths(tree.parents)
            _count(stats.drafted_by_source, stats.drafted_by_depth, tree.sources, depth, names)
            _count(stats.accepted_by_source, stats.accepted_by_depth, tree.sources[path], depth[path], names)
            stats.drafted += len(tree)
            stats.accepted += len(path)
            stats.drafts += 1
            stats.accepted_lengths.extend([0] * (len(path) + 1 - len(stats.accepted_lengths)))
            stats.accepted_lengths[len(path)] += 1
            sources.extend(self._speculator.source_of(tree, node) for node in path.tolist())
        sources.extend([None] * (len(accepted.tokens) - len(path)))


class Prefixes:
    """Blocks that are full of a sequence's tokens: others may take them over."""

    def __init__(self, pool: BlockTables) -> None:
        self._pool = pool

    def __call__(self, accepted: Accepted, output: Output) -> None:
        seq = accepted.seq
        n_full = seq.computed // BLOCK
        if seq.block_hashes is not None and n_full > self._pool.registered[seq.slot]:
            seq.block_hashes.extend(seq.tokens)
            self._pool.register(seq.slot, seq.block_hashes.hashes[:n_full])


def _count(by_source: dict[str, int], by_depth: list[int], sources: np.ndarray, depth: np.ndarray, names: list[str]) -> None:
    """Add nodes, given by their sources and depths [N], to the counts."""
    for source, n in enumerate(np.bincount(sources, minlength=1).tolist()):
        if n:
            by_source[names[source]] = by_source.get(names[source], 0) + n
    counts = np.bincount(depth, minlength=1).tolist()[1:]
    by_depth.extend([0] * (len(counts) - len(by_depth)))
    for d, n in enumerate(counts):
        by_depth[d] += n

"""What else happens to a step: observers look at what a pass gave its sequences, and none is part of the loop.

They see what was accepted, with keys and values in place. They tell the speculator, the pool, the sequences' statistics; they change no
token. Whatever is the same for all sequences is done for all
of them in one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ngramspec.backends.base import Output
from ngramspec.engine.sequence import Sequence
from ngramspec.grammar import forced_tokens
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK, Stats
from ngramspec.sampling.batch import Batch, Span, joined
from ngramspec.sampling.topk import likeliest
from ngramspec.sequence_table import UNAIDED, Counting
from ngramspec.speculative.base import Seen, Speculator
from ngramspec.speculative.draft_stats import FIELDS, columns, count

TOGETHER = 8
"""Passes are counted together: what is done again right away finds its code in the caches, which a pass fills with weights."""


@dataclass(slots=True)
class Accepted:
    """What a pass was for one sequence."""

    seq: Sequence
    span: Span
    index: int
    """Of the span in its batch."""
    tokens: np.ndarray  # [k] int32, appended; empty where the pass only computed a part of the prompt
    path: np.ndarray  # [j] int32, the nodes of the sequence's tree that were accepted, in depth order


class Observers:
    def __init__(self, speculator: Speculator, pool: BlockTables) -> None:
        self._speculator, self._pool = speculator, pool
        self._names = [*speculator.source_names, forced_tokens.SOURCE]
        self._counts = Counts(self._names, speculator.spec_length)

    def after(self, accepted: list[Accepted], batch: Batch) -> None:
        """Statistics. Before any of the sequences ends."""
        self._counts.add(accepted, batch)

    def after_one(self, accepted: Accepted, output: Output) -> None:
        """What concerns one sequence. What it raises ends that one alone."""
        seq = accepted.seq
        if self._speculator.needs_hidden_states and seq.speculation:
            self._tell_states(accepted, output)
        if len(accepted.tokens):
            self._tell_sources(accepted)
        self.covered(seq)

    def gained(self, seq: Sequence, sources: np.ndarray) -> None:
        """Several steps have given it tokens from these sources [n] uint8, which `counting` has counted."""
        seq.choice.draft_sources += [self._names[source] if source != UNAIDED else None for source in sources.tolist()]
        self.covered(seq)

    def counting(self, seqs: Iterable[Sequence]) -> tuple[Counting, list[int]]:
        """The table in which whoever makes several steps counts them, and the sequences' rows in it."""
        return self._counts.counting(seqs)

    def covered(self, seq: Sequence) -> None:
        """Blocks that are full of committed tokens may be taken over by others."""
        n_full = seq.computed // BLOCK
        if seq.block_hashes is not None and n_full > self._pool.registered[seq.slot]:
            seq.block_hashes.extend(seq.tokens)
            self._pool.register(seq.slot, seq.block_hashes.hashes[:n_full])

    def ended(self, seq: Sequence) -> None:
        """The sequence gets no more tokens: its statistics are complete."""
        self._counts.settle(seq)

    def _tell_states(self, accepted: Accepted, output: Output) -> None:
        """The model's last hidden states of the committed tokens."""
        span = accepted.span
        known = np.arange(span.first_row, span.first_row + len(span.tokens))
        rows = np.concatenate([known, span.first_row + len(span.tokens) + accepted.path])
        self._speculator.on_hidden_states(accepted.seq.slot, span.start, output.states(rows))

    def _tell_sources(self, accepted: Accepted) -> None:
        """Where each of a choice's tokens came from."""
        tree, path, sources = accepted.seq.tree, accepted.path, accepted.seq.choice.draft_sources
        if tree is not None and len(path):
            known = tree.sources.tolist()
            for node in path.tolist():
                stored = tree.store_positions is not None and tree.store_positions[node] >= 0
                sources.append(self._speculator.source_of(tree, node) if stored else self._names[known[node]])
        sources += [None] * (len(accepted.tokens) - len(path))


def seen(heard: list[tuple[int, int, int]], batch: Batch, output: Output) -> Seen | None:
    """The model's own candidates behind the last token and every node of these sequences, which are as `Seen` has them."""
    if not heard:
        return None
    n = len(batch.logits_rows)
    tokens, logits = output.candidates(0, n) or likeliest(output.logits(0, n))
    return Seen(np.array(heard, np.int64), batch, tokens, logits)


class Counts:
    """What speculation did for each sequence, in one table until somebody wants to see it: counting is one call for all sequences."""

    def __init__(self, names: list[str], spec_length: int) -> None:
        self._names = names
        self._columns = columns(len(names), spec_length)
        self._table = np.zeros((1, int(self._columns[-1])), np.int64)
        self._expected = np.zeros((1, len(names)))
        self._free = [0]
        self._row_of: dict[Sequence, int] = {}
        self._passes: list[tuple[list[Accepted], Batch]] = []

    def add(self, accepted: Iterable[Accepted], batch: Batch) -> None:
        """A pass gave these sequences tokens."""
        if counted := [each for each in accepted if len(each.tokens)]:
            self._passes.append((counted, batch))
            if len(self._passes) >= TOGETHER:
                self._count_passes()

    def counting(self, seqs: Iterable[Sequence]) -> tuple[Counting, list[int]]:
        rows = [self._row(seq) for seq in seqs]
        return Counting(self._table, self._expected, self._columns), rows

    def _count_passes(self) -> None:
        for counted, batch in self._passes:
            self._count_pass(counted, batch)
        self._passes.clear()

    def _count_pass(self, counted: list[Accepted], batch: Batch) -> None:
        lines = np.array([(self._row(a.seq), a.index, len(a.tokens), len(a.path)) for a in counted], np.int64)
        trees = [a.span.tree for a in counted if a.span.tree is not None]
        sources, probs = joined([tree.sources for tree in trees], np.uint8), joined([tree.probs for tree in trees], np.float32)
        path = joined([a.path for a in counted], np.int32)
        count(self._table, self._expected, self._columns, lines, sources, probs, path, batch.positions, batch.roots, batch.ends)

    def settle(self, seq: Sequence) -> None:
        """Put what was counted into the sequence's statistics."""
        self._count_passes()
        row = self._row_of.pop(seq, None)
        if row is None:
            return
        ones, *parts = (part.tolist() for part in np.split(self._table[row], self._columns[1:-1]))
        drafted, accepted, drafted_by_depth, accepted_by_depth, lengths = parts
        seq.choice.stats.add(
            Stats(
                **dict(zip(FIELDS, ones, strict=True)),
                drafted_by_source={name: n for name, n in zip(self._names, drafted, strict=True) if n},
                accepted_by_source={name: n for name, n in zip(self._names, accepted, strict=True) if n},
                expected_by_source={name: p for name, p in zip(self._names, self._expected[row].tolist(), strict=True) if p},
                drafted_by_depth=_trimmed(drafted_by_depth),
                accepted_by_depth=_trimmed(accepted_by_depth),
                accepted_lengths=_trimmed(lengths),
            )
        )
        self._table[row] = self._expected[row] = 0
        self._free.append(row)

    def _row(self, seq: Sequence) -> int:
        row = self._row_of.get(seq)
        if row is None:
            if not self._free:
                n = len(self._table)
                self._table, self._expected = (np.concatenate([a, np.zeros_like(a)]) for a in (self._table, self._expected))
                self._free = list(range(n, 2 * n))
            row = self._row_of[seq] = self._free.pop()
        return row


def _trimmed(counts: list[int]) -> list[int]:
    """Without zeros at the end."""
    n = len(counts)
    while n and counts[n - 1] == 0:
        n -= 1
    return counts[:n]

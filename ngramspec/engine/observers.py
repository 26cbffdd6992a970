"""Bookkeeping after a step: statistics, sources of tokens, prefix-cache registration, hidden states for drafters. Never changes a token.

Accepted tokens with their keys and values in place go in. What is the same for all sequences is done for all of them in one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ngramspec.backends.base import Output
from ngramspec.engine.sequence import Sequence
from ngramspec.grammar import forced_tokens
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Batch, Span
from ngramspec.sequence_table import NO_SOURCE
from ngramspec.speculative.draft_stats import CountedPass, DraftStats
from ngramspec.speculative.drafter import Speculator


@dataclass(slots=True)
class Accepted:
    """What a pass was for one sequence."""

    seq: Sequence
    span: Span
    index: int
    """Index of the span in its batch."""
    tokens: np.ndarray  # [k] int32, appended; empty if the pass only computed a part of the prompt
    path: np.ndarray  # [j] int32, the nodes of the sequence's tree that were accepted, in depth order


class Observers:
    def __init__(self, speculator: Speculator, pool: BlockTables) -> None:
        self._speculator, self._pool = speculator, pool
        self._names = [*speculator.source_names, forced_tokens.SOURCE]
        self.stats = DraftStats(self._names, speculator.spec_length)

    def record_pass(self, accepted: list[Accepted], batch: Batch) -> None:
        """Count the pass for the sequences that got tokens, before any of them ends."""
        counted = [CountedPass(each.seq, each.index, len(each.tokens), each.path, each.span.tree) for each in accepted if len(each.tokens)]
        self.stats.add(counted, batch.positions, batch.roots, batch.ends)

    def record_sequence(self, accepted: Accepted, output: Output, *, states: bool) -> None:
        """Record what concerns one sequence. What this raises ends that sequence alone. `states`: the pass left its hidden states."""
        seq = accepted.seq
        if states and seq.speculation:
            self._send_hidden_states(accepted, output)
        if len(accepted.tokens):
            self._record_tree_sources(accepted)
        self.register_full_blocks(seq)

    def record_sources(self, seq: Sequence, sources: np.ndarray) -> None:
        """Record where the tokens of native steps came from, sources [n] uint8; the table of `stats` has them."""
        seq.choice.draft_sources += [self._names[source] if source != NO_SOURCE else None for source in sources.tolist()]
        self.register_full_blocks(seq)

    def register_full_blocks(self, seq: Sequence) -> None:
        """Register blocks that are full of committed tokens in the prefix cache."""
        n_full = seq.n_computed // BLOCK
        if seq.block_hashes is not None and n_full > self._pool.registered[seq.slot]:
            seq.block_hashes.extend(seq.tokens)
            self._pool.register(seq.slot, seq.block_hashes.hashes[:n_full])

    def end(self, seq: Sequence) -> None:
        """Complete the statistics of a sequence that gets no more tokens. A second call changes nothing."""
        seq.choice.stats.add(self.stats.pop(seq))

    def _send_hidden_states(self, accepted: Accepted, output: Output) -> None:
        """Hand the model's last hidden states of the committed tokens to the drafters."""
        span = accepted.span
        known = np.arange(span.first_row, span.first_row + len(span.tokens))
        rows = np.concatenate([known, span.first_row + len(span.tokens) + accepted.path])
        self._speculator.on_hidden_states(accepted.seq.slot, span.start, output.get_hidden_states(rows))

    def _record_tree_sources(self, accepted: Accepted) -> None:
        """Record where each of a choice's tokens came from."""
        tree, path, sources = accepted.seq.tree, accepted.path, accepted.seq.choice.draft_sources
        if tree is not None and len(path):
            known = tree.sources.tolist()
            for node in path.tolist():
                stored = tree.store_positions is not None and tree.store_positions[node] >= 0
                sources.append(self._speculator.get_source(tree, node) if stored else self._names[known[node]])
        sources += [None] * (len(accepted.tokens) - len(path))

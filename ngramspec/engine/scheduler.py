"""The scheduler decides which sequences get rows in the next step: admission, chunked prefill, preemption. Knows block tables, not models.

Sequences wait in the order of their arrival and run in it. Every running sequence that lacks one token of KV gets its
row; the rest of the row budget, which is smaller then, goes to prompts, the shortest first and a share of it to the oldest. A
sequence is admitted with blocks for all tokens it has, and starts after the prefix that the cache knows; when a running one finds the
pool full, the youngest gives its blocks back, waits, and computes its KV again later: with the same bits, since a row does not depend
on how a sequence was cut into passes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ngramspec.engine.sequence import Sequence
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.kv_cache.prefix_folder import PrefixStore
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import SCORED_ROWS
from ngramspec.speculative.budget.cost_model import CostModel, Load

# While sequences decode, a pass with parts of prompts may take this many times as long as one without, so that tokens keep coming.
PROMPT_STRETCH = 4.0
LEAST_PROMPT_ROWS = 16  # rows that prompts get in a pass, however long it then takes
OLDEST_SHARE = 4  # every fourth prompt row is the oldest prompt's: short ones take a third longer beside it, it four times as long at most


@dataclass(slots=True)
class ScheduledRows:
    """Rows for one sequence: its tokens from `n_computed` on, `n_rows` of them."""

    seq: Sequence
    n_rows: int
    samples: bool
    """The rows reach the last known token, so that this pass samples the next one."""


class Scheduler:
    def __init__(self, tables: BlockTables, max_rows: int) -> None:
        self.tables = tables
        self.max_rows = max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_slots = list(range(len(tables.n_blocks_of) - 1, -1, -1))
        self.has_room: Callable[[list[int]], bool] | None = None
        """Whether drafters that keep KV of their own have room for new sequences of these lengths; None: there are no such drafters."""
        self.admits = True
        """Whether new sequences may join those that run: not until a pass fits into memory again."""
        self.n_preempted = 0
        self.prefix_queries, self.prefix_hits, self.cached_tokens = 0, 0, 0
        """Tokens looked up in the prefix cache; tokens found there; tokens found there for new sequences."""

    @property
    def has_work(self) -> bool:
        """Return whether a sequence waits or runs."""
        return bool(self.waiting or self.running)

    def halve_rows(self, n_rows: int) -> bool:
        """Limit passes to half of `n_rows`, which were too many. False if that is less than a row for every sequence."""
        if n_rows <= len(self.running):
            return False
        self.max_rows = min(self.max_rows, max(n_rows // 2, len(self.running)))
        return True

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> int:
        """Remove a sequence that has ended or is cancelled and free its blocks. Returns the slot it had, or -1."""
        (self.waiting if seq.slot < 0 else self.running).remove(seq)
        return -1 if seq.slot < 0 else self._release(seq)

    def _release(self, seq: Sequence) -> int:
        slot, n_computed = seq.slot, seq.n_computed
        seq.slot, seq.n_computed = -1, 0
        if seq.block_hashes is not None:
            self.tables.keep_computed(slot, seq.block_hashes, seq.tokens[:n_computed])
        self.tables.release(slot)
        self.free_slots.append(slot)
        return slot

    def preempt(self, seq: Sequence) -> int:
        """Take a running sequence's slot and blocks, so that it is computed again from its start. Return the slot."""
        self.running.remove(seq)
        self.waiting.appendleft(seq)
        self.n_preempted += 1
        return self._release(seq)

    def schedule(
        self, prefixes: PrefixStore | None = None, cost: CostModel | None = None
    ) -> tuple[list[ScheduledRows], list[Sequence], list[int]]:
        """Return (rows for this step, sequences that were admitted, slots of sequences that were preempted).

        `prefixes`: brings blocks back into the prefix cache that were kept on disk. `cost`: what passes cost, by which those with parts of
        prompts are kept short while others decode; None: they have `max_rows`.
        """
        preempted: list[int] = []
        work: list[ScheduledRows] = []
        prompts: list[Sequence] = []
        for seq in list(self.running):
            if seq.slot < 0:
                continue
            if seq.n_tokens - seq.n_computed > 1:
                prompts.append(seq)
                continue
            while not self.tables.reserve(seq.slot, seq.n_tokens):
                youngest = self.running[-1]
                preempted.append(self.preempt(youngest))
                if youngest is seq:
                    break
            if seq.slot >= 0:
                work.append(ScheduledRows(seq, 1, samples=True))
        if not (prompts or self.waiting):
            return work, [], preempted
        left = (self.max_rows if cost is None or not work else min(self.max_rows, _limit_rows(cost, work))) - len(work)
        admitted = self._admit_waiting(prefixes) if left > 0 and not preempted and (self.admits or not self.running) else []
        return work + _share_rows([*prompts, *admitted], left), admitted, preempted

    def _admit_waiting(self, prefixes: PrefixStore | None) -> list[Sequence]:
        """Admit waiting sequences, oldest first, while there are slots and blocks. One whose prefix is being computed waits."""
        admitted: list[Sequence] = []
        for seq in list(self.waiting):
            if not self.free_slots:
                break
            if any(_will_share(seq, other) for other in self.running):
                continue
            drafted = [each.n_tokens for each in (*admitted, seq) if each.speculation]
            if self.has_room is not None and seq.speculation and not self.has_room(drafted):
                break
            if not self._admit(seq, prefixes):
                break
            self.waiting.remove(seq)
            self.running.append(seq)
            admitted.append(seq)
        return admitted

    def _admit(self, seq: Sequence, prefixes: PrefixStore | None) -> bool:
        """Give the sequence a slot and blocks for all its tokens, with known KV as far as possible; its last token is always computed."""
        known = None if seq.lacks_prompt_logprobs else seq.block_hashes
        hashes = [] if known is None else known.hashes[: (seq.n_tokens - 1) // BLOCK]
        if prefixes is not None:
            prefixes.restore(hashes)
        taken = self.tables.admit(self.free_slots[-1], hashes, seq.n_tokens)
        if taken < 0:
            return False
        seq.slot, seq.n_computed = self.free_slots.pop(), taken * BLOCK
        if known is not None:
            seq.n_computed += self.tables.copy_part(seq.slot, known, seq.tokens[:-1])
            self.prefix_queries += seq.n_tokens
            self.prefix_hits += seq.n_computed
        if seq.admitted_s is None:
            seq.admitted_s, seq.n_cached = time.perf_counter(), seq.n_computed
            self.cached_tokens += seq.n_computed
        return True


def _limit_rows(cost: CostModel, decoding: list[ScheduledRows]) -> int:
    """Return the most rows of a pass in which prompts are computed beside sequences that wait for their next token."""
    n = len(decoding)
    load = Load(n, n, sum(each.seq.n_tokens for each in decoding))
    return max(cost.count_rows(PROMPT_STRETCH * cost.predict(load), load), n + LEAST_PROMPT_ROWS)


def _share_rows(prompts: list[Sequence], left: int) -> list[ScheduledRows]:
    """Share the `left` rows of a pass among prompts, oldest first in the list.

    Those with the fewest tokens left come first, so that a short prompt does not wait for a long one; a part of the rows is the oldest's,
    so that it ends however many short ones come.
    """
    scored, rows = SCORED_ROWS, dict.fromkeys(prompts, 0)
    by_length = sorted(prompts, key=lambda seq: seq.n_tokens - seq.n_computed)
    for seq, most in [(seq, -(-left // OLDEST_SHARE)) for seq in prompts[:1]] + [(seq, left) for seq in by_length]:
        n = min(seq.n_tokens - seq.n_computed - rows[seq], most, left, scored if seq.lacks_prompt_logprobs else left)
        rows[seq], left, scored = rows[seq] + n, left - n, scored - n * seq.lacks_prompt_logprobs
    return [ScheduledRows(seq, n, samples=seq.n_computed + n == seq.n_tokens) for seq, n in rows.items() if n > 0]


def _will_share(seq: Sequence, other: Sequence) -> bool:
    """Return whether `other` is about to compute blocks of KV that `seq` can take from the prefix cache then."""
    if seq.block_hashes is None or other.block_hashes is None or seq.lacks_prompt_logprobs:
        return False
    i = other.n_computed // BLOCK
    hashes, other_hashes = seq.block_hashes.hashes[: (seq.n_tokens - 1) // BLOCK], other.block_hashes.hashes
    return i < min(len(hashes), len(other_hashes)) and hashes[i] == other_hashes[i]  # a block's hash covers all before it

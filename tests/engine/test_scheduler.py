"""Scheduling without a model: random arrivals, drafts, acceptance, cancellation; every invariant after every step."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.engine.scheduler import ScheduledRows, Scheduler
from ngramspec.engine.sequence import Sequence, SequenceOptions
from ngramspec.kv_cache.blocks import BlockHashes, BlockTables
from ngramspec.outputs import BLOCK
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling_params import SamplingParams
from ngramspec.speculative.budget.cost_model import CostModel

MAX_LEN = 5 * BLOCK


class Silent:
    stopped_by = None

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def sequence(n_prompt: int, n_output: int, shares: bool = False, max_len: int = MAX_LEN) -> Sequence:
    """All texts begin alike."""
    params, prompt = SamplingParams(max_tokens=n_output), np.zeros(n_prompt, np.int32)
    sampler = Sampler(params, index=0, seed=0, prompt=prompt, vocab_size=4, stop_ids=frozenset())
    block_hashes = BlockHashes("", prompt) if shares else None
    return Sequence(prompt, params, sampler, Silent(), SequenceOptions(max_len=max_len), index=0, block_hashes=block_hashes)


def check(scheduler: Scheduler) -> None:
    tables: Any = scheduler.tables
    tables.check_integrity()
    slots = [s.slot for s in scheduler.running]
    assert sorted(slots + scheduler.free_slots) == list(range(len(tables.n_blocks_of)))
    assert all(s.slot < 0 and s.n_computed == 0 for s in scheduler.waiting)
    for seq in scheduler.running:
        assert 0 <= seq.n_computed < seq.n_tokens
        assert tables.n_blocks_of[seq.slot] * BLOCK >= seq.n_computed >= tables.registered[seq.slot] * BLOCK


def register(tables: BlockTables, seq: Sequence) -> None:
    if seq.block_hashes is not None:
        seq.block_hashes.extend(seq.tokens)
        tables.register(seq.slot, seq.block_hashes.hashes[: seq.n_computed // BLOCK])


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), n_blocks=st.integers(6, 14), max_rows=st.integers(1, 70))
def test_everything_finishes_and_nothing_leaks(seed: int, n_blocks: int, max_rows: int) -> None:
    rng = np.random.default_rng(seed)

    def draw(lo: int, hi: int) -> int:
        return int(rng.integers(lo, hi + 1))

    tables = BlockTables(n_blocks, 3, MAX_LEN + 16)
    scheduler = Scheduler(tables, max_rows)
    todo = [sequence(draw(1, 3 * BLOCK), draw(1, 60), draw(0, 2) > 0) for _ in range(draw(1, 6))]
    finished: list[Sequence] = []
    alive = list(todo)
    for _ in range(3000):
        if todo and draw(0, 1):
            scheduler.add(todo.pop(0))
        if not todo and not scheduler.has_work:
            break
        work, admitted, _ = scheduler.schedule()
        check(scheduler)
        assert sum(w.n_rows for w in work) <= max(max_rows, len(scheduler.running))
        assert len({id(w.seq) for w in work}) == len(work)
        assert all(w.seq in scheduler.running for w in work)
        assert all(s in scheduler.running for s in admitted)
        if scheduler.running:
            assert work, "running sequences, and nothing to do"
        for w in work:
            seq = w.seq
            assert tables.n_blocks_of[seq.slot] * BLOCK >= seq.n_computed + w.n_rows
            if not w.samples:
                seq.n_computed += w.n_rows
                register(tables, seq)
                continue
            first = seq.n_computed + w.n_rows
            drafted = draw(0, 6)
            room = drafted if tables.reserve(seq.slot, seq.n_tokens + drafted) else 0
            taken = 0
            for _ in range(1 + draw(0, room)):
                taken += 1
                if seq.append(1, None):
                    break
            seq.n_computed = first + taken - 1
            register(tables, seq)
            if seq.finished:
                scheduler.remove(seq)
                finished.append(seq)
            else:
                tables.truncate_to(seq.slot, seq.n_computed)
            check(scheduler)
        if scheduler.running and draw(0, 30) == 0:
            gone = scheduler.running[draw(0, len(scheduler.running) - 1)]
            scheduler.remove(gone)
            finished.append(gone)
            check(scheduler)
    assert sorted(map(id, finished)) == sorted(map(id, alive))
    assert tables.n_available == n_blocks


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    tables = BlockTables(6, 4, MAX_LEN + 16)
    scheduler = Scheduler(tables, 1000)
    old, young, third = sequence(2 * BLOCK, 60), sequence(3 * BLOCK + 1, 20), sequence(1, 5)
    for seq in (old, young, third):
        scheduler.add(seq)
    work, admitted, preempted = scheduler.schedule()
    assert admitted == [old, young]
    assert preempted == []
    for w in work:
        w.seq.n_computed = w.seq.n_tokens
        w.seq.append(1, None)
    work, admitted, preempted = scheduler.schedule()  # old needs a third block
    assert [w.seq for w in work] == [old]
    assert len(preempted) == 1
    assert list(scheduler.waiting) == [young, third]
    assert young.n_output == 1
    assert scheduler.n_preempted == 1


def test_a_sequence_starts_behind_what_is_known_of_it() -> None:
    tables = BlockTables(6, 4, MAX_LEN + 16)
    scheduler = Scheduler(tables, 1000)
    first, second, third = (sequence(n, 20, shares=True) for n in (2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK))
    scheduler.add(first)
    scheduler.schedule()
    first.n_computed = 2 * BLOCK
    register(tables, first)
    scheduler.remove(first)
    assert first.n_computed == 0
    assert tables.n_available == 6
    for seq, taken in ((second, 2 * BLOCK), (third, 2 * BLOCK - 1)):  # of a text that is known as a whole, the last token is computed
        scheduler.add(seq)
        work, _, _ = scheduler.schedule()
        assert seq.n_computed == seq.n_cached == taken
        assert [w.n_rows for w in work if w.seq is seq] == [seq.n_tokens - taken]
    assert tables.tables[third.slot, 0] == tables.tables[second.slot, 0]
    assert (scheduler.prefix_queries, scheduler.prefix_hits, scheduler.cached_tokens) == (6 * BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK - 1)


def compute(work: list[ScheduledRows], tables: BlockTables) -> None:
    """Do what a pass does to prompts: those that are computed sample a token."""
    for w in work:
        w.seq.n_computed += w.n_rows
        register(tables, w.seq)
        if w.seq.n_computed == w.seq.n_tokens:
            w.seq.append(1, None)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    tables = BlockTables(64, 4, 40 * BLOCK)
    scheduler = Scheduler(tables, 2 * BLOCK)
    long, short, shorter = sequence(30 * BLOCK, 5, max_len=40 * BLOCK), sequence(2 * BLOCK, 5), sequence(BLOCK, 5)
    scheduler.add(long)
    compute(scheduler.schedule()[0], tables)
    scheduler.add(short)
    scheduler.add(shorter)
    work, admitted, _ = scheduler.schedule()
    assert admitted == [short, shorter]
    assert {w.seq: w.n_rows for w in work} == {long: BLOCK // 2, shorter: BLOCK, short: BLOCK // 2}
    while not short.n_output:
        compute(work, tables)
        work = scheduler.schedule()[0]
    assert long.n_computed < 5 * BLOCK
    assert {w.seq: w.n_rows for w in work} == {short: 1, shorter: 1, long: 2 * BLOCK - 2}


def test_who_decodes_does_not_wait_long_for_a_prompt() -> None:
    tables = BlockTables(64, 4, 40 * BLOCK)
    cost = CostModel((1, 64), (BLOCK, BLOCK + 63 * 2.99), 64)  # four times the time of one row is that of BLOCK more
    scheduler = Scheduler(tables, 4 * BLOCK)

    def schedule() -> list[ScheduledRows]:
        return scheduler.schedule(cost=cost)[0]

    first, long = sequence(2, 5), sequence(30 * BLOCK, 5, max_len=40 * BLOCK)
    scheduler.add(first)
    compute(schedule(), tables)
    scheduler.add(long)
    assert {w.seq: w.n_rows for w in schedule()} == {first: 1, long: BLOCK}
    scheduler.remove(first)
    assert {w.seq: w.n_rows for w in schedule()} == {long: 4 * BLOCK}


def test_a_prompt_that_is_being_computed_is_not_computed_twice() -> None:
    tables = BlockTables(64, 4, MAX_LEN)
    scheduler = Scheduler(tables, BLOCK)
    first, second, other = sequence(4 * BLOCK, 5, shares=True), sequence(4 * BLOCK, 5, shares=True), sequence(4 * BLOCK, 5)
    for seq in (first, second, other):
        scheduler.add(seq)
    work, admitted, _ = scheduler.schedule()
    assert admitted == [first, other], "the second takes what the first computes"
    while second.slot < 0:
        compute(work, tables)
        work = scheduler.schedule()[0]
    assert first.n_computed == second.n_cached == 3 * BLOCK

"""Several steps in one call, while no sequence needs a hook in Python.

A step whose sequences all decode and want nothing but their tokens needs no Python between one forward pass and the next. Here one compiled
call (`accept_and_prepare`) stands between two passes: accept and commit the last one, then draft and pack the next. Nothing else would
be as fast: a pass fills the processor's caches with weights, after which a line of Python takes five times as long as in a loop.

The loop ends when a sequence ends or lacks room, when somebody calls the engine, and after MAX_STEPS or MAX_MS. The forward pass is handed
in by the backend (`backends.base.NativeForward`). Knows neither devices nor the scheduler.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from ngramspec.backends.base import NativeForward, Runner
from ngramspec.datastore.compiled_calls import find_address
from ngramspec.engine.acceptance import Acceptance
from ngramspec.engine.observers import Observers
from ngramspec.engine.scheduler import ScheduledRows
from ngramspec.engine.sequence import Sequence
from ngramspec.engine.step_functions import (
    ACCEPT,
    BUILD_TREES,
    DRAFT,
    HAS_MOVES,
    IS_OVER,
    LEARN,
    PREPARE,
    UPDATE,
    LoopState,
    accept_and_prepare,
    accept_pass,
    begin_call,
    draft_trees,
    get_functions,
    get_moves,
    learn_verified,
    new_state,
    prepare_pass,
    set_stats,
)
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK
from ngramspec.sampling.verify import make_draw_params
from ngramspec.sequence_table import MAX_MS, MAX_NEW_TOKENS, MAX_STEPS, RUNNING, SEQUENCE, STEP_RECORD
from ngramspec.speculative import tree_builder
from ngramspec.speculative.budget.step_timer import StepTimer
from ngramspec.speculative.draft_stats import StatsTable
from ngramspec.speculative.drafter import NativeDrafting, Speculator
from ngramspec.speculative.features import ExternalTrees
from ngramspec.speculative.proposer import NO_EXTERNAL, get_idle_drafting


class StepBudget(NamedTuple):
    """How far one call may go."""

    n_steps: int
    cost_ms: np.ndarray
    """[R + 1] float64: milliseconds of a step with T rows at index T."""
    threshold: float
    """Tokens per millisecond."""
    max_nodes: int
    """Draft nodes in one pass."""
    plain: bool
    """Make no drafts, to measure a plain pass."""


class NativeResult(NamedTuple):
    """What one call gave its B sequences."""

    table: np.ndarray  # [B] SEQUENCE, as the sequences are now
    tokens: np.ndarray  # [B, MAX_NEW_TOKENS] int32, the first `n_new` of them
    sources: np.ndarray  # [B, MAX_NEW_TOKENS] uint8: who drafted each, or NO_SOURCE
    records: np.ndarray  # [steps] STEP_RECORD


class NativeSteps:
    """The loop of one engine: decides which steps it can make, makes them, and writes their results back to the sequences."""

    def __init__(self, runner: Runner, speculator: Speculator, observers: Observers) -> None:
        self._runner, self._speculator, self._observers = runner, speculator, observers
        self._draft_fits = speculator.spec_length < MAX_NEW_TOKENS
        self._state: LoopState | None = None  # takes half a millisecond to make, so it is used again

    def run(
        self, rows: list[ScheduledRows], acceptance: Acceptance, timing: StepTimer, max_rows: int, interrupt: np.ndarray
    ) -> NativeResult | None:
        """Make as many steps of sequences that decode as the time and the drafts allow, until interrupt [1] int64 is not 0.

        None, with nothing done: a step in Python must be made, since a sequence needs Python between its pass and the next one, or the
        runner or the speculator does. Raises MemoryError before the first step.
        """
        if not (self._draft_fits and acceptance.matches_by_pass and all(_runs_natively(each.seq) for each in rows)):
            return None
        seqs, drafting = [each.seq for each in rows], None
        slots, speculates = [seq.slot for seq in seqs if seq.speculation], any(seq.max_depth > 0 for seq in seqs)
        longest, n_decoding = max(seq.n_tokens for seq in seqs), sum(seq.n_computed >= seq.n_prompt for seq in seqs)
        forward = self._runner.native_forward()
        if forward is None:
            return None
        if slots:
            drafting = self._speculator.prepare_native(np.array(slots, np.int32), MAX_NEW_TOKENS)
            if drafting is None:
                return None
        budget = self._plan(seqs, drafting, timing, max_rows, speculates=speculates)
        n_rows, pool, n_nodes = len(seqs) + budget.max_nodes, self._runner.pool, self._speculator.spec_rows + BLOCK
        forward.reserve(n_rows, longest + MAX_NEW_TOKENS + n_rows)
        for seq in seqs:  # KV positions for the trees to come, as far as the pool has them; that of each last token is there
            pool.reserve_after(seq.slot, seq.n_tokens, min(n_nodes, pool.max_blocks * BLOCK - seq.n_tokens))
        stats, stats_rows = self._observers.stats.get_table(seqs)
        draws, (table, stops) = _list_draws(seqs), make_table(seqs, stats_rows)
        given = _list_members(pool, forward, table, stops, drafting or get_idle_drafting(), budget)
        if self._state is None:
            self._state = _make_state(given, draws, stats)
            _find_functions(self._state, forward.inputs, given[1])
        result = _run_steps(self._state, forward, given, draws, stats, budget.n_steps, interrupt)
        timing.record_steps(result.records, len(seqs), n_decoding, speculates=speculates)
        for seq, fields in zip(seqs, table[["drafting_paused", "cooldown", "last_cooldown", "n_computed"]].tolist(), strict=True):
            seq.drafting_paused, seq.cooldown, seq.last_cooldown, seq.n_computed = fields
        return result

    def _plan(
        self, seqs: list[Sequence], drafting: NativeDrafting | None, timing: StepTimer, max_rows: int, *, speculates: bool
    ) -> StepBudget:
        n, n_steps, keys = len(seqs), 1 if any(seq.streams for seq in seqs) else MAX_STEPS, sum(seq.n_tokens for seq in seqs)
        plain = speculates and timing.should_probe()
        if drafting is not None:
            n_steps = 1 if plain else min(n_steps, drafting.n_steps, timing.n_alike_steps)
        plan = timing.plan(n, n, keys, 0, drafts=speculates and not plain)
        return StepBudget(n_steps, plan.cost_ms, plan.threshold, max(min(timing.cost.max_rows, max_rows) - n, 0), plain)


def compile_steps(forward: NativeForward, pool: BlockTables) -> None:
    """Compile the loop for a runner's forward pass and its pool, or load it from disk, but for the functions that draft and learn."""
    state = _make_loop(forward, pool)
    for function in (prepare_pass, accept_pass):
        find_address(function, state, forward.inputs)
    accept_and_prepare.compile((numba.typeof(state), numba.typeof(forward.inputs), types.boolean))
    get_moves(state)


def compile_drafting(forward: NativeForward, pool: BlockTables) -> None:
    """Compile the functions of the loop that draft and learn, or load them from disk."""
    state = _make_loop(forward, pool)
    find_address(draft_trees, state)
    find_address(learn_verified, *_list_learn_examples(state, forward.inputs))


def _find_functions(state: Any, inputs: Any, draft_state: Any) -> None:
    """Set the addresses that the loop calls. Compiles what is not on disk."""
    learning = _list_learn_examples(state, inputs)
    functions = get_functions(state)
    functions[DRAFT], functions[LEARN] = find_address(draft_trees, state), find_address(learn_verified, *learning)
    functions[ACCEPT], functions[PREPARE] = find_address(accept_pass, state, inputs), find_address(prepare_pass, state, inputs)
    functions[BUILD_TREES], functions[UPDATE] = find_build_trees(draft_state), find_update(draft_state)


def find_build_trees(draft_state: Any) -> int:
    """Return the address of `build_trees`. Compiles what is not on disk."""
    external = ExternalTrees(_INTS, _IDS, _IDS, np.empty(0, np.int16))
    return find_address(tree_builder.build_trees, draft_state, _IDS, _IDS, np.empty(0), 0, 0, 0.0, False, external)


def find_update(draft_state: Any) -> int:
    """Return the address of `update`. Compiles what is not on disk."""
    top = np.empty((0, 0), np.int32)
    seen = np.empty((0, 3), np.int64), _INTS, _IDS, _IDS, _IDS, _IDS, top, top.astype(np.float32)
    return find_address(tree_builder.update, draft_state, _IDS, 0, (_INTS, _IDS, _INTS, _IDS), 0, 0, seen)


def _list_learn_examples(state: Any, inputs: Any) -> tuple[Any, ...]:
    return state, inputs, _INTS, _INTS, _INTS, _IDS, _IDS


def _make_state(given: tuple[Any, ...], draws: tuple[np.ndarray, ...], stats: StatsTable) -> Any:
    return new_state(*given, *draws, *NO_EXTERNAL, *stats, *_UNSET, np.zeros(6, np.int64))


def _make_loop(forward: NativeForward, pool: BlockTables) -> Any:
    """Make a LoopState of the type that a runner's forward pass and its pool have, and compile what sets it up."""
    forward.reserve(1, 1)
    budget, stats = StepBudget(1, np.zeros(2), 1.0, 1, plain=False), StatsTable(np.zeros((1, 1), np.int64), np.zeros((1, 1)), _INTS)
    given = _list_members(pool, forward, np.zeros(0, SEQUENCE), _IDS, get_idle_drafting(), budget)
    state = _make_state(given, _NO_DRAWS, stats)
    set_stats(state, *stats)
    begin_call(state, *given[:2], given[2:], _NO_DRAWS, 1)
    get_functions(state)
    return state


def make_table(seqs: list[Sequence], stats_rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sequences' table [B] SEQUENCE, and all their stop tokens [n] int32."""
    stops, stops_at, rows, n_draws = list[int](), dict[frozenset[int], tuple[int, int]](), [], 0
    for seq, stats_row in zip(seqs, stats_rows, strict=True):
        if seq.stop_ids not in stops_at:
            stops_at[seq.stop_ids] = len(stops), len(stops) + len(seq.stop_ids)
            stops += seq.stop_ids
        draw = -1
        if not seq.sampler.greedy:
            draw, n_draws = n_draws, n_draws + 1
        rows.append(
            (
                seq.slot, seq.last_token, seq.previous_token, seq.n_tokens, seq.n_prompt, seq.n_computed, seq.limit, seq.min_tokens,
                seq.cooldown, seq.last_cooldown, *stops_at[seq.stop_ids], draw, stats_row, 0, RUNNING, seq.speculation,
                seq.drafting_paused,
            )
        )  # fmt: skip
    return np.array(rows, SEQUENCE), np.array(stops, np.int32)


def _runs_natively(seq: Sequence) -> bool:
    """Return whether a sequence's tokens need only a logits row, the seed and the position, and only they end it."""
    return seq.sampler.needs_only_logits and seq.uses_exact_match and not (seq.params.stop or seq.lacks_prompt_logprobs)


def _list_draws(seqs: list[Sequence]) -> tuple[np.ndarray, ...]:
    """Return how the sequences above temperature 0 draw, as `DrawParams` has it."""
    drawn = [seq for seq in seqs if not seq.sampler.greedy]
    return tuple(make_draw_params([seq.sampler for seq in drawn], [seq.n_output for seq in drawn])) if drawn else _NO_DRAWS


def _list_members(
    pool: BlockTables, forward: NativeForward, table: np.ndarray, stops: np.ndarray, drafting: NativeDrafting, budget: StepBudget
) -> tuple[Any, ...]:
    """Return the first members of a `LoopState`, those in `step_functions._GIVEN`: what stays the same in a call, and the sequences."""
    return (
        table, drafting.draft_state, stops,
        (drafting.spec_length, drafting.spec_rows, drafting.history, drafting.chains, drafting.recycles),
        budget.cost_ms, pool.tables, pool.n_blocks_of, forward.logits,
        (forward.n_threads, forward.n_best, forward.rows_per_item, budget.max_nodes, budget.plain, budget.threshold),
    )  # fmt: skip


def _run_steps(
    state: Any, forward: NativeForward, given: tuple[Any, ...], draws: tuple[np.ndarray, ...], stats: StatsTable, n_steps: int,
    interrupt: np.ndarray,
) -> NativeResult:  # fmt: skip
    """Set up the loop's state with what `_list_members` has listed, and make up to `n_steps` steps."""
    set_stats(state, *stats)
    tokens, sources, records = begin_call(state, *given[:2], given[2:], draws, n_steps)
    inputs, clock = forward.inputs, time.perf_counter
    began, times = clock(), list[float]()
    prepare_pass(state, inputs)
    flags = 0
    while not flags & IS_OVER:
        started = clock()
        forward.run()
        computed = clock()
        times += started, computed
        flags = accept_and_prepare(state, inputs, (computed - began) * 1e3 > MAX_MS or bool(interrupt[0]))
        if flags & HAS_MOVES:
            forward.keep_paths(*get_moves(state))
    records = records[: len(times) // 2]
    times.append(clock())
    records["forward_ms"] = 1e3 * np.diff(times[:-1])[::2]
    records["step_ms"] = 1e3 * np.diff([began, *times[1:-3:2], times[-1]])
    return NativeResult(given[0], tokens, sources, records)


_IDS, _INTS, _FLOATS = np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.float32)
_NO_DRAWS = tuple(make_draw_params((), ()))
_UNSET = (
    *(_INTS, np.empty(0, np.int8), np.empty((0, 0), np.int32), np.empty((0, 0), np.uint8), np.empty(0, STEP_RECORD), 0),
    *(0, np.empty(0, np.bool_), _INTS, _IDS, _IDS, _FLOATS, np.empty(0, np.uint8), _IDS, False),
    *(_INTS, _INTS, _INTS, _INTS),
)

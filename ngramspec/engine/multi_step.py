"""Several steps in one call of the runner, for sequences of which nothing is asked but their tokens.

Sequences enter as lines (`sequence_table`) and leave with what they gained. Decides who can go that way and for how long; what a pass is,
and what is drafted, is as in single steps. Knows neither the scheduler nor how drafts are made.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np

from ngramspec.backends.base import Runner
from ngramspec.engine.acceptance import Acceptance
from ngramspec.engine.observers import Observers
from ngramspec.engine.scheduler import ScheduledRows
from ngramspec.engine.sequence import Sequence
from ngramspec.outputs import BLOCK
from ngramspec.sequence_table import (
    COLUMNS,
    COMPUTED,
    LAST_REST,
    MOST_STEPS,
    N_NEW,
    PAUSED,
    REST,
    ROOM,
    Gained,
    Spending,
)
from ngramspec.speculative.base import Speculator
from ngramspec.speculative.budget.step_timer import Timing


class Steps(NamedTuple):
    """Several that were made, and their sequences' lines [B, COLUMNS] as they are now."""

    lines: np.ndarray
    gained: Gained


class MultiStep:
    def __init__(self, runner: Runner, speculator: Speculator, observers: Observers) -> None:
        self._runner, self._speculator, self._observers = runner, speculator, observers
        self._can = speculator.spec_length < ROOM and not speculator.needs_hidden_states

    def takes(self, rows: Several[ScheduledRows], rule: Acceptance) -> bool:
        """Whether nobody need look at these rows between their pass and the next one."""
        return self._can and rule.walks_by_pass and all(_is_plain(each) and rule.samples_on_device(each.seq) for each in rows)

    def run(self, seqs: list[Sequence], timing: Timing, most_rows: int, interrupt: np.ndarray) -> Steps | None:
        """Make as many steps as may be; None, with nothing done, where single ones must be made. Raises MemoryError before the first."""
        heard, drafting = [seq.slot for seq in seqs if seq.speculation], None
        if heard:
            drafting = self._speculator.compiled(np.array(heard, np.int32), ROOM)
            if drafting is None:
                return None
        n_steps = 1 if any(seq.streams for seq in seqs) else MOST_STEPS
        n_keys = sum(seq.n_tokens for seq in seqs)
        speculates = any(seq.max_depth > 0 for seq in seqs)
        plain = speculates and timing.wants_plain()
        if drafting is not None:
            n_steps = 1 if plain else min(n_steps, drafting.n_steps, timing.n_alike)
        plan = timing.plan(len(seqs), len(seqs), n_keys, 0, drafts=speculates and not plain)
        most = max(min(timing.cost.max_rows, most_rows) - len(seqs), 0)
        self._reserve(seqs)
        counting, rows = self._observers.counting(seqs)
        lines, stops = _lines(seqs, rows)
        drawn = [seq for seq in seqs if not seq.sampler.greedy]
        gained = self._runner.multi_step(
            lines, stops, [seq.sampler for seq in drawn], [seq.n_output for seq in drawn], drafting,
            Spending(n_steps, plan.cost_ms, plan.threshold, most, plain), counting, interrupt,
        )  # fmt: skip
        if gained is None:
            self._can = False
            return None
        timing.made_several(gained.marks, len(seqs), speculates=speculates)
        for seq, line in zip(seqs, lines[:, [PAUSED, REST, LAST_REST, COMPUTED]].tolist(), strict=True):
            paused, seq.rest, seq.last_rest, seq.computed = line
            seq.drafting_paused = bool(paused)
        return Steps(lines, gained)

    def take(self, b: int, seq: Sequence, steps: Steps) -> np.ndarray:
        """Append to the b-th of the sequences what it gained -> the tokens [n] int32. Raises what its text raises, and NotFiniteError."""
        n = int(steps.lines[b, N_NEW])
        tokens = steps.gained.tokens[b, :n]
        seq.extend(tokens)
        self._observers.gained(seq, steps.gained.sources[b, :n])
        return tokens

    def over(self, steps: Steps, going_on: list[tuple[Sequence, np.ndarray]]) -> None:
        """These sequences go on, behind the tokens that they gained."""
        slots = np.array([seq.slot for seq, _ in going_on], np.int32)
        self._speculator.advance(len(steps.gained.marks), slots, [tokens for _, tokens in going_on])

    def _reserve(self, seqs: list[Sequence]) -> None:
        """Slots for the trees to come, as far as the pool has them. That of each last token is there."""
        pool, trees = self._runner.pool, self._speculator.spec_rows + BLOCK
        most = pool.max_blocks * BLOCK
        for seq in seqs:
            pool.reserve_behind(seq.slot, seq.n_tokens, min(trees, most - seq.n_tokens))


def _is_plain(rows: ScheduledRows) -> bool:
    seq = rows.seq
    return rows.n_rows == 1 and seq.is_plain and rows.samples and not seq.lacks_prompt_logprobs


def _lines(seqs: list[Sequence], rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The sequences' lines [B, COLUMNS] int64, and all their stop tokens [n] int32."""
    stops, stops_at, table, n_drawn = list[int](), dict[frozenset[int], tuple[int, int]](), [], 0
    for seq, row in zip(seqs, rows, strict=True):
        if seq.stop_ids not in stops_at:
            stops_at[seq.stop_ids] = len(stops), len(stops) + len(seq.stop_ids)
            stops += seq.stop_ids
        n, drawn = seq.n_tokens, -1
        if not seq.sampler.greedy:
            drawn, n_drawn = n_drawn, n_drawn + 1
        table.append(
            (
                seq.slot, int(seq.buffer[n - 1]), int(seq.buffer[n - 2]) if n > 1 else -1, n, seq.limit, seq.computed,
                seq.speculation, seq.drafting_paused, seq.rest, seq.last_rest, *stops_at[seq.stop_ids], drawn, row, 0, 0,
            )
        )  # fmt: skip
    lines = np.array(table, np.int64)
    assert lines.shape[1] == COLUMNS
    return lines, np.array(stops, np.int32)

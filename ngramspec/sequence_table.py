"""Several steps in one compiled call, as whoever runs them and whoever computes them see it: columns, numbers and results. Imports no room.

A step of sequences of which nothing is asked but their tokens needs nobody between one pass and the next. So the step hands a runner that
can do so (`Runner.multi_step`) its sequences as lines of numbers; the runner drafts, computes, walks, and commits until something happens
that concerns anybody else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

SLOT, TOKEN, BEFORE, N_TOKENS, LIMIT, COMPUTED = range(6)
"""Columns of a sequence's line: its slot; its last token, which no pass has seen, and the one before that, or -1; its tokens, the most that
it may have, and those whose keys and values are in the pool."""
SPECULATES, PAUSED, REST, LAST_REST = range(6, 10)
"""Whether drafts may be made for it, whether none was in its last pass, and `update_cooldown`."""
STOPS_FROM, STOPS_TO, DRAWN, ROW = range(10, 14)
"""Where its stop tokens are among all; its place among those that are drawn, or -1; its row in the table of counts."""
N_NEW, STATE = 14, 15
"""Set by the runner: tokens that it got, and what became of it."""
COLUMNS = 16

RUNNING, ENDED, UNPICKED = range(3)
"""States: it goes on; its last token ends it; its last token is -1, as none could be picked."""

PASS_MS, STEP_MS, ROWS, NODES, LOOKED, MADE, KEYS = range(7)
"""Columns of a step's marks: milliseconds of its pass, and of all of it; its rows and draft nodes; sequences that a draft was looked for;
tokens made; tokens of its sequences before."""
MARKS = 7

UNAIDED = 255
"""Source of a token that no draft foresaw."""
MOST_STEPS, MOST_MS = 16, 100.0
"""Steps in a call, and milliseconds after which none begins."""
ROOM = 128
"""Tokens that a sequence can get in one call; the tables that drafts come from have room for so many before it."""


class Compiled(NamedTuple):
    """What compiled code drafts with by itself (`speculative.tree_builder`)."""

    desk: Any
    n_steps: int
    """For how many steps; behind these whoever made it must be asked again."""
    spec_length: int
    spec_rows: int
    history: int
    chains: bool
    recycles: bool
    """Hears what the model holds likely."""


class Spending(NamedTuple):
    """How far a call may go."""

    n_steps: int
    cost_ms: np.ndarray
    """[R + 1] float64: milliseconds of a step with T rows at index T."""
    threshold: float
    """Tokens per millisecond."""
    most_nodes: int
    """In a pass."""
    plain: bool
    """No drafts, to see what a pass takes without."""


class Counting(NamedTuple):
    """The table that `speculative.draft_stats.count` adds passes to."""

    table: np.ndarray  # [n, columns[-1]] int64
    expected: np.ndarray  # [n, sources] float64
    columns: np.ndarray  # int64, where the table's parts begin


class Gained(NamedTuple):
    """What a call gave its B sequences, in lines that it has brought up to date."""

    tokens: np.ndarray  # [B, ROOM] int32, the first N_NEW of them
    sources: np.ndarray  # [B, ROOM] uint8: who drafted each, or UNAIDED
    marks: np.ndarray  # [steps, MARKS] float64

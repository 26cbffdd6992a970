"""The sequence table: running sequences as rows of one structured array, and the records of the steps that were made with them.

Python and compiled code read the same fields by name (`table[b].n_tokens`). Imports no room.
"""

from __future__ import annotations

import numpy as np

SEQUENCE = np.dtype(
    [
        ("slot", np.int64),  # place in the KV pool and in the speculator
        ("last_token", np.int64),  # no pass has seen it yet
        ("previous_token", np.int64),  # the token before that, or -1
        ("n_tokens", np.int64),  # prompt and output so far
        ("n_prompt", np.int64),
        ("n_computed", np.int64),  # tokens whose keys and values are in the pool
        ("limit", np.int64),  # most tokens of prompt and output
        ("min_tokens", np.int64),  # output tokens before a stop token ends the sequence
        ("cooldown", np.int64),  # passes for which no draft will be made (`budget.backoff.update_cooldown`) …
        ("last_cooldown", np.int64),  # … and the length of the last such pause
        ("stops_start", np.int64),  # its stop tokens are stops[stops_start:stops_end] of all
        ("stops_end", np.int64),
        ("draw", np.int64),  # index among the sequences above temperature 0, or -1
        ("stats_row", np.int64),  # row in `speculative.draft_stats`' table
        ("n_new", np.int64),  # tokens that it got in this call
        ("state", np.int64),  # RUNNING, a reason of `engine.stop_conditions`, or UNPICKED
        ("speculates", np.bool_),  # drafts may be made for it
        ("drafting_paused", np.bool_),  # no draft was looked for in the last pass
    ],
    align=True,
)

# States of a sequence: it goes on; it ended by a stop rule or at its limit; its last token is -1, since none could be picked.
RUNNING, STOP, LENGTH, UNPICKED = range(4)

STEP_RECORD = np.dtype(
    [
        ("forward_ms", np.float64),  # the forward pass
        ("step_ms", np.float64),  # all of the step
        ("n_rows", np.int64),
        ("n_nodes", np.int64),  # draft nodes among the rows
        ("n_drafting", np.int64),  # sequences that a draft was looked for
        ("n_new", np.int64),  # tokens that the sequences got
        ("n_keys", np.int64),  # tokens of all sequences before the step
    ],
    align=True,
)

# Source of a token that no draft contained.
NO_SOURCE = 255

# One call makes at most MAX_STEPS steps, and begins none after MAX_MS milliseconds: a new request waits no longer than that.
MAX_STEPS, MAX_MS = 16, 100.0
# Most tokens that a sequence can get in one call; n-gram tables get room for them before it.
MAX_NEW_TOKENS = 128

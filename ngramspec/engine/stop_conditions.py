"""When a sequence ends by its tokens and its length. One rule for single steps in Python and for compiled multi-steps.

Stop strings and grammars end sequences too, but need text: `Sequence.append` asks those after these rules, in single steps only.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.sequence_table import LENGTH, RUNNING, STOP

# `Choice.finish_reason` of each way to end.
REASONS = {STOP: "stop", LENGTH: "length"}


class Counters(Protocol):
    """A `Sequence`, or its row of the sequence table: both have these fields."""

    n_tokens: int
    n_prompt: int
    limit: int
    min_tokens: int
    last_token: int
    previous_token: int


def find_stop(seq: Counters, stops: Collection[int] | np.ndarray) -> int:
    """Return STOP or LENGTH if the sequence ends with its last token, which has just been appended, else RUNNING.

    This function is also compiled: it must keep to numbers and fields of the sequence table.
    """
    if seq.last_token in stops and seq.n_tokens - seq.n_prompt > seq.min_tokens:
        return STOP
    if seq.n_tokens >= seq.limit:
        return LENGTH
    return RUNNING


find_stop_compiled = njit(cache=True, nogil=True)(find_stop)

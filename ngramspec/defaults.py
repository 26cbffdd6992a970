"""Bounds and defaults of drafting that more than one room goes by. Imports nothing."""

MAX_ORDER = 25
"""Longest n-gram: one token more than the longest context of `speculative.ngram_table.LADDER`."""
MAX_HISTORY = (1 << 24) - 1
"""Most tokens in a sequence's tables: a table entry counts them in 24 bits."""

HISTORY = 32_000
ANSWERS = 200_000
SPEC_LENGTH = 64
SPEC_ROWS = 64
"""Defaults of `EngineConfig` and `Proposer`, which say what they are."""

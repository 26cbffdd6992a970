"""Bounds and defaults of drafting that several rooms share. Imports nothing."""

MAX_ORDER = 25  # longest n-gram, in tokens: one more than the longest context in `speculative.ngram_table.LADDER`
MAX_HISTORY = (1 << 24) - 1  # most tokens in a sequence's tables: a table entry counts them in 24 bits

# Defaults of `EngineConfig` and `TreeProposer`, which explain them.
HISTORY = 32_000
ANSWERS = 200_000
SPEC_LENGTH = 64
SPEC_ROWS = 64

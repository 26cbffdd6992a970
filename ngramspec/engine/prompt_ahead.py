"""Compute prompts that will probably be asked for into the prefix cache, some rows at a time while no request runs.

What names the prompts enters, blocks of keys and values are left in the pool. Knows the runner and its pool; neither requests nor texts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ngramspec.backends.base import Runner
from ngramspec.kv_cache.blocks import BlockHashes
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Span, pack
from ngramspec.speculative.budget.cost_model import CostModel, Load

log = logging.getLogger(__name__)

MOST_MS = 100  # of a pass, for which a request that comes may have to wait
LEAST_ROWS = 8  # of a pass, however long it takes: on a processor with AVX2 it takes as long as two of one row
LEAST_ROOM = 3  # times its length that the pool must hold, so that a prompt does not take the place of what will be asked for again


class PromptAhead:
    """The prompts that are expected after the latest request. Not thread-safe: `step` calls it between passes."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._prompts: Iterator[Sequence[int]] | None = None
        self._salt = ""
        self._current: tuple[np.ndarray, BlockHashes] | None = None
        self.n_tokens = 0
        """Tokens whose keys and values were computed."""

    @property
    def has_work(self) -> bool:
        return self._prompts is not None

    def expect(self, list_prompts: Callable[[], Iterable[Sequence[int]]], tenant: str) -> None:
        """Expect the prompts that `list_prompts` returns, the most urgent first, and no others; it is called once nothing else runs, and
        asked for the next one when the one before is computed: to encode all of them may take longer than a request should wait.

        Layers that keep a state have it after few blocks only: there nothing is computed ahead.
        """
        self._current = None
        self._prompts, self._salt = None if self._runner.is_recurrent else _iterate(list_prompts), tenant

    def compute_some(self, slot: int, cost: CostModel) -> None:
        """Compute rows of the first expected prompt in one pass, or find out which is the next. `slot`: one that nobody holds."""
        assert self._prompts is not None
        try:
            if self._current is not None:
                if not self._compute_rows(slot, cost, *self._current):
                    self._current = None
            elif (ids := next(self._prompts, None)) is not None:
                tokens = np.array(ids, np.int32)
                self._current = tokens, BlockHashes(self._salt, tokens)
            else:
                self._prompts = None
        except Exception as error:  # nobody has asked for it
            log.warning("a prompt is not computed ahead: %s", error)
            self._prompts = self._current = None

    def _compute_rows(self, slot: int, cost: CostModel, tokens: np.ndarray, hashes: BlockHashes) -> bool:
        """Compute the next rows of a prompt, but for its last one. Return whether there were any, and room for them: a prompt may be longer
        than any request's."""
        pool, end = self._runner.pool, max(len(tokens) - 1, 0)
        names = hashes.hashes[: end // BLOCK]
        if pool.count_blocks(end) > pool.max_blocks or LEAST_ROOM * len(tokens) > pool.n_positions:
            return False
        n_known = next((i for i, digest in enumerate(names) if digest not in pool.block_of), len(names))
        n_rows = cost.count_rows(MOST_MS, Load(1, keys=BLOCK * n_known))
        n_rows = min(max(n_rows, LEAST_ROWS), self._runner.max_rows)
        if pool.admit(slot, names[:n_known], min(BLOCK * n_known + BLOCK - 1 + n_rows, end)) < 0:
            return False
        try:
            first = BLOCK * n_known + pool.copy_part(slot, hashes, tokens[:end])
            end = min(first + n_rows, end)
            if first == end:
                return False
            span = Span(slot, tokens[first:end], first, logits=0, samples=False)
            self._runner.forward(pack([span], pool, self._runner.rows_per_item)).wait()
            pool.register(slot, names[: end // BLOCK])
            pool.keep_computed(slot, hashes, tokens[:end])
        finally:
            pool.release(slot)
        self.n_tokens += end - first
        return True


def _iterate(list_prompts: Callable[[], Iterable[Sequence[int]]]) -> Iterator[Sequence[int]]:
    """Call the function when the first prompt is asked for."""
    yield from list_prompts()

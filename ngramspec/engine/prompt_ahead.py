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

MOST_MS = 100  # of a pass, for which a request that comes may have to wait; at least a block is computed
LEAST_ROOM = 3  # times its length that the pool must hold, so that a prompt does not take the place of what will be asked for again


class PromptAhead:
    """The prompts that are expected after the latest request. Not thread-safe: `step` calls it between passes."""

    def __init__(self, runner: Runner, max_rows: int) -> None:
        """Compute in passes of up to `max_rows` rows."""
        self._runner, self._max_blocks = runner, max(max_rows // BLOCK, 1)
        self._prompts: Iterator[Sequence[int]] | None = None
        self._salt = ""
        self._current: tuple[np.ndarray, list[bytes]] | None = None
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
        """Compute blocks of the first expected prompt in one pass, or find out which is the next. `slot`: one that nobody holds."""
        assert self._prompts is not None
        try:
            if self._current is not None:
                if not self._compute_blocks(slot, cost, *self._current):
                    self._current = None
            elif (ids := next(self._prompts, None)) is not None:
                self._current = self._hash(ids)
            else:
                self._prompts = None
        except Exception as error:  # nobody has asked for it
            log.warning("a prompt is not computed ahead: %s", error)
            self._prompts = self._current = None

    def _hash(self, ids: Sequence[int]) -> tuple[np.ndarray, list[bytes]]:
        tokens = np.array(ids, np.int32)
        return tokens, BlockHashes(self._salt, tokens).hashes

    def _compute_blocks(self, slot: int, cost: CostModel, tokens: np.ndarray, hashes: list[bytes]) -> bool:
        """Compute the next blocks of a prompt. Return whether there were any, and room for them: one may be longer than any request's."""
        pool = self._runner.pool
        n_known = next((i for i, digest in enumerate(hashes) if digest not in pool.block_of), len(hashes))
        if n_known == len(hashes) or len(hashes) > pool.max_blocks or LEAST_ROOM * len(tokens) > pool.n_positions:
            return False
        n_rows = cost.count_rows(MOST_MS, Load(1, keys=BLOCK * n_known))
        end = min(n_known + min(max(n_rows // BLOCK, 1), self._max_blocks), len(hashes))
        if pool.admit(slot, hashes[:n_known], BLOCK * end) < 0:
            return False
        try:
            rows = tokens[BLOCK * n_known : BLOCK * end]
            span = Span(slot, rows, BLOCK * n_known, logits=0, samples=False)
            self._runner.forward(pack([span], pool, self._runner.rows_per_item)).wait()
            pool.register(slot, hashes[:end])
        finally:
            pool.release(slot)
        self.n_tokens += len(rows)
        return True


def _iterate(list_prompts: Callable[[], Iterable[Sequence[int]]]) -> Iterator[Sequence[int]]:
    """Call the function when the first prompt is asked for."""
    yield from list_prompts()

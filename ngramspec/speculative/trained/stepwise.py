"""Drafts that are computed token by token with a model: the loop over levels, for all sequences at once.

From committed tokens to candidate trees: chains that begin after the last token. What runs a pass, and which keys and values are
there already, is for the drafters to say (`draft_model`, `draft_layers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ngramspec.backends.base import Output
from ngramspec.errors import GrammarError, InvalidInputError
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK, DraftTree
from ngramspec.sampling.batch import Batch, Span, pack
from ngramspec.sampling.sampler import Sampler
from ngramspec.speculative.drafter import NOTHING, Candidates, SequenceInfo

LENGTH = 5


class Chains:
    """One sequence's unfinished draft: chains that begin after its last token and grow level by level.

    Drawn chains are independent of each other and may be alike (SpecInfer, Miao et al., 2024). Of the others, the first takes what the
    request's own sampler would take from these logits, by the same u, and the rest begin with the next most likely tokens.
    """

    def __init__(self, info: SequenceInfo, n_tokens: int, depth: int, branches: int, draws: bool) -> None:
        self.depth, self.level, self.branches = depth, 0, branches
        self.draws = draws and info.sampler.params.temperature > 0
        self._info, self._position = info, n_tokens - info.n_prompt
        self._samplers: list[Sampler] = []
        self._ends: list[int] = []
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._probs: list[float] = []
        self._shares: list[np.ndarray] = []

    @property
    def n_rows(self) -> int:
        """Rows of logits that the next level grows from."""
        return len(self._ends) or 1

    @property
    def tree(self) -> DraftTree:
        given = self.candidates
        return DraftTree(given.tokens, given.parents, given.probs, np.zeros(len(given), np.uint8))

    @property
    def candidates(self) -> Candidates:
        tokens, parents, probs = np.array(self._tokens, np.int32), np.array(self._parents, np.int32), np.array(self._probs, np.float32)
        return Candidates(tokens, parents, probs, self._shares if self.draws else None)

    def grow(self, rows: np.ndarray) -> None:
        """Add a level from the logits [n_rows, V] after the ends of the chains: the last one if a chain's text ends there."""
        position = self._position + self.level
        try:
            chosen = self._choose_level(rows, position)
        except (GrammarError, InvalidInputError):  # every token is banned: the request may end before that
            self.depth = self.level
            return
        if self.level == 0:
            self._samplers = [self._info.sampler.fork() for _ in chosen]
            self._ends = [-1] * len(chosen)
        for i, (token, shares) in enumerate(chosen):
            above = self._ends[i]
            self._ends[i] = len(self._tokens)
            self._tokens.append(token)
            self._parents.append(above)
            self._probs.append(float(shares[token]) * (self._probs[above] if above >= 0 else 1.0))
            self._samplers[i].accept(token)
            if self.draws:
                self._shares.append(shares)
        self.level += 1
        if any(each.constraint is not None and each.constraint.complete for each in self._samplers):
            self.depth = self.level

    def _choose_level(self, rows: np.ndarray, position: int) -> list[tuple[int, np.ndarray]]:
        """Return each chain's next token and its distribution, as `_choose` does."""
        if self.level == 0:
            return self._begin(rows[0], position)
        return [self._choose(sampler, row, position, i) for i, (sampler, row) in enumerate(zip(self._samplers, rows, strict=True))]

    def _begin(self, row: np.ndarray, position: int) -> list[tuple[int, np.ndarray]]:
        if self.draws:
            return [self._choose(self._info.sampler, row, position, i) for i in range(self.branches)]
        token, shares = self._choose(self._info.sampler, row, position, 0)
        likeliest = np.argsort(-shares, kind="stable")[: self.branches].tolist() if self.branches > 1 else []
        others = [other for other in likeliest if other != token and shares[other] > 0]
        return [(each, shares) for each in [token, *others[: self.branches - 1]]]

    def _choose(self, sampler: Sampler, row: np.ndarray, position: int, chain: int) -> tuple[int, np.ndarray]:
        """Return the token that a chain takes after logits row [V], and the distribution [V] that it comes from.

        Raises GrammarError, InvalidInputError if every token is banned.
        """
        if sampler.params.temperature == 0:
            adjusted = sampler.adjust_logits(row, position)
            token = sampler.find_best(adjusted, position)
            weights = np.exp(adjusted - adjusted[token])
        else:
            weights = sampler.compute_weights(row, position)
            token = sampler.draw(weights, position, 1 + 2 * chain if self.draws else 0)
        return token, weights / weights.sum()

    def find_path(self, tokens: np.ndarray) -> list[int]:
        """Return the nodes that carry the first of these tokens [n], as far as passes have computed them: all but the last level."""
        path: list[int] = []
        computed, node = range(len(self._tokens) - self.n_rows), -1
        for token in tokens.tolist():
            node = next((i for i in computed if self._parents[i] == node and self._tokens[i] == token), -1)
            if node < 0:
                break
            path.append(node)
        return path


@dataclass(slots=True)
class StepwiseState:
    """A sequence as its drafter knows it."""

    tokens: np.ndarray  # [n] int32, committed
    computed: int = 0
    """How many of them have keys and values in the drafter's pool."""
    info: SequenceInfo | None = None
    written: bool = False
    """The model has written a token: its prompt is computed, and drafts do not keep the first token waiting."""
    chains: Chains | None = None
    """Its draft in the present pass."""


class StepwiseDrafter(ABC):
    """Base of drafters that compute one token after the other. A sequence has the same slot in their pool as in the engine."""

    name: str
    draws = False

    def __init__(self, length: int, branches: int) -> None:
        """Draft `branches` chains of `length` tokens. Raises ValueError."""
        for what, value in (("length", length), ("branches", branches)):
            if value < 1:
                raise ValueError(f"{what} of a draft must be 1 or more, got {value}")
        self.length, self.branches = length, branches
        self._state_of: dict[int, StepwiseState] = {}

    def _use(self, forward: Callable[[Batch], Output], pool: BlockTables, rows_per_item: int, max_rows: int) -> None:
        self._forward, self._pool, self._rows_per_item, self._max_rows = forward, pool, rows_per_item, max_rows

    @abstractmethod
    def _keep_accepted(self, seq: int, state: StepwiseState, accepted: np.ndarray) -> int:
        """Keep what is right of the draft. How many tokens are computed once those `accepted` [k] are among them; less than all."""

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self._state_of[seq] = StepwiseState(tokens.copy())

    def attach(self, seq: int, info: SequenceInfo) -> None:
        self._state_of[seq].info = info

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        drafting: dict[int, StepwiseState] = {}
        for seq in seqs:
            state = self._state_of[seq]
            depth = self._plan_depth(seq, state, budget)
            if depth > 0 and state.info is not None:
                state.chains = Chains(state.info, len(state.tokens), depth, self.branches, self.draws)
                drafting[seq] = state
        self._catch_up(drafting)
        while spans := [span for seq, state in drafting.items() if (span := self._plan_next_level(seq, state)) is not None]:
            output, end = self._forward(pack(spans, self._pool, self._rows_per_item)), 0
            for span in spans:
                end += span.n_logits
                chains = drafting[span.slot].chains
                assert chains is not None
                chains.grow(output.get_logits(end - chains.n_rows, end))
        return [NOTHING if (chains := self._state_of[seq].chains) is None else chains.candidates for seq in seqs]

    def _plan_depth(self, seq: int, state: StepwiseState, budget: int) -> int:
        """Return how many levels to draft, with room for the keys and values of all but the last; 0: none."""
        n, info = len(state.tokens), state.info
        if info is None or not state.written:
            return 0
        room = self._pool.max_blocks * BLOCK - n
        depth = min(self.length, budget // self.branches, info.limit - n - 1, 1 + room // self.branches)
        return depth if depth > 0 and self._pool.reserve(seq, n + (depth - 1) * self.branches) else 0

    def _catch_up(self, drafting: dict[int, StepwiseState]) -> None:
        """Compute what is missing of the texts, but for as many of their last tokens as the first pass of the draft can carry."""
        while sum(len(state.tokens) - state.computed for state in drafting.values()) > self._max_rows:
            left, spans = self._max_rows, []
            for seq, state in drafting.items():
                first, n = state.computed, min(len(state.tokens) - 1 - state.computed, left)
                if n > 0:
                    spans.append(Span(seq, state.tokens[first : first + n], first, logits=0))
                    state.computed, left = first + n, left - n
            if not spans:  # more sequences than rows
                return
            self._forward(pack(spans, self._pool, self._rows_per_item)).get_logits(0, 0)

    def _plan_next_level(self, seq: int, state: StepwiseState) -> Span | None:
        """Return the rows that the next level of a draft grows from, None if it is deep enough."""
        chains, n = state.chains, len(state.tokens)
        assert chains is not None
        if chains.level == chains.depth:
            return None
        if chains.level == 0:
            first, state.computed = min(state.computed, n - 1), n  # all are, if the pass after the last draft has failed
            return Span(seq, state.tokens[first:], first)
        tree = chains.tree
        if chains.n_rows == 1:
            return Span(seq, tree.tokens[-1:], n + chains.level - 1)
        return Span(seq, state.tokens[-1:], n - 1, tree)  # a tree is computed as a whole: the earlier levels once more

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        state = self._state_of[seq]
        state.computed = self._keep_accepted(seq, state, accepted)
        state.tokens = np.concatenate([state.tokens, accepted])
        state.written, state.chains = True, None

    def end(self, seq: int) -> None:
        self._state_of.pop(seq, None)

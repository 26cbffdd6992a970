"""Draft with the model's own head for further tokens (`backends.base.PredictionHead`): a chain of its most likely tokens, with siblings.

The head reads each row that a pass has kept, with the token that follows, so that reading the last one gives the first candidates. What it
predicts from its own output continues the chain while that is likely enough to pay for the time of another step. Rows whose hidden states
it was not given, since they came from the prefix cache or it was not asked for a while, are missing from its context.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ngramspec.backends.base import HeadRows, Predicted, PredictionHead
from ngramspec.speculative.drafter import Candidates

LENGTH = 5  # Most levels.
SIBLINGS = 4  # Most tokens of a level.
LEAST_PROB = 0.02  # Least probability of a token's path: below it a row never pays.
# One more level is predicted if the one before is expected to bring MARGIN times the tokens that passes of one token make while the head
# takes a step: a pass makes more than one token, and a level further down is less likely and has to be verified.
MARGIN = 2.5
# The chain's probabilities are corrected by how often the model took it: weight of earlier drafts, and tokens that are assumed before.
DECAY, PRIOR = 0.99, 8.0
STEP_WEIGHT, STEP_ROWS = 0.1, 4  # Weight of the latest step in the mean of steps' times; most rows per sequence of a step that counts.


@dataclass(slots=True)
class _HeadState:
    """A sequence as the head knows it."""

    tokens: np.ndarray  # [n] int32, the latest committed ones
    end: int
    """Position after the last of them."""
    n_read: int = 0
    """Rows that the head has read, those of drafts not counted."""
    states: list[np.ndarray] = field(default_factory=list)
    """Hidden states [n, H] that it has not read, of positions that follow each other."""
    first: int = 0
    """Position of the first one."""
    n_states: int = 0
    chain: list[int] = field(default_factory=list)
    """The most likely token of each level of the last draft."""
    probs: list[float] = field(default_factory=list)
    """Probabilities of the chain up to each level, as the head states them."""


class HeadDrafter:
    """Draft with a head, up to `length` tokens deep."""

    name = "mtp"
    tolerates_gaps = True

    def __init__(self, head: PredictionHead, pass_ms: float, *, length: int = LENGTH) -> None:
        """Draft with this head. `pass_ms`: milliseconds of a pass of one row."""
        self.head, self.length, self._pass_ms = head, length, pass_ms
        self._most_states = head.most_rows - length
        self._known: dict[int, _HeadState] = {}
        self._expected = self._taken = PRIOR
        self._step_ms = head.step_ms

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        self._known[seq] = _HeadState(tokens[-self._most_states :].copy(), len(tokens))

    def on_hidden_states(self, seq: int, first: int, states: np.ndarray) -> None:
        """Keep new states until the head reads them, the latest ones."""
        known = self._known[seq]
        if first != known.first + known.n_states:
            known.states, known.first, known.n_states = [], first, 0
        known.states.append(states)
        known.n_states += len(states)
        if (excess := known.n_states - self._most_states) > 0:
            known.states = [np.concatenate(known.states)[excess:]]
            known.first, known.n_states = known.first + excess, self._most_states

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        trees = {seq: _Tree() for seq in seqs}
        growing = {}
        for seq in seqs if budget > 0 else ():
            known = self._known[seq]
            known.chain, known.probs = [], []
            if known.n_states and known.first + known.n_states == known.end - 1:
                n = known.n_states
                growing[seq] = HeadRows(seq, known.n_read, known.tokens[-n:], np.concatenate(known.states))
                known.states, known.first, known.n_states, known.n_read = [], known.end - 1, 0, known.n_read + n
        for level in range(self.length):
            if not growing:
                break
            predicted = self._predict(list(growing.values()))
            for seq, tokens, probs in zip(growing, predicted.tokens, predicted.probs, strict=True):
                trees[seq].add_level(tokens[:SIBLINGS], probs, budget)
            growing = self._list_next_rows(growing, trees, predicted, level)
        for seq, tree in trees.items():
            self._known[seq].chain, self._known[seq].probs = tree.chain, tree.chain_probs
        return [trees[seq].candidates for seq in seqs]

    def _predict(self, rows: Sequence[HeadRows]) -> Predicted:
        started = time.perf_counter()
        predicted = self.head.predict(rows)
        if sum(len(each.tokens) for each in rows) <= STEP_ROWS * len(rows):
            self._step_ms += STEP_WEIGHT * ((time.perf_counter() - started) * 1e3 - self._step_ms)
        return predicted

    def _list_next_rows(self, seqs: Iterable[int], trees: dict[int, _Tree], predicted: Predicted, level: int) -> dict[int, HeadRows]:
        """Return the rows of a further level, for sequences whose chains are likely enough to pay for it together."""
        trust = self._taken / self._expected
        expected = {seq: trust * trees[seq].chain_probs[level] for seq in seqs if len(trees[seq].chain) > level}
        if sum(expected.values()) * self._pass_ms < MARGIN * self._step_ms:
            return {}
        least = MARGIN * self._step_ms / (self._pass_ms * len(expected))
        rows = {}
        for seq, states in zip(seqs, predicted.states, strict=True):
            if expected.get(seq, 0.0) >= least:
                token = np.array(trees[seq].chain[-1:], np.int32)
                rows[seq] = HeadRows(seq, self._known[seq].n_read + level, token, states[None])
        return rows

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        known = self._known[seq]
        for level, (token, right) in enumerate(zip(known.chain, accepted.tolist(), strict=False)):
            self._expected, self._taken = (DECAY * x + (1 - DECAY) * PRIOR for x in (self._expected, self._taken))
            self._expected += known.probs[level]
            if token != right:
                break
            self._taken += 1
        known.tokens = np.concatenate([known.tokens, accepted])[-self._most_states :]
        known.end += len(accepted)
        known.chain, known.probs = [], []

    def end(self, seq: int) -> None:
        self._known.pop(seq, None)


class _Tree:
    """A draft that grows level by level: the most likely token of each level continues the chain, its siblings are leaves."""

    def __init__(self) -> None:
        self.tokens, self.parents, self.probs = list[int](), list[int](), list[float]()
        self.chain, self.chain_probs = list[int](), list[float]()
        self._above, self._end = 1.0, -1

    def add_level(self, tokens: np.ndarray, probs: np.ndarray, most: int) -> None:
        """Add tokens [k] below the chain's end, most likely first, with their probabilities there, while there are fewer than `most`."""
        first = len(self.tokens)
        for token, prob in zip(tokens.tolist(), (self._above * probs).tolist(), strict=False):
            if len(self.tokens) < most and prob >= LEAST_PROB:
                self.tokens.append(token)
                self.parents.append(self._end)
                self.probs.append(prob)
        if len(self.tokens) > first:
            self.chain.append(self.tokens[first])
            self.chain_probs.append(self.probs[first])
            self._above, self._end = self.probs[first], first

    @property
    def candidates(self) -> Candidates:
        return Candidates(np.array(self.tokens, np.int32), np.array(self.parents, np.int32), np.array(self.probs, np.float32))

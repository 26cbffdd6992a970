"""Lookahead decoding: n-grams that the model writes beside the text, in the same passes, are its later drafts.

After Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding" (2024). A window of W columns runs ahead of
the text. Each is a trajectory of Jacobi iteration: in a pass the model reads a column's tokens, and what it picks behind them becomes the
column's next token. The last N - 1 tokens of a column and the new one are an n-gram for the pool; the n-grams of the pool that begin with
the last known token are drafted.

The window is a tree, so that it needs no attention mask of its own. With (l, j) for level l of column j: (0, 0) is the last known token,
(0, j) the child of (0, j - 1), and (l, j) the child of (l - 1, j), at depth l + j. The ancestors of a node are what the paper's mask lets
it see. The walk accepts nodes of the window, too, where they match. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ngramspec.outputs import DraftTree
from ngramspec.speculative.drafter import Candidates

# Latest tokens for which a sequence's pool keeps n-grams.
POOL = 4096

# Assumed probability that the model accepts a node of a guess, or of the window alone, given its parent.
GUESSED, AHEAD = 0.5, 0.1


@dataclass(slots=True)
class _LookaheadState:
    """A sequence."""

    columns: list[list[int]]
    """The window: each column's tokens from level 0 on, those of the first from level 1 on."""
    tail: list[int] = field(default_factory=list)
    """The last N - 1 tokens."""
    pool: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    """What followed a token, the latest first; the latest token last."""

    def iterate_paths(self) -> Iterator[list[int]]:
        """Yield per column the tokens after the last known one, to the column's deepest."""
        yield self.columns[0]
        level_0 = []
        for column in self.columns[1:]:
            level_0.append(column[0])
            yield level_0 + column[1:]


class Lookahead:
    """A window of `window` columns, n-grams of `ngram` tokens, at most `guesses` of them drafted: W, N and G of the paper.

    A pass carries at most (W + G)(N - 1) - 1 nodes, W + N - 3 levels deep; where there is room for fewer, half of it is for the window's
    first columns. A column whose nodes were not all in the pass stands still. The defaults are those that the authors' code advises for
    models of 7B. As there, the window moves on by one level a pass, however many tokens were accepted.
    """

    name = "lookahead"

    def __init__(self, window: int = 7, ngram: int = 5, guesses: int = 7, *, from_text: bool = False, seed: int = 0) -> None:
        """Start with a random window. `from_text`: the n-grams of prompt and output enter the pool, too. Raises ValueError."""
        if window < 1 or ngram < 2 or guesses < 1:
            raise ValueError(f"lookahead takes a window from 1, n-grams from 2 and guesses from 1, got {window}, {ngram}, {guesses}")
        self.window, self.ngram, self.guesses, self.from_text = window, ngram, guesses, from_text
        self._random = np.random.default_rng(seed)
        self._texts: dict[int, _LookaheadState] = {}

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        """The window's first tokens are drawn from these; a column grows by one level a pass to N - 1 of them."""
        text = self._texts[seq] = _LookaheadState([[], *([token] for token in self._random.choice(tokens, self.window - 1).tolist())])
        self._read(text, tokens if self.from_text else tokens[1 - self.ngram :])

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        room = (budget + 1) // (self.ngram - 1)
        n_columns = min(self.window, -(-room // 2))
        n_guesses = min(self.guesses, room - n_columns)
        return [self._build_tree(self._texts[seq], n_columns, n_guesses) for seq in seqs]

    def _build_tree(self, text: _LookaheadState, n_columns: int, n_guesses: int) -> Candidates:
        """Return the guesses, then the window; what begins alike is one path."""
        guesses = text.pool.get(text.tail[-1], [])[:n_guesses]
        window = list(text.iterate_paths())[:n_columns]
        nodes: dict[tuple[int, int], int] = {}
        probs: list[float] = []
        for path, chance in [*((guess, GUESSED) for guess in guesses), *((path, AHEAD) for path in window)]:
            node = -1
            for token in path:
                above = probs[node] if node >= 0 else 1.0
                node = nodes.setdefault((node, token), len(nodes))
                if node == len(probs):
                    probs.append(above * chance)
        parents, tokens = np.array(list(nodes), np.int32).reshape(-1, 2).T
        return Candidates(tokens, parents, np.array(probs, np.float32))

    def on_topk(self, seq: int, tree: DraftTree, tokens: np.ndarray) -> None:
        text, sampled = self._texts[seq], tokens[:, 0].tolist()
        children = {edge: i for i, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
        moved = []
        for path, column in zip(text.iterate_paths(), text.columns, strict=True):
            node: int | None = -1
            for token in path:
                node = children.get((node, token)) if node is not None else None
            moved.append(column if node is None or sampled[node + 1] < 0 else [*column, sampled[node + 1]])
        for j, column in enumerate(moved):
            whole = column if j else [text.tail[-1], *column]
            if len(whole) == self.ngram:
                self._add(text, whole)
                del column[0]
        text.columns = moved

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        self._read(self._texts[seq], accepted)

    def end(self, seq: int) -> None:
        self._texts.pop(seq, None)

    def _read(self, text: _LookaheadState, tokens: np.ndarray) -> None:
        for token in tokens.tolist():
            text.tail.append(token)
            if len(text.tail) == self.ngram:
                if self.from_text:
                    self._add(text, text.tail)
                del text.tail[0]

    def _add(self, text: _LookaheadState, ngram: list[int]) -> None:
        key, *rest = ngram
        follow = tuple(rest)
        known = text.pool.pop(key, [])
        text.pool[key] = [follow, *(other for other in known if other != follow)][: self.guesses]
        if len(text.pool) > POOL:
            del text.pool[next(iter(text.pool))]

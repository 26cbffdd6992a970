"""Drafts of a text that follows a grammar: what the grammar forbids leaves the tree, what it foresees enters it.

A speculator's tree and a walker at the text's end enter, the tree that is verified leaves.
Knows neither the model nor who drafted. No token of the text depends on it: every row is masked by the grammar whatever was drafted.
"""

from __future__ import annotations

import numpy as np

from ngramspec.grammar.base import Walker
from ngramspec.outputs import DraftTree

SOURCE = "grammar"
"""What drafted the tokens that a grammar foresees."""
NOWHERE = -1
"""A new node's place in the speculator's tree."""
DEEPEST = 256
"""Levels, however long drafts may be."""


def follow(tree: DraftTree, walker: Walker, *, source: int, max_depth: int, max_nodes: int, least: float) -> DraftTree:
    """The tree's nodes that the grammar allows, likeliest branch first, with what it foresees behind each of them.

    At most `max_nodes` nodes, `max_depth` deep, and nothing foreseen that comes with less than the chance `least`. Tokens foreseen are by
    `source`.
    """
    return _Following(tree, walker, source, min(max_depth, DEEPEST), max_nodes, least).tree()


class _Following:
    def __init__(self, tree: DraftTree, walker: Walker, source: int, max_depth: int, max_nodes: int, least: float) -> None:
        self._given, self._walker, self._source = tree, walker, source
        self._max_depth, self._max_nodes, self._least = max_depth, max_nodes, least
        self._tokens, self._parents, self._probs = tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(self._parents):
            self._children.setdefault(parent, []).append(node)
        self._kept: list[tuple[int, int, float, int]] = []  # token, parent, probability, index in the given tree

    def tree(self) -> DraftTree:
        self._grow(-1, -1, 1.0, 0, [])
        tokens, parents, probs, origins = zip(*self._kept, strict=True) if self._kept else ((), (), (), ())
        origin = np.array(origins, np.int32)
        given = self._given
        sources = np.full(len(origin), self._source, np.uint8)
        sources[origin >= 0] = given.sources[origin[origin >= 0]]
        places = None
        if given.store_positions is not None:
            places = np.where(origin >= 0, given.store_positions[origin], -1) if len(given) else np.full(len(origin), -1, np.int64)
        return DraftTree(
            np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32), sources, places, origins=origin
        )

    def _grow(self, at: int, origin: int, prob: float, depth: int, foreseen: list[tuple[int, float]]) -> None:
        """Behind a node that is kept, where the walker stands: `at` its index in the new tree, `origin` in the given one."""
        if depth == self._max_depth:
            return
        foreseen = foreseen or self._walker.foreseen()
        known = self._children.get(origin, ()) if origin != NOWHERE or at < 0 else ()
        branches = {self._tokens[child]: (self._probs[child], child) for child in known}
        if foreseen and prob * foreseen[0][1] >= self._least:
            token, chance = foreseen[0]
            likely, child = branches.get(token, (0.0, NOWHERE))
            branches[token] = max(likely, prob * chance), child
        for token, (chance, child) in sorted(branches.items(), key=lambda branch: -branch[1][0]):
            if len(self._kept) == self._max_nodes:
                return
            if self._walker.step(token):
                self._kept.append((token, at, chance, child))
                rest = foreseen[1:] if foreseen and foreseen[0][0] == token else []
                self._grow(len(self._kept) - 1, child, chance, depth + 1, rest)
                self._walker.back()

"""Applies a grammar to a draft tree: removes what the grammar forbids, adds the tokens that it forces.

A speculator's tree and a lookahead at the text's end enter, the tree that is verified leaves. Knows neither the model nor the drafters. No
token of the text depends on it: every row is masked by the grammar whatever was drafted.
"""

from __future__ import annotations

import numpy as np

from ngramspec.grammar.constraint import ConstraintLookahead
from ngramspec.outputs import DraftTree

SOURCE = "grammar"  # the drafter's name for forced tokens
NOT_DRAFTED = -1  # origin of a node that was not in the speculator's tree
MAX_DEPTH = 256  # levels of a tree, whatever `max_depth` allows


def apply_grammar(
    tree: DraftTree, lookahead: ConstraintLookahead, *, source: int, max_depth: int, max_nodes: int, least: float
) -> DraftTree:
    """Return the nodes that the grammar allows, most probable branch first, each followed by the tokens that it forces.

    The tree has at most `max_nodes` nodes and `max_depth` levels. Forced tokens whose path is less probable than `least` are left out;
    those that are added have `source` as their source.
    """
    return _GrammarTree(tree, lookahead, source, min(max_depth, MAX_DEPTH), max_nodes, least).build()


class _GrammarTree:
    def __init__(self, tree: DraftTree, lookahead: ConstraintLookahead, source: int, max_depth: int, max_nodes: int, least: float) -> None:
        self._drafted, self._lookahead, self._source = tree, lookahead, source
        self._max_depth, self._max_nodes, self._least = max_depth, max_nodes, least
        self._tokens, self._parents, self._probs = tree.tokens.tolist(), tree.parents.tolist(), tree.probs.tolist()
        self._children: dict[int, list[int]] = {}
        for node, parent in enumerate(self._parents):
            self._children.setdefault(parent, []).append(node)
        self._nodes: list[tuple[int, int, float, int]] = []  # token, parent, probability, index in the drafted tree

    def build(self) -> DraftTree:
        self._add_children(-1, -1, 1.0, 0, [])
        tokens, parents, probs, origins = zip(*self._nodes, strict=True) if self._nodes else ((), (), (), ())
        origin = np.array(origins, np.int32)
        drafted = self._drafted
        sources = np.full(len(origin), self._source, np.uint8)
        sources[origin >= 0] = drafted.sources[origin[origin >= 0]]
        places = None
        if drafted.store_positions is not None:
            places = np.where(origin >= 0, drafted.store_positions[origin], -1) if len(drafted) else np.full(len(origin), -1, np.int64)
        return DraftTree(
            np.array(tokens, np.int32), np.array(parents, np.int32), np.array(probs, np.float32), sources, places, origins=origin
        )

    def _add_children(self, node: int, origin: int, prob: float, depth: int, forced: list[tuple[int, float]]) -> None:
        """Add the subtree below `node` (its index in the new tree; `origin`: in the drafted one), at which the lookahead stands."""
        if depth == self._max_depth:
            return
        forced = forced or self._lookahead.get_forced_tokens()
        drafted = self._children.get(origin, ()) if origin != NOT_DRAFTED or node < 0 else ()
        branches = {self._tokens[child]: (self._probs[child], child) for child in drafted}
        if forced and prob * forced[0][1] >= self._least:
            token, chance = forced[0]
            likely, child = branches.get(token, (0.0, NOT_DRAFTED))
            branches[token] = max(likely, prob * chance), child
        for token, (chance, child) in sorted(branches.items(), key=lambda branch: -branch[1][0]):
            if len(self._nodes) == self._max_nodes:
                return
            if self._lookahead.step(token):
                self._nodes.append((token, node, chance, child))
                rest = forced[1:] if forced and forced[0][0] == token else []
                self._add_children(len(self._nodes) - 1, child, chance, depth + 1, rest)
                self._lookahead.undo()

"""Accept drafts by rejection sampling (classic speculative sampling), and leniently.

A tree and the model's own distribution p after each of its rows go in; the accepted tokens come out, as from exact matching. Knows no model
and no drafter. The tokens of `reject` are distributed as p if four things hold of the tree: a node's token is drawn from its q, given the
ancestors and the siblings before it; no draft depends on the numbers that decide here; which nodes are left out does not depend on the
tokens drawn there; and siblings that carry the same token are not merged, for each is a trial.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ngramspec.outputs import DraftTree


def reject(
    tree: DraftTree | None, target: Callable[[int], np.ndarray], uniform: Callable[[int, int], float], lenience: float = 1.0
) -> Iterator[tuple[int, int]]:
    """Yield (token, node) for every accepted token, in order: node is the draft node that carried it, or -1 for the last.

    A node's children are tried in their order in the tree: x, drawn from q, is accepted with probability min(1, p(x) / (l q(x))). If it
    is refused, max(0, p - l q), normalised, takes the place of p for the next child and, after the last, gives the token (Leviathan
    et al., 2023, algorithm 1 and appendix A.5; siblings as in SpecInfer, Miao et al., 2024). Lenience l in (0, 1]: below 1 more is
    accepted, the distribution is no longer p, and no token has more probability than p(x) / l, whatever the number of siblings.

    `target(row)` is p after row 0 (the root) or row i + 1 (node i), [V] int64 up to a factor. It is called for the rows of the path alone
    and in order. `uniform(depth, k)` is the k-th of independent numbers in [0, 1) for the token at that depth (0: the first): k = 0 draws
    it, k = 1 + i decides on the i-th child. `tree.drawn_from` holds the q of every node; if it is None, q is one-hot at the node's token.
    """
    node, depth = -1, 0
    while True:
        token, node = _try_children(tree, node, target(node + 1), partial(uniform, depth), lenience)
        yield token, node
        if node < 0:
            return
        depth += 1


def _try_children(tree: DraftTree | None, node: int, p: np.ndarray, uniform: Callable[[int], float], lenience: float) -> tuple[int, int]:
    """Return the next token and the child of `node` that carried it, or -1. p [V] up to a factor."""
    for i, (token, child) in enumerate(_list_children(tree, node)):
        drawn_from = tree.drawn_from  # type: ignore[union-attr]
        share = 1.0 if drawn_from is None else drawn_from[child][token]
        if not share > 0:  # not a draw: siblings without replacement have used up q
            continue
        scale = lenience * float(p.sum())
        if uniform(1 + i) * scale * share < p[token]:
            return token, child
        if drawn_from is None:
            residual = p.astype(np.float64)
            residual[token] = max(residual[token] - scale, 0)
        else:
            residual = np.maximum(p - scale * drawn_from[child], 0)
        if not residual.any():  # q is p, and only rounding refused
            return token, child
        p = residual
    mass = p.cumsum()
    return int(mass.searchsorted(uniform(0) * float(mass[-1]), side="right")), -1


def accept_leniently(tree: DraftTree | None, logits: Callable[[int], np.ndarray], lenience: float) -> Iterator[tuple[int, int]]:
    """Yield the same for greedy sequences: the most likely child with p(x) >= l max p is accepted; without one, the argmax ends the path.

    `logits(row)` is [V] float32, called as `target` is. Ties go to the lower id. (Leviathan et al., appendix A.5, with its sign put right.)
    """
    node = -1
    while True:
        row = logits(node + 1)
        best = int(row.argmax())
        least = float(row[best]) + math.log(lenience)
        near = [(-row[token], token, child) for token, child in _list_children(tree, node) if row[token] >= least]
        _, token, node = min(near, default=(0.0, best, -1))
        yield token, node
        if node < 0:
            return


def _list_children(tree: DraftTree | None, node: int) -> list[tuple[int, int]]:
    """Return (token, child) for each child, in their order in the tree."""
    return [] if tree is None else [(int(tree.tokens[child]), child) for child in (tree.parents == node).nonzero()[0].tolist()]

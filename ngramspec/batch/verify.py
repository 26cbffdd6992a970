"""Verification: walking a draft with the model's own tokens. Chains and trees, greedy and sampled, one way.

A draft tree and the model's tokens after its rows go in; the accepted tokens and their nodes come out. At each node the
model's own token is sampled; the walk steps to the child that carries it and ends where there is none. With position-keyed
sampling this *is* speculative sampling for a deterministic draft (a one-hot q: accept x with probability p(x), else the
residual p without x), for chains and trees alike. Knows neither logits nor KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numba import njit

from ngramspec.batch.types import DraftTree


def walk(tree: DraftTree | None, sample: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Yield (token, node) for every accepted token, in order: node is the draft node that carried it, or -1 for the last.

    `sample(row)` is the model's token after row 0 (the root) or row i + 1 (node i). It is called for the rows of the path
    alone and in order, so that a sampler may carry state along it; a consumer that stops early stops the sampling too.
    """
    node = -1
    while True:
        token = sample(node + 1)
        child = -1
        if tree is not None and len(tree):
            match = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
            child = int(match[0]) if len(match) else -1
        yield token, child
        if child < 0:
            return
        node = child


@njit(cache=True, nogil=True)
def follow(tokens, parents, sampled):
    """`walk` where the model's tokens after all rows are known, sampled [1 + N] int32: the nodes of the accepted path, in order."""
    path = np.empty(tokens.shape[0], np.int32)
    n, node = 0, np.int32(-1)
    for i in range(tokens.shape[0]):  # a child comes after its parent, and siblings differ in token
        if parents[i] == node and tokens[i] == sampled[node + 1]:
            path[n] = node = np.int32(i)
            n += 1
    return path[:n]

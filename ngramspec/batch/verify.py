"""Verification: walking a draft with the model's own tokens. Chains and trees, greedy and sampled, one way.

A draft tree and the model's tokens after its rows go in; the accepted tokens and their nodes come out. At each node the
model's own token is sampled; the walk steps to the child that carries it and ends where there is none. With position-keyed
sampling this *is* speculative sampling for a deterministic draft (a one-hot q: accept x with probability p(x), else the
residual p without x), for chains and trees alike. Knows no KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numba import njit, prange

from ngramspec.batch.pack import Batch
from ngramspec.batch.sampling import draws, pick
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
        if tree is not None and len(tree.tokens):
            child = _child(tree.parents, tree.tokens, node, token)
        yield token, child
        if child < 0:
            return
        node = child


@njit(cache=True, nogil=True)
def _child(parents, tokens, node, token):
    for i in range(node + 1, parents.shape[0]):
        if parents[i] == node and tokens[i] == token:
            return i
    return -1


Run: TypeAlias = tuple[np.ndarray, np.ndarray]
"""What a walk accepts: the tokens [k] int32, and the draft nodes [k - 1] int32 that carried all but the last of them. A last token of -1
stands where the model's logits hold no finite maximum."""


def runs(batch: Batch, greedy: np.ndarray, logits: np.ndarray | None = None) -> list[Run | None]:
    """`walk` of all sequences whose spans have a sampler and whose tokens are functions of a row, the seed and the position alone; None
    for the others. All in one call.

    `greedy` [N] int32: the choice after each row whose logits were wanted, -1 for none. `logits` [N, V]: what sequences above temperature
    0 draw from; None: `greedy` holds what these draw, too.
    """
    walked = [span.sampler is not None and span.sampler.on_device and span.samples for span in batch.spans]
    if not any(walked):
        return [None] * len(walked)
    first = np.array([span.root_logits for span in batch.spans], np.int64)
    tokens, nodes = np.empty((2, len(batch.input_ids)), np.int32)
    counts = np.zeros(len(walked), np.int64)
    tree = batch.input_ids, batch.parents, batch.roots, batch.ends
    followed = np.array(walked)
    if logits is not None:
        drawing = [(b, span.sampler, span) for b, span in enumerate(batch.spans) if walked[b] and span.sampler and not span.sampler.greedy]
        if drawing:
            which, samplers, spans = zip(*drawing, strict=True)
            followed[list(which)] = False
            how = draws(samplers, [span.start + len(span.tokens) - span.n_prompt for span in spans])
            _draw_all(np.array(which), *tree, first, greedy, logits, how, tokens, nodes, counts)
    _follow_all(followed, *tree, first, greedy, tokens, nodes, counts)
    found: list[Run | None] = []
    for it, root, n in zip(walked, batch.roots.tolist(), counts.tolist(), strict=True):
        found.append((tokens[root : root + n], nodes[root : root + n - 1]) if it else None)
    return found


@njit(cache=True, nogil=True)
def _follow_all(chosen, input_ids, parents, roots, ends, first, picked, tokens, nodes, counts):
    """Walks where the tokens picked after all rows are known. Sequence b's go to tokens and nodes from row roots[b] on."""
    for b in range(chosen.shape[0]):
        if chosen[b]:
            at = root = here = roots[b]
            token = picked[first[b]]
            for r in range(root + 1, ends[b]):  # a child comes after its parent, and siblings differ in token
                if parents[r] == here and input_ids[r] == token:
                    tokens[at], nodes[at] = token, r - root - 1
                    here = r
                    at += 1
                    token = picked[first[b] + r - root]
            tokens[at] = token
            counts[b] = at + 1 - root


@njit(cache=True, nogil=True, parallel=True)
def _draw_all(which, input_ids, parents, roots, ends, first, greedy, logits, draws, tokens, nodes, counts):
    """The same where tokens are drawn, row by row of the path: sequence which[i] as `draws` has it at i."""
    for i in prange(which.shape[0]):
        b = which[i]
        root = here = roots[b]
        n = 0
        while here >= 0:
            row = first[b] + here - root
            best = greedy[row]
            token = np.int64(pick(logits[row], logits[row, best], draws, i, n)) if best >= 0 else np.int64(-1)
            tokens[root + n] = token
            above, here = here, np.int64(-1)
            for r in range(above + 1, ends[b]):
                if here < 0 and parents[r] == above and input_ids[r] == token:
                    here = np.int64(r)
                    nodes[root + n] = r - root - 1
            n += 1
        counts[b] = n

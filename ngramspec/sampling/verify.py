"""Verification by exact match: follow a draft as far as it is what the model samples. One way for chains and trees, greedy and sampled.

A draft tree and the model's tokens after its rows go in; the accepted tokens and their nodes come out. At each node the
model's own token is sampled; the match steps to the child with that token and ends if there is none. With position-keyed
sampling this *is* speculative sampling for a deterministic draft (a one-hot q: accept x with probability p(x), else the
residual p without x), for chains and trees alike. Knows no KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK, DraftTree
from ngramspec.sampling.batch import Batch, Span, pack
from ngramspec.sampling.sampler import DrawParams, Sampler, draw_token
from ngramspec.sampling.topk import rank_rows
from ngramspec.sampling_params import SamplingParams


def match_draft(tree: DraftTree | None, sample: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Yield (token, node) for every accepted token, in order: node is the draft node that carried it, or -1 for the last.

    `sample(row)` is the model's token after row 0 (the root) or row i + 1 (node i). It is called for the rows of the path
    alone and in order, so that a sampler may carry state along it; a consumer that stops early stops the sampling too.
    """
    node = -1
    while True:
        token = sample(node + 1)
        child = -1
        if tree is not None and len(tree.tokens):
            child = _find_child(tree.parents, tree.tokens, node, token)
        yield token, child
        if child < 0:
            return
        node = child


@njit(cache=True, nogil=True)
def _find_child(parents, tokens, node, token):
    for i in range(node + 1, parents.shape[0]):
        if parents[i] == node and tokens[i] == token:
            return i
    return -1


# Accepted tokens [k] int32, and the draft nodes [k - 1] int32 that carried all but the last of them. A last token of -1 means that the
# model's logits have no finite maximum.
Match: TypeAlias = tuple[np.ndarray, np.ndarray]


def match_batch(
    batch: Batch, greedy: np.ndarray, logits: np.ndarray | None = None, picked: Sequence[bool] | None = None
) -> list[Match | None]:
    """Return `match_draft` of all sequences whose tokens are `picked` or can be drawn, in one call; None for the others.

    `picked` None: those whose spans have a sampler that needs only a row, the seed and the position. `greedy` [N] int32: the choice after
    each row whose logits were wanted, -1 for none. `logits` [N, V]: what sequences above temperature 0 draw from; None: `greedy` holds
    what these draw, too.
    """
    if picked is None:
        picked = [span.sampler is not None and span.sampler.needs_only_logits and span.samples for span in batch.spans]
    how = [_choose_matcher(span, draws=logits is not None) if each else _ALONE for span, each in zip(batch.spans, picked, strict=True)]
    if not any(how):
        return [None] * len(how)
    tokens, nodes = np.empty((2, len(batch.input_ids)), np.int32)
    trees = batch.input_ids, batch.parents, batch.roots, batch.ends, batch.root_logits
    ends = match_picked(np.array(how, np.int8), trees, greedy, tokens, nodes)
    if DRAWN in how:
        which = [b for b, each in enumerate(how) if each == DRAWN]
        spans = [batch.spans[b] for b in which]
        drawn = make_draw_params(
            [span.sampler for span in spans if span.sampler], [span.start + len(span.tokens) - span.n_prompt for span in spans]
        )
        match_drawn(np.array(which), trees, greedy, logits, drawn, tokens, nodes, ends)
    return [
        (tokens[root:end], nodes[root : end - 1]) if each else None
        for each, root, end in zip(how, batch.roots.tolist(), ends.tolist(), strict=True)
    ]


def make_draw_params(samplers: Sequence[Sampler], positions: Sequence[int]) -> DrawParams:
    """Return the parameters of samplers that adjust no logits, at positions in their outputs."""
    floats = np.array([each.params.temperature for each in samplers], np.float32)
    rows = [(each.params.top_k, each.share, each.least, p) for each, p in zip(samplers, positions, strict=True)]
    top_k, share, least, position = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    seed, sample = np.array([(each.seed, each.index) for each in samplers], np.uint64).reshape(-1, 2).T.copy()
    return DrawParams(floats, top_k, share, least, seed, sample, position)


_ALONE, FOLLOWED, DRAWN = range(3)


def _choose_matcher(span: Span, *, draws: bool) -> int:
    """Return whether a sequence's tokens are drawn row by row (DRAWN) or were picked after all rows (FOLLOWED)."""
    return DRAWN if draws and span.sampler is not None and not span.sampler.greedy else FOLLOWED


@njit(cache=True, nogil=True)
def match_picked(how, trees, picked, tokens, nodes):
    """Match sequences whose tokens were picked after all rows -> where each match ends; sequence b's begins at roots[b].

    `trees`: input_ids, parents, roots, ends and root_logits of the batch.
    """
    input_ids, parents, roots, ends, root_logits = trees
    to = roots.copy()
    for b in range(how.shape[0]):
        if how[b] == FOLLOWED:
            at = root = here = np.int64(roots[b])
            token = picked[root_logits[b]]
            for r in range(root + 1, ends[b]):  # a child comes after its parent, and siblings differ in token
                if parents[r] == here and input_ids[r] == token:
                    tokens[at], nodes[at] = token, r - root - 1
                    here = r
                    at += 1
                    token = picked[root_logits[b] + r - root]
            tokens[at] = token
            to[b] = at + 1
    return to


@njit(cache=True, nogil=True)
def match_drawn(which, trees, greedy, logits, draws, tokens, nodes, to):
    """Match sequences by drawing tokens row by row of the path: sequence which[i] as `draws` has it at i. Set where they end in `to`.

    `trees`: as in `match_picked`.
    """
    input_ids, parents, roots, ends, root_logits = trees
    for i in range(which.shape[0]):
        b = which[i]
        root = here = np.int64(roots[b])
        n = 0
        while here >= 0:
            row = root_logits[b] + here - root
            best = greedy[row]
            token = np.int64(-1)
            if best >= 0:
                token = np.int64(draw_token(np.ascontiguousarray(logits[row]), logits[row, best], draws, i, n))
            tokens[root + n] = token
            above, here = here, np.int64(-1)
            for r in range(above + 1, ends[b]):
                if here < 0 and parents[r] == above and input_ids[r] == token:
                    here = np.int64(r)
                    nodes[root + n] = r - root - 1
            n += 1
        to[b] = root + n


def warmup_batches() -> None:
    """Compile, or load from disk, `pack`, what finds the best tokens of a pass, and what takes them."""
    tables = BlockTables(1, 1, BLOCK)
    tables.reserve(0, 1)
    batch = pack([Span(0, np.zeros(1, np.int32), 0)], tables)
    match_batch(batch, rank_rows(np.zeros((1, 8), np.float32))[0], None, [True])


def warmup() -> None:
    """Compile, or load from disk, everything here."""
    tables = BlockTables(2, 2, BLOCK)
    tree = DraftTree(np.zeros(1, np.int32), np.full(1, -1, np.int32), np.ones(1, np.float32), np.zeros(1, np.uint8))
    spans = []
    for slot, temperature in enumerate((0.0, 1.0)):
        tables.reserve(slot, 2)
        params = SamplingParams(temperature=temperature)
        sampler = Sampler(params, index=0, seed=0, prompt=np.zeros(1, np.int32), vocab_size=8, stop_ids=frozenset())
        spans.append(Span(slot, np.zeros(1, np.int32), 0, tree, sampler=sampler, n_prompt=1))
    batch = pack(spans, tables)
    logits = np.zeros((len(batch.logits_rows), 8), np.float32)
    match_batch(batch, rank_rows(logits)[0], logits)
    list(match_draft(tree, lambda row: row))

"""What speaks for each token that could come next. Knows tables and external trees; no weights, no probabilities, no costs.

At a node of a draft tree every *group* of evidence judges every candidate token by a small number, its state (0: it is silent):

    orders   one group per context length: in which of the context's latest events the token followed
    COPY     whether it is the token at the place that the text is being copied from (`ngram.follow`), and how well copying goes
    REGIME   how well the text was predicted of late, and the candidate's rank
    AGE      how far back the longest match was last seen
    GAP      as the orders, for the context that skips the latest token
    others   one group per external drafter: its own probability

`gather` collects the candidates below one node and writes their states; the node's *set* says which weights judge them: by the longest
match, by whether the copied place agrees with it, and by how well the text was predicted of late.

Adding a source that works like a table (shared answers, recycled tokens): a group before EXTERNAL, and the lines in `gather` that add its
candidates and write their states; mixing, learning and growth stay as they are, `benchmarks.learn_mix` fits its weights. A source that
proposes whole trees (a suffix datastore) needs none of that: it is a `Drafter` and comes in as external evidence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from .ngram import GAP_REACH, LADDER, LENGTH, REACH, START, look_up, look_up_gap

MAX_DRAFTERS = 4
ORDERS = len(LADDER)
COPY = ORDERS  # the group of the copied place
REGIME = COPY + 1  # how well the text was predicted of late
AGE = REGIME + 1  # how far back the longest match was last seen
GAP = AGE + 1
EXTERNAL = GAP + 1  # the first external drafter's group
GROUPS = EXTERNAL + MAX_DRAFTERS
BIAS = GROUPS
STATES = (2 << REACH) + 2 * REACH + 8
MODES = 5
SETS = 3 * (ORDERS + 1) * MODES
MEMORY = 48  # outcomes that `hits` remembers
_FULL = 1 << MEMORY
WIDTH = 8
"""Candidates per node."""


class Nodes(NamedTuple):
    """Every slot's tree: row slot * R is the root, the R - 1 rows after it its nodes. Written by `grow`, read by `settle`."""

    token: np.ndarray  # [S * R] int32
    parent: np.ndarray  # [S * R] int32, row number of the parent within the slot; 0 is the root
    depth: np.ndarray  # [S * R] int32
    prob: np.ndarray  # [S * R] float64, of the whole path
    source: np.ndarray  # [S * R] uint8
    place: np.ndarray  # [S * R, 3] int64, what `follow` knows at this node
    hits: np.ndarray  # [S * R] int64, a bit per latest token, newest lowest: it was the most likely candidate
    top: np.ndarray  # [S * R] int32, the most likely candidate
    outside: np.ndarray  # [S * R, MAX_DRAFTERS] int32, the same path in each external tree: -1 its root, -2 it is not there
    set: np.ndarray  # [S * R] int32, weight set
    n: np.ndarray  # [S * R] int32, candidates below this node; -1: never looked
    scale: np.ndarray  # [S * R] float64, factor by which siblings sum to at most 1
    cand_token: np.ndarray  # [S * R * WIDTH] int32
    cand_prob: np.ndarray  # [S * R * WIDTH] float64, as mixed, not scaled
    cand_state: np.ndarray  # [S * R * WIDTH, GROUPS] int16, 0: the group is silent


class Outside(NamedTuple):
    """External candidate trees, sequence by sequence and drafter by drafter."""

    start: np.ndarray  # [B * D + 1] int64: tree (b, d) is start[b * D + d] .. start[b * D + d + 1]
    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32
    probs: np.ndarray  # [N] float32


class Work(NamedTuple):
    """Scratch of one look at a node, so that nothing is allocated there."""

    recent: np.ndarray  # [LADDER[-1]] int32, newest first
    heads: np.ndarray  # [ORDERS + 1] int64
    totals: np.ndarray  # [ORDERS + 1] int64
    runs: np.ndarray  # [ORDERS + 1] int64
    visits: np.ndarray  # [ORDERS + 1] int64
    seen: np.ndarray  # [(ORDERS + 1) * WIDTH] int64
    cond: np.ndarray  # [MAX_DRAFTERS, WIDTH] float64


def new_work() -> Work:
    return Work(
        np.zeros(LADDER[-1], np.int32),
        np.zeros(ORDERS + 1, np.int64),
        np.zeros(ORDERS + 1, np.int64),
        np.zeros(ORDERS + 1, np.int64),
        np.zeros(ORDERS + 1, np.int64),
        np.zeros((ORDERS + 1) * WIDTH, np.int64),
        np.zeros((MAX_DRAFTERS, WIDTH)),
    )


def _table(bounds: tuple[int, ...], n: int) -> np.ndarray:
    return np.searchsorted(np.array(bounds), np.arange(n), side="right").astype(np.int64)


_MATCHED = _table((1, 2, 3, 4, 6, 9, 16, 32, 64), 65)  # 10 levels
_DEPARTED = _table((1, 2, 3, 5), 17)  # 5 levels
_HIT_RATE = _table((1, 4, 7, 10, 13, 16), 17)  # 7 levels


@njit(cache=True, nogil=True, inline="always")
def _bits(x):
    """Set bits of a number below 2**62."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    return (x + (x >> 32)) & 0x7F


@njit(cache=True, nogil=True, inline="always")
def hit_into(hits, right):
    """Shift one outcome in. A leading one marks how many are known; `hits` starts at 1 and keeps MEMORY outcomes."""
    hits = (hits << 1) | right
    return hits if hits < 2 * _FULL else (hits & (_FULL - 1)) | _FULL


@njit(cache=True, nogil=True, inline="always")
def _known(hits):
    """How many outcomes are known: the place of the leading one."""
    n = 0
    for step in (32, 16, 8, 4, 2, 1):
        if hits >> (n + step):
            n += step
    return n


@njit(cache=True, nogil=True, inline="always")
def _mode(hits):
    """0: too early to say, 1 .. 4: few to nearly all of the latest tokens were predicted."""
    if hits < 256:
        return 0
    right, known = _bits(hits) - 1, _known(hits)
    return 1 + (8 * right > 3 * known) + (8 * right > 5 * known) + (20 * right > 17 * known)


@njit(cache=True, nogil=True, inline="always")
def _regime(hits):
    """0 .. 7, from the latest 16 outcomes; 0: none yet."""
    if hits < 2:
        return 0
    if hits >= 0x10000:
        return 1 + _HIT_RATE[_bits(hits & 0xFFFF)]
    return 1 + _HIT_RATE[16 * (_bits(hits) - 1) // _known(hits)]


@njit(cache=True, nogil=True, inline="always")
def _history(seen, visits, run):
    """State of a candidate in one context: in which of the latest events it followed (a bit each, newest lowest), behind a leading one."""
    if seen == 0:
        return (2 << REACH) + 2 * visits + (run >= visits)
    if run >= REACH and seen & 1:
        return (2 << REACH) + 2 * REACH + 2 + (run >= 8) + (run >= 16) + (run >= 32)
    return (1 << visits) | seen


@njit(cache=True, nogil=True, inline="always")
def _candidate(nodes, q, n, token):
    """Index of the token among the n candidates from row q on; n if it is not there. The caller adds it where there is room."""
    j = 0
    while j < n and nodes.cand_token[q + j] != token:
        j += 1
    return j


@njit(cache=True, nogil=True, inline="always")
def _recent(state, seq, nodes, r, first, recent):
    """The text before the children of node r, newest first -> how much of it there is."""
    tokens, mask, n, node = seq.tokens, len(seq.tokens) - 1, 0, r - first
    longest = max(seq.contexts[len(seq.contexts) - 1], GAP_REACH) if len(seq.contexts) else 0
    while node and n < longest:
        recent[n] = nodes.token[first + node]
        node = nodes.parent[first + node]
        n += 1
    last = state[LENGTH] - 1 + n
    for n in range(n, min(longest, last + 1)):  # noqa: B020
        recent[n] = tokens[(last - n) & mask]
    return min(longest, last + 1)


@njit(cache=True, nogil=True, inline="always")
def _jump(state, seq, nodes, r, m, work):
    """Where node r copies from: on along the place being followed, or, if a longer context matches, its occurrence nearest ahead."""
    at, matched, mask = nodes.place[r, 0], nodes.place[r, 1], len(seq.tokens) - 1
    if m and seq.contexts[m - 1] > matched:
        p, best = work.heads[m - 1], np.int64(1) << 60
        jump = p
        for _ in range(min(work.totals[m - 1], REACH) if at >= 0 else 0):
            away = p - at if p >= at else 4 * (at - p)
            if away < best:
                jump, best = p, away
            p = np.int64(seq.links[(p & mask) * (len(seq.contexts) + 1) + m - 1])
        if at < 0:
            nodes.place[r, 2] = 0xF
        at = jump
        nodes.place[r, 0], nodes.place[r, 1] = at, seq.contexts[m - 1]
    return np.int64(seq.tokens[at & mask]) if state[START] <= at < state[LENGTH] else np.int64(-1)


@njit(cache=True, nogil=True, inline="always")
def _outsiders(nodes, r, n, outside, tree, n_drafters, work):
    """Add the external trees' children of node r to its n candidates -> the new n. Fills work.cond, -1 where a drafter is silent."""
    q = r * WIDTH
    for d in range(n_drafters):
        for j in range(WIDTH):
            work.cond[d, j] = -1.0
        here = nodes.outside[r, d]
        if here == -2:
            continue
        a = outside.start[tree + d]
        above = outside.probs[a + here] if here >= 0 else 1.0
        for i in range(a + here + 1, outside.start[tree + d + 1]):
            if outside.parents[i] == here:
                j = _candidate(nodes, q, n, outside.tokens[i])
                if j < WIDTH:
                    nodes.cand_token[q + j] = outside.tokens[i]
                    n = max(n, j + 1)
                    work.cond[d, j] = min(outside.probs[i] / max(above, 1e-9), 1.0)
    return n


@njit(cache=True, nogil=True, inline="always")
def gather(state, seq, nodes, r, first, outside, tree, n_drafters, work):
    """Collect candidates below node r and every group's judgement of them. `first` is the root's row, `tree` the first external tree."""
    tokens, mask, K, q = seq.tokens, len(seq.tokens) - 1, len(seq.contexts) + 1, r * WIDTH
    heads, totals, runs, visits, seen = work.heads, work.totals, work.runs, work.visits, work.seen
    n_recent = _recent(state, seq, nodes, r, first, work.recent)
    m = look_up(state, seq, work.recent, n_recent, heads, totals, runs)
    gap = look_up_gap(state, seq, work.recent, n_recent, heads, totals, runs, K - 1)
    copied = _jump(state, seq, nodes, r, m, work)
    n = 0
    if copied >= 0:
        nodes.cand_token[q] = copied
        n = 1
    if n_drafters:
        n = _outsiders(nodes, r, n, outside, tree, n_drafters, work)
    for k in range(m - 1, -1 - gap, -1):
        if k < 0:
            k = K - 1
        elif k < m - 1 and totals[k] == totals[k + 1]:  # the same events as the longer context's
            visits[k] = visits[k + 1]
            for j in range(WIDTH):
                seen[k * WIDTH + j] = seen[k * WIDTH + WIDTH + j]
            continue
        for j in range(WIDTH):
            seen[k * WIDTH + j] = 0
        v, p = min(totals[k], REACH), heads[k]
        visits[k] = v
        alike = runs[k] >= v
        for i in range(1 if alike else v):
            token = tokens[p & mask]
            j = _candidate(nodes, q, n, token)
            if j < WIDTH:
                if j == n:
                    nodes.cand_token[q + j] = token
                    n += 1
                seen[k * WIDTH + j] |= (1 << v) - 1 if alike else 1 << i
            p = np.int64(seq.links[(p & mask) * K + k])
    nodes.n[r] = n

    hits = nodes.hits[r]
    newest, age, relation = np.int64(-1), 0, 0
    if m:
        newest = np.int64(tokens[heads[m - 1] & mask])
        away = (state[LENGTH] - heads[m - 1]) >> 4
        while age < 7 and away:
            away >>= 1
            age += 1
        age = 1 + 2 * (8 * min(m - 1, 6) + age)
    place = 0
    if copied >= 0:
        place = 1 + 2 * (5 * _MATCHED[min(nodes.place[r, 1], 64)] + _DEPARTED[_bits(nodes.place[r, 2])])
        relation = 2 if m and newest != copied else 1
    regime = 1 + 16 * _regime(hits) + 4 * (hits & 3)
    nodes.set[r] = (3 * m + relation) * MODES + _mode(hits)
    for j in range(n):
        token, c = nodes.cand_token[q + j], q + j
        for k in range(m):
            nodes.cand_state[c, k] = _history(seen[k * WIDTH + j], visits[k], runs[k])
        for k in range(m, ORDERS):
            nodes.cand_state[c, k] = 0
        nodes.cand_state[c, COPY] = place + (token == copied) if place else 0
        nodes.cand_state[c, REGIME] = regime + min(j, 3)
        nodes.cand_state[c, AGE] = age + (token == newest) if age else 0
        nodes.cand_state[c, GAP] = _history(seen[(K - 1) * WIDTH + j], visits[K - 1], runs[K - 1]) if gap else 0
        for d in range(n_drafters):
            p = work.cond[d, j]
            nodes.cand_state[c, EXTERNAL + d] = 0 if nodes.outside[r, d] == -2 else 1 if p < 0.0 else 2 + int(min(p, 0.999) * 20.0)


@njit(cache=True, nogil=True, inline="always")
def proposes(state):
    return state < 2 << REACH or state >= (2 << REACH) + 2 * REACH + 2

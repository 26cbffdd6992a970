"""One draft tree per sequence from all evidence, grown over the whole batch at once. Knows tables, weights and costs, no Python objects.

At a node every *group* of evidence judges every candidate token: one group per table order, one for the place that the text is being
copied from (`ngram.follow`), one per external drafter. A group's judgement is a small state (how often the token followed, how often
others did, whether it was the latest), whose learned log-odds is the group's input to a logistic regression; there is one weight set
per longest match (the mixing of context-mixing compressors: Mahoney, "Adaptive weighing of context models", 2005). The mixed
probability is corrected by a learned curve per weight set (their adaptive probability map). All of it keeps learning online, from
every node that the model has judged, starting from shipped weights.

The tree grows best-first by path probability with one heap for the batch, until `budget` says that no later node can pay.

Adding a source (shared answers, a suffix datastore, recycled tokens): give it a column in `GROUPS`, a state table in `Weights.states`,
and a few lines in `_gather` that add its candidates and write the state of every candidate; mixing, learning, growth stay as they are.
A source that proposes whole trees needs none of that: it is a `Drafter`, and comes in as external evidence.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from .budget import lower_hull, pass_costs, worth
from .ngram import DRAFTED, FOLLOW, HITS, LADDER, LENGTH, MATCHED, MISSES, REACH, START, fits, follow, look_up, look_up_gap, push, view

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
CURVE = 25  # points of the correcting curve, log-odds -6 .. 6
WIDTH = 8
"""Candidates per node."""
FLOOR = 0.002
"""Path probability below which no node is worth looking at, whatever a row costs."""


class Weights(NamedTuple):
    """All that is learned. Shared by every sequence of a proposer; no token is in it."""

    states: np.ndarray  # [GROUPS, STATES] float32, log-odds that a candidate in this state is right
    mix: np.ndarray  # [SETS, GROUPS + 1] float32, factors of the groups' log-odds, then the bias
    curve: np.ndarray  # [SETS, CURVE] float32, corrected log-odds at log-odds -6, -5.5, .. 6


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
    cand_token: np.ndarray  # [S * R, WIDTH] int32
    cand_prob: np.ndarray  # [S * R, WIDTH] float64, mixed, before correction
    cand_final: np.ndarray  # [S * R, WIDTH] float64, corrected; siblings sum to at most 1
    cand_state: np.ndarray  # [S * R, WIDTH, GROUPS] int16, -1: the group is silent


class Outside(NamedTuple):
    """External candidate trees, sequence by sequence and drafter by drafter."""

    start: np.ndarray  # [B * D + 1] int64: tree (b, d) is start[b * D + d] .. start[b * D + d + 1]
    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32
    probs: np.ndarray  # [N] float32


class Guard(NamedTuple):
    """Tokens that end a branch. Per slot sorted: 2 * token, plus 1 if it is banned rather than a stop."""

    n: np.ndarray  # [S] int64
    codes: np.ndarray  # [S, G] int64


class Work(NamedTuple):
    """Scratch of one look at a node, so that nothing is allocated there."""

    recent: np.ndarray  # [LADDER[-1]] int32, newest first
    heads: np.ndarray  # [ORDERS] int64
    totals: np.ndarray  # [ORDERS] int64
    runs: np.ndarray  # [ORDERS] int64
    visits: np.ndarray  # [ORDERS] int64
    counts: np.ndarray  # [ORDERS + 1, WIDTH] int64
    cond: np.ndarray  # [MAX_DRAFTERS, WIDTH] float64


@njit(cache=True, nogil=True)
def _new_work():
    return Work(
        np.zeros(LADDER[-1], np.int32),
        np.zeros(ORDERS + 1, np.int64),
        np.zeros(ORDERS + 1, np.int64),
        np.zeros(ORDERS + 1, np.int64),
        np.zeros(ORDERS + 1, np.int64),
        np.zeros((ORDERS + 1, WIDTH), np.int64),
        np.zeros((MAX_DRAFTERS, WIDTH)),
    )


def _table(bounds: tuple[int, ...], n: int) -> np.ndarray:
    return np.searchsorted(np.array(bounds), np.arange(n), side="right").astype(np.int64)


_MATCHED = _table((1, 2, 3, 4, 6, 9, 16, 32, 64), 65)  # 10 levels
_DEPARTED = _table((1, 2, 3, 5), 17)  # 5 levels
_HIT_RATE = _table((1, 4, 7, 10, 13, 16), 17)  # 7 levels


@njit(cache=True, nogil=True, inline="always")
def _sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


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
def _hit(hits, right):
    """Shift one outcome in. A leading one marks how many are known; `hits` starts at 1 and keeps MEMORY outcomes."""
    hits = (hits << 1) | right
    return hits if hits < 2 * _FULL else (hits & (_FULL - 1)) | _FULL


@njit(cache=True, nogil=True, inline="always")
def _mode(hits):
    """0: too early to say, 1 .. 4: few to nearly all of the latest tokens were predicted."""
    if hits < 256:
        return 0
    right, known = _bits(hits) - 1, MEMORY
    while hits < _FULL:
        hits <<= 1
        known -= 1
    return 1 + (8 * right > 3 * known) + (8 * right > 5 * known) + (20 * right > 17 * known)


@njit(cache=True, nogil=True, inline="always")
def _regime(hits):
    """0 .. 7, from the latest 16 outcomes; 0: none yet."""
    if hits < 2:
        return 0
    if hits >= 0x10000:
        return 1 + _HIT_RATE[_bits(hits & 0xFFFF)]
    known = 0
    while hits >> known > 1:
        known += 1
    return 1 + _HIT_RATE[16 * (_bits(hits) - 1) // known]


@njit(cache=True, nogil=True)
def _guarded(guard, slot, token):
    """0: free, 1: a stop, 2: banned."""
    lo, hi = 0, guard.n[slot]
    while lo < hi:
        mid = (lo + hi) >> 1
        if guard.codes[slot, mid] < 2 * token:
            lo = mid + 1
        else:
            hi = mid
    if lo == guard.n[slot] or guard.codes[slot, lo] > 2 * token + 1:
        return 0
    return 1 + (guard.codes[slot, lo] & 1)


@njit(cache=True, nogil=True, inline="always")
def _candidate(nodes, r, token):
    """Index of the token among the candidates of node r, added if there is room; -1 if not."""
    for j in range(nodes.n[r]):
        if nodes.cand_token[r, j] == token:
            return j
    j = nodes.n[r]
    if j == WIDTH:
        return -1
    nodes.cand_token[r, j] = token
    nodes.n[r] = j + 1
    return j


@njit(cache=True, nogil=True, inline="always")
def _history(seen, visits, run):
    """State of a candidate in one context: in which of the latest events it followed (a bit each, newest lowest), behind a leading one."""
    if seen == 0:
        return (2 << REACH) + 2 * visits + (run >= visits)
    if run >= REACH and seen & 1:
        return (2 << REACH) + 2 * REACH + 2 + (run >= 8) + (run >= 16) + (run >= 32)
    return (1 << visits) | seen


@njit(cache=True, nogil=True)
def _gather(state, seq, nodes, r, first, outside, tree, n_drafters, work):
    """Collect candidates below node r and every group's judgement of them. `first` is the root's row, `tree` the first external tree."""
    tokens, mask, length = seq.tokens, len(seq.tokens) - 1, state[LENGTH]
    K, n_recent, node = len(seq.contexts) + 1, 0, r - first
    longest = seq.contexts[K - 2] if K > 1 else 0
    while node and n_recent < longest:
        work.recent[n_recent] = nodes.token[first + node]
        node = nodes.parent[first + node]
        n_recent += 1
    for i in range(min(longest - n_recent, length)):
        work.recent[n_recent] = tokens[(length - 1 - i) & mask]
        n_recent += 1
    heads, totals, runs, visits, counts = work.heads, work.totals, work.runs, work.visits, work.counts
    m = look_up(state, seq, work.recent, n_recent, heads, totals, runs)

    at, matched, misses = nodes.place[r, 0], nodes.place[r, 1], nodes.place[r, 2]
    if m and seq.contexts[m - 1] > matched:  # a longer match than the one being followed: go to its occurrence nearest ahead
        p, best = heads[m - 1], np.int64(1) << 60
        jump = p
        for _ in range(min(totals[m - 1], REACH) if at >= 0 else 0):
            away = p - at if p >= at else 4 * (at - p)
            if away < best:
                jump, best = p, away
            p = np.int64(seq.links[(p & mask) * K + m - 1])
        if at < 0:
            misses = 0xF
        at, matched = jump, np.int64(seq.contexts[m - 1])
        nodes.place[r, 0], nodes.place[r, 1], nodes.place[r, 2] = at, matched, misses
    copied = np.int64(tokens[at & mask]) if 0 <= at < length and at >= state[START] else -1

    nodes.n[r] = 0
    counts[:m] = 0
    relation = 0
    if copied >= 0:
        _candidate(nodes, r, copied)
        relation = 2 if m and tokens[heads[m - 1] & mask] != copied else 1
    for d in range(n_drafters):
        work.cond[d] = -1.0
        here = nodes.outside[r, d]
        if here > -2:
            a, b = outside.start[tree + d], outside.start[tree + d + 1]
            above = outside.probs[a + here] if here >= 0 else 1.0
            for i in range(a + here + 1, b):
                if outside.parents[i] == here:
                    j = _candidate(nodes, r, outside.tokens[i])
                    if j >= 0:
                        work.cond[d, j] = min(outside.probs[i] / max(above, 1e-9), 1.0)
    gap = look_up_gap(state, seq, work.recent, n_recent, heads, totals, runs, K - 1)
    counts[K - 1] = 0
    for k in range(m - 1, -1 - gap, -1):
        if k < 0:
            k = K - 1
        elif k < m - 1 and totals[k] == totals[k + 1]:
            counts[k] = counts[k + 1]
            visits[k] = visits[k + 1]
            continue
        visits[k] = min(totals[k], REACH)
        p = heads[k]
        if runs[k] >= visits[k]:
            j = _candidate(nodes, r, tokens[p & mask])
            if j >= 0:
                counts[k, j] = (1 << visits[k]) - 1
            continue
        for v in range(visits[k]):
            j = _candidate(nodes, r, tokens[p & mask])
            if j >= 0:
                counts[k, j] |= 1 << v
            p = np.int64(seq.links[(p & mask) * K + k])

    nodes.set[r] = (3 * m + relation) * MODES + _mode(nodes.hits[r])
    regime = 16 * _regime(nodes.hits[r]) + 4 * (nodes.hits[r] & 3)
    age, newest = 0, np.int64(-1)
    if m:
        newest = np.int64(tokens[heads[m - 1] & mask])
        away = length - heads[m - 1]
        while age < 7 and away > 16:
            away >>= 1
            age += 1
        age = 2 * (8 * min(m - 1, 6) + age)
    place = 2 * (5 * _MATCHED[min(matched, 64)] + _DEPARTED[_bits(misses)])
    for j in range(nodes.n[r]):
        x, state_of = nodes.cand_token[r, j], nodes.cand_state[r, j]
        for k in range(m):
            state_of[k] = _history(counts[k, j], visits[k], runs[k])
        for k in range(m, ORDERS):
            state_of[k] = -1
        state_of[COPY] = place + (x == copied) if copied >= 0 else -1
        state_of[GAP] = -1
        if gap:
            state_of[GAP] = _history(counts[K - 1, j], visits[K - 1], runs[K - 1])
        state_of[REGIME] = regime + min(j, 3)
        state_of[AGE] = age + (x == newest) if m else -1
        for d in range(n_drafters):
            if nodes.outside[r, d] == -2:
                state_of[EXTERNAL + d] = -1
            else:
                p = work.cond[d, j]
                state_of[EXTERNAL + d] = 0 if p < 0.0 else 1 + int(min(p, 0.999) * 20.0)
    return m


@njit(cache=True, nogil=True)
def _curve_at(p_logit):
    x = min(max(p_logit, -5.999), 5.999) * 2.0 + 12.0
    i = int(x)
    return i, x - i


@njit(cache=True, nogil=True)
def _look(state, seq, nodes, r, first, outside, tree, n_drafters, guard, slot, weights, work):
    """Fill the candidates of node r with probabilities."""
    _gather(state, seq, nodes, r, first, outside, tree, n_drafters, work)
    w, curve = weights.mix[nodes.set[r]], weights.curve[nodes.set[r]]
    total, best = 0.0, -1.0
    for j in range(nodes.n[r]):
        dot = np.float64(w[BIAS])
        for g in range(EXTERNAL + n_drafters):
            s = nodes.cand_state[r, j, g]
            if s >= 0:
                dot += w[g] * weights.states[g, s]
        dot = min(max(dot, -9.0), 9.0)
        nodes.cand_prob[r, j] = _sigmoid(dot)
        i, t = _curve_at(dot)
        p = _sigmoid(0.5 * (dot + curve[i] * (1.0 - t) + curve[i + 1] * t))
        nodes.cand_final[r, j] = p
        total += p
        if p > best:
            best = p
            nodes.top[r] = j
    if total > 1.0:
        for j in range(nodes.n[r]):
            nodes.cand_final[r, j] /= total


@njit(cache=True, nogil=True)
def _learn(nodes, r, truth, weights, rate, state_rate, curve_rate):
    """The model has judged node r: `truth` follows it."""
    w, curve = weights.mix[nodes.set[r]], weights.curve[nodes.set[r]]
    for j in range(nodes.n[r]):
        y = 1.0 if nodes.cand_token[r, j] == truth else 0.0
        p = nodes.cand_prob[r, j]
        i, t = _curve_at(math.log(p / (1.0 - p)))
        step = curve_rate * (y - _sigmoid(curve[i] * (1.0 - t) + curve[i + 1] * t))
        curve[i] += step * (1.0 - t)
        curve[i + 1] += step * t
        step, state_step = rate * (y - p), state_rate * (y - p)
        for g in range(GROUPS):
            s = nodes.cand_state[r, j, g]
            if s >= 0:
                z = weights.states[g, s]
                weights.states[g, s] += state_step * w[g]
                w[g] += step * z
        w[BIAS] += step


@njit(cache=True, nogil=True, inline="always")
def _sift_up(keys, refs, i):
    key, ref = keys[i], refs[i]
    while i:
        up = (i - 1) >> 1
        if keys[up] >= key:
            break
        keys[i], refs[i] = keys[up], refs[up]
        i = up
    keys[i], refs[i] = key, ref


@njit(cache=True, nogil=True, inline="always")
def _sift_down(keys, refs, n):
    key, ref, i = keys[0], refs[0], 0
    while True:
        j = 2 * i + 1
        if j >= n:
            break
        if j + 1 < n and keys[j + 1] > keys[j]:
            j += 1
        if keys[j] <= key:
            break
        keys[i], refs[i] = keys[j], refs[j]
        i = j
    keys[i], refs[i] = key, ref


@njit(cache=True, nogil=True, inline="always")
def _proposed(state):
    return state < 2 << REACH or state >= (2 << REACH) + 2 * REACH + 2


@njit(cache=True, nogil=True)
def _source(nodes, r, j, n_drafters, weights, first_source):
    """Who spoke up most for candidate j of node r, among those that proposed it."""
    w, best, who = weights.mix[nodes.set[r]], -1e9, 0
    for g in range(EXTERNAL + n_drafters):
        s = nodes.cand_state[r, j, g]
        proposed = _proposed(s) if g < COPY or g == GAP else (s & 1 if g == COPY else g >= EXTERNAL and s > 0)
        if s >= 0 and proposed and w[g] * weights.states[g, s] > best:
            best = w[g] * weights.states[g, s]
            who = 0 if g < EXTERNAL else g - EXTERNAL + first_source
    return who


@njit(cache=True, nogil=True)
def _offer(nodes, r, guard, slot, keys, refs, size):
    """Put the children of node r on the heap -> its new size."""
    for j in range(nodes.n[r]):
        p = nodes.prob[r] * nodes.cand_final[r, j]
        if p > FLOOR and (guard.n[slot] == 0 or _guarded(guard, slot, nodes.cand_token[r, j]) != 2):
            keys[size], refs[size] = p, r * WIDTH + j
            _sift_up(keys, refs, size)
            size += 1
    return size


@njit(cache=True, nogil=True)
def grow(
    states,
    contexts,
    slots,
    max_depth,
    cost_ms,
    base_rows,
    max_nodes,
    spec_length,
    nodes,
    weights,
    guard,
    outside,
    n_drafters,
    first_source,
    pace,
):
    """Draft for every slot -> (start [B+1] int64, tokens [N] int32, parents [N] int32, probs [N] float32, sources [N] uint8).

    Tree b is start[b] .. start[b + 1]; parents count from its own first node.
    """
    B, R = len(slots), len(nodes.token) // len(states)
    limit = max(min(max_nodes, B * (R - 1)), 0)
    costs = pass_costs(cost_ms, base_rows, limit)
    hull = lower_hull(costs)
    expected, taken, kept, reach = float(B), 0, 0, limit
    plain = expected / costs[0]
    own = pace[1] <= 0.0
    rate = plain if own else plain * pace[0] / pace[1]
    value = 0.0 if own else expected - rate * costs[0]
    keys, refs, size = np.empty((limit + B) * WIDTH), np.empty((limit + B) * WIDTH, np.int64), 0
    batch_of = np.empty(len(states), np.int64)
    drafted = np.zeros(B, np.int64)
    owner = np.empty(limit, np.int64)
    work = _new_work()
    for b in range(B):
        slot = slots[b]
        state, first = states[slot], slot * R
        batch_of[slot] = b
        state[DRAFTED] = -1
        if max_depth[b] < 1 or limit == 0:
            continue
        nodes.depth[first], nodes.prob[first] = 0, 1.0
        nodes.place[first, 0], nodes.place[first, 1], nodes.place[first, 2] = state[FOLLOW], state[MATCHED], state[MISSES]
        nodes.hits[first] = state[HITS]
        for d in range(n_drafters):
            tree = b * n_drafters + d
            nodes.outside[first, d] = -1 if outside.start[tree + 1] > outside.start[tree] else -2
        _look(state, view(state, contexts), nodes, first, first, outside, b * n_drafters, n_drafters, guard, slot, weights, work)
        state[DRAFTED] = 0
        size = _offer(nodes, first, guard, slot, keys, refs, size)
    while size and taken < limit:
        p, ref = keys[0], refs[0]
        ok, reach = worth(p, expected, taken, rate, value, hull, reach)
        if not ok:
            break
        size -= 1
        keys[0], refs[0] = keys[size], refs[size]
        _sift_down(keys, refs, size)
        above, j = ref // WIDTH, ref % WIDTH
        slot = above // R
        b, state, first = batch_of[slot], states[slot], slot * R
        if drafted[b] == R - 1:
            continue
        drafted[b] += 1
        owner[taken] = b
        taken += 1
        expected += p
        if expected - rate * costs[taken] > value:
            kept = taken
            if own:
                rate = expected / costs[taken]
            else:
                value = expected - rate * costs[taken]
        r, token = first + drafted[b], nodes.cand_token[above, j]
        nodes.token[r], nodes.parent[r], nodes.depth[r], nodes.prob[r] = token, above - first, nodes.depth[above] + 1, p
        nodes.source[r] = _source(nodes, above, j, n_drafters, weights, first_source) if n_drafters else 0
        nodes.n[r] = -1
        ok, reach = worth(p, expected, taken, rate, value, hull, reach)
        if not ok or nodes.depth[r] >= min(spec_length, max_depth[b]) or (guard.n[slot] and _guarded(guard, slot, token)):
            continue
        seq = view(state, contexts)
        at, matched, misses = follow(seq, state[LENGTH], nodes.place[above, 0], nodes.place[above, 1], nodes.place[above, 2], token)
        nodes.place[r, 0], nodes.place[r, 1], nodes.place[r, 2] = at, matched, misses
        nodes.hits[r] = _hit(nodes.hits[above], nodes.top[above] == j)
        for d in range(n_drafters):
            nodes.outside[r, d] = -2
            here, tree = nodes.outside[above, d], b * n_drafters + d
            for i in range(outside.start[tree] + here + 1 if here > -2 else outside.start[tree + 1], outside.start[tree + 1]):
                if outside.parents[i] == here and outside.tokens[i] == token:
                    nodes.outside[r, d] = i - outside.start[tree]
                    break
        _look(state, seq, nodes, r, first, outside, b * n_drafters, n_drafters, guard, slot, weights, work)
        size = _offer(nodes, r, guard, slot, keys, refs, size)

    pace[2], pace[3] = 1.0 / plain, costs[kept]
    start = np.zeros(B + 1, np.int64)
    for i in range(kept):
        start[owner[i] + 1] += 1
    for b in range(B):
        if states[slots[b], DRAFTED] >= 0:
            states[slots[b], DRAFTED] = start[b + 1]
        start[b + 1] += start[b]
    tokens, parents = np.empty(kept, np.int32), np.empty(kept, np.int32)
    probs, sources = np.empty(kept, np.float32), np.empty(kept, np.uint8)
    for b in range(B):
        first = slots[b] * R + 1
        for i in range(start[b + 1] - start[b]):
            o = start[b] + i
            tokens[o], parents[o] = nodes.token[first + i], nodes.parent[first + i] - 1
            probs[o], sources[o] = nodes.prob[first + i], nodes.source[first + i]
    return start, tokens, parents, probs, sources


@njit(cache=True, nogil=True)
def settle(states, contexts, slots, begin_at, new_start, new_tokens, path_start, path, history, nodes, weights, rates, pace):
    """Learn from the judged nodes and append the accepted tokens, from batch index `begin_at` on.

    -> the batch index whose buffer must grow first (call again from there), or B when all is done.
    """
    R = len(nodes.token) // len(states)
    keys = np.empty(len(contexts), np.uint64)
    for b in range(begin_at, len(slots)):
        slot = slots[b]
        state, first, n = states[slot], slot * R, new_start[b + 1] - new_start[b]
        if not fits(state, contexts, history, n):
            return b
        seq = view(state, contexts)
        depth = path_start[b + 1] - path_start[b]
        at, matched, misses = state[FOLLOW], state[MATCHED], state[MISSES]
        for i in range(n):
            token, r = new_tokens[new_start[b] + i], np.int64(-1)
            if state[DRAFTED] >= 0 and i == 0:
                r = first
            elif i and i <= depth and 0 <= path[path_start[b] + i - 1] < state[DRAFTED]:
                r = first + 1 + path[path_start[b] + i - 1]
            if r >= 0 and nodes.n[r] >= 0:
                _learn(nodes, r, token, weights, rates[0], rates[1], rates[2])
                hit = nodes.n[r] > 0 and nodes.cand_token[r, nodes.top[r]] == token
                state[HITS] = _hit(state[HITS], hit)
                at, matched, misses = nodes.place[r, 0], nodes.place[r, 1], nodes.place[r, 2]
            at, matched, misses = follow(seq, state[LENGTH], at, matched, misses, token)
            push(state, seq, token, history, keys)
        state[FOLLOW], state[MATCHED], state[MISSES] = at, matched, misses
        state[DRAFTED] = -1
    if pace[3] > 0.0 and rates[3] > 0.0:
        pace[0] = rates[3] * pace[0] + new_start[-1] * pace[2]
        pace[1] = rates[3] * pace[1] + pace[3]
        pace[3] = 0.0
    return len(slots)

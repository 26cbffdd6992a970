"""Extract the features of each token that could come next at a node of a draft tree. Knows no weights, probabilities or costs.

N-gram tables, recycled candidates and external trees enter; states of candidates leave. Every *group* of features describes every candidate
token by a small integer, its state (0: the group says nothing):

    orders        one group per context length: in which of the context's latest events the token followed
    COPY          whether it is the token at the position that the text is being copied from, and how well copying goes
    HIT_RATE      how well the sequence was predicted lately, and the candidate's rank
    AGE           how far back the longest match was last seen
    GAP           as the orders, for the context that skips the latest token
    OUTPUT_CACHE  as the orders and GAP, in the tables of the tenant's earlier outputs
    PREDICTED     as COPY, in the predicted output
    RECYCLED      rank and distance in the target's top-k after the latest token, when it last occurred; the same for the latest two tokens
    SYNTAX        the level of its probability in the syntax table (`syntax`)
    EXTERNAL      one group per external drafter: its own code for its confidence

`extract_features` collects the candidates below one node and writes their states. The node's *set* selects the mixing weights: by the
longest match, by which tables have it, by whether the copied position agrees with it, and by how well the sequence was predicted lately.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import KEPT
from ngramspec.speculative.ngram_table import (
    GAP_REACH,
    LADDER,
    LENGTH,
    OUTPUT_CACHE_ROW,
    REACH,
    START,
    look_up,
    look_up_gap,
    view_arrays,
    view_prediction,
)
from ngramspec.speculative.recycled import GAPS, pair_key, pair_row
from ngramspec.speculative.syntax import FOLLOWERS, LEVELS, find_context, find_margin, get_follower

DATASTORE = 0  # index of the external drafter whose weights are shipped
MAX_DRAFTERS = 4  # external ones
ORDERS = len(LADDER)
COPY = ORDERS  # the group of the copied position
HIT_RATE = COPY + 1  # how well the sequence was predicted lately
AGE = HIT_RATE + 1  # how far back the longest match was last seen
GAP = AGE + 1
OUTPUT_CACHE = GAP + 1  # the first of as many groups as ORDERS, and the gapped one
PREDICTED = OUTPUT_CACHE + ORDERS + 1
RECYCLED = PREDICTED + 1  # by the latest token
RECYCLED_PAIR = RECYCLED + 1  # by the latest two
SYNTAX = RECYCLED_PAIR + 1
EXTERNAL = SYNTAX + 1  # the first external drafter's group
GROUPS = EXTERNAL + MAX_DRAFTERS
BIAS = GROUPS
STATES = (2 << REACH) + 2 * REACH + 8
HIT_RATE_CLASSES = 5
SETS = 3 * (ORDERS + 1) * HIT_RATE_CLASSES * 9
MEMORY = 48  # outcomes that `hit_history` remembers
_FULL = 1 << MEMORY
MAX_CANDIDATES = 8  # per node; 12 measured no better (benchmarks/NOTES.md)
MAX_CODE = 255  # of an external drafter
# Last state of SYNTAX for a token that the table does not list in a context; those before it are levels of the likeliest token there.
SYNTAX_LISTED = 1 + len(LEVELS)


class Nodes(NamedTuple):
    """All slots' trees: row slot * R is the root, the R - 1 rows after it are its nodes. Written by `build_trees`, read by `update`."""

    token: np.ndarray  # [S * R] int32
    parent: np.ndarray  # [S * R] int32, row number of the parent within the slot; 0 is the root
    depth: np.ndarray  # [S * R] int32
    prob: np.ndarray  # [S * R] float64, of the whole path
    source: np.ndarray  # [S * R] uint8
    cursor: np.ndarray  # [S * R, 6] int64, the state of `follow_text` at this node, in the text being copied and in the predicted output
    hit_history: np.ndarray  # [S * R] int64, a bit per latest token, newest lowest: it was the most likely candidate
    top: np.ndarray  # [S * R] int32, the most likely candidate
    external: np.ndarray  # [S * R, MAX_DRAFTERS] int32, the same path in each external tree: -1 its root, -2 it is not there
    set: np.ndarray  # [S * R] int32, weight set
    n: np.ndarray  # [S * R] int32, candidates below this node; -1: not scored
    cand_token: np.ndarray  # [S * R * MAX_CANDIDATES] int32
    cand_raw: np.ndarray  # [S * R * MAX_CANDIDATES] float64, probability as mixed
    cand_prob: np.ndarray  # [S * R * MAX_CANDIDATES] float64, as corrected (`calibration`); siblings sum to at most 1
    cand_source: np.ndarray  # [S * R * MAX_CANDIDATES] uint8, the source with the largest contribution
    cand_state: np.ndarray  # [S * R * MAX_CANDIDATES, GROUPS] int16, 0: the group says nothing


class ExternalTrees(NamedTuple):
    """External candidate trees, sequence by sequence and drafter by drafter."""

    start: np.ndarray  # [B * D + 1] int64: tree (b, d) is start[b * D + d] .. start[b * D + d + 1]
    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32
    codes: np.ndarray  # [N] int16, the drafter's confidence, in its own terms: 0 .. MAX_CODE


class Scratch(NamedTuple):
    """Buffers for scoring one node, so that nothing is allocated there."""

    recent: np.ndarray  # [LADDER[-1]] int32, newest first
    heads: np.ndarray  # [2 * (ORDERS + 1)] int64: the sequence's own tables, then the output cache's
    totals: np.ndarray  # as heads
    runs: np.ndarray  # as heads
    visits: np.ndarray  # as heads
    seen: np.ndarray  # [2 * (ORDERS + 1) * MAX_CANDIDATES] int64
    codes: np.ndarray  # [MAX_DRAFTERS, MAX_CANDIDATES] int64
    recycled: np.ndarray  # [2, MAX_CANDIDATES] int64
    syntax: np.ndarray  # [MAX_CANDIDATES] int64


def new_nodes(n: int) -> Nodes:
    """Return room for n nodes in all slots together."""
    n_candidates = n * MAX_CANDIDATES
    return Nodes(
        token=np.zeros(n, np.int32),
        parent=np.zeros(n, np.int32),
        depth=np.zeros(n, np.int32),
        prob=np.zeros(n, np.float64),
        source=np.zeros(n, np.uint8),
        cursor=np.zeros((n, 6), np.int64),
        hit_history=np.zeros(n, np.int64),
        top=np.zeros(n, np.int32),
        external=np.full((n, MAX_DRAFTERS), -2, np.int32),
        set=np.zeros(n, np.int32),
        n=np.full(n, -1, np.int32),
        cand_token=np.zeros(n_candidates, np.int32),
        cand_raw=np.zeros(n_candidates),
        cand_prob=np.zeros(n_candidates),
        cand_source=np.zeros(n_candidates, np.uint8),
        cand_state=np.zeros((n_candidates, GROUPS), np.int16),
    )


def new_scratch() -> Scratch:
    """Return buffers for one caller."""
    n = 2 * (ORDERS + 1)
    heads, totals, runs, visits = (np.zeros(n, np.int64) for _ in range(4))
    recent, codes = np.zeros(LADDER[-1], np.int32), np.zeros((MAX_DRAFTERS, MAX_CANDIDATES), np.int64)
    seen, recycled, syntax = (
        np.zeros(n * MAX_CANDIDATES, np.int64),
        np.zeros((2, MAX_CANDIDATES), np.int64),
        np.zeros(MAX_CANDIDATES, np.int64),
    )
    return Scratch(recent, heads, totals, runs, visits, seen, codes, recycled, syntax)


def find_proposing_states() -> np.ndarray:
    """Return [GROUPS, STATES] bool: whether a group in this state has proposed the token, rather than judging another group's."""
    state = np.arange(STATES)
    proposes = np.zeros((GROUPS, STATES), np.bool_)
    counted = [*range(ORDERS), GAP, *range(OUTPUT_CACHE, PREDICTED)]
    proposes[counted] = (state < 2 << REACH) | (state >= (2 << REACH) + 2 * REACH + 2)
    proposes[[COPY, AGE, PREDICTED]] = state % 2 == 0  # positions: even states agree with them
    proposes[RECYCLED:] = state > 1
    proposes[SYNTAX] = state > SYNTAX_LISTED
    proposes[:, 0] = False
    return proposes


def _make_levels(bounds: tuple[int, ...], n: int) -> np.ndarray:
    """Return the level of each of 0 .. n - 1 between these bounds."""
    return np.searchsorted(np.array(bounds), np.arange(n), side="right").astype(np.int64)


_MATCHED = _make_levels((1, 2, 3, 4, 6, 9, 16, 32, 64), 65)  # 10 levels
_DEPARTED = _make_levels((1, 2, 3, 5), 17)  # 5 levels
_HIT_RATE_LEVELS = _make_levels((1, 4, 7, 10, 13, 16), 17)  # 7 levels


@njit(cache=True, nogil=True, forceinline=True)
def _count_bits(x):
    """Count the set bits of a number below 2**62."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    return (x + (x >> 32)) & 0x7F


@njit(cache=True, nogil=True, forceinline=True)
def push_hit(hit_history, right):
    """Shift one outcome in. A leading one marks how many are known; `hit_history` starts at 1 and keeps MEMORY outcomes."""
    hit_history = (hit_history << 1) | right
    return hit_history if hit_history < 2 * _FULL else (hit_history & (_FULL - 1)) | _FULL


@njit(cache=True, nogil=True, forceinline=True)
def _count_known(hit_history):
    """Return how many outcomes are known: the index of the leading one."""
    n = 0
    for step in (32, 16, 8, 4, 2, 1):
        if hit_history >> (n + step):
            n += step
    return n


@njit(cache=True, nogil=True, forceinline=True)
def _hit_rate_class(hit_history):
    """Return 0 if too few outcomes are known; 1 .. 4: few to nearly all of the latest tokens were predicted."""
    if hit_history < 256:
        return 0
    right, known = _count_bits(hit_history) - 1, _count_known(hit_history)
    return 1 + (8 * right > 3 * known) + (8 * right > 5 * known) + (20 * right > 17 * known)


@njit(cache=True, nogil=True, forceinline=True)
def _hit_rate_level(hit_history):
    """Return a level of the hit rate, 1 .. 8, over the latest 16 outcomes; 0: none yet."""
    if hit_history < 2:
        return 0
    if hit_history >= 0x10000:
        return 1 + _HIT_RATE_LEVELS[_count_bits(hit_history & 0xFFFF)]
    return 1 + _HIT_RATE_LEVELS[16 * (_count_bits(hit_history) - 1) // _count_known(hit_history)]


@njit(cache=True, nogil=True, forceinline=True)
def _context_state(seen, visits, run):
    """Return a candidate's state in one context: a bit per latest event, newest lowest, set if it followed, after a leading one."""
    if seen == 0:
        return (2 << REACH) + 2 * visits + (run >= visits)
    if run >= REACH and seen & 1:
        return (2 << REACH) + 2 * REACH + 2 + (run >= 8) + (run >= 16) + (run >= 32)
    return (1 << visits) | seen


@njit(cache=True, nogil=True, forceinline=True)
def _find_candidate(nodes, q, n, token):
    """Return the index of the token among the n candidates from row q on, n if it is not there. The caller adds it if there is room."""
    j = 0
    while j < n and nodes.cand_token[q + j] != token:
        j += 1
    return j


@njit(cache=True, nogil=True, forceinline=True)
def _read_recent(state, seq, nodes, r, first, recent):
    """Write the tokens before the children of node r, newest first; return how many."""
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


@njit(cache=True, nogil=True, forceinline=True)
def _find_copied(state, seq, nodes, r, m, scratch):
    """Return the token that node r copies: at the position being followed, or, if a longer context matches, at its nearest occurrence."""
    at, matched, mask = nodes.cursor[r, 0], nodes.cursor[r, 1], len(seq.tokens) - 1
    if m and seq.contexts[m - 1] > matched:
        p, best = scratch.heads[m - 1], np.int64(1) << 60
        jump = p
        for _ in range(min(scratch.totals[m - 1], REACH) if at >= 0 else 0):
            away = p - at if p >= at else 4 * (at - p)
            if away < best:
                jump, best = p, away
            p = np.int64(seq.links[(p & mask) * (len(seq.contexts) + 1) + m - 1])
        if at < 0:
            nodes.cursor[r, 2] = 0xF
        at = jump
        nodes.cursor[r, 0], nodes.cursor[r, 1] = at, seq.contexts[m - 1]
    return np.int64(seq.tokens[at & mask]) if state[START] <= at < state[LENGTH] else np.int64(-1)


@njit(cache=True, nogil=True, forceinline=True)
def _add_external(nodes, r, n, external, tree, n_drafters, scratch):
    """Add the external trees' children of node r to its n candidates and return the new n. Fills scratch.codes (-1: not proposed)."""
    q = r * MAX_CANDIDATES
    for d in range(n_drafters):
        for j in range(MAX_CANDIDATES):
            scratch.codes[d, j] = -1
        here = nodes.external[r, d]
        if here == -2:
            continue
        a = external.start[tree + d]
        for i in range(a + here + 1, external.start[tree + d + 1]):
            if external.parents[i] == here:
                j = _find_candidate(nodes, q, n, external.tokens[i])
                if j < MAX_CANDIDATES:
                    nodes.cand_token[q + j] = external.tokens[i]
                    n = max(n, j + 1)
                    scratch.codes[d, j] = external.codes[i]
    return n


@njit(cache=True, nogil=True, forceinline=True)
def _add_recycled(nodes, q, n, tokens, gaps, states):
    """Add a row of recycled candidates; return the new n. states [MAX_CANDIDATES]: 1 for candidates that are not in it."""
    for j in range(MAX_CANDIDATES):
        states[j] = 1
    for rank in range(KEPT):
        if tokens[rank] < 0:
            break
        j = _find_candidate(nodes, q, n, tokens[rank])
        if j < MAX_CANDIDATES:
            nodes.cand_token[q + j] = tokens[rank]
            n = max(n, j + 1)
            states[j] = 2 + rank * (len(GAPS) + 1) + gaps[rank]
    return n


@njit(cache=True, nogil=True, forceinline=True)
def _add_syntax(nodes, q, n, table, context, margin, states):
    """Add the tokens that the syntax table lists in a context; return the new n. states [MAX_CANDIDATES]: of each candidate."""
    for j in range(MAX_CANDIDATES):
        states[j] = 1 + table.levels[context, 0]
    for rank in range(FOLLOWERS):
        token = get_follower(table, context, rank, margin)
        if token < 0:
            continue
        j = _find_candidate(nodes, q, n, token)
        if j < MAX_CANDIDATES:
            nodes.cand_token[q + j] = token
            n = max(n, j + 1)
            states[j] = SYNTAX_LISTED + 2 * table.levels[context, rank] - (rank == 0)
    return n


@njit(cache=True, nogil=True, forceinline=True)
def _count_events(seq, nodes, q, n, k, at, alike_longer, scratch):
    """Record in which of the latest events of one context each candidate followed; add its tokens as candidates; return the new n."""
    heads, totals, runs, visits, seen = scratch.heads, scratch.totals, scratch.runs, scratch.visits, scratch.seen
    if alike_longer and totals[at] == totals[at + 1]:  # the same events as the longer context
        visits[at] = visits[at + 1]
        for j in range(MAX_CANDIDATES):
            seen[at * MAX_CANDIDATES + j] = seen[at * MAX_CANDIDATES + MAX_CANDIDATES + j]
        return n
    for j in range(MAX_CANDIDATES):
        seen[at * MAX_CANDIDATES + j] = 0
    tokens, mask, K = seq.tokens, len(seq.tokens) - 1, len(seq.contexts) + 1
    v, p = min(totals[at], REACH), heads[at]
    visits[at] = v
    alike = runs[at] >= v
    for i in range(1 if alike else v):
        token = tokens[p & mask]
        if token >= 0:  # not the end of a cached output
            j = _find_candidate(nodes, q, n, token)
            if j < MAX_CANDIDATES:
                if j == n:
                    nodes.cand_token[q + j] = token
                    n += 1
                seen[at * MAX_CANDIDATES + j] |= (1 << v) - 1 if alike else 1 << i
        p = np.int64(seq.links[(p & mask) * K + k])
    return n


@njit(cache=True, nogil=True, forceinline=True)
def extract_features(arrays, state, r, first, external, tree, n_drafters):
    """Collect the candidates below node r of the sequence with this state, and every group's state of them.

    arrays: `tree_builder.DraftArrays`; first: the root's row; tree: the first of the sequence's `n_drafters` external trees.
    """
    nodes, recycled, scratch, prediction = arrays.nodes, arrays.recycled, arrays.scratch, view_prediction(state)
    cached_state = arrays.output_caches[state[OUTPUT_CACHE_ROW]]
    seq, cached = view_arrays(state, arrays.contexts), view_arrays(cached_state, arrays.contexts)
    tokens, mask, K, q = seq.tokens, len(seq.tokens) - 1, len(seq.contexts) + 1, r * MAX_CANDIDATES
    heads, totals, runs, visits, seen = scratch.heads, scratch.totals, scratch.runs, scratch.visits, scratch.seen
    n_recent = _read_recent(state, seq, nodes, r, first, scratch.recent)
    m, others = look_up(state, seq, cached_state, cached, scratch.recent, n_recent, heads, totals, runs)
    gap = look_up_gap(state, seq, scratch.recent, n_recent, heads, totals, runs, K - 1)
    copied = _find_copied(state, seq, nodes, r, m, scratch)
    n = 0
    if copied >= 0:
        nodes.cand_token[q] = copied
        n = 1
    expected = np.int64(-1)
    if 0 <= nodes.cursor[r, 3] < len(prediction):
        expected = np.int64(prediction[nodes.cursor[r, 3]])
        j = _find_candidate(nodes, q, n, expected)
        nodes.cand_token[q + j] = expected
        n = max(n, j + 1)
    if n_drafters:
        n = _add_external(nodes, r, n, external, tree, n_drafters, scratch)
    for k in range(max(m, others) - 1, -1, -1):
        if k < m:
            n = _count_events(seq, nodes, q, n, k, k, k < m - 1, scratch)
        if k < others:
            n = _count_events(cached, nodes, q, n, k, K + k, k < others - 1, scratch)
    if gap:
        n = _count_events(seq, nodes, q, n, K - 1, K - 1, np.bool_(False), scratch)
    follows = find_context(arrays.syntax, scratch.recent, n_recent)
    if follows >= 0:
        margin = find_margin(arrays.syntax, scratch.recent, n_recent)
        n = _add_syntax(nodes, q, n, arrays.syntax, follows, margin, scratch.syntax)
    one = pair = False
    if n_recent and 0 <= scratch.recent[0] < len(recycled.tokens):
        if n_recent > 1 and len(recycled.keys):
            key = pair_key(scratch.recent[1], scratch.recent[0])
            s = pair_row(key, len(recycled.keys))
            pair = recycled.keys[s] == key
            if pair:
                n = _add_recycled(nodes, q, n, recycled.pair_tokens[s], recycled.pair_gaps[s], scratch.recycled[1])
        one = recycled.tokens[scratch.recent[0], 0] >= 0
        if one:
            n = _add_recycled(nodes, q, n, recycled.tokens[scratch.recent[0]], recycled.gaps[scratch.recent[0]], scratch.recycled[0])
    nodes.n[r] = n

    hit_history = nodes.hit_history[r]
    newest, age, relation = np.int64(-1), 0, 0
    if m:
        newest = np.int64(tokens[heads[m - 1] & mask])
        away = (state[LENGTH] - heads[m - 1]) >> 4
        while age < 7 and away:
            away >>= 1
            age += 1
        age = 1 + 2 * (8 * min(m - 1, 6) + age)
    position = 0
    if copied >= 0:
        position = 1 + 2 * (5 * _MATCHED[min(nodes.cursor[r, 1], 64)] + _DEPARTED[_count_bits(nodes.cursor[r, 2])])
        relation = 2 if m and newest != copied else 1
    ahead = 0
    if expected >= 0:
        ahead = 1 + 2 * (5 * _MATCHED[min(nodes.cursor[r, 4], 64)] + _DEPARTED[_count_bits(nodes.cursor[r, 5])])
    hit_rate = 1 + 16 * _hit_rate_level(hit_history) + 4 * (hit_history & 3)
    whose = 0 if others == 0 or others < m else 1 if others == m else 2
    beside = (
        1 if ahead and (nodes.cursor[r, 4] or nodes.cursor[r, 3] == 0) else 2 if n_drafters and nodes.external[r, DATASTORE] > -2 else 0
    )
    nodes.set[r] = ((beside * 3 + whose) * (ORDERS + 1) * 3 + 3 * max(m, others) + relation) * HIT_RATE_CLASSES + _hit_rate_class(
        hit_history
    )
    for j in range(n):
        token, c = nodes.cand_token[q + j], q + j
        for k in range(ORDERS):
            nodes.cand_state[c, k] = _context_state(seen[k * MAX_CANDIDATES + j], visits[k], runs[k]) if k < m else 0
        for k in range(ORDERS):
            at = K + k
            nodes.cand_state[c, OUTPUT_CACHE + k] = _context_state(seen[at * MAX_CANDIDATES + j], visits[at], runs[at]) if k < others else 0
        nodes.cand_state[c, COPY] = position + (token == copied) if position else 0
        nodes.cand_state[c, HIT_RATE] = hit_rate + min(j, 3)
        nodes.cand_state[c, AGE] = age + (token == newest) if age else 0
        nodes.cand_state[c, GAP] = _context_state(seen[(K - 1) * MAX_CANDIDATES + j], visits[K - 1], runs[K - 1]) if gap else 0
        nodes.cand_state[c, PREDICTED] = ahead + (token == expected) if ahead else 0
        nodes.cand_state[c, RECYCLED] = scratch.recycled[0, j] if one else 0
        nodes.cand_state[c, RECYCLED_PAIR] = scratch.recycled[1, j] if pair else 0
        nodes.cand_state[c, SYNTAX] = scratch.syntax[j] if follows >= 0 else 0
        for d in range(n_drafters):
            nodes.cand_state[c, EXTERNAL + d] = 0 if nodes.external[r, d] == -2 else 2 + scratch.codes[d, j]

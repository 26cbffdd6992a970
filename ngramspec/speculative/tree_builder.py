"""Build one draft tree per sequence from all candidates, best first over the whole batch. Compiled; knows states, weights and costs.

The learned log-odds of each group's state (`features`) are the inputs of a logistic regression. It has one weight set per longest match and
per recent hit rate, as context-mixing compressors do (Mahoney, "Adaptive Weighing of Context Models for Lossless Data Compression", 2005).
Log-odds and weights start from the shipped ones and go on learning online from every node that the model has verified. `calibration`
corrects the result by the observed acceptance of the same source.

`build_trees` adds nodes in order of path probability, from one heap for the batch, until `marginal_cost` says that no later node can pay.
`update` takes the verified path: it learns, counts what the sources predicted, and appends the accepted tokens to the tables.

All state is arrays that the caller owns (`proposer`), grouped in NamedTuples; nothing is allocated per node.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types
from numba.experimental import structref

from ngramspec.datastore.code_cache import njit
from ngramspec.datastore.numba_intrinsics import unowned_views
from ngramspec.speculative.budget.marginal_cost import can_pay, compute_lower_hull, compute_pass_costs
from ngramspec.speculative.calibration import Calibration, count_node, get_odds_against, record_candidate
from ngramspec.speculative.features import (
    BIAS,
    EXTERNAL,
    MAX_CANDIDATES,
    Nodes,
    Scratch,
    extract_features,
    push_hit,
)
from ngramspec.speculative.ngram_table import (
    COPY_AT,
    COPY_MATCHED,
    COPY_MISSES,
    HIT_HISTORY,
    LENGTH,
    N_DRAFTED,
    N_SIMILAR,
    PREDICTION_AT,
    PREDICTION_LENGTH,
    PREDICTION_MATCHED,
    PREDICTION_MISSES,
    TEMPERATURE,
    find_resumption,
    follow_text,
    has_room_for,
    push_token,
    view_arrays,
    view_prediction,
)
from ngramspec.speculative.recycled import Recycled, record_batch_topk
from ngramspec.speculative.syntax import SyntaxTable

# In `SourceMap`: the group says nothing in this state, or only judges another group's candidate.
NO_PROPOSER = 255
# Tokens by which the position in a predicted output is found again.
RESYNC_TOKENS = 3
# Path probability below which no node is scored, whatever a row costs.
MIN_PATH_PROB = 0.002
# Positive log-odds are divided by 1 + TEMPERATURE_SPREAD * temperature. Measured with SmolLM2 on three sets of prompts at 0.8: of
# candidates predicted at 0.88, 0.80 were sampled (0.85 were the argmax); at 0.97, 0.92 (0.945).
TEMPERATURE_SPREAD = 0.31


class Weights(NamedTuple):
    """All learned numbers. Shared by every sequence of a proposer; no token is in them."""

    states: np.ndarray  # [GROUPS, STATES] float32, log-odds that a candidate in this state is right
    mix: np.ndarray  # [SETS, GROUPS + 1] float32, factors of the groups' log-odds, then the bias


class SourceMap(NamedTuple):
    """The source that each group's states are attributed to."""

    of_state: np.ndarray  # [GROUPS, STATES] uint8, the source that proposes a candidate in this state, or NO_PROPOSER
    own: int  # the source of the sequence's own text
    similar: int  # the source of similar files, which stand before it


class TokenBans(NamedTuple):
    """Tokens that end a branch, sorted per slot: 2 * token, plus 1 if it is banned rather than a stop."""

    n: np.ndarray  # [S] int64
    codes: np.ndarray  # [S, G] int64


class DraftArrays(NamedTuple):
    """All arrays of a proposer that stay the same from step to step."""

    states: np.ndarray  # [S, ..] int64, a row per slot: see `ngram_table`
    output_caches: np.ndarray  # the same for the tables of each tenant's earlier outputs
    contexts: np.ndarray  # [K] int32, the context lengths that the tables have
    nodes: Nodes
    weights: Weights
    bans: TokenBans
    recycled: Recycled
    calibration: Calibration
    source_map: SourceMap
    syntax: SyntaxTable
    rates: np.ndarray  # [2] float64, online learning rates of mix and states
    scratch: Scratch


@structref.register
class DraftStateType(types.StructRef):
    pass


class DraftState(structref.StructRefProxy):
    """The members of `DraftArrays`, passed to compiled code as one argument: numba would look up and unpack fifty separate ones at every
    call, which costs more than the work itself."""


structref.define_proxy(DraftState, DraftStateType, list(DraftArrays._fields))


@njit(cache=True, nogil=True)
def new_draft_state(*members):
    """Return a DraftState. One made by Python would be compiled anew in every process, for a second."""
    return DraftState(*members)


@njit(cache=True, nogil=True, forceinline=True)
def view_draft_state(d):
    """Return the `DraftArrays` of a DraftState without reference counts: valid while the caller holds the originals."""
    states, output_caches, contexts, rates = unowned_views((d.states, d.output_caches, d.contexts, d.rates))
    return DraftArrays(
        states, output_caches, contexts, unowned_views(d.nodes), unowned_views(d.weights), unowned_views(d.bans),
        unowned_views(d.recycled), unowned_views(d.calibration), unowned_views(d.source_map), unowned_views(d.syntax), rates,
        unowned_views(d.scratch),
    )  # fmt: skip


@njit(cache=True, nogil=True, forceinline=True)
def score_candidates(arrays, state, r, first, external, tree, n_drafters):
    """Write the probability of each candidate of node r, and the source that contributes most to it. Parameters: see `extract_features`."""
    nodes, weights, source_map = arrays.nodes, arrays.weights, arrays.source_map
    extract_features(arrays, state, r, first, external, tree, n_drafters)
    tokens = view_arrays(state, arrays.contexts).tokens
    q, n, w, at = r * MAX_CANDIDATES, nodes.n[r], nodes.set[r], nodes.cursor[r, 0]
    copied = tokens[at & (len(tokens) - 1)] if 0 <= at < state[N_SIMILAR] else np.int32(-1)
    kind, spread = min(state[TEMPERATURE], 1), 1.0 + TEMPERATURE_SPREAD * min(state[TEMPERATURE] / 1000, 1.5)
    total, best = 0.0, -1.0
    for c in range(q, q + n):
        dot, largest, who = np.float64(weights.mix[w, BIAS]), np.float32(-1e9), source_map.own
        for g in range(EXTERNAL + n_drafters):
            s = nodes.cand_state[c, g]
            term = weights.mix[w, g] * weights.states[g, s]
            dot += term
            if term > largest and source_map.of_state[g, s] != NO_PROPOSER:
                largest, who = term, np.int64(source_map.of_state[g, s])
        if who == source_map.own and copied == nodes.cand_token[c]:
            who = source_map.similar
        raw = 1.0 / (1.0 + math.exp(-min(max(dot, -9.0), 9.0) / (spread if dot > 0.0 else 1.0)))
        p = 1.0 / (1.0 + max(get_odds_against(arrays.calibration, kind, who, raw), 1e-4))
        nodes.cand_raw[c], nodes.cand_source[c] = raw, who
        nodes.cand_prob[c] = p
        total += p
        if p > best:
            best = p
            nodes.top[r] = c - q
    if total > 1.0:
        for c in range(q, q + n):
            nodes.cand_prob[c] /= total


@njit(cache=True, nogil=True, forceinline=True)
def _learn_from_node(nodes, r, truth, kind, n_drafters, weights, rates, calibration):
    """Learn that `truth` follows node r: one step down the gradient of the log loss, with rates of mix and states.

    kind: 0 greedy, 1 sampled.
    """
    w = nodes.set[r]
    for c in range(r * MAX_CANDIDATES, r * MAX_CANDIDATES + nodes.n[r]):
        made = 1.0 if nodes.cand_token[c] == truth else 0.0
        record_candidate(calibration, kind, nodes.cand_source[c], nodes.cand_raw[c], made)
        error = made - nodes.cand_raw[c]
        for g in range(EXTERNAL + n_drafters):
            s = nodes.cand_state[c, g]
            if s:
                z = weights.states[g, s]
                weights.states[g, s] += rates[1] * error * weights.mix[w, g]
                weights.mix[w, g] += rates[0] * error * z
        weights.mix[w, BIAS] += rates[0] * error


@njit(cache=True, nogil=True, forceinline=True)
def _sift_up(keys, refs, i):
    key, ref = keys[i], refs[i]
    while i:
        up = (i - 1) >> 1
        if keys[up] >= key:
            break
        keys[i], refs[i] = keys[up], refs[up]
        i = up
    keys[i], refs[i] = key, ref


@njit(cache=True, nogil=True, forceinline=True)
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


@njit(cache=True, nogil=True)
def _find_ban(bans, slot, token):
    """Return 0 if a token is free, 1 if it is a stop, 2 if it is banned."""
    lo, hi = 0, bans.n[slot]
    while lo < hi:
        mid = (lo + hi) >> 1
        if bans.codes[slot, mid] < 2 * token:
            lo = mid + 1
        else:
            hi = mid
    if lo == bans.n[slot] or bans.codes[slot, lo] > 2 * token + 1:
        return 0
    return 1 + (bans.codes[slot, lo] & 1)


@njit(cache=True, nogil=True, forceinline=True)
def _push_children(nodes, r, bans, slot, chains, keys, refs, size):
    """Push the children of node r onto the heap, for a chain only the most likely one; return the heap's new size."""
    first = size
    for j in range(nodes.n[r]):
        c = r * MAX_CANDIDATES + j
        p = nodes.prob[r] * nodes.cand_prob[c]
        if p > MIN_PATH_PROB and (bans.n[slot] == 0 or _find_ban(bans, slot, nodes.cand_token[c]) != 2):
            if not chains:
                keys[size], refs[size] = p, c
                _sift_up(keys, refs, size)
                size += 1
            elif size == first or p > keys[first]:
                keys[first], refs[first], size = p, c, first + 1
    if chains and size > first:
        _sift_up(keys, refs, first)
    return size


@njit(cache=True, nogil=True, forceinline=True)
def follow_copy(state, seq, at, matched, misses, token):
    """Call `follow_text` for the sequence's own text."""
    mask = len(seq.tokens) - 1
    return follow_text(seq.tokens, mask, max(state[LENGTH] - mask, 0), state[LENGTH], at, matched, misses, token)


@njit(cache=True, nogil=True, forceinline=True)
def follow_prediction(state, at, matched, misses, token):
    """Call `follow_text` for the predicted output."""
    if at < 0:
        return at, matched, misses
    prediction = view_prediction(state)
    return follow_text(prediction, np.int64(-1), np.int64(0), np.int64(len(prediction)), at, matched, misses, token)


@njit(cache=True, nogil=True)
def resync_prediction(state, seq, recent):
    """Find the position in the predicted output again if it was lost. recent [>= RESYNC_TOKENS] int32 is a buffer."""
    if state[PREDICTION_LENGTH] == 0 or state[PREDICTION_MATCHED] >= RESYNC_TOKENS or state[LENGTH] < RESYNC_TOKENS:
        return
    for i in range(RESYNC_TOKENS):
        recent[i] = seq.tokens[(state[LENGTH] - 1 - i) & (len(seq.tokens) - 1)]
    found = find_resumption(view_prediction(state), state[PREDICTION_AT], recent, RESYNC_TOKENS)
    if found >= 0:
        state[PREDICTION_AT], state[PREDICTION_MATCHED] = found, RESYNC_TOKENS


@njit(cache=True, nogil=True)
def follow_output(state, output):
    """Advance the position in the predicted output by these tokens [n] int32 of output."""
    for token in output:
        state[PREDICTION_AT], state[PREDICTION_MATCHED], state[PREDICTION_MISSES] = follow_prediction(
            state, state[PREDICTION_AT], state[PREDICTION_MATCHED], state[PREDICTION_MISSES], token
        )


@njit(cache=True, nogil=True, forceinline=True)
def _begin_tree(nodes, state, first, external, tree, n_drafters):
    """Write a tree's root to row `first` of the nodes."""
    nodes.depth[first], nodes.prob[first] = 0, 1.0
    nodes.cursor[first, 0], nodes.cursor[first, 1], nodes.cursor[first, 2] = state[COPY_AT], state[COPY_MATCHED], state[COPY_MISSES]
    nodes.cursor[first, 3], nodes.cursor[first, 4] = state[PREDICTION_AT], state[PREDICTION_MATCHED]
    nodes.cursor[first, 5] = state[PREDICTION_MISSES]
    nodes.hit_history[first] = state[HIT_HISTORY]
    for d in range(n_drafters):
        nodes.external[first, d] = -1 if external.start[tree + d + 1] > external.start[tree + d] else -2


@njit(cache=True, nogil=True, forceinline=True)
def _add_node(nodes, r, candidate, p, first, external, tree, n_drafters):
    """Write a candidate to row r as a node, not scored yet, with path probability p."""
    above, token = candidate // MAX_CANDIDATES, nodes.cand_token[candidate]
    nodes.token[r], nodes.parent[r], nodes.depth[r], nodes.prob[r] = token, above - first, nodes.depth[above] + 1, p
    nodes.source[r] = nodes.cand_source[candidate]
    for d in range(n_drafters):
        nodes.external[r, d] = -2
        here, start, end = nodes.external[above, d], external.start[tree + d], external.start[tree + d + 1]
        for i in range(start + here + 1 if here > -2 else end, end):
            if external.parents[i] == here and external.tokens[i] == token:
                nodes.external[r, d] = i - start
                break
    nodes.n[r] = -1


@njit(cache=True, nogil=True, forceinline=True)
def _follow_texts(nodes, state, seq, r, candidate):
    """Advance what node r goes by from its parent's: the positions in the copied text and the predicted output, and the hit history."""
    above, token, cursor = candidate // MAX_CANDIDATES, nodes.token[r], nodes.cursor
    cursor[r, 0], cursor[r, 1], cursor[r, 2] = follow_copy(state, seq, cursor[above, 0], cursor[above, 1], cursor[above, 2], token)
    cursor[r, 3], cursor[r, 4], cursor[r, 5] = follow_prediction(state, cursor[above, 3], cursor[above, 4], cursor[above, 5], token)
    nodes.hit_history[r] = push_hit(nodes.hit_history[above], nodes.top[above] == candidate % MAX_CANDIDATES)


@njit(cache=True, nogil=True)
def _collect_trees(nodes, states, slots, owner):
    """Return the trees as `build_trees` does. owner [N] int64: the batch index of each node, in the order in which they were added."""
    B, n = len(slots), len(owner)
    start = np.zeros(B + 1, np.int64)
    for b in owner:
        start[b + 1] += 1
    tokens, parents = np.empty(n, np.int32), np.empty(n, np.int32)
    probs, sources = np.empty(n, np.float32), np.empty(n, np.uint8)
    for b in range(B):
        if states[slots[b], N_DRAFTED] >= 0:
            states[slots[b], N_DRAFTED] = start[b + 1]
        start[b + 1] += start[b]
        r = slots[b] * (len(nodes.token) // len(states)) + 1
        for o in range(start[b], start[b + 1]):
            tokens[o], parents[o], probs[o], sources[o] = nodes.token[r], nodes.parent[r] - 1, nodes.prob[r], nodes.source[r]
            r += 1
    return start, tokens, parents, probs, sources


@njit(cache=True, nogil=True)
def build_trees(draft_state, slots, max_depth, cost_ms, base_rows, max_nodes, threshold, chains, external):
    """Draft for every slot: return start [B+1] int64, tokens [N] int32, parents [N] int32, probs [N] float32, sources [N] uint8.

    Tree b is start[b] .. start[b + 1]; parents count from its own first node. `threshold`: tokens per millisecond that a node must earn,
    0: the pass's own best rate. `chains`: no node has a sibling.
    """
    arrays, external = view_draft_state(draft_state), unowned_views(external)
    states, nodes, bans = arrays.states, arrays.nodes, arrays.bans
    B, R = len(slots), len(nodes.token) // len(states)
    D = (len(external.start) - 1) // max(B, 1)  # external trees per slot
    limit = max(min(max_nodes, B * (R - 1)), 0)
    costs = compute_pass_costs(cost_ms, base_rows, limit)
    hull = compute_lower_hull(np.arange(len(costs)), costs)
    expected, taken, kept, reach = float(B), np.int64(0), 0, limit  # numba compiles what a literal 0 is passed to once more
    rate = threshold if threshold > 0.0 else expected / costs[0]
    best = expected - rate * costs[0]
    keys, refs, size = np.empty((limit + B) * MAX_CANDIDATES), np.empty((limit + B) * MAX_CANDIDATES, np.int64), np.int64(0)
    batch_of = np.empty(len(states), np.int64)
    drafted = np.zeros(B, np.int64)
    owner = np.empty(limit, np.int64)
    for b in range(B):
        slot = np.int64(slots[b])
        state, first = states[slot], slot * R
        batch_of[slot] = b
        state[N_DRAFTED] = -1
        if max_depth[b] < 1 or limit == 0:
            continue
        _begin_tree(nodes, state, first, external, b * D, D)
        score_candidates(arrays, state, first, first, external, b * D, D)
        state[N_DRAFTED] = 0
        size = _push_children(nodes, first, bans, slot, chains, keys, refs, size)
    while size and taken < limit:
        p, ref = keys[0], refs[0]
        ok, reach = can_pay(p, expected, taken, rate, best, hull, reach)
        if not ok:
            break
        size -= 1
        keys[0], refs[0] = keys[size], refs[size]
        _sift_down(keys, refs, size)
        slot = ref // MAX_CANDIDATES // R
        b, state, first = batch_of[slot], states[slot], slot * R
        if drafted[b] == R - 1:
            continue
        drafted[b] += 1
        owner[taken] = b
        taken += 1
        expected += p
        if expected - rate * costs[taken] > best:
            kept = taken
            if threshold > 0.0:
                best = expected - rate * costs[taken]
            else:
                rate, best = expected / costs[taken], 0.0
        r = first + drafted[b]
        _add_node(nodes, r, ref, p, first, external, b * D, D)
        ok, reach = can_pay(p, expected, taken, rate, best, hull, reach)
        if not ok or nodes.depth[r] >= max_depth[b] or (bans.n[slot] and _find_ban(bans, slot, nodes.token[r])):
            continue
        _follow_texts(nodes, state, view_arrays(state, arrays.contexts), r, ref)
        score_candidates(arrays, state, r, first, external, b * D, D)
        size = _push_children(nodes, r, bans, slot, chains, keys, refs, size)
    return _collect_trees(nodes, states, slots, owner[:kept])


@njit(cache=True, nogil=True)
def find_full_table(states, slots, contexts, history, n):
    """Return the first b whose slot has no room for n more tokens in its tables, or B."""
    for b in range(len(slots)):
        if not has_room_for(states[slots[b]], contexts, history, n):
            return b
    return len(slots)


@njit(cache=True, nogil=True)
def update(draft_state, slots, begin_at, accepted, history, n_drafters, seen):
    """Learn from the verified nodes and append the accepted tokens, from batch index `begin_at` on; before the first, `record_batch_topk`.

    accepted: (new_start [B+1] int64, new tokens [N] int32, path_start [B+1] int64, path [M] int32); seen: the arguments of
    `record_batch_topk`. Return the batch index whose buffer must grow first (call again from there), or B when all is done.
    """
    arrays = view_draft_state(draft_state)
    states, contexts, nodes, calibration = arrays.states, arrays.contexts, arrays.nodes, arrays.calibration
    new_start, new_tokens, path_start, path = accepted
    R = len(nodes.token) // len(states)
    keys = np.empty(len(contexts) + 1, np.uint64)
    if begin_at == 0:
        record_batch_topk(arrays.recycled, *seen)
    for b in range(begin_at, len(slots)):
        slot = slots[b]
        state, first, n = states[slot], slot * R, new_start[b + 1] - new_start[b]
        if not has_room_for(state, contexts, history, n):
            return b
        seq = view_arrays(state, contexts)
        depth = path_start[b + 1] - path_start[b]
        at, matched, misses = state[COPY_AT], state[COPY_MATCHED], state[COPY_MISSES]
        ahead, agreed, strayed = state[PREDICTION_AT], state[PREDICTION_MATCHED], state[PREDICTION_MISSES]
        for r in range(first + 1, first + 1 + state[N_DRAFTED]):
            count_node(calibration, nodes.source[r], nodes.prob[r], 0.0)
        for i in range(path_start[b], path_start[b + 1]):
            if 0 <= path[i] < state[N_DRAFTED]:
                count_node(calibration, nodes.source[first + 1 + path[i]], nodes.prob[first + 1 + path[i]], 1.0)
        for i in range(n):
            token, r = new_tokens[new_start[b] + i], np.int64(-1)
            if state[N_DRAFTED] >= 0 and i == 0:
                r = first
            elif i and i <= depth and 0 <= path[path_start[b] + i - 1] < state[N_DRAFTED]:
                r = first + 1 + path[path_start[b] + i - 1]
            if r >= 0 and nodes.n[r] >= 0:
                _learn_from_node(nodes, r, token, min(state[TEMPERATURE], 1), n_drafters, arrays.weights, arrays.rates, calibration)
                hit = nodes.n[r] > 0 and nodes.cand_token[r * MAX_CANDIDATES + nodes.top[r]] == token
                state[HIT_HISTORY] = push_hit(state[HIT_HISTORY], hit)
                at, matched, misses = nodes.cursor[r, 0], nodes.cursor[r, 1], nodes.cursor[r, 2]
            at, matched, misses = follow_copy(state, seq, at, matched, misses, token)
            ahead, agreed, strayed = follow_prediction(state, ahead, agreed, strayed, token)
            push_token(state, seq, token, history, keys)
        state[COPY_AT], state[COPY_MATCHED], state[COPY_MISSES] = at, matched, misses
        state[PREDICTION_AT], state[PREDICTION_MATCHED], state[PREDICTION_MISSES] = ahead, agreed, strayed
        resync_prediction(state, seq, arrays.scratch.recent)
        state[N_DRAFTED] = -1
    return len(slots)

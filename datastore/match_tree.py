"""Merge the continuations of a text's matches into one tree, in compiled code.

Places and match lengths of a sequence's occurrences, which `lookup` has collected, enter; nodes leave, each after its parent. See there for
how a node's chance is estimated.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from . import lookup_arrays as col
from .code_cache import njit
from .format import PLACE_BITS
from .numba_intrinsics import cast_to_pointer, load_i64
from .search import N_TOKENS, TOKENS, read_token

TOKEN, PARENT, BEGIN, END, LEVEL, NEXT = range(col.N_CANDIDATE)  # columns of CANDIDATES


@njit(cache=True, nogil=True, error_model="numpy")
def build_tree(work, rows, slot, offset):
    """Merge the continuations of a slot's occurrences into a tree, likely nodes first -> number of nodes, written from `offset` on.

    No path is likelier than its beginning, so that candidates leave the queue in falling order: it is a row of buckets, a quarter of
    an octave of chance each, and a pointer that only moves on. Equal chances leave it by match length.
    """
    cap, depth, max_match, width, floor = work[col.OCCURRENCES], work[col.DEPTH], work[col.MAX_MATCH], work[col.NODES], work[col.FLOOR]
    places = carray(cast_to_pointer(work[col.PLACES] + 8 * cap * slot), cap, np.int64)
    matches = carray(cast_to_pointer(work[col.MATCHES] + 4 * cap * slot), cap, np.int32)
    order = carray(cast_to_pointer(work[col.ORDER]), (3, cap), np.int32)
    weights = carray(cast_to_pointer(work[col.WEIGHTS]), max_match + depth + 1, np.float64)
    n_candidates = cap * depth + 1
    candidates = carray(cast_to_pointer(work[col.CANDIDATES]), (n_candidates, col.N_CANDIDATE), np.int32)
    chances = carray(cast_to_pointer(work[col.CHANCES]), n_candidates, np.float64)
    queue = carray(cast_to_pointer(work[col.QUEUE]), col.N_BUCKETS, np.int32)
    tokens = carray(cast_to_pointer(work[col.OUT_TOKENS] + 4 * offset), width, np.int32)
    parents = carray(cast_to_pointer(work[col.OUT_PARENTS] + 4 * offset), width, np.int32)
    counts = carray(cast_to_pointer(work[col.OUT_COUNTS] + 4 * offset), width, np.int32)
    match = carray(cast_to_pointer(work[col.OUT_MATCH] + 2 * offset), width, np.int16)
    place = carray(cast_to_pointer(work[col.OUT_PLACE] + 8 * offset), width, np.int64)
    held = carray(cast_to_pointer(work[col.STATE] + 8 * col.N_STATE * slot), col.N_STATE, np.int64)[col.HELD]
    wide, ids = work[col.WIDE_IDS] != 0, work[col.IDS]
    texts = carray(cast_to_pointer(work[col.TEXTS]), (2, cap), np.int64)
    for i in range(held):
        order[0, i] = i
        row, p = places[i] >> PLACE_BITS, places[i] & ((np.int64(1) << PLACE_BITS) - 1)
        texts[0, i] = rows[row, TOKENS] + (p << 2 if wide else p << 1)
        texts[1, i] = rows[row, N_TOKENS] - p
    queue[:] = -1
    made = _add_children(work, slot, 0, 0, held, 0, -1, 1.0)
    for c in range(made - 1, -1, -1):
        bucket = _choose_bucket(work, c)
        candidates[c, NEXT] = queue[bucket]
        queue[bucket] = c
    n, bucket = 0, 0
    while n < width:
        while bucket < floor and queue[bucket] < 0:
            bucket += 1
        if bucket >= floor:
            break
        best = np.int64(queue[bucket])
        queue[bucket] = candidates[best, NEXT]
        begin, end, level = np.int64(candidates[best, BEGIN]), np.int64(candidates[best, END]), np.int64(candidates[best, LEVEL])
        o = order[0, begin]
        tokens[n] = candidates[best, TOKEN]
        parents[n] = candidates[best, PARENT]
        counts[n] = end - begin
        match[n] = min(np.int64(matches[o]), max_match)
        place[n] = places[o] + level
        n += 1
        level += 1
        if level == depth:
            continue
        more = 1
        token = read_token(texts[0, o], wide, level) if level < texts[1, o] else ids
        weight = weights[min(matches[o] + level, len(weights) - 1)]
        for i in range(begin + 1, end):
            o = order[0, i]
            if level >= texts[1, o] or read_token(texts[0, o], wide, level) != token:
                more = _add_children(work, slot, made, begin, end, level, n - 1, chances[best])
                break
            weight += weights[min(matches[o] + level, len(weights) - 1)]
        else:  # all go on alike: most of a tree
            if token >= ids:
                continue
            candidates[made, TOKEN], candidates[made, PARENT], candidates[made, LEVEL] = token, n - 1, level
            candidates[made, BEGIN], candidates[made, END] = begin, end
            chances[made] = chances[best] * weight / (weight + 1.0)
        for c in range(made + more - 1, made - 1, -1):
            b = max(_choose_bucket(work, c), bucket)
            candidates[c, NEXT] = queue[b]
            queue[b] = c
        made += more
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def _choose_bucket(work, c):
    """Return 0 for a chance of 1, then 4 buckets an octave: exponent and two bits of the mantissa, read from the number's bits."""
    return min(max((1023 << 2) - (load_i64(work[col.CHANCES] + 8 * c) >> 50), 0), col.N_BUCKETS - 1)


@njit(cache=True, nogil=True, error_model="numpy")
def _add_children(work, slot, made, begin, end, level, parent, chance):
    """Group the occurrences order[0, begin:end] by their token at `level`, longest match first in each group; one candidate a group."""
    cap, n_weights = work[col.OCCURRENCES], work[col.MAX_MATCH] + work[col.DEPTH] + 1
    wide, ids = work[col.WIDE_IDS] != 0, work[col.IDS]
    texts = carray(cast_to_pointer(work[col.TEXTS]), (2, cap), np.int64)
    matches = carray(cast_to_pointer(work[col.MATCHES] + 4 * cap * slot), cap, np.int32)
    order = carray(cast_to_pointer(work[col.ORDER]), (3, cap), np.int32)
    groups = carray(cast_to_pointer(work[col.GROUPS]), (2, col.N_GROUPS), np.int32)
    weights = carray(cast_to_pointer(work[col.WEIGHTS]), n_weights, np.float64)
    candidates = carray(cast_to_pointer(work[col.CANDIDATES]), (cap * work[col.DEPTH] + 1, col.N_CANDIDATE), np.int32)
    chances = carray(cast_to_pointer(work[col.CHANCES]), cap * work[col.DEPTH] + 1, np.float64)
    n = 0
    whole = 1.0
    for i in range(begin, end):
        o = order[0, i]
        weight = weights[min(matches[o] + level, n_weights - 1)]
        whole += weight
        order[1, i] = -1
        if level >= texts[1, o]:
            continue
        token = read_token(texts[0, o], wide, level)
        if token >= ids:  # the separator, or damage
            continue
        h = (token * 0x9E3779B1 >> 12) & (col.N_GROUPS - 1)
        while groups[0, h] >= 0 and groups[0, h] != token:
            h = (h + 1) & (col.N_GROUPS - 1)
        if groups[0, h] < 0:
            groups[0, h], groups[1, h] = token, n
            candidates[made + n, TOKEN], candidates[made + n, PARENT], candidates[made + n, LEVEL] = token, parent, level
            candidates[made + n, BEGIN], candidates[made + n, END] = h, 0
            chances[made + n] = 0.0
            n += 1
        g = groups[1, h]
        order[1, i] = g
        candidates[made + g, END] += 1
        chances[made + g] += weight
    at = begin
    scale = chance / whole
    for c in range(made, made + n):
        groups[0, candidates[c, BEGIN]] = -1
        candidates[c, BEGIN] = at
        at += candidates[c, END]
        candidates[c, END] = candidates[c, BEGIN]
        chances[c] *= scale
    for i in range(begin, end):
        if order[1, i] >= 0:
            c = made + order[1, i]
            order[2, candidates[c, END]] = order[0, i]
            candidates[c, END] += 1
    for i in range(begin, at):
        order[0, i] = order[2, i]
    return n

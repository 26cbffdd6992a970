"""The verbs of a step, compiled: functions over the sequence table [B] of SEQUENCE and the arrays of one batch.

`native_steps` calls them one after the other between two forward passes. Each function does one verb for all sequences: who gets a draft,
draft, pack, append what was accepted, keep its keys and values, count it, learn from it.
"""

from __future__ import annotations

import numpy as np

from ngramspec.datastore.code_cache import njit
from ngramspec.datastore.compiled_calls import call_at
from ngramspec.engine.stop_conditions import find_stop_compiled
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import fill_batch
from ngramspec.sequence_table import NO_SOURCE, RUNNING, UNPICKED
from ngramspec.speculative import ngram_table, tree_builder
from ngramspec.speculative.budget.backoff import is_unpredictable, update_cooldown
from ngramspec.speculative.draft_stats import count

_update_cooldown, _is_unpredictable = njit(update_cooldown), njit(is_unpredictable)
# numba types a literal 0 separately from an int64, so that passing one would compile the tree builder a second time (about 30 s).
_FIRST = _NO_DRAFTERS = np.int64(0)


@njit(cache=True, nogil=True)
def choose_drafting(table, states, plain):
    """Set `drafting_paused` of each sequence -> which ones a draft is looked for [B] bool, and how many these are.

    states: the proposer's, by slot; plain: nobody drafts in this step.
    """
    wanted, n = np.zeros(table.shape[0], np.bool_), 0
    for b in range(table.shape[0]):
        seq = table[b]
        if not seq.speculates or seq.limit - seq.n_tokens - 1 <= 0:
            continue
        paused = plain
        if not paused:
            hits = states[seq.slot, ngram_table.HIT_HISTORY]
            seq.cooldown, seq.last_cooldown, paused = _update_cooldown(seq.cooldown, seq.last_cooldown, _is_unpredictable(hits))
        seq.drafting_paused = paused
        if not paused:
            wanted[b] = True
            n += 1
    return wanted, n


@njit(cache=True, nogil=True)
def draft(build_trees, table, wanted, n_wanted, room, draft_state, spec_length, chains, external, cost_ms, threshold, max_nodes):
    """Build the draft trees -> (nodes of each sequence [B] int64, tokens, parents, probs, sources of all nodes).

    build_trees: address of `tree_builder.build_trees`; room [B] int64: most nodes that a sequence's KV blocks can take.
    """
    B, k = table.shape[0], 0
    n_nodes = np.zeros(B, np.int64)
    slots, depths = np.empty(n_wanted, np.int32), np.empty(n_wanted, np.int32)
    for b in range(B):
        if wanted[b]:
            slots[k], depths[k] = table[b].slot, table[b].limit - table[b].n_tokens - 1
            k += 1
    start, tokens, parents, probs, sources = call_at(
        tree_builder.build_trees, build_trees,
        (draft_state, slots, depths, cost_ms, B, max_nodes, threshold, spec_length, chains, external, _NO_DRAFTERS),
    )  # fmt: skip
    k = to = 0
    for b in range(B):
        if wanted[b]:
            n_nodes[b] = min(start[k + 1] - start[k], room[b])
            for i in range(start[k], start[k] + n_nodes[b]):
                tokens[to], parents[to], probs[to], sources[to] = tokens[i], parents[i], probs[i], sources[i]
                to += 1
            k += 1
    return n_nodes, tokens[:to], parents[:to], probs[:to], sources[:to]


@njit(cache=True, nogil=True)
def pack_rows(table, n_nodes, tokens, parents, block_tables, rows_per_item):
    """Return the arrays of `sampling.batch.fill` for one row and a draft tree of every sequence."""
    B, at, node = table.shape[0], 0, 0
    spans, ids = np.empty((B, 5), np.int64), np.empty(B + len(tokens), np.int32)
    for b in range(B):
        spans[b, 0], spans[b, 1], spans[b, 2], spans[b, 3], spans[b, 4] = table[b].slot, table[b].n_tokens - 1, 1, n_nodes[b], 1
        ids[at] = table[b].last_token
        at += 1
        for _ in range(n_nodes[b]):
            ids[at] = tokens[node]
            at += 1
            node += 1
    return fill_batch(spans, ids, parents, block_tables, rows_per_item)


@njit(cache=True, nogil=True)
def append_tokens(table, stops, roots, ends, tokens, nodes, n_nodes, sources, new_tokens, new_sources):
    """Append to every sequence what was accepted, up to where it ends -> (tokens appended [B], nodes accepted [B]).

    Sequence b's accepted tokens are tokens[roots[b]:ends[b]], carried by `nodes` of its tree (but the last). They are also written to
    new_tokens and new_sources [B, MAX_NEW_TOKENS] from `n_new` on.
    """
    B, first = table.shape[0], 0
    appended, accepted = np.zeros(B, np.int64), np.zeros(B, np.int64)
    for b in range(B):
        seq, root = table[b], roots[b]
        for i in range(ends[b] - root):
            token = tokens[root + i]
            drafted = i < ends[b] - root - 1
            new_tokens[b, seq.n_new] = token
            new_sources[b, seq.n_new] = sources[first + nodes[root + i]] if drafted else NO_SOURCE
            seq.n_new += 1
            if token < 0:
                seq.state = UNPICKED
                break
            seq.previous_token, seq.last_token = seq.last_token, token
            seq.n_tokens += 1
            appended[b] += 1
            accepted[b] += drafted
            seq.state = find_stop_compiled(seq, stops[seq.stops_start : seq.stops_end])
            if seq.state != RUNNING:
                break
        first += n_nodes[b]
    return appended, accepted


@njit(cache=True, nogil=True)
def find_moves(table, appended, roots, nodes, accepted):
    """Set `n_computed` -> (slots, starts, ends, positions) of the accepted paths whose keys and values lie elsewhere than their tokens.

    Those of positions[ends[k - 1]:ends[k]] of the sequence at slots[k] belong to positions starts[k], starts[k] + 1, ….
    """
    B = table.shape[0]
    slots, starts, ends = np.empty(B, np.int64), np.empty(B, np.int64), np.empty(B, np.int64)
    positions, k, n = np.empty(accepted.sum(), np.int64), 0, 0
    for b in range(B):
        start, root = table[b].n_tokens - appended[b], roots[b]
        table[b].n_computed = start + accepted[b]
        if accepted[b] and nodes[root + accepted[b] - 1] >= accepted[b]:
            for i in range(accepted[b]):
                positions[n] = start + nodes[root + i]
                n += 1
            slots[k], starts[k], ends[k] = table[b].slot, start, n
            k += 1
    return slots[:k], starts[:k], ends[:k], positions[:n]


@njit(cache=True, nogil=True)
def count_step(table, appended, accepted, nodes, sources, probs, stats, positions, roots, ends):
    """Add the step to the statistics' table `stats` (`draft_stats.StatsTable`)."""
    B, n = table.shape[0], 0
    counted, path = np.empty((B, 4), np.int64), np.empty(accepted.sum(), np.int32)
    for b in range(B):
        counted[b, 0], counted[b, 1], counted[b, 2], counted[b, 3] = table[b].stats_row, b, appended[b], accepted[b]
        if table[b].state == UNPICKED:
            counted[b, 0] = -1
        for i in range(accepted[b]):
            path[n] = nodes[roots[b] + i]
            n += 1
    count(stats.counts, stats.expected, stats.columns, counted, sources, probs, path, positions, roots, ends)


@njit(cache=True, nogil=True)
def learn(
    update, table, before, appended, accepted, tokens, nodes, draft_state, history, recycles,
    input_ids, parents, roots, ends, root_logits, top, logits,
):  # fmt: skip
    """Update the n-gram tables and weights, and keep the model's top-k (`top` with `logits`) if `recycles`.

    update: address of `tree_builder.update`; before [B] int64: the token before each sequence's root.
    """
    B, going_on, n_seen, n_new, n_path = table.shape[0], 0, 0, 0, 0
    slots, seen = np.empty(B, np.int32), np.empty((B, 3), np.int64)
    new_start, path_start = np.zeros(B + 1, np.int64), np.zeros(B + 1, np.int64)
    new, path = np.empty(appended.sum(), np.int32), np.empty(accepted.sum(), np.int32)
    for b in range(B):
        seq, root = table[b], roots[b]
        if not seq.speculates or seq.state == UNPICKED:
            continue
        if recycles and not seq.drafting_paused:
            seen[n_seen, 0], seen[n_seen, 1], seen[n_seen, 2] = seq.slot, before[b], b
            n_seen += 1
        if seq.state != RUNNING:
            continue
        slots[going_on] = seq.slot
        for i in range(appended[b]):
            new[n_new + i] = tokens[root + i]
        for i in range(accepted[b]):
            path[n_path + i] = nodes[root + i]
        n_new, n_path = n_new + appended[b], n_path + accepted[b]
        going_on += 1
        new_start[going_on], path_start[going_on] = n_new, n_path
    if not going_on and not n_seen:
        return
    rows = (seen[:n_seen], input_ids, parents, roots, ends, root_logits, top, logits)
    accepted_tokens = (new_start[: going_on + 1], new, path_start[: going_on + 1], path)
    n_updated = call_at(
        tree_builder.update, update, (draft_state, slots[:going_on], _FIRST, *accepted_tokens, history, _NO_DRAFTERS, *rows)
    )
    if n_updated < going_on:
        raise RuntimeError("tables without room")


@njit(cache=True, nogil=True)
def tree_room(table, n_blocks_of):
    """[B] int64: positions that each sequence's blocks have after its tokens."""
    room = np.empty(table.shape[0], np.int64)
    for b in range(table.shape[0]):
        room[b] = BLOCK * n_blocks_of[table[b].slot] - table[b].n_tokens
    return room

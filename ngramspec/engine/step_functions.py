"""The verbs of a step, compiled: functions over the sequence table [B] of SEQUENCE and the arrays of one batch.

Between two forward passes `native_steps` calls `accept_and_prepare`. Each of the other functions does one verb for all
sequences: who gets a draft, draft, pack, append what was accepted, keep its keys and values, count it, learn from it. What outlives a verb
is in a `LoopState`. Its larger functions are called by address: compiled into one another they would take several times as long.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.experimental import structref

from ngramspec.datastore.code_cache import njit
from ngramspec.datastore.compiled_calls import call_at, call_compiled
from ngramspec.engine.stop_conditions import find_stop_compiled
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import fill_batch
from ngramspec.sampling.sampler import DrawParams
from ngramspec.sampling.verify import DRAWN, FOLLOWED, match_drawn, match_picked
from ngramspec.sequence_table import MAX_NEW_TOKENS, NO_SOURCE, RUNNING, STEP_RECORD, UNPICKED
from ngramspec.speculative import ngram_table, tree_builder
from ngramspec.speculative.budget.backoff import is_unpredictable, update_cooldown
from ngramspec.speculative.draft_stats import StatsTable, count_pass
from ngramspec.speculative.features import ExternalTrees

_update_cooldown, _is_unpredictable = njit(update_cooldown), njit(is_unpredictable)
# numba types a literal 0 separately from an int64, so that passing one would compile the tree builder a second time (about 30 s).
_FIRST = _NO_DRAFTERS = np.int64(0)
# Flags of a step: no other follows; keys and values of accepted paths must be moved before the next pass.
IS_OVER, HAS_MOVES = 1, 2


@structref.register
class LoopStateType(types.StructRef):
    pass


class LoopState(structref.StructRefProxy):
    """The arrays and settings of a call, what its steps have made, and the draft of the pass that is under way."""


# `drafting`: spec_length, spec_rows, history, chains, recycles of a `NativeDrafting`. `shape`: threads, `n_best` and rows per item of the
# forward pass, most draft nodes, whether the pass is plain, threshold.
_GIVEN = ("table", "draft_state", "stops", "drafting", "cost_ms", "block_tables", "n_blocks_of", "logits", "shape")
# Tuples are handed over member by member: numba takes half a millisecond to look at one with names.
_TUPLES = (*DrawParams._fields, *ExternalTrees._fields, *StatsTable._fields)
_OF_CALL = ("which", "how", "new_tokens", "new_sources", "records", "step")
_OF_PASS = ("n_drafting", "wanted", "n_nodes", "draft_tokens", "draft_parents", "probs", "sources", "root_logits", "is_over")
_MOVES = ("move_slots", "move_starts", "move_ends", "move_positions")
structref.define_proxy(LoopState, LoopStateType, [*_GIVEN, *_TUPLES, *_OF_CALL, *_OF_PASS, *_MOVES, "functions"])
DRAFT, LEARN, ACCEPT, PREPARE, BUILD_TREES, UPDATE = range(6)  # indices of `functions`, which are addresses


@njit(cache=True, nogil=True)
def new_state(*members):
    """Return a LoopState. One made by Python would be compiled anew in every process."""
    return LoopState(*members)


@njit(cache=True, nogil=True)
def get_functions(t):
    return t.functions


@njit(cache=True, nogil=True)
def get_moves(t):
    return t.move_slots, t.move_starts, t.move_ends, t.move_positions


@njit(cache=True, nogil=True)
def set_stats(t, counts, expected, columns):
    t.counts, t.expected, t.columns = counts, expected, columns


@njit(cache=True, nogil=True)
def begin_call(t, table, draft_state, given, draws, n_steps):
    """Set up the state for a call -> tokens, sources and records, as NativeResult has them. `given`: the other members of _GIVEN."""
    B, n = table.shape[0], 0
    t.table, t.draft_state = table, draft_state
    t.stops, t.drafting, t.cost_ms, t.block_tables, t.n_blocks_of, t.logits, t.shape = given
    t.temperature, t.top_k, t.share, t.least, t.seed, t.sample, t.position = draws
    how, which = np.full(B, FOLLOWED, np.int8), np.empty(B, np.int64)
    for b in range(B):
        if table[b].draw >= 0:
            how[b], which[n] = DRAWN, b
            n += 1
    tokens, sources = np.empty((B, MAX_NEW_TOKENS), np.int32), np.empty((B, MAX_NEW_TOKENS), np.uint8)
    records = np.zeros(n_steps, STEP_RECORD)
    t.how, t.which, t.new_tokens, t.new_sources, t.records, t.step = how, which[:n], tokens, sources, records, 0
    return tokens, sources, records


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
def draft_trees(t):
    """Build the draft trees of the sequences in `wanted`, as far as their KV blocks have room."""
    table, wanted, (spec_length, _, _, chains, _), (_, _, _, max_nodes, _, threshold) = t.table, t.wanted, t.drafting, t.shape
    B, k = table.shape[0], 0
    slots, depths, room = np.empty(t.n_drafting, np.int32), np.empty(t.n_drafting, np.int32), np.empty(t.n_drafting, np.int64)
    for b in range(B):
        if wanted[b]:
            seq = table[b]
            slots[k], depths[k] = seq.slot, min(seq.limit - seq.n_tokens - 1, spec_length)
            room[k] = BLOCK * t.n_blocks_of[seq.slot] - seq.n_tokens
            k += 1
    external = ExternalTrees(t.start, t.tokens, t.parents, t.codes)
    start, tokens, parents, probs, sources = call_at(
        tree_builder.build_trees, t.functions[BUILD_TREES],
        (t.draft_state, slots, depths, t.cost_ms, B, max_nodes, threshold, chains, external),
    )  # fmt: skip
    n_nodes = np.zeros(B, np.int64)
    k = to = 0
    for b in range(B):
        if wanted[b]:
            n_nodes[b] = min(start[k + 1] - start[k], room[k])
            for i in range(start[k], start[k] + n_nodes[b]):
                tokens[to], parents[to], probs[to], sources[to] = tokens[i], parents[i], probs[i], sources[i]
                to += 1
            k += 1
    t.n_nodes, t.draft_tokens, t.draft_parents, t.probs, t.sources = n_nodes, tokens[:to], parents[:to], probs[:to], sources[:to]


@njit(cache=True, nogil=True)
def pack_rows(table, n_nodes, tokens, parents, block_tables, rows_per_item):
    """Return the arrays of `sampling.batch.fill_batch` for one row and a draft tree of every sequence."""
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
def append_tokens(t, roots, ends, tokens, nodes):
    """Append to every sequence what was accepted, up to where it ends -> (tokens appended [B], nodes accepted [B]).

    Sequence b's accepted tokens are tokens[roots[b]:ends[b]], carried by `nodes` of its tree (but the last). They are also written to
    `new_tokens` and `new_sources` [B, MAX_NEW_TOKENS] from `n_new` on.
    """
    table, stops, sources, new_tokens, new_sources = t.table, t.stops, t.sources, t.new_tokens, t.new_sources
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
        first += t.n_nodes[b]
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
def count_step(t, p, appended, accepted, nodes):
    """Add the step to the statistics' table (`draft_stats.StatsTable`)."""
    table, roots, B, n = t.table, p.roots, t.table.shape[0], 0
    counted, path = np.empty((B, 4), np.int64), np.empty(accepted.sum(), np.int32)
    for b in range(B):
        counted[b, 0], counted[b, 1], counted[b, 2], counted[b, 3] = table[b].stats_row, b, appended[b], accepted[b]
        if table[b].state == UNPICKED:
            counted[b, 0] = -1
        for i in range(accepted[b]):
            path[n] = nodes[roots[b] + i]
            n += 1
    count_pass((t.counts, t.expected, t.columns), counted, t.sources, t.probs, path, p.positions, roots, p.ends)


@njit(cache=True, nogil=True)
def learn_verified(t, p, before, appended, accepted, tokens, nodes):
    """Update the n-gram tables and weights, and keep the model's top-k if the drafting recycles it.

    before [B] int64: the token before each sequence's root.
    """
    table, roots, (_, _, history, _, recycles) = t.table, p.roots, t.drafting
    B, n_continuing, n_seen, n_new, n_path = table.shape[0], 0, 0, 0, 0
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
        slots[n_continuing] = seq.slot
        for i in range(appended[b]):
            new[n_new + i] = tokens[root + i]
        for i in range(accepted[b]):
            path[n_path + i] = nodes[root + i]
        n_new, n_path = n_new + appended[b], n_path + accepted[b]
        n_continuing += 1
        new_start[n_continuing], path_start[n_continuing] = n_new, n_path
    if not n_continuing and not n_seen:
        return
    rows = (seen[:n_seen], p.input_ids, p.parents, roots, p.ends, t.root_logits, p.tokens[0], p.values[0])
    accepted_tokens = (new_start[: n_continuing + 1], new, path_start[: n_continuing + 1], path)
    n_updated = call_at(
        tree_builder.update, t.functions[UPDATE],
        (t.draft_state, slots[:n_continuing], _FIRST, accepted_tokens, history, _NO_DRAFTERS, rows),
    )  # fmt: skip
    if n_updated < n_continuing:
        raise RuntimeError("tables without room")


@njit(cache=True, nogil=True)
def prepare_pass(t, p):
    """Draft for the next pass and pack it into the forward pass's inputs `p`."""
    table = t.table
    n_threads, n_best, rows_per_item, _, plain, _ = t.shape
    t.wanted, t.n_drafting = choose_drafting(table, t.draft_state.states, plain)
    if t.n_drafting:
        call_compiled(t.functions[DRAFT], (t,))
    else:
        t.n_nodes, t.draft_tokens, t.draft_parents = np.zeros(table.shape[0], np.int64), np.empty(0, np.int32), np.empty(0, np.int32)
        t.probs, t.sources = np.empty(0, np.float32), np.empty(0, np.uint8)
    (
        p.input_ids, p.positions, p.wanted, p.items, p.owners, p.tables, p.bases, p.paths, p.blocks, p.offsets, p.parents, p.roots, p.ends,
        t.root_logits,
    ) = pack_rows(table, t.n_nodes, t.draft_tokens, t.draft_parents, t.block_tables, rows_per_item)  # fmt: skip
    n = len(p.wanted)
    p.tokens, p.values = np.empty((n_threads, n, n_best), np.int32), np.empty((n_threads, n, n_best), np.float32)
    p.fine, p.greedy = np.empty((n_threads, n), np.bool_), np.empty(n, np.int32)
    p.logits = t.logits[:n]
    p.state[:] = 0


@njit(cache=True, nogil=True)
def accept_pass(t, p):
    """Accept what the pass verified and commit it. Set `is_over`: whether a step must not follow right away."""
    table, (spec_length, spec_rows, _, _, _) = t.table, t.drafting
    drawn = DrawParams(t.temperature, t.top_k, t.share, t.least, t.seed, t.sample, t.position)
    input_ids, roots, greedy = p.input_ids, p.roots, p.greedy
    trees = input_ids, p.parents, roots, p.ends, t.root_logits
    B, n_keys, is_over = table.shape[0], 0, False
    before = np.empty(B, np.int64)
    for b in range(B):
        before[b] = table[b].previous_token
        n_keys += table[b].n_tokens
    tokens, nodes = np.empty(len(input_ids), np.int32), np.empty(len(input_ids), np.int32)
    to = match_picked(t.how, trees, greedy, tokens, nodes)
    if len(t.which):
        match_drawn(t.which, trees, greedy, p.logits[:, : p.vocab_size], drawn, tokens, nodes, to)
    appended, accepted = append_tokens(t, roots, to, tokens, nodes)
    t.move_slots, t.move_starts, t.move_ends, t.move_positions = find_moves(table, appended, roots, nodes, accepted)
    count_step(t, p, appended, accepted, nodes)
    call_compiled(t.functions[LEARN], (t, p, before, appended, accepted, tokens, nodes))
    for b in range(B):
        seq = table[b]
        if seq.draw >= 0:
            t.position[seq.draw] += appended[b]
        lacks_room = BLOCK * t.n_blocks_of[seq.slot] < min(seq.n_tokens + 1 + spec_rows, seq.limit)
        is_over |= seq.state != RUNNING or lacks_room or seq.n_new + spec_length + 1 > MAX_NEW_TOKENS
    record = t.records[t.step]
    record.n_rows, record.n_nodes, record.n_drafting, record.n_keys = len(input_ids), len(t.sources), t.n_drafting, n_keys
    record.n_new = appended.sum()
    t.step += 1
    t.is_over = is_over


@njit(cache=True, nogil=True)
def accept_and_prepare(t, p, stop):
    """Accept the pass and, unless there is a reason to stop, prepare the next -> the sum of IS_OVER and HAS_MOVES."""
    call_compiled(t.functions[ACCEPT], (t, p))
    is_over = t.is_over or stop or t.step == len(t.records)
    if not is_over:
        call_compiled(t.functions[PREPARE], (t, p))
    return IS_OVER * is_over + HAS_MOVES * (len(t.move_slots) > 0)

"""Several steps in one compiled call, for sequences of which nothing is asked but their tokens: draft, pack, pass, walk, commit, and again.

What runs right behind a pass finds the caches full of weights: a line of Python takes five times as long there as in a loop, and what one
step does beside its pass took a tenth of it. Here one call of compiled code stands between two passes. It ends where a sequence does, where
somebody calls, and after some steps or milliseconds (`sequence_table`), so that nobody is kept waiting. The pass is not part of
that code: it would be compiled again with it, which takes a hundred seconds instead of twelve.

Knows `stack`, the pool, and compiled drafting (`merge`); no requests. Every part is what single steps do, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numba
import numpy as np
from numba import types
from numba.experimental import structref

from ngramspec.backends.cpu.kv_pool import KVPool, move_all
from ngramspec.backends.cpu.llama_forward import LlamaDecoder, compute
from ngramspec.datastore.code_cache import njit
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import fill
from ngramspec.sampling.sampler import Draws, Sampler, draws
from ngramspec.sampling.verify import DRAWN as HOW_DRAWN
from ngramspec.sampling.verify import FOLLOWED, draw_all, follow_all
from ngramspec.sequence_table import (
    BEFORE,
    COLUMNS,
    COMPUTED,
    DRAWN,
    ENDED,
    KEYS,
    LAST_REST,
    LIMIT,
    LOOKED,
    MADE,
    MARKS,
    MOST_MS,
    N_NEW,
    N_TOKENS,
    NODES,
    PASS_MS,
    PAUSED,
    REST,
    ROOM,
    ROW,
    ROWS,
    RUNNING,
    SLOT,
    SPECULATES,
    STATE,
    STEP_MS,
    STOPS_FROM,
    STOPS_TO,
    TOKEN,
    UNAIDED,
    UNPICKED,
    Compiled,
    Counting,
    Gained,
    Spending,
)
from ngramspec.speculative import ngram_table, tree_builder
from ngramspec.speculative.budget.backoff import is_unpredictable, update_cooldown
from ngramspec.speculative.draft_stats import count
from ngramspec.speculative.features import ExternalTrees
from ngramspec.speculative.proposer import NO_EXTERNAL, idle

_rest, _is_unpredictable = njit(update_cooldown), njit(is_unpredictable)
_FIRST = _NO_DRAFTERS = np.int64(0)
"""A number that stands in the call itself is a type of its own, for which `merge` would be compiled once more: half a minute."""


@structref.register
class TableType(types.StructRef):
    pass


class Table(structref.StructRefProxy):
    """All that a call's steps go by, and between drafting and accepting what a pass was drafted and packed for."""


_GIVEN = (
    "lines", "stops", "desk", "drafting", "cost_ms", "tables", "held", "logits", "shape", "keys", "values",
)  # fmt: skip
_OF_CALL = ("which", "how", "out", "out_sources", "marks", "step")
_OF_PASS = ("looked", "n_nodes", "probs", "sources", "above", "roots", "ends", "root_logits")
_TUPLES = (*Draws._fields, *ExternalTrees._fields, *Counting._fields)
"""Whose members are handed over one by one: compiled code knows arrays at once, and looks for half a millisecond at what has names."""
structref.define_proxy(Table, TableType, [*_GIVEN, *_TUPLES, *_OF_CALL, *_OF_PASS])


@njit(cache=True, nogil=True)
def _new_table(*members):
    return Table(*members)


@njit(cache=True, nogil=True)
def _look_for(lines, states, plain):
    """Set for each line whether it is paused -> the lines that drafts are looked for, as a mask, and how many."""
    wanted, n = np.zeros(lines.shape[0], np.bool_), 0
    for b in range(lines.shape[0]):
        line = lines[b]
        if not line[SPECULATES] or line[LIMIT] - line[N_TOKENS] - 1 <= 0:
            continue
        paused = plain
        if not paused:
            hits = states[line[SLOT], ngram_table.HIT_HISTORY]
            line[REST], line[LAST_REST], paused = _rest(line[REST], line[LAST_REST], _is_unpredictable(hits))
        line[PAUSED] = paused
        if not paused:
            wanted[b] = True
            n += 1
    return wanted, n


@njit(cache=True, nogil=True)
def _draft(lines, wanted, n_wanted, room, desk, drafting, external, cost_ms, threshold, most_nodes):
    """The trees of all lines, one after the other, none larger than its `room` -> (nodes of each, tokens, parents, probs, sources)."""
    spec_length, _, _, chains, _ = drafting
    B, k = lines.shape[0], 0
    n_nodes = np.zeros(B, np.int64)
    slots, depths = np.empty(n_wanted, np.int32), np.empty(n_wanted, np.int32)
    for b in range(B):
        if wanted[b]:
            slots[k], depths[k] = lines[b, SLOT], lines[b, LIMIT] - lines[b, N_TOKENS] - 1
            k += 1
    start, tokens, parents, probs, sources = tree_builder.build_trees(
        desk, slots, depths, cost_ms, B, most_nodes, threshold, spec_length, chains, external, _NO_DRAFTERS
    )
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
def _packed(lines, n_nodes, tokens, parents, tables, rows_per_item):
    """The pass's arrays, as `pack.fill` has them: of every line its last token and its tree."""
    B, at, node = lines.shape[0], 0, 0
    spans, ids = np.empty((B, 5), np.int64), np.empty(B + len(tokens), np.int32)
    for b in range(B):
        spans[b, 0], spans[b, 1], spans[b, 2], spans[b, 3], spans[b, 4] = lines[b, SLOT], lines[b, N_TOKENS] - 1, 1, n_nodes[b], 1
        ids[at] = lines[b, TOKEN]
        at += 1
        for _ in range(n_nodes[b]):
            ids[at] = tokens[node]
            at += 1
            node += 1
    return fill(spans, ids, parents, tables, rows_per_item)


@njit(cache=True, nogil=True)
def _take(lines, stops, roots, to, run, nodes, n_nodes, sources, out, out_sources):
    """Give every line what its walk has found, to the end of its text at most -> (tokens of each, path of each)."""
    B, first = lines.shape[0], 0
    taken, paths = np.zeros(B, np.int64), np.zeros(B, np.int64)
    for b in range(B):
        line, root = lines[b], roots[b]
        for i in range(to[b] - root):
            token = run[root + i]
            at = line[N_NEW]
            drafted = i < to[b] - root - 1
            out[b, at], out_sources[b, at] = token, sources[first + nodes[root + i]] if drafted else UNAIDED
            line[N_NEW] += 1
            if token < 0:
                line[STATE] = UNPICKED
                break
            line[BEFORE], line[TOKEN] = line[TOKEN], token
            taken[b] += 1
            paths[b] += drafted
            if line[N_TOKENS] + taken[b] == line[LIMIT]:
                line[STATE] = ENDED
            for s in range(line[STOPS_FROM], line[STOPS_TO]):
                if stops[s] == token:
                    line[STATE] = ENDED
            if line[STATE] != RUNNING:
                break
        first += n_nodes[b]
    return taken, paths


@njit(cache=True, nogil=True)
def _keep(lines, roots, nodes, paths, keys, values, tables):
    """Move the accepted paths' keys and values to the positions of their tokens, where they do not lie there."""
    B = lines.shape[0]
    slots, starts, ends = np.empty(B, np.int64), np.empty(B, np.int64), np.empty(B, np.int64)
    moved, k, n = np.empty(paths.sum(), np.int64), 0, 0
    for b in range(B):
        end, root = lines[b, N_TOKENS], roots[b]
        lines[b, COMPUTED] = end + paths[b]
        if paths[b] and nodes[root + paths[b] - 1] >= paths[b]:
            for i in range(paths[b]):
                moved[n] = end + nodes[root + i]
                n += 1
            slots[k], starts[k], ends[k] = lines[b, SLOT], end, n
            k += 1
    if k:
        move_all(keys, values, tables, slots[:k], starts[:k], ends[:k], moved[:n])


@njit(cache=True, nogil=True)
def _count(lines, n_nodes, taken, paths, nodes, sources, probs, counting, positions, roots, ends):
    B, n = lines.shape[0], 0
    counted, path = np.empty((B, 4), np.int64), np.empty(paths.sum(), np.int32)
    for b in range(B):
        counted[b, 0], counted[b, 1], counted[b, 2], counted[b, 3] = lines[b, ROW], b, taken[b], paths[b]
        if lines[b, STATE] == UNPICKED:
            counted[b, 0] = -1
        for i in range(paths[b]):
            path[n] = nodes[roots[b] + i]
            n += 1
    count(counting.table, counting.expected, counting.columns, counted, sources, probs, path, positions, roots, ends)


@njit(cache=True, nogil=True)
def _learn(lines, before, taken, paths, run, nodes, desk, drafting, input_ids, parents, roots, ends, root_logits, likely, logits):
    """The tables and weights hear of it, and what the model held likely is kept."""
    _, _, history, _, recycles = drafting
    B, going_on, heard, n_new, n_path = lines.shape[0], 0, 0, 0, 0
    slots, seen = np.empty(B, np.int32), np.empty((B, 3), np.int64)
    new_start, path_start = np.zeros(B + 1, np.int64), np.zeros(B + 1, np.int64)
    new, path = np.empty(taken.sum(), np.int32), np.empty(paths.sum(), np.int32)
    for b in range(B):
        line, root = lines[b], roots[b]
        if not line[SPECULATES] or line[STATE] == UNPICKED:
            continue
        if recycles and not line[PAUSED]:
            seen[heard, 0], seen[heard, 1], seen[heard, 2] = line[SLOT], before[b], b
            heard += 1
        if line[STATE] == ENDED:
            continue
        slots[going_on] = line[SLOT]
        for i in range(taken[b]):
            new[n_new + i] = run[root + i]
        for i in range(paths[b]):
            path[n_path + i] = nodes[root + i]
        n_new, n_path = n_new + taken[b], n_path + paths[b]
        going_on += 1
        new_start[going_on], path_start[going_on] = n_new, n_path
    if not going_on and not heard:
        return
    settled = tree_builder.update(
        desk, slots[:going_on], _FIRST, new_start[: going_on + 1], new, path_start[: going_on + 1], path, history, _NO_DRAFTERS,
        seen[:heard], input_ids, parents, roots, ends, root_logits, likely, logits,
    )  # fmt: skip
    if settled < going_on:
        raise RuntimeError("tables without room")


@njit(cache=True, nogil=True)
def _prepare(t, p):
    """Draft for the next pass and pack it."""
    lines, drafting = t.lines, t.drafting
    threads, n_best, rows_per_item, most_nodes, plain, threshold = t.shape
    B = lines.shape[0]
    room = np.empty(B, np.int64)
    for b in range(B):
        room[b] = BLOCK * t.held[lines[b, SLOT]] - lines[b, N_TOKENS]
    wanted, t.looked = _look_for(lines, t.desk.states, plain)
    tokens, parents = np.empty(0, np.int32), np.empty(0, np.int32)
    external = ExternalTrees(t.start, t.tokens, t.parents, t.codes)
    if t.looked:
        t.n_nodes, tokens, parents, t.probs, t.sources = _draft(
            lines, wanted, t.looked, room, t.desk, drafting, external, t.cost_ms, threshold, most_nodes
        )
    else:
        t.n_nodes, t.probs, t.sources = np.zeros(B, np.int64), np.empty(0, np.float32), np.empty(0, np.uint8)
    (
        p.input_ids, p.positions, p.wanted, p.items, _, p.tables, p.bases, p.paths, p.blocks, p.offsets, t.above, t.roots, t.ends,
        t.root_logits,
    ) = _packed(lines, t.n_nodes, tokens, parents, t.tables, rows_per_item)  # fmt: skip
    n = len(p.wanted)
    p.tokens, p.values = np.empty((threads, n, n_best), np.int32), np.empty((threads, n, n_best), np.float32)
    p.fine, p.greedy = np.empty((threads, n), np.bool_), np.empty(n, np.int32)
    p.logits = t.logits[:n]
    p.state[:] = 0


@njit(cache=True, nogil=True)
def _accept(t, p):
    """Walk, and commit what was accepted -> whether a step must not follow right away."""
    lines, drafting, sources = t.lines, t.drafting, t.sources
    drawn = Draws(t.temperature, t.top_k, t.share, t.least, t.seed, t.sample, t.position)
    counting = Counting(t.table, t.expected, t.columns)
    input_ids, above, roots, ends, root_logits, greedy = p.input_ids, t.above, t.roots, t.ends, t.root_logits, p.greedy
    B, n_keys, over = lines.shape[0], 0, False
    before = np.empty(B, np.int64)
    for b in range(B):
        before[b] = lines[b, BEFORE]
        n_keys += lines[b, N_TOKENS]
    run, nodes = np.empty(len(input_ids), np.int32), np.empty(len(input_ids), np.int32)
    to = follow_all(t.how, input_ids, above, roots, ends, root_logits, greedy, run, nodes)
    if len(t.which):
        draw_all(t.which, input_ids, above, roots, ends, root_logits, greedy, p.logits[:, : p.vocab_size], drawn, run, nodes, to)
    taken, paths = _take(lines, t.stops, roots, to, run, nodes, t.n_nodes, sources, t.out, t.out_sources)
    _keep(lines, roots, nodes, paths, t.keys, t.values, t.tables)
    _count(lines, t.n_nodes, taken, paths, nodes, sources, t.probs, counting, p.positions, roots, ends)
    _learn(lines, before, taken, paths, run, nodes, t.desk, drafting, input_ids, above, roots, ends, root_logits, p.tokens[0], p.values[0])
    for b in range(B):
        line = lines[b]
        line[N_TOKENS] += taken[b]
        if line[DRAWN] >= 0:
            t.position[line[DRAWN]] += taken[b]
        cramped = BLOCK * t.held[line[SLOT]] < min(line[N_TOKENS] + 1 + drafting[1], line[LIMIT])
        over |= line[STATE] != RUNNING or cramped or line[N_NEW] + drafting[0] + 1 > ROOM
    mark = t.marks[t.step]
    mark[ROWS], mark[NODES], mark[LOOKED], mark[MADE], mark[KEYS] = len(input_ids), len(sources), t.looked, taken.sum(), n_keys
    t.step += 1
    return over


@njit(cache=True, nogil=True)
def _advance(t, p, stop):
    """Accept, and unless there is reason to stop prepare the next pass -> whether the call is over."""
    over = _accept(t, p) or stop or t.step == len(t.marks)
    if not over:
        _prepare(t, p)
    return over


@njit(cache=True, nogil=True)
def _begin(t, lines, stops, desk, drafting, cost_ms, tables, held, logits, shape, draws, n_steps):
    """-> tokens, sources and marks, as `Gained` has them."""
    B, n = lines.shape[0], 0
    t.lines, t.stops, t.desk, t.drafting, t.cost_ms, t.tables, t.held, t.logits, t.shape = (
        lines, stops, desk, drafting, cost_ms, tables, held, logits, shape,
    )  # fmt: skip
    t.temperature, t.top_k, t.share, t.least, t.seed, t.sample, t.position = draws
    how, which = np.full(B, FOLLOWED, np.int8), np.empty(B, np.int64)
    for b in range(B):
        if lines[b, DRAWN] >= 0:
            how[b], which[n] = HOW_DRAWN, b
            n += 1
    out, sources, marks = np.empty((B, ROOM), np.int32), np.empty((B, ROOM), np.uint8), np.zeros((n_steps, MARKS))
    t.how, t.which, t.out, t.out_sources, t.marks, t.step = how, which[:n], out, sources, marks, 0
    return out, sources, marks


@njit(cache=True, nogil=True)
def _count_in(t, table, expected, columns):
    t.table, t.expected, t.columns = table, expected, columns


class MultiStep:
    """`backends.base.Runner.multi_step` on a stack."""

    def __init__(self, stack: LlamaDecoder, pool: KVPool, rows_per_item: int) -> None:
        self.stack, self._pool, self._rows_per_item = stack, pool, rows_per_item
        self._pass, self._logits = stack.empty_pass(), stack.room_for_logits(0)
        self._table: Table | None = None  # its like takes half a millisecond to make, and is used again

    def __call__(
        self, threads: int, n_best: int, lines: np.ndarray, stops: np.ndarray, samplers: Sequence[Sampler], positions: Sequence[int],
        drafting: Compiled | None, spending: Spending, counting: Counting, interrupt: np.ndarray,
    ) -> Gained:  # fmt: skip
        p, n_rows = self._pass, len(lines) + spending.most_nodes
        model = self.stack.model(self._pool, n_rows, int(lines[:, N_TOKENS].max()) + ROOM + n_rows)
        if len(self._logits) < n_rows:
            self._logits = self.stack.room_for_logits(n_rows)
        drawn = tuple(draws(samplers, positions)) if samplers else _NOBODY_DRAWS
        table, (out, sources, marks) = self._begun(threads, n_best, lines, stops, drawn, drafting, spending, counting)
        began, times = time.perf_counter(), list[float]()
        _prepare(table, p)
        over = False
        while not over:
            started = time.perf_counter()
            compute(threads, model, p)
            computed = time.perf_counter()
            times += started, computed
            over = _advance(table, p, (computed - began) * 1e3 > MOST_MS or bool(interrupt[0]))
        marks = marks[: len(times) // 2]
        times.append(time.perf_counter())
        marks[:, PASS_MS] = 1e3 * np.diff(times[:-1])[::2]
        marks[:, STEP_MS] = 1e3 * np.diff([began, *times[1:-3:2], times[-1]])
        return Gained(out, sources, marks)

    def compile(self) -> None:
        """Or load from disk."""
        lines, counting = np.zeros((0, COLUMNS), np.int64), Counting(np.zeros((1, 1), np.int64), np.zeros((1, 1)), _WHOLE)
        spending = Spending(1, np.zeros(2), 1.0, 1, plain=False)
        table, _ = self._begun(1, 1, lines, _IDS, _NOBODY_DRAWS, None, spending, counting)
        of = numba.typeof(table), numba.typeof(self._pass)
        _prepare.compile(of)
        _advance.compile((*of, types.boolean))

    def _begun(
        self, threads: int, n_best: int, lines: np.ndarray, stops: np.ndarray, drawn: tuple[np.ndarray, ...], drafting: Compiled | None,
        spending: Spending, counting: Counting,
    ) -> tuple[Table, tuple[np.ndarray, np.ndarray, np.ndarray]]:  # fmt: skip
        """The table for a call, and what the call fills in."""
        pool, drafts = self._pool, drafting or idle()
        given = (
            lines, stops, drafts.desk, (drafts.spec_length, drafts.spec_rows, drafts.history, drafts.chains, drafts.recycles),
            spending.cost_ms, pool.tables, pool.n_blocks_of, self._logits,
            (threads, n_best, self._rows_per_item, spending.most_nodes, spending.plain, spending.threshold),
        )  # fmt: skip
        if self._table is None:
            self._table = _new_table(*given, pool.all_keys, pool.all_values, *drawn, *NO_EXTERNAL, *counting, *_OF_NONE)
        _count_in(self._table, *counting)
        return self._table, _begin(self._table, *given, drawn, spending.n_steps)


_IDS, _WHOLE = np.empty(0, np.int32), np.empty(0, np.int64)
_SHARES, _NAMES = np.empty(0, np.float32), np.empty(0, np.uint8)
_NOBODY_DRAWS = tuple(draws((), ()))
_OF_NONE = (
    *(_WHOLE, np.empty(0, np.int8), np.empty((0, 0), np.int32), np.empty((0, 0), np.uint8), np.empty((0, 0)), 0),
    *(0, _WHOLE, _SHARES, _NAMES, _IDS, _IDS, _IDS, _IDS),
)

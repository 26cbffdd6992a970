"""Drafts from datastores: for every sequence of a batch the continuations of its longest contexts, as one small tree. One compiled call.

Contexts (token ids, newest first) enter, `Trees` leave. It knows snapshots by their rows of addresses (search.py) and nothing of files,
models or how a draft is judged. Per sequence and step:

1. Each segment is searched for the context; entries around that place are collected outward, in falling order of match length over all
   segments, until there are `occurrences`. Where those of one length are too many, an even sample of them is taken: counts stay
   representative and work bounded. Dead documents are passed over.
2. What was collected is kept. When tokens were appended that some of the longest matches go on with, these are the longest
   matches now, for a longer one would have been among them; so a text that is being copied costs a comparison and no search.
3. The continuations are merged into a tree, nodes taken best-first by the product of w / (w + 1) · share along the path, where w is
   the weight of the occurrences under a node, growing with their match length.

All state lies in arrays that are allocated once. Other compiled code calls `propose_batch(work, slots, contexts, fresh)` itself and reads
the outputs at the addresses in `work`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import carray

from . import lookup_arrays as col
from .code_cache import njit
from .format import PLACE_BITS
from .match_tree import build_tree
from .numba_intrinsics import cast_to_pointer, load_i32, prefetch
from .page_cache import measure_free_memory
from .reader import Location, Snapshot
from .search import (
    LANE,
    LENGTH,
    LO,
    N_SUFFIXES,
    N_TOKENS,
    QUERY,
    ROW,
    SEGMENT,
    SEQUENCE,
    SHARED_HI,
    SHARED_LO,
    SUFFIXES,
    TOKENS,
    VOCAB,
    WIDE,
    WIDTH,
    count_entry_agreement,
    count_run,
    find_insertions,
    is_deleted,
    read_position,
    read_token,
)

REUSES = 4  # steps in a row without a search, at most: shorter matches that began meanwhile are only found by one
# what must be left of the last step's longest matches to do without a search: one of LONG_MATCH tokens, or MANY
LONG_MATCH, MANY = 16, 8

_INDEX, _SHARED, _FROM, _COUNT, _CURSOR = range(5)
_CONTEXT, _ADDRESS, _LENGTH, _SEARCH = range(4)  # columns of SEARCHES: which of the contexts, where it lies, its tokens
_SEQUENCES = 16  # whose drafts are made together
_LANES = 16  # searches of one sequence in one segment that go on together
_PREFETCH = 8  # entries ahead of the one that is read whose tokens are asked for
ALL_STORES = -1
_INSPECT = 8  # entries looked at in one search, deleted ones included, as a multiple of `occurrences`


class Trees(NamedTuple):
    """One draft tree per sequence, flat. Node i of sequence b is at start[b] + i."""

    start: np.ndarray  # [B+1] int64
    tokens: np.ndarray  # [N] int32
    parents: np.ndarray  # [N] int32, index within the tree, -1 the root; a parent comes before its children
    counts: np.ndarray  # [N] int32, occurrences under the node, of those collected
    match: np.ndarray  # [N] int16, the longest context that one of them matched, without the path
    place: np.ndarray  # [N] int64, segment << 40 | position of this token in the occurrence that matched longest


class Matcher:
    """The look-up state of up to `max_seqs` sequences over the segments of some snapshots. Not for several threads at once."""

    def __init__(
        self,
        snapshots: Sequence[Snapshot],
        max_seqs: int,
        max_match: int = 64,
        min_match: int = 2,
        nodes: int = 64,
        occurrences: int = 64,
        depth: int = 24,
        min_chance: float = 1 / 64,
    ):
        """Return at most `nodes` nodes and `depth` tokens deep a tree; nodes less likely than `min_chance` are left out."""
        if not (max_seqs >= 1 and 1 <= min_match <= max_match <= 1024 and 1 <= nodes <= 4096 and 1 <= depth <= 1024):
            raise ValueError(f"{max_seqs=}, {min_match=}, {max_match=}, {nodes=}, {depth=}: all must be from 1, min_match <= max_match")
        if not 1 <= occurrences <= col.N_GROUPS // 2:
            raise ValueError(f"{occurrences=} must be from 1 to {col.N_GROUPS // 2}")
        if not 0.0 < min_chance <= 1.0:
            raise ValueError(f"{min_chance=} must be above 0, at most 1")
        self.max_match = max_match
        self.vocab_size = sys.maxsize
        """Token ids that the model has, from the next `reset` on: what a store has beyond them is never proposed."""
        self.work = np.zeros(col.WORK, np.int64)
        self.work[[col.MAX_SEQS, col.MAX_MATCH, col.MIN_MATCH, col.NODES, col.OCCURRENCES, col.DEPTH]] = (
            max_seqs,
            max_match,
            min_match,
            nodes,
            occurrences,
            depth,
        )
        self.work[col.FLOOR] = min(int(np.ceil(-4 * np.log2(min_chance))) + 1, col.N_BUCKETS)
        n_candidates, n_nodes = occurrences * depth + 1, max_seqs * nodes
        self._buffers: dict[int, np.ndarray] = {
            col.PLACES: np.zeros((max_seqs, occurrences), np.int64),
            col.MATCHES: np.zeros((max_seqs, occurrences), np.int32),
            col.STATE: np.zeros((max_seqs, col.N_STATE), np.int64),
            col.LANES: np.zeros((_LANES, LANE), np.int64),
            col.SEARCHES: np.zeros((_SEQUENCES, _SEARCH), np.int64),
            col.TEXTS: np.zeros((2, occurrences), np.int64),
            col.ORDER: np.zeros((3, occurrences), np.int32),
            col.GROUPS: np.full((2, col.N_GROUPS), -1, np.int32),
            col.CANDIDATES: np.zeros((n_candidates, col.N_CANDIDATE), np.int32),
            col.CHANCES: np.zeros(n_candidates, np.float64),
            col.QUEUE: np.zeros(col.N_BUCKETS, np.int32),
            col.WEIGHTS: 0.25 * np.arange(max_match + depth + 1, dtype=np.float64) ** 1.5,
            col.OUT_START: np.zeros(max_seqs + 1, np.int64),
            col.OUT_TOKENS: np.zeros(n_nodes, np.int32),
            col.OUT_PARENTS: np.zeros(n_nodes, np.int32),
            col.OUT_COUNTS: np.zeros(n_nodes, np.int32),
            col.OUT_MATCH: np.zeros(n_nodes, np.int16),
            col.OUT_PLACE: np.zeros(n_nodes, np.int64),
        }
        self.reset(snapshots)

    def reset(self, snapshots: Sequence[Snapshot]) -> None:
        """Look up in these from now on, for all sequences in all of them. They are searched anew; places count the segments of all
        snapshots, in order. Raises ValueError, with nothing changed, for different tokenizers.
        """
        kinds = {(s.manifest.tokenizer_name, s.manifest.vocab_size, s.manifest.tokenizer_fingerprint) for s in snapshots}
        if len({kind[1:] for kind in kinds}) > 1:  # one token width is read for all
            raise ValueError(f"stores of different tokenizers cannot be used together: {sorted(kinds)}")
        rows = np.concatenate([np.zeros((0, ROW), np.int64), *(s.rows for s in snapshots)])
        self.snapshots = tuple(snapshots)
        self._stores = np.repeat(np.arange(len(snapshots)), [len(s.segments) for s in snapshots])  # of each segment
        self._buffers[col.ROWS], self._n_suffixes = np.ascontiguousarray(rows), rows[:, N_SUFFIXES].tolist()
        self._buffers[col.CURSORS] = np.zeros((_SEQUENCES, 2 * len(rows), _CURSOR), np.int64)
        self._buffers[col.ALLOWED] = np.ones((len(self._buffers[col.STATE]), len(rows)), np.uint8)
        self._buffers[col.STATE][:] = 0
        self.work[col.N_SEGMENTS] = len(rows)
        wide, ids = rows[0, [WIDE, VOCAB]].tolist() if len(rows) else (0, 1)
        self.work[[col.WIDE_IDS, col.IDS]] = wide, min(ids, self.vocab_size)
        for column, buffer in self._buffers.items():
            self.work[column] = buffer.ctypes.data
        self.load_pages()

    def load_pages(self) -> None:
        """Bring the snapshots' pages into memory, as far as half of what is free has room, unless they are there. It waits for nothing:
        until a snapshot's pages are there, nothing is found in it."""
        room = measure_free_memory() // 2
        for snapshot in self.snapshots:
            room -= snapshot.load_pages(room)
        self._show_loaded()

    def wait_until_loaded(self) -> None:
        """Return once all snapshots can be searched."""
        for snapshot in self.snapshots:
            snapshot.wait_until_loaded()
        self._show_loaded()

    def _show_loaded(self) -> None:
        """Search those snapshots whose pages are in memory: of the others there are no entries to search."""
        loading = np.array([snapshot.is_loading for snapshot in self.snapshots], bool)
        self._is_loading = bool(loading.any())
        self._loaded = sum(1 << i for i in np.flatnonzero(~loading).tolist())
        for row, store, whole in zip(self._buffers[col.ROWS], self._stores, self._n_suffixes, strict=True):
            row[N_SUFFIXES] = 0 if loading[store] else whole

    @property
    def loaded_stores(self) -> int:
        """The snapshots that can be searched: i where bit i is set."""
        if self._is_loading:
            self._show_loaded()
        return self._loaded

    def begin(self, slot: int, stores: int = ALL_STORES) -> None:
        """Start a new sequence in this slot, 0 <= slot < max_seqs, or use others than before: snapshot i where bit i is in `stores`."""
        self._buffers[col.STATE][slot] = 0
        self._buffers[col.ALLOWED][slot] = np.array([stores >> i & 1 for i in range(len(self.snapshots))], np.uint8)[self._stores]

    def end(self, slot: int) -> None:
        """End the sequence in this slot."""
        self._buffers[col.STATE][slot] = 0

    def propose(self, slots: np.ndarray, contexts: np.ndarray, fresh: np.ndarray) -> Trees:
        """slots [B] int32, all different; contexts [B, max_match] int32, newest first, -1 pads; fresh [B] int32: tokens appended since
        this slot's last call, -1 where unknown. A draft of what is not in the store is an empty tree."""
        if len(slots) > self.work[col.MAX_SEQS] or contexts.shape != (len(slots), self.max_match) or fresh.shape != slots.shape:
            raise ValueError(f"{slots.shape=}, {contexts.shape=}, {fresh.shape=}: [B], [B, {self.max_match}], [B] with B <= max_seqs")
        if self._is_loading:
            self._show_loaded()
        contexts = np.ascontiguousarray(contexts, np.int32)
        n = propose_batch(self.work, slots, contexts, fresh)
        b = self._buffers
        outputs = (b[column][:n].copy() for column in (col.OUT_TOKENS, col.OUT_PARENTS, col.OUT_COUNTS, col.OUT_MATCH, col.OUT_PLACE))
        return Trees(b[col.OUT_START][: len(slots) + 1].copy(), *outputs)

    def locate(self, place: int) -> Location:
        """Return where a node's token stands. Raises DatastoreCorruptError if the store has no such place, ValueError if it never had."""
        number = place >> PLACE_BITS
        for snapshot in self.snapshots:
            if 0 <= number < len(snapshot.segments):
                return snapshot.locate(number << PLACE_BITS | place & (1 << PLACE_BITS) - 1)
            number -= len(snapshot.segments)
        raise ValueError(f"{place} is in no segment of this matcher")


@njit(cache=True, nogil=True, error_model="numpy")
def propose_batch(work, slots, contexts, fresh):
    """`Matcher.propose` for compiled callers: `contexts` must be contiguous int32 [B, max_match] -> number of nodes written."""
    rows = carray(cast_to_pointer(work[col.ROWS]), (work[col.N_SEGMENTS], ROW), np.int64)
    start = carray(cast_to_pointer(work[col.OUT_START]), work[col.MAX_SEQS] + 1, np.int64)
    lanes = carray(cast_to_pointer(work[col.LANES]), (_LANES, LANE), np.int64)
    cursors = carray(cast_to_pointer(work[col.CURSORS]), (_SEQUENCES, 2 * work[col.N_SEGMENTS], _CURSOR), np.int64)
    searches = carray(cast_to_pointer(work[col.SEARCHES]), (_SEQUENCES, _SEARCH), np.int64)
    address = contexts.ctypes.data
    n = 0
    start[0] = 0
    for first in range(0, len(slots), _SEQUENCES):
        last = min(first + _SEQUENCES, len(slots))
        n_searches = 0
        for b in range(first, last):
            query = address + 4 * work[col.MAX_MATCH] * b
            if _in_range(work, slots[b]) and not _advance_occurrences(work, rows, np.int64(slots[b]), query, np.int64(fresh[b])):
                search = searches[n_searches]
                search[_CONTEXT], search[_ADDRESS], search[_LENGTH] = b, query, _measure_context(work, query)
                n_searches += 1
        _search_segments(work, rows, lanes, cursors, slots, searches[:n_searches])
        at = 0
        for b in range(first, last):
            if _in_range(work, slots[b]):
                slot = np.int64(slots[b])
                if at < n_searches and searches[at, _CONTEXT] == b:
                    _collect_occurrences(work, rows, slot, searches[at, _ADDRESS], cursors[at])
                    at += 1
                n += build_tree(work, rows, slot, n)
            start[b + 1] = n
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def _search_segments(work, rows, lanes, cursors, slots, searches):
    """Place the cursors of every search in each segment that its slot may use; elsewhere they share nothing."""
    allowed = carray(cast_to_pointer(work[col.ALLOWED]), (work[col.MAX_SEQS], work[col.N_SEGMENTS]), np.uint8)
    n = 0
    for s in range(work[col.N_SEGMENTS]):
        for i in range(len(searches)):
            if allowed[slots[searches[i, _CONTEXT]], s] == 0:
                cursors[i, 2 * s, _SHARED], cursors[i, 2 * s + 1, _SHARED] = 0, 0
                continue
            lanes[n, SEGMENT], lanes[n, SEQUENCE] = s, i
            lanes[n, QUERY], lanes[n, LENGTH] = searches[i, _ADDRESS], searches[i, _LENGTH]
            n += 1
            if n == _LANES:
                _search_lanes(work, rows, lanes, n, cursors)
                n = 0
    _search_lanes(work, rows, lanes, n, cursors)


@njit(cache=True, nogil=True, error_model="numpy")
def _search_lanes(work, rows, lanes, n, cursors):
    find_insertions(rows, lanes, n)
    for k in range(n):
        s, i = lanes[k, SEGMENT], lanes[k, SEQUENCE]
        _place_cursors(rows[s], lanes[k], work[col.MIN_MATCH], cursors[i, 2 * s], cursors[i, 2 * s + 1])


@njit(cache=True, nogil=True, error_model="numpy")
def _in_range(work, slot):
    return slot >= 0 and slot < work[col.MAX_SEQS]


@njit(cache=True, nogil=True, error_model="numpy")
def _measure_context(work, query):
    """Return how many tokens a context has: up to the padding, or to an id that the vocabulary does not have."""
    n = np.int64(0)
    while n < work[col.MAX_MATCH] and load_i32(query + 4 * n) >= 0 and load_i32(query + 4 * n) < work[col.IDS]:
        n += 1
    return n


# ---- occurrences


@njit(cache=True, nogil=True, error_model="numpy")
def _advance_occurrences(work, rows, slot, query, fresh):
    """Move a slot's occurrences over the appended tokens, drop those that go on otherwise -> whether that does without a search.

    Lengths grow past `max_match` here, where equal ones would hide that entries that were shorter are not all known.
    """
    cap, wide = work[col.OCCURRENCES], work[col.WIDE_IDS] != 0
    places = carray(cast_to_pointer(work[col.PLACES] + 8 * cap * slot), cap, np.int64)
    matches = carray(cast_to_pointer(work[col.MATCHES] + 4 * cap * slot), cap, np.int32)
    state = carray(cast_to_pointer(work[col.STATE] + 8 * col.N_STATE * slot), col.N_STATE, np.int64)
    if fresh == 0 and state[col.HELD] > 0:
        return True
    if fresh <= 0 or fresh > work[col.MAX_MATCH] or state[col.HELD] == 0 or state[col.AGE] >= REUSES:
        return False
    complete = state[col.COMPLETE]
    mask = (np.int64(1) << PLACE_BITS) - 1
    kept, exact, longest = 0, 0, np.int64(0)
    for i in range(state[col.HELD]):
        row, p = places[i] >> PLACE_BITS, places[i] & mask
        if p + fresh >= rows[row, N_TOKENS]:
            continue
        tokens = rows[row, TOKENS]
        k = 0
        while k < fresh and read_token(tokens, wide, p + k) == load_i32(query + 4 * (fresh - 1 - k)):
            k += 1
        if k < fresh or read_token(tokens, wide, p + fresh) >= work[col.IDS]:
            continue
        exact += matches[i] >= complete
        places[kept] = places[i] + fresh
        matches[kept] = matches[i] + fresh
        longest = max(longest, np.int64(matches[kept]))
        kept += 1
    if exact < MANY and (exact == 0 or longest < LONG_MATCH):
        state[col.HELD] = 0
        return False
    state[col.HELD], state[col.COMPLETE] = kept, complete + fresh
    state[col.AGE] += 1
    return True


@njit(cache=True, nogil=True, error_model="numpy")
def _collect_occurrences(work, rows, slot, query, cursors):
    """Fill a slot with occurrences by falling match length, and keep from which length on they are all there are.

    Two cursors per segment go outward from where the context belongs: the lengths they meet only fall.
    """
    cap, budget = work[col.OCCURRENCES], _INSPECT * work[col.OCCURRENCES]
    places = carray(cast_to_pointer(work[col.PLACES] + 8 * cap * slot), cap, np.int64)
    matches = carray(cast_to_pointer(work[col.MATCHES] + 4 * cap * slot), cap, np.int32)
    state = carray(cast_to_pointer(work[col.STATE] + 8 * col.N_STATE * slot), col.N_STATE, np.int64)
    taken = 0
    state[col.COMPLETE], state[col.AGE] = work[col.MAX_MATCH] + 1, 0
    while taken < cap:
        best = np.int64(0)
        for c in range(len(cursors)):
            best = max(best, cursors[c, _SHARED])
        if best < work[col.MIN_MATCH]:
            break
        for c in range(len(cursors)):
            cursors[c, _FROM] = cursors[c, _INDEX] if cursors[c, _SHARED] == best else -1
        first, more = taken, False
        for c in range(len(cursors)):
            row, step = rows[c >> 1], 2 * (c & 1) - 1
            i, shared = cursors[c, _INDEX], cursors[c, _SHARED]
            while shared == best and budget > 0 and not more:
                p = read_position(row[SUFFIXES], row[WIDTH], i)
                if not is_deleted(row, p):
                    if taken == cap:
                        more = True
                        break
                    places[taken] = np.int64(c >> 1) << PLACE_BITS | p
                    matches[taken] = best
                    taken += 1
                i += step
                _prefetch_entry(row, i + step * _PREFETCH)
                shared = count_entry_agreement(row, i, query, best)
                budget -= 1
            cursors[c, _INDEX], cursors[c, _SHARED] = i, shared
            more |= shared == best
        if more:
            taken = _sample_occurrences(work, rows, query, best, cursors, places, matches, first, taken)
            break
        state[col.COMPLETE] = best
    state[col.HELD] = taken


@njit(cache=True, nogil=True, error_model="numpy")
def _place_cursors(row, lane, least, left, right):
    at = lane[LO] + 1
    left[_INDEX], left[_SHARED], right[_INDEX], right[_SHARED] = at - 1, lane[SHARED_LO], at, lane[SHARED_HI]
    if max(lane[SHARED_LO], lane[SHARED_HI]) >= least:
        for i in range(1, _PREFETCH + 1):
            _prefetch_entry(row, at - 1 - i)
            _prefetch_entry(row, at + i)


@njit(cache=True, nogil=True, error_model="numpy")
def _prefetch_entry(row, i):
    if i >= 0 and i < row[N_SUFFIXES]:
        p = read_position(row[SUFFIXES], row[WIDTH], i)
        prefetch(row[TOKENS] + (p - 1) * (4 if row[WIDE] else 2))


@njit(cache=True, nogil=True, error_model="numpy")
def _sample_occurrences(work, rows, query, best, cursors, places, matches, first, collected):
    """Replace places[first:collected], collected entries of length `best`, by an even sample of all of them -> number of places.

    If all that is sampled is deleted, what was collected stays.
    """
    total = np.int64(0)
    for c in range(len(cursors)):
        cursors[c, _COUNT] = 0
        if cursors[c, _FROM] >= 0:
            stride = 1
            while stride < 1 << 18:  # where `count_run` will look, all at once: it waits for one after the other
                _prefetch_entry(rows[c >> 1], cursors[c, _FROM] + (2 * (c & 1) - 1) * stride)
                stride = 8 * stride + 1
            cursors[c, _COUNT] = count_run(rows[c >> 1], cursors[c, _FROM], 2 * (c & 1) - 1, query, best, False)
            total += cursors[c, _COUNT]
    n = min(len(places) - first, total)
    sample = carray(cast_to_pointer(work[col.TEXTS]), len(places), np.int64)
    c, before = 0, np.int64(0)
    for j in range(n):
        x = (2 * j + 1) * total // (2 * n)
        while x - before >= cursors[c, _COUNT]:
            before += cursors[c, _COUNT]
            c += 1
        row = rows[c >> 1]
        p = read_position(row[SUFFIXES], row[WIDTH], cursors[c, _FROM] + (2 * (c & 1) - 1) * (x - before))
        prefetch(row[TOKENS] + p * (4 if row[WIDE] else 2))
        sample[j] = np.int64(c >> 1) << PLACE_BITS | p
    taken = first
    for j in range(n):
        row, p = rows[sample[j] >> PLACE_BITS], sample[j] & ((np.int64(1) << PLACE_BITS) - 1)
        if p > 0 and p < row[N_TOKENS] and not is_deleted(row, p):
            places[taken], matches[taken] = sample[j], best
            taken += 1
    return taken if taken > first else collected

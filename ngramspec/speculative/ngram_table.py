"""Store the n-gram tables of one sequence: context hash -> which tokens followed it. Knows no probabilities and no trees; all compiled but
`TablePool`, which owns the buffers.

The *event* at position i says "token i followed its contexts". A context of n tokens is keyed by the 64-bit FNV-1a of those tokens, newest
first and each as four little-endian bytes, so that one pass over the last `LADDER[-1]` tokens yields the keys of all orders. The last
`history` events are in the tables; older ones are forgotten exactly.

Memory per sequence, one buffer, plain arrays:

    table   [size, 2] uint64   open addressing, all orders: key | head << 32 | total << 8 | run         (16 bytes, 4 in a cache line)
    tokens  [cap] int32        ring of the last tokens
    links   [cap, K] int32     per event and order: the previous event of the same context

`head` is the latest event of the context, `total` their number, `run` how many of the latest ones agree on the token. A context that always
continued alike is read from one entry; others are counted by following at most `REACH` links back. So recent text counts, no context is
expensive however many continuations it has, and forgetting an event is one decrement. Every event of a longer context is also one of its
shorter ones: a miss at one order ends the look-up, and equal totals mean equal counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from ngramspec.datastore.code_cache import njit
from ngramspec.datastore.numba_intrinsics import cast_to_pointer

# Context lengths in tokens; order n of the literature has a context of n - 1.
LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24)
# The greatest `run` that is counted.
LONG_RUN = 64
# Latest events of a context that are counted.
REACH = 8
# The gapped context: tokens 2 and 3 back, whatever the latest one is. It carries structure over a renamed identifier.
GAP_REACH = 3

FNV_OFFSET = np.uint64(0xCBF29CE484222325)
FNV_PRIME = np.uint64(0x100000001B3)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ZERO, _ONE, _BYTE, _COUNT = np.uint64(0), np.uint64(1), np.uint64(0xFF), np.uint64(0xFFFFFF)
_8, _16, _24, _32 = np.uint64(8), np.uint64(16), np.uint64(24), np.uint64(32)

# columns of the per-sequence state, int64
(TABLE, TOKENS, LINKS, SHIFT, CAP, LENGTH, START, ENTRIES, COPY_AT, COPY_MATCHED, COPY_MISSES, HIT_HISTORY, N_DRAFTED) = range(13)
(
    PREDICTION_ADDRESS,
    PREDICTION_LENGTH,
    PREDICTION_AT,
    PREDICTION_MATCHED,
    PREDICTION_MISSES,
    OUTPUT_CACHE_ROW,
    N_SIMILAR,
    TEMPERATURE,
    STATE_COLUMNS,
) = range(13, 22)
# … address and length of the predicted output, the position in it, tokens matched and missed there; the row of the shared output cache;
# how many tokens of similar files stand before the sequence; its temperature in thousandths

# Tokens around the copied position in which copying may resume after a mismatch.
SCAN_AHEAD, SCAN_BACK = 24, 8


class TableView(NamedTuple):
    """One sequence's arrays, as the compiled functions see them."""

    table: np.ndarray
    tokens: np.ndarray
    links: np.ndarray
    contexts: np.ndarray  # [K] int32: the context lengths in use, a prefix of LADDER


@njit(cache=True, nogil=True)
def view_arrays(state, contexts):
    """Return the arrays that one row of the state points to. Safe while the owner (`proposer`) holds their buffer."""
    table = carray(cast_to_pointer(state[TABLE]), 2 << (64 - state[SHIFT]), np.uint64)
    tokens = carray(cast_to_pointer(state[TOKENS]), state[CAP], np.int32)
    links = carray(cast_to_pointer(state[LINKS]), state[CAP] * (len(contexts) + 1), np.int32)
    return TableView(table, tokens, links, contexts)


@njit(cache=True, nogil=True, forceinline=True)
def _fnv_token(h, token):
    """Continue the 64-bit FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv/) `h` with a token's four bytes."""
    x = np.uint64(token)
    h = (h ^ (x & _BYTE)) * FNV_PRIME
    h = (h ^ ((x >> _8) & _BYTE)) * FNV_PRIME
    h = (h ^ ((x >> _16) & _BYTE)) * FNV_PRIME
    return (h ^ ((x >> _24) & _BYTE)) * FNV_PRIME


@njit(cache=True, nogil=True, forceinline=True)
def _home_entry(key, shift):
    return np.int64((key * _GOLDEN) >> np.uint64(shift))


@njit(cache=True, nogil=True, forceinline=True)
def _find_entry(table, shift, key):
    """Return the index of the entry with this key, or of the empty one where it would go."""
    mask = (len(table) >> 1) - 1
    s = _home_entry(key, shift)
    while table[2 * s] != key and table[2 * s] != _ZERO:
        s = (s + 1) & mask
    return s


@njit(cache=True, nogil=True, forceinline=True)
def _pack_entry(head, total, run):
    return (np.uint64(head) << _32) | (np.uint64(total) << _8) | np.uint64(run)


@njit(cache=True, nogil=True)
def _remove_entry(table, shift, hole):
    """Delete an entry and close the gap, so that no probe sequence breaks and no tombstone stays."""
    mask = (len(table) >> 1) - 1
    j = hole
    while True:
        j = (j + 1) & mask
        key = table[2 * j]
        if key == _ZERO:
            break
        if ((j - _home_entry(key, shift)) & mask) >= ((j - hole) & mask):
            table[2 * hole] = key
            table[2 * hole + 1] = table[2 * j + 1]
            hole = j
    table[2 * hole] = _ZERO


@njit(cache=True, nogil=True, forceinline=True)
def _gap_key(a, b):
    h = _fnv_token(_fnv_token(FNV_OFFSET ^ _GOLDEN, a), b)
    return h if h != _ZERO else _ONE


@njit(cache=True, nogil=True, forceinline=True)
def _event_keys(seq, position, keys):
    """Write the keys of the contexts that end just before `position`, the gapped one last; return how many of the ladder have one."""
    mask, K = len(seq.tokens) - 1, len(seq.contexts)
    if position >= GAP_REACH:
        keys[K] = _gap_key(seq.tokens[(position - 2) & mask], seq.tokens[(position - 3) & mask])
    h, n = FNV_OFFSET, 0
    for k in range(K):
        if seq.contexts[k] > position:
            return k
        while n < seq.contexts[k]:
            n += 1
            h = _fnv_token(h, seq.tokens[(position - n) & mask])
        keys[k] = h if h != _ZERO else _ONE
    return K


@njit(cache=True, nogil=True, forceinline=True)
def _add_event(state, seq, position, keys):
    K, mask = len(seq.contexts) + 1, len(seq.tokens) - 1
    token = seq.tokens[position & mask]
    row = (position & mask) * K
    n = _event_keys(seq, position, keys)
    for k in range(K):
        if k >= n and (k < K - 1 or position < GAP_REACH):
            continue
        s = _find_entry(seq.table, state[SHIFT], keys[k])
        if seq.table[2 * s] == _ZERO:
            seq.table[2 * s] = keys[k]
            seq.table[2 * s + 1] = _pack_entry(position, 1, 1)
            seq.links[row + k] = -1
            state[ENTRIES] += 1
        else:
            value = seq.table[2 * s + 1]
            head = np.int64(value >> _32)
            run = min(np.int64(value & _BYTE) + 1, LONG_RUN) if seq.tokens[head & mask] == token else 1
            seq.table[2 * s + 1] = _pack_entry(position, np.int64((value >> _8) & _COUNT) + 1, run)
            seq.links[row + k] = head


@njit(cache=True, nogil=True, forceinline=True)
def _forget_event(state, seq, position, keys):
    K = len(seq.contexts) + 1
    n = _event_keys(seq, position, keys)
    for k in range(K):
        if k >= n and (k < K - 1 or position < GAP_REACH):
            continue
        s = _find_entry(seq.table, state[SHIFT], keys[k])
        value = seq.table[2 * s + 1]
        total = np.int64((value >> _8) & _COUNT) - 1
        if total == 0:
            _remove_entry(seq.table, state[SHIFT], s)
            state[ENTRIES] -= 1
        else:
            seq.table[2 * s + 1] = _pack_entry(value >> _32, total, min(np.int64(value & _BYTE), total))


@njit(cache=True, nogil=True)
def has_room_for(state, contexts, history, n):
    """Return whether n more tokens fit without a larger buffer."""
    size = 1 << (64 - state[SHIFT])
    ring = min(state[LENGTH] + n, history + LADDER[-1] + n)
    return ring <= state[CAP] and state[ENTRIES] + n * (len(contexts) + 1) <= size - (size >> 2)


@njit(cache=True, nogil=True, forceinline=True)
def push_token(state, seq, token, history, keys):
    """Append one token and its events; forget the event that leaves the window."""
    i = state[LENGTH]
    seq.tokens[i & (len(seq.tokens) - 1)] = token
    state[LENGTH] = i + 1
    _add_event(state, seq, i, keys)
    if i + 1 - state[START] > history:
        _forget_event(state, seq, state[START], keys)
        state[START] += 1


@njit(cache=True, nogil=True)
def fill_tables(state, contexts, tokens, history):
    """Fill empty tables with the last `history` events of tokens [n] int32, and the tokens that their contexts need."""
    seq = view_arrays(state, contexts)
    keys = np.empty(len(contexts) + 1, np.uint64)
    n = len(tokens)
    for i in range(n):
        seq.tokens[i] = tokens[i]
    state[LENGTH], state[START] = n, max(n - history, 0)
    for i in range(state[START], n):
        _add_event(state, seq, i, keys)


@njit(cache=True, nogil=True)
def append_tokens(state, contexts, tokens, history):
    """Append tokens [n] int32. The caller has made room (`has_room_for`)."""
    seq = view_arrays(state, contexts)
    keys = np.empty(len(contexts) + 1, np.uint64)
    for token in tokens:
        push_token(state, seq, token, history, keys)


@njit(cache=True, nogil=True)
def copy_tables(old, new, contexts):
    """Copy a sequence's tables into a larger, zeroed buffer."""
    a, b = view_arrays(old, contexts), view_arrays(new, contexts)
    K = len(contexts) + 1
    for s in range(0, len(a.table), 2):
        if a.table[s] != _ZERO:
            t = _find_entry(b.table, new[SHIFT], a.table[s])
            b.table[2 * t] = a.table[s]
            b.table[2 * t + 1] = a.table[s + 1]
    for i in range(max(old[LENGTH] - old[CAP], 0), old[LENGTH]):
        p, q = i & (old[CAP] - 1), i & (new[CAP] - 1)
        b.tokens[q] = a.tokens[p]
        for j in range(K):  # copying a slice would compile an error message of other shapes, for 2 s
            b.links[q * K + j] = a.links[p * K + j]


@njit(cache=True, nogil=True, forceinline=True)
def _read_entry(table, s, heads, totals, runs, k):
    value = table[2 * s + 1]
    heads[k] = np.int64(value >> _32)
    totals[k] = np.int64((value >> _8) & _COUNT)
    runs[k] = np.int64(value & _BYTE)


@njit(cache=True, nogil=True, forceinline=True)
def look_up(state, seq, other_state, other, recent, n_recent, heads, totals, runs):
    """Look the contexts that end in `recent` (newest first) up in a sequence's tables and another's; return how many orders each has.

    Entries are written shortest context first; the other's begin at `len(contexts) + 1`, after the gapped context.
    """
    h, n, K = FNV_OFFSET, 0, len(seq.contexts)
    mine, theirs = 0, 0
    for k in range(K):
        if seq.contexts[k] > n_recent or (mine < k and theirs < k):
            break
        while n < seq.contexts[k]:
            h = _fnv_token(h, recent[n])
            n += 1
        key = h if h != _ZERO else _ONE
        if mine == k:
            s = _find_entry(seq.table, state[SHIFT], key)
            if seq.table[2 * s] != _ZERO:
                _read_entry(seq.table, s, heads, totals, runs, k)
                mine = k + 1
        if theirs == k:
            s = _find_entry(other.table, other_state[SHIFT], key)
            if other.table[2 * s] != _ZERO:
                _read_entry(other.table, s, heads, totals, runs, K + 1 + k)
                theirs = k + 1
    return mine, theirs


@njit(cache=True, nogil=True, forceinline=True)
def look_up_gap(state, seq, recent, n_recent, heads, totals, runs, k):
    """Look the gapped context up; write its entry at k; return whether there is one."""
    if n_recent < GAP_REACH or len(seq.contexts) == 0:
        return False
    s = _find_entry(seq.table, state[SHIFT], _gap_key(recent[1], recent[2]))
    _read_entry(seq.table, s, heads, totals, runs, k)
    return seq.table[2 * s] != _ZERO


@njit(cache=True, nogil=True)
def follow_text(tokens, mask, oldest, length, at, matched, misses, token):
    """Advance the copied position by one token; return (at, matched, misses).

    `tokens` [mask + 1] is a ring that holds positions oldest .. length - 1. `at` is the position whose token is expected next (-1: none),
    `matched` how many tokens in a row agreed, `misses` a bit per token, newest lowest. After a mismatch the token is searched around the
    position, so that copying resumes after an edit.
    """
    if at < 0:
        return at, matched, misses
    if at < length and tokens[at & mask] == token:
        return at + 1, matched + 1, (misses << 1) & 0xFFFF
    misses = ((misses << 1) | 1) & 0xFFFF
    for d in range(1, SCAN_AHEAD + 1):
        if at + d < length and tokens[(at + d) & mask] == token:
            return at + d + 1, 1, misses
        if d <= SCAN_BACK and oldest <= at - d < length and tokens[(at - d) & mask] == token:
            return at - d + 1, 1, misses
    return at + 1 if misses & 2 == 0 else at, 0, misses


@njit(cache=True, nogil=True)
def view_prediction(state):
    """Return the predicted output [n] int32 of a sequence."""
    return carray(cast_to_pointer(state[PREDICTION_ADDRESS]), state[PREDICTION_LENGTH], np.int32)


@njit(cache=True, nogil=True)
def find_resumption(tokens, at, recent, n):
    """Return the position after the occurrence of the latest n tokens nearest to `at` (those ahead count as nearer), or -1.

    recent [>= n] newest first; tokens [N].
    """
    best, where = np.int64(1) << 60, np.int64(-1)
    for i in range(n, len(tokens) + 1):
        if tokens[i - 1] == recent[0]:
            k = 1
            while k < n and tokens[i - 1 - k] == recent[k]:
                k += 1
            away = i - at if i >= at else 3 * (at - i)
            if k == n and away < best:
                best, where = away, i
    return where


def next_power_of_two(n: int) -> int:
    """Return the least power of two that is n or more, at least 2."""
    return 1 << max(int(n) - 1, 1).bit_length()


class TablePool:
    """N-gram tables of several sequences, each a row of states and the buffer that it points into."""

    def __init__(self, n: int, history: int, n_contexts: int) -> None:
        self.states = np.zeros((n, STATE_COLUMNS), np.int64)
        self.buffers: list[np.ndarray | None] = [None] * n
        self.history, self.n_links = history, n_contexts + 1

    def allocate(self, row: int, cap: int, entries: int) -> None:
        """Allocate a zeroed buffer for `cap` tokens and `entries` table entries, and reset the row's state."""
        cap, size = next_power_of_two(cap), next_power_of_two(entries + (entries >> 1) + 4)
        buffer = np.zeros(2 * size + 8 + (cap * (self.n_links + 1) + 1) // 2, np.uint64)
        address = (buffer.ctypes.data + 63) & ~63
        state = self.states[row]
        state[:] = 0
        state[TABLE], state[SHIFT] = address, 65 - size.bit_length()
        state[TOKENS], state[CAP] = address + 16 * size, cap
        state[LINKS] = state[TOKENS] + 4 * cap
        state[[COPY_AT, PREDICTION_AT, N_DRAFTED]] = -1
        state[HIT_HISTORY] = 1
        self.buffers[row] = buffer

    def enlarge_buffer(self, row: int, n: int, contexts: np.ndarray) -> None:
        """Make room for n more tokens."""
        old, old_buffer = self.states[row].copy(), self.buffers[row]  # the buffer lives until its tables are copied
        assert old_buffer is not None, f"slot {row} was never begun"
        length = min(int(old[LENGTH]), self.history + LADDER[-1]) + n
        entries = int(old[ENTRIES]) + n * self.n_links
        self.allocate(row, cap=length + length // 8, entries=entries + entries // 8)
        moved = [i for i in range(STATE_COLUMNS) if i not in (TABLE, TOKENS, LINKS, SHIFT, CAP)]
        self.states[row, moved] = old[moved]
        copy_tables(old, self.states[row], contexts)

    def free(self, row: int) -> None:
        self.buffers[row] = None
        self.states[row] = 0

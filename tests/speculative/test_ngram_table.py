"""The tables against a brute-force model: hashes, counts, order, forgetting, growth."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.speculative import ngram_table
from ngramspec.speculative.drafter import DraftOptions
from ngramspec.speculative.proposer import TreeProposer

NONE = [np.empty(0, np.int32)]


def fnv1a(data: bytes) -> int:
    """64-bit FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv/)."""
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"", 0xCBF29CE484222325),
        (b"a", 0xAF63DC4C8601EC8C),
        (b"b", 0xAF63DF4C8601F1A5),
        (b"foo", 0xDCB27518FED9D577),
        (b"foob", 0xDD120E790C2512AF),
        (b"fooba", 0xCAC165AFA2FEF40A),
        (b"foobar", 0x85944171F73967E8),
        (b"\xff\x00\x00\x01", 0x6961196491CC682D),
    ],
)
def test_fnv1a_published_vectors(data, value):
    assert fnv1a(data) == value


def test_token_keys_are_fnv1a_of_little_endian_bytes_newest_first():
    tokens = np.array([7, 300, 70_000, 5, 49_151, 2], np.int32)
    proposer = started(tokens, history=64)
    keys = np.zeros(len(proposer._contexts) + 1, np.uint64)
    seq = ngram_table.view_arrays(proposer._states[0], proposer._contexts)
    assert ngram_table._event_keys(seq, 6, keys) == 5  # contexts of 1, 2, 3, 4 and 6 tokens
    for k, n in enumerate((1, 2, 3, 4, 6)):
        assert int(keys[k]) == fnv1a(b"".join(int(t).to_bytes(4, "little") for t in tokens[::-1][:n]))


def started(tokens, history, **options) -> TreeProposer:
    proposer = TreeProposer(DraftOptions(vocab_size=2**20, max_seqs=2, history=history, **options))
    proposer.begin(0, np.asarray(tokens, np.int32))
    return proposer


def feed(proposer: TreeProposer, tokens) -> None:
    if len(tokens):
        proposer.observe(np.zeros(1, np.int32), [np.asarray(tokens, np.int32)], NONE)


def read(proposer: TreeProposer, text) -> dict[int, tuple[int, list[tuple[int, int, int]]]]:
    """Context length -> (total, continuations as (token, count, last position)), as the tables say."""
    state, contexts = proposer._states[0], proposer._contexts
    seq = ngram_table.view_arrays(state, contexts)
    recent = np.array(list(text[::-1][: ngram_table.LADDER[-1]]), np.int32)
    K, mask = len(contexts), len(seq.tokens) - 1
    heads, totals, runs = (np.zeros(2 * K + 2, np.int64) for _ in range(3))
    found, _ = ngram_table.look_up(state, seq, state, seq, recent, len(recent), heads, totals, runs)
    out = {}
    for k in range(found):
        counts, lasts, p = Counter(), {}, int(heads[k])
        for _ in range(min(int(totals[k]), ngram_table.REACH)):
            token = int(seq.tokens[p & mask])
            counts[token] += 1
            lasts.setdefault(token, p)
            p = int(seq.links[(p & mask) * (K + 1) + k])
        out[int(contexts[k])] = int(totals[k]), sorted(((x, c, lasts[x]) for x, c in counts.items()), key=lambda e: (-e[1], -e[2]))
    return out


def memory(proposer: TreeProposer) -> int:
    """Bytes that the tables take."""
    buffer = proposer._buffers[0]
    return 0 if buffer is None else buffer.nbytes


def expected(text, history: int, contexts) -> dict[int, tuple[int, list[tuple[int, int, int]]]]:
    """The same from the text itself: events of the last `history` positions, of which the latest REACH of a context are counted."""
    out = {}
    for n in contexts:
        if len(text) < n:
            break
        last = list(text[len(text) - n :])
        events = [i for i in range(max(n, len(text) - history), len(text)) if list(text[i - n : i]) == last]
        seen = Counter(text[i] for i in events[-ngram_table.REACH :])
        latest = {text[i]: i for i in events}
        if events:
            out[n] = (len(events), sorted(((x, c, latest[x]) for x, c in seen.items()), key=lambda e: (-e[1], -e[2])))
    return out


TEXTS = st.lists(st.integers(0, 3), min_size=0, max_size=150)


@settings(max_examples=150, deadline=None)
@given(
    TEXTS, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=5), st.sampled_from([16, 40, 1000]), st.integers(2, 25)
)
def test_tables_equal_brute_force(prompt, pieces, history, max_order):
    """After every step: totals, counts, order and latest positions of every context, with a sliding window and growing buffers."""
    proposer = started(prompt, history, max_order=max_order)
    text = list(prompt)
    offset = max(len(prompt) - history - ngram_table.LADDER[-1], 0)  # positions count from the first token that was kept
    for piece in [[], *pieces]:
        feed(proposer, piece)
        text += piece
        want = expected(text, history, proposer._contexts.tolist())
        want = {n: (total, [(x, c, p - offset) for x, c, p in found]) for n, (total, found) in want.items()}
        assert read(proposer, text) == want


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=200, max_size=400), st.sampled_from([16, 33, 64]))
def test_what_leaves_the_window_is_exactly_forgotten(text, history):
    """A sequence that went through a long text holds the entries of one that only ever saw the end of it."""
    long = started(text[:50], history)
    for i in range(50, len(text), 7):
        feed(long, text[i : i + 7])
    short = started(text, history)
    assert entries(long) == entries(short)


def entries(proposer: TreeProposer) -> list[tuple[int, int]]:
    """Every entry of the tables as (key, total), sorted."""
    table = ngram_table.view_arrays(proposer._states[0], proposer._contexts).table.reshape(-1, 2)
    rows = table[table[:, 0] != 0]
    assert len(rows) == proposer._states[0, ngram_table.ENTRIES]
    return sorted((int(key), int(value) >> 16 & 0xFFFF) for key, value in rows)


def test_growth_keeps_everything():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50, 5000).astype(np.int32)
    grown, whole = started(text[:10], 60_000), started(text, 60_000)
    first = memory(grown)
    for i in range(10, len(text), 13):
        feed(grown, text[i : i + 13])
    assert memory(grown) > first
    assert entries(grown) == entries(whole)
    assert read(grown, text.tolist()) == read(whole, text.tolist())


def test_memory_is_bounded_and_freed():
    proposer = started(np.arange(100), history=500)
    rng = np.random.default_rng(1)
    sizes = []
    for _ in range(60):
        feed(proposer, rng.integers(0, 100_000, 200))
        sizes.append(memory(proposer))
    assert sizes[-1] == sizes[10], "a full window must not grow any more"
    assert sizes[-1] < 500 * 2000
    proposer.end(0)
    assert memory(proposer) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_following_a_text_reads_nothing_beside_it(text, tokens):
    """Neither what is before the text nor what is after it; the position may be one beyond its end."""

    def follow(beside):
        padded = np.array([beside] * 60 + text + [beside] * 60, np.int32)[60:]
        state, states = (np.int64(0), np.int64(0), np.int64(0)), []
        for token in tokens:
            state = ngram_table.follow_text(padded, np.int64(-1), np.int64(0), np.int64(len(text)), *state, np.int64(token))
            states.append(state)
        return states

    assert follow(4) == follow(5)

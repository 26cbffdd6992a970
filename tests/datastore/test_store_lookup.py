"""Look-ups against a search through all documents by plain Python: the longest match, exact counts, where they come from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_store
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.datastore.lookup import Matcher, Trees
from ngramspec.datastore.reader import Datastore, Snapshot

MAX_MATCH = 8
EVERYTHING: dict[str, Any] = {"max_match": MAX_MATCH, "nodes": 4096, "occurrences": 128, "depth": 16, "min_chance": 2.0**-31}

Corpus = list[list[list[int]]]  # segments of documents of token ids
Path_ = tuple[int, ...]


@st.composite
def corpora(draw: st.DrawFn) -> tuple[Corpus, list[list[int]], int]:
    """(segments, dead documents of each, vocabulary size): at most 120 tokens, few different ones."""
    vocab_size = draw(st.sampled_from([3, 70_000]))
    ids = st.sampled_from([0, 1, vocab_size - 1])
    segments = draw(st.lists(st.lists(st.lists(ids, max_size=15), max_size=4), min_size=1, max_size=2))
    dead = [sorted(draw(st.sets(st.integers(0, len(s) - 1), max_size=2))) if s else [] for s in segments]
    return segments, dead, vocab_size


def count_agreement(text: list[int], p: int, context: list[int], most: int) -> int:
    """How many tokens before p are the last ones of the context."""
    k = 0
    while k < min(p, len(context), most) and text[p - 1 - k] == context[-1 - k]:
        k += 1
    return k


def occurrences(corpus: Corpus, dead: list[list[int]], context: list[int], least: int, most: int) -> list[tuple[int, list[int]]]:
    """(length, what follows) of every place in a live document after at least `least` tokens of the context."""
    found = []
    for segment, gone in zip(corpus, dead, strict=True):
        for number, text in enumerate(segment):
            for p in range(1, len(text)):
                if number not in gone and (length := count_agreement(text, p, context, most)) >= least:
                    found.append((length, text[p:]))
    return found


def wanted_tree(found: list[tuple[int, list[int]]], depth: int) -> dict[Path_, tuple[int, int]]:
    """path -> (count, longest match)."""
    counts: Counter[Path_] = Counter()
    longest: dict[Path_, int] = {}
    for length, text in found:
        for n in range(1, min(depth, len(text)) + 1):
            path = tuple(text[:n])
            counts[path] += 1
            longest[path] = max(longest.get(path, 0), length)
    return {path: (counts[path], longest[path]) for path in counts}


def read_tree(trees: Trees, b: int = 0) -> dict[Path_, tuple[int, int]]:
    """path -> (count, match); checks the shape on the way."""
    begin, end = trees.start[b], trees.start[b + 1]
    paths: list[Path_] = []
    for i in range(begin, end):
        parent = trees.parents[i]
        assert -1 <= parent < i - begin
        paths.append((*(paths[parent] if parent >= 0 else ()), int(trees.tokens[i])))
    assert len(set(paths)) == len(paths)
    return {path: (int(trees.counts[begin + i]), int(trees.match[begin + i])) for i, path in enumerate(paths)}


def row(context: list[int], max_match: int = MAX_MATCH) -> np.ndarray:
    """[1, max_match] int32, newest first."""
    newest = context[::-1][:max_match]
    return np.array([newest + [-1] * (max_match - len(newest))], np.int32)


def propose(matcher: Matcher, context: list[int], fresh: int = -1, slot: int = 0) -> Trees:
    return matcher.propose(np.array([slot], np.int32), row(context, matcher.max_match), np.array([fresh], np.int32))


def check_places(snapshot: Snapshot, trees: Trees, context: list[int], max_match: int) -> None:
    """Every node's place holds its token, after its path, after as much of the context as it says, and in one live document."""
    live = {(d.segment, d.number) for d in snapshot.iterate_documents()}
    paths = list(read_tree(trees))
    for i, path in enumerate(paths):
        segment, position = int(trees.place[i]) >> 40, int(trees.place[i]) & (1 << 40) - 1
        found = snapshot.locate(int(trees.place[i]))
        docs = [n for s, n in live if s == segment and found.path == f"{n}/é.py"]
        text = snapshot.text_tokens(segment, docs[0]).tolist()
        assert text[found.offset] == snapshot.segments[segment].tokens[position]
        start = found.offset - len(path) + 1
        assert tuple(text[start : found.offset + 1]) == path
        assert count_agreement(text, start, context, max_match) == trees.match[i]


@given(corpus=corpora(), context=st.lists(st.integers(0, 2), max_size=12), min_match=st.integers(1, 3), split=st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_tree_is_what_a_search_through_all_documents_finds(
    tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Corpus, list[list[int]], int], context: list[int], min_match: int, split: bool
) -> None:
    segments, dead, vocab_size = corpus
    context = [vocab_size - 1 if token == 2 else token for token in context]
    folder = tmp_path_factory.mktemp("store")
    if split:  # a store per segment
        for i, segment in enumerate(segments):
            tiny_store.write_store(folder / str(i), [segment], vocab_size, [dead[i]])
        snapshots = [Datastore.open(folder / str(i)).snapshot for i in range(len(segments))]
    else:
        tiny_store.write_store(folder, segments, vocab_size, dead)
        snapshots = [Datastore.open(folder).snapshot]
    matcher = Matcher(snapshots, 1, min_match=min_match, **EVERYTHING)
    trees = propose(matcher, context)
    assert read_tree(trees) == wanted_tree(occurrences(segments, dead, context, min_match, MAX_MATCH), EVERYTHING["depth"])
    if not split:
        check_places(snapshots[0], trees, context, MAX_MATCH)
    for node in range(len(trees.tokens)):
        assert matcher.locate(int(trees.place[node])).line >= 1


@given(corpus=corpora(), context=st.lists(st.integers(0, 2), max_size=12), min_match=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_a_look_up_for_people_finds_the_longest_live_match(
    tmp_path_factory: pytest.TempPathFactory, corpus: tuple[Corpus, list[list[int]], int], context: list[int], min_match: int
) -> None:
    segments, dead, vocab_size = corpus
    context = [vocab_size - 1 if token == 2 else token for token in context]
    folder = tmp_path_factory.mktemp("store")
    tiny_store.write_store(folder, segments, vocab_size, dead)
    match = Datastore.open(folder).lookup(context, max_match=MAX_MATCH, min_match=min_match, limit=100)
    found = occurrences(segments, dead, context, min_match, MAX_MATCH)
    longest = max((length for length, _ in found), default=0)
    following = Counter(text[0] for length, text in found if length == longest)
    assert (match.length, match.count) == (longest, following.total())
    assert dict(match.continuations) == following
    assert [count for _, count in match.continuations] == sorted(following.values(), reverse=True)
    assert (len(match.locations), match.complete) == (match.count, True)


@given(corpus=corpora(), start=st.lists(st.integers(0, 2), min_size=1, max_size=6), steps=st.data(), room=st.sampled_from([3, 8, 128]))
@settings(max_examples=200, deadline=None)
def test_a_text_that_is_followed_keeps_the_longest_match(
    tmp_path_factory: pytest.TempPathFactory,
    corpus: tuple[Corpus, list[list[int]], int],
    start: list[int],
    steps: st.DataObject,
    room: int,
) -> None:
    """Without a search the longest match is known, all its occurrences if there was room, and nothing that is not an occurrence."""
    segments, dead, vocab_size = corpus
    folder = tmp_path_factory.mktemp("store")
    tiny_store.write_store(folder, segments, vocab_size, dead)
    snapshot = Datastore.open(folder).snapshot
    matcher = Matcher([snapshot], 2, min_match=1, **{**EVERYTHING, "occurrences": room})
    context = [vocab_size - 1 if token == 2 else token for token in start]
    fresh = -1
    for _ in range(6):
        trees = propose(matcher, context, fresh, slot=1)
        got = read_tree(trees)
        found = occurrences(segments, dead, context, 1, MAX_MATCH)
        wanted = wanted_tree(found, EVERYTHING["depth"])
        assert got.keys() <= wanted.keys()
        assert all(got[path][0] <= wanted[path][0] and got[path][1] <= wanted[path][1] for path in got)
        longest = max((length for length, _ in found), default=0)
        exact = wanted_tree([(length, text) for length, text in found if length == longest], EVERYTHING["depth"])
        n_longest = sum(length == longest for length, _ in found)
        assert max((match for _, match in got.values()), default=0) == longest
        n_inspected = len(occurrences(segments, [[]] * len(segments), context, 1, MAX_MATCH))  # dead ones too: work is bounded
        assert (
            n_longest > room or n_inspected > 8 * room or all(got[path][0] >= exact[path][0] and got[path][1] == longest for path in exact)
        )
        check_places(snapshot, trees, context, MAX_MATCH)
        following = steps.draw(st.sampled_from(sorted(got) or [(0,)]))
        appended = [*following, *steps.draw(st.lists(st.sampled_from([0, 1, vocab_size - 1]), max_size=1))]
        context += appended
        fresh = len(appended)


def test_a_sample_of_dead_entries_alone_leaves_what_was_collected(tmp_path: Path) -> None:
    tiny_store.write_store(tmp_path, [[[0, 0, 0, 0], [0, 0, 0, 0, 0]]], 3, [[0]])
    matcher = Matcher([Datastore.open(tmp_path).snapshot], 1, min_match=1, **{**EVERYTHING, "occurrences": 3})
    assert read_tree(propose(matcher, [0])) == {(0,): (3, 1), (0, 0): (2, 1), (0, 0, 0): (1, 1)}


def test_following_needs_no_search(tmp_path: Path) -> None:
    """A longer match that began meanwhile elsewhere cannot exist; shorter ones are found again after a few steps."""
    text = np.random.default_rng(0).permutation(200).tolist()
    tiny_store.write_store(tmp_path, [[text]], 200)
    matcher = Matcher([Datastore.open(tmp_path).snapshot], 1, min_match=2, max_match=64)
    context = text[:30]
    trees = propose(matcher, context)
    for fresh in (5, 24, 1, 20):
        assert [n for n, _ in read_tree(trees).values()] == [1] * min(24, 200 - len(context))
        context = context + text[len(context) : len(context) + fresh]
        trees = propose(matcher, context, fresh)
        assert trees.match[0] == min(len(context), 64)
        assert trees.tokens.tolist() == text[len(context) : len(context) + 24]
    stray = [*context, 3, 5]
    assert len(propose(matcher, stray, 2).tokens) == (2 if text.index(3) + 1 == text.index(5) else 0)


def test_a_sample_is_not_followed_as_if_it_were_all(tmp_path: Path) -> None:
    """24 places after a long text, room for 8, and 8 of them go on with 90: after 90 all 8 are found, whichever were in the sample."""
    phrase = list(range(1, 31))
    documents = [[40 + i, *phrase, 90 if i % 3 == 0 else 91, 92] for i in range(24)]
    tiny_store.write_store(tmp_path, [documents], 99)
    matcher = Matcher([Datastore.open(tmp_path).snapshot], 1, occurrences=8)
    sampled = read_tree(propose(matcher, phrase))
    assert 0 < sampled[(90,)][0] < 8
    assert read_tree(propose(matcher, [*phrase, 90], 1)) == {(92,): (8, 31)}


def test_sequences_of_a_batch_do_not_meet(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 4, 300).tolist() for _ in range(4)]
    tiny_store.write_store(tmp_path, [documents[:2], documents[2:]], 4)
    snapshot = Datastore.open(tmp_path).snapshot
    matcher = Matcher([snapshot], 5, max_match=MAX_MATCH)
    contexts = np.concatenate([row(documents[i % 4][: 40 + i]) for i in range(5)])
    slots = np.array([3, 1, 0, 4, 2], np.int32)
    unknown = np.full(5, -1, np.int32)
    batch = matcher.propose(slots, contexts, unknown)
    for b in range(5):
        alone = Matcher([snapshot], 1, max_match=MAX_MATCH).propose(slots[:1] * 0, contexts[b : b + 1], unknown[:1])
        for name in ("tokens", "parents", "counts", "match", "place"):
            assert getattr(batch, name)[batch.start[b] : batch.start[b + 1]].tolist() == getattr(alone, name).tolist()
    again = matcher.propose(slots, contexts, unknown * 0)
    assert all((a == b).all() for a, b in zip(batch, again, strict=True))
    matcher.begin(3)
    other = matcher.propose(slots[:1], contexts[1:2], np.zeros(1, np.int32))  # nothing is known of a new sequence
    assert other.tokens.tolist() == batch.tokens[batch.start[1] : batch.start[2]].tolist()


def test_too_many_occurrences_are_sampled_evenly(tmp_path: Path) -> None:
    """Of 3,000 occurrences after 5, 6, a quarter go on with 1; what stands before them is spread evenly over both."""
    rng = np.random.default_rng(2)
    document: list[int] = []
    for i in range(3000):
        document += [int(rng.integers(10, 1000)), 5, 6, 1 if i % 4 == 0 else 2]
    tiny_store.write_store(tmp_path, [[document[:6000]], [document[6000:]]], 1000)
    matcher = Matcher([Datastore.open(tmp_path).snapshot], 1, nodes=2, occurrences=64)
    trees = propose(matcher, [1, 5, 6])
    counts = dict(zip(trees.tokens.tolist(), trees.counts.tolist(), strict=True))
    assert counts.keys() == {1, 2}
    assert counts[1] + counts[2] == 64
    assert abs(counts[1] - 16) <= 14  # four standard deviations of a random sample


def test_dead_documents_do_not_hide_a_live_one(tmp_path: Path) -> None:
    text = [1, 2, 3, 4, 5, 6]
    tiny_store.write_store(tmp_path, [[text] * 50, [[7, *text[1:]]]], 9, dead=[list(range(50)), []])
    matcher = Matcher([Datastore.open(tmp_path).snapshot], 1)
    trees = propose(matcher, [1, 2, 3])
    assert (trees.tokens.tolist(), trees.counts.tolist(), trees.match.tolist()) == ([4, 5, 6], [1] * 3, [2] * 3)


def test_the_next_generation_is_looked_up_after_a_reset(tmp_path: Path) -> None:
    tiny_store.write_store(tmp_path, [[[1, 2, 3]]], 9)
    store = Datastore.open(tmp_path)
    matcher = Matcher([store.snapshot], 1)
    assert propose(matcher, [1, 2]).tokens.tolist() == [3]
    tiny_store.write_store(tmp_path, [[[1, 2, 4]], []], 9, generation=2)
    assert store.refresh()
    assert propose(matcher, [1, 2], 0).tokens.tolist() == [3]
    matcher.reset([store.snapshot])
    assert propose(matcher, [1, 2], 0).tokens.tolist() == [4]
    matcher.reset([])
    assert propose(matcher, [1, 2]).tokens.tolist() == []


@pytest.mark.parametrize("context", [[], [-1], [1, 99999], [8], [2**31 - 1, 1, 2], [0] * 64])
def test_a_context_that_the_store_does_not_have_is_an_empty_tree(tmp_path: Path, context: list[int]) -> None:
    tiny_store.write_store(tmp_path, [[[1, 2, 3], [1], []]], 9)
    matcher = Matcher([Datastore.open(tmp_path).snapshot], 1)
    assert len(propose(matcher, context).tokens) == (1 if context[-2:] == [1, 2] else 0)


def test_more_sequences_than_are_searched_at_once(tmp_path: Path) -> None:
    """Some followed, some new, some without a match, some slots that do not exist: each as if alone."""
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 5, 400).tolist() for _ in range(2)]
    tiny_store.write_store(tmp_path, [documents[:1], documents[1:]], 9)
    snapshot = Datastore.open(tmp_path).snapshot
    many = Matcher([snapshot], 40, max_match=MAX_MATCH)
    alone = [Matcher([snapshot], 1, max_match=MAX_MATCH) for _ in range(40)]
    slots = rng.permutation(40).astype(np.int32)
    ends = rng.integers(20, 300, 40)
    fresh = np.full(40, -1, np.int32)
    for _ in range(4):
        contexts = np.concatenate([row(documents[b % 2][: ends[b]] if b % 5 else [8, 8]) for b in range(40)])
        trees = many.propose(slots, contexts, fresh)
        for b in range(40):
            single = alone[b].propose(np.zeros(1, np.int32), contexts[b : b + 1], fresh[b : b + 1])
            for name in ("tokens", "parents", "counts", "match", "place"):
                assert getattr(trees, name)[trees.start[b] : trees.start[b + 1]].tolist() == getattr(single, name).tolist()
        fresh = rng.integers(0, 6, 40).astype(np.int32)
        ends = ends + fresh
        fresh[rng.random(40) < 0.3] = -1
    outside = np.array([-1, 40, 2**31 - 1], np.int32)
    assert len(many.propose(outside, contexts[1:4], fresh[:3]).tokens) == 0


@pytest.mark.parametrize("n_stores", [2, 80])
def test_a_sequence_finds_nothing_in_stores_that_it_may_not_use(tmp_path: Path, n_stores: int) -> None:
    """Each sequence as with a matcher that has its stores alone: searched, followed, and after its stores have changed."""
    rng = np.random.default_rng(n_stores)
    documents = [rng.integers(0, 4, 60).tolist() for _ in range(n_stores)]
    for i, document in enumerate(documents):
        tiny_store.write_store(tmp_path / str(i), [[document[:20]], [document[20:]]] if i % 3 else [[document]], 9)
    snapshots = [Datastore.open(tmp_path / str(i)).snapshot for i in range(n_stores)]
    matcher = Matcher(snapshots, 20, max_match=MAX_MATCH)
    slots = np.arange(20, dtype=np.int32)
    for seed in range(4):
        may = [set(rng.permutation(n_stores)[: rng.integers(0, n_stores + 1)].tolist()) for _ in range(20)]
        alone = []
        for slot, stores in enumerate(may):
            matcher.begin(slot, sum(1 << i for i in stores))
            alone.append(Matcher([s for i, s in enumerate(snapshots) if i in stores], 1, max_match=MAX_MATCH))
        context, fresh = documents[seed % n_stores], np.full(20, -1, np.int32)
        for end in (30, 31, 33, 40):
            trees = matcher.propose(slots, np.repeat(row(context[:end]), 20, axis=0), fresh)
            for slot in range(20):
                single = propose(alone[slot], context[:end], int(fresh[slot]))
                cut = slice(trees.start[slot], trees.start[slot + 1])
                for name in ("tokens", "parents", "counts", "match"):
                    assert getattr(trees, name)[cut].tolist() == getattr(single, name).tolist()
                places = [matcher.locate(int(place)) for place in trees.place[cut]]
                assert places == [alone[slot].locate(int(place)) for place in single.place]
            fresh = np.full(20, {30: 1, 31: 2, 33: 7}.get(end, 0), np.int32)
    assert len(matcher.propose(slots[:0], row([])[:0], fresh[:0]).tokens) == 0


def test_what_a_matcher_cannot_do_is_refused(tmp_path: Path) -> None:
    tiny_store.write_store(tmp_path, [[[1, 2, 3]]], 9)
    snapshot = Datastore.open(tmp_path).snapshot
    for wrong in ({"max_seqs": 0}, {"min_match": 9, "max_match": 8}, {"occurrences": 129}, {"min_chance": 0.0}, {"depth": 0}):
        with pytest.raises(ValueError, match="must be"):
            Matcher([snapshot], **{"max_seqs": 1, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_seqs"):
        Matcher([snapshot], 1).propose(np.zeros(2, np.int32), np.zeros((2, 64), np.int32), np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="from 0 to 8"):
        Datastore.open(tmp_path).lookup([9])
    tiny_store.write_store(tmp_path / "wide", [[[1, 2, 3]]], 70_000)
    with pytest.raises(ValueError, match="different tokenizers"):
        Matcher([snapshot, Datastore.open(tmp_path / "wide").snapshot], 1)

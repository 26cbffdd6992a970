"""Who takes which keys: every key of every item once, and no program much longer than the others."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ngramspec.backends.cuda.attention_schedule import MERGED, WORDS, AttentionSchedule, fill_schedule, n_kept, n_splits, split_first

LONGEST_SPLIT = 1024


def shares_of(lengths: list[int], n_programs: int, n_places: int | None = None, rows: int = 1) -> np.ndarray:
    """[P, WORDS] for texts of so many keys, each an item of so many rows."""
    ends = np.cumsum([rows] * len(lengths))
    items = np.stack([ends - rows, ends], 1).astype(np.int32)
    positions = np.concatenate([np.arange(n - rows, n) for n in lengths]).astype(np.int32)
    if n_places is None:
        n_places = AttentionSchedule.build(n_programs, len(lengths), max(lengths), 1 << 20).n_places
    found = np.full((len(lengths) + n_programs, WORDS), 7, np.int32)
    n = fill_schedule(positions, items, np.arange(len(lengths), dtype=np.int32), n_programs, n_places, found)
    assert not found[n:].any()
    return found[:n]


def n_keys(share: np.ndarray, lengths: list[int]) -> int:
    """That a share's program takes."""
    return min(split_first(share[4]), lengths[share[2]]) - split_first(share[3])


MIXES = {
    "one of 32k, 31 of 256": [32768, *[256] * 31],
    "the long one last": [*[256] * 31, 32768],
    "one alone": [32768],
    "a short one alone": [300],
    "many of 32k": [32768] * 32,
    "all lengths": [int(n) for n in np.random.default_rng(0).integers(1, 9000, 100)],
    "two long ones": [130_000, 60_000, *[1] * 30],
}


@pytest.mark.parametrize("n_programs", [1, 4, 33, 264])
@pytest.mark.parametrize("name", MIXES)
def test_no_program_is_much_longer_than_the_others(name: str, n_programs: int) -> None:
    lengths = MIXES[name]
    found = shares_of(lengths, n_programs)
    longest = max(n_keys(share, lengths) for share in found)
    assert longest <= max(2 * -(-sum(lengths) // n_programs), LONGEST_SPLIT)
    assert len(found) <= len(lengths) + n_programs


def test_a_long_text_beside_31_short_ones_does_not_walk_alone() -> None:
    """Of the programs that there are, on a device of 132 processors for 8 heads of keys."""
    lengths = MIXES["one of 32k, 31 of 256"]
    taken = [n_keys(share, lengths) for share in shares_of(lengths, 2 * 132 // 8)]
    assert max(taken) <= max(2 * np.mean(taken), LONGEST_SPLIT)
    assert taken[0] == max(taken), "the longest begins first"


def test_texts_of_about_an_even_share_are_not_cut() -> None:
    assert len(shares_of([32768] * 32, 33)) == 32


@pytest.mark.parametrize("name", MIXES)
def test_every_split_is_taken_once(name: str) -> None:
    lengths = MIXES[name]
    for n_programs, rows in ((1, 1), (33, 1), (9, 3)):
        longer = [max(n, rows) for n in lengths]
        found = shares_of(longer, n_programs, rows=rows)
        places = []
        for i, n in enumerate(longer):
            mine = sorted(map(tuple, found[found[:, 2] == i]), key=lambda share: share[3])
            assert [0, *(share[4] for share in mine)] == [*(share[3] for share in mine), n_splits(n)]
            assert {share[:2] for share in mine} == {(i * rows, i * rows + rows)}
            assert {(share[5], share[6]) for share in mine} == {(mine[0][5], int(len(mine) == 1))}
            places.append((mine[0][5], mine[0][5] + (1 if len(mine) == 1 else n_kept(n))))
        places.sort()
        assert all(end <= first for (_, end), (first, _) in pairwise(places))
        assert places[-1][1] <= AttentionSchedule.build(n_programs, len(longer), max(longer), 1 << 20).n_places


def test_without_places_one_program_takes_all() -> None:
    lengths = [5000, 5000, 10]
    assert n_kept(5000) % MERGED == 0
    for n_places, alone in ((3, [1, 1, 1]), (3 + n_kept(5000), [0, 1, 1]), (3 + 2 * n_kept(5000), [0, 0, 1])):
        found = shares_of(lengths, 40, n_places)
        assert [int(found[found[:, 2] == i, 6].min()) for i in range(3)] == alone


def test_items_without_rows_have_no_shares() -> None:
    found = np.ones((6, WORDS), np.int32)
    items, owners = np.array([[0, 0], [0, 2], [0, 0]], np.int32), np.array([0, 5, 0], np.int32)
    assert fill_schedule(np.array([3, 4], np.int32), items, owners, 3, 3, found) == 1
    assert found[0].tolist() == [0, 2, 5, 0, 1, 1, 1, 0]
    assert not found[1:].any()
    assert fill_schedule(np.empty(0, np.int32), items[:1], owners[:1], 3, 3, found) == 0


def test_there_is_room_for_what_a_bucket_can_hold() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        n_items, most, n_programs = int(rng.integers(1, 40)), int(rng.integers(1, 20000)), int(rng.integers(1, 300))
        lengths = [int(n) for n in rng.integers(1, most + 1, n_items)]
        assert len(shares_of(lengths, n_programs)) <= AttentionSchedule.build(n_programs, n_items, most, 1 << 20).get_max_shares(
            n_items, most
        )

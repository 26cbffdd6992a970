"""Which program of attention takes which keys: shares of a pass's items, made on the host from the rows' positions.

Positions and groups of rows go in; a list comes out whose longest share is no longer than twice what a program would take if all took
as much, or one split. Where splits begin depends on a key's position alone, and what is merged with what on the splits alone
(`ngramspec.backends.cuda.paged_attention`), so that no bit depends on the list. Nothing here knows kernels, heads or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ngramspec.datastore.code_cache import njit

WORDS = 8
"""int32 numbers of a share: first and last + 1 row, row of the block tables, first and last + 1 split, place of what is kept for merging
(of the item's first split; of everything where one program takes all), whether it does, zero. No rows: no share."""

MERGED = 8
"""Splits whose states are merged by one program, before what comes of them is merged. Changes bits."""


@njit(cache=True, nogil=True)
def split_first(s):
    """First position of split s: splits of 128 keys up to position 1,024, of 256 up to 4,096, then of 1,024. A short text occupies the
    device, a long one is not all merging. Changes bits."""
    return 128 * min(s, 8) + 256 * min(max(s - 8, 0), 12) + 1024 * max(s - 20, 0)


@njit(cache=True, nogil=True)
def n_splits(n_keys):
    """Splits of a text of so many keys, at least one."""
    last = n_keys - 1
    return 1 + min(last // 128, 8) + min(max(last - 1024, 0) // 256, 12) + max(last - 4096, 0) // 1024


@njit(cache=True, nogil=True)
def n_kept(n_keys):
    """States of splits that are kept for a text of so many keys: whole groups of them."""
    return (n_splits(n_keys) + MERGED - 1) // MERGED * MERGED


@njit(cache=True, nogil=True)
def _end(first, n_keys, most, even):
    """The split before which a share ends that begins with split `first`: of at most so many keys, or one split. A text of a quarter more
    is not cut, unless that is more than twice an even share."""
    if first == 0 and n_keys <= min(most + most // 4, 2 * even):
        return n_splits(n_keys)
    end, last, begin = first + 1, n_splits(n_keys), split_first(first)
    while end < last and min(split_first(end + 1), n_keys) - begin <= most:
        end += 1
    return end


@njit(cache=True, nogil=True)
def _count(n_keys, most, even):
    """Shares of a text of so many keys."""
    n, split, last = 0, 0, n_splits(n_keys)
    while split < last:
        split = _end(split, n_keys, most, even)
        n += 1
    return n


@njit(cache=True, nogil=True)
def share_out(positions, items, owners, n_programs, n_places, shares):
    """Shares of items [I, 2] (first and last + 1 row; equal: none) and their owners [I], for rows at positions [R], into `shares`
    [P, WORDS] int32, the longest first and zeros behind them; how many.

    `n_programs` run side by side for a head of keys; P >= I + n_programs always suffices. Each item has one of the `n_places`; one for
    which fewer than `n_kept` of the others are left is taken by one program.
    """
    keys = np.zeros(items.shape[0], np.int64)
    for i in range(items.shape[0]):
        for row in range(items[i, 0], items[i, 1]):
            keys[i] = max(keys[i], positions[row] + 1)
    most = even = (keys.sum() + n_programs - 1) // n_programs
    while True:  # two shares that follow each other have more than `most` keys: at 2 * even there are no more than there is room for
        n = 0
        for i in range(items.shape[0]):
            n += _count(keys[i], most, even) if keys[i] else 0
        if n <= shares.shape[0] or most >= 2 * even:
            break
        most = min(most + max(most // 8, 1), 2 * even)
    sizes, found = np.empty(n, np.int64), np.zeros((n, WORDS), np.int32)
    n, place = 0, items.shape[0]
    for i in range(items.shape[0]):
        if not keys[i]:
            continue
        last, split, mine = n_splits(keys[i]), 0, i
        alone = _end(0, keys[i], most, even) == last or place + n_kept(keys[i]) > n_places
        if not alone:
            mine, place = place, place + n_kept(keys[i])
        while split < last:
            end = last if alone else _end(split, keys[i], most, even)
            sizes[n] = min(split_first(end), keys[i]) - split_first(split)
            found[n, 0], found[n, 1], found[n, 2] = items[i, 0], items[i, 1], owners[i]
            found[n, 3], found[n, 4], found[n, 5] = split, end, mine
            found[n, 6] = alone
            split = end
            n += 1
    order = np.argsort(-sizes[:n], kind="mergesort")
    for i in range(n):
        shares[i] = found[order[i]]
    shares[n:] = 0
    return n


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a device has for shares."""

    n_programs: int
    """That run side by side for a head of keys."""
    n_places: int
    """States of splits that can be kept for merging."""

    @classmethod
    def of(cls, n_programs: int, n_items: int, max_keys: int, most_places: int) -> Sharing:
        """For up to `n_items` of texts of up to `max_keys`. Fewer than `n_programs` of them have more keys than a program takes if all take
        as much."""
        return cls(n_programs, n_items + min((n_programs - 1) * n_kept(max_keys), most_places))

    def room(self, n_items: int, max_keys: int) -> int:
        """Shares of so many items at most."""
        return int(min(n_items + self.n_programs, n_items * n_splits(max_keys)))

    def fill(self, positions: np.ndarray, items: np.ndarray, owners: np.ndarray, shares: np.ndarray) -> None:
        """`share_out`. Raises ValueError for more items than there are places."""
        if len(items) > self.n_places:
            raise ValueError(f"{len(items)} items, where at most {self.n_places} can have what they keep")
        share_out(positions, items, owners, self.n_programs, self.n_places, shares)

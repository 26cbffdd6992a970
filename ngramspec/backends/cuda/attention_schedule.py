"""Decide which program of the attention kernel takes which keys: the attention schedule, made on the host from the rows' positions.

Positions and groups of rows go in; a list of shares comes out. Its longest share is no longer than one split, or twice an even share of the
work. Where splits begin depends on a key's position alone, and which states are merged depends on the splits alone
(`ngramspec.backends.cuda.paged_attention`), so no bit depends on the list. Nothing here knows kernels, heads or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ngramspec.datastore.code_cache import njit

# int32 numbers of a share: first row, last row + 1, row of the block tables, first split, last split + 1, place of the states kept for
# merging (those of the item's first split; all of them if one program takes the whole item), whether one program does, zero. A share
# without rows is empty.
WORDS = 8

MERGED = 8  # Splits that one program merges to a group, before groups are merged. Changes bits.


@njit(cache=True, nogil=True)
def split_first(s):
    """Return the first position of split s.

    Splits have 128 keys up to position 1,024, 256 up to 4,096, then 1,024: short texts occupy the whole device and long ones do not spend
    their time on merging. Changes bits.
    """
    return 128 * min(s, 8) + 256 * min(max(s - 8, 0), 12) + 1024 * max(s - 20, 0)


@njit(cache=True, nogil=True)
def n_splits(n_keys):
    """Return the number of splits of a text of `n_keys` keys, at least one."""
    last = n_keys - 1
    return 1 + min(last // 128, 8) + min(max(last - 1024, 0) // 256, 12) + max(last - 4096, 0) // 1024


@njit(cache=True, nogil=True)
def n_kept(n_keys):
    """Return how many states of splits are kept for a text of `n_keys` keys: whole groups of MERGED."""
    return (n_splits(n_keys) + MERGED - 1) // MERGED * MERGED


@njit(cache=True, nogil=True)
def _end(first, n_keys, most, even):
    """Return the end of the share that begins with split `first`: at most `most` keys, or one split.

    A text longer than `most` by up to a quarter is not cut unless it exceeds twice an even share.
    """
    if first == 0 and n_keys <= min(most + most // 4, 2 * even):
        return n_splits(n_keys)
    end, last, begin = first + 1, n_splits(n_keys), split_first(first)
    while end < last and min(split_first(end + 1), n_keys) - begin <= most:
        end += 1
    return end


@njit(cache=True, nogil=True)
def _count(n_keys, most, even):
    """Return the number of shares of a text of `n_keys` keys."""
    n, split, last = 0, 0, n_splits(n_keys)
    while split < last:
        split = _end(split, n_keys, most, even)
        n += 1
    return n


@njit(cache=True, nogil=True)
def fill_schedule(positions, items, owners, n_programs, n_places, shares):
    """Write the shares of items [I, 2] (first row, last row + 1; equal: empty) into `shares` [P, WORDS] int32 and return their number.

    `owners` [I] is the row of the block tables of each item, `positions` [R] the rows' positions. The longest share comes first; zeros
    follow the last. `n_programs` run at a time per key head; P >= I + n_programs always suffices. Each item takes one of the `n_places`; if
    fewer than `n_kept` of the rest are left for an item, one program takes the whole item.
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
        for word in range(WORDS):
            shares[i, word] = found[order[i], word]
    shares[n:] = 0
    return n


@dataclass(frozen=True, slots=True)
class AttentionSchedule:
    """Limits of the attention schedule on one device."""

    n_programs: int
    """Programs that run at a time for one key head."""
    n_places: int
    """States of splits that can be kept for merging."""

    @classmethod
    def build(cls, n_programs: int, n_items: int, max_keys: int, most_places: int) -> AttentionSchedule:
        """Build the limits for up to `n_items` items of texts of up to `max_keys` keys.

        Fewer than `n_programs` of these can have more keys than an even share.
        """
        return cls(n_programs, n_items + min((n_programs - 1) * n_kept(max_keys), most_places))

    def get_max_shares(self, n_items: int, max_keys: int) -> int:
        """Return the largest number of shares that `n_items` items can have."""
        return int(min(n_items + self.n_programs, n_items * n_splits(max_keys)))

    def fill(self, positions: np.ndarray, items: np.ndarray, owners: np.ndarray, shares: np.ndarray) -> None:
        """Fill `shares` (`fill_schedule`). Raises ValueError for more items than places."""
        if len(items) > self.n_places:
            raise ValueError(f"{len(items)} items, where at most {self.n_places} can have what they keep")
        fill_schedule(positions, items, owners, self.n_programs, self.n_places, shares)

"""Account for snapshots of recurrent states: which block of the prefix cache each one follows, and which is replaced next.

A block can be continued from only if there is a snapshot of the state at its end. Knows hashes and numbers; a backend has the memory.
"""

from __future__ import annotations

from collections.abc import Container, Sequence


class SnapshotTable:
    """Numbers of `n` snapshots by the hash of the block that each follows, least recently used first."""

    def __init__(self, n: int) -> None:
        self._number_of: dict[bytes, int] = {}
        self._free = list(range(n))

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._number_of

    def count_blocks(self, hashes: Sequence[bytes], cached: Container[bytes]) -> int:
        """Return how many of these blocks can be taken over: all are `cached`, and there is a snapshot after the last of them."""
        known = 0
        for n, digest in enumerate(hashes, 1):
            if digest not in cached:
                break
            known = n if digest in self._number_of else known
        return known

    def find(self, digest: bytes) -> int | None:
        """Return the number of the snapshot that follows this block; None if there is none."""
        return self._number_of.get(digest)

    def use(self, digest: bytes) -> int:
        """Return the number of the snapshot that follows this block, which is then replaced last."""
        number = self._number_of[digest] = self._number_of.pop(digest)
        return number

    def take_number(self) -> int:
        """Return the number of a free snapshot, or of the least recently used one, which is forgotten; -1 if there is none."""
        if self._free:
            return self._free.pop()
        return self._number_of.pop(next(iter(self._number_of))) if self._number_of else -1

    def give_back(self, number: int) -> None:
        """Free a number that `take_number` has returned and that was not added."""
        self._free.append(number)

    def add(self, digest: bytes, number: int) -> None:
        """Let a number that `take_number` has returned be the snapshot that follows this block, which has none."""
        assert digest not in self._number_of
        self._number_of[digest] = number

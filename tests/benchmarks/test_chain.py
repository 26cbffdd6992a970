"""The plain prediction of the text itself that replay and decode compare with."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.our_engine import make_chain
from ngramspec.speculative.ngram_table import LADDER, REACH


def test_chain_backs_off_and_follows_the_most_frequent() -> None:
    text = np.array([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], np.int32)
    assert make_chain(text, 4).tolist() == [3, 9, 1, 2]
    assert make_chain(np.append(text, np.int32(77)), 4).tolist() == []


@pytest.mark.parametrize(("vocab_size", "length"), [(2, 30), (4, 200), (100, 400)])
def test_a_chain_takes_the_longest_contexts_most_frequent_continuation(vocab_size: int, length: int) -> None:
    rng = np.random.default_rng(length)
    for text in (rng.integers(0, vocab_size, length).astype(np.int32) for _ in range(20)):
        known, made = text.tolist(), make_chain(text, 5).tolist()
        for i in range(len(made) + 1):
            now, best = known + made[:i], list[int]()
            for n in LADDER:
                ends = [at for at in range(length - 1, n - 1, -1) if known[at - n : at] == now[len(now) - n :]]
                if not ends:
                    break
                best = [known[at] for at in ends[:REACH]]
            if i < len(made):
                assert made[i] == max(best, key=best.count)
            elif i < 5:
                assert not best

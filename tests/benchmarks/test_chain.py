"""The plain prediction of the tables that replay and decode compare with."""

from __future__ import annotations

import numpy as np

from benchmarks.chain import chain
from ngramspec.drafting import Proposer


def test_chain_backs_off_and_follows_the_most_frequent() -> None:
    proposer = Proposer(vocab_size=100, max_seqs=1, history=100)
    proposer.begin(0, np.array([1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], np.int32))
    assert chain(proposer, 0, 4).tolist() == [3, 9, 1, 2]
    proposer.observe(np.zeros(1, np.int32), [np.array([77], np.int32)], [np.empty(0, np.int32)])
    assert chain(proposer, 0, 4).tolist() == []

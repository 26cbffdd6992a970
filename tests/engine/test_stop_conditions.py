"""Stop rules: the Python function and the compiled one agree for any sequence, stops and limits."""

from __future__ import annotations

import numpy as np

from ngramspec.engine.stop_conditions import REASONS, find_stop, find_stop_compiled
from ngramspec.sequence_table import LENGTH, RUNNING, SEQUENCE, STOP


def random_rows(rng: np.random.Generator, n: int) -> np.recarray:
    rows = np.zeros(n, SEQUENCE)
    rows["n_prompt"] = rng.integers(1, 4, n)
    rows["n_tokens"] = rows["n_prompt"] + rng.integers(1, 6, n)
    rows["limit"] = rows["n_tokens"] + rng.integers(0, 3, n)
    rows["min_tokens"], rows["last_token"] = rng.integers(0, 4, n), rng.integers(0, 5, n)
    return rows.view(np.recarray)


def test_python_and_compiled_code_find_the_same_end() -> None:
    rng = np.random.default_rng(0)
    found = set()
    for row in random_rows(rng, 500):
        stops = rng.integers(0, 5, int(rng.integers(0, 3))).astype(np.int32)
        state = find_stop(row, frozenset(stops.tolist()))
        assert state == find_stop_compiled(row, stops)
        is_stop = int(row.last_token) in stops.tolist() and row.n_tokens - row.n_prompt > row.min_tokens
        assert state == (STOP if is_stop else LENGTH if row.n_tokens == row.limit else RUNNING)
        found.add(state)
    assert found == {STOP, LENGTH, RUNNING}
    assert set(REASONS) == {STOP, LENGTH}

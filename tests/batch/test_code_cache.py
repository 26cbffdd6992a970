"""Two processes that compile at once never find each other's code under their own names."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba.core.caching import IndexDataCacheFile

from ngramspec.batch import code_cache


def test_two_processes_that_save_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (IndexDataCacheFile(str(tmp_path), "module.function-1.py311", 0) for _ in range(2))
    real = first._save_index

    def early(overloads: dict[str, str]) -> None:
        """The other process, which looked at the index before, saves its entry between our index and our code."""
        real(overloads)
        monkeypatch.setattr(code_cache.os, "getpid", lambda: 2)
        second.save("of the second", "its code")
        monkeypatch.setattr(code_cache.os, "getpid", lambda: 1)

    monkeypatch.setattr(code_cache.os, "getpid", lambda: 1)
    monkeypatch.setattr(first, "_save_index", early)
    monkeypatch.setattr(second, "_load_index", dict)
    first.save("of the first", "our code")
    third = IndexDataCacheFile(str(tmp_path), "module.function-1.py311", 0)
    assert third.load("of the second") == "its code"
    assert third.load("of the first") in (None, "our code")

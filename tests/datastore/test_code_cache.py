"""Processes that share a cache of machine code never run another function's in one's place."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

import ngramspec
from ngramspec.datastore import code_cache  # noqa: F401


def test_two_processes_that_save_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (IndexDataCacheFile(str(tmp_path), "module.function-1.py311", 0) for _ in range(2))
    real = first._save_index

    def early(overloads: dict[str, str]) -> None:
        """The other process, which looked at the index before, saves its entry between our index and our code."""
        real(overloads)
        second.save("of the second", "its code")

    monkeypatch.setattr(first, "_save_index", early)
    monkeypatch.setattr(second, "_load_index", dict)
    first.save("of the first", "our code")
    third = IndexDataCacheFile(str(tmp_path), "module.function-1.py311", 0)
    assert third.load("of the second") == "its code"
    assert third.load("of the first") in (None, "our code")


def test_compiled_functions_have_names_of_their_own() -> None:
    """numba tells two functions of one name apart by how many its process had compiled before each: code that processes compiled at
    different times can have one symbol, and whoever calls both gets one of them twice."""
    named: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for info in pkgutil.walk_packages(ngramspec.__path__, "ngramspec."):
        if info.name.endswith("__main__"):
            continue
        module: Any = importlib.import_module(info.name)
        for found in vars(module).values():
            if isinstance(found, Dispatcher):
                named[found.py_func.__module__, found.py_func.__qualname__].add(id(found))
    assert len(named) > 50
    assert [name for name, functions in named.items() if len(functions) > 1] == []

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from playback import PlaybackEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[PlaybackEngine]]:
    fresh = type("Fresh", (PlaybackEngine,), {"made": {}})
    monkeypatch.setitem(sys.modules, "ngramspec.engine.llm_engine", SimpleNamespace(Engine=fresh))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    return fresh

from __future__ import annotations

import gc

import pytest

from ngramspec.datastore.garbage import pause_collector


def test_the_collector_runs_again_after_the_outermost_pause() -> None:
    with pause_collector():
        with pytest.raises(ValueError, match="inner"), pause_collector():
            raise ValueError("inner")
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with pause_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

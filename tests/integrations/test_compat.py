"""What the guests of all hosts share at their border."""

import logging
import time

from ngramspec.integrations import compat


def test_who_waits_for_a_compiler_is_told(monkeypatch, caplog):
    monkeypatch.setattr(compat, "SILENT_S", 0.05)
    for seconds, told in ((0.0, 0), (0.5, 1)):
        monkeypatch.setattr(compat, "warmup", lambda seconds=seconds: time.sleep(seconds))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            compat.compile_drafting()
        time.sleep(0.1)
        assert len([record for record in caplog.records if "compiles what drafts need" in record.message]) == told

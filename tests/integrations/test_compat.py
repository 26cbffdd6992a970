"""What the guests of all hosts share at their border."""

import logging
import threading
import time

from ngramspec.integrations import compat


def test_who_waits_for_a_compiler_is_told(monkeypatch, caplog):
    def wait_for_text() -> None:
        deadline = time.monotonic() + 60
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)

    for silent_s, warm_up, told in ((60, lambda: None, 0), (0.05, wait_for_text, 1)):
        monkeypatch.setattr(compat, "SILENT_S", silent_s)
        monkeypatch.setattr(compat, "warmup", warm_up)
        with caplog.at_level(logging.WARNING):
            compat.compile_drafting()
        assert not any(isinstance(each, threading.Timer) and not each.finished.is_set() for each in threading.enumerate())
        assert len([record for record in caplog.records if "compiles what drafts need" in record.message]) == told

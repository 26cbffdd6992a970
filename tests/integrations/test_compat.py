"""What the guests of all hosts share at their border."""

import logging
import threading
import time

import pytest
import tiny

from ngramspec.errors import TokenizerError
from ngramspec.integrations import compat


def test_a_prediction_is_encoded_by_a_tokenizer_of_either_library():
    tokenizer = tiny.byte_tokenizer()
    expected = tokenizer("x = 1", add_special_tokens=False)["input_ids"]
    for each in (tokenizer, tokenizer.backend_tokenizer):
        assert compat.prediction_ids("x = 1", each, 1000).tolist() == expected
    with pytest.raises(TokenizerError):
        compat.prediction_ids("x = 1", None, 1000)


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

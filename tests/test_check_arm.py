"""`make arm`: what is missing is named, and what differs."""

from __future__ import annotations

import pytest

from tools import check_arm


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check_arm.platform, "system", lambda: "Linux")
    monkeypatch.setattr(check_arm.shutil, "which", lambda _: None)
    assert check_arm.main([]) == 2
    said = capsys.readouterr().out
    assert "qemu-user-static" in said
    assert "mmdebstrap" in said
    monkeypatch.setattr(check_arm.platform, "system", lambda: "Darwin")
    assert check_arm.find_missing() == ["Linux; this is Darwin"]


def test_every_target_is_compared_with_the_best_one_here() -> None:
    here = {"AVX2: silu": {"silu": "a"}, "AVX2: products": {"Q4_0 int8": "b"}, "generic: silu": {"silu": "a"}}
    there = {"NEON: silu": {"silu": "a"}, "NEON: products": {"Q4_0 int8": "b"}, "generic: silu": {"silu": "c"}}
    assert check_arm.compare_digests(here, there) == ["generic, silu: c, here a"]
    assert not check_arm.compare_digests(here, here)

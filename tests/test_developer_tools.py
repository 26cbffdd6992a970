"""The tools of developers that no other test runs: what they import is there, and a recording goes on where it was stopped."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import pytest
import tiny

import tools
from ngramspec.speculative.features import KEPT


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(tools.__path__)])
def test_what_a_tool_imports_is_there(name: str) -> None:
    importlib.import_module(f"tools.{name}")


def test_a_recording_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tools import record

    tiny.tiny_model("llama").save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    prompts, out = tmp_path / "set.jsonl", tmp_path / "out" / "set.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"row{i}", "prompt": f"def f{i}(x):"}) + "\n" for i in range(3)))
    command = ["record", "--model", str(tmp_path / "model"), "--prompts", str(prompts), "--out", str(out.parent), "--max-tokens", "6"]
    monkeypatch.setenv("NGRAMSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", command)
    record.main()
    whole = out.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["id"] for row in rows] == ["row0", "row1", "row2"]
    for row in rows:
        assert 0 < len(row["output_ids"]) == len(row["top_ids"]) == len(row["top_logprobs"]) <= 6
        assert all(len(top) == KEPT for top in row["top_ids"])
        assert row["output_ids"] == [top[0] for top in row["top_ids"]]
    out.write_text(whole[: whole.index("\n") + 40])  # the second row was not finished
    record.main()
    assert out.read_text() == whole

"""Recorded outputs through vLLM's proposer, without vLLM."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny

from benchmarks import replay
from ngramspec.integrations import vllm


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    texts = [f"def area_{i}(w, h):\n    return w * h\n" for i in range(5)]
    path = tmp_path / "traces.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text * 3, "reference": text * 2}) for text in texts))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tiny.byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    tiny.tiny_model("llama").config.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize("options", [[], ["--mirrors"]])
def test_recorded_outputs(
    traces: Path, tokenizer: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__=vllm.TESTED[0]))
    monkeypatch.delenv(vllm.SETTINGS, raising=False)
    replay.main(["--vllm-proposer", "--traces", str(traces), "--tokenizer", str(tokenizer), "--requests", "1,3", "--depth", "8", *options])
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["requests"].keys() == {"1", "3"}
    for figures in document["requests"].values():
        assert 1 < figures["accepted"] <= figures["drafted"] <= 8, "these texts repeat"
        assert figures["tokens_per_step"] == pytest.approx(1 + figures["accepted"], abs=1e-3)
        assert figures["step_ms"] > 0
    assert document["suffix"].keys() in ({"absent"}, {"tokens_per_step", "accepted", "drafted"})

"""benchmarks.structured: the schemas that it makes of rows, and what it prints, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from benchmarks import structured
from benchmarks.our_engine import OurEngine
from benchmarks.peers import TimedRun
from ngramspec import Engine

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
FUNCTION = {
    "name": "ride",
    "parameters": {
        "type": "dict",
        "required": ["kind"],
        "properties": {"kind": {"type": "string", "enum": ["plus", "black"]}, "time": {"type": "integer"}},
    },
}
ROWS = [
    {"prompt": "a shape: ", "schema": {"enum": ["circle", "square"]}},
    {
        "messages": [{"role": "system", "content": f"Call:\n[{json.dumps(FUNCTION)}]\nNow."}, {"role": "user", "content": "a ride"}],
        "reference": '[{"name": "ride", "arguments": {"kind": "plus"}}]',
    },
    {"prompt": "x", "reference": '{"a": [true, false], "b": "xy", "c": 3, "d": null}'},
    {"prompt": "how many?", "reference": "SELECT 1"},
]


def test_schemas_fit_their_references() -> None:
    for row in ROWS[1:3]:
        assert structured.is_valid(structured.schema_of(row), str(row["reference"]).replace("null", "true"))
    assert structured.schema_of(ROWS[0]) == ROWS[0]["schema"]
    call = structured.schema_of(ROWS[1])["items"]["anyOf"][0]
    assert call["properties"]["name"] == {"const": "ride"}
    assert call["properties"]["arguments"]["required"] == ["kind"]
    assert structured.is_valid(structured.schema_of(ROWS[3]), '{"answer": "SELECT 1"}')
    assert not structured.is_valid(structured.schema_of(ROWS[3]), '{"answer": 1}')
    assert not structured.is_valid({}, "{")


def _sum_up(runs: tuple[TimedRun, ...]) -> tuple[int, float]:
    return sum(run.n_tokens for run in runs), sum(run.seconds for run in runs)


def test_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    runs: list[TimedRun] = []

    class WatchedEngine(OurEngine):
        def complete(self, prompts: list[list[int]]) -> TimedRun:
            runs.append(super().complete(prompts))
            return runs[-1]

    waited, finish_compiling = [], Engine.finish_compiling
    monkeypatch.setattr(Engine, "finish_compiling", lambda *args: waited.append(finish_compiling(*args)))
    monkeypatch.setattr(structured, "OurEngine", WatchedEngine)
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tiny.tiny_model("llama", max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    structured.main(["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "rows.jsonl"), "--limit", "2", "--max-tokens", "200"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["prompts"], document["identical"]) == (2, 2)
    assert document["valid"] >= 1
    assert document["forced_share"] > 0
    assert set(document["mask_ms"]) == {"p50", "p99"}
    assert {"tok_s_off", "tok_s_on", "speedup", "by_foresight"} <= set(document)
    warm_up, first, second = runs[:3], runs[3:6], runs[6:]
    assert all(run.outputs == first[0].outputs for run in warm_up + first)
    assert not any("answers" in run.stats.drafted_by_source for run in first), "nobody knows the answer from the warm-up"
    tokens, seconds = zip(*(_sum_up(some) for some in zip(first, second[2:] + second[:2], strict=True)), strict=True)  # in turns
    off, without, on = (n / s for n, s in zip(tokens, seconds, strict=True))
    assert [document[name] for name in ("speedup", "by_foresight")] == pytest.approx([on / off, on / without], abs=1e-3)
    prompts = [sum(run.prompt_s for run in some) for some in zip(first, second[2:] + second[:2], strict=True)]
    assert document["decoding_speedup"] == pytest.approx((seconds[0] - prompts[0]) / (seconds[2] - prompts[2]), abs=1e-3)
    assert waited, "a first start drafts nothing until drafting is compiled"


def test_what_a_row_takes_by_size_of_the_vocabulary() -> None:
    document = structured.measure_masks(0, sizes=(1000, 3000), rows=50)
    assert [each["vocabulary"] for each in document["vocabularies"]] == [1000, 3000]
    assert all(0 < each["p50"] <= each["p99"] for each in document["vocabularies"])

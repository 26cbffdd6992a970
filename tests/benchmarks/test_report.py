"""The report, from a folder of prompts to its pictures, on a tiny model: every cell is measured, once."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tiny

from benchmarks import peers
from benchmarks.common import ResultLog
from benchmarks.peers import PeerTask, TimedRun
from benchmarks.report import __main__ as report
from benchmarks.report import figures, measure
from benchmarks.report.categories import FOLLOWED, iterate_heads
from ngramspec import Engine, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
DRAFTERS = ["recycling", "lookahead", "layers:1", "counts:2"]
CATEGORIES = ["functions", "edits", "repository"]
PACKAGE = "pathspec"
"""Small, and installed with the package."""


@pytest.fixture(scope="module")
def engine() -> Any:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with Engine(
        tiny.tiny_model("llama", max_position_embeddings=2048), tokenizer=tokenizer, threads=1, max_seqs=4, kv_memory=8 << 20
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = ["def add(a, b):\n", "abcabcabcabc", "x = 1\nx = 1\nx ="]
    asked = [[{"role": "user", "content": f"Rename a.\n```python\n{text}\n```\n"}] for text in texts]
    for name, rows in {
        "humaneval": [{"prompt": text} for text in texts],
        "canitedit": [{"messages": messages} for messages in asked],
    }.items():
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"id": f"{name}/{i}", **row}) for i, row in enumerate(rows)))
    cells = [{"key": {"set": "canitedit", "temperature": 0.0, "concurrency": n}, "speedup": x} for n, x in ((8, 0.98), (1, 1.5))]
    loads = {"model": "tiny", "means": {"1": 1.5, "8": 0.98}, "identical": True, "cells": cells, "settings": {"max_tokens": 96}}
    (folder / "loads.json").write_text("a table\n" + json.dumps(loads))
    return folder


def arguments(data: Path, folder: Path, *more: str) -> Any:
    return report.parse(
        [
            *("--model", "tiny", "--data", str(data), "--out", str(folder), "--state", str(folder / "cells.jsonl"), "--against", ""),
            *("--categories", ",".join(CATEGORIES), "--package", PACKAGE),
            *(part for name in (*DRAFTERS, "nothing") for part in ("--drafter", name)),
            *("--prompts", "2", "--max-tokens", "6", "--max-prompt", "1500", "--loads", str(data / "loads.json"), *more),
        ]
    )


def find_all(state: Path, contender: str, name: str) -> list[Any]:
    """One figure of a contender's cells."""
    cells = [json.loads(line) for line in state.read_text().splitlines()]
    return [cell[name] for cell in cells if cell["contender"] == contender]


def test_the_report_has_every_cell_and_goes_on_where_it_stopped(
    engine: Engine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> Any:
        raise peers.PeerAbsentError("not installed")

    monkeypatch.setattr(report, "make_peers", lambda *_: {"hf": absent})
    args = arguments(data, tmp_path)
    measure_block = measure.measure_block

    def interrupted(bench: Any, category: Any, temperature: float, *rest: Any) -> Any:
        if temperature > 0:
            raise KeyboardInterrupt
        return measure_block(bench, category, temperature, *rest)

    monkeypatch.setattr(measure, "measure_block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report.run(engine, args, time.perf_counter())
    before = args.state.read_text()
    args.state.write_text(before + '{"key": {"half a li')

    monkeypatch.setattr(measure, "measure_block", measure_block)
    document = report.run(engine, args, time.perf_counter())
    report.write(document, tmp_path)
    assert args.state.read_text().startswith(before)

    of_all = ["off", "merged", "n-gram tables", "prompt lookup", *DRAFTERS]
    expected = {(c, t, name) for c in CATEGORIES for t in (0.0, 0.8) for name in of_all}
    expected |= {("repository", t, name) for t in (0.0, 0.8) for name in ("datastore", "merged, no datastore")}
    expected |= {("edits", t, "merged, prediction") for t in (0.0, 0.8)}
    expected |= {(c, 0.0, name) for c in CATEGORIES for name in measure.CURVES}
    expected |= {(c, 0.8, f"{name}, rejection") for c in CATEGORIES for name in ("layers:1", "counts:2")}
    rows = document["rows"]
    assert {(row["category"], row["temperature"], row["contender"]) for row in rows} == expected
    assert len(rows) == len(expected)
    assert all(row["identical"] == row["prompts"] for row in rows if not row["contender"].endswith("rejection"))
    assert all(row["identical"] is None for row in rows if row["contender"].endswith("rejection"))
    assert document["absent"]["nothing"].startswith("there is no drafter 'nothing'")
    assert document["absent"]["hf"] == "not installed"

    followed = document["followed"]
    assert {(row["category"], row["temperature"], row["contender"]) for row in followed} == {
        (c, t, name) for c in CATEGORIES for t in (0.0, 0.8) for name in ("merged", "n-gram tables", "prompt lookup", "counts:2")
    } | {("repository", t, "datastore") for t in (0.0, 0.8)}
    for row in followed:
        assert 1 <= row["prompts"] <= 2 * FOLLOWED  # of a text with one token nothing was drafted
        assert row["tokens_per_pass"] >= 1
        assert 0 < row["speed"] <= row["tokens_per_pass"]
    assert len(document["against_best_followed"]) == 6

    promised, drafted = document["reliability"], find_all(args.state, "merged", "drafted")
    assert sum(row["nodes"] for row in promised) == sum(map(sum, drafted))
    assert all(0 <= row["made"] <= row["nodes"] and row["low"] * row["nodes"] <= row["expected"] + 0.01 for row in promised)

    text = (tmp_path / "REPORT.md").read_text()
    assert "| canitedit | 0 | 1.50 | **0.98** |" in text
    for picture in ("speed", "drafters", "frontier", "acceptance", "reliability"):
        assert f"plots/{picture}.svg" in text
        drawn = (tmp_path / "plots" / f"{picture}.svg").read_bytes()
        assert b"<svg" in drawn
        assert b"dc:date" not in drawn

    def never(*_: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "measure_block", never)
    again = report.run(engine, args, time.perf_counter())
    assert sorted(map(str, again["rows"])) == sorted(map(str, rows))
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    report.write(again, tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()} == pictures


def test_another_setting_is_another_cell(tmp_path: Path) -> None:
    state = ResultLog(tmp_path / "cells.jsonl")
    state.add({"key": {"contender": "off", "threads": 1}})
    state = ResultLog(tmp_path / "cells.jsonl")
    assert state.get({"threads": 1, "contender": "off"}) is not None
    assert state.get({"threads": 2, "contender": "off"}) is None
    assert not ResultLog(tmp_path / "cells.jsonl", fresh=True).known


def cell(name: str, seconds: float, passes: int, drafted: int) -> Any:
    run, off = TimedRun([[1, 2, 3, 4]], seconds), TimedRun([[1, 2, 3, 4]], 2.0)
    run.plain_passes = passes + drafted / 2
    run.stats.passes, run.stats.drafted, run.stats.drafted_by_depth, run.stats.accepted_by_depth = passes, drafted, [2, 2], [1, 0]
    return {"category": "edits", "temperature": 0.0} | measure.cell_of(name, [run, run], [off, off])


def test_figures_of_known_cells() -> None:
    cells = [cell("merged", 1.0, 2, 4), cell("lookahead", 0.5, 4, 4), cell("n-gram tables", 4.0, 1, 0), cell("hf-pld", 3.0, 0, 0)]
    row = figures.row_of(cells[0])
    assert (row["tok_s"], row["speedup"], row["tokens_per_pass"], row["rows_per_pass"], row["identical"]) == (4.0, 2.0, 2.0, 2.0, 2)
    assert row["acceptance"][:3] == [0.5, 0.0, None]
    (best,) = figures.against_best(cells)
    assert (best["best_by_tokens"], best["ratio_tokens"]) == ("n-gram tables", 0.5)
    assert (best["best_by_speed"], best["ratio_speed"]) == ("lookahead", 0.5)
    assert (best["best_by_cost"], best["ratio_cost"]) == ("n-gram tables", 0.25)
    assert figures.against_peers(cells) == [{"category": "edits", "peer": "hf-pld", "prompts": 2, "ratio": 3.0}]


def test_a_missing_data_set_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.parse(["--model", "m", "--data", str(tmp_path), "--categories", "chat,JSON"])
    assert "lacks json_bfcl.jsonl, json_wiki_arctic.jsonl, spec_bench.jsonl" in capsys.readouterr().err


def test_heads_of_functions_end_with_their_docstring() -> None:
    source = 'import os\n\n@cache\ndef f(a):\n    """What."""\n    return a\n\ndef g():\n    return 1\n'
    assert list(iterate_heads(source)) == [(4, 'import os\n\n\n@cache\ndef f(a):\n    """What."""\n')]


def test_transformers_assisted_by_its_first_layers_is_greedy(tmp_path: Path) -> None:
    model = tiny.tiny_model("llama")
    model.save_pretrained(tmp_path)
    prompts, task = [[97, 98, 99] * 4, [97, 98]], PeerTask(tmp_path, SamplingParams(max_tokens=6), (tiny.EOS,), threads=1, max_len=64)
    with Engine(model, threads=1, kv_memory=8 << 20) as engine:
        plain = [done.token_ids for done in engine.complete(prompts, SamplingParams(max_tokens=6), speculation=False)]
    with contextlib.closing(peers.open_peer("hf-assisted", task, None)) as peer:
        assert peer.complete(prompts).outputs == plain
    with pytest.raises(peers.PeerAbsentError, match="takes a GGUF file"):
        peers.open_peer("llama-pld", task, None)

"""The GPU benchmark on a CPU in small: each part gives its figures, the program survives parts that fail. Replays keep to the recording."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import common, decode, step
from benchmarks.common import Prompt
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import parts, profile
from benchmarks.gpu.parts import Foretold, Plan
from benchmarks.gpu.profile import Kernel
from benchmarks.our_engine import FixedLength
from benchmarks.peers import TimedRun
from benchmarks.recordings import Recital, make_library_edits, read_recorded_prompts
from ngramspec import Engine, SamplingParams
from ngramspec.models.random_weights import empty_model
from ngramspec.models.shapes import read_shape
from ngramspec.sampling.batch import compute_depths
from ngramspec.speculative.drafter import DraftParams, SequenceInfo
from ngramspec.speculative.single import SingleDrafter

CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Whoever else computes here would make two wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(scope="module")
def plan(config: str) -> Plan:
    model = f"random:{config}"
    return Plan(
        device="cpu",
        dtype="float32",
        large=model,
        small=model,
        code=model,
        hybrid=model,
        moe=model,
        context=16,
        contexts=(16, 64, 100_000),
        rows=(1, 2),
        batches=(1, 2),
        lengths=(2,),
        repeat=1,
        n_prompts=2,
        n_traces=1,
        max_tokens=8,
        kv_bytes=8 << 20,
    )


def last_document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# ---------------------------------------------------------------------------- replays


def test_a_replay_writes_the_recording_and_counts_passes(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(3):
        ids = rng.integers(0, 512, 40).tolist()
        rows.append({"prompt_ids": ids, "output_ids": [*ids[:30], 7, *ids[30:]]})
    rows.append(rows[0] | {"output_ids": [1] * 20})  # a second output of a prompt does not count
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--random-weights", config, "--trace", str(path), "--threads", "1", "--concurrency", "2", "--cost", "flat"]
    decode.main([*arguments, "--fixed-length", "4,1", "--max-tokens", "35"])
    document = last_document(capsys)
    assert document["model"] == f"random:{config}"
    assert document["replayed"] is True
    assert (document["prompts"], document["identical"], document["tokens"]) == (3, 3, 3 * 35)
    assert document["digest"] == common.hash_outputs([row["output_ids"][:35] for row in rows[:3]])
    assert document["tokens_per_pass"] > 2
    assert list(document["fixed_length"]) == ["1", "4"]
    assert document["fixed_length"]["1"]["tokens_per_pass"] <= 2
    assert document["fixed_length"]["4"]["rows_per_pass"] <= 4
    assert document["on_against_best_fixed"] == min(row["on_against"] for row in document["fixed_length"].values())
    assert document["settings"]["no_recycle"] is True
    assert document["settings"]["prompts"] == "trace.jsonl"
    path.write_text(json.dumps(rows[0] | {"output_ids": [512] * 10}))
    with pytest.raises(SystemExit, match="token 512"):
        decode.main(arguments)


def test_a_replay_where_the_device_samples(config: str) -> None:
    ids = np.random.default_rng(0).integers(0, 512, 40).tolist()
    recorded = [*ids[:30], 7, *ids[30:]]

    with Engine(f"random:{config}", threads=1, kv_memory=8 << 20, recycle=False) as engine:
        recital = Recital([Prompt("a", ids, recorded)])
        params = recital.make_params(SamplingParams(max_tokens=64), ids)
        engine.use(acceptance=recital)
        by_host = engine.complete(ids, dataclasses.replace(params, logprobs=0), prefix_cache=False)
        by_device, other = engine.complete([ids, ids[::-1]], params, tenant="other")
    assert by_host.token_ids == by_device.token_ids == recorded
    assert by_host.finish_reason == by_device.finish_reason == "length"
    assert by_device.stats.tokens_per_pass > 2
    assert other.token_ids != recorded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "m", "--random-weights", "n"], "not allowed with"),
        (["--model", "m", "--trace", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--model", "m", "--trace", "--against", "hf"], "--against"),
        (["--model", "m", "--trace", "--temperature", "1"], "greedily"),
        (["--model", "m", "--device", "gpu"], "cuda:N"),
        (["--model", "m", "--fixed-length", "2,0"], "integer from 1"),
        ([], "--model"),
    ],
)
def test_decode_refuses(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        decode.parse_args(options)
    assert message in capsys.readouterr().err


def test_devices_choose_the_dtype() -> None:
    assert decode.parse_args(["--model", "m"]).dtype == "float32"
    assert decode.parse_args(["--model", "m", "--device", "cuda"]).device == "cuda:0"
    assert decode.parse_args(["--model", "m", "--device", "cuda:1"]).dtype == "bfloat16"
    assert step.parse_args(["--random-weights", "Llama-3.2-1B", "--device", "cuda", "--dtype", "float16"]).dtype == "float16"


def test_library_edits_differ_from_their_prompts_little() -> None:
    prompts = read_recorded_prompts(None, common.WordTokenizer(512), 512, 5, 300)
    assert len(prompts) == 5
    for prompt in prompts:
        assert prompt.output is not None
        assert 8 < len(prompt.output) <= 300
        assert len(set(prompt.output) & set(prompt.ids)) > 0.9 * len(set(prompt.output))
        assert not any(prompt.ids[i : i + len(prompt.output)] == prompt.output for i in range(len(prompt.ids)))
    assert len(make_library_edits(common.WordTokenizer(512))) > 20


def test_fixed_length_is_a_chain_within_bounds() -> None:
    drafts = FixedLength(4, vocab_size=100, max_seqs=2)
    text = np.array([1, 2, 3, 4, 5, 6, 1, 2], np.int32)
    drafts.begin(0, text)
    drafts.begin(1, text + 50)
    slots, cost = np.array([0, 1], np.int32), np.ones(20)
    first, second = drafts.propose(slots, np.array([9, 2], np.int32), cost, 2, 9)
    assert first.tokens.tolist() == [3, 4, 5, 6]
    assert first.parents.tolist() == [-1, 0, 1, 2]
    assert second.tokens.tolist() == [53, 54]
    drafts.observe(slots, [np.array([3, 9], np.int32), np.array([53], np.int32)], [np.array([0], np.int32), np.array([], np.int32)])
    assert [len(tree) for tree in drafts.propose(slots, np.array([0, 9], np.int32), cost, 2, 3)] == [0, 3]


@pytest.mark.parametrize("tree", [False, True])
def test_foretold_drafts_lie_on_the_known_text(tree: bool) -> None:
    known = list(range(10, 40))
    drafts = SingleDrafter(Foretold({(1, 2): known}, 100, tree=tree), vocab_size=100, spec_length=5, spec_rows=10)
    drafts.begin(3, np.array([1, 2, 10], np.int32), DraftParams(info=SequenceInfo(None, 2, 64)))  # type: ignore[arg-type]
    slots = np.array([3], np.int32)
    for at in (1, 4):
        (found,) = drafts.propose(slots, np.array([5], np.int32), np.ones(1), 1, 64)
        assert len(found) == (10 if tree else 5)
        assert (found.parents < np.arange(len(found))).all()
        right = found.tokens == np.array(known)[at + compute_depths(found.parents) - 1]
        assert right.sum() == 5
        assert all(parent < 0 or right[parent] for parent in found.parents)
        drafts.observe(slots, [np.array(known[at : at + 3], np.int32)], [np.arange(2, dtype=np.int32)])


# ---------------------------------------------------------------------------- what a profile says


def test_pauses_of_the_device_and_of_the_host() -> None:
    kernels = [Kernel("b", 5, 9), Kernel("a", 0, 4), Kernel("c", 6, 7), Kernel("d", 30, 40)]
    assert profile.busy_us(kernels) == 9 + 10
    assert profile.busy_us([]) == 0


def test_the_table_of_kernels() -> None:
    kernels = [Kernel("gemm", 10.0 * i, 10.0 * i + 6) for i in range(8)] + [Kernel("norm", 100.0 + i, 101.0 + i) for i in range(4)]
    table = profile.kernel_table(kernels, n_passes=2, n_layers=2)
    assert table["kernels_per_pass"] == 6
    assert table["kernels_per_layer"] == 3
    assert table["kernels_us_per_pass"] == 26
    assert [(row["name"], row["per_pass"], row["share"]) for row in table["kernels"]] == [("gemm", 4, 0.9231), ("norm", 2, 0.0769)]


# ---------------------------------------------------------------------------- parts


def test_passes_kernels_host_and_exactness(plan: Plan) -> None:
    for name in ("floor", "passes", "kernels", "host", "exactness"):
        figures = json.loads(json.dumps(dict(gpu.PARTS[name][2](plan))))
        assert figures
        if name == "passes":
            assert list(figures[plan.large]["ms"]) == ["1", "2"]
            assert figures[plan.large]["over_one_row"]["1"] == 1
            assert list(figures[plan.large]["by_context"]) == ["16", "64"]
            assert all(each["ms"] > 0 < each["over_floor"] for each in figures[plan.large]["by_context"].values())
        if name == "host":
            assert figures[f"{plan.small}, drafts"]["passes"] < figures[f"{plan.small}, off"]["passes"]
            off = figures[f"{plan.small}, off"]  # without a device everything is the host's; a short run can look slower than a long one
            assert off["host_share"] == (1 if off["wall_ms"] > 0 else None)
        if name == "floor":
            assert figures[plan.large]["gb_s"] > 0
        if name == "exactness":
            assert set(figures[plan.large]["ratio"]) == {"1", "2"}


def test_identity_finds_all_and_would_find_a_difference(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = dict(parts.check_identity(plan))
    assert len(figures) == 2
    for found in figures.values():
        assert found["all_identical"]
        assert set(found["identical"].values()) == {found["prompts"]}
        assert found["tokens_per_pass"]["tree, batch 2"] > 2
    texts = iter([1, 2, *[1, 3] * 9])
    monkeypatch.setattr(parts.OurEngine, "complete", lambda self, prompts: TimedRun([[next(texts)] for _ in prompts], 1.0))
    with parts.open_engine(plan, plan.small) as engine:
        found = parts.compare_texts(engine, [[1], [2]], {}, (1, 2))
    assert not found["all_identical"]
    assert found["identical"]["on, batch 1"] == 1


def test_a_mixture_of_experts_is_measured(plan: Plan, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [], "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | experts | {"model_type": "qwen3_moe"}))
    figures = dict(parts.measure_experts(dataclasses.replace(plan, moe=f"random:{tmp_path}", n_prompts=1)))
    assert figures["identity"]["all_identical"]
    assert figures["passes"]["over_one_row"]["1"] == 1
    model = empty_model(read_shape(f"random:{tmp_path}"), torch.float32)
    unused = sum(p.nbytes // 2 for name, p in model.named_parameters() if ".experts." in name)
    assert parts.count_chosen_bytes(model) == step.count_weight_bytes(model) - unused > 0


def test_replay_and_generate(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "N_GENERATED", 1)
    figures = dict(parts.replay(plan))
    assert list(figures) == ["batch 1", "batch 2"]
    assert figures["batch 2"]["prompts"] == figures["batch 2"]["identical"] == 2
    assert figures["batch 1"]["replayed"]
    (generated,) = dict(parts.generate(plan)).values()
    assert generated["peers"]["hf eager"]["tokens"] == 2 * plan.max_tokens
    assert generated["peers"]["hf prompt lookup"]["on_against"] > 0


# ---------------------------------------------------------------------------- the program


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    printed = capsys.readouterr()
    assert "no CUDA device" in printed.err
    for name in gpu.PARTS:
        assert f"  {name} (call " in printed.out or (name == "moe" and "  moe (a call of its own" in printed.out)
    for target in tomllib.loads(gpu.TARGETS.read_text())["target"]:
        assert target["what"].split("{")[0] in printed.out
    assert "<= 1.05" in printed.out
    with pytest.raises(SystemExit, match="2"):
        gpu.main(["--only", "replay"])
    printed = capsys.readouterr()
    assert "replay (call 3 of 3" in printed.out
    assert "8 rows over 1 row" not in printed.out


def test_a_part_that_fails_is_recorded_and_earlier_calls_are_kept(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, out = f"random:{config}", tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--tiny", "--large", model, "--small", model, "--code", model, "--hybrid", model, "--out", str(out)]
    gpu.main([*arguments, "--only", "floor", "--limit", "250"])
    first = last_document(capsys)
    assert first["parts"]["floor"]["error"] is None
    assert first["parts"]["floor"]["figures"][model]["gb_s"] > 0
    with pytest.raises(SystemExit, match="1"):
        gpu.main([*arguments, "--only", "passes,kernels", "--limit", "1"])
    second = last_document(capsys)
    assert second["parts"]["floor"] == first["parts"]["floor"]
    assert second["parts"]["passes"]["error"] == second["parts"]["kernels"]["error"] == "stopped after 1 s"
    assert {row["met"] for row in second["targets"]} == {None}
    assert json.loads(out.read_text()) == second


def test_a_part_that_raises_leaves_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'import json; print(json.dumps(["a", {"x": 1}]), flush=True); raise SystemExit(3)'
    monkeypatch.setattr(gpu, "COMMAND", [gpu.sys.executable, "-c", script])
    *_, part = gpu.run_part("floor", [], 60)
    assert part["figures"] == {"a": {"x": 1}}
    assert "code 3" in part["error"]


def test_the_tests_part_counts_and_names_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    path = tmp_path / "test_some.py"
    path.write_text("def test_a(): pass\ndef test_b(): assert 0\n")
    plan = Plan(device="cpu", tests=("-c", "/dev/null", f"--rootdir={tmp_path}", str(path)))
    ((_, figures),) = parts.run_tests(plan)
    assert (figures["exit_code"], figures["passed"], figures["failed"]) == (1, 1, 1)
    assert figures["failures"][0].startswith("FAILED ")

"""The benchmarks keep their contract: what they print, on tiny models, and what they do about peers that are not there."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import ngramspec
from benchmarks import common, decode, fidelity, infill, loads, peers, step, text_ends
from benchmarks.peers import PeerAbsentError, PeerTask, TimedRun
from benchmarks.recordings import read_traces
from ngramspec import Engine, SamplingParams, Stats, datastore

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
TEXTS = ("def add(a, b):\n", "abcabcabcabc", "x = 1\nx = 1\nx =", "the cat, the dog, the", "import os\nimport")

VLLM = """
import os, sys
__version__ = "0.1"
print("vllm says hello")
class SamplingParams:
    def __init__(self, max_tokens, temperature, seed, stop_token_ids): self.max_tokens = max_tokens
class Result:
    def __init__(self, ids): self.outputs = [self]; self.token_ids = ids
class LLM:
    def __init__(self, folder, dtype, max_model_len, speculative_config):
        assert dtype == "float32" and "benchmarks" not in sys.path[0]
        if speculative_config and speculative_config["method"] == "suffix":
            raise ImportError("Arctic Inference is required for suffix decoding.")
        self.count = 0
        os.system("echo noise of a child")
    def generate(self, prompts, params, use_tqdm):
        self.count += 1
        if self.count > 3:
            raise RuntimeError("the engine core died")
        return [Result(prompt["prompt_token_ids"][: params.max_tokens]) for prompt in prompts]
"""
"""Stands in for vLLM: writes to standard output, echoes prompts, and dies at its fourth call."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.tiny_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    return write_rows(tmp_path, [{"id": f"t/{n}", "prompt": text} for n, text in enumerate(TEXTS)])


@pytest.fixture
def vllm_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    monkeypatch.setattr(peers, "VLLM_REST_S", 0)
    return Path(sys.executable)


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def last_document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def make_task(folder: Path, max_tokens: int = 4) -> PeerTask:
    return PeerTask(folder, SamplingParams(max_tokens=max_tokens), (tiny.EOS,), threads=1, max_len=64)


# ---------------------------------------------------------------------------- prompts


def test_rows_of_every_kind(tmp_path: Path, tokenizer: Any) -> None:
    chat = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "V"},
    ]
    path = write_rows(tmp_path, [{"prompt": "ab"}, {"id": "ids", "prompt": [1, 2, 3]}, {"id": "chat", "messages": chat}])
    prompts = common.read_prompts(path, tokenizer)
    assert [prompt.name for prompt in prompts] == ["rows.jsonl:1", "ids", "chat"]
    assert prompts[0].ids == [97, 98]
    assert prompts[1].ids == [1, 2, 3]
    assert bytes(prompts[2].ids) == b"system:S\nuser:U\nassistant:"
    assert common.read_prompts(path, tokenizer, limit=2) == prompts[:2]


def test_a_row_with_a_suffix_asks_for_the_middle(tmp_path: Path) -> None:
    path, tokenizer = write_rows(tmp_path, [{"prompt": "a", "suffix": "b"}]), tiny.byte_tokenizer()
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*no tokens to fill in the middle"):
        common.read_prompts(path, tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]})
    begin, hole, end = tokenizer.convert_tokens_to_ids(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    assert common.read_prompts(path, tokenizer)[0].ids == [begin, 97, hole, 98, end]
    path = write_rows(tmp_path, [{"prompt": "", "suffix": "b"}])
    assert common.read_prompts(path, tokenizer)[0].ids == [begin, hole, 98, end]
    for wrong in ({"prompt": [97], "suffix": "b"}, {"messages": [{"role": "user", "content": "a"}], "suffix": "b"}):
        with pytest.raises(ValueError, match=r"rows\.jsonl:1: .*`suffix` must have a `prompt` of text"):
            common.read_prompts(write_rows(tmp_path, [wrong]), tokenizer)
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: the prompt has no tokens"):
        common.read_prompts(write_rows(tmp_path, [{"prompt": ""}]), tokenizer)


def test_a_row_without_a_prompt_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: .*`prompt`"):
        common.read_prompts(write_rows(tmp_path, [{"prompt": "a"}, {"reference": "b"}]), tokenizer)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="no prompts"):
        common.read_prompts(tmp_path / "empty.jsonl", tokenizer)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        (b'{"messages": [{"content": "a"}]}', "`role`"),
        (b'{"messages": "a"}', "`messages`"),
        (b'{"prompt": {"a": 1}}', "`prompt`"),
        (b'{"prompt_ids": ["a"], "output_ids": [1]}', "`prompt_ids`"),
        (b'{"id": 1}', "`prompt`"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b"{", "column 2"),
        (b"[" * 100_000, "recursion"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_the_line_of_a_row_that_cannot_be_used_is_named_by_all_that_read_rows(
    tmp_path: Path, tokenizer: Any, row: bytes, what: str
) -> None:
    path, good = tmp_path / "rows.jsonl", {"prompt": "a", "reference": "longer text"}
    readers: list[tuple[dict[str, Any], Callable[[], object]]] = [
        (good, lambda: common.read_prompts(path, tokenizer)),
        (good, lambda: read_traces(path, tokenizer, None, 99, predicted=True)),
        (good | {"suffix": ""}, lambda: infill.read_cursors(path, 2)),
    ]
    for first, read in readers:
        path.write_bytes(json.dumps(first).encode() + b"\n\n" + row + b"\n")
        with pytest.raises(SystemExit, match=rf"rows\.jsonl:3: .*{what}"):
            common.run_command(read)


def test_a_row_may_hold_every_character_that_json_allows(tmp_path: Path, tokenizer: Any) -> None:
    """U+2028 and U+0085 end a line of text, not one of a JSONL file."""
    rows = [{"prompt": "a\u2028b", "suffix": "\x85", "reference": "c\u2028d"}, {"prompt": "e", "suffix": "", "reference": ["", "f", "g"]}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert [row for _, row in common.iterate_rows(path)] == rows
    assert [(each.prefix, each.reference) for each in infill.read_cursors(path, 2)] == [("a\u2028b", "c\u2028d"), ("e", "f")]
    path.write_text(json.dumps({"prompt": "a\u2028b", "reference": "c\u2028d"}, ensure_ascii=False), encoding="utf-8")
    ((_, reference),) = fidelity.read_references(path, tokenizer)
    assert bytes(reference).decode() == "c\u2028d"
    assert bytes(text_ends.read_rows(path, tokenizer, 1)[0]["ids"]).decode() == "a\u2028b"
    for wrong in ("[1]", "{"):
        path.write_text(f'{{"prompt": "a"}}\n{wrong}\n')
        with pytest.raises(ValueError, match=r"rows\.jsonl:2: "):
            list(common.iterate_rows(path))


def test_a_recorded_output_is_the_first_of_several_references(tmp_path: Path, tokenizer: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "U"}]}
    path = write_rows(tmp_path, [chat | {"reference": ["first\nof two", "second"]}, {"prompt": "p", "reference": ["longer text"]}, chat])
    assert [bytes(trace.output).decode() for trace in read_traces(path, tokenizer, None, 99)] == ["first\nof two", "longer text"]


def test_random_prompts_are_reproducible_and_never_repeat(tokenizer: Any) -> None:
    prompts = common.make_random_prompts(tokenizer, 3, seed=1, length=50)
    assert prompts == common.make_random_prompts(tokenizer, 3, seed=1, length=50)
    assert prompts != common.make_random_prompts(tokenizer, 3, seed=2, length=50)
    assert all(len(set(prompt.ids)) == 50 for prompt in prompts)
    assert not {tiny.BOS, tiny.EOS} & {token for prompt in prompts for token in prompt.ids}


def test_library_prompts_stop_before_the_code(tokenizer: Any) -> None:
    prompts = {prompt.name: bytes(prompt.ids).decode() for prompt in common.make_library_prompts(tokenizer)}
    assert prompts["complete/shorten"].startswith("def shorten(")
    assert prompts["complete/shorten"].rstrip().endswith('"""')
    assert ".join" not in prompts["complete/shorten"]
    assert "return" in prompts["edit/shorten"]


# ---------------------------------------------------------------------------- measuring


def test_everybody_comes_first_in_turn() -> None:
    orders = list(common.order_turns(["a", "b", "c"], 6))
    assert [order[0] for order in orders] == ["a", "b", "c", "a", "b", "c"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


def test_medians_leave_out_the_first_round() -> None:
    values = {"a": iter([1000.0, 1.0, 2.0, 9.0]), "b": iter([0.0, 5.0, 5.0, 5.0])}
    medians = common.measure_medians({name: lambda v=v: next(v) for name, v in values.items()}, 3)
    assert medians == {"a": 2.0, "b": 5.0}


def test_figures_of_known_runs() -> None:
    off = [TimedRun([[1, 2, 3, 4]], 2.0), TimedRun([[5, 6]], 1.0)]
    on = [
        TimedRun([[1, 2, 3, 4]], 1.0, Stats(passes=2, tokens=4, drafted=4, accepted=2)),
        TimedRun([[5, 7]], 0.5, Stats(passes=2, tokens=2)),
    ]
    found = decode.make_figures({"off": off, "on": on, "hf": [off[0], TimedRun([[5, 6]], 4.0)]}, {"vllm-none": "why"}, sampled=False)
    assert (found["tokens"], found["identical"]) == (6, 1)
    assert (found["tok_s_off"], found["tok_s_on"], found["speedup"], found["speedup_median"]) == (2.0, 4.0, 2.0, 2.0)
    assert (found["tokens_per_pass"], found["rows_per_pass"], found["acceptance"]) == (1.5, 1.0, 0.5)
    hf = found["peers"]["hf"]
    assert (hf["tok_s"], hf["identical"], hf["tokens"], hf["off_against"], hf["on_against"]) == (1.0, 2, 6, 2.0, 4.0)
    assert (hf["off_against_median"], hf["on_against_median"]) == (2.5, 5.0)
    assert found["peers"]["vllm-none"] == {"absent": "why"}


def test_the_driver_is_asked_for_by_a_name_that_nvidia_smi_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = tmp_path / "nvidia-smi"
    stub.write_text('#!/bin/sh\n[ "$1" = --query-gpu=driver_version ] || exit 2\necho 570.86\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert common.read_driver_version() == "570.86"
    stub.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert common.read_driver_version() == "unknown"


# ---------------------------------------------------------------------------- decode


@pytest.mark.parametrize("options", [[], ["--temperature", "0.8", "--seed", "3"]])
def test_decode_keeps_its_contract(
    folder: Path, prompts_file: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited, finish_compiling = [], Engine.finish_compiling
    monkeypatch.setattr(Engine, "finish_compiling", lambda *args: waited.append(finish_compiling(*args)))
    arguments = ["--model", str(folder), "--prompts", str(prompts_file), "--max-tokens", "12", *options]
    decode.main([*arguments, "--against", "hf-pld" if options else "hf,hf-pld,vllm-none", "--vllm-python", "/nowhere/python"])
    alone = last_document(capsys)
    decode.main([*arguments, "--concurrency", "3", "--limit", "5"])
    together = last_document(capsys)
    decode.main([*arguments, "--concurrency", "2", "--per-turn", "3"])
    queued = last_document(capsys)
    assert queued["settings"]["per_turn"] == 3
    assert len(waited) == 3, "until drafting is compiled, at a first start, speculation on would be speculation off"
    for document in (alone, together, queued):
        assert document["prompts"] == document["identical"] == len(TEXTS)
        assert 0 < document["tokens"] <= 12 * len(TEXTS)
        assert document["tok_s_off"] > 0
        assert document["tok_s_on"] > 0
        assert document["speedup"] == pytest.approx(document["tok_s_on"] / document["tok_s_off"], rel=0.02)
        assert document["tokens_per_pass"] >= 1
        assert 0 <= document["acceptance"] <= 1
        assert document["rows_per_pass"] >= 0
        assert document["exactness"] in ("bitwise", "numerical")
        assert document["versions"]["torch"] == torch.__version__
    assert alone["digest"] == together["digest"] == queued["digest"]
    assert (alone["peers"]["hf-pld"]["identical"] is None) == bool(options)
    if not options:
        assert alone["peers"]["hf"]["tok_s"] > 0
        assert "/nowhere/python" in alone["peers"]["vllm-none"]["absent"]


def test_texts_are_compared_anew_if_what_they_depend_on_has_changed(
    folder: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log of earlier texts must not answer for other code, settings or prompts."""
    log = tmp_path / "log.jsonl"
    arguments = ["--identity", "--model", str(folder), "--max-tokens", "4", "--modes", "off@2,on@3", "--log", str(log), "--threads", "1"]
    n_rows = 0
    for code, rows, is_new in (("1", TEXTS[:3], True), ("1", TEXTS[:3], False), ("2", TEXTS[:3], True), ("2", TEXTS[3:5], True)):
        monkeypatch.setattr(common, "digest_code", lambda _, code=code: code)
        prompts_file.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(rows)))
        decode.main([*arguments, "--prompts", str(prompts_file)])
        assert last_document(capsys)["sets"] == {"rows": {"prompts": len(rows), "off@2": len(rows), "on@3": len(rows)}}
        n_rows += 2 * len(rows) * is_new
        assert len(log.read_text().splitlines()) == n_rows
    log.write_text(log.read_text().replace('"mode": "on@3"}, "digest": "', '"mode": "on@3"}, "digest": "0'))
    with pytest.raises(SystemExit, match="1"):
        decode.main([*arguments, "--prompts", str(prompts_file)])
    assert last_document(capsys)["sets"]["rows"]["on@3"] == 0


def test_the_digest_of_the_code_is_of_all_that_writes_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = [common.digest_code("cpu"), common.digest_code("cuda:0")]
    package = Path(shutil.copytree(Path(ngramspec.__file__).parent, tmp_path / "ngramspec", ignore=shutil.ignore_patterns("__pycache__")))
    found = {"ngramspec": types.SimpleNamespace(__file__=str(package / "__init__.py")), "ngramspec.datastore": datastore}
    monkeypatch.setattr(common.importlib, "import_module", found.__getitem__)
    assert [common.digest_code("cpu"), common.digest_code("cuda:0")] == digests
    for changed, differ in (("server/app.py", [0, 0]), ("backends/cuda/model.py", [0, 1]), ("sampling/verify.py", [1, 2])):
        with (package / changed).open("a") as file:
            file.write("\n")
        now = [common.digest_code("cpu"), common.digest_code("cuda:0")]
        assert [a != b for a, b in zip(now, digests, strict=True)] == [bool(n) for n in differ]


def test_decode_random_prompts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode.main(["--model", str(folder), "--random-prompts", "2", "--max-tokens", "6"])
    document = last_document(capsys)
    assert document["settings"]["temperature"] == 1.5
    assert document["prompts"] == document["identical"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--datastore", "nowhere"], "nowhere is not a datastore"),
        (["--against", "hf,llama"], "'llama' is none of hf"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--concurrency", "0"], "integer from 1"),
        (["--per-turn", "9", "--against", "hf"], "--per-turn"),
        (["--identity", "--prompts", __file__, "--modes", "on@1,on@1"], "two different ones are compared, got on@1 alone"),
    ],
)
def test_decode_refuses(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        decode.main(["--model", "m", *options])
    assert message in capsys.readouterr().err


def test_prompts_that_do_not_fit_are_counted(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_rows(tmp_path, [{"prompt": "abcab"}, {"prompt": "a" * 250}])
    decode.main(["--model", str(folder), "--prompts", str(path), "--max-tokens", "16"])
    document = last_document(capsys)
    assert (document["prompts"], document["skipped"]) == (1, 1)


# ---------------------------------------------------------------------------- peers


@torch.inference_mode()
@pytest.mark.parametrize("name", ["hf", "hf-pld"])
def test_hf_peer_is_greedy_and_returns_new_tokens_only(tiny_model: Callable[..., Any], folder: Path, name: str) -> None:
    model = tiny_model("llama")

    def greedy(prompt: list[int]) -> list[int]:
        output: list[int] = []
        while len(output) < 6 and tiny.EOS not in output:
            output.append(int(model(input_ids=torch.tensor([prompt + output])).logits[0, -1].argmax()))
        return output

    prompts = [[97, 98, 99] * 4, [97, 98, 99, 97, 98]]
    with contextlib.closing(peers.open_peer(name, make_task(folder, 6), None)) as peer:
        run = peer.complete(prompts)
        assert run.outputs == [greedy(prompt) for prompt in prompts]
        assert run.n_tokens == sum(map(len, run.outputs))
        assert run.seconds > 0
    assert peer.process.returncode == 0


def test_vllm_peer_speaks_through_its_noise(folder: Path, vllm_python: Path) -> None:
    with contextlib.closing(peers.open_peer("vllm-ngram", make_task(folder), vllm_python)) as peer:
        assert peer.version == "0.1"
        assert peer.complete([[1, 2, 3, 4, 5, 6], [7]]).outputs == [[1, 2, 3, 4], [7]]
        peer.complete([[1]])
        peer.complete([[1]])
        for _ in range(2):  # it dies, and stays dead
            with pytest.raises(PeerAbsentError, match="the engine core died"):
                peer.complete([[1]])
    assert peer.process.returncode is not None


def test_an_absent_peer_says_why(folder: Path, vllm_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerAbsentError, match="Arctic Inference is required"):
        peers.open_peer("vllm-suffix", make_task(folder), vllm_python)
    with pytest.raises(PeerAbsentError, match="make peers"):
        peers.open_peer("vllm-none", make_task(folder), None)
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(PeerAbsentError, match="No module named 'vllm'"):
        peers.open_peer("vllm-none", make_task(folder), vllm_python)


def test_a_peer_that_dies_is_reported_and_the_rest_goes_on(
    folder: Path, prompts_file: Path, vllm_python: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decode.main(
        [
            *("--model", str(folder), "--prompts", str(prompts_file), "--max-tokens", "4"),
            *("--against", "vllm-none,hf", "--vllm-python", str(vllm_python)),
        ]
    )
    document = last_document(capsys)
    assert "the engine core died" in document["peers"]["vllm-none"]["absent"]
    assert document["peers"]["hf"]["tokens"] > 0
    assert document["identical"] == len(TEXTS)


# ---------------------------------------------------------------------------- step


def test_step_keeps_its_contract(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step.main(["--model", str(folder), "--context", "32", "--rows", "2,4", "--repeat", "2"])
    document = last_document(capsys)
    for name in ("rows", "ratio", "stock_rows", "stock_ratio", "floor_share"):
        assert list(document[name]) == ["1", "2", "4"]
        assert all(value > 0 for value in document[name].values())
    assert document["ratio"]["1"] == document["stock_ratio"]["1"] == 1
    assert document["floor_ms"] > 0
    settings = {"context": 32, "prompt_tokens": 512, "repeat": 2, "linears": "exact", "precision": "auto", "against": None}
    assert document["settings"] == settings
    assert document["prefill_512_ms"] is None  # the model holds 256


def test_row_counts_come_as_numbers_and_ranges() -> None:
    assert common.parse_counts("8,1-3,2") == [1, 2, 3, 8]
    for text in ("", "4-2", "0-3", "3-", "1-2-3"):
        with pytest.raises(argparse.ArgumentTypeError):
            common.parse_counts(text)
    assert common.parse_floats("0,0.8,1e3") == [0, 0.8, 1000]
    for text in ("nan", "inf", "-1", "1e999", "", "0,nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="must be a number from 0"):
            common.parse_floats(text)


def test_a_kink_is_measured_against_the_line_between_half_and_twice_as_many_rows() -> None:
    straight = {n: 5.0 + 2 * n for n in (1, 2, 3, 4, 6, 8, 16)}
    assert step.find_kinks(straight) == {"2": 1.0, "3": 1.0, "4": 1.0, "6": 1.0, "8": 1.0}
    assert step.find_kinks({1: 10.0, 3: 30.0, 7: 40.0}) == {"3": 1.5}  # the line from 1 to 7 has 20 at 3


def test_passes_of_known_medians() -> None:
    medians = {"ours": {"1": 4.0, "2": 5.0, "prefill": 90.0}, "llama": {"1": 8.0, "2": 20.0, "prefill": 300.0}, "floor": {"read": 3.0}}
    found = step.make_figures(medians | {"stock": {"1": 10.0, "2": 15.0}}, [1, 2], 512, 6_000_000)
    assert (found["ratio"], found["stock_ratio"]) == ({"1": 1.0, "2": 1.25}, {"1": 1.0, "2": 1.5})
    assert (found["llama_ratio"], found["llama_rows"]) == ({"1": 0.5, "2": 0.25}, {"1": 8.0, "2": 20.0})
    assert (found["floor_share"], found["floor_gb_s"]) == ({"1": 0.75, "2": 0.6}, 2.0)
    assert (found["prefill_512_ms"], found["llama_prefill_512_ms"]) == (90.0, 300.0)


def test_precision_reaches_the_engine_where_it_is_given() -> None:
    args = decode.parse_args(["--model", "m", "--precision", "int8", "--threads", "2"])
    assert common.get_engine_options(args) == {"device": "cpu", "dtype": "float32", "threads": 2, "precision": "int8"}
    assert "precision" not in common.get_engine_options(step.parse_args(["--model", "m"]))


def test_step_leaves_the_stock_cache_as_it_was(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    cache = step.make_stock_cache(model, 16)
    for rows in (1, 5, 3):
        assert step.time_stock(model, cache, rows, "cpu") > 0
        assert cache.get_seq_length() == 16
        assert cache.layers[0].keys.shape[2] == 16


def test_weight_bytes_count_a_tied_table_once(tiny_model: Callable[..., Any]) -> None:
    tied, untied = tiny_model("llama", tie_word_embeddings=True), tiny_model("llama", tie_word_embeddings=False)
    assert step.count_weight_bytes(tied) == step.count_weight_bytes(untied)
    assert step.count_weight_bytes(tied) == sum(p.numel() for p in tied.parameters()) * 4


def test_rates_are_of_a_load_that_stays_the_same() -> None:
    begun = [0.0, 0.1, 4.0, 4.1, 8.0, 8.1]  # two at a time, which end together
    assert loads.find_steady_time(begun, 2, -1.0, 12.0) == (4.1, 8.1)
    assert loads.find_steady_time(begun[::-1], 2, -1.0, 12.0) == (4.1, 8.1)
    assert loads.find_steady_time(begun[:4], 2, -1.0, 8.0) == (-1.0, 8.0), "too few"
    assert loads.find_steady_time(begun, 1, -1.0, 12.0) == (-1.0, 12.0)


def test_lengths_of_texts_that_run_together_vary_around_the_mean() -> None:
    lengths = loads.vary_lengths(96, 48)
    for part in (lengths, lengths[:16], lengths[7:31]):
        assert 90 <= sum(part) / len(part) <= 102
        assert min(part) < 60
        assert max(part) > 132
    assert len(set(lengths)) > 40
    prompts = [common.Prompt(str(i), [i]) for i in range(7)]
    assert [p.name for p in loads.mix_prompts(prompts, 2)] == ["0", "3", "6", "1", "4", "2", "5"]
    assert loads.mix_prompts(prompts, 1) == loads.mix_prompts(prompts, 8) == prompts


class TimedLoad:
    """A contender whose rounds take the seconds given, and write these texts."""

    def __init__(self, name: str, seconds: list[float], texts: list[list[int]]) -> None:
        self.name, self.texts, self._seconds = name, texts, iter(seconds)
        self.engine = types.SimpleNamespace(use=lambda **_: None)

    def run(self, prompts: list[common.Prompt], _: Any, __: int, turns: Any, runs: loads.Runs) -> None:
        seconds = next(self._seconds)
        runs.seconds.append(2 * seconds)
        runs.full.append((12, seconds))
        runs.host_ms.append(seconds)
        runs.outputs += [self.texts[int(prompt.name)] for prompt in prompts]
        turns.remove(self.name)


def test_a_cell_of_known_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "make_fresh_drafts", lambda *_: None)
    same, other = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]]
    contenders: Any = [TimedLoad("off", [4.0, 8.0], same), TimedLoad("on", [2.0, 2.0], same), TimedLoad("unrelated", [4.0, 4.0], other)]
    monkeypatch.setattr(loads, "complete_concurrently", lambda *_: [])
    args = argparse.Namespace(max_tokens=4, rounds=2, limit=2, concurrency=[2])
    row = loads.measure_cell(contenders, loads.Cell([common.Prompt(str(i), [i]) for i in range(2)], [], 2), 0.0, args)
    assert (row["prompts"], row["tokens"], row["identical"]) == (4, 12, 2)
    assert (row["tok_s_off"], row["tok_s_on"], row["speedup"], row["rounds"]) == (2.0, 6.0, 3.0, [2.0, 4.0])
    assert (row["speedup_to_the_end"], row["against_on"]) == (3.0, {"unrelated": 0.5})
    assert row["host_ms"] == {"off": 6.0, "on": 2.0, "unrelated": 4.0}


def test_loads(folder: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(loads, "SETTLED", 3)
    options = ["--limit", "3", "--max-tokens", "4", "--temperatures", "0", "--concurrency", "1,3", "--threads", "1"]
    loads.main(["--model", str(folder), "--prompts", str(prompts_file), "--unrelated", str(prompts_file), "--disturbed", *options])
    document = last_document(capsys)
    assert document["identical"]
    assert [(row["key"]["concurrency"], row["prompts"]) for row in document["cells"]] == [(1, 3), (3, 2 * min(len(TEXTS), 9))]
    assert all(row["speedup"] > 0 and row["speedup_to_the_end"] > 0 for row in document["cells"])
    assert all(row["against_on"].keys() == {"unrelated", "disturbed"} for row in document["cells"])
    assert all(0 < ms < 1000 for row in document["cells"] for ms in row["host_ms"].values())
    assert document["means"].keys() == {"1", "3"}

"""What is measured against llama.cpp: passes, starts and fidelity, on tiny models, with a module in the place of llama-cpp-python."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import tiny_gguf
import torch

from benchmarks import fidelity, our_engine, start, step
from ngramspec import Engine

LLAMA = f"""
import time
import numpy as np
__version__ = "0.2"
print("llama says hello")
class Llama:
    def __init__(self, path, n_ctx, n_batch, n_threads, n_threads_batch, verbose, logits_all=False):
        assert open(path, "rb").read(4) == b"GGUF"
        self.n_ctx, self.n_tokens = n_ctx, 0
        self.scores = np.zeros((n_ctx if logits_all else n_batch, {tiny.VOCAB}), np.float32)
    def n_vocab(self):
        return {tiny.VOCAB}
    def reset(self):
        self.n_tokens = 0
    def eval(self, tokens):
        assert all(0 <= token < {tiny.VOCAB} for token in tokens)
        self.n_tokens += len(tokens)
        time.sleep(5e-5 * len(tokens))
        assert self.n_tokens <= self.n_ctx
    def tokenize(self, text):
        return list(text)
    def generate(self, tokens, temp):
        while True:
            yield 1
"""
"""Stands in for llama-cpp-python: writes to standard output, takes its time, and finds every token as likely as any other."""

PROMPT, REFERENCE = "def add(a, b):\n", "    return a + b\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("tiny"), 0.0)


def save(folder: Path, noise: float) -> Path:
    """A tiny model that holds 1024 tokens, some of its weights changed by so much."""
    model = tiny.tiny_model("llama", max_position_embeddings=1024)
    with torch.no_grad():
        model.get_output_embeddings().weight.add_(noise * torch.randn(tiny.VOCAB, 64, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options that choose the module above."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "llama_cpp.py").write_text(LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stub"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF and so on")
    return ["--against", "llama", "--llama-python", sys.executable, "--llama-gguf", str(tmp_path / "m.gguf")]


def last_document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


# ---------------------------------------------------------------------------- step


def test_step_against_llama(folder: Path, llama: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    step.main(
        [
            "--model",
            str(folder),
            "--rows",
            "2-4,8",
            "--context",
            "600",
            "--prompt-tokens",
            "300",
            "--repeat",
            "2",
            "--without-transformers",
            *llama,
        ]
    )
    document = last_document(capsys)
    counts = ["1", "2", "3", "4", "8"]
    for name in ("rows", "ratio", "llama_rows", "llama_ratio"):
        assert list(document[name]) == counts
        assert all(value > 0 for value in document[name].values())
    for n in counts:
        assert document["llama_ratio"][n] == pytest.approx(document["rows"][n] / document["llama_rows"][n], rel=0.5, abs=0.001)
    assert list(document["kinks"]) == ["2", "3", "4"]
    assert document["max_kink"] == max(document["kinks"].values())
    assert document["prefill_300_ms"] > 0
    assert document["llama_prefill_300_ms"] > 0
    assert document["versions"]["llama"] == "0.2"
    assert "stock_rows" not in document
    assert document["weight_bytes"] is None
    assert "floor_ms" not in document


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "takes a GGUF file, and the weights do not come from one"),
        (["--llama-gguf", "m.gguf"], "llama-cpp-python is not installed here.* -m pip install llama-cpp-python"),
        (["--llama-gguf", "m.gguf", "--llama-python", "/nowhere/python"], "/nowhere/python cannot be run"),
    ],
)
def test_without_llama_it_is_said_why(options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ModuleNotFoundError(\"No module named 'llama_cpp'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for program in (step, start):
        with pytest.raises(SystemExit, match=f"--against llama: .*{message}"):
            program.main(["--model", "nowhere", "--against", "llama", "--llama-python", sys.executable, *options])


def test_bytes_of_a_file_count_its_table_once(tmp_path: Path) -> None:
    sizes = {}
    for tied in (True, False):
        writer = gguf.GGUFWriter(tmp_path / f"{tied}.gguf", "llama")
        for name in ("token_embd.weight", "blk.0.attn_q.weight", *([] if tied else ["output.weight"])):
            writer.add_tensor(name, np.ones((8, 64), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        sizes[tied] = step.count_file_bytes([tmp_path / f"{tied}.gguf"])
    assert sizes == {True: 2 * 8 * 64 * 4, False: 2 * 8 * 64 * 4}
    assert step.count_file_bytes([]) is None


def test_all_parts_of_a_split_file_are_found(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for path in (*parts, tmp_path / "m-00001-of-00002.gguf", tmp_path / "other-00001-of-00003.gguf"):
        path.touch()
    assert our_engine.find_gguf_files(str(parts[0])) == parts
    assert our_engine.find_gguf_files("m.GGUF") == [Path("m.GGUF")]
    assert our_engine.find_gguf_files(str(tmp_path)) == []


# ---------------------------------------------------------------------------- start


def test_start_keeps_its_contract(tmp_path: Path, llama: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf.write_started(tmp_path / "started.gguf", threads=1)
    start.main(["--model", str(path), "--repeat", "1", "--threads", "1", *llama])
    document = last_document(capsys)
    for name in ("start_s", "first_start_s", "llama_start_s", "rss_bytes", "llama_rss_bytes"):
        assert document[name] > 0
    assert document["peak_bytes"] >= document["rss_bytes"]
    assert document["file_bytes"] == path.stat().st_size
    assert 0 < document["kv_bytes"] < document["peak_bytes"]
    assert document["kv_bytes"] % (2 * 2 * 2 * 64) == 0  # layers, keys and values, heads, head size
    assert document["threads"] == 1


def test_a_start_without_tokenizer_or_file(folder: Path) -> None:
    args = start.parse_args(["--model", "random:" + str(folder / "config.json")])
    started = start.time_start(partial(start.open_ours, args, {}))
    assert started.seconds > 0
    assert started.more["props"]["exactness"] == "bitwise"
    assert start.count_file_bytes(args.model) is None
    assert start.count_file_bytes(str(folder)) == (folder / "model.safetensors").stat().st_size


def test_a_model_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"there is no file or folder"):
        start.main(["--model", str(tmp_path / "nowhere.gguf"), "--repeat", "1"])


# ---------------------------------------------------------------------------- fidelity


@torch.inference_mode()
def test_fidelity_is_that_of_the_models_own_distributions(
    folder: Path, llama: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save(tmp_path / "other", 0.02)

    def open_engine(model: str, *, precision: str, **options: Any) -> Engine:
        return Engine(str(other) if precision == "int8" else model, **options)

    monkeypatch.setattr(fidelity, "Engine", open_engine)
    monkeypatch.setattr(fidelity, "PIECE", 8)
    texts = tmp_path / "texts.jsonl"
    rows = [{"prompt": PROMPT, "reference": ["", REFERENCE]}, {"prompt": PROMPT}, {"prompt": "a" * 19, "reference": "bc" * 50}]
    texts.write_text("\n".join(map(json.dumps, rows)))
    fidelity.main(["--model", str(folder), "--texts", str(texts), "--tokens", "40", *llama])
    document = last_document(capsys)

    exact, changed = (tiny_logits(path) for path in (folder, other))
    kl, losses, n = 0.0, [0.0, 0.0], 0
    for prompt, reference in ((PROMPT, REFERENCE), ("a" * 19, "bc" * 50)):
        ids = list((prompt + reference).encode())[: len(prompt) + 40 - n]
        p, q = (model(ids)[len(prompt) - 1 : -1] for model in (exact, changed))
        kl += float((p.exp() * (p - q)).sum())
        for i, each in enumerate((p, q)):
            losses[i] -= sum(float(row[token]) for row, token in zip(each, ids[len(prompt) :], strict=True))
        n += len(p)
    assert document["tokens"] == n == 40
    assert document["kl_int8"] == pytest.approx(kl / n, rel=1e-3)
    assert document["kl_int8"] > 1e-3
    assert document["perplexity_float32"] == pytest.approx(math.exp(losses[0] / n), rel=1e-4)
    assert document["perplexity_int8"] == pytest.approx(math.exp(losses[1] / n), rel=1e-4)
    assert document["perplexity_llama"] == pytest.approx(tiny.VOCAB)
    assert document["kl_llama"] > document["kl_int8"]
    assert document["texts"] == 2


def tiny_logits(folder: Path) -> Any:
    """Token ids -> log-probabilities [n, V] of the next, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return lambda ids: model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_files_of_texts_share_the_tokens(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        path.write_text("\n".join([json.dumps({"prompt": "pp", "reference": "r" * 6})] * 3))
    texts = fidelity.read_texts(paths, tiny.byte_tokenizer(), 15, max_len=7)
    assert [len(text.ids) - text.first for text in texts] == [5, 2, 5, 3]
    with pytest.raises(SystemExit, match=r"no row of a\.jsonl, b\.jsonl has a reference that fits"):
        fidelity.read_texts(paths, tiny.byte_tokenizer(), 15, max_len=2)

"""Precisions as users meet them: settings and what they are refused for, where the precision is told, and texts that depend on it alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch
from fastapi.testclient import TestClient

from ngramspec import Engine, SamplingParams
from ngramspec.backends.cpu.attention import CpuAttentionPass
from ngramspec.backends.cpu.llama_runner import LlamaRunner
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.errors import InvalidInputError, UnsupportedModelError
from ngramspec.server.app import create_app
from ngramspec.server.settings import ServerSettings

WORDS = ("tree", "house", "cloud", "a", "sea", "x", "yes", "stone")
LIMITS: dict[str, Any] = {"max_model_len": 200, "kv_memory": 1 << 24, "max_seqs": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def file(folder: Path, kind: str) -> str:
    path = folder / f"{kind}.gguf"
    return str(path if path.exists() else tiny_gguf.write(path, "llama", kind, std=0.15))


@pytest.fixture(scope="module", params=["int8", "float32"])
def precision(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def engine(request: pytest.FixtureRequest, folder: Path, precision: str) -> Iterator[Engine]:
    with Engine(file(folder, request.param), precision=precision, **LIMITS) as engine:
        engine.core.cost = tiny.FreeRows()
        yield engine
        engine.runner.pool.check_integrity()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_depend_on_nothing_else(engine: Engine, temperature: float) -> None:
    prompts = [f"the {word} of a {word}: " * (1 + i % 3) for i, word in enumerate(WORDS)]
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    off = [engine.complete(prompt, params, speculation=False) for prompt in prompts]
    assert {done.exactness for done in off} == {"bitwise"}
    expected = [done.token_ids for done in off]
    assert len({tuple(ids) for ids in expected}) == 8
    spoiled = [done.text[:10] + "?" + done.text[11:] for done in off]
    alone = [engine.complete(p, params, prediction=text) for p, text in zip(prompts, spoiled, strict=True)]
    assert [done.token_ids for done in alone] == expected
    assert 0 < sum(done.stats.accepted for done in alone) < sum(done.stats.drafted for done in alone)
    assert [done.token_ids for done in engine.complete(prompts, params)] == expected
    assert [done.token_ids for done in engine.complete(prompts, params, speculation=False)] == expected


def test_a_later_start_writes_the_same(folder: Path, precision: str) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
    path, made = str(tiny_gguf.write(folder / f"again-{precision}.gguf", "qwen3", "Q5_K")), []
    for kind in (CpuRunner, LlamaRunner):
        with Engine(path, precision=precision, **LIMITS) as engine:
            assert type(engine.runner) is kind
            made.append((engine.complete("the sea ", params).token_ids, engine.precision, engine.exactness, engine.props()["kv_dtype"]))
    assert made[0] == made[1]


def test_where_the_precision_is_told(engine: Engine, precision: str) -> None:
    assert engine.precision == engine.complete("a", SamplingParams(max_tokens=1)).precision == precision
    props = engine.props()
    assert (props["precision"], props["kv_dtype"]) == (precision, {"int8": "float16", "float32": "float32"}[precision])
    assert all(form.startswith("blocks of ") for form in props["linear_policies"].values())
    client = TestClient(create_app(engine, ServerSettings()), base_url="http://127.0.0.1")
    assert client.get("/props").json()["precision"] == precision
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()
    assert answer["system_fingerprint"].endswith(f"-bitwise-{precision}")


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, ("int8", "float16")),
        ({"precision": "float32"}, ("float32", "float32")),
        ({"kv_dtype": "float32"}, ("int8", "float32")),
        ({"precision": "float32", "kv_dtype": "float16"}, ("float32", "float16")),
        ({"linears": "unpacked"}, ("float32", "float32")),
    ],
)
def test_what_is_chosen_for_weights_in_blocks(folder: Path, settings: dict[str, str], found: tuple[str, str]) -> None:
    for _ in range(2):  # a later start takes another way
        with Engine(file(folder, "Q4_0"), **LIMITS, **settings) as engine:
            assert (engine.precision, engine.props()["kv_dtype"]) == found
            forms = set(engine.props()["linear_policies"].values())
            assert forms == ({"F32"} if "linears" in settings else {"blocks of 4 bits"})


def test_other_weights(folder: Path) -> None:
    with Engine(file(folder, "F16"), **LIMITS) as engine:
        assert (engine.precision, engine.props()["kv_dtype"]) == ("float32", "float32")
        assert set(engine.props()["linear_policies"].values()) == {"F16"}
    for model in (file(folder, "F16"), tiny.tiny_model("llama")):
        with pytest.raises(UnsupportedModelError, match=r"precision 'int8' .* accepted: 'float32', or quantize='q8_0'"):
            Engine(model, precision="int8", **LIMITS)
    for _ in range(2):
        with Engine(file(folder, "F16"), quantize="q8_0", **LIMITS) as engine:
            assert (engine.precision, set(engine.props()["linear_policies"].values())) == ("int8", {"blocks of 8 bits"})


def test_a_folder_is_quantised_while_it_loads(tmp_path: Path) -> None:
    tiny.tiny_model("qwen3").save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    with Engine(str(tmp_path), quantize="q8_0", precision="float32", max_model_len=200, kv_memory=1 << 24) as engine:
        assert set(engine.props()["linear_policies"].values()) == {"blocks of 8 bits"}
        assert engine.exactness == "bitwise"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"precision": "int4"}, "precision must be .*'int8'.*, got 'int4'"),
        ({"kv_dtype": "int8"}, "kv_dtype must be .*'float16'.*, got 'int8'"),
        ({"quantize": "q4_0"}, "quantize must be .*'q8_0'.*, got 'q4_0'"),
    ],
)
def test_nonsense_is_refused(folder: Path, settings: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        Engine(file(folder, "Q4_0"), **settings)


def test_attention_on_the_cpu_refuses_another_dtype() -> None:
    with Engine(tiny.tiny_model("llama"), **LIMITS) as engine:
        heads, dim = engine.runner.shapes[0]
        rows = torch.zeros(1, heads, dim, dtype=torch.bfloat16)
        with pytest.raises(UnsupportedModelError, match=r"layer 0: attention over torch.bfloat16; .* torch.float32"):
            CpuAttentionPass(engine.runner.pool, None, [0]).attend(0, rows, rows, rows, 1.0, 0, 0.0)  # type: ignore[arg-type]

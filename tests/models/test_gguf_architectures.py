"""GGUF files of every architecture against the logits that llama.cpp computes of the same file (`tools.record_logits`)."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import gguf as reference
import numpy as np
import pytest
import tiny_architectures
import torch

from ngramspec import Engine, SamplingParams
from ngramspec.backends.cpu.llama_runner import CpuOptions
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.errors import UnsupportedModelError
from ngramspec.models import gguf
from ngramspec.models.gguf_architectures import ARCHITECTURES, read_config
from ngramspec.models.loader import OpenModel, load_model, open_model
from ngramspec.models.start_cache import reopen_model
from ngramspec.sampling.batch import Span

pytestmark = pytest.mark.slow
RECORD = json.loads((Path(__file__).parent / "logits.json").read_text())
# llama.cpp looks GELU up in a table of 16-bit numbers.
ROUNDING, ROUNDED_GELU = 3e-5, 1e-3
ROUNDED_ROWS = 5e-2  # activations of 8 bits, for experts in quant blocks
OTHER_VARIANCE = 1e-2  # of 1,024 numbers, which llama.cpp divides by 1,023: with 1,023 here it is 1e-3, as with GELU elsewhere
GELU, QUANTISED = ("gemma", "starcoder", "codeshell", "phi2", "gptneox"), "mxfp4"
# An activation with numbers of every layer, four streams of hidden states, gates by softplus, values smaller than keys, positions with an
# embedding of their own, keys and values in one matrix with queries by heads, norms without weights.
BY_MODULES = ("apertus", "gemma3n", "gptneox", "gptneox, in turns", "laguna", "laguna, full", "mimo2", "olmo", "starcoder")
LATENT = ("deepseek2, older", "deepseek2, groups", "mistral4", "minicpm3", "minicpm3, long")
MAMBA = ("granitehybrid", "granitehybrid, experts", "falcon-h1", "falcon-h1, norm", "nemotron_h", "nemotron_h_moe")


def find_tolerance(case: str) -> float:
    if case == "gemma3n":
        return OTHER_VARIANCE
    return ROUNDED_ROWS if case.endswith(QUANTISED) else ROUNDED_GELU if case.startswith(GELU) else ROUNDING


class CaseFile(NamedTuple):
    """The file of a case, as it was opened for the first time."""

    case: str
    path: Path
    opened: OpenModel


@pytest.fixture(scope="module", params=tiny_architectures.CASES)
def case_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CaseFile:
    path = tiny_architectures.write(tmp_path_factory.mktemp("case") / "model.gguf", request.param)
    return CaseFile(request.param, path, open_model(str(path), cache_dir=path.parent))


def test_logits_are_llama_cpps(case_file: CaseFile) -> None:
    case = case_file.case
    model = load_model(str(case_file.path), cache_dir=case_file.path.parent).model
    with torch.inference_mode():
        mine = model(torch.tensor([RECORD["text"]])).logits[0].numpy()[RECORD["rows"]]
    wanted = np.array(RECORD["logits"][case])
    tolerance = find_tolerance(case)
    assert np.abs(mine[:, : wanted.shape[1]] - wanted).max() < tolerance * np.abs(mine).max()


def test_passes_compute_llama_cpps_logits(case_file: CaseFile) -> None:
    case, _, opened = case_file
    size: dict[str, int] = {"max_len": 64, "max_seqs": 3, "max_rows": 64, "kv_bytes": 1 << 22}
    runner = CpuRunner(opened.model, CpuOptions(code=cache_dir() / "code", **size), opened.source)
    assert (runner.decoder is None) == (case in BY_MODULES)
    assert (runner.precision, runner.exactness) == ("int8" if case.endswith(QUANTISED) else "float32", "bitwise")
    assert runner.pool.reserve(0, 64)
    text, wanted = np.array(RECORD["text"], np.int32), np.array(RECORD["logits"][case])
    mine = np.concatenate([runner.run([Span(0, some, at, logits=len(some))]).numpy() for at, some in ((0, text[:25]), (25, text[25:]))])
    tolerance = find_tolerance(case)
    assert np.abs(mine[RECORD["rows"], : wanted.shape[1]] - wanted).max() < tolerance * np.abs(mine).max()


def store_mixed(name: str, x: np.ndarray) -> tiny_architectures.Stored:
    """Quantise a matrix to a type of its own, by its name."""
    kinds = [reference.GGMLQuantizationType[kind] for kind in ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "F16", "BF16")]
    kind = kinds[zlib.crc32(name.encode()) % len(kinds)]
    matrix = name.endswith(".weight") and x.ndim > 1 and x.shape[-1] % 32 == 0 and not re.search("gate_inp|norm", name)
    return (reference.quants.quantize(x, kind), kind) if matrix else (x, None)


def store_numbers(name: str, x: np.ndarray) -> tiny_architectures.Stored:
    """Return the numbers that `store_mixed` stands for."""
    rows, kind = store_mixed(name, x)
    return (x if kind is None else reference.quants.dequantize(rows, kind).reshape(x.shape), None)


@pytest.mark.parametrize("case", ["afmoe", "deepseek2", "deepseek2, older", "gpt-oss", "granitehybrid, experts", "qwen35moe"])
def test_every_matrix_may_be_of_another_type(case: str, tmp_path: Path) -> None:
    size: dict[str, int] = {"max_len": 64, "max_seqs": 3, "max_rows": 64, "kv_bytes": 1 << 22}
    found = []
    for store in (store_mixed, store_numbers):
        opened = open_model(str(tiny_architectures.write(tmp_path / f"{store.__name__}.gguf", case, store)), cache_dir=tmp_path / "cache")
        runner = CpuRunner(
            opened.model, CpuOptions(code=cache_dir() / "code", precision="float32", kv_dtype="float32", **size), opened.source
        )
        assert runner.decoder is not None
        assert runner.pool.reserve(0, 64)
        found.append(runner.run([Span(0, np.array(RECORD["text"], np.int32), 0, logits=40)]).numpy())
    assert np.abs(found[0] - found[1]).max() < ROUNDING * np.abs(found[1]).max()


@pytest.mark.parametrize(
    "case",
    [
        "apertus",
        "gemma3n",
        "laguna",
        "mimo2",
        "olmo",
        "gptneox",
        "starcoder",
        "phi2",
        "stablelm",
        "mellum",
        "gpt-oss, mxfp4",
        "afmoe",
        "gemma4",
        "gemma4, shared",
        "gemma4, experts",
        "lfm2",
        "lfm2moe",
        *MAMBA,
        *LATENT,
    ],
)
def test_drafts_batches_and_later_starts_change_no_token(case: str, tmp_path: Path) -> None:
    path = str(tiny_architectures.write(tmp_path / "model.gguf", case))
    prompts = [[5, 17, 88, 3, 42, 5, 17, 88], [9, 8], [7] * 40]
    n_tokens = 8 if case in BY_MODULES else 16  # a pass of modules takes twenty times as long and more
    params = [SamplingParams(max_tokens=n_tokens, ignore_eos=True, temperature=t, seed=1) for t in (0.0, 0.8)]
    with Engine(path, max_model_len=128, max_seqs=4) as engine:
        assert engine.exactness == "bitwise"
        alone = [[engine.complete(prompt, p, speculation=False).token_ids for prompt in prompts] for p in params]
        assert [[c.token_ids for c in engine.complete(prompts, p)] for p in params] == alone
    if case in BY_MODULES:
        return  # a later start of such a model is the first one again
    with Engine(path, max_model_len=128, max_seqs=4) as engine:
        assert engine.exactness == "bitwise"
        assert [[c.token_ids for c in engine.complete(prompts, p)] for p in params] == alone


def test_later_starts_read_the_same_weights(case_file: CaseFile) -> None:
    first, again = case_file.opened.source, reopen_model(gguf.read(case_file.path), None, case_file.path.parent)
    if again is None and case_file.case in BY_MODULES:
        return  # such a model is opened as at the first start
    assert again is not None
    assert first.keys() - again.source.keys() <= {"lm_head.weight"}, "which may be the embedding"
    for name in first.keys() & again.source.keys():
        assert np.array_equal(again.source[name].float32().squeeze(), first[name].float32().squeeze()), name


def test_every_row_of_the_table_is_compared() -> None:
    compared = {architecture for architecture, *_ in tiny_architectures.CASES.values()}
    assert ARCHITECTURES.keys() - compared == {"gpt2"}, "which tests of the mapping compare with transformers"
    assert RECORD["logits"].keys() == tiny_architectures.CASES.keys()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_those_of_the_format(architecture: str) -> None:
    known = {name.replace("blk.{bid}.", "") for name in reference.TENSOR_NAMES.values()}
    row = ARCHITECTURES[architecture]
    assert architecture in reference.MODEL_ARCH_NAMES.values() or architecture in ("laguna", "mellum")  # which the package lacks so far
    stems = {stem.removesuffix(".scale") for stem in row.layer}
    assert stems | row.whole.keys() | row.rules.keys() <= known


def write_changed(path: Path, case: str, **changed: object) -> Path:
    """Write the file of a case with other keys."""
    architecture, layer, keys, head = tiny_architectures.CASES[case]
    named = {key.replace("__", "."): value for key, value in changed.items()}
    tiny_architectures.CASES["changed"] = architecture, layer, keys | named, head
    try:
        return tiny_architectures.write(path, "changed")
    finally:
        del tiny_architectures.CASES["changed"]


@pytest.mark.parametrize(
    ("case", "changed", "told"),
    [
        ("llama", {"attention__head_count_kv": [2, 2, 2, 2, 2, 2, 2, 4]}, r"llama.attention.head_count_kv is \[2, .*the same for every"),
        ("llama", {"attention__head_count_kv": [2, 2]}, r"llama.attention.head_count_kv is \[2, 2\]"),
        ("llama", {"attention__head_count": "four"}, r"llama.attention.head_count is 'four'"),
        ("llama", {"rope__dimension_count": 8}, r"llama.rope.dimension_count is 8"),
        ("qwen35moe", {"rope__dimension_count": 0}, r"qwen35moe.rope.dimension_count is 0.*an even number up to 16"),
        ("glm4moe", {"rope__dimension_count": 5}, r"glm4moe.rope.dimension_count is 5"),
        ("llama", {"rope__freq_base": "x"}, r"llama.rope.freq_base is 'x'"),
        ("llama", {"rope__freq_base": float("nan")}, r"llama.rope.freq_base is nan"),
        ("llama", {"attention__value_length": 32}, r"llama.attention.value_length is 32"),
        ("phi3", {"rope__scaling__type": "longrope"}, r"phi3.rope.scaling.type is 'longrope'.* accepted: none, linear, yarn"),
        ("llama", {"rope__scaling__attn_factor": 1.3}, r"llama.rope.scaling.attn_factor is 1.29.* accepted: 1 without YaRN"),
        ("gemma2", {"rope__freq_base_swa": 500.0}, r"gemma2.rope.freq_base_swa is 500.0 .*accepted: 10000.0"),
        *(
            (case, {"rope__freq_base_swa": 500.0, "attention__sliding_window": 8}, r"freq_base_swa is 500.0 .*accepted: 10000.0")
            for case in ("afmoe", "cohere2", "exaone-moe", "gpt-oss", "olmo3")
        ),
        ("gemma3", {"attention__sliding_window_pattern": [True]}, r"gemma3.attention.sliding_window_pattern is \[True\]"),
        (
            "gemma4",
            {"attention__head_count_kv": [2, 2, 1, 1, 2, 2, 2, 1]},
            r"gemma4.attention.head_count_kv is \[2, 2, 1, .*layers of a type",
        ),
        ("gemma4", {"attention__shared_kv_layers": 6}, r"gemma4.attention.shared_kv_layers is 6"),
        ("gemma4", {"feed_forward_length": [96] * 7 + [192]}, r"gemma4.feed_forward_length is \[96"),
        ("gemma4", {"attention__sliding_window_pattern": [False, *[True] * 7]}, "full_attention in the last layer"),
        ("gemma4", {"rope__dimension_count": 8}, r"gemma4.rope.dimension_count is 8"),
        ("lfm2", {"attention__head_count_kv": [2, 0, 0, 1, 0, 0, 0, 2]}, r"lfm2.attention.head_count_kv is \[2, 0, .*one number of heads"),
        ("lfm2", {"attention__head_count_kv": 0}, r"lfm2.attention.head_count_kv is \[0, 0, "),
        ("lfm2", {"shortconv__l_cache": 1 << 30}, r"lfm2.shortconv.l_cache is 1073741824.*2 to 16"),
        ("lfm2", {"attention__sliding_window": 8}, r"lfm2.attention.sliding_window is 8"),
        ("lfm2moe", {"expert_gating_func": 1}, r"lfm2moe.expert_gating_func is 1"),
        ("granitehybrid", {"attention__head_count_kv": 2}, r"granitehybrid.attention.head_count_kv is \[2, .*0 for some layers"),
        ("granitehybrid", {"ssm__inner_size": 96}, r"granitehybrid.ssm.inner_size is 96.*a multiple of embedding_length, 64"),
        ("granitehybrid", {"ssm__time_step_rank": 0}, r"granitehybrid.ssm.time_step_rank is 0.*a divisor of ssm.inner_size, 128"),
        ("granitehybrid", {"ssm__group_count": 3}, r"granitehybrid.ssm.group_count is 3"),
        ("granitehybrid", {"ssm__state_size": 1 << 30}, r"granitehybrid.ssm.state_size is 1073741824"),
        ("granitehybrid", {"ssm__conv_kernel": 1 << 30}, r"granitehybrid.ssm.conv_kernel is 1073741824.*2 to 16"),
        ("granitehybrid, experts", {"expert_shared_feed_forward_length": 0}, r"expert_shared_feed_forward_length is 0"),
        ("falcon-h1", {"ssm__group_count": 3}, r"falcon-h1.ssm.group_count is 3"),
        ("falcon-h1", {"rope__dimension_count": 8}, r"falcon-h1.rope.dimension_count is 8"),
        (
            "falcon-h1",
            {"attention__head_count_kv": [2, 0, 2, 2, 2, 2, 2, 2]},
            r"falcon-h1.attention.head_count_kv is \[2, 0, .*the same for",
        ),
        ("nemotron_h", {"feed_forward_length": [0, 96, 0, 0, 64, 0, 0, 96]}, r"nemotron_h.feed_forward_length is \[0, 96.*one size"),
        ("nemotron_h", {"feed_forward_length": 96}, r"nemotron_h.feed_forward_length is \[96, .*one size"),
        ("nemotron_h_moe", {"moe_latent_size": 16}, r"nemotron_h_moe.moe_latent_size is 16"),
        ("nemotron_h_moe", {"expert_group_count": 2}, r"nemotron_h_moe.expert_group_count is 2"),
        ("nemotron_h", {"ssm__inner_size": 1 << 30}, r"nemotron_h.ssm.inner_size is 1073741824"),
        ("nemotron_h", {"attention__scale": 0.5}, r"nemotron_h.attention.scale is 0.5"),
        ("nemotron_h", {"ssm__time_step_rank": 3}, r"nemotron_h.ssm.time_step_rank is 3"),
        ("deepseek2", {"rope__dimension_count": 48}, r"deepseek2.rope.dimension_count is 48.*1 to 47"),
        ("deepseek2", {"attention__head_count_kv": 2}, r"deepseek2.attention.head_count_kv is 2.*1 or 4"),
        ("deepseek2", {"expert_group_count": 3}, r"deepseek2.expert_group_count is 3"),
        ("deepseek2, groups", {"expert_group_used_count": 1}, r"deepseek2.expert_group_count is 4.*with enough experts"),
        ("deepseek2", {"attention__temperature_scale": 0.1}, r"deepseek2.attention.temperature_scale is 0.1.*accepted: 0"),
        (
            "minicpm3",
            {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0},
            r"minicpm3.rope.scaling.type is 'yarn'.*none, longrope",
        ),
        ("minicpm3", {"attention__q_lora_rank": 0}, r"minicpm3.attention.q_lora_rank is 0"),
        ("mistral4", {"attention__temperature_length": 8}, r"mistral4.attention.temperature_length is 8.*accepted: 16"),
        ("lfm2", {"attention__causal": False}, r"lfm2.attention.causal is False"),
        ("llama", {"embedding_length": [64] * 5000}, "array of 5000 values|is an array"),
    ],
)
def test_what_a_model_cannot_be_is_refused_by_key(tmp_path: Path, case: str, changed: dict[str, object], told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        read_config(gguf.read(write_changed(tmp_path / "model.gguf", case, **changed)))


@pytest.mark.parametrize(
    ("case", "changed", "told"),
    [
        ("gemma4, shared", {"embedding_length_per_layer_input": 1 << 30}, "hidden_size_per_layer_input is 1073741824"),
        ("gemma4", {"attention__key_length": 1 << 30, "attention__value_length": 1 << 30, "rope__dimension_count": 1 << 30}, "head_dim is"),
        ("gpt-oss", {"expert_count": 1 << 30}, "num_local_experts is 1073741824"),
        ("lfm2moe", {"expert_feed_forward_length": 1 << 30}, "moe_intermediate_size is 1073741824"),
        ("nemotron_h_moe", {"expert_count": 1 << 30}, "n_routed_experts is 1073741824"),
        ("deepseek2", {"attention__kv_lora_rank": 1 << 30}, "kv_lora_rank is 1073741824"),
        (
            "deepseek2",
            {"attention__value_length_mla": 40},
            r"blk.0.attn_k_b.weight is \[4, 32, 32\] and blk.0.attn_v_b.weight \[4, 48, 32\]",
        ),
        ("deepseek2, older", {"attention__value_length": 128}, r"config and weights disagree: blk.0.attn_kv_b.weight"),
        ("granitehybrid, experts", {"expert_shared_feed_forward_length": 1 << 30}, "shared_intermediate_size is 1073741824"),
        ("gpt-oss", {"attention__sliding_window": 0}, r"sliding_window is 0 by its metadata; accepted: 1 and more"),
    ],
)
def test_sizes_are_checked_before_a_model_is_made(tmp_path: Path, case: str, changed: dict[str, object], told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        open_model(str(write_changed(tmp_path / "model.gguf", case, **changed)), cache_dir=tmp_path / "cache")


def test_what_transformers_cannot_compute_is_refused(tmp_path: Path) -> None:
    opened = open_model(str(write_changed(tmp_path / "model.gguf", "gemma4", attention__shared_kv_layers=2)), cache_dir=tmp_path / "cache")
    with pytest.raises(UnsupportedModelError, match="Gemma4ForCausalLM: transformers' own model cannot compute it"):
        CpuRunner(opened.model, CpuOptions(code=cache_dir() / "code", max_len=64, max_seqs=1, max_rows=64, kv_bytes=1 << 22), opened.source)


@pytest.mark.parametrize(
    ("case", "name", "told"),
    [
        ("gpt-oss", "ffn_up_exps.weight", "lacks blk.0.ffn_up_exps.weight"),
        ("gpt-oss", "ffn_up_exps.bias", "lacks blk.0.ffn_up_exps.bias"),
        ("minimax-m2", "exp_probs_b.bias", "have no model.layers.0.mlp.e_score_correction_bias"),
    ],
)
def test_a_file_without_a_part_of_its_experts_is_refused_by_name(tmp_path: Path, case: str, name: str, told: str) -> None:
    architecture, layer, keys, head = tiny_architectures.CASES[case]
    tiny_architectures.CASES["changed"] = architecture, {stem: shape for stem, shape in layer.items() if stem != name}, keys, head
    try:
        path = tiny_architectures.write(tmp_path / "model.gguf", "changed")
    finally:
        del tiny_architectures.CASES["changed"]

    def load() -> CpuRunner:
        opened = open_model(str(path), cache_dir=tmp_path / "cache")
        return CpuRunner(
            opened.model, CpuOptions(code=cache_dir() / "code", max_len=64, max_seqs=1, max_rows=64, kv_bytes=1 << 22), opened.source
        )

    with pytest.raises(UnsupportedModelError, match=told):
        load()


def test_an_array_of_one_value_for_all_layers(tmp_path: Path) -> None:
    assert (
        read_config(gguf.read(write_changed(tmp_path / "model.gguf", "llama", attention__head_count_kv=[2] * 8)))["num_key_value_heads"]
        == 2
    )


def test_latent_attention_without_yarns_multiplier_has_its_usual_factor(tmp_path: Path) -> None:
    """llama.cpp applies the factor to scores as well, transformers does not."""
    path = write_changed(tmp_path / "model.gguf", "deepseek2", rope__scaling__yarn_log_multiplier=0.0)
    model = open_model(str(path), cache_dir=tmp_path / "cache").model
    assert model.base_model.rotary_emb.attention_scaling == pytest.approx(1 + 0.1 * np.log(4))


def test_a_projector_is_named(tmp_path: Path) -> None:
    writer = reference.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="reads images or sound"):
        read_config(gguf.read(tmp_path / "mmproj.gguf"))


def test_heads_that_predict_further_tokens_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, layer, keys, has_head = tiny_architectures.CASES["qwen35"]
    longer = {"block_count": tiny_architectures.LAYERS + 1, "nextn_predict_layers": 1}
    monkeypatch.setitem(tiny_architectures.CASES, "with a head", (architecture, layer, keys | longer, has_head))
    model = open_model(str(tiny_architectures.write(tmp_path / "model.gguf", "with a head")), cache_dir=tmp_path / "cache").model
    assert model.config.num_hidden_layers == tiny_architectures.LAYERS

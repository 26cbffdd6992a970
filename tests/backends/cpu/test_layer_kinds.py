"""Families whose layers differ, with every kind of layer: computed as transformers does wherever a text reaches, or refused at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from ngramspec import Engine
from ngramspec.backends.cpu import runner as runner_module
from ngramspec.backends.cpu import weight_map_build
from ngramspec.backends.cpu.llama_pass import run_thread
from ngramspec.backends.cpu.llama_runner import CpuOptions
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.backends.cpu.weight_map import WeightMap
from ngramspec.datastore.cache_dir import cache_dir
from ngramspec.errors import UnsupportedModelError
from ngramspec.models.loader import open_model
from ngramspec.models.reference import kinds_of_layers
from ngramspec.models.tensor_source import to_q8_source
from ngramspec.sampling.batch import Span

OPTIONS: dict[str, Any] = {"max_len": 200, "max_seqs": 3, "max_rows": 64, "kv_bytes": 1 << 23, "code": cache_dir() / "code"}
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 16}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 2.0, "attention_multiplier": 0.2}
SCALED = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 48, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "first_k_dense_replace": 1,
}  # fmt: skip
TWO_STEPS = LATENT | {"q_lora_rank": 64}
GLM_LITE = {name: value for name, value in TWO_STEPS.items() if name != "first_k_dense_replace"}
BY_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
MAMBA = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 2}
NEMOTRON = {
    "layers_block_type": [
        "linear_attention",
        "mlp",
        "linear_attention",
        "full_attention",
        "mlp",
        "linear_attention",
        "linear_attention",
        "mlp",
    ],
}
NEMOTRON_MOE = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "linear_attention", "moe", "mlp"],
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
GEMMA4 = {
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
}  # fmt: skip
GEMMA4_MOE = {
    "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40,
}  # fmt: skip
BAMBA = {"attn_layer_indices": [2, 5], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "smollm3": ("smollm3", {}, [0, 3]),
    "ministral3": ("ministral3", {}, [0]),
    "gemma3": ("gemma3_text", {"layer_types": None}, [0, 5]),
    "gemma3, scaled": ("gemma3_text", {"layer_types": None, "rope_parameters": SCALED}, [0, 5]),
    "gemma4": ("gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 0}, [0, 3, 6, 7]),
    "gemma4, values": ("gemma4_text", GEMMA4 | {"attention_k_eq_v": False, "num_global_key_value_heads": None}, [0, 3, 6, 7]),
    "gemma4, shared": ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 4, "use_double_wide_mlp": True}, [0, 2, 3, 4, 7]),
    "gemma4, experts": ("gemma4_text", GEMMA4 | GEMMA4_MOE, [0, 3, 6, 7]),
    "gemma4, unified": (
        "gemma4_unified_text",
        GEMMA4
        | {"sliding_window": tiny.WINDOW, "head_dim": 16, "global_head_dim": 32}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
        [0, 3, 6, 7],
    ),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, [0, 1]),
    "gemma": ("gemma", {"head_dim": 16}, [0]),
    "granite": ("granite", GRANITE, [0]),
    "cohere2": ("cohere2", {"sliding_window": tiny.WINDOW}, [0, 3]),
    "olmo3": ("olmo3", {"sliding_window": tiny.WINDOW}, [0, 3]),
    "olmo2": ("olmo2", {}, [0]),
    "exaone4, no windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 8}, [0]),
    "exaone4": ("exaone4", {"sliding_window": tiny.WINDOW}, [0, 3]),
    "phi3": ("phi3", {}, [0]),
    "phi3, windows": ("phi3", {"sliding_window": tiny.WINDOW}, [0]),
    "phi3, partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}, [0]),
    "glm4": ("glm4", {"head_dim": 16}, [0]),
    "ernie4_5": ("ernie4_5", {"head_dim": 16, "use_bias": True}, [0]),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2},
        [0, 1],
    ),
    "afmoe": (
        "afmoe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_shared_experts": 1, "sliding_window": tiny.WINDOW}
        | {"head_dim": 16, "mup_enabled": True, "route_scale": 2.5},
        [0, 1, 3],
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": 3, "head_dim": 16}, [0]),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16}, [0]),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16}, [0]),
    "hunyuan_v1_dense, alpha": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}},
        [0],
    ),
    "cohere2_moe": (
        "cohere2_moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "sliding_window": tiny.WINDOW, "shared_expert_combination_strategy": "sum"},
        [0, 3],
    ),
    "cwm": ("cwm", {"sliding_window": tiny.WINDOW}, [0, 1]),
    "arcee": ("arcee", {}, [0]),
    "starcoder2": ("starcoder2", {"use_bias": True}, [0]),
    "cohere": ("cohere", {"logit_scale": 0.5}, [0]),
    "cohere, normed heads": ("cohere", {"logit_scale": 0.5, "use_qk_norm": True}, [0]),
    "gpt2": ("gpt2", {}, [0]),
    "apertus": ("apertus", {}, [0]),
    "qwen3_moe": ("qwen3_moe", {}, [0, 1]),
    "qwen2_moe": ("qwen2_moe", {"norm_topk_prob": True}, [0]),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, [0]),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}, [0]),
    "granitemoe": ("granitemoe", {"num_local_experts": 8, "num_experts_per_tok": 3, "residual_multiplier": 0.5}, [0]),
    "glm4_moe": ("glm4_moe", GLM, [0, 1]),
    "gpt_oss": ("gpt_oss", {}, [0, 1]),
    "deepseek_v2": ("deepseek_v2", LATENT | {"rope_parameters": BY_YARN}, [0, 1]),
    "deepseek_v2, groups": (
        "deepseek_v2",
        TWO_STEPS | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
        [0, 1],
    ),
    "deepseek_v3": (
        "deepseek_v3",
        TWO_STEPS | {"n_group": 4, "topk_group": 2, "rope_parameters": BY_YARN | {"mscale": 1.0}, "attention_bias": True},
        [0, 1],
    ),
    "deepseek_v3, halves": ("deepseek_v3", TWO_STEPS | {"n_group": 1, "topk_group": 1, "rope_interleave": False}, [0, 1]),
    "glm4_moe_lite": ("glm4_moe_lite", GLM_LITE, [0, 1]),
    "mistral4": (
        "mistral4",
        TWO_STEPS | {"first_k_dense_replace": 0, "rope_parameters": BY_YARN | {"llama_4_scaling_beta": 0.6}, "rms_norm_eps": 1e-5},
        [0],
    ),
    "minicpm3": ("minicpm3", TWO_STEPS | {"dim_model_base": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}, [0]),
    "lfm2": ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2}, [0, 2]),
    "lfm2, four taps": ("lfm2", {"layer_types": ["full_attention", "conv"] * 4, "conv_L_cache": 4, "tie_word_embeddings": False}, [0, 1]),
    "lfm2_moe": (
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention"] * 4, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
        [0, 1, 2, 3],
    ),
    "granitemoehybrid": ("granitemoehybrid", MAMBA | GRANITE, [0, 2]),
    "granitemoehybrid, experts": (
        "granitemoehybrid",
        MAMBA | GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 3, "position_embedding_type": "rope", "mamba_n_groups": 1},
        [0, 2],
    ),
    "granitemoehybrid, bounds": (
        "granitemoehybrid",
        MAMBA
        | {"mamba_proj_bias": True, "mamba_conv_bias": False, "time_step_limit": (0.04, 0.06), "mamba_d_conv": 3, "mamba_d_head": 32}
        | {"mamba_n_heads": 4, "tie_word_embeddings": True},
        [0, 2],
    ),
    "granitemoehybrid, attention alone": (
        "granitemoehybrid",
        GRANITE | {"layer_types": ["full_attention"] * 8, "position_embedding_type": "rope"},
        [0],
    ),
    "falcon_h1": ("falcon_h1", {}, [0]),
    "falcon_h1, norms and biases": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True, "projectors_bias": True, "mamba_conv_bias": False}
        | {"mamba_proj_bias": True, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0}
        | {"mamba_d_ssm": 96, "num_key_value_heads": 1, "time_step_limit": (0.04, 0.06)},
        [0],
    ),
    "bamba": ("bamba", BAMBA, [0, 2]),
    "nemotron_h": ("nemotron_h", NEMOTRON, [0, 1, 3]),
    "nemotron_h, biases": (
        "nemotron_h",
        NEMOTRON | {"use_bias": True, "use_conv_bias": False, "mlp_bias": True, "time_step_min": 0.05, "mamba_head_dim": 40, "n_groups": 1},
        [0, 1, 3],
    ),
    "nemotron_h, experts": ("nemotron_h", NEMOTRON_MOE | {"n_group": 2, "topk_group": 1}, [0, 1, 3, 7]),
}
"""Name in transformers, options, and the first layer of each kind."""
COMPILED = (
    "smollm3",
    "ministral3",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3, scaled",
    "gemma4",
    "gemma4, values",
    "gemma4, shared",
    "gemma4, experts",
    "gemma4, unified",
    "granite",
    "granitemoe",
    "olmo2",
    "olmo3",
    "olmoe",
    "exaone4, no windows",
    "exaone4",
    "phi3",
    "phi3, windows",
    "phi3, partial",
    "glm4",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "afmoe",
    "minimax_m2",
    "hunyuan_v1_dense",
    "hunyuan_v1_dense, alpha",
    "cohere2_moe",
    "cwm",
    "arcee",
    "starcoder2",
    "cohere",
    "cohere, normed heads",
    "cohere2",
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "gpt_oss",
    "glm4_moe",
    "granitemoehybrid, attention alone",
)
ONLY_COMPILED = (
    "deepseek_v2",
    "deepseek_v2, groups",
    "deepseek_v3",
    "deepseek_v3, halves",
    "glm4_moe_lite",
    "mistral4",
    "minicpm3",
    "lfm2",
    "lfm2, four taps",
    "lfm2_moe",
    "granitemoehybrid",
    "granitemoehybrid, experts",
    "granitemoehybrid, bounds",
    "falcon_h1",
    "falcon_h1, norms and biases",
    "bamba",
    "nemotron_h",
    "nemotron_h, biases",
    "nemotron_h, experts",
)  # whose modules would have to keep states, or keys and values of all heads


def model_of(name: str, **overrides: Any) -> Any:
    family, options, _ = FAMILIES[name]
    return tiny.tiny_model(family, std=0.15, **{"num_hidden_layers": 8, **options, **overrides})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    where = tmp_path_factory.mktemp("folders")
    return lambda name: tiny.save_model(where, name, lambda: model_of(name))


def bind(path: Path, *, quantised: bool = False, **options: Any) -> CpuRunner:
    opened = open_model(str(path))
    return CpuRunner(opened.model, CpuOptions(**OPTIONS | options), to_q8_source(opened.source) if quantised else opened.source)


def check(runner: CpuRunner, model: Any, near: float) -> None:
    """A text over all thresholds, in pieces beside another one."""
    tokens = (np.arange(150) * 37 % 250).astype(np.int32)
    with torch.inference_mode():
        expected = model(input_ids=torch.from_numpy(tokens).long()[None], use_cache=False).logits[0]
    assert runner.pool.reserve(0, 150)
    assert runner.pool.reserve(1, 150)
    for a, b in ((0, 30), (30, 90), (90, 149), (149, 150)):
        mate = Span(1, tokens[a:b] + 1, a, logits=0)
        got = runner.run([mate, Span(0, tokens[a:b], a, logits=b - a)])
        assert float((got - expected[a:b]).abs().max() / expected[a:b].abs().max()) < near


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, folder: Callable[[str], Path]) -> None:
    assert kinds_of_layers(model_of(name)) == FAMILIES[name][2]
    runner = bind(folder(name))
    assert (runner.decoder is not None) == (name in COMPILED + ONLY_COMPILED)
    assert runner.exactness == "bitwise"
    check(runner, model_of(name), 1e-4)


@pytest.mark.parametrize("name", COMPILED)
def test_modules_compute_the_same_as_the_compiled_pass(name: str) -> None:
    runner = CpuRunner(model_of(name), CpuOptions(**OPTIONS))
    assert runner.decoder is not None
    runner.decoder = None
    check(runner, model_of(name), 1e-4)


@pytest.mark.parametrize(
    "name",
    [
        *("smollm3", "gemma3", "gemma4, experts", "exaone4", "glm4_moe", "qwen3_moe", "gpt_oss", "lfm2_moe", "granitemoehybrid, experts"),
        *("nemotron_h, experts", "falcon_h1", "deepseek_v2", "deepseek_v3"),
    ],
)
def test_rounding_of_keys_and_values_refuses_nothing(name: str, tmp_path: Path) -> None:
    """Sharp attention and routers of experts over keys and values of 16 bits."""
    options = FAMILIES[name][1] if name in FAMILIES else {"exaone4": {"sliding_window": 8}}[name]
    family = FAMILIES[name][0] if name in FAMILIES else name
    tiny.tiny_model(family, **{"num_hidden_layers": 8, **options}).save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    runner = bind(tmp_path, quantised=True)
    assert (runner.precision, runner.kv_dtype) == ("int8", "float16")


def test_one_compiled_pass_serves_every_family(folder: Callable[[str], Path]) -> None:
    """Compiling another takes half a minute of a first start."""
    two_heads = tiny.tiny_model("llama", num_attention_heads=2, num_key_value_heads=2, head_dim=24)
    CpuRunner(two_heads, CpuOptions(**OPTIONS | {"kv_dtype": "float32"}))
    for name in ("smollm3", "gemma", "lfm2", "nemotron_h", "falcon_h1"):
        assert bind(folder(name), kv_dtype="float32").decoder is not None
    keys_and_values = [signature[1].field_dict["model"].field_dict["pool"] for signature in run_thread.signatures]
    assert len(keys_and_values) == len(set(keys_and_values))


def rotate_all(monkeypatch: pytest.MonkeyPatch) -> None:
    right = weight_map_build.LayerWeights
    monkeypatch.setattr(weight_map_build, "LayerWeights", lambda **fields: right(**fields)._replace(rotary=0))


def scale_no_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightMap, "query_scales", lambda *_: np.empty(0, np.float32))


def share_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    right = weight_map_build.LayerWeights

    def make(**fields: Any) -> Any:
        layer = right(**fields)
        return layer._replace(heads=layer.heads._replace(owner=1)) if layer.heads and layer.heads.owner == 2 else layer

    monkeypatch.setattr(weight_map_build, "LayerWeights", make)


@pytest.mark.parametrize("in_memory", [False, True], ids=["from files", "in memory"])
@pytest.mark.parametrize(("name", "spoil"), [("smollm3", rotate_all), ("ministral3", scale_no_query), ("gemma4, shared", share_other_keys)])
def test_a_compiled_pass_that_is_wrong_in_a_late_kind_or_far_out_gives_way(
    name: str, spoil: Callable[[pytest.MonkeyPatch], None], in_memory: bool, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch)
    runner = CpuRunner(model_of(name), CpuOptions(**OPTIONS)) if in_memory else bind(folder(name))
    assert runner.decoder is runner.weight_map is None
    check(runner, model_of(name), 1e-4)


@pytest.mark.parametrize(
    ("name", "layer", "attribute", "value"),
    [("smollm3", 7, "use_rope", 1), ("gemma3", 6, "sliding_window", None), ("cohere2", 7, "sliding_window", tiny.WINDOW)],
)
def test_one_wrong_layer_is_found(
    name: str, layer: int, attribute: str, value: object, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of its kind among them."""
    right = runner_module.fused_ops.replace_small_operations

    def replace(model: Any) -> int:
        setattr(model.base_model.layers[layer].self_attn, attribute, value)
        return right(model)

    monkeypatch.setattr(runner_module.fused_ops, "replace_small_operations", replace)
    with pytest.raises(UnsupportedModelError, match=rf"differ from transformers' own .* in layers .*\b{layer}\b"):
        bind(folder(name))


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 1}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "llama4_text": (
        EXPERTS | {"head_dim": 16, "intermediate_size_mlp": 96},
        r"layers 0, 1, 2, 4, 5, 6 are of type 'chunked_attention' \(attention within chunks of a text, as in Llama 4, is not computed\)",
    ),
    "falcon_h1": (
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
        "form of neither Qwen3.5, LFM2, Granite 4, Nemotron-H nor Falcon-H1",
    ),
    "kimi_linear": (
        {"num_experts": 8, "moe_intermediate_size": 32, "linear_num_heads": 4, "linear_head_dim": 16},
        r"of type 'linear_attention' \(its recurrence is neither Gated DeltaNet nor Mamba-2",
    ),
    "granitemoehybrid": ({"layer_types": ["mamba", "attention"] * 4, "mamba_d_state": 18}, "form of neither Qwen3.5, LFM2, Granite 4, "),
    "diffllama": ({}, "layer 0 computes attention more than once in a pass"),  # whose second call would replace the values of the first
    "lfm2": ({"layer_types": ["conv", "full_attention"] * 4, "conv_bias": True}, "form of neither Qwen3.5, LFM2, Granite 4, "),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_reasons_are_the_true_ones(family: str, tmp_path: Path) -> None:
    options, reason = REFUSED[family]
    tiny.tiny_model(family, **{"num_hidden_layers": 8, **options}).save_pretrained(tmp_path)
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        bind(tmp_path)


def test_a_router_of_another_kind_is_never_called_bitwise(tmp_path: Path) -> None:
    """The self-test may find rows equal where others are not."""
    path = tiny.save_model(tmp_path, "phimoe", lambda: tiny.tiny_model("phimoe", num_local_experts=8, num_experts_per_tok=2))
    with Engine(path, quantize="q8_0", max_model_len=64) as engine:
        assert engine.exactness == "numerical"

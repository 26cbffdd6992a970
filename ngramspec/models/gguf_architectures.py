"""Table of the architectures that are read from GGUF files: each one's model in transformers, its config, its names of tensors.

`ARCHITECTURES` has a row for every value of `general.architecture`. A row says which module's parameter a tensor is, and what lies between
the two: nothing, a shift by one, another order of rows. Metadata become a config by the row's function. No weights are read here.

Names, keys and defaults are facts of the format: llama.cpp's `src/llama-arch.cpp`, `src/models/*.cpp` and `conversion/*.py` (as of
llama-cpp-python 0.3.36). Tests compare logits with llama.cpp's for a file of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ngramspec.errors import UnsupportedModelError
from ngramspec.models import gguf_configs as configs
from ngramspec.models import gguf_hybrid_configs as hybrids
from ngramspec.models import gguf_latent_configs as latents
from ngramspec.models import gguf_layer_norm_configs as layer_norms
from ngramspec.models import gguf_window_configs as windows
from ngramspec.models import qwen3_next, refusals
from ngramspec.models.gguf import Gguf
from ngramspec.models.gguf_configs import Config
from ngramspec.models.gguf_metadata import GgufMetadata, check_sections
from ngramspec.models.latent_weights import BOTH, KEYS, VALUES


@dataclass(frozen=True, kw_only=True)
class Architecture:
    model_type: str
    """transformers' name of the model, unless `configure` gives another."""
    layer: Mapping[str, str]
    """Modules within a layer by the stems of a block's tensors: blk.3.attn_q.weight has the stem attn_q. Parameters for scales."""
    whole: Mapping[str, str] = field(
        default_factory=lambda: {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    )
    """Modules outside of layers by the stems of tensors; "*": a number, of a matrix each of which the tensor has several."""
    prefix: str = "model.layers"
    rules: Mapping[str, str] = field(default_factory=dict)
    """Rules by stems; "interleaved": the heads of queries or keys have their pairs side by side; "halved": they have not, if the config
    says so, though transformers has; "by heads": queries, keys and values alternate in transformers;
    "in turns": see `TensorUse`."""
    divided: Mapping[str, str] = field(default_factory=dict)
    """Projections of Qwen3-Next by the stems of tensors: see `qwen3_next.list_parts`."""
    head: Mapping[str, str] = field(default_factory=dict)
    """Modules of the head that predicts further tokens by the stems of its tensors, besides those of its layer; none: it is left out."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Parameters within a layer that are one number, by the key of an array in the metadata that has one for each layer."""
    varied: bool = False
    """Whether heads, or how many of their numbers are turned, differ by layer, which `configure` reads."""
    latent: bool = False
    """Whether keys and values are made of a latent row, so that their sizes may differ."""
    rms_epsilon: bool = True
    """Whether the file must state the epsilon of RMS norms; `configure` reads that of others."""
    configure: Callable[[GgufMetadata, Config], Config] = lambda metadata, config: {}
    """Returns what differs from the config that all have in common."""


# ------------------------------------------------------------------ names

_ATTENTION = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LATE_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_up_proj", "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_SHARED_EXPERT = {f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")} | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate"
}
_MAMBA = {
    "ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_dt": "dt", "ssm_a": "A_log", "ssm_d": "D", "ssm_norm": "norm", "ssm_out": "out_proj",
}  # fmt: skip
_LINEAR_ATTENTION = {
    "attn_qkv": "in_proj_qkv", "attn_gate": "in_proj_z", "ssm_beta": "in_proj_b", "ssm_alpha": "in_proj_a", "ssm_conv1d": "conv1d",
    "ssm_dt": "dt", "ssm_a": "A_log", "ssm_norm": "norm", "ssm_out": "out_proj",
}  # fmt: skip
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_LLAMA = _NORMS | _ATTENTION | _MLP
_GEMMA4 = {
    "layer_output_scale": "layer_scalar", "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.gate_up_proj", "ffn_gate_up_exps": "experts.gate_up_proj", "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2", "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
}  # fmt: skip
_GEMMA3N = {
    "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs", "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs", "altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right", "laurel_post_norm": "laurel.post_laurel_norm",
}  # fmt: skip
_SANDWICH = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"} | _POST_NORMS | _ATTENTION | _MLP
_LATENT = {"attn_q": "self_attn.q_proj", "attn_output": "self_attn.o_proj"} | {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": f"self_attn.{BOTH}",
    "attn_k_b": f"self_attn.{KEYS}", "attn_v_b": f"self_attn.{VALUES}",
}  # fmt: skip
_SHARED_EXPERTS = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
_PAIRS = {"attn_q": "interleaved", "attn_k": "interleaved"}
_HEAD = {
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden", "nextn.shared_head_norm": "norm",
}  # fmt: skip
_SHIFTED = dict.fromkeys(
    (
        *("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm"),
        *("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
    ),
    "minus one",
)


# ------------------------------------------------------------------ configs


_IN_TURNS = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")  # Each section for images has every third pair.


def read_config(file: Gguf) -> Config:
    """Return the config of transformers' model for a file. Raises UnsupportedModelError for what is not in the table."""
    row = get_architecture(file)
    metadata = GgufMetadata(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise UnsupportedModelError(f"{file.path}: it lacks the tensor token_embd.weight")
    vocab_size = embedding.shape[0]  # files may state another number, which llama.cpp does not read
    heads, hidden = metadata.get_per_layer("attention.head_count"), metadata.get_int("embedding_length")
    if not row.varied:
        heads = [metadata.get_same("attention.head_count")]
    for key, value in (("attention.head_count", min(heads)), ("embedding_length", hidden)):
        if value < 1:
            raise metadata.make_refusal(key, value, "1 and more")
    if metadata.is_stated("attention.causal", False):
        raise metadata.make_refusal("attention.causal", False, "true: the model is no decoder")
    config: Config = {
        "model_type": row.model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "num_hidden_layers": metadata.n_layers,
        "num_attention_heads": heads[0],
        "head_dim": metadata.get_int("attention.key_length", hidden // heads[0]),
        "max_position_embeddings": metadata.get_int("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{
            f"{name}_token_id": metadata.get_token_id(key, vocab_size) for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
    }
    if row.rms_epsilon:
        config["rms_norm_eps"] = metadata.get_float("attention.layer_norm_rms_epsilon")
    found = row.configure(metadata, config)
    value_dim = metadata.get_int("attention.value_length", config["head_dim"])
    if value_dim != found.get("v_head_dim", config["head_dim"]) and not row.latent:
        raise metadata.make_refusal("attention.value_length", value_dim, "the same as attention.key_length")
    if not row.varied:
        _refuse_other_heads(metadata, config["head_dim"])
    return config | found


def _refuse_other_heads(metadata: GgufMetadata, head_dim: int) -> None:
    """Refuse a file whose layers with windows have heads of another size, or turn other numbers of them. Raises UnsupportedModelError."""
    for key, default in (("attention.key_length", head_dim), ("attention.value_length", head_dim), ("rope.dimension_count", head_dim)):
        of_all = metadata.get_int(key, default)
        if (of_windows := metadata.get_int(f"{key}_swa", of_all)) != of_all:
            raise metadata.make_refusal(f"{key}_swa", of_windows, str(of_all))
    if sections := metadata.get_numbers("rope.dimension_sections"):
        n_pairs = metadata.get_int("rope.dimension_count", head_dim) // 2
        check_sections(metadata, sections, n_pairs, in_turns=metadata.file.architecture in _IN_TURNS)


def get_architecture(file: Gguf) -> Architecture:
    """Return the row of a file's architecture. Raises UnsupportedModelError."""
    if (row := ARCHITECTURES.get(file.architecture)) is not None:
        return row
    raise refusals.make_architecture_refusal(file, ARCHITECTURES)


# ------------------------------------------------------------------ the table

_COHERE = {"attn_norm": "input_layernorm"} | _ATTENTION | _MLP
_OLMO2 = _POST_NORMS | _ATTENTION | _HEAD_NORMS | _MLP
_QWEN35 = (
    {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    | _ATTENTION
    | _HEAD_NORMS
    | {stem: f"linear_attn.{name}" for stem, name in _LINEAR_ATTENTION.items()}
)
_QWEN35_RULES = _SHIFTED | {"ssm_a": "log of negative", "attn_qkv": "repeated", "ssm_conv1d": "repeated"}
_LFM2 = (
    {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
    | _ATTENTION
    | {"attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}
    | {f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")}
    | {f"ffn_{name}": f"feed_forward.w{i}" for i, name in enumerate(("gate", "down", "up"), 1)}
)
_NEMOTRON_H = (
    {"attn_norm": "norm"}
    | {stem: path.replace("self_attn", "mixer") for stem, path in _ATTENTION.items()}
    | {stem: f"mixer.{name}" for stem, name in _MAMBA.items()}
)
_FALCON_H1 = (
    {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"}
    | _ATTENTION
    | {stem: f"mamba.{name}" for stem, name in _MAMBA.items()}
    | {stem: path.replace("mlp", "feed_forward") for stem, path in _MLP.items()}
)
_NEMOTRON_H_WHOLE = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
_GRANITE_EXPERTS = {stem: path.replace("mlp.gate", "mlp.router").replace("mlp.", "block_sparse_moe.") for stem, path in _EXPERTS.items()}
_GRANITE_SHARED = {"ffn_gate_shexp": "shared_mlp.input_linear", "ffn_down_shexp": "shared_mlp.output_linear"}
_BIASED_EXPERTS = _MLP | _EXPERTS | _SHARED_EXPERTS | {"exp_probs_b": "mlp.gate.e_score_correction"}
_DEEPSEEK2 = _NORMS | _LATENT | _BIASED_EXPERTS
_GLM4_MOE = _NORMS | _ATTENTION | _HEAD_NORMS | _BIASED_EXPERTS
_QWEN3_MOE = _NORMS | _ATTENTION | _HEAD_NORMS | _EXPERTS
_LFM2_WHOLE = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
_STARCODER2 = _NORMS | _ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_GPT2 = {
    "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2", "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}  # fmt: skip
_GPT2_WHOLE = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f", "output": "lm_head",
}  # fmt: skip
_GPT_NEOX = {
    "attn_norm": "input_layernorm", "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
}  # fmt: skip
_GPT_NEOX_WHOLE = {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"}
_PER_LAYER_WHOLE = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer", "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": Architecture(
        model_type="afmoe",
        layer={"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
        | {"ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm", "attn_gate": "self_attn.gate_proj"}
        | _ATTENTION
        | _HEAD_NORMS
        | _BIASED_EXPERTS
        | {"ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert"},
        configure=configs.read_afmoe,
    ),
    "apertus": Architecture(
        model_type="apertus",
        layer={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
        | _ATTENTION
        | _HEAD_NORMS
        | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        numbers={f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
        configure=configs.read_apertus,
    ),
    "arcee": Architecture(model_type="arcee", layer=_LLAMA, rules=_PAIRS, configure=configs.read_llama),
    "bailingmoe": Architecture(model_type="ernie4_5_moe", layer=_LLAMA | _EXPERTS | _SHARED_EXPERTS, configure=configs.read_bailing_moe),
    "bailingmoe2": Architecture(model_type="glm4_moe", layer=_GLM4_MOE, configure=configs.read_glm4moe),
    "chatglm": Architecture(
        model_type="glm",
        layer=_NORMS | _ATTENTION | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        configure=configs.read_partial,
    ),
    "codeshell": Architecture(model_type="starcoder2", layer=_STARCODER2, rms_epsilon=False, configure=layer_norms.read_starcoder2),
    "cohere2": Architecture(model_type="cohere2", layer=_COHERE, rms_epsilon=False, configure=configs.read_cohere2),
    "command-r": Architecture(model_type="cohere", layer=_COHERE | _HEAD_NORMS, rms_epsilon=False, configure=configs.read_cohere),
    "deepseek2": Architecture(model_type="deepseek_v2", layer=_DEEPSEEK2, latent=True, configure=latents.read_deepseek2),
    "dots1": Architecture(model_type="glm4_moe", layer=_GLM4_MOE, configure=configs.read_glm4moe),
    "ernie4_5": Architecture(model_type="ernie4_5", layer=_LLAMA, configure=configs.read_ernie),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe",
        layer=_LLAMA | _EXPERTS | _SHARED_EXPERTS | {"exp_probs_b": "mlp.gate.moe_statics.e_score_correction"},
        configure=configs.read_ernie_moe,
    ),
    "exaone": Architecture(model_type="llama", layer=_LLAMA, configure=configs.read_llama),
    "exaone4": Architecture(model_type="exaone4", layer=_OLMO2, configure=configs.read_exaone4),
    "exaone-moe": Architecture(model_type="exaone_moe", layer=_GLM4_MOE, configure=configs.read_exaone_moe),
    "gemma": Architecture(model_type="gemma", layer=_LLAMA, rules=_SHIFTED, configure=configs.read_gemma),
    "gemma2": Architecture(model_type="gemma2", layer=_SANDWICH, rules=_SHIFTED, configure=configs.read_gemma2),
    "gemma3": Architecture(model_type="gemma3_text", layer=_SANDWICH | _HEAD_NORMS, rules=_SHIFTED, configure=configs.read_gemma3),
    "gemma3n": Architecture(
        model_type="gemma3n_text",
        layer=_SANDWICH | _HEAD_NORMS | _GEMMA3N,
        whole=_PER_LAYER_WHOLE | {"altup_proj": "model.altup_projections.*", "altup_unembd_proj": "model.altup_unembed_projections.*"},
        configure=configs.read_gemma3n,
    ),
    "gemma4": Architecture(
        model_type="gemma4_text",
        layer=_SANDWICH | _HEAD_NORMS | _GEMMA4,
        whole=_PER_LAYER_WHOLE,
        varied=True,
        configure=configs.read_gemma4,
    ),
    "glm4": Architecture(
        model_type="glm4",
        layer=_NORMS
        | _ATTENTION
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        rules=dict.fromkeys(_PAIRS, "halved"),
        configure=configs.read_glm4,
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        layer=_GLM4_MOE | {"post_attention_norm": "post_attention_layernorm"},
        configure=configs.read_glm4moe,
    ),
    "gpt2": Architecture(
        model_type="gpt2",
        whole=_GPT2_WHOLE,
        prefix="transformer.h",
        layer=_GPT2,
        rules=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transposed"),
        rms_epsilon=False,
        configure=layer_norms.read_gpt2,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        layer=_ATTENTION
        | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks"}
        | _EXPERTS
        | {"ffn_gate_inp": "mlp.router"},
        rules={"ffn_gate_exps": "in turns", "ffn_down_exps": "transposed"},
        configure=configs.read_gpt_oss,
    ),
    "gptneox": Architecture(
        model_type="gpt_neox",
        layer=_GPT_NEOX,
        whole=_GPT_NEOX_WHOLE,
        prefix="gpt_neox.layers",
        rules={"attn_qkv": "by heads"},
        rms_epsilon=False,
        configure=layer_norms.read_gptneox,
    ),
    "granite": Architecture(model_type="granite", layer=_LLAMA, rules=_PAIRS, configure=configs.read_granite),
    "hunyuan-dense": Architecture(
        model_type="hunyuan_v1_dense",
        layer=_LLAMA | _LATE_NORMS,
        configure=configs.read_llama,
    ),
    "hunyuan-moe": Architecture(
        model_type="hunyuan_v1_moe",
        layer=_NORMS
        | _ATTENTION
        | _LATE_NORMS
        | _EXPERTS
        | {"ffn_gate_inp": "mlp.gate.wg"}
        | {f"ffn_{name}_shexp": f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down")},
        configure=configs.read_hunyuan_moe,
    ),
    "granitemoe": Architecture(
        model_type="granitemoe",
        layer=_NORMS | _ATTENTION | _GRANITE_EXPERTS | _GRANITE_SHARED,
        rules=_PAIRS | {"ffn_gate_shexp": "joined"},
        configure=configs.read_granitemoe,
    ),
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        layer=_FALCON_H1,
        whole={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        rules={"ssm_a": "log of negative"},
        configure=hybrids.read_falcon_h1,
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        layer=_NORMS
        | _ATTENTION
        | {stem: f"mamba.{name}" for stem, name in _MAMBA.items()}
        | _GRANITE_EXPERTS
        | _GRANITE_SHARED
        | {"ffn_gate": "shared_mlp.input_linear", "ffn_down": "shared_mlp.output_linear"},
        rules=_PAIRS | {"ssm_a": "log of negative", "ffn_gate": "joined", "ffn_gate_shexp": "joined"},
        configure=hybrids.read_granitehybrid,
    ),
    "internlm2": Architecture(model_type="llama", layer=_LLAMA, rules=_PAIRS, configure=configs.read_llama),
    "laguna": Architecture(
        model_type="laguna", layer=_GLM4_MOE | {"attn_gate": "self_attn.g_proj"}, varied=True, configure=windows.read_laguna
    ),
    "lfm2": Architecture(
        model_type="lfm2",
        layer=_LFM2,
        whole=_LFM2_WHOLE,
        configure=hybrids.read_lfm2,
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        layer=_LFM2
        | {stem: path.replace("mlp.", "feed_forward.") for stem, path in _EXPERTS.items()}
        | {"exp_probs_b": "feed_forward.expert"},
        whole=_LFM2_WHOLE,
        configure=hybrids.read_lfm2moe,
    ),
    "llama": Architecture(model_type="llama", layer=_LLAMA | _EXPERTS, rules=_PAIRS, configure=configs.read_llama_or_mixtral),
    "minicpm": Architecture(model_type="granite", layer=_LLAMA, rules=_PAIRS, configure=configs.read_minicpm),
    "minicpm3": Architecture(model_type="minicpm3", layer=_NORMS | _LATENT | _MLP, latent=True, configure=latents.read_minicpm3),
    "minimax-m2": Architecture(
        model_type="minimax_m2",
        layer=_QWEN3_MOE | {"exp_probs_b": "mlp.e_score_correction"},
        configure=configs.read_minimax_m2,
    ),
    "maincoder": Architecture(
        model_type="hunyuan_v1_dense",
        layer=_LLAMA | _LATE_NORMS,
        rules=dict.fromkeys((*_PAIRS, *_LATE_NORMS), "interleaved"),
        configure=configs.read_llama,
    ),
    "mellum": Architecture(model_type="mellum", layer=_QWEN3_MOE, configure=configs.read_mellum),
    "mistral3": Architecture(model_type="ministral3", layer=_LLAMA, rules=_PAIRS, configure=configs.read_mistral3),
    "mistral4": Architecture(model_type="mistral4", layer=_DEEPSEEK2, latent=True, configure=latents.read_deepseek2),
    "mimo2": Architecture(
        model_type="mimo_v2_flash",
        layer=_NORMS | _ATTENTION | _BIASED_EXPERTS | {"attn_sinks": "self_attn.sinks"},
        configure=windows.read_mimo2,
    ),
    "nemotron_h": Architecture(
        model_type="nemotron_h",
        layer=_NEMOTRON_H | {"ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"},
        whole=_NEMOTRON_H_WHOLE,
        rules={"ssm_a": "log of negative"},
        rms_epsilon=False,
        configure=hybrids.read_nemotron_h,
    ),
    "nemotron_h_moe": Architecture(
        model_type="nemotron_h",
        layer=_NEMOTRON_H
        | {f"ffn_{name}_exps": f"mixer.experts.{name}_proj" for name in ("up", "down")}
        | {f"ffn_{name}_shexp": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")}
        | {"ffn_gate_inp": "mixer.gate", "exp_probs_b": "mixer.gate.e_score_correction"},
        whole=_NEMOTRON_H_WHOLE,
        rules={"ssm_a": "log of negative"},
        rms_epsilon=False,
        configure=hybrids.read_nemotron_h_moe,
    ),
    "nemotron": Architecture(
        model_type="nemotron",
        layer=_NORMS | _ATTENTION | {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"},
        rules=_SHIFTED,
        rms_epsilon=False,
        configure=layer_norms.read_nemotron,
    ),
    "olmo": Architecture(model_type="olmo", layer=_ATTENTION | _MLP, rules=_PAIRS, rms_epsilon=False, configure=layer_norms.read_olmo),
    "olmo2": Architecture(model_type="olmo2", layer=_OLMO2, configure=configs.read_olmo2),
    "olmoe": Architecture(model_type="olmoe", layer=_NORMS | _ATTENTION | _HEAD_NORMS | _EXPERTS, configure=configs.read_olmoe),
    "phi2": Architecture(
        model_type="phi",
        layer={"attn_norm": "input_layernorm"}
        | _ATTENTION
        | {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        whole={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
        rms_epsilon=False,
        configure=layer_norms.read_layer_norms,
    ),
    "phi3": Architecture(
        model_type="phi3",
        layer=_NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        configure=configs.read_phi3,
    ),
    "qwen2": Architecture(model_type="qwen2", layer=_LLAMA, configure=configs.read_qwen),
    "qwen2moe": Architecture(
        model_type="qwen2_moe", layer=_NORMS | _ATTENTION | _EXPERTS | _SHARED_EXPERT, configure=configs.read_qwen2moe
    ),
    "qwen2vl": Architecture(model_type="qwen2", layer=_LLAMA, configure=configs.read_qwen),
    "qwen3": Architecture(model_type="qwen3", layer=_LLAMA | _HEAD_NORMS, configure=configs.read_qwen),
    "qwen3vl": Architecture(model_type="qwen3", layer=_LLAMA | _HEAD_NORMS, configure=configs.read_qwen),
    "qwen35": Architecture(model_type="qwen3_5_text", layer=_QWEN35 | _MLP, rules=_QWEN35_RULES, head=_HEAD, configure=hybrids.read_qwen35),
    "qwen35moe": Architecture(
        model_type="qwen3_5_moe_text",
        layer=_QWEN35 | _EXPERTS | _SHARED_EXPERT,
        rules=_QWEN35_RULES,
        head=_HEAD,
        configure=hybrids.read_qwen35moe,
    ),
    "qwen3moe": Architecture(model_type="qwen3_moe", layer=_QWEN3_MOE, configure=configs.read_qwen3moe),
    "qwen3vlmoe": Architecture(model_type="qwen3_moe", layer=_QWEN3_MOE, configure=configs.read_qwen3moe),
    "qwen3next": Architecture(
        model_type=qwen3_next.TARGET_TYPE,
        layer=_QWEN35 | _EXPERTS | _SHARED_EXPERT,
        rules=_SHIFTED | {"ssm_a": "log of negative"},
        divided={"ssm_in": "in_proj_qkvz", "ssm_ba": "in_proj_ba"},
        head=_HEAD,
        configure=hybrids.read_qwen3next,
    ),
    "seed_oss": Architecture(
        model_type="seed_oss",
        layer=_LLAMA | {"post_attention_norm": "post_attention_layernorm"},
        configure=configs.read_seed,
    ),
    "smollm3": Architecture(model_type="smollm3", layer=_LLAMA, rules=_PAIRS, configure=configs.read_llama),
    "stablelm": Architecture(model_type="stablelm", layer=_LLAMA, rms_epsilon=False, configure=layer_norms.read_stablelm),
    "starcoder": Architecture(
        model_type="gpt_bigcode",
        whole=_GPT2_WHOLE,
        prefix="transformer.h",
        layer=_GPT2,
        rms_epsilon=False,
        configure=layer_norms.read_starcoder,
    ),
    "starcoder2": Architecture(model_type="starcoder2", layer=_STARCODER2, rms_epsilon=False, configure=layer_norms.read_starcoder2),
}

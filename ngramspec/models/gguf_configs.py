"""Make the configs of transformers' models of the metadata of GGUF files, one function for every architecture or several.

A function gets the metadata and the config that all architectures have in common (`gguf_architectures.read_config`); it returns what
differs from that. Whatever the model cannot have is refused by key and value. Knows no tensors' names but those that show what a model has.
"""

from __future__ import annotations

from ngramspec.models.gguf_expert_keys import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN, Config, read_experts, read_grouped_experts
from ngramspec.models.gguf_metadata import CONV, FREQ_BASE, FULL, LINEAR, SLIDING, GgufMetadata

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # of LongRoPE's frequencies
MOST_TAPS = 16  # Most tokens that the convolution of a recurrent layer may see; published models have 3 or 4.


def read_common(metadata: GgufMetadata, config: Config) -> Config:
    """Read what every model with rotary embeddings and a gated MLP states."""
    return {
        "intermediate_size": metadata.get_same("feed_forward_length", metadata.get_int("expert_feed_forward_length", 0) or None),
        "num_key_value_heads": metadata.get_same("attention.head_count_kv", config["num_attention_heads"]),
        "rope_parameters": metadata.get_rope(),
    }


def read_window(metadata: GgufMetadata, default: int | None = None) -> int:
    """Read the window of an architecture that always has one."""
    if (window := metadata.get_int("attention.sliding_window", default)) < 1:
        raise metadata.make_refusal("attention.sliding_window", window, "1 and more")
    return window


def read_llama(metadata: GgufMetadata, config: Config) -> Config:
    """Read a config whose rotary embeddings turn whole heads, and whose biases show in the names of tensors."""
    if (turned := metadata.get_int("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        raise metadata.make_refusal("rope.dimension_count", turned, str(config["head_dim"]))
    biases = {"attention_bias": metadata.has_tensor("blk.0.attn_q.bias"), "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias")}
    return read_common(metadata, config) | biases


def read_mistral3(metadata: GgufMetadata, config: Config) -> Config:
    found = read_llama(metadata, config)
    if not metadata.has_key("attention.temperature_scale"):
        return found | {"model_type": "mistral", "sliding_window": None}
    rope = found["rope_parameters"]
    rope["llama_4_scaling_beta"] = metadata.get_float("attention.temperature_scale")
    rope.setdefault(
        "original_max_position_embeddings", metadata.get_int("rope.scaling.original_context_length", config["max_position_embeddings"])
    )
    if metadata.has_key("rope.scaling.yarn_log_multiplier"):
        rope |= {"mscale": 1.0, "mscale_all_dim": metadata.get_float("rope.scaling.yarn_log_multiplier")}
    return found


def read_granite(metadata: GgufMetadata, config: Config) -> Config:
    if metadata.is_stated("rope.scaling.finetuned", False):
        raise metadata.make_refusal("rope.scaling.finetuned", False, "true, since layers without rotary embedding are not read")
    return read_llama(metadata, config) | _read_multipliers(metadata, config) | {"logits_scaling": metadata.get_float("logit_scale")}


def _read_multipliers(metadata: GgufMetadata, config: Config) -> Config:
    return {
        "attention_multiplier": metadata.get_float("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": metadata.get_float("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.get_float("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.get_float("logit_scale", 0.0) or 1.0,
    }


def read_partial(metadata: GgufMetadata, config: Config) -> Config:
    """Read a config whose rotary embeddings turn the first numbers of every head."""
    found, head_dim = read_common(metadata, config), config["head_dim"]
    turned = metadata.get_int("rope.dimension_count", head_dim)
    if not 0 < turned <= head_dim or turned % 2:
        raise metadata.make_refusal("rope.dimension_count", turned, f"an even number up to {head_dim}")
    found["rope_parameters"]["partial_rotary_factor"] = turned / head_dim
    return found | {"attention_bias": metadata.has_tensor("blk.0.attn_q.bias")}


def read_phi3(metadata: GgufMetadata, config: Config) -> Config:
    """Read Phi-3's config. Its sliding window is left out, as in llama.cpp."""
    found = read_partial(metadata, config)
    if metadata.has_tensor(LONG_FACTORS):
        n = metadata.get_int("rope.dimension_count", config["head_dim"]) // 2
        long, short = (metadata.read_numbers(name, n) for name in (LONG_FACTORS, SHORT_FACTORS))
        found["rope_parameters"] |= {
            "rope_type": "longrope", "long_factor": long, "short_factor": short,
            "attention_factor": metadata.get_float("rope.scaling.attn_factor", 1.0),
        }  # fmt: skip
    return found | {
        "original_max_position_embeddings": metadata.get_int("rope.scaling.original_context_length", config["max_position_embeddings"])
    }


def read_olmo2(metadata: GgufMetadata, config: Config) -> Config:
    found = read_llama(metadata, config)
    if window := metadata.get_int("attention.sliding_window", 0):
        local = metadata.get_rope("rope.freq_base_swa" if metadata.has_key("rope.freq_base_swa") else "rope.freq_base", scaled=False)
        rope = {FULL: found["rope_parameters"], SLIDING: local}
        found |= {"model_type": "olmo3", "sliding_window": window, "layer_types": metadata.get_layer_types(4), "rope_parameters": rope}
    return found


def read_exaone4(metadata: GgufMetadata, config: Config) -> Config:
    found = read_llama(metadata, config) | {"sliding_window": None, "layer_types": [FULL] * metadata.n_layers}
    if window := metadata.get_int("attention.sliding_window", 4096 if metadata.n_layers == 64 else 0):
        found |= {"sliding_window": window, "layer_types": metadata.get_layer_types(4)}
    return found


def read_cohere(metadata: GgufMetadata, config: Config) -> Config:
    return read_llama(metadata, config) | {
        "logit_scale": metadata.get_float("logit_scale", 1.0),
        "layer_norm_eps": metadata.get_float("attention.layer_norm_epsilon"),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        "tie_word_embeddings": True,
    }


def read_cohere2(metadata: GgufMetadata, config: Config) -> Config:
    window = {"sliding_window": read_window(metadata), "layer_types": metadata.get_layer_types(4)}
    return read_cohere(metadata, config) | window


def read_ernie(metadata: GgufMetadata, config: Config) -> Config:
    return read_llama(metadata, config) | {"use_bias": metadata.has_tensor("blk.0.attn_q.bias")}


def read_seed(metadata: GgufMetadata, config: Config) -> Config:
    return read_llama(metadata, config) | {"attention_out_bias": metadata.has_tensor("blk.0.attn_output.bias")}


def read_qwen(metadata: GgufMetadata, config: Config) -> Config:
    return read_llama(metadata, config) | {"use_sliding_window": False, "sliding_window": None}


def read_llama_or_mixtral(metadata: GgufMetadata, config: Config) -> Config:
    found = read_llama(metadata, config)
    if not metadata.get_int("expert_count", 0):
        return found
    experts = read_experts(metadata, normalise=True)
    return found | {"model_type": "mixtral", "sliding_window": None, "num_local_experts": experts.pop("num_experts")} | experts


def read_olmoe(metadata: GgufMetadata, config: Config) -> Config:
    if clamp := metadata.get_float("attention.clamp_kqv", 0.0):
        raise metadata.make_refusal("attention.clamp_kqv", clamp, "0")
    return read_llama(metadata, config) | read_experts(metadata, normalise=False)


def read_granitemoe(metadata: GgufMetadata, config: Config) -> Config:
    experts = read_experts(metadata, normalise=True)
    return read_granite(metadata, config) | {"num_local_experts": experts.pop("num_experts")} | experts


def _read_layers_with_keys(metadata: GgufMetadata) -> tuple[int, list[bool]]:
    """Read the number of heads of keys of layers with attention, and which layers have any."""
    kv = metadata.get_per_layer("attention.head_count_kv")
    if len(kinds := {n for n in kv if n}) != 1:
        raise metadata.make_refusal("attention.head_count_kv", kv, "one number of heads for layers with attention, 0 for others")
    return kinds.pop(), [n > 0 for n in kv]


def _read_mamba(metadata: GgufMetadata) -> tuple[int, int, int, int, int]:
    """Read the sizes of layers with Mamba-2: heads, outputs of one, groups of heads, state, tokens that the convolution sees."""
    inner, n_heads, n_groups = (metadata.get_int(f"ssm.{key}") for key in ("inner_size", "time_step_rank", "group_count"))
    widest = max(n for tensor in metadata.file.tensors.values() for n in tensor.shape)
    if not 0 < inner <= widest:
        raise metadata.make_refusal("ssm.inner_size", inner, f"1 to {widest}, by its tensors")
    if not 0 < n_heads <= inner or inner % n_heads:
        raise metadata.make_refusal("ssm.time_step_rank", n_heads, f"a divisor of ssm.inner_size, {inner}")
    if n_groups < 1 or n_heads % n_groups:
        raise metadata.make_refusal("ssm.group_count", n_groups, f"a divisor of ssm.time_step_rank, {n_heads}")
    if not 0 < (state := metadata.get_int("ssm.state_size")) <= widest:
        raise metadata.make_refusal("ssm.state_size", state, f"1 to {widest}, by its tensors")
    if not MOST_TAPS >= (taps := metadata.get_int("ssm.conv_kernel")) > 1:
        raise metadata.make_refusal("ssm.conv_kernel", taps, f"2 to {MOST_TAPS}")
    return n_heads, inner // n_heads, n_groups, state, taps


def read_granitehybrid(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of Granite 4's hybrids. Layers without heads of keys have Mamba-2 in place of attention."""
    kv, attends = _read_layers_with_keys(metadata)
    if all(attends):
        raise metadata.make_refusal("attention.head_count_kv", [kv] * len(attends), "0 for some layers")
    i_attention, i_mamba = attends.index(True), attends.index(False)
    inner, has_experts = metadata.get_same("feed_forward_length"), metadata.get_int("expert_count", 0) > 0
    experts = read_experts(metadata, normalise=True) if has_experts else {"num_experts": 0, "num_experts_per_tok": 0}
    n_shared = metadata.get_int("expert_shared_feed_forward_length", 0) if has_experts else inner
    if has_experts and n_shared < 1:
        raise metadata.make_refusal("expert_shared_feed_forward_length", n_shared, "1 and more")
    if (turned := metadata.get_int("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        raise metadata.make_refusal("rope.dimension_count", turned, str(config["head_dim"]))
    n_heads, head_dim, n_groups, state, taps = _read_mamba(metadata)
    if n_heads * head_dim % config["hidden_size"]:
        raise metadata.make_refusal("ssm.inner_size", n_heads * head_dim, f"a multiple of embedding_length, {config['hidden_size']}")
    return _read_multipliers(metadata, config) | {
        "mamba_n_heads": n_heads, "mamba_d_head": head_dim, "mamba_n_groups": n_groups, "mamba_d_state": state,
        "mamba_d_conv": taps, "mamba_expand": n_heads * head_dim // config["hidden_size"],
        "num_key_value_heads": kv, "layer_types": [FULL if each else LINEAR for each in attends], "rope_parameters": metadata.get_rope(),
        "position_embedding_type": None if metadata.is_stated("rope.scaling.finetuned", False) else "rope",
        "attention_bias": metadata.has_tensor(f"blk.{i_attention}.attn_q.bias"), "intermediate_size": inner,
        "mamba_conv_bias": metadata.has_tensor(f"blk.{i_mamba}.ssm_conv1d.bias"), "mamba_proj_bias": False,
        "shared_intermediate_size": n_shared, "num_local_experts": experts.pop("num_experts"), **experts,
    }  # fmt: skip


def read_nemotron_h(metadata: GgufMetadata, config: Config) -> Config:
    """Read Nemotron-H's config. A layer is attention if it has heads of keys, an MLP or experts if these have a size, else Mamba-2."""
    kv, attends = _read_layers_with_keys(metadata)
    inner = metadata.get_per_layer("feed_forward_length")
    if len(kinds := {n for n in inner if n}) != 1 or any(n and attend for n, attend in zip(inner, attends, strict=True)):
        raise metadata.make_refusal("feed_forward_length", inner, "one size for layers that are an MLP, 0 for others")
    kind = "moe" if metadata.get_int("expert_count", 0) else "mlp"
    types = [FULL if attend else kind if n else LINEAR for n, attend in zip(inner, attends, strict=True)]
    if LINEAR not in types:
        raise metadata.make_refusal("attention.head_count_kv", [kv * attend for attend in attends], "0 for layers with Mamba-2")
    if scale := metadata.get_float("attention.scale", 0.0):
        raise metadata.make_refusal("attention.scale", scale, "0")
    n_heads, head_dim, n_groups, state, taps = _read_mamba(metadata)
    eps = metadata.get_float("attention.layer_norm_epsilon", 1e-5)
    return {
        "mamba_num_heads": n_heads, "mamba_head_dim": head_dim, "n_groups": n_groups, "ssm_state_size": state, "conv_kernel": taps,
        "layers_block_type": types, "num_key_value_heads": kv, "intermediate_size": kinds.pop(), "time_step_min": 0.0,
        "layer_norm_epsilon": metadata.get_float("attention.layer_norm_rms_epsilon", eps), "use_bias": False,
        "use_conv_bias": metadata.has_tensor(f"blk.{types.index(LINEAR)}.ssm_conv1d.bias"),
        "mlp_bias": metadata.has_tensor(f"blk.{types.index(kind)}.ffn_up.bias"),
    }  # fmt: skip


def read_nemotron_h_moe(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of Nemotron-H with experts, whose sums may be scaled."""
    if latent := metadata.get_int("moe_latent_size", 0):
        raise metadata.make_refusal("moe_latent_size", latent, "0")
    normalise = metadata.is_stated("expert_weights_norm", True)
    experts = read_experts(metadata, normalise, SIGMOID, scaled=True)
    return read_nemotron_h(metadata, config) | {
        "n_routed_experts": experts.pop("num_experts"), **experts, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
        "routed_scaling_factor": metadata.get_float("expert_weights_scale", 0.0) or 1.0,
        "moe_intermediate_size": metadata.get_same("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.get_int("expert_shared_feed_forward_length"),
    }  # fmt: skip


def read_qwen2moe(metadata: GgufMetadata, config: Config) -> Config:
    return read_qwen(metadata, config) | read_experts(metadata, normalise=False) | {
        "moe_intermediate_size": metadata.get_int("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.get_int("expert_shared_feed_forward_length"),
        "qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"), "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip


def read_qwen3moe(metadata: GgufMetadata, config: Config) -> Config:
    return read_qwen(metadata, config) | read_experts(metadata, normalise=True) | {
        "moe_intermediate_size": metadata.get_int("expert_feed_forward_length"), "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip


def read_gpt_oss(metadata: GgufMetadata, config: Config) -> Config:
    base, of_windows = (metadata.get_float(f"rope.freq_base{end}", FREQ_BASE) for end in ("", "_swa"))
    if metadata.has_key("rope.freq_base_swa") and of_windows != base:
        raise metadata.make_refusal("rope.freq_base_swa", of_windows, str(base))
    experts = read_experts(metadata, normalise=True, scoring=SOFTMAX_OF_CHOSEN)
    return read_llama(metadata, config) | {
        "intermediate_size": metadata.get_same("expert_feed_forward_length"),
        "num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"],
        "sliding_window": read_window(metadata), "layer_types": metadata.get_layer_types(2),
    }  # fmt: skip


def read_qwen35(metadata: GgufMetadata, config: Config) -> Config:
    """Read Qwen3.5's config. Its rotary embedding has three parts for images, which are the same for text.

    Where there are more heads of values than of keys, the model gets as many of both, with those of keys repeated: see `RepeatedTensor`.
    """
    n_heads, n_inner = metadata.get_int("ssm.time_step_rank"), metadata.get_int("ssm.inner_size")
    if n_heads < 1 or n_inner % n_heads:
        raise metadata.make_refusal("ssm.inner_size", n_inner, f"a multiple of ssm.time_step_rank, {n_heads}")
    if (n_keys := metadata.get_int("ssm.group_count")) < 1 or n_heads % n_keys:
        raise metadata.make_refusal("ssm.group_count", n_keys, f"a divisor of ssm.time_step_rank, {n_heads}")
    return read_partial(metadata, config) | {
        "layer_types": metadata.get_recurrent_layers(4), "linear_conv_kernel_dim": metadata.get_int("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.get_int("ssm.state_size"), "linear_value_head_dim": n_inner // n_heads,
        "linear_num_key_heads": n_heads, "linear_num_value_heads": n_heads, "linear_key_repeats": n_heads // n_keys,
        "attention_bias": metadata.has_tensor(f"blk.{metadata.n_layers - 1}.attn_q.bias"),
    }  # fmt: skip


def read_qwen35moe(metadata: GgufMetadata, config: Config) -> Config:
    return read_qwen35(metadata, config) | read_experts(metadata, normalise=True) | {
        "moe_intermediate_size": metadata.get_int("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.get_int("expert_shared_feed_forward_length"),
    }  # fmt: skip


def read_qwen3next(metadata: GgufMetadata, config: Config) -> Config:
    """Read Qwen3-Next's config, as that of a Qwen3.5 mixture; its heads of values lie side by side by heads of keys, as in transformers."""
    return read_qwen35moe(metadata, config) | {"linear_num_key_heads": metadata.get_int("ssm.group_count"), "linear_key_repeats": 1}


def read_lfm2(metadata: GgufMetadata, config: Config) -> Config:
    """Read LFM2's config. Layers without heads of keys have a short convolution in place of attention."""
    kv, attends = _read_layers_with_keys(metadata)
    if not MOST_TAPS >= (taps := metadata.get_int("shortconv.l_cache")) > 1:
        raise metadata.make_refusal("shortconv.l_cache", taps, f"2 to {MOST_TAPS}")
    if window := metadata.get_int("attention.sliding_window", 0):
        raise metadata.make_refusal("attention.sliding_window", window, "0")
    if (turned := metadata.get_int("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        raise metadata.make_refusal("rope.dimension_count", turned, str(config["head_dim"]))
    return {
        "num_key_value_heads": kv, "layer_types": [FULL if each else CONV for each in attends], "conv_L_cache": taps, "conv_bias": False,
        "intermediate_size": metadata.get_same("feed_forward_length"), "block_auto_adjust_ff_dim": False,
        "norm_eps": metadata.get_float("attention.layer_norm_rms_epsilon"), "rope_parameters": metadata.get_rope(),
    }  # fmt: skip


def read_lfm2moe(metadata: GgufMetadata, config: Config) -> Config:
    n_dense = metadata.get_int("leading_dense_block_count", 0)
    return read_lfm2(metadata, config) | read_experts(metadata, normalise=True, scoring=SIGMOID) | {
        "moe_intermediate_size": metadata.get_same("expert_feed_forward_length"), "num_dense_layers": n_dense,
        "use_expert_bias": metadata.has_tensor(f"blk.{n_dense}.exp_probs_b.bias"), "routed_scaling_factor": 1.0,
    }  # fmt: skip


def read_gemma(metadata: GgufMetadata, config: Config) -> Config:
    return read_llama(metadata, config) | {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def read_gemma2(metadata: GgufMetadata, config: Config) -> Config:
    is_27b = metadata.n_layers == 46  # as llama.cpp tells it
    return read_gemma(metadata, config) | {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"],
        "sliding_window": read_window(metadata, 4096),
        "layer_types": metadata.get_layer_types(2),
        "attn_logit_softcapping": metadata.get_float("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get_float("final_logit_softcapping", 30.0),
    }


def read_gemma3(metadata: GgufMetadata, config: Config) -> Config:
    is_27b = metadata.n_layers == 62  # as llama.cpp tells it
    window = metadata.get_int("attention.sliding_window", 0)
    return read_gemma(metadata, config) | {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"],
        "sliding_window": window or None,
        "layer_types": metadata.get_layer_types(6) if window else [FULL] * metadata.n_layers,
        "rope_parameters": {FULL: metadata.get_rope(), SLIDING: metadata.get_rope("rope.freq_base_swa", scaled=False)},
        "final_logit_softcapping": metadata.get_float("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": None,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def read_gemma4(metadata: GgufMetadata, config: Config) -> Config:
    """Read Gemma 4's config. Which numbers of a head its global layers rotate shows in the tensor rope_freqs."""
    types = metadata.get_layer_types(6)
    is_global = [each == FULL for each in types]
    if not is_global[-1]:
        raise metadata.make_refusal("attention.sliding_window_pattern", types[-1], f"{FULL} in the last layer")
    wide, narrow = config["head_dim"], metadata.get_int("attention.key_length_swa", config["head_dim"])
    for key, n in (("attention.value_length_swa", narrow), ("rope.dimension_count", wide), ("rope.dimension_count_swa", narrow)):
        if (stated := metadata.get_int(key, n)) != n:
            raise metadata.make_refusal(key, stated, str(n))
    of_layers = list(zip(metadata.get_per_layer("attention.head_count_kv"), is_global, strict=True))
    kv_global, kv_local = ({n for n, each in of_layers if each == kind} for kind in (True, False))
    inner, n_shared = metadata.get_per_layer("feed_forward_length"), metadata.get_int("attention.shared_kv_layers", 0)
    n_own = metadata.n_layers - n_shared
    doubled = inner[-1] == 2 * inner[0]
    if len(kv_global) != 1 or len(kv_local) > 1:
        raise metadata.make_refusal("attention.head_count_kv", [n for n, _ in of_layers], "the same for layers of a type")
    if not 0 <= n_shared < metadata.n_layers or set(types[:n_own]) != set(types):
        raise metadata.make_refusal("attention.shared_kv_layers", n_shared, "fewer than leave a layer of each type")
    if inner != [inner[0]] * n_own + [inner[0] * (1 + doubled)] * n_shared:
        raise metadata.make_refusal("feed_forward_length", inner, "one for all, or twice as much in layers with others' keys")
    first_global = is_global.index(True)
    has_experts = metadata.has_tensor("blk.0.ffn_gate_inp.weight")
    experts = read_experts(metadata, normalise=True) if has_experts else {}
    per_layer = metadata.get_int("embedding_length_per_layer_input", 0)
    return {
        "head_dim": narrow, "num_key_value_heads": next(iter(kv_local or kv_global)), "intermediate_size": inner[0],
        "per_layer_config": {
            str(i): {"head_dim": wide, "num_key_value_heads": n} for i, (n, each) in enumerate(of_layers) if each
        },
        "attention_k_eq_v": not metadata.has_tensor(f"blk.{first_global}.attn_v.weight"),
        "layer_types": types, "sliding_window": read_window(metadata),
        "rope_parameters": {
            FULL: metadata.get_rope(scaled=False) | {"rope_type": "proportional"},
            SLIDING: metadata.get_rope("rope.freq_base_swa", scaled=False),
        },
        "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": metadata.get_float("final_logit_softcapping", 0.0) or None,
        "num_kv_shared_layers": n_shared, "use_double_wide_mlp": doubled,
        "hidden_size_per_layer_input": per_layer, "vocab_size_per_layer_input": config["vocab_size"],
        "enable_moe_block": has_experts, "num_experts": experts.get("num_experts"),
        "top_k_experts": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": metadata.get_same("expert_feed_forward_length") if has_experts else None,
    }  # fmt: skip


def _read_latent(metadata: GgufMetadata, config: Config) -> Config:
    """Read the sizes of latent attention. Older files have those of whole heads, newer ones beside those of rows that are kept."""
    end = "_mla" if metadata.has_key("attention.key_length_mla") else ""
    key, value = (metadata.get_int(f"attention.{name}_length{end}") for name in ("key", "value"))
    turned, n_heads = metadata.get_int("rope.dimension_count"), config["num_attention_heads"]
    if not 0 < turned < key:
        raise metadata.make_refusal("rope.dimension_count", turned, f"1 to {key - 1}")
    if (kv := metadata.get_same("attention.head_count_kv", 1)) not in (1, n_heads):
        raise metadata.make_refusal("attention.head_count_kv", kv, f"1 or {n_heads}")
    rope = metadata.get_rope()
    if rope["rope_type"] == "yarn":
        # Files state a tenth of DeepSeek's mscale_all_dim, and mscale is the same.
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * metadata.get_float("rope.scaling.yarn_log_multiplier", 0.0))
        rope["attention_factor"] = 1.0
    return {
        "kv_lora_rank": metadata.get_int("attention.kv_lora_rank"), "q_lora_rank": metadata.get_int("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key - turned, "qk_rope_head_dim": turned, "v_head_dim": value, "head_dim": turned,
        "num_key_value_heads": n_heads, "rope_parameters": rope, "rope_interleave": True, "attention_bias": False,
        "intermediate_size": metadata.get_same("feed_forward_length"),
        "first_k_dense_replace": metadata.get_int("leading_dense_block_count", 0),
    }  # fmt: skip


def read_deepseek2(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of DeepSeek-V2 and what has its form. How experts are scored tells which of transformers' models it is: by sigmoid
    DeepSeek-V3 (GLM-4.7-Flash is the same), by softmax Mistral Small 4 if the weights of the chosen ones are divided by their sum.
    """
    found = _read_latent(metadata, config)
    if not metadata.get_int("expert_count", 0):
        dense = {"first_k_dense_replace": metadata.n_layers, "n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
        return found | dense | {"model_type": "deepseek_v3"}
    normalise, is_glm = metadata.is_stated("expert_weights_norm", True), config["vocab_size"] == 154880
    default = SIGMOID if is_glm and metadata.n_layers in (47, 48) else SOFTMAX  # as llama.cpp tells GLM-4.7-Flash
    scoring = SIGMOID if (metadata.get_int("expert_gating_func", 0) or default) == SIGMOID else SOFTMAX
    experts = read_grouped_experts(metadata, normalise, scoring)
    if scoring == SIGMOID:
        found["model_type"] = "deepseek_v3"
    elif normalise:
        found |= _read_mistral4(metadata, found)
    else:
        found |= {"model_type": "deepseek_v2", "topk_method": "greedy" if experts["n_group"] == 1 else "group_limited_greedy"}
    return found | experts


def read_glm4moe(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of GLM-4 MoE and what has its form: Ling 2 (bailingmoe2), dots.llm1."""
    experts = read_grouped_experts(metadata, metadata.is_stated("expert_weights_norm", True), SIGMOID)
    width = experts["moe_intermediate_size"]
    if (shared := metadata.get_int("expert_shared_feed_forward_length", 0)) not in (0, width):
        raise metadata.make_refusal("expert_shared_feed_forward_length", shared, str(width))
    return read_partial(metadata, config) | experts | {
        "first_k_dense_replace": metadata.get_int("leading_dense_block_count", 0),
        "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"), "num_nextn_predict_layers": 0,
    }  # fmt: skip


def _read_mistral4(metadata: GgufMetadata, found: Config) -> Config:
    """Read what Mistral Small 4 has besides: queries that are scaled by their position."""
    rope, scale = found["rope_parameters"], metadata.get_float("attention.temperature_scale", 0.0)
    length = rope.get("original_max_position_embeddings", metadata.get_int("context_length"))
    if scale and (stated := metadata.get_int("attention.temperature_length", length)) != length:
        raise metadata.make_refusal("attention.temperature_length", stated, str(length))
    rope |= {"llama_4_scaling_beta": scale, "original_max_position_embeddings": length}
    return {"model_type": "mistral4", "head_dim": found["qk_nope_head_dim"] + found["qk_rope_head_dim"]}


def read_starcoder2(metadata: GgufMetadata, config: Config) -> Config:
    return read_llama(metadata, config) | {
        "norm_epsilon": metadata.get_float("attention.layer_norm_epsilon"),
        "use_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        "sliding_window": None,
    }


def read_gpt2(metadata: GgufMetadata, config: Config) -> Config:
    positions = metadata.file.tensors.get("position_embd.weight")
    n_positions = positions.shape[0] if positions else config["max_position_embeddings"]
    return {
        "max_position_embeddings": n_positions, "n_ctx": n_positions, "n_positions": n_positions, "n_embd": config["hidden_size"],
        "n_layer": metadata.n_layers, "n_head": config["num_attention_heads"], "n_inner": metadata.get_same("feed_forward_length"),
        "layer_norm_epsilon": metadata.get_float("attention.layer_norm_epsilon"),
    }  # fmt: skip

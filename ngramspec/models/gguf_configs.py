"""Make the configs of transformers' models of the metadata of GGUF files, one function for every architecture or several; those of hybrids,
of models with LayerNorms and with latent attention are in `gguf_hybrid_configs`, `gguf_layer_norm_configs` and `gguf_latent_configs`.

A function gets the metadata and the config that all architectures have in common (`gguf_architectures.read_config`); it returns what
differs from that. Whatever the model cannot have is refused by key and value. Knows no tensors' names but those that show what a model has.
"""

from __future__ import annotations

import math

from ngramspec.models.gguf_expert_keys import SIGMOID, SOFTMAX_OF_CHOSEN, Config, read_experts, read_grouped_experts
from ngramspec.models.gguf_metadata import FREQ_BASE, FULL, LONG_FACTORS, SHORT_FACTORS, SLIDING, GgufMetadata


def read_common(metadata: GgufMetadata, config: Config) -> Config:
    """Read what every model with rotary embeddings and a gated MLP states."""
    return {
        "intermediate_size": metadata.get_same("feed_forward_length", metadata.get_int("expert_feed_forward_length", 0) or None),
        "num_key_value_heads": metadata.get_same("attention.head_count_kv", config["num_attention_heads"]),
        "rope_parameters": metadata.get_rope(),
    }


def read_window(metadata: GgufMetadata, default: int | None = None, *, same_angles: bool = True) -> int:
    """Read the window of an architecture that always has one. `same_angles`: its layers with windows have the angles of the others."""
    if same_angles:
        refuse_other_angles(metadata)
    if (window := metadata.get_int("attention.sliding_window", default)) < 1:
        raise metadata.make_refusal("attention.sliding_window", window, "1 and more")
    return window


def refuse_other_angles(metadata: GgufMetadata) -> None:
    """Refuse a file whose layers with windows have other angles. Raises UnsupportedModelError."""
    base = metadata.get_float("rope.freq_base", FREQ_BASE)
    if (of_windows := metadata.get_float("rope.freq_base_swa", base)) != base:
        raise metadata.make_refusal("rope.freq_base_swa", of_windows, str(base))
    if metadata.get_text("rope.scaling.type", "") == "none" and (factor := metadata.get_float("rope.scaling.factor", 1.0)) not in (
        0.0,
        1.0,
    ):
        raise metadata.make_refusal("rope.scaling.factor", factor, "1, since llama.cpp applies it to layers with windows alone")


def read_llama(metadata: GgufMetadata, config: Config) -> Config:
    """Read a config whose rotary embeddings turn whole heads, and whose biases show in the names of tensors."""
    if (turned := metadata.get_int("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        raise metadata.make_refusal("rope.dimension_count", turned, str(config["head_dim"]))
    biases = {"attention_bias": metadata.has_attention_bias(), "mlp_bias": metadata.has_mlp_bias()}
    return read_common(metadata, config) | biases


def read_mistral3(metadata: GgufMetadata, config: Config) -> Config:
    found = read_llama(metadata, config)
    rope = found["rope_parameters"]
    if (multiplier := metadata.get_float("rope.scaling.yarn_log_multiplier", 0.0)) and rope["rope_type"] == "yarn":
        usual, divisor = (1 + 0.1 * each * math.log(max(rope["factor"], 1.0)) for each in (1.0, multiplier))
        rope["attention_factor"] = metadata.get_float("rope.scaling.attn_factor", 1.0) * usual / divisor
    if not metadata.has_key("attention.temperature_scale"):
        return found | {"model_type": "mistral", "sliding_window": None}
    rope["llama_4_scaling_beta"] = metadata.get_float("attention.temperature_scale")
    rope.setdefault(
        "original_max_position_embeddings", metadata.get_int("rope.scaling.original_context_length", config["max_position_embeddings"])
    )
    return found


def read_granite(metadata: GgufMetadata, config: Config) -> Config:
    if metadata.is_stated("rope.scaling.finetuned", False):
        raise metadata.make_refusal("rope.scaling.finetuned", False, "true, since layers without rotary embedding are not read")
    images = metadata.get_numbers("deepstack_mapping")
    if any(number >= 0 for number in images):
        raise metadata.make_refusal("deepstack_mapping", images, "-1 for every layer: inputs from images are not read")
    return read_llama(metadata, config) | read_multipliers(metadata, config) | {"logits_scaling": metadata.get_float("logit_scale")}


def read_minicpm(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of MiniCPM (1 to 4), which is Granite's model. Older files, which lack the multipliers, are refused."""
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        metadata.get_float(key)
    found = read_llama(metadata, config) | read_multipliers(metadata, config)
    return found | read_long_rope(metadata, config, found["rope_parameters"])


def read_multipliers(metadata: GgufMetadata, config: Config) -> Config:
    """Read the factors that Granite's models have in places."""
    return {
        "attention_multiplier": metadata.get_float("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": metadata.get_float("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.get_float("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.get_float("logit_scale", 0.0) or 1.0,
    }


def read_partial(metadata: GgufMetadata, config: Config) -> Config:
    """Read a config whose rotary embeddings turn the first numbers of every head."""
    found = read_common(metadata, config)
    found["rope_parameters"]["partial_rotary_factor"] = metadata.get_turned_share(config["head_dim"])
    return found | {"attention_bias": metadata.has_attention_bias()}


def read_glm4(metadata: GgufMetadata, config: Config) -> Config:
    """Read GLM-4's config. Files of models that also read images (GLM-4.1V, GLM-4.6V-Flash) have the rows of turned pairs in two halves."""
    turned = metadata.get_int("rope.dimension_count", config["head_dim"])
    of_image = metadata.get_numbers("rope.dimension_sections")[:2]
    return read_partial(metadata, config) | ({"halved_rows": turned} if of_image and all(of_image) else {})


def read_phi3(metadata: GgufMetadata, config: Config) -> Config:
    """Read Phi-3's config. Its sliding window is left out, as in llama.cpp."""
    found = read_partial(metadata, config)
    return found | read_long_rope(metadata, config, found["rope_parameters"])


def read_long_rope(metadata: GgufMetadata, config: Config, rope: Config) -> Config:
    """Read the factors of LongRoPE, if the file has any, into `rope`, and return what the config has besides."""
    original = metadata.get_int("rope.scaling.original_context_length", config["max_position_embeddings"])
    if metadata.has_tensor(LONG_FACTORS):
        n = metadata.get_int("rope.dimension_count", config["head_dim"]) // 2
        long, short = (metadata.read_numbers(name, n) for name in (LONG_FACTORS, SHORT_FACTORS))
        rope |= {
            "rope_type": "longrope", "long_factor": long, "short_factor": short, "original_max_position_embeddings": original,
            "attention_factor": metadata.get_float("rope.scaling.attn_factor", 1.0),
        }  # fmt: skip
    return {"original_max_position_embeddings": original}


def read_olmo2(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of OLMo 2 or 3. The file states YaRN's whole factor of cosines and sines, which llama.cpp applies twice."""
    found = read_llama(metadata, config)
    if found["rope_parameters"]["rope_type"] == "yarn" and metadata.has_key("rope.scaling.attn_factor"):
        found["rope_parameters"]["attention_factor"] = metadata.get_float("rope.scaling.attn_factor")
    if metadata.get_int("attention.sliding_window", 0):
        window = read_window(metadata)
        rope = {FULL: found["rope_parameters"], SLIDING: metadata.get_rope(scaled=False)}
        found |= {"model_type": "olmo3", "sliding_window": window, "layer_types": metadata.get_layer_types(4), "rope_parameters": rope}
    return found


def read_exaone4(metadata: GgufMetadata, config: Config) -> Config:
    found = read_llama(metadata, config) | {"sliding_window": None, "layer_types": [FULL] * metadata.n_layers}
    if (has_windows := metadata.n_layers == 64) or metadata.get_int("attention.sliding_window", 0):
        found |= {"sliding_window": read_window(metadata, 4096), "layer_types": metadata.get_layer_types(4)}
    if not has_windows and SLIDING in found["layer_types"]:
        raise metadata.make_refusal("attention.sliding_window", found["sliding_window"], "0, but for 64 layers, as in llama.cpp")
    return found


def read_exaone_moe(metadata: GgufMetadata, config: Config) -> Config:
    experts = read_grouped_experts(metadata, metadata.is_stated("expert_weights_norm", True), SIGMOID)
    n_dense, inner = metadata.get_int("leading_dense_block_count", 0), experts["n_shared_experts"] * experts["moe_intermediate_size"]
    if (shared := metadata.get_int("expert_shared_feed_forward_length", inner)) not in (0, inner):
        raise metadata.make_refusal("expert_shared_feed_forward_length", shared, str(inner))
    return read_llama(metadata, config) | experts | {
        "num_experts": experts.pop("n_routed_experts"), "num_shared_experts": experts.pop("n_shared_experts"),
        "mlp_layer_types": ["dense" if i < n_dense else "sparse" for i in range(metadata.n_layers)],
        "sliding_window": read_window(metadata), "layer_types": metadata.get_layer_types(4),
    }  # fmt: skip


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
    return read_llama(metadata, config) | {"use_bias": metadata.has_attention_bias()}


def read_ernie_moe(metadata: GgufMetadata, config: Config) -> Config:
    experts, width = read_experts(metadata, normalise=True), metadata.get_same("expert_feed_forward_length")
    shared = metadata.get_int("expert_shared_feed_forward_length", 0)
    if width < 1 or shared % width:
        raise metadata.make_refusal("expert_shared_feed_forward_length", shared, f"a multiple of expert_feed_forward_length, {width}")
    return read_ernie(metadata, config) | {
        "moe_num_experts": experts["num_experts"], "moe_k": experts["num_experts_per_tok"], "moe_intermediate_size": width,
        "moe_num_shared_experts": shared // width, "moe_layer_start_index": metadata.get_int("leading_dense_block_count", 0),
        "moe_layer_interval": metadata.get_int("interleave_moe_layer_step", 1), "output_router_logits": False,
    }  # fmt: skip


def read_bailing_moe(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of Ling (1 and 1.5, Coder Lite), which is ERNIE 4.5 MoE's model without corrections of the choice."""
    experts, width = read_experts(metadata, normalise=True), metadata.get_same("expert_feed_forward_length")
    if not metadata.is_stated("expert_weights_norm", True):
        raise metadata.make_refusal("expert_weights_norm", False, "true")
    return read_llama(metadata, config) | {
        "moe_num_experts": experts["num_experts"], "moe_k": experts["num_experts_per_tok"], "moe_intermediate_size": width,
        "moe_num_shared_experts": metadata.get_int("expert_shared_count"), "moe_layer_start_index": 0, "output_router_logits": False,
    }  # fmt: skip


def read_hunyuan_moe(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of Hunyuan's mixture of experts, whose experts and shared expert have the size of an MLP."""
    experts, inner = read_experts(metadata, normalise=True), metadata.get_same("feed_forward_length")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        if (width := metadata.get_same(key, inner)) != inner:
            raise metadata.make_refusal(key, width, str(inner))
    return read_llama(metadata, config) | {
        "num_experts": experts["num_experts"], "moe_topk": experts["num_experts_per_tok"], "output_router_logits": False,
    }  # fmt: skip


def read_minimax_m2(metadata: GgufMetadata, config: Config) -> Config:
    experts, width = read_experts(metadata, normalise=True, scoring=SIGMOID), metadata.get_same("expert_feed_forward_length")
    if (inner := metadata.get_same("feed_forward_length")) != width:
        raise metadata.make_refusal("feed_forward_length", inner, str(width))
    return read_partial(metadata, config) | experts | {
        "intermediate_size": width, "num_local_experts": experts.pop("num_experts"),
    }  # fmt: skip


def read_afmoe(metadata: GgufMetadata, config: Config) -> Config:
    """Read AFMoE's config (Trinity). Its layers without windows have no rotary embedding; llama.cpp has one in four of them, by number."""
    experts = read_grouped_experts(metadata, normalise=True, scoring=SIGMOID)
    if not metadata.is_stated("expert_weights_norm", True):
        raise metadata.make_refusal("expert_weights_norm", False, "true")
    if (n_groups := experts.pop("n_group")) > 1:
        raise metadata.make_refusal("expert_group_count", n_groups, "1")
    types = metadata.get_layer_types(4)
    if types != [FULL if i % 4 == 3 else SLIDING for i in range(metadata.n_layers)]:
        raise metadata.make_refusal("attention.sliding_window_pattern", types, f"{FULL} in every fourth layer")
    return read_llama(metadata, config) | {
        "num_experts": experts["n_routed_experts"], "num_experts_per_tok": experts["num_experts_per_tok"],
        "num_shared_experts": experts["n_shared_experts"], "route_scale": experts["routed_scaling_factor"],
        "moe_intermediate_size": experts["moe_intermediate_size"], "mup_enabled": True, "output_router_logits": False,
        "num_dense_layers": metadata.get_int("leading_dense_block_count", 0), "sliding_window": read_window(metadata),
        "layer_types": types,
    }  # fmt: skip


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
    experts, n_shared = read_experts(metadata, normalise=True), metadata.get_int("expert_shared_feed_forward_length", 0)
    shared = {"model_type": "granitemoeshared", "shared_intermediate_size": n_shared} if n_shared else {}
    return read_granite(metadata, config) | {"num_local_experts": experts.pop("num_experts")} | experts | shared


def read_qwen2moe(metadata: GgufMetadata, config: Config) -> Config:
    """Read Qwen2-MoE's config; older files state the size of the shared expert alone, which is that of the others together."""
    found, experts = read_qwen(metadata, config), read_experts(metadata, normalise=False)
    inner, n_chosen = found["intermediate_size"], experts["num_experts_per_tok"]
    return found | experts | {
        "moe_intermediate_size": metadata.get_int("expert_feed_forward_length", inner // n_chosen),
        "shared_expert_intermediate_size": metadata.get_int("expert_shared_feed_forward_length", inner),
        "qkv_bias": metadata.has_attention_bias(), "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip


def read_qwen3moe(metadata: GgufMetadata, config: Config) -> Config:
    return read_qwen(metadata, config) | read_experts(metadata, normalise=True) | {
        "moe_intermediate_size": metadata.get_int("expert_feed_forward_length"), "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip


def read_mellum(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of Mellum 2. Its layers with windows have their own angles, which are not scaled."""
    found, window = read_qwen3moe(metadata, config), metadata.get_int("attention.sliding_window", 0)
    base = metadata.get_float("rope.freq_base", FREQ_BASE)
    rope = {FULL: found["rope_parameters"], SLIDING: metadata.get_rope("rope.freq_base_swa", scaled=False)}
    if not metadata.has_key("rope.freq_base_swa"):
        rope[SLIDING]["rope_theta"] = base
    return found | {
        "sliding_window": window or None, "layer_types": metadata.get_layer_types(4) if window else [FULL] * metadata.n_layers,
        "rope_parameters": rope,
    }  # fmt: skip


def read_gpt_oss(metadata: GgufMetadata, config: Config) -> Config:
    experts = read_experts(metadata, normalise=True, scoring=SOFTMAX_OF_CHOSEN)
    return read_llama(metadata, config) | {
        "intermediate_size": metadata.get_same("expert_feed_forward_length"),
        "num_local_experts": experts["num_experts"], "num_experts_per_tok": experts["num_experts_per_tok"],
        "sliding_window": read_window(metadata), "layer_types": metadata.get_layer_types(2),
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
    if (factor := metadata.get_float("rope.scaling.attn_factor", 1.0)) != 1:
        raise metadata.make_refusal("rope.scaling.attn_factor", factor, "1")
    return read_gemma(metadata, config) | {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"],
        "sliding_window": window or 1,  # transformers' model makes a mask with it even if no layer has a window
        "layer_types": metadata.get_layer_types(6) if window else [FULL] * metadata.n_layers,
        "rope_parameters": {FULL: metadata.get_rope(), SLIDING: metadata.get_rope("rope.freq_base_swa", scaled=False)},
        "final_logit_softcapping": metadata.get_float("final_logit_softcapping", 0.0) or None,
        "attn_logit_softcapping": None,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }


def read_gemma3n(metadata: GgufMetadata, config: Config) -> Config:
    """Read Gemma 3n's config. Which layers have their own keys, or MLPs of which few numbers stay, is by number, as in llama.cpp."""
    n_own, n_sparse, types = 20, 10, metadata.get_layer_types(5)
    n_shared = metadata.n_layers - n_own
    for key, accepted in (
        ("altup.num_inputs", 4), ("altup.active_idx", 0), ("attention.shared_kv_layers", n_shared), ("final_logit_softcapping", 30),
    ):  # fmt: skip
        if (stated := metadata.get_float(key, accepted)) != accepted:
            raise metadata.make_refusal(key, stated, str(accepted))
    if n_shared < 1 or types[n_own - 2 : n_own] != [SLIDING, FULL]:
        raise metadata.make_refusal(
            "attention.sliding_window_pattern", types, f"{FULL} in layer {n_own}, {SLIDING} before, and layers after"
        )
    sparse = [i < n_sparse for i in range(metadata.n_layers)]
    if (stds := metadata.get_numbers("activation_sparsity_scale")) and [number > 0 for number in stds] != sparse:
        raise metadata.make_refusal("activation_sparsity_scale", stds, f"positive numbers in the first {n_sparse} layers")
    laurel, per_layer = (metadata.file.tensors.get(name) for name in ("blk.0.laurel_l.weight", "per_layer_token_embd.weight"))
    return read_gemma(metadata, config) | {
        "sliding_window": read_window(metadata, same_angles=False), "layer_types": types, "num_kv_shared_layers": n_shared,
        "rope_parameters": {FULL: metadata.get_rope(), SLIDING: metadata.get_rope("rope.freq_base_swa", scaled=False)},
        "activation_sparsity_pattern": [0.95 * each for each in sparse], "laurel_rank": laurel.shape[0] if laurel else 0,
        "hidden_size_per_layer_input": metadata.get_int("embedding_length_per_layer_input", 256),
        "vocab_size_per_layer_input": per_layer.shape[0] if per_layer else 0,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }  # fmt: skip


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
    if (of_global := metadata.get_rope())["rope_type"] != "default":
        raise metadata.make_refusal("rope.scaling.type", of_global["rope_type"], "none")
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
        "layer_types": types, "sliding_window": read_window(metadata, same_angles=False),
        "rope_parameters": {
            FULL: of_global | {"rope_type": "proportional"},
            SLIDING: metadata.get_rope("rope.freq_base_swa", scaled=False),
        },
        "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": metadata.get_float("final_logit_softcapping", 30.0) or None,
        "num_kv_shared_layers": n_shared, "use_double_wide_mlp": doubled,
        "hidden_size_per_layer_input": per_layer, "vocab_size_per_layer_input": config["vocab_size"],
        "enable_moe_block": has_experts, "num_experts": experts.get("num_experts"),
        "top_k_experts": experts.get("num_experts_per_tok"),
        "moe_intermediate_size": metadata.get_same("expert_feed_forward_length") if has_experts else None,
    }  # fmt: skip


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


def read_apertus(metadata: GgufMetadata, config: Config) -> Config:
    return read_llama(metadata, config) | {"hidden_act": "xielu", "dtype": "float32"}

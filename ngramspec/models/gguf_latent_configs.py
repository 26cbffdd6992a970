"""Make the configs of models with latent attention of the metadata of GGUF files: as `gguf_configs` for those without."""

from __future__ import annotations

import numpy as np

from ngramspec.models.gguf_configs import read_long_rope
from ngramspec.models.gguf_expert_keys import SIGMOID, SOFTMAX, Config, read_grouped_experts
from ngramspec.models.gguf_metadata import GgufMetadata


def _read_latent(metadata: GgufMetadata, config: Config) -> Config:
    """Read the sizes of latent attention. Older files have those of whole heads, newer ones beside those of rows that are kept."""
    end = "_mla" if metadata.has_key("attention.key_length_mla") else ""
    turned, n_heads = metadata.get_int("rope.dimension_count"), config["num_attention_heads"]
    key, value = (metadata.get_int(f"attention.{name}_length{end}", config["hidden_size"] // n_heads) for name in ("key", "value"))
    if not 0 < turned < key:
        raise metadata.make_refusal("rope.dimension_count", turned, f"1 to {key - 1}")
    if (kv := metadata.get_same("attention.head_count_kv", 1)) not in (1, n_heads):
        raise metadata.make_refusal("attention.head_count_kv", kv, f"1 or {n_heads}")
    rope = metadata.get_rope()
    if rope["rope_type"] not in ("default", "yarn"):
        raise metadata.make_refusal("rope.scaling.type", rope["rope_type"], "none, yarn")
    if (factor := metadata.get_float("rope.scaling.attn_factor", 1.0)) != 1:
        raise metadata.make_refusal("rope.scaling.attn_factor", factor, "1")
    if rope["rope_type"] == "yarn" and (multiplier := metadata.get_float("rope.scaling.yarn_log_multiplier", 0.0)):
        # Files state a tenth of DeepSeek's mscale_all_dim, and mscale is the same.
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * multiplier) | {"attention_factor": 1.0}
    return {
        "kv_lora_rank": metadata.get_int("attention.kv_lora_rank"), "q_lora_rank": metadata.get_int("attention.q_lora_rank", 0) or None,
        "qk_nope_head_dim": key - turned, "qk_rope_head_dim": turned, "v_head_dim": value, "head_dim": turned,
        "num_key_value_heads": n_heads, "rope_parameters": rope, "rope_interleave": True, "attention_bias": False,
        "intermediate_size": metadata.get_same("feed_forward_length"),
        "first_k_dense_replace": metadata.get_int("leading_dense_block_count", 0),
    }  # fmt: skip


def read_deepseek2(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of a model with latent attention, of which Mistral Small 4 alone scales queries by their position."""
    found = _read_deepseek2(metadata, config)
    if (scale := metadata.get_float("attention.temperature_scale", 0.0)) and found["model_type"] != "mistral4":
        raise metadata.make_refusal("attention.temperature_scale", scale, "0 for this choice of experts")
    return found


def _read_deepseek2(metadata: GgufMetadata, config: Config) -> Config:
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


def _read_mistral4(metadata: GgufMetadata, found: Config) -> Config:
    """Read what Mistral Small 4 has besides: queries that are scaled by their position."""
    rope, scale = found["rope_parameters"], metadata.get_float("attention.temperature_scale", 0.0)
    length = rope.get("original_max_position_embeddings", metadata.get_int("context_length"))
    multiplier = metadata.get_float("rope.scaling.yarn_log_multiplier", 0.0)
    if metadata.file.architecture == "mistral4" and rope["rope_type"] == "yarn" and np.float32(multiplier) != np.float32(0.1):
        raise metadata.make_refusal("rope.scaling.yarn_log_multiplier", multiplier, "0.1")
    if scale and (stated := metadata.get_int("attention.temperature_length", length)) != length:
        raise metadata.make_refusal("attention.temperature_length", stated, str(length))
    rope |= {"llama_4_scaling_beta": scale, "original_max_position_embeddings": length}
    return {"model_type": "mistral4", "head_dim": found["qk_nope_head_dim"] + found["qk_rope_head_dim"]}


def read_minicpm3(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of MiniCPM 3. Its multipliers are those of the 4B model, as in llama.cpp: no file states them."""
    found = _read_latent(metadata, config)
    if (kind := found["rope_parameters"]["rope_type"]) != "default":
        raise metadata.make_refusal("rope.scaling.type", kind, "none, longrope")
    if not found["q_lora_rank"]:
        raise metadata.make_refusal("attention.q_lora_rank", 0, "1 and more")
    for name in ("rope_interleave", "first_k_dense_replace"):
        del found[name]
    found |= read_long_rope(metadata, config, found["rope_parameters"])
    return found | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}

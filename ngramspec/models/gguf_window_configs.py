"""Make the configs of transformers' models of the metadata of GGUF files whose layers with windows have other heads or angles than others.

See `gguf_configs`, whose functions for other parts of a config are used.
"""

from __future__ import annotations

from ngramspec.models.gguf_configs import read_common
from ngramspec.models.gguf_expert_keys import SIGMOID, Config, read_experts
from ngramspec.models.gguf_metadata import FREQ_BASE, FULL, SLIDING, GgufMetadata


def read_mimo2(metadata: GgufMetadata, config: Config) -> Config:
    """Read MiMo-V2-Flash's config. Layers with windows have twice as many heads of keys; values are smaller than keys."""
    experts, head_dim = read_experts(metadata, normalise=True, scoring=SIGMOID), config["head_dim"]
    types, kv = metadata.get_layer_types(0), metadata.get_per_layer("attention.head_count_kv")
    n_kv = {n // (1 + (kind == SLIDING)) for n, kind in zip(kv, types, strict=True)}
    if len(n_kv) != 1 or any(n % 2 for n, kind in zip(kv, types, strict=True) if kind == SLIDING):
        raise metadata.make_refusal("attention.head_count_kv", kv, "twice as many for layers with windows")
    rope = {FULL: metadata.get_rope(), SLIDING: metadata.get_rope("rope.freq_base_swa")}
    for angles in rope.values():
        angles["partial_rotary_factor"] = metadata.get_turned_share(head_dim)
    return {
        "num_key_value_heads": n_kv.pop(), "v_head_dim": metadata.get_int("attention.value_length", head_dim),
        "sliding_window": metadata.get_int("attention.sliding_window"), "layer_types": types, "rope_parameters": rope,
        "intermediate_size": metadata.get_same("feed_forward_length"), "n_routed_experts": experts.pop("num_experts"), **experts,
        "moe_intermediate_size": metadata.get_int("expert_feed_forward_length"),
        "mlp_layer_types": [
            "sparse" if metadata.has_tensor(f"blk.{i}.ffn_gate_inp.weight") else "dense" for i in range(metadata.n_layers)
        ],
        "attention_value_scale": metadata.get_float("attention.value_scale", 1.0), "attention_bias": metadata.has_attention_bias(),
    }  # fmt: skip


def read_laguna(metadata: GgufMetadata, config: Config) -> Config:
    """Read Laguna's config. Heads of queries differ by layer; gates have one number for each head or for each of its numbers, as the
    tensor's size shows."""
    experts = read_experts(metadata, normalise=True, scoring=SIGMOID, scaled=True)
    if not metadata.is_stated("expert_weights_norm", True):
        raise metadata.make_refusal("expert_weights_norm", False, "true")
    heads, head_dim = metadata.get_per_layer("attention.head_count"), config["head_dim"]
    n_dense = metadata.get_int("leading_dense_block_count", 0)
    rope = {FULL: metadata.get_rope(), SLIDING: metadata.get_rope("rope.freq_base_swa", scaled=False)}
    if not metadata.has_key("rope.freq_base_swa"):
        rope[SLIDING]["rope_theta"] = metadata.get_float("rope.freq_base", FREQ_BASE)
    for kind, key in ((FULL, "rope.dimension_count"), (SLIDING, "rope.dimension_count_swa")):
        rope[kind]["partial_rotary_factor"] = metadata.get_turned_share(head_dim, key)
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        if (n := metadata.get_int(key, head_dim)) != head_dim:
            raise metadata.make_refusal(key, n, str(head_dim))
    gate, window = metadata.file.tensors.get("blk.0.attn_gate.weight"), metadata.get_int("attention.sliding_window", 0)
    types = metadata.get_layer_types(4, full_first=True) if window else [FULL] * metadata.n_layers
    return read_common(metadata, config) | experts | {
        "num_attention_heads_per_layer": heads, "gating": "per-head" if gate and gate.shape[0] == heads[0] else "per-element",
        "sliding_window": window or 1, "layer_types": types,
        "rope_parameters": rope, "moe_intermediate_size": metadata.get_int("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.get_int("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": metadata.get_float("expert_weights_scale", 0.0) or 1.0,
        "mlp_layer_types": ["dense" if i < n_dense else "sparse" for i in range(metadata.n_layers)],
    }  # fmt: skip

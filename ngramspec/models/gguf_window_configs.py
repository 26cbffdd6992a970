"""Make the configs of transformers' models of the metadata of GGUF files whose layers with windows have other heads or angles than others.

See `gguf_configs`, whose functions for other parts of a config are used.
"""

from __future__ import annotations

from ngramspec.models.gguf_configs import read_common
from ngramspec.models.gguf_expert_keys import SIGMOID, Config, read_experts
from ngramspec.models.gguf_metadata import FREQ_BASE, FULL, SLIDING, GgufMetadata


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

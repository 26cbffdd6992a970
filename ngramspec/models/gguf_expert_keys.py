"""Read from a GGUF file's metadata how the router of a mixture of experts chooses, whatever the architecture."""

from __future__ import annotations

from typing import Any

from ngramspec.models.gguf_metadata import GgufMetadata

Config = dict[str, Any]  # of transformers' model, or a part of it
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # llama.cpp's numbers of what makes the weights of experts from their logits


def read_experts(metadata: GgufMetadata, normalise: bool, scoring: int = SOFTMAX, *, scaled: bool = False, grouped: bool = False) -> Config:
    """Read how experts are chosen, and check that it is what the architecture's model computes; `scaled`: their weights may be, `grouped`:
    some groups of them may be chosen first.
    """
    n, chosen = metadata.get_int("expert_count"), metadata.get_int("expert_used_count")
    if not 0 < chosen <= n:
        raise metadata.make_refusal("expert_used_count", chosen, f"1 to {n}")
    for key, value in (("expert_gating_func", scoring), *((("expert_group_count", 1),) if not grouped else ())):
        if (stated := metadata.get_int(key, value)) not in (0, value):
            raise metadata.make_refusal(key, stated, str(value))
    if (scale := metadata.get_float("expert_weights_scale", 1.0)) not in (0.0, 1.0) and not scaled:
        raise metadata.make_refusal("expert_weights_scale", scale, "1")
    if metadata.is_stated("expert_weights_norm", not normalise):
        raise metadata.make_refusal("expert_weights_norm", not normalise, str(normalise).lower())
    return {"num_experts": n, "num_experts_per_tok": chosen, "norm_topk_prob": normalise, "output_router_logits": False}


def read_grouped_experts(metadata: GgufMetadata, normalise: bool, scoring: int) -> Config:
    """Read how experts are chosen where groups of them may be chosen first, and others are always used."""
    experts = read_experts(metadata, normalise, scoring, scaled=True, grouped=True)
    n_groups, top_groups = (max(1, metadata.get_int(f"expert_group{key}_count", 1)) for key in ("", "_used"))
    n_experts = experts.pop("num_experts")
    if n_experts % n_groups or not 0 < top_groups <= n_groups or top_groups * (n_experts // n_groups) < experts["num_experts_per_tok"]:
        raise metadata.make_refusal("expert_group_count", n_groups, f"a divisor of expert_count, {n_experts}, with enough experts")
    return experts | {
        "n_routed_experts": n_experts, "n_shared_experts": metadata.get_int("expert_shared_count"), "n_group": n_groups,
        "topk_group": top_groups, "moe_intermediate_size": metadata.get_same("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.get_float("expert_weights_scale", 0.0) or 1.0,
    }  # fmt: skip

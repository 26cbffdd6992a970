"""Read layers with latent attention off transformers' modules that are bound to packed weights, for `weight_map_reader`.

Knows names and attributes of these modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ngramspec.backends.cpu.fused_ops import RMSNorm
from ngramspec.backends.cpu.layer_weight_map import ExpertsMap, LatentNames, LayerWeightMap, MatrixName
from ngramspec.backends.cpu.linear import CpuPackedLinear
from ngramspec.backends.cpu.llama_layers import LatentOptions
from ngramspec.models.latent_weights import BOTH, KEYS, VALUES


def read_latent_options(attention: Any) -> LatentOptions | None:
    """Return the options of latent attention; None if its norms are of another kind."""
    norms = [norm for name in ("q_a_layernorm", "kv_a_layernorm") if (norm := getattr(attention, name, None)) is not None]
    if not all(isinstance(norm, RMSNorm) and not norm.offset for norm in norms) or len({norm.eps for norm in norms}) != 1:
        return None
    sizes = attention.kv_lora_rank, attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    return LatentOptions(*sizes, attention.q_lora_rank or 0, float(norms[0].eps))


def map_latent_layer(
    layer: Any, path: str, names: Callable[[str], MatrixName], inside: list[MatrixName] | None, experts: ExpertsMap | None,
    norms: tuple[Any, Any], rotary: int,
) -> LayerWeightMap | None:  # fmt: skip
    """Return the map of a layer with latent attention at a path; None for one of another form.

    `inside`: the matrices of its MLP, or of its shared expert; `norms`: the names of its norms before attention and MLP, and after them.
    """
    attention, at = layer.self_attn, f"{path}.self_attn"
    of_queries, of_norms = ["q_proj"], ["kv_a_layernorm"]
    if attention.q_lora_rank:
        of_queries, of_norms = ["q_a_proj", "q_b_proj"], ["q_a_layernorm", *of_norms]
    linear = (*of_queries, "kv_a_proj_with_mqa", "o_proj")
    if inside is None or norms[0] is None or norms[1] or getattr(attention, "sliding_window", None):
        return None
    if not all(isinstance(getattr(attention, name, None), CpuPackedLinear) for name in linear):
        return None
    if {name for name, _ in attention.named_children()} != {*linear, *of_norms, BOTH}:
        return None
    latent = LatentNames(
        names(f"{at}.q_b_proj") if attention.q_lora_rank else None, f"{at}.{KEYS}.weight",
        f"{at}.q_a_layernorm.weight" if attention.q_lora_rank else None, f"{at}.kv_a_layernorm.weight",
    )  # fmt: skip
    mixer = [*(names(f"{at}.{name}") for name in (of_queries[0], "kv_a_proj_with_mqa")), MatrixName(f"{at}.{VALUES}.weight")]
    return LayerWeightMap(
        matrices=[*mixer, names(f"{at}.o_proj"), *inside], norms=[names(f"{path}.{name}")[0] for name in norms[0]], head_norms=None,
        window=0, rotary=rotary, experts=experts, latent=latent,
    )  # fmt: skip

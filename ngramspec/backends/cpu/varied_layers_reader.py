"""Read the layers of a model whose heads differ by layer (Gemma 4) off transformers' modules, for `weight_map_reader`.

The module knows names and attributes of transformers' decoder layers; what they do with them is compared by the runner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu import fused_ops
from ngramspec.backends.cpu.experts_modules import PackedExperts
from ngramspec.backends.cpu.formats import DEPTH
from ngramspec.backends.cpu.layer_weight_map import EndNames, ExpertsMap, InputNames, LayerWeightMap, NameModule
from ngramspec.backends.cpu.linear import CpuPackedEmbedding, CpuPackedLinear, SharedLinear
from ngramspec.backends.cpu.llama_layers import LayerHeads
from ngramspec.backends.cpu.weight_map import Rotary
from ngramspec.models.reference import find_needed_layers
from ngramspec.models.tensor_source import TensorSource

_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_INPUT = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_EXPERT_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2", "post_feedforward_layernorm_1")
_PARAMETERS = {"router.scale", "router.per_expert_scale"}  # of a layer that are not in modules replaced by ours


def has_varied_heads(layer: nn.Module) -> bool:
    """Return whether values are normed, as in models whose heads differ by layer."""
    return hasattr(getattr(layer, "self_attn", None), "v_norm")


def map_varied_layers(
    model: PreTrainedModel, name_matrix: NameModule, source: TensorSource, shapes: Sequence[tuple[int, int]], rotaries: Mapping[str, Rotary]
) -> list[LayerWeightMap | None]:
    """Return the maps of all layers, None for one of another kind. `shapes`: (n_kv_heads, head_dim) of the keys that each layer uses."""
    base: Any = model.base_model
    path = next(path for path, module in model.named_modules() if module is base.layers)
    found = []
    for i, (layer, shape) in enumerate(zip(base.layers, shapes, strict=True)):
        kind = layer.self_attn.layer_type
        owner, *_ = find_needed_layers(model, i)
        heads = LayerHeads(*shape, rotaries[kind].n_pairs, -1 if owner == i else owner, "v_proj" in dict(layer.self_attn.named_children()))
        found.append(_map_layer(layer, f"{path}.{i}", name_matrix, source, heads, list(rotaries).index(kind)))
    return found


def _map_layer(
    layer: Any, path: str, name_matrix: NameModule, source: TensorSource, heads: LayerHeads, rotary: int
) -> LayerWeightMap | None:
    parts, attn = dict(layer.named_children()), dict(layer.self_attn.named_children())
    projections = [f"{name}_proj" for name in "qkv"[: heads.n_projections]]
    head_norms = ["q_norm", "k_norm" if heads.owner < 0 else "q_norm"]
    wanted = {*projections, *head_norms, "o_proj"} | ({"v_norm"} if heads.owner < 0 else set())
    linear = (CpuPackedLinear, SharedLinear)
    if attn.keys() != wanted or not all(isinstance(attn[name], linear) for name in (*projections, "o_proj")):
        return None
    if attn["o_proj"].in_features % DEPTH or (heads.owner < 0 and getattr(attn["v_norm"], "with_scale", True)):
        return None
    has_input, has_experts = (name in parts for name in (_INPUT[0], "router"))
    of_rows = [*_NORMS, *_POST_NORMS, *(_INPUT[-1:] if has_input else ()), *(_EXPERT_NORMS if has_experts else ())]
    others = {"self_attn", "mlp", *(("act_fn", *_INPUT[:-1]) if has_input else ()), *(("router", "experts") if has_experts else ())}
    if parts.keys() != {*of_rows, *others} or not isinstance(parts["mlp"], fused_ops.GatedMLP) or (has_input and has_experts):
        return None
    if parts["mlp"].down.in_features % DEPTH:
        return None
    if not all(isinstance(parts[name], fused_ops.RMSNorm) and not parts[name].offset for name in of_rows):
        return None
    if {name for name, _ in layer.named_parameters()} - _PARAMETERS:
        return None
    experts = _map_experts(layer, path) if has_experts else None
    if has_experts and experts is None:
        return None
    scale, weights = f"{path}.layer_scalar", {name: f"{path}.{name}.weight" for name in (*of_rows, *_INPUT)}
    end = EndNames(scale if scale in source else None)
    if has_input:
        end = end._replace(gate=weights[_INPUT[0]], projection=weights[_INPUT[1]], norm=weights[_INPUT[2]])
    if has_experts:
        norms = (weights[name] for name in _EXPERT_NORMS)
        end = end._replace(experts=(f"{path}.router.scale", *norms, f"{path}.router.per_expert_scale"))
    inside = [f"self_attn.{name}" for name in (*projections, "o_proj")] + [f"mlp.{name}" for name in parts["mlp"].names]
    return LayerWeightMap(
        matrices=[name_matrix(f"{path}.{name}") for name in inside], norms=[weights[name] for name in _NORMS],
        head_norms=[name_matrix(f"{path}.self_attn.{name}")[0] for name in head_norms],
        window=layer.self_attn.sliding_window or 0, rotary=rotary, experts=experts,
        post_norms=[weights[name] for name in _POST_NORMS], heads=heads, end=end,
    )  # fmt: skip


def _map_experts(layer: Any, path: str) -> ExpertsMap | None:
    """Return the map of experts beside an MLP, whose router norms what it sees and scales the experts' weights; None for others."""
    router, experts = layer.router, layer.experts
    if not isinstance(experts, PackedExperts) or dict(router.named_children()).keys() != {"norm", "proj"}:
        return None
    if getattr(router.norm, "with_scale", True) or not isinstance(router.proj, CpuPackedLinear):
        return None
    return ExpertsMap(
        weights=experts.weights, router=(f"{path}.router.proj.weight", None), top_k=int(router.config.top_k_experts), scoring=moe.SOFTMAX,
        normalise=True, scale=1.0, activation=experts.experts.activation,
    )  # fmt: skip


def read_inputs(model: PreTrainedModel, name_matrix: NameModule) -> InputNames | None:
    """Return the names of what makes tokens' inputs to layers; None if there is nothing of the kind."""
    base: Any = model.base_model
    table, projection, norm = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
    if not isinstance(getattr(base, table, None), CpuPackedEmbedding):
        return None
    path = next(path for path, module in model.named_modules() if module is base)
    factors = base.embed_tokens_per_layer.scale, base.per_layer_model_projection_scale, base.per_layer_input_scale
    table, projection, norm = (name_matrix(f"{path}.{name}")[0] for name in (table, projection, norm))
    return InputNames(table, projection, norm, (float(factors[0]), float(factors[1]), float(factors[2])))

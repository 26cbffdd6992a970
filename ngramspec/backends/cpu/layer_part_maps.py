"""Map parts of layers other than plain attention and MLPs for `weight_map_reader`: experts, latent attention, Mamba-2.

Modules of transformers that are bound to packed weights enter; options and names of weights leave. Knows names and attributes of these
modules. What a forward does is assumed from the names of its parts; the runner compares the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu import fused_ops
from ngramspec.backends.cpu.experts_modules import PackedExperts, PackedRouter
from ngramspec.backends.cpu.layer_weight_map import ExpertsMap, LatentNames, LayerWeightMap, MambaNames, MatrixName, NameModule, divide_rows
from ngramspec.backends.cpu.linear import CpuPackedLinear
from ngramspec.backends.cpu.llama_layers import LatentOptions, MambaOptions
from ngramspec.models.expert_routing import CORRECTION
from ngramspec.models.latent_weights import BOTH, KEYS, VALUES

SHARED_EXPERTS = "shared_experts"  # an MLP that every row has, without a gate
BESIDE_EXPERTS = "shared_mlp"  # an MLP that every row has, and that may be the only one
_CORRECTIONS = ("expert_bias", CORRECTION)  # names of what a block adds to its router's scores for the choice alone


# ------------------------------------------------------------------ experts


def map_experts(block: nn.Module, path: str, name_matrix: NameModule) -> ExpertsMap | None:
    """Map a router and experts at a path, and what a shared expert needs besides its MLP; None for another kind of module."""
    parts = {name: child for name, child in block.named_children() if not isinstance(child, nn.Identity)}
    beside = next((each for name in (SHARED_EXPERTS, BESIDE_EXPERTS) if (each := parts.pop(name, None)) is not None), None)
    experts, router_name = parts.pop("experts", None), next((name for name in ("gate", "router") if name in parts), "")
    router, shared, shared_gate = parts.pop(router_name, None), parts.pop("shared_expert", None), parts.pop("shared_expert_gate", None)
    if parts or not isinstance(experts, PackedExperts) or not isinstance(router, PackedRouter):
        return None
    if shared is not None and not (isinstance(shared, fused_ops.GatedMLP) and isinstance(shared_gate, CpuPackedLinear)):
        return None
    correction = next((f"{path}.{name}" for name in _CORRECTIONS if isinstance(getattr(block, name, None), torch.Tensor)), None)
    if router.parts.correction:
        correction = f"{path}.{router_name}.{router.parts.correction}"
    return ExpertsMap(
        weights=experts.weights, router=(f"{path}.{router_name}.{router.parts.weight}", name_matrix(f"{path}.{router_name}").bias),
        top_k=int(router.options[moe.TOP_K]), scoring=int(router.options[moe.SCORING]), scale=router.scale,
        normalise=bool(router.options[moe.NORMALISE]),
        shared=moe.SHARED_FULLY if beside is not None else moe.SHARED_BY_GATE if shared is not None else moe.NO_SHARED,
        shared_gate=f"{path}.shared_expert_gate.weight" if shared is not None else None, activation=experts.experts.activation,
        correction=correction, groups=moe.ExpertGroups(*router.options[moe.N_GROUPS :].tolist()),
    )  # fmt: skip


# ------------------------------------------------------------------ latent attention


def read_latent_options(attention: Any) -> LatentOptions | None:
    """Return the options of latent attention; None if its norms are of another kind."""
    norms = [norm for name in ("q_a_layernorm", "kv_a_layernorm") if (norm := getattr(attention, name, None)) is not None]
    if not all(isinstance(norm, fused_ops.RMSNorm) and not norm.offset for norm in norms) or len({norm.eps for norm in norms}) != 1:
        return None
    sizes = attention.kv_lora_rank, attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
    return LatentOptions(*sizes, attention.q_lora_rank or 0, float(norms[0].eps))


def map_latent_layer(
    layer: Any, path: str, name_matrix: NameModule, inside: list[MatrixName] | None, experts: ExpertsMap | None,
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
        name_matrix(f"{at}.q_b_proj") if attention.q_lora_rank else None, f"{at}.{KEYS}.weight",
        f"{at}.q_a_layernorm.weight" if attention.q_lora_rank else None, f"{at}.kv_a_layernorm.weight",
    )  # fmt: skip
    mixer = [*(name_matrix(f"{at}.{name}") for name in (of_queries[0], "kv_a_proj_with_mqa")), MatrixName(f"{at}.{VALUES}.weight")]
    return LayerWeightMap(
        matrices=[*mixer, name_matrix(f"{at}.o_proj"), *inside], norms=[name_matrix(f"{path}.{name}")[0] for name in norms[0]],
        head_norms=None, window=0, rotary=rotary, experts=experts, latent=latent,
    )  # fmt: skip


# ------------------------------------------------------------------ Mamba-2


def read_mamba_options(mixer: Any) -> MambaOptions | None:
    """Return the options of a layer with Mamba-2; None for another kind of recurrence."""
    if not is_mamba(mixer) or mixer.activation not in ("silu", "swish"):
        return None
    sizes = mixer.num_heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size, mixer.conv_kernel_size
    least, most = mixer.time_step_limit
    n_inner, normed = mixer.num_heads * mixer.head_dim, not isinstance(mixer.norm, nn.Identity)
    if normed and getattr(mixer.norm, "group_size", n_inner // getattr(mixer.norm, "n_groups", 1)) * mixer.n_groups != n_inner:
        return None
    if normed and getattr(mixer.norm, "norm_before_gate", False):
        return None
    factors = [1.0] * 5
    if (vector := getattr(mixer, "mup_vector", None)) is not None:  # Falcon-H1's
        n = mixer.n_groups * mixer.ssm_state_size
        factors = [float(vector.flatten()[at]) * mixer.ssm_in_multiplier for at in (0, n_inner, 2 * n_inner, 2 * n_inner + n, -1)]
    return MambaOptions(*sizes, float(least), float(most), normed, *factors)


def map_mamba(mixer: Any, at: str, name_matrix: NameModule) -> list[MatrixName] | None:
    """Return the names of the matrices of Mamba-2 at a path; None for another recurrence, or if one does not begin with a panel."""
    options, inputs, output = read_mamba_options(mixer), getattr(mixer, "in_proj", None), getattr(mixer, "out_proj", None)
    if options is None or not isinstance(inputs, CpuPackedLinear) or not isinstance(output, CpuPackedLinear):
        return None
    sizes = options.n_inner, options.n_channels, options.n_heads
    if inputs.out_features != sum(sizes) or (divided := divide_rows(name_matrix(f"{at}.in_proj"), sizes)) is None:
        return None
    return [*divided, name_matrix(f"{at}.out_proj")]


def name_mamba(at: str, name_matrix: NameModule, mixer: Any) -> MambaNames:
    conv, norm = name_matrix(f"{at}.conv1d"), None if isinstance(mixer.norm, nn.Identity) else f"{at}.norm.weight"
    return MambaNames(conv[0], conv[1], f"{at}.A_log", f"{at}.dt_bias", f"{at}.D", norm)


def is_mamba(mixer: Any) -> bool:
    return type(mixer).__name__.endswith(("MambaLayer", "Mamba2Mixer", "BambaMixer", "FalconH1Mixer"))


def get_score_scale(layer: Any, attn: Any) -> float:
    """Return the factor of queries times keys, those of Falcon-H1's layers among them."""
    factor = float(getattr(layer, "attention_in_multiplier", 1.0))
    return float(attn.scaling) * float(getattr(attn, "key_multiplier", 1.0)) * factor * factor


def adds_plainly(layer: Any, matrices: Sequence[MatrixName]) -> bool:
    """Return whether no bias lacks a factor: inputs of attention and of Mamba-2 beside it, and what attention adds, may have one."""
    inside = float(getattr(layer.mamba, "ssm_in_multiplier", 1.0))
    plain = inside == float(getattr(layer, "attention_in_multiplier", 1.0)) == float(getattr(layer, "attn_out_multiplier", 1.0)) == 1
    return plain or not any(matrix.bias for matrix in matrices)


def read_beside_scales(layer: Any) -> tuple[float, float]:
    """Return the factors of what attention and Mamba-2 beside it add, as Falcon-H1's layers have them."""
    given, of_attention, of_mamba = (float(getattr(layer, f"{name}_multiplier", 1.0)) for name in ("attention_in", "attn_out", "ssm_out"))
    return given * of_attention, of_mamba

"""Read a router with its experts off transformers' modules that are bound to packed weights, for `weight_map_reader`.

Knows names and attributes of these modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu import fused_ops
from ngramspec.backends.cpu.experts_modules import PackedExperts, PackedRouter
from ngramspec.backends.cpu.layer_weight_map import ExpertsMap, MatrixName
from ngramspec.backends.cpu.linear import CpuPackedLinear
from ngramspec.models.expert_routing import CORRECTION

SHARED_EXPERTS = "shared_experts"  # an MLP that every row has, without a gate
BESIDE_EXPERTS = "shared_mlp"  # an MLP that every row has, and that may be the only one
_CORRECTIONS = ("expert_bias", CORRECTION)  # names of what a block adds to its router's scores for the choice alone


def map_experts(block: nn.Module, path: str, names: Callable[[str], MatrixName]) -> ExpertsMap | None:
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
        weights=experts.weights, router=(f"{path}.{router_name}.{router.parts.weight}", names(f"{path}.{router_name}").bias),
        top_k=int(router.options[moe.TOP_K]), scoring=int(router.options[moe.SCORING]), scale=router.scale,
        normalise=bool(router.options[moe.NORMALISE]),
        shared=moe.SHARED_FULLY if beside is not None else moe.SHARED_BY_GATE if shared is not None else moe.NO_SHARED,
        shared_gate=f"{path}.shared_expert_gate.weight" if shared is not None else None, activation=experts.experts.activation,
        correction=correction, groups=moe.ExpertGroups(*router.options[moe.N_GROUPS :].tolist()),
    )  # fmt: skip

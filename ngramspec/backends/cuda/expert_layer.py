"""Take a mixture of experts from transformers' modules, and run it within a pass.

Knows modules and products; `expert_kernels` computes. What a router and experts compute is found by trying (`models.expert_routing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ngramspec.backends.cuda import layers
from ngramspec.backends.cuda.expert_kernels import PairProduct, activate_clamped, choose, sort_pairs, sum_experts
from ngramspec.backends.cuda.packed_experts import PackedExpertWeight
from ngramspec.backends.cuda.row_invariant_linear import LinearProduct
from ngramspec.errors import UnsupportedModelError
from ngramspec.models.expert_routing import RouterOptions, find_activation, find_router_options, locate_router_parts

# Makes the product of pairs with experts' weights [E, N, K] and biases [E, N] or None. Raises UnsupportedModelError.
MakePairProduct = Callable[[torch.Tensor | PackedExpertWeight, torch.Tensor | None], PairProduct]

MOST_PAIRS = 1 << 15  # Pairs of one launch of an activation: a grid's second dimension ends at 65,535.

_HELD = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")  # names of experts' weights and biases
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu_tanh"}  # of gated experts, by their names here and in `layers`


class SharedExpert(Protocol):
    """An MLP without bias that every row has: rows [R, H] to sums [P, R, H] float32."""

    def compute_partials(self, x: torch.Tensor) -> torch.Tensor: ...


class UsedRows(NamedTuple):
    """Which rows of a pass only fill up a bucket: those that write to slot `unused` or after it."""

    slots: torch.Tensor  # [R] int32
    unused: int


def holds_experts(module: nn.Module) -> bool:
    """Return whether a module holds the weights of experts, whatever it computes."""
    names = ("gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj", "down_proj")
    held = [getattr(module, name, None) for name in names]
    return all(isinstance(each, PackedExpertWeight) or (isinstance(each, torch.Tensor) and each.dim() == 3) for each in held)


def read_router(router: nn.Module) -> RouterOptions:
    """Return how a router chooses. Raises UnsupportedModelError if it computes something else."""
    if (options := find_router_options(router)) is None:
        raise UnsupportedModelError(f"{type(router).__name__} chooses experts in another way")
    return options


def read_correction(router: nn.Module) -> torch.Tensor | None:
    """Return what a router adds to scores for the choice alone, [E] float32; None: nothing."""
    parts = locate_router_parts(router)
    if parts is None or parts.correction is None:
        return None
    tensors = dict(router.named_parameters()) | dict(router.named_buffers())
    return tensors[parts.correction].detach().float().flatten().contiguous()


class ChosenExperts:
    """The experts of a layer, without their router."""

    def __init__(self, module: nn.Module, make: MakePairProduct) -> None:
        """Take over the weights; transposed ones become views of ours. Raises UnsupportedModelError for experts of another kind."""
        name, held = type(module).__name__, dict[str, Any]((each, getattr(module, each, None)) for each in _HELD)
        try:
            self.activation = find_activation(module)
        except (LookupError, RuntimeError) as error:
            raise UnsupportedModelError(f"{name}: {error}") from error
        takes_turns = not getattr(module, "is_concatenated", True)
        if isinstance(self.activation, str) and (self.activation not in _ACTIVATIONS or takes_turns):
            raise UnsupportedModelError(f"{name}: activation {self.activation!r} on CUDA")
        if not isinstance(self.activation, str) and not takes_turns:
            raise UnsupportedModelError(f"{name}: gates and ups that are clamped and do not take turns")
        if getattr(module, "has_post_expert_norm", False):
            raise UnsupportedModelError(f"{name}: a norm after each expert")
        if getattr(module, "is_transposed", False):
            for each in ("gate_up_proj", "down_proj"):
                held[each].data = held[each].data.transpose(1, 2).contiguous().transpose(1, 2)
        weights: list[Any] = [held[each] for each in ("gate_up_proj", "down_proj")]
        weights = [weight.detach() if isinstance(weight, torch.Tensor) else weight for weight in weights]
        if getattr(module, "is_transposed", False):
            weights = [weight.transpose(1, 2) for weight in weights]
        biases = [held.get(f"{each}_bias") for each in ("gate_up_proj", "down_proj")]
        gate_up, down = (make(weight, None if bias is None else bias.detach()) for weight, bias in zip(weights, biases, strict=True))
        self.gate_up, self.down, self.n_experts = gate_up, down, gate_up.n_experts

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Compute x [R, H] to [R, H] in `dtype`. `ids` [R, top_k] int32, `weights`, `shared`: as in `sum_experts`."""
        pairs = sort_pairs(ids, self.n_experts)
        both = self.gate_up(x, pairs, of_rows=True, dtype=x.dtype)
        middle = torch.empty(len(both), both.shape[1] // 2, dtype=x.dtype, device=x.device)
        for first in range(0, len(both), MOST_PAIRS):
            here = slice(first, first + MOST_PAIRS)
            if isinstance(self.activation, str):
                layers.compute_gated_activation(both[None, here], None, middle[here], _ACTIVATIONS[self.activation])
            else:
                activate_clamped(both[here], middle[here], *self.activation)
        added = self.down(middle, pairs, of_rows=False, dtype=torch.float32)
        return sum_experts(added, ids, weights, self.n_experts, shared, dtype)


class ExpertLayer:
    """A router with its experts, and the shared expert if there is one, in place of an MLP. It has no bias of its own."""

    bias = None

    def __init__(
        self, options: RouterOptions, router: LinearProduct, correction: torch.Tensor | None, experts: ChosenExperts,
        shared: SharedExpert | None,
    ) -> None:  # fmt: skip
        """Join the parts. `router`: product with E outputs, or one more if the last is the gate of the shared expert."""
        self.options, self.router, self.correction, self.experts, self.shared = options, router, correction, experts, shared

    def compute_partials(self, x: torch.Tensor, used: UsedRows) -> torch.Tensor:
        """Compute x [R, H] to [1, R, H] float32, not rounded. Rows that only fill up a bucket read no experts."""
        ids, weights = choose(self.router.compute_partials(x), self.router.bias, self.correction, self.options, *used)
        shared = None if self.shared is None else self.shared.compute_partials(x)
        return self.experts.run(x, ids, weights, shared, torch.float32)[None]


class RouterModule(nn.Module):
    """A router that replaces a module of transformers: rows [T, H] to logits [T, E], weights [T, top_k] float32 and experts [T, top_k]."""

    def __init__(self, options: RouterOptions, product: LinearProduct, old: nn.Module) -> None:
        super().__init__()
        self.options, self.product, self.correction = options, product, read_correction(old)

    def forward(self, x: torch.Tensor, correction: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = self.product.compute_partials(x.reshape(-1, x.shape[-1]))
        added = self.correction if correction is None else correction.float()
        ids, weights = choose(logits, self.product.bias, added, self.options)
        return logits[0], weights, ids.long()  # as transformers' routers return them; its "eager" experts take no others


class ExpertsModule(nn.Module):
    """Experts that replace a module of transformers: rows [T, H], choice and weights [T, top_k] to [T, H]."""

    def __init__(self, experts: ChosenExperts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        k = ids.shape[-1]
        return self.experts.run(rows, ids.reshape(-1, k).int(), weights.reshape(-1, k).float(), None, x.dtype).view(x.shape)

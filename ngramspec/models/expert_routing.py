"""Find out what the routers and experts of transformers' mixtures of experts compute, by trying them with random weights.

transformers gives every family a router, which chooses experts for rows [T, H], and experts, which take rows, choice and weights. A backend
that replaces them says how it chooses; here it is found with which options it chooses as the module does, and which activation the experts
have. Modules may be on the "meta" device. Nothing here knows which layers a model has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from ngramspec.models.expert_weights import ONE_GROUP, ExpertGroups

_SAME = 1e-5  # Largest difference of weights and activations that counts as rounding.
_ROWS = 64  # Rows that a router is tried with: of 7 rows, two ways to choose among few groups of experts may choose the same experts.
CORRECTION = "e_score_correction_bias"  # What is added to scores for the choice alone, whoever has it: a buffer or parameter [E], [1, E].
_WEIGHTS = ("weight", "wg.weight", "gate.weight")  # Names of the matrix [E, H] within a router.
_NAMES = ("Router", "Gate")  # Ends of the names of routers' classes.


class RouterOptions(NamedTuple):
    """How a router chooses `top_k` of `n_experts` by their logits, and weighs them."""

    n_experts: int
    top_k: int
    sigmoid: bool
    """Whether scores are the sigmoid of the logits instead of their softmax."""
    normalise: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of all weights."""
    groups: ExpertGroups = ONE_GROUP


# Chooses for logits [T, E] and what is added to scores for the choice alone [E] (None: nothing): ids and weights [T, top_k].
Choose = Callable[[torch.Tensor, torch.Tensor | None, RouterOptions], tuple[torch.Tensor, torch.Tensor]]


def choose_experts(logits: torch.Tensor, correction: torch.Tensor | None, options: RouterOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts for logits [T, E] float32: ids [T, top_k], best first and equal ones by lowest id, and weights [T, top_k]."""
    scores = logits.sigmoid() if options.sigmoid else logits.softmax(-1)
    by = logits if correction is None and not options.sigmoid else scores + (0 if correction is None else correction)
    ids = by.sort(dim=-1, descending=True, stable=True).indices[:, : options.top_k]
    weights = scores.gather(-1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) if options.normalise else 1) * options.scale


def find_router_options(router: nn.Module, choose: Choose = choose_experts, *, grouped: bool = False) -> RouterOptions | None:
    """Return the options with which `choose` chooses as this module does; None if it computes something else. `grouped`: whether it can
    choose groups of experts first.
    """
    top_k = getattr(router, "top_k", None)
    if (parts := locate_router_parts(router)) is None or not isinstance(top_k, int):
        return None
    weight = router.get_parameter(parts.weight)
    if weight.dim() != 2 or not 0 < top_k <= weight.shape[0]:
        return None
    correction, expected = _try_router(router, parts)
    if expected is None:
        return None
    logits, weights, ids = expected
    for groups in _list_groups(router, weight.shape[0], top_k) if grouped else (ONE_GROUP,):
        for sigmoid, normalise in ((False, True), (False, False), (True, True), (True, False)):
            options = RouterOptions(weight.shape[0], top_k, sigmoid, normalise, groups=groups)
            chosen, ours = choose(logits, correction, options)
            scale = float(weights.sum() / ours.sum())
            # some routers' choice is in no order
            (chosen, ours), (their_choice, theirs) = _sort_choice(chosen, ours), _sort_choice(ids, weights)
            if torch.equal(chosen, their_choice) and float((ours * scale - theirs).abs().max()) < _SAME:
                return options._replace(scale=1.0 if abs(scale - 1) < _SAME else scale)
    return None


class RouterParts(NamedTuple):
    """Names of what a router has, within its module."""

    weight: str
    """Name of the matrix [E, H]."""
    correction: str | None
    """Name of its own `CORRECTION`, if it has one."""


def locate_router_parts(router: nn.Module) -> RouterParts | None:
    """Return the names of a router's matrix and correction; None if the module is no router by its name and parameters."""
    tensors = {name for name, _ in (*router.named_parameters(), *router.named_buffers())}
    weight = next((name for name in _WEIGHTS if name in tensors), None)
    if weight is None or not type(router).__name__.endswith(_NAMES):
        return None
    return RouterParts(weight, next((name for name in tensors if name.endswith(CORRECTION)), None))


def _list_groups(router: nn.Module, n_experts: int, top_k: int) -> list[ExpertGroups]:
    """List the ways in which a router with these attributes may choose groups first; none if the chosen ones have too few experts."""
    n_groups = next((n for name in ("num_group", "n_group") if isinstance(n := getattr(router, name, None), int) and n > 1), 1)
    top_groups = getattr(router, "topk_group", None) or 1
    if n_groups == 1:
        return [ONE_GROUP]
    size = n_experts // n_groups
    if n_experts % n_groups or not 0 < top_groups <= n_groups or top_groups * size < top_k:
        return []
    return [ExpertGroups(n_groups, top_groups, pairs) for pairs in (False, True) if size > pairs]


def _sort_choice(ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return chosen experts and their weights, both [T, top_k], by the number of the expert."""
    ids, order = ids.long().sort(dim=-1)
    return ids, weights.gather(-1, order)


@torch.no_grad()
def _try_router(router: nn.Module, parts: RouterParts) -> tuple[torch.Tensor | None, Sequence[torch.Tensor] | None]:
    """Return what is added to scores for the choice [E] (None for a module that does not take it), and what the module computes of random
    rows with random weights: logits, weights, choice; None if it returns others.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5
        for name, p in router.named_parameters()
        if name != parts.correction
    }
    n_experts, n_in = tensors[parts.weight].shape
    x = torch.randn(_ROWS, n_in, generator=generator)
    correction = 0.3 * torch.randn(n_experts, generator=generator)
    if parts.correction:
        own = dict(router.named_parameters()) | dict(router.named_buffers())
        tensors[parts.correction] = correction.view(own[parts.correction].shape)
    found: Any = None
    added = None
    for rows, added in [(rows, added) for rows in (x, x[None]) for added in ((correction,) if parts.correction else (None, correction))]:
        with contextlib.suppress(RuntimeError, TypeError, ValueError, AttributeError):
            found = functional_call(router, tensors, (rows,) if parts.correction or added is None else (rows, added))
            break
    if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(each, torch.Tensor) for each in found):
        return None, None
    logits, weights, ids = found
    if logits.shape != (_ROWS, n_experts) or weights.shape != (_ROWS, router.top_k) or ids.shape != weights.shape:
        return None, None
    return added, (logits.contiguous(), weights, ids)


@torch.no_grad()
def find_activation(experts: nn.Module) -> str | tuple[float, float]:
    """Return the activation of these experts: "silu" or "gelu" (of the gate, times up; gelu with tanh), "squared relu" without a gate, or
    (alpha, limit) of gpt-oss's. Raises LookupError if it is another one.
    """
    n: Any = 16
    if "up_proj" in experts._parameters:
        x = torch.randn(5, n, generator=torch.Generator().manual_seed(0))
        if torch.equal(experts.act_fn(x), torch.relu(x).square()):  # type: ignore[operator]
            return "squared relu"
        raise LookupError("another activation without a gate")
    both = torch.randn(5, 2 * n, generator=torch.Generator().manual_seed(0)) * 6
    apply: Any = getattr(experts, "_apply_gate", None)
    if apply is None:
        raise LookupError("experts without a gate")
    found = apply(both)
    gate, up = both.chunk(2, dim=-1) if getattr(experts, "is_concatenated", True) else (both[:, ::2], both[:, 1::2])
    for name, activate in (("silu", nn.functional.silu), ("gelu", partial(nn.functional.gelu, approximate="tanh"))):
        if found.shape == (5, n) and float((found - activate(gate) * up).abs().max()) < _SAME * 100:
            return name
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    if isinstance(alpha, float) and isinstance(limit, float):
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        if float((found - gate * torch.sigmoid(alpha * gate) * (up + 1)).abs().max()) < _SAME * 100:
            return alpha, limit
    raise LookupError("another activation")

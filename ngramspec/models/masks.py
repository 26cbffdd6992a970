"""Provide the attention function that transformers calls in every layer, whatever the device.

It passes query, key and value on to the `AttentionPass` that the runner gave the model as the keyword argument `ngramspec`, and refuses
arguments that would change the result. It does not know how keys and values are stored, nor which rows see which.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from ngramspec.errors import UnsupportedModelError

NAME = "ngramspec"  # Name under which this attention is registered with transformers.


class AttentionPass(Protocol):
    """What a runner gives a model's attention layers for one pass."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Compute attention of q [T, H, D] over k and v [T, Hk, D] and earlier keys: [T, H, D]. `window` and `softcap` of 0 mean none.

        sinks [H]: logits of attention that goes to no key.
        """
        ...


class ShapeProbe:
    """A stand-in for a pass that records the shape of every layer's keys, since configurations cannot be relied on."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[int, int]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if layer in self.seen:
            raise UnsupportedModelError(f"layer {layer} computes attention more than once in a pass; there is room for one set of keys")
        self.seen[layer] = (k.shape[1], k.shape[2])
        return torch.zeros_like(q)


_DROPPING = ("NemotronDecoderLayer", "StableLmDecoderLayer")  # classes of layers that do not hand keyword arguments on to their attention


def is_replaceable(model: PreTrainedModel) -> bool:
    """Return whether a model's layers call the attention function of any name, as transformers says, or we know it."""
    return bool(getattr(model, "_supports_attention_backend", False)) or any(type(layer).__name__ in _DROPPING for layer in model.modules())


def hand_keywords_on(model: PreTrainedModel) -> None:
    """Have layers that do not hand the `AttentionPass` on to their attention do so."""
    for layer in model.modules():
        if type(layer).__name__ in _DROPPING:
            given: dict[str, AttentionPass | None] = {}
            layer.register_forward_pre_hook(partial(_keep_pass, given), with_kwargs=True)
            layer.get_submodule("self_attn").register_forward_pre_hook(partial(_add_pass, given), with_kwargs=True)


def _keep_pass(given: dict[str, AttentionPass | None], module: torch.nn.Module, args: Any, keywords: dict[str, Any]) -> None:
    given[NAME] = keywords.get(NAME)


def _add_pass(given: dict[str, AttentionPass | None], module: torch.nn.Module, args: Any, keywords: dict[str, Any]) -> Any:
    return args, {**keywords, **given}


# Arguments that models pass to every attention function and that change nothing here.
HARMLESS = frozenset(
    [
        *("position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("cache_position", "dropout", "is_causal", "layer_idx"),
    ]
)


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    ngramspec: AttentionPass | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Pass a layer's query [1, H, T, D], key [1, Hk, T, D] and value [1, Hk, T, V ≤ D] to the `AttentionPass`; return [1, T, H, V].

    Raises UnsupportedModelError for an argument that would change the mathematics.
    """
    if ngramspec is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not hand keyword arguments on to its attention function")
    unknown = sorted(name for name, value_ in others.items() if value_ is not None and name not in HARMLESS)
    if unknown or attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks its attention for {', '.join(unknown) or 'a mask'}, which is not implemented"
        )
    n_values = value.shape[-1]
    if value.shape[:-1] != key.shape[:-1] or n_values > key.shape[-1]:
        raise UnsupportedModelError(f"{type(module).__name__}: attention over keys {tuple(key.shape)}, values {tuple(value.shape)}")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if n_values < key.shape[-1]:  # zeros stand in the pool for the numbers that values lack
        value = torch.nn.functional.pad(value, (0, key.shape[-1] - n_values))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attended = ngramspec.attend(module.layer_idx, q, k, v, scale, sliding_window or 0, softcap or 0.0, s_aux)  # type: ignore[arg-type]
    return attended[None, ..., :n_values], None


AttentionInterface.register(NAME, forward)

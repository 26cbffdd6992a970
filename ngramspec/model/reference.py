"""What transformers computes, for a piece of a model that is small enough to hold as float32: one of its layers between a few words of its
embedding and of its head.

A model on the "meta" device and its weights' source enter; a model of transformers with the same code and one layer leaves. Whoever stands
in for transformers' modules compares itself with it. Knows nothing of how that is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ngramspec.batch.errors import UnsupportedModelError
from ngramspec.model.random_weights import empty_model
from ngramspec.model.stored import Source

WORDS = 64
"""Of the vocabulary."""


def kinds_of_layers(model: PreTrainedModel) -> dict[str, int]:
    """The first layer of each kind that the model has: of a class of modules, a type in its configuration, and a set of parameters."""
    found: dict[str, int] = {}
    types: Sequence[str] = getattr(model.config.get_text_config(), "layer_types", None) or ()
    for i, layer in enumerate(layers_of(model)):
        names = ",".join(name for name, _ in layer.named_parameters())
        found.setdefault(f"{type(layer).__name__} {types[i] if i < len(types) else ''} {names}", i)
    return found


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Raises UnsupportedModelError for a model whose decoder layers are not a list of that name."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UnsupportedModelError(f"{type(model).__name__}: its layers cannot be had one by one, so they cannot be checked")
    return layers


@torch.no_grad()
def reference(model: PreTrainedModel, source: Source, layer: int) -> PreTrainedModel:
    """A model of one layer, the given one, with the first WORDS words. Raises UnsupportedModelError, ModelNotFoundError."""
    config = model.config.to_dict()
    words = min(WORDS, config["vocab_size"])
    config |= {"num_hidden_layers": 1, "vocab_size": words, "pad_token_id": None}
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][layer]]
    small = empty_model(config, torch.float32)
    inside = f"{model.base_model_prefix}.layers."
    made: dict[Any, torch.nn.Parameter] = {}
    for path, module in small.named_modules():
        for name, empty in list(module._parameters.items()):
            if empty is None:
                continue
            if empty not in made:
                full = f"{path}.{name}" if path else name
                stored = source[full.replace(f"{inside}0.", f"{inside}{layer}.", 1)]
                cut = stored.shape != tuple(empty.shape)
                values = stored.values(0, words) if cut and len(stored.shape) == 2 else stored.float32()[: empty.shape[0]]
                if values.shape != tuple(empty.shape):
                    raise UnsupportedModelError(f"{full} is {list(stored.shape)}, where {list(empty.shape)} was expected")
                made[empty] = torch.nn.Parameter(torch.from_numpy(values.copy()), requires_grad=False)
            setattr(module, name, made[empty])
    return small.eval()

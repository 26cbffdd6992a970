"""Find a model's own head that predicts further tokens (multi-token prediction, MTP), as Qwen3.5, 3.6 and Qwen3-Next have it.

The head at position t reads the embedding of token t + 1 and the model's last hidden state at t, which its final norm has left, and
predicts token t + 2. Both are normed and joined, embedding first, and projected to one hidden state (`fc`). A layer like the model's own
with attention follows, a norm, and the model's projection to the vocabulary. To predict further tokens, what the norm leaves stands in for
the state. Parameters are named as in safetensors folders: transformers' model has none for them. The module reads no weights.

Sources: vLLM's and SGLang's `qwen3_5_mtp`; llama.cpp's `src/models/qwen35.cpp`, whose tensors are called `nextn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ngramspec.models.tensor_source import StoredTensor, TensorSource

if TYPE_CHECKING:
    from ngramspec.models.safetensors import SafetensorsEntry

# Beginnings of the names of a head's parameters, and of those of its layer, which go on as the model's layers' do.
HEAD = "mtp."
HEAD_LAYER = f"{HEAD}layers.0."
FC, EMBEDDING_NORM, HIDDEN_NORM, NORM = (f"{HEAD}{name}.weight" for name in ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
# Begin the names of parameters of heads that are not read: with several layers, or an embedding and projection of their own.
_NOT_READ = (f"{HEAD}layers.1.", f"{HEAD}embed_tokens.", f"{HEAD}lm_head.", f"{HEAD}shared_head.")


def select_tensors(tensors: Mapping[str, SafetensorsEntry]) -> dict[str, SafetensorsEntry]:
    """Return the tensors of a folder's head by their names without what may stand before; none if it is of a form that is not read."""
    found = {name.removeprefix("model."): entry for name, entry in tensors.items() if name.removeprefix("model.").startswith(HEAD)}
    return {} if any(name.startswith(_NOT_READ) for name in found) else found


def add_parameters(
    source: TensorSource, tensors: Mapping[str, SafetensorsEntry], of_head: Mapping[str, SafetensorsEntry], config: Mapping[str, Any]
) -> TensorSource:
    """Return the source with the parameters of the head too, if all are there as the model's config says.

    They are found as those of a model of one layer are: `tensors` and `of_head`, the whole model's and the head's.
    """
    from ngramspec.models import safetensors
    from ngramspec.models.random_weights import empty_model

    if not {FC, EMBEDDING_NORM, HIDDEN_NORM, NORM} <= of_head.keys():
        return source
    import torch

    layer = "model.layers.0."
    small = empty_model({**config, "num_hidden_layers": 1, "layer_types": ["full_attention"]}, torch.float32)
    around = {name: entry for name, entry in tensors.items() if ".layers." not in name}
    inside = {f"{layer}{name.removeprefix(HEAD_LAYER)}": entry for name, entry in of_head.items() if name.startswith(HEAD_LAYER)}
    found = safetensors.find_parameters({**around, **inside}, small)
    get = safetensors.make_lookup(of_head)
    joint: dict[str, StoredTensor | None] = {name: get(name) for name in (FC, EMBEDDING_NORM, HIDDEN_NORM, NORM)}
    if found is None or None in joint.values():
        return source
    joint |= {f"{HEAD_LAYER}{name.removeprefix(layer)}": found[name] for name in found if name.startswith(layer)}
    return TensorSource({**source, **{name: stored for name, stored in joint.items() if stored is not None}}, source.n_bytes)

"""Derive from a GGUF file's header what transformers' model of it is: its config, its tokenizer, and which tensor is which parameter.

`derive` writes a small folder in the form of a model folder without weights, by the table in `gguf_architectures`. Its `TENSOR_NAMES`
holds, for every parameter, the tensor it comes from and the rule between the two. `find_parameters` reads the result back for the weights
in the file. The module does not know where the folder lies.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ngramspec.errors import UnsupportedModelError
from ngramspec.models import header_limits, vocabulary
from ngramspec.models.folder_cache import write_tokenizer
from ngramspec.models.gguf import Gguf
from ngramspec.models.gguf_architectures import read_config
from ngramspec.models.gguf_metadata import SLIDING
from ngramspec.models.gguf_tensor_map import add_zero_biases, list_head_tensors, list_idle_tensors, map_tensors
from ngramspec.models.random_weights import empty_model
from ngramspec.models.start_cache import (
    ROPE_FACTORS,
    TENSOR_NAMES,
    apply_rule,
    locate_head,
    locate_heads,
    locate_tensor,
    read_tensor_names,
)
from ngramspec.models.tensor_source import StoredTensor, TensorSource, WeightFile


def derive(gguf: Gguf, folder: Path) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and TENSOR_NAMES into an existing folder.

    Raises UnsupportedModelError for an architecture that is not in the table, TokenizerError, OSError.
    """
    config = read_config(gguf)
    _check_sizes(gguf, config)
    header_limits.check_sizes(config, str(gguf.path), [tensor.shape for tensor in gguf.tensors.values()])
    tokenizer = vocabulary.read_tokenizer(gguf)
    model = empty_model(config, torch.float32)
    names = map_tensors(gguf, config)
    names |= add_zero_biases(names, [name for name, _ in model.named_parameters()])
    generation: Any = model.generation_config
    generation.eos_token_id = sorted(vocabulary.end_token_ids_of(gguf))
    generation.save_pretrained(folder)
    try:
        write_tokenizer(tokenizer, folder)
    except Exception as error:
        if type(error) is Exception or isinstance(error, UnicodeError):  # the library raises no OSError for a full disk or an odd path
            raise OSError(f"the tokenizer cannot be written: {error}") from error
        raise
    (folder / "config.json").write_text(json.dumps(config))
    (folder / TENSOR_NAMES).write_text(json.dumps(names))


def find_parameters(gguf: Gguf, folder: Path, model: PreTrainedModel) -> TensorSource:
    """Locate the parameters of a model on the "meta" device in the file, by a folder that `derive` wrote.

    The angles of rotary embeddings, which the model has already, are scaled if the file says so. Raises UnsupportedModelError if file and
    config disagree, or for an unsupported type of tensor.
    """
    names = read_tensor_names(folder)
    files = {header.path: WeightFile(header.path) for header in gguf.headers}
    stored: dict[str, StoredTensor] = {}
    aliases: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    lacking: list[str] = []
    used: set[str] = set()
    for parameter, known_as in aliases.items():
        if not (found := [names[name] for name in known_as if name in names]):
            lacking.append(known_as[0])
            continue
        stored |= dict.fromkeys(known_as, apply_rule(gguf, files, found[0], tuple(parameter.shape)))
        used.update(name for use in found for name in (use.tensor, use.other))
    if lacking:
        raise UnsupportedModelError(f"{gguf.path}: it lacks {len(lacking)} tensors of {type(model).__name__}, such as {lacking[0]}")
    for name, buffer in model.named_buffers():
        if name in names:
            stored[name] = apply_rule(gguf, files, names[name], tuple(buffer.shape))
            buffer.copy_(torch.from_numpy(stored[name].float32()).view(buffer.shape))
            used.add(names[name].tensor)
    if ROPE_FACTORS in gguf.tensors:
        _scale_angles(model, locate_tensor(gguf, files, gguf.tensors[ROPE_FACTORS]).float32())
        used.add(ROPE_FACTORS)
    stored |= locate_head(gguf, files, names) | locate_heads(gguf, files, names)
    if unused := sorted(gguf.tensors.keys() - used - list_idle_tensors(gguf, model.config.to_dict()) - list_head_tensors(gguf)):
        raise UnsupportedModelError(
            f"{gguf.path}: it has {len(unused)} tensors that {type(model).__name__} has no use for, such as {unused[0]}: "
            "it would compute something else"
        )
    return TensorSource(stored, gguf.n_bytes)


def _scale_angles(model: PreTrainedModel, factors: np.ndarray) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and not name.startswith(SLIDING):  # as in llama.cpp, where layers have two sorts of angles
                if buffer.shape != factors.shape:
                    raise UnsupportedModelError(f"{ROPE_FACTORS} is {list(factors.shape)}; accepted: {list(buffer.shape)}")
                buffer /= torch.from_numpy(factors)


def _check_sizes(gguf: Gguf, config: dict[str, Any]) -> None:
    """Check the sizes that the model is made of, before its tensors are looked at."""
    widest = max((n for tensor in gguf.tensors.values() for n in tensor.shape), default=0)
    layers = ("num_hidden_layers", "n_layer")
    sizes = ("hidden_size", "n_embd", "intermediate_size", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "vocab_size")
    for key, most in [*((key, len(gguf.tensors)) for key in layers), *((key, widest) for key in sizes)]:
        if key in config and not (isinstance(config[key], int) and 0 < config[key] <= most):
            raise UnsupportedModelError(f"{gguf.path}: {key} is {config[key]!r} by its metadata; accepted: 1 to {most}, by its tensors")
    optional = (
        "hidden_size_per_layer_input", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts", "moe_num_shared_experts",
        "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    )  # fmt: skip
    others = [(key, config[key]) for key in optional if config.get(key)]
    others += [item for layer in config.get("per_layer_config", {}).values() for item in layer.items()]
    for key, value in others:
        if not 0 < value <= widest:
            raise UnsupportedModelError(f"{gguf.path}: {key} is {value!r} by its metadata; accepted: 1 to {widest}, by its tensors")

"""Ask transformers once what it knows of a GGUF file's architecture: its config, its tokenizer, and which tensor is which parameter.

`derive` writes a small folder in the form of a model folder without weights. Its `TENSOR_NAMES` holds, for every parameter, the tensor it
comes from and the rule between the two. The rules are found by running transformers' own processors on test numbers; a processor that does
anything else is refused. `find_parameters` reads the result back for the weights in the file. The module does not know where the folder
lies.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ngramspec.errors import NgramspecError, TokenizerError, UnsupportedModelError
from ngramspec.models import header_limits, vocabulary
from ngramspec.models.gguf import Gguf, GgufTensor, array_length, make_skeleton
from ngramspec.models.random_weights import empty_model
from ngramspec.models.start_cache import ROPE_FACTORS, RULES, TENSOR_NAMES, apply_rule, locate_tensor
from ngramspec.models.tensor_source import StoredTensor, TensorSource, WeightFile, interleaved_rows

# Most values of an array that is no vocabulary: the arrays that a config needs have one value per layer. transformers takes 700 bytes for
# each.
_LONGEST = 4096
# Most values of a vocabulary's arrays, such as merges: _VOCABULARY, or _PER_TOKEN per row of the largest matrix. Llama 3 has 2.2 merges
# per token.
_VOCABULARY, _PER_TOKEN = 1 << 18, 4


def derive(gguf: Gguf, folder: Path) -> None:
    """Write config.json, generation_config.json, the tokenizer's files and TENSOR_NAMES into an existing folder.

    Raises UnsupportedModelError for an architecture that transformers does not read from GGUF, TokenizerError, OSError.
    """
    with tempfile.TemporaryDirectory(prefix="ngramspec-") as scratch:
        config = _read_config(gguf, Path(scratch))
        tokenizer = _read_tokenizer(gguf, Path(scratch))
    model = empty_model(config, torch.float32)
    names = _map_names(gguf, config, model)
    generation: Any = model.generation_config
    generation.eos_token_id = sorted(vocabulary.end_token_ids_of(gguf))
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / TENSOR_NAMES).write_text(json.dumps(names))


def find_parameters(gguf: Gguf, folder: Path, model: PreTrainedModel) -> TensorSource:
    """Locate the parameters of a model on the "meta" device in the file, by a folder that `derive` wrote.

    The angles of rotary embeddings, which the model has already, are scaled if the file says so. Raises UnsupportedModelError if file and
    config disagree, or for an unsupported type of tensor.
    """
    names: dict[str, tuple[str, str, int]] = json.loads((folder / TENSOR_NAMES).read_bytes())
    files = {header.path: WeightFile(header.path) for header in gguf.headers}
    stored: dict[str, StoredTensor] = {}
    aliases: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    lacking: list[str] = []
    for parameter, known_as in aliases.items():
        if not (found := [names[name] for name in known_as if name in names]):
            lacking.append(known_as[0])
            continue
        source, rule, heads = found[0]
        one = apply_rule(gguf, files, gguf.tensors[source], tuple(parameter.shape), rule, heads)
        stored |= dict.fromkeys(known_as, one)
    if lacking:
        raise UnsupportedModelError(f"{gguf.path}: it lacks {len(lacking)} tensors of {type(model).__name__}, such as {lacking[0]}")
    used = {source for source, _, _ in names.values()}
    if ROPE_FACTORS in gguf.tensors:
        _scale_angles(model, locate_tensor(gguf, files, gguf.tensors[ROPE_FACTORS]).float32())
        used.add(ROPE_FACTORS)
    if unused := sorted(gguf.tensors.keys() - used):
        raise UnsupportedModelError(
            f"{gguf.path}: it has {len(unused)} tensors that {type(model).__name__} has no use for, such as {unused[0]}: "
            "it would compute something else"
        )
    return TensorSource(stored, gguf.n_bytes)


def _scale_angles(model: PreTrainedModel, factors: np.ndarray) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq"):
                if buffer.shape != factors.shape:
                    raise UnsupportedModelError(f"{ROPE_FACTORS} is {list(factors.shape)}; accepted: {list(buffer.shape)}")
                buffer /= torch.from_numpy(factors)


def _read_config(gguf: Gguf, scratch: Path) -> dict[str, Any]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # Its reader takes seconds for a vocabulary, of which the config needs no more than the size. By a model's name it would take some of
    # Llama's architecture for Mistral's, whose tensors it then does not find.
    path = scratch / "config.gguf"
    plain = {key for key, value in gguf.metadata.items() if value is not None or not key.startswith("tokenizer.")}
    long = {key for key in plain if array_length(gguf.headers[0], key) > _LONGEST}
    path.write_bytes(make_skeleton(gguf, (plain - long - {"general.name"}).__contains__))
    with _translate_errors(gguf, "GGUF models"):
        config: dict[str, Any] = load_gguf_checkpoint(str(path))["config"]
        if "vocab_size" not in config:
            config["vocab_size"] = gguf.tensors["token_embd.weight"].shape[0]
        _check_sizes(gguf, config)
        header_limits.check_sizes(config, str(gguf.path), [tensor.shape for tensor in gguf.tensors.values()])
        return config | _read_missing_config(gguf, config)


def _check_sizes(gguf: Gguf, config: dict[str, Any]) -> None:
    """Check the sizes that the model is made of, before its tensors are looked at."""
    widest = max((n for tensor in gguf.tensors.values() for n in tensor.shape), default=0)
    layers = ("num_hidden_layers", "n_layer", "num_layers")
    sizes = ("hidden_size", "n_embd", "intermediate_size", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "vocab_size")
    for key, most in [*((key, len(gguf.tensors)) for key in layers), *((key, widest) for key in sizes)]:
        if key in config and not (isinstance(config[key], int) and 0 < config[key] <= most):
            raise UnsupportedModelError(f"{gguf.path}: {key} is {config[key]!r} by its metadata; accepted: 1 to {most}, by its tensors")


def _read_missing_config(gguf: Gguf, config: dict[str, Any]) -> dict[str, Any]:
    """Return what the metadata says about the computation and transformers does not read."""

    def stated(key: str) -> Any:
        return gguf.metadata.get(f"{gguf.architecture}.{key}")

    found: dict[str, Any] = {}
    if (base := stated("rope.freq_base")) is not None and "rope_theta" not in config:
        found["rope_theta"] = base
    head_dim = stated("attention.key_length")
    if head_dim is not None and "head_dim" not in config and head_dim * config["num_attention_heads"] != config["hidden_size"]:
        found["head_dim"] = head_dim
    if gguf.architecture in ("gemma2", "gemma3"):
        width, heads, layers = config["hidden_size"], config["num_attention_heads"], config["num_hidden_layers"]
        is_27b = (gguf.architecture, layers) in (("gemma2", 46), ("gemma3", 62))  # as llama.cpp tells it
        found["query_pre_attn_scalar"] = width // heads if is_27b else config["head_dim"]
    kind, factor = stated("rope.scaling.type"), stated("rope.scaling.factor")
    if kind not in (None, "none") and factor not in (None, 0.0, 1.0):
        if kind != "linear":
            raise UnsupportedModelError(f"{gguf.path}: rope.scaling.type is {kind!r}; accepted: none, linear")
        scaling = {"rope_type": "linear", "factor": factor, "rope_theta": config["rope_theta"]}
        if gguf.architecture == "gemma3":  # the layers with a window are not scaled
            local = {"rope_type": "default", "rope_theta": stated("rope.freq_base_swa") or 10000.0}
            found["rope_parameters"] = {"full_attention": scaling, "sliding_attention": local}
        else:
            found["rope_parameters"] = scaling
    return found


def _read_tokenizer(gguf: Gguf, scratch: Path) -> Any:
    """Read the tokenizer that a GGUF file carries; it produces the ids that llama.cpp produces."""
    most = max(_VOCABULARY, _PER_TOKEN * max((t.shape[0] for t in gguf.tensors.values() if len(t.shape) > 1), default=0))
    lengths = {key: array_length(gguf.headers[0], key) for key in gguf.metadata}
    for key, length in lengths.items():
        if length > most and key.startswith("tokenizer."):
            raise TokenizerError(f"{gguf.path}: {key} has {length} values; accepted: up to {most}, by its tensors")
    if gguf.metadata.get("tokenizer.ggml.model") == "gpt2":
        return vocabulary.byte_pair_tokenizer(gguf)
    path = scratch / "tokenizer.gguf"
    path.write_bytes(make_skeleton(gguf, lambda key: lengths.get(key, 0) <= (most if key.startswith("tokenizer.") else _LONGEST)))
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(scratch, gguf_file=path.name, local_files_only=True)
    except Exception as error:
        # Tokenizer libraries raise bare Exceptions for what they do not understand.
        raise TokenizerError(
            f"{gguf.path}: transformers {transformers.__version__} does not read the tokenizer of this GGUF, model "
            f"{gguf.metadata.get('tokenizer.ggml.model')!r} ({error}); accepted: another model's, as a tokenizer= argument"
        ) from error
    vocabulary.complete(tokenizer.backend_tokenizer, gguf)
    return tokenizer


@dataclass(frozen=True)
class _Named:
    """A model reduced to its names.

    transformers looks for a module's names in all modules within, to find a model that was converted without its head, which takes seconds.
    """

    model: torch.nn.Module
    children: list[tuple[str, Any]]

    @property
    def config(self) -> Any:
        return self.model.config

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def named_children(self) -> list[tuple[str, Any]]:
        return self.children


def _map_names(gguf: Gguf, config: dict[str, Any], model: PreTrainedModel) -> dict[str, tuple[str, str, int]]:
    """Map each parameter to its tensor, the rule between the two, and the heads of an interleaving rule."""
    if stacked := next((tensor.name for tensor in gguf.tensors.values() if len(tensor.shape) > 2), None):
        raise UnsupportedModelError(
            f"{gguf.path}: {stacked} has more than two dimensions: mixtures of experts are not read from GGUF; their safetensors may load"
        )
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    with _translate_errors(gguf, "GGUF models"):
        processor = TENSOR_PROCESSORS.get(gguf.architecture, TensorProcessor)(config=config)
        parameter_of = get_gguf_hf_weights_map(_Named(model, [(model.base_model_prefix, _Named(model.base_model, []))]), processor)
    heads = [n for n in (config.get("num_attention_heads"), config.get("num_key_value_heads")) if isinstance(n, int) and n > 0]
    known: dict[tuple[Any, ...], tuple[str, int]] = {}
    names: dict[str, tuple[str, str, int]] = {}
    for tensor in gguf.tensors.values():
        if (name := parameter_of.get(tensor.name)) is None:
            continue
        alike = (re.sub(r"\d+", "", tensor.name), tensor.shape)
        if alike not in known:
            known[alike] = _find_rule(gguf, processor, tensor, heads)
        names[name] = (tensor.name, *known[alike])
    return names


def _find_rule(gguf: Gguf, processor: Any, tensor: GgufTensor, heads: list[int]) -> tuple[str, int]:
    """Find what transformers' processor does to a tensor by what it does to the numbers of its rows and of its columns."""
    probes = [
        np.broadcast_to(np.arange(n, dtype=np.float32).reshape([-1 if i == axis else 1 for i in range(len(tensor.shape))]), tensor.shape)
        for axis, n in enumerate(tensor.shape)
    ]
    made = []
    with _translate_errors(gguf, f"{tensor.name} of GGUF models"):
        for probe in probes:
            aside: dict[str, Any] = {"tensors": {}}
            result = processor.process(weights=probe, name=tensor.name, tensor_key_mapping={}, parsed_parameters=aside)
            made.append(np.asarray(result.weights if result.name is not None else next(iter(aside["tensors"].values()))))
    for rule, compute in RULES.items():
        if all(np.array_equal(np.squeeze(y), np.squeeze(compute(x))) for x, y in zip(probes, made, strict=True)):
            return rule, 0
    for n in heads:
        if tensor.shape[0] % (2 * n) == 0:
            order = interleaved_rows(np.arange(tensor.shape[0]), tensor.shape[0], n)
            if all(np.array_equal(y, x[order]) for x, y in zip(probes, made, strict=True)):
                return "interleaved", n
    raise UnsupportedModelError(
        f"{gguf.path}: {tensor.name} of architecture {gguf.architecture!r} differs from what its model has in an unknown way; "
        "its safetensors folder may load"
    )


@contextlib.contextmanager
def _translate_errors(gguf: Gguf, what: str) -> Iterator[None]:
    """Turn whatever transformers raises for unknown files into an UnsupportedModelError."""
    try:
        yield
    except NgramspecError:
        raise
    except Exception as error:
        # It reads metadata without checks, and raises whatever comes of that.
        raise UnsupportedModelError(
            f"{gguf.path}: transformers {transformers.__version__} does not read {what} of architecture {gguf.architecture!r} "
            f"({type(error).__name__}: {error}); its safetensors folder may load"
        ) from error

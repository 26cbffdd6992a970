"""Trace what transformers computes, layer by layer, so that a backend that replaces its modules can be compared.

`kinds_of_layers` finds the layers that differ in more than their weights, `texts_to_compare` the positions at which a model may behave
differently, `trace` records the inputs and outputs of layers and their parts in one pass, and `measure_difference` compares two traces.
In a replayed trace every layer and part gets the input that the first trace recorded, so that rounding does not accumulate and a router
of experts decides on the same numbers. `Reference` is transformers' model with float32 weights in one layer at a time. The module does
not know how the other side computes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.latent_weights import list_latent_attention
from ngramspec.models.random_weights import empty_model
from ngramspec.models.tensor_source import TensorSource

WORDS = 64  # Size of a `Reference`'s vocabulary.
# What a model raises that cannot compute what its config says.
FAILURES = (RuntimeError, KeyError, IndexError, AttributeError, NotImplementedError, TypeError, ValueError)
TEXT, FAR_TEXT = 24, 8  # Tokens of the check text at position 0, and of those further out and after a window's end.
# Gap between the last expert that a router chooses and the next, in standard deviations of its logits, that rounding does not bridge: some
# times the largest difference of hidden states that counts as rounding (with 16-bit keys and values).
_SURE = 0.03
# Most multiplications and additions of one layer for a text longer than its window (a few seconds); a text that needs more is left out.
MOST_OPERATIONS = 3e11
# Substrings of configuration keys whose integers are positions or counts of positions.
_NAMES = ("position", "window", "chunk", "floor_scale", "context_len", "block_len")


# ------------------------------------------------------------------ what differs


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the decoder layers: the model's first module list of the configured length. Raises UnsupportedModelError."""
    n = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == n:
            return module
    raise UnsupportedModelError(f"{type(model).__name__}: it has no list of {n} layers, so its layers cannot be checked one by one")


def kinds_of_layers(model: PreTrainedModel) -> list[int]:
    """Return the first layer of each kind.

    Two layers are of one kind if their modules have the same classes, shapes of parameters and values of every attribute that is a number,
    a string, a truth value, None or a sequence of these, and if the configuration's lists with one entry per layer name the same for both.
    An attribute that is every layer's own index makes no kind.
    """
    layers = layers_of(model)
    described = [dict(_describe_layer(layer)) for layer in layers]
    for name in {name for each in described for name in each}:
        given = [(i, each[name]) for i, each in enumerate(described) if name in each]  # a hybrid's layers have different modules
        if any(all(type(value) is int and value == i + first for i, value in given) for first in (0, 1)):
            for each in described:
                each.pop(name, None)
    config = model.config.get_text_config().to_dict()
    lists = [value for value in config.values() if isinstance(value, list | tuple) and len(value) == len(layers)]
    found: dict[str, int] = {}
    for i, each in enumerate(described):
        found.setdefault(repr((sorted(each.items()), [str(value[i]) for value in lists])), i)
    return list(found.values())


def find_needed_layers(model: PreTrainedModel, layer: int) -> list[int]:
    """Return a layer's index, after that of the layer whose keys and values it has if it has none of its own."""
    attentions: list[Any] = [getattr(each, "self_attn", None) for each in layers_of(model)]
    if not getattr(attentions[layer], "is_kv_shared_layer", False):
        return [layer]
    kind = attentions[layer].layer_type
    own = [i for i in range(layer) if not attentions[i].is_kv_shared_layer and attentions[i].layer_type == kind]
    return [own[-1], layer]


def find_key_layers(model: PreTrainedModel) -> list[int]:
    """Return for each layer whose keys and values it has, as a number among the layers with keys and values of their own."""
    owners = [find_needed_layers(model, i)[0] for i in range(len(layers_of(model)))]
    own = sorted(set(owners))
    return [own.index(owner) for owner in owners]


def _describe_layer(layer: torch.nn.Module) -> Iterator[tuple[str, object]]:
    weights = layer.state_dict().keys()
    for path, module in layer.named_modules():
        yield f"{path} class", type(module).__qualname__
        yield f"{path} parameters", str([(name, tuple(p.shape)) for name, p in module._parameters.items() if p is not None])
        for name, value in vars(module).items():
            if not name.startswith("_") and _is_plain(value):
                yield f"{path}.{name}", value
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta and f"{path}.{name}".removeprefix(".") not in weights:
                yield f"{path}.{name}", (tuple(buffer.shape), buffer.double().sum().item(), buffer.double().square().sum().item())


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)


@dataclass(frozen=True, slots=True)
class CheckText:
    """Token ids [n] int32 whose first one is at position `start`."""

    ids: np.ndarray
    start: int

    @property
    def positions(self) -> torch.Tensor:
        """[n] int64"""
        return torch.arange(self.start, self.start + len(self.ids))


def texts_to_compare(model: PreTrainedModel, max_len: int) -> list[CheckText]:
    """Return the texts to compare: a short one from position 0 on; shorter ones across and after every position that the configuration
    names, and up to the last position; one longer than each window, if texts of `max_len` tokens are.
    """
    config = model.config.get_text_config()
    words = min(WORDS, config.vocab_size)
    last = int(getattr(config, "max_position_embeddings", 0) or max_len)
    named = sorted({n for n in _named_positions(config.to_dict()) if n > 1})
    starts = {last - FAR_TEXT, *(n - FAR_TEXT // 2 for n in named), *(n + FAR_TEXT for n in named)}
    texts = [_make_text(words, 0, min(TEXT, last))]
    texts += [_make_text(words, start, FAR_TEXT) for start in sorted(starts) if 0 < start <= last - FAR_TEXT]
    longer = [n + FAR_TEXT for n in named if TEXT < n + FAR_TEXT <= min(max_len, last)]
    return texts + [_make_text(words, 0, n) for n in longer if 2 * n * _layer_size(model) <= MOST_OPERATIONS]


def _make_text(words: int, start: int, n: int) -> CheckText:
    return CheckText((np.arange(n, dtype=np.int64) * 31 % words).astype(np.int32), start)


def _named_positions(config: Mapping[str, Any]) -> Iterator[int]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _named_positions(value)
        elif any(part in str(name) for part in _NAMES):
            values = value if isinstance(value, list | tuple) else [value]
            yield from (int(each) for each in values if isinstance(each, int | float) and not isinstance(each, bool))


def _layer_size(model: PreTrainedModel) -> int:
    """Return the number of parameters of the largest layer."""
    return max(sum(p.numel() for p in layer.parameters()) for layer in layers_of(model))


# ------------------------------------------------------------------ what is computed


@dataclass(slots=True)
class Trace:
    """What one pass over n rows computed: layer 3 has the key "3", its part `mlp` the key "3.mlp"."""

    layers: list[int]
    """Layers that were computed; the others passed their input on."""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """[n, H] each"""
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    """[n, V]"""
    n_outputs: int = 0
    """Outputs that layers return in a tuple, of which hidden states are the first; 0: they return these alone."""


@torch.no_grad()
def trace(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, layers: Sequence[int], *, n_outputs: int = 0,
    replayed: Trace | None = None, **inputs: object,
) -> Trace:  # fmt: skip
    """Compute these layers between embedding and head; the others pass their input on, as `n_outputs` says.

    ids, positions: [n] int64. `replayed`: layers and parts get the inputs recorded there. `inputs`: further arguments of the model.
    """
    found = Trace(list(layers), n_outputs=n_outputs)
    handles = []
    for i, layer in enumerate(layers_of(model)):
        if i not in found.layers:
            continue
        for name, module in ((str(i), layer), *((f"{i}.{part}", child) for part, child in layer.named_children())):
            before, after = _make_hooks(found, name, len(ids), replayed)
            handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    with _passed_on(model, found):
        try:
            output = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **inputs)
        finally:
            for handle in handles:
                handle.remove()
    found.logits = output.logits[0].float()
    return found


def _make_hooks(found: Trace, name: str, n: int, replayed: Trace | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def is_rows(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() == 3 and value.shape[:2] == (1, n)

    def trace_input(
        _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given = args[0] if args else next((kwargs[key] for key in ("hidden_states", "x", "input") if key in kwargs), None)
        if not is_rows(given) or name in found.inputs:
            return None
        assert isinstance(given, torch.Tensor)
        if replayed is None or name not in replayed.inputs:
            found.inputs[name] = given[0].clone()
            return None
        found.inputs[name] = replayed.inputs[name]
        instead = replayed.inputs[name][None].clone()
        if args:
            return (instead, *args[1:]), kwargs
        return args, {key: instead if value is given else value for key, value in kwargs.items()}

    def trace_output(_module: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if is_rows(first) and name not in found.outputs:
            found.outputs[name] = first[0].clone()
        if "." not in name:
            found.n_outputs = len(output) if isinstance(output, tuple) else 0

    return trace_input, trace_output


@contextmanager
def _passed_on(model: PreTrainedModel, found: Trace) -> Iterator[None]:
    """Have layers that are not computed return their input."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *[None] * (found.n_outputs - 1)) if found.n_outputs else hidden  # layers that were computed before say so

    idle = [layer for i, layer in enumerate(layers_of(model)) if i not in found.layers]
    for layer in idle:
        layer.forward = forward
    try:
        yield
    finally:
        for layer in idle:
            del layer.forward


def find_sure_rows(logits: torch.Tensor, top_k: int, groups: tuple[torch.Tensor, int] | None = None) -> torch.Tensor:
    """Return for which rows rounding does not change the choice of `top_k` experts by these logits [n, E]: [n] bool.

    `groups`: scores [n, groups] of groups of experts that are chosen before, and how many are. If that holds for few rows, they are the
    quarter for which it is most likely.
    """
    gaps = torch.full((len(logits),), torch.inf)
    for scores, k in ((logits, top_k), *((groups,) if groups else ())):
        if k < scores.shape[-1]:
            best = scores.sort(dim=-1, descending=True).values
            gaps = torch.minimum(gaps, (best[:, k - 1] - best[:, k]) / scores.std(dim=-1).clamp(min=1e-6))
    return gaps >= min(_SURE, float(gaps.quantile(0.75)))


def measure_difference(expected: Trace, got: Trace, sure: Mapping[int, torch.Tensor] = MappingProxyType({})) -> float:
    """Return the largest difference of a row relative to the row's largest number, or for layers to the largest that the layer added.

    `sure`: rows [n] bool of a layer that are compared, and of the logits made of the last one (not named: all).
    """
    worst, every = 0.0, torch.ones(len(expected.logits), dtype=torch.bool)
    for name, output in expected.outputs.items():
        if name not in got.outputs:
            return float("inf")
        added = output
        if "." not in name and (given := expected.inputs.get(name)) is not None and given.shape == output.shape:
            added = output - given
        rows = sure.get(int(name), every) if "." not in name else every
        worst = max(worst, _measure_difference(output[rows], got.outputs[name][rows], added[rows]))
    rows = sure.get(expected.layers[-1], every)
    return max(worst, _measure_difference(expected.logits[rows], got.logits[rows], expected.logits[rows]))


def _measure_difference(expected: torch.Tensor, got: torch.Tensor, size_of: torch.Tensor) -> float:
    sizes = size_of.abs().amax(-1)
    sizes = torch.maximum(sizes, 1e-4 * expected.abs().amax(-1))  # what a sum of float32 numbers loses
    sizes = torch.maximum(sizes, 1e-3 * sizes.max()).clamp(min=1e-6)
    return float(((got - expected).abs().amax(-1) / sizes).nan_to_num(nan=torch.inf).max())


def select_rows(trace_: Trace, rows: slice) -> Trace:
    """Select some rows of a trace."""
    inputs, outputs = ({name: x[rows] for name, x in each.items()} for each in (trace_.inputs, trace_.outputs))
    return Trace(trace_.layers, inputs, outputs, trace_.logits[rows], trace_.n_outputs)


def prepend_mates(trace_: Trace, n: int) -> Trace:
    """Repeat the first n rows in front, as those of another sequence."""
    inputs = {name: torch.cat([x[:n], x]) for name, x in trace_.inputs.items()}
    return Trace(trace_.layers, inputs, n_outputs=trace_.n_outputs)


# ------------------------------------------------------------------ transformers' own


def _get_eager_attention(module: torch.nn.Module) -> Callable[..., Any]:
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return own or AttentionInterface()["sdpa"]


def _attend_16_bits(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the family's own attention with keys and values rounded to 16 bits."""
    return _get_eager_attention(module)(module, query, key.half().float(), value.half().float(), *args, **kwargs)


# transformers' own attention, by the type of keys and values.
ATTENTION = {"float32": "eager", "float16": "ngramspec_reference_float16"}
AttentionInterface.register(ATTENTION["float16"], _attend_16_bits)
AttentionMaskInterface.register(ATTENTION["float16"], eager_mask)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Have all layers call the attention function of this name."""
    model.config._attn_implementation = model.config.get_text_config()._attn_implementation = name


def set_own_attention(model: PreTrainedModel, kv_dtype: str) -> None:
    """Have all layers call transformers' own attention, with what is kept of a token rounded to `kv_dtype`."""
    latent = [attention for _, attention in list_latent_attention(model)]
    set_attention(model, ATTENTION["float32" if latent else kv_dtype])
    for attention in latent if kv_dtype == "float16" else ():
        attention.expand_kv = partial(_expand_16_bits, type(attention).expand_kv, attention)


def _expand_16_bits(expand: Callable[..., Any], attention: torch.nn.Module, latent: torch.Tensor, turned: torch.Tensor) -> Any:
    return expand(attention, latent.half().float(), turned.half().float())


class Reference:
    """transformers' model with the first WORDS words of the vocabulary, and float32 weights in one of its layers at a time."""

    def __init__(self, model: PreTrainedModel, source: TensorSource, kv_dtype: str) -> None:
        """Make the model; `model` has the same configuration. Raises UnsupportedModelError."""
        config = model.config.to_dict()
        words = min(WORDS, config["vocab_size"])
        config |= {key: words for key in config if key.startswith("vocab_size")}
        config |= {f"{token}_token_id": 0 for token in ("pad", "bos", "eos")}  # some are too great, and some configs take no None
        self.model = empty_model(config, torch.float32).eval()
        self._source, self._n_words = source, words
        theirs = dict(model.named_buffers())
        for name, buffer in self.model.named_buffers():
            if name in theirs and buffer.shape == theirs[name].shape:  # those that a file has, and angles that it scales
                buffer.copy_(theirs[name])
        for path, module in self.model.named_modules():
            if hasattr(module, "rope_type"):
                module.rope_type = model.get_submodule(path).rope_type  # `long_rope.fix_angles` may have chosen
        inside = {id(module) for layer in layers_of(self.model) for module in layer.modules()}
        self._fill([(path, module) for path, module in self.model.named_modules() if id(module) not in inside])
        set_own_attention(self.model, kv_dtype)

    def trace(self, layer: int, texts: Sequence[CheckText], *, n_outputs: int) -> list[Trace]:
        """Trace each text through that layer alone, or after the one whose keys and values it has.

        Raises UnsupportedModelError, ModelNotFoundError.
        """
        layers = find_needed_layers(self.model, layer)
        here = [layers_of(self.model)[i] for i in layers]
        paths = {module: path for path, module in self.model.named_modules()}
        modules = [(f"{paths[each]}.{name}" if name else paths[each], module) for each in here for name, module in each.named_modules()]
        inputs = [(torch.from_numpy(text.ids).long(), text.positions) for text in texts]
        empty = [dict(module._parameters) for _, module in modules]
        self._fill(modules)
        try:
            return [trace(self.model, ids, positions, layers, n_outputs=n_outputs) for ids, positions in inputs]
        except FAILURES as error:
            name = type(self.model).__name__
            raise UnsupportedModelError(f"{name}: its layer {layer} cannot be computed and checked by itself: {error}") from error
        finally:
            for (_, module), parameters in zip(modules, empty, strict=True):
                module._parameters.update(parameters)

    @torch.no_grad()
    def _fill(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        made: dict[Any, torch.nn.Parameter] = {}
        for path, module in modules:
            for name, empty in list(module._parameters.items()):
                if empty is None:
                    continue
                if empty not in made:
                    full = f"{path}.{name}" if path else name
                    stored = self._source[full]
                    cut = stored.shape != tuple(empty.shape)
                    values = stored.read_values(0, self._n_words) if cut and len(stored.shape) == 2 else stored.float32()[: empty.shape[0]]
                    if values.shape != tuple(empty.shape):
                        raise UnsupportedModelError(f"{full} is {list(stored.shape)}, where {list(empty.shape)} was expected")
                    made[empty] = torch.nn.Parameter(torch.from_numpy(values.copy()), requires_grad=False)
                module._parameters[name] = made[empty]

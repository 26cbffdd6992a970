"""Read what a GGUF file's metadata states about its model: typed numbers, per-layer values, rotary embeddings, layers with a window.

Keys are named without the architecture in front. Whatever has the wrong type, or differs by layer where a model has one value, is refused
by key and value. The module knows the format's keys and llama.cpp's defaults for them, no architecture.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.gguf import Gguf, array_length, read_array
from ngramspec.models.tensor_source import FileTensor, WeightFile

# Most values of an array that is no vocabulary: such arrays have one value per layer.
LONGEST = 4096
SLIDING, FULL, LINEAR, CONV = "sliding_attention", "full_attention", "linear_attention", "conv"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"  # of LongRoPE's frequencies
FREQ_BASE = 10000.0  # llama.cpp's default of rope.freq_base


def read_layer_number(file: Gguf, key: str, layer: int) -> float:
    """Return a layer's number of an array, or the one that the file states for all layers. Raises UnsupportedModelError."""
    numbers = [file.metadata.get(key)] * (layer + 1)
    if key in file.metadata and numbers[0] is None and layer < array_length(file.headers[0], key) <= LONGEST:
        numbers = read_array(file, key)
    if not isinstance(number := numbers[layer], float) or not math.isfinite(number):
        raise UnsupportedModelError(f"{file.path}: {key} is {number!r:.80} for layer {layer}; accepted: a finite number")
    return number


class GgufMetadata:
    """The metadata of one file under its architecture's name."""

    def __init__(self, file: Gguf) -> None:
        self.file = file
        self.n_layers = self.get_int("block_count") - self.get_int("nextn_predict_layers", 0)
        """Layers of the model; those of prediction heads, which come after them, are not among them."""
        if not 0 < self.n_layers <= len(file.tensors):
            raise self.make_refusal("block_count", self.get_int("block_count"), f"1 to {len(file.tensors)}, by its tensors")

    def has_key(self, key: str) -> bool:
        return self._get_full_name(key) in self.file.metadata

    def is_stated(self, key: str, value: bool) -> bool:
        """Return whether the file states a truth value."""
        return self.file.metadata.get(self._get_full_name(key)) is value

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def has_attention_bias(self) -> bool:
        """Return whether a projection of attention has a bias in the first layer. Those that the file lacks are zero."""
        return any(self.has_tensor(f"blk.0.attn_{name}.bias") for name in ("q", "k", "v", "qkv", "output"))

    def has_mlp_bias(self) -> bool:
        return any(self.has_tensor(f"blk.0.ffn_{name}.bias") for name in ("gate", "up", "down"))

    def read_numbers(self, name: str, n: int) -> list[float]:
        """Read a tensor of n positive numbers. Raises UnsupportedModelError, ModelNotFoundError if the file is shorter."""
        tensor = self.file.tensors.get(name)
        if tensor is None or tensor.shape != (n,) or tensor.kind != "F32":
            found = f"{tensor.kind} {list(tensor.shape)}" if tensor else "missing"
            raise UnsupportedModelError(f"{self.file.path}: tensor {name} is {found}; accepted: F32 [{n}]")
        numbers = FileTensor(kind="F32", shape=(n,), file=WeightFile(tensor.path), offset=tensor.offset).float32()
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise UnsupportedModelError(f"{self.file.path}: tensor {name} has numbers that are not positive")
        return [float(number) for number in numbers]

    def get_int(self, key: str, default: int | None = None) -> int:
        """Return an integer. Raises UnsupportedModelError if it is none, or not there without a default."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.make_refusal(key, value, "an integer")
        return value

    def get_float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.make_refusal(key, value, "a finite number")
        return float(value)

    def get_text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.make_refusal(key, value, "a string")
        return value

    def get_per_layer(self, key: str, default: int | None = None) -> list[int]:
        """Return one integer per layer; the file may state one for all. Raises UnsupportedModelError."""
        values = self._get_array(key)
        if values is None:
            return [self.get_int(key, default)] * self.n_layers
        if len(values) < self.n_layers or not all(isinstance(value, int) for value in values):
            raise self.make_refusal(key, values, f"an integer, or {self.n_layers} of them")
        return values[: self.n_layers]

    def get_same(self, key: str, default: int | None = None) -> int:
        """Return the integer that every layer has. Raises UnsupportedModelError if layers differ."""
        values = self.get_per_layer(key, default)
        if len(set(values)) > 1:
            raise self.make_refusal(key, values, "the same for every layer")
        return values[0]

    def get_numbers(self, key: str) -> list[Any]:
        """Return the values of an array, none if the file has no such array."""
        return self._get_array(key) or []

    def get_layer_types(self, period: int, *, full_first: bool = False) -> list[str]:
        """Return each layer's type of attention: without a pattern in the file, the last of `period` layers sees all, or the first."""
        key = "attention.sliding_window_pattern"
        values = self._get_array(key)
        if values is None:
            period = self.get_int(key, period)
            full = 0 if full_first else period - 1
            slides = [period == 0 or i % period != full for i in range(self.n_layers)]
        elif len(values) < self.n_layers or not all(isinstance(value, int) for value in values):
            raise self.make_refusal(key, values, f"{self.n_layers} truth values")
        else:
            slides = [bool(value) for value in values[: self.n_layers]]
        return [SLIDING if each else FULL for each in slides]

    def get_recurrent_layers(self, period: int) -> list[str]:
        """Return each layer's type: without a list in the file, every layer whose number `period` divides is attention."""
        values = self._get_array(key := "attention.recurrent_layers")
        if values is None:
            period = self.get_int("full_attention_interval", period)
            values = [(i + 1) % max(1, period) != 0 for i in range(self.n_layers)]
        elif len(values) < self.n_layers:
            raise self.make_refusal(key, values, f"{self.n_layers} truth values")
        return [LINEAR if each else FULL for each in values[: self.n_layers]]

    def get_rope(self, base_key: str = "rope.freq_base", *, scaled: bool = True) -> dict[str, Any]:
        """Return transformers' `rope_parameters`. `scaled`: whether the file's scaling applies. Raises UnsupportedModelError."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.get_float(base_key, FREQ_BASE)}
        factor = self.get_float("rope.scaling.factor", self.get_float("rope.scale_linear", 0.0))
        kind = self.get_text("rope.scaling.type", "linear")
        accepted = ("none", "linear", "yarn", *(["longrope"] if self.has_tensor(LONG_FACTORS) else []))
        if kind not in accepted:
            raise self.make_refusal("rope.scaling.type", kind, ", ".join(accepted))
        attention_factor = self.get_float("rope.scaling.attn_factor", 1.0)
        for key, usual in (("alpha", 0.0), ("yarn_ext_factor", 1.0)):
            if (stated := self.get_float(f"rope.scaling.{key}", usual)) != usual:
                raise self.make_refusal(f"rope.scaling.{key}", stated, str(usual))
        if kind == "longrope" and factor not in (0.0, 1.0):
            raise self.make_refusal("rope.scaling.factor", factor, "1 with LongRoPE")
        if not scaled or kind in ("none", "longrope") or factor in (0.0, 1.0):
            kind = "none"
        else:
            rope |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self.get_int("rope.scaling.original_context_length", self.get_int("context_length"))
            rope["beta_fast"] = self.get_float("rope.scaling.yarn_beta_fast", 32.0)
            rope["beta_slow"] = self.get_float("rope.scaling.yarn_beta_slow", 1.0)
            if self.has_key("rope.scaling.yarn_attn_factor") or attention_factor != 1:
                usual = 1 + 0.1 * math.log(max(factor, 1.0))
                rope["attention_factor"] = attention_factor * self.get_float("rope.scaling.yarn_attn_factor", usual)
        elif scaled and attention_factor != 1 and not self.has_tensor(LONG_FACTORS):
            raise self.make_refusal("rope.scaling.attn_factor", attention_factor, "1 without YaRN")
        return rope

    def get_turned_share(self, head_dim: int, key: str = "rope.dimension_count") -> float:
        """Return which share of a head's numbers the rotary embedding turns. Raises UnsupportedModelError."""
        turned = self.get_int(key, self.get_int("rope.dimension_count", head_dim))
        if not 0 < turned <= head_dim or turned % 2:
            raise self.make_refusal(key, turned, f"an even number up to {head_dim}")
        share = turned / head_dim
        return share if int(head_dim * share) == turned else math.nextafter(share, 1)  # transformers cuts the product off

    def get_token_id(self, name: str, n_tokens: int) -> int | None:
        """Return the id of a control token such as bos; None if the file names none that exists."""
        value = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < n_tokens else None

    def make_refusal(self, key: str, value: object, accepted: str) -> UnsupportedModelError:
        told = f"{value!r:.120}"
        return UnsupportedModelError(f"{self.file.path}: {self._get_full_name(key)} is {told} by its metadata; accepted: {accepted}")

    def _get_full_name(self, key: str) -> str:
        return f"{self.file.architecture}.{key}"

    def _get(self, key: str, default: Any) -> Any:
        name = self._get_full_name(key)
        if (value := self.file.metadata.get(name)) is not None:
            return value
        if name in self.file.metadata:
            raise self.make_refusal(key, self._get_array(key), "one value")
        if default is None:
            raise UnsupportedModelError(f"{self.file.path}: its metadata lack {name}")
        return default

    def _get_array(self, key: str) -> list[Any] | None:
        """Return the values of an array; None if the file states one value, or none."""
        name = self._get_full_name(key)
        if name not in self.file.metadata or self.file.metadata[name] is not None:
            return None
        if (length := array_length(self.file.headers[0], name)) > LONGEST:
            raise UnsupportedModelError(f"{self.file.path}: {name} is an array of {length} values; accepted: up to {LONGEST}")
        return read_array(self.file, name)


def check_sections(metadata: GgufMetadata, sections: list[int], n_pairs: int, *, in_turns: bool) -> None:
    """Refuse a file whose sections of pairs, one for each dimension of an image, leave a pair to a fourth one, which text does not have.

    `in_turns`: whether each of them has every third pair.
    """
    numbers = [i % max(1, sum(sections)) for i in range(n_pairs)]
    alternate = in_turns and any(i >= 3 * sections[i % 3] for i in numbers)
    if len(sections) < 3 or any(sections[3:]) or alternate:
        raise metadata.make_refusal("rope.dimension_sections", sections, f"three that have all {n_pairs} pairs, and 0 after them")

"""Describe by name what a `LlamaDecoder` is made of: enough to build it from the weights' files alone, without transformers' modules.

The first start derives a `WeightMap` from modules that were checked against transformers (`runner`); later starts read it back as JSON.
The module knows where in a model weights are, not what is in them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ngramspec.backends.cpu.gated_delta import TAPS
from ngramspec.backends.cpu.layer_weight_map import InputNames, LayerWeightMap, layer_from_json
from ngramspec.backends.cpu.llama_layers import LatentOptions, MambaOptions, ModelOptions, RecurrentOptions, ShortConvOptions
from ngramspec.backends.cpu.recurrent_pool import StateShape


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Scaling of queries at position p by 1 + growth · log(1 + floor(p / length)), as in Llama 4 and Ministral 3."""

    growth: float
    length: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """A rotary embedding of pairs of numbers."""

    frequencies: list[float]
    """[pairs] float32: of the angles."""
    scale: float
    """Factor of cos and sin."""

    def compute_angles(self, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin [n, D] float32 of n positions from `first` on."""
        turns = np.arange(first, first + n, dtype=np.float32)[:, None] * np.array(self.frequencies, np.float32)
        both = np.concatenate([turns, turns], axis=1)
        return np.cos(both) * np.float32(self.scale), np.sin(both) * np.float32(self.scale)

    @property
    def n_pairs(self) -> int:
        """Pairs before the last ones that are not turned."""
        return int(np.flatnonzero(self.frequencies)[-1]) + 1 if any(self.frequencies) else 0


@dataclass(frozen=True, slots=True)
class WeightMap:
    layers: list[LayerWeightMap]
    embedding: str
    head: tuple[str, str | None]
    norm: str
    norm_offset: float
    """Added to the weights of norms."""
    n_kv: int
    rotaries: list[Rotary]
    options: ModelOptions
    query_scale: QueryScale | None = None
    suitable_lengths: tuple[int, int] | None = None
    """Least and greatest maximum of a text's tokens for which the rotary embeddings are meant; None: all."""
    inputs: InputNames | None = None

    def suits_length(self, max_len: int) -> bool:
        """Return whether the rotary embeddings are meant for texts of up to `max_len` tokens."""
        return self.suitable_lengths is None or self.suitable_lengths[0] <= max_len <= self.suitable_lengths[1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"options": self.options._asdict()}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> WeightMap:
        """Read a weight map back. Raises TypeError, KeyError or ValueError for a document that is none."""
        layers = [layer_from_json(layer) for layer in found["layers"]]
        weight, bias = found["head"]
        query_scale = QueryScale(**found["query_scale"]) if found["query_scale"] else None
        rotaries, options = [Rotary(**each) for each in found["rotaries"]], ModelOptions(**found["options"])
        if options.recurrent is not None:
            options = options._replace(recurrent=RecurrentOptions(*options.recurrent))
        if options.short_conv is not None:
            options = options._replace(short_conv=ShortConvOptions(*options.short_conv))
        if options.mamba is not None:
            options = options._replace(mamba=MambaOptions(*options.mamba))
        if options.latent is not None:
            options = options._replace(latent=LatentOptions(*options.latent))
        inputs = None
        if found["inputs"]:
            table, projection, norm, (of_table, of_projection, of_sum) = found["inputs"]
            inputs = InputNames(table, projection, norm, (of_table, of_projection, of_sum))
        parts = {
            "layers": layers, "head": (weight, bias), "rotaries": rotaries, "options": options, "query_scale": query_scale,
            "inputs": inputs,
        }  # fmt: skip
        return cls(**{**found, **parts})

    @property
    def has_experts(self) -> bool:
        return any(layer.experts for layer in self.layers)

    def kv_shapes(self) -> list[tuple[int, int]]:
        """Return (n_kv_heads, head_dim) per layer with attention."""
        if self.layers[0].heads is not None:
            return [layer.heads[:2] for layer in self.layers if layer.heads is not None and layer.heads.owner < 0]
        return [(self.n_kv, self.options.head_dim)] * sum(layer.attends for layer in self.layers)

    @property
    def value_dim(self) -> int:
        """Return the numbers of a value; 0: as many as a key has."""
        return self.options.latent.rank if self.options.latent else 0

    @property
    def state_shape(self) -> StateShape | None:
        """The states of recurrent layers; None if there are none."""
        n, options, conv = sum(layer.keeps_state for layer in self.layers), self.options.recurrent, self.options.short_conv
        if options is not None:
            heads = options.n_value_heads, options.key_dim, options.value_dim
            return StateShape(n, options.n_key_heads, options.n_group_channels, TAPS, *heads)
        if (mamba := self.options.mamba) is not None:
            heads = mamba.n_heads, mamba.state_size, mamba.head_dim
            return StateShape(n, mamba.n_heads // mamba.n_piece_heads, mamba.n_piece_channels, mamba.n_taps, *heads)
        return conv and StateShape(n, conv.n_channels // conv.n_group_channels, conv.n_group_channels, conv.n_taps)

    def compute_angles(self, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin [R, n, numbers that are rotated] float32 of n positions from `first` on, for R rotary embeddings."""
        cos, sin = zip(*(each.compute_angles(first, n) for each in self.rotaries), strict=True)
        if self.layers[0].heads is not None:  # what is turned, in as many places as the most of them need
            width = max(each.n_pairs for each in self.rotaries)
            cos, sin = ([np.pad(each[:, :width], ((0, 0), (0, max(0, width - each.shape[1])))) for each in both] for both in (cos, sin))
        return np.stack(cos), np.stack(sin)

    def query_scales(self, first: int, n: int) -> np.ndarray:
        """Return factors [n] float32 of the queries at n positions from `first` on; [0] if queries are not scaled."""
        if self.query_scale is None:
            return np.empty(0, np.float32)
        times = np.floor(np.arange(first, first + n, dtype=np.float32) / np.float32(self.query_scale.length))
        return np.float32(1) + np.float32(self.query_scale.growth) * np.log(np.float32(1) + times)

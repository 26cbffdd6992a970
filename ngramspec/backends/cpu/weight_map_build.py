"""Build a `LlamaDecoder` from a weight map: its weights are read from the files, packed, and put where a pass looks for them.

A `WeightMap` and the source of its tensors enter, a decoder leaves. Shapes have been checked before (`weight_map_check`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from ngramspec.backends.cpu.experts import Experts
from ngramspec.backends.cpu.layer_weight_map import (
    EndNames,
    ExpertsMap,
    InputNames,
    LatentNames,
    LayerWeightMap,
    MambaNames,
    MatrixName,
    RecurrentNames,
    name_bias,
)
from ngramspec.backends.cpu.llama_forward import LlamaDecoder
from ngramspec.backends.cpu.llama_layers import (
    ExpertNorms,
    LatentWeights,
    LayerEnd,
    LayerInputs,
    LayerWeights,
    MambaWeights,
    OutsideWeights,
    RecurrentWeights,
)
from ngramspec.backends.cpu.matmul import MatmulContext, Matrix
from ngramspec.backends.cpu.packing import PackingThreads, pack
from ngramspec.backends.cpu.weight_map import WeightMap
from ngramspec.models.expert_weights import append_rows
from ngramspec.models.tensor_source import StoredTensor, TensorSource, drop_repeats

# Returns a packed matrix by the names of its weight and its bias; gate, up and down of a layer's experts.
GetMatrix: TypeAlias = Callable[[str, str | None], Matrix]
GetExperts: TypeAlias = Callable[[ExpertsMap], Sequence[Matrix]]


def build_decoder(
    weight_map: WeightMap,
    source: TensorSource,
    context: MatmulContext,
    get_matrix: GetMatrix | None = None,
    get_experts: GetExperts | None = None,
    known: Mapping[tuple[str, str | None], Matrix] = MappingProxyType({}),
) -> LlamaDecoder:
    """Build the decoder. `get_matrix` and `get_experts` return weights that are packed already; None: pack them here, but for `known`.

    Raises ModelNotFoundError if a file has become shorter, MemoryError.
    """
    with PackingThreads() as threads:
        builder = _Builder(weight_map, source, context, known, threads)
        builder.get_matrix, builder.get_experts = get_matrix or builder.pack_matrix, get_experts or builder.pack_experts
        layers, inputs = [builder.make_layer(layer) for layer in weight_map.layers], builder.make_inputs(weight_map.inputs)
        embedding, head = builder.get_matrix(weight_map.embedding, None), builder.get_matrix(*weight_map.head)
        outside = OutsideWeights(embedding, builder.read_norm(weight_map.norm), head, inputs)
    return LlamaDecoder(
        context, layers, outside, options=weight_map.options, angles=weight_map.compute_angles, query_scales=weight_map.query_scales
    )


class _Builder:
    """Reads and packs the weights of one decoder by their names."""

    get_matrix: GetMatrix
    get_experts: GetExperts

    def __init__(
        self,
        weight_map: WeightMap,
        source: TensorSource,
        context: MatmulContext,
        known: Mapping[tuple[str, str | None], Matrix],
        threads: PackingThreads,
    ) -> None:
        self._map, self._source, self._context, self._packed, self._threads = weight_map, source, context, dict(known), threads

    # ------------------------------------------------------------------ weights by their names

    def pack_matrix(self, weight: str, bias: str | None) -> Matrix:
        """Return a matrix and its bias, packed once however many layers share it."""
        key = (weight, bias)
        if key not in self._packed:
            self._packed[key] = self._pack(self._source[weight], self._read(bias) if bias else None)
        return self._packed[key]

    def pack_experts(self, names: ExpertsMap) -> Sequence[Matrix]:
        return [self._pack(stored, bias) for stored, bias in names.weights.open(self._source)]

    def read_norm(self, name: str) -> np.ndarray:
        """Return the weights [H] of a norm, and for a LayerNorm with a bias [H] this behind them."""
        weights = self._read(name).reshape(-1)
        weights = weights + np.float32(self._map.norm_offset) if self._map.norm_offset else weights
        has_bias = self._map.options.layer_norm and name_bias(name) in self._source
        return np.concatenate([weights, self._read(name_bias(name))]) if has_bias else weights

    def _pack(self, stored: StoredTensor, bias: np.ndarray | None) -> Matrix:
        weight = pack(stored.kind, stored.shape, stored.read_rows, self._context.arena, self._threads)
        return self._context.register_matrix(weight, bias)

    def _read(self, name: str) -> np.ndarray:
        return self._source[name].float32()

    def _read_pair(self, names: Sequence[str] | None) -> tuple[np.ndarray, np.ndarray] | None:
        return (self.read_norm(names[0]), self.read_norm(names[1])) if names else None

    def _select(self, name: MatrixName) -> Matrix:
        """Return the rows of a matrix that belong to it; of repeated ones the first."""
        stored = self._source[name.weight]
        if (unrepeated := drop_repeats(stored)) is not stored:
            return self._pack(unrepeated, None)
        whole = self.get_matrix(name.weight, name.bias)
        return self._context.select_rows(whole, name.first, name.end) if name.end else whole

    # ------------------------------------------------------------------ parts of a decoder

    def make_layer(self, layer: LayerWeightMap) -> LayerWeights:
        return LayerWeights(
            matrices=tuple(self._select(name) for name in layer.matrices),
            norms=self._read_pair(layer.norms),
            head_norms=self._read_pair(layer.head_norms),
            window=layer.window,
            rotary=layer.rotary,
            experts=self._make_experts(layer.experts) if layer.experts else None,
            sinks=self._read(layer.sinks) if layer.sinks else None,
            post_norms=self._read_pair(layer.post_norms),
            recurrent=self._make_recurrent(layer.recurrent) if layer.recurrent else None,
            short_conv=self._read(layer.short_conv)[:, 0].T if layer.short_conv else None,
            mamba=self._make_mamba(layer.mamba) if layer.mamba else None,
            beside=tuple(self._select(name) for name in layer.beside or ()),
            heads=layer.heads,
            end=self._make_end(layer.end) if layer.end else None,
            latent=self._make_latent(layer.latent) if layer.latent else None,
        )

    def make_inputs(self, names: InputNames | None) -> LayerInputs | None:
        if names is None:
            return None
        table, projection = self.get_matrix(names.table, None), self.get_matrix(names.projection, None)
        return LayerInputs(table, projection, self.read_norm(names.norm), names.factors)

    def _make_experts(self, names: ExpertsMap) -> Experts:
        router, bias = self._source[names.router[0]], self._read(names.router[1]) if names.router[1] else None
        gate, *rest = self.get_experts(names)
        up, down = rest if names.weights.gated else (gate, *rest)
        last = self._pack(append_rows(router, self._source[names.shared_gate]) if names.shared_gate else router, bias)
        correction = self._read(names.correction).reshape(-1) if names.correction else None
        return Experts(
            (gate, up, down, last), router.shape[0], names.top_k, names.scoring, names.normalise, names.scale, correction, names.shared,
            names.activation, names.groups,
        )  # fmt: skip

    def _make_recurrent(self, names: RecurrentNames) -> RecurrentWeights:
        conv = drop_repeats(self._source[names.conv]).float32()[:, 0].T
        bias, norm = self._read(names.decay_bias), self._read(names.norm)
        return RecurrentWeights(self.get_matrix(names.decay_gate, None), conv, self._read_decay(names.decay), bias, norm)

    def _make_mamba(self, names: MambaNames) -> MambaWeights:
        options = self._map.options.mamba
        assert options is not None
        conv = self._read(names.conv)[:, 0].T * options.conv_factors
        bias = self._read(names.conv_bias) if names.conv_bias else np.zeros(conv.shape[1], np.float32)
        norm = self._read(names.norm) if names.norm else np.ones(options.n_inner, np.float32)
        rest = self._read(names.step_bias), self._read(names.skip), norm
        return MambaWeights(np.concatenate([conv, bias[None]]), self._read_decay(names.decay), *rest)

    def _read_decay(self, name: str) -> np.ndarray:
        """Return -exp of a weight, computed in float64."""
        return (-np.exp(self._read(name).astype(np.float64))).astype(np.float32)

    def _make_end(self, names: EndNames) -> LayerEnd:
        end = LayerEnd(float(self._read(names.scale)[0]) if names.scale else 1.0)
        if names.gate and names.projection and names.norm:
            gate, projection = self.get_matrix(names.gate, None), self.get_matrix(names.projection, None)
            end = end._replace(gate=gate, projection=projection, norm=self.read_norm(names.norm))
        if names.experts:
            router, *rest = (self.read_norm(name) for name in names.experts)
            end = end._replace(experts=ExpertNorms(router * np.float32(len(router) ** -0.5), *rest))
        return end

    def _make_latent(self, names: LatentNames) -> LatentWeights:
        query_norm = self._read(names.query_norm) if names.query_norm else None
        queries = self._select(names.queries) if names.queries else None
        return LatentWeights(queries, self.get_matrix(names.keys, None), query_norm, self._read(names.norm))

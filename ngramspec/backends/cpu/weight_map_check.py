"""Check that the weights that a weight map names have the shapes in which a pass uses them: the pass reads addresses unchecked.

A `WeightMap` and the source of its tensors enter; ValueError or KeyError says what does not fit. No weights are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from ngramspec.backends.cpu.codegen.simd import PARTS
from ngramspec.backends.cpu.experts import NO_SHARED, SHARED_BY_GATE
from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.gated_delta import TAPS
from ngramspec.backends.cpu.layer_weight_map import (
    EndNames,
    ExpertsMap,
    LatentNames,
    LayerWeightMap,
    MambaNames,
    MatrixName,
    RecurrentNames,
    name_bias,
)
from ngramspec.backends.cpu.llama_layers import NO_ROTARY, LayerHeads
from ngramspec.backends.cpu.weight_map import WeightMap
from ngramspec.models.tensor_source import TensorSource


def check_weight_map(weight_map: WeightMap, source: TensorSource) -> None:
    """Raise ValueError or KeyError unless every weight has the shape in which a pass uses it."""
    check = _Check(weight_map, source)
    check.check_outside()
    for layer in weight_map.layers:
        check.check_layer(layer)
    check.compare_shapes()
    check.check_alike()
    check.check_varied()
    check.compare_shapes()


class _Check:
    """Collects the shapes that weights must have (`want`), and compares them (`compare_shapes`). All methods raise ValueError, KeyError."""

    def __init__(self, weight_map: WeightMap, source: TensorSource) -> None:
        self._map, self._source, self._options = weight_map, source, weight_map.options
        self._vocab, self._hidden = source[weight_map.embedding].shape
        self._n_heads, self._head_dim = self._options.n_heads, self._options.head_dim
        self._mixed = self._n_heads * self._head_dim
        self._wanted: list[tuple[str, tuple[int, ...]]] = []

    def _want(self, name: str | None, *shape: int) -> None:
        """Note the shape that a weight must have, if there is one."""
        if name is not None:
            self._wanted.append((name, shape))

    def _want_matrix(self, matrix: MatrixName, n_out: int, n_in: int) -> None:
        if matrix.end:
            n = self._source[matrix.weight].shape[0]
            if matrix.end - matrix.first != n_out or matrix.end > n or matrix.first % WIDTH or (matrix.end % WIDTH and matrix.end < n):
                raise ValueError(f"rows {matrix.first} to {matrix.end} of {n} of {matrix.weight}, and {n_out} are wanted")
            n_out = n
        self._want(matrix.weight, n_out, n_in)
        self._want(matrix.bias, n_out)

    def _want_norms(self, names: Iterable[str]) -> None:
        for name in names:
            self._want(name, self._hidden)
            if self._options.layer_norm and name_bias(name) in self._source:
                self._want(name_bias(name), self._hidden)

    def compare_shapes(self) -> None:
        """Compare what is wanted so far with what there is."""
        for name, shape in self._wanted:
            if (found := self._source[name].shape) != shape:
                raise ValueError(f"{name} is {list(found)}, and {list(shape)} is wanted")
        self._wanted.clear()

    # ------------------------------------------------------------------ all models

    def check_outside(self) -> None:
        options = self._options
        if sum(each is not None for each in (options.recurrent, options.short_conv, options.mamba)) > 1:
            raise ValueError("recurrent layers of several kinds")
        self._want_norms([self._map.norm])
        self._want_matrix(MatrixName(*self._map.head), self._source[self._map.head[0]].shape[0], self._hidden)

    def check_layer(self, layer: LayerWeightMap) -> None:
        if (layer.latent is not None) != (self._options.latent is not None):
            raise ValueError("latent attention in some layers only, or without its options")
        if layer.latent is not None:
            self._check_latent(layer, layer.latent)
        else:
            inputs, n_mixed = self._list_mixer_inputs(layer)
            shapes = (*((n_out, self._hidden) for n_out in inputs), (self._hidden, n_mixed))
            for matrix, shape in zip(layer.mixer, shapes, strict=bool(layer.mixer) or layer.keeps_state):
                self._want_matrix(matrix, *shape)
        self._check_mlp(layer)
        self._want_norms(chain(layer.norms or (), layer.post_norms or ()))
        head_dim, n_kv = (layer.heads.head_dim, layer.heads.n_kv) if layer.heads else (self._head_dim, self._map.n_kv)
        for name, n_heads in zip(layer.head_norms or (), (self._n_heads, n_kv), strict=False):
            if self._options.centred_heads:
                self._want(name, n_heads, head_dim)
            else:  # of all heads together, or the same for each
                self._want(name, n_heads * head_dim if self._source[name].shape == (n_heads * head_dim,) else head_dim)
        self._want(layer.sinks, self._n_heads)

    def _list_mixer_inputs(self, layer: LayerWeightMap) -> tuple[tuple[int, ...], int]:
        """Return the rows of the matrices that attention, or what stands in its place, multiplies hidden states by, and its outputs."""
        if layer.recurrent is not None:
            return self._check_recurrent(layer.recurrent), self._mixed
        if layer.short_conv is not None:
            return self._check_short_conv(layer.short_conv), self._mixed
        if layer.mamba is not None:
            inputs = self._check_mamba(layer.mamba)
            if layer.beside is None:
                return inputs, inputs[0]
            shapes = (*((n_out, self._hidden) for n_out in inputs), (self._hidden, inputs[0]))
            for matrix, shape in zip(layer.beside, shapes, strict=True):
                self._want_matrix(matrix, *shape)
        if (heads := layer.heads) is not None:
            mixed, kv = self._n_heads * heads.head_dim, heads.n_kv * heads.head_dim
            return (mixed, kv, kv)[: heads.n_projections], mixed
        kv = self._map.n_kv * self._head_dim
        return (self._mixed * (1 + self._options.gated), kv, kv), self._mixed

    def _check_mlp(self, layer: LayerWeightMap) -> None:
        mlp = layer.matrices[len(layer.mixer) :]
        if mlp:
            if len(mlp) not in (2, 3):
                raise ValueError(f"an MLP of {len(mlp)} matrices")
            inner = self._source[mlp[-1].weight].shape[1]
            for matrix in mlp[:-1]:
                self._want_matrix(matrix, inner, self._hidden)
            self._want_matrix(mlp[-1], self._hidden, inner)
        elif not layer.mixer or (layer.experts is not None and layer.experts.shared != NO_SHARED):
            raise ValueError("a layer lacks an MLP")
        if layer.experts:
            self._check_experts(layer.experts)

    def _check_experts(self, names: ExpertsMap) -> None:
        n_experts, (n_groups, top_groups, pairs) = self._source[names.weights.gate_up[0]].shape[0], names.groups
        size = n_experts // max(1, n_groups)
        if not 0 < top_groups <= n_groups or n_experts % n_groups or top_groups * size < names.top_k or size < 1 + pairs:
            raise ValueError(f"{names.top_k} experts of {top_groups} of {n_groups} groups, of {n_experts} experts")
        if not 0 < names.top_k <= n_experts or (names.shared_gate is None) == (names.shared == SHARED_BY_GATE):
            raise ValueError(f"{names.top_k} of {n_experts} experts, or a shared one without its gate")
        for name, shape in names.weights.list_shapes(self._source, self._hidden):
            self._want(name, *shape)
        router, bias = names.router
        self._want(router, n_experts, self._hidden)
        self._want(bias, n_experts)
        if names.correction:  # [E], or [1, E]
            self._want(names.correction, *self._source[names.correction].shape[:-1], n_experts)
        self._want(names.shared_gate, 1, self._hidden)

    def check_alike(self) -> None:
        """Check what has to be the same in all layers of a kind."""
        layers = self._map.layers
        pairs = [norms for layer in layers for norms in (layer.norms, layer.head_norms, layer.post_norms) if norms is not None]
        attending = [layer for layer in layers if layer.attends]
        if self._options.centred_heads and any(layer.head_norms is None for layer in attending):
            raise ValueError("heads without norms")
        alike = {(layer.norms is None, layer.post_norms is None) for layer in layers}
        alike_heads = {(layer.sinks is None, layer.head_norms is None) for layer in attending}
        turned = all(NO_ROTARY <= layer.rotary < len(self._map.rotaries) for layer in layers)
        n_rotated = {2 * len(each.frequencies) for each in self._map.rotaries} if layers[0].heads is None else {self._head_dim}
        alike_in_kind = len(alike) == len(alike_heads) == 1
        fits = n_rotated == {self._options.n_rotated or self._head_dim}
        beside = {(layer.beside is not None, layer.beside is not None and layer.mamba is not None) for layer in layers}
        if beside != {(self._options.beside,) * 2} or (self._options.beside and any(layer.experts or layer.post_norms for layer in layers)):
            raise ValueError("Mamba-2 beside attention in some layers only, or beside what it is not computed with")
        if any(len(pair) != 2 for pair in pairs) or not alike_in_kind or not turned or not fits:
            raise ValueError("norms or rotary embeddings do not fit each other")
        if self._n_heads % self._map.n_kv or self._vocab < 1:
            raise ValueError(f"{self._n_heads} heads, {self._map.n_kv} of keys, and {self._vocab} tokens")

    # ------------------------------------------------------------------ layers in place of attention

    def _check_recurrent(self, names: RecurrentNames) -> tuple[int, int, int]:
        """Check a recurrent layer; return the rows of its three matrices."""
        options = self._options.recurrent
        if options is None or options.n_value_heads % options.n_key_heads:
            raise ValueError("a recurrent layer without its options, or with heads that do not fit each other")
        heads, mixed = options.n_value_heads, options.n_value_heads * options.value_dim
        if mixed != self._mixed:
            raise ValueError(f"recurrent layers of {mixed} outputs, and {self._n_heads} heads of {self._head_dim}")
        n_repeated = options.n_channels + 2 * (heads - options.n_key_heads) * options.key_dim * options.tiled
        self._want(names.decay_gate, heads, self._hidden)
        self._want(names.conv, n_repeated, 1, TAPS)
        self._want(names.decay, heads)
        self._want(names.decay_bias, heads)
        self._want(names.norm, options.value_dim)
        return n_repeated, mixed, heads

    def _check_short_conv(self, conv: str) -> tuple[int, int, int]:
        """Check a layer with a short convolution; return the rows of its three matrices."""
        options, hidden = self._options.short_conv, self._hidden
        if options is None or options.n_taps < 1 or not options.n_channels == hidden == self._mixed:
            raise ValueError(f"short convolutions {options}, and {self._n_heads} heads of {self._head_dim}")
        self._want(conv, hidden, 1, options.n_taps)
        return hidden, hidden, hidden

    def _check_mamba(self, names: MambaNames) -> tuple[int, int, int]:
        """Check a layer with Mamba-2; return the rows of its three matrices."""
        options, mixed = self._options.mamba, self._mixed
        if options is None:
            raise ValueError("layers with Mamba-2 without their options")
        fits = min(options[:5]) > 0 and options.n_heads % options.n_groups == 0 and options.state_size % PARTS == 0 and options.n_taps > 1
        if not fits or (options.n_inner != mixed and (options.n_inner % DEPTH or mixed % DEPTH)):
            raise ValueError(f"layers with Mamba-2 {options}, beside {self._n_heads} heads of {self._head_dim}")
        self._want(names.conv, options.n_channels, 1, options.n_taps)
        self._want(names.conv_bias, options.n_channels)
        for name in (names.decay, names.step_bias, names.skip):
            self._want(name, options.n_heads)
        self._want(names.norm, options.n_inner)
        return options.n_inner, options.n_channels, options.n_heads

    def _check_latent(self, layer: LayerWeightMap, names: LatentNames) -> None:
        options, n_heads, hidden = self._options.latent, self._n_heads, self._hidden
        assert options is not None
        rank, plain, turned, value_dim, query_rank, _ = options
        fits = min(options[:4]) > 0 and not (rank % DEPTH or plain % DEPTH or query_rank % DEPTH or value_dim % WIDTH or turned % 2)
        fits = fits and self._map.n_kv == 1 and self._head_dim == rank + turned and self._options.n_rotated == turned
        fits = fits and layer.rotary != NO_ROTARY and (query_rank > 0) == (names.queries is not None)
        if not fits or not layer.mixer or layer.keeps_state:
            raise ValueError(f"latent attention {options} of {n_heads} heads")
        n_queries = n_heads * (plain + turned)
        of_queries, of_keys, of_values, out = layer.mixer
        self._want_matrix(of_queries, query_rank or n_queries, hidden)
        self._want_matrix(of_keys, rank + turned, hidden)
        self._want_matrix(out, hidden, n_heads * value_dim)
        if names.queries is not None:
            self._want_matrix(names.queries, n_queries, query_rank)
        self._want(of_values.weight, n_heads, value_dim, rank)
        self._want(names.keys, n_heads, rank, plain)
        self._want(names.norm, rank)
        self._want(names.query_norm, query_rank)

    # ------------------------------------------------------------------ layers with heads of their own, and ends

    def check_varied(self) -> None:
        """Check what layers with heads of their own, with ends and with inputs have."""
        layers, inputs = self._map.layers, self._map.inputs
        if len({layer.heads is None for layer in layers}) > 1 or (layers[0].heads and layers[0].heads.owner >= 0):
            raise ValueError("heads differ in some layers only, or the first layer has no keys")
        for i, layer in enumerate(layers):
            if layer.heads is not None:
                self._check_heads(i, layer, layer.heads)
            if layer.end is not None:
                self._check_end(i, layer, layer.end)
        if inputs is not None:
            if any(layer.end is None or layer.end.gate is None for layer in layers):
                raise ValueError("inputs of tokens to some layers only")
            n_all = len(layers) * self._source[inputs.norm].shape[0]
            self._want(inputs.table, self._vocab, n_all)
            self._want(inputs.projection, n_all, self._hidden)

    def _check_heads(self, i: int, layer: LayerWeightMap, heads: LayerHeads) -> None:
        n_heads = self._n_heads
        owner = self._map.layers[heads.owner].heads if 0 <= heads.owner < i else heads if heads.owner < 0 else None
        fits = 0 < heads.head_dim <= self._head_dim and n_heads * heads.head_dim % DEPTH == 0 and heads.n_kv > 0
        fits = fits and n_heads % heads.n_kv == 0
        turned = layer.rotary != NO_ROTARY and 0 <= 2 * heads.n_pairs <= heads.head_dim and layer.head_norms is not None
        turned = turned and heads.n_pairs <= max(each.n_pairs for each in self._map.rotaries)
        if not fits or not turned or owner is None or owner.owner >= 0 or owner[:2] != heads[:2] or layer.keeps_state:
            raise ValueError(f"layer {i} with heads {heads}, and {n_heads} of queries")

    def _check_end(self, i: int, layer: LayerWeightMap, end: EndNames) -> None:
        source, inputs, hidden = self._source, self._map.inputs, self._hidden
        n_inputs = source[end.norm and inputs.norm].shape[0] if end.norm and inputs else 0
        if (end.gate is None) != (n_inputs == 0) or (end.experts is None) != (layer.experts is None) or (end.experts and end.gate):
            raise ValueError(f"layer {i} has an end {end}")
        if (n_inner := source[layer.matrices[-1].weight].shape[1]) % DEPTH:
            raise ValueError(f"layer {i} has an MLP of {n_inner} numbers")
        if layer.post_norms is None or self._options.layer_norm or not layer.mixer or not layer.matrices[len(layer.mixer) :]:
            raise ValueError(f"layer {i} has an end, but no attention or no MLP with norms after them")
        self._want(end.scale, 1)
        self._want(end.gate, n_inputs, hidden)
        self._want(end.projection, hidden, n_inputs)
        self._want(end.norm, hidden)
        if end.experts is not None and layer.experts is not None:
            *of_rows, scales = end.experts
            for name in of_rows:
                self._want(name, hidden)
            self._want(scales, source[layer.experts.router[0]].shape[0])

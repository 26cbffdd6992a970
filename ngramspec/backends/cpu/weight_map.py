"""Describe by name what a `LlamaDecoder` is made of: enough to build it from the weights' files alone, without transformers' modules.

The first start derives a `WeightMap` from modules that were checked against transformers (`runner`); later starts read it back as JSON.
The module knows where in a model weights are, not what is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ngramspec.backends.cpu.codegen.simd import PARTS
from ngramspec.backends.cpu.experts import NO_SHARED, SHARED_BY_GATE, Experts
from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.gated_delta import TAPS
from ngramspec.backends.cpu.layer_weight_map import (
    EndNames,
    ExpertsMap,
    InputNames,
    LatentNames,
    LayerWeightMap,
    MambaNames,
    MatrixName,
    RecurrentNames,
    layer_from_json,
)
from ngramspec.backends.cpu.llama_forward import LlamaDecoder
from ngramspec.backends.cpu.llama_layers import (
    NO_ROTARY,
    ExpertNorms,
    LatentOptions,
    LatentWeights,
    LayerEnd,
    LayerInputs,
    LayerWeights,
    MambaOptions,
    MambaWeights,
    ModelOptions,
    OutsideWeights,
    RecurrentOptions,
    RecurrentWeights,
    ShortConvOptions,
)
from ngramspec.backends.cpu.matmul import MatmulContext, Matrix
from ngramspec.backends.cpu.packing import pack
from ngramspec.backends.cpu.recurrent_pool import StateShape
from ngramspec.models.expert_weights import append_rows
from ngramspec.models.tensor_source import StoredTensor, TensorSource, drop_repeats


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

    def angles(self, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
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

    def check(self, source: TensorSource) -> None:
        """Raise ValueError or KeyError unless every weight has the shape in which a pass uses it: the pass reads addresses unchecked."""
        vocab, hidden = source[self.embedding].shape
        n_heads, head_dim = self.options.n_heads, self.options.head_dim
        if sum(each is not None for each in (self.options.recurrent, self.options.short_conv, self.options.mamba)) > 1:
            raise ValueError("recurrent layers of several kinds")
        mixed, kv = n_heads * head_dim, self.n_kv * head_dim
        wanted: list[tuple[str | None, tuple[int, ...]]] = [(self.norm, (hidden,))]

        def want(matrix: MatrixName, n_out: int, n_in: int) -> None:
            if matrix.end:
                n = source[matrix.weight].shape[0]
                if matrix.end - matrix.first != n_out or matrix.end > n or matrix.first % WIDTH or (matrix.end % WIDTH and matrix.end < n):
                    raise ValueError(f"rows {matrix.first} to {matrix.end} of {n} of {matrix.weight}, and {n_out} are wanted")
                n_out = n
            wanted.extend([(matrix.weight, (n_out, n_in)), (matrix.bias, (n_out,))])

        want(MatrixName(*self.head), source[self.head[0]].shape[0], hidden)
        for layer in self.layers:
            mixer, mlp = layer.mixer, layer.matrices[len(layer.mixer) :]
            sizes: tuple[int, ...] = (mixed * (1 + self.options.gated), kv, kv)
            n_mixed, head_size, n_kv = mixed, head_dim, self.n_kv
            if layer.heads is not None:
                n_kv, head_size = layer.heads.n_kv, layer.heads.head_dim
                n_mixed = n_heads * head_size
                sizes = (n_mixed, n_kv * head_size, n_kv * head_size)[: layer.heads.n_projections]
            if layer.recurrent is not None:
                sizes = self._check_recurrent(layer.recurrent, wanted, hidden)
            if layer.short_conv is not None:
                sizes = self._check_short_conv(layer.short_conv, wanted, hidden)
            if layer.mamba is not None:
                sizes = self._check_mamba(layer.mamba, wanted)
                n_mixed = sizes[0]
            shapes = (*((n_out, hidden) for n_out in sizes), (hidden, n_mixed))
            if (layer.latent is not None) != (self.options.latent is not None):
                raise ValueError("latent attention in some layers only, or without its options")
            if layer.latent is not None:
                self._check_latent(layer, wanted, want, hidden)
            else:
                for matrix, of_matrix in zip(mixer, shapes, strict=bool(mixer) or layer.keeps_state):
                    want(matrix, *of_matrix)
            if mlp:
                if len(mlp) not in (2, 3):
                    raise ValueError(f"an MLP of {len(mlp)} matrices")
                inner = source[mlp[-1].weight].shape[1]
                for matrix in mlp[:-1]:
                    want(matrix, inner, hidden)
                want(mlp[-1], hidden, inner)
            elif not mixer or (layer.experts is not None and layer.experts.shared != NO_SHARED):
                raise ValueError("a layer lacks an MLP")
            if layer.experts:
                wanted.extend(_list_expert_shapes(layer.experts, source, hidden))
            wanted.extend((name, (hidden,)) for name in (*(layer.norms or ()), *(layer.post_norms or ())))
            heads = zip(layer.head_norms or (), (n_heads * head_size, n_kv * head_size), strict=False)
            apart = self.options.centred_heads
            wanted.extend(
                (name, (n // head_size, head_size) if apart else (n,) if source[name].shape == (n,) else (head_size,)) for name, n in heads
            )
            wanted.append((layer.sinks, (n_heads,)))
        plain = [self.norm, *(name for layer in self.layers for name in (*(layer.norms or ()), *(layer.post_norms or ())))]
        wanted.extend((_name_bias(name), (hidden,)) for name in plain if self.options.layer_norm and _name_bias(name) in source)
        for name, shape in wanted:
            if name is not None and source[name].shape != shape:
                raise ValueError(f"{name} is {list(source[name].shape)}, and {list(shape)} is wanted")
        pairs = [norms for layer in self.layers for norms in (layer.norms, layer.head_norms, layer.post_norms) if norms is not None]
        attending = [layer for layer in self.layers if layer.attends]
        if self.options.centred_heads and any(layer.head_norms is None for layer in attending):
            raise ValueError("heads without norms")
        alike = {(layer.norms is None, layer.post_norms is None) for layer in self.layers}
        alike_heads = {(layer.sinks is None, layer.head_norms is None) for layer in attending}
        turned = all(NO_ROTARY <= layer.rotary < len(self.rotaries) for layer in self.layers)
        n_rotated = {2 * len(each.frequencies) for each in self.rotaries} if self.layers[0].heads is None else {head_dim}
        alike_in_kind = len(alike) == len(alike_heads) == 1
        if any(len(pair) != 2 for pair in pairs) or not alike_in_kind or not turned or n_rotated != {self.options.n_rotated or head_dim}:
            raise ValueError("norms or rotary embeddings do not fit each other")
        if n_heads % self.n_kv or vocab < 1:
            raise ValueError(f"{n_heads} heads, {self.n_kv} of keys, and {vocab} tokens")

        self._check_varied(source, hidden, vocab)

    def _check_varied(self, source: TensorSource, hidden: int, vocab: int) -> None:
        """Check what layers with heads of their own and ends have. Raises ValueError."""
        n_heads, most, n = self.options.n_heads, self.options.head_dim, len(self.layers)
        if len({layer.heads is None for layer in self.layers}) > 1 or (self.layers[0].heads and self.layers[0].heads.owner >= 0):
            raise ValueError("heads differ in some layers only, or the first layer has no keys")
        wanted: list[tuple[str | None, tuple[int, ...]]] = []
        for i, layer in enumerate(self.layers):
            if (heads := layer.heads) is not None:
                owner = self.layers[heads.owner].heads if 0 <= heads.owner < i else heads if heads.owner < 0 else None
                fits = 0 < heads.head_dim <= most and n_heads * heads.head_dim % DEPTH == 0 and heads.n_kv > 0 and n_heads % heads.n_kv == 0
                turned = layer.rotary != NO_ROTARY and 0 <= 2 * heads.n_pairs <= heads.head_dim and layer.head_norms is not None
                turned = turned and heads.n_pairs <= max(each.n_pairs for each in self.rotaries)
                if not fits or not turned or owner is None or owner.owner >= 0 or owner[:2] != heads[:2] or layer.keeps_state:
                    raise ValueError(f"layer {i} with heads {heads}, and {n_heads} of queries")
            if (end := layer.end) is None:
                continue
            n_inputs = source[end.norm and self.inputs.norm].shape[0] if end.norm and self.inputs else 0
            if (end.gate is None) != (n_inputs == 0) or (end.experts is None) != (layer.experts is None) or (end.experts and end.gate):
                raise ValueError(f"layer {i} has an end {end}")
            if source[layer.matrices[-1].weight].shape[1] % DEPTH:
                raise ValueError(f"layer {i} has an MLP of {source[layer.matrices[-1].weight].shape[1]} numbers")
            if layer.post_norms is None or self.options.layer_norm or not layer.mixer or not layer.matrices[len(layer.mixer) :]:
                raise ValueError(f"layer {i} has an end, but no attention or no MLP with norms after them")
            wanted += [(end.scale, (1,)), (end.gate, (n_inputs, hidden)), (end.projection, (hidden, n_inputs)), (end.norm, (hidden,))]
            if end.experts is not None and layer.experts is not None:
                *of_rows, scales = end.experts
                wanted += [*((name, (hidden,)) for name in of_rows), (scales, source[layer.experts.router[0]].shape[:1])]
        if self.inputs is not None:
            if any(layer.end is None or layer.end.gate is None for layer in self.layers):
                raise ValueError("inputs of tokens to some layers only")
            n_all = n * source[self.inputs.norm].shape[0]
            wanted += [(self.inputs.table, (vocab, n_all)), (self.inputs.projection, (n_all, hidden))]
        for name, shape in wanted:
            if name is not None and source[name].shape != shape:
                raise ValueError(f"{name} is {list(source[name].shape)}, and {list(shape)} is wanted")

    def _check_recurrent(
        self, names: RecurrentNames, wanted: list[tuple[str | None, tuple[int, ...]]], hidden: int
    ) -> tuple[int, int, int]:
        """Add what a recurrent layer's weights must be to `wanted`; return the rows of its three matrices. Raises ValueError."""
        options = self.options.recurrent
        if options is None or options.n_value_heads % options.n_key_heads:
            raise ValueError("a recurrent layer without its options, or with heads that do not fit each other")
        mixed = options.n_value_heads * options.value_dim
        if mixed != self.options.n_heads * self.options.head_dim:
            raise ValueError(f"recurrent layers of {mixed} outputs, and {self.options.n_heads} heads of {self.options.head_dim}")
        heads, n_repeated = (options.n_value_heads,), options.n_channels
        if options.tiled:
            n_repeated += 2 * (options.n_value_heads - options.n_key_heads) * options.key_dim
        wanted += [
            (names.decay_gate, (*heads, hidden)), (names.conv, (n_repeated, 1, TAPS)), (names.decay, heads),
            (names.decay_bias, heads), (names.norm, (options.value_dim,)),
        ]  # fmt: skip
        return n_repeated, mixed, options.n_value_heads

    def _check_short_conv(self, conv: str, wanted: list[tuple[str | None, tuple[int, ...]]], hidden: int) -> tuple[int, int, int]:
        """Add what a short convolution's weights must be to `wanted`; return the rows of its three matrices. Raises ValueError."""
        options, mixed = self.options.short_conv, self.options.n_heads * self.options.head_dim
        if options is None or options.n_taps < 1 or not options.n_channels == hidden == mixed:
            raise ValueError(f"short convolutions {options}, and {self.options.n_heads} heads of {self.options.head_dim}")
        wanted.append((conv, (hidden, 1, options.n_taps)))
        return hidden, hidden, hidden

    def _check_mamba(self, names: MambaNames, wanted: list[tuple[str | None, tuple[int, ...]]]) -> tuple[int, int, int]:
        """Add what the weights of a layer with Mamba-2 must be to `wanted`; return the rows of its three matrices. Raises ValueError."""
        options, mixed = self.options.mamba, self.options.n_heads * self.options.head_dim
        if options is None:
            raise ValueError("layers with Mamba-2 without their options")
        fits = min(options[:5]) > 0 and options.n_heads % options.n_groups == 0 and options.state_size % PARTS == 0 and options.n_taps > 1
        if not fits or (options.n_inner != mixed and (options.n_inner % DEPTH or mixed % DEPTH)):
            raise ValueError(f"layers with Mamba-2 {options}, beside {self.options.n_heads} heads of {self.options.head_dim}")
        heads, n_channels = (options.n_heads,), options.n_channels
        wanted += [
            (names.conv, (n_channels, 1, options.n_taps)), (names.conv_bias, (n_channels,)), (names.decay, heads),
            (names.step_bias, heads), (names.skip, heads), (names.norm, (options.n_inner,)),
        ]  # fmt: skip
        return options.n_inner, n_channels, options.n_heads

    def _check_latent(
        self, layer: LayerWeightMap, wanted: list[tuple[str | None, tuple[int, ...]]], want: Callable[[MatrixName, int, int], None],
        hidden: int,
    ) -> None:  # fmt: skip
        """Add what the weights of a layer with latent attention must be to `wanted`. Raises ValueError."""
        options, names, n_heads = self.options.latent, layer.latent, self.options.n_heads
        assert options is not None
        assert names is not None
        rank, plain, turned, value_dim, query_rank, _ = options
        fits = min(options[:4]) > 0 and not (rank % DEPTH or plain % DEPTH or query_rank % DEPTH or value_dim % WIDTH or turned % 2)
        fits = fits and self.n_kv == 1 and self.options.head_dim == rank + turned and self.options.n_rotated == turned
        if not fits or layer.rotary == NO_ROTARY or (query_rank > 0) != (names.queries is not None) or not layer.mixer:
            raise ValueError(f"latent attention {options} of {n_heads} heads")
        n_queries = n_heads * (plain + turned)
        want(layer.matrices[0], query_rank or n_queries, hidden)
        want(layer.matrices[1], rank + turned, hidden)
        want(layer.matrices[3], hidden, n_heads * value_dim)
        if names.queries is not None:
            want(names.queries, n_queries, query_rank)
        wanted += [
            (layer.matrices[2].weight, (n_heads, value_dim, rank)), (names.keys, (n_heads, rank, plain)), (names.norm, (rank,)),
            (names.query_norm, (query_rank,)),
        ]  # fmt: skip

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

    def angles(self, first: int, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin [R, n, numbers that are rotated] float32 of n positions from `first` on, for R rotary embeddings."""
        cos, sin = zip(*(each.angles(first, n) for each in self.rotaries), strict=True)
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

    def build(
        self,
        source: TensorSource,
        context: MatmulContext,
        matrix: Callable[[str, str | None], Matrix] | None = None,
        experts: Callable[[ExpertsMap], Sequence[Matrix]] | None = None,
        known: Mapping[tuple[str, str | None], Matrix] = MappingProxyType({}),
    ) -> LlamaDecoder:
        """Build the decoder; `matrix` returns weights that are packed already, by the names of weight and bias, and `experts`
        gate, up and down of a layer's experts (None: pack them here, but for those `known`).

        Raises ModelNotFoundError if a file has become shorter, MemoryError.
        """
        packed = dict(known)

        def of(weight: str, bias: str | None) -> Matrix:
            key = (weight, bias)
            if key not in packed:
                stored = source[weight]
                values = source[bias].float32() if bias else None
                packed[key] = context.matrix(pack(stored.kind, stored.shape, stored.rows, context.arena), values)
            return packed[key]

        def of_experts(found: ExpertsMap) -> Sequence[Matrix]:
            return [pack_stored(stored, bias) for stored, bias in found.weights.open(source)]

        def pack_stored(stored: StoredTensor, bias: np.ndarray | None) -> Matrix:
            return context.matrix(pack(stored.kind, stored.shape, stored.rows, context.arena), bias)

        def make_experts(found: ExpertsMap) -> Experts:
            router, bias = source[found.router[0]], source[found.router[1]].float32() if found.router[1] else None
            gate, *rest = (experts or of_experts)(found)
            up, down = rest if found.weights.gated else (gate, *rest)
            last = pack_stored(append_rows(router, source[found.shared_gate]) if found.shared_gate else router, bias)
            return Experts(
                (gate, up, down, last), router.shape[0], found.top_k, found.scoring, found.normalise, found.scale,
                source[found.correction].float32().reshape(-1) if found.correction else None, found.shared, found.activation,
                found.groups,
            )  # fmt: skip

        matrix = matrix or of

        def select(name: MatrixName) -> Matrix:
            stored = source[name.weight]
            if (unrepeated := drop_repeats(stored)) is not stored:
                return pack_stored(unrepeated, None)
            whole = matrix(name.weight, name.bias)
            return context.select_rows(whole, name.first, name.end) if name.end else whole

        def norm(name: str) -> np.ndarray:
            weights = source[name].float32().reshape(-1)
            weights = weights + np.float32(self.norm_offset) if self.norm_offset else weights
            has_bias = self.options.layer_norm and _name_bias(name) in source
            return np.concatenate([weights, source[_name_bias(name)].float32()]) if has_bias else weights

        def make_recurrent(names: RecurrentNames) -> RecurrentWeights:
            conv, decay = drop_repeats(source[names.conv]).float32()[:, 0].T, source[names.decay].float32().astype(np.float64)
            bias, out_norm = source[names.decay_bias].float32(), source[names.norm].float32()
            return RecurrentWeights(matrix(names.decay_gate, None), conv, (-np.exp(decay)).astype(np.float32), bias, out_norm)

        def make_mamba(names: MambaNames) -> MambaWeights:
            conv, decay = source[names.conv].float32()[:, 0].T, source[names.decay].float32().astype(np.float64)
            bias = source[names.conv_bias].float32() if names.conv_bias else np.zeros(conv.shape[1], np.float32)
            rest = (source[name].float32() for name in (names.step_bias, names.skip, names.norm))
            return MambaWeights(np.concatenate([conv, bias[None]]), (-np.exp(decay)).astype(np.float32), *rest)

        def make_end(names: EndNames) -> LayerEnd:
            end = LayerEnd(float(source[names.scale].float32()[0]) if names.scale else 1.0)
            if names.gate and names.projection and names.norm:
                end = end._replace(gate=matrix(names.gate, None), projection=matrix(names.projection, None), norm=norm(names.norm))
            if names.experts:
                router, *rest = (norm(name) for name in names.experts)
                end = end._replace(experts=ExpertNorms(router * np.float32(len(router) ** -0.5), *rest))
            return end

        def make_inputs(names: InputNames) -> LayerInputs:
            return LayerInputs(matrix(names.table, None), matrix(names.projection, None), norm(names.norm), names.factors)

        def make_latent(names: LatentNames) -> LatentWeights:
            query_norm = source[names.query_norm].float32() if names.query_norm else None
            queries = select(names.queries) if names.queries else None
            return LatentWeights(queries, matrix(names.keys, None), query_norm, source[names.norm].float32())

        layers = [
            LayerWeights(
                tuple(select(name) for name in layer.matrices),
                (norm(layer.norms[0]), norm(layer.norms[1])) if layer.norms else None,
                (norm(layer.head_norms[0]), norm(layer.head_norms[1])) if layer.head_norms else None,
                layer.window,
                layer.rotary,
                make_experts(layer.experts) if layer.experts else None,
                source[layer.sinks].float32() if layer.sinks else None,
                (norm(layer.post_norms[0]), norm(layer.post_norms[1])) if layer.post_norms else None,
                make_recurrent(layer.recurrent) if layer.recurrent else None,
                source[layer.short_conv].float32()[:, 0].T if layer.short_conv else None,
                make_mamba(layer.mamba) if layer.mamba else None,
                layer.heads,
                make_end(layer.end) if layer.end else None,
                make_latent(layer.latent) if layer.latent else None,
            )
            for layer in self.layers
        ]
        inputs = make_inputs(self.inputs) if self.inputs else None
        outside = OutsideWeights(matrix(self.embedding, None), norm(self.norm), matrix(*self.head), inputs)
        return LlamaDecoder(context, layers, outside, options=self.options, angles=self.angles, query_scales=self.query_scales)


def _name_bias(norm: str) -> str:
    return f"{norm.removesuffix('.weight')}.bias"


def _list_expert_shapes(found: ExpertsMap, source: TensorSource, hidden: int) -> list[tuple[str | None, tuple[int, ...]]]:
    """List the names of a layer's experts' weights and the shapes that they must have. Raises ValueError, KeyError."""
    n_experts, (n_groups, top_groups, pairs) = source[found.weights.gate_up[0]].shape[0], found.groups
    size = n_experts // max(1, n_groups)
    if not 0 < top_groups <= n_groups or n_experts % n_groups or top_groups * size < found.top_k or size < 1 + pairs:
        raise ValueError(f"{found.top_k} experts of {top_groups} of {n_groups} groups, of {n_experts} experts")
    if not 0 < found.top_k <= n_experts or (found.shared_gate is None) == (found.shared == SHARED_BY_GATE):
        raise ValueError(f"{found.top_k} of {n_experts} experts, or a shared one without its gate")
    shapes = found.weights.list_shapes(source, hidden)
    correction = source[found.correction].shape if found.correction else ()  # [E], or [1, E]
    of_router = [(found.router[0], (n_experts, hidden)), (found.router[1], (n_experts,)), (found.correction, (*correction[:-1], n_experts))]
    return [*shapes, *of_router, (found.shared_gate, (1, hidden))]

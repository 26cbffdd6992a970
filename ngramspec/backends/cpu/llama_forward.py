"""Run whole forward passes of a Llama-style decoder with packed weights, each one compiled call (`llama_pass`).

Whoever builds a `LlamaDecoder` has checked that the model is of this kind (`llama_layers` says which). The module allocates what passes
need, and knows batches and KV pools, nothing of modules or requests.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.attention import find_attention
from ngramspec.backends.cpu.formats import DEPTH, WIDTH
from ngramspec.backends.cpu.gated_delta import gather_inputs, run_recurrent
from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.backends.cpu.latent_attention import describe_latent, make_head_buffers, run_latent
from ngramspec.backends.cpu.layer_ends import NORMS, run_layer_end
from ngramspec.backends.cpu.llama_layers import (
    DOWN,
    OUT,
    LayerEnd,
    LayerInputs,
    LayerWeights,
    MambaOptions,
    MambaWeights,
    ModelOptions,
    OutsideWeights,
    RecurrentOptions,
    describe_experts,
    stack_norms,
)
from ngramspec.backends.cpu.llama_pass import (
    ACTIVATE,
    ACTIVATE_EXPERTS,
    ATTEND,
    EXPERTS,
    FUNCTIONS,
    GATE_ROW,
    HEADS,
    LAYER_END,
    MIXER,
    NORM,
    PARTS,
    QUANTISE,
    UNPACK,
    UNPACK_INPUTS,
    compute,
    run_experts,
    run_thread,
)
from ngramspec.backends.cpu.llama_variants import gate_row, layer_norm_row, turn_heads
from ngramspec.backends.cpu.mamba2 import gather_channels, norm_gated_row, run_mamba2, run_mamba2_beside, scale_attention_row
from ngramspec.backends.cpu.matmul import MATRIX, MatmulContext, Matrix, make_code_buffers
from ngramspec.backends.cpu.pass_structs import (
    CompiledModel,
    CompiledPass,
    LayerKinds,
    PassBuffers,
    PassWeights,
    RecurrentArrays,
    SharedPass,
    VariedArrays,
    fill_pass,
    make_compiled_model,
    make_compiled_pass,
    make_shared_pass,
    publish_pass,
    release_logits,
)
from ngramspec.backends.cpu.short_conv import run_short_conv
from ngramspec.backends.cpu.threads import ThreadTeam, make_counters
from ngramspec.backends.cpu.varied_heads import HEAD_FIELDS, KEYS_AT, copy_heads_row, run_varied_attention
from ngramspec.datastore.compiled_calls import find_address
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Batch

# Positions whose angles are computed at a time: always the same groups, so that a position's angles always have the same bits.
ANGLES = 1024
_NOTHING = np.empty((0, 0), np.float32)
PARTS_OF_SOME = (  # what passes of some models call, all with the same types of arguments
    run_experts, run_recurrent, run_short_conv, run_mamba2, run_mamba2_beside, run_latent, run_varied_attention, run_layer_end, gate_row,
    copy_heads_row, norm_gated_row, scale_attention_row, turn_heads,
)  # fmt: skip


class ForwardOutput(NamedTuple):
    """Results of a pass for the N rows whose logits were wanted."""

    logits: np.ndarray  # [N, V] float32
    states: np.ndarray | None
    """[T, H] float32: the last hidden states of all rows, if they were asked for."""
    greedy: np.ndarray  # [N] int32: the likeliest token; -1 where the greatest logit is infinite, or one is not a number
    tokens: np.ndarray  # [N, n_best] int32: the likeliest ones, as `sampling.topk` has it
    values: np.ndarray  # [N, n_best] float32: their logits


class _Buffers(NamedTuple):
    """Buffers that passes of up to `n_rows` rows reuse."""

    n_rows: int
    work: PassBuffers
    heads: tuple[np.ndarray, ...]
    """Those of latent attention."""


class LlamaDecoder:
    """The layers, norms, head and embedding of a Llama-style decoder; see the module."""

    def __init__(
        self,
        context: MatmulContext,
        layers: Sequence[LayerWeights],
        outside: OutsideWeights,
        *,
        options: ModelOptions,
        angles: Callable[[int, int], tuple[np.ndarray, np.ndarray]],
        query_scales: Callable[[int, int], np.ndarray],
    ) -> None:
        """Prepare packed weights for compiled passes.

        `angles(first, n)` returns cos and sin [R, n, D] of n positions from `first` on for R rotary embeddings; `query_scales(first, n)`
        the factors [n] of their queries, or [0] for none.
        """
        embedding, norm, head, inputs = outside
        self.context, self.layers, self.options = context, tuple(layers), options
        n_heads, head_dim = options.n_heads, options.head_dim
        self.hidden, self._angles, self._query_scales = embedding.weight.n_in, angles, query_scales
        self.vocab_size = head.weight.n_out
        mixed = [layer.experts for layer in layers if layer.experts]
        self._n_inputs = 0 if inputs is None else len(inputs.norm)
        self._kinds = _number_layers(layers, options)
        self._recurrent, more = _describe_recurrent(layers, options)
        self._varied, at_ends = _describe_varied(layers, inputs, self.hidden)
        more += at_ends
        self._latent = describe_latent(layers, options.latent)
        more += [m for layer in layers if layer.latent for m in (layer.latent.queries, layer.latent.keys) if m is not None]
        self.matrices = [
            *(m for layer in layers for m in layer.matrices), *(m for each in mixed for m in each.matrices), *more, embedding, head,
        ]  # fmt: skip
        of_layers = np.zeros((len(layers), DOWN + 1, MATRIX), np.int64)
        for fields, layer in zip(of_layers, layers, strict=True):
            *inputs_of_mixer, out = layer.mixer or (None,)
            for i, m in (*enumerate(inputs_of_mixer), (OUT, out), *enumerate(layer.mlp, DOWN + 1 - len(layer.mlp))):
                if m is not None:
                    fields[i] = m.fields
        self._matrices = np.concatenate([of_layers.reshape(-1, MATRIX), [embedding.fields, head.fields]])
        self._experts = describe_experts(layers)
        sinks = [layer.sinks for layer in layers if layer.sinks is not None]
        assert len(sinks) in (0, len(layers)), "sinks in some layers only"
        self._sinks = np.stack(sinks).astype(np.float32) if sinks else np.zeros((0, n_heads), np.float32)
        self._norms, self._last_norm = stack_norms([layer.norms for layer in layers], self.hidden), norm.astype(np.float32)
        self._head_norms = stack_norms([layer.head_norms for layer in layers], head_dim)
        self._post_norms = stack_norms([layer.post_norms for layer in layers], self.hidden)
        self._windows = np.array([layer.window for layer in layers], np.int64)
        self._rotary = np.array([layer.rotary for layer in layers], np.int64)
        kernels = context.kernels
        unpack = kernels.get_unpack(embedding.weight.format)
        self._functions = np.zeros(FUNCTIONS, np.int64)
        self._functions[QUANTISE] = kernels.get_quantise(m.weight.format for m in self.matrices) if context.int8 else 0
        self._functions[ACTIVATE], self._functions[UNPACK] = (
            kernels.get_activation(options.activation, options.gate_factor, options.mlp_factor),
            unpack,
        )
        self._functions[ACTIVATE_EXPERTS] = kernels.get_gated_activation(mixed[0].activation) if mixed else 0
        self._functions[UNPACK_INPUTS] = kernels.get_unpack(inputs.table.weight.format) if inputs else 0
        self.begin_at(0)
        self._buffers: _Buffers | None = None
        self._model: CompiledModel | None = None
        self._model_of: tuple[Any, ...] = ()
        """The pool and the arrays that it is made of."""
        self._pass: CompiledPass | None = None
        self._shared: SharedPass | None = None
        self._team = ThreadTeam()
        self._run_thread = 0
        """Its address, once a pass has been run."""
        self._logits = np.zeros((0, 0), np.float32)

    def begin_at(self, position: int) -> None:
        """Treat a batch's position 0 as `position`, so that checks can look far out without computing the text before."""
        self._begin = position
        self._angles_so_far = self._angles(position, 0)
        self._scales = np.zeros(0, np.float32)

    def run_layer(self, layer: int, batch: Batch, pool: KVPool, threads: int, x: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Run one layer alone on hidden states x [T, H], or on the embedding: return its output [T, H] and the logits made of that."""
        computed = self.run(batch, pool, threads, first=layer, n_layers=1, x=x)
        assert self._buffers is not None
        n = len(batch.input_ids)
        before, added = (array[:n, : self.hidden] for array in self._buffers.work[:2])
        if len(self._post_norms):
            mean = np.square(added).mean(axis=1, keepdims=True)
            added = self._post_norms[2 * layer + 1] * added / np.sqrt(mean + np.float32(self.options.eps))
        return before + np.float32(self.options.residual_scale) * added, computed.logits

    def run(
        self, batch: Batch, pool: KVPool, threads: int, *, n_layers: int | None = None, first: int = 0, x: np.ndarray | None = None,
        states: bool = False, n_best: int = 1,
    ) -> ForwardOutput:  # fmt: skip
        """Run `n_layers` layers (None: all) from `first` on, then norm and head.

        `x` [T, H]: hidden states to begin with, instead of the embedding. `states`: also return the last hidden states. `n_best`: number of
        top-k tokens to return per row.
        """
        n_rows, wanted = len(batch.input_ids), batch.logits_rows
        last = len(self.layers) if n_layers is None else first + n_layers
        model = self.get_compiled_model(pool, n_rows, int(batch.positions.max()) + 1)
        assert self._buffers is not None
        if x is not None:
            self._buffers.work.x[:n_rows] = x
        logits = self._get_logits_buffer(len(wanted))
        kept = np.empty((n_rows if states else 0, self.hidden), np.float32)
        tokens, values = np.empty((threads, len(wanted), n_best), np.int32), np.empty((threads, len(wanted), n_best), np.float32)
        fine, greedy = np.empty((threads, len(wanted)), np.bool_), np.empty(len(wanted), np.int32)
        rows = (
            batch.input_ids, wanted, batch.items, batch.owners, batch.tables, batch.positions, batch.bases, batch.paths, batch.blocks,
            batch.offsets, batch.parents, batch.roots, batch.ends,
        )  # fmt: skip
        left = logits, kept, tokens, values, fine, greedy
        if self._pass is None:
            self._pass = self.make_empty_pass()
        fill_pass(self._pass, first, last, x is None, make_counters(count_parts(last - first)), rows, left)
        self.run_pass(threads, model, self._pass)
        release_logits(self._pass, _NOTHING)
        return ForwardOutput(logits[:, : self.vocab_size], kept if states else None, greedy, tokens[0], values[0])

    def run_pass(self, threads: int, model: CompiledModel, current: CompiledPass) -> None:
        """Run a pass whose `tokens`, `values` and `fine` have room for this number of threads, with as many of them."""
        if self._shared is None:
            self._shared = make_shared_pass(model, current)
            self.find_functions()
            weakref.finalize(self, self._team.stop)
        team, (of_model, before) = self._team, self._team.published
        if of_model is not model or before is not current:
            publish_pass(self._shared, model, current)
            team.published = model, current
        team.grow(threads - 1, compute, False, self._run_thread, self._shared, team.state)
        compute(True, self._run_thread, self._shared, team.state)

    def join_threads(self, other: LlamaDecoder) -> None:
        """Compute with the threads of another decoder, which has made a pass: threads of both would be in each other's way."""
        assert other._shared is not None
        self._shared, self._team = other._shared, other._team
        self.find_functions()

    def find_functions(self) -> None:
        """Set the addresses of what the model's passes call. Compiles what is not on disk."""
        self._run_thread = find_address(run_thread, 0, self._shared)
        if len(self._experts[1]):
            self._functions[EXPERTS] = find_address(run_experts, 0, 0, self._shared)
        of_mamba = run_mamba2_beside if self.options.beside else run_mamba2
        run = run_recurrent if self.options.recurrent else run_short_conv if self.options.short_conv else of_mamba
        if any(layer.keeps_state for layer in self.layers):
            self._functions[MIXER] = find_address(run, 0, 0, self._shared)
        if self.options.latent:
            self._functions[MIXER] = find_address(run_latent, 0, 0, self._shared)
        if any(layer.heads for layer in self.layers):
            self._functions[MIXER] = find_address(run_varied_attention, 0, 0, self._shared)
            self._functions[GATE_ROW] = find_address(copy_heads_row, 0, 0, self._shared)
        if any(layer.end for layer in self.layers):
            self._functions[LAYER_END] = find_address(run_layer_end, 0, 0, self._shared)
        if self.options.gated or self.options.mamba:
            after = scale_attention_row if self.options.beside else norm_gated_row
            self._functions[GATE_ROW] = find_address(gate_row if self.options.gated else after, 0, 0, self._shared)
        if not (self.options.turns_halves or self.options.latent):
            self._functions[HEADS] = find_address(turn_heads, 0, 0, self._shared)
        if self.options.layer_norm:
            self._functions[NORM] = find_address(layer_norm_row, self._last_norm, self._last_norm, np.float32(0), self._last_norm)

    def compile_all_parts(self) -> None:
        """Compile, after a pass, also what the passes of other models call by address, or load it from disk."""
        for function in PARTS_OF_SOME:
            find_address(function, 0, 0, self._shared)
        find_address(layer_norm_row, self._last_norm, self._last_norm, np.float32(0), self._last_norm)

    def make_empty_pass(self) -> CompiledPass:
        """Make a pass through all layers whose arrays are filled in later."""
        n_layers, none = len(self.layers), np.empty((0, 0), np.int32)
        ids, line, logits, cube = np.empty(0, np.int64), np.empty(0, np.int32), np.empty((0, 0), np.float32), np.empty((0, 0, 0), np.int32)
        rows = ids, ids, none, line, none, line, line, none, line, line, line, line, line
        left = logits, np.empty((0, self.hidden), np.float32), cube, cube.astype(np.float32), none.astype(np.bool_), line
        new: CompiledPass = make_compiled_pass(0, n_layers, True, self.vocab_size, make_counters(count_parts(n_layers)), *rows, *left)
        return new

    def get_compiled_model(self, pool: KVPool, n_rows: int, n_positions: int) -> CompiledModel:
        """Return the struct for passes of up to `n_rows` rows over positions below `n_positions`."""
        self._ensure_buffers(n_rows)
        self._ensure_angles(n_positions)
        of = pool, self._buffers, self._angles_so_far
        if self._model is None or any(a is not b for a, b in zip(self._model_of, of, strict=True)):
            assert self._buffers is not None
            weights = PassWeights(
                self._matrices, self.context.tables, self._norms, self._head_norms, self._post_norms, self._last_norm, self._windows,
                self._rotary, self.options.form, self.options.numbers, self._functions, *self._angles_so_far, self._scales, self._experts,
                self._sinks,
            )  # fmt: skip
            recurrent, work = self._recurrent._replace(states=pool.states), self._buffers.work
            latent = self._latent, self._buffers.heads
            self._functions[ATTEND] = find_attention(pool.all_keys.dtype)
            kv = pool.all_keys, pool.all_values
            self._model = make_compiled_model(weights, self._kinds, kv, work, recurrent, self._varied, latent)
            self._model_of = of
        return self._model

    def _ensure_buffers(self, n_rows: int) -> None:
        if self._buffers is None or self._buffers.n_rows < n_rows:
            n = max(16, 1 << (n_rows - 1).bit_length())
            n_heads, head_dim = self.options.n_heads, self.options.head_dim
            latent = self.options.latent
            inputs = max(sum(m.weight.n_panels for m in some) for each in self.layers for some in (each.inputs, each.beside[:-1]))
            if any(each.end and each.end.experts for each in self.layers):  # their sum lies there, too
                inputs = max(inputs, -(-self.hidden // WIDTH))
            dense = [each.mlp[0].weight.n_panels for each in self.layers if each.mlp]

            def allocate(*shape: int) -> np.ndarray:
                return np.zeros((n, *shape), np.float32)

            inner_size = self.options.mamba.n_inner if self.options.mamba else 0
            to = DEPTH if latent else math.lcm(DEPTH, head_dim)  # whole heads: for gaps between rows numba would compile the pass again
            wide, mixed = _round_up(self.hidden), _round_up(max(n_heads * (latent.value_dim if latent else head_dim), inner_size), to)
            inner = max(max(dense, default=0) * WIDTH, self._n_inputs)
            codes = max(wide, mixed, latent.query_rank if latent else 0)
            out = allocate(mixed)
            heads = allocate(n_heads, 0) if latent else out.reshape(n, -1, head_dim)  # latent attention has its own
            layers_of_experts = [each.experts for each in self.layers if each.experts]
            gates = allocate(n_heads * head_dim) if self.options.gated else _NOTHING
            beside = allocate(-(-self.hidden // WIDTH) * WIDTH) if self.options.beside else _NOTHING
            layer_inputs = allocate(self._n_inputs * len(self.layers) + DEPTH) if self._n_inputs else _NOTHING
            work = PassBuffers(
                allocate(self.hidden), allocate(-(-self.hidden // WIDTH) * WIDTH), allocate(wide), *make_code_buffers(n, codes), gates,
                layer_inputs, beside, allocate(inputs * WIDTH), allocate(n_heads, head_dim), out, heads, allocate(2, _round_up(inner)),
                allocate(_round_up(inner)), *make_code_buffers(n, inner),
                moe.make_pair_buffers(layers_of_experts, n, wide, len(self.layers)),
            )  # fmt: skip
            self._buffers = _Buffers(n, work, make_head_buffers(latent, n_heads, n))

    def _ensure_angles(self, n_positions: int) -> None:
        while (n := self._angles_so_far[0].shape[1]) < n_positions:
            first = self._begin + n
            (cos, sin), more = self._angles_so_far, self._angles(first, ANGLES)
            self._scales = np.concatenate([self._scales, self._query_scales(first, ANGLES)])
            self._angles_so_far = np.concatenate([cos, more[0]], axis=1), np.concatenate([sin, more[1]], axis=1)

    def _get_logits_buffer(self, n: int) -> np.ndarray:
        """Return logits [n, 16 · panels], reusing the last pass's memory if nobody holds it: fresh pages cost a good part of a pass."""
        if len(self._logits) < n or sys.getrefcount(self._logits) > 2:
            self._logits = self.allocate_logits(max(n, 8))
        return self._logits[:n]

    def allocate_logits(self, n: int) -> np.ndarray:
        """Allocate logits of n rows, [n, 16 · panels] float32."""
        return np.empty((n, -(-self.vocab_size // WIDTH) * WIDTH), np.float32)


class NativeLlamaForward:
    """A decoder's pass for compiled code (`backends.base.NativeForward`)."""

    def __init__(self, decoder: LlamaDecoder, pool: KVPool, rows_per_item: int) -> None:
        self.decoder, self._pool, self.rows_per_item = decoder, pool, rows_per_item
        self.inputs, self.logits = decoder.make_empty_pass(), decoder.allocate_logits(0)
        self.n_threads = self.n_best = 1
        self._model: CompiledModel | None = None

    def reserve(self, n_rows: int, n_positions: int) -> None:
        self._model = self.decoder.get_compiled_model(self._pool, n_rows, n_positions)
        if len(self.logits) < n_rows:
            self.logits = self.decoder.allocate_logits(n_rows)

    def run(self) -> None:
        assert self._model is not None
        try:
            self.decoder.run_pass(self.n_threads, self._model, self.inputs)
        except BaseException:
            self._pool.forget_copies()
            raise

    def keep_paths(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, positions: np.ndarray) -> None:
        self._pool.move(slots, starts, ends, positions)


def count_parts(n_layers: int) -> int:
    """Return the number of parts of a pass through `n_layers` layers."""
    return PARTS * n_layers + 4


def _number_layers(layers: Sequence[LayerWeights], of_model: ModelOptions) -> LayerKinds:
    """Number the layers whose mixer is not Llama's attention, and those with keys and values."""
    attends = [layer.attends for layer in layers]
    mixed_apart = [layer.keeps_state for layer in layers]
    if any(layer.heads or layer.end for layer in layers):
        attends = mixed_apart = [True] * len(layers)
    elif of_model.latent:
        mixed_apart = attends
    return LayerKinds(*(np.where(flags, np.cumsum(flags) - 1, -1).astype(np.int64) for flags in (mixed_apart, attends)))


def _describe_recurrent(layers: Sequence[LayerWeights], of_model: ModelOptions) -> tuple[RecurrentArrays, list[Matrix]]:
    """Return what the mixers of layers with a state read, and matrices that are not among a layer's seven."""
    found, options = [layer.recurrent for layer in layers if layer.recurrent], of_model.recurrent
    numbers = of_model.mamba.numbers if of_model.mamba else np.array(options or (0,) * len(RecurrentOptions._fields), np.int64)
    more = [each.decay_gate for each in found] or [m for layer in layers for m in layer.beside]

    def stack_arrays(arrays: list[np.ndarray], *empty: int) -> np.ndarray:
        return np.ascontiguousarray(np.stack(arrays), np.float32) if arrays else np.zeros((0, *empty), np.float32)

    fields = np.stack([m.fields for m in more]) if more else np.zeros((0, MATRIX), np.int64)
    rates = stack_arrays([np.stack([each.decay, each.decay_bias]) for each in found], 2, 0)
    conv = [np.stack([_gather_taps(each.conv, head, options) for head in range(options.n_key_heads)]) for each in found if options]
    if of_model.short_conv is not None:
        n, taps = of_model.short_conv.n_group_channels, [layer.short_conv for layer in layers if layer.short_conv is not None]
        conv = [each.reshape(len(each), -1, n).transpose(1, 0, 2) for each in taps]
    norms = [each.norm for each in found]
    if (mamba := of_model.mamba) is not None:
        mixers = [layer.mamba for layer in layers if layer.mamba]
        conv, norms = [_gather_channel_taps(each.conv, mamba) for each in mixers], [each.norm for each in mixers]
        rates = stack_arrays([_list_rates(each, mamba) for each in mixers], 7, 0)
    return RecurrentArrays(numbers, fields, stack_arrays(conv, 0, 4, 0), rates, stack_arrays(norms, 0), ()), more


def _describe_varied(layers: Sequence[LayerWeights], inputs: LayerInputs | None, hidden: int) -> tuple[VariedArrays, list[Matrix]]:
    """Return what heads and ends of layers read that are not Llama's, and matrices that are not among a layer's seven."""
    if not any(layer.heads or layer.end for layer in layers):
        nothing = np.zeros((0, 0), np.int64)
        return VariedArrays(nothing, nothing, np.zeros((0, 0, 0), np.float32), _NOTHING), []
    ends, n = [layer.end or LayerEnd(1.0) for layer in layers], len(layers)
    n_numbers = max(
        len(inputs.factors) + len(inputs.norm) if inputs else 0, *(1 + len(end.experts.scales if end.experts else ()) for end in ends)
    )
    heads, fields = np.zeros((n + 1, HEAD_FIELDS), np.int64), np.zeros((2 * n + 2, MATRIX), np.int64)
    norms, numbers = np.zeros((n, NORMS, hidden), np.float32), np.zeros((n + 1, n_numbers), np.float32)
    more, keys_at = list[Matrix](), 0
    for i, (layer, end) in enumerate(zip(layers, ends, strict=True)):
        if (own := layer.heads) is not None:
            heads[i] = own.n_kv, own.head_dim, own.n_projections, own.n_pairs, keys_at if own.owner < 0 else heads[own.owner, KEYS_AT]
            keys_at += own.n_kv * own.head_dim * BLOCK if own.owner < 0 else 0
        if end.gate is not None and end.projection is not None and end.norm is not None:
            more += [end.gate, end.projection]
            fields[2 * i], fields[2 * i + 1], norms[i, 0] = end.gate.fields, end.projection.fields, end.norm
        numbers[i, 0] = end.scale
        if (of_experts := end.experts) is not None:
            norms[i, 1:] = np.stack(of_experts[: NORMS - 1])
            numbers[i, 1 : 1 + len(of_experts.scales)] = of_experts.scales
    heads[n, KEYS_AT] = keys_at
    if inputs is not None:
        more += [inputs.projection, inputs.table]
        fields[2 * n :] = inputs.projection.fields, inputs.table.fields
        numbers[n, : 3 + len(inputs.norm)] = *inputs.factors, *inputs.norm
    return VariedArrays(heads, fields, norms, numbers), more


def _gather_taps(conv: np.ndarray, head: int, options: RecurrentOptions) -> np.ndarray:
    """Return the convolution's factors [4, inputs] of what a head of keys and its heads of values see."""
    taps = np.empty((len(conv), options.n_group_channels), np.float32)
    for t, factors in enumerate(conv):
        gather_inputs(factors, head, np.array(options, np.int64), options.n_value_heads // options.n_key_heads, taps[t])
    return taps


def _gather_channel_taps(conv: np.ndarray, options: MambaOptions) -> np.ndarray:
    """Return factors and biases [pieces, taps + 1, channels] of what the heads of each piece see."""
    gathered = np.empty((options.n_heads // options.n_piece_heads, len(conv), options.n_piece_channels), np.float32)
    for piece, of_piece in enumerate(gathered):
        for factors, to in zip(conv, of_piece, strict=True):
            gather_channels(factors, piece, options.numbers, to)
    return gathered


def _list_rates(mixer: MambaWeights, options: MambaOptions) -> np.ndarray:
    """Return [7, heads], from `mamba2.DECAY` to GATE_FACTOR."""
    numbers = options.least_step, options.most_step, options.step_factor, options.gate_factor
    return np.stack([mixer.decay, mixer.step_bias, mixer.skip, *(np.full(options.n_heads, number, np.float32) for number in numbers)])


def _round_up(n: int, to: int = DEPTH) -> int:
    return -(-n // to) * to

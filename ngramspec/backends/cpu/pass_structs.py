"""Group the arrays of a compiled pass: what a model's layers read, its buffers, the rows of a pass and their results.

Passing the dozens of arrays one by one would unpack each of them at every call. `llama_forward` makes the structs, `llama_pass` and what it
calls read them by name.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.experimental import structref

from ngramspec.backends.cpu.experts import PairBuffers
from ngramspec.datastore.code_cache import njit


class PassWeights(NamedTuple):
    """What the L layers of a decoder read."""

    matrices: np.ndarray  # [7 · L + 2, MATRIX] int64: Q to DOWN of each layer, embedding, head
    tables: np.ndarray  # [n, TABLE] int64: see `matmul.MatmulContext`
    norms: np.ndarray  # [2 · L, H], or [0, H]: see `llama_layers.stack_norms`, as for the next two
    head_norms: np.ndarray
    post_norms: np.ndarray
    last_norm: np.ndarray  # [H]
    windows: np.ndarray  # [L] int64
    rotary: np.ndarray  # [L] int64
    form: np.ndarray  # `ModelOptions.form`
    numbers: np.ndarray  # `ModelOptions.numbers`
    functions: np.ndarray  # [FUNCTIONS] int64: addresses, from QUANTISE on
    cos: np.ndarray  # [R, positions, D] of R rotary embeddings
    sin: np.ndarray
    query_scales: np.ndarray  # [positions], or [0]
    experts: tuple[np.ndarray, ...]  # see `llama_layers.describe_experts`
    sinks: np.ndarray  # [L, heads], or [0, heads]


class PassBuffers(NamedTuple):
    """What the parts of a pass of up to T rows write for later ones, float32 unless it says otherwise."""

    x: np.ndarray  # [T, H]: hidden states
    delta: np.ndarray  # [T, H and more]: what is added to them next
    normed: np.ndarray  # [T, wide]
    codes: np.ndarray  # of `normed` or `mixed`, with their activation scales: see `matmul.make_code_buffers`
    act_scales: np.ndarray
    gates: np.ndarray  # [T, heads · D]: of queries; or [0, 0]
    layer_inputs: np.ndarray  # [T, L · P and a quant block]: tokens' inputs to layers; or [0, 0]
    beside: np.ndarray  # [T, H and more]: what Mamba-2 beside attention makes; or [0, 0]
    qkv: np.ndarray  # [T, ..]: queries, keys and values, or the inputs of a recurrent layer
    q: np.ndarray  # [T, heads, D]: rotated queries
    mixed: np.ndarray  # [T, ..]: what the heads attend to, padded to a quant block
    heads: np.ndarray  # [T, heads and more, D]: a view of `mixed`
    both: np.ndarray  # [T, 2, ..]: outputs of gate and up
    middle: np.ndarray  # [T, ..]: activation(gate) · up
    middle_codes: np.ndarray
    middle_act_scales: np.ndarray
    pairs: PairBuffers


class LayerKinds(NamedTuple):
    """What attention, or what stands in its place, is in each of the L layers."""

    mixers: np.ndarray  # [L] int64: number among the layers that the function MIXER computes in place of attention or beside it, or -1
    attending: np.ndarray  # [L] int64: number among the layers with keys and values, or -1


class RecurrentArrays(NamedTuple):
    """What the R layers with a state read (`gated_delta`, `short_conv` or `mamba2`); empty without such layers.

    All models have arrays of the same types, so that one compiled pass serves them; this holds for `VariedArrays`, too.
    """

    options: np.ndarray  # int64: `RecurrentOptions`, or `MambaOptions.numbers`
    matrices: np.ndarray  # [R, MATRIX] int64: fields of the fourth matrix of inputs; or [4 · R, MATRIX]: `LayerWeights.beside`
    conv: np.ndarray  # [R, groups, taps, inputs]; for Mamba-2 with a bias after the taps
    rates: np.ndarray  # [R, 2, heads]: decays and their biases; for Mamba-2 [R, 7, heads]
    norms: np.ndarray  # [R, V]
    states: tuple[np.ndarray, ...]  # of the pool


class VariedArrays(NamedTuple):
    """What layers read whose heads differ (`varied_heads`) or that compute more at their end (`layer_ends`), as Gemma 4's; else empty."""

    heads: np.ndarray  # [L + 1, HEAD_FIELDS] int64
    matrices: np.ndarray  # [2 · L + 2, MATRIX] int64: fields of a gate and a projection per layer, then of those of tokens' inputs
    norms: np.ndarray  # [L, NORMS, H]
    factors: np.ndarray  # [L + 1, ..]: of a layer and of its experts; in the last line factors and norm of tokens' inputs


@structref.register
class CompiledModelType(types.StructRef):
    pass


class CompiledModel(structref.StructRefProxy):
    """A decoder as compiled code sees it, with its KV pool and buffers, in one argument: `PassWeights`, `LayerKinds`, keys and values,
    `PassBuffers`, `RecurrentArrays`, `VariedArrays`, and what latent attention reads."""


structref.define_proxy(CompiledModel, CompiledModelType, ["weights", "kinds", "pool", "work", "recurrent", "varied", "latent"])


@structref.register
class CompiledPassType(types.StructRef):
    pass


class CompiledPass(structref.StructRefProxy):
    """A pass as compiled code sees it.

    It has layers `first` to `last` and whether the embedding comes first, the rows (fields of `Batch`), counters for its parts, and its
    results as in `ForwardOutput`: `tokens` and `values` per thread, and whether the logits are finite.
    """


@structref.register
class SharedPassType(types.StructRef):
    pass


class SharedPass(structref.StructRefProxy):
    """What the threads of a team share: the compiled model and the current pass."""


structref.define_proxy(SharedPass, SharedPassType, ["model", "current"])

_ROWS = ("input_ids", "wanted", "items", "owners", "tables", "positions", "bases", "paths", "blocks", "offsets", "parents", "roots", "ends")
_LEFT = ("logits", "states", "tokens", "values", "fine", "greedy")
structref.define_proxy(CompiledPass, CompiledPassType, ["first", "last", "embed", "vocab_size", "state", *_ROWS, *_LEFT])


@njit(cache=True, nogil=True)
def make_compiled_model(*members):
    """Make the struct in compiled code: see "numba's traps" in `codegen/README.md`."""
    return CompiledModel(*members)


@njit(cache=True, nogil=True)
def make_compiled_pass(*members):
    return CompiledPass(*members)


@njit(cache=True, nogil=True)
def make_shared_pass(*members):
    return SharedPass(*members)


@njit(cache=True, nogil=True)
def fill_pass(p, first, last, embed, state, rows, left):
    p.first, p.last, p.embed, p.state = first, last, embed, state
    p.input_ids, p.wanted, p.items, p.owners, p.tables, p.positions, p.bases, p.paths, p.blocks, p.offsets = rows[:10]
    p.parents, p.roots, p.ends = rows[10:]
    p.logits, p.states, p.tokens, p.values, p.fine, p.greedy = left


@njit(cache=True, nogil=True)
def release_logits(p, nothing):
    """Drop the reference to the logits, so that their buffer can be reused."""
    p.logits = nothing


@njit(cache=True, nogil=True)
def publish_pass(shared, model, p):
    shared.model, shared.current = model, p

"""Describe a Llama-style decoder: its layers' packed weights, and options that hold for all layers.

A Llama-style layer is: norm, attention with rotary embedding (in some layers or all), optionally a norm of the queries and keys of every
head or of all, optionally queries scaled by their position, norm, MLP or a mixture of such (`experts`). What attention and MLP compute may
be normed before it is added to the hidden states, with norms before them or without; the MLP may see what attention sees. Heads may
differ by layer (`varied_heads`), and a layer may compute more after its MLP (`layer_ends`). After the last layer come a norm and the head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu.matmul import MATRIX, Matrix

Q, K, V, OUT, GATE, UP, DOWN = range(7)  # indices of a layer's matrices
GROUP_CHANNELS = 128  # Most channels of a short convolution that are one piece of work.
MOST_PIECE_HEADS = 4  # Most heads of a layer with Mamba-2 that are one piece of work.
NO_ROTARY = -1  # in place of the number of a rotary embedding
# Activations of a gated MLP; GELU by its approximation with tanh. The MLPs of the last two are not gated.
SILU, GELU, PLAIN_GELU, SQUARED_RELU = "silu", "gelu", "plain gelu", "squared relu"
# Indices of `ModelOptions.numbers`
EPS, SCALE, EMBEDDING_SCALE, RESIDUAL_SCALE, SOFTCAP, LOGIT_SCALE, LOGIT_SOFTCAP, ATTENTION_SCALE, BESIDE_SCALE = range(9)


N_ROTATED, INTERLEAVED, LATE_NORMS, PARALLEL, CENTRED_HEADS, GATED, BESIDE = range(7)  # indices of `ModelOptions.form`


class RecurrentWeights(NamedTuple):
    """What a recurrent layer (`gated_delta`) has besides the matrices of its inputs q, k, v and of its gates z and b."""

    decay_gate: Matrix
    """a, [V heads, hidden]."""
    conv: np.ndarray
    """[4, channels] float32: factors of the earliest token's input to the token's own."""
    decay: np.ndarray
    """[V heads] float32, negative: factor in the exponent of what remains of the state."""
    decay_bias: np.ndarray
    """[V heads]"""
    norm: np.ndarray
    """[V]: of every head's output."""


class RecurrentOptions(NamedTuple):
    n_key_heads: int
    n_value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False
    """Whether the i-th value head belongs to key head i mod n, instead of to the one that its group has."""

    @property
    def n_channels(self) -> int:
        """Inputs of a convolution: queries, keys and values."""
        return self.n_key_heads * self.n_group_channels

    @property
    def n_group_channels(self) -> int:
        """Inputs that a head of keys and its heads of values see."""
        return 2 * self.key_dim + self.n_value_heads // self.n_key_heads * self.value_dim


class ShortConvOptions(NamedTuple):
    n_channels: int
    n_taps: int
    """Tokens that a convolution sees, its own among them."""

    @property
    def n_group_channels(self) -> int:
        """Channels of a piece of work."""
        return math.gcd(self.n_channels, GROUP_CHANNELS)


class MambaWeights(NamedTuple):
    """What a layer with Mamba-2 (`mamba2`) has besides the matrices of z, of the convolution's input and of dt."""

    conv: np.ndarray
    """[taps + 1, channels] float32: factors of the earliest token's input to the token's own, and a bias."""
    decay: np.ndarray
    """[heads] float32, negative: factor of dt in the exponent of what remains of the state."""
    step_bias: np.ndarray
    """[heads]: of dt."""
    skip: np.ndarray
    """[heads]: factor of what is added of x to the outputs."""
    norm: np.ndarray
    """[heads · P]: of the gated outputs."""


class MambaOptions(NamedTuple):
    n_heads: int
    head_dim: int
    n_groups: int
    """Groups of heads; those of one have B and C in common, and are normed together."""
    state_size: int
    """Numbers of B and of C."""
    n_taps: int
    """Tokens that a convolution sees, its own among them."""
    least_step: float = 0.0
    """Bounds of dt."""
    most_step: float = math.inf
    normed: bool = True
    """Whether the gated outputs are normed."""
    gate_factor: float = 1.0
    """Factors of the inputs: of z, x, B, C and dt."""
    x_factor: float = 1.0
    b_factor: float = 1.0
    c_factor: float = 1.0
    step_factor: float = 1.0

    @property
    def n_inner(self) -> int:
        """Outputs of all heads."""
        return self.n_heads * self.head_dim

    @property
    def n_channels(self) -> int:
        """Inputs of the convolution: x, B and C."""
        return self.n_inner + 2 * self.n_groups * self.state_size

    @property
    def n_piece_heads(self) -> int:
        """Heads of a piece of work."""
        return math.gcd(self.n_heads // self.n_groups, MOST_PIECE_HEADS)

    @property
    def n_piece_channels(self) -> int:
        return self.n_piece_heads * self.head_dim + 2 * self.state_size

    @property
    def numbers(self) -> np.ndarray:
        """[6] int64, from `mamba2.N_HEADS` to NORMED."""
        return np.array([self.n_heads, self.head_dim, self.n_groups, self.state_size, self.n_piece_heads, self.normed], np.int64)

    @property
    def conv_factors(self) -> np.ndarray:
        """[channels] float32: factors of the convolution's inputs."""
        n = self.n_groups * self.state_size
        return np.repeat(np.array([self.x_factor, self.b_factor, self.c_factor], np.float32), [self.n_inner, n, n])


class LayerHeads(NamedTuple):
    """The heads of a layer in a model where they differ by layer (`varied_heads`)."""

    n_kv: int
    head_dim: int
    n_pairs: int
    """Pairs of numbers that the rotary embedding turns: the first ones of a head's first half with those of its second half."""
    owner: int = -1
    """The earlier layer whose keys and values are used; -1: the layer has its own."""
    has_values: bool = True
    """Whether values have a matrix; if not, they are made of the same numbers as keys."""

    @property
    def n_projections(self) -> int:
        """How many of Q, K and V there are."""
        return 1 if self.owner >= 0 else 2 + self.has_values


class ExpertNorms(NamedTuple):
    """What experts that are computed beside an MLP have besides their matrices."""

    router: np.ndarray
    """[H]: of what the router sees."""
    before: np.ndarray
    """[H]: of what the experts see."""
    after: np.ndarray
    """[H]: of their sum."""
    after_mlp: np.ndarray
    """[H]: of what the MLP computes."""
    scales: np.ndarray
    """[E]: factors of the experts' weights."""


class LayerEnd(NamedTuple):
    """What a layer computes after its MLP (`layer_ends`)."""

    scale: float
    """Factor of the layer's output."""
    gate: Matrix | None = None
    """[P, H]: of the token's input to the layer, if there is one."""
    projection: Matrix | None = None
    """[H, P]: of the gated input."""
    norm: np.ndarray | None = None
    """[H]: of the projected input."""
    experts: ExpertNorms | None = None


class LayerInputs(NamedTuple):
    """What makes a token's inputs [P] to each of L layers (`layer_ends`): rows of a table and a projection of the token's embedding."""

    table: Matrix
    """[V, L · P]"""
    projection: Matrix
    """[L · P, H]"""
    norm: np.ndarray
    """[P]: of what the projection makes for a layer."""
    factors: tuple[float, float, float]
    """Those of the table, of the projection, and of their sum."""


class LatentWeights(NamedTuple):
    """What a layer with latent attention (`latent_attention`) has besides four matrices."""

    queries: Matrix | None
    """[heads · (plain + turned), query rank]: of queries, of what the layer's first matrix gives; None: that gives queries."""
    keys: Matrix
    """[heads, rank, plain]: of every head, from the part of its query that is not turned to what a latent row is multiplied by."""
    query_norm: np.ndarray | None
    """[query rank], if there is such a matrix."""
    norm: np.ndarray
    """[rank]: of latent rows."""


class LatentOptions(NamedTuple):
    rank: int
    """Numbers of a token's latent row, of which the keys and values of all heads are made."""
    plain: int
    """Numbers of a head's query that meet its key, without rotary embedding."""
    turned: int
    """Further numbers of a query, which a rotary embedding turns, and which meet numbers that all heads' keys have in common."""
    value_dim: int
    query_rank: int
    """Numbers of the row that queries are made of; 0: they are made of hidden states."""
    eps: float
    """Added to the mean square in the norms of these rows."""


class LayerWeights(NamedTuple):
    matrices: tuple[Matrix, ...]
    """Q to DOWN; those from GATE on are the MLP's, or the shared expert's, or missing if there is none. GATE may be missing alone; a
    layer that is an MLP alone lacks Q to OUT.

    A recurrent layer has the matrices of its convolution's input, of z and of b in place of Q, K and V; one with a short convolution
    those of B, C and x (`short_conv`), one with Mamba-2 those of z, of its convolution's input and of dt. One with `heads` may lack V, or K
    and V. Latent attention has the matrices of queries or of the row that they are made of, of latent row and common part of keys, and of
    values: [heads, V, rank].
    """
    norms: tuple[np.ndarray, np.ndarray] | None
    """[H] each, before attention and before the MLP; with the biases of a LayerNorm [2 · H]."""
    head_norms: tuple[np.ndarray, np.ndarray] | None
    """The norms of queries and of keys: [D] each for every head, or [heads · D] for all together, or for each its own."""
    window: int = 0
    """Keys that a query sees, its own among them; 0: all."""
    rotary: int = 0
    """Number of the rotary embedding that rotates queries and keys, or NO_ROTARY."""
    experts: moe.Experts | None = None
    sinks: np.ndarray | None = None
    """[H] of attention: logits of what goes to no key."""
    post_norms: tuple[np.ndarray, np.ndarray] | None = None
    """[H] each, of what attention and MLP compute."""
    recurrent: RecurrentWeights | None = None
    short_conv: np.ndarray | None = None
    """[taps, H] float32, in place of attention: factors of the earliest token's input to the token's own."""
    mamba: MambaWeights | None = None
    beside: tuple[Matrix, ...] = ()
    """Matrices of Mamba-2 beside attention, which has those from Q to OUT: of z, of the convolution's input, of dt, and the last one."""
    heads: LayerHeads | None = None
    end: LayerEnd | None = None
    latent: LatentWeights | None = None

    @property
    def mixer(self) -> tuple[Matrix, ...]:
        """Q to OUT, or nothing."""
        if self.heads is not None:
            return self.matrices[: self.heads.n_projections + 1]
        return self.matrices[:GATE] if len(self.matrices) >= GATE else ()

    @property
    def mlp(self) -> tuple[Matrix, ...]:
        return self.matrices[len(self.mixer) :]

    @property
    def inputs(self) -> tuple[Matrix, ...]:
        """Return the matrices that normed hidden states are multiplied by, but for the MLP's."""
        more = (self.recurrent.decay_gate,) if self.recurrent else ()
        return (*self.mixer[: -1 - (self.latent is not None)], *more)

    @property
    def attends(self) -> bool:
        """Whether the layer has keys and values."""
        return bool(self.mixer) and (not self.keeps_state or bool(self.beside))

    @property
    def keeps_state(self) -> bool:
        """Whether the layer has a state, in place of keys and values or beside them."""
        return self.recurrent is not None or self.short_conv is not None or self.mamba is not None


class OutsideWeights(NamedTuple):
    """The weights before the first layer and after the last one."""

    embedding: Matrix
    norm: np.ndarray
    """[H], or [2 · H] with biases."""
    head: Matrix
    inputs: LayerInputs | None = None


class ModelOptions(NamedTuple):
    n_heads: int
    head_dim: int
    eps: float
    """Added to the mean square in every norm."""
    scale: float
    """Factor of queries times keys."""
    activation: str = SILU
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the hidden states."""
    softcap: float = 0.0
    """Bound c of attention's scores s, which become c · tanh(s / c); 0: none."""
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    """The same bound of the scaled logits."""
    n_rotated: int = 0
    """Numbers of a head that the rotary embedding turns, its first ones; 0: all."""
    interleaved: bool = False
    """Whether they are turned in pairs that lie side by side, instead of the first half with the second."""
    late_norms: bool = False
    """Whether queries and keys are normed after they were rotated."""
    layer_norm: bool = False
    """Whether norms subtract the mean."""
    parallel: bool = False
    """Whether the MLP sees what attention sees."""
    centred_heads: bool = False
    """Whether norms of queries and keys subtract the mean of a head, and every head has weights of its own."""
    gated: bool = False
    """Whether every head's query is followed by a gate, whose sigmoid multiplies what the head attends to."""
    recurrent: RecurrentOptions | None = None
    """What the recurrent layers have in common, if there are any."""
    short_conv: ShortConvOptions | None = None
    """What the layers with a short convolution have in common, if there are any."""
    mamba: MambaOptions | None = None
    """What the layers with Mamba-2 have in common, if there are any."""
    beside: bool = False
    """Whether every layer has Mamba-2 beside attention, which see the same; the sum of both is added to the hidden states."""
    attention_scale: float = 1.0
    """Factors of what attention and Mamba-2 beside it add."""
    beside_scale: float = 1.0
    gate_factor: float = 1.0
    """Factors of what an MLP's activation is applied to, and of what is multiplied by its last matrix."""
    mlp_factor: float = 1.0
    latent: LatentOptions | None = None
    """What all layers have in common if their attention is latent: `head_dim` is `rank + turned`, and there is one head of keys."""

    @property
    def numbers(self) -> np.ndarray:
        """[9] float32, from EPS to BESIDE_SCALE."""
        return np.array(
            [
                self.eps, self.scale, self.embedding_scale, self.residual_scale, self.softcap, self.logit_scale, self.logit_softcap,
                self.attention_scale, self.beside_scale,
            ],
            np.float32,
        )  # fmt: skip

    @property
    def form(self) -> np.ndarray:
        """[7] int64, from N_ROTATED to BESIDE."""
        flags = self.interleaved, self.late_norms, self.parallel, self.centred_heads, self.gated, self.beside
        return np.array([self.n_rotated or self.head_dim, *flags], np.int64)

    @property
    def turns_halves(self) -> bool:
        """Whether rotary embeddings turn whole heads in halves, after RMS norms, and queries have no gates between them."""
        return not (self.n_rotated or self.interleaved or self.late_norms or self.centred_heads or self.gated)


def stack_norms(pairs: Sequence[tuple[np.ndarray, np.ndarray] | None], n: int) -> np.ndarray:
    """Return the layers' pairs of norms as [2 · L, longest] float32, or [0, n] if no layer has them; zeros for one that has none."""
    longest = max((len(norm) for pair in pairs if pair is not None for norm in pair), default=0)
    stacked = np.zeros((2 * len(pairs), longest) if longest else (0, n), np.float32)
    for i, pair in enumerate(pairs):
        for j, norm in enumerate(pair or ()):
            stacked[2 * i + j, : len(norm)] = norm
    return stacked


def describe_experts(layers: Sequence[LayerWeights]) -> tuple[np.ndarray, ...]:
    """Return fields [L, 4, MATRIX] and options [L, OPTIONS] of all layers' experts, their weights' scale [L] and corrections [L, E].

    Options of a layer without experts are 0; a model without any has L = 0.
    """
    n = len(layers) if any(layer.experts for layer in layers) else 0
    fields, options, scales = np.zeros((n, 4, MATRIX), np.int64), np.zeros((n, moe.OPTIONS), np.int64), np.zeros(n, np.float32)
    corrected = [each.experts for each in layers if each.experts and each.experts.correction is not None]
    corrections = np.zeros((n, max((each.n_experts for each in corrected), default=0)), np.float32)
    for i, layer in enumerate(layers[:n]):
        if layer.experts:
            fields[i], options[i], scales[i] = layer.experts.fields, layer.experts.options, layer.experts.scale
            if layer.experts.correction is not None:
                corrections[i, : layer.experts.n_experts] = layer.experts.correction
    return fields, options, scales, corrections

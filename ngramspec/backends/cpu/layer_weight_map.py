"""Name the weights of a layer: what a `WeightMap` has of each, and how it is read back from JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ngramspec.backends.cpu.experts import NO_SHARED, ONE_GROUP, ExpertGroups
from ngramspec.backends.cpu.formats import WIDTH
from ngramspec.backends.cpu.llama_layers import GATE, SILU, LayerHeads
from ngramspec.models.expert_weights import ExpertWeights


class MatrixName(NamedTuple):
    weight: str
    bias: str | None = None
    first: int = 0
    """The first row that belongs to the matrix, a multiple of WIDTH."""
    end: int = 0
    """The row after the last one; 0: all rows belong to it."""


NameModule: TypeAlias = Callable[[str], MatrixName]  # of the module at a path


@dataclass(frozen=True, slots=True)
class ExpertsMap:
    """The names of the weights of a layer's experts, and how they are chosen: see `Experts` for the latter."""

    weights: ExpertWeights
    router: tuple[str, str | None]
    top_k: int
    scoring: int
    normalise: bool
    scale: float
    shared: int = NO_SHARED
    shared_gate: str | None = None
    """Name of the weight [1, H] of the shared expert's gate."""
    correction: str | None = None
    """Name of `Experts.correction`."""
    activation: str | tuple[float, float] = SILU
    """See `Kernels.get_gated_activation`."""
    groups: ExpertGroups = ONE_GROUP


class RecurrentNames(NamedTuple):
    """The names of what a recurrent layer has besides its matrices: see `RecurrentWeights`."""

    decay_gate: str
    conv: str
    decay: str
    """Logarithm of the negative of `RecurrentWeights.decay`."""
    decay_bias: str
    norm: str


class MambaNames(NamedTuple):
    """The names of what a layer with Mamba-2 has besides its matrices: see `MambaWeights`."""

    conv: str
    conv_bias: str | None
    decay: str
    """Logarithm of the negative of `MambaWeights.decay`."""
    step_bias: str
    skip: str
    norm: str | None


class LatentNames(NamedTuple):
    """The names of what a layer with latent attention has besides its matrices: see `LatentWeights`."""

    queries: MatrixName | None
    keys: str
    query_norm: str | None
    norm: str


class EndNames(NamedTuple):
    """The names of what a layer computes after its MLP: see `LayerEnd` and `ExpertNorms`."""

    scale: str | None
    gate: str | None = None
    """Either gate, projection and norm all have names, or none has."""
    projection: str | None = None
    norm: str | None = None
    experts: tuple[str, ...] | None = None
    """They stand in the order of `ExpertNorms`; the router's norm has the factor 1 / sqrt(H) besides."""


class InputNames(NamedTuple):
    """The names of what makes tokens' inputs to layers: see `LayerInputs`."""

    table: str
    projection: str
    norm: str
    factors: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class LayerWeightMap:
    matrices: list[MatrixName]
    """They stand in the order of `LayerWeights.matrices`."""
    norms: list[str] | None
    head_norms: list[str] | None
    window: int
    rotary: int = 0
    """Index among the model's rotary embeddings, or NO_ROTARY."""
    experts: ExpertsMap | None = None
    sinks: str | None = None
    post_norms: list[str] | None = None
    recurrent: RecurrentNames | None = None
    short_conv: str | None = None
    """Name of the weight [H, 1, taps] of the short convolution in place of attention."""
    mamba: MambaNames | None = None
    beside: list[MatrixName] | None = None
    """They stand in the order of `LayerWeights.beside`."""
    heads: LayerHeads | None = None
    end: EndNames | None = None
    latent: LatentNames | None = None

    @property
    def keeps_state(self) -> bool:
        return self.recurrent is not None or self.short_conv is not None or self.mamba is not None

    @property
    def attends(self) -> bool:
        """Whether the layer has keys and values: it keeps no state but beside attention, and is no MLP alone."""
        return (not self.keeps_state or self.beside is not None) and len(self.matrices) >= GATE

    @property
    def mixer(self) -> list[MatrixName]:
        """See `LayerWeights.mixer`."""
        if self.heads is not None:
            return self.matrices[: self.heads.n_projections + 1]
        return self.matrices[:GATE] if len(self.matrices) >= GATE else []


def layer_from_json(found: dict[str, Any]) -> LayerWeightMap:
    """Read the map of a layer back."""
    experts = found["experts"]
    if experts:
        weights = ExpertWeights(**{**experts["weights"], **{name: tuple(experts["weights"][name]) for name in ("gate_up", "down")}})
        pairs = {name: tuple(experts[name]) for name in ("router", "activation") if isinstance(experts[name], list)}
        experts = ExpertsMap(**{**experts, **pairs, "weights": weights, "groups": ExpertGroups(*experts["groups"])})
    recurrent = RecurrentNames(*found["recurrent"]) if found["recurrent"] else None
    mamba = MambaNames(*found["mamba"]) if found["mamba"] else None
    heads, end = LayerHeads(*found["heads"]) if found["heads"] else None, EndNames(*found["end"]) if found["end"] else None
    if end and end.experts:
        end = end._replace(experts=tuple(end.experts))
    latent = LatentNames(*found["latent"]) if found["latent"] else None
    if latent and latent.queries:
        latent = latent._replace(queries=MatrixName(*latent.queries))
    matrices, beside = ([MatrixName(*name) for name in found[key] or ()] for key in ("matrices", "beside"))
    parts = {
        "matrices": matrices,
        "beside": beside or None,
        "experts": experts,
        "recurrent": recurrent,
        "mamba": mamba,
        "heads": heads,
        "end": end,
        "latent": latent,
    }
    return LayerWeightMap(**{**found, **parts})


def name_bias(norm: str) -> str:
    """Return the name of the bias of a LayerNorm."""
    return f"{norm.removesuffix('.weight')}.bias"


def divide_rows(name: MatrixName, sizes: Sequence[int]) -> list[MatrixName] | None:
    """Divide a matrix into some of these numbers of rows; None if one of them does not begin with a panel."""
    ends = np.cumsum(sizes).tolist()
    if any(end % WIDTH for end in ends[:-1]):
        return None
    return [name._replace(first=end - n, end=end) for n, end in zip(sizes, ends, strict=True)]

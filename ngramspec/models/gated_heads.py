"""Join the projection of queries with that of gates which multiply what heads attend to, for models that have two of them (AFMoE).

Passes compute both in one product: in every head, the rows of its query and then those of its gate. Knows transformers' modules by the
names of their parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ngramspec.models.expert_weights import join_rows
from ngramspec.models.tensor_source import StoredTensor, TensorSource

GATES = "gate_proj"  # Name of the projection of gates in an attention layer.
JOINED = "q_and_gate_proj"  # Name of the matrix of both in an attention layer.


def list_gated_attention(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every attention layer with a projection of gates."""
    for path, module in model.named_modules():
        if all(hasattr(module, name) for name in ("q_proj", "k_proj", "v_proj", GATES, "o_proj", "head_dim")):
            yield path, module


def join_gates(queries: StoredTensor, gates: StoredTensor, n_heads: int) -> StoredTensor:
    """Join two matrices [heads · D, H] to one [heads · 2 · D, H]; they become float32 if they are of different kinds.

    Raises ValueError for other shapes.
    """
    (n_rows, n_in), of_gates = queries.shape, gates.shape
    if of_gates != queries.shape or n_rows % n_heads:
        raise ValueError(f"gates are {list(of_gates)}, and queries {list(queries.shape)}, of {n_heads} heads")
    return join_rows(*(replace(each, shape=(n_heads, n_rows // n_heads, n_in)) for each in (queries, gates)))


def add_gates(source: TensorSource, model: Any) -> TensorSource:
    """Add the joined matrices to the source of a model with gates. Raises KeyError."""
    found: dict[str, StoredTensor] = {}
    for path, attention in list_gated_attention(model):
        queries, gates = (source[f"{path}.{name}.weight"] for name in ("q_proj", GATES))
        found[f"{path}.{JOINED}.weight"] = join_gates(queries, gates, attention.q_proj.out_features // attention.head_dim)
    return TensorSource({**source, **found}, source.n_bytes) if found else source

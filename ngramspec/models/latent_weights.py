"""Views of the weights of latent attention (MLA), as matrices of single heads and as the one matrix that transformers has.

transformers makes the keys and values of all heads by one matrix `kv_b_proj` [heads · (K + V), rank], with the rows of a head's keys before
those of its values. In the absorbed form each head has a matrix of keys [rank, K], the other way round, and one of values [V, rank]; GGUF
files have both, older ones the one of transformers. Knows shapes, not what is computed with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ngramspec.errors import UnsupportedModelError
from ngramspec.models.expert_weights import transpose_experts
from ngramspec.models.tensor_source import KINDS, DividedTensor, Q8Tensor, StoredTensor, TensorSource

KEYS, VALUES, BOTH = "k_b", "v_b", "kv_b_proj"  # parts of an attention layer; transformers has the last one alone
_STEPS = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 8, "v_head_dim": 16}


@dataclass(frozen=True, kw_only=True)
class DequantisedTensor(StoredTensor):
    """Another tensor as float32."""

    stored: StoredTensor

    def read_rows(self, first: int, end: int) -> np.ndarray:
        return np.ascontiguousarray(self.stored.read_values(first, end)).view(np.uint8)


@dataclass(frozen=True, kw_only=True)
class JoinedHeads(StoredTensor):
    """transformers' matrix of all heads' keys and values, as float32. Each call reads the heads that it needs as a whole."""

    keys: StoredTensor
    """[heads, rank, K]"""
    values_of_heads: StoredTensor
    """[heads, V, rank]"""

    def read_rows(self, first: int, end: int) -> np.ndarray:
        rank, n_keys = self.keys.shape[1:]
        n_values = self.values_of_heads.shape[1]
        a, b = first // (n_keys + n_values), -(-end // (n_keys + n_values))
        keys = self.keys.read_values(a * rank, b * rank).reshape(b - a, rank, n_keys)
        values = self.values_of_heads.read_values(a * n_values, b * n_values).reshape(b - a, n_values, rank)
        begin = a * (n_keys + n_values)
        return join_arrays(keys, values)[first - begin : end - begin].view(np.uint8)


def join_arrays(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Join float32 matrices of heads' keys [heads, rank, K] and values [heads, V, rank] to [heads · (K + V), rank]."""
    joined = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)
    return np.ascontiguousarray(joined.reshape(-1, joined.shape[-1]))


def join_heads(keys: StoredTensor, values: StoredTensor) -> StoredTensor:
    """Join the matrices of heads' keys [heads, rank, K] and values [heads, V, rank] to transformers' one."""
    n_heads, rank, n_keys = keys.shape
    return JoinedHeads(kind="F32", shape=(n_heads * (n_keys + values.shape[1]), rank), keys=keys, values_of_heads=values)


def split_heads(stored: StoredTensor, n_heads: int, n_keys: int) -> tuple[StoredTensor, StoredTensor]:
    """Split transformers' matrix [heads · (K + V), rank] into those of heads' keys [heads, rank, K] and values [heads, V, rank].

    Keys in quant blocks, which cannot be transposed, become float32, or blocks of their own if the matrix is quantised while it is read.
    """
    n_rows, rank = stored.shape
    n_values = n_rows // n_heads - n_keys

    def select(whole: StoredTensor, first: int, end: int) -> StoredTensor:
        shape = n_heads, end - first, rank
        return DividedTensor(kind=whole.kind, shape=shape, stored=whole, n_groups=n_heads, parts=((first, end),))

    values = select(stored, n_keys, n_keys + n_values)
    if isinstance(stored, Q8Tensor) and n_keys % KINDS["Q8_0"][0] == 0:
        keys = transpose_experts(select(stored.stored, 0, n_keys))
        return Q8Tensor(kind="Q8_0", shape=keys.shape, stored=keys), values
    keys = transpose_experts(select(stored, 0, n_keys))
    return keys if KINDS[keys.kind][0] == 1 else DequantisedTensor(kind="F32", shape=keys.shape, stored=keys), values


def list_latent_attention(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every layer with latent attention of a model of transformers."""
    for path, module in model.named_modules():
        if all(hasattr(module, name) for name in (BOTH, "kv_a_proj_with_mqa", "kv_a_layernorm", "expand_kv")):
            yield path, module


def check_sizes(model: Any) -> None:
    """Refuse sizes of latent attention that passes do not compute. Raises UnsupportedModelError."""
    for _, attention in list_latent_attention(model):
        for name, step in _STEPS.items():
            if (getattr(attention, name) or 0) % step:
                told = f"{name} is {getattr(attention, name)}"
                raise UnsupportedModelError(f"{type(model).__name__}: {told} in its latent attention; accepted: multiples of {step}")


def add_heads(source: TensorSource, model: Any) -> TensorSource:
    """Add the matrices of single heads to the source of a model with latent attention, and make transformers' one of them.

    So both are the same numbers, however the matrices are quantised. Raises KeyError.
    """
    found: dict[str, StoredTensor] = {}
    for path, attention in list_latent_attention(model):
        names = [f"{path}.{name}.weight" for name in (KEYS, VALUES)]
        if names[0] in source:
            keys, values = (source[name] for name in names)
        else:
            keys, values = split_heads(source[f"{path}.{BOTH}.weight"], attention.num_heads, attention.qk_nope_head_dim)
        found |= {names[0]: keys, names[1]: values, f"{path}.{BOTH}.weight": join_heads(keys, values)}
    return TensorSource({**source, **found}, source.n_bytes) if found else source

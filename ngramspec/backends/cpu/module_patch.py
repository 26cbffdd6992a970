"""Put a model's modules over packed weights: its linear layers and embedding are replaced, other parameters are loaded as float32.

A model of transformers, whose parameters may be on the "meta" device, and the source of its weights go in; the same model, ready to
compute, comes out. A matrix is packed while it is read and never lies in memory dequantised. Knows modules, nothing of batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ngramspec.backends.cpu.experts_modules import PackedExperts, PackedRouter, find_router_options
from ngramspec.backends.cpu.linear import CpuPackedEmbedding, CpuPackedLinear, HeadGates, HeadQueries, SharedLinear, SharedProduct
from ngramspec.backends.cpu.matmul import CpuProduct, MatmulContext, Matrix, unpack_rows
from ngramspec.backends.cpu.packing import PackingThreads, pack
from ngramspec.models.expert_routing import find_activation, locate_router_parts
from ngramspec.models.expert_weights import ExpertWeights
from ngramspec.models.gated_heads import JOINED, list_gated_attention
from ngramspec.models.latent_weights import BOTH, KEYS, VALUES, join_arrays, list_latent_attention
from ngramspec.models.parameters import MemoryTensor
from ngramspec.models.tensor_source import StoredTensor, TensorSource

# Linear layers that see the same input and are multiplied as one.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
TELL_S = 0.3  # Seconds between two progress messages.


class PackedHeads(nn.Module):
    """A linear layer that makes keys and values [1, T, heads · (K + V)] of latent rows [1, T, rank] with the matrices of single heads.

    It unpacks them whenever it is called, which checks alone do.
    """

    def __init__(self, context: MatmulContext, keys: Matrix, values: Matrix, n_heads: int) -> None:
        super().__init__()
        self._context, self._matrices, self._n_heads = context, (keys, values), n_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kernels, n = self._context.kernels, self._n_heads
        keys, values = (unpack_rows(kernels, m.weight, np.arange(m.weight.n_out)).reshape(n, -1, m.weight.n_in) for m in self._matrices)
        return nn.functional.linear(x, torch.from_numpy(join_arrays(keys, values)))


class ModulePatcher:
    """Packs a model's matrices, each of them once, and replaces the modules that use them."""

    def __init__(
        self, model: PreTrainedModel, source: TensorSource, context: MatmulContext, plain: bool, progress: Callable[[str], None]
    ) -> None:
        """Prepare to patch a model. `plain`: pack every matrix as the float32 numbers that it stands for."""
        self.model, self.source, self.context, self._plain, self._progress = model, source, context, plain, progress
        self._made: dict[int, Matrix] = {}  # by the parameter, which may be tied
        self.matrices: dict[str, Matrix] = {}
        """Packed matrices by the path of their layer."""
        self.experts: dict[str, list[Matrix]] = {}
        """Gate, up and down of a layer's experts by the name of the first two's parameter."""
        self.unproven: list[str] = []
        """Paths of routers and experts that compute something else and stay as they are: their rows may depend on their number."""
        self._done, self._told_s = 0, -math.inf

    def bind(self) -> None:
        """Replace the modules. Raises UnsupportedModelError, ModelNotFoundError, MemoryError."""
        with PackingThreads() as self._threads:
            self._replace_modules()
        for path, module in self.model.named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and (parameter.is_meta or parameter.dtype != torch.float32):
                    values = self.source[f"{path}.{name}" if path else name].float32()
                    module._parameters[name] = nn.Parameter(torch.from_numpy(values.copy()), requires_grad=False)

    def _replace_modules(self) -> None:
        embedding = self.model.get_input_embeddings()
        for path, attention in list_latent_attention(self.model):
            self._pack_heads(path, attention)
        replaced: set[nn.Module] = set()
        for path, attention in list_gated_attention(self.model):
            self._pack_gates(path, attention)
        for path, parent in list(self.model.named_modules()):
            if parent in replaced:
                continue
            children = dict(parent.named_children())
            at = f"{path}." if path else ""
            for group in GROUPS:
                layers = [children.get(name) for name in group]
                if all(type(layer) is nn.Linear for layer in layers) and len({layer.in_features for layer in layers}) == 1:  # type: ignore[union-attr]
                    matrices = [self._get_matrix(at + name, children[name]) for name in group]
                    shared = SharedProduct(CpuProduct(self.context, matrices))
                    for i, name in enumerate(group):
                        setattr(parent, name, SharedLinear(shared, i))
            for name, child in parent.named_children():
                if type(child) in (nn.Linear, Conv1D):
                    setattr(parent, name, CpuPackedLinear(CpuProduct(self.context, [self._get_matrix(at + name, child)])))
                elif isinstance(child, nn.Embedding) and (child is embedding or hasattr(child, "embed_scale")):
                    scale = getattr(child, "embed_scale", None)
                    setattr(parent, name, CpuPackedEmbedding(self.context.kernels, self._get_matrix(at + name, child), scale))
                elif (other := self._pack_experts(at + name, child) or self._pack_router(at + name, child)) is not None:
                    replaced.update(child.modules())
                    setattr(parent, name, other)
                elif locate_router_parts(child) is not None or "down_proj" in child._parameters:
                    self.unproven.append(at + name)

    def _pack_heads(self, path: str, attention: nn.Module) -> None:
        """Pack the matrices of the heads of latent attention."""
        for name in (KEYS, VALUES):
            self.matrices[f"{path}.{name}"] = self._pack_matrix(self.source[f"{path}.{name}.weight"], None, transposed=False)
        keys, values = (self.matrices[f"{path}.{name}"] for name in (KEYS, VALUES))
        setattr(attention, BOTH, PackedHeads(self.context, keys, values, attention.num_heads))  # type: ignore[arg-type]

    def _pack_gates(self, path: str, attention: Any) -> None:
        """Pack the projections of an attention layer whose queries and gates are joined."""
        joined = self._pack_matrix(self.source[f"{path}.{JOINED}.weight"], None, transposed=False)
        self.matrices[f"{path}.{JOINED}"] = joined
        keys, values = (self._get_matrix(f"{path}.{name}", getattr(attention, name)) for name in ("k_proj", "v_proj"))
        shared = SharedProduct(CpuProduct(self.context, [joined, keys, values]))
        attention.q_proj = HeadQueries(shared, 0, attention.head_dim)
        attention.k_proj, attention.v_proj = SharedLinear(shared, 1), SharedLinear(shared, 2)
        attention.gate_proj = HeadGates(attention.q_proj)

    def _pack_experts(self, path: str, module: nn.Module) -> PackedExperts | None:
        """Pack the experts of one layer; None if the module holds none, or computes something else."""
        first = next((name for name in ("gate_up_proj", "up_proj") if name in module._parameters), "")
        if not first or module._parameters[first].dim() != 3 or "down_proj" not in module._parameters:  # type: ignore[union-attr]
            return None
        try:
            activation = find_activation(module)
        except (LookupError, RuntimeError):
            return None
        has_bias = "down_proj_bias" in module._parameters
        gate_up, down = ((f"{path}.{name}", f"{path}.{name}_bias" if has_bias else None) for name in (first, "down_proj"))
        interleaved, transposed = not getattr(module, "is_concatenated", True), bool(getattr(module, "is_transposed", False))
        weights = ExpertWeights(gate_up, down, interleaved, transposed, gated=first == "gate_up_proj")
        matrices = [self._pack_matrix(stored, bias, transposed=False) for stored, bias in weights.open(self.source)]
        self.experts[gate_up[0]] = matrices
        return PackedExperts(self.context, matrices, weights, self.source[gate_up[0]].shape[0], activation)

    def _pack_router(self, path: str, module: nn.Module) -> PackedRouter | None:
        """Pack a router; None if the module is none, or computes something else."""
        if (parts := locate_router_parts(module)) is None or (found := find_router_options(module)) is None:
            return None
        at = f"{path}.{parts.weight.removesuffix('.weight')}".removesuffix(".weight")
        bias = self.source[f"{path}.bias"].float32() if module._parameters.get("bias") is not None else None
        correction = None
        if f"{path}.{parts.correction}" in self.source:
            correction = self.source[f"{path}.{parts.correction}"].float32().reshape(-1)
        else:
            parts = parts._replace(correction=None)
        self.matrices[at] = self._pack_matrix(self.source[f"{at}.weight"], bias, transposed=False)
        return PackedRouter(CpuProduct(self.context, [self.matrices[at]]), *found, parts, correction)

    def _get_matrix(self, path: str, module: nn.Module) -> Matrix:
        parameter = module.weight
        if id(parameter) not in self._made:
            stored = self.source[f"{path}.weight"]
            bias = self.source[f"{path}.bias"].float32() if getattr(module, "bias", None) is not None else None
            self._made[id(parameter)] = self._pack_matrix(stored, bias, transposed=type(module) is Conv1D)
        self.matrices[path] = self._made[id(parameter)]
        return self.matrices[path]

    def _pack_matrix(self, stored: StoredTensor, bias: np.ndarray | None, transposed: bool) -> Matrix:
        self._report_progress(stored)
        kind, shape = stored.kind, stored.shape
        read: Callable[[int, int], np.ndarray] = stored.read_rows
        if transposed:
            whole = np.ascontiguousarray(stored.float32().T)
            kind, shape, read = "F32", whole.shape, lambda a, b: whole[a:b].view(np.uint8)
        elif self._plain:
            kind, read = "F32", lambda a, b: np.ascontiguousarray(stored.read_values(a, b)).view(np.uint8)
        elif stored.kind == "F32" and isinstance(stored, MemoryTensor) and _is_bfloat16(stored):
            kind, read = "BF16", lambda a, b: _take_upper_halves(stored.read_rows(a, b))
        return self.context.register_matrix(pack(kind, shape, read, self.context.arena, self._threads), bias)

    def _report_progress(self, stored: StoredTensor) -> None:
        self._done += stored.n_rows * stored.row_bytes
        if time.monotonic() - self._told_s > TELL_S:
            self._told_s = time.monotonic()
            self._progress(f"packing weights, {min(100, self._done * 100 // max(1, self.source.n_bytes))} %")


def _is_bfloat16(stored: StoredTensor) -> bool:
    """Return whether float32 numbers have only zeros in their lower halves."""
    return not any(
        (stored.read_rows(first, min(first + 4096, stored.n_rows)).view(np.uint32) & 0xFFFF).any()
        for first in range(0, stored.n_rows, 4096)
    )


def _take_upper_halves(rows: np.ndarray) -> np.ndarray:
    return (rows.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

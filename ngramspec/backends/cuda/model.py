"""Compute a model's pass over packed rows on the device: with our own kernels for Llama-style decoders, else with its own modules.

Token ids and `AttentionMetadata` on the device go in, logits come out. Both ways allocate through torch (so that a captured graph owns what
it uses) and never wait for the device. Neither knows requests or drafts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ngramspec.backends.cuda import layers
from ngramspec.backends.cuda.attention_metadata import AttentionMetadata
from ngramspec.backends.cuda.expert_layer import (
    ChosenExperts,
    ExpertLayer,
    ExpertsModule,
    MakePairProduct,
    RouterModule,
    UsedRows,
    holds_experts,
    read_correction,
    read_router,
)
from ngramspec.backends.cuda.gated_delta_layer import GatedDeltaLayer, RecurrentPass, read_delta_shape
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.backends.cuda.packed import CudaPackedEmbedding, CudaPackedLinear, joined_weights, packed_parts
from ngramspec.backends.cuda.paged_attention import AttentionLaunch, attend
from ngramspec.backends.cuda.quantised import CudaPackedWeight
from ngramspec.backends.cuda.rope_kv import rope_kv, write_kv
from ngramspec.backends.cuda.row_invariant_linear import LinearProduct
from ngramspec.errors import UnsupportedModelError
from ngramspec.models.expert_routing import locate_router_parts
from ngramspec.models.hf_modules import get_bias, get_rms_norm, get_weight

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}

# Models whose layers `CudaDecoder` computes, if they have the modules that it expects and the logits agree.
LLAMA_KIND = frozenset({
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM",
})  # fmt: skip
WINDOWED = frozenset({"MistralForCausalLM", "MixtralForCausalLM"})  # Their config has the window of all layers.
# Queries have gates, norms' weights are added to 1, some layers are Gated DeltaNet.
HYBRID_KIND = frozenset({"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"})


Weight = torch.Tensor | list[CudaPackedWeight]  # [N, K], or weights in blocks above each other.

# Makes a linear product of a weight [N, K] and its bias [N] or None.
MakeLinear = Callable[[Weight, torch.Tensor | None], LinearProduct]


class VendorProduct:
    """The vendor library's own choice for every number of rows: the fastest, and not row-invariant. Used for comparison."""

    def __init__(self, weight: Weight, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def _get_dense_weight(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight if isinstance(self.weight, torch.Tensor) else torch.cat([part.dequantise(dtype) for part in self.weight])

    def compute_partials(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._get_dense_weight(x.dtype))[None].float()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, self._get_dense_weight(x.dtype), self.bias)
        return y if out is None else out.copy_(y)


class PassDecoder(Protocol):
    pool: CudaPool
    """Set before the first pass: its size is known once the weights are in place."""

    def __call__(
        self, ids: torch.Tensor, rows: AttentionMetadata, wanted: torch.Tensor | None, plan: AttentionLaunch, out: torch.Tensor
    ) -> None:
        """Write the logits of the rows `wanted` [N] int64, or of all, to `out` [N, V] float32; ids [R] int32."""


@dataclass(slots=True)
class _AttentionLayer:
    qkv: LinearProduct
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """What each head's queries and keys are normed by."""
    scale: float
    window: int
    gated: bool
    """Whether each head's query is followed by a gate."""


@dataclass(slots=True)
class DenseMlp:
    """An MLP with a gate, without experts."""

    gate_up: LinearProduct
    down: LinearProduct
    activation: str

    @property
    def bias(self) -> torch.Tensor | None:
        return self.down.bias

    def compute_partials(self, x: torch.Tensor, _: UsedRows | None = None) -> torch.Tensor:
        """Multiply x [R, H] to sums [P, R, H] float32, without the bias."""
        return self.down.compute_partials(
            layers.compute_gated_activation(self.gate_up.compute_partials(x), self.gate_up.bias, activation=self.activation, dtype=x.dtype)
        )


@dataclass(slots=True)
class _DecoderLayer:
    first: torch.Tensor
    mixer: _AttentionLayer | GatedDeltaLayer
    out: LinearProduct
    second: torch.Tensor
    mlp: DenseMlp | ExpertLayer


class CudaDecoder:
    """A Llama-style decoder that takes nine kernels per layer, and four or more further ones for a layer with experts.

    The norms' sums, the rotary embedding and the activation take up the partial sums of the products before them. So splitting a product
    over its inner dimension, which small models and few rows need to keep the device busy, costs no kernel of its own.
    """

    pool: CudaPool

    def __init__(self, model: PreTrainedModel, make: MakeLinear, make_pairs: MakePairProduct, max_len: int) -> None:
        """Take over the weights: the modules' own become views of the concatenated ones. Raises UnsupportedModelError for other layers."""
        name = type(model).__name__
        self._make, self._make_pairs, self._dtype = make, make_pairs, model.dtype
        if name not in LLAMA_KIND | HYBRID_KIND:
            raise UnsupportedModelError(f"{name} is no Llama-style decoder")
        base: Any = model.base_model
        config = model.config.get_text_config()
        if not {"embed_tokens", "layers", "norm", "rotary_emb"} <= set(dict(base.named_children())):
            raise UnsupportedModelError(f"{name}: other modules than expected")
        self.centred = name in HYBRID_KIND
        self.embedding = base.embed_tokens
        self.eps = float(config.rms_norm_eps)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.last = self._norm_weight(base.norm)
        self.head = make(_take_over(model, "lm_head")[0], None)
        positions = torch.arange(max_len, device=self.last.device)[None]
        cos, sin = base.rotary_emb(torch.empty(1, 1, 1, dtype=model.dtype, device=self.last.device), positions)
        self.cos, self.sin = cos[0].contiguous(), sin[0].contiguous()
        everywhere = getattr(config, "sliding_window", None) if name in WINDOWED else None
        self.delta_shape = read_delta_shape(model)
        self.layers = [self._make_layer(layer, everywhere) for layer in base.layers]
        first = next(layer.self_attn for layer in base.layers if hasattr(layer, "self_attn"))
        self.head_dim = int(first.head_dim)
        self.n_heads = first.q_proj.out_features // self.head_dim // (1 + self.centred)

    def _norm_weight(self, norm: Any) -> torch.Tensor:
        """Return what the norm multiplies by; in float32 if its weight is added to 1."""
        weight: torch.Tensor = norm.weight.detach()
        return 1.0 + weight.float() if self.centred else weight

    def _make_layer(self, layer: Any, window: int | None) -> _DecoderLayer:
        mixed = "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"
        if set(dict(layer.named_children())) != {mixed, "mlp", "input_layernorm", "post_attention_layernorm"}:
            raise UnsupportedModelError(f"{type(layer).__name__}: other modules than expected")
        mixer, out = getattr(layer, mixed), "out_proj" if mixed == "linear_attn" else "o_proj"
        _check_linears(layer, [child for name, child in mixer.named_children() if "proj" in name])
        return _DecoderLayer(
            first=self._norm_weight(layer.input_layernorm),
            mixer=self._attention_layer(mixer, window) if mixed == "self_attn" else self._recurrent_layer(mixer),
            out=self._make(*_take_over(mixer, out)),
            second=self._norm_weight(layer.post_attention_layernorm),
            mlp=self._expert_layer(layer.mlp) if hasattr(layer.mlp, "experts") else self._dense_mlp(layer.mlp),
        )

    def _dense_mlp(self, mlp: Any) -> DenseMlp:
        _check_linears(mlp, [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")])
        return DenseMlp(self._make(*_take_over(mlp, "gate_proj", "up_proj")), self._make(*_take_over(mlp, "down_proj")), self.activation)

    def _expert_layer(self, block: Any) -> ExpertLayer:
        """Take over a router with its experts, and the shared expert that every row has, with or without a gate of its own."""
        parts = {name: child for name, child in block.named_children() if not isinstance(child, nn.Identity)}
        held, router = parts.pop("experts"), parts.pop("gate", None)
        gated, ungated = parts.pop("shared_expert", None), parts.pop("shared_experts", None)
        gate = parts.pop("shared_expert_gate", None)
        if parts or router is None or (gated is None) != (gate is None) or (gated is not None and ungated is not None):
            raise UnsupportedModelError(f"{type(block).__name__}: other modules than expected")
        options, weight, bias = read_router(router), router.weight.detach().to(self._dtype), getattr(router, "bias", None)
        if gate is not None:
            if type(gate) is not nn.Linear or gate.bias is not None or bias is not None:
                raise UnsupportedModelError(f"{type(block).__name__}: another gate of the shared expert")
            weight = torch.cat([weight, gate.weight.detach().to(weight.dtype)])
        mlp = ungated if gated is None else gated
        shared = None if mlp is None else self._dense_mlp(mlp)
        if shared is not None and shared.bias is not None:
            raise UnsupportedModelError(f"{type(block).__name__}: a shared expert with a bias")
        product, experts = self._make(weight, bias), ChosenExperts(held, self._make_pairs)
        return ExpertLayer(options, product, read_correction(router), experts, shared)

    def _attention_layer(self, attn: Any, window: int | None) -> _AttentionLayer:
        names = {name for name, child in attn.named_children() if not isinstance(child, nn.Identity)}
        projections, norms = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
        if names not in (projections, projections | norms):
            raise UnsupportedModelError(f"{type(attn).__name__}: other modules than expected")
        return _AttentionLayer(
            qkv=self._make(*_take_over(attn, "q_proj", "k_proj", "v_proj")),
            norms=(self._norm_weight(attn.q_norm), self._norm_weight(attn.k_norm)) if norms <= names else None,
            scale=float(attn.scaling),
            window=int(getattr(attn, "sliding_window", window) or 0),
            gated=self.centred,
        )

    def _recurrent_layer(self, mixer: Any) -> GatedDeltaLayer:
        """Take over a layer with Gated DeltaNet. One product has all inputs, unless only large matrices are in blocks."""
        make, large, gates = self._make, ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a")
        assert self.delta_shape is not None
        if self.delta_shape.row_width == self.delta_shape.gates_width:
            return GatedDeltaLayer(mixer, self.delta_shape, make(*_take_over(mixer, *large, *gates)), None)
        return GatedDeltaLayer(mixer, self.delta_shape, make(*_take_over(mixer, *large)), make(*_take_over(mixer, *gates)))

    def __call__(
        self, ids: torch.Tensor, rows: AttentionMetadata, wanted: torch.Tensor | None, plan: AttentionLaunch, out: torch.Tensor
    ) -> None:
        if isinstance(self.embedding, CudaPackedEmbedding):
            x = self.embedding(ids)
        else:
            x = layers.embed(ids, self.embedding.weight)
        q = torch.empty(len(ids), self.n_heads, self.head_dim, dtype=x.dtype, device=x.device)
        mixed = torch.zeros_like(q)  # rows that only fill up a bucket are not written
        recurrent = RecurrentPass(self.pool, rows.recurrent, self.delta_shape, x) if self.delta_shape and rows.recurrent else None
        used, partials, bias, i = UsedRows(rows.slots, self.pool.dummy), None, None, 0
        for layer in self.layers:
            if partials is None:
                normed = layers.compute_norm(x, layer.first, self.eps)
            else:
                normed = layers.add_norm(x, partials, bias, layer.first, self.eps)
            if isinstance(layer.mixer, GatedDeltaLayer):
                assert recurrent is not None
                partials = layer.out.compute_partials(recurrent.run(layer.mixer, normed))
            else:
                self._attend(layer.mixer, i, normed, rows, plan, (q, mixed))
                partials, i = layer.out.compute_partials(mixed.view(len(ids), -1)), i + 1
            normed = layers.add_norm(x, partials, layer.out.bias, layer.second, self.eps)
            partials, bias = layer.mlp.compute_partials(normed, used), layer.mlp.bias
        assert partials is not None
        normed = layers.add_norm(x, partials, bias, self.last, self.eps)
        self.head(normed if wanted is None else normed[wanted], out=out)

    def _attend(
        self, attn: _AttentionLayer, i: int, normed: torch.Tensor, rows: AttentionMetadata, plan: AttentionLaunch,
        work: tuple[torch.Tensor, torch.Tensor],
    ) -> None:  # fmt: skip
        """Compute the i-th layer with attention; the heads' outputs are left in the second array of `work`."""
        q, mixed = work
        kv, partials = (self.pool.keys[i], self.pool.values[i]), attn.qkv.compute_partials(normed)
        rope_kv(partials, attn.qkv.bias, (self.cos, self.sin), rows, kv, q, attn.norms, self.eps, gated=attn.gated)
        attend(q, kv, rows, mixed, plan, scale=attn.scale, window=attn.window)
        if attn.gated:
            layers.gate_attention(mixed, partials, attn.qkv.bias)


class ModulesDecoder:
    """A decoder made of transformers' own modules with our attention, pool and linear layers."""

    pool: CudaPool

    def __init__(self, model: PreTrainedModel, make: MakeLinear, make_pairs: MakePairProduct) -> None:
        """Replace the modules, but for routers and experts that compute something else than ours."""
        self.model = model
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                with contextlib.suppress(UnsupportedModelError):
                    if holds_experts(child):
                        setattr(parent, name, ExpertsModule(ChosenExperts(child, make_pairs)))
                    elif (parts := locate_router_parts(child)) is not None:
                        product = make(child.get_parameter(parts.weight).detach().to(model.dtype), get_bias(child))
                        setattr(parent, name, RouterModule(read_router(child), product, child))
                if isinstance(child, CudaPackedLinear):
                    setattr(parent, name, ProductModule(make([child.packed], child.bias), child))
                elif (weight := get_weight(child)) is not None:
                    setattr(parent, name, ProductModule(make(weight, get_bias(child)), child))
                elif (norm := _our_norm(child)) is not None:
                    setattr(parent, name, norm)

    def __call__(
        self, ids: torch.Tensor, rows: AttentionMetadata, wanted: torch.Tensor | None, plan: AttentionLaunch, out: torch.Tensor
    ) -> None:
        output = self.model(
            input_ids=ids.long()[None],
            position_ids=rows.positions.long()[None],
            use_cache=False,
            ngramspec=CudaAttentionPass(self.pool, rows, plan),
            **({} if wanted is None else {"logits_to_keep": wanted}),
        )
        out.copy_(output.logits[0])


class CudaAttentionPass:
    """Attention of one pass, given to the model's layers as the keyword argument `ngramspec` (`models.masks.AttentionPass`)."""

    def __init__(self, pool: CudaPool, rows: AttentionMetadata, plan: AttentionLaunch) -> None:
        self.pool, self.rows, self.plan = pool, rows, plan

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        write_kv(k.contiguous(), v.contiguous(), self.rows, keys, values)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)  # rows that only fill up a bucket are not written
        attend(q.contiguous(), (keys, values), self.rows, out, self.plan, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out


class ProductModule(nn.Module):
    """A linear layer that replaces `nn.Linear`."""

    def __init__(self, product: LinearProduct, old: nn.Module) -> None:
        super().__init__()
        self.product, self.weight = product, old.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class NormModule(nn.Module):
    """A norm that computes x / sqrt(mean(x²) + eps) · weight over the last axis, each row by itself."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return layers.compute_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


def _our_norm(module: nn.Module) -> NormModule | None:
    """Return our norm for an RMS norm that gives the same numbers; None for others, which stay as they are."""
    found = get_rms_norm(module)
    if found is None:
        return None
    weight, eps = found
    x = torch.randn(1, 5, len(weight), generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    ours = NormModule(weight, eps)
    slack = 1e-5 if weight.dtype == torch.float32 else 2e-2
    return ours if torch.allclose(module(x).float(), ours(x).float(), rtol=slack, atol=slack) else None


def _check_linears(owner: nn.Module, linears: list[Any]) -> None:
    if not all(type(linear) in (nn.Linear, CudaPackedLinear) for linear in linears):
        raise UnsupportedModelError(f"{type(owner).__name__}: other linear layers than expected")


def _take_over(parent: nn.Module, *names: str) -> tuple[Weight, torch.Tensor | None]:
    """Concatenate the weights (and biases) of linear layers; the layers keep views of them, also for weights in quant blocks."""
    linears: list[Any] = [getattr(parent, name) for name in names]
    biases = [linear.bias for linear in linears]
    bias = next((b for b in biases if b is not None), None)
    if bias is not None:
        missing = (bias.new_zeros(linear.out_features) for linear in linears)
        bias = torch.cat([zeros if b is None else b.detach() for b, zeros in zip(biases, missing, strict=True)])
    if (parts := packed_parts(linears)) is not None:
        if parts[0].codes.is_cuda:
            torch.cuda.empty_cache()
        return parts, bias
    if len(linears) == 1:
        return linears[0].weight.detach(), bias
    weight = joined_weights(linears)
    for name, old, part in zip(names, linears, weight.split([linear.out_features for linear in linears]), strict=True):
        linear = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
        linear.weight, linear.bias = nn.Parameter(part, requires_grad=False), old.bias
        setattr(parent, name, linear)
    if weight.is_cuda:
        torch.cuda.empty_cache()  # what the separate weights took is in pieces too small for the next joined ones
    return weight, bias

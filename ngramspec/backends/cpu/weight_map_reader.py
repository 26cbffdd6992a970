"""Read a `WeightMap` off a model of transformers whose modules are bound to packed weights (`module_patch`, `fused_ops`).

What these modules cannot show, such as what a layer's forward does with its norms, is assumed from the names of its parts; the runner
compares the results with transformers'. The module knows names and attributes of transformers' decoders.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ngramspec.backends.cpu import experts as moe
from ngramspec.backends.cpu import fused_ops
from ngramspec.backends.cpu.formats import WIDTH
from ngramspec.backends.cpu.gated_delta import TAPS
from ngramspec.backends.cpu.layer_part_maps import (
    BESIDE_EXPERTS,
    SHARED_EXPERTS,
    adds_plainly,
    get_score_scale,
    is_mamba,
    map_experts,
    map_latent_layer,
    map_mamba,
    name_mamba,
    read_beside_scales,
    read_latent_options,
    read_mamba_options,
)
from ngramspec.backends.cpu.layer_weight_map import ExpertsMap, LayerWeightMap, MatrixName, NameModule, RecurrentNames, divide_rows
from ngramspec.backends.cpu.linear import CpuPackedEmbedding, CpuPackedLinear, HeadGates, SharedLinear
from ngramspec.backends.cpu.llama_layers import NO_ROTARY, SILU, ModelOptions, RecurrentOptions, ShortConvOptions
from ngramspec.backends.cpu.varied_layers_reader import has_varied_heads, map_varied_layers, read_inputs
from ngramspec.backends.cpu.weight_map import QueryScale, Rotary, WeightMap
from ngramspec.models.gated_heads import JOINED
from ngramspec.models.hf_modules import ONE_PLUS, get_layer_norm
from ngramspec.models.latent_weights import BOTH, list_latent_attention
from ngramspec.models.tensor_source import TensorSource

ROUNDING = 1e-3  # Largest difference of an angle's cosine or sine: an angle of many turns is rounded when it is multiplied.
# A layer's norms by name: those before attention and MLP, and those after them.
_NORMS: tuple[tuple[tuple[str, str] | None, tuple[str, str] | None], ...] = (
    (("input_layernorm", "post_attention_layernorm"), None),
    (("input_layernorm", "pre_feedforward_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")),
    (None, ("post_attention_layernorm", "post_feedforward_layernorm")),
    (("input_layernorm", "pre_mlp_layernorm"), ("post_attention_layernorm", "post_mlp_layernorm")),
    (("input_layernorm", "post_attention_layernorm"), ("post_self_attn_layernorm", "post_mlp_layernorm")),
    (("input_layernorm", "pre_ff_layernorm"), None),
    (("input_layernorm", "input_layernorm"), None),  # attention and MLP see the same
    (("operator_norm", "ffn_norm"), None),
)
# Norms of queries and keys by name: before the rotary embedding, and after it.
_HEAD_NORMS, _LATE_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")), ("query_layernorm", "key_layernorm")
_SECOND_NORMS = ("post_attention_layernorm", "ffn_norm", "pre_ff_layernorm")  # of layers whose MLP does not see what attention sees
_MIXER = "mixer"  # a layer's only part besides its norm
_OUTPUTS = ("o_proj", "out_proj", "dense")  # names of attention's last matrix
_MLPS = ("mlp", "block_sparse_moe", "feed_forward", "shared_mlp")


def read_weight_map(model: PreTrainedModel, source: TensorSource, shapes: Sequence[tuple[int, int]]) -> WeightMap | None:
    """Return the weight map if the modules are those of a Llama-style decoder. `shapes`: (n_kv_heads, head_dim) per layer."""
    base: Any = model.base_model
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    norm, layers = _get_last_norm(base), getattr(base, "layers", None)
    varied = any(has_varied_heads(layer) for layer in layers or ())
    if not (
        layers and (len(set(shapes)) == 1 or varied) and norm is not None and _describe_norm(norm)
        and isinstance(head, CpuPackedLinear) and isinstance(embedding, CpuPackedEmbedding)
    ):  # fmt: skip
        return None
    paths = {module: path for path, module in model.named_modules(remove_duplicate=False)}

    def name_matrix(path: str) -> MatrixName:
        return MatrixName(f"{path}.weight", f"{path}.bias" if f"{path}.bias" in source else None)

    n_kv, head_dim = shapes[0][0], max(head_dim for _, head_dim in shapes)
    rotaries = _read_rotaries(_get_rotary(base), head_dim)
    options = _read_options(model, rotaries, head_dim)
    types, only_rotary = list(rotaries or ()), NO_ROTARY if _get_rotary(base) is None else 0
    of_layers = getattr(model.config.get_text_config(), "layer_types", None) or [""] * len(layers)
    found = (
        map_varied_layers(model, name_matrix, source, shapes, rotaries)
        if varied and rotaries
        else [
            _map_layer(
                layer, paths[layer], name_matrix, of_layer, types.index(of_layer) if len(types) > 1 else only_rotary, n_kv * head_dim
            )
            for layer, of_layer in zip(layers, of_layers, strict=True)
        ]
    )
    of_latent = {norm for _, attention in list_latent_attention(model) for norm in attention.children()}
    norms = {described for m in model.modules() if m not in of_latent and (described := _describe_norm(m))}
    if not all(found) or len(norms) != 1 or rotaries is None or options is None:
        return None
    tied = embedding.matrix is head.product.matrices[0]
    return WeightMap(
        layers=[layer for layer in found if layer], embedding=name_matrix(paths[embedding])[0],
        head=name_matrix(paths[embedding if tied else head])[:2], norm=name_matrix(paths[norm])[0], norm_offset=norms.pop().offset,
        n_kv=n_kv, rotaries=list(rotaries.values()), options=options, query_scale=_read_query_scale(model),
        inputs=read_inputs(model, name_matrix) if varied else None,
    )  # fmt: skip


def _get_residual_scale(layer: Any) -> float:
    """Return the factor of what a layer's attention and MLP add, as Granite or MiniCPM 3 name it."""
    return float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1)))


def _get_last_norm(base: Any) -> Any:
    return next((getattr(base, name) for name in ("norm", "embedding_norm", "norm_f", "final_layernorm") if hasattr(base, name)), None)


def _get_rotary(base: Any) -> Any:
    return getattr(base, "rotary_emb", None) or getattr(base, "pos_emb", None)


class _Norm(NamedTuple):
    """What all norms of a model have in common."""

    eps: float
    offset: float
    subtracts_mean: bool


def _describe_norm(module: nn.Module) -> _Norm | None:
    """Return what a norm of rows computes; None for another module."""
    if isinstance(module, fused_ops.RMSNorm):
        return _Norm(float(module.eps), module.offset, subtracts_mean=False)
    found = get_layer_norm(module)
    return None if found is None else _Norm(found[2], float(type(module).__name__.endswith(ONE_PLUS)), subtracts_mean=True)


def _is_centred(norm: nn.Module | None) -> bool:
    """Return whether a norm of queries or keys subtracts the mean, with weights [heads, D], as Cohere's do."""
    return norm is not None and type(norm).__name__.endswith("LayerNorm") and getattr(norm, "weight", torch.empty(0)).ndim == 2


def _read_rotaries(module: nn.Module | None, head_dim: int) -> dict[str, Rotary] | None:
    """Return the rotary embeddings by the type of their layers ("" if there is one for all); None for another kind of them."""
    if module is None:  # no layer has one; cosines of 1 stand in for it
        return {"": Rotary([0.0] * (head_dim // 2), 1.0)}
    found = {}
    for kind in getattr(module, "layer_types", None) or [""]:
        prefix = f"{kind}_" if kind else ""
        frequencies, scale = getattr(module, f"{prefix}inv_freq", None), getattr(module, f"{prefix}attention_scaling", 1.0)
        if frequencies is None or 2 * len(frequencies) > head_dim:
            return None
        found[kind] = Rotary(frequencies.float().tolist(), float(scale))
        for first in (0, 1000):
            theirs = module(torch.zeros(1, 1, 1), torch.arange(first, first + 24)[None], *([kind] if kind else []))
            ours = found[kind].compute_angles(first, 24)
            both = (theirs.real, theirs.imag) if isinstance(theirs, torch.Tensor) else theirs  # DeepSeek-V2 has complex numbers
            for t, o in zip((t[0].float().numpy() for t in both), ours, strict=True):
                pairs = o[:, : len(frequencies)]  # gpt-oss has one of each, others two in one order or the other
                if not any(t.shape == each.shape and np.abs(t - each).max() <= ROUNDING for each in (pairs, o, pairs.repeat(2, axis=1))):
                    return None
    return found


def _is_interleaved(model: PreTrainedModel, rotaries: dict[str, Rotary], head_dim: int) -> bool:
    """Return whether the rotary embedding turns pairs that lie side by side, by what transformers' function computes.

    Latent attention may state it. A family without a function of the usual name is assumed to turn halves.
    """
    base: Any = model.base_model
    rotate: Any = getattr(sys.modules[type(base.layers[0]).__module__], "apply_rotary_pos_emb", None)
    kind, rotary = next(iter(rotaries.items()))
    if any(list_latent_attention(model)):
        stated = getattr(model.config.get_text_config(), "rope_interleave", True if rotate is None else None)
        if stated is not None:
            return bool(stated)
        head_dim = 2 * len(rotary.frequencies)  # what is turned lies apart
    n, x = len(rotary.frequencies), torch.randn(1, 1, 24, head_dim, generator=torch.Generator().manual_seed(0))
    cos, sin = (torch.from_numpy(each[:, :n]) for each in rotary.compute_angles(0, 24))
    y, z = x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]
    side_by_side = torch.cat([torch.stack([y * cos - z * sin, z * cos + y * sin], dim=-1).flatten(-2), x[..., 2 * n :]], dim=-1)
    try:
        theirs = rotate(x, x, *_get_rotary(base)(x, torch.arange(24)[None], *([kind] if kind else [])))[0]
        return bool((theirs - side_by_side).abs().max() <= ROUNDING * x.abs().max())
    except (RuntimeError, TypeError, ValueError):
        return False


def _read_options(model: PreTrainedModel, rotaries: dict[str, Rotary] | None, head_dim: int) -> ModelOptions | None:
    """Return what holds for all layers; None if layers differ in it."""
    base: Any = model.base_model
    config: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    attending: list[Any] = [layer for layer in base.layers if _get_attention(layer) is not None]
    attentions: list[Any] = [_get_attention(layer) for layer in attending]
    outputs: list[Any] = [next((getattr(attn, name) for name in _OUTPUTS if hasattr(attn, name)), None) for attn in attentions]
    if not all(hasattr(attn, "scaling") and isinstance(output, CpuPackedLinear) for attn, output in zip(attentions, outputs, strict=True)):
        return None
    gated = {_is_gated(attn, output.in_features) for attn, output in zip(attentions, outputs, strict=True)}
    delta_nets = [layer.linear_attn for layer in base.layers if hasattr(layer, "linear_attn")]
    recurrent = {_read_recurrent_options(mixer, int(getattr(config, "linear_key_repeats", 1))) for mixer in delta_nets}
    convs = {_read_conv_options(layer.conv) for layer in base.layers if hasattr(layer, "conv")}
    mixers = [mixer for layer in base.layers if (mixer := _get_mamba(layer)) is not None]
    mambas = {read_mamba_options(mixer) for mixer in mixers}
    mlps = [module for module in model.modules() if isinstance(module, fused_ops.GatedMLP | fused_ops.PlainMLP)]
    activations = {(module.activation, *module.factors) for module in mlps} or {(SILU, 1.0, 1.0)}
    alike = {
        (get_score_scale(layer, attn), float(getattr(attn, "attn_logit_softcapping", None) or 0), _get_residual_scale(layer))
        for layer, attn in zip(attending, attentions, strict=True)
    }
    norm, n_rotated = _describe_norm(_get_last_norm(base)), {2 * len(each.frequencies) for each in (rotaries or {}).values()}
    n_heads = outputs[0].in_features // head_dim
    if has_varied_heads(base.layers[0]):
        n_rotated, n_heads = {head_dim}, outputs[0].in_features // attentions[0].head_dim
    differs = any(len(each) != 1 for each in (activations, alike, gated, n_rotated))
    latents = {read_latent_options(attention) for _, attention in list_latent_attention(model)}
    states = recurrent, convs, mambas, latents
    if differs or any(None in each or len(each) > 1 for each in states) or rotaries is None or norm is None:
        return None
    if any(np.float32(getattr(mixer.norm, "variance_epsilon", norm.eps)) != np.float32(norm.eps) for mixer in mixers):
        return None
    activation, gate_factor, mlp_factor = activations.pop()
    attention_scale, beside_scale = read_beside_scales(base.layers[0])
    scale, softcap, residual_scale = alike.pop()
    mup = config.hidden_size**0.5 if getattr(config, "mup_enabled", False) else 1  # AFMoE's
    return ModelOptions(
        n_heads=attentions[0].num_heads if latents else n_heads, head_dim=head_dim, eps=norm.eps, scale=scale,
        activation=activation, gate_factor=gate_factor, mlp_factor=mlp_factor, softcap=softcap, residual_scale=residual_scale,
        embedding_scale=float(embedding.scale if embedding.scale is not None else getattr(base, "embedding_multiplier", mup)),
        logit_scale=float(getattr(model, "logit_scale", getattr(base, "lm_head_multiplier", 1))) / getattr(config, "logits_scaling", 1),
        n_rotated=n_rotated.pop() % head_dim,
        interleaved=_is_interleaved(model, rotaries, head_dim),
        layer_norm=norm.subtracts_mean,
        late_norms=hasattr(attentions[0], _LATE_NORMS[0]),
        parallel=not any(getattr(base.layers[0], name, None) is not None for name in (*_SECOND_NORMS, _MIXER)),
        centred_heads=_is_centred(getattr(attentions[0], _HEAD_NORMS[0][0], None)),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0), gated=gated.pop(),
        recurrent=recurrent.pop() if recurrent else None, short_conv=convs.pop() if convs else None,
        mamba=mambas.pop() if mambas else None, beside=_is_beside(base.layers[0]), attention_scale=attention_scale,
        beside_scale=beside_scale, latent=latents.pop() if latents else None,
    )  # fmt: skip


def _map_layer(layer: nn.Module, path: str, name_matrix: NameModule, layer_type: str, rotary: int, kv: int) -> LayerWeightMap | None:
    """Map the parts of a Llama-style layer at a path; None for another kind of layer.

    `rotary`: number of its rotary embedding; `kv`: outputs of all heads of keys.
    """
    if hasattr(layer, _MIXER):
        return _map_mixer_layer(layer, path, name_matrix, kv)
    children = {name: child for name, child in layer.named_children() if not isinstance(child, nn.Dropout)}
    attn: Any = children.get("self_attn")
    recurrence, conv, mamba = (children.pop(name, None) for name in ("linear_attn", "conv", "mamba"))
    mlp = next((name for name in _MLPS if name in children), "")
    mixed = map_experts(children[mlp], f"{path}.{mlp}", name_matrix) if mlp else None
    beside = [name for name in (SHARED_EXPERTS, BESIDE_EXPERTS) if mlp and hasattr(children[mlp], name)]
    shared = beside[0] if beside else "shared_expert"
    dense = f"{mlp}.{shared}" if mixed and mixed.shared else mlp
    if mixed and children.pop(BESIDE_EXPERTS, None) is not None:
        mixed, dense = replace(mixed, shared=moe.SHARED_FULLY), BESIDE_EXPERTS
    of_norms = {name: child for name, child in children.items() if name not in ("self_attn", mlp)}
    norms = next((pairs for pairs in _NORMS if of_norms.keys() == {*(pairs[0] or ()), *(pairs[1] or ())}), None)
    if norms is None or not all(_describe_norm(norm) for norm in of_norms.values()) or (mixed is None and not mlp):
        return None
    if recurrence is not None:
        return _map_recurrent_layer(layer, path, name_matrix, recurrence, dense, mixed, norms)
    if conv is not None:
        return _map_conv_layer(layer, path, name_matrix, conv, dense, mixed, norms)
    if mamba is not None and attn is None:
        return _map_mamba_layer(layer, path, name_matrix, mamba, dense, mixed, norms)
    if hasattr(attn, BOTH):
        of_mlp = [] if mixed and not mixed.shared else _map_mlp(layer.get_submodule(dense), f"{path}.{dense}", name_matrix)
        return map_latent_layer(layer, path, name_matrix, of_mlp, mixed, norms, rotary)
    parts = dict(attn.named_children()) if attn is not None else {}
    head_names = next((pair for pair in (*_HEAD_NORMS, _LATE_NORMS) if pair[0] in parts), _HEAD_NORMS[0])
    heads: list[Any] = [parts.pop(name, None) for name in head_names]
    output = next((name for name in _OUTPUTS if name in parts), "")
    o = parts.pop(output, None)
    if not isinstance(o, CpuPackedLinear):
        return None
    attention = _map_projections(parts, f"{path}.self_attn", name_matrix, o.in_features, kv)
    if parts or attention is None:
        return None
    centred = [each for each in heads if _is_centred(each)]
    if centred and [tuple(norm.weight.shape) for norm in centred] != [(n // attn.head_dim, attn.head_dim) for n in (o.in_features, kv)]:
        return None
    if any(heads) and not centred and not all(isinstance(norm, fused_ops.RMSNorm) for norm in heads):
        return None
    if any(heads) and not centred and [len(norm.weight) for norm in heads] not in ([attn.head_dim] * 2, [o.in_features, kv]):
        return None
    if not isinstance(getattr(attn, "scaling", None), float) or not hasattr(attn, "head_dim"):
        return None
    window = attn.sliding_window if hasattr(attn, "sliding_window") else getattr(attn.config, "sliding_window", None)  # as it is handed on
    if layer_type == "full_attention":
        window = None
    of_layer_norms = {f"{name}.{kind}" for name in of_norms for kind in ("weight", "bias")}
    of_layer_norms |= {f"self_attn.{name}.weight" for name in head_names} if centred else set()
    known = {"self_attn.sinks", f"{mlp}.expert_bias"} | of_layer_norms
    known |= {f"mamba.{name}" for name, _ in mamba.named_parameters()} if mamba is not None else set()
    if {name for name, _ in layer.named_parameters()} - known:
        return None
    of_mamba = map_mamba(mamba, f"{path}.mamba", name_matrix) if mamba is not None else None
    outputs = name_matrix(f"{path}.self_attn.{output}")
    if mamba is not None and (of_mamba is None or mixed is not None or not adds_plainly(layer, [*attention, outputs, *of_mamba[:-1]])):
        return None
    inside: list[MatrixName] | None = []
    if mixed is None or mixed.shared:
        inside = _map_mlp(layer.get_submodule(dense), f"{path}.{dense}", name_matrix)
    if inside is None:
        return None
    return LayerWeightMap(
        matrices=[*attention, outputs, *inside],
        norms=[name_matrix(f"{path}.{name}")[0] for name in norms[0]] if norms[0] else None,
        head_norms=[name_matrix(f"{path}.self_attn.{name}")[0] for name in head_names] if all(heads) else None,
        window=window or 0,
        rotary=rotary if _has_rotary(attn) else NO_ROTARY,
        experts=mixed,
        sinks=f"{path}.self_attn.sinks" if hasattr(attn, "sinks") else None,
        post_norms=[name_matrix(f"{path}.{name}")[0] for name in norms[1]] if norms[1] else None,
        mamba=name_mamba(f"{path}.mamba", name_matrix, mamba) if mamba is not None else None,
        beside=of_mamba,
    )


def _is_beside(layer: Any) -> bool:
    """Return whether a layer has Mamba-2 beside attention."""
    return _get_mamba(layer) is not None and _get_attention(layer) is not None


def _is_gated(attn: Any, mixed: int) -> bool:
    """Return whether the projection of queries has a gate for each of their numbers [mixed], in every head behind its query."""
    q = getattr(attn, "q_proj", None)
    return isinstance(q, SharedLinear) and q.shared.product.sizes[q.index] == 2 * mixed


def _read_recurrent_options(mixer: Any, repeats: int) -> RecurrentOptions | None:
    """Return the options of a layer with Gated DeltaNet whose convolution sees four tokens; None for another kind of recurrence.

    `repeats`: how often each of its heads of keys is repeated (`RepeatedTensor`).
    """
    if not type(mixer).__name__.endswith("GatedDeltaNet") or mixer.conv_kernel_size != TAPS or mixer.conv1d.bias is not None:
        return None
    return RecurrentOptions(mixer.num_k_heads // repeats, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim, repeats > 1)


def _map_recurrent_layer(
    layer: nn.Module, path: str, name_matrix: NameModule, mixer: Any, dense: str, mixed: ExpertsMap | None, norms: tuple[Any, Any]
) -> LayerWeightMap | None:
    """Return the map of a layer with Gated DeltaNet in place of attention; `dense`: path of its MLP within the layer."""
    at, inside = f"{path}.linear_attn", _map_mlp(layer.get_submodule(dense), f"{path}.{dense}", name_matrix)
    inputs = ("in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj")
    if inside is None or norms[0] is None or not all(isinstance(getattr(mixer, name, None), CpuPackedLinear) for name in inputs):
        return None
    recurrent = RecurrentNames(f"{at}.in_proj_a.weight", f"{at}.conv1d.weight", f"{at}.A_log", f"{at}.dt_bias", f"{at}.norm.weight")
    return LayerWeightMap(
        matrices=[*(name_matrix(f"{at}.{name}") for name in inputs), *inside],
        norms=[name_matrix(f"{path}.{name}")[0] for name in norms[0]], head_norms=None, window=0, rotary=NO_ROTARY, experts=mixed,
        post_norms=None, recurrent=recurrent,
    )  # fmt: skip


def _read_conv_options(conv: Any) -> ShortConvOptions | None:
    """Return the options of a layer with a short convolution without biases; None for another kind of convolution."""
    if not type(conv).__name__.endswith("ShortConv") or conv.conv.bias is not None or conv.conv.in_channels % WIDTH:
        return None
    return ShortConvOptions(conv.conv.in_channels, conv.conv.kernel_size[0])


def _map_conv_layer(
    layer: nn.Module, path: str, name_matrix: NameModule, conv: Any, dense: str, mixed: ExpertsMap | None, norms: tuple[Any, Any]
) -> LayerWeightMap | None:
    """Return the map of a layer with a short convolution in place of attention; `dense`: path of its MLP within the layer."""
    options, inside = _read_conv_options(conv), [] if mixed else _map_mlp(layer.get_submodule(dense), f"{path}.{dense}", name_matrix)
    inputs, output = getattr(conv, "in_proj", None), getattr(conv, "out_proj", None)
    if options is None or inside is None or norms[0] is None or not isinstance(output, CpuPackedLinear):
        return None
    n = options.n_channels
    if not isinstance(inputs, CpuPackedLinear) or inputs.out_features != 3 * n or output.in_features != n:
        return None
    divided = divide_rows(name_matrix(f"{path}.conv.in_proj"), [n] * 3)
    if divided is None:
        return None
    return LayerWeightMap(
        matrices=[*divided, name_matrix(f"{path}.conv.out_proj"), *inside], norms=[name_matrix(f"{path}.{name}")[0] for name in norms[0]],
        head_norms=None, window=0, rotary=NO_ROTARY, experts=mixed, short_conv=f"{path}.conv.conv.weight",
    )  # fmt: skip


def _map_mamba_layer(
    layer: nn.Module, path: str, name_matrix: NameModule, mixer: Any, dense: str, mixed: ExpertsMap | None, norms: tuple[Any, Any]
) -> LayerWeightMap | None:
    """Return the map of a layer with Mamba-2 in place of attention; `dense`: path of its MLP within the layer."""
    inside = [] if mixed and not mixed.shared else _map_mlp(layer.get_submodule(dense), f"{path}.{dense}", name_matrix)
    matrices = map_mamba(mixer, f"{path}.mamba", name_matrix)
    if inside is None or norms[0] is None or matrices is None:
        return None
    return LayerWeightMap(
        matrices=[*matrices, *inside], norms=[name_matrix(f"{path}.{name}")[0] for name in norms[0]],
        head_norms=None, window=0, rotary=NO_ROTARY, experts=mixed, mamba=name_mamba(f"{path}.mamba", name_matrix, mixer),
    )  # fmt: skip


def _map_mixer_layer(layer: Any, path: str, name_matrix: NameModule, kv: int) -> LayerWeightMap | None:
    """Return the map of a layer of Nemotron-H: a norm, and Mamba-2, attention without rotary embedding or an MLP."""
    mixer, at = layer.mixer, f"{path}.{_MIXER}"
    if dict(layer.named_children()).keys() != {"norm", _MIXER} or not _describe_norm(layer.norm):
        return None
    matrices: list[MatrixName] | None
    mixed: ExpertsMap | None = None
    if is_mamba(mixer):
        matrices = map_mamba(mixer, at, name_matrix)
    elif _get_attention(layer) is not None:
        parts = dict(mixer.named_children())
        o = parts.pop("o_proj", None)
        matrices = _map_projections(parts, at, name_matrix, o.in_features, kv) if isinstance(o, CpuPackedLinear) else None
        if parts or matrices is None or getattr(mixer.config, "sliding_window", None):
            return None
        matrices.append(name_matrix(f"{at}.o_proj"))
    elif (mixed := map_experts(mixer, at, name_matrix)) is not None:
        matrices = _map_mlp(getattr(mixer, SHARED_EXPERTS, mixer), f"{at}.{SHARED_EXPERTS}", name_matrix)
    else:
        matrices = _map_mlp(mixer, at, name_matrix)
    if matrices is None:
        return None
    return LayerWeightMap(
        matrices=matrices, norms=[name_matrix(f"{path}.norm")[0]] * 2, head_norms=None, window=0, rotary=NO_ROTARY, experts=mixed,
        mamba=name_mamba(at, name_matrix, mixer) if is_mamba(mixer) else None,
    )  # fmt: skip


def _get_mamba(layer: Any) -> Any:
    """Return a layer's Mamba-2, or None."""
    mixer = getattr(layer, _MIXER, None)
    return mixer if is_mamba(mixer) else getattr(layer, "mamba", None)


def _get_attention(layer: Any) -> Any:
    """Return a layer's attention, or None."""
    mixer = getattr(layer, _MIXER, None)
    return mixer if hasattr(mixer, "q_proj") else getattr(layer, "self_attn", None)


def _has_rotary(attn: Any) -> bool:
    """Return whether an attention layer rotates its queries and keys: where others have windows, those of ExaOne 4, Cohere 2
    and AFMoE do not.
    """
    is_global = getattr(attn, "sliding_window", None) is not None and not getattr(attn, "is_sliding", True)
    if type(attn).__name__ in ("Cohere2Attention", "Cohere2MoeAttention", "AfmoeAttention"):
        is_global = attn.sliding_window is None and not getattr(attn, "force_rope", False)
    return bool(getattr(attn, "use_rope", True)) and not is_global


def _map_projections(parts: dict[str, nn.Module], path: str, name_matrix: NameModule, mixed: int, kv: int) -> list[MatrixName] | None:
    """Map the projections of queries [mixed], keys and values [kv each] among the parts of an attention layer, and take them out.

    None if they are of another kind, or lie in one matrix in which they do not begin with a panel.
    """
    separate = [parts.pop(f"{name}_proj", None) for name in "qkv"]
    if all(isinstance(p, SharedLinear) for p in separate):
        of_queries = JOINED if isinstance(parts.pop("gate_proj", None), HeadGates) else "q_proj"
        return [name_matrix(f"{path}.{name}") for name in (of_queries, "k_proj", "v_proj")]
    joined = parts.pop("qkv_proj", None)
    if any(separate) or not isinstance(joined, CpuPackedLinear) or joined.out_features != mixed + 2 * kv:
        return None
    return divide_rows(name_matrix(f"{path}.qkv_proj"), [mixed, kv, kv])


def _map_mlp(mlp: nn.Module, path: str, name_matrix: NameModule) -> list[MatrixName] | None:
    """Map gate, up and down of an MLP; None for another kind of it, or if up does not begin with a panel of its matrix."""
    if isinstance(mlp, fused_ops.PlainMLP):
        return [name_matrix(f"{path}.{name}") for name in mlp.names]
    if not isinstance(mlp, fused_ops.GatedMLP):
        return None
    if len(mlp.product.sizes) == 2:
        return [name_matrix(f"{path}.{name}") for name in mlp.names]
    both = divide_rows(name_matrix(f"{path}.{mlp.names[0]}"), [mlp.down.in_features] * 2)
    return both and [*both, name_matrix(f"{path}.{mlp.names[-1]}")]


def _read_query_scale(model: PreTrainedModel) -> QueryScale | None:
    rope: Any = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    growth, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScale(float(growth), int(length)) if growth and length else None

"""Make the configs of transformers' hybrids, which have recurrent layers beside attention, of the metadata of GGUF files.

See `gguf_configs`, which has those of other models.
"""

from __future__ import annotations

from ngramspec.models.gguf_configs import read_llama, read_multipliers, read_partial
from ngramspec.models.gguf_expert_keys import SIGMOID, Config, read_experts
from ngramspec.models.gguf_metadata import CONV, FULL, LINEAR, GgufMetadata

MOST_TAPS = 16  # Most tokens that the convolution of a recurrent layer may see; published models have 3 or 4.


def _read_layers_with_keys(metadata: GgufMetadata) -> tuple[int, list[bool]]:
    """Read the number of heads of keys of layers with attention, and which layers have any."""
    kv = metadata.get_per_layer("attention.head_count_kv")
    if len(kinds := {n for n in kv if n}) != 1:
        raise metadata.make_refusal("attention.head_count_kv", kv, "one number of heads for layers with attention, 0 for others")
    return kinds.pop(), [n > 0 for n in kv]


def _read_mamba(metadata: GgufMetadata) -> tuple[int, int, int, int, int]:
    """Read the sizes of layers with Mamba-2: heads, outputs of one, groups of heads, state, tokens that the convolution sees."""
    inner, n_heads, n_groups = (metadata.get_int(f"ssm.{key}") for key in ("inner_size", "time_step_rank", "group_count"))
    widest = max(n for tensor in metadata.file.tensors.values() for n in tensor.shape)
    if not 0 < inner <= widest:
        raise metadata.make_refusal("ssm.inner_size", inner, f"1 to {widest}, by its tensors")
    if not 0 < n_heads <= inner or inner % n_heads:
        raise metadata.make_refusal("ssm.time_step_rank", n_heads, f"a divisor of ssm.inner_size, {inner}")
    if n_groups < 1 or n_heads % n_groups:
        raise metadata.make_refusal("ssm.group_count", n_groups, f"a divisor of ssm.time_step_rank, {n_heads}")
    if not 0 < (state := metadata.get_int("ssm.state_size")) <= widest:
        raise metadata.make_refusal("ssm.state_size", state, f"1 to {widest}, by its tensors")
    if not MOST_TAPS >= (taps := metadata.get_int("ssm.conv_kernel")) > 1:
        raise metadata.make_refusal("ssm.conv_kernel", taps, f"2 to {MOST_TAPS}")
    return n_heads, inner // n_heads, n_groups, state, taps


def read_granitehybrid(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of Granite 4's hybrids. Layers without heads of keys have Mamba-2 in place of attention."""
    kv, attends = _read_layers_with_keys(metadata)
    if all(attends):
        raise metadata.make_refusal("attention.head_count_kv", [kv] * len(attends), "0 for some layers")
    i_attention, i_mamba = attends.index(True), attends.index(False)
    inner, has_experts = metadata.get_same("feed_forward_length"), metadata.get_int("expert_count", 0) > 0
    experts = read_experts(metadata, normalise=True) if has_experts else {"num_experts": 0, "num_experts_per_tok": 0}
    n_shared = metadata.get_int("expert_shared_feed_forward_length", 0) if has_experts else inner
    if has_experts and n_shared < 1:
        raise metadata.make_refusal("expert_shared_feed_forward_length", n_shared, "1 and more")
    if (turned := metadata.get_int("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        raise metadata.make_refusal("rope.dimension_count", turned, str(config["head_dim"]))
    n_heads, head_dim, n_groups, state, taps = _read_mamba(metadata)
    if n_heads * head_dim % config["hidden_size"]:
        raise metadata.make_refusal("ssm.inner_size", n_heads * head_dim, f"a multiple of embedding_length, {config['hidden_size']}")
    return read_multipliers(metadata, config) | {
        "mamba_n_heads": n_heads, "mamba_d_head": head_dim, "mamba_n_groups": n_groups, "mamba_d_state": state,
        "mamba_d_conv": taps, "mamba_expand": n_heads * head_dim // config["hidden_size"],
        "num_key_value_heads": kv, "layer_types": [FULL if each else LINEAR for each in attends], "rope_parameters": metadata.get_rope(),
        "position_embedding_type": None if metadata.is_stated("rope.scaling.finetuned", False) else "rope",
        "attention_bias": metadata.has_tensor(f"blk.{i_attention}.attn_q.bias"), "intermediate_size": inner,
        "mamba_conv_bias": metadata.has_tensor(f"blk.{i_mamba}.ssm_conv1d.bias"), "mamba_proj_bias": False,
        "shared_intermediate_size": n_shared, "num_local_experts": experts.pop("num_experts"), **experts,
    }  # fmt: skip


def read_falcon_h1(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of Falcon-H1, whose layers have Mamba-2 beside attention. Its many factors are in the weights of a file."""
    n_heads, head_dim, n_groups, state, taps = _read_mamba(metadata)
    return read_llama(metadata, config) | {
        "mamba_n_heads": n_heads, "mamba_d_head": head_dim, "mamba_d_ssm": n_heads * head_dim, "mamba_n_groups": n_groups,
        "mamba_d_state": state, "mamba_d_conv": taps, "mamba_conv_bias": metadata.has_tensor("blk.0.ssm_conv1d.bias"),
        "mamba_rms_norm": metadata.has_tensor("blk.0.ssm_norm.weight"), "mamba_norm_before_gate": False, "mamba_proj_bias": False,
        "projectors_bias": False,
    }  # fmt: skip


def read_nemotron_h(metadata: GgufMetadata, config: Config) -> Config:
    """Read Nemotron-H's config. A layer is attention if it has heads of keys, an MLP or experts if these have a size, else Mamba-2."""
    kv, attends = _read_layers_with_keys(metadata)
    inner = metadata.get_per_layer("feed_forward_length")
    if len(kinds := {n for n in inner if n}) != 1 or any(n and attend for n, attend in zip(inner, attends, strict=True)):
        raise metadata.make_refusal("feed_forward_length", inner, "one size for layers that are an MLP, 0 for others")
    kind = "moe" if metadata.get_int("expert_count", 0) else "mlp"
    types = [FULL if attend else kind if n else LINEAR for n, attend in zip(inner, attends, strict=True)]
    if LINEAR not in types:
        raise metadata.make_refusal("attention.head_count_kv", [kv * attend for attend in attends], "0 for layers with Mamba-2")
    if scale := metadata.get_float("attention.scale", 0.0):
        raise metadata.make_refusal("attention.scale", scale, "0")
    n_heads, head_dim, n_groups, state, taps = _read_mamba(metadata)
    norm = "rms_" if metadata.has_key("attention.layer_norm_rms_epsilon") else ""
    return {
        "mamba_num_heads": n_heads, "mamba_head_dim": head_dim, "n_groups": n_groups, "ssm_state_size": state, "conv_kernel": taps,
        "layers_block_type": types, "num_key_value_heads": kv, "intermediate_size": kinds.pop(), "time_step_min": 0.0,
        "layer_norm_epsilon": metadata.get_float(f"attention.layer_norm_{norm}epsilon"), "use_bias": False,
        "use_conv_bias": metadata.has_tensor(f"blk.{types.index(LINEAR)}.ssm_conv1d.bias"),
        "mlp_bias": metadata.has_tensor(f"blk.{types.index(kind)}.ffn_up.bias"),
    }  # fmt: skip


def read_nemotron_h_moe(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of Nemotron-H with experts, whose sums may be scaled."""
    if latent := metadata.get_int("moe_latent_size", 0):
        raise metadata.make_refusal("moe_latent_size", latent, "0")
    normalise = metadata.is_stated("expert_weights_norm", True)
    experts = read_experts(metadata, normalise, SIGMOID, scaled=True)
    return read_nemotron_h(metadata, config) | {
        "n_routed_experts": experts.pop("num_experts"), **experts, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
        "routed_scaling_factor": metadata.get_float("expert_weights_scale", 0.0) or 1.0,
        "moe_intermediate_size": metadata.get_same("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.get_int("expert_shared_feed_forward_length"),
    }  # fmt: skip


def read_qwen35(metadata: GgufMetadata, config: Config) -> Config:
    """Read Qwen3.5's config. Its rotary embedding has three parts for images, which are the same for text.

    Where there are more heads of values than of keys, the model gets as many of both, with those of keys repeated: see `RepeatedTensor`.
    """
    n_heads, n_inner = metadata.get_int("ssm.time_step_rank"), metadata.get_int("ssm.inner_size")
    if n_heads < 1 or n_inner % n_heads:
        raise metadata.make_refusal("ssm.inner_size", n_inner, f"a multiple of ssm.time_step_rank, {n_heads}")
    if (n_keys := metadata.get_int("ssm.group_count")) < 1 or n_heads % n_keys:
        raise metadata.make_refusal("ssm.group_count", n_keys, f"a divisor of ssm.time_step_rank, {n_heads}")
    return read_partial(metadata, config) | {
        "layer_types": metadata.get_recurrent_layers(4), "linear_conv_kernel_dim": metadata.get_int("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.get_int("ssm.state_size"), "linear_value_head_dim": n_inner // n_heads,
        "linear_num_key_heads": n_heads, "linear_num_value_heads": n_heads, "linear_key_repeats": n_heads // n_keys,
        "attention_bias": metadata.has_tensor(f"blk.{metadata.n_layers - 1}.attn_q.bias"),
    }  # fmt: skip


def read_qwen35moe(metadata: GgufMetadata, config: Config) -> Config:
    return read_qwen35(metadata, config) | read_experts(metadata, normalise=True) | {
        "moe_intermediate_size": metadata.get_int("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.get_int("expert_shared_feed_forward_length"),
    }  # fmt: skip


def read_qwen3next(metadata: GgufMetadata, config: Config) -> Config:
    """Read Qwen3-Next's config, as that of a Qwen3.5 mixture; its heads of values lie side by side by heads of keys, as in transformers."""
    return read_qwen35moe(metadata, config) | {"linear_num_key_heads": metadata.get_int("ssm.group_count"), "linear_key_repeats": 1}


def read_lfm2(metadata: GgufMetadata, config: Config) -> Config:
    """Read LFM2's config. Layers without heads of keys have a short convolution in place of attention."""
    kv, attends = _read_layers_with_keys(metadata)
    if not MOST_TAPS >= (taps := metadata.get_int("shortconv.l_cache")) > 1:
        raise metadata.make_refusal("shortconv.l_cache", taps, f"2 to {MOST_TAPS}")
    if window := metadata.get_int("attention.sliding_window", 0):
        raise metadata.make_refusal("attention.sliding_window", window, "0")
    if (turned := metadata.get_int("rope.dimension_count", config["head_dim"])) != config["head_dim"]:
        raise metadata.make_refusal("rope.dimension_count", turned, str(config["head_dim"]))
    return {
        "num_key_value_heads": kv, "layer_types": [FULL if each else CONV for each in attends], "conv_L_cache": taps, "conv_bias": False,
        "intermediate_size": metadata.get_same("feed_forward_length"), "block_auto_adjust_ff_dim": False,
        "norm_eps": metadata.get_float("attention.layer_norm_rms_epsilon"), "rope_parameters": metadata.get_rope(),
    }  # fmt: skip


def read_lfm2moe(metadata: GgufMetadata, config: Config) -> Config:
    n_dense = metadata.get_int("leading_dense_block_count", 0)
    return read_lfm2(metadata, config) | read_experts(metadata, normalise=True, scoring=SIGMOID) | {
        "moe_intermediate_size": metadata.get_same("expert_feed_forward_length"), "num_dense_layers": n_dense,
        "use_expert_bias": metadata.has_tensor(f"blk.{n_dense}.exp_probs_b.bias"), "routed_scaling_factor": 1.0,
    }  # fmt: skip

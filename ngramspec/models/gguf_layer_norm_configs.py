"""Make the configs of transformers' models of the metadata of GGUF files for models with LayerNorms and MLPs without gates, mostly.

See `gguf_configs`, whose functions for other parts of a config are used.
"""

from __future__ import annotations

from ngramspec.models.gguf_configs import read_llama, read_partial
from ngramspec.models.gguf_expert_keys import Config
from ngramspec.models.gguf_metadata import GgufMetadata


def read_starcoder2(metadata: GgufMetadata, config: Config) -> Config:
    return read_llama(metadata, config) | {
        "norm_epsilon": metadata.get_float("attention.layer_norm_epsilon"),
        "use_bias": metadata.has_attention_bias(),
        "sliding_window": None,
    }


def read_layer_norms(metadata: GgufMetadata, config: Config) -> Config:
    """Read a config with LayerNorms and rotary embeddings of the first numbers of every head (Phi-2)."""
    return read_partial(metadata, config) | {"layer_norm_eps": metadata.get_float("attention.layer_norm_epsilon")}


def read_stablelm(metadata: GgufMetadata, config: Config) -> Config:
    """Read StableLM's config. Its 12B model, whose attention and MLP see the same and whose heads have norms of their own, is refused."""
    return read_layer_norms(metadata, config) | {"use_qkv_bias": metadata.has_attention_bias()}


def read_olmo(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of OLMo (1), whose norms have neither weights nor another epsilon."""
    if abs((eps := metadata.get_float("attention.layer_norm_epsilon")) - 1e-5) > 1e-9:
        raise metadata.make_refusal("attention.layer_norm_epsilon", eps, "1e-5")
    return read_llama(metadata, config) | {"clip_qkv": metadata.get_float("attention.clamp_kqv", 0.0) or None}


def read_gptneox(metadata: GgufMetadata, config: Config) -> Config:
    """Read GPT-NeoX's config. GELU is approximated by tanh, as in llama.cpp."""
    found, n_heads = read_layer_norms(metadata, config), config["num_attention_heads"]
    if (kv := found.pop("num_key_value_heads")) != n_heads:
        raise metadata.make_refusal("attention.head_count_kv", kv, str(n_heads))
    if (size := config["head_dim"]) * n_heads != config["hidden_size"]:
        raise metadata.make_refusal("attention.key_length", size, "embedding_length / attention.head_count")
    is_parallel = not metadata.is_stated("use_parallel_residual", False)
    return found | {"use_parallel_residual": is_parallel, "hidden_act": "gelu_pytorch_tanh"}


def read_starcoder(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of StarCoder (1), whose heads of queries share one of keys."""
    if (kv := metadata.get_same("attention.head_count_kv", config["num_attention_heads"])) != 1:
        raise metadata.make_refusal("attention.head_count_kv", kv, "1")
    found = read_gpt2(metadata, config)
    if (n := found["n_positions"]) != (length := config["max_position_embeddings"]):
        raise metadata.make_refusal("context_length", length, f"{n}, as many as position_embd.weight has rows")
    return found


def read_nemotron(metadata: GgufMetadata, config: Config) -> Config:
    """Read the config of dense Nemotron (Minitron): squared ReLU without a gate, and norms whose weights are offsets from 1."""
    return read_partial(metadata, config) | {
        "norm_eps": metadata.get_float("attention.layer_norm_epsilon"), "hidden_act": "relu2", "mlp_bias": metadata.has_mlp_bias(),
    }  # fmt: skip


def read_gpt2(metadata: GgufMetadata, config: Config) -> Config:
    positions = metadata.file.tensors.get("position_embd.weight")
    n_positions = positions.shape[0] if positions else config["max_position_embeddings"]
    return {
        "max_position_embeddings": n_positions, "n_ctx": n_positions, "n_positions": n_positions, "n_embd": config["hidden_size"],
        "n_layer": metadata.n_layers, "n_head": config["num_attention_heads"], "n_inner": metadata.get_same("feed_forward_length"),
        "layer_norm_epsilon": metadata.get_float("attention.layer_norm_epsilon"),
    }  # fmt: skip

"""Tiny random models of every supported family, a tokenizer and a cost to go with them: no download, no luck."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ngramspec.models.random_weights import register_decoder
from ngramspec.speculative.budget.cost_model import CostModel, Load

VOCAB = 256
WINDOW = 8
BOS, EOS = 254, 255  # bytes that no UTF-8 text has

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_LATENT = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": WINDOW},
    "phi3": {},
    "gemma2": {"sliding_window": WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 3, "tie_word_embeddings": False},
    "gemma3_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 3,
        "tie_word_embeddings": False,
    },
    "starcoder2": {"sliding_window": WINDOW},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt2": {"n_inner": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "smollm3": {"num_hidden_layers": 4},
    "qwen3_moe": _EXPERTS | {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1], "num_hidden_layers": 3},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 48},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW, "rope_parameters": _YARN},
    "glm4": {"head_dim": 16},
    "laguna": _EXPERTS
    | {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 8, 8],
        "sliding_window": WINDOW,
        "shared_expert_intermediate_size": 48,
        "moe_routed_scaling_factor": 2.5,
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "mimo_v2_flash": _EXPERTS
    | {
        "head_dim": 24,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "cohere2": {"num_hidden_layers": 4, "sliding_window": WINDOW, "logit_scale": 0.5},
    "deepseek_v3": _LATENT
    | {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 1,
    },
    "minicpm3": _LATENT | {"dim_model_base": 16, "tie_word_embeddings": False},
    "qwen3_5_text": {
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "full_attention", "full_attention"] * 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
        },
    },
    "lfm2": {
        "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "full_attention", "full_attention"] * 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "attention_multiplier": 0.25,
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 8,
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.8, 1.2],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.6,
        "ssm_in_multiplier": 1.4,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.1],
    },
    "nemotron_h": {
        "layers_block_type": [
            "linear_attention",
            "mlp",
            "full_attention",
            "linear_attention",
            "full_attention",
            "mlp",
            "full_attention",
            "full_attention",
        ],
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 8,
        "head_dim": 16,
    },
    "gemma4_text": {
        "intermediate_size": 288,  # some pieces of work, so that the last layers, twice as wide, have more
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": WINDOW,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCAB,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": False,
    },
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.6,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
}
ARCHITECTURES = tuple(_FAMILIES)


def save_model(where: Path, name: str, make: Callable[[], PreTrainedModel]) -> Path:
    """Return the folder of a model and the byte tokenizer, written by the first call with this name."""
    path = where / name
    if not path.exists():
        make().save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    return path


def tiny_model(arch: str, *, seed: int = 0, std: float = 0.3, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model of a family, one of ARCHITECTURES or another, in evaluation mode; the same for the same arguments.

    `std` is that of the weight matrices: 0.3 makes logits as peaked as a trained model's.
    """
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
    config = CONFIG_MAPPING[arch](**{**_COMMON, **ids, **_FAMILIES.get(arch, {}), **overrides})
    register_decoder(arch)
    with torch.random.fork_rng(devices=[]):  # transformers draws some vectors at random
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * std)
            else:
                parameter.add_(noise * 0.1)
        for name, parameter in model.named_parameters():
            if name.endswith(("mamba.dt_bias", "mixer.dt_bias")):  # states last for dozens of tokens
                parameter.sub_(3)
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "e_score_correction_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    model.generation_config.eos_token_id = EOS
    return model.eval().requires_grad_(False)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = byte, but for BOS and EOS. Any text round-trips; any prefix may end within a character."""
    letter = byte_letters()
    vocab = {letter[byte]: byte for byte in range(VOCAB - 2)}
    backend = Tokenizer(models.BPE(vocab=vocab | {"<bos>": BOS, "<eos>": EOS}, merges=[]))
    return _fast(backend, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel())


def word_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: blanks are part of words, the first is dropped, what no word covers is spelled in bytes."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(VOCAB - 2)} | {"<bos>": BOS, "<eos>": EOS}
    for word in ("▁", "▁a", "▁b", "a", "b", "c", "▁the", ".", "日"):
        vocab[word] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    return _fast(backend, pre_tokenizers.Metaspace(), decoders.Sequence(steps))


def _fast(backend: Tokenizer, pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerFast:
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")


def byte_letters() -> list[str]:
    """GPT-2's printable stand-ins: a byte that is no visible Latin-1 character takes the next free one from 256."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in visible else next(spare)) for byte in range(256)]


class FreeRows(CostModel):
    """Every row is free, so that every draft is verified, however unlikely."""

    def __init__(self) -> None:
        super().__init__([1, 2], [1.0, 1.0], max_rows=512)

    @property
    def table(self) -> np.ndarray:
        return np.ones(self.max_rows + 1)

    def get_curve(self, load: Load) -> np.ndarray:
        return self.table

    def observe(self, load: Load, ms: float) -> None:
        pass


def edit_config(folder: Path, **changes: Any) -> None:
    """Change settings in the config.json of a model's folder."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))

"""Write a GGUF file in the shape of Qwen3.5, LFM2, LFM2-MoE or Granite 4 with random weights, to measure passes of hybrids without a model.

    python -m tools.random_hybrid OUT.gguf            # Qwen3.5-0.8B: 24 layers, 18 of them recurrent, 248,320 words
    python -m tools.random_hybrid OUT.gguf --family lfm2             # LFM2-1.2B: 16 layers, 10 of them short convolutions, 65,536 words
    python -m tools.random_hybrid OUT.gguf --family lfm2moe          # LFM2-8B-A1B: 24 layers, 32 experts, of which a token has 4
    python -m tools.random_hybrid OUT.gguf --family granitehybrid    # granite-4.0-h-1b: 40 layers, 36 of them Mamba-2, 100,352 words
    python -m tools.random_hybrid OUT.gguf --hidden 4096 --layers 32 --heads 16 --kv-heads 4 --value-heads 32 --inner 12288     # 9B

Matrices are Q4_K, those that llama.cpp's Q4_K_M mixture keeps better Q6_K. The tokenizer is SmolLM2's, followed by unused words.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from ngramspec.models.names import smollm2_gguf

HEAD_DIM, STATE, TAPS = 256, 128, 4  # of Qwen3.5
SHAPES = {
    "qwen35": {
        "hidden": 1024, "layers": 24, "heads": 8, "kv_heads": 2, "key_heads": 16, "value_heads": 16, "inner": 3584, "words": 248_320,
    },
    "lfm2": {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "inner": 8192, "words": 65_536},
    "lfm2moe": {"hidden": 2048, "layers": 24, "heads": 32, "kv_heads": 8, "inner": 7168, "words": 65_536},
    "granitehybrid": {"hidden": 1536, "layers": 40, "heads": 12, "kv_heads": 4, "inner": 4096, "words": 100_352},
}  # fmt: skip
# Layers of LFM2-1.2B, LFM2-8B-A1B and granite-4.0-h-1b that are attention.
ATTENTION = {"lfm2": (2, 5, 8, 10, 12, 14), "lfm2moe": (2, 6, 10, 14, 18, 21), "granitehybrid": (5, 15, 25, 35)}
MAMBA_HEAD = 64  # Outputs of a head of Granite 4's layers with Mamba-2.
N_DENSE, N_EXPERTS, CHOSEN, WIDTH = 2, 32, 4, 1792  # of LFM2-8B-A1B: layers without experts, experts, those of a token, an expert's outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=SHAPES, default="qwen35")
    for name in SHAPES["qwen35"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    args = parser.parse_args()
    for name, default in SHAPES[args.family].items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    write(args)


class _Matrices:
    """Adds random matrices of Q4_K to a file, and of Q6_K those that llama.cpp's mixture keeps better."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.writer, self.rng = gguf.GGUFWriter(args.out, args.family, use_temp_file=True), np.random.default_rng(0)

    def add(self, name: str, n_out: int, n_in: int, six: bool = False) -> None:
        self.writer.add_tensor(f"{name}.weight", *(_make_q6_k if six else _make_q4_k)(self.rng, n_out, n_in))

    def add_experts(self, name: str, n_out: int, n_in: int, six: bool = False) -> None:
        codes, shape, kind = (_make_q6_k if six else _make_q4_k)(self.rng, N_EXPERTS * n_out, n_in)
        self.writer.add_tensor(f"{name}.weight", codes.reshape(N_EXPERTS, n_out, -1), shape, kind)

    def add_plain(self, name: str, values: np.ndarray) -> None:
        self.writer.add_tensor(name, values.astype(np.float32))


def write(args: argparse.Namespace) -> None:
    to = _Matrices(args)
    writer = to.writer
    _write_tokenizer(writer, args.words)
    writer.add_context_length(32768)
    writer.add_embedding_length(args.hidden)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(args.inner)
    writer.add_head_count(args.heads)
    writer.add_layer_norm_rms_eps(1e-6)
    to.add("token_embd", args.words, args.hidden, six=True)
    add_layer = {"qwen35": _start_qwen35, "granitehybrid": _start_granite}.get(args.family, _start_lfm2)(to, args)
    for i in range(args.layers):
        at = f"blk.{i}."
        better = i < args.layers // 8 or i >= 7 * args.layers // 8 or (i - args.layers // 8) % 3 == 2  # llama.cpp's rule
        add_layer(i, better)
        if args.family == "lfm2moe" and i >= N_DENSE:
            to.add_plain(f"{at}ffn_gate_inp.weight", args.hidden**-0.5 * to.rng.standard_normal((N_EXPERTS, args.hidden)))
            to.add_plain(f"{at}exp_probs_b.bias", 0.1 * to.rng.standard_normal(N_EXPERTS))
            to.add_experts(f"{at}ffn_gate_exps", WIDTH, args.hidden)
            to.add_experts(f"{at}ffn_up_exps", WIDTH, args.hidden)
            to.add_experts(f"{at}ffn_down_exps", args.hidden, WIDTH, better)
        else:
            to.add(f"{at}ffn_gate", args.inner, args.hidden)
            to.add(f"{at}ffn_up", args.inner, args.hidden)
            to.add(f"{at}ffn_down", args.hidden, args.inner, better)
    to.add_plain("token_embd_norm.weight" if args.family.startswith("lfm2") else "output_norm.weight", np.ones(args.hidden))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _start_qwen35(to: _Matrices, args: argparse.Namespace) -> Callable[[int, bool], None]:
    """Write what the file says of its layers; return what adds one."""
    writer, hidden, mixed = to.writer, args.hidden, args.value_heads * STATE
    channels, wide = 2 * args.key_heads * STATE + mixed, args.heads * HEAD_DIM
    writer.add_head_count_kv(args.kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(HEAD_DIM // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(args.key_heads)
    writer.add_ssm_time_step_rank(args.value_heads)
    writer.add_ssm_inner_size(mixed)

    def add_layer(i: int, better: bool) -> None:
        at = f"blk.{i}."
        for norm in ("attn_norm", "post_attention_norm"):
            to.add_plain(f"{at}{norm}.weight", np.ones(hidden))
        if i % 4 == 3:
            for norm in ("attn_q_norm", "attn_k_norm"):
                to.add_plain(f"{at}{norm}.weight", np.ones(HEAD_DIM))
            to.add(f"{at}attn_q", 2 * wide, hidden)
            to.add(f"{at}attn_k", args.kv_heads * HEAD_DIM, hidden)
            to.add(f"{at}attn_v", args.kv_heads * HEAD_DIM, hidden, better)
            to.add(f"{at}attn_output", hidden, wide)
        else:
            to.add(f"{at}attn_qkv", channels, hidden, better)
            to.add(f"{at}attn_gate", mixed, hidden)
            to.add(f"{at}ssm_out", hidden, mixed)
            to.add_plain(f"{at}ssm_conv1d.weight", 0.5 * to.rng.standard_normal((channels, TAPS)))
            to.add_plain(f"{at}ssm_a", -to.rng.uniform(0.01, 16, args.value_heads))
            to.add_plain(f"{at}ssm_dt.bias", to.rng.standard_normal(args.value_heads))
            to.add_plain(f"{at}ssm_norm.weight", np.ones(STATE))
            for gate in ("ssm_alpha", "ssm_beta"):
                to.add_plain(f"{at}{gate}.weight", hidden**-0.5 * to.rng.standard_normal((args.value_heads, hidden)))

    return add_layer


def _start_lfm2(to: _Matrices, args: argparse.Namespace) -> Callable[[int, bool], None]:
    """Write what the file says of its layers; return what adds one."""
    hidden, head_dim = args.hidden, args.hidden // args.heads
    attention = ATTENTION[args.family]
    to.writer.add_head_count_kv([args.kv_heads if i in attention else 0 for i in range(args.layers)])
    to.writer.add_rope_freq_base(1e6)
    to.writer.add_shortconv_l_cache(3)
    if args.family == "lfm2moe":
        to.writer.add_expert_count(N_EXPERTS)
        to.writer.add_expert_used_count(CHOSEN)
        to.writer.add_expert_feed_forward_length(WIDTH)
        to.writer.add_leading_dense_block_count(N_DENSE)
        to.writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def add_layer(i: int, better: bool) -> None:
        at = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm"):
            to.add_plain(f"{at}{norm}.weight", np.ones(hidden))
        if i in attention:
            for norm in ("attn_q_norm", "attn_k_norm"):
                to.add_plain(f"{at}{norm}.weight", np.ones(head_dim))
            to.add(f"{at}attn_q", hidden, hidden)
            to.add(f"{at}attn_k", args.kv_heads * head_dim, hidden)
            to.add(f"{at}attn_v", args.kv_heads * head_dim, hidden, better)
            to.add(f"{at}attn_output", hidden, hidden)
        else:
            to.add(f"{at}shortconv.in_proj", 3 * hidden, hidden)
            to.add_plain(f"{at}shortconv.conv.weight", to.rng.standard_normal((hidden, 3)))
            to.add(f"{at}shortconv.out_proj", hidden, hidden)

    return add_layer


def _start_granite(to: _Matrices, args: argparse.Namespace) -> Callable[[int, bool], None]:
    """Write what the file says of its layers; return what adds one."""
    writer, hidden, head_dim, attention = to.writer, args.hidden, args.hidden // args.heads, ATTENTION[args.family]
    mixed, channels, n_heads = 2 * hidden, 2 * hidden + 2 * STATE, 2 * hidden // MAMBA_HEAD
    writer.add_head_count_kv([args.kv_heads if i in attention else 0 for i in range(args.layers)])
    writer.add_rope_scaling_finetuned(False)
    writer.add_attention_scale(head_dim**-1.0)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_logit_scale(6.0)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(1)
    writer.add_ssm_time_step_rank(n_heads)
    writer.add_ssm_inner_size(mixed)

    def add_layer(i: int, better: bool) -> None:
        at = f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm"):
            to.add_plain(f"{at}{norm}.weight", np.ones(hidden))
        if i in attention:
            to.add(f"{at}attn_q", hidden, hidden)
            to.add(f"{at}attn_k", args.kv_heads * head_dim, hidden)
            to.add(f"{at}attn_v", args.kv_heads * head_dim, hidden, better)
            to.add(f"{at}attn_output", hidden, hidden)
        else:
            to.add(f"{at}ssm_in", mixed + channels + n_heads, hidden)
            to.add(f"{at}ssm_out", hidden, mixed)
            to.add_plain(f"{at}ssm_conv1d.weight", 0.5 * to.rng.standard_normal((channels, TAPS)))
            to.add_plain(f"{at}ssm_conv1d.bias", 0.1 * to.rng.standard_normal(channels))
            to.add_plain(f"{at}ssm_a", -to.rng.uniform(0.01, 16, (n_heads, 1)))
            to.add_plain(f"{at}ssm_d", np.ones((n_heads, 1)))
            to.add_plain(f"{at}ssm_dt.bias", to.rng.standard_normal(n_heads) - 4)
            to.add_plain(f"{at}ssm_norm.weight", np.ones((1, mixed)))

    return add_layer


def _write_tokenizer(writer: gguf.GGUFWriter, n_words: int) -> None:
    fields = gguf.GGUFReader(smollm2_gguf()).fields
    tokens, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    n = n_words - len(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list([*tokens, *(f"<unused{i}>" for i in range(n))])
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * n])
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"].contents())
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"].contents())


def _repeat_scale(value: float, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, value, np.float16).view(np.uint8)


def _make_q4_k(rng: np.random.Generator, n_out: int, n_in: int) -> tuple[np.ndarray, None, gguf.GGMLQuantizationType]:
    """Return Q4_K blocks; per 256 weights two float16 scales, 12 bytes of 6-bit scales and minima, 128 bytes of codes."""
    scale, shape = n_in**-0.5 / 4.6 / 32, (n_out, n_in // 256)
    scales = [_repeat_scale(each, (*shape, 1)) for each in (scale, scale * 7.5)]
    parts = [*scales, rng.integers(0, 256, (*shape, 140), dtype=np.uint8)]
    return np.concatenate(parts, -1).reshape(n_out, -1), None, gguf.GGMLQuantizationType.Q4_K


def _make_q6_k(rng: np.random.Generator, n_out: int, n_in: int) -> tuple[np.ndarray, None, gguf.GGMLQuantizationType]:
    """Return Q6_K blocks; per 256 weights 192 bytes of codes, 16 signed scales, a float16 scale."""
    shape = (n_out, n_in // 256)
    scales = rng.integers(20, 60, (*shape, 16), dtype=np.int8).view(np.uint8)
    parts = [rng.integers(0, 256, (*shape, 192), dtype=np.uint8), scales, _repeat_scale(n_in**-0.5 / 18.5 / 40, (*shape, 1))]
    return np.concatenate(parts, -1).reshape(n_out, -1), None, gguf.GGMLQuantizationType.Q6_K


if __name__ == "__main__":
    main()

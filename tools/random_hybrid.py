"""Write a GGUF file in the shape of Qwen3.5 with random weights, to measure passes of hybrids without a model.

    python -m tools.random_hybrid OUT.gguf            # Qwen3.5-0.8B: 24 layers, 18 of them recurrent, 248,320 words
    python -m tools.random_hybrid OUT.gguf --hidden 4096 --layers 32 --heads 16 --kv-heads 4 --value-heads 32 --inner 12288     # 9B

Matrices are Q4_K, those that llama.cpp's Q4_K_M mixture keeps better Q6_K. The tokenizer is SmolLM2's, with unused words behind it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from ngramspec.models.names import smollm2_gguf

WORDS, HEAD_DIM, STATE, TAPS = 248_320, 256, 128, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    sizes = (("hidden", 1024), ("layers", 24), ("heads", 8), ("kv-heads", 2), ("key-heads", 16), ("value-heads", 16), ("inner", 3584))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    write(parser.parse_args())


def write(args: argparse.Namespace) -> None:
    writer, rng = gguf.GGUFWriter(args.out, "qwen35", use_temp_file=True), np.random.default_rng(0)
    _write_tokenizer(writer)
    writer.add_context_length(32768)
    writer.add_embedding_length(args.hidden)
    writer.add_block_count(args.layers)
    writer.add_feed_forward_length(args.inner)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(HEAD_DIM // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(STATE)
    writer.add_ssm_group_count(args.key_heads)
    writer.add_ssm_time_step_rank(args.value_heads)
    writer.add_ssm_inner_size(STATE * args.value_heads)

    def add_matrix(name: str, n_out: int, n_in: int, six: bool) -> None:
        writer.add_tensor(f"{name}.weight", *(_make_q6_k if six else _make_q4_k)(rng, n_out, n_in))

    def add_plain(name: str, values: np.ndarray) -> None:
        writer.add_tensor(name, values.astype(np.float32))

    hidden, inner, mixed = args.hidden, args.inner, args.value_heads * STATE
    channels, wide = 2 * args.key_heads * STATE + mixed, args.heads * HEAD_DIM
    add_matrix("token_embd", WORDS, hidden, six=True)
    for i in range(args.layers):
        at = f"blk.{i}."
        better = i < args.layers // 8 or i >= 7 * args.layers // 8 or (i - args.layers // 8) % 3 == 2  # llama.cpp's rule
        for norm in ("attn_norm", "post_attention_norm"):
            add_plain(f"{at}{norm}.weight", np.ones(hidden))
        if i % 4 == 3:
            for norm in ("attn_q_norm", "attn_k_norm"):
                add_plain(f"{at}{norm}.weight", np.ones(HEAD_DIM))
            add_matrix(f"{at}attn_q", 2 * wide, hidden, six=False)
            add_matrix(f"{at}attn_k", args.kv_heads * HEAD_DIM, hidden, six=False)
            add_matrix(f"{at}attn_v", args.kv_heads * HEAD_DIM, hidden, better)
            add_matrix(f"{at}attn_output", hidden, wide, six=False)
        else:
            add_matrix(f"{at}attn_qkv", channels, hidden, better)
            add_matrix(f"{at}attn_gate", mixed, hidden, six=False)
            add_matrix(f"{at}ssm_out", hidden, mixed, six=False)
            add_plain(f"{at}ssm_conv1d.weight", 0.5 * rng.standard_normal((channels, TAPS)))
            add_plain(f"{at}ssm_a", -rng.uniform(0.01, 16, args.value_heads))
            add_plain(f"{at}ssm_dt.bias", rng.standard_normal(args.value_heads))
            add_plain(f"{at}ssm_norm.weight", np.ones(STATE))
            for gate in ("ssm_alpha", "ssm_beta"):
                add_plain(f"{at}{gate}.weight", hidden**-0.5 * rng.standard_normal((args.value_heads, hidden)))
        add_matrix(f"{at}ffn_gate", inner, hidden, six=False)
        add_matrix(f"{at}ffn_up", inner, hidden, six=False)
        add_matrix(f"{at}ffn_down", hidden, inner, better)
    add_plain("output_norm.weight", np.ones(hidden))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    fields = gguf.GGUFReader(smollm2_gguf()).fields
    tokens, kinds = fields["tokenizer.ggml.tokens"].contents(), fields["tokenizer.ggml.token_type"].contents()
    n = WORDS - len(tokens)
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

"""Tiny GGUF files of every family and every kind of tensor, named and laid out as llama.cpp's conversion does: the same for the same
arguments. Text is spelled in bytes."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tiny
from block_factors import write_factors

from ngramspec.engine.llm_engine import Engine
from ngramspec.models.tensor_source import KINDS

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "starcoder2")
VOCAB, HIDDEN, INNER, HEADS, KV_HEADS = 300, 256, 512, 4, 2
LAYERS = {"gemma3": 6}  # the sixth is the first that sees everything; 2 of others
HEAD_DIM = {"qwen3": 128}  # which transformers takes for given
BOS, EOS = 298, 299

_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
_SCALES |= dict.fromkeys(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"), (0,))
"""Where a block's float16 factors lie, in kinds that `gguf` cannot make of numbers."""
_MEANS = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""Of codes, where the second factor is that of what is taken off."""


def write(
    path: Path,
    family: str = "llama",
    kind: str = "Q8_0",
    *,
    tied: bool = False,
    std: float = 0.3,
    per_part: int = 0,
    metadata: dict[str, str | int | float | None] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    kinds: dict[str, str] | None = None,
    tokens: dict[str, gguf.TokenType] | None = None,
) -> Path:
    """Write a model; its matrices are of the kind, its vectors F32. `std`: of weights; at 0.3 attention sees one key, at 0.1 many.

    `per_part`: tensors in one file, if there are to be several, named from `path` as llama.cpp does. `metadata`, `extra`: further keys
    (None: without that key), further tensors in F32. `kinds`: those of matrices whose names contain a word. `tokens`: further ones, which
    begin at id 256 (Gemma's: 285). Returns the path of the only or first file.
    """
    writer = gguf.GGUFWriter(path, "llama" if family == "mistral" else family, split_max_tensors=per_part)
    write_common(writer, family, tokens)
    for key, value in (metadata or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is None:
            continue
        add: Any = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}[type(value)]
        add(key, value)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    for name, shape in shapes(family, tied).items():
        if len(shape) == 1:
            writer.add_tensor(name, vector(name, shape[0]))
        else:
            its = next((other for word, other in (kinds or {}).items() if word in name), kind)
            writer.add_tensor(name, matrix(name, shape, its, std), raw_dtype=gguf.GGMLQuantizationType[its])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*{path.suffix}"))


def write_started(path: Path, family: str = "llama", kind: str = "Q8_0", *, threads: int | None = None, **options: Any) -> Path:
    """Write a model and start it once with so many threads: processes that start it after that import neither torch nor transformers.

    Those imports and the comparison with transformers take a process ten seconds of processor time, for tests of something else.
    """
    path = write(path, family, kind, **options)
    with Engine(str(path), threads=threads, max_seqs=1, kv_memory=1 << 22):
        return path


def shapes(family: str, tied: bool = False) -> dict[str, tuple[int, ...]]:
    """The tensors of a family, slowest dimension first."""
    head_dim = HEAD_DIM.get(family, HIDDEN // HEADS)
    q, kv = HEADS * head_dim, KV_HEADS * head_dim
    layer: dict[str, tuple[int, ...]] = {"attn_norm.weight": (HIDDEN,), "attn_output.weight": (HIDDEN, q), "ffn_norm.weight": (HIDDEN,)}
    if family == "phi3":
        layer |= {"attn_qkv.weight": (q + 2 * kv, HIDDEN), "ffn_up.weight": (2 * INNER, HIDDEN)}
    else:
        layer |= {
            "attn_q.weight": (q, HIDDEN),
            "attn_k.weight": (kv, HIDDEN),
            "attn_v.weight": (kv, HIDDEN),
            "ffn_up.weight": (INNER, HIDDEN),
        }
    if family not in ("phi3", "starcoder2"):
        layer["ffn_gate.weight"] = (INNER, HIDDEN)
    layer["ffn_down.weight"] = (HIDDEN, INNER)
    if family in ("qwen2", "starcoder2"):
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if family == "starcoder2":
        layer |= dict.fromkeys(("attn_norm.bias", "attn_output.bias", "ffn_norm.bias", "ffn_down.bias"), (HIDDEN,))
        layer["ffn_up.bias"] = (INNER,)
    if family in ("qwen3", "gemma3"):
        layer |= {"attn_q_norm.weight": (head_dim,), "attn_k_norm.weight": (head_dim,)}
    if family in ("gemma2", "gemma3"):
        layer |= {"post_attention_norm.weight": (HIDDEN,), "post_ffw_norm.weight": (HIDDEN,)}
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN)}
    found |= {f"blk.{i}.{name}": shape for i in range(LAYERS.get(family, 2)) for name, shape in layer.items()}
    found["output_norm.weight"] = (HIDDEN,)
    if family == "starcoder2":
        found["output_norm.bias"] = (HIDDEN,)
    if not tied and not family.startswith("gemma"):
        found["output.weight"] = (VOCAB, HIDDEN)
    return found


def vector(name: str, n: int) -> np.ndarray:
    """About 1 for norms, about 0 for biases."""
    return (_random(name).normal(0, 0.1, n) + name.endswith("norm.weight")).astype(np.float32)


def matrix(name: str, shape: tuple[int, ...], kind: str, std: float = 0.3) -> np.ndarray:
    """Random rows in a kind, with this standard deviation at the most, [N, row_bytes] uint8 (F32, F16: numbers)."""
    if kind not in _SCALES:
        values = _random(name).normal(0, std, shape).astype(np.float32)
        return np.ascontiguousarray(gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind]))
    per_block, n_bytes = KINDS[kind]
    blocks = _random(name).integers(0, 256, (shape[0], shape[1] // per_block, n_bytes), np.uint8)
    for factor in (1.0, None):
        rows = blocks.reshape(shape[0], -1)
        if factor is None:
            factor = std / gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).std()
        for at in _SCALES[kind]:
            most = factor * (_MEANS.get(kind, 1) if at == _SCALES[kind][-1] else 1)
            scales = _random(f"{name} {at}").uniform(most / 2, most, blocks.shape[:2]).astype(np.float16)
            write_factors(kind, blocks, at, scales)
    return blocks.reshape(shape[0], -1)


def _random(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def write_common(writer: gguf.GGUFWriter, family: str, tokens: dict[str, gguf.TokenType] | None = None) -> None:
    """Everything but tensors."""
    head_dim = HEAD_DIM.get(family, HIDDEN // HEADS)
    writer.add_name("Mistral v0.3" if family == "mistral" else "Tiny")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS.get(family, 2))
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    if family in ("starcoder2", "gpt2"):
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(1e-5)
    if family in ("qwen3", "gemma2", "gemma3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if family in ("gemma2", "gemma3"):
        writer.add_sliding_window(16)
    if family in ("llama", "mistral", "phi3"):
        writer.add_rope_dimension_count(head_dim)
        writer.add_vocab_size(VOCAB)
    _write_tokenizer(writer, family, tokens or {})


def _write_tokenizer(writer: gguf.GGUFWriter, family: str, further: dict[str, gguf.TokenType]) -> None:
    kinds = gguf.TokenType
    if family in ("gemma2", "gemma3"):  # letters, and what is none in bytes
        letters = [f"<0x{byte:02X}>" for byte in range(256)]
        special = {
            "<pad>": kinds.CONTROL,
            "<unk>": kinds.UNKNOWN,
            "▁": kinds.NORMAL,
            **dict.fromkeys("abcdefghijklmnopqrstuvwxyz", kinds.NORMAL),
        }
        merged = ["▁a", "th"]
        writer.add_tokenizer_model("llama")
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
    else:  # bytes
        letters, special, merged = tiny.byte_letters(), {}, ["Ġa", "th"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_merges([" ".join(token) for token in merged])
    tokens = dict.fromkeys(letters, kinds.NORMAL if not special else kinds.BYTE) | special
    tokens |= further
    tokens |= {f"<unused{i}>": kinds.NORMAL for i in range(BOS - len(merged) - len(tokens))}
    tokens |= dict.fromkeys(merged, kinds.NORMAL) | {"<bos>": kinds.CONTROL, "<eos>": kinds.CONTROL}
    assert len(tokens) == VOCAB
    writer.add_token_list(list(tokens))
    writer.add_token_scores([float(-i) for i in range(VOCAB)])
    writer.add_token_types(list(tokens.values()))
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(EOS if not special else list(tokens).index("<pad>"))
    if special:
        writer.add_unk_token_id(list(tokens).index("<unk>"))
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")

"""Every family and every kind of tensor against what transformers itself loads from the same file, bit for bit."""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
import tiny_gguf
import torch
import transformers

from ngramspec.errors import ModelNotFoundError, NgramspecError, TokenizerError, UnsupportedModelError
from ngramspec.models import gguf
from ngramspec.models.loader import OpenModel, load_model, load_tokenizer, open_model
from ngramspec.models.tensor_source import KINDS, FileTensor, dequantise


@pytest.fixture(autouse=True)
def fast_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers makes the same map of names for every module."""
    monkeypatch.setattr(reference, "get_tensor_name_map", functools.cache(reference.get_tensor_name_map))
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.enable_progress_bar()


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., OpenModel]:
    """Write a model with the given arguments of `tiny_gguf.write`, and open it."""

    def write_and_open(*args: Any, **options: Any) -> OpenModel:
        return open_model(str(tiny_gguf.write(tmp_path / "model.gguf", *args, **options)), cache_dir=tmp_path / "cache")

    return write_and_open


def from_transformers(path: Path) -> Any:
    dequantised = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=dequantised
    )


CASES = [(family, "Q4_K") for family in tiny_gguf.FAMILIES]
CASES += [("llama", kind) for kind in KINDS if ("llama", kind) not in CASES]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_every_parameter_is_transformers_own(opened: Callable[..., OpenModel], tmp_path: Path, family: str, kind: str) -> None:
    mine, wanted = opened(family, kind), from_transformers(tmp_path / "model.gguf")
    parameters = dict(wanted.named_parameters(remove_duplicate=False))
    assert mine.source.keys() == parameters.keys()
    for name, parameter in parameters.items():
        stored = mine.source[name]
        whole = stored.float32()
        assert stored.shape == whole.shape == tuple(parameter.shape), name
        assert torch.equal(torch.from_numpy(whole), parameter), name
        if parameter.dim() == 2:
            assert stored.kind == kind, "nothing is computed for the sake of names"
            first, end = parameter.shape[0] // 3, parameter.shape[0] // 3 + 5
            rows = stored.read_rows(first, end)
            assert rows.shape == (5, stored.row_bytes)
            assert np.array_equal(dequantise(kind, rows), whole[first:end])
    assert mine.source.n_bytes == sum(t.n_bytes for t in reference.GGUFReader(tmp_path / "model.gguf").tensors)
    buffers = dict(wanted.named_buffers())
    assert {name: buffer.tolist() for name, buffer in mine.model.named_buffers()} == {name: b.tolist() for name, b in buffers.items()}


@pytest.mark.parametrize("family", tiny_gguf.FAMILIES)
def test_configs_are_transformers_own_and_tokenizers_make_the_same_ids(
    opened: Callable[..., OpenModel], tmp_path: Path, family: str
) -> None:
    mine = opened(family)
    path = tmp_path / "model.gguf"
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    known = {
        "_name_or_path",
        "_model_name_or_path",
        "query_pre_attn_scalar",
        "dtype",
        "head_dim",
        "unk_token_id",
        "eos_token_id",
        "original_max_position_embeddings",
    }
    known |= {"attention_bias", "mlp_bias"}  # which the model's own config does not have
    assert {k: v for k, v in mine.model.config.to_dict().items() if k not in known} == {k: v for k, v in config.items() if k not in known}
    assert mine.model.config.model_type == {"gemma3": "gemma3_text", "mistral": "llama"}.get(family, family)
    assert mine.eos_token_ids == (tiny_gguf.EOS,)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    (entry,) = (tmp_path / "cache" / "models").glob("model-*[!k]")
    kept = transformers.PreTrainedTokenizerFast.from_pretrained(entry)
    assert mine.tokenizer.backend_tokenizer.to_str() == kept.backend_tokenizer.to_str()
    assert mine.tokenizer.special_tokens_map == kept.special_tokens_map
    assert (mine.tokenizer.clean_up_tokenization_spaces, len(mine.tokenizer)) == (kept.clean_up_tokenization_spaces, len(kept))
    assert mine.tokenizer.chat_template == theirs.chat_template
    for text in ("", " a the", "hé  123\n\n\t<bos>a<eos> ", "it's , . 日本 ☃", "<unused3><unk>"):
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert mine.tokenizer.encode(text, add_special_tokens=special) == ids
            assert mine.tokenizer.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("family", tiny_gguf.FAMILIES)
def test_a_loaded_model_computes_what_transformers_computes(tmp_path: Path, family: str) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", family, "Q5_1", tied=True)
    mine = load_model(str(path), cache_dir=tmp_path / "cache").model
    wanted = from_transformers(path)
    if family.startswith("gemma"):  # the scale is the head's width, which transformers takes to be 256
        for layer in wanted.base_model.layers:
            layer.self_attn.scaling = (tiny_gguf.HIDDEN // tiny_gguf.HEADS) ** -0.5
    ids = torch.arange(40)[None] * 7 % tiny_gguf.VOCAB
    with torch.inference_mode():
        assert torch.equal(mine(ids).logits, wanted(ids).logits)
    assert (mine.get_input_embeddings().weight is mine.lm_head.weight) == (wanted.get_input_embeddings().weight is wanted.lm_head.weight)


def test_split_files(tmp_path: Path) -> None:
    first = tiny_gguf.write(tmp_path / "model.gguf", "qwen2", "Q4_K", per_part=9)
    (tmp_path / "one").mkdir()
    whole = open_model(str(tiny_gguf.write(tmp_path / "one" / "model.gguf", "qwen2", "Q4_K")), cache_dir=tmp_path / "cache")
    parts = open_model(str(first), cache_dir=tmp_path / "cache")
    assert (parts.name, parts.source.n_bytes) == ("model", whole.source.n_bytes)
    assert all(np.array_equal(parts.source[name].float32(), stored.float32()) for name, stored in whole.source.items())


def test_a_model_called_mistral(opened: Callable[..., OpenModel]) -> None:
    """transformers takes it for another architecture, and then finds no names for its tensors."""
    assert opened("mistral", metadata={"general.basename": "mistral"}).model.config.model_type == "llama"


def test_tied_heads_are_one_parameter(opened: Callable[..., OpenModel]) -> None:
    mine = opened("llama", tied=True)
    assert mine.source["lm_head.weight"] is mine.source["model.embed_tokens.weight"]
    assert mine.model.lm_head.weight is mine.model.model.embed_tokens.weight


def test_angles_are_divided_by_the_files_factors(opened: Callable[..., OpenModel]) -> None:
    """Llama 3's scaling, of which the metadata says nothing."""
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    plain, scaled = opened("llama"), opened("llama", extra={"rope_freqs.weight": factors})
    assert torch.equal(scaled.model.model.rotary_emb.inv_freq, plain.model.model.rotary_emb.inv_freq / torch.from_numpy(factors))
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight is \[16\]; accepted: \[32\]"):
        opened("llama", extra={"rope_freqs.weight": factors[:16]})


def test_what_transformers_leaves_out_of_configs(opened: Callable[..., OpenModel]) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    plain = opened("llama").model.model.rotary_emb.inv_freq
    assert torch.equal(opened("llama", metadata={f"llama.{k}": v for k, v in linear.items()}).model.model.rotary_emb.inv_freq, plain / 8)
    gemma = opened("gemma3", metadata={f"gemma3.{k}": v for k, v in linear.items()}).model
    wanted = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    assert torch.allclose(gemma.model.rotary_emb.full_attention_inv_freq, wanted / 8)
    assert torch.allclose(gemma.model.rotary_emb.sliding_attention_inv_freq, wanted)
    assert gemma.config.query_pre_attn_scalar == 64
    with pytest.raises(UnsupportedModelError, match=r"qwen2.rope.scaling.type is 'longrope' by its metadata; accepted: none, linear, yarn"):
        opened("qwen2", metadata={"qwen2.rope.scaling.type": "longrope", "qwen2.rope.scaling.factor": 4.0})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"metadata": {"llama.block_count": 3}}, "lacks 9 tensors of LlamaForCausalLM, such as model.layers.2"),
        ({"metadata": {"llama.block_count": 1}}, "no use for, such as blk.1"),
        ({"metadata": {"llama.block_count": 1 << 31}}, "llama.block_count is 2147483648 by its metadata; accepted: 1 to 21"),
        ({"metadata": {"llama.embedding_length": 0}}, "llama.embedding_length is 0"),
        (
            {"metadata": {"general.architecture": "rwkv6"}},
            "architecture 'rwkv6' is not read from GGUF, nor as a folder: its recurrence is neither Gated",
        ),
        ({"metadata": {"general.architecture": "llama4"}}, "nor as a folder: attention within chunks of a text, as in Llama 4, is not"),
        ({"metadata": {"general.architecture": "orion"}}, "architecture 'orion' is not read from GGUF; its safetensors folder may load"),
    ],
)
def test_a_file_that_is_no_whole_model_is_refused(opened: Callable[..., OpenModel], options: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        opened(**options)


def test_a_type_that_is_not_read_is_named(opened: Callable[..., OpenModel], tmp_path: Path) -> None:
    opened("llama", "IQ4_XS")
    path = tmp_path / "model.gguf"
    raw = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 16
    raw[at : at + 4] = (34).to_bytes(4, "little")  # smaller
    path.write_bytes(raw)
    with pytest.raises(UnsupportedModelError, match=r"1 of its 21 tensors, such as blk.1.ffn_up.weight, have type TQ1_0; .*Q4_K_M"):
        open_model(str(path), cache_dir=tmp_path / "cache")
    assert load_tokenizer(str(path), cache_dir=tmp_path / "cache").encode("a") == [97], "the tokenizer is not the worse for it"


def test_a_tokenizer_that_is_not_known(opened: Callable[..., OpenModel]) -> None:
    with pytest.raises(TokenizerError, match="model 'rwkv'"):
        opened(metadata={"tokenizer.ggml.model": "rwkv"})


def test_a_file_that_shrinks_is_told(opened: Callable[..., OpenModel], tmp_path: Path) -> None:
    mine = opened("llama")
    stored = mine.source["lm_head.weight"]
    assert isinstance(stored, FileTensor)
    os.truncate(tmp_path / "model.gguf", stored.offset + 10)
    with pytest.raises(ModelNotFoundError, match=f"ends at byte {stored.offset + 10}"):
        stored.read_rows(0, 1)


def test_metadata_with_flipped_bits_is_refused_or_opened(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf")
    raw, n_header = path.read_bytes(), len(gguf.read(path).headers[0].raw)
    draw = random.Random(1)
    refused = 0
    for _ in range(150):
        flipped = bytearray(raw)
        flipped[draw.randrange(n_header)] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            mine = open_model(str(path), cache_dir=tmp_path / "cache")
        except NgramspecError:
            refused += 1
        else:
            assert len(mine.source) == 21
    assert 0 < refused < 150


def test_gpt2_is_transposed_on_demand(tmp_path: Path) -> None:
    writer = reference.GGUFWriter(tmp_path / "gpt2.gguf", "gpt2")
    draw = np.random.default_rng(0)
    tiny_gguf.write_common(writer, "gpt2")
    writer.kv_data[0]["gpt2.feed_forward_length"].value = 4 * 256
    for name, shape in {
        "token_embd.weight": (300, 256), "position_embd.weight": (1024, 256), "output_norm.weight": (256,), "output_norm.bias": (256,),
        **{f"blk.{i}.{name}": shape for i in range(2) for name, shape in {
            "attn_norm.weight": (256,), "attn_norm.bias": (256,), "ffn_norm.weight": (256,), "ffn_norm.bias": (256,),
            "attn_qkv.weight": (768, 256), "attn_qkv.bias": (768,), "attn_output.weight": (256, 256), "attn_output.bias": (256,),
            "ffn_up.weight": (1024, 256), "ffn_up.bias": (1024,), "ffn_down.weight": (256, 1024), "ffn_down.bias": (256,),
        }.items()},
    }.items():  # fmt: skip
        writer.add_tensor(name, draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    mine = open_model(str(tmp_path / "gpt2.gguf"), cache_dir=tmp_path / "cache")
    wanted = dict(from_transformers(tmp_path / "gpt2.gguf").named_parameters())
    assert all(torch.equal(torch.from_numpy(mine.source[name].float32()), parameter) for name, parameter in wanted.items())
    stored = mine.source["transformer.h.1.mlp.c_fc.weight"]
    assert np.array_equal(stored.read_rows(3, 5).view(np.float32), stored.float32()[3:5])


def test_experts_without_their_size_are_refused(tmp_path: Path) -> None:
    writer = reference.GGUFWriter(tmp_path / "moe.gguf", "qwen3moe")
    tiny_gguf.write_common(writer, "qwen3moe")
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    for name in ("token_embd", "blk.0.ffn_gate_exps", "blk.0.ffn_up_exps", "blk.0.ffn_down_exps"):
        writer.add_tensor(f"{name}.weight", np.zeros((4, 512, 256) if "exps" in name else (300, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"lack qwen3moe\.expert_feed_forward_length"):
        open_model(str(tmp_path / "moe.gguf"), cache_dir=tmp_path / "cache")


def test_what_is_kept_is_small_and_plain(opened: Callable[..., OpenModel], tmp_path: Path) -> None:
    opened("llama")
    (entry,) = (path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir())
    assert sum(path.stat().st_size for path in entry.iterdir()) < 100_000
    names = json.loads((entry / "tensors.json").read_bytes())
    assert names["model.layers.1.self_attn.k_proj.weight"] == ["blk.1.attn_k.weight", "interleaved", 2, 0, 0, "", []]

"""Weights read a few rows at a time: from safetensors, from memory, as 8-bit blocks; and models that are filled with them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import tiny_gguf
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ngramspec.errors import InvalidInputError, ModelNotFoundError, UnsupportedModelError
from ngramspec.models.loader import load_model, open_model
from ngramspec.models.parameters import MemoryTensor, ParamsSource, fill
from ngramspec.models.q8_blocks import quantise_rows
from ngramspec.models.tensor_source import KINDS, ComputedTensor, Q8Tensor, dequantise, interleaved_rows, row_bytes


def save(folder: Path, dtype: torch.dtype = torch.float32, arch: str = "llama", **options: Any) -> dict[str, torch.Tensor]:
    """A model folder, and its parameters."""
    model = tiny.tiny_model(arch).to(dtype)
    model.save_pretrained(folder, **options)
    tiny.byte_tokenizer().save_pretrained(folder)
    return dict(model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_dequantised_as_gguf_does(kind: str, data: st.DataObject) -> None:
    shape = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)) * 256
    rows = tiny_gguf.matrix(str(data.draw(st.integers(0, 1000))), shape, kind).view(np.uint8)
    assert rows.shape == (shape[0], row_bytes(kind, shape[1]))
    wanted = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(dequantise(kind, rows).view(np.uint32), wanted.view(np.uint32))
    assert dequantise(kind, rows[:0]).shape == (0, shape[1])


@given(st.integers(1, 5), st.integers(1, 9))
def test_interleaved_rows_undo_llama_cpps_permutation(n_heads: int, half: int) -> None:
    n = n_heads * half * 2
    permuted = np.arange(n).reshape(n_heads, 2, half).swapaxes(1, 2).reshape(n)  # llama.cpp, convert_hf_to_gguf.py, permute
    assert np.array_equal(permuted[interleaved_rows(np.arange(n), n, n_heads)], np.arange(n))


@pytest.mark.parametrize("other", [True, False])
def test_a_head_of_its_own_is_not_tied_whatever_the_config_says(tmp_path: Path, other: bool) -> None:
    """transformers does not tie it either."""
    tensors = {name: parameter.detach() for name, parameter in save(tmp_path, torch.float32).items()}
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0) if other else embedding.clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tiny.edit_config(tmp_path, tie_word_embeddings=True)
    source = open_model(str(tmp_path)).source
    assert (source["lm_head.weight"] is source["model.embed_tokens.weight"]) != other
    mine, theirs = load_model(str(tmp_path)).model, transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        ids = torch.arange(9)[None]
        assert torch.equal(mine(ids).logits, theirs.eval()(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", [{}, {"max_shard_size": "50KB"}])
def test_a_folders_rows_are_read_from_its_files(tmp_path: Path, dtype: torch.dtype, shards: dict[str, Any]) -> None:
    wanted = save(tmp_path, dtype, **shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == bool(shards)
    opened = open_model(str(tmp_path))
    assert all(parameter.is_meta for parameter in opened.model.parameters())
    assert opened.source.keys() == wanted.keys()
    assert opened.source.n_bytes == sum(p.numel() * p.element_size() for p in wanted.values())
    for name, parameter in wanted.items():
        stored = opened.source[name]
        assert stored.kind == {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
        assert torch.equal(torch.from_numpy(stored.float32()), parameter.float())
        last = torch.from_numpy(stored.read_rows(stored.n_rows - 1, stored.n_rows)).view(dtype)
        assert torch.equal(last[0], parameter.reshape(stored.n_rows, -1)[-1])


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
@pytest.mark.parametrize("tie", [False, True])
def test_a_filled_model_is_the_one_that_was_saved(tmp_path: Path, arch: str, tie: bool) -> None:
    model = tiny.tiny_model(arch, tie_word_embeddings=tie)
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), tokenizer=tiny.byte_tokenizer()).model
    ids = torch.arange(0, 60)[None]
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    shares = [each.get_input_embeddings().weight is each.get_output_embeddings().weight for each in (loaded, model)]
    assert shares == 2 * [tie and arch != "nemotron_h"]  # whose class in transformers never ties them
    assert not loaded.training
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in loaded.parameters())
    assert loaded.generation_config.eos_token_id == tiny.EOS


def test_names_without_the_models_prefix(tmp_path: Path) -> None:
    """As older checkpoints have them."""
    wanted = save(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    opened = open_model(str(tmp_path))
    assert all(torch.equal(torch.from_numpy(opened.source[name].float32()), parameter) for name, parameter in wanted.items())


def test_what_transformers_converts_is_left_to_it(tmp_path: Path) -> None:
    wanted = save(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    opened = open_model(str(tmp_path))
    assert not any(parameter.is_meta for parameter in opened.model.parameters())
    assert all(torch.equal(torch.from_numpy(opened.source[name].float32()), parameter) for name, parameter in wanted.items())


def test_a_file_that_shrinks_is_told(tmp_path: Path) -> None:
    save(tmp_path)
    source = open_model(str(tmp_path)).source
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"model.safetensors ends at byte"):
        source["lm_head.weight"].read_rows(0, 1)


def test_rows_are_read_by_several_threads(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf", kind="Q6_K")
    source = open_model(str(path), cache_dir=tmp_path / "cache").source
    wanted = {name: stored.float32() for name, stored in source.items()}
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda name: (name, source[name].float32()), [name for name in source for _ in range(20)]))
    assert all(np.array_equal(wanted[name], values) for name, values in found)


def test_parameters_in_memory() -> None:
    model = tiny.tiny_model("llama", tie_word_embeddings=True).to(torch.bfloat16)
    source = ParamsSource(model)
    assert source.n_bytes == sum(p.numel() * 2 for p in model.parameters())
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert isinstance(source[name], MemoryTensor)
        assert source[name].kind == "BF16"
        assert torch.equal(torch.from_numpy(source[name].float32()), parameter.float())
    model.lm_head.weight = torch.nn.Parameter(torch.zeros((3, 4), dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"lm_head.weight is int8; accepted: float32, float16, bfloat16"):
        ParamsSource(model)["lm_head.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_quantised_while_reading(tmp_path: Path, dtype: torch.dtype) -> None:
    plain = save(tmp_path, dtype)
    source = open_model(str(tmp_path), quantize="q8_0").source
    assert source.keys() == plain.keys()
    for name, parameter in plain.items():
        stored = source[name]
        if parameter.dim() == 1:
            assert stored.kind == {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
            continue
        assert isinstance(stored, Q8Tensor)
        assert stored.kind == "Q8_0"
        wanted = gguf.quants.quantize(parameter.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(stored.read_rows(0, stored.n_rows), wanted)
        assert np.array_equal(stored.read_rows(5, 9), wanted[5:9])
        assert np.array_equal(stored.float32(), gguf.quants.dequantize(wanted, gguf.GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_blocks_are_those_of_ggml(kind: str) -> None:
    """Numbers of every size that a scale in float16 can follow, zeros, and halves, which are rounded away from zero."""
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((600, 320)) * 10.0 ** rng.integers(-20, 6, (600, 1))).astype(np.float32)
    values[::7, :64] = 0
    values[1::5] = rng.integers(-254, 255, (120, 320)) / 2
    rows = values.view(np.uint16)[:, 1::2].copy() if kind == "BF16" else values
    rounded = (rows.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else values
    with np.errstate(over="ignore"):
        wanted = gguf.quants.quantize(rounded, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(quantise_rows(kind, rows.view(np.uint8)), wanted)
    assert len({*wanted.reshape(-1, 34)[:, 2:].view(np.int8).ravel()}) == 255


def test_what_is_in_blocks_or_does_not_fit_them_stays(tmp_path: Path) -> None:
    opened = open_model(str(tiny_gguf.write(tmp_path / "a.gguf", kind="Q4_K")), cache_dir=tmp_path / "cache", quantize="q8_0")
    assert opened.source["lm_head.weight"].kind == "Q4_K"
    tiny.tiny_model("llama", intermediate_size=100).save_pretrained(tmp_path)
    source = open_model(str(tmp_path), tokenizer=tiny.byte_tokenizer(), quantize="q8_0").source
    assert (source["model.layers.0.mlp.down_proj.weight"].kind, source["model.layers.0.mlp.up_proj.weight"].kind) == ("F32", "Q8_0")
    with pytest.raises(InvalidInputError, match="got 'q4_0'"):
        open_model("smollm2", quantize="q4_0")


def test_random_weights_are_there_already(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny.tiny_model("llama").config.to_dict()))
    opened = open_model(f"random:{tmp_path}")
    name, parameter = next(iter(opened.model.named_parameters()))
    assert torch.equal(torch.from_numpy(opened.source[name].float32()), parameter)


def test_computed_parameters() -> None:
    stored = MemoryTensor(kind="F32", shape=(3, 4), tensor=torch.arange(12.0).reshape(3, 4))
    turned = ComputedTensor(kind="F32", shape=(4, 3), stored=stored, compute=lambda x: x.T)
    assert turned.read_rows(1, 3).view(np.float32).tolist() == [[1, 5, 9], [2, 6, 10]]
    assert turned.float32().tolist() == stored.float32().T.tolist()


def test_fill_in_a_dtype(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "a.gguf", "gemma2", "Q4_0")
    opened = open_model(str(path), cache_dir=tmp_path / "cache")
    filled = fill(opened.model, opened.source, torch.bfloat16, "cpu")
    assert filled.dtype == filled.config.dtype == torch.bfloat16
    for name, parameter in filled.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(opened.source[name].float32()).to(torch.bfloat16))

"""Models whose weights stay in blocks: they take the memory that the file takes, and have the bits of the same weights dequantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import small
import tiny_architectures
import tiny_gguf
import tiny_grouped
import torch
from torch import nn

from ngramspec.backends.cuda import cuda_runner
from ngramspec.backends.cuda.cuda_runner import CudaOptions, CudaRunner
from ngramspec.backends.cuda.expert_layer import ExpertLayer
from ngramspec.backends.cuda.model import CudaDecoder, ModulesDecoder, VendorProduct
from ngramspec.backends.cuda.packed import MOST_DENSE, CudaPackedEmbedding, CudaPackedLinear, make_packed_form
from ngramspec.backends.cuda.packed_experts import PackedExpertWeight, PackedPairProduct
from ngramspec.backends.cuda.quantised import CudaQuantisedProduct
from ngramspec.models import loader
from ngramspec.models.loader import load_model
from ngramspec.sampling.batch import Span

GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 7}
PROMPT = np.array([5, 9, 5, 9, 5], np.int32)
N_TOKENS = 4
MEDIUM = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K"}
"""As llama.cpp mixes Q4_K_M: query and key are of another format than value."""


def load(path: Path, dtype: torch.dtype, device: str, packed: bool = True) -> Any:
    return load_model(
        str(path), dtype=dtype, device=device, cache_dir=path.parent / "cache", keep=make_packed_form("always", 0) if packed else None
    ).model


def bind(model: Any, **options: Any) -> CudaRunner:
    return CudaRunner(model, CudaOptions(**{"max_len": 32, "max_seqs": 4, "max_rows": 24, "kv_bytes": 1 << 21, "max_depth": 9} | options))


def decoded(runner: CudaRunner, how: dict[str, Any], drafted: list[int] | None = None) -> small.Text:
    """Token by token, or with these tokens as a draft."""
    text = small.Text(runner, PROMPT, **how)
    if drafted is not None:
        assert small.decode([text], [small.branching(drafted[: N_TOKENS - 2])]) == [N_TOKENS - 1]
    while len(text.tokens) < len(PROMPT) + N_TOKENS:
        small.decode([text], [None])
    text.release()
    return text


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are written have one layer, for the interpreter takes seconds for each."""
    monkeypatch.setattr(tiny_gguf, "LAYERS", dict.fromkeys(tiny_gguf.LAYERS, 1) | {"llama": 1})


@pytest.mark.parametrize(
    ("family", "options", "how", "decoder"),
    [
        ("llama", {"kind": "Q4_0"}, SAMPLED, CudaDecoder),
        ("qwen2", {"kind": "Q4_K", "kinds": MEDIUM, "tied": True}, GREEDY, CudaDecoder),
        pytest.param("llama", {"kind": "Q8_0", "kinds": {"attn_k": "F16", "ffn_up": "Q2_K"}}, SAMPLED, CudaDecoder, marks=pytest.mark.soak),
        pytest.param("gemma2", {"kind": "Q4_1"}, SAMPLED, ModulesDecoder, marks=pytest.mark.soak),
    ],
    ids=["llama", "mixed", "half-dense", "modules"],
)
def test_drafts_and_blocks_change_nothing(
    family: str, options: dict[str, Any], how: dict[str, Any], decoder: type, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.take_on_trust(monkeypatch)
    monkeypatch.setattr(small, "VOCAB", tiny_gguf.VOCAB)
    for name, value in {"LAYERS": {family: 1}, "HEADS": 2, "KV_HEADS": 1, "INNER": 256}.items():  # the interpreter takes heads in turn
        monkeypatch.setattr(tiny_gguf, name, value)
    path = tiny_gguf.write(tmp_path / "m.gguf", family, std=0.1, **options)
    dtype = torch.float16 if decoder is ModulesDecoder else torch.bfloat16
    dense, packed = (bind(load(path, dtype, device, keeps)) for keeps in (False, True))
    assert type(packed._decoder) is type(dense._decoder) is decoder
    plain, same = decoded(dense, how), decoded(packed, how)
    on = decoded(packed, how, plain.tokens[len(PROMPT) :])
    assert plain.tokens == same.tokens == on.tokens
    assert torch.equal(torch.stack(plain.rows), torch.stack(same.rows))
    assert torch.equal(torch.stack(plain.rows), torch.stack(on.rows))


@pytest.mark.parametrize("how", [tiny_grouped.AWQ, tiny_grouped.SYMMETRIC], ids=["awq", "gptq"])
def test_checkpoints_of_other_packages_stay_in_blocks(
    how: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.take_on_trust(monkeypatch)
    tiny_grouped.write(tmp_path / "m", how, **small.SHAPE | small.IDS | {"hidden_size": 64, "intermediate_size": 64})
    dense, packed = (bind(load(tmp_path / "m", torch.bfloat16, device, keeps)) for keeps in (False, True))
    assert isinstance(packed._decoder, CudaDecoder)
    assert isinstance(packed._decoder.layers[0].mlp.down, CudaQuantisedProduct)
    assert not isinstance(dense._decoder.layers[0].mlp.down, CudaQuantisedProduct)  # type: ignore[union-attr]
    plain, same = decoded(dense, {"temperature": 0}), decoded(packed, {"temperature": 0})
    on = decoded(packed, {"temperature": 0}, plain.tokens[len(PROMPT) :])
    assert plain.tokens == same.tokens == on.tokens
    assert torch.equal(torch.stack(plain.rows), torch.stack(same.rows))
    assert torch.equal(torch.stack(plain.rows), torch.stack(on.rows))


def test_experts_stay_in_blocks(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.take_on_trust(monkeypatch)
    monkeypatch.setattr(cuda_runner, "find_dependence", lambda product, thoroughly: None)
    monkeypatch.setattr(tiny_architectures, "LAYERS", 1)
    kind = gguf.GGMLQuantizationType.Q8_0

    def store(name: str, weights: np.ndarray) -> tiny_architectures.Stored:
        return (gguf.quants.quantize(weights, kind), kind) if name.endswith("exps.weight") else (weights, None)

    path = tiny_architectures.write(tmp_path / "m.gguf", "qwen3moe", store)
    dense, packed = (bind(load(path, torch.bfloat16, device, keeps)) for keeps in (False, True))
    held = [module for module in packed.model.modules() if isinstance(module, PackedExpertWeight)]
    assert len(held) == 2
    assert isinstance(packed._decoder, CudaDecoder)
    assert isinstance(packed._decoder.layers[0].mlp, ExpertLayer)
    assert isinstance(packed._decoder.layers[0].mlp.experts.down, PackedPairProduct)
    whole, same = (runner.run([Span(runner.reserve_free_slot(5), PROMPT, 0, logits=5)]) for runner in (dense, packed))
    assert torch.equal(whole, same)


@pytest.mark.soak
def test_products_are_proved_as_others_are(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_gguf, "LAYERS", {"llama": 1})
    runner = bind(
        load(tiny_gguf.write(tmp_path / "m.gguf", kind="Q4_K", kinds=MEDIUM, std=0.1), torch.bfloat16, device), max_rows=2, max_seqs=2
    )
    assert runner.exactness == "bitwise"
    stack = runner._decoder
    assert isinstance(stack, CudaDecoder)
    qkv = stack.layers[0].mixer.qkv
    assert isinstance(qkv, CudaQuantisedProduct)
    assert [part.n_out for part in qkv.parts] == [384, 128]


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "Q4_0"},
        pytest.param({"kind": "Q8_0", "tied": True}, marks=pytest.mark.soak),
        pytest.param({"kind": "Q4_K", "kinds": MEDIUM}, marks=pytest.mark.soak),
    ],
)
@pytest.mark.usefixtures("one_layer")
def test_the_device_keeps_what_the_file_has(options: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.take_on_trust(monkeypatch)
    path = tiny_gguf.write(tmp_path / "m.gguf", std=0.1, **options)
    model = load(path, torch.bfloat16, device)
    runner = bind(model)
    assert not [m for m in model.modules() if type(m) in (nn.Linear, nn.Embedding)]
    kept: dict[int, int] = {p.data_ptr(): p.nbytes for p in model.parameters()}
    held = [m.packed for m in model.modules() if isinstance(m, CudaPackedLinear | CudaPackedEmbedding)]
    stack = runner._decoder
    assert isinstance(stack, CudaDecoder)
    products = [stack.head] + [p for layer in stack.layers for p in (layer.mixer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)]
    for packed in [*held, *(part for product in products for part in product.parts)]:  # type: ignore[attr-defined]
        for part in (packed.codes, packed.words, packed.supers):
            if part is not None:
                storage = part.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
    file = gguf.GGUFReader(path)
    assert sum(kept.values()) <= 1.2 * sum(int(tensor.n_bytes) for tensor in file.tensors)


@pytest.mark.parametrize("kind", ["Q4_0", "Q2_K", "F16"])
def test_the_memory_that_is_asked_for_is_what_is_held(kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that are not multiplied in blocks are dequantised, whatever the file's size."""
    asked: list[int] = []
    monkeypatch.setattr(loader, "check_memory", lambda n_bytes, *_: asked.append(n_bytes))
    model = load(tiny_gguf.write(tmp_path / "m.gguf", kind=kind, std=0.1), torch.float32, device)
    packed = [m.packed for m in model.modules() if isinstance(m, CudaPackedLinear | CudaPackedEmbedding)]
    parts = [part for each in packed for part in (each.codes, each.words, each.supers) if part is not None]
    held = sum({p.data_ptr(): p.nbytes for p in [*model.parameters(), *parts]}.values())
    assert bool(packed) == (kind == "Q4_0")
    assert asked[-1] == pytest.approx(held, rel=0.2 if packed else 0)


@pytest.mark.usefixtures("one_layer")
def test_blocks_that_are_joined_with_numbers_are_kept_once(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.take_on_trust(monkeypatch)
    model = load(tiny_gguf.write(tmp_path / "m.gguf", kind="Q8_0", kinds={"attn_k": "F16"}, std=0.1), torch.bfloat16, device)
    before = model.model.layers[0].self_attn.q_proj.packed.dequantise(torch.bfloat16)
    stack = bind(model)._decoder
    assert isinstance(stack, CudaDecoder)
    whole, attn = stack.layers[0].mixer.qkv.weight, model.model.layers[0].self_attn  # type: ignore[attr-defined]
    for linear in (attn.q_proj, attn.k_proj, attn.v_proj):
        assert type(linear) is nn.Linear
        assert linear.weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert torch.equal(attn.q_proj.weight, before)


@pytest.mark.usefixtures("one_layer")
def test_the_vendors_products_take_blocks_too(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.take_on_trust(monkeypatch)
    path = tiny_gguf.write(tmp_path / "m.gguf", kind="Q5_K", std=0.1)
    runner = bind(load(path, torch.float32, device), exact=False)
    assert isinstance(runner._decoder, CudaDecoder)
    assert isinstance(runner._decoder.head, VendorProduct)
    assert runner.exactness == "numerical"


@pytest.mark.usefixtures("one_layer")
def test_weights_are_dequantised_where_there_is_room(device: str, tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", kind="Q4_K", kinds=MEDIUM | {"attn_k": "Q2_K"}, std=0.1, tied=True)
    dense = load(path, torch.bfloat16, device, packed=False)
    n_bytes = sum(p.nbytes for p in dense.parameters())

    def kept(mode: str, usable: float) -> Any:
        return load_model(
            str(path), dtype=torch.bfloat16, device=device, cache_dir=path.parent / "cache", keep=make_packed_form(mode, int(usable))
        ).model

    for mode, usable in (("never", 0), ("auto", n_bytes / MOST_DENSE)):
        model = kept(mode, usable)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        for name, parameter in dense.state_dict().items():
            assert torch.equal(model.state_dict()[name], parameter), name
    for mode, usable in (("always", 1e12), ("auto", n_bytes / MOST_DENSE - 8)):
        assert isinstance(kept(mode, usable).model.layers[0].mlp.down_proj, CudaPackedLinear)

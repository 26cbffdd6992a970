"""Medusa heads, EAGLE and blockwise layers from their files: the same proposals as plain code over transformers' hidden states."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny_heads import EAGLE_CONFIG, HIDDEN, blockwise_tensors, eagle_tensors, medusa_tensors, write_blockwise, write_eagle, write_medusa
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from ngramspec.errors import ModelNotFoundError, UnsupportedModelError
from ngramspec.papers.blockwise import Blockwise
from ngramspec.papers.eagle import Eagle
from ngramspec.papers.heads import Medusa
from ngramspec.papers.registry import make_drafter
from ngramspec.speculative.drafter import Candidates

TOKENS = np.random.default_rng(4).integers(0, 250, 30).astype(np.int32)


@pytest.fixture(scope="module")
def runner() -> SimpleNamespace:
    return SimpleNamespace(model=tiny.tiny_model("llama"), vocab_size=tiny.VOCAB)


@pytest.fixture(scope="module")
def states(runner: SimpleNamespace) -> np.ndarray:
    """[n, H], behind the final norm."""
    return runner.model.base_model(torch.from_numpy(TOKENS)[None].long()).last_hidden_state[0].numpy()


def paths(tree: Candidates) -> dict[tuple[int, ...], float]:
    """Per node the tokens from the root to it, and its probability."""
    out: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        out.append((*(out[parent] if parent >= 0 else ()), token))
    assert len(set(out)) == len(out), "siblings differ"
    return dict(zip(out, tree.probs.tolist(), strict=True))


@pytest.mark.parametrize(("pickled", "n_blocks", "own"), [(False, 1, True), (True, 2, True), (False, 1, False)])
def test_medusa_heads_propose_their_likeliest(
    tmp_path: Path, runner: SimpleNamespace, states: np.ndarray, pickled: bool, n_blocks: int, own: bool
) -> None:
    tensors = medusa_tensors(4, n_blocks)
    if not own:  # heads that share the model's projection
        tensors = {name: tensor for name, tensor in tensors.items() if "linear" in name}
    drafter = Medusa(write_medusa(tmp_path, tensors, 3, n_blocks, pickled=pickled), nodes=30, top=4)
    drafter.bind(runner)
    drafter.begin(0, TOKENS)
    drafter.begin(1, TOKENS[:7])
    assert len(drafter.propose([0], 64)[0]) == 0, "no state was heard"
    drafter.on_hidden_states(0, 0, states[:20])
    drafter.on_hidden_states(0, 20, states[20:29])
    drafter.on_hidden_states(1, 3, states[3:6])
    for tree, n in zip(drafter.propose([0, 1], 64), (30, 7), strict=True):
        likely = []
        for i in range(3):
            x = torch.from_numpy(states[n - 2])
            for block in range(n_blocks):
                x = x + F.silu(tensors[f"{i}.{block}.linear.weight"] @ x + tensors[f"{i}.{block}.linear.bias"])
            projection = tensors[f"{i}.{n_blocks}.weight"] if own else runner.model.lm_head.weight
            likely.append((projection @ x).topk(4).indices.tolist())
        assert len(tree) == 30
        for path in paths(tree):
            assert all(token in likely[depth] for depth, token in enumerate(path))
        assert (likely[0][0], likely[1][0], likely[2][0]) in paths(tree)
        assert {path[0] for path in paths(tree)} == set(likely[0])
    assert len(drafter.propose([0], 5)[0]) == 5


def test_a_blockwise_layer_proposes_the_chain_of_its_likeliest(tmp_path: Path, runner: SimpleNamespace, states: np.ndarray) -> None:
    tensors = blockwise_tensors()
    drafter = Blockwise(write_blockwise(tmp_path, tensors))
    drafter.bind(runner)
    drafter.begin(0, TOKENS)
    drafter.begin(1, TOKENS[:7])
    assert [len(tree) for tree in drafter.propose([0, 1], 64)] == [0, 0]
    drafter.on_hidden_states(0, 0, states[:29])
    drafter.on_hidden_states(1, 0, states[:6])
    for tree, n in zip(drafter.propose([0, 1], 64), (30, 7), strict=True):
        x = torch.from_numpy(states[n - 2])
        inside = (tensors["hidden.weight"] @ x + tensors["hidden.bias"]).clamp(min=0)
        outputs = (tensors["output.weight"] @ inside + tensors["output.bias"]).view(4, HIDDEN) + x
        assert tree.tokens.tolist() == [int((runner.model.lm_head.weight @ each).argmax()) for each in outputs[1:]]
        assert tree.parents.tolist() == [-1, 0, 1]
        assert tree.probs.tolist() == pytest.approx([0.6, 0.36, 0.216])
    assert len(drafter.propose([0], 2)[0]) == 2


@pytest.mark.parametrize(
    ("name", "shape", "config", "reason"),
    [
        ("hidden.bias", None, {}, "there is no tensor 'hidden.bias'"),
        ("output.weight", (4 * HIDDEN, 24), {}, "'output.weight' must be [256, 96], is [256, 24]"),
        ("extra", (2,), {}, "unknown tensors 'extra'"),
        ("extra", (2,), {"block_size": 1}, "block_size must be 2 or more"),
        ("extra", (2,), {"hidden_size": None}, "must say block_size and hidden_size"),
    ],
)
def test_other_blockwise_layers_are_refused(
    tmp_path: Path, runner: SimpleNamespace, name: str, shape: Any, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        Blockwise(write_blockwise(tmp_path, changed(blockwise_tensors(), name, shape), **config)).bind(runner)


def eagle_step(tensors: dict[str, torch.Tensor], first: int, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
    """The last predicted state [H] from states [m, H] of positions first, …, and the tokens that follow each; transformers' own layer."""
    config = LlamaConfig(**EAGLE_CONFIG)
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict({name.removeprefix("layers.0."): tensor for name, tensor in tensors.items() if name.startswith("layers.")})
    embedded = tensors["embed_tokens.weight"][torch.tensor(tokens)]
    x = torch.cat([embedded, states], -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", 0)
    positions = torch.arange(first, first + len(tokens))[None]
    with torch.no_grad():
        out = layer(x[None], position_ids=positions, position_embeddings=LlamaRotaryEmbedding(config)(x, positions))
    return out[0, -1]


def eagle_tree(
    head: nn.Module, tensors: dict[str, torch.Tensor], first: int, n: int, states: np.ndarray, depth: int, top: int
) -> dict[tuple[int, ...], float]:
    """Every node that EAGLE-2 looks at, behind the first n tokens."""
    found: dict[tuple[int, ...], float] = {}
    level: list[tuple[tuple[int, ...], float, torch.Tensor]] = [((), 0.0, torch.from_numpy(states[first : n - 1]))]
    for _ in range(depth):
        children = []
        for path, score, before in level:
            known = torch.cat([before, eagle_step(tensors, first, [*TOKENS[first + 1 : n].tolist(), *path], before)[None]])
            chances, likely = head(known[-1]).log_softmax(-1).topk(top)
            for chance, token in zip(chances.tolist(), likely.tolist(), strict=True):
                children.append(((*path, token), score + chance, known))
        found |= {path: score for path, score, _ in children}
        level = sorted(children, key=lambda child: -child[1])[:top]
    return found


@pytest.mark.parametrize(("pickled", "bias", "first"), [(False, True, 0), (True, False, 5)])
def test_eagle_proposes_the_likeliest_paths(
    tmp_path: Path, runner: SimpleNamespace, states: np.ndarray, pickled: bool, bias: bool, first: int
) -> None:
    """Read in pieces, rolled back to what was accepted, from the first state on that was not in the prefix cache."""
    tensors = eagle_tensors()
    if not bias:
        del tensors["fc.bias"]
    drafter = Eagle(write_eagle(tmp_path, tensors, pickled=pickled), nodes=12, depth=3, top=4)
    drafter.bind(runner)
    drafter.begin(0, TOKENS[:20])
    drafter.begin(1, TOKENS[:12])
    assert [len(tree) for tree in drafter.propose([0, 1], 64)] == [0, 0]
    drafter.on_hidden_states(0, first, states[first:13])
    drafter.on_hidden_states(0, 13, states[13:20])
    drafter.on_hidden_states(1, first, states[first:11])
    drafter.observe(0, TOKENS[20:21], TOKENS[:0])
    drafter.propose([0], 64)
    drafter.on_hidden_states(0, 20, states[20:23])
    drafter.observe(0, TOKENS[21:24], TOKENS[:0])
    for tree, n in zip(drafter.propose([0, 1], 64), (24, 12), strict=True):
        expected = eagle_tree(runner.model.lm_head, tensors, first, n, states, 3, 4)
        best = dict(sorted(expected.items(), key=lambda item: -item[1])[:12])
        got = paths(tree)
        assert set(got) == set(best)
        for path, prob in got.items():
            assert np.log(prob) == pytest.approx(best[path], abs=1e-4)
    assert len(drafter.propose([0], 3)[0]) == 3


def changed(tensors: dict[str, torch.Tensor], name: str, shape: tuple[int, ...] | None) -> dict[str, torch.Tensor]:
    """With a tensor of this name and shape, or without."""
    return {other: tensor for other, tensor in tensors.items() if other != name} | ({} if shape is None else {name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("1.0.linear.bias", None, "there is no tensor '1.0.linear.bias'"),
        ("2.1.weight", (tiny.VOCAB + 8, HIDDEN), "'2.1.weight' must be [256, 64], is [264, 64]"),
        ("0.0.linear.weight", (32, 32), "'0.0.linear.weight' must be [64, 64], is [32, 32]"),
        ("blocks.0.layers.0.weight", (2,), "unknown tensors 'blocks.0.layers.0.weight'"),
    ],
)
def test_other_medusa_heads_are_refused(tmp_path: Path, runner: SimpleNamespace, name: str, shape: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        Medusa(write_medusa(tmp_path, changed(medusa_tensors(), name, shape))).bind(runner)


@pytest.mark.parametrize(
    ("name", "shape", "config", "reason"),
    [
        ("fc.weight", None, {}, "there is no tensor 'fc.weight'"),
        ("layers.0.input_layernorm.weight", (HIDDEN,), {}, "unknown tensors 'layers.0.input_layernorm.weight'"),
        ("midlayer.hidden_norm.weight", (HIDDEN,), {}, "is of EAGLE-3"),
        ("d2t", (9,), {}, "is of EAGLE-3"),
        ("fc.weight", (HIDDEN, 3 * HIDDEN), {}, "'fc.weight' must be [64, 128], is [64, 192]"),
        ("fc.bias", None, {"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ("fc.bias", None, {"hidden_act": "none"}, "config.json is not a Llama's"),
        ("embed_tokens.weight", (300, HIDDEN), {"vocab_size": 300}, "vocab_size must be the model's 256, is 300"),
    ],
)
def test_other_eagle_layers_are_refused(
    tmp_path: Path, runner: SimpleNamespace, name: str, shape: Any, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        Eagle(write_eagle(tmp_path, changed(eagle_tensors(), name, shape), **config)).bind(runner)


def test_unreadable_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="or medusa_lm_head"):
        make_drafter(f"medusa:{tmp_path}")
    torch.save({"0.0.linear.weight": Path("code")}, tmp_path / "medusa_lm_head.pt")  # more than tensors
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        make_drafter(f"medusa:{tmp_path}")
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        make_drafter(f"medusa:{tmp_path}")
    write_medusa(tmp_path, medusa_tensors())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="must say medusa_num_heads"):
        make_drafter(f"medusa:{tmp_path}")
    with pytest.raises(ValueError, match="needs the folder"):
        make_drafter("eagle")

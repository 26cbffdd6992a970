"""Models with experts on the device: transformers' texts, the same whatever else is in a pass, and what is done if kernels do not run."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import small
import torch

from ngramspec.backends.base import Runner
from ngramspec.backends.cuda import cuda_runner as runner_module
from ngramspec.backends.cuda import expert_kernels, expert_layer
from ngramspec.backends.cuda.cuda_runner import CudaOptions, CudaRunner
from ngramspec.backends.cuda.expert_kernels import PairProduct, sum_experts
from ngramspec.backends.cuda.expert_layer import ExpertLayer, ExpertsModule
from ngramspec.backends.cuda.graphs import Bucket, bucket_for
from ngramspec.backends.cuda.model import CudaDecoder, DenseMlp, ModulesDecoder

SIZES: dict[str, Any] = small.NARROW | {"num_hidden_layers": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 24, "mlp_only_layers": []},
    "qwen2_moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
    },
    "olmoe": {},
    "granitemoe": {"num_local_experts": 4},
    "gpt_oss": {
        "num_local_experts": 4,
        "layer_types": ["sliding_attention"],
        "sliding_window": 4,
    },
}
DENSE = {"glm4_moe": [True, False]}
QUICK = ("qwen3_moe", "mixtral", "gpt_oss")  # under the interpreter, which takes seconds for each
MODULES = ("olmoe", "granitemoe", "gpt_oss")  # by transformers' modules, with our routers and experts
PROMPT = np.array([5, 9, 5, 9, 5], np.int32)
N_TOKENS = 3
ROOM: dict[str, Any] = {"max_len": 32, "max_seqs": 3, "max_rows": 16, "kv_bytes": 1 << 21, "max_depth": 9}


def make(family: str, device: str) -> Any:
    model = small.make_model(family, **SIZES | FAMILIES[family]).to(device)
    model.config._experts_implementation = "eager"  # which runs in every dtype on every device
    return model


def bind(family: str, device: str, dtype: torch.dtype = torch.float32) -> CudaRunner:
    """Without graphs: what a test puts in a function's place after the start would not be captured."""
    return CudaRunner(make(family, device).to(dtype), CudaOptions(graphs=False, **ROOM))


@torch.inference_mode()
def generate(model: Any, prompt: list[int], n: int) -> list[int]:
    """Return what transformers' own modules write, greedily."""
    ids = torch.tensor([prompt], device=model.device)
    for _ in range(n):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", [pytest.param(each, marks=[pytest.mark.soak] * (each not in QUICK)) for each in FAMILIES])
def test_texts_are_transformers_and_drafts_and_mates_change_no_bit(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small.take_on_trust(monkeypatch)
    monkeypatch.setattr(runner_module, "find_dependence", lambda product, thoroughly: None)
    monkeypatch.setattr(expert_layer, "MOST_PAIRS", 8)
    model = make(family, device)
    expected = generate(model, PROMPT.tolist(), N_TOKENS)
    runner = CudaRunner(model, CudaOptions(**ROOM))
    assert runner.has_experts
    decoder = runner._decoder
    if family in MODULES:
        assert isinstance(decoder, ModulesDecoder)
        assert [isinstance(module, ExpertsModule) for module in decoder.model.modules()].count(True) == len(runner.shapes)
    else:
        assert isinstance(decoder, CudaDecoder)
        assert [isinstance(layer.mlp, DenseMlp) for layer in decoder.layers] == DENSE.get(family, [False])
    plain, drafted, mate = (small.Text(runner, prompt, temperature=0) for prompt in (PROMPT, PROMPT, PROMPT[::-1].copy()))
    for _ in range(N_TOKENS):
        small.decode([plain], [None])
    assert plain.tokens[len(PROMPT) :] == expected
    assert small.decode([mate, drafted], [None, small.branching(expected[: N_TOKENS - 1])]) == [1, N_TOKENS]
    assert drafted.tokens == plain.tokens
    assert torch.equal(torch.stack(drafted.rows), torch.stack(plain.rows))


def test_the_self_test_covers_experts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "find_violation", lambda product, counts: None)
    monkeypatch.setattr(expert_kernels, "CHECKED_PAIRS", (1, 17))
    monkeypatch.setattr(Runner, "self_test", lambda self: self.rows_are_independent(self._logits_of, 2))
    monkeypatch.setattr(CudaRunner, "_test_pieces", lambda self, n: True)
    monkeypatch.setattr(CudaRunner, "_test_accepted", lambda self: True)
    runner = bind("qwen3_moe", device)
    assert (runner.exactness, runner.violations) == ("bitwise", [])
    assert str(runner.policies[4 * 48, 32]) == "4 experts, fixed tiles"

    def sum_with_mates(added: torch.Tensor, ids: torch.Tensor, *others: Any) -> torch.Tensor:
        return sum_experts(added, ids, *others) * (1 + 2**-22 * (len(ids) > 8))

    monkeypatch.setattr(expert_layer, "sum_experts", sum_with_mates)
    runner.prove()
    assert runner.exactness == "numerical"
    assert runner.violations == ["attention or small operations: a chain and a tree against token by token"]


def test_experts_that_depend_on_others_are_named(device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    small.take_on_trust(monkeypatch)
    monkeypatch.setattr(runner_module, "find_dependence", lambda product, thoroughly: "a product" if product.n_in == 24 else None)
    runner = bind("qwen3_moe", device)
    assert runner.exactness == "numerical"
    assert "(128, 24): 4 experts, fixed tiles: a product, numerical" in caplog.text


def test_experts_that_do_not_run_are_the_models_own(device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    small.take_on_trust(monkeypatch)

    def fails(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory, Required: 300000")

    monkeypatch.setattr(PairProduct, "__call__", fails)
    with caplog.at_level(logging.WARNING):
        runner = bind("mixtral", device)
    assert isinstance(runner._decoder, ModulesDecoder)
    assert not [module for module in runner.model.modules() if isinstance(module, ExpertsModule)]
    assert runner.exactness == "numerical"
    assert "experts with weights of (256, 32) are the model's own; ours do not run here" in caplog.text


def test_rows_that_fill_up_a_bucket_read_no_experts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small.take_on_trust(monkeypatch)
    monkeypatch.setattr(runner_module, "find_dependence", lambda product, thoroughly: None)
    runner, chosen = bind("mixtral", device, dtype=torch.bfloat16), list[torch.Tensor]()
    run = expert_layer.ChosenExperts.run

    def watched(self: Any, x: torch.Tensor, ids: torch.Tensor, *others: Any) -> torch.Tensor:
        chosen.append(ids.clone())
        return run(self, x, ids, *others)

    monkeypatch.setattr(expert_layer.ChosenExperts, "run", watched)
    texts = [small.Text(runner, np.array([5, 9, 5], np.int32), temperature=0) for _ in range(2)]
    assert isinstance(runner._decoder.layers[0].mlp, ExpertLayer)  # type: ignore[attr-defined]
    for trees, n_rows in (([small.branching([7, 8]), None], 5), ([None, None], 2)):
        small.decode(texts, trees)
        bucket = bucket_for(n_rows, 2)
        assert bucket is not None
        assert (chosen[-1] < 4).all(dim=1).tolist() == [True] * n_rows + [False] * (bucket.rows - n_rows)
    assert bucket_for(5, 2) == Bucket(6, 2)

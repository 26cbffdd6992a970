"""What the passes are compared with at load: transformers' logits in float32, and how much of a difference is rounding."""

from __future__ import annotations

import pytest
import small
import torch

from ngramspec.backends.cuda import expected_logits as module
from ngramspec.backends.cuda.cuda_runner import CudaRunner
from ngramspec.backends.cuda.expected_logits import LEAST_TOLERANCE, compute_expected_logits, measure_difference
from ngramspec.errors import UnsupportedModelError


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2", "mixtral"])
def test_logits_are_those_of_the_model_in_float32(arch: str, device: str) -> None:
    model = small.make_model(arch, num_hidden_layers=3).to(device, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = compute_expected_logits(model)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name
    assert measure_difference(found.logits, compute_expected_logits(model.float()).logits) < 1e-5


def test_a_deep_model_in_bfloat16_may_differ_by_more(device: str) -> None:
    def make(n_layers: int) -> torch.nn.Module:
        model = small.make_model("llama", num_hidden_layers=n_layers)
        with torch.no_grad():
            for layer in model.model.layers:
                for linear in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                    linear.weight.mul_(4 / (linear.weight.std() * linear.in_features**0.5))
        return model.to(device, torch.bfloat16)

    shallow, deep = (compute_expected_logits(make(n)).tolerance for n in (1, 24))
    assert LEAST_TOLERANCE[torch.bfloat16] <= shallow < deep < module.MOST_TOLERANCE


def test_a_model_that_does_not_run_in_float32_is_compared_as_it_is(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small.make_model("llama").to(device, torch.bfloat16)

    def fails(*_: object) -> None:
        raise RuntimeError("expected BFloat16")

    monkeypatch.setattr(module, "_convert", fails)
    found = compute_expected_logits(model)
    assert found.tolerance == 2 * LEAST_TOLERANCE[torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_other_numbers_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small.take_on_trust(monkeypatch)
    right = CudaRunner._measure_error
    monkeypatch.setattr(CudaRunner, "_measure_error", lambda self, expected: right(self, expected) + 0.1)
    with pytest.raises(UnsupportedModelError, match=r"logits differ from transformers' own by 0\.1"):
        small.bind("llama", torch.bfloat16, device, narrow=True, n_layers=1)

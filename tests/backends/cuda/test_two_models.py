"""A draft model beside its target on the device: two pools, two sets of graphs, and never a token changes.

Without a device this would take minutes under the interpreter.
"""

from __future__ import annotations

import pytest
import tiny
from transformers import PreTrainedModel

from ngramspec import Completion, Engine, SamplingParams
from ngramspec.backends.cuda.cuda_runner import CudaRunner
from ngramspec.errors import UnsupportedModelError
from ngramspec.speculative.trained.draft_layers import DraftLayers
from ngramspec.speculative.trained.draft_model import DraftModel

pytestmark = pytest.mark.cuda
PROMPTS = [list(range(3, 40)), list(range(100, 190)), [7, 8, 9]]
PARAMS = (
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=1, repetition_penalty=1.2, ignore_eos=True),
)


def model() -> PreTrainedModel:
    return tiny.tiny_model("llama", hidden_size=256, intermediate_size=512)


def build(**options: object) -> Engine:
    return Engine(model(), device="cuda", dtype="float32", max_seqs=4, max_rows=64, kv_memory=64 << 20, **options)  # type: ignore[arg-type]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("branches", [1, 3])
def test_a_draft_model_on_the_device(branches: int) -> None:
    drafter = DraftModel(model().cuda(), branches=branches)
    with build(alone=drafter) as engine:
        assert isinstance(drafter.runner, CudaRunner)
        for params in PARAMS:
            plain = engine.complete(PROMPTS, params, speculation=False)
            drafted = engine.complete(PROMPTS, params)
            assert tokens(drafted) == tokens(plain)
            n_accepted = sum(d.stats.accepted for d in drafted)
            assert 0 < n_accepted <= sum(d.stats.drafted for d in drafted) <= n_accepted * branches  # the same model: one chain is right
        drafter.runner.pool.check_integrity()
        assert drafter.runner.pool.n_available == drafter.runner.pool.n_blocks


def test_drafts_by_rejection_on_the_device() -> None:
    with build(alone=DraftModel(model().cuda()), acceptance="rejection") as engine:
        done = engine.complete(PROMPTS, PARAMS[1])
    assert {d.exactness for d in done} == {"distribution"}
    assert sum(d.stats.accepted for d in done) == sum(d.stats.drafted for d in done) > 0


def test_drafts_from_the_first_layers_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="first layers"):
        build(alone=DraftLayers(1))

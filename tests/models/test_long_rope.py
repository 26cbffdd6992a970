"""LongRoPE's angles: the longest text that an engine is set up for decides which they are, and nothing else."""

from __future__ import annotations

import pytest
import tiny_architectures
import torch

from ngramspec import Engine, SamplingParams
from ngramspec.models.loader import load_model
from ngramspec.models.long_rope import fix_angles

TRAINED = 32  # tokens; longer texts have other angles
TEXT = [i * 31 % 250 for i in range(60)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_architectures.write(tmp_path_factory.mktemp("phi3") / "model.gguf", "phi3, long"))


def generate(path: str, prompt: list[int], n: int) -> list[int]:
    """Return transformers' greedy text."""
    model, ids = load_model(path).model, list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize(("max_model_len", "n_prompt", "n"), [(TRAINED, 8, 20), (128, TRAINED + 1, 40)])
def test_text_is_that_of_transformers_for_texts_of_that_length(path: str, max_model_len: int, n_prompt: int, n: int) -> None:
    prompt, params = TEXT[:n_prompt], SamplingParams(max_tokens=n, ignore_eos=True)
    expected = generate(path, prompt, n)
    for _ in range(2):  # the second start reads what the first one wrote
        with Engine(path, max_model_len=max_model_len, max_seqs=4) as engine:
            assert engine.exactness == "bitwise"
            assert engine.complete(prompt, params, speculation=False).token_ids == expected
            assert engine.complete(prompt, params).token_ids == expected


def test_short_texts_beside_long_ones_have_the_same_tokens(path: str) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=1)
    prompts = [TEXT[:5], TEXT, TEXT[:30]]
    with Engine(path, max_model_len=128, max_seqs=4, max_rows=16) as engine:
        alone = [engine.complete(prompt, params, speculation=False).token_ids for prompt in prompts]
        assert [each.token_ids for each in engine.complete(prompts, params)] == alone


def test_rows_of_a_fixed_model_do_not_depend_on_the_longest_text(path: str) -> None:
    model = load_model(path).model
    assert fix_angles(model, 128) is not None
    ids = torch.tensor([TEXT])
    with torch.inference_mode():
        assert torch.allclose(model(ids).logits[0, :10], model(ids[:, :10]).logits[0], atol=1e-4)
        fix_angles(model, TRAINED)
        assert not torch.allclose(model(ids).logits[0, :10], load_model(path).model(ids).logits[0, :10], atol=1e-2)

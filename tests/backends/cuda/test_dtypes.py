"""Families and dtypes: each loads, its logits are transformers' own, and drafts change no bit and no token.

On a device every family in every dtype; under the interpreter, which takes seconds for each, every dtype with our own decoder, and every
family once. What else a family has in each dtype, biases, norms of heads and windows, is tested by kernel; the modules' decoder shares
attention, products and sampling with ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import small
import torch

from ngramspec.backends.cuda.model import CudaDecoder, ModulesDecoder

FAMILIES = {"llama": CudaDecoder, "qwen2": CudaDecoder, "qwen3": CudaDecoder, "mistral": CudaDecoder, "gemma2": ModulesDecoder}
SAMPLED = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "seed": 7}
PROMPT = np.array([5, 9, 5, 9, 5], np.int32)
N_TOKENS = 5
HALF = (torch.float16, torch.bfloat16)
DTYPES = {"llama": (torch.float32, *HALF), "qwen2": HALF[1:], "qwen3": HALF[:1], "mistral": HALF[1:], "gemma2": HALF[:1]}
CASES = [(arch, dtype) for arch in FAMILIES for dtype in (DTYPES["llama"] if torch.cuda.is_available() else DTYPES[arch])]


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), CASES, ids=str)
def test_drafts_change_nothing(arch: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small.take_on_trust(monkeypatch)
    runner = small.bind(arch, dtype, device, narrow=True, n_layers=2 if arch == "gemma2" else 1)
    assert type(runner._decoder) is FAMILIES[arch]
    assert (runner.dtype, runner.exactness) == (str(dtype).removeprefix("torch."), "bitwise")
    hows: list[dict[str, Any]] = [{"temperature": 0}, SAMPLED]
    off = [small.Text(runner, PROMPT, **how) for how in hows]
    for text in off:
        for _ in range(N_TOKENS):
            assert small.decode([text], [None]) == [1]
        text.release()
    on = [small.Text(runner, PROMPT, **how) for how in hows]
    trees = [small.branching(text.tokens[len(PROMPT) :][: N_TOKENS - 2]) for text in off]
    assert small.decode(on, trees) == [N_TOKENS - 1] * 2
    small.decode(on, [None, None])
    for plain, drafted in zip(off, on, strict=True):
        assert drafted.tokens == plain.tokens
        assert torch.equal(torch.stack(drafted.rows), torch.stack(plain.rows))


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_a_draft_without_finite_values_does_not_reach_the_rows_before_it(arch: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one tile of keys with them, where what a row does not see is multiplied by zero."""
    small.take_on_trust(monkeypatch)
    runner = small.bind(arch, torch.float16, device, narrow=True, n_layers=1)
    spoilt, good = 63, small.Text(runner, PROMPT, temperature=0)
    small.decode([good], [None])
    small.decode([good], [None])
    with torch.inference_mode():
        runner.model.get_input_embeddings().weight[spoilt] = float("nan")
    drafted = small.Text(runner, PROMPT, temperature=0)
    small.decode([drafted], [small.branching([spoilt, 3, spoilt])])
    small.decode([drafted], [small.branching([3, spoilt])])
    assert drafted.tokens[: len(good.tokens)] == good.tokens
    for a, b in zip(good.rows, drafted.rows, strict=False):
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)

"""Texts of a real model end where llama.cpp ends them: Qwen2.5-Coder, whose files state one of the six tokens that end a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ngramspec.engine.llm_engine import Engine
from ngramspec.sampling_params import SamplingParams

pytestmark = pytest.mark.models
END_OF_TEXT, FILE_SEP = 151643, 151664
FIM = "<|fim_prefix|>def add(a, b):\n    return <|fim_suffix|>\n\n\nprint(add(1, 2))\n<|fim_middle|>"


@pytest.fixture(scope="module")
def engine(real_model: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(str(real_model("qwen2.5-coder-1.5b")), max_seqs=2, max_model_len=1024, kv_memory=64 << 20) as engine:
        yield engine


def test_a_function_ends(engine: Engine) -> None:
    """`<|endoftext|>` is none of the tokens that the file's metadata states as an end."""
    done = engine.complete("def fibonacci(n):\n", SamplingParams(max_tokens=160))
    assert (done.token_ids[-1], done.finish_reason) == (END_OF_TEXT, "stop")
    assert "<|endoftext|>" not in done.text


def test_a_middle_ends(engine: Engine) -> None:
    done = engine.complete(FIM, SamplingParams(max_tokens=48))
    assert (done.text, done.finish_reason) == ("a + b", "stop")
    assert len(done.prompt_token_ids) == 21


def test_a_control_token_stops(engine: Engine) -> None:
    params = SamplingParams(max_tokens=8, stop="<|file_sep|>", ignore_eos=True, logit_bias={FILE_SEP: 100})
    (choice,) = engine.complete("def f():\n", params).choices
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == ("", [FILE_SEP], "stop", "<|file_sep|>")

"""Tiny models bound to the device's runner, small enough for Triton's interpreter, and engines made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from transformers import PreTrainedModel

from ngramspec import Engine, SamplingParams
from ngramspec.backends.cuda import cuda_runner as runner_module
from ngramspec.backends.cuda.cuda_runner import CudaOptions, CudaRunner
from ngramspec.engine import assembly
from ngramspec.outputs import DraftTree
from ngramspec.sampling.batch import Span, pack
from ngramspec.sampling.sampler import Sampler

VOCAB = 64
SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 96}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
"""Fewer heads: most of the interpreter's time is a program's for each row and head."""


def make_model(arch: str, **overrides: Any) -> PreTrainedModel:
    return tiny.tiny_model(arch, **SHAPE | IDS | overrides)


def bind(arch: str, dtype: torch.dtype, device: str, narrow: bool = False, n_layers: int = 2, **options: Any) -> CudaRunner:
    model = make_model(arch, num_hidden_layers=n_layers, **(NARROW if narrow else {})).to(device, dtype)
    return CudaRunner(model, CudaOptions(**{"max_len": 32, "max_seqs": 4, "max_rows": 24, "kv_bytes": 1 << 21, "max_depth": 9} | options))


def take_on_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """What proves exactness at load is tested elsewhere, and takes longest."""
    monkeypatch.setattr(runner_module, "find_violation", lambda product, counts: None)
    monkeypatch.setattr(CudaRunner, "self_test", lambda self: True)


def make_engine(model: PreTrainedModel, device: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    """An engine with the device's runner. Without a device the kernels run under the interpreter, on the CPU."""

    def make_runner(start: Any, loaded: Any, longest: int) -> CudaRunner:
        assert loaded.model.device.type == torch.device(device).type
        return CudaRunner(
            loaded.model,
            CudaOptions(
                max_len=longest + start.config.spec_rows + 1,
                max_seqs=start.config.max_seqs,
                max_rows=start.device.max_rows,
                kv_bytes=1 << 21,
                max_depth=9,
            ),
        )

    monkeypatch.setattr(assembly, "_make_runner", make_runner)
    monkeypatch.setattr(CudaRunner, "cost_rows", (1, 8))
    return Engine(model, device=device, max_seqs=4, max_rows=16, spec_rows=8, spec_length=8, threads=1, **options)


class Text:
    """A sequence in a runner's pool, decoded row by row or by drafts, as the step does it."""

    def __init__(self, runner: CudaRunner, prompt: np.ndarray, **params: Any) -> None:
        self.runner, self.prompt = runner, prompt
        self.sampler = Sampler(
            SamplingParams(**params), index=0, seed=params.get("seed", 0), prompt=prompt, vocab_size=VOCAB, stop_ids=frozenset()
        )
        self.slot = runner.reserve_free_slot(32)
        self.tokens = prompt.tolist()
        self.rows: list[torch.Tensor] = []
        """Logits after every token from the prompt's last on."""
        runner.run([Span(self.slot, prompt[:-1], 0, logits=0)])

    def span(self, tree: DraftTree | None = None) -> Span:
        last = np.array(self.tokens[-1:], np.int32)
        return Span(self.slot, last, len(self.tokens) - 1, tree, sampler=self.sampler, n_prompt=len(self.prompt))

    def release(self) -> None:
        self.runner.pool.release(self.slot)


def decode(texts: list[Text], trees: list[DraftTree | None]) -> list[int]:
    """One pass; how many tokens each text gained."""
    runner = texts[0].runner
    batch = pack([text.span(tree) for text, tree in zip(texts, trees, strict=True)], runner.pool, runner.rows_per_item)
    output = runner.forward(batch)
    output.wait()
    gained, kept, first = [], [], 0
    for b, (text, tree, run) in enumerate(zip(texts, trees, output.get_matches(), strict=True)):
        assert run is not None
        n = 1 + (len(tree) if tree else 0)
        logits = torch.from_numpy(output.get_logits(first, first + n).copy())
        tokens, nodes = run
        text.rows += [logits[0], *(logits[1 + node] for node in nodes)]
        kept.append((b, len(text.tokens), len(text.tokens) + nodes))
        text.tokens += tokens.tolist()
        gained.append(len(tokens))
        first += n
    output.commit(kept)
    return gained


def branching(tokens: list[int]) -> DraftTree:
    """These tokens as a chain whose every node but the first has a wrong sibling before it."""
    ids, parents, above = [], [], -1
    for i, token in enumerate(tokens):
        if i:
            ids.append((token + 1) % VOCAB)
            parents.append(above)
        ids.append(token)
        parents.append(above)
        above = len(ids) - 1
    n = len(ids)
    return DraftTree(np.array(ids, np.int32), np.array(parents, np.int32), np.ones(n, np.float32), np.zeros(n, np.uint8))

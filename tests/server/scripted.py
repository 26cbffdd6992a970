"""An engine whose model writes a given text, and that can be held in the middle of it: what a page shows is known beforehand."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tiny
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ngramspec.engine.llm_engine import Engine
from ngramspec.speculative.drafter import Candidates
from ngramspec.speculative.proposer import TreeProposer

POSITIONS = 448


class Gate:
    """A drafter that knows nothing. Once shut, it lets a sequence make `free` passes and then holds it until it is opened."""

    name = "gate"

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.held = threading.Event()
        self.free = 0

    def shut(self, free: int) -> None:
        self.free = free
        self.held.clear()
        self.opened.clear()

    def open(self) -> None:
        self.opened.set()

    def reach(self, engine: Engine) -> None:
        """Be asked in every step, though the time for which it holds texts never pays."""
        assert isinstance(engine.speculator, TreeProposer)
        for backoff in engine.speculator._backoffs:
            backoff.should_ask = lambda: True  # type: ignore[method-assign]

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        pass

    def propose(self, seqs: Sequence[int], budget: int) -> list[Candidates]:
        if not self.opened.is_set():
            self.free -= 1
            if self.free < 0:
                self.held.set()
                self.opened.wait(60)
        nothing = np.empty(0, np.int32)
        return [Candidates(nothing, nothing, np.empty(0, np.float32)) for _ in seqs]

    def observe(self, seq: int, accepted: np.ndarray, rejected: np.ndarray) -> None:
        pass

    def end(self, seq: int) -> None:
        pass


def tokenizer_with(*words: str) -> PreTrainedTokenizerFast:
    """The byte tokenizer, to which each of these words is one token."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def reciting_engine(text: str, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> tuple[Engine, Gate]:
    """An engine without a chat template that writes token p of `text` (then its end) at position p, whatever came before."""
    script = [*tokenizer(text)["input_ids"], tiny.EOS]
    model = tiny.tiny_model(
        "gpt2",
        vocab_size=len(tokenizer),
        hidden_size=POSITIONS,
        max_position_embeddings=POSITIONS,
        num_hidden_layers=1,
        num_attention_heads=7,
        n_inner=16,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(POSITIONS))
        for norm in (model.transformer.ln_f, *(norm for block in model.transformer.h for norm in (block.ln_1, block.ln_2))):
            norm.weight.fill_(1.0)
        for position, token in enumerate(script[1:]):
            model.lm_head.weight[token, position] = 1.0
    gate = Gate()
    limits = {"max_seqs": 2, "kv_memory": 128 << 20, "threads": 1}
    engine = Engine(model, tokenizer=tokenizer, drafters=[gate], **(limits | settings))
    engine.use(cost=tiny.FreeRows())
    gate.reach(engine)
    return engine, gate

"""Drafts from a small model with the same vocabulary, which has a runner, a pool and block tables of its own.

It takes a name or a loaded model, and is a `Drafter`. A sequence's text is computed when its first draft is made, and rolled back
to the accepted path after each one (Leviathan et al., 2023; Chen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ngramspec.backends.base import Runner
from ngramspec.backends.cpu.llama_runner import CpuOptions
from ngramspec.backends.cpu.runner import CpuRunner
from ngramspec.errors import UnsupportedModelError
from ngramspec.models.loader import eos_token_ids, load_model
from ngramspec.models.memory import available_memory
from ngramspec.outputs import BLOCK
from ngramspec.speculative.trained.stepwise import LENGTH, StepwiseDrafter, StepwiseState


class DraftModel(StepwiseDrafter):
    """Drafts `length` tokens with a smaller model; with `branches` above 1, several chains that are verified as one tree."""

    name = "model"

    def __init__(self, model: str | PreTrainedModel, *, tokenizer: Any = None, length: int = LENGTH, branches: int = 1) -> None:
        """Take a model as `Engine` does, on the device and in the dtype of the target; a name is loaded when the engine starts.

        `tokenizer`: of a loaded model, compared with the target's; without one, only what the models state is. Raises ValueError.
        """
        super().__init__(length, branches)
        self.model, self.tokenizer = model, tokenizer
        self.runner: Runner | None = None
        self._target: Runner | None = None

    def bind(self, runner: Runner) -> None:
        """Load the model and compare it. Raises what `loader.load_model` and runners raise, UnsupportedModelError if the two differ."""
        if self._target is runner:
            return
        if isinstance(self.model, str):
            loaded = load_model(self.model, dtype=getattr(torch, runner.dtype), device=runner.device, tokenizer=self.tokenizer)
            model, self.tokenizer, name = loaded.model, loaded.tokenizer, loaded.name
        else:
            model = self.model.to(torch.device(runner.device))  # type: ignore[arg-type]  # as torch declares it
            name = model.config.name_or_path or type(model).__name__
        check_alike(runner, model, self.tokenizer, name)
        self.runner, self._target = _make_runner(model, runner, self.length), runner
        self._use(self.runner.forward, self.runner.pool, self.runner.rows_per_item, self.runner.max_rows)

    def has_room(self, n_tokens: Sequence[int]) -> bool:
        return sum(self._pool.count_blocks(n) for n in n_tokens if n <= self._pool.n_positions) <= self._pool.n_available

    def begin(self, seq: int, tokens: np.ndarray) -> None:
        super().begin(seq, tokens)
        self._pool.reserve(seq, len(tokens))

    def _keep_accepted(self, seq: int, state: StepwiseState, accepted: np.ndarray) -> int:
        n, computed = len(state.tokens), state.computed
        if state.chains is not None:
            path = n + np.array(state.chains.find_path(accepted[:-1]), np.int32)
            self._pool.commit(seq, n, path)  # type: ignore[attr-defined]  # a pool with memory
            computed = n + len(path)
        self._pool.truncate_to(seq, n + len(accepted))
        return computed

    def end(self, seq: int) -> None:
        if seq in self._state_of:
            super().end(seq)
            self._pool.release(seq)


def check_alike(target: Runner, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
    """Raise UnsupportedModelError unless a model can draft for the target: the same vocabulary, the same end tokens, no shorter context."""

    def make_error(what: str, ours: object, theirs: object) -> UnsupportedModelError:
        return UnsupportedModelError(f"{name} cannot draft for {type(target.model).__name__}: {what} differ, {ours} against {theirs}")

    n = model.get_output_embeddings().weight.shape[0]
    if n != target.vocab_size:
        raise make_error("the vocabularies' sizes", n, target.vocab_size)
    if tokenizer is not None and target.tokenizer is not None:
        ours, theirs = tokenizer.get_vocab(), target.tokenizer.get_vocab()
        for token in sorted(ours.keys() | theirs.keys()) if ours != theirs else ():
            if ours.get(token) != theirs.get(token):
                raise make_error(f"the ids of the token {token!r}", ours.get(token), theirs.get(token))
    stops, theirs = eos_token_ids(model, tokenizer), eos_token_ids(target.model, target.tokenizer)
    if stops != theirs:
        raise make_error("the ids that end a text", stops, theirs)
    trained = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or target.max_model_len)
    if trained < target.max_model_len:
        raise UnsupportedModelError(
            f"{name} was trained for texts of {trained} tokens and cannot draft to max_model_len {target.max_model_len}; accepted: "
            f"max_model_len up to {trained}"
        )


def _make_runner(model: PreTrainedModel, target: Runner, length: int) -> Runner:
    """Make a runner on the target's device, with its slots and room for as many tokens as memory allows, the target's at most."""
    pool = target.pool
    room: dict[str, Any] = {
        "max_len": pool.max_blocks * BLOCK,
        "max_seqs": len(pool.n_blocks_of),
        "max_rows": target.max_rows,
        "max_blocks": pool.n_blocks,
    }
    if isinstance(target, CpuRunner):
        return CpuRunner(model, CpuOptions(kv_bytes=(available_memory() or 4 << 30) // 4, **room))
    from ngramspec.backends.cuda.cuda_runner import CudaOptions, CudaRunner

    return CudaRunner(model, CudaOptions(kv_bytes=None, max_depth=length, memory_utilization=1.0, **room))

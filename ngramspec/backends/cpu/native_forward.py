"""The forward pass of a Llama-style decoder for compiled code (`backends.base.NativeForward`)."""

from __future__ import annotations

import numpy as np

from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.backends.cpu.llama_forward import LlamaDecoder
from ngramspec.backends.cpu.pass_structs import CompiledModel


class NativeLlamaForward:
    def __init__(self, decoder: LlamaDecoder, pool: KVPool, rows_per_item: int) -> None:
        self.decoder, self._pool, self.rows_per_item = decoder, pool, rows_per_item
        self.inputs, self.logits = decoder.make_empty_pass(), decoder.allocate_logits(0)
        self.n_threads = self.n_best = 1
        self._model: CompiledModel | None = None

    def reserve(self, n_rows: int, n_positions: int) -> None:
        self._model = self.decoder.get_compiled_model(self._pool, n_rows, n_positions)
        if len(self.logits) < n_rows:
            self.logits = self.decoder.allocate_logits(n_rows)

    def run(self) -> None:
        assert self._model is not None
        try:
            self.decoder.run_pass(self.n_threads, self._model, self.inputs)
        except BaseException:
            self._pool.forget_copies()
            raise

    def keep_paths(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, positions: np.ndarray) -> None:
        self._pool.move(slots, starts, ends, positions)

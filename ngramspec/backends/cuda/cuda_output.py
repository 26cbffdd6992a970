"""Read the results of a pass that was launched on a CUDA device: `CudaOutput` waits for them, `PassTimer` says how long it took.

The module knows a batch's rows and what a pass sends back, nothing of models or kernels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from ngramspec.backends.base import Kept
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.outputs import KEPT, TokenLogprob
from ngramspec.sampling.batch import Batch
from ngramspec.sampling.verify import Match, match_batch


class PassResults:
    """Results that a pass sends back in one copy for R rows: sampled tokens, top-k tokens and logits, parts of log-probabilities."""

    def __init__(self, n_rows: int, device: torch.device) -> None:
        words = n_rows * (4 + 2 * KEPT)
        self._device = torch.zeros(words, dtype=torch.int32, device=device)
        self._host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        ends = np.cumsum([2 * n_rows, n_rows, n_rows, n_rows * KEPT]).tolist()  # the widest numbers first
        norms, chosen, sampled, tokens, values = self._device.tensor_split(ends)
        self.device_norms, self.device_chosen = norms.view(torch.float64), chosen.view(torch.float32)
        self.device_sampled, self.device_tokens = sampled, tokens.view(n_rows, KEPT)
        self.device_values = values.view(torch.float32).view(n_rows, KEPT)
        on_host = np.split(self._host.numpy(), ends)
        self.norms, self.chosen, self.sampled = on_host[0].view(np.float64), on_host[1].view(np.float32), on_host[2]
        self.tokens, self.values = on_host[3].reshape(-1, KEPT), on_host[4].view(np.float32).reshape(-1, KEPT)

    def send(self) -> None:
        self._host.copy_(self._device, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class PassTimer:
    """Measure the time of one pass on the device, from its first launch to its last."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else []
        self._started = self._ended = 0.0

    def start(self) -> None:
        if self._events:
            self._events[0].record()
        self._started = time.perf_counter()

    def end(self) -> None:
        """Mark that everything is launched."""
        if self._events:
            self._events[1].record()
        self._ended = time.perf_counter()

    def stop(self) -> float:
        """Wait for the pass and return its milliseconds."""
        if not self._events:
            return (self._ended - self._started) * 1e3
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))


class CudaOutput:
    def __init__(
        self,
        timer: PassTimer,
        pool: CudaPool,
        batch: Batch,
        logits: torch.Tensor,
        rows: np.ndarray | None,
        results: PassResults | None,
        picked: list[bool],
    ) -> None:
        """Wrap a launched pass.

        `logits` [R, V] on the device; `rows` [N]: which of their rows were wanted, None: all; `results` None: nothing was sampled;
        `picked`: see `GraphInputs.picked`.
        """
        self._timer, self._pool, self._batch, self._logits = timer, pool, batch, logits
        self._rows, self._results, self._picked = rows, results, picked

    def wait(self) -> float:
        return self._timer.stop()  # what was staged for the pass may be overwritten by the next

    @property
    def sampled(self) -> np.ndarray | None:
        if self._results is None:
            return None
        self._results.wait()
        return self._results.sampled[self._rows] if self._rows is not None else self._results.sampled[: len(self._batch.logits_rows)]

    def get_matches(self) -> list[Match | None]:
        sampled = self.sampled
        return [None] * len(self._batch.spans) if sampled is None else match_batch(self._batch, sampled, picked=self._picked)

    def get_logits(self, first: int, end: int) -> np.ndarray:
        if first == end and self._logits.is_cuda:
            torch.cuda.synchronize(self._logits.device)
        return self.device_logits(first, end).to("cpu", copy=True).numpy()

    def device_logits(self, first: int, end: int) -> torch.Tensor:
        """Return logits [end - first, V] float32 on the device, until the next pass."""
        rows = self._rows
        return self._logits[first:end] if rows is None else self._logits[torch.from_numpy(rows[first:end]).to(self._logits.device)]

    def get_topk(self, first: int, end: int) -> tuple[np.ndarray, np.ndarray] | None:
        if self._results is None:
            return None
        self._results.wait()
        rows = self._rows[first:end] if self._rows is not None else slice(first, end)
        return self._results.tokens[rows], self._results.values[rows]

    def get_logprobs(self, rows: np.ndarray, n: int) -> list[TokenLogprob]:
        results, rows = self._results, rows if self._rows is None else self._rows[rows]
        assert results is not None, "nothing was picked"
        results.wait()
        return [
            TokenLogprob(token, chosen - norm, [(i, value - norm) for i, value in zip(ids[:n], values[:n], strict=True) if i >= 0])
            for token, chosen, norm, ids, values in zip(
                *(each[rows].tolist() for each in (results.sampled, results.chosen, results.norms, results.tokens, results.values)),
                strict=True,
            )
        ]

    def get_hidden_states(self, rows: np.ndarray) -> np.ndarray:
        raise NotImplementedError("`CudaRunner.keep_hidden_states` refuses")

    def commit(self, kept: Sequence[Kept]) -> None:
        for b, start, path in kept:
            self._pool.note_path(self._batch.spans[b].slot, start, path)
            if self._results is None or not self._picked[b]:  # else the pass has done it
                self._pool.commit(self._batch.spans[b].slot, start, path)

"""Passes captured once and replayed: which buckets there are, and the graphs made for them as they are first needed.

Without a CUDA device a bucket's pass is simply run, with the same inputs: what differs is only who launches the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from ngramspec.cuda.inputs import Bucket

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)


def bucket_for(n_rows: int, n_items: int) -> Bucket | None:
    """The smallest bucket that holds a batch; None where none does."""
    rows = next((rows for rows in ROWS if rows >= n_rows), None)
    items = next((items for items in ITEMS if items >= n_items), None)
    return None if rows is None or items is None else Bucket(rows, min(items, rows))


class Graphs:
    """Captured passes by bucket, in one memory pool. `make(bucket)` gives a bucket's inputs, `run(inputs)` is its pass."""

    def __init__(self, make: Callable[[Bucket], Any], run: Callable[[Any], None], device: torch.device, *, capture: bool = True) -> None:
        self._make, self._run = make, run
        self._captures = capture and device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._stream = torch.cuda.Stream(device) if self._captures else None
        self._entries: dict[Bucket, tuple[Any, torch.cuda.CUDAGraph | None]] = {}
        self.refused: set[Bucket] = set()
        """Buckets for which memory did not suffice; such batches go uncaptured."""

    def inputs(self, bucket: Bucket) -> Any | None:
        """The inputs to fill for a pass of this bucket, which is captured if it has not been; None where that failed for want of memory."""
        if bucket not in self._entries and bucket not in self.refused:
            try:
                self._entries[bucket] = self._capture(bucket)
            except torch.OutOfMemoryError as e:
                self.refused.add(bucket)
                torch.cuda.empty_cache()
                log.warning("no memory to capture %s; such passes are launched kernel by kernel: %s", bucket, e)
        return self._entries[bucket][0] if bucket in self._entries else None

    def replay(self, bucket: Bucket) -> None:
        """Run the pass on what its inputs hold."""
        inputs, graph = self._entries[bucket]
        if graph is None:
            self._run(inputs)
        else:
            graph.replay()

    def _capture(self, bucket: Bucket) -> tuple[Any, torch.cuda.CUDAGraph | None]:
        inputs = self._make(bucket)
        if not self._captures:
            return inputs, None
        assert self._stream is not None
        torch.cuda.current_stream().synchronize()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run(inputs)  # compiles what is compiled at first use, which a capture must not
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._run(inputs)
        return inputs, graph

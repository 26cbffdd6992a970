"""Passes captured once and replayed: which buckets there are, and what is kept for each.

A bucket whose pass cannot be captured is refused; such passes are launched kernel by kernel. Without a recorder a bucket's pass is simply
run, with the same inputs: what differs is only who launches the kernels.
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


class Recorder:
    """CUDA graphs in one memory pool: `record(run)` runs once, captures what it launches and returns what launches that again."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Raises what running or capturing raises; the stream is then what it was, and the next capture begins anew."""
        current = torch.cuda.current_stream()
        try:
            current.synchronize()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()  # compiles what is compiled at first use, which a capture must not
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except Exception:
            # An end of a capture that fails leaves its stream the current one, and its memory pool marked as being recorded to.
            torch.cuda.set_stream(current)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph.replay


Record = Callable[[Callable[[], None]], Callable[[], None]]
"""What a `Recorder` does."""


class Graphs:
    """Passes by bucket. `make(bucket)` gives a bucket's inputs, `run(inputs)` is its pass, `record` captures it; None: it is run."""

    def __init__(self, make: Callable[[Bucket], Any], run: Callable[[Any], None], record: Record | None) -> None:
        self._make, self._run, self._record = make, run, record
        self._entries: dict[Bucket, tuple[Any, Callable[[], None]]] = {}
        self.refused: set[Bucket] = set()
        """Buckets whose capture failed; such batches go uncaptured."""

    def inputs(self, bucket: Bucket) -> Any | None:
        """The inputs to fill for a pass of this bucket, which is captured if it has not been; None where that failed."""
        if bucket not in self._entries and bucket not in self.refused:
            try:
                self._entries[bucket] = self._capture(bucket)
            except Exception as e:  # whatever it is: what cannot be captured can still be launched
                self.refused.add(bucket)
                if isinstance(e, torch.OutOfMemoryError):
                    torch.cuda.empty_cache()
                log.warning("%s cannot be captured; such passes are launched kernel by kernel: %s: %s", bucket, type(e).__name__, e)
        return self._entries[bucket][0] if bucket in self._entries else None

    def replay(self, bucket: Bucket) -> None:
        """Run the pass on what its inputs hold."""
        self._entries[bucket][1]()

    def _capture(self, bucket: Bucket) -> tuple[Any, Callable[[], None]]:
        inputs = self._make(bucket)

        def run() -> None:
            self._run(inputs)

        return inputs, run if self._record is None else self._record(run)

"""Capture passes once, at load, and replay them: which buckets there are, and what is kept for each.

A pass whose size was not captured uses a somewhat larger bucket, or is launched kernel by kernel. Without a recorder a bucket's pass is run
with the same inputs: the only difference is who launches the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ngramspec.backends.base import is_out_of_memory
from ngramspec.backends.cuda.graph_inputs import Bucket

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ITEMS = (1, 2, 4, 8, 16, 32, 64, 128)


def bucket_for(n_rows: int, n_items: int) -> Bucket | None:
    """Return the smallest bucket that holds a batch; None if there is none."""
    rows = next((rows for rows in ROWS if rows >= n_rows), None)
    items = next((items for items in ITEMS if items >= n_items), None)
    return None if rows is None or items is None else Bucket(rows, min(items, rows))


class GraphRecorder:
    """CUDA graphs in one memory pool: `record(run)` runs once, captures the launches and returns a function that launches them again."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture a pass. Raises what running or capturing raises; the stream is restored and the next capture begins anew."""
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


# Type of a `GraphRecorder`: runs a function once and returns a function that launches it again.
Record = Callable[[Callable[[], None]], Callable[[], None]]


def decode_buckets(max_seqs: int, max_rows: int, rows_per_item: int) -> list[Bucket]:
    """Return the buckets that up to `max_seqs` decoding sequences can need, each with one row or, with drafts, more; smaller ones first."""
    found = set()
    for n in range(1, min(max_rows, ROWS[-1]) + 1):
        n_seqs = min(n, max_seqs)
        for n_items in range(-(-n // rows_per_item), n_seqs + (n - n_seqs) // rows_per_item + 1):
            found.add(bucket_for(n, n_items))
    return sorted((bucket for bucket in found if bucket is not None), key=lambda bucket: (bucket.rows, bucket.items))


class Graphs:
    """Captured passes by bucket.

    `make(bucket)` makes a bucket's inputs, `run(inputs)` is its pass, `record` captures it; None: it is run each time.
    """

    def __init__(self, make: Callable[[Bucket], Any], run: Callable[[Any], None], record: Record | None) -> None:
        self._make, self._run, self._record = make, run, record
        self._entries: dict[Bucket, tuple[Any, Callable[[], None]]] = {}
        self._found: dict[tuple[int, int], Bucket | None] = {}
        self._forced: tuple[Bucket | None] | None = None

    @property
    def captured(self) -> list[Bucket]:
        return list(self._entries) if self._record is not None else []

    def capture(self, buckets: Sequence[Bucket], progress: Callable[[str], None] = lambda _: None) -> None:
        """Capture these buckets while loading, so that no request waits for a capture. What cannot be captured is logged in one line."""
        if self._record is None:
            return
        failed: list[str] = []
        for i, bucket in enumerate(buckets):
            if i % 8 == 0:
                progress(f"capturing passes ({i} of {len(buckets)})")
            try:
                self._entries[bucket] = self._capture(bucket, self._record)
            except Exception as e:  # whatever it is: what cannot be captured can still be launched
                failed.append(f"{bucket}: {type(e).__name__}: {e}")
                if is_out_of_memory(e):
                    torch.cuda.empty_cache()
                    failed += ["the same"] * (len(buckets) - i - 1)  # the others are larger
                    break
        self._found.clear()
        if failed:
            log.warning("%d of %d passes cannot be captured and are launched kernel by kernel; %s", len(failed), len(buckets), failed[0])

    def find(self, n_rows: int, n_items: int) -> Bucket | None:
        """Return the smallest bucket that holds a batch, among the captured ones if passes are captured; None if there is none."""
        if self._forced is not None:
            return self._forced[0]
        key = n_rows, n_items
        if key not in self._found:
            if self._record is None:
                bucket = bucket_for(n_rows, n_items)
                if bucket is not None and bucket not in self._entries:
                    inputs = self._make(bucket)
                    self._entries[bucket] = inputs, partial(self._run, inputs)
            else:
                # In twice as many rows a pass takes longer than one that is launched kernel by kernel.
                holding = [b for b in self._entries if n_rows <= b.rows <= 2 * n_rows and n_items <= b.items]
                bucket = min(holding, key=lambda b: (b.rows, b.items), default=None)
            self._found[key] = bucket
        return self._found[key]

    @contextmanager
    def force_bucket(self, bucket: Bucket | None) -> Iterator[None]:
        """Run every batch within this context in this bucket; None: kernel by kernel."""
        self._forced = (bucket,)
        try:
            yield
        finally:
            self._forced = None

    def get_inputs(self, bucket: Bucket) -> Any:
        """Return the inputs to fill for a pass of a bucket that `find` returned."""
        return self._entries[bucket][0]

    def replay(self, bucket: Bucket) -> None:
        """Run the pass on the current contents of its inputs."""
        self._entries[bucket][1]()

    def _capture(self, bucket: Bucket, record: Record) -> tuple[Any, Callable[[], None]]:
        inputs = self._make(bucket)
        return inputs, record(partial(self._run, inputs))


def make_recorder(device: torch.device) -> Record | None:
    """Return the recorder that captures passes on this device; None: passes are launched each time."""
    return GraphRecorder(device) if device.type == "cuda" else None

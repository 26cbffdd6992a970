"""Stage what a pass reads on the device besides weights and KV: one array, filled on the host and sent in one copy.

A bucket is a number of rows and of items (groups of rows, at least one per sequence) for which a pass is captured. A smaller batch is
filled up with rows that write to the unused block and with empty shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ngramspec.backends.cuda.attention_metadata import AttentionMetadata, RecurrentRows
from ngramspec.backends.cuda.attention_schedule import WORDS, AttentionSchedule
from ngramspec.backends.cuda.gated_delta_kernels import ROW_WORDS, SPAN_WORDS
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.backends.cuda.gpu_recurrent_pool import CudaRecurrentPool, count_copies
from ngramspec.backends.cuda.gpu_sampler import SamplingArrays
from ngramspec.backends.cuda.logits_processor import PenaltyEntries
from ngramspec.backends.cuda.upload import Upload
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Batch

_ALIGN = 4  # int32 words, so that wider numbers can begin anywhere


@dataclass(frozen=True, slots=True)
class Bucket:
    rows: int
    items: int
    """Also the largest number of sequences."""


class GraphInputs:
    """Device arrays for one bucket.

    `AttentionMetadata` and `SamplingArrays` are views of them; roots, ends, starts and table rows are per sequence.
    """

    def __init__(self, bucket: Bucket, depth: int, pool: CudaPool, sharing: AttentionSchedule, adjusting: PenaltyEntries) -> None:
        """Allocate the arrays.

        `depth`: deepest tree node whose row does not lie where its token will be; rows beyond a batch write to the pool's unused block.
        """
        self.bucket, self.depth, self._pool, self._sharing, self._adjusting = bucket, depth, pool, sharing, adjusting
        self._dummy, device_tables, is_recurrent = pool.dummy, pool.device_tables, isinstance(pool, CudaRecurrentPool)
        self.picked: list[bool] = []
        """One flag per sequence: whether the pass itself samples its tokens, follows its tree and moves its keys and values."""
        self.n_copies = 0
        """Copies of recurrent states that the batch needs."""
        self.results: Any = None
        """The buffers in which a captured pass leaves its results."""
        n, i, shares = bucket.rows, bucket.items, sharing.get_max_shares(bucket.items, device_tables.shape[1] * BLOCK)
        sizes = {
            "ids": n, "positions": n, "slots": n, "bases": n, "parents": n, "wanted": 2 * n,
            "temperature": n, "top_k": n, "top_p": 2 * n, "min_p": n, "seed": 2 * n, "sample": n, "position": n, "scored": n,
            "entries": n, "n_entries": n, "held": n, "repetition": n, "presence": n, "frequency": n,
            "shares": WORDS * shares, "roots": i, "ends": i, "starts": i, "sequences": i,
            "paths": n * depth,
            "spans": i * SPAN_WORDS * is_recurrent, "table": n * ROW_WORDS * is_recurrent,
        }  # fmt: skip
        at: dict[str, tuple[int, int]] = {}
        total = 0
        for name, size in sizes.items():
            at[name] = total, total + size
            total += -(-size // _ALIGN) * _ALIGN
        device = device_tables.device
        self._staged = torch.zeros(total, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._sent = torch.zeros(total, dtype=torch.int32, device=device)
        self.upload = Upload(device)
        host = self._staged.numpy()
        floats = ("temperature", "min_p", "repetition", "presence", "frequency")
        kinds: dict[str, Any] = dict.fromkeys(floats, np.float32) | {"top_p": np.float64, "wanted": np.int64}
        shapes = {"shares": (shares, WORDS), "seed": (n, 2), "paths": (n, depth), "spans": (-1, SPAN_WORDS), "table": (-1, ROW_WORDS)}
        self.host = {name: host[a:b].view(kinds.get(name, np.int32)).reshape(shapes.get(name, (-1,))) for name, (a, b) in at.items()}
        self.device = {
            name: self._sent[a:b].view(torch.from_numpy(self.host[name]).dtype).view(self.host[name].shape) for name, (a, b) in at.items()
        }
        d = self.device
        recurrent = RecurrentRows(d["spans"], d["table"], count_copies(n)) if is_recurrent else None
        self.ids = d["ids"]
        self.rows = AttentionMetadata(d["positions"], d["slots"], d["bases"], d["paths"], d["shares"], device_tables, recurrent)
        self.sampling = SamplingArrays(
            d["temperature"], d["top_k"], d["top_p"], d["min_p"], d["seed"], d["sample"], d["position"], d["scored"]
        )
        h = self.host
        h["slots"][:], h["bases"][:], h["parents"][:], h["roots"][:], h["ends"][:] = self._dummy, 1, -1, -1, -1
        h["spans"][:, :1], h["table"][:, :1] = -1, -1

    def fill(self, batch: Batch) -> None:
        """Stage a batch that fits."""
        self.upload.wait()
        h, n = self.host, len(batch.input_ids)
        h["ids"][:n], h["ids"][n:] = batch.input_ids, 0
        h["positions"][:n], h["positions"][n:] = batch.positions, 0
        h["bases"][:n], h["bases"][n:] = batch.bases, 1
        h["parents"][:n], h["parents"][n:] = batch.parents, -1
        np.multiply(batch.blocks, BLOCK, out=h["slots"][:n])
        h["slots"][:n] += batch.offsets
        h["slots"][n:] = self._dummy
        if (batch.bases <= batch.positions).any():
            width = min(batch.paths.shape[1], self.depth)
            h["paths"][:n, :width] = batch.paths[:, :width]
        self._sharing.fill(batch.positions, batch.items, batch.owners, h["shares"])
        h["wanted"][: len(batch.logits_rows)] = batch.logits_rows
        h["temperature"].fill(0)
        h["scored"].fill(0)
        h["roots"].fill(-1)
        h["ends"].fill(-1)
        self.picked = self._adjusting.stage_entries(batch, h)
        if isinstance(self._pool, CudaRecurrentPool):
            self.n_copies = self._pool.stage_batch(batch, h["spans"], h["table"])
        for s, span in enumerate(batch.spans):
            sampler = span.sampler
            if sampler is not None and self.picked[s]:
                h["roots"][s], h["ends"][s] = batch.roots[s], batch.ends[s]
                h["starts"][s], h["sequences"][s] = span.start + len(span.tokens), span.slot
                p, mine = sampler.params, slice(int(batch.roots[s]), int(batch.ends[s]))
                h["scored"][mine] = p.logprobs is not None
                if p.temperature > 0:
                    h["temperature"][mine], h["top_k"][mine], h["top_p"][mine], h["min_p"][mine] = p.temperature, p.top_k, p.top_p, p.min_p
                    h["seed"][mine] = np.array([sampler.seed], np.uint64).view(np.int32)  # low half, high half
                    h["sample"][mine] = sampler.index
                    h["position"][mine] = batch.positions[mine] + 1 - span.n_prompt

    def send(self) -> None:
        self.upload.copy(self._sent, self._staged)

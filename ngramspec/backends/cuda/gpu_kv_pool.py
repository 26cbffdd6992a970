"""Keep the KV pool in the device's memory: `kv_cache.blocks` with its block tables mirrored, and the keys and values themselves.

`commit` moves an accepted path's keys and values to the positions of their tokens. The module knows no models, drafts or scheduling. Layers
of the same shape share one tensor `[L, 2, n_blocks + 1, Hk, BLOCK, D]`: a block's keys and values lie side by side by head. The last block
belongs to no sequence: rows that only fill up a bucket write there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ngramspec.backends.cuda import kv_move
from ngramspec.backends.cuda.upload import Upload
from ngramspec.errors import OutOfMemoryError
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Batch


class CudaPool(BlockTables):
    """Block tables with keys and values on a device. Raises OutOfMemoryError if the memory cannot be allocated."""

    def __init__(
        self, shapes: list[tuple[int, int]], n_blocks: int, max_seqs: int, max_len: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the pool; `shapes`: per layer (n_kv_heads, head_dim)."""
        super().__init__(n_blocks, max_seqs, max_len)
        self.dummy = n_blocks * BLOCK
        """Place in memory that is written but never read."""
        groups: dict[tuple[int, int], list[int]] = {}
        for layer, shape in enumerate(shapes):
            groups.setdefault(shape, []).append(layer)
        try:
            self.memory = [
                # zeros: what was never written is read with a weight of zero, and must be a number
                torch.zeros(len(layers), 2, n_blocks + 1, heads, BLOCK, dim, dtype=dtype, device=device)
                for (heads, dim), layers in groups.items()
            ]
        except (MemoryError, torch.OutOfMemoryError, RuntimeError) as e:
            wanted = n_blocks * self.block_bytes(shapes, dtype) >> 20
            raise OutOfMemoryError(f"a KV pool of {n_blocks} blocks ({wanted} MiB) does not fit in the memory of {device}") from e
        self.keys, self.values = [], []
        located = {layer: (group, i) for group, layers in zip(self.memory, groups.values(), strict=True) for i, layer in enumerate(layers)}
        for layer in range(len(shapes)):
            group, i = located[layer]
            self.keys.append(group[i, 0])
            self.values.append(group[i, 1])
        self.device_tables = torch.zeros(max_seqs, self.max_blocks, dtype=torch.int32, device=device)
        self._staged = torch.zeros(max_seqs, self.max_blocks, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.upload = Upload(device)
        self._stale: set[int] = set()

    @staticmethod
    def block_bytes(shapes: list[tuple[int, int]], dtype: torch.dtype) -> int:
        return sum(2 * heads * dim * BLOCK * dtype.itemsize for heads, dim in shapes)

    def admit(self, slot: int, hashes: Sequence[bytes], n_positions: int) -> int:
        self._stale.add(slot)
        return super().admit(slot, hashes, n_positions)

    def reserve(self, slot: int, n_positions: int) -> bool:
        if self.count_blocks(n_positions) > self.n_blocks_of[slot]:
            self._stale.add(slot)
        return super().reserve(slot, n_positions)

    def register(self, slot: int, hashes: Sequence[bytes]) -> None:
        self._stale.add(slot)
        super().register(slot, hashes)

    @torch.inference_mode()
    def read_block(self, block: int) -> bytes:
        parts = [part[block].view(torch.uint8) for both in zip(self.keys, self.values, strict=True) for part in both]
        return torch.cat([part.flatten() for part in parts]).cpu().numpy().tobytes()

    @torch.inference_mode()
    def write_block(self, block: int, body: bytes) -> None:
        data, at = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(self.device_tables.device), 0
        for both in zip(self.keys, self.values, strict=True):
            for part in both:
                n = part[block].numel() * part.element_size()
                part[block] = data[at : at + n].view(part.dtype).view(part[block].shape)
                at += n

    @torch.inference_mode()
    def copy_block(self, source: int, target: int) -> None:
        for memory in self.memory:
            memory[:, :, target] = memory[:, :, source]

    @torch.inference_mode()
    def fork(self, source: int, slots: np.ndarray, target: int, hashes: Sequence[bytes]) -> bool:
        if not super().fork(source, slots, target, hashes):
            return False
        ends = (*self.locate(source, slots), *self.locate(target, BLOCK * len(hashes) + np.arange(len(slots))))
        a, i, b, j = (torch.as_tensor(x, dtype=torch.int64, device=self.device_tables.device) for x in ends)
        for memory in self.memory:
            memory[:, :, b, :, j] = memory[:, :, a, :, i]
        return True

    def note_pass(self, batch: Batch, failed: bool = False) -> None:
        """Note that a pass over these rows was launched, or that it failed."""

    def note_path(self, slot: int, start: int, path: np.ndarray) -> None:
        """Note which positions path [n] of the last pass's draft are accepted; it began at position `start`."""

    def send_tables(self) -> None:
        """Bring the device's block tables up to date, queued after the work in progress."""
        if not self._stale:
            return
        self.upload.wait()  # a path that was kept sent rows since the last pass, and nobody has waited for them
        host = self._staged.numpy()
        for slot in self._stale:
            n = int(self.n_blocks_of[slot])
            if n:
                host[slot, :n] = self.tables[slot, :n]
                self.upload.copy(self.device_tables[slot, :n], self._staged[slot, :n])
        self._stale.clear()

    @torch.inference_mode()
    def commit(self, slot: int, start: int, path: np.ndarray) -> None:
        """Keep a path: the KV at positions path [n] moves to start, start + 1, …; `path` rises, path[i] >= start + i."""
        assert start >= self.registered[slot] * BLOCK, "a registered block is not written"
        if not len(path) or path[-1] == start + len(path) - 1:
            return
        self.send_tables()
        device = self.device_tables.device
        one = [torch.tensor([x], dtype=torch.int32, device=device) for x in (slot, start, len(path))]
        slots = torch.as_tensor(path, dtype=torch.int32, device=device)[None]
        for memory in self.memory:
            kv_move.commit(memory, self.device_tables, one[0], one[1], slots, one[2])

"""What is staged for the device is not rewritten before it was copied, however late that is."""

from __future__ import annotations

import numpy as np
import torch

from ngramspec.backends.cuda.attention_schedule import AttentionSchedule
from ngramspec.backends.cuda.gpu_kv_pool import CudaPool
from ngramspec.backends.cuda.graph_inputs import Bucket, GraphInputs
from ngramspec.backends.cuda.logits_processor import PenaltyEntries
from ngramspec.backends.cuda.upload import Upload
from ngramspec.kv_cache.blocks import BlockTables
from ngramspec.outputs import BLOCK
from ngramspec.sampling.batch import Span, pack


class Late(Upload):
    """Copies as a busy device does them: as late as it may."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copied: list[list[int]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.queued.append((target, source))

    def wait(self) -> None:
        for target, source in self.queued:
            target.copy_(source)
            self.copied.append(source.flatten().tolist())
        self.queued.clear()


def test_a_block_table_is_not_rewritten_under_its_copy() -> None:
    pool = CudaPool([(1, 8)], 6, 2, 4 * BLOCK, dtype=torch.float32, device=torch.device("cpu"))
    late = pool.upload = Late()
    rows = []
    for n_blocks in (1, 2):
        assert pool.reserve(0, n_blocks * BLOCK)
        rows.append(BlockTables.locate(pool, 0, np.arange(n_blocks) * BLOCK)[0].tolist())
        pool.send_tables()
    pool.release(0)
    assert pool.reserve(1, BLOCK)  # another sequence, for the slot's blocks to be others
    assert pool.reserve(0, BLOCK)
    rows.append(BlockTables.locate(pool, 0, np.zeros(1, np.int64))[0].tolist())
    pool.send_tables()
    late.wait()
    assert late.copied[:2] == rows[:2]
    assert rows[2] in late.copied[2:]
    assert pool.device_tables[0, :1].tolist() == rows[2] != rows[0]


def test_a_block_is_read_written_and_copied() -> None:
    shapes, device = [(1, 8), (2, 8), (1, 8)], torch.device("cpu")
    pool, other = (CudaPool(shapes, 6, 2, 4 * BLOCK, dtype=torch.bfloat16, device=device) for _ in range(2))
    for memory in pool.memory:
        memory.copy_(torch.randn(memory.shape))
    other.write_block(4, pool.read_block(2))
    for mine, theirs in zip([*pool.keys, *pool.values], [*other.keys, *other.values], strict=True):
        assert torch.equal(theirs[4], mine[2])
        assert not theirs[2].any()
    assert other.read_block(4) == pool.read_block(2) != pool.read_block(3)
    other.copy_block(4, 1)
    assert other.read_block(1) == pool.read_block(2)
    assert not any(other.read_block(3))


def test_a_pass_is_not_staged_under_the_copy_of_the_one_before() -> None:
    pool = CudaPool([(1, 8)], 6, 2, 4 * BLOCK, dtype=torch.float32, device=torch.device("cpu"))
    assert pool.reserve(0, BLOCK)
    inputs = GraphInputs(Bucket(2, 1), 3, pool, AttentionSchedule(1, 2), PenaltyEntries(torch.device("cpu")))
    late = inputs.upload = Late()
    for tokens in ([5, 6], [7, 8]):
        inputs.fill(pack([Span(0, np.array(tokens, np.int32), 0)], pool, 4))
        inputs.send()
    late.wait()
    assert [sent[:2] for sent in late.copied] == [[5, 6], [7, 8]]

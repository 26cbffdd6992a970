"""Keep an accepted path on the device: move its keys and values from the draft's KV positions to those of their tokens.

Knows the memory of all layers of one shape and block tables, nothing of drafts or requests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ngramspec.outputs import BLOCK

_BLOCK = tl.constexpr(BLOCK)
_AT_ONCE = tl.constexpr(8)


@triton.jit
def _move(
    kv,  # [L, 2, n_blocks + 1, HK, BLOCK, D]
    tables,  # [B, table_width]
    sequences,  # [S]
    starts,  # [S]
    paths,  # [S, depth]
    counts,  # [S]
    table_width,
    depth,
    n_blocks,
    HK: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    s, head, array = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count, start = tl.load(counts + s), tl.load(starts + s)
    table = tables + tl.load(sequences + s).to(tl.int64) * table_width
    d = tl.arange(0, DP)
    memory = kv + array * n_blocks * (HK * _BLOCK * D) + head * (_BLOCK * D) + d[None, :]
    # A target may be the source of an earlier move, never of a later one: within a group all loads come before the stores, and the
    # barrier keeps a group's stores behind the loads of the group before.
    for first in range(0, count, _AT_ONCE):
        i = first + tl.arange(0, _AT_ONCE)
        source, target = tl.load(paths + s * depth + i, mask=i < count, other=0), start + i
        moved = (i < count) & (source != target)
        source_block = tl.load(table + source // _BLOCK, mask=moved, other=0).to(tl.int64)
        target_block = tl.load(table + target // _BLOCK, mask=moved, other=0).to(tl.int64)
        inside = moved[:, None] & (d < D)[None, :]
        x = tl.load(memory + (source_block * (HK * _BLOCK * D) + source % _BLOCK * D)[:, None], mask=inside, other=0.0)
        tl.debug_barrier()
        tl.store(memory + (target_block * (HK * _BLOCK * D) + target % _BLOCK * D)[:, None], x, mask=inside)
        tl.debug_barrier()


def commit(
    kv: torch.Tensor, tables: torch.Tensor, sequences: torch.Tensor, starts: torch.Tensor, paths: torch.Tensor, counts: torch.Tensor
) -> None:
    """Move, for each of S sequences, KV positions paths[s, i] to starts[s] + i for i < counts[s], in order, in all layers; one launch.

    kv [L, 2, n_blocks + 1, Hk, BLOCK, D]; tables [B, max_blocks], of which sequence s has row sequences[s]; sequences, starts and counts
    [S], paths [S, depth]; int32. The first counts[s] positions of a path rise, and paths[s, i] >= starts[s] + i.
    """
    n_layers, two, n_blocks, n_kv_heads, block, head_dim = kv.shape
    assert (two, block) == (2, BLOCK), kv.shape
    assert all(x.is_contiguous() for x in (kv, sequences, starts, counts))
    assert paths.stride(1) == tables.stride(1) == 1
    if not len(starts):
        return
    _move[(len(starts), n_kv_heads, 2 * n_layers)](
        kv,
        tables,
        sequences,
        starts,
        paths,
        counts,
        tables.stride(0),
        paths.stride(0),
        n_blocks,
        HK=n_kv_heads,
        D=head_dim,
        DP=triton.next_power_of_2(head_dim),
        num_warps=1,
    )

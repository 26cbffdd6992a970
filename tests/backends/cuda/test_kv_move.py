"""What goes into the pool and moves in it: rotated keys as transformers rotates them, and accepted paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from ngramspec.backends.cpu.kv_pool import KVPool
from ngramspec.outputs import BLOCK

pytest.importorskip("triton")

from aot import check_limits, compile_kernel

from ngramspec.backends.cuda import kv_move, rope_kv
from ngramspec.backends.cuda.attention_metadata import AttentionMetadata
from ngramspec.backends.cuda.attention_schedule import WORDS

N_BLOCKS = 5


def rows_at(positions: list[int], slots: list[int], device: str) -> AttentionMetadata:
    def array(x: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(x, np.int32)).to(device)

    n = len(positions)
    return AttentionMetadata(array(positions), array(slots), array(positions), *map(array, (np.zeros((n, 1)), np.zeros((0, WORDS)), [[0]])))


def memory(heads: int, dim: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.full((N_BLOCKS + 1, heads, BLOCK, dim), 7.0, dtype=dtype, device=device)
    return keys, keys.clone()


def ulps(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference in units of the last place, of 1 for numbers below."""
    bits = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}[a.dtype]
    x, y = a.double(), b.double()
    unit = torch.exp2(torch.floor(torch.log2(torch.maximum(x.abs(), y.abs()).clamp(min=1.0))) - bits)
    return float(((x - y).abs() / unit).max())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned", "n_partials", "bias", "norm"),
    [(4, 2, 64, 64, 3, False, False), (3, 1, 80, 32, 1, True, False), (2, 2, 96, 96, 2, True, True), (7, 1, 128, 48, 5, False, True)],
)
def test_turns_as_transformers_does(
    heads: int, kv_heads: int, dim: int, turned: int, n_partials: int, bias: bool, norm: bool, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(heads)
    width = (heads + 2 * kv_heads) * dim
    positions, slots = [3, 0, 11, 0, 0], [37, 5, 2 * BLOCK, N_BLOCKS * BLOCK, N_BLOCKS * BLOCK]  # the last two only fill up
    partials = torch.randn(n_partials, len(positions), width)
    b = torch.randn(width).to(dtype) if bias else None
    angles = torch.rand(16, turned // 2) * 6
    cos, sin = (torch.cat([f(angles)] * 2, 1).to(dtype) for f in (torch.cos, torch.sin))
    norms = []
    for _ in range(2):
        norms.append(Qwen3RMSNorm(dim, eps=1e-5).to(dtype))
        norms[-1].weight.data = torch.randn(dim).to(dtype)

    total = partials[0].clone()
    for p in range(1, n_partials):
        total += partials[p]
    x = (total if b is None else total + b.float()).to(dtype).view(len(positions), -1, dim)
    q, k, v = x.split([heads, kv_heads, kv_heads], 1)
    if norm:
        q, k = norms[0](q).detach(), norms[1](k).detach()
    q_turned, k_turned = apply_rotary_pos_emb(q[..., :turned], k[..., :turned], cos[positions], sin[positions])
    q, k = torch.cat([q_turned, q[..., turned:]], -1), torch.cat([k_turned, k[..., turned:]], -1)

    keys, values = memory(kv_heads, dim, dtype, device)
    got = torch.full((len(positions), heads, dim), 7.0, dtype=dtype, device=device)
    weights = (norms[0].weight.detach().to(device), norms[1].weight.detach().to(device)) if norm else None
    rope_kv.rope_kv(
        partials.to(device), None if b is None else b.to(device), (cos.to(device), sin.to(device)), rows_at(positions, slots, device),
        (keys, values), got, weights, eps=1e-5,
    )  # fmt: skip

    slack = 4 if norm else 0  # the norm's mean is summed in another order
    assert ulps(got.cpu(), q) <= slack
    for r, slot in enumerate(slots[:3]):
        assert ulps(keys[slot // BLOCK, :, slot % BLOCK].cpu(), k[r]) <= slack
        assert torch.equal(values[slot // BLOCK, :, slot % BLOCK].cpu(), v[r])
        keys[slot // BLOCK, :, slot % BLOCK] = values[slot // BLOCK, :, slot % BLOCK] = 7
    for array in (keys, values):
        assert (array[:N_BLOCKS] == 7).all(), "another slot is written"
        assert array.isfinite().all()


def test_rows_do_not_depend_on_their_company(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    partials = torch.randn(2, 6, 3 * 64).to(device)
    cos, sin = torch.randn(2, 6, 64).to(device, dtype)
    weight = torch.randn(64).to(device, dtype)

    def run(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = memory(1, 64, dtype, device)
        q = torch.empty(len(rows), 1, 64, dtype=dtype, device=device)
        at = rows_at(rows, [BLOCK * (r % N_BLOCKS) + r for r in rows], device)
        rope_kv.rope_kv(partials[:, rows].contiguous(), None, (cos, sin), at, (keys, values), q, (weight, weight), 1e-6)
        return q, torch.stack([keys[r % N_BLOCKS, 0, r] for r in rows])

    whole = run(list(range(6)))
    for rows in ([4], [5, 0, 3]):
        assert all(torch.equal(a, b[rows]) for a, b in zip(run(rows), whole, strict=True))


def test_places_keys_and_values(dtype: torch.dtype, device: str) -> None:
    keys, values = memory(3, 80, dtype, device)
    k, v = torch.randn(2, 4, 3, 80).to(device, dtype)
    slots = [33, 0, 159, N_BLOCKS * BLOCK]
    rope_kv.write_kv(k, v, rows_at([0] * 4, slots, device), keys, values)
    for r, slot in enumerate(slots):
        assert torch.equal(keys[slot // BLOCK, :, slot % BLOCK], k[r])
        assert torch.equal(values[slot // BLOCK, :, slot % BLOCK], v[r])
    assert int((keys != 7).any(-1).sum()) == len(slots) * 3


def test_commit_moves_as_the_pool_on_the_cpu_does(dtype: torch.dtype, device: str) -> None:
    """Paths of random trees, in several sequences at once, against `KVPool.commit`."""
    rng = np.random.default_rng(0)
    layers, heads, dim, depth = 2, 2, 24, 20
    pool = KVPool([(heads, dim)] * layers, 24, 4, 6 * BLOCK)
    kv = torch.randn(layers, 2, 25, heads, BLOCK, dim).to(dtype)
    for layer in range(layers):
        pool.keys[layer][:] = kv[layer, 0, :24].transpose(-1, -2).float().numpy()
        pool.values[layer][:] = kv[layer, 1, :24].float().numpy()
    for slot in (2, 0, 3, 1, 2, 0):  # in turns, so that tables are no runs
        assert pool.reserve(slot, int(pool.n_blocks_of[slot]) * BLOCK + 3 * BLOCK)
    sequences, starts, counts = [2, 0, 3, 1], [70, 31, 5, 9], [20, 11, 1, 0]
    paths = np.zeros((4, depth), np.int32)
    for s, (slot, start, count) in enumerate(zip(sequences, starts, counts, strict=True)):
        ahead = np.sort(rng.choice(min(40, 3 * BLOCK - start - 1), count, replace=False))
        paths[s, :count] = start + np.maximum(ahead, np.arange(count))
        pool.commit(slot, start, paths[s, :count].astype(np.int32))
    assert paths[0, 12] > starts[0] + 12, "the longest path moves"

    def array(x: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(x, np.int32)).to(device)

    moved = kv.to(device, copy=True)
    kv_move.commit(moved, array(pool.tables), array(sequences), array(starts), array(paths), array(counts))
    for layer in range(layers):
        assert np.array_equal(moved[layer, 0, :24].float().cpu().numpy(), pool.keys[layer].transpose(0, 1, 3, 2))
        assert np.array_equal(moved[layer, 1, :24].float().cpu().numpy(), pool.values[layer])
    assert torch.equal(moved[:, :, 24].cpu(), kv[:, :, 24])
    assert not torch.equal(moved.cpu(), kv)


def compiled() -> None:
    kernel = compile_kernel(
        rope_kv._rope_kv,
        dict.fromkeys(("bias", "cos", "sin", "keys", "values", "q", "q_norm", "k_norm"), "*bf16")
        | {"partials": "*fp32", "positions": "*i32", "slots": "*i32", "eps": "fp32", "n_rows": "i32"},
        {"N_PARTIALS": 4, "H": 32, "HK": 8, "D": 128, "ROTATED": 128, "HALF": 64, "REST": 0, "GATED": False, "OVERLAP": True},
        num_warps=1,
    )
    check_limits(kernel, 90)
    assert kernel.count(r"fma\.rn") == 0, "products are rounded before they are added"
    integers = dict.fromkeys(("tables", "sequences", "starts", "paths", "counts"), "*i32")
    kernel = compile_kernel(
        kv_move._move,
        {"kv": "*bf16"} | integers | dict.fromkeys(("table_width", "depth", "n_blocks"), "i32"),
        {"HK": 8, "D": 128, "DP": 128},
        num_warps=1,
    )
    check_limits(kernel, 90)
    assert kernel.count(r"ld\.global\.v4") > 0 or kernel.count(r"ld\.global\.\S*v4") > 0, "a row is read 16 bytes at a time"

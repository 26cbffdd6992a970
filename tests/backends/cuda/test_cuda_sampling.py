"""Sampling on the device: the very tokens that the CPU's `Sampler` samples, whatever is asked for; candidates and walks likewise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from aot import check_limits, compile_kernel

from ngramspec.backends.cuda import gpu_sampler
from ngramspec.backends.cuda.gpu_sampler import SamplerWorkspace, SamplingArrays
from ngramspec.outputs import KEPT, DraftTree
from ngramspec.sampling.sampler import NotFiniteError, Sampler, token_logprob
from ngramspec.sampling.topk import find_topk as likeliest_of
from ngramspec.sampling.verify import match_draft
from ngramspec.sampling_params import SamplingParams

SIZES: list[dict[str, int]] = [  # of chunks, tiles and lists: as they are, and so small that short rows take every way
    {},
    {"chunk": 64, "tile": 512, "listed": 64},
    {"chunk": 16, "tile": 256, "listed": 32},
]
K = KEPT


def make_row(rng: np.random.Generator, V: int) -> np.ndarray:
    """[V] float32 of a random kind: sharp or flat, with ties, banned tokens, huge or tiny numbers, both zeros, or no numbers at all."""
    x = rng.standard_normal(V) * rng.choice([0.0, 0.1, 1.0, 3.0, 10.0, 200.0])
    match rng.integers(0, 10):
        case 1:
            x = np.round(x)
        case 2:
            x = np.round(x, 1)
        case 3:
            x[rng.random(V) < 0.7] = -np.inf
        case 4:
            x = rng.integers(0, 2, V) * 1e30
        case 5:
            x *= 1e-39
        case 6:
            x = -np.abs(x) - 1e5
        case 7:
            x = np.where(rng.random(V) < 0.5, 0.0, -0.0)
        case 8 if rng.random() < 0.5:
            x[rng.integers(0, V)] = rng.choice([np.nan, np.inf])
        case 9 if rng.random() < 0.3:
            x[:] = rng.choice([-np.inf, -3.4e38])
    return x.astype(np.float32)


def make_params(rng: np.random.Generator, V: int) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice([0, 1e-6, 0.1, 0.7, 1, 3, 100])),
        top_k=int(rng.choice([0, 0, 1, 2, 5, 40, V, 2**31 - 1])),
        top_p=float(rng.choice([1, 1, 1e-300, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53])),
        min_p=float(rng.choice([0, 0, 1e-20, 0.01, 0.3, 1])),
        logprobs=int(rng.integers(0, K)) if rng.random() < 0.5 else None,
    )


def arrays(samplers: list[Sampler], positions: np.ndarray, device: str) -> SamplingArrays:
    def put(values: Any, dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values, dtype)).to(device)

    params = [p.params for p in samplers]
    seeds = np.array([[p.seed & 0xFFFFFFFF, p.seed >> 32] for p in samplers], np.uint32).view(np.int32)
    return SamplingArrays(
        put([p.temperature for p in params], np.float32),
        put([p.top_k for p in params], np.int32),
        put([p.top_p for p in params], np.float64),
        put([p.min_p for p in params], np.float32),
        put(seeds, np.int32),
        put([p.index for p in samplers], np.int32),
        put(positions, np.int32),
        put([p.logprobs is not None for p in params], np.int32),
    )


def check(rng: np.random.Generator, n: int, V: int, sizes: dict[str, int], device: str, params: list[SamplingParams] | None = None) -> None:
    """n random rows: picks and candidates of one call against the CPU's, row by row."""
    rows = np.stack([make_row(rng, V) for _ in range(n)])
    params = params or [make_params(rng, V) for _ in range(n)]
    samplers = [
        Sampler(
            params[i % len(params)],
            index=int(rng.integers(0, 128)),
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            prompt=np.zeros(0, np.int64),
            vocab_size=V,
            stop_ids=frozenset(),
        )
        for i in range(n)
    ]
    positions = rng.integers(0, 2**31 - 1, n)
    out = torch.full((n,), -7, dtype=torch.int32, device=device)
    find_topk = torch.full((n, K), -7, dtype=torch.int32, device=device), torch.zeros(n, K, device=device)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        workspace = SamplerWorkspace(n + 1, V, device, k=K, **sizes)
        scores = torch.full((n,), -7.0, device=device), torch.full((n,), -7.0, dtype=torch.float64, device=device)
        gpu_sampler.sample(torch.from_numpy(rows).to(device), arrays(samplers, positions, device), out, workspace, find_topk, scores)
        tokens, logits = likeliest_of(rows)
    for i, sampler in enumerate(samplers):
        try:
            expected = sampler.sample(rows[i], int(positions[i]))
        except NotFiniteError:
            expected = -1
        assert int(out[i]) == expected, (V, sizes, sampler.params)
        chosen, norm = float(scores[0][i]), float(scores[1][i])
        if sampler.params.logprobs is None:
            assert (chosen, norm) == (-7, -7)
        elif expected >= 0:
            assert chosen == rows[i, expected]
            assert chosen - norm == pytest.approx(token_logprob(rows[i], expected, 0).logprob, rel=1e-9, abs=1e-9 * max(abs(chosen), 1))
    numbers = ~np.isnan(rows).any(axis=1)
    assert (find_topk[0].cpu().numpy()[numbers] == tokens[numbers]).all()
    assert (find_topk[1].cpu().numpy()[numbers] == logits[numbers]).all()


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(map(str, s.values())) or "default")
def test_picks_and_candidates_are_the_cpus(sizes: dict[str, int], device: str) -> None:
    rng = np.random.default_rng(len(sizes) + sum(sizes.values()))
    for V in (1, 7, 257, 1025):
        check(rng, 1000 if device == "cuda" else 2, V, sizes, device)


def test_every_combination(device: str) -> None:
    rng = np.random.default_rng(1)
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        for t in ((0.6, 1.0, 2.0) if device == "cuda" else (1.0,)) for k in (0, 20) for p in (1.0, 0.8) for m in (0.0, 0.1)
    ]  # fmt: skip
    for _ in range(50 if device == "cuda" else 1):
        check(rng, len(params), 300, SIZES[1], device, params)


@pytest.mark.cuda
@pytest.mark.parametrize("V", [49152, 128256, 262144])
def test_whole_vocabularies(V: int) -> None:
    rng = np.random.default_rng(V)
    for _ in range(6):
        check(rng, 64, V, {}, "cuda")


def test_a_large_vocabulary(device: str) -> None:
    check(np.random.default_rng(3), 2, 9001, {}, device, [SamplingParams(temperature=1.3, top_p=0.95), SamplingParams(temperature=0.9)])


def test_a_workspace_must_fit(device: str) -> None:
    logits, out = torch.zeros(3, 100, device=device), torch.empty(3, dtype=torch.int32, device=device)
    sampling = arrays([], np.zeros(0), device)
    likeliest = torch.empty(3, 2, dtype=torch.int32, device=device), torch.empty(3, 2, device=device)
    for workspace in (SamplerWorkspace(2, 100, device, k=2), SamplerWorkspace(3, 99, device, k=2), SamplerWorkspace(3, 100, device, k=1)):
        with pytest.raises(ValueError, match="a workspace for"):
            gpu_sampler.sample(logits, sampling, out, workspace, likeliest)


def test_walks_are_those_of_the_cpu(device: str) -> None:
    """Random trees of several sequences, a prompt's rows before some roots, wide trees, and padding."""
    rng = np.random.default_rng(5)
    for n_seqs in (1, 3, 8):
        ids, parents, sampled, roots, ends, paths = [], [], [], [], [], []
        for _ in range(n_seqs):
            n, before, wide = int(rng.choice([0, 1, 5, 30, 200])), int(rng.integers(0, 4)), rng.random() < 0.3
            ids += [3] * before
            parents += [-1] * before
            sampled += rng.integers(0, 3, before + 1 + n).tolist()
            root = len(ids)
            tree_parents = np.array([-1 if wide and i < 150 else int(rng.integers(max(-1, i - 3), i)) for i in range(n)], np.int32)
            tokens = np.empty(n, np.int32)
            for i in range(n):  # siblings differ, and now and then one is what was picked
                taken = {int(tokens[j]) for j in range(i) if tree_parents[j] == tree_parents[i]}
                tokens[i] = sampled[root + 1 + tree_parents[i]]
                if int(tokens[i]) in taken or rng.random() < 0.2:
                    tokens[i] = max(taken, default=2) + 1
            ids += [1, *tokens.tolist()]
            parents += [-1, *(root + 1 + tree_parents).tolist()]
            roots.append(root)
            ends.append(len(ids))
            tree = DraftTree(tokens, tree_parents, np.ones(n, np.float32), np.zeros(n, np.uint8))
            paths.append([root + 1 + node for _, node in match_draft(tree, sampled[root:].__getitem__) if node >= 0])
        arrays = [
            torch.tensor(a, dtype=torch.int32, device=device) for a in (sampled, [*ids, 0], [*parents, -1], [*roots, -1], [*ends, -1])
        ]
        depth = max(map(len, paths)) + 1
        counts, got = gpu_sampler.walk(*arrays, depth)
        assert counts.tolist() == [*map(len, paths), 0]
        assert got.tolist() == [path + [-1] * (depth - len(path)) for path in [*paths, []]]
        assert gpu_sampler.walk(*arrays, 1)[0].tolist() == [min(len(path), 1) for path in [*paths, []]]


TYPES = {
    "logits": "*fp32", "stride": "i32:16", "n_vocab": "i32:16", "n_chunks": "i32", "temperature": "*fp32:1", "top_k": "*i32:1",
    "top_p": "*fp64:1", "min_p": "*fp32:1", "best": "*i64", "sums": "*i64", "seed": "*i32:1", "sample": "*i32:1", "position": "*i32:1",
    "listed": "*i32", "out": "*i32:1", "ids": "*i32:1", "values": "*fp32:1", "sampled": "*i32:1", "parents": "*i32:1", "roots": "*i32",
    "ends": "*i32", "counts": "*i32", "paths": "*i32", "depth": "i32", "stride_": "i32",
    "scored": "*i32:1", "parts": "*fp64", "chosen": "*fp32:1", "norms": "*fp64:1",
}  # fmt: skip


def compiled() -> None:
    sizes = {"CHUNK": gpu_sampler.CHUNK, "TILE": gpu_sampler.TILE, "LISTED": gpu_sampler.LISTED, "CHUNKS": 64, "WIDE": 512, "K": K}
    walk = {name: TYPES[name if name != "stride" else "stride_"] for name in gpu_sampler._walk.arg_names if name != "BLOCK"}
    for capability in (90, 80):
        for kernel, num_warps in ((gpu_sampler._find_best, 4), (gpu_sampler._sum_chunk, 4), (gpu_sampler._finish, 16)):
            constants = {name: size for name, size in (sizes | {"CANDIDATES": True, "SCORES": True}).items() if name in kernel.arg_names}
            types = {name: TYPES[name] for name in kernel.arg_names if name not in constants}
            made = compile_kernel(kernel, types, constants, capability=capability, num_warps=num_warps)
            check_limits(made, capability)
            # Divisions are exact, numbers near zero stay, and nothing but what is written as fma is one: 9 for each weight.
            assert made.count(r"div\.(full|approx)|(div|mul|add|sub|fma)\.rn\.ftz") == 0
            assert made.count(r"\bfma\.rn\.f32") == 9 * made.count(r"\bdiv\.rn\.f32")
        check_limits(compile_kernel(gpu_sampler._walk, walk, {"BLOCK": 128}, capability=capability, num_warps=1), capability)

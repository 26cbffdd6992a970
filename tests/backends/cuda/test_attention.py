"""Attention on the device: right against float64, and bit for bit the same however rows, texts and memory are arranged.

`Pass` lays texts out in a pool of shuffled blocks and packs rows of many kinds into one launch; `alone` computes one row by
itself, its text lying straight, by one program. Every arrangement must give the bits of `alone`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from ngramspec.outputs import BLOCK

pytest.importorskip("triton")

import triton
import triton.language as tl
from aot import check_limits, compile_kernel

from ngramspec.backends.cuda import paged_attention
from ngramspec.backends.cuda.attention_metadata import AttentionMetadata
from ngramspec.backends.cuda.attention_schedule import WORDS, fill_schedule, n_kept, n_splits, split_first
from ngramspec.backends.cuda.paged_attention import TILE, AttentionLaunch, AttentionWorkspace, attend

HALF = [torch.bfloat16, torch.float16]


@dataclass
class Shape:
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    @property
    def sinks(self) -> torch.Tensor | None:
        return torch.linspace(-1, 3, self.heads).to(self.dtype) if self.has_sinks else None

    @property
    def scale(self) -> float:
        return self.dim**-0.5


@dataclass
class Text:
    """`n` known tokens, the last `rows` of them rows of the pass, then a tree of nodes with these parents (-1: the last known token)."""

    n: int
    rows: int = 1
    parents: list[int] = field(default_factory=list)
    seed: int = 0

    def fill(self, shape: Shape, device: str) -> None:
        total, generator = self.n + len(self.parents), torch.Generator().manual_seed(self.seed * 1000 + self.n)
        self.k, self.v = (torch.randn(total, shape.kv_heads, shape.dim, generator=generator).to(device, shape.dtype) for _ in range(2))
        self.q = torch.randn(self.rows + len(self.parents), shape.heads, shape.dim, generator=generator).to(device, shape.dtype)

    def slots(self, row: int) -> list[int]:
        """Where the keys lie that a row sees, in the order of their positions."""
        if row < self.rows:
            return list(range(self.n - self.rows + row + 1))
        path, node = [], row - self.rows
        while node >= 0:
            path.append(self.n + node)
            node = self.parents[node]
        return [*range(self.n), *reversed(path)]


class Pass:
    def __init__(self, shape: Shape, texts: list[Text], rows_per_item: int, device: str, *, seed: int = 0, padding: int = 0) -> None:
        """`padding`: empty items and rows of none. Memory that no row sees is NaN."""
        self.shape, self.rows_per_item = shape, rows_per_item
        rng = np.random.default_rng(seed)
        widths = [-(-(t.n + len(t.parents)) // BLOCK) for t in texts]
        order = rng.permutation(sum(widths))
        size = (sum(widths) + 1, shape.kv_heads, BLOCK, shape.dim)
        self.keys, self.values = (torch.full(size, float("nan"), device=device, dtype=shape.dtype) for _ in range(2))
        tables = np.full((len(texts), max(widths) + 1), sum(widths), np.int32)
        positions, bases, paths, items, owners = [], [], [], [], []
        depth = 1 + max(len(t.parents) for t in texts)
        for i, text in enumerate(texts):
            text.fill(shape, device)
            blocks, order = order[: widths[i]], order[widths[i] :]
            tables[i, : widths[i]] = blocks
            at = torch.from_numpy(np.repeat(blocks, BLOCK)[: len(text.k)].astype(np.int64)).to(device)
            offset = torch.arange(len(text.k), device=device) % BLOCK
            self.keys[at, :, offset], self.values[at, :, offset] = text.k, text.v
            first = len(positions)
            for row in range(len(text.q)):
                slots = text.slots(row)
                straight = slots == list(range(len(slots)))
                positions.append(len(slots) - 1)
                bases.append(len(slots) if straight else text.n)
                paths.append(([] if straight else slots[text.n :]) + [0] * depth)
            for a in range(first, len(positions), rows_per_item):
                items.append((a, min(a + rows_per_item, len(positions))))
                owners.append(i)
        n = len(positions)
        positions, bases, paths = positions + [0] * padding, bases + [1] * padding, [p[:depth] for p in paths] + [[0] * depth] * padding
        items, owners = items + [(0, 0)] * padding, owners + [0] * padding

        self.rows = AttentionMetadata(
            *map(self.device_array, (positions, np.zeros(n + padding), bases, paths, np.empty((0, WORDS)), tables))
        )
        self.layout = np.array(positions, np.int32), np.array(items, np.int32), np.array(owners, np.int32)
        self.q = torch.cat([*(t.q for t in texts), torch.full((padding, *texts[0].q.shape[1:]), 9.0, device=device, dtype=shape.dtype)])

    def device_array(self, x: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(x, np.int32)).to(self.keys.device)

    def workspace(self, n_places: int) -> AttentionWorkspace:
        return AttentionWorkspace.allocate(
            n_places, self.rows_per_item, self.shape.heads, self.shape.kv_heads, self.shape.dim, self.keys.device
        )

    def run(
        self, n_programs: int = 1, workspace: AttentionWorkspace | None = None, places: int | None = None, shuffled: int = 0
    ) -> torch.Tensor:
        """`shuffled`: the seed of another order of the shares."""
        positions, items, _ = self.layout
        n_places = len(items) + sum(n_kept(int(positions[a:b].max()) + 1) for a, b in items if a < b) if places is None else places
        shares = np.ones((len(items) + n_programs, WORDS), np.int32)
        fill_schedule(*self.layout, n_programs, n_places, shares)
        if shuffled:
            shares = np.random.default_rng(shuffled).permutation(shares)
        out = torch.full_like(self.q, 7.0)
        sinks = None if self.shape.sinks is None else self.shape.sinks.to(out.device)
        attend(
            self.q, (self.keys, self.values), replace(self.rows, shares=self.device_array(shares)), out,
            AttentionLaunch(self.rows_per_item, workspace or self.workspace(n_places)), scale=self.shape.scale, window=self.shape.window,
            softcap=self.shape.softcap, sinks=sinks,
        )  # fmt: skip
        return out


def alone(shape: Shape, text: Text, row: int, device: str) -> torch.Tensor:
    """The row [H, D] as the only one of the pass, its text without branches."""
    text.fill(shape, device)
    slots = text.slots(row)
    straight = Text(len(slots))
    one = Pass(shape, [straight], 1, device)
    at, offset = one.rows.tables[0].long().repeat_interleave(BLOCK)[: len(slots)], torch.arange(len(slots), device=device) % BLOCK
    one.keys[at, :, offset], one.values[at, :, offset] = text.k[slots], text.v[slots]
    one.q = text.q[row : row + 1]
    return one.run()[0]


def expected(shape: Shape, text: Text, row: int) -> torch.Tensor:
    """The row [H, D] in float64."""
    slots = text.slots(row)
    k, v = (x[slots].double().repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (text.k, text.v))
    scores = torch.einsum("hd,khd->hk", text.q[row].double(), k) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    if shape.window:
        scores[:, : max(0, len(slots) - shape.window)] = -torch.inf
    if shape.sinks is not None:
        scores = torch.cat([scores, shape.sinks.to(scores)[:, None]], 1)
    return torch.einsum("hk,khd->hd", scores.softmax(1)[:, : len(slots)], v)


TREE = [-1, -1, 0, 1, 3, 2, 4, 4]
SHAPES = [
    Shape(dtype=torch.float32),
    Shape(dtype=torch.float16, heads=3, kv_heads=1),
    Shape(dtype=torch.bfloat16, heads=8, dim=128),
    Shape(dtype=torch.bfloat16, dim=80, heads=2),
    Shape(dtype=torch.float32, dim=96, heads=7, kv_heads=1),
    Shape(dtype=torch.float16, dim=256, heads=16, kv_heads=1),
    Shape(dtype=torch.float32, window=70),
    Shape(dtype=torch.bfloat16, softcap=2.0),
    Shape(dtype=torch.float32, softcap=30.0, window=5),
    Shape(dtype=torch.bfloat16, window=40, has_sinks=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_is_attention(shape: Shape, device: str) -> None:
    texts = [Text(150, 1, TREE), Text(1), Text(67, 5)]
    done = Pass(shape, texts, 4, device, padding=1)
    got = done.run(2)
    wanted = torch.cat([torch.stack([expected(shape, t, r) for r in range(len(t.q))]) for t in texts])
    error = (got[:-1].double() - wanted).abs().max() / wanted.abs().max()
    assert error < {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[shape.dtype]
    assert (got[-1] == 7).all(), "a row of no item is left as it was"


def bits(shape: Shape, text: Text, device: str) -> torch.Tensor:
    """All rows of a text [rows, H, D], each computed alone."""
    text.fill(shape, device)
    return torch.stack([alone(shape, text, row, device) for row in range(len(text.q))])


# Splits end at 128, 256, …; 1,024 is where they become longer.
TEXTS = [
    Text(190, 1, TREE, seed=1),
    Text(129, 5, seed=2),
    Text(1060, 1, [-1, -1], seed=3),
    Text(33, 1, [-1, -1, 1], seed=4),
    Text(1, seed=5),
]


@pytest.fixture(scope="module")
def known(device: str) -> Callable[[Shape, int], torch.Tensor]:
    """Bits of a text of `TEXTS`."""
    found: dict[str, torch.Tensor] = {}

    def look_up(shape: Shape, text: int) -> torch.Tensor:
        key = f"{shape} {text}"
        if key not in found:
            found[key] = bits(shape, TEXTS[text], device)
        return found[key]

    return look_up


ARRANGEMENTS = [  # dtype, window, softcap, rows_per_item, n_programs, order of the texts, seed of the blocks, padding
    (torch.bfloat16, 0, 0.0, 1, 2, [1, 4, 3], 1, 0),
    (torch.bfloat16, 0, 0.0, 4, 1, [4, 3, 2, 1, 0], 2, 3),
    (torch.bfloat16, 0, 0.0, 8, 5, [2, 0, 4, 1, 3], 3, 1),
    (torch.bfloat16, 0, 0.0, 16, 3, [0], 4, 0),
    (torch.bfloat16, 0, 0.0, 16, 1, [1, 3, 0], 5, 0),
    (torch.float16, 150, 0.0, 4, 2, [3, 0], 6, 0),
    (torch.float16, 150, 0.0, 8, 1, [0, 4], 7, 2),
    (torch.bfloat16, 0, 3.0, 2, 4, [3, 1], 8, 0),
    (torch.float32, 0, 0.0, 4, 2, [3, 1], 9, 1),
]


@pytest.mark.parametrize(
    "case", ARRANGEMENTS, ids=lambda c: f"{c[0]}-window{c[1]}-cap{c[2]}-{c[3]}rows-{c[4]}programs".replace("torch.", "")
)
def test_bits_do_not_depend_on_the_arrangement(case: tuple, known: Callable[[Shape, int], torch.Tensor], device: str) -> None:  # type: ignore[type-arg]
    dtype, window, softcap, rows_per_item, n_programs, order, seed, padding = case
    shape = Shape(heads=2, kv_heads=1, dtype=dtype, window=window, softcap=softcap, has_sinks=window > 0)
    done = Pass(shape, [TEXTS[i] for i in order], rows_per_item, device, seed=seed, padding=padding)
    wanted = torch.cat([known(shape, i) for i in order])
    assert torch.equal(done.run(n_programs)[: len(wanted)], wanted)


@pytest.mark.parametrize("window", [0, 1500])
def test_company_changes_no_bit(window: int, device: str) -> None:
    """A long text alone, beside short ones and beside a longer one, by one program and by many; its groups of splits end at 1,024 and
    3,072."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    shape = Shape(heads=2, kv_heads=1, dim=16, dtype=dtype, window=window, has_sinks=window > 0)
    long = Text(3170, 2, [-1, -1], seed=8)
    mixes = {
        "alone": [long],
        "beside short ones": [long, *(Text(20 + i, seed=i) for i in range(31 if device == "cuda" else 6))],
        "beside a longer one": [Text(3500, seed=9), long],
    }
    found = {}
    for name, texts in mixes.items():
        done = Pass(shape, texts, 4, device, seed=len(texts))
        workspace = done.workspace(128)
        first = sum(len(text.q) for text in texts[: texts.index(long)])
        ways = ((1, None, 0), (40, None, 3), (7, len(texts), 0))
        for n_programs, places, shuffled in ways if device == "cuda" else ways[: 1 + len(found)]:
            found[name, n_programs, shuffled, places] = done.run(n_programs, workspace, places, shuffled)[first : first + len(long.q)]
            assert not workspace.counters.any()
    wanted = found["alone", 1, 0, None]
    assert not torch.isnan(wanted.float()).any()
    assert (wanted[-1] - expected(shape, long, 3)).abs().max() < 2e-2
    assert [key for key, got in found.items() if not torch.equal(got, wanted)] == []


def test_a_workspace_can_be_used_again(device: str) -> None:
    shape = Shape(heads=2, kv_heads=1, dtype=torch.float32)
    done = Pass(shape, [Text(200, 1, [-1, -1]), Text(300, seed=1)], 4, device, padding=2)
    workspace = done.workspace(16)
    workspace.kept.fill_(torch.nan)
    workspace.kept_ml.fill_(torch.nan)
    first = done.run(3, workspace)
    assert not workspace.counters.any(), "the next launch counts from zero"
    assert torch.equal(done.run(2, workspace, shuffled=1), first)
    assert torch.equal(done.run(1), first)


@triton.jit
def _splits(firsts, splits, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(firsts + i, paged_attention._split_first(i))
    tl.store(splits + i, paged_attention._split_of(i))


def test_splits_are_whole_tiles_in_order(device: str) -> None:
    n = 1 << 14
    firsts, splits = (torch.empty(n, dtype=torch.int32, device=device) for _ in range(2))
    _splits[(1,)](firsts, splits, N=n)
    n_inside = int(splits[-1]) + 1
    starts, splits = firsts[: n_inside + 1].cpu().numpy(), splits.cpu().numpy()
    lengths = np.diff(starts)
    assert starts[0] == 0
    assert (lengths % TILE == 0).all(), lengths
    assert lengths.max() <= 32 * BLOCK
    assert (splits == np.searchsorted(starts, np.arange(n), side="right") - 1).all()
    assert [n_splits(k) for k in range(1, n + 1)] == (splits + 1).tolist()
    assert [split_first(s) for s in range(n_inside + 1)] == starts.tolist()


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_bits_of_long_texts(dim: int, dtype: torch.dtype, device: str) -> None:
    shape = Shape(heads=16, kv_heads=4, dim=dim, dtype=dtype)
    texts = [Text(5000, 1, [*range(-1, 11), 3, 3, 12], seed=1), Text(9001, 40, seed=2), Text(1024, 1, seed=3)]
    wanted = torch.cat([bits(shape, text, device) for text in texts])
    for rows_per_item, n_programs in ((1, 1), (2, 40), (4, 7), (8, 1), (8, 13)):
        for seed in range(3):
            assert torch.equal(Pass(shape, texts, rows_per_item, device, seed=seed).run(n_programs), wanted), (rows_per_item, n_programs)


def compiled() -> None:
    """What ptxas makes of the kernel: matrix instructions of one shape along the keys, no spills, products never contracted."""
    pointers = dict.fromkeys(("positions", "bases", "paths", "shares", "tables"), "*i32")
    work = {"kept": "*fp32", "kept_ml": "*fp32", "counters": "*i32"}
    cases = (90, "bf16", 128, 4, 8, 3, 4, {}), (90, "bf16", 64, 8, 4, 3, 4, {"sinks": "*bf16"}), (80, "bf16", 128, 4, 4, 3, 8, {})
    for capability, dtype, dim, heads, rows, stages, warps, sinks in cases:
        columns = max(16, triton.next_power_of_2(rows * heads))
        width = triton.next_power_of_2(dim)
        kernel = compile_kernel(
            paged_attention._attend,
            dict.fromkeys(("q", "keys", "values", "out"), f"*{dtype}")
            | pointers
            | work
            | dict.fromkeys(("depth", "table_width"), "i32")
            | dict.fromkeys(("scale", "softcap"), "fp32")
            | sinks,
            {
                "H": heads, "HK": 1, "D": dim, "DP": width, "N": columns, "ROWS": triton.next_power_of_2(rows), "WINDOW": 0,
                "SOFTCAP": False, "IN_FLIGHT": max(1, min(4, 8192 // (width * columns))), "OVERLAP": capability >= 90,
            } | ({} if sinks else {"sinks": None}),
            capability=capability,
            num_stages=stages,
            num_warps=warps,
        )  # fmt: skip
        print(kernel.summarize())
        check_limits(kernel, capability)
        kind = f"m64n{columns}k16" if capability == 90 else "m16n8k16"
        assert {kind in name for name in kernel.mma} == {True}, kernel.summarize()
        assert f"warpsPerCTA = [{warps}, 1]" in kernel.ttgir, "the order in which weights are summed follows the layout of the scores"
        assert kernel.count(r"cp\.async\.cg") > 0, "loads of keys and values are not pipelined"
        assert kernel.count(r"fma\.rn") == 0
        assert kernel.count(r"griddepcontrol\.wait") == (capability >= 90)

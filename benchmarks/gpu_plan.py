"""What the parts of the GPU benchmark share: the plan, engines, device times, what a profile says. Knows torch's profiler and no part."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import common, step
from ngramspec import Engine
from ngramspec.model.loading import SMOLLM2_PACKAGE, load_model, load_tokenizer
from ngramspec.model.random_weights import PREFIX, empty_model, read_shape

GAP_US = 10.0
"""Shorter pauses between kernels are the device's own, from one node of a graph to the next; in longer ones it waits for the host."""

Figures = dict[str, Any]
Part = Callable[["Plan"], Iterator[tuple[str, Figures]]]
"""A part of the benchmark: gives its figures as it comes by them, so that what it had is known if it is stopped."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how much of it."""

    device: str = "cuda:0"
    dtype: str = "bfloat16"
    large: str = "random:Llama-3.1-8B"
    small: str = "random:SmolLM2-135M"
    code: str = "random:Qwen2.5-Coder-7B"
    tokenizer: str | None = None
    """Of prompts and traces; None: the small model's own, and without one words."""
    prompts: Path | None = None
    trace: Path | None = None
    context: int = 1024
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batches: tuple[int, ...] = (1, 8, 32)
    lengths: tuple[int, ...] = (2, 4, 8, 16)
    """Fixed lengths of drafts that the replay is compared with."""
    repeat: int = 30
    n_prompts: int = 240
    """For identity on the small model; on the large one a quarter of it and four more."""
    n_traces: int = 16
    """Replayed one at a time; for the largest batch a quarter as many groups."""
    max_tokens: int = 64
    kv_bytes: int = 8 << 30
    tests: tuple[str, ...] = ("tests/cuda",)
    """Arguments of pytest."""

    @property
    def on_cuda(self) -> bool:
        return self.device.startswith("cuda")


def smallest() -> str:
    """SmolLM2 with its real weights where its package is installed, else its shape."""
    return "smollm2" if importlib.util.find_spec(SMOLLM2_PACKAGE) else Plan.small


def open_engine(plan: Plan, model: str, *, linears: str = "exact", **options: Any) -> Engine:
    """An engine without a tokenizer: the parts hand it token ids, and measure passes, not text."""
    if plan.on_cuda:
        options["linears"] = linears
    return Engine(model, device=plan.device, dtype=plan.dtype, kv_memory=plan.kv_bytes, progress=say, **options)


def tokenizer_for(plan: Plan, model: str, vocab_size: int) -> Any:
    """The plan's tokenizer, else the model's own, else words."""
    if plan.tokenizer is not None:
        return load_tokenizer(plan.tokenizer)
    return common.Words(vocab_size) if model.startswith(PREFIX) else load_tokenizer(model)


def weight_bytes(plan: Plan, model: str) -> int:
    """Bytes of weights that a pass of the model reads."""
    dtype = getattr(torch, plan.dtype)
    return step.weight_bytes(empty_model(read_shape(model), dtype) if model.startswith(PREFIX) else load_model(model, dtype=dtype).model)


def release(plan: Plan) -> None:
    """Give back the memory of what is no longer referred to, before the next model is loaded."""
    gc.collect()
    if plan.on_cuda:
        torch.cuda.empty_cache()


def bandwidth(plan: Plan, n_bytes: int) -> Figures:
    """GB/s of reading, and of copying with reads and writes counted, over a buffer of so many bytes; the larger is the floor's."""
    words = max(n_bytes // 8 * 2, 2)
    speeds = {name: round(words * 4 / ms / 1e6, 1) for name, ms in _read_and_copy(plan, words).items()}
    release(plan)
    best = max(speeds.values())
    return {"bytes": words * 4, **speeds, "gb_s": best, "floor_ms": round(n_bytes / best / 1e6, 4)}


def _read_and_copy(plan: Plan, words: int) -> dict[str, float]:
    buffer, half = torch.ones(words, dtype=torch.float32, device=plan.device), words // 2
    return {
        "read_gb_s": statistics.median(device_ms(plan, buffer.sum, 12)),
        "copy_gb_s": statistics.median(device_ms(plan, lambda: buffer[:half].copy_(buffer[half:]), 12)),
    }


def device_ms(plan: Plan, work: Callable[[], object], repeat: int) -> list[float]:
    """Milliseconds of each of `repeat` runs after two that do not count, by the device's clock where it has one."""
    times = []
    for n in range(repeat + 2):
        if plan.on_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
        if n == 1:
            times.clear()
    return times


class Kernel(NamedTuple):
    """One run of a kernel, or a copy, on the device."""

    name: str
    start_us: float
    end_us: float


def profiled(plan: Plan, work: Callable[[], object]) -> list[Kernel]:
    """What the device ran meanwhile, whichever thread asked for it; nothing on a CPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not plan.on_cuda:
        work()
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize(plan.device)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]


def busy_us(kernels: Iterable[Kernel]) -> float:
    """For how long the device was at work, pauses up to GAP_US counted in."""
    total, begin, end = 0.0, 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_us):
        if kernel.start_us > end + GAP_US:
            total += max(end - begin, 0.0)
            begin = kernel.start_us
        end = max(end, kernel.end_us)
    return total + max(end - begin, 0.0)


def kernel_table(kernels: list[Kernel], n_passes: int, n_layers: int) -> Figures:
    """Kernels by name, those that take most first: how many a pass, microseconds a pass, share of all."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.end_us - kernel.start_us)
    total = sum(map(sum, by_name.values())) or 1.0
    rows = [
        {
            "name": name[:120],
            "per_pass": round(len(times) / n_passes, 2),
            "us_per_pass": round(sum(times) / n_passes, 2),
            "share": round(sum(times) / total, 4),
        }
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "kernels_per_pass": round(len(kernels) / n_passes, 1),
        "kernels_per_layer": round(len(kernels) / n_passes / n_layers, 2),
        "kernels_us_per_pass": round(sum(k.end_us - k.start_us for k in kernels) / n_passes, 1),
        "busy_us_per_pass": round(busy_us(kernels) / n_passes, 1),
        "kernels": rows,
    }


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)

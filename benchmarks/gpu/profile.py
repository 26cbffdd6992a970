"""The device's own clock and its profile: what runs on it, for how long, and when it waits. Work enters as a callable, figures leave."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from benchmarks import common

# Shorter pauses between kernels are the device's own, from one node of a graph to the next; in longer ones it waits for the host.
GAP_US = 10.0


class Kernel(NamedTuple):
    """One run of a kernel, or a copy, on the device."""

    name: str
    start_us: float
    end_us: float


def device_ms(device: str, work: Callable[[], object], repeat: int = 12) -> float:
    """Median milliseconds of `repeat` runs after two that do not count, by the device's clock where it has one."""

    def by_its_clock() -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    once = by_its_clock if device.startswith("cuda") else lambda: common.time_ms(work)
    return statistics.median([once() for _ in range(repeat + 2)][2:])


def measure_bandwidth(device: str, n_bytes: int) -> dict[str, Any]:
    """Return GB/s of reading, and of copying with reads and writes counted, over a buffer of `n_bytes`; the larger is the floor's."""
    words = max(n_bytes // 8 * 2, 2)
    buffer, half = torch.ones(words, dtype=torch.float32, device=device), words // 2
    ms = {"read_gb_s": device_ms(device, buffer.sum), "copy_gb_s": device_ms(device, lambda: buffer[:half].copy_(buffer[half:]))}
    speeds = {name: round(words * 4 / t / 1e6, 1) for name, t in ms.items()}
    best = max(speeds.values())
    return {"bytes": words * 4, **speeds, "gb_s": best, "floor_ms": round(n_bytes / best / 1e6, 4)}


def profile_work(device: str, work: Callable[[], object]) -> list[Kernel]:
    """Return what the device ran meanwhile, whichever thread asked for it; nothing on a CPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not device.startswith("cuda"):
        work()
        return []
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize(device)
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in events]


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Return for how long the device was at work, pauses up to GAP_US counted in."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start_us):
        begin = kernel.start_us if kernel.start_us > end + GAP_US else end
        total += max(kernel.end_us - begin, 0.0)
        end = max(end, kernel.end_us)
    return total


def kernel_table(kernels: list[Kernel], n_passes: int, n_layers: int) -> dict[str, Any]:
    """Return kernels by name, those that take most first: how many a pass, microseconds a pass, share of all."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.end_us - kernel.start_us)
    total = sum(map(sum, by_name.values()))
    rows = [
        {
            "name": name[:120],
            "per_pass": round(len(times) / n_passes, 2),
            "us_per_pass": round(sum(times) / n_passes, 2),
            "share": round(sum(times) / (total or 1.0), 4),
        }
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
    ]
    return {
        "kernels_per_pass": round(len(kernels) / n_passes, 1),
        "kernels_per_layer": round(len(kernels) / n_passes / n_layers, 2),
        "kernels_us_per_pass": round(total / n_passes, 1),
        "busy_us_per_pass": round(busy_us(kernels) / n_passes, 1),
        "kernels": rows,
    }

"""How much memory there is for a model, on the host and on devices."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ngramspec.errors import OutOfMemoryError


def available_memory(device: str = "cpu") -> int | None:
    """Return the bytes that can be allocated now on the device, or None if the platform does not tell."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    free = []
    with contextlib.suppress(OSError, ValueError):
        meminfo = Path("/proc/meminfo").read_text("utf-8")
        if match := re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE):
            free.append(int(match[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text("utf-8"))
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text("utf-8"), re.MULTILINE)
        free.append(limit - int((group / "memory.current").read_text("utf-8")) + (int(cached[1]) if cached else 0))
    return min(free, default=None)


def check_memory(needed: int, device: str, what: str) -> None:
    """Raise OutOfMemoryError unless `needed` bytes are free on the device."""
    free = available_memory(device)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"{what} needs {needed / 2**30:.1f} GiB for its weights on {device}, where {max(free, 0) / 2**30:.1f} GiB are free; "
            "a smaller model or a 16-bit dtype (bfloat16) may fit"
        )

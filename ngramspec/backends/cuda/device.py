"""Query a device: what Triton can compile for it, how much memory is free and how much some work takes. Knows no models and no kernels."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from ngramspec.backends.base import is_out_of_memory
from ngramspec.errors import MissingPackageError, OutOfMemoryError


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    n_processors: int
    shared_bytes: int
    """Shared memory that one block may have: the bound that Triton checks before it launches a kernel."""
    generation: int = 9
    """Major number of its compute capability."""
    overlaps: bool = False
    """Whether a kernel may begin while the one before it ends."""


@cache
def get_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of a CUDA device; for the interpreter on the CPU, those of a small Hopper. Raises MissingPackageError."""
    if device.type != "cuda":
        return DeviceLimits(4, 227 << 10)
    try:
        found = _read_properties(device.index or 0)
    except subprocess.CalledProcessError as e:
        raise MissingPackageError(
            f"Triton could not compile its launcher ({e}): Python's headers (python3-dev) and a C compiler (gcc or clang) must be installed"
        ) from e
    except RuntimeError as e:
        if "C compiler" not in str(e):
            raise
        raise MissingPackageError(f"Triton needs a C compiler, and there is none: install gcc or clang ({e})") from e
    generation = torch.cuda.get_device_capability(device)[0]
    return DeviceLimits(int(found["multiprocessor_count"]), int(found["max_shared_mem"]), generation, overlaps=generation >= 9)


def _read_properties(index: int) -> Mapping[str, int]:
    """Return the driver's properties; the first call has Triton compile its driver's launcher."""
    from triton.runtime import driver

    properties: Mapping[str, int] = driver.active.utils.get_device_properties(index)
    return properties


def free_bytes(device: torch.device, utilization: float) -> int:
    """Return the bytes still free within the share `utilization` of the device's memory."""
    if device.type != "cuda":
        return 1 << 26
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(min(free, total * utilization - (total - free)))


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Return the most bytes that torch reserves for the work beyond what it holds; 0 without a device."""
    if device.type != "cuda":
        work()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_reserved(device) - before)


@contextmanager
def translate_memory_errors() -> Iterator[None]:
    """Turn whatever is raised when memory runs out while a model is bound into an OutOfMemoryError."""
    try:
        yield
    except Exception as e:
        if isinstance(e, OutOfMemoryError) or not is_out_of_memory(e):
            raise
        raise OutOfMemoryError(
            f"memory ran out while passes were tried at load: {e}; a smaller model, fewer rows in a pass (max_rows) or shorter texts "
            "(max_model_len) may fit"
        ) from e

"""What Triton says of a device, and whether it can compile for it at all. A device goes in; nothing here knows models or kernels."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from ngramspec.batch.errors import MissingPackageError


@dataclass(frozen=True, slots=True)
class Limits:
    n_processors: int
    shared_bytes: int
    """Shared memory that a block may have: what Triton holds a kernel against before it launches it."""


@cache
def limits(device: torch.device) -> Limits:
    """Of a CUDA device; elsewhere, under the interpreter, those of a small Hopper. Raises MissingPackageError."""
    if device.type != "cuda":
        return Limits(4, 227 << 10)
    try:
        found = _properties(device.index or 0)
    except subprocess.CalledProcessError as e:
        raise MissingPackageError(
            f"Triton could not compile its launcher ({e}): Python's headers (python3-dev) and a C compiler (gcc or clang) must be installed"
        ) from e
    except RuntimeError as e:
        if "C compiler" not in str(e):
            raise
        raise MissingPackageError(f"Triton needs a C compiler, and there is none: install gcc or clang ({e})") from e
    return Limits(int(found["multiprocessor_count"]), int(found["max_shared_mem"]))


def _properties(index: int) -> Mapping[str, int]:
    """The first call has Triton compile its driver's launcher."""
    from triton.runtime import driver

    properties: Mapping[str, int] = driver.active.utils.get_device_properties(index)
    return properties

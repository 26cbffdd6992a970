"""How much memory there is for a model, on the host and on devices."""

from __future__ import annotations

from ngramspec.datastore.page_cache import find_free_memory
from ngramspec.errors import OutOfMemoryError


def available_memory(device: str = "cpu") -> int | None:
    """Return the bytes that can be allocated now on the device, or None if the platform does not tell."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    return find_free_memory()


def check_memory(needed: int, device: str, what: str) -> None:
    """Raise OutOfMemoryError unless `needed` bytes are free on the device."""
    free = available_memory(device)
    if free is not None and needed > free:
        raise OutOfMemoryError(
            f"{what} needs {needed / 2**30:.1f} GiB for its weights on {device}, where {max(free, 0) / 2**30:.1f} GiB are free; "
            "a smaller model or a 16-bit dtype (bfloat16) may fit"
        )

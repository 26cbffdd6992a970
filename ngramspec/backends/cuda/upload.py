"""Copy from pinned memory to the device, queued after its work; `Upload.wait` protects the source from being overwritten too early.

Host and device tensors go in; nothing here knows what they hold.
"""

from __future__ import annotations

import torch


class Upload:
    """The copies out of one piece of pinned memory. Without a CUDA device they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue target = source, of the same shape."""
        target.copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait until every copy has read its source."""
        if self._event is not None:
            self._event.synchronize()

"""Lock an open file against other processes, on every system. Nothing waits; the lock ends with the descriptor."""

from __future__ import annotations

import importlib
import os
from typing import Any

try:
    fcntl: Any = importlib.import_module("fcntl")
except ImportError:  # Windows
    fcntl = None
    msvcrt: Any = importlib.import_module("msvcrt")


def lock_file(descriptor: int) -> None:
    """Lock a file that is open for writing. Raises BlockingIOError if another process, or another descriptor, has locked it."""
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # a byte that need not be there
    except PermissionError as error:
        raise BlockingIOError(error.errno, "another process has locked it") from None

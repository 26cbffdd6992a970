"""Write files so that a reader finds all of one or none, whenever the writer is killed, and so that no part of one stays for good.

A file is written beside its place, under a hidden name that ends in SUFFIX, and renamed. What a process leaves that is killed meanwhile is
removed by a later call of `remove_stale`. Paths and bytes enter. Knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

SUFFIX = ".part"
STALE_S = 600.0  # age of a partial file after which the process that wrote it is taken to have been killed


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file, in place of an earlier one; `mode` is narrowed by the umask. Raises OSError, and leaves no part of it then."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{SUFFIX}")
    try:
        partial.touch(mode)
        partial.write_bytes(content)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def remove_stale(folder: Path, pattern: str = f".*{SUFFIX}", stale_s: float = STALE_S) -> None:
    """Remove what processes that were killed had begun to write into a folder: the files of this pattern that are `stale_s` old."""
    with contextlib.suppress(OSError):
        for path in list(folder.glob(pattern)):
            with contextlib.suppress(OSError):  # another process has removed it, or renamed it
                if time.time() - path.stat().st_mtime >= stale_s:
                    path.unlink()

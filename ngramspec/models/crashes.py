"""A start that ends by a signal in compiled code is noticed by the next one, which compiles everything anew, once.

While a model is loaded, faulthandler writes the stack of a segmentation fault, an abort or an illegal instruction into a small file in the
cache. Checksums find code that has changed since it was written; this is for code that was wrong when it was written, as by another
processor or a compiler's fault. A process that is killed from outside leaves an empty file, which means nothing. The module does not know
what is compiled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

FORGOTTEN_S = 86400  # Seconds: an empty record of this age belongs to a process that was killed.


@contextlib.contextmanager
def watch_start(folder: Path, clear: Callable[[], None]) -> Iterator[None]:
    """Record a crash of the code within this context in `folder`; call `clear` first if an earlier start crashed and had not cleared.

    Nothing is recorded if the folder cannot be written, or if faulthandler is in use already.
    """
    crashed = _list_crashes(folder)
    cleared = bool(crashed) and not any(path.name.endswith(".cleared") for path in crashed)
    if cleared:
        clear()
    for path in crashed:
        with contextlib.suppress(OSError):  # the folder may be one that can only be read
            path.unlink(missing_ok=True)
    record = folder / f"{os.getpid()}-{time.time_ns()}{'.cleared' if cleared else '.start'}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = record.open("w")
    except OSError:
        yield
        return
    with file:
        ours = not faulthandler.is_enabled()
        if ours:
            faulthandler.enable(file)
        try:
            yield
        finally:
            if ours:
                faulthandler.disable()
            with contextlib.suppress(OSError):
                record.unlink(missing_ok=True)


def _list_crashes(folder: Path) -> list[Path]:
    """Return the records of starts that crashed; remove empty ones that were forgotten."""
    paths, found = list[Path](), []
    with contextlib.suppress(OSError):
        paths = [*folder.glob("*.start"), *folder.glob("*.cleared")]
    for path in paths:
        with contextlib.suppress(OSError):  # another process has just removed its own
            status = path.stat()
            if status.st_size:
                found.append(path)
            elif time.time() - status.st_mtime > FORGOTTEN_S:
                path.unlink(missing_ok=True)
    return found

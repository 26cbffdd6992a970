"""Ctrl-C while modules are imported: an import of seconds runs destructors, in which Python drops an exception. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

INTERRUPTED = 130  # exit code of a command that was interrupted, as shells have it


@contextlib.contextmanager
def keep_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the `with` block if one was raised in it and got lost."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    was_interrupted = False

    def raise_interrupt(*_: Any) -> None:
        nonlocal was_interrupted
        was_interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, raise_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if was_interrupted:
        raise KeyboardInterrupt

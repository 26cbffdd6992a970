"""Keep Python's garbage collector from looking for cycles where there are none to be found."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def pause_collector() -> Iterator[None]:
    """Collect no cycles while many objects are made that stay: modules, vocabularies. Each time their number has grown by a quarter, all of
    them would be looked at again: 0.6 s of a model's first start, 0.1 s of a later one, a quarter of the time that an update of a datastore
    looks at its files. For all threads; can be nested.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

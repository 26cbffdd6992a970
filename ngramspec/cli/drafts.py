"""Options of all commands that run a model: which drafters there are beside the usual ones.

What is given becomes settings that `common.open_engine` understands. Knows no drafter by its class.
"""

from __future__ import annotations

from typing import Annotated, Any

from ngramspec.cli.common import BadInputError, option
from ngramspec.cli.flags import SPECULATION

DraftModel = Annotated[
    str | None,
    option(
        SPECULATION, "Draft with this model too, a smaller one with the same vocabulary; named as --model is.", "--draft-model", metavar="M"
    ),
]
DraftLayers = Annotated[
    int | None, option(SPECULATION, "Draft with the first L layers of the model itself, too.", "--draft-layers", metavar="L", min=1)
]
Drafters = Annotated[
    list[str] | None,
    option(SPECULATION, "Draft with this one too; an unknown name lists them. May be repeated.", "--drafter", metavar="NAME[:ARG]"),
]
Alone = Annotated[bool, option(SPECULATION, "The one drafter that is given drafts alone, as much as it likes.", "--alone")]


def draft_settings(model: str | None, layers: int | None, drafters: list[str] | None, alone: bool) -> dict[str, Any]:
    """Settings for `common.open_engine`, of what was given. Raises BadInputError."""
    named = [*([f"model:{model}"] if model is not None else []), *([f"layers:{layers}"] if layers is not None else []), *(drafters or [])]
    if alone and len(named) != 1:
        raise BadInputError(f"--alone: give one of --draft-model, --draft-layers and --drafter, got {len(named)}")
    return ({"drafters": named} if named else {}) | ({"alone": True} if alone else {})

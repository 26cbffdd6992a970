"""Options of all commands that run a model: which drafters there are beside the usual ones, and how drafts are accepted.

What is given becomes settings that `cli._open` understands. Knows no drafter by its class.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Speculation", **more)


DraftModel = Annotated[
    str | None,
    _option("Draft with this model too, a smaller one with the same vocabulary; named as --model is.", "--draft-model", metavar="M"),
]
DraftLayers = Annotated[
    int | None, _option("Draft with the first L layers of the model itself, too.", "--draft-layers", metavar="L", min=1)
]
Drafters = Annotated[
    list[str] | None, _option("Draft with this one too; an unknown name lists them. May be repeated.", "--drafter", metavar="NAME[:ARG]")
]
Alone = Annotated[bool, _option("The one drafter that is given drafts alone, as much as it likes.", "--alone")]
Acceptance = Annotated[
    str | None,
    _option(
        "walk: the text is the same as without drafts. rejection, with --alone: sampled text is only distributed alike. Default: walk.",
        "--acceptance",
        metavar="walk|rejection",
    ),
]
Lenience = Annotated[
    float | None,
    _option(
        "Below 1, in (0, 1]: accept what the model holds a little less likely; the text is another. Default: 1.", "--lenience", metavar="F"
    ),
]


def draft_settings(
    model: str | None, layers: int | None, drafters: list[str] | None, alone: bool, acceptance: str | None, lenience: float | None
) -> dict[str, Any]:
    """Settings for `cli._open`, of what was given. Raises BadInputError."""
    from ngramspec.cli.main import BadInputError

    named = [*([f"model:{model}"] if model is not None else []), *([f"layers:{layers}"] if layers is not None else []), *(drafters or [])]
    if alone and len(named) != 1:
        raise BadInputError(f"--alone: give one of --draft-model, --draft-layers and --drafter, got {len(named)}")
    given = {"drafters": named or None, "alone": alone or None, "acceptance": acceptance, "lenience": lenience}
    return {name: value for name, value in given.items() if value is not None}

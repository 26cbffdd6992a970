"""Options of all commands that run a model: which drafters there are beside the usual ones.

What is given becomes settings that `common.open_engine` understands. Knows no drafter by its class.
"""

from __future__ import annotations

from typing import Annotated, Any, TypedDict, Unpack

from ngramspec.cli.common import BadInputError, option
from ngramspec.cli.flags import SPECULATION


class DrafterOptions(TypedDict, total=False):
    """Options that name drafters; those that were given."""

    draft_model: Annotated[
        str,
        option(
            SPECULATION,
            "Also draft with this smaller model, which has the same vocabulary; named as --model is.",
            "--draft-model",
            metavar="M",
        ),
    ]
    draft_layers: Annotated[
        int, option(SPECULATION, "Also draft with the first L layers of the model itself.", "--draft-layers", metavar="L", min=1)
    ]
    drafter: Annotated[
        list[str],
        option(
            SPECULATION, "Also draft with this drafter; an unknown name lists them all. May be repeated.", "--drafter", metavar="NAME[:ARG]"
        ),
    ]
    alone: Annotated[bool, option(SPECULATION, "Only the one drafter that is named drafts, and as much as it proposes.", "--alone")]


def draft_settings(**given: Unpack[DrafterOptions]) -> dict[str, Any]:
    """Return settings for `common.open_engine`. Raises BadInputError."""
    named = [f"model:{given['draft_model']}"] if "draft_model" in given else []
    named += [f"layers:{given['draft_layers']}"] if "draft_layers" in given else []
    named += given.get("drafter", [])
    if "alone" not in given:
        return {"drafters": named} if named else {}
    if len(named) != 1:
        raise BadInputError(f"--alone: give one of --draft-model, --draft-layers and --drafter, got {len(named)}")
    return {"drafters": named, "alone": True}

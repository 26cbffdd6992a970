"""Make drafters by name: `NAME` or `NAME:ARGUMENT`, as in command lines and settings, becomes a `Drafter` for `Engine`.

Knows every drafter's name and the form of its argument, and imports what a drafter needs when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from ngramspec.speculative.drafter import Drafter


def _make_model(argument: str) -> Drafter:
    from ngramspec.speculative.trained.draft_model import DraftModel

    if not argument:
        raise ValueError("the drafter model needs the name of one, as in model:org/name")
    return DraftModel(argument)


def _make_layers(argument: str) -> Drafter:
    from ngramspec.speculative.trained.draft_layers import DraftLayers

    if not argument.isdecimal():
        raise ValueError(f"the drafter layers needs a number of layers, as in layers:8, got {argument!r}")
    return DraftLayers(int(argument))


def _make_lookahead(argument: str) -> Drafter:
    from ngramspec.papers.lookahead import Lookahead

    return Lookahead(*_parse_numbers("lookahead", argument, 3))


def _make_recycling(argument: str) -> Drafter:
    from ngramspec.papers.recycling import TokenRecycling

    return TokenRecycling(*_parse_numbers("recycling", argument, 1))


def _make_medusa(argument: str) -> Drafter:
    from ngramspec.papers.heads import Medusa

    return Medusa(_check_folder("medusa", argument))


def _make_blockwise(argument: str) -> Drafter:
    from ngramspec.papers.blockwise import Blockwise

    return Blockwise(_check_folder("blockwise", argument))


def _make_pass(argument: str) -> Drafter:
    from ngramspec.papers.pass_tokens import ParallelTokens

    if not argument:
        raise ValueError("the drafter pass needs the ids of the model's look-ahead tokens, as in pass:49152,49153")
    return ParallelTokens(_parse_numbers("pass", argument, 64))


def _make_eagle(argument: str) -> Drafter:
    from ngramspec.papers.eagle import Eagle

    return Eagle(_check_folder("eagle", argument))


def _make_counts(argument: str) -> Drafter:
    from ngramspec.papers.count_drafter import Counts

    return Counts(*_parse_numbers("counts", argument, 2))


def _parse_numbers(name: str, argument: str, most: int) -> list[int]:
    parts = argument.split(",") if argument else []
    if len(parts) > most or not all(part.isdecimal() for part in parts):
        raise ValueError(f"the drafter {name} takes up to {most} numbers with commas between, got {argument!r}")
    return [int(part) for part in parts]


def _check_folder(name: str, argument: str) -> str:
    if not argument:
        raise ValueError(f"the drafter {name} needs the folder of its heads, as in {name}:path/to/folder")
    return argument


_MAKERS: dict[str, Callable[[str], Drafter]] = {
    "lookahead": _make_lookahead,
    "recycling": _make_recycling,
    "medusa": _make_medusa,
    "blockwise": _make_blockwise,
    "pass": _make_pass,
    "eagle": _make_eagle,
    "model": _make_model,
    "layers": _make_layers,
    "counts": _make_counts,
}
# Drafters and the meaning of their arguments.
NAMES: dict[str, str] = {
    "lookahead": "lookahead:W,N,G, n-grams from Jacobi iteration: window, n-gram size, guesses (7,5,7)",
    "recycling": "recycling:NODES, the model's own candidates after each token (80)",
    "medusa": "medusa:FOLDER, Medusa heads",
    "blockwise": "blockwise:FOLDER, a layer that guesses a block",
    "pass": "pass:ID,ID,..., the model's own look-ahead tokens",
    "eagle": "eagle:FOLDER, EAGLE's layer (1 and 2)",
    "model": "model:M, a smaller model with the same vocabulary",
    "layers": "layers:L, the first L layers of the model itself",
    "counts": "counts:ORDER,LENGTH, an n-gram model of the text, with a distribution to draw from (2,4)",
}


def make_drafter(text: str) -> Drafter:
    """Make a drafter. Raises ValueError for an unknown name or an argument that the drafter does not take."""
    name, _, argument = text.partition(":")
    if name not in _MAKERS:
        raise ValueError(f"there is no drafter {name!r}; accepted: {'; '.join(NAMES.values())}")
    return _MAKERS[name](argument)

"""Drafters by name: `NAME` or `NAME:ARGUMENT`, as command lines and settings have them, become `Drafter`s for `Engine`.

Knows every drafter's name and the form of its argument, and imports what a drafter needs when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from ngramspec.speculative.base import Drafter


def _model(argument: str) -> Drafter:
    from ngramspec.speculative.trained.draft_model import DraftModel

    if not argument:
        raise ValueError("the drafter model needs the name of one, as in model:org/name")
    return DraftModel(argument)


def _layers(argument: str) -> Drafter:
    from ngramspec.speculative.trained.draft_layers import DraftLayers

    if not argument.isdecimal():
        raise ValueError(f"the drafter layers needs a number of layers, as in layers:8, got {argument!r}")
    return DraftLayers(int(argument))


def _lookahead(argument: str) -> Drafter:
    from ngramspec.papers.lookahead import Lookahead

    return Lookahead(*_numbers("lookahead", argument, 3))


def _recycling(argument: str) -> Drafter:
    from ngramspec.papers.recycling import TokenRecycling

    return TokenRecycling(*_numbers("recycling", argument, 1))


def _medusa(argument: str) -> Drafter:
    from ngramspec.papers.heads import Medusa

    return Medusa(_folder("medusa", argument))


def _blockwise(argument: str) -> Drafter:
    from ngramspec.papers.blockwise import Blockwise

    return Blockwise(_folder("blockwise", argument))


def _pass(argument: str) -> Drafter:
    from ngramspec.papers.pass_tokens import ParallelTokens

    if not argument:
        raise ValueError("the drafter pass needs the ids of the model's look-ahead tokens, as in pass:49152,49153")
    return ParallelTokens(_numbers("pass", argument, 64))


def _eagle(argument: str) -> Drafter:
    from ngramspec.papers.eagle import Eagle

    return Eagle(_folder("eagle", argument))


def _counts(argument: str) -> Drafter:
    from ngramspec.papers.count_drafter import Counts

    return Counts(*_numbers("counts", argument, 2))


def _numbers(name: str, argument: str, most: int) -> list[int]:
    parts = argument.split(",") if argument else []
    if len(parts) > most or not all(part.isdecimal() for part in parts):
        raise ValueError(f"the drafter {name} takes up to {most} numbers with commas between, got {argument!r}")
    return [int(part) for part in parts]


def _folder(name: str, argument: str) -> str:
    if not argument:
        raise ValueError(f"the drafter {name} needs the folder of its heads, as in {name}:path/to/folder")
    return argument


_MAKERS: dict[str, Callable[[str], Drafter]] = {
    "lookahead": _lookahead,
    "recycling": _recycling,
    "medusa": _medusa,
    "blockwise": _blockwise,
    "pass": _pass,
    "eagle": _eagle,
    "model": _model,
    "layers": _layers,
    "counts": _counts,
}
NAMES: dict[str, str] = {
    "lookahead": "lookahead:W,N,G, n-grams from Jacobi iteration: window, n-gram size, guesses (7,5,7)",
    "recycling": "recycling:NODES, the model's own candidates behind each token (80)",
    "medusa": "medusa:FOLDER, Medusa heads",
    "blockwise": "blockwise:FOLDER, a layer that guesses a block",
    "pass": "pass:ID,ID,..., the model's own look-ahead tokens",
    "eagle": "eagle:FOLDER, EAGLE's layer (1 and 2)",
    "model": "model:M, a smaller model with the same vocabulary",
    "layers": "layers:L, the first L layers of the model itself",
    "counts": "counts:ORDER,LENGTH, an n-gram model of the text, with a distribution to draw from (2,4)",
}
"""What there is, and what its argument means."""


def make_drafter(text: str) -> Drafter:
    """Raises ValueError for an unknown name or an argument that the drafter does not take."""
    name, _, argument = text.partition(":")
    if name not in _MAKERS:
        raise ValueError(f"there is no drafter {name!r}; there are {'; '.join(NAMES.values())}")
    return _MAKERS[name](argument)

"""Sampling parameters as fields of requests, made from their one declaration in `SamplingParams`.

`takes_sampling` gives a model of requests a field for every parameter that all dialects have under its own name, with its type, bounds and
meaning; `given` reads them back as arguments of `SamplingParams`. What a dialect words or shapes in its own way, it declares itself.
Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, create_model

from ngramspec.options import Choice, Flag, Integer, Kind, Number, Text, Texts, TokenIds, options_of
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.base_schemas import Items, StrictModel, TokenId

Model = TypeVar("Model", bound=StrictModel)

OWN_SHAPE = frozenset({"max_tokens", "n", "seed", "stop", "logit_bias", "logprobs", "prompt_logprobs", "grammar"})
"""Parameters that each dialect has in a shape, or under a name, of its own."""
SHARED = {name: option for name, option in options_of(SamplingParams).items() if name not in OWN_SHAPE}
"""All others: the same field in every dialect. null and absence mean the dialect's default."""


def strict_type(kind: Kind) -> Any:
    """The pydantic type of what an option takes."""
    match kind:
        case Integer(low, high):
            return Annotated[int, Field(ge=low, le=high)]
        case Number(low, high, above):
            return Annotated[float, Field(gt=low, le=high) if above else Field(ge=low, le=high)]
        case Flag():
            return bool
        case Choice(values):
            return Literal[values]
        case Text():
            return str
        case Texts(most):
            return Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=most)]
        case TokenIds(optional):
            return Annotated[Items[TokenId], Field(min_length=1 if optional else 0)]
    raise TypeError(f"requests cannot take {kind.accepted}: a dialect has to declare it itself")


def takes_sampling(other_names: Mapping[str, str] | None = None) -> Callable[[type[Model]], type[Model]]:
    """Adds to a model the fields of `SHARED`, and `other_names`: {a dialect's name: the parameter it stands for}."""
    named = {name: name for name in SHARED} | dict(other_names or {})
    fields: dict[str, Any] = {
        field: (strict_type(SHARED[name].kind) | None, Field(default=None, description=SHARED[name].help)) for field, name in named.items()
    }

    def extended(model: type[Model]) -> type[Model]:
        return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields)

    return extended


def given(request: StrictModel, other_names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a request says of these parameters, by their names in `SamplingParams`; of two names for one, the parameter's own counts."""
    named = dict(other_names or {}) | {name: name for name in SHARED}
    return {name: value for field, name in named.items() if (value := getattr(request, field)) is not None}

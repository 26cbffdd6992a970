"""What request models of all dialects are made of: strict types, bounded lists, and the fields that every route of completions takes.

JSON that was parsed enters, checked requests leave. Types are strict (true is no number, "1" is none either). What becomes of fields that
a model of completions does not have, `fields` says. Knows neither dialects nor routes; sampling parameters come from `sampling`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ngramspec.engine.llm_engine import Engine, Hints
from ngramspec.options import MAX_INT
from ngramspec.server import field_support
from ngramspec.server.auth import Identity
from ngramspec.server.error_responses import ApiError

MAX_BIAS = 1 << 14
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Level = Literal["none", "summary", "detailed"]
Item = TypeVar("Item")
Items: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list. Only the first item that is wrong is told of: half a million of them take a minute to tell."""


def _few(given: Any) -> Any:
    if isinstance(given, (dict, list)) and len(given) > MAX_BIAS:
        raise ValueError(f"at most {MAX_BIAS} entries, got {len(given)}")
    return given


Few = BeforeValidator(_few)
"""Counted before each entry is checked."""


class StrictModel(BaseModel):
    """The base of all models of requests."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Extras(StrictModel):
    """What every route of completions takes beside its dialect's fields and the sampling parameters."""

    route: ClassVar[str] = ""
    """The one of `fields.ROUTES` whose requests these are; "": there is no table for it."""

    datastore: str | Items[str] | None = None
    """Names of datastores to draft from; absent: all that the key may use; []: none."""
    speculation: bool | None = None
    """False: one token a pass."""
    speculative_metrics: Level | None = None
    return_sources: bool | None = None
    """Say for each token where its draft came from; for an administrator, or without keys on loopback."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any) -> Any:
        """Raises ApiError (400)."""
        if cls.route and isinstance(given, dict):
            field_support.check(cls.route, given)
        return given

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if cls.route:
            field_support.described(cls.route, handler.resolve_ref_schema(schema))
        return schema

    def check_trust(self, identity: Identity) -> None:
        """Raises ApiError 403 where the request asks for what this identity may not see."""
        for name, asked in (("return_sources", self.return_sources), ("speculative_metrics", self.speculative_metrics == "detailed")):
            if asked and not identity.trusted:
                raise ApiError(
                    403, f"{name}: where drafts come from is told to an administrator, or, without keys, on this machine", param=name
                )

    def hints(self, identity: Identity, engine: Engine) -> Hints:
        """What the engine is told beside the prompt, but for the prediction. Raises ApiError 400 for a datastore that cannot be used."""
        return Hints(
            tenant=identity.tenant,
            datastores=identity.datastores(self.datastore, engine.datastores),
            speculation=self.speculation is not False,
        )

"""What a request says of the form of its answer, in three dialects: OpenAI's, vLLM's and llama.cpp's, on every route of completions.

The fields enter, one `Grammar` or none leaves; a request that asks for two forms is refused. Knows neither routes nor what compiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import Field

from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import GrammarError, TokenizerError
from ngramspec.grammar.base import MAX_BYTES, MAX_CHOICES, Grammar
from ngramspec.grammar.json_schema import prepare_lark
from ngramspec.server.base_schemas import Extras, Items, StrictModel
from ngramspec.server.error_responses import ApiError

Schema = dict[str, Any] | bool
Source = Annotated[str, Field(max_length=MAX_BYTES)]
Choices = Annotated[Items[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]


class NamedSchema(StrictModel):
    """What OpenAI wraps a schema in. It is held whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    json_schema: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: str
    json_schema: NamedSchema | None = None
    """With type json_schema."""
    given_schema: Schema | None = Field(None, alias="schema")
    """With type json_object, as llama.cpp has it."""


class StructuredOutputs(StrictModel):
    """vLLM's, with one of them."""

    json_: Schema | Source | None = Field(None, alias="json")
    regex: Source | None = None
    choice: Choices | None = None
    grammar: Source | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None


class Structured(Extras):
    """What a request may say of the form of its answer."""

    response_format: ResponseFormat | None = None
    """`text`, `json_object`, or `json_schema` with a schema."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    grammar: Source | None = None
    """In llama.cpp's notation."""
    json_schema: Schema | Source | None = None

    @property
    def form(self) -> Grammar | None:
        """Raises ApiError (400)."""
        named = self._form()
        return named and named[1]

    def check_form(self, engine: Engine, tenant: str | None) -> None:
        """That the answer can have that form. May take seconds, once for each of a tenant. Raises ApiError (400)."""
        if (named := self._form()) is not None:
            field, grammar = named
            try:
                engine.compile_grammar(grammar, tenant=tenant)
            except (GrammarError, TokenizerError) as error:
                raise ApiError(400, f"{field}: {error}", param=field) from None

    def _form(self) -> tuple[str, Grammar] | None:
        found: list[tuple[str, Grammar]] = []
        for field, value, make in self._asked():
            try:
                found.append((field, make(value)))
            except GrammarError as error:
                raise ApiError(400, f"{field}: {error}", param=field) from None
        if len(found) > 1:
            raise ApiError(400, f"{found[1][0]}: not beside {found[0][0]}; a text has one form", param=found[1][0])
        return found[0] if found else None

    def _asked(self) -> Iterator[tuple[str, Any, Callable[[Any], Grammar]]]:
        """The fields that ask for a form, with what they say and what makes a grammar of that. Raises ApiError."""
        if self.response_format is not None:
            yield from _of_format(self.response_format)
        if (wanted := self.structured_outputs) is not None:
            for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
                if getattr(wanted, name):
                    raise _unsupported(f"structured_outputs.{name}")
            for name, make in (
                ("json_", Grammar.json_schema),
                ("regex", Grammar.regex),
                ("choice", Grammar.choice),
                ("grammar", _of_client),
            ):
                if (value := getattr(wanted, name)) is not None:
                    yield f"structured_outputs.{name.rstrip('_')}", value, make
            if wanted.json_object:
                yield "structured_outputs.json_object", None, _any_object
        for field, make in (
            ("guided_json", Grammar.json_schema),
            ("guided_regex", Grammar.regex),
            ("guided_choice", Grammar.choice),
            ("guided_grammar", _of_client),
        ):
            if (value := getattr(self, field)) is not None:
                yield field, value, make
        if self.grammar:
            yield "grammar", self.grammar, Grammar.gbnf
        if self.json_schema not in (None, "", {}):  # llama.cpp's words for none
            yield "json_schema", self.json_schema, Grammar.json_schema


def _of_format(wanted: ResponseFormat) -> Iterator[tuple[str, Any, Callable[[Any], Grammar]]]:
    match wanted.type:
        case "text":
            return
        case "json_object" if wanted.given_schema is not None:
            yield "response_format.schema", wanted.given_schema, Grammar.json_schema
        case "json_object":
            yield "response_format", None, _any_object
        case "json_schema":
            if wanted.json_schema is None:
                raise ApiError(400, "response_format.json_schema: is missing", param="response_format.json_schema")
            if wanted.json_schema.json_schema is None:
                yield "response_format", None, _any_object
            else:
                yield "response_format.json_schema.schema", wanted.json_schema.json_schema, Grammar.json_schema
        case other:
            why = f"response_format: must be of type 'text', 'json_object' or 'json_schema', got {other[:40]!r}"
            raise ApiError(400, why, param="response_format", code="not_supported")


def _of_client(grammar: str) -> Grammar:
    """vLLM's fields take both notations. In Lark's, schemas hold no more than those that are given as such. Raises GrammarError."""
    made = Grammar.written(grammar)
    return Grammar.lark(prepare_lark(grammar)) if made.kind == "lark" else made


def _any_object(_: object) -> Grammar:
    return Grammar.json_object()


def _unsupported(param: str) -> ApiError:
    return ApiError(400, f"{param} is not supported", param=param, code="not_supported")

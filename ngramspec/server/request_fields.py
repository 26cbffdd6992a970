"""Fields of requests that all dialects share: sampling parameters, the form of the answer, and what speculation does.

JSON that was parsed enters, checked requests leave. Types are strict (true is no number, "1" is none either; 1.0 is an integer).
Sampling parameters come from their one declaration in `SamplingParams`; fields that a model does not have are judged by `field_support`.
Knows neither dialects nor routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler, create_model, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ngramspec.engine.llm_engine import Engine
from ngramspec.errors import GrammarError, TokenizerError
from ngramspec.grammar.constraint import MAX_BYTES, MAX_CHOICES, Grammar
from ngramspec.grammar.json_schema import prepare_lark
from ngramspec.options import MAX_INT, ChoiceOf, Flag, Integer, Kind, Number, TextKind, TextList, TokenIds, options_of
from ngramspec.prompts.fim import Fim
from ngramspec.sampling_params import SamplingParams
from ngramspec.server import field_support
from ngramspec.server.error_responses import ApiError, make_field_error, require

MAX_BIAS = 1 << 14  # entries of `logit_bias` that are checked one by one


def _read_whole(given: Any) -> Any:
    return int(given) if type(given) is float and given.is_integer() else given


# Takes 64.0 for 64: programs in which every number is a float write it so. true and "64" stay wrong.
Whole = BeforeValidator(_read_whole)
TokenId = Annotated[int, Field(ge=0, le=MAX_INT), Whole]
Item = TypeVar("Item")
# A list of which only the first wrong item is reported: reporting half a million of them takes a minute.
Items: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]


def _check_few(given: Any) -> Any:
    if isinstance(given, (dict, list)) and len(given) > MAX_BIAS:
        raise ValueError(f"at most {MAX_BIAS} entries, got {len(given)}")
    return given


# Counts entries before each is checked.
Few = BeforeValidator(_check_few)


class StrictModel(BaseModel):
    """The base of all models of requests."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class NullIsDefault(StrictModel):
    """A model in which null means a field's default, whatever the field's type."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


# ------------------------------------------------------------------ sampling parameters

Model = TypeVar("Model", bound=StrictModel)

# Parameters that each dialect has in a shape, or under a name, of its own.
OWN_SHAPE = frozenset({"max_tokens", "n", "seed", "stop", "logit_bias", "logprobs", "prompt_logprobs", "grammar"}) | field_support.NO_FIELDS
# All others: the same field in every dialect. null and absence mean the dialect's default.
SHARED = {name: option for name, option in options_of(SamplingParams).items() if name not in OWN_SHAPE}


OTHER_NAMES = {"repeat_penalty": "repetition_penalty"}  # llama.cpp's names, and those of `SamplingParams`; both are taken


def make_strict_type(kind: Kind) -> Any:
    """Return the pydantic type of what an option takes."""
    match kind:
        case Integer(low, high):
            return Annotated[int, Field(ge=low, le=high), Whole]
        case Number(low, high, above):
            return Annotated[float, Field(gt=low, le=high) if above else Field(ge=low, le=high)]
        case Flag():
            return bool
        case ChoiceOf(values):
            return Literal[values]
        case TextKind():
            return str
        case TextList(most):
            return Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=most)]
        case TokenIds(optional):
            return Annotated[Items[TokenId], Field(min_length=1 if optional else 0)]
    raise TypeError(f"requests cannot take {kind.accepted}: a dialect has to declare it itself")


def add_sampling_fields(names: Mapping[str, str]) -> Callable[[type[Model]], type[Model]]:
    """Return a decorator that adds fields to a model. `names`: {the field: the parameter of `SHARED` that it stands for}."""
    fields: dict[str, Any] = {
        field: (make_strict_type(SHARED[name].kind) | None, Field(default=None, description=SHARED[name].help))
        for field, name in names.items()
    }

    def extend(model: type[Model]) -> type[Model]:
        return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields)

    return extend


def read_sampling_fields(request: StrictModel, other_names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a request says of the parameters in `SHARED`; of two names for one, the parameter's own counts."""
    names = dict(other_names or {}) | {name: name for name in SHARED}
    return {name: value for field, name in names.items() if (value := getattr(request, field)) is not None}


# ------------------------------------------------------------------ the form of the answer

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
    """Used with type json_schema."""
    given_schema: Schema | None = Field(None, alias="schema")
    """Used with type json_object, as llama.cpp has it."""


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


# ------------------------------------------------------------------ the fields of every dialect


@add_sampling_fields({name: name for name in SHARED})
class GenerationFields(StrictModel):
    """What every route that generates text takes beside its dialect's own fields."""

    route: ClassVar[str] = ""
    """The one of `field_support.ROUTES` whose requests these are; "": there is no table for it."""

    datastore: str | Items[str] | None = None
    """Names of datastores to draft from; absent: all that the key may use; []: none."""
    speculation: bool | None = None
    """False: one token per pass."""
    speculative_metrics: Literal["none", "summary", "detailed"] | None = None
    return_sources: bool | None = None
    """Say for each token where its draft came from; for an administrator, or without keys on loopback."""
    cache_prompt: bool | None = None
    """False: the prompt is computed, whatever is cached of it."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, or `json_schema` with a schema."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Source | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    grammar: Source | None = None
    """A grammar in llama.cpp's notation."""
    json_schema: Schema | Source | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_support(cls, given: Any) -> Any:
        """Raises ApiError (400)."""
        if cls.route and isinstance(given, dict):
            field_support.check(cls.route, given)
        return given

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        if cls.route:
            field_support.add_fields_to_schema(cls.route, handler.resolve_ref_schema(schema))
        return schema


# A grammar, and the field of a request that asks for it.
FieldGrammar: TypeAlias = tuple[str, Grammar]


def read_grammar(request: GenerationFields) -> FieldGrammar | None:
    """Return the form that the answer must have. Raises ApiError (400), also for a request that asks for two."""
    found: list[FieldGrammar] = []
    for field, value, make in _read_forms(request):
        try:
            found.append((field, make(value)))
        except GrammarError as error:
            raise make_field_error(field, str(error)) from None
    if len(found) > 1:
        raise make_field_error(found[1][0], f"not beside {found[0][0]}; a text has one form")
    return found[0] if found else None


def read_unfinished(fim: Fim, prefix: str, request: GenerationFields, form: FieldGrammar | None, defaults: Mapping[str, Any]) -> str | None:
    """Return what the output's first tokens are to spell of a prefix (`Fim.find_unfinished`); None if the request says how it begins.

    `form`: of `read_grammar`; `defaults`: the server's sampling parameters.
    """
    allowed = read_sampling_fields(request).get("allowed_token_ids", defaults.get("allowed_token_ids"))
    return fim.find_unfinished(prefix) if form is None and allowed is None else None


def check_grammar(form: FieldGrammar | None, engine: Engine, tenant: str | None) -> None:
    """Compile the grammar, if there is one. May take seconds, once for each of a tenant. Raises ApiError (400)."""
    if form is not None:
        field, grammar = form
        try:
            engine.compile_grammar(grammar, tenant=tenant)
        except (GrammarError, TokenizerError) as error:
            raise make_field_error(field, str(error)) from None


def _make_client_grammar(grammar: str) -> Grammar:
    """Make a grammar of GBNF or Lark, as vLLM's fields take it. In Lark's, schemas hold no more than those given as such.

    Raises GrammarError.
    """
    made = Grammar.from_text(grammar)
    return Grammar.lark(prepare_lark(grammar)) if made.kind == "lark" else made


# vLLM's forms: in `structured_outputs`, and with `guided_` before the name.
_MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": _make_client_grammar,
}


def _read_forms(request: GenerationFields) -> Iterator[tuple[str, Any, Callable[[Any], Grammar]]]:
    """Yield the fields that ask for a form, with what they say and what makes a grammar of that. Raises ApiError."""
    if request.response_format is not None:
        yield from _read_response_format(request.response_format)
    if (wanted := request.structured_outputs) is not None:
        for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            if getattr(wanted, name):
                param = f"structured_outputs.{name}"
                raise ApiError(400, f"{param} is not supported", param=param, code="not_supported")
        for name, make in _MAKERS.items():
            if (value := getattr(wanted, "json_" if name == "json" else name)) is not None:
                yield f"structured_outputs.{name}", value, make
        if wanted.json_object:
            yield "structured_outputs.json_object", None, _make_any_object
    for name, make in _MAKERS.items():
        if (value := getattr(request, f"guided_{name}")) is not None:
            yield f"guided_{name}", value, make
    if request.grammar:
        yield "grammar", request.grammar, Grammar.gbnf
    if request.json_schema not in (None, "", {}):  # llama.cpp's words for none
        yield "json_schema", request.json_schema, Grammar.json_schema


def _read_response_format(wanted: ResponseFormat) -> Iterator[tuple[str, Any, Callable[[Any], Grammar]]]:
    match wanted.type:
        case "text":
            return
        case "json_object" if wanted.given_schema is not None:
            yield "response_format.schema", wanted.given_schema, Grammar.json_schema
        case "json_object":
            yield "response_format", None, _make_any_object
        case "json_schema":
            schema = require(wanted.json_schema, "response_format.json_schema").json_schema
            if schema is None:
                yield "response_format", None, _make_any_object
            else:
                yield "response_format.json_schema.schema", schema, Grammar.json_schema
        case other:
            why = f"must be of type 'text', 'json_object' or 'json_schema', got {other[:40]!r}"
            raise make_field_error("response_format", why, "not_supported")


def _make_any_object(_: object) -> Grammar:
    return Grammar.json_object()

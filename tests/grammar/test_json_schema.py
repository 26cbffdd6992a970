"""Schemas as libraries write them are held; what cannot be held is refused by name; a client's schema sets no option of the compiler."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, SecretStr

from ngramspec.errors import GrammarError
from ngramspec.grammar import compiling
from ngramspec.grammar.constraint import Grammar
from ngramspec.grammar.json_schema import FORMATS, prepare_lark, prepare_schema

LENIENT = {"x-guidance": {"lenient": True, "whitespace_pattern": "[ ]+", "item_separator": ";"}}
DATES = {f"at{i}": {"type": "string", "format": "date-time"} for i in range(7)}
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
HELD: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "true": (True, [1, "a", None, {"b": [1]}], []),
    "nothing": ({}, [1, "a", [None]], []),
    "true and false within": ({"type": "object", "properties": {"a": True, "b": False}}, [{"a": 1}, {}], [{"b": 1}]),
    "one allOf and seven formats": (
        {"type": "object", "allOf": [{"properties": {"z": {"type": "integer"}}}], "properties": DATES, "required": list(DATES)},
        [{"z": 1, **dict.fromkeys(DATES, "2024-01-02T03:04:05Z")}],
        [{"z": "a", **dict.fromkeys(DATES, "2024-01-02T03:04:05Z")}, dict.fromkeys(DATES, "today")],
    ),
    "unknown formats": (
        {"type": "array", "prefixItems": [{"type": "string", "format": "password"}, {"type": "integer", "format": "int64"}]},
        [["a", 1]],
        [[1, 1]],
    ),
    "annotations": (
        {
            "type": "string",
            "title": "T",
            "description": "d",
            "default": 1,
            "examples": [1],
            "deprecated": True,
            "readOnly": True,
            "$comment": "c",
            "contentEncoding": "base64",
            "contentMediaType": "image/png",
            "contentSchema": {"not": {}},
            "nullable": True,
            "discriminator": {"propertyName": "a"},
            "x-order": 3,
            "example": {"if": 1},
            "$schema": "https://unknown.example/schema",
        },
        ["a"],
        [1, None],
    ),
    "lengths beside a pattern": ({"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[a-z]+$"}, ["abc"], ["a", "abcde", "A2"]),
    "oneOf as anyOf": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}, {"type": "null"}]}, ["abc", None], [1]),
    "a set": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, [[1, 2]], [["a"]]),
    "zod's record": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}],
        [{"a": "b"}],
    ),
    "a map by words": (
        {"type": "object", "propertyNames": {"enum": ["a", "b.c"]}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}, {"b.c": 2}],
        [{"bxc": 1}],
    ),
    "a map by pattern": ({"type": "object", "propertyNames": {"pattern": "^x-"}}, [{"x-a": 1}], [{"a": 1}]),
    "a map by length": ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
    "zod's e-mail": ({"type": "string", "format": "email", "pattern": ZOD_EMAIL}, ["a@b.cd"], ["a"]),
    "pydantic's decimal": ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, ["1.5", "-.5", "5."], ["-", ".", "a"]),
    "nothing else evaluated": (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "never": ({"type": "object", "properties": {"a": {"not": {}}}}, [{}], [{"a": 1}]),
    "draft 4": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3, "exclusiveMinimum": True},
        [4],
        [3],
    ),
    "draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [{"type": "integer"}, {"type": "string"}],
            "additionalItems": False,
        },
        [[1, "a"]],
        [["a"], [1, "a", 2]],
    ),
    "OpenAPI": (
        {"components": {"schemas": {"A": {"type": "string", "format": "byte", "deprecated": True}}}, "$ref": "#/components/schemas/A"},
        ["a"],
        [1],
    ),
    "recursion": (
        {
            "$defs": {"n": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "required": ["c"]}},
            "$ref": "#/$defs/n",
        },
        [{"c": [{"c": []}]}],
        [{"c": [1]}],
    ),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^S_": {"type": "string"}}, "additionalProperties": False},
        [{"S_a": "b"}],
        [{"a": "b"}],
    ),
    "a condition without branches": ({"type": "integer", "if": {"minimum": 3}}, [1], ["a"]),
    "required anyway": ({"type": "object", "dependentRequired": {"a": ["b"]}, "required": ["b"]}, [{"b": 1}], [{}]),
}


def accepts(schema: Any, values: list[Any], *, lark: bool = False) -> list[bool]:
    grammar = Grammar.lark(prepare_lark(f"start: %json {json.dumps(schema)}")) if lark else Grammar.json_schema(schema)
    begins = compiling.make_matcher(compiling.get_byte_tokenizer(), compiling.translate_grammar(grammar)[0])
    found = []
    for value in values:
        matcher, text = begins.deep_copy(), list(value if isinstance(value, bytes) else json.dumps(value).encode())
        found.append(matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting())
    return found


@pytest.mark.parametrize("lark", [False, True], ids=["schema", "lark"])
@pytest.mark.parametrize("name", HELD)
def test_what_libraries_write_is_held(name: str, lark: bool) -> None:
    schema, good, bad = HELD[name]
    assert accepts(schema, good, lark=lark) == [True] * len(good)
    assert accepts(schema, bad, lark=lark) == [False] * len(bad)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_held(name: str) -> None:
    assert accepts({"type": "string", "format": name}, ["x y!"]) == [False]


class Part(BaseModel):
    names: set[str]
    key: SecretStr = Field(default="x", deprecated=True)
    scores: dict[str, float] = {}


class Whole(RootModel[list[Part] | Part]):
    pass


def test_pydantics_models_are_held() -> None:
    value = {"names": ["a"], "key": "b", "scores": {"c": 1.5}}
    assert accepts(Whole.model_json_schema(), [value, [value], [{"names": "a"}]]) == [True, True, False]


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"a": {"not": {"type": "null"}}}}, "'not' at '#/properties/a'"),
        ({"if": {"type": "object"}, "then": {"required": ["a"]}}, "'if' at '#'"),
        ({"$defs": {"a": {"contains": {"type": "string"}}}}, "'contains' at '#/$defs/a'"),
        ({"anyOf": [{}, {"dependentRequired": {"a": ["b"]}}]}, "'dependentRequired' at '#/anyOf/1'"),
        ({"allOf": [{}], "unevaluatedProperties": False}, "'unevaluatedProperties' at '#'"),
        ({"$dynamicRef": "#a"}, "'$dynamicRef' at '#'"),
        ({"items": {"pattern": "(?=a)b"}}, "'pattern' at '#/items'"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"a": {}}}, "'propertyNames' at '#'"),
        ({"x-defs": {"a": {"not": {"const": 1}}}, "$ref": "#/x-defs/a"}, "'not' at '#/x-defs/a'"),
        (False, "Unsatisfiable"),
        ({"type": "nothing"}, "Invalid type"),
    ],
    ids=str,
)
def test_what_cannot_be_held_is_refused_by_name(schema: Any, told: str) -> None:
    with pytest.raises(GrammarError) as caught:
        accepts(schema, [])
    assert told in str(caught.value)


@pytest.mark.parametrize("lark", [False, True], ids=["schema", "lark"])
def test_a_schema_sets_no_options(lark: bool) -> None:
    inner = {"type": "object", "properties": {"x-guidance": {"$ref": "#/$defs/n"}, "b": {"type": "array", "items": {"type": "integer"}}}}
    schema = {**inner, "required": ["x-guidance", "b"], "$defs": {"n": {"type": "integer", **LENIENT}}, **LENIENT}
    good = [{"x-guidance": 3, "b": [1, 2]}, b'{"x-guidance":3,\n  "b": []}']
    bad = [{"b": [1]}, {"x-guidance": "a", "b": []}, b'{"x-guidance":3;"b":[]}', b'{"x-guidance":3,' + b" " * 30 + b'"b":[]}']
    assert accepts(schema, [*good, *bad], lark=lark) == [True, True, False, False, False, False]
    with pytest.raises(GrammarError, match="'not' at '#'"):
        accepts({"not": {"type": "string"}, **LENIENT}, [], lark=lark)


@pytest.mark.parametrize(("options", "may_skip"), [("{}", False), ('{"allow_initial_skip": true}', True)])
def test_lark_with_a_header(options: str, may_skip: bool) -> None:
    text = f'%llguidance {options}\n\nstart: "a" "b"\n%ignore " "'
    begins = compiling.make_matcher(compiling.get_byte_tokenizer(), compiling.translate_grammar(Grammar.lark(prepare_lark(text)))[0])
    taken = [begins.deep_copy().try_consume_tokens(list(given)) == len(given) for given in (b"a b", b" ab", b"c")]
    assert taken == [True, may_skip, False]


def test_lark_of_a_client() -> None:
    text = 'start: "%json {" /%json{1,2}/ x // %json {\nx: %json {"x-guidance": {}, "const": "a%json"} "b" # %llguidance'
    made = prepare_lark(text)
    assert made.count("x-guidance") == 1
    assert "whitespace_pattern" in made
    for options in ('{"allow_invalid_utf8": true}', '{"no_forcing": true}', '{"allow_initial_skip": true, "no_forcing": true}', "[]", "{"):
        with pytest.raises(GrammarError, match="%llguidance"):
            prepare_lark(f'%llguidance {options}\nstart: "a"')
    with pytest.raises(GrammarError, match="%json must be followed by a JSON schema"):
        prepare_lark("start: %json {")


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "string", "format": "password"},
        {"const": 3},
        True,
        {"enum": ["a", None]},
        {"type": "null", "nullable": True},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(st.sampled_from(["x-guidance", "format", "not", "if", "a"]), inner, min_size=1, max_size=3).map(
            lambda each: {"type": "object", "properties": each, "required": list(each), "additionalProperties": False, **LENIENT}
        )
        | inner.map(lambda each: {"type": "array", "items": each, "uniqueItems": True, "title": "t"})
        | st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each, "deprecated": True})
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(SCHEMAS, st.recursive(st.sampled_from([3, 4, "a", None]), lambda v: st.lists(v, max_size=2), max_leaves=3))
def test_a_prepared_schema_means_the_same(schema: Any, value: Any) -> None:
    before = json.dumps(schema)
    prepared = prepare_schema(schema)
    assert json.dumps(schema) == before
    plain = json.loads(before.replace('"uniqueItems": true', '"uniqueItems": false'))
    assert jsonschema_rs.is_valid(prepared, value) == jsonschema_rs.is_valid(plain, value)

"""The form of an answer, in every dialect and on every route: it is held, one is taken, and what is none is refused with its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from ngramspec.engine.llm_engine import Engine
from ngramspec.grammar.constraint import Grammar
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.request_fields import GenerationFields, read_grammar

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["circle", "square"]}, "sides": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "sides"],
    "additionalProperties": False,
}
NAMED = {"name": "shape", "schema": SCHEMA}


def is_shape(text: str) -> bool:
    made = json.loads(text)
    return made["kind"] in ("circle", "square") and 0 <= made["sides"] <= 99 and len(made) == 2


FORMS: list[tuple[dict[str, Any], Grammar, Callable[[str], object]]] = [
    ({"response_format": {"type": "json_schema", "json_schema": NAMED | {"strict": True}}}, Grammar.json_schema(SCHEMA), is_shape),
    ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, Grammar.json_schema(SCHEMA), is_shape),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar.json_schema(SCHEMA), is_shape),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA), is_shape),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar.json_schema(SCHEMA), is_shape),
    ({"structured_outputs": {"regex": "[ab]{2}-[0-9]"}}, Grammar.regex("[ab]{2}-[0-9]"), re.compile("[ab]{2}-[0-9]").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar.choice(["yes", "no"]), re.compile("yes|no").fullmatch),
    ({"structured_outputs": {"grammar": 'start: "x" /[yz]/'}}, Grammar.lark('start: "x" /[yz]/'), re.compile("x[yz]").fullmatch),
    ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA), is_shape),
    ({"guided_regex": "c{3}"}, Grammar.regex("c{3}"), re.compile("ccc").fullmatch),
    ({"guided_choice": ["a|b", "c"]}, Grammar.choice(["a|b", "c"]), re.compile(r"a\|b|c").fullmatch),
    ({"guided_grammar": 'root ::= "u" | "v"'}, Grammar.gbnf('root ::= "u" | "v"'), re.compile("u|v").fullmatch),
    ({"grammar": 'root ::= "u" "v"?'}, Grammar.gbnf('root ::= "u" "v"?'), re.compile("uv?").fullmatch),
    ({"json_schema": SCHEMA}, Grammar.json_schema(SCHEMA), is_shape),
]  # fmt: skip
ROUTES: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
    "/v1/completions": ({"prompt": "a shape: ", "max_tokens": 90}, lambda made: made["choices"][0]["text"]),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "a shape"}], "max_tokens": 90},
        lambda made: made["choices"][0]["message"]["content"],
    ),
    "/completion": ({"prompt": "a shape: ", "n_predict": 90}, lambda made: made["content"]),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("form", "grammar", "fits"), FORMS, ids=[f"{i}-{next(iter(form))}" for i, (form, _, _) in enumerate(FORMS)])
def test_every_form_is_held_on_every_route(
    client: httpx.Client, route: str, form: dict[str, Any], grammar: Grammar, fits: Callable[[str], object]
) -> None:
    body, text = ROUTES[route]
    answer = client.post(route, json=body | {"temperature": 0, "seed": 1} | form)
    assert answer.status_code == 200, answer.text
    assert fits(text(answer.json()))
    found = read_grammar(GenerationFields.model_validate(form))
    assert found is not None
    assert found[1] == grammar


def test_what_asks_for_nothing(client: httpx.Client, engine: Engine) -> None:
    free = engine.complete([ord("a")], SamplingParams(max_tokens=5)).text
    for nothing in (
        {"response_format": {"type": "text"}},
        {"grammar": ""},
        {"json_schema": {}},
        {"structured_outputs": {}},
        {"guided_json": None},
    ):
        made = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "temperature": 0, **nothing})
        assert made.json()["choices"][0]["text"] == free


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": 3}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "grammar": 'root ::= "a"'}, "grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_whitespace_pattern": "[ ]?", "guided_json": SCHEMA}, "guided_whitespace_pattern"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": 1}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "nonsense"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"json_schema": {"$ref": "#"}}, "json_schema"),
    ],
)
def test_what_is_refused(client: httpx.Client, route: str, wrong: dict[str, Any], param: str) -> None:
    answer = client.post(route, json=ROUTES[route][0] | wrong)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


LENIENT = {"x-guidance": {"lenient": True, "whitespace_pattern": "_+", "item_separator": ";"}}
HARMLESS = {
    "type": "object",
    "allOf": [{"properties": {"kind": {"enum": ["a", "b"], "format": "password", **LENIENT}}}],
    "properties": {"kind": {"type": "string"}, **{f"at{i}": {"type": "string", "format": "date-time", "title": "t"} for i in range(7)}},
    "required": ["kind"],
    "additionalProperties": False,
    **LENIENT,
}


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": HARMLESS}}},
        {"response_format": {"type": "json_object", "schema": HARMLESS}},
        {"structured_outputs": {"json": HARMLESS}},
        {"guided_json": json.dumps(HARMLESS)},
        {"json_schema": HARMLESS},
        {"guided_grammar": f"start: %json {json.dumps(HARMLESS)}"},
    ],
    ids=lambda form: json.dumps(form)[:30],
)
def test_annotations_and_foreign_options_in_a_schema_change_nothing(client: httpx.Client, form: dict[str, Any]) -> None:
    bias = {str(ord(char)): bias for char, bias in {" ": -100, "\n": -100, ",": -100, "_": 50, ";": 50}.items()}
    asked = {"prompt": "a", "max_tokens": 90, "temperature": 0, "logit_bias": bias}
    answer = client.post("/v1/completions", json=asked | form)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.json()["choices"][0]["text"])["kind"] in ("a", "b")


@pytest.mark.parametrize("schema", [True, {}, {"title": "anything"}])
def test_a_schema_of_everything(client: httpx.Client, schema: Any) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "logit_bias": {str(ord("7")): 90}} | form)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].startswith("7")


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ("root ::= .{3}", ".{3}"),
        ('root ::= "a&&b" # &&&&&&&', "a&&b"),
        (r'root ::= "caf\u00e9"', "caf\u00e9"),
        (r"root ::= [\u00e0-\u00ff]", "[\u00e0-\u00ff]"),
        ('root ::= start "c"\nstart ::= "s"', "sc"),
        ('root ::= [a-b]+ "b" "c"', "[ab]+bc"),
    ],
)
def test_gbnf_means_what_it_means_to_llama_cpp(client: httpx.Client, grammar: str, fits: str) -> None:
    for form in ({"grammar": grammar}, {"guided_grammar": grammar}, {"structured_outputs": {"grammar": grammar}}):
        bias = {str(ord("b")): 6, str(ord("c")): 6}
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 60, "seed": 2, "logit_bias": bias} | form)
        assert answer.status_code == 200, answer.text
        assert re.compile(fits, re.DOTALL).fullmatch(answer.json()["choices"][0]["text"]) or "\ufffd" in answer.text


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ({"guided_choice": ["q" + "yx" * 100_000]}, "at most 16384 bytes in a row may be without a choice, got 200001"),
        ({"guided_choice": ["a", "q" + "yx" * 10_000]}, "16384"),
        ({"guided_json": {"const": "yx" * 10_000}}, "16384"),
        ({"guided_regex": "[bc](a{1000}){30}"}, "16384"),
        ({"guided_json": {"not": {"const": 1}}}, "'not' at '#'"),
        ({"guided_grammar": 'root ::= "a" |\n "b" &'}, "line 2, column 6"),
        ({"guided_grammar": '%llguidance {"no_forcing": true}\nstart: "a"'}, "options of %llguidance"),
    ],
)
def test_why_it_is_refused(client: httpx.Client, form: dict[str, Any], told: str) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a"} | form)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == next(iter(form))
    assert told in answer.json()["error"]["message"]


def test_a_ban_of_all_that_may_come_is_the_clients_error(client: httpx.Client) -> None:
    answer = client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 3, "guided_choice": ["x"], "logit_bias": {str(ord("x")): -100}}
    )
    assert answer.status_code == 400


class Shape(BaseModel):
    kind: str
    sides: int


def test_openais_client_parses_and_streams(server: Any) -> None:
    api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "a shape"}]
    form: Any = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA, "strict": True}}
    made = api.chat.completions.create(model=server.engine.name, messages=messages, max_tokens=90, temperature=0, response_format=form)
    stream = api.chat.completions.create(
        model=server.engine.name, messages=messages, max_tokens=90, temperature=0, response_format=form, stream=True
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices) == made.choices[0].message.content
    form["json_schema"]["schema"] = Shape.model_json_schema()
    parsed = api.chat.completions.parse(
        model=server.engine.name, messages=messages, max_tokens=400, temperature=0, response_format=Shape, logit_bias={str(ord('"')): 60}
    )
    assert isinstance(parsed.choices[0].message.parsed, Shape)

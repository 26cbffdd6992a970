"""Hostile grammars: whatever a request asks for is answered soon with 200 or 400."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fair_time import assert_within
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tiny_server import routes_of

from ngramspec.engine.llm_engine import Engine
from ngramspec.grammar import compiler_pool

CPU_S = compiler_pool.TIMEOUT_S + 2
"""Of the process, which compiles again what was tried in time; of the wall's clock it would be no less when the machine is busy."""
QUIET = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def client(fim_engine: Engine) -> Iterator[TestClient]:
    with routes_of(fim_engine) as client:
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "guided_regex": "a+"})  # compiles what a first request does
        yield client


def ask(client: TestClient, **form: Any) -> None:
    before = time.process_time()
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "temperature": 1.0} | form)
    took = time.process_time() - before
    assert answer.status_code in (200, 400), answer.text
    assert took < CPU_S, (took, form)


COUNTS = st.sampled_from([0, 1, 2, 7, 100, 1000, 65_535, 10**6, 2**31, 10**20, -1])
ATOMS = st.sampled_from(["a", "b", ".", "[a-z]", r"\d", r"\p{L}", "[^x]", "", "^", "$", r"\1", "(?=a)", "é", r"\u1234", "(?i:s)"])


def _repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    bounds = st.tuples(COUNTS, COUNTS).map(lambda b: f"{{{b[0]},{b[1]}}}")
    suffix = st.sampled_from(["*", "+", "?", "*?", "{2}", "{,3}"]) | bounds | COUNTS.map(lambda n: f"{{{n}}}")
    one = st.tuples(inner, suffix).map(lambda p: f"({p[0]}){p[1]}")
    several = st.lists(inner, min_size=1, max_size=5)
    return one | several.map("|".join) | several.map("".join)


REGEX = st.recursive(ATOMS, _repeated, max_leaves=12)
LEAVES = (
    st.sampled_from([True, False, {}, {"type": "string"}, {"type": "number", "multipleOf": 0.0001}, {"$ref": "#"}, {"$ref": "#/$defs/x"}])
    | st.sampled_from([{"format": "date-time"}, {"format": "nothing"}, {"type": "nothing"}, {"const": "a" * 3000}, {"not": {}}])
    | REGEX.map(lambda pattern: {"type": "string", "pattern": pattern})
    | st.tuples(COUNTS, COUNTS).map(lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]})
    | st.tuples(COUNTS, COUNTS).map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[1], "multipleOf": 7})
    | st.integers(1, 3000).map(lambda n: {"enum": [f"{i}" * 5 for i in range(n)]})
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=6)
    objects = several.map(lambda each: {"type": "object", "properties": {f"p{i}": schema for i, schema in enumerate(each)}})
    arrays = st.tuples(inner, COUNTS, COUNTS).map(lambda b: {"type": "array", "items": b[0], "minItems": b[1], "maxItems": b[2]})
    mixed = st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf", "prefixItems"]), several).map(lambda b: {b[0]: b[1]})
    named = st.tuples(REGEX, inner).map(lambda b: {"type": "object", "patternProperties": {b[0]: b[1]}})
    counted = st.tuples(inner, COUNTS, COUNTS).map(lambda b: {"additionalProperties": b[0], "minProperties": b[1], "maxProperties": b[2]})
    return objects | arrays | mixed | named | counted | inner.map(lambda schema: {"$defs": {"x": schema}, "$ref": "#/$defs/x"})


def deep(schema: Any, times: int, name: str) -> Any:
    for _ in range(times):
        schema = {name: [schema, schema]} if name != "items" else {"type": "array", "items": schema}
    return schema


@QUIET
@given(st.recursive(LEAVES, _nested, max_leaves=15))
@example(deep({"type": "string"}, 14, "anyOf"))
@example(deep({"type": "integer"}, 10, "allOf"))
@example(deep({"type": "integer"}, 10, "oneOf"))
@example(deep({}, 200, "items"))
@example({"allOf": [{"pattern": f".*{letter}.*"} for letter in "abcdef"]})
@example({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})
@example({"type": "integer", "multipleOf": 65_537_000})
@example({"patternProperties": {f"^x{i}y": {"type": "integer", "minimum": i} for i in range(300)}})
@example({"type": "array", "items": {"type": "array", "items": {}, "minItems": 1000}, "minItems": 1000})
@example({"type": "array", "items": {"$ref": "#"}, "minItems": 1, "maxItems": 1})
def test_schemas(client: TestClient, schema: Any) -> None:
    ask(client, guided_json=schema)


@QUIET
@given(REGEX)
@example("((a{0,100}){0,100}){0,100}")
@example("(((((a*)*)*)*)*)*b")
@example("(.*a){40}")
@example("(a|b|ab)*c" * 20)
@example(".*a.{30}")
@example("(x+x+)+y")
@example("(" * 3000 + "a" + ")" * 3000)
def test_regular_expressions(client: TestClient, pattern: str) -> None:
    ask(client, guided_regex=pattern)


NAMES = st.sampled_from(["root", "start", "x", "y", "X", "Y"])
TERMS = NAMES | st.sampled_from(['"a"', '"b"i', "[a-z]", "/a+/", "/.*/", "/(a|b)*c/", '""', "%json {}", "%regex {}", "<eos>", "<[1]>"])
BODIES = st.recursive(
    TERMS,
    lambda inner: (
        st.tuples(st.lists(inner, min_size=1, max_size=4), st.sampled_from([" ", " | ", " & "])).map(lambda b: b[1].join(b[0]))
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2,1000}", "{100000}", "~2..300", "~"])).map(lambda b: f"({b[0]}){b[1]}")
    ),
    max_leaves=12,
)
RULES = st.lists(st.tuples(NAMES, BODIES), min_size=1, max_size=8)


@QUIET
@given(RULES)
@example([("start", "x"), ("x", "x x | x x x | /a*/ |")])
@example([("start", "/(.*a){30}/ & /(.*b){30}/ & /(.*c){30}/")])
@example([("start", "~(/.*a.{20}/)")])
def test_lark(client: TestClient, rules: list[tuple[str, str]]) -> None:
    ask(client, guided_grammar="start: x\n" + "\n".join(f"{name}: {body}" for name, body in rules))


@QUIET
@given(RULES)
@example([("root", "root root | root |")])
@example([("root", '("a" | "a")* ("a" | "a")* ("a" | "a")*')])
@example([("root", "((([a-z]{1000}){1000}){1000}){1000}")])
def test_gbnf(client: TestClient, rules: list[tuple[str, str]]) -> None:
    ask(client, grammar="root ::= x\n" + "\n".join(f"{name} ::= {body}" for name, body in rules))


def test_others_are_answered_while_every_place_is_taken(fim_engine: Engine) -> None:
    """By grammars that compile for ever, with more of them waiting."""
    endless = [
        {"anyOf": [{"type": "integer", "multipleOf": 65_537 + 2 * j} for j in range(100 + i)]} for i in range(compiler_pool.N_PROCESSES + 2)
    ]
    answers, threads = [], list[threading.Thread]()
    with routes_of(fim_engine) as client:
        ask = functools.partial(client.post, "/v1/completions")

        def take_every_place() -> None:
            for schema in endless:
                threads.append(threading.Thread(target=lambda s=schema: answers.append(ask(json={"prompt": "a", "guided_json": s}))))
                threads[-1].start()

        def ask_others() -> None:
            assert ask(json={"prompt": "a", "max_tokens": 2, "guided_json": {"const": "a"}}).status_code == 200
            assert ask(json={"prompt": "a", "max_tokens": 2}).status_code == 200

        assert_within(len(endless) * compiler_pool.TIMEOUT_S / compiler_pool.N_PROCESSES + 1, ask_others, first=take_every_place)
        for thread in threads:
            thread.join()
    assert all(answer.status_code == 400 and "a smaller one may do" in answer.text for answer in answers)
    assert len(answers) == len(threads)

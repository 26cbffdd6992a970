"""Arguments of calls that a model writes and JSON as an answer has it cannot say, on the routes that answer with them as values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_core import to_json
from test_tools import MESSAGES, TOOLS, calling_engine
from tiny_server import routes_of

from ngramspec.server.openai.handler import read_arguments

FLAT = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (r'{"a": "x\ud800y", "b": 1}', {"a": "x\ufffdy", "b": 1}),
        (r'{"\udc00": 1}', {"\ufffd": 1}),
        (r'{"a": "\ud83d\ude00 \\ud800"}', {"a": "\N{GRINNING FACE} \\ud800"}),
        ('{"a": 1e999, "b": [-1e999, 1.5]}', {"a": None, "b": [None, 1.5]}),
        ('{"a": NaN, "b": -Infinity, "c": 2}', {"a": None, "b": None, "c": 2}),
    ],
)
def test_every_answer_is_json(written: str, value: Any) -> None:
    with calling_engine(f'<tool_call>{{"name": "time", "arguments": {written}}}</tool_call>') as engine, routes_of(engine) as client:
        asked = {"model": "a", "messages": MESSAGES, "temperature": 0, "options": {"temperature": 0}}
        answer = client.post("/v1/messages", json=asked | {"tools": FLAT, "max_tokens": 400})
        assert answer.status_code == 200, answer.text
        found = [next(block["input"] for block in answer.json()["content"] if block["type"] == "tool_use")]
        for stream in (False, True):
            answer = client.post("/api/chat", json=asked | {"tools": TOOLS, "stream": stream})
            assert answer.status_code == 200, answer.text
            lines = [json.loads(line, parse_constant=refuse_constant) for line in answer.text.splitlines()]
            calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
            found.append(calls[0]["function"]["arguments"])
        assert found == [value] * 3


@pytest.mark.parametrize("depth", [100, 300, 5000])
def test_nested_arguments_can_be_answered(depth: int) -> None:
    found = read_arguments('{"a": ' + "[" * depth + "]" * depth + "}")
    assert list(found) == (["a"] if depth == 100 else [])
    to_json({"content": [{"input": found}]})  # as answers are written

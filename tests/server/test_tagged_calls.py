"""Calls that are keys and values between tags, as Qwen3-Coder writes them, in each dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from starlette.testclient import TestClient
from tiny_server import routes_of, tiny_engine

CALL = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
    + CALL.replace("\n", "{{ '\\n' }}")
    + "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2]}, "exact": {"type": "boolean"}},
    "required": ["city", "days", "exact"],
}
NAMED = {"name": "weather", "description": "a forecast"}
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with tiny_engine(tokenizer=tokenizer) as engine, routes_of(engine) as client:
        yield client


def post(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json={"temperature": 1.0, "seed": 3} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def check(name: str, arguments: dict[str, Any]) -> None:
    assert name == "weather"
    assert set(arguments) == {"city", "days", "exact"}
    assert isinstance(arguments["city"], str)
    assert len(arguments["city"]) <= 9
    assert arguments["days"] in (1, 2)
    assert isinstance(arguments["exact"], bool)


def test_a_call_that_must_be_made_fits_its_schema_in_each_dialect(client: TestClient) -> None:
    function = {"type": "function", "function": NAMED | {"parameters": SCHEMA}}
    body: dict[str, Any] = {"messages": MESSAGES, "tools": [function], "tool_choice": "required", "max_tokens": 250}
    choice = post(client, "/v1/chat/completions", body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    check(call["function"]["name"], json.loads(call["function"]["arguments"]))

    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True, "temperature": 1.0, "seed": 3}) as answer:
        lines = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]
    deltas = [each["function"]["arguments"] for line in lines for each in line["choices"][0]["delta"].get("tool_calls") or ()]
    assert "".join(deltas) == call["function"]["arguments"]

    body = {"messages": MESSAGES, "tools": [NAMED | {"input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "max_tokens": 250}
    (block,) = post(client, "/v1/messages", body)["content"]
    check(block["name"], block["input"])

    body = {"input": "a", "tools": [{"type": "function", "parameters": SCHEMA} | NAMED], "tool_choice": "required"}
    (item,) = post(client, "/v1/responses", body | {"max_output_tokens": 250})["output"]
    check(item["name"], json.loads(item["arguments"]))


def test_a_conversation_goes_on_after_a_call_in_each_dialect(client: TestClient) -> None:
    function = {"type": "function", "function": NAMED | {"parameters": SCHEMA}}
    made = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "x y", "days": 2}'}}
    asked = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    ]
    shown = client.post("/apply-template", json={"messages": asked, "tools": [function]}).json()["prompt"]
    call = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nx y\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    assert shown.endswith(f"[user]a[assistant]{call}[tool]sun[assistant]")
    asked[1]["tool_calls"][0]["function"] = {"name": "weather", "arguments": {"city": "x y", "days": 2}}
    body = {"model": "", "messages": asked, "tools": [function], "stream": False, "options": {"num_predict": 3}}
    answer = client.post("/api/chat", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["prompt_eval_count"] == len(shown)

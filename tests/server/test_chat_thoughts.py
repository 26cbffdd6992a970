"""Thoughts that a model writes before its answer: `reasoning_content` in chats, whole and streamed, and in a conversation's history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from scripted import reciting_engine
from starlette.testclient import TestClient
from tiny_server import routes_of

from ngramspec.engine.llm_engine import Engine

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% if think is defined %}<think>\n{% endif %}{% endif %}{# </think> #}"
)
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60, "temperature": 0}
THOUGHTS, SAID = "One and one.", "It is 2."


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A model that writes thoughts and an answer after `[user]a>`."""
    tokenizer = tiny.byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    engine, _ = reciting_engine("-" * len("[user]a>") + f"<think>\n{THOUGHTS}\n</think>\n\n{SAID}", tokenizer)
    with engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with routes_of(engine) as client:
        yield client


def ask(client: TestClient, **fields: Any) -> tuple[str | None, str, dict[str, Any]]:
    """Return thoughts, text and usage of an answer; those of its stream are the same."""
    whole = client.post(PATH, json=ASKED | fields).json()
    message = whole["choices"][0]["message"]
    assert message.get("reasoning") == message.get("reasoning_content")
    with client.stream("POST", PATH, json=ASKED | fields | {"stream": True, "stream_options": {"include_usage": True}}) as answer:
        chunks = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == (message.get("reasoning_content") or "")
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    details = [usage.get("completion_tokens_details") for usage in (whole["usage"], chunks[-1]["usage"])]
    assert details[0] == details[1]
    return message.get("reasoning_content"), message["content"], whole["usage"]


def test_thoughts_are_told_apart(client: TestClient) -> None:
    thoughts, said, usage = ask(client)
    assert (thoughts, said) == (THOUGHTS, SAID)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(f"<think>\n{THOUGHTS}\n</think>")


def test_thoughts_are_left_out(client: TestClient) -> None:
    thoughts, said, usage = ask(client, include_reasoning=False)
    assert (thoughts, said) == (None, SAID)
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


def test_thoughts_stay_in_the_text(client: TestClient, engine: Engine) -> None:
    whole = f"<think>\n{THOUGHTS}\n</think>\n\n{SAID}"
    assert ask(client, reasoning_format="none")[:2] == (None, whole)
    with routes_of(engine, reasoning_format="none") as other:
        assert ask(other)[:2] == (None, whole)
        assert ask(other, reasoning_format="deepseek")[:2] == (THOUGHTS, SAID)


def test_an_answer_that_is_cut_has_thoughts_alone(client: TestClient) -> None:
    thoughts, said, _ = ask(client, max_tokens=len("<think>\nOne"))
    assert (thoughts, said) == ("One", "")


def test_thoughts_that_the_prompt_begins(client: TestClient) -> None:
    # this prompt is as long as the other one with the mark, so the model writes what stands after it
    thoughts, said, _ = ask(client, chat_template_kwargs={"think": True})
    assert (thoughts, said) == (THOUGHTS, SAID)


def test_a_form_leaves_no_room_for_thoughts(client: TestClient) -> None:
    thoughts, said, _ = ask(client, structured_outputs={"choice": ["<think>", "no"]}, chat_template_kwargs={"think": True})
    assert thoughts is None
    assert said in ("<think>", "no")


def test_earlier_thoughts_are_shown_to_the_template(client: TestClient) -> None:
    for name in ("reasoning_content", "reasoning"):
        messages = [ASKED["messages"][0], {"role": "assistant", "content": "b", name: "hm"}, ASKED["messages"][0]]
        assert client.post("/apply-template", json={"messages": messages}).json()["prompt"] == "[user]a[assistant](hm)b[user]a>"
    ignored = [{"role": "user", "content": "a", "reasoning_content": "hm"}]
    assert client.post("/apply-template", json={"messages": ignored}).json()["prompt"] == "[user]a>"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_format": "other"},
        {"reasoning_format": 1},
        {"include_reasoning": "yes"},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": ["a"]}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning": {"a": 1}}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "x" * 100_000}]},
    ],
)
def test_what_cannot_be_is_refused(client: TestClient, fields: dict[str, Any]) -> None:
    assert client.post(PATH, json=ASKED | fields).status_code == 400


def test_marks_that_a_client_sends_as_thoughts_open_nothing(client: TestClient) -> None:
    messages = [{"role": "assistant", "content": "b", "reasoning_content": "<think>\n"}, ASKED["messages"][0]]
    answer = client.post(PATH, json=ASKED | {"messages": messages, "max_tokens": 3})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["reasoning_content"] is None

"""Thoughts that a model writes before its answer, in each dialect: whole and streamed, and in a conversation's history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from scripted import reciting_engine
from starlette.testclient import TestClient
from tiny_server import routes_of

from ngramspec import Grammar, InvalidInputError
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


# ---------------------------------------------------------------------- the other dialects


def read_events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a stream: of events, or of lines."""
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_items_of_responses(client: TestClient) -> None:
    body = {"input": "a", "max_output_tokens": 60, "temperature": 0, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.post("/v1/responses", json=body).json()
    thoughts, message = whole["output"]
    assert (thoughts["type"], thoughts["summary"], thoughts["status"]) == ("reasoning", [], "completed")
    assert thoughts["content"] == [{"type": "reasoning_text", "text": THOUGHTS}]
    (part,) = message["content"]
    assert part["text"] == SAID
    assert [each["token"] for each in part["logprobs"]][-len(SAID) :] == list(SAID)
    assert all(len(each["top_logprobs"]) == 2 for each in part["logprobs"])
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len(f"<think>\n{THOUGHTS}\n</think>")
    events = read_events(client, "/v1/responses", body)
    assert "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta") == THOUGHTS
    told = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in told) == SAID
    assert [each for event in told for each in event["logprobs"]] == part["logprobs"]
    streamed = events[-1]["response"]
    assert [item["content"] for item in streamed["output"]] == [thoughts["content"], [part]]
    assert streamed["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]
    started = [event["item"]["type"] for event in events if event["type"] == "response.output_item.added"]
    ended = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert started == ended == ["reasoning", "message"]


def test_thoughts_of_a_response_go_on(client: TestClient) -> None:
    """A stored response's, or those that a client sends back, stand before what the assistant said after them."""
    first = client.post("/v1/responses", json={"input": "a", "max_output_tokens": 60, "temperature": 0}).json()
    asked = {"max_output_tokens": 1, "enable_response_messages": True}
    stored = client.post("/v1/responses", json=asked | {"previous_response_id": first["id"], "input": "c"}).json()
    given = [{"role": "user", "content": "a"}, *first["output"], {"role": "user", "content": "c"}]
    sent = client.post("/v1/responses", json=asked | {"input": given}).json()
    expected = f"[user]a[assistant]({THOUGHTS}){SAID}[user]c>"
    for made in (stored, sent):
        assert made["input_messages"][0]["message"] == expected
        assert made["output_messages"][0]["type"] == "raw_message_tokens"
    summary = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"}
    shown = client.post("/v1/responses", json=asked | {"input": [summary, {"role": "assistant", "content": "b"}, given[0], summary]}).json()
    assert shown["input_messages"][0]["message"] == "[assistant](hm)b[user]a>"


def test_a_response_that_is_cut_has_thoughts_alone(client: TestClient) -> None:
    made = client.post("/v1/responses", json={"input": "a", "max_output_tokens": len("<think>\nOne"), "temperature": 0}).json()
    assert made["status"] == "incomplete"
    assert [(item["type"], item["status"]) for item in made["output"]] == [("reasoning", "incomplete")]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_thinking_of_ollama(client: TestClient, path: str) -> None:
    asked = {"messages": ASKED["messages"]} if path == "/api/chat" else {"prompt": "a"}
    body = asked | {"model": "m", "options": {"temperature": 0, "num_predict": 60}}

    def read(answer: dict[str, Any]) -> tuple[str, str]:
        said = answer.get("message", answer)
        return said.get("thinking", ""), said["content" if path == "/api/chat" else "response"]

    for think, expected in ((None, THOUGHTS), (True, THOUGHTS), (False, "")):
        given = body | {"think": think}
        assert read(client.post(path, json=given | {"stream": False}).json()) == (expected, SAID)
        pieces = [read(event) for event in read_events(client, path, given)]
        assert "".join(thoughts for thoughts, _ in pieces) == expected
        assert "".join(said for _, said in pieces) == SAID
        assert all(any(piece) for piece in pieces[:-1])
    assert "thinking" in client.post("/api/show", json={"model": "m"}).json()["capabilities"]


def test_thinking_blocks(client: TestClient) -> None:
    body = {"model": "m", "messages": ASKED["messages"], "max_tokens": 60, "temperature": 0}
    blocks = client.post("/v1/messages", json=body).json()["content"]
    assert blocks == [{"type": "thinking", "thinking": THOUGHTS, "signature": ""}, {"type": "text", "text": SAID}]
    events = read_events(client, "/v1/messages", body)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHTS
    assert "".join(delta.get("text", "") for delta in deltas) == SAID
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]


def test_a_setting_leaves_thoughts_in_every_text(engine: Engine) -> None:
    whole = f"<think>\n{THOUGHTS}\n</think>\n\n{SAID}"
    with routes_of(engine, reasoning_format="none") as client:
        made = client.post("/v1/responses", json={"input": "a", "max_output_tokens": 60, "temperature": 0}).json()
        assert [part["text"] for item in made["output"] for part in item["content"]] == [whole]
        asked = {"model": "m", "messages": ASKED["messages"], "options": {"temperature": 0, "num_predict": 60}, "stream": False}
        assert client.post("/api/chat", json=asked).json()["message"] == {"role": "assistant", "content": whole}


def test_thoughts_in_python(engine: Engine) -> None:
    reply = engine.chat(ASKED["messages"], max_tokens=60)
    assert (reply.thoughts, reply.content) == (THOUGHTS, SAID)
    pieces = list(engine.stream_chat(ASKED["messages"], max_tokens=60))
    assert "".join(piece.thoughts for piece in pieces) == THOUGHTS
    assert "".join(piece.text for piece in pieces) == SAID
    assert pieces[-1].reply is not None
    assert pieces[-1].reply.message == reply.message
    again = engine.chat([*ASKED["messages"], reply.message, *ASKED["messages"]], max_tokens=1)
    prompt = engine.tokenizer.decode(again.completion.prompt_token_ids)
    assert prompt == f"[user]a[assistant]({THOUGHTS}){SAID}[user]a>"
    held = engine.chat(ASKED["messages"], max_tokens=9, grammar=Grammar.choice(["<think>", "no"]))
    assert held.thoughts == ""
    for wrong in (1, ["a"], {"a": 1}):
        with pytest.raises(InvalidInputError, match="reasoning_content"):
            engine.chat([*ASKED["messages"], {"role": "assistant", "content": "b", "reasoning_content": wrong}], max_tokens=1)

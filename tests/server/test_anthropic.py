"""Anthropic's routes: messages, tools and their results as Anthropic's SDKs and Claude Code send them, answers whole and event by event."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from test_tools import SHAPE, TIME, check
from tiny_server import Server

from ngramspec.prompts.tool_calls.tool_prompt import Call, Turn
from ngramspec.server.anthropic.schemas import CountTokensRequest
from ngramspec.server.settings import Key, ServerSettings

FLAT = [{"name": "draw", "description": "a draw", "input_schema": SHAPE}, {"name": "time", "description": "a time", "input_schema": TIME}]
ASKED: dict[str, Any] = {"model": "claude", "max_tokens": 16, "temperature": 0}
DRAW = [{"role": "user", "content": "draw"}]
EPHEMERAL = {"type": "ephemeral"}
CLAUDE_CODE: dict[str, Any] = {  # Claude Code 2.1.197, `claude -p`: a request behind its first call, shortened
    "model": "claude-opus-4-8",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1c6; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are a coding assistant.", "cache_control": EPHEMERAL},
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "<reminder>today</reminder>"}, {"type": "text", "text": "fix"}],
        },
        {"role": "system", "content": "Available agents: none."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": "abc"},
                {"type": "text", "text": "Reading."},
                {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/a.py"}, "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1\tdef a", "is_error": False, "cache_control": EPHEMERAL},
                {"type": "text", "text": "go on"},
            ],
        },
    ],
    "tools": [
        {"name": "Read", "description": "Reads.", "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}}},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "{}"},
    "max_tokens": 64000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}
CLAUDE_CODE_AS_CHAT: list[Any] = [
    {"role": "system", "content": "You are a coding assistant."},
    {"role": "user", "content": "<reminder>today</reminder>\nfix"},
    {"role": "system", "content": "Available agents: none."},
    {
        "role": "assistant",
        "content": "Reading.",
        "tool_calls": [{"id": "toolu_1", "type": "function", "function": {"name": "Read", "arguments": '{"file_path": "/a.py"}'}}],
    },
    {"role": "tool", "tool_call_id": "toolu_1", "content": "1\tdef a"},
    {"role": "user", "content": "go on"},
]


def read_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, each named as its data's type says."""
    assert answer.status_code == 200, answer.text
    events = []
    for event in answer.text.strip().split("\n\n"):
        name, data = event.splitlines()
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def assemble(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that the events of a stream tell of, as Anthropic's SDK puts it together."""
    message: dict[str, Any] = {}
    pieces = ""
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                pieces = ""
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                else:
                    assert delta["type"] == "input_json_delta"
                    pieces += delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == len(message["content"]) - 1
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(pieces or "{}")
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case other:
                assert other == "message_stop"
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def drop_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return message | {"id": "", "content": content, "usage": (count_prompt(message), message["usage"]["output_tokens"])}


def count_prompt(message: dict[str, Any]) -> int:
    """Return the tokens of the prompt, read from the prefix cache, written to it, or neither."""
    return sum(message["usage"][f"{name}input_tokens"] for name in ("", "cache_creation_", "cache_read_"))


def test_a_text_is_that_of_a_chat(client: httpx.Client, server: Server) -> None:
    given = ASKED | {"messages": [{"role": "user", "content": "hello"}], "system": "Be brief.", "metadata": {"user_id": "a"}}
    made = client.post("/v1/messages", json=given, headers={"anthropic-version": "2023-06-01"}).json()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    like = client.post("/v1/chat/completions", json={"messages": chat, "max_tokens": 16, "temperature": 0}).json()
    assert made["content"] == [{"type": "text", "text": like["choices"][0]["message"]["content"]}]
    assert (made["type"], made["role"], made["model"]) == ("message", "assistant", server.engine.name)
    assert count_prompt(made) == like["usage"]["prompt_tokens"]
    assert made["usage"]["output_tokens"] == like["usage"]["completion_tokens"]
    assert made["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[like["choices"][0]["finish_reason"]]
    stream = assemble(read_events(client.post("/v1/messages", json=given | {"stream": True})))
    assert drop_ids(stream) == drop_ids(made)
    counted = client.post("/v1/messages/count_tokens", json={"model": "a", "messages": given["messages"], "system": "Be brief."})
    assert counted.json() == {"input_tokens": like["usage"]["prompt_tokens"]}


def test_claude_code_is_answered(client: httpx.Client) -> None:
    """The billing header and the chain of thought are no part of the prompt; more tokens than fit are as many as do."""
    stops = {"stop_sequences": [chr(c) for c in range(32, 48)]}
    message = assemble(read_events(client.post("/v1/messages?beta=true", json=CLAUDE_CODE | stops)))
    tool = CLAUDE_CODE["tools"][0]
    function = {"name": "Read", "description": "Reads.", "parameters": tool["input_schema"]}
    asked = {"messages": CLAUDE_CODE_AS_CHAT, "tools": [{"type": "function", "function": function}], "max_tokens": 1}
    like = client.post("/v1/chat/completions", json=asked).json()
    assert count_prompt(message) == like["usage"]["prompt_tokens"]
    assert message["usage"]["cache_creation_input_tokens"] > 0
    counted = client.post("/v1/messages/count_tokens?beta=true", json=CLAUDE_CODE).json()
    assert counted["input_tokens"] == like["usage"]["prompt_tokens"]


CRON = {"name": "CronList", "description": "Lists jobs.", "input_schema": {"type": "object", "properties": {}}}
FOUND: list[Any] = [  # Claude Code 2.1.332: its model has searched a tool, shortened
    {"role": "user", "content": [{"type": "text", "text": "list the jobs"}]},
    {"role": "system", "content": [{"type": "text", "text": "Deferred tools: CronList", "cache_control": EPHEMERAL}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "select:CronList"}}]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "tool_reference", "tool_name": "CronList"}]}
    ]},
]  # fmt: skip
BY_NAME = {"type": "tool_reference", "name": "CronList"}


def test_tools_are_loaded_by_the_conversation(client: httpx.Client) -> None:
    """A deferred tool is no part of the prompt and cannot be called until a block refers to it; what was before stays as it was."""
    search = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
    placeholder = {"name": "DeferredToolPlaceholder", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True}
    given: dict[str, Any] = {"tools": [search, CRON | {"defer_loading": True}, placeholder], "max_tokens": 60, "temperature": 0}

    def count(messages: list[Any], tools: list[Any]) -> int:
        counted = client.post("/v1/messages/count_tokens", json={"messages": messages, "tools": tools})
        assert counted.status_code == 200, counted.text
        return int(counted.json()["input_tokens"])

    def call(messages: list[Any], tools: list[Any] = given["tools"]) -> httpx.Response:
        choice = {"type": "tool", "name": "CronList"}
        return client.post("/v1/messages", json=given | {"messages": messages, "tools": tools, "tool_choice": choice})

    assert count(FOUND[:3], given["tools"]) == count(FOUND[:3], [search])
    servers = [CRON | {"name": f"mcp__server__tool_{i}", "defer_loading": True} for i in range(1000)]  # far more than a prompt can hold
    assert count(FOUND[:3], [search, *servers]) == count(FOUND[:3], [search])
    assert "no tool 'CronList'" in call(FOUND[:2]).text
    described = {"type": "function", "function": {"name": "CronList", "description": "Lists jobs.", "parameters": CRON["input_schema"]}}
    text = f"These functions can be called from now on:\n{json.dumps(described)}"
    told = [*FOUND[:3], {"role": "user", "content": [FOUND[3]["content"][0] | {"content": text}]}]
    assert count(FOUND, given["tools"]) == count(told, [search])
    assert call(FOUND).json()["content"][0]["name"] == "CronList"
    for tool, tools in ((BY_NAME, given["tools"]), ({"type": "tool_definition", "definition": CRON}, [search])):
        added = [*FOUND[:1], {"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}, FOUND[0]]
        assert count(added, tools) == count([added[0], {"role": "system", "content": text}, FOUND[0]], [search])
        assert call(added, tools).json()["content"][0]["name"] == "CronList"
        removed = [*added, {"role": "system", "content": [{"type": "tool_removal", "tool": BY_NAME}]}, FOUND[0]]
        assert "no tool 'CronList'" in call(removed, tools).text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "time", "disable_parallel_tool_use": True}])
def test_calls(client: httpx.Client, choice: Any) -> None:
    given = ASKED | {"messages": DRAW, "tools": FLAT, "tool_choice": choice, "max_tokens": 150}
    made = client.post("/v1/messages", json=given).json()
    (call,) = made["content"]
    assert (call["type"], made["stop_reason"]) == ("tool_use", "tool_use")
    check(call["name"], json.dumps(call["input"]))
    assert drop_ids(assemble(read_events(client.post("/v1/messages", json=given | {"stream": True})))) == drop_ids(made)


def test_no_tools_are_shown_where_none_may_be_called(client: httpx.Client) -> None:
    plain = client.post("/v1/messages/count_tokens", json={"messages": DRAW}).json()
    assert client.post("/v1/messages/count_tokens", json={"messages": DRAW, "tools": FLAT, "tool_choice": {"type": "none"}}).json() == plain
    assert client.post("/v1/messages/count_tokens", json={"messages": DRAW, "tools": FLAT}).json() != plain


PAGE = {"type": "web_search_result", "title": "A title", "url": "https://a", "encrypted_content": "EqgB", "page_age": None}
PAGE_SHOWN = '[{"type": "web_search_result", "title": "A title", "url": "https://a", "page_age": null}]'
LOGS = {"type": "bash_code_execution_result", "stdout": "3\n", "stderr": "", "return_code": 0, "content": []}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
HOSTED: list[Any] = [
    {"role": "user", "content": "search"},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "I search.", "signature": "a"},
        {"type": "text", "text": "Searching."},
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "a"}},
        {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [PAGE]},
        {"type": "server_tool_use", "id": "srvtoolu_2", "name": "bash_code_execution", "input": {"command": "ls"}},
        {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "time", "server_name": "clock", "input": {}},
        {"type": "bash_code_execution_tool_result", "tool_use_id": "srvtoolu_2", "content": LOGS},
        {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1", "is_error": False, "content": [{"type": "text", "text": "noon"}]},
        {"type": "text", "text": "Found.", "citations": [{"type": "web_search_result_location", "url": "https://a"}]},
        {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}},
    ]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a file"}]},
]  # fmt: skip
HOSTED_TURNS = [
    Turn("user", "search"),
    Turn("assistant", "Searching.", (Call("srvtoolu_1", "web_search", '{"query": "a"}'),), thoughts="I search."),
    Turn("tool", PAGE_SHOWN, call_id="srvtoolu_1", name="web_search"),
    Turn("assistant", "", (Call("srvtoolu_2", "bash_code_execution", '{"command": "ls"}'), Call("mcptoolu_1", "time", "{}"))),
    Turn("tool", json.dumps(LOGS), call_id="srvtoolu_2", name="bash_code_execution"),
    Turn("tool", "noon", call_id="mcptoolu_1", name="time"),
    Turn("assistant", "Found.", (Call("toolu_1", "Read", "{}"),)),
    Turn("tool", "a file", call_id="toolu_1", name="Read"),
]


def test_a_conversation_with_anthropics_own_tools_goes_on(client: httpx.Client) -> None:
    """What its tools were asked, and what they found, is in the prompt as if they were functions."""
    assert CountTokensRequest.model_validate(ASKED | {"messages": HOSTED}).make_turns() == HOSTED_TURNS
    for n in (2, 3):  # the first ends with a call
        made = client.post("/v1/messages", json=ASKED | {"messages": HOSTED[:n]})
        assert made.status_code == 200, made.text
    fetched = {"type": "web_fetch_result", "url": "https://a", "content": PDF}
    found = {"type": "web_fetch_tool_result", "tool_use_id": "a", "content": fetched}
    summary = [{"type": "compaction", "content": "Earlier: hello.", "encrypted_content": "a"}, {"type": "compaction", "content": None}]
    asked = {"messages": [HOSTED[0], {"role": "assistant", "content": [*summary, found]}]}
    turns = CountTokensRequest.model_validate(asked).make_turns()
    assert (turns[1], turns[2].role, len(turns)) == (Turn("assistant", "Earlier: hello."), "tool", 3)
    assert json.loads(turns[2].content)["content"]["source"]["data"] == "[omitted: this model reads text only]"


def test_a_search_at_anthropic_loads_tools(client: httpx.Client) -> None:
    references = [{"type": "tool_reference", "tool_name": "CronList"}]
    searched = {"type": "tool_search_tool_search_result", "tool_references": references}
    messages = [FOUND[0], {"role": "assistant", "content": [
        {"type": "server_tool_use", "id": "a", "name": "tool_search_tool_regex", "input": {"pattern": "Cron"}},
        {"type": "tool_search_tool_result", "tool_use_id": "a", "content": searched},
    ]}]  # fmt: skip
    tools = [{"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}, CRON | {"defer_loading": True}]
    asked = {"messages": messages, "tools": tools, "tool_choice": {"type": "tool", "name": "CronList"}, "max_tokens": 60}
    made = client.post("/v1/messages", json=asked)
    assert made.status_code == 200, made.text
    assert made.json()["content"][0]["name"] == "CronList"
    assert CRON["description"] in CountTokensRequest.model_validate(asked).make_turns()[-1].content


DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a\nb"}}, "{}a\nb{}"),
    (
        {"type": "document", "source": {"type": "content", "content": "a"}, "title": "T", "context": "C", "citations": {"enabled": True}},
        "<document>\n<title>T</title>\n<context>C</context>\n<document_content>\na{}",
    ),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": each} for each in "ab"]}}, "{}a\nb{}"),
    (
        {"type": "search_result", "source": "https://a", "title": "T", "content": [{"type": "text", "text": "a"}]},
        "<document>\n<source>https://a</source>\n<title>T</title>\n<document_content>\na{}",
    ),
]


def test_documents_that_are_text_are_read(client: httpx.Client) -> None:
    for given, expected in DOCUMENTS:
        text = expected.replace("{}", "<document>\n<document_content>\n", expected.startswith("{}"))
        text = text.replace("{}", "\n</document_content>\n</document>")
        asked = ASKED | {"messages": [{"role": "user", "content": [{"type": "text", "text": "read"}, given]}]}
        assert CountTokensRequest.model_validate(asked).make_turns() == [Turn("user", f"read\n{text}")]
        assert client.post("/v1/messages", json=asked).status_code == 200
        result = {"type": "tool_result", "tool_use_id": "a", "content": [given, PDF]}
        asked = {"messages": [{"role": "user", "content": [result]}]}
        assert CountTokensRequest.model_validate(asked).make_turns() == [
            Turn("tool", f"{text}\n[document omitted: this model reads text only]", call_id="a")
        ]


def test_the_assistants_message_is_continued(client: httpx.Client) -> None:
    begun = [*DRAW, {"role": "assistant", "content": "I will"}]
    made = client.post("/v1/messages", json=ASKED | {"messages": begun}).json()
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    like = client.post("/v1/chat/completions", json={"messages": begun, "max_tokens": 16, "temperature": 0} | goes_on).json()
    assert made["content"][0]["text"] == like["choices"][0]["message"]["content"]


def test_the_form_of_an_answer(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    given = ASKED | {"messages": DRAW, "max_tokens": 60, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    made = client.post("/v1/messages", json=given).json()
    assert json.loads(made["content"][0]["text"])["a"] in (1, 2)


def test_text_and_calls_are_blocks(calling: httpx.Client) -> None:
    given = ASKED | {"messages": DRAW, "tools": FLAT, "max_tokens": 200}
    made = calling.post("/v1/messages", json=given).json()
    assert [block["type"] for block in made["content"]] == ["text", "tool_use", "tool_use"]
    assert made["content"][0]["text"] == "Wait."
    assert [(block["name"], block["input"]) for block in made["content"][1:]] == [("time", {}), ("draw", {"a": "b"})]
    assert len({block["id"] for block in made["content"][1:]}) == 2
    assert (made["stop_reason"], made["stop_sequence"]) == ("tool_use", None)
    assert drop_ids(assemble(read_events(calling.post("/v1/messages", json=given | {"stream": True})))) == drop_ids(made)


def test_why_an_answer_ends(calling: httpx.Client) -> None:
    given = ASKED | {"messages": DRAW, "tools": FLAT}
    cut = calling.post("/v1/messages", json=given | {"max_tokens": 3}).json()
    assert (cut["content"], cut["stop_reason"]) == ([{"type": "text", "text": "Wai"}], "max_tokens")
    stopped = calling.post("/v1/messages", json=given | {"stop_sequences": ["t."]}).json()
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == ("Wai", "stop_sequence", "t.")


def test_an_answer_that_fills_the_context(client: httpx.Client, server: Server) -> None:
    given = ASKED | {"messages": [{"role": "user", "content": "a" * 960}], "ignore_eos": True}
    n_prompt = client.post("/v1/messages/count_tokens", json=given).json()["input_tokens"]
    room = server.engine.max_model_len - n_prompt
    for most, reason in ((room - 1, "max_tokens"), (room, "max_tokens"), (room + 1, "model_context_window_exceeded")):
        made = client.post("/v1/messages", json=given | {"max_tokens": most}).json()
        assert (made["usage"]["output_tokens"], made["stop_reason"]) == (min(most, room), reason)
    stream = assemble(read_events(client.post("/v1/messages", json=given | {"max_tokens": room + 1, "stream": True})))
    assert stream["stop_reason"] == "model_context_window_exceeded"


def test_its_clients_get_its_errors_on_every_route(client: httpx.Client) -> None:
    for path, status in (("/v1/models/x", 404), ("/v1/files", 404), ("/v1/embeddings", 400), ("/v1/chat/completions", 405)):
        answer = client.get(path, headers={"anthropic-version": "2023-06-01"})
        assert answer.status_code == status, answer.text
        assert answer.json()["type"] == "error"
        assert answer.json()["error"].keys() == {"type", "message"}
        assert "param" in client.get(path).json()["error"]
    assert isinstance(client.post("/api/chat", json={}, headers={"anthropic-version": "2023-06-01"}).json()["error"], dict)


def test_an_error_is_the_last_event(start_server: Callable[..., Server], calling: httpx.Client) -> None:
    """The model's script ends with the context: what the engine cannot go on with is told in Anthropic's words."""
    unknown = calling.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert (unknown.status_code, unknown.json()["type"], unknown.json()["error"]["type"]) == (400, "error", "invalid_request_error")
    long = calling.post("/v1/messages", json=ASKED | {"messages": [{"role": "user", "content": "a" * 5000}], "stream": True})
    assert long.status_code == 400
    told = long.json()["error"]["message"]
    found = re.match(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", told)  # as Claude Code reads it
    assert found is not None, told
    assert int(found[1]) > int(found[2])


def test_keys(make_server: Callable[..., Server]) -> None:
    server = make_server(ServerSettings(api_keys=(Key(key=SecretStr("a-long-key")),)))
    with httpx.Client(base_url=server.url) as client:
        given = ASKED | {"messages": DRAW, "max_tokens": 1}
        assert client.post("/v1/messages", json=given, headers={"x-api-key": "a-long-key"}).status_code == 200
        assert client.post("/v1/messages", json=given, headers={"authorization": "Bearer a-long-key"}).status_code == 200
        refused = client.post("/v1/messages", json=given, headers={"x-api-key": "another"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


def test_the_model_is_listed_in_anthropics_words(client: httpx.Client, server: Server) -> None:
    listed = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == (server.engine.name, server.engine.name, False)
    (model,) = listed["data"]
    assert (model["type"], model["display_name"]) == ("model", server.engine.name)
    assert (model["max_input_tokens"], model["max_tokens"]) == (server.engine.max_model_len,) * 2
    assert client.get(f"/v1/models/{server.engine.name}").json() == model


def block(**given: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [given]}]}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": 0}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "a"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 1}]}),
    ("messages[0].content[0].image: no blocks of this type", block(type="image", source={"type": "url", "url": "http://a"})),
    ("messages[0].content[0].document: no blocks of this type", block(type="document")),
    ("messages[0].content[0].document: no blocks of this type", block(**PDF)),
    ("messages[0].content[0].server_tool_use: no blocks of this type", block(type="server_tool_use", id="a", name="b", input={})),
    ("messages[0].content[0].tool_use: no blocks of this type", block(type="tool_use", id="a", name="b", input={})),
    ("messages[0].content[0].text", block(type="text")),
    ("messages[0].content[0].tool_use_id", block(type="tool_result", content="a")),
    ("messages[0].content[0].content[0]: only", block(type="tool_result", tool_use_id="a", content=[{"type": "search_result"}])),
    ("messages[0].content[0].input", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]}),
    ("system[0]", {"system": [{"type": "image"}]}),
    ("tools[0].name", {"tools": [{"name": "a b", "input_schema": {}}]}),
    ("tools[0].input_schema", {"tools": [{"name": "a", "input_schema": {"type": "array"}}]}),
    ("tool_choice", {"tools": FLAT, "tool_choice": {"type": "tool", "name": "who"}}),
    ("tool_choice", {"tools": FLAT, "tool_choice": {"type": "required"}}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}),
    ("stop_sequences", {"stop_sequences": [""]}),
]


def test_what_is_wrong_is_named(client: httpx.Client) -> None:
    for start, given in WRONG:
        answer = client.post("/v1/messages", json=ASKED | {"messages": DRAW} | given)
        assert answer.status_code == 400, (start, answer.text)
        assert answer.json()["error"]["message"].startswith(start), (start, answer.text)

"""Requests as widely used clients send them are answered, with every field that they always send."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import Server

from ngramspec.engine.llm_engine import Engine
from ngramspec.server.settings import ServerSettings

TOOL = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False},
}
CODEX: dict[str, Any] = {  # Codex CLI 0.169: its first request, shortened
    "model": "",
    "stream": False,
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are a coding agent."}], "id": "msg_1"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context/>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [
        TOOL,
        {"type": "namespace", "name": "multi_agent", "description": "Agents.", "tools": [{"type": "function", "name": "spawn"}]},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "A patch.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
        },
        {"type": "local_shell"},
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a211f2",
    "client_metadata": {"x-codex-turn-metadata": "{}"},
    "text": {"verbosity": "low"},
    "service_tier": "auto",
    "max_output_tokens": 4,
}


def test_codex_is_answered(client: httpx.Client) -> None:
    made = client.post("/v1/responses", json=CODEX)
    assert made.status_code == 200, made.text
    assert [tool["name"] for tool in made.json()["tools"]] == ["exec_command", "multi_agent"], "the tools that the model was told of"


def test_codex_goes_on(client: httpx.Client) -> None:
    """Items of a second turn: what is kept of a chain of thought changes nothing, calls of every kind and their results are there."""
    asked = CODEX | {"tools": [tool for tool in CODEX["tools"] if tool["type"] != "namespace"]}  # a prompt of 1,024 bytes
    items = [
        *CODEX["input"],
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "c2", "status": "completed"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done"},
    ]
    made = client.post("/v1/responses", json=asked | {"input": items, "temperature": 0}).json()
    without = [item for item in items if item["type"] != "reasoning"]
    like = client.post("/v1/responses", json=asked | {"input": without, "temperature": 0}).json()
    assert made["usage"]["input_tokens"] == like["usage"]["input_tokens"]
    short = client.post("/v1/responses", json=asked | {"input": items[:7], "temperature": 0}).json()
    assert made["usage"]["input_tokens"] > short["usage"]["input_tokens"]
    empty = client.post("/v1/responses", json=asked | {"input": [items[4]]})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "input")


CHAT_TOOL = {"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}
CALL = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "exec_command", "arguments": "{}"}}
MESSAGES: list[Any] = [
    {"role": "developer", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "me"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None, "function_call": None, "audio": None, "annotations": []},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "a.py"}]},
    {"role": "assistant", "content": "", "reasoning_content": "thinking", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "a.py", "name": "exec_command"},
]
TOOLED: dict[str, Any] = {"tools": [CHAT_TOOL], "tool_choice": "auto"}
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
ZOD_TOOL = {  # as the AI SDK and opencode describe one
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"s": {"minimum": -9007199254740991, "exclusiveMinimum": 0, "type": "integer", "maximum": 9007199254740991}},
            "required": ["s"],
        },
    },
}
CITY = {"properties": {"name": {"title": "Name", "type": "string"}}, "required": ["name"], "title": "City", "type": "object"}
CITY_TOOL = {"type": "function", "function": {"name": "City", "description": "", "parameters": CITY}}
CHATS: dict[str, dict[str, Any]] = {
    "openai, all null": dict.fromkeys(
        ["audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "metadata", "modalities", "n", "prediction",
         "presence_penalty", "reasoning_effort", "response_format", "seed", "service_tier", "stop", "store", "stream_options",
         "tool_choice",
         "tools", "top_logprobs", "top_p", "user", "verbosity", "web_search_options", "parallel_tool_calls", "max_completion_tokens"]
    ),
    "zed": TOOLED | {"max_completion_tokens": 4, "stop": [], "parallel_tool_calls": False, "prompt_cache_key": "a"},
    "cline": {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "reasoning_effort": "medium"},
    "roo code": STREAMED | {"tools": [{"type": "function", "function": CHAT_TOOL["function"] | {"strict": True}}], "tool_choice": "auto",
                            "temperature": 0, "parallel_tool_calls": True},
    "opencode": STREAMED | {"tools": [ZOD_TOOL], "tool_choice": "auto", "max_tokens": 4},
    "qwen code": STREAMED | {"tools": [ZOD_TOOL], "max_tokens": 4},
    "pydantic-ai": {"stream": False, "tool_choice": "required",
                    "tools": [{"type": "function", "function": CITY_TOOL["function"] | {"strict": True}}]},
    "instructor": {"parallel_tool_calls": False, "tool_choice": {"type": "function", "function": {"name": "City"}}, "tools": [CITY_TOOL]},
    "aider": {"stream": True, "temperature": 0},
    "dspy": {"max_completion_tokens": 4},
    "llm": STREAMED | {"response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": CITY}}},
    "lm-eval": {"temperature": 0, "stop": ["\n", "."], "seed": 1234},
    "guidance": STREAMED | {"logprobs": True, "top_logprobs": 5, "max_completion_tokens": 4, "tools": None},
    "langchain": TOOLED | {"n": 1, "stream": False, "parallel_tool_calls": True, "temperature": 0.7, "stop": None},
    "litellm": {"extra_headers": None, "max_tokens": 4, "stream": True, "user": "a", "metadata": {"a": "b"}},
    "vercel": STREAMED | {"tools": [ZOD_TOOL], "tool_choice": "required", "seed": 1, "verbosity": "low", "max_tokens": 4},
    "open webui": {"stream": True, "stream_options": {"include_usage": True}, "tools": [], "max_tokens": -1},
    "continue": {"max_tokens": 4, "stop": ["<|im_end|>"], "prediction": {"type": "content", "content": "a"}},
    "llama.vim": {"id_slot": 0, "samplers": [], "n_predict": 0, "stream": False, "cache_prompt": True, "response_fields": [""]},
    "llama.vscode": {"n_predict": 4, "cache_prompt": True, "samplers": ["top_k"], "timings_per_token": True, "id_slot": -1, "stream": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_answered(client: httpx.Client, name: str) -> None:
    asked = {"model": "", "messages": MESSAGES, "max_tokens": 4} | CHATS[name]
    made = client.post("/v1/chat/completions", json=asked)
    assert made.status_code == 200, made.text


def test_no_field_of_llama_vims_instructions_is_unknown(client: httpx.Client) -> None:
    made = client.post("/v1/chat/completions", json={"messages": MESSAGES} | CHATS["llama.vim"])
    assert "warning" not in made.headers


def test_lm_eval_scores_with_the_servers_tokenizer(client: httpx.Client) -> None:
    """Its `local-completions` with `tokenizer_backend=remote`: the routes of vLLM's tokenizer, then a text that is only scored."""
    assert client.get("/tokenizer_info").json()["tokenizer_class"]
    asked = {"prompt": "The capital of France is Paris", "add_special_tokens": False}
    tokens = client.post("/tokenize", json=asked).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == asked["prompt"]
    scored = {"model": "m", "prompt": [tokens], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    logprobs = client.post("/v1/completions", json=scored).json()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(tokens) + 1


SEEN = "[image omitted: this model reads text only]"
PICTURE = "data:image/png;base64,iVBORw0KGgo="
PICTURE_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
RESULTS: dict[str, tuple[str, dict[str, Any], Any, Any]] = {  # a route, a request but its last message, one with a picture, one with a text
    "codex": (
        "/v1/responses",
        {"max_output_tokens": 1, "input": [{"type": "function_call", "name": "view_image", "arguments": "{}", "call_id": "c"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": PICTURE, "detail": "high"}]},
        {"type": "function_call_output", "call_id": "c", "output": SEEN},
    ),
    "chat": (
        "/v1/chat/completions",
        {"max_tokens": 1, "messages": [*MESSAGES[:3]]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": SEEN},
    ),
    "claude code": (
        "/v1/messages",
        {"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [PICTURE_BLOCK]}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": SEEN}]},
    ),
    "ollama": (
        "/api/chat",
        {"model": "m", "stream": False, "options": {"num_predict": 1}, "messages": [{"role": "user", "content": "hi"}]},
        {"role": "tool", "tool_name": "see", "content": "", "images": ["iVBORw0KGgo="]},
        {"role": "tool", "tool_name": "see", "content": SEEN},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_a_picture_in_a_result_is_named(client: httpx.Client, name: str) -> None:
    """Refused, it would end the conversation, since a client sends it again with every message. In a user's message it is refused."""
    route, body, picture, text = RESULTS[name]
    key = "input" if "input" in body else "messages"
    made, like = (client.post(route, json=body | {key: [*body[key], last]}) for last in (picture, text))
    assert made.status_code == like.status_code == 200, made.text

    def count_prompt(answer: dict[str, Any]) -> int:
        used = answer.get("usage", answer)
        return sum(used.get(key, 0) for key in ("prompt_eval_count", "prompt_tokens", "input_tokens", "cache_read_input_tokens",
                                                "cache_creation_input_tokens"))  # fmt: skip

    assert count_prompt(made.json()) == count_prompt(like.json()) > 0


QWEN = "<|fim_prefix|>def f(<|fim_suffix|>\n<|fim_middle|>"
AT_THE_CURSOR: dict[str, tuple[str, dict[str, Any]]] = {
    "llama.vim": (
        "/infill",
        {"id_slot": 0, "input_prefix": "a\n", "input_suffix": "\n", "input_extra": [{"text": "b", "filename": "b.py", "time": 1}],
         "prompt": "def f(", "n_predict": 4, "n_indent": 0, "top_k": 40, "top_p": 0.9, "samplers": ["top_k", "top_p", "infill"],
         "stream": False, "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "response_fields": ["content"]},
    ),
    "zed, predictions": (  # by an OpenAI-compatible API, with the format that the model's name stands for
        "/v1/completions",
        {
            "model": "qwen2.5-coder:1.5b",
            "prompt": "<|fim_prefix|>def f(<|fim_suffix|>\n<|fim_middle|>",
            "max_tokens": 4,
            "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"],
        },
    ),
    "minuet": ("/v1/completions", {"model": "m", "prompt": "def f(", "suffix": "\n", "max_tokens": 4, "top_p": 0.9, "stream": True}),
    "tabby": ("/completion", {"prompt": QWEN, "stop": ["\n\n"], "n_predict": 4, "temperature": 0.1, "seed": 1, "stream": True}),
    "twinny": ("/completion", {"prompt": QWEN, "stream": True, "temperature": 0.2, "n_predict": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_THE_CURSOR)
def test_a_gap_is_filled(make_server: Callable[..., Server], fim_engine: Engine, name: str) -> None:
    route, body = AT_THE_CURSOR[name]
    with httpx.Client(base_url=make_server(engine=fim_engine).url, timeout=60) as client:
        made = client.post(route, json=body)
    assert made.status_code == 200, made.text
    assert "error" not in made.text


def test_the_table_names_what_is_recorded() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "first-steps.md"
    rows = re.findall(r"^\| ([^|`]+?) \| [^|]*`?[^|]*\| [^|]* \|$", page.read_text("utf-8").split("## Works with")[1], re.MULTILINE)
    named = {row.lower() for row in rows} - {"client", "---"}
    recorded = {name.split(",")[0].lower() for name in (*CHATS, *AT_THE_CURSOR)} | {"codex", "claude code"}
    assert named == recorded


WARM: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a warm-up of some tokens"}]},
    "/v1/completions": {"prompt": "a warm-up of some tokens, all of which are computed"},
    "/completion": {"prompt": "a warm-up of some tokens, all of which are computed"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", WARM)
def test_a_warm_up_computes_the_prompt_and_writes_nothing(client: httpx.Client, route: str, stream: bool) -> None:
    body = WARM[route] | {"n_predict": 0, "cache_prompt": True, "samplers": [], "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream and route.startswith("/v1") else {}
    made = client.post(route, json=body)
    assert made.status_code == 200, made.text
    pieces = [json.loads(line[6:]) for line in made.text.splitlines() if line.startswith("data: {")] if stream else [made.json()]
    if route == "/completion":
        assert "".join(piece["content"] for piece in pieces) == ""
        return
    said = ""
    for piece in pieces:
        for choice in piece["choices"]:
            said += choice.get("text", "") + ((choice.get("delta") or choice.get("message") or {}).get("content") or "")
            assert choice["finish_reason"] in (None, "length")
    assert said == ""
    usage = pieces[-1]["usage"]
    assert usage["completion_tokens"] == 0
    again = client.post(route, json=WARM[route] | {"max_tokens": 1}).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_as_many_tokens_as_fit(client: httpx.Client, server: Server) -> None:
    for route in ("/v1/chat/completions", "/v1/completions"):
        made = client.post(route, json=WARM[route] | {"max_tokens": -1, "stop": [chr(c) for c in range(32, 36)]})
        assert made.status_code == 200, made.text


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        ({"min_tokens": 4, "stop": [chr(c) for c in range(32, 36)]}, 200, None),
        ({"min_tokens": 100_000}, 400, "min_tokens"),
        ({"stop": ["x"] * 65}, 400, "stop"),
    ],
)
def test_other_parameters_beside_as_many_tokens_as_fit(client: httpx.Client, more: dict[str, Any], status: int, param: str | None) -> None:
    for route in ("/v1/chat/completions", "/v1/completions"):
        made = client.post(route, json=WARM[route] | {"max_tokens": -1} | more)
        assert made.status_code == status, made.text
        assert made.json().get("error", {}).get("param") == param, made.text


def test_the_javascript_client_passes_a_browsers_preflight(make_server: Callable[..., Server]) -> None:
    asked = (
        "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,x-stainless-retry-count"
    )
    server = make_server(ServerSettings(cors_origins=("https://editor.example",)))
    with httpx.Client(base_url=server.url) as client:
        headers = {"origin": "https://editor.example", "access-control-request-method": "POST", "access-control-request-headers": asked}
        answer = client.options("/v1/chat/completions", headers=headers)
        assert answer.status_code == 200
        allowed = {name.strip().lower() for name in answer.headers["access-control-allow-headers"].split(",")}
        assert set(asked.split(",")) <= allowed
        other = client.options("/v1/chat/completions", headers=headers | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert client.options("/v1/models", headers=headers | {"access-control-request-headers": "x-a" * 100_000}).status_code == 431

"""Ollama's routes: chats, texts and what clients ask of models, as Ollama's own clients, Zed and Continue send them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from test_tools import TOOLS
from tiny_server import Server, routes_of

from ngramspec.engine.llm_engine import Engine
from ngramspec.server import response_stats
from ngramspec.server.settings import Key, ServerSettings

GREEDY = {"temperature": 0, "num_predict": 12}
DRAW = [{"role": "user", "content": "draw"}]
STATISTICS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def read_lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_is_that_of_openai(client: httpx.Client) -> None:
    given = {"model": "any", "messages": DRAW, "options": GREEDY, "keep_alive": "5m"}
    made = client.post("/api/chat", json=given | {"stream": False}).json()
    like = client.post("/v1/chat/completions", json={"messages": DRAW, "max_tokens": 12, "temperature": 0, "top_k": 40}).json()
    assert made["message"] == {"role": "assistant", "content": like["choices"][0]["message"]["content"]}
    assert (made["model"], made["done"], made["done_reason"]) == ("any", True, like["choices"][0]["finish_reason"])
    assert (made["prompt_eval_count"], made["eval_count"]) == (like["usage"]["prompt_tokens"], like["usage"]["completion_tokens"])
    assert set(made) >= STATISTICS
    assert 0 < made["eval_duration"] <= made["total_duration"]
    *pieces, last = read_lines(client.post("/api/chat", json=given))
    assert "".join(piece["message"]["content"] for piece in pieces) == made["message"]["content"]
    assert not any(piece["done"] for piece in pieces)
    assert last["message"]["content"] == ""
    assert {name: last[name] for name in ("done", "done_reason", "eval_count")} == {
        name: made[name] for name in ("done", "done_reason", "eval_count")
    }


def test_a_text_is_continued(client: httpx.Client) -> None:
    given = {"model": "any", "prompt": "def add(", "options": GREEDY, "raw": True}
    made = client.post("/api/generate", json=given | {"stream": False}).json()
    like = client.post("/v1/completions", json={"prompt": "def add(", "max_tokens": 12, "temperature": 0}).json()
    assert made["response"] == like["choices"][0]["text"]
    assert "context" not in made
    lines = read_lines(client.post("/api/generate", json=given))
    assert "".join(line["response"] for line in lines) == made["response"]
    assert set(lines[-1]) >= STATISTICS


@pytest.mark.parametrize(
    ("route", "asked"), [("chat", {"messages": DRAW}), ("generate", {"prompt": "draw"}), ("generate", {"prompt": "d", "raw": True})]
)
def test_log_probabilities_are_those_of_openai(client: httpx.Client, route: str, asked: dict[str, Any]) -> None:
    given = {"model": "any", "options": GREEDY, "logprobs": True, "top_logprobs": 2} | asked
    made = client.post(f"/api/{route}", json=given | {"stream": False}).json()
    assert [len(each["top_logprobs"]) for each in made["logprobs"]] == [2] * len(made["logprobs"])
    assert len(made["logprobs"]) == made["eval_count"] - (made["done_reason"] == "stop")
    lines = read_lines(client.post(f"/api/{route}", json=given))
    assert [each for line in lines for each in line.get("logprobs", [])] == made["logprobs"]
    if route == "chat":
        like = client.post(
            "/v1/chat/completions",
            json={"messages": DRAW, "max_tokens": 12, "temperature": 0, "top_k": 40, "logprobs": True, "top_logprobs": 2},
        )
        assert like.json()["choices"][0]["logprobs"]["content"][: len(made["logprobs"])] == made["logprobs"]
    plain = client.post(f"/api/{route}", json=given | {"logprobs": False, "stream": False}).json()
    assert "logprobs" not in plain


def test_clients_can_divide_by_the_time_of_one_pass(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"model": "any", "prompt": "def add(", "options": GREEDY | {"num_predict": 1}, "raw": True, "stream": False}
    real = response_stats.describe_timings
    for times, expected in (({"predicted_ms": 0.0, "prompt_ms": 2.5}, 2_500_000), ({"predicted_ms": 0.0, "prompt_ms": 0.0}, 1)):
        monkeypatch.setattr(response_stats, "describe_timings", lambda completion, times=times: real(completion) | times)
        made = client.post("/api/generate", json=given).json()
        assert (made["eval_count"], made["eval_duration"]) == (1, expected)


def test_a_prompt_is_a_message_and_its_context_goes_on(client: httpx.Client) -> None:
    given = {"model": "any", "prompt": "draw", "system": "Be brief.", "options": GREEDY, "stream": False}
    made = client.post("/api/generate", json=given).json()
    turns = [{"role": "system", "content": "Be brief."}, *DRAW]
    like = client.post("/api/chat", json={"model": "any", "messages": turns, "options": GREEDY, "stream": False}).json()
    assert made["response"] == like["message"]["content"]
    more = client.post("/api/generate", json=given | {"context": made["context"], "prompt": "more", "system": ""}).json()
    assert more["prompt_eval_count"] > len(made["context"])
    assert more["context"][: len(made["context"])] == made["context"]


def test_the_form_of_an_answer(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    options = {"temperature": 0, "num_predict": 60}
    chat = client.post("/api/chat", json={"model": "", "messages": DRAW, "format": schema, "options": options, "stream": False}).json()
    text = client.post("/api/generate", json={"model": "", "prompt": "a", "format": schema, "options": options, "stream": False}).json()
    assert json.loads(chat["message"]["content"])["a"] in (1, 2)
    assert json.loads(text["response"])["a"] in (1, 2)


def test_a_middle_is_filled_in(fim_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cursors: list[Any] = []
    submit = fim_engine.submit
    monkeypatch.setattr(fim_engine, "submit", lambda *given, **hints: cursors.append(hints.get("cursor")) or submit(*given, **hints))
    given = {"model": "", "prompt": "def add(", "suffix": "return", "options": GREEDY, "stream": False}
    with routes_of(fim_engine) as client:
        made = client.post("/api/generate", json=given).json()
        asked = {"input_prefix": "def add(", "input_suffix": "return", "n_predict": 12, "temperature": 0, "prompt": ""}
        assert made["response"] == client.post("/infill", json=asked).json()["content"]
        assert cursors == [("def add(", "return")] * 2, "what is left of it is the next one's draft"
        given = {"prompt": "def ad", "suffix": "return"}  # the output's first tokens spell `ad`, which are the prompt's
        made = client.post("/api/generate", json=given | {"model": "", "options": GREEDY, "stream": False}).json()
        usage = client.post("/v1/completions", json=given | {"max_tokens": 12, "temperature": 0}).json()["usage"]
        assert (made["prompt_eval_count"], made["eval_count"]) == (usage["prompt_tokens"], usage["completion_tokens"])
        shown = client.post("/api/show", json={"model": ""}).json()
        assert "insert" in shown["capabilities"]
        assert ".Suffix" in shown["template"], "Continue sends a suffix if it sees that"


def test_nothing_asked_for_is_a_load(client: httpx.Client) -> None:
    thought = {"messages": [{"role": "thinking", "content": "hm"}]}
    for path, given in (("/api/chat", {"messages": []}), ("/api/chat", thought), ("/api/generate", {"prompt": ""}), ("/api/generate", {})):
        made = client.post(path, json={"model": "any", "keep_alive": -1} | given).json()
        assert (made["done"], made["done_reason"]) == (True, "load")
    assert client.post("/api/generate", json={"model": "any", "keep_alive": 0}).json()["done_reason"] == "unload"


def test_what_clients_ask_of_models(client: httpx.Client, server: Server) -> None:
    name = server.engine.name
    (listed,) = client.get("/api/tags").json()["models"]
    assert (listed["name"], listed["model"], listed["details"]["family"]) == (name, name, "llama")
    (running,) = client.get("/api/ps").json()["models"]
    assert running["context_length"] == server.engine.max_model_len
    assert [int(part) for part in client.get("/api/version").json()["version"].split(".")] >= [0, 14, 2]  # what clients ask for
    for asked in ({"model": name}, {"name": f"{name}:latest"}):
        shown = client.post("/api/show", json=asked).json()
        assert (shown["capabilities"], shown["template"]) == (["completion", "tools"], "{{ .Prompt }}")
        assert shown["model_info"] == {
            "general.architecture": "llama",
            "general.basename": name,
            "llama.context_length": server.engine.max_model_len,
        }


def test_what_other_servers_do_is_refused_with_a_reason(client: httpx.Client) -> None:
    for method, path, reason in (
        ("POST", "/api/embed", "embeddings"),
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/embedding", "embeddings"),
        ("POST", "/v1/rerank", "ranks"),
        ("POST", "/api/pull", "started with"),
        ("DELETE", "/api/delete", "started with"),
    ):
        refused = client.request(method, path, json={"model": "a", "input": ["a"]})
        error = refused.json()["error"]
        assert refused.status_code == 400
        assert reason in (error if path.startswith("/api/") else error["message"])


def test_calls_are_told_of_when_they_are_whole(calling: httpx.Client) -> None:
    given = {"model": "", "messages": DRAW, "tools": TOOLS, "options": {"temperature": 0, "num_predict": 200}}
    made = calling.post("/api/chat", json=given | {"stream": False}).json()
    lines = read_lines(calling.post("/api/chat", json=given))
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", [])]
    assert calls == [call["function"] for call in made["message"]["tool_calls"]]
    assert calls == [{"name": "time", "arguments": {}}, {"name": "draw", "arguments": {"a": "b"}}]
    assert "".join(line["message"]["content"] for line in lines) == made["message"]["content"] == "Wait."


def test_results_of_calls(client: httpx.Client) -> None:
    """Without ids, as Ollama has them, a result is that of the call before it."""
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("time", "draw")]
    results = [{"role": "tool", "content": "noon", "tool_name": "time"}, {"role": "tool", "content": "done"}]
    turns = [*DRAW, {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls}, *results]
    made = client.post("/api/chat", json={"model": "", "messages": turns, "options": GREEDY, "stream": False}).json()
    named = [{"id": str(i), "type": "function", "function": {"name": name, "arguments": "{}"}} for i, name in enumerate(("time", "draw"))]
    told = [{"role": "tool", "content": text, "tool_call_id": str(i)} for i, text in enumerate(("noon", "done"))]
    turns = [*DRAW, {"role": "assistant", "content": "", "tool_calls": named}, *told]
    like = client.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 12, "temperature": 0}).json()
    assert (made["prompt_eval_count"], made["message"]["content"]) == (
        like["usage"]["prompt_tokens"],
        like["choices"][0]["message"]["content"],
    )


def test_roles_that_clients_send(client: httpx.Client) -> None:
    """avante sends the system message as `developer`, Granite is asked to think by `control`, Continue hands thoughts back in messages."""

    def count(*turns: dict[str, str]) -> int:
        made = client.post("/api/chat", json={"model": "", "messages": turns, "options": {"num_predict": 1}, "stream": False})
        assert made.status_code == 200, made.text
        return int(made.json()["prompt_eval_count"])

    user, said = DRAW[0], {"role": "assistant", "content": "drawn"}
    assert count({"role": "developer", "content": "Be brief."}, user) == count({"role": "system", "content": "Be brief."}, user)
    assert count({"role": "control", "content": "thinking"}, user) > count(user)
    assert count(user, {"role": "thinking", "content": "hm"}, said, user) == count(user, said | {"thinking": "hm"}, user)
    assert count(user, {"role": "thinking", "content": "hm"}) == count(user)


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zed": (  # crates/ollama, 0.21x: what its assistant sends
        "/api/chat",
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "hi", "images": None},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}],
                    "images": None,
                    "thinking": None,
                },
                {"role": "tool", "tool_name": "f", "content": "b"},
            ],
            "stream": True,
            "keep_alive": -1,
            "options": {"num_ctx": 16384, "num_predict": None, "stop": [], "temperature": 1.0, "top_p": None},
            "think": False,
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
        },
    ),
    "zed, a prediction": (  # crates/edit_prediction: the model's format is chosen by its name
        "/api/generate",
        {
            "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
            "raw": True,
            "stream": False,
            "options": {
                "num_predict": 4,
                "temperature": 0.2,
                "stop": ["<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "[PREFIX]", "<PRE>"],
            },
        },
    ),
    "continue": (  # core/llm/llms/Ollama.ts: a completion at the cursor
        "/api/generate",
        {
            "prompt": "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
            "raw": True,
            "options": {
                "temperature": 0.01,
                "top_p": None,
                "num_predict": 4,
                "stop": ["<|endoftext|>", "\n\n"],
                "num_ctx": 8192,
                "mirostat": None,
                "num_thread": 2,
                "use_mmap": True,
                "min_p": 0,
            },
            "keep_alive": 1800,
            "stream": True,
        },
    ),
    "ollama-js": ("/api/chat", {"messages": DRAW, "stream": False, "options": {"num_predict": 4, "seed": 0, "num_gpu": 1}, "format": ""}),
    "ollama-python": ("/api/generate", {"prompt": "a", "stream": False, "suffix": "", "system": "", "template": "", "context": None,
                                        "raw": False, "images": None, "format": None, "options": {"num_predict": 4}, "keep_alive": None}),
    "langchain": ("/api/chat", {"messages": DRAW, "tools": [], "think": None, "stream": True, "logprobs": None, "options": {
        "mirostat": None, "num_ctx": None, "num_predict": 4, "repeat_last_n": None, "repeat_penalty": 1.1, "tfs_z": None, "stop": None}}),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_a_client_is_answered(client: httpx.Client, name: str) -> None:
    path, given = REQUESTS[name]
    stops = {"num_predict": 4} if given["options"].get("num_predict") is None else {}
    made = client.post(path, json={"model": "any"} | given | {"options": given["options"] | stops})
    assert made.status_code == 200, made.text
    assert json.loads(made.text.splitlines()[-1])["done"]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_a_program_need_not_say_that_it_sends_json(client: httpx.Client, kind: str | None) -> None:
    """As litellm and Ollama's own examples with curl do not; of a browser, it may be a page of another site that cannot say so."""
    body = json.dumps({"model": "any", "prompt": "a", "stream": False, "options": GREEDY}).encode()
    headers = {} if kind is None else {"content-type": kind}
    assert client.post("/api/generate", content=body, headers=headers).status_code == 200
    for name, value in (("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")):
        assert client.post("/api/generate", content=body, headers=headers | {name: value}).status_code == 415


def test_keys_and_names(make_server: Callable[..., Server]) -> None:
    server = make_server(ServerSettings(api_keys=(Key(key=SecretStr("a-long-key")),), strict_model=True, alias=("coder",)))
    with httpx.Client(base_url=server.url) as client:
        refused = client.get("/api/tags")
        assert (refused.status_code, set(refused.json())) == (401, {"error"})
        client.headers["authorization"] = "Bearer a-long-key"
        given = {"messages": DRAW, "options": GREEDY, "stream": False}
        assert client.post("/api/chat", json=given | {"model": "coder:latest"}).status_code == 200
        for path in ("/api/chat", "/api/show"):
            unknown = client.post(path, json=given | {"model": "other"})
            assert (unknown.status_code, set(unknown.json())) == (404, {"error"})


STRINGY = {"function": {"name": "a", "arguments": "{}"}}
WRONG: list[tuple[str, str, dict[str, Any]]] = [
    ("/api/chat", "messages[0].role", {"messages": [{"role": "no body", "content": "a"}]}),
    ("/api/chat", "messages[0].images", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}),
    ("/api/chat", "messages[0].tool_calls", {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "a", "arguments": {}}}]}]}),
    ("/api/chat", "messages[0].tool_calls[0].function.arguments", {"messages": [{"role": "assistant", "tool_calls": [STRINGY]}]}),
    ("/api/chat", "options.temperature", {"options": {"temperature": -1}}),
    ("/api/chat", "options.num_predict", {"options": {"num_predict": -3}}),
    ("/api/chat", "options.mirostat", {"options": {"mirostat": 1}}),
    ("/api/chat", "options.stop", {"options": {"stop": [1]}}),
    ("/api/chat", "format", {"format": "xml"}),
    ("/api/chat", "format", {"format": {"type": "nothing"}}),
    ("/api/chat", "tools[0].function", {"tools": [{"type": "function"}]}),
    ("/api/chat", "model", {"model": None}),
    ("/api/generate", "template", {"template": "{{ .Prompt }}"}),
    ("/api/generate", "images", {"images": ["aGk="]}),
    ("/api/generate", "suffix", {"suffix": "b"}),
    ("/api/generate", "context", {"context": [320]}),
    ("/api/generate", "context", {"context": [-1]}),
]  # fmt: skip


def test_what_is_wrong_is_named(client: httpx.Client) -> None:
    for path, start, given in WRONG:
        answer = client.post(path, json={"model": "", "messages": DRAW, "prompt": "a", "options": {"num_predict": 1}} | given)
        assert answer.status_code == 400, (start, answer.text)
        assert answer.json()["error"].startswith(start), (start, answer.text)
    long = client.post("/api/chat", json={"model": "", "messages": [{"role": "user", "content": "a" * 5000}]})
    assert "tokens" in long.json()["error"]

"""/v1/responses through the official client: text, calls, results and forms, whole and event by event."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from test_tools import SHAPE, TIME, calling_engine, check
from tiny_server import Server

from ngramspec.prompts.tool_calls.tool_prompt import Call, Turn
from ngramspec.server.error_responses import ApiError
from ngramspec.server.openai.response_store import ResponseStore
from ngramspec.server.openai.responses_schemas import ResponsesRequest

FLAT: list[Any] = [
    {"type": "function", "name": "draw", "description": "a draw", "parameters": SHAPE, "strict": False},
    {"type": "function", "name": "time", "description": "a time", "parameters": TIME, "strict": False},
]


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(api: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return api.chat.completions.create(model="", messages=messages, max_tokens=20, temperature=0, **more)


def test_a_text_is_that_of_a_chat(api: openai.OpenAI, server: Server) -> None:
    made = api.responses.create(
        input="hello", instructions="Be brief.", max_output_tokens=20, temperature=0, store=True, metadata={"a": "b"}
    )
    like = chat(api, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}])
    assert made.output_text == like.choices[0].message.content
    assert (made.model, made.object, made.error, made.metadata) == (server.engine.name, "response", None, {"a": "b"})
    assert made.usage is not None
    assert (made.usage.input_tokens, made.usage.output_tokens) == (like.usage.prompt_tokens, like.usage.completion_tokens)
    assert made.id.startswith("resp_")
    cut = like.choices[0].finish_reason == "length"
    assert made.status == ("incomplete" if cut else "completed")
    assert (made.incomplete_details is not None) == cut


def test_items_are_messages(api: openai.OpenAI) -> None:
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "draw"}, {"type": "input_text", "text": "it"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "draw", "arguments": '{"sides": 3}', "status": "completed"},
        {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
    ]  # fmt: skip
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name, arguments in (("c1", "draw", '{"sides": 3}'), ("c2", "time", "{}"))
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "draw\nit"},
        {"role": "assistant", "content": "Yes.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    flat: Any = {"type": "function", "name": "draw", "parameters": {}}
    made = api.responses.create(input=items, tools=[flat], max_output_tokens=16, temperature=0, tool_choice="auto")
    tool = {"type": "function", "function": {"name": "draw"}}
    like = api.chat.completions.create(model="", messages=messages, tools=[tool], max_tokens=16, temperature=0)  # type: ignore[arg-type, list-item]
    assert made.output_text == like.choices[0].message.content
    assert made.usage is not None
    assert like.usage is not None
    assert made.usage.input_tokens == like.usage.prompt_tokens


HOSTED: list[dict[str, Any]] = [
    {"role": "user", "content": "search", "hosted": {"type": "web_search_call"}},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "clock", "tools": []},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Found.", "annotations": []}]},
    {"type": "file_search_call", "id": "fs_1", "queries": ["a"], "results": [{"text": "b", "encrypted_content": "gAAA"}]},
    {"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "container_id": "x", "outputs": [{"type": "logs", "logs": "2"}]},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "iVBORw0KGgo="},
    {"type": "mcp_call", "id": "mcp_1", "server_label": "clock", "name": "time", "arguments": '{"zone": "utc"}', "output": "noon"},
    {"type": "local_shell_call", "id": "ls_1", "call_id": "c1", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "computer_call", "id": "cu_1", "call_id": "c2", "action": {"type": "screenshot"}},
    {"type": "local_shell_call_output", "id": "c1", "output": "a.py"},
    {"type": "computer_call_output", "call_id": "c2", "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA"}},
]
HOSTED_TURNS = [
    Turn("user", "search"),
    Turn("assistant", "", (Call("ws_1", "web_search", '{"action": {"type": "search", "query": "a"}}'),)),
    Turn("tool", "[omitted: only OpenAI has what was found]", call_id="ws_1", name="web_search"),
    Turn("assistant", "Found.", (Call("fs_1", "file_search", '{"queries": ["a"]}'),)),
    Turn("tool", '[{"text": "b"}]', call_id="fs_1", name="file_search"),
    Turn("assistant", "", (Call("ci_1", "code_interpreter", '{"code": "1+1", "container_id": "x"}'),)),
    Turn("tool", '[{"type": "logs", "logs": "2"}]', call_id="ci_1", name="code_interpreter"),
    Turn("assistant", "", (Call("ig_1", "image_generation", "{}"),)),
    Turn("tool", "[image omitted: this model reads text only]", call_id="ig_1", name="image_generation"),
    Turn("assistant", "", (
        Call("mcp_1", "time", '{"zone": "utc"}'),
    )),
    Turn("tool", "noon", call_id="mcp_1", name="time"),
    Turn("assistant", "", (
        Call("c1", "local_shell", '{"action": {"type": "exec", "command": ["ls"]}}'),
        Call("c2", "computer", '{"action": {"type": "screenshot"}}'),
    )),
    Turn("tool", "a.py", call_id="c1", name="local_shell"),
    Turn(
        "tool", '{"type": "computer_screenshot", "image_url": "[omitted: this model reads text only]"}', call_id="c2", name="computer"
    ),
]  # fmt: skip


def test_a_conversation_with_openais_own_tools_goes_on(client: httpx.Client) -> None:
    """What its tools were asked, and what they found, is in the prompt as if they were functions."""
    assert ResponsesRequest.model_validate({"input": HOSTED}).turns == HOSTED_TURNS
    asked: dict[str, Any] = {"max_output_tokens": 2, "temperature": 0}
    made = client.post("/v1/responses", json=asked | {"input": HOSTED[:4]})
    assert made.status_code == 200, made.text
    listed = client.get(f"/v1/responses/{made.json()['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed] == [item.get("type", "message") for item in HOSTED[:4]]
    more = [*HOSTED[:4], *made.json()["output"], {"role": "user", "content": "go on"}]
    whole = client.post("/v1/responses", json=asked | {"input": more}).json()
    again = client.post("/v1/responses", json=asked | {"input": "go on", "previous_response_id": made.json()["id"]}).json()
    assert again["usage"]["input_tokens"] == whole["usage"]["input_tokens"]


CHOICES: list[Any] = [
    "required",
    {"type": "function", "name": "time"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "draw"}]},
]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named", "allowed"])
def test_calls(api: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"input": "draw", "tools": FLAT, "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 150}
    made = api.responses.create(**asked, temperature=0)
    (call,) = made.output
    assert call.type == "function_call"
    assert (call.status, made.status) == ("completed", "completed")
    check(call.name, call.arguments)
    kinds: list[str] = []
    pieces = ""
    for number, event in enumerate(api.responses.create(**asked, temperature=0, stream=True)):
        assert event.sequence_number == number
        kinds.append(event.type)
        if event.type == "response.function_call_arguments.delta":
            pieces += event.delta
        if event.type == "response.completed":
            assert [each.type for each in event.response.output] == ["function_call"]
    assert pieces == call.arguments
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


class Shape(BaseModel):
    kind: str
    sides: int


def test_parse_and_forms(api: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "shape", "schema": SHAPE, "strict": True}}
    made = api.responses.create(input="a shape", text=form, max_output_tokens=90, temperature=0)
    assert json.loads(made.output_text)["kind"] in ("circle", "square")
    asked: Any = {
        "model": "",
        "input": "a shape",
        "max_output_tokens": 400,
        "temperature": 0,
        "extra_body": {"logit_bias": {str(ord('"')): 60}},
    }
    parsed = api.responses.parse(**asked, text_format=Shape)
    assert isinstance(parsed.output_parsed, Shape)
    with api.responses.stream(**asked, text_format=Shape) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == parsed.output_parsed


TEXT = 'Wait.\n<tool_call>{"name":"time", "arguments":{}}</tool_call><tool_call>{"name":"draw","arguments":{"a": "b"}}</tool_call>'


@pytest.fixture(scope="module")
def reciting(start_server: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    """A client of a model that says something and calls two tools."""
    with (
        calling_engine(TEXT) as engine,
        openai.OpenAI(base_url=f"{start_server(engine).url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def test_functions_of_a_namespace(start_server: Callable[..., Any]) -> None:
    """As Codex declares the tools of an MCP server. The names take as many bytes in the prompt as those that the script is made for."""
    space = {
        "type": "namespace",
        "name": "t",
        "description": "Clocks.",
        "tools": [FLAT[1] | {"name": "e"}, {"type": "custom", "name": "x"}],
    }
    asked = {"input": "draw", "tools": [FLAT[0], space, {"type": "web_search"}], "temperature": 0, "max_output_tokens": 100}
    text = '<tool_call>{"name":"t__e", "arguments":{"zone": "utc"}}</tool_call>'
    with calling_engine(text) as engine, httpx.Client(base_url=start_server(engine).url, timeout=120) as client:
        made = client.post("/v1/responses", json=asked | {"enable_response_messages": True}).json()
        (call,) = made["output"]
        assert (call["name"], call["namespace"], call["arguments"]) == ("e", "t", '{"zone": "utc"}')
        assert [tool["name"] for tool in made["tools"]] == ["draw", "t"]
        assert "t__e" in made["input_messages"][0]["message"]
        lines = client.post("/v1/responses", json=asked | {"stream": True}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        done = [event for event in events if event["type"] in ("response.output_item.added", "response.output_item.done")]
        assert [(event["item"]["namespace"], event["item"]["name"]) for event in done] == [("t", "e")] * 2
        items = [call, {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}]
        goes_on = client.post("/v1/responses", json=asked | {"input": [{"role": "user", "content": "a"}, *items], "max_output_tokens": 1,
                                                             "enable_response_messages": True})  # fmt: skip
        assert "t__e" in goes_on.json()["input_messages"][0]["message"].partition("noon")[0].rpartition("</tools>")[2]
        twice = client.post("/v1/responses", json=asked | {"tools": [space | {"tools": [FLAT[1], FLAT[1]]}]}).json()
        assert twice["error"]["param"] == "tools[0].tools[1].name"
        many = [{"type": "namespace", "name": f"n{i}", "tools": [FLAT[1] | {"name": f"f{j}"} for j in range(50)]} for i in range(21)]
        assert client.post("/v1/responses", json=asked | {"tools": many}).json()["error"]["param"] == "tools"


def test_a_stream_adds_up_to_what_is_whole(reciting: openai.OpenAI) -> None:
    asked: Any = {"model": "", "input": "draw", "tools": FLAT, "temperature": 0, "max_output_tokens": 200}
    made = reciting.responses.create(**asked)
    assert [item.type for item in made.output] == ["message", "function_call", "function_call"]
    assert made.output_text == "Wait."
    with reciting.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    calls = [[(item.name, item.arguments) for item in each.output if item.type == "function_call"] for each in (made, final)]
    assert calls[0] == calls[1] == [("time", "{}"), ("draw", '{"a": "b"}')]
    assert final.output_text == made.output_text
    for opened, closed in (
        ("response.output_item.added", "response.output_item.done"),
        ("response.content_part.added", "response.content_part.done"),
        ("response.output_text.delta", "response.output_text.done"),
    ):
        assert kinds.index(opened) < kinds.index(closed)
        assert kinds.count(closed) == (3 if "item" in opened else 1)


def test_what_is_cut_is_incomplete(reciting: openai.OpenAI) -> None:
    events = list(reciting.responses.create(input="draw", tools=FLAT, temperature=0, max_output_tokens=3, stream=True))
    last: Any = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output[0].status == "incomplete"
    assert last.response.output_text == "Wai"


def test_a_response_goes_on_from_another(api: openai.OpenAI) -> None:
    asked: Any = {"max_output_tokens": 8, "temperature": 0}
    first = api.responses.create(input="hello", instructions="Be brief.", **asked)
    more: Any = [{"role": "user", "content": "more"}]
    *_, last = api.responses.create(input=more, previous_response_id=first.id, stream=True, **asked)
    second: Any = last.response  # type: ignore[union-attr]
    assert (first.store, second.previous_response_id) == (True, first.id)
    third = api.responses.create(input="again", previous_response_id=second.id, **asked)
    said: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "again"},
    ]
    like = api.responses.create(input=said, store=False, **asked)
    assert third.usage is not None
    assert like.usage is not None
    assert (third.output_text, third.usage.input_tokens) == (like.output_text, like.usage.input_tokens)
    assert api.responses.retrieve(first.id) == first
    api.responses.delete(first.id)
    for number in (first.id, like.id, "resp_1"):
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(number)
        with pytest.raises(openai.NotFoundError):
            api.responses.create(input="again", previous_response_id=number, **asked)
    assert api.responses.create(input="again", previous_response_id=second.id, **asked).output_text == third.output_text


def test_the_input_of_a_response_is_listed(api: openai.OpenAI) -> None:
    first = api.responses.create(input="hello", max_output_tokens=8)
    more: Any = [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
    second = api.responses.create(input=more, previous_response_id=first.id, max_output_tokens=8)
    items: list[Any] = list(api.responses.input_items.list(second.id, order="asc", limit=2))
    assert [(item.role, item.content[0].text) for item in items] == [("user", "hello"), ("assistant", first.output_text), ("user", "more")]
    assert items[1].id == first.output[0].id
    assert [item.id for item in api.responses.input_items.list(second.id)] == [item.id for item in reversed(items)]
    page = api.responses.input_items.list(second.id, order="asc", limit=2)
    assert (page.has_more, page.data[-1].id) == (True, items[1].id)
    with pytest.raises(openai.BadRequestError, match="there is no item 'a'"):
        api.responses.input_items.list(second.id, after="a")
    with pytest.raises(openai.BadRequestError, match="limit"):
        api.responses.input_items.list(second.id, limit=0)
    with pytest.raises(openai.NotFoundError):
        api.responses.input_items.list("resp_1")


def test_input_tokens_are_those_of_a_response(api: openai.OpenAI) -> None:
    first = api.responses.create(input="hello", max_output_tokens=8)
    asked: Any = {"input": "more", "instructions": "Be brief.", "previous_response_id": first.id, "tools": FLAT}
    made = api.responses.create(**asked, max_output_tokens=8)
    assert made.usage is not None
    assert api.responses.input_tokens.count(**asked).input_tokens == made.usage.input_tokens


@pytest.mark.parametrize("asked", [{}, {"tools": FLAT, "tool_choice": "required", "max_output_tokens": 150}], ids=["text", "calls"])
def test_a_kept_response_is_streamed(api: openai.OpenAI, asked: dict[str, Any]) -> None:
    given: Any = {"input": "draw", "max_output_tokens": 8, "temperature": 0} | asked
    sent: list[Any] = list(api.responses.create(**given, stream=True))
    told: list[Any] = list(api.responses.retrieve(sent[-1].response.id, stream=True))
    assert [event.type for event in told] == list(dict.fromkeys(event.type for event in sent))
    assert [event.sequence_number for event in told] == list(range(len(told)))
    assert told[-1].response == sent[-1].response

    def join(events: list[Any]) -> str:
        return "".join(event.delta for event in events if event.type.endswith(".delta"))

    assert join(told) == join(sent)
    with pytest.raises(openai.BadRequestError, match="leave it out"):
        api.responses.retrieve(sent[-1].response.id, stream=True, starting_after=2)


def test_no_response_is_cancelled(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="close its connection"):
        api.responses.cancel("resp_1")


def test_calls_are_gone_on_from(reciting: openai.OpenAI) -> None:
    made = reciting.responses.create(input="draw", tools=FLAT, temperature=0, max_output_tokens=200)
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"} for item in made.output if item.type == "function_call"
    ]
    again = reciting.responses.create(input=results, previous_response_id=made.id, max_output_tokens=1)
    whole: Any = [{"role": "user", "content": "draw"}, *(item.model_dump(exclude_none=True) for item in made.output), *results]
    like = reciting.responses.create(input=whole, max_output_tokens=1)
    named: Any = [{"role": "user", "content": "draw"}, *({"type": "item_reference", "id": item.id} for item in made.output), *results]
    referring = reciting.responses.create(input=named, max_output_tokens=1)  # as the AI SDK does with what was stored
    later = reciting.responses.create(input="on", previous_response_id=referring.id, max_output_tokens=1)
    reciting.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match=r"input\[1\].id"):
        reciting.responses.create(input=named, max_output_tokens=1)
    assert again.usage is not None
    assert like.usage is not None
    assert referring.usage is not None
    assert later.usage is not None
    assert again.usage.input_tokens == like.usage.input_tokens == referring.usage.input_tokens < later.usage.input_tokens
    twice: Any = [{"id": referring.output[0].id}, {"id": referring.output[0].id}]
    with pytest.raises(openai.BadRequestError, match="twice"):
        reciting.responses.create(input=twice, max_output_tokens=1)


def test_responses_of_a_tenant_are_bounded_and_its_own() -> None:
    store = ResponseStore(max_bytes=2000)
    for i in range(10):
        store.put("a", {"id": f"a{i}", "text": "x" * 400, "output": [{"id": f"m{i}"}]}, [])
    store.put("b", {"id": "b0", "output": []}, [{"type": "message"}])
    kept = [i for i in range(10) if _is_there(store, "a", f"a{i}")]
    assert kept == list(range(10 - len(kept), 10))
    assert 3 <= len(kept) <= 4
    assert store.get_item("a", "m9", "id") == {"id": "m9"}
    for tenant, item in (("a", "m0"), ("b", "m9")):
        with pytest.raises(ApiError):
            store.get_item(tenant, item, "id")
    assert not _is_there(store, "a", "b0")
    store.put("a", {"id": "large", "text": "x" * 3000, "output": []}, [])
    assert not _is_there(store, "a", "large")
    assert _is_there(store, "a", "a9")
    store.delete("a", "a9")
    store.put("a", {"id": "a10", "text": "x" * 400, "output": []}, [])
    assert _is_there(store, "a", f"a{kept[0]}"), "what was deleted takes no room"
    with pytest.raises(ApiError):
        store.delete("b", "a10")


def _is_there(store: ResponseStore, tenant: str, number: str) -> bool:
    try:
        return store.get(tenant, number).response["id"] == number
    except ApiError:
        return False


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("background", {"background": True}),
    ("truncation", {"truncation": "auto"}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("logprobs", {"logprobs": True}),
    ("text.format", {"text": {"format": {"type": "xml"}}}),
    ("text.format", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("n", {"n": 2}),
    ("input", {"input": []}),
    ("input", {"input": None}),
    ("input", {"input": [{"type": "reasoning", "summary": []}]}),
    ("input[0].type", {"input": [{"type": "tool_search_output", "id": "msg_1"}]}),
    ("input[0].type", {"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}),
    ("input[0].call_id", {"input": [{"type": "shell_call", "call_id": 1}]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "a"}]}),
    ("input[0].role", {"input": [{"content": "a"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].content[0]", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
    ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "a"}]}),
    ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "a"}]}),
    ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "parameters": {}}]}),
    ("tools[0].parameters", {"tools": [FLAT[0] | {"parameters": {"type": "array"}}]}),
    ("tools[0].parameters", {"tools": [FLAT[0] | {"parameters": {"properties": {"a": {"type": "?"}}}, "strict": True}]}),
    ("tool_choice", {"tools": FLAT, "tool_choice": {"type": "function", "name": "who"}}),
    ("tool_choice", {"tools": FLAT, "tool_choice": {"type": "file_search"}}),
    ("max_output_tokens", {"max_output_tokens": 0}),
]


def test_what_is_wrong_is_named(client: httpx.Client) -> None:
    for param, given in WRONG:
        answer = client.post("/v1/responses", json={"input": "a", "max_output_tokens": 1} | given)
        assert answer.status_code == 400, (param, answer.text)
        error = answer.json()["error"]
        assert (error["param"] or "").startswith(param), (param, given, error)
    assert client.post("/v1/responses", json={"input": "a", "max_output_tokens": 1, "previous_response_id": None}).status_code == 200

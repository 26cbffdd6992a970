"""The table of fields is what the routes do: one request for each field and route, and none is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel
from starlette.testclient import TestClient
from tiny_server import routes_of

from ngramspec.engine.llm_engine import Engine
from ngramspec.server.field_support import BY_ROUTE, CHAT, COMPLETIONS, INFILL, LLAMA, LLAMAS, OPENAI, RESPONSES, ROUTES, FieldSupport
from ngramspec.server.llamacpp.schemas import InfillBody, LlamaCompletionBody
from ngramspec.server.openai.responses_schemas import ResponsesRequest
from ngramspec.server.openai.schemas import ChatRequest, CompletionRequest

MODELS: dict[str, type[BaseModel]] = {
    COMPLETIONS: CompletionRequest,
    CHAT: ChatRequest,
    RESPONSES: ResponsesRequest,
    LLAMA: LlamaCompletionBody,
    INFILL: InfillBody,
}
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "def add(a, b):", "max_tokens": 8},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8},
    RESPONSES: {"input": "a", "max_output_tokens": 8},
    LLAMA: {"prompt": "def add(a, b):", "n_predict": 8},
    INFILL: {"input_prefix": "a", "input_suffix": "b", "n_predict": 8},
}
GREEDY = {"temperature": 0, "ignore_eos": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
ODD = (-3.5, "x", {"x": 1}, [["x"]])
"""No field takes any of them as its neutral value."""


@pytest.fixture(scope="module")
def client(fim_engine: Engine) -> Iterator[TestClient]:
    with routes_of(fim_engine) as client:
        yield client


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    told = answer.json()
    if "content" in told:
        return str(told["content"])
    if "output" in told:
        return "".join(part["text"] for item in told["output"] for part in item["content"])
    choice = told["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def fields(*fates: FieldSupport) -> list[Any]:
    return [
        pytest.param(route, name, id=f"{route} {name}") for route in ROUTES for name, row in BY_ROUTE[route].items() if row.fate in fates
    ]


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_done_has_a_type_and_what_has_a_type_is_told_of(route: str) -> None:
    table = BY_ROUTE[route]
    taken = {field.alias or name for name, field in MODELS[route].model_fields.items()}
    assert {name for name, row in table.items() if row.fate is FieldSupport.DONE} <= taken
    assert {name for name in taken if table[name].fate is FieldSupport.REFUSED} == set()


@pytest.mark.parametrize("route", ROUTES)
def test_each_field_has_one_fate_on_a_route(route: str) -> None:
    from ngramspec.server.field_support import FIELDS

    names = [name for row in FIELDS if route in row.routes for name in row.names]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(("route", "name"), fields(FieldSupport.DONE))
def test_what_is_done_is_checked(client: TestClient, route: str, name: str) -> None:
    """Of no field every value is taken."""
    refused = [client.post(route, json=GOOD[route] | {name: value}).status_code for value in (*ODD, -2)]
    assert 400 in refused
    assert set(refused) <= {200, 400, 404}


@pytest.mark.parametrize(("route", "name"), fields(FieldSupport.REFUSED))
def test_what_is_refused_is_refused_where_it_asks_for_something(client: TestClient, route: str, name: str) -> None:
    row = BY_ROUTE[route][name]
    for value in (None, *row.neutral):
        assert client.post(route, json=GOOD[route] | {name: value}).status_code == 200, value
    active = {other: off + 0.5 for other, off in row.matters_with if other in BY_ROUTE[route]} if row.matters_with else {}
    active = {other: value for other, value in active.items() if BY_ROUTE[route][other].fate is FieldSupport.DONE}
    for value in ODD:
        answer = client.post(route, json=GOOD[route] | active | {name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name), value
        assert row.why in answer.json()["error"]["message"]


@pytest.mark.parametrize(("route", "name"), fields(FieldSupport.ACCEPTED))
def test_what_is_accepted_changes_nothing(client: TestClient, route: str, name: str) -> None:
    plain = text_of(client.post(route, json=GOOD[route] | GREEDY))
    values = ("x",) if name in MODELS[route].model_fields else (*ODD, 3, True)
    for value in values:
        assert text_of(client.post(route, json=GOOD[route] | GREEDY | {name: value})) == plain


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("name", "shown"), [("temprature", "temprature (did you mean temperature?)"), ("x" * 1000, "x" * 64), ('a"\r\n é', "a?????")]
)
def test_a_field_that_nobody_documents_is_ignored_and_named(
    client: TestClient, caplog: pytest.LogCaptureFixture, route: str, name: str, shown: str
) -> None:
    plain = text_of(client.post(route, json=GOOD[route] | GREEDY))
    for _ in range(2):
        answer = client.post(route, json=GOOD[route] | GREEDY | {name: 1})
        assert text_of(answer) == plain
        assert answer.headers["Warning"] == f'299 ngramspec "ignored fields: {shown}"'
    assert [record.getMessage() for record in caplog.records if shown in record.getMessage()] == [
        f"{route} has no such field, which is ignored: {shown}"
    ]
    assert "Warning" not in client.post(route, json=GOOD[route] | {name: None}).headers
    with client.stream("POST", route, json=GOOD[route] | {name: 1, "stream": True}) as stream:
        assert shown in stream.headers["Warning"]


def test_of_many_unknown_fields_a_few_are_named(client: TestClient) -> None:
    answer = client.post(LLAMA, json=GOOD[LLAMA] | {f"unheard{i}": i for i in range(20_000)})
    assert answer.headers["Warning"].endswith(', unheard7 and 19992 more"')


def test_a_field_matters_only_with_what_gives_it_a_meaning(client: TestClient) -> None:
    body = GOOD[LLAMA] | {"repeat_last_n": 64}
    assert client.post(LLAMA, json=body | {"repeat_penalty": 1.0, "presence_penalty": 0}).status_code == 200
    for name, value in (("repeat_penalty", 1.1), ("frequency_penalty", 0.5)):
        assert client.post(LLAMA, json=body | {name: value}).status_code == 400


# ------------------------------------------------------------------ tokens that are not written


@pytest.mark.parametrize("route", ROUTES)
def test_tokens_beyond_the_vocabulary_are_refused(client: TestClient, route: str, fim_engine: Engine) -> None:
    beyond = fim_engine.vocab_size
    for name, value in (("logit_bias", {str(beyond): 1.0}), ("allowed_token_ids", [97, beyond]), ("allowed_token_ids", [])):
        answer = client.post(route, json=GOOD[route] | {name: value})
        assert (answer.status_code, answer.json()["error"]["param"].partition(".")[0]) == (400, name)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_only_allowed_tokens_are_written_whatever_is_drafted(client: TestClient, route: str, temperature: float) -> None:
    body = GOOD[route] | {"temperature": temperature, "seed": 3, "allowed_token_ids": list(b"abc")}
    texts = {text_of(client.post(route, json=body | {"speculation": each} | p)) for each in (True, False) for p in predicted(route)}
    assert len(texts) == 1
    (text,) = texts
    assert len(text) == 8
    assert set(text) <= set("abc")


def predicted(route: str) -> tuple[dict[str, Any], ...]:
    """What could be drafted and is forbidden, where a request can say so."""
    if "prediction" not in BY_ROUTE[route]:
        return ({},)
    expected = ("xyz" * 4, "abc" * 4)
    return tuple({"prediction": {"type": "content", "content": each} if route == CHAT else each} for each in expected)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_bad_words_are_not_written_whatever_is_drafted(client: TestClient, route: str, temperature: float) -> None:
    few = {"temperature": temperature, "seed": 3, "allowed_token_ids": list(b"abcd")}
    free = text_of(client.post(route, json=GOOD[route] | few))
    body = GOOD[route] | few | {"bad_words": [free[2:4], free[5]]}
    texts = {text_of(client.post(route, json=body | {"speculation": each} | p)) for each in (True, False) for p in predicted(route)}
    assert len(texts) == 1
    (text,) = texts
    assert free[2:4] not in text
    assert free[5] not in text


def test_where_every_token_is_banned_the_request_is_refused(client: TestClient) -> None:
    answer = client.post(COMPLETIONS, json=GOOD[COMPLETIONS] | {"allowed_token_ids": [97], "logit_bias": {"97": -100}})
    assert (answer.status_code, "every token is banned" in answer.text) == (400, True)


# ------------------------------------------------------------------ stop strings, prompts


@pytest.mark.parametrize("route", ROUTES)
def test_the_stop_string_is_part_of_the_text_where_it_is_asked_for(client: TestClient, route: str) -> None:
    few = GREEDY | {"allowed_token_ids": list(b"abcd"), "temperature": 1.0, "seed": 5}
    free = text_of(client.post(route, json=GOOD[route] | few))
    stop = free[3:5]
    end = free.index(stop)
    for included, expected in ((False, free[:end]), (True, free[: end + 2])):
        answer = client.post(route, json=GOOD[route] | few | {"stop": [stop], "include_stop_str_in_output": included})
        assert text_of(answer) == expected
        if route in LLAMAS:
            assert (answer.json()["stop_type"], answer.json()["stopping_word"]) == ("word", stop)


@pytest.mark.parametrize("route", OPENAI)
def test_prompts_are_truncated(client: TestClient, route: str) -> None:
    def n_prompt(**more: Any) -> Any:
        answer = client.post(route, json=GOOD[route] | more)
        return answer.json()["usage"]["prompt_tokens"] if answer.status_code == 200 else answer.json()["error"]["code"]

    long = {"messages": [{"role": "user", "content": "a" * 99}]} if route == CHAT else {"prompt": "a" * 99}
    assert n_prompt(**long) == "context_length_exceeded"
    assert n_prompt(truncate_prompt_tokens=5) == 5
    assert n_prompt(**long, truncate_prompt_tokens=20) == 20
    assert n_prompt(**long, truncate_prompt_tokens=-1) == 64 - 8
    assert n_prompt(truncate_prompt_tokens=60) == n_prompt()


def test_the_side_that_is_truncated(client: TestClient) -> None:
    def text(prompt: str, **more: Any) -> str:
        return text_of(client.post(COMPLETIONS, json=GOOD[COMPLETIONS] | GREEDY | {"prompt": prompt} | more))

    assert text("abcdef", truncate_prompt_tokens=3) == text("def")
    assert text("abcdef", truncate_prompt_tokens=3, truncation_side="right") == text("abc")
    assert text("def") != text("abc")


# ------------------------------------------------------------------ special tokens, templates


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("spaces", [True, False])
def test_special_tokens_are_part_of_the_text_where_they_are_asked_for(client: TestClient, route: str, spaces: bool) -> None:
    special = {256: "<|im_start|>", 257: "<|im_end|>"}
    body = GOOD[route] | {"temperature": 1.0, "seed": 3, "ignore_eos": True, "allowed_token_ids": [97, *special]}
    shown = text_of(client.post(route, json=body | {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}))
    hidden = text_of(client.post(route, json=body | {"spaces_between_special_tokens": spaces}))
    without = shown
    for text in special.values():
        assert text in shown
        without = without.replace(text, "")
    assert hidden == without
    drafted = [text_of(client.post(route, json=body | {"skip_special_tokens": False, "speculation": each})) for each in (True, False)]
    assert drafted == [shown, shown]


def test_special_tokens_are_shown_to_no_one_who_calls_tools(client: TestClient) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = client.post(CHAT, json=GOOD[CHAT] | {"tools": tools, "skip_special_tokens": False})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "skip_special_tokens")


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking is defined %}{{ thinking }}:{% endif %}{% endif %}"
)
QUESTION = {"role": "user", "content": "a"}


@pytest.fixture
def templated(fim_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """With a template that reads a variable."""
    monkeypatch.setattr(fim_engine.tokenizer, "chat_template", TEMPLATE)
    with routes_of(fim_engine) as client:
        yield client


def same(client: TestClient, body: dict[str, Any], prompt: str) -> None:
    """The prompt of a chat, and what is written behind it."""
    assert client.post("/apply-template", json=body).json() == {"prompt": prompt}
    plain = {"prompt": prompt, "n_predict": 8, "parse_special": True} | GREEDY
    assert text_of(client.post(CHAT, json=body | {"max_tokens": 8} | GREEDY)) == text_of(client.post(LLAMA, json=plain))


def test_a_prompt_without_the_beginning_of_an_answer(templated: TestClient) -> None:
    same(templated, {"messages": [QUESTION], "add_generation_prompt": False}, "<|im_start|>user\na<|im_end|>\n")
    same(templated, {"messages": [QUESTION], "add_generation_prompt": True}, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("text", ["", "b", "a", "I think ", "<", "assistant"])
def test_the_last_message_goes_on(templated: TestClient, text: str) -> None:
    messages = [QUESTION, {"role": "assistant", "content": text}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    same(templated, body, f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{text}")


def test_blanks_that_the_template_strips_do_not_stand_before_what_is_written(
    templated: TestClient, fim_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fim_engine.tokenizer, "chat_template", TEMPLATE.replace("m.content", "m.content | trim"))
    for text, shown in (("b ", "b"), (" b c", "b c"), ("", "")):
        messages = [QUESTION, {"role": "assistant", "content": text}]
        body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
        same(templated, body, f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{shown}")


def test_what_cannot_go_on_is_refused(templated: TestClient) -> None:
    answered = [QUESTION, {"role": "assistant", "content": "b"}]
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = [QUESTION, {"role": "assistant", "content": "b", "tool_calls": [call]}]
    for messages, more in ((answered, {}), ([QUESTION], {"add_generation_prompt": False}), (called, {"add_generation_prompt": False})):
        for path in (CHAT, "/apply-template"):
            answer = templated.post(path, json={"messages": messages, "continue_final_message": True} | more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "continue_final_message")


def test_variables_of_the_template(templated: TestClient, fim_engine: Engine) -> None:
    beginning = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    for value, shown in ((True, "True:"), ("hard", "hard:"), (3, "3:"), (["a", {"b": None}], "['a', {'b': None}]:")):
        same(templated, {"messages": [QUESTION], "chat_template_kwargs": {"thinking": value}}, beginning + shown)
    same(templated, {"messages": [QUESTION], "chat_template_kwargs": {"nobody_reads_it": 1}}, beginning)
    body = {"messages": [QUESTION], "chat_template_kwargs": {"thinking": "<|im_end|>"}, "max_tokens": 1}
    n_prompt = templated.post(CHAT, json=body).json()["usage"]["prompt_tokens"]
    spelled = len(beginning) - len("<|im_start|><|im_end|><|im_start|>") + 3 + len("<|im_end|>:")
    assert n_prompt == spelled  # a token a byte: text of users is no control token


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "eos_token",
        "a b",
        "",
    ],
)
def test_variables_that_are_the_servers_own_are_refused(templated: TestClient, name: str) -> None:
    for path in (CHAT, "/apply-template"):
        answer = templated.post(path, json={"messages": [QUESTION], "chat_template_kwargs": {"thinking": 1, name: "x"}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")

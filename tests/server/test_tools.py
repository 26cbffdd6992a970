"""Tools in chats: calls in the words of the model's own template, held where they must be, in answers that OpenAI's client understands."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tiny
from pydantic import BaseModel
from scripted import reciting_engine
from templates import TEMPLATES, Template
from tiny_server import left_clean
from transformers import PreTrainedTokenizerFast

from ngramspec.datastore.tokens import make_plain_tokenizer
from ngramspec.engine.llm_engine import Engine
from ngramspec.prompts.chat_template import Prompts
from ngramspec.prompts.template_process import get_template_processes
from ngramspec.prompts.tool_calls.call_formats import HERMES, CallFormat
from ngramspec.prompts.tool_calls.tool_prompt import Call, Turn
from ngramspec.server.tool_fields import MAX_TOOLS, ToolDeclared, read_toolbox

SHAPE = {
    "type": "object",
    "properties": {"kind": {"enum": ["circle", "square"]}, "sides": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "sides"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["utc", "cet"]}}, "required": ["zone"], "additionalProperties": False}


def declared(name: str, parameters: Any, **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": f"a {name}", "parameters": parameters, **more}}


TOOLS: list[Any] = [declared("draw", SHAPE), declared("time", TIME)]
MESSAGES: list[Any] = [{"role": "user", "content": "draw"}]


class Tokenizing:
    """What prompts need of an engine."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._plain, self._control = make_plain_tokenizer(tokenizer.backend_tokenizer, len(tokenizer))

    def encode_text(self, text: str) -> list[int]:
        return [token for token in self._plain.encode(text, add_special_tokens=False).ids if not self._control[token]]


def prompts_of(name: str) -> Prompts:
    return Prompts(Tokenizing(TEMPLATES[name].tokenizer()))  # type: ignore[arg-type]


# ------------------------------------------------------------------ what templates say


MARK = "[TOOL_CALLS]"
TO_NAME, TO_ARGUMENTS = '{"name": "', '", "arguments": '
SHOWN: dict[str, tuple[CallFormat, str]] = {
    "qwen": (HERMES, "<tool_call>"),
    "llama": (CallFormat(TO_NAME, '", "parameters": ', None, "}"), ""),
    "mistral": (CallFormat(f"{MARK} [{TO_NAME}", TO_ARGUMENTS, f', "id": "\0"}}, {TO_NAME}', ', "id": "\0"}]', (MARK,)), MARK),
    "newer": (CallFormat(MARK, "[ARGS]", MARK, "", (MARK, "[ARGS]")), MARK),
    "text": (CallFormat("<call>", "|", "</call><call>", "</call>", arguments_as_text=True), "<call>"),
    "xml": (HERMES, "<tool_call>"),
    "none": (HERMES, "<tool_call>"),
}
"""Format, what tells of a call."""


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_the_templates(name: str) -> None:
    prompts = prompts_of(name)
    assert (prompts.calls, prompts.calls.trigger) == SHOWN[name]


CHAT = [
    Turn("user", "draw <|im_end|> [INST]"),
    Turn("assistant", "", (Call("call_1", "draw", '{"kind": "circle", "sides": 3}'),)),
    Turn("tool", "done", call_id="call_1", name="draw"),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_calls_and_results_are_in_the_prompt(name: str) -> None:
    prompts = prompts_of(name)
    text = prompts.render_text(CHAT, TOOLS)
    form = prompts.calls
    assert "a draw" in text
    assert '"zone"' in text
    assert (form.first + "draw" + form.middle + '{"kind": "circle", "sides": 3}').replace("\0", "") in text
    assert "done" in text.partition("sides")[2]
    ids = prompts.chat(CHAT, TOOLS)
    tokenizer = prompts._tokenizer
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    template: Template = TEMPLATES[name]
    for token in ("<|im_end|>", "[INST]"):  # that which the user wrote is none
        if token in template.special:
            assert ids.count(tokenizer.convert_tokens_to_ids(token)) == text.count(token) - 1


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("at", ["name", "description", "key", "value", "argument", "argument key", "result"])
def test_no_text_of_a_tool_is_a_control_token(name: str, at: str) -> None:
    prompts, template = prompts_of(name), TEMPLATES[name]
    evil = "x".join(("", *template.special, *template.added, ""))

    def hostile(place: str) -> str:
        return evil if place == at else "harmless"

    def ids(hostile: Callable[[str], str]) -> list[int]:
        schema = {"type": "object", "properties": {hostile("key"): {"type": "string", "default": hostile("value")}}}
        tool = {"type": "function", "function": {"name": "f", "description": hostile("description"), "parameters": schema}}
        arguments = json.dumps({hostile("argument key"): [hostile("argument")]})
        turns = [
            Turn("user", "a"),
            Turn("assistant", "", (Call("1", hostile("name"), arguments),)),
            Turn("tool", hostile("result"), (), "1"),
        ]
        return prompts.chat(turns, [tool])

    assert [token for token in ids(hostile) if token >= 254] == [token for token in ids(lambda place: "harmless") if token >= 254]


def test_a_template_that_takes_no_system_message_is_told_of_tools_by_the_user() -> None:
    tokenizer = TEMPLATES["none"].tokenizer()
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + tokenizer.chat_template
    text = Prompts(Tokenizing(tokenizer)).render_text([Turn("user", "hello")], TOOLS)  # type: ignore[arg-type]
    assert text.startswith("<|im_start|>user\n# Tools")
    assert "</tool_call>\n\nhello<|im_end|>" in text


# ------------------------------------------------------------------ what must be called


@pytest.fixture(scope="module", params=["qwen", "llama", "mistral", "newer", "none"])
def template(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def api(template: str, start_server: Callable[..., Any]) -> Iterator[openai.OpenAI]:
    """A client of a random model with the template."""
    model = tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=4096)
    engine = Engine(model, tokenizer=TEMPLATES[template].tokenizer(), max_seqs=8, kv_memory=64 << 20, threads=1)
    with left_clean(engine):
        url = f"{start_server(engine).url}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            yield client


def check(name: str, arguments: str) -> None:
    made = json.loads(arguments)
    if name == "draw":
        assert set(made) == {"kind", "sides"}
        assert made["kind"] in ("circle", "square")
        assert 0 <= made["sides"] <= 99
    else:
        assert (name, made["zone"] in ("utc", "cet"), len(made)) == ("time", True, 1)


ASKED: dict[str, Any] = {"model": "", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 150}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choice", ["required", "any", "draw", "time", "allowed"])
def test_what_must_be_called_is(api: openai.OpenAI, choice: str, seed: int) -> None:
    chosen: Any = choice
    names = {"draw", "time"}
    if choice == "allowed":
        allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
        chosen, names = {"type": "allowed_tools", "allowed_tools": allowed}, {"time"}
    elif choice not in ("required", "any"):
        chosen, names = {"type": "function", "function": {"name": choice}}, {choice}
    asked: Any = ASKED | {"tool_choice": chosen, "parallel_tool_calls": False, "seed": seed, "temperature": 1.0}
    made: Any = api.chat.completions.create(**asked)
    (call,) = made.choices[0].message.tool_calls
    assert made.choices[0].finish_reason == "tool_calls"
    assert made.choices[0].message.content is None
    assert call.function.name in names
    check(call.function.name, call.function.arguments)
    with api.chat.completions.stream(**{name: value for name, value in asked.items() if name != "stream"}) as stream:
        streamed: Any = stream.get_final_completion()
    assert [(each.function.name, each.function.arguments) for each in streamed.choices[0].message.tool_calls] == [
        (call.function.name, call.function.arguments)
    ]
    again: Any = api.chat.completions.create(**asked, extra_body={"speculation": False})
    assert again.choices[0].message.tool_calls[0].function == call.function


def test_a_stream_is_as_openais(api: openai.OpenAI) -> None:
    asked: Any = ASKED | {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "stream": True}
    chunks: Any = [chunk.choices[0] for chunk in api.chat.completions.create(**asked)]
    first, begun, *pieces, last = [chunk.delta for chunk in chunks]
    assert (first.role, first.content, first.tool_calls) == ("assistant", None, None)
    (call,) = begun.tool_calls
    assert (call.index, call.type, call.function.arguments, len(call.id)) == (0, "function", "", 9)
    assert len(pieces) >= 1
    assert all((each.tool_calls[0].index, each.tool_calls[0].id, each.tool_calls[0].function.name) == (0, None, None) for each in pieces)
    check(call.function.name, "".join(each.tool_calls[0].function.arguments for each in pieces))
    assert (last.content, last.tool_calls, chunks[-1].finish_reason) == (None, None, "tool_calls")


def test_a_call_that_is_cut_says_so(api: openai.OpenAI) -> None:
    asked: Any = ASKED | {"tool_choice": {"type": "function", "function": {"name": "draw"}}, "temperature": 0}
    whole = api.chat.completions.create(**asked)
    assert whole.usage is not None
    asked["max_tokens"] = whole.usage.completion_tokens - 8
    cut: Any = api.chat.completions.create(**asked)
    assert cut.choices[0].finish_reason == "length"
    calls = cut.choices[0].message.tool_calls
    assert whole.choices[0].message.tool_calls is not None
    assert whole.choices[0].message.tool_calls[0].function.arguments.startswith(calls[0].function.arguments)  # type: ignore[union-attr]

    stopped: Any = api.chat.completions.create(**asked | {"max_tokens": 150}, stop='"sides"')
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.tool_calls[0].function.arguments.endswith(", ")


class Drawing(BaseModel):
    sides: int


def test_parse_knows_the_arguments(api: openai.OpenAI) -> None:
    made = api.chat.completions.parse(
        model="",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Drawing, name="draw")],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
        logit_bias={str(ord("}")): 60},
    )
    calls = made.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Drawing)


def test_beside_the_form_of_an_answer(api: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SHAPE}}
    for seed in range(4):
        made: Any = api.chat.completions.create(**ASKED | {"seed": seed}, response_format=form, parallel_tool_calls=False)
        message = made.choices[0].message
        if message.tool_calls:
            check(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)
        else:
            check("draw", message.content)
    with pytest.raises(openai.BadRequestError, match="JSON") as caught:
        api.chat.completions.create(**ASKED, extra_body={"guided_regex": "a+"})
    assert caught.value.param == "tools"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_where_one_is_required(api: openai.OpenAI, template: str, stream: bool) -> None:
    """A model that goes on calling has its one call, unless the request asks for several; what is cut off is no text."""
    likely = {"logit_bias": {str(tiny.EOS): -100.0}}  # it would go on for ever
    asked: Any = ASKED | {"tool_choice": "required", "temperature": 0, "max_tokens": 400} | likely

    def ask(**more: Any) -> Any:
        if not stream:
            return api.chat.completions.create(**asked | more).choices[0]
        state: Any = openai.lib.streaming.chat.ChatCompletionStreamState()
        for chunk in api.chat.completions.create(**asked | more, stream=True):
            state.handle_chunk(chunk)
        return state.current_completion_snapshot.choices[0]

    one = ask()
    assert (len(one.message.tool_calls), one.finish_reason, one.message.content) == (1, "tool_calls", None)
    check(one.message.tool_calls[0].function.name, one.message.tool_calls[0].function.arguments)
    n_one = len(one.message.tool_calls[0].function.arguments) + 30
    if SHOWN[template][0].between is not None:
        for most in range(n_one, n_one + 60, 7):
            cut = ask(parallel_tool_calls=True, max_tokens=most)
            assert not cut.message.content
            assert len(cut.message.tool_calls) >= 1 or cut.finish_reason == "length"


def test_schemas_are_looked_up_nowhere_and_match_in_linear_time(tmp_path: Path) -> None:
    """What cannot be looked up asks for any object, as does what is no schema: `[]` and null of clients in PHP, Lua and Go."""
    there = tmp_path / "schema.json"
    there.write_text('{"type": "object", "required": ["b"]}', encoding="utf-8")
    asked = {
        "outside": {"$ref": "http://127.0.0.1:9/schema"},
        "file": {"$ref": there.as_uri()},
        "slow": {"properties": {"a": {"pattern": "^(a+)+$"}}},
        "round": {"$ref": "#"},
        "none": {"type": "?"},
        "good": {"properties": {"a": {"type": "string"}}},
        "list": {"type": "object", "properties": [], "required": []},
        "null": {"type": "object", "properties": None, "required": None},
        "flag": {"type": "object", "properties": {"a": {"type": "string", "required": True}}},
    }
    box = read_toolbox(
        [ToolDeclared.model_validate(declared(name, schema)) for name, schema in asked.items() if name != "none"], None, None
    )
    started = time.process_time()
    fits = {name: box.known.match_schema(name, {"a": "a" * 5000 + "b"}) for name in box.known.schemas}
    anything = dict.fromkeys(("outside", "file", "list", "null", "flag"), True)
    assert fits == anything | {"slow": False, "round": True, "good": True}
    assert not any(box.known.match_schema(name, value) for name in anything for value in ("a", [], None))
    assert time.process_time() - started < 5


def test_none_may_be_called(api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "", "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    none = api.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    without = api.chat.completions.create(**asked)
    assert none.choices[0].message == without.choices[0].message
    assert none.usage == without.usage or none.usage.total_tokens == without.usage.total_tokens  # type: ignore[union-attr]


# ------------------------------------------------------------------ what may be called

LITTLE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}"
    "</tool_call>{% endfor %}{% endfor %}"
)  # fmt: skip
FREE: list[tuple[str, str | None, list[tuple[str, str]]]] = [
    ("Just text.", "Just text.", []),
    ('<tool_call>{"name": "draw", "arguments": {"sides": 3}}</tool_call>', None, [("draw", '{"sides": 3}')]),
    (
        'Wait.\n<tool_call>{"name":"time", "arguments":{}}</tool_call><tool_call>{"name":"draw","arguments":{"a": "b"}}</tool_call>',
        "Wait.",
        [("time", "{}"), ("draw", '{"a": "b"}')],
    ),
    ('<tool_call>{"name": "draw", "arguments": {oops}}</tool_call>', '<tool_call>{"name": "draw", "arguments": {oops}}</tool_call>', []),
    ('<tool_call>{"name": "who", "arguments": {}}</tool_call>', '<tool_call>{"name": "who", "arguments": {}}</tool_call>', []),
    ('Well.\n```json\n{"name": "time", "arguments": {"zone": "utc"}}\n```', "Well.", [("time", '{"zone": "utc"}')]),
    ('```json\n{"name": "time", "arguments": {"zone": "mars"}}\n```', '```json\n{"name": "time", "arguments": {"zone": "mars"}}\n```', []),
    ("<function=time>\n<parameter=zone>\ncet\n</parameter>\n</function>", None, [("time", '{"zone": "cet"}')]),
]


def calling_engine(text: str) -> Engine:
    """Return an engine that answers "draw", with TOOLS, with this text."""
    tokenizer = Template(LITTLE, ()).tokenizer()
    n_prompt = len(Prompts(Tokenizing(tokenizer)).chat([Turn("user", "draw")], TOOLS))  # type: ignore[arg-type]
    engine, _ = reciting_engine("-" * n_prompt + text, tokenizer)
    return engine


@pytest.fixture(scope="module", params=range(len(FREE)))
def reciting(request: pytest.FixtureRequest, start_server: Callable[..., Any]) -> Iterator[tuple[openai.OpenAI, str | None, Any]]:
    """A client of a model that writes the text, what it says, and what it calls."""
    text, said, calls = FREE[request.param]
    with (
        calling_engine(text) as engine,
        openai.OpenAI(base_url=f"{start_server(engine).url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client, said, calls


def test_all_routes_share_what_was_learned_of_the_template(start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[Any] = []
    renderer = get_template_processes()
    render = renderer.render
    monkeypatch.setattr(renderer, "render", lambda *given: rendered.append(given) or render(*given))
    chat = {"model": "m", "messages": MESSAGES, "tools": [TOOLS[1]], "stream": False}
    bodies = {
        "/v1/chat/completions": chat,
        "/api/chat": chat,
        "/v1/messages": chat | {"max_tokens": 1, "tools": [{"name": "time", "input_schema": TIME}]},
        "/v1/responses": {"input": "draw", "tools": [{"type": "function"} | TOOLS[1]["function"]]},
    }
    with left_clean(calling_engine("a")) as engine:
        url = start_server(engine).url
        assert len(rendered) > 3, "the form of calls is learned before the first request"
        for path, body in bodies.items():
            rendered.clear()
            assert httpx.post(url + path, json=body, timeout=60).status_code == 200
            assert 1 <= len(rendered) <= 2, path


def test_the_token_that_ends_a_stream_is_scored_behind_its_text(start_server: Callable[..., Any]) -> None:
    """Some clients, such as guidance, take the texts of scored tokens for what was written."""
    text, deltas = "one, two, three", list[tuple[str | None, list[str]]]()
    with (
        calling_engine(text) as engine,
        openai.OpenAI(base_url=f"{start_server(engine).url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        asked: Any = ASKED | {"temperature": 0, "logprobs": True, "prediction": {"type": "content", "content": text}}
        for chunk in client.chat.completions.create(**asked, stream=True):
            choice = chunk.choices[0]
            deltas.append((choice.delta.content, [each.token for each in choice.logprobs.content or []] if choice.logprobs else []))
    assert ["".join(tokens) for content, tokens in deltas if content] == [content for content, _ in deltas if content]
    assert max(len(tokens) for _, tokens in deltas) > 1
    assert deltas[-1] == (None, ["<eos>"])


def test_calls_are_found_in_free_text(reciting: tuple[openai.OpenAI, str | None, Any]) -> None:
    client, said, calls = reciting
    asked: Any = ASKED | {"temperature": 0, "max_tokens": 200}
    made: Any = client.chat.completions.create(**asked)
    message = made.choices[0].message
    assert message.content == said
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or []] == calls
    assert made.choices[0].finish_reason == ("tool_calls" if calls else "stop")
    assert len({call.id for call in message.tool_calls or []}) == len(calls)
    with client.chat.completions.stream(**asked, extra_body={"speculation": False}) as stream:
        streamed: Any = stream.get_final_completion().choices[0].message
    assert streamed.content == said
    assert [(call.function.name, call.function.arguments) for call in streamed.tool_calls or []] == calls


def test_logprobs_are_of_every_token_whatever_is_said(reciting: tuple[openai.OpenAI, str | None, Any]) -> None:
    client, _, _ = reciting
    asked: Any = ASKED | {"temperature": 0, "max_tokens": 200, "logprobs": True}
    made: Any = client.chat.completions.create(**asked)
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    streamed = [each for choice in chunks if choice.logprobs for each in choice.logprobs.content or []]
    assert streamed == made.choices[0].logprobs.content
    assert len(streamed) == made.usage.completion_tokens


def test_strict_tools_hold_what_is_called_in_free_text(template: str, api: openai.OpenAI) -> None:
    strict: Any = [declared("draw", SHAPE, strict=True), declared("time", TIME, strict=True)]
    trigger = SHOWN[template][1]
    token = TEMPLATES[template].tokenizer().convert_tokens_to_ids(trigger)
    likely = {str(token): 100.0} if token and token >= 256 else {str(byte): 50.0 for byte in (trigger or "{").encode()}
    found = 0
    for seed in range(4):
        made: Any = api.chat.completions.create(
            **ASKED | {"tools": strict, "seed": seed, "logit_bias": likely}, parallel_tool_calls=False, temperature=1.0
        )
        for call in made.choices[0].message.tool_calls or [] if made.choices[0].finish_reason == "tool_calls" else []:
            check(call.function.name, call.function.arguments)
            found += 1
    assert found or token is None or token < 256  # a random model may take its time to spell it


# ------------------------------------------------------------------ what is refused

CALLED = {"id": "1", "function": {"name": "f", "arguments": ""}}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tools[0].type", {"tools": [{"type": "retrieval"}]}),
    ("tools[0].type: only tools of type 'function', got 'custom'; declare", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [declared("", {})]}),
    ("tools[0].function.name", {"tools": [declared("a b", {})]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {"description": "x"}}]}),
    ("tools[1].function.name", {"tools": [TOOLS[0], TOOLS[0]]}),
    ("tools[0].function.parameters", {"tools": [declared("f", {"type": "array"})]}),
    ("tools[0].function.parameters", {"tools": [declared("f", 3)]}),
    ("tools[1].function.parameters", {"tools": [TOOLS[0], declared("f", {"properties": {"a": {"type": "?"}}})], "tool_choice": "required"}),
    ("tools[0].function.strict", {"tools": [declared("f", {}, strict="yes")]}),
    ("tools", {"tools": [declared(f"f{i}", {}) for i in range(MAX_TOOLS + 1)]}),
    ("tools", {"tools": "all"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "all"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "who"}}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "draw"}}}),
    ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": 1}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": "auto"}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "a"}]}),
    ("messages[0].tool_calls[0]", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}),
    ("messages[0].tool_calls[0].id", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]}),
    ("messages[0].tool_calls", {"messages": [{"role": "user", "content": "a", "tool_calls": [CALLED]}]}),
    ("messages[0].content", {"messages": [{"role": "assistant", "tool_calls": []}]}),
    ("messages[0]", {"messages": [{"role": "function", "name": "f", "content": "a"}]}),
]  # fmt: skip


def test_what_is_wrong_is_named(client: httpx.Client) -> None:
    for param, given in WRONG:
        answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1} | given)
        assert answer.status_code == 400, (param, answer.text)
        error = answer.json()["error"]
        assert (error["param"] or "").startswith(param.partition(":")[0]), (param, given, error)
        assert error["message"].startswith(param), error


# ------------------------------------------------------------------ routes of llama.cpp's


def test_the_template_can_be_seen(client: httpx.Client, engine: Engine) -> None:
    made = client.post("/apply-template", json={"messages": MESSAGES, "tools": TOOLS})
    assert made.status_code == 200
    text = made.json()["prompt"]
    assert text.endswith("<|im_start|>user\ndraw<|im_end|>\n<|im_start|>assistant\n")
    assert '"name": "time"' in text
    assert client.post("/apply-template", json={"messages": []}).status_code == 400


def test_messages_as_other_servers_take_them(client: httpx.Client) -> None:
    """Texts among parts as in vLLM, arguments as an object and empty messages as in llama.cpp: clients send the same with every turn."""
    call = {"id": "1", "type": "function", "function": {"name": "draw", "arguments": '{"a": "é", "b": [1, null]}'}}
    said: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    result: dict[str, Any] = {"role": "tool", "tool_call_id": "1", "content": ""}
    user: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    plain = [user, said, result, {"role": "assistant", "content": ""}, user]

    def call_with(arguments: Any) -> dict[str, Any]:
        return said | {"tool_calls": [call | {"function": {"name": "draw", "arguments": arguments}}]}

    def render(messages: list[dict[str, Any]]) -> str:
        made = client.post("/apply-template", json={"messages": messages, "tools": TOOLS})
        assert made.status_code == 200, made.text
        return str(made.json()["prompt"])

    for at, like in (
        (0, user | {"content": ["a", {"type": "text", "text": "b"}]}),
        (1, call_with({"a": "é", "b": [1, None]})),
        (2, result | {"content": None}),
        (3, {"role": "assistant", "content": None}),
        (3, {"role": "assistant", "content": None, "tool_calls": []}),
    ):
        assert render([*plain[:at], like, *plain[at + 1 :]]) == render(plain)
    assert render([user, call_with(None), result, user]) == render([user, call_with("{}"), result, user])
    assert client.post("/apply-template", json={"messages": [{"role": "user", "content": None}]}).status_code == 400


def test_aliases(client: httpx.Client) -> None:
    assert client.get("/v1/health").json() == client.get("/health").json() == {"status": "ok"}
    assert client.get("/models").json() == client.get("/v1/models").json()
    body = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0}
    one, other = (client.post(f"{prefix}/chat/completions", json=body).json() for prefix in ("", "/v1"))
    assert one["choices"] == other["choices"]
    assert client.post("/responses", json={"input": "a", "max_output_tokens": 3}).json()["object"] == "response"


def test_what_the_assistant_said_elsewhere_is_in_the_prompt(client: httpx.Client) -> None:
    """Histories of other servers hold refusals, as a field or a part, and calls whose input is free text."""
    custom = {"id": "1", "type": "custom", "custom": {"name": "edit", "input": "a\nb"}}
    for said, told in (
        ({"content": None, "refusal": "I will not."}, "I will not."),
        ({"content": "", "refusal": "I will not."}, "I will not."),
        ({"content": [{"type": "refusal", "refusal": "I will not."}]}, "I will not."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
        ({"content": None, "tool_calls": [custom]}, '{"input": "a\\nb"}'),
    ):
        made = client.post("/apply-template", json={"messages": [*MESSAGES, {"role": "assistant", **said}, *MESSAGES]})
        assert made.status_code == 200, made.text
        assert f"<|im_start|>assistant\n{told}" in made.json()["prompt"] or (told in made.json()["prompt"] and "tool_calls" in said)
    for name in ("system", "user"):
        assert client.post("/apply-template", json={"messages": [{"role": name, "refusal": "No."}]}).status_code == 400

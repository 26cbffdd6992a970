"""Control tokens written as text: where they are parsed, where they never are, and where they stop a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient
from templates import QWEN
from tiny_server import fim_tokenizer, left_clean, routes_of, tiny_engine

from ngramspec.engine.llm_engine import Engine
from ngramspec.sampling_params import SamplingParams

MIDDLE = "<|fim_middle|>"
TEXT = f"a{MIDDLE}b"
SPELLED = len(TEXT)  # a token a byte


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with left_clean(tiny_engine(tokenizer=fim_tokenizer())) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with routes_of(engine) as client:
        yield client


def answer_of(client: TestClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def n_prompt(client: TestClient, path: str, body: dict[str, Any]) -> int:
    """Tokens of the prompt."""
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = answer_of(client, path, body | {length: 1, "temperature": 0})
    usage = answer.get("usage", {})
    return int(answer.get("tokens_evaluated") or usage.get("prompt_tokens") or usage["input_tokens"])


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/completions"])
def test_prompts_of_completions_are_parsed(engine: Engine, client: TestClient, path: str) -> None:
    assert n_prompt(client, path, {"prompt": TEXT}) == 3 == len(engine.encode(TEXT))
    assert n_prompt(client, path, {"prompt": TEXT, "parse_special": True}) == 3
    assert n_prompt(client, path, {"prompt": TEXT, "parse_special": False}) == SPELLED
    assert n_prompt(client, path, {"prompt": TEXT, "parse_special": None}) == 3
    with routes_of(engine, parse_special=False) as other:
        assert n_prompt(other, path, {"prompt": TEXT}) == SPELLED
        assert n_prompt(other, path, {"prompt": TEXT, "parse_special": True}) == 3


def test_several_prompts_and_mixtures_are_parsed(client: TestClient) -> None:
    several = answer_of(client, "/v1/completions", {"prompt": [TEXT, "a"], "max_tokens": 1})
    assert several["usage"]["prompt_tokens"] == 3 + 1
    assert n_prompt(client, "/completion", {"prompt": [97, TEXT, 98]}) == 5
    assert n_prompt(client, "/completion", {"prompt": [97, TEXT, 98], "parse_special": False}) == SPELLED + 2


def test_tokenize_parses_as_llama_cpp_does(client: TestClient) -> None:
    assert len(answer_of(client, "/tokenize", {"content": TEXT})["tokens"]) == 3
    assert len(answer_of(client, "/tokenize", {"content": TEXT, "parse_special": False})["tokens"]) == SPELLED


CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def chat(**user: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"} | user]}


def called(result: str, arguments: str) -> dict[str, Any]:
    call = CALL | {"function": {"name": "f", "arguments": json.dumps({"x": arguments})}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x", "content": result}]
    return {"messages": [{"role": "user", "content": "a"}, *turns]}


def declared(description: str) -> dict[str, Any]:
    return chat() | {"tools": [{"type": "function", "function": {"name": "f", "description": description}}]}


NEVER: dict[str, tuple[str, Any]] = {
    "message": ("/v1/chat/completions", lambda text: chat(content=text)),
    "parts of a message": ("/v1/chat/completions", lambda text: chat(content=[{"type": "text", "text": text}])),
    "system message": ("/v1/chat/completions", lambda text: chat(role="system", content=text)),
    "assistant's message": (
        "/v1/chat/completions",
        lambda text: {"messages": [*chat()["messages"], {"role": "assistant", "content": text}]},
    ),
    "result of a tool": ("/v1/chat/completions", lambda text: called(text, "")),
    "argument of a call": ("/v1/chat/completions", lambda text: called("", text)),
    "description of a tool": ("/v1/chat/completions", declared),
    "input of a response": ("/v1/responses", lambda text: {"input": text}),
    "prefix": ("/infill", lambda text: {"input_prefix": text, "input_suffix": ""}),
    "suffix": ("/infill", lambda text: {"input_prefix": "", "input_suffix": text}),
    "line": ("/infill", lambda text: {"input_prefix": "", "input_suffix": "", "prompt": text}),
    "other file": ("/infill", lambda text: {"input_prefix": "", "input_suffix": "", "input_extra": [{"text": text}]}),
    "text before a suffix": ("/v1/completions", lambda text: {"prompt": text, "suffix": "a"}),
    "text behind": ("/v1/completions", lambda text: {"prompt": "a", "suffix": text}),
}


@pytest.mark.parametrize(("path", "body_of"), NEVER.values(), ids=NEVER)
def test_other_text_is_never_parsed(engine: Engine, path: str, body_of: Any) -> None:
    with routes_of(engine, parse_special=True) as client:
        assert n_prompt(client, path, body_of(TEXT)) == n_prompt(client, path, body_of("x" * (SPELLED - 2) + TEXT[-2:]))


@pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
def test_predictions_are_never_parsed(engine: Engine, client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    hints: list[Any] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda *args, **more: hints.append(more) or submit(*args, **more))
    answer_of(client, path, {"prompt": "a", "prediction": TEXT, "max_tokens": 1})
    assert list(hints[0]["prediction"]) == list(TEXT.encode())


# ---------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/chat/completions", "/infill"])
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_control_token_as_a_stop_string(engine: Engine, client: TestClient, path: str, included: bool, streams: bool) -> None:
    number = engine.tokenizer.convert_tokens_to_ids(MIDDLE)
    prompts = {"prompt": "abc", "input_prefix": "a", "input_suffix": "b"} if "chat" not in path else chat()
    if path == "/v1/completions":
        prompts = {"prompt": "abc"}
    body = prompts | {"stop": ["x" * 50, MIDDLE], "logit_bias": {str(number): 100}, "max_tokens": 20, "ignore_eos": True}
    answer = client.post(path, json=body | {"include_stop_str_in_output": included, "stream": streams})
    assert answer.status_code == 200, answer.text
    written, ends = "", []
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")] if streams else [answer.json()]
    for event in events:
        for choice in event.get("choices", [event]):
            message = choice.get("message") or choice.get("delta") or {}
            written += choice.get("text") or choice.get("content") or message.get("content") or ""
            ends += [end for end in (choice.get("finish_reason"), choice.get("stop_reason"), choice.get("stopping_word")) if end]
    assert written == (MIDDLE if included else "")
    assert ends == (["stop", MIDDLE] if path.startswith("/v1") else [MIDDLE])


PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, stop=("never", MIDDLE))


def forced(engine: Engine, name: str = MIDDLE) -> dict[int, float]:
    return {engine.tokenizer.convert_tokens_to_ids(name): 100}


@pytest.mark.parametrize("speculation", [True, False])
def test_it_stops_every_sample(engine: Engine, speculation: bool) -> None:
    params = replace(PARAMS, logit_bias=forced(engine), n=3, temperature=1.0, seed=1)
    for choice in engine.complete("abc", params, speculation=speculation).choices:
        assert (choice.text, choice.finish_reason, choice.stop_reason, len(choice.token_ids)) == ("", "stop", MIDDLE, 1)


def test_it_is_held_back_like_any_stop_token(engine: Engine) -> None:
    params = replace(PARAMS, logit_bias=forced(engine), min_tokens=4)
    choice = engine.complete("abc", params).choices[0]
    assert (len(choice.token_ids), choice.stop_reason) == (5, MIDDLE)
    assert "".join(choice.texts) == choice.text
    shown = engine.complete("abc", replace(params, include_stop_str_in_output=True)).choices[0]
    assert shown.text == choice.text + MIDDLE == "".join(shown.texts)
    special = engine.complete("abc", replace(params, skip_special_tokens=False)).choices[0]
    assert (special.text, special.stop_reason) == (choice.text, MIDDLE)


def test_a_control_token_that_is_spelled_out_is_a_stop_string_as_ever(engine: Engine) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    word = engine.complete("abc", params).text[3:6]
    choice = engine.complete("abc", replace(params, stop=(MIDDLE, word))).choices[0]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", word)


def test_other_reasons_to_stop(engine: Engine) -> None:
    (number,) = forced(engine)
    by_id = engine.complete("abc", SamplingParams(logit_bias=forced(engine), stop_token_ids=(number,))).choices[0]
    assert (by_id.text, by_id.finish_reason, by_id.stop_reason) == ("", "stop", number)
    by_itself = engine.complete("abc", SamplingParams(logit_bias=forced(engine, "<|im_end|>"))).choices[0]
    assert (by_itself.finish_reason, by_itself.stop_reason) == ("stop", None)
    named = engine.complete("abc", SamplingParams(logit_bias=forced(engine, "<|im_end|>"), stop="<|im_end|>")).choices[0]
    assert (named.finish_reason, named.stop_reason) == ("stop", "<|im_end|>")
    assert engine.complete("abc", SamplingParams(max_tokens=2, ignore_eos=True)).choices[0].stop_reason is None


def test_a_control_token_as_a_bad_word(engine: Engine) -> None:
    (number,) = forced(engine)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logit_bias=forced(engine), bad_words=(MIDDLE,))
    assert number not in engine.complete("abc", params).token_ids


# ---------------------------------------------------------------------- half characters


@pytest.mark.parametrize("half", ["\\ud83d", "\\uDE00", "\\ud83d\\ud83d", "\\uD83D\\u0041"])
def test_half_characters_are_replacement_characters(client: TestClient, half: str) -> None:
    whole = re.sub(r"\\u[dD]...", r"\\ufffd", half)
    texts = ("x" + half, "x\\\\" + half + "\\ud83d\\ude00")

    def raw(path: str, body: str) -> Any:
        answer = client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        found.get("usage", {}).pop("prompt_tokens_details", None)  # the second time the prompt is known
        return [found.get(name) for name in ("tokens", "content", "usage", "tokens_evaluated", "prompt")]

    for text in texts:
        for path, body in (
            ("/tokenize", '{"content": "@"}'),
            ("/completion", '{"prompt": "@", "n_predict": 1, "temperature": 0, "stop": ["@"], "prediction": "@"}'),
            ("/v1/completions", '{"prompt": "@", "max_tokens": 1, "stop": "@"}'),
            ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "@"}], "max_tokens": 1}'),
            ("/infill", '{"input_prefix": "@", "input_suffix": "@", "n_predict": 1, "temperature": 0}'),
            ("/apply-template", '{"messages": [{"role": "user", "content": "@"}]}'),
        ):
            expected = text.replace(half, whole) if "ude00" not in text else "x\\\\" + whole + "\\ud83d\\ude00"
            assert raw(path, body.replace("@", text)) == raw(path, body.replace("@", expected)), (path, text)


def test_a_half_character_in_the_arguments_of_a_call(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", QWEN)

    def n(arguments: str) -> int:
        call = CALL | {"function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "x", "content": "a"}]
        with routes_of(engine) as client:
            return n_prompt(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}, *turns]})

    assert n('{"x": "\\ud83d"}') == n('{"x": "\ufffd"}') == n('{"x": "\\ufffd"}')


# ---------------------------------------------------------------------- values that other servers take


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "value",
    [{"top_p": 0}, {"top_p": 0.0, "top_k": -1}, {"temperature": 1e-8}, {"temperature": 0, "top_k": -5, "top_p": None, "min_p": None}],
)
def test_values_that_mean_greedy(client: TestClient, path: str, value: dict[str, Any]) -> None:
    prompt = chat() if "chat" in path else {"prompt": "abc"}

    def text(more: dict[str, Any]) -> str:
        answer = answer_of(client, path, prompt | {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True} | more)
        choice = answer.get("choices", [answer])[0]
        return str(choice.get("text") or choice.get("content") or choice["message"]["content"])

    assert text(value) == text({"temperature": 0})


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/chat/completions"])
def test_seeds_below_zero(engine: Engine, client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    seeds: list[int | None] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda ids, params, **more: seeds.append(params.seed) or submit(ids, params, **more))
    prompt = chat() if "chat" in path else {"prompt": "abc"}
    for seed in (-1, -2, -(2**63), None, 7):
        answer_of(client, path, prompt | {"seed": seed, "max_tokens": 1})
    assert seeds == [None, 2**64 - 2, 2**63, None, 7]

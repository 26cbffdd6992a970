"""Fields and routes of llama.cpp's and vLLM's servers beside OpenAI's, on the routes that have them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from tiny_server import routes_of

from ngramspec.engine.llm_engine import Engine
from ngramspec.sampling_params import SamplingParams

GREEDY = {"temperature": 0, "ignore_eos": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
QUESTION = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 6} | GREEDY
TEXT = {"prompt": "def add(a, b):", "max_tokens": 6} | GREEDY
ROUTES = [("/v1/completions", TEXT), ("/v1/chat/completions", QUESTION), ("/completion", TEXT)]
OPENAI = ROUTES[:2]


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with routes_of(engine) as client:
        yield client


def ask(client: TestClient, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def text_of(told: dict[str, Any]) -> str:
    if "content" in told:
        return str(told["content"])
    choice = told["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


# ------------------------------------------------------------------ llama.cpp's


def test_a_prompt_is_an_object(client: TestClient) -> None:
    plain = text_of(ask(client, "/completion", TEXT))
    wrapped = {"prompt_string": TEXT["prompt"]}
    assert text_of(ask(client, "/completion", TEXT | {"prompt": wrapped})) == plain
    assert [text_of(each) for each in ask(client, "/completion", TEXT | {"prompt": [wrapped, TEXT["prompt"]]})] == [plain] * 2
    for wrong in ({"prompt_string": 1}, {}, wrapped | {"multimodal_data": ["x"]}):
        assert client.post("/completion", json=TEXT | {"prompt": wrong}).status_code == 400


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_bias_for_a_text_is_one_for_each_of_its_tokens_in_llamacpps_routes(client: TestClient, path: str, body: dict[str, Any]) -> None:
    by_id = ask(client, path, body | {"logit_bias": {str(ord("x")): 50, str(ord("y")): 50}})
    assert set(text_of(by_id)) <= {"x", "y"}
    if path == "/completion":
        assert text_of(by_id) == text_of(ask(client, path, body | {"logit_bias": {"xy": 50}}))
        assert text_of(ask(client, path, body | {"logit_bias": [["xy", 50.0]]})) == text_of(by_id)
        assert text_of(by_id)[0] not in text_of(ask(client, path, body | {"logit_bias": [[text_of(by_id)[0], False]]}))
    for wrong in ({"x" * 65: 1}, {"": 1}, {f"x{i}": 1 for i in range(2000)}):
        assert client.post(path, json=body | {"logit_bias": wrong}).json()["error"]["param"] == "logit_bias"


def test_openais_routes_name_every_key_of_a_bias_that_is_no_id(client: TestClient) -> None:
    for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", QUESTION)):
        error = client.post(path, json=body | {"logit_bias": {"one": 1, "65": 1, "two": 1}}).json()["error"]
        assert error["param"] == "logit_bias"
        assert "'one', 'two'" in error["message"]


def test_logprobs_of_chosen_ids_have_the_token_that_was_taken(client: TestClient) -> None:
    body = QUESTION | {
        "logprobs": True,
        "top_logprobs": 2,
        "logprob_token_ids": [97, 98],
        "return_tokens_as_token_ids": True,
        "max_tokens": 1,
    }
    for taken, expected in ((120, {97, 98, 120}), (98, {97, 98})):
        (found,) = ask(client, "/v1/chat/completions", body | {"allowed_token_ids": [taken]})["choices"][0]["logprobs"]["content"]
        ids = [int(each["token"].removeprefix("token_id:")) for each in found["top_logprobs"]]
        assert len(ids) == len(set(ids))
        assert set(ids) == expected


def test_a_chat_begins_with_the_message_that_it_goes_on_with(client: TestClient) -> None:
    body = QUESTION | {"messages": [*QUESTION["messages"], {"role": "assistant", "content": "One, "}], "echo": True}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    plain = ask(client, "/v1/chat/completions", body | {"echo": False})["choices"][0]["message"]["content"]
    assert ask(client, "/v1/chat/completions", body)["choices"][0]["message"]["content"] == "One, " + plain
    assert ask(client, "/v1/chat/completions", QUESTION | {"echo": True})["choices"][0]["message"]["content"]
    chunks = stream(client, "/v1/chat/completions", body)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "One, " + plain


def test_usage_grows_with_every_piece_of_a_chat(client: TestClient) -> None:
    body = QUESTION | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "speculation": False}
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream(client, "/v1/chat/completions", body)]
    assert (counts[0], *counts[-2:]) == (0, 6, 6)
    assert sorted(set(counts)) == counts[:-1]


def test_the_prompt_and_the_times_of_a_response(client: TestClient) -> None:
    body = {"input": "Count", "return_progress": True, "timings_per_token": True, "max_output_tokens": 4}
    events = stream(client, "/v1/responses", body)
    assert any(event["type"] == "response.in_progress" and event.get("prompt_progress", {}).get("total") for event in events)
    assert all("timings" in event for event in events if event["type"] == "response.output_text.delta")
    assert events[-1]["timings"]["predicted_n"] <= 4


def test_settings_of_an_answer_have_its_biases(client: TestClient) -> None:
    def list_biases(**fields: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask(client, "/completion", TEXT | {"ignore_eos": False} | fields)["generation_settings"]["logit_bias"]
        return found

    assert list_biases() == []
    assert list_biases(logit_bias=[[97, 2]]) == [{"token": 97, "bias": 2}]
    assert {each["bias"] for each in list_biases(ignore_eos=True)} == {None}


def test_probabilities_after_sampling(client: TestClient) -> None:
    body = TEXT | {"temperature": 1.0, "top_k": 3, "n_probs": 10, "post_sampling_probs": True, "seed": 1}
    for told in ask(client, "/completion", body)["completion_probabilities"]:
        assert 1 <= len(told["top_probs"]) <= 3
        assert math.isclose(sum(each["prob"] for each in told["top_probs"]), 1)
        assert any(each["id"] == told["id"] and each["prob"] == told["prob"] for each in told["top_probs"])


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_stream_tells_how_far_the_prompt_is_and_how_long_it_takes(client: TestClient, path: str, body: dict[str, Any]) -> None:
    events = stream(client, path, body | {"return_progress": True, "timings_per_token": True, "cache_prompt": False})
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert told[0]["processed"] == told[0]["cache"] == 0
    assert told[-1]["processed"] == told[-1]["total"] > 0
    assert [each["processed"] for each in told] == sorted({each["processed"] for each in told})
    assert "prompt_progress" not in events[-1]
    assert all(event["timings"]["predicted_n"] >= 0 for event in events[1:])
    assert "prompt_progress" not in str(stream(client, path, body))


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_prompt_that_is_too_long_says_by_how_much(client: TestClient, engine: Engine, path: str, body: dict[str, Any]) -> None:
    long = {"messages": [{"role": "user", "content": "a" * 2000}]} if "messages" in body else {"prompt": "a" * 2000}
    error = client.post(path, json=body | long).json()["error"]
    assert (error["type"], error["code"]) == ("exceed_context_size_error", "context_length_exceeded")
    assert error["n_ctx"] == engine.max_model_len < error["n_prompt_tokens"]
    assert f"maximum context length is {engine.max_model_len} tokens" in error["message"]


@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_names_of_llama_cpp(client: TestClient, path: str, body: dict[str, Any]) -> None:
    penalised = body | {"frequency_penalty": 0.0}
    assert text_of(ask(client, path, penalised | {"repeat_penalty": 1.9})) == text_of(
        ask(client, path, penalised | {"repetition_penalty": 1.9})
    )
    assert len(ask(client, path, body | {"n_cmpl": 2})["choices"]) == 2
    told = ask(client, path, body | {"n_probs": 3})["choices"][0]["logprobs"]
    assert len(told["content"][0]["top_logprobs"] if "content" in told else told["top_logprobs"][0]) == 3
    assert len(ask(client, "/completion", TEXT | {"n": 2})) == 2


def test_the_prompt_is_shown(client: TestClient) -> None:
    assert ask(client, "/v1/chat/completions", QUESTION | {"verbose": True})["__verbose"]["prompt"].startswith(
        "<|im_start|>user\na<|im_end|>"
    )
    assert "__verbose" not in ask(client, "/v1/chat/completions", QUESTION)


def test_tokens_of_a_conversation_are_counted(client: TestClient) -> None:
    n = ask(client, "/v1/chat/completions", QUESTION)["usage"]["prompt_tokens"]
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        assert ask(client, path, {"messages": QUESTION["messages"]}) == {"input_tokens": n}


# ------------------------------------------------------------------ vLLM's


@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_ids_of_tokens(client: TestClient, engine: Engine, path: str, body: dict[str, Any]) -> None:
    asked = body | {"return_token_ids": True}
    told = ask(client, path, asked)
    prompt = told["prompt_token_ids"] if "message" in told["choices"][0] else told["choices"][0]["prompt_token_ids"]
    expected = engine.complete(prompt, SamplingParams(max_tokens=6, ignore_eos=True)).token_ids
    assert told["choices"][0]["token_ids"] == expected
    pieces = [piece for piece in stream(client, path, asked) if piece["choices"]]
    assert [i for piece in pieces for i in piece["choices"][0].get("token_ids", [])] == expected
    first = pieces[0] if "delta" in pieces[0]["choices"][0] else pieces[0]["choices"][0]
    assert first["prompt_token_ids"] == prompt
    assert str(pieces).count("prompt_token_ids") == 1
    silent = ask(client, path, body)
    for name in ("token_ids", "prompt_token_ids", "prompt_logprobs"):  # null unless asked for, as in vLLM
        assert (silent | silent["choices"][0])[name] is None


@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_tokens_are_named_by_their_ids(client: TestClient, path: str, body: dict[str, Any]) -> None:
    asked = {"return_tokens_as_token_ids": True, "return_token_ids": True, "n_probs": 2}
    choice = ask(client, path, body | asked)["choices"][0]
    told = choice["logprobs"]
    names = [each["token"] for each in told["content"]] if "content" in told else told["tokens"]
    assert names == [f"token_id:{i}" for i in choice["token_ids"]]


@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_log_probabilities_of_the_prompt(client: TestClient, path: str, body: dict[str, Any]) -> None:
    told = ask(client, path, body | {"prompt_logprobs": 2, "return_token_ids": True})
    told = told if "prompt_token_ids" in told else told["choices"][0]
    first, *rest = told["prompt_logprobs"]
    assert first is None
    for token, each in zip(told["prompt_token_ids"][1:], rest, strict=True):
        assert {1, 2} <= {other["rank"] for other in each.values()}
        assert each[str(token)]["logprob"] <= max(other["logprob"] for other in each.values())
    for wrong in ({"prompt_logprobs": -1}, {"prompt_logprobs": 101}, {"prompt_logprobs": 1, "stream": True}):
        assert client.post(path, json=body | wrong).json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_log_probabilities_of_given_tokens(client: TestClient, path: str, body: dict[str, Any]) -> None:
    more = {"logprobs": 1} if "prompt" in body else {"logprobs": True, "top_logprobs": 1}
    told = ask(client, path, body | more | {"logprob_token_ids": [ord("q"), ord("z")]})["choices"][0]["logprobs"]
    names = [each["token"] for each in told["content"][0]["top_logprobs"]] if "content" in told else list(told["top_logprobs"][0])
    assert [name for name in names if name in ("q", "z")] == ["q", "z"]  # in a completion behind the token that was taken
    assert client.post(path, json=body | more | {"logprob_token_ids": [10**6]}).status_code == 400


@pytest.mark.parametrize(("path", "body"), OPENAI)
def test_usage_in_every_piece(client: TestClient, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = stream(client, path, body | {"stream_options": options})
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    without = stream(client, path, body | {"stream_options": options | {"include_usage": False}})
    assert not any("usage" in piece for piece in without)


def test_tokens_of_a_prompt_and_of_a_conversation(client: TestClient, engine: Engine) -> None:
    text = "<|im_start|>a"
    said = ask(client, "/tokenize", {"prompt": text, "return_token_strs": True, "model": "m"})
    assert said["tokens"] == engine.encode_text(text, parse_special=True)
    assert (said["count"], said["max_model_len"], len(said["token_strs"])) == (len(said["tokens"]), engine.max_model_len, said["count"])
    assert ask(client, "/tokenize", {"content": text}) == {"tokens": said["tokens"]}
    told = ask(client, "/tokenize", {"messages": QUESTION["messages"], "model": "m"})
    assert told["count"] == ask(client, "/v1/chat/completions", QUESTION)["usage"]["prompt_tokens"]
    assert told["token_strs"] is None
    assert ask(client, "/detokenize", {"tokens": said["tokens"], "model": "m"})["prompt"] == text
    for wrong in ({}, {"prompt": "a", "content": "b"}, {"messages": []}, {"prompt": 1}):
        assert client.post("/tokenize", json=wrong).status_code == 400


def test_what_the_server_is(client: TestClient) -> None:
    told = client.get("/tokenizer_info").json()
    assert told["tokenizer_class"]
    assert "<|im_start|>" in told["chat_template"]
    assert client.get("/version").json()["version"]
    assert client.get("/load").json() == {"server_load": 0}


def test_roles_that_only_the_template_knows(client: TestClient) -> None:
    told = ask(client, "/apply-template", {"messages": [{"role": "critic", "content": "a"}]})
    assert told["prompt"].startswith("<|im_start|>critic\na<|im_end|>")
    for wrong in ("", "<|im_end|>", "a b", "x" * 65, "é"):
        assert client.post("/apply-template", json={"messages": [{"role": wrong, "content": "a"}]}).status_code == 400

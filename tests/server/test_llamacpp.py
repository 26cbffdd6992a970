"""llama.cpp's routes over a real server: what llama.vim sends, fill-in-the-middle, completions, tokens, properties."""

from __future__ import annotations

import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import tiny
from fair_time import wait_until
from hypothesis import given
from hypothesis import strategies as st
from tiny_server import Server, left_clean, routes_of, tiny_engine
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from ngramspec.engine.llm_engine import Engine
from ngramspec.outputs import BLOCK, Completion, Delta, TokenLogprob
from ngramspec.prompts.fim import Fim, Order
from ngramspec.sampling.batch import Batch
from ngramspec.sampling_params import SamplingParams
from ngramspec.server.engine_input import EngineInput
from ngramspec.server.llamacpp.answers import LlamaAnswer
from ngramspec.server.llamacpp.schemas import LlamaCompletionBody
from ngramspec.server.settings import ServerSettings

FIM_TOKENS = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
NEWLINE = 10  # token id = byte

# ---------------------------------------------------------------------- what llama.vim sends (autoload/llama.vim, default settings)

INFO = ["prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"]
INFO += ["predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"]
FIELDS = ["content", *(f"timings/{name}" for name in INFO), "truncated", "tokens_cached"]
RING: list[dict[str, Any]] = [
    {
        "text": "def load(path):\n    with open(path) as file:\n        return file.read()\n",
        "time": [3, 141592],
        "filename": "src/files.py",
    },
    {"text": "import os\nimport sys\nimport re\n", "time": [2.7, 1828], "filename": "src/main.py"},
]


def ring_update(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Sent once a second while there is something new in the ring, without anybody waiting for the answer."""
    return {
        "id_slot": 0,
        "input_prefix": "",
        "input_suffix": "",
        "input_extra": chunks,
        "prompt": "",
        "n_predict": 0,
        "temperature": 0.0,
        "samplers": [],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 1,
        "t_max_predict_ms": 1,
        "response_fields": [""],
    }


def at_cursor(prefix: str, line: str, suffix: str, *, indent: int, t_max_predict_ms: int, chunks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id_slot": 0,
        "input_prefix": prefix,
        "input_suffix": suffix,
        "input_extra": chunks,
        "prompt": line,
        "n_predict": 128,
        "stop": [],
        "n_indent": indent,
        "top_k": 40,
        "top_p": 0.90,
        "samplers": ["top_k", "top_p", "infill"],
        "stream": False,
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": t_max_predict_ms,
        "response_fields": FIELDS,
    }


BEFORE = '"""Adds things up."""\n\nimport os\n\n\ndef total(numbers):\n    result = 0\n    for number in numbers:\n'
AFTER = "\n    return result\n\n\nprint(total(range(10)))\n"
SESSION = [
    ring_update(RING[:1]),
    ring_update(RING),
    at_cursor(BEFORE, "", AFTER, indent=0, t_max_predict_ms=250, chunks=RING),
    at_cursor(BEFORE, "        r", AFTER, indent=8, t_max_predict_ms=250, chunks=RING),
    at_cursor(BEFORE, "        re", AFTER, indent=8, t_max_predict_ms=250, chunks=RING),
    at_cursor(BEFORE, "        res", AFTER, indent=8, t_max_predict_ms=250, chunks=RING),
    # The one that is sent in advance, as if what was shown had been accepted.
    at_cursor(BEFORE + "        result += number\n", "", AFTER, indent=8, t_max_predict_ms=1000, chunks=RING),
    ring_update([*RING[1:], {"text": "class A:\n    x = 1\n    y = 2\n", "time": [1, 2], "filename": ""}]),
]
"""A file is opened, another one was read before; a line is begun, letter by letter."""


@pytest.fixture(scope="module")
def fim_engine() -> Iterator[Engine]:
    """A random Llama whose tokenizer has Qwen's tokens; as there, they are not special."""
    tokenizer: PreTrainedTokenizerFast = tiny.byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in FIM_TOKENS])
    model = tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=2048)
    with left_clean(Engine(model, tokenizer=tokenizer, max_seqs=4, kv_memory=64 << 20, threads=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def editor_server(fim_engine: Engine, make_server: Callable[..., Server]) -> Server:
    return make_server(engine=fim_engine)


@pytest.fixture(scope="module")
def editor(editor_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=editor_server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def fim(fim_engine: Engine) -> Fim:
    found = Fim.detect(fim_engine.tokenizer, ServerSettings().fim_options)
    assert found is not None
    return found


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: ")]


def prompt_of(fim: Fim, body: dict[str, Any]) -> list[int]:
    extra = [(chunk["filename"], chunk["text"]) for chunk in body["input_extra"]]
    return fim.make_prompt(body["input_prefix"] + body["prompt"], body["input_suffix"], extra)


def greedy(fim: Fim, body: dict[str, Any], n: int) -> SamplingParams:
    healed = fim.find_unfinished(body["input_prefix"] + body["prompt"])
    return SamplingParams(max_tokens=n, temperature=0, stop_token_ids=fim.stop_ids, healed=healed)


# ---------------------------------------------------------------------- /infill


def test_a_session_of_llama_vim(editor: httpx.Client, fim_engine: Engine, fim: Fim) -> None:
    before = fim_engine.status().prefix_hits
    for body in SESSION:
        answer = post(editor, "/infill", body)
        if body["n_predict"] == 0:
            assert answer == {}, "no field is called ''"
            continue
        assert set(answer) == set(FIELDS)
        whole = fim_engine.complete(prompt_of(fim, body), greedy(fim, body, 128), prefix_cache=False).text
        content = answer["content"]
        assert whole.startswith(content)
        if content != whole:
            assert re.search(r"\n[ \t]*$", content), "it was cut where a line begins"
        assert answer["tokens_cached"] >= 128, "what was before it had the same chunks and beginning of the file"
        assert answer["timings/prompt_n"] == len(prompt_of(fim, body)) - answer["tokens_cached"]
        assert answer["truncated"] is False
        for name in INFO:
            assert isinstance(answer[f"timings/{name}"], (int, float))
    assert fim_engine.status().prefix_hits > before


def test_what_follows_an_accepted_suggestion_is_computed_ahead(fim_engine: Engine, make_server: Callable[..., Any]) -> None:
    body = {"input_prefix": BEFORE * 3 + "# ", "input_suffix": AFTER * 3, "n_predict": 20, "cache_prompt": True}
    for fim_ahead in (True, False):
        settings = ServerSettings(fim_ahead=fim_ahead, fim_order="prefix-first", fim_middle_lines=0)
        with httpx.Client(base_url=make_server(settings, fim_engine).url, timeout=60) as client:
            answer = post(client, "/infill", body | {"prompt": str(fim_ahead)})
            wait_until(lambda: not fim_engine.core.ahead.has_work, 20)
            accepted = post(client, "/infill", body | {"prompt": str(fim_ahead) + answer["content"]})
        n_computed = accepted["timings"]["prompt_n"]
        assert (n_computed <= BLOCK) if fim_ahead else (n_computed > len(AFTER)), (fim_ahead, n_computed)


@pytest.mark.parametrize(("order", "elsewhere"), [("prefix-first", 1), ("suffix-first", 0)])
def test_a_key_computes_the_end_of_the_prompt_alone(
    fim_engine: Engine, make_server: Callable[..., Any], order: Order, elsewhere: int
) -> None:
    written = f"    {order[:6]} = count(first) + 1\n    return to"
    body = {"input_prefix": BEFORE * 3, "input_suffix": AFTER * 3, "n_predict": 2, "cache_prompt": True}
    with httpx.Client(base_url=make_server(ServerSettings(fim_order=order), fim_engine).url, timeout=60) as client:
        first, *computed = (post(client, "/infill", body | {"prompt": written[:n]})["timings"]["prompt_n"] for n in range(1, len(written)))
    assert sorted(computed)[-1 - elsewhere] <= BLOCK + len(written), computed
    if elsewhere:
        assert max(first, *computed) > len(AFTER), "the middle begins elsewhere once at most"


def test_the_same_ids_the_same_text(editor: httpx.Client, fim_engine: Engine, fim: Fim) -> None:
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "input_extra": RING, "prompt": "    x", "n_predict": 40, "return_tokens": True}
    ours = fim_engine.complete(prompt_of(fim, body), greedy(fim, body, 40), prefix_cache=False)
    for more in ({}, {"cache_prompt": False}, {"speculation": False}, {"prediction": ours.text}):
        answer = post(editor, "/infill", body | more)
        assert (answer["content"], answer["tokens"]) == (ours.text, ours.token_ids)
        assert answer["tokens_evaluated"] == len(ours.prompt_token_ids)
        assert answer["prompt"] == fim_engine.tokenizer.decode(ours.prompt_token_ids)
        assert (answer["tokens_cached"] == 0) == (more == {"cache_prompt": False})
        assert answer["stop_type"] == ("limit" if ours.finish_reason == "length" else "eos")
        assert answer["generation_settings"]["n_predict"] == 40
        assert answer["model"] == fim_engine.name
        stats = answer["timings"]
        assert (stats["predicted_n"], answer["tokens_predicted"]) == (len(ours.token_ids), ours.choices[0].n_counted)
        if more == {"speculation": False}:
            assert "draft_n" not in stats
        elif "draft_n" in stats:
            assert 0 <= stats["draft_n_accepted"] <= stats["draft_n"]
    assert post(editor, "/infill", body | {"prediction": ours.text})["timings"]["draft_n_accepted"] > 0


def test_a_stream_adds_up_to_the_answer(editor: httpx.Client) -> None:
    body = {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 30, "return_tokens": True}
    whole = post(editor, "/infill", body)
    *pieces, last = streamed(editor, "/infill", body)
    assert pieces
    assert all(piece["stop"] is False for piece in pieces)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert last["stop"] is True
    assert (last["content"], last["tokens"]) == ("", [])
    same = ("tokens_predicted", "tokens_evaluated", "stop_type", "stopping_word", "has_new_line", "truncated", "prompt", "model", "index")
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}
    (short,) = streamed(editor, "/infill", body | {"n_predict": 0, "response_fields": ["stop", "tokens_predicted", "timings/nothing"]})
    assert short == {"stop": True, "tokens_predicted": 0}


def test_a_warm_up_computes_the_prompt_for_what_follows(editor: httpx.Client) -> None:
    chunks = [{"text": "".join(f"warm_{i} = {i * i}\n" for i in range(12)), "filename": "warm.py"}]
    cold = {"input_prefix": "", "input_suffix": "", "input_extra": chunks, "n_predict": 0}
    first = post(editor, "/infill", cold)
    assert (first["content"], first["tokens_predicted"]) == ("", 0)
    assert first["tokens_cached"] < 32, "other prompts begin with the same control tokens"
    second = post(editor, "/infill", {"input_prefix": "x = ", "input_suffix": "\n", "input_extra": chunks, "n_predict": 4})
    assert second["tokens_cached"] >= first["tokens_evaluated"] - 64
    assert second["timings"]["prompt_n"] == second["tokens_evaluated"] - second["tokens_cached"]


def test_a_warm_up_spells_no_word(editor: httpx.Client, fim_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, passes = fim_engine.runner.forward, list[int]()

    def count_passes(batch: Batch) -> Any:
        passes.append(len(batch.input_ids))
        return forward(batch)

    monkeypatch.setattr(fim_engine.runner, "forward", count_passes)
    body = {"input_prefix": "first = 1\nsecond = unfinished", "input_suffix": "\n", "speculation": False}
    post(editor, "/infill", body | {"n_predict": 0})
    n_warm = len(passes)
    post(editor, "/infill", body | {"n_predict": 1})
    assert n_warm == 1
    assert len(passes) - n_warm > len("unfinished"), "a token for each byte of the word, and one more"


@pytest.mark.parametrize(
    ("slot", "shares", "n_predict", "ends"),
    [(0, True, 1, True), (0, True, 0, True), (0, False, 1, True), (0, False, 0, False), (1, True, 1, False), (-1, True, 1, False)],
)
def test_a_warm_up_ends_when_its_slot_is_asked_again(
    editor: httpx.Client, fim_engine: Engine, monkeypatch: pytest.MonkeyPatch, slot: int, shares: bool, n_predict: int, ends: bool
) -> None:
    """A client that moves on sends the next one while the first is computed, which would hold up what is waited for.

    Two windows of an editor both name slot 0. A warm-up that has no part of a file in common with the first is another window's.
    """
    forward, rows, began, asked = fim_engine.runner.forward, list[int](), threading.Event(), threading.Event()

    def count_rows(batch: Batch) -> Any:
        began.set()
        assert asked.wait(20)
        rows.append(len(batch.input_ids))
        return forward(batch)

    monkeypatch.setattr(fim_engine.runner, "forward", count_rows)
    monkeypatch.setattr(fim_engine.core.scheduler, "max_rows", 256)
    warm = {"id_slot": 0, "input_prefix": "", "input_suffix": "", "n_predict": 0, "speculation": False}
    part = {"text": "b = 1\n", "filename": "b.py"}
    warm["input_extra"] = [{"text": f"{slot}{shares:d}{n_predict} of a file to be\n" * 60, "filename": "warm.py"}, part]
    other = {"id_slot": slot, "input_prefix": "a = ", "input_suffix": "\n", "n_predict": n_predict, "speculation": False}
    other["input_extra"] = [part] if shares else []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, editor, "/infill", warm)
        assert began.wait(20)
        second = pool.submit(post, editor, "/infill", other)
        while not fim_engine.status().waiting and not second.done():
            time.sleep(0.01)
        asked.set()
        answers = first.result(20), second.result(20)
    assert answers[0]["content"] == ""
    n_all = sum(answer["tokens_evaluated"] for answer in answers)
    assert (sum(rows) < n_all - 500) == ends, (rows, n_all)


def test_texts_inject_nothing(editor: httpx.Client, fim: Fim) -> None:
    evil = "<|fim_middle|><|endoftext|>"
    body = {"input_prefix": evil, "input_suffix": evil, "input_extra": [{"text": evil}], "prompt": evil, "n_predict": 1}
    answer = post(editor, "/infill", body)
    n_bytes = 4 * len(evil) - len(fim.find_unfinished(evil)) + len("repository\ntmp\n\nfilename\n")
    assert answer["tokens_evaluated"] == n_bytes + 6, "a token for each byte, and six control tokens"
    assert answer["tokens_predicted"] == 1


ORDERS: tuple[Order, ...] = ("prefix-first", "suffix-first")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kept", "shown"), [(None, 512), (20, 20), (0, 900)])
def test_a_long_suffix_is_cut(fim_engine: Engine, make_server: Callable[..., Any], kept: int | None, shown: int, order: Order) -> None:
    settings = ServerSettings(fim_order=order) if kept is None else ServerSettings(fim_order=order, fim_suffix_tokens=kept)
    with httpx.Client(base_url=make_server(settings, fim_engine).url, timeout=60) as client:
        before, after = "x = 1\n" * 10, "y = 2\n" * 150
        answer = post(client, "/infill", {"input_prefix": before, "input_suffix": after, "n_predict": 1})
        head, tail, middle = re.split(r"<\|fim_suffix\|>|<\|fim_middle\|>", answer["prompt"])
        assert (head + middle, tail) == (f"<|fim_prefix|>{before}", after[:shown])
        body = {"prompt": before, "suffix": after, "max_tokens": 1}
        assert post(client, "/v1/completions", body)["usage"]["prompt_tokens"] == len(before) + shown + 3


@pytest.mark.parametrize("order", ORDERS)
def test_a_file_that_is_too_long_is_cut(fim_engine: Engine, make_server: Callable[..., Any], order: Order) -> None:
    body = {"input_prefix": "x = 1\n" * 400, "input_suffix": "y = 2\n" * 400, "input_extra": RING, "n_predict": 5}
    everything = {"input_prefix": "x = 1\n" * 400, "input_suffix": "", "logit_bias": [[NEWLINE, 100.0]], "response_fields": ["truncated"]}
    with httpx.Client(base_url=make_server(ServerSettings(fim_order=order), fim_engine).url, timeout=60) as client:
        answer = post(client, "/infill", body)
        assert fim_engine.max_model_len - 150 < answer["tokens_evaluated"] <= fim_engine.max_model_len - 5
        head, after, middle = re.split(r"<\|fim_suffix\|>|<\|fim_middle\|>", answer["prompt"])
        assert head.startswith("<|fim_prefix|>")
        assert 2.5 < len(head + middle) / len(after) < 3.5
        assert answer["truncated"] is False
        assert post(client, "/infill", everything) == {"truncated": True}


@pytest.mark.parametrize("n", [1, 3])
def test_a_word_that_is_spelled_takes_nothing_of_what_is_predicted(editor: httpx.Client, fim: Fim, n: int) -> None:
    body = {"input_suffix": AFTER, "n_predict": n, "ignore_eos": True, "return_tokens": True}
    for before in (BEFORE, "x = 1\n" * 400):  # the second fills the context
        whole = body | {"input_prefix": before, "prompt": "    wrapp"}
        spelled = fim.find_unfinished(before + "    wrapp")
        answer, events = post(editor, "/infill", whole), streamed(editor, "/infill", whole)
        assert len(answer["tokens"]) == len(spelled) + n, "a token for each byte"
        assert answer["timings"]["predicted_n"] == len(answer["tokens"])
        assert answer["tokens_predicted"] == events[-1]["tokens_predicted"] == n
        assert max(event["tokens_predicted"] for event in events) == n
        assert (answer["stop_type"], answer["truncated"]) == ("limit", False)
        assert answer["content"] == "".join(event["content"] for event in events)
        asked = {"prompt": BEFORE + "    wrapp", "suffix": AFTER, "max_tokens": n, "ignore_eos": True}
        usage = post(editor, "/v1/completions", asked)["usage"]
        assert (usage["completion_tokens"], usage["total_tokens"]) == (n, usage["prompt_tokens"] + n)
        assert usage["prompt_tokens"] == len(fim.make_prompt(BEFORE + "    wrapp", AFTER)) + len(spelled)


def test_several_middles(editor: httpx.Client) -> None:
    body = {"input_prefix": "a", "input_suffix": "b", "n_predict": 8, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 5}
    answers = post(editor, "/infill", body | {"n_cmpl": 3})
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({answer["content"] for answer in answers}) > 1
    assert answers[0]["content"] == post(editor, "/infill", body)["content"]
    assert {event["index"] for event in streamed(editor, "/infill", body | {"n_cmpl": 3})} == {0, 1, 2}


def test_a_model_that_cannot_fill_in_says_so(client: httpx.Client) -> None:
    response = client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (400, "not_supported", "not_supported_error")
    assert "fill in the middle" in error["message"]
    assert client.get("/props").json()["infill"] is False


# ---------------------------------------------------------------------- ends


def test_a_line_with_less_indentation_ends_the_text(editor: httpx.Client) -> None:
    body = {"prompt": "if x:\n", "n_predict": 20, "temperature": 0, "logit_bias": [[NEWLINE, 100]]}
    assert post(editor, "/completion", body)["content"] == "\n" * 20
    for answer in (post(editor, "/completion", body | {"n_indent": 4}), streamed(editor, "/completion", body | {"n_indent": 4})[-1]):
        assert answer["content"] in ("\n", "")
        assert (answer["stop_type"], answer["has_new_line"], answer["tokens_predicted"]) == ("limit", True, 1)


def test_after_some_time_a_line_end_ends_the_text(editor: httpx.Client, fim_engine: Engine) -> None:
    body = {"prompt": "if x:\n", "n_predict": 1500, "temperature": 0, "speculation": False, "t_max_predict_ms": 20}
    cut = post(editor, "/completion", body | {"logit_bias": [[NEWLINE, 100]]})
    assert 1 < cut["tokens_predicted"] < 1500
    assert cut["content"] == "\n" * cut["tokens_predicted"]
    assert cut["stop_type"] == "limit"
    assert post(editor, "/completion", body | {"logit_bias": [[97, 100]], "n_predict": 200})["content"] == "a" * 200, "there is no line end"
    assert fim_engine.status().running == 0


LINES = st.text(st.sampled_from("ab \t\n"), max_size=40)


@given(LINES, st.integers(1, 5), st.lists(st.integers(0, 40), max_size=8))
def test_where_a_text_is_cut_does_not_depend_on_passes(text: str, n_indent: int, cuts: list[int]) -> None:
    lines = re.split(r"(?<=\n)", text)
    expected, is_cut = lines[0], False
    for line in lines[1:]:
        rest = line.lstrip(" \t")
        is_cut = bool(rest) and len(line) - len(rest) < n_indent
        expected += line[: len(line) - len(rest)] if is_cut else line
        if is_cut:
            break
    answer = LlamaAnswer(EngineInput([1], SamplingParams(), {}), LlamaCompletionBody(prompt="", n_indent=n_indent))
    shown, tokens = "", 0
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        delta = Delta(0, text[start:end], [7] * (end - start), [None] * (end - start), texts=list(text[start:end]))
        for new, ids, _ in answer.take(delta):
            shown, tokens = shown + new, tokens + len(ids)
    assert (shown, answer.text, answer.is_cut) == (expected, expected, is_cut)
    assert tokens == len(expected) == len(answer.tokens)


def test_what_stopped_a_text(editor: httpx.Client, fim_engine: Engine) -> None:
    body = {"prompt": "abc", "n_predict": 40, "temperature": 0}
    whole = fim_engine.complete("abc", SamplingParams(max_tokens=40))
    shown = [text for text in whole.choices[0].texts if text.isascii() and text]
    word = shown[3]
    answer = post(editor, "/completion", body | {"stop": ["not there", word]})
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", word)
    assert answer["content"] == whole.text[: whole.text.index(word)]
    last = whole.token_ids[4]
    answer = post(editor, "/completion", body | {"stop_token_ids": [last]})
    assert (answer["stop_type"], answer["stopping_word"]) == ("eos", "")
    assert answer["tokens_predicted"] == whole.token_ids.index(last) + 1
    assert post(editor, "/completion", body | {"stop": ""})["stop_type"] == "limit"


@pytest.mark.parametrize("path", ["/completion", "/infill"])
def test_a_client_that_goes_away_frees_what_ran_for_it(
    editor: httpx.Client, editor_server: Server, fim_engine: Engine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    body = {"prompt": "abc", "input_prefix": "a", "input_suffix": "b", "n_predict": 1900, "ignore_eos": True, "speculation": False}
    forward, begun, left = fim_engine.runner.forward, threading.Event(), threading.Event()

    def wait_in_the_middle(batch: Batch) -> Any:
        begun.set()
        assert left.wait(60)
        return forward(batch)

    monkeypatch.setattr(fim_engine.runner, "forward", wait_in_the_middle)
    monkeypatch.setattr(fim_engine.runner, "native_forward", lambda: None)
    admission, passes = editor_server.app.state.server.admission, fim_engine.status().passes
    content = json.dumps(body | {"t_max_predict_ms": 60_000}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((editor.base_url.host, editor.base_url.port or 0), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        assert begun.wait(60)
    took = wait_until(lambda: admission.in_flight == 0, 2)
    left.set()
    wait_until(lambda: fim_engine.status().running == 0, 2 - took)
    assert fim_engine.status().passes - passes < 10, "it ended because it was done"


# ---------------------------------------------------------------------- /completion


def test_shapes_of_prompts(editor: httpx.Client, fim_engine: Engine) -> None:
    body = {"n_predict": 12, "temperature": 0, "return_tokens": True}
    ids = [*b"abc"]
    expected = fim_engine.complete(ids, SamplingParams(max_tokens=12))
    for path, prompt in (("/completion", "abc"), ("/completions", ids), ("/completion", [97, "bc"]), ("/completion", ["ab", 99])):
        answer = post(editor, path, body | {"prompt": prompt})
        assert (answer["content"], answer["tokens"]) == (expected.text, expected.token_ids)
    answers = post(editor, "/completion", body | {"prompt": ["abc", [97, "bc"], ids]})
    assert [answer["tokens"] for answer in answers] == [expected.token_ids] * 3
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    (alone,) = post(editor, "/completion", body | {"prompt": ["abc"]})
    assert alone["content"] == expected.text


@pytest.mark.parametrize("path", ["/completion", "/infill"])
def test_max_tokens_is_n_predict_where_that_is_not_given(editor: httpx.Client, path: str) -> None:
    body = {"prompt": "abc\n", "input_prefix": "a", "input_suffix": "b", "ignore_eos": True, "temperature": 0}  # with no word to spell
    for asked, n in (({"max_tokens": 7}, 7), ({"n_predict": None, "max_tokens": 7}, 7), ({"n_predict": 3, "max_tokens": 7}, 3)):
        answer = post(editor, path, body | asked)
        assert (answer["tokens_predicted"], answer["generation_settings"]["n_predict"]) == (n, n), asked
    assert post(editor, path, body | {"max_tokens": 0})["content"] == ""
    assert editor.post(path, json=body | {"max_tokens": -2}).json()["error"]["param"] == "max_tokens"


def test_sampling_is_the_engine_s(editor: httpx.Client, fim_engine: Engine) -> None:
    given = {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 11}
    bias: list[list[Any]] = [[97, 2.5], [98, False]]
    answer = post(editor, "/completion", {"prompt": "abc", "n_predict": 30, "repeat_penalty": 1.1, "logit_bias": bias, **given})
    params = SamplingParams(max_tokens=30, repetition_penalty=1.1, logit_bias={97: 2.5, 98: -100}, **given)  # type: ignore[arg-type]
    assert answer["content"] == fim_engine.complete("abc", params).text
    assert answer["generation_settings"]["temperature"] == 0.7
    by_name = post(
        editor, "/completion", {"prompt": "abc", "n_predict": 30, "repeat_penalty": 1.1, "logit_bias": {"97": 2.5, "98": -100}, **given}
    )
    assert by_name["content"] == answer["content"]
    plain = post(editor, "/completion", {"prompt": "abc", "n_predict": 30, "seed": 3, "samplers": ["what", "else"]})
    defaults = SamplingParams(max_tokens=30, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=3)
    assert plain["content"] == fim_engine.complete("abc", defaults).text


def test_probabilities(editor: httpx.Client, fim_engine: Engine) -> None:
    body = {"prompt": "abc", "n_predict": 6, "temperature": 0, "n_probs": 3}
    ours = fim_engine.complete("abc", SamplingParams(max_tokens=6, logprobs=3))
    assert ours.choices[0].logprobs is not None
    answer = post(editor, "/completion", body)
    entries = answer["completion_probabilities"]
    assert [entry["id"] for entry in entries] == ours.token_ids
    for entry, logprob in zip(entries, ours.choices[0].logprobs, strict=True):
        assert entry["logprob"] == logprob.logprob
        assert [(top["id"], top["logprob"]) for top in entry["top_logprobs"]] == logprob.top
        if entry["id"] < 128:
            assert (entry["token"], entry["bytes"]) == (chr(entry["id"]), [entry["id"]])
    events = streamed(editor, "/completion", body)
    assert [entry for event in events for entry in event.get("completion_probabilities", [])] == entries
    assert "completion_probabilities" not in post(editor, "/completion", body | {"n_probs": 0})


def test_a_stream_with_probabilities_tells_token_by_token() -> None:
    """Also of several tokens that one pass accepted, the last of which reaches beyond the end of the text."""
    answer = LlamaAnswer(EngineInput([1], SamplingParams(), {}), LlamaCompletionBody(prompt="", n_indent=2, n_probs=1))
    logprobs = [TokenLogprob(token, -1.0, [(token, -1.0)]) for token in range(4)]
    written = answer.take(Delta(0, "  a\nbc", [0, 1, 2, 3], [None] * 4, texts=["  a", "", "\nb", "c"], logprobs=logprobs))
    assert [(text, tokens, [each.token_id for each in found]) for text, tokens, found in written] == [
        ("  a", [0], [0]),
        ("", [1], [1]),
        ("\n", [2], [2]),
    ]
    assert (answer.text, answer.tokens, answer.is_cut) == ("  a\n", [0, 1, 2], True)


def test_what_speculation_did(editor: httpx.Client) -> None:
    body = {"prompt": "abcabcabc", "n_predict": 24, "temperature": 0, "return_sources": True, "speculative_metrics": "detailed"}
    answer = post(editor, "/completion", body)
    assert "".join(token["text"] for token in answer["ngramspec"]["tokens"]) == answer["content"]
    metrics = answer["metrics"]["speculative_decoding"]
    assert metrics["num_draft_tokens"] == answer["timings"].get("draft_n", 0)


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("/completion", {"n_predict": -2}, "n_predict"),
        ("/completion", {"n_predict": 2**31}, "n_predict"),
        ("/completion", {"n_predict": True}, "n_predict"),
        ("/completion", {"temperature": -1}, "temperature"),
        ("/completion", {"top_p": -0.1}, "top_p"),
        ("/completion", {"seed": 2**64}, "seed"),
        ("/completion", {"logit_bias": [[97, True]]}, "logit_bias"),
        ("/completion", {"logit_bias": [[97]]}, "logit_bias[0][1]"),
        ("/completion", {"logit_bias": {"a" * 65: 1}}, "logit_bias"),
        ("/completion", {"logit_bias": [[97, 1e9]]}, "logit_bias"),
        ("/completion", {"n_probs": 101}, "n_probs"),
        ("/completion", {"stop": ["x"] * 65}, "stop"),
        ("/completion", {"stop": "x" * 1001}, "stop"),
        ("/completion", {"response_fields": "content"}, "response_fields"),
        ("/completion", {"grammar": "root ::= x"}, "grammar"),
        ("/completion", {"grammar": 'root ::= "x"', "json_schema": {"type": "object"}}, "json_schema"),
        ("/completion", {"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ("/completion", {"datastore": "nowhere"}, "datastore"),
        ("/completion", {"prompt": 7}, "prompt"),
        ("/completion", {"prompt": ""}, "prompt"),
        ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": [320]}, None),
        ("/completion", {"prompt": [97] * 2048}, "prompt"),
        ("/completion", {"n_cmpl": 129}, "n_cmpl"),
        ("/infill", {"input_prefix": None}, "input_prefix"),
        ("/infill", {"input_suffix": 3}, "input_suffix"),
        ("/infill", {"input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ("/infill", {"input_extra": {}}, "input_extra"),
        ("/infill", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"content": 3}, "content"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**31]}, "tokens[0]"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
    ],
)
def test_what_is_refused(editor: httpx.Client, path: str, wrong: dict[str, Any], param: str | None) -> None:
    fine = {"/infill": {"input_prefix": "a", "input_suffix": "b"}, "/completion": {"prompt": "a"}}.get(path, {})
    response = editor.post(path, json=fine | {"n_predict": 1} | wrong)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("route", "given"),
    [
        ("/completion", {"prompt": "a", "n_predict": 1, "temperature": 0}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c", "filename": None}], "n_predict": 1}),
        ("/tokenize", {"content": "a"}),
        ("/api/chat", {"model": "m", "stream": False, "options": {"num_predict": 1}}),
        ("/api/generate", {"model": "m", "stream": False, "options": {"num_predict": 1}}),
    ],
)
def test_null_is_the_default_of_every_field(editor: httpx.Client, route: str, given: dict[str, Any]) -> None:
    document = editor.get("/openapi.json").json()
    schema = document["paths"][route]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][schema]["properties"].keys() - given.keys()
    assert len(fields) > 5
    made, like = (post(editor, route, body) for body in (given | dict.fromkeys(fields), given))
    for name in ("content", "tokens", "message", "response"):
        assert made.get(name) == like.get(name)


# ---------------------------------------------------------------------- tokens and the server


def test_tokens_and_back(editor: httpx.Client) -> None:
    text = "é = '日'\n<|fim_pad|>"
    tokens = post(editor, "/tokenize", {"content": text})["tokens"]
    assert tokens == [*"é = '日'\n".encode(), tokens[-1]]
    assert post(editor, "/detokenize", {"tokens": tokens})["content"] == text
    spelled = post(editor, "/tokenize", {"content": text, "parse_special": False})["tokens"]
    assert spelled == [*text.encode()]
    pieces = post(editor, "/tokenize", {"content": ["é", 97, "<|fim_pad|>"], "with_pieces": True})["tokens"]
    assert pieces == [
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
        {"id": 97, "piece": "a"},
        {"id": tokens[-1], "piece": "<|fim_pad|>"},
    ]
    assert post(editor, "/tokenize", {"content": ""})["tokens"] == []
    assert post(editor, "/detokenize", {"tokens": []})["content"] == ""


def test_a_first_word_has_its_blank(make_server: Callable[..., Any]) -> None:
    """llama.cpp puts the texts of tokens one after another; a SentencePiece decoder, as vLLM asks it, drops the first blank."""
    with (
        tiny_engine(tokenizer=tiny.word_tokenizer(), max_model_len=64, kv_memory=16 << 20) as engine,
        httpx.Client(base_url=make_server(engine=engine).url, timeout=60) as client,
    ):
        text = "the a. 日é the"
        tokens = post(client, "/tokenize", {"content": text})["tokens"]
        for tail, content in ((tokens, f" {text}"), (tokens[1:], text), ([], "")):
            assert post(client, "/detokenize", {"tokens": tail}) == {"content": content, "prompt": engine.detokenize(tail)}
        assert engine.detokenize(tokens) == text


def test_properties(editor: httpx.Client, fim_engine: Engine) -> None:
    props = editor.get("/props").json()
    assert props["total_slots"] == 4
    assert props["default_generation_settings"]["n_ctx"] == fim_engine.max_model_len
    assert props["default_generation_settings"]["params"]["temperature"] == 0.8
    assert props["exactness"] == fim_engine.exactness
    assert props["infill"] is True
    assert "/" not in props["model_path"]
    assert props["build_info"].startswith("ngramspec-")


def test_properties_with_several_chat_templates(editor: httpx.Client, fim_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fim_engine.tokenizer, "chat_template", {"default": "{{ 'plain' }}", "tool_use": "{{ 'tools' }}"})
    props = editor.get("/props").json()
    assert (props["chat_template"], props["chat_template_tool_use"]) == ("{{ 'plain' }}", "{{ 'tools' }}")


def test_the_page_can_be_left_out(fim_engine: Engine) -> None:
    for playground, status in ((True, 200), (False, 404)):
        with routes_of(fim_engine, playground=playground) as client:
            assert client.get("/").status_code == client.get("/static/app.js").status_code == status
            assert client.get("/health").status_code == 200


def test_slots_can_be_left_out(fim_engine: Engine) -> None:
    with routes_of(fim_engine, slots=False, admin_on_loopback=True) as client:
        assert client.get("/slots").status_code == 501


def test_slots_tell_no_text(editor: httpx.Client, fim_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, passes, seen = fim_engine.runner.forward, itertools.count(), threading.Event()

    def wait_in_the_middle(batch: Batch) -> Any:
        assert next(passes) < 200 or seen.wait(60)  # else it may be over when the slots are looked at
        return forward(batch)

    monkeypatch.setattr(fim_engine.runner, "forward", wait_in_the_middle)
    monkeypatch.setattr(fim_engine.runner, "native_forward", lambda: None)
    idle = editor.get("/slots").json()
    assert [(slot["id"], slot["is_processing"]) for slot in idle] == [(i, False) for i in range(4)]
    secret = "xyzzy" * 8
    body = {"prompt": secret, "n_predict": 1900, "ignore_eos": True, "speculation": False, "stream": True, "n_cmpl": 4}
    assert editor.get("/slots?fail_on_no_slot=1").status_code == 200
    with editor.stream("POST", "/completion", json=body) as response:
        lines = response.iter_lines()
        begun = set[int]()
        while len(begun) < 4:
            line = next(lines)
            begun |= {json.loads(line[6:])["index"]} if line else set()
        shown, busy = editor.get("/slots"), editor.get("/slots?fail_on_no_slot=1")
    seen.set()
    assert (busy.status_code, busy.json()["error"]["code"]) == (503, "no_slot")
    assert secret not in shown.text
    assert shown.json()[0]["is_processing"] is True
    assert shown.json()[0]["n_prompt_tokens"] == 40
    assert shown.json()[0]["next_token"]["n_decoded"] > 0
    wait_until(lambda: not any(slot["is_processing"] for slot in editor.get("/slots").json()), 60)


def test_keys(fim_engine: Engine, make_server: Callable[..., Any]) -> None:
    server = make_server(ServerSettings(api_keys="one:first-key two:second-key"), fim_engine)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for method, path in (("POST", "/infill"), ("POST", "/completion"), ("POST", "/tokenize"), ("GET", "/props"), ("GET", "/slots")):
            assert client.request(method, path, json={}).status_code == 401
        chunks = [{"text": "only_mine = 1\n" * 10, "filename": "mine.py"}]
        body = {"input_prefix": "", "input_suffix": "", "input_extra": chunks, "n_predict": 0}
        found = {}
        for key in ("first-key", "second-key", "first-key"):
            response = client.post("/infill", json=body, headers={"Authorization": f"Bearer {key}"})
            found.setdefault(key, []).append(response.json()["tokens_cached"])
        assert found["second-key"] == [0], "another key's prompts are not found"
        assert found["first-key"][1] > 0


def test_without_a_tokenizer(make_server: Callable[..., Any]) -> None:
    with Engine(tiny.tiny_model("llama"), max_seqs=2, kv_memory=16 << 20, threads=1) as engine:
        server = make_server(engine=engine)
        with httpx.Client(base_url=server.url, timeout=60) as client:
            answer = post(
                client, "/completion", {"prompt": [1, 2, 3], "n_predict": 5, "temperature": 0, "return_tokens": True, "n_probs": 1}
            )
            assert answer["tokens"] == engine.complete([1, 2, 3], SamplingParams(max_tokens=5)).token_ids
            asked: dict[str, dict[str, Any]] = {
                "/tokenize": {"content": "a"},
                "/detokenize": {"tokens": [1]},
                "/completion": {"prompt": "a"},
            }
            asked["/infill"] = {"input_prefix": "a", "input_suffix": "b"}
            for path, body in asked.items():
                assert client.post(path, json=body).status_code == 400
            assert client.get("/props").json()["chat_template"] == ""


def test_a_warm_up_shows_nothing() -> None:
    completion = Completion([1], [], 0, "bitwise")
    answer = LlamaAnswer(EngineInput([1], SamplingParams(), {}), LlamaCompletionBody(prompt="", n_predict=0))
    assert answer.take(Delta(0, "a", [97], [None], "length", completion, texts=["a"])) == []
    assert answer.completion is completion
    assert answer.tokens == []

"""The engine's own ways to ask: keywords, fill-in-the-middle and chats; and what those are told who call it as other libraries."""

from __future__ import annotations

import asyncio
import inspect
import pydoc
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

import ngramspec
from ngramspec import Call, ChatReply, Engine, Grammar, Hints, InvalidInputError, PromptTooLongError, SamplingParams, UnsupportedModelError
from ngramspec.config import EngineConfig
from ngramspec.engine import input_processor
from ngramspec.options import options_of
from ngramspec.prompts.chat_template import Prompts
from ngramspec.prompts.fim import MIDDLE_LINES, Fim, FimOptions
from ngramspec.prompts.tool_calls.tool_prompt import Turn
from ngramspec.sampling_params import SamplingOptions

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
QUESTION = [{"role": "user", "content": "Why?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": CITY}}]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(text, special=True, normalized=False) for text in CONTROL]})
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model = tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=1024)
    with Engine(model, tokenizer=make_tokenizer(), max_seqs=8, kv_memory=64 << 20, threads=1) as engine:
        yield engine
        assert engine.status().running == engine.status().waiting == 0


# ------------------------------------------------------------------ keywords


def test_keywords_are_the_parameters(engine: Engine) -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
    expected = engine.complete("a", params).token_ids
    assert engine.complete("a", max_tokens=9, temperature=1.0, seed=3).token_ids == expected
    assert engine.complete("a", SamplingParams(max_tokens=50, temperature=1.0), max_tokens=9, seed=3, tenant="me").token_ids == expected
    assert [piece.completion.token_ids for piece in engine.stream("a", params, n=1) if piece.completion] == [expected]
    assert asyncio.run(engine.acomplete("a", temperature=1.0, seed=3, max_tokens=9)).token_ids == expected
    assert engine.submit("a", params, speculation=False).result().token_ids == expected


def test_type_checkers_know_every_parameter() -> None:
    declared, fields = typing.get_type_hints(SamplingOptions), typing.get_type_hints(SamplingParams)
    assert {name: declared.get(name) for name in options_of(SamplingParams)} == {name: fields[name] for name in options_of(SamplingParams)}
    assert declared.keys() == options_of(SamplingParams).keys()


def test_help_says_what_every_field_means() -> None:
    for settings in (SamplingParams, EngineConfig):
        text = pydoc.render_doc(settings, renderer=pydoc.plaintext)
        for option in options_of(settings).values():
            assert option.help[:40] in text.replace("\n", " ").replace("     |      ", "") or option.help.split()[0] in text, option.name
            assert option.kind.accepted in inspect.getdoc(getattr(settings, option.name))
    for kind in ("Completion", "Choice", "Delta", "Stats", "EngineStatus", "ChatReply", "ChatDelta"):
        documented = [inspect.getdoc(getattr(getattr(ngramspec, kind), name)) for name in getattr(ngramspec, kind).__slots__]
        assert all(documented), kind
    assert "prefix cache" in inspect.getdoc(ngramspec.Completion.cached_tokens)


def test_representations_are_short(engine: Engine) -> None:
    done = engine.complete("x" * 300, max_tokens=200)
    stream = engine.stream("x", max_tokens=2)
    pieces = list(stream)
    for shown in (engine, done, done.choices[0], done.stats, stream, pieces[-1], engine.chat(QUESTION, max_tokens=200)):
        assert len(repr(shown)) < 160, repr(shown)
        assert type(shown).__name__ in repr(shown)


# ------------------------------------------------------------------ fill in the middle


def test_infill_asks_what_the_format_asks(engine: Engine) -> None:
    fim = Fim.detect(engine.tokenizer, FimOptions("auto", middle_lines=MIDDLE_LINES, heals=True))
    done = engine.infill("def f(", "): pass<|im_end|>", max_tokens=12, temperature=1.0, seed=1, extra={"a.py": "x = 1"}, path="b.py")
    assert done.prompt_token_ids == fim.make_prompt("def f(", "): pass<|im_end|>", [("a.py", "x = 1")], path="b.py")
    assert engine.tokenizer.convert_tokens_to_ids("<|im_end|>") not in done.prompt_token_ids
    same = {"max_tokens": 12, "temperature": 1.0, "seed": 1, "stop_token_ids": fim.stop_ids, "healed": "("}
    assert done.token_ids == engine.complete(done.prompt_token_ids, **same).token_ids


def test_every_form_of_infill_writes_the_same(engine: Engine) -> None:
    given: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "extra": [("a", "b")]}
    expected = engine.infill("a", "b", **given).token_ids

    async def read() -> list[int]:
        return [token async for piece in engine.astream_infill("a", "b", **given) for token in piece.token_ids]

    assert [token for piece in engine.stream_infill("a", "b", **given) for token in piece.token_ids] == expected
    assert asyncio.run(engine.ainfill("a", "b", **given)).token_ids == expected
    assert asyncio.run(read()) == expected


def test_what_is_left_of_a_suggestion_is_expected(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[Any] = []
    make = input_processor.SequenceOptions
    monkeypatch.setattr(input_processor, "SequenceOptions", lambda **given: expected.append(given["prediction"]) or make(**given))
    given: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logit_bias": dict.fromkeys(range(128, 320), -100), "tenant": "typist"}
    first = engine.infill("while we", "type", **given)
    again = engine.infill("while we", "type", **given)
    assert again.token_ids == first.token_ids
    for more, change in (
        (first.text[:5], {}),
        ("other", {}),
        ("", {"tenant": "reader"}),
        ("", {"tenant": None}),
        ("", {"prediction": "x"}),
    ):
        engine.infill("while we" + more, "type", **given | change)
    ids = engine.encode_text
    seen = [None if each is None else list(each) for each in expected]
    typed = first.text[:5]
    healed = [engine.make_infill_prompt("while we" + more, "type", SamplingParams())[1].healed for more in ("", typed)]
    assert seen == [None, ids(healed[0] + first.text), ids(healed[1] + first.text[5:]), None, None, None, ids(healed[0] + "x")]
    with pytest.raises(InvalidInputError, match="cursor must be a pair"):
        engine.complete("a", cursor="b")  # type: ignore[arg-type]


def test_a_long_file_is_cut_to_the_context(engine: Engine) -> None:
    done = engine.infill("x" * 5000, "y" * 5000, max_tokens=20, ignore_eos=True)
    assert len(done.prompt_token_ids) <= 1004
    assert done.text


# ------------------------------------------------------------------ chats


def test_chat_asks_what_the_template_asks(engine: Engine) -> None:
    reply = engine.chat([{"role": "developer", "content": [{"type": "text", "text": "a"}]}, *QUESTION], max_tokens=8)
    assert reply.completion.prompt_token_ids == Prompts(engine).chat([Turn("system", "a"), Turn("user", "Why?")])
    assert reply.message == {"role": "assistant", "content": reply.completion.text}
    hostile = engine.chat([{"role": "user", "content": "<|im_end|>"}], max_tokens=1)
    assert hostile.completion.prompt_token_ids.count(engine.tokenize("<|im_end|>")[-1]) == 1


def test_messages_as_other_libraries_write_them(engine: Engine) -> None:
    """Texts among parts, arguments as a dict, and nothing said or returned; the server takes the same."""
    said = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"a": "é"}}}]}
    result = {"role": "tool", "tool_call_id": "1", "content": None}
    messages = [{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, said, result, {"role": "assistant", "content": None}]
    reply = engine.chat([*messages, *QUESTION], max_tokens=1)
    turns = [Turn("user", "a\nb"), Turn("assistant", "", (Call("1", "f", '{"a": "é"}'),)), Turn("tool", "", call_id="1", name="f")]
    asked = [*turns, Turn("assistant", ""), Turn("user", "Why?")]
    assert reply.completion.prompt_token_ids == Prompts(engine).chat(asked)


def test_an_answer_may_fill_the_context(engine: Engine) -> None:
    reply = engine.chat(QUESTION, ignore_eos=True)
    assert len(reply.completion.prompt_token_ids) + len(reply.completion.token_ids) == engine.max_model_len
    assert len(engine.chat(QUESTION, SamplingParams(max_tokens=3, ignore_eos=True)).completion.token_ids) == 3


def test_tools_are_called_and_answered(engine: Engine) -> None:
    reply = engine.chat(QUESTION, tools=TOOLS, tool_choice="get_weather", max_tokens=200)
    (call,) = reply.tool_calls
    assert (reply.finish_reason, call.name) == ("tool_calls", "get_weather")
    assert call.arguments in ('{"city": "Oslo"}', '{"city": "Rome"}')
    seen = [{"type": "text", "text": "4 °C"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    answered = [*QUESTION, reply.message, {"role": "tool", "tool_call_id": call.id, "content": seen}]
    ids = engine.chat(answered, tools=TOOLS, max_tokens=1).completion.prompt_token_ids
    text = engine.detokenize(ids)
    assert call.arguments in text
    assert "4 °C\n[image omitted" in text


def test_every_form_of_chat_says_the_same(engine: Engine) -> None:
    given: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}

    def check(deltas: list[Any]) -> None:
        reply = deltas[-1].reply
        assert [delta.reply for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert "".join(delta.text for delta in deltas) == reply.content
        pieces = [piece for delta in deltas for piece in delta.tool_calls]
        assert "".join(piece.arguments for piece in pieces) == reply.tool_calls[0].arguments
        assert {(piece.index, piece.name, piece.id) for piece in pieces} == {(0, "get_weather", reply.tool_calls[0].id)}
        assert reply.completion.token_ids == expected.completion.token_ids

    async def read() -> list[Any]:
        return [delta async for delta in engine.astream_chat(QUESTION, **given)]

    expected: ChatReply = engine.chat(QUESTION, **given)
    check(list(engine.stream_chat(QUESTION, **given)))
    check(asyncio.run(read()))
    assert asyncio.run(engine.achat(QUESTION, **given)).completion.token_ids == expected.completion.token_ids


def test_leaving_a_stream_cancels(engine: Engine) -> None:
    with engine.stream_chat(QUESTION, ignore_eos=True) as stream:
        next(stream)
    for delta in engine.stream_infill("a", "b", max_tokens=900, ignore_eos=True):
        assert delta.completion is None
        break

    async def leave() -> None:
        task = asyncio.create_task(engine.achat(QUESTION, ignore_eos=True))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(leave())
    assert engine.complete("a", max_tokens=1).token_ids  # behind whatever was cancelled


def test_an_answers_form_is_held(engine: Engine) -> None:
    assert engine.chat(QUESTION, grammar=Grammar.choice(["yes", "no"]), max_tokens=10).content in ("yes", "no")
    assert engine.infill("a", "b", grammar=Grammar.regex("[xy]{3}"), max_tokens=10).text.strip("xy") == ""


# ------------------------------------------------------------------ tokens


def test_tokens_and_texts(engine: Engine) -> None:
    text = "é<|im_end|>\n"
    assert engine.tokenize(text) == engine.encode(text).tolist()
    spelled = engine.tokenize(text, parse_special=False, add_special_tokens=False)
    assert engine.detokenize(engine.tokenize(text)) == engine.detokenize(spelled) == text
    assert len(spelled) > len(engine.tokenize(text))
    assert engine.detokenize(engine.tokenize(text), skip_special_tokens=True) == "é\n"
    assert engine.tokenize("") == engine.tokenize("", parse_special=False) == []
    assert engine.detokenize([]) == ""
    for wrong in ([-1], [320], ["a"], [5, "a"], [[1]], [True], [1.5], "a", None):
        with pytest.raises(InvalidInputError, match=r"^(token ids must be 0 to 319|ids must be a flat list of token ids), got "):
            engine.detokenize(wrong)  # type: ignore[arg-type]
    for given in ({}, {"parse_special": False}, {"add_special_tokens": False}):
        with pytest.raises(InvalidInputError, match=r"^a tokenizer's input must be text, got "):
            engine.tokenize([5], **given)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError):
        engine.tokenize("\ud800")


# ------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("messages", "more", "param"),
    [
        ("Why?", {}, "messages"),
        ([], {}, "messages"),
        ([1], {}, "messages[0]"),
        ([{"content": "a"}], {}, "messages[0].role"),
        ([{"role": ["user"], "content": "a"}], {}, "messages[0].role"),
        ([{"role": "user"}], {}, "messages[0].content"),
        ([{"role": "user", "content": 1}], {}, "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0]"),
        ([{"role": "tool", "content": "a"}], {}, "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], {}, "messages[0].tool_calls[0]"),
        ([{"role": "user", "content": "a", "tool_calls": [Call("", "f", "{}")]}], {}, "messages[0].tool_calls"),
        (QUESTION, {"tools": "a"}, "tools"),
        (QUESTION, {"tools": [{"name": "f"}]}, "tools[0]"),
        (QUESTION, {"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name"),
        (QUESTION, {"tools": TOOLS, "tool_choice": "other"}, "tool_choice"),
        (QUESTION, {"tools": TOOLS, "tool_choice": 1}, "tool_choice"),
        (QUESTION, {"tool_choice": "required"}, "tool_choice"),
        (QUESTION, {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0].function.parameters"),
        (QUESTION, {"tools": [{"function": {"name": "f", "parameters": {"a": object()}}}]}, "tools[0].function.parameters"),
        (QUESTION, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        (QUESTION, {"chat_template_kwargs": 1}, "chat_template_kwargs"),
        (QUESTION, {"continue_final_message": True}, "continue_final_message"),
        (QUESTION, {"n": 2}, "n"),
    ],
)  # fmt: skip
def test_a_wrong_chat_names_its_field(engine: Engine, messages: Any, more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        engine.chat(messages, max_tokens=1, **more)
    assert caught.value.param == param


def test_what_does_not_fit_or_is_unknown(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError):
        engine.chat([{"role": "user", "content": "a" * 2000}])
    for extra in ("a", [("a",)], [("a", 1)], 5):
        with pytest.raises(InvalidInputError):
            engine.infill("a", "b", extra=extra)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError):
        engine.infill("a", None)  # type: ignore[arg-type]
    plain = tiny.tiny_model("llama", vocab_size=320, max_position_embeddings=64)
    with Engine(plain, tokenizer=tiny.byte_tokenizer(), max_seqs=1, kv_memory=8 << 20, threads=1) as bare:
        with pytest.raises(UnsupportedModelError, match="fill-in-the-middle"):
            bare.infill("a", "b")
        with pytest.raises(UnsupportedModelError, match="chat template"):
            bare.chat(QUESTION)


@pytest.mark.parametrize(
    ("call", "ours"),
    [
        (lambda engine: Engine(model_path="a.gguf"), "first argument"),
        (lambda engine: Engine("a", n_ctx=5), "max_model_len"),
        (lambda engine: Engine("a", max_num_seqs=5), "max_seqs"),
        (lambda engine: Engine("a", thread=5), "threads"),
        (lambda engine: engine("a"), "complete(prompt"),
        (lambda engine: engine.generate("a"), "complete(prompt"),
        (lambda engine: engine.create_completion("a"), "complete(prompt"),
        (lambda engine: engine.create_chat_completion([]), "chat(messages)"),
        (lambda engine: engine.complte("a"), "complete"),
        (lambda engine: engine.complete("a", n_predict=5), "max_tokens"),
        (lambda engine: engine.complete("a", max_new_tokens=5), "max_tokens"),
        (lambda engine: engine.complete("a", temprature=5), "temperature"),
        (lambda engine: engine.complete("a", suffix="b"), "infill(prefix, suffix)"),
        (lambda engine: engine.complete("a", sampling_params=SamplingParams()), "params"),
        (lambda engine: engine.stream("a", stop_strings=["a"]), "stop"),
        (lambda engine: engine.chat(QUESTION, response_format={}), "Grammar.json_schema"),
        (lambda engine: engine.infill("a", "b", repeat_penalty=1.1), "repetition_penalty"),
    ],
)  # fmt: skip
def test_calls_of_other_libraries_are_told_ours(engine: Engine, call: Callable[[Engine], Any], ours: str) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        call(engine)
    assert ours in str(caught.value)


def test_classes_of_other_libraries_are_told_ours() -> None:
    with pytest.raises(ImportError, match=r"Engine\(model\)"):
        from ngramspec import LLM  # noqa: F401
    assert not hasattr(ngramspec, "Chat")
    assert "generate" not in dir(Engine)
    assert Hints.__annotations__.keys() >= {"prediction", "tenant"}


def test_stop_token_ids_are_ours_too(engine: Engine) -> None:
    token = engine.complete("a", max_tokens=1).token_ids[0]
    assert engine.complete("a", max_tokens=9, stop_token_ids=[token]).finish_reason == "stop"


def test_neither_fastapi_nor_pydantic_is_needed() -> None:
    program = (
        "import sys\n"
        "for name in ('fastapi', 'pydantic', 'starlette', 'uvicorn'): sys.modules[name] = None\n"
        "import ngramspec.engine.llm_engine, ngramspec.engine.prompting\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

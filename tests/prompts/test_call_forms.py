"""Every form in which models write tool calls, as they write them: found whole, at every cut of the stream, and never shown by halves."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
from call_events import collect_calls
from fair_time import assert_within
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ngramspec.prompts.tool_calls.call_formats import HERMES, CallFormat
from ngramspec.prompts.tool_calls.call_reader import CallReader
from ngramspec.prompts.tool_calls.call_scanner import MAX_HEAD, KnownTools, TextDelta

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"type": ["integer", "null"]},
            "flags": {"$ref": "#/$defs/flags"},
        },
        "required": ["path", "content"],
        "$defs": {"flags": {"type": "array", "items": {"type": "string"}}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
LLAMA = CallFormat('{"name": "', '", "parameters": ', None, "}")
PARIS: tuple[str, Any] = ("weather", {"city": "Paris"})
ROME: tuple[str, Any] = ("weather", {"city": "Rome", "days": 2})
PARIS_JSON, ROME_JSON = (
    '{"name": "weather", "arguments": {"city": "Paris"}}',
    '{"name": "weather", "arguments": {"city": "Rome", "days": 2}}',
)
PROGRAM = 'def f():\n    return {"a": [1, 2]}\n'
SPECIAL = re.compile(
    r"\[TOOL_CALLS\]|\[ARGS\]|\[CALL_ID\]|<\|python_tag\|>|<\|python_start\|>|<\|python_end\|>"
    r"|<\|(?:start|end|channel|constrain|message|call|return)\|>|<\|tool_call[a-z_]*\|>|<｜tool[^>]*｜>|<\|(?:START|END)_ACTION\|>"
)


def known(*strict: str) -> KnownTools:
    return KnownTools(SCHEMAS, frozenset(strict), lambda name, arguments: bool(jsonschema_rs.is_valid(SCHEMAS[name], arguments)))


def read(
    pieces: Sequence[str], form: CallFormat = HERMES, *, as_tokens: bool = False, cut: bool = False, strict: Sequence[str] = (), **more: Any
) -> tuple[str, list[tuple[str, Any]]]:
    """(what is said, the calls), with nothing said or called twice; `as_tokens`: special tokens come as such."""
    reader = CallReader(form, known(*strict), **more)
    events = []
    for piece in pieces:
        at = 0
        for found in SPECIAL.finditer(piece) if as_tokens else ():
            events += reader.push(piece[at : found.start()]) + reader.push_special(found[0])
            at = found.end()
        events += reader.push(piece[at:])
    said, calls = collect_calls([*events, *reader.finish(cut=cut)])
    assert reader.n_calls == len(calls)
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


def every_cut(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
CALLS: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    # fenced and bare JSON: Qwen2.5-Coder, Gemma, Phi
    "fence": (f"```json\n{PARIS_JSON}\n```", "", [PARIS]),
    "fence, pretty": ('```json\n{\n  "name": "weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}\n```', "", [PARIS]),
    "fence, text around": (f"I look.\n\n```json\n{PARIS_JSON}\n```\n\nPlease wait.", "I look.\n\nPlease wait.", [PARIS]),
    "fences": (f"```json\n{PARIS_JSON}\n```\n\n```json\n{ROME_JSON}\n```", "", [PARIS, ROME]),
    "fence of several": (f"```json\n{PARIS_JSON}\n{ROME_JSON}\n```", "", [PARIS, ROME]),
    "fence of a list": (f"```\n[{PARIS_JSON}, {ROME_JSON}]\n```", "", [PARIS, ROME]),
    "fence of tags": (f"```xml\n<tools>\n{PARIS_JSON}\n</tools>\n```", "", [PARIS]),
    "fence, not closed": (f"```json\n{PARIS_JSON}", "", [PARIS]),
    "fence behind a program": (f"```python\n{PROGRAM}```\nNow:\n```json\n{PARIS_JSON}\n```", f"```python\n{PROGRAM}```\nNow:", [PARIS]),
    "tool_code": ('```tool_code\nweather(city="Paris")\n```', "", [PARIS]),
    "bare": (PARIS_JSON, "", [PARIS]),
    "bare behind text": (f"Sure, I will.\n{PARIS_JSON}\n", "Sure, I will.", [PARIS]),
    "bare in a line": (f"Sure: {PARIS_JSON}", "Sure:", [PARIS]),
    "bare before text": (f"{PARIS_JSON}\nDone.", "Done.", [PARIS]),
    "bare, several": (f"{PARIS_JSON}\n{ROME_JSON}", "", [PARIS, ROME]),
    "bare list": (f"[{PARIS_JSON}, {ROME_JSON}]", "", [PARIS, ROME]),
    "bare, arguments first": ('{"arguments": {"city": "Paris"}, "name": "weather"}', "", [PARIS]),
    "bare, arguments as text": ('{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', "", [PARIS]),
    "bare, as OpenAI": ('{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}', "", [PARIS]),
    "braces doubled": ('{{"name": "weather", "arguments": {"city": "Paris"}}}', "", [PARIS]),
    "braces doubled, one too many": ('{{"name": "weather", "arguments": {"city": "Paris"}}}}\nDone.', "Done.", [PARIS]),
    "braces doubled, several": (
        '{{"name": "weather", "arguments": {"city": "Paris"}}}}\n{{"name": "now", "arguments": {}}}}',
        "",
        [PARIS, ("now", {})],
    ),
    "braces doubled, hermes": ('<tool_call>\n{{"name": "weather", "arguments": {"city": "Paris"}}}\n</tool_call>', "", [PARIS]),
    "bare, tool_calls": (f'{{"tool_calls": [{{"id": "a", "type": "function", "function": {PARIS_JSON}}}]}}', "", [PARIS]),
    "tools": (f"<tools>\n{PARIS_JSON}\n</tools>", "", [PARIS]),
    "tools, each": (f"<tool>{PARIS_JSON}</tool>\n<tool>{ROME_JSON}</tool>", "", [PARIS, ROME]),
    # Hermes, Qwen2.5
    "hermes": (f"<tool_call>\n{PARIS_JSON}\n</tool_call>", "", [PARIS]),
    "hermes, text before": (f"Let me see.\n<tool_call>\n{PARIS_JSON}\n</tool_call>", "Let me see.", [PARIS]),
    "hermes, several": (f"<tool_call>\n{PARIS_JSON}\n</tool_call>\n<tool_call>\n{ROME_JSON}\n</tool_call>", "", [PARIS, ROME]),
    "hermes, no argument": ('<tool_call>\n{"name": "now"}\n</tool_call>', "", [("now", {})]),
    "hermes, loose": ('<tool_call>{"name": "weather", "arguments": {"town": 3}}</tool_call>', "", [("weather", {"town": 3})]),
    "hermes, fenced within": (f"<tool_call>\n```json\n{PARIS_JSON}\n```\n</tool_call>", "", [PARIS]),
    "hermes, brackets in text": (
        '<tool_call>\n{"name": "write_file", "arguments": {"path": "a", "content": "}\\"]</tool_call>\\\\"}}\n</tool_call>',
        "",
        [("write_file", {"path": "a", "content": '}"]</tool_call>\\'})],
    ),
    "function_call": (f"<function_call>{PARIS_JSON}</function_call>", "", [PARIS]),
    # Llama 3 and 4
    "llama": ('{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    "llama, several": ('{"name": "weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}', "", [PARIS, ("now", {})]),
    "llama, token": ('<|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    "llama, token and Python": ('<|python_tag|>weather.call(city="Paris")', "", [PARIS]),
    "llama 3.1, function": ('<function=weather>{"city": "Paris"}</function>', "", [PARIS]),
    "llama, on lines of their own": (f"<|python_start|>\n{PARIS_JSON}\n<|python_end|>", "", [PARIS]),
    "llama 3.1, function, pretty": ('<function=weather>\n{"city": "Paris"}\n</function>', "", [PARIS]),
    "python list": ('[weather(city="Paris"), weather(city="Rome", days=2)]', "", [PARIS, ROME]),
    "python, escapes": (
        "[write_file(path='a.py', content='x = [\"(\\'\\n', flags=['a'], mode=None)]",
        "",
        [("write_file", {"path": "a.py", "content": "x = [\"('\n", "flags": ["a"], "mode": None})],
    ),
    "lfm2": (
        '<|tool_call_start|>[weather(city="Paris"), weather(city="Rome", days=2)]<|tool_call_end|>I look.', "I look.", [PARIS, ROME],
    ),
    "llama 4": ('<|python_start|>[weather(city="Paris"), now()]<|python_end|>', "", [PARIS, ("now", {})]),
    # Mistral
    "mistral": (f"[TOOL_CALLS] [{PARIS_JSON}, {ROME_JSON}]", "", [PARIS, ROME]),
    "mistral, ids": (f'[TOOL_CALLS][{PARIS_JSON[:-1]}, "id": "abcdefghi"}}]', "", [PARIS]),
    "mistral, newer": ('[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}', "", [PARIS, ("now", {})]),
    "mistral, call id": ('On it.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}', "On it.", [PARIS]),
    # Qwen3-Coder, GLM 4.5
    "qwen3-coder": (
        "<tool_call>\n<function=weather>\n"
        "<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>",
        "",
        [ROME],
    ),
    "qwen3-coder, no tool_call": (
        "I see.\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "I see.",
        [PARIS],
    ),
    "qwen3-coder, values": (
        "<tool_call>\n<function=write_file>\n<parameter=path>\n12\n</parameter>\n"
        "<parameter=content>\n  if a < b:\n    </param>\n\n</parameter>\n"
        '<parameter=mode>\nNone\n</parameter>\n<parameter=flags>\n["x"]\n</parameter>\n</function>\n</tool_call>',
        "",
        [("write_file", {"path": "12", "content": "  if a < b:\n    </param>\n", "mode": None, "flags": ["x"]})],
    ),
    "qwen3-coder, several": (
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [("now", {}), PARIS],
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "",
        [ROME],
    ),
    # DeepSeek, Kimi
    "deepseek v3": (
        DEEPSEEK.format(
            '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>"
        ),
        "",
        [PARIS, ("now", {})],
    ),
    "deepseek v3.1": (
        "Yes." + DEEPSEEK.format(
            '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
            "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        ),
        "Yes.",
        [PARIS, ("now", {})],
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
        "",
        [PARIS],
    ),
    # gpt-oss
    "harmony": ('<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>', "", [PARIS]),
    "harmony, no end": ('<|channel|>commentary to=functions.weather<|message|>{"city": "Paris"}', "", [PARIS]),
    "harmony, recipient first": (' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>', "", [PARIS]),
    "harmony, analysis": (
        "<|channel|>analysis<|message|>They ask for Paris.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        "They ask for Paris.",
        [PARIS],
    ),
    "harmony, final": (
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.<|return|>",
        "Easy.\n\nIt is 3.",
        [],
    ),
    # others
    "granite": (f"<|tool_call|>[{PARIS_JSON}]", "", [PARIS]),
    "nemotron": (f"<TOOLCALL>[{PARIS_JSON}]</TOOLCALL>", "", [PARIS]),
    "command-r": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris"}}]<|END_ACTION|>',
        "",
        [PARIS],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", CALLS)
def test_a_call_is_found_at_every_cut(form: str) -> None:
    text, said, calls = CALLS[form]
    assert read([text]) == (said, calls)
    for pieces in every_cut(text):
        assert read(pieces) == (said, calls), pieces
    assert read([text], as_tokens=True) == (said, calls)
    assert read([text], LLAMA) == (said, calls)


@pytest.mark.parametrize("form", CALLS)
def test_what_is_said_so_far_is_what_will_have_been_said(form: str) -> None:
    text, said, _ = CALLS[form]
    reader = CallReader(HERMES, known())
    so_far = ""
    for char in text:
        for event in reader.push(char):
            so_far += event.text if isinstance(event, TextDelta) else ""
            assert said.startswith(so_far)


@pytest.mark.parametrize("form", [form for form, (_, said, calls) in CALLS.items() if calls and not said and "bare" not in form])
def test_a_call_that_is_cut_off_leaves_no_markup(form: str) -> None:
    text, _, calls = CALLS[form]
    for end in range(25, len(text)):
        said, found = read([text[:end]], cut=True, as_tokens=True)
        assert found == calls[: len(found)]
        if "```" not in text and not text.startswith(("[", "{", "<tool>", "<tools>")):
            assert not said.strip(), text[:end]


TEXTS = [
    "plain text <tool",
    "a < b and c > d [1, 2] {x}\n",
    PROGRAM,
    f"```python\n{PROGRAM}```\n",
    "```json\n{\"answer\": 3}\n```\n",
    '{"answer": {"name": "weather", "arguments": {"city": "Paris"}}}',
    '{"items": [\n  {"name": "weather", "arguments": {"city": "Paris"}},\n  {"name": "weather", "arguments": {"city": "Rome"}}\n]}',
    "```json\n{\"tools\": [\n" + PARIS_JSON + "\n]}\n```",
    '```json\n{"name": "Bob", "arguments": {"city": "Paris"}}\n```',
    '{"name": "weather", "arguments": {"town": "Paris"}}',
    '{"name": "weather", "arguments": {"city": 3}}',
    '{"name": "weather", "arguments": {"city": "Paris"}, "note": 1}',
    '{"name": "weather", "city": "Paris"}',
    '{"name": "weather", "arguments": {"city": "Par',
    f"Use `{PARIS_JSON}` for it.",
    f'call = {PARIS_JSON}\n',
    '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
    "<tool_call>nobody\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
    "<function=nobody>\n<parameter=a>\nb\n</parameter>\n</function>",
    "<function=weather>\n<parameter=city>\nPar",
    "[weather(city=Paris)]",
    "[weather(town='Paris')]",
    "<|python_tag|>weather(city={1, 2})",
    "<|python_tag|>weather(city=b'Paris')",
    "<|python_tag|>weather(city=...)",
    "[weather(city='Paris'), " + "a." * 1500 + "b(city='Paris')]",
    "[weather](https://example.com) and [f(x)]\n",
    "if (a) {\n  b[i] = c;\n}\n",
    "[TOOL_CALLS] [3]",
    "a ``` b ``` c",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_that_calls_nothing_is_unchanged(text: str) -> None:
    for pieces in every_cut(text):
        assert read(pieces) == (text, [])


WORDS = re.compile(r"<[^<>]{1,30}>|```\w*|\[TOOL_CALLS\]|\[ARGS\]|\w+|\s+|.", re.DOTALL)
TEXTS_OF_CALLS = [text for text, _, _ in CALLS.values()]
FRAGMENTS = sorted(
    {word for text in TEXTS_OF_CALLS for word in WORDS.findall(text)} | {PARIS_JSON, "text", "; ", '"""', "'''", "write_file"}
)
LONG = st.builds(str.__mul__, st.sampled_from([" ", "\n", "x", "<tool", ")"]), st.integers(30, MAX_HEAD + 100))


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Draw a text of fragments of calls and of whole calls, some with a long run of one character within."""
    text = "".join(draw(st.lists(st.sampled_from(FRAGMENTS) | st.sampled_from(TEXTS_OF_CALLS), max_size=14)))
    at = draw(st.integers(0, len(text)))
    return text[:at] + draw(st.just("") | LONG) + text[at:]


def in_pieces(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@settings(max_examples=150, deadline=None)
@given(texts(), st.lists(st.integers(0, 3000), max_size=6), st.booleans(), st.booleans())
@example(f"<tool_call>{' ' * (MAX_HEAD + 1)}{PARIS_JSON}</tool_call>", [100, MAX_HEAD + 50], True, False)
@example(f"<tool_call>{PARIS_JSON}{' ' * (MAX_HEAD + 1)}</tool_call>", [100, MAX_HEAD + 100], True, False)
@example(f"<function=weather><parameter=city>a{' ' * 90}<parameter=days>2</function>", [], True, False)
@example(f'{{"a": 1}}{" " * 300},{" " * 300}x{"y" * 2000}{PARIS_JSON}', [], True, False)
@example(f'{"y" * 2000}{{"a": 1}}{" " * 200},{" " * 200}{PARIS_JSON}', [], True, False)
@example('[write_file(path=\'a\', content="""print(\')\', ")") # it\'s""")]', [], True, False)
def test_no_cut_tells_and_nothing_is_lost(text: str, cuts: Sequence[int], several: bool, cut: bool) -> None:
    said, calls = read([text], several=several, cut=cut)
    assert read(list(text), several=several, cut=cut) == (said, calls)
    assert read(in_pieces(text, cuts), several=several, cut=cut) == (said, calls)
    rest = iter(text + "\n\n")
    if "<|" not in text:  # heads of gpt-oss's messages are no text
        assert all(char in rest for char in said if not char.isspace()), "what is said is the text, in its order"


def test_a_long_text_that_seems_to_call_is_read_to_its_end() -> None:
    text = "<tools>see</tools> and more words\n" * 2000 + PARIS_JSON
    assert read([text])[1] == read(list(text))[1] == [PARIS]


def test_a_program_in_three_quotes_is_an_argument() -> None:
    text = '[write_file(path="a.py", content="""print(")")  # it\'s a \\""")]\nDone.'
    call = ("write_file", {"path": "a.py", "content": 'print(")")  # it\'s a "'})
    for pieces in every_cut(text.replace('\\"""', '\\""""')):
        assert read(pieces) == ("Done.", [call])


def test_text_is_not_held_back_longer_than_it_can_become_a_call() -> None:
    for text, rest in (("See {", '"answer'), ("a <", "div>"), ('{"name": "Bob', '"'), ("```python\nx", " = 1"), ('{"id": 3', ",")):
        reader = CallReader(HERMES, known())
        said = "".join(event.text for event in reader.push(text + rest) if isinstance(event, TextDelta))
        assert said == text + rest


def test_a_set_in_pythons_notation_is_no_list_of_json() -> None:
    text = "<function=write_file><parameter=path>a</parameter><parameter=flags>{'x', 'y'}</parameter></function>"
    assert read([text]) == ("", [("write_file", {"path": "a", "flags": "{'x', 'y'}"})])


def test_a_schema_that_refers_to_itself_over_and_over_takes_linear_time() -> None:
    node = {"anyOf": [{"$ref": "#/$defs/node"}] * 100 + [{"type": "integer"}]}
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "$defs": {"node": node}}
    reader = CallReader(HERMES, KnownTools({"count": schema}))
    text = "<function=count><parameter=n>3</parameter></function>"
    assert_within(3, lambda: reader.push(text), tries=1)
    assert reader.n_calls == 1


def test_strict_tools_are_called_as_their_schemas_say_or_not_at_all() -> None:
    for text in (
        '<tool_call>{"name": "weather", "arguments": {"town": 3}}</tool_call>',
        "<function=weather>\n<parameter=town>\nParis\n</parameter>\n</function>",
        '[TOOL_CALLS]weather[ARGS]{"days": 1}',
    ):
        assert read([text])[1]
        assert read([text], strict=["weather"]) == (text, [])


def test_one_call_where_there_may_be_only_one() -> None:
    for form in ("hermes, several", "bare list", "mistral", "fences", "python list"):
        assert read([CALLS[form][0]], several=False) == ("", [PARIS])


def test_a_text_that_seems_to_call_over_and_over_takes_linear_time() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": "' * 4000
    reader = CallReader(HERMES, known())
    reader.push(text)
    assert sum(len(event.text) for event in [*reader.finish()] if isinstance(event, TextDelta)) <= len(text)
    assert reader.n_calls == 0


def test_blanks_in_a_stream_take_linear_time() -> None:
    """Looking back from every blank, or searching all of them again after each token, took minutes."""
    for text in ("Hello", "Hello\n", "<tool_call>", "{", "<function=weather>\n<parameter=city>"):
        assert_within(3, lambda text=text: read(list(text + " " * 4000 + PARIS_JSON)), tries=2)

"""Calls in a text: however it is cut, the same is said and called; what is no call is said; a grammar holds to what is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import jsonschema_rs
import pytest
import tiny
from call_events import collect_calls
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken

from ngramspec.errors import GrammarError
from ngramspec.grammar.constraint import Grammar
from ngramspec.prompts.tool_calls.call_formats import HERMES, CallFormat, Tool
from ngramspec.prompts.tool_calls.call_grammar import make_call_grammar
from ngramspec.prompts.tool_calls.call_reader import CallReader
from ngramspec.prompts.tool_calls.call_scanner import KnownTools, StreamDelta, ToolCallArguments, ToolCallStart

LLAMA = CallFormat('{"name": "', '", "parameters": ', None, "}")
MISTRAL = CallFormat(
    '[TOOL_CALLS] [{"name": "', '", "arguments": ', ', "id": "\0"}, {"name": "', ', "id": "\0"}]', special=("[TOOL_CALLS]",)
)
NEWER = CallFormat("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]", "", special=("[TOOL_CALLS]", "[ARGS]"))
MARK = "\x01"
"""Stands for a special token in the texts below."""
BLANKS = replace(HERMES, first="\n" + HERMES.first)
FORMATS = {"hermes": HERMES, "blanks": BLANKS, "llama": LLAMA, "mistral": MISTRAL, "newer": NEWER}
TOOL = Tool("f", {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False})
OTHER = Tool("g.h", {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False})
KNOWN = KnownTools(
    {tool.name: tool.parameters for tool in (TOOL, OTHER)},
    match_schema=lambda name, arguments: bool(jsonschema_rs.is_valid((TOOL if name == "f" else OTHER).parameters, arguments)),
)
SPECIAL = {"[TOOL_CALLS]": 256, "[ARGS]": 257, "<tool_call>": 258}


def read(form: CallFormat, pieces: Sequence[str], *, held: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """(what is said, (name, arguments) of what is called)"""
    reader = CallReader(form, KNOWN, held=held)
    events: list[StreamDelta] = []
    for piece in pieces:
        for i, text in enumerate(piece.split(MARK)):
            events += reader.push_special("[TOOL_CALLS]") if i else []
            events += reader.push(text)
    said, calls = collect_calls([*events, *reader.finish()])
    assert reader.n_calls == len(calls)
    return said, calls


NOBODY, OOPS = HERMES.write([("nobody", "{}")]), HERMES.write([("f", '{"a": oops}')])
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "plain text <tool", "plain text <tool", []),
    ("hermes", " 1 < 2 \n", " 1 < 2 \n", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"{"}}\n</tool_call>', "", [("f", '{"a": "}\\"{"}')]),
    ("hermes", 'So:\n\n<tool_call>{"name":"f","arguments":{}}</tool_call> Done.\n', "So: Done.\n", [("f", "{}")]),
    ("hermes", HERMES.write([("f", '{"a": [{}]}'), ("g.h", '{"n": 1}')]), "", [("f", '{"a": [{}]}'), ("g.h", '{"n": 1}')]),
    ("hermes", NOBODY, NOBODY, []),
    ("hermes", OOPS, OOPS, []),
    ("hermes", "<tool_call>\nnot JSON\n</tool_call>", "<tool_call>\nnot JSON\n</tool_call>", []),
    ("hermes", '<tool_call>\n{"name": "f", "argu', '<tool_call>\n{"name": "f", "argu', []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": ', '<tool_call>\n{"name": "f", "arguments": {"a": ', []),
    ("hermes", "<tool_call>x</tool_call>\n" + HERMES.write([("f", "{}")]), "<tool_call>x</tool_call>", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama", '{"name": "f", "parameters": {"a": "b"}}', "", [("f", '{"a": "b"}')]),
    ("llama", ' {"type": "function", "name": "f", "parameters": {}}\n', "", [("f", "{}")]),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "g.h", "parameters": {"n": 2}}', "", [("f", "{}"), ("g.h", '{"n": 2}')]),
    ("llama", MARK + '{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama", MARK + 'f.call(a="b")', 'f.call(a="b")', []),
    ("llama", 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    ("llama", 'See {"name": "f", "parameters": {"a": "b"}}', "See", [("f", '{"a": "b"}')]),
    ("llama", '{"answer": 3}', '{"answer": 3}', []),
    ("mistral", MARK + ' [{"name": "f", "arguments": {"a": "]"}, "id": "abcdefghi"}]', "", [("f", '{"a": "]"}')]),
    ("mistral", MARK + '[{"name": "f", "arguments": {}}, {"name": "g.h", "arguments": {"n": 1}}]', "", [("f", "{}"), ("g.h", '{"n": 1}')]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
    ("mistral", "Well. " + MARK + '[{"name": "f", "arguments": {}}]', "Well.", [("f", "{}")]),
    ("mistral", MARK + " [3]", " [3]", []),
    ("newer", MARK + 'f{"a": 1}' + MARK + 'g.h{"n": 2}', "", [("f", '{"a": 1}'), ("g.h", '{"n": 2}')]),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "said", "calls"), CASES, ids=range(len(CASES)))
def test_whatever_the_pieces_the_same_is_said_and_called(form: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert read(FORMATS[form], [text]) == (said, calls)
    assert read(FORMATS[form], list(text)) == (said, calls)
    for cut in range(len(text)):
        assert read(FORMATS[form], [text[:cut], text[cut:]]) == (said, calls)


CALL = ["<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": ', '{"a": "b"}', "}"]
FRAGMENTS = [*CALL, *"{[]}, \na", '"', "<tool", MARK]


@settings(max_examples=1000)
@given(st.sampled_from(list(FORMATS)), st.lists(st.sampled_from(FRAGMENTS), max_size=12))
@example("hermes", [*CALL[:1], *CALL[2:], " ", "<tool"])
@example("llama", [" ", MARK])
def test_no_text_is_lost_and_no_cut_tells(form: str, fragments: list[str]) -> None:
    text = "".join(fragments)
    said, calls = read(FORMATS[form], [text])
    assert read(FORMATS[form], list(text)) == (said, calls)
    if not calls:
        assert "".join(said.split()) == "".join(text.replace(MARK, "").split())
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)


@pytest.mark.parametrize("form", FORMATS)
def test_held_calls_are_told_of_while_they_are_written(form: str) -> None:
    shown = FORMATS[form]
    written = shown.first + "f" + shown.middle + '{"a": "b"}' + shown.last
    text = written.replace("[TOOL_CALLS]", MARK).replace("[ARGS]", "").replace("\0", "abcdefghi")
    reader = CallReader(shown, KNOWN, held=True)
    seen: list[StreamDelta] = []
    for piece in text.partition('"b"')[0].split(MARK):
        seen += reader.push_special("[TOOL_CALLS]") if MARK in text and not seen and piece else []
        seen += reader.push(piece)
    assert [event for event in seen if not isinstance(event, ToolCallArguments)] == [ToolCallStart("f")]
    assert "".join(event.text for event in seen if isinstance(event, ToolCallArguments)) == '{"a": '
    assert read(shown, [text], held=True) == read(shown, list(text), held=True) == ("", [("f", '{"a": "b"}')])
    assert read(shown, [text.partition('"b"')[0]], held=True) == ("", [("f", '{"a": ')])


# ------------------------------------------------------------------ the grammar


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    made = tiny.byte_tokenizer()
    made.backend_tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("[TOOL_CALLS]", "[ARGS]")])
    made.backend_tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return LLTokenizer(made.backend_tokenizer.to_str(), n_vocab=259, eos_token=[tiny.EOS])


def accepts(tokenizer: LLTokenizer, grammar: Grammar, text: str, added: dict[str, int]) -> bool:
    """Whether the grammar takes a text, in which `added` are tokens."""
    ids, rest = [], text
    while rest:
        token = next((token for token in added if rest.startswith(token)), None)
        ids += list(rest[0].encode()) if token is None else [added[token]]
        rest = rest[1 if token is None else len(token) :]
    matcher = LLMatcher(tokenizer, grammar_from("lark", grammar.text))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def written(form: CallFormat, *calls: tuple[str, str]) -> str:
    middle = [name + form.middle + arguments for name, arguments in calls]
    return (form.first + (form.between or "").join(middle) + form.last).replace("\0", "abcdefghi")


@pytest.mark.parametrize("with_token", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_a_grammar_takes_calls_that_fit_and_nothing_else(tokenizer: LLTokenizer, form: str, with_token: bool) -> None:
    shown = FORMATS[form]
    added = {token: number for token, number in SPECIAL.items() if token in shown.special or (with_token and token == "<tool_call>")}
    one, two = written(shown, ("f", '{"a": "b"}')), written(shown, ("f", '{"a": ""}'), ("g.h", '{"n": 2}'))
    wrong = [written(shown, ("f", '{"n": 1}')), written(shown, ("g.h", '{"n": 3}')), written(shown, ("h", "{}")), "text", one + "x"]
    several = make_call_grammar(shown, [TOOL, OTHER], added, several=True)
    single = make_call_grammar(shown, [TOOL, OTHER], added, several=False)
    for grammar in (several, single):
        assert accepts(tokenizer, grammar, one, added)
        assert not any(accepts(tokenizer, grammar, text, added) for text in wrong)
    if shown.between is not None:
        assert accepts(tokenizer, several, two, added)
        assert not accepts(tokenizer, single, two, added)
    free = make_call_grammar(shown, [TOOL._replace(strict=True), OTHER], added, several=True, free=True)
    loose = written(shown, ("g.h", '{"n": 3, "any": []}'))
    for text in ("", "text", one, loose):
        assert accepts(tokenizer, free, text, added), text
    if shown.trigger:
        assert accepts(tokenizer, free, "text\n" + one, added)
    assert not accepts(tokenizer, free, wrong[0], added)
    assert accepts(tokenizer, free, wrong[2], added) == (not shown.trigger)  # JSON with an unknown name is any text
    schema = Grammar.json_schema({"enum": [3, 4]})
    either = make_call_grammar(shown, [TOOL], added, several=False, otherwise=schema)
    assert accepts(tokenizer, either, "4", added)
    assert accepts(tokenizer, either, one, added)
    assert not accepts(tokenizer, either, "5", added)


def test_letters_that_are_operators_in_a_grammar(tokenizer: LLTokenizer) -> None:
    schema = {"type": "object", "properties": {"a&b": {"enum": ["~/x & y"]}}, "description": "&~" * 9, "required": ["a&b"]}
    grammar = make_call_grammar(HERMES, [Tool("f", schema)], {}, several=False)
    assert grammar.text.count("&") + grammar.text.count("~") == 0
    assert accepts(tokenizer, grammar, written(HERMES, ("f", '{"a&b": "~/x & y"}')), {})
    assert not accepts(tokenizer, grammar, written(HERMES, ("f", '{"a&b": "~/x"}')), {})


def test_a_tools_schema_is_held_as_any_other(tokenizer: LLTokenizer) -> None:
    dates = {f"d{i}": {"type": "string", "format": "date"} for i in range(7)}
    lenient = {"x-guidance": {"lenient": True, "whitespace_pattern": " +"}}
    schema = {
        "type": "object",
        "allOf": [{"properties": {"a": {"const": 1, **lenient}}}],
        "properties": dates,
        "required": ["a"],
        **lenient,
    }
    grammar = make_call_grammar(HERMES, [Tool("f", schema)], {}, several=False)
    assert accepts(tokenizer, grammar, written(HERMES, ("f", '{"a": 1, "d0": "2024-01-02"}')), {})
    for wrong in ('{"a": 2}', '{"a": 1, "d0": "x"}', '{"a":  1}'):
        assert not accepts(tokenizer, grammar, written(HERMES, ("f", wrong)), {})
    with pytest.raises(GrammarError, match="'not' at '#/properties/a'"):
        make_call_grammar(HERMES, [Tool("f", {"properties": {"a": {"not": {"const": 1}}}, **lenient})], {}, several=False)

"""The form of calls that a template shows: found whatever the template writes, read back, and held by a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny
from call_events import collect_calls
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken

from ngramspec.prompts.template_process import get_template_processes
from ngramspec.prompts.tool_calls.call_formats import HERMES, INDEX, CallFormat, Tool
from ngramspec.prompts.tool_calls.call_grammar import make_call_grammar
from ngramspec.prompts.tool_calls.call_probe import detect_call_format
from ngramspec.prompts.tool_calls.call_reader import CallReader
from ngramspec.prompts.tool_calls.call_scanner import KnownTools

Calls = list[tuple[str, dict[str, Any]]]
VALUE = "{{ v if v is string else v | tojson }}"
PAIRS = "{% for k, v in f.arguments | items %}PAIR{% endfor %}"
QUOTED = "{% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
GEMMA = (
    "{% macro put(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>{% elif v is mapping %}{{ '{' }}{% for k, w in v | items %}"
    "{{ k }}:{{ put(w) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}{% elif v is sequence %}[{% for w in v %}"
    "{{ put(w) }}{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
# What stands before the calls, one call, what stands between two, and what stands after the last.
FORMS: dict[str, tuple[str, str, str, str]] = {
    "qwen3-coder": (
        "",
        "<tool_call>\n<function={{ f.name }}>\n"
        + PAIRS.replace("PAIR", f"<parameter={{{{ k }}}}>\n{VALUE}\n</parameter>\n")
        + "</function>\n</tool_call>",
        "\n",
        "",
    ),
    "seed": (
        "",
        "<seed:tool_call>\n<function={{ f.name }}>\n"
        + PAIRS.replace("PAIR", f"<parameter={{{{ k }}}}>{VALUE}</parameter>\n")
        + "</function>\n</seed:tool_call>",
        "\n",
        "",
    ),
    "glm 4.5": (
        "",
        "<tool_call>{{ f.name }}\n"
        + PAIRS.replace("PAIR", f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{VALUE}</arg_value>\n")
        + "</tool_call>",
        "\n",
        "",
    ),
    "glm 4.7": (
        "",
        "<tool_call>{{ f.name }}" + PAIRS.replace("PAIR", f"<arg_key>{{{{ k }}}}</arg_key><arg_value>{VALUE}</arg_value>") + "</tool_call>",
        "",
        "",
    ),
    "minimax": (
        "<minimax:tool_call>\n",
        '<invoke name="{{ f.name }}">\n' + PAIRS.replace("PAIR", f'<parameter name="{{{{ k }}}}">{VALUE}</parameter>\n') + "</invoke>",
        "\n",
        "\n</minimax:tool_call>",
    ),
    "dsml": (
        "\n\n<｜DSML｜function_calls>\n",
        '<｜DSML｜invoke name="{{ f.name }}">\n'
        + PAIRS.replace(
            "PAIR", f'<｜DSML｜parameter name="{{{{ k }}}}" string="{{{{ v is string | tojson }}}}">{VALUE}</｜DSML｜parameter>\n'
        ).replace("{{ v is string | tojson }}", "{{ 'true' if v is string else 'false' }}")
        + "</｜DSML｜invoke>",
        "\n",
        "\n</｜DSML｜function_calls>",
    ),
    "gemma 4": (
        "",
        "<|tool_call>call:{{ f.name }}{{ '{' }}{% for k, v in f.arguments | items %}{{ k }}:{{ put(v) }}{{ ',' if not loop.last }}"
        "{% endfor %}{{ '}' }}<tool_call|>",
        "",
        "",
    ),
    "lfm 2": ("<|tool_call_start|>[", "{{ f.name }}(" + QUOTED + ")", ", ", "]<|tool_call_end|>"),
    "llama 4": ("[", "{{ f.name }}(" + QUOTED + ")", ", ", "]"),
    "apertus": ("<|tools_prefix|>[", '{"{{ f.name }}": {{ f.arguments | tojson }}}', ", ", "]<|tools_suffix|>"),
    "command": (
        "<|START_ACTION|>[\n",
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}"
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "hermes": ("", '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>', "\n", ""),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
}  # fmt: skip
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<seed:tool_call>", "</seed:tool_call>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>",
    "<|tool_call_end|>", "<|tools_prefix|>", "<|tools_suffix|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
]  # fmt: skip
ADDED = {token: 256 + i for i, token in enumerate([*dict.fromkeys(SPECIAL), "<arg_value>", "</arg_value>"])}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "nested": {"$ref": "#/$defs/nested"},
        "choice": {"enum": ["a", "b c"]},
    },
    "additionalProperties": False,
    "$defs": {"nested": {"type": "object", "properties": {"list": {"type": "array"}}}},
}
TOOLS = [
    Tool("f", SCHEMA),
    Tool("g-h", {"type": "object", "properties": {}, "additionalProperties": False}),
    Tool("i.j_k", {"type": "object"}),
]
KNOWN = KnownTools({tool.name: tool.parameters for tool in TOOLS})
CALLS: list[Calls] = [
    [("f", {"text": "Paris"})],
    [("f", {"text": 'a "quote", it\'s\n\n  two lines\n \\ </x> {"b": [1}'})],
    [("f", {"text": "日本 😀", "number": -1.5, "flag": True, "choice": "b c"})],
    [("f", {"nested": {"list": ["x", 2, {"deep": [False]}]}})],
    [("f", {})],
    [("g-h", {}), ("f", {"text": "12"}), ("i.j_k", {"any": "text"})],
]


def make_template(form: str, generation: str = "") -> str:
    before, call, between, after = FORMS[form]
    return (
        (GEMMA if "put(v)" in call else "") + "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        + before
        + "{% for c in m.tool_calls %}{% set f = c.function %}"
        + call
        + "{% if not loop.last %}"
        + (between if between else "{# nothing #}")
        + "{% endif %}{% endfor %}"
        + after
        + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + generation
        + "{% endif %}"
    ).replace("\n", "{{ '\\n' }}")


def render(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], follows: bool) -> str:
    told = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": follows}
    return get_template_processes().render(template, told)


def detect(template: str) -> CallFormat | None:
    return detect_call_format(lambda *given: render(template, *given), SPECIAL)


def write(template: str, calls: Calls) -> str:
    """The text that a model writes to make these calls, as the template shows it."""
    given = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    text = render(template, [{"role": "assistant", "content": "", "tool_calls": given}], [], False)
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


def split(text: str, size: int) -> list[str]:
    """Special tokens, and pieces of `size` characters of what is between them."""
    for token in SPECIAL:
        text = text.replace(token, f"\0{token}\0")
    parts = [part for part in text.split("\0") if part]
    return [piece for part in parts for piece in ([part] if part in SPECIAL else [part[i : i + size] for i in range(0, len(part), size)])]


def read(form: CallFormat, text: str, size: int, *, held: bool = False) -> tuple[str, Calls]:
    reader = CallReader(form, KNOWN, held=held)
    events = [event for piece in split(text, size) for event in (reader.push_special if piece in SPECIAL else reader.push)(piece)]
    said, calls = collect_calls([*events, *reader.finish()])
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.fixture(scope="module")
def formats() -> dict[str, CallFormat]:
    return {name: detect(make_template(name)) or pytest.fail(f"{name} is no format") for name in FORMS}


@pytest.mark.parametrize("name", FORMS)
def test_what_a_template_shows_is_read_back(name: str, formats: dict[str, CallFormat]) -> None:
    form, template = formats[name], make_template(name)
    assert (form == HERMES) == (name == "hermes")
    for calls in CALLS:
        text = write(template, calls)
        for size in (1, 3, 1000):
            assert read(form, text, size) == ("", calls)
            said, found = read(form, f"I look.\n{text}", size)
            assert (said.strip(), found) == ("I look.", calls)
            assert read(form, text, size, held=True) == ("", calls)


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    made = tiny.byte_tokenizer()
    made.backend_tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ADDED])
    return LLTokenizer(made.backend_tokenizer.to_str(), n_vocab=256 + len(ADDED), eos_token=[tiny.EOS])


def accepts(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    ids: list[int] = []
    while text:
        token = next((token for token in ADDED if text.startswith(token)), "")
        ids += [ADDED[token]] if token else text[0].encode()
        text = text[len(token) or 1 :]
    matcher = LLMatcher(tokenizer, grammar_from("lark", grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", FORMS)
def test_a_grammar_holds_a_text_to_the_form(name: str, formats: dict[str, CallFormat], tokenizer: LLTokenizer) -> None:
    form, template = formats[name], make_template(name)
    several, single = (make_call_grammar(form, TOOLS, ADDED, several=each).text for each in (True, False))
    for calls in CALLS:
        if name == "gemma 4" and "nested" in calls[0][1]:
            continue  # held to JSON within the call, which is read, too
        text = write(template, calls)
        assert accepts(tokenizer, several, text), text
        assert accepts(tokenizer, single, text) == (len(calls) == 1)
    for wrong in ([("f", {"number": "x"})], [("f", {"other": "x"})], [("f", {"choice": "c"})], [("g-h", {"a": "b"})], [("h", {})]):
        assert not accepts(tokenizer, several, write(template, wrong)), wrong
    assert not accepts(tokenizer, several, "text")
    assert not accepts(tokenizer, several, write(template, CALLS[0]) + "text")


@pytest.mark.parametrize("name", ["qwen3-coder", "glm 4.7", "gemma 4", "kimi", "llama 4"])
def test_text_is_free_up_to_a_call(name: str, formats: dict[str, CallFormat], tokenizer: LLTokenizer) -> None:
    form, template = formats[name], make_template(name)
    free = make_call_grammar(form, [TOOLS[0]._replace(strict=True), *TOOLS[1:]], ADDED, several=True, free=True).text
    for text in ("", "a [b] c\n", write(template, CALLS[0]), f"I look.\n{write(template, CALLS[0])}"):
        assert accepts(tokenizer, free, text), text
    assert accepts(tokenizer, free, write(template, [("f", {"number": "x"})])) == (not form.trigger)


@pytest.mark.parametrize("generation", ["<think>\n", "<think>\n\n</think>\n\n", "<|channel>thought\n<channel|>", "<"])
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "gemma 4", "command"])
def test_what_the_prompt_ends_with_is_no_part_of_a_call(name: str, generation: str, formats: dict[str, CallFormat]) -> None:
    assert detect(make_template(name, generation)) == formats[name]


def test_the_number_of_a_call_is_any(formats: dict[str, CallFormat]) -> None:
    assert f":{INDEX}<|tool_call_argument_begin|>" == formats["kimi"].middle
    assert formats["command"].first.endswith(f'"{INDEX}", "tool_name": "')


def test_a_form_that_cannot_be_described_leaves_the_template_its_tools() -> None:
    template = make_template("qwen3-coder").replace("<parameter={{ k }}>", "<{{ k }}>").replace("</parameter>", "</{{ k }}>")
    assert detect(template) == HERMES
    assert detect(template.replace("f.arguments | items", "(f.arguments if f.arguments is mapping else {}) | items")) == HERMES
    assert detect(make_template("hermes").replace("{{ t | tojson }}", "")) is None


TEXT, FLAG = "<parameter=text>\nx\n", "<parameter=flag>\ntrue\n"
END = "</parameter>\n"
MISTAKES = {  # of calls with text = x and flag = true
    "a value is not closed": f"<tool_call>\n<function=f>\n{TEXT}{FLAG}{END}</function>\n</tool_call>",
    "nor the last one": f"<tool_call>\n<function=f>\n{TEXT}{END}{FLAG}</function>\n</tool_call>",
    "no newlines": "<tool_call><function=f><parameter=text>x</parameter><parameter=flag>True</parameter></function></tool_call>",
    "the call is not closed": f"<tool_call>\n<function=f>\n{TEXT}{END}{FLAG}{END}</function>",
    "nor the function": f"<tool_call>\n<function=f>\n{TEXT}{END}{FLAG}{END}",
    "no tool_call": f"<function=f>\n{TEXT}{END}{FLAG}{END}</function>",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_small_mistakes_are_forgiven(name: str, formats: dict[str, CallFormat]) -> None:
    for size in (1, 7, 1000):
        assert read(formats["qwen3-coder"], MISTAKES[name], size) == ("", [("f", {"text": "x", "flag": True})])

"""The forms in which models write tool calls: a table of small parsers behind one contract.

A parser starts where its form may begin and reads on while the text grows. It yields None while it needs more text, yields what it found
(`ToolCallStart`, `ToolCallArguments`, `TextDelta`), and returns whether it was a call at all. It knows neither where else in a text calls
may be nor what becomes of text that is no call: that is `call_reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import regex

from ngramspec.prompts.tool_calls.call_scanner import Parse, Scanner, TextDelta
from ngramspec.prompts.tool_calls.call_values import (
    LONG_STRING,
    MARKED_TEXT,
    Calls,
    emit_calls,
    make_call,
    parse_json,
    read_json_calls,
    read_marked_object,
    read_python_calls,
    to_typed_value,
)


class CallForm(NamedTuple):
    """One way in which models write calls."""

    name: str
    begin: regex.Pattern[str]
    """The words with which it may begin."""
    read: Callable[[Scanner], Parse]
    marked: bool = True
    """Its words are never an answer's text, so that any known name makes it a call. Otherwise only arguments that fit the schema do."""


# ------------------------------------------------------------------ JSON: bare, in a fence, between tags

_ANY_NAME = r"(?P<name>[\w.:/-]+)"
_KEYS = r'"(?:name|tool_name|function|tool|type|id|arguments|parameters|tool_calls)"\s{0,99}:'
_FIRST = r'\[?\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*'
_NAME_FIRST = regex.compile(_FIRST + r'"name"\s*:\s*"(?P<name>[^"\\]*)"')
_WRAPPED = regex.compile(_FIRST + r'"(?:function|tool|tool_name|arguments|parameters|args|tool_calls)"\s*:')
_TO_ARGUMENTS = regex.compile(r'\s*(?:,\s*"(?:id|type)"\s*:\s*"[^"]*"\s*)*,\s*"(?:arguments|parameters|args)"\s*:\s*(?=[{"])')
_VALUE = regex.compile(r"(?:<[A-Za-z_]+>\s*)?(?P<doubled>\{(?=\{))?(?=\[|\{[^{])")
_NEXT = regex.compile(r"\s*[;,]?\s*(?:<[A-Za-z_]+>\s*)?(?P<doubled>\{(?=\{))?(?=\[|\{[^{])")
_BRACE = regex.compile(r"\s*\}")
_CLOSED = regex.compile(r"\s*</[A-Za-z_]+>")


def _read_values(scan: Scanner, *, checked: bool) -> Parse:
    """Read one value of JSON or several, each a call or a list of calls, maybe each between tags. Ends after the last that is."""
    found, pattern = False, _VALUE
    while True:
        start = scan.at
        if (begun := (yield from scan.match(pattern))) is None:
            return found
        calls = yield from _read_value(scan, checked=checked)
        if calls is None:
            scan.at = start
            return found
        yield from emit_calls(calls)
        found, pattern, scan.sure = True, _NEXT, False
        if begun["doubled"]:  # Qwen2.5-Coder writes {{…}}, as its template's own words do, and closes one brace too many
            for _ in range(2):
                yield from scan.match(_BRACE)
        yield from scan.match(_CLOSED)


def _read_value(scan: Scanner, *, checked: bool) -> Generator[None, None, Calls | None]:
    start = scan.at
    if checked:  # the first keys decide early, before much is held back
        if (head := (yield from scan.match(_NAME_FIRST))) is not None:
            if head["name"] not in scan.tools.schemas or (yield from scan.match(_TO_ARGUMENTS)) is None:
                return None
            scan.sure = True
        elif (yield from scan.match(_WRAPPED)) is None:
            return None
        scan.at = start
    text = yield from scan.read_whole_json()
    if text is None:
        return None
    value = parse_json(text)
    return None if isinstance(value, str) else read_json_calls(value, scan.tools, checked=checked)


def _read_bare(scan: Scanner) -> Parse:
    return (yield from _read_values(scan, checked=not scan.trusts_json))


_FENCE, _FENCE_END = regex.compile(r"```[\w+.-]*+\s*(?=[{\[<\w])"), regex.compile(r"\s*```")


def _read_fence(scan: Scanner) -> Parse:
    """Read a fenced block that consists of calls."""
    head = yield from scan.match(_FENCE)
    if head is None:
        return False
    start = scan.at
    found = yield from _read_values(scan, checked=True)
    if not found and ("tool" in head[0] or "python" in head[0]):
        scan.at = start
        found = yield from _read_python(scan, checked=True)
    if found:
        yield from scan.match(_FENCE_END)
    return found


def _make_tag_parser(opening: str, closing: str, *, checked: bool = False) -> Callable[[Scanner], Parse]:
    """Return the parser of JSON between words of markup, the last of which may be missing."""
    begin = regex.compile(rf"(?:{opening})\s*(?:```(?:json)?\s*)?(?=[{{\[])")
    end = regex.compile(rf"\s*(?:```\s*)?(?:{closing})")

    def read(scan: Scanner) -> Parse:
        if (yield from scan.match(begin)) is None:
            return False
        found = yield from _read_values(scan, checked=checked)
        if found:
            yield from scan.match(end)
        return found

    return read


# ------------------------------------------------------------------ names and JSON between words of markup


def _make_name_parser(begin: str, head: str, end: str) -> Callable[[Scanner], Parse]:
    """Return the parser of an optional `begin` and calls: `head`, which has a group `name`, then JSON, then `end`."""
    first, head_, end_ = regex.compile(rf"(?:{begin})?\s*"), regex.compile(head), regex.compile(rf"\s*(?:{end})")

    def read(scan: Scanner) -> Parse:
        yield from scan.match(first)
        found = False
        while True:
            start = scan.at
            matched = yield from scan.match(head_)
            text = None if matched is None else (yield from scan.read_whole_json())
            call = None if text is None or matched is None else make_call(matched["name"], parse_json(text), scan.tools, checked=False)
            if call is None:
                scan.at = start
                return found
            found = True
            yield from emit_calls([call])
            while (yield from scan.match(end_)) is not None:
                pass

    return read


_BAR = r"[|\uff5c]"
_DEEPSEEK = {word: rf"<{_BAR}tool[_\u2581]{words}{_BAR}>" for word, words in {
    "calls": r"calls[_\u2581]begin", "call": r"call[_\u2581]begin", "sep": "sep", "ends": r"calls?[_\u2581]end",
}.items()}  # fmt: skip
_KIMI = {word: rf"<\|tool_call{words}\|>" for word, words in {
    "calls": "s_section_begin", "call": "_begin", "sep": "_argument_begin", "ends": "(?:s_section)?_end",
}.items()}  # fmt: skip
_read_deepseek = _make_name_parser(
    _DEEPSEEK["calls"],
    rf"\s*(?:{_DEEPSEEK['call']})?\s*(?:function\s*{_DEEPSEEK['sep']})?\s*{_ANY_NAME}\s*(?:{_DEEPSEEK['sep']})?\s*(?:```(?:json)?\s*)?(?=\{{)",
    rf"```|{_DEEPSEEK['ends']}",
)
_read_kimi = _make_name_parser(
    _KIMI["calls"],
    rf"\s*{_KIMI['call']}\s*(?:functions\.)?(?P<name>[\w./-]+)(?::\d+)?\s*{_KIMI['sep']}\s*(?=\{{)",
    _KIMI["ends"],
)
_read_mistral_named = _make_name_parser("", rf"\[TOOL_CALLS\]\s*{_ANY_NAME}\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\])?\s*(?=\{{)", r"(?!)")
_read_harmony_call = _make_name_parser(
    "",
    r"(?:<\|start\|>)?(?:assistant)?\s*(?:to=functions\.(?P<name>[\w.:/-]+)\s*<\|channel\|>\s*commentary[^<]{0,99}"
    r"|<\|channel\|>\s*(?:commentary|analysis)\s+to=functions\.(?P<name>[\w.:/-]+)[^<]{0,99})(?:<\|constrain\|>\s*\w*\s*)?<\|message\|>\s*(?=\{)",
    r"<\|(?:call|end|return)\|>",
)
_CHANNEL = regex.compile(r"(?:<\|start\|>)?(?:assistant)?\s*<\|channel\|>\s*\w+[^<]{0,99}(?:<\|constrain\|>\s*\w*\s*)?<\|message\|>")
_MESSAGE_END = regex.compile(r"<\|(?:end|return|call)\|>")


def _read_harmony_channel(scan: Scanner) -> Parse:
    """Read the head or the end of a message that calls nothing: the message is text, and these words are not."""
    if (yield from scan.match(_CHANNEL)) is not None:
        yield TextDelta("\n\n")  # beside the message before, if there was one
        return True
    return (yield from scan.match(_MESSAGE_END)) is not None


# ------------------------------------------------------------------ XML

_FUNCTION = regex.compile(r"(?:<tool_call>\s*)?<function(?:=|\s+name=)[\"']?(?P<name>[\w.:/-]+)[\"']?\s*>\s*")
_PARAMETER = regex.compile(r"\s*<parameter(?:=|\s+name=)[\"']?(?P<key>[^\s<>\"']+)[\"']?\s*>")
_PARAMETER_END = regex.compile(r"</parameter>|(?=\s{0,99}+(?:<parameter[= ]|</function>))")
_FUNCTION_END = regex.compile(r"\s*</function>")
_OBJECT = regex.compile(r"(?=\{)")
_TOOL_CALL_END = regex.compile(r"\s*</tool_call>")


def _read_function(scan: Scanner) -> Parse:
    """Read `<function=NAME>`, with parameters as tags (Qwen3-Coder) or as JSON (Llama 3.1)."""
    head = yield from scan.match(_FUNCTION)
    if head is None or (name := head["name"]) not in scan.tools.schemas:
        return False
    arguments: Any = {}
    if (yield from scan.match(_OBJECT)) is not None:
        text = yield from scan.read_whole_json()
        arguments = None if text is None else parse_json(text)
    else:
        arguments = yield from _tagged_values(scan, name, _PARAMETER, _PARAMETER_END)
        if arguments is None:
            return False
    if not (yield from end_call(scan, name, arguments, _FUNCTION_END)):
        return False
    yield from scan.match(_TOOL_CALL_END)
    return True


def _tagged_values(
    scan: Scanner, name: str, key: regex.Pattern[str], end: regex.Pattern[str]
) -> Generator[None, None, dict[str, Any] | None]:
    """Read the arguments of a call of `name` as pairs of a key's tag and a value up to its `end`.

    None: a value does not end, so it is no call.
    """
    arguments: dict[str, Any] = {}
    while (found := (yield from scan.match(key))) is not None:
        value = yield from scan.read_until(end)
        if value is None:
            return None
        arguments[found["key"]] = to_typed_value(value.removeprefix("\n").removesuffix("\n"), name, found["key"], scan.tools)
    return arguments


def end_call(scan: Scanner, name: str, arguments: Any, end: regex.Pattern[str]) -> Parse:
    """Read the `end` of a call, for which the end of the text stands too, and emit the call."""
    closed = yield from scan.match(end)
    call = None if closed is None and not scan.ended else make_call(name, arguments, scan.tools, checked=False)
    if call is None:
        return False
    yield from emit_calls([call])
    return True


# `<invoke name="…">` with parameters as tags: MiniMax M2, DeepSeek V3.2, and others in a name space of their own.
_SPACE = r"(?:\w+:|\uff5cDSML\uff5c)?"
_INVOKES = rf"<{_SPACE}(?:function_calls|tool_calls|tool_call)>\s{{0,99}}<{_SPACE}invoke |<{_SPACE}invoke name="
_INVOKE = regex.compile(
    rf"(?:<{_SPACE}(?:function_calls|tool_calls|tool_call)>)?\s*<{_SPACE}invoke name=[\"']?(?P<name>[\w.:/-]+)[\"']?\s*>"
)
_INVOKE_KEY = regex.compile(rf"\s*<{_SPACE}parameter name=[\"']?(?P<key>[^\s<>\"']+)[\"']?(?: string=\"(?:true|false)\")?\s*>")
_INVOKE_VALUE, _INVOKE_END = regex.compile(rf"</{_SPACE}parameter>"), regex.compile(rf"\s*</{_SPACE}invoke>")
_INVOKES_END = regex.compile(rf"\s*</{_SPACE}(?:function_calls|tool_calls|tool_call)>")


def _read_invoke(scan: Scanner) -> Parse:
    """Read a name and parameters as tags."""
    head = yield from scan.match(_INVOKE)
    if head is None or (name := head["name"]) not in scan.tools.schemas:
        return False
    arguments = yield from _tagged_values(scan, name, _INVOKE_KEY, _INVOKE_VALUE)
    if arguments is None or not (yield from end_call(scan, name, arguments, _INVOKE_END)):
        return False
    yield from scan.match(_INVOKES_END)
    return True


_GLM = regex.compile(rf"<tool_call>\s*{_ANY_NAME}\s*(?=<arg_key>|</tool_call>)")
_GLM_KEY, _GLM_VALUE = regex.compile(r"\s*<arg_key>\s*(?P<key>[^<]{1,200}?)\s*</arg_key>\s*<arg_value>"), regex.compile("</arg_value>")


def _read_glm(scan: Scanner) -> Parse:
    """Read a name, then keys and values as tags (GLM 4.5)."""
    head = yield from scan.match(_GLM)
    if head is None or (name := head["name"]) not in scan.tools.schemas:
        return False
    arguments = yield from _tagged_values(scan, name, _GLM_KEY, _GLM_VALUE)
    if arguments is None:
        return False
    return (yield from end_call(scan, name, arguments, _TOOL_CALL_END))


# ------------------------------------------------------------------ Gemma

_GEMMA, _GEMMA_END = (
    regex.compile(rf"(?:<\|tool_call>|<start_function_call>)\s*call:{_ANY_NAME}\s*(?=\{{)"),
    regex.compile(r"\s*(?:<tool_call\|>|<end_function_call>|(?=<\|tool_response>|<start_function_response>))"),
)
_GEMMA_TOKENS = regex.compile(rf"{MARKED_TEXT}|\"(?:[^\"\\]|\\.)*\"|[{{}}\[\]\"]|<\|?\"|<escape>", regex.DOTALL)


def _read_gemma(scan: Scanner) -> Parse:
    """Read `call:NAME{KEY:VALUE}`, with marks around texts (Gemma 4, FunctionGemma)."""
    head = yield from scan.match(_GEMMA)
    if head is None or (name := head["name"]) not in scan.tools.schemas:
        return False
    text = yield from scan.read_brackets(_GEMMA_TOKENS)
    arguments = None if text is None else read_marked_object(text, name, scan.tools)
    return (yield from end_call(scan, name, arguments, _GEMMA_END))


# ------------------------------------------------------------------ Python

_PYTHON = regex.compile(r"\s*(?=\[?\s*[A-Za-z_][\w.:/-]*\()")
_PYTHON_TOKENS = regex.compile(
    rf"{LONG_STRING}|\"\"\"|'''|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[()\[\]{{}}\"']|[^()\[\]{{}}\"']+", regex.DOTALL
)


def _read_python(scan: Scanner, *, checked: bool) -> Parse:
    """Read `f(a=1)`, or a list of such."""
    if (yield from scan.match(_PYTHON)) is None:
        return False
    text = yield from scan.read_brackets(_PYTHON_TOKENS)
    calls = None if text is None else read_python_calls(text, scan.tools, checked=checked)
    if calls is None:
        return False
    yield from emit_calls(calls)
    return True


_PYTHON_BEGIN, _PYTHON_END = r"<\|python_(?:tag|start)\|>|<\|tool_call_start\|>", r"<\|python_end\|>|<\|tool_call_end\|>"
_PYTHON_TAG, _PYTHON_TAG_END = regex.compile(rf"(?:{_PYTHON_BEGIN})\s*"), regex.compile(rf"\s*(?:{_PYTHON_END})")


def _read_python_tag(scan: Scanner) -> Parse:
    """Read JSON or Python after the token of Llama 3.1, Llama 4 and LFM2."""
    if (yield from scan.match(_PYTHON_TAG)) is None:
        return False
    start = scan.at
    found = yield from _read_values(scan, checked=False)
    if not found:
        scan.at = start
        found = yield from _read_python(scan, checked=False)
    if found:
        yield from scan.match(_PYTHON_TAG_END)
    return found


_CALLS, _CALLS_END, _NEXT_LINE = (regex.compile(each) for each in ("<function_calls>", r"\s*</function_calls>", r"\s*(?=[A-Za-z_])"))


def _read_function_calls(scan: Scanner) -> Parse:
    """Read calls in Python's notation, one a line, between tags (OLMo 3)."""
    found = (yield from scan.match(_CALLS)) is not None and (yield from _read_python(scan, checked=False))
    while found and (yield from scan.match(_NEXT_LINE)) is not None:
        if not (yield from _read_python(scan, checked=False)):
            break
    if found:
        yield from scan.match(_CALLS_END)
    return found


def _read_python_list(scan: Scanner) -> Parse:
    return (yield from _read_python(scan, checked=True))


# ------------------------------------------------------------------ the table


def _make_form(name: str, begin: str, read: Callable[[Scanner], Parse], *, marked: bool = True) -> CallForm:
    return CallForm(name, regex.compile(begin), read, marked)


_AT_LINE = r"(?<![^\n])[ \t]{0,99}"
# Not within other JSON, a program or a quotation. Looks back only from brackets, since looking back from each of many blanks takes long.
_IN_TEXT = r"(?=[\[{])(?<![\w\"'`\\]|[\[({=]\s{0,99}|[}\]\"\d]\s{0,99},\s{0,99}|\"\s{0,99}:\s{0,99})"
_WEAK_TAGS = "tools?|response|json|JSON|xml|function|action"

# Every form but the template's own. If several begin at one place, the first that finds a call counts.
FORMS: Sequence[CallForm] = (
    _make_form(
        "hermes", "<(?:tool_call|function_?call)>", _make_tag_parser("<(?:tool_call|function_?call)>", "</(?:tool_call|function_?call)>")
    ),
    _make_form("qwen3-coder", r"<tool_call>|<function(?:=|\s+name=)", _read_function),
    _make_form("glm", "<tool_call>", _read_glm),
    _make_form("gemma", r"<\|tool_call>|<start_function_call>", _read_gemma),
    _make_form("invoke", _INVOKES, _read_invoke),
    _make_form("mistral", r"\[TOOL_CALLS\]", _make_tag_parser(r"\[TOOL_CALLS\]", r"(?!)")),
    _make_form("mistral named", r"\[TOOL_CALLS\]", _read_mistral_named),
    _make_form("llama and lfm python", _PYTHON_BEGIN, _read_python_tag),
    _make_form("deepseek", f"{_DEEPSEEK['calls']}|{_DEEPSEEK['call']}", _read_deepseek),
    _make_form("kimi", f"{_KIMI['calls']}|{_KIMI['call']}", _read_kimi),
    _make_form("harmony", r"<\|channel\|>|<\|start\|>assistant|(?<!\S)to=functions\.", _read_harmony_call),
    _make_form("harmony text", r"<\|channel\|>|<\|start\|>assistant|<\|(?:end|return|call)\|>", _read_harmony_channel),
    _make_form("granite", r"<\|tool_call\|>", _make_tag_parser(r"<\|tool_call\|>", r"<\|/tool_call\|>|</tool_call>")),
    _make_form("nemotron", "<TOOLCALL>", _make_tag_parser("<TOOLCALL>", "</TOOLCALL>")),
    _make_form("functools", r"functools\s{0,99}\[", _make_tag_parser("functools", r"(?!)")),  # Phi-4 mini, Firefunction
    _make_form("olmo", "<function_calls>", _read_function_calls),
    _make_form("list in tags", "<tool_calls>", _make_tag_parser("<tool_calls>", "</tool_calls>")),
    _make_form("command-r", r"<\|START_ACTION\|>", _make_tag_parser(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>")),
    _make_form("internlm", r"<\|action_start\|>", _make_tag_parser(r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>")),
    _make_form("tags", f"<(?:{_WEAK_TAGS})>", _make_tag_parser(f"<(?:{_WEAK_TAGS})>", f"</(?:{_WEAK_TAGS})>", checked=True), marked=False),
    _make_form("fence", "(?<!`)```", _read_fence, marked=False),
    _make_form("json", rf"{_IN_TEXT}(?:\[\s{{0,99}})?\{{{{1,2}}\s{{0,99}}{_KEYS}", _read_bare, marked=False),
    _make_form("python list", rf"{_AT_LINE}\[\s{{0,99}}[A-Za-z_][\w.:/-]*\(", _read_python_list, marked=False),
)

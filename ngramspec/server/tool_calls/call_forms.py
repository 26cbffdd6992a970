"""The forms in which models write tool calls: a table of small parsers behind one contract.

A parser starts where its form may begin and reads on while the text grows. It yields None while it needs more text, yields what it found
(`Called`, `Argued`, `Said`), and returns whether it was a call at all. It knows neither where else in a text calls may be nor what becomes
of text that is no call: that is `call_reader`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import regex

from ngramspec.server.tool_calls.call_formats import CallFormat

MAX_HEAD = 1000
"""Characters before a call's arguments."""
MAX_PYTHON = 100_000
"""Characters of calls in Python's syntax, which are parsed at once."""
MAX_NESTED = 100
"""Brackets within brackets there."""


class Said(NamedTuple):
    """Text that is part of no call."""

    text: str


class Called(NamedTuple):
    """A call begins."""

    name: str


class Argued(NamedTuple):
    """The last call's arguments go on: a piece of JSON."""

    text: str


Event: TypeAlias = Said | Called | Argued
Parse: TypeAlias = Generator[Event | None, None, bool]
Calls: TypeAlias = list[tuple[str, str]]
"""(name, arguments as JSON)"""


def _fits_any(name: str, arguments: Any) -> bool:
    return True


@dataclass(frozen=True)
class KnownTools:
    """What may be called."""

    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the parameters, by name."""
    strict: frozenset[str] = frozenset()
    """Names of the tools whose calls must fit their schemas in every form."""
    fits: Callable[[str, Any], bool] = _fits_any
    """Whether arguments fit the schema of the tool with this name."""


@dataclass
class Scanner:
    """The text that parsers read, as it grows."""

    tools: KnownTools
    text: str = ""
    at: int = 0
    """Where a parser reads on."""
    ended: bool = False
    """The text does not grow any more."""
    streams: bool = False
    """A grammar holds calls to the template's form, so that they are passed on while they are written."""
    trusts_json: bool = False
    """JSON that names a tool is the template's own form here, and is a call whether it fits the schema or not."""
    sure: bool = False
    """Set by a parser of an unmarked form once only a call looks like that."""
    broken: bool = False
    """Set by a parser: the text ended within a call that was passed on."""

    def match(self, pattern: regex.Pattern[str]) -> Generator[None, None, regex.Match[str] | None]:
        """Move past the pattern; None where the text goes on otherwise. Waits while more text could decide it."""
        while True:
            found = pattern.match(self.text, self.at, partial=not self.ended)
            if found is None:
                return None
            if not found.partial:
                self.at = found.end()
                return found
            if len(self.text) - self.at > MAX_HEAD:
                return None
            yield None

    def until(self, pattern: regex.Pattern[str], longest: int) -> Generator[None, None, tuple[str, str] | None]:
        """Move past the next place that matches, of `longest` characters at most: (the text before it, its own)."""
        start = looked = self.at
        while True:
            if found := pattern.search(self.text, looked):
                self.at = found.end()
                return self.text[start : found.start()], found[0]
            if self.ended:
                return None
            looked = max(start, len(self.text) - longest)
            yield None

    def json(self) -> Generator[str | None, None, bool]:
        """Yield the pieces of the object or list that begins here as they come, None while more is needed; return whether it ended."""
        depth, in_string = 0, False
        while True:
            start, i = self.at, self.at
            while found := (_IN_STRING if in_string else _OUTSIDE).search(self.text, i):
                i = found.end()
                if in_string:
                    in_string = found[0] != '"'
                elif found[0] == '"':
                    in_string = True
                else:
                    depth += 1 if found[0] in "{[" else -1
                    if not depth:
                        self.at = i
                        yield self.text[start:i]
                        return True
            end = len(self.text)
            if in_string and end > i and self.text.endswith("\\") and not self.ended:
                end -= 1  # the letter that it escapes is yet to come
            self.at = end
            if end > start:
                yield self.text[start:end]
            if self.ended:
                return False
            yield None

    def whole_json(self) -> Generator[None, None, str | None]:
        """The text of the object or list that begins here; None where it does not end."""
        start = self.at
        reading = self.json()
        while True:
            try:
                if next(reading) is None:
                    yield None
            except StopIteration as stop:
                return self.text[start : self.at] if stop.value else None


_OUTSIDE, _IN_STRING = regex.compile(r'["{}\[\]]'), regex.compile(r'\\.|"', regex.DOTALL)


class CallForm(NamedTuple):
    """One way in which models write calls."""

    name: str
    begin: regex.Pattern[str]
    """Where it may begin."""
    read: Callable[[Scanner], Parse]
    marked: bool = True
    """Its words are never an answer's text, so that any known name makes it a call. Otherwise only arguments that fit the schema do."""


# ------------------------------------------------------------------ from values to calls


def tell(calls: Calls) -> Iterator[Event]:
    for name, arguments in calls:
        yield Called(name)
        yield Argued(arguments)


def _call(name: Any, arguments: Any, tools: KnownTools, *, checked: bool) -> tuple[str, str] | None:
    """One call, if there is such a tool and its arguments are an object that fits where it has to."""
    if not isinstance(name, str) or name not in tools.schemas or not isinstance(arguments, dict):
        return None
    if (checked or name in tools.strict) and not tools.fits(name, arguments):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(arguments)  # lone surrogates stay escaped
    except (ValueError, RecursionError):
        return None
    return name, text


_NAME_KEYS, _ARGUMENT_KEYS = ("name", "tool_name", "function", "tool"), ("arguments", "parameters", "args", "tool_input")
_OTHER_KEYS = {"type", "id", "tool_call_id", "index"}


def _calls_of(value: Any, tools: KnownTools, *, checked: bool) -> Calls | None:
    """The calls that a value of JSON is: one object, a list, or either in the wrapping of OpenAI's answers; None: it is something else."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list) and not set(value) - {"tool_calls", "content", "role"}:
        value = value["tool_calls"]
    if isinstance(value, list):
        made = [_calls_of(each, tools, checked=checked) if isinstance(each, dict) else None for each in value]
        return [call for calls in made for call in calls or ()] if made and None not in made else None
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("function"), dict) and not set(value) - {"function", *_OTHER_KEYS}:
        value = value["function"]
    name_key = next((key for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
    argument_key = next((key for key in _ARGUMENT_KEYS if key in value), None)
    if name_key is None or (checked and (argument_key is None or set(value) - {name_key, argument_key, *_OTHER_KEYS})):
        return None
    arguments = {} if argument_key is None else value[argument_key]
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    call = _call(value[name_key], {} if arguments is None else arguments, tools, checked=checked)
    return None if call is None else [call]


def _parsed(text: str) -> Any:
    """A value of JSON; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _typed(text: str, name: str, key: str, tools: KnownTools) -> Any:
    """The value that a text is for this parameter of a tool, by its schema."""
    root = tools.schemas[name]
    properties = root.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    types = _types(schema, root)
    if not types or types == {"string"}:
        return text
    python = {"True": True, "False": False, "None": None}
    value = python[text.strip()] if text.strip() in python else _parsed(text)
    if "string" in types and not (value is None or (isinstance(value, (dict, list, bool)) and types & {"object", "array", "boolean"})):
        return text
    return value


def _types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema names; none: it does not say."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
        target: Any = root
        for part in ref[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _types(target, root, depth + 1)
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)} if isinstance(given, list) else set()
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(word), list):
            for each in parts:
                types |= _types(each, root, depth + 1)
    if isinstance(values := schema.get("enum"), list):
        types |= {_TYPES.get(type(value), "null") for value in values}
    return types


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}

# ------------------------------------------------------------------ JSON: bare, in a fence, between tags

_ANY_NAME = r"(?P<name>[\w.:/-]+)"
_KEYS = r'"(?:name|tool_name|function|tool|type|id|arguments|parameters|tool_calls)"\s*:'
_FIRST = r'\[?\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*'
_NAME_FIRST = regex.compile(_FIRST + r'"name"\s*:\s*"(?P<name>[^"\\]*)"')
_WRAPPED = regex.compile(_FIRST + r'"(?:function|tool|tool_name|arguments|parameters|args|tool_calls)"\s*:')
_TO_ARGUMENTS = regex.compile(r'\s*(?:,\s*"(?:id|type)"\s*:\s*"[^"]*"\s*)*,\s*"(?:arguments|parameters|args)"\s*:\s*(?=[{"])')
_VALUE = regex.compile(r"(?:<[A-Za-z_]+>\s*)?(?P<doubled>\{(?=\{))?(?=\[|\{[^{])")
_NEXT = regex.compile(r"\s*[;,]?\s*(?:<[A-Za-z_]+>\s*)?(?P<doubled>\{(?=\{))?(?=\[|\{[^{])")
_BRACE = regex.compile(r"\s*\}")
_CLOSED = regex.compile(r"\s*</[A-Za-z_]+>")


def _read_values(scan: Scanner, *, checked: bool) -> Parse:
    """One value of JSON or several, each a call or a list of calls, maybe each between tags. Ends behind the last that is."""
    found, pattern = False, _VALUE
    while True:
        start = scan.at
        if (begun := (yield from scan.match(pattern))) is None:
            return found
        calls = yield from _read_value(scan, checked=checked)
        if calls is None:
            scan.at = start
            return found
        yield from tell(calls)
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
    text = yield from scan.whole_json()
    if text is None:
        return None
    value = _parsed(text)
    return None if isinstance(value, str) else _calls_of(value, scan.tools, checked=checked)


def _read_bare(scan: Scanner) -> Parse:
    return (yield from _read_values(scan, checked=not scan.trusts_json))


_FENCE, _FENCE_END = regex.compile(r"```[\w+.-]*+\s*(?=[{\[<\w])"), regex.compile(r"\s*```")


def _read_fence(scan: Scanner) -> Parse:
    """A fenced block that is calls from its beginning to its end."""
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


def _between(opening: str, closing: str, *, checked: bool = False) -> Callable[[Scanner], Parse]:
    """The parser of JSON between words of markup, the last of which may be missing."""
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


def _named(begin: str, head: str, end: str) -> Callable[[Scanner], Parse]:
    """The parser of calls (`head`, which has a group `name`, then JSON, then `end`), again and again, behind an optional `begin`."""
    first, head_, end_ = regex.compile(rf"(?:{begin})?\s*"), regex.compile(head), regex.compile(rf"\s*(?:{end})")

    def read(scan: Scanner) -> Parse:
        yield from scan.match(first)
        found = False
        while True:
            start = scan.at
            matched = yield from scan.match(head_)
            text = None if matched is None else (yield from scan.whole_json())
            call = None if text is None or matched is None else _call(matched["name"], _parsed(text), scan.tools, checked=False)
            if call is None:
                scan.at = start
                return found
            found = True
            yield from tell([call])
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
_read_deepseek = _named(
    _DEEPSEEK["calls"],
    rf"\s*(?:{_DEEPSEEK['call']})?\s*(?:function\s*{_DEEPSEEK['sep']})?\s*{_ANY_NAME}\s*(?:{_DEEPSEEK['sep']})?\s*(?:```(?:json)?\s*)?(?=\{{)",
    rf"```|{_DEEPSEEK['ends']}",
)
_read_kimi = _named(
    _KIMI["calls"],
    rf"\s*{_KIMI['call']}\s*(?:functions\.)?(?P<name>[\w./-]+)(?::\d+)?\s*{_KIMI['sep']}\s*(?=\{{)",
    _KIMI["ends"],
)
_read_mistral_named = _named("", rf"\[TOOL_CALLS\]\s*{_ANY_NAME}\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\])?\s*(?=\{{)", r"(?!)")
_read_harmony_call = _named(
    "",
    r"(?:<\|start\|>)?(?:assistant)?\s*(?:to=functions\.(?P<name>[\w.:/-]+)\s*<\|channel\|>\s*commentary[^<]{0,99}"
    r"|<\|channel\|>\s*(?:commentary|analysis)\s+to=functions\.(?P<name>[\w.:/-]+)[^<]{0,99})(?:<\|constrain\|>\s*\w*\s*)?<\|message\|>\s*(?=\{)",
    r"<\|(?:call|end|return)\|>",
)
_CHANNEL = regex.compile(r"(?:<\|start\|>)?(?:assistant)?\s*<\|channel\|>\s*\w+[^<]{0,99}(?:<\|constrain\|>\s*\w*\s*)?<\|message\|>")
_MESSAGE_END = regex.compile(r"<\|(?:end|return|call)\|>")


def _read_harmony_channel(scan: Scanner) -> Parse:
    """The head or the end of a message that calls nothing: the message is text, and these words are not."""
    if (yield from scan.match(_CHANNEL)) is not None:
        yield Said("\n\n")  # beside the message before, if there was one
        return True
    return (yield from scan.match(_MESSAGE_END)) is not None


# ------------------------------------------------------------------ XML

_FUNCTION = regex.compile(r"(?:<tool_call>\s*)?<function(?:=|\s+name=)[\"']?(?P<name>[\w.:/-]+)[\"']?\s*>\s*")
_PARAMETER = regex.compile(r"\s*<parameter(?:=|\s+name=)[\"']?(?P<key>[^\s<>\"']+)[\"']?\s*>")
_PARAMETER_END = regex.compile(r"</parameter>|(?=\n?\s*<parameter[= ])|(?=\n?\s*</function>)")
_FUNCTION_END = regex.compile(r"\s*</function>")
_OBJECT = regex.compile(r"(?=\{)")
_TOOL_CALL_END = regex.compile(r"\s*</tool_call>")


def _read_function(scan: Scanner) -> Parse:
    """`<function=NAME>`, with parameters as tags (Qwen3-Coder) or as JSON (Llama 3.1)."""
    head = yield from scan.match(_FUNCTION)
    if head is None or (name := head["name"]) not in scan.tools.schemas:
        return False
    arguments: Any = {}
    if (yield from scan.match(_OBJECT)) is not None:
        text = yield from scan.whole_json()
        arguments = None if text is None else _parsed(text)
    else:
        arguments = yield from _tagged_values(scan, name, _PARAMETER, _PARAMETER_END, 40)
        if arguments is None:
            return False
    closed = yield from scan.match(_FUNCTION_END)
    call = None if closed is None and not scan.ended else _call(name, arguments, scan.tools, checked=False)
    if call is None:
        return False
    yield from tell([call])
    yield from scan.match(_TOOL_CALL_END)
    return True


def _tagged_values(
    scan: Scanner, name: str, key: regex.Pattern[str], end: regex.Pattern[str], longest: int
) -> Generator[None, None, dict[str, Any] | None]:
    """Read the arguments of a call of `name` as pairs of a key's tag and a value up to its `end`, of at most `longest` characters.

    None: a value does not end, so it is no call.
    """
    arguments: dict[str, Any] = {}
    while (found := (yield from scan.match(key))) is not None:
        value = yield from scan.until(end, longest)
        if value is None:
            return None
        arguments[found["key"]] = _typed(_without_line_ends(value[0]), name, found["key"], scan.tools)
    return arguments


def _without_line_ends(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


_GLM = regex.compile(rf"<tool_call>\s*{_ANY_NAME}\s*(?=<arg_key>|</tool_call>)")
_GLM_KEY, _GLM_VALUE = regex.compile(r"\s*<arg_key>\s*(?P<key>[^<]{1,200}?)\s*</arg_key>\s*<arg_value>"), regex.compile("</arg_value>")


def _read_glm(scan: Scanner) -> Parse:
    """GLM 4.5: a name, then keys and values as tags."""
    head = yield from scan.match(_GLM)
    if head is None or (name := head["name"]) not in scan.tools.schemas:
        return False
    arguments = yield from _tagged_values(scan, name, _GLM_KEY, _GLM_VALUE, 12)
    if arguments is None:
        return False
    closed = yield from scan.match(_TOOL_CALL_END)
    call = None if closed is None and not scan.ended else _call(name, arguments, scan.tools, checked=False)
    if call is None:
        return False
    yield from tell([call])
    return True


# ------------------------------------------------------------------ Python

_PYTHON = regex.compile(r"\s*(?=\[?\s*[A-Za-z_][\w.]*\()")
_PYTHON_TOKENS = regex.compile(
    r"\"\"\"(?s:.*?)\"\"\"|'''(?s:.*?)'''|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[()\[\]{}\"']|[^()\[\]{}\"']+", regex.DOTALL
)


def _read_python(scan: Scanner, *, checked: bool) -> Parse:
    """`f(a=1)`, or a list of such."""
    if (yield from scan.match(_PYTHON)) is None:
        return False
    start = scan.at
    while (end := _end_of_python(scan.text, start)) is None:
        if scan.ended or len(scan.text) - start > MAX_PYTHON:
            return False
        yield None
    calls = _python_calls(scan.text[start:end], scan.tools, checked=checked) if end else None
    if calls is None:
        return False
    scan.at = end or start
    yield from tell(calls)
    return True


def _end_of_python(text: str, start: int) -> int | None:
    """Where the expression with its first brackets ends; 0: it is none; None: it goes on."""
    depth = 0
    for found in _PYTHON_TOKENS.finditer(text, start):
        match found[0]:
            case "(" | "[" | "{":
                depth += 1
                if depth > MAX_NESTED:
                    return 0
            case ")" | "]" | "}":
                depth -= 1
                if not depth:
                    return int(found.end())
            case '"' | "'":  # a string that does not end yet
                return None
    return None


def _python_calls(text: str, tools: KnownTools, *, checked: bool) -> Calls | None:
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    made = [_python_call(each, tools, checked=checked) for each in (parsed.elts if isinstance(parsed, ast.List) else [parsed])]
    return [call for call in made if call is not None] if made and None not in made else None


def _python_call(node: ast.expr, tools: KnownTools, *, checked: bool) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    if name not in tools.schemas:
        name = name.removesuffix(".call")  # Llama's built-in tools
    if name not in tools.schemas:
        return None
    properties = tools.schemas[name].get("properties")
    keys = list(properties) if isinstance(properties, Mapping) else []
    if len(node.args) > len(keys) or any(word.arg is None for word in node.keywords):
        return None
    try:
        arguments = {key: _python_value(value) for key, value in zip(keys, node.args, strict=False)}
        arguments |= {str(word.arg): _python_value(word.value) for word in node.keywords}
    except (ValueError, RecursionError, MemoryError):
        return None
    return _call(name, arguments, tools, checked=checked)


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _python_value(node: ast.expr) -> Any:
    """Raises ValueError for what is no literal."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=each) | ast.Tuple(elts=each):
            return [_python_value(item) for item in each]
        case ast.Dict(keys=keys, values=values):
            return {str(_python_value(key)): _python_value(value) for key, value in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)


_PYTHON_TAG = regex.compile(r"<\|python_(?:tag|start)\|>\s*")
_PYTHON_TAG_END = regex.compile(r"\s*<\|python_end\|>")


def _read_python_tag(scan: Scanner) -> Parse:
    """Llama 3.1's and Llama 4's calls behind their token: JSON, or Python."""
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


def _read_python_list(scan: Scanner) -> Parse:
    return (yield from _read_python(scan, checked=True))


# ------------------------------------------------------------------ the template's own


def template_form(shown: CallFormat, *, held: bool) -> CallForm | None:
    """The form that a chat template shows; None where it is bare JSON that no grammar holds, which the table has."""
    trigger = shown.trigger
    if not trigger and not held:
        return None
    begin, head = regex.compile(regex.escape(trigger) or r"\{(?=\s*\")"), regex.compile(shown.head.pattern)
    tail, end = regex.compile(shown.tail.pattern), regex.compile(r"\s*" + regex.escape(shown.end))

    def read(scan: Scanner) -> Parse:
        if trigger:
            yield from scan.match(begin)
        found = False
        while True:
            start = scan.at
            matched = yield from scan.match(head)
            if (
                matched is None
                or matched["name"] not in scan.tools.schemas
                or not (yield from _read_arguments(scan, matched["name"], tail))
            ):
                scan.at = start
                return found
            found = True
            listed = (yield from scan.match(_LIST_GOES_ON)) if shown.listed else None
            if listed is None or listed[0].endswith("]"):
                break
        if shown.end:
            yield from scan.match(end)
        return True

    return CallForm("template", begin, read)


_LIST_GOES_ON = regex.compile(r"\s*[,\]]")


def _read_arguments(scan: Scanner, name: str, tail: regex.Pattern[str]) -> Parse:
    """A call's arguments and what closes it, told of piece by piece where a grammar holds it."""
    start, reading, whole = scan.at, scan.json(), False
    if scan.streams:
        yield Called(name)
    while True:
        try:
            piece = next(reading)
        except StopIteration as stop:
            whole = stop.value
            break
        if piece is None:
            yield None
        elif scan.streams:
            yield Argued(piece)
    arguments = scan.text[start : scan.at]
    if scan.streams:
        scan.broken = not whole
        yield from scan.match(tail)
        return True
    value = _parsed(arguments) if whole else None
    if not isinstance(value, dict) or (name in scan.tools.strict and not scan.tools.fits(name, value)):
        return False
    if (yield from scan.match(tail)) is None:
        return False
    yield from tell([(name, arguments)])
    return True


# ------------------------------------------------------------------ the table


def _form(name: str, begin: str, read: Callable[[Scanner], Parse], *, marked: bool = True) -> CallForm:
    return CallForm(name, regex.compile(begin), read, marked)


_AT_LINE = r"(?<![^\n])[ \t]*"
_IN_TEXT = r"(?<![\w\"'`\\]|[\[({=]\s*|[}\]\"\d]\s*,\s*|\"\s*:\s*)"
"""Not within other JSON, a program or a quotation."""
_WEAK_TAGS = "tools?|response|json|JSON|xml|function|action"

FORMS: Sequence[CallForm] = (
    _form("hermes", "<(?:tool_call|function_?call)>", _between("<(?:tool_call|function_?call)>", "</(?:tool_call|function_?call)>")),
    _form("qwen3-coder", r"<tool_call>|<function(?:=|\s+name=)", _read_function),
    _form("glm", "<tool_call>", _read_glm),
    _form("mistral", r"\[TOOL_CALLS\]", _between(r"\[TOOL_CALLS\]", r"(?!)")),
    _form("mistral named", r"\[TOOL_CALLS\]", _read_mistral_named),
    _form("llama python", r"<\|python_(?:tag|start)\|>", _read_python_tag),
    _form("deepseek", f"{_DEEPSEEK['calls']}|{_DEEPSEEK['call']}", _read_deepseek),
    _form("kimi", f"{_KIMI['calls']}|{_KIMI['call']}", _read_kimi),
    _form("harmony", r"<\|channel\|>|<\|start\|>assistant|(?<!\S)to=functions\.", _read_harmony_call),
    _form("harmony text", r"<\|channel\|>|<\|start\|>assistant|<\|(?:end|return|call)\|>", _read_harmony_channel),
    _form("granite", r"<\|tool_call\|>", _between(r"<\|tool_call\|>", r"<\|/tool_call\|>|</tool_call>")),
    _form("nemotron", "<TOOLCALL>", _between("<TOOLCALL>", "</TOOLCALL>")),
    _form("list in tags", "<tool_calls>", _between("<tool_calls>", "</tool_calls>")),
    _form("command-r", r"<\|START_ACTION\|>", _between(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>")),
    _form("internlm", r"<\|action_start\|>", _between(r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>")),
    _form("tags", f"<(?:{_WEAK_TAGS})>", _between(f"<(?:{_WEAK_TAGS})>", f"</(?:{_WEAK_TAGS})>", checked=True), marked=False),
    _form("fence", "(?<!`)```", _read_fence, marked=False),
    _form("json", rf"{_IN_TEXT}(?:\[\s*)?\{{{{1,2}}\s*{_KEYS}", _read_bare, marked=False),
    _form("python list", rf"{_AT_LINE}\[\s*[A-Za-z_][\w.]*\(", _read_python_list, marked=False),
)
"""Every form but the template's own; where several begin at one place, the first that finds a call counts."""

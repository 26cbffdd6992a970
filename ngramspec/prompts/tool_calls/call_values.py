"""Turns what a model wrote, JSON or Python, into calls of known tools: a tool's name and its arguments as JSON.

Text or values enter, calls leave, or None if they are no calls. Nothing is executed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import regex

from ngramspec.prompts.tool_calls.call_scanner import KnownTools, StreamDelta, ToolCallArguments, ToolCallStart

# (name, arguments as JSON) of each call.
Calls: TypeAlias = list[tuple[str, str]]


def emit_calls(calls: Calls) -> Iterator[StreamDelta]:
    """Yield the deltas of whole calls."""
    for name, arguments in calls:
        yield ToolCallStart(name)
        yield ToolCallArguments(arguments)


def make_call(name: Any, arguments: Any, tools: KnownTools, *, checked: bool) -> tuple[str, str] | None:
    """Return one call; None if there is no such tool, or its arguments are no object, or do not fit and have to.

    `checked`: the arguments must fit the tool's schema. Those of a strict tool always must.
    """
    if not isinstance(name, str) or name not in tools.schemas or not isinstance(arguments, dict):
        return None
    if (checked or name in tools.strict) and not tools.match_schema(name, arguments):
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


def read_json_calls(value: Any, tools: KnownTools, *, checked: bool) -> Calls | None:
    """Return the calls in a JSON value: one object, a list, or either in the wrapping of OpenAI's answers; None if it is anything else."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list) and not set(value) - {"tool_calls", "content", "role"}:
        value = value["tool_calls"]
    if isinstance(value, list):
        made = [read_json_calls(each, tools, checked=checked) if isinstance(each, dict) else None for each in value]
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
        arguments = parse_json(arguments)
    call = make_call(value[name_key], {} if arguments is None else arguments, tools, checked=checked)
    return None if call is None else [call]


_PYTHON_NAMES = {"True": True, "False": False, "None": None}


def parse_json(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parse_python(text: str) -> Any:
    """Return the value of a literal in Python's notation, in which templates show some values; the text itself if it is none."""
    try:
        return _read_literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def to_typed_value(text: str, name: str, key: str, tools: KnownTools) -> Any:
    """Return a parameter's value, written as plain text, in the type that the schema of the tool `name` gives the parameter `key`."""
    root = tools.schemas[name]
    properties = root.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    types = collect_types(schema, root)
    if not types or types == {"string"}:
        return text
    value = _PYTHON_NAMES[text.strip()] if text.strip() in _PYTHON_NAMES else parse_json(text)
    if isinstance(value, str) and types & {"object", "array"}:
        value = _parse_python(text)
    if "string" in types and not (value is None or (isinstance(value, (dict, list, bool)) and types & {"object", "array", "boolean"})):
        return text
    return value


def collect_types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names; none if it names none. Each part that it refers to is looked at once."""
    types, waiting, refs = set[str](), [schema], set[str]()
    while waiting:
        each = waiting.pop()
        if not isinstance(each, Mapping):
            continue
        if isinstance(ref := each.get("$ref"), str) and ref.startswith("#/"):
            if ref not in refs:
                refs.add(ref)
                waiting.append(_follow_reference(ref, root))
            continue
        given = each.get("type")
        types |= {name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)}
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(parts := each.get(word), list):
                waiting += parts
        if isinstance(values := each.get("enum"), list):
            types |= {_TYPES.get(type(value), "null") for value in values}
    return types


def _follow_reference(ref: str, root: Any) -> Any:
    for part in ref[2:].split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}

# ------------------------------------------------------------------ Gemma

MARKED_TEXT = r"<\|\"\|>(?P<text>.*?)<\|\"\|>|<escape>(?P<text>.*?)<escape>"  # of Gemma 4 and FunctionGemma
_MARKED_TOKENS = regex.compile(
    rf"{MARKED_TEXT}|(?P<json>\"(?:[^\"\\]|\\.)*\")|(?P<bare>[^\s{{}}\[\],:\"<](?:[^{{}}\[\],:\"<]*[^\s{{}}\[\],:\"<])?)(?P<is_key>\s*:)?",
    regex.DOTALL,
)


def read_marked_object(text: str, name: str, tools: KnownTools) -> Any:
    """Return the arguments of a call of `name`: an object whose texts stand between marks and whose keys stand bare. Else the text."""

    def write(found: regex.Match[str]) -> str:
        if (marked := found["text"]) is not None:
            return json.dumps(marked)
        if (bare := found["bare"]) is None:
            return found[0]
        if found["is_key"]:
            return f"{json.dumps(bare)}:"
        return json.dumps(_PYTHON_NAMES.get(bare, parse_json(bare)))

    arguments = parse_json(_MARKED_TOKENS.sub(write, text))
    if not isinstance(arguments, dict):
        return arguments
    return {key: to_typed_value(value, name, key, tools) if isinstance(value, str) else value for key, value in arguments.items()}


# ------------------------------------------------------------------ Python


def read_python_calls(text: str, tools: KnownTools, *, checked: bool) -> Calls | None:
    """Return the calls in a Python expression, `f(a=1)` or a list of such; None if it is anything else."""
    names: dict[str, str] = {}

    def make_valid(found: regex.Match[str]) -> str:
        if not (name := found["name"]):
            return found[0].replace("\n", "\\n") if found[0][0] in "\"'" and found[0][:3] != found[0][:1] * 3 else found[0]
        if name not in tools.schemas or ("-" not in name and ":" not in name and "/" not in name):
            return found[0]
        names.setdefault(name, f"tool_{len(names)}_")
        return names[name]

    try:
        parsed = ast.parse(_STRINGS_AND_NAMES.sub(make_valid, text.strip()), mode="eval").body
        known = {valid: name for name, valid in names.items()}
        calls = parsed.elts if isinstance(parsed, ast.List) else [parsed]
        made = [_read_python_call(each, tools, known, checked=checked) for each in calls]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return [call for call in made if call is not None] if made and None not in made else None


LONG_STRING = r"\"\"\"(?:[^\\]|\\.)*?\"\"\"|'''(?:[^\\]|\\.)*?'''"  # of Python, in three quotes

# Strings, and names of functions, some of which are no names in Python.
_STRINGS_AND_NAMES = regex.compile(
    rf"{LONG_STRING}|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?P<name>[A-Za-z_][\w.:/-]*)(?=\()", regex.DOTALL
)


def _read_python_call(node: ast.expr, tools: KnownTools, known: Mapping[str, str], *, checked: bool) -> tuple[str, str] | None:
    """Return the call; None if it is none of a known tool. Raises ValueError for arguments that are no literals of JSON, RecursionError."""
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    name = known.get(name, name)
    if name not in tools.schemas:
        name = name.removesuffix(".call")  # Llama's built-in tools
    if name not in tools.schemas:
        return None
    properties = tools.schemas[name].get("properties")
    keys = list(properties) if isinstance(properties, Mapping) else []
    if len(node.args) > len(keys) or any(word.arg is None for word in node.keywords):
        return None
    arguments = {key: _read_literal(value) for key, value in zip(keys, node.args, strict=False)}
    arguments |= {str(word.arg): _read_literal(word.value) for word in node.keywords}
    return make_call(name, arguments, tools, checked=checked)


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _read_literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON can hold. Raises ValueError for anything else, such as a set or bytes."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=each) | ast.Tuple(elts=each):
            return [_read_literal(item) for item in each]
        case ast.Dict(keys=keys, values=values):
            return {str(_read_literal(key)): _read_literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise ValueError(f"{type(value).__name__} is no value of JSON")
    return value

"""Turns what a model wrote, JSON or Python, into calls of known tools: a tool's name and its arguments as JSON.

Text or values enter, calls leave, or None if they are no calls. Nothing is executed.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from ngramspec.prompts.tool_calls.call_scanner import KnownTools, StreamDelta, ToolCallArguments, ToolCallStart

Calls: TypeAlias = list[tuple[str, str]]
"""(name, arguments as JSON) of each call."""


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


def parse_json(text: str) -> Any:
    """Return the value of a JSON text, or the text itself if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def to_typed_value(text: str, name: str, key: str, tools: KnownTools) -> Any:
    """Return a parameter's value, written as plain text, in the type that the schema of the tool `name` gives the parameter `key`."""
    root = tools.schemas[name]
    properties = root.get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    types = _collect_types(schema, root)
    if not types or types == {"string"}:
        return text
    python = {"True": True, "False": False, "None": None}
    value = python[text.strip()] if text.strip() in python else parse_json(text)
    if "string" in types and not (value is None or (isinstance(value, (dict, list, bool)) and types & {"object", "array", "boolean"})):
        return text
    return value


def _collect_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the types that a schema names; none if it names none."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    if isinstance(ref := schema.get("$ref"), str) and ref.startswith("#/"):
        target: Any = root
        for part in ref[2:].split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        return _collect_types(target, root, depth + 1)
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {each for each in given if isinstance(each, str)} if isinstance(given, list) else set()
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(word), list):
            for each in parts:
                types |= _collect_types(each, root, depth + 1)
    if isinstance(values := schema.get("enum"), list):
        types |= {_TYPES.get(type(value), "null") for value in values}
    return types


_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}

# ------------------------------------------------------------------ Python


def read_python_calls(text: str, tools: KnownTools, *, checked: bool) -> Calls | None:
    """Return the calls in a Python expression, `f(a=1)` or a list of such; None if it is anything else."""
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    made = [_read_python_call(each, tools, checked=checked) for each in (parsed.elts if isinstance(parsed, ast.List) else [parsed])]
    return [call for call in made if call is not None] if made and None not in made else None


def _read_python_call(node: ast.expr, tools: KnownTools, *, checked: bool) -> tuple[str, str] | None:
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
        arguments = {key: _read_literal(value) for key, value in zip(keys, node.args, strict=False)}
        arguments |= {str(word.arg): _read_literal(word.value) for word in node.keywords}
    except (ValueError, RecursionError, MemoryError):
        return None
    return make_call(name, arguments, tools, checked=checked)


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _read_literal(node: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for anything else."""
    match node:
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.List(elts=each) | ast.Tuple(elts=each):
            return [_read_literal(item) for item in each]
        case ast.Dict(keys=keys, values=values):
            return {str(_read_literal(key)): _read_literal(value) for key, value in zip(keys, values, strict=True) if key is not None}
    return ast.literal_eval(node)

"""Rewrites clients' JSON Schemas for llguidance, which refuses keywords that it does not implement.

A schema enters, one of the same meaning leaves (`prepare_schema`). Annotations are dropped, and so is what llguidance would take for its
own options; keywords whose meaning cannot be held are refused by name. Some are held less strictly, as docs/server.md says: `oneOf` as
`anyOf`, `uniqueItems` not at all, and a `pattern` with look-around not if there is a `format`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from ngramspec.errors import GrammarError

WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"  # allowed between JSON tokens, as in llama.cpp; bounded, or a model could write blanks for ever
OPTIONS: dict[str, Any] = {"coerce_one_of": True}  # llguidance's options for all schemas
# Formats of strings that llguidance holds. Any other one is an annotation.
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_ANNOTATIONS = (
    "x-guidance", "$schema", "deprecated", "contentSchema", "contentEncoding", "contentMediaType", "$vocabulary", "$dynamicAnchor",
    "$recursiveAnchor", "uniqueItems", "title", "description", "default", "examples", "readOnly", "writeOnly", "$comment",
)  # fmt: skip
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_DECIMAL = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$"}  # Pydantic's pattern for a Decimal -> without look-ahead
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf")
_MAPS, _LISTS = ("properties", "patternProperties", "$defs", "definitions"), ("allOf", "anyOf", "oneOf", "prefixItems")
_ONES = ("items", "additionalItems", "additionalProperties")
_NOTHING = {"allOf": [False]}  # a schema that nothing fits, as an object


def prepare_schema(schema: Any) -> dict[str, Any]:
    """Return the schema for llguidance. Raises GrammarError that names the keyword that cannot be held, and where it is."""
    if isinstance(schema, bool):
        return {} if schema else copy.deepcopy(_NOTHING)
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema must be an object, true or false, got {schema!r:.80}")
    root = copy.deepcopy(schema)
    pending, seen = [("", root)], set[int]()
    while pending:
        path, node = pending.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        _prepare_node(node, path)
        pending += _find_subschemas(node, path)
        if isinstance(ref := node.get("$ref"), str) and ref.startswith("#/"):
            pending.append((ref[1:], _resolve_reference(root, ref)))
    return root


def prepare_lark(grammar: str) -> str:
    """Return a client's grammar in Lark's notation with each `%json` schema rewritten.

    Raises GrammarError for such a schema, and for options of `%llguidance` that would let a text be no UTF-8 or a mask take long.
    """
    made, at = list[str](), 0
    while found := _LARK_WORDS.search(grammar, at):
        made.append(grammar[at : found.end()])
        at = found.end()
        if re.match('"|/(?!/)', found[0]) and not (found["quote"] or found["slash"]):
            raise GrammarError(f"what begins with {found[0][:20]!r} has no end")
        if found[0] == "%llguidance":
            options, at = _read_json(grammar, at, "%llguidance must be followed by a JSON object")
            if not isinstance(options, dict) or options.keys() - _LARK_OPTIONS:
                wanted = ", ".join(sorted(_LARK_OPTIONS))
                raise GrammarError(f"options of %llguidance are not supported, but {wanted}; {{}} has none")
            made.append(" " + json.dumps(options))
        if found[0] == "%json":
            schema, at = _read_json(grammar, at, "%json must be followed by a JSON schema")
            options = {"x-guidance": {"whitespace_pattern": WHITESPACE} | OPTIONS}
            try:
                made.append(" " + json.dumps(prepare_schema(schema) | options))
            except RecursionError:
                raise GrammarError("a schema behind %json is nested too deeply") from None
    return "".join([*made, grammar[at:]])


_LARK_OPTIONS = frozenset({"allow_initial_skip"})  # of a grammar's header: whether what is ignored may come first


def _read_json(text: str, at: int, why: str) -> tuple[Any, int]:
    """Return the JSON value after whitespace, and where it ends. Raises GrammarError."""
    start = re.compile(r"\s*").match(text, at)
    assert start is not None
    try:
        return json.JSONDecoder().raw_decode(text, start.end())
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{why}: {error}") from None


# Strings, comments and regular expressions, whole or without an end: to try each quote of the rest as a beginning takes quadratic time.
_LARK_WORDS = re.compile(
    r'"(?:\\.|[^"\\])*+(?P<quote>")?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])++(?P<slash>/)?|%json\b|%llguidance\b', re.DOTALL
)


def _find_subschemas(node: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key in _MAPS:
        if isinstance(each := node.get(key), dict):
            yield from ((f"{path}/{key}/{name}", value) for name, value in each.items())
    for key in _LISTS:
        if isinstance(each := node.get(key), list):
            yield from ((f"{path}/{key}/{i}", value) for i, value in enumerate(each))
    yield from ((f"{path}/{key}", node[key]) for key in _ONES if key in node)


def _resolve_reference(root: Any, ref: str) -> Any:
    """Return what a reference within the document names; None if it names nothing, which llguidance reports."""
    node = root
    for part in ref[2:].split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict):
            node = node.get(name)
        else:
            return None
    return node


def _prepare_node(node: dict[str, Any], path: str) -> None:
    """Rewrite one schema in place, without those within."""

    def refuse(keyword: str, why: str) -> NoReturn:
        raise GrammarError(f"the JSON schema's keyword {keyword!r} at '#{path}' is not supported: {why}")

    for key in _ANNOTATIONS:
        node.pop(key, None)
    if "format" in node and node["format"] not in FORMATS:
        del node["format"]
    if isinstance(pattern := node.get("pattern"), str):
        node["pattern"] = _DECIMAL.get(pattern, pattern)
        if _LOOKS_AROUND.search(node["pattern"]):
            if "format" not in node:
                refuse("pattern", "it looks ahead or behind")
            del node["pattern"]  # as zod writes them beside a format, which says the same
    _rewrite_older_drafts(node)
    for key in ("unevaluatedProperties", "unevaluatedItems"):
        if key in node:
            _close_schema(node, key, refuse)
    if "propertyNames" in node:
        _name_properties(node, node.pop("propertyNames"), refuse)
    if "not" in node:
        denied = node.pop("not")
        if denied in ({}, True):
            node.clear()
            node.update(copy.deepcopy(_NOTHING))
        elif denied is not False:
            refuse("not", "a grammar can only say what may be written")
    if "contains" not in node or (node.get("minContains") == 0 and "maxContains" not in node):
        for key in ("contains", "minContains", "maxContains"):
            node.pop(key, None)
    if "contains" in node:
        refuse("contains", "a grammar cannot count which items fit")
    condition = node.pop("if", None)
    branches = [branch for key in ("then", "else") if (branch := node.pop(key, None)) not in (None, True, {})]
    if condition is not None and branches:
        refuse("if", "a grammar cannot look back at what was written")
    required = set(map(str, node["required"])) if isinstance(node.get("required"), list) else set[str]()
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        wanted = node.pop(key, None)
        if isinstance(wanted, dict) and not all(isinstance(names, list) and set(map(str, names)) <= required for names in wanted.values()):
            refuse(key, "a grammar cannot look back at which properties were written")
    for key in ("$dynamicRef", "$recursiveRef"):
        if key in node:
            refuse(key, "use '$ref'")


def _rewrite_older_drafts(node: dict[str, Any]) -> None:
    """Rewrite keywords of older drafts in place as the draft of 2020 has them."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and bound in node:
            node[exclusive] = node.pop(bound)
    if isinstance(node.get("items"), list):
        rest = node.pop("additionalItems", True)
        node["prefixItems"] = node.pop("items")
        node["items"] = rest


def _close_schema(node: dict[str, Any], key: str, refuse: Any) -> None:
    """Rewrite `unevaluatedProperties` as `additionalProperties` if no other schema applies to the same object; the same for items."""
    left, plain = node.pop(key), "additionalProperties" if key == "unevaluatedProperties" else "items"
    if left in (True, {}) or plain in node:
        return
    if any(each in node for each in (*_APPLICATORS, "if", "dependentSchemas")):
        refuse(key, f"beside {', '.join(each for each in (*_APPLICATORS, 'if', 'dependentSchemas') if each in node)}; use {plain!r}")
    node[plain] = left


def _name_properties(node: dict[str, Any], names: Any, refuse: Any) -> None:
    """Rewrite `propertyNames` as `patternProperties`."""
    if names in (True, {}) or (
        isinstance(names, dict) and not names.keys() - {"type", *_ANNOTATIONS} and names.get("type", "string") == "string"
    ):
        return
    if not isinstance(names, dict) or "properties" in node or "patternProperties" in node:
        refuse("propertyNames", "beside 'properties' or 'patternProperties'")
    left = names.keys() - {"type", "format", *_ANNOTATIONS}
    if left == {"pattern"} and isinstance(names["pattern"], str):
        pattern = names["pattern"]
    elif left in ({"enum"}, {"const"}):
        words = names["enum"] if "enum" in names else [names["const"]]
        pattern = f"^({'|'.join(re.escape(word) for word in words if isinstance(word, str))})$"
    elif left and left <= {"minLength", "maxLength"}:
        pattern = f"^[^]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$".replace("[^]", r"[\s\S]")
    else:
        refuse("propertyNames", "with other keywords than 'pattern', 'enum', 'const', 'minLength' and 'maxLength'")
    node["patternProperties"] = {pattern: node.pop("additionalProperties", True)}
    node["additionalProperties"] = False

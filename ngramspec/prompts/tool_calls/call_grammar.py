"""The grammar that holds a text to calls of tools in a model's form, each by its schema.

A `CallFormat` and tools enter, a `Grammar` leaves. Knows neither templates nor requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ngramspec.grammar.constraint import Grammar
from ngramspec.grammar.json_schema import OPTIONS, WHITESPACE, prepare_schema
from ngramspec.prompts.tool_calls.call_formats import PLACEHOLDERS, CallFormat, Pairs, Tool
from ngramspec.prompts.tool_calls.call_values import collect_types

# JSON as templates print it: a call that is read back is the text that was written, and everything except values is forced.
_IN_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "} | OPTIONS


def make_call_grammar(
    form: CallFormat,
    tools: Sequence[Tool],
    added: Mapping[str, int],
    *,
    several: bool,
    free: bool = False,
    otherwise: Grammar | None = None,
) -> Grammar:
    """Return the grammar that holds a text to calls of these tools, each by its schema. Raises GrammarError if it is too large.

    `added`: tokens of the vocabulary that are written as one, with their ids. `free`: any text may stand before the calls, and in their
    place; then only strict tools are held to their schemas, in the template's form and in JSON anywhere in the text, from the beginning of
    a call on. `otherwise`: JSON of that form may stand in their place.
    """
    assert not (free and otherwise)
    writer = _TermWriter(added)
    calls = "call"
    if several and form.between is not None:
        calls += f" ({writer.write(form.between)} call)*"
    calls += f" {writer.write(form.last)}"
    rules = [f"calls: {writer.write(form.first)} {calls}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        schema = prepare_schema({"type": "object"} | (tool.parameters if tool.strict or not free else {}))
        rules += [f"call_{i}: {writer.write(tool.name + form.middle)} arguments_{i}"]
        if form.pairs is None:
            rules += [f"arguments_{i}: {_write_json(schema)}"]
        else:
            rules += _PairRules(form.pairs, writer, f"arguments_{i}", schema).write()
    if free:
        rules += _make_free_rules(form, added, writer, calls, [tool for tool in tools if tool.strict], several)
    elif otherwise is not None:
        schema = json.loads(otherwise.text or '{"type": "object"}')
        rules += ["start: calls | otherwise", f"otherwise: %json {_to_json(_allow_whitespace(schema))}"]
    else:
        rules += ["start: calls"]
    return Grammar.lark("\n".join(rules))


def _make_free_rules(
    form: CallFormat, added: Mapping[str, int], writer: _TermWriter, calls: str, strict: Sequence[Tool], several: bool
) -> list[str]:
    """Return the rules of text in which a call is held once it begins.

    In the template's form a call ends the text; calls of strict tools in JSON may stand anywhere.
    """
    trigger = form.trigger
    begins = [_JSON_CALL.format(name=_escape(tool.name)) for tool in strict]
    rules = []
    for i, (tool, begin) in enumerate(zip(strict, begins, strict=True)):
        schema = _to_json(_allow_whitespace({"type": "object"} | tool.parameters))
        rules += [f'json_{i}: begin_{i} BLANKS? json_arguments_{i} BLANKS? "}}"', f"begin_{i}[lazy]: /(?s:.*){begin}/"]
        rules += [f"json_arguments_{i}: %json {schema}"]
    if strict:
        rules += [r"BLANKS: /[ \n\t]{1,40}/", "json: " + " | ".join(f"json_{i}" for i in range(len(strict)))]
    none = "|".join([*begins, *([_escape(trigger)] if trigger else [])])
    rules += [rf"TEXT: /(?s:.+)/ & ~/(?s:.*({none}).*)/" if none else "TEXT: /(?s:.+)/"]
    others = sorted(number for token, number in added.items() if token not in form.first and token not in form.special)[:64]
    parts = [f"TEXT? <[{','.join(map(str, others))}]>"] if others else []
    ends = ["TEXT?"]
    if strict:
        (parts if several else ends).append("json")
    if trigger:
        rest = f"{writer.write(form.first.partition(trigger)[2])} {calls}"  # blanks before a call are the text's
        if trigger in added:
            ends.append(f"TEXT? <[{added[trigger]}]> {rest}")
        else:
            ends.append(f"lead {rest}")
            rules += [f"lead[suffix={json.dumps(trigger)}]: /(?s:.*)/"]
    before = f"({' | '.join(parts)})* " if parts else ""
    return [f"start: {before}({' | '.join(ends)})", *rules]


# The beginning of a call of this tool as JSON, up to its arguments.
_JSON_CALL = (
    r'\{{\s*("(type|id)"\s*:\s*"[^"]*"\s*,\s*)*"name"\s*:\s*"{name}"\s*,\s*("(type|id)"\s*:\s*"[^"]*"\s*,\s*)*"(arguments|parameters)"\s*:'
)


class _PairRules:
    """Writes the rules of one tool's arguments as keys and values, in the order in which its schema names them."""

    def __init__(self, pairs: Pairs, writer: _TermWriter, rule: str, schema: dict[str, Any]) -> None:
        """Start the rules of a schema. `rule`: the name of the rule of all arguments."""
        self._pairs, self._writer, self._rule, self._schema = pairs, writer, rule, schema
        properties, self._required = schema.get("properties"), schema.get("required", ())
        self._properties: list[tuple[str, Any]] = list(properties.items()) if isinstance(properties, dict) else []

    def write(self) -> Iterator[str]:
        rule, pairs, write = self._rule, self._pairs, self._writer.write
        if not self._properties:
            yield f"{rule}: {'' if self._schema.get('additionalProperties') is False else f'any_{rule}?'}"
            yield f"any_{rule}: {write(pairs.begin)} pair_{rule} ({write(pairs.between)} pair_{rule})*"
            yield from self._write_pair(f"pair_{rule}", r"/[A-Za-z_][\w-]{0,63}/", {})
            return
        for n, (key, schema) in enumerate(self._properties):
            yield from self._write_pair(f"{rule}_{n}", _to_json(key), schema)
        last = len(self._properties)
        yield f"{rule}: first_{rule}_0"
        yield f'first_{rule}_{last}: ""'
        yield f'next_{rule}_{last}: ""'
        for n, (key, _) in enumerate(self._properties):
            for place, before in (("first", write(pairs.begin)), ("next", write(pairs.between))):
                without = "" if key in self._required else f" | {place}_{rule}_{n + 1}"
                yield f"{place}_{rule}_{n}: {before} {rule}_{n} next_{rule}_{n + 1}{without}"

    def _write_pair(self, rule: str, key: str, schema: Any) -> Iterator[str]:
        """Yield the rules of a pair. `key`: as a term."""
        pairs, write = self._pairs, self._writer.write
        types = collect_types(schema, self._schema)
        value = f"{write(pairs.to_value)} {rule}_json {write(pairs.value_end)}"
        if pairs.quoted or (types and "string" not in types):
            yield f"{rule}: {key} {value}"
        elif choices := _get_choices(schema):
            yield f"{rule}: {key} ({' | '.join(write(pairs.to_text + choice + pairs.text_end) for choice in choices)})"
            return
        else:
            either = "" if types or pairs.to_text == pairs.to_value else f" | {value}"
            yield f"{rule}: {key} ({write(pairs.to_text)} {rule}_text{either})"
            yield from self._writer.write_text_until(f"{rule}_text", _get_length(schema), pairs.text_end)
            if not either:
                return
        root: dict[str, Any] = {word: self._schema[word] for word in ("$defs", "definitions") if word in self._schema}
        yield f"{rule}_json: {_write_json(root | schema if isinstance(schema, dict) else prepare_schema(schema))}"


def _get_choices(schema: Any) -> list[str]:
    """Return the only texts that a schema of a text allows; none if it names none."""
    given = schema.get("enum", [schema["const"]] if "const" in schema else []) if isinstance(schema, dict) else []
    return [each for each in given if isinstance(each, str)]


def _get_length(schema: Any) -> str:
    """Return how often a pattern may repeat by a schema of a text."""
    least, most = (schema.get(word) if isinstance(schema, dict) else None for word in ("minLength", "maxLength"))
    return "*" if least is None and most is None else f"{{{least or 0},{'' if most is None else most}}}"


class _TermWriter:
    """Writes texts as a grammar's terms."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        words = [*(re.escape(token) for token in sorted(added, key=len, reverse=True)), *PLACEHOLDERS]
        self._cut = re.compile(f"({'|'.join(words)})")

    def write(self, text: str) -> str:
        return " ".join(self._write_piece(piece) for piece in self._cut.split(text) if piece) or '""'

    def write_text_until(self, rule: str, length: str, end: str) -> Iterator[str]:
        """Yield the rules of any text of a length up to its end, and of the end."""
        before, *after = self._cut.split(end, maxsplit=1)
        if not after:
            yield f"{rule}[suffix={_to_json(end)}]: /(?s:.){length}/"
        else:  # a token, which no text has, ends it
            yield f"{rule}: {rule}_end {self.write(''.join(after))}"
            yield f"{rule}_end: /(?s:.){length}{_escape(before)}/"

    def _write_piece(self, piece: str) -> str:
        if piece in PLACEHOLDERS:
            return f"/{PLACEHOLDERS[piece]}/"
        return f"<[{self._added[piece]}]>" if piece in self._added else _to_json(piece)


def _write_json(schema: dict[str, Any]) -> str:
    return f"%json {_to_json(schema | {'x-guidance': _IN_LINE})}"


def _allow_whitespace(schema: Any) -> dict[str, Any]:
    return prepare_schema(schema) | {"x-guidance": {"whitespace_pattern": WHITESPACE} | OPTIONS}


def _escape(text: str) -> str:
    return "".join(char if char.isalnum() or char in "_ " else f"\\u{{{ord(char):x}}}" for char in text)


def _to_json(value: Any) -> str:
    """Return JSON in which the letters that are operators in a grammar are escaped."""
    return json.dumps(value).replace("&", "\\u0026").replace("~", "\\u007e")

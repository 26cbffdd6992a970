"""The form in which a model writes tool calls, as its chat template shows it, and the grammar that holds a text to it.

A template's text of two calls enters, a `CallFormat` leaves; with tools it becomes a `Grammar`. Models are told apart by what their
templates print, never by name. Knows neither templates' language nor HTTP; `call_reader` finds the calls in a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ngramspec.grammar.base import Grammar
from ngramspec.grammar.json_schema import OPTIONS, WHITESPACE, prepare_schema

ID = "\0"  # stands for the id of a call where a template prints it
ID_PATTERN = "[a-zA-Z0-9]{9}"  # Mistral's templates require it; others accept any id
_NAMES, _IDS, _ARGUMENTS = ("probe_alpha", "probe_beta"), ("Pr0beCal1", "Pr0beCal2"), {"probe_key": "probe_value"}
_USER, _RESULT, _PLAIN = "probe_user", "probe_result", "probe_plain"
_ARGUMENTS_AS_JSON = re.compile(r'\{\s*"probe_key"\s*:\s*"probe_value"\s*\}')
_OBJECT = re.compile(r'(\[\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"$')
_TO_ARGUMENTS = re.compile(r'"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_ANY_NAME = r"(?P<name>[\w.:/-]+)"
# JSON as templates print it: a call that is read back is the text that was written, and everything except values is forced.
_IN_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "} | OPTIONS

Render = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool], str]
"""(messages, tools, whether the assistant's answer follows) -> the rendered template. Raises ValueError if the template refuses."""


class Tool(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of an object."""
    strict: bool = False
    """Every call of it must fit the schema."""


@dataclass(frozen=True)
class CallFormat:
    """Calls as text: `first` NAME `middle` ARGUMENTS (`between` NAME `middle` ARGUMENTS)* `last`, with `ID` in place of an id."""

    first: str
    middle: str
    between: str | None
    """None: there is only one call in a text."""
    last: str
    special: tuple[str, ...] = ()
    """Tokens that no text shows."""
    arguments_as_text: bool = False
    """The template takes arguments as text and not as an object."""

    @property
    def _object(self) -> re.Match[str] | None:
        """The beginning of a call that is a JSON object, maybe in a list; None if it is not."""
        return _OBJECT.search(self.first) if _TO_ARGUMENTS.fullmatch(self.middle) else None

    @property
    def trigger(self) -> str:
        """The text or token that begins a call; empty if it begins as JSON."""
        if found := self._object:
            return self.first[: found.start()].strip()
        tokens = [token for token in self.special if token in self.first and token in (self.between or self.first)]
        return min(tokens, key=self.first.find, default=self.first.strip())

    @property
    def listed(self) -> bool:
        """Whether calls are items of a JSON list."""
        return bool((found := self._object) and found[1])

    @property
    def head(self) -> re.Pattern[str]:
        """Matches what stands between the trigger and a call's arguments."""
        if self._object:
            pairs = r'(?:"(?:type|id)"\s*:\s*"[^"]*"\s*,\s*)*'
            names = r'"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
            return re.compile(r"\s*(?:\[\s*)?\{\s*" + pairs + names)
        before = self.first[self.first.find(self.trigger) + len(self.trigger) :]
        return re.compile(rf"{self._make_loose_pattern(before)}{_ANY_NAME}{self._make_loose_pattern(self.middle)}(?=\{{)")

    @property
    def tail(self) -> re.Pattern[str]:
        """Matches what stands between the arguments and a call's end."""
        return re.compile(r'\s*(?:,\s*"id"\s*:\s*"[^"]*"\s*)?\}' if self._object else "")

    @property
    def end(self) -> str:
        """The text after the last call."""
        shown = self._remove_special(self.last)
        if self._object:
            shown = shown.partition("}")[2].strip().removeprefix("]")
        return shown.replace(ID, "").strip()

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of these calls (name, arguments as JSON) in a format without ids."""
        assert self.between is not None
        return self.first + self.between.join(name + self.middle + arguments for name, arguments in calls) + self.last

    def _remove_special(self, text: str) -> str:
        for token in self.special:
            text = text.replace(token, "")
        return text

    def _make_loose_pattern(self, text: str) -> str:
        """Return a pattern that finds a text, whatever its blanks, with or without the tokens that no text shows."""
        tokens = "|".join(map(re.escape, self.special))
        words = [word for part in (re.split(f"({tokens})", text) if tokens else [text]) for word in part.split()]
        escaped = [re.escape(word).replace(re.escape(ID), ID_PATTERN) for word in words]
        return r"\s*+".join(
            ["", *(f"(?:{each})?+" if word in self.special else each for word, each in zip(words, escaped, strict=True)), ""]
        )


# The format for models whose template knows no tools.
HERMES = CallFormat(
    first='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    last="}\n</tool_call>",
)


def detect_call_format(render: Render, special: Sequence[str]) -> CallFormat | None:
    """Return the format of a template; None if it knows no tools, or writes them in no form that is known here.

    The template renders two calls: what it prints around their names and arguments is the format. `special`: tokens that no text shows.
    """
    for as_text in (False, True):
        arguments = json.dumps(_ARGUMENTS) if as_text else _ARGUMENTS
        try:
            found = _probe_template(render, arguments)
        except ValueError:
            continue
        if found is not None:
            made = CallFormat(*found, tuple(token for token in special if any(token in (part or "") for part in found)), as_text)
            return made if made._object or made.trigger else None
    return None


def _probe_template(render: Render, arguments: Any) -> tuple[str, str, str | None, str] | None:
    """Return `first`, `middle`, `between` and `last` of a CallFormat. Raises ValueError if the template refuses."""
    tools = [_make_probe_tool(name) for name in _NAMES]
    user = {"role": "user", "content": _USER}
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, name in zip(_IDS, _NAMES, strict=True)
    ]

    def render_answer(message: dict[str, Any]) -> str:
        return render([user, {"role": "assistant", "content": ""} | message], tools, False)

    before = render([user], tools, True)
    results = [{"role": "tool", "content": _RESULT, "tool_call_id": _IDS[0], "name": _NAMES[0]}]
    answered = render([user, {"role": "assistant", "content": "", "tool_calls": calls[:1]}, *results], tools, True)
    if _NAMES[0] not in before or _RESULT not in answered:
        return None
    plain = render_answer({"content": _PLAIN})
    one = _split_calls(render_answer({"tool_calls": calls[:1]}), before, plain, 1)
    if one is None:
        return None
    try:
        two = _split_calls(render_answer({"tool_calls": calls}), before, plain, 2)
    except ValueError:
        two = None
    if two is None or [two[0], two[1], two[3]] != [one[0], one[1], one[2]] or two[4] != two[1]:
        return one[0], one[1], None, one[2]
    return two[0], two[1], two[2], two[3]


def _split_calls(text: str, before: str, plain: str, n_calls: int) -> list[str] | None:
    """Return what stands around the calls' names and arguments: first, middle, (between,) last, and the second call's middle."""
    begin = next((i for i, (one, other) in enumerate(zip(text, before, strict=False)) if one != other), min(len(text), len(before)))
    rest, answer = text[begin:], plain[begin:]
    if plain[:begin] == text[:begin] and _PLAIN in answer:  # what every answer begins and ends with
        opening, _, closing = answer.partition(_PLAIN)
        rest = rest.removeprefix(opening)
        rest = rest.removesuffix(closing) if rest.endswith(closing) else rest.rstrip().removesuffix(closing.rstrip())
    for number in _IDS:
        rest = rest.replace(number, ID)
    parts, middles = [], []
    for name in _NAMES[:n_calls]:
        between, found, rest = rest.partition(name)
        arguments = _ARGUMENTS_AS_JSON.search(rest)
        if not found or arguments is None:
            return None
        parts.append(between)
        middles.append(rest[: arguments.start()])
        rest = rest[arguments.end() :]
    if any(name in part for name in _NAMES for part in (*parts, *middles, rest)):
        return None
    return [parts[0], middles[0], *parts[1:], rest, *middles[1:]]


def _make_probe_tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"probe_key": {"type": "string", "description": "a text"}}, "required": ["probe_key"]}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}


# ------------------------------------------------------------------ the grammar


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
        schema = prepare_schema({"type": "object"} | (tool.parameters if tool.strict or not free else {})) | {"x-guidance": _IN_LINE}
        rules += [f"call_{i}: {writer.write(tool.name + form.middle)} arguments_{i}", f"arguments_{i}: %json {_to_json(schema)}"]
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


class _TermWriter:
    """Writes texts as a grammar's terms."""

    def __init__(self, added: Mapping[str, int]) -> None:
        self._added = added
        words = "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True))
        self._cut = re.compile(f"({words}|{ID})" if words else f"({ID})")

    def write(self, text: str) -> str:
        return " ".join(self._write_piece(piece) for piece in self._cut.split(text) if piece)

    def _write_piece(self, piece: str) -> str:
        if piece == ID:
            return f"/{ID_PATTERN}/"
        return f"<[{self._added[piece]}]>" if piece in self._added else _to_json(piece)


def _allow_whitespace(schema: Any) -> dict[str, Any]:
    return prepare_schema(schema) | {"x-guidance": {"whitespace_pattern": WHITESPACE} | OPTIONS}


def _escape(text: str) -> str:
    return "".join(char if char.isalnum() or char in "_ " else f"\\u{{{ord(char):x}}}" for char in text)


def _to_json(value: Any) -> str:
    """Return JSON in which the letters that are operators in a grammar are escaped."""
    return json.dumps(value).replace("&", "\\u0026").replace("~", "\\u007e")

"""Finds the form in which a chat template prints tool calls, by letting it print some.

A function that renders messages enters, a `CallFormat` leaves. Models are told apart by what their templates print, never by name. Knows
neither templates' language nor requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ngramspec.prompts.tool_calls.call_formats import HERMES, ID, INDEX, NAMED_ID, WRITTEN_IN_TEXT, CallFormat, Pairs

# (messages, tools, whether the assistant's answer follows) -> the rendered template. Raises ValueError if the template refuses.
Render = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool], str]

_NAMES, _IDS = ("probe_alpha", "probe_beta"), ("Pr0beCal1", "Pr0beCal2")
_KEYS, _TEXT, _NUMBER = ("probe_key", "probe_other"), "probe_value", 70707
_ARGUMENTS = dict(zip(_KEYS, (_TEXT, _NUMBER), strict=True))
_SWAPPED = dict(zip(_KEYS, (_NUMBER, _TEXT), strict=True))
_USER, _RESULT, _PLAIN = "probe_user", "probe_result", "probe_plain"
_ARGUMENTS_AS_JSON = re.compile(rf'\{{\s*"{_KEYS[0]}"\s*:\s*"{_TEXT}"\s*,\s*"{_KEYS[1]}"\s*:\s*{_NUMBER}\s*\}}')
_OPEN_MARKUP = re.compile(r"[<\[][^<>\[\]\s]*$")
_LAST_MARKUP = re.compile(r"<[^<>\s]*>$")
_DIGITS = re.compile("[0-9]")


def detect_call_format(render: Render, special: Sequence[str]) -> CallFormat | None:
    """Return the format of a template; None if it does not show tools, calls and their results.

    What the template prints around the names and arguments of two calls is the format. If that is no form that can be described, the
    format is Hermes': a model can be held to it, and calls in other forms are found as well. `special`: tokens that no text shows.
    """
    unknown: CallFormat | None = None
    shows_tools = False
    for as_text in (False, True):
        try:
            probe = _Probe(render, special, as_text=as_text)
            if not probe.shows_tools():
                continue
            shows_tools = True
            if not (probe.shows_calls() or probe.shows_named_ids()):
                continue
            found = probe.find_format()
        except ValueError:
            continue
        if found is not None and (found.is_object or found.trigger or found.pairs):
            return found
        unknown = unknown or replace(HERMES, arguments_as_text=as_text)
    written = (form for form in WRITTEN_IN_TEXT if shows_tools and form.trigger in special)
    return unknown or next(written, None)


class _Parts(NamedTuple):
    """What stands around the names and arguments of one call, or of two."""

    first: str
    middles: list[str]
    between: str | None
    last: str


class _Probe:
    """The texts of one template."""

    def __init__(self, render: Render, special: Sequence[str], *, as_text: bool) -> None:
        """Render what every answer has. `as_text`: hand over arguments as text. Raises ValueError if the template refuses."""
        self._render, self._special, self._as_text, self._ids, self._names_ids = render, special, as_text, _IDS, False
        self._tools = [_make_probe_tool(name) for name in _NAMES]
        user = {"role": "user", "content": _USER}
        self._before, asked = (render([user], self._tools, follows) for follows in (True, False))
        self._generation = self._before.removeprefix(asked).strip() if self._before.startswith(asked) else ""
        found = _LAST_MARKUP.search(self._before.rstrip())
        self._generation = self._generation or (found[0] if found else "")
        self._plain = self._render_answer({"content": _PLAIN})

    def shows_tools(self) -> bool:
        """Return whether the template prints tools and the results of calls. Raises ValueError if it refuses."""
        if _NAMES[0] not in self._before:
            return False
        result = {"role": "tool", "content": _RESULT, "tool_call_id": _IDS[0], "name": _NAMES[0]}
        user = {"role": "user", "content": _USER}
        called = {"role": "assistant", "content": "", "tool_calls": self._make_calls(_ARGUMENTS)}
        return _RESULT in self._render([user, called, result], self._tools, True)

    def shows_calls(self) -> bool:
        """Return whether the template prints the name and the arguments of a call. Raises ValueError if it refuses."""
        shown = self._render_calls(_ARGUMENTS)
        return _NAMES[0] in shown.rpartition(_USER)[2] and _TEXT in shown

    def shows_named_ids(self) -> bool:
        """Return whether the template prints calls whose ids name the tools; if so, they do from now on. Raises ValueError."""
        one, two = (NAMED_ID.format(name=name, index=i) for i, name in enumerate(_NAMES))
        self._ids, self._names_ids = (one, two), True
        return self.shows_calls()

    def find_format(self) -> CallFormat | None:
        """Return the format; None if it cannot be described. Raises ValueError if the template refuses."""
        one = self._render_calls(_ARGUMENTS)
        pairs, arguments = None, _ARGUMENTS_AS_JSON
        if not arguments.search(one):
            if (written := self._find_pairs(one)) is None:
                return None
            pairs, arguments = written
        parts = self._split_calls(one, arguments, 1)
        if parts is None:
            return None
        try:
            two = self._split_calls(self._render_calls(_ARGUMENTS, _ARGUMENTS), arguments, 2)
        except ValueError:
            two = None
        if two is not None:
            parts = _join_parts(parts, two)
        last = self._cut_end_of_turn(parts.last)
        found = CallFormat(parts.first, parts.middles[0], parts.between, last, (), self._as_text, pairs, self._names_ids)
        return replace(found, special=_find_tokens(found, self._special))

    def _find_pairs(self, one: str) -> tuple[Pairs, re.Pattern[str]] | None:
        """Return how arguments are written as keys and values, and the pattern of `_ARGUMENTS` so written; None if they are not."""
        shown, swapped, empty = (
            self._cut_opening(text).partition(_NAMES[0])[2] for text in (one, self._render_calls(_SWAPPED), self._render_calls({}))
        )
        number = str(_NUMBER)
        cut, other = (_split_at(text, (_KEYS[0], a, _KEYS[1], b)) for text, a, b in ((shown, _TEXT, number), (swapped, number, _TEXT)))
        if cut is None or other is None or cut[0] != other[0] or cut[1] != other[3] or cut[3] != other[1]:
            return None
        begin, to_text, behind_text, to_value, value_end = cut
        _, _, behind_value, _, text_end = other
        middle = _step_back(_find_common_start(begin, empty))
        after = empty[len(middle) :]
        if not after or not value_end.endswith(after) or not text_end.endswith(after):
            return None
        begin, value_end, text_end = begin[len(middle) :], value_end.removesuffix(after), text_end.removesuffix(after)
        if not behind_text.startswith(text_end) or behind_value != value_end + (between := behind_text.removeprefix(text_end)):
            return None
        written = "".join((begin, _KEYS[0], to_text, _TEXT, behind_text, _KEYS[1], to_value, number, value_end))
        quote = to_text[-1:] if to_text[-1:] in "\"'" and text_end[:1] == to_text[-1:] else ""
        if quoted := bool(quote) or not text_end:
            to_text, text_end = to_text.removesuffix(quote), text_end.removeprefix(quote)
            if (to_text, text_end) != (to_value, value_end) or not (between and to_text) or begin[-1:] in ("'", '"'):
                return None
        return Pairs(begin, between, to_text, text_end, to_value, value_end, quoted), re.compile(re.escape(written))

    def _split_calls(self, text: str, arguments: re.Pattern[str], n_calls: int) -> _Parts | None:
        """Return what stands around the calls; None if they are not all there."""
        rest = self._cut_opening(text)
        for number in _IDS:  # not those that name tools
            rest = rest.replace(number, ID)
        parts, middles = [], []
        for name in _NAMES[:n_calls]:
            before, found, rest = rest.partition(name)
            given = arguments.search(rest)
            if not found or given is None:
                return None
            parts.append(before)
            middles.append(rest[: given.start()])
            rest = rest[given.end() :]
        if any(name in part for name in _NAMES for part in (*parts, *middles, rest)):
            return None
        return _Parts(parts[0], middles, parts[1] if n_calls == 2 else None, rest)

    def _cut_opening(self, text: str) -> str:
        """Return the text of an answer without what stands before every answer."""
        rest, before, plain = (each.rpartition(_USER)[2] for each in (text, self._before, self._plain))
        opening = plain.partition(_PLAIN)[0] if _PLAIN in plain else ""
        same = max((_step_back(_find_common_start(rest, each)) for each in (before, opening)), key=len)
        rest = rest[len(same) :]
        shown, found, after = rest.partition(self._generation) if self._generation else ("", "", "")
        return after if found and _NAMES[0] not in shown else rest

    def _cut_end_of_turn(self, last: str) -> str:
        """Return the text after the calls without what ends every answer."""
        closing = self._plain.rpartition(_PLAIN)[2]
        if closing.strip() and last.endswith(closing):
            return last.removesuffix(closing)
        if closing.strip() and last.rstrip().endswith(closing.strip()):
            return last.rstrip().removesuffix(closing.strip())
        ends = [last.find(token) for token in self._special if token in closing and last.count(token) == 1]
        return last[: min(ends)] if ends else last

    def _render_calls(self, *arguments: dict[str, Any]) -> str:
        return self._render_answer({"tool_calls": self._make_calls(*arguments)})

    def _render_answer(self, message: dict[str, Any]) -> str:
        user = {"role": "user", "content": _USER}
        return self._render([user, {"role": "assistant", "content": ""} | message], self._tools, False)

    def _make_calls(self, *arguments: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"id": number, "type": "function", "function": {"name": name, "arguments": json.dumps(given) if self._as_text else given}}
            for number, name, given in zip(self._ids, _NAMES, arguments, strict=False)
        ]


def _join_parts(one: _Parts, two: _Parts) -> _Parts:
    """Return the parts of two calls, with `INDEX` for a call's number; those of one call if two are written otherwise."""
    assert two.between is not None
    middle, other = two.middles
    if middle != other and [_DIGITS.sub(INDEX, each) for each in (middle, other)].count(_DIGITS.sub(INDEX, middle)) == 2:
        middle = other = _DIGITS.sub(INDEX, middle)
        one = one._replace(middles=[_DIGITS.sub(INDEX, one.middles[0])])
    first, between, same = _mark_index(two.first, two.between)
    single = _mark_index(one.first, two.between)[0]
    if (single, one.middles[0], one.last) != (first, middle, two.last) or middle != other:
        return one
    return _Parts(first, [middle], between, two.last) if same else two._replace(middles=[middle])


def _mark_index(first: str, between: str) -> tuple[str, str, bool]:
    """Return both texts with `INDEX` for the digits at which their common end differs, and whether there are any."""
    one, other = (_DIGITS.sub(INDEX, text)[::-1] for text in (first, between))
    n = len(_find_common_start(one, other))
    if not n or first[-n:] == between[-n:]:
        return first, between, False
    first, between = (text[:-n] + _DIGITS.sub(INDEX, text[-n:]) for text in (first, between))
    return first, between, True


def _split_at(text: str, words: Sequence[str]) -> list[str] | None:
    """Return the pieces of a text between words in this order, each of which is there once; None if one is not."""
    if any(text.count(word) != 1 for word in words):
        return None
    pieces = []
    for word in words:
        piece, found, text = text.partition(word)
        if not found:
            return None
        pieces.append(piece)
    return [*pieces, text]


def _find_tokens(form: CallFormat, special: Sequence[str]) -> tuple[str, ...]:
    """Return those of the special tokens that the format has."""
    around = (form.first, form.middle, form.between or "", form.last, *(form.pairs or ())[:6])
    return tuple(token for token in special if any(token in each for each in around))


def _find_common_start(one: str, other: str) -> str:
    return one[: next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))]


def _step_back(text: str) -> str:
    """Return the text without a word of markup at its end that is not closed."""
    return _OPEN_MARKUP.sub("", text)


def _make_probe_tool(name: str) -> dict[str, Any]:
    properties = {_KEYS[0]: {"type": "string", "description": "a text"}, _KEYS[1]: {"type": "integer", "description": "a number"}}
    parameters = {"type": "object", "properties": properties, "required": [_KEYS[0]]}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}

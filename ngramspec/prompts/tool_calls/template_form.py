"""The form of calls that a chat template shows, as a parser like those of `call_forms`.

A `CallFormat` enters, a `CallForm` leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import regex

from ngramspec.prompts.tool_calls.call_formats import CallFormat, Pairs
from ngramspec.prompts.tool_calls.call_forms import CallForm, end_call
from ngramspec.prompts.tool_calls.call_scanner import Parse, Scanner, ToolCallArguments, ToolCallStart
from ngramspec.prompts.tool_calls.call_values import emit_calls, parse_json, to_typed_value


def make_template_form(shown: CallFormat, *, held: bool) -> CallForm | None:
    """Return the form that a chat template shows; None if it is in the table: bare JSON that no grammar holds, or Python."""
    trigger = shown.trigger
    if (not trigger and not held) or (shown.pairs is not None and not shown.pairs.is_tagged):
        return None
    begin = regex.compile("|".join(map(regex.escape, shown.begins)) or r"\{(?=\s{0,99}\")")
    heads = [regex.compile(head.pattern) for head in (shown.head, shown.next_head) if head is not None]
    read_arguments = _make_json_parser(shown) if shown.pairs is None else _make_pairs_parser(shown, shown.pairs)
    ends = [regex.compile(r"\s*" + regex.escape(word)) for word in shown.end.removeprefix(shown.close.strip()).split()]

    def read(scan: Scanner) -> Parse:
        if trigger and (yield from scan.match(begin)) is None:
            return False
        found = False
        while True:
            start = scan.at
            matched = yield from scan.match(heads[-1 if found else 0])
            if matched is None or matched["name"] not in scan.tools.schemas or not (yield from read_arguments(scan, matched["name"])):
                scan.at = start
                break
            found = True
            listed = (yield from scan.match(_LIST_GOES_ON)) if shown.listed else None
            if (shown.listed and (listed is None or listed[0].endswith("]"))) or (not shown.listed and len(heads) == 1):
                break
        for end in ends if found else ():
            yield from scan.match(end)
        return found

    return CallForm("template", begin, read)


_LIST_GOES_ON = regex.compile(r"\s*[,\]]")


def _make_pairs_parser(shown: CallFormat, pairs: Pairs) -> Callable[[Scanner, str], Parse]:
    """Return the parser of arguments as keys and values between words of markup, and of what closes them."""
    begin, to_text, to_value, end, close = (
        r"\s*+".join(regex.escape(word) for word in text.split())
        for text in (pairs.begin, pairs.to_text, pairs.to_value, pairs.value_end, shown.close)
    )
    head, to_either = rf"{begin}\s*+(?P<key>[^\s<>\"]{{1,200}}?)", rf"(?:(?P<is_text>{to_text})|{to_value})"
    key, call_end = regex.compile(rf"\s*{head}{to_either}"), regex.compile(rf"\s*{close}")
    # A model may forget to end a value.
    value_end = regex.compile(rf"{end}|(?=\s{{0,99}}+(?:{head}{to_either}|{close}))")
    newlines = ["\n" if shows else "" for shows in (pairs.to_value.endswith("\n"), pairs.value_end.startswith("\n"))]

    def read(scan: Scanner, name: str) -> Parse:
        arguments: dict[str, Any] = {}
        while (found := (yield from scan.match(key))) is not None:
            if (value := (yield from scan.read_until(value_end))) is None:
                return False
            text = value.removeprefix(newlines[0]).removesuffix(newlines[1])
            if text.startswith("<![CDATA[") and text.endswith("]]>"):
                text = text[9:-3]
            if to_text == to_value:
                arguments[found["key"]] = to_typed_value(text, name, found["key"], scan.tools)
            else:
                arguments[found["key"]] = text if found["is_text"] is not None else parse_json(text)
        return (yield from end_call(scan, name, arguments, call_end))

    return read


def _make_json_parser(shown: CallFormat) -> Callable[[Scanner, str], Parse]:
    """Return the parser of arguments in JSON and of what closes them."""
    tail = regex.compile(shown.tail.pattern)

    def read(scan: Scanner, name: str) -> Parse:
        return (yield from _read_arguments(scan, name, tail))

    return read


def _read_arguments(scan: Scanner, name: str, tail: regex.Pattern[str]) -> Parse:
    """Read a call's arguments and what closes it; pass them on piece by piece if a grammar holds them."""
    start, reading, whole = scan.at, scan.read_json(), False
    if scan.streams:
        yield ToolCallStart(name)
    while True:
        try:
            piece = next(reading)
        except StopIteration as stop:
            whole = stop.value
            break
        if piece is None:
            yield None
        elif scan.streams:
            yield ToolCallArguments(piece)
    arguments = scan.text[start : scan.at]
    if scan.streams:
        scan.broken = not whole
        yield from scan.match(tail)
        return True
    value = parse_json(arguments) if whole else None
    if not isinstance(value, dict) or (name in scan.tools.strict and not scan.tools.match_schema(name, value)):
        return False
    if (yield from scan.match(tail)) is None:
        return False
    yield from emit_calls([(name, arguments)])
    return True

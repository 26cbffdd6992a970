"""The form in which a model writes tool calls: what stands around names, arguments, keys and values.

A `CallFormat` is data: `call_probe` finds it in a chat template, `call_grammar` holds a text to it, `call_forms` reads texts in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

ID, INDEX = "\0", "\1"  # stand for the id of a call, and for its number among the calls, where a template prints them
NAMED_ID = "functions.{name}:{index}"  # of Kimi K2, with the call's number in the conversation
PLACEHOLDERS = {ID: "[a-zA-Z0-9]{9}", INDEX: "[0-9]{1,4}"}  # ids as Mistral's templates require them; others accept any
MAX_COMMON = 3  # characters of the longest beginning of a call that is not distinct enough to look for
_OBJECT = re.compile(r'(\[\s*)?\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"]*"\s*,\s*)*"(?:name|tool_name)"\s*:\s*"$')
_TO_ARGUMENTS = re.compile(r'"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_ANY_NAME = r"(?P<name>[\w.:/-]+)"
_FIRST_WORD = re.compile(r"\s*(?:<[^<>\s]*>|[^<\s]+|<)")


class Tool(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: dict[str, Any]
    """JSON schema of an object."""
    strict: bool = False
    """Every call of it must fit the schema."""


class Pairs(NamedTuple):
    """Arguments as keys and values: nothing, or `begin` PAIR (`between` PAIR)*.

    A PAIR is KEY `to_text` TEXT `text_end` or KEY `to_value` JSON `value_end`.
    """

    begin: str
    between: str
    to_text: str
    text_end: str
    to_value: str
    value_end: str
    quoted: bool = False
    """Texts stand in quotes, as JSON and Python have them."""

    @property
    def is_tagged(self) -> bool:
        """Whether values end at words of markup; otherwise they are written in a notation of their own, such as Python's."""
        return not self.quoted and self.text_end == self.value_end and bool(self.value_end.strip())


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
    pairs: Pairs | None = None
    """None: arguments are JSON."""
    ids_name_tools: bool = False
    """The template prints no name of a call but its id, which has to be `NAMED_ID`."""
    in_text: bool = False
    """The template shows tools and results but no calls: earlier ones are written into the assistant's text."""

    @property
    def _object(self) -> re.Match[str] | None:
        """The beginning of a call that is a JSON object, maybe in a list; None if it is not."""
        return _OBJECT.search(self.first) if self.pairs is None and _TO_ARGUMENTS.fullmatch(self.middle) else None

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object."""
        return self._object is not None

    @property
    def trigger(self) -> str:
        """The text or token that begins a call; empty if it begins as JSON."""
        if found := self._object:
            return self.first[: found.start()].strip()
        token = min((token for token in self.special if token in self.first), key=self.first.find, default=None)
        if token is not None:
            return token
        text = self.first.strip().partition("\n")[0]
        return text if "<" in text or len(text) > MAX_COMMON else ""  # an answer's text has a mere bracket, too

    @property
    def begins(self) -> tuple[str, ...]:
        """The texts and tokens that may begin a call: the trigger first, and those after it in `first`, in case a model omits it."""
        trigger = self.trigger
        tokens = [token for token in self.special if token in self.first and token in (self.between or "") and token != trigger]
        return (trigger, *tokens) if trigger else ()

    @property
    def listed(self) -> bool:
        """Whether calls are items of a JSON list."""
        return bool((found := self._object) and found[1])

    @property
    def head(self) -> re.Pattern[str]:
        """Matches what stands between the trigger and a call's arguments."""
        if self._object:
            pairs = r'(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"]*"\s*,\s*)*'
            names = r'"(?:name|tool_name)"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
            return re.compile(r"\s*(?:\[\s*)?\{\s*" + pairs + names)
        return self._make_head(self.first[self.first.find(self.trigger) + len(self.trigger) :])

    @property
    def next_head(self) -> re.Pattern[str] | None:
        """Matches what stands between a call's end and the next one's arguments; None if the next call begins as the first."""
        if self._object or self.between is None:
            return None
        return self._make_head(self.between.removeprefix(self.close))

    def _make_head(self, before: str) -> re.Pattern[str]:
        arguments = r"\{"
        if self.pairs is not None:
            arguments = rf"\s*(?:{'|'.join(re.escape(word) for word in (_get_first_word(self.pairs.begin), self.close.strip()) if word)})"
        return re.compile(rf"{self.make_loose_pattern(before)}{_ANY_NAME}{self.make_loose_pattern(self.middle)}(?={arguments})")

    @property
    def close(self) -> str:
        """The first word after the arguments in calls that are pairs."""
        return "" if self.pairs is None else _get_first_word(self.last)

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
        return shown.replace(ID, "").replace(INDEX, "").strip()

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of these calls (name, arguments as JSON) in a format of JSON or of quoted pairs, without ids."""
        assert self.between is not None
        return self.first + self.between.join(name + self.middle + self._write_arguments(given) for name, given in calls) + self.last

    def _write_arguments(self, arguments: str) -> str:
        arguments = arguments or "{}"
        if self.pairs is None:
            return arguments
        try:
            values = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        if not isinstance(values, dict):
            return arguments
        return self.pairs.between.join(
            key + self.pairs.to_value + (json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value))
            for key, value in values.items()
        )

    def _remove_special(self, text: str) -> str:
        for token in self.special:
            text = text.replace(token, "")
        return text

    def make_loose_pattern(self, text: str) -> str:
        """Return a pattern that finds a text, whatever its blanks, with or without the tokens that no text shows."""
        tokens = "|".join(map(re.escape, self.special))
        words = [word for part in (re.split(f"({tokens})", text) if tokens else [text]) for word in part.split()]
        made = [f"(?:{escape_marks(word)})?+" if word in self.special else escape_marks(word) for word in words]
        return r"\s*+".join(["", *made, ""])


def escape_marks(text: str) -> str:
    """Return a pattern of the text with any id or number in the place of a mark for it."""
    pattern = re.escape(text)
    for mark, each in PLACEHOLDERS.items():
        pattern = pattern.replace(re.escape(mark), each)
    return pattern


def _get_first_word(text: str) -> str:
    return found[0] if (found := _FIRST_WORD.match(text)) else ""


# The format for models whose template knows no tools.
HERMES = CallFormat(
    first='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    last="}\n</tool_call>",
)

# Forms of models whose templates show tools but no calls, by the token that begins a call: LFM 2 and Granite 3.
WRITTEN_IN_TEXT = (
    CallFormat(
        first="<|tool_call_start|>[",
        middle="(",
        between="), ",
        last=")]<|tool_call_end|>",
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
        pairs=Pairs("", ", ", "=", "", "=", "", quoted=True),
        in_text=True,
    ),
    CallFormat(
        first='<|tool_call|>[{"name": "',
        middle='", "arguments": ',
        between='}, {"name": "',
        last="}]",
        special=("<|tool_call|>",),
        in_text=True,
    ),
)

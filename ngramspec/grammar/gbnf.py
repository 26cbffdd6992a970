"""Parses GBNF, llama.cpp's notation for grammars.

The text of a grammar enters, its rules leave as trees of the nodes below (`parse`). What is accepted and what it means follows llama.cpp's
own parser. Raises GrammarError with line, column and what was expected. `gbnf_lark` translates the rules for llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ngramspec.errors import GrammarError

# Repetitions that an item may require: llama.cpp's MAX_REPETITION_THRESHOLD. A greatest number beyond it, which llama.cpp ignores, is held.
MAX_REPETITIONS = 2000
MAX_NESTING = 120  # parentheses within parentheses; llama.cpp has no limit, ours keeps the translation within Python's stack
LAST_CODE_POINT, SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {char: char for char in '\\"[]-'}
_HEX = {"x": 2, "u": 4, "U": 8}
_NAME = re.compile(r"[a-zA-Z0-9_-]+")


@dataclass(frozen=True, eq=False, slots=True)
class Chars:
    """Matches one character out of these ranges of code points, which are sorted and do not touch. No ranges match nothing."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Seq:
    """Matches all items in order. No items match the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Alt:
    """Matches one of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """Matches the item `least` to `most` times (None: any number of times)."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, eq=False, slots=True)
class Ref:
    """Matches another rule."""

    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Token:
    """Matches the token of this id or this text (`<…>` with its brackets), or any other one if `negated`."""

    token: int | str
    negated: bool


Node = Chars | Seq | Alt | Repeat | Ref | Token
EMPTY = Seq(())


def parse(text: str) -> dict[str, Node]:
    """Return the rules by name; of several definitions of a rule the last one counts, as in llama.cpp.

    Raises GrammarError if the text is not GBNF, has no rule `root`, refers to a rule that is not defined, or is left-recursive.
    """
    parser = _Parser(text)
    rules = parser.parse_rules()
    for name, position in parser.references.items():
        if name not in rules:
            raise parser.make_error(f"rule {name!r} is not defined", position)
    if "root" not in rules:
        raise GrammarError(f"GBNF grammar: there is no rule 'root'; the rules are {', '.join(map(repr, rules))[:200] or 'none'}")
    if cycle := _find_left_recursion(rules):
        path = " -> ".join(cycle)
        raise parser.make_error(f"rule {cycle[0]!r} is left-recursive ({path}); write a repetition instead", parser.definitions[cycle[0]])
    return rules


def merge_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the same code points as sorted ranges that do not touch, without surrogates, which no text contains."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low > high:
            continue
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    first, last = SURROGATES
    parts = [part for low, high in merged for part in ((low, min(high, first - 1)), (max(low, last + 1), min(high, LAST_CODE_POINT)))]
    return tuple((low, high) for low, high in parts if low <= high)


def complement_ranges(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Return all other code points."""
    lows = [0, *(high + 1 for _, high in ranges)]
    highs = [*(low - 1 for low, _ in ranges), LAST_CODE_POINT]
    return merge_ranges(list(zip(lows, highs, strict=True)))


ANY = Chars(complement_ranges(()))


def find_rules(rules: dict[str, Node], holds: Callable[[Node, set[str]], bool]) -> set[str]:
    """Return the names of the rules of which `holds(rule, names)` is true, `names` being those found so far, from none on."""
    found: set[str] = set()
    while new := {name for name, node in rules.items() if name not in found and holds(node, found)}:
        found |= new
    return found


def is_nullable(node: Node, nullable: set[str]) -> bool:
    """Return whether a node matches the empty text, given the rules that do."""
    match node:
        case Seq():
            return all(is_nullable(item, nullable) for item in node.items)
        case Alt():
            return any(is_nullable(option, nullable) for option in node.options)
        case Repeat():
            return node.least == 0 or is_nullable(node.item, nullable)
        case Ref():
            return node.name in nullable
    return False


def _find_left_recursion(rules: dict[str, Node]) -> list[str]:
    """Return the names along a cycle of rules that can begin with one another, or nothing."""
    nullable = find_rules(rules, is_nullable)
    begins = {name: list(dict.fromkeys(_find_leftmost(node, nullable))) for name, node in rules.items()}
    done: set[str] = set()
    for start in rules:
        path, pending = [start], [iter(begins[start])]
        while pending:
            name = next(pending[-1], None)
            if name is None:
                pending.pop()
                done.add(path.pop())
            elif name in path:
                return [*path[path.index(name) :], name]
            elif name not in done:
                path.append(name)
                pending.append(iter(begins[name]))
    return []


def _find_leftmost(node: Node, nullable: set[str]) -> Iterator[str]:
    match node:
        case Ref():
            yield node.name
        case Alt():
            for option in node.options:
                yield from _find_leftmost(option, nullable)
        case Repeat():
            yield from _find_leftmost(node.item, nullable)
        case Seq():
            for item in node.items:
                yield from _find_leftmost(item, nullable)
                if not is_nullable(item, nullable):
                    return


class _Parser:
    """Reads rules. A position is an index into the text."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self.definitions: dict[str, int] = {}
        """The position of each rule's last definition."""
        self.references: dict[str, int] = {}
        """The position of the first reference to each rule."""

    def make_error(self, what: str, position: int | None = None) -> GrammarError:
        position = self._at if position is None else position
        before = self._text[:position]
        line, column = before.count("\n") + 1, position - before.rfind("\n")
        return GrammarError(f"GBNF grammar: line {line}, column {column}: {what}")

    def _make_expected(self, what: str) -> GrammarError:
        found = repr(self._text[self._at : self._at + 20]) if self._at < len(self._text) else "the end"
        return self.make_error(f"expected {what}, got {found}")

    def parse_rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip_blanks(newlines=True)
        while self._at < len(self._text):
            start = self._at
            name = self._parse_name("the name of a rule")
            self._skip_blanks(newlines=False)
            if not self._text.startswith("::=", self._at):
                raise self._make_expected(f"'::=' after {name!r}")
            self._at += 3
            self._skip_blanks(newlines=True)
            self.definitions[name] = start
            rules[name] = self._parse_options(nested=False)
            if self._at < len(self._text) and self._peek() not in "\r\n":
                raise self._make_expected("an item, '|' or the end of the line")
            self._skip_blanks(newlines=True)
        return rules

    def _parse_options(self, *, nested: bool) -> Node:
        options = [self._parse_sequence(nested)]
        while self._peek() == "|":
            self._at += 1
            self._skip_blanks(newlines=True)
            options.append(self._parse_sequence(nested))
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def _parse_sequence(self, nested: bool) -> Node:
        items: list[Node] = []
        last: Node = EMPTY  # what a repetition repeats
        while (char := self._peek()) and char not in "|)\r\n":
            if char in "*+?{":
                position = self._at
                least, most = self._parse_repetition(nested)
                if last is EMPTY:
                    raise self.make_error(f"expected an item before {char!r}", position)
                if least > MAX_REPETITIONS:
                    raise self.make_error(f"expected at most {MAX_REPETITIONS} required repetitions, got {least}", position)
                items[-1] = last = Repeat(last, least, most)
                continue
            last = self._parse_item(char, nested)
            if last is not EMPTY:
                items.append(last)
        return items[0] if len(items) == 1 else Seq(tuple(items)) if items else EMPTY

    def _parse_item(self, char: str, nested: bool) -> Node:
        match char:
            case '"':
                node = self._parse_literal()
            case "[":
                node = self._parse_class()
            case "(":
                node = self._parse_group()
            case ".":
                self._at += 1
                node = ANY
            case "<" | "!":
                node = self._parse_token()
            case _:
                start = self._at
                name = self._parse_name('an item, such as "text", [a-z], (…), . or the name of a rule')
                self.references.setdefault(name, start)
                node = Ref(name)
        self._skip_blanks(newlines=nested)
        return node

    def _parse_literal(self) -> Node:
        start = self._at
        self._at += 1
        chars: list[Node] = []
        while self._peek() != '"':
            if not self._peek():
                raise self.make_error("expected '\"' at the end of the literal that begins here", start)
            code = self._parse_char()
            chars.append(Chars(merge_ranges([(code, code)])))
        self._at += 1
        return chars[0] if len(chars) == 1 else Seq(tuple(chars)) if chars else EMPTY

    def _parse_class(self) -> Node:
        start = self._at
        self._at += 1
        if negated := self._peek() == "^":
            self._at += 1
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            if not self._peek():
                raise self.make_error("expected ']' at the end of the class that begins here", start)
            low = high = self._parse_char()
            if self._peek() == "-" and self._peek(1) != "]":
                self._at += 1
                high = self._parse_char()
            ranges.append((low, high))
        self._at += 1
        if not ranges:  # in llama.cpp a class without members is no item
            return EMPTY
        merged = merge_ranges(ranges)
        return Chars(complement_ranges(merged) if negated else merged)

    def _parse_group(self) -> Node:
        start = self._at
        if self._depth == MAX_NESTING:
            raise self.make_error(f"expected at most {MAX_NESTING} parentheses within one another")
        self._at += 1
        self._skip_blanks(newlines=True)
        self._depth += 1
        node = self._parse_options(nested=True)
        self._depth -= 1
        if self._peek() != ")":
            if not self._peek():
                raise self.make_error("expected ')' for the '(' here", start)
            raise self._make_expected("an item, '|' or ')'")
        self._at += 1
        return Seq((node,)) if node is EMPTY else node  # unlike "", a group may be repeated

    def _parse_token(self) -> Node:
        if negated := self._peek() == "!":
            self._at += 1
        if found := re.compile(r"<\[([0-9]+)\]>").match(self._text, self._at):
            self._at = found.end()
            return Token(int(found[1]), negated)
        if found := re.compile(r"<[^>]+>").match(self._text, self._at):
            self._at = found.end()
            return Token(found[0], negated)
        raise self._make_expected("a token, such as <[1000]> or <think>")

    def _parse_repetition(self, nested: bool) -> tuple[int, int | None]:
        char = self._peek()
        self._at += 1
        self._skip_blanks(newlines=nested)
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        least = self._parse_count(nested)
        most: int | None = least
        if self._peek() == ",":
            self._at += 1
            self._skip_blanks(newlines=nested)
            most = self._parse_count(nested) if self._peek() in _DIGITS else None
        if self._peek() != "}":
            raise self._make_expected("'}' or ','" if most == least else "'}'")
        if most is not None and most < least:
            raise self.make_error(f"expected a greatest number of repetitions of {least} or more, got {most}")
        self._at += 1
        self._skip_blanks(newlines=nested)
        return least, most

    def _parse_count(self, nested: bool) -> int:
        start = self._at
        while self._peek() in _DIGITS:
            self._at += 1
        if start == self._at:
            raise self._make_expected("a number of repetitions")
        count = self._text[start : self._at]
        if len(count.lstrip("0")) > 9:
            raise self.make_error(f"expected a number of repetitions of at most nine digits, got {count:.20}", start)
        self._skip_blanks(newlines=nested)
        return int(count)

    def _parse_name(self, what: str) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            raise self._make_expected(what)
        self._at = found.end()
        return found[0]

    def _parse_char(self) -> int:
        char, kind = self._peek(), self._peek(1)
        if char != "\\":
            self._at += 1
            return ord(char)
        if kind in _HEX:
            digits = self._text[self._at + 2 : self._at + 2 + _HEX[kind]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{_HEX[kind]}}}", digits):
                raise self._make_expected(f"{_HEX[kind]} hexadecimal digits after \\{kind}")
            self._at += 2 + _HEX[kind]
            return int(digits, 16)
        if kind not in _ESCAPES:
            raise self._make_expected(r"one of the escapes \n \r \t \\ \" \[ \] \- \xNN \uNNNN \UNNNNNNNN")
        self._at += 2
        return ord(_ESCAPES[kind])

    def _peek(self, ahead: int = 0) -> str:
        """Return the character at the position, or nothing at the end."""
        return self._text[self._at + ahead : self._at + ahead + 1]

    def _skip_blanks(self, *, newlines: bool) -> None:
        found = (_BLANKS_AND_NEWLINES if newlines else _BLANKS).match(self._text, self._at)
        assert found is not None
        self._at = found.end()


_DIGITS = tuple("0123456789")
_BLANKS, _BLANKS_AND_NEWLINES = re.compile(r"(?:[ \t]|#[^\r\n]*)*"), re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")

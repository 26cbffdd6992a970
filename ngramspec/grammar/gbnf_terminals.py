"""Finds the terminals of a grammar that a lexer cannot tell apart, by automata over the characters of their regular expressions.

Terminals and the rules over them enter; whether one terminal can run on after another one has ended leaves. Used by `gbnf_lark`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

MAX_PAIRS = 20_000  # pairs of positions of two terminals that are compared before one is divided to be safe (about 20 ms)

# A rule over terminals: ("term", its regular expression), ("rule", name), ("token", text), ("seq", [Lowered …]), ("alt", [Lowered …]) or
# ("repeat", Lowered, least, most).
Lowered = tuple[Any, ...]


@dataclass(slots=True)
class Terminal:
    """A terminal's automaton over positions, the characters of its regular expression.

    A set of positions, or of classes of characters, is an integer with a bit for each.
    """

    chars: list[int] = field(default_factory=list)
    """The classes of characters of each position."""
    follow: list[int] = field(default_factory=list)
    """The positions that may come after each position."""
    first: int = 0
    """The positions with which a match begins."""
    last: int = 0
    """The positions with which a match ends."""
    nullable: bool = True
    """The terminal matches the empty text."""

    def get_first_chars(self) -> int:
        """Return the classes of characters with which a match begins."""
        found = 0
        for position in iterate_bits(self.first):
            found |= self.chars[position]
        return found

    def get_following(self, positions: int) -> int:
        """Return the positions that may come after any of these."""
        found = 0
        for position in iterate_bits(positions):
            found |= self.follow[position]
        return found

    def connect(self, before: int, after: int) -> None:
        """Let the positions `after` follow each of `before`."""
        for position in iterate_bits(before):
            self.follow[position] |= after


def can_run_on(shorter: Terminal, longer: Terminal, after: int) -> bool:
    """Return whether `longer` matches a match of `shorter` followed by one of the characters `after`, or begins to.

    Compares the positions that both reach by the same text. After MAX_PAIRS of them the answer is True.
    """
    if not after:
        return False
    overlapping: dict[int, int] = {}

    def find_overlap(chars: int) -> int:
        if chars not in overlapping:
            overlapping[chars] = sum(1 << position for position, each in enumerate(longer.chars) if each & chars)
        return overlapping[chars]

    reached: dict[int, int] = {}
    pending = {
        position: found for position in iterate_bits(shorter.first) if (found := longer.first & find_overlap(shorter.chars[position]))
    }
    n_pairs = 0
    while pending:
        position, new = pending.popitem()
        new &= ~reached.get(position, 0)
        if not new:
            continue
        reached[position] = reached.get(position, 0) | new
        next_longer = longer.get_following(new)
        if shorter.last >> position & 1 and next_longer & find_overlap(after):
            return True
        if (n_pairs := n_pairs + new.bit_count()) > MAX_PAIRS:
            return True
        for next_shorter in iterate_bits(shorter.follow[position] if next_longer else 0):
            if found := next_longer & find_overlap(shorter.chars[next_shorter]):
                pending[next_shorter] = pending.get(next_shorter, 0) | found
    return False


class FollowSets:
    """The characters with which the text may go on after each terminal."""

    def __init__(self, lowered: dict[str, Lowered], automata: dict[str, Terminal]) -> None:
        self._automata = automata
        self._begins: dict[str, tuple[int, bool]] = dict.fromkeys(lowered, (0, False))
        """The characters with which each rule begins, and whether it matches the empty text."""
        while any(self._set_begin(name, body) for name, body in lowered.items()):
            pass
        self._rules: dict[str, int] = dict.fromkeys(lowered, 0)
        self.terminals: dict[str, int] = {}
        self._changed = True
        while self._changed:
            self._changed = False
            for name, body in lowered.items():
                self._visit_node(body, self._rules[name])

    def _set_begin(self, name: str, body: Lowered) -> bool:
        before, self._begins[name] = self._begins[name], self._compute_begin(body)
        return before != self._begins[name]

    def _compute_begin(self, node: Lowered) -> tuple[int, bool]:
        match node:
            case "term", text:
                return self._automata[text].get_first_chars(), self._automata[text].nullable
            case "rule", name:
                return self._begins[name]
            case "token", _:
                return 0, False
            case "repeat", item, least, _:
                chars, nullable = self._compute_begin(item)
                return chars, nullable or least == 0
            case "alt", options:
                begins = [self._compute_begin(option) for option in options]
                return _unite_sets(chars for chars, _ in begins), any(nullable for _, nullable in begins)
        chars = 0
        for item in node[1]:
            more, nullable = self._compute_begin(item)
            chars |= more
            if not nullable:
                return chars, False
        return chars, True

    def _visit_node(self, node: Lowered, after: int) -> None:
        match node:
            case "term", text:
                self._add_chars(self.terminals, text, after)
            case "rule", name:
                self._add_chars(self._rules, name, after)
            case "repeat", item, _, most:
                self._visit_node(item, after | (self._compute_begin(item)[0] if most != 1 else 0))
            case "alt", options:
                for option in options:
                    self._visit_node(option, after)
            case "seq", items:
                for item in reversed(items):
                    self._visit_node(item, after)
                    chars, nullable = self._compute_begin(item)
                    after = chars | after if nullable else chars

    def _add_chars(self, known: dict[str, int], name: str, chars: int) -> None:
        if chars & ~known.get(name, 0):
            known[name] = known.get(name, 0) | chars
            self._changed = True


def _unite_sets(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def iterate_bits(number: int) -> Iterable[int]:
    """Yield the places of the bits that are set, lowest first."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low

"""How a text sets its JSON: where it puts blanks and line ends, learned as it is written, and what plain JSON would look like so set.

Bytes of a text enter, the same without blanks between words leave, and the other way round. Knows neither tokens nor schemas.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

_BLANKS, _OPEN, _CLOSE = frozenset(b" \t\r\n"), frozenset(b"{["), frozenset(b"}]")
_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'


@dataclass(frozen=True, slots=True)
class Habits:
    """What stands between words."""

    colon: bytes = b" "
    """Behind a colon."""
    comma: bytes = b" "
    """Behind a comma, where the next word is in the same line."""
    in_lines: frozenset[int] = frozenset()
    """The brackets whose members have lines of their own."""
    indent: bytes = b"  "
    """Of a level."""


class Layout:
    """A text on its way."""

    def __init__(self, habits: Habits) -> None:
        """`habits`: those that it is expected to have; its own replace them as they are seen."""
        self.habits = habits
        self._brackets: tuple[int, ...] = ()
        self._in_string = self._escaped = False
        self._last = 0  # byte that is no blank
        self._blanks = b""  # behind it

    def copy(self) -> Layout:
        return copy.copy(self)

    def feed(self, text: bytes) -> bytes:
        """The text goes on; returns that without blanks between words."""
        plain = bytearray()
        for byte in text:
            if self._in_string:
                plain.append(byte)
                if self._escaped or byte == _BACKSLASH:
                    self._escaped = not self._escaped
                elif byte == _QUOTE:
                    self._in_string = False
            elif byte in _BLANKS:
                self._blanks += bytes([byte])
            else:
                plain.append(byte)
                self._word(byte)
        return bytes(plain)

    def lay_out(self, plain: bytes, most: int) -> bytes:
        """How the text goes on if this comes, without blanks: with those that it would have, up to where the next word begins.

        Of `most` bytes or more nothing behind the word that reaches them: a schema can foresee brackets without end.
        """
        ahead, out, written = self.copy(), bytearray(), self._blanks
        for byte in plain:
            if len(out) >= most:
                return bytes(out)
            if not ahead._in_string:
                ahead._blanks = gap = ahead._gap(byte)
                out += gap[len(written) :] if gap.startswith(written) else b""
            written = b""
            out.append(byte)
            ahead.feed(bytes([byte]))
        if not ahead._in_string and ahead._last in (_COLON, _COMMA):
            out += ahead._gap(0)
        return bytes(out)

    def _word(self, byte: int) -> None:
        """A word begins with this byte, or is this bracket or mark."""
        self._learn(byte)
        self._last, self._blanks = byte, b""
        if byte == _QUOTE:
            self._in_string = True
        elif byte in _OPEN:
            self._brackets += (byte,)
        elif byte in _CLOSE:
            self._brackets = self._brackets[:-1]

    def _learn(self, byte: int) -> None:
        habits, blanks = self.habits, self._blanks
        if self._last == _COLON:
            if blanks != habits.colon:
                self.habits = replace(habits, colon=blanks, comma=blanks)  # commas mostly do as colons
        elif (self._last == _COMMA or self._last in _OPEN) and byte not in _CLOSE and self._brackets:
            bracket, depth, (line, _, indent) = self._brackets[-1], len(self._brackets), blanks.rpartition(b"\n")
            in_lines = bool(line or blanks.startswith(b"\n"))
            if in_lines != (bracket in habits.in_lines):
                habits = replace(habits, in_lines=habits.in_lines ^ {bracket})
            if in_lines and len(indent) % depth == 0 and indent != habits.indent * depth:
                habits = replace(habits, indent=indent[: len(indent) // depth])
            if not in_lines and self._last == _COMMA and blanks != habits.comma:
                habits = replace(habits, comma=blanks)
            self.habits = habits

    def _gap(self, byte: int) -> bytes:
        """What stands between the last word and one that begins with this byte."""
        habits, depth = self.habits, len(self._brackets)
        if self._last == _COLON:
            return habits.colon
        if (byte in _CLOSE and self._last in _OPEN) or not depth:
            return b""
        if byte in _CLOSE or self._last == _COMMA or self._last in _OPEN:
            if self._brackets[-1] in habits.in_lines:
                return b"\n" + habits.indent * (depth - (byte in _CLOSE))
            return habits.comma if self._last == _COMMA else b""
        return b""

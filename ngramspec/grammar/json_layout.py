"""The whitespace that a JSON text puts between JSON tokens: learned while the text is written, and added to compact JSON.

Bytes of a text enter, the same without whitespace leave, and the other way round. Knows neither tokens of a model nor schemas.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

_BLANKS, _OPEN, _CLOSE = frozenset(b" \t\r\n"), frozenset(b"{["), frozenset(b"}]")
_QUOTE, _BACKSLASH, _COLON, _COMMA = b'"\\:,'


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """The whitespace between JSON tokens."""

    colon: bytes = b" "
    """Whitespace after a colon."""
    comma: bytes = b" "
    """Whitespace after a comma, if the next member is in the same line."""
    in_lines: frozenset[int] = frozenset()
    """The opening brackets whose members have lines of their own."""
    indent: bytes = b"  "
    """Indentation of one level."""


class JsonLayout:
    """Position and style of one text."""

    def __init__(self, style: JsonStyle) -> None:
        """Start a text that is expected to have this style; its own replaces it as it is seen."""
        self.style = style
        self._brackets: tuple[int, ...] = ()
        self._in_string = self._escaped = False
        self._last = 0  # the last byte that is not blank
        self._blanks = b""  # the blanks after it

    def copy(self) -> JsonLayout:
        return copy.copy(self)

    def remove_whitespace(self, text: bytes) -> bytes:
        """Take the next bytes of the text; return them without whitespace between JSON tokens."""
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
                self._begin_token(byte)
        return bytes(plain)

    def add_whitespace(self, plain: bytes, most: int) -> bytes:
        """Return compact JSON that would come next with the whitespace that it would have, up to where the JSON token after it begins.

        Stops after the token that reaches `most` bytes: a schema can force brackets without end.
        """
        ahead, out, written = self.copy(), bytearray(), self._blanks
        for byte in plain:
            if len(out) >= most:
                return bytes(out)
            if not ahead._in_string:
                ahead._blanks = gap = ahead._get_gap(byte)
                out += gap[len(written) :] if gap.startswith(written) else b""
            written = b""
            out.append(byte)
            ahead.remove_whitespace(bytes([byte]))
        if not ahead._in_string and ahead._last in (_COLON, _COMMA):
            out += ahead._get_gap(0)
        return bytes(out)

    def _begin_token(self, byte: int) -> None:
        """Take the first byte of a JSON token."""
        self._learn_style(byte)
        self._last, self._blanks = byte, b""
        if byte == _QUOTE:
            self._in_string = True
        elif byte in _OPEN:
            self._brackets += (byte,)
        elif byte in _CLOSE:
            self._brackets = self._brackets[:-1]

    def _learn_style(self, byte: int) -> None:
        style, blanks = self.style, self._blanks
        if self._last == _COLON:
            if blanks != style.colon:
                self.style = replace(style, colon=blanks, comma=blanks)  # commas mostly do as colons
        elif (self._last == _COMMA or self._last in _OPEN) and byte not in _CLOSE and self._brackets:
            bracket, depth, (line, _, indent) = self._brackets[-1], len(self._brackets), blanks.rpartition(b"\n")
            in_lines = bool(line or blanks.startswith(b"\n"))
            if in_lines != (bracket in style.in_lines):
                style = replace(style, in_lines=style.in_lines ^ {bracket})
            if in_lines and len(indent) % depth == 0 and indent != style.indent * depth:
                style = replace(style, indent=indent[: len(indent) // depth])
            if not in_lines and self._last == _COMMA and blanks != style.comma:
                style = replace(style, comma=blanks)
            self.style = style

    def _get_gap(self, byte: int) -> bytes:
        """Return the whitespace between the last JSON token and one that begins with this byte."""
        style, depth = self.style, len(self._brackets)
        if self._last == _COLON:
            return style.colon
        if (byte in _CLOSE and self._last in _OPEN) or not depth:
            return b""
        if byte in _CLOSE or self._last == _COMMA or self._last in _OPEN:
            if self._brackets[-1] in style.in_lines:
                return b"\n" + style.indent * (depth - (byte in _CLOSE))
            return style.comma if self._last == _COMMA else b""
        return b""

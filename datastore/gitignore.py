"""Matching paths by the patterns of a .gitignore, as git's wildmatch does, in time linear in path times pattern.

The bytes of a file of patterns enter, verdicts on paths leave. Paths are bytes, as for git: `?` is one byte. A pattern is compiled so that
it cannot backtrack: after each `*` the leftmost place where the rest up to the next `*` fits is taken for good, which is enough because
every such part has a fixed length; between two `**` the same holds for whole components. Most paths match no pattern: the last component of
a path says which could match, by a table of names and by one expression for every UNION patterns. Opens nothing and knows nothing of trees.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_PATTERN = 4096  # bytes of a pattern; longer ones are passed over, no path is as long
UNION = 32  # patterns whose last components are one expression
_CLASSES = {
    b"alnum": (string.ascii_letters + string.digits).encode(),
    b"alpha": string.ascii_letters.encode(),
    b"blank": b" \t",
    b"cntrl": bytes([*range(32), 127]),
    b"digit": string.digits.encode(),
    b"graph": bytes(range(33, 127)),
    b"lower": string.ascii_lowercase.encode(),
    b"print": bytes(range(32, 127)),
    b"punct": string.punctuation.encode(),
    b"space": b" \t\n\r",
    b"upper": string.ascii_uppercase.encode(),
    b"xdigit": string.hexdigits.encode(),
}
_ANY_BYTE, _STAR, _SLASH = b".", b"*", b"/"  # tokens of a pattern; every other token is a regular expression for one byte
Match = Callable[[bytes], object]
Group = tuple[Match, ...]  # consecutive components of a pattern that lie between two `**`


class TooSlowError(Exception):
    """The patterns took longer than they may."""


class TimeLimit:
    """A time that compiling and matching may take together. `check` raises TooSlowError once it is over; time outside `with` is free."""

    def __init__(self, seconds: float) -> None:
        self._left = seconds
        self._until = 0.0

    def __enter__(self) -> None:
        self._until = time.monotonic() + self._left

    def __exit__(self, *_: object) -> None:
        self._left = self._until - time.monotonic()

    def check(self) -> None:
        if time.monotonic() > self._until:
            raise TooSlowError


@dataclass(frozen=True, slots=True)
class _Pattern:
    negative: bool
    folders_only: bool
    match: Match
    """Matches the name alone, in a pattern without a slash."""
    groups: tuple[Group, ...]
    """Match the path component by component, in a pattern with a slash."""

    def matches(self, path: bytes, name: bytes, is_folder: bool) -> bool:
        if self.folders_only and not is_folder:
            return False
        return _match_components(self.groups, path.split(b"/")) if self.groups else bool(self.match(name))


class IgnoreRules:
    """The patterns of one file."""

    def __init__(self, data: bytes, limit: TimeLimit, *, ignore_case: bool = False) -> None:
        """Compile them. Within `limit`."""
        self._by_name: dict[bytes, list[int]] = {}
        """Numbers of the patterns whose last component is a plain name, falling."""
        self._unions: list[tuple[Match, list[int]]] = []
        """Numbers of the others, falling, with what matches the last component of any of them."""
        self._patterns: list[_Pattern] = []
        others: list[tuple[int, bytes]] = []
        self._fold = ignore_case
        with limit:
            for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
                if line and not line.startswith(b"#"):
                    self._add_pattern(_trim_blanks(line.removesuffix(b"\r")), others)
                    limit.check()
            others.reverse()
            for at in range(0, len(others), UNION):
                numbers, lasts = zip(*others[at : at + UNION], strict=True)
                self._unions.append((re.compile(b"|".join(lasts), re.DOTALL).fullmatch, list(numbers)))
                limit.check()
        for found in self._by_name.values():
            found.reverse()

    def __bool__(self) -> bool:
        return bool(self._patterns)

    def match_path(self, path: bytes, is_folder: bool) -> bool | None:
        """Return whether the last pattern that matches a path ignores it (True) or takes it back (False); None if none matches.

        The path is relative to the file's folder. What lies in an ignored folder is the caller's business.
        """
        if self._fold:
            path = path.lower()
        name = path[path.rfind(b"/") + 1 :]
        possible = [numbers for fits, numbers in self._unions if fits(name)]
        if name in self._by_name:
            possible.append(self._by_name[name])
        found = -1
        for numbers in possible:
            for number in numbers:
                if number < found:
                    break
                if self._patterns[number].matches(path, name, is_folder):
                    found = number
                    break
        return None if found < 0 else not self._patterns[found].negative

    def _add_pattern(self, glob: bytes, others: list[tuple[int, bytes]]) -> None:
        """Compile one line. `others` gets its number and what matches its last component, unless that is a plain name."""
        negative = glob.startswith(b"!")
        glob = glob[negative:]
        folders_only = glob.endswith(b"/")
        glob = glob[: len(glob) - folders_only]
        if not glob or len(glob) > MAX_PATTERN or (tokens := _split_tokens(glob, self._fold)) is None:
            return
        groups = _compile_path(tokens[1:] if glob.startswith(b"/") else tokens) if b"/" in glob else ()
        last = _split_at(_SLASH, tokens)[-1]
        match: Match
        if all(token not in (_STAR, _ANY_BYTE) and token[:1] not in (b"[", b"(") for token in last):
            plain = b"".join(token[-1:] for token in last)
            match = plain.__eq__
            self._by_name.setdefault(plain, []).append(len(self._patterns))
        else:
            match = _compile_component(last)
            others.append((len(self._patterns), _to_expression(last)))
        self._patterns.append(_Pattern(negative, folders_only, match, groups))


def _trim_blanks(line: bytes) -> bytes:
    """Return without the spaces at its end, but for one behind a backslash."""
    bare = line.rstrip(b" ")
    escaped = (len(bare) - len(bare.rstrip(b"\\"))) % 2 == 1
    return line[: len(bare) + 1] if escaped and len(bare) < len(line) else bare


def _split_tokens(glob: bytes, fold: bool) -> list[bytes] | None:
    """Return one token per byte that is matched, `*` and `/`; None where git's matcher gives the pattern up: it matches nothing.

    With `fold` paths come in small letters. Git folds a pattern's plain bytes too, but none behind a backslash or in brackets.
    """
    tokens: list[bytes] = []
    at = 0
    while at < len(glob):
        byte = glob[at : at + 1]
        at += 1
        if byte == b"[":
            parsed = _parse_class(glob, at, fold)
            if parsed is None:
                return None
            token, at = parsed
            tokens.append(token)
            continue
        if byte == b"\\":
            byte = glob[at : at + 1]
            at += 1
            if not byte:
                return None
            tokens.append(_SLASH if byte == b"/" else re.escape(byte))
        elif byte == b"?":
            tokens.append(_ANY_BYTE)
        else:
            tokens.append(byte if byte in (_STAR, _SLASH) else re.escape(byte.lower() if fold else byte))
    return tokens


def _parse_class(glob: bytes, at: int, fold: bool) -> tuple[bytes, int] | None:
    """Parse a bracket expression whose inside begins at `at` -> (its token, where it ends).

    None if it does not end, or names no known class.
    """
    negated = glob[at : at + 1] in (b"!", b"^")
    at += negated
    members: set[int] = set()
    before: int | None = None  # the byte that a range may begin with
    first = True
    while first or glob[at : at + 1] != b"]":
        first = False
        if at >= len(glob):
            return None
        byte = glob[at]
        if byte == ord("-") and before is not None and glob[at + 1 : at + 2] not in (b"", b"]"):
            at += 1 + (glob[at + 1] == ord("\\"))
            if at >= len(glob):
                return None
            span = range(before, glob[at] + 1)
            members.update(span, (ord(letter.lower()) for letter in string.ascii_uppercase if fold and ord(letter) in span))
            before = None
        elif byte == ord("[") and glob[at + 1 : at + 2] == b":":
            end = glob.find(b"]", at + 2)
            if end < 0:
                return None
            if end < at + 3 or glob[end - 1] != ord(":"):
                members.add(byte)
                before = byte
            else:
                named = _CLASSES.get(glob[at + 2 : end - 1])
                if named is None:
                    return None
                members.update(named, named.lower() if fold else b"")
                before, at = None, end
        else:
            if byte == ord("\\"):
                at += 1
                if at >= len(glob):
                    return None
            members.add(glob[at])
            before = glob[at]
        at += 1
    chosen = set(range(256)) - members if negated else members
    chosen.discard(ord("/"))
    return (b"[" + b"".join(b"\\x%02x" % number for number in sorted(chosen)) + b"]" if chosen else b"(?!)"), at + 1


def _compile_component(tokens: Sequence[bytes]) -> Match:
    """Return a matcher of one name."""
    return re.compile(_to_expression(tokens), re.DOTALL).fullmatch


def _to_expression(tokens: Sequence[bytes]) -> bytes:
    """Return what matches one name, as a whole; a `**` by itself, which is about any number of components, matches every name."""
    first, *more = [b"".join(part) for part in _split_at(_STAR, tokens)]
    if not more:
        return first
    leftmost = b"".join(b"(?>.*?%b)" % part for part in more[:-1] if part)
    return first + leftmost + b".*" + more[-1]


def _compile_path(tokens: Sequence[bytes]) -> tuple[Group, ...]:
    """Return matchers of components, grouped by the `**` between them."""
    groups: list[list[Match]] = [[]]
    for component in _split_at(_SLASH, tokens):
        if len(component) > 1 and set(component) == {_STAR}:
            groups.append([])
        else:
            groups[-1].append(_compile_component(component))
    return tuple(map(tuple, groups))


def _split_at(separator: bytes, tokens: Sequence[bytes]) -> list[list[bytes]]:
    parts: list[list[bytes]] = [[]]
    for token in tokens:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def _match_components(groups: Sequence[Group], names: Sequence[bytes]) -> bool:
    first, last = groups[0], groups[-1]
    if len(groups) == 1:
        return len(names) == len(first) and _match_group(first, names, 0)
    # where the last group begins; `a/**` is about what lies in `a`: at least one more component
    end = len(names) - max(len(last), 1 if not last else 0)
    if len(first) > end or not _match_group(first, names, 0):
        return False
    at = len(first)
    for group in groups[1:-1]:
        while at + len(group) <= end and not _match_group(group, names, at):
            at += 1
        at += len(group)
        if at > end:
            return False
    return not last or _match_group(last, names, end)


def _match_group(group: Group, names: Sequence[bytes], at: int) -> bool:
    return all(match(names[at + number]) for number, match in enumerate(group))

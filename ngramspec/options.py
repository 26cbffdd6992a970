"""What a setting is, said once: name, kind, bounds, default and meaning, for whoever checks it or asks for it.

A dataclass declares its fields with `option`; its values are checked with `check`, and command lines and HTTP dialects build what they
accept from `options_of`. Knows no setting in particular, and imports nothing that takes time.
"""

from __future__ import annotations

import dataclasses
import numbers
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from ngramspec.errors import InvalidInputError

MAX_INT = 2**31 - 1


class Kind(Protocol):
    """The values that an option takes."""

    @property
    def accepted(self) -> str:
        """What is accepted, as the end of "must be …"."""
        ...

    def is_valid(self, value: object) -> bool: ...


@dataclass(frozen=True, slots=True)
class Integer:
    low: int
    high: int = MAX_INT
    optional: bool = False
    """None is accepted, too."""

    @property
    def accepted(self) -> str:
        bounds = f"an integer from {self.low}" + (f" to {self.high}" if self.high != MAX_INT or not self.low else "")
        return f"None or {bounds}" if self.optional else bounds

    def is_valid(self, value: object) -> bool:
        if value is None:
            return self.optional
        return isinstance(value, numbers.Integral) and not isinstance(value, bool) and self.low <= int(value) <= self.high


@dataclass(frozen=True, slots=True)
class Number:
    low: float
    high: float
    above: bool = False
    """The lower bound itself is out of bounds."""

    @property
    def accepted(self) -> str:
        return f"a number in {'(' if self.above else '['}{self.low}, {self.high}]"

    def is_valid(self, value: object) -> bool:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return False
        inside = bool(self.low <= value <= self.high)  # type: ignore[operator]  # numbers.Real declares no order; a NaN is in no bounds
        return inside and not (self.above and value == self.low)


@dataclass(frozen=True, slots=True)
class Flag:
    accepted = "True or False"

    def is_valid(self, value: object) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class ChoiceOf:
    values: tuple[str, ...]

    @property
    def accepted(self) -> str:
        return " or ".join(map(repr, self.values))

    def is_valid(self, value: object) -> bool:
        return isinstance(value, str) and value in self.values


@dataclass(frozen=True, slots=True)
class TextKind:
    """A text whose meaning is checked where it is used."""

    optional: bool = False
    """None is accepted, too."""

    @property
    def accepted(self) -> str:
        return "None or text" if self.optional else "text"

    def is_valid(self, value: object) -> bool:
        return isinstance(value, str) or (value is None and self.optional)


@dataclass(frozen=True, slots=True)
class TextList:
    most: int

    @property
    def accepted(self) -> str:
        return f"up to {self.most} non-empty strings"

    def is_valid(self, value: object) -> bool:
        return isinstance(value, (list, tuple)) and len(value) <= self.most and all(isinstance(text, str) and text for text in value)


@dataclass(frozen=True, slots=True)
class TokenIds:
    optional: bool = False
    """None is accepted, too, and an empty list is not."""

    @property
    def accepted(self) -> str:
        return "None or one or more token ids (integers from 0)" if self.optional else "token ids (integers from 0)"

    def is_valid(self, value: object) -> bool:
        if value is None or value in ([], ()):
            return (value is None) == self.optional
        if not isinstance(value, (list, tuple)):
            return False
        kinds = set(map(type, value))  # not one by one: a request may have a million
        return all(issubclass(kind, numbers.Integral) and kind is not bool for kind in kinds) and min(value) >= 0 and max(value) <= MAX_INT


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """A number for each of some token ids."""

    low: float
    high: float

    @property
    def accepted(self) -> str:
        return f"a dict of token id to a number in [{self.low:g}, {self.high:g}]"

    def is_valid(self, value: object) -> bool:
        number = Number(self.low, self.high)
        return isinstance(value, dict) and all(Integer(0).is_valid(token) and number.is_valid(each) for token, each in value.items())


@dataclass(frozen=True, slots=True)
class Option:
    """One setting."""

    name: str
    default: Any
    kind: Kind
    help: str
    """What it means: a sentence or two."""
    flags: tuple[str, ...] | None = ()
    """What a command line calls it; (): `flag`, with --no- for a switch that is on by default; None: it does not have it."""
    metavar: str | None = None
    panel: str = ""
    """The heading under which a command line shows it."""
    only: tuple[str, ...] = ()
    """The commands that have it; (): all that take such settings."""
    off: str = ""
    """What it means to turn off a switch that is on by default: the help of its --no-… flag."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def check(self, value: object) -> None:
        """Raises InvalidInputError."""
        if value is not self.default and not self.kind.is_valid(value):
            raise InvalidInputError(f"{self.name} must be {self.kind.accepted}, got {value!r}")


def option(default: Any, kind: Kind, meaning: str, **more: Any) -> Any:
    """Return a field of a dataclass of settings. `default`: a value, or a function that makes one; `meaning` and `more`: see `Option`."""
    metadata = {"option": {"kind": kind, "help": meaning, **more}}
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cache
def options_of(settings: Any) -> dict[str, Option]:
    """Return the options of a dataclass by name, in its order."""
    found = {}
    for field in dataclasses.fields(settings):
        default = field.default_factory() if callable(field.default_factory) else field.default
        found[field.name] = Option(field.name, default, **field.metadata["option"])
    return found


def check(settings: Any) -> None:
    """Check every field of a dataclass of settings against its option. Raises InvalidInputError for the first that is out of bounds."""
    for name, each in options_of(settings.__class__).items():
        each.check(getattr(settings, name))

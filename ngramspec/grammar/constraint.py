"""What a text must look like, as a user gives it (`Grammar`), and the contract of a compiled grammar (`Constraint`).

A JSON schema, a regular expression, a list of texts or a grammar enters as a `Grammar`, whose own form is checked here;
`grammar.llguidance` compiles it to a `Constraint`, which the sampler follows. Knows no tokenizer and no library of grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from ngramspec.errors import GrammarError

if TYPE_CHECKING:
    import numpy as np

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")
MAX_BYTES = 1 << 18  # of a grammar's text; GBNF, which is translated in Python, may have an eighth
MAX_CHOICES = 4096
# Blanks of one line before a name, and none twice: else a text of line ends or blanks takes quadratic time.
_GBNF = re.compile(r"^[^\S\n]*root\s*::=", re.MULTILINE)
_LARK = re.compile(r"^[^\S\n]*\??start\s*+(?:\.-?\d+\s*+)?:(?!:)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that the model's whole text must have. Make one with the class methods below.

    Raises GrammarError (an InvalidInputError) for what is no grammar, or too large. What only a compiler finds out is raised at `submit`.
    """

    kind: str
    text: str
    """JSON of a schema or of a list of choices; the regular expression or the grammar; nothing for `json_object`."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrammarError(f"a grammar's kind must be {' or '.join(map(repr, KINDS))}, got {self.kind!r:.80}")
        if not isinstance(self.text, str) or (not self.text and self.kind != "json_object"):
            raise GrammarError(f"a grammar of kind {self.kind} must be text, got {self.text!r:.80}")
        try:
            n_bytes = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise GrammarError(f"a grammar must be valid Unicode text: character {error.start} is a lone surrogate") from None
        if n_bytes > (most := MAX_BYTES // 8 if self.kind == "gbnf" else MAX_BYTES):
            raise GrammarError(f"a grammar of kind {self.kind} has at most {most} bytes, got {n_bytes}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Self:
        """Return the grammar of JSON that fits a schema: the schema itself, or its JSON text."""
        if not isinstance(schema, str):
            return cls("json_schema", _to_json(schema))
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"a JSON schema must be JSON: {error}") from None
        if not isinstance(parsed, (dict, bool)):
            raise GrammarError(f"a JSON schema must be an object, true or false, got {schema:.80}")
        return cls("json_schema", schema)

    @classmethod
    def json_object(cls) -> Self:
        """Return the grammar of any JSON object."""
        return cls("json_object", "")

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Return the grammar of texts that match a regular expression, without back-references and look-around."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Self:
        """Return the grammar of a list of texts, one of which is written."""
        good = isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts)
        if not good or not 1 <= len(texts) <= MAX_CHOICES:
            raise GrammarError(f"choices must be 1 to {MAX_CHOICES} non-empty texts, got {texts!r:.80}")
        return cls("choice", _to_json(list(texts)))

    @classmethod
    def lark(cls, grammar: str) -> Self:
        """Return a grammar in Lark's notation, whose rule is `start`."""
        return cls("lark", grammar)

    @classmethod
    def gbnf(cls, grammar: str) -> Self:
        """Return a grammar in llama.cpp's notation, whose rule is `root`."""
        return cls("gbnf", grammar)

    @classmethod
    def from_text(cls, grammar: str) -> Self:
        """Return a grammar in llama.cpp's notation, or in Lark's, whichever its first rule is in."""
        if _GBNF.search(grammar):
            return cls.gbnf(grammar)
        if _LARK.search(grammar):
            return cls.lark(grammar)
        raise GrammarError("there is neither a rule `root ::= …`, as llama.cpp has it, nor `start: …`, as Lark has it")


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"a JSON schema must be JSON: {error}") from None


@dataclass(frozen=True, slots=True)
class GrammarKind:
    """The kind of an option that takes a `Grammar`."""

    accepted = "None or a Grammar, such as Grammar.json_schema({…})"

    def is_valid(self, value: object) -> bool:
        return value is None or isinstance(value, Grammar)


class ConstraintLookahead(Protocol):
    """Walks ahead of a text along draft tokens, and back. The text's own state does not change."""

    def step(self, token: int) -> bool:
        """Advance by a token; return False, without advancing, if the grammar forbids it."""
        ...

    def undo(self) -> None:
        """Undo the last step."""

    def get_forced_tokens(self) -> list[tuple[int, float]]:
        """Return the tokens that must follow here, or probably will, each with the probability that it comes after those before."""
        ...


class Constraint(Protocol):
    """The state of one text in its grammar."""

    @property
    def complete(self) -> bool:
        """Whether the text is whole, so that nothing may follow."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether any tokens may follow, for good."""
        ...

    @property
    def n_spelled(self) -> int:
        """Tokens so far that only spell what the prompt left out (`grammar.healing`), which `min_tokens` and `max_tokens` do not count."""
        ...

    def mask(self) -> np.ndarray:
        """Return the tokens that may come next, [W] uint32: token t is bit t % 32 of word t // 32.

        An end-of-text token is one of them if the text may end. Raises GrammarError.
        """
        ...

    def accept(self, token: int) -> None:
        """Append a token to the text. Raises GrammarError for one that may not come."""

    def fork(self) -> Constraint:
        """Return an independent copy."""
        ...

    def make_lookahead(self) -> ConstraintLookahead:
        """Return a lookahead that starts at the end of the text."""
        ...

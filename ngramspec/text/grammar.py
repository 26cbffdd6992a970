"""Grammars over an engine's vocabulary, by the library llguidance: compiled, and followed token by token.

A `Grammar` enters, a `Constraint` at the beginning of a text leaves. Compiling is done in the thread of whoever asks. Knows tokenizers and
nothing of models, drafts or requests.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ngramspec.batch.errors import GrammarError
from ngramspec.batch.grammar import Grammar
from ngramspec.text.encoding import Encoding

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Compiled grammars that are kept for later requests."""
LIMITS: dict[str, Any] = {"max_items_in_row": 2000, "step_max_items": 50_000, "step_lexer_fuel": 200_000, "max_grammar_size": 100_000}
"""A step within them takes some tens of milliseconds at the very most."""
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Between the words of JSON, or nothing: as llama.cpp has it. With no bound, a model can go on with blanks for ever."""
STYLES: tuple[dict[str, Any], ...] = (
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    {"whitespace_flexible": False},
)
"""How JSON is usually set. What a schema forces in a style is foreseen while the text keeps to it."""
CERTAIN, LIKELY, TAIL = 1.0, 0.95, 0.7
"""The chance of a token that must come, of one that comes in this style, of the last one, which may be longer than what must come."""
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


class Grammars:
    """All grammars of an engine. From any thread."""

    def __init__(self, encoding: Encoding, eos_token_ids: Sequence[int]) -> None:
        self._encoding, self._eos = encoding, list(eos_token_ids)
        self._compiled: OrderedDict[Grammar, Matching] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Matching:
        """A text that follows the grammar, at its beginning; `fork` it. Takes up to seconds for one that is new. Raises GrammarError."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        made = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return made

    def _compile(self, grammar: Grammar) -> Matching:
        tokenizer = self._tokenizer
        try:
            source, styled = _sources(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"grammar: {_first_line(error)}") from None
        matcher, styles = _matcher(tokenizer, source), []
        for style in styled:
            with contextlib.suppress(GrammarError):
                styles.append(_matcher(tokenizer, style))
        made = Matching(tokenizer, matcher, styles)
        made.fork().mask()  # raises where nothing can be written at all
        return made

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise GrammarError(
                "a grammar needs the package llguidance, which is not installed here. Install it with:\n  pip install 'llguidance>=1.9,<2'"
            ) from None
        backend = copy.copy(self._encoding.backend("a grammar"))
        backend.no_padding()
        backend.no_truncation()
        n_vocab = max(self._encoding.vocab_size, max(backend.get_vocab(with_added_tokens=True).values(), default=0) + 1)
        return LLTokenizer(backend.to_str(), n_vocab=n_vocab, eos_token=self._eos or None)


def _sources(grammar: Grammar) -> tuple[str, list[str]]:
    """llguidance's own form, and that of the usual styles of the same. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    match grammar.kind:
        case "json_schema" | "json_object":
            schema = grammar.text or '{"type": "object"}'
            styled = [LLMatcher.grammar_from_json_schema(schema, overrides=style) for style in STYLES]  # type: ignore[arg-type]
            return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE}), styled
        case "choice":
            texts = ["".join("\\" + c if c in _META else c for c in text) for text in json.loads(grammar.text)]
            return LLMatcher.grammar_from_regex("|".join(f"(?:{text})" for text in texts)), []
        case "regex" | "lark" | "gbnf" as kind:
            return grammar_from(kind, grammar.text), []
    raise AssertionError(grammar.kind)


def _matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))
    if matcher.is_error():
        raise GrammarError(f"grammar: {_first_line(matcher.get_error())}")
    return matcher


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0][:300]


class Matching:
    """Where a text stands (a `batch.grammar.Constraint`)."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, styles: list[LLMatcher]) -> None:
        self._tokenizer, self._matcher, self._styles = tokenizer, matcher, styles
        self._mask: np.ndarray | None = None

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        if self._mask is None:
            self._mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            if self._matcher.is_error():
                raise GrammarError(f"grammar: {_first_line(self._matcher.get_error())}")
        return self._mask

    def accept(self, token: int) -> None:
        self._mask = None
        if not self._matcher.consume_token(token):
            raise GrammarError(f"grammar: token {token} may not come here: {_first_line(self._matcher.get_error())}")
        self._styles = [style for style in self._styles if style.try_consume_tokens([token])]

    def fork(self) -> Matching:
        other = Matching(self._tokenizer, self._matcher.deep_copy(), [style.deep_copy() for style in self._styles])
        other._mask = self._mask
        return other

    def walker(self) -> MatchingWalker:
        return MatchingWalker(self._tokenizer, self._matcher.deep_copy(), self._styles[0].deep_copy() if self._styles else None)


class MatchingWalker:
    """Runs ahead of a text (a `batch.grammar.Walker`)."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, style: LLMatcher | None) -> None:
        self._tokenizer, self._matcher, self._style = tokenizer, matcher, style
        self._strayed = 0
        """Steps since the text departed from the style."""

    def step(self, token: int) -> bool:
        if not self._matcher.try_consume_tokens([token]):
            return False
        if self._style is not None and (self._strayed or not self._style.try_consume_tokens([token])):
            self._strayed += 1
        return True

    def back(self) -> None:
        self._matcher.rollback(1)
        if self._strayed:
            self._strayed -= 1
        elif self._style is not None:
            self._style.rollback(1)

    def foreseen(self) -> list[tuple[int, float]]:
        if self._style is None or self._strayed:
            return [(token, CERTAIN) for token in self._matcher.compute_ff_tokens()]
        tokens = self._style.compute_ff_tokens()
        rest = self._style.compute_ff_bytes()[len(self._tokenizer.decode_bytes(tokens)) :]
        chain = [(token, LIKELY) for token in tokens]
        tail = self._tokenizer.tokenize_bytes(rest) if rest else []
        return chain + [(token, TAIL) for token in tail[:1]]

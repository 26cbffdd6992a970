"""Grammars over an engine's vocabulary, by the library llguidance: compiled, and followed token by token.

A `Grammar` enters, a `Constraint` at the beginning of a text leaves. Compiling is done in the thread of whoever asks. Knows tokenizers and
nothing of models, drafts or requests.
"""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ngramspec.batch.errors import GrammarError
from ngramspec.batch.grammar import Grammar
from ngramspec.text.encoding import Encoding
from ngramspec.text.json_layout import Habits, Layout

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

KEPT = 64
"""Compiled grammars that are kept for later requests."""
LIMITS: dict[str, Any] = {"max_items_in_row": 2000, "step_max_items": 50_000, "step_lexer_fuel": 200_000, "max_grammar_size": 100_000}
"""A step within them takes some tens of milliseconds at the very most."""
TIMEOUT_S, AT_ONCE = 2.0, 2
"""How long compiling may take, waiting for a place included, and how many grammars are compiled at a time."""
MOST_AT_ONCE = 6
"""Expressions that one text must match together. llguidance takes time that is exponential in their number, and counts none of it."""
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Between the words of JSON, or nothing: as llama.cpp has it. With no bound, a model can go on with blanks for ever."""
LIKELY, LAST = 0.95, 0.7
"""The chance of a token that a schema foresees in the text's layout, and of the last one, which may be longer than what is foreseen."""
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


class Grammars:
    """All grammars of an engine. From any thread."""

    def __init__(self, encoding: Encoding, eos_token_ids: Sequence[int]) -> None:
        self._encoding, self._eos = encoding, list(eos_token_ids)
        self._compiled: OrderedDict[Grammar, Matching] = OrderedDict()
        self._habit = Habit()
        self._lock, self._places = threading.Lock(), threading.BoundedSemaphore(AT_ONCE)

    def compile(self, grammar: Grammar) -> Matching:
        """A text that follows the grammar, at its beginning; `fork` it. Takes up to seconds for one that is new. Raises GrammarError."""
        with self._lock:
            if (known := self._compiled.get(grammar)) is not None:
                self._compiled.move_to_end(grammar)
                return known
        made = self._in_time(grammar)
        with self._lock:
            self._compiled[grammar] = made
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return made

    def _in_time(self, grammar: Grammar) -> Matching:
        """`_compile`, or an error. What takes too long cannot be ended from outside: it goes on in a thread of its own, of which there are
        few, and no pass waits for it."""
        assert self._tokenizer  # takes its time once, whatever the grammar
        deadline = time.monotonic() + TIMEOUT_S  # for a place, and for it
        done: Future[Matching] = Future()

        def run() -> None:
            try:
                done.set_result(self._compile(grammar))
            except BaseException as error:
                done.set_exception(error)
            finally:
                self._places.release()

        if self._places.acquire(timeout=TIMEOUT_S):
            threading.Thread(target=run, name="ngramspec-grammar", daemon=True).start()
            with contextlib.suppress(TimeoutError):
                return done.result(max(deadline - time.monotonic(), 0))
        raise GrammarError(f"grammar: compiling it takes more than {TIMEOUT_S:g} s; a smaller one may do")

    def _compile(self, grammar: Grammar) -> Matching:
        tokenizer = self._tokenizer
        try:
            source, plain = _sources(grammar)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"grammar: {_first_line(error)}") from None
        matcher = _matcher(tokenizer, source)
        outline = None if plain is None else Outline(_matcher(_bytes(), plain), self._habit)
        made = Matching(tokenizer, matcher, outline)
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


def _sources(grammar: Grammar) -> tuple[str, str | None]:
    """llguidance's own form, and for JSON that of the same without blanks between words. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if (n := n_together(grammar)) > MOST_AT_ONCE:
        raise ValueError(f"at most {MOST_AT_ONCE} expressions for one text, got {n}")
    match grammar.kind:
        case "json_schema" | "json_object":
            schema = grammar.text or '{"type": "object"}'
            plain = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
            return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": WHITESPACE}), plain
        case "choice":
            texts = ["".join("\\" + c if c in _META else c for c in text) for text in json.loads(grammar.text)]
            return LLMatcher.grammar_from_regex("|".join(f"(?:{text})" for text in texts)), None
        case "regex" | "lark" | "gbnf" as kind:
            return grammar_from(kind, grammar.text), None
    raise AssertionError(grammar.kind)


def n_together(grammar: Grammar) -> int:
    """How many expressions a text may have to match at a time, at most."""
    if grammar.kind in ("lark", "gbnf"):
        return grammar.text.count("&") + grammar.text.count("~")
    if grammar.kind != "json_schema":
        return 0
    names: list[str] = []
    json.loads(grammar.text, object_pairs_hook=lambda pairs: names.extend(name for name, _ in pairs))
    return names.count("pattern") + names.count("format") if "allOf" in names else 0


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper

    class Bytes:
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
        tokens = (*tuple(bytes([byte]) for byte in range(256)), b"<end>")

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(Bytes()))


def _matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))
    if matcher.is_error():
        raise GrammarError(f"grammar: {_first_line(matcher.get_error())}")
    return matcher


def _first_line(error: object) -> str:
    return str(error).strip().split("\n")[0][:300]


@dataclass(slots=True)
class Habit:
    """How the model sets JSON: as in its latest text."""

    habits: Habits = field(default_factory=Habits)


class Outline:
    """Where a text stands in its schema, whatever blanks it has, and how it will go on as far as the schema says so."""

    def __init__(self, matcher: LLMatcher, habit: Habit, layout: Layout | None = None) -> None:
        self._matcher, self._habit = matcher, habit
        self._layout = Layout(habit.habits) if layout is None else layout
        self._undo: list[tuple[Layout, int]] = []

    def fork(self, *, begins: bool = False) -> Outline:
        """`begins`: at the beginning of a text."""
        return Outline(self._matcher.deep_copy(), self._habit, None if begins else self._layout.copy())

    def feed(self, text: bytes, *, undoable: bool = False) -> bool:
        """The text goes on; False, where the outline cannot follow."""
        before = self._layout.copy() if undoable else self._layout
        plain = list(self._layout.feed(text))
        n = self._matcher.try_consume_tokens(plain) if plain else 0
        if undoable:
            self._undo.append((before, n))
        else:
            self._habit.habits = self._layout.habits
        return n == len(plain)

    def back(self) -> None:
        self._layout, n = self._undo.pop()
        if n:
            self._matcher.rollback(n)

    def foreseen(self) -> bytes:
        plain = self._matcher.compute_ff_bytes()
        return self._layout.lay_out(plain) if plain else b""


class Matching:
    """Where a text stands (a `batch.grammar.Constraint`)."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, outline: Outline | None) -> None:
        self._tokenizer, self._matcher, self._outline = tokenizer, matcher, outline
        self._mask: np.ndarray | None = None
        self._begins = True

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
        self._mask, self._begins = None, False
        if not self._matcher.consume_token(token):
            raise GrammarError(f"grammar: token {token} may not come here: {_first_line(self._matcher.get_error())}")
        if self._outline is not None and not self._outline.feed(self._tokenizer.decode_bytes([token])):
            self._outline = None

    def fork(self) -> Matching:
        other = Matching(self._tokenizer, self._matcher.deep_copy(), self._outline and self._outline.fork(begins=self._begins))
        other._mask, other._begins = self._mask, self._begins
        return other

    def walker(self) -> MatchingWalker:
        return MatchingWalker(self._tokenizer, self._matcher.deep_copy(), self._outline and self._outline.fork())


class MatchingWalker:
    """Runs ahead of a text (a `batch.grammar.Walker`)."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, outline: Outline | None) -> None:
        self._tokenizer, self._matcher, self._outline = tokenizer, matcher, outline
        self._strayed = 0
        """Steps since the outline could not follow."""

    def step(self, token: int) -> bool:
        if not self._matcher.try_consume_tokens([token]):
            return False
        if self._outline is not None:
            if self._strayed:
                self._strayed += 1
            elif not self._outline.feed(self._tokenizer.decode_bytes([token]), undoable=True):
                self._strayed = 1
        return True

    def back(self) -> None:
        self._matcher.rollback(1)
        if self._outline is not None:
            self._strayed = max(self._strayed - 1, 0)
            if not self._strayed:
                self._outline.back()

    def foreseen(self) -> list[tuple[int, float]]:
        if self._outline is not None and not self._strayed and (text := self._outline.foreseen()):
            tokens = self._tokenizer.tokenize_bytes(text)
            return [(token, LIKELY) for token in tokens[:-1]] + [(tokens[-1], LAST)]
        return [(token, 1.0) for token in self._matcher.compute_ff_tokens()]

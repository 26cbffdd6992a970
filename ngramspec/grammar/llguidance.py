"""Grammars over an engine's vocabulary, by the library llguidance: compiled, and followed token by token.

A `Grammar` enters, a `Constraint` at the beginning of a text leaves. It is compiled in the thread of whoever asks, once it was
tried (`trial`). Knows tokenizers and nothing of models, drafts or requests.
"""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ngramspec.errors import GrammarError
from ngramspec.grammar.base import Grammar
from ngramspec.grammar.compiler_pool import GrammarCompilerPool
from ngramspec.grammar.compiling import check_forced, first_line, get_byte_tokenizer, make_matcher
from ngramspec.grammar.json_layout import Habits, Layout
from ngramspec.tokenizer.encode import Encoding

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

PER_TENANT, KEPT = 32, 128
"""Compiled grammars that are kept for later requests: of one tenant, and of all. Some take megabytes."""
_LETTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_LETTER + f"{{1,{n}}}" for n in (5, 10, 16, 30)), _LETTER + "+"]
"""Tokens that a mask has all of or looks at one by one: llguidance's own, but finer. A string near its greatest length has many of them."""
FORESEEN = 1024
"""Bytes, or tokens, that a grammar foresees at most: some 256 tokens, and no draft is deeper."""
MAX_LOOKAHEAD = 4096
"""Bytes of forced text after which a walk ahead of one text in one step looks no further: some 5 ms."""
LIKELY, LAST = 0.95, 0.7
"""The chance of a token that a schema foresees in the text's layout, and of the last one, which may be longer than what is foreseen."""


class Grammars:
    """All grammars of an engine, by tenant: how fast a grammar compiles tells nobody what others have asked for. From any thread."""

    def __init__(self, encoding: Encoding, eos_token_ids: Sequence[int]) -> None:
        self._encoding, self._eos = encoding, list(eos_token_ids)
        self._compiled: OrderedDict[tuple[str, Grammar], Matching] = OrderedDict()
        """Least recently used first."""
        self._lock = threading.Lock()
        self._compilers = GrammarCompilerPool(self._get_vocabulary)

    def compile(self, grammar: Grammar, tenant: str | None = "") -> Matching:
        """Return a text that follows the grammar, at its beginning; `fork` it. A new grammar takes up to seconds.

        It is kept for requests of the same tenant; for none if `tenant` is None. Raises GrammarError.
        """
        if tenant is None:
            return self._compile(grammar, Habit())
        key = tenant, grammar
        with self._lock:
            if (known := self._compiled.get(key)) is not None and known.usable:
                self._compiled.move_to_end(key)
                return known
            habit = next((made.habit for (other, _), made in reversed(self._compiled.items()) if other == tenant), Habit())
        made = self._compile(grammar, habit)
        with self._lock:
            self._compiled[key] = made
            self._compiled.move_to_end(key)
            self._evict(tenant)
        return made

    def _evict(self, tenant: str) -> None:
        """Drop a tenant's oldest grammar beyond its share, and beyond all shares that of the tenant that has most."""
        counts = Counter(other for other, _ in self._compiled)
        if counts[tenant] > PER_TENANT or len(self._compiled) > KEPT:
            owner = tenant if counts[tenant] > PER_TENANT else counts.most_common(1)[0][0]
            del self._compiled[next(key for key in self._compiled if key[0] == owner)]

    def close(self) -> None:
        """End what compiles. Any number of times; it starts again when it is wanted."""
        self._compilers.close()

    def _compile(self, grammar: Grammar, habit: Habit) -> Matching:
        self._compilers.prepare()  # starts while the tokenizer is made
        tokenizer = self._tokenizer
        source, plain = self._compilers.translate(grammar)
        outline = None if plain is None else Outline(make_matcher(get_byte_tokenizer(), plain), habit)
        made = Matching(tokenizer, lambda: make_matcher(tokenizer, source), outline, habit)
        made.fork().mask()  # raises where nothing can be written at all
        return made

    def _get_vocabulary(self) -> tuple[int, dict[int, str], Sequence[int]]:
        special = {i: token.content for i, token in self._backend.get_added_tokens_decoder().items()}
        return self._n_vocab, special, self._eos

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(self._backend.to_str(), n_vocab=self._n_vocab, eos_token=self._eos or None, slices=SLICES)

    @cached_property
    def _n_vocab(self) -> int:
        return max(self._encoding.vocab_size, max(self._backend.get_vocab(with_added_tokens=True).values(), default=0) + 1)

    @cached_property
    def _backend(self) -> Any:
        if importlib.util.find_spec("llguidance") is None:
            raise GrammarError(
                "a grammar needs the package llguidance, which is not installed here. Install it with:\n  pip install 'llguidance>=1.9,<2'"
            )
        backend = copy.copy(self._encoding.backend("a grammar"))
        backend.no_padding()
        backend.no_truncation()
        return backend


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
        self.n_computed = 0
        """Bytes of forced text that were computed."""

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
        self.n_computed += len(plain)
        return self._layout.lay_out(plain[:FORESEEN], FORESEEN) if plain else b""


class Matching:
    """Where a text stands (a `grammar.base.Constraint`).

    While a grammar leaves no choice, llguidance computes all bytes up to the next choice for each mask. So the tokens of such a run are
    computed once, at its beginning, and the masks in it are made of them: a run of n tokens takes time in proportion to n, not to n².

    Copies of a matcher share a lexer, which stays in error once any of them (another text, or a look ahead for drafts) exceeds its limits.
    So what fails is tried once more by a new matcher: whether a text exceeds a limit depends on that text alone.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        make: Callable[[], LLMatcher],
        outline: Outline | None,
        habit: Habit,
        *,
        copy_of: Matching | None = None,
    ) -> None:
        """`make`: a matcher at the beginning of a text; `copy_of`: go on where this one is."""
        self._tokenizer, self._make, self._outline, self.habit = tokenizer, make, outline, habit
        self._mask: np.ndarray | None = None
        self._begins = True
        self._tokens: list[int] = []
        """The text."""
        self._forced = deque[int]()
        """What is left of the run of tokens that the text is in."""
        if copy_of is None:
            self._matcher = make()
            self._forced.extend(self._compute_forced())
        else:
            self._matcher = copy_of._matcher.deep_copy()
            self._mask, self._begins = copy_of._mask, copy_of._begins
            self._tokens, self._forced = copy_of._tokens.copy(), copy_of._forced.copy()

    def _compute_forced(self) -> list[int]:
        forced: list[int] = self._unless_limited(lambda: self._matcher.compute_ff_tokens())
        check_forced(self._tokenizer.decode_bytes(forced) if len(forced) > 1 else b"")
        return forced

    def _unless_limited(self, compute: Callable[[], T]) -> T:
        """Return what the matcher computes; if it is in error, what a new one does. Raises GrammarError if that fails as well."""
        result = compute()
        if self._matcher.is_error():
            self._matcher = self._make()
            self._matcher.try_consume_tokens(self._tokens)
            result = compute()
            if self._matcher.is_error():
                raise GrammarError(f"grammar: {first_line(self._matcher.get_error())}")
        return result

    @property
    def usable(self) -> bool:
        """Whether texts can still begin here: the copies of a matcher share a lexer, which stays in error once one exceeds its limits."""
        copied = self._matcher.deep_copy()
        copied.compute_bitmask()
        return not copied.is_error()

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def mask(self) -> np.ndarray:
        if self._mask is None:
            if self._forced:
                mask = np.zeros((self._tokenizer.vocab_size + 31) // 32, np.uint32)
                mask[self._forced[0] // 32] = np.uint32(1 << self._forced[0] % 32)
            else:
                mask = np.frombuffer(self._unless_limited(lambda: self._matcher.compute_bitmask()), np.uint32)
            self._mask = mask
        return self._mask

    def accept(self, token: int) -> None:
        self._mask, self._begins = None, False
        if not self._unless_limited(lambda: self._matcher.try_consume_tokens([token])):
            raise GrammarError(f"grammar: token {token} may not come here")
        self._tokens.append(token)
        if self._forced and self._forced.popleft() != token:
            self._forced.clear()
        if not self._forced and not self._matcher.is_stopped():
            self._forced.extend(self._compute_forced())
        if self._outline is not None and not self._outline.feed(self._tokenizer.decode_bytes([token])):
            self._outline = None

    def fork(self) -> Matching:
        outline = self._outline and self._outline.fork(begins=self._begins)
        return Matching(self._tokenizer, self._make, outline, self.habit, copy_of=self)

    def walker(self) -> MatchingWalker:
        forced = list(islice(self._forced, FORESEEN))
        return MatchingWalker(self._tokenizer, self._matcher.deep_copy(), self._outline and self._outline.fork(), forced)


class MatchingWalker:
    """Runs ahead of a text (a `grammar.base.Walker`)."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, outline: Outline | None, forced: Sequence[int]) -> None:
        """`forced`: the tokens of the run that the text is in, or the first of them."""
        self._tokenizer, self._matcher, self._outline, self._forced = tokenizer, matcher, outline, forced
        self._path: list[int] = []
        """Tokens since the text's end."""
        self._strayed = 0
        """Steps since the outline could not follow."""
        self._n_computed = 0
        """Bytes of forced text that were computed, but for the outline's."""

    def step(self, token: int) -> bool:
        if not self._matcher.try_consume_tokens([token]):
            return False
        self._path.append(token)
        if self._outline is not None:
            if self._strayed:
                self._strayed += 1
            elif not self._outline.feed(self._tokenizer.decode_bytes([token]), undoable=True):
                self._strayed = 1
        return True

    def back(self) -> None:
        self._matcher.rollback(1)
        self._path.pop()
        if self._outline is not None:
            self._strayed = max(self._strayed - 1, 0)
            if not self._strayed:
                self._outline.back()

    def foreseen(self) -> list[tuple[int, float]]:
        depth = len(self._path)
        if depth < len(self._forced) and self._path == self._forced[:depth]:
            return [(token, 1.0) for token in self._forced[depth:]]
        if self._n_computed + (0 if self._outline is None else self._outline.n_computed) >= MAX_LOOKAHEAD:
            return []
        if self._outline is not None and not self._strayed and (text := self._outline.foreseen()):
            tokens = self._tokenizer.tokenize_bytes(text)
            return [(token, LIKELY) for token in tokens[:-1]] + [(tokens[-1], LAST)]
        forced = self._matcher.compute_ff_tokens()
        self._n_computed += len(self._tokenizer.decode_bytes(forced))
        return [(token, 1.0) for token in forced[:FORESEEN]]

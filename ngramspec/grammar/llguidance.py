"""Grammars over an engine's vocabulary, compiled and followed token by token by the library llguidance.

A `Grammar` enters, a `Constraint` at the beginning of a text leaves. It is compiled in the caller's thread, after a child process has
compiled it within its limits (`compiler_pool`). Knows tokenizers and nothing of models, drafts or requests.
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
from ngramspec.grammar.compiler_pool import GrammarCompilerPool
from ngramspec.grammar.compiling import check_forced, explain_error, get_byte_tokenizer, make_matcher
from ngramspec.grammar.constraint import Grammar
from ngramspec.grammar.json_layout import JsonLayout, JsonStyle
from ngramspec.tokenizer.encode import Encoding

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

# Compiled grammars that are kept for later requests, of one tenant and of all. Some take megabytes.
PER_TENANT, KEPT = 32, 128
# Sets of tokens that a mask has all of, or else checks one by one. These are llguidance's own, but finer: a string near its greatest length
# has many of them.
_LETTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_LETTER + f"{{1,{n}}}" for n in (5, 10, 16, 30)), _LETTER + "+"]
MAX_FORCED_DRAFT = 1024  # bytes, or tokens, that a grammar drafts at most: 1024 bytes are about 256 tokens, and no draft is deeper
MAX_LOOKAHEAD = 4096  # bytes of forced text that one lookahead computes at most: about 5 ms
# Probability that the model writes a token that a schema forces in the text's layout, and that it writes the last one, which may be longer.
LAYOUT_CHANCE, LAST_CHANCE = 0.95, 0.7


class Grammars:
    """The compiled grammars of an engine, by tenant, so that compile times do not reveal other tenants' grammars. For any thread."""

    def __init__(self, encoding: Encoding, eos_token_ids: Sequence[int]) -> None:
        self._encoding, self._eos = encoding, list(eos_token_ids)
        self._compiled: OrderedDict[tuple[str, Grammar], GrammarState] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._compilers = GrammarCompilerPool(self._get_vocabulary)

    def compile(self, grammar: Grammar, tenant: str | None = "") -> GrammarState:
        """Return the state of an empty text in the grammar, to be forked. A new grammar takes up to seconds.

        It is kept for requests of the same tenant, or not at all if `tenant` is None. Raises GrammarError.
        """
        if tenant is None:
            return self._compile(grammar, StyleMemory())
        key = tenant, grammar
        with self._lock:
            if (known := self._compiled.get(key)) is not None and known.is_usable:
                self._compiled.move_to_end(key)
                return known
            memory = next((state.memory for (other, _), state in reversed(self._compiled.items()) if other == tenant), StyleMemory())
        state = self._compile(grammar, memory)
        with self._lock:
            self._compiled[key] = state
            self._compiled.move_to_end(key)
            self._evict(tenant)
        return state

    def _evict(self, tenant: str) -> None:
        """Drop a grammar if there are too many: the tenant's oldest beyond its share, else the oldest of the tenant that has most."""
        counts = Counter(other for other, _ in self._compiled)
        if counts[tenant] > PER_TENANT or len(self._compiled) > KEPT:
            owner = tenant if counts[tenant] > PER_TENANT else counts.most_common(1)[0][0]
            del self._compiled[next(key for key in self._compiled if key[0] == owner)]

    def close(self) -> None:
        """End the compiler processes. Can be called any number of times; they start again when needed."""
        self._compilers.close()

    def _compile(self, grammar: Grammar, memory: StyleMemory) -> GrammarState:
        self._compilers.prepare()  # starts while the tokenizer is made
        tokenizer = self._tokenizer
        source, plain = self._compilers.translate(grammar)
        tracker = None if plain is None else JsonLayoutTracker(make_matcher(get_byte_tokenizer(), plain), memory)
        state = GrammarState(tokenizer, lambda: make_matcher(tokenizer, source), tracker, memory)
        state.fork().mask()  # raises if no text fits the grammar
        return state

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
        backend = copy.copy(self._encoding.get_backend("a grammar"))
        backend.no_padding()
        backend.no_truncation()
        return backend


@dataclass(slots=True)
class StyleMemory:
    """The JSON style of a tenant's latest text, with which its next one is expected to begin."""

    style: JsonStyle = field(default_factory=JsonStyle)


class JsonLayoutTracker:
    """The state of a text in its schema, whatever whitespace it has, and how it must go on."""

    def __init__(self, matcher: LLMatcher, memory: StyleMemory, layout: JsonLayout | None = None) -> None:
        self._matcher, self._memory = matcher, memory
        self._layout = JsonLayout(memory.style) if layout is None else layout
        self._undo: list[tuple[JsonLayout, int]] = []
        self.n_computed = 0
        """Number of bytes of forced text that were computed."""

    def fork(self, *, begins: bool = False) -> JsonLayoutTracker:
        """Return an independent copy; `begins`: for the beginning of another text."""
        return JsonLayoutTracker(self._matcher.deep_copy(), self._memory, None if begins else self._layout.copy())

    def try_consume_bytes(self, text: bytes, *, undoable: bool = False) -> bool:
        """Take the next bytes of the text; return False if they do not fit the schema without whitespace."""
        before = self._layout.copy() if undoable else self._layout
        plain = list(self._layout.remove_whitespace(text))
        n = self._matcher.try_consume_tokens(plain) if plain else 0
        if undoable:
            self._undo.append((before, n))
        else:
            self._memory.style = self._layout.style
        return n == len(plain)

    def undo(self) -> None:
        self._layout, n = self._undo.pop()
        if n:
            self._matcher.rollback(n)

    def get_forced_text(self) -> bytes:
        """Return what the schema forces next, in the text's layout; MAX_FORCED_DRAFT bytes and the rest of a JSON token at most."""
        plain = self._matcher.compute_ff_bytes()
        self.n_computed += len(plain)
        return self._layout.add_whitespace(plain[:MAX_FORCED_DRAFT], MAX_FORCED_DRAFT) if plain else b""


class GrammarState:
    """The state of one text in its grammar (a `grammar.constraint.Constraint`).

    While a grammar leaves no choice, llguidance computes all bytes up to the next choice for each mask. So the tokens of such a run are
    computed once, at its beginning, and the masks in it are made of them: a run of n tokens takes time in proportion to n, not to n².

    Copies of a matcher share a lexer, which stays in error once any of them (another text, or a lookahead) exceeds its limits. So what
    fails is tried once more by a new matcher: whether a text exceeds a limit depends on that text alone.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        make: Callable[[], LLMatcher],
        tracker: JsonLayoutTracker | None,
        memory: StyleMemory,
        *,
        copy_of: GrammarState | None = None,
    ) -> None:
        """`make` returns a matcher at the beginning of a text. `copy_of`: start from this state instead of an empty text."""
        self._tokenizer, self._make, self._tracker, self.memory = tokenizer, make, tracker, memory
        self._mask: np.ndarray | None = None
        self._begins = True
        self._tokens: list[int] = []  # the text
        self._forced = deque[int]()  # the rest of the run of forced tokens that the text is in
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
                raise GrammarError(f"grammar: {explain_error(self._matcher.get_error())}")
        return result

    @property
    def is_usable(self) -> bool:
        """Whether texts can still start from this state: the copies of a matcher share a lexer, which may be in error."""
        copied = self._matcher.deep_copy()
        copied.compute_bitmask()
        return not copied.is_error()

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def is_over(self) -> bool:
        return False

    @property
    def n_spelled(self) -> int:
        return 0

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
        if self._tracker is not None and not self._tracker.try_consume_bytes(self._tokenizer.decode_bytes([token])):
            self._tracker = None

    def fork(self) -> GrammarState:
        tracker = self._tracker and self._tracker.fork(begins=self._begins)
        return GrammarState(self._tokenizer, self._make, tracker, self.memory, copy_of=self)

    def make_lookahead(self) -> GrammarLookahead:
        forced = list(islice(self._forced, MAX_FORCED_DRAFT))
        return GrammarLookahead(self._tokenizer, self._matcher.deep_copy(), self._tracker and self._tracker.fork(), forced)


class GrammarLookahead:
    """Walks ahead of a text (a `grammar.constraint.ConstraintLookahead`)."""

    def __init__(self, tokenizer: LLTokenizer, matcher: LLMatcher, tracker: JsonLayoutTracker | None, forced: Sequence[int]) -> None:
        """Start at the end of a text. `forced`: the rest of the run of forced tokens that it is in, or its first tokens."""
        self._tokenizer, self._matcher, self._tracker, self._forced = tokenizer, matcher, tracker, forced
        self._path: list[int] = []  # tokens since the text's end
        self._n_strayed = 0  # steps since the tracker could not follow
        self._n_computed = 0  # bytes of forced text that were computed, without the tracker's

    def step(self, token: int) -> bool:
        if not self._matcher.try_consume_tokens([token]):
            return False
        self._path.append(token)
        if self._tracker is not None:
            if self._n_strayed:
                self._n_strayed += 1
            elif not self._tracker.try_consume_bytes(self._tokenizer.decode_bytes([token]), undoable=True):
                self._n_strayed = 1
        return True

    def undo(self) -> None:
        self._matcher.rollback(1)
        self._path.pop()
        if self._tracker is not None:
            self._n_strayed = max(self._n_strayed - 1, 0)
            if not self._n_strayed:
                self._tracker.undo()

    def get_forced_tokens(self) -> list[tuple[int, float]]:
        depth = len(self._path)
        if depth < len(self._forced) and self._path == self._forced[:depth]:
            return [(token, 1.0) for token in self._forced[depth:]]
        if self._n_computed + (0 if self._tracker is None else self._tracker.n_computed) >= MAX_LOOKAHEAD:
            return []
        if self._tracker is not None and not self._n_strayed and (text := self._tracker.get_forced_text()):
            tokens = self._tokenizer.tokenize_bytes(text)
            return [(token, LAYOUT_CHANCE) for token in tokens[:-1]] + [(tokens[-1], LAST_CHANCE)]
        forced = self._matcher.compute_ff_tokens()
        self._n_computed += len(self._tokenizer.decode_bytes(forced))
        return [(token, 1.0) for token in forced[:MAX_FORCED_DRAFT]]

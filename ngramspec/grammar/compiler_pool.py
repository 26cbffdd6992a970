"""Grammars are compiled in child processes first, since compiling one that takes too long cannot be stopped otherwise.

A `Grammar` enters; its form for llguidance leaves, which is then known to compile in time. Knows the names of control tokens, no tokenizer.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ngramspec.child_process import ChildEndedError, ChildProcess, Message, ProcessPool, answer_messages, limit_memory
from ngramspec.errors import GrammarError
from ngramspec.grammar.compiling import (
    explain_error,
    get_byte_tokenizer,
    make_byte_tokenizer,
    make_matcher,
    probe_forced,
    translate_grammar,
)
from ngramspec.grammar.constraint import Grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

TIMEOUT_S = 2.0  # for compiling one grammar
SHARE_S = 0.5  # the same while other grammars wait
N_PROCESSES = 2  # grammars that are compiled at a time
MEMORY = 2 << 30  # bytes of address space of a child


class GrammarCompilerPool:
    """The child processes that compile grammars over one vocabulary. For any thread."""

    def __init__(
        self,
        get_vocabulary: Callable[[], tuple[int, dict[int, str], Sequence[int]]],
        *,
        timeout_s: float = TIMEOUT_S,
        share_s: float = SHARE_S,
    ) -> None:
        """`get_vocabulary`, called once, returns the number of token ids, control tokens' names by id, and the ids that end a text.

        A child that nobody stops, since its parent was killed, ends by itself after twice `timeout_s`.
        """
        self._get_vocabulary, self._timeout_s = get_vocabulary, timeout_s
        self._setup: Message = {}
        self._pool = ProcessPool(self._start, N_PROCESSES, share_s)

    def prepare(self) -> None:
        """Have a child that waits for work, or will soon. Raises GrammarError."""
        try:
            self._pool.prepare()
        except OSError as error:
            raise _cannot_start(error) from None

    def translate(self, grammar: Grammar) -> tuple[str, str | None]:
        """Return `translate_grammar(grammar)` for a grammar that compiles in time. Raises GrammarError for any other."""
        try:
            answer = self._pool.ask(asdict(grammar), self._timeout_s)
        except OSError as error:
            raise _cannot_start(error) from None
        except ChildEndedError as error:
            why = "ends the compiler" if error.limit_s is None else f"takes more than {error.limit_s:g} s"
            raise GrammarError(f"grammar: compiling it {why}; a smaller one may do") from None
        if "error" in answer:
            raise GrammarError(answer["error"])
        source, plain = answer["sources"]
        return source, plain

    def close(self) -> None:
        """End the children that wait for work. Can be called any number of times; new ones start when needed."""
        self._pool.close()

    def _start(self) -> ChildProcess:
        if not self._setup:
            size, special, ends = self._get_vocabulary()
            self._setup = {"size": size, "special": [*special.items()], "ends": [*ends] or [size - 1], "alarm_s": 2 * self._timeout_s}
        return ChildProcess(__name__, ("ngramspec", "llguidance"), self._setup)


def _cannot_start(error: OSError) -> GrammarError:
    return GrammarError(f"grammar: no process for compiling it can be started: {error}")


# ------------------------------------------------------------------ in the child


def serve() -> None:
    """Compile the grammars that the parent sends as `{"kind", "text"}`; answer `{"sources"}` or `{"error"}`.

    The setup message is `{"size", "special": [[id, name] …], "ends", "alarm_s"}`: a vocabulary with as many tokens and the same control
    tokens takes as long to compile for as the true one, except for computing a mask.
    """
    answer_messages(_make_compiler)


def _make_compiler(setup: Message) -> Callable[[Message], Message]:
    limit_memory(MEMORY)
    names = dict(setup["special"])
    tokenizer, special = make_byte_tokenizer(setup["size"], names, setup["ends"]), {name: i for i, name in names.items()}
    get_byte_tokenizer()

    def compile_message(message: Message) -> Message:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, setup["alarm_s"])  # SIGALRM ends the process
        try:
            return _compile(Grammar(**message), tokenizer, special)
        finally:
            if hasattr(signal, "setitimer"):
                signal.setitimer(signal.ITIMER_REAL, 0)

    return compile_message


def _compile(grammar: Grammar, tokenizer: LLTokenizer, special: Mapping[str, int]) -> Message:
    try:
        source, plain = translate_grammar(grammar, special)
        matcher = make_matcher(tokenizer, source)
        matcher.compute_bitmask()
        probe_forced(matcher)
        if plain is not None:
            make_matcher(get_byte_tokenizer(), plain)
    except GrammarError as error:
        return {"error": str(error)}
    except BaseException as error:  # a panic of llguidance is no Exception
        return {"error": f"grammar: {explain_error(error)}"}
    return {"sources": [source, plain]}

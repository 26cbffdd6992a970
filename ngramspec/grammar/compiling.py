"""Grammars in the form of llguidance, and compiled by it.

A `Grammar` enters, llguidance's own form and its matchers leave. `serve` does this for another process, which can end it, and only to see
that it ends by itself; so nothing is imported here that takes time. Knows nothing of texts, drafts or requests.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ngramspec.errors import GrammarError
from ngramspec.grammar.base import Grammar
from ngramspec.grammar.gbnf import parse
from ngramspec.grammar.gbnf_lark import to_lark
from ngramspec.grammar.json_schema import OPTIONS, WHITESPACE, prepare_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS: dict[str, Any] = {"max_items_in_row": 2000, "step_max_items": 50_000, "step_lexer_fuel": 200_000, "max_grammar_size": 100_000}
"""A mask within them takes some 20 ms at the very most; beyond, the request ends with a GrammarError."""
MEMORY = 2 << 30
"""Of a process that compiles for another."""
MAX_FORCED = 1 << 14
"""Bytes in a row that a grammar may leave no choice about. llguidance computes them at once, 1 to 2 ms a KiB, in the thread that steps."""
MAX_PROBES = 500
"""Bytes with which a trial goes on to find longer ones: some 10 ms."""
_NO_TOKENS: Mapping[str, int] = MappingProxyType({})
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


def sources(grammar: Grammar, special: Mapping[str, int] = _NO_TOKENS) -> tuple[str, str | None]:
    """llguidance's own form, and for JSON that of the same without blanks between words. `special`: the control tokens that GBNF may name.

    Raises GrammarError.
    """
    try:
        return _sources(grammar, special)
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"grammar: {first_line(error)}") from None


def _sources(grammar: Grammar, special: Mapping[str, int]) -> tuple[str, str | None]:
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_schema" | "json_object":
            schema = prepare_schema(json.loads(grammar.text or '{"type": "object"}'))
            flexible: Any = {"whitespace_pattern": WHITESPACE, **OPTIONS}
            plain: Any = {"whitespace_flexible": False, **OPTIONS}
            make = LLMatcher.grammar_from_json_schema
            return make(schema, overrides=flexible), make(schema, overrides=plain)
        case "choice":
            given = json.loads(grammar.text)
            for text in given:
                check_forced(text.encode())
            texts = ["".join("\\" + c if c in _META else c for c in text) for text in given]
            return LLMatcher.grammar_from_regex("|".join(f"(?:{text})" for text in texts)), None
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text), None
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text), None
        case "gbnf":
            return LLMatcher.grammar_from_lark(to_lark(parse(grammar.text), special)), None
    raise AssertionError(grammar.kind)


def check_forced(text: bytes) -> None:
    """Raise GrammarError if a grammar leaves no choice about too many bytes in a row."""
    if len(text) > MAX_FORCED:
        raise GrammarError(f"grammar: at most {MAX_FORCED} bytes in a row may be without a choice, got {len(text)}: {text[:40]!r}…")


def probe_forced(matcher: LLMatcher) -> None:
    """Check what a grammar over bytes forces at its beginning and after its first choices. Raises GrammarError.

    Tries each byte that may come, nearest choices first, until MAX_PROBES are tried.
    """
    pending, n_probes = deque([matcher]), 0
    while pending and n_probes < MAX_PROBES:
        at = pending.popleft()
        forced = at.compute_ff_bytes()
        check_forced(forced)
        if at.is_error() or at.try_consume_tokens(list(forced)) < len(forced):
            continue
        mask, kinds = at.compute_bitmask(), set[bytes]()
        if at.is_error() or at.is_stopped():
            continue
        for byte in (byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1):
            n_probes += 1
            ahead = at.deep_copy()
            if ahead.try_consume_tokens([byte]) and (kind := ahead.compute_bitmask()) not in kinds:
                kinds.add(kind)  # bytes after which the same may come, as those of a class, need no probes of their own
                pending.append(ahead)


def matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """A text that follows the grammar in llguidance's form, at its beginning. Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    made = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))
    if made.is_error():
        raise GrammarError(f"grammar: {first_line(made.get_error())}")
    return made


@cache
def byte_tokens() -> LLTokenizer:
    """A vocabulary of bytes."""
    return _tokens(257, {256: "<end>"}, [256])


def _tokens(size: int, special: Mapping[int, str], ends: Sequence[int]) -> LLTokenizer:
    """A vocabulary of so many tokens: bytes, control tokens by their names, and nothing."""
    from llguidance import LLTokenizer, TokenizerWrapper

    names = [bytes([i]) if i < 256 else b"" for i in range(size)]
    for i, name in special.items():
        names[i] = name.encode()

    class Tokens:
        eos_token_id, bos_token_id, special_token_ids, tokens = ends[0], None, tuple(special), tuple(names)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(Tokens()), eos_token=list(ends))


def first_line(error: object) -> str:
    return str(error).strip().split("\n")[0][:300]


def serve() -> None:
    """Compile for another process until it closes standard input; each line is JSON.

    The first to come: `{"size", "special": [[id, name] …], "ends", "seconds"}`, answered by `{}`; then `{"kind", "text"}`, answered by
    `{"sources"}` or `{"error"}`. Over a vocabulary of as many tokens with the same names compiling takes what it takes over the true one,
    but for a mask. What takes more than `seconds` ends the process, since whoever could may
    have been killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    first = json.loads(sys.stdin.readline())
    tokens, special = _tokens(first["size"], dict(first["special"]), first["ends"]), {name: i for i, name in first["special"]}
    byte_tokens()
    print("{}", flush=True)
    for line in sys.stdin:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, first["seconds"])
        print(json.dumps(_tried(Grammar(**json.loads(line)), tokens, special)), flush=True)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _tried(grammar: Grammar, tokens: LLTokenizer, special: Mapping[str, int]) -> dict[str, Any]:
    try:
        source, plain = sources(grammar, special)
        made = matcher(tokens, source)
        made.compute_bitmask()
        probe_forced(made)
        if plain is not None:
            matcher(byte_tokens(), plain)
    except GrammarError as error:
        return {"error": str(error)}
    except BaseException as error:  # a panic of llguidance is no Exception
        return {"error": f"grammar: {first_line(error)}"}
    return {"sources": [source, plain]}

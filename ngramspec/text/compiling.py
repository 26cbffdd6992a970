"""Grammars in the form of llguidance, and compiled by it.

A `Grammar` enters, llguidance's own form and its matchers leave. `serve` does this for another process, which can end it, and only to see
that it ends by itself; so nothing is imported here that takes time. Knows nothing of texts, drafts or requests.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ngramspec.batch.errors import GrammarError
from ngramspec.batch.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS: dict[str, Any] = {"max_items_in_row": 2000, "step_max_items": 50_000, "step_lexer_fuel": 200_000, "max_grammar_size": 100_000}
"""A step within them takes some tens of milliseconds at the very most."""
MEMORY = 2 << 30
"""Of a process that compiles for another."""
MOST_AT_ONCE = 6
"""Expressions that one text must match together. llguidance takes time that is exponential in their number, and counts none of it."""
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Between the words of JSON, or nothing: as llama.cpp has it. With no bound, a model can go on with blanks for ever."""
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


def sources(grammar: Grammar) -> tuple[str, str | None]:
    """llguidance's own form, and for JSON that of the same without blanks between words. Raises GrammarError."""
    try:
        return _sources(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"grammar: {first_line(error)}") from None


def _sources(grammar: Grammar) -> tuple[str, str | None]:
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
    tokens = _tokens(first["size"], dict(first["special"]), first["ends"])
    byte_tokens()
    print("{}", flush=True)
    for line in sys.stdin:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, first["seconds"])
        print(json.dumps(_tried(Grammar(**json.loads(line)), tokens)), flush=True)
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)


def _tried(grammar: Grammar, tokens: LLTokenizer) -> dict[str, Any]:
    try:
        source, plain = sources(grammar)
        matcher(tokens, source).compute_bitmask()
        if plain is not None:
            matcher(byte_tokens(), plain)
    except GrammarError as error:
        return {"error": str(error)}
    except BaseException as error:  # a panic of llguidance is no Exception
        return {"error": f"grammar: {first_line(error)}"}
    return {"sources": [source, plain]}

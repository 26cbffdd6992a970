"""Translates a `Grammar` to the form of llguidance and compiles it to a matcher.

Child processes do this, too (`compiler_pool`), so nothing that takes long is imported here. Knows nothing of drafts or requests.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ngramspec.errors import GrammarError
from ngramspec.grammar.constraint import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Limits of llguidance's parser. A mask within them takes 20 ms at most (measured); beyond them the request ends with a GrammarError.
LIMITS: dict[str, Any] = {"max_items_in_row": 2000, "step_max_items": 50_000, "step_lexer_fuel": 200_000, "max_grammar_size": 100_000}
# Most bytes in a row that a grammar may force. llguidance computes them at once, 1 to 2 ms a KiB, in the thread that steps.
MAX_FORCED = 1 << 14
MAX_PROBES = 500  # bytes that `probe_forced` tries: about 10 ms
_NO_TOKENS: Mapping[str, int] = MappingProxyType({})
_META = frozenset(r"\.+*?()|[]{}^$#&-~")


def translate_grammar(grammar: Grammar, special: Mapping[str, int] = _NO_TOKENS) -> tuple[str, str | None]:
    """Return the grammar in llguidance's form and, for JSON, the same without whitespace between JSON tokens.

    `special`: ids of the control tokens that GBNF may name. Raises GrammarError.
    """
    try:
        return _translate(grammar, special)
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"grammar: {explain_error(error)}") from None


def _translate(grammar: Grammar, special: Mapping[str, int]) -> tuple[str, str | None]:
    from llguidance import LLMatcher

    from ngramspec.grammar.gbnf import parse  # as the next ones, not needed to start
    from ngramspec.grammar.gbnf_lark import to_lark
    from ngramspec.grammar.json_schema import OPTIONS, WHITESPACE, prepare_schema

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


def make_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar in llguidance's form. Returns the matcher at the beginning of a text. Raises GrammarError."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))
    if matcher.is_error():
        raise GrammarError(f"grammar: {explain_error(matcher.get_error())}")
    return matcher


@cache
def get_byte_tokenizer() -> LLTokenizer:
    """Return a vocabulary of the 256 bytes and an end."""
    return make_byte_tokenizer(257, {256: "<end>"}, [256])


def make_byte_tokenizer(size: int, special: Mapping[int, str], ends: Sequence[int]) -> LLTokenizer:
    """Return a vocabulary of `size` tokens: the bytes, the control tokens `special` by id, and empty tokens."""
    from llguidance import LLTokenizer, TokenizerWrapper

    names = [bytes([i]) if i < 256 else b"" for i in range(size)]
    for i, name in special.items():
        names[i] = name.encode()

    class ByteTokens:
        eos_token_id, bos_token_id, special_token_ids, tokens = ends[0], None, tuple(special), tuple(names)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    return LLTokenizer(TokenizerWrapper(ByteTokens()), eos_token=list(ends))


def explain_error(error: object) -> str:
    """Return an error of llguidance in one line of 300 characters at most: its first, and the reason that its parser of regular expressions
    has lines below."""
    text = str(error).strip()
    if "NoExtensionBias" in text:
        return "no text follows it; a reference to itself needs a way to end"
    first = text.split("\n")[0][:300]
    reason = re.search(r"^error: (.*)", text, re.MULTILINE)
    return f"{first} {reason[1]}"[:300] if reason else first

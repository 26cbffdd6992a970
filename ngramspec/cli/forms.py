"""What a text must look like, as the command line has it: a file or the text itself enters, a `Grammar` leaves. Compiles nothing."""

from __future__ import annotations

from collections.abc import Callable

from ngramspec.cli.common import BadInputError, check_text, read_file
from ngramspec.datastore.cache_dir import expand_home
from ngramspec.errors import GrammarError
from ngramspec.grammar.base import Grammar


def make_grammar(grammar: str | None, json_schema: str | None) -> Grammar | None:
    """Return what --grammar or --json-schema say; None of neither. Raises BadInputError, which names the option."""
    if grammar is not None and json_schema is not None:
        raise BadInputError("give either --grammar or --json-schema, not both: a text has one form")
    if json_schema is not None:
        text, origin = _read(json_schema, "--json-schema")
        return _make_grammar(Grammar.json_schema, text, f"--json-schema: {origin}")
    if grammar is None:
        return None
    text, origin = _read(grammar, "--grammar")
    return _make_grammar(Grammar.written, text, f"--grammar: {origin}")


def _read(given: str, option: str) -> tuple[str, str]:
    """(the text, where it is from)"""
    check_text(given, option)
    try:
        is_file = expand_home(given).exists()
    except (OSError, ValueError):  # no path: too long, or with a NUL
        is_file = False
    if is_file:
        return read_file(expand_home(given), option), given
    shown = given if len(given) <= 40 else f"{given[:40]}…"
    return given, f"{shown!r}, of which there is no file,"


def _make_grammar(make: Callable[[str], Grammar], text: str, origin: str) -> Grammar:
    try:
        return make(text)
    except GrammarError as error:
        raise BadInputError(f"{origin} cannot be used: {error}") from error

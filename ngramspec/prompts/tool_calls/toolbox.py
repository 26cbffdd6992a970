"""The tools that a request lets the model call: what the prompt says of them, and what holds the text to them.

Checked declarations enter, a `Toolbox` leaves, which makes the grammar of the text and the reader of its calls. Knows neither requests nor
templates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jsonschema_rs

from ngramspec.errors import GrammarError, InvalidInputError
from ngramspec.grammar.base import Grammar
from ngramspec.prompts.tool_calls.call_formats import CallFormat, Tool, make_call_grammar
from ngramspec.prompts.tool_calls.call_scanner import KnownTools

SEEK_S = 1.0  # for finding the tool whose parameters are at fault
REGEX_BYTES = 1 << 20  # of a compiled pattern in a tool's schema


@dataclass(frozen=True)
class Toolbox:
    """The tools that a request lets the model call."""

    tools: tuple[Tool, ...] = ()
    """The tools that may be called."""
    prompt_tools: tuple[dict[str, Any], ...] = ()
    """The tools that the prompt describes, in the form of OpenAI's chats."""
    required: bool = False
    """The model must call a tool."""
    several: bool = True
    """The model may make more than one call."""

    @cached_property
    def known(self) -> KnownTools:
        """The tools as a `CallReader` knows them."""
        schemas = {tool.name: tool.parameters for tool in self.tools}
        return KnownTools(schemas, frozenset(tool.name for tool in self.tools if tool.strict), _ArgumentValidators(schemas).fits)

    def make_grammar(self, form: CallFormat, added: Mapping[str, int], otherwise: Grammar | None) -> Grammar | None:
        """Return the grammar of a text that may call tools; None if it needs none. Raises InvalidInputError.

        `added`: ids of the vocabulary's added tokens. `otherwise`: the form of an answer that calls nothing.
        """
        if not self.tools:
            return otherwise
        if otherwise is not None and otherwise.kind not in ("json_schema", "json_object"):
            raise InvalidInputError("tools: beside them, the form of an answer must be JSON", param="tools")
        try:
            if self.required or otherwise is not None:
                other = None if self.required else otherwise
                return make_call_grammar(form, self.tools, added, several=self.several, otherwise=other)
            if any(tool.strict for tool in self.tools) or (not self.several and form.trigger):
                return make_call_grammar(form, self.tools, added, several=self.several, free=True)
        except GrammarError as error:
            raise InvalidInputError(f"tools: {error}", param="tools") from None
        return None

    def check_grammar(self, compile_grammar: Callable[[Grammar], object], grammar: Grammar) -> None:
        """Compile the grammar, which takes up to seconds. Raises InvalidInputError that names the tool at fault.

        `compile_grammar` raises GrammarError.
        """
        try:
            compile_grammar(grammar)
        except GrammarError as error:
            deadline = time.monotonic() + SEEK_S
            for i, tool in enumerate(self.tools):
                if time.monotonic() > deadline:
                    break
                try:
                    compile_grammar(Grammar.json_schema({"type": "object"} | tool.parameters))
                except GrammarError as wrong:
                    known = next((k for k, shown in enumerate(self.prompt_tools) if shown["function"]["name"] == tool.name), i)
                    param = f"tools[{known}].function.parameters"
                    raise InvalidInputError(f"{param}: {wrong}", param=param) from None
            raise InvalidInputError(f"tools: {error}", param="tools") from None


class _ArgumentValidators:
    """Checks whether arguments fit the schemas of tools. A schema is compiled at its first use; nothing that it refers to is fetched."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._compiled: dict[str, Any] = {}

    def fits(self, name: str, arguments: Any) -> bool:
        try:
            if name not in self._compiled:
                schema = {"type": "object"} | dict(self._schemas[name])
                options = jsonschema_rs.RegexOptions(size_limit=REGEX_BYTES)  # matches in linear time, whatever the pattern
                self._compiled[name] = jsonschema_rs.validator_for(schema, retriever=_fetch_nothing, pattern_options=options)
            return bool(self._compiled[name].is_valid(arguments))
        except (ValueError, RecursionError):  # no schema that the validator knows, or values nested too deeply
            return False


def _fetch_nothing(uri: str) -> Any:
    raise ValueError(f"schemas refer to themselves alone, got {uri[:100]!r}")

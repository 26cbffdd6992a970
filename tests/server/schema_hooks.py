"""Loaded by schemathesis in test_document: of the requests that are as documented, every other one is made such that it can succeed.

What a schema does not say would else end nearly all of them early: that there is no such model, that a text has half a character, or that
`min_tokens` is more than `max_tokens`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import schemathesis
from schemathesis.specs.openapi import negative

NEEDED = ("prompt", "messages", "input", "input_prefix", "input_suffix", "content", "tokens", "path")
HARMLESS = (
    "n_predict",
    "max_tokens",
    "max_output_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stream",
    "user",
    "model",
    "n_indent",
    "stop",
)


class WholeCharacters:
    """A validator that takes half characters, which are generated, for whole ones; schemathesis's own ends with a UnicodeEncodeError."""

    def __init__(self, validator: Any) -> None:
        self._validator = validator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._validator, name)

    def is_valid(self, value: Any) -> bool:
        try:
            return bool(self._validator.is_valid(value))
        except UnicodeEncodeError:
            whole = re.sub("[\ud800-\udfff]", "\ufffd", json.dumps(value, ensure_ascii=False))
            return bool(self._validator.is_valid(json.loads(whole)))


def take_half_characters(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: WholeCharacters(make(*given))


for maker in ("get_validator", "get_real_validator"):
    setattr(negative, maker, take_half_characters(getattr(negative, maker)))


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    body = case.body
    if case.meta is None or not case.meta.generation.mode.is_positive or not isinstance(body, dict) or len(str(body)) % 2:
        return
    body = {name: value for name, value in body.items() if name in NEEDED + HARMLESS}
    if "completion" in case.operation.path and "chat" not in case.operation.path:
        body["prompt"] = body.get("prompt") or "a"
    if "model" in body:
        body["model"] = os.environ["MODEL"]
    if body.get("messages"):
        body["messages"] = [{"role": "user", "content": str(message.get("content"))} for message in body["messages"]]
    if "input" in body:
        body["input"] = "a"
    case.body = json.loads(re.sub("[\ud800-\udfff]", "", json.dumps(body, ensure_ascii=False)))


@schemathesis.hook
def filter_body(context: schemathesis.HookContext, body: Any) -> bool:
    """Without bodies that are too long for the server, whatever is in them: it says 413, which test_hostile knows and no schema."""
    return len(str(body)) < 1 << 18

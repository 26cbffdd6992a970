"""Bounds of a request, checked before it is handed on: headers and body as bytes, JSON as such, sampling parameters by their sizes.

Bytes and parameters enter, ApiErrors leave. What is within the bounds goes on unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json
from starlette.types import Message, Receive, Scope

from ngramspec.sampling_params import SamplingParams
from ngramspec.server.error_responses import ApiError, ClientGone
from ngramspec.server.settings import Limits

_UNREAD = 8  # times the limit: so much of a body that is too long is read and dropped, for most clients listen only when they have sent it
_BOXES = 1 << 16  # lists and objects of a body; to check the 700,000 that fit in it would take everybody's seconds
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)  # of a string of JSON; every one is read, for a backslash can be escaped itself
_JSON = re.compile(rb"application/(?:[\w.-]+\+)?json\s*(?:;|$)", re.IGNORECASE)


def check_headers(headers: Sequence[tuple[bytes, bytes]], limits: Limits) -> None:
    """Raises ApiError 415, 431."""
    size = sum(len(name) + len(value) + 4 for name, value in headers)
    if size > limits.header_bytes:
        raise ApiError(431, f"the headers take {size} bytes; at most {limits.header_bytes} are read", headers={"Connection": "close"})
    for name, value in headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            shown = value[:40].decode("latin-1")
            raise ApiError(415, f"bodies are read as they are, without Content-Encoding, got {shown!r}", headers={"Connection": "close"})


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The whole body, however it is sent. Raises ApiError 400, 413, and ClientGone."""
    headers = dict(scope["headers"])
    limit = limits.body_bytes
    length = headers.get(b"content-length", b"0")
    declared = int(length) if length.isdigit() and len(length) < 19 else _UNREAD * limit + 1
    if declared > limit and (b"expect" in headers or declared > _UNREAD * limit):
        raise _too_long(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > _UNREAD * limit:
            raise _too_long(limit)
        if size > limit:
            chunks.clear()
        elif chunk:
            chunks.append(chunk)
        if not message.get("more_body", False):
            break
    if size > limit:
        raise _too_long(limit)
    return b"".join(chunks)


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", headers={"Connection": "close"})


def replace_lone_surrogates(raw: bytes) -> bytes:
    """JSON in which halves of surrogate pairs, which are no characters, are U+FFFD: what is left of an emoji that a client cut in two."""
    if b"\\ud" not in raw and b"\\uD" not in raw:
        return raw
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found["lone"] else found[0], raw)


def check_body(scope: Scope, body: bytes, limits: Limits) -> None:
    """That a body is JSON, without NaN, infinities, lone surrogates or deep nesting. Raises ApiError 400, 415."""
    if not body:
        return
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if not _JSON.match(content_type):
        raise ApiError(415, "the body must be JSON, sent with `Content-Type: application/json`")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    level: list[Any] = [value] if isinstance(value, (dict, list)) else []
    n_boxes = 0
    for _ in range(limits.depth):
        level = [
            each for box in level for each in (box.values() if isinstance(box, dict) else box) if type(each) is dict or type(each) is list
        ]
        n_boxes += len(level)
        if n_boxes > _BOXES:
            raise ApiError(400, f"the JSON has more than {_BOXES} lists and objects", code="invalid_json")
        if not level:
            return
    raise ApiError(400, f"the JSON is nested deeper than {limits.depth} levels", code="invalid_json")


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands the body out again, and then what else comes."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class Bounds:
    """The limits on what a request asks the engine for."""

    def __init__(self, limits: Limits, max_model_len: int, vocab_size: int, fewest_tokens: Callable[[str], int] = lambda text: 0) -> None:
        """`fewest_tokens`: a number of tokens that a text has at least."""
        self.limits, self.max_model_len, self.vocab_size = limits, max_model_len, vocab_size
        self.max_prompt = min(max_model_len - 1, max_model_len if limits.prompt_tokens is None else limits.prompt_tokens)
        """Tokens of a prompt."""
        self._fewest_tokens = fewest_tokens

    def check_prompt(self, n_tokens: int, param: str = "prompt", more: str = "") -> None:
        """Raises ApiError 400 for a prompt of so many tokens, or `more`."""
        if n_tokens > self.max_prompt:
            why = f"the prompt has {more}{n_tokens} tokens; this server takes {self.max_prompt}"
            raise ApiError(400, why, param=param, code="context_length_exceeded")

    def check_text(self, text: str, param: str = "prompt") -> None:
        """Raises ApiError 400 for a prompt of this text if it is too long however it is tokenized. Takes milliseconds."""
        if 4 * len(text) > self.max_prompt:  # a character has up to 4 bytes, and a byte is at most a token
            self.check_prompt(self._fewest_tokens(text), param, "at least ")

    def check(self, params: SamplingParams, n_prompts: int = 1) -> None:
        """Raises ApiError 400 for parameters that are valid and too much."""
        limits = self.limits
        each = min(params.max_tokens, self.max_model_len)
        self._most("max_tokens", params.n * n_prompts * each, limits.output_tokens, "tokens of all texts together")
        self._most("logprobs", max(params.logprobs or 0, params.prompt_logprobs or 0), limits.logprobs, "logprobs")
        self._most("stop", len(params.stop), limits.stops, "stop strings")
        self._most("stop", max(map(len, params.stop), default=0), limits.stop_chars, "characters of a stop string")
        self._most("stop_token_ids", len(params.stop_token_ids), limits.bias, "stop_token_ids")
        self._most("logit_bias", len(params.logit_bias), limits.bias, "entries of logit_bias")

    def _most(self, param: str, asked: int, most: int, what: str) -> None:
        if asked > most:
            raise ApiError(400, f"{param}: at most {most} {what}, got {asked}", param=param)
